/* Gradients in half the bytes, for the ranks to exchange: full precision to bf16 and back.
 *
 *   forward    y [n] = x [n], rounded to the nearest bf16, ties to even; too large becomes infinite, NaN stays NaN
 *   back       x [n] = y [n] (SET), or x += y (ADD): what is added is exact, the sum is rounded to real
 *
 * dtypes     x real, y Bf16 in every build. In the double build x is rounded to float first.
 * shapes     n a multiple of 4, as all offsets in the flat buffers are; both pointers on the bytes of four elements.
 *            n may be 0.
 * bytes      n * (sizeof(real) + 2); ADD reads x too. */
#ifndef LLMC_NARROW_H
#define LLMC_NARROW_H

#ifdef __CUDACC__
#include "../device/device.cuh"
#endif
#include "../base/rounding.h"
#include "../device/scope.h"

// The CPU knows bf16 by its bits only.
#ifdef __CUDACC__
typedef __nv_bfloat16 Bf16;
#else
typedef uint16_t Bf16;
#endif

#define NARROW_VECTOR 4

#define NARROW_FORWARD_BYTES(n) ((double)(n) * (sizeof(real) + 2.0))
#define NARROW_BACK_FLOPS(n, mode) ((mode) == ADD ? (double)(n) : 0)
#define NARROW_BACK_BYTES(n, mode) ((double)(n) * (((mode) == ADD ? 2.0 : 1.0) * sizeof(real) + 2.0))

// ---------------------------------------------------------------------------------------------------------
// Reference: on bits, which the CPU's launchers do too.

static inline uint16_t narrow_bits(real x) {
    uint32_t bits = float_bits((float)x), odd = bits >> 16 & 1;
    uint32_t nearest = (bits + 0x7fffu + odd) >> 16, nan = bits >> 16 | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : nearest);
}

static inline real narrow_value_of(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return (real)x;
}

static inline void narrow_forward_ref(uint16_t* y, const real* x, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = narrow_bits(x[i]);
}

static inline void narrow_back_ref(real* x, const uint16_t* y, size_t n, Mode mode) {
    for (size_t i = 0; i < n; i++) x[i] = mode == ADD ? x[i] + narrow_value_of(y[i]) : narrow_value_of(y[i]);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: a thread takes four neighbours, 16 bytes of x and 8 of y.

enum { NARROW_THREADS = 256 };

static __global__ void __launch_bounds__(NARROW_THREADS) narrow_forward_kernel(Bf16* y, const real* x, size_t n) {
    size_t i = NARROW_VECTOR * ((size_t)blockIdx.x * NARROW_THREADS + threadIdx.x);
    if (i >= n) return;
    Vector<real> wide = load128_streaming(x + i);
    Vector<Bf16, NARROW_VECTOR> narrow = from_floats<Bf16, NARROW_VECTOR>(wide.v);
    *(int2*)(y + i) = *(const int2*)&narrow;
}

template <Mode MODE>
__global__ void __launch_bounds__(NARROW_THREADS) narrow_back_kernel(real* x, const Bf16* y, size_t n) {
    size_t i = NARROW_VECTOR * ((size_t)blockIdx.x * NARROW_THREADS + threadIdx.x);
    if (i >= n) return;
    Vector<Bf16, NARROW_VECTOR> narrow;
    *(int2*)&narrow = __ldcs((const int2*)(y + i));
    Vector<real> wide;
    to_floats(wide.v, narrow);
    if constexpr (MODE == ADD) {
        Vector<real> before = load128(x + i);
#pragma unroll
        for (int k = 0; k < NARROW_VECTOR; k++) wide.v[k] += before.v[k];
    }
    store128(x + i, wide);
}

static inline void narrow_forward_run(Bf16* y, const real* x, size_t n, Context* ctx) {
    unsigned blocks = blocks_for(n, NARROW_VECTOR * NARROW_THREADS);
    narrow_forward_kernel<<<blocks, NARROW_THREADS, 0, ctx->stream>>>(y, x, n);
    cudaCheck(cudaGetLastError());
}

static inline void narrow_back_run(real* x, const Bf16* y, size_t n, Mode mode, Context* ctx) {
    unsigned blocks = blocks_for(n, NARROW_VECTOR * NARROW_THREADS);
    if (mode == SET) narrow_back_kernel<SET><<<blocks, NARROW_THREADS, 0, ctx->stream>>>(x, y, n);
    else narrow_back_kernel<ADD><<<blocks, NARROW_THREADS, 0, ctx->stream>>>(x, y, n);
    cudaCheck(cudaGetLastError());
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU

static inline void narrow_forward_run(Bf16* y, const real* x, size_t n, Context* ctx) {
    (void)ctx;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) y[i] = narrow_bits(x[i]);
}

static inline void narrow_back_run(real* x, const Bf16* y, size_t n, Mode mode, Context* ctx) {
    (void)ctx;
    if (mode == ADD) {
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < n; i++) x[i] += narrow_value_of(y[i]);
    } else {
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < n; i++) x[i] = narrow_value_of(y[i]);
    }
}
#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers

static inline void narrow_forward(Bf16* y, const real* x, size_t n, Context* ctx) {
    CHECK(n % NARROW_VECTOR == 0);
    if (!n) return;
    Scope scope = scope_open(ctx, "narrow_forward", 0, NARROW_FORWARD_BYTES(n), "n=%zu", n);
    narrow_forward_run(y, x, n, ctx);
    scope_close(&scope);
}

static inline void narrow_back(real* x, const Bf16* y, size_t n, Mode mode, Context* ctx) {
    CHECK(n % NARROW_VECTOR == 0);
    if (!n) return;
    Scope scope = scope_open(ctx, "narrow_back", NARROW_BACK_FLOPS(n, mode), NARROW_BACK_BYTES(n, mode), "n=%zu", n);
    narrow_back_run(x, y, n, mode, ctx);
    scope_close(&scope);
}

#endif
