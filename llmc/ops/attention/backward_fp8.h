/* attention_fp8: attention.h's backward pass that writes dqkv in E5M2 only, on Hopper GPUs. It saves what quantize.h would
 * read and write again.
 *
 *   out.y [N, 3C], out.yt [3C, N]    the bytes of quantize(dqkv), and out.stats: the same bits
 *   out.sums.b [3C] (SET or ADD)     the column sums of dqkv, in another order than quantize()'s; NULL: not wanted
 *
 * shapes     heads of 64 channels; sequences of one length, a multiple of 64: attention_fp8_takes(). out.y, out.yt and
 *            out.scale are as in quantize.h, E5M2, and not NULL.
 * scratch    besides attention.h's, ATTENTION_FP8_BYTES
 * builds     only in bf16; the CPU has no such kernel: model/linear_output.h calls attention_backward() */
#ifndef LLMC_OPS_ATTENTION_BACKWARD_FP8_H
#define LLMC_OPS_ATTENTION_BACKWARD_FP8_H

#include "llmc/ops/attention/attention.h"
#include "llmc/ops/quantize/quantize.h"

// The tensors that attention's backward pass reads; see attention.h.
typedef struct {
    const floatX *dout, *qkv, *out;
    const real* lse;
} AttentionInputs;

#define ATTENTION_FP8_BYTES(N, C) ((size_t)(N) / 64 * 3 * (size_t)(C) * sizeof(float))

#ifdef __CUDACC__

static inline int attention_fp8_takes(const Sequences* s, AttentionShape shape, const Context* ctx) {
#if defined(ATTENTION_FLASH) && defined(PRECISION_BF16)
    return attention_is_flash(shape.HS, ctx) && hopper_supports(BACKWARD, shape, ctx) && shape.HS == 64 &&
           s->max_length % 64 == 0 && s->rows == s->count * s->max_length;
#else
    return (void)s, (void)shape, (void)ctx, 0;
#endif
}

// partial [ATTENTION_FP8_BYTES]: scratch, on the device.
static inline void attention_backward_fp8(QuantizeOutput out, float* partial, AttentionInputs in, const Sequences* s,
                                          AttentionShape shape, Context* ctx) {
#if defined(ATTENTION_FLASH) && defined(PRECISION_BF16)
    int N = s->rows, NH = shape.NH, width = 3 * NH * 64;
    double pairs = attention_pairs(s, shape.mask);
    CHECK(N > 0 && attention_fp8_takes(s, shape, ctx) && out.y && out.yt && out.format == FP8_E5M2);
    Scope scope = scope_open(ctx, "attention_backward_fp8", ATTENTION_BACKWARD_FLOPS(pairs, NH, 64),
                             ATTENTION_BACKWARD_BYTES(N, NH, 64) - 1.0 * N * width * (sizeof(floatX) - 2),
                             "N=%d sequences=%d NH=%d HS=64", N, s->count, NH);
    HopperGradientFp8 to = {.out = out, .partial = out.sums.b ? partial : NULL, .shared = NULL};
    hopper_backward(to, in.dout, in.qkv, in.out, in.lse, s, shape, ctx);
    if (out.sums.b) {
        quantize_sums_kernel<<<blocks_for((size_t)width, WARP), QUANTIZE_THREADS, 0, ctx->stream>>>(out.sums, partial,
                                                                                                    N / 64, width);
        cudaCheck(cudaGetLastError());
    }
    scope_close(&scope);
#else
    (void)out, (void)partial, (void)in, (void)s, (void)shape, (void)ctx;
#endif
}

#endif
#endif
