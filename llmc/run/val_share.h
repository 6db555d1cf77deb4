/* The sequences of a validation: the first ones of the held-out data, in at most --val-batches micro-batches of B. The
 * last micro-batch may be smaller. The result is the mean over these sequences. If they are all of the data, B changes
 * it only by rounding. */
#ifndef LLMC_RUN_VAL_SHARE_H
#define LLMC_RUN_VAL_SHARE_H

#include "llmc/dist/process_group.h"

typedef struct {
    uint64_t B, sequences, batches;       // to measure
    uint64_t all_sequences, all_batches;  // in the data
    // This rank's current micro-batch, from val_share_next().
    uint64_t first;  // its first sequence
    int count;       // number of its sequences; 0: this rank has had no micro-batch
    Mode mode;       // how its loss is written: SET for the rank's first, then ADD
    uint64_t next, ranks;
    int is_stopped;  // after the last: a signal to any rank ended the validation early, so it has no result
} ValShare;

// Divide the first `sequences` sequences into micro-batches of B, at most `most_batches` (0: all). Micro-batches are
// distributed round-robin over the ranks.
static inline ValShare val_share(int most_batches, uint64_t sequences, int B, const ProcessGroup* group) {
    uint64_t most = (uint64_t)most_batches;
    ValShare v;
    memset(&v, 0, sizeof v);
    v.B = (uint64_t)B, v.sequences = v.all_sequences = sequences;
    v.batches = v.all_batches = (sequences + v.B - 1) / v.B;
    if (most > 0 && v.batches > most) v.batches = most, v.sequences = most * v.B;
    v.mode = SET, v.next = (uint64_t)group->rank, v.ranks = (uint64_t)group->size;
    return v;
}

// Advance to this rank's next micro-batch. Returns 0 after the last one.
static inline int val_share_next(ValShare* v) {
    if (v->next >= v->batches) return 0;
    if (v->count) v->mode = ADD;
    v->first = v->next * v->B;
    v->count = (int)(v->sequences - v->first < v->B ? v->sequences - v->first : v->B);
    v->next += v->ranks;
    return 1;
}

// Print the end of the result's line.
static inline void val_share_print(const ValShare* v) {
    unsigned long long n = v->batches, all = v->all_batches, sequences = v->sequences, all_sequences = v->all_sequences;
    if (n == all) printf(" | all %llu micro-batches, %llu sequences\n", all, all_sequences);
    else
        printf(" | %llu of %llu micro-batches, %llu of %llu sequences; -m 0 takes all\n", n, all, sequences,
               all_sequences);
}

#endif
