/* The loading half of hopper_backward_wide.cuh, the backward pass for heads of 72 to 128 channels: the layout of shared
 * memory and the threads of the producer's warpgroup. */
#ifndef LLMC_OPS_ATTENTION_HOPPER_BACKWARD_WIDE_LOAD_CUH
#define LLMC_OPS_ATTENTION_HOPPER_BACKWARD_WIDE_LOAD_CUH

#include "llmc/ops/attention/hopper_backward_load.cuh"

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)

struct HopperWide {
    static constexpr int CONSUMERS = 2, THREADS = (CONSUMERS + 1) * WARPGROUP;
    static constexpr int STAGES = 2;  // tiles of queries that are loaded ahead
    static constexpr uint32_t KV_BYTES = 8 * TMA_TILE_BYTES, Q_BYTES = 4 * TMA_TILE_BYTES;
    static constexpr uint32_t STATISTICS_BYTES = HOPPER_STATISTICS * sizeof(float),
                              BITS_BYTES = HOPPER_KEYS * HOPPER_ROW_BITS;
    static constexpr uint32_t BYTES = KV_BYTES + STAGES * (Q_BYTES + STATISTICS_BYTES + BITS_BYTES) +
                                      4 * TMA_TILE_BYTES + CONSUMERS * TMA_TILE_BYTES + 1024;
};

static_assert(HOPPER_WIDE_SUMS == HOPPER_QUERIES * 2 * TMA_BOX, "the sums of a tile");

// Addresses in shared memory. Tiles of K: channels 0 to 63 of the 128 keys, then the other channels; the same for V. A
// stage has Q and dout, each as two halves of the channels. There are two tiles of ds. Each out tile belongs to one
// consumer warpgroup.
struct HopperWideShared {
    uint32_t kv_tiles, q_tiles, ds_tiles, out_tiles, statistics_tiles, bits_tiles;
    uint32_t kv_full, kv_empty, q_full, q_empty, sum_ready;  // mbarriers, 8 bytes each
    HopperWork* works;                                       // of the loaded tile of keys; then the loader's own
};

enum { HOPPER_WIDE_BARRIERS = 2 + 3 * HopperWide::STAGES };

__device__ __forceinline__ HopperWideShared hopper_wide_shared(void* tiles, uint64_t* barriers, HopperWork* works) {
    typedef HopperWide W;
    HopperWideShared m;
    m.kv_tiles = ((uint32_t)__cvta_generic_to_shared(tiles) + 1023) & ~1023u;
    m.q_tiles = m.kv_tiles + W::KV_BYTES;
    m.ds_tiles = m.q_tiles + W::STAGES * W::Q_BYTES;
    m.out_tiles = m.ds_tiles + 4 * TMA_TILE_BYTES;
    m.statistics_tiles = m.out_tiles + W::CONSUMERS * TMA_TILE_BYTES;
    m.bits_tiles = m.statistics_tiles + W::STAGES * W::STATISTICS_BYTES;
    m.kv_full = (uint32_t)__cvta_generic_to_shared(barriers);
    m.kv_empty = m.kv_full + 8;
    m.q_full = m.kv_full + 16;
    m.q_empty = m.q_full + 8 * W::STAGES;
    m.sum_ready = m.q_empty + 8 * W::STAGES;
    m.works = works;
    return m;
}

// ---------------------------------------------------------------------------------------------------------
// Producer: one thread. `use` counts the tiles of queries over the whole life of the block.

