/* Tests of llmc/data, of masked batches and of WordPiece: what is written reads back, batches agree however they are
 * cut, and bad files end with exit status 2 and one line that names them.
 *
 *     ./test_data [NAME]                               the tests whose name contains NAME
 *     ./test_data wordpiece VOCABULARY_FOLDER FILE     the tokens of each line, for dev/test/check_wordpiece.py
 *     ./test_data sentences PATTERN VOCABULARY_FOLDER  the sentences of a data set in words, for dev/test/prepare.py */
#include "dev/data/corpus_files.h"
#include "dev/test/tests.h"
#include "llmc/bert/batch_mlm.h"
#include "llmc/data/batch_lm.h"
#include "llmc/data/safetensors_writer.h"
#include "llmc/data/token_scan.h"
#include "llmc/model/tokenizer_files.h"
#include "llmc/run/find_files.h"
#include "llmc/text/tokenizer.h"
#include "llmc/text/wordpiece.h"

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

static Shards open_shards(Tests* t, const char* pattern) {
    Shards s;
    Path path = path_of("%s/%s", t->directory, pattern);
    shards_open(&s, path.text);
    return s;
}

// Overwrite bytes of a file, which it may lack. Returns 0 if the file system has no files of that size.
static int put_bytes(Tests* t, const char* path, const void* bytes, size_t n, uint64_t offset) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    ssize_t put = pwrite(fd, bytes, n, (off_t)offset);
    if (put < 0 && (errno == EFBIG || errno == ENOSPC || errno == EINVAL))
        t->skip = xprintf("%s: %s at %llu bytes", path, strerror(errno), (unsigned long long)offset);
    else EXPECT_EQ(t, put, (ssize_t)n);
    close(fd);
    return put == (ssize_t)n;
}

// 2^32 + 10 tokens, 8 GiB, a hole except for both ends: windows are read correctly at both ends, and a permutation of
// more than 2^32 windows works.
static void test_shards_beyond_32_bits(Tests* t) {
    enum { T = 9, LAST = 2 * T };
    const uint64_t count = ((uint64_t)1 << 32) + 10, windows = (count - 1) / T, first = (windows - 1) * T;
    const int32_t header[4] = {SHARD_MAGIC_UINT16, SHARD_VERSION_UINT16, 10, 1};
    uint16_t last[LAST];
    char* path = put_shard(t, "large.bin", 5, 4, 2);
    for (int i = 0; i < LAST; i++) last[i] = (uint16_t)(1000 + i);
    if (put_bytes(t, path, last, sizeof(last), SHARD_HEADER_BYTES + 2 * (count - LAST)) &&
        put_bytes(t, path, header, sizeof(header), 0)) {
        BatchLm b;
        int inputs[T], targets[T];
        uint64_t beyond = 0, most = 0;
        Shards s = open_shards(t, "large.bin");
        EXPECT_EQ(t, s.tokens, count);
        batch_lm_init(&b, &s, 1, T, 50257, 1, IN_ORDER);
        EXPECT(t, batch_lm_windows(&b) == windows && count - first <= LAST && count - first > T);
        batch_lm_read(&b, 7 * windows - 1, inputs, targets, NULL);  // the last window
        for (int i = 0; i < T; i++) {
            int want = 1000 + LAST - (int)(count - first) + i;
            EXPECT(t, inputs[i] == want && targets[i] == want + 1);
        }
        batch_lm_read(&b, 7 * windows, inputs, targets, NULL);
        EXPECT(t, inputs[0] == 5 && targets[0] == 6);
        batch_lm_free(&b);
        // There are more than 2^32 windows of one token. Each is read at its place in the order.
        batch_lm_init(&b, &s, 1, 1, 50257, 3, SHUFFLED);
        for (uint64_t i = 0; i < 4096; i++) {
            uint64_t sequence = count - 2 - i, w = batch_lm_window(&b, sequence);
            EXPECT(t, w < count - 1);
            beyond += w >= (uint64_t)1 << 31;
            if (w > most) most = w;
            batch_lm_read(&b, sequence, inputs, targets, NULL);
            EXPECT_EQ(t, inputs[0], w < 4 ? 5 + (int)w : w < count - LAST ? 0 : 1000 + LAST - (int)(count - w));
        }
        EXPECT(t, beyond > 1024 && beyond < 3072 && most > ((uint64_t)15 << 28));  // they are all over the file
        batch_lm_free(&b), shards_close(&s);
    }
    unlink(path);
    free(path);
}

// More files than the process may open, though it asks for all that it may.
static void open_under_a_low_limit(const char* directory) {
    struct rlimit low = {64, 256};
    Tests at = {.directory = (char*)directory};
    CHECK(setrlimit(RLIMIT_NOFILE, &low) == 0);
    Shards s = open_shards(&at, "many_*.bin");
    shards_close(&s);
}

static void test_shards_many(Tests* t) {
    enum { FILES = 300, MOST = 200 };
    for (int i = 0; i < FILES; i++) {
        if (i == MOST)
            expect_end(t, DONE, "shards: as many as may be open", NULL, open_under_a_low_limit, t->directory);
        free(put_shard(t, named("many_%06d.bin", i), 10 * i, 11, 2));
    }
    expect_end(t, USAGE, "shards: more than may be open", "ulimit -n", open_under_a_low_limit, t->directory);
    Shards s = open_shards(t, "many_*.bin");
    EXPECT(t, s.count == FILES && s.tokens == 11 * FILES);
    for (int i = 1; i < s.count; i++) EXPECT(t, strcmp(s.shard[i - 1].path, s.shard[i].path) < 0);
    shards_close(&s);
}

// The largest token is found anywhere: at both ends, at the ends of the pieces that threads read, and in several
// places.
static void test_shards_scan(Tests* t) {
    enum { MOST = 70000 };
    int* tokens = (int*)xcalloc(MOST, sizeof(int));
    char* path = path_in(t, "scan.bin");
    for (int width = 2; width <= 4; width += 2) {
        const int piece = SCAN_PIECE / width, sizes[] = {1, 7, piece, piece + 1, MOST};
        const int large = width == 2 ? 65535 : -2;  // as unsigned numbers the largest but one
        for (size_t k = 0; k < COUNT_OF(sizes); k++) {
            const int n = sizes[k], places[] = {0, n / 3, min_int(piece, n) - 1, min_int(piece, n - 1), n - 1};
            for (size_t i = 0; i < COUNT_OF(places); i++) {
                TokenScan scan;
                tokens[places[i]] = tokens[n - 1] = large;
                CHECK(shard_write(path, tokens, (uint64_t)n, width) == 0);
                tokens[places[i]] = tokens[n - 1] = 0;
                Shards s = open_shards(t, "scan.bin");
                token_scan_read(&scan, &s.shard[0]);
                EXPECT_EQ(t, scan.largest, (uint32_t)large);
                EXPECT_EQ(t, scan.position, places[i]);
                shards_close(&s);
            }
        }
    }
    free(tokens), free(path);
}

