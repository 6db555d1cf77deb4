/* quantize: a tensor in 8 bits and its transpose, in one pass, with what delayed scaling and the reports need.
 *
 *   y  [N, C]  (SET) = fp8(scale x)       row-major bytes of FP8_E4M3 or FP8_E5M2 (ops/common/fp8.h)
 *   yt [C, Np] (SET) = the transpose of y; Np is N rounded up to 16, and columns N to Np - 1 are zero
 *   stats (ADD): amax = max(amax, |x|), clipped += elements that are larger than the format's largest number,
 *                flushed += elements that are not zero and become zero
 *
 *   x [N, C] floatX; scale [1] real, a power of two, read on the device; stats on the device
 *
 * Products in fp8 take both operands with the summed index contiguous and a multiple of 16: y serves one, yt the other.
 * Either may be NULL. So may stats, for tensors of an evaluation.
 * shapes     C is a multiple of 16; x, y and yt are aligned to 16 bytes. N may be 0: nothing is written.
 * numerics   scale x in fp32, which is exact for a power of two. Rounding is to nearest even, saturating. NaN becomes
 *            0x7f, counts neither as clipped nor as flushed, and makes amax NaN; infinity makes it infinite.
 * stats      integers: amax is the bits of a float that is not negative, and these are ordered as the floats are. So
 *            the order of elements does not matter, and the same x gives the same bits.
 * bytes      N C (sizeof(floatX) + 1 for each output)
 * source     delayed scaling: Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433
 *
 * Files: cpu.h for the CPU, kernels.cuh for the GPU. */
#ifndef LLMC_OPS_QUANTIZE_QUANTIZE_H
#define LLMC_OPS_QUANTIZE_QUANTIZE_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/fp8.h"

#define QUANTIZE_ALIGNMENT 16  // of C and Np

// Where an fp8 tensor is written and how.
typedef struct {
    uint8_t *y, *yt;  // NULL: not wanted
    Fp8Stats* stats;  // NULL: not wanted
    const real* scale;
    Fp8Format format;
} QuantizeOutput;

#define QUANTIZE_FLOPS(N, C) (1.0 * (N) * (C))
#define QUANTIZE_BYTES(N, C, outputs) (1.0 * (N) * (C) * ((double)sizeof(floatX) + (outputs)))

// Np
static inline size_t quantize_rows(int N) { return round_up((size_t)N, QUANTIZE_ALIGNMENT); }

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void quantize_ref(QuantizeOutput out, const real* x, int N, int C) {
    size_t Np = quantize_rows(N);
    for (size_t n = 0; n < Np; n++)
        for (size_t c = 0; c < (size_t)C; c++) {
            float v = n < (size_t)N ? (float)x[n * (size_t)C + c] : 0, scaled = v * (float)*out.scale;
            uint8_t byte = fp8_from_float_ref(scaled, out.format);
            if (out.y && n < (size_t)N) out.y[n * (size_t)C + c] = byte;
            if (out.yt) out.yt[c * Np + n] = byte;
            if (!out.stats) continue;
            uint32_t size = float_bits(v) & 0x7fffffffu;
            if (size > out.stats->amax) out.stats->amax = size;
            out.stats->clipped += fabsf(scaled) > fp8_largest(out.format);
            out.stats->flushed += v != 0 && (byte & 0x7f) == 0;
        }
}

// Checks what a launcher was given and opens its scope.
static inline Scope quantize_open(QuantizeOutput out, const floatX* x, int N, int C, Context* ctx) {
    int outputs = (out.y != NULL) + (out.yt != NULL);
    CHECK(outputs > 0 && N >= 0 && C > 0 && C % QUANTIZE_ALIGNMENT == 0);
    CHECK(((uintptr_t)x | (uintptr_t)out.y | (uintptr_t)out.yt) % 16 == 0);
    return scope_open(ctx, "quantize", QUANTIZE_FLOPS(N, C), QUANTIZE_BYTES(N, C, outputs), "N=%d C=%d", N, C);
}

#ifdef __CUDACC__
#include "llmc/ops/quantize/kernels.cuh"
#else
#include "llmc/ops/quantize/cpu.h"
#endif

#endif
