/* matmul: the linear layer, with bias and GELU fused into the GEMMs.
 *
 *   forward          y   (SET or ADD)  = x w^T + b              x [N, IC], w [OC, IC], b [OC] or NULL, y [N, OC]
 *   gelu forward     pre = x w^T + b,  y = gelu(pre)            both are kept: the backward pass reads pre
 *   backward input   dx  (SET or ADD)  = dy w                   dy [N, OC], dx [N, IC]
 *   gelu backward    dpre = (dy w) * gelu'(pre)                 pre, dpre [N, IC]
 *                    dbias (SET or ADD) = column sums of dpre   [IC] or NULL: the gradient of the bias inside pre
 *   backward weight  dw  (SET or ADD)  = dy^T x,  db = column sums of dy
 *
 * All arrays are row-major floatX, except dw, db and dbias, which are real. N is the number of rows (tokens).
 *
 * Numerics on the CPU: GEMMs accumulate in `real` with fused multiply-adds over blocks of at most 256 terms. The
 * blocks' sums are added in order. db accumulates in double. The order depends on the shapes only.
 *
 * Files: CPU: ops/common/product.h. GPU: plan.cuh (plans and launches), descriptors.cuh, epilogue.cuh. */
#ifndef LLMC_OPS_MATMUL_MATMUL_H
#define LLMC_OPS_MATMUL_MATMUL_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/activation.h"
#ifndef __CUDACC__
#include "llmc/ops/common/product.h"
#endif

// The three GEMMs of a linear layer.
typedef enum { MATMUL_FORWARD, MATMUL_BACKWARD_INPUT, MATMUL_BACKWARD_WEIGHT, MATMUL_PASSES } MatmulPass;

typedef struct {
    int N, IC, OC;
} LinearSize;

// Every operand counts once, in its own type. ADD also reads the output. GELU adds its input, which the forward pass
// writes and the backward pass reads. Biases, their gradients and repeated reads are not counted.
#define MATMUL_FLOPS(N, IC, OC) (2.0 * (double)(N) * (double)(IC) * (double)(OC))
#define MATMUL_FORWARD_BYTES(N, IC, OC, mode)                                                                          \
    ((1.0 * (N) * (IC) + 1.0 * (OC) * (IC) + ((mode) == ADD ? 2.0 : 1.0) * (N) * (OC)) * sizeof(floatX))
#define MATMUL_GELU_FORWARD_BYTES(N, IC, OC) (MATMUL_FORWARD_BYTES(N, IC, OC, SET) + 1.0 * (N) * (OC) * sizeof(floatX))
#define MATMUL_BACKWARD_INPUT_BYTES(N, IC, OC, mode) MATMUL_FORWARD_BYTES(N, OC, IC, mode)
#define MATMUL_GELU_BACKWARD_INPUT_BYTES(N, IC, OC) MATMUL_GELU_FORWARD_BYTES(N, OC, IC)
#define MATMUL_BACKWARD_WEIGHT_BYTES(N, IC, OC, mode)                                                                  \
    (1.0 * (N) * ((IC) + (OC)) * sizeof(floatX) + ((mode) == ADD ? 2.0 : 1.0) * (OC) * (IC) * sizeof(real))

// The number of terms of each sum in a GEMM.
static inline int matmul_terms(MatmulPass pass, int N, int IC, int OC) {
    return pass == MATMUL_FORWARD ? IC : pass == MATMUL_BACKWARD_INPUT ? OC : N;
}

// Whether fp8 sums of so many terms use fast accumulation. In fp8, tensor cores keep about 13 bits of a sum. With fast
// accumulation this holds for the whole sum, else for parts of it, which are added in fp32. Sums over tokens or the
// vocabulary are too long for it (dev/results/fp8_products.md).
enum { MATMUL_FAST_TERMS = 8192 };
static inline int matmul_fp8_is_fast(int terms) { return terms <= MATMUL_FAST_TERMS; }

// ---------------------------------------------------------------------------------------------------------
// References

static inline void matmul_forward_ref(real* y, const real* x, const real* w, const real* b, int N, int IC, int OC,
                                      Mode mode) {
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) {
            size_t at = (size_t)n * (size_t)OC + (size_t)o;
            double sum = b ? b[o] : 0;
            for (int i = 0; i < IC; i++)
                sum += (double)x[(size_t)n * (size_t)IC + (size_t)i] * w[(size_t)o * (size_t)IC + (size_t)i];
            y[at] = (real)(mode == ADD ? y[at] + sum : sum);
        }
}

static inline void matmul_gelu_forward_ref(real* y, real* pre, const real* x, const real* w, const real* b, int N,
                                           int IC, int OC, Gelu kind) {
    matmul_forward_ref(pre, x, w, b, N, IC, OC, SET);
    for (size_t i = 0; i < (size_t)N * (size_t)OC; i++) y[i] = (real)gelu_exact(pre[i], kind);
}

