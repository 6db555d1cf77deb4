/* Linear layers with ReLU and dropout, on top of llmc/ops/matmul.
 *
 *   forward          h = dropout(relu(x w^T + b))               x [N, IC], w [OC, IC], b [OC], h [N, OC]
 *   backward input   dz = (dy w) * scale where h > 0, else 0     dy [N, OC], h, dz [N, IC]: h is the layer's input, itself
 *                    an output of ReLU and dropout with 1 / (1 - p) = scale
 *                    db [IC] = column sums of dz: the bias gradient of the layer below
 *   biases           db = column sums of dz, where dz comes from elsewhere
 *
 * Modes: all outputs are SET. dtypes: floatX, gradients of biases real. The backward pass needs no mask of dropout: an
 * element is positive if ReLU and dropout both let it through.
 * Dropout: element c of sample n is kept if 16 random bits are >= threshold. A Philox call gives the bits of eight
 * neighbouring channels: counters (c / 8, n), key of (seed, step, layer, site). p is rounded to a multiple of 2^-16.
 * Numerics: those of matmul. On Hopper with 16-bit floatX and without dropout, ReLU or its mask and the column sums are in the
 * product's own kernel (matmul_relu_hopper.cuh). Else ReLU is in cuBLASLt's epilogue, or a kernel follows the product. Its DRELU
 * epilogue is not used: it is a kernel of its own, five times slower than ours.
 * Source: the definition; dropout as in torch.nn.functional.dropout (inverted). */
#ifndef DEV_RECSYS_OPS_MATMUL_RELU_H
#define DEV_RECSYS_OPS_MATMUL_RELU_H

#include "llmc/base/rng.h"
#include "llmc/ops/matmul/matmul.h"

// Dropout of one layer. threshold 0 keeps everything.
typedef struct {
    uint64_t key, first;  // first: number in the whole step of the batch's first sample
    uint32_t threshold;   // of 16 bits
    float scale;
} ReluDropout;

// A layer's output.
typedef struct {
    floatX* h;    // [N, OC]
    float scale;  // of the dropout
} ReluOutput;

// The gradient of what goes into a ReLU, and its column sums.
typedef struct {
    floatX* dz;
    real* db;
} ReluGrads;

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

static inline void matmul_relu_backward_bias(real* db, const floatX* dz, int N, int OC, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_relu_backward_bias", 0, 0, "N=%d OC=%d", N, OC);
#pragma omp parallel for schedule(static)
    for (int c = 0; c < OC; c++) {
        double sum = 0;
        for (int n = 0; n < N; n++) sum += (double)dz[(size_t)n * (size_t)OC + (size_t)c];
        db[c] = (real)sum;
    }
    scope_close(&scope);
}

// `h`: the layer's input, as the layer below keeps it; h.h NULL: there is no ReLU below, and no db.
static inline void matmul_relu_backward_input(ReluGrads d, const floatX* dy, const floatX* w, ReluOutput h, int N,
                                              int IC, int OC, Context* ctx) {
    matmul_backward_input(d.dz, dy, w, N, IC, OC, SET, ctx);
    if (!h.h) return;
    Scope scope = scope_open(ctx, "relu_mask", 1.0 * N * IC, 3.0 * N * IC * sizeof(floatX), "N=%d IC=%d", N, IC);
    relu_mask(d.dz, h.h, (real)h.scale, (size_t)N * (size_t)IC);
    scope_close(&scope);
    matmul_relu_backward_bias(d.db, d.dz, N, IC, ctx);
}
#endif
#endif
