/* What the network starts from: a word vector, a position vector and, in BERT, a token-type vector, added; in BERT also
 * normalised.
 *
 *   forward              x[n] = keep[n] * (word[tokens[n]] + position[s->position[n]] + type[types[n]])
 *   layernorm forward    e[n] = word[tokens[n]] + position[s->position[n]] + type[types[n]]
 *                        x[n] = keep[n] * ((e[n] - mean[n]) * rstd[n] * w + b)           e, mean, rstd are kept
 *   backward             dword[tokens[n]] += keep[n] * dx[n],   and likewise dposition and dtype
 *
 * The backward pass of the second form is layernorm_dropout_backward, then backward without dropout. A
 * token that stands for no token (sizes.padding) gets no gradient in the word table.
 *
 * Shapes: x, dx [N, C] with N = s->rows; word [V, C]; position [T, C]; type [types, C], or NULL where the model
 * has none; tokens, types [N]. keep is dropout's 0 or 1 / (1 - p), by channel; it is applied to the sum.
 * Indices are trusted: they were checked when the batch was built.
 * Modes: SET makes the whole table 0 first. The word table has a mode of its own because a tied head has
 * written to that gradient before.
 * Numerics: sums in real: on the CPU rows in order, on the GPU first those of a chunk, then the chunks, whose size depends
 * on the shapes alone. e is normalised as it is stored, with sums as in layernorm.
 * Source: Vaswani et al., arXiv 1706.03762; token types: Devlin et al., arXiv 1810.04805. */
#ifndef LLMC_EMBEDDING_H
#define LLMC_EMBEDDING_H

#include "../base/rng.h"
#include "../device/normalise.h"
#include "../device/scope.h"
#ifdef __CUDACC__
#include "../device/device.cuh"
#include "../device/dropout_mask.h"
#endif

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
    int padding;  // the token whose word vector gets no gradient here; -1: there is none
} EmbeddingSizes;

// What the sum and the layernorm after it read.
typedef struct {
    Embeddings tables;
    Norm norm;
    real eps;
    Dropout dropout;  // of the result
} EmbeddingNorm;

// Flops of word and position vectors only. Of a table as many rows as there are tokens are read, at most all of them: the
// rest of the reads, of rows that other tokens have too, are a cache's. A gradient that is added to is read and written
// so; SET writes every row.
#define EMBEDDING_ROWS(N, rows) ((double)min_int(N, rows))
#define EMBEDDING_GRADIENT_ROWS(N, rows, mode) ((mode) == ADD ? 2 * EMBEDDING_ROWS(N, rows) : (double)(rows))
#define EMBEDDING_FORWARD_FLOPS(N, C) (1.0 * (N) * (C))
#define EMBEDDING_FORWARD_BYTES(N, z)                                                                                  \
    ((EMBEDDING_ROWS(N, (z).V) + EMBEDDING_ROWS(N, (z).T) + EMBEDDING_ROWS(N, (z).types) + (N)) * (z).C *              \
     sizeof(floatX))
#define EMBEDDING_LAYERNORM_FORWARD_FLOPS(N, C) (10.0 * (N) * (C))
#define EMBEDDING_LAYERNORM_FORWARD_BYTES(N, z)                                                                        \
    (EMBEDDING_FORWARD_BYTES(N, z) + 1.0 * (N) * (z).C * sizeof(floatX) + 2.0 * (N) * sizeof(real))
#define EMBEDDING_BACKWARD_FLOPS(N, C) (2.0 * (N) * (C))
#define EMBEDDING_BACKWARD_BYTES(N, z, word_mode, mode)                                                                \
    (1.0 * (N) * (z).C * sizeof(floatX) +                                                                              \
     (EMBEDDING_GRADIENT_ROWS(N, (z).V, word_mode) + EMBEDDING_GRADIENT_ROWS(N, (z).T, mode) +                         \
      EMBEDDING_GRADIENT_ROWS(N, (z).types, mode)) *                                                                   \
         (z).C * sizeof(real))

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

