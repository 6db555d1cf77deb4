/* Dynamic loss scaling: how the factor on the loss moves, and how many updates were made.
 *
 * In fp16 gradients below 6e-8 become 0. The loss is therefore multiplied by a scale before the backward pass
 * (classifier.h), all gradients are that much larger, and the optimizer divides it out again (adamw.h). A scale that is
 * too large shows as gradients that are not finite: such a step is left out, and the scale is halved. It doubles after a
 * number of good steps in a row. All of it happens where the ops run: the host need not wait for the norm.
 *
 *   update     state in place, norm [1] in place, after every step's norm
 *
 *   applied = scale                                         the scale of the gradients whose norm this is
 *   norm    = norm / applied
 *   finite:      updates + 1, good + 1;  growth_interval good ones: scale = min(2 scale, ceiling), good = 0
 *   not finite:  scale = max(scale / 2, floor), good = 0    only if dynamic
 *
 * dtypes     scales and norm real, counters 64 bits.
 * numerics   powers of two change no bit of a gradient, unless it leaves the range of its type.
 * source     Micikevicius et al., arXiv 1710.03740; the rule and its numbers as in torch.amp.GradScaler, but with limits. */
#ifndef LLMC_LOSS_SCALE_H
#define LLMC_LOSS_SCALE_H

#include "../device/scope.h"

#define LOSS_SCALE_FLOOR 1.0
#define LOSS_SCALE_CEILING 16777216.0  // of growth; a run may begin above it

// What lies where the ops run. It starts with a scale, the rest 0.
typedef struct {
    real scale;       // the next backward pass multiplies the loss by it
    real applied;     // the gradients of the last step carry it
    int64_t good;     // steps in a row that were finite, since the scale last changed
    int64_t updates;  // steps that were finite: the optimizer's own count, which those left out do not enter
} LossScale;

typedef enum { LOSS_SCALE_FIXED, LOSS_SCALE_DYNAMIC } LossScaleKind;

typedef struct {
    LossScaleKind kind;
    int64_t growth_interval;
} LossScaleRule;

#define LOSS_SCALE_UPDATE_FLOPS 4.0
#define LOSS_SCALE_UPDATE_BYTES (2.0 * sizeof(LossScale) + 2.0 * sizeof(real))

// ---------------------------------------------------------------------------------------------------------
// Reference, and all there is to it

HOST_DEVICE static inline void loss_scale_update_ref(LossScale* s, real* norm, LossScaleRule rule) {
    int dynamic = rule.kind == LOSS_SCALE_DYNAMIC;
    s->applied = s->scale;
    *norm /= s->applied;
    if (isfinite(*norm)) {
        s->updates++;
        s->good++;
        if (!dynamic || s->good < rule.growth_interval) return;
        s->good = 0;
        if (s->scale < (real)LOSS_SCALE_CEILING)
            s->scale = s->scale > (real)(LOSS_SCALE_CEILING / 2) ? (real)LOSS_SCALE_CEILING : 2 * s->scale;
    } else {
        s->good = 0;
        if (dynamic) s->scale = s->scale < (real)(2 * LOSS_SCALE_FLOOR) ? (real)LOSS_SCALE_FLOOR : s->scale / 2;
    }
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU

// One thread.
static __global__ void loss_scale_update_kernel(LossScale* s, real* norm, LossScaleRule rule) {
    loss_scale_update_ref(s, norm, rule);
}
#endif

static inline void loss_scale_update(LossScale* s, real* norm, LossScaleRule rule, Context* ctx) {
    Scope scope = scope_open(ctx, "loss_scale_update", LOSS_SCALE_UPDATE_FLOPS, LOSS_SCALE_UPDATE_BYTES, "n=1");
#ifdef __CUDACC__
    loss_scale_update_kernel<<<1, 1, 0, ctx->stream>>>(s, norm, rule);
    cudaCheck(cudaGetLastError());
#else
    loss_scale_update_ref(s, norm, rule);
#endif
    scope_close(&scope);
}

#endif