// Take work items. Load a tile of keys and values, then the data of the queries that attend to them.
template <Mask mask, bool dropped>
__device__ __forceinline__ void hopper_wide_produce(const HopperWideShared& m, const float* statistics,
                                                    const CUtensorMap* qkv, const CUtensorMap* dout,
                                                    const HopperParams& z) {
    typedef HopperWide W;
    int tiles = (z.max_seqlen + HOPPER_KEYS - 1) / HOPPER_KEYS, items = z.count * z.NH * tiles, keys_done = 0, use = 0;
    volatile HopperWork* work = &m.works[1];  // read again at each use, because registers are scarce
    for (;;) {
        // Every item comes from the counter: see hopper_backward_produce_keys(). This thread takes an item only after
        // it has started the last loads of the previous one, so the consumers begin it soon.
        int item = hopper_next_item(z, items + (int)gridDim.x - 1);
        if (item >= items) break;
        work->sequence = item / tiles / z.NH, work->head = item / tiles % z.NH;
        work->first = HOPPER_KEYS * (tiles - 1 - item % tiles);
        work->start = z.cu_seqlens[work->sequence];
        work->length = z.cu_seqlens[work->sequence + 1] - work->start;
        if (work->first >= work->length) continue;
#pragma unroll 1
        for (int i = 0; i < 8; i++)
            tma_prefetch_3d(qkv, TMA_BOX * (i / 2 % 2), (1 + i / 4) * z.NH + work->head,
                            work->start + work->first + TMA_BOX * (i % 2));
        mbarrier_wait(m.kv_empty, ~keys_done & 1);
        m.works[0] = m.works[1];
        mbarrier_arrive_expect_tx(m.kv_full, W::KV_BYTES);
#pragma unroll 1
        for (int i = 0; i < 8; i++)
            tma_load_3d(m.kv_tiles + i * TMA_TILE_BYTES, qkv, TMA_BOX * (i / 2 % 2), (1 + i / 4) * z.NH + work->head,
                        work->start + work->first + TMA_BOX * (i % 2), m.kv_full);
        keys_done++;
#pragma unroll 1
        for (int q0 = mask == CAUSAL ? work->first : 0; q0 < work->length; q0 += HOPPER_QUERIES, use++) {
            int stage = use % W::STAGES;
            uint32_t q_tile = m.q_tiles + stage * W::Q_BYTES, full = m.q_full + 8 * stage;
            mbarrier_wait(m.q_empty + 8 * stage, ~(use / W::STAGES) & 1);
            mbarrier_arrive_expect_tx(full, W::Q_BYTES + W::STATISTICS_BYTES + (dropped ? W::BITS_BYTES : 0));
#pragma unroll 1
            for (int i = 0; i < 4; i++)
                tma_load_3d(q_tile + i * TMA_TILE_BYTES, i < 2 ? qkv : dout, TMA_BOX * (i % 2), work->head,
                            work->start + q0, full);
            int query_tile = hopper_first_tile(work->start, work->sequence) + q0 / HOPPER_QUERIES;
            bulk_copy_g2s(m.statistics_tiles + stage * W::STATISTICS_BYTES,
                          statistics + ((size_t)query_tile * z.NH + work->head) * HOPPER_STATISTICS,
                          W::STATISTICS_BYTES, full);
            if (dropped)
                bulk_copy_g2s(m.bits_tiles + stage * W::BITS_BYTES,
                              z.dropout_bits + draw_at(work->head, q0, work->start + work->first, z.max_seqlen, z.N),
                              W::BITS_BYTES, full);
        }
    }
    mbarrier_wait(m.kv_empty, ~keys_done & 1);
    m.works[0].sequence = -1;
    mbarrier_arrive(m.kv_full);
}

// Two threads of two other warps keep the sums in order. Consumers release a stage after they have written its tile's
// sum. Before the stage's next tile they wait for both threads, so that neither thread misses a phase.

// Signal the consumers when they may read the sum of a tile of queries.
template <Mask mask>
__device__ __forceinline__ void hopper_wide_await(const HopperWideShared& m, const int* done, const HopperParams& z) {
    typedef HopperWide W;
    int use = 0;
#pragma unroll 1
    for (int keys_done = 0;; keys_done++) {
        mbarrier_wait(m.kv_full, keys_done & 1);
        const HopperWork* work = m.works;
        if (work->sequence < 0) return;
        int k0 = work->first, length = work->length;
        const int* next = done + hopper_wide_done_at(work->start, work->sequence, k0 + HOPPER_KEYS, work->head, z.NH);
        int tile = mask == CAUSAL ? k0 / HOPPER_QUERIES : 0, tiles = (length + HOPPER_QUERIES - 1) / HOPPER_QUERIES;
        // The first tile of queries to whose sum the next tile of keys adds.
        int begun = k0 + HOPPER_KEYS >= length ? tiles : mask == CAUSAL ? tile + HOPPER_KEYS / HOPPER_QUERIES : 0;
        mbarrier_arrive(m.kv_empty);
#pragma unroll 1
        for (int seen = 0; tile < tiles; tile++, use++) {
            int stage = use % W::STAGES;
            mbarrier_wait(m.q_empty + 8 * stage, ~(use / W::STAGES) & 1);
            if (tile >= begun)
                while (seen <= tile) seen = ld_acquire_gpu(next);
            mbarrier_arrive(m.sum_ready + 8 * stage);
        }
    }
}

// Publish, to the block with the previous tile of keys, the number of tiles of queries whose sums are written.
template <Mask mask>
__device__ __forceinline__ void hopper_wide_tell(const HopperWideShared& m, int* done, const HopperParams& z) {
    typedef HopperWide W;
    int use = 0;
#pragma unroll 1
    for (int keys_done = 0;; keys_done++) {
        mbarrier_wait(m.kv_full, keys_done & 1);
        const HopperWork* work = m.works;
        if (work->sequence < 0) return;
        int k0 = work->first, length = work->length;
        int* own = done + hopper_wide_done_at(work->start, work->sequence, k0, work->head, z.NH);
        int tile = mask == CAUSAL ? k0 / HOPPER_QUERIES : 0, tiles = (length + HOPPER_QUERIES - 1) / HOPPER_QUERIES;
        int told = k0 > 0 ? tile + W::STAGES : tiles;  // once a tile's stage is free, the tile STAGES before is done
        mbarrier_arrive(m.kv_empty);
#pragma unroll 1
        for (; tile < tiles; tile++, use++) {
            int stage = use % W::STAGES;
            mbarrier_wait(m.q_empty + 8 * stage, ~(use / W::STAGES) & 1);
            mbarrier_arrive(m.sum_ready + 8 * stage);
            if (tile >= told) st_release_gpu(own, tile - W::STAGES + 1);
        }
        if (k0 > 0) {
#pragma unroll 1
            for (int last = max(0, use - W::STAGES); last < use; last++) {
                mbarrier_wait(m.q_empty + 8 * (last % W::STAGES), (last / W::STAGES) & 1);
                st_release_gpu(own, tiles - use + last + 1);
            }
        }
    }
}

#endif
#endif
