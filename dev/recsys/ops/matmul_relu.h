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

#include "dev/recsys/ops/matmul_relu_hopper.cuh"
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
// References of the elementwise parts, which the CPU runs too. The products have their own.

static inline void relu_dropout_ref(real* h, ReluDropout d, int N, int C) {
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

static inline void relu_mask_ref(real* dz, const real* h, real scale, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) dz[i] = h[i] > 0 ? scale * dz[i] : 0;
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: products of matmul_relu_hopper.cuh, else cuBLASLt's with its ReLU epilogue or a kernel after the product; the
// ReLU's derivative and the column sums in one kernel

enum { RELU_THREADS = 256, RELU_GROUP = 8 };

// One thread for eight channels of a row, which share a Philox call.
static __global__ void relu_dropout_kernel(floatX* h, ReluDropout d, int N, int C) {
    int groups = (C + RELU_GROUP - 1) / RELU_GROUP;
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / groups;
    int c = (int)(i % groups) * RELU_GROUP;
    if (n >= (size_t)N) return;
    Philox bits = {{0, 0, 0, 0}};
    if (d.threshold) bits = relu_dropout_bits(d, n, (uint32_t)c / RELU_GROUP);
    floatX* x = h + n * C + c;
#pragma unroll
    for (int k = 0; k < RELU_GROUP; k++) {
        if (c + k >= C) break;
        float value = to_float(x[k]);
        x[k] = from_float<floatX>(value > 0 && relu_dropout_keeps(d, bits, k) ? value * d.scale : 0);
    }
}

// Runs the product with ReLU in its epilogue, if there is one for it. Returns whether it did.
static inline int matmul_relu_fused(ReluOutput out, const floatX* x, Linear p, int N, int IC, int OC, Context* ctx) {
#if defined(PRECISION_BF16) || defined(PRECISION_FP16)
    ReluProduct z = {out.h, p.b, NULL, NULL, N, OC, IC, NULL, NULL, 0};
    if (matmul_relu_hopper(z, x, p.w, FORWARD, ctx)) return 1;
#endif
    MatmulOperands o = {p.w, x, out.h, p.b, NULL, N};
    MatmulKey key = matmul_key(MATMUL_FORWARD, N, IC, OC, SET, ctx);
    key.epilogue = CUBLASLT_EPILOGUE_RELU_BIAS;
    return matmul_product(key, &o, ctx);
}

static inline void matmul_relu_forward(ReluOutput out, const floatX* x, Linear p, int N, int IC, int OC, ReluDropout d,
                                       Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_relu_forward", MATMUL_FLOPS(N, IC, OC), MATMUL_FORWARD_BYTES(N, IC, OC, SET),
                             "N=%d IC=%d OC=%d", N, IC, OC);
    if (d.threshold || d.scale != 1 || !matmul_relu_fused(out, x, p, N, IC, OC, ctx)) {
        MatmulOperands o = {p.w, x, out.h, p.b, NULL, N};
        matmul_product(matmul_key(MATMUL_FORWARD, N, IC, OC, SET, ctx), &o, ctx);
        unsigned blocks = blocks_for((size_t)N * ((OC + RELU_GROUP - 1) / RELU_GROUP), RELU_THREADS);
        relu_dropout_kernel<<<blocks, RELU_THREADS, 0, ctx->stream>>>(out.h, d, N, OC);
        cudaCheck(cudaGetLastError());
    }
    scope_close(&scope);
}

// ---------------------------------------------------------------------------------------------------------
// The mask and column sums

enum { RELU_SUM_WARPS = 16, RELU_SUM_ROWS = 4, RELU_SUM_BLOCKS = 132 };

