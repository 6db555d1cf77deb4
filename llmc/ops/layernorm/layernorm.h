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
 * The residual forward pass's y is an Operand, whose 8-bit copy it fills; if no op reads y.v, it may write only some
 * rows. With SET, dx may be dy. dbranch may be dy.
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

static inline void layernorm_backward_ref(real* dx, LayerNormGrads d, LayerNormRefInputs in, Mode dx_mode,
                                          Mode d_mode) {
    const real *dy = in.dy, *x = in.x, *mean = in.mean, *rstd = in.rstd, *w = in.w;
    size_t C = (size_t)in.size.C;
    for (int n = 0; n < in.size.N; n++) {
        size_t row = (size_t)n * C;
        double sum = 0, product = 0;
        for (size_t c = 0; c < C; c++) {
            double e = (double)dy[row + c] * w[c];
            sum += e;
            product += e * ((double)x[row + c] - mean[n]) * rstd[n];
        }
        for (size_t c = 0; c < C; c++) {
            double u = ((double)x[row + c] - mean[n]) * rstd[n], e = (double)dy[row + c] * w[c];
            double g = rstd[n] * (e - sum / in.size.C - u * product / in.size.C);
            dx[row + c] = (real)(dx_mode == ADD ? dx[row + c] + g : g);
        }
    }
    for (size_t c = 0; c < C; c++) {
        double weight = d_mode == ADD ? d.w[c] : 0, bias = d_mode == ADD ? d.b[c] : 0;
        for (int n = 0; n < in.size.N; n++) {
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

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU

#include "llmc/ops/layernorm/forward.cuh"

#include "llmc/ops/layernorm/backward.cuh"  // the same teams

#else
// ---------------------------------------------------------------------------------------------------------
// CPU: threads share rows in the forward pass and blocks of LAYERNORM_BLOCK rows in the backward pass

#define LAYERNORM_LANES 16
#define LAYERNORM_BLOCK 32
#define LAYERNORM_COLUMNS 64

static inline real layernorm_lanes_sum(const real* lane) {
    real sum = 0;
    for (int k = 0; k < LAYERNORM_LANES; k++) sum += lane[k];
    return sum;
}

static inline void layernorm_forward_row(floatX* y, real* mean, real* rstd, const floatX* x, LayerNorm p, size_t C,
                                         real eps) {
    real sums[LAYERNORM_LANES] = {0}, sum_sq[LAYERNORM_LANES] = {0};
    size_t whole = C / LAYERNORM_LANES * LAYERNORM_LANES;
    for (size_t c = 0; c < whole; c += LAYERNORM_LANES) {
#pragma omp simd
        for (size_t k = 0; k < LAYERNORM_LANES; k++) sums[k] += x[c + k];
    }
    for (size_t c = whole; c < C; c++) sums[c - whole] += x[c];
    real average = layernorm_lanes_sum(sums) / (real)C;
    for (size_t c = 0; c < whole; c += LAYERNORM_LANES) {
#pragma omp simd
        for (size_t k = 0; k < LAYERNORM_LANES; k++) sum_sq[k] += (x[c + k] - average) * (x[c + k] - average);
    }
    for (size_t c = whole; c < C; c++) sum_sq[c - whole] += (x[c] - average) * (x[c] - average);
    real scale = (real)(1 / sqrt((double)(layernorm_lanes_sum(sum_sq) / (real)C) + (double)eps));
#pragma omp simd
    for (size_t c = 0; c < C; c++) y[c] = (x[c] - average) * scale * p.w_fp32[c] + p.b[c];
    *mean = average, *rstd = scale;
}

// r = x + dropout(r) of row n.
static inline void residual_row(floatX* r, const floatX* x, int n, int C, Dropout dropout) {
    if (dropout.threshold) dropout_multiply_row(r, dropout, n, 0, C);
#pragma omp simd
    for (int c = 0; c < C; c++) r[c] += x[c];
}

// dx of row n, whose output gradient is dy; adds the row's part of the weight and bias gradients to dw and db.
static inline void layernorm_backward_row(floatX* dx, real* dw, real* db, const floatX* dy, LayerNormInputs in,
                                          size_t n, Mode dx_mode) {
    size_t C = (size_t)in.size.C;
    const floatX *x = in.x + n * C, *w = in.w;
    real mean = in.stats.mean[n], rstd = in.stats.rstd[n];
    real sums[LAYERNORM_LANES] = {0}, products[LAYERNORM_LANES] = {0};
    size_t whole = C / LAYERNORM_LANES * LAYERNORM_LANES;
    for (size_t c = 0; c < whole; c += LAYERNORM_LANES) {
#pragma omp simd
        for (size_t k = 0; k < LAYERNORM_LANES; k++) {
            real e = dy[c + k] * w[c + k];
            sums[k] += e;
            products[k] += e * ((x[c + k] - mean) * rstd);
        }
    }
    for (size_t c = whole; c < C; c++) {
        real e = dy[c] * w[c];
        sums[c - whole] += e;
        products[c - whole] += e * ((x[c] - mean) * rstd);
    }
    real average = layernorm_lanes_sum(sums) / (real)C, slope = layernorm_lanes_sum(products) / (real)C;
#pragma omp simd
    for (size_t c = 0; c < C; c++) {
        real u = (x[c] - mean) * rstd, g = dy[c];
        dw[c] += g * u;
        db[c] += g;
        real d = rstd * (g * w[c] - average - u * slope);
        dx[c] = dx_mode == ADD ? dx[c] + d : d;
    }
}

// Adds row n to dbias; with dropout it also writes the row's dbranch.
static inline void residual_gradient_row(real* dbias, floatX* dbranch, const floatX* dx, int n, int C,
                                         Dropout dropout) {
    if (dropout.threshold) {
        memcpy(dbranch, dx, (size_t)C * sizeof *dbranch);
        dropout_multiply_row(dbranch, dropout, n, 0, C);
        dx = dbranch;
    }
#pragma omp simd
    for (int c = 0; c < C; c++) dbias[c] += dx[c];
}

// out [C] (SET or ADD) = the sum of the blocks' partial sums, which are `stride` apart. out NULL: skipped.
static inline void layernorm_add_blocks(real* out, const real* partial, size_t blocks, size_t stride, size_t C,
                                        Mode mode) {
    if (!out) return;
#pragma omp parallel for schedule(static)
    for (size_t start = 0; start < C; start += LAYERNORM_COLUMNS) {
        double sum[LAYERNORM_COLUMNS] = {0};
        size_t width = min_size(LAYERNORM_COLUMNS, C - start);
        for (size_t b = 0; b < blocks; b++)
            for (size_t c = 0; c < width; c++) sum[c] += (double)partial[stride * b + start + c];
        for (size_t c = 0; c < width; c++) {
            real* to = out + start + c;
            *to = (real)(mode == ADD ? (double)*to + sum[c] : sum[c]);
        }
    }
}

// Scratch of a backward launch that keeps `sums` (at most 3) partial sums [C] per block of rows.
static inline size_t layernorm_sums_bytes(int N, int C, int sums) {
    return ((size_t)N + LAYERNORM_BLOCK - 1) / LAYERNORM_BLOCK * (size_t)sums * (size_t)C * sizeof(real);
}

// Upper bound of the scratch of a launch for up to N rows.
static inline size_t layernorm_scratch_bytes(int N, int C, const Context* ctx) {
    return (void)ctx, layernorm_sums_bytes(N, C, 3);
}

static inline void layernorm_backward_blocks(LayerNormTargets to, LayerNormInputs in, Mode dx_mode, Mode d_mode,
                                             Context* ctx) {
    Rows size = in.size;
    ResidualGrad r = to.r;
    int dropped = r.dropout.threshold != 0, branched = dropped || r.dbias;
    size_t N = (size_t)size.N, C = (size_t)size.C, blocks = (N + LAYERNORM_BLOCK - 1) / LAYERNORM_BLOCK;
    size_t stride = (branched ? 3 : 2) * C;
    real* partial =
        (real*)device_scratch(ctx, layernorm_sums_bytes(size.N, size.C, branched ? 3 : 2));  // dw, db, dbias
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < blocks; b++) {
        real* dw = partial + stride * b;
        memset(dw, 0, stride * sizeof(real));
        for (size_t n = b * LAYERNORM_BLOCK; n < min_size(N, (b + 1) * LAYERNORM_BLOCK); n++) {
            layernorm_backward_row(r.dx + n * C, dw, dw + C, in.dy + n * C, in, n, dx_mode);
            if (branched)
                residual_gradient_row(dw + 2 * C, dropped ? r.dbranch + n * C : NULL, r.dx + n * C, (int)n, size.C,
                                      r.dropout);
        }
    }
    layernorm_add_blocks(to.d.w, partial, blocks, stride, C, d_mode);
    layernorm_add_blocks(to.d.b, partial + C, blocks, stride, C, d_mode);
    if (branched) layernorm_add_blocks(r.dbias, partial + 2 * C, blocks, stride, C, d_mode);
}

#endif
#include "llmc/fp8/room_layernorm.h"  // here, because it uses what is above and the launchers call it

// ---------------------------------------------------------------------------------------------------------
// Launchers (COMPILED_IF_CALLED: base/util.h)

COMPILED_IF_CALLED static inline void layernorm_forward(floatX* y, LayerNormStats stats, const floatX* x, LayerNorm p,
                                                        Rows size, real eps, Context* ctx) {
    CHECK(size.N > 0 && size.C > 0);
    Scope scope = scope_open(ctx, "layernorm_forward", LAYERNORM_FORWARD_FLOPS(size.N, size.C),
                             LAYERNORM_FORWARD_BYTES(size.N, size.C), "N=%d C=%d", size.N, size.C);
#ifdef __CUDACC__
    layernorm_forward_launch<LAYERNORM_ALONE>(layernorm_forward_args(y, stats, x, p, size, eps), ctx);
#else
    size_t C = (size_t)size.C;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < (size_t)size.N; n++)
        layernorm_forward_row(y + n * C, stats.mean + n, stats.rstd + n, x + n * C, p, C, eps);
#endif
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
#ifdef __CUDACC__
    LayerNormForward a = layernorm_forward_args(y.v, stats, x, p, size, eps);
    a.r = branch.r, a.dropout = dropout_rows(branch.dropout);
    if (branch.dropout.threshold) layernorm_forward_launch<LAYERNORM_RESIDUAL_DROPOUT>(a, ctx);
    else layernorm_forward_launch<LAYERNORM_RESIDUAL>(a, ctx);
#else
    size_t C = (size_t)size.C;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < (size_t)size.N; n++) {
        residual_row(branch.r + n * C, x + n * C, (int)n, size.C, branch.dropout);
        layernorm_forward_row(y.v + n * C, stats.mean + n, stats.rstd + n, branch.r + n * C, p, C, eps);
    }
#endif
    scope_close(&scope);
    if (y.q) fp8_fill(y, size.N, size.C, ctx);
}

