/* The sum of a small vector as one number where the ops run: a step's loss, without the host waiting for it.
 *
 *   forward   sum [1] = (SET) or += (ADD) scale * (x_0 + ... + x_{n-1})
 *
 * dtypes     sum and x real.
 * numerics   in double, in an order that depends on n alone.
 * work       n additions, n reals read. */
#ifndef LLMC_SUM_H
#define LLMC_SUM_H

#include "../device/scope.h"

#define SUM_FORWARD_FLOPS(n) ((double)(n))
#define SUM_FORWARD_BYTES(n) ((double)(n) * sizeof(real))

static inline void sum_forward_ref(real* sum, const real* x, int n, double scale, Mode mode) {
    double total = 0;
    for (int i = 0; i < n; i++) total += (double)x[i];
    *sum = (real)(scale * total + (mode == ADD ? (double)*sum : 0));
}

#ifdef __CUDACC__

enum { SUM_THREADS = 1024 };

// One block; thread t adds the elements t, t + 1024, ..., then the threads' sums are added as a tree.
__global__ static void sum_forward_kernel(real* sum, const real* x, int n, double scale, int add) {
    __shared__ double partial[SUM_THREADS];
    double total = 0;
    for (int i = threadIdx.x; i < n; i += SUM_THREADS) total += (double)x[i];
    partial[threadIdx.x] = total;
    __syncthreads();
    for (int half = SUM_THREADS / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *sum = (real)(scale * partial[0] + (add ? (double)*sum : 0));
}

static inline void sum_forward(real* sum, const real* x, int n, double scale, Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "sum_forward", SUM_FORWARD_FLOPS(n), SUM_FORWARD_BYTES(n), "n=%d", n);
    sum_forward_kernel<<<1, SUM_THREADS, 0, ctx->stream>>>(sum, x, n, scale, mode == ADD);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

#else

static inline void sum_forward(real* sum, const real* x, int n, double scale, Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "sum_forward", SUM_FORWARD_FLOPS(n), SUM_FORWARD_BYTES(n), "n=%d", n);
    sum_forward_ref(sum, x, n, scale, mode);
    scope_close(&scope);
}

#endif

#endif
