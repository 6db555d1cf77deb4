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

#include "llmc/base/rng.h"
#include "llmc/device/scope.h"
#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#include "llmc/ops/common/dropout_mask.h"
#endif

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
#define EMBEDDING_ROWS(N, rows) ((double)min_int(N, rows))
#define EMBEDDING_GRADIENT_ROWS(N, rows, mode) ((mode) == ADD ? 2 * EMBEDDING_ROWS(N, rows) : (double)(rows))
#define EMBEDDING_FORWARD_FLOPS(N, C) (1.0 * (N) * (C))
#define EMBEDDING_FORWARD_BYTES(N, z)                                                                                  \
    ((EMBEDDING_ROWS(N, (z).V) + EMBEDDING_ROWS(N, (z).T) + EMBEDDING_ROWS(N, (z).types) + (N)) * (z).C *              \
     sizeof(floatX))
#define EMBEDDING_BACKWARD_FLOPS(N, C) (2.0 * (N) * (C))
#define EMBEDDING_BACKWARD_BYTES(N, z, word_mode, mode)                                                                \
    (1.0 * (N) * (z).C * sizeof(floatX) +                                                                              \
     (EMBEDDING_GRADIENT_ROWS(N, (z).V, word_mode) + EMBEDDING_GRADIENT_ROWS(N, (z).T, mode) +                         \
      EMBEDDING_GRADIENT_ROWS(N, (z).types, mode)) *                                                                   \
         (z).C * sizeof(real))

// ---------------------------------------------------------------------------------------------------------
// References

// Dropout's factor for channel c of row n.
static inline double embedding_keep_ref(Dropout dropout, const Sequences* s, int n, int c) {
    Philox r =
        dropout_bits_hidden(dropout, (uint32_t)(s->first + s->sequence[n]), (uint32_t)s->position[n], (uint32_t)c / 4);
    return r.v[c % 4] >= dropout.threshold ? (double)dropout.scale : 0;
}

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
            x[(size_t)n * (size_t)C + (size_t)c] = (real)(sum * embedding_keep_ref(dropout, s, n, c));
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
                (double)dx[(size_t)n * (size_t)C + (size_t)c] * embedding_keep_ref(dropout, s, n, c);
    for (size_t k = 0; k < size; k++) table[k] = (real)(sums[k] + (mode == ADD ? (double)table[k] : 0));
    free(sums);
}

// ---------------------------------------------------------------------------------------------------------
// Implementations: embedding_forward_rows(), embedding_backward_tables()

#ifdef __CUDACC__
#include "llmc/ops/embedding/backward.cuh"
#include "llmc/ops/embedding/forward.cuh"
#else
#include "llmc/ops/embedding/cpu.h"
#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers

COMPILED_IF_CALLED static inline void embedding_forward(floatX* x, EmbeddingInputs in, Embeddings e,
                                                        EmbeddingSizes sizes, Dropout dropout, Context* ctx) {
    int N = in.s->rows;
    Scope scope = scope_open(ctx, "embedding_forward", EMBEDDING_FORWARD_FLOPS(N, sizes.C),
                             EMBEDDING_FORWARD_BYTES(N, sizes), "N=%d C=%d", N, sizes.C);
    embedding_forward_rows(x, in, e, sizes.C, dropout, ctx);
    scope_close(&scope);
}

COMPILED_IF_CALLED static inline void embedding_backward(EmbeddingGrads d, const floatX* dx, EmbeddingInputs in,
                                                         EmbeddingSizes sizes, Dropout dropout, Mode word_mode,
                                                         Mode mode, Context* ctx) {
    int N = in.s->rows;
    Scope scope = scope_open(ctx, "embedding_backward", EMBEDDING_BACKWARD_FLOPS(N, sizes.C),
                             EMBEDDING_BACKWARD_BYTES(N, sizes, word_mode, mode), "N=%d C=%d", N, sizes.C);
    CHECK(in.s->max_length <= sizes.T);
    embedding_backward_tables(d, dx, in, sizes, dropout, word_mode, mode, ctx);
    scope_close(&scope);
}

#endif
