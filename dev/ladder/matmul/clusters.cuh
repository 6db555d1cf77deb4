/* Next after wgmma: a byte from the L2 is multiplied by more rows, and the tensor cores do not wait for stores.
 *
 * Two blocks with 128 x 256 outputs each, one below the other, are a cluster. Both need the same rows of w, so each
 * loads half of them, by TMA, into the shared memory of both. There is one block on a multiprocessor; clusters take
 * tiles in turn, row after row, so that the loads of the next tile begin before this one is done. The warpgroups of a
 * block:
 *   0      one thread loads
 *   1, 2   multiply 64 rows each, add the bias, round, and write to shared memory
 *   3      stores whole rows from there while 1 and 2 multiply the next tile
 * A thread of 1 and 2 has 128 sums; setmaxnreg gives these the registers that 0 does not need.
 *
 *   full      TMA -> 1, 2               out_full    1 or 2 -> 3
 *   empty     1, 2 of both blocks -> 0  out_empty   3 -> 1 or 2
 *
 * With GELU in warpgroup 3 instead of after the product, d12's step was 1.0 % shorter than with cuBLASLt, d48's was not
 * (dev/LOG.md). For what the rung above takes; others take that rung. */
#include "dev/ladder/matmul/wgmma.cuh"
#include "dev/ptx.cuh"

enum {
    CLUSTER = 2,  // blocks
    CLUSTER_GROUPS = GROUPS + 2,
    CLUSTER_COLUMNS = 4 * TMA_BOX,  // rows of w
    CLUSTER_STAGE_BYTES = X_BYTES + CLUSTER_COLUMNS / TMA_BOX * TMA_TILE_BYTES,
    CLUSTER_HALF_BYTES = CLUSTER_COLUMNS / TMA_BOX * TMA_TILE_BYTES,  // outputs of a warpgroup
    CLUSTER_BARRIERS = 2 * STAGES + 2 * GROUPS,
    CLUSTER_BYTES = 1024 + STAGES * CLUSTER_STAGE_BYTES + GROUPS * CLUSTER_HALF_BYTES + 8 * CLUSTER_BARRIERS
};

#if HOPPER_CODE
// Addresses in shared memory; barriers are arrays of 8 bytes each.
struct ClusterShared {
    uint32_t stages, halves, full, empty, out_full, out_empty;
};

// The first row and column of this block's tile number `number`, if its cluster has that many. The last tile of the
// second block may have no rows.
static __device__ inline bool cluster_tile(int* n0, int* o0, int number, MmaOutput to) {
    int columns = (to.OC + CLUSTER_COLUMNS - 1) / CLUSTER_COLUMNS;
    int pair = (int)(blockIdx.x / CLUSTER + number * (gridDim.x / CLUSTER)), first = pair / columns * CLUSTER * ROWS;
    *n0 = first + (int)(blockIdx.x % CLUSTER) * ROWS, *o0 = pair % columns * CLUSTER_COLUMNS;
    return first < to.N;
}

// One thread: load this block's rows of x, and half of the rows of w for both blocks.
static __device__ inline void cluster_load(const ClusterShared& m, const CUtensorMap* x, const CUtensorMap* w, int IC,
                                           MmaOutput to) {
    const int PART = CLUSTER_COLUMNS / TMA_BOX / CLUSTER;
    int n0, o0, use = 0, first = (int)(blockIdx.x % CLUSTER) * PART;
    for (int number = 0; cluster_tile(&n0, &o0, number, to); number++)
        for (int i0 = 0; i0 < IC; i0 += TMA_BOX, use++) {
            int stage = use % STAGES;
            uint32_t tile = m.stages + stage * CLUSTER_STAGE_BYTES, full = m.full + 8 * stage;
            mbarrier_wait(m.empty + 8 * stage, ~(use / STAGES) & 1);
            mbarrier_arrive_expect_tx(full, CLUSTER_STAGE_BYTES);
            for (int i = 0; i < GROUPS; i++) tma_load_3d(tile + i * TMA_TILE_BYTES, x, i0, 0, n0 + i * TMA_BOX, full);
            for (int i = first; i < first + PART; i++)
                tma_load_3d_multicast(tile + X_BYTES + i * TMA_TILE_BYTES, w, i0, 0, o0 + i * TMA_BOX, full,
                                      (1 << CLUSTER) - 1);
        }
}

// A warp has read a stage: tell both blocks, because both fill it.
static __device__ inline void cluster_release(const ClusterShared& m, int use) {
    int lane = (int)threadIdx.x % WARP;
    if (lane < CLUSTER) mbarrier_arrive_at(m.empty + 8 * (use % STAGES), (uint32_t)lane);
}

