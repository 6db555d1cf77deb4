/* The harness of the C tests: a case prints one line, and the totals come last.
 *
 *   ok   NAME            FAIL NAME: why            skip NAME: why
 *   N passed, N failed, N skipped
 *
 * main() calls tests_open(), then the tests, and returns tests_close(). A case is one call of expect(), or everything
 * between case_begin() and case_end(), which passes if no EXPECT() in it fails. */
#ifndef DEV_TEST_TESTS_H
#define DEV_TEST_TESTS_H

#include "dev/test/child.h"
#include "llmc/base/util.h"

typedef struct {
    int passed, failed, skipped;
    const char* only;  // run the cases whose name contains this; NULL: all
    char* directory;   // for the files of the tests; NULL: none
    const char* name;  // of the case between case_begin() and case_end()
    int is_bad;        // that case has failed
    char* skip;        // why that case cannot run, or NULL
} Tests;

__attribute__((format(printf, 4, 0))) static inline void tests_print(Tests* t, int good, const char* name,
                                                                     const char* format, va_list why) {
    if (t->only && !strstr(name, t->only)) return;
    t->passed += good, t->failed += !good;
    printf("%s %s", good ? "ok  " : "FAIL", name);
    if (!good && format) {
        printf(": ");
        vprintf(format, why);
    }
    putchar('\n');
}

// One case. The format says why it failed.
__attribute__((format(printf, 4, 5))) static inline void expect(Tests* t, int good, const char* name,
                                                                const char* format, ...) {
    va_list why;
    va_start(why, format);
    tests_print(t, good, name, format, why);
    va_end(why);
}

// One case whose name says it all.
static inline void expect_that(Tests* t, int good, const char* name) {
    if (good) expect(t, good, name, "-");
    else expect(t, good, name, "does not hold");
}

// One case that cannot run here.
__attribute__((format(printf, 3, 4))) static inline void skip_case(Tests* t, const char* name, const char* format,
                                                                   ...) {
    va_list why;
    va_start(why, format);
    printf("skip %s: ", name);
    vprintf(format, why);
    putchar('\n');
    t->skipped++;
    va_end(why);
}

// ---------------------------------------------------------------------------------------------------------
// A case of many checks

static inline void case_begin(Tests* t, const char* name) {
    t->name = name;
    t->is_bad = 0;
    t->skip = NULL;
}

// The case has failed. Only its first failure is printed.
__attribute__((format(printf, 2, 3))) static inline void fail(Tests* t, const char* format, ...) {
    va_list why;
    va_start(why, format);
    if (!t->is_bad) tests_print(t, 0, t->name, format, why);
    t->is_bad = 1;
    va_end(why);
}

#define EXPECT(t, condition)                                                                                           \
    do {                                                                                                               \
        if (!(condition)) fail(t, "line %d: %s", __LINE__, #condition);                                                \
    } while (0)

static inline void case_end(Tests* t) {
    if (!t->is_bad && t->skip) skip_case(t, t->name, "%s", t->skip);
    else if (!t->is_bad) expect_that(t, 1, t->name);
    free(t->skip);
}

// ---------------------------------------------------------------------------------------------------------
// Files

// A new directory in TMPDIR or /tmp (caller frees).
static inline char* make_scratch_directory(const char* program) {
    const char* temporary = getenv("TMPDIR");
    char* path = xprintf("%s/%s_XXXXXX", temporary && *temporary ? temporary : "/tmp", program);
    if (!mkdtemp(path)) die(FAILED, "%s: cannot be created: %s", path, strerror(errno));
    return path;
}

// The path of a file in the directory of the tests (caller frees).
static inline char* path_in(const Tests* t, const char* name) { return xprintf("%s/%s", t->directory, name); }

// Write such a file. Returns its path (caller frees).
static inline char* put_file(const Tests* t, const char* name, const void* bytes, size_t n) {
    char* path = path_in(t, name);
    if (write_file(path, bytes, n) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    return path;
}

static inline char* put_text_file(const Tests* t, const char* name, const char* text) {
    return put_file(t, name, text, strlen(text));
}

// ---------------------------------------------------------------------------------------------------------

// Start without files; set `directory` to make_scratch_directory() for them.
static inline void tests_open(Tests* t) { memset(t, 0, sizeof *t); }

// Delete the files and print the totals. Returns the exit status.
static inline int tests_close(Tests* t) {
    if (t->directory) remove_directory(t->directory);
    free(t->directory);
    printf("%d passed, %d failed, %d skipped\n", t->passed, t->failed, t->skipped);
    return t->failed ? FAILED : DONE;
}

#endif
