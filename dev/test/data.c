/* Tests of llmc/data and of the tests' corpus: what is written reads back, batches agree however they are cut,
 * and bad files end with exit status 2 and one line that names them.
 *
 * Prints `ok   name`, `skip name: why` or `FAIL name: why`, then the counts; exit status 1 after a failure. */

#include "llmc/bert/batch_mlm.h"
#include "llmc/data/batch_lm.h"
#include "llmc/data/safetensors.h"
#include "llmc/data/token_scan.h"
#include "llmc/model/tokenizer_files.h"
#include "llmc/text/wordpiece.h"

#define main byte_corpus_main
#include "byte_corpus.c"
#include "dev/test/tests.h"
#undef main

// Run in a child process: it must end with `status`, and print one line that contains `message` if that is not NULL.
// Status -1 accepts 0 and USAGE: damaged files must lead to one of them.
static void expect_end(Tests* t, int status, const char* message, void (*run)(const char*), const char* argument) {
    Text said = {NULL, 0, 0};
    int code = exit_status_of(run, argument, &said);
    int expected = status < 0 ? code == DONE || code == USAGE : code == status;
    if (!expected) fail(t, "%s ended with %d, not %d: %s", argument, code, status, said.text);
    if (message && !strstr(said.text, message)) fail(t, "%s: no \"%s\" in: %s", argument, message, said.text);
    if (message && !strstr(said.text, argument)) fail(t, "%s: is not named in: %s", argument, said.text);
    if (code == USAGE && !is_one_line(&said)) fail(t, "%s: not one line: %s", argument, said.text);
    free(said.text);
}

// ---------------------------------------------------------------------------------------------------------
// Shards

static char* put_shard(Tests* t, const char* name, int first, int n, int width) {
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

static void test_shards_round_trip(Tests* t) {
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
            shards_read(&s, 1, (uint64_t)offset, (size_t)n, got, NULL);
            for (int i = 0; i < n; i++) EXPECT(t, got[i] == first + offset + i);
            EXPECT(t, n == 200 || got[n] == -1);
        }
        shards_close(&s);
        free(pattern);
    }
}

// Extend a file by a hole with these bytes at its end. Returns 0 if the file system has no files of that size.
static int put_far(Tests* t, const char* path, const void* bytes, size_t n, uint64_t offset) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    ssize_t put = pwrite(fd, bytes, n, (off_t)offset);
    if (put < 0 && (errno == EFBIG || errno == ENOSPC || errno == EINVAL))
        t->skip = xprintf("%s: %s at %llu bytes", path, strerror(errno), (unsigned long long)offset);
    else EXPECT(t, put == (ssize_t)n);
    close(fd);
    return put == (ssize_t)n;
}

// 2^32 + 10 tokens, 8 GiB, a hole except for both ends: windows are read correctly at both ends, and a permutation of
// more than 2^32 windows works.
static void test_shards_beyond_32_bits(Tests* t) {
    enum { T = 9, LAST = 2 * T };
    char* path = put_shard(t, "large.bin", 5, 4, 2);
    uint64_t count = ((uint64_t)1 << 32) + 10;
    int32_t header[4] = {SHARD_MAGIC_UINT16, SHARD_VERSION_UINT16, 10, 1};
    uint16_t last[LAST];
    for (int i = 0; i < LAST; i++) last[i] = (uint16_t)(1000 + i);
    if (put_far(t, path, last, sizeof(last), SHARD_HEADER_BYTES + 2 * (count - LAST)) &&
        put_far(t, path, header, sizeof(header), 0)) {
        Shards s;
        BatchLm b;
        int got[3], inputs[T], targets[T];
        shards_open(&s, path);
        EXPECT(t, s.tokens == count);
        shards_read(&s, 0, count - 3, 3, got, NULL);
        EXPECT(t, got[0] == 1000 + LAST - 3 && got[2] == 1000 + LAST - 1);
        shards_read(&s, 0, 0, 3, got, NULL);
        EXPECT(t, got[0] == 5 && got[2] == 7);
        batch_lm_init(&b, &s, 1, T, 50257, 1, IN_ORDER);
        uint64_t windows = (count - 1) / T, first = (windows - 1) * T;  // the last window and its first token
        EXPECT(t, batch_lm_windows(&b) == windows && count - first <= LAST && count - first > T);
        batch_lm_read(&b, 7 * windows - 1, inputs, targets, NULL);
        for (int i = 0; i < T; i++) {
            int want = 1000 + LAST - (int)(count - first) + i;
            EXPECT(t, inputs[i] == want && targets[i] == want + 1);
        }
        batch_lm_read(&b, 7 * windows, inputs, targets, NULL);
        EXPECT(t, inputs[0] == 5 && targets[0] == 6);
        batch_lm_free(&b);
        // There are more than 2^32 windows of one token. Each is read at its place in the order.
        batch_lm_init(&b, &s, 1, 1, 50257, 3, SHUFFLED);
        uint64_t beyond = 0, most = 0;
        for (uint64_t i = 0; i < 4096; i++) {
            uint64_t sequence = count - 2 - i, w = batch_lm_window(&b, sequence);
            EXPECT(t, w < count - 1);
            beyond += w >= (uint64_t)1 << 31;
            if (w > most) most = w;
            batch_lm_read(&b, sequence, inputs, targets, NULL);
            EXPECT(t, inputs[0] == (w < 4 ? 5 + (int)w : w < count - LAST ? 0 : 1000 + LAST - (int)(count - w)));
        }
        EXPECT(t, beyond > 1024 && beyond < 3072 && most > ((uint64_t)15 << 28));  // they are all over the file
        batch_lm_free(&b);
        shards_close(&s);
    }
    unlink(path);
    free(path);
}

// More files than the process may open, though it asks for all that it may.
static void open_under_a_low_limit(const char* directory) {
    struct rlimit low = {64, 256};
    Shards s;
    char* pattern = xprintf("%s/many_*.bin", directory);
    if (setrlimit(RLIMIT_NOFILE, &low) != 0) die(FAILED, "%s: %s", pattern, strerror(errno));
    shards_open(&s, pattern);
    shards_close(&s);
    free(pattern);
}

static void test_shards_many(Tests* t) {
    enum { FILES = 300, MOST = 200 };
    char name[32];
    Shards s;
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof(name), "many_%06d.bin", i);
        free(put_shard(t, name, 10 * i, 11, 2));
    }
    char* pattern = path_in(t, "many_*.bin");
    shards_open(&s, pattern);
    EXPECT(t, s.count == FILES && s.tokens == 11 * FILES);
    for (int i = 1; i < s.count; i++) EXPECT(t, strcmp(s.shard[i - 1].path, s.shard[i].path) < 0);
    shards_close(&s);
    expect_end(t, USAGE, "ulimit -n", open_under_a_low_limit, t->directory);
    for (int i = MOST; i < FILES; i++) {
        snprintf(name, sizeof(name), "many_%06d.bin", i);
        char* path = path_in(t, name);
        unlink(path);
        free(path);
    }
    expect_end(t, DONE, NULL, open_under_a_low_limit, t->directory);
    free(pattern);
}

