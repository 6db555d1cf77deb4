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

// The number of keys, from the sequence's first, that a query attends to.
HOST_DEVICE static inline int attention_visible(Mask mask, int query, int length) {
    return mask == CAUSAL ? query + 1 : length;
}

#ifdef __CUDACC__
// A program with only one attention mask defines ATTENTION_MASK before its includes. nvcc then compiles the fast
// kernels for this mask only.
static constexpr bool attention_compiles(Mask mask) {
#ifdef ATTENTION_MASK
    return mask == ATTENTION_MASK;
#else
    return mask == CAUSAL || mask == FULL;
#endif
}
#endif

#endif
