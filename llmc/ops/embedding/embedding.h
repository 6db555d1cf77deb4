/* Embeddings: the sum of a word, a position and, in BERT, a token-type vector.
 *
 *   forward              x[n] = keep[n] * (word[tokens[n]] + position[s->position[n]] + type[types[n]])
 *   backward             dword[tokens[n]] += keep[n] * dx[n],   and likewise dposition and dtype
 *
 * The padding token (sizes.padding) gets no gradient in the word table.
 *
 * Shapes: x, dx [N, C] with N = s->rows; word [V, C]; position [T, C]; type [types, C], or NULL if the model has none;
 * tokens, types [N]. keep is dropout's factor per channel, 0 or 1 / (1 - p), applied to the sum.
 * Indices are not checked here: they were checked when the batch was built.
 * Modes: SET zeroes the whole table first. The word table has its own mode, because a tied head writes to its gradient
 * first.
 * Numerics: sums are in real. The CPU adds rows in order. The GPU adds the rows of each chunk, then the chunks, whose
 * size depends only on the shapes.
 * Source: Vaswani et al., arXiv 1706.03762; token types: Devlin et al., arXiv 1810.04805. */
#ifndef LLMC_OPS_EMBEDDING_EMBEDDING_H
#define LLMC_OPS_EMBEDDING_EMBEDDING_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/dropout_mask.h"

// The tables.
typedef struct {
    floatX *word, *position, *type;
} Embeddings;

// The gradients of the tables, of the same shapes.
typedef struct {
    real *word, *position, *type;
} EmbeddingGrads;

// Rows of the tables, padding included: what SET zeroes.
typedef struct {
    int V, T, types, C;
    int padding;  // the padding token, whose word vector gets no gradient; -1: none
} EmbeddingSizes;

// What selects the rows of the tables.
typedef struct {
    const int *tokens, *types;  // [N]; types NULL if the model has none
    const Sequences* s;
} EmbeddingInputs;

// Flops count word and position vectors only. Bytes count min(N, rows) rows of each table, because repeated rows come
// from a cache. ADD reads and writes that many rows of a gradient; SET writes every row.
#define EMBEDDING_ROWS_READ(N, rows) ((double)min_int(N, rows))
#define EMBEDDING_GRADIENT_ROWS(N, rows, mode) ((mode) == ADD ? 2 * EMBEDDING_ROWS_READ(N, rows) : (double)(rows))
#define EMBEDDING_FORWARD_FLOPS(N, C) (1.0 * (N) * (C))
#define EMBEDDING_FORWARD_BYTES(N, z)                                                                                  \
    ((EMBEDDING_ROWS_READ(N, (z).V) + EMBEDDING_ROWS_READ(N, (z).T) + EMBEDDING_ROWS_READ(N, (z).types) + (N)) *       \
     (z).C * sizeof(floatX))
#define EMBEDDING_BACKWARD_FLOPS(N, C) (2.0 * (N) * (C))
#define EMBEDDING_BACKWARD_BYTES(N, z, word_mode, mode)                                                                \
    (1.0 * (N) * (z).C * sizeof(floatX) +                                                                              \
     (EMBEDDING_GRADIENT_ROWS(N, (z).V, word_mode) + EMBEDDING_GRADIENT_ROWS(N, (z).T, mode) +                         \
      EMBEDDING_GRADIENT_ROWS(N, (z).types, mode)) *                                                                   \
         (z).C * sizeof(real))

// ---------------------------------------------------------------------------------------------------------
// References

// The tables in full precision; type may be NULL.
typedef struct {
    const real *word, *position, *type;
} EmbeddingRefTables;

// One table's index [N], its number of rows, and the row that gets no gradient; -1: every row gets one.
typedef struct {
    const int* index;
    int rows, skipped;
} EmbeddingRefIndex;

static inline void embedding_forward_ref(real* x, EmbeddingInputs in, EmbeddingRefTables e, int C, Dropout dropout) {
    const Sequences* s = in.s;
    for (int n = 0; n < s->rows; n++)
        for (int c = 0; c < C; c++) {
            double sum = (double)e.word[(size_t)in.tokens[n] * (size_t)C + (size_t)c] +
                         (double)e.position[(size_t)s->position[n] * (size_t)C + (size_t)c];
            if (e.type) sum += (double)e.type[(size_t)in.types[n] * (size_t)C + (size_t)c];
            x[(size_t)n * (size_t)C + (size_t)c] =
                (real)(sum * dropout_factor_ref(dropout, s->sequence[n], s->position[n], c));
        }
}

// One table: table[index[n]] += keep[n] * dx[n]; SET zeroes the table first.
static inline void embedding_backward_ref(real* table, const real* dx, EmbeddingRefIndex i, const Sequences* s, int C,
                                          Dropout dropout, Mode mode) {
    size_t size = (size_t)i.rows * (size_t)C;
    double* sums = (double*)xcalloc(size, sizeof *sums);
    for (int n = 0; n < s->rows; n++)
        for (int c = 0; c < C && i.index[n] != i.skipped; c++)
            sums[(size_t)i.index[n] * (size_t)C + (size_t)c] +=
                (double)dx[(size_t)n * (size_t)C + (size_t)c] *
                dropout_factor_ref(dropout, s->sequence[n], s->position[n], c);
    for (size_t k = 0; k < size; k++) table[k] = (real)(sums[k] + (mode == ADD ? (double)table[k] : 0));
    free(sums);
}

#ifdef __CUDACC__
#include "llmc/ops/embedding/kernels.cuh"
#else
// ---------------------------------------------------------------------------------------------------------
// CPU. Forward: threads share rows. Backward: each thread owns rows of the tables and adds their gradients in the order
// of the tokens, so the sums do not depend on the number of threads.

