/* matmul_relu.h's products on Hopper, in one kernel each: bias and ReLU, or the mask of the layer below and its bias
 * gradient, are done while the tensor cores work on the next tile.
 *
 *   forward          d [M, N] = relu(a [M, K] b^T + bias)          b [N, K]
 *   backward input   d [M, N] = a [M, K] b where h > 0, else 0     b [K, N];  sums [N] = column sums of d
 *                    h NULL: no mask and no sums
 *
 * A block per multiprocessor takes tiles of 128 rows and 128 or 256 columns, always the same columns. Of its three
 * warpgroups one thread of the first loads tiles by TMA; the second and third multiply, 64 rows each; the other three
 * warps of the first store what they leave in shared memory, and add columns in registers until the end; without a mask
 * one thread stores by TMA. Two blocks with adjacent rows and the same columns are a cluster: each loads its rows of a,
 * and half of b for both.
 * Numerics: sums in fp32. Column sums are of rounded values, in an order that depends on the shape and the number of
 * multiprocessors. N and K are multiples of 8, pointers of 16 bytes. */
#ifndef DEV_RECSYS_OPS_MATMUL_RELU_HOPPER_CUH
#define DEV_RECSYS_OPS_MATMUL_RELU_HOPPER_CUH

#include "dev/ptx.cuh"
#include "llmc/hopper/wgmma.cuh"
#include "llmc/ops/matmul/matmul.h"

#if defined(__CUDACC__) && (defined(PRECISION_BF16) || defined(PRECISION_FP16))

enum {
    RELU_M = 128,
    RELU_K = TMA_BOX,
    RELU_STAGES = 3,
    RELU_BLOCK = 3 * WARPGROUP,
    RELU_STORE_WARPS = 3,
    RELU_CLUSTER = 2,
    RELU_LEAST_ROWS = 1024  // fewer leave most of the GPU idle
};

// HALVES: columns of a tile in units of 128.
template <int HALVES> struct ReluTile {
    static constexpr int N = 128 * HALVES, COLUMN_TILES = 2 * HALVES;
    static constexpr int ROW_LANES = 16 * HALVES, STEP_ROWS = WARP / ROW_LANES, LOADS = 11;  // of relu_store_masked()
    static constexpr uint32_t A_BYTES = 2 * TMA_TILE_BYTES, STAGE_BYTES = A_BYTES + COLUMN_TILES * TMA_TILE_BYTES;
    static constexpr uint32_t BYTES = RELU_STAGES * STAGE_BYTES + 2 * COLUMN_TILES * TMA_TILE_BYTES + 1024;
};

typedef struct {
    floatX* d;
    const floatX *bias, *h;
    float* sums;
    int M, N, K;
    // Set by the launcher.
    float* partial;  // [row blocks, N]
    unsigned* arrivals;
    int column_tiles;
} ReluProduct;

// Addresses in shared memory: stages of a and b, the finished tile [row half][64 columns], barriers.
struct ReluShared {
    uint32_t stages, tile, full, empty, tile_full, tile_empty;
};

#if HOPPER_CODE
// The rows at which this block's tiles begin: while the first block of the cluster has one, so has the second, whose
// last tile may be empty.
__device__ __forceinline__ bool relu_has_tile(const ReluProduct& z, int row) {
    return row / RELU_M / RELU_CLUSTER * RELU_CLUSTER * RELU_M < z.M;
}

// Bring a tile of h into L2.
template <int HALVES>
__device__ __forceinline__ void relu_prefetch_h(const CUtensorMap* h, const ReluProduct& z, int row, int column) {
    const int TILES = ReluTile<HALVES>::COLUMN_TILES;
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        int r = row + i / TILES * TMA_BOX, c = column + i % TILES * TMA_BOX;
        if (r < z.M && c < z.N) tma_prefetch_3d(h, c, 0, r);
    }
}

