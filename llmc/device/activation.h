/* The activation functions as scalars, for every kernel that fuses one.
 *
 *   GELU_TANH  y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))   GPT-2 ("gelu_new")
 *   GELU_ERF   y = 0.5 x (1 + erf(x / sqrt(2)))                      BERT ("gelu")
 *
 * Source: Hendrycks and Gimpel, arXiv 1606.08415. The two differ by up to 4.7e-4 (near |x| = 2.7). */
#ifndef LLMC_ACTIVATION_H
#define LLMC_ACTIVATION_H

#include "device.h"
#include "vector_math.h"

// In double: the truth for every faster version. Derivatives are with respect to x.
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

// The same for inner loops: no branches but on `kind`, which gcc moves out of the loop, so the loop vectorises.
// Absolute error below 3e-7 max(1, |y|) in float.
HOST_DEVICE static inline real gelu_value(real x, Gelu kind) {
    const real half = (real)0.5, one = 1;
    if (kind == GELU_ERF) return half * x * (one + real_erf(x * (real)0.70710678118654752440));
    return half * x * (one + real_tanh((real)0.79788456080286535588 * (x + (real)0.044715 * x * x * x)));
}

HOST_DEVICE static inline real gelu_derivative(real x, Gelu kind) {
    const real half = (real)0.5, one = 1, slope = (real)0.79788456080286535588;
    if (kind == GELU_ERF)
        return half * (one + real_erf(x * (real)0.70710678118654752440)) +
               x * (real)0.39894228040143267794 * real_exp(-half * x * x);
    real z = slope * (x + (real)0.044715 * x * x * x);
    return half * (one + real_tanh(z)) + half * x * real_sech2(z) * slope * (one + (real)(3 * 0.044715) * x * x);
}

#endif
