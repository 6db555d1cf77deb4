/* The loss of a span in a sequence: two classifications over its positions, for the span's first and last position.
 *
 *   x[k, t]       = logits[cu_seqlens[s] + t, k]                                k = 0: first position, 1: last one
 *   each[2 s + k] = log(sum over t of exp(x[k, t])) - x[k, targets[2 s + k]]
 *   sum           = (SET) or += (ADD) scale * the sum of each
 *   dlogits       = factor * (softmax(x[k])[t] - [t == targets[2 s + k]])       overwrites the logits
 *   factor        = scale * loss_scale[0]                                       loss_scale NULL: scale
 *
 * Shapes: logits [N, Kp] floatX of all N rows of S sequences, Kp >= 2; targets [2 S], positions in the sequence; losses
 * {each [2 S], sum [1], scale, mode}; loss_scale [1], in device memory. A target outside its sequence is ignored: loss
 * 0, gradients 0. The columns 2 .. Kp - 1 are padding: they are not read, and their gradient is 0.
 * Numerics: in double on the CPU, which runs the references, and in float on the GPU, in an order that depends only on
 * the sequence's length. Losses are added in double. A NaN logit makes its loss NaN.
 * Source: Devlin et al., "BERT: Pre-training of deep bidirectional transformers", 2018, section 4.2; the definition. */
#ifndef APPS_TUNE_SPAN_H
#define APPS_TUNE_SPAN_H

#include "llmc/base/sequences.h"
#include "llmc/ops/classifier/classifier.h"

enum { SPAN_ENDS = 2 };

// An exponential counts as one flop.
#define SPAN_FORWARD_FLOPS(N) (8.0 * (N))
#define SPAN_BACKWARD_FLOPS(N) (14.0 * (N))
#define SPAN_FORWARD_BYTES(N, S) (2.0 * (N) * sizeof(floatX) + (S) * (3 * sizeof(int) + 2 * sizeof(real)))
#define SPAN_BACKWARD_BYTES(N, S, Kp) (SPAN_FORWARD_BYTES(N, S) + 1.0 * (N) * (Kp) * sizeof(floatX))

static inline Scope span_scope(Context* ctx, Direction direction, const Sequences* s, int Kp) {
    int forward = direction == FORWARD, N = s->rows, S = s->count;
    CHECK(N > 0 && S > 0 && Kp >= SPAN_ENDS);
    return scope_open(ctx, forward ? "span_forward" : "span_backward",
                      forward ? SPAN_FORWARD_FLOPS(N) : SPAN_BACKWARD_FLOPS(N),
                      forward ? SPAN_FORWARD_BYTES(N, S) : SPAN_BACKWARD_BYTES(N, S, Kp), "N=%d S=%d Kp=%d", N, S, Kp);
}

// ---------------------------------------------------------------------------------------------------------
// References, which the CPU runs too: an end belongs to one thread. cu_seqlens [S + 1] is in host memory.

// The logarithm of the sum of the exponentials of x[0], x[Kp], ...
static inline double span_log_sum(const real* x, int length, int Kp) {
    double max = -INFINITY, sum = 0;
    for (int t = 0; t < length; t++) max = fmax(max, (double)x[(size_t)t * (size_t)Kp]);
    for (int t = 0; t < length; t++) sum += exp((double)x[(size_t)t * (size_t)Kp] - max);
    return max + log(sum);
}

static inline void span_forward_ref(Losses losses, const real* logits, const int* targets, const int* cu_seqlens, int S,
                                    int Kp) {
#pragma omp parallel for schedule(static)
    for (int i = 0; i < SPAN_ENDS * S; i++) {
        int begin = cu_seqlens[i / SPAN_ENDS], length = cu_seqlens[i / SPAN_ENDS + 1] - begin, target = targets[i];
        const real* x = logits + (size_t)begin * (size_t)Kp + i % SPAN_ENDS;
        int is_used = target >= 0 && target < length;
        losses.each[i] = is_used ? (real)(span_log_sum(x, length, Kp) - (double)x[(size_t)target * (size_t)Kp]) : 0;
    }
    losses_add_ref(losses, SPAN_ENDS * S);
}

