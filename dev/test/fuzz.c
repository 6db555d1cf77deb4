/* A mutation fuzzer over every reader of files and flags (fuzz_readers.h lists them).
 *
 *     build/san/test_fuzz --inputs 100000 --seconds 240      as `make san` runs it
 *     build/san/test_fuzz --reader json --seed 7             one reader, other draws
 *     build/san/test_fuzz --reader json --replay INPUT       one input: a directory with its files
 *
 * Inputs are made from a few valid ones (fuzz_mutate.h); number n of a reader is a function of (seed, reader, n).
 * Before them, everything in dev/test/corpus/READER/ is read, where each input that was ever a failure is kept.
 *
 * A reader must take an input, and what it makes of it must be sound, or refuse it: with a documented exit status,
 * after lines that begin with "warning: " and one that begins with "error: ", leaving the files of a run as they were.
 * All else is a failure: a signal, a sanitizer's report, an internal check, a file left open, more memory than such a
 * file can need, or five seconds.
 *
 * A child process reads many inputs, because a fork takes longer than most readers do: where the reader ends the
 * program, it returns here by longjmp. Its memory, descriptors and threads end with the child. */
#include "fuzz.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include "fuzz_readers.h"

// From here on they are the system's.
#undef exit
#undef malloc
#undef calloc
#undef realloc

enum { HANG_SECONDS = 5, CHILD_BROKEN = 99, REASON_SIZE = 2048, FAILURES_OF_READER = 5, ROUNDS = 8 };

// What a child tells its parent, in memory that both see.
typedef struct {
    int64_t now;  // the number of the input that is read
    int64_t accepted, refused;
    char reason[REASON_SIZE];  // why the input is a failure
} Told;

typedef struct {
    const Reader* reader;
    Seeds seeds;
    int64_t wanted, next, accepted, refused;
    int kept, failures;  // inputs of the corpus; those that failed, of both kinds
    double seconds;
} Progress;

static struct {
    int64_t inputs, seed;
    double seconds;
    const char *reader, *replay, *corpus;
    char* work;  // the directory that readers work in
    int report;  // what a sanitizer wrote
    Told* told;
} fuzz;

// Of the attempt that runs in this child.
static struct {
    jmp_buf back;
    int is_on, status;
    const Reader* reader;
    char* said;  // on stderr
    size_t said_bytes;
} attempt;

// ---------------------------------------------------------------------------------------------------------
// What readers call

void fuzz_exit(int status) {
    if (!attempt.is_on) exit(status);
    attempt.status = status;
    longjmp(attempt.back, 1);
}

void fuzz_broken(const char* format, ...) {
    va_list args;
    va_start(args, format);
    if (!attempt.reader) {
        fputs("error: ", stderr), vfprintf(stderr, format, args), fputc('\n', stderr);
        exit(FAILED);
    }
    vsnprintf(fuzz.told->reason, REASON_SIZE, format, args);
    va_end(args);
    _exit(CHILD_BROKEN);
}

static void check_request(size_t count, size_t size) {
    size_t bytes;
    if (!attempt.is_on || attempt.reader->most == 0) return;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > attempt.reader->most)
        fuzz_broken("asks for %zu x %zu bytes of memory", count, size);
}

void* fuzz_malloc(size_t n) {
    check_request(n, 1);
    return malloc(n);
}

void* fuzz_calloc(size_t count, size_t size) {
    check_request(count, size);
    return calloc(count, size);
}

void* fuzz_realloc(void* old, size_t n) {
    check_request(n, 1);
    return realloc(old, n);
}

// Memory that a freed block is kept from must not add up over a child's many inputs; what a refused input leaves is no
// leak.
const char* __asan_default_options(void);
const char* __asan_default_options(void) { return "detect_leaks=0:quarantine_size_mb=16:allocator_may_return_null=1"; }

// ---------------------------------------------------------------------------------------------------------
// One attempt, in a child

// Whether what a refusing reader said is lines of warnings and one error.
static void check_said(const char* said, size_t n) {
    const char *at = said, *end = said + n;
    int errors = 0;
    if (n == 0 || end[-1] != '\n') fuzz_broken("refused without a whole line: %.*s", (int)n, said);
    for (const char* next; at < end; at = next) {
        next = (const char*)memchr(at, '\n', (size_t)(end - at)) + 1;
        int is_error = strncmp(at, "error: ", 7) == 0;
        errors += is_error;
        if (!is_error && strncmp(at, "warning: ", 9) != 0) fuzz_broken("says more than a line: %.*s", (int)n, said);
    }
    if (errors != 1) fuzz_broken("says %d errors: %.*s", errors, (int)n, said);
}

