/* The backward pass of attention on Hopper's own instructions: see attention_hopper.cuh.
 *
 * An item is a run of neighbouring tiles of 128 keys of one head; each of two groups owns 64 keys of a tile, its K and V
 * as left operands in registers, and walks over the queries, 64 at a time: S^T = K Q^T, dP^T = V dout^T, then
 * dV += P^T dout and dK += ds^T Q from registers, and dQ = ds K over both groups' keys through shared memory. dQ sums
 * over tiles of keys: it waits in global memory, in fp32 and in the order of the registers, so that the thread that
 * wrote a number reads it again. The tiles of keys of one head are taken in ascending order, by one block or by blocks
 * that wait for each other, so that the sum has one order: no atomics, the same bits every time. An item's predecessor
 * has always been given out before it, to a block that runs: the wait ends.
 *
 * Dropout's bits, by key, come with the tiles of queries. Its scale is left out of ds, and dQ, dK and dV are multiplied
 * with it in the end: products that begin at -delta / scale give dout V - delta / scale for the pairs that are kept, and
 * of the others -delta / scale is left.
 *
 * Numerics as in attention_flash.cuh. Scratch: dQ in fp32 and 8 bytes for each query and head, both rounded up to tiles
 * of 64 queries of a sequence, and dropout's bits. */
#ifndef LLMC_ATTENTION_HOPPER_BACKWARD_CUH
#define LLMC_ATTENTION_HOPPER_BACKWARD_CUH

#include "attention_hopper.cuh"

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)

enum {
    HOPPER_QUERIES = 64,                    // of a tile
    HOPPER_STAGES = 4,                      // tiles of queries on their way
    HOPPER_STATISTICS = 2 * HOPPER_QUERIES  // floats of a tile of queries: lse in powers of two, then delta / scale
};

// Where a sequence's part of the scratch begins, in tiles of queries: no two sequences share one.
__device__ inline int hopper_first_tile(int start, int sequence) { return start / HOPPER_QUERIES + sequence; }

// The statistics of `block`-th tile of queries and four heads, of which 8 lanes take a row's channels of one head; zeros
// past the sequence's end. And done[sequence, head] = 0, for the kernel that follows.
__device__ inline void hopper_statistics(float* statistics, int* done, const floatX* dout, const floatX* out,
                                         const float* lse, const HopperArguments& z, int block) {
    __shared__ float deltas[4][HOPPER_QUERIES];
    int tiles = (z.longest + HOPPER_QUERIES - 1) / HOPPER_QUERIES, fours = (z.NH + 3) / 4;
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
    to[0] = row < exist ? lse[(size_t)head * z.N + start + first + row] * FLASH_LOG2_E : 0;
    to[HOPPER_QUERIES] = row < exist ? deltas[threadIdx.x / HOPPER_QUERIES][row] / z.kept : 0;
}

// Statistics, by `blocks` blocks, and dropout's bits by key, by the others. They take turns: the former wait for memory
// while the latter compute.
template <bool dropped>
__global__ void __launch_bounds__(DRAW_THREADS)
    attention_delta_kernel(float* statistics, int* done, const floatX* dout, const floatX* out, const float* lse,
                           int blocks, const __grid_constant__ HopperArguments z,
                           const __grid_constant__ AttentionDraw bits) {
    int before = (int)((int64_t)blockIdx.x * blocks / gridDim.x);  // blocks with statistics before this one
    if (!dropped || (int64_t)(blockIdx.x + 1) * blocks / gridDim.x > before)
        hopper_statistics(statistics, done, dout, out, lse, z, before);
    else draw_by_key_thread(bits, (int)(blockIdx.x - before) * DRAW_THREADS + threadIdx.x);
}

struct HopperBackward {
    static constexpr int GROUPS = 2, THREADS = (GROUPS + 1) * WARPGROUP;
    static constexpr uint32_t KV_BYTES = 4 * HOPPER_TILE, Q_BYTES = 2 * HOPPER_TILE;
    static constexpr uint32_t STATISTICS_BYTES = HOPPER_STATISTICS * sizeof(float),
                              BITS_BYTES = HOPPER_KEYS * HOPPER_ROW_BITS;
    static constexpr uint32_t BYTES = 2 * KV_BYTES + HOPPER_STAGES * (Q_BYTES + STATISTICS_BYTES + BITS_BYTES) +
                                      4 * HOPPER_TILE + GROUPS * HOPPER_TILE + 1024;
};

