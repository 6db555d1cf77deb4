/* draw: the next token of each of N texts, drawn from its row of logits where these are, so that the next step need not
 * wait for the host.
 *
 *   token[n]     from logits [N, Vp], of which V count, by the rules of sampler_draw(); 0 if they are not finite
 *   drawn[count[n] % 2][n] = token[n], or DRAW_NOT_FINITE; the host reads it while the next step runs
 *   position[n] += 1, count[n] += 1
 *
 * Random numbers are keyed by the text and its count of tokens, so they do not depend on the batch.
 * Numerics: as on the host, weights in double. Their sums, in another order, differ in the last bits, so from the same
 * logits the host and the GPU draw the same tokens, but for a random number that hits the border of two. */
#ifndef APPS_USE_DRAW_H
#define APPS_USE_DRAW_H

#include "apps/use/decode.h"
#include "apps/use/sampler.h"
#include "llmc/base/rng.h"

enum { DRAW_NOT_FINITE = -1 };

// The newest tokens of N texts, in device memory but for `drawn`, which host and device see.
typedef struct {
    int *token, *position, *count;  // [N] each; count: tokens of the text, the next one's number
    uint64_t* key;                  // [N] streams of random numbers
    int* drawn[2];                  // [N] each
} Newest;

HOST_DEVICE static inline double draw_uniform(Newest t, int n) {
    return rng_uniform(philox((uint32_t)t.count[n], 0, 0, 0, t.key[n]).v[0]);
}

HOST_DEVICE static inline void draw_append(Newest t, int n, int token) {
    t.drawn[t.count[n]++ % 2][n] = token;
    t.token[n] = max_int(token, 0);
    t.position[n]++;
}

#ifdef __CUDACC__

// A logit's key orders as the logit does, and -0 is 0. The last bits are the same in all numbers of a 16-bit type.
enum { DRAW_BLOCK = 1024, DRAW_BITS = sizeof(floatX) == 2 ? 19 : 32 };

__device__ inline unsigned draw_key(floatX logit) {
    unsigned bits = __float_as_uint(to_float(logit) + 0.0f);
    return (bits >> 31 ? ~bits : bits | 1u << 31) >> (32 - DRAW_BITS);
}

// The first of n indices where the running sum of f exceeds `target`; the last one if there is none. Each warp sums a
// part of them, and the part in which the sum is reached is searched in the same way.
template <typename F> __device__ inline int draw_find(F f, int n, double target) {
    __shared__ double part[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int begin = 0, each = n;
    double before = 0;
    while (each > 1) {
        int end = min(begin + each, n), w = 0;
        double sum = 0;
        each = (each + WARP - 1) / WARP;
        for (int i = begin + warp * each + lane; i < min(begin + (warp + 1) * each, end); i += WARP) sum += f(i);
        sum = warp_sum(sum);
        __syncthreads();
        if (lane == 0) part[warp] = sum;
        __syncthreads();
        while (w < WARP - 1 && begin + (w + 1) * each < end && before + part[w] <= target) before += part[w++];
        begin += w * each;
    }
    return begin;
}

// sampler_keep(): set the weights of all tokens but those of the largest logits to 0. Returns the sum that is left.
__device__ inline double draw_keep(double* weight, const floatX* logits, int V, int most, double mass) {
    unsigned low = 0;  // the key of the smallest logit that is kept: the largest one down to which there are enough
    int count = 0;
    double sum = 0, left = 0;
    for (int bit = DRAW_BITS - 1; bit >= -1; bit--) {  // the last round counts those above it
        unsigned from = bit < 0 ? low + 1 : low | 1u << bit;
        count = 0, sum = 0;
        for (int i = threadIdx.x; i < V; i += DRAW_BLOCK)
            if (draw_key(logits[i]) >= from) count++, sum += mass < INFINITY ? weight[i] : 0;
        count = block_sum(count), sum = block_sum(sum);
        if (bit >= 0 && (count >= most || sum >= mass)) low = from;
    }
    // Of the equal ones the first. With the sum of `mass` reached exactly, none is added.
    auto tie = [&](int i) { return draw_key(logits[i]) != low ? 0 : mass < INFINITY ? weight[i] : 1; };
    int last = draw_find(tie, V, mass < INFINITY ? (mass - sum) * (1 - 1e-12) : most - count - 0.5);
    for (int i = threadIdx.x; i < V; i += DRAW_BLOCK) {
        unsigned key = draw_key(logits[i]);
        if (key < low || (key == low && i > last)) weight[i] = 0;
        left += weight[i];
    }
    return block_sum(left);
}

// One block per text.
__global__ void __launch_bounds__(DRAW_BLOCK, 1)
    draw_kernel(Newest t, const floatX* logits, double* weight, int V, int Vp, Sampler s) {
    const int n = blockIdx.x;
    wait_for_earlier_kernels();
    float largest = -INFINITY;
    double total = 0;
    int is_bad = 0, token;
    logits += (size_t)n * (size_t)Vp, weight += (size_t)n * (size_t)V;
    for (int i = threadIdx.x; i < V; i += DRAW_BLOCK) {
        float x = to_float(logits[i]);
        largest = fmaxf(largest, x), is_bad |= !isfinite(x);
    }
    is_bad = __syncthreads_or(is_bad), largest = block_max(largest);
    if (s.temperature <= 0 || s.top_k == 1) {
        token = draw_find([&](int i) { return to_float(logits[i]) == largest; }, V, 0.5);
    } else {
        for (int i = threadIdx.x; i < V; i += DRAW_BLOCK)
            total += weight[i] = sampler_exp(fmax((double)(to_float(logits[i]) - largest) / s.temperature, -700.0));
        total = block_sum(total);
        if (s.top_k > 0 && s.top_k < V) total = draw_keep(weight, logits, V, s.top_k, INFINITY);
        if (s.top_p > 0 && s.top_p < 1) total = draw_keep(weight, logits, V, V, s.top_p * total);
        token = draw_find([&](int i) { return weight[i]; }, V, draw_uniform(t, n) * total);
    }
    if (threadIdx.x == 0) draw_append(t, n, is_bad ? DRAW_NOT_FINITE : token);
}

#endif

static inline void draw(Newest t, const floatX* logits, int N, int V, int Vp, Sampler s, Context* ctx) {
    Scope scope = scope_open(ctx, "draw", 0, 1.0 * N * V * sizeof(floatX), "N=%d V=%d", N, V);
#ifdef __CUDACC__
    double* weight = (double*)device_scratch(ctx, (size_t)N * (size_t)V * sizeof(double));
    decode_launch(draw_kernel, dim3((unsigned)N), DRAW_BLOCK, 0, ctx, t, logits, weight, V, Vp, s);
#else
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const real* row = logits + (size_t)n * (size_t)Vp;
        int is_bad = 0;
        for (int v = 0; v < V; v++) is_bad |= !isfinite(row[v]);
        draw_append(t, n, is_bad ? DRAW_NOT_FINITE : sampler_draw(row, V, s, draw_uniform(t, n)));
    }
#endif
    scope_close(&scope);
}

#endif
