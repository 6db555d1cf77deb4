/* Dot interaction of DLRM: the pairwise dot products of a sample's feature vectors. The embedding gather is fused in.
 *
 *   forward    T = [bottom; table[rows[0]]; ...; table[rows[tables - 1]]]          one sample's vectors [tables + 1, E]
 *              z = [T_0 (E) | T_i . T_j for 0 <= j < i <= tables, at i (i - 1) / 2 + j | zeros up to `width`]
 *   backward   S_ij = S_ji = gradient of T_i . T_j, S_ii = 0;   dT = S T;   dT_0 += dz[0 .. E - 1]
 *              dbottom = dT_0 where bottom > 0, else 0: bottom is the output of a ReLU
 *              dvectors = dT_1 .. dT_tables: a row for each lookup, which embedding_rows.h sums
 *
 * Shapes: bottom, dbottom [B, E], table [all rows, E], rows [B, tables] row numbers in `table`, z, dz [B, width],
 * dvectors [B, tables, E]. All outputs are SET. Vectors are gathered in both passes: keeping them would cost as much.
 * dtypes: floatX; rows int.
 * Numerics: dot products and dT accumulate in double (CPU), fp32 (GPU, on tensor cores if floatX has 16 bits).
 * Errors: row numbers must be in range; whoever loads a batch checks them.
 * Source: Naumov et al., arXiv 1906.00091; layout as in NVIDIA's DeepLearningExamples. */
#ifndef DEV_RECSYS_OPS_INTERACTION_H
#define DEV_RECSYS_OPS_INTERACTION_H

#include "llmc/device/scope.h"
#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#include "llmc/device/ptx/mma.cuh"
#endif

enum { INTERACTION_MOST_VECTORS = 64 };  // of a sample, on the CPU

typedef struct {
    int B, tables, E, width;
} InteractionShape;

#define INTERACTION_PAIRS(tables) ((tables) * ((tables) + 1) / 2)
// Below the diagonal only. The backward pass multiplies the full symmetric matrix.
#define INTERACTION_FORWARD_FLOPS(s) (2.0 * (s).B * INTERACTION_PAIRS((s).tables) * (s).E)
#define INTERACTION_BACKWARD_FLOPS(s) (2 * INTERACTION_FORWARD_FLOPS(s))
#define INTERACTION_FORWARD_BYTES(s)                                                                                   \
    ((double)(s).B * ((((s).tables + 1.0) * (s).E + (s).width) * sizeof(floatX) + (s).tables * sizeof(int)))
#define INTERACTION_BACKWARD_BYTES(s)                                                                                  \
    ((double)(s).B * ((2 * ((s).tables + 1.0) * (s).E + (s).width) * sizeof(floatX) + (s).tables * sizeof(int)))

// The width of z: the bottom vector and all pairs, rounded up to a multiple of 8 elements.
static inline int interaction_width(int tables, int E) {
    return (int)round_up((size_t)(E + INTERACTION_PAIRS(tables)), 8);
}

// ---------------------------------------------------------------------------------------------------------
// References, which the CPU runs too: a sample belongs to one thread

// Set T [tables + 1] to the vectors of sample b.
static inline void interaction_vectors(const real** T, const real* bottom, const real* table, const int* rows,
                                       InteractionShape s, int b) {
    CHECK(s.tables < INTERACTION_MOST_VECTORS);
    T[0] = bottom + (size_t)b * (size_t)s.E;
    for (int t = 0; t < s.tables; t++)
        T[t + 1] = table + (size_t)rows[(size_t)b * (size_t)s.tables + (size_t)t] * (size_t)s.E;
}

static inline void interaction_forward_ref(real* z, const real* bottom, const real* table, const int* rows,
                                           InteractionShape s) {
#pragma omp parallel for schedule(static)
    for (int b = 0; b < s.B; b++) {
        const real* T[INTERACTION_MOST_VECTORS];
        real* out = z + (size_t)b * (size_t)s.width;
        interaction_vectors(T, bottom, table, rows, s, b);
        memcpy(out, T[0], (size_t)s.E * sizeof *out);
        out += s.E;
        for (int i = 1; i <= s.tables; i++)
            for (int j = 0; j < i; j++) {
                double sum = 0;
                for (int e = 0; e < s.E; e++) sum += (double)T[i][e] * (double)T[j][e];
                *out++ = (real)sum;
            }
        while (out < z + (size_t)(b + 1) * (size_t)s.width) *out++ = 0;
    }
}

// What a backward pass reads and writes, and the same in full precision for the reference.
typedef struct {
    floatX *dbottom, *dvectors;
    const floatX *dz, *bottom, *table;
    const int* rows;
} InteractionBackward;

