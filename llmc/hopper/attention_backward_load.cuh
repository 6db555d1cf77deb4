/* The loading half of attention_backward.cuh, the backward pass of attention with Hopper's instructions: the kernel
 * that computes row statistics beforehand, the layout of shared memory, and the producer. */
#ifndef LLMC_HOPPER_ATTENTION_BACKWARD_LOAD_CUH
#define LLMC_HOPPER_ATTENTION_BACKWARD_LOAD_CUH

#include "llmc/hopper/attention_tiles.cuh"

enum { HOPPER_STAGES = 4 };  // tiles of queries that are loaded ahead

static_assert(HOPPER_SUMS == HOPPER_QUERIES * TMA_BOX, "the sums of a tile");

// Compute the row statistics of the `block`-th tile of queries for four heads. 8 lanes take a row of one head.
// Statistics past the sequence's end are zero. It also sets the counters in `done` to 0 for the next kernel: one for
// each sequence and head.
__device__ inline void hopper_row_stats(float* statistics, int* done, const floatX* dout, const floatX* out,
                                        const float* lse, const HopperParams& z, int block) {
    __shared__ float deltas[4][HOPPER_QUERIES];
    int tiles = (z.max_seqlen + HOPPER_QUERIES - 1) / HOPPER_QUERIES, fours = (z.NH + 3) / 4;
    int first = block % tiles * HOPPER_QUERIES, heads = block / tiles % fours * 4, sequence = block / tiles / fours;
    int start = z.cu_seqlens[sequence], exist = z.cu_seqlens[sequence + 1] - start - first;
    if (first == 0 && threadIdx.x < 4 && heads + (int)threadIdx.x < z.NH)
        done[sequence * z.NH + heads + threadIdx.x] = 0;
    if (exist <= 0) return;
    int head = heads + threadIdx.x / 8 % 4, channel = threadIdx.x % 8 * 8;
#pragma unroll 4
    for (int r = threadIdx.x / WARP; r < HOPPER_QUERIES; r += DRAW_THREADS / WARP) {
        float delta = 0;
        if (r < exist && head < z.NH && channel < z.HS) {
            size_t at = ((size_t)(start + first + r) * z.NH + head) * z.HS + channel;
            Vector<floatX> x = load128(dout + at), y = load128(out + at);
#pragma unroll
            for (int i = 0; i < 8; i++) delta += to_float(x.v[i]) * to_float(y.v[i]);
        }
#pragma unroll
        for (int distance = 4; distance; distance /= 2) delta += __shfl_xor_sync(ALL_LANES, delta, distance);
        if (threadIdx.x % 8 == 0) deltas[threadIdx.x / 8 % 4][r] = delta;
    }
    __syncthreads();
    int row = threadIdx.x % HOPPER_QUERIES;
    head = heads + threadIdx.x / HOPPER_QUERIES;
    if (head >= z.NH) return;
    size_t tile = (size_t)hopper_first_tile(start, sequence) + first / HOPPER_QUERIES;
    float* to = statistics + (tile * z.NH + head) * HOPPER_STATISTICS + row;
    to[0] = row < exist ? lse[(size_t)head * z.N + start + first + row] * LOG2_E : 0;
    to[HOPPER_QUERIES] = row < exist ? deltas[threadIdx.x / HOPPER_QUERIES][row] / z.keep_scale : 0;
}

// `blocks` blocks compute statistics, the others draw dropout's bits by key. The two kinds alternate, because the first
// is memory-bound and the second compute-bound.
template <bool dropped>
__global__ void __launch_bounds__(DRAW_THREADS)
    attention_delta_kernel(float* statistics, int* done, const floatX* dout, const floatX* out, const float* lse,
                           int blocks, const __grid_constant__ HopperParams z,
                           const __grid_constant__ AttentionDraw bits) {
#if HOPPER_CODE
    int before = (int)((int64_t)blockIdx.x * blocks / gridDim.x);  // blocks with statistics before this one
    if (!dropped || (int64_t)(blockIdx.x + 1) * blocks / gridDim.x > before)
        hopper_row_stats(statistics, done, dout, out, lse, z, before);
    else draw_by_key_thread(bits, (int)blockIdx.x - before);
#endif
}

