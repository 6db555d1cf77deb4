/* The forward pass of attention with Hopper's instructions: see attention_tiles.cuh.
 *
 * A work item is a tile of queries of one head of one sequence; each consumer warpgroup owns 64 of its rows. The matmul
 * P V of one tile of keys overlaps with the softmax of the next.
 *
 * Dropout's bits are drawn beforehand (dropout.cuh) and loaded with the tiles of V. Dropped probabilities become zero
 * after the row has been summed. Scratch: the bits.
 * Source: Shah et al., "FlashAttention-3", arXiv 2407.08608, for overlapping softmax and matmuls. */
#ifndef LLMC_HOPPER_ATTENTION_FORWARD_CUH
#define LLMC_HOPPER_ATTENTION_FORWARD_CUH

#include "llmc/hopper/attention_tiles.cuh"

template <int D> struct HopperForward {
    static constexpr int CONSUMERS = D == 64 ? 3 : 2;  // warpgroups
    static constexpr int QUERIES = CONSUMERS * TMA_BOX, THREADS = (CONSUMERS + 1) * WARPGROUP;
    static constexpr int HALVES = D / TMA_BOX;  // adjacent tiles that hold a row's channels
    static constexpr uint32_t Q_BYTES = HALVES * CONSUMERS * TMA_TILE_BYTES, KV_BYTES = HALVES * 2 * TMA_TILE_BYTES;
    static constexpr int Q_STAGES = D == 64 ? 2 : 1;
    static constexpr uint32_t BITS_BYTES = QUERIES * HOPPER_ROW_BITS;
    static constexpr uint32_t BYTES = Q_STAGES * Q_BYTES + 4 * KV_BYTES + 2 * BITS_BYTES + 1024;
};

// Addresses in shared memory. Two stages of keys and of values; dropout's bits come with the values.
struct HopperForwardShared {
    uint32_t q_tiles, k_tiles, v_tiles, bits_tiles;
    uint32_t q_full, q_empty, k_full, k_empty, v_full, v_empty;  // mbarriers, 8 bytes each
};

enum { HOPPER_FORWARD_BARRIERS = 12 };

template <int D> __device__ __forceinline__ HopperForwardShared hopper_forward_shared(void* tiles, uint64_t* barriers) {
    typedef HopperForward<D> F;
    HopperForwardShared m;
    m.q_tiles = ((uint32_t)__cvta_generic_to_shared(tiles) + 1023) & ~1023u;
    m.k_tiles = m.q_tiles + F::Q_STAGES * F::Q_BYTES;
    m.v_tiles = m.k_tiles + 2 * F::KV_BYTES;
    m.bits_tiles = m.v_tiles + 2 * F::KV_BYTES;
    m.q_full = (uint32_t)__cvta_generic_to_shared(barriers);
    m.q_empty = m.q_full + 16;
    m.k_full = m.q_full + 32;
    m.k_empty = m.q_full + 48;
    m.v_full = m.q_full + 64;
    m.v_empty = m.q_full + 80;
    return m;
}

// ---------------------------------------------------------------------------------------------------------
// Producer: one thread

