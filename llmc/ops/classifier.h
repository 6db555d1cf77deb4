/* The loss at the end of the network: softmax and cross-entropy in one pass over the logits.
 *
 *   lse[n]      = log(sum over v < V of exp(logits[n, v]))
 *   losses[n]   = lse[n] - logits[n, targets[n]]
 *   dlogits     = scale * (exp(logits[n, v] - lse[n]) - [v == targets[n]])      written over the logits
 *
 * Shapes: logits [N, Vp], targets [N], losses [N]. A target below 0 is ignored: its loss and its gradients are
 * 0. The columns V .. Vp - 1 are padding: outside the softmax, with gradient 0 (classifier_forward does not look
 * at them). classifier_backward leaves d(scale * sum of losses) / dlogits.
 * Numerics: exponentials in real, less the row's maximum; their sum in real over blocks of 512, the blocks and
 * the logarithm in double. A NaN or +inf among a row's logits makes its loss NaN; it is never hidden.
 * Source: the definition; the usual fusion of softmax, loss and gradient. */
#ifndef LLMC_CLASSIFIER_H
#define LLMC_CLASSIFIER_H

#include "../device/scope.h"
#include "../device/vector_math.h"

// An exponential counts as one operation.
#define CLASSIFIER_FORWARD_FLOPS(N, V) (4.0 * (N) * (V))
#define CLASSIFIER_BACKWARD_FLOPS(N, V) (5.0 * (N) * (V))
#define CLASSIFIER_FORWARD_BYTES(N, V) (1.0 * (N) * (V) * sizeof(floatX) + (N) * (sizeof(int) + sizeof(real)))
#define CLASSIFIER_BACKWARD_BYTES(N, V, Vp) (CLASSIFIER_FORWARD_BYTES(N, V) + 1.0 * (N) * (Vp) * sizeof(floatX))

// ---------------------------------------------------------------------------------------------------------
// References

// The sum over v < V of exp(x[v] - max), and the maximum.
static inline double classifier_sum_ref(double* max, const real* x, int V) {
    double sum = 0;
    *max = -INFINITY;
    for (int v = 0; v < V; v++) *max = fmax(*max, (double)x[v]);
    for (int v = 0; v < V; v++) sum += exp((double)x[v] - *max);
    return sum;
}

static inline void classifier_forward_ref(real* losses, const real* logits, const int* targets, int N, int V, int Vp) {
    for (int n = 0; n < N; n++) {
        const real* x = logits + (size_t)n * (size_t)Vp;
        double max, sum = classifier_sum_ref(&max, x, V);
        losses[n] = targets[n] < 0 ? 0 : (real)(max + log(sum) - (double)x[targets[n]]);
    }
}

static inline void classifier_backward_ref(real* losses, real* logits, const int* targets, int N, int V, int Vp,
                                           real scale) {
    classifier_forward_ref(losses, logits, targets, N, V, Vp);
    for (int n = 0; n < N; n++) {
        real* x = logits + (size_t)n * (size_t)Vp;
        double max, sum = classifier_sum_ref(&max, x, V);
        for (int v = 0; v < Vp; v++) {
            int used = targets[n] >= 0 && v < V;
            x[v] = used ? (real)((double)scale * (exp((double)x[v] - max) / sum - (v == targets[n]))) : 0;
        }
    }
}

#ifndef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// CPU: a work item is a row. Maximum and sum go through CLASSIFIER_LANES lanes, in an order that depends on V
// alone, and the loops vectorise.

enum { CLASSIFIER_LANES = 16, CLASSIFIER_BLOCK = 512 };

static inline real classifier_maximum(const floatX* x, int V) {
    real lane[CLASSIFIER_LANES], max;
    int v = 0;
    for (int j = 0; j < CLASSIFIER_LANES; j++) lane[j] = -INFINITY;
    for (; v + CLASSIFIER_LANES <= V; v += CLASSIFIER_LANES)
        for (int j = 0; j < CLASSIFIER_LANES; j++) lane[j] = x[v + j] > lane[j] ? x[v + j] : lane[j];
    for (; v < V; v++) lane[0] = x[v] > lane[0] ? x[v] : lane[0];
    max = lane[0];
    for (int j = 1; j < CLASSIFIER_LANES; j++) max = lane[j] > max ? lane[j] : max;
    return max;
}

// The sum over v < V of exp(x[v] - max). The exponentials are left in `exponentials` (may be x) unless NULL.
static inline double classifier_sum(floatX* exponentials, const floatX* x, int V, real max) {
    real e[CLASSIFIER_BLOCK];
    double sum = 0;
    for (int v0 = 0; v0 < V; v0 += CLASSIFIER_BLOCK) {
        int n = min_int(CLASSIFIER_BLOCK, V - v0);
        real lane[CLASSIFIER_LANES] = {0};
        for (int v = 0; v < n; v++) e[v] = real_exp(x[v0 + v] - max);
        for (int v = n; v % CLASSIFIER_LANES; v++) e[v] = 0;
        for (int v = 0; v < n; v += CLASSIFIER_LANES)
            for (int j = 0; j < CLASSIFIER_LANES; j++) lane[j] += e[v + j];
        for (int j = 0; j < CLASSIFIER_LANES; j++) sum += (double)lane[j];
        if (exponentials) memcpy(exponentials + v0, e, (size_t)n * sizeof *e);
    }
    return sum;
}

static inline void classifier_forward(real* losses, const floatX* logits, const int* targets, int N, int V, int Vp,
                                      Context* ctx) {
    Scope scope = scope_open(ctx, "classifier_forward", CLASSIFIER_FORWARD_FLOPS(N, V), CLASSIFIER_FORWARD_BYTES(N, V),
                             "N=%d V=%d Vp=%d", N, V, Vp);
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const floatX* x = logits + (size_t)n * (size_t)Vp;
        losses[n] = 0;
        if (targets[n] < 0) continue;
        real max = classifier_maximum(x, V);
        losses[n] = (real)((double)max + log(classifier_sum(NULL, x, V, max)) - (double)x[targets[n]]);
    }
    scope_close(&scope);
}

static inline void classifier_backward(real* losses, floatX* logits, const int* targets, int N, int V, int Vp,
                                       real scale, Context* ctx) {
    Scope scope = scope_open(ctx, "classifier_backward", CLASSIFIER_BACKWARD_FLOPS(N, V),
                             CLASSIFIER_BACKWARD_BYTES(N, V, Vp), "N=%d V=%d Vp=%d", N, V, Vp);
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* x = logits + (size_t)n * (size_t)Vp;
        int target = targets[n], used = target < 0 ? 0 : V;
        losses[n] = 0;
        if (used) {
            real max = classifier_maximum(x, V), at_target = x[target];
            double sum = classifier_sum(x, x, V, max);
            losses[n] = (real)((double)max + log(sum) - (double)at_target);
            real factor = (real)((double)scale / sum);
            real of_target = (real)((double)scale * ((double)x[target] / sum - 1));
            for (int v = 0; v < V; v++) x[v] *= factor;
            x[target] = of_target;
        }
        memset(x + used, 0, (size_t)(Vp - used) * sizeof *x);
    }
    scope_close(&scope);
}
#endif

#endif