static inline void embedding_layernorm_forward_ref(real* x, real* e, real* mean, real* rstd, const real* w,
                                                   const real* b, const Sequences* s, int C, double eps,
                                                   Dropout dropout) {
    for (int n = 0; n < s->rows; n++) {
        size_t row = (size_t)n * (size_t)C;
        double sum = 0, squares = 0;
        for (int c = 0; c < C; c++) sum += e[row + (size_t)c];
        for (int c = 0; c < C; c++) squares += (e[row + (size_t)c] - sum / C) * (e[row + (size_t)c] - sum / C);
        mean[n] = (real)(sum / C);
        rstd[n] = (real)(1 / sqrt(squares / C + eps));
        for (int c = 0; c < C; c++) {
            double u = (e[row + (size_t)c] - sum / C) / sqrt(squares / C + eps);
            x[row + (size_t)c] = (real)((u * w[c] + b[c]) * embedding_keep_ref(dropout, s, n, c));
        }
    }
}

// One table: table[index[n]] += keep[n] * dx[n], after SET made its `rows` 0; not to row `skipped`, -1: to all.
static inline void embedding_backward_ref(real* table, const real* dx, const int* index, int rows, int skipped,
                                          const Sequences* s, int C, Dropout dropout, Mode mode) {
    size_t size = (size_t)rows * (size_t)C;
    double* sums = (double*)xcalloc(size, sizeof *sums);
    for (int n = 0; n < s->rows; n++)
        for (int c = 0; c < C && index[n] != skipped; c++)
            sums[(size_t)index[n] * (size_t)C + (size_t)c] +=
                (double)dx[(size_t)n * (size_t)C + (size_t)c] * embedding_keep_ref(dropout, s, n, c);
    for (size_t i = 0; i < size; i++) table[i] = (real)(sums[i] + (mode == ADD ? (double)table[i] : 0));
    free(sums);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: forward here, with layernorm in embedding_layernorm.cuh, backward in embedding_backward.cuh.

enum { EMBEDDING_THREADS = 256 };

// Warp: a row; lane: WIDTH channels at a time.
template <int WIDTH, int DROPPED>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_forward_kernel(floatX* x, const int* tokens, const int* types, Embeddings e, const int* position, int N,
                             int C, DropoutRows dropout) {
    int n = blockIdx.x * (EMBEDDING_THREADS / WARP) + threadIdx.x / WARP;
    if (n >= N) return;
    const floatX* word = e.word + (size_t)tokens[n] * (size_t)C;
    const floatX* place = e.position + (size_t)position[n] * (size_t)C;
    const floatX* type = e.type ? e.type + (size_t)types[n] * (size_t)C : NULL;
    DropoutPlace drop = {0, 0};
    if constexpr (DROPPED) drop = dropout_place(dropout, n);
#pragma unroll 4
    for (int c = threadIdx.x % WARP * WIDTH; c < C; c += WARP * WIDTH) {
        float sum[WIDTH], f[WIDTH];
        to_floats(sum, load_vector<WIDTH>(word + c));
        to_floats(f, load_vector<WIDTH>(place + c));
#pragma unroll
        for (int i = 0; i < WIDTH; i++) sum[i] += f[i];
        if (type) {
            to_floats(f, load_vector<WIDTH>(type + c));
#pragma unroll
            for (int i = 0; i < WIDTH; i++) sum[i] += f[i];
        }
        if constexpr (DROPPED) dropout_multiply<WIDTH>(sum, dropout.dropout, drop, c);
        store_vector(x + (size_t)n * (size_t)C + c, from_floats<floatX, WIDTH>(sum));
    }
}

template <int WIDTH, int DROPPED>
static void embedding_forward_launch(floatX* x, const int* tokens, const int* types, Embeddings e, const Sequences* s,
                                     int C, DropoutRows dropout, Context* ctx) {
    unsigned blocks = blocks_for((size_t)s->rows, EMBEDDING_THREADS / WARP);
    embedding_forward_kernel<WIDTH, DROPPED>
        <<<blocks, EMBEDDING_THREADS, 0, ctx->stream>>>(x, tokens, types, e, s->position, s->rows, C, dropout);
    cudaCheck(cudaGetLastError());
}

static inline void embedding_forward(floatX* x, const int* tokens, const int* types, Embeddings e, const Sequences* s,
                                     EmbeddingSizes sizes, Dropout dropout, Context* ctx) {
    const int WIDTH = Vector<floatX>::SIZE, C = sizes.C;
    DropoutRows rows = {dropout, s->sequence, s->position, s->first};
    Scope scope = scope_open(ctx, "embedding_forward", EMBEDDING_FORWARD_FLOPS(s->rows, C),
                             EMBEDDING_FORWARD_BYTES(s->rows, sizes), "N=%d C=%d", s->rows, C);
    int vectors = rows_are_vectors<floatX>(C), dropped = dropout.threshold != 0;
    if (vectors && dropped) embedding_forward_launch<WIDTH, 1>(x, tokens, types, e, s, C, rows, ctx);
    else if (vectors) embedding_forward_launch<WIDTH, 0>(x, tokens, types, e, s, C, rows, ctx);
    else if (dropped) embedding_forward_launch<1, 1>(x, tokens, types, e, s, C, rows, ctx);
    else embedding_forward_launch<1, 0>(x, tokens, types, e, s, C, rows, ctx);
    scope_close(&scope);
}

#include "embedding_backward.cuh"
#include "embedding_layernorm.cuh"

#else
// ---------------------------------------------------------------------------------------------------------
// CPU: forward by rows. Backward by blocks of EMBEDDING_BLOCK channels, each with all rows in order: whoever
// does a block, it adds the same numbers in the same order.

// The launches need no scratch.
static inline size_t embedding_scratch_bytes(int N, int sequences, int T, EmbeddingSizes sizes) {
    return (void)N, (void)sequences, (void)T, (void)sizes, 0;
}

enum { EMBEDDING_BLOCK = 32 };  // two cache lines of floats, and whole groups of four for dropout

// x[c] *= keep for the channels from .. to - 1 of row n; x points to channel `from`, a multiple of four.
static inline void embedding_drop(real* x, Dropout d, const Sequences* s, int n, int from, int to) {
    for (int c = from; c < to; c += 4) {
        Philox r =
            dropout_bits_hidden(d, (uint32_t)(s->first + s->sequence[n]), (uint32_t)s->position[n], (uint32_t)c / 4);
        for (int i = 0; i < min_int(4, to - c); i++) x[c - from + i] *= r.v[i] >= d.threshold ? (real)d.scale : 0;
    }
}

// The sum for row n, to y.
static inline void embedding_row(floatX* y, const int* tokens, const int* types, Embeddings e, const Sequences* s,
                                 int n, int C) {
    const floatX* word = e.word + (size_t)tokens[n] * (size_t)C;
    const floatX* position = e.position + (size_t)s->position[n] * (size_t)C;
    const floatX* type = e.type ? e.type + (size_t)types[n] * (size_t)C : NULL;
    for (int c = 0; c < C; c++) y[c] = word[c] + position[c];
    for (int c = 0; type && c < C; c++) y[c] += type[c];
}

static inline void embedding_forward(floatX* x, const int* tokens, const int* types, Embeddings e, const Sequences* s,
                                     EmbeddingSizes sizes, Dropout dropout, Context* ctx) {
    int N = s->rows, C = sizes.C;
    Scope scope = scope_open(ctx, "embedding_forward", EMBEDDING_FORWARD_FLOPS(N, C), EMBEDDING_FORWARD_BYTES(N, sizes),
                             "N=%d C=%d", N, C);
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* y = x + (size_t)n * (size_t)C;
        embedding_row(y, tokens, types, e, s, n, C);
        if (dropout.threshold) embedding_drop(y, dropout, s, n, 0, C);
    }
    scope_close(&scope);
}

