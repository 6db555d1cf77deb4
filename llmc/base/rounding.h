/* Stochastic rounding of floats to bf16 and fp16: to one of the two neighbours, with a probability that makes the
 * expected result equal to the number.
 *
 * With rounding to nearest, a parameter kept in 8 or 11 bits loses every update smaller than half of its last bit. With
 * stochastic rounding, small updates count on average. Values that the type can represent stay unchanged for any random
 * bits. Values beyond its largest become infinite, as with rounding to nearest; NaN stays NaN.
 *
 * Functions take 32 uniform random bits and return the bits of the result, so that the CPU and the GPU round alike. */
#ifndef LLMC_BASE_ROUNDING_H
#define LLMC_BASE_ROUNDING_H

#include "llmc/base/util.h"

HOST_DEVICE static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// bf16 is the upper half of a float: the carry out of the lower half plus 16 random bits is the rounding.
HOST_DEVICE static inline uint16_t round_randomly_to_bf16(float x, uint32_t random) {
    uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    if ((bits & 0x7fffffffu) == 0x7f800000u) return (uint16_t)(bits >> 16);
    return (uint16_t)((bits + (random & 0xffffu)) >> 16);
}

// fp16 has 13 fraction bits fewer, and exponents from -14 on; below 2^-14 its numbers are multiples of 2^-24.
HOST_DEVICE static inline uint16_t round_randomly_to_fp16(float x, uint32_t random) {
    uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (size < 0x38800000u) {
        float multiple = (x < 0 ? -x : x) * 16777216.0f;
        uint32_t whole = (uint32_t)multiple;
        float rest = multiple - (float)whole, uniform = (float)(random >> 8) * (1.0f / 16777216.0f);
        return (uint16_t)(sign | (whole + (uniform < rest)));
    }
    if (size < 0x7f800000u) size += random & 0x1fffu;
    if (size >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
    return (uint16_t)(sign | (size - 0x38000000u) >> 13);
}

// Sizes of fp8 matmuls must be multiples of this.
#define QUANTIZE_ALIGNMENT 16

// The length of a row of the transpose, in fp8, of a tensor with N rows.
static inline size_t quantize_rows(int N) { return round_up((size_t)N, QUANTIZE_ALIGNMENT); }

#endif
