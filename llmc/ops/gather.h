/* Gather: copy the rows that a head needs, and scatter their gradients back.
 *
 *   forward    y  [M, C]: y[m] = x[index[m]]           x [.., C]
 *   backward   dx [N, C]: dx[index[m]] = dy[m] (SET: all other rows become 0) or += dy[m] (ADD)
 *
 * dtypes     floatX in and out; index is int [M] with distinct entries in 0 .. N - 1.
 * numerics   copies; exact. With ADD, one addition per element. */
#ifndef LLMC_OPS_GATHER_H
#define LLMC_OPS_GATHER_H

#include "llmc/device/cuda_utils.cuh"
#include "llmc/device/scope.h"

#define GATHER_FORWARD_FLOPS(M, C) 0.0
#define GATHER_FORWARD_BYTES(M, C) (2.0 * (M) * (C) * sizeof(floatX))
#define GATHER_BACKWARD_FLOPS(M, C, mode) ((mode) == ADD ? 1.0 * (M) * (C) : 0.0)
#define GATHER_BACKWARD_BYTES(M, N, C, mode) (((mode) == ADD ? 3.0 * (M) : 1.0 * (M) + (N)) * (C) * sizeof(floatX))

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void gather_forward_ref(real* y, const real* x, const int* index, int M, int C) {
    for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++) y[(size_t)m * (size_t)C + (size_t)c] = x[(size_t)index[m] * (size_t)C + (size_t)c];
}

static inline void gather_backward_ref(real* dx, const real* dy, const int* index, int M, int N, int C, Mode mode) {
    if (mode == SET)
        for (size_t i = 0; i < (size_t)N * (size_t)C; i++) dx[i] = 0;
    for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++)
            dx[(size_t)index[m] * (size_t)C + (size_t)c] += dy[(size_t)m * (size_t)C + (size_t)c];
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU

// One thread per W elements of a row of y. `width` is C / W.
template <int W>
__global__ void gather_forward_kernel(floatX* y, const floatX* x, const int* index, unsigned vectors, unsigned width) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    unsigned row = i / width, v = i % width;
    store_vector(y + (size_t)i * W, load_vector<W>(x + ((size_t)index[row] * width + v) * W));
}

// One thread per W elements of a row of dy. With SET, dx must be zero before the launch.
template <int W, Mode MODE>
__global__ void gather_backward_kernel(floatX* dx, const floatX* dy, const int* index, unsigned vectors,
                                       unsigned width) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    unsigned row = i / width, v = i % width;
    floatX* to = dx + ((size_t)index[row] * width + v) * W;
    Vector<floatX, W> d = load_vector<W>(dy + (size_t)i * W);
    if constexpr (MODE == ADD) {
        float sum[W], more[W];
        to_floats(sum, load_vector<W>(to));
        to_floats(more, d);
#pragma unroll
        for (int k = 0; k < W; k++) sum[k] += more[k];
        d = from_floats<floatX, W>(sum);
    }
    store_vector(to, d);
}

enum { GATHER_THREADS = 256 };

#endif

static inline void gather_forward(floatX* y, const floatX* x, const int* index, int M, int C, Context* ctx) {
    CHECK(M >= 0 && C > 0);
    Scope scope =
        scope_open(ctx, "gather_forward", GATHER_FORWARD_FLOPS(M, C), GATHER_FORWARD_BYTES(M, C), "M=%d C=%d", M, C);
    size_t row = (size_t)C;
#ifdef __CUDACC__
    constexpr int VECTOR = Vector<floatX>::SIZE;
    int vectors = rows_are_vectors<floatX>(C), W = vectors ? VECTOR : 1;
    size_t n = (size_t)M * row / (size_t)W;
    auto kernel = vectors ? gather_forward_kernel<VECTOR> : gather_forward_kernel<1>;
    CHECK(n <= UINT32_MAX);
    if (n)
        kernel<<<blocks_for(n, GATHER_THREADS), GATHER_THREADS, 0, ctx->stream>>>(y, x, index, (unsigned)n,
                                                                                  (unsigned)(C / W));
    cudaCheck(cudaGetLastError());
#else
#pragma omp parallel for schedule(static)
    for (int m = 0; m < M; m++) memcpy(y + (size_t)m * row, x + (size_t)index[m] * row, row * sizeof(floatX));
#endif
    scope_close(&scope);
}

static inline void gather_backward(floatX* dx, const floatX* dy, const int* index, int M, int N, int C, Mode mode,
                                   Context* ctx) {
    CHECK(M >= 0 && M <= N && C > 0);
    Scope scope = scope_open(ctx, "gather_backward", GATHER_BACKWARD_FLOPS(M, C, mode),
                             GATHER_BACKWARD_BYTES(M, N, C, mode), "M=%d N=%d C=%d", M, N, C);
    size_t row = (size_t)C;
#ifdef __CUDACC__
    constexpr int VECTOR = Vector<floatX>::SIZE;
    int vectors = rows_are_vectors<floatX>(C), W = vectors ? VECTOR : 1;
    size_t n = (size_t)M * row / (size_t)W;
    auto kernel = vectors ? gather_backward_kernel<VECTOR, ADD> : gather_backward_kernel<1, ADD>;
    if (mode == SET) kernel = vectors ? gather_backward_kernel<VECTOR, SET> : gather_backward_kernel<1, SET>;
    CHECK(n <= UINT32_MAX);
    if (mode == SET) cudaCheck(cudaMemsetAsync(dx, 0, (size_t)N * row * sizeof(floatX), ctx->stream));
    if (n)
        kernel<<<blocks_for(n, GATHER_THREADS), GATHER_THREADS, 0, ctx->stream>>>(dx, dy, index, (unsigned)n,
                                                                                  (unsigned)(C / W));
    cudaCheck(cudaGetLastError());
#else
    for (int m = 0; m < M; m++) CHECK(index[m] >= 0 && index[m] < N);
    if (mode == SET) {
#pragma omp parallel for schedule(static)
        for (int n = 0; n < N; n++) memset(dx + (size_t)n * row, 0, row * sizeof(floatX));
    }
#pragma omp parallel for schedule(static)
    for (int m = 0; m < M; m++) {
        floatX* to = dx + (size_t)index[m] * row;
        const floatX* from = dy + (size_t)m * row;
#pragma omp simd
        for (size_t c = 0; c < row; c++) to[c] += from[c];
    }
#endif
    scope_close(&scope);
}

#endif
