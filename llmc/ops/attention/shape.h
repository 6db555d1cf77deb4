/* The parameters of attention besides its sequences: heads, mask, dropout. The op is in attention.h. */
#ifndef LLMC_OPS_ATTENTION_SHAPE_H
#define LLMC_OPS_ATTENTION_SHAPE_H

#include "llmc/base/rng.h"
#include "llmc/device/device.h"

typedef struct {
    int NH, HS;
    Mask mask;
    Dropout dropout;  // on the probabilities
} AttentionShape;

// How many keys of its sequence, from the first on, a query attends to.
HOST_DEVICE static inline int attention_visible(Mask mask, int query, int length) {
    return mask == CAUSAL ? query + 1 : length;
}

#endif