// One thread: load the tiles of a, and this block's part of b into all blocks of the cluster. `h` NULL: there is no
// mask. Else its next tile is prefetched.
template <int HALVES, Major B>
__device__ __forceinline__ void relu_produce(const ReluShared& m, const CUtensorMap* a, const CUtensorMap* b,
                                             const CUtensorMap* h, const ReluProduct& z, int first_tile, int column) {
    typedef ReluTile<HALVES> F;
    constexpr int PART = F::COLUMN_TILES / RELU_CLUSTER;
    int steps = (z.K + RELU_K - 1) / RELU_K, rows = gridDim.x / z.column_tiles, use = 0;
    int part = first_tile % RELU_CLUSTER * PART;
    for (int row = first_tile * RELU_M; relu_has_tile(z, row); row += rows * RELU_M) {
        if (h) relu_prefetch_h<HALVES>(h, z, row + rows * RELU_M, column);
        for (int k = 0; k < steps; k++, use++) {
            uint32_t stage = use % RELU_STAGES, to = m.stages + stage * F::STAGE_BYTES, full = m.full + 8 * stage;
            mbarrier_wait(m.empty + 8 * stage, ~(use / RELU_STAGES) & 1);
            mbarrier_arrive_expect_tx(full, F::STAGE_BYTES);
#pragma unroll
            for (int i = 0; i < 2; i++) tma_load_3d(to + i * TMA_TILE_BYTES, a, k * RELU_K, 0, row + i * TMA_BOX, full);
#pragma unroll
            for (int i = part; i < part + PART; i++) {
                uint32_t tile = to + F::A_BYTES + i * TMA_TILE_BYTES;
                int at = column + i * TMA_BOX, all = (1 << RELU_CLUSTER) - 1;
                if constexpr (B == K_MAJOR) tma_load_3d_multicast(tile, b, k * RELU_K, 0, at, full, (uint16_t)all);
                else tma_load_3d_multicast(tile, b, at, 0, k * RELU_K, full, (uint16_t)all);
            }
        }
    }
}

// A warp no longer reads a stage: say so to all blocks whose copies fill it.
__device__ __forceinline__ void relu_release(const ReluShared& m, int use, int lane) {
    if (lane < RELU_CLUSTER) mbarrier_arrive_at(m.empty + 8 * (use % RELU_STAGES), (uint32_t)lane);
}

// A warpgroup: multiply its 64 rows of each tile, and leave them in shared memory.
template <int HALVES, Major B, bool FORWARD_PASS>
__device__ __forceinline__ void relu_consume(const ReluShared& m, const ReluProduct& z, const float* bias, int group,
                                             int first_tile) {
    typedef ReluTile<HALVES> F;
    int steps = (z.K + RELU_K - 1) / RELU_K, rows = gridDim.x / z.column_tiles, use = 0, tiles = 0;
    int lane = threadIdx.x % WARP, warp_row = threadIdx.x % WARPGROUP / WARP * 16;
    constexpr uint32_t STEP_B = B == K_MAJOR ? WGMMA_STEP_K_MAJOR : WGMMA_STEP_MN_MAJOR;
    for (int row = first_tile * RELU_M; relu_has_tile(z, row); row += rows * RELU_M, tiles++) {
        float c[16 * HALVES][4];
        for (int k = 0; k < steps; k++, use++) {
            uint32_t stage = use % RELU_STAGES, at = m.stages + stage * F::STAGE_BYTES;
            uint32_t left = wgmma_descriptor(at + group * TMA_TILE_BYTES, 0);
            mbarrier_wait(m.full + 8 * stage, (use / RELU_STAGES) & 1);
            uint32_t right = wgmma_descriptor(at + F::A_BYTES, TMA_TILE_BYTES);
            fence_operand(c);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < RELU_K / 16; i++)
                wgmma_ss<K_MAJOR, B>(c, left + i * WGMMA_STEP_K_MAJOR, right + i * STEP_B, k > 0 || i > 0);
            wgmma_commit_group();
            if (k == 0) continue;
            wgmma_wait_group<1>();  // the stage before is no longer read
            relu_release(m, use - 1, lane);
        }
        wgmma_wait_group<0>();
        fence_operand(c);
        relu_release(m, use - 1, lane);
        mbarrier_wait(m.tile_empty, ~tiles & 1);
#pragma unroll
        for (int j = 0; j < 16 * HALVES; j += 2) {
            float x[2][4];
#pragma unroll
            for (int side = 0; side < 2; side++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    x[side][e] = c[j + side][e];
                    if constexpr (FORWARD_PASS)
                        x[side][e] = fmaxf(x[side][e] + bias[(j + side) * 8 + lane % 4 * 2 + e % 2], 0);
                }
            uint32_t packed[4] = {pack_floatx2(x[0][0], x[0][1]), pack_floatx2(x[0][2], x[0][3]),
                                  pack_floatx2(x[1][0], x[1][1]), pack_floatx2(x[1][2], x[1][3])};
            stmatrix_tile(m.tile + (group * F::COLUMN_TILES + j / 8) * TMA_TILE_BYTES, warp_row, j / 2 % 4, packed);
        }
        fence_proxy_async_shared();
        mbarrier_arrive(m.tile_full);
    }
}

