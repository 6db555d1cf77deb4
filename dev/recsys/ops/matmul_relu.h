/* Linear layers with ReLU and dropout, on top of llmc/ops/matmul.
 *
 *   forward          h = dropout(relu(x w^T + b))               x [N, IC], w [OC, IC], b [OC], h [N, OC]
 *   backward input   dz = (dy w) * scale where h > 0, else 0     dy [N, OC], h, dz [N, IC]: h is the layer's input, itself
 *                    an output of ReLU and dropout with 1 / (1 - p) = scale
 *   biases           db = column sums of dz, for several layers in one launch
 *
 * Modes: all outputs are SET. dtypes: floatX, gradients of biases real. The backward pass needs no mask of dropout: an
 * element is positive if ReLU and dropout both let it through.
 * Dropout: element c of sample n is kept if 16 random bits are >= threshold. A Philox call gives the bits of eight
 * neighbouring channels: counters (c / 8, n), key of (seed, step, layer, site). p is rounded to a multiple of 2^-16.
 * Numerics: those of matmul. On the GPU ReLU and its derivative are in cuBLASLt's epilogue, which keeps one bit per element
 * in `mask`, if floatX has 16 bits and OC is a multiple of 128; else a kernel follows the product.
 * Source: the definition; dropout as in torch.nn.functional.dropout (inverted). */
#ifndef DEV_RECSYS_OPS_MATMUL_RELU_H
#define DEV_RECSYS_OPS_MATMUL_RELU_H

#include "llmc/base/rng.h"
#include "llmc/ops/matmul/matmul.h"

// Dropout of one layer. threshold 0 keeps everything.
typedef struct {
    uint64_t key, first;  // first: number in the whole step of this rank's first sample
    uint32_t threshold;   // of 16 bits
    float scale;
} ReluDropout;

// What a layer keeps of its output.
typedef struct {
    floatX* h;    // [N, OC]
    void* mask;   // [N * OC] bits for the GPU's epilogue; the CPU does not use them
    float scale;  // of the dropout
} ReluOutput;

typedef struct {
    real* db;
    const floatX* dz;
    int OC;
} BiasJob;

enum { BIAS_JOBS = 16 };  // at least the layers of two MLPs

static inline ReluDropout relu_dropout_make(double p, uint64_t key, uint64_t first) {
    ReluDropout d = {key, first, (uint32_t)(p * 65536 + 0.5), (float)(1 / (1 - p))};
    return d;
}

// The random bits of channels 8 * group .. 8 * group + 7 of sample n.
HOST_DEVICE static inline Philox relu_dropout_bits(ReluDropout d, uint64_t n, uint32_t group) {
    return philox(group, (uint32_t)(d.first + n), (uint32_t)((d.first + n) >> 32), 0, d.key);
}

HOST_DEVICE static inline int relu_dropout_keeps(ReluDropout d, Philox bits, int i) {
    return (bits.v[i / 2] >> 16 * (i % 2) & 0xffff) >= d.threshold;
}

// ---------------------------------------------------------------------------------------------------------
// References of the elementwise parts; the products have their own.

static inline void relu_dropout_ref(real* h, ReluDropout d, int N, int C) {
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c += 8) {
            real* x = h + (size_t)n * (size_t)C + (size_t)c;
            Philox bits = {{0, 0, 0, 0}};
            if (d.threshold) bits = relu_dropout_bits(d, (uint64_t)n, (uint32_t)c / 8);
            for (int i = 0; i < 8 && c + i < C; i++)
                x[i] = x[i] > 0 && relu_dropout_keeps(d, bits, i) ? x[i] * (real)d.scale : 0;
        }
}

static inline void relu_mask_ref(real* dz, const real* h, real scale, size_t n) {
    for (size_t i = 0; i < n; i++) dz[i] = h[i] > 0 ? scale * dz[i] : 0;
}

#ifdef __CUDACC__
#include "dev/recsys/ops/matmul_relu.cuh"
#else
// ---------------------------------------------------------------------------------------------------------
// CPU: the elementwise parts, a row or an element per thread

static inline void relu_dropout(real* h, ReluDropout d, int N, int C) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c += 8) {
            real* x = h + (size_t)n * (size_t)C + (size_t)c;
            Philox bits = {{0, 0, 0, 0}};
            if (d.threshold) bits = relu_dropout_bits(d, (uint64_t)n, (uint32_t)c / 8);
            for (int i = 0; i < 8 && c + i < C; i++)
                x[i] = x[i] > 0 && relu_dropout_keeps(d, bits, i) ? x[i] * (real)d.scale : 0;
        }
}

static inline void relu_mask(real* dz, const real* h, real scale, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) dz[i] = h[i] > 0 ? scale * dz[i] : 0;
}

static inline void matmul_relu_forward(ReluOutput out, const floatX* x, Linear p, int N, int IC, int OC, ReluDropout d,
                                       Context* ctx) {
    matmul_forward(out.h, x, p, N, IC, OC, SET, ctx);
    Scope scope = scope_open(ctx, "relu_dropout", 1.0 * N * OC, 2.0 * N * OC * sizeof(floatX), "N=%d OC=%d", N, OC);
    relu_dropout(out.h, d, N, OC);
    scope_close(&scope);
}

// `h`: the layer's input, as the layer below keeps it.
static inline void matmul_relu_backward_input(floatX* dz, const floatX* dy, const floatX* w, ReluOutput h, int N,
                                              int IC, int OC, Context* ctx) {
    matmul_backward_input(dz, dy, w, N, IC, OC, SET, ctx);
    Scope scope = scope_open(ctx, "relu_mask", 1.0 * N * IC, 3.0 * N * IC * sizeof(floatX), "N=%d IC=%d", N, IC);
    relu_mask(dz, h.h, (real)h.scale, (size_t)N * (size_t)IC);
    scope_close(&scope);
}

static inline void matmul_backward_biases(const BiasJob* jobs, int count, int N, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_backward_biases", 0, 0, "layers=%d N=%d", count, N);
    for (int j = 0; j < count; j++) {
#pragma omp parallel for schedule(static)
        for (int c = 0; c < jobs[j].OC; c++) {
            double sum = 0;
            for (int n = 0; n < N; n++) sum += (double)jobs[j].dz[(size_t)n * (size_t)jobs[j].OC + (size_t)c];
            jobs[j].db[c] = (real)sum;
        }
    }
    scope_close(&scope);
}
#endif
#endif
