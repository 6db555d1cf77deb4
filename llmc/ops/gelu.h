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

#ifdef __CUDACC__

enum { GELU_THREADS = 256 };

// One thread per 16 bytes of y. The last thread computes the remainder.
template <Gelu KIND> __global__ void gelu_forward_kernel(floatX* y, const floatX* x, size_t n) {
    constexpr int W = Vector<floatX>::SIZE;
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i + W <= n) {
        float v[W];
        to_floats(v, load128(x + i));
#pragma unroll
        for (int k = 0; k < W; k++) v[k] = gelu_value(v[k], KIND);
        store128(y + i, from_floats<floatX>(v));
    } else {
        for (; i < n; i++) y[i] = from_float<floatX>(gelu_value(to_float(x[i]), KIND));
    }
}

// One thread per 16 bytes of dx. The last thread computes the remainder.
template <Gelu KIND, Mode MODE>
__global__ void gelu_backward_kernel(floatX* dx, const floatX* dy, const floatX* x, size_t n) {
    constexpr int W = Vector<floatX>::SIZE;
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i + W <= n) {
        float v[W], d[W], sum[W];
        Vector<floatX> old = {};
        if (MODE == ADD) old = load128(dx + i);
        to_floats(v, load128(x + i));
        to_floats(d, load128(dy + i));
        to_floats(sum, old);
#pragma unroll
        for (int k = 0; k < W; k++) {
            d[k] *= gelu_derivative(v[k], KIND);
            if (MODE == ADD) d[k] += sum[k];
        }
        store128(dx + i, from_floats<floatX>(d));
    } else {
        for (; i < n; i++) {
            float d = to_float(dy[i]) * gelu_derivative(to_float(x[i]), KIND);
            dx[i] = from_float<floatX>(MODE == ADD ? to_float(dx[i]) + d : d);
        }
    }
}

static inline unsigned gelu_blocks(size_t n) { return blocks_for(n, (size_t)GELU_THREADS * Vector<floatX>::SIZE); }

static inline void gelu_forward(floatX* y, const floatX* x, size_t n, Gelu kind, Context* ctx) {
    Scope scope = scope_open(ctx, "gelu_forward", GELU_FORWARD_FLOPS(n), GELU_FORWARD_BYTES(n), "n=%zu", n);
    if (kind == GELU_ERF) gelu_forward_kernel<GELU_ERF><<<gelu_blocks(n), GELU_THREADS, 0, ctx->stream>>>(y, x, n);
    else gelu_forward_kernel<GELU_TANH><<<gelu_blocks(n), GELU_THREADS, 0, ctx->stream>>>(y, x, n);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

template <Gelu KIND>
static inline void gelu_backward_start(floatX* dx, const floatX* dy, const floatX* x, size_t n, Mode mode,
                                       Context* ctx) {
    if (mode == SET) gelu_backward_kernel<KIND, SET><<<gelu_blocks(n), GELU_THREADS, 0, ctx->stream>>>(dx, dy, x, n);
    else gelu_backward_kernel<KIND, ADD><<<gelu_blocks(n), GELU_THREADS, 0, ctx->stream>>>(dx, dy, x, n);
    cudaCheck(cudaGetLastError());
}

static inline void gelu_backward(floatX* dx, const floatX* dy, const floatX* x, size_t n, Gelu kind, Mode mode,
                                 Context* ctx) {
    Scope scope = scope_open(ctx, "gelu_backward", GELU_BACKWARD_FLOPS(n), GELU_BACKWARD_BYTES(n, mode), "n=%zu", n);
    if (kind == GELU_ERF) gelu_backward_start<GELU_ERF>(dx, dy, x, n, mode, ctx);
    else gelu_backward_start<GELU_TANH>(dx, dy, x, n, mode, ctx);
    scope_close(&scope);
}

#else

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

static inline void gelu_forward(floatX* y, const floatX* x, size_t n, Gelu kind, Context* ctx) {
    Scope scope = scope_open(ctx, "gelu_forward", GELU_FORWARD_FLOPS(n), GELU_FORWARD_BYTES(n), "n=%zu", n);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += GELU_BLOCK) {
        size_t count = min_size(n - i, GELU_BLOCK);
        if (kind == GELU_ERF) gelu_forward_span(y + i, x + i, count, GELU_ERF);
        if (kind == GELU_TANH) gelu_forward_span(y + i, x + i, count, GELU_TANH);
    }
    scope_close(&scope);
}

static inline void gelu_backward(floatX* dx, const floatX* dy, const floatX* x, size_t n, Gelu kind, Mode mode,
                                 Context* ctx) {
    Scope scope = scope_open(ctx, "gelu_backward", GELU_BACKWARD_FLOPS(n), GELU_BACKWARD_BYTES(n, mode), "n=%zu", n);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += GELU_BLOCK) {
        size_t count = min_size(n - i, GELU_BLOCK);
        if (kind == GELU_ERF && mode == SET) gelu_backward_span(dx + i, dy + i, x + i, count, GELU_ERF, SET);
        if (kind == GELU_ERF && mode == ADD) gelu_backward_span(dx + i, dy + i, x + i, count, GELU_ERF, ADD);
        if (kind == GELU_TANH && mode == SET) gelu_backward_span(dx + i, dy + i, x + i, count, GELU_TANH, SET);
        if (kind == GELU_TANH && mode == ADD) gelu_backward_span(dx + i, dy + i, x + i, count, GELU_TANH, ADD);
    }
    scope_close(&scope);
}

#endif
#endif