// One thread: store finished tiles by TMA, where there is no mask.
template <int HALVES>
__device__ __forceinline__ void relu_store_plain(const ReluShared& m, const CUtensorMap* d, const ReluProduct& z,
                                                 int first_tile, int column) {
    typedef ReluTile<HALVES> F;
    int rows = gridDim.x / z.column_tiles, tiles = 0;
    for (int row = first_tile * RELU_M; relu_has_tile(z, row); row += rows * RELU_M, tiles++) {
        mbarrier_wait(m.tile_full, tiles & 1);
#pragma unroll
        for (int i = 0; i < 2 * F::COLUMN_TILES; i++) {
            int r = row + i / F::COLUMN_TILES * TMA_BOX, c = column + i % F::COLUMN_TILES * TMA_BOX;
            if (r < z.M && c < z.N) tma_store_3d(d, c, 0, r, m.tile + i * TMA_TILE_BYTES);
        }
        bulk_commit_group();
        bulk_wait_group_read();
        mbarrier_arrive(m.tile_empty);
    }
}

// Of the warps that store, called by all of them with the sums [8] of each lane's columns from `at` on: add them up in
// shared memory, then store the block's sums. The last block to arrive for these columns adds those of all blocks in
// their order.
template <int HALVES>
__device__ __forceinline__ void relu_finish_sums(const ReluShared& m, const ReluProduct& z, float (&sum)[8],
                                                 int first_tile, int column) {
    typedef ReluTile<HALVES> F;
    __shared__ bool last;
    const int THREADS = RELU_STORE_WARPS * WARP, LOADS = 24;
    int thread = threadIdx.x - WARP, lane = thread % WARP, c = column + 4 * thread;
    int blocks = gridDim.x / z.column_tiles, has_columns = thread < F::N / 4 && c < z.N;
    unsigned* arrivals = z.arrivals + column / F::N;
    float* all = (float*)__cvta_shared_to_generic(m.tile);  // [warps, N]
    named_barrier_sync(1, THREADS);                         // all have read the last tile
    if (lane < F::ROW_LANES)
#pragma unroll
        for (int e = 0; e < 8; e++) all[thread / WARP * F::N + lane * 8 + e] = sum[e];
    named_barrier_sync(1, THREADS);
    if (has_columns) {
        Vector<float> total = load128(all + 4 * thread);
#pragma unroll
        for (int w = 1; w < RELU_STORE_WARPS; w++)
#pragma unroll
            for (int e = 0; e < 4; e++) total.v[e] += all[w * F::N + 4 * thread + e];
        store128(z.partial + (size_t)first_tile * z.N + c, total);
    }
    __threadfence();
    named_barrier_sync(1, THREADS);
    if (thread == 0) last = atomicInc(arrivals, (unsigned)blocks - 1) == (unsigned)blocks - 1;
    named_barrier_sync(1, THREADS);
    if (!last || !has_columns) return;
    __threadfence();
    Vector<float> total = {{0}};
    for (int r = 0; r < blocks; r += LOADS) {  // many loads at a time: nothing else hides their latency here
        Vector<float> x[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) x[k] = load128(z.partial + (size_t)min(r + k, blocks - 1) * z.N + c);
#pragma unroll
        for (int k = 0; k < LOADS; k++)
#pragma unroll
            for (int e = 0; e < 4; e++) total.v[e] += r + k < blocks ? x[k].v[e] : 0;
    }
    store128(z.sums + c, total);
}

