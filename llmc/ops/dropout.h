/* Dropout of hidden states: y = x * mask / (1 - p). The mask is not stored; it is regenerated when needed.
 *
 *   forward    y  [N, C] (SET) from x  [N, C]     y may be x
 *   backward   dx [N, C] (SET) from dy [N, C]     dx may be dy; it is the same function
 *
 * dtypes     floatX in and out.
 * numerics   one multiplication per element; nothing is accumulated.
 * mask       Philox bits keyed by (step, layer, site; sequence in the step, position, channel). The mask does not
 *            depend on the row of a sequence in the batch, the number of ranks or the device.
 * p = 0      a copy, or nothing if it is in place.
 * source     Srivastava et al., JMLR 15 (2014), in the inverted form that is now common. */
#ifndef LLMC_OPS_DROPOUT_H
#define LLMC_OPS_DROPOUT_H

#include "llmc/device/cuda_utils.cuh"
#include "llmc/device/scope.h"
#include "llmc/ops/common/dropout_mask.h"

#define DROPOUT_FLOPS(N, C) (1.0 * (N) * (C))
#define DROPOUT_BYTES(N, C) (2.0 * (N) * (C) * sizeof(floatX))

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void dropout_ref(real* y, const real* x, int N, int C, Dropout dropout) {
    const Sequences* s = dropout.sequences;
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            size_t i = (size_t)n * (size_t)C + (size_t)c;
            y[i] = (real)(x[i] * dropout_factor_ref(dropout, s->sequence[n], s->position[n], c));
        }
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU

enum { DROPOUT_THREADS = 256 };

// One thread per W channels of a row. `width` is C / W.
template <int W, int MASKED>
__global__ void dropout_kernel(floatX* out, const floatX* in, unsigned vectors, unsigned width, DropoutRows rows) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    float v[W];
    to_floats(v, load_vector<W>(in + (size_t)i * W));
    if (MASKED) {
        unsigned row = i / width, c = i % width * W;
        dropout_multiply<W>(v, rows.dropout, dropout_place(rows, (int)row), (int)c);
    }
    store_vector(out + (size_t)i * W, from_floats<floatX, W>(v));
}
#endif

// `name`: of the scope.
static inline void dropout_launch(const char* name, floatX* y, const floatX* x, int N, int C, Dropout dropout,
                                  Context* ctx) {
    CHECK(N > 0 && C > 0 && (dropout.threshold == 0 || dropout.sequences->rows == N));
    if (dropout.threshold == 0 && y == x) return;
    Scope scope = scope_open(ctx, name, DROPOUT_FLOPS(N, C), DROPOUT_BYTES(N, C), "N=%d C=%d", N, C);
#ifdef __CUDACC__
    constexpr int VECTOR = Vector<floatX>::SIZE;
    int is_vectors = rows_are_vectors<floatX>(C), masked = dropout.threshold != 0, W = is_vectors ? VECTOR : 1;
    size_t vectors = (size_t)N * (size_t)C / (size_t)W;
    auto kernel = masked ? dropout_kernel<1, 1> : dropout_kernel<1, 0>;
    if (is_vectors) kernel = masked ? dropout_kernel<VECTOR, 1> : dropout_kernel<VECTOR, 0>;
    CHECK(vectors <= UINT32_MAX);
    kernel<<<blocks_for(vectors, DROPOUT_THREADS), DROPOUT_THREADS, 0, ctx->stream>>>(
        y, x, (unsigned)vectors, (unsigned)(C / W), dropout_rows(dropout));
    cudaCheck(cudaGetLastError());
#else
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        floatX* row = y + (size_t)n * (size_t)C;
        if (y != x) memcpy(row, x + (size_t)n * (size_t)C, (size_t)C * sizeof *row);
        if (dropout.threshold) dropout_multiply_row(row, dropout, n, 0, C);
    }
#endif
    scope_close(&scope);
}

static inline void dropout_forward(floatX* y, const floatX* x, int N, int C, Dropout dropout, Context* ctx) {
    dropout_launch("dropout_forward", y, x, N, C, dropout, ctx);
}

static inline void dropout_backward(floatX* dx, const floatX* dy, int N, int C, Dropout dropout, Context* ctx) {
    dropout_launch("dropout_backward", dx, dy, N, C, dropout, ctx);
}

#endif
