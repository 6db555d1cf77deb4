/* Cases of embedding: with and without token types, repeated tokens, dropout, the modes of the two kinds of table. */
#ifndef DEV_OPS_EMBEDDING_H
#define DEV_OPS_EMBEDDING_H

#include "harness.h"
#include "llmc/ops/embedding/embedding.h"

typedef struct {
    Array x, word, position, type;      // forward
    Array dx, dword, dposition, dtype;  // backward
    int *tokens, *types;
    Sequences s;
    EmbeddingSizes sizes;
    Dropout dropout;
    Mode word_mode, mode;
    Context* ctx;
} EmbeddingCase;

static EmbeddingInputs embedding_inputs(const EmbeddingCase* e) {
    EmbeddingInputs in = {.tokens = e->tokens, .types = e->types, .s = &e->s};
    return in;
}

static Dropout embedding_dropout(const EmbeddingCase* e) {
    Dropout dropout = e->dropout;
    dropout.sequences = &e->s;
    return dropout;
}

static void embedding_run_forward(void* state) {
    EmbeddingCase* e = (EmbeddingCase*)state;
    Embeddings tables = {e->word.device, e->position.device, e->sizes.types ? e->type.device : NULL};
    embedding_forward(e->x.device, embedding_inputs(e), tables, e->sizes, embedding_dropout(e), e->ctx);
}

static void embedding_run_backward(void* state) {
    EmbeddingCase* e = (EmbeddingCase*)state;
    EmbeddingGrads d = {e->dword.device_real, e->dposition.device_real, e->sizes.types ? e->dtype.device_real : NULL};
    Dropout dropout = embedding_dropout(e);
    embedding_backward(d, e->dx.device, embedding_inputs(e), e->sizes, dropout, e->word_mode, e->mode, e->ctx);
}

// Call after case_begin(). Without token types, `types` in sizes is 0.
static EmbeddingCase embedding_case(Harness* h, const int* lengths, int count, EmbeddingSizes sizes, double p,
                                    Mode word_mode, Mode mode) {
    EmbeddingCase e;
    e.s = sequences_of(h, lengths, count, 11);
    e.sizes = sizes;
    e.dropout = dropout_make(p, 42, 7, 0, SITE_DROPOUT_EMBEDDING, NULL);
    e.word_mode = word_mode;
    e.mode = mode;
    e.ctx = &h->ctx;
    size_t N = (size_t)e.s.rows, C = (size_t)sizes.C;
    e.tokens = int_array(h, N);
    e.types = sizes.types ? int_array(h, N) : NULL;
    for (size_t n = 0; n < N; n++) {
        e.tokens[n] = random_below(h, sizes.V);
        if (e.types) e.types[n] = random_below(h, sizes.types);
    }
    e.x = output(h, N * C, SET);
    e.word = input(h, (size_t)sizes.V * C, 1.0);
    e.position = input(h, (size_t)sizes.T * C, 1.0);
    e.type = input(h, (size_t)sizes.types * C, 1.0);
    e.dx = input(h, N * C, 1.0);
    e.dword = output(h, (size_t)sizes.V * C, word_mode);
    e.dposition = output(h, (size_t)sizes.T * C, mode);
    e.dtype = output(h, (size_t)sizes.types * C, mode);
    return e;
}

static void embedding_forward_reference(const EmbeddingCase* e, real* x) {
    EmbeddingInputs in = {e->tokens, e->types, &e->s};
    EmbeddingRefTables tables = {e->word.host, e->position.host, e->sizes.types ? e->type.host : NULL};
    embedding_forward_ref(x, in, tables, e->sizes.C, embedding_dropout(e));
}

static void embedding_backward_reference(const EmbeddingCase* e, real* dword, real* dposition, real* dtype) {
    int C = e->sizes.C;
    int padding = e->sizes.padding;
    EmbeddingRefIndex word = {e->tokens, e->sizes.V, padding}, position = {e->s.position, e->sizes.T, -1};
    EmbeddingRefIndex type = {e->types, e->sizes.types, -1};
    embedding_backward_ref(dword, e->dx.host, word, &e->s, C, embedding_dropout(e), e->word_mode);
    embedding_backward_ref(dposition, e->dx.host, position, &e->s, C, embedding_dropout(e), e->mode);
    if (e->types) embedding_backward_ref(dtype, e->dx.host, type, &e->s, C, embedding_dropout(e), e->mode);
}

