/* Casts between full precision and bf16. Gradients in bf16 halve the bytes that ranks exchange.
 *
 *   forward    y [n] = x [n], rounded to the nearest bf16, ties to even; overflow gives infinity, NaN stays NaN
 *   back       x [n] = y [n] (SET), or x += y (ADD): the conversion of y is exact, the sum is rounded to real
 *
 * dtypes     x real, y Bf16 in every build. In the double build x is rounded to float first.
 * shapes     n is a multiple of 4, like all offsets in the flat buffers. Both pointers are aligned to four elements.
 *            n may be 0.
 * bytes      n * (sizeof(real) + 2); ADD reads x too. */
#ifndef LLMC_OPS_CAST_BF16_H
#define LLMC_OPS_CAST_BF16_H

#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif
#include "llmc/base/rounding.h"
#include "llmc/device/scope.h"

// On the CPU a bf16 value is stored as its bits.
#ifdef __CUDACC__
typedef __nv_bfloat16 Bf16;
#else
typedef uint16_t Bf16;
#endif

#define CAST_BF16_VECTOR 4

#define CAST_BF16_FORWARD_BYTES(n) ((double)(n) * (sizeof(real) + 2.0))
#define CAST_BF16_BACK_FLOPS(n, mode) ((mode) == ADD ? (double)(n) : 0)
#define CAST_BF16_BACK_BYTES(n, mode) ((double)(n) * (((mode) == ADD ? 2.0 : 1.0) * sizeof(real) + 2.0))

// ---------------------------------------------------------------------------------------------------------
// Reference: bit operations, which the CPU's launchers use too.

static inline uint16_t bf16_bits(real x) {
    uint32_t bits = float_bits((float)x), odd = bits >> 16 & 1;
    uint32_t nearest = (bits + 0x7fffu + odd) >> 16, nan = bits >> 16 | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : nearest);
}

static inline real bf16_value(uint16_t bits) {
    uint32_t fp32 = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &fp32, sizeof x);
    return (real)x;
}

static inline void cast_to_bf16_ref(uint16_t* y, const real* x, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = bf16_bits(x[i]);
}

static inline void cast_from_bf16_ref(real* x, const uint16_t* y, size_t n, Mode mode) {
    for (size_t i = 0; i < n; i++) x[i] = mode == ADD ? x[i] + bf16_value(y[i]) : bf16_value(y[i]);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: each thread converts four adjacent elements: 16 bytes of x and 8 of y.

enum { CAST_BF16_THREADS = 256 };

static __global__ void __launch_bounds__(CAST_BF16_THREADS) cast_to_bf16_kernel(Bf16* y, const real* x, size_t n) {
    size_t i = CAST_BF16_VECTOR * ((size_t)blockIdx.x * CAST_BF16_THREADS + threadIdx.x);
    if (i >= n) return;
    Vector<real> fp32 = load128_streaming(x + i);
    Vector<Bf16, CAST_BF16_VECTOR> bf16 = from_floats<Bf16, CAST_BF16_VECTOR>(fp32.v);
    *(int2*)(y + i) = *(const int2*)&bf16;
}

template <Mode MODE>
__global__ void __launch_bounds__(CAST_BF16_THREADS) cast_from_bf16_kernel(real* x, const Bf16* y, size_t n) {
    size_t i = CAST_BF16_VECTOR * ((size_t)blockIdx.x * CAST_BF16_THREADS + threadIdx.x);
    if (i >= n) return;
    Vector<Bf16, CAST_BF16_VECTOR> bf16;
    *(int2*)&bf16 = __ldcs((const int2*)(y + i));
    Vector<real> fp32;
    to_floats(fp32.v, bf16);
    if constexpr (MODE == ADD) {
        Vector<real> before = load128(x + i);
#pragma unroll
        for (int k = 0; k < CAST_BF16_VECTOR; k++) fp32.v[k] += before.v[k];
    }
    store128(x + i, fp32);
}

static inline void cast_to_bf16_run(Bf16* y, const real* x, size_t n, Context* ctx) {
    unsigned blocks = blocks_for(n, CAST_BF16_VECTOR * CAST_BF16_THREADS);
    cast_to_bf16_kernel<<<blocks, CAST_BF16_THREADS, 0, ctx->stream>>>(y, x, n);
    cudaCheck(cudaGetLastError());
}

static inline void cast_from_bf16_run(real* x, const Bf16* y, size_t n, Mode mode, Context* ctx) {
    unsigned blocks = blocks_for(n, CAST_BF16_VECTOR * CAST_BF16_THREADS);
    if (mode == SET) cast_from_bf16_kernel<SET><<<blocks, CAST_BF16_THREADS, 0, ctx->stream>>>(x, y, n);
    else cast_from_bf16_kernel<ADD><<<blocks, CAST_BF16_THREADS, 0, ctx->stream>>>(x, y, n);
    cudaCheck(cudaGetLastError());
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU

static inline void cast_to_bf16_run(Bf16* y, const real* x, size_t n, Context* ctx) {
    (void)ctx;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) y[i] = bf16_bits(x[i]);
}

static inline void cast_from_bf16_run(real* x, const Bf16* y, size_t n, Mode mode, Context* ctx) {
    (void)ctx;
    if (mode == ADD) {
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < n; i++) x[i] += bf16_value(y[i]);
    } else {
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < n; i++) x[i] = bf16_value(y[i]);
    }
}
#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers

static inline void cast_to_bf16(Bf16* y, const real* x, size_t n, Context* ctx) {
    CHECK(n % CAST_BF16_VECTOR == 0);
    if (!n) return;
    Scope scope = scope_open(ctx, "cast_to_bf16", 0, CAST_BF16_FORWARD_BYTES(n), "n=%zu", n);
    cast_to_bf16_run(y, x, n, ctx);
    scope_close(&scope);
}

static inline void cast_from_bf16(real* x, const Bf16* y, size_t n, Mode mode, Context* ctx) {
    CHECK(n % CAST_BF16_VECTOR == 0);
    if (!n) return;
    Scope scope =
        scope_open(ctx, "cast_from_bf16", CAST_BF16_BACK_FLOPS(n, mode), CAST_BF16_BACK_BYTES(n, mode), "n=%zu", n);
    cast_from_bf16_run(x, y, n, mode, ctx);
    scope_close(&scope);
}

#endif
