/* --batch-ramp: over the first `ramp` steps, the number of micro-batches in a step rises linearly from one to all of
 * them. Early gradients are similar, so a small batch is enough, and the same tokens give more steps.
 *
 *   micro-batches of step s = ceil(all (s + 1) / ramp), at most all
 *
 * On several ranks each counts its own micro-batches. A step thus has the tokens that one rank would take, rounded up
 * to micro-batches of all ranks: ceil(ceil(x) / ranks) = ceil(x / ranks).
 *
 * It depends on the step alone, so a resumed run needs no state of its own. */
#ifndef LLMC_RUN_BATCH_RAMP_H
#define LLMC_RUN_BATCH_RAMP_H

#include "llmc/base/util.h"

// Micro-batches in step `step`, of `all` at most. ramp 0: no ramp.
static inline int batch_ramp_at(int64_t ramp, int all, int64_t step) {
    if (step >= ramp) return all;
    return (int)(((step + 1) * all + ramp - 1) / ramp);
}

// The number of steps that `micro_batches` micro-batches suffice for.
static inline int64_t batch_ramp_steps(int64_t ramp, int all, double micro_batches) {
    int64_t step = 0;
    for (; step < ramp && micro_batches >= batch_ramp_at(ramp, all, step); step++)
        micro_batches -= batch_ramp_at(ramp, all, step);
    return step < ramp ? step : step + (int64_t)(micro_batches / all);
}

// Refuse a ramp if a step has only one micro-batch.
static inline void batch_ramp_check(int64_t ramp, int all) {
    if (ramp > 0 && all < 2)
        die(USAGE,
            "--batch-ramp %lld needs steps of several micro-batches; raise -d, or lower -b so that -b x -t x ranks is "
            "less",
            (long long)ramp);
}

#endif
