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
 * All else is a failure: a signal, a sanitizer's report, an internal check, more memory than such a file can need, or
 * five seconds. A child process reads each input. */
#include "fuzz_readers.h"
#include "llmc/run/find_files.h"

enum { HANG_SECONDS = 5, FAILURES_OF_READER = 5, CASE_FILES = 24, LARGEST_FILE = 1 << 18, MOST_SEEDS = 16 };

// The files of one input.
typedef struct {
    int count;
    struct {
        char* name;  // with "/" where it lies in a directory
        Text bytes;
    } file[CASE_FILES];
} Case;

static struct {
    int64_t inputs, seed;
    double seconds;
    const char* only;
    const Reader* reader;
    Case seeds[MOST_SEEDS];  // of the reader
    int count;
    size_t most_memory;  // that a child may ask for at once; 0: any
} fuzz;

// ---------------------------------------------------------------------------------------------------------
// Inputs

// Set a file of a case; a new one if it has none of this name.
static void case_put(Case* c, const char* name, const char* bytes, size_t n) {
    int i = 0;
    while (i < c->count && strcmp(c->file[i].name, name) != 0) i++;
    CHECK(i < CASE_FILES);
    if (i == c->count) c->file[c->count++].name = xprintf("%s", name);
    c->file[i].bytes.length = 0;
    text_append(&c->file[i].bytes, bytes, n);
}

static void case_drop(Case* c, int i) {
    free(c->file[i].name), free(c->file[i].bytes.text);
    c->file[i] = c->file[--c->count];
    memset(&c->file[c->count], 0, sizeof c->file[0]);
}

static void case_free(Case* c) {
    while (c->count) case_drop(c, 0);
}

// Put what `directory` holds, and its directories hold, in the order of names; names begin after `prefix` bytes.
static void case_read(Case* c, const char* directory, size_t prefix) {
    struct dirent** entries = NULL;
    int n = scandir(directory, &entries, NULL, alphasort);
    for (int i = 0; i < n; free(entries[i++])) {
        char* path = xprintf("%s/%s", directory, entries[i]->d_name);
        size_t length;
        if (entries[i]->d_name[0] != '.' && is_directory(path)) case_read(c, path, prefix);
        if (!is_directory(path)) {
            char* bytes = read_file(path, SIZE_MAX, &length, FAILED);
            case_put(c, path + prefix, bytes, length);
            free(bytes);
        }
        free(path);
    }
    free(entries);
}

static void case_write(const Case* c, const char* directory) {
    for (int i = 0; i < c->count; i++) {
        char *path = xprintf("%s/%s", directory, c->file[i].name), *folder = directory_of(path);
        make_directories(folder);
        FILE* file = fopen(path, "wb");
        const Text* bytes = &c->file[i].bytes;
        if (!file || fwrite(bytes->text, 1, bytes->length, file) != bytes->length || fclose(file) != 0)
            die(FAILED, "%s: %s", path, strerror(errno));
        free(path), free(folder);
    }
}

