/* Target rounding: correct dx for the rounding errors of the logits' gradients in fp8 at the targets.
 *
 *   left[n]     = factor * (exp(-each[n]) - 1) - inverse[0] * number(rounded[n, t])      t = targets[n]; 0 where t < 0
 *   dx[n]  (ADD) = left[n] * w[t]
 *
 * The first term is the gradient of the target's logit, from its loss (classifier.h).
 *
 * Shapes: dx [N, C], the bytes `rounded` [N, Vp] of dlogits in E5M2, inverse [1], w [Vp, C].
 *
 * Why: of the gradients p - [v == t] of a row, the target's is by far the largest, and E5M2 has no value between 0.875
 * and 1. The many small gradients are rounded up and down, so their errors cancel in dx = dlogits w. The target's error
 * does not cancel: it is the same for all tokens with a similar p at the target.
 *
 * Numerics: in real. On the GPU one warp per row. */
#ifndef LLMC_FP8_TARGET_ROUNDING_H
#define LLMC_FP8_TARGET_ROUNDING_H

#include "llmc/device/scope.h"
#include "llmc/fp8/quantize.h"  // LogitsGradient
#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif

typedef struct {
    LogitsGradient of;
    const uint8_t* rounded;
    const real* inverse;
    int Vp;
} RoundedLogits;

#define TARGET_ROUNDING_FLOPS(N, C) (2.0 * (N) * (C))
#define TARGET_ROUNDING_BYTES(N, C) (3.0 * (N) * (C) * sizeof(floatX))

// The rounding error of the target's entry of row n.
HOST_DEVICE static inline real target_rounding_left(RoundedLogits d, size_t n, int target) {
    size_t at = n * (size_t)d.Vp + (size_t)target;
    real factor = logits_gradient_factor(d.of), loss = d.of.losses.each[n];
    real exact = factor * (sizeof(real) == sizeof(float) ? (real)expm1f((float)-loss) : (real)expm1((double)-loss));
    return exact - *d.inverse * (real)fp8_to_float(d.rounded[at], FP8_E5M2);
}

// ---------------------------------------------------------------------------------------------------------
// Reference

// each: the losses in host memory.
static inline void target_rounding_ref(real* dx, const real* each, RoundedLogits d, const real* w, int N, int C) {
    for (size_t n = 0; n < (size_t)N; n++) {
        if (d.of.targets[n] < 0) continue;
        size_t target = (size_t)d.of.targets[n], at = n * (size_t)d.Vp + target;
        double left = (double)logits_gradient_factor(d.of) * expm1(-(double)each[n]) -
                      (double)*d.inverse * (double)fp8_to_float(d.rounded[at], FP8_E5M2);
        for (size_t c = 0; c < (size_t)C; c++) {
            real* to = &dx[n * (size_t)C + c];
            *to = (real)((double)*to + left * (double)w[target * (size_t)C + c]);
        }
    }
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: one warp per row

enum { TARGET_ROUNDING_THREADS = 256 };

template <int W>
static __global__ void __launch_bounds__(TARGET_ROUNDING_THREADS)
    target_rounding_kernel(floatX* dx, RoundedLogits d, const floatX* w, int N, int C) {
    int n = (int)(blockIdx.x * (TARGET_ROUNDING_THREADS / WARP) + threadIdx.x / WARP);
    if (n >= N || d.of.targets[n] < 0) return;
    int target = d.of.targets[n];
    float left = target_rounding_left(d, (size_t)n, target);
    const floatX* from = w + (size_t)target * C;
    floatX* to = dx + (size_t)n * C;
    for (int c = threadIdx.x % WARP * W; c < C; c += WARP * W) {
        float sum[W], row[W];
        to_floats(sum, load_vector<W>(to + c));
        to_floats(row, load_vector<W>(from + c));
#pragma unroll
        for (int k = 0; k < W; k++) sum[k] += left * row[k];
        store_vector(to + c, from_floats<floatX, W>(sum));
    }
}

#endif

COMPILED_IF_CALLED static inline void target_rounding(floatX* dx, RoundedLogits d, const floatX* w, int N, int C,
                                                      Context* ctx) {
    CHECK(N >= 0 && C > 0 && d.Vp > 0);
    if (!N) return;
    Scope scope = scope_open(ctx, "target_rounding", TARGET_ROUNDING_FLOPS(N, C), TARGET_ROUNDING_BYTES(N, C),
                             "N=%d C=%d Vp=%d", N, C, d.Vp);
#ifdef __CUDACC__
    auto kernel =
        rows_are_vectors<floatX>(C) ? target_rounding_kernel<Vector<floatX>::SIZE> : target_rounding_kernel<1>;
    unsigned blocks = blocks_for((size_t)N, TARGET_ROUNDING_THREADS / WARP);
    kernel<<<blocks, TARGET_ROUNDING_THREADS, 0, ctx->stream>>>(dx, d, w, N, C);
    cudaCheck(cudaGetLastError());
#else
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        if (d.of.targets[n] < 0) continue;
        real left = target_rounding_left(d, (size_t)n, d.of.targets[n]);
        const floatX* from = w + (size_t)d.of.targets[n] * (size_t)C;
        floatX* to = dx + (size_t)n * (size_t)C;
#pragma omp simd
        for (int c = 0; c < C; c++) to[c] += left * from[c];
    }
#endif
    scope_close(&scope);
}

#endif
