/* A micro-batch is a packed list of rows (tokens) cut into sequences; there is no padding anywhere.
 *
 * GPT-2 has `count` sequences of T rows each; BERT has sequences of unequal length. Every op that needs to know where a
 * sequence begins (attention, position embeddings, dropout masks) takes this description. The arrays are in device
 * memory on the GPU and in host memory on the CPU. */
#ifndef LLMC_BASE_SEQUENCES_H
#define LLMC_BASE_SEQUENCES_H

#include "llmc/base/util.h"

typedef struct Sequences {
    int rows;                    // N: tokens of all sequences together
    int count;                   // sequences
    int max_length;              // rows of the longest
    int64_t sum_sq_len;          // sum of the squared lengths; attention's work is proportional to it
    int first;                   // number, in the whole optimizer step over all ranks, of sequence 0
    const int* cu_seqlens;       // [count + 1] sequence s holds the rows cu_seqlens[s] .. cu_seqlens[s + 1] - 1
    const int* sequence;         // [rows] the sequence of each row: 0 .. count - 1
    const int* position;         // [rows] the row's index inside its sequence
    const int* host_cu_seqlens;  // cu_seqlens in host memory; may be NULL if all sequences have the same length
    // The same rows cut into shorter sequences, between which attention is masked; NULL: these sequences.
    const struct Sequences* parts;
    // 1: `first` is the number of row 0, and the number of a sequence is that of its first row. Then it does not depend
    // on how many sequences other micro-batches have.
    int is_numbered_by_row;
} Sequences;

// First row of a sequence, on the host. sequences_start(s, s->count) is the end of the last one.
static inline int sequences_start(const Sequences* s, int sequence) {
    if (s->host_cu_seqlens) return s->host_cu_seqlens[sequence];
    CHECK(s->rows == s->count * s->max_length);
    return sequence * s->max_length;
}

// The sequences between which attention is masked.
static inline const Sequences* sequences_parts(const Sequences* s) { return s->parts ? s->parts : s; }

// The number of a sequence in the whole step, unique there.
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