static inline void matmul_backward_input_ref(real* dx, const real* dy, const real* w, int N, int IC, int OC,
                                             Mode mode) {
    for (int n = 0; n < N; n++)
        for (int i = 0; i < IC; i++) {
            size_t at = (size_t)n * (size_t)IC + (size_t)i;
            double sum = 0;
            for (int o = 0; o < OC; o++)
                sum += (double)dy[(size_t)n * (size_t)OC + (size_t)o] * w[(size_t)o * (size_t)IC + (size_t)i];
            dx[at] = (real)(mode == ADD ? dx[at] + sum : sum);
        }
}

// db [C] (SET or ADD) = the column sums of dy [N, C].
static inline void matmul_backward_bias_ref(real* db, const real* dy, int N, int C, Mode mode) {
    for (int c = 0; c < C; c++) {
        double sum = mode == ADD ? db[c] : 0;
        for (int n = 0; n < N; n++) sum += dy[(size_t)n * (size_t)C + (size_t)c];
        db[c] = (real)sum;
    }
}

static inline void matmul_gelu_backward_input_ref(real* dpre, const real* dy, const real* w, const real* pre, int N,
                                                  int IC, int OC, Gelu kind) {
    matmul_backward_input_ref(dpre, dy, w, N, IC, OC, SET);
    for (size_t i = 0; i < (size_t)N * (size_t)IC; i++) dpre[i] = (real)(dpre[i] * gelu_derivative_exact(pre[i], kind));
}

static inline void matmul_backward_weight_ref(real* dw, real* db, const real* dy, const real* x, int N, int IC, int OC,
                                              Mode mode) {
    for (int o = 0; o < OC; o++) {
        for (int i = 0; i < IC; i++) {
            size_t at = (size_t)o * (size_t)IC + (size_t)i;
            double sum = 0;
            for (int n = 0; n < N; n++)
                sum += (double)dy[(size_t)n * (size_t)OC + (size_t)o] * x[(size_t)n * (size_t)IC + (size_t)i];
            dw[at] = (real)(mode == ADD ? dw[at] + sum : sum);
        }
    }
    if (db) matmul_backward_bias_ref(db, dy, N, OC, mode);
}

#ifdef __CUDACC__
#include "llmc/ops/matmul/plan.cuh"
#else
// ---------------------------------------------------------------------------------------------------------
// CPU: every direction is one GEMM of ops/common/product.h

// Upper bound of the scratch of a launch for up to N rows: that of the GEMMs below at their largest block sizes.
static inline size_t matmul_scratch_bytes(int N, int IC, int OC) {
    int rows = min_int(OC, 96) + TILE_ROWS;
    size_t forward = product_scratch_bytes(N, IC, rows, min_int(N, 512) + TILE_COLS, 1);
    size_t input = product_scratch_bytes(IC, OC, min_int(N, 128) + TILE_ROWS, min_int(IC, 192) + TILE_COLS, 0);
    size_t weight = product_scratch_bytes(IC, N, rows, min_int(IC, 768) + TILE_COLS, 1);
    return max_size(forward, max_size(input, weight));
}

// Computes y = x w^T as y^T = w x^T. Only x, the smaller operand, is packed once for all tasks.
static inline Product matmul_product_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC) {
    Product r = {.M = OC, .N = N, .K = IC};
    r.c = y, r.c_row = 1, r.c_col = (size_t)OC;
    r.a = p.w, r.a_row = (size_t)IC, r.a_k = 1;
    r.b = x, r.b_k = 1, r.b_col = (size_t)IC;
    r.bias = p.b;
    r.block_rows = product_block(OC, 96, TILE_ROWS), r.block_cols = product_block(N, 512, TILE_COLS);
    r.tasks_share_b = 1;
    return r;
}

static inline Product matmul_product_backward_input(floatX* dx, const floatX* dy, const floatX* w, int N, int IC,
                                                    int OC) {
    Product r = {.M = N, .N = IC, .K = OC};
    r.c = dx, r.c_row = (size_t)IC, r.c_col = 1;
    r.a = dy, r.a_row = (size_t)OC, r.a_k = 1;
    r.b = w, r.b_k = (size_t)IC, r.b_col = 1;
    r.block_rows = product_block(N, 128, TILE_ROWS), r.block_cols = product_block(IC, 192, TILE_COLS);
    return r;
}

