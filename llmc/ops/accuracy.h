/* How often the most likely class is the right one.
 *
 *   hits[n] = 1 where logits[n, targets[n]] is the largest of logits[n, 0 .. V - 1], the first of equal ones; else 0
 *
 * Shapes: logits [N, Vp] floatX, targets [N], hits [N] real. A target below 0 is ignored: 0. The columns V .. Vp - 1 are
 * padding and not looked at. Numerics: comparisons; exact. A row with a NaN is no hit. */
#ifndef LLMC_ACCURACY_H
#define LLMC_ACCURACY_H

#include "../device/scope.h"

#define ACCURACY_FORWARD_FLOPS(N, V) (1.0 * (N) * (V))
#define ACCURACY_FORWARD_BYTES(N, V) (1.0 * (N) * (V) * sizeof(floatX))

static inline void accuracy_forward_ref(real* hits, const real* logits, const int* targets, int N, int V, int Vp) {
    for (int n = 0; n < N; n++) {
        const real* x = logits + (size_t)n * (size_t)Vp;
        int target = targets[n], beaten = target < 0;
        for (int v = 0; v < V && !beaten; v++) beaten = v < target ? !(x[v] < x[target]) : !(x[v] <= x[target]);
        hits[n] = (real)!beaten;
    }
}

#ifdef __CUDACC__

enum { ACCURACY_THREADS = 256 };

// A block a row: is any other logit larger than the target's, or equal to it and before it?
__global__ static void accuracy_forward_kernel(real* hits, const floatX* logits, const int* targets, int V, int Vp) {
    const floatX* x = logits + (size_t)blockIdx.x * (size_t)Vp;
    int target = targets[blockIdx.x], beaten = target < 0;
    float best = beaten ? 0 : (float)x[target];
    for (int v = (int)threadIdx.x; v < V && !beaten; v += ACCURACY_THREADS) {
        float other = (float)x[v];
        beaten = v < target ? !(other < best) : !(other <= best);
    }
    beaten = __syncthreads_or(beaten);
    if (threadIdx.x == 0) hits[blockIdx.x] = (real)!beaten;
}

static inline void accuracy_forward(real* hits, const floatX* logits, const int* targets, int N, int V, int Vp,
                                    Context* ctx) {
    Scope scope = scope_open(ctx, "accuracy_forward", ACCURACY_FORWARD_FLOPS(N, V), ACCURACY_FORWARD_BYTES(N, V),
                             "N=%d V=%d", N, V);
    accuracy_forward_kernel<<<(unsigned)N, ACCURACY_THREADS, 0, ctx->stream>>>(hits, logits, targets, V, Vp);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

#else

static inline void accuracy_forward(real* hits, const floatX* logits, const int* targets, int N, int V, int Vp,
                                    Context* ctx) {
    Scope scope = scope_open(ctx, "accuracy_forward", ACCURACY_FORWARD_FLOPS(N, V), ACCURACY_FORWARD_BYTES(N, V),
                             "N=%d V=%d", N, V);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) accuracy_forward_ref(hits + n, logits + (size_t)n * (size_t)Vp, targets + n, 1, V, Vp);
    scope_close(&scope);
}

#endif

#endif
