/* layernorm_fp8: the residual forward pass of layernorm.h that also rounds y to E4M3, on the GPU. It saves what
 * quantize.h would read and write again.
 *
 * All outputs have the same bits as after residual_layernorm_forward() and quantize(): y is rounded to floatX, then
 * scaled and rounded to E4M3. If nothing reads y.v besides this copy and mean_bias_center(), only the rows of the means
 * are written.
 *
 * shapes     C is a multiple of 16, at most 1792; all pointers are aligned to 16 bytes. layernorm_fp8_takes(): whether
 *            this GPU has the shared memory. Np is N rounded up to 16; columns N to Np - 1 of y.q's transpose are zero.
 * bytes      N C (3 sizeof(floatX) + 2) with the transpose, plus the rows of y that are written
 * builds     only in bf16: layernorm_fp8_takes() is 0 in others. The CPU has no such kernel. */
#include "llmc/ops/layernorm/layernorm.h"  // before the guard: it includes this file

#ifndef LLMC_FP8_LAYERNORM_H
#define LLMC_FP8_LAYERNORM_H

#include "llmc/fp8/operand.h"

#ifdef __CUDACC__

// The rows of y that are written: all, or those that mean_bias_center() reads.
typedef enum { LAYERNORM_ALL_ROWS, LAYERNORM_MEAN_ROWS } LayerNormRows;

typedef struct {
    floatX* y;
    LayerNormRows rows;
    uint8_t *y8, *yt;   // yt NULL: not wanted
    Fp8Stats* stats;    // NULL: not wanted
    const real* scale;  // [1], a power of two, read on the device
} LayerNormFp8;

#include "llmc/fp8/layernorm.cuh"

// Less than layernorm moves: some rows of y, and y8 and yt instead of y.
static inline double layernorm_fp8_bytes(LayerNormFp8 out, Rows size) {
    double rows = out.rows == LAYERNORM_ALL_ROWS ? size.N : mean_bias_rows(size.N);
    double saved = ((double)size.N - rows) * size.C * sizeof(floatX);
    return RESIDUAL_LAYERNORM_FORWARD_BYTES(size.N, size.C) - saved + (out.yt ? 2.0 : 1.0) * size.N * size.C;
}

// residual_layernorm_forward() of an operand with a copy. Returns 0, and does nothing, if no kernel does both.
COMPILED_IF_CALLED static inline int residual_layernorm_forward_fp8(Operand y, ResidualBranch branch,
                                                                    LayerNormStats stats, const floatX* x, LayerNorm p,
                                                                    Rows size, real eps, Context* ctx) {
    const Fp8Linear* f = y.q->layer;
    if (f->shared->calibrates || !layernorm_fp8_takes(size.C, ctx)) return 0;
    QuantizeOutput to = fp8_copy_output(y.q);
    LayerNormFp8 out = {.y = y.v,
                        .rows = to.yt && !y.q->v_is_read ? LAYERNORM_MEAN_ROWS : LAYERNORM_ALL_ROWS,
                        .y8 = to.y,
                        .yt = to.yt,
                        .stats = fp8_count(f, FP8_X, size.N, size.C),
                        .scale = to.scale};
    CHECK(((uintptr_t)x | (uintptr_t)out.y | (uintptr_t)out.y8 | (uintptr_t)out.yt) % 16 == 0);
    Scope scope = scope_open(ctx, "residual_layernorm_forward_fp8", RESIDUAL_LAYERNORM_FORWARD_FLOPS(size.N, size.C),
                             layernorm_fp8_bytes(out, size), "N=%d C=%d", size.N, size.C);
    LayerNormForward a = layernorm_forward_args(y.v, stats, x, p, size, eps);
    a.r = branch.r, a.dropout = dropout_rows(branch.dropout);
    if (branch.dropout.threshold) layernorm_fp8_launch<LAYERNORM_RESIDUAL_DROPOUT>(a, out, ctx);
    else layernorm_fp8_launch<LAYERNORM_RESIDUAL>(a, out, ctx);
    scope_close(&scope);
    y.q->from = quantize_plain(y.v);
    return 1;
}

#endif
#endif
