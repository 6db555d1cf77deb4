/* Dynamic loss scaling: the update of the loss scale, and the count of optimizer updates.
 *
 * In fp16, gradients below 6e-8 underflow to 0. The loss is therefore multiplied by a scale before the backward pass
 * (classifier.h). All gradients are larger by this factor, and the optimizer divides by it (adam.h). If the scale is
 * too large, gradients are not finite. Such a step is skipped, and the scale is halved. After a number of consecutive
 * finite steps the scale is doubled. All of this runs on the device, so the host need not wait for the norm.
 *
 *   applied = scale                                         the scale of the gradients of this norm
 *   norm    = norm / applied
 *   finite:      updates + 1, good + 1;  if good >= growth_interval: scale = min(2 scale, ceiling), good = 0
 *   not finite:  scale = max(scale / 2, floor), good = 0    only if dynamic
 *
 * dtypes     scales and norm real, counters 64 bits.
 * numerics   scaling by a power of two is exact unless a gradient leaves the range of its type.
 * source     Micikevicius et al., arXiv 1710.03740; rule and constants as in torch.amp.GradScaler, but with limits. */
#ifndef LLMC_OPS_COMMON_LOSS_SCALE_H
#define LLMC_OPS_COMMON_LOSS_SCALE_H

#include "llmc/device/device.h"

#define LOSS_SCALE_FLOOR 1.0
#define LOSS_SCALE_CEILING 16777216.0  // limit of growth; the initial scale may be larger

// The state on the device. Initially all fields but the scale are 0.
typedef struct {
    real scale;       // factor on the loss in the next backward pass
    real applied;     // scale of the last step's gradients
    int64_t good;     // consecutive finite steps since the scale last changed
    int64_t updates;  // number of updates made: the optimizer's step count, without skipped steps
} LossScale;

enum { LOSS_SCALE_GROWTH = 2000 };  // growth_interval of a run

typedef enum { LOSS_SCALE_FIXED, LOSS_SCALE_DYNAMIC } LossScaleKind;

typedef struct {
    LossScaleKind kind;
    int64_t growth_interval;
} LossScaleRule;

// Updates the state and the norm in place.
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
