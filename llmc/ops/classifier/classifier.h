/* The loss at the end of the network: softmax and cross-entropy in one pass over the logits.
 *
 *   lse[n]      = log(sum over v < V of exp(logits[n, v]))
 *   each[n]     = lse[n] - logits[n, targets[n]]
 *   sum         = (SET) or += (ADD) scale * (each[0] + ... + each[N - 1])       the loss; the host need not wait for it
 *   dlogits     = factor * (exp(logits[n, v] - lse[n]) - [v == targets[n]])     overwrites the logits
 *   factor      = scale * loss_scale[0]                                         loss_scale NULL: scale
 *
 * Shapes: logits [N, Vp], targets [N], losses {each [N], sum [1], scale, mode}, loss_scale [1]. A target below 0 is
 * ignored: its loss and its gradients are 0. The columns V .. Vp - 1 are padding. They are not in the softmax, their
 * gradient is 0, and classifier_forward does not read them. classifier_backward writes
 * d(loss_scale * scale * sum of each) / dlogits. The losses do not include loss_scale. loss_scale is in device memory,
 * so that dynamic loss scaling (ops/common/loss_scale.h) can change it without the host.
 * Numerics: exponentials in real, after subtracting the row's maximum. On the CPU they are summed in real over blocks
 * of 512; the sum of the blocks and the logarithm are in double. On the GPU all are in float, with a partial sum per
 * thread. The losses are added in double, in an order that depends only on N. A NaN or +inf among a row's logits always
 * makes its loss NaN. In fp16 too large a factor makes gradients infinite, and too small a factor makes them 0.
 * Source: the definition; the usual fusion of softmax, loss and gradient. */
#ifndef LLMC_OPS_CLASSIFIER_H
#define LLMC_OPS_CLASSIFIER_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/losses.h"
#include "llmc/ops/common/vector_math.h"
#ifdef __CUDACC__
#include <cfloat>
#include <cuda_pipeline_primitives.h>

#include "llmc/device/cuda_utils.cuh"
#endif

// An exponential counts as one flop.
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

static inline void classifier_forward_ref(Losses losses, const real* logits, const int* targets, int N, int V, int Vp) {
    for (int n = 0; n < N; n++) {
        const real* x = logits + (size_t)n * (size_t)Vp;
        double max, sum = classifier_sum_ref(&max, x, V);
        losses.each[n] = targets[n] < 0 ? 0 : (real)(max + log(sum) - (double)x[targets[n]]);
    }
    losses_add_ref(losses, N);
}

static inline void classifier_backward_ref(Losses losses, real* logits, const int* targets, const real* loss_scale,
                                           int N, int V, int Vp) {
    double factor = losses.scale * (loss_scale ? (double)*loss_scale : 1);
    classifier_forward_ref(losses, logits, targets, N, V, Vp);
    for (int n = 0; n < N; n++) {
        real* x = logits + (size_t)n * (size_t)Vp;
        double max, sum = classifier_sum_ref(&max, x, V);
        for (int v = 0; v < Vp; v++) {
            int used = targets[n] >= 0 && v < V;
            x[v] = used ? (real)(factor * (exp((double)x[v] - max) / sum - (v == targets[n]))) : 0;
        }
    }
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: one block per row. The last block to finish its loss adds up the losses of all rows. Each thread tracks the
// maximum and the sum of its own elements as it reads them. If the row fits in shared memory, the backward kernel
// copies it there in the first pass (STAGED), and its second pass reads nothing from global memory. A thread stages and
// rereads only its own elements. WIDTH is 1 if rows are not aligned to 16 bytes.

enum { CLASSIFIER_COPIES_AHEAD = 8, CLASSIFIER_THREADS = 512 };

// sum: the sum of exp(x - max) over the elements so far. A NaN or +inf makes it NaN for good.
typedef struct {
    float max, sum;
} ClassifierStatistics;

template <int COUNT> __device__ inline void classifier_add(ClassifierStatistics* s, const float* x) {
    float max = s->max, sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) max = fmaxf(max, x[i]);
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum += exp_approx(x[i] - max);
    s->sum = s->sum * exp_approx(s->max - max) + sum;
    s->max = max;
}

