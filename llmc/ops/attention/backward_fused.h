/* attention_fused: attention.h's backward pass that also does what the linear layer before it would read dqkv for, on
 * Hopper GPUs.
 *
 *   attention_backward_bias   dqkv as in attention.h, and bias.b [3C] (SET or ADD) = the column sums of dqkv
 *   attention_backward_fp8    out.y [N, 3C], out.yt [3C, N]: the bytes of quantize(dqkv), E5M2, and out.stats; dqkv
 *                             itself is not written. out.bias.b [3C] (SET or ADD) = the column sums; NULL: not wanted
 *
 * dqkv, bytes and statistics have the same bits as apart. Sums are in fp32: over the rows of tiles of 64, then over the
 * tiles in order; apart the tiles have other sizes.
 *
 * shapes     attention_bias_takes(): heads of at most 64 channels. attention_fp8_takes(): heads of 64, sequences of one
 *            length, a multiple of 64; out.y, out.yt and out.scale are as in quantize.h, and not NULL
 * scratch    besides attention.h's: hopper_bias_bytes() in the same buffer (attention_scratch_bytes() has it with
 *            FLASH_BIAS); ATTENTION_FP8_BYTES in one of the caller's
 * builds     bias: bf16 and fp16; fp8: bf16. The CPU has neither (model/linear_output.h). */
#ifndef LLMC_OPS_ATTENTION_BACKWARD_FUSED_H
#define LLMC_OPS_ATTENTION_BACKWARD_FUSED_H

#include "llmc/ops/attention/attention.h"

// The tensors that attention's backward pass reads; see attention.h.
typedef struct {
    const floatX *dout, *qkv, *out;
    const real* lse;
} AttentionInputs;

#define ATTENTION_FP8_BYTES(N, C) ((size_t)(N) / 64 * 3 * (size_t)(C) * sizeof(float))

#ifdef __CUDACC__

static inline int attention_bias_takes(AttentionShape shape, const Context* ctx) {
#ifdef ATTENTION_FLASH
    return attention_is_flash(shape.HS, ctx) && hopper_supports(BACKWARD, shape, ctx);
#else
    return (void)shape, (void)ctx, 0;
#endif
}

static inline int attention_fp8_takes(const Sequences* s, AttentionShape shape, const Context* ctx) {
#ifdef PRECISION_BF16
    return attention_bias_takes(shape, ctx) && shape.HS == 64 && s->max_length % 64 == 0 &&
           s->rows == s->count * s->max_length;
#else
    return (void)s, (void)shape, (void)ctx, 0;
#endif
}

#ifdef ATTENTION_FLASH

static inline void attention_backward_bias(floatX* dqkv, BiasGrad bias, AttentionInputs in, const Sequences* s,
                                           AttentionShape shape, Context* ctx) {
    CHECK(s->rows > 0 && attention_bias_takes(shape, ctx));
    Scope scope = attention_scope(ctx, BACKWARD, s, shape);
    hopper_backward(HopperGradientSums{dqkv, NULL, NULL}, in.dout, in.qkv, in.out, in.lse, s, shape, ctx);
    // The scratch begins with the sums of tiles.
    tile_sums<8>(bias, (const float*)device_scratch(ctx, hopper_bias_bytes(s->rows, s->count, shape)),
                 hopper_first_tile(s->rows, s->count), 3 * shape.NH * shape.HS, ctx);
    scope_close(&scope);
}

// partial [ATTENTION_FP8_BYTES]: scratch, on the device.
static inline void attention_backward_fp8(AttentionFp8 out, float* partial, AttentionInputs in, const Sequences* s,
                                          AttentionShape shape, Context* ctx) {
    int N = s->rows, NH = shape.NH, width = 3 * NH * 64;
    double pairs = attention_pairs(s, shape.mask);
    CHECK(N > 0 && attention_fp8_takes(s, shape, ctx) && out.y && out.yt);
    Scope scope = scope_open(ctx, "attention_backward_fp8", ATTENTION_BACKWARD_FLOPS(pairs, NH, 64),
                             ATTENTION_BACKWARD_BYTES(N, NH, 64) - 1.0 * N * width * (sizeof(floatX) - 2.0),
                             "N=%d sequences=%d NH=%d HS=64", N, s->count, NH);
    HopperGradientFp8 to = {.out = out, .partial = out.bias.b ? partial : NULL, .shared = NULL};
    hopper_backward(to, in.dout, in.qkv, in.out, in.lse, s, shape, ctx);
    if (out.bias.b) tile_sums<8>(out.bias, partial, N / 64, width, ctx);
    scope_close(&scope);
}

#endif
#endif
#endif