// This lane's part of h for ReluTile::LOADS steps of relu_store_masked() from `row` on. Rows and columns past the end
// load others instead, so that all loads are under way before the first is used.
template <int HALVES>
__device__ __forceinline__ void relu_load_h(Vector<floatX> (&h)[ReluTile<HALVES>::LOADS], const ReluProduct& z, int row,
                                            int column) {
    typedef ReluTile<HALVES> F;
#pragma unroll
    for (int k = 0; k < F::LOADS; k++) {
        int r = min(row + F::STEP_ROWS * k, z.M - 1);
        h[k] = load128_streaming(z.h + (size_t)r * z.N + min(column, z.N - 8));
        keep_packed(&h[k]);
    }
}

// Three warps: apply the mask to finished tiles, add their columns and store them. A warp takes one or two whole rows
// at a time, LOADS times one after the other; a lane has eight columns. h of the next rows is loaded before the present
// ones are stored.
template <int HALVES>
__device__ __forceinline__ void relu_store_masked(const ReluShared& m, const ReluProduct& z, int first_tile,
                                                  int column) {
    typedef ReluTile<HALVES> F;
    constexpr int TURN = F::LOADS * F::STEP_ROWS, TURNS = RELU_M / (TURN * RELU_STORE_WARPS) + 1;
    int rows = gridDim.x / z.column_tiles, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP - 1, tiles = 0;
    int first = warp * TURN + lane / F::ROW_LANES, piece = lane % F::ROW_LANES;
    int at = column + piece * 8;
    float sum[8] = {0};
    Vector<floatX> ahead[F::LOADS];
    relu_load_h<HALVES>(ahead, z, first_tile * RELU_M + first, at);
    for (int row = first_tile * RELU_M; relu_has_tile(z, row); row += rows * RELU_M, tiles++) {
        mbarrier_wait(m.tile_full, tiles & 1);
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn++) {
            int begin = first + turn * RELU_STORE_WARPS * TURN;
            Vector<floatX> h[F::LOADS];
#pragma unroll
            for (int k = 0; k < F::LOADS; k++) h[k] = ahead[k];
            relu_load_h<HALVES>(
                ahead, z, turn + 1 < TURNS ? row + begin + RELU_STORE_WARPS * TURN : row + rows * RELU_M + first, at);
#pragma unroll
            for (int k = 0; k < F::LOADS; k++) {
                int r = begin + F::STEP_ROWS * k;
                if (r >= RELU_M || row + r >= z.M || at >= z.N) continue;
                uint32_t tile = m.tile + (r / TMA_BOX * F::COLUMN_TILES + piece / 8) * TMA_TILE_BYTES;
                int4 x = *(const int4*)__cvta_shared_to_generic(swizzle_128b(tile, r % TMA_BOX, piece % 8));
                int4 mask = *(const int4*)&h[k];  // a positive number of 16 bits is a positive integer
                x.x &= (int)__vcmpgts2((unsigned)mask.x, 0), x.y &= (int)__vcmpgts2((unsigned)mask.y, 0);
                x.z &= (int)__vcmpgts2((unsigned)mask.z, 0), x.w &= (int)__vcmpgts2((unsigned)mask.w, 0);
                float f[8];
                to_floats(f, *(const Vector<floatX>*)&x);
#pragma unroll
                for (int e = 0; e < 8; e++) sum[e] += f[e];
                store128(z.d + (size_t)(row + r) * z.N + at, *(const Vector<floatX>*)&x);
            }
        }
        mbarrier_arrive(m.tile_empty);
    }
#pragma unroll
    for (int e = 0; e < 8 && HALVES == 1; e++) sum[e] += __shfl_xor_sync(ALL_LANES, sum[e], F::ROW_LANES);
    relu_finish_sums<HALVES>(m, z, sum, first_tile, column);
}
#endif

