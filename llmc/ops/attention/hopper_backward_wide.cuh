/* The backward pass of attention for heads of 72 to 128 channels with Hopper's instructions: see hopper_tiles.cuh, and
 * hopper_backward.cuh for the matmuls, dropout and the sums' place in registers. For bf16 and fp16. Other head sizes
 * and other GPUs use other kernels: see attention_backward().
 *
 * A work item is one tile of 128 keys of one head. Each of two consumer warpgroups owns 64 keys and keeps their dK and
 * dV in registers. No registers are left for K and V, which stay in shared memory. The warpgroups iterate over the
 * queries, 64 at a time: S^T = K Q^T, dP^T = V dout^T, then dV += P^T dout with P from registers, and dK += ds^T Q and
 * dQ = ds K with ds from shared memory. Each warpgroup computes 64 channels of dQ.
 *
 * dQ sums over tiles of keys. Blocks take the tiles of a head one after the other, from the last to the first, and run
 * at the same time. Each adds its dQ to the sum in global memory, in fp32, after the tile that follows it has done so.
 * So the order of the sum is fixed: no atomics, and the same bits in every run. A tile's counter in `done` holds its
 * progress. With CAUSAL, a tile of keys starts two tiles of queries before the one after it, so it rarely waits. All
 * tiles of a head read the same queries and sums at nearly the same time, so the reads hit L2.
 *
 * Waits end, because an item is handed out only after its predecessor, which a running block has taken, and a block
 * takes its items in this order.
 *
 * Dropout's scale multiplies dQ, dK and dV at the end, as in hopper_backward.cuh. Numerics as in flash_tiles.cuh.
 * Scratch: HopperWideScratch and dropout's bits. Loads and synchronization: hopper_backward_wide_load.cuh. */
#ifndef LLMC_OPS_ATTENTION_HOPPER_BACKWARD_WIDE_CUH
#define LLMC_OPS_ATTENTION_HOPPER_BACKWARD_WIDE_CUH

#include "llmc/ops/attention/hopper_backward_wide_load.cuh"

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)

// ---------------------------------------------------------------------------------------------------------
// Consumers

// The tile of keys that the consumers work on.
struct HopperWideTile {
    int start, T, head, k0;  // first row and length of the sequence; the tile's first key
    int group;               // this thread's warpgroup
    int own_row;             // the first of this warp's keys in the tile
};

// The offset in qkv of a head's first row, computed again at each use because registers are scarce in the loop.
__device__ inline size_t hopper_wide_row_at(const HopperParams& z, const HopperWideTile& x) {
    int head = x.head, start = x.start;
    asm volatile("" : "+r"(start), "+r"(head));
    return (size_t)start * (3 * z.NH * z.HS) + head * z.HS;
}

// lse * log2(e) of this thread's queries in columns 8 j; at j + 8, their delta / keep_scale. `statistics`: the stage's.
__device__ __forceinline__ float2 hopper_wide_statistic(uint32_t statistics, int j) {
    int t = threadIdx.x % WARP % 4;
    return *(const float2*)__cvta_shared_to_generic(statistics + (8 * j + 2 * t) * 4);
}

// s = K Q^T and dp = V dout^T - delta: two wgmma groups.
__device__ __forceinline__ void hopper_wide_scores(float (&s)[8][4], float (&dp)[8][4], const HopperWideShared& m,
                                                   int group, int use) {
    typedef HopperWide W;
    int stage = use % W::STAGES;
    mbarrier_wait(m.q_full + 8 * stage, (use / W::STAGES) & 1);
    uint32_t statistics = m.statistics_tiles + stage * W::STATISTICS_BYTES;
    uint32_t k = wgmma_descriptor(m.kv_tiles + group * TMA_TILE_BYTES, 0), v = k + (4 * TMA_TILE_BYTES >> 4);
    uint32_t q = wgmma_descriptor(m.q_tiles + stage * W::Q_BYTES, 0), dy = q + (2 * TMA_TILE_BYTES >> 4);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float2 delta = hopper_wide_statistic(statistics, j + 8);
#pragma unroll
        for (int i = 0; i < 4; i++) dp[j][i] = i % 2 ? -delta.y : -delta.x;
    }
    fence_operand(s);
    fence_operand(dp);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; i++)
        wgmma_ss<K_MAJOR, K_MAJOR>(s, k + i / 4 * (2 * TMA_TILE_BYTES >> 4) + i % 4 * WGMMA_STEP_K_MAJOR,
                                   q + i / 4 * (TMA_TILE_BYTES >> 4) + i % 4 * WGMMA_STEP_K_MAJOR, i > 0);
    wgmma_commit_group();
