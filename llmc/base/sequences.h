/* A micro-batch is a packed list of rows (tokens) cut into sequences; there is no padding anywhere.
 *
 * GPT-2 has `count` sequences of T rows each; BERT has sequences of unequal length. Every op that needs to
 * know where a sequence begins (attention, position embeddings, dropout masks) takes this one description.
 * The arrays live where the ops run (host memory on the CPU, device memory on the GPU). */
#ifndef LLMC_SEQUENCES_H
#define LLMC_SEQUENCES_H

#include "util.h"

typedef struct Sequences {
    int rows;                    // N: tokens of all sequences together
    int count;                   // sequences
    int max_length;              // rows of the longest
    int64_t squares;             // sum of the squared lengths, which is what attention's work grows with
    int first;                   // number, in the whole optimizer step over all ranks, of sequence 0
    const int* cu_seqlens;       // [count + 1] sequence s holds the rows cu_seqlens[s] .. cu_seqlens[s + 1] - 1
    const int* sequence;         // [rows] the sequence of each row: 0 .. count - 1
    const int* position;         // [rows] the row's index inside its sequence
    const int* host_cu_seqlens;  // cu_seqlens where the host can read it; NULL will do if all have the same length
    const struct Sequences*
        parts;  // the same rows cut more finely, which attention keeps apart; NULL: it keeps these so
    // 1: `first` is the number of row 0, and a sequence's number is that of its first row. So it does not depend on how
    // many sequences other micro-batches hold, which nobody has counted.
    int is_numbered_by_row;
} Sequences;

// First row of a sequence, for the host; that of number `count` is the end of the last one.
static inline int sequences_start(const Sequences* s, int sequence) {
    if (s->host_cu_seqlens) return s->host_cu_seqlens[sequence];
    CHECK(s->rows == s->count * s->max_length);
    return sequence * s->max_length;
}

// What attention keeps apart.
static inline const Sequences* sequences_parts(const Sequences* s) { return s->parts ? s->parts : s; }

// The number of a sequence in the whole step, which is its own there.
static inline uint32_t sequences_number(const Sequences* s, int sequence) {
    return (uint32_t)s->first + (uint32_t)(s->is_numbered_by_row ? sequences_start(s, sequence) : sequence);
}

// Fill the three arrays for `count` sequences of T rows: cu_seqlens [count + 1], sequence and position [count * T].
static inline void sequences_uniform(int* cu_seqlens, int* sequence, int* position, int count, int T) {
    for (int s = 0; s < count; s++) {
        cu_seqlens[s] = s * T;
        for (int t = 0; t < T; t++) {
            sequence[(size_t)s * (size_t)T + (size_t)t] = s;
            position[(size_t)s * (size_t)T + (size_t)t] = t;
        }
    }
    cu_seqlens[count] = count * T;
}

#endif
