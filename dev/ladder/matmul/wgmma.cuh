/* Faster than mma: Hopper's own instructions. A warpgroup of four warps starts a product of 64 x 16 by 16 x 128
 * numbers with one instruction, wgmma, and both operands come from shared memory: no ldmatrix, no registers for
 * fragments. It is asynchronous, so the tensor cores always have the next one queued. The tiles are copied by TMA:
 * one thread names a box of a tensor, and the hardware computes the addresses, swizzles, fills in zeros past the
 * ends and reports the bytes to a barrier. So no other thread spends an instruction on a load.
 *
 * A block has two warpgroups, each with 64 x 128 outputs, and three stages of tiles, 64 deep. `full` of a stage ends
 * a phase when its tiles have arrived, `empty` when all eight warps have read them. Two blocks fit on a
 * multiprocessor: one multiplies while the other writes its outputs.
 *
 * For sm_90a, and rows of whole 16-byte vectors; others take the rung above. See llmc/hopper/ for the
 * instructions. */
#include "dev/ladder/matmul/mma.cuh"
#include "llmc/hopper/mbarrier.cuh"
#include "llmc/hopper/wgmma.cuh"

enum {
    GROUPS = 2,               // warpgroups of a block
    ROWS = GROUPS * TMA_BOX,  // of x
    COLUMNS = 2 * TMA_BOX,    // rows of w
    STAGES = 3,
    X_BYTES = GROUPS * TMA_TILE_BYTES,
    STAGE_BYTES = X_BYTES + COLUMNS / TMA_BOX * TMA_TILE_BYTES,
    SHARED_BYTES = STAGES * STAGE_BYTES + 1024
};

#if HOPPER_CODE
// One thread: wait until the stage is free, then start to load step `step`.
static __device__ inline void wgmma_load(uint32_t tiles, uint32_t full, uint32_t empty, const CUtensorMap* x,
                                         const CUtensorMap* w, int step, int n0, int o0) {
    int stage = step % STAGES, use = step / STAGES;
    uint32_t tile = tiles + stage * STAGE_BYTES, barrier = full + 8 * stage;
    if (use > 0) mbarrier_wait(empty + 8 * stage, (use - 1) & 1);
    mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
    for (int i = 0; i < GROUPS; i++)
        tma_load_3d(tile + i * TMA_TILE_BYTES, x, step * TMA_BOX, 0, n0 + i * TMA_BOX, barrier);
    for (int i = 0; i < COLUMNS / TMA_BOX; i++)
        tma_load_3d(tile + X_BYTES + i * TMA_TILE_BYTES, w, step * TMA_BOX, 0, o0 + i * TMA_BOX, barrier);
}

// A warp's 16 rows of sums: add the bias, round, and write them to two tiles of shared memory.
static __device__ inline void wgmma_round(MmaOutput to, float (&sum)[16][4], uint32_t tile0, uint32_t tile1, int o0) {
    int lane = (int)threadIdx.x % WARP, warp_row = (int)threadIdx.x % WARPGROUP / WARP * 16;
#pragma unroll
    for (int j = 0; j < 16; j++) {
        int o = o0 + 8 * j + lane % 4 * 2;
        float b0 = to.b && o < to.OC ? to_float(to.b[o]) : 0, b1 = to.b && o + 1 < to.OC ? to_float(to.b[o + 1]) : 0;
        sum[j][0] += b0, sum[j][1] += b1, sum[j][2] += b0, sum[j][3] += b1;
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = pack_floatx2(sum[2 * k + i / 2][2 * (i % 2)], sum[2 * k + i / 2][2 * (i % 2) + 1]);
        stmatrix_tile(k < 4 ? tile0 : tile1, warp_row, k % 4, a);
    }
}