// Every window of seven tokens, by a model of 3000 tokens.
static void read_windows(const char* pattern) {
    enum { T = 7 };
    int inputs[T], targets[T];
    Shards s;
    BatchLm b;
    shards_open(&s, pattern);
    batch_lm_init(&b, &s, 1, T, 3000, 1, IN_ORDER);
    for (uint64_t i = 0; i < batch_lm_windows(&b); i++) batch_lm_read(&b, i, inputs, targets, NULL);
    batch_lm_free(&b);
    shards_close(&s);
}

static Text file_text(const char* path) {
    Text text = {NULL, 0, 0};
    size_t n;
    char* bytes = read_file(path, 1 << 24, &n, FAILED);
    text_append(&text, bytes, n);
    free(bytes);
    return text;
}

// A shard of the tokens first .. first + n - 1, of which those below 1000 that are divisible by 3 count as targets.
static char* put_masked_shard(Tests* t, const char* name, int first, int n, int width, int row) {
    char* path = put_shard(t, name, first, n, width);
    Text file = file_text(path);
    int32_t header[2] = {1, row};
    unsigned char mask[64] = {0};
    CHECK(n <= 8 * (int)sizeof mask);
    for (int i = 0; i < n; i++)
        if (first + i < 1000 && (first + i) % 3 == 0) mask[i / 8] |= (unsigned char)(1 << i % 8);
    text_append(&file, (const char*)mask, (size_t)((n + 7) / 8));
    memcpy(file.text + 16, header, sizeof header);
    free(put_file(t, name, file.text, file.length));
    free(file.text);
    return path;
}

static void test_shards_refused(Tests* t) {
    static const FileChange changes[] = {
        {"as it is", 0, 0, 0, 0, NULL},
        {"empty", 0, 0, 0, -SHARD_HEADER_BYTES - 20, "is empty"},
        {"half a header", 0, 0, 0, -21, "1023 bytes are too few"},
        {"no tokens", 8, 4, 0, -20, "contains no tokens"},
        {"a token is missing", 0, 0, 0, -2, "truncated"},
        {"half a token more", 0, 0, 0, 1, "damaged"},
        {"a token more", 0, 0, 0, 2, "damaged"},
        {"a count below 0", 8, 4, -1, 0, "gives 4294967295 tokens"},
        {"a count beyond all files", 12, 4, -1, 0, "truncated"},
        {"another file", 0, 4, 1179403647, 0, "magic number is 1179403647"},
        {"an evaluation set", 0, 4, SHARD_MAGIC_EVALUATION, 0, "evaluation set"},
        {"another version", 4, 4, 2, 0, "version 2"},
        {"another width", 0, 4, SHARD_MAGIC_UINT32, 0, "version 1, but only version 7"},
        {"too few for a sequence", 8, 4, 7, -6, "7 tokens are too few for one sequence of 7"},
        {"a token outside the vocabulary", SHARD_HEADER_BYTES + 4, 2, 3000, 0,
         "token 3000 at position 2 is outside the vocabulary of 3000"},
    };
    static const FileChange masked[] = {
        {"as it is", 0, 0, 0, 0, NULL},
        {"a byte is missing", 0, 0, 0, -1, "truncated"},
        {"none", 0, 0, 0, -3, "truncated"},
        {"an unknown kind", 16, 4, 2, 0, "has the mask 2"},
        {"negative rows", 20, 4, -5, 0, "row length -5"},
        {"bytes that the header does not announce", 16, 4, 0, 0, "damaged"},
        {"rows that sequences cut", 20, 4, 5, 0, "rows of 5 tokens, which sequences of 7"},
    };
    const int zeros[1000] = {0};
    char *plain = put_shard(t, "shard.bin", 0, 10, 2), *mask = put_masked_shard(t, "mask.bin", 1, 20, 2, 0);
    Text good = file_text(plain), good_mask = file_text(mask);
    expect_changes(t, &good, "shard.bin", changes, COUNT_OF(changes), read_windows);
    expect_changes(t, &good_mask, "mask.bin", masked, COUNT_OF(masked), read_windows);
    free(put_shard(t, "shard.bin", -1, 10, 4));
    expect_end(t, USAGE, "shards: a token below 0", "token 4294967295 at position 0", read_windows, plain);
    EXPECT(t, shard_write("/dev/full", zeros, 1000, 2) == -1 && errno == ENOSPC);
    free(plain), free(mask), free(good.text), free(good_mask.text);
}

// ---------------------------------------------------------------------------------------------------------
// Batches

// Windows of 10, at tokens 1, 11 | 65520 | 70000. Two shards have masks, whose bits begin anywhere in a byte.
static void test_batch_mask(Tests* t) {
    enum { T = 10 };
    static const int starts[] = {1, 1 + T, 65520, 70000};
    int inputs[4 * T], targets[4 * T];
    BatchLm b;
    char* path = put_masked_shard(t, "c.bin", starts[3], T + 1, 4, 0);
    free(put_masked_shard(t, "a.bin", 1, 2 * T + 1, 2, 5));
    free(put_shard(t, "b.bin", starts[2], T + 1, 2));
    Shards s = open_shards(t, "*.bin");
    EXPECT(t, s.tokens == 4 * T + 3 && s.shard[0].has_mask && s.shard[0].row == 5 && !s.shard[1].has_mask);
    batch_lm_init(&b, &s, 4, T, 80000, 1, IN_ORDER);
    batch_lm_read(&b, 0, inputs, targets, NULL);
    for (int i = 0; i < 4 * T; i++) {
        int token = starts[i / T] + i % T + 1, counts = i / T == 2 || (i / T < 2 && token % 3 == 0);
        EXPECT_EQ(t, inputs[i], token - 1);
        EXPECT_EQ(t, targets[i], counts ? token : -1);
    }
    EXPECT(t, batch_lm_count(&b, 0, 1) == 3 && batch_lm_count(&b, 1, 1) == 4 && batch_lm_count(&b, 2, 1) == T);
    EXPECT(t, batch_lm_count(&b, 3, 1) == 0 && batch_lm_count(&b, 0, 4) == 7 + T);
    EXPECT_EQ(t, batch_lm_count(&b, 2, 8), 2 * (7 + T));  // over two epochs
    // Another mask, another token and another number of tokens are other data, but not another name.
    uint32_t crc[5] = {shards_fingerprint(&s)};
    batch_lm_free(&b), shards_close(&s);
    for (int i = 1; i < 5; i++) {
        char* moved = path_in(t, "d.bin");
        if (i == 1) CHECK(rename(path, moved) == 0);
        if (i == 2) put_bytes(t, moved, "\7", 1, SHARD_HEADER_BYTES + 4 * (T + 1));
        if (i == 3) put_bytes(t, moved, "\7", 1, SHARD_HEADER_BYTES);
        if (i == 4) free(put_shard(t, "b.bin", starts[2], T + 2, 2));
        s = open_shards(t, "*.bin");
        crc[i] = shards_fingerprint(&s);
        EXPECT(t, (crc[i] == crc[i - 1]) == (i == 1));
        batch_lm_init(&b, &s, 1, T, 80000, 1, IN_ORDER);
        EXPECT_EQ(t, batch_lm_count(&b, 3, 1), i == 1 ? 0 : 2);
        batch_lm_free(&b), shards_close(&s);
        free(moved);
    }
    free(path);
}

