/* matmul_relu.h's products on Hopper, in one kernel each: bias and ReLU, or the mask of the layer below and its bias gradient,
 * are done while the tensor cores work on the next tile.
 *
 *   forward          d [M, N] = relu(a [M, K] b^T + bias)          b [N, K]
 *   backward input   d [M, N] = a [M, K] b where h > 0, else 0     b [K, N];  sums [N] = column sums of d
 *                    h NULL: no mask and no sums
 *
 * A block per multiprocessor takes tiles of 128 rows and 8 J columns, always the same columns. Its four warpgroups: one
 * thread of the first loads tiles by TMA; the second and third multiply, 64 rows each; the fourth stores what they leave in
 * shared memory, and adds columns in registers until the end.
 * Numerics: sums in fp32. Column sums are of rounded values, in an order that depends on the shape and the number of
 * multiprocessors. N and K are multiples of 8, pointers of 16 bytes. */
#ifndef DEV_RECSYS_OPS_MATMUL_RELU_HOPPER_CUH
#define DEV_RECSYS_OPS_MATMUL_RELU_HOPPER_CUH

#include "llmc/device/ptx/mbarrier.cuh"
#include "llmc/device/ptx/tma.cuh"
#include "llmc/device/ptx/wgmma.cuh"
#include "llmc/ops/matmul/matmul.h"

#if defined(__CUDACC__) && (defined(PRECISION_BF16) || defined(PRECISION_FP16))

enum {
    RELU_M = 128,
    RELU_K = TMA_BOX,
    RELU_STAGES = 3,
    RELU_BLOCK = 4 * WARPGROUP,
    RELU_LEAST_ROWS = 1024  // fewer leave most of the GPU idle
};

// HALVES: columns of a tile in units of 128.
template <int HALVES> struct ReluTile {
    static constexpr int N = 128 * HALVES, COLUMN_TILES = 2 * HALVES;
    static constexpr uint32_t A_BYTES = 2 * TMA_TILE_BYTES, STAGE_BYTES = A_BYTES + COLUMN_TILES * TMA_TILE_BYTES;
    static constexpr uint32_t BYTES = RELU_STAGES * STAGE_BYTES + 2 * COLUMN_TILES * TMA_TILE_BYTES + 1024;
};

typedef struct {
    floatX* d;
    const floatX *bias, *h;
    float* sums;
    int M, N, K;
    // Set by the launcher.
    float* partial;  // [row blocks * warps of a column, N]
    unsigned* arrivals;
    int column_tiles;
} ReluProduct;

// Addresses in shared memory: stages of a and b, the finished tile [row half][64 columns], barriers.
struct ReluShared {
    uint32_t stages, tile, full, empty, tile_full, tile_empty;
};

#if HOPPER_CODE
// One thread: load the tiles of a and b.
template <int HALVES, Major B>
__device__ __forceinline__ void relu_produce(const ReluShared& m, const CUtensorMap* a, const CUtensorMap* b,
                                             const ReluProduct& z, int first_tile, int column) {
    typedef ReluTile<HALVES> F;
    int steps = (z.K + RELU_K - 1) / RELU_K, rows = gridDim.x / z.column_tiles, use = 0;
    for (int row = first_tile * RELU_M; row < z.M; row += rows * RELU_M)
        for (int k = 0; k < steps; k++, use++) {
            uint32_t stage = use % RELU_STAGES, to = m.stages + stage * F::STAGE_BYTES, full = m.full + 8 * stage;
            mbarrier_wait(m.empty + 8 * stage, ~(use / RELU_STAGES) & 1);
            mbarrier_arrive_expect_tx(full, F::STAGE_BYTES);
#pragma unroll
            for (int i = 0; i < 2; i++) tma_load_3d(to + i * TMA_TILE_BYTES, a, k * RELU_K, 0, row + i * TMA_BOX, full);
#pragma unroll
            for (int i = 0; i < F::COLUMN_TILES; i++) {
                uint32_t tile = to + F::A_BYTES + i * TMA_TILE_BYTES;
                if constexpr (B == K_MAJOR) tma_load_3d(tile, b, k * RELU_K, 0, column + i * TMA_BOX, full);
                else tma_load_3d(tile, b, column + i * TMA_BOX, 0, k * RELU_K, full);
            }
        }
}

