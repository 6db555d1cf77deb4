/* linear_decode: a linear layer for the newest token of each of N texts, fused with the ops around it.
 *
 *   y [N, OC] (SET or ADD) = f(u w^T + b)       u [N, IC] = x, or layernorm(x); f: identity, or GELU
 *
 * All arrays are floatX; modes and layouts are those of ops/matmul/matmul.h and ops/layernorm/layernorm.h.
 * Numerics: on the GPU, sums are in float, u is rounded to floatX, and GELU reads the sum before it is rounded.
 * Cost: memory-bound; each weight is read once. A kernel of ours computes rows one by one, up to LINEAR_DECODE_ROWS in
 * 16 bits and any number in fp32, where a text thus has the same bits alone and in a batch. More rows, and the CPU, take
 * the ops that it stands for. */
#ifndef APPS_USE_LINEAR_DECODE_H
#define APPS_USE_LINEAR_DECODE_H

#include "apps/use/decode.h"
#include "llmc/ops/layernorm/layernorm.h"
#include "llmc/ops/matmul/matmul.h"

// What is fused. All zero: y (SET) = x w^T + b.
typedef struct {
    Mode mode;        // ADD is for a layer without GELU
    LayerNorm norm;   // of x; w NULL: none
    floatX *u, *pre;  // memory [N, IC] for u, if there is a norm, and [N, OC] for GELU's input; pre NULL: no GELU
    LayerNormStats stats;
    Gelu gelu;
    real eps;
} LinearFusion;

#ifdef __CUDACC__

enum {
    LINEAR_DECODE_THREADS = 256,
    LINEAR_DECODE_LOADS = 4,   // vectors of weights that a lane has in flight
    LINEAR_DECODE_BLOCKS = 3,  // of a multiprocessor
    LINEAR_DECODE_AHEAD = 2,   // outputs of a warp whose weights are on their way to the L2 cache
    LINEAR_DECODE_ROWS = 4,
    LINEAR_DECODE_BYTES = 40 << 10  // of a row of u: a block has 48 KB without asking for more
};

typedef struct {
    floatX* y;
    const floatX* x;
    Linear p;
    LinearSize z;
    LinearFusion f;
    LayerNormArgs norm;
} LinearDecodeArgs;

static inline int linear_decode_takes(LinearSize z) {
    return (size_t)z.IC * sizeof(floatX) <= LINEAR_DECODE_BYTES && (sizeof(floatX) == 4 || z.N <= LINEAR_DECODE_ROWS);
}

