/* Dropout masks for many channels at a time, used by every op with fused dropout.
 *
 * The random bits come from dropout_bits_hidden (base/rng.h), one Philox call per four channels. On the CPU the calls
 * for DROPOUT_TILE channels are vectorized. In a kernel, each thread generates the bits of its own channels. */
#ifndef LLMC_OPS_COMMON_DROPOUT_MASK_H
#define LLMC_OPS_COMMON_DROPOUT_MASK_H

#include "llmc/base/rng.h"
#include "llmc/device/device.h"

#define DROPOUT_TILE 64

// The reference: one channel at a time.
static inline double dropout_factor_ref(Dropout dropout, int sequence, int position, int c) {
    if (dropout.threshold == 0) return 1;
    Philox r = dropout_bits_hidden(dropout, (uint32_t)(dropout.sequences->first + sequence), (uint32_t)position,
                                   (uint32_t)c / 4);
    return r.v[c % 4] >= dropout.threshold ? (double)dropout.scale : 0;
}

#ifdef __CUDACC__

// The arguments of kernels. A kernel cannot read d.sequences, which is in host memory.
typedef struct {
    Dropout dropout;
    const int *sequence, *position;  // of each row
    int first;
} DropoutRows;

static inline DropoutRows dropout_rows(Dropout dropout) {
    DropoutRows rows = {.dropout = dropout};
    if (dropout.threshold == 0) return rows;
    rows.sequence = dropout.sequences->sequence;
    rows.position = dropout.sequences->position;
    rows.first = dropout.sequences->first;
    return rows;
}

// The sequence (its index in the whole step) and the position of a row.
typedef struct {
    uint32_t sequence, position;
} DropoutPlace;

__device__ inline DropoutPlace dropout_place(DropoutRows rows, int row) {
    DropoutPlace place = {.sequence = (uint32_t)(rows.first + rows.sequence[row]),
                          .position = (uint32_t)rows.position[row]};
    return place;
}

// Multiply channels c .. c + COUNT - 1 of a row by their mask. c is a multiple of 4, or COUNT is 1.
template <int COUNT> __device__ inline void dropout_multiply(float* x, Dropout dropout, DropoutPlace place, int c) {
    static_assert(COUNT == 1 || COUNT % 4 == 0, "whole groups of four channels, or one channel");
    if constexpr (COUNT == 1) {
        Philox r = dropout_bits_hidden(dropout, place.sequence, place.position, (uint32_t)c / 4);
        uint32_t bits = c & 2 ? (c & 1 ? r.v[3] : r.v[2]) : (c & 1 ? r.v[1] : r.v[0]);
        x[0] *= bits >= dropout.threshold ? dropout.scale : 0;
    } else {
#pragma unroll
        for (int k = 0; k < COUNT; k += 4) {
            Philox r = dropout_bits_hidden(dropout, place.sequence, place.position, (uint32_t)(c + k) / 4);
#pragma unroll
            for (int i = 0; i < 4; i++) x[k + i] *= r.v[i] >= dropout.threshold ? dropout.scale : 0;
        }
    }
}

#else

// Set factor[i], the factor on channel c + i of a token, to 0 or dropout.scale. c is a multiple of 4.
static inline void dropout_factors(real* factor, Dropout dropout, int sequence, int position, int c) {
    uint32_t bits[DROPOUT_TILE];
    uint32_t s = (uint32_t)(dropout.sequences->first + sequence), t = (uint32_t)position, group = (uint32_t)c / 4;
#pragma omp simd
    for (uint32_t g = 0; g < DROPOUT_TILE / 4; g++) {
        Philox r = dropout_bits_hidden(dropout, s, t, group + g);
        for (int i = 0; i < 4; i++) bits[4 * g + (uint32_t)i] = r.v[i];
    }
#pragma omp simd
    for (int i = 0; i < DROPOUT_TILE; i++) factor[i] = bits[i] >= dropout.threshold ? (real)dropout.scale : 0;
}

// Multiply channels c .. c + count - 1 of row n, which are at x, by their mask. c is a multiple of 4.
static inline void dropout_multiply_row(real* x, Dropout dropout, int n, int c, int count) {
    const Sequences* s = dropout.sequences;
    for (int start = 0; start < count; start += DROPOUT_TILE) {
        real factor[DROPOUT_TILE];
        int width = min_int(DROPOUT_TILE, count - start);
        dropout_factors(factor, dropout, s->sequence[n], s->position[n], c + start);
#pragma omp simd
        for (int i = 0; i < width; i++) x[start + i] *= factor[i];
    }
}

#endif
#endif
