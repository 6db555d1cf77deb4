/* Accuracy: the number of rows whose most likely class is the correct one.
 *
 *   correct [1] = (SET) or += (ADD) the number of rows n where logits[n, targets[n]] is the largest of
 *               logits[n, 0 .. V - 1]; the first one wins ties
 *
 * Shapes: logits [N, Vp] floatX, targets [N], correct real. A row with a target below 0 is ignored and does not count.
 * Columns V .. Vp - 1 are padding and are not read. Numerics: comparisons and integer counts; exact. A row with a NaN
 * does not count. */
#ifndef LLMC_OPS_ACCURACY_H
#define LLMC_OPS_ACCURACY_H

#include "llmc/device/scope.h"

#define ACCURACY_FORWARD_FLOPS(N, V) (1.0 * (N) * (V))
#define ACCURACY_FORWARD_BYTES(N, V) (1.0 * (N) * (V) * sizeof(floatX))

static inline void accuracy_forward_ref(real* correct, const real* logits, const int* targets, int N, int V, int Vp,
                                        Mode mode) {
    int count = 0;
    for (int n = 0; n < N; n++) {
        const real* x = logits + (size_t)n * (size_t)Vp;
        int target = targets[n], beaten = target < 0;
        for (int v = 0; v < V && !beaten; v++) beaten = v < target ? !(x[v] < x[target]) : !(x[v] <= x[target]);
        count += !beaten;
    }
    *correct = (real)count + (mode == ADD ? *correct : 0);
}

#ifdef __CUDACC__

enum { ACCURACY_THREADS = 256 };

// One block per row checks whether any other logit is larger than the target's, or equal to it and before it.
// counters[1] counts the correct rows. Integer addition gives the same result in any order. The last block to arrive,
// according to counters[0], reads and clears the count. Both counters are 0 before and after the launch.
__global__ static void accuracy_forward_kernel(real* correct, unsigned* counters, const floatX* logits,
                                               const int* targets, int V, int Vp, Mode mode) {
    const floatX* x = logits + (size_t)blockIdx.x * (size_t)Vp;
    int target = targets[blockIdx.x], beaten = target < 0;
    float best = beaten ? 0 : (float)x[target];
    for (int v = (int)threadIdx.x; v < V && !beaten; v += ACCURACY_THREADS) {
        float other = (float)x[v];
        beaten = v < target ? !(other < best) : !(other <= best);
    }
    beaten = __syncthreads_or(beaten);
    if (threadIdx.x > 0) return;
    if (!beaten) atomicAdd(&counters[1], 1u);
    __threadfence();
    if (atomicInc(&counters[0], gridDim.x - 1) != gridDim.x - 1) return;
    __threadfence();
    *correct = (real)atomicExch(&counters[1], 0u) + (mode == ADD ? *correct : 0);
}

#endif

static inline void accuracy_forward(real* correct, const floatX* logits, const int* targets, int N, int V, int Vp,
                                    Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "accuracy_forward", ACCURACY_FORWARD_FLOPS(N, V), ACCURACY_FORWARD_BYTES(N, V),
                             "N=%d V=%d", N, V);
#ifdef __CUDACC__
    accuracy_forward_kernel<<<(unsigned)N, ACCURACY_THREADS, 0, ctx->stream>>>(correct, ctx->arrivals, logits, targets,
                                                                               V, Vp, mode);
    cudaCheck(cudaGetLastError());
#else
    int count = 0;
#pragma omp parallel for schedule(static) reduction(+ : count)
    for (int n = 0; n < N; n++) {
        real one;
        accuracy_forward_ref(&one, logits + (size_t)n * (size_t)Vp, targets + n, 1, V, Vp, SET);
        count += one != 0;
    }
    *correct = (real)count + (mode == ADD ? *correct : 0);
#endif
    scope_close(&scope);
}

#endif