// Every epoch has all windows, in an order of its own, which is another for another seed.
static void test_batch_shuffle(Tests* t) {
    enum { WINDOWS = 101, T = 3, EPOCHS = 3 };
    int inputs[T], targets[T], first[EPOCHS][WINDOWS], same = 0, in_order = 0, as_other = 0;
    BatchLm one, other;
    free(put_shard(t, "a.bin", 0, 50 * T + 1, 2));
    free(put_shard(t, "b.bin", 50 * T, 51 * T + 1, 2));
    Shards s = open_shards(t, "*.bin");
    batch_lm_init(&one, &s, 1, T, 1000, 42, SHUFFLED);
    batch_lm_init(&other, &s, 1, T, 1000, 43, SHUFFLED);
    EXPECT_EQ(t, batch_lm_windows(&one), WINDOWS);
    for (int i = 0, seen[WINDOWS] = {0}; i < EPOCHS * WINDOWS; i++) {
        int epoch = i / WINDOWS, at = i % WINDOWS;
        batch_lm_read(&one, (uint64_t)i, inputs, targets, NULL);
        EXPECT(t, inputs[0] % T == 0 && targets[T - 1] == inputs[0] + T);
        first[epoch][at] = inputs[0];
        EXPECT_EQ(t, seen[inputs[0] / T]++, epoch);
        same += epoch > 0 && first[epoch - 1][at] == inputs[0];
        in_order += inputs[0] == at * T;
        batch_lm_read(&other, (uint64_t)i, inputs, targets, NULL);
        as_other += inputs[0] == first[epoch][at];
    }
    EXPECT(t, same < 20 && in_order < 20 && as_other < 20);
    batch_lm_free(&one), batch_lm_free(&other), shards_close(&s);
}

// ---------------------------------------------------------------------------------------------------------
// Safetensors

// Every tensor, as real numbers where its type allows that.
static void read_tensors(const char* path) {
    SafeTensors st;
    safetensors_open(&st, path);
    for (int i = 0; i < st.count; i++) {
        const SafeTensor* tensor = &st.tensors[i];
        size_t n = (size_t)(tensor->end - tensor->begin);
        void* bytes = xmalloc(max_size(n, (size_t)tensor->elements * sizeof(real)));
        safetensors_read_bytes(tensor, 0, n, bytes);
        if (tensor->dtype[0] != 'U') safetensors_read_real(tensor, 0, (size_t)tensor->elements, (real*)bytes);
        free(bytes);
    }
    safetensors_close(&st);
}

enum { TENSOR_BYTES = 9 };

// A header and bytes for its tensors.
static char* put_tensors(const Tests* t, const char* header) {
    Text file = {NULL, 0, 0};
    uint64_t n = strlen(header);
    text_append(&file, (const char*)&n, sizeof(n));
    text_append(&file, header, (size_t)n);
    for (size_t i = 0; i < TENSOR_BYTES; i++) text_append(&file, "\x3f", 1);
    char* path = put_file(t, "x.safetensors", file.text, file.length);
    free(file.text);
    return path;
}

static void test_safetensors(Tests* t) {
    enum { N = 2 * SAFETENSORS_CHUNK + 7 };
    static const char odd[] = "a \"quoted\"\\name/\xc3\xbc\n";
    const uint64_t large[1] = {N}, matrix[2] = {2, 3}, none[3] = {4, 0, 5};
    const int64_t integers[6] = {1, 2, 3, -4, 5, 6};
    real *x = (real*)xmalloc(N * sizeof(real)), *got = (real*)xmalloc(N * sizeof(real));
    char* path = path_in(t, "x.safetensors");
    for (int i = 0; i < N; i++) x[i] = (real)(i * 0.37 - 1000);
    SafeTensorsWriter w;
    safetensors_writer_create(&w, path);
    safetensors_writer_metadata(&w, "format", "pt");
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
    Text file = file_text(path);
    EXPECT(t, crc32_update(&w.table, 0, file.text, file.length) == w.crc && file.text[0] % 8 == 0);
    SafeTensors st;
    safetensors_open(&st, path);
    const SafeTensor *a = safetensors_find(&st, "large"), *b = safetensors_find(&st, odd);
    const SafeTensor *c = safetensors_find(&st, "scalar"), *d = safetensors_find(&st, "empty");
    EXPECT(t, st.count == 4 && !safetensors_find(&st, "larg") && !safetensors_find(&st, ""));
    EXPECT(t, a && a->ndim == 1 && a->elements == N && a->begin % 8 == 0 && c && c->ndim == 0 && c->elements == 1);
    EXPECT(t, b && b->ndim == 2 && b->shape[1] == 3 && strcmp(b->dtype, "I64") == 0 && d && d->elements == 0);
    if (!t->is_bad) {
        int64_t back[6];
        safetensors_read_real(a, 0, N, got);
        EXPECT(t, memcmp(x, got, N * sizeof(real)) == 0);
        safetensors_read_real(a, 5, N - 5, got);
        EXPECT(t, got[0] == x[5] && got[N - 6] == x[N - 1]);
        safetensors_read_bytes(b, 0, sizeof(back), back);
        EXPECT(t, memcmp(back, integers, sizeof(back)) == 0);
    }
    safetensors_close(&st);
    free(x), free(got), free(path), free(file.text);
}

// Numbers of every type that can be read, as bits.
static void test_safetensors_types(Tests* t) {
    static const struct {
        const char* dtype;
        uint64_t bits;
        double value;
    } cases[] = {{"F16", 0xC000, -2},
                 {"F16", 0x0001, 0x1p-24},
                 {"F16", 0x03FF, 0x1.ff8p-15},
                 {"F16", 0x7BFF, 65504},
                 {"F16", 0x8000, -0.0},
                 {"F16", 0xFC00, -INFINITY},
                 {"F16", 0x7E00, NAN},
                 {"F16", 0x3555, 0x1.554p-2},
                 {"BF16", 0x0001, 0x1p-133},
                 {"BF16", 0x7F80, INFINITY},
                 {"BF16", 0x4049, 3.140625},
                 {"F32", 0xFF61B1E6, (double)-3e38f},
                 {"F64", 0xC004000000000000, -2.5}};
    const uint64_t one = 1;
    char* path = path_in(t, "x.safetensors");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        SafeTensorsWriter w;
        SafeTensors st;
        real got;
        safetensors_writer_create(&w, path);
        safetensors_writer_add(&w, "x", cases[i].dtype, 1, &one);
        safetensors_writer_begin(&w);
        safetensors_writer_append(&w, &cases[i].bits, (size_t)safetensors_element_size(cases[i].dtype));
        CHECK(safetensors_writer_finish(&w) == 0);
        safetensors_open(&st, path);
        safetensors_read_real(safetensors_find(&st, "x"), 0, 1, &got);
        double is = (double)got, due = (double)(real)cases[i].value;
        if (isnan(due) ? !isnan(is) : is != due || signbit(is) != signbit(due))
            fail(t, "%s %llx is %g, not %g", cases[i].dtype, (unsigned long long)cases[i].bits, is, due);
        safetensors_close(&st);
    }
    free(path);
}

