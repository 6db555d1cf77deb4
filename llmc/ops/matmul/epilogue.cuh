/* Kernels that run after matmul's GEMMs on the GPU: GELU if cuBLASLt's epilogue cannot apply it; GELU's derivative; the
 * bias if no epilogue is available; the bias gradient, which epilogues sum slowly.
 *
 * All are memory-bound and compute in fp32. Pointers are aligned to 16 bytes. */
#ifndef LLMC_OPS_MATMUL_EPILOGUE_CUH
#define LLMC_OPS_MATMUL_EPILOGUE_CUH

#include "llmc/device/cuda_utils.cuh"
#include "llmc/ops/common/activation.h"

// y [N, OC] += b, for shapes without an epilogue. One element per thread.
static __global__ void matmul_bias_kernel(floatX* y, const floatX* b, size_t n, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = from_float<floatX>(to_float(y[i]) + to_float(b[i % (size_t)OC]));
}

// Column sums of dy [N, OC]. The kernel can first compute dy from a GEMM's result and GELU's derivative. The division
// of rows among blocks depends only on the shape, so the sums have the same bits on every GPU.
enum { BIAS_WARPS = 16, BIAS_BLOCKS = 256 };  // two blocks on each of an H200's 132 multiprocessors

// What the buffer dy holds: dy, or a GEMM's result that the kernel multiplies in place by GELU's derivative at `pre`.
typedef enum { BIAS_PLAIN, BIAS_GELU_TANH, BIAS_GELU_ERF } BiasSource;

// The sum of column `at` over COUNT rows of `columns` floats in shared memory.
template <int COUNT> __device__ inline float matmul_column_sum(const float* rows, int columns, int at) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) total += rows[i * columns + at];
    return total;
}

