/* layernorm_fp8: the residual forward pass of layernorm.h that also rounds y to E4M3, on the GPU. It saves what
 * quantize.h would read and write again.
 *
 * All outputs have the same bits as after residual_layernorm_forward() and quantize(): y is rounded to floatX, then
 * scaled and rounded to E4M3. If nothing reads y.v besides this copy and mean_bias_center(), only the rows of the means
 * are written.
 *
 * shapes     C is a multiple of 16, at most 1792; all pointers are aligned to 16 bytes. layernorm_fp8_takes(): whether
 *            this GPU has the shared memory. Np is N rounded up to 16; columns N to Np - 1 of y.q's transpose are zero.
 * bytes      N C (3 sizeof(floatX) + 2) with the transpose, plus the rows of y that are written
 * builds     only in bf16: layernorm_fp8_takes() is 0 in others. The CPU has no such kernel. */
#include "llmc/ops/layernorm/layernorm.h"  // before the guard: it includes this file

#ifndef LLMC_FP8_LAYERNORM_H
#define LLMC_FP8_LAYERNORM_H

#include "llmc/fp8/operand.h"

#ifdef __CUDACC__
#include "llmc/fp8/words.cuh"

// The rows of y that are written: all, or those that mean_bias_center() reads.
typedef enum { LAYERNORM_ALL_ROWS, LAYERNORM_MEAN_ROWS } LayerNormRows;

typedef struct {
    floatX* y;
    LayerNormRows rows;
    uint8_t *y8, *yt;   // yt NULL: not wanted
    Fp8Stats* stats;    // NULL: not wanted
    const real* scale;  // [1], a power of two, read on the device
} LayerNormFp8;

// The kernel: a block takes 32 rows, a warp 4 of them, one after the other. It writes a row's bytes to y8 and to shared
// memory. From there the block transposes them: a thread takes 4 columns of a piece of 16 rows, and two threads write
// the 32 bytes of a column, a whole sector of the transpose.

enum {
    LAYERNORM_FP8_THREADS = 256,
    LAYERNORM_FP8_ROWS = 32,   // 64 and 128 also work
    LAYERNORM_FP8_PIECE = 16,  // rows that a thread transposes
    LAYERNORM_FP8_PIECES = LAYERNORM_FP8_ROWS / LAYERNORM_FP8_PIECE,
    LAYERNORM_FP8_LONG = 56,  // elements of a thread in the longest rows
    LAYERNORM_FP8_COLUMNS = LAYERNORM_FP8_LONG * WARP
};
static_assert(LAYERNORM_FP8_PIECE == QUANTIZE_ALIGNMENT && WARP % LAYERNORM_FP8_PIECES == 0,
              "a piece is 16 bytes of the transpose");

// The first word of a row in shared memory. Pieces are shifted against each other, because the threads of a column read
// a row of each piece at the same time: the banks that a warp reads are all different.
HOST_DEVICE static inline int layernorm_fp8_row(int row, int C) {
    return row * (C / 4) + row / LAYERNORM_FP8_PIECE * (WARP / LAYERNORM_FP8_PIECES);
}

// Round row i of the block to E4M3. v, stats: from layernorm_forward_read(). The scale is read again for each row: in a
// register it would be one too many while a long row is read.
template <int E>
__device__ inline void layernorm_fp8_write(const LayerNormForward& a, const LayerNormFp8& out, const float* v,
                                           float2 stats, int i, unsigned* tile, QuantizeSeen* seen) {
    constexpr int W = Vector<floatX>::SIZE;
    static_assert(E / W == E / 8, "a thread writes 8 bytes");
    int first = (int)(threadIdx.x % WARP) * W, row = (int)blockIdx.x * LAYERNORM_FP8_ROWS + i;
    size_t start = (size_t)row * (size_t)a.C;
    float scale = (float)*out.scale;
    unsigned* to = tile + layernorm_fp8_row(i, a.C);
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
        float rounded[W];
        unsigned words[2];
        to_floats(rounded, y);
#pragma unroll
        for (int k = 0; k < W; k++) seen->amax = quantize_max(seen->amax, fabsf(rounded[k]));
#pragma unroll
        for (int k = 0; k < 2; k++) {
            words[k] = quantize_word<FP8_E4M3>(rounded + 4 * k, scale);
            seen->clipped += quantize_count(words[k], fp8_top(FP8_E4M3), 0x80808080u);
            seen->flushed += quantize_count(words[k], 0, 0x80808080u);
        }
        *(uint2*)(out.y8 + start + c) = make_uint2(words[0], words[1]);
        if (out.yt) *(uint2*)(to + c / 4) = make_uint2(words[0], words[1]);
    }
    if (first == 0) {
        a.stats.mean[row] = stats.x;
        a.stats.rstd[row] = stats.y;
    }
}

