/* Matmuls with GELU for Hopper, one kernel each. The epilogue (bias and GELU, or GELU's derivative and the sums of a
 * bias gradient) runs while the tensor cores work on the next tile. cuBLASLt has no epilogue for GELU_ERF and a slow one
 * for the sums.
 *
 *   forward          pre [M, N] = a [M, K] b^T + bias,  y = gelu(pre)         b [N, K]
 *   backward input   y [M, N] = (a [M, K] b) * gelu'(pre)                     b [K, N]
 *                    partial [row tiles, N] = column sums of y over 128 rows  NULL: not wanted
 *
 * Two blocks with the same 256 columns and adjacent 128 rows are a cluster. Each loads its rows of a, and half of b for
 * both, so that a byte from the L2 is multiplied by 256 rows: with smaller tiles the L2 is the limit. There is one block
 * per multiprocessor; clusters take tiles in turn, row after row, so that b stays in the L2 and a is read once. The
 * warpgroups of a block:
 *   0      producer: one thread loads tiles by TMA into a ring of three stages, 64 elements of K each
 *   1, 2   consumers: multiply 64 rows each with wgmma, add the bias, round, and write the result to shared memory
 *   3      epilogue: reads it there, applies GELU or its derivative, and stores whole rows of 512 bytes
 *
 *   stage full     TMA -> 1, 2               half of the tile's rows full     1 or 2 -> 3
 *   stage empty    1, 2 of both blocks -> 0  half of the tile's rows empty    3 -> 1 or 2
 *
 * A tile takes the tensor cores 16 K clocks. Warpgroup 3 has that long for its 32,768 elements and needs 3,500
 * instructions a warp for GELU_TANH, 8,600 for the derivative of GELU_ERF with its sums. While one consumer
 * rounds, the other has the tensor cores. The usual alternative (ping-pong: two consumers take tiles of 64 x 256 in turn,
 * each with its own epilogue) would read half as much again from the L2.
 *
 * Element: the type of a and b. A row of a tile has 128 bytes; GemmElement has the sizes that depend on the type.
 * Numerics: sums in fp32 in the order of k; pre and the product before the derivative are rounded to floatX, as when
 * GELU is a kernel of its own. A sum of columns adds numbers before they are rounded, in an order that the shape gives.
 * Any M. N and K are multiples of 8, pointers of 16 bytes; other GPUs, types and shapes are refused (return value 0). */
#ifndef LLMC_OPS_MATMUL_HOPPER_CUH
#define LLMC_OPS_MATMUL_HOPPER_CUH

#include "llmc/device/cublaslt.cuh"
#include "llmc/device/ptx/mbarrier.cuh"
#include "llmc/device/ptx/tma.cuh"
#include "llmc/device/ptx/wgmma.cuh"
#include "llmc/ops/common/activation.h"
#include "llmc/ops/common/tile_sums.cuh"

typedef struct {
    floatX *y, *pre;  // pre: forward written, backward read
    const floatX* bias;
    float* partial;
    int M, N, K;
} GemmProduct;

#ifdef __CUDACC__

enum { GEMM_M = 128, GEMM_N = 256, GEMM_SUM_WARPS = 16 };  // a block's tile

// Scratch for the sums of N columns.
static inline size_t gemm_partial_bytes(int M, int N) {
    return (size_t)((M + GEMM_M - 1) / GEMM_M) * (size_t)N * sizeof(float);
}

#endif

#if defined(__CUDACC__) && (defined(PRECISION_BF16) || defined(PRECISION_FP16))

