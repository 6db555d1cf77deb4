/* The harness of the C tests: a case prints one line, and the totals come last.
 *
 *   ok   NAME            FAIL NAME: why
 *   N passed, N failed
 *
 * main() calls tests_open(), then the tests, and returns tests_close(). A case is one call of expect(), or everything
 * between case_begin() and case_end(), which passes if no EXPECT() in it fails. */
#ifndef DEV_TEST_TESTS_H
#define DEV_TEST_TESTS_H

#include "dev/test/child.h"
#include "llmc/base/util.h"

typedef struct {
    int passed, failed;
    const char* only;     // show the cases whose name contains this; NULL: all
    const char* program;  // which repeats one of them, given its name; NULL: it takes no names
    char* directory;      // for the files of the tests; NULL: none
    const char* name;     // of the case between case_begin() and case_end()
    int is_bad;           // that case has failed
} Tests;

__attribute__((format(printf, 4, 0))) static inline void tests_print(Tests* t, int good, const char* name,
                                                                     const char* format, va_list why) {
    if (t->only && !strstr(name, t->only)) return;
    t->passed += good, t->failed += !good;
    printf("%s %s", good ? "ok  " : "FAIL", name);
    if (!good && format) {
        printf(": ");
        vprintf(format, why);
        if (t->program) printf("; alone: %s '%s'", t->program, name);
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
static inline void expect_that(Tests* t, int good, const char* name) { expect(t, good, name, "does not hold"); }

// The name of a case, which the third call from here overwrites.
__attribute__((format(printf, 1, 2))) static inline const char* named(const char* format, ...) {
    static char names[3][1024];
    static int at;
    va_list values;
    at = (at + 1) % 3;
    va_start(values, format);
    vsnprintf(names[at], sizeof names[at], format, values);
    va_end(values);
    return names[at];
}

// ---------------------------------------------------------------------------------------------------------
// A case of many checks

static inline void case_begin(Tests* t, const char* name) {
    t->name = name;
    t->is_bad = 0;
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

// Integers, of which a failure shows both.
#define EXPECT_EQ(t, got, want)                                                                                        \
    do {                                                                                                               \
        long long is_ = (long long)(got), due_ = (long long)(want);                                                    \
        if (is_ != due_) fail(t, "line %d: %s is %lld, not %lld", __LINE__, #got, is_, due_);                          \
    } while (0)

#define EXPECT_TEXT(t, got, want)                                                                                      \
    do {                                                                                                               \
        const char *is_ = (got), *due_ = (want);                                                                       \
        if (strcmp(is_, due_) != 0) fail(t, "line %d: %s is\n%s\nnot\n%s", __LINE__, #got, is_, due_);                 \
    } while (0)

#define EXPECT_NEAR(t, got, want, tolerance)                                                                           \
    do {                                                                                                               \
        double is_ = (got), due_ = (want);                                                                             \
        if (!(fabs(is_ - due_) <= (tolerance))) fail(t, "line %d: %s is %.12g, not %.12g", __LINE__, #got, is_, due_); \
    } while (0)

static inline void case_end(Tests* t) {
    if (!t->is_bad) expect_that(t, 1, t->name);
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

// Write such a file, which needs not survive a power cut. Returns its path (caller frees).
static inline char* put_file(const Tests* t, const char* name, const void* bytes, size_t n) {
    char* path = path_in(t, name);
    FILE* file = fopen(path, "wb");
    if (!file || fwrite(bytes, 1, n, file) != n || fclose(file) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    return path;
}

static inline char* put_text_file(const Tests* t, const char* name, const char* text) {
    return put_file(t, name, text, strlen(text));
}

// ---------------------------------------------------------------------------------------------------------
// Readers of files: one good file, and what the reader says after each change

// One case: run(file) in a child process ends with `status` and says `message` (NULL: anything). A refusal is one line
// that names the file. Status -1: it is read or refused.
static inline void expect_end(Tests* t, int status, const char* name, const char* message, void (*run)(const char*),
                              const char* file) {
    char* why;
    int good = ends_with(status, message, run, file, &why);
    expect(t, good, name, "%s", why);
    free(why);
}

// A change of a binary file, and the end of the line that refuses it; NULL: it is read.
typedef struct {
    const char* name;
    int at, width;  // the integer of `width` bytes that becomes `value`; width 0: none
    int64_t value;
    int extra;  // zero bytes that follow the file's end; below 0: bytes that are missing there
    const char* message;
} FileChange;

static inline void expect_changes(Tests* t, const Text* good, const char* file, const FileChange* changes, size_t count,
                                  void (*run)(const char*)) {
    for (size_t i = 0; i < count; i++) {
        const FileChange* c = &changes[i];
        char* bytes = (char*)xcalloc(good->length + (size_t)max_int(c->extra, 0), 1);
        memcpy(bytes, good->text, good->length);
        memcpy(bytes + c->at, &c->value, (size_t)c->width);
        char* path = put_file(t, file, bytes, (size_t)((int64_t)good->length + c->extra));
        expect_end(t, c->message ? USAGE : DONE, named("%s: %s", file, c->name), c->message, run, path);
        free(bytes), free(path);
    }
}

// The same of a text: the first `old` in it becomes `now`.
typedef struct {
    const char *old, *now, *message;
} TextChange;

// put(t, text) writes the changed text as a file, and returns what run() is given (caller frees).
static inline void expect_text_changes(Tests* t, const char* reader, const char* good, const TextChange* changes,
                                       size_t count, char* (*put)(const Tests*, const char*),
                                       void (*run)(const char*)) {
    for (size_t i = 0; i < count; i++) {
        const TextChange* c = &changes[i];
        const char* at = strstr(good, c->old);
        CHECK(at);
        char* text = xprintf("%.*s%s%s", (int)(at - good), good, c->now, at + strlen(c->old));
        char* path = put(t, text);
        expect_end(t, c->message ? USAGE : DONE, named("%s: '%s' as '%s'", reader, c->old, c->now), c->message, run,
                   path);
        free(text), free(path);
    }
}

// One case: whichever byte of the first `n` is another, and wherever the file ends, it is read or refused.
static inline void expect_any_damage(Tests* t, const Text* good, const char* file, size_t n, void (*run)(const char*)) {
    char *bytes = (char*)xmalloc(good->length), *first = NULL;
    for (size_t i = 0; i < 2 * n && !first; i++) {
        size_t length = i < n ? good->length : i - n;
        memcpy(bytes, good->text, good->length);
        if (i < n) bytes[i] = (char)(bytes[i] ^ (1 << (i * 5 % 8)));
        char *path = put_file(t, file, bytes, length), *why;
        if (!ends_with(-1, NULL, run, path, &why))
            first = xprintf("%s %zu: %s", i < n ? "a change of byte" : "the length", i < n ? i : length, why);
        free(path), free(why);
    }
    expect(t, !first, named("%s: any damage", file), "%s", first ? first : "");
    free(bytes), free(first);
}

// ---------------------------------------------------------------------------------------------------------

// Start without files; set `directory` to make_scratch_directory() for them.
static inline void tests_open(Tests* t) { memset(t, 0, sizeof *t); }

// With arguments of the command line, of which the first names the cases to show.
static inline void tests_choose(Tests* t, int argc, char** argv) {
    tests_open(t);
    t->program = argv[0];
    if (argc > 1) t->only = argv[1];
}

// Delete the files and print the totals. Returns the exit status.
static inline int tests_close(Tests* t) {
    if (t->directory) remove_directory(t->directory);
    free(t->directory);
    printf("%d passed, %d failed\n", t->passed, t->failed);
    return t->failed ? FAILED : DONE;
}

// A case of many checks in a directory of its own.
typedef struct {
    const char* name;
    void (*run)(Tests*);
} TestCase;

// All of main(). An argument that is in no name here is in that of an expect().
static inline int tests_main(int argc, char** argv, const TestCase* cases, size_t count) {
    Tests t;
    int is_known = 0;
    tests_choose(&t, argc, argv);
    for (size_t i = 0; i < count; i++) is_known |= t.only && strstr(cases[i].name, t.only);
    for (size_t i = 0; i < count; i++) {
        if (is_known && !strstr(cases[i].name, t.only)) continue;
        t.directory = make_scratch_directory("test");
        case_begin(&t, cases[i].name);
        cases[i].run(&t);
        case_end(&t);
        remove_directory(t.directory);
        free(t.directory);
    }
    t.directory = NULL;
    return tests_close(&t);
}

// Largest |got - want| / max(1, |want|); infinite where either is not finite.
static inline double largest_error(const real* got, const real* want, size_t n) {
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        double g = (double)got[i], w = (double)want[i], error = fabs(g - w) / fmax(1, fabs(w));
        if (!isfinite(g) || !isfinite(w)) return INFINITY;
        if (!(error <= worst)) worst = error;
    }
    return worst;
}

#endif
