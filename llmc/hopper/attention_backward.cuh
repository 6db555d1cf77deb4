/* The backward pass of attention with Hopper's instructions: see attention_tiles.cuh. The layout of shared memory and
 * the producer are in attention_backward_load.cuh.
 *
 * A work item is a range of adjacent tiles of 128 keys of one head. Each of two consumer warpgroups owns 64 keys of a
 * tile, with their K and V as left operands in registers, and iterates over the queries, 64 at a time: S^T = K Q^T,
 * dP^T = V dout^T, then dV += P^T dout and dK += ds^T Q from registers, and dQ = ds K over both warpgroups' keys
 * through shared memory.
 *
 * dQ sums over tiles of keys. The sums are kept in global memory, in fp32 and in register order: each thread reads back
 * what it wrote itself. The tiles of keys of one head are taken in ascending order, by one block or by blocks that wait
 * for each other. So the order of the sum is fixed: no atomics, and the same bits in every run. Waits end, because an
 * item is handed out only after its predecessor, which a running block has taken.
 *
 * Dropout's scale multiplies dQ, dK and dV at the end instead of ds. The accumulators of dP start at -delta / scale,
 * which gives dout V - delta / scale for kept pairs. For dropped pairs dP is reset to -delta / scale.
 *
 * If one block takes all tiles of keys of a head, the head's sums are no longer needed when the block starts its next
 * head. Then each block has one slot of sums and reuses it for every head. No thread reads stale sums there: it reads
 * and writes only its own values, whose place in the slot depends on the tile of queries alone. At a head's first tile
 * of keys it reads nothing. At a later one it reads tiles of queries that it visited and stored at the previous tile of
 * keys. FULL visits and stores all tiles of queries until the last tile of keys. CAUSAL visits those from k0 on and
 * stores those from k0 + 128 on, which the next tile of keys visits.
 *
 * Numerics as in flash_tiles.cuh. Scratch: HopperScratch and dropout's bits. */
#ifndef LLMC_HOPPER_ATTENTION_BACKWARD_CUH
#define LLMC_HOPPER_ATTENTION_BACKWARD_CUH

#include "llmc/hopper/attention_backward_load.cuh"

// ---------------------------------------------------------------------------------------------------------
// Consumers. `use` counts the tiles of queries over the whole life of the block.

// The offset in qkv of a head's first row. The empty asm makes the compiler recompute it at each use, to save registers
// in the loop.
__device__ inline size_t hopper_row_at(const HopperParams& z, const HopperWork& work, int start) {
    int head = work.head;
    asm volatile("" : "+r"(start), "+r"(head));
    return (size_t)start * (3 * z.NH * z.HS) + head * z.HS;
}

// lse * log2(e) of this thread's queries in columns 8 j, and their delta / keep_scale.
__device__ __forceinline__ float2 hopper_lse_of(const HopperBackwardShared& m, int use, int j) {
    int t = threadIdx.x % WARP % 4;
    return *(const float2*)__cvta_shared_to_generic(
        m.statistics_tiles + use % HOPPER_STAGES * HopperBackward::STATISTICS_BYTES + (8 * j + 2 * t) * 4);
}

__device__ __forceinline__ float2 hopper_delta_of(const HopperBackwardShared& m, int use, int j) {
    return hopper_lse_of(m, use, j + HOPPER_QUERIES / 8);
}

// s = K Q^T and dp = V dout^T - delta: two wgmma groups.
__device__ __forceinline__ void hopper_backward_scores(float (&s)[8][4], float (&dp)[8][4], uint32_t (&k_rows)[4][4],
                                                       uint32_t (&v_rows)[4][4], const HopperBackwardShared& m,
                                                       int use) {
    typedef HopperBackward B;
    int stage = use % HOPPER_STAGES;
    mbarrier_wait(m.q_full + 8 * stage, (use / HOPPER_STAGES) & 1);
    uint32_t q = wgmma_descriptor(m.q_tiles + stage * B::Q_BYTES, 0);
    uint32_t dy = wgmma_descriptor(m.q_tiles + stage * B::Q_BYTES + TMA_TILE_BYTES, 0);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float2 delta = hopper_delta_of(m, use, j);
#pragma unroll
        for (int i = 0; i < 4; i++) dp[j][i] = i % 2 ? -delta.y : -delta.x;
    }
    fence_operand(s);
    fence_operand(dp);
    fence_operand(k_rows);
    fence_operand(v_rows);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_rs<K_MAJOR>(s, k_rows[k], q + k * WGMMA_STEP_K_MAJOR, k > 0);
    wgmma_commit_group();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_rs<K_MAJOR>(dp, v_rows[k], dy + k * WGMMA_STEP_K_MAJOR, 1);
    wgmma_commit_group();
}