// A name in the metadata whose value is a tensor is a second name of that tensor, unless it is a tensor itself.
static void test_safetensors_aliases(Tests* t) {
    char* path = put_tensors(t, "{\"__metadata__\":{\"a\":\"y\",\"x\":\"y\",\"b\":\"z\",\"z\":\"a\"},"
                                "\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                                "\"y\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[1,9]}}");
    SafeTensors st;
    safetensors_open(&st, path);
    EXPECT(t, st.count == 3 && !safetensors_find(&st, "b") && !safetensors_find(&st, "z"));
    EXPECT(t, safetensors_find(&st, "a")->elements == 2 && safetensors_find(&st, "x")->elements == 1);
    safetensors_close(&st);
    free(path);
}

static void test_safetensors_refused(Tests* t) {
    static const char good[] = "{\"__metadata__\":{\"a\":\"b\"},"
                               "\"x\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
                               "\"y\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[8,9]}}";
    static const TextChange changes[] = {
        {"{", "{", NULL},
        {"}}", "}}   ", NULL},
        {"[8,9]", "[7,8]", "\"y\": begins at byte"},
        {"\"shape\":[2,1],\"data_offsets\":[0,8]", "\"shape\":[1],\"data_offsets\":[0,4]", "\"y\": begins at byte"},
        {"U8\",\"shape\":[],\"data_offsets\":[8,9]", "U8\",\"shape\":[0],\"data_offsets\":[8,8]", "1 bytes at its end"},
        {"[8,9]", "[8,10]", "\"y\": bytes 8 to 10 are not inside"},
        {"[0,8]", "[8,0]", "\"x\": bytes 8 to 0"},
        {"[2,1]", "[3]", "do not fit its 8 bytes"},
        {"F32", "F31", "dtype \"F31\""},
        {"F32", "I32", "its dtype is I32"},
        {"[2,1]", "[-2]", "its entry is not"},
        {"[2,1]", "[2.0]", "its entry is not"},
        {"[2,1]", "[4294967296,4294967296]", "its entry is not"},
        {"[2,1]", "[4611686018427387904]", "do not fit its 8 bytes"},
        {"[2,1]", "[1,1,1,1,1,1,1,1,2]", "9 dimensions"},
        {"[0,8]", "[0]", "its entry is not"},
        {"[0,8]", "[0,\"8\"]", "its entry is not"},
        {"\"shape\":[],", "", "its entry is not"},
        {"\"shape\":[],", "\"shape\":[],\"z\":1,", "its entry is not"},
        {"{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[8,9]}", "[1]", "its entry is not"},
        {"\"y\"", "\"x\"", "occurs twice"},
        {"\"y\"", "\"y\\u0000\"", "its entry is not"},
        {"\"b\"", "1", "__metadata__"},
        {"{\"a\":\"b\"}", "[]", "__metadata__"},
        {"{", " {", "not a JSON object"},
        {"F32\"", "F32", "not valid JSON"},
    };
    static const FileChange lengths[] = {
        {"a header beyond the file", 0, 8, -1, 0, "should have 18446744073709551615 bytes"},
        {"a header that the file cuts", 0, 0, 0, -20, "bytes, but the file ends after"},
        {"no header", 0, 8, 0, 0, "not a JSON object"},
    };
    expect_text_changes(t, "safetensors", good, changes, COUNT_OF(changes), put_tensors, read_tensors);
    char* path = put_tensors(t, good);
    Text whole = file_text(path);
    expect_changes(t, &whole, "x.safetensors", lengths, COUNT_OF(lengths), read_tensors);
    expect_any_damage(t, &whole, "x.safetensors", whole.length - TENSOR_BYTES, read_tensors);
    free(put_file(t, "x.safetensors", "1234567", 7));
    expect_end(t, USAGE, "safetensors: seven bytes", "7 bytes are too few", read_tensors, path);
    unlink(path);
    expect_end(t, USAGE, "safetensors: no file", "No such file", read_tensors, path);
    expect_end(t, USAGE, "safetensors: a directory", "not a regular file", read_tensors, t->directory);
    free(path), free(whole.text);
}

// ---------------------------------------------------------------------------------------------------------
// Tokenizer

static void open_tokenizer(const char* path) {
    Tokenizer k;
    char* directory = directory_of(path);
    if (tokenizer_open(&k, directory) != 0) die(LOST_PEER, "%s: no tokenizer", path);
    tokenizer_free(&k);
    free(directory);
}

// Characters of the byte alphabet and others, ids that are not in use, and a special token, whose text is as it is.
#define TOKENIZER                                                                                                      \
    "{\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"ByteLevel\"}]},"                                    \
    "\"added_tokens\":[{\"id\":9,\"content\":\"<|endoftext|>\"},{\"id\":11,\"content\":\"\\u0120 x\"}],"               \
    "\"model\":{\"vocab\":{\"a\":0,\"\\u0120the\":5,\"\\u010a\":2,\"\\u00e2\\u0136\\u00a2\":3,\"\\u0143\":6,"          \
    "\"\xe4\xb8\xad\":8}}}"

static char* put_tokenizer(const Tests* t, const char* text) { return put_text_file(t, "tokenizer.json", text); }

