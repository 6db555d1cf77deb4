/* The GPU's part of interaction.h. With 16-bit floatX and vectors of 128 elements: one warp per sample on tensor cores.
 * Else: simple kernels. */
#ifndef DEV_RECSYS_OPS_INTERACTION_CUH
#define DEV_RECSYS_OPS_INTERACTION_CUH

#include "dev/recsys/ops/interaction.h"
#ifdef __CUDACC__

enum {
    INTERACTION_WARPS = 4,               // samples of a block
    INTERACTION_E = 128,                 // of the fast kernels
    INTERACTION_VECTORS = 32,            // of a sample, padded with zeros
    INTERACTION_ROW = INTERACTION_E + 8  // of vectors in shared memory: ldmatrix without bank conflicts
};

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)

// Start loading the sample's vectors T [VECTORS, ROW]; 16 lanes load a vector.
__device__ inline void interaction_load(floatX* T, const floatX* bottom, const floatX* table, const int* rows,
                                        InteractionShape s, size_t b) {
    int lane = threadIdx.x % WARP, mine = lane < s.tables ? rows[b * s.tables + lane] : 0;
    uint32_t shared = (uint32_t)__cvta_generic_to_shared(T);
#pragma unroll
    for (int pair = 0; pair < INTERACTION_VECTORS / 2; pair++) {
        int i = 2 * pair + lane / 16, row = __shfl_sync(ALL_LANES, mine, (i + WARP - 1) % WARP);
        const floatX* from = i == 0 ? bottom + b * INTERACTION_E : table + (size_t)row * INTERACTION_E;
        if (i > s.tables) from = bottom;
        cp_async_cg_16(shared + (i * INTERACTION_ROW + lane % 16 * 8) * sizeof(floatX), from + lane % 16 * 8,
                       i <= s.tables);
    }
}