// s becomes P, or 0 for pairs that do not exist or that the mask hides. `key_row` is the first of this warp's keys in
// the tile of keys at k0.
template <Mask mask>
__device__ __forceinline__ void hopper_backward_probabilities(float (&s)[8][4], const HopperBackwardShared& m, int use,
                                                              int q0, int k0, int key_row, int T, float scale) {
    int lane = threadIdx.x % WARP, t = lane % 4;
    bool edge = k0 + HOPPER_KEYS > T || q0 + HOPPER_QUERIES > T || (mask == CAUSAL && q0 < k0 + HOPPER_KEYS);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float2 lse = hopper_lse_of(m, use, j);
#pragma unroll
        for (int i = 0; i < 4; i++) s[j][i] = ex2_approx(fmaf(s[j][i], scale, i % 2 ? -lse.y : -lse.x));
    }
    if (edge) {
        // This thread's column 8 j + i of a key is a valid pair if low <= 8 j + i < high.
        int first = q0 + 2 * t, high = T - first;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int key = k0 + key_row + lane / 4 + 8 * half;
            int low = key >= T ? HOPPER_QUERIES : mask == CAUSAL ? key - first : 0;
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (8 * j + i < low || 8 * j + i >= high) s[j][2 * half + i] = 0;
        }
    }
}

// dp = -delta where a pair is dropped.
__device__ __forceinline__ void hopper_backward_drop(float (&dp)[8][4], const uint32_t (&bits)[2][2],
                                                     const HopperBackwardShared& m, int use) {
    int t = threadIdx.x % WARP % 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float2 delta = hopper_delta_of(m, use, j);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!(bits[i / 2][j / 4] >> (2 * t) >> (8 * (j % 4) + i % 2) & 1)) dp[j][i] = i % 2 ? -delta.y : -delta.x;
    }
}

// dv += P^T dout: one wgmma group.
__device__ __forceinline__ void hopper_backward_dv(float (&dv)[8][4], uint32_t (&p)[4][4], uint32_t dout_tile) {
    fence_operand(p);
    fence_operand(dv);
    wgmma_fence();
    uint32_t dy = wgmma_descriptor(dout_tile, 0);
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_rs<MN_MAJOR>(dv, p[k], dy + k * WGMMA_STEP_MN_MAJOR, 1);
    wgmma_commit_group();
}

// dq += ds K over both warpgroups' keys, of which each computes 32 channels, and dk += ds^T Q: two wgmma groups.
__device__ __forceinline__ void hopper_backward_dq_dk(float (&dq)[4][4], float (&dk)[8][4], uint32_t (&ds)[4][4],
                                                      uint32_t ds_tile, uint32_t k_tile, uint32_t q_tile, int group) {
    uint32_t left = wgmma_descriptor(ds_tile, 0), right = wgmma_descriptor(k_tile, 0) + group * (64 >> 4);
    fence_operand(dq);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HOPPER_KEYS / 16; k++)
        wgmma_ss<MN_MAJOR, MN_MAJOR>(dq, left + k * WGMMA_STEP_MN_MAJOR, right + k * WGMMA_STEP_MN_MAJOR, 1);
    wgmma_commit_group();
    fence_operand(ds);
    fence_operand(dk);
    wgmma_fence();
    uint32_t q = wgmma_descriptor(q_tile, 0);
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_rs<MN_MAJOR>(dk, ds[k], q + k * WGMMA_STEP_MN_MAJOR, 1);
    wgmma_commit_group();
}

