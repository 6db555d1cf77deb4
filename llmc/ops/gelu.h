/* GELU: the elementwise activation of a block's MLP.
 *
 *   forward    y = gelu(x)
 *   backward   dx (SET or ADD) = dy * gelu'(x)
 *
 *   x, y, dx, dy: floatX [n]; kind: GELU_TANH or GELU_ERF (formulas in ops/common/activation.h)
 *
 * In-place operation is allowed (y == x, dx == dy). In float the absolute error is below 3e-7 max(1, |y|).
 * The trainers fuse GELU into the adjacent matmuls where possible, and use this op otherwise.
 * Source: Hendrycks and Gimpel, "Gaussian error linear units", arXiv 1606.08415. */
#ifndef LLMC_OPS_GELU_H
#define LLMC_OPS_GELU_H

#include "llmc/device/cuda_utils.cuh"
#include "llmc/device/scope.h"
#include "llmc/ops/common/activation.h"

// GELU's form and its input [N, C]: an output of the forward pass.
typedef struct {
    floatX* pre;
    Gelu kind;
} GeluInput;

#define GELU_FORWARD_FLOPS(n) (25.0 * (double)(n))  // the tanh form as implemented here; a division counts as one flop
#define GELU_BACKWARD_FLOPS(n) (33.0 * (double)(n))
#define GELU_FORWARD_BYTES(n) (2.0 * (double)(n) * sizeof(floatX))
#define GELU_BACKWARD_BYTES(n, mode) (((mode) == ADD ? 4.0 : 3.0) * (double)(n) * sizeof(floatX))

static inline void gelu_forward_ref(real* y, const real* x, size_t n, Gelu kind) {
    for (size_t i = 0; i < n; i++) y[i] = (real)gelu_exact(x[i], kind);
}

static inline void gelu_backward_ref(real* dx, const real* dy, const real* x, size_t n, Gelu kind, Mode mode) {
    for (size_t i = 0; i < n; i++) {
        double d = dy[i] * gelu_derivative_exact(x[i], kind);
        dx[i] = (real)(mode == ADD ? dx[i] + d : d);
    }
}

#ifndef __CUDACC__

// The number of elements per block of work. The loops below are inlined with constant `kind` and `mode`.
#define GELU_BLOCK 8192

static inline void gelu_forward_span(floatX* y, const floatX* x, size_t n, Gelu kind) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) y[i] = gelu_value(x[i], kind);
}

static inline void gelu_backward_span(floatX* dx, const floatX* dy, const floatX* x, size_t n, Gelu kind, Mode mode) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        real d = dy[i] * gelu_derivative(x[i], kind);
        dx[i] = mode == ADD ? dx[i] + d : d;
    }
}

#endif

static inline void gelu_forward(floatX* y, const floatX* x, size_t n, Gelu kind, Context* ctx) {
    Scope scope = scope_open(ctx, "gelu_forward", GELU_FORWARD_FLOPS(n), GELU_FORWARD_BYTES(n), "n=%zu", n);
#ifdef __CUDACC__
    gelu_forward_start(y, x, n, kind, ctx);
#else
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += GELU_BLOCK) {
        size_t count = min_size(n - i, GELU_BLOCK);
        if (kind == GELU_ERF) gelu_forward_span(y + i, x + i, count, GELU_ERF);
        if (kind == GELU_TANH) gelu_forward_span(y + i, x + i, count, GELU_TANH);
    }
#endif
    scope_close(&scope);
}

static inline void gelu_backward(floatX* dx, const floatX* dy, const floatX* x, size_t n, Gelu kind, Mode mode,
                                 Context* ctx) {
    Scope scope = scope_open(ctx, "gelu_backward", GELU_BACKWARD_FLOPS(n), GELU_BACKWARD_BYTES(n, mode), "n=%zu", n);
#ifdef __CUDACC__
    if (mode == SET) gelu_backward_start<SET>(dx, dy, x, n, kind, ctx);
    else gelu_backward_start<ADD>(dx, dy, x, n, kind, ctx);
#else
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += GELU_BLOCK) {
        size_t count = min_size(n - i, GELU_BLOCK);
        if (kind == GELU_ERF && mode == SET) gelu_backward_span(dx + i, dy + i, x + i, count, GELU_ERF, SET);
        if (kind == GELU_ERF && mode == ADD) gelu_backward_span(dx + i, dy + i, x + i, count, GELU_ERF, ADD);
        if (kind == GELU_TANH && mode == SET) gelu_backward_span(dx + i, dy + i, x + i, count, GELU_TANH, SET);
        if (kind == GELU_TANH && mode == ADD) gelu_backward_span(dx + i, dy + i, x + i, count, GELU_TANH, ADD);
    }
#endif
    scope_close(&scope);
}

#endif
