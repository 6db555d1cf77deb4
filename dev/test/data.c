/* Tests of llmc/data and of masked batches: what is written reads back, batches are what their recipe says, reading
 * ahead changes none of them, and bad files end with exit status 2 and one line that names them. dev/test/equal.txt and
 * dev/test/refuse.txt have what a run shows of it.
 *
 *     ./test_data [NAME]      the tests whose name contains NAME
 *
 * The cases of reading ahead, "prefetch/...", are also built with -fsanitize=thread. */
#include "dev/data/corpus_files.h"
#include "dev/test/tests.h"
#include "llmc/bert/mlm_data.h"
#include "llmc/data/lm_data.h"
#include "llmc/data/safetensors_writer.h"
#include "llmc/data/token_scan.h"

// ---------------------------------------------------------------------------------------------------------
// Shards

static char* put_tokens(Tests* t, const char* name, const int* tokens, int n, int width) {
    char* path = path_in(t, name);
    if (shard_write(path, tokens, (uint64_t)n, width) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    return path;
}

// A file of the tokens first .. first + n - 1.
static char* put_shard(Tests* t, const char* name, int first, int n, int width) {
    int* tokens = (int*)xmalloc((size_t)n * sizeof(int));
    for (int i = 0; i < n; i++) tokens[i] = first + i;
    char* path = put_tokens(t, name, tokens, n, width);
    free(tokens);
    return path;
}

static Shards open_shards(Tests* t, const char* pattern) {
    Shards s;
    shards_open(&s, named("%s/%s", t->directory, pattern));
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

static int same(const int* a, const int* b, int n) { return memcmp(a, b, (size_t)n * sizeof(int)) == 0; }

// The largest token is found anywhere: at both ends, and at the ends of the pieces that threads read. Of equal ones the
// first is.
static void test_shards_scan(Tests* t) {
    enum { MOST = 70000 };
    static int tokens[MOST];
    for (int width = 2; width <= 4; width += 2) {
        const int piece = SCAN_PIECE / width, places[] = {0, piece - 1, piece, MOST - 1};
        const int large = width == 2 ? 65535 : -2;  // as unsigned numbers the largest but one
        for (size_t i = 0; i < COUNT_OF(places); i++) {
            TokenScan scan;
            tokens[places[i]] = tokens[MOST - 1] = large;
            free(put_tokens(t, "scan.bin", tokens, MOST, width));
            tokens[places[i]] = tokens[MOST - 1] = 0;
            Shards s = open_shards(t, "scan.bin");
            token_scan_read(&scan, &s.shard[0]);
            EXPECT_EQ(t, scan.largest, (uint32_t)large);
            EXPECT_EQ(t, scan.position, places[i]);
            shards_close(&s);
        }
    }
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

static void test_shards_refused(Tests* t) {
    static const FileChange changes[] = {
        {"as it is", 0, 0, 0, 0, NULL},
        {"half a header", 0, 0, 0, -21, "1023 bytes are too few"},
        {"no tokens", 8, 4, 0, -20, "contains no tokens"},
        {"half a token more", 0, 0, 0, 1, "damaged"},
        {"a count below 0", 8, 4, -1, 0, "gives 4294967295 tokens"},
        {"another version", 4, 4, 2, 0, "version 2"},
        {"another width", 0, 4, SHARD_MAGIC_UINT32, 0, "version 1, but only version 7"},
    };
    static const FileChange masked[] = {
        {"as it is", 0, 0, 0, 0, NULL},
        {"a byte is missing", 0, 0, 0, -1, "truncated"},
        {"an unknown kind", 16, 4, 2, 0, "has the mask 2"},
        {"negative rows", 20, 4, -5, 0, "row length -5"},
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
    char* path = put_masked_shard(t, "c.bin", starts[3], T + 1, 4, 0);
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
    // Another mask is other data.
    uint32_t before = shards_fingerprint(&s);
    Text file = file_text(path);
    file.text[file.length - 1] ^= 1;
    free(put_file(t, "c.bin", file.text, file.length));
    EXPECT(t, shards_fingerprint(&s) != before);
    batch_lm_free(&b), shards_close(&s);
    free(path), free(file.text);
}

// Every epoch has all windows, in an order of its own.
static void test_batch_shuffle(Tests* t) {
    enum { WINDOWS = 101, T = 3, EPOCHS = 3 };
    int first[EPOCHS * WINDOWS], seen[WINDOWS] = {0}, as_before = 0;
    BatchLm b;
    free(put_shard(t, "a.bin", 0, 51 * T, 2));  // all of one more window but its last target
    free(put_shard(t, "b.bin", 50 * T, 51 * T + 1, 2));
    Shards s = open_shards(t, "*.bin");
    batch_lm_init(&b, &s, 1, T, 1000, 42, SHUFFLED);
    for (int i = 0; i < EPOCHS * WINDOWS; i++) {
        int inputs[T], targets[T];
        batch_lm_read(&b, (uint64_t)i, inputs, targets, NULL);
        EXPECT_EQ(t, targets[T - 1], inputs[0] + T);
        EXPECT_EQ(t, seen[inputs[0] / T]++, i / WINDOWS);
        first[i] = inputs[0];
        as_before += first[i] == (i < WINDOWS ? i * T : first[i - WINDOWS]);
    }
    EXPECT(t, as_before < 30);
    batch_lm_free(&b), shards_close(&s);
}

// Documents are cut at their first token, 0, and at the end of a row.
static void test_documents(Tests* t) {
    enum { ROWS = 12 };
    static const int inputs[ROWS] = {0, 1, 2, 0, 0, 3, 4, 5, 6, 7, 8, 0};
    static const int document[ROWS] = {0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 3, 4}, cu_seqlens[] = {0, 3, 4, 6, 11, 12};
    static const int position[ROWS] = {0, 1, 2, 0, 0, 1, 0, 1, 2, 3, 4, 0};
    int ints[3 * ROWS + 1];
    Documents d;
    documents_place(&d, ints, ROWS);
    documents_find(&d, inputs, 2, ROWS / 2, 0);
    EXPECT(t, d.count == 5 && d.longest == 5 && d.sum_sq_len == 9 + 1 + 4 + 25 + 1);
    EXPECT(t,
           same(d.document, document, ROWS) && same(d.position, position, ROWS) && same(d.cu_seqlens, cu_seqlens, 6));
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

// A header and 9 bytes for its tensors.
static char* put_tensors(const Tests* t, const char* header) {
    Text file = {NULL, 0, 0};
    uint64_t n = strlen(header);
    text_append(&file, (const char*)&n, sizeof n);
    text_printf(&file, "%s?????????", header);
    char* path = put_file(t, "x.safetensors", file.text, file.length);
    free(file.text);
    return path;
}

// Written in pieces that need not end with tensors, read from any element on.
static void test_safetensors(Tests* t) {
    enum { N = 2 * SAFETENSORS_CHUNK + 7 };
    static const char odd[] = "a \"quoted\"\\name/\xc3\xbc\n";
    const uint64_t large[1] = {N}, none[3] = {4, 0, 5};
    real *x = (real*)xmalloc(N * sizeof(real)), *got = (real*)xmalloc(N * sizeof(real));
    char* path = path_in(t, "x.safetensors");
    for (int i = 0; i < N; i++) x[i] = (real)(i * 0.37 - 1000);
    SafeTensorsWriter w;
    safetensors_writer_create(&w, path);
    safetensors_writer_add(&w, odd, safetensors_real_dtype(), 1, large);
    safetensors_writer_add(&w, "empty", "F32", 3, none);
    safetensors_writer_begin(&w);
    safetensors_writer_append(&w, x, 1000);
    safetensors_writer_append(&w, (const char*)x + 1000, N * sizeof(real) - 1000);
    EXPECT(t, safetensors_writer_finish(&w) == 0);
    SafeTensors st;
    safetensors_open(&st, path);
    const SafeTensor* tensor = safetensors_find(&st, odd);
    EXPECT(t, st.count == 2 && tensor && safetensors_find(&st, "empty") && !safetensors_find(&st, "empt"));
    for (uint64_t from = 0; from <= 5 && tensor; from += 5) {
        safetensors_read_real(tensor, from, N - from, got);
        EXPECT(t, memcmp(x + from, got, (N - from) * sizeof(real)) == 0);
    }
    safetensors_close(&st);
    free(x), free(got), free(path);
}

// Numbers of every type that can be read, as bits.
static void test_safetensors_types(Tests* t) {
    static const struct {
        const char* dtype;
        uint64_t bits;
        double value;
    } cases[] = {{"F16", 0xC000, -2},
                 {"F16", 0x0001, 0x1p-24},
                 {"F16", 0xFC00, -INFINITY},
                 {"BF16", 0x7F80, INFINITY},
                 {"BF16", 0x4049, 3.140625},
                 {"F32", 0xC0200000, -2.5},
                 {"F64", 0xC004000000000000, -2.5}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        real got;
        safetensors_convert(&got, (const char*)&cases[i].bits, 1, cases[i].dtype);
        if ((double)got != (double)(real)cases[i].value) fail(t, "case %zu is %g", i, (double)got);
    }
}

static void test_safetensors_refused(Tests* t) {
    static const char good[] = "{\"__metadata__\":{\"a\":\"b\"},"
                               "\"x\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
                               "\"y\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[8,9]}}";
    static const TextChange changes[] = {
        {"}}", "}}   ", NULL},
        {"[8,9]", "[7,8]", "\"y\": begins at byte"},
        {"[8,9]", "[8,10]", "\"y\": bytes 8 to 10 are not inside"},
        {"F32", "F31", "dtype \"F31\""},
        {"[2,1]", "[4611686018427387904]", "do not fit its 8 bytes"},
        {"[2,1]", "[1,1,1,1,1,1,1,1,2]", "9 dimensions"},
        {"\"y\"", "\"x\"", "occurs twice"},
        {"\"b\"", "1", "__metadata__"},
        {"{", " {", "not a JSON object"},
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
    free(path), free(whole.text);
}

// ---------------------------------------------------------------------------------------------------------
// Sentences

enum { PAD, UNK, CLS, SEP, MASK, FIRST_TOKEN, MADE_V = 330000, MOST_DOCUMENTS = 600, MOST_SENTENCES = 40 };

// A data set whose tokens identify their place: token i of all files has the id FIRST_TOKEN + i.
static struct {
    int tokens, documents;
    int document[MADE_V], sentence[MADE_V];  // of each token
    int sentences[MOST_DOCUMENTS];           // of each document
} made;

static int made_random(int i, int of) { return (int)(philox((uint32_t)i, (uint32_t)of, 0, 0, 12345).v[0] >> 1); }
static int made_continues(int id) { return id >= FIRST_TOKEN && made_random(id, 1) % 3 == 0; }

// `files` files of `documents` documents each; every seventh document is one sentence. Returns their pattern, until the
// third call of named() from here.
static const char* make_sentences(Tests* t, int files, int documents) {
    static uint32_t continues[(MADE_V + 31) / 32], begin[MOST_DOCUMENTS * MOST_SENTENCES], first[MOST_DOCUMENTS + 1];
    static int tokens[MADE_V];
    memset(&made, 0, sizeof made), memset(continues, 0, sizeof continues);
    for (int id = 0; id < MADE_V; id++) continues[id / 32] |= (uint32_t)made_continues(id) << (id % 32);
    for (int f = 0, sentence = 0; f < files; f++) {
        SentencesHeader h = {0, 0, (uint32_t)documents, MADE_V, PAD, UNK, CLS, SEP, MASK, 0};
        for (int d = 0; d < documents; d++, made.documents++) {
            int sentences = made.documents % 7 ? 1 + made_random(made.documents, 2) % MOST_SENTENCES : 1;
            made.sentences[made.documents] = sentences, first[d] = h.sentences;
            for (int k = 0; k < sentences; k++) {
                begin[h.sentences++] = h.tokens;
                for (int left = 1 + made_random(sentence++, 3) % 50; left > 0; left--, made.tokens++) {
                    CHECK(made.tokens < MADE_V - FIRST_TOKEN);
                    made.document[made.tokens] = made.documents, made.sentence[made.tokens] = k;
                    tokens[h.tokens++] = FIRST_TOKEN + made.tokens;
                }
            }
        }
        begin[h.sentences] = h.tokens, first[documents] = h.sentences;
        CHECK(sentences_write(named("%s/s%d.bin", t->directory, f), h, tokens, begin, first, continues) == 0);
    }
    return named("%s/s*.bin", t->directory);
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

// The predictions at most, their share, whole words, next sentence, pack, short sequences: as published.
static MlmRecipe published_recipe(void) { return (MlmRecipe){20, 0.15, 0, 1, 0, 0.1}; }

static void open_pairs(const char* path) {
    MlmData data;
    mlm_open(&data, path, 128, published_recipe(), 0);
}

// Four tokens in sentences of three and one, which are two documents.
static void test_sentences_refused(Tests* t) {
    enum { TOKENS = SHARD_HEADER_BYTES, BEGIN = TOKENS + 8, FIRST = BEGIN + 12 };
    static const FileChange changes[] = {
        {"as it is", 0, 0, 0, 0, NULL},
        {"a token outside the vocabulary", TOKENS + 4, 2, 9, 0,
         "token 9 at position 2 is outside the file's vocabulary of 9"},
        {"sentences that go back", BEGIN + 4, 4, 5, 0, "are not in order"},
        {"a special token outside the vocabulary", 40, 4, 9, 0, "a special token the id 9"},
        {"no documents", 16, 4, 0, -8, "contains no documents"},
        {"another file", 0, 4, SENTENCES_MAGIC ^ 1, 0, "is not a file of sentences"},
    };
    static const int tokens[] = {5, 6, 7, 8};
    static const uint32_t begin[] = {0, 3, 4}, first[] = {0, 1, 2}, none = 0;
    SentencesHeader h = {4, 2, 2, 9, PAD, UNK, CLS, SEP, MASK, 0};
    char* path = path_in(t, "good.bin");
    EXPECT(t, sentences_write(path, h, tokens, begin, first, &none) == 0);
    Text good = file_text(path);
    expect_changes(t, &good, "sentences.bin", changes, COUNT_OF(changes), read_sentences);
    expect_any_damage(t, &good, "sentences.bin", 44, read_sentences);
    EXPECT(t, sentences_write("/dev/full", h, tokens, begin, first, &none) == -1 && errno == ENOSPC);
    make_sentences(t, 1, 1);
    free(path), path = path_in(t, "s0.bin");
    expect_end(t, USAGE, "sentences: pairs of one document", "contains one document", open_pairs, path);
    free(path), free(good.text);
}

// ---------------------------------------------------------------------------------------------------------
// Batches of masked sentences

typedef struct {
    int64_t tokens, masked, as_mask, as_random, from_lower_half, pairs, random_pairs;
} MlmShares;

// The rows of a segment have consecutive tokens of one document.
static int is_segment(const int* text, int begin, int end) {
    for (int i = begin; i < end; i++) {
        int at = text[i] - FIRST_TOKEN;
        if (at < 0 || at >= made.tokens || text[i] != text[begin] + i - begin) return 0;
        if (made.document[at] != made.document[text[begin] - FIRST_TOKEN]) return 0;
    }
    return end > begin;
}

// Check one sequence against the recipe. `text` is the batch without masks.
static void check_sequence(Tests* t, MlmShares* c, const MlmData* data, const MlmBatch* b, const int* text, int s) {
    int begin = b->cu_seqlens[s], end = b->cu_seqlens[s + 1], sep = begin;
    int next = data->recipe.next_sentence, label = b->next_targets[s];
    EXPECT(t, end - begin >= 3 + 2 * next && end - begin <= min_int(data->T, b->max_length));
    EXPECT(t, text[begin] == CLS && text[end - 1] == SEP);
    while (sep < end - 1 && text[sep] != SEP) sep++;
    EXPECT(t, next ? sep < end - 1 : sep == end - 1 && label == -1);
    EXPECT(t, is_segment(text, begin + 1, sep) && (!next || is_segment(text, sep + 1, end - 1)));
    for (int i = begin; i < end; i++)
        EXPECT(t, b->sequence[i] == s && b->position[i] == i - begin && b->types[i] == (i > sep));
    if (t->is_bad || !next) return;
    // The label is correct, and B follows A directly in a pair that was not cut.
    int a_last = text[sep - 1] - FIRST_TOKEN, b_first = text[sep + 1] - FIRST_TOKEN, document = made.document[a_last];
    EXPECT_EQ(t, label, made.document[b_first] != document);
    EXPECT(t, label || made.sentence[b_first] > made.sentence[text[begin + 1] - FIRST_TOKEN]);
    EXPECT(t, label || end - begin == data->T || data->order || b_first == a_last + 1);
    if (made.sentences[document] > 1) c->pairs++, c->random_pairs += label;
}

static void check_batch(Tests* t, MlmShares* c, const MlmData* data, const MlmBatch* b) {
    int* text = (int*)xmalloc((size_t)b->rows * sizeof(int));
    unsigned char* is_masked = (unsigned char*)xcalloc((size_t)b->rows, 1);
    memcpy(text, b->tokens, (size_t)b->rows * sizeof(int));
    for (int i = 0; i < b->masked; i++) {
        int row = b->masked_rows[i], token = b->tokens[row], is_random = token != MASK && token != b->targets[i];
        EXPECT(t, row >= 0 && row < b->rows && (i == 0 || row > b->masked_rows[i - 1]));
        EXPECT(t, b->targets[i] >= FIRST_TOKEN);  // not [CLS], not [SEP]
        text[row] = b->targets[i], is_masked[row] = 1;
        c->as_mask += token == MASK, c->as_random += is_random;
        c->from_lower_half += is_random && token < MADE_V / 2;
    }
    EXPECT_EQ(t, b->cu_seqlens[b->count], b->rows);
    for (int s = 0; s < b->count && !t->is_bad; s++) {
        int begin = b->cu_seqlens[s], end = b->cu_seqlens[s + 1], n = 0, cut = 0;
        for (int i = begin; i < end; i++) {
            n += is_masked[i];
            cut += i > begin && made_continues(text[i]) && is_masked[i] != is_masked[i - 1] && text[i - 1] > MASK;
        }
        EXPECT_EQ(t, n, min_int(max_int(1, (int)nearbyint(0.15 * (end - begin))), data->recipe.max_predictions));
        EXPECT(t, !data->recipe.whole_words || cut <= 1);  // one word may fill up the count
        check_sequence(t, c, data, b, text, s);
    }
    c->tokens += b->rows, c->masked += b->masked;
    free(text), free(is_masked);
}

static void expect_share(Tests* t, const char* what, int64_t got, int64_t of, double share) {
    double sigma = sqrt((double)of * share * (1 - share)), off = fabs((double)got - (double)of * share);
    if (!(off <= 3 * sigma))
        fail(t, "%s: %lld of %lld, %.1f sigma off", what, (long long)got, (long long)of, off / sigma);
}

// As published; whole words of single segments; whole words of pairs, packed.
static void test_mlm_recipes(Tests* t) {
    enum { B = 32, T = 128 };
    static const MlmRecipe recipes[] = {{20, 0.15, 0, 1, 0, 0.1}, {3, 0.15, 1, 0, 0, 1}, {20, 0.15, 1, 1, 3, 0.1}};
    const char* pattern = make_sentences(t, 2, MOST_DOCUMENTS / 2);
    for (size_t i = 0; i < COUNT_OF(recipes); i++) {
        MlmShares c = {0};
        MlmData data;
        MlmBatch b;
        mlm_open(&data, pattern, T, recipes[i], 42);
        mlm_batch_alloc(&b, B, T, recipes[i].max_predictions);
        for (uint64_t index = 0; c.tokens < 300000 && !t->is_bad; index += B) {
            mlm_batch_build(&b, &data, index, B);
            EXPECT_EQ(t, b.count, mlm_count(&data, index, B));
            check_batch(t, &c, &data, &b);
        }
        expect_share(t, "[MASK]", c.as_mask, c.masked, 0.8);
        expect_share(t, "random token", c.as_random, c.masked, 0.1);
        expect_share(t, "random token of the vocabulary's lower half", c.from_lower_half, c.as_random, 0.5);
        expect_share(t, "random next sentence", c.random_pairs, c.pairs, 0.5);
        mlm_batch_free(&b), mlm_close(&data);
    }
}

// Every epoch visits each row once, in an order and with masks of its own; another seed has another order. That batches
// are the same however they are cut is a row of dev/test/equal.txt.
static void test_mlm_stream(Tests* t) {
    const char* pattern = make_sentences(t, 2, 60);
    MlmRecipe r = published_recipe();
    MlmData data, other;
    MlmBatch b[2];
    mlm_open(&data, pattern, 96, r, 7), mlm_open(&other, pattern, 96, r, 8);
    uint64_t n = mlm_sequences(&data), as_before = 0, as_other = 0;
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
    mlm_batch_free(&b[0]), mlm_batch_free(&b[1]);
    free(seen), mlm_close(&data), mlm_close(&other);
}

// The fraction of masks falls linearly with the row, over all epochs, and then stays.
static void test_mlm_falling(Tests* t) {
    static const struct {
        uint64_t row;
        double fraction;
    } cases[] = {{0, 0.4}, {300, 0.3}, {600, 0.2}, {900, 0.1}, {2000, 0.1}};
    const char* pattern = make_sentences(t, 2, 60);
    MlmRecipe r = {.max_predictions = 38, .mask_fraction = 0.4, .last_mask_fraction = 0.1, .fall_rows = 900};
    MlmData data;
    MlmBatch b;
    mlm_open(&data, pattern, 96, r, 7);
    mlm_batch_alloc(&b, 1, 96, r.max_predictions);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        mlm_batch_build(&b, &data, cases[i].row, 1);
        EXPECT_EQ(t, b.masked, (int)nearbyint(cases[i].fraction * b.rows));
    }
    mlm_batch_free(&b), mlm_close(&data);
}

// ---------------------------------------------------------------------------------------------------------
// Reading ahead: two files of WINDOWS windows together, whose tokens count up from 1

enum { T = 6, B = 2, FIRST_FILE = 14, WINDOWS = 47, V = 1 + T * WINDOWS + 1 };

static void open_windows(LmData* data, const char* pattern, int shuffle, int ranks, Context* ctx) {
    context_init(ctx);
    lm_data_alloc(data, B, T, NO_CUTS, ctx);
    lm_data_open(data, pattern, pattern, V, 5, shuffle, ranks);
}

static char* put_windows(Tests* t) {
    free(put_shard(t, "a.bin", 1, T * FIRST_FILE + 1, 2));
    free(put_shard(t, "b.bin", 1 + T * FIRST_FILE, T * (WINDOWS - FIRST_FILE) + 1, 2));
    return path_in(t, "?.bin");
}

static void close_windows(LmData* data, Context* ctx) {
    lm_data_close(data);
    context_free(ctx);
}

static int is_window(const Batch* b, const BatchLm* from, uint64_t sequence) {
    int want[2 * B * T];
    batch_lm_read(from, sequence, want, want + B * T, NULL);
    return memcmp(b->inputs, want, B * T * sizeof(int)) == 0 &&
           memcmp(b->targets, want + B * T, B * T * sizeof(int)) == 0;
}

// Steps of several micro-batches, in order, after jumps and again, and validations in between: a rank has its share of
// each, as a plain reader reads it.
static void test_windows(Tests* t) {
    enum { MICRO_STEPS = 3 };
    char* pattern = put_windows(t);
    for (int ranks = 1; ranks <= 3; ranks++) {
        LmData data;
        Context ctx;
        uint64_t start = 0;
        open_windows(&data, pattern, ranks > 1 ? SHUFFLED : IN_ORDER, ranks, &ctx);
        for (uint32_t step = 0; step < 200; step++) {
            uint32_t draw = philox(step, 0, 0, 0, 77).v[0];
            if (draw % 7 == 0) start = draw >> 8;
            for (int i = 0; i < MICRO_STEPS; i++) {
                int first = (i * ranks + ranks - 1) * B;
                Batch b = lm_data_train(&data, start, first, &ctx);
                EXPECT(t, is_window(&b, &data.train, start + (uint64_t)first) && b.s.first == first && !b.s.parts);
            }
            if (draw % 5 == 0) {
                Batch b = lm_data_val(&data, draw >> 8, B, &ctx);
                EXPECT(t, is_window(&b, &data.val, draw >> 8));
            }
            if (draw % 11) start += (uint64_t)(B * ranks * MICRO_STEPS);
        }
        close_windows(&data, &ctx);
    }
    free(pattern);
}

static int same_batch(const MlmBatch* a, const MlmBatch* b) {
    return a->rows == b->rows && a->masked == b->masked && a->first == b->first &&
           same(a->tokens, b->tokens, a->rows) && same(a->masked_rows, b->masked_rows, a->masked) &&
           same(a->next_targets, b->next_targets, a->count);
}

// The same of masked sentences.
static void test_masked(Tests* t) {
    enum { MLM_T = 24, RANKS = 3, RANK = 1, MICRO_STEPS = 2, STEP = B * RANKS * MICRO_STEPS };
    static const uint64_t starts[] = {0, STEP, 2 * STEP, 2 * STEP, 5, 5 + STEP, 1000, 0};
    const MlmRecipe recipe = {4, 0.15, 0, 1, 2, 0.1};
    const char* pattern = make_sentences(t, 1, 20);
    MlmSource source = {0};
    MlmBatch plain;
    Context ctx;
    context_init(&ctx);
    mlm_source_alloc(&source, recipe, B, MLM_T, MICRO_STEPS, &ctx);
    mlm_source_open(&source, pattern, pattern, MADE_V, 11);
    mlm_batch_alloc(&plain, B, MLM_T, recipe.max_predictions);
    for (size_t step = 0; step < COUNT_OF(starts); step++) {
        mlm_source_build(&source, starts[step], B, MICRO_STEPS, RANK, RANKS);
        for (int i = 0; i < MICRO_STEPS; i++) {
            uint64_t before = (uint64_t)((i * RANKS + RANK) * B);
            mlm_batch_build(&plain, &source.train, starts[step] + before, B);
            plain.first = mlm_count(&source.train, starts[step], before);
            EXPECT(t, same_batch(&source.batches[i], &plain));
        }
    }
    mlm_batch_free(&plain), mlm_source_close(&source);
    context_free(&ctx);
}

int main(int argc, char** argv) {
    static const TestCase cases[] = {
        {"shards/refused", test_shards_refused},
        {"batch_lm/mask", test_batch_mask},
        {"batch_lm/shuffle", test_batch_shuffle},
        {"batch_lm/documents", test_documents},
        {"sentences/refused", test_sentences_refused},
        {"batch_mlm/recipes", test_mlm_recipes},
        {"batch_mlm/stream", test_mlm_stream},
        {"batch_mlm/falling", test_mlm_falling},
        {"safetensors/round_trip", test_safetensors},
        {"safetensors/types", test_safetensors_types},
        {"safetensors/refused", test_safetensors_refused},
        {"prefetch/windows", test_windows},
        {"prefetch/masked", test_masked},
        {"shards/scan", test_shards_scan},  // last: children of a process with threads seem to leak
    };
    return tests_main(argc, argv, cases, COUNT_OF(cases));
}
