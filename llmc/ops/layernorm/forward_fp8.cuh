/* layernorm_fp8.h's forward kernel. A block takes 32 rows, a warp 4 of them, one after the other. */
#include "llmc/ops/layernorm/layernorm_fp8.h"  // before the guard: it includes this file

#ifndef LLMC_OPS_LAYERNORM_FORWARD_FP8_CUH
#define LLMC_OPS_LAYERNORM_FORWARD_FP8_CUH

#include "llmc/ops/common/fp8_tile.cuh"

#ifdef __CUDACC__

enum {
    LAYERNORM_FP8_THREADS = 256,
    LAYERNORM_FP8_ROWS = 32,  // 64 and 128 are slower
    LAYERNORM_FP8_LONG = 56,  // elements of a thread in the longest rows
    LAYERNORM_FP8_COLUMNS = LAYERNORM_FP8_LONG * WARP
};

// Round row i of the block to E4M3. v, stats: from layernorm_forward_read(). The scale is read again for each row: in a
// register it would be one too many while a long row is read.
template <int E>
__device__ inline void layernorm_fp8_write(const LayerNormForward& a, const LayerNormFp8& out, const float* v,
                                           float2 stats, int i, unsigned* tile, QuantizeSeen* seen) {
    constexpr int W = Vector<floatX>::SIZE;
    static_assert(E / W == E / 8, "a thread writes 8 bytes");
    int first = (int)(threadIdx.x % WARP) * W, row = (int)blockIdx.x * LAYERNORM_FP8_ROWS + i;
    size_t start = (size_t)row * (size_t)a.C;
    float scale = (float)*out.fp8.scale;
    unsigned* to = tile + fp8_tile_row<LAYERNORM_FP8_ROWS>(i, a.C);
    // v are numbers of floatX: packing them loses nothing, and of a long row frees registers.
    Vector<floatX, W> packed[E / W];
#pragma unroll
    for (int j = 0; j < E / W; j++) {
        packed[j] = from_floats<floatX, W>(v + j * W);
        if constexpr (E == LAYERNORM_FP8_LONG) keep_packed(&packed[j]);
    }
    bool writes_y = out.rows == LAYERNORM_ALL_ROWS || mean_bias_reads(row, a.N);
#pragma unroll
    for (int j = 0; j < E / W; j++) {
        int c = first + j * WARP * W;
        if (c >= a.C) break;
        float x[W];
        to_floats(x, packed[j]);
        Vector<floatX, W> y = layernorm_forward_vector<W>(x, a.p, stats, c);
        if (writes_y) store_vector(a.y + start + c, y);
        fp8_put<FP8_E4M3>(out.fp8.y + start + c, out.fp8.yt ? to + c / 4 : NULL, y, scale, seen);
    }
    if (first == 0) {
        a.stats.mean[row] = stats.x;
        a.stats.rstd[row] = stats.y;
    }
}

// Minimum resident blocks per multiprocessor. Without a bound one kernel takes 222 registers; with one more block, some
// spill.
HOST_DEVICE static constexpr int layernorm_fp8_residents(int E, LayerNormBranch branch) {
    return E == LAYERNORM_FP8_LONG || (E == 32 && branch == LAYERNORM_RESIDUAL_DROPOUT && LAYERNORM_ARCH >= 1000) ? 2
                                                                                                                  : 3;
}

template <int E, LayerNormBranch BRANCH>
__global__ void __launch_bounds__(LAYERNORM_FP8_THREADS, layernorm_fp8_residents(E, BRANCH))
    layernorm_forward_fp8_kernel(LayerNormForward a, LayerNormFp8 out) {
    constexpr int W = Vector<floatX>::SIZE, WARPS = LAYERNORM_FP8_THREADS / WARP;
    extern __shared__ int4 layernorm_fp8_shared[];
    unsigned* tile = (unsigned*)layernorm_fp8_shared;
    int row0 = (int)blockIdx.x * LAYERNORM_FP8_ROWS;
    QuantizeSeen seen = {0, 0, 0};
#pragma unroll 1
    for (int i = threadIdx.x / WARP; i < LAYERNORM_FP8_ROWS && row0 + i < a.N; i += WARPS) {
        float v[E];
        int first = (int)(threadIdx.x % WARP) * W;
        float2 stats = layernorm_forward_read<W, E, WARP, BRANCH>(v, a, row0 + i, first);
        layernorm_fp8_write<E>(a, out, v, stats, i, tile, &seen);
    }
    if (out.fp8.stats) quantize_report(out.fp8.stats, seen);
    if (!out.fp8.yt) return;
    __syncthreads();
    fp8_tile_transpose<LAYERNORM_FP8_ROWS, LAYERNORM_FP8_THREADS>(out.fp8.yt, tile, row0, a.N, a.C);
}

static inline int layernorm_fp8_takes(int C, const Context* ctx) {
    return fp8_is_built() && C > 0 && C % QUANTIZE_ALIGNMENT == 0 && C <= LAYERNORM_FP8_COLUMNS &&
           fp8_tile_bytes<LAYERNORM_FP8_ROWS>(C) + 1024 <= ctx->shared_of_block;
}

template <int E, LayerNormBranch BRANCH>
static inline void layernorm_fp8_start(LayerNormForward a, LayerNormFp8 out, Context* ctx) {
    size_t shared = out.fp8.yt ? fp8_tile_bytes<LAYERNORM_FP8_ROWS>(a.C) : 0;
    kernel_allow_shared(layernorm_forward_fp8_kernel<E, BRANCH>, shared, ctx);
    layernorm_forward_fp8_kernel<E, BRANCH>
        <<<blocks_for((size_t)a.N, LAYERNORM_FP8_ROWS), LAYERNORM_FP8_THREADS, shared, ctx->stream>>>(a, out);
    cudaCheck(cudaGetLastError());
}

template <LayerNormBranch BRANCH>
static inline void layernorm_fp8_choose(LayerNormForward a, LayerNormFp8 out, Context* ctx) {
    if constexpr (fp8_is_built()) {
        if (a.C <= 24 * WARP) layernorm_fp8_start<24, BRANCH>(a, out, ctx);
        else if (a.C <= 32 * WARP) layernorm_fp8_start<32, BRANCH>(a, out, ctx);
        else layernorm_fp8_start<LAYERNORM_FP8_LONG, BRANCH>(a, out, ctx);
    }
}

#endif
#endif