enum {
    GEMM_CLUSTER = 2,
    GEMM_STAGES = 3,
    GEMM_BLOCK = 4 * WARPGROUP,
    GEMM_HALVES = 2,  // of a tile's rows, one for each warpgroup that multiplies
    GEMM_COLUMN_TILES = GEMM_N / TMA_BOX,
    GEMM_A_BYTES = GEMM_M * TMA_ROW_BYTES,
    GEMM_STAGE_BYTES = GEMM_A_BYTES + GEMM_N * TMA_ROW_BYTES,
    GEMM_HALF_BYTES = GEMM_COLUMN_TILES * TMA_TILE_BYTES,
    GEMM_BIASES = GEMM_STAGES + 1,  // tiles whose biases are in shared memory
    GEMM_BIAS_BYTES = GEMM_N * (int)sizeof(floatX),
    GEMM_SUM_BYTES = 4 * GEMM_N * (int)sizeof(float),
    GEMM_TURN = 4,  // rows that a warp of group 3 has in flight
    GEMM_BARRIERS = 2 * GEMM_STAGES + 2 * GEMM_HALVES,
    // Everything is in dynamic shared memory, which begins on a multiple of 16 bytes.
    GEMM_BYTES = 1024 + GEMM_STAGES * GEMM_STAGE_BYTES + GEMM_HALVES * GEMM_HALF_BYTES + GEMM_BIASES * GEMM_BIAS_BYTES +
                 2 * GEMM_SUM_BYTES + 8 * GEMM_BARRIERS
};
static_assert(GEMM_BYTES <= 227 << 10, "shared memory of a block");
static_assert(GEMM_M == GEMM_HALVES * TMA_BOX && GEMM_COLUMN_TILES % GEMM_CLUSTER == 0, "whole boxes");

// What depends on the type of a and b: the summed elements of a stage, and of a wgmma.
template <typename Element> struct GemmElement {
    static constexpr int DEPTH = TMA_ROW_BYTES / (int)sizeof(Element), STEPS = TMA_ROW_BYTES / 32;
};

#if HOPPER_CODE
// Addresses in shared memory; barriers are arrays of 8 bytes each.
struct GemmShared {
    uint32_t stages, halves, bias, sums, full, empty, half_full, half_empty;
};

