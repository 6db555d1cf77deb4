/* Average: a moving average (EMA) of the weights, and swapping it with the weights.
 *
 *   update     average += rate (w - average);  w: the master weights, or params if there are none
 *   exchange   kept = params;  params = average          the average is to be evaluated or saved
 *   restore    params = kept
 *
 * dtypes     average and master real, params and kept floatX; n elements each. master may be NULL.
 * numerics   in real; with rate 1 an average of 0 becomes exactly w. exchange rounds to nearest.
 * bytes      per element: update 2 sizeof(real) and the bytes of w, exchange sizeof(real) + 3 sizeof(floatX) */
#ifndef LLMC_AVERAGE_AVERAGE_H
#define LLMC_AVERAGE_AVERAGE_H

#include "llmc/device/cuda_utils.cuh"
#include "llmc/device/scope.h"

#define AVERAGE_UPDATE_FLOPS(n) (3.0 * (n))
#define AVERAGE_UPDATE_BYTES(n, has_master)                                                                            \
    ((2.0 * sizeof(real) + ((has_master) ? sizeof(real) : sizeof(floatX))) * (n))
#define AVERAGE_EXCHANGE_BYTES(n) ((sizeof(real) + 3.0 * sizeof(floatX)) * (n))
#define AVERAGE_RESTORE_BYTES(n) (2.0 * sizeof(floatX) * (n))

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void average_update_ref(real* average, const real* w, size_t n, double rate) {
    for (size_t i = 0; i < n; i++) average[i] = (real)((double)average[i] + rate * ((double)w[i] - (double)average[i]));
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: one thread per element

enum { AVERAGE_THREADS = 256 };

static __global__ void __launch_bounds__(AVERAGE_THREADS)
    average_update_kernel(real* average, const floatX* params, const real* master, size_t n, real rate) {
    size_t i = (size_t)blockIdx.x * AVERAGE_THREADS + threadIdx.x;
    if (i >= n) return;
    real w = master ? master[i] : to_float(params[i]);
    average[i] += rate * (w - average[i]);
}

static __global__ void __launch_bounds__(AVERAGE_THREADS)
    average_exchange_kernel(floatX* params, floatX* kept, const real* average, size_t n) {
    size_t i = (size_t)blockIdx.x * AVERAGE_THREADS + threadIdx.x;
    if (i >= n) return;
    kept[i] = params[i];
    params[i] = from_float<floatX>(average[i]);
}
#endif

static inline void average_update(real* average, const floatX* params, const real* master, size_t n, double rate,
                                  Context* ctx) {
    Scope scope =
        scope_open(ctx, "average_update", AVERAGE_UPDATE_FLOPS(n), AVERAGE_UPDATE_BYTES(n, master != NULL), "n=%zu", n);
    real r = (real)rate;
    if (n > 0) {
#ifdef __CUDACC__
        average_update_kernel<<<blocks_for(n, AVERAGE_THREADS), AVERAGE_THREADS, 0, ctx->stream>>>(average, params,
                                                                                                   master, n, r);
        cudaCheck(cudaGetLastError());
#else
        const real* w = master ? master : params;
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < n; i++) average[i] += r * (w[i] - average[i]);
#endif
    }
    scope_close(&scope);
}

static inline void average_exchange(floatX* params, floatX* kept, const real* average, size_t n, Context* ctx) {
    Scope scope = scope_open(ctx, "average_exchange", 0, AVERAGE_EXCHANGE_BYTES(n), "n=%zu", n);
    if (n > 0) {
#ifdef __CUDACC__
        average_exchange_kernel<<<blocks_for(n, AVERAGE_THREADS), AVERAGE_THREADS, 0, ctx->stream>>>(params, kept,
                                                                                                     average, n);
        cudaCheck(cudaGetLastError());
#else
        memcpy(kept, params, n * sizeof *kept);
        memcpy(params, average, n * sizeof *params);
#endif
    }
    scope_close(&scope);
}

static inline void average_restore(floatX* params, const floatX* kept, size_t n, Context* ctx) {
    Scope scope = scope_open(ctx, "average_restore", 0, AVERAGE_RESTORE_BYTES(n), "n=%zu", n);
#ifdef __CUDACC__
    cudaCheck(cudaMemcpyAsync(params, kept, n * sizeof *params, cudaMemcpyDeviceToDevice, ctx->stream));
#else
    memcpy(params, kept, n * sizeof *params);
#endif
    scope_close(&scope);
}

#endif