// Grid: x is a tile of WARP * WIDTH columns, y a range of `span` rows. MASKED: dz is masked in place first. The last
// block of a tile to arrive adds the sums of all its blocks, partial [tiles, spans, WARP * WIDTH], in their order.
template <int WIDTH, bool MASKED>
__global__ void __launch_bounds__(RELU_SUM_WARPS* WARP, 2)
    relu_backward_kernel(ReluGrads d, ReluOutput h, float* partial, unsigned* arrivals, int N, int OC, int span) {
    constexpr int COLUMNS = WARP * WIDTH;
    __shared__ float sums[RELU_SUM_WARPS * COLUMNS];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, c = threadIdx.x;
    int first = (int)blockIdx.x * COLUMNS, column = first + lane * WIDTH;
    int begin = blockIdx.y * span, end = min(N, begin + span);
    float sum[WIDTH] = {0};
    for (int row = begin + warp; row < end && column < OC; row += RELU_SUM_WARPS * RELU_SUM_ROWS) {
        Vector<floatX, WIDTH> x[RELU_SUM_ROWS], below[RELU_SUM_ROWS];
#pragma unroll
        for (int k = 0; k < RELU_SUM_ROWS; k++) {  // all loads first
            size_t at = (size_t)min(row + k * RELU_SUM_WARPS, end - 1) * OC + column;
            x[k] = load_vector<WIDTH>(d.dz + at);
            if constexpr (MASKED) below[k] = load_vector<WIDTH>(h.h + at);
        }
#pragma unroll
        for (int k = 0; k < RELU_SUM_ROWS; k++) {
            int r = row + k * RELU_SUM_WARPS;
            float f[WIDTH];
            if (r >= end) break;
            to_floats(f, x[k]);
            if constexpr (MASKED) {
#pragma unroll
                for (int i = 0; i < WIDTH; i++) f[i] = to_float(below[k].v[i]) > 0 ? h.scale * f[i] : 0;
                x[k] = from_floats<floatX, WIDTH>(f);
                store_vector(d.dz + (size_t)r * OC + column, x[k]);
                to_floats(f, x[k]);
            }
#pragma unroll
            for (int i = 0; i < WIDTH; i++) sum[i] += f[i];
        }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sums[warp * COLUMNS + lane * WIDTH + i] = sum[i];
    __syncthreads();
    float total = 0;
    for (int w = 0; w < RELU_SUM_WARPS && c < COLUMNS; w++) total += sums[w * COLUMNS + c];
    float* tile = partial + (size_t)blockIdx.x * gridDim.y * COLUMNS;
    if (c < COLUMNS) tile[blockIdx.y * COLUMNS + c] = total;
    if (!last_to_arrive(arrivals + blockIdx.x, gridDim.y)) return;
    if (c >= COLUMNS || first + c >= OC) return;
    d.db[first + c] = sum_in_order(tile + c, (int)gridDim.y, COLUMNS);
}

template <int WIDTH, bool MASKED>
static inline void relu_backward_start(ReluGrads d, ReluOutput h, int N, int OC, Context* ctx) {
    int tiles = (int)blocks_for((size_t)OC, WARP * WIDTH),
        most = max_int(1, (MASKED ? 2 : 1) * RELU_SUM_BLOCKS / tiles);
    int span = (int)round_up(((size_t)N + (size_t)most - 1) / (size_t)most, RELU_SUM_WARPS),
        spans = (N + span - 1) / span;
    CHECK(tiles <= (int)DEVICE_ARRIVALS);
    float* partial = (float*)device_scratch(ctx, (size_t)tiles * (size_t)spans * WARP * WIDTH * sizeof *partial);
    dim3 grid((unsigned)tiles, (unsigned)spans);
    relu_backward_kernel<WIDTH, MASKED>
        <<<grid, RELU_SUM_WARPS * WARP, 0, ctx->stream>>>(d, h, partial, ctx->arrivals, N, OC, span);
    cudaCheck(cudaGetLastError());
}

static inline void matmul_relu_backward_bias(real* db, const floatX* dz, int N, int OC, Context* ctx) {
    Scope scope =
        scope_open(ctx, "matmul_relu_backward_bias", 1.0 * N * OC, 1.0 * N * OC * sizeof(floatX), "N=%d OC=%d", N, OC);
    ReluGrads d = {(floatX*)dz, db};  // read only without a mask
    ReluOutput none = {NULL, 1};
    if (rows_are_vectors<floatX>(OC)) relu_backward_start<Vector<floatX>::SIZE, false>(d, none, N, OC, ctx);
    else relu_backward_start<1, false>(d, none, N, OC, ctx);
    scope_close(&scope);
}

// `h`: the layer's input, as the layer below keeps it; h.h NULL: there is no ReLU below, and no db.
static inline void matmul_relu_backward_input(ReluGrads d, const floatX* dy, const floatX* w, ReluOutput h, int N,
                                              int IC, int OC, Context* ctx) {
#if defined(PRECISION_BF16) || defined(PRECISION_FP16)
    ReluProduct z = {d.dz, NULL, h.h, d.db, N, IC, OC, NULL, NULL, 0};
    Scope fused = scope_open(ctx, "matmul_relu_backward_input", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_BACKWARD_INPUT_BYTES(N, IC, OC, SET) + (h.h ? 1.0 * N * IC * sizeof(floatX) : 0),
                             "N=%d IC=%d OC=%d", N, IC, OC);
    int is_done = (!h.h || h.scale == 1) && matmul_relu_hopper(z, dy, w, BACKWARD, ctx);
    scope_close(&fused);
    if (is_done) return;
#endif
    matmul_backward_input(d.dz, dy, w, N, IC, OC, SET, ctx);
    if (!h.h) return;
    Scope scope = scope_open(ctx, "relu_backward", 1.0 * N * IC, 3.0 * sizeof(floatX) * N * IC, "N=%d IC=%d", N, IC);
    if (rows_are_vectors<floatX>(IC)) relu_backward_start<Vector<floatX>::SIZE, true>(d, h, N, IC, ctx);
    else relu_backward_start<1, true>(d, h, N, IC, ctx);
    scope_close(&scope);
}
#else
// ---------------------------------------------------------------------------------------------------------
// CPU

static inline void matmul_relu_forward(ReluOutput out, const floatX* x, Linear p, int N, int IC, int OC, ReluDropout d,
                                       Context* ctx) {
    matmul_forward(out.h, x, p, N, IC, OC, SET, ctx);
    Scope scope = scope_open(ctx, "relu_dropout", 1.0 * N * OC, 2.0 * N * OC * sizeof(floatX), "N=%d OC=%d", N, OC);
    relu_dropout_ref(out.h, d, N, OC);
    scope_close(&scope);
}

static inline void matmul_relu_backward_bias(real* db, const floatX* dz, int N, int OC, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_relu_backward_bias", 0, 0, "N=%d OC=%d", N, OC);
    matmul_backward_bias_ref(db, dz, N, OC, SET);
    scope_close(&scope);
}

// `h`: the layer's input, as the layer below keeps it; h.h NULL: there is no ReLU below, and no db.
static inline void matmul_relu_backward_input(ReluGrads d, const floatX* dy, const floatX* w, ReluOutput h, int N,
                                              int IC, int OC, Context* ctx) {
    matmul_backward_input(d.dz, dy, w, N, IC, OC, SET, ctx);
    if (!h.h) return;
    Scope scope = scope_open(ctx, "relu_mask", 1.0 * N * IC, 3.0 * N * IC * sizeof(floatX), "N=%d IC=%d", N, IC);
    relu_mask_ref(d.dz, h.h, (real)h.scale, (size_t)N * (size_t)IC);
    scope_close(&scope);
    matmul_relu_backward_bias(d.db, d.dz, N, IC, ctx);
}
#endif
#endif
