/* Attention in tiles on Hopper's own instructions (sm_90a): products by four warps at once (wgmma) from tiles that the
 * copy engine (TMA) brings ahead of time. For bf16 and fp16, without dropout.
 *
 * Blocks stay on their multiprocessor. One warp of a block, the producer, takes items of work from a counter and keeps
 * the copies going; it never waits for the others but for room. Two or three groups of four warps compute.
 *
 * Forward. An item is a tile of queries of one head of one sequence; each group owns 64 of its rows. While the product
 * P V of one tile of keys runs, the softmax of the next is computed.
 *
 * Backward. An item is a run of neighbouring tiles of 128 keys of one head; each group owns 64 keys of a tile, its K and
 * V as left operands in registers, and walks over the queries, 64 at a time: S^T = K Q^T, dP^T = V dout^T, then
 * dV += P^T dout and dK += ds^T Q from registers, and dQ = ds K over both groups' keys through shared memory. dQ sums
 * over tiles of keys: it waits in global memory, in fp32 and in the order of the registers, so that the thread that
 * wrote a number reads it again. The tiles of keys of one head are taken in ascending order, by one block or by blocks
 * that wait for each other, so that the sum has one order: no atomics, the same bits every time. An item's predecessor
 * has always been given out before it, to a block that runs: the wait ends.
 *
 * Numerics as in attention_flash.cuh. Scratch: dQ in fp32 (4 N C bytes and a tile for each sequence), 8 bytes for each
 * query and head.
 * Source: Shah et al., "FlashAttention-3", arXiv 2407.08608, for groups that overlap softmax and products. */
#ifndef LLMC_ATTENTION_HOPPER_CUH
#define LLMC_ATTENTION_HOPPER_CUH

#include "../device/hopper.cuh"
#include "attention_flash.cuh"

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)

enum {
    HOPPER_KEYS = 128,    // of a tile
    HOPPER_QUERIES = 64,  // of a tile of the backward pass
    HOPPER_STAGES = 4,    // tiles of queries on their way, backward
    HOPPER_TILE = HOPPER_BOX * HOPPER_ROW_BYTES
};

typedef struct {
    const int* cu_seqlens;
    int* next;                    // items that blocks have taken beside their first
    int N, NH, HS, count, tiles;  // tiles: of the longest sequence
    float factor;                 // 1 / sqrt(HS)
} HopperArguments;

// What the producer tells the groups of a tile; sequence -1: no more work.
typedef struct {
    int sequence, head, first;  // first row of the tile
    int begins, ends;           // whether it is the first, the last tile of an item
} HopperWork;

// The next item of this block: its first is its own number, then one is taken from the counter.
__device__ inline int hopper_next_item(const HopperArguments& z, int item) {
    return item < 0 ? (int)blockIdx.x : (int)gridDim.x + atomicAdd(z.next, 1);
}

// c, rounded, as left operands of products that sum over c's columns.
template <int J> __device__ inline void hopper_round(uint32_t (&a)[J / 2][4], const float (&c)[J][4]) {
#pragma unroll
    for (int k = 0; k < J / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[k][i] = flash_pack(c[2 * k + i / 2][2 * (i % 2)], c[2 * k + i / 2][2 * (i % 2) + 1]);
}

// Copy 4 bytes to shared memory without waiting; zeros where there is nothing to copy.
__device__ inline void hopper_copy4(float* shared, const float* global, int exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(global), "r"(4 * exists)
                 : "memory");
}