typedef struct {
    real *dbottom, *dvectors;
    const real *dz, *bottom, *table;
    const int* rows;
} InteractionBackwardRef;

static inline void interaction_backward_ref(InteractionBackwardRef g, InteractionShape s) {
#pragma omp parallel for schedule(static)
    for (int b = 0; b < s.B; b++) {
        const real *dz = g.dz + (size_t)b * (size_t)s.width, *pairs = dz + s.E, *T[INTERACTION_MOST_VECTORS];
        interaction_vectors(T, g.bottom, g.table, g.rows, s, b);
        for (int i = 0; i <= s.tables; i++) {
            double S[INTERACTION_MOST_VECTORS] = {0};  // row i
            size_t row = i ? (size_t)b * (size_t)s.tables + (size_t)i - 1 : (size_t)b;
            real* dT = (i ? g.dvectors : g.dbottom) + row * (size_t)s.E;
            for (int j = 0; j <= s.tables; j++) {
                int high = max_int(i, j), low = min_int(i, j);
                if (i != j) S[j] = (double)pairs[high * (high - 1) / 2 + low];
            }
            for (int e = 0; e < s.E; e++) {
                double sum = i ? 0 : (double)dz[e];
                for (int j = 0; j <= s.tables; j++) sum += S[j] * (double)T[j][e];
                dT[e] = i || T[0][e] > 0 ? (real)sum : 0;
            }
        }
    }
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU. With 16-bit floatX and vectors of 128 elements: one warp per sample on tensor cores. Else: simple kernels

enum {
    INTERACTION_WARPS = 4,               // samples of a block
    INTERACTION_E = 128,                 // of the fast kernels
    INTERACTION_VECTORS = 32,            // of a sample, padded with zeros
    INTERACTION_ROW = INTERACTION_E + 8  // of vectors in shared memory: ldmatrix without bank conflicts
};

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)
// Whether the fast kernels support the shape, and their shared memory: a sample's vectors and `rest` elements.
#define INTERACTION_IS_FAST(s) ((s).E == INTERACTION_E && (s).tables < INTERACTION_VECTORS)
#define INTERACTION_SHARED(rest)                                                                                       \
    (INTERACTION_WARPS * (INTERACTION_VECTORS * INTERACTION_ROW + (size_t)(rest)) * sizeof(floatX))

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
#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers

static inline void interaction_forward(floatX* z, const floatX* bottom, const floatX* table, const int* rows,
                                       InteractionShape s, Context* ctx) {
    Scope scope = scope_open(ctx, "interaction_forward", INTERACTION_FORWARD_FLOPS(s), INTERACTION_FORWARD_BYTES(s),
                             "B=%d tables=%d E=%d", s.B, s.tables, s.E);
#ifdef __CUDACC__
#ifdef INTERACTION_IS_FAST
    if (INTERACTION_IS_FAST(s))
        interaction_forward_kernel<<<blocks_for((size_t)s.B, INTERACTION_WARPS), INTERACTION_WARPS * WARP,
                                     INTERACTION_SHARED(s.width - s.E), ctx->stream>>>(z, bottom, table, rows, s);
    else
#endif
        interaction_forward_plain_kernel<<<blocks_for((size_t)s.B, 1), 128, 0, ctx->stream>>>(z, bottom, table, rows,
                                                                                              s);
    cudaCheck(cudaGetLastError());
#else
    interaction_forward_ref(z, bottom, table, rows, s);
#endif
    scope_close(&scope);
}

static inline void interaction_backward(InteractionBackward g, InteractionShape s, Context* ctx) {
    Scope scope = scope_open(ctx, "interaction_backward", INTERACTION_BACKWARD_FLOPS(s), INTERACTION_BACKWARD_BYTES(s),
                             "B=%d tables=%d E=%d", s.B, s.tables, s.E);
#ifdef __CUDACC__
#ifdef INTERACTION_IS_FAST
    if (INTERACTION_IS_FAST(s)) {
        size_t bytes = INTERACTION_SHARED(s.width);
        cudaCheck(
            cudaFuncSetAttribute(interaction_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
        interaction_backward_kernel<<<blocks_for((size_t)s.B, INTERACTION_WARPS), INTERACTION_WARPS * WARP, bytes,
                                      ctx->stream>>>(g, s);
    } else
#endif
        interaction_backward_plain_kernel<<<blocks_for((size_t)s.B, 1), 128, 0, ctx->stream>>>(g, s);
    cudaCheck(cudaGetLastError());
#else
    InteractionBackwardRef r = {g.dbottom, g.dvectors, g.dz, g.bottom, g.table, g.rows};
    interaction_backward_ref(r, s);
#endif
    scope_close(&scope);
}

#endif
