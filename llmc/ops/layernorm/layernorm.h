/* Layer normalization, alone and fused with the residual connection before it.
 *
 *   forward            y [N, C] = (x - mean) * rstd * w + b         mean, rstd [N] are kept for the backward pass
 *   residual forward   r [N, C] = x + dropout(r);  y = LN(r)        on entry r holds the branch's output
 *   backward           dx [N, C] SET or ADD; d.w, d.b [C] SET or ADD, from dy, x and the kept statistics;
 *                      with u = (x - mean) * rstd and e = dy * w, and averages over the row's channels:
 *                      dx = rstd * (e - average(e) - u * average(e * u)),  dw = sum of dy * u,  db = sum of dy
 *
 *   residual backward  the same with x = r. It also computes dbranch [N, C] = dropout'(dx), the gradient of the
 *                      branch's output (without dropout this is dx itself), and dbias [C] SET or ADD, its column sums:
 *                      the gradient of the bias of the linear layer that computed the branch's output
 *
 * The residual forward pass's y is an Operand, whose 8-bit copy it fills; if no op reads y.v, it may write only some rows.
 * With SET, dx may be dy. dbranch may be dy.
 *
 * dtypes     x, y, r, b, dx, dy and dbranch are floatX; mean, rstd, the gradients d and dbias are real. w is real in
 *            the forward pass, because rounding it would shift every output. In the backward pass it is floatX: its
 *            rounding error is one among many.
 * numerics   A row is summed in real, in LAYERNORM_LANES interleaved partial sums. So the result has the same bits for
 *            any number of threads and any vector width. The variance is the population variance, from a second pass
 *            over the row (no cancellation for a large mean). d.w, d.b and dbias: sums in real over LAYERNORM_BLOCK
 *            rows, then in double over the blocks. dbias sums dbranch, or dx, before it is rounded to floatX.
 *            On the GPU all sums are fp32: a partial sum per thread, added up by butterfly shuffles. r is rounded to
 *            floatX before it is normalized.
 * source     Ba, Kiros and Hinton, arXiv 1607.06450. */
#ifndef LLMC_OPS_LAYERNORM_LAYERNORM_H
#define LLMC_OPS_LAYERNORM_LAYERNORM_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/dropout_mask.h"
#include "llmc/ops/common/layernorm_row.h"

typedef struct {
    int N, C;
} Rows;

// The branch of r = x + dropout(branch).
typedef struct {
    floatX* r;  // the branch's output, replaced by the sum
    Dropout dropout;
} ResidualBranch;

// Where the gradient of r = x + dropout(branch) goes.
typedef struct {
    floatX* dx;       // of x
    floatX* dbranch;  // of the branch's output; without dropout it equals dx and is not written
    real* dbias;      // column sums of dbranch; NULL: not computed
    Dropout dropout;  // the forward pass's
} ResidualGrad;

// What a backward pass reads.
typedef struct {
    const floatX *dy, *x;
    LayerNormStats stats;
    const floatX* w;
    Rows size;
} LayerNormInputs;

// Where a backward pass writes.
typedef struct {
    ResidualGrad r;
    LayerNormGrads d;  // of w and b
} LayerNormTargets;

#define LAYERNORM_FORWARD_FLOPS(N, C) (7.0 * (N) * (C))
#define LAYERNORM_FORWARD_BYTES(N, C) (2.0 * ((N) + 1.0) * (C) * sizeof(floatX) + 2.0 * (N) * sizeof(real))
#define RESIDUAL_LAYERNORM_FORWARD_FLOPS(N, C) (9.0 * (N) * (C))
#define RESIDUAL_LAYERNORM_FORWARD_BYTES(N, C) ((4.0 * (N) + 2.0) * (C) * sizeof(floatX) + 2.0 * (N) * sizeof(real))
#define LAYERNORM_BACKWARD_FLOPS(N, C) (15.0 * (N) * (C))
#define LAYERNORM_BACKWARD_BYTES(N, C, dx_mode)                                                                        \
    ((((dx_mode) == ADD ? 4.0 : 3.0) * (N) + 3.0) * (C) * sizeof(floatX) + 2.0 * (N) * sizeof(real))