// What the gradients of the tables are relative to, the sums of absolute values.
static void embedding_magnitudes(EmbeddingCase* e, real* dword, real* dposition, real* dtype) {
    const Array dx = e->dx;
    real* const sums[] = {dword, dposition, dtype};
    const size_t sizes[] = {e->dword.n, e->dposition.n, e->dtype.n};
    real* sizes_of_dx = (real*)xmalloc(max_size(dx.n, 1) * sizeof(real));
    for (size_t i = 0; i < dx.n; i++) sizes_of_dx[i] = (real)fabs((double)dx.host[i]);
    for (size_t k = 0; k < COUNT_OF(sums); k++)
        for (size_t i = 0; i < sizes[k]; i++) sums[k][i] = (real)fabs((double)sums[k][i]);
    e->dx.host = sizes_of_dx;
    embedding_backward_reference(e, dword, dposition, dtype);
    e->dx = dx;
    free(sizes_of_dx);
}

// A sum of three numbers rounds twice. A row of a gradient table adds up to 16,000 numbers near 1, with as many
// roundings of partial sums near 100. The error is less than 1e-7 of the sum of absolute values. For few numbers it is
// a few roundings.
static void embedding_check(Harness* h, EmbeddingCase* e) {
    real* x = copy_of(h, e->x);
    real* dword = copy_of(h, e->dword);
    real* dposition = copy_of(h, e->dposition);
    real* dtype = copy_of(h, e->dtype);
    real *words = copy_of(h, e->dword), *positions = copy_of(h, e->dposition), *types = copy_of(h, e->dtype);
    Array d[3] = {e->dword, e->dposition, e->dtype};
    embedding_forward_reference(e, x);
    embedding_magnitudes(e, words, positions, types);
    embedding_backward_reference(e, dword, dposition, dtype);
    expect_same_for_any_threads(h, "forward", embedding_run_forward, e, &e->x, 1);
    expect_close(h, "x", e->x, x, tolerance(3e-7));
    expect_same_for_any_threads(h, "backward", embedding_run_backward, e, d, 3);
    expect_close_to_sum(h, "dword", e->dword, dword, words, tolerance(1e-6));
    expect_close_to_sum(h, "dposition", e->dposition, dposition, positions, tolerance(1e-6));
    expect_close_to_sum(h, "dtype", e->dtype, dtype, types, tolerance(1e-6));
}

// How the tokens of a case lie: the rows of equal ones are added up, in one chunk of the sorted list or in many.
typedef enum { TOKENS_RANDOM, TOKENS_EQUAL, TOKENS_DIFFERENT, TOKENS_FREQUENT } TokenKind;

static void embedding_set_tokens(Harness* h, EmbeddingCase* e, TokenKind kind) {
    int V = e->sizes.V;
    for (int n = 0; n < e->s.rows; n++) {
        if (kind == TOKENS_EQUAL) e->tokens[n] = V - 1;
        if (kind == TOKENS_EQUAL && e->types) e->types[n] = 0;
        if (kind == TOKENS_DIFFERENT) e->tokens[n] = (int)((int64_t)n * 7919 % V);  // a prime that divides no V
        if (kind == TOKENS_FREQUENT && random_below(h, 2))  // two that are equal in their low bytes
            e->tokens[n] = min_int(random_below(h, 8) ? 257 : 65793, V - 1);
    }
}

