/* Squared error, the regression loss: each sequence has one output and one target value.
 *
 *   each[n]     = (logits[n, 0] - targets[n])^2
 *   sum         = (SET) or += (ADD) scale * (each[0] + ... + each[N - 1])
 *   dlogits     = factor * 2 * (logits[n, 0] - targets[n])                      written over the logits
 *   factor      = scale * loss_scale[0]                                         loss_scale NULL: scale
 *
 * Shapes: logits [N, Kp], targets [N], losses {each [N], sum [1], scale, mode}, loss_scale [1] on the device. A target
 * holds the bits of a float (squared_error_bits()), so that it fits the int type of class targets. A NaN target is
 * ignored: loss 0, gradient 0. Columns 1 .. Kp - 1 are padding and are not read; their gradient is 0.
 * Numerics: differences and squares in real, their sum in double, in an order that depends only on N.
 * Source: the definition. With scale 1 / N it is the loss of Hugging Face's models with num_labels = 1 (torch's
 * MSELoss). */
#ifndef APPS_TUNE_SQUARED_ERROR_H
#define APPS_TUNE_SQUARED_ERROR_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/losses.h"
#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif

#define SQUARED_ERROR_FLOPS(N) (5.0 * (N))
#define SQUARED_ERROR_BYTES(N, Kp) ((N) * ((1.0 + (Kp)) * sizeof(floatX) + sizeof(int) + sizeof(real)))

// Convert a value to a target, and back. The int -1, which means "no class", is a NaN.
static inline int squared_error_bits(double x) {
    float value = (float)x;
    int bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline double squared_error_target(int bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void squared_error_ref(Losses losses, real* logits, const int* targets, const real* loss_scale, int N,
                                     int Kp, Direction direction) {
    double factor = losses.scale * (loss_scale ? (double)*loss_scale : 1);
    for (int n = 0; n < N; n++) {
        real* x = logits + (size_t)n * (size_t)Kp;
        double target = squared_error_target(targets[n]), error = isnan(target) ? 0 : (double)*x - target;
        losses.each[n] = (real)(error * error);
        if (direction == FORWARD) continue;
        *x = (real)(factor * 2 * error);
        for (int k = 1; k < Kp; k++) x[k] = 0;
    }
    losses_add_ref(losses, N);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: one warp, because a micro-batch has few sequences. Each lane computes every WARP-th sequence.

static __global__ void squared_error_kernel(Losses losses, floatX* logits, const int* targets, const real* loss_scale,
                                            int N, int Kp, int is_backward) {
    float factor = (float)losses.scale * (loss_scale ? (float)*loss_scale : 1);
    double sum = 0;
    for (int n = (int)threadIdx.x; n < N; n += WARP) {
        floatX* x = logits + (size_t)n * (size_t)Kp;
        float target = __int_as_float(targets[n]), error = isnan(target) ? 0 : to_float(*x) - target;
        losses.each[n] = error * error;
        sum += (double)losses.each[n];
        if (!is_backward) continue;
        *x = from_float<floatX>(factor * 2 * error);
        for (int k = 1; k < Kp; k++) x[k] = from_float<floatX>(0);
    }
    sum = losses.scale * warp_sum(sum);
    if (threadIdx.x == 0) *losses.sum = (real)(losses.mode == ADD ? (double)*losses.sum + sum : sum);
}
#endif

// Compute the losses. BACKWARD also overwrites the logits with the gradient, multiplied by *loss_scale; FORWARD only
// reads them.
static inline void squared_error(Losses losses, floatX* logits, const int* targets, const real* loss_scale, int N,
                                 int Kp, Direction direction, Context* ctx) {
    Scope scope = scope_open(ctx, direction == FORWARD ? "squared_error_forward" : "squared_error_backward",
                             SQUARED_ERROR_FLOPS(N), SQUARED_ERROR_BYTES(N, Kp), "N=%d Kp=%d", N, Kp);
#ifdef __CUDACC__
    squared_error_kernel<<<1, WARP, 0, ctx->stream>>>(losses, logits, targets, loss_scale, N, Kp,
                                                      direction == BACKWARD);
    cudaCheck(cudaGetLastError());
#else
    squared_error_ref(losses, logits, targets, loss_scale, N, Kp, direction);  // N is small
#endif
    scope_close(&scope);
}

#endif