// The tile of keys that the consumers work on.
struct HopperBackwardTile {
    int start, T, k0;  // first row and length of the sequence; the tile's first key
    int group;         // this thread's warpgroup
    int thread;        // this thread's number in the warpgroup
};

// Finish a tile of keys: let the block with the head's next tiles start, and write dK and dV.
template <bool dropped>
__device__ __forceinline__ void hopper_backward_finish(floatX* dqkv, int* done, float (&dk)[8][4], float (&dv)[8][4],
                                                       const HopperBackwardShared& m, const HopperBackwardTile& x,
                                                       int slot, const HopperParams& z) {
    typedef HopperBackward B;
    uint32_t out_tile = m.out_tiles + x.group * TMA_TILE_BYTES;
    if (m.works[slot].ends && x.k0 + HOPPER_KEYS < x.T) {
        int* finished = done + m.works[slot].sequence * z.NH + m.works[slot].head;
        __threadfence();
        named_barrier_sync(4, B::CONSUMERS * WARPGROUP);
        if (x.group == 0 && x.thread == 0) st_release_gpu(finished, x.k0 / HOPPER_KEYS + 1);
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            dk[j][i] *= z.softmax_scale * z.keep_scale;
            if (dropped) dv[j][i] *= z.keep_scale;
        }
    floatX* to = dqkv + hopper_row_at(z, m.works[slot], x.start);
    mbarrier_arrive(m.kv_empty + 8 * slot);  // every thread arrives, because each has read the work item
    size_t C = (size_t)z.NH * z.HS;
    hopper_write_rows(to + C, 3 * C, x.k0 + TMA_BOX * x.group, x.T, z.HS, out_tile, dk);
    hopper_write_rows(to + 2 * C, 3 * C, x.k0 + TMA_BOX * x.group, x.T, z.HS, out_tile, dv);
}

