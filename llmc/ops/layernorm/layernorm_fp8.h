/* layernorm_fp8: layernorm.h's passes that also round the operand of the next matmul to fp8, on the GPU. They save what
 * quantize.h would read and write again.
 *
 *   forward            out.fp8  y in E4M3 (Fp8Target); r, mean and rstd: see layernorm.h
 *                      out.y    [N, C] floatX, its rows as `rows` says; the others are not written
 *   residual backward  fp8      dbranch in E5M2 (Fp8Target, with yt); dx, d and dbias: see layernorm.h. dbranch itself
 *                               is not written.
 *
 * The bytes are those of quantize(): y or dbranch is rounded to floatX, then scaled and rounded to fp8. All outputs have
 * the same bits as without fp8, but for d and dbias, which are added up in another order.
 *
 * shapes     C is a multiple of 16, at most 1792 (forward) or 2048 (backward); all pointers are aligned to 16 bytes.
 *            layernorm_fp8_takes() and layernorm_backward_fp8_takes(): whether this GPU has the shared memory.
 * bytes      forward N C (3 sizeof(floatX) + 2) with a residual and yt, plus the rows of y that are written;
 *            backward N C (4 sizeof(floatX) + 2) with dx ADD, one sizeof(floatX) less with SET
 * builds     only in bf16: the functions that tell what is taken return 0 in others
 * the CPU    has no such kernels: model/linear.h calls layernorm and quantize(). */
#ifndef LLMC_OPS_LAYERNORM_LAYERNORM_FP8_H
#define LLMC_OPS_LAYERNORM_LAYERNORM_FP8_H

#include "llmc/ops/common/fp8.h"
#include "llmc/ops/layernorm/layernorm.h"

// The rows of y that are written: all, or those that mean_bias reads.
typedef enum { LAYERNORM_ALL_ROWS, LAYERNORM_MEAN_ROWS } LayerNormRows;

typedef struct {
    floatX* y;
    LayerNormRows rows;
    Fp8Target fp8;
} LayerNormFp8;

#ifdef __CUDACC__

// Less than layernorm moves: some rows of y, and y8 and yt instead of y.
static inline double layernorm_fp8_bytes(LayerNormFp8 out, double layernorm_bytes, Rows size) {
    double rows = out.rows == LAYERNORM_ALL_ROWS ? size.N : mean_bias_rows(size.N);
    double saved = ((double)size.N - rows) * size.C * sizeof(floatX);
    return layernorm_bytes - saved + (out.fp8.yt ? 2.0 : 1.0) * size.N * size.C;
}

#include "llmc/ops/layernorm/forward_fp8.cuh"

static inline void layernorm_fp8_check(LayerNormFp8 out, const floatX* x, Rows size, const Context* ctx) {
    CHECK(size.N > 0 && layernorm_fp8_takes(size.C, ctx));
    CHECK(((uintptr_t)x | (uintptr_t)out.y | (uintptr_t)out.fp8.y | (uintptr_t)out.fp8.yt) % 16 == 0);
}

COMPILED_IF_CALLED static inline void layernorm_forward_fp8(LayerNormFp8 out, LayerNormStats stats, const floatX* x,
                                                            LayerNorm p, Rows size, real eps, Context* ctx) {
    layernorm_fp8_check(out, x, size, ctx);
    double bytes = layernorm_fp8_bytes(out, LAYERNORM_FORWARD_BYTES(size.N, size.C), size);
    Scope scope = scope_open(ctx, "layernorm_forward_fp8", LAYERNORM_FORWARD_FLOPS(size.N, size.C), bytes, "N=%d C=%d",
                             size.N, size.C);
    layernorm_fp8_choose<LAYERNORM_ALONE>(layernorm_forward_args(out.y, stats, x, p, size, eps), out, ctx);
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
    if (dropped) layernorm_fp8_choose<LAYERNORM_RESIDUAL_DROPOUT>(a, out, ctx);
    else layernorm_fp8_choose<LAYERNORM_RESIDUAL>(a, out, ctx);
    scope_close(&scope);
}

COMPILED_IF_CALLED static inline void residual_layernorm_backward_fp8(Fp8Target fp8, ResidualGrad r, LayerNormGrads d,
                                                                      LayerNormInputs in, Mode dx_mode, Mode d_mode,
                                                                      Context* ctx) {
    Rows size = in.size;
    int dropped = r.dropout.threshold != 0, add = dx_mode == ADD;
    CHECK(size.N > 0 && r.dbias && fp8.yt && layernorm_backward_fp8_takes(size.C, ctx));
    CHECK(!dropped || r.dropout.sequences->rows == size.N);
    double bytes = RESIDUAL_LAYERNORM_BACKWARD_BYTES(size.N, size.C, dx_mode, 0) + 2.0 * size.N * size.C;
    Scope scope =
        scope_open(ctx, "residual_layernorm_backward_fp8", RESIDUAL_LAYERNORM_BACKWARD_FLOPS(size.N, size.C, dropped),
                   bytes, "N=%d C=%d", size.N, size.C);
    LayerNormTargets to = {.r = r, .d = {.w = d.w, .b = d.b}, .output = dropout_none(NULL)};
    LayerNormBackward a = layernorm_backward_args(to, in, d_mode);
    a.fp8 = fp8;
    if (dropped && add) layernorm_backward_fp8_choose<LAYERNORM_BACKWARD_RESIDUAL_DROPOUT, ADD>(a, ctx);
    else if (dropped) layernorm_backward_fp8_choose<LAYERNORM_BACKWARD_RESIDUAL_DROPOUT, SET>(a, ctx);
    else if (add) layernorm_backward_fp8_choose<LAYERNORM_BACKWARD_RESIDUAL, ADD>(a, ctx);
    else layernorm_backward_fp8_choose<LAYERNORM_BACKWARD_RESIDUAL, SET>(a, ctx);
    scope_close(&scope);
}

#endif
#endif