// Maximum and sum of a row, the same in all threads. If STAGED, `staged` gets the row's whole vectors.
template <int WIDTH, int STAGED>
__device__ inline ClassifierStatistics classifier_statistics(Vector<floatX, WIDTH>* staged, const floatX* x, int V) {
    ClassifierStatistics s = {.max = -FLT_MAX};  // not -inf: exp(-inf + inf) would be NaN where a logit is -inf
    int vectors = V / WIDTH, threads = blockDim.x;
    float f[WIDTH];
    if constexpr (STAGED) {
#pragma unroll
        for (int k = 0; k < CLASSIFIER_COPIES_AHEAD; k++) {
            int i = threadIdx.x + k * threads;
            if (i < vectors) __pipeline_memcpy_async(staged + i, x + (size_t)i * WIDTH, sizeof *staged);
            __pipeline_commit();
        }
        for (int i = threadIdx.x; i < vectors; i += threads) {
            int ahead = i + CLASSIFIER_COPIES_AHEAD * threads;
            if (ahead < vectors) __pipeline_memcpy_async(staged + ahead, x + (size_t)ahead * WIDTH, sizeof *staged);
            __pipeline_commit();
            __pipeline_wait_prior(CLASSIFIER_COPIES_AHEAD);  // so vector i has arrived
            to_floats(f, staged[i]);
            classifier_add<WIDTH>(&s, f);
        }
    } else {
#pragma unroll 4
        for (int i = threadIdx.x; i < vectors; i += threads) {
            to_floats(f, load_vector<WIDTH>(x + (size_t)i * WIDTH));
            classifier_add<WIDTH>(&s, f);
        }
    }
    for (int v = vectors * WIDTH + threadIdx.x; v < V; v += threads) {
        f[0] = to_float(x[v]);
        classifier_add<1>(&s, f);
    }
    float max = block_max(s.max);
    s.sum = block_sum(s.sum * exp_approx(s.max - max));
    s.max = max;
    return s;
}

__device__ inline float classifier_loss_of(ClassifierStatistics s, float at_target) {
    return s.max - at_target + logf(s.sum);
}

// Write the loss of the block's row. Returns, in the thread that writes it, the number of losses written before. That
// thread is in the last warp, which has fewer elements left to process than the first. The number is used later, so no
// thread waits for it here.
__device__ inline unsigned classifier_put_loss(Losses losses, float loss, unsigned* arrivals) {
    if (threadIdx.x != blockDim.x - 1) return 0xffffffffu;
    losses.each[blockIdx.x] = loss;
    __threadfence();
    return atomicInc(arrivals, gridDim.x - 1);
}

