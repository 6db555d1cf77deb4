/* The scratch of attention's backward pass on Hopper GPUs: sums of dQ, tiles of 64 queries and 64 channels in fp32, and
 * statistics of the queries. All of it is index arithmetic on sizes, so tests on the CPU can check it. */
#ifndef LLMC_HOPPER_ATTENTION_SCRATCH_H
#define LLMC_HOPPER_ATTENTION_SCRATCH_H

#include "llmc/base/util.h"

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
