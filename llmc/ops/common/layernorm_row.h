/* Layer normalization of one row on the CPU: y = (x - mean) * rstd * w + b.
 *
 * Sums are in real, in LAYERNORM_LANES interleaved partial sums, so the result has the same bits for any number of
 * threads and any vector width. The variance is the population variance, computed in a second pass over the row to
 * avoid cancellation for a large mean. */
#ifndef LLMC_OPS_COMMON_LAYERNORM_ROW_H
#define LLMC_OPS_COMMON_LAYERNORM_ROW_H

#include "llmc/device/device.h"

// The members of a LayerNorm that kernels read.
typedef struct {
    const real* w;
    const floatX* b;
} LayerNormArgs;

#ifndef __CUDACC__

#define LAYERNORM_LANES 16

static inline real layernorm_lanes_sum(const real* lane) {
    real sum = 0;
    for (int k = 0; k < LAYERNORM_LANES; k++) sum += lane[k];
    return sum;
}

static inline void layernorm_row(floatX* y, real* mean, real* rstd, const floatX* x, LayerNorm p, size_t C, real eps) {
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
    *mean = average;
    *rstd = scale;
}

#endif
#endif
