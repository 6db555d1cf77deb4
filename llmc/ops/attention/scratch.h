/* The layout of the scratch that attention's GPU kernels share, and the assignment of dropout's bits to the threads
 * that draw them. All of it is index arithmetic on sizes, so tests on the CPU can check it.
 *
 * Dropout's bits: one per pair of query and key; 1 keeps the pair. In one form rows are queries and columns are keys,
 * in the other rows are keys and columns are queries. The bits of one head, 128 columns and one row of the batch are
 * four words, at [head][columns / 128][row], so that the bits of a tile of rows are contiguous. Columns are counted
 * within the row's sequence. Bits of pairs that do not exist are undefined.
 *
 * Sums of dQ: tiles of 64 queries and 64 channels in fp32 (hopper/attention_backward.cuh). */
#ifndef LLMC_OPS_ATTENTION_SCRATCH_H
#define LLMC_OPS_ATTENTION_SCRATCH_H

#include "llmc/base/sequences.h"
#include "llmc/device/device.h"

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

// ---------------------------------------------------------------------------------------------------------
// The backward pass on Hopper GPUs (hopper/attention_backward.cuh)

enum {
    HOPPER_KEYS = 128,                       // of a tile
    HOPPER_QUERIES = 64,                     // of a tile
    HOPPER_SUMS = HOPPER_QUERIES * 64,       // floats of a tile of queries: dQ so far
    HOPPER_STATISTICS = 2 * HOPPER_QUERIES,  // floats of a tile of queries: lse * log2(e), then delta / scale
    HOPPER_PARTS = 4                         // at most
};

// A sequence's first tile of queries. No two sequences share a tile.
HOST_DEVICE static inline int hopper_first_tile(int start, int sequence) { return start / HOPPER_QUERIES + sequence; }

// Where the sums of a head's tile of queries `tile` are, counted in tiles.
HOST_DEVICE static inline size_t hopper_sum_at(int slot_tiles, int block, int tile, int start, int sequence, int head,
                                               int NH) {
    if (slot_tiles) return (size_t)block * (size_t)slot_tiles + (size_t)tile;
    return (size_t)(hopper_first_tile(start, sequence) + tile) * (size_t)NH + (size_t)head;
}

// The distance from one tile of queries of a head to the next.
HOST_DEVICE static inline int hopper_sum_stride(int slot_tiles, int NH) { return slot_tiles ? 1 : NH; }

typedef struct {
    int parts;       // work items into which a head's tiles of keys are divided
    int slot_tiles;  // tiles of queries in a block's slot; 0: each head has tiles of its own
    size_t tiles;    // of queries, of all heads: statistics
    size_t sums;     // tiles of queries with room for sums of dQ
    size_t heads;    // of all sequences: a counter of finished tiles of keys each
} HopperScratch;

// The scratch for N rows in `sequences` sequences, the longest of `longest` rows. dQ is summed in one slot per block
// or, if heads are divided among blocks or that takes less memory, in tiles of each head. GPT-2 124M at -b 64: 41 MB of
// slots, which stay in L2, instead of 221 MB.
static inline HopperScratch hopper_scratch(int N, int sequences, int longest, int NH, int multiprocessors) {
    HopperScratch z;
    int64_t heads = (int64_t)sequences * NH, rounds = (heads + multiprocessors - 1) / multiprocessors;
    z.heads = (size_t)heads;
    z.tiles = ((size_t)N / HOPPER_QUERIES + (size_t)sequences + 1) * (size_t)NH;
    // A head stays on one multiprocessor, unless more than 8 % of the multiprocessors' time would be idle.
    z.parts = heads * 100 >= rounds * multiprocessors * 92
                  ? 1
                  : min_int((longest + HOPPER_KEYS - 1) / HOPPER_KEYS, HOPPER_PARTS);
    z.slot_tiles = 0, z.sums = z.tiles;
    if (longest <= HOPPER_KEYS) {  // the first tile of keys is the last: dQ is complete in registers
        z.sums = 0;
    } else if (z.parts == 1) {
        size_t blocks = heads < multiprocessors ? (size_t)heads : (size_t)multiprocessors;
        int tiles = (longest + HOPPER_QUERIES - 1) / HOPPER_QUERIES;
        if (blocks * (size_t)tiles < z.tiles) z.slot_tiles = tiles, z.sums = blocks * (size_t)tiles;
    }
    return z;
}

static inline size_t hopper_scratch_bytes(const HopperScratch* z) {
    return (z->sums * HOPPER_SUMS + z->tiles * HOPPER_STATISTICS) * sizeof(float) + z->heads * sizeof(int);
}

// Upper bound of the scratch of batches of up to N rows in `fewest` to `most` sequences of up to T rows. For a given
// number of sequences the largest batch takes most. Fewer sequences can take more, because their heads are divided
// among blocks.
static inline size_t hopper_scratch_most(int N, int fewest, int most, int T, int NH, int multiprocessors) {
    size_t bytes = 0;
    for (int sequences = fewest; sequences <= most; sequences++) {
        int rows = (int64_t)sequences * T < N ? sequences * T : N;
        HopperScratch z = hopper_scratch(rows, sequences, T, NH, multiprocessors);
        bytes = max_size(bytes, hopper_scratch_bytes(&z));
    }
    return bytes;
}

#endif
