/* Tests of reading llm.c's files: a checkpoint gives exactly the parameters and logits of the safetensors file that it
 * was made from, and invalid files end with exit status 2 and one line that names the file.
 *
 *     ./test_llmc_files [NAME]                checkpoints written here, one tensor after the other by its name
 *     ./test_llmc_files same DIR FILE.bin     whether FILE.bin has the weights and gives the logits of DIR, to the bit
 *     ./test_llmc_files rounded DIR FILE.bin  the same with DIR's weights rounded to bfloat16 first
 *     ./test_llmc_files tokens DIR FILE.bin   whether FILE.bin lists the tokens of DIR's tokenizer
 *
 * Prints a line per case and `N passed, N failed`; exit status 1 if one failed. */
#define NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // of the trainer, of which this needs a part
#include "dev/test/tests.h"
#include "train_gpt2.cu"

#include "dev/test/bench_gpt2.h"

// ---------------------------------------------------------------------------------------------------------
// Models

// `weights`: a file; NULL: random ones.
static Bench* bench_make(Config config, const char* weights) {
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    bench_open(b, config, 2, min_int(config.T, 24), 0, 7);  // another seed: weights that were not read would show
    if (weights) bench_load(b, weights);
    return b;
}

static void bench_free(Bench* b) {
    bench_close(b);
    free(b);
}

static Bench* bench_of_directory(const char* directory) {
    char *path = xprintf("%s/config.json", directory), *weights = xprintf("%s/model.safetensors", directory);
    Bench* b = bench_make(config_read(path), weights);
    free(path), free(weights);
    return b;
}

static Bench* bench_of_file(const char* file) {
    char *directory, *weights, *sizes = find_llmc_model(file, &directory, &weights);
    if (!sizes) die(FAILED, "%s: was not taken for a checkpoint of llm.c", file);
    Bench* b = bench_make(config_from_descriptor(sizes, 0), weights);
    free(directory), free(weights), free(sizes);
    return b;
}

static void bench_logits(Bench* b) {
    Model* m = &b->m;
    int* tokens = (int*)xmalloc(2 * (size_t)m->N * sizeof(int));
    for (int i = 0; i < 2 * m->N; i++) tokens[i] = (int)(philox((uint32_t)i, 0, 0, 0, 3).v[0] % (uint32_t)m->config.V);
    device_upload(&b->ctx, b->data.inputs, tokens, 2 * (size_t)m->N * sizeof(int));
    Batch batch = lm_data_batch(&b->data, m->B, 0);
    evaluate_batch(m, &batch, 1, SET, &b->ctx);
    free(tokens);
}

static real bfloat16(real x) {
    float single = (float)x;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    uint32_t low = bits & 0xFFFF, up = low > 0x8000 || (low == 0x8000 && bits >> 16 & 1);
    bits = ((bits >> 16) + up) << 16;
    memcpy(&single, &bits, sizeof single);
    return (real)single;
}

static void bench_round(Bench* b) {
    for (size_t i = 0; i < b->m.buffers.table.elements; i++) b->m.buffers.params[i] = bfloat16(b->m.buffers.params[i]);
}

static int same_bits(const void* a, const void* b, size_t n) { return memcmp(a, b, n * sizeof(real)) == 0; }

static void expect_same(Tests* t, Bench* a, Bench* b, const char* name) {
    size_t n = a->m.buffers.table.elements, logits = (size_t)a->m.N * (size_t)a->m.Vp;
    case_begin(t, name);
    EXPECT(t, n == b->m.buffers.table.elements && a->m.N == b->m.N);
    if (!t->is_bad) bench_logits(a), bench_logits(b);
    EXPECT(t, !t->is_bad && same_bits(a->m.buffers.params, b->m.buffers.params, n));
    EXPECT(t, !t->is_bad && same_bits(a->m.a.logits, b->m.a.logits, logits) && a->m.a.logits[0] != a->m.a.logits[1]);
    case_end(t);
}

