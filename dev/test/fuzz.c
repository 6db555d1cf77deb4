/* A mutation fuzzer over every reader of files and flags (fuzz_readers.h lists them).
 *
 *     build/san/test_fuzz --inputs 100000 --seconds 240      as `make san` runs it, from the repository's root
 *     build/san/test_fuzz --reader json --seed 7             one reader, other draws
 *
 * Inputs, which are a few files each, are made from valid ones (fuzz_mutate.h). Before them, everything in
 * dev/test/corpus/READER/ is read, where each input that was ever a failure is kept.
 *
 * A reader must take an input, and what it makes of it must be sound, or refuse it: with a documented exit status,
 * after lines that begin with "warning: " and one that begins with "error: ", leaving the files of a run as they were.
 * All else is a failure: a signal, a sanitizer's report, an internal check, a file left open, more memory than such a
 * file can need, or five seconds. A child process reads many inputs, because a fork takes
 * longer than most readers do. */
#include "fuzz.h"

#include "fuzz_readers.h"

#include <setjmp.h>
#include <sys/mman.h>

enum { HANG_SECONDS = 5, FAILURES_OF_READER = 5, ROUNDS = 8, CASE_FILES = 24, LARGEST_FILE = 1 << 18, MOST_SEEDS = 16 };

// The files of one input.
typedef struct {
    int count;
    struct {
        char* name;  // with "/" where it lies in a directory
        Text bytes;
    } file[CASE_FILES];
} Case;

typedef struct {
    const Reader* reader;
    Case seeds[MOST_SEEDS];
    int count, failures;
    int64_t next, end, accepted, refused;
    double seconds;
} Progress;

static struct {
    int64_t inputs, seed;
    double seconds;
    const char* reader;
    // In memory that a child shares: the input that it reads, and how many it has accepted and refused.
    int64_t *now, *accepted, *refused;
} fuzz;

// The attempt in a child.
static struct {
    jmp_buf back;
    int is_on, status;
    size_t most_memory;  // that may be asked for at once; 0: any
    char* said;          // on stderr
    size_t said_bytes;
} attempt;

// ---------------------------------------------------------------------------------------------------------
// Inputs

// Set a file of a case; a new one if it has none of this name.
static void case_put(Case* c, const char* name, const char* bytes, size_t n) {
    int i = 0;
    while (i < c->count && strcmp(c->file[i].name, name) != 0) i++;
    CHECK(i < CASE_FILES);
    if (i == c->count) c->count++, c->file[i].name = xprintf("%s", name);
    else free(c->file[i].bytes.text);
    memset(&c->file[i].bytes, 0, sizeof c->file[i].bytes);
    text_append(&c->file[i].bytes, bytes, n);
}

static void case_drop(Case* c, int i) {
    free(c->file[i].name), free(c->file[i].bytes.text);
    c->file[i] = c->file[--c->count];
}

static void case_free(Case* c) {
    while (c->count) case_drop(c, 0);
}

static void case_copy(Case* c, const Case* from) {
    for (int i = 0; i < from->count; i++)
        case_put(c, from->file[i].name, from->file[i].bytes.text, from->file[i].bytes.length);
}

// Put what `directory` holds, and its directories hold, in the order of names; names begin after `prefix` bytes.
static void case_read(Case* c, const char* directory, size_t prefix) {
    struct dirent** entries = NULL;
    int n = scandir(directory, &entries, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        char* path = xprintf("%s/%s", directory, entries[i]->d_name);
        size_t length;
        if (is_directory(path)) {
            if (entries[i]->d_name[0] != '.') case_read(c, path, prefix);
        } else {
            char* bytes = read_file(path, SIZE_MAX, &length, FAILED);
            case_put(c, path + prefix, bytes, length);
            free(bytes);
        }
        free(path), free(entries[i]);
    }
    free(entries);
}

static void case_write(const Case* c, const char* directory) {
    for (int i = 0; i < c->count; i++) {
        const Text* bytes = &c->file[i].bytes;
        char *path = xprintf("%s/%s", directory, c->file[i].name), *folder = xprintf("%s", path);
        *strrchr(folder, '/') = '\0';
        make_directories(folder);
        FILE* file = fopen(path, "wb");
        if (!file || fwrite(bytes->text, 1, bytes->length, file) != bytes->length || fclose(file) != 0)
            die(FAILED, "%s: %s", path, strerror(errno));
        free(path), free(folder);
    }
}

