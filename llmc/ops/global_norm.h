/* The global gradient norm, and the values that depend on it: norm = sqrt(sum over i of g[i]^2).
 *
 *   forward    norm [1] from g [n]. The same launch then calls after_norm() (ops/common/adam.h), which updates the loss
 *              scale, divides norm by the scale of g, and computes the values that all elements of the update share.
 *   squares    sum [1] = sum over i of g[i]^2 over one rank's shard of the gradient, to be all-reduced
 *   finish     norm [1] = sqrt(sum), then after_norm()
 *
 * dtypes     g and norm real, sum double.
 * numerics   squares and sums in double, in blocks of GLOBAL_NORM_BLOCK elements. Their order depends only on n, so the
 *            result has the same bits for any number of threads. Sharding g changes the norm only by the rounding of
 *            these sums. A NaN or infinity in g makes the norm NaN or infinite. */
#ifndef LLMC_OPS_GLOBAL_NORM_H
#define LLMC_OPS_GLOBAL_NORM_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/adam.h"

#define GLOBAL_NORM_BLOCK 16384
#define GLOBAL_NORM_LANES 16

#define GLOBAL_NORM_FORWARD_FLOPS(n) (2.0 * (double)(n))
#define GLOBAL_NORM_FORWARD_BYTES(n) ((double)(n) * sizeof(real))

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void global_norm_forward_ref(real* norm, const real* g, size_t n, AfterNorm after) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)g[i] * (double)g[i];
    *norm = (real)sqrt(sum);
    after_norm(after, norm);
}

