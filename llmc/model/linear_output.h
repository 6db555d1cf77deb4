/* linear_output: attention's backward pass, whose dqkv is the gradient of a linear layer's output.
 *
 *   d = attention_backward_for_linear(dqkv, .., d, mode, ctx)
 *
 * is attention.h's attention_backward(), for linear_backward_weight(d, dqkv, .., mode), which must be the next op that
 * reads dqkv. Where a kernel can (backward_fused.h), it also computes
 *
 *   d.b     the bias gradient, if --attention flash-bias asks for it and the layer is not fp8: the returned d has
 *           none
 *   dqkv    in fp8 only, with the bias gradient, if the layer is fp8, knows scales (not `calibrates`) and
 *           --fp8-fusion 3 asks for it: dqkv itself is not written */
#ifndef LLMC_MODEL_LINEAR_OUTPUT_H
#define LLMC_MODEL_LINEAR_OUTPUT_H

#include "llmc/model/linear.h"
#include "llmc/ops/attention/backward_fused.h"

COMPILED_IF_CALLED static inline LinearGrads attention_backward_for_linear(floatX* dqkv, AttentionInputs in,
                                                                           const Sequences* s, AttentionShape shape,
                                                                           LinearGrads d, Mode mode, Context* ctx) {
#ifdef ATTENTION_FLASH
    BiasGrad bias = {.b = d.b, .mode = mode};
    const Fp8Linear* f = d.fp8;
    if (f && f->shared->fusion >= 3 && !f->shared->calibrates && s->rows && attention_fp8_takes(s, shape, ctx)) {
        Fp8Operands* o = f->shared;
        QuantizeOutput dy = fp8_output(f, FP8_DY, o->dy, o->dyt);
        AttentionFp8 out = {.y = dy.y,
                            .yt = dy.yt,
                            .stats = fp8_count(f, FP8_DY, s->rows, 3 * shape.NH * shape.HS),
                            .scale = dy.scale,
                            .bias = bias};
        // o->x, the rounded input of a layer in the forward pass, has room for the sums, and is not in use.
        attention_backward_fp8(out, (float*)o->x, in, s, shape, ctx);
        o->dy_of = dqkv;
        return d;
    }
    if (!f && ctx->attention == FLASH_BIAS && s->rows && attention_bias_takes(shape, ctx)) {
        attention_backward_bias(dqkv, bias, in, s, shape, ctx);
        return linear_weight_only(d);
    }
#endif
    (void)mode;
    attention_backward(dqkv, in.dout, in.qkv, in.out, in.lse, s, shape, ctx);
    return d;
}

#endif