struct HopperBackward {
    static constexpr int CONSUMERS = 2, THREADS = (CONSUMERS + 1) * WARPGROUP;
    static constexpr uint32_t KV_BYTES = 4 * TMA_TILE_BYTES, Q_BYTES = 2 * TMA_TILE_BYTES;
    static constexpr uint32_t STATISTICS_BYTES = HOPPER_STATISTICS * sizeof(float),
                              BITS_BYTES = HOPPER_KEYS * HOPPER_ROW_BITS;
    static constexpr uint32_t BYTES = 2 * KV_BYTES + HOPPER_STAGES * (Q_BYTES + STATISTICS_BYTES + BITS_BYTES) +
                                      4 * TMA_TILE_BYTES + CONSUMERS * TMA_TILE_BYTES + 1024;
};

// The first tile of keys of part `part`. A sequence's `tiles` tiles are divided into `parts` parts of similar work.
template <Mask mask> __device__ inline int hopper_part_begin(int tiles, int part, int parts) {
    if (mask == FULL) return tiles * part / parts;
    // With CAUSAL, tiles - n tiles of queries of the same size attend to tile n.
    int n = 0, pairs = 0;
    while (n < tiles && (pairs + tiles - n) * parts <= tiles * (tiles + 1) / 2 * part) pairs += tiles - n++;
    return n;
}

// Addresses in shared memory. There are two stages of keys and values. Each out tile belongs to one consumer warpgroup.
struct HopperBackwardShared {
    uint32_t kv_tiles, q_tiles, ds_tiles, out_tiles, statistics_tiles, bits_tiles;
    uint32_t kv_full, kv_empty, q_full, q_empty;  // mbarriers, 8 bytes each
    HopperWork* works;                            // of the two loaded tiles of keys; then the producer's own
};

enum { HOPPER_BACKWARD_BARRIERS = 4 + 2 * HOPPER_STAGES };

__device__ __forceinline__ HopperBackwardShared hopper_backward_shared(void* tiles, uint64_t* barriers,
                                                                       HopperWork* works) {
    typedef HopperBackward B;
    HopperBackwardShared m;
    m.kv_tiles = ((uint32_t)__cvta_generic_to_shared(tiles) + 1023) & ~1023u;
    m.q_tiles = m.kv_tiles + 2 * B::KV_BYTES;
    m.ds_tiles = m.q_tiles + HOPPER_STAGES * B::Q_BYTES;
    m.out_tiles = m.ds_tiles + 4 * TMA_TILE_BYTES;
    m.statistics_tiles = m.out_tiles + B::CONSUMERS * TMA_TILE_BYTES;
    m.bits_tiles = m.statistics_tiles + HOPPER_STAGES * B::STATISTICS_BYTES;
    m.kv_full = (uint32_t)__cvta_generic_to_shared(barriers);
    m.kv_empty = m.kv_full + 16;
    m.q_full = m.kv_full + 32;
    m.q_empty = m.q_full + 8 * HOPPER_STAGES;
    m.works = works;
    return m;
}

// ---------------------------------------------------------------------------------------------------------
// Producer: two threads of two warps, so that each gets by with the few registers left

