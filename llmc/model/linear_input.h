/* linear_input: the ops of layernorm.h that write what a matmul reads.
 *
 *   layernorm_for_linear(), residual_layernorm_for_linear()  y is the input of a linear layer; p from layernorm_for()
 *   layernorm_backward_for_linear()                 dbranch is the gradient of the output of layer r.last
 *
 * If that layer is fp8, they also round the tensor to fp8 as linear.h would, with the same bytes: if they are asked to
 * (--fp8-fusion) and know scales (not `calibrates`). On the GPU one kernel does both (layernorm_fp8.h). */
#ifndef LLMC_MODEL_LINEAR_INPUT_H
#define LLMC_MODEL_LINEAR_INPUT_H

#include "llmc/model/linear.h"
#include "llmc/ops/layernorm/layernorm_fp8.h"

// `p`, whose output only the layer `next` reads.
static inline LayerNorm layernorm_for(LayerNorm p, Linear next) {
    p.next = next.fp8, p.is_only_next = 1;
    return p;
}

// `p`, whose output the layer `next` reads, and others too.
static inline LayerNorm layernorm_also_for(LayerNorm p, Linear next) {
    p.next = next.fp8, p.is_only_next = 0;
    return p;
}

// Whether layernorm writes an operand of layer f in fp8.
static inline int fp8_from_layernorm(const Fp8Linear* f) { return f && f->shared->fusion && !f->shared->calibrates; }

#ifdef __CUDACC__

// Describe the output y of a kernel that rounds it for p.next, and note that this layer's x is y. If the layer keeps
// its transposed x, the backward pass does not read y either: then only the rows for mean_bias() are written.
static inline LayerNormFp8 fp8_layernorm_output(floatX* y, LayerNorm p, Rows size) {
    const Fp8Linear* f = p.next;
    Fp8Operands* s = f->shared;
    QuantizeOutput x = fp8_output(f, FP8_X, s->x, s->records ? f->xt : NULL);
    LayerNormFp8 out = {.y = y,
                        .rows = p.is_only_next && x.yt ? LAYERNORM_MEAN_ROWS : LAYERNORM_ALL_ROWS,
                        .fp8 = {x.y, x.yt, fp8_count(f, FP8_X, size.N, size.C), x.scale}};
    s->x_from = quantize_plain(y), s->x_of = y;
    return out;
}

#endif

// After a layernorm that wrote y: quantize it now.
COMPILED_IF_CALLED static inline void fp8_layernorm_end(const floatX* y, LayerNorm p, Rows size, Context* ctx) {
    if (!fp8_from_layernorm(p.next)) return;
    fp8_quantize_x(p.next, quantize_plain(y), size.N, size.C, ctx);
    p.next->shared->x_of = y;
}

// layernorm_forward() of the input of the layer p.next, for a linear_forward() that follows.
COMPILED_IF_CALLED static inline void layernorm_for_linear(floatX* y, LayerNormStats stats, const floatX* x,
                                                           LayerNorm p, Rows size, real eps, Context* ctx) {
#ifdef __CUDACC__
    if (fp8_from_layernorm(p.next) && layernorm_fp8_takes(size.C, ctx)) {
        layernorm_forward_fp8(fp8_layernorm_output(y, p, size), stats, x, p, size, eps, ctx);
        return;
    }
#endif
    layernorm_forward(y, stats, x, p, size, eps, ctx);
    fp8_layernorm_end(y, p, size, ctx);
}

// The same of residual_layernorm_forward().
COMPILED_IF_CALLED static inline void residual_layernorm_for_linear(floatX* y, ResidualBranch branch,
                                                                    LayerNormStats stats, const floatX* x, LayerNorm p,
                                                                    Rows size, real eps, Context* ctx) {
#ifdef __CUDACC__
    if (fp8_from_layernorm(p.next) && layernorm_fp8_takes(size.C, ctx)) {
        residual_layernorm_forward_fp8(fp8_layernorm_output(y, p, size), branch, stats, x, p, size, eps, ctx);
        return;
    }
#endif
    residual_layernorm_forward(y, branch, stats, x, p, size, eps, ctx);
    fp8_layernorm_end(y, p, size, ctx);
}

// residual_layernorm_backward() before the backward pass of layer r.last. On the CPU that layer quantizes dbranch.
COMPILED_IF_CALLED static inline void layernorm_backward_for_linear(ResidualGrad r, LayerNormGrads d,
                                                                    LayerNormInputs in, Mode dx_mode, Mode d_mode,
                                                                    Context* ctx) {
#ifdef __CUDACC__
    const Fp8Linear* f = r.last;
    if (fp8_from_layernorm(f) && layernorm_backward_fp8_takes(in.size.C, ctx)) {
        QuantizeOutput dy = fp8_output(f, FP8_DY, f->shared->dy, f->shared->dyt);
        Fp8Target target = {dy.y, dy.yt, fp8_count(f, FP8_DY, in.size.N, in.size.C), dy.scale};
        residual_layernorm_backward_fp8(target, r, d, in, dx_mode, d_mode, ctx);
        f->shared->dy_of = r.dropout.threshold ? r.dbranch : r.dx;
        return;
    }
#endif
    residual_layernorm_backward(r, d, in, dx_mode, d_mode, ctx);
}

#endif
