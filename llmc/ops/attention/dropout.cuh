/* Dropout masks for pairs of query and key, drawn once per launch and stored as bits in scratch; 1 keeps the pair.
 * Drawing them in the attention kernels would repeat work: one Philox call yields the bits of eight adjacent keys,
 * which belong to several threads there.
 * Cost per head: N T / 8 Philox calls, half of that with CAUSAL, and as many bytes written.
 *
 * In one form of the bits rows are queries and columns are keys, in the other rows are keys and columns are queries.
 * The bits of one head, 128 columns and one row of the batch are four words, at [head][columns / 128][row], so that the
 * bits of a tile of rows are contiguous. Columns are counted within the row's sequence. Bits of pairs that do not exist
 * are undefined. Tests on the CPU check the index arithmetic. */
#ifndef LLMC_OPS_ATTENTION_DROPOUT_CUH
#define LLMC_OPS_ATTENTION_DROPOUT_CUH

#include "llmc/device/cuda_utils.cuh"

enum {
    DRAW_THREADS = 256,  // of a block
    DRAW_COLUMNS = 128,
    DRAW_MARGIN = 192  // rows of the largest tile, which is read whole even if fewer rows exist
};

typedef enum { ROWS_ARE_QUERIES, ROWS_ARE_KEYS } DrawForm;

HOST_DEVICE static inline int draw_blocks_of_columns(int longest) {
    return (longest + DRAW_COLUMNS - 1) / DRAW_COLUMNS;
}

// Where the bits of a row start, from column `column`, a multiple of 128.
HOST_DEVICE static inline size_t draw_at(int head, int column, int row, int longest, int N) {
    return (((size_t)head * (size_t)draw_blocks_of_columns(longest) + (size_t)(column / DRAW_COLUMNS)) * (size_t)N +
            (size_t)row) *
           (DRAW_COLUMNS / 32);
}

// The bits are followed by the number of each sequence's first thread: see draw_sequence().
static inline size_t draw_begins_at(int N, int longest, int NH) {
    size_t rows = (size_t)NH * (size_t)draw_blocks_of_columns(longest) * (size_t)N + DRAW_MARGIN;
    return round_up(rows * (DRAW_COLUMNS / 8), 256);
}

static inline size_t draw_bytes(int N, int sequences, int longest, int NH) {
    return draw_begins_at(N, longest, NH) + round_up((size_t)sequences * sizeof(int64_t), 256);
}

// ---------------------------------------------------------------------------------------------------------
// Threads that draw. One thread draws, for one head,
//   rows are queries   the 128 bits at draw_at() of one row
//   rows are keys      one word, 32 queries, of each of eight neighbouring rows: one Philox call decides eight keys
// Threads are numbered over existing and unmasked bits only, so every thread has something to draw. With CAUSAL the
// threads form strips of growing length: strip n of a sequence starts at thread half * n * (n + 1).
//   rows are queries   strip n is 128 rows, each with n + 1 times 128 columns: half = 64
//   rows are keys      strip n is 32 columns with 4 (n + 1) groups of eight rows: half = 2

// The number of threads that draw the bits of a sequence of T rows, for one head.
HOST_DEVICE static inline int64_t draw_threads(DrawForm form, Mask mask, int T) {
    int64_t blocks = draw_blocks_of_columns(T), words = (T + 31) / 32, groups = (T + 7) / 8;
    if (T == 0) return 0;
    if (mask == FULL) return form == ROWS_ARE_QUERIES ? blocks * T : words * groups;
    // All strips but the last are complete.
    if (form == ROWS_ARE_QUERIES) return 64 * (blocks - 1) * blocks + (T - DRAW_COLUMNS * (blocks - 1)) * blocks;
    return 2 * (words - 1) * words + groups;
}

// The strip that a thread is in.
HOST_DEVICE static inline int draw_strip(int64_t thread, int half) {
    int64_t n = (int64_t)(sqrtf(0.25f + (float)thread / (float)half) - 0.5f);  // one off at most
    while (half * n * (n + 1) > thread) n--;
    while (half * (n + 1) * (n + 2) <= thread) n++;
    return (int)n;
}

