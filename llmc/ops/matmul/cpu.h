/* matmul.h on the CPU: every direction is one GEMM of ops/common/product.h. */
#ifndef LLMC_OPS_MATMUL_CPU_H
#define LLMC_OPS_MATMUL_CPU_H

#include "llmc/ops/common/product.h"
#include "llmc/ops/matmul/matmul.h"

#ifndef __CUDACC__

// Upper bound of the scratch of a launch for up to N rows: that of the GEMMs below at their largest block sizes.
static inline size_t matmul_scratch_bytes(int N, int IC, int OC) {
    int rows = min_int(OC, 96) + TILE_ROWS;
    size_t forward = product_scratch_bytes(N, IC, rows, min_int(N, 512) + TILE_COLS, 1);
    size_t input = product_scratch_bytes(IC, OC, min_int(N, 128) + TILE_ROWS, min_int(IC, 192) + TILE_COLS, 0);
    size_t weight = product_scratch_bytes(IC, N, rows, min_int(IC, 768) + TILE_COLS, 1);
    return max_size(forward, max_size(input, weight));
}

// Computes y = x w^T as y^T = w x^T. Only x, the smaller operand, is packed once for all tasks.
static inline Product product_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC) {
    Product r;
    memset(&r, 0, sizeof r);
    r.M = OC, r.N = N, r.K = IC;
    r.c = y, r.c_row = 1, r.c_col = (size_t)OC;
    r.a = p.w, r.a_row = (size_t)IC, r.a_k = 1;
    r.b = x, r.b_k = 1, r.b_col = (size_t)IC;
    r.bias = p.b;
    r.block_rows = product_block(OC, 96, TILE_ROWS), r.block_cols = product_block(N, 512, TILE_COLS);
    r.tasks_share_b = 1;
    return r;
}

static inline Product product_backward_input(floatX* dx, const floatX* dy, const floatX* w, int N, int IC, int OC) {
    Product r;
    memset(&r, 0, sizeof r);
    r.M = N, r.N = IC, r.K = OC;
    r.c = dx, r.c_row = (size_t)IC, r.c_col = 1;
    r.a = dy, r.a_row = (size_t)OC, r.a_k = 1;
    r.b = w, r.b_k = (size_t)IC, r.b_col = 1;
    r.block_rows = product_block(N, 128, TILE_ROWS), r.block_cols = product_block(IC, 192, TILE_COLS);
    return r;
}

static inline Product product_backward_weight(real* dw, const floatX* dy, const floatX* x, int N, int IC, int OC) {
    Product r;
    memset(&r, 0, sizeof r);
    r.M = OC, r.N = IC, r.K = N;
    r.c = dw, r.c_row = (size_t)IC, r.c_col = 1;
    r.a = dy, r.a_row = 1, r.a_k = (size_t)OC;
    r.b = x, r.b_k = (size_t)IC, r.b_col = 1;
    r.block_rows = product_block(OC, 96, TILE_ROWS), r.block_cols = product_block(IC, 768, TILE_COLS);
    r.tasks_share_b = 1;
    return r;
}

static inline void matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                  Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_forward", MATMUL_FLOPS(N, IC, OC), MATMUL_FORWARD_BYTES(N, IC, OC, mode),
                             "N=%d IC=%d OC=%d", N, IC, OC);
    Product r = product_forward(y, x, p, N, IC, OC);
    r.mode = mode;
    product_run(&r, ctx);
    scope_close(&scope);
}

static inline void matmul_gelu_forward(floatX* y, floatX* pre, const floatX* x, Linear p, int N, int IC, int OC,
                                       Gelu kind, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_gelu_forward", MATMUL_FLOPS(N, IC, OC), MATMUL_GELU_FORWARD_BYTES(N, IC, OC),
                             "N=%d IC=%d OC=%d", N, IC, OC);
    Product r = product_forward(pre, x, p, N, IC, OC);
    r.activated = y;
    r.kind = kind;
    product_run(&r, ctx);
    scope_close(&scope);
}

static inline void matmul_backward_input(floatX* dx, const floatX* dy, const floatX* w, int N, int IC, int OC,
                                         Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_backward_input", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_BACKWARD_INPUT_BYTES(N, IC, OC, mode), "N=%d IC=%d OC=%d", N, IC, OC);
    Product r = product_backward_input(dx, dy, w, N, IC, OC);
    r.mode = mode;
    product_run(&r, ctx);
    scope_close(&scope);
}

// d.b [OC] (SET or ADD) = the column sums of dy [N, OC].
static inline void matmul_backward_bias(BiasGrad d, const floatX* dy, int N, int OC, Context* ctx) {
    enum { COLUMNS = 256 };
    (void)ctx;
    if (!d.b) return;
#pragma omp parallel for schedule(static)
    for (int o = 0; o < OC; o += COLUMNS) {
        double sum[COLUMNS] = {0};
        int count = min_int(COLUMNS, OC - o);
        for (int n = 0; n < N; n++)
            for (int j = 0; j < count; j++) sum[j] += (double)dy[(size_t)n * (size_t)OC + (size_t)(o + j)];
        for (int j = 0; j < count; j++) d.b[o + j] = (real)(d.mode == ADD ? d.b[o + j] + sum[j] : sum[j]);
    }
}

// dpre [N, OC] holds dy w and becomes (dy w) * gelu'(pre). d.b, if not NULL, gets the column sums of dpre.
static inline void matmul_gelu_backward_bias(BiasGrad d, floatX* dpre, const floatX* pre, int N, int OC, Gelu kind,
                                             Context* ctx) {
    size_t n = (size_t)N * (size_t)OC;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) dpre[i] *= gelu_derivative(pre[i], kind);
    matmul_backward_bias(d, dpre, N, OC, ctx);
}

static inline void matmul_gelu_backward_input(floatX* dpre, BiasGrad d, const floatX* dy, const floatX* w,
                                              const floatX* pre, int N, int IC, int OC, Gelu kind, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_gelu_backward_input", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_GELU_BACKWARD_INPUT_BYTES(N, IC, OC), "N=%d IC=%d OC=%d", N, IC, OC);
    Product r = product_backward_input(dpre, dy, w, N, IC, OC);
    r.pre = pre;
    r.kind = kind;
    product_run(&r, ctx);
    matmul_backward_bias(d, dpre, N, IC, ctx);
    scope_close(&scope);
}

static inline void matmul_backward_weight(LinearGrads d, const floatX* dy, const floatX* x, int N, int IC, int OC,
                                          Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_backward_weight", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_BACKWARD_WEIGHT_BYTES(N, IC, OC, mode), "N=%d IC=%d OC=%d", N, IC, OC);
    Product r = product_backward_weight(d.w, dy, x, N, IC, OC);
    r.mode = mode;
    product_run(&r, ctx);
    BiasGrad bias = {.b = d.b, .mode = mode};
    matmul_backward_bias(bias, dy, N, OC, ctx);
    scope_close(&scope);
}

// On the GPU matmul keeps its plans in the context. The CPU has no plans.
static inline void matmul_plans_free(Context* ctx) { (void)ctx; }
static inline void matmul_plans_text(Context* ctx, Text* t) { (void)ctx, (void)t; }
static inline void matmul_plans_load(Context* ctx, const char* text) {
    (void)ctx;
    if (*text)
        warn("the checkpoint is of a GPU: its matmul algorithms are not used, and the run will not continue bit for "
             "bit");
}

#endif
#endif
