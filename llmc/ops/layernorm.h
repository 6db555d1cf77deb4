/* Layer normalisation, alone and fused with the residual connection before it.
 *
 *   forward            y [N, C] = (x - mean) * rstd * w + b         mean, rstd [N] of each row are kept
 *   residual forward   r [N, C] = x + dropout(r);  y = LN(r)        r comes in as a branch's output
 *   backward           dx [N, C] SET or ADD; d.w, d.b [C] SET or ADD, from dy, x and the kept statistics:
 *                      with u = (x - mean) * rstd and e = dy * w, averages over the row's channels:
 *                      dx = rstd * (e - average(e) - u * average(e * u)),  dw = sum of dy * u,  db = sum of dy
 *
 *   residual backward  the same with x = r for dx; dbranch [N, C] = dropout'(dx), the gradient of the branch's
 *                      output, which is dx itself where nothing is dropped; dbias [C] SET or ADD, its column sums:
 *                      the gradient of the bias of the linear layer that made the branch's output
 *
 *   dropout backward   of dropout(y): the same with dy = dropout'(dy), dx SET
 *
 * With SET, dx may be dy; dbranch may be dy.
 *
 * dtypes     x, y, r, b, dx, dy, dbranch floatX; mean, rstd, the gradients d and dbias real; w real in the forward pass,
 *            floatX in the backward pass: its rounding there is one of many, but the outputs' would all have it.
 * numerics   sums of a row in real, in NORMALISE_LANES interleaved partial sums, so that neither threads nor
 *            vector width change a bit; the variance is the population's, in a second pass over the row (no
 *            cancellation for a large mean). d.w, d.b and dbias: sums in real over LAYERNORM_BLOCK rows, those in
 *            double; dbias sums what dbranch, or dx, is before it is rounded to floatX.
 *            On the GPU the partial sums are the threads' and meet in a butterfly; all sums are fp32, and r is
 *            normalised as it is stored, rounded to floatX.
 * source     Ba, Kiros and Hinton, arXiv 1607.06450. */
#ifndef LLMC_LAYERNORM_H
#define LLMC_LAYERNORM_H

#include "../device/dropout_mask.h"
#include "../device/normalise.h"
#include "../device/scope.h"

typedef struct {
    int N, C;
} Rows;

// Where the gradient of r = x + dropout(branch) goes.
typedef struct {
    floatX* dx;       // of x
    floatX* dbranch;  // of the branch's output; left alone where dropout is off: then it is dx
    real* dbias;      // column sums of the branch's; NULL: not wanted
    Dropout dropout;  // the forward pass's
} ResidualGradient;

// Where a backward pass writes, and what lies behind the layer.
typedef struct {
    ResidualGradient r;
    AffineGradient d;
    Dropout output;  // of y: dy is the gradient of dropout(y)
} LayernormGradients;

#define LAYERNORM_BLOCK 32
#define LAYERNORM_COLUMNS 64

#define LAYERNORM_FORWARD_FLOPS(N, C) (7.0 * (N) * (C))
#define LAYERNORM_FORWARD_BYTES(N, C) (2.0 * ((N) + 1.0) * (C) * sizeof(floatX) + 2.0 * (N) * sizeof(real))
#define RESIDUAL_LAYERNORM_FORWARD_FLOPS(N, C) (9.0 * (N) * (C))
#define RESIDUAL_LAYERNORM_FORWARD_BYTES(N, C) ((4.0 * (N) + 2.0) * (C) * sizeof(floatX) + 2.0 * (N) * sizeof(real))
#define LAYERNORM_BACKWARD_FLOPS(N, C) (15.0 * (N) * (C))
#define LAYERNORM_BACKWARD_BYTES(N, C, dx_mode)                                                                        \
    ((((dx_mode) == ADD ? 4.0 : 3.0) * (N) + 3.0) * (C) * sizeof(floatX) + 2.0 * (N) * sizeof(real))