static inline Product matmul_product_backward_weight(real* dw, const floatX* dy, const floatX* x, int N, int IC,
                                                     int OC) {
    Product r = {.M = OC, .N = IC, .K = N};
    r.c = dw, r.c_row = (size_t)IC, r.c_col = 1;
    r.a = dy, r.a_row = 1, r.a_k = (size_t)OC;
    r.b = x, r.b_k = (size_t)IC, r.b_col = 1;
    r.block_rows = product_block(OC, 96, TILE_ROWS), r.block_cols = product_block(IC, 768, TILE_COLS);
    r.tasks_share_b = 1;
    return r;
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

// ---------------------------------------------------------------------------------------------------------
// Launchers

static inline void matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                  Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_forward", MATMUL_FLOPS(N, IC, OC), MATMUL_FORWARD_BYTES(N, IC, OC, mode),
                             "N=%d IC=%d OC=%d", N, IC, OC);
#ifdef __CUDACC__
    MatmulOperands o = {.a = p.w, .b = x, .d = y, .bias = p.b, .N = N};
    matmul_product(matmul_key(MATMUL_FORWARD, N, IC, OC, mode, ctx), &o, ctx);
#else
    Product r = matmul_product_forward(y, x, p, N, IC, OC);
    r.mode = mode;
    product_run(&r, ctx);
#endif
    scope_close(&scope);
}

static inline void matmul_gelu_forward(floatX* y, floatX* pre, const floatX* x, Linear p, int N, int IC, int OC,
                                       Gelu kind, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_gelu_forward", MATMUL_FLOPS(N, IC, OC), MATMUL_GELU_FORWARD_BYTES(N, IC, OC),
                             "N=%d IC=%d OC=%d", N, IC, OC);
#ifdef __CUDACC__
    MatmulOperands o = {.a = p.w, .b = x, .d = y, .bias = p.b, .aux = pre, .N = N};
    MatmulKey key = matmul_key(MATMUL_FORWARD, N, IC, OC, SET, ctx);
    if (!matmul_gelu_epilogue(key, &o, kind, ctx)) {
        o.d = pre, o.aux = NULL;
        matmul_product(key, &o, ctx);
        gelu_forward_start(y, pre, matmul_d_size(&key), kind, ctx);
    }
#else
    Product r = matmul_product_forward(pre, x, p, N, IC, OC);
    r.activated = y, r.kind = kind;
    product_run(&r, ctx);
#endif
    scope_close(&scope);
}

static inline void matmul_backward_input(floatX* dx, const floatX* dy, const floatX* w, int N, int IC, int OC,
                                         Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_backward_input", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_BACKWARD_INPUT_BYTES(N, IC, OC, mode), "N=%d IC=%d OC=%d", N, IC, OC);
#ifdef __CUDACC__
    MatmulOperands o = {.a = w, .b = dy, .d = dx, .N = N};
    matmul_product(matmul_key(MATMUL_BACKWARD_INPUT, N, IC, OC, mode, ctx), &o, ctx);
#else
    Product r = matmul_product_backward_input(dx, dy, w, N, IC, OC);
    r.mode = mode;
    product_run(&r, ctx);
#endif
    scope_close(&scope);
}

static inline void matmul_gelu_backward_input(floatX* dpre, BiasGrad d, const floatX* dy, const floatX* w,
                                              const floatX* pre, int N, int IC, int OC, Gelu kind, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_gelu_backward_input", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_GELU_BACKWARD_INPUT_BYTES(N, IC, OC), "N=%d IC=%d OC=%d", N, IC, OC);
#ifdef __CUDACC__
    MatmulOperands o = {.a = w, .b = dy, .d = dpre, .N = N};
    matmul_product(matmul_key(MATMUL_BACKWARD_INPUT, N, IC, OC, SET, ctx), &o, ctx);
    matmul_gelu_backward_bias(d, dpre, pre, N, IC, kind, ctx);
#else
    Product r = matmul_product_backward_input(dpre, dy, w, N, IC, OC);
    r.pre = pre, r.kind = kind;
    product_run(&r, ctx);
    matmul_backward_bias(d, dpre, N, IC, ctx);
#endif
    scope_close(&scope);
}

static inline void matmul_backward_weight(LinearGrads d, const floatX* dy, const floatX* x, int N, int IC, int OC,
                                          Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_backward_weight", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_BACKWARD_WEIGHT_BYTES(N, IC, OC, mode), "N=%d IC=%d OC=%d", N, IC, OC);
    BiasGrad bias = {.b = d.b, .mode = mode};
#ifdef __CUDACC__
    MatmulOperands o = {.a = x, .b = dy, .d = d.w, .N = N};
    matmul_product(matmul_key(MATMUL_BACKWARD_WEIGHT, N, IC, OC, mode, ctx), &o, ctx);
#else
    Product r = matmul_product_backward_weight(d.w, dy, x, N, IC, OC);
    r.mode = mode;
    product_run(&r, ctx);
#endif
    if (d.b) matmul_backward_bias(bias, dy, N, OC, ctx);
    scope_close(&scope);
}

#endif
