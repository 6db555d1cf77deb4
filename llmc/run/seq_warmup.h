/* --seq-warmup: over the first `warmup` steps, the attention span grows. A sequence is cut into pieces, and attention
 * across pieces is masked. The length of a piece rises from an eighth of T to T in eight stages. Tokens, positions and
 * the work outside attention stay the same.
 *
 *   length of a piece in step s = ceil(T / 8) ceil(8 (s + 1) / warmup), at most T
 *
 * It depends on the step alone, so a resumed run needs no state of its own. */
#ifndef LLMC_RUN_SEQ_WARMUP_H
#define LLMC_RUN_SEQ_WARMUP_H

#include "llmc/base/util.h"

enum { SEQ_WARMUP_STAGES = 8 };

// warmup 0: always T.
static inline int seq_warmup_at(int64_t warmup, int T, int64_t step) {
    if (step >= warmup) return T;
    int64_t stage = (SEQ_WARMUP_STAGES * (step + 1) + warmup - 1) / warmup;
    return min_int(T, (T + SEQ_WARMUP_STAGES - 1) / SEQ_WARMUP_STAGES * (int)stage);
}

#endif