// The last block to finish adds up the losses of all rows: a warp takes one of WARP pieces at a time. The order of the
// additions depends only on the number of rows.
__device__ inline void classifier_add_losses(Losses losses, unsigned before) {
    __shared__ double of_piece[WARP];
    if (!__syncthreads_or(before == gridDim.x - 1)) return;
    __threadfence();
    int rows = (int)gridDim.x, size = (rows + WARP - 1) / WARP, lane = threadIdx.x % WARP;
    for (int piece = threadIdx.x / WARP; piece < WARP; piece += blockDim.x / WARP) {
        int end = min((piece + 1) * size, rows);
        double sum = 0;
#pragma unroll 8
        for (int n = piece * size + lane; n < end; n += WARP) sum += (double)losses.each[n];
        sum = warp_sum(sum);
        if (lane == 0) of_piece[piece] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    double sum = losses.scale * warp_sum(of_piece[lane]);
    if (lane == 0) *losses.sum = (real)(losses.mode == ADD ? (double)*losses.sum + sum : sum);
}

// One block per row.
template <int WIDTH>
__global__ void __launch_bounds__(2 * CLASSIFIER_THREADS)
    classifier_forward_kernel(Losses losses, unsigned* arrivals, const floatX* logits, const int* targets, int V,
                              int Vp) {
    const floatX* x = logits + (size_t)blockIdx.x * (size_t)Vp;
    int target = targets[blockIdx.x];
    float loss = 0;
    if (target >= 0) {
        float at_target = to_float(x[target]);
        loss = classifier_loss_of(classifier_statistics<WIDTH, 0>(NULL, x, V), at_target);
    }
    classifier_add_losses(losses, classifier_put_loss(losses, loss, arrivals));
}

// One block per row.
template <int WIDTH, int STAGED>
__global__ void __launch_bounds__(2 * CLASSIFIER_THREADS)
    classifier_backward_kernel(Losses losses, unsigned* arrivals, floatX* logits, const int* targets,
                               const real* loss_scale, int V, int Vp) {
    extern __shared__ int4 classifier_shared[];
    Vector<floatX, WIDTH>* staged = (Vector<floatX, WIDTH>*)classifier_shared;
    floatX* x = logits + (size_t)blockIdx.x * (size_t)Vp;
    int target = targets[blockIdx.x], vectors = target < 0 ? 0 : V / WIDTH, threads = blockDim.x;
    int used = target < 0 ? 0 : V, rest = vectors * WIDTH;
    ClassifierStatistics s = {.max = 0, .sum = 1};
    float f[WIDTH], loss = 0, at_target = 0, scaled = (float)losses.scale * (loss_scale ? *loss_scale : 1);
    if (target >= 0) {
        at_target = to_float(x[target]);  // all threads read it before any of them writes
        s = classifier_statistics<WIDTH, STAGED>(staged, x, V);
        loss = classifier_loss_of(s, at_target);
    }
    unsigned before = classifier_put_loss(losses, loss, arrivals);

    float factor = scaled / s.sum;
#pragma unroll 2
    for (int i = threadIdx.x; i < vectors; i += threads) {
        floatX* p = x + (size_t)i * WIDTH;
        if constexpr (STAGED) to_floats(f, staged[i]);
        else to_floats(f, load_vector<WIDTH>(p));
#pragma unroll
        for (int k = 0; k < WIDTH; k++) f[k] = factor * exp_approx(f[k] - s.max);
        store_vector(p, from_floats<floatX, WIDTH>(f));
    }
    for (int v = rest + threadIdx.x; v < Vp; v += threads)
        x[v] = from_float<floatX>(v < used ? factor * exp_approx(to_float(x[v]) - s.max) : 0);
    // The thread that wrote the target's element corrects it.
    int writer = target < rest ? target / WIDTH % threads : (target - rest) % threads;
    if (target >= 0 && (int)threadIdx.x == writer)
        x[target] = from_float<floatX>(scaled * (exp_approx(at_target - s.max) / s.sum - 1));
    classifier_add_losses(losses, before);
}

// Threads per block for rows of V elements. alone: only one block fits on a multiprocessor.
static inline unsigned classifier_threads(int V, int width, int alone) {
    size_t most = alone ? 2 * CLASSIFIER_THREADS : CLASSIFIER_THREADS;
    return (unsigned)min_size(most, round_up((size_t)V / (size_t)width + 1, WARP));
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU: a work item is a row. Maximum and sum are computed in CLASSIFIER_LANES lanes, so that the loops vectorize, in an
// order that depends only on V.

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

// The sum over v < V of exp(x[v] - max). `exponentials`, if not NULL, gets the exponentials; it may be x.
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

#endif

static inline void classifier_forward(Losses losses, const floatX* logits, const int* targets, int N, int V, int Vp,
                                      Context* ctx) {
    Scope scope = scope_open(ctx, "classifier_forward", CLASSIFIER_FORWARD_FLOPS(N, V), CLASSIFIER_FORWARD_BYTES(N, V),
                             "N=%d V=%d Vp=%d", N, V, Vp);
#ifdef __CUDACC__
    const int WIDTH = Vector<floatX>::SIZE;
    int vectors = rows_are_vectors<floatX>(Vp);
    auto kernel = vectors ? classifier_forward_kernel<WIDTH> : classifier_forward_kernel<1>;
    kernel<<<blocks_for(N, 1), classifier_threads(V, vectors ? WIDTH : 1, 0), 0, ctx->stream>>>(losses, ctx->arrivals,
                                                                                                logits, targets, V, Vp);
    cudaCheck(cudaGetLastError());
#else
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const floatX* x = logits + (size_t)n * (size_t)Vp;
        losses.each[n] = 0;
        if (targets[n] < 0) continue;
        real max = classifier_maximum(x, V);
        losses.each[n] = (real)((double)max + log(classifier_sum(NULL, x, V, max)) - (double)x[targets[n]]);
    }
    losses_add_ref(losses, N);
#endif
    scope_close(&scope);
}

static inline void classifier_backward(Losses losses, floatX* logits, const int* targets, const real* loss_scale, int N,
                                       int V, int Vp, Context* ctx) {
    Scope scope = scope_open(ctx, "classifier_backward", CLASSIFIER_BACKWARD_FLOPS(N, V),
                             CLASSIFIER_BACKWARD_BYTES(N, V, Vp), "N=%d V=%d Vp=%d", N, V, Vp);
#ifdef __CUDACC__
    // margin: shared memory besides the row, for reductions and the system's reserve per block.
    const int WIDTH = Vector<floatX>::SIZE;
    size_t row = (size_t)V * sizeof(floatX), margin = 2048;
    int vectors = rows_are_vectors<floatX>(Vp), staged = vectors && row + margin <= ctx->shared_of_block;
    int alone = staged && 2 * (row + margin) > ctx->shared_of_multiprocessor;
    auto kernel = vectors ? classifier_backward_kernel<WIDTH, 0> : classifier_backward_kernel<1, 0>;
    if (staged) kernel = classifier_backward_kernel<WIDTH, 1>;
    if (staged) kernel_allow_shared(kernel, row, ctx);
    kernel<<<blocks_for(N, 1), classifier_threads(V, vectors ? WIDTH : 1, alone), staged ? row : 0, ctx->stream>>>(
        losses, ctx->arrivals, logits, targets, loss_scale, V, Vp);
    cudaCheck(cudaGetLastError());
#else
    double scaled = (double)(real)losses.scale * (loss_scale ? (double)*loss_scale : 1);
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* x = logits + (size_t)n * (size_t)Vp;
        int target = targets[n], used = target < 0 ? 0 : V;
        losses.each[n] = 0;
        if (used) {
            real max = classifier_maximum(x, V), at_target = x[target];
            double sum = classifier_sum(x, x, V, max);
            losses.each[n] = (real)((double)max + log(sum) - (double)at_target);
            real factor = (real)(scaled / sum);
            real of_target = (real)(scaled * ((double)x[target] / sum - 1));
            for (int v = 0; v < V; v++) x[v] *= factor;
            x[target] = of_target;
        }
        memset(x + used, 0, (size_t)(Vp - used) * sizeof *x);
    }
    losses_add_ref(losses, N);
#endif
    scope_close(&scope);
}

#endif
