/* What the losses (classifier.h, span.h, squared_error.h) have in common: logits that the backward pass overwrites, with
 * padding columns that hold NaN; a loss for each target, and their sum. */
#ifndef DEV_OPS_LOSSES_H
#define DEV_OPS_LOSSES_H

#include "llmc/ops/common/losses.h"
#include "op.h"

#define LOSS_LOGITS(size, tol) ARG_AS("dlogits", logits, "N Vp", IN_OUT, size, tol, "dlogits")
#define LOSS_EACH(shape) ARG_AS("losses", each, shape, OUT, 0, 1e-6)
#define LOSS_SUM ARG(sum, "", BY_MODE, 0, 1e-6)
#define LOSS_SCALE ARG(loss_scale, "", IN, 1)

// After the targets are made. A loss scale of 1: none is given.
static inline void loss_case_start(OpCase* k, int V, double loss_scale) {
    for (size_t i = 0; i < k->logits.n; i++)
        if (i % (size_t)k->Vp >= (size_t)V) k->logits.host[i] = (real)NAN;
    array_begin(k->logits);
    *k->loss_scale.host = (real)loss_scale;
    array_upload_real(k->loss_scale);
    if (loss_scale == 1) k->loss_scale.host = k->loss_scale.device_real = NULL, k->loss_scale.n = 0;
}

static inline Losses loss_device(const OpCase* k) {
    return (Losses){k->each.device_real, k->sum.device_real, 0.25, k->mode};
}
static inline Losses loss_want(const OpCase* k) { return (Losses){k->each.want, k->sum.want, 0.25, k->mode}; }

#endif