// `dropped`: 1 where dropout is on.
#define RESIDUAL_LAYERNORM_BACKWARD_FLOPS(N, C, dropped) ((16.0 + (dropped)) * (N) * (C))
#define RESIDUAL_LAYERNORM_BACKWARD_BYTES(N, C, dx_mode, dropped)                                                      \
    (LAYERNORM_BACKWARD_BYTES(N, C, dx_mode) + (double)(dropped) * (N) * (C) * sizeof(floatX))

// ---------------------------------------------------------------------------------------------------------
// Reference

// What layernorm_backward_ref reads.
typedef struct {
    const real *dy, *x, *mean, *rstd, *w;
    Rows size;
} LayerNormRefInputs;

static inline void layernorm_forward_ref(real* y, real* mean, real* rstd, const real* x, const real* w, const real* b,
                                         Rows size, double eps) {
    int C = size.C;
    for (int n = 0; n < size.N; n++) {
        const real* row = x + (size_t)n * (size_t)C;
        double sum = 0, sum_sq = 0;
        for (int c = 0; c < C; c++) sum += row[c];
        double average = sum / C;
        for (int c = 0; c < C; c++) sum_sq += (row[c] - average) * (row[c] - average);
        double scale = 1 / sqrt(sum_sq / C + eps);
        for (int c = 0; c < C; c++)
            y[(size_t)n * (size_t)C + (size_t)c] = (real)((row[c] - average) * scale * w[c] + b[c]);
        mean[n] = (real)average;
        rstd[n] = (real)scale;
    }
}

// r becomes x + dropout(r).
static inline void residual_dropout_ref(real* r, const real* x, int N, int C, Dropout dropout) {
    const Sequences* s = dropout.sequences;
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            size_t i = (size_t)n * (size_t)C + (size_t)c;
            r[i] = (real)(x[i] + r[i] * dropout_factor_ref(dropout, s->sequence[n], s->position[n], c));
        }
}

static inline void layernorm_backward_ref(real* dx, LinearGrads d, LayerNormRefInputs in, Mode dx_mode, Mode d_mode) {
    const real *dy = in.dy, *x = in.x, *mean = in.mean, *rstd = in.rstd, *w = in.w;
    Rows size = in.size;
    size_t C = (size_t)size.C;
    for (int n = 0; n < size.N; n++) {
        size_t row = (size_t)n * C;
        double sum = 0, product = 0;
        for (size_t c = 0; c < C; c++) {
            double e = (double)dy[row + c] * w[c];
            sum += e;
            product += e * ((double)x[row + c] - mean[n]) * rstd[n];
        }
        for (size_t c = 0; c < C; c++) {
            double u = ((double)x[row + c] - mean[n]) * rstd[n], e = (double)dy[row + c] * w[c];
            double g = rstd[n] * (e - sum / size.C - u * product / size.C);
            dx[row + c] = (real)(dx_mode == ADD ? dx[row + c] + g : g);
        }
    }
    for (size_t c = 0; c < C; c++) {
        double weight = d_mode == ADD ? d.w[c] : 0, bias = d_mode == ADD ? d.b[c] : 0;
        for (int n = 0; n < size.N; n++) {
            size_t i = (size_t)n * C + c;
            weight += dy[i] * ((double)x[i] - mean[n]) * rstd[n];
            bias += dy[i];
        }
        d.w[c] = (real)weight;
        d.b[c] = (real)bias;
    }
}

// The part of residual_layernorm_backward beyond layernorm_backward, given the latter's dx.
static inline void residual_gradient_ref(real* dbranch, real* dbias, const real* dx, Rows size, Dropout dropout,
                                         Mode d_mode) {
    const Sequences* s = dropout.sequences;
    for (int c = 0; c < size.C; c++) {
        double sum = d_mode == ADD ? dbias[c] : 0;
        for (int n = 0; n < size.N; n++) {
            size_t i = (size_t)n * (size_t)size.C + (size_t)c;
            double d = dx[i] * dropout_factor_ref(dropout, s->sequence[n], s->position[n], c);
            dbranch[i] = (real)d;
            sum += d;
        }
        dbias[c] = (real)sum;
    }
}

