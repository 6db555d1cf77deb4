/* The normalisation of one row, for every op that does one on the CPU: y = (x - mean) * rstd * w + b.
 *
 * Sums in real, in NORMALISE_LANES interleaved partial sums, so that neither threads nor vector width change a bit; the
 * variance is the population's, in a second pass over the row (no cancellation for a large mean). */
#ifndef LLMC_NORMALISE_H
#define LLMC_NORMALISE_H

#include "device.h"

#ifndef __CUDACC__

#define NORMALISE_LANES 16

static inline real normalise_lanes_sum(const real* lane) {
    real sum = 0;
    for (int k = 0; k < NORMALISE_LANES; k++) sum += lane[k];
    return sum;
}

static inline void normalise_row(floatX* y, real* mean, real* rstd, const floatX* x, Norm p, size_t C, real eps) {
    real sums[NORMALISE_LANES] = {0}, squares[NORMALISE_LANES] = {0};
    size_t whole = C / NORMALISE_LANES * NORMALISE_LANES;
    for (size_t c = 0; c < whole; c += NORMALISE_LANES) {
#pragma omp simd
        for (size_t k = 0; k < NORMALISE_LANES; k++) sums[k] += x[c + k];
    }
    for (size_t c = whole; c < C; c++) sums[c - whole] += x[c];
    real average = normalise_lanes_sum(sums) / (real)C;
    for (size_t c = 0; c < whole; c += NORMALISE_LANES) {
#pragma omp simd
        for (size_t k = 0; k < NORMALISE_LANES; k++) squares[k] += (x[c + k] - average) * (x[c + k] - average);
    }
    for (size_t c = whole; c < C; c++) squares[c - whole] += (x[c] - average) * (x[c] - average);
    real scale = (real)(1 / sqrt((double)(normalise_lanes_sum(squares) / (real)C) + (double)eps));
#pragma omp simd
    for (size_t c = 0; c < C; c++) y[c] = (x[c] - average) * scale * p.w[c] + p.b[c];
    *mean = average;
    *rstd = scale;
}

#endif
#endif
