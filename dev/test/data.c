/* Tests of llmc/data and of the built-in corpus: what is written reads back, batches agree however they are cut,
 * and bad files end with exit status 2 and one line that names them.
 *
 * Prints `ok   name` or `FAIL name: why`, then the counts; exit status 1 after a failure. */
#include <ftw.h>
#include <sys/wait.h>

#include "../../llmc/data/batch_lm.h"
#include "../../llmc/data/safetensors.h"
#include "../../llmc/data/tokenizer.h"

#define main builtin_corpus_main
#include "../data/builtin_corpus.c"
#undef main

typedef struct {
    int passed, failed;
    const char* name;  // of the test that runs
    int bad;           // it failed already
    char* directory;   // of its own, for its files
} Test;

__attribute__((format(printf, 2, 3))) static void fail(Test* t, const char* format, ...) {
    va_list args;
    va_start(args, format);
    if (!t->bad) {
        printf("FAIL %s: ", t->name);
        vprintf(format, args);
        putchar('\n');
    }
    t->bad = 1;
    va_end(args);
}

#define EXPECT(t, condition)                                                                                           \
    do {                                                                                                               \
        if (!(condition)) fail(t, "line %d: %s", __LINE__, #condition);                                                \
    } while (0)

static char* path_in(const Test* t, const char* name) { return xprintf("%s/%s", t->directory, name); }

// A file in the test's directory; returns its path, which lives until the test program ends.
static char* put_file(Test* t, const char* name, const void* bytes, size_t n) {
    char* path = path_in(t, name);
    if (write_file(path, bytes, n) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    return path;
}

static int remove_entry(const char* path, const struct stat* st, int type, struct FTW* where) {
    (void)st, (void)type, (void)where;
    return remove(path);
}

// Run in a child process: it must end with `status`, and print one line that holds `message` if it is not NULL.
// Status -1 accepts 0 and USAGE: any file must lead to one of them.
static void expect_end(Test* t, int status, const char* message, void (*run)(const char*), const char* argument) {
    int ends[2], result = 0;
    char text[4096];
    size_t n = 0;
    fflush(stdout);
    if (pipe(ends) != 0) die(FAILED, "pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        run(argument);
        exit(DONE);
    }
    close(ends[1]);
    for (ssize_t got; n < sizeof(text) - 1 && (got = read(ends[0], text + n, sizeof(text) - 1 - n)) > 0;)
        n += (size_t)got;
    close(ends[0]);
    text[n] = '\0';
    waitpid(child, &result, 0);
    int code = WIFEXITED(result) ? WEXITSTATUS(result) : 128 + WTERMSIG(result);
    int expected = status < 0 ? code == DONE || code == USAGE : code == status;
    if (!expected) fail(t, "%s ended with %d, not %d: %s", argument, code, status, text);
    if (message && !strstr(text, message)) fail(t, "%s: no \"%s\" in: %s", argument, message, text);
    if (message && !strstr(text, argument)) fail(t, "%s: is not named in: %s", argument, text);
    if (code == USAGE && strchr(text, '\n') != text + n - 1) fail(t, "%s: not one line: %s", argument, text);
}

// ---------------------------------------------------------------------------------------------------------
// Shards

static char* put_shard(Test* t, const char* name, int first, int n, int width) {
    char* path = path_in(t, name);
    int* tokens = (int*)xmalloc((size_t)n * sizeof(int));
    for (int i = 0; i < n; i++) tokens[i] = first + i;
    if (shard_write(path, tokens, (uint64_t)n, width) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    free(tokens);
    return path;
}

static void open_and_close_shards(const char* pattern) {
    Shards s;
    shards_open(&s, pattern);
    shards_close(&s);
}

static void test_shards_round_trip(Test* t) {
    for (int width = 2; width <= 4; width += 2) {
        int first = width == 2 ? 65536 - 200 : 70000, got[200];
        Shards s;
        free(put_shard(t, "b.bin", first, 200, width));
        free(put_shard(t, "a.bin", 7, 3, width));
        char* pattern = path_in(t, "*.bin");
        shards_open(&s, pattern);
        EXPECT(t, s.count == 2 && s.tokens == 203 && s.shard[0].tokens == 3 && s.shard[1].width == width);
        EXPECT(t, strstr(s.shard[0].path, "/a.bin") != NULL);
        for (int offset = 0; offset < 200; offset += 37) {
            int n = 200 - offset < 60 ? 200 - offset : 60;
            memset(got, 0xff, sizeof(got));
            shards_read(&s, 1, (uint64_t)offset, (size_t)n, got);
            for (int i = 0; i < n; i++) EXPECT(t, got[i] == first + offset + i);
            EXPECT(t, n == 200 || got[n] == -1);
        }
        shards_close(&s);
        free(pattern);
    }
}

static void test_shards_beyond_32_bits(Test* t) {
    char* path = put_shard(t, "large.bin", 5, 4, 2);
    uint64_t count = ((uint64_t)1 << 32) + 10;
    int32_t header[4] = {SHARD_MAGIC_UINT16, SHARD_VERSION_UINT16, 10, 1};
    uint16_t last = 4321;
    int fd = open(path, O_RDWR | O_CLOEXEC), got[3];
    EXPECT(t, pwrite(fd, header, sizeof(header), 0) == sizeof(header));
    EXPECT(t, pwrite(fd, &last, 2, (off_t)(SHARD_HEADER_BYTES + 2 * (count - 1))) == 2);  // the rest is a hole
    close(fd);
    Shards s;
    shards_open(&s, path);
    EXPECT(t, s.tokens == count);
    shards_read(&s, 0, count - 3, 3, got);
    EXPECT(t, got[0] == 0 && got[2] == 4321);
    shards_read(&s, 0, 0, 3, got);
    EXPECT(t, got[0] == 5 && got[2] == 7);
    BatchLm b;
    batch_lm_init(&b, &s, 1, 9, 50257, 1, IN_ORDER);
    EXPECT(t, batch_lm_windows(&b) == (count - 1) / 9);
    batch_lm_free(&b);
    shards_close(&s);
    unlink(path);
    free(path);
}

static void test_shards_fingerprint(Test* t) {
    Shards s;
    uint32_t crc[4];
    char *path = put_shard(t, "a.bin", 0, 50000, 2), *other = path_in(t, "z.bin");
    for (int i = 0; i < 4; i++) {
        if (i == 1) EXPECT(t, rename(path, other) == 0);
        if (i == 2) free(put_shard(t, "z.bin", 0, 50001, 2));
        if (i == 3) {
            uint16_t token = 9;
            int fd = open(other, O_WRONLY | O_CLOEXEC);
            EXPECT(t, pwrite(fd, &token, 2, SHARD_HEADER_BYTES + 100000) == 2);
            close(fd);
        }
        shards_open(&s, i ? other : path);
        crc[i] = shards_fingerprint(&s);
        shards_close(&s);
    }
    EXPECT(t, crc[0] == crc[1]);
    EXPECT(t, crc[0] != crc[2]);
    EXPECT(t, crc[2] != crc[3]);
    free(path);
    free(other);
}

// A shard of 10 tokens with one int32 of the header changed, and `extra` bytes more or fewer at its end.
static char* put_bad_shard(Test* t, const char* name, int field, int value, int extra) {
    char* path = put_shard(t, name, 0, 10, 2);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    int32_t word = value;
    if (field >= 0) EXPECT(t, pwrite(fd, &word, 4, 4 * field) == 4);
    EXPECT(t, ftruncate(fd, SHARD_HEADER_BYTES + 20 + extra) == 0);
    close(fd);
    return path;
}

static void test_shards_refused(Test* t) {
    static const struct {
        const char* name;
        int field, value, extra;
        const char* message;
    } cases[] = {
        {"empty.bin", -1, 0, -SHARD_HEADER_BYTES - 20, "is empty"},
        {"header.bin", -1, 0, -21, "1023 bytes are too few"},
        {"none.bin", 2, 0, -20, "holds no tokens"},
        {"short.bin", -1, 0, -2, "truncated"},
        {"odd.bin", -1, 0, 1, "damaged"},
        {"long.bin", -1, 0, 2, "damaged"},
        {"negative.bin", 2, -1, 0, "promises 4294967295 tokens"},
        {"huge.bin", 3, -1, 0, "truncated"},
        {"foreign.bin", 0, 1179403647, 0, "magic number is 1179403647"},
        {"evaluation.bin", 0, SHARD_MAGIC_EVALUATION, 0, "evaluation set"},
        {"version.bin", 1, 2, 0, "version 2"},
        {"wide.bin", 0, SHARD_MAGIC_UINT32, 0, "version 1, but version 7"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char* path = put_bad_shard(t, cases[i].name, cases[i].field, cases[i].value, cases[i].extra);
        expect_end(t, USAGE, cases[i].message, open_and_close_shards, path);
        free(path);
    }
    char* missing = path_in(t, "nothing*.bin");
    expect_end(t, USAGE, "no file matches", open_and_close_shards, missing);
    expect_end(t, USAGE, "not a regular file", open_and_close_shards, t->directory);
    free(missing);
}

static void test_shards_full_disk(Test* t) {
    int tokens[1000] = {0};
    errno = 0;
    EXPECT(t, shard_write("/dev/full", tokens, 1000, 2) == -1 && errno == ENOSPC);
    EXPECT(t, shard_write("/nonexistent/a.bin", tokens, 1000, 2) == -1 && errno == ENOENT);
}

// ---------------------------------------------------------------------------------------------------------
// Batches

static void test_batch_windows(Test* t) {
    // 21 tokens: two windows of 10 and their targets. 20 tokens: one. The windows are 0, 10 | 100.
    int inputs[40], targets[40];
    Shards s;
    BatchLm b;
    free(put_shard(t, "a.bin", 0, 21, 2));
    free(put_shard(t, "b.bin", 100, 20, 4));
    char* pattern = path_in(t, "*.bin");
    shards_open(&s, pattern);
    batch_lm_init(&b, &s, 4, 10, 1000, 1, IN_ORDER);
    EXPECT(t, batch_lm_windows(&b) == 3);
    batch_lm_read(&b, 0, inputs, targets);
    static const int starts[] = {0, 10, 100, 0};  // more sequences than windows: the next epoch follows
    for (int row = 0; row < 4; row++)
        for (int i = 0; i < 10; i++)
            EXPECT(t, inputs[10 * row + i] == starts[row] + i && targets[10 * row + i] == starts[row] + i + 1);
    batch_lm_free(&b);
    shards_close(&s);
    free(pattern);
}

static void test_batch_shuffle(Test* t) {
    enum { WINDOWS = 101, T = 3, EPOCHS = 3 };
    int inputs[4 * T], targets[4 * T], halves[2 * T], first[EPOCHS][WINDOWS], same = 0, in_order = 0;
    Shards s;
    BatchLm one, four, two;
    free(put_shard(t, "a.bin", 0, 50 * T + 1, 2));
    free(put_shard(t, "b.bin", 50 * T, 51 * T + 1, 2));
    char* pattern = path_in(t, "*.bin");
    shards_open(&s, pattern);
    batch_lm_init(&one, &s, 1, T, 1000, 42, SHUFFLED);
    batch_lm_init(&two, &s, 2, T, 1000, 42, SHUFFLED);
    batch_lm_init(&four, &s, 4, T, 1000, 42, SHUFFLED);
    EXPECT(t, batch_lm_windows(&one) == WINDOWS);
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        int seen[WINDOWS] = {0};
        for (int i = 0; i < WINDOWS; i++) {
            batch_lm_read(&one, (uint64_t)(epoch * WINDOWS + i), inputs, targets);
            EXPECT(t, inputs[0] % T == 0 && targets[T - 1] == inputs[0] + T);
            first[epoch][i] = inputs[0];
            seen[inputs[0] / T]++;
            same += epoch > 0 && first[epoch - 1][i] == inputs[0];
            in_order += inputs[0] == i * T;
        }
        for (int i = 0; i < WINDOWS; i++) EXPECT(t, seen[i] == 1);
    }
    EXPECT(t, same < 20 && in_order < 20);
    // Two ranks of two sequences see what one rank of four sees, also where an epoch ends inside a batch.
    for (uint64_t sample = 0; sample < EPOCHS * WINDOWS; sample += 4) {
        batch_lm_read(&four, sample, inputs, targets);
        for (uint64_t rank = 0; rank < 2; rank++) {
            batch_lm_read(&two, sample + 2 * rank, halves, targets);
            EXPECT(t, memcmp(halves, inputs + 2 * T * rank, sizeof(halves)) == 0);
        }
    }
    batch_lm_free(&one);
    batch_lm_free(&two);
    batch_lm_free(&four);
    shards_close(&s);
    free(pattern);
}

static void read_batch_of_nine(const char* path) {
    int inputs[9], targets[9];
    Shards s;
    BatchLm b;
    shards_open(&s, path);
    batch_lm_init(&b, &s, 1, 9, 50257, 1, IN_ORDER);
    for (uint64_t i = 0; i < batch_lm_windows(&b); i++) batch_lm_read(&b, i, inputs, targets);
    batch_lm_free(&b);
    shards_close(&s);
}

static void test_batch_refused(Test* t) {
    char* path = put_shard(t, "few.bin", 0, 9, 2);
    expect_end(t, USAGE, "9 tokens are too few for one sequence of 9", read_batch_of_nine, path);
    free(path);
    path = put_shard(t, "enough.bin", 50257 - 10, 10, 2);
    expect_end(t, DONE, NULL, read_batch_of_nine, path);
    free(path);
    path = put_shard(t, "outside.bin", 50257 - 18, 19, 2);
    expect_end(t, USAGE, "token 50257 at position 18 is outside the vocabulary of 50257", read_batch_of_nine, path);
    free(path);
    path = put_shard(t, "negative.bin", -1, 10, 4);
    expect_end(t, USAGE, "token 4294967295 at position 0", read_batch_of_nine, path);
    free(path);
}

// ---------------------------------------------------------------------------------------------------------
// Safetensors

static void open_and_read_tensors(const char* path) {
    SafeTensors st;
    safetensors_open(&st, path);
    for (int i = 0; i < st.count; i++) {
        size_t n = (size_t)(st.tensors[i].end - st.tensors[i].begin);
        void* bytes = xmalloc(n);
        safetensors_read_bytes(&st, &st.tensors[i], 0, n, bytes);
        free(bytes);
    }
    safetensors_close(&st);
}

static char* put_safetensors(Test* t, const char* name, const char* header, size_t data) {
    Text file = {NULL, 0, 0};
    uint64_t n = strlen(header);
    text_append(&file, (const char*)&n, sizeof(n));
    text_append(&file, header, (size_t)n);
    for (size_t i = 0; i < data; i++) text_append(&file, "\x3f", 1);
    char* path = put_file(t, name, file.text, file.length);
    free(file.text);
    return path;
}

static void test_safetensors_round_trip(Test* t) {
    enum { N = 2 * SAFETENSORS_CHUNK + 7 };
    static const char odd[] = "a \"quoted\"\\name/\xc3\xbc\n";
    uint64_t large[1] = {N}, matrix[2] = {2, 3}, none[3] = {4, 0, 5};
    real* x = (real*)xmalloc(N * sizeof(real));
    real* got = (real*)xmalloc(N * sizeof(real));
    int64_t integers[6] = {1, 2, 3, -4, 5, 6};
    char* path = path_in(t, "x.safetensors");
    for (int i = 0; i < N; i++) x[i] = (real)(i * 0.37 - 1000);
    SafeTensorsWriter w;
    safetensors_writer_create(&w, path);
    safetensors_writer_metadata(&w, "format", "pt");
    safetensors_writer_metadata(&w, "note", "\"1\"");
    safetensors_writer_add(&w, "large", safetensors_real_dtype(), 1, large);
    safetensors_writer_add(&w, odd, "I64", 2, matrix);
    safetensors_writer_add(&w, "empty", "F32", 3, none);
    safetensors_writer_add(&w, "scalar", safetensors_real_dtype(), 0, NULL);
    safetensors_writer_begin(&w);
    safetensors_writer_append(&w, x, 1000);  // pieces need not end with tensors
    safetensors_writer_append(&w, (const char*)x + 1000, N * sizeof(real) - 1000);
    safetensors_writer_append(&w, integers, sizeof(integers));
    safetensors_writer_append(&w, x, sizeof(real));
    EXPECT(t, safetensors_writer_finish(&w) == 0);

    size_t n;
    char* bytes = read_file(path, 1 << 24, &n, FAILED);
    EXPECT(t, crc32_update(&w.table, 0, bytes, n) == w.crc);
    EXPECT(t, bytes[0] % 8 == 0);
    free(bytes);
    SafeTensors st;
    safetensors_open(&st, path);
    EXPECT(t, st.count == 4 && !safetensors_find(&st, "larg") && !safetensors_find(&st, ""));
    const SafeTensor *a = safetensors_find(&st, "large"), *b = safetensors_find(&st, odd);
    const SafeTensor *c = safetensors_find(&st, "scalar"), *d = safetensors_find(&st, "empty");
    EXPECT(t, a && a->ndim == 1 && a->elements == N && a->begin % 8 == 0);
    EXPECT(t, b && b->ndim == 2 && b->shape[1] == 3 && strcmp(b->dtype, "I64") == 0);
    EXPECT(t, c && c->ndim == 0 && c->elements == 1);
    EXPECT(t, d && d->ndim == 3 && d->elements == 0);
    if (!t->bad) {
        safetensors_read_real(&st, a, 0, N, got);
        EXPECT(t, memcmp(x, got, N * sizeof(real)) == 0);
        safetensors_read_real(&st, a, 5, N - 5, got);
        EXPECT(t, got[0] == x[5] && got[N - 6] == x[N - 1]);
        int64_t back[6];
        safetensors_read_bytes(&st, b, 0, sizeof(back), back);
        EXPECT(t, memcmp(back, integers, sizeof(back)) == 0);
    }
    safetensors_close(&st);
    free(x);
    free(got);
    free(path);
}

static void test_safetensors_types(Test* t) {
    static const uint16_t halves[] = {0x3C00, 0xC000, 0x0001, 0x03FF, 0x7BFF, 0x8000, 0xFC00, 0x7E00, 0x3555};
    static const double from_f16[] = {1,         -2,  5.9604644775390625e-8, 6.097555160522461e-05, 65504, -0,
                                      -INFINITY, NAN, 0.333251953125};
    static const uint16_t brains[] = {0x3F80, 0xC000, 0x0001, 0x7F80, 0x4049};
    static const double from_bf16[] = {1, -2, 9.183549615799121e-41, INFINITY, 3.140625};
    static const float singles[] = {1.5f, -3e38f};
    static const double doubles[] = {0.1, -2.5};
    uint64_t n[4] = {COUNT_OF(halves), COUNT_OF(brains), 2, 2};
    char* path = path_in(t, "x.safetensors");
    SafeTensorsWriter w;
    safetensors_writer_create(&w, path);
    safetensors_writer_add(&w, "f16", "F16", 1, &n[0]);
    safetensors_writer_add(&w, "bf16", "BF16", 1, &n[1]);
    safetensors_writer_add(&w, "f32", "F32", 1, &n[2]);
    safetensors_writer_add(&w, "f64", "F64", 1, &n[3]);
    safetensors_writer_begin(&w);
    safetensors_writer_append(&w, halves, sizeof(halves));
    safetensors_writer_append(&w, brains, sizeof(brains));
    safetensors_writer_append(&w, singles, sizeof(singles));
    safetensors_writer_append(&w, doubles, sizeof(doubles));
    EXPECT(t, safetensors_writer_finish(&w) == 0);
    SafeTensors st;
    real got[16];
    safetensors_open(&st, path);
    safetensors_read_real(&st, safetensors_find(&st, "f16"), 0, COUNT_OF(halves), got);
    for (size_t i = 0; i < COUNT_OF(halves); i++)
        EXPECT(t, isnan(from_f16[i]) ? isnan(got[i]) : got[i] == (real)from_f16[i]);
    EXPECT(t, signbit(got[5]) != 0);
    safetensors_read_real(&st, safetensors_find(&st, "bf16"), 0, COUNT_OF(brains), got);
    for (size_t i = 0; i < COUNT_OF(brains); i++) EXPECT(t, got[i] == (real)from_bf16[i]);
    safetensors_read_real(&st, safetensors_find(&st, "f32"), 0, 2, got);
    EXPECT(t, got[0] == (real)1.5f && got[1] == (real)-3e38f);
    safetensors_read_real(&st, safetensors_find(&st, "f64"), 0, 2, got);
    EXPECT(t, got[0] == (real)0.1 && got[1] == (real)-2.5);
    safetensors_close(&st);
    free(path);
}

#define ENTRY(dtype, shape, begin, end)                                                                                \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

static void read_integer_tensor_as_real(const char* path) {
    SafeTensors st;
    real x[2];
    safetensors_open(&st, path);
    safetensors_read_real(&st, &st.tensors[0], 0, 2, x);
    safetensors_close(&st);
}

static void test_safetensors_refused(Test* t) {
    static const struct {
        const char* name;
        const char* header;
        int data;
        const char* message;  // NULL: is read
    } cases[] = {
        {"good", "{\"x\":" ENTRY("F32", "[2,1]", 0, 8) ",\"y\":" ENTRY("U8", "[]", 8, 9) "}", 9, NULL},
        {"order", "{\"x\":" ENTRY("F32", "[2]", 1, 9) ",\"y\":" ENTRY("U8", "[1]", 0, 1) "}   ", 9, NULL},
        {"nothing", "{}", 0, NULL},
        {"metadata", "{\"__metadata__\":{\"a\":\"b\"},\"y\":" ENTRY("U8", "[1]", 0, 1) "}", 1, NULL},
        {"overlap", "{\"x\":" ENTRY("F32", "[2]", 0, 8) ",\"y\":" ENTRY("F32", "[1]", 4, 8) "}", 8,
         "\"y\": its bytes overlap those of \"x\""},
        {"gap", "{\"x\":" ENTRY("F32", "[2]", 0, 8) ",\"y\":" ENTRY("U8", "[1]", 9, 10) "}", 10,
         "\"y\": 1 bytes before it"},
        {"tail", "{\"x\":" ENTRY("F32", "[2]", 0, 8) "}", 9, "1 bytes at its end"},
        {"outside", "{\"x\":" ENTRY("F32", "[2]", 0, 8) "}", 7, "\"x\": bytes 0 to 8 are not inside"},
        {"backwards", "{\"x\":" ENTRY("F32", "[2]", 8, 0) "}", 8, "\"x\": bytes 8 to 0"},
        {"size", "{\"x\":" ENTRY("F32", "[3]", 0, 8) "}", 8, "need 12 bytes"},
        {"dtype", "{\"x\":" ENTRY("F31", "[2]", 0, 8) "}", 8, "dtype \"F31\""},
        {"negative", "{\"x\":" ENTRY("F32", "[-2]", 0, 8) "}", 8, "its shape is not"},
        {"fraction", "{\"x\":" ENTRY("F32", "[2.0]", 0, 8) "}", 8, "its shape is not"},
        {"overflow", "{\"x\":" ENTRY("F32", "[4294967296,4294967296]", 0, 0) "}", 0, "beyond any file's size"},
        {"overflow2", "{\"x\":" ENTRY("F64", "[4611686018427387904]", 0, 0) "}", 0, "beyond any file's size"},
        {"dims", "{\"x\":" ENTRY("U8", "[1,1,1,1,1,1,1,1,1]", 0, 1) "}", 1, "9 dimensions"},
        {"offsets", "{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "its entry is not"},
        {"offset", "{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,\"1\"]}}", 1, "its data_offsets is not"},
        {"missing", "{\"x\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "its entry is not"},
        {"extra", "{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"y\":1}}", 1, "its entry is not"},
        {"kind", "{\"x\":[1]}", 0, "its entry is not"},
        {"twice", "{\"x\":" ENTRY("U8", "[1]", 0, 1) ",\"x\":" ENTRY("U8", "[1]", 1, 2) "}", 2, "occurs twice"},
        {"note", "{\"__metadata__\":{\"a\":1}}", 0, "__metadata__"},
        {"notes", "{\"__metadata__\":[]}", 0, "__metadata__"},
        {"array", "[]", 0, "not a JSON object"},
        {"space", " {}", 0, "not a JSON object"},
        {"no header", "", 0, "not a JSON object"},
        {"json", "{\"x\":}", 0, "not valid JSON"},
        {"nul", "{\"a\\u0000b\":" ENTRY("U8", "[1]", 0, 1) "}", 1, "\\u0000"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char* path = put_safetensors(t, cases[i].name, cases[i].header, (size_t)cases[i].data);
        expect_end(t, cases[i].message ? USAGE : DONE, cases[i].message, open_and_read_tensors, path);
        free(path);
    }
    static const unsigned char longer[] = {3, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
    static const unsigned char longest[] = {255, 255, 255, 255, 255, 255, 255, 255, '{', '}'};
    static const struct {
        const char* name;
        const void* bytes;
        size_t n;
        const char* message;
    } raw[] = {
        {"empty", "", 0, "0 bytes are too few"},
        {"seven", "1234567", 7, "7 bytes are too few"},
        {"longer", longer, sizeof(longer), "should have 3 bytes, but the file ends after 2"},
        {"longest", longest, sizeof(longest), "should have 18446744073709551615 bytes"},
    };
    for (size_t i = 0; i < COUNT_OF(raw); i++) {
        char* path = put_file(t, raw[i].name, raw[i].bytes, raw[i].n);
        expect_end(t, USAGE, raw[i].message, open_and_read_tensors, path);
        free(path);
    }
    char* path = put_safetensors(t, "integers", "{\"x\":" ENTRY("I32", "[2]", 0, 8) "}", 8);
    expect_end(t, USAGE, "its dtype is I32", read_integer_tensor_as_real, path);
    free(path);
    path = path_in(t, "absent");
    expect_end(t, USAGE, "No such file", open_and_read_tensors, path);
    free(path);
    expect_end(t, USAGE, "not a regular file", open_and_read_tensors, t->directory);
}

// Every byte of the header changed, and every shorter file: refused or read, never anything else.
static void test_safetensors_damaged(Test* t) {
    char* path = put_safetensors(
        t, "good", "{\"x\":" ENTRY("F32", "[2,1]", 0, 8) ",\"__metadata__\":{},\"y\":" ENTRY("U8", "[1]", 8, 9) "}", 9);
    size_t n;
    char* bytes = read_file(path, 1000, &n, FAILED);
    for (size_t i = 0; i < n - 9; i++) {
        char saved = bytes[i];
        bytes[i] = (char)(saved ^ (1 << (i % 7)));
        char* bad = put_file(t, "bad", bytes, n);
        expect_end(t, -1, NULL, open_and_read_tensors, bad);
        free(bad);
        bytes[i] = saved;
    }
    for (size_t i = 0; i < n; i += 3) {
        char* bad = put_file(t, "bad", bytes, i);
        expect_end(t, USAGE, "", open_and_read_tensors, bad);
        free(bad);
    }
    free(bytes);
    free(path);
}

static void test_safetensors_full_disk(Test* t) {
    uint64_t shape[1] = {2};
    float x[2] = {1, 2};
    SafeTensorsWriter w;
    EXPECT(t, safetensors_writer_create(&w, "/dev/full") == 0);
    safetensors_writer_add(&w, "x", "F32", 1, shape);
    EXPECT(t, safetensors_writer_begin(&w) == -1 && errno == ENOSPC);
    EXPECT(t, safetensors_writer_append(&w, x, sizeof(x)) == -1);
    errno = 0;
    EXPECT(t, safetensors_writer_finish(&w) == -1 && errno == ENOSPC);
    EXPECT(t, safetensors_writer_create(&w, "/nonexistent/x") == -1 && errno == ENOENT);
    EXPECT(t, safetensors_writer_finish(&w) == -1 && errno == ENOENT);
}

// ---------------------------------------------------------------------------------------------------------
// Tokenizer

static void open_tokenizer(const char* directory) {
    Tokenizer k;
    if (tokenizer_open(&k, directory) != 0) die(LOST_PEER, "%s: no tokenizer", directory);
    tokenizer_free(&k);
}

static void expect_token(Test* t, const Tokenizer* k, int id, const char* bytes, size_t n) {
    size_t length;
    const char* got = tokenizer_decode(k, id, &length);
    if (!got || length != n || memcmp(got, bytes, n) != 0)
        fail(t, "token %d is \"%.*s\", not \"%s\"", id, (int)length, got ? got : "", bytes);
}

static void test_tokenizer_vocabulary(Test* t) {
    // \u0120 is a space, \u010a a line break, \u00e2\u0136\u00a2 the bytes E2 94 A2; \u4e2d is in no byte alphabet.
    static const char vocabulary[] = "{\"a\":0, \"\\u0120the\":5, \"\\u010a\":2, \"\\u00e2\\u0136\\u00a2\":3,"
                                     "\"\\u0143\":6, \"\\\"\\\\\":7, \"\xe4\xb8\xad\":8, \"<|endoftext|>\":9}";
    Tokenizer k;
    size_t n;
    EXPECT(t, tokenizer_open(&k, t->directory) == -1);
    free(put_file(t, "encoder.json", vocabulary, sizeof(vocabulary) - 1));
    EXPECT(t, tokenizer_open(&k, t->directory) == 0);
    EXPECT(t, k.size == 10 && tokenizer_end_of_text(&k) == 9);
    expect_token(t, &k, 0, "a", 1);
    expect_token(t, &k, 5, " the", 4);
    expect_token(t, &k, 2, "\n", 1);
    expect_token(t, &k, 3, "\xe2\x94\xa2", 3);
    expect_token(t, &k, 6, "\xad", 1);
    expect_token(t, &k, 7, "\"\\", 2);
    expect_token(t, &k, 8, "\xe4\xb8\xad", 3);
    expect_token(t, &k, 9, "<|endoftext|>", 13);
    EXPECT(t, !tokenizer_decode(&k, 1, &n) && !tokenizer_decode(&k, -1, &n) && !tokenizer_decode(&k, 10, &n));
    tokenizer_free(&k);
}

#define BYTE_LEVEL "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"ByteLevel\"}]},"
#define TINY "\"model\":{\"vocab\":{\"\\u0120a\":0,\"b\":1}}"

static void test_tokenizer_json(Test* t) {
    static const char text[] = "{" BYTE_LEVEL "\"added_tokens\":[{\"id\":2,\"content\":\"<|endoftext|>\"},"
                               "{\"id\":4,\"content\":\"\\u0120 x\"}]," TINY "}";
    Tokenizer k;
    size_t n;
    free(put_file(t, "tokenizer.json", text, sizeof(text) - 1));
    EXPECT(t, tokenizer_open(&k, t->directory) == 0);
    EXPECT(t, k.size == 5 && tokenizer_end_of_text(&k) == 2);
    expect_token(t, &k, 0, " a", 2);
    expect_token(t, &k, 4, "\xc4\xa0 x", 4);  // special tokens are not in the byte alphabet
    EXPECT(t, !tokenizer_decode(&k, 3, &n));
    tokenizer_free(&k);
}

static void test_tokenizer_refused(Test* t) {
    static const struct {
        const char* name;
        const char* text;
        const char* message;
    } cases[] = {
        {"vocab.json", "", "not valid JSON"},
        {"vocab.json", "{\"a\":0", "not valid JSON"},
        {"vocab.json", "[]", "no object of tokens"},
        {"vocab.json", "{}", "no object of tokens"},
        {"vocab.json", "{\"a\":0,\"b\":0}", "its id 0 is also another token's"},
        {"vocab.json", "{\"a\":-1}", "token \"a\": its id"},
        {"vocab.json", "{\"a\":\"1\"}", "token \"a\": its id"},
        {"vocab.json", "{\"a\":999999999}", "token \"a\": its id"},
        {"tokenizer.json", "{" TINY "}", "not a byte-level tokenizer"},
        {"tokenizer.json", "{" BYTE_LEVEL "\"model\":{}}", "no object of tokens"},
        {"tokenizer.json", "{" BYTE_LEVEL "\"added_tokens\":[{}]," TINY "}", "no content"},
        {"tokenizer.json", "{" BYTE_LEVEL "\"added_tokens\":[{\"content\":\"x\"}]," TINY "}", "token \"x\": its id"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char* path = put_file(t, cases[i].name, cases[i].text, strlen(cases[i].text));
        expect_end(t, USAGE, cases[i].message, open_tokenizer, t->directory);
        unlink(path);
        free(path);
    }
}

static void test_tokenizer_copy(Test* t) {
    char *from = path_in(t, "from"), *to = path_in(t, "to"), *copy = path_in(t, "to/merges.txt"), *full;
    size_t n;
    EXPECT(t, make_directories(from) == 0 && make_directories(to) == 0);
    free(put_file(t, "from/merges.txt", "#version: 0.2\n", 14));
    free(put_file(t, "from/vocab.json", "{\"a\":0}", 7));
    free(put_file(t, "from/other.json", "{}", 2));
    EXPECT(t, tokenizer_copy_files(from, to) == 0);
    EXPECT(t, tokenizer_copy_files(to, to) == 0);  // onto itself: nothing may be lost
    char* text = read_file(copy, 100, &n, FAILED);
    EXPECT(t, n == 14 && strcmp(text, "#version: 0.2\n") == 0);
    full = path_in(t, "to/vocab.json");
    EXPECT(t, file_exists(full));
    free(full);
    full = path_in(t, "to/other.json");
    EXPECT(t, !file_exists(full));
    EXPECT(t, tokenizer_copy_files(from, full) == -1 && errno == ENOENT);
    free(full);
    free(text);
    free(copy);
    free(from);
    free(to);
}

// ---------------------------------------------------------------------------------------------------------
// The built-in corpus

// n bytes that tell where in the file they are.
static char corpus_byte(char letter, size_t i) { return (char)(letter + (char)(i / 2000)); }

static void put_text(Test* t, const char* name, char letter, size_t n) {
    char* text = (char*)xmalloc(n + 1);
    for (size_t i = 0; i < n; i++) text[i] = corpus_byte(letter, i);
    free(put_file(t, name, text, n));
    free(text);
}

static void test_corpus(Test* t) {
    static const char* const directories[] = {"llmc/data", "dev/results", "dev/.hidden", "dev/out", "scripts", "data"};
    for (size_t i = 0; i < COUNT_OF(directories); i++) {
        char* path = path_in(t, directories[i]);
        EXPECT(t, make_directories(path) == 0);
        free(path);
    }
    static const char* const left_out[] = {"a.txt", "dev/results/x.md", "dev/.hidden/x.c", "dev/out/x.md",
                                           ".x.c",  "data/x.md",        "scripts/x.json",  "llmc/data/x.o"};
    for (size_t i = 0; i < COUNT_OF(left_out); i++) put_text(t, left_out[i], '!', 10);
    put_text(t, "Makefile", 'M', 6000);
    put_text(t, "b.cu", 'b', 6000);
    put_text(t, "llmc/data/l.h", 'l', 10000);
    put_text(t, "scripts/s.sh", 's', 5);
    char *out = path_in(t, "result"), *train = path_in(t, "result/train.bin"), *val = path_in(t, "result/val.bin");
    char* arguments[] = {(char*)"builtin_corpus", t->directory, out, NULL};
    fflush(stdout);
    int saved = dup(STDOUT_FILENO), null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(null, STDOUT_FILENO);
    EXPECT(t, builtin_corpus_main(3, arguments) == DONE);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    close(null);

    int tokens[22009], *validation = (int*)xmalloc(2048 * sizeof(int));
    Shards s, v;
    shards_open(&s, train);
    shards_open(&v, val);
    EXPECT(t, s.tokens + v.tokens == 22009 && v.tokens == 2048);
    if (!t->bad) {
        // Blocks 0 to 8, then block 9 of validation, then the rest: put together again in the order of the files.
        shards_read(&s, 0, 0, 9 * 2048, tokens);
        shards_read(&v, 0, 0, 2048, validation);
        memcpy(tokens + 9 * 2048, validation, 2048 * sizeof(int));
        shards_read(&s, 0, 9 * 2048, 22009 - 10 * 2048, tokens + 10 * 2048);
        static const struct {
            char letter;
            size_t n;
        } files[] = {{'M', 6000}, {'b', 6000}, {'l', 10000}, {'s', 5}};
        size_t at = 0;
        for (size_t f = 0; f < COUNT_OF(files); f++) {
            EXPECT(t, tokens[at++] == 256);
            for (size_t i = 0; i < files[f].n; i++) EXPECT(t, tokens[at++] == corpus_byte(files[f].letter, i));
        }
    }
    shards_close(&s);
    shards_close(&v);
    free(validation);

    // Both forms of the tokenizer decode every byte to itself.
    for (int form = 0; form < 2; form++) {
        Tokenizer k;
        char* whole = path_in(t, "result/tokenizer.json");
        EXPECT(t, tokenizer_open(&k, out) == 0 && k.size == 257 && tokenizer_end_of_text(&k) == 256);
        for (int byte = 0; byte < 256; byte++) {
            char c = (char)byte;
            expect_token(t, &k, byte, &c, 1);
        }
        tokenizer_free(&k);
        unlink(whole);
        free(whole);
    }
    free(out);
    free(train);
    free(val);
}

static void build_corpus_of_nothing(const char* root) {
    char* arguments[] = {(char*)"builtin_corpus", (char*)root, (char*)"/nonexistent/out", NULL};
    builtin_corpus_main(3, arguments);
}

static void test_corpus_refused(Test* t) {
    expect_end(t, USAGE, "holds no sources", build_corpus_of_nothing, t->directory);
    put_text(t, "a.c", 'a', 100);
    expect_end(t, USAGE, "too few", build_corpus_of_nothing, t->directory);
}

int main(void) {
    static const struct {
        const char* name;
        void (*run)(Test*);
    } tests[] = {
        {"shards/round_trip", test_shards_round_trip},
        {"shards/beyond_32_bits", test_shards_beyond_32_bits},
        {"shards/fingerprint", test_shards_fingerprint},
        {"shards/refused", test_shards_refused},
        {"shards/full_disk", test_shards_full_disk},
        {"batch_lm/windows", test_batch_windows},
        {"batch_lm/shuffle", test_batch_shuffle},
        {"batch_lm/refused", test_batch_refused},
        {"safetensors/round_trip", test_safetensors_round_trip},
        {"safetensors/types", test_safetensors_types},
        {"safetensors/refused", test_safetensors_refused},
        {"safetensors/damaged", test_safetensors_damaged},
        {"safetensors/full_disk", test_safetensors_full_disk},
        {"tokenizer/vocabulary", test_tokenizer_vocabulary},
        {"tokenizer/json", test_tokenizer_json},
        {"tokenizer/refused", test_tokenizer_refused},
        {"tokenizer/copy", test_tokenizer_copy},
        {"builtin_corpus/files", test_corpus},
        {"builtin_corpus/refused", test_corpus_refused},
    };
    Test t;
    memset(&t, 0, sizeof(t));
    const char* temporary = getenv("TMPDIR");
    for (size_t i = 0; i < COUNT_OF(tests); i++) {
        t.name = tests[i].name;
        t.bad = 0;
        t.directory = xprintf("%s/test_data_XXXXXX", temporary && temporary[0] ? temporary : "/tmp");
        if (!mkdtemp(t.directory)) die(FAILED, "%s: cannot be made: %s", t.directory, strerror(errno));
        tests[i].run(&t);
        if (!t.bad) printf("ok   %s\n", t.name);
        t.passed += !t.bad;
        t.failed += t.bad;
        nftw(t.directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
        free(t.directory);
    }
    printf("%d passed, %d failed\n", t.passed, t.failed);
    return t.failed ? FAILED : DONE;
}
