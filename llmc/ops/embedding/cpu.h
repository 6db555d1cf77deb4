/* embedding.h on the CPU. Forward: threads share rows. Backward: each thread owns rows of the tables and adds their
 * gradients in the order of the tokens, so the sums do not depend on the number of threads. */
#include "llmc/ops/embedding/embedding.h"  // before the guard: it includes this file

#ifndef LLMC_OPS_EMBEDDING_CPU_H
#define LLMC_OPS_EMBEDDING_CPU_H

#ifndef __CUDACC__

// The launches need no scratch.
static inline size_t embedding_scratch_bytes(int N, int sequences, int T, EmbeddingSizes sizes) {
    return (void)N, (void)sequences, (void)T, (void)sizes, 0;
}

// Adjacent rows of the position table per thread, so that it reads adjacent rows of dx; and the channels that dropout
// processes at once, a multiple of four.
enum { EMBEDDING_POSITIONS = 64, EMBEDDING_CHANNELS = 1024 };

// x[c] *= keep for the channels from .. to - 1 of row n. x points to channel `from`, a multiple of four.
static inline void embedding_drop(real* x, Dropout dropout, const Sequences* s, int n, int from, int to) {
    for (int c = from; c < to; c += 4) {
        Philox r = dropout_bits_hidden(dropout, (uint32_t)(s->first + s->sequence[n]), (uint32_t)s->position[n],
                                       (uint32_t)c / 4);
        for (int i = 0; i < min_int(4, to - c); i++)
            x[c - from + i] *= r.v[i] >= dropout.threshold ? (real)dropout.scale : 0;
    }
}

// y = the sum of row n's vectors.
static inline void embedding_row(floatX* y, EmbeddingInputs in, Embeddings e, int n, int C) {
    const floatX* word = e.word + (size_t)in.tokens[n] * (size_t)C;
    const floatX* position = e.position + (size_t)in.s->position[n] * (size_t)C;
    const floatX* type = e.type ? e.type + (size_t)in.types[n] * (size_t)C : NULL;
    for (int c = 0; c < C; c++) y[c] = word[c] + position[c];
    for (int c = 0; type && c < C; c++) y[c] += type[c];
}

static inline void embedding_forward_rows(floatX* x, EmbeddingInputs in, Embeddings e, int C, Dropout dropout,
                                          Context* ctx) {
    (void)ctx;
    int N = in.s->rows;
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* y = x + (size_t)n * (size_t)C;
        embedding_row(y, in, e, n, C);
        if (dropout.threshold) embedding_drop(y, dropout, in.s, n, 0, C);
    }
}

static inline void embedding_zero(real* table, int rows, int C) {
#pragma omp parallel for
    for (int i = 0; i < rows; i++) memset(table + (size_t)i * (size_t)C, 0, (size_t)C * sizeof *table);
}

static inline void embedding_add(real* to, const real* from, int count) {
#pragma omp simd
    for (int c = 0; c < count; c++) to[c] += from[c];
}

static inline void embedding_backward_tables(EmbeddingGrads d, const floatX* dx, EmbeddingInputs in,
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
                    embedding_drop(kept, dropout, s, n, from, from + count);
                    g = kept;
                }
                if (has_word) embedding_add(d.word + (size_t)tokens[n] * (size_t)C + from, g, count);
                if (has_position) embedding_add(d.position + (size_t)position * (size_t)C + from, g, count);
                if (has_type) embedding_add(d.type + (size_t)types[n] * (size_t)C + from, g, count);
            }
        }
}

#endif
#endif
