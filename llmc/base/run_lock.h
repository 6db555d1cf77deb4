/* The lock on a run's directory OUT: only one process may write there.
 *
 * The lock is held on the file OUT/.lock and ends with the process. It belongs to that file, not to its path: after
 * `rm -rf OUT` or `mv OUT elsewhere` the old process still holds it, and a new one can train in a new OUT. So a run calls
 * run_lock_check() between steps, and before a checkpoint appears. */
#ifndef LLMC_BASE_RUN_LOCK_H
#define LLMC_BASE_RUN_LOCK_H

#include <sys/file.h>

#include "llmc/base/util.h"

// Zero: there is nothing to check, as in a run without -o.
typedef struct {
    char* path;   // OUT/.lock; NULL: not taken
    int fd;       // open until run_lock_close()
    int is_lost;  // OUT is no longer this run's; any thread may set it
} RunLock;

// A run prints this once, when run_lock_check() has failed. The argument is OUT.
#define RUN_LOCK_LOST                                                                                                  \
    "%s: was moved, deleted or replaced while the run wrote there; nothing more is written; resume with -y 1 and "     \
    "the -o where its checkpoints are now"

// Take OUT/.lock. `create` is O_CREAT, or 0 to take it only if it exists, which changes nothing on the disk. The file
// is never deleted: otherwise another process could hold a lock on a file that no one else can see.
static inline void run_lock_take(RunLock* l, const char* out, int create) {
    struct stat st;
    char* path = xprintf("%s/.lock", out);
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | create, 0666);
    if (fd < 0 && (create || (errno != ENOENT && errno != ENOTDIR && errno != ENAMETOOLONG)))
        die(errno == ENOSPC ? FAILED : USAGE, "%s: cannot be opened for writing: %s; give another directory with -o",
            path, strerror(errno));
    if (fd < 0) {
        free(path);
        return;
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
        die(USAGE, "%s: is not a regular file; give another directory with -o", path);
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK)
            die(USAGE, "%s: another process is training there; wait until it ends, or give another directory with -o",
                out);
        warn("%s: cannot be locked: %s; make sure that no other process trains there", path, strerror(errno));
    }
    l->path = path, l->fd = fd;
}

// Check that OUT is still this run's directory. Returns 0, or -1 with errno, then in all later calls too. `l` may be
// NULL.
static inline int run_lock_check(RunLock* l) {
    struct stat held, there;
    if (!l || !l->path) return 0;
    int is_there = fstat(l->fd, &held) == 0 && stat(l->path, &there) == 0 && held.st_dev == there.st_dev &&
                   held.st_ino == there.st_ino;
    if (is_there && !__atomic_load_n(&l->is_lost, __ATOMIC_ACQUIRE)) return 0;
    __atomic_store_n(&l->is_lost, 1, __ATOMIC_RELEASE);
    errno = ESTALE;
    return -1;
}

static inline void run_lock_close(RunLock* l) {
    if (l->path) close(l->fd);
    free(l->path);
    memset(l, 0, sizeof *l);
}

#endif