static void test_tokenizer(Tests* t) {
    // By id, from -1 on; NULL: no token.
    static const char* const tokens[] = {NULL,         "a",    NULL, "\n",           "\xe2\x94\xa2",  NULL,
                                         " the",       "\xad", NULL, "\xe4\xb8\xad", "<|endoftext|>", NULL,
                                         "\xc4\xa0 x", NULL};
    static const TextChange changes[] = {
        {"ByteLevel", "Strip", "not a byte-level tokenizer"},
        {"\"vocab\":", "\"vocab\":[],\"x\":", "no object of tokens"},
        {"\"content\":\"<", "\"x\":\"<", "no content"},
        {"\"id\":9,", "", "token \"<|endoftext|>\": its id"},
        {"\"a\":0", "\"a\":2", "its id 2 is also another token's"},
        {"\"a\":0", "\"a\":-1", "token \"a\": its id"},
        {"\"a\":0", "\"a\":\"1\"", "token \"a\": its id"},
        {"\"a\":0", "\"a\":999999999", "token \"a\": its id"},
        {"}}}", "}}", "not valid JSON"},
    };
    Tokenizer k;
    size_t n;
    EXPECT(t, tokenizer_open(&k, t->directory) == -1);
    free(put_tokenizer(t, TOKENIZER));
    EXPECT(t, tokenizer_open(&k, t->directory) == 0 && k.size == 12 && tokenizer_end_of_text(&k) == 9);
    for (int id = -1; id < (int)COUNT_OF(tokens) - 1; id++) {
        const char *got = tokenizer_decode(&k, id, &n), *want = tokens[id + 1];
        if (got && want ? n != strlen(want) || memcmp(got, want, n) != 0 : got || want)
            fail(t, "token %d is '%.*s', not '%s'", id, got ? (int)n : 0, got ? got : "", want ? want : "");
    }
    tokenizer_free(&k);
    expect_text_changes(t, "tokenizer.json", TOKENIZER, changes, COUNT_OF(changes), put_tokenizer, open_tokenizer);
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

static uint32_t made_random(int i, uint32_t of) { return philox((uint32_t)i, of, 0, 0, 12345).v[0]; }
static int made_continues(int id) { return id >= FIRST_TOKEN && made_random(id, 1) % 3 == 0; }

// `files` files of `documents` documents each, as DIRECTORY/s0.bin ...; every seventh document is one sentence.
static Made make_sentences(Tests* t, int files, int documents) {
    enum { MOST_SENTENCES = 40, MOST_LENGTH = 50 };
    int most = files * documents * MOST_SENTENCES, V = FIRST_TOKEN, token = 0, *ints = NULL;
    Made m = {0, files * documents, NULL, NULL, (int*)xcalloc((size_t)(files * documents), sizeof(int))};
    for (int d = 0, s = 0; d < m.documents; d++) {
        m.sentences[d] = d % 7 == 0 ? 1 : 1 + (int)(made_random(d, 2) % MOST_SENTENCES);
        for (int i = 0; i < m.sentences[d]; i++) V += 1 + (int)(made_random(s++, 3) % MOST_LENGTH);
    }
    m.tokens = V - FIRST_TOKEN;
    m.document = (int*)xmalloc((size_t)m.tokens * sizeof(int)),
    m.sentence = (int*)xmalloc((size_t)m.tokens * sizeof(int));
    ints = (int*)xcalloc((size_t)(m.tokens + most + documents + 1 + (int)sentences_words(V)), sizeof(int));
    int* tokens = ints;
    uint32_t *begin = (uint32_t*)ints + m.tokens, *first = begin + most, *continues = first + documents + 1;
    for (int id = 0; id < V; id++) continues[id / 32] |= (uint32_t)made_continues(id) << (id % 32);
    for (int f = 0, s = 0; f < files; f++) {
        SentencesHeader h = {0, 0, 0, V, PAD, UNK, CLS, SEP, MASK};
        for (int d = f * documents; d < (f + 1) * documents; d++) {
            first[h.documents++] = h.sentences;
            for (int k = 0; k < m.sentences[d]; k++) {
                begin[h.sentences++] = h.tokens;
                for (uint32_t n = 1 + made_random(s++, 3) % MOST_LENGTH; n > 0; n--, token++) {
                    tokens[h.tokens++] = FIRST_TOKEN + token;
                    m.document[token] = d, m.sentence[token] = k;
                }
            }
        }
        begin[h.sentences] = h.tokens, first[h.documents] = h.sentences;
        Path path = path_of("%s/s%d.bin", t->directory, f);
        if (sentences_write(path.text, h, tokens, begin, first, continues) != 0)
            die(FAILED, "%s: %s", path.text, strerror(errno));
    }
    free(ints);
    return m;
}

static void made_free(Made* m) { free(m->document), free(m->sentence), free(m->sentences); }

// More than 2^31 tokens in more than 2^32 bytes, most of them a hole: starts of sentences, and tokens at the end.
static void test_sentences_beyond_32_bits(Tests* t) {
    enum { LAST = 20, V = 1000 };
    const uint32_t tokens = 3000000001u;
    const int32_t header[SHARD_HEADER_INTS] = {
        SENTENCES_MAGIC, SENTENCES_VERSION_UINT16, (int32_t)tokens, 3, 2, V, PAD, UNK, CLS, SEP, MASK};
    struct {
        uint16_t hole, tokens[LAST], round;  // an odd number of tokens, rounded up to 4 bytes
        uint32_t begin[4], first[3], continues[32];
    } end = {.begin = {0, tokens - LAST, tokens - 5, tokens}, .first = {0, 2, 3}};
    char* path = put_shard(t, "s_large.bin", 0, 1, 2);
    for (int i = 0; i < LAST; i++) end.tokens[i] = (uint16_t)(100 + i);
    uint64_t tokens_end = SHARD_HEADER_BYTES + round_up(2 * (uint64_t)tokens, 4);
    if (put_bytes(t, path, &end, sizeof(end), tokens_end - (LAST + 2) * sizeof(uint16_t)) &&
        put_bytes(t, path, header, sizeof(header), 0)) {
        int got[12];
        Sentences s;
        sentences_open(&s, path);
        EXPECT(t, s.documents == 2 && s.files.tokens == tokens && s.document[0].sentences == 2);
        EXPECT(t, sentences_length(&s, 0, 0, 1) == tokens - LAST && sentences_length(&s, 1, 0, 1) == 5);
        sentences_read(got, &s, 0, 1, 3, 12, NULL);
        for (int i = 0; i < 12; i++) EXPECT_EQ(t, got[i], 103 + i);
        sentences_read(got, &s, 1, 0, 0, 5, NULL);
        for (int i = 0; i < 5; i++) EXPECT_EQ(t, got[i], 115 + i);
        sentences_close(&s);
    }
    unlink(path);
    free(path);
}

static void read_sentences(const char* pattern) {
    Sentences s;
    sentences_open(&s, pattern);
    for (uint64_t d = 0; d < s.documents; d++)
        for (uint32_t i = 0; i < s.document[d].sentences; i++) {
            int token[4];
            sentences_read(token, &s, d, i, 0, sentences_length(&s, d, i, i + 1), NULL);
        }
    sentences_close(&s);
}

// Four tokens in sentences of three and one, which are two documents.
static void test_sentences_refused(Tests* t) {
    enum { TOKENS = SHARD_HEADER_BYTES, BEGIN = TOKENS + 8, FIRST = BEGIN + 12 };
    static const FileChange changes[] = {
        {"as it is", 0, 0, 0, 0, NULL},
        {"a larger vocabulary", 20, 4, 10, 0, NULL},
        {"a token outside the vocabulary", TOKENS + 4, 2, 9, 0,
         "token 9 at position 2 is outside the file's vocabulary of 9"},
        {"sentences that go back", BEGIN + 4, 4, 5, 0, "are not in order"},
        {"a document without sentences", FIRST + 4, 4, 0, 0, "are not in order"},
        {"a special token outside the vocabulary", 40, 4, 9, 0, "a special token the id 9"},
        {"no documents", 16, 4, 0, -8, "contains no documents"},
        {"another file", 0, 4, SENTENCES_MAGIC ^ 1, 0, "is not a file of sentences"},
        {"truncated", 0, 0, 0, -1, "truncated"},
    };
    static const int tokens[] = {5, 6, 7, 8};
    static const uint32_t begin[] = {0, 3, 4}, first[] = {0, 1, 2}, none = 0;
    SentencesHeader h = {4, 2, 2, 9, PAD, UNK, CLS, SEP, MASK};
    char *path = path_in(t, "good.bin"), *shard = put_shard(t, "shard.bin", 0, 10, 2), *why;
    EXPECT(t, sentences_write(path, h, tokens, begin, first, &none) == 0);
    Text good = file_text(path);
    h.V = 10;
    EXPECT(t, sentences_write(named("%s/wide.bin", t->directory), h, tokens, begin, first, &none) == 0);
    EXPECT(t, !ends_with(DONE, NULL, read_sentences, named("%s/[gw]*.bin", t->directory), &why));
    EXPECT(t, strstr(why, "its vocabulary differs"));
    expect_changes(t, &good, "sentences.bin", changes, COUNT_OF(changes), read_sentences);
    expect_any_damage(t, &good, "sentences.bin", 44, read_sentences);
    expect_end(t, USAGE, "sentences: a shard", "without sentences", read_sentences, shard);
    EXPECT(t, sentences_write("/dev/full", h, tokens, begin, first, &none) == -1 && errno == ENOSPC);
    free(why), free(path), free(shard), free(good.text);
}

// ---------------------------------------------------------------------------------------------------------
// Batches of masked sentences

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
    int begin = b->cu_seqlens[s], end = b->cu_seqlens[s + 1], length = end - begin, sep = begin;
    int next = data->recipe.next_sentence, label = b->next_targets[s];
    EXPECT(t, length >= 3 + 2 * next && length <= min_int(data->T, b->max_length));
    EXPECT(t, text[begin] == CLS && text[end - 1] == SEP);
    while (sep < end - 1 && text[sep] != SEP) sep++;
    EXPECT(t, next ? sep < end - 1 : sep == end - 1);
    EXPECT(t, is_segment(m, text, begin + 1, sep) && (!next || is_segment(m, text, sep + 1, end - 1)));
    for (int i = begin; i < end; i++)
        EXPECT(t, b->sequence[i] == s && b->position[i] == i - begin && b->types[i] == (i > sep));
    if (t->is_bad) return;
    c->full += length == data->T;
    if (!next) EXPECT_EQ(t, label, -1);
    if (!next) return;
    int a_last = text[sep - 1] - FIRST_TOKEN, b_first = text[sep + 1] - FIRST_TOKEN, document = m->document[a_last];
    // The label is correct, and B follows A directly in a pair that was not cut.
    EXPECT_EQ(t, label, m->document[b_first] != document);
    if (label == 0) EXPECT(t, b_first > a_last && m->sentence[b_first] > m->sentence[text[begin + 1] - FIRST_TOKEN]);
    if (label == 0 && length < data->T && !data->order)
        EXPECT(t, b_first == a_last + 1 && m->sentence[b_first] == m->sentence[a_last] + 1);
    if (m->sentences[document] == 1) EXPECT_EQ(t, label, 1);
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
        int row = b->masked_rows[i], token = b->tokens[row], is_random = token != MASK && token != b->targets[i];
        EXPECT(t, row >= 0 && row < b->rows && (i == 0 || row > b->masked_rows[i - 1]));
        EXPECT(t, b->targets[i] >= FIRST_TOKEN);  // not [CLS], not [SEP]
        text[row] = b->targets[i];
        is_masked[row] = 1;
        c->as_mask += token == MASK, c->as_itself += token == b->targets[i], c->as_random += is_random;
        c->from_lower_half += is_random && token < data->text.vocabulary.V / 2;
    }
    EXPECT(t, b->cu_seqlens[0] == 0 && b->cu_seqlens[b->count] == b->rows);
    for (int s = 0, k = 0; s < b->count && !t->is_bad; s++) {
        int begin = b->cu_seqlens[s], end = b->cu_seqlens[s + 1], length = end - begin, n = 0, cut = 0;
        for (; k < b->masked && b->masked_rows[k] < end; k++) n++;
        EXPECT_EQ(t, n, min_int(max_int(1, (int)nearbyint(0.15 * length)), data->recipe.max_predictions));
        squares += (int64_t)length * length;
        check_sequence(t, c, m, data, b, text, s);
        // A mask covers whole words, except for one word that filled up the count.
        for (int i = begin + 1; i < end; i++)
            cut +=
                text[i - 1] != CLS && text[i - 1] != SEP && made_continues(text[i]) && is_masked[i] != is_masked[i - 1];
        if (data->recipe.whole_words) EXPECT(t, cut <= 1);
        c->cut_words += cut;
    }
    EXPECT_EQ(t, squares, b->sum_sq_len);
    c->tokens += b->rows, c->sequences += b->count, c->masked += b->masked;
    free(text), free(is_masked);
}

