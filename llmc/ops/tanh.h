/* tanh: the activation of a pooler, elementwise.
 *
 *   forward    y = tanh(x)                                   y may be x
 *   backward   dx (SET or ADD) = dy * (1 - y * y)            dx may be dy; from the output, so x need not be kept
 *
 *   x, y, dx, dy: floatX [n]. In float the relative error of y is below 3e-7. */
#ifndef LLMC_TANH_H
#define LLMC_TANH_H

#include "../device/device.cuh"
#include "../device/scope.h"
#include "../device/vector_math.h"

#define TANH_FORWARD_FLOPS(n) (20.0 * (double)(n))
#define TANH_BACKWARD_FLOPS(n) (4.0 * (double)(n))
#define TANH_FORWARD_BYTES(n) (2.0 * (double)(n) * sizeof(floatX))
#define TANH_BACKWARD_BYTES(n, mode) (((mode) == ADD ? 4.0 : 3.0) * (double)(n) * sizeof(floatX))

static inline void tanh_forward_ref(real* y, const real* x, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = (real)tanh((double)x[i]);
}

static inline void tanh_backward_ref(real* dx, const real* dy, const real* y, size_t n, Mode mode) {
    for (size_t i = 0; i < n; i++) {
        double d = dy[i] * (1 - (double)y[i] * y[i]);
        dx[i] = (real)(mode == ADD ? dx[i] + d : d);
    }
}

#ifdef __CUDACC__

enum { TANH_THREADS = 256 };

// One thread for an element: a pooler's are few.
static __global__ void tanh_forward_kernel(floatX* y, const floatX* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = from_float<floatX>(real_tanh(to_float(x[i])));
}

template <Mode MODE> __global__ void tanh_backward_kernel(floatX* dx, const floatX* dy, const floatX* y, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float t = to_float(y[i]), d = to_float(dy[i]) * (1 - t * t);
    dx[i] = from_float<floatX>(MODE == ADD ? to_float(dx[i]) + d : d);
}

static inline void tanh_forward(floatX* y, const floatX* x, size_t n, Context* ctx) {
    Scope scope = scope_open(ctx, "tanh_forward", TANH_FORWARD_FLOPS(n), TANH_FORWARD_BYTES(n), "n=%zu", n);
    tanh_forward_kernel<<<blocks_for(n, TANH_THREADS), TANH_THREADS, 0, ctx->stream>>>(y, x, n);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

static inline void tanh_backward(floatX* dx, const floatX* dy, const floatX* y, size_t n, Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "tanh_backward", TANH_BACKWARD_FLOPS(n), TANH_BACKWARD_BYTES(n, mode), "n=%zu", n);
    unsigned blocks = blocks_for(n, TANH_THREADS);
    if (mode == SET) tanh_backward_kernel<SET><<<blocks, TANH_THREADS, 0, ctx->stream>>>(dx, dy, y, n);
    else tanh_backward_kernel<ADD><<<blocks, TANH_THREADS, 0, ctx->stream>>>(dx, dy, y, n);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

#else

static inline void tanh_forward(floatX* y, const floatX* x, size_t n, Context* ctx) {
    Scope scope = scope_open(ctx, "tanh_forward", TANH_FORWARD_FLOPS(n), TANH_FORWARD_BYTES(n), "n=%zu", n);
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) y[i] = real_tanh(x[i]);
    scope_close(&scope);
}

static inline void tanh_backward(floatX* dx, const floatX* dy, const floatX* y, size_t n, Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "tanh_backward", TANH_BACKWARD_FLOPS(n), TANH_BACKWARD_BYTES(n, mode), "n=%zu", n);
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        real d = dy[i] * (1 - y[i] * y[i]);
        dx[i] = mode == ADD ? dx[i] + d : d;
    }
    scope_close(&scope);
}

#endif
#endif
