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

static inline void losses_add_ref(Losses losses, int N) {
    double total = 0;
    for (int n = 0; n < N; n++) total += (double)losses.each[n];
    *losses.sum = (real)(losses.scale * total + (losses.mode == ADD ? (double)*losses.sum : 0));
}

#endif