// The first row and column, in the sequence, of a thread's bits. Adjacent threads write to adjacent addresses.
HOST_DEVICE static inline void draw_place(int* row, int* column, DrawForm form, Mask mask, int T, int64_t thread) {
    int groups = (T + 7) / 8, words = (T + 31) / 32, rest, n, strip;
    if (form == ROWS_ARE_QUERIES) {
        if (mask == FULL) {
            strip = (int)((uint64_t)thread / (uint64_t)T);
            *column = DRAW_COLUMNS * strip, *row = (int)(thread - (int64_t)strip * T);
            return;
        }
        strip = draw_strip(thread, 64);
        rest = (int)(thread - (int64_t)64 * strip * (strip + 1));
        n = T - DRAW_COLUMNS * strip;
        if (n > DRAW_COLUMNS) n = DRAW_COLUMNS;  // rows of the strip
        *row = DRAW_COLUMNS * strip + rest % n, *column = DRAW_COLUMNS * (rest / n);
        return;
    }
    // Strips are taken four at a time: 128 columns, whose words are contiguous.
    int64_t before;
    if (mask == FULL) {
        strip = (int)((uint64_t)thread / (uint64_t)(4 * groups));
        before = (int64_t)4 * groups * strip;
    } else {
        strip = draw_strip(thread, 2) / 4;
        before = (int64_t)2 * (4 * strip) * (4 * strip + 1);
    }
    int whole = mask == FULL ? groups : 16 * strip;  // groups of rows with all of the columns
    rest = (int)(thread - before);
    n = words - 4 * strip;
    if (n > 4) n = 4;
    if (rest < whole * n) {
        *row = 8 * (rest / n), *column = 32 * (4 * strip + rest % n);
        return;
    }
    rest -= whole * n;
    n = draw_strip(rest, 2);
    *row = 8 * (whole + rest - 2 * n * (n + 1)), *column = 32 * (4 * strip + n);
}

// The sequence that `thread` belongs to; its threads start at begins[sequence]. Empty sequences have none.
HOST_DEVICE static inline int draw_sequence(const int64_t* begins, int count, int64_t thread) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (begins[middle] <= thread) low = middle;
        else high = middle;
    }
    return low;
}

// The first row and column, in the sequence, of a thread's bits.
typedef struct {
    int sequence, row, column;
} DrawPlace;

// The sequences of a batch. begins[sequence] is the first thread that draws the sequence's bits. NULL: all sequences
// have the same length.
typedef struct {
    const int64_t* begins;
    const int* cu_seqlens;
    int count, longest;
} DrawSequences;

// The bits that a head's thread number `thread` draws.
HOST_DEVICE static inline DrawPlace draw_find(DrawSequences s, DrawForm form, Mask mask, int64_t thread) {
    DrawPlace place;
    if (s.begins) {
        place.sequence = draw_sequence(s.begins, s.count, thread);
        thread -= s.begins[place.sequence];
    } else {
        int64_t each = draw_threads(form, mask, s.longest);
        place.sequence = (int)((uint64_t)thread / (uint64_t)each);
        thread -= place.sequence * each;
    }
    int T = s.cu_seqlens[place.sequence + 1] - s.cu_seqlens[place.sequence];
    draw_place(&place.row, &place.column, form, mask, T, thread);
    return place;
}

static inline int draw_is_uniform(const Sequences* s) { return s->rows == (int64_t)s->count * s->max_length; }

// The number of threads that draw the bits of a head.
static inline int64_t draw_threads_of_head(DrawForm form, Mask mask, const Sequences* s) {
    if (draw_is_uniform(s)) return s->count * draw_threads(form, mask, s->max_length);
    int64_t threads = 0;
    for (int i = 0; i < s->count; i++)
        threads += draw_threads(form, mask, sequences_start(s, i + 1) - sequences_start(s, i));
    return threads;
}

// Blocks for the threads of a head. Each block except a head's last writes at least 1 KiB of bits. So a GPU runs out of
// memory long before CUDA's limit of 2^31 - 1 blocks.
static inline int64_t draw_blocks_of_head(int64_t threads) { return (threads + DRAW_THREADS - 1) / DRAW_THREADS; }

#if defined(__CUDACC__) && (defined(PRECISION_BF16) || defined(PRECISION_FP16))
// ---------------------------------------------------------------------------------------------------------
// Kernels

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
    AttentionDraw z = {.bits = bits, .cu_seqlens = s->cu_seqlens, .N = s->rows, .NH = shape.NH, .count = s->count};
    z.longest = s->max_length;
    z.first = (uint32_t)s->first;
    z.is_numbered_by_row = s->is_numbered_by_row;
    z.mask = shape.mask, z.dropout = shape.dropout;
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
