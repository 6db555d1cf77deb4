/* Attention in tiles on Hopper's own instructions (sm_90a): products by four warps at once (wgmma) from tiles that the
 * copy engine (TMA) brings ahead of time. For bf16 and fp16.
 *
 * Blocks stay on their multiprocessor. A thread or two of a block, the producer, take items of work from a counter and
 * keep the copies going; they never wait for the others but for room. Two or three groups of four warps compute.
 *
 * Forward. An item is a tile of queries of one head of one sequence; each group owns 64 of its rows. While the product
 * P V of one tile of keys runs, the softmax of the next is computed.
 *
 * Dropout's bits were drawn before (attention_dropout.cuh) and come with the tiles of V; pairs are dropped when their
 * row's sum has been taken. Numerics as in attention_flash.cuh. Scratch: the bits.
 * Source: Shah et al., "FlashAttention-3", arXiv 2407.08608, for groups that overlap softmax and products. */
#ifndef LLMC_ATTENTION_HOPPER_CUH
#define LLMC_ATTENTION_HOPPER_CUH

#include "../device/hopper.cuh"
#include "attention_flash.cuh"

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)

enum {
    HOPPER_KEYS = 128,  // of a tile
    HOPPER_TILE = HOPPER_BOX * HOPPER_ROW_BYTES,
    HOPPER_ROW_BITS = DRAW_COLUMNS / 8  // bytes of a row's dropout bits
};

typedef struct {
    const int* cu_seqlens;
    unsigned* next;                 // items that blocks have taken beside their first
    int N, NH, HS, count, longest;  // longest: of the sequences
    float factor;                   // 1 / sqrt(HS)
    float kept;                     // what dropout multiplies the pairs with that it keeps
    const uint32_t* bits;           // which these are
} HopperArguments;

// What the producer tells the groups of a tile; sequence -1: no more work.
typedef struct {
    int sequence, head, first;  // first row of the tile
    int begins, ends;           // whether it is the first, the last tile of an item: backward
    int start, length;          // first row and length of the sequence: backward
} HopperWork;

// A number from the counter of work, which is 0 again once `last` has been taken.
__device__ inline int hopper_take(const HopperArguments& z, int last) { return (int)atomicInc(z.next, (unsigned)last); }

// c, rounded, as left operands of products that sum over c's columns.
template <int J> __device__ inline void hopper_round(uint32_t (&a)[J / 2][4], const float (&c)[J][4]) {
#pragma unroll
    for (int k = 0; k < J / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[k][i] = flash_pack(c[2 * k + i / 2][2 * (i % 2)], c[2 * k + i / 2][2 * (i % 2) + 1]);
}

// The same with dropout. `bits`: of row g's columns, then of row g + 8's, 32 in a word.
template <int J>
__device__ inline void hopper_round_kept(uint32_t (&a)[J / 2][4], const float (&c)[J][4],
                                         const uint32_t (&bits)[2][J / 4]) {
    int t = threadIdx.x % 4;
    hopper_round(a, c);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < J; j++) {
            // This lane's bits of tile j become the sign bits of byte j % 4, and these fill a half of `kept` each.
            uint32_t left = bits[half][j / 4] << (7 - 2 * t), right = bits[half][j / 4] << (6 - 2 * t), kept;
            asm("prmt.b32 %0, %1, %2, %3;" : "=r"(kept) : "r"(left), "r"(right), "r"(0xcc88 + 0x1111 * (j % 4)));
            a[j / 2][2 * (j % 2) + half] &= kept;
        }
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
    static constexpr uint32_t BITS_BYTES = QUERIES * HOPPER_ROW_BITS;
    static constexpr uint32_t BYTES = Q_STAGES * Q_BYTES + 4 * KV_BYTES + 2 * BITS_BYTES + 1024;
};