// Write the transpose of the block's rows, from row0 on.
__device__ inline void layernorm_fp8_transpose(uint8_t* yt, const unsigned* tile, int row0, int N, int C) {
    constexpr int PIECE = LAYERNORM_FP8_PIECE, PIECES = LAYERNORM_FP8_PIECES;
    size_t Np = (size_t)(N + QUANTIZE_ALIGNMENT - 1) / QUANTIZE_ALIGNMENT * QUANTIZE_ALIGNMENT;
    for (int i = threadIdx.x; i < C / 4 * PIECES; i += LAYERNORM_FP8_THREADS) {
        int column = 4 * (i / PIECES), row = PIECE * (i % PIECES);
        if (row0 + row >= N) continue;
        unsigned words[PIECE / 4][4];
#pragma unroll
        for (int j = 0; j < PIECE; j++)
            words[j / 4][j % 4] = tile[layernorm_fp8_row(row, C) + j * (C / 4) + column / 4];
#pragma unroll
        for (int j = 0; j < PIECE / 4; j++) transpose_bytes(words[j]);
#pragma unroll
        for (int k = 0; k < 4; k++)
            *(uint4*)(yt + (size_t)(column + k) * Np + row0 + row) =
                make_uint4(words[0][k], words[1][k], words[2][k], words[3][k]);
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
    for (int i = threadIdx.x / WARP; i < LAYERNORM_FP8_ROWS; i += WARPS) {
        if (row0 + i < a.N) {
            float v[E];
            int first = (int)(threadIdx.x % WARP) * W;
            float2 stats = layernorm_forward_read<W, E, WARP, BRANCH>(v, a, row0 + i, first);
            layernorm_fp8_write<E>(a, out, v, stats, i, tile, &seen);
        } else if (out.yt)
            for (int k = threadIdx.x % WARP; k < a.C / 4; k += WARP) tile[layernorm_fp8_row(i, a.C) + k] = 0;
    }
    if (out.stats) quantize_report(out.stats, seen);
    if (!out.yt) return;
    __syncthreads();
    layernorm_fp8_transpose(out.yt, tile, row0, a.N, a.C);
}

// Dynamic shared memory for a tile; quantize_report() has a few bytes of static memory.
static inline size_t layernorm_fp8_shared_bytes(int C) {
    return sizeof(unsigned) * (size_t)layernorm_fp8_row(LAYERNORM_FP8_ROWS, C);
}

static inline int layernorm_fp8_takes(int C, const Context* ctx) {
    return fp8_is_built() && C > 0 && C % QUANTIZE_ALIGNMENT == 0 && C <= LAYERNORM_FP8_COLUMNS &&
           layernorm_fp8_shared_bytes(C) + 1024 <= ctx->shared_of_block;
}

// Choose the kernel by the number of channels, and launch it.
template <LayerNormBranch BRANCH>
static inline void layernorm_fp8_launch(LayerNormForward a, LayerNormFp8 out, Context* ctx) {
    if constexpr (fp8_is_built()) {
        auto kernel = layernorm_forward_fp8_kernel<LAYERNORM_FP8_LONG, BRANCH>;
        if (a.C <= 24 * WARP) kernel = layernorm_forward_fp8_kernel<24, BRANCH>;
        else if (a.C <= 32 * WARP) kernel = layernorm_forward_fp8_kernel<32, BRANCH>;
        size_t shared = out.yt ? layernorm_fp8_shared_bytes(a.C) : 0;
        kernel_allow_shared(kernel, shared, ctx);
        kernel<<<blocks_for((size_t)a.N, LAYERNORM_FP8_ROWS), LAYERNORM_FP8_THREADS, shared, ctx->stream>>>(a, out);
        cudaCheck(cudaGetLastError());
    }
}

// Less than layernorm moves: some rows of y, and y8 and yt instead of y.
static inline double layernorm_fp8_bytes(LayerNormFp8 out, Rows size) {
    double rows = out.rows == LAYERNORM_ALL_ROWS ? size.N : mean_bias_rows(size.N);
    double saved = ((double)size.N - rows) * size.C * sizeof(floatX);
    return RESIDUAL_LAYERNORM_FORWARD_BYTES(size.N, size.C) - saved + (out.yt ? 2.0 : 1.0) * size.N * size.C;
}

// residual_layernorm_forward() of an operand with a copy. Returns 0, and does nothing, if no kernel does both.
COMPILED_IF_CALLED static inline int residual_layernorm_forward_fp8(Operand y, ResidualBranch branch,
                                                                    LayerNormStats stats, const floatX* x, LayerNorm p,
                                                                    Rows size, real eps, Context* ctx) {
    const Fp8Linear* f = y.q->layer;
    if (f->shared->calibrates || !layernorm_fp8_takes(size.C, ctx)) return 0;
    QuantizeOutput to = fp8_copy_output(y.q);
    LayerNormFp8 out = {.y = y.v,
                        .rows = to.yt && !y.q->v_is_read ? LAYERNORM_MEAN_ROWS : LAYERNORM_ALL_ROWS,
                        .y8 = to.y,
                        .yt = to.yt,
                        .stats = fp8_count(f, FP8_X, size.N, size.C),
                        .scale = to.scale};
    CHECK(((uintptr_t)x | (uintptr_t)out.y | (uintptr_t)out.y8 | (uintptr_t)out.yt) % 16 == 0);
    Scope scope = scope_open(ctx, "residual_layernorm_forward_fp8", RESIDUAL_LAYERNORM_FORWARD_FLOPS(size.N, size.C),
                             layernorm_fp8_bytes(out, size), "N=%d C=%d", size.N, size.C);
    LayerNormForward a = layernorm_forward_args(y.v, stats, x, p, size, eps);
    a.r = branch.r, a.dropout = dropout_rows(branch.dropout);
    if (branch.dropout.threshold) layernorm_fp8_launch<LAYERNORM_RESIDUAL_DROPOUT>(a, out, ctx);
    else layernorm_fp8_launch<LAYERNORM_RESIDUAL>(a, out, ctx);
    scope_close(&scope);
    y.q->from = quantize_plain(y.v);
    return 1;
}

#endif
#endif
