/* SGD without momentum, over a flat buffer: w -= lr * grads.
 *
 * Shapes: w, grads, params [n], n a multiple of 4; step [1]. dtypes: w and grads real. On the GPU w is the fp32 master
 * and params, floatX, gets it rounded to nearest; on the CPU params is w. step->is_taken 0: nothing is updated.
 * Numerics: elementwise in real. Source: the definition. */
#ifndef DEV_RECSYS_OPS_SGD_H
#define DEV_RECSYS_OPS_SGD_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/adam.h"

// The CPU runs it too.
static inline void sgd_update_ref(real* w, const real* grads, double lr, size_t n) {
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) w[i] -= (real)(lr * (double)grads[i]);
}

#ifdef __CUDACC__
// Each thread updates four adjacent elements.
static __global__ void sgd_update_kernel(floatX* params, real* w, const real* grads, const AdamWStep* step, float lr,
                                         size_t n) {
    size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n || !step->is_taken) return;
    Vector<real> x = load128(w + i), g = load128_streaming(grads + i);
#pragma unroll
    for (int k = 0; k < 4; k++) x.v[k] = fmaf(-lr, g.v[k], x.v[k]);
    store128(w + i, x);
    if constexpr (sizeof(floatX) < sizeof(real)) {
        Vector<floatX, 4> narrow = from_floats<floatX, 4>(x.v);
        *(int2*)(params + i) = *(const int2*)&narrow;
    }
}
#endif

static inline void sgd_update(floatX* params, real* w, const real* grads, const AdamWStep* step, double lr, size_t n,
                              Context* ctx) {
    Scope scope =
        scope_open(ctx, "sgd_update", 2.0 * (double)n, (double)n * (3 * sizeof(real) + sizeof(floatX)), "n=%zu", n);
#ifdef __CUDACC__
    sgd_update_kernel<<<blocks_for(n, 1024), 256, 0, ctx->stream>>>(params, w, grads, step, (float)lr, n);
    cudaCheck(cudaGetLastError());
#else
    (void)params;
    if (step->is_taken) sgd_update_ref(w, grads, lr, n);
#endif
    scope_close(&scope);
}

#endif