// Called by one thread on the device.
HOST_DEVICE static inline void global_norm_from(real* norm, double sum, AfterNorm after) {
    *norm = (real)sqrt(sum);
    after_norm(after, norm);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: each block sums GLOBAL_NORM_BLOCK elements, and the last block to arrive adds these sums. The order of all sums
// depends only on n.

enum { GLOBAL_NORM_THREADS = 512 };

// Each block sums GLOBAL_NORM_BLOCK elements. Its threads load four adjacent elements at a time. Returns true in
// exactly one thread of the grid, in the last block; only there *total is the sum.
__device__ inline bool global_norm_sum(double* total, double* partial, unsigned* arrivals, const real* g, size_t n) {
    const int VECTORS = GLOBAL_NORM_BLOCK / (4 * GLOBAL_NORM_THREADS);
    size_t start = (size_t)blockIdx.x * GLOBAL_NORM_BLOCK;
    double sum = 0;
    if (start + GLOBAL_NORM_BLOCK <= n) {
        Vector<real> x[VECTORS];
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
            x[k] = load128_streaming(g + start + 4 * (k * GLOBAL_NORM_THREADS + threadIdx.x));
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum += (double)x[k].v[i] * (double)x[k].v[i];
    } else {
        for (size_t i = start + threadIdx.x; i < n; i += GLOBAL_NORM_THREADS) sum += (double)g[i] * (double)g[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
    if (!last_to_arrive(arrivals, gridDim.x)) return false;

    sum = 0;
#pragma unroll 8
    for (unsigned i = threadIdx.x; i < gridDim.x; i += GLOBAL_NORM_THREADS) sum += partial[i];
    *total = block_sum(sum);
    return threadIdx.x == 0;
}

static __global__ void __launch_bounds__(GLOBAL_NORM_THREADS)
    global_norm_forward_kernel(real* norm, double* partial, unsigned* arrivals, const real* g, size_t n,
                               AfterNorm after) {
    double sum;
    if (global_norm_sum(&sum, partial, arrivals, g, n)) global_norm_from(norm, sum, after);
}

static __global__ void __launch_bounds__(GLOBAL_NORM_THREADS)
    global_norm_squares_kernel(double* sum, double* partial, unsigned* arrivals, const real* g, size_t n) {
    double total;
    if (global_norm_sum(&total, partial, arrivals, g, n)) *sum = total;
}

static __global__ void global_norm_finish_kernel(real* norm, const double* sum, AfterNorm after) {
    global_norm_from(norm, *sum, after);
}

static inline unsigned global_norm_blocks(size_t n) { return n ? blocks_for(n, GLOBAL_NORM_BLOCK) : 1; }

#else
// ---------------------------------------------------------------------------------------------------------
// CPU

// Sum of squares of n elements in a fixed order that vectorizes: lane k adds the elements k, k + lanes, ...
static inline double global_norm_block(const real* g, size_t n) {
    double lane[GLOBAL_NORM_LANES] = {0}, sum = 0;
    size_t i = 0;
    for (; i + GLOBAL_NORM_LANES <= n; i += GLOBAL_NORM_LANES) {
#pragma omp simd
        for (int k = 0; k < GLOBAL_NORM_LANES; k++) lane[k] += (double)g[i + (size_t)k] * (double)g[i + (size_t)k];
    }
    for (int k = 0; i < n; i++, k++) lane[k] += (double)g[i] * (double)g[i];
    for (int k = 0; k < GLOBAL_NORM_LANES; k++) sum += lane[k];
    return sum;
}

static inline double global_norm_sum(const real* g, size_t n, Context* ctx) {
    size_t blocks = (n + GLOBAL_NORM_BLOCK - 1) / GLOBAL_NORM_BLOCK;
    double* partial = (double*)device_scratch(ctx, blocks * sizeof(double));
    double sum = 0;
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < blocks; b++) {
        size_t start = b * GLOBAL_NORM_BLOCK;
        partial[b] = global_norm_block(g + start, min_size(GLOBAL_NORM_BLOCK, n - start));
    }
    for (size_t b = 0; b < blocks; b++) sum += partial[b];
    return sum;
}

#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers

static inline void global_norm_forward(real* norm, const real* g, size_t n, AfterNorm after, Context* ctx) {
    Scope scope =
        scope_open(ctx, "global_norm_forward", GLOBAL_NORM_FORWARD_FLOPS(n), GLOBAL_NORM_FORWARD_BYTES(n), "n=%zu", n);
#ifdef __CUDACC__
    unsigned blocks = global_norm_blocks(n);
    double* partial = (double*)device_scratch(ctx, blocks * sizeof(double));
    global_norm_forward_kernel<<<blocks, GLOBAL_NORM_THREADS, 0, ctx->stream>>>(norm, partial, ctx->arrivals, g, n,
                                                                                after);
    cudaCheck(cudaGetLastError());
#else
    global_norm_from(norm, global_norm_sum(g, n, ctx), after);
#endif
    scope_close(&scope);
}

// sum is on the device. g is a shard of n elements; n may be 0.
static inline void global_norm_squares(double* sum, const real* g, size_t n, Context* ctx) {
    Scope scope =
        scope_open(ctx, "global_norm_squares", GLOBAL_NORM_FORWARD_FLOPS(n), GLOBAL_NORM_FORWARD_BYTES(n), "n=%zu", n);
#ifdef __CUDACC__
    unsigned blocks = global_norm_blocks(n);
    double* partial = (double*)device_scratch(ctx, blocks * sizeof(double));
    global_norm_squares_kernel<<<blocks, GLOBAL_NORM_THREADS, 0, ctx->stream>>>(sum, partial, ctx->arrivals, g, n);
    cudaCheck(cudaGetLastError());
#else
    *sum = global_norm_sum(g, n, ctx);
#endif
    scope_close(&scope);
}

// sum is the sum of squares over all shards. Ranks with the same sum get the same results.
static inline void global_norm_finish(real* norm, const double* sum, AfterNorm after, Context* ctx) {
    Scope scope = scope_open(ctx, "global_norm_finish", 0, sizeof(double) + sizeof(real), "n=1");
#ifdef __CUDACC__
    global_norm_finish_kernel<<<1, 1, 0, ctx->stream>>>(norm, sum, after);
    cudaCheck(cudaGetLastError());
#else
    global_norm_from(norm, *sum, after);
#endif
    scope_close(&scope);
}

#endif
