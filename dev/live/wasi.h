/* What the headers of dev/data/builtin_corpus.c need from the system and WASI lacks. The program calls none of it. */
#include <stddef.h>
#include <sys/types.h>
#define RLIMIT_NOFILE 0
struct rlimit {
    unsigned long rlim_cur, rlim_max;
};
static inline int getrlimit(int kind, struct rlimit* limit) { return kind + (limit == NULL) - 1; }
static inline int setrlimit(int kind, const struct rlimit* limit) { return kind + (limit == NULL) - 1; }
static inline ssize_t copy_file_range(int from, off_t* at, int to, off_t* out, size_t n, unsigned flags) {
    return (void)from, (void)at, (void)to, (void)out, (void)n, (void)flags, -1;
}