// ---------------------------------------------------------------------------------------------------------
// Files written here

static void put_values(Text* out, const real* values, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float x = (float)values[i];
        text_append(out, (const char*)&x, sizeof x);
    }
}

static const real* values_of(const Bench* b, const char* name) {
    for (int i = 0; i < b->m.buffers.table.count; i++)
        if (strcmp(b->m.buffers.table.tensors[i].name, name) == 0)
            return b->m.buffers.params + b->m.buffers.table.tensors[i].offset;
    die(FAILED, "no tensor %s", name);
}

// The model of `b` as a checkpoint of llm.c, with other padding than the model has in memory, and values in it.
static Text checkpoint_of(const Bench* b) {
    enum { PADDED = 128 };
    static const struct {
        const char* name;
        int rows, columns;  // in channels; 0: a vector
    } blocks[] = {{"ln_1.weight", 1, 0},      {"ln_1.bias", 1, 0},          {"attn.c_attn.weight", 3, 1},
                  {"attn.c_attn.bias", 3, 0}, {"attn.c_proj.weight", 1, 1}, {"attn.c_proj.bias", 1, 0},
                  {"ln_2.weight", 1, 0},      {"ln_2.bias", 1, 0},          {"mlp.c_fc.weight", 4, 1},
                  {"mlp.c_fc.bias", 4, 0},    {"mlp.c_proj.weight", 4, 1},  {"mlp.c_proj.bias", 1, 0}};
    const Config* c = &b->m.config;
    const size_t C = (size_t)c->C;
    const real five = 5;
    int32_t header[256] = {20240326, 3, c->T, c->V, c->L, c->NH, c->C, PADDED};
    Text out = {NULL, 0, 0};
    text_append(&out, (const char*)header, sizeof header);
    put_values(&out, values_of(b, "transformer.wte.weight"), (size_t)c->V * C);
    for (size_t i = 0; i < (size_t)(PADDED - c->V) * C; i++) put_values(&out, &five, 1);
    put_values(&out, values_of(b, "transformer.wpe.weight"), (size_t)c->T * C);
    for (size_t k = 0; k < COUNT_OF(blocks); k++) {
        for (int l = 0; l < c->L; l++) {
            char* name = xprintf("transformer.h.%d.%s", l, blocks[k].name);
            put_values(&out, values_of(b, name), (size_t)blocks[k].rows * C * (blocks[k].columns ? C : 1));
            free(name);
        }
    }
    put_values(&out, values_of(b, "transformer.ln_f.weight"), C);
    put_values(&out, values_of(b, "transformer.ln_f.bias"), C);
    return out;
}

static void open_weights(const char* file) {
    char *directory, *weights;
    char* sizes = find_llmc_model(file, &directory, &weights);
    if (!sizes) die(FAILED, "%s: was not taken for a checkpoint of llm.c", file);
    free(directory), free(weights), free(sizes);
}

// With the table of another model, of this head, layers and channels.
static const char* loaded_as;
static void load_other(const char* file) {
    char* descriptor = xprintf("NH=3,V=107,T=19,%s", loaded_as);
    bench_free(bench_make(config_from_descriptor(descriptor, 0), file));
}

// ---------------------------------------------------------------------------------------------------------
// Checkpoints

static const char GOLDEN[] = "dev/reference/golden_gpt2_tied";

// Ranks that share the full-precision copy read only their part. llmc_files.sh compares whole files, and logits.
static void test_range(Tests* t) {
    Bench* whole = bench_of_directory(GOLDEN);
    const TensorTable* table = &whole->m.buffers.table;
    Text bytes = checkpoint_of(whole);
    char* file = put_file(t, "model.bin", bytes.text, bytes.length);
    real* part = (real*)xmalloc(table->elements * sizeof(real));
    int good = 1;
    for (size_t size = 128; size < table->elements; size *= 3) {
        FlatRange range = {size, min_size(size, table->elements - size)};
        TensorPart of_range = {"", part, VIEW_REAL};
        tensors_read_range(file, table, &of_range, 1, range, NULL, NULL, &whole->ctx);
        good = good && same_bits(part, whole->m.buffers.params + range.begin, range.size);
    }
    expect(t, good, "parts of a checkpoint", "they are not the same bits");
    free(part), free(file), free(bytes.text);
    bench_free(whole);
}