static inline void embedding_layernorm_forward(floatX* x, floatX* e, Moments stats, const int* tokens, const int* types,
                                               EmbeddingNorm layer, const Sequences* s, EmbeddingSizes sizes,
                                               Context* ctx) {
    int N = s->rows, C = sizes.C;
    CHECK(N > 0 && C > 0);
    Scope scope = scope_open(ctx, "embedding_layernorm_forward", EMBEDDING_LAYERNORM_FORWARD_FLOPS(N, C),
                             EMBEDDING_LAYERNORM_FORWARD_BYTES(N, sizes), "N=%d C=%d", N, C);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        size_t row = (size_t)n * (size_t)C;
        embedding_row(e + row, tokens, types, layer.tables, s, n, C);
        normalise_row(x + row, stats.mean + n, stats.rstd + n, e + row, layer.norm, (size_t)C, layer.eps);
        if (layer.dropout.threshold) embedding_drop(x + row, layer.dropout, s, n, 0, C);
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
    Scope scope = scope_open(ctx, "embedding_backward", EMBEDDING_BACKWARD_FLOPS(N, C),
                             EMBEDDING_BACKWARD_BYTES(N, sizes, word_mode, mode), "N=%d C=%d", N, C);
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
            for (int c = 0; c < count && tokens[n] != sizes.padding; c++) word[c] += g[c];
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