COMPILED_IF_CALLED static inline void layernorm_backward(floatX* dx, LayerNormGrads d, LayerNormInputs in, Mode dx_mode,
                                                         Mode d_mode, Context* ctx) {
    int N = in.size.N, C = in.size.C;
    LayerNormTargets to = {.r = {.dx = dx, .dropout = dropout_none(NULL)}, .d = {.w = d.w, .b = d.b}};
    CHECK(N > 0 && C > 0);
    Scope scope = scope_open(ctx, "layernorm_backward", LAYERNORM_BACKWARD_FLOPS(N, C),
                             LAYERNORM_BACKWARD_BYTES(N, C, dx_mode), "N=%d C=%d", N, C);
#ifdef __CUDACC__
    LayerNormVariant kernel = dx_mode == ADD ? layernorm_backward_choose<LAYERNORM_BACKWARD, ADD>(C)
                                             : layernorm_backward_choose<LAYERNORM_BACKWARD, SET>(C);
    layernorm_backward_launch(kernel, to, in, d_mode, ctx);
#else
    layernorm_backward_blocks(to, in, dx_mode, d_mode, ctx);
#endif
    scope_close(&scope);
}

COMPILED_IF_CALLED static inline void residual_layernorm_backward(ResidualGrad r, LayerNormGrads d, LayerNormInputs in,
                                                                  Mode dx_mode, Mode d_mode, Context* ctx) {
    int N = in.size.N, C = in.size.C, dropped = r.dropout.threshold != 0;
    LayerNormTargets to = {.r = r, .d = {.w = d.w, .b = d.b}};
    CHECK(N > 0 && C > 0 && (!dropped || r.dropout.sequences->rows == N));
    CHECK(dropped || r.dbias || dx_mode == ADD);  // else this is layernorm_backward
    Scope scope = scope_open(ctx, "residual_layernorm_backward", RESIDUAL_LAYERNORM_BACKWARD_FLOPS(N, C, dropped),
                             RESIDUAL_LAYERNORM_BACKWARD_BYTES(N, C, dx_mode, dropped), "N=%d C=%d", N, C);
#ifdef __CUDACC__
    LayerNormVariant kernel = layernorm_backward_choose<LAYERNORM_BACKWARD, ADD>(C);
    if (dropped && dx_mode == ADD) kernel = layernorm_backward_choose<LAYERNORM_BACKWARD_RESIDUAL_DROPOUT, ADD>(C);
    else if (dropped) kernel = layernorm_backward_choose<LAYERNORM_BACKWARD_RESIDUAL_DROPOUT, SET>(C);
    else if (r.dbias && dx_mode == ADD) kernel = layernorm_backward_choose<LAYERNORM_BACKWARD_RESIDUAL, ADD>(C);
    else if (r.dbias) kernel = layernorm_backward_choose<LAYERNORM_BACKWARD_RESIDUAL, SET>(C);
    layernorm_backward_launch(kernel, to, in, d_mode, ctx);
#else
    layernorm_backward_blocks(to, in, dx_mode, d_mode, ctx);
#endif
    scope_close(&scope);
}

#endif
