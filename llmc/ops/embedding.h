/* What the network starts from: a word vector, a position vector and, in BERT, a token-type vector, added.
 *
 *   x[n]                 = keep[n] * (word[tokens[n]] + position[s->position[n]] + type[types[n]])
 *   dword[tokens[n]]       += keep[n] * dx[n],   and likewise dposition and dtype
 *
 * Shapes: x, dx [N, C] with N = s->rows; word [V, C]; position [T, C]; type [types, C], or NULL where the model
 * has none; tokens, types [N]. keep is dropout's 0 or 1 / (1 - p), by channel; it is applied to the sum.
 * Indices are trusted: they were checked when the batch was built.
 * Modes: SET makes the whole table 0 first. The word table has a mode of its own because a tied head has
 * written to that gradient before.
 * Numerics: sums in real, rows in order, whatever the number of threads.
 * Source: Vaswani et al., arXiv 1706.03762; token types: Devlin et al., arXiv 1810.04805. */
#ifndef LLMC_EMBEDDING_H
#define LLMC_EMBEDDING_H

#include "../base/rng.h"
#include "../device/scope.h"

// The tables, or their gradients.
typedef struct {
    floatX *word, *position, *type;
} Embeddings;

// Their gradients, of the same shapes.
typedef struct {
    real *word, *position, *type;
} EmbeddingGradients;

// Rows of the tables, padding included: what SET makes 0.
typedef struct {
    int V, T, types, C;
} EmbeddingSizes;

// Word and position vectors only; a type table is a few rows that stay in a cache.
#define EMBEDDING_FORWARD_FLOPS(N, C) (1.0 * (N) * (C))
#define EMBEDDING_BACKWARD_FLOPS(N, C) (2.0 * (N) * (C))
#define EMBEDDING_FORWARD_BYTES(N, C) (3.0 * (N) * (C) * sizeof(floatX))
#define EMBEDDING_BACKWARD_BYTES(N, C) ((N) * (C) * (sizeof(floatX) + 4.0 * sizeof(real)))

// ---------------------------------------------------------------------------------------------------------
// References

// What dropout multiplies channel c of row n with.
static inline double embedding_keep_ref(Dropout d, const Sequences* s, int n, int c) {
    Philox r = dropout_bits_hidden(d, (uint32_t)(s->first + s->sequence[n]), (uint32_t)s->position[n], (uint32_t)c / 4);
    return r.v[c % 4] >= d.threshold ? (double)d.scale : 0;
}

static inline void embedding_forward_ref(real* x, const int* tokens, const int* types, const real* word,
                                         const real* position, const real* type, const Sequences* s, int C,
                                         Dropout dropout) {
    for (int n = 0; n < s->rows; n++)
        for (int c = 0; c < C; c++) {
            double sum = (double)word[(size_t)tokens[n] * (size_t)C + (size_t)c] +
                         (double)position[(size_t)s->position[n] * (size_t)C + (size_t)c];
            if (type) sum += (double)type[(size_t)types[n] * (size_t)C + (size_t)c];
            x[(size_t)n * (size_t)C + (size_t)c] = (real)(sum * embedding_keep_ref(dropout, s, n, c));
        }
}

// One table: table[index[n]] += keep[n] * dx[n], after SET made its `rows` 0.
static inline void embedding_backward_ref(real* table, const real* dx, const int* index, int rows, const Sequences* s,
                                          int C, Dropout dropout, Mode mode) {
    size_t size = (size_t)rows * (size_t)C;
    double* sums = (double*)xcalloc(size, sizeof *sums);
    for (int n = 0; n < s->rows; n++)
        for (int c = 0; c < C; c++)
            sums[(size_t)index[n] * (size_t)C + (size_t)c] +=
                (double)dx[(size_t)n * (size_t)C + (size_t)c] * embedding_keep_ref(dropout, s, n, c);
    for (size_t i = 0; i < size; i++) table[i] = (real)(sums[i] + (mode == ADD ? (double)table[i] : 0));
    free(sums);
}