template <int HALVES, Major B, bool FORWARD_PASS>
__global__ void __launch_bounds__(RELU_BLOCK, 1)
    matmul_relu_hopper_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                              const __grid_constant__ CUtensorMap h_or_d, ReluProduct z) {
#if HOPPER_CODE
    typedef ReluTile<HALVES> F;
    bool is_masked = !FORWARD_PASS && z.h;
    extern __shared__ int4 memory[];
    __shared__ uint64_t barriers[2 * RELU_STAGES + 2];
    __shared__ float bias[F::N];
    int pair = blockIdx.x / RELU_CLUSTER, column = pair % z.column_tiles * F::N;
    int first_tile = pair / z.column_tiles * RELU_CLUSTER + blockIdx.x % RELU_CLUSTER;
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
            mbarrier_init(m.empty + 8 * i, RELU_CLUSTER * 2 * WARPGROUP / WARP);
        }
        mbarrier_init(m.tile_full, 2 * WARPGROUP);
        mbarrier_init(m.tile_empty, is_masked ? RELU_STORE_WARPS * WARP : 1);
        fence_mbarrier_init();
    }
    grid_launch_dependents();
    grid_dependency_wait();
    if (FORWARD_PASS)
        for (int c = threadIdx.x; c < F::N; c += RELU_BLOCK)
            bias[c] = column + c < z.N ? to_float(z.bias[column + c]) : 0;
    cluster_sync();
    int group = warpgroup_index();
    if (group > 0) relu_consume<HALVES, B, FORWARD_PASS>(m, z, bias, group - 1, first_tile);
    else if (threadIdx.x == 0) relu_produce<HALVES, B>(m, &a, &b, is_masked ? &h_or_d : NULL, z, first_tile, column);
    else if (threadIdx.x >= WARP && is_masked) relu_store_masked<HALVES>(m, z, first_tile, column);
    else if (threadIdx.x == WARP) relu_store_plain<HALVES>(m, &h_or_d, z, first_tile, column);
    __syncwarp();
    cluster_sync();
#endif
}

template <int HALVES, Major B, bool FORWARD_PASS>
static inline void matmul_relu_hopper_start(ReluProduct z, const floatX* a, const floatX* b, Context* ctx) {
    typedef ReluTile<HALVES> F;
    z.column_tiles = (int)blocks_for((size_t)z.N, F::N);
    unsigned most = blocks_for((size_t)z.M, RELU_M), rows = (unsigned)(ctx->multiprocessors / z.column_tiles);
    if (rows > most) rows = most;
    rows = rows / RELU_CLUSTER * RELU_CLUSTER;
    CHECK(rows);
    z.partial = (float*)device_scratch(ctx, (size_t)rows * (size_t)z.N * sizeof(float));
    z.arrivals = ctx->arrivals;
    CUtensorMap map_a = tma_tensor_map(a, z.K, 1, z.M, z.K, ctx);
    CUtensorMap map_b =
        B == K_MAJOR ? tma_tensor_map(b, z.K, 1, z.N, z.K, ctx) : tma_tensor_map(b, z.N, 1, z.K, z.N, ctx);
    CUtensorMap map_tile = tma_tensor_map(!FORWARD_PASS && z.h ? z.h : z.d, z.N, 1, z.M, z.N, ctx);
    cudaCheck(cudaFuncSetAttribute(matmul_relu_hopper_kernel<HALVES, B, FORWARD_PASS>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, (int)F::BYTES));
    cudaLaunchAttribute attributes[2];  // clusters, and that blocks may begin before the kernel before has ended
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = RELU_CLUSTER, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t launch = {rows * (unsigned)z.column_tiles, RELU_BLOCK, F::BYTES, ctx->stream, attributes, 2};
    cudaCheck(
        cudaLaunchKernelEx(&launch, matmul_relu_hopper_kernel<HALVES, B, FORWARD_PASS>, map_a, map_b, map_tile, z));
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