// Takes work items and loads their tiles.
template <int D, Mask mask, bool dropped>
__device__ __forceinline__ void hopper_forward_produce(const HopperForwardShared& m, HopperWork (&works)[2],
                                                       const CUtensorMap* qkv, const HopperParams& z) {
    typedef HopperForward<D> F;
    int tiles = (z.max_seqlen + F::QUERIES - 1) / F::QUERIES, items = z.count * z.NH * tiles;
    int item = -1, tiles_done = 0, keys_done = 0;
    for (;;) {
        // A block's first item is its block index. Each block ends with one number past the end, so `items` numbers are
        // taken from the counter in all.
        item = item < 0 ? (int)blockIdx.x : (int)gridDim.x + hopper_next_item(z, items - 1);
        int slot = tiles_done % F::Q_STAGES, use = tiles_done / F::Q_STAGES;
        if (item >= items) {
            mbarrier_wait(m.q_empty + 8 * slot, ~use & 1);
            works[slot].sequence = -1;
            mbarrier_arrive(m.q_full + 8 * slot);
            return;
        }
        int tile = item % tiles, head = item / tiles % z.NH, sequence = item / tiles / z.NH;
        int start = z.cu_seqlens[sequence], T = z.cu_seqlens[sequence + 1] - start;
        int q0 = F::QUERIES * (mask == CAUSAL ? tiles - 1 - tile : tile);
        if (q0 >= T) continue;
        mbarrier_wait(m.q_empty + 8 * slot, ~use & 1);
        works[slot].sequence = sequence, works[slot].head = head, works[slot].first = q0;
        mbarrier_arrive_expect_tx(m.q_full + 8 * slot, F::Q_BYTES);
#pragma unroll 1
        for (int i = 0; i < F::CONSUMERS; i++)
            for (int half = 0; half < F::HALVES; half++)
                tma_load_3d(m.q_tiles + slot * F::Q_BYTES + (i * F::HALVES + half) * TMA_TILE_BYTES, qkv,
                            TMA_BOX * half, head, start + q0 + TMA_BOX * i, m.q_full + 8 * slot);
        tiles_done++;
        int keys = mask == CAUSAL ? min(T, q0 + F::QUERIES) : T;
        for (int k0 = 0; k0 < keys; k0 += HOPPER_KEYS, keys_done++) {
            int stage = keys_done & 1, free_parity = ~(keys_done >> 1) & 1;
#pragma unroll 1
            for (int v = 0; v < 2; v++) {
                uint32_t full = (v ? m.v_full : m.k_full) + 8 * stage;
                mbarrier_wait((v ? m.v_empty : m.k_empty) + 8 * stage, free_parity);
                mbarrier_arrive_expect_tx(full, F::KV_BYTES + (dropped && v ? F::BITS_BYTES : 0));
                if (dropped && v)
                    bulk_copy_g2s(m.bits_tiles + stage * F::BITS_BYTES,
                                  z.dropout_bits + draw_at(head, k0, start + q0, z.max_seqlen, z.N), F::BITS_BYTES,
                                  full);
                for (int i = 0; i < 2; i++)
                    for (int half = 0; half < F::HALVES; half++)
                        tma_load_3d((v ? m.v_tiles : m.k_tiles) + stage * F::KV_BYTES + (half * 2 + i) * TMA_TILE_BYTES,
                                    qkv, TMA_BOX * half, (1 + v) * z.NH + head, start + k0 + TMA_BOX * i, full);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Consumers

// A warpgroup's part of a tile: 64 queries.
struct HopperForwardTile {
    HopperWork work;
    int start, T;     // first row and length of the sequence
    int group;        // the warpgroup's number
    int group_row;    // its first query, counted in the sequence
    int row;          // this thread's queries: row and row + 8
    uint32_t q_tile;  // the warpgroup's
};

// s = Q K^T
template <int D>
__device__ __forceinline__ void hopper_forward_scores(float (&s)[HOPPER_KEYS / 8][4], uint32_t q_tile,
                                                      uint32_t k_tile) {
    fence_operand(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        wgmma_ss<K_MAJOR, K_MAJOR>(
            s, wgmma_descriptor(q_tile + k / 4 * TMA_TILE_BYTES, 0) + k % 4 * WGMMA_STEP_K_MAJOR,
            wgmma_descriptor(k_tile + k / 4 * 2 * TMA_TILE_BYTES, 0) + k % 4 * WGMMA_STEP_K_MAJOR, k > 0);
    wgmma_commit_group();
}

// o = P V, or += with `add`.
template <int D>
__device__ __forceinline__ void hopper_forward_output(float (&o)[D / 8][4], uint32_t (&p)[HOPPER_KEYS / 16][4],
                                                      uint32_t v_tile, int add) {
    uint32_t v = wgmma_descriptor(v_tile, 2 * TMA_TILE_BYTES);
    fence_operand(o);
    fence_operand(p);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HOPPER_KEYS / 16; k++) wgmma_rs<MN_MAJOR>(o, p[k], v + k * WGMMA_STEP_MN_MAJOR, add || k > 0);
    wgmma_commit_group();
}

// s = -infinity where a query does not attend to a key.
template <Mask mask>
__device__ __forceinline__ void hopper_forward_mask(float (&s)[HOPPER_KEYS / 8][4], const HopperForwardTile& x,
                                                    int k0) {
    int t = threadIdx.x % 4;
    if (k0 + HOPPER_KEYS > x.T || (mask == CAUSAL && k0 + HOPPER_KEYS - 1 > x.group_row)) {
#pragma unroll
        for (int j = 0; j < HOPPER_KEYS / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = k0 + 8 * j + 2 * t + i % 2;
                if (key >= x.T || (mask == CAUSAL && key > x.row + 8 * (i / 2))) s[j][i] = -INFINITY;
            }
    }
}

// s becomes exp(s - row_max). Earlier sums must be multiplied by `rescale`. Every query sees key 0, so row_max is above
// -infinity after the first tile.
__device__ __forceinline__ void hopper_online_softmax(float (&s)[HOPPER_KEYS / 8][4], float (&row_max)[2],
                                                      float (&row_sum)[2], float (&rescale)[2], float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float new_max = row_max_of(s, half, row_max[half]), shift = new_max * scale;
        rescale[half] = ex2_approx(row_max[half] * scale - shift);
        row_max[half] = new_max;
        row_sum[half] = row_sum[half] * rescale[half] + row_exp2(s, half, scale, shift);
    }
}

// Divide by the rows' sums, write lse and out.
template <int D, bool dropped>
__device__ __forceinline__ void hopper_forward_write(floatX* out, float* lse, float (&o)[D / 8][4],
                                                     const float (&row_max)[2], const float (&row_sum)[2],
                                                     const HopperForwardTile& x, const HopperParams& z) {
    typedef HopperForward<D> F;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = quad_sum(row_sum[half]);
        if (threadIdx.x % 4 == 0 && x.row + 8 * half < x.T)
            lse[(size_t)x.work.head * z.N + x.start + x.row + 8 * half] = row_max[half] * z.softmax_scale + logf(total);
        float inverse = (dropped ? z.keep_scale : 1.0f) / total;
#pragma unroll
        for (int j = 0; j < D / 8; j++) o[j][2 * half] *= inverse, o[j][2 * half + 1] *= inverse;
    }
    named_barrier_sync(1 + x.group, WARPGROUP);  // the warpgroup's Q is no longer read
    size_t C = (size_t)z.NH * z.HS;
    floatX* to = out + (size_t)x.start * C + (size_t)x.work.head * z.HS;
#pragma unroll
    for (int half = 0; half < F::HALVES; half++)
        hopper_write_rows(to + TMA_BOX * half, C, x.group_row, x.T, z.HS - TMA_BOX * half,
                          x.q_tile + half * TMA_TILE_BYTES, *(const float(*)[8][4])(&o[8 * half]));
    fence_proxy_async_shared();
}

template <int D, Mask mask, bool dropped>
__device__ __forceinline__ void hopper_forward_consume(floatX* out, float* lse, const HopperForwardShared& m,
                                                       const HopperWork (&works)[2], int group, const HopperParams& z) {
    typedef HopperForward<D> F;
    int lane = threadIdx.x % WARP, g = lane / 4;
    int warp_row = TMA_BOX * group + (int)threadIdx.x % WARPGROUP / WARP * 16;
    float scale = z.softmax_scale * LOG2_E;
    int keys_done = 0;
    for (int tiles_done = 0;; tiles_done++) {
        HopperForwardTile x;
        int slot = tiles_done % F::Q_STAGES;
        mbarrier_wait(m.q_full + 8 * slot, (tiles_done / F::Q_STAGES) & 1);
        x.work = works[slot];
        if (x.work.sequence < 0) return;
        x.start = z.cu_seqlens[x.work.sequence], x.T = z.cu_seqlens[x.work.sequence + 1] - x.start;
        x.group = group, x.group_row = x.work.first + TMA_BOX * group, x.row = x.work.first + warp_row + g;
        // Tiles of keys for the whole block, and for this warpgroup: up to the last key that its last row sees.
        int steps = ((mask == CAUSAL ? min(x.T, x.work.first + F::QUERIES) : x.T) + HOPPER_KEYS - 1) / HOPPER_KEYS;
        int own = ((mask == CAUSAL ? min(x.T, x.group_row + TMA_BOX) : x.T) + HOPPER_KEYS - 1) / HOPPER_KEYS;
        if (x.group_row >= x.T) own = 0;
        x.q_tile = m.q_tiles + slot * F::Q_BYTES + group * F::HALVES * TMA_TILE_BYTES;

        float o[D / 8][4], s[HOPPER_KEYS / 8][4], row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0, 0}, rescale[2];
        uint32_t p[HOPPER_KEYS / 16][4];
        auto wait = [&](uint32_t full, int step) {
            int use = keys_done + step;
            mbarrier_wait(full + 8 * (use & 1), (use >> 1) & 1);
        };
        // With dropout every thread releases V, because every thread reads the bits that come with it.
        auto release = [&](uint32_t empty, int step) {
            __syncwarp();  // no lane is still waiting for the buffer's copy
            if (lane == 0 || (dropped && empty == m.v_empty)) mbarrier_arrive(empty + 8 * ((keys_done + step) & 1));
        };
        auto scores = [&](int step) {
            wait(m.k_full, step);
            hopper_forward_scores<D>(s, x.q_tile, m.k_tiles + ((keys_done + step) & 1) * F::KV_BYTES);
        };
        auto add_output = [&](int step) {
            wait(m.v_full, step);
            hopper_forward_output<D>(o, p, m.v_tiles + ((keys_done + step) & 1) * F::KV_BYTES, step > 0);
        };
        auto softmax = [&](int step) {
            hopper_forward_mask<mask>(s, x, step * HOPPER_KEYS);
            hopper_online_softmax(s, row_max, row_sum, rescale, scale);
        };
        auto pack = [&](int step) {
            if constexpr (dropped) {
                int stage = (keys_done + step) & 1;
                uint32_t bits[2][4], at = m.bits_tiles + stage * F::BITS_BYTES + (warp_row + g) * HOPPER_ROW_BITS;
                wait(m.v_full, step);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *(uint4*)bits[half] = *(const uint4*)__cvta_shared_to_generic(at + half * 8 * HOPPER_ROW_BITS);
                hopper_pack_dropped(p, s, bits);
            } else {
                hopper_pack(p, s);
            }
        };

        if (own > 0) {
            scores(0);
            wgmma_wait_group<0>();
            fence_operand(s);
            release(m.k_empty, 0);
            softmax(0);
            pack(0);
        }
        for (int step = 1; step < own; step++) {
            scores(step);
            add_output(step - 1);
            wgmma_wait_group<1>();
            fence_operand(s);
            release(m.k_empty, step);
            softmax(step);
            wgmma_wait_group<0>();
            fence_operand(o);
            release(m.v_empty, step - 1);
#pragma unroll
            for (int j = 0; j < D / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[j][i] *= rescale[i / 2];
            pack(step);
        }
        if (own > 0) {
            add_output(own - 1);
            wgmma_wait_group<0>();
            fence_operand(o);
            release(m.v_empty, own - 1);
        }
        for (int step = own; step < steps; step++) {  // tiles that only the other warpgroups need
            int use = keys_done + step;
            mbarrier_wait(m.k_full + 8 * (use & 1), (use >> 1) & 1);
            release(m.k_empty, step);
            mbarrier_wait(m.v_full + 8 * (use & 1), (use >> 1) & 1);
            release(m.v_empty, step);
        }
        keys_done += steps;
        if (own > 0) hopper_forward_write<D, dropped>(out, lse, o, row_max, row_sum, x, z);
        mbarrier_arrive(m.q_empty + 8 * slot);  // every thread arrives, because each has read the work
    }
}

// A block has the producer's warpgroup, then the consumers. Work is (sequence, head, tile of queries). CAUSAL starts
// with the last tile, which has the most keys.
template <int D, Mask mask, bool dropped>
__global__ void __launch_bounds__(HopperForward<D>::THREADS, 1)
    attention_forward_hopper_kernel(floatX* out, float* lse, const __grid_constant__ CUtensorMap qkv,
                                    const __grid_constant__ HopperParams z) {
#if HOPPER_CODE
    typedef HopperForward<D> F;
    extern __shared__ unsigned char hopper_shared[];
    __shared__ __align__(8) uint64_t barriers[HOPPER_FORWARD_BARRIERS];
    __shared__ HopperWork works[2];
    HopperForwardShared m = hopper_forward_shared<D>(hopper_shared, barriers);
    int group = warpgroup_index() - 1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 16; i += 8) {
            mbarrier_init(m.q_full + i, 1), mbarrier_init(m.q_empty + i, WARPGROUP * F::CONSUMERS);
            mbarrier_init(m.k_full + i, 1), mbarrier_init(m.k_empty + i, 4 * F::CONSUMERS);
            mbarrier_init(m.v_full + i, 1);
            mbarrier_init(m.v_empty + i, (dropped ? WARPGROUP : 4) * F::CONSUMERS);
        }
        fence_mbarrier_init();
        fence_proxy_async();
    }
    __syncthreads();
    if (group < 0) {
        warpgroup_reg_dealloc<D == 64 ? 32 : 40>();
        if (threadIdx.x != 0) return;
        hopper_forward_produce<D, mask, dropped>(m, works, &qkv, z);
        return;
    }
    warpgroup_reg_alloc<D == 64 ? 160 : 232>();
    hopper_forward_consume<D, mask, dropped>(out, lse, m, works, group, z);
#else
    __trap();
#endif
}

// ---------------------------------------------------------------------------------------------------------
// Launch

static inline void hopper_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s, AttentionShape shape,
                                  Context* ctx) {
    HopperParams z = hopper_params(s, shape, flash_draw_by_query(s, shape, ctx), ctx);
    flash_dispatch(shape, [&](auto v) {
        typedef decltype(v) V;
        typedef HopperForward<V::D> F;
        int64_t items = (int64_t)s->count * shape.NH * ((s->max_length + F::QUERIES - 1) / F::QUERIES);
        CHECK(items < 1 << 30);
        auto kernel = attention_forward_hopper_kernel<V::D, V::MASK, V::DROPPED>;
        kernel_allow_shared(kernel, F::BYTES, ctx);
        kernel<<<(unsigned)min_int((int)items, ctx->multiprocessors), F::THREADS, F::BYTES, ctx->stream>>>(
            out, lse, tma_tensor_map(qkv, shape.HS, 3 * shape.NH, s->rows, 3 * shape.NH * shape.HS, ctx), z);
        cudaCheck(cudaGetLastError());
    });
}

#endif