#define LAYERNORM_DROPOUT_BACKWARD_FLOPS(N, C) (16.0 * (N) * (C))
// `dropped`: 1 where dropout is on.
#define RESIDUAL_LAYERNORM_BACKWARD_FLOPS(N, C, dropped) ((16.0 + (dropped)) * (N) * (C))
#define RESIDUAL_LAYERNORM_BACKWARD_BYTES(N, C, dx_mode, dropped)                                                      \
    (LAYERNORM_BACKWARD_BYTES(N, C, dx_mode) + (double)(dropped) * (N) * (C) * sizeof(floatX))

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void layernorm_forward_ref(real* y, real* mean, real* rstd, const real* x, const real* w, const real* b,
                                         int N, int C, double eps) {
    for (int n = 0; n < N; n++) {
        const real* row = x + (size_t)n * (size_t)C;
        double sum = 0, squares = 0;
        for (int c = 0; c < C; c++) sum += row[c];
        double average = sum / C;
        for (int c = 0; c < C; c++) squares += (row[c] - average) * (row[c] - average);
        double scale = 1 / sqrt(squares / C + eps);
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

static inline void layernorm_backward_ref(real* dx, real* dw, real* db, const real* dy, const real* x, const real* mean,
                                          const real* rstd, const real* w, Rows size, Mode dx_mode, Mode d_mode) {
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
            double d = rstd[n] * (e - sum / size.C - u * product / size.C);
            dx[row + c] = (real)(dx_mode == ADD ? dx[row + c] + d : d);
        }
    }
    for (size_t c = 0; c < C; c++) {
        double weight = d_mode == ADD ? dw[c] : 0, bias = d_mode == ADD ? db[c] : 0;
        for (int n = 0; n < size.N; n++) {
            size_t i = (size_t)n * C + c;
            weight += dy[i] * ((double)x[i] - mean[n]) * rstd[n];
            bias += dy[i];
        }
        dw[c] = (real)weight;
        db[c] = (real)bias;
    }
}

// What residual_layernorm_backward does beyond layernorm_backward, from the dx that that has made.
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
#include "layernorm_kernels.cuh"
#else
// ---------------------------------------------------------------------------------------------------------
// CPU

static inline void layernorm_forward(floatX* y, Moments stats, const floatX* x, Norm p, int N, int C, real eps,
                                     Context* ctx) {
    CHECK(N > 0 && C > 0);
    Scope scope = scope_open(ctx, "layernorm_forward", LAYERNORM_FORWARD_FLOPS(N, C), LAYERNORM_FORWARD_BYTES(N, C),
                             "N=%d C=%d", N, C);
    size_t row = (size_t)C;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        normalise_row(y + (size_t)n * row, stats.mean + n, stats.rstd + n, x + (size_t)n * row, p, row, eps);
    scope_close(&scope);
}

static inline void residual_layernorm_forward(floatX* y, floatX* r, Moments stats, const floatX* x, Norm p, int N,
                                              int C, real eps, Dropout dropout, Context* ctx) {
    CHECK(N > 0 && C > 0 && (dropout.threshold == 0 || dropout.sequences->rows == N));
    Scope scope = scope_open(ctx, "residual_layernorm_forward", RESIDUAL_LAYERNORM_FORWARD_FLOPS(N, C),
                             RESIDUAL_LAYERNORM_FORWARD_BYTES(N, C), "N=%d C=%d", N, C);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        size_t row = (size_t)n * (size_t)C;
        real factor[DROPOUT_TILE];
        for (int i = 0; i < DROPOUT_TILE; i++) factor[i] = 1;
        for (int start = 0; start < C; start += DROPOUT_TILE) {
            if (dropout.threshold)
                dropout_factors(factor, dropout, dropout.sequences->sequence[n], dropout.sequences->position[n], start);
            floatX* to = r + row + start;
            const floatX* from = x + row + start;
            int width = min_int(DROPOUT_TILE, C - start);
#pragma omp simd
            for (int i = 0; i < width; i++) to[i] = from[i] + to[i] * factor[i];
        }
        normalise_row(y + row, stats.mean + n, stats.rstd + n, r + row, p, (size_t)C, eps);
    }
    scope_close(&scope);
}

