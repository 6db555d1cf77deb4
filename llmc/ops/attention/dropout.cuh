/* Dropout masks for pairs of query and key, drawn once per launch and stored as bits in scratch; 1 keeps the pair.
 * Drawing them in the attention kernels would repeat work: one Philox call yields the bits of eight adjacent keys,
 * which belong to several threads there. scratch.h explains the layout and the numbering of threads.
 * Cost per head: N T / 8 Philox calls, half of that with CAUSAL, and as many bytes written. */
#ifndef LLMC_OPS_ATTENTION_DROPOUT_CUH
#define LLMC_OPS_ATTENTION_DROPOUT_CUH

#include "llmc/device/cuda_utils.cuh"
#include "llmc/ops/attention/scratch.h"
#include "llmc/ops/attention/shape.h"

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)

typedef struct {
    uint32_t* bits;
    const int* cu_seqlens;
    const int64_t* begins;      // [count] first thread of each sequence; NULL: all sequences have the same length
    int64_t threads;            // of a head
    int blocks;                 // of these threads
    int N, NH, count, longest;  // longest: length of the longest
    uint32_t first;             // this and the next give a sequence's number in the step, as in sequences_number()
    int is_numbered_by_row;
    Mask mask;
    Dropout dropout;
} AttentionDraw;

__device__ inline uint32_t draw_number(const AttentionDraw& z, int sequence, int start) {
    return z.first + (uint32_t)(z.is_numbered_by_row ? start : sequence);
}

// Find the head, sequence, row and column for which this thread draws. Returns false past a head's last thread.
__device__ inline bool draw_of_thread(DrawPlace* place, int* head, const AttentionDraw& z, DrawForm form, int block) {
    *head = block / z.blocks;
    int64_t thread = (int64_t)(block % z.blocks) * DRAW_THREADS + threadIdx.x;
    if (thread >= z.threads) return false;
    DrawSequences s = {.begins = z.begins, .cu_seqlens = z.cu_seqlens, .count = z.count, .longest = z.longest};
    *place = draw_find(s, form, z.mask, thread);
    return true;
}

// Grid: the blocks of all heads.
__global__ void __launch_bounds__(DRAW_THREADS)
    attention_draw_by_query_kernel(const __grid_constant__ AttentionDraw z) {
    DrawPlace place;
    int head;
    if (!draw_of_thread(&place, &head, z, ROWS_ARE_QUERIES, (int)blockIdx.x)) return;
    int sequence = place.sequence, query = place.row, column = place.column;
    int start = z.cu_seqlens[sequence];
    int visible = attention_visible(z.mask, query, z.cu_seqlens[sequence + 1] - start);
    uint32_t number = draw_number(z, sequence, start);
    uint32_t threshold = dropout_threshold_attention(z.dropout), words[DRAW_COLUMNS / 32] = {};
#pragma unroll
    for (int w = 0; w < DRAW_COLUMNS / 32; w++) {
        if (column + 32 * w >= visible) break;
#pragma unroll
        for (int group = 0; group < 4; group++) {
            Philox r = dropout_bits_attention(z.dropout, number, head, query, column / 8 + 4 * w + group);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (dropout_keeps_attention(r, i, threshold)) words[w] |= 1u << (8 * group + i);
        }
    }
    *(uint4*)(z.bits + draw_at(head, column, start + query, z.longest, z.N)) =
        make_uint4(words[0], words[1], words[2], words[3]);
}

// `block`: the index among the blocks that draw, over all heads.
__device__ inline void draw_by_key_thread(const AttentionDraw& z, int block) {
    DrawPlace place;
    int head;
    if (!draw_of_thread(&place, &head, z, ROWS_ARE_KEYS, block)) return;
    int sequence = place.sequence, key = place.row, query = place.column;
    int start = z.cu_seqlens[sequence], T = z.cu_seqlens[sequence + 1] - start;
    uint32_t number = draw_number(z, sequence, start);
    uint32_t threshold = dropout_threshold_attention(z.dropout), words[8] = {};
#pragma unroll 4
    for (int q = 0; q < 32; q++) {
        Philox r = dropout_bits_attention(z.dropout, number, head, query + q, key / 8);
        uint32_t bit = 1u << q;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (dropout_keeps_attention(r, i, threshold)) words[i] |= bit;
    }
    uint32_t* to = z.bits + draw_at(head, query, start + key, z.longest, z.N) + query % DRAW_COLUMNS / 32;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (key + i < T) to[i * (DRAW_COLUMNS / 32)] = words[i];
}

