/* Online softmax: a row of scores is processed tile by tile, with a running maximum and a running sum of exponentials
 * relative to it. The scores are fragments of mma.sync or wgmma.
 *
 *   new_max = max(row_max, max over the tile of s)
 *   rescale = exp(row_max - new_max)                     the factor for earlier sums
 *   s       = exp(s - new_max)
 *   row_sum = row_sum * rescale + sum over the tile of s
 *
 * Four adjacent lanes hold a row of a fragment; c[n][2 half] and c[n][2 half + 1] are elements of row g + 8 half
 * (ptx/mma.cuh). row_sum covers this lane's columns only: quad_sum() adds the four lanes' sums at the end.
 * Numerics: fp32, with base-2 exponentials. Scores are multiplied by `scale`, log2(e) / sqrt(HS), and 2^x is the
 * hardware's ex2 (relative error 2^-22, far below floatX's rounding).
 * Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867. */
#ifndef LLMC_OPS_ATTENTION_ONLINE_SOFTMAX_CUH
#define LLMC_OPS_ATTENTION_ONLINE_SOFTMAX_CUH

#include "llmc/device/ptx/mma.cuh"

#if defined(__CUDACC__) && (defined(PRECISION_BF16) || defined(PRECISION_FP16))

#define LOG2_E 1.44269504f

// Over the four lanes of a row.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// The maximum of `max` and the row's scores.
template <int COLUMNS> __device__ __forceinline__ float row_max_of(const float (&s)[COLUMNS][4], int half, float max) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) max = fmaxf(max, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    return quad_max(max);
}

// s = 2^(s * scale - shift) for the row. Returns the sum of this lane's elements.
template <int COLUMNS>
__device__ __forceinline__ float row_exp2(float (&s)[COLUMNS][4], int half, float scale, float shift) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; i++) {
            s[n][i] = ex2_approx(fmaf(s[n][i], scale, -shift));
            sum += s[n][i];
        }
    return sum;
}

#endif
#endif