static void expect_share(Tests* t, const char* what, int64_t got, int64_t of, double share) {
    double sigma = sqrt((double)of * share * (1 - share)), off = fabs((double)got - (double)of * share);
    if (!(off <= 3 * sigma))
        fail(t, "%s: %lld of %lld, %.1f sigma off", what, (long long)got, (long long)of, off / sigma);
}

// The predictions at most, their share, whole words, next sentence, pack, short sequences: as published.
static MlmRecipe published_recipe(void) { return (MlmRecipe){20, 0.15, 0, 1, 0, 0.1}; }

// A million tokens made with each recipe.
static void test_mlm_recipes(Tests* t) {
    static const struct {
        MlmRecipe recipe;
        int T, B;
        double least_full, most_length, least_cut,
            most_cut;  // of a sequence: is it full, its length, words cut by masks
    } cases[] = {
        {{20, 0.15, 0, 1, 0, 0.1}, 128, 32, 0.6, 128, 0.1, 20}, {{20, 0.15, 0, 1, 0, 1}, 128, 7, 0, 100, 0, 20},
        {{3, 0.15, 0, 1, 0, 0.1}, 64, 16, 0, 64, 0, 20},        {{20, 0.15, 1, 1, 0, 0.1}, 128, 32, 0, 128, 0, 0.02},
        {{20, 0.15, 1, 0, 0, 0.1}, 16, 32, 0, 16, 0, 1},  // one or two masks: a word is often too long
        {{20, 0.15, 0, 0, 0, 0.1}, 128, 32, 0, 128, 0, 20},     {{1, 0.15, 0, 0, 0, 0.1}, 8, 32, 0, 8, 0, 20},
        {{39, 0.15, 0, 1, 3, 0.1}, 256, 8, 0, 256, 0, 39}};
    Made m = make_sentences(t, 2, 300);
    Path pattern = path_of("%s/s*.bin", t->directory);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        MlmCounts c;
        MlmData data;
        MlmBatch b;
        memset(&c, 0, sizeof(c));
        mlm_open(&data, pattern.text, cases[i].T, cases[i].recipe, 42);
        mlm_batch_alloc(&b, cases[i].B, cases[i].T, cases[i].recipe.max_predictions);
        for (uint64_t index = 0; c.tokens < 1000000 && !t->is_bad; index += (uint64_t)cases[i].B) {
            mlm_batch_build(&b, &data, index, cases[i].B);
            EXPECT_EQ(t, b.count, mlm_count(&data, index, (uint64_t)cases[i].B));
            check_batch(t, &c, &m, &data, &b);
        }
        expect_share(t, "[MASK]", c.as_mask, c.masked, 0.8);
        expect_share(t, "random token", c.as_random, c.masked, 0.1);
        expect_share(t, "random token of the vocabulary's lower half", c.from_lower_half, c.as_random, 0.5);
        expect_share(t, "same token", c.as_itself, c.masked, 0.1);
        expect_share(t, "random next sentence", c.random_pairs, c.pairs, 0.5);
        EXPECT_EQ(t, c.adjoining > 0, cases[i].recipe.next_sentence);
        double n = (double)c.sequences, cut = (double)c.cut_words / n;
        EXPECT(t, (double)c.full / n >= cases[i].least_full && (double)c.tokens / n <= cases[i].most_length);
        EXPECT(t, cut >= cases[i].least_cut && cut <= cases[i].most_cut);
        mlm_batch_free(&b), mlm_close(&data);
    }
    made_free(&m);
}