// ---------------------------------------------------------------------------------------------------------
// Implementations: each launcher's _rows()

#ifdef __CUDACC__
#include "llmc/ops/layernorm/backward.cuh"
#include "llmc/ops/layernorm/forward.cuh"
#else
#include "llmc/ops/layernorm/cpu.h"
#endif
#include "llmc/fp8/layernorm.h"

// ---------------------------------------------------------------------------------------------------------
// Launchers

COMPILED_IF_CALLED static inline void layernorm_forward(floatX* y, LayerNormStats stats, const floatX* x, LayerNorm p,
                                                        Rows size, real eps, Context* ctx) {
    CHECK(size.N > 0 && size.C > 0);
    Scope scope = scope_open(ctx, "layernorm_forward", LAYERNORM_FORWARD_FLOPS(size.N, size.C),
                             LAYERNORM_FORWARD_BYTES(size.N, size.C), "N=%d C=%d", size.N, size.C);
    layernorm_forward_rows(y, stats, x, p, size, eps, ctx);
    scope_close(&scope);
}

COMPILED_IF_CALLED static inline void residual_layernorm_forward(Operand y, ResidualBranch branch, LayerNormStats stats,
                                                                 const floatX* x, LayerNorm p, Rows size, real eps,
                                                                 Context* ctx) {
    CHECK(size.N > 0 && size.C > 0 && (branch.dropout.threshold == 0 || branch.dropout.sequences->rows == size.N));
#ifdef __CUDACC__
    if (y.q && residual_layernorm_forward_fp8(y, branch, stats, x, p, size, eps, ctx)) return;
#endif
    Scope scope = scope_open(ctx, "residual_layernorm_forward", RESIDUAL_LAYERNORM_FORWARD_FLOPS(size.N, size.C),
                             RESIDUAL_LAYERNORM_FORWARD_BYTES(size.N, size.C), "N=%d C=%d", size.N, size.C);
    residual_layernorm_forward_rows(y.v, branch, stats, x, p, size, eps, ctx);
    scope_close(&scope);
    if (y.q) fp8_fill(y, size.N, size.C, ctx);
}

COMPILED_IF_CALLED static inline void layernorm_backward(floatX* dx, LayerNormGrads d, LayerNormInputs in, Mode dx_mode,
                                                         Mode d_mode, Context* ctx) {
    Rows size = in.size;
    CHECK(size.N > 0 && size.C > 0);
    Scope scope = scope_open(ctx, "layernorm_backward", LAYERNORM_BACKWARD_FLOPS(size.N, size.C),
                             LAYERNORM_BACKWARD_BYTES(size.N, size.C, dx_mode), "N=%d C=%d", size.N, size.C);
    layernorm_backward_rows(dx, d, in, dx_mode, d_mode, ctx);
    scope_close(&scope);
}

COMPILED_IF_CALLED static inline void residual_layernorm_backward(ResidualGrad r, LayerNormGrads d, LayerNormInputs in,
                                                                  Mode dx_mode, Mode d_mode, Context* ctx) {
    Rows size = in.size;
    int dropped = r.dropout.threshold != 0;
    CHECK(size.N > 0 && size.C > 0 && (!dropped || r.dropout.sequences->rows == size.N));
    CHECK(dropped || r.dbias || dx_mode == ADD);  // else this is layernorm_backward
    Scope scope =
        scope_open(ctx, "residual_layernorm_backward", RESIDUAL_LAYERNORM_BACKWARD_FLOPS(size.N, size.C, dropped),
                   RESIDUAL_LAYERNORM_BACKWARD_BYTES(size.N, size.C, dx_mode, dropped), "N=%d C=%d", size.N, size.C);
    residual_layernorm_backward_rows(r, d, in, dx_mode, d_mode, ctx);
    scope_close(&scope);
}

#endif
