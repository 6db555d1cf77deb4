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
 * Files: cpu.h and ops/common/product.h for the CPU; cublaslt.cuh for the GPU, with its numerics. */
#ifndef LLMC_OPS_MATMUL_MATMUL_H
#define LLMC_OPS_MATMUL_MATMUL_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/activation.h"

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
#include "llmc/ops/matmul/cublaslt.cuh"
#else
#include "llmc/ops/matmul/cpu.h"
#endif

#endif
