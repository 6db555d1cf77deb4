/* linear_input: layernorm of the input of a linear layer.
 *
 *   layernorm_for_linear(), residual_layernorm_for_linear()     the ops of layernorm.h, with p from layernorm_for()
 *
 * If that layer is fp8 and has scales (not `calibrates`), they also round y to fp8 as linear_forward() would, with the
 * same bits. On the GPU one kernel does both (fp8/layernorm.h). */
#ifndef LLMC_MODEL_LINEAR_INPUT_H
#define LLMC_MODEL_LINEAR_INPUT_H

#include "llmc/fp8/layernorm.h"
#include "llmc/model/linear.h"

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

static inline int fp8_from_layernorm(LayerNorm p) { return p.next && !p.next->shared->calibrates; }

#ifdef __CUDACC__

// Describe the output y of a kernel that rounds it for p.next, and note that this layer's x is y. If the layer keeps
// its transposed x, the backward pass does not read y either: then only the rows of the means are written, unless
// the layer's forward matmul is in floatX.
static inline LayerNormFp8 fp8_layernorm_output(floatX* y, LayerNorm p, Rows size) {
    const Fp8Linear* f = p.next;
    Fp8Operands* s = f->shared;
    QuantizeOutput x = fp8_output(f, FP8_X, s->x, s->records ? f->xt : NULL);
    LayerNormFp8 out = {.y = y,
                        .rows = p.is_only_next && x.yt && !f->exact_forward ? LAYERNORM_MEAN_ROWS : LAYERNORM_ALL_ROWS,
                        .y8 = x.y,
                        .yt = x.yt,
                        .stats = fp8_count(f, FP8_X, size.N, size.C),
                        .scale = x.scale};
    s->x_from = quantize_plain(y), s->x_of = y;
    return out;
}

#endif

// After a layernorm that wrote y: quantize it now.
COMPILED_IF_CALLED static inline void fp8_layernorm_end(const floatX* y, LayerNorm p, Rows size, Context* ctx) {
    if (!fp8_from_layernorm(p)) return;
    fp8_quantize_x(p.next, quantize_plain(y), size.N, size.C, ctx);
    p.next->shared->x_of = y;
}

// layernorm_forward() of the input of the layer p.next, for a linear_forward() that follows.
COMPILED_IF_CALLED static inline void layernorm_for_linear(floatX* y, LayerNormStats stats, const floatX* x,
                                                           LayerNorm p, Rows size, real eps, Context* ctx) {
#ifdef __CUDACC__
    if (fp8_from_layernorm(p) && layernorm_fp8_takes(size.C, ctx)) {
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
    if (fp8_from_layernorm(p) && layernorm_fp8_takes(size.C, ctx)) {
        residual_layernorm_forward_fp8(fp8_layernorm_output(y, p, size), branch, stats, x, p, size, eps, ctx);
        return;
    }
#endif
    residual_layernorm_forward(y, branch, stats, x, p, size, eps, ctx);
    fp8_layernorm_end(y, p, size, ctx);
}

#endif