static void test_shards_fingerprint(Tests* t) {
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

// The largest token is found anywhere: at both ends, at the ends of the pieces that threads read, and in several
// places.
static void test_shards_scan(Tests* t) {
    enum { MOST = 70000 };
    int* tokens = (int*)xcalloc(MOST, sizeof(int));
    for (int width = 2; width <= 4; width += 2) {
        const int piece = SCAN_PIECE / width, sizes[] = {1, 7, piece, piece + 1, MOST};
        for (size_t k = 0; k < COUNT_OF(sizes); k++) {
            const int n = sizes[k], places[] = {0, n / 3, min_int(piece, n) - 1, min_int(piece, n - 1), n - 1};
            for (size_t i = 0; i < COUNT_OF(places); i++) {
                Shards s;
                TokenScan scan;
                const int large = width == 2 ? 65535 : -2;  // as unsigned numbers the largest but one
                char* path = path_in(t, "scan.bin");
                tokens[places[i]] = tokens[n - 1] = large;
                EXPECT(t, shard_write(path, tokens, (uint64_t)n, width) == 0);
                tokens[places[i]] = tokens[n - 1] = 0;
                shards_open(&s, path);
                token_scan_read(&scan, &s.shard[0]);
                if (scan.largest != (width == 2 ? 65535u : 4294967294u) || scan.position != (uint64_t)places[i])
                    fail(t, "of %d tokens of %d bytes number %d is the largest, not %u at %llu", n, width, places[i],
                         scan.largest, (unsigned long long)scan.position);
                shards_close(&s);
                free(path);
            }
        }
    }
    free(tokens);
}

// A shard of 10 tokens with one int32 of the header changed, and `extra` bytes more or fewer at its end.
static char* put_bad_shard(Tests* t, const char* name, int field, int value, int extra) {
    char* path = put_shard(t, name, 0, 10, 2);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    int32_t word = value;
    if (field >= 0) EXPECT(t, pwrite(fd, &word, 4, 4 * field) == 4);
    EXPECT(t, ftruncate(fd, SHARD_HEADER_BYTES + 20 + extra) == 0);
    close(fd);
    return path;
}

static void test_shards_refused(Tests* t) {
    static const struct {
        const char* name;
        int field, value, extra;
        const char* message;
    } cases[] = {
        {"empty.bin", -1, 0, -SHARD_HEADER_BYTES - 20, "is empty"},
        {"header.bin", -1, 0, -21, "1023 bytes are too few"},
        {"none.bin", 2, 0, -20, "contains no tokens"},
        {"short.bin", -1, 0, -2, "truncated"},
        {"odd.bin", -1, 0, 1, "damaged"},
        {"long.bin", -1, 0, 2, "damaged"},
        {"negative.bin", 2, -1, 0, "gives 4294967295 tokens"},
        {"huge.bin", 3, -1, 0, "truncated"},
        {"foreign.bin", 0, 1179403647, 0, "magic number is 1179403647"},
        {"evaluation.bin", 0, SHARD_MAGIC_EVALUATION, 0, "evaluation set"},
        {"version.bin", 1, 2, 0, "version 2"},
        {"wide.bin", 0, SHARD_MAGIC_UINT32, 0, "version 1, but only version 7"},
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

static void test_shards_full_disk(Tests* t) {
    int tokens[1000] = {0};
    errno = 0;
    EXPECT(t, shard_write("/dev/full", tokens, 1000, 2) == -1 && errno == ENOSPC);
    char* nowhere = path_in(t, "missing/a.bin");
    EXPECT(t, shard_write(nowhere, tokens, 1000, 2) == -1 && errno == ENOENT);
    free(nowhere);
}

// ---------------------------------------------------------------------------------------------------------
// Batches

static void test_batch_windows(Tests* t) {
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
    batch_lm_read(&b, 0, inputs, targets, NULL);
    static const int starts[] = {0, 10, 100, 0};  // more sequences than windows: the next epoch follows
    for (int row = 0; row < 4; row++)
        for (int i = 0; i < 10; i++)
            EXPECT(t, inputs[10 * row + i] == starts[row] + i && targets[10 * row + i] == starts[row] + i + 1);
    batch_lm_free(&b);
    shards_close(&s);
    free(pattern);
}

// A shard of the tokens first .. first + n - 1, of which those below 1000 that are divisible by 3 count as targets,
// `lacking` bytes of the mask left out.
static char* put_masked_shard(Tests* t, const char* name, int first, int n, int width, int has_mask, int row,
                              int lacking) {
    char* path = put_shard(t, name, first, n, width);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    int32_t header[2] = {has_mask, row};
    unsigned char mask[64] = {0};
    CHECK(n <= 8 * (int)sizeof mask);
    for (int i = 0; i < n; i++)
        if (first + i < 1000 && (first + i) % 3 == 0) mask[i / 8] |= (unsigned char)(1 << i % 8);
    size_t bytes = (size_t)((n + 7) / 8 - lacking);
    EXPECT(t, pwrite(fd, header, sizeof header, 16) == (ssize_t)sizeof header);
    EXPECT(t, pwrite(fd, mask, bytes, SHARD_HEADER_BYTES + n * width) == (ssize_t)bytes);
    close(fd);
    return path;
}

static void test_batch_mask(Tests* t) {
    // Windows of 10, at tokens 1, 11 | 0 | 2000. Two shards have masks, whose bits begin anywhere in a byte.
    enum { T = 10 };
    int inputs[4 * T], targets[4 * T];
    Shards s;
    BatchLm b;
    free(put_masked_shard(t, "a.bin", 1, 2 * T + 1, 2, 1, 5, 0));
    free(put_shard(t, "b.bin", 0, T + 1, 2));
    free(put_masked_shard(t, "c.bin", 2000, T + 1, 4, 1, 0, 0));
    char* pattern = path_in(t, "*.bin");
    shards_open(&s, pattern);
    EXPECT(t, s.tokens == 4 * T + 3 && s.shard[0].has_mask && s.shard[0].row == 5 && !s.shard[1].has_mask);
    batch_lm_init(&b, &s, 4, T, 3000, 1, IN_ORDER);
    batch_lm_read(&b, 0, inputs, targets, NULL);
    for (int i = 0; i < 4 * T; i++) {
        int token = inputs[i] + 1, counts = i / T == 2 || (i / T < 2 && token % 3 == 0);
        EXPECT(t, targets[i] == (counts ? token : -1));
    }
    EXPECT(t, batch_lm_count(&b, 0, 1) == 3 && batch_lm_count(&b, 1, 1) == 4 && batch_lm_count(&b, 2, 1) == T);
    EXPECT(t, batch_lm_count(&b, 3, 1) == 0 && batch_lm_count(&b, 0, 4) == 7 + T);
    EXPECT(t, batch_lm_count(&b, 2, 8) == 2 * (7 + T));  // over two epochs
    uint32_t crc = shards_fingerprint(&s);
    batch_lm_free(&b), shards_close(&s);
    // Another mask is other data.
    char* path = path_in(t, "c.bin");
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    EXPECT(t, pwrite(fd, "\7", 1, SHARD_HEADER_BYTES + 4 * (T + 1)) == 1);
    close(fd);
    shards_open(&s, pattern);
    EXPECT(t, shards_fingerprint(&s) != crc);
    batch_lm_init(&b, &s, 1, T, 3000, 1, IN_ORDER);
    EXPECT(t, batch_lm_count(&b, 3, 1) == 2);
    batch_lm_free(&b), shards_close(&s);
    free(path), free(pattern);
}

static void use_windows_of_seven(const char* path) {
    Shards s;
    BatchLm b;
    shards_open(&s, path);
    batch_lm_init(&b, &s, 1, 7, 3000, 1, IN_ORDER);
    batch_lm_free(&b), shards_close(&s);
}

static void test_batch_mask_refused(Tests* t) {
    static const struct {
        const char* name;
        int has_mask, row, lacking;
        const char* message;
    } cases[] = {
        {"short.bin", 1, 0, 1, "truncated"},        {"none.bin", 1, 0, 3, "truncated"},
        {"unknown.bin", 2, 0, 0, "has the mask 2"}, {"negative.bin", 1, -5, 0, "row length -5"},
        {"without.bin", 0, 0, 0, "damaged"},        {"rows.bin", 1, 5, 0, "rows of 5 tokens, which sequences of 7"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char* path = put_masked_shard(t, cases[i].name, 1, 20, 2, cases[i].has_mask, cases[i].row, cases[i].lacking);
        expect_end(t, USAGE, cases[i].message, use_windows_of_seven, path);
        free(path);
    }
}

static void test_batch_shuffle(Tests* t) {
    enum { WINDOWS = 101, T = 3, EPOCHS = 3 };
    int inputs[4 * T], targets[4 * T], halves[2 * T], first[EPOCHS][WINDOWS], same = 0, in_order = 0, as_other = 0;
    Shards s;
    BatchLm one, four, two, other;
    free(put_shard(t, "a.bin", 0, 50 * T + 1, 2));
    free(put_shard(t, "b.bin", 50 * T, 51 * T + 1, 2));
    char* pattern = path_in(t, "*.bin");
    shards_open(&s, pattern);
    batch_lm_init(&one, &s, 1, T, 1000, 42, SHUFFLED);
    batch_lm_init(&two, &s, 2, T, 1000, 42, SHUFFLED);
    batch_lm_init(&four, &s, 4, T, 1000, 42, SHUFFLED);
    batch_lm_init(&other, &s, 1, T, 1000, 43, SHUFFLED);
    EXPECT(t, batch_lm_windows(&one) == WINDOWS);
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        int seen[WINDOWS] = {0};
        for (int i = 0; i < WINDOWS; i++) {
            batch_lm_read(&one, (uint64_t)(epoch * WINDOWS + i), inputs, targets, NULL);
            EXPECT(t, inputs[0] % T == 0 && targets[T - 1] == inputs[0] + T);
            first[epoch][i] = inputs[0];
            seen[inputs[0] / T]++;
            same += epoch > 0 && first[epoch - 1][i] == inputs[0];
            in_order += inputs[0] == i * T;
            batch_lm_read(&other, (uint64_t)(epoch * WINDOWS + i), inputs, targets, NULL);
            as_other += inputs[0] == first[epoch][i];
        }
        for (int i = 0; i < WINDOWS; i++) EXPECT(t, seen[i] == 1);
    }
    EXPECT(t, same < 20 && in_order < 20 && as_other < 20);
    // Two ranks of two sequences see what one rank of four sees, also where an epoch ends inside a batch.
    for (uint64_t sequence = 0; sequence < EPOCHS * WINDOWS; sequence += 4) {
        batch_lm_read(&four, sequence, inputs, targets, NULL);
        for (uint64_t rank = 0; rank < 2; rank++) {
            batch_lm_read(&two, sequence + 2 * rank, halves, targets, NULL);
            EXPECT(t, memcmp(halves, inputs + 2 * T * rank, sizeof(halves)) == 0);
        }
    }
    batch_lm_free(&one);
    batch_lm_free(&two);
    batch_lm_free(&four);
    batch_lm_free(&other);
    shards_close(&s);
    free(pattern);
}

static void read_batch_of_nine(const char* path) {
    int inputs[9], targets[9];
    Shards s;
    BatchLm b;
    shards_open(&s, path);
    batch_lm_init(&b, &s, 1, 9, 50257, 1, IN_ORDER);
    for (uint64_t i = 0; i < batch_lm_windows(&b); i++) batch_lm_read(&b, i, inputs, targets, NULL);
    batch_lm_free(&b);
    shards_close(&s);
}

static void test_batch_refused(Tests* t) {
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
        safetensors_read_bytes(&st.tensors[i], 0, n, bytes);
        free(bytes);
    }
    safetensors_close(&st);
}

static char* put_safetensors(Tests* t, const char* name, const char* header, size_t data) {
    Text file = {NULL, 0, 0};
    uint64_t n = strlen(header);
    text_append(&file, (const char*)&n, sizeof(n));
    text_append(&file, header, (size_t)n);
    for (size_t i = 0; i < data; i++) text_append(&file, "\x3f", 1);
    char* path = put_file(t, name, file.text, file.length);
    free(file.text);
    return path;
}

static void test_safetensors_round_trip(Tests* t) {
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
    if (!t->is_bad) {
        safetensors_read_real(a, 0, N, got);
        EXPECT(t, memcmp(x, got, N * sizeof(real)) == 0);
        safetensors_read_real(a, 5, N - 5, got);
        EXPECT(t, got[0] == x[5] && got[N - 6] == x[N - 1]);
        int64_t back[6];
        safetensors_read_bytes(b, 0, sizeof(back), back);
        EXPECT(t, memcmp(back, integers, sizeof(back)) == 0);
    }
    safetensors_close(&st);
    free(x);
    free(got);
    free(path);
}

static void test_safetensors_types(Tests* t) {
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
    safetensors_read_real(safetensors_find(&st, "f16"), 0, COUNT_OF(halves), got);
    for (size_t i = 0; i < COUNT_OF(halves); i++)
        EXPECT(t, isnan(from_f16[i]) ? isnan(got[i]) : got[i] == (real)from_f16[i]);
    EXPECT(t, signbit(got[5]) != 0);
    safetensors_read_real(safetensors_find(&st, "bf16"), 0, COUNT_OF(brains), got);
    for (size_t i = 0; i < COUNT_OF(brains); i++) EXPECT(t, got[i] == (real)from_bf16[i]);
    safetensors_read_real(safetensors_find(&st, "f32"), 0, 2, got);
    EXPECT(t, got[0] == (real)1.5f && got[1] == (real)-3e38f);
    safetensors_read_real(safetensors_find(&st, "f64"), 0, 2, got);
    EXPECT(t, got[0] == (real)0.1 && got[1] == (real)-2.5);
    safetensors_close(&st);
    free(path);
}

#define ENTRY(dtype, shape, begin, end)                                                                                \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

// A name in the metadata whose value is a tensor is a second name of that tensor, unless it is a tensor itself.
static void test_safetensors_aliases(Tests* t) {
    char* path = put_safetensors(t, "aliases",
                                 "{\"__metadata__\":{\"a\":\"y\",\"x\":\"y\",\"b\":\"z\",\"z\":\"a\"},\"x\":" ENTRY(
                                     "U8", "[1]", 0, 1) ",\"y\":" ENTRY("U8", "[2]", 1, 3) "}",
                                 3);
    SafeTensors st;
    safetensors_open(&st, path);
    EXPECT(t, st.count == 3 && !safetensors_find(&st, "b") && !safetensors_find(&st, "z"));
    EXPECT(t, safetensors_find(&st, "a")->elements == 2 && safetensors_find(&st, "x")->elements == 1);
    safetensors_close(&st);
    free(path);
}

static void read_integer_tensor_as_real(const char* path) {
    SafeTensors st;
    real x[2];
    safetensors_open(&st, path);
    safetensors_read_real(&st.tensors[0], 0, 2, x);
    safetensors_close(&st);
}

static void test_safetensors_refused(Tests* t) {
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
         "\"y\": begins at byte"},
        {"gap", "{\"x\":" ENTRY("F32", "[2]", 0, 8) ",\"y\":" ENTRY("U8", "[1]", 9, 10) "}", 10,
         "\"y\": begins at byte"},
        {"tail", "{\"x\":" ENTRY("F32", "[2]", 0, 8) "}", 9, "1 bytes at its end"},
        {"outside", "{\"x\":" ENTRY("F32", "[2]", 0, 8) "}", 7, "\"x\": bytes 0 to 8 are not inside"},
        {"backwards", "{\"x\":" ENTRY("F32", "[2]", 8, 0) "}", 8, "\"x\": bytes 8 to 0"},
        {"size", "{\"x\":" ENTRY("F32", "[3]", 0, 8) "}", 8, "do not fit its 8 bytes"},
        {"dtype", "{\"x\":" ENTRY("F31", "[2]", 0, 8) "}", 8, "dtype \"F31\""},
        {"negative", "{\"x\":" ENTRY("F32", "[-2]", 0, 8) "}", 8, "its entry is not"},
        {"fraction", "{\"x\":" ENTRY("F32", "[2.0]", 0, 8) "}", 8, "its entry is not"},
        {"overflow", "{\"x\":" ENTRY("F32", "[4294967296,4294967296]", 0, 0) "}", 0, "its entry is not"},
        {"overflow2", "{\"x\":" ENTRY("F64", "[4611686018427387904]", 0, 0) "}", 0, "do not fit its 0 bytes"},
        {"dims", "{\"x\":" ENTRY("U8", "[1,1,1,1,1,1,1,1,1]", 0, 1) "}", 1, "9 dimensions"},
        {"offsets", "{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "its entry is not"},
        {"offset", "{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,\"1\"]}}", 1, "its entry is not"},
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
        {"nul", "{\"a\\u0000b\":" ENTRY("U8", "[1]", 0, 1) "}", 1, "its entry is not"},
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

// Every change of a header byte and every truncation leads to a refusal or a successful read, never anything else.
static void test_safetensors_damaged(Tests* t) {
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

static void test_safetensors_full_disk(Tests* t) {
    uint64_t shape[1] = {2};
    float x[2] = {1, 2};
    SafeTensorsWriter w;
    EXPECT(t, safetensors_writer_create(&w, "/dev/full") == 0);
    safetensors_writer_add(&w, "x", "F32", 1, shape);
    EXPECT(t, safetensors_writer_begin(&w) == -1 && errno == ENOSPC);
    EXPECT(t, safetensors_writer_append(&w, x, sizeof(x)) == -1);
    errno = 0;
    EXPECT(t, safetensors_writer_finish(&w) == -1 && errno == ENOSPC);
    char* nowhere = path_in(t, "missing/x");
    EXPECT(t, safetensors_writer_create(&w, nowhere) == -1 && errno == ENOENT);
    free(nowhere);
    EXPECT(t, safetensors_writer_finish(&w) == -1 && errno == ENOENT);
}

// ---------------------------------------------------------------------------------------------------------
// Tokenizer

static void open_tokenizer(const char* directory) {
    Tokenizer k;
    if (tokenizer_open(&k, directory) != 0) die(LOST_PEER, "%s: no tokenizer", directory);
    tokenizer_free(&k);
}

static void expect_token(Tests* t, const Tokenizer* k, int id, const char* bytes, size_t n) {
    size_t length;
    const char* got = tokenizer_decode(k, id, &length);
    if (!got || length != n || memcmp(got, bytes, n) != 0)
        fail(t, "token %d is \"%.*s\", not \"%s\"", id, (int)length, got ? got : "", bytes);
}

static void test_tokenizer_vocabulary(Tests* t) {
    // \u0120 is a space, \u010a a line break, \u00e2\u0136\u00a2 the bytes E2 94 A2; \u4e2d is not in the byte
    // alphabet.
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

static void test_tokenizer_json(Tests* t) {
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

static void test_tokenizer_refused(Tests* t) {
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

static void read_tokenizer_files(const char* directory) {
    TokenizerFiles f;
    tokenizer_files_read(&f, directory);
    tokenizer_files_free(&f);
}

static void test_tokenizer_files(Tests* t) {
    char *from = path_in(t, "from"), *to = path_in(t, "to"), *copy = path_in(t, "to/merges.txt"), *other;
    TokenizerFiles f;
    size_t n;
    EXPECT(t, make_directories(from) == 0 && make_directories(to) == 0);
    free(put_file(t, "from/merges.txt", "#version: 0.2\n", 14));
    free(put_file(t, "from/vocab.json", "{\"a\":0}", 7));
    free(put_file(t, "from/other.json", "{}", 2));
    tokenizer_files_read(&f, from);
    EXPECT(t, strcmp(f.directory, from) == 0 && f.count == 2);
    EXPECT(t, tokenizer_files_match(&f, from) && !tokenizer_files_match(&f, to));
    free(put_file(t, "from/merges.txt", "#version: 0.3\n", 14));  // what is written is what was read
    EXPECT(t, !tokenizer_files_match(&f, from));
    EXPECT(t, tokenizer_files_write(&f, to) == 0 && tokenizer_files_match(&f, to));
    char* text = read_file(copy, 100, &n, FAILED);
    EXPECT(t, n == 14 && strcmp(text, "#version: 0.2\n") == 0);
    other = path_in(t, "to/other.json");
    EXPECT(t, !file_exists(other));
    EXPECT(t, tokenizer_files_write(&f, other) == -1 && errno == ENOENT);
    tokenizer_files_free(&f);
    EXPECT(t, !tokenizer_files_match(&f, from));  // there is none
    char* folder = path_in(t, "from/vocab.txt");
    EXPECT(t, make_directories(folder) == 0);
    expect_end(t, USAGE, "is not a regular file", read_tokenizer_files, from);
    free(folder), free(other), free(text), free(copy), free(from), free(to);
}

// ---------------------------------------------------------------------------------------------------------
// Sentences

// A data set whose tokens identify their place: token i of all files has the id FIRST_TOKEN + i.
enum { PAD, UNK, CLS, SEP, MASK, FIRST_TOKEN };

typedef struct {
    int tokens, documents;
    int *document, *sentence;  // [tokens]
    int* sentences;            // [documents]
} Made;

static uint32_t made_random(uint32_t i, uint32_t of) { return philox(i, of, 0, 0, 12345).v[0]; }
static int made_continues(int id) { return id >= FIRST_TOKEN && made_random((uint32_t)id, 1) % 3 == 0; }

static SentencesHeader made_header(int V) {
    SentencesHeader h = {0, 0, 0, V, PAD, UNK, CLS, SEP, MASK};
    return h;
}

// `files` files of `documents` documents each, as DIRECTORY/s0.bin ...; every seventh document is one sentence.
static Made make_sentences(Tests* t, int files, int documents) {
    enum { MAX_SENTENCES = 40, MAX_LENGTH = 50 };
    int most = files * documents * MAX_SENTENCES, V = FIRST_TOKEN, token = 0;
    Made m = {0, files * documents, NULL, NULL, (int*)xcalloc((size_t)(files * documents), sizeof(int))};
    for (int d = 0; d < m.documents; d++)
        m.sentences[d] = d % 7 == 0 ? 1 : 1 + (int)(made_random((uint32_t)d, 2) % MAX_SENTENCES);
    int* length = (int*)xcalloc((size_t)most, sizeof(int));
    for (int d = 0, s = 0; d < m.documents; d++)
        for (int i = 0; i < m.sentences[d]; i++, s++)
            V += length[s] = 1 + (int)(made_random((uint32_t)s, 3) % MAX_LENGTH);
    m.tokens = V - FIRST_TOKEN;
    m.document = (int*)xmalloc((size_t)m.tokens * sizeof(int));
    m.sentence = (int*)xmalloc((size_t)m.tokens * sizeof(int));
    uint32_t* continues = (uint32_t*)xcalloc((size_t)sentences_words(V), sizeof(uint32_t));
    for (int id = 0; id < V; id++) continues[id / 32] |= (uint32_t)made_continues(id) << (id % 32);
    int* tokens = (int*)xmalloc((size_t)m.tokens * sizeof(int));
    uint32_t *begin = (uint32_t*)xmalloc((size_t)most * sizeof(uint32_t)),
             *first = (uint32_t*)xmalloc((size_t)(documents + 1) * 4);
    for (int f = 0, s = 0; f < files; f++) {
        SentencesHeader h = made_header(V);
        for (int i = 0; i < documents; i++) {
            int d = f * documents + i;
            first[h.documents++] = h.sentences;
            for (int k = 0; k < m.sentences[d]; k++, s++) {
                begin[h.sentences++] = h.tokens;
                for (int n = 0; n < length[s]; n++, token++) {
                    tokens[h.tokens++] = FIRST_TOKEN + token;
                    m.document[token] = d;
                    m.sentence[token] = k;
                }
            }
        }
        begin[h.sentences] = h.tokens;
        first[h.documents] = h.sentences;
        char* path = xprintf("%s/s%d.bin", t->directory, f);
        if (sentences_write(path, h, tokens, begin, first, continues) != 0)
            die(FAILED, "%s: %s", path, strerror(errno));
        free(path);
    }
    free(length), free(continues), free(tokens), free(begin), free(first);
    return m;
}

static void made_free(Made* m) { free(m->document), free(m->sentence), free(m->sentences); }

static void test_sentences_round_trip(Tests* t) {
    for (int documents = 2; documents <= 200; documents += 198) {
        Made m = make_sentences(t, 3, documents);
        char* pattern = path_in(t, "s*.bin");
        Sentences s;
        sentences_open(&s, pattern);
        EXPECT(t, s.files.count == 3 && (int)s.documents == m.documents &&
                      s.files.shard[0].width == (documents == 2 ? 2 : 4));
        EXPECT(t, (int)s.files.tokens == m.tokens && s.vocabulary.mask == MASK && s.vocabulary.cls == CLS);
        for (int d = 0, token = 0; d < m.documents && !t->is_bad; d++) {
            EXPECT(t, (int)s.document[d].sentences == m.sentences[d]);
            for (int k = 0; k < m.sentences[d]; k++) {
                int got[64], n = (int)sentences_length(&s, (uint64_t)d, (uint32_t)k, (uint32_t)k + 1);
                sentences_read(got, &s, (uint64_t)d, (uint32_t)k, 0, (size_t)n, NULL);
                for (int i = 0; i < n; i++, token++)
                    EXPECT(t, got[i] == FIRST_TOKEN + token && m.document[token] == d && m.sentence[token] == k);
            }
        }
        for (int id = 0; id < s.vocabulary.V; id++) EXPECT(t, sentences_continues(&s, id) == made_continues(id));
        sentences_close(&s);
        free(pattern);
        made_free(&m);
    }
}

// More than 2^31 tokens in more than 2^32 bytes, most of them a hole: starts of sentences, and tokens at the end.
static void test_sentences_beyond_32_bits(Tests* t) {
    enum { LAST = 20 };
    SentencesHeader h = made_header(1000);
    h.tokens = 3000000001u, h.sentences = 3, h.documents = 2;
    char* path = put_shard(t, "s_large.bin", 0, 1, 2);
    int32_t header[SHARD_HEADER_INTS] = {
        SENTENCES_MAGIC, SENTENCES_VERSION_UINT16, (int32_t)h.tokens, 3, 2, h.V, h.pad, h.unk, h.cls, h.sep, h.mask};
    struct {
        uint16_t hole, tokens[LAST], round;  // an odd number of tokens, rounded up to 4 bytes
        uint32_t begin[4], first[3], continues[32];
    } end;
    memset(&end, 0, sizeof(end));
    for (int i = 0; i < LAST; i++) end.tokens[i] = (uint16_t)(100 + i);
    const uint32_t begin[4] = {0, h.tokens - LAST, h.tokens - 5, h.tokens}, first[3] = {0, 2, 3};
    memcpy(end.begin, begin, sizeof(begin)), memcpy(end.first, first, sizeof(first));
    uint64_t tokens_end = SHARD_HEADER_BYTES + round_up(2 * (uint64_t)h.tokens, 4);
    if (put_far(t, path, &end, sizeof(end), tokens_end - (LAST + 2) * sizeof(uint16_t)) &&
        put_far(t, path, header, sizeof(header), 0)) {
        int got[LAST];
        Sentences s;
        sentences_open(&s, path);
        EXPECT(t, s.documents == 2 && s.files.tokens == h.tokens && s.document[0].sentences == 2);
        EXPECT(t, sentences_length(&s, 0, 0, 1) == h.tokens - LAST && sentences_length(&s, 1, 0, 1) == 5);
        sentences_read(got, &s, 0, 1, 3, 12, NULL);
        for (int i = 0; i < 12; i++) EXPECT(t, got[i] == 103 + i);
        sentences_read(got, &s, 1, 0, 0, 5, NULL);
        for (int i = 0; i < 5; i++) EXPECT(t, got[i] == 115 + i);
        sentences_close(&s);
    }
    unlink(path);
    free(path);
}

static void open_and_read_sentences(const char* pattern) {
    Sentences s;
    int token[3];
    sentences_open(&s, pattern);
    sentences_read(token, &s, 0, 0, 0, 3, NULL);
    sentences_close(&s);
}

static void test_sentences_refused(Tests* t) {
    static const int tokens[] = {5, 6, 7, 8}, outside[] = {5, 6, 9, 8};
    static const uint32_t begin[] = {0, 3, 4}, first[] = {0, 1, 2}, unsorted[] = {0, 5, 4}, empty[] = {0, 0, 2},
                          none = 0;
    SentencesHeader h = {4, 2, 2, 9, PAD, UNK, CLS, SEP, MASK}, wide = h, no_mask = h, no_documents = h;
    wide.V = 10, no_mask.mask = 9, no_documents.documents = 0;
    static const char* const names[] = {"good.bin", "id.bin",   "unsorted.bin", "empty.bin",
                                        "wide.bin", "mask.bin", "none.bin"};
    static const char* const messages[] = {NULL,
                                           "token 9 at position 2 is outside the file's vocabulary of 9",
                                           "are not in order",
                                           "are not in order",
                                           NULL,
                                           "a special token the id 9",
                                           "contains no documents"};
    size_t n;
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        char* path = path_in(t, names[i]);
        EXPECT(t, sentences_write(path,
                                  i == 4   ? wide
                                  : i == 5 ? no_mask
                                  : i == 6 ? no_documents
                                           : h,
                                  i == 1 ? outside : tokens, i == 2 ? unsorted : begin, i == 3 ? empty : first,
                                  &none) == 0);
        expect_end(t, messages[i] ? USAGE : DONE, messages[i], open_and_read_sentences, path);
        free(path);
    }
    char *good = path_in(t, "good.bin"), *both = path_in(t, "[gw]*.bin"), *shard = put_shard(t, "shard.bin", 0, 10, 2);
    int status = -1;
    fflush(stdout);
    if (fork() == 0) {
        (void)!freopen("/dev/null", "w", stderr);
        open_and_read_sentences(both);
        _exit(DONE);
    }
    wait(&status);
    EXPECT(t, WIFEXITED(status) && WEXITSTATUS(status) == USAGE);
    expect_end(t, USAGE, "without sentences", open_and_read_sentences, shard);
    char* bytes = read_file(good, 10000, &n, FAILED);
    for (size_t i = 0; i < n; i += i < 1000 ? 50 : 1) {
        char* bad = put_file(t, "bad", bytes, i);
        expect_end(t, USAGE, "", open_and_read_sentences, bad);
        free(bad);
    }
    bytes[0] ^= 1;
    char* bad = put_file(t, "bad", bytes, n);
    expect_end(t, USAGE, "is not a file of sentences", open_and_read_sentences, bad);
    free(bad), free(bytes), free(good), free(both), free(shard);
    EXPECT(t, sentences_write("/dev/full", h, tokens, begin, first, &none) == -1 && errno == ENOSPC);
}

// ---------------------------------------------------------------------------------------------------------
// Batches of masked sentences

static MlmRecipe published_recipe(void) {
    MlmRecipe r = {20, 0.15, 0, 1, 0, 0.1};
    return r;
}

typedef struct {
    int64_t tokens, sequences, masked, as_mask, as_random, from_lower_half, as_itself, pairs, random_pairs, adjoining,
        full, cut_words;
} MlmCounts;

// The rows of a segment have consecutive tokens of one document.
static int is_segment(const Made* m, const int* text, int begin, int end) {
    for (int i = begin; i < end; i++) {
        int at = text[i] - FIRST_TOKEN;
        if (at < 0 || at >= m->tokens || m->document[at] != m->document[text[begin] - FIRST_TOKEN]) return 0;
        if (i > begin && text[i] != text[i - 1] + 1) return 0;
    }
    return end > begin;
}

// Check one sequence against the recipe. `text` is the batch without masks.
static void check_sequence(Tests* t, MlmCounts* c, const Made* m, const MlmData* data, const MlmBatch* b,
                           const int* text, int s) {
    int begin = b->cu_seqlens[s], end = b->cu_seqlens[s + 1], length = end - begin, sep = begin,
        next = data->recipe.next_sentence;
    EXPECT(t, length >= 3 + 2 * next && length <= data->T && text[begin] == CLS && text[end - 1] == SEP);
    while (sep < end - 1 && text[sep] != SEP) sep++;
    EXPECT(t, next ? sep < end - 1 : sep == end - 1);
    EXPECT(t, is_segment(m, text, begin + 1, sep) && (!next || is_segment(m, text, sep + 1, end - 1)));
    for (int i = begin; i < end; i++)
        EXPECT(t, b->sequence[i] == s && b->position[i] == i - begin && b->types[i] == (i > sep));
    if (t->is_bad) return;
    c->full += length == data->T;
    int a_last = text[sep - 1] - FIRST_TOKEN, document = m->document[a_last];
    if (!next) {
        EXPECT(t, b->next_targets[s] == -1);
        return;
    }
    int b_first = text[sep + 1] - FIRST_TOKEN, label = b->next_targets[s];
    // The label is correct, and B follows A directly in a pair that was not cut.
    EXPECT(t, label == 0 || label == 1);
    EXPECT(t, label == (m->document[b_first] != document));
    if (label == 0) EXPECT(t, b_first > a_last && m->sentence[b_first] > m->sentence[text[begin + 1] - FIRST_TOKEN]);
    if (label == 0 && length < data->T && !data->order)
        EXPECT(t, b_first == a_last + 1 && m->sentence[b_first] == m->sentence[a_last] + 1);
    if (m->sentences[document] == 1) EXPECT(t, label == 1);
    c->adjoining += label == 0 && b_first == a_last + 1;
    c->pairs += m->sentences[document] > 1;
    c->random_pairs += m->sentences[document] > 1 && label;
}

static void check_batch(Tests* t, MlmCounts* c, const Made* m, const MlmData* data, const MlmBatch* b) {
    int* text = (int*)xmalloc((size_t)b->rows * sizeof(int));
    unsigned char* is_masked = (unsigned char*)xcalloc((size_t)b->rows, 1);
    int64_t squares = 0;
    memcpy(text, b->tokens, (size_t)b->rows * sizeof(int));
    for (int i = 0; i < b->masked; i++) {
        int row = b->masked_rows[i], token = b->tokens[row];
        EXPECT(t, row >= 0 && row < b->rows && (i == 0 || row > b->masked_rows[i - 1]));
        EXPECT(t, b->targets[i] >= FIRST_TOKEN);  // not [CLS], not [SEP]
        text[row] = b->targets[i];
        is_masked[row] = 1;
        c->as_mask += token == MASK;
        c->as_itself += token == b->targets[i];
        c->as_random += token != MASK && token != b->targets[i];
        c->from_lower_half += token != MASK && token != b->targets[i] && token < data->text.vocabulary.V / 2;
    }
    EXPECT(t, b->cu_seqlens[0] == 0 && b->cu_seqlens[b->count] == b->rows);
    for (int s = 0, k = 0; s < b->count && !t->is_bad; s++) {
        int begin = b->cu_seqlens[s], end = b->cu_seqlens[s + 1], length = end - begin, n = 0, cut = 0;
        int wanted = (int)nearbyint(0.15 * length);
        wanted = wanted < 1 ? 1 : wanted > data->recipe.max_predictions ? data->recipe.max_predictions : wanted;
        for (; k < b->masked && b->masked_rows[k] < end; k++) n++;
        EXPECT(t, n == wanted);
        squares += (int64_t)length * length;
        EXPECT(t, length <= b->max_length);
        check_sequence(t, c, m, data, b, text, s);
        // A mask covers whole words, except for one word that filled up the count.
        for (int i = begin + 1; i < end; i++)
            cut +=
                text[i - 1] != CLS && text[i - 1] != SEP && made_continues(text[i]) && is_masked[i] != is_masked[i - 1];
        if (data->recipe.whole_words) EXPECT(t, cut <= 1);
        c->cut_words += cut;
    }
    EXPECT(t, squares == b->sum_sq_len);
    c->tokens += b->rows, c->sequences += b->count, c->masked += b->masked;
    free(text), free(is_masked);
}

static void expect_share(Tests* t, const char* what, int64_t got, int64_t of, double share) {
    double sigma = sqrt((double)of * share * (1 - share)), off = fabs((double)got - (double)of * share);
    if (!(off <= 3 * sigma))
        fail(t, "%s: %lld of %lld, %.1f sigma off", what, (long long)got, (long long)of, off / sigma);
}

// Check a million tokens made with one recipe.
static MlmCounts check_recipe(Tests* t, const Made* m, MlmRecipe recipe, int T, int B) {
    MlmCounts c;
    MlmData data;
    MlmBatch b;
    char* pattern = path_in(t, "s*.bin");
    memset(&c, 0, sizeof(c));
    mlm_open(&data, pattern, T, recipe, 42);
    mlm_batch_alloc(&b, B, T, recipe.max_predictions);
    for (uint64_t index = 0; c.tokens < 1000000 && !t->is_bad; index += (uint64_t)B) {
        mlm_batch_build(&b, &data, index, B);
        EXPECT(t, b.count == mlm_count(&data, index, (uint64_t)B));
        check_batch(t, &c, m, &data, &b);
    }
    expect_share(t, "[MASK]", c.as_mask, c.masked, 0.8);
    expect_share(t, "random token", c.as_random, c.masked, 0.1);
    expect_share(t, "random token of the vocabulary's lower half", c.from_lower_half, c.as_random, 0.5);
    expect_share(t, "same token", c.as_itself, c.masked, 0.1);
    if (recipe.next_sentence) expect_share(t, "random next sentence", c.random_pairs, c.pairs, 0.5);
    if (recipe.next_sentence) EXPECT(t, c.adjoining > 0);
    mlm_batch_free(&b);
    mlm_close(&data);
    free(pattern);
    return c;
}

static void test_mlm_million(Tests* t) {
    Made m = make_sentences(t, 2, 300);
    MlmRecipe r = published_recipe();
    MlmCounts c = check_recipe(t, &m, r, 128, 32);
    EXPECT(t, (double)c.full / (double)c.sequences > 0.6 && c.cut_words > 1000);
    r.short_fraction = 1;
    c = check_recipe(t, &m, r, 128, 7);
    EXPECT(t, (double)c.tokens / (double)c.sequences < 100);
    r = published_recipe(), r.max_predictions = 3;
    c = check_recipe(t, &m, r, 64, 16);
    r = published_recipe(), r.next_sentence = 0;
    check_recipe(t, &m, r, 128, 32);
    r.max_predictions = 1;
    check_recipe(t, &m, r, 8, 32);
    made_free(&m);
}

static void test_mlm_whole_words(Tests* t) {
    Made m = make_sentences(t, 2, 300);
    MlmRecipe r = published_recipe();
    r.whole_words = 1;
    MlmCounts c = check_recipe(t, &m, r, 128, 32);
    EXPECT(t, (double)c.cut_words < 0.02 * (double)c.sequences);
    r.next_sentence = 0;
    check_recipe(t, &m, r, 16, 32);  // one or two masks: a word is often too long
    made_free(&m);
}

static void test_mlm_packed(Tests* t) {
    enum { T = 256, PACK = 3 };
    Made m = make_sentences(t, 2, 300);
    MlmRecipe r = published_recipe();
    r.pack = PACK, r.max_predictions = 39;
    check_recipe(t, &m, r, T, 8);
    char* pattern = path_in(t, "s*.bin");
    MlmData data;
    MlmBatch b;
    mlm_open(&data, pattern, T, r, 1);
    mlm_batch_alloc(&b, 1, T, r.max_predictions);  // a row at a time: nothing may be too much for its arrays
    unsigned char* seen = (unsigned char*)xcalloc((size_t)data.chunks, 1);
    int64_t sequences = 0;
    for (uint64_t row = 0; row < data.rows; row++) {
        mlm_batch_build(&b, &data, row, 1);
        EXPECT(t, b.count >= 1 && b.count <= PACK && b.rows <= T && b.masked <= r.max_predictions);
        sequences += b.count;
    }
    for (uint64_t i = 0; i < data.chunks; i++) seen[data.order[i]]++;
    for (uint64_t i = 0; i < data.chunks; i++) EXPECT(t, seen[i] == 1);
    EXPECT(t, sequences == (int64_t)data.chunks && mlm_sequences(&data) == data.rows && data.rows < data.chunks);
    EXPECT(t, mlm_count(&data, data.rows, data.rows) == sequences);
    free(seen);
    mlm_batch_free(&b);
    mlm_close(&data);
    free(pattern);
    made_free(&m);
}

static uint32_t batch_checksum(const MlmBatch* b, const Crc32* table, uint32_t crc, int s) {
    int begin = b->cu_seqlens[s], end = b->cu_seqlens[s + 1];
    size_t n = (size_t)(end - begin) * sizeof(int);
    crc = crc32_update(table, crc, b->tokens + begin, n);
    crc = crc32_update(table, crc, b->types + begin, n);
    crc = crc32_update(table, crc, &b->next_targets[s], sizeof(int));
    for (int i = 0; i < b->masked; i++) {
        int row = b->masked_rows[i] - begin;
        if (row < 0 || row >= end - begin) continue;
        crc = crc32_update(table, crc, &row, sizeof(row));
        crc = crc32_update(table, crc, &b->targets[i], sizeof(int));
    }
    return crc;
}

// The checksum of steps of 24 rows from row `start` on, divided among ranks and into micro-batches of B.
static uint32_t stream_checksum(const MlmData* data, uint64_t start, int steps, int ranks, int B) {
    enum { STEP = 24 };
    Crc32 table;
    MlmBatch b;
    uint32_t crc = 0;
    crc32_init(&table);
    mlm_batch_alloc(&b, B, data->T, data->recipe.max_predictions);
    for (int step = 0; step < steps; step++) {
        for (int at = 0; at < STEP; at += B) {
            int rank = at / (STEP / ranks), micro = at % (STEP / ranks) / B;
            uint64_t index = start + (uint64_t)(step * STEP + rank * (STEP / ranks) + micro * B);
            mlm_batch_build(&b, data, index, B);
            for (int s = 0; s < b.count; s++) crc = batch_checksum(&b, &table, crc, s);
        }
    }
    mlm_batch_free(&b);
    return crc;
}

static void test_mlm_stream(Tests* t) {
    Made m = make_sentences(t, 2, 60);
    char* pattern = path_in(t, "s*.bin");
    for (int pack = 1; pack <= 3; pack += 2) {
        MlmRecipe r = published_recipe();
        MlmData data, other;
        r.pack = pack;
        mlm_open(&data, pattern, 96, r, 7);
        mlm_open(&other, pattern, 96, r, 8);
        uint64_t n = mlm_sequences(&data), start = n - 30;  // over the end of an epoch
        uint32_t one = stream_checksum(&data, start, 5, 1, 24);
        EXPECT(t, stream_checksum(&data, start, 5, 1, 8) == one && stream_checksum(&data, start, 5, 2, 4) == one);
        EXPECT(t, stream_checksum(&data, start, 5, 4, 6) == one && stream_checksum(&data, start, 5, 4, 1) == one);
        EXPECT(t,
               stream_checksum(&data, start + 24, 4, 4, 2) == stream_checksum(&data, start + 24, 4, 1, 12));  // resumed
        EXPECT(t,
               stream_checksum(&other, start, 5, 1, 24) != one && stream_checksum(&data, start + n, 5, 1, 24) != one);

        // The order of each epoch visits every row once. The draws of a row differ between epochs.
        unsigned char* seen = (unsigned char*)xcalloc((size_t)n, 1);
        uint64_t at[4], as_before = 0, as_other = 0;
        for (uint64_t i = 0; i < 4 * n; i++) {
            as_before += i >= n && mlm_row(&data, i) == mlm_row(&data, i - n);
            as_other += mlm_row(&data, i) == mlm_row(&other, i);
            seen[mlm_row(&data, i)]++;
            if (mlm_row(&data, i) == 11) at[i / n] = i;
        }
        for (uint64_t i = 0; i < n; i++) EXPECT(t, seen[i] == 4);
        EXPECT(t, as_before < n / 4 && as_other < n / 4);
        Crc32 table;
        MlmBatch b;
        uint32_t drawn[4];
        crc32_init(&table);
        mlm_batch_alloc(&b, 1, 96, r.max_predictions);
        for (int epoch = 0; epoch < 4; epoch++)
            mlm_batch_build(&b, &data, at[epoch], 1), drawn[epoch] = batch_checksum(&b, &table, 0, 0);
        EXPECT(t, drawn[0] != drawn[1] && drawn[0] != drawn[2] && drawn[1] != drawn[3]);
        EXPECT(t, mlm_fingerprint(&data) == mlm_fingerprint(&other));
        mlm_batch_free(&b);
        free(seen);
        mlm_close(&data), mlm_close(&other);
    }
    free(pattern);
    made_free(&m);
}

static void open_short(const char* argument) {
    MlmData data;
    mlm_open(&data, argument + strlen(argument) + 1, 7, published_recipe(), 0);
}

static void open_alone(const char* path) {
    MlmData data;
    mlm_open(&data, path, 128, published_recipe(), 0);
}

static void open_narrow(const char* path) {
    MlmData data;
    MlmRecipe r = published_recipe();
    r.next_sentence = 0;
    mlm_open(&data, path, 128, r, 0);
    mlm_check_vocabulary(&data, data.text.vocabulary.V);
    mlm_check_vocabulary(&data, data.text.vocabulary.V - 1);
}

static void test_mlm_refused(Tests* t) {
    Made m = make_sentences(t, 1, 1);
    char* path = path_in(t, "s0.bin");
    expect_end(t, USAGE, "-t must be at least 8", open_short, "7 tokens");
    expect_end(t, USAGE, "contains one document", open_alone, path);
    expect_end(t, USAGE, "is larger than the model's", open_narrow, path);
    free(path);
    made_free(&m);
}

// ---------------------------------------------------------------------------------------------------------
// WordPiece

static void open_wordpiece(const char* directory) {
    WordPiece w;
    if (wordpiece_open(&w, directory, UNCASED) != 0) die(LOST_PEER, "%s: no vocabulary", directory);
    wordpiece_free(&w);
}

// The tokens of a text, spelled, separated by spaces.
static void expect_words(Tests* t, const WordPiece* w, const char* text, const char* want) {
    TokenIds ids = {NULL, 0, 0};
    Text got = {NULL, 0, 0};
    wordpiece_encode(&ids, w, text, strlen(text));
    text_append(&got, "", 0);
    for (size_t i = 0; i < ids.count; i++) {
        size_t n;
        const char* token = wordpiece_token(w, ids.id[i], &n);
        if (i) text_append(&got, " ", 1);
        text_append(&got, token, n);
    }
    if (strcmp(got.text, want) != 0) fail(t, "\"%s\" is \"%s\", not \"%s\"", text, got.text, want);
    free(ids.id);
    free(got.text);
}

// The expected tokens are those of `tokenizers` 0.23.
static void test_wordpiece_words(Tests* t) {
    static const char vocabulary[] =
        "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nun\n##aff\n##able\ncafe\n!\n,\n\xe4\xb8\xad\n"
        "The\nCaf\xc3\xa9\n\xce\xb1\n##\xcf\x83\n[\n]\nmask\na\n##a\n=\n\xe1\x84\x80\n##\xe1\x85\xa1\n##able\n"
        "\xe0\xa6\x95\n##\xe0\xa7\x87\n##\xe0\xa6\xbe\n"
        "\xe8\xb1\x88\n";
    WordPiece w;
    char* x101 = xprintf("%0101d", 0);
    EXPECT(t, wordpiece_open(&w, t->directory, UNCASED) == -1);
    free(put_file(t, "vocab.txt", vocabulary, sizeof(vocabulary) - 1));
    memset(x101, 'a', 101);
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.letter_case == UNCASED && !w.is_bytes);
    EXPECT(t, w.size == 30 && w.mask == 4 && wordpiece_id(&w, "##able", 6) == 25 && wordpiece_id(&w, "x", 1) == -1);
    expect_words(t, &w, "", "");
    expect_words(t, &w, "The UNAFFABLE  caf\xc3\xa9!", "the un ##aff ##able cafe !");
    expect_words(t, &w, "unaff,unx the", "un ##aff , [UNK] the");
    expect_words(t, &w, "the[MASK]the [mask] [MASK][SEP]", "the [MASK] the [ mask ] [MASK] [SEP]");
    expect_words(t, &w,
                 "a\xe4\xb8\xad"
                 "a",
                 "a \xe4\xb8\xad a");
    expect_words(t, &w, "\xce\x91\xce\xa3 \xce\xac\xcc\x88\xcf\x83", "\xce\xb1 ##\xcf\x83 \xce\xb1 ##\xcf\x83");
    expect_words(t, &w,
                 "th\xc2\xad"
                 "e\xe2\x80\x8b\x01 the\xc2\xa0the\xff\xe3\x80",
                 "the the the");
    expect_words(t, &w, "\xe2\x89\xa0 \xea\xb0\x80", "= \xe1\x84\x80 ##\xe1\x85\xa1");
    // A vowel sign of two parts, and a CJK compatibility ideograph.
    expect_words(t, &w, "\xe0\xa6\x95\xe0\xa7\x8b \xef\xa4\x80",
                 "\xe0\xa6\x95 ##\xe0\xa7\x87 ##\xe0\xa6\xbe \xe8\xb1\x88");
    expect_words(t, &w, x101 + 1,
                 "a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a "
                 "##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a "
                 "##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a "
                 "##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a ##a");
    expect_words(t, &w, x101, "[UNK]");

    static const int ids[] = {5, 6, 7, 8, 11, 9, 10, 4, 99, -1};
    Text text = {NULL, 0, 0};
    wordpiece_decode(&text, &w, ids, COUNT_OF(ids));
    EXPECT(t, strcmp(text.text, "the unaffable, cafe! [MASK]") == 0);
    free(text.text);
    wordpiece_free(&w);

    free(put_file(t, "tokenizer_config.json", "{\"do_lower_case\": false}", 24));
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.letter_case == CASED);
    expect_words(t, &w, "The the Caf\xc3\xa9 CAFE", "The the Caf\xc3\xa9 [UNK]");
    wordpiece_free(&w);
    free(x101);
    char* path = put_file(t, "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n", 24);
    expect_end(t, USAGE, "has no [MASK]", open_wordpiece, t->directory);
    free(path);
}

// The parts of tokenizer.json; NULL: a valid default.
typedef struct {
    const char *added, *normalizer, *splitter, *model, *message;
} WordPieceJson;

static void put_wordpiece_json(Tests* t, WordPieceJson p) {
    Text text = {NULL, 0, 0};
    text_printf(&text, "{\"added_tokens\": [%s], \"normalizer\": {%s}, \"pre_tokenizer\": {%s}, \"model\": {%s}}",
                p.added
                    ? p.added
                    : "{\"id\": 4, \"content\": \"[MASK]\", \"lstrip\": false}, {\"id\": 3, \"content\": \"[SEP]\"}, "
                      "{\"id\": 2, \"content\": \"[CLS]\"}, {\"id\": 1, \"content\": \"[UNK]\"}, "
                      "{\"id\": 0, \"content\": \"[PAD]\"}",
                p.normalizer ? p.normalizer
                             : "\"type\": \"BertNormalizer\", \"lowercase\": true, \"strip_accents\": null, "
                               "\"clean_text\": true, \"handle_chinese_chars\": true",
                p.splitter ? p.splitter : "\"type\": \"BertPreTokenizer\"",
                p.model ? p.model
                        : "\"type\": \"WordPiece\", \"unk_token\": \"[UNK]\", \"continuing_subword_prefix\": \"##\", "
                          "\"max_input_chars_per_word\": 100, \"vocab\": {\"##s\": 7, \"[PAD]\": 0, \"[UNK]\": 1, "
                          "\"[CLS]\": 2, \"[SEP]\": 3, \"[MASK]\": 4, \"the\": 5, \"Caf\u00e9\": 6, \"cafe\": 8}");
    free(put_file(t, "tokenizer.json", text.text, text.length));
    free(text.text);
}

static void test_wordpiece_json(Tests* t) {
    static const WordPieceJson cases[] = {
        {NULL, "\"type\": \"Sequence\"", NULL, NULL, "normalizer's \"type\" is \"Sequence\"; only \"BertNormalizer\""},
        {NULL, "\"type\": \"BertNormalizer\"", NULL, NULL, "key \"lowercase\": missing"},
        {NULL, "\"type\": \"BertNormalizer\", \"lowercase\": true, \"strip_accents\": 1", NULL, NULL,
         "key \"strip_accents\": is a number"},
        {NULL, "\"type\": \"BertNormalizer\", \"lowercase\": true, \"clean_text\": false", NULL, NULL,
         "\"clean_text\""},
        {NULL, NULL, "\"type\": \"Whitespace\"", NULL, "pre_tokenizer's \"type\" is \"Whitespace\""},
        {NULL, NULL, NULL, "\"type\": \"BPE\"", "model's \"type\" is \"BPE\"; only \"WordPiece\""},
        {NULL, NULL, NULL, "\"unk_token\": \"<unk>\"", "\"unk_token\" is \"<unk>\""},
        {NULL, NULL, NULL, "\"unk_token\": \"[UNK]\", \"continuing_subword_prefix\": \"@\"", "prefix\" is \"@\""},
#define WORDPIECE_MODEL "\"unk_token\": \"[UNK]\", \"continuing_subword_prefix\": \"##\", "
        {NULL, NULL, NULL, WORDPIECE_MODEL "\"max_input_chars_per_word\": 9", "\"max_input_chars_per_word\" is 9"},
        {NULL, NULL, NULL, WORDPIECE_MODEL "\"vocab\": []", "key \"vocab\": is an array"},
        {NULL, NULL, NULL, WORDPIECE_MODEL "\"vocab\": {}", "has no [PAD]"},
        {NULL, NULL, NULL, WORDPIECE_MODEL "\"vocab\": {\"a\": -1}", "token \"a\": its id is not an integer"},
        {NULL, NULL, NULL, WORDPIECE_MODEL "\"vocab\": {\"a\": 0, \"b\": 2}", "token \"b\": its id 2 is not below"},
        {NULL, NULL, NULL, WORDPIECE_MODEL "\"vocab\": {\"a\": 0, \"b\": 0}", "token \"b\": its id 0 is also"},
        {"{\"id\": 9, \"content\": \"<x>\"}", NULL, NULL, NULL, "added token <x> with the id 9 is not supported"},
        {"{\"id\": 3, \"content\": \"[MASK]\"}", NULL, NULL, NULL, "added token [MASK] with the id 3"},
    };
    const WordPieceJson sound = {NULL, NULL, NULL, NULL, NULL};
    const WordPieceJson cased = {NULL, "\"type\": \"BertNormalizer\", \"lowercase\": false", NULL, NULL, NULL};
    WordPiece w;
    put_wordpiece_json(t, sound);
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.letter_case == UNCASED && !w.is_bytes);
    EXPECT(t, w.size == 9 && w.mask == 4 && wordpiece_id(&w, "##s", 3) == 7 && w.longest == 6);
    expect_words(t, &w, "The Caf\xc3\xa9s[MASK]x", "the cafe ##s [MASK] [UNK]");
    wordpiece_free(&w);
    put_wordpiece_json(t, cased);
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.letter_case == CASED);
    expect_words(t, &w, "The Caf\xc3\xa9s the", "[UNK] Caf\xc3\xa9 ##s the");
    wordpiece_free(&w);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        put_wordpiece_json(t, cases[i]);
        expect_end(t, USAGE, cases[i].message, open_wordpiece, t->directory);
    }
    free(put_file(t, "tokenizer.json", "[1]", 3));
    expect_end(t, USAGE, "key \"model\": missing", open_wordpiece, t->directory);
    free(put_file(t, "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nx", 33));  // which comes first
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.size == 6);
    wordpiece_free(&w);
}

