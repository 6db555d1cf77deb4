/* fp8_scales: delayed scaling. The scale of an fp8 tensor in the next step follows from its amax in the last 16 steps.
 *
 *   measure  scale and inverse of tensor t from one amax, in the first steps;  measured.amax = 0
 *   record   history [step % 16, t] = stats[t].amax;  recorded[t] = stats[t], scale[t];  stats[t] = 0
 *   update   amax = max over the 16 steps of history [., t]
 *            scale[t] = 2^floor(log2(largest(format[t]) / (2 amax))),  inverse [t, 0] = 1 / scale[t]
 *
 * Between record and update, the new row of history is all-reduced (max), so that all ranks get the same scales. The
 * factor 2 leaves room for larger elements than in the last steps. Scales are powers of two, so scaling is exact for
 * values that stay in the format's range.
 *
 * Steps without a record (0, before the first step) and steps whose amax is not finite are ignored. If all are ignored,
 * the scale stays. In the first steps, while the history is short, each tensor is measured just before it is quantized.
 *
 * dtypes     history uint32: the bits of non-negative floats, which are ordered like the floats; scale and inverse
 *            real, within 2^-126 to 2^126.
 * shapes     all arrays [count]; history [FP8_HISTORY, count]; inverse [count, FP8_INVERSE_APART], because cuBLASLt
 *            requires scales aligned to 16 bytes. count may be 0. All are on the device.
 * numerics   exact: only exponents are computed.
 * state      a checkpoint has to hold history and scale.
 * source     Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433; the window is a design choice. */
#ifndef LLMC_FP8_SCALES_H
#define LLMC_FP8_SCALES_H

#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif
#include "llmc/device/scope.h"
#include "llmc/fp8/format.h"

enum { FP8_HISTORY = 16, FP8_SCALE_EXPONENT = 126, FP8_INVERSE_APART = 4 };

// A tensor's statistics in one step, and the scale of its last conversion.
typedef struct {
    Fp8Stats stats;
    real scale;
} Fp8Recorded;

typedef struct {
    int count;  // tensors
    const Fp8Format* format;
    Fp8Stats* stats;        // of the running step
    Fp8Recorded* recorded;  // of the last step, for reports
    uint32_t* history;
    real *scale, *inverse;
} Fp8Scales;

#define FP8_SCALES_RECORD_BYTES(count) ((double)(count) * (3.0 * sizeof(Fp8Stats) + 2 * sizeof(real) + 4))
#define FP8_SCALES_UPDATE_BYTES(count) ((double)(count) * (4.0 * FP8_HISTORY + sizeof(Fp8Format) + 2 * sizeof(real)))

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void fp8_scales_update_ref(Fp8Scales s) {
    for (int t = 0; t < s.count; t++) {
        float amax = 0;
        for (int i = 0; i < FP8_HISTORY; i++) {
            float seen;
            memcpy(&seen, &s.history[i * s.count + t], sizeof seen);
            if (isfinite(seen) && seen > amax) amax = seen;
        }
        if (amax == 0) continue;
        double exponent = floor(log2((double)fp8_largest(s.format[t]) / (2 * (double)amax)));
        s.scale[t] = (real)exp2(fmin(exponent, FP8_SCALE_EXPONENT));
        s.inverse[t * FP8_INVERSE_APART] = 1 / s.scale[t];
    }
}

// ---------------------------------------------------------------------------------------------------------
// One tensor, on the CPU and the GPU

HOST_DEVICE static inline void fp8_scales_record_one(Fp8Scales s, int64_t step, int t) {
    const Fp8Stats none = {0, 0, 0};
    s.history[(size_t)(step % FP8_HISTORY) * (size_t)s.count + (size_t)t] = s.stats[t].amax;
    s.recorded[t].stats = s.stats[t], s.recorded[t].scale = s.scale[t];
    s.stats[t] = none;
}

// 2^exponent
HOST_DEVICE static inline real fp8_power_of_two(int exponent) {
    uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return (real)power;
}