#ifndef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// CPU: forward by rows. Backward by blocks of EMBEDDING_BLOCK channels, each with all rows in order: whoever
// does a block, it adds the same numbers in the same order.

enum { EMBEDDING_BLOCK = 32 };  // two cache lines of floats, and whole groups of four for dropout

// x[c] *= keep for the channels from .. to - 1 of row n; x points to channel `from`, a multiple of four.
static inline void embedding_drop(real* x, Dropout d, const Sequences* s, int n, int from, int to) {
    for (int c = from; c < to; c += 4) {
        Philox r =
            dropout_bits_hidden(d, (uint32_t)(s->first + s->sequence[n]), (uint32_t)s->position[n], (uint32_t)c / 4);
        for (int i = 0; i < min_int(4, to - c); i++) x[c - from + i] *= r.v[i] >= d.threshold ? (real)d.scale : 0;
    }
}

static inline void embedding_forward(floatX* x, const int* tokens, const int* types, Embeddings e, const Sequences* s,
                                     int C, Dropout dropout, Context* ctx) {
    int N = s->rows;
    Scope scope = scope_open(ctx, "embedding_forward", EMBEDDING_FORWARD_FLOPS(N, C), EMBEDDING_FORWARD_BYTES(N, C),
                             "N=%d C=%d", N, C);
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* y = x + (size_t)n * (size_t)C;
        const floatX* word = e.word + (size_t)tokens[n] * (size_t)C;
        const floatX* position = e.position + (size_t)s->position[n] * (size_t)C;
        const floatX* type = e.type ? e.type + (size_t)types[n] * (size_t)C : NULL;
        for (int c = 0; c < C; c++) y[c] = word[c] + position[c];
        for (int c = 0; type && c < C; c++) y[c] += type[c];
        if (dropout.threshold) embedding_drop(y, dropout, s, n, 0, C);
    }
    scope_close(&scope);
}

static inline void embedding_zero(real* table, int rows, int C) {
#pragma omp parallel for
    for (int i = 0; i < rows; i++) memset(table + (size_t)i * (size_t)C, 0, (size_t)C * sizeof *table);
}

static inline void embedding_backward(EmbeddingGradients d, const floatX* dx, const int* tokens, const int* types,
                                      const Sequences* s, EmbeddingSizes sizes, Dropout dropout, Mode word_mode,
                                      Mode mode, Context* ctx) {
    int N = s->rows, C = sizes.C;
    Scope scope = scope_open(ctx, "embedding_backward", EMBEDDING_BACKWARD_FLOPS(N, C), EMBEDDING_BACKWARD_BYTES(N, C),
                             "N=%d C=%d", N, C);
    CHECK(s->max_length <= sizes.T);
    if (word_mode == SET) embedding_zero(d.word, sizes.V, C);
    if (mode == SET) embedding_zero(d.position, sizes.T, C);
    if (mode == SET && d.type) embedding_zero(d.type, sizes.types, C);
#pragma omp parallel for schedule(dynamic)
    for (int from = 0; from < C; from += EMBEDDING_BLOCK) {
        int count = min_int(EMBEDDING_BLOCK, C - from);
        for (int n = 0; n < N; n++) {
            real g[EMBEDDING_BLOCK];
            real* word = d.word + (size_t)tokens[n] * (size_t)C + (size_t)from;
            real* position = d.position + (size_t)s->position[n] * (size_t)C + (size_t)from;
            memcpy(g, dx + (size_t)n * (size_t)C + (size_t)from, (size_t)count * sizeof *g);
            if (dropout.threshold) embedding_drop(g, dropout, s, n, from, from + count);
            for (int c = 0; c < count; c++) word[c] += g[c];
            for (int c = 0; c < count; c++) position[c] += g[c];
            if (!d.type) continue;
            real* type = d.type + (size_t)types[n] * (size_t)C + (size_t)from;
            for (int c = 0; c < count; c++) type[c] += g[c];
        }
    }
    scope_close(&scope);
}
#endif

#endif