// The sequences of rows [index, index + n), built B rows at a time.
static Text sequences_of(const MlmData* data, uint64_t index, int n, int B) {
    Text all = {NULL, 0, 0};
    MlmBatch b;
    mlm_batch_alloc(&b, B, data->T, data->recipe.max_predictions);
    for (int at = 0; at < n; at += B) {
        mlm_batch_build(&b, data, index + (uint64_t)at, B);
        for (int i = 0, s = 0, mask = 0; i < b.rows; i++) {
            if (i == b.cu_seqlens[s]) text_printf(&all, "\n%d:", b.next_targets[s++]);
            text_printf(&all, " %d", b.tokens[i]);
            if (mask < b.masked && b.masked_rows[mask] == i) text_printf(&all, "=%d", b.targets[mask++]);
        }
    }
    mlm_batch_free(&b);
    return all;
}

static int same_text(Text a, Text b) {
    int same = strcmp(a.text, b.text) == 0;
    free(a.text), free(b.text);
    return same;
}

// Batches are the same however they are cut, also over the end of an epoch. Every epoch visits each row once, in an
// order and with masks of its own.
static void test_mlm_stream(Tests* t) {
    enum { ROWS = 120 };
    Made m = make_sentences(t, 2, 60);
    Path pattern = path_of("%s/s*.bin", t->directory);
    for (int pack = 1; pack <= 3; pack += 2) {
        MlmRecipe r = published_recipe();
        MlmData data, other;
        r.pack = pack;
        mlm_open(&data, pattern.text, 96, r, 7), mlm_open(&other, pattern.text, 96, r, 8);
        uint64_t n = mlm_sequences(&data), start = n - 30, at[2] = {0, 0}, as_before = 0, as_other = 0;
        for (int B = 4; B <= 24; B += 20)
            EXPECT(t, same_text(sequences_of(&data, start, ROWS, B), sequences_of(&data, start, ROWS, 1)));
        EXPECT(t, !same_text(sequences_of(&other, start, ROWS, 8), sequences_of(&data, start, ROWS, 1)));
        EXPECT(t, (uint64_t)mlm_count(&data, n, n) >= n && mlm_fingerprint(&data) == mlm_fingerprint(&other));
        unsigned char* seen = (unsigned char*)xcalloc((size_t)n, 1);
        for (uint64_t i = 0; i < 2 * n; i++) {
            uint64_t row = mlm_row(&data, i);
            EXPECT_EQ(t, seen[row]++, i / n);
            as_before += i >= n && row == mlm_row(&data, i - n);
            as_other += row == mlm_row(&other, i);
            if (row == 11) at[i / n] = i;
        }
        EXPECT(t, as_before < n / 4 && as_other < n / 4);
        EXPECT(t, !same_text(sequences_of(&data, at[0], 1, 1), sequences_of(&data, at[1], 1, 1)));
        free(seen), mlm_close(&data), mlm_close(&other);
    }
    made_free(&m);
}

// "T V PATH": sequences of T tokens for a model of a vocabulary that is V smaller than that of PATH.
static void open_masked(const char* argument) {
    MlmData data;
    char* rest;
    int T = (int)strtol(argument, &rest, 10), fewer = (int)strtol(rest, &rest, 10);
    MlmRecipe r = published_recipe();
    r.next_sentence = fewer == 0;
    mlm_open(&data, rest + 1, T, r, 0);
    mlm_check_vocabulary(&data, data.text.vocabulary.V - fewer);
}

static void test_mlm_refused(Tests* t) {
    static const char* const cases[][2] = {
        {"7 0", "-t must be at least 8"}, {"128 0", "contains one document"}, {"128 1", "is larger than the model's"}};
    Made m = make_sentences(t, 1, 1);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Text said = {NULL, 0, 0};
        EXPECT_EQ(t, exit_status_of(open_masked, named("%s %s/s0.bin", cases[i][0], t->directory), &said), USAGE);
        if (!is_one_line(&said) || !strstr(said.text, cases[i][1])) fail(t, "'%s', not '%s'", said.text, cases[i][1]);
        free(said.text);
    }
    made_free(&m);
}

// ---------------------------------------------------------------------------------------------------------
// WordPiece

static void open_wordpiece(const char* path) {
    WordPiece w;
    char* directory = directory_of(path);
    if (wordpiece_open(&w, directory, UNCASED) != 0) die(LOST_PEER, "%s: no vocabulary", path);
    wordpiece_free(&w);
    free(directory);
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
    token_ids_free(&ids);
    free(got.text);
}

// Words and their tokens, as `tokenizers` 0.23 has them. dev/test/check_wordpiece.py compares every character, and all
// that tokenizer_config.json may say of case, accents and ideographs.
static void test_wordpiece(Tests* t) {
    static const char vocabulary[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nun\n##aff\n##able\ncafe\n!\n,"
                                     "\n\xe4\xb8\xad\n\xce\xb1\n##\xcf\x83\n[\n]\n"
                                     "mask\na\n##a\n\xe0\xa6\x95\n##\xe0\xa7\x87\n##\xe0\xa6\xbe\n\xe8\xb1\x88\n"
                                     "\xc3\x89\n##\xe4\xb8\xad\nE\n##\xcc\x81\ne\n##e\n";
    static const char* const cases[][2] = {
        {"", ""},
        {"The UNAFFABLE  caf\xc3\xa9!", "the un ##aff ##able cafe !"},
        {"unaff,unx the", "un ##aff , [UNK] the"},
        {"the[MASK]the [mask] [MASK][SEP]", "the [MASK] the [ mask ] [MASK] [SEP]"},
        {"aa\xe4\xb8\xad", "a ##a \xe4\xb8\xad"},
        {"\xce\x91\xce\xa3 \xce\xac\xcc\x88\xcf\x83", "\xce\xb1 ##\xcf\x83 \xce\xb1 ##\xcf\x83"},
        {"the\xc2\xad\xe2\x80\x8b\x01 the\xc2\xa0the\xff\xe3\x80", "the the the"},
        // A vowel sign of two parts, a CJK compatibility ideograph.
        {"\xe0\xa6\x95\xe0\xa7\x8b \xef\xa4\x80", "\xe0\xa6\x95 ##\xe0\xa7\x87 ##\xe0\xa6\xbe \xe8\xb1\x88"},
    };
    static const char rules_text[] = "\xc3\x89 E\xcc\x81 a\xe4\xb8\xad"
                                     "e [MASK]\xc3\x89";
    static const char* const rules[][2] = {
        {"{\"do_lower_case\": true, \"strip_accents\": null}", "e e a \xe4\xb8\xad e [MASK] e"},
        {"{\"do_lower_case\": true, \"strip_accents\": false}", "[UNK] e ##\xcc\x81 a \xe4\xb8\xad e [MASK] [UNK]"},
        {"{\"do_lower_case\": false, \"tokenize_chinese_chars\": false}",
         "\xc3\x89 E ##\xcc\x81 a ##\xe4\xb8\xad ##e [MASK] \xc3\x89"},
        {"{\"do_lower_case\": false, \"strip_accents\": true}", "E E a \xe4\xb8\xad e [MASK] E"},
    };
    static const int ids[] = {5, 6, 7, 8, 11, 9, 10, 4, 99, -1};
    WordPiece w;
    Text text = {NULL, 0, 0};
    char longest[102] = "", *path = put_text_file(t, "vocab.txt", vocabulary);
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.letter_case == UNCASED && !w.is_bytes);
    EXPECT(t, w.mask == 4 && wordpiece_id(&w, "##able", 6) == 8 && wordpiece_id(&w, "x", 1) == -1);
    for (size_t i = 0; i < COUNT_OF(cases); i++) expect_words(t, &w, cases[i][0], cases[i][1]);
    memset(longest, 'a', 101);
    expect_words(t, &w, longest, "[UNK]");  // longer than any word
    wordpiece_decode(&text, &w, ids, COUNT_OF(ids));
    EXPECT_TEXT(t, text.text, "the unaffable, cafe! [MASK]");
    wordpiece_free(&w);
    for (size_t i = 0; i < COUNT_OF(rules); i++) {
        free(put_text_file(t, "tokenizer_config.json", rules[i][0]));
        EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0);
        expect_words(t, &w, rules_text, rules[i][1]);
        wordpiece_free(&w);
    }
    free(text.text), free(path);
    path = put_text_file(t, "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n");
    expect_end(t, USAGE, "vocab.txt: no [MASK]", "has no [MASK]", open_wordpiece, path);
    free(path);
}