static void test_weights_refused(Tests* t) {
    static const FileChange changes[] = {
        {"as it is", 0, 0, 0, 0, NULL},
        {"another magic number", 0, 4, 20240520, 0, "magic number is 20240520, not 20240326"},
        {"version 4", 4, 4, 4, 0, "version 4; 3 (float32) and 5 (bfloat16)"},
        {"version 5 with the bytes of 3", 4, 4, 5, 0, "longer than its header says"},
        {"no positions", 8, 4, 0, 0, "0 positions; allowed: 1.."},
        {"fewer tokens than none", 12, 4, -1, 0, "-1 tokens; allowed: 1.."},
        {"too many layers", 16, 4, 1 << 25, 0, "33554432 layers; allowed: 1..16777216"},
        {"more layers than there are", 16, 4, 3, 0, "truncated, or its header is damaged"},
        {"sizes whose product overflows", 24, 4, 15 << 19, 0, "truncated, or its header is damaged"},
        {"heads that do not fit", 20, 4, 2, 0, "15 channels, which cannot be divided into 2 heads"},
        {"no padding, as in old versions", 28, 4, 0, 0, "0 tokens with padding; allowed: 1.."},
        {"less padding than tokens", 28, 4, 106, 0, "107 tokens, but 106 with padding"},
        {"without its last byte", 0, 0, 0, -1, "truncated"},
        {"a byte after its end", 0, 0, 0, 1, "longer than its header says"},
    };
    static const char* const models[][2] = {
        {"L=2,C=15,tied=0", "\"lm_head.weight\" is missing"},
        {"L=1,C=15", "holds 28 tensors, of which this model has 16"},
        {"L=3,C=15", "\"transformer.h.2.ln_1.weight\" is missing"},
        {"L=2,C=24", "\"transformer.wte.weight\": its shape is not the [107, 24]"},
    };
    Bench* whole = bench_of_directory(GOLDEN);
    Text bytes = checkpoint_of(whole);
    expect_changes(t, &bytes, "weights.bin", changes, COUNT_OF(changes), open_weights);
    expect_any_damage(t, &bytes, "weights.bin", 32, open_weights);
    char* file = put_file(t, "weights.bin", bytes.text, bytes.length);
    for (size_t i = 0; i < COUNT_OF(models); i++) {
        loaded_as = models[i][0];
        expect_end(t, USAGE, models[i][0], models[i][1], load_other, file);
    }
    free(put_file(t, "weights.bin", bytes.text, 1023));
    expect_end(t, USAGE, "a checkpoint without its header", "too few for the header", open_weights, file);
    unlink(file);
    expect_end(t, USAGE, "no checkpoint", "No such file", open_weights, file);
    free(file), free(bytes.text);
    bench_free(whole);
}

// ---------------------------------------------------------------------------------------------------------
// Tokens

// A list of tokens after a header.
static Text tokens_of(uint32_t count, const char* bytes, size_t n) {
    uint32_t header[256] = {20240328, 2, count, 0};
    Text out = {NULL, 0, 0};
    text_append(&out, (const char*)header, sizeof header);
    text_append(&out, bytes, n);
    return out;
}

static void open_tokens(const char* file) {
    Tokenizer k;
    char* directory = directory_of(file);
    if (tokenizer_open(&k, directory) != 0) die(FAILED, "%s: no tokenizer", file);
    tokenizer_free(&k);
    free(directory);
}

static int is_token(const Tokenizer* k, int id, const char* bytes, size_t n) {
    size_t length;
    const char* got = tokenizer_decode(k, id, &length);
    return got && length == n && memcmp(got, bytes, n) == 0;
}

