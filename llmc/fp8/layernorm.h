/* layernorm_fp8: layernorm.h's forward pass that also rounds y to E4M3, on the GPU. It saves what quantize.h would read
 * and write again.
 *
 *   out.y8 [N, C], out.yt [C, Np]   the bytes of quantize(y), and out.stats; r, mean and rstd: see layernorm.h
 *   out.y [N, C] floatX             its rows as `rows` says; the others are not written
 *
 * All have the same bits as after layernorm and quantize(): y is rounded to floatX, then scaled and rounded to E4M3.
 *
 * shapes     C is a multiple of 16, at most 1792; all pointers are aligned to 16 bytes. layernorm_fp8_takes(): whether
 *            this GPU has the shared memory. Np is N rounded up to 16; columns N to Np - 1 of yt are zero.
 * bytes      N C (3 sizeof(floatX) + 2) with a residual and yt, plus the rows of y that are written
 * builds     only in bf16: layernorm_fp8_takes() is 0 in others
 * the CPU    has no such kernel: model/linear.h calls layernorm and quantize(). */
#ifndef LLMC_FP8_LAYERNORM_H
#define LLMC_FP8_LAYERNORM_H

#include "llmc/fp8/format.h"
#include "llmc/ops/layernorm/layernorm.h"

// The rows of y that are written: all, or those that mean_bias_center() reads.
typedef enum { LAYERNORM_ALL_ROWS, LAYERNORM_MEAN_ROWS } LayerNormRows;

typedef struct {
    floatX* y;
    LayerNormRows rows;
    uint8_t *y8, *yt;   // yt NULL: not wanted
    Fp8Stats* stats;    // NULL: not wanted
    const real* scale;  // [1], a power of two, read on the device
} LayerNormFp8;

#ifdef __CUDACC__

// Less than layernorm moves: some rows of y, and y8 and yt instead of y.
static inline double layernorm_fp8_bytes(LayerNormFp8 out, double layernorm_bytes, Rows size) {
    double rows = out.rows == LAYERNORM_ALL_ROWS ? size.N : mean_bias_rows(size.N);
    double saved = ((double)size.N - rows) * size.C * sizeof(floatX);
    return layernorm_bytes - saved + (out.yt ? 2.0 : 1.0) * size.N * size.C;
}

#include "llmc/fp8/layernorm.cuh"

static inline void layernorm_fp8_check(LayerNormFp8 out, const floatX* x, Rows size, const Context* ctx) {
    CHECK(size.N > 0 && layernorm_fp8_takes(size.C, ctx));
    CHECK(((uintptr_t)x | (uintptr_t)out.y | (uintptr_t)out.y8 | (uintptr_t)out.yt) % 16 == 0);
}

COMPILED_IF_CALLED static inline void layernorm_forward_fp8(LayerNormFp8 out, LayerNormStats stats, const floatX* x,
                                                            LayerNorm p, Rows size, real eps, Context* ctx) {
    layernorm_fp8_check(out, x, size, ctx);
    double bytes = layernorm_fp8_bytes(out, LAYERNORM_FORWARD_BYTES(size.N, size.C), size);
    Scope scope = scope_open(ctx, "layernorm_forward_fp8", LAYERNORM_FORWARD_FLOPS(size.N, size.C), bytes, "N=%d C=%d",
                             size.N, size.C);
    layernorm_fp8_launch<LAYERNORM_ALONE>(layernorm_forward_args(out.y, stats, x, p, size, eps), out, ctx);
    scope_close(&scope);
}

COMPILED_IF_CALLED static inline void residual_layernorm_forward_fp8(LayerNormFp8 out, ResidualBranch branch,
                                                                     LayerNormStats stats, const floatX* x, LayerNorm p,
                                                                     Rows size, real eps, Context* ctx) {
    int dropped = branch.dropout.threshold != 0;
    layernorm_fp8_check(out, x, size, ctx);
    CHECK(!dropped || branch.dropout.sequences->rows == size.N);
    double bytes = layernorm_fp8_bytes(out, RESIDUAL_LAYERNORM_FORWARD_BYTES(size.N, size.C), size);
    Scope scope = scope_open(ctx, "residual_layernorm_forward_fp8", RESIDUAL_LAYERNORM_FORWARD_FLOPS(size.N, size.C),
                             bytes, "N=%d C=%d", size.N, size.C);
    LayerNormForward a = layernorm_forward_args(out.y, stats, x, p, size, eps);
    a.r = branch.r, a.dropout = dropout_rows(branch.dropout);
    if (dropped) layernorm_fp8_launch<LAYERNORM_RESIDUAL_DROPOUT>(a, out, ctx);
    else layernorm_fp8_launch<LAYERNORM_RESIDUAL>(a, out, ctx);
    scope_close(&scope);
}

#endif
#endif
