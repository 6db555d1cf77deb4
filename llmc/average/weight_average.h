/* --ema: an average of the weights, which usually predicts better than the last weights, without additional steps.
 *
 *   after step t >= start, n = t - start: average += rate (weights - average),  rate = max(1 - decay, 1 / (n + 1))
 *
 * It is the plain mean over the first 1 / (1 - decay) steps, then an exponential moving average. With decay 1 it is the
 * mean over all steps from `start` on (tail averaging). Each rank averages the shard that its optimizer updates
 * (Optimizer.average, saved with the moments). The average is swapped in for the parameters to evaluate it and to save
 * it as a separate model. */
#ifndef LLMC_AVERAGE_WEIGHT_AVERAGE_H
#define LLMC_AVERAGE_WEIGHT_AVERAGE_H

#include "llmc/average/average.h"
#include "llmc/optim/model_buffers.h"

typedef struct {
    double decay;   // 0: there is no average
    int64_t start;  // the first step in the average, counted from 1
    int is_in;      // the average and the parameters are swapped
    int64_t saved;  // step after which it was last saved; -1: not by this process
} WeightAverage;

static inline double weight_average_rate(const WeightAverage* a, int64_t step) {
    return fmax(1 - a->decay, 1 / (double)(step - a->start + 1));
}

// Whether there is an average after `step` steps.
static inline int weight_average_is_on(const WeightAverage* a, int64_t step) {
    return a->decay > 0 && step >= a->start && step > 0;
}

// Update the average after the update of step `step`.
static inline void weight_average_step(const WeightAverage* a, int64_t step, const ModelBuffers* b, const Optimizer* o,
                                       Context* ctx) {
    if (!weight_average_is_on(a, step)) return;
    scope_at(ctx, OPTIMIZER, -1);
    average_update(o->average, b->params + o->shard.begin, o->master, o->shard.size, weight_average_rate(a, step), ctx);
}

// Swap the average and the parameters, on all ranks. The fp32 copies are updated before the next forward pass, or with
// ZeRO-1 here.
static inline void weight_average_exchange(WeightAverage* a, ModelBuffers* b, const Optimizer* o, Context* ctx) {
    floatX* params = b->params + o->shard.begin;
    grad_sync_wait(b->grad_sync, GRAD_SYNC_LAST, ctx);  // the other ranks' parameters are on their way
    scope_at(ctx, OPTIMIZER, -1);
    if (a->is_in) average_restore(params, o->kept, o->shard.size, ctx);
    else average_exchange(params, o->kept, o->average, o->shard.size, ctx);
    a->is_in = !a->is_in;
    b->master = a->is_in ? NULL : o->master;
    model_buffers_share(b, ctx);
}

#endif