// Input n: one of the seeds, with one to about eight mutations; below 0, a seed as it is. Most are sealed.
static Case case_make(int64_t n, int* is_sealed) {
    Draws d = {rng_stream((uint64_t)fuzz.seed, (uint64_t)n, (uint32_t)(fuzz.reader - READERS), 0), 0};
    const Case* seed = &fuzz.seeds[n < 0 ? (size_t)-n - 1 : draw(&d, (size_t)fuzz.count)];
    Case c = {0};
    for (int i = 0; i < seed->count; i++)
        case_put(&c, seed->file[i].name, seed->file[i].bytes.text, seed->file[i].bytes.length);
    *is_sealed = n < 0 || draw(&d, 4) != 0;
    while (n >= 0) {
        int i = (int)draw(&d, (size_t)c.count);
        if (!strstr(c.file[i].name, ".json")) i = (int)draw(&d, (size_t)c.count);  // settings decide more
        Text* t = &c.file[i].bytes;
        if (c.count > 1 && draw(&d, 40) == 0) case_drop(&c, i);
        else if (strstr(c.file[i].name, ".safetensors")) mutate_safetensors(t, &d);
        else if (strstr(c.file[i].name, ".bin")) mutate_bytes(t, &d);
        else mutate_text(t, &d);
        t->length = min_size(t->length, LARGEST_FILE);
        if (draw(&d, 2) == 0) break;
    }
    return c;
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

static void empty_case(void) {
    remove_directory(CASE_DIR);
    make_directories(CASE_DIR);
}

// ---------------------------------------------------------------------------------------------------------
// Attempts

const char* __asan_default_options(void);
const char* __asan_default_options(void) { return "detect_leaks=0:allocator_may_return_null=1"; }

void __sanitizer_malloc_hook(const volatile void* memory, size_t n);
void __sanitizer_malloc_hook(const volatile void* memory, size_t n) {
    (void)memory;
    if (fuzz.most_memory && n > fuzz.most_memory) abort();
}

// In a child: read the input.
static void read_case(void* none) {
    const struct rlimit no_core = {0, 0};
    (void)none;
    if (!freopen("/dev/null", "w", stdout)) die(FAILED, "/dev/null: %s", strerror(errno));
    setrlimit(RLIMIT_CORE, &no_core);
    alarm(HANG_SECONDS);
    fuzz.most_memory = fuzz.reader->most;
    fuzz.reader->read();
}

static void make_seed(void* which) { fuzz.reader->make(which); }

// Whether a reader that refuses says lines of warnings and one error.
static int is_refusal(const Text* said) {
    int errors = 0;
    if (said->length == 0 || said->text[said->length - 1] != '\n') return 0;
    for (const char *at = said->text, *end = at + said->length; at < end;
         at = (const char*)memchr(at, '\n', (size_t)(end - at)) + 1) {
        if (strncmp(at, "error: ", 7) == 0) errors++;
        else if (strncmp(at, "warning: ", 9) != 0) return 0;
    }
    return errors == 1;
}

// Read input n; whether all is well. A failure is kept for future runs, next to the earlier ones.
static int attempt(int64_t n, int* status) {
    Text said = {NULL, 0, 0};
    const char* why = NULL;
    int is_run = fuzz.reader->is_run, is_sealed;
    Case c = case_make(n, &is_sealed);
    empty_case();
    case_write(&c, CASE_DIR);
    if (is_sealed && fuzz.reader->seal) fuzz.reader->seal();
    uint64_t before = is_run ? case_hash() : 0;
    *status = run_in_child(&said, STDERR_ONLY, read_case, NULL);
    if (*status != DONE && *status != USAGE && !(is_run && *status == STOPPED_BY_NAN)) why = "it ends as it must not";
    else if (*status != DONE && !is_refusal(&said)) why = "refused, but not by one error after warnings";
    else if (*status == USAGE && is_run && case_hash() != before) why = "refused, but its files have changed";
    if (why) {
        char* path = xprintf("corpus/%s/seed-%lld-%lld", fuzz.reader->name, (long long)fuzz.seed, (long long)n);
        printf("FAIL %s: %s; status %d, stderr: %.3000s\n", path, why, *status, said.text);
        if (n >= 0) case_write(&c, path);
        if (n >= 0) printf("kept in dev/test; again: test_fuzz --inputs 0 --reader %s\n", fuzz.reader->name);
        free(path);
    }
    case_free(&c), free(said.text);
    return !why;
}

// The inputs that mutations begin with: two that are made, and the corpus, whose files replace those of the first.
static void read_seeds(void) {
    static const char* const made[] = {"made0", "made1"};
    struct dirent** entries = NULL;
    char* directory = xprintf("corpus/%s", fuzz.reader->name);
    int n = scandir(directory, &entries, NULL, alphasort);
    while (fuzz.count) case_free(&fuzz.seeds[--fuzz.count]);
    for (; fuzz.reader->make && fuzz.count < 2; fuzz.count++) {
        Text said = {NULL, 0, 0};
        empty_case();
        if (run_in_child(&said, STDOUT_AND_STDERR, make_seed, &fuzz.count) != DONE)
            die(FAILED, "no input to begin with: %s", said.text);
        CHECK(rename(CASE_DIR, made[fuzz.count]) == 0);
        case_read(&fuzz.seeds[fuzz.count], made[fuzz.count], strlen("made0/"));
        free(said.text);
    }
    for (int i = 0; i < n; free(entries[i++])) {
        if (entries[i]->d_name[0] == '.') continue;
        char* path = xprintf("%s/%s", directory, entries[i]->d_name);
        Case* c = &fuzz.seeds[fuzz.count++];
        CHECK(fuzz.count < MOST_SEEDS);
        if (fuzz.reader->make) case_read(c, made[0], strlen("made0/"));
        case_read(c, path, strlen(path) + 1);
        free(path);
    }
    free(entries), free(directory);
}

// All inputs of a reader, as long as its share of the time lasts.
static int try_reader(void) {
    int64_t accepted = 0, refused = 0, failed = 0, share = *fuzz.only ? 1000 : fuzz.reader->share;
    double start = now_seconds(), end = start + fuzz.seconds * (double)share / 1000;
    read_seeds();
    for (int64_t i = -fuzz.count; i < fuzz.inputs * share / 1000 && failed < FAILURES_OF_READER; i++) {
        int status;
        if (i >= 0 && now_seconds() > end) break;
        failed += !attempt(i, &status);
        accepted += status == DONE, refused += status != DONE;
    }
    // A fuzzer whose inputs all end at the first byte, or are all taken, tries nothing.
    int64_t n = accepted + refused;
    int is_lopsided = n >= 300 && (accepted < n / 100 || refused < n / 1000), good = failed == 0 && !is_lopsided;
    printf("%s %-12s %6lld inputs: %6lld accepted, %6lld refused, %d failed; %.0f a second\n", good ? "ok  " : "FAIL",
           fuzz.reader->name, (long long)n, (long long)accepted, (long long)refused, (int)failed,
           (double)n / (now_seconds() - start));
    return good;
}

int main(int argc, char** argv) {
    int good = 0, tried = 0;
    // clang-format off
    Flag flags[] = {
        {NULL, "--inputs",  FLAG_SIZE,   &fuzz.inputs,  "5000", 0, 1e12, NULL, SCOPE_RUN, TOPIC_NONE, "over all readers"},
        {NULL, "--seconds", FLAG_REAL,   &fuzz.seconds, "1e9",  0, 1e9,  NULL, SCOPE_RUN, TOPIC_NONE, "then no more"},
        {NULL, "--seed",    FLAG_SIZE,   &fuzz.seed,    "1",    0, 9e15, NULL, SCOPE_RUN, TOPIC_NONE, "of all draws"},
        {NULL, "--reader",  FLAG_STRING, &fuzz.only,    "",     0, 0,    NULL, SCOPE_RUN, TOPIC_NONE, "empty: all"},
    };
    // clang-format on
    flags_parse(flags, COUNT_OF(flags), argc, argv, "test_fuzz [flags]");
    // In memory, if that is a directory: a run reads and writes about a million files.
    char* work = xprintf("%s/fuzz-XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    char* corpus = realpath("dev/test/corpus", NULL);
    if (!corpus || !mkdtemp(work) || chdir(work) != 0 || symlink(corpus, "corpus") != 0)
        die(FAILED, "dev/test/corpus or %s: %s", work, strerror(errno));
    for (size_t i = 0; i < COUNT_OF(READERS); i++) {
        fuzz.reader = &READERS[i];
        if (*fuzz.only && strcmp(READERS[i].name, fuzz.only) != 0) continue;
        good += try_reader(), tried++;
    }
    if (tried == 0) die(USAGE, "--reader %s: there is no such reader", fuzz.only);
    remove_directory(work);
    printf("seed %lld\n%d passed, %d failed\n", (long long)fuzz.seed, good, tried - good);
    return good != tried;
}