// Number n of a reader: one of the seeds, with one to about eight mutations; below 0, a seed as it is. Most are sealed.
static Case case_make(const Progress* p, int64_t n, int* is_sealed) {
    Draws d = {rng_stream((uint64_t)fuzz.seed, (uint64_t)n, (uint32_t)(p->reader - READERS), 0), 0};
    const Case* seed = &p->seeds[n < 0 ? (size_t)-n - 1 : draw(&d, (size_t)p->count)];
    Case c = {0};
    case_copy(&c, seed);
    *is_sealed = n < 0 || draw(&d, 4) != 0;
    if (n < 0) return c;
    do {
        int i = (int)draw(&d, (size_t)c.count);
        if (!strstr(c.file[i].name, ".json")) i = (int)draw(&d, (size_t)c.count);  // settings decide more
        Text* t = &c.file[i].bytes;
        if (c.count > 1 && draw(&d, 40) == 0) {
            case_drop(&c, i);
            continue;
        }
        if (strstr(c.file[i].name, ".safetensors")) mutate_safetensors(t, &d);
        else if (strstr(c.file[i].name, ".bin")) mutate_bytes(t, &d);
        else mutate_text(t, &d);
        if (t->length > LARGEST_FILE) text_splice(t, LARGEST_FILE, t->length - LARGEST_FILE, "", 0);
    } while (draw(&d, 2));
    return c;
}

// ---------------------------------------------------------------------------------------------------------
// Attempts, in a child

void fuzz_exit(int status) {
    if (!attempt.is_on) (exit)(status);
    attempt.status = status;
    longjmp(attempt.back, 1);
}

// The input is a failure. A sanitizer writes to this descriptor too.
__attribute__((noreturn)) static void fail(const char* why) {
    dprintf(STDERR_FILENO, "%s; status %d, stderr: %s\n", why, attempt.status, attempt.said ? attempt.said : "");
    _exit(FAILED);
}

// Memory that a freed block is kept from must not add up over many inputs; what a refused one leaves is no leak.
const char* __asan_default_options(void);
const char* __asan_default_options(void) { return "detect_leaks=0:quarantine_size_mb=16:allocator_may_return_null=1"; }

void __sanitizer_malloc_hook(const volatile void* memory, size_t n);
void __sanitizer_malloc_hook(const volatile void* memory, size_t n) {
    (void)memory;
    if (attempt.is_on && attempt.most_memory && n > attempt.most_memory) fail("it asks for too much memory");
}

// Whether a reader that refuses says lines of warnings and one error.
static int is_refusal(const char* said, size_t n) {
    int errors = 0;
    if (n == 0 || said[n - 1] != '\n') return 0;
    for (const char *at = said, *next; at < said + n; at = next) {
        next = (const char*)memchr(at, '\n', (size_t)(said + n - at)) + 1;
        int is_error = strncmp(at, "error: ", 7) == 0;
        errors += is_error;
        if (!is_error && strncmp(at, "warning: ", 9) != 0) return 0;
    }
    return errors == 1;
}

// The names and bytes of the files that a reader has before it, as one number.
static uint64_t case_hash(void) {
    Case c = {0};
    uint64_t hash = 0;
    case_read(&c, CASE_DIR, strlen(CASE_DIR "/"));
    for (int i = 0; i < c.count; i++) {
        hash = fnv_update(hash, c.file[i].name, strlen(c.file[i].name) + 1);
        hash = fnv_update(hash, c.file[i].bytes.text, c.file[i].bytes.length);
    }
    case_free(&c);
    return hash;
}