// A warpgroup: multiply its 64 rows of each tile, and leave them in shared memory.
template <int HALVES, Major B, bool FORWARD_PASS>
__device__ __forceinline__ void relu_consume(const ReluShared& m, const ReluProduct& z, const float* bias, int group,
                                             int first_tile) {
    typedef ReluTile<HALVES> F;
    int steps = (z.K + RELU_K - 1) / RELU_K, rows = gridDim.x / z.column_tiles, use = 0, tiles = 0;
    int lane = threadIdx.x % WARP, warp_row = threadIdx.x % WARPGROUP / WARP * 16;
    constexpr uint32_t STEP_B = B == K_MAJOR ? WGMMA_STEP_K_MAJOR : WGMMA_STEP_MN_MAJOR;
    for (int row = first_tile * RELU_M; row < z.M; row += rows * RELU_M, tiles++) {
        float c[HALVES][16][4];
        for (int k = 0; k < steps; k++, use++) {
            uint32_t stage = use % RELU_STAGES, at = m.stages + stage * F::STAGE_BYTES;
            uint32_t left = wgmma_descriptor(at + group * TMA_TILE_BYTES, 0);
            mbarrier_wait(m.full + 8 * stage, (use / RELU_STAGES) & 1);
#pragma unroll
            for (int half = 0; half < HALVES; half++) fence_operand(c[half]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < RELU_K / 16; i++)
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
                    uint32_t right = wgmma_descriptor(at + F::A_BYTES + half * 2 * TMA_TILE_BYTES, TMA_TILE_BYTES);
                    wgmma_ss<K_MAJOR, B>(c[half], left + i * WGMMA_STEP_K_MAJOR, right + i * STEP_B, k > 0 || i > 0);
                }
            wgmma_commit_group();
            if (k == 0) continue;
            wgmma_wait_group<1>();  // the stage before is no longer read
            if (lane == 0) mbarrier_arrive(m.empty + 8 * ((use - 1) % RELU_STAGES));
        }
        wgmma_wait_group<0>();
#pragma unroll
        for (int half = 0; half < HALVES; half++) fence_operand(c[half]);
        if (lane == 0) mbarrier_arrive(m.empty + 8 * ((use - 1) % RELU_STAGES));
        mbarrier_wait(m.tile_empty, ~tiles & 1);
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int j = 0; j < 16; j += 2) {
                float x[2][4];
#pragma unroll
                for (int side = 0; side < 2; side++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        x[side][e] = c[half][j + side][e];
                        if constexpr (FORWARD_PASS)
                            x[side][e] =
                                fmaxf(x[side][e] + bias[half * 128 + (j + side) * 8 + lane % 4 * 2 + e % 2], 0);
                    }
                uint32_t packed[4] = {pack_floatx2(x[0][0], x[0][1]), pack_floatx2(x[0][2], x[0][3]),
                                      pack_floatx2(x[1][0], x[1][1]), pack_floatx2(x[1][2], x[1][3])};
                stmatrix_tile(m.tile + (group * F::COLUMN_TILES + half * 2 + j / 8) * TMA_TILE_BYTES, warp_row,
                              j / 2 % 4, packed);
            }
        mbarrier_arrive(m.tile_full);
    }
}

// Add the partial sums in their order, in the last block to arrive for these columns. `rows`: partial sums of a column.
__device__ __forceinline__ void relu_finish_sums(const ReluProduct& z, int column, int width, int rows) {
    __shared__ bool last;
    int thread = threadIdx.x % WARPGROUP;
    unsigned blocks = gridDim.x / z.column_tiles, *arrivals = z.arrivals + column / width;
    __threadfence();
    named_barrier_sync(1, WARPGROUP);
    if (thread == 0) last = atomicInc(arrivals, blocks - 1) == blocks - 1;
    named_barrier_sync(1, WARPGROUP);
    if (!last) return;
    __threadfence();
    for (int c = column + thread; c < min(z.N, column + width); c += WARPGROUP)
        z.sums[c] = sum_in_order(z.partial + c, rows, (size_t)z.N);
}