// Settings of tokenizer_config.json, or of the normalizer of tokenizer.json, for case, accents and ideographs, and the
// ids from `tokenizers` 0.23.
static void test_wordpiece_rules(Tests* t) {
    static const struct {
        const char *lower, *accents, *chinese, *ids;
    } cases[] = {
        {"true", "null", "true", "5 5 5 12 10 5 14 19 20 21 4 5"},
        {"true", "null", "false", "5 5 5 12 11 13 14 19 20 21 4 5"},
        {"true", "true", "true", "5 5 5 12 10 5 14 19 20 21 4 5"},
        {"true", "true", "false", "5 5 5 12 11 13 14 19 20 21 4 5"},
        {"true", "false", "true", "7 5 9 5 9 12 10 5 14 15 18 4 7"},
        {"true", "false", "false", "7 5 9 5 9 12 11 13 14 15 18 4 7"},
        {"false", "null", "true", "8 5 9 6 9 12 10 5 17 18 4 8"},
        {"false", "null", "false", "8 5 9 6 9 12 11 13 17 18 4 8"},
        {"false", "true", "true", "6 5 6 12 10 5 16 19 20 21 4 6"},
        {"false", "true", "false", "6 5 6 12 11 13 16 19 20 21 4 6"},
        {"false", "false", "true", "8 5 9 6 9 12 10 5 17 18 4 8"},
        {"false", "false", "false", "8 5 9 6 9 12 11 13 17 18 4 8"},
    };
    static const char lines[] =
        "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ne\nE\n\xc3\xa9\n\xc3\x89\n##\xcc\x81\n\xe4\xb8\xad\n##\xe4\xb8\xad\na\n##"
        "e\ni\n##\xcc\x87\nI\n\xc4\xb0\n\xea\xb0\x81\n\xe1\x84\x80\n##\xe1\x85\xa1\n##\xe1\x86\xa8\n";
    static const char text[] = "\xc3\x89 e\xcc\x81 E\xcc\x81 a\xe4\xb8\xad"
                               "e \xc4\xb0 \xea\xb0\x81 [MASK]\xc3\x89";
    for (int kind = 0; kind < 3; kind++) {
        for (size_t i = 0; i < COUNT_OF(cases); i++) {
            const char *lower = cases[i].lower, *accents = cases[i].accents, *chinese = cases[i].chinese;
            char* config = xprintf("{\"do_lower_case\": %s, \"strip_accents\": %s, \"tokenize_chinese_chars\": %s}",
                                   lower, accents, chinese);
            Text model = {NULL, 0, 0}, got = {NULL, 0, 0};
            WordPiece w;
            TokenIds ids = {NULL, 0, 0};
            if (kind == 2) lower = strcmp(lower, "true") == 0 ? "false" : "true", accents = chinese = lower;
            char* normalizer = xprintf("\"type\": \"BertNormalizer\", \"lowercase\": %s, \"strip_accents\": %s, "
                                       "\"handle_chinese_chars\": %s",
                                       lower, accents, chinese);
            text_printf(&model, "\"unk_token\": \"[UNK]\", \"continuing_subword_prefix\": \"##\", \"vocab\": {");
            for (size_t begin = 0, id = 0; lines[begin]; begin += strcspn(lines + begin, "\n") + 1, id++)
                text_printf(&model, "%s\"%.*s\": %zu", id ? ", " : "", (int)strcspn(lines + begin, "\n"), lines + begin,
                            id);
            text_printf(&model, "}");
            const WordPieceJson json = {NULL, normalizer, NULL, model.text, NULL};
            if (kind == 0) free(put_file(t, "vocab.txt", lines, sizeof lines - 1));
            else put_wordpiece_json(t, json);
            if (kind != 1) free(put_file(t, "tokenizer_config.json", config, strlen(config)));
            EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0);
            wordpiece_encode(&ids, &w, text, sizeof text - 1);
            for (size_t k = 0; k < ids.count; k++) text_printf(&got, "%s%d", k ? " " : "", ids.id[k]);
            if (strcmp(got.text, cases[i].ids) != 0)
                fail(t, "%s in %s: \"%s\", not \"%s\"", config, kind ? "tokenizer.json" : "tokenizer_config.json",
                     got.text, cases[i].ids);
            wordpiece_free(&w);
            token_ids_free(&ids);
            free(config), free(normalizer), free(model.text), free(got.text);
        }
        char *vocabulary = path_in(t, "vocab.txt"), *config = path_in(t, "tokenizer_config.json");
        unlink(vocabulary), unlink(config);
        free(vocabulary), free(config);
    }
}