// The names and bytes of a directory's files, as one number.
static uint64_t directory_hash(void) {
    Case c;
    uint64_t hash = 0;
    c.count = 0;
    case_read(&c, CASE_DIR, strlen(CASE_DIR "/"));
    for (int i = 0; i < c.count; i++) {
        hash = fnv_update(hash, c.file[i].name, strlen(c.file[i].name) + 1);
        hash = fnv_update(hash, c.file[i].bytes.text, c.file[i].bytes.length);
    }
    case_free(&c);
    return hash;
}

// Close what a reader left open. Returns how many files that were.
static int close_from(int fd) {
    int closed = 0;
    for (int missed = 0; missed < 8; fd++) {
        missed = close(fd) == 0 ? 0 : missed + 1;
        closed += missed == 0;
    }
    return closed;
}

// Read one input; returns whether it was accepted. Does not return where it is a failure.
static int attempt_read(const Case* c, int is_sealed) {
    const Reader* reader = attempt.reader;
    remove_directory(CASE_DIR);
    make_directories(CASE_DIR);
    case_write(c, CASE_DIR);
    if (is_sealed && reader->seal) reader->seal();
    int before = dup(0);
    close(before);
    volatile uint64_t hash = reader->is_run ? directory_hash() : 0;
    volatile int has_ended = 0;
    attempt.status = DONE;
    rewind(stderr);
    alarm(HANG_SECONDS);
    attempt.is_on = 1;
    if (setjmp(attempt.back) == 0) reader->read();
    else has_ended = 1;
    attempt.is_on = 0;
    alarm(0);
    fflush(stderr);
    if (fcntl(0, F_GETFD) < 0) fuzz_broken("closes descriptor 0, which it did not open");
    int left_open = close_from(before);
    if (!has_ended && left_open > reader->is_run) fuzz_broken("leaves %d files open", left_open);
    if (!has_ended || attempt.status == DONE) return 1;
    if (attempt.status != USAGE && !(reader->is_run && attempt.status == STOPPED_BY_NAN))
        fuzz_broken("ends with status %d: %.*s", attempt.status, (int)attempt.said_bytes, attempt.said);
    check_said(attempt.said, attempt.said_bytes);
    if (reader->is_run && attempt.status == USAGE && directory_hash() != hash)
        fuzz_broken("refused, but its files have changed: %.*s", (int)attempt.said_bytes, attempt.said);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------
// Inputs

// Number n of a reader; most are sealed.
static Case input_make(const Progress* p, int64_t n, int* is_sealed) {
    uint32_t name = 2166136261u;
    for (const char* c = p->reader->name; *c; c++) name = (name ^ (unsigned char)*c) * 16777619u;
    Draws d = {rng_stream((uint64_t)fuzz.seed, (uint64_t)n, name, 0), 0};
    *is_sealed = !one_in(&d, 4);
    return case_mutated(&p->seeds, &d);
}

// An input of the corpus; for inputs that are made, its files replace those of the first that has them all.
static Case input_load(Progress* p, const char* path) {
    Case files;
    files.count = 0;
    case_read(&files, path, strlen(path) + 1);
    for (int i = 0; i < p->seeds.count && p->reader->make; i++) {
        Case c = case_copy(&p->seeds.cases[i]);
        int found = 0;
        for (int k = 0; k < files.count; k++) {
            CaseFile* f = case_find(&c, files.file[k].name);
            if (!f) continue;
            text_splice(&f->bytes, 0, f->bytes.length, files.file[k].bytes.text, files.file[k].bytes.length);
            found++;
        }
        if (found == files.count) return c;
        case_free(&c);
    }
    if (files.count == 0 || p->reader->make) die(USAGE, "%s: is no input of %s", path, p->reader->name);
    return files;
}

// Keep a failure for future runs, next to the earlier ones. Returns its path (caller frees).
static char* input_keep(const Reader* reader, const Case* c, int64_t n) {
    char* name = xprintf("%s/seed-%lld-%lld", reader->name, (long long)fuzz.seed, (long long)n);
    char *path = xprintf("%s/%s", fuzz.corpus, name), *here = xprintf("corpus/%s", name);
    case_write(c, here);
    free(name), free(here);
    return path;
}

// ---------------------------------------------------------------------------------------------------------
// Children

// As fork(). The child's stdout goes nowhere, its stderr to memory. A sanitizer still writes to descriptor 2, which is
// the file of reports, now empty.
static pid_t child_fork(const Reader* reader) {
    const struct rlimit none = {0, 0};
    fflush(stdout);
    memset(fuzz.told, 0, sizeof *fuzz.told);
    if (ftruncate(fuzz.report, 0) != 0) die(FAILED, "a file of reports: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0) die(FAILED, "fork: %s", strerror(errno));
    if (child > 0) return child;
    int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(nowhere, 1);
    dup2(fuzz.report, 2);
    close_from(3);
    setrlimit(RLIMIT_CORE, &none);
    attempt.reader = reader;
    stderr = open_memstream(&attempt.said, &attempt.said_bytes);
    if (!stderr) fuzz_broken("no memory for stderr");
    return 0;
}

// Whether a child ended as it should; else print why, and the beginning of a sanitizer's report.
static int child_is_good(pid_t child, const char* reader, const char* input) {
    char text[3000];
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) die(FAILED, "waitpid: %s", strerror(errno));
    if (WIFEXITED(status) && WEXITSTATUS(status) == DONE) return 1;
    printf("FAIL %s, %s: ", reader, input);
    if (WIFEXITED(status) && WEXITSTATUS(status) == CHILD_BROKEN) printf("%s\n", fuzz.told->reason);
    else if (WIFEXITED(status)) printf("the process ended with status %d\n", WEXITSTATUS(status));
    else if (WTERMSIG(status) == SIGALRM) printf("took more than %d s\n", HANG_SECONDS);
    else printf("signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
    ssize_t n = pread(fuzz.report, text, sizeof text, 0);
    if (n > 0) printf("%.*s\n", (int)n, text);
    return 0;
}

// Read an input in a process of its own.
static void replay(Progress* p, const Case* c, const char* name) {
    pid_t child = child_fork(p->reader);
    if (child == 0) {
        attempt_read(c, 1);
        _exit(DONE);
    }
    p->kept++;
    p->failures += !child_is_good(child, p->reader->name, name);
}

// The inputs that mutations begin with, and all of the corpus read once.
static void corpus_open(Progress* p) {
    struct dirent** entries = NULL;
    for (int which = 0; which < 2 && p->reader->make; which++) {
        remove_directory(CASE_DIR);
        pid_t child = child_fork(NULL);
        if (child == 0) {
            stderr = fdopen(2, "w");  // what it says is reported
            p->reader->make(which);
            fflush(stderr);
            _exit(DONE);
        }
        if (!child_is_good(child, p->reader->name, "the run that makes an input"))
            die(FAILED, "no input to begin with");
        Case* c = case_new(&p->seeds);
        c->count = 0;
        case_read(c, CASE_DIR, strlen(CASE_DIR "/"));
    }
    char* directory = xprintf("corpus/%s", p->reader->name);
    int n = scandir(directory, &entries, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        char* path = xprintf("%s/%s", directory, entries[i]->d_name);
        if (entries[i]->d_name[0] != '.') {
            Case c = input_load(p, path);
            replay(p, &c, path);
            if (p->reader->make) case_free(&c);
            else *case_new(&p->seeds) = c;
        }
        free(path), free(entries[i]);
    }
    free(entries), free(directory);
}

// Read inputs p->next .. end - 1, all of them in one process if none is a failure.
static void run_batch(Progress* p, int64_t end) {
    int is_sealed;
    double began = now_seconds();
    pid_t child = child_fork(p->reader);
    if (child == 0) {
        for (fuzz.told->now = p->next; fuzz.told->now < end; fuzz.told->now++) {
            Case c = input_make(p, fuzz.told->now, &is_sealed);
            int accepted = attempt_read(&c, is_sealed);
            fuzz.told->accepted += accepted, fuzz.told->refused += !accepted;
            case_free(&c);
        }
        _exit(DONE);
    }
    int good = child_is_good(child, p->reader->name, "an input");
    p->accepted += fuzz.told->accepted, p->refused += fuzz.told->refused;
    p->seconds += now_seconds() - began;
    p->next = good ? end : fuzz.told->now + 1;
    if (good) return;
    Case c = input_make(p, fuzz.told->now, &is_sealed);
    char* kept = input_keep(p->reader, &c, fuzz.told->now);
    p->failures++;
    printf("kept as %s; alone: test_fuzz --reader %s --replay %s\n", kept, p->reader->name, kept);
    free(kept);
    case_free(&c);
}

// ---------------------------------------------------------------------------------------------------------

// A directory in memory, if there is one: a run reads and writes about a million files.
static void work_open(void) {
    const char* temporary = getenv("TMPDIR");
    if (!temporary || !*temporary) temporary = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    fuzz.work = xprintf("%s/fuzz-XXXXXX", temporary);
    char* corpus = realpath(fuzz.corpus, NULL);
    if (!corpus) die(USAGE, "--corpus %s: %s", fuzz.corpus, strerror(errno));
    if (!mkdtemp(fuzz.work) || chdir(fuzz.work) != 0 || symlink(corpus, "corpus") != 0)
        die(FAILED, "%s: %s", fuzz.work, strerror(errno));
    free(corpus);
    fuzz.told = (Told*)mmap(NULL, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    fuzz.report = open("report", O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fuzz.told == MAP_FAILED || fuzz.report < 0) die(FAILED, "%s: %s", fuzz.work, strerror(errno));
}

static int report_reader(const Progress* p) {
    int64_t n = p->accepted + p->refused;
    // A fuzzer whose inputs all end at the first byte, or are all taken, tries nothing.
    int is_lopsided = n >= 300 && (p->accepted < n / 100 || p->refused < n / 1000);
    int good = p->failures == 0 && !is_lopsided;
    printf("%s %-12s %6lld inputs: %6lld accepted, %6lld refused, %d failed; %d of the corpus; %.0f a second\n",
           good ? "ok  " : "FAIL", p->reader->name, (long long)n, (long long)p->accepted, (long long)p->refused,
           p->failures, p->kept, (double)n / fmax(p->seconds, 1e-9));
    return good;
}

int main(int argc, char** argv) {
    // clang-format off
    Flag flags[] = {
        {NULL, "--inputs",  FLAG_SIZE,   &fuzz.inputs,  "5000", 0, 1e12, NULL, SCOPE_RUN, TOPIC_NONE, "mutated inputs, over all readers"},
        {NULL, "--seconds", FLAG_REAL,   &fuzz.seconds, "1e9",  0, 1e9, NULL, SCOPE_RUN, TOPIC_NONE, "begin no more inputs after this time"},
        {NULL, "--seed",    FLAG_SIZE,   &fuzz.seed,    "1",    0, 9e15, NULL, SCOPE_RUN, TOPIC_NONE, "of all draws"},
        {NULL, "--reader",  FLAG_STRING, &fuzz.reader,  "",     0, 0, NULL, SCOPE_RUN, TOPIC_NONE, "only this one; empty: all"},
        {NULL, "--replay",  FLAG_STRING, &fuzz.replay,  "",     0, 0, NULL, SCOPE_RUN, TOPIC_NONE, "with --reader: only this input, a directory"},
        {NULL, "--corpus",  FLAG_STRING, &fuzz.corpus,  "dev/test/corpus", 0, 0, NULL, SCOPE_RUN, TOPIC_NONE, "where inputs that were failures are"},
    };
    // clang-format on
    static Progress progress[COUNT_OF(READERS)];
    int passed = 0, failed = 0;
    flags_parse(flags, COUNT_OF(flags), argc, argv, "fuzz [flags]");
    double began = now_seconds();
    char* replayed = *fuzz.replay ? realpath(fuzz.replay, NULL) : NULL;
    if (*fuzz.replay && (!replayed || !*fuzz.reader))
        die(USAGE, "--replay %s: %s", fuzz.replay, replayed ? "of which --reader?" : strerror(errno));
    work_open();
    for (size_t i = 0; i < COUNT_OF(READERS); i++) {
        Progress* p = &progress[i];
        if (*fuzz.reader && strcmp(READERS[i].name, fuzz.reader) != 0) continue;
        p->reader = &READERS[i];
        p->wanted = replayed ? 0 : *fuzz.reader ? fuzz.inputs : fuzz.inputs * p->reader->share / 1000;
        corpus_open(p);
        if (!replayed) continue;
        Case c = input_load(p, replayed);
        replay(p, &c, replayed);
        case_free(&c);
    }
    // In rounds, so that every reader has its turn where the time is short.
    for (int round = 1; round <= ROUNDS; round++)
        for (size_t i = 0; i < COUNT_OF(READERS); i++) {
            Progress* p = &progress[i];
            int64_t last = p->wanted * round / ROUNDS;
            while (p->reader && p->next < last && now_seconds() - began < fuzz.seconds &&
                   p->failures < FAILURES_OF_READER)
                run_batch(p, p->next + p->reader->batch < last ? p->next + p->reader->batch : last);
        }
    for (size_t i = 0; i < COUNT_OF(READERS); i++) {
        if (!progress[i].reader) continue;
        int good = report_reader(&progress[i]);
        passed += good, failed += !good;
    }
    if (passed + failed == 0) die(USAGE, "--reader %s: there is no such reader", fuzz.reader);
    printf("seed %lld, %.1f s%s\n", (long long)fuzz.seed, now_seconds() - began,
           now_seconds() - began > fuzz.seconds ? ", cut short by --seconds" : "");
    remove_directory(fuzz.work);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