// A warp writes its 16 rows of a result, by way of its rows of `tile`, to x, row `row` on, of which `exist` are there.
template <int J>
__device__ inline void hopper_write_rows(floatX* x, size_t stride, int row, int exist, int channels, uint32_t tile,
                                         const float (&c)[J][4]) {
    uint32_t a[J / 2][4];
    int lane = threadIdx.x % WARP, warp_row = threadIdx.x % WARPGROUP / WARP * 16;
    hopper_round(a, c);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < J / 2; k++) hopper_store_square(tile, warp_row, k, a[k]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * J; i += WARP) {
        int r = warp_row + (i + lane) / J, piece = (i + lane) % J;
        int4 v = *(const int4*)__cvta_shared_to_generic(hopper_at(tile, r, piece));
        if (row + r < exist && piece * 8 < channels) __stcg((int4*)(x + (size_t)(row + r) * stride + piece * 8), v);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Forward

template <int D> struct HopperForward {
    static constexpr int GROUPS = D == 64 ? 3 : 2, QUERIES = GROUPS * HOPPER_BOX, THREADS = (GROUPS + 1) * WARPGROUP;
    static constexpr int HALVES = D / HOPPER_BOX;  // tiles side by side that hold a row's channels
    static constexpr uint32_t Q_BYTES = HALVES * GROUPS * HOPPER_TILE, KV_BYTES = HALVES * 2 * HOPPER_TILE;
    static constexpr int Q_STAGES = D == 64 ? 2 : 1;
    static constexpr uint32_t BYTES = Q_STAGES * Q_BYTES + 4 * KV_BYTES + 1024;
};

// A block: GROUPS groups that compute, and the producer. Work is (sequence, head, tile of queries), CAUSAL ones from
// the last tile on, which has the most keys.
template <int D, Mask mask>
__global__ void __launch_bounds__(HopperForward<D>::THREADS, 1)
    attention_forward_hopper_kernel(floatX* out, float* lse, const __grid_constant__ CUtensorMap qkv,
                                    const __grid_constant__ HopperArguments z) {
#if HOPPER_CODE
    typedef HopperForward<D> F;
    extern __shared__ unsigned char hopper_shared[];
    __shared__ __align__(8) uint64_t barriers[12];
    __shared__ HopperWork works[2];
    uint32_t q_tiles = ((uint32_t)__cvta_generic_to_shared(hopper_shared) + 1023) & ~1023u;
    uint32_t k_tiles = q_tiles + F::Q_STAGES * F::Q_BYTES, v_tiles = k_tiles + 2 * F::KV_BYTES;
    uint32_t q_full = (uint32_t)__cvta_generic_to_shared(barriers), q_empty = q_full + 16, k_full = q_full + 32,
             k_empty = q_full + 48, v_full = q_full + 64, v_empty = q_full + 80;
    int group = hopper_group() - 1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 16; i += 8) {
            hopper_barrier_init(q_full + i, 1), hopper_barrier_init(q_empty + i, WARPGROUP * F::GROUPS);
            hopper_barrier_init(k_full + i, 1), hopper_barrier_init(k_empty + i, 4 * F::GROUPS);
            hopper_barrier_init(v_full + i, 1), hopper_barrier_init(v_empty + i, 4 * F::GROUPS);
        }
        hopper_barrier_init_done();
    }
    __syncthreads();

    if (group < 0) {
        hopper_give_registers<D == 64 ? 32 : 40>();
        if (threadIdx.x != 0) return;
        int heads = z.count * z.NH, item = -1, tiles_done = 0, keys_done = 0;
        for (;;) {
            item = hopper_next_item(z, item);
            int slot = tiles_done % F::Q_STAGES, use = tiles_done / F::Q_STAGES;
            if (item >= heads * z.tiles) {
                hopper_barrier_wait(q_empty + 8 * slot, ~use & 1);
                works[slot].sequence = -1;
                hopper_arrive(q_full + 8 * slot);
                return;
            }
            int tile = item % z.tiles, head = item / z.tiles % z.NH, sequence = item / z.tiles / z.NH;
            int start = z.cu_seqlens[sequence], T = z.cu_seqlens[sequence + 1] - start;
            int q0 = F::QUERIES * (mask == CAUSAL ? z.tiles - 1 - tile : tile);
            if (q0 >= T) continue;
            hopper_barrier_wait(q_empty + 8 * slot, ~use & 1);
            works[slot].sequence = sequence, works[slot].head = head, works[slot].first = q0;
            hopper_arrive_expect(q_full + 8 * slot, F::Q_BYTES);
#pragma unroll 1
            for (int i = 0; i < F::GROUPS; i++)
                for (int half = 0; half < F::HALVES; half++)
                    hopper_copy_box(q_tiles + slot * F::Q_BYTES + (i * F::HALVES + half) * HOPPER_TILE, &qkv,
                                    HOPPER_BOX * half, head, start + q0 + HOPPER_BOX * i, q_full + 8 * slot);
            tiles_done++;
            int keys = mask == CAUSAL ? min(T, q0 + F::QUERIES) : T;
            for (int k0 = 0; k0 < keys; k0 += HOPPER_KEYS, keys_done++) {
                int stage = keys_done & 1, free_parity = ~(keys_done >> 1) & 1;
#pragma unroll 1
                for (int v = 0; v < 2; v++) {
                    uint32_t full = (v ? v_full : k_full) + 8 * stage;
                    hopper_barrier_wait((v ? v_empty : k_empty) + 8 * stage, free_parity);
                    hopper_arrive_expect(full, F::KV_BYTES);
                    for (int i = 0; i < 2; i++)
                        for (int half = 0; half < F::HALVES; half++)
                            hopper_copy_box(
                                (v ? v_tiles : k_tiles) + stage * F::KV_BYTES + (half * 2 + i) * HOPPER_TILE, &qkv,
                                HOPPER_BOX * half, (1 + v) * z.NH + head, start + k0 + HOPPER_BOX * i, full);
                }
            }
        }
    }

    hopper_take_registers<D == 64 ? 160 : 232>();
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int warp_row = HOPPER_BOX * group + (int)threadIdx.x % WARPGROUP / WARP * 16;
    float scale = z.factor * FLASH_LOG2_E;  // of scores, to powers of two
    int keys_done = 0;
    for (int tiles_done = 0;; tiles_done++) {
        int slot = tiles_done % F::Q_STAGES;
        hopper_barrier_wait(q_full + 8 * slot, (tiles_done / F::Q_STAGES) & 1);
        HopperWork work = works[slot];
        if (work.sequence < 0) return;
        int start = z.cu_seqlens[work.sequence], T = z.cu_seqlens[work.sequence + 1] - start, q0 = work.first;
        int group_row = q0 + HOPPER_BOX * group, row = q0 + warp_row + g;  // row and row + 8 are this thread's
        // Tiles of keys of the whole block, and of this group: the keys that its last row may see.
        int steps = ((mask == CAUSAL ? min(T, q0 + F::QUERIES) : T) + HOPPER_KEYS - 1) / HOPPER_KEYS;
        int own = ((mask == CAUSAL ? min(T, group_row + HOPPER_BOX) : T) + HOPPER_KEYS - 1) / HOPPER_KEYS;
        if (group_row >= T) own = 0;
        uint32_t q_tile = q_tiles + slot * F::Q_BYTES + group * F::HALVES * HOPPER_TILE;

        float o[D / 8][4], s[HOPPER_KEYS / 8][4], largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, shrink[2];
        uint32_t p[HOPPER_KEYS / 16][4];
        // s = Q K^T of tile `step`
        auto scores = [&](int step) {
            int use = keys_done + step, stage = use & 1;
            hopper_barrier_wait(k_full + 8 * stage, (use >> 1) & 1);
            uint32_t k_tile = k_tiles + stage * F::KV_BYTES;
            hopper_pin(s);
            hopper_fence();
#pragma unroll
            for (int k = 0; k < D / 16; k++)
                hopper_multiply<ALONG_ROWS, ALONG_ROWS>(
                    s, hopper_descriptor(q_tile + k / 4 * HOPPER_TILE, 0) + k % 4 * HOPPER_STEP_ROWS,
                    hopper_descriptor(k_tile + k / 4 * 2 * HOPPER_TILE, 0) + k % 4 * HOPPER_STEP_ROWS, k > 0);
            hopper_commit();
        };
        // o += P V of tile `step`
        auto mix = [&](int step) {
            int use = keys_done + step, stage = use & 1;
            hopper_barrier_wait(v_full + 8 * stage, (use >> 1) & 1);
            uint32_t v = hopper_descriptor(v_tiles + stage * F::KV_BYTES, 2 * HOPPER_TILE);
            hopper_pin(o);
            hopper_pin(p);
            hopper_fence();
#pragma unroll
            for (int k = 0; k < HOPPER_KEYS / 16; k++)
                hopper_multiply<ALONG_COLUMNS>(o, p[k], v + k * HOPPER_STEP_COLUMNS, step > 0 || k > 0);
            hopper_commit();
        };
        auto release = [&](uint32_t empty, int step) {
            if (lane == 0) hopper_arrive(empty + 8 * ((keys_done + step) & 1));
        };
        // s becomes exp(s - largest so far); what was summed before shrinks by `shrink`. Key 0 is visible to every
        // query, so after the first tile `largest` is a number.
        auto softmax = [&](int step) {
            int k0 = step * HOPPER_KEYS;
            if (k0 + HOPPER_KEYS > T || (mask == CAUSAL && k0 + HOPPER_KEYS - 1 > group_row)) {
#pragma unroll
                for (int j = 0; j < HOPPER_KEYS / 8; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int key = k0 + 8 * j + 2 * t + i % 2;
                        if (key >= T || (mask == CAUSAL && key > row + 8 * (i / 2))) s[j][i] = -INFINITY;
                    }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float top = largest[half], partial = 0;
#pragma unroll
                for (int j = 0; j < HOPPER_KEYS / 8; j++) top = fmaxf(top, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
                top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
                top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
                float shift = top * scale;
                shrink[half] = flash_exp2(largest[half] * scale - shift);
                largest[half] = top;
#pragma unroll
                for (int j = 0; j < HOPPER_KEYS / 8; j++)
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; i++) {
                        s[j][i] = flash_exp2(fmaf(s[j][i], scale, -shift));
                        partial += s[j][i];
                    }
                sum[half] = sum[half] * shrink[half] + partial;  // of this lane's columns
            }
        };

        if (own > 0) {
            scores(0);
            hopper_wait<0>();
            hopper_pin(s);
            release(k_empty, 0);
            softmax(0);
            hopper_round(p, s);
        }
        for (int step = 1; step < own; step++) {
            scores(step);
            mix(step - 1);
            hopper_wait<1>();
            hopper_pin(s);
            release(k_empty, step);
            softmax(step);
            hopper_wait<0>();
            hopper_pin(o);
            release(v_empty, step - 1);
#pragma unroll
            for (int j = 0; j < D / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[j][i] *= shrink[i / 2];
            hopper_round(p, s);
        }
        if (own > 0) {
            mix(own - 1);
            hopper_wait<0>();
            hopper_pin(o);
            release(v_empty, own - 1);
        }
        for (int step = own; step < steps; step++) {  // tiles that only the other groups need
            int use = keys_done + step;
            hopper_barrier_wait(k_full + 8 * (use & 1), (use >> 1) & 1);
            release(k_empty, step);
            hopper_barrier_wait(v_full + 8 * (use & 1), (use >> 1) & 1);
            release(v_empty, step);
        }
        keys_done += steps;

        if (own > 0) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float total = sum[half];
                total += __shfl_xor_sync(ALL_LANES, total, 1);
                total += __shfl_xor_sync(ALL_LANES, total, 2);
                if (t == 0 && row + 8 * half < T)
                    lse[(size_t)work.head * z.N + start + row + 8 * half] = largest[half] * z.factor + logf(total);
                float inverse = 1 / total;
#pragma unroll
                for (int j = 0; j < D / 8; j++) o[j][2 * half] *= inverse, o[j][2 * half + 1] *= inverse;
            }
            hopper_meet(1 + group, WARPGROUP);  // nobody reads the group's Q any more
            size_t C = (size_t)z.NH * z.HS;
            floatX* to = out + (size_t)start * C + (size_t)work.head * z.HS;
#pragma unroll
            for (int half = 0; half < F::HALVES; half++)
                hopper_write_rows(to + HOPPER_BOX * half, C, group_row, T, z.HS - HOPPER_BOX * half,
                                  q_tile + half * HOPPER_TILE, *(const float(*)[8][4])(&o[8 * half]));
            hopper_publish();
        }
        hopper_arrive(q_empty + 8 * slot);  // every thread: each has read the work
    }
