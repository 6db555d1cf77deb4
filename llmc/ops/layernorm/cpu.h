/* layernorm.h on the CPU. Threads share rows in the forward pass and blocks of LAYERNORM_BLOCK rows in the backward
 * pass. */
#include "llmc/ops/layernorm/layernorm.h"  // before the guard: it includes this file

#ifndef LLMC_OPS_LAYERNORM_CPU_H
#define LLMC_OPS_LAYERNORM_CPU_H

#ifndef __CUDACC__

#define LAYERNORM_BLOCK 32
#define LAYERNORM_COLUMNS 64

static inline void layernorm_forward_rows(floatX* y, LayerNormStats stats, const floatX* x, LayerNorm p, Rows size,
                                          real eps, Context* ctx) {
    (void)ctx;
    size_t row = (size_t)size.C;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < size.N; n++)
        layernorm_row(y + (size_t)n * row, stats.mean + n, stats.rstd + n, x + (size_t)n * row, p, row, eps);
}

static inline void residual_layernorm_forward_rows(floatX* y, ResidualBranch branch, LayerNormStats stats,
                                                   const floatX* x, LayerNorm p, Rows size, real eps, Context* ctx) {
    (void)ctx;
    floatX* r = branch.r;
    Dropout dropout = branch.dropout;
    int C = size.C;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < size.N; n++) {
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
        layernorm_row(y + row, stats.mean + n, stats.rstd + n, r + row, p, (size_t)C, eps);
    }
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

// out [C] = dropout'(dy) of row n.
static inline void layernorm_dropped_row(floatX* out, const floatX* dy, int n, int C, Dropout dropout) {
    for (int start = 0; start < C; start += DROPOUT_TILE) {
        real factor[DROPOUT_TILE];
        int width = min_int(DROPOUT_TILE, C - start);
        dropout_factors(factor, dropout, dropout.sequences->sequence[n], dropout.sequences->position[n], start);
#pragma omp simd
        for (int i = 0; i < width; i++) out[start + i] = dy[start + i] * factor[i];
    }
}

// Adds row n to dbias; with dropout it also writes the row's dbranch.
static inline void residual_gradient_row(real* dbias, floatX* dbranch, const floatX* dx, int n, int C,
                                         Dropout dropout) {
    if (dropout.threshold) {
        layernorm_dropped_row(dbranch, dx, n, C, dropout);
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

static inline void layernorm_backward_rows(floatX* dx, LayerNormGrads d, LayerNormInputs in, Mode dx_mode, Mode d_mode,
                                           Context* ctx) {
    LayerNormTargets to = {.r = {.dx = dx, .dbranch = NULL, .dbias = NULL, .dropout = dropout_none(NULL)},
                           .d = {.w = d.w, .b = d.b}};
    layernorm_backward_blocks(to, in, dx_mode, d_mode, ctx);
}

static inline void residual_layernorm_backward_rows(ResidualGrad r, LayerNormGrads d, LayerNormInputs in, Mode dx_mode,
                                                    Mode d_mode, Context* ctx) {
    LayerNormTargets to = {.r = r, .d = {.w = d.w, .b = d.b}};
    layernorm_backward_blocks(to, in, dx_mode, d_mode, ctx);
}

#endif
#endif