// The first tile of keys of part `part` of `parts` of a sequence with `tiles` of them: parts of about equal work.
template <Mask mask> __device__ inline int hopper_part(int tiles, int part, int parts) {
    if (mask == FULL) return tiles * part / parts;
    // Tile n of the CAUSAL ones meets tiles - n tiles of queries of its size.
    int n = 0, pairs = 0;
    while (n < tiles && (pairs + tiles - n) * parts <= tiles * (tiles + 1) / 2 * part) pairs += tiles - n++;
    return n;
}

// Where a head's first row begins in qkv. Worked out where it is needed: registers are scarce in the loop.
__device__ inline size_t hopper_row_at(const HopperArguments& z, const HopperWork& work, int start) {
    int head = work.head;
    asm volatile("" : "+r"(start), "+r"(head));
    return (size_t)start * (3 * z.NH * z.HS) + head * z.HS;
}

// A block: 2 groups that compute, and the producer. Work is (part, sequence, head), a part being some tiles of keys;
// done[sequence, head] counts those that are through. sums: dQ so far, [tile of queries][head][group][4][thread].
template <Mask mask, bool dropped>
__global__ void __launch_bounds__(HopperBackward::THREADS, 1)
    attention_backward_hopper_kernel(floatX* dqkv, float4* sums, int* done, int parts, const float* statistics,
                                     const __grid_constant__ CUtensorMap qkv, const __grid_constant__ CUtensorMap dout,
                                     const __grid_constant__ HopperArguments z) {
#if HOPPER_CODE
    typedef HopperBackward B;
    extern __shared__ unsigned char hopper_shared[];
    __shared__ __align__(8) uint64_t barriers[4 + 2 * HOPPER_STAGES];
    __shared__ HopperWork works[3];  // of the two tiles of keys that are there or on their way; the producer's own
    uint32_t kv_tiles = ((uint32_t)__cvta_generic_to_shared(hopper_shared) + 1023) & ~1023u;
    uint32_t q_tiles = kv_tiles + 2 * B::KV_BYTES, ds_tiles = q_tiles + HOPPER_STAGES * B::Q_BYTES;
    uint32_t out_tiles = ds_tiles + 4 * HOPPER_TILE, statistics_tiles = out_tiles + B::GROUPS * HOPPER_TILE;
    uint32_t bits_tiles = statistics_tiles + HOPPER_STAGES * B::STATISTICS_BYTES;
    uint32_t kv_full = (uint32_t)__cvta_generic_to_shared(barriers), kv_empty = kv_full + 16, q_full = kv_full + 32,
             q_empty = q_full + 8 * HOPPER_STAGES;
    int group = hopper_group() - 1, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++)
            hopper_barrier_init(kv_full + 8 * i, 1), hopper_barrier_init(kv_empty + 8 * i, WARPGROUP * B::GROUPS + 1);
        for (int i = 0; i < HOPPER_STAGES; i++)
            hopper_barrier_init(q_full + 8 * i, 1), hopper_barrier_init(q_empty + 8 * i, WARPGROUP * B::GROUPS);
        hopper_barrier_init_done();
    }
    __syncthreads();

    if (group < 0) {  // two threads of two warps, so that each gets by with the registers that are left
        hopper_give_registers<24>();
        if (threadIdx.x == 0) {  // takes work, brings keys and values
            int heads = z.count * z.NH, keys_done = 0;
            volatile HopperWork* item_work = &works[2];
            for (;;) {
                // Also the first, and each block's last, which is none: a block that has not begun yet, because another
                // kernel holds its multiprocessor, has no work that others wait for.
                int item = hopper_take(z, heads * parts + (int)gridDim.x - 1);
                if (item >= heads * parts) break;
                item_work->sequence = item % heads / z.NH, item_work->head = item % z.NH;
                item_work->start = z.cu_seqlens[item_work->sequence];
                item_work->length = z.cu_seqlens[item_work->sequence + 1] - item_work->start;
                int tiles = (item_work->length + HOPPER_KEYS - 1) / HOPPER_KEYS;
                int first = hopper_part<mask>(tiles, item / heads, parts);
                int last = hopper_part<mask>(tiles, item / heads + 1, parts);
                item_work->first = HOPPER_KEYS * first, item_work->begins = 1;
#pragma unroll 1
                for (int rest = last - first; rest > 0; rest--, keys_done++) {
                    int slot = keys_done & 1;
                    uint32_t full = kv_full + 8 * slot, tile = kv_tiles + slot * B::KV_BYTES;
                    hopper_barrier_wait(kv_empty + 8 * slot, ~(keys_done >> 1) & 1);
                    item_work->ends = rest == 1;
                    works[slot] = works[2];
                    hopper_arrive_expect(full, B::KV_BYTES);
#pragma unroll 1
                    for (int i = 0; i < 4; i++)
                        hopper_copy_box(tile + i * HOPPER_TILE, &qkv, 0, (1 + i / 2) * z.NH + item_work->head,
                                        item_work->start + item_work->first + HOPPER_BOX * (i % 2), full);
                    item_work->first += HOPPER_KEYS, item_work->begins = 0;
                }
            }
            hopper_barrier_wait(kv_empty + 8 * (keys_done & 1), ~(keys_done >> 1) & 1);
            works[keys_done & 1].sequence = -1;
            hopper_arrive(kv_full + 8 * (keys_done & 1));
        }
        if (threadIdx.x == WARP) {  // brings what belongs to the queries that meet them
            int queries_done = 0;
#pragma unroll 1
            for (int keys_done = 0;; keys_done++) {
                int slot = keys_done & 1;
                hopper_barrier_wait(kv_full + 8 * slot, (keys_done >> 1) & 1);
                // Read again wherever it is needed: what stays in registers must be little.
                volatile HopperWork* work = &works[slot];
                if (work->sequence < 0) return;
#pragma unroll 1
                for (int q0 = mask == CAUSAL ? work->first : 0; q0 < work->length; q0 += HOPPER_QUERIES) {
                    int stage = queries_done % HOPPER_STAGES;
                    uint32_t q_tile = q_tiles + stage * B::Q_BYTES, q_barrier = q_full + 8 * stage;
                    hopper_barrier_wait(q_empty + 8 * stage, ~(queries_done / HOPPER_STAGES) & 1);
                    hopper_arrive_expect(q_barrier, B::Q_BYTES + B::STATISTICS_BYTES + (dropped ? B::BITS_BYTES : 0));
                    hopper_copy_box(q_tile, &qkv, 0, work->head, work->start + q0, q_barrier);
                    hopper_copy_box(q_tile + HOPPER_TILE, &dout, 0, work->head, work->start + q0, q_barrier);
                    int query_tile = hopper_first_tile(work->start, work->sequence) + q0 / HOPPER_QUERIES;
                    hopper_copy(statistics_tiles + stage * B::STATISTICS_BYTES,
                                statistics + ((size_t)query_tile * z.NH + work->head) * HOPPER_STATISTICS,
                                B::STATISTICS_BYTES, q_barrier);
                    if (dropped)
                        hopper_copy(bits_tiles + stage * B::BITS_BYTES,
                                    z.bits + draw_at(work->head, q0, work->start + work->first, z.longest, z.N),
                                    B::BITS_BYTES, q_barrier);
                    queries_done++;
                }
                hopper_arrive(kv_empty + 8 * slot);
            }
        }
        return;
    }

    hopper_take_registers<240>();
    int t = lane % 4, thread = (int)threadIdx.x % WARPGROUP;
    int warp_row = thread / WARP * 16, own_row = HOPPER_BOX * group + warp_row;
    uint32_t out_tile = out_tiles + group * HOPPER_TILE;
    float scale = z.factor * FLASH_LOG2_E;
    int queries_done = 0;
    for (int keys_done = 0;; keys_done++) {
        int slot = keys_done & 1;
        hopper_barrier_wait(kv_full + 8 * slot, (keys_done >> 1) & 1);
        HopperWork work = works[slot];
        if (work.sequence < 0) return;
        int start = z.cu_seqlens[work.sequence], T = z.cu_seqlens[work.sequence + 1] - start, k0 = work.first;
        uint32_t k_tile = kv_tiles + slot * B::KV_BYTES, v_tile = k_tile + 2 * HOPPER_TILE;

        uint32_t k_rows[4][4], v_rows[4][4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            hopper_load_square(k_rows[k], k_tile, own_row, k);
            hopper_load_square(v_rows[k], v_tile, own_row, k);
        }
        if (work.begins && k0 > 0) {  // the block with the keys before these must be through with them
            if (thread == 0) {
                int through, *finished = done + work.sequence * z.NH + work.head;
                do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(through) : "l"(finished) : "memory");
                while (through * HOPPER_KEYS < k0);
            }
            hopper_meet(1 + group, WARPGROUP);
        }

        float dk[8][4] = {}, dv[8][4] = {}, s[8][4], dp[8][4];
        int q0 = mask == CAUSAL ? k0 : 0;
        float4* sum = sums +
                      ((size_t)(hopper_first_tile(start, work.sequence) + q0 / HOPPER_QUERIES) * z.NH + work.head) * 8 *
                          WARPGROUP +
                      group * 4 * WARPGROUP + thread;
        // Of the tile of queries number `use`, the statistics of this thread's queries in columns 8 j.
        auto exponent_of = [&](int use, int j) {
            return *(const float2*)__cvta_shared_to_generic(
                statistics_tiles + use % HOPPER_STAGES * B::STATISTICS_BYTES + (8 * j + 2 * t) * 4);
        };
        auto delta_of = [&](int use, int j) { return exponent_of(use, j + HOPPER_QUERIES / 8); };
        // s = K Q^T and dp = V dout^T - delta of the tile of queries number `use`, two groups of products
        auto scores = [&](int use) {
            int stage = use % HOPPER_STAGES;
            hopper_barrier_wait(q_full + 8 * stage, (use / HOPPER_STAGES) & 1);
            uint32_t q = hopper_descriptor(q_tiles + stage * B::Q_BYTES, 0);
            uint32_t dy = hopper_descriptor(q_tiles + stage * B::Q_BYTES + HOPPER_TILE, 0);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float2 delta = delta_of(use, j);
#pragma unroll
                for (int i = 0; i < 4; i++) dp[j][i] = i % 2 ? -delta.y : -delta.x;
            }
            hopper_pin(s);
            hopper_pin(dp);
            hopper_pin(k_rows);
            hopper_pin(v_rows);
            hopper_fence();