// ---------------------------------------------------------------------------------------------------------
// The tests' corpus

// n bytes that identify their place in the file.
static char corpus_byte(char letter, size_t i) { return (char)(letter + (char)(i / 2000)); }

static void put_text(Tests* t, const char* name, char letter, size_t n) {
    char* text = (char*)xmalloc(n + 1);
    for (size_t i = 0; i < n; i++) text[i] = corpus_byte(letter, i);
    free(put_file(t, name, text, n));
    free(text);
}

// Its sentences: here every file is one long line, which ends with the file. Their files are four documents of one
// sentence each, in training or in validation by the block of their first byte.
static void test_corpus_sentences(Tests* t) {
    char *folder = path_in(t, "result/bert"), *pattern = path_in(t, "result/bert/train.bin");
    Sentences s;
    WordPiece w;
    TokenIds ids = {NULL, 0, 0};
    Text text = {NULL, 0, 0};
    sentences_open(&s, pattern);
    EXPECT(t, s.documents == 4 && s.files.tokens == 22005 && s.vocabulary.V == 261 && s.vocabulary.mask == 260);
    EXPECT(t, s.vocabulary.pad == 256 && s.vocabulary.unk == 257);
    sentences_close(&s);
    EXPECT(t, wordpiece_open(&w, folder, CASE_OF_MODEL) == 0 && w.is_bytes && w.size == 261 && w.cls == 258);
    wordpiece_encode(&ids, &w, "A\n [MASK]\xff", 10);
    EXPECT(t, ids.count == 5 && ids.id[0] == 'A' && ids.id[1] == 10 && ids.id[3] == 260 && ids.id[4] == 255);
    wordpiece_decode(&text, &w, ids.id, ids.count);
    EXPECT(t, text.length == 10 && memcmp(text.text, "A\n [MASK]\xff", 10) == 0);
    wordpiece_free(&w);
    free(text.text), free(ids.id), free(pattern), free(folder);
}