// The backward pass's lists: up to as many rows as are sorted in one launch, and more; token numbers of one to three
// bytes; words, positions and types in one chunk of rows and in many, a table's rows that are skipped or not reached.
static void test_embedding_lists(Harness* h) {
    static const struct {
        int sequences, shortest, longest, V, C, types, padding;
        TokenKind tokens;
        Mode word_mode, mode;
    } cases[] = {
        {1, 1, 1, 257, 8, 2, -1, TOKENS_RANDOM, ADD, SET},
        {3, 1, 4, 257, 33, 1, 0, TOKENS_RANDOM, SET, ADD},
        {3, 1, 4, 257, 264, 8, -1, TOKENS_EQUAL, SET, SET},
        {4, 128, 128, 30522, 40, 2, 0, TOKENS_RANDOM, ADD, ADD},
        {4, 128, 128, 30522, 40, 2, 257, TOKENS_FREQUENT, ADD, SET},
        {4, 128, 128, 30522, 40, 0, -1, TOKENS_DIFFERENT, ADD, ADD},
        {4, 128, 128, 257, 264, 2, 256, TOKENS_EQUAL, SET, SET},
        {100, 1, 23, 30522, 33, 2, -1, TOKENS_FREQUENT, ADD, SET},
        {70, 10, 15, 257, 776, 9, -1, TOKENS_RANDOM, SET, SET},
        {70, 10, 15, 257, 40, 1000, 3, TOKENS_RANDOM, ADD, ADD},
        {2, 2048, 2048, 50257, 24, 2, 7, TOKENS_FREQUENT, SET, ADD},
        {2, 2048, 2048, 50257, 24, 0, -1, TOKENS_EQUAL, ADD, SET},
        {1, 4097, 4097, 257, 24, 2, -1, TOKENS_RANDOM, ADD, SET},
        {1, 4097, 4097, 50257, 24, 3, -1, TOKENS_DIFFERENT, ADD, ADD},
        {300, 1, 60, 50257, 24, 2, 50256, TOKENS_RANDOM, ADD, SET},
        {300, 1, 60, 30522, 24, 40, -1, TOKENS_EQUAL, SET, ADD},
        {300, 40, 60, 30522, 24, 8, 257, TOKENS_FREQUENT, ADD, SET},
        {150, 40, 60, 70000, 24, 0, -1, TOKENS_FREQUENT, ADD, ADD},
        {150, 40, 60, 70000, 24, 3, 257, TOKENS_FREQUENT, ADD, SET},
        // the channels of models that are trained
        {1, 1024, 1024, 257, 768, 0, -1, TOKENS_FREQUENT, ADD, ADD},
        {5, 17, 77, 300, 1024, 2, 0, TOKENS_FREQUENT, ADD, SET},
        {3, 1, 77, 300, 1600, 2, -1, TOKENS_RANDOM, SET, ADD},
        {20, 17, 77, 300, 1600, 0, -1, TOKENS_FREQUENT, ADD, SET},
    };
    for (size_t i = 0; i < 2 * COUNT_OF(cases); i++) {
        int lengths[300], count = cases[i / 2].sequences, shortest = cases[i / 2].shortest, N = 0, longest = 0;
        double p = i % 2 ? 0.3 : 0;
        for (int k = 0; k < count; k++) {
            lengths[k] = shortest + k * 37 % (cases[i / 2].longest - shortest + 1);
            longest = max_int(longest, lengths[k]);
            N += lengths[k];
        }
        EmbeddingSizes sizes = {cases[i / 2].V, longest + 3, cases[i / 2].types, cases[i / 2].C, cases[i / 2].padding};
        case_begin(h, "embedding/lists N=%d of %d V=%d C=%d types=%d padding=%d tokens %d p=%g %s %s", N, count,
                   sizes.V, sizes.C, sizes.types, sizes.padding, cases[i / 2].tokens, p,
                   mode_name(cases[i / 2].word_mode), mode_name(cases[i / 2].mode));
        EmbeddingCase e = embedding_case(h, lengths, count, sizes, p, cases[i / 2].word_mode, cases[i / 2].mode);
        embedding_set_tokens(h, &e, cases[i / 2].tokens);
        embedding_check(h, &e);
        case_end(h);
    }
}

// More tokens than the position table has rows, fewer than the word table; all of a table is written where it is SET.
static void test_embedding_bytes(Harness* h, Mode word_mode, Mode mode) {
    static const int lengths[] = {4, 4, 2};
    const EmbeddingSizes sizes = {19, 5, 2, 48, -1};
    const double C = 48, words = word_mode == ADD ? 2 * 10 : 19, others = mode == ADD ? 2 * (5 + 2) : 5 + 2;
    case_begin(h, "embedding/bytes %s %s", mode_name(word_mode), mode_name(mode));
    EmbeddingCase e = embedding_case(h, lengths, COUNT_OF(lengths), sizes, 0, word_mode, mode);
    expect_bytes(h, "embedding_forward", embedding_run_forward, &e, (10 + 5 + 2 + 10) * C * sizeof(floatX));
    expect_bytes(h, "embedding_backward", embedding_run_backward, &e,
                 10 * C * sizeof(floatX) + (words + others) * C * sizeof(real));
    case_end(h);
}

static const int EMBEDDING_LENGTHS[][3] = {{1, 0, 0}, {17, 1, 77}, {30, 30, 30}};

// The first two variants have no dropout, the first four are all.
static void test_embedding_both(Harness* h, int variants) {
    static const int widths[] = {1, 33, 48, 768, 1024, 1600};
    for (size_t i = 0; i < COUNT_OF(EMBEDDING_LENGTHS); i++)
        for (size_t j = 0; j < COUNT_OF(widths); j++)
            for (int variant = 0; variant < variants; variant++) {
                const int* lengths = EMBEDDING_LENGTHS[i];
                EmbeddingSizes sizes = {19, 80, variant % 2 ? 2 : 0, widths[j], variant == 3 ? 0 : -1};
                double p = variant < 2 ? 0 : 0.3;
                Mode word_mode = variant == 1 || variant == 2 ? ADD : SET, mode = variant < 2 ? SET : ADD;
                case_begin(h, "embedding/both T=%d,%d,%d C=%d types=%d p=%g %s %s", lengths[0], lengths[1], lengths[2],
                           widths[j], sizes.types, p, mode_name(word_mode), mode_name(mode));
                EmbeddingCase e = embedding_case(h, lengths, lengths[1] ? 3 : 1, sizes, p, word_mode, mode);
                embedding_check(h, &e);
                case_end(h);
            }
}