__device__ __forceinline__ GemmShared gemm_shared(const void* memory) {
    GemmShared m;
    m.stages = ((uint32_t)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
    m.halves = m.stages + GEMM_STAGES * GEMM_STAGE_BYTES;
    m.bias = m.halves + GEMM_HALVES * GEMM_HALF_BYTES;
    m.sums = m.bias + GEMM_BIASES * GEMM_BIAS_BYTES;
    m.full = m.sums + 2 * GEMM_SUM_BYTES;
    m.empty = m.full + 8 * GEMM_STAGES;
    m.half_full = m.empty + 8 * GEMM_STAGES;
    m.half_empty = m.half_full + 8 * GEMM_HALVES;
    return m;
}

// The tiles of this block: `number` counts them. Both blocks of a cluster have the same number of tiles; of the second,
// the last may have no rows.
struct GemmTile {
    int number, row, column;
};

__device__ __forceinline__ int gemm_columns(const GemmProduct& z) { return (z.N + GEMM_N - 1) / GEMM_N; }

__device__ __forceinline__ bool gemm_tile(GemmTile* t, const GemmProduct& z) {
    int columns = gemm_columns(z), pair = blockIdx.x / GEMM_CLUSTER + t->number * (gridDim.x / GEMM_CLUSTER);
    int first = pair / columns * GEMM_CLUSTER * GEMM_M;
    t->row = first + blockIdx.x % GEMM_CLUSTER * GEMM_M;
    t->column = pair % columns * GEMM_N;
    return first < z.M;
}

template <typename Element> __device__ __forceinline__ int gemm_steps(const GemmProduct& z) {
    return (z.K + GemmElement<Element>::DEPTH - 1) / GemmElement<Element>::DEPTH;
}

// Bring this block's tile of pre into the L2: group 3 reads it when the product is complete.
__device__ __forceinline__ void gemm_prefetch(const CUtensorMap* pre, const GemmProduct& z, const GemmTile& t) {
#pragma unroll
    for (int i = 0; i < GEMM_HALVES * GEMM_COLUMN_TILES; i++) {
        int r = t.row + i / GEMM_COLUMN_TILES * TMA_BOX, c = t.column + i % GEMM_COLUMN_TILES * TMA_BOX;
        if (r < z.M && c < z.N) tma_prefetch_3d(pre, c, 0, r);
    }
}

// One thread: load the tiles of a, this block's half of b into both blocks, and with a tile's first stage its bias.
template <typename Element, Direction PASS>
__device__ __forceinline__ void gemm_load(const GemmShared& m, const CUtensorMap* a, const CUtensorMap* b,
                                          const CUtensorMap* pre, const GemmProduct& z) {
    constexpr int PART = GEMM_COLUMN_TILES / GEMM_CLUSTER, DEPTH = GemmElement<Element>::DEPTH;
    constexpr uint16_t ALL = (1 << GEMM_CLUSTER) - 1;
    int steps = gemm_steps<Element>(z), use = 0, first = blockIdx.x % GEMM_CLUSTER * PART;
    GemmTile t = {0, 0, 0};
    for (; gemm_tile(&t, z); t.number++) {
        if (PASS == BACKWARD) gemm_prefetch(pre, z, t);
#pragma unroll 1
        for (int k = 0; k < steps; k++, use++) {
            uint32_t stage = use % GEMM_STAGES, to = m.stages + stage * GEMM_STAGE_BYTES, full = m.full + 8 * stage;
            uint32_t bias_bytes = PASS == FORWARD && z.bias && k == 0 ? 2u * (uint32_t)min(GEMM_N, z.N - t.column) : 0;
            mbarrier_wait(m.empty + 8 * stage, ~(use / GEMM_STAGES) & 1);
            mbarrier_arrive_expect_tx(full, GEMM_STAGE_BYTES + bias_bytes);
            if (bias_bytes)
                bulk_copy_g2s(m.bias + t.number % GEMM_BIASES * GEMM_BIAS_BYTES, z.bias + t.column, bias_bytes, full);
#pragma unroll
            for (int i = 0; i < GEMM_HALVES; i++)
                tma_load_3d(to + i * TMA_TILE_BYTES, a, k * DEPTH, 0, t.row + i * TMA_BOX, full);
#pragma unroll
            for (int i = 0; i < PART; i++) {
                uint32_t tile = to + GEMM_A_BYTES + (first + i) * TMA_TILE_BYTES;
                int column = t.column + (first + i) * TMA_BOX;
                if constexpr (PASS == FORWARD) tma_load_3d_multicast(tile, b, k * DEPTH, 0, column, full, ALL);
                else tma_load_3d_multicast(tile, b, column, 0, k * DEPTH, full, ALL);
            }
        }
    }
}

// A warp has read a stage: signal both blocks, because both fill it.
__device__ __forceinline__ void gemm_release(const GemmShared& m, int use) {
    int lane = threadIdx.x % WARP;
    if (lane < GEMM_CLUSTER) mbarrier_arrive_at(m.empty + 8 * (use % GEMM_STAGES), (uint32_t)lane);
}

// Add the bias, round, and write 64 rows and 128 columns of the tile to shared memory.
template <Direction PASS>
__device__ __forceinline__ void gemm_write_shared(uint32_t boxes, uint32_t bias, const float (&c)[16][4]) {
    int lane = threadIdx.x % WARP, warp_row = threadIdx.x % WARPGROUP / WARP * 16;
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int side = 0; side < 2; side++) {
            float add[2] = {0, 0};
            if constexpr (PASS == FORWARD) {
                uint32_t at = bias + (uint32_t)(((j + side) * 8 + lane % 4 * 2) * (int)sizeof(floatX));
                to_floats(add, *(const Vector<floatX, 2>*)__cvta_shared_to_generic(at));
            }
#pragma unroll
            for (int below = 0; below < 2; below++)
                packed[2 * side + below] =
                    pack_floatx2(c[j + side][2 * below] + add[0], c[j + side][2 * below + 1] + add[1]);
        }
        stmatrix_tile(boxes + j / 8 * TMA_TILE_BYTES, warp_row, j / 2 % 4, packed);
    }
}