// Split by hand: lines without the blank ones, documents by side and file.
static void test_corpus_lines(Tests* t) {
    enum { LINE = 1000 };
    Tokens all = {NULL, 0, 0};
    SentenceSet set[2];
    int end_of_text = END_OF_TEXT, letter = 'x', line_break = '\n', blank = ' ';
    memset(set, 0, sizeof(set));
    for (int file = 0; file < 2; file++) {
        tokens_add(&all, &end_of_text, 1);
        for (int line = 0; line < 21; line++) {
            for (int i = 0; i < LINE - 1; i++) tokens_add(&all, line == 3 ? &blank : &letter, 1);
            tokens_add(&all, &line_break, 1);
        }
    }
    sentences_of_tokens(set, &all);  // block 9 of validation is tokens 18432 .. 20479; block 19 begins at 38912
    static const int first_train[] = {0, 18, 35}, first_val[] = {0, 2};
    EXPECT(t, set[0].first.count == 3 && memcmp(set[0].first.id, first_train, sizeof(first_train)) == 0);
    EXPECT(t, set[1].first.count == 2 && memcmp(set[1].first.id, first_val, sizeof(first_val)) == 0);
    EXPECT(t, set[0].begin.count == 36 && set[0].tokens.count == 36 * LINE && set[1].tokens.count == 4 * LINE);
    EXPECT(t, set[0].tokens.id[LINE - 1] == '\n' && set[0].begin.id[1] == LINE);
    for (int i = 0; i < 2; i++) free(set[i].tokens.id), free(set[i].begin.id), free(set[i].first.id);
    free(all.id);
}

