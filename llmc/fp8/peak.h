/* The rate of large fp8 matmuls, measured as run/peak.h does for those of the build's own type. */
#ifndef LLMC_FP8_PEAK_H
#define LLMC_FP8_PEAK_H

#include "llmc/fp8/linear.h"
#include "llmc/run/peak.h"

// Operands of square fp8 matmuls.
typedef struct {
    floatX* x;       // of peak_operands()
    uint8_t* bytes;  // [2, PEAK_SIZE, PEAK_SIZE], rounded x and w
    real* one;
} Fp8PeakOperands;

static inline void fp8_peak_product(const void* operands, int size, Context* ctx) {
    const Fp8PeakOperands* o = (const Fp8PeakOperands*)operands;
    Fp8Shared shared = {.scales = {.inverse = o->one}};
    Fp8Linear layer = {.shared = &shared};
    fp8_product(&layer,
                (Fp8Product){MATMUL_FORWARD,
                             o->bytes + PEAK_ELEMENTS,
                             o->bytes,
                             o->x + 2 * PEAK_ELEMENTS,
                             NULL,
                             {size, size, size},
                             SET},
                ctx);
}

// The measured FLOP/s of large fp8 matmuls.
static inline double fp8_peak_flops(Context* ctx) {
    static const real ones[2 * FP8_INVERSE_APART] = {1, 1, 1, 1, 1, 1, 1, 1};  // of x and of w
    Fp8PeakOperands o = {.x = peak_operands(ctx)};
    o.bytes = (uint8_t*)device_alloc(ctx, 2 * PEAK_ELEMENTS, "measurement");
    o.one = (real*)device_alloc(ctx, sizeof ones, "measurement");
    device_upload(ctx, o.one, ones, sizeof ones);
    QuantizeOutput out = {.y = o.bytes, .scale = o.one, .format = FP8_E4M3};
    quantize(out, quantize_plain(o.x), 2 * PEAK_SIZE, PEAK_SIZE, ctx);
    double flops = peak_measure(fp8_peak_product, &o, ctx);
    device_free(o.x, 3 * PEAK_ELEMENTS * sizeof(floatX)), device_free(o.bytes, 2 * PEAK_ELEMENTS);
    device_free(o.one, sizeof ones);
    return flops;
}

#endif