#pragma unroll
    for (int i = 0; i < 8; i++)
        wgmma_ss<K_MAJOR, K_MAJOR>(dp, v + i / 4 * (2 * TMA_TILE_BYTES >> 4) + i % 4 * WGMMA_STEP_K_MAJOR,
                                   dy + i / 4 * (TMA_TILE_BYTES >> 4) + i % 4 * WGMMA_STEP_K_MAJOR, 1);
    wgmma_commit_group();
}

// s becomes P, or 0 for pairs that do not exist or that the mask hides.
template <Mask mask>
__device__ __forceinline__ void hopper_wide_probabilities(float (&s)[8][4], uint32_t statistics, int q0,
                                                          const HopperWideTile& x, float scale) {
    int lane = threadIdx.x % WARP, t = lane % 4;
    bool edge = x.k0 + HOPPER_KEYS > x.T || q0 + HOPPER_QUERIES > x.T || (mask == CAUSAL && q0 < x.k0 + HOPPER_KEYS);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float2 lse = hopper_wide_statistic(statistics, j);
#pragma unroll
        for (int i = 0; i < 4; i++) s[j][i] = ex2_approx(fmaf(s[j][i], scale, i % 2 ? -lse.y : -lse.x));
    }
    if (edge) {
        // This thread's column 8 j + i of a key is a valid pair if low <= 8 j + i < high.
        int first = q0 + 2 * t, high = x.T - first;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int key = x.k0 + x.own_row + lane / 4 + 8 * half;
            int low = key >= x.T ? HOPPER_QUERIES : mask == CAUSAL ? key - first : 0;
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (8 * j + i < low || 8 * j + i >= high) s[j][2 * half + i] = 0;
        }
    }
}

// dp = -delta where a pair is dropped.
__device__ __forceinline__ void hopper_wide_drop(float (&dp)[8][4], const uint32_t (&bits)[2][2], uint32_t statistics) {
    int t = threadIdx.x % WARP % 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float2 delta = hopper_wide_statistic(statistics, j + 8);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!(bits[i / 2][j / 4] >> (2 * t) >> (8 * (j % 4) + i % 2) & 1)) dp[j][i] = i % 2 ? -delta.y : -delta.x;
    }
}

// dv += P^T dout: one wgmma group.
__device__ __forceinline__ void hopper_wide_dv(float (&dv)[16][4], uint32_t (&p)[4][4], uint32_t dout_tile) {
    fence_operand(p);
    fence_operand(dv);
    wgmma_fence();
    uint32_t dy = wgmma_descriptor(dout_tile, TMA_TILE_BYTES);
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_rs<MN_MAJOR>(dv, p[k], dy + k * WGMMA_STEP_MN_MAJOR, 1);
    wgmma_commit_group();
}

// dk += ds^T Q, with ds from shared memory: in registers it would stay live while the next scores are computed, which
// need these registers. One wgmma group.
__device__ __forceinline__ void hopper_wide_dk(float (&dk)[16][4], uint32_t ds_tile, uint32_t q_tile) {
    uint32_t left = wgmma_descriptor(ds_tile, 0), q = wgmma_descriptor(q_tile, TMA_TILE_BYTES);
    fence_operand(dk);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_ss<K_MAJOR, MN_MAJOR>(dk, left + k * WGMMA_STEP_K_MAJOR, q + k * WGMMA_STEP_MN_MAJOR, 1);
    wgmma_commit_group();
}