// h of LOADS * 4 rows from `row` on, for relu_store(). Rows and columns past the end load others instead, so that all loads are
// under way before the first is used.
template <int LOADS>
__device__ __forceinline__ void relu_load_h(Vector<floatX> (&h)[LOADS], const ReluProduct& z, int row, int column) {
#pragma unroll
    for (int k = 0; k < LOADS; k++) {
        int r = min(row + 4 * k + (int)threadIdx.x % WARP / 8, z.M - 1);
        h[k] = load128_streaming(z.h + (size_t)r * z.N + min(column, z.N - 8));
        keep_packed(&h[k]);
    }
}

// A warpgroup: store finished tiles. A warp has 64 adjacent columns, four rows at a time, and a lane eight columns. h of the
// next rows is loaded before the present ones are stored.
template <int HALVES, bool FORWARD_PASS>
__device__ __forceinline__ void relu_store(const ReluShared& m, const ReluProduct& z, int first_tile, int column) {
    typedef ReluTile<HALVES> F;
    constexpr int LOADS = 8, PARTS = 4 / F::COLUMN_TILES, ROWS = RELU_M / PARTS;
    int rows = gridDim.x / z.column_tiles, lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP, tiles = 0;
    int begin = warp / F::COLUMN_TILES * ROWS, tile_column = warp % F::COLUMN_TILES;
    int at = column + tile_column * TMA_BOX + lane % 8 * 8, is_masked = !FORWARD_PASS && z.h;
    float sum[8] = {0};
    Vector<floatX> ahead[LOADS];
    if (is_masked) relu_load_h(ahead, z, first_tile * RELU_M + begin, at);
    for (int row = first_tile * RELU_M; row < z.M; row += rows * RELU_M, tiles++) {
        mbarrier_wait(m.tile_full, tiles & 1);
#pragma unroll 1
        for (int first = begin; first < begin + ROWS; first += 4 * LOADS) {
            Vector<floatX> h[LOADS];
            if (is_masked) {
                int is_last = first + 4 * LOADS == begin + ROWS;
#pragma unroll
                for (int k = 0; k < LOADS; k++) h[k] = ahead[k];
                relu_load_h(ahead, z, is_last ? row + rows * RELU_M + begin : row + first + 4 * LOADS, at);
            }
#pragma unroll
            for (int k = 0; k < LOADS; k++) {
                int r = first + 4 * k + lane / 8;
                uint32_t tile = m.tile + (r / TMA_BOX * F::COLUMN_TILES + tile_column) * TMA_TILE_BYTES;
                int4 x = *(const int4*)__cvta_shared_to_generic(swizzle_128b(tile, r % TMA_BOX, lane % 8));
                if (row + r >= z.M || at >= z.N) continue;
                if (is_masked) {  // a positive number of 16 bits is a positive integer
                    int4 mask = *(const int4*)&h[k];
                    x.x &= (int)__vcmpgts2((unsigned)mask.x, 0), x.y &= (int)__vcmpgts2((unsigned)mask.y, 0);
                    x.z &= (int)__vcmpgts2((unsigned)mask.z, 0), x.w &= (int)__vcmpgts2((unsigned)mask.w, 0);
                    float f[8];
                    to_floats(f, *(const Vector<floatX>*)&x);
#pragma unroll
                    for (int e = 0; e < 8; e++) sum[e] += f[e];
                }
                store128(z.d + (size_t)(row + r) * z.N + at, *(const Vector<floatX>*)&x);
            }
        }
        mbarrier_arrive(m.tile_empty);
    }
    if constexpr (!FORWARD_PASS) {
        if (!z.h) return;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            sum[e] += __shfl_xor_sync(ALL_LANES, sum[e], 8);
            sum[e] += __shfl_xor_sync(ALL_LANES, sum[e], 16);
        }
        if (lane < 8 && at < z.N) {
            float* p = z.partial + (size_t)(first_tile * PARTS + warp / F::COLUMN_TILES) * z.N + at;
#pragma unroll
            for (int e = 0; e < 8; e++) p[e] = sum[e];
        }
        relu_finish_sums(z, column, F::N, rows * PARTS);
    }
}
#endif