#else
    __trap();
#endif
}

// ---------------------------------------------------------------------------------------------------------
// Backward

// Where a sequence's part of the scratch begins, in tiles of queries: no two sequences share one.
__device__ inline int hopper_first_tile(int start, int sequence) { return start / HOPPER_QUERIES + sequence; }

// rows [NH, N] = (lse in powers of two, delta). Grid: 32 rows by 4 heads; 8 lanes take a row's channels of one head.
__global__ void __launch_bounds__(256) attention_delta_kernel(float2* rows, const floatX* dout, const floatX* out,
                                                              const float* lse, int N, int NH, int HS) {
    __shared__ float deltas[4][WARP];
    int head = 4 * blockIdx.y + threadIdx.x / 8 % 4, channel = threadIdx.x % 8 * 8, C = NH * HS;
    for (int r = threadIdx.x / WARP; r < WARP; r += 8) {
        int n = WARP * blockIdx.x + r;
        float delta = 0;
        if (n < N && head < NH && channel < HS) {
            size_t at = (size_t)n * C + (size_t)head * HS + channel;
            Vector<floatX> x = load128(dout + at), y = load128(out + at);
#pragma unroll
            for (int i = 0; i < 8; i++) delta += to_float(x.v[i]) * to_float(y.v[i]);
        }
#pragma unroll
        for (int distance = 4; distance; distance /= 2) delta += __shfl_xor_sync(ALL_LANES, delta, distance);
        if (threadIdx.x % 8 == 0) deltas[threadIdx.x / 8 % 4][r] = delta;
    }
    __syncthreads();
    int own = threadIdx.x / WARP, n = WARP * blockIdx.x + threadIdx.x % WARP;
    head = 4 * blockIdx.y + own;
    if (own < 4 && head < NH && n < N) {
        size_t at = (size_t)head * N + n;
        rows[at] = make_float2(lse[at] * FLASH_LOG2_E, deltas[own][threadIdx.x % WARP]);
    }
}