__global__ void __launch_bounds__(DRAW_THREADS) attention_draw_by_key_kernel(const __grid_constant__ AttentionDraw z) {
    draw_by_key_thread(z, (int)blockIdx.x);
}

enum { DRAW_SCAN_THREADS = 1024 };

// begins[sequence]: for one head, the number of threads that draw for earlier sequences. A prefix sum by one block.
__global__ void __launch_bounds__(DRAW_SCAN_THREADS)
    attention_draw_begins_kernel(int64_t* begins, DrawForm form, const __grid_constant__ AttentionDraw z) {
    __shared__ int64_t sums[DRAW_SCAN_THREADS / WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, each = (z.count - 1) / DRAW_SCAN_THREADS + 1;
    int first = min(each * (int)threadIdx.x, z.count), last = min(first + each, z.count);
    auto threads_of = [&](int s) { return draw_threads(form, z.mask, z.cu_seqlens[s + 1] - z.cu_seqlens[s]); };
    int64_t own = 0;
    for (int s = first; s < last; s++) own += threads_of(s);
    int64_t sum = own;
    for (int distance = 1; distance < WARP; distance *= 2) {
        int64_t left = __shfl_up_sync(ALL_LANES, sum, distance);
        if (lane >= distance) sum += left;
    }
    if (lane == WARP - 1) sums[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) sum += sums[w];
    sum -= own;
    for (int s = first; s < last; s++) begins[s] = sum, sum += threads_of(s);
}

// ---------------------------------------------------------------------------------------------------------
// Launches

// Returns the parameters of the kernel that draws bits in this form. If sequences differ in length, this also launches
// the kernel that numbers their threads.
static inline AttentionDraw draw_begin(DrawForm form, uint32_t* bits, const Sequences* s, AttentionShape shape,
                                       Context* ctx) {
    AttentionDraw z = {.bits = bits,
                       .cu_seqlens = s->cu_seqlens,
                       .N = s->rows,
                       .NH = shape.NH,
                       .count = s->count,
                       .longest = s->max_length,
                       .first = (uint32_t)s->first,
                       .is_numbered_by_row = s->is_numbered_by_row,
                       .mask = shape.mask,
                       .dropout = shape.dropout};
    if (!shape.dropout.threshold) return z;
    z.threads = draw_threads_of_head(form, shape.mask, s);
    z.blocks = (int)draw_blocks_of_head(z.threads);
    if (draw_is_uniform(s)) return z;
    int64_t* begins = (int64_t*)((char*)bits + draw_begins_at(s->rows, s->max_length, shape.NH));
    attention_draw_begins_kernel<<<1, DRAW_SCAN_THREADS, 0, ctx->stream>>>(begins, form, z);
    cudaCheck(cudaGetLastError());
    z.begins = begins;
    return z;
}

static inline unsigned draw_blocks(const AttentionDraw& z) { return (unsigned)z.blocks * (unsigned)z.NH; }

static inline void draw_by_query(uint32_t* bits, const Sequences* s, AttentionShape shape, Context* ctx) {
    AttentionDraw z = draw_begin(ROWS_ARE_QUERIES, bits, s, shape, ctx);
    attention_draw_by_query_kernel<<<draw_blocks(z), DRAW_THREADS, 0, ctx->stream>>>(z);
    cudaCheck(cudaGetLastError());
}

static inline void draw_by_key(uint32_t* bits, const Sequences* s, AttentionShape shape, Context* ctx) {
    AttentionDraw z = draw_begin(ROWS_ARE_KEYS, bits, s, shape, ctx);
    attention_draw_by_key_kernel<<<draw_blocks(z), DRAW_THREADS, 0, ctx->stream>>>(z);
    cudaCheck(cudaGetLastError());
}

#endif
#endif