// Store the 16 rows of a warp from there, in pieces of 16 bytes.
static __device__ inline void wgmma_store(MmaOutput to, uint32_t tile0, uint32_t tile1, int n0, int o0) {
    int lane = (int)threadIdx.x % WARP, warp_row = (int)threadIdx.x % WARPGROUP / WARP * 16;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = warp_row + 2 * i + lane / 16, piece = lane % 16, n = n0 + row, o = o0 + 8 * piece;
        Vector<floatX> v =
            load128((const floatX*)__cvta_shared_to_generic(swizzle_128b(piece < 8 ? tile0 : tile1, row, piece % 8)));
        floatX* y = to.y + (size_t)n * (size_t)to.OC + o;
        if (n >= to.N || o >= to.OC) continue;
        if (to.OC % 8 == 0 && to.mode == SET) {
            store128(y, v);
            continue;
        }
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (o + k < to.OC) y[k] = to.mode == ADD ? from_float<floatX>(to_float(y[k]) + to_float(v.v[k])) : v.v[k];
    }
}
#endif

static __global__ void __launch_bounds__(GROUPS* WARPGROUP, 2)
    wgmma_kernel(floatX* y, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                 const floatX* bias, int N, int IC, int OC, Mode mode) {
#if HOPPER_CODE
    extern __shared__ unsigned char wgmma_shared[];
    __shared__ uint64_t barriers[2 * STAGES];
    uint32_t tiles = ((uint32_t)__cvta_generic_to_shared(wgmma_shared) + 1023) & ~1023u;
    uint32_t full = (uint32_t)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES;
    int n0 = (int)blockIdx.y * ROWS, o0 = (int)blockIdx.x * COLUMNS, steps = (IC + TMA_BOX - 1) / TMA_BOX;
    int group = warpgroup_index();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) mbarrier_init(full + 8 * s, 1), mbarrier_init(empty + 8 * s, 4 * GROUPS);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int s = 0; s < min(STAGES, steps); s++) wgmma_load(tiles, full, empty, &x, &w, s, n0, o0);

    float sum[16][4];
    for (int step = 0; step < steps; step++) {
        int stage = step % STAGES;
        uint32_t x_tile = tiles + stage * STAGE_BYTES + group * TMA_TILE_BYTES;
        uint32_t w_tile = tiles + stage * STAGE_BYTES + X_BYTES;
        mbarrier_wait(full + 8 * stage, step / STAGES & 1);
        fence_operand(sum);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TMA_BOX / 16; k++)
            wgmma_ss<K_MAJOR, K_MAJOR>(sum, wgmma_descriptor(x_tile, 0) + k * WGMMA_STEP_K_MAJOR,
                                       wgmma_descriptor(w_tile, 0) + k * WGMMA_STEP_K_MAJOR, step > 0 || k > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>();  // the step before is done: its stage may be filled again
        if (step > 0) {
            if (threadIdx.x % WARP == 0) mbarrier_arrive(empty + 8 * ((step - 1) % STAGES));
            if (threadIdx.x == 0 && step - 1 + STAGES < steps)
                wgmma_load(tiles, full, empty, &x, &w, step - 1 + STAGES, n0, o0);
            __syncwarp();
        }
    }
    wgmma_wait_group<0>();
    fence_operand(sum);
    // The tiles of x of two stages are this warpgroup's own.
    uint32_t tile = tiles + group * TMA_TILE_BYTES;
    MmaOutput to = {y, bias, N, OC, mode};
    wgmma_round(to, sum, tile, tile + STAGE_BYTES, o0);
    __syncwarp();
    wgmma_store(to, tile, tile + STAGE_BYTES, n0 + group * TMA_BOX, o0);
#endif
}

static inline void wgmma_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                        Context* ctx) {
    if (!HOPPER_BUILD || ctx->capability != 90 || IC % 8 != 0) {
        mma_matmul_forward(y, x, p, N, IC, OC, mode, ctx);
        return;
    }
    CUtensorMap x_map = tma_tensor_map(x, IC, 1, N, IC, ctx), w_map = tma_tensor_map(p.w, IC, 1, OC, IC, ctx);
    dim3 grid((OC + COLUMNS - 1) / COLUMNS, (N + ROWS - 1) / ROWS);
    cudaCheck(cudaFuncSetAttribute(wgmma_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    wgmma_kernel<<<grid, GROUPS * WARPGROUP, SHARED_BYTES, ctx->stream>>>(y, x_map, w_map, p.b, N, IC, OC, mode);
    cudaCheck(cudaGetLastError());
}