// A consumer: multiply its 64 rows of each tile, 128 columns at a time. A wgmma of 256 columns needs more registers
// than the threads of a block of four warpgroups begin with.
template <typename Element, Direction PASS>
__device__ __forceinline__ void gemm_multiply(const GemmShared& m, const GemmProduct& z, int group) {
    constexpr Major B = PASS == FORWARD ? K_MAJOR : MN_MAJOR;
    constexpr uint32_t STEP_B = B == K_MAJOR ? WGMMA_STEP_K_MAJOR : WGMMA_STEP_MN_MAJOR;
    int steps = gemm_steps<Element>(z), use = 0;
    GemmTile t = {0, 0, 0};
    for (; gemm_tile(&t, z); t.number++) {
        float c[2][16][4];
        for (int k = 0; k < steps; k++, use++) {
            uint32_t stage = use % GEMM_STAGES, at = m.stages + stage * GEMM_STAGE_BYTES;
            uint32_t left = wgmma_descriptor(at + group * TMA_TILE_BYTES, 0);
            uint32_t right = wgmma_descriptor(at + GEMM_A_BYTES, TMA_TILE_BYTES), next = 2 * TMA_TILE_BYTES >> 4;
            mbarrier_wait(m.full + 8 * stage, (use / GEMM_STAGES) & 1);
            fence_operand(c[0]), fence_operand(c[1]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < GemmElement<Element>::STEPS; i++)
#pragma unroll
                for (uint32_t side = 0; side < 2; side++)
                    wgmma_ss<K_MAJOR, B>(c[side], left + i * WGMMA_STEP_K_MAJOR, right + side * next + i * STEP_B,
                                         k > 0 || i > 0);
            wgmma_commit_group();
            if (k == 0) continue;
            wgmma_wait_group<1>();  // the stage before is no longer read
            gemm_release(m, use - 1);
        }
        wgmma_wait_group<0>();
        fence_operand(c[0]), fence_operand(c[1]);
        gemm_release(m, use - 1);
        mbarrier_wait(m.half_empty + 8 * group, ~t.number & 1);
        uint32_t half = m.halves + group * GEMM_HALF_BYTES, bias = m.bias + t.number % GEMM_BIASES * GEMM_BIAS_BYTES;
        gemm_write_shared<PASS>(half, bias, c[0]);
        gemm_write_shared<PASS>(half + 2 * TMA_TILE_BYTES, bias + GEMM_BIAS_BYTES / 2, c[1]);
        fence_proxy_async_shared();  // of the bias too, where TMA writes another one
        mbarrier_arrive(m.half_full + 8 * group);
    }
}

// Load pre of GEMM_TURN rows of a warp, every fourth from `row` on. Indices past the end are clamped.
__device__ __forceinline__ void gemm_load_pre(Vector<floatX> (&x)[GEMM_TURN], const GemmProduct& z, int row,
                                              int column) {
#pragma unroll
    for (int i = 0; i < GEMM_TURN; i++) {
        int r = min(row + 4 * i, z.M - 1), c = min(column, z.N - 8);
        x[i] = load128_streaming(z.pre + (size_t)r * (size_t)z.N + c);
        keep_packed(&x[i]);
    }
}

// The four warps of group 3, with the sums [8] of each lane's columns: add them, and store those of the tile.
__device__ __forceinline__ void gemm_store_sums(const GemmShared& m, const GemmProduct& z, const GemmTile& t,
                                                const float (&sum)[8]) {
    int thread = threadIdx.x % WARPGROUP, lane = thread % WARP;
    // Two buffers in turn: one barrier is enough.
    float* all = (float*)__cvta_shared_to_generic(m.sums + t.number % 2 * GEMM_SUM_BYTES);  // [warps, GEMM_N]
#pragma unroll
    for (int e = 0; e < 8; e++) all[thread / WARP * GEMM_N + lane * 8 + e] = sum[e];
    named_barrier_sync(1, WARPGROUP);
#pragma unroll
    for (int c = thread; c < GEMM_N; c += WARPGROUP) {
        float total = all[c];
#pragma unroll
        for (int w = 1; w < 4; w++) total += all[w * GEMM_N + c];
        if (t.row < z.M && t.column + c < z.N)
            z.partial[(size_t)(t.row / GEMM_M) * (size_t)z.N + (size_t)(t.column + c)] = total;
    }
}

