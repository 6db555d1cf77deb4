/* Random rounding of parameters to 16 bits (llmc/base/rounding.h): the mean, the neighbours, special numbers. */
#ifndef DEV_OPS_ROUNDING_H
#define DEV_OPS_ROUNDING_H

#include "harness.h"
#include "llmc/base/rounding.h"

typedef struct {
    const char* name;
    uint16_t (*round)(float x, uint32_t random);
    int precision, least, largest;  // bits of the significand; exponents of the smallest normal number and the largest
} NarrowType;

static const NarrowType CAST_BF16_TYPES[] = {{"bf16", round_randomly_to_bf16, 8, -126, 127},
                                             {"fp16", round_randomly_to_fp16, 11, -14, 15}};

static inline double narrow_value(const NarrowType* type, uint16_t bits) {
    int stored = type->precision - 1, exponent = (bits & 0x7fff) >> stored, rest = bits & ((1 << stored) - 1);
    double size = exponent == 0 ? ldexp(rest, type->least - stored)
                                : ldexp(rest + (1 << stored), exponent - 1 + type->least - stored);
    if (exponent == type->largest - type->least + 2) size = rest ? NAN : INFINITY;
    return bits & 0x8000 ? -size : size;
}

static inline void test_rounding(Harness* h) {
    static const float VALUES[] = {1.0f,   1.001f, -3.14159f, 1.9999f,  1e-3f,     6.2e-5f, 6.1e-5f, -2.3e-7f, 1e-7f,
                                   -3e-8f, 1e-9f,  1234.567f, 65000.3f, -65504.0f, 0.0f,    -0.0f,   1e-39f,   1e30f};
    enum { DRAWS = 100000 };
    for (size_t i = 0; i < COUNT_OF(CAST_BF16_TYPES); i++) {
        const NarrowType* type = &CAST_BF16_TYPES[i];
        case_begin(h, "adamw/rounding to %s", type->name);
        for (size_t k = 0; k < COUNT_OF(VALUES); k++) {
            float x = VALUES[k];
            if (fabs((double)x) >= ldexp(1, type->largest + 1)) continue;
            char what[64];
            int neighbours = 1, differ = 0, exponent;
            frexp(x, &exponent);
            // The distance between the numbers of the type around x, and the one that is no further from zero.
            double gap = ldexp(1, max_int(exponent - 1, type->least) - (type->precision - 1));
            double low = trunc(x / gap) * gap, high = low, mean = 0;
            uint16_t first = type->round(x, 0);
            if (low != (double)x) high += x < 0 ? -gap : gap;
            for (int d = 0; d < DRAWS; d++) {
                Philox random = philox((uint32_t)d, 0, 0, 0, h->key);
                uint16_t bits = type->round(x, random.v[0]);
                double got = narrow_value(type, bits);
                neighbours &= (got == low || got == high) && bits >> 15 == (signbit(x) != 0);
                differ |= bits != first;
                mean += (got - (double)x) / DRAWS;
            }
            snprintf(what, sizeof what, "%g becomes one of its neighbours", (double)x);
            expect_true(h, what, neighbours);
            snprintf(what, sizeof what, "%g is exact, or comes out both ways", (double)x);
            expect_true(h, what, differ == (low != high));
            double share = ((double)x - low) / (x < 0 ? -gap : gap);
            snprintf(what, sizeof what, "mean of %g within five deviations", (double)x);
            expect_true(h, what, fabs(mean) <= 5 * gap * sqrt(share * (1 - share) / DRAWS));
        }
        static const uint32_t random[] = {0, 0x1fff, 0xffff, 0xffffffffu};
        for (size_t k = 0; k < COUNT_OF(random); k++) {
            float largest = (float)narrow_value(type, (uint16_t)(type->precision == 8 ? 0x7f7f : 0x7bff));
            uint16_t infinite = type->round(-INFINITY, random[k]), nan = type->round((float)NAN, random[k]);
            expect_true(h, "infinity stays", narrow_value(type, infinite) == -INFINITY);
            expect_true(h, "NaN stays", isnan(narrow_value(type, nan)));
            expect_true(h, "the largest number stays", narrow_value(type, type->round(largest, random[k])) == largest);
            if (type->precision == 8) continue;
            expect_true(h, "beyond it: infinity", narrow_value(type, type->round(70000, random[k])) == INFINITY);
        }
        case_end(h);
    }
}

#endif
