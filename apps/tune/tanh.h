/* tanh: the elementwise activation of the pooler.
 *
 *   forward    y = tanh(x)                   y may be x
 *   backward   dx = dy * (1 - y^2)           dx may be dy; computed from y, so x need not be kept
 *
 *   x, y, dx, dy: floatX [n]
 *
 * Numerics: one rounding to floatX. In float the relative error of the forward pass is below 1e-6, and 1 - y^2 has the
 * absolute error of the stored y.
 * Source: the definition. */
#ifndef APPS_TUNE_TANH_H
#define APPS_TUNE_TANH_H

#include "llmc/device/cuda_utils.cuh"
#include "llmc/device/scope.h"
#include "llmc/ops/common/vector_math.h"

#define TANH_FORWARD_FLOPS(n) (20.0 * (double)(n))
#define TANH_BACKWARD_FLOPS(n) (3.0 * (double)(n))
#define TANH_FORWARD_BYTES(n) (2.0 * (double)(n) * sizeof(floatX))
#define TANH_BACKWARD_BYTES(n) (3.0 * (double)(n) * sizeof(floatX))

// References, which the CPU runs too: these tensors are small
static inline void tanh_forward_ref(real* y, const real* x, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = (real)tanh((double)x[i]);
}

static inline void tanh_backward_ref(real* dx, const real* dy, const real* y, size_t n) {
    for (size_t i = 0; i < n; i++) dx[i] = (real)((double)dy[i] * (1 - (double)y[i] * (double)y[i]));
}

#ifdef __CUDACC__

enum { TANH_THREADS = 256 };

// One element per thread, because these tensors are small.
__global__ static void tanh_forward_kernel(floatX* y, const floatX* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = from_float<floatX>(real_tanh(to_float(x[i])));
}

__global__ static void tanh_backward_kernel(floatX* dx, const floatX* dy, const floatX* y, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float t = to_float(y[i]);
    dx[i] = from_float<floatX>(to_float(dy[i]) * (1 - t * t));
}

#endif

static inline void tanh_forward(floatX* y, const floatX* x, size_t n, Context* ctx) {
    Scope scope = scope_open(ctx, "tanh_forward", TANH_FORWARD_FLOPS(n), TANH_FORWARD_BYTES(n), "n=%zu", n);
#ifdef __CUDACC__
    tanh_forward_kernel<<<blocks_for(n, TANH_THREADS), TANH_THREADS, 0, ctx->stream>>>(y, x, n);
    cudaCheck(cudaGetLastError());
#else
    tanh_forward_ref(y, x, n);
#endif
    scope_close(&scope);
}

static inline void tanh_backward(floatX* dx, const floatX* dy, const floatX* y, size_t n, Context* ctx) {
    Scope scope = scope_open(ctx, "tanh_backward", TANH_BACKWARD_FLOPS(n), TANH_BACKWARD_BYTES(n), "n=%zu", n);
#ifdef __CUDACC__
    tanh_backward_kernel<<<blocks_for(n, TANH_THREADS), TANH_THREADS, 0, ctx->stream>>>(dx, dy, y, n);
    cudaCheck(cudaGetLastError());
#else
    tanh_backward_ref(dx, dy, y, n);
#endif
    scope_close(&scope);
}

#endif