static void test_tokens(Tests* t) {
    static const char list[] = "\1a\2\0\xff\15<|endoftext|>\3 is";
    enum { LIST = sizeof list - 1 };
    static const FileChange changes[] = {
        {"as it is", 0, 0, 0, 0, NULL},
        {"another magic number", 0, 4, 0, 0, "magic number is 0, not 20240328"},
        {"version 3", 4, 4, 3, 0, "version 3; 2 is"},
        {"none", 8, 4, 0, 0, "0 tokens, allowed: 1.."},
        {"too many", 8, 4, 1u << 31, 0, "2147483648 tokens, allowed"},
        {"more than there are bytes", 8, 4, 4000000, 0, "only 23 bytes follow"},
        {"one more than there are", 8, 4, 5, 0, "ends inside token 4 of 5"},
        {"one less", 8, 4, 3, 0, "4 bytes follow its last token"},
        {"an end of text that is none", 12, 4, 4, 0, "token 4 as the end of text"},
        {"truncated", 0, 0, 0, -1, "ends inside token 3 of 4"},
        {"an empty one", 1024 + 2, 1, 0, 0, "token 1 is empty"},
        {"no header", 0, 0, 0, -(LIST + 1), "too few for the header"},
    };
    // Its end of text is the token that the header names.
    Text good = tokens_of(4, list, LIST);
    Tokenizer k;
    free(put_file(t, "gpt2_tokenizer.bin", good.text, good.length));
    case_begin(t, "a list of tokens");
    EXPECT_EQ(t, tokenizer_open(&k, t->directory), 0);
    EXPECT(t, k.size == 4 && tokenizer_end_of_text(&k) == 0 && !is_token(&k, 4, "", 0));
    EXPECT(t, is_token(&k, 0, "a", 1) && is_token(&k, 1, "\0\xff", 2) && is_token(&k, 3, " is", 3));
    case_end(t);
    tokenizer_free(&k);
    expect_changes(t, &good, "gpt2_tokenizer.bin", changes, COUNT_OF(changes), open_tokens);
    free(good.text);
}

// ---------------------------------------------------------------------------------------------------------

static void compare_tokens(Tests* t, const char* directory, const char* file) {
    Tokenizer a, b;
    memset(&b, 0, sizeof b);
    b.end_of_text = -1;
    if (tokenizer_open(&a, directory) != 0) die(USAGE, "%s: holds no tokenizer", directory);
    tokenizer_add_list(&b, file);
    int good = a.size == b.size && a.end_of_text == b.end_of_text;
    for (int i = 0; i < a.size && good; i++) {
        size_t n;
        const char* bytes = tokenizer_decode(&a, i, &n);
        good = bytes && is_token(&b, i, bytes, n);
    }
    expect(t, good, "the same tokens", "they are others");
    tokenizer_free(&a), tokenizer_free(&b);
}

int main(int argc, char** argv) {
    Tests t;
    tests_choose(&t, argc, argv);
    device_set_threads(1);  // OpenMP's threads do not outlive a fork
    int is_rounded = argc == 4 && strcmp(argv[1], "rounded") == 0;
    if (argc == 4 && strcmp(argv[1], "tokens") == 0) {
        compare_tokens(&t, argv[2], argv[3]);
    } else if (is_rounded || (argc == 4 && strcmp(argv[1], "same") == 0)) {
        Bench *directory = bench_of_directory(argv[2]), *file = bench_of_file(argv[3]);
        if (is_rounded) bench_round(directory);
        expect_same(&t, directory, file, argv[3]);
        bench_free(directory), bench_free(file);
    } else if (argc <= 2) {
        t.directory = make_scratch_directory("test_llmc_files");
        test_range(&t);
        test_weights_refused(&t);
        test_tokens(&t);
    } else {
        die(USAGE, "usage: test_llmc_files [same|rounded|tokens DIR FILE.bin]");
    }
    return tests_close(&t);
}
