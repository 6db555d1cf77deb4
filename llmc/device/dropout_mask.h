/* Dropout masks, many channels at a time: what every op with a fused dropout multiplies by.
 *
 * The random bits are those of dropout_bits_hidden (base/rng.h), one Philox call for four channels. On the CPU
 * the calls for DROPOUT_TILE channels run side by side in vector registers; a kernel's thread draws for its own. */
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

#ifdef __CUDACC__

// What a kernel needs to know: d.sequences is the host's.
typedef struct {
    Dropout dropout;
    const int *sequence, *position;  // of each row
    int first;
} DropoutRows;

static inline DropoutRows dropout_rows(Dropout d) {
    DropoutRows rows = {d, NULL, NULL, 0};
    if (d.threshold == 0) return rows;
    rows.sequence = d.sequences->sequence;
    rows.position = d.sequences->position;
    rows.first = d.sequences->first;
    return rows;
}

// The sequence (counted over the whole step) and the position of a row.
typedef struct {
    uint32_t sequence, position;
} DropoutPlace;

__device__ inline DropoutPlace dropout_place(DropoutRows d, int row) {
    DropoutPlace place = {(uint32_t)(d.first + d.sequence[row]), (uint32_t)d.position[row]};
    return place;
}

// Multiply the channels c .. c + COUNT - 1 of a row by their mask; c is a multiple of 4, or COUNT is 1.
template <int COUNT> __device__ inline void dropout_multiply(float* x, Dropout d, DropoutPlace place, int c) {
    static_assert(COUNT == 1 || COUNT % 4 == 0, "whole groups of four channels, or one channel");
    if constexpr (COUNT == 1) {
        Philox r = dropout_bits_hidden(d, place.sequence, place.position, (uint32_t)c / 4);
        uint32_t bits = c & 2 ? (c & 1 ? r.v[3] : r.v[2]) : (c & 1 ? r.v[1] : r.v[0]);
        x[0] *= bits >= d.threshold ? d.scale : 0;
    } else {
#pragma unroll
        for (int k = 0; k < COUNT; k += 4) {
            Philox r = dropout_bits_hidden(d, place.sequence, place.position, (uint32_t)(c + k) / 4);
#pragma unroll
            for (int i = 0; i < 4; i++) x[k + i] *= r.v[i] >= d.threshold ? d.scale : 0;
        }
    }
}

#else

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