// dq = ds K over both warpgroups' keys, of which each computes 64 channels. One wgmma group.
__device__ __forceinline__ void hopper_wide_dq(float (&dq)[8][4], uint32_t ds_tile, uint32_t k_tile) {
    uint32_t left = wgmma_descriptor(ds_tile, 0), right = wgmma_descriptor(k_tile, 0);
    fence_operand(dq);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HOPPER_KEYS / 16; k++)
        wgmma_ss<MN_MAJOR, MN_MAJOR>(dq, left + k * WGMMA_STEP_MN_MAJOR, right + k * WGMMA_STEP_MN_MAJOR, k > 0);
    wgmma_commit_group();
}

// Scale and write this warpgroup's rows of dK and dV to `to`, where the sequence's dK begins.
template <bool dropped>
__device__ __forceinline__ void hopper_wide_finish(floatX* to, float (&dk)[16][4], float (&dv)[16][4],
                                                   uint32_t out_tile, const HopperWideTile& x, const HopperParams& z) {
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            dk[j][i] *= z.softmax_scale * z.keep_scale;
            if (dropped) dv[j][i] *= z.keep_scale;
        }
    size_t C = (size_t)z.NH * z.HS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = x.k0 + TMA_BOX * x.group, channel = TMA_BOX * half;
        hopper_write_rows(to + channel, 3 * C, row, x.T, z.HS - channel, out_tile,
                          *(const float(*)[8][4])(&dk[8 * half]));
        hopper_write_rows(to + C + channel, 3 * C, row, x.T, z.HS - channel, out_tile,
                          *(const float(*)[8][4])(&dv[8 * half]));
    }
}

