/* Attention with Hopper's instructions, for ops/attention/attention.h, which alone includes it. */
#ifndef LLMC_HOPPER_ATTENTION_CUH
#define LLMC_HOPPER_ATTENTION_CUH

#include "llmc/hopper/attention_backward.cuh"
#include "llmc/hopper/attention_forward.cuh"

static inline size_t hopper_scratch_bound(int N, int fewest, int most, int T, AttentionShape shape,
                                          const Context* ctx) {
    return flash_bits_bytes(N, most, T, shape) +
           hopper_scratch_most(N, fewest, most, T, shape.NH, ctx->multiprocessors);
}

// Choose these kernels where they run: on a Hopper GPU, in a build with code for it; heads of up to 128 channels in
// the forward pass, 64 in the backward pass.
static inline void hopper_choose(AttentionKernels* k, AttentionShape shape, const Context* ctx) {
    if (!HOPPER_BUILD || ctx->capability != 90) return;
    k->forward = hopper_forward;
    if (shape.HS <= 64) k->backward = hopper_backward, k->scratch_bytes = hopper_scratch_bound;
}

#endif