// Read an input and count it. Does not return where it is a failure.
static void try_case(const Reader* reader, const Case* c, int is_sealed) {
    remove_directory(CASE_DIR);
    make_directories(CASE_DIR);
    case_write(c, CASE_DIR);
    if (is_sealed && reader->seal) reader->seal();
    volatile uint64_t before = reader->is_run ? case_hash() : 0;
    volatile int has_ended = 0;
    int first = dup(0), left_open = 0;
    close(first);
    attempt.status = DONE, attempt.most_memory = reader->most;
    rewind(stderr);
    alarm(HANG_SECONDS);
    attempt.is_on = 1;
    if (setjmp(attempt.back) == 0) reader->read();
    else has_ended = 1;
    attempt.is_on = 0;
    alarm(0);
    fflush(stderr);
    int status = attempt.status;
    *(status == DONE ? fuzz.accepted : fuzz.refused) += 1;
    if (fcntl(0, F_GETFD) < 0) fail("it closes descriptor 0");
    for (int fd = first; fd < first + 16; fd++) left_open += close(fd) == 0;
    if (!has_ended && left_open > reader->is_run) fail("it leaves files open");
    if (status == DONE) return;
    if (status != USAGE && !(reader->is_run && status == STOPPED_BY_NAN)) fail("it ends as it must not");
    if (!is_refusal(attempt.said, attempt.said_bytes)) fail("refused, but not by one error after warnings");
    if (status == USAGE && reader->is_run && case_hash() != before) fail("refused, but its files have changed");
}

