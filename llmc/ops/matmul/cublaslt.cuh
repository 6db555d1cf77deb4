/* matmul on the GPU: cuBLASLt, with bias, the forward pass's GELU and ADD in its epilogue.
 *
 * A row-major [R, C] array is a column-major C x R matrix, so no operand is ever transposed in memory:
 *
 *   forward          y  (OC x N)  = w^T x      bias, and GELU with its input stored, in the epilogue
 *   backward input   dx (IC x N)  = w dy       times gelu'(pre) by the kernel that sums dbias
 *   backward weight  dw (IC x OC) = x dy^T     dw in full precision; db by a kernel of epilogue.cuh
 *
 * Numerics: GEMMs of floatX accumulate in fp32. fp32 inputs use TF32 only with ctx->tf32. Split-K adds its parts in
 * fp32 before rounding. GELU in the epilogue is the tanh form and reads the sum before it is rounded. GELU_ERF, fp32
 * and unaligned shapes use our own kernel after the GEMM. The epilogues that sum bias gradients are not used: they
 * measured four times slower than our kernels. GELU's derivative in the epilogue gained less than 0.1 % of a step. */
#ifndef LLMC_OPS_MATMUL_CUBLASLT_CUH
#define LLMC_OPS_MATMUL_CUBLASLT_CUH

#include "llmc/ops/matmul/matmul.h"
#ifdef __CUDACC__
#include "llmc/ops/matmul/plan.cuh"

static inline MatmulKey matmul_key(int kind, int N, int IC, int OC, Mode mode, Context* ctx) {
    MatmulKey key = {.kind = kind,
                     .N = N,
                     .IC = IC,
                     .OC = OC,
                     .mode = mode,
                     .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
                     .tf32 = ctx->tf32};
    return key;
}

static inline void matmul_run(MatmulPlan* plan, const MatmulOperands* o, Context* ctx) {
    matmul_point(plan, o);
    cublasStatus_t status = matmul_launch(plan, &plan->algorithm, o, o->d, ctx);
    if (status != CUBLAS_STATUS_SUCCESS && o->N != plan->key.N) {  // does not support every N of the range
        cublasLtMatmulHeuristicResult_t result;
        if (matmul_propose(plan, &result, 1, ctx)) status = matmul_launch(plan, &result.algo, o, o->d, ctx);
    }
    matmul_check(status, plan, "cublasLtMatmul");
}

static inline void matmul_product(MatmulKey key, const MatmulOperands* o, Context* ctx) {
    key.epilogue = o->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    MatmulPlan* plan = matmul_plan(key, o, ctx);
    if (!plan->usable && o->bias) {
        MatmulOperands plain = *o;
        plain.bias = NULL;
        matmul_product(key, &plain, ctx);
        matmul_add_bias((floatX*)o->d, o->bias, key.N, key.OC, ctx);
        return;
    }
    if (!plan->usable) matmul_check(CUBLAS_STATUS_NOT_SUPPORTED, plan, "no algorithm");
    matmul_run(plan, o, ctx);
}

// Run the forward GEMM with GELU in cuBLASLt's epilogue, if that is possible. Returns whether it did. If not, nothing
// was done.
static inline int matmul_gelu_epilogue(MatmulKey key, const MatmulOperands* o, Gelu gelu, Context* ctx) {
    int aligned = matmul_d_rows(&key) % 8 == 0 && pointer_alignment(o->aux) >= 16;
    if (!ctx->gelu_fusion || sizeof(floatX) != 2 || gelu != GELU_TANH || !aligned) return 0;
    key.epilogue = o->bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    MatmulPlan* plan = matmul_plan(key, o, ctx);
    if (plan->usable) matmul_run(plan, o, ctx);
    return plan->usable;
}

static inline void matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                  Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_forward", MATMUL_FLOPS(N, IC, OC), MATMUL_FORWARD_BYTES(N, IC, OC, mode),
                             "N=%d IC=%d OC=%d", N, IC, OC);
    MatmulOperands o = {.a = p.w, .b = x, .d = y, .bias = p.b, .N = N};
    matmul_product(matmul_key(MATMUL_FORWARD, N, IC, OC, mode, ctx), &o, ctx);
    scope_close(&scope);
}

static inline void matmul_gelu_forward(floatX* y, floatX* pre, const floatX* x, Linear p, int N, int IC, int OC,
                                       Gelu kind, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_gelu_forward", MATMUL_FLOPS(N, IC, OC), MATMUL_GELU_FORWARD_BYTES(N, IC, OC),
                             "N=%d IC=%d OC=%d", N, IC, OC);
    MatmulOperands o = {.a = p.w, .b = x, .d = y, .bias = p.b, .aux = pre, .N = N};
    MatmulKey key = matmul_key(MATMUL_FORWARD, N, IC, OC, SET, ctx);
    if (!matmul_gelu_epilogue(key, &o, kind, ctx)) {
        o.d = pre, o.aux = NULL;
        matmul_product(key, &o, ctx);
        gelu_forward_start(y, pre, matmul_d_size(&key), kind, ctx);
    }
    scope_close(&scope);
}

static inline void matmul_backward_input(floatX* dx, const floatX* dy, const floatX* w, int N, int IC, int OC,
                                         Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_backward_input", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_BACKWARD_INPUT_BYTES(N, IC, OC, mode), "N=%d IC=%d OC=%d", N, IC, OC);
    MatmulOperands o = {.a = w, .b = dy, .d = dx, .N = N};
    matmul_product(matmul_key(MATMUL_BACKWARD_INPUT, N, IC, OC, mode, ctx), &o, ctx);
    scope_close(&scope);
}

static inline void matmul_gelu_backward_input(floatX* dpre, BiasGrad d, const floatX* dy, const floatX* w,
                                              const floatX* pre, int N, int IC, int OC, Gelu kind, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_gelu_backward_input", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_GELU_BACKWARD_INPUT_BYTES(N, IC, OC), "N=%d IC=%d OC=%d", N, IC, OC);
    MatmulOperands o = {.a = w, .b = dy, .d = dpre, .N = N};
    matmul_product(matmul_key(MATMUL_BACKWARD_INPUT, N, IC, OC, SET, ctx), &o, ctx);
    matmul_gelu_backward_bias(d, dpre, pre, N, IC, kind, ctx);
    scope_close(&scope);
}

static inline void matmul_backward_weight(LinearGrads d, const floatX* dy, const floatX* x, int N, int IC, int OC,
                                          Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_backward_weight", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_BACKWARD_WEIGHT_BYTES(N, IC, OC, mode), "N=%d IC=%d OC=%d", N, IC, OC);
    MatmulOperands o = {.a = x, .b = dy, .d = d.w, .N = N};
    matmul_product(matmul_key(MATMUL_BACKWARD_WEIGHT, N, IC, OC, mode, ctx), &o, ctx);
    BiasGrad bias = {.b = d.b, .mode = mode};
    if (d.b) matmul_backward_bias(bias, dy, N, OC, ctx);
    scope_close(&scope);
}

#endif
#endif