// One row's dx; its share of the weight's and bias's gradients is added to dw and db.
static inline void layernorm_backward_row(floatX* dx, real* dw, real* db, const floatX* dy, const floatX* x, real mean,
                                          real rstd, const floatX* w, size_t C, Mode dx_mode) {
    real sums[NORMALISE_LANES] = {0}, products[NORMALISE_LANES] = {0};
    size_t whole = C / NORMALISE_LANES * NORMALISE_LANES;
    for (size_t c = 0; c < whole; c += NORMALISE_LANES) {
#pragma omp simd
        for (size_t k = 0; k < NORMALISE_LANES; k++) {
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
    real average = normalise_lanes_sum(sums) / (real)C, slope = normalise_lanes_sum(products) / (real)C;
#pragma omp simd
    for (size_t c = 0; c < C; c++) {
        real u = (x[c] - mean) * rstd, g = dy[c];
        dw[c] += g * u;
        db[c] += g;
        real d = rstd * (g * w[c] - average - u * slope);
        dx[c] = dx_mode == ADD ? dx[c] + d : d;
    }
}

// out [C] = a row's gradient, taken through dropout.
static inline void layernorm_dropped_row(floatX* out, const floatX* dy, int n, int C, Dropout dropout) {
    for (int start = 0; start < C; start += DROPOUT_TILE) {
        real factor[DROPOUT_TILE];
        int width = min_int(DROPOUT_TILE, C - start);
        dropout_factors(factor, dropout, dropout.sequences->sequence[n], dropout.sequences->position[n], start);
#pragma omp simd
        for (int i = 0; i < width; i++) out[start + i] = dy[start + i] * factor[i];
    }
}

// One row's share of dbias, and its dbranch where something is dropped.
static inline void residual_gradient_row(real* dbias, floatX* dbranch, const floatX* dx, int n, int C,
                                         Dropout dropout) {
    if (dropout.threshold) {
        layernorm_dropped_row(dbranch, dx, n, C, dropout);
        dx = dbranch;
    }
#pragma omp simd
    for (int c = 0; c < C; c++) dbias[c] += dx[c];
}

// out [C] (SET or ADD) = the sums over blocks of their partial sums, which are `stride` apart; NULL: not wanted.
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

// Scratch of a backward launch with so many sums [C] a block of rows: 3 at most.
static inline size_t layernorm_sums_bytes(int N, int C, int sums) {
    return ((size_t)N + LAYERNORM_BLOCK - 1) / LAYERNORM_BLOCK * (size_t)sums * (size_t)C * sizeof(real);
}

// Scratch that any launch takes at most, for N rows at most.
static inline size_t layernorm_scratch_bytes(int N, int C, const Context* ctx) {
    return (void)ctx, layernorm_sums_bytes(N, C, 3);
}

static inline void layernorm_backward_any(LayernormGradients to, const floatX* dy, const floatX* x, Moments stats,
                                          const floatX* w, Rows size, Mode dx_mode, Mode d_mode, Context* ctx) {
    CHECK(size.N > 0 && size.C > 0);
    ResidualGradient r = to.r;
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
            const floatX* from = dy + n * C;
            if (to.output.threshold) {  // dx is SET, so its row may hold what it is made from
                layernorm_dropped_row(r.dx + n * C, from, (int)n, size.C, to.output);
                from = r.dx + n * C;
            }
            layernorm_backward_row(r.dx + n * C, dw, dw + C, from, x + n * C, stats.mean[n], stats.rstd[n], w, C,
                                   dx_mode);
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

// ---------------------------------------------------------------------------------------------------------
// Both

static inline void layernorm_backward(floatX* dx, AffineGradient d, const floatX* dy, const floatX* x, Moments stats,
                                      const floatX* w, Rows size, Mode dx_mode, Mode d_mode, Context* ctx) {
    Scope scope = scope_open(ctx, "layernorm_backward", LAYERNORM_BACKWARD_FLOPS(size.N, size.C),
                             LAYERNORM_BACKWARD_BYTES(size.N, size.C, dx_mode), "N=%d C=%d", size.N, size.C);
    LayernormGradients to = {{dx, NULL, NULL, dropout_none(NULL)}, d, dropout_none(NULL)};
    layernorm_backward_any(to, dy, x, stats, w, size, dx_mode, d_mode, ctx);
    scope_close(&scope);
}

static inline void layernorm_dropout_backward(floatX* dx, AffineGradient d, const floatX* dy, const floatX* x,
                                              Moments stats, const floatX* w, Rows size, Dropout dropout, Mode d_mode,
                                              Context* ctx) {
    CHECK(dropout.threshold == 0 || dropout.sequences->rows == size.N);
    Scope scope = scope_open(ctx, "layernorm_dropout_backward", LAYERNORM_DROPOUT_BACKWARD_FLOPS(size.N, size.C),
                             LAYERNORM_BACKWARD_BYTES(size.N, size.C, SET), "N=%d C=%d", size.N, size.C);
    LayernormGradients to = {{dx, NULL, NULL, dropout_none(NULL)}, d, dropout};
    layernorm_backward_any(to, dy, x, stats, w, size, SET, d_mode, ctx);
    scope_close(&scope);
}

static inline void residual_layernorm_backward(ResidualGradient r, AffineGradient d, const floatX* dy, const floatX* x,
                                               Moments stats, const floatX* w, Rows size, Mode dx_mode, Mode d_mode,
                                               Context* ctx) {
    int dropped = r.dropout.threshold != 0;
    CHECK(!dropped || r.dropout.sequences->rows == size.N);
    Scope scope =
        scope_open(ctx, "residual_layernorm_backward", RESIDUAL_LAYERNORM_BACKWARD_FLOPS(size.N, size.C, dropped),
                   RESIDUAL_LAYERNORM_BACKWARD_BYTES(size.N, size.C, dx_mode, dropped), "N=%d C=%d", size.N, size.C);
    LayernormGradients to = {r, d, dropout_none(NULL)};
    layernorm_backward_any(to, dy, x, stats, w, size, dx_mode, d_mode, ctx);
    scope_close(&scope);
}

#endif