#pragma unroll
            for (int k = 0; k < 4; k++) hopper_multiply<ALONG_ROWS>(s, k_rows[k], q + k * HOPPER_STEP_ROWS, k > 0);
            hopper_commit();
#pragma unroll
            for (int k = 0; k < 4; k++) hopper_multiply<ALONG_ROWS>(dp, v_rows[k], dy + k * HOPPER_STEP_ROWS, 1);
            hopper_commit();
        };
        // By every thread: each has read statistics and bits there.
        auto release = [&](int use) { hopper_arrive(q_empty + 8 * (use % HOPPER_STAGES)); };
        // dQ of the tile of queries goes on to the next tile of keys, or out.
        float dq[4][4];
        auto write_dq = [&]() {
            // The last tile of keys that these queries see: their own, or the sequence's last.
            if (k0 + HOPPER_KEYS > (mask == CAUSAL ? q0 : T - 1)) {
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) dq[j][i] *= z.factor * z.kept;
                hopper_write_rows(dqkv + hopper_row_at(z, work, start) + 32 * group, (size_t)3 * z.NH * z.HS, q0, T,
                                  z.HS - 32 * group, out_tile, dq);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) __stcg(sum + j * WARPGROUP, *(const float4*)dq[j]);
            }
            sum += z.NH * 8 * WARPGROUP;
        };
        scores(queries_done);
        hopper_wait<1>();
        hopper_pin(s);
        for (;;) {
            int stage = queries_done % HOPPER_STAGES;
            uint32_t q_tile = q_tiles + stage * B::Q_BYTES, g_tile = q_tile + HOPPER_TILE;
            uint32_t ds_tile = ds_tiles + (queries_done & 1) * 2 * HOPPER_TILE;
#pragma unroll
            for (int j = 0; j < 4; j++)
                *(float4*)dq[j] = k0 > 0 ? __ldcg(sum + j * WARPGROUP) : make_float4(0, 0, 0, 0);
            bool edge = k0 + HOPPER_KEYS > T || q0 + HOPPER_QUERIES > T || (mask == CAUSAL && q0 < k0 + HOPPER_KEYS);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float2 exponent = exponent_of(queries_done, j);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s[j][i] = flash_exp2(fmaf(s[j][i], scale, i % 2 ? -exponent.y : -exponent.x));
            }
            if (edge) {
                // Of the columns 8 j + i that a key has in this thread, those from `low` on, below `high`, are pairs.
                int first = q0 + 2 * t, high = T - first;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int key = k0 + own_row + lane / 4 + 8 * half;
                    int low = key >= T ? HOPPER_QUERIES : mask == CAUSAL ? key - first : 0;
#pragma unroll
                    for (int j = 0; j < 8; j++)
#pragma unroll
                        for (int i = 0; i < 2; i++)
                            if (8 * j + i < low || 8 * j + i >= high) s[j][2 * half + i] = 0;
                }
            }
            uint32_t p[4][4], ds[4][4], bits[2][2];
            if constexpr (dropped) {
                uint32_t at =
                    bits_tiles + stage * B::BITS_BYTES + (own_row + lane / 4) * HOPPER_ROW_BITS + q0 % DRAW_COLUMNS / 8;
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *(uint2*)bits[half] = *(const uint2*)__cvta_shared_to_generic(at + half * 8 * HOPPER_ROW_BITS);
                hopper_round_kept(p, s, bits);
            } else {
                hopper_round(p, s);
            }
            hopper_pin(p);
            hopper_pin(dv);
            hopper_fence();
            uint32_t dy = hopper_descriptor(g_tile, 0);