struct HopperBackward {
    static constexpr int GROUPS = 2, THREADS = (GROUPS + 1) * WARPGROUP;
    static constexpr uint32_t KV_BYTES = 4 * HOPPER_TILE, Q_BYTES = 2 * HOPPER_TILE;
    static constexpr uint32_t BYTES =
        2 * KV_BYTES + HOPPER_STAGES * Q_BYTES + 4 * HOPPER_TILE + GROUPS * HOPPER_TILE + 1024;
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
template <Mask mask>
__global__ void __launch_bounds__(HopperBackward::THREADS, 1)
    attention_backward_hopper_kernel(floatX* dqkv, float4* sums, int* done, int parts, const float2* rows,
                                     const __grid_constant__ CUtensorMap qkv, const __grid_constant__ CUtensorMap dout,
                                     const __grid_constant__ HopperArguments z) {
#if HOPPER_CODE
    typedef HopperBackward B;
    extern __shared__ unsigned char hopper_shared[];
    __shared__ __align__(8) uint64_t barriers[4 + 2 * HOPPER_STAGES];
    __shared__ HopperWork works[2];
    __shared__ __align__(16) float exponents[HOPPER_STAGES][HOPPER_QUERIES], deltas[HOPPER_STAGES][HOPPER_QUERIES];
    uint32_t kv_tiles = ((uint32_t)__cvta_generic_to_shared(hopper_shared) + 1023) & ~1023u;
    uint32_t q_tiles = kv_tiles + 2 * B::KV_BYTES, ds_tiles = q_tiles + HOPPER_STAGES * B::Q_BYTES;
    uint32_t out_tiles = ds_tiles + 4 * HOPPER_TILE;
    uint32_t kv_full = (uint32_t)__cvta_generic_to_shared(barriers), kv_empty = kv_full + 16, q_full = kv_full + 32,
             q_empty = q_full + 8 * HOPPER_STAGES;
    int group = hopper_group() - 1, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++)
            hopper_barrier_init(kv_full + 8 * i, 1), hopper_barrier_init(kv_empty + 8 * i, WARPGROUP * B::GROUPS);
        for (int i = 0; i < HOPPER_STAGES; i++)
            hopper_barrier_init(q_full + 8 * i, 1 + WARP), hopper_barrier_init(q_empty + 8 * i, 4 * B::GROUPS);
        hopper_barrier_init_done();
    }
    __syncthreads();

    if (group < 0) {
        hopper_give_registers<24>();
        if (threadIdx.x >= WARP) return;
        int heads = z.count * z.NH, item = -1, keys_done = 0, queries_done = 0;
        for (;;) {
            if (lane == 0) item = hopper_next_item(z, item);
            item = __shfl_sync(ALL_LANES, item, 0);
            if (item >= heads * parts) break;
            int part = item / heads, sequence = item % heads / z.NH, head = item % z.NH;
            int start = z.cu_seqlens[sequence], T = z.cu_seqlens[sequence + 1] - start;
            int tiles = (T + HOPPER_KEYS - 1) / HOPPER_KEYS;
            int first = hopper_part<mask>(tiles, part, parts), last = hopper_part<mask>(tiles, part + 1, parts);
            for (int n = first; n < last; n++, keys_done++) {
                int slot = keys_done & 1;
                uint32_t full = kv_full + 8 * slot, tile = kv_tiles + slot * B::KV_BYTES;
                hopper_barrier_wait(kv_empty + 8 * slot, ~(keys_done >> 1) & 1);
                if (lane == 0) {
                    works[slot].sequence = sequence, works[slot].head = head, works[slot].first = HOPPER_KEYS * n;
                    works[slot].begins = n == first, works[slot].ends = n + 1 == last;
                    hopper_arrive_expect(full, B::KV_BYTES);
                    for (int i = 0; i < 4; i++)
                        hopper_copy_box(tile + i * HOPPER_TILE, &qkv, 0, (1 + i / 2) * z.NH + head,
                                        start + HOPPER_KEYS * n + HOPPER_BOX * (i % 2), full);
                }
                int q0 = mask == CAUSAL ? HOPPER_KEYS * n : 0;
                for (; q0 < T; q0 += HOPPER_QUERIES, queries_done++) {
                    int stage = queries_done % HOPPER_STAGES;
                    uint32_t q_tile = q_tiles + stage * B::Q_BYTES, q_barrier = q_full + 8 * stage;
                    hopper_barrier_wait(q_empty + 8 * stage, ~(queries_done / HOPPER_STAGES) & 1);
                    if (lane == 0) {
                        hopper_arrive_expect(q_barrier, B::Q_BYTES);
                        hopper_copy_box(q_tile, &qkv, 0, head, start + q0, q_barrier);
                        hopper_copy_box(q_tile + HOPPER_TILE, &dout, 0, head, start + q0, q_barrier);
                    }
                    for (int i = lane; i < HOPPER_QUERIES; i += WARP) {
                        int exists = q0 + i < T;
                        const float2* row = rows + (size_t)head * z.N + start + (exists ? q0 + i : 0);
                        hopper_copy4(&exponents[stage][i], &row->x, exists);
                        hopper_copy4(&deltas[stage][i], &row->y, exists);
                    }
                    hopper_arrive_after_copies(q_barrier);
                }
            }
        }
        hopper_barrier_wait(kv_empty + 8 * (keys_done & 1), ~(keys_done >> 1) & 1);
        if (lane == 0) {
            works[keys_done & 1].sequence = -1;
            hopper_arrive(kv_full + 8 * (keys_done & 1));
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
        // s = K Q^T and dp = V dout^T - delta of the tile of queries number `use`, two groups of products
        auto scores = [&](int use) {
            int stage = use % HOPPER_STAGES;
            hopper_barrier_wait(q_full + 8 * stage, (use / HOPPER_STAGES) & 1);
            uint32_t q = hopper_descriptor(q_tiles + stage * B::Q_BYTES, 0);
            uint32_t dy = hopper_descriptor(q_tiles + stage * B::Q_BYTES + HOPPER_TILE, 0);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float2 delta = *(const float2*)&deltas[stage][8 * j + 2 * t];  // of two neighbouring queries
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
        auto release = [&](int use) {
            if (lane == 0) hopper_arrive(q_empty + 8 * (use % HOPPER_STAGES));
        };
        // dQ of the tile of queries goes on to the next tile of keys, or out.
        float dq[4][4];
        auto write_dq = [&]() {
            // The last tile of keys that these queries see: their own, or the sequence's last.
            if (k0 + HOPPER_KEYS > (mask == CAUSAL ? q0 : T - 1)) {
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) dq[j][i] *= z.factor;
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
                float2 exponent = *(const float2*)&exponents[stage][8 * j + 2 * t];
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
            uint32_t p[4][4], ds[4][4];
            hopper_round(p, s);
            hopper_pin(p);
            hopper_pin(dv);
            hopper_fence();
            uint32_t dy = hopper_descriptor(g_tile, 0);
#pragma unroll
            for (int k = 0; k < 4; k++) hopper_multiply<ALONG_COLUMNS>(dv, p[k], dy + k * HOPPER_STEP_COLUMNS, 1);
            hopper_commit();

            hopper_wait<1>();
            hopper_pin(dp);
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
            for (int i = 0; i < 4; i++) dk[j][i] *= z.factor;
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
// Launches

// Whether these kernels do it: on a Hopper GPU, in a build that has code for it, without dropout, heads of up to 64
// channels, or 128 in the forward pass.
static inline int hopper_takes(Direction direction, AttentionShape shape, const Context* ctx) {
    return HOPPER_BUILD && ctx->capability == 90 && !shape.dropout.threshold && shape.HS % 8 == 0 &&
           shape.HS <= (direction == FORWARD ? 128 : 64);
}

static inline size_t hopper_sums_bytes(int N, int sequences, int NH) {
    return ((size_t)N / HOPPER_QUERIES + (size_t)sequences + 1) * (size_t)NH * HOPPER_QUERIES * HOPPER_BOX *
           sizeof(float);
}

static inline size_t hopper_rows_bytes(int N, int NH) { return round_up((size_t)NH * (size_t)N * sizeof(float2), 256); }

// The sums, (lse, delta) of the rows, the counter of items, and how far each head is.
static inline size_t hopper_scratch_bytes(int N, int sequences, int NH) {
    return hopper_sums_bytes(N, sequences, NH) + hopper_rows_bytes(N, NH) +
           ((size_t)sequences * (size_t)NH + 1) * sizeof(int);
}

static inline HopperArguments hopper_arguments(const Sequences* s, AttentionShape shape, int rows, int* next) {
    HopperArguments z = {s->cu_seqlens,
                         next,
                         s->rows,
                         shape.NH,
                         shape.HS,
                         s->count,
                         (s->max_length + rows - 1) / rows,
                         (float)(1 / sqrt((double)shape.HS))};
    return z;
}

template <int D, Mask mask>
static void hopper_forward_of(floatX* out, real* lse, const CUtensorMap& map, const HopperArguments& z, Context* ctx) {
    typedef HopperForward<D> F;
    int64_t items = (int64_t)z.count * z.NH * z.tiles;
    CHECK(items < 1 << 30);
    cudaCheck(cudaFuncSetAttribute(attention_forward_hopper_kernel<D, mask>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, (int)F::BYTES));
    attention_forward_hopper_kernel<D, mask>
        <<<(unsigned)min_int((int)items, ctx->multiprocessors), F::THREADS, F::BYTES, ctx->stream>>>(out, lse, map, z);
    cudaCheck(cudaGetLastError());
}

static inline void hopper_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s, AttentionShape shape,
                                  Context* ctx) {
    int D = shape.HS <= 64 ? 64 : 128, C = shape.NH * shape.HS;
    int* next = (int*)device_scratch(ctx, sizeof *next);
    HopperArguments z =
        hopper_arguments(s, shape, D == 64 ? HopperForward<64>::QUERIES : HopperForward<128>::QUERIES, next);
    CUtensorMap map = hopper_tensor_map(qkv, shape.HS, 3 * shape.NH, s->rows, 3 * C);
    cudaCheck(cudaMemsetAsync(next, 0, sizeof *next, ctx->stream));
    if (D == 64 && shape.mask == CAUSAL) hopper_forward_of<64, CAUSAL>(out, lse, map, z, ctx);
    else if (D == 64) hopper_forward_of<64, FULL>(out, lse, map, z, ctx);
    else if (shape.mask == CAUSAL) hopper_forward_of<128, CAUSAL>(out, lse, map, z, ctx);
    else hopper_forward_of<128, FULL>(out, lse, map, z, ctx);
}

template <Mask mask>
static void hopper_backward_of(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const real* lse,
                               const Sequences* s, AttentionShape shape, Context* ctx) {
    typedef HopperBackward B;
    int heads = s->count * shape.NH, C = shape.NH * shape.HS;
    int tiles = (s->max_length + HOPPER_KEYS - 1) / HOPPER_KEYS;
    // A head stays on one multiprocessor, where its sums are near, unless too many would idle in the last round.
    int rounds = (heads + ctx->multiprocessors - 1) / ctx->multiprocessors;
    int parts = heads * 100 >= rounds * ctx->multiprocessors * 92 ? 1 : min_int(tiles, 4);
    size_t sums_bytes = hopper_sums_bytes(s->rows, s->count, shape.NH),
           rows_bytes = hopper_rows_bytes(s->rows, shape.NH);
    CHECK((int64_t)heads * parts < 1 << 30);
    unsigned char* scratch = (unsigned char*)device_scratch(ctx, hopper_scratch_bytes(s->rows, s->count, shape.NH));
    float2* rows = (float2*)(scratch + sums_bytes);
    int* next = (int*)(scratch + sums_bytes + rows_bytes);
    HopperArguments z = hopper_arguments(s, shape, HOPPER_KEYS, next);
    cudaCheck(cudaMemsetAsync(next, 0, ((size_t)heads + 1) * sizeof(int), ctx->stream));
    dim3 grid((unsigned)((s->rows + WARP - 1) / WARP), (unsigned)((shape.NH + 3) / 4));
    attention_delta_kernel<<<grid, 256, 0, ctx->stream>>>(rows, dout, out, lse, s->rows, shape.NH, shape.HS);
    cudaCheck(cudaGetLastError());
    cudaCheck(cudaFuncSetAttribute(attention_backward_hopper_kernel<mask>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)B::BYTES));
    attention_backward_hopper_kernel<mask>
        <<<(unsigned)min_int(heads * parts, ctx->multiprocessors), B::THREADS, B::BYTES, ctx->stream>>>(
            dqkv, (float4*)scratch, next + 1, parts, rows,
            hopper_tensor_map(qkv, shape.HS, 3 * shape.NH, s->rows, 3 * C),
            hopper_tensor_map(dout, shape.HS, shape.NH, s->rows, C), z);
    cudaCheck(cudaGetLastError());
}

static inline void hopper_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                   const real* lse, const Sequences* s, AttentionShape shape, Context* ctx) {
    if (shape.mask == CAUSAL) hopper_backward_of<CAUSAL>(dqkv, dout, qkv, out, lse, s, shape, ctx);
    else hopper_backward_of<FULL>(dqkv, dout, qkv, out, lse, s, shape, ctx);
}

#endif
#endif
