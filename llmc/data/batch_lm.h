/* Batches for next-token prediction: windows of T + 1 tokens; the inputs are the first T, the targets the last T.
 *
 * A target that does not count for the loss is -1; the shard's mask determines which targets count.
 *
 * A shard of n tokens has (n - 1) / T windows with stride T: every target is used once in an epoch, and no window
 * crosses from one file to the next. The order is a seeded permutation of all windows, new in every epoch, or the order
 * of the files. The position of a run is one number, the running number of a sequence over all epochs and ranks:
 * nothing else has to be saved, and any number of ranks sees the same sequences. */
#ifndef LLMC_DATA_BATCH_LM_H
#define LLMC_DATA_BATCH_LM_H

#include "llmc/base/rng.h"
#include "llmc/data/shards.h"

enum { IN_ORDER = 0, SHUFFLED = 1 };

typedef struct {
    const Shards* shards;
    int B, T;
    int V;  // all tokens are below V
    uint64_t seed;
    int shuffle;      // IN_ORDER or SHUFFLED
    int has_mask;     // some shard has a mask: not all targets count
    uint64_t* first;  // [shards->count + 1] number of windows before each shard; the last is the total
} BatchLm;

static inline uint64_t batch_lm_windows(const BatchLm* b) { return b->first[b->shards->count]; }

// Ends with USAGE if a shard is too short for one window. `shards` must outlive the reader.
static inline void batch_lm_init(BatchLm* b, const Shards* shards, int B, int T, int V, uint64_t seed, int shuffle) {
    CHECK(B > 0 && T > 0 && V > 0);
    b->shards = shards;
    b->B = B;
    b->T = T;
    b->V = V;
    b->seed = seed;
    b->shuffle = shuffle;
    b->has_mask = 0;
    b->first = (uint64_t*)xcalloc((size_t)shards->count + 1, sizeof(uint64_t));
    for (int i = 0; i < shards->count; i++) {
        uint64_t tokens = shards->shard[i].tokens, windows = (tokens - 1) / (uint64_t)T;
        if (windows == 0)
            die(USAGE,
                "%s: %llu tokens are too few for one sequence of %d tokens and its last target; "
                "use a shorter sequence (-t) or more data",
                shards->shard[i].path, (unsigned long long)tokens, T);
        if (shards->shard[i].row && T % shards->shard[i].row != 0)
            die(USAGE,
                "%s: its documents are packed in rows of %d tokens, which sequences of %d tokens would cut; use -t %d, "
                "a multiple of it, or data prepared with --tokens %d",
                shards->shard[i].path, shards->shard[i].row, T, shards->shard[i].row, T);
        b->has_mask |= shards->shard[i].has_mask;
        b->first[i + 1] = b->first[i] + windows;
    }
}

static inline void batch_lm_free(BatchLm* b) {
    free(b->first);
    memset(b, 0, sizeof(*b));
}

// The window of the training set's `sequence`-th sequence.
static inline uint64_t batch_lm_window(const BatchLm* b, uint64_t sequence) {
    uint64_t windows = batch_lm_windows(b), epoch = sequence / windows, i = sequence % windows;
    return b->shuffle == SHUFFLED ? rng_permute(i, windows, rng_stream(b->seed, epoch, 0, SITE_SHUFFLE)) : i;
}

// Find the shard of window w, the last one that starts at or before w. *offset: the window's first token in it.
static inline int batch_lm_find(const BatchLm* b, uint64_t w, uint64_t* offset) {
    int low = 0, high = b->shards->count - 1;
    while (low < high) {
        int middle = low + (high - low + 1) / 2;
        if (b->first[middle] <= w) low = middle;
        else high = middle - 1;
    }
    *offset = (w - b->first[low]) * (uint64_t)b->T;
    return low;
}

