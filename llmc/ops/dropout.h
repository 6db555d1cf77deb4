/* Dropout of hidden states: y = x * mask / (1 - p), where the mask is drawn again whenever it is needed.
 *
 *   forward    y  [N, C]  from x  [N, C]                 y may be x
 *   backward   dx [N, C]  from dy [N, C], SET or ADD     dx may be dy
 *
 * dtypes     floatX in and out.
 * numerics   one multiplication an element; nothing is accumulated.
 * mask       bits of Philox keyed by (step, layer, site; sequence in the step, position, channel): the row at
 *            which a sequence lies in the batch, the number of ranks and the device do not matter.
 * p = 0      a copy (forward, SET) or an addition (ADD).
 * source     Srivastava et al., JMLR 15 (2014); inverted, as everybody does it now. */
#ifndef LLMC_DROPOUT_H
#define LLMC_DROPOUT_H

#include "../device/dropout_mask.h"
#include "../device/scope.h"

#define DROPOUT_FORWARD_FLOPS(N, C) (1.0 * (N) * (C))
#define DROPOUT_FORWARD_BYTES(N, C) (2.0 * (N) * (C) * sizeof(floatX))
#define DROPOUT_BACKWARD_FLOPS(N, C) (2.0 * (N) * (C))
#define DROPOUT_BACKWARD_BYTES(N, C, mode) (((mode) == ADD ? 3.0 : 2.0) * (N) * (C) * sizeof(floatX))

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void dropout_forward_ref(real* y, const real* x, int N, int C, Dropout dropout) {
    const Sequences* s = dropout.sequences;
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            size_t i = (size_t)n * (size_t)C + (size_t)c;
            y[i] = (real)(x[i] * dropout_factor_ref(dropout, s->sequence[n], s->position[n], c));
        }
}

static inline void dropout_backward_ref(real* dx, const real* dy, int N, int C, Dropout dropout, Mode mode) {
    const Sequences* s = dropout.sequences;
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            size_t i = (size_t)n * (size_t)C + (size_t)c;
            double d = dy[i] * dropout_factor_ref(dropout, s->sequence[n], s->position[n], c);
            dx[i] = (real)(mode == ADD ? dx[i] + d : d);
        }
}

// ---------------------------------------------------------------------------------------------------------
// CPU

#ifndef __CUDACC__

// Channels 0 .. C - 1 of row n: out = in * mask, or out += in * mask.
static inline void dropout_row(floatX* out, const floatX* in, int n, int C, Dropout dropout, Mode mode) {
    const Sequences* s = dropout.sequences;
    real factor[DROPOUT_TILE];
    for (int i = 0; i < DROPOUT_TILE; i++) factor[i] = 1;
    for (int c = 0; c < C; c += DROPOUT_TILE) {
        int width = min_int(DROPOUT_TILE, C - c);
        if (dropout.threshold) dropout_factors(factor, dropout, s->sequence[n], s->position[n], c);
        if (mode == ADD) {
#pragma omp simd
            for (int i = 0; i < width; i++) out[c + i] += in[c + i] * factor[i];
        } else {
#pragma omp simd
            for (int i = 0; i < width; i++) out[c + i] = in[c + i] * factor[i];
        }
    }
}

static inline void dropout_forward(floatX* y, const floatX* x, int N, int C, Dropout dropout, Context* ctx) {
    CHECK(N > 0 && C > 0 && (dropout.threshold == 0 || dropout.sequences->rows == N));
    Scope scope =
        scope_open(ctx, "dropout_forward", DROPOUT_FORWARD_FLOPS(N, C), DROPOUT_FORWARD_BYTES(N, C), "N=%d C=%d", N, C);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) dropout_row(y + (size_t)n * (size_t)C, x + (size_t)n * (size_t)C, n, C, dropout, SET);
    scope_close(&scope);
}

static inline void dropout_backward(floatX* dx, const floatX* dy, int N, int C, Dropout dropout, Mode mode,
                                    Context* ctx) {
    CHECK(N > 0 && C > 0 && (dropout.threshold == 0 || dropout.sequences->rows == N));
    Scope scope = scope_open(ctx, "dropout_backward", DROPOUT_BACKWARD_FLOPS(N, C), DROPOUT_BACKWARD_BYTES(N, C, mode),
                             "N=%d C=%d", N, C);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        dropout_row(dx + (size_t)n * (size_t)C, dy + (size_t)n * (size_t)C, n, C, dropout, mode);
    scope_close(&scope);
}

#endif
#endif
