/* The last step of a bias gradient: kernels leave the sums over the rows of their tiles, and this adds up the tiles.
 *
 *   bias.b [C] (SET or ADD) = sum over t of partial[t][c]    partial [tiles, C] floats on the device
 *
 * In fp32: each of WARPS warps adds every WARPS-th tile in order, then the warps are added in order. */
#ifndef LLMC_OPS_COMMON_TILE_SUMS_CUH
#define LLMC_OPS_COMMON_TILE_SUMS_CUH

#include "llmc/device/cuda_utils.cuh"

#ifdef __CUDACC__

// A block takes 32 columns.
template <int WARPS>
__global__ void __launch_bounds__(WARPS* WARP) tile_sums_kernel(BiasGrad bias, const float* partial, int tiles, int C) {
    __shared__ float rows[WARPS][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, c = blockIdx.x * WARP + lane;
    float sum = 0;
    if (c < C)
#pragma unroll 8
        for (int t = warp; t < tiles; t += WARPS) sum += partial[(size_t)t * C + c];
    rows[warp][lane] = sum;
    __syncthreads();
    if (warp || c >= C) return;
    for (int w = 1; w < WARPS; w++) sum += rows[w][lane];
    bias.b[c] = bias.mode == ADD ? bias.b[c] + sum : sum;
}

template <int WARPS> static inline void tile_sums(BiasGrad bias, const float* partial, int tiles, int C, Context* ctx) {
    tile_sums_kernel<WARPS><<<blocks_for((size_t)C, WARP), WARPS * WARP, 0, ctx->stream>>>(bias, partial, tiles, C);
    cudaCheck(cudaGetLastError());
}

#endif
#endif