// The largest value of both formats is 1.75 times a power of two, 2^8 or 2^15. So the quotient's exponent is the
// difference of the exponents, minus one if the fraction of amax exceeds 0.75.
HOST_DEVICE static inline void fp8_scales_set_one(Fp8Scales s, uint32_t amax, int t) {
    if (amax == 0) return;
    int largest = s.format[t] == FP8_E4M3 ? 8 : 15;
    int exponent = largest - 1 - ((int)(amax >> 23) - 127) - ((amax & 0x7fffffu) > 0x600000u);
    if (exponent > FP8_SCALE_EXPONENT) exponent = FP8_SCALE_EXPONENT;
    s.scale[t] = fp8_power_of_two(exponent);
    s.inverse[t * FP8_INVERSE_APART] = fp8_power_of_two(-exponent);
}

HOST_DEVICE static inline void fp8_scales_update_one(Fp8Scales s, int t) {
    uint32_t amax = 0;
    for (int i = 0; i < FP8_HISTORY; i++) {
        uint32_t seen = s.history[(size_t)i * (size_t)s.count + (size_t)t];
        if (seen < 0x7f800000u && seen > amax) amax = seen;
    }
    fp8_scales_set_one(s, amax, t);
}

// In the first steps: set the scale of tensor t from one measurement, and reset the measurement.
HOST_DEVICE static inline void fp8_scales_measure_one(Fp8Scales s, Fp8Stats* measured, int t) {
    fp8_scales_set_one(s, measured->amax < 0x7f800000u ? measured->amax : 0, t);
    measured->amax = 0;
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: one thread per tensor

enum { FP8_SCALES_THREADS = 128 };

static __global__ void fp8_scales_record_kernel(Fp8Scales s, int64_t step) {
    int t = blockIdx.x * FP8_SCALES_THREADS + threadIdx.x;
    if (t < s.count) fp8_scales_record_one(s, step, t);
}

static __global__ void fp8_scales_update_kernel(Fp8Scales s) {
    int t = blockIdx.x * FP8_SCALES_THREADS + threadIdx.x;
    if (t < s.count) fp8_scales_update_one(s, t);
}

static __global__ void fp8_scales_measure_kernel(Fp8Scales s, Fp8Stats* measured, int t) {
    fp8_scales_measure_one(s, measured, t);
}

#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers

COMPILED_IF_CALLED static inline void fp8_scales_record(Fp8Scales s, int64_t step, Context* ctx) {
    CHECK(step >= 0 && s.count >= 0);
    if (!s.count) return;
    Scope scope = scope_open(ctx, "fp8_scales_record", 0, FP8_SCALES_RECORD_BYTES(s.count), "n=%d", s.count);
#ifdef __CUDACC__
    unsigned blocks = blocks_for((size_t)s.count, FP8_SCALES_THREADS);
    fp8_scales_record_kernel<<<blocks, FP8_SCALES_THREADS, 0, ctx->stream>>>(s, step);
    cudaCheck(cudaGetLastError());
#else
    for (int t = 0; t < s.count; t++) fp8_scales_record_one(s, step, t);
#endif
    scope_close(&scope);
}

COMPILED_IF_CALLED static inline void fp8_scales_measure(Fp8Scales s, Fp8Stats* measured, int t, Context* ctx) {
    CHECK(t >= 0 && t < s.count);
    Scope scope = scope_open(ctx, "fp8_scales_measure", 0, FP8_SCALES_RECORD_BYTES(1), "tensor=%d", t);
#ifdef __CUDACC__
    fp8_scales_measure_kernel<<<1, 1, 0, ctx->stream>>>(s, measured, t);
    cudaCheck(cudaGetLastError());
#else
    fp8_scales_measure_one(s, measured, t);
#endif
    scope_close(&scope);
}

COMPILED_IF_CALLED static inline void fp8_scales_update(Fp8Scales s, Context* ctx) {
    if (!s.count) return;
    Scope scope = scope_open(ctx, "fp8_scales_update", 0, FP8_SCALES_UPDATE_BYTES(s.count), "n=%d", s.count);
#ifdef __CUDACC__
    unsigned blocks = blocks_for((size_t)s.count, FP8_SCALES_THREADS);
    fp8_scales_update_kernel<<<blocks, FP8_SCALES_THREADS, 0, ctx->stream>>>(s);
    cudaCheck(cudaGetLastError());
#else
    for (int t = 0; t < s.count; t++) fp8_scales_update_one(s, t);
#endif
    scope_close(&scope);
}

#endif