static void test_corpus(Tests* t) {
    char* folder = path_in(t, "text");
    EXPECT(t, make_directories(folder) == 0);
    put_text(t, "text/M.md", 'M', 6000);
    put_text(t, "text/b.c", 'b', 6000);
    put_text(t, "text/l.md", 'l', 10000);
    put_text(t, "text/s.md", 's', 5);
    put_text(t, "text/.x.md", '!', 10);
    char *out = path_in(t, "result"), *train = path_in(t, "result/train.bin"), *val = path_in(t, "result/val.bin");
    char* arguments[] = {(char*)"byte_corpus", folder, out, NULL};
    fflush(stdout);
    int saved = dup(STDOUT_FILENO), null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(null, STDOUT_FILENO);
    EXPECT(t, byte_corpus_main(3, arguments) == DONE);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    close(null);

    int tokens[22009], *validation = (int*)xmalloc(2048 * sizeof(int));
    Shards s, v;
    shards_open(&s, train);
    shards_open(&v, val);
    EXPECT(t, s.tokens + v.tokens == 22009 && v.tokens == 2048);
    if (!t->is_bad) {
        // Blocks 0 to 8, then block 9 of validation, then the rest: put together again in the order of the files.
        shards_read(&s, 0, 0, 9 * 2048, tokens, NULL);
        shards_read(&v, 0, 0, 2048, validation, NULL);
        memcpy(tokens + 9 * 2048, validation, 2048 * sizeof(int));
        shards_read(&s, 0, 9 * 2048, 22009 - 10 * 2048, tokens + 10 * 2048, NULL);
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

    test_corpus_sentences(t);

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
    free(folder);
}

static void build_corpus_of_nothing(const char* folder) {
    char* arguments[] = {(char*)"byte_corpus", (char*)folder, (char*)"/nonexistent/out", NULL};
    byte_corpus_main(3, arguments);
}

static void test_corpus_refused(Tests* t) {
    char* folder = path_in(t, "text");
    EXPECT(t, make_directories(folder) == 0);
    expect_end(t, USAGE, "holds no text", build_corpus_of_nothing, folder);
    put_text(t, "text/a.c", 'a', 100);
    expect_end(t, USAGE, "too few", build_corpus_of_nothing, folder);
    free(folder);
}

// The tokens of every line of a file, for dev/test/check_wordpiece.py: VOCABULARY_FOLDER FILE.
static int print_wordpieces(char** arguments) {
    WordPiece w;
    TokenIds ids = {NULL, 0, 0};
    size_t n;
    if (wordpiece_open(&w, arguments[0], CASE_OF_MODEL) != 0) die(USAGE, "%s: holds no vocabulary", arguments[0]);
    char* text = read_file(arguments[1], TOKENIZER_MAX_FILE, &n, USAGE);
    for (size_t i = 0, begin = 0; i <= n; i++) {
        if (i < n && text[i] != '\n') continue;
        ids.count = 0;
        wordpiece_encode(&ids, &w, text + begin, i - begin);
        for (size_t k = 0; k < ids.count; k++) printf("%d ", ids.id[k]);
        printf("\n");
        begin = i + 1;
    }
    free(ids.id);
    free(text);
    wordpiece_free(&w);
    return DONE;
}

// The sentences of a data set in words, a blank line after each document, for dev/test/prepare.sh: PATTERN
// VOCABULARY_FOLDER.
static int print_sentences(char** arguments) {
    Sentences s;
    WordPiece w;
    Text text = {NULL, 0, 0};
    sentences_open(&s, arguments[0]);
    if (wordpiece_open(&w, arguments[1], CASE_OF_MODEL) != 0 || w.size != s.vocabulary.V || w.mask != s.vocabulary.mask)
        die(USAGE, "%s: holds another vocabulary than %s", arguments[1], arguments[0]);
    for (uint64_t d = 0; d < s.documents; d++, text_append(&text, "\n", 1)) {
        for (uint32_t i = 0; i < s.document[d].sentences; i++, text_append(&text, "\n", 1)) {
            size_t n = sentences_length(&s, d, i, i + 1);
            int* ids = (int*)xmalloc(n * sizeof(int));
            sentences_read(ids, &s, d, i, 0, n, NULL);
            wordpiece_decode(&text, &w, ids, n);
            free(ids);
        }
    }
    fwrite(text.text, 1, text.length, stdout);
    free(text.text);
    wordpiece_free(&w);
    sentences_close(&s);
    return DONE;
}

int main(int argc, char** argv) {
    if (argc == 4 && strcmp(argv[1], "wordpiece") == 0) return print_wordpieces(argv + 2);
    if (argc == 4 && strcmp(argv[1], "sentences") == 0) return print_sentences(argv + 2);
    static const struct {
        const char* name;
        void (*run)(Tests*);
    } tests[] = {
        {"shards/round_trip", test_shards_round_trip},
        {"shards/beyond_32_bits", test_shards_beyond_32_bits},
        {"shards/many", test_shards_many},
        {"shards/fingerprint", test_shards_fingerprint},
        {"shards/refused", test_shards_refused},
        {"shards/full_disk", test_shards_full_disk},
        {"batch_lm/windows", test_batch_windows},
        {"batch_lm/mask", test_batch_mask},
        {"batch_lm/mask_refused", test_batch_mask_refused},
        {"batch_lm/shuffle", test_batch_shuffle},
        {"batch_lm/refused", test_batch_refused},
        {"sentences/round_trip", test_sentences_round_trip},
        {"sentences/beyond_32_bits", test_sentences_beyond_32_bits},
        {"sentences/refused", test_sentences_refused},
        {"batch_mlm/million", test_mlm_million},
        {"batch_mlm/whole_words", test_mlm_whole_words},
        {"batch_mlm/packed", test_mlm_packed},
        {"batch_mlm/stream", test_mlm_stream},
        {"batch_mlm/refused", test_mlm_refused},
        {"safetensors/round_trip", test_safetensors_round_trip},
        {"safetensors/types", test_safetensors_types},
        {"safetensors/aliases", test_safetensors_aliases},
        {"safetensors/refused", test_safetensors_refused},
        {"safetensors/damaged", test_safetensors_damaged},
        {"safetensors/full_disk", test_safetensors_full_disk},
        {"tokenizer/vocabulary", test_tokenizer_vocabulary},
        {"tokenizer/json", test_tokenizer_json},
        {"tokenizer/refused", test_tokenizer_refused},
        {"tokenizer/files", test_tokenizer_files},
        {"wordpiece/words", test_wordpiece_words},
        {"wordpiece/json", test_wordpiece_json},
        {"wordpiece/rules", test_wordpiece_rules},
        {"byte_corpus/files", test_corpus},
        {"byte_corpus/lines", test_corpus_lines},
        {"byte_corpus/refused", test_corpus_refused},
        {"shards/scan", test_shards_scan},  // last: children of a process with threads seem to leak
    };
    Tests t;
    tests_open(&t);
    for (size_t i = 0; i < COUNT_OF(tests); i++) {
        t.directory = make_scratch_directory("test_data");
        case_begin(&t, tests[i].name);
        tests[i].run(&t);
        case_end(&t);
        remove_directory(t.directory);
        free(t.directory);
    }
    t.directory = NULL;
    return tests_close(&t);
}
