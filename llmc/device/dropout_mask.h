/* Dropout masks on the CPU, many channels at a time: what every op with a fused dropout multiplies by.
 *
 * The random bits are those of dropout_bits_hidden (base/rng.h), one Philox call for four channels; here the
 * calls for DROPOUT_TILE channels run side by side in vector registers. */
#ifndef LLMC_DROPOUT_MASK_H
#define LLMC_DROPOUT_MASK_H

#include "../base/rng.h"
#include "device.h"

#define DROPOUT_TILE 64

// The plain form, one channel at a time, for references.
static inline double dropout_factor_ref(Dropout d, int sequence, int position, int c) {
    if (d.threshold == 0) return 1;
    Philox r = dropout_bits_hidden(d, (uint32_t)(d.sequences->first + sequence), (uint32_t)position, (uint32_t)c / 4);
    return r.v[c % 4] >= d.threshold ? (double)d.scale : 0;
}

#ifndef __CUDACC__

// factor[i] is what channel c + i of a token is multiplied by: 0, or d.scale. c is a multiple of 4.
static inline void dropout_factors(real* factor, Dropout d, int sequence, int position, int c) {
    uint32_t bits[DROPOUT_TILE];
    uint32_t s = (uint32_t)(d.sequences->first + sequence), t = (uint32_t)position, group = (uint32_t)c / 4;
#pragma omp simd
    for (uint32_t g = 0; g < DROPOUT_TILE / 4; g++) {
        Philox r = dropout_bits_hidden(d, s, t, group + g);
        for (int i = 0; i < 4; i++) bits[4 * g + (uint32_t)i] = r.v[i];
    }
#pragma omp simd
    for (int i = 0; i < DROPOUT_TILE; i++) factor[i] = bits[i] >= d.threshold ? (real)d.scale : 0;
}

#endif
#endif