// Inputs p->next .. p->end - 1 of a Progress; those before input 0 are its seeds.
static void try_batch(void* progress) {
    const Progress* p = (const Progress*)progress;
    const struct rlimit none = {0, 0};
    int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDOUT_FILENO);
    for (int fd = STDERR_FILENO + 1; fd < 64; fd++) close(fd);  // those of whoever started this program too
    setrlimit(RLIMIT_CORE, &none);
    stderr = open_memstream(&attempt.said, &attempt.said_bytes);
    for (*fuzz.now = p->next; *fuzz.now < p->end; ++*fuzz.now) {
        int is_sealed;
        Case c = case_make(p, *fuzz.now, &is_sealed);
        try_case(p->reader, &c, is_sealed);
        case_free(&c);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Children

// Try inputs up to `end`, or up to one that fails. That one is kept for future runs, next to the earlier ones.
static void run_batch(Progress* p, int64_t end) {
    Text said = {NULL, 0, 0};
    int is_sealed;
    p->end = end;
    if (run_in_child(&said, STDERR_ONLY, try_batch, p) == DONE) {
        p->next = end;
    } else {
        int64_t n = *fuzz.now;
        Case c = case_make(p, n, &is_sealed);
        char* path = xprintf("corpus/%s/seed-%lld-%lld", p->reader->name, (long long)fuzz.seed, (long long)n);
        if (n >= 0) case_write(&c, path);
        printf("FAIL %s, %s %lld: %.3000s\n", p->reader->name, n < 0 ? "number from the corpus' end" : "input",
               (long long)n, said.text);
        if (n >= 0) printf("kept as dev/test/%s; again: test_fuzz --inputs 0 --reader %s\n", path, p->reader->name);
        p->failures++;
        p->next = n + 1;
        case_free(&c), free(path);
    }
    free(said.text);
}

// The inputs that mutations begin with, and all of the corpus read once.
static void corpus_open(Progress* p) {
    struct dirent** entries = NULL;
    int makes = p->reader->make != NULL;
    for (int which = 0; which < 2 * makes; which++) {
        remove_directory(CASE_DIR);
        make_directories(CASE_DIR);
        Text said = {NULL, 0, 0};
        if (run_in_child(&said, STDOUT_AND_STDERR, p->reader->make, &which) != DONE)
            die(FAILED, "no input to begin with: %s", said.text);
        case_read(&p->seeds[p->count++], CASE_DIR, strlen(CASE_DIR "/"));
        free(said.text);
    }
    char* directory = xprintf("corpus/%s", p->reader->name);
    int n = scandir(directory, &entries, NULL, alphasort);
    for (int i = 0; i < n; i++, free(entries[i - 1])) {
        if (entries[i]->d_name[0] == '.') continue;
        char* path = xprintf("%s/%s", directory, entries[i]->d_name);
        Case* c = &p->seeds[p->count++];
        CHECK(p->count < MOST_SEEDS);
        if (makes) case_copy(c, &p->seeds[0]);  // an input of the corpus has files that replace those of the first
        case_read(c, path, strlen(path) + 1);
        free(path);
    }
    free(entries), free(directory);
    p->next = -p->count;
}

// ---------------------------------------------------------------------------------------------------------

static int report_reader(const Progress* p) {
    int64_t n = p->accepted + p->refused;
    // A fuzzer whose inputs all end at the first byte, or are all taken, tries nothing.
    int is_lopsided = n >= 300 && (p->accepted < n / 100 || p->refused < n / 1000);
    int good = p->failures == 0 && !is_lopsided;
    printf("%s %-12s %6lld inputs: %6lld accepted, %6lld refused, %d failed; %.0f a second\n", good ? "ok  " : "FAIL",
           p->reader->name, (long long)n, (long long)p->accepted, (long long)p->refused, p->failures,
           (double)n / fmax(p->seconds, 1e-9));
    return good;
}

int main(int argc, char** argv) {
    static Progress progress[COUNT_OF(READERS)];
    int good = 0, failed = 0;
    // clang-format off
    Flag flags[] = {
        {NULL, "--inputs",  FLAG_SIZE,   &fuzz.inputs,  "5000", 0, 1e12, NULL, SCOPE_RUN, TOPIC_NONE, "over all readers"},
        {NULL, "--seconds", FLAG_REAL,   &fuzz.seconds, "1e9",  0, 1e9,  NULL, SCOPE_RUN, TOPIC_NONE, "then no more"},
        {NULL, "--seed",    FLAG_SIZE,   &fuzz.seed,    "1",    0, 9e15, NULL, SCOPE_RUN, TOPIC_NONE, "of all draws"},
        {NULL, "--reader",  FLAG_STRING, &fuzz.reader,  "",     0, 0,    NULL, SCOPE_RUN, TOPIC_NONE, "empty: all"},
    };
    // clang-format on
    flags_parse(flags, COUNT_OF(flags), argc, argv, "test_fuzz [flags]");
    double began = now_seconds();
    // In memory, if that is a directory: a run reads and writes about a million files.
    char* work = xprintf("%s/fuzz-XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    char* corpus = realpath("dev/test/corpus", NULL);
    if (!corpus || !mkdtemp(work) || chdir(work) != 0 || symlink(corpus, "corpus") != 0)
        die(FAILED, "dev/test/corpus or %s: %s", work, strerror(errno));
    fuzz.now = (int64_t*)mmap(NULL, 3 * sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(fuzz.now != MAP_FAILED);
    fuzz.accepted = fuzz.now + 1, fuzz.refused = fuzz.now + 2;
    // In rounds, so that every reader has its turn where the time is short; the first of them reads the corpus.
    for (int round = 0; round <= ROUNDS; round++)
        for (size_t i = 0; i < COUNT_OF(READERS); i++) {
            Progress* p = &progress[i];
            double start = now_seconds();
            if (*fuzz.reader && strcmp(READERS[i].name, fuzz.reader) != 0) continue;
            p->reader = &READERS[i];
            int64_t wanted = (*fuzz.reader ? fuzz.inputs : fuzz.inputs * p->reader->share / 1000) * round / ROUNDS;
            if (round == 0) corpus_open(p);
            *fuzz.accepted = *fuzz.refused = 0;
            int batch = p->reader->is_run ? 50 : 200;
            while (p->next < wanted && p->failures < FAILURES_OF_READER && now_seconds() - began < fuzz.seconds)
                run_batch(p, p->next < 0 ? 0 : p->next + batch < wanted ? p->next + batch : wanted);
            p->accepted += *fuzz.accepted, p->refused += *fuzz.refused, p->seconds += now_seconds() - start;
        }
    for (size_t i = 0; i < COUNT_OF(READERS); i++)
        if (progress[i].reader) good += report_reader(&progress[i]), failed++;
    failed -= good;
    if (good + failed == 0) die(USAGE, "--reader %s: there is no such reader", fuzz.reader);
    remove_directory(work);
    printf("seed %lld, %.1f s\n%d passed, %d failed\n", (long long)fuzz.seed, now_seconds() - began, good, failed);
    return failed != 0;
}
