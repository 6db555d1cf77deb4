/* Dynamic loss scaling: how the factor on the loss moves, and how many updates were made.
 *
 * In fp16 gradients below 6e-8 become 0. The loss is therefore multiplied by a scale before the backward pass
 * (classifier.h), all gradients are that much larger, and the optimizer divides it out again (adam.h). A scale that is
 * too large shows as gradients that are not finite: such a step is left out, and the scale is halved. It doubles after a
 * number of good steps in a row. All of it happens where the ops run: the host need not wait for the norm.
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

#include "device.h"

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

// State and norm are changed in place.
HOST_DEVICE static inline void loss_scale_update(LossScale* s, real* norm, LossScaleRule rule) {
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

#endif