#pragma unroll
            for (int k = 0; k < 4; k++) hopper_multiply<ALONG_COLUMNS>(dv, p[k], dy + k * HOPPER_STEP_COLUMNS, 1);
            hopper_commit();

            hopper_wait<1>();
            hopper_pin(dp);
            if constexpr (dropped) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    float2 delta = delta_of(queries_done, j);
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (!(bits[i / 2][j / 4] >> (2 * t) >> (8 * (j % 4) + i % 2) & 1))
                            dp[j][i] = i % 2 ? -delta.y : -delta.x;
                }
            }
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) dp[j][i] *= s[j][i];
            hopper_round(ds, dp);
#pragma unroll
            for (int k = 0; k < 4; k++) hopper_store_square(ds_tile, own_row, k, ds[k]);
            hopper_publish();
            hopper_meet(4, B::GROUPS * WARPGROUP);  // both groups' ds are there
            uint32_t left = hopper_descriptor(ds_tile, 0), right = hopper_descriptor(k_tile, 0) + group * (64 >> 4);
            hopper_pin(dq);
            hopper_fence();
#pragma unroll
            for (int k = 0; k < HOPPER_KEYS / 16; k++)
                hopper_multiply<ALONG_COLUMNS, ALONG_COLUMNS>(dq, left + k * HOPPER_STEP_COLUMNS,
                                                              right + k * HOPPER_STEP_COLUMNS, 1);
            hopper_commit();
            hopper_pin(ds);
            hopper_pin(dk);
            hopper_fence();
            uint32_t q = hopper_descriptor(q_tile, 0);