// A warpgroup that multiplies: its 64 rows of each tile, 128 columns with one instruction.
static __device__ inline void cluster_multiply(const ClusterShared& m, int group, int IC, MmaOutput to) {
    int n0, o0, use = 0;
    uint32_t half = m.halves + group * CLUSTER_HALF_BYTES;
    for (int number = 0; cluster_tile(&n0, &o0, number, to); number++) {
        float sum[2][16][4];
        for (int i0 = 0; i0 < IC; i0 += TMA_BOX, use++) {
            uint32_t tile = m.stages + use % STAGES * CLUSTER_STAGE_BYTES;
            uint32_t x = wgmma_descriptor(tile + group * TMA_TILE_BYTES, 0), w = wgmma_descriptor(tile + X_BYTES, 0);
            mbarrier_wait(m.full + 8 * (use % STAGES), use / STAGES & 1);
            fence_operand(sum[0]), fence_operand(sum[1]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < TMA_BOX / 16; k++)
#pragma unroll
                for (uint32_t side = 0; side < 2; side++)
                    wgmma_ss<K_MAJOR, K_MAJOR>(sum[side], x + k * WGMMA_STEP_K_MAJOR,
                                               w + side * (2 * TMA_TILE_BYTES >> 4) + k * WGMMA_STEP_K_MAJOR,
                                               i0 > 0 || k > 0);
            wgmma_commit_group();
            if (i0 == 0) continue;
            wgmma_wait_group<1>();  // the step before is done
            cluster_release(m, use - 1);
        }
        wgmma_wait_group<0>();
        fence_operand(sum[0]), fence_operand(sum[1]);
        cluster_release(m, use - 1);
        mbarrier_wait(m.out_empty + 8 * group, ~number & 1);
#pragma unroll
        for (int side = 0; side < 2; side++) {
            uint32_t out = half + side * 2 * TMA_TILE_BYTES;
            wgmma_round(to, sum[side], out, out + TMA_TILE_BYTES, o0 + side * COLUMNS);
        }
        mbarrier_arrive(m.out_full + 8 * group);
    }
}

// The warpgroup that stores.
static __device__ inline void cluster_store(const ClusterShared& m, MmaOutput to) {
    int n0, o0;
    for (int number = 0; cluster_tile(&n0, &o0, number, to); number++)
        for (int group = 0; group < GROUPS; group++) {
            uint32_t half = m.halves + group * CLUSTER_HALF_BYTES;
            mbarrier_wait(m.out_full + 8 * group, number & 1);
            for (int side = 0; side < 2; side++) {
                uint32_t out = half + side * 2 * TMA_TILE_BYTES;
                wgmma_store(to, out, out + TMA_TILE_BYTES, n0 + group * TMA_BOX, o0 + side * COLUMNS);
            }
            mbarrier_arrive(m.out_empty + 8 * group);
        }
}
#endif

static __global__ void __launch_bounds__(CLUSTER_GROUPS* WARPGROUP, 1)
    cluster_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w, int IC, MmaOutput to) {
#if HOPPER_CODE
    extern __shared__ unsigned char cluster_shared[];
    ClusterShared m;
    m.stages = ((uint32_t)__cvta_generic_to_shared(cluster_shared) + 1023) & ~1023u;
    m.halves = m.stages + STAGES * CLUSTER_STAGE_BYTES;
    m.full = m.halves + GROUPS * CLUSTER_HALF_BYTES, m.empty = m.full + 8 * STAGES;
    m.out_full = m.empty + 8 * STAGES, m.out_empty = m.out_full + 8 * GROUPS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) mbarrier_init(m.full + 8 * i, 1);
        for (int i = 0; i < STAGES; i++) mbarrier_init(m.empty + 8 * i, CLUSTER * GROUPS * WARPGROUP / WARP);
        for (int i = 0; i < 2 * GROUPS; i++) mbarrier_init(m.out_full + 8 * i, WARPGROUP);
        fence_mbarrier_init();
    }
    cluster_sync();
    int group = warpgroup_index();
    if (group == 0) {
        warpgroup_reg_dealloc<40>();
        if (threadIdx.x == 0) cluster_load(m, &x, &w, IC, to);
    } else if (group <= GROUPS) {
        warpgroup_reg_alloc<168>();
        cluster_multiply(m, group - 1, IC, to);
    } else {
        warpgroup_reg_alloc<136>();
        cluster_store(m, to);
    }
    __syncwarp();
    cluster_sync();  // the other block may still fill this one's stages
#endif
}

static inline void clusters_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                           Context* ctx) {
    if (!HOPPER_BUILD || ctx->capability != 90 || IC % 8 != 0) {
        wgmma_matmul_forward(y, x, p, N, IC, OC, mode, ctx);
        return;
    }
    CUtensorMap x_map = tma_tensor_map(x, IC, 1, N, IC, ctx), w_map = tma_tensor_map(p.w, IC, 1, OC, IC, ctx);
    int pairs = (N + CLUSTER * ROWS - 1) / (CLUSTER * ROWS) * ((OC + CLUSTER_COLUMNS - 1) / CLUSTER_COLUMNS);
    int clusters = pairs < ctx->multiprocessors / CLUSTER ? pairs : ctx->multiprocessors / CLUSTER;
    MmaOutput to = {y, p.b, N, OC, mode};
    cudaCheck(cudaFuncSetAttribute(cluster_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, CLUSTER_BYTES));
    cudaLaunchAttribute size;
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = CLUSTER, size.val.clusterDim.y = size.val.clusterDim.z = 1;
    cudaLaunchConfig_t launch = {.gridDim = (unsigned)(clusters * CLUSTER), .blockDim = CLUSTER_GROUPS * WARPGROUP};
    launch.dynamicSmemBytes = CLUSTER_BYTES, launch.stream = ctx->stream;
    launch.attrs = &size, launch.numAttrs = 1;
    cudaCheck(cudaLaunchKernelEx(&launch, cluster_kernel, x_map, w_map, IC, to));
}
