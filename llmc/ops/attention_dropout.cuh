/* Dropout's decisions on pairs of query and key, drawn once for a launch, as bits in scratch: 1 keeps the pair. The
 * kernels that use them hold pairs in orders of their own, where a draw for eight neighbouring keys would have to be
 * made by several threads.
 *
 * Two forms: rows are queries and columns keys, or the other way round ("by key"). The bits of one head, 128 columns
 * and one row of the batch are a uint4, at [head][columns / 128][row], so that what a tile of rows needs lies together.
 * Columns are counted inside the row's sequence. Bits of pairs that do not exist are anything.
 * Work: N T / 8 Philox calls a head, half of that for CAUSAL, and as many bytes written. */
#ifndef LLMC_ATTENTION_DROPOUT_CUH
#define LLMC_ATTENTION_DROPOUT_CUH

#include "../base/rng.h"
#include "../device/device.cuh"

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)

enum {
    DRAW_THREADS = 256,
    DRAW_COLUMNS = 128,
    DRAW_MARGIN = 192  // rows of the largest tile, which is read whole where fewer rows are left
};

typedef struct {
    uint32_t* bits;
    const int *cu_seqlens, *sequence, *position;
    int N, NH, count, longest;  // longest: of the sequences
    uint32_t first;             // with the next: a sequence's number in the whole step, as sequences_number() counts it
    int is_numbered_by_row;
    Mask mask;
    Dropout dropout;
} AttentionDraw;

HOST_DEVICE static inline int draw_blocks_of_columns(int longest) {
    return (longest + DRAW_COLUMNS - 1) / DRAW_COLUMNS;
}

// Where the bits of a row, from a multiple of 128 columns on, begin.
__device__ inline size_t draw_at(int head, int column, int row, int longest, int N) {
    return (((size_t)head * draw_blocks_of_columns(longest) + column / DRAW_COLUMNS) * N + row) * (DRAW_COLUMNS / 32);
}

static inline size_t draw_bytes(int N, int longest, int NH) {
    size_t rows = (size_t)NH * (size_t)draw_blocks_of_columns(longest) * (size_t)N + DRAW_MARGIN;
    return round_up(rows * (DRAW_COLUMNS / 8), 256);
}

__device__ inline uint32_t draw_number(const AttentionDraw& z, int sequence, int start) {
    return z.first + (uint32_t)(z.is_numbered_by_row ? start : sequence);
}

// Rows are queries. Grid: (rows, blocks of columns, heads), a thread for each uint4.
__global__ void __launch_bounds__(DRAW_THREADS)
    attention_draw_by_query_kernel(const __grid_constant__ AttentionDraw z) {
    int row = DRAW_THREADS * blockIdx.x + threadIdx.x, column = DRAW_COLUMNS * blockIdx.y, head = blockIdx.z;
    if (row >= z.N) return;
    int sequence = z.sequence[row], query = z.position[row], start = z.cu_seqlens[sequence];
    int visible = attention_visible(z.mask, query, z.cu_seqlens[sequence + 1] - start);
    if (column >= visible) return;
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
    *(uint4*)(z.bits + draw_at(head, column, row, z.longest, z.N)) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Threads that draw by key: one for eight keys and 32 queries.
HOST_DEVICE static inline int64_t draw_by_key_threads(const AttentionDraw* z) {
    return (int64_t)z->count * z->NH * draw_blocks_of_columns(z->longest) * ((z->longest + 7) / 8) *
           (DRAW_COLUMNS / 32);
}

__device__ inline void draw_by_key_thread(const AttentionDraw& z, int thread) {
    int words_of_row = DRAW_COLUMNS / 32, groups = (z.longest + 7) / 8, blocks = draw_blocks_of_columns(z.longest);
    int w = thread % words_of_row, group = thread / words_of_row % groups, rest = thread / words_of_row / groups;
    int column = rest % blocks * DRAW_COLUMNS, head = rest / blocks % z.NH, sequence = rest / blocks / z.NH;
    if (sequence >= z.count) return;
    int start = z.cu_seqlens[sequence], T = z.cu_seqlens[sequence + 1] - start, key = 8 * group,
        query = column + 32 * w;
    if (key >= T || query >= T || (z.mask == CAUSAL && query + 31 < key)) return;
    uint32_t number = draw_number(z, sequence, start);
    uint32_t threshold = dropout_threshold_attention(z.dropout), words[8] = {};
#pragma unroll 4
    for (int q = 0; q < 32; q++) {
        Philox r = dropout_bits_attention(z.dropout, number, head, query + q, group);
        uint32_t bit = 1u << q;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (dropout_keeps_attention(r, i, threshold)) words[i] |= bit;
    }
    uint32_t* to = z.bits + draw_at(head, column, start + key, z.longest, z.N) + w;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (key + i < T) to[i * words_of_row] = words[i];
}

// Rows are keys. Grid: threads as above.
__global__ void __launch_bounds__(DRAW_THREADS) attention_draw_by_key_kernel(const __grid_constant__ AttentionDraw z) {
    draw_by_key_thread(z, DRAW_THREADS * blockIdx.x + threadIdx.x);
}

// ---------------------------------------------------------------------------------------------------------
// Launches

static inline AttentionDraw draw_arguments(uint32_t* bits, const Sequences* s, AttentionShape shape) {
    AttentionDraw z = {bits,     s->cu_seqlens, s->sequence,        s->position,           s->rows,    shape.NH,
                       s->count, s->max_length, (uint32_t)s->first, s->is_numbered_by_row, shape.mask, shape.dropout};
    CHECK(!shape.dropout.threshold || draw_by_key_threads(&z) < 1 << 30);
    return z;
}

static inline void draw_by_query(const AttentionDraw& z, Context* ctx) {
    dim3 grid(blocks_for((size_t)z.N, DRAW_THREADS), (unsigned)draw_blocks_of_columns(z.longest), (unsigned)z.NH);
    attention_draw_by_query_kernel<<<grid, DRAW_THREADS, 0, ctx->stream>>>(z);
    cudaCheck(cudaGetLastError());
}

static inline void draw_by_key(const AttentionDraw& z, Context* ctx) {
    attention_draw_by_key_kernel<<<blocks_for((size_t)draw_by_key_threads(&z), DRAW_THREADS), DRAW_THREADS, 0,
                                   ctx->stream>>>(z);
    cudaCheck(cudaGetLastError());
}

#endif
#endif