// The epilogue: apply GELU or its derivative to what the consumers wrote. A warp takes every fourth row, a lane eight
// columns.
template <Gelu KIND, Direction PASS> __device__ __forceinline__ void gemm_epilogue(const GemmShared& m, GemmProduct z) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
    const int TURNS = TMA_BOX / (4 * GEMM_TURN);  // of a half
    GemmTile t = {0, 0, 0}, next = {.number = 1};
    Vector<floatX> ahead[GEMM_TURN];
    bool more = gemm_tile(&t, z);
    if (PASS == BACKWARD) gemm_load_pre(ahead, z, t.row + warp, t.column + lane * 8);
    for (; more; t = next, next.number++) {
        float sum[8] = {0};
        int column = t.column + lane * 8;
        more = gemm_tile(&next, z);
#pragma unroll 1
        for (int turn = 0; turn < GEMM_HALVES * TURNS; turn++) {
            int half = turn / TURNS, begin = turn * 4 * GEMM_TURN + warp, is_last = turn + 1 == GEMM_HALVES * TURNS;
            Vector<floatX> pre[GEMM_TURN];
#pragma unroll
            for (int i = 0; i < GEMM_TURN && PASS == BACKWARD; i++) pre[i] = ahead[i];
            if (PASS == BACKWARD)
                gemm_load_pre(ahead, z, is_last ? next.row + warp : t.row + begin + 4 * GEMM_TURN,
                              is_last ? next.column + lane * 8 : column);
            if (turn % TURNS == 0) mbarrier_wait(m.half_full + 8 * half, t.number & 1);
#pragma unroll
            for (int i = 0; i < GEMM_TURN; i++) {
                int r = begin + 4 * i;
                uint32_t box = m.halves + half * GEMM_HALF_BYTES + lane / 8 * TMA_TILE_BYTES;
                int4 bits = ld_shared_v4(swizzle_128b(box, r % TMA_BOX, lane % 8));
                size_t at = (size_t)(t.row + r) * (size_t)z.N + (size_t)column;
                bool exists = t.row + r < z.M && column < z.N;
                float f[8], x[8];
                to_floats(f, *(const Vector<floatX>*)&bits);
                if constexpr (PASS == FORWARD) {
                    if (exists) *(int4*)(z.pre + at) = bits;
#pragma unroll
                    for (int e = 0; e < 8; e++) f[e] = gelu_value(f[e], KIND);
                } else {
                    to_floats(x, pre[i]);  // past the end of M the product is 0
#pragma unroll
                    for (int e = 0; e < 8; e++) f[e] *= gelu_derivative(x[e], KIND), sum[e] += f[e];
                }
                if (exists) store128(z.y + at, from_floats<floatX>(f));
            }
            if (turn % TURNS < TURNS - 1) continue;
            __syncwarp();
            if (lane == 0) mbarrier_arrive(m.half_empty + 8 * half);
        }
        if (PASS == BACKWARD && z.partial) gemm_store_sums(m, z, t, sum);
    }
}
#endif

template <typename Element, Gelu KIND, Direction PASS>
__global__ void __launch_bounds__(GEMM_BLOCK, 1)
    matmul_hopper_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                         const __grid_constant__ CUtensorMap pre, GemmProduct z) {
#if HOPPER_CODE
    extern __shared__ int4 memory[];
    GemmShared m = gemm_shared(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < GEMM_STAGES; i++) {
            mbarrier_init(m.full + 8 * i, 1);
            mbarrier_init(m.empty + 8 * i, GEMM_CLUSTER * 2 * WARPGROUP / WARP);
        }
        for (int i = 0; i < GEMM_HALVES; i++) {
            mbarrier_init(m.half_full + 8 * i, WARPGROUP);
            mbarrier_init(m.half_empty + 8 * i, WARPGROUP / WARP);
        }
        fence_mbarrier_init();
    }
    if (PASS == FORWARD && !z.bias)
        for (int i = threadIdx.x; i < GEMM_BIASES * GEMM_BIAS_BYTES / 4; i += GEMM_BLOCK)
            st_shared_b32(m.bias + 4 * i, 0);
    cluster_sync();
    int group = warpgroup_index();
    if (group == 0) {
        warpgroup_reg_dealloc<40>();
        if (threadIdx.x == 0) gemm_load<Element, PASS>(m, &a, &b, &pre, z);
    } else if (group == 3) {
        warpgroup_reg_alloc<136>();
        gemm_epilogue<KIND, PASS>(m, z);
    } else {
        warpgroup_reg_alloc<168>();
        gemm_multiply<Element, PASS>(m, z, group - 1);
    }
    __syncwarp();
    cluster_sync();  // the other block may still fill this one's stages, or tell it that its own are empty