#pragma unroll
            for (int k = 0; k < 4; k++) hopper_multiply<ALONG_COLUMNS>(dk, ds[k], q + k * HOPPER_STEP_COLUMNS, 1);
            hopper_commit();

            hopper_wait<1>();
            hopper_pin(dq);
            write_dq();
            q0 += HOPPER_QUERIES, queries_done++;
            if (q0 >= T) break;
            scores(queries_done);
            hopper_wait<1>();
            hopper_pin(s);
            release(queries_done - 1);
        }
        hopper_wait<0>();
        hopper_pin(dv);
        hopper_pin(dk);
        release(queries_done - 1);
        if (works[slot].ends && k0 + HOPPER_KEYS < T) {
            int* finished = done + works[slot].sequence * z.NH + works[slot].head;
            __threadfence();
            hopper_meet(4, B::GROUPS * WARPGROUP);
            if (group == 0 && thread == 0)
                asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(finished), "r"(k0 / HOPPER_KEYS + 1)
                             : "memory");
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dk[j][i] *= z.factor * z.kept;
                if (dropped) dv[j][i] *= z.kept;
            }
        floatX* to = dqkv + hopper_row_at(z, works[slot], start);
        hopper_arrive(kv_empty + 8 * slot);  // every thread: each has read the work
        size_t C = (size_t)z.NH * z.HS;
        hopper_write_rows(to + C, 3 * C, k0 + HOPPER_BOX * group, T, z.HS, out_tile, dk);
        hopper_write_rows(to + 2 * C, 3 * C, k0 + HOPPER_BOX * group, T, z.HS, out_tile, dv);
    }