// Grid: x is a tile of WARP * WIDTH columns, y a range of `span` rows. A warp sums every 16th row of the range, before
// rounding. The last block to arrive at a tile adds the tile's partial sums, partial [tiles, spans, WARP * WIDTH], into
// d.b.
template <int WIDTH, BiasSource SOURCE>
__global__ void __launch_bounds__(BIAS_WARPS* WARP, 2)
    matmul_backward_bias_kernel(BiasGrad d, float* partial, unsigned* arrivals, floatX* dy, const floatX* pre, int N,
                                int OC, int span) {
    constexpr int COLUMNS = WARP * WIDTH, GROUP = WIDTH < 4 ? 1 : 4;  // floats per load
    constexpr int GROUPS = COLUMNS / GROUP, SLICES = BIAS_WARPS * WARP / GROUPS;
    static_assert(SLICES <= BIAS_WARPS, "the sums of slices take the place of those of warps");
    __shared__ alignas(16) float sums[BIAS_WARPS * COLUMNS];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, c = threadIdx.x;
    int first = blockIdx.x * COLUMNS, column = first + lane * WIDTH;
    int begin = blockIdx.y * span, end = min(N, begin + span);
    float sum[WIDTH] = {0};
    if (column < OC) {
#pragma unroll 4
        for (int row = begin + warp; row < end; row += BIAS_WARPS) {
            size_t at = (size_t)row * OC + column;
            float f[WIDTH];
            to_floats(f, load_vector<WIDTH>(dy + at));
            if constexpr (SOURCE != BIAS_PLAIN) {
                float x[WIDTH];
                to_floats(x, load_vector<WIDTH>(pre + at));
#pragma unroll
                for (int i = 0; i < WIDTH; i++)
                    f[i] *= gelu_derivative(x[i], SOURCE == BIAS_GELU_ERF ? GELU_ERF : GELU_TANH);
                store_vector(dy + at, from_floats<floatX, WIDTH>(f));
            }
#pragma unroll
            for (int i = 0; i < WIDTH; i++) sum[i] += f[i];
        }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sums[warp * COLUMNS + lane * WIDTH + i] = sum[i];
    __syncthreads();
    float total = c < COLUMNS ? matmul_column_sum<BIAS_WARPS>(sums, COLUMNS, c) : 0;
    if (gridDim.y > 1) {
        float* tile = partial + (size_t)blockIdx.x * gridDim.y * COLUMNS;
        if (c < COLUMNS) tile[blockIdx.y * COLUMNS + c] = total;
        if (!last_to_arrive(arrivals + blockIdx.x, gridDim.y)) return;
        int slice = c / GROUPS, at = c % GROUPS * GROUP;
        float part[GROUP] = {0};
#pragma unroll 8
        for (int s = slice; s < (int)gridDim.y; s += SLICES) {
            Vector<float, GROUP> more = load_vector<GROUP>(tile + s * COLUMNS + at);
#pragma unroll
            for (int i = 0; i < GROUP; i++) part[i] += more.v[i];
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++) sums[slice * COLUMNS + at + i] = part[i];
        __syncthreads();
        if (c < COLUMNS) total = matmul_column_sum<SLICES>(sums, COLUMNS, c);
    }
    if (c < COLUMNS && first + c < OC) d.b[first + c] = d.mode == ADD ? d.b[first + c] + total : total;
}

// The number of row ranges, each with a partial sum of its own.
static inline int matmul_bias_spans(int N, int tiles) {
    return max_int(1, min_int(BIAS_BLOCKS / tiles, (N + BIAS_WARPS - 1) / BIAS_WARPS));
}

// Scratch for the partial sums of OC columns over up to N rows.
static inline size_t matmul_bias_bytes(int N, int OC) {
    int columns = WARP * (rows_are_vectors<floatX>(OC) ? (int)Vector<floatX>::SIZE : 1);
    int tiles = (int)blocks_for((size_t)OC, (size_t)columns);
    return (size_t)tiles * (size_t)matmul_bias_spans(N, tiles) * (size_t)columns * sizeof(float);
}

// Upper bound of a launch's scratch without cuBLASLt's workspace: that of the bias gradient of dy or of dpre.
static inline size_t matmul_scratch_bytes(int N, int IC, int OC) {
    return max_size(matmul_bias_bytes(N, IC), matmul_bias_bytes(N, OC));
}

template <BiasSource SOURCE>
static inline void matmul_backward_bias_launch(BiasGrad d, floatX* dy, const floatX* pre, int N, int OC, Context* ctx) {
    constexpr int W = Vector<floatX>::SIZE;
    int vectors = rows_are_vectors<floatX>(OC);
    auto kernel = vectors ? matmul_backward_bias_kernel<W, SOURCE> : matmul_backward_bias_kernel<1, SOURCE>;
    size_t columns = (size_t)WARP * (vectors ? W : 1);
    int tiles = (int)blocks_for((size_t)OC, columns), spans = matmul_bias_spans(N, tiles);
    int span = (int)round_up(((size_t)N + (size_t)spans - 1) / (size_t)spans, BIAS_WARPS);
    spans = (N + span - 1) / span;
    static_assert((int)BIAS_BLOCKS <= (int)DEVICE_ARRIVALS, "tiles of several spans have a counter each");
    float* partial = (float*)device_scratch(ctx, (size_t)tiles * (size_t)spans * columns * sizeof *partial);
    kernel<<<dim3((unsigned)tiles, (unsigned)spans), BIAS_WARPS * WARP, 0, ctx->stream>>>(d, partial, ctx->arrivals, dy,
                                                                                          pre, N, OC, span);
    cudaCheck(cudaGetLastError());
}

static inline void matmul_backward_bias(BiasGrad d, const floatX* dy, int N, int OC, Context* ctx) {
    matmul_backward_bias_launch<BIAS_PLAIN>(d, (floatX*)dy, NULL, N, OC, ctx);
}

// dpre [N, OC] holds dy w and becomes (dy w) * gelu'(pre). d.b, if not NULL, gets the column sums of dpre.
static inline void matmul_gelu_backward_bias(BiasGrad d, floatX* dpre, const floatX* pre, int N, int OC, Gelu kind,
                                             Context* ctx) {
    if (!d.b) gelu_backward_start<SET>(dpre, dpre, pre, (size_t)N * (size_t)OC, kind, ctx);
    else if (kind == GELU_ERF) matmul_backward_bias_launch<BIAS_GELU_ERF>(d, dpre, pre, N, OC, ctx);
    else matmul_backward_bias_launch<BIAS_GELU_TANH>(d, dpre, pre, N, OC, ctx);
}

#endif
