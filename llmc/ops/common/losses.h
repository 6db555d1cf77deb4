/* Where a loss op writes its losses. */
#ifndef LLMC_OPS_COMMON_LOSSES_H
#define LLMC_OPS_COMMON_LOSSES_H

#include "llmc/device/device.h"

typedef struct {
    real* each;    // [N] loss of each row
    real* sum;     // [1] scale times the sum of `each`, SET or ADDed
    double scale;  // factor on the sum and on the gradients
    Mode mode;     // mode of the sum
} Losses;

// What the gradient of the losses with respect to the logits is computed from, besides the logits (classifier.h).
typedef struct {
    Losses losses;           // `each` as classifier_forward() wrote it, and `scale`
    const int* targets;      // [N]; below 0: the row is ignored
    const real* loss_scale;  // [1] on the device; NULL: 1
    int V;                   // columns; the others are padding
} LogitsGradient;

HOST_DEVICE static inline real logits_gradient_factor(LogitsGradient d) {
    return (real)d.losses.scale * (d.loss_scale ? *d.loss_scale : 1);
}

static inline void losses_add_ref(Losses losses, int N) {
    double total = 0;
    for (int n = 0; n < N; n++) total += (double)losses.each[n];
    *losses.sum = (real)(losses.scale * total + (losses.mode == ADD ? (double)*losses.sum : 0));
}

#endif