static void test_embedding(Harness* h) {
    test_embedding_both(h, 4);
    test_embedding_lists(h);
    for (int k = 0; k < 4; k++) test_embedding_bytes(h, k % 2 ? ADD : SET, k / 2 ? ADD : SET);
}

static double embedding_loss_of(const EmbeddingCase* e) {
    double loss = 0;
    for (size_t i = 0; i < e->x.n; i++) loss += (double)e->dx.host[i] * (double)e->x.host[i];
    return loss;
}

static double embedding_loss(void* state) {
    embedding_run_forward(state);
    return embedding_loss_of((EmbeddingCase*)state);
}

static double embedding_loss_ref(void* state) {
    EmbeddingCase* e = (EmbeddingCase*)state;
    embedding_forward_reference(e, e->x.host);
    return embedding_loss_of(e);
}

static void grad_embedding(Harness* h) {
    static const int lengths[] = {5, 1, 3};
    static const EmbeddingSizes sizes = {7, 6, 2, 5, -1};
    case_begin(h, "embedding/grad V=7 T=6 types=2 C=5 p=0.25");
    EmbeddingCase e = embedding_case(h, lengths, 3, sizes, 0.25, SET, SET);
    real* dword = copy_of(h, e.dword);
    real* dposition = copy_of(h, e.dposition);
    real* dtype = copy_of(h, e.dtype);
    embedding_backward_reference(&e, dword, dposition, dtype);
    expect_gradient(h, "dword of the reference", embedding_loss_ref, &e, e.word.host, e.word.n, dword, 1e-8);
    expect_gradient(h, "dposition of the reference", embedding_loss_ref, &e, e.position.host, e.position.n, dposition,
                    1e-8);
    expect_gradient(h, "dtype of the reference", embedding_loss_ref, &e, e.type.host, e.type.n, dtype, 1e-8);
    embedding_run_backward(&e);
    expect_gradient(h, "dword", embedding_loss, &e, e.word.host, e.word.n, e.dword.host, 1e-8);
    expect_gradient(h, "dposition", embedding_loss, &e, e.position.host, e.position.n, e.dposition.host, 1e-8);
    expect_gradient(h, "dtype", embedding_loss, &e, e.type.host, e.type.n, e.dtype.host, 1e-8);
    case_end(h);
}

static void bench_embedding(Harness* h) {
    static const EmbeddingSizes SIZES[] = {
        {50257, 1024, 0, 768, -1}, {30528, 512, 2, 1024, 0}, {30528, 512, 2, 1024, 0}};
    static const int LENGTHS[] = {1024, 128, 128}, COUNTS[] = {64, 256, 4};
    for (int k = 0; k < 2 * (int)COUNT_OF(SIZES); k++) {
        EmbeddingSizes sizes = SIZES[k / 2];
        int lengths[256], C = sizes.C, T = HAS_DEVICE_MEMORY ? LENGTHS[k / 2] : 64, N = 0;
        int count = HAS_DEVICE_MEMORY ? COUNTS[k / 2] : 4;
        double p = k % 2 ? 0.1 : 0;
        for (int i = 0; i < count; i++) N += lengths[i] = T;
        case_begin(h, "embedding bench");
        EmbeddingCase e = embedding_case(h, lengths, count, sizes, p, ADD, ADD);
        char shapes[64];
        snprintf(shapes, sizeof shapes, "N=%d C=%d p=%g", N, C, p);
        // As in text: token k is drawn with a probability of about 1 / k.
        for (int n = 0; n < N; n++)
            e.tokens[n] = (int)exp(log((double)sizes.V) * ((double)random_below(h, 1 << 30) + 0.5) / (1 << 30)) - 1;
        e.tokens = resident_ints(h, e.tokens, (size_t)N);
        if (e.types) e.types = resident_ints(h, e.types, (size_t)N);
        e.s = resident_sequences(h, e.s);
        double seconds = bench_seconds(h, embedding_run_forward, &e);
        bench_report(h, "embedding_forward", shapes, seconds, EMBEDDING_FORWARD_FLOPS(N, C),
                     EMBEDDING_FORWARD_BYTES(N, sizes));
        seconds = bench_seconds(h, embedding_run_backward, &e);
        bench_report(h, "embedding_backward", shapes, seconds, EMBEDDING_BACKWARD_FLOPS(N, C),
                     EMBEDDING_BACKWARD_BYTES(N, sizes, ADD, ADD));
        case_free(h);
    }
}

#endif