#define WORDPIECE                                                                                                      \
    "{\"added_tokens\": [{\"id\": 4, \"content\": \"[MASK]\", \"lstrip\": false}, {\"id\": 3, \"content\": "           \
    "\"[SEP]\"}, "                                                                                                     \
    "{\"id\": 2, \"content\": \"[CLS]\"}, {\"id\": 1, \"content\": \"[UNK]\"}, {\"id\": 0, \"content\": \"[PAD]\"}], " \
    "\"normalizer\": {\"type\": \"BertNormalizer\", \"lowercase\": true, \"strip_accents\": null, \"clean_text\": "    \
    "true, "                                                                                                           \
    "\"handle_chinese_chars\": true}, \"pre_tokenizer\": {\"type\": \"BertPreTokenizer\"}, \"model\": {\"type\": "     \
    "\"WordPiece\", \"unk_token\": \"[UNK]\", \"continuing_subword_prefix\": \"##\", \"max_input_chars_per_word\": "   \
    "100, "                                                                                                            \
    "\"vocab\": {\"##s\": 7, \"[PAD]\": 0, \"[UNK]\": 1, \"[CLS]\": 2, \"[SEP]\": 3, \"[MASK]\": 4, \"the\": 5, "      \
    "\"Caf\u00e9\": 6, \"cafe\": 8}}}"

static void test_wordpiece_json(Tests* t) {
    static const TextChange changes[] = {
        {"\"BertNormalizer\"", "\"Sequence\"", "normalizer's \"type\" is \"Sequence\"; only \"BertNormalizer\""},
        {"\"lowercase\"", "\"x\"", "key \"lowercase\": missing"},
        {"\"strip_accents\": null", "\"strip_accents\": 1", "key \"strip_accents\": is a number"},
        {"\"clean_text\": true", "\"clean_text\": false", "\"clean_text\""},
        {"BertPreTokenizer", "Whitespace", "pre_tokenizer's \"type\" is \"Whitespace\""},
        {"WordPiece", "BPE", "model's \"type\" is \"BPE\"; only \"WordPiece\""},
        {"\"unk_token\": \"[UNK]\"", "\"unk_token\": \"<unk>\"", "\"unk_token\" is \"<unk>\""},
        {"prefix\": \"##\"", "prefix\": \"@\"", "prefix\" is \"@\""},
        {"per_word\": 100", "per_word\": 9", "\"max_input_chars_per_word\" is 9"},
        {"\"vocab\":", "\"vocab\": [], \"x\":", "key \"vocab\": is an array"},
        {"\"vocab\":", "\"vocab\": {}, \"x\":", "has no [PAD]"},
        {"\"the\": 5", "\"the\": -1", "token \"the\": its id is not an integer"},
        {"\"the\": 5", "\"the\": 9", "token \"the\": its id 9 is not below"},
        {"\"the\": 5", "\"the\": 4", "token \"the\": its id 4 is also"},
        {"{\"id\": 4", "{\"id\": 9, \"content\": \"<x>\"}, {\"id\": 4",
         "added token <x> with the id 9 is not supported"},
        {"{\"id\": 4", "{\"id\": 3", "added token [MASK] with the id 3"},
        {"\"lstrip\": false", "\"lstrip\": true", "[MASK]'s \"lstrip\" is true"},
        {", {\"id\": 0, \"content\": \"[PAD]\"}", "", "has no added token for one of [PAD]"},
        {"\"model\"", "\"x\"", "key \"model\": missing"},
    };
    WordPiece w;
    free(put_tokenizer(t, WORDPIECE));
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.letter_case == UNCASED && !w.is_bytes);
    EXPECT(t, w.size == 9 && w.mask == 4 && wordpiece_id(&w, "##s", 3) == 7 && w.longest == 6);
    expect_words(t, &w, "The Caf\xc3\xa9s[MASK]x", "the cafe ##s [MASK] [UNK]");
    wordpiece_free(&w);
    expect_text_changes(t, "WordPiece", WORDPIECE, changes, COUNT_OF(changes), put_tokenizer, open_wordpiece);
    free(put_text_file(t, "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nx"));  // which comes first
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.size == 6);
    wordpiece_free(&w);
}

// ---------------------------------------------------------------------------------------------------------
// For scripts

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

// A blank line comes after each document.
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
    static const TestCase cases[] = {
        {"shards/beyond_32_bits", test_shards_beyond_32_bits},
        {"shards/many", test_shards_many},
        {"shards/refused", test_shards_refused},
        {"batch_lm/mask", test_batch_mask},
        {"batch_lm/shuffle", test_batch_shuffle},
        {"sentences/beyond_32_bits", test_sentences_beyond_32_bits},
        {"sentences/refused", test_sentences_refused},
        {"batch_mlm/recipes", test_mlm_recipes},
        {"batch_mlm/stream", test_mlm_stream},
        {"batch_mlm/refused", test_mlm_refused},
        {"safetensors/round_trip", test_safetensors},
        {"safetensors/types", test_safetensors_types},
        {"safetensors/aliases", test_safetensors_aliases},
        {"safetensors/refused", test_safetensors_refused},
        {"tokenizer", test_tokenizer},
        {"wordpiece/words", test_wordpiece},
        {"wordpiece/json", test_wordpiece_json},
        {"shards/scan", test_shards_scan},  // last: children of a process with threads seem to leak
    };
    return tests_main(argc, argv, cases, COUNT_OF(cases));
}
