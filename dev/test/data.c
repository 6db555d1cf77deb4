/* Tests of llmc/data and of masked batches: what is written reads back, batches agree however they are
 * cut, and bad files end with exit status 2 and one line that names them.
 *
 *     ./test_data [NAME]                               the tests whose name contains NAME
 *     ./test_data sentences PATTERN VOCABULARY_FOLDER  the sentences of a data set in words, for dev/test/prepare.py */
#include "dev/data/corpus_files.h"
#include "dev/test/tests.h"
#include "llmc/bert/batch_mlm.h"
#include "llmc/data/batch_lm.h"
#include "llmc/data/safetensors_writer.h"
#include "llmc/data/token_scan.h"
#include "llmc/data/val_entropy.h"
#include "llmc/model/tokenizer_files.h"
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

static Text file_text(const char* path) {
    Text text = {NULL, 0, 0};
    size_t n;
    char* bytes = read_file(path, 1 << 24, &n, FAILED);
    text_append(&text, bytes, n);
    free(bytes);
    return text;
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

// 2^32 + 10 tokens, 8 GiB, a hole except for both ends. Each of more than 2^32 windows of one token is read at its
// place in the order, and so is the last window of nine.
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
        uint64_t beyond = 0;
        Shards s = open_shards(t, "large.bin");
        EXPECT_EQ(t, s.tokens, count);
        batch_lm_init(&b, &s, 1, T, 50257, 1, IN_ORDER);
        batch_lm_read(&b, 7 * windows - 1, inputs, targets, NULL);
        for (int i = 0; i < T; i++) EXPECT_EQ(t, targets[i], 1000 + LAST - (int)(count - first) + i + 1);
        batch_lm_free(&b);
        batch_lm_init(&b, &s, 1, 1, 50257, 3, SHUFFLED);
        for (uint64_t i = 0; i < 4096; i++) {
            uint64_t sequence = count - 2 - i, w = batch_lm_window(&b, sequence);
            beyond += w >= (uint64_t)1 << 31;
            batch_lm_read(&b, sequence, inputs, targets, NULL);
            EXPECT_EQ(t, inputs[0], w < 4 ? 5 + (int)w : w < count - LAST ? 0 : 1000 + LAST - (int)(count - w));
        }
        EXPECT(t, beyond > 1024 && beyond < 3072);  // they are all over the file
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
}