// Bring `bytes` from `from` on, both multiples of 16, to the L2 cache.
__device__ inline void prefetch_to_l2(const void* from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

// Bring the cache line at `from` to the L1 cache.
__device__ inline void prefetch_to_l1(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }

// The weights of output o.
template <int W> __device__ inline void linear_decode_prefetch(const LinearDecodeArgs& a, int o) {
    if (W > 1 && o < a.z.OC && threadIdx.x % WARP == 0)
        prefetch_to_l2(a.p.w + (size_t)o * (size_t)a.z.IC, (unsigned)a.z.IC * (unsigned)sizeof(floatX));
}

// This thread's columns of the layernorm's parameters.
template <int W> __device__ inline void linear_decode_prefetch_norm(const LinearDecodeArgs& a) {
    for (int c = threadIdx.x * W; a.f.norm.w && c < a.z.IC; c += LINEAR_DECODE_THREADS * W) {
        prefetch_to_l1(a.norm.w + c);
        prefetch_to_l1(a.norm.b + c);
    }
}

// Row n of u. A thread reads only what it wrote.
template <int W> __device__ inline void linear_decode_input(floatX* u, const LinearDecodeArgs& a, int n) {
    const int IC = a.z.IC, first = threadIdx.x * W, step = LINEAR_DECODE_THREADS * W;
    float v[W], sum = 0, sum_sq = 0;
    for (int c = first; c < IC; c += step) {
        Vector<floatX, W> x = load_vector<W>(a.x + (size_t)n * (size_t)IC + c);
        store_vector<W>(u + c, x);
        to_floats(v, x);
#pragma unroll
        for (int k = 0; k < W; k++) sum += v[k];
    }
    if (a.f.norm.w) {
        float mean = block_sum(sum) / (float)IC;
        for (int c = first; c < IC; c += step) {
            to_floats(v, load_vector<W>(u + c));
#pragma unroll
            for (int k = 0; k < W; k++) sum_sq += (v[k] - mean) * (v[k] - mean);
        }
        float rstd = rsqrtf(block_sum(sum_sq) / (float)IC + (float)a.f.eps);
        for (int c = first; c < IC; c += step) {
            to_floats(v, load_vector<W>(u + c));
            store_vector<W>(u + c, layernorm_forward_vector<W>(v, a.norm, make_float2(mean, rstd), c));
        }
    }
    __syncthreads();
}

// One warp per output at a time, a row per block. The first weights are on their way before the input is known.
template <int W>
__global__ void __launch_bounds__(LINEAR_DECODE_THREADS, LINEAR_DECODE_BLOCKS)
    linear_decode_kernel(const __grid_constant__ LinearDecodeArgs a) {
    constexpr int WARPS = LINEAR_DECODE_THREADS / WARP, LOADS = LINEAR_DECODE_LOADS;
    extern __shared__ int4 shared[];
    floatX* u = (floatX*)shared;
    const int IC = a.z.IC, OC = a.z.OC, n = blockIdx.x;
    const int first = blockIdx.y * WARPS + threadIdx.x / WARP, step = gridDim.y * WARPS;
    floatX* y = a.y + (size_t)n * (size_t)OC;
    Vector<floatX, W> w[LOADS];
    auto load = [&](int o, int from) {
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            if (from + i * WARP * W < IC && o < OC)
                w[i] = load_vector<W>(a.p.w + (size_t)o * (size_t)IC + from + i * WARP * W);
    };
    auto bias_of = [&](int o) { return a.p.b && o < OC ? to_float(a.p.b[o]) : 0; };
    auto old_of = [&](int o) { return a.f.mode == ADD && o < OC ? to_float(y[o]) : 0; };
    load(first, threadIdx.x % WARP * W);
    for (int i = 0; i < LINEAR_DECODE_AHEAD; i++) linear_decode_prefetch<W>(a, first + i * step);
    linear_decode_prefetch_norm<W>(a);
    float bias = bias_of(first);
    wait_for_earlier_kernels();
    float old = old_of(first);
    linear_decode_input<W>(u, a, n);
    for (int o = first; o < OC; o += step) {
        float next_bias = bias_of(o + step), next_old = old_of(o + step), sum = 0;
        linear_decode_prefetch<W>(a, o + LINEAR_DECODE_AHEAD * step);
        for (int from = threadIdx.x % WARP * W, c = 0; c < IC; c += LOADS * WARP * W, from += LOADS * WARP * W) {
            if (o > first || c > 0) load(o, from);
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                float wv[W], uv[W], part = 0;
                if (from + i * WARP * W >= IC) continue;
                to_floats(wv, w[i]);
                to_floats(uv, load_vector<W>(u + from + i * WARP * W));
#pragma unroll
                for (int k = 0; k < W; k++) part += wv[k] * uv[k];
                sum += part;
            }
        }
        sum = warp_sum(sum) + bias;
        if (a.f.pre) sum = gelu_value(sum, a.f.gelu);
        if (threadIdx.x % WARP == 0) y[o] = from_float<floatX>(old + sum);
        bias = next_bias, old = next_old;
    }
}

static inline void linear_decode_launch(const LinearDecodeArgs& a, Context* ctx) {
    constexpr int W = Vector<floatX>::SIZE, WARPS = LINEAR_DECODE_THREADS / WARP;
    unsigned blocks = blocks_for((size_t)a.z.OC, WARPS);
    unsigned rounds = blocks_for(blocks, (size_t)ctx->multiprocessors * LINEAR_DECODE_BLOCKS);
    auto kernel = rows_are_vectors<floatX>(a.z.IC) ? linear_decode_kernel<W> : linear_decode_kernel<1>;
    // Every warp has `rounds` outputs, or one less.
    decode_launch(kernel, dim3((unsigned)a.z.N, blocks_for(blocks, rounds)), LINEAR_DECODE_THREADS,
                  (size_t)a.z.IC * sizeof(floatX), ctx, a);
}

#endif

static inline void linear_decode(floatX* y, const floatX* x, Linear p, LinearSize z, LinearFusion f, Context* ctx) {
    CHECK(f.mode == SET || !f.pre);
#ifdef __CUDACC__
    if (linear_decode_takes(z)) {
        Scope scope = scope_open(ctx, "linear_decode", MATMUL_FLOPS(z.N, z.IC, z.OC),
                                 MATMUL_FORWARD_BYTES(z.N, z.IC, z.OC, f.mode), "N=%d IC=%d OC=%d", z.N, z.IC, z.OC);
        linear_decode_launch({y, x, p, z, f, {f.norm.w_fp32, f.norm.b}}, ctx);
        scope_close(&scope);
        return;
    }
#endif
    if (f.norm.w) layernorm_forward(f.u, f.stats, x, f.norm, (Rows){z.N, z.IC}, f.eps, ctx), x = f.u;
    if (f.pre) matmul_gelu_forward(y, f.pre, x, p, z.N, z.IC, z.OC, f.gelu, ctx);
    else matmul_forward(y, x, p, z.N, z.IC, z.OC, f.mode, ctx);
}

#endif
