/* The two 8-bit floating-point formats: sign, exponent, fraction.
 *
 *   E4M3   1 + 4 + 3 bits: largest 448, smallest normal 2^-6, smallest 2^-9; no infinity, NaN 0x7f and 0xff
 *   E5M2   1 + 5 + 2 bits: largest 57344, smallest normal 2^-14, smallest 2^-16; infinity and NaN as in IEEE 754
 *
 * Rounding is to nearest, ties to even. Conversion saturates: larger values, including infinity, become the format's
 * largest value. NaN of either sign becomes 0x7f, as in CUDA's saturating conversion.
 * Source: Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433. */
#ifndef LLMC_FP8_FORMAT_H
#define LLMC_FP8_FORMAT_H

#include "llmc/base/rounding.h"

typedef enum { FP8_E4M3, FP8_E5M2 } Fp8Format;

#define FP8_NAN 0x7f

// Statistics of converted tensors: elements stored as the largest value and as 0. quantize.h defines how they
// accumulate.
typedef struct {
    uint64_t clipped, flushed;
    uint32_t amax;  // float_bits() of the largest absolute value
} Fp8Stats;

HOST_DEVICE static inline float fp8_largest(Fp8Format format) { return format == FP8_E4M3 ? 448.0f : 57344.0f; }

// The byte of the largest value.
HOST_DEVICE static inline uint8_t fp8_top(Fp8Format format) { return format == FP8_E4M3 ? 0x7e : 0x7b; }

HOST_DEVICE static inline int fp8_fraction_bits(Fp8Format format) { return format == FP8_E4M3 ? 3 : 2; }

// The exponent of the smallest normal value.
HOST_DEVICE static inline int fp8_min_exponent(Fp8Format format) { return format == FP8_E4M3 ? -6 : -14; }

// The definition: the number of steps between 0 and |x|, where a step doubles with every power of two.
static inline uint8_t fp8_from_float_ref(float x, Fp8Format format) {
    int fraction = fp8_fraction_bits(format), least = fp8_min_exponent(format);
    int sign = signbit(x) ? 0x80 : 0;
    if (isnan(x)) return FP8_NAN;
    double size = fmin(fabs((double)x), (double)fp8_largest(format));
    int exponent = size > 0 ? max_int(ilogb(size), least) : least;
    int steps = (int)rint(ldexp(size, fraction - exponent));  // 2^fraction to 2^(fraction + 1) for a normal number
    return (uint8_t)(sign | (((exponent - least) << fraction) + steps));
}

// The same with bit operations, which the compiler vectorizes. float_bits(x) is rounded to fewer bits, with carry.
// Below the smallest normal value, adding a power of two does the rounding.
static inline uint8_t fp8_from_float(float x, Fp8Format format) {
    uint32_t fraction = (uint32_t)fp8_fraction_bits(format), drop = 23 - fraction;
    uint32_t bias = (uint32_t)(126 + fp8_min_exponent(format)), bits = float_bits(x), size = bits & 0x7fffffffu;
    uint32_t steps_bits = (bias + 1 + drop) << 23;  // of the power of two whose last bit is the smallest value
    float steps_one, absolute;
    memcpy(&steps_one, &steps_bits, sizeof steps_one);
    memcpy(&absolute, &size, sizeof absolute);
    uint32_t normal = ((size + (1u << (drop - 1)) - 1 + (size >> drop & 1)) >> drop) - (bias << fraction);
    uint32_t small = float_bits(absolute + steps_one) - steps_bits;
    uint32_t code = size < (bias + 1) << 23 ? small : normal;
    code = size > float_bits(fp8_largest(format)) ? (format == FP8_E4M3 ? 0x7eu : 0x7bu) : code;
    return (uint8_t)(size > 0x7f800000u ? FP8_NAN : (bits >> 24 & 0x80u) | code);
}

// The value of a byte.
HOST_DEVICE static inline float fp8_to_float(uint8_t byte, Fp8Format format) {
    int fraction = fp8_fraction_bits(format), least = fp8_min_exponent(format);
    int code = byte & 0x7f, exponent = max_int(code >> fraction, 1) - 1;
    float size = ldexpf((float)(code - (exponent << fraction)), least - fraction + exponent);
    if (format == FP8_E5M2 && code == 0x7c) size = INFINITY;
    if (code > (format == FP8_E4M3 ? 0x7e : 0x7c)) size = NAN;
    return byte & 0x80 ? -size : size;
}

// The values of all bytes.
static inline void fp8_numbers(float number[256], Fp8Format format) {
    for (int byte = 0; byte < 256; byte++) number[byte] = fp8_to_float((uint8_t)byte, format);
}

// ---------------------------------------------------------------------------------------------------------
// The rows of an fp8 matmul's input whose exact values are also needed (mean_bias.h)

enum { MEAN_BIAS_ROWS = 512, MEAN_BIAS_SPREAD = 37 };

HOST_DEVICE static inline int mean_bias_rows(int N) { return N < MEAN_BIAS_ROWS ? N : MEAN_BIAS_ROWS; }

// The k-th row of x that the means read.
HOST_DEVICE static inline int mean_bias_row(int k, int N) {
    int apart = N / mean_bias_rows(N);
    return k * apart + k * MEAN_BIAS_SPREAD % apart;
}

// Whether `row` is one of them.
HOST_DEVICE static inline int mean_bias_reads(int row, int N) {
    int k = row / (N / mean_bias_rows(N));
    return k < mean_bias_rows(N) && mean_bias_row(k, N) == row;
}

#endif