// A block: GROUPS groups that compute, and the producer. Work is (sequence, head, tile of queries), CAUSAL ones from
// the last tile on, which has the most keys.
template <int D, Mask mask, bool dropped>
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
    uint32_t bits_tiles = v_tiles + 2 * F::KV_BYTES;  // they come with V
    uint32_t q_full = (uint32_t)__cvta_generic_to_shared(barriers), q_empty = q_full + 16, k_full = q_full + 32,
             k_empty = q_full + 48, v_full = q_full + 64, v_empty = q_full + 80;
    int group = hopper_group() - 1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 16; i += 8) {
            hopper_barrier_init(q_full + i, 1), hopper_barrier_init(q_empty + i, WARPGROUP * F::GROUPS);
            hopper_barrier_init(k_full + i, 1), hopper_barrier_init(k_empty + i, 4 * F::GROUPS);
            hopper_barrier_init(v_full + i, 1);
            hopper_barrier_init(v_empty + i, (dropped ? WARPGROUP : 4) * F::GROUPS);
        }
        hopper_barrier_init_done();
    }
    __syncthreads();

    if (group < 0) {
        hopper_give_registers<D == 64 ? 32 : 40>();
        if (threadIdx.x != 0) return;
        int tiles = (z.longest + F::QUERIES - 1) / F::QUERIES, items = z.count * z.NH * tiles;
        int item = -1, tiles_done = 0, keys_done = 0;
        for (;;) {
            // The first is the block's own number. Each block learns once that there are no more: `items` are taken.
            item = item < 0 ? (int)blockIdx.x : (int)gridDim.x + hopper_take(z, items - 1);
            int slot = tiles_done % F::Q_STAGES, use = tiles_done / F::Q_STAGES;
            if (item >= items) {
                hopper_barrier_wait(q_empty + 8 * slot, ~use & 1);
                works[slot].sequence = -1;
                hopper_arrive(q_full + 8 * slot);
                return;
            }
            int tile = item % tiles, head = item / tiles % z.NH, sequence = item / tiles / z.NH;
            int start = z.cu_seqlens[sequence], T = z.cu_seqlens[sequence + 1] - start;
            int q0 = F::QUERIES * (mask == CAUSAL ? tiles - 1 - tile : tile);
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
                    hopper_arrive_expect(full, F::KV_BYTES + (dropped && v ? F::BITS_BYTES : 0));
                    if (dropped && v)
                        hopper_copy(bits_tiles + stage * F::BITS_BYTES,
                                    z.bits + draw_at(head, k0, start + q0, z.longest, z.N), F::BITS_BYTES, full);
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
        // Of V by every thread where bits, which each reads itself, come along with it.
        auto release = [&](uint32_t empty, int step) {
            __syncwarp();  // no lane still waits for the copy that is given back
            if (lane == 0 || (dropped && empty == v_empty)) hopper_arrive(empty + 8 * ((keys_done + step) & 1));
        };
        auto round = [&](int step) {
            if constexpr (dropped) {
                int use = keys_done + step, stage = use & 1;
                uint32_t bits[2][4], at = bits_tiles + stage * F::BITS_BYTES + (warp_row + g) * HOPPER_ROW_BITS;
                hopper_barrier_wait(v_full + 8 * stage, (use >> 1) & 1);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *(uint4*)bits[half] = *(const uint4*)__cvta_shared_to_generic(at + half * 8 * HOPPER_ROW_BITS);
                hopper_round_kept(p, s, bits);
            } else {
                hopper_round(p, s);
            }
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
            round(0);
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
            round(step);
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
                float inverse = (dropped ? z.kept : 1.0f) / total;
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
// Launch

// Whether these kernels do it: on a Hopper GPU, in a build that has code for it, heads of up to 64 channels, or 128 in
// the forward pass.
static inline int hopper_takes(Direction direction, AttentionShape shape, const Context* ctx) {
    return HOPPER_BUILD && ctx->capability == 90 && shape.HS % 8 == 0 && shape.HS <= (direction == FORWARD ? 128 : 64);
}

static inline HopperArguments hopper_arguments(const Sequences* s, AttentionShape shape, const uint32_t* bits,
                                               Context* ctx) {
    HopperArguments z = {s->cu_seqlens,
                         ctx->arrivals,
                         s->rows,
                         shape.NH,
                         shape.HS,
                         s->count,
                         s->max_length,
                         (float)(1 / sqrt((double)shape.HS)),
                         shape.dropout.scale,
                         bits};
    return z;
}

template <int D, Mask mask, bool dropped>
static void hopper_forward_of(floatX* out, real* lse, const floatX* qkv, const Sequences* s, AttentionShape shape,
                              Context* ctx) {
    typedef HopperForward<D> F;
    int64_t items = (int64_t)s->count * shape.NH * ((s->max_length + F::QUERIES - 1) / F::QUERIES);
    CHECK(items < 1 << 30);
    uint32_t* bits = dropped ? (uint32_t*)device_scratch(ctx, flash_bits_bytes(s, shape)) : NULL;
    if (dropped) draw_by_query(draw_arguments(bits, s, shape), ctx);
    auto kernel = attention_forward_hopper_kernel<D, mask, dropped>;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)F::BYTES));
    kernel<<<(unsigned)min_int((int)items, ctx->multiprocessors), F::THREADS, F::BYTES, ctx->stream>>>(
        out, lse, hopper_tensor_map(qkv, shape.HS, 3 * shape.NH, s->rows, 3 * shape.NH * shape.HS, ctx),
        hopper_arguments(s, shape, bits, ctx));
    cudaCheck(cudaGetLastError());
}

template <int D>
static void hopper_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s, AttentionShape shape,
                           Context* ctx) {
    flash_variant(shape, [&](auto v) {
        hopper_forward_of<D, decltype(v)::MASK, decltype(v)::DROPPED>(out, lse, qkv, s, shape, ctx);
    });
}

#endif
#endif