// The largest token is found anywhere: at both ends, and at the ends of the pieces that threads read. Of equal ones the
// first is.
static void test_shards_scan(Tests* t) {
    enum { MOST = 70000 };
    int* tokens = (int*)xcalloc(MOST, sizeof(int));
    char* path = path_in(t, "scan.bin");
    for (int width = 2; width <= 4; width += 2) {
        const int piece = SCAN_PIECE / width, places[] = {0, piece - 1, piece, MOST - 1};
        const int large = width == 2 ? 65535 : -2;  // as unsigned numbers the largest but one
        for (size_t i = 0; i < COUNT_OF(places); i++) {
            TokenScan scan;
            tokens[places[i]] = tokens[MOST - 1] = large;
            CHECK(shard_write(path, tokens, MOST, width) == 0);
            tokens[places[i]] = tokens[MOST - 1] = 0;
            Shards s = open_shards(t, "scan.bin");
            token_scan_read(&scan, &s.shard[0]);
            EXPECT_EQ(t, scan.largest, (uint32_t)large);
            EXPECT_EQ(t, scan.position, places[i]);
            shards_close(&s);
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

// What dev/test/refuse.txt does not say of shards.
static void test_shards_refused(Tests* t) {
    static const FileChange changes[] = {
        {"as it is", 0, 0, 0, 0, NULL},
        {"half a header", 0, 0, 0, -21, "1023 bytes are too few"},
        {"no tokens", 8, 4, 0, -20, "contains no tokens"},
        {"half a token more", 0, 0, 0, 1, "damaged"},
        {"a token more", 0, 0, 0, 2, "damaged"},
        {"a count below 0", 8, 4, -1, 0, "gives 4294967295 tokens"},
        {"an evaluation set", 0, 4, SHARD_MAGIC_EVALUATION, 0, "evaluation set"},
        {"another version", 4, 4, 2, 0, "version 2"},
        {"another width", 0, 4, SHARD_MAGIC_UINT32, 0, "version 1, but only version 7"},
        {"a token outside the vocabulary", SHARD_HEADER_BYTES + 4, 2, 3000, 0,
         "token 3000 at position 2 is outside the vocabulary of 3000"},
    };
    static const FileChange masked[] = {
        {"as it is", 0, 0, 0, 0, NULL},
        {"a byte is missing", 0, 0, 0, -1, "truncated"},
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
    expect_any_damage(t, &good_mask, "mask.bin", 24, read_windows);
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
    static const int starts[] = {1, 1 + T, 65520, 70000}, counts[] = {3, 4, T, 0};
    int inputs[4 * T], targets[4 * T];
    BatchLm b;
    char *path = put_masked_shard(t, "c.bin", starts[3], T + 1, 4, 0), *moved = path_in(t, "d.bin");
    free(put_masked_shard(t, "a.bin", 1, 2 * T + 1, 2, 5));
    free(put_shard(t, "b.bin", starts[2], T + 1, 2));
    Shards s = open_shards(t, "*.bin");
    EXPECT(t, s.tokens == 4 * T + 3 && s.shard[0].has_mask && s.shard[0].row == 5 && !s.shard[1].has_mask);
    batch_lm_init(&b, &s, 4, T, 80000, 1, IN_ORDER);
    batch_lm_read(&b, 0, inputs, targets, NULL);
    for (int i = 0; i < 4 * T; i++) {
        int token = starts[i / T] + i % T + 1, is_target = i / T == 2 || (i / T < 2 && token % 3 == 0);
        EXPECT_EQ(t, inputs[i], token - 1);
        EXPECT_EQ(t, targets[i], is_target ? token : -1);
    }
    for (uint64_t i = 0; i < 4; i++) EXPECT_EQ(t, batch_lm_count(&b, i, 1), counts[i]);
    EXPECT_EQ(t, batch_lm_count(&b, 2, 8), 2 * (7 + T));  // over two epochs
    // Another mask, another token and another number of tokens are other data, but not another name.
    uint32_t before = shards_fingerprint(&s);
    batch_lm_free(&b), shards_close(&s);
    for (int i = 0; i < 4; i++) {
        if (i == 0) CHECK(rename(path, moved) == 0);
        if (i == 1 || i == 2) put_bytes(t, moved, "\7", 1, SHARD_HEADER_BYTES + (i == 1 ? 4 * (T + 1) : 0));
        if (i == 3) free(put_shard(t, "b.bin", starts[2], T + 2, 2));
        s = open_shards(t, "*.bin");
        uint32_t now = shards_fingerprint(&s);
        EXPECT(t, (now == before) == (i == 0));
        before = now;
        shards_close(&s);
    }
    free(path), free(moved);
}

// Every epoch has all windows, in an order of its own, which is another for another seed.
static void test_batch_shuffle(Tests* t) {
    enum { WINDOWS = 101, T = 3, EPOCHS = 3 };
    int first[EPOCHS * WINDOWS], seen[WINDOWS] = {0}, as_before = 0, in_order = 0, as_other = 0;
    BatchLm one, other;
    free(put_shard(t, "a.bin", 0, 50 * T + 1, 2));
    free(put_shard(t, "b.bin", 50 * T, 51 * T + 1, 2));
    Shards s = open_shards(t, "*.bin");
    batch_lm_init(&one, &s, 1, T, 1000, 42, SHUFFLED);
    batch_lm_init(&other, &s, 1, T, 1000, 43, SHUFFLED);
    for (int i = 0; i < EPOCHS * WINDOWS; i++) {
        int inputs[T], targets[T], others[T];
        batch_lm_read(&other, (uint64_t)i, others, targets, NULL);
        batch_lm_read(&one, (uint64_t)i, inputs, targets, NULL);
        EXPECT(t, inputs[0] % T == 0 && targets[T - 1] == inputs[0] + T);
        EXPECT_EQ(t, seen[inputs[0] / T]++, i / WINDOWS);
        first[i] = inputs[0];
        as_before += i >= WINDOWS && first[i - WINDOWS] == first[i];
        in_order += first[i] == i % WINDOWS * T;
        as_other += first[i] == others[0];
    }
    EXPECT(t, as_before < 20 && in_order < 20 && as_other < 20);
    batch_lm_free(&one), batch_lm_free(&other), shards_close(&s);
}

// The generator's losses next to a shard, for its own T and if no block is missing.
static void test_val_entropy(Tests* t) {
    static const struct {
        const char* text;
        int T, blocks;
    } cases[] = {{"5 0.25\n1.5\n2\n3.5\n", 5, 3}, {"5 0.25\n1.5\n2\n3.5\n", 8, 0}, {"5 0.25\n1.5\n2\n", 5, 0}};
    free(put_shard(t, "val.bin", 0, 16, 2));
    for (size_t i = 0; i <= COUNT_OF(cases); i++) {
        ValEntropy e;
        if (i == COUNT_OF(cases)) unlink(named("%s/val_entropy.txt", t->directory));
        else free(put_text_file(t, "val_entropy.txt", cases[i].text));
        Shards s = open_shards(t, "val.bin");
        val_entropy_open(&e, &s, i < COUNT_OF(cases) ? cases[i].T : 5);
        EXPECT_EQ(t, e.blocks, i < COUNT_OF(cases) ? cases[i].blocks : 0);
        if (e.blocks) EXPECT(t, e.bound == 0.25 && e.nats[0] == 1.5 && e.nats[2] == 3.5);
        val_entropy_close(&e), shards_close(&s);
    }
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
    int64_t back[6];
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
    EXPECT(t, st.count == 4 && !safetensors_find(&st, "larg") && a && c && c->elements == 1 && d && d->elements == 0);
    EXPECT(t, b && b->ndim == 2 && b->shape[1] == 3 && strcmp(b->dtype, "I64") == 0);
    for (uint64_t from = 0; from <= 5 && !t->is_bad; from += 5) {
        safetensors_read_real(a, from, N - from, got);
        EXPECT(t, memcmp(x + from, got, (N - from) * sizeof(real)) == 0);
    }
    if (!t->is_bad) safetensors_read_bytes(b, 0, sizeof(back), back);
    EXPECT(t, t->is_bad || memcmp(back, integers, sizeof(back)) == 0);
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
                 {"F16", 0x7BFF, 65504},
                 {"F16", 0x8000, -0.0},
                 {"F16", 0xFC00, -INFINITY},
                 {"F16", 0x7E00, NAN},
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
        {"}}", "}}   ", NULL},
        {"[8,9]", "[7,8]", "\"y\": begins at byte"},
        {"[8,9]", "[8,10]", "\"y\": bytes 8 to 10 are not inside"},
        {"[0,8]", "[8,0]", "\"x\": bytes 8 to 0"},
        {"[2,1]", "[3]", "do not fit its 8 bytes"},
        {"F32", "F31", "dtype \"F31\""},
        {"[2,1]", "[-2]", "its entry is not"},
        {"[2,1]", "[4611686018427387904]", "do not fit its 8 bytes"},
        {"[2,1]", "[1,1,1,1,1,1,1,1,2]", "9 dimensions"},
        {"[0,8]", "[0]", "its entry is not"},
        {"\"shape\":[],", "\"shape\":[],\"z\":1,", "its entry is not"},
        {"\"y\"", "\"x\"", "occurs twice"},
        {"\"y\"", "\"y\\u0000\"", "its entry is not"},
        {"\"b\"", "1", "__metadata__"},
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
    unlink(path);
    expect_end(t, USAGE, "safetensors: no file", "No such file", read_tensors, path);
    free(path), free(whole.text);
}

// ---------------------------------------------------------------------------------------------------------
// Sentences

// A data set whose tokens identify their place: token i of all files has the id FIRST_TOKEN + i.
enum { PAD, UNK, CLS, SEP, MASK, FIRST_TOKEN, MADE_V = 330000 };

typedef struct {
    Tokens document, sentence;  // of each token
    Tokens sentences;           // of each document
} Made;

static int made_random(size_t i, int of) { return (int)(philox((uint32_t)i, (uint32_t)of, 0, 0, 12345).v[0] >> 1); }
static int made_continues(int id) { return id >= FIRST_TOKEN && made_random((size_t)id, 1) % 3 == 0; }
static void tokens_put(Tokens* t, int id) { tokens_add(t, &id, 1); }

// `files` files of `documents` documents each, as DIRECTORY/s0.bin ...; every seventh document is one sentence.
static Made make_sentences(Tests* t, int files, int documents) {
    static uint32_t continues[(MADE_V + 31) / 32];
    Made m = {{NULL, 0, 0}, {NULL, 0, 0}, {NULL, 0, 0}};
    for (int id = 0; id < MADE_V; id++) continues[id / 32] |= (uint32_t)made_continues(id) << (id % 32);
    for (int f = 0, s = 0; f < files; f++) {
        Tokens tokens = {NULL, 0, 0}, begin = {NULL, 0, 0}, first = {NULL, 0, 0};
        for (int d = f * documents; d < (f + 1) * documents; d++) {
            int sentences = d % 7 == 0 ? 1 : 1 + made_random((size_t)d, 2) % 40;
            tokens_put(&m.sentences, sentences);
            tokens_put(&first, (int)begin.count);
            for (int k = 0; k < sentences; k++) {
                tokens_put(&begin, (int)tokens.count);
                for (int n = 1 + made_random((size_t)s++, 3) % 50; n > 0; n--) {
                    tokens_put(&tokens, FIRST_TOKEN + (int)m.document.count);
                    tokens_put(&m.document, d), tokens_put(&m.sentence, k);
                }
            }
        }
        SentencesHeader h = {0, 0, (uint32_t)first.count, MADE_V, PAD, UNK, CLS, SEP, MASK};
        h.tokens = (uint32_t)tokens.count, h.sentences = (uint32_t)begin.count;
        tokens_put(&begin, (int)tokens.count), tokens_put(&first, (int)begin.count - 1);
        Path path = path_of("%s/s%d.bin", t->directory, f);
        CHECK(m.document.count < MADE_V - FIRST_TOKEN);
        CHECK(sentences_write(path.text, h, tokens.id, (uint32_t*)begin.id, (uint32_t*)first.id, continues) == 0);
        free(tokens.id), free(begin.id), free(first.id);
    }
    return m;
}

static void made_free(Made* m) { free(m->document.id), free(m->sentence.id), free(m->sentences.id); }

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
    };
    static const int tokens[] = {5, 6, 7, 8};
    static const uint32_t begin[] = {0, 3, 4}, first[] = {0, 1, 2}, none = 0;
    SentencesHeader h = {4, 2, 2, 9, PAD, UNK, CLS, SEP, MASK};
    char* path = path_in(t, "good.bin");
    EXPECT(t, sentences_write(path, h, tokens, begin, first, &none) == 0);
    Text good = file_text(path);
    expect_changes(t, &good, "sentences.bin", changes, COUNT_OF(changes), read_sentences);
    expect_any_damage(t, &good, "sentences.bin", 44, read_sentences);
    EXPECT(t, sentences_write("/dev/full", h, tokens, begin, first, &none) == -1 && errno == ENOSPC);
    free(path), free(good.text);
}

// ---------------------------------------------------------------------------------------------------------
// Batches of masked sentences

typedef struct {
    int64_t tokens, sequences, masked, as_mask, as_random, from_lower_half, as_itself, pairs, random_pairs, adjoining;
} MlmCounts;

// The rows of a segment have consecutive tokens of one document.
static int is_segment(const Made* m, const int* text, int begin, int end) {
    for (int i = begin; i < end; i++) {
        int at = text[i] - FIRST_TOKEN;
        if (at < 0 || at >= (int)m->document.count || text[i] != text[begin] + i - begin) return 0;
        if (m->document.id[at] != m->document.id[text[begin] - FIRST_TOKEN]) return 0;
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
    EXPECT(t, next ? sep < end - 1 : sep == end - 1 && label == -1);
    EXPECT(t, is_segment(m, text, begin + 1, sep) && (!next || is_segment(m, text, sep + 1, end - 1)));
    for (int i = begin; i < end; i++)
        EXPECT(t, b->sequence[i] == s && b->position[i] == i - begin && b->types[i] == (i > sep));
    if (t->is_bad || !next) return;
    int a_last = text[sep - 1] - FIRST_TOKEN, b_first = text[sep + 1] - FIRST_TOKEN, document = m->document.id[a_last];
    int has_next = m->sentences.id[document] > 1, adjoins = b_first == a_last + 1;
    // The label is correct, and B follows A directly in a pair that was not cut.
    EXPECT_EQ(t, label, m->document.id[b_first] != document);
    EXPECT(t, label || (b_first > a_last && m->sentence.id[b_first] > m->sentence.id[text[begin + 1] - FIRST_TOKEN]));
    if (label == 0 && length < data->T && !data->order)
        EXPECT(t, adjoins && m->sentence.id[b_first] == m->sentence.id[a_last] + 1);
    EXPECT(t, has_next || label);
    c->adjoining += label == 0 && adjoins;
    c->pairs += has_next;
    c->random_pairs += has_next && label;
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
        c->from_lower_half += is_random && token < MADE_V / 2;
    }
    EXPECT(t, b->cu_seqlens[0] == 0 && b->cu_seqlens[b->count] == b->rows);
    for (int s = 0; s < b->count && !t->is_bad; s++) {
        int begin = b->cu_seqlens[s], end = b->cu_seqlens[s + 1], length = end - begin, n = 0, cut = 0;
        for (int i = begin; i < end; i++) n += is_masked[i];
        EXPECT_EQ(t, n, min_int(max_int(1, (int)nearbyint(0.15 * length)), data->recipe.max_predictions));
        squares += (int64_t)length * length;
        check_sequence(t, c, m, data, b, text, s);
        // A mask covers whole words, except for one word that filled up the count.
        for (int i = begin + 1; i < end; i++)
            cut += text[i - 1] >= FIRST_TOKEN && made_continues(text[i]) && is_masked[i] != is_masked[i - 1];
        EXPECT(t, !data->recipe.whole_words || cut <= 1);
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
        int T, B, least, most;  // tokens of a sequence on average
    } cases[] = {{{20, 0.15, 0, 1, 0, 0.1}, 128, 32, 100, 128}, {{20, 0.15, 0, 1, 0, 1}, 128, 7, 0, 100},
                 {{3, 0.15, 0, 1, 0, 0.1}, 64, 16, 0, 64},      {{20, 0.15, 1, 1, 0, 0.1}, 128, 32, 0, 128},
                 {{20, 0.15, 1, 0, 0, 0.1}, 16, 32, 0, 16},     {{1, 0.15, 0, 0, 0, 0.1}, 8, 32, 0, 8},
                 {{39, 0.15, 0, 1, 3, 0.1}, 256, 8, 0, 256}};
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
        EXPECT(t, c.tokens >= c.sequences * cases[i].least && c.tokens <= c.sequences * cases[i].most);
        mlm_batch_free(&b), mlm_close(&data);
    }
    made_free(&m);
}

// Every epoch visits each row once, in an order and with masks of its own, which are others for another seed. That
// batches are the same however they are cut is a row of dev/test/equal.txt.
static void test_mlm_stream(Tests* t) {
    Made m = make_sentences(t, 2, 60);
    Path pattern = path_of("%s/s*.bin", t->directory);
    for (int pack = 1; pack <= 3; pack += 2) {
        MlmRecipe r = published_recipe();
        MlmData data, other;
        MlmBatch b[2];
        r.pack = pack;
        mlm_open(&data, pattern.text, 96, r, 7), mlm_open(&other, pattern.text, 96, r, 8);
        uint64_t n = mlm_sequences(&data), as_before = 0, as_other = 0;
        EXPECT(t, (uint64_t)mlm_count(&data, n, n) >= n && mlm_fingerprint(&data) == mlm_fingerprint(&other));
        unsigned char* seen = (unsigned char*)xcalloc((size_t)n, 1);
        for (uint64_t i = 0; i < 2 * n; i++) {
            uint64_t row = mlm_row(&data, i);
            EXPECT_EQ(t, seen[row]++, i / n);
            as_before += i >= n && row == mlm_row(&data, i - n);
            as_other += row == mlm_row(&other, i);
            if (row != 11) continue;
            mlm_batch_alloc(&b[i / n], 1, 96, r.max_predictions);
            mlm_batch_build(&b[i / n], &data, i, 1);
        }
        EXPECT(t, as_before < n / 4 && as_other < n / 4);
        EXPECT(t, memcmp(b[0].tokens, b[1].tokens, (size_t)min_int(b[0].rows, b[1].rows) * sizeof(int)) != 0);
        for (int i = 0; i < 2; i++) mlm_batch_free(&b[i]);
        free(seen), mlm_close(&data), mlm_close(&other);
    }
    made_free(&m);
}

// The fraction of masks falls linearly with the row, over all epochs, and then stays.
static void test_mlm_falling(Tests* t) {
    static const struct {
        uint64_t row;
        double fraction;
    } cases[] = {{0, 0.4}, {300, 0.3}, {600, 0.2}, {900, 0.1}, {2000, 0.1}};
    Made m = make_sentences(t, 2, 60);
    MlmRecipe r = {.max_predictions = 38, .mask_fraction = 0.4, .last_mask_fraction = 0.1, .fall_rows = 900};
    MlmData data;
    MlmBatch b;
    mlm_open(&data, named("%s/s*.bin", t->directory), 96, r, 7);
    mlm_batch_alloc(&b, 1, 96, r.max_predictions);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        mlm_batch_build(&b, &data, cases[i].row, 1);
        EXPECT_EQ(t, b.masked, (int)nearbyint(cases[i].fraction * b.rows));
    }
    mlm_batch_free(&b), mlm_close(&data), made_free(&m);
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
// For scripts

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
    if (argc == 4 && strcmp(argv[1], "sentences") == 0) return print_sentences(argv + 2);
    static const TestCase cases[] = {
        {"shards/beyond_32_bits", test_shards_beyond_32_bits},
        {"shards/many", test_shards_many},
        {"shards/refused", test_shards_refused},
        {"batch_lm/mask", test_batch_mask},
        {"batch_lm/shuffle", test_batch_shuffle},
        {"val_entropy", test_val_entropy},
        {"sentences/refused", test_sentences_refused},
        {"batch_mlm/recipes", test_mlm_recipes},
        {"batch_mlm/stream", test_mlm_stream},
        {"batch_mlm/falling", test_mlm_falling},
        {"batch_mlm/refused", test_mlm_refused},
        {"safetensors/round_trip", test_safetensors},
        {"safetensors/types", test_safetensors_types},
        {"safetensors/aliases", test_safetensors_aliases},
        {"safetensors/refused", test_safetensors_refused},
        {"shards/scan", test_shards_scan},  // last: children of a process with threads seem to leak
    };
    return tests_main(argc, argv, cases, COUNT_OF(cases));
}