template <Mask mask, bool dropped>
__device__ __forceinline__ void hopper_wide_consume(floatX* dqkv, float4* sums, const HopperWideShared& m, int group,
                                                    const HopperParams& z) {
    typedef HopperWide W;
    int lane = threadIdx.x % WARP, thread = (int)threadIdx.x % WARPGROUP, use = 0;
    uint32_t out_tile = m.out_tiles + group * TMA_TILE_BYTES;
    float scale = z.softmax_scale * LOG2_E;
    for (int keys_done = 0;; keys_done++) {
        mbarrier_wait(m.kv_full, keys_done & 1);
        HopperWork work = m.works[0];
        if (work.sequence < 0) return;
        HopperWideTile x = {.start = work.start,
                            .T = work.length,
                            .head = work.head,
                            .k0 = work.first,
                            .group = group,
                            .own_row = TMA_BOX * group + thread / WARP * 16};
        float dk[16][4] = {}, dv[16][4] = {}, s[8][4], dp[8][4];
        int q0 = mask == CAUSAL ? x.k0 : 0;
        float4* sum =
            sums +
            hopper_sum_at(0, 0, q0 / HOPPER_QUERIES, x.start, work.sequence, x.head, z.NH) * (HOPPER_WIDE_SUMS / 4) +
            group * 8 * WARPGROUP + thread;
        // Called by every thread: each has read statistics and bits there, and has written its part of the sum.
        auto release = [&](int use) { mbarrier_arrive(m.q_empty + 8 * (use % W::STAGES)); };
        hopper_wide_scores(s, dp, m, group, use);
        wgmma_wait_group<1>();
        fence_operand(s);
        for (;;) {
            int stage = use % W::STAGES;
            uint32_t q_tile = m.q_tiles + stage * W::Q_BYTES,
                     statistics = m.statistics_tiles + stage * W::STATISTICS_BYTES;
            uint32_t ds_tile = m.ds_tiles + (use & 1) * 2 * TMA_TILE_BYTES;
            hopper_wide_probabilities<mask>(s, statistics, q0, x, scale);
            uint32_t p[4][4], ds[4][4], bits[2][2];
            if constexpr (dropped) {
                uint32_t at = m.bits_tiles + stage * W::BITS_BYTES + (x.own_row + lane / 4) * HOPPER_ROW_BITS +
                              q0 % DRAW_COLUMNS / 8;
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *(uint2*)bits[half] = *(const uint2*)__cvta_shared_to_generic(at + half * 8 * HOPPER_ROW_BITS);
                hopper_pack_dropped(p, s, bits);
            } else {
                hopper_pack(p, s);
            }
            hopper_wide_dv(dv, p, q_tile + 2 * TMA_TILE_BYTES);

            wgmma_wait_group<1>();
            fence_operand(dp);
            if constexpr (dropped) hopper_wide_drop(dp, bits, statistics);
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) dp[j][i] *= s[j][i];
            hopper_pack(ds, dp);
#pragma unroll
            for (int k = 0; k < 4; k++) stmatrix_tile(ds_tile, x.own_row, k, ds[k]);
            fence_proxy_async_shared();
            named_barrier_sync(1, W::CONSUMERS * WARPGROUP);  // both warpgroups have written their ds
            float dq[8][4];
            float4 before[8];
            hopper_wide_dq(dq, ds_tile, m.kv_tiles + group * 2 * TMA_TILE_BYTES);
            hopper_wide_dk(dk, ds_tile + group * TMA_TILE_BYTES, q_tile);

            // Load the sum so far, of later tiles of keys, if these queries attend to any.
            wgmma_wait_group<2>();  // dv's wgmma no longer reads the registers of p
            mbarrier_wait(m.sum_ready + 8 * stage, (use / W::STAGES) & 1);
            bool begun = x.k0 + HOPPER_KEYS < x.T && (mask == FULL || q0 >= x.k0 + HOPPER_KEYS);
#pragma unroll
            for (int j = 0; j < 8; j++) before[j] = begun ? __ldcg(sum + j * WARPGROUP) : make_float4(0, 0, 0, 0);
            wgmma_wait_group<1>();
            fence_operand(dq);
#pragma unroll
            for (int j = 0; j < 8; j++)
                dq[j][0] += before[j].x, dq[j][1] += before[j].y, dq[j][2] += before[j].z, dq[j][3] += before[j].w;
            if (x.k0 > 0) {
#pragma unroll
                for (int j = 0; j < 8; j++) __stcg(sum + j * WARPGROUP, *(const float4*)dq[j]);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) dq[j][i] *= z.softmax_scale * z.keep_scale;
                hopper_write_rows(dqkv + hopper_wide_row_at(z, x) + TMA_BOX * group, (size_t)3 * z.NH * z.HS, q0, x.T,
                                  z.HS - TMA_BOX * group, out_tile, dq);
            }
            sum += z.NH * (HOPPER_WIDE_SUMS / 4);
            q0 += HOPPER_QUERIES, use++;
            if (q0 >= x.T) break;
            hopper_wide_scores(s, dp, m, group, use);
            wgmma_wait_group<1>();
            fence_operand(s);
            release(use - 1);
        }
        wgmma_wait_group<0>();
        fence_operand(dv);
        fence_operand(dk);
        release(use - 1);
        mbarrier_arrive(m.kv_empty);  // every thread arrives, because each has read the work item
        floatX* to = dqkv + hopper_wide_row_at(z, x) + (size_t)z.NH * z.HS;
        hopper_wide_finish<dropped>(to, dk, dv, out_tile, x, z);
    }
}

// The kernel's scratch.
typedef struct {
    float4* sums;  // dQ so far, [tile of queries, head][warpgroup][8][thread]
    int* done;     // [tile of keys, head]: tiles of queries whose sums are done, counted from the sequence's first
    const float* statistics;
} HopperWidePointers;