template <int HALVES, Major B, bool FORWARD_PASS>
__global__ void __launch_bounds__(RELU_BLOCK, 1)
    matmul_relu_hopper_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                              ReluProduct z) {
#if HOPPER_CODE
    typedef ReluTile<HALVES> F;
    extern __shared__ int4 memory[];
    __shared__ uint64_t barriers[2 * RELU_STAGES + 2];
    __shared__ float bias[F::N];
    int column = blockIdx.x % z.column_tiles * F::N, first_tile = blockIdx.x / z.column_tiles;
    ReluShared m;
    m.stages = ((uint32_t)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
    m.tile = m.stages + RELU_STAGES * F::STAGE_BYTES;
    m.full = (uint32_t)__cvta_generic_to_shared(barriers);
    m.empty = m.full + 8 * RELU_STAGES;
    m.tile_full = m.empty + 8 * RELU_STAGES;
    m.tile_empty = m.tile_full + 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RELU_STAGES; i++) {
            mbarrier_init(m.full + 8 * i, 1);
            mbarrier_init(m.empty + 8 * i, 2 * WARPGROUP / WARP);
        }
        mbarrier_init(m.tile_full, 2 * WARPGROUP);
        mbarrier_init(m.tile_empty, WARPGROUP);
        fence_mbarrier_init();
    }
    if (FORWARD_PASS)
        for (int c = threadIdx.x; c < F::N; c += RELU_BLOCK)
            bias[c] = column + c < z.N ? to_float(z.bias[column + c]) : 0;
    __syncthreads();
    int group = warpgroup_index();
    if (group == 0) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x == 0) relu_produce<HALVES, B>(m, &a, &b, z, first_tile, column);
    } else if (group == 3) {
        warpgroup_reg_alloc<152>();
        relu_store<HALVES, FORWARD_PASS>(m, z, first_tile, column);
    } else {
        warpgroup_reg_alloc<168>();
        relu_consume<HALVES, B, FORWARD_PASS>(m, z, bias, group - 1, first_tile);
    }
#endif
}

template <int HALVES, Major B, bool FORWARD_PASS>
static inline void matmul_relu_hopper_start(ReluProduct z, const floatX* a, const floatX* b, Context* ctx) {
    typedef ReluTile<HALVES> F;
    z.column_tiles = (int)blocks_for((size_t)z.N, F::N);
    unsigned rows = (unsigned)(ctx->multiprocessors / z.column_tiles), most = blocks_for((size_t)z.M, RELU_M);
    if (rows > most) rows = most;
    z.partial = (float*)device_scratch(ctx, (size_t)rows * (4 / F::COLUMN_TILES) * (size_t)z.N * sizeof(float));
    z.arrivals = ctx->arrivals;
    CUtensorMap map_a = tma_tensor_map(a, z.K, 1, z.M, z.K, ctx);
    CUtensorMap map_b =
        B == K_MAJOR ? tma_tensor_map(b, z.K, 1, z.N, z.K, ctx) : tma_tensor_map(b, z.N, 1, z.K, z.N, ctx);
    cudaCheck(cudaFuncSetAttribute(matmul_relu_hopper_kernel<HALVES, B, FORWARD_PASS>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, (int)F::BYTES));
    matmul_relu_hopper_kernel<HALVES, B, FORWARD_PASS>
        <<<rows*(unsigned)z.column_tiles, RELU_BLOCK, F::BYTES, ctx->stream>>>(map_a, map_b, z);
    cudaCheck(cudaGetLastError());
}

// Runs the product if this GPU and shape are supported: d [M, N] from a [M, K] and b. Returns whether it did.
static inline int matmul_relu_hopper(ReluProduct z, const floatX* a, const floatX* b, Direction direction,
                                     Context* ctx) {
    const void* pointers[] = {z.d, a, b, z.h};
    for (size_t i = 0; i < COUNT_OF(pointers); i++)
        if (pointers[i] && pointer_alignment(pointers[i]) < 16) return 0;
    if (!HOPPER_BUILD || ctx->capability != 90 || z.M < RELU_LEAST_ROWS || z.N % 8 || z.K % 8) return 0;
    int is_wide = z.N > ReluTile<1>::N, is_forward = direction == FORWARD;
    if (is_forward && is_wide) matmul_relu_hopper_start<2, K_MAJOR, true>(z, a, b, ctx);
    else if (is_forward) matmul_relu_hopper_start<1, K_MAJOR, true>(z, a, b, ctx);
    else if (is_wide) matmul_relu_hopper_start<2, MN_MAJOR, false>(z, a, b, ctx);
    else matmul_relu_hopper_start<1, MN_MAJOR, false>(z, a, b, ctx);
    return 1;
}

#endif
#endif