// The number of targets that count in `sequences` sequences, starting with number `sequence`.
static inline uint64_t batch_lm_count(const BatchLm* b, uint64_t sequence, uint64_t sequences) {
    uint64_t count = b->has_mask ? 0 : sequences * (uint64_t)b->T;
    for (uint64_t i = 0; i < sequences && b->has_mask; i++) {
        uint64_t offset;
        int shard = batch_lm_find(b, batch_lm_window(b, sequence + i), &offset);
        if (!b->shards->shard[shard].has_mask) {
            count += (uint64_t)b->T;
            continue;
        }
        unsigned char* mask = shards_read_mask(b->shards, shard, offset + 1, (size_t)b->T, NULL);
        for (size_t t = 0; t < (size_t)b->T; t++) count += (uint64_t)shard_mask_bit(mask, offset + 1, t);
        free(mask);
    }
    return count;
}

// Read B sequences, starting with number `sequence`: inputs [B, T] and targets [B, T]. After the last window the next
// epoch begins, also inside a batch. Errors in the data go to `error`; with NULL they end the program.
static inline void batch_lm_read(const BatchLm* b, uint64_t sequence, int* inputs, int* targets, ReadError* error) {
    size_t T = (size_t)b->T;
    int* window = (int*)xmalloc((T + 1) * sizeof(int));
    for (size_t row = 0; row < (size_t)b->B; row++) {
        uint64_t offset;
        int shard = batch_lm_find(b, batch_lm_window(b, sequence + row), &offset);
        shards_read(b->shards, shard, offset, T + 1, window, error);
        for (size_t t = 0; t <= T; t++)
            if ((uint32_t)window[t] >= (uint32_t)b->V)
                read_failed(error, USAGE,
                            "%s: token %u at position %llu is outside the vocabulary of %d; prepare the data with the "
                            "model's own tokenizer, or choose a model with a larger vocabulary",
                            b->shards->shard[shard].path, (uint32_t)window[t], (unsigned long long)(offset + t), b->V);
        memcpy(inputs + row * T, window, T * sizeof(int));
        memcpy(targets + row * T, window + 1, T * sizeof(int));
        if (!b->shards->shard[shard].has_mask) continue;
        unsigned char* mask = shards_read_mask(b->shards, shard, offset + 1, T, error);
        for (size_t t = 0; t < T; t++)
            if (!shard_mask_bit(mask, offset + 1, t)) targets[row * T + t] = -1;
        free(mask);
    }
    free(window);
}

// ---------------------------------------------------------------------------------------------------------
// Documents inside a batch

// The documents of N = B * T rows. No document crosses the end of a sequence of T.
typedef struct {
    int count, longest;
    int64_t sum_sq_len;        // sum of the squared lengths
    int *document, *position;  // [N] of each row: its document, 0 .. count - 1, and its position in the document
    int* cu_seqlens;           // [N + 1] rows before each document; the last one, [count], is N
} Documents;

// The number of ints in the three arrays, which lie one after the other.
static inline size_t documents_ints(int N) { return 3 * (size_t)N + 1; }

// Place the arrays at `ints`.
static inline void documents_place(Documents* documents, int* ints, int N) {
    documents->document = ints;
    documents->position = ints + N;
    documents->cu_seqlens = ints + 2 * (size_t)N;
}

// Find the documents in inputs [B, T]. One begins at the start of each sequence, and at each token `end_of_text`, which
// is the first token of a document in the files.
static inline void documents_find(Documents* documents, const int* inputs, int B, int T, int end_of_text) {
    documents->count = documents->longest = 0;
    documents->sum_sq_len = 0;
    for (int row = 0, length = 0; row < B * T; row++) {
        int begins = row % T == 0 || inputs[row] == end_of_text;
        length = begins ? 1 : length + 1;
        if (begins) documents->cu_seqlens[documents->count++] = row;
        documents->document[row] = documents->count - 1;
        documents->position[row] = length - 1;
        documents->sum_sq_len += 2 * length - 1;
        documents->longest = max_int(documents->longest, length);
    }
    documents->cu_seqlens[documents->count] = B * T;
}

#endif