#endif
}

template <typename Element, Gelu KIND, Direction PASS>
static inline void matmul_hopper_start(GemmProduct z, const Element* a, const Element* b, Context* ctx) {
    int pairs = (int)blocks_for((size_t)z.M, GEMM_CLUSTER * GEMM_M) * (int)blocks_for((size_t)z.N, GEMM_N);
    unsigned clusters = (unsigned)min_int(pairs, ctx->multiprocessors / GEMM_CLUSTER);
    CUtensorMap map_a = tma_tensor_map(a, z.K, 1, z.M, z.K, ctx);
    CUtensorMap map_b =
        PASS == FORWARD ? tma_tensor_map(b, z.K, 1, z.N, z.K, ctx) : tma_tensor_map(b, z.N, 1, z.K, z.N, ctx);
    CUtensorMap map_pre = tma_tensor_map(z.pre, z.N, 1, z.M, z.N, ctx);
    kernel_allow_shared(matmul_hopper_kernel<Element, KIND, PASS>, GEMM_BYTES, ctx);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = GEMM_CLUSTER, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t launch = {.gridDim = clusters * GEMM_CLUSTER, .blockDim = GEMM_BLOCK};
    launch.dynamicSmemBytes = GEMM_BYTES, launch.stream = ctx->stream;
    launch.attrs = &cluster, launch.numAttrs = 1;
    cudaCheck(cudaLaunchKernelEx(&launch, matmul_hopper_kernel<Element, KIND, PASS>, map_a, map_b, map_pre, z));
}

// Whether these kernels run on this GPU.
static inline int matmul_hopper_runs(const Context* ctx) { return HOPPER_BUILD && ctx->capability == 90; }

static inline int gemm_supports(const GemmProduct* z, const floatX* a, const floatX* b, Context* ctx) {
    const void* pointers[] = {z->y, z->pre, z->bias, a, b};
    if (!matmul_hopper_runs(ctx) || z->N % 8 || z->K % 8) return 0;
    for (size_t i = 0; i < COUNT_OF(pointers); i++)
        if (pointers[i] && pointer_alignment(pointers[i]) < 16) return 0;
    return 1;
}

// pre = a b^T + bias (or NULL), y = gelu(pre), if this GPU and shape are supported. Returns whether it did.
static inline int matmul_hopper_gelu_forward(GemmProduct z, const floatX* a, const floatX* b, Gelu kind, Context* ctx) {
    if (!gemm_supports(&z, a, b, ctx)) return 0;
    if (kind == GELU_ERF) matmul_hopper_start<floatX, GELU_ERF, FORWARD>(z, a, b, ctx);
    else matmul_hopper_start<floatX, GELU_TANH, FORWARD>(z, a, b, ctx);
    return 1;
}

// y = (a b) * gelu'(pre), and its column sums in d, likewise.
static inline int matmul_hopper_gelu_backward(GemmProduct z, BiasGrad d, const floatX* a, const floatX* b, Gelu kind,
                                              Context* ctx) {
    if (!gemm_supports(&z, a, b, ctx)) return 0;
    z.partial = d.b ? (float*)device_scratch(ctx, gemm_partial_bytes(z.M, z.N)) : NULL;
    if (kind == GELU_ERF) matmul_hopper_start<floatX, GELU_ERF, BACKWARD>(z, a, b, ctx);
    else matmul_hopper_start<floatX, GELU_TANH, BACKWARD>(z, a, b, ctx);
    if (!d.b) return 1;
    tile_sums<GEMM_SUM_WARPS>(d, z.partial, (int)blocks_for((size_t)z.M, GEMM_M), z.N, ctx);
    return 1;
}

#elif defined(__CUDACC__)

static inline int matmul_hopper_runs(const Context*) { return 0; }
static inline int matmul_hopper_gelu_forward(GemmProduct, const floatX*, const floatX*, Gelu, Context*) { return 0; }
static inline int matmul_hopper_gelu_backward(GemmProduct, BiasGrad, const floatX*, const floatX*, Gelu, Context*) {
    return 0;
}

#endif
#endif
