/* A mutation fuzzer over every reader of files, flags and variables (fuzz_runs.h lists them).
 *
 *     build/san/test_fuzz --inputs 100000 --seconds 240      as `make san` runs it
 *     build/san/test_fuzz --reader json --seed 7             one reader, other draws
 *     build/san/test_fuzz --reader json --replay INPUT       one input: a directory with its files, or a file
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

#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "fuzz_runs.h"

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
    CaseList seeds;
    int64_t wanted, next, accepted, refused;
    int kept, failures;  // inputs of the corpus; those that failed, of both kinds
    double seconds;
} Progress;

typedef struct {
    int64_t inputs, seed;
    double seconds;
    const char *reader, *replay, *corpus;
    char* work;  // the directory that readers work in; children have it as their own
    int home;    // where the program was started
} Fuzz;

// Of the attempt that runs in this child.
static struct {
    jmp_buf back;
    int is_on, status;
    const Reader* reader;
    Told* told;
    char* said;  // on stderr
    size_t said_bytes;
} attempt;

void (*fuzz_when_done)(void);

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
    if (!attempt.told) {
        fputs("error: ", stderr), vfprintf(stderr, format, args), fputc('\n', stderr);
        exit(FAILED);
    }
    vsnprintf(attempt.told->reason, REASON_SIZE, format, args);
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

static int compare_files(const void* a, const void* b) {
    return strcmp(((const CaseFile*)a)->name, ((const CaseFile*)b)->name);
}

// A refused input's files are there as they were, and no others.
static void check_files(const Case* c) {
    Case is, was = *c;
    is.count = 0;
    case_read(&is, CASE_DIR, strlen(CASE_DIR "/"));
    qsort(is.file, (size_t)is.count, sizeof(CaseFile), compare_files);
    qsort(was.file, (size_t)was.count, sizeof(CaseFile), compare_files);
    for (int i = 0; i < is.count || i < was.count; i++) {
        const CaseFile *a = &is.file[i], *b = &was.file[i];
        if (i >= is.count || (i < was.count && strcmp(a->name, b->name) > 0))
            fuzz_broken("refused, but %s is gone", b->name);
        if (i >= was.count || strcmp(a->name, b->name) < 0) fuzz_broken("refused, but %s is new", a->name);
        if (a->bytes.length != b->bytes.length || memcmp(a->bytes.text, b->bytes.text, a->bytes.length) != 0)
            fuzz_broken("refused, but %s has changed", a->name);
    }
    case_free(&is);
}

// The lowest descriptor that is free.
static int free_descriptor(void) {
    int fd = dup(0);
    close(fd);
    return fd;
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
static int attempt_read(const Case* c) {
    const Reader* reader = attempt.reader;
    remove_tree(CASE_DIR);
    case_write(c, CASE_DIR);
    int before = free_descriptor();
    volatile int has_ended = 0;
    fuzz_when_done = NULL;
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
    if (!has_ended && left_open > reader->files) fuzz_broken("leaves %d files open", left_open);
    if (!has_ended) return 1;
    if (attempt.status == DONE) {
        if (fuzz_when_done) fuzz_when_done();
        return 1;
    }
    int is_answer = attempt.status == USAGE || reader->answers >> attempt.status & 1;
    if (!is_answer) fuzz_broken("ends with status %d: %.*s", attempt.status, (int)attempt.said_bytes, attempt.said);
    check_said(attempt.said, attempt.said_bytes);
    if (reader->files && attempt.status == USAGE) check_files(c);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------
// Inputs

// Number n of a reader.
static Case input_make(const Fuzz* fuzz, const Progress* p, int64_t n) {
    uint32_t name = 2166136261u;
    for (const char* c = p->reader->name; *c; c++) name = (name ^ (unsigned char)*c) * 16777619u;
    Draws d;
    memset(&d, 0, sizeof d);
    d.key = rng_stream((uint64_t)fuzz->seed, (uint64_t)n, name, 0);
    Case c = case_mutated(&p->seeds, &d);
    if (p->reader->settle && !one_in(&d, 4)) p->reader->settle(&c, one_in(&d, 6));
    return c;
}

// An input of the corpus: a directory with all of its files; or one file, which stands in the first valid input that
// has one of its name, which is the end of newline_in_activation.bert.json or updates_below_zero.trainer.json.
static Case input_load(const Progress* p, const char* path) {
    Case c;
    c.count = 0;
    if (is_directory(path)) {
        case_read(&c, path, strlen(path) + 1);
        return c;
    }
    for (int i = 0; i < p->seeds.count; i++) {
        const Case* seed = &p->seeds.cases[i];
        for (int k = 0; k < seed->count; k++) {
            const char *slash = strrchr(seed->file[k].name, '/'), *name = slash ? slash + 1 : seed->file[k].name;
            size_t m = strlen(name), length = strlen(path), n;
            if (length <= m || path[length - m - 1] != '.' || strcmp(path + length - m, name) != 0) continue;
            char* bytes = read_file(path, SIZE_MAX, &n, USAGE);
            c = case_copy(seed);
            text_splice(&c.file[k].bytes, 0, c.file[k].bytes.length, bytes, n);
            if (p->reader->settle && c.count > 1) p->reader->settle(&c, 0);
            free(bytes);
            return c;
        }
    }
    die(USAGE, "%s: ends in the name of no file that %s reads", path, p->reader->name);
}

// Keep a failure for future runs, next to the earlier ones. Returns its path (caller frees).
static char* input_keep(const Fuzz* fuzz, const Reader* reader, const Case* c) {
    Crc32 table;
    uint32_t crc = 0;
    crc32_init(&table);
    for (int i = 0; i < c->count; i++) crc = crc32_update(&table, crc, c->file[i].bytes.text, c->file[i].bytes.length);
    char* path = xprintf("%s/%s/crash-%08x", fuzz->corpus, reader->name, crc);
    if (fchdir(fuzz->home) != 0) die(FAILED, "the directory of the start: %s", strerror(errno));
    case_write(c, path);
    if (chdir(fuzz->work) != 0) die(FAILED, "%s: %s", fuzz->work, strerror(errno));
    return path;
}

// ---------------------------------------------------------------------------------------------------------
// Children

// As fork(). The child's stdout goes nowhere, its stderr to memory. A sanitizer still writes to descriptor 2, which is
// the file `report`, now empty.
static pid_t child_fork(const Reader* reader, Told* told, int report) {
    const struct rlimit none = {0, 0};
    fflush(stdout);
    if (ftruncate(report, 0) != 0) die(FAILED, "a file of reports: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0) die(FAILED, "fork: %s", strerror(errno));
    if (child > 0) return child;
    int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(nowhere, 1);
    dup2(report, 2);
    close_from(3);
    setrlimit(RLIMIT_CORE, &none);
    attempt.reader = reader, attempt.told = told;
    stderr = open_memstream(&attempt.said, &attempt.said_bytes);
    if (!stderr) fuzz_broken("no memory for stderr");
    return 0;
}

// The beginning of what a sanitizer wrote, if it did.
static void print_report(int report) {
    char text[3000];
    ssize_t n = pread(report, text, sizeof text, 0);
    if (n > 0) printf("%.*s\n", (int)n, text);
}

// Why a child ended, as it should have done (NULL) or else (in `why`).
static const char* child_wait(pid_t child, const Told* told, char why[REASON_SIZE + 64]) {
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) die(FAILED, "waitpid: %s", strerror(errno));
    if (WIFEXITED(status) && WEXITSTATUS(status) == DONE) return NULL;
    if (WIFEXITED(status) && WEXITSTATUS(status) == CHILD_BROKEN) snprintf(why, REASON_SIZE + 64, "%s", told->reason);
    else if (WIFEXITED(status))
        snprintf(why, REASON_SIZE + 64, "the process ended with status %d", WEXITSTATUS(status));
    else if (WTERMSIG(status) == SIGALRM) snprintf(why, REASON_SIZE + 64, "took more than %d s", HANG_SECONDS);
    else snprintf(why, REASON_SIZE + 64, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    return why;
}

// Read one input in a process of its own. Returns as child_wait() does.
static const char* read_alone(const Reader* reader, const Case* c, Told* told, int report, char why[REASON_SIZE + 64]) {
    pid_t child = child_fork(reader, told, report);
    if (child == 0) {
        attempt_read(c);
        _exit(DONE);
    }
    return child_wait(child, told, why);
}

// Read one input of the corpus.
static void replay(Progress* p, const char* path, const char* name, Told* told, int report) {
    char why[REASON_SIZE + 64];
    Case c = input_load(p, path);
    const char* bad = read_alone(p->reader, &c, told, report, why);
    case_free(&c);
    p->kept++;
    if (!bad) return;
    p->failures++;
    printf("FAIL %s, %s: %s\n", p->reader->name, name, bad);
    print_report(report);
}

// All of the corpus.
static void replay_corpus(const Fuzz* fuzz, Progress* p, Told* told, int report) {
    struct dirent** entries = NULL;
    char* directory = xprintf("%s/%s", fuzz->corpus, p->reader->name);
    if (fchdir(fuzz->home) != 0) die(FAILED, "the directory of the start: %s", strerror(errno));
    char* full = realpath(directory, NULL);
    if (chdir(fuzz->work) != 0) die(FAILED, "%s: %s", fuzz->work, strerror(errno));
    int n = full ? scandir(full, &entries, NULL, alphasort) : 0;
    for (int i = 0; i < n; i++) {
        char* path = xprintf("%s/%s", full, entries[i]->d_name);
        if (entries[i]->d_name[0] != '.') replay(p, path, entries[i]->d_name, told, report);
        free(path), free(entries[i]);
    }
    free(entries), free(full), free(directory);
}

// Read inputs p->next .. end - 1, all of them in one process if none is a failure.
static void run_batch(const Fuzz* fuzz, Progress* p, int64_t end, Told* told, int report) {
    char why[REASON_SIZE + 64];
    double began = now_seconds();
    memset(told, 0, sizeof *told);
    told->now = p->next;
    pid_t child = child_fork(p->reader, told, report);
    if (child == 0) {
        for (; told->now < end; told->now++) {
            Case c = input_make(fuzz, p, told->now);
            int accepted = attempt_read(&c);
            told->accepted += accepted, told->refused += !accepted;
            case_free(&c);
        }
        _exit(DONE);
    }
    const char* bad = child_wait(child, told, why);
    int64_t first = p->next, now = told->now;
    p->accepted += told->accepted, p->refused += told->refused;
    p->next = end;
    p->seconds += now_seconds() - began;
    if (!bad) return;
    Case c = input_make(fuzz, p, now);
    char* kept = input_keep(fuzz, p->reader, &c);
    p->failures++;
    p->next = now + 1;
    printf("FAIL %s, input %lld of seed %lld: %s\nkept as %s\n", p->reader->name, (long long)now, (long long)fuzz->seed,
           bad, kept);
    print_report(report);
    if (!read_alone(p->reader, &c, told, report, why))
        printf("It does not fail alone: an input from %lld on contributes to the failure.\n", (long long)first);
    free(kept);
    case_free(&c);
}

// ---------------------------------------------------------------------------------------------------------

// A directory in memory, if there is one: a run reads and writes about a million files.
static void work_open(Fuzz* fuzz) {
    const char* temporary = getenv("TMPDIR");
    if (!temporary || !*temporary) temporary = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    fuzz->work = xprintf("%s/fuzz-XXXXXX", temporary);
    fuzz->home = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fuzz->home < 0 || !mkdtemp(fuzz->work) || chdir(fuzz->work) != 0)
        die(FAILED, "%s: %s", fuzz->work, strerror(errno));
}

// The valid inputs of a reader. Trainers that make some speak of their steps.
static void make_seeds(Progress* p) {
    fflush(stdout);
    int out = dup(1), nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(nowhere, 1);
    make_directories("made");
    p->reader->seeds(&p->seeds);
    remove_tree("made");
    fflush(stdout);
    dup2(out, 1);
    close(out), close(nowhere);
}

static void report_reader(const Progress* p, int* passed, int* failed) {
    int64_t n = p->accepted + p->refused;
    // A fuzzer whose inputs all end at the first byte, or are all taken, tries nothing.
    int is_lopsided = n >= 300 && (p->accepted < n / 100 || p->refused < n / 1000);
    int good = p->failures == 0 && !is_lopsided;
    *passed += good, *failed += !good;
    printf("%s %-12s %6lld inputs: %6lld accepted, %6lld refused, %d failed; %d of the corpus; %.0f a second\n",
           good ? "ok  " : "FAIL", p->reader->name, (long long)n, (long long)p->accepted, (long long)p->refused,
           p->failures, p->kept, (double)n / fmax(p->seconds, 1e-9));
}

int main(int argc, char** argv) {
    Fuzz fuzz;
    memset(&fuzz, 0, sizeof fuzz);
    // clang-format off
    Flag flags[] = {
        {NULL, "--inputs",  FLAG_SIZE,   &fuzz.inputs,  "5000", 0, 1e12, NULL, SCOPE_RUN, TOPIC_NONE, "mutated inputs, over all readers"},
        {NULL, "--seconds", FLAG_REAL,   &fuzz.seconds, "1e9",  0, 1e9, NULL, SCOPE_RUN, TOPIC_NONE, "begin no more inputs after this time"},
        {NULL, "--seed",    FLAG_SIZE,   &fuzz.seed,    "1",    0, 9e15, NULL, SCOPE_RUN, TOPIC_NONE, "of all draws"},
        {NULL, "--reader",  FLAG_STRING, &fuzz.reader,  "",     0, 0, NULL, SCOPE_RUN, TOPIC_NONE, "only this one; empty: all"},
        {NULL, "--replay",  FLAG_STRING, &fuzz.replay,  "",     0, 0, NULL, SCOPE_RUN, TOPIC_NONE, "with --reader: only this input, a file or a directory"},
        {NULL, "--corpus",  FLAG_STRING, &fuzz.corpus,  "dev/test/corpus", 0, 0, NULL, SCOPE_RUN, TOPIC_NONE, "where inputs that were failures are"},
    };
    // clang-format on
    Progress progress[COUNT_OF(READERS)];
    int passed = 0, failed = 0;
    int64_t total = 0;
    flags_parse(flags, COUNT_OF(flags), argc, argv, "fuzz [flags]");
    double began = now_seconds();
    char* replayed = *fuzz.replay ? realpath(fuzz.replay, NULL) : NULL;
    if (*fuzz.replay && (!replayed || !*fuzz.reader))
        die(USAGE, "--replay %s: %s", fuzz.replay, replayed ? "of which --reader?" : strerror(errno));
    work_open(&fuzz);
    Told* told = (Told*)mmap(NULL, sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int report = open("report", O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (told == MAP_FAILED || report < 0) die(FAILED, "%s: %s", fuzz.work, strerror(errno));
    memset(progress, 0, sizeof progress);
    for (size_t i = 0; i < COUNT_OF(READERS); i++) {
        Progress* p = &progress[i];
        if (*fuzz.reader && strcmp(READERS[i].name, fuzz.reader) != 0) continue;
        p->reader = &READERS[i];
        p->wanted = *fuzz.reader ? fuzz.inputs : fuzz.inputs * p->reader->share / 1000;
        make_seeds(p);
        if (replayed) p->wanted = 0, replay(p, replayed, replayed, told, report);
        else replay_corpus(&fuzz, p, told, report);
    }
    // In rounds, so that every reader has its turn where the time is short.
    for (int round = 1; round <= ROUNDS; round++)
        for (size_t i = 0; i < COUNT_OF(READERS); i++) {
            Progress* p = &progress[i];
            while (p->reader && p->next < p->wanted * round / ROUNDS && now_seconds() - began < fuzz.seconds &&
                   p->failures < FAILURES_OF_READER) {
                int64_t end = p->next + p->reader->batch, last = p->wanted * round / ROUNDS;
                run_batch(&fuzz, p, end < last ? end : last, told, report);
            }
        }
    for (size_t i = 0; i < COUNT_OF(READERS); i++) {
        if (!progress[i].reader) continue;
        report_reader(&progress[i], &passed, &failed);
        total += progress[i].accepted + progress[i].refused;
        case_list_free(&progress[i].seeds);
    }
    double seconds = now_seconds() - began;
    if (passed + failed == 0) die(USAGE, "--reader %s: there is no such reader", fuzz.reader);
    printf("%lld inputs of seed %lld in %.1f s, %.0f a second%s\n", (long long)total, (long long)fuzz.seed, seconds,
           (double)total / seconds, seconds > fuzz.seconds ? ", cut short by --seconds" : "");
    remove_tree(fuzz.work);
    free(fuzz.work), free(replayed);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
