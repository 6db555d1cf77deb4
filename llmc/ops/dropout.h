/* Dropout of hidden states: y = x * mask / (1 - p). The mask is not stored; it is regenerated when needed.
 *
 *   forward    y  [N, C]  from x  [N, C]                 y may be x
 *   backward   dx [N, C]  from dy [N, C], SET or ADD     dx may be dy
 *
 * dtypes     floatX in and out.
 * numerics   one multiplication per element; nothing is accumulated.
 * mask       Philox bits keyed by (step, layer, site; sequence in the step, position, channel). The mask does not
 *            depend on the row of a sequence in the batch, the number of ranks or the device.
 * p = 0      a copy (forward, SET), nothing if it is in place, or an addition (ADD).
 * source     Srivastava et al., JMLR 15 (2014), in the inverted form that is now common. */
#ifndef LLMC_OPS_DROPOUT_H
#define LLMC_OPS_DROPOUT_H

#include "llmc/device/cuda_utils.cuh"
#include "llmc/device/scope.h"
#include "llmc/ops/common/dropout_mask.h"

#define DROPOUT_FORWARD_FLOPS(N, C) (1.0 * (N) * (C))
#define DROPOUT_FORWARD_BYTES(N, C) (2.0 * (N) * (C) * sizeof(floatX))
#define DROPOUT_BACKWARD_FLOPS(N, C) (2.0 * (N) * (C))
#define DROPOUT_BACKWARD_BYTES(N, C, mode) (((mode) == ADD ? 3.0 : 2.0) * (N) * (C) * sizeof(floatX))

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void dropout_forward_ref(real* y, const real* x, int N, int C, Dropout dropout) {
    const Sequences* s = dropout.sequences;
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            size_t i = (size_t)n * (size_t)C + (size_t)c;
            y[i] = (real)(x[i] * dropout_factor_ref(dropout, s->sequence[n], s->position[n], c));
        }
}

static inline void dropout_backward_ref(real* dx, const real* dy, int N, int C, Dropout dropout, Mode mode) {
    const Sequences* s = dropout.sequences;
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            size_t i = (size_t)n * (size_t)C + (size_t)c;
            double d = dy[i] * dropout_factor_ref(dropout, s->sequence[n], s->position[n], c);
            dx[i] = (real)(mode == ADD ? dx[i] + d : d);
        }
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU

enum { DROPOUT_THREADS = 256 };

// One thread per W channels of a row: out = in * mask, or out += in * mask. `width` is C / W.
template <int W, Mode MODE, int MASKED>
__global__ void dropout_kernel(floatX* out, const floatX* in, unsigned vectors, unsigned width, DropoutRows rows) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    float v[W], old[W];
    Vector<floatX, W> before = {};
    if (MODE == ADD) before = load_vector<W>(out + (size_t)i * W);
    to_floats(v, load_vector<W>(in + (size_t)i * W));
    to_floats(old, before);
    if (MASKED) {
        unsigned row = i / width, c = i % width * W;
        dropout_multiply<W>(v, rows.dropout, dropout_place(rows, (int)row), (int)c);
    }
#pragma unroll
    for (int k = 0; k < W && MODE == ADD; k++) v[k] += old[k];
    store_vector(out + (size_t)i * W, from_floats<floatX, W>(v));
}

template <Mode MODE>
static inline void dropout_launch(floatX* out, const floatX* in, int N, int C, Dropout dropout, Context* ctx) {
    constexpr int VECTOR = Vector<floatX>::SIZE;
    int is_vectors = rows_are_vectors<floatX>(C), masked = dropout.threshold != 0, W = is_vectors ? VECTOR : 1;
    size_t vectors = (size_t)N * (size_t)C / (size_t)W;
    auto kernel = masked ? dropout_kernel<1, MODE, 1> : dropout_kernel<1, MODE, 0>;
    if (is_vectors) kernel = masked ? dropout_kernel<VECTOR, MODE, 1> : dropout_kernel<VECTOR, MODE, 0>;
    CHECK(vectors <= UINT32_MAX);
    kernel<<<blocks_for(vectors, DROPOUT_THREADS), DROPOUT_THREADS, 0, ctx->stream>>>(
        out, in, (unsigned)vectors, (unsigned)(C / W), dropout_rows(dropout));
    cudaCheck(cudaGetLastError());
}

static inline void dropout_any(floatX* out, const floatX* in, int N, int C, Dropout dropout, Mode mode, Context* ctx) {
    if (mode == SET) dropout_launch<SET>(out, in, N, C, dropout, ctx);
    else dropout_launch<ADD>(out, in, N, C, dropout, ctx);
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU

// Channels 0 .. C - 1 of row n: out = in * mask, or out += in * mask.
static inline void dropout_row(floatX* out, const floatX* in, int n, int C, Dropout dropout, Mode mode) {
    const Sequences* s = dropout.sequences;
    real factor[DROPOUT_TILE];
    for (int i = 0; i < DROPOUT_TILE; i++) factor[i] = 1;
    for (int c = 0; c < C; c += DROPOUT_TILE) {
        int width = min_int(DROPOUT_TILE, C - c);
        if (dropout.threshold) dropout_factors(factor, dropout, s->sequence[n], s->position[n], c);
        if (mode == ADD) {
#pragma omp simd
            for (int i = 0; i < width; i++) out[c + i] += in[c + i] * factor[i];
        } else {
#pragma omp simd
            for (int i = 0; i < width; i++) out[c + i] = in[c + i] * factor[i];
        }
    }
}

static inline void dropout_any(floatX* out, const floatX* in, int N, int C, Dropout dropout, Mode mode, Context* ctx) {
    (void)ctx;
    size_t row = (size_t)C;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) dropout_row(out + (size_t)n * row, in + (size_t)n * row, n, C, dropout, mode);
}

#endif

static inline void dropout_forward(floatX* y, const floatX* x, int N, int C, Dropout dropout, Context* ctx) {
    CHECK(N > 0 && C > 0 && (dropout.threshold == 0 || dropout.sequences->rows == N));
    if (dropout.threshold == 0 && y == x) return;
    Scope scope =
        scope_open(ctx, "dropout_forward", DROPOUT_FORWARD_FLOPS(N, C), DROPOUT_FORWARD_BYTES(N, C), "N=%d C=%d", N, C);
    dropout_any(y, x, N, C, dropout, SET, ctx);
    scope_close(&scope);
}

static inline void dropout_backward(floatX* dx, const floatX* dy, int N, int C, Dropout dropout, Mode mode,
                                    Context* ctx) {
    CHECK(N > 0 && C > 0 && (dropout.threshold == 0 || dropout.sequences->rows == N));
    if (dropout.threshold == 0 && dx == dy && mode == SET) return;
    Scope scope = scope_open(ctx, "dropout_backward", DROPOUT_BACKWARD_FLOPS(N, C), DROPOUT_BACKWARD_BYTES(N, C, mode),
                             "N=%d C=%d", N, C);
    dropout_any(dx, dy, N, C, dropout, mode, ctx);
    scope_close(&scope);
}

#endif