// A block has the producer's warpgroup, then two consumers. Work is (sequence, head, tile of keys).
template <Mask mask, bool dropped>
__global__ void __launch_bounds__(HopperWide::THREADS, 1)
    attention_backward_wide_kernel(floatX* dqkv, HopperWidePointers scratch, const __grid_constant__ CUtensorMap qkv,
                                   const __grid_constant__ CUtensorMap dout, const __grid_constant__ HopperParams z) {
#if HOPPER_CODE
    typedef HopperWide W;
    extern __shared__ unsigned char hopper_shared[];
    __shared__ __align__(8) uint64_t barriers[HOPPER_WIDE_BARRIERS];
    __shared__ HopperWork works[2];
    HopperWideShared m = hopper_wide_shared(hopper_shared, barriers, works);
    int group = warpgroup_index() - 1;
    if (threadIdx.x == 0) {
        mbarrier_init(m.kv_full, 1), mbarrier_init(m.kv_empty, WARPGROUP * W::CONSUMERS + 2);
        for (int i = 0; i < 8 * W::STAGES; i += 8) {
            mbarrier_init(m.q_full + i, 1), mbarrier_init(m.q_empty + i, WARPGROUP * W::CONSUMERS);
            mbarrier_init(m.sum_ready + i, 2);
        }
        fence_mbarrier_init();
        fence_proxy_async();
    }
    __syncthreads();
    if (group < 0) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x == 0) hopper_wide_produce<mask, dropped>(m, scratch.statistics, &qkv, &dout, z);
        if (threadIdx.x == WARP) hopper_wide_await<mask>(m, scratch.done, z);
        if (threadIdx.x == 2 * WARP) hopper_wide_tell<mask>(m, scratch.done, z);
        return;
    }
    warpgroup_reg_alloc<240>();
    hopper_wide_consume<mask, dropped>(dqkv, scratch.sums, m, group, z);
#else
    __trap();
#endif
}

// ---------------------------------------------------------------------------------------------------------
// Launch

static inline int hopper_wide_supports(AttentionShape shape, const Context* ctx) {
    return HOPPER_BUILD && ctx->capability == 90 && shape.HS % 8 == 0 && shape.HS > 64 && shape.HS <= 128;
}

template <Mask mask, bool dropped>
static void hopper_wide_backward_of(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                    const real* lse, const Sequences* s, AttentionShape shape, Context* ctx) {
    typedef HopperWide W;
    int C = shape.NH * shape.HS;
    HopperWideScratch r = hopper_wide_scratch(s->rows, s->count, s->max_length, shape.NH);
    int64_t items = (int64_t)s->count * shape.NH * ((s->max_length + HOPPER_KEYS - 1) / HOPPER_KEYS);
    CHECK(items < 1 << 30);
    size_t bits_bytes = flash_bits_bytes(s, shape);
    uint32_t* bits = (uint32_t*)device_scratch(ctx, bits_bytes + hopper_wide_scratch_bytes(&r));
    float* sums = (float*)((char*)bits + bits_bytes);
    float* statistics = sums + r.sums * HOPPER_WIDE_SUMS;
    int* done = (int*)(statistics + r.tiles * HOPPER_STATISTICS);
    HopperParams z = hopper_params(s, shape, bits, ctx);
    AttentionDraw draw = draw_begin(ROWS_ARE_KEYS, bits, s, shape, ctx);

    unsigned of_statistics = (unsigned)((s->max_length + HOPPER_QUERIES - 1) / HOPPER_QUERIES) *
                             (unsigned)((shape.NH + 3) / 4) * (unsigned)s->count;
    attention_delta_kernel<128, dropped><<<of_statistics + draw_blocks(draw), DRAW_THREADS, 0, ctx->stream>>>(
        statistics, done, dout, out, lse, (int)of_statistics, z, draw);
    cudaCheck(cudaGetLastError());
    HopperWidePointers scratch = {.sums = (float4*)sums, .done = done, .statistics = statistics};
    auto kernel = attention_backward_wide_kernel<mask, dropped>;
    kernel_allow_shared(kernel, W::BYTES, ctx);
    kernel<<<(unsigned)min_int((int)items, ctx->multiprocessors), W::THREADS, W::BYTES, ctx->stream>>>(
        dqkv, scratch, tma_tensor_map(qkv, shape.HS, 3 * shape.NH, s->rows, 3 * C, ctx),
        tma_tensor_map(dout, shape.HS, shape.NH, s->rows, C, ctx), z);
    cudaCheck(cudaGetLastError());
}

static inline void hopper_wide_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                        const real* lse, const Sequences* s, AttentionShape shape, Context* ctx) {
    flash_dispatch(shape, [&](auto v) {
        hopper_wide_backward_of<decltype(v)::MASK, decltype(v)::DROPPED>(dqkv, dout, qkv, out, lse, s, shape, ctx);
    });
}

#endif
#endif