template <Mask mask, bool dropped>
__device__ __forceinline__ void hopper_backward_consume(floatX* dqkv, float4* sums, int* done, int slot_tiles,
                                                        const HopperBackwardShared& m, int group,
                                                        const HopperParams& z) {
    typedef HopperBackward B;
    int lane = threadIdx.x % WARP, thread = (int)threadIdx.x % WARPGROUP;
    int warp_row = thread / WARP * 16, own_row = TMA_BOX * group + warp_row;
    uint32_t out_tile = m.out_tiles + group * TMA_TILE_BYTES;
    float scale = z.softmax_scale * LOG2_E;
    int queries_done = 0;
    for (int keys_done = 0;; keys_done++) {
        int slot = keys_done & 1;
        mbarrier_wait(m.kv_full + 8 * slot, (keys_done >> 1) & 1);
        HopperWork work = m.works[slot];
        if (work.sequence < 0) return;
        int start = z.cu_seqlens[work.sequence], T = z.cu_seqlens[work.sequence + 1] - start, k0 = work.first;
        uint32_t k_tile = m.kv_tiles + slot * B::KV_BYTES, v_tile = k_tile + 2 * TMA_TILE_BYTES;

        uint32_t k_rows[4][4], v_rows[4][4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            ldmatrix_tile(k_rows[k], k_tile, own_row, k);
            ldmatrix_tile(v_rows[k], v_tile, own_row, k);
        }
        if (work.begins && k0 > 0) {  // wait for the block with the head's earlier tiles of keys
            if (thread == 0) {
                const int* finished = done + work.sequence * z.NH + work.head;
                while (ld_acquire_gpu(finished) * HOPPER_KEYS < k0)
                    ;
            }
            named_barrier_sync(1 + group, WARPGROUP);
        }

        float dk[8][4] = {}, dv[8][4] = {}, s[8][4], dp[8][4], dq[4][4];
        int q0 = mask == CAUSAL ? k0 : 0;
        size_t first_sum =
            hopper_sum_at(slot_tiles, (int)blockIdx.x, q0 / HOPPER_QUERIES, start, work.sequence, work.head, z.NH);
        float4* sum = sums + first_sum * 8 * WARPGROUP + group * 4 * WARPGROUP + thread;
        // Called by every thread, because each has read statistics and bits there.
        auto release = [&](int use) { mbarrier_arrive(m.q_empty + 8 * (use % HOPPER_STAGES)); };
        // Store the sum of dQ for the next tile of keys or, after the last one, write dQ.
        auto write_dq = [&]() {
            // The last tile of keys that these queries attend to: their own, or the sequence's last.
            if (k0 + HOPPER_KEYS > (mask == CAUSAL ? q0 : T - 1)) {
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) dq[j][i] *= z.softmax_scale * z.keep_scale;
                hopper_write_rows(dqkv + hopper_row_at(z, work, start) + 32 * group, (size_t)3 * z.NH * z.HS, q0, T,
                                  z.HS - 32 * group, out_tile, dq);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) __stcg(sum + j * WARPGROUP, *(const float4*)dq[j]);
            }
            sum += hopper_sum_stride(slot_tiles, z.NH) * 8 * WARPGROUP;
        };
        hopper_backward_scores(s, dp, k_rows, v_rows, m, queries_done);
        wgmma_wait_group<1>();
        fence_operand(s);
        for (;;) {
            int stage = queries_done % HOPPER_STAGES;
            uint32_t q_tile = m.q_tiles + stage * B::Q_BYTES;
            uint32_t ds_tile = m.ds_tiles + (queries_done & 1) * 2 * TMA_TILE_BYTES;
#pragma unroll
            for (int j = 0; j < 4; j++)
                *(float4*)dq[j] = k0 > 0 ? __ldcg(sum + j * WARPGROUP) : make_float4(0, 0, 0, 0);
            hopper_backward_probabilities<mask>(s, m, queries_done, q0, k0, own_row, T, scale);
            uint32_t p[4][4], ds[4][4], bits[2][2];
            if constexpr (dropped) {
                uint32_t at = m.bits_tiles + stage * B::BITS_BYTES + (own_row + lane / 4) * HOPPER_ROW_BITS +
                              q0 % DRAW_COLUMNS / 8;
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *(uint2*)bits[half] = *(const uint2*)__cvta_shared_to_generic(at + half * 8 * HOPPER_ROW_BITS);
                hopper_pack_dropped(p, s, bits);
            } else {
                hopper_pack(p, s);
            }
            hopper_backward_dv(dv, p, q_tile + TMA_TILE_BYTES);

            wgmma_wait_group<1>();
            fence_operand(dp);
            if constexpr (dropped) hopper_backward_drop(dp, bits, m, queries_done);
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) dp[j][i] *= s[j][i];
            hopper_pack(ds, dp);
#pragma unroll
            for (int k = 0; k < 4; k++) stmatrix_tile(ds_tile, own_row, k, ds[k]);
            fence_proxy_async_shared();
            named_barrier_sync(4, B::CONSUMERS * WARPGROUP);  // both warpgroups have written their ds
            hopper_backward_dq_dk(dq, dk, ds, ds_tile, k_tile, q_tile, group);

            wgmma_wait_group<1>();
            fence_operand(dq);
            write_dq();
            q0 += HOPPER_QUERIES, queries_done++;
            if (q0 >= T) break;
            hopper_backward_scores(s, dp, k_rows, v_rows, m, queries_done);
            wgmma_wait_group<1>();
            fence_operand(s);
            release(queries_done - 1);
        }
        wgmma_wait_group<0>();
        fence_operand(dv);
        fence_operand(dk);
        release(queries_done - 1);
        HopperBackwardTile x = {.start = start, .T = T, .k0 = k0, .group = group, .thread = thread};
        hopper_backward_finish<dropped>(dqkv, done, dk, dv, m, x, slot, z);
    }
}

// The backward kernel's scratch.
typedef struct {
    float4* sums;  // dQ so far, [hopper_sum_at()][warpgroup][4][thread]
    int* done;     // [sequence, head] counts the finished parts
    int parts, slot_tiles;
    const float* statistics;
} HopperBackwardScratch;