#else
    __trap();
#endif
}

// ---------------------------------------------------------------------------------------------------------
// Launch

// Of tiles of queries, as hopper_first_tile() numbers them, for all heads.
static inline size_t hopper_tiles(int N, int sequences, int NH) {
    return ((size_t)N / HOPPER_QUERIES + (size_t)sequences + 1) * (size_t)NH;
}

// Of the backward pass, beside dropout's bits: sums, statistics, and how far each head is.
static inline size_t hopper_scratch_bytes(int N, int sequences, int NH) {
    return hopper_tiles(N, sequences, NH) * (HOPPER_QUERIES * HOPPER_BOX + HOPPER_STATISTICS) * sizeof(float) +
           (size_t)sequences * (size_t)NH * sizeof(int);
}

template <Mask mask, bool dropped>
static void hopper_backward_of(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const real* lse,
                               const Sequences* s, AttentionShape shape, Context* ctx) {
    typedef HopperBackward B;
    int heads = s->count * shape.NH, C = shape.NH * shape.HS;
    int tiles = (s->max_length + HOPPER_KEYS - 1) / HOPPER_KEYS;
    // A head stays on one multiprocessor, where its sums are near, unless too many would idle in the last round.
    int rounds = (heads + ctx->multiprocessors - 1) / ctx->multiprocessors;
    int parts = heads * 100 >= rounds * ctx->multiprocessors * 92 ? 1 : min_int(tiles, 4);
    CHECK((int64_t)heads * parts < 1 << 30);
    size_t bits_bytes = flash_bits_bytes(s, shape), query_tiles = hopper_tiles(s->rows, s->count, shape.NH);
    uint32_t* bits = (uint32_t*)device_scratch(ctx, bits_bytes + hopper_scratch_bytes(s->rows, s->count, shape.NH));
    float* sums = (float*)((char*)bits + bits_bytes);
    float* statistics = sums + query_tiles * HOPPER_QUERIES * HOPPER_BOX;
    int* done = (int*)(statistics + query_tiles * HOPPER_STATISTICS);
    HopperArguments z = hopper_arguments(s, shape, bits, ctx);
    AttentionDraw draw = draw_arguments(bits, s, shape);

    unsigned of_statistics = (unsigned)((s->max_length + HOPPER_QUERIES - 1) / HOPPER_QUERIES) *
                             (unsigned)((shape.NH + 3) / 4) * (unsigned)s->count;
    unsigned of_bits = dropped ? blocks_for((size_t)draw_by_key_threads(&draw), DRAW_THREADS) : 0;
    attention_delta_kernel<dropped><<<of_statistics + of_bits, DRAW_THREADS, 0, ctx->stream>>>(
        statistics, done, dout, out, lse, (int)of_statistics, z, draw);
    cudaCheck(cudaGetLastError());
    auto kernel = attention_backward_hopper_kernel<mask, dropped>;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)B::BYTES));
    kernel<<<(unsigned)min_int(heads * parts, ctx->multiprocessors), B::THREADS, B::BYTES, ctx->stream>>>(
        dqkv, (float4*)sums, done, parts, statistics,
        hopper_tensor_map(qkv, shape.HS, 3 * shape.NH, s->rows, 3 * C, ctx),
        hopper_tensor_map(dout, shape.HS, shape.NH, s->rows, C, ctx), z);
    cudaCheck(cudaGetLastError());
}

static inline void hopper_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                   const real* lse, const Sequences* s, AttentionShape shape, Context* ctx) {
    flash_variant(shape, [&](auto v) {
        hopper_backward_of<decltype(v)::MASK, decltype(v)::DROPPED>(dqkv, dout, qkv, out, lse, s, shape, ctx);
    });
}

#endif
#endif
