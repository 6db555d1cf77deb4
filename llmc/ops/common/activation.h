/* Scalar activation functions, for kernels that fuse them, and GELU's kernels.
 *
 *   GELU_TANH  y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))   GPT-2 ("gelu_new")
 *   GELU_ERF   y = 0.5 x (1 + erf(x / sqrt(2)))                      BERT ("gelu")
 *
 * Source: Hendrycks and Gimpel, arXiv 1606.08415. The two differ by up to 4.7e-4 (near |x| = 2.7). */
#ifndef LLMC_OPS_COMMON_ACTIVATION_H
#define LLMC_OPS_COMMON_ACTIVATION_H

#include "llmc/device/device.h"
#include "llmc/ops/common/vector_math.h"

#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif

#if defined(__CUDA_ARCH__) && !defined(REAL_DOUBLE)
#define GELU_BY_HARDWARE
#endif

// Double-precision references for the faster versions. Derivatives are with respect to x.
static inline double gelu_exact(double x, Gelu kind) {
    if (kind == GELU_ERF) return 0.5 * x * (1 + erf(x * 0.70710678118654752440));
    return 0.5 * x * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
}

static inline double gelu_derivative_exact(double x, Gelu kind) {
    if (kind == GELU_ERF)
        return 0.5 * (1 + erf(x * 0.70710678118654752440)) + x * 0.39894228040143267794 * exp(-0.5 * x * x);
    double t = tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.79788456080286535588 * (1 + 3 * 0.044715 * x * x);
}

// Versions for inner loops. The only branch is on `kind`; gcc hoists it out of the loop, so the loop vectorizes.
// Absolute error below 3e-7 max(1, |y|) in float.
//
// On the GPU, 1 + tanh(z) = 2 / (1 + e) with e = exp(-2 z). The hardware's power of two and reciprocal (each within 2
// ulp) are accurate enough, because nothing cancels: the relative error stays below 1e-6 where y is not tiny. The limit
// on the exponent keeps e * s finite. These kernels are instruction-bound, so constants are multiplied beforehand. With
// q = erfc(|x| / sqrt(2)) / 2, (1 + erf(x / sqrt(2))) / 2 is q or 1 - q. The same hardware exponential gives q, with
// half the instructions of erff.
#ifdef GELU_BY_HARDWARE
// e = 2^(x (k + 0.044715 k x^2)) with k = -2 sqrt(2 / pi) / log(2)
__device__ inline float gelu_tanh_exp(float x, float square) {
    return ex2_approx(fminf(x * fmaf(-0.10294324f, square, -2.3022082f), 115));
}

__device__ inline float gelu_half_erfc(float x) {
    float a = 0.70710678118654752440f * fabsf(x);
    float q =
        0.5f * exp_approx(-erfc_exponent(fminf(a, 4)));  // computed for every a: a select is cheaper than a branch
    return a < 4 ? q : 0;
}
#endif

HOST_DEVICE static inline real gelu_value(real x, Gelu kind) {
    const real half = (real)0.5, one = 1;
#ifdef GELU_BY_HARDWARE
    if (kind == GELU_TANH) return __fdividef(x, 1 + gelu_tanh_exp(x, x * x));
    float q = gelu_half_erfc(x);
    return x * (x < 0 ? q : 1 - q);
#endif
    if (kind == GELU_ERF) return half * x * (one + real_erf(x * (real)0.70710678118654752440));
    return half * x * (one + real_tanh((real)0.79788456080286535588 * (x + (real)0.044715 * x * x * x)));
}

HOST_DEVICE static inline real gelu_derivative(real x, Gelu kind) {
    const real half = (real)0.5, one = 1, slope = (real)0.79788456080286535588;
#ifdef GELU_BY_HARDWARE
    if (kind == GELU_TANH) {
        // tanh(z) = 2 s - 1, its derivative 4 e s^2, and 2 z' = 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
        float square = x * x, e = gelu_tanh_exp(x, square), s = __fdividef(1, 1 + e);
        return fmaf(x * fmaf(0.21406447f, square, 1.5957691f), e * s * s, s);
    }
    float q = gelu_half_erfc(x);
    return (x < 0 ? q : 1 - q) + x * (0.39894228040143267794f * ex2_approx(-0.72134752f * x * x));
#endif
    if (kind == GELU_ERF)
        return half * (one + real_erf(x * (real)0.70710678118654752440)) +
               x * (real)0.39894228040143267794 * real_exp(-half * x * x);
    real z = slope * (x + (real)0.044715 * x * x * x);
    return half * (one + real_tanh(z)) + half * x * real_sech2(z) * slope * (one + (real)(3 * 0.044715) * x * x);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GELU of whole tensors on the GPU, for gelu.h and for matmul without an epilogue

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

// The launches, without a scope.
static inline void gelu_forward_start(floatX* y, const floatX* x, size_t n, Gelu kind, Context* ctx) {
    if (kind == GELU_ERF) gelu_forward_kernel<GELU_ERF><<<gelu_blocks(n), GELU_THREADS, 0, ctx->stream>>>(y, x, n);
    else gelu_forward_kernel<GELU_TANH><<<gelu_blocks(n), GELU_THREADS, 0, ctx->stream>>>(y, x, n);
    cudaCheck(cudaGetLastError());
}

template <Mode MODE>
static inline void gelu_backward_start(floatX* dx, const floatX* dy, const floatX* x, size_t n, Gelu kind,
                                       Context* ctx) {
    unsigned blocks = gelu_blocks(n);
    if (kind == GELU_ERF) gelu_backward_kernel<GELU_ERF, MODE><<<blocks, GELU_THREADS, 0, ctx->stream>>>(dx, dy, x, n);
    else gelu_backward_kernel<GELU_TANH, MODE><<<blocks, GELU_THREADS, 0, ctx->stream>>>(dx, dy, x, n);
    cudaCheck(cudaGetLastError());
}

#endif
#endif
