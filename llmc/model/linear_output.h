/* linear_output: attention's backward pass, whose dqkv is the gradient of a linear layer's output.
 *
 *   attention_backward_for_linear()    attention.h's attention_backward(), for the linear_backward_weight(d, dqkv, ..,
 *                                      mode) that follows, which must be the only op that reads dqkv
 *
 * If that layer is fp8, knows scales (not `calibrates`) and is asked to (--fp8-fusion 3), one kernel also rounds dqkv and
 * sums it for the bias, and dqkv itself is not written (backward_fp8.h): Hopper GPUs, heads of 64 channels, sequences of
 * one length. */
#ifndef LLMC_MODEL_LINEAR_OUTPUT_H
#define LLMC_MODEL_LINEAR_OUTPUT_H

#include "llmc/model/linear.h"
#include "llmc/ops/attention/backward_fp8.h"

COMPILED_IF_CALLED static inline void attention_backward_for_linear(floatX* dqkv, AttentionInputs in,
                                                                    const Sequences* s, AttentionShape shape,
                                                                    LinearGrads d, Mode mode, Context* ctx) {
#ifdef __CUDACC__
    const Fp8Linear* f = d.fp8;
    if (f && f->shared->fusion >= 3 && !f->shared->calibrates && s->rows && attention_fp8_takes(s, shape, ctx)) {
        Fp8Operands* o = f->shared;
        QuantizeOutput out = fp8_output(f, FP8_DY, o->dy, o->dyt);
        out.stats = fp8_count(f, FP8_DY, s->rows, 3 * shape.NH * shape.HS);
        out.sums.b = d.b, out.sums.mode = mode;
        // o->x, the rounded input of a layer in the forward pass, has room for the sums, and is not in use.
        attention_backward_fp8(out, (float*)o->x, in, s, shape, ctx);
        o->dy_of = dqkv;
        return;
    }
#endif
    (void)d, (void)mode;
    attention_backward(dqkv, in.dout, in.qkv, in.out, in.lse, s, shape, ctx);
}

#endif