// A block has the producer's warpgroup, then two consumers. Work is (part, sequence, head); a part is some tiles of
// keys.
template <Mask mask, bool dropped>
__global__ void __launch_bounds__(HopperBackward::THREADS, 1)
    attention_backward_hopper_kernel(floatX* dqkv, HopperBackwardScratch scratch,
                                     const __grid_constant__ CUtensorMap qkv, const __grid_constant__ CUtensorMap dout,
                                     const __grid_constant__ HopperParams z) {
#if HOPPER_CODE
    typedef HopperBackward B;
    extern __shared__ unsigned char hopper_shared[];
    __shared__ __align__(8) uint64_t barriers[HOPPER_BACKWARD_BARRIERS];
    __shared__ HopperWork works[3];
    HopperBackwardShared m = hopper_backward_shared(hopper_shared, barriers, works);
    int group = warpgroup_index() - 1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++)
            mbarrier_init(m.kv_full + 8 * i, 1), mbarrier_init(m.kv_empty + 8 * i, WARPGROUP * B::CONSUMERS + 1);
        for (int i = 0; i < HOPPER_STAGES; i++)
            mbarrier_init(m.q_full + 8 * i, 1), mbarrier_init(m.q_empty + 8 * i, WARPGROUP * B::CONSUMERS);
        fence_mbarrier_init();
        fence_proxy_async();
    }
    __syncthreads();
    if (group < 0) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x == 0) hopper_backward_produce_keys<mask>(m, &qkv, scratch.parts, z);
        if (threadIdx.x == WARP) hopper_backward_produce_queries<mask, dropped>(m, scratch.statistics, &qkv, &dout, z);
        return;
    }
    warpgroup_reg_alloc<240>();
    hopper_backward_consume<mask, dropped>(dqkv, scratch.sums, scratch.done, scratch.slot_tiles, m, group, z);
#else
    __trap();
#endif
}

// ---------------------------------------------------------------------------------------------------------
// Launch

static inline void hopper_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                   const real* lse, const Sequences* s, AttentionShape shape, Context* ctx) {
    typedef HopperBackward B;
    int C = shape.NH * shape.HS;
    HopperScratch r = hopper_scratch(s->rows, s->count, s->max_length, shape.NH, ctx->multiprocessors);
    int64_t items = (int64_t)r.heads * r.parts;
    CHECK(items < 1 << 30);
    size_t bits_bytes = flash_bits_bytes(s->rows, s->count, s->max_length, shape);
    uint32_t* bits = (uint32_t*)device_scratch(ctx, bits_bytes + hopper_scratch_bytes(&r));
    float* sums = (float*)((char*)bits + bits_bytes);
    float* statistics = sums + r.sums * HOPPER_SUMS;
    int* done = (int*)(statistics + r.tiles * HOPPER_STATISTICS);
    HopperParams z = hopper_params(s, shape, bits, ctx);
    AttentionDraw draw = draw_begin(ROWS_ARE_KEYS, bits, s, shape, ctx);
    HopperBackwardScratch scratch = {
        .sums = (float4*)sums, .done = done, .parts = r.parts, .slot_tiles = r.slot_tiles, .statistics = statistics};
    unsigned of_statistics = (unsigned)((s->max_length + HOPPER_QUERIES - 1) / HOPPER_QUERIES) *
                             (unsigned)((shape.NH + 3) / 4) * (unsigned)s->count;
    flash_dispatch(shape, [&](auto v) {
        typedef decltype(v) V;
        attention_delta_kernel<V::DROPPED><<<of_statistics + draw_blocks(draw), DRAW_THREADS, 0, ctx->stream>>>(
            statistics, done, dout, out, lse, (int)of_statistics, z, draw);
        cudaCheck(cudaGetLastError());
        auto kernel = attention_backward_hopper_kernel<V::MASK, V::DROPPED>;
        kernel_allow_shared(kernel, B::BYTES, ctx);
        kernel<<<(unsigned)min_int((int)items, ctx->multiprocessors), B::THREADS, B::BYTES, ctx->stream>>>(
            dqkv, scratch, tma_tensor_map(qkv, shape.HS, 3 * shape.NH, s->rows, 3 * C, ctx),
            tma_tensor_map(dout, shape.HS, shape.NH, s->rows, C, ctx), z);
        cudaCheck(cudaGetLastError());
    });
}

#endif