// Takes work items and loads tiles of keys and values.
template <Mask mask>
__device__ __forceinline__ void hopper_backward_produce_keys(const HopperBackwardShared& m, const CUtensorMap* qkv,
                                                             int parts, const HopperParams& z) {
    typedef HopperBackward B;
    int heads = z.count * z.NH, keys_done = 0;
    volatile HopperWork* item_work = &m.works[2];
    for (;;) {
        // Every item comes from the counter, including the first, and each block takes one number past the end. So a
        // block that cannot start yet, because another kernel occupies its SM, holds no work that others wait for.
        int item = hopper_next_item(z, heads * parts + (int)gridDim.x - 1);
        if (item >= heads * parts) break;
        item_work->sequence = item % heads / z.NH, item_work->head = item % z.NH;
        item_work->start = z.cu_seqlens[item_work->sequence];
        item_work->length = z.cu_seqlens[item_work->sequence + 1] - item_work->start;
        int tiles = (item_work->length + HOPPER_KEYS - 1) / HOPPER_KEYS;
        int first = hopper_part_begin<mask>(tiles, item / heads, parts);
        int last = hopper_part_begin<mask>(tiles, item / heads + 1, parts);
        item_work->first = HOPPER_KEYS * first, item_work->begins = 1;
#pragma unroll 1
        for (int rest = last - first; rest > 0; rest--, keys_done++) {
            int slot = keys_done & 1;
            uint32_t full = m.kv_full + 8 * slot, tile = m.kv_tiles + slot * B::KV_BYTES;
            mbarrier_wait(m.kv_empty + 8 * slot, ~(keys_done >> 1) & 1);
            item_work->ends = rest == 1;
            m.works[slot] = m.works[2];
            mbarrier_arrive_expect_tx(full, B::KV_BYTES);
#pragma unroll 1
            for (int i = 0; i < 4; i++)
                tma_load_3d(tile + i * TMA_TILE_BYTES, qkv, 0, (1 + i / 2) * z.NH + item_work->head,
                            item_work->start + item_work->first + TMA_BOX * (i % 2), full);
            item_work->first += HOPPER_KEYS, item_work->begins = 0;
        }
    }
    mbarrier_wait(m.kv_empty + 8 * (keys_done & 1), ~(keys_done >> 1) & 1);
    m.works[keys_done & 1].sequence = -1;
    mbarrier_arrive(m.kv_full + 8 * (keys_done & 1));
}

// Load the data of the queries that attend to these keys: Q, dout, statistics and dropout's bits.
template <Mask mask, bool dropped>
__device__ __forceinline__ void hopper_backward_produce_queries(const HopperBackwardShared& m, const float* statistics,
                                                                const CUtensorMap* qkv, const CUtensorMap* dout,
                                                                const HopperParams& z) {
    typedef HopperBackward B;
    int queries_done = 0;
#pragma unroll 1
    for (int keys_done = 0;; keys_done++) {
        int slot = keys_done & 1;
        mbarrier_wait(m.kv_full + 8 * slot, (keys_done >> 1) & 1);
        volatile HopperWork* work = &m.works[slot];  // read again at each use, because registers are scarce
        if (work->sequence < 0) return;
#pragma unroll 1
        for (int q0 = mask == CAUSAL ? work->first : 0; q0 < work->length; q0 += HOPPER_QUERIES) {
            int stage = queries_done % HOPPER_STAGES;
            uint32_t q_tile = m.q_tiles + stage * B::Q_BYTES, full = m.q_full + 8 * stage;
            mbarrier_wait(m.q_empty + 8 * stage, ~(queries_done / HOPPER_STAGES) & 1);
            mbarrier_arrive_expect_tx(full, B::Q_BYTES + B::STATISTICS_BYTES + (dropped ? B::BITS_BYTES : 0));
            tma_load_3d(q_tile, qkv, 0, work->head, work->start + q0, full);
            tma_load_3d(q_tile + TMA_TILE_BYTES, dout, 0, work->head, work->start + q0, full);
            int query_tile = hopper_first_tile(work->start, work->sequence) + q0 / HOPPER_QUERIES;
            bulk_copy_g2s(m.statistics_tiles + stage * B::STATISTICS_BYTES,
                          statistics + ((size_t)query_tile * z.NH + work->head) * HOPPER_STATISTICS,
                          B::STATISTICS_BYTES, full);
            if (dropped)
                bulk_copy_g2s(m.bits_tiles + stage * B::BITS_BYTES,
                              z.dropout_bits + draw_at(work->head, q0, work->start + work->first, z.max_seqlen, z.N),
                              B::BITS_BYTES, full);
            queries_done++;
        }
        mbarrier_arrive(m.kv_empty + 8 * slot);
    }
}

#endif