// One warp per sample. The products of all vectors with each other are six tiles of 16 x 8 on and below the diagonal.
// Left and right operands have the same fragments.
static __global__ void __launch_bounds__(INTERACTION_WARPS* WARP)
    interaction_forward_kernel(floatX* z, const floatX* bottom, const floatX* table, const int* rows,
                               InteractionShape s) {
    extern __shared__ int4 shared[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, pairs = s.width - INTERACTION_E;
    size_t b = (size_t)blockIdx.x * INTERACTION_WARPS + warp;
    floatX *T = (floatX*)shared + warp * (INTERACTION_VECTORS * INTERACTION_ROW + pairs),
           *out = T + INTERACTION_VECTORS * INTERACTION_ROW;
    if (b >= (size_t)s.B) return;
    interaction_load(T, bottom, table, rows, s, b);
    for (int i = INTERACTION_PAIRS(s.tables) + lane; i < pairs; i += WARP) out[i] = from_float<floatX>(0);
    cp_async_wait_all();
    __syncwarp();
    float c[6][4] = {{0}};
    uint32_t at =
        (uint32_t)__cvta_generic_to_shared(T) + (lane % 16 * INTERACTION_ROW + lane / 16 * 8) * (int)sizeof(floatX);
#pragma unroll
    for (int k = 0; k < INTERACTION_E; k += 16) {
        uint32_t low[4], high[4];
        ldmatrix_x4(low, at + k * (int)sizeof(floatX));
        ldmatrix_x4(high, at + (16 * INTERACTION_ROW + k) * (int)sizeof(floatX));
        mma_m16n8k16(c[0], low, low[0], low[2]);
        mma_m16n8k16(c[1], low, low[1], low[3]);
        mma_m16n8k16(c[2], high, low[0], low[2]);
        mma_m16n8k16(c[3], high, low[1], low[3]);
        mma_m16n8k16(c[4], high, high[0], high[2]);
        mma_m16n8k16(c[5], high, high[1], high[3]);
    }
#pragma unroll
    for (int tile = 0; tile < 6; tile++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int i = (tile >= 2) * 16 + e / 2 * 8 + lane / 4;
            int j = (tile < 2 ? tile : tile - 2) * 8 + lane % 4 * 2 + e % 2;
            if (j < i && i <= s.tables) out[i * (i - 1) / 2 + j] = from_float<floatX>(c[tile][e]);
        }
    __syncwarp();
    floatX* row = z + b * s.width;
    if (lane < 16) store128(row + lane * 8, load128(T + lane * 8));
    for (int i = lane * 8; i < pairs; i += WARP * 8) store128(row + INTERACTION_E + i, load128(out + i));
}

// Four bytes of the left operand S = L + L^T, L the lower triangle of dz's products: S[row][column] and the next
// column.
__device__ inline uint32_t interaction_pairs(const floatX* pairs, int row, int column, int tables) {
    floatX x[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int high = max(row, column + e), low = min(row, column + e);
        x[e] = high != low && high <= tables ? pairs[high * (high - 1) / 2 + low] : from_float<floatX>(0);
    }
    uint32_t bits;
    memcpy(&bits, x, sizeof bits);
    return bits;
}

// One warp per sample: dT = S T, 16 columns at a time, which take the place of T's.
static __global__ void __launch_bounds__(INTERACTION_WARPS* WARP)
    interaction_backward_kernel(InteractionBackward g, InteractionShape s) {
    extern __shared__ int4 shared[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    size_t b = (size_t)blockIdx.x * INTERACTION_WARPS + warp;
    const int VECTORS = INTERACTION_VECTORS * INTERACTION_ROW;
    floatX *T = (floatX*)shared + warp * (VECTORS + s.width), *dz = T + VECTORS;
    if (b >= (size_t)s.B) return;
    interaction_load(T, g.bottom, g.table, g.rows, s, b);
    for (int i = lane * 8; i < s.width; i += WARP * 8) store128(dz + i, load128(g.dz + b * s.width + i));
    __syncwarp();
    uint32_t a[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[m][k][i] = interaction_pairs(dz + INTERACTION_E, m * 16 + i % 2 * 8 + lane / 4,
                                               k * 16 + i / 2 * 8 + lane % 4 * 2, s.tables);
    cp_async_wait_all();
    __syncwarp();
    uint32_t at =
        (uint32_t)__cvta_generic_to_shared(T) + (lane % 16 * INTERACTION_ROW + lane / 16 * 8) * (int)sizeof(floatX);
#pragma unroll
    for (int n = 0; n < INTERACTION_E; n += 16) {
        float c[2][2][4] = {{{0}}};  // rows 0 .. 15 and 16 .. 31, left and right eight columns
        uint32_t x[2][4];
#pragma unroll
        for (int k = 0; k < 2; k++) ldmatrix_x4_trans(x[k], at + (k * 16 * INTERACTION_ROW + n) * (int)sizeof(floatX));
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_m16n8k16(c[m][0], a[m][k], x[k][0], x[k][1]);
                mma_m16n8k16(c[m][1], a[m][k], x[k][2], x[k][3]);
            }
        if (lane < 4) {  // row 0 is the bottom vector
#pragma unroll
            for (int side = 0; side < 2; side++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int column = n + side * 8 + lane * 2 + e;
                    float sum = c[0][side][e] + to_float(dz[column]);
                    c[0][side][e] = to_float(T[column]) > 0 ? sum : 0;
                }
        }
        __syncwarp();  // all lanes have read these columns of T
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int side = 0; side < 2; side++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    floatX* to = T + (m * 16 + half * 8 + lane / 4) * INTERACTION_ROW + n + side * 8 + lane % 4 * 2;
                    *(uint32_t*)to = pack_floatx2(c[m][side][2 * half], c[m][side][2 * half + 1]);
                }
    }
    __syncwarp();
    floatX* out = g.dvectors + b * s.tables * INTERACTION_E;
    if (lane < 16) store128(g.dbottom + b * INTERACTION_E + lane * 8, load128(T + lane * 8));
    for (int i = 1 + lane / 16; i <= s.tables; i += 2)
        store128(out + (i - 1) * INTERACTION_E + lane % 16 * 8, load128(T + i * INTERACTION_ROW + lane % 16 * 8));
}

// Launch the fast kernels if they support the shape. Returns whether they do.
static inline int interaction_forward_tensor(floatX* z, const floatX* bottom, const floatX* table, const int* rows,
                                             InteractionShape s, Context* ctx) {
    size_t row = INTERACTION_VECTORS * INTERACTION_ROW + (size_t)(s.width - s.E);
    if (s.E != INTERACTION_E || s.tables >= INTERACTION_VECTORS) return 0;
    interaction_forward_kernel<<<blocks_for((size_t)s.B, INTERACTION_WARPS), INTERACTION_WARPS * WARP,
                                 INTERACTION_WARPS * row * sizeof(floatX), ctx->stream>>>(z, bottom, table, rows, s);
    return 1;
}

static inline int interaction_backward_tensor(InteractionBackward g, InteractionShape s, Context* ctx) {
    size_t row = INTERACTION_VECTORS * INTERACTION_ROW + (size_t)s.width,
           bytes = INTERACTION_WARPS * row * sizeof(floatX);
    if (s.E != INTERACTION_E || s.tables >= INTERACTION_VECTORS) return 0;
    cudaCheck(
        cudaFuncSetAttribute(interaction_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    interaction_backward_kernel<<<blocks_for((size_t)s.B, INTERACTION_WARPS), INTERACTION_WARPS * WARP, bytes,
                                  ctx->stream>>>(g, s);
    return 1;
}

#else
static inline int interaction_forward_tensor(floatX*, const floatX*, const floatX*, const int*, InteractionShape,
                                             Context*) {
    return 0;
}
static inline int interaction_backward_tensor(InteractionBackward, InteractionShape, Context*) { return 0; }
#endif

// ---------------------------------------------------------------------------------------------------------
// Any shape: one block per sample

__device__ inline const floatX* interaction_vector_of(const floatX* bottom, const floatX* table, const int* rows,
                                                      InteractionShape s, size_t b, int i) {
    return i ? table + (size_t)rows[b * s.tables + i - 1] * s.E : bottom + b * s.E;
}

// A thread computes every blockDim.x-th element of z.
static __global__ void interaction_forward_plain_kernel(floatX* z, const floatX* bottom, const floatX* table,
                                                        const int* rows, InteractionShape s) {
    size_t b = blockIdx.x;
    for (int k = threadIdx.x; k < s.width; k += blockDim.x) {
        float sum = k < s.E ? to_float(bottom[b * s.E + k]) : 0;
        int pair = k - s.E, i = 1;
        while (pair >= 0 && i <= s.tables && i * (i + 1) / 2 <= pair) i++;
        if (pair >= 0 && i <= s.tables) {
            const floatX *x = interaction_vector_of(bottom, table, rows, s, b, i),
                         *y = interaction_vector_of(bottom, table, rows, s, b, pair - i * (i - 1) / 2);
            for (int e = 0; e < s.E; e++) sum += to_float(x[e]) * to_float(y[e]);
        }
        z[b * s.width + k] = from_float<floatX>(sum);
    }
}

// A thread computes every blockDim.x-th element of dT.
static __global__ void interaction_backward_plain_kernel(InteractionBackward g, InteractionShape s) {
    size_t b = blockIdx.x;
    for (int k = threadIdx.x; k < (s.tables + 1) * s.E; k += blockDim.x) {
        int i = k / s.E, e = k % s.E;
        const floatX* dz = g.dz + b * s.width;
        float sum = i ? 0 : to_float(dz[e]);
        for (int j = 0; j <= s.tables; j++) {
            int high = max(i, j), low = min(i, j);
            if (i != j)
                sum += to_float(dz[s.E + high * (high - 1) / 2 + low]) *
                       to_float(interaction_vector_of(g.bottom, g.table, g.rows, s, b, j)[e]);
        }
        if (i) g.dvectors[(b * s.tables + i - 1) * s.E + e] = from_float<floatX>(sum);
        else g.dbottom[b * s.E + e] = from_float<floatX>(to_float(g.bottom[b * s.E + e]) > 0 ? sum : 0);
    }
}

// A thread clears every blockDim.x-th pair of two tables.
static __global__ void interaction_mask_kernel(floatX* z, InteractionShape s) {
    size_t first = (size_t)blockIdx.x * s.width;
    for (int i = 2; i <= s.tables; i++)
        for (int k = interaction_masked_begin(s, i) + threadIdx.x; k < interaction_masked_end(s, i); k += blockDim.x)
            z[first + k] = from_float<floatX>(0.0f);
}

static inline void interaction_mask(floatX* z, InteractionShape s, Context* ctx) {
    Scope scope = scope_open(ctx, "interaction_mask", 0, INTERACTION_MASK_BYTES(s), "B=%d tables=%d", s.B, s.tables);
    interaction_mask_kernel<<<blocks_for((size_t)s.B, 1), 32, 0, ctx->stream>>>(z, s);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

static inline void interaction_forward(floatX* z, const floatX* bottom, const floatX* table, const int* rows,
                                       InteractionShape s, Context* ctx) {
    Scope scope = scope_open(ctx, "interaction_forward", INTERACTION_FORWARD_FLOPS(s), INTERACTION_FORWARD_BYTES(s),
                             "B=%d tables=%d E=%d", s.B, s.tables, s.E);
    if (!interaction_forward_tensor(z, bottom, table, rows, s, ctx))
        interaction_forward_plain_kernel<<<blocks_for((size_t)s.B, 1), 128, 0, ctx->stream>>>(z, bottom, table, rows,
                                                                                              s);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

static inline void interaction_backward(InteractionBackward g, InteractionShape s, Context* ctx) {
    Scope scope = scope_open(ctx, "interaction_backward", INTERACTION_BACKWARD_FLOPS(s), INTERACTION_BACKWARD_BYTES(s),
                             "B=%d tables=%d E=%d", s.B, s.tables, s.E);
    if (!interaction_backward_tensor(g, s, ctx))
        interaction_backward_plain_kernel<<<blocks_for((size_t)s.B, 1), 128, 0, ctx->stream>>>(g, s);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

#endif
#endif