static inline void span_backward_ref(Losses losses, real* logits, const int* targets, const real* loss_scale,
                                     const int* cu_seqlens, int S, int Kp) {
    double factor = losses.scale * (loss_scale ? (double)*loss_scale : 1);
    span_forward_ref(losses, logits, targets, cu_seqlens, S, Kp);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < SPAN_ENDS * S; i++) {
        int begin = cu_seqlens[i / SPAN_ENDS], length = cu_seqlens[i / SPAN_ENDS + 1] - begin, target = targets[i];
        real* x = logits + (size_t)begin * (size_t)Kp + i % SPAN_ENDS;
        double log_sum = span_log_sum(x, length, Kp);
        int is_used = target >= 0 && target < length;
        for (int t = 0; t < length; t++) {
            real* at = x + (size_t)t * (size_t)Kp;
            *at = is_used ? (real)(factor * (exp((double)*at - log_sum) - (t == target))) : 0;
        }
    }
    for (int n = 0; n < cu_seqlens[S]; n++)
        for (int k = SPAN_ENDS; k < Kp; k++) logits[(size_t)n * (size_t)Kp + (size_t)k] = 0;
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: one block per span end of a sequence. The last block to finish adds up all losses, as in classifier.h.

enum { SPAN_THREADS = 256 };

template <int IS_BACKWARD>
__global__ void __launch_bounds__(SPAN_THREADS)
    span_kernel(Losses losses, unsigned* arrivals, floatX* logits, const int* targets, const real* loss_scale,
                const int* cu_seqlens, int Kp) {
    int s = (int)blockIdx.x / SPAN_ENDS, k = (int)blockIdx.x % SPAN_ENDS, begin = cu_seqlens[s];
    int length = cu_seqlens[s + 1] - begin, target = targets[blockIdx.x], is_used = target >= 0 && target < length;
    floatX* x = logits + (size_t)begin * (size_t)Kp + k;
    ClassifierStatistics own = {.max = -FLT_MAX};
    for (int t = (int)threadIdx.x; t < length; t += SPAN_THREADS) {
        float logit = to_float(x[(size_t)t * (size_t)Kp]);
        classifier_add<1>(&own, &logit);
    }
    float max = block_max(own.max), sum = block_sum(own.sum * exp_approx(own.max - max));
    ClassifierStatistics all = {.max = max, .sum = sum};
    float loss = is_used ? classifier_loss_of(all, to_float(x[(size_t)target * (size_t)Kp])) : 0;
    if constexpr (IS_BACKWARD) {
        float scaled = (float)losses.scale * (loss_scale ? *loss_scale : 1), factor = scaled / sum;
        __syncthreads();  // the target's logit has been read
        for (int t = (int)threadIdx.x; t < length; t += SPAN_THREADS) {
            floatX* at = x + (size_t)t * (size_t)Kp;
            float e = exp_approx(to_float(*at) - max);
            *at = from_float<floatX>(!is_used ? 0 : t == target ? scaled * (e / sum - 1) : factor * e);
            for (int c = SPAN_ENDS; k == 0 && c < Kp; c++) at[c] = from_float<floatX>(0);
        }
    }
    classifier_add_losses(losses, classifier_put_loss(losses, loss, arrivals));
}

#endif

static inline void span_forward(Losses losses, const floatX* logits, const int* targets, const Sequences* s, int Kp,
                                Context* ctx) {
    Scope scope = span_scope(ctx, FORWARD, s, Kp);
#ifdef __CUDACC__
    span_kernel<0><<<blocks_for((size_t)s->count, 1) * SPAN_ENDS, SPAN_THREADS, 0, ctx->stream>>>(
        losses, ctx->arrivals, (floatX*)logits, targets, NULL, s->cu_seqlens, Kp);
    cudaCheck(cudaGetLastError());
#else
    span_forward_ref(losses, logits, targets, s->cu_seqlens, s->count, Kp);
#endif
    scope_close(&scope);
}

static inline void span_backward(Losses losses, floatX* logits, const int* targets, const real* loss_scale,
                                 const Sequences* s, int Kp, Context* ctx) {
    Scope scope = span_scope(ctx, BACKWARD, s, Kp);
#ifdef __CUDACC__
    span_kernel<1><<<blocks_for((size_t)s->count, 1) * SPAN_ENDS, SPAN_THREADS, 0, ctx->stream>>>(
        losses, ctx->arrivals, logits, targets, loss_scale, s->cu_seqlens, Kp);
    cudaCheck(cudaGetLastError());
#else
    span_backward_ref(losses, logits, targets, loss_scale, s->cu_seqlens, s->count, Kp);
#endif
    scope_close(&scope);
}

#endif