// The launches need no scratch.
static inline size_t embedding_scratch_bytes(int N, int sequences, int T, EmbeddingSizes sizes) {
    return (void)N, (void)sequences, (void)T, (void)sizes, 0;
}

// Adjacent rows of the position table per thread, so that it reads adjacent rows of dx; and the channels that dropout
// processes at once, a multiple of four.
enum { EMBEDDING_POSITIONS = 64, EMBEDDING_CHANNELS = 1024 };

// y = the sum of row n's vectors.
static inline void embedding_forward_row(floatX* y, EmbeddingInputs in, Embeddings e, int n, int C) {
    const floatX* word = e.word + (size_t)in.tokens[n] * (size_t)C;
    const floatX* position = e.position + (size_t)in.s->position[n] * (size_t)C;
    const floatX* type = e.type ? e.type + (size_t)in.types[n] * (size_t)C : NULL;
    for (int c = 0; c < C; c++) y[c] = word[c] + position[c];
    for (int c = 0; type && c < C; c++) y[c] += type[c];
}

static inline void embedding_zero(real* table, int rows, int C) {
#pragma omp parallel for
    for (int i = 0; i < rows; i++) memset(table + (size_t)i * (size_t)C, 0, (size_t)C * sizeof *table);
}

static inline void embedding_add(real* to, const real* from, int count) {
#pragma omp simd
    for (int c = 0; c < count; c++) to[c] += from[c];
}

static inline void embedding_backward_launch(EmbeddingGrads d, const floatX* dx, EmbeddingInputs in,
                                             EmbeddingSizes sizes, Dropout dropout, Mode word_mode, Mode mode,
                                             Context* ctx) {
    (void)ctx;
    const Sequences* s = in.s;
    const int *tokens = in.tokens, *types = in.types;
    int N = s->rows, C = sizes.C;
    if (word_mode == SET) embedding_zero(d.word, sizes.V, C);
    if (mode == SET) embedding_zero(d.position, sizes.T, C);
    if (mode == SET && d.type) embedding_zero(d.type, sizes.types, C);
    // Threads own whole rows, not some channels of every row: hardware prefetch would load the other channels too.
    const int threads = device_threads();
#pragma omp parallel for schedule(static, 1)
    for (int thread = 0; thread < threads; thread++)
        for (int n = 0; n < N; n++) {
            int position = s->position[n];
            int has_word = tokens[n] != sizes.padding && tokens[n] % threads == thread;
            int has_position = position / EMBEDDING_POSITIONS % threads == thread;
            int has_type = d.type && types[n] % threads == thread;
            if (!has_word && !has_position && !has_type) continue;
            for (int from = 0; from < C; from += EMBEDDING_CHANNELS) {
                int count = min_int(EMBEDDING_CHANNELS, C - from);
                real kept[EMBEDDING_CHANNELS];
                const real* g = dx + (size_t)n * (size_t)C + (size_t)from;
                if (dropout.threshold) {
                    memcpy(kept, g, (size_t)count * sizeof *kept);
                    dropout_multiply_row(kept, dropout, n, from, count);
                    g = kept;
                }
                if (has_word) embedding_add(d.word + (size_t)tokens[n] * (size_t)C + from, g, count);
                if (has_position) embedding_add(d.position + (size_t)position * (size_t)C + from, g, count);
                if (has_type) embedding_add(d.type + (size_t)types[n] * (size_t)C + from, g, count);
            }
        }
}

#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers

static inline void embedding_forward(floatX* x, EmbeddingInputs in, Embeddings e, EmbeddingSizes sizes, Dropout dropout,
                                     Context* ctx) {
    int N = in.s->rows, C = sizes.C;
    Scope scope = scope_open(ctx, "embedding_forward", EMBEDDING_FORWARD_FLOPS(N, C), EMBEDDING_FORWARD_BYTES(N, sizes),
                             "N=%d C=%d", N, C);
#ifdef __CUDACC__
    const int W = Vector<floatX>::SIZE;
    int vectors = rows_are_vectors<floatX>(C), dropped = dropout.threshold != 0;
    auto kernel = embedding_forward_kernel<1, 0>;
    if (vectors) kernel = dropped ? embedding_forward_kernel<W, 1> : embedding_forward_kernel<W, 0>;
    else if (dropped) kernel = embedding_forward_kernel<1, 1>;
    kernel<<<blocks_for((size_t)N, EMBEDDING_THREADS / WARP), EMBEDDING_THREADS, 0, ctx->stream>>>(
        x, in.tokens, in.types, e, in.s->position, N, C, dropout_rows(dropout));
    cudaCheck(cudaGetLastError());
#else
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* y = x + (size_t)n * (size_t)C;
        embedding_forward_row(y, in, e, n, C);
        if (dropout.threshold) dropout_multiply_row(y, dropout, n, 0, C);
    }
#endif
    scope_close(&scope);
}

static inline void embedding_backward(EmbeddingGrads d, const floatX* dx, EmbeddingInputs in, EmbeddingSizes sizes,
                                      Dropout dropout, Mode word_mode, Mode mode, Context* ctx) {
    int N = in.s->rows;
    Scope scope = scope_open(ctx, "embedding_backward", EMBEDDING_BACKWARD_FLOPS(N, sizes.C),
                             EMBEDDING_BACKWARD_BYTES(N, sizes, word_mode, mode), "N=%d C=%d", N, sizes.C);
    CHECK(in.s->max_length <= sizes.T);
    embedding_backward_launch(d, dx, in, sizes, dropout, word_mode, mode, ctx);
    scope_close(&scope);
}

#endif
