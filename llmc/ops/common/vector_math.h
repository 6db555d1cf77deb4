/* Exponential functions for inner loops: scalar code without branches, tables or calls, so that gcc -O3 vectorizes the
 * surrounding loop. In float the relative error is below 3e-7. Gradual underflow, infinities and NaN are preserved. The
 * double build calls libm.
 *
 *   x = n ln 2 + r,  |r| <= ln 2 / 2,   exp(x) = 2^n (1 + q(r)),   q(r) = exp(r) - 1 = r + r^2 h(r)
 *   tanh(x) = u / (u + 2),              u = exp(2 |x|) - 1,       1 - tanh(x)^2 = 4 (u + 1) / (u + 2)^2
 *   erf(x)  = 1 - exp(-|x| g(|x|)),     |x| g = -log(erfc |x|)
 *
 * exp(x) - 1 = 2^n q + (2^n - 1) does not cancel near 0, where n = 0, so tanh and erf need no second branch there.
 * h and g are minimax polynomials fitted for this file, h on |r| <= 0.3467 and g on [0, 4]. */
#ifndef LLMC_OPS_COMMON_VECTOR_MATH_H
#define LLMC_OPS_COMMON_VECTOR_MATH_H

#include "llmc/base/util.h"

#if !defined(REAL_DOUBLE)

// a * b + c, as an FMA if the target has one. Without one, fmaf() would be a slow call.
HOST_DEVICE static inline float multiply_add(float a, float b, float c) {
#if defined(FP_FAST_FMAF) || defined(__CUDA_ARCH__)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// -log(erfc(a)) for 0 <= a <= 4.
HOST_DEVICE static inline float erfc_exponent(float a) {
    float g = -9.256733994e-6f;
    g = multiply_add(g, a, 1.176452429e-4f);
    g = multiply_add(g, a, -6.328502196e-4f);
    g = multiply_add(g, a, 1.667050347e-3f);
    g = multiply_add(g, a, -1.604172758e-4f);
    g = multiply_add(g, a, -1.915305348e-2f);
    g = multiply_add(g, a, 0.102777828f);
    g = multiply_add(g, a, 0.6366193822f);
    g = multiply_add(g, a, 1.128379172f);
    return a * g;
}

#endif

#if defined(REAL_DOUBLE) || defined(__CUDACC__)  // in CUDA these functions are overloaded for float

HOST_DEVICE static inline real real_exp(real x) { return exp(x); }
HOST_DEVICE static inline real real_tanh(real x) { return tanh(x); }
HOST_DEVICE static inline real real_sech2(real x) { return 1 / (cosh(x) * cosh(x)); }
HOST_DEVICE static inline real real_erf(real x) { return erf(x); }

#else

// The smaller of x and limit; NaN is preserved. It uses masks because gcc turns ?: into a branch here, which prevents
// vectorization.
static inline float min_or_nan(float x, float limit) {
    uint32_t bits, limit_bits, over = 0u - (uint32_t)(x > limit);
    memcpy(&bits, &x, sizeof bits);
    memcpy(&limit_bits, &limit, sizeof limit_bits);
    bits = (limit_bits & over) | (bits & ~over);
    memcpy(&x, &bits, sizeof x);
    return x;
}

// exp(r) - 1 of x = n ln 2 + r, and n in *power, for |x| below about 1e5. A NaN gives a NaN and a meaningless n.
static inline float exp_parts(float x, int32_t* power) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, stored in the low bits
    float shifted = multiply_add(x, 1.44269504f, magic);
    float n = shifted - magic;
    // ln 2 in two parts. The first has trailing zero bits, so its product with n is exact.
    float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, x));
    float h = 1.991188729e-4f;
    h = multiply_add(h, r, 1.394109862e-3f);
    h = multiply_add(h, r, 8.333277196e-3f);
    h = multiply_add(h, r, 4.166635325e-2f);
    h = multiply_add(h, r, 0.166666668f);
    h = multiply_add(h, r, 0.5f);
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    *power = (int32_t)(bits - 0x4B400000u);
    return multiply_add(r * r, h, r);
}

// 2^n for -126 <= n <= 127. Other n give a meaningless float, but no undefined behaviour.
static inline float exp2_int(int32_t n) {
    uint32_t bits = ((uint32_t)n + 127u) << 23;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// exp(x) - 1 for |x| <= 80.
static inline float expm1_small(float x) {
    int32_t n;
    float q = exp_parts(x, &n), scale = exp2_int(n);
    return multiply_add(scale, q, scale - 1.0f);
}

static inline float real_exp(float x) {
    x = -min_or_nan(-min_or_nan(x, 89.0f), 104.0f);  // beyond these limits the result is inf or 0
    int32_t n;
    float q = exp_parts(x, &n);
    int32_t half = n >> 1;  // 2^n in two factors: n may be 128 or -150, where 2^n is not a float
    return (1.0f + q) * exp2_int(half) * exp2_int(n - half);
}

static inline float real_tanh(float x) {
    float a = min_or_nan(fabsf(x), 40.0f);  // tanh rounds to 1 well below this
    float u = expm1_small(2.0f * a);
    return copysignf(u * (1.0f / (u + 2.0f)), x);
}

// The derivative of tanh, 1 - tanh(x)^2, without the cancellation of that difference. Beyond |x| = 40 it stays at
// 7e-35. Next to a call of real_tanh(x) it costs three operations, because the compiler reuses the common
// subexpressions.
static inline float real_sech2(float x) {
    float a = min_or_nan(fabsf(x), 40.0f);
    float u = expm1_small(2.0f * a);
    float s = 1.0f / (u + 2.0f);
    return 4.0f * (u + 1.0f) * s * s;
}

static inline float real_erf(float x) {
    float a = min_or_nan(fabsf(x), 4.0f);  // erf rounds to 1 beyond this
    return copysignf(-expm1_small(-erfc_exponent(a)), x);
}

#endif
#endif
