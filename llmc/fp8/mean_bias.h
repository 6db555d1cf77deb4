/* mean_bias_center: the means over rows of the input of a matmul, before and after it is rounded.
 *
 *   means[0, i] (SET) = mean(x[., i]),  means[1, i] (SET) = mean(x8[., i])
 *
 *   x [N, IC] as in quantize.h; x8: its values after rounding to E4M3; means [2, IC] real
 *
 * With them quantize() computes, as it rounds the weight w, the bias that gives the matmul of two rounded operands the
 * mean of the exact matmul: b + w mean(x) - w8 mean(x8).
 *
 * Why: rounding errors differ from row to row and cancel in sums over rows, except for their mean. The mean shifts all
 * rows in the same direction. It causes most of the error in the gradients of a trained model, whose x have large means
 * (dev/LOG.md). Adding a bias in a matmul costs nothing.
 *
 * shapes     IC a multiple of 16, x and its bytes aligned to 16 bytes. N may be 0: nothing is written.
 * rows       Means are over MEAN_BIAS_ROWS rows spread over all N, or over all rows if there are fewer. They have
 *            different positions even in sequences of power-of-two length.
 * numerics   on the GPU in fp32, in an order that depends only on the shapes; on the CPU in double
 * bytes      sizeof(floatX) + 1 for each element of x that is read */
#ifndef LLMC_FP8_MEAN_BIAS_H
#define LLMC_FP8_MEAN_BIAS_H

#include "llmc/fp8/quantize.h"

// A tensor before and after it was rounded: bytes / scale.
typedef struct {
    QuantizeInput exact;
    const uint8_t* bytes;
    const real* inverse;
} RoundedTensor;

#define MEAN_BIAS_FLOPS(N, IC) (4.0 * (IC)*mean_bias_rows(N))
#define MEAN_BIAS_BYTES(N, IC) ((sizeof(floatX) + 1.0) * (IC)*mean_bias_rows(N))

// ---------------------------------------------------------------------------------------------------------
// Reference

// x [N, IC]: the tensor itself.
static inline void mean_bias_center_ref(real* means, const real* x, RoundedTensor x8, int N, int IC) {
    double rows = (double)mean_bias_rows(N);
    for (size_t i = 0; i < (size_t)IC; i++) {
        double mean = 0, mean8 = 0;
        for (int k = 0; k < mean_bias_rows(N); k++) {
            size_t at = (size_t)mean_bias_row(k, N) * (size_t)IC + i;
            mean += (double)x[at] / rows;
            mean8 += (double)*x8.inverse * (double)fp8_to_float(x8.bytes[at], FP8_E4M3) / rows;
        }
        means[i] = (real)mean, means[(size_t)IC + i] = (real)mean8;
    }
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: a block takes 16 columns of the rows.

enum { MEAN_BIAS_THREADS = 256, MEAN_BIAS_COLUMNS = 8 };

// The tensor's 8 elements at [row, column] before and after rounding, the latter not scaled back.
__device__ inline void mean_bias_load(float* exact, float* rounded, RoundedTensor t, int row, int column, int C) {
    Vector<floatX> loaded[MEAN_BIAS_COLUMNS / Vector<floatX>::SIZE];
    quantize_load<MEAN_BIAS_COLUMNS>(loaded, t.exact.x, row, column, row + 1, C);
    quantize_floats<MEAN_BIAS_COLUMNS>(exact, loaded, 0);
    uint2 words = *(const uint2*)(t.bytes + (size_t)row * C + column);
    quantize_numbers(rounded, words.x);
    quantize_numbers(rounded + 4, words.y);
}

// means[0, i] and means[1, i]: the means of x and of x8.
static __global__ void __launch_bounds__(MEAN_BIAS_THREADS)
    mean_bias_means_kernel(real* means, RoundedTensor x, int N, int IC) {
    constexpr int WARPS = MEAN_BIAS_THREADS / WARP, W = MEAN_BIAS_COLUMNS;
    __shared__ float partial[2][WARPS][2 * W];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, rows = mean_bias_rows(N);
    int column = blockIdx.x * 2 * W + threadIdx.x % 2 * W;
    float sum[2][W] = {{0}};
#pragma unroll 4
    for (int k = threadIdx.x / 2; k < rows; k += MEAN_BIAS_THREADS / 2) {
        float exact[W], rounded[W];
        mean_bias_load(exact, rounded, x, mean_bias_row(k, N), column, IC);
#pragma unroll
        for (int j = 0; j < W; j++) {
            if (x.exact.source == QUANTIZE_GELU) exact[j] = gelu_value(exact[j], x.exact.gelu);
            sum[0][j] += exact[j], sum[1][j] += rounded[j];
        }
    }
#pragma unroll
    for (int which = 0; which < 2; which++)
#pragma unroll
        for (int j = 0; j < W; j++) {
            float total = sum[which][j];
#pragma unroll
            for (int apart = 2; apart < WARP; apart *= 2) total += __shfl_xor_sync(ALL_LANES, total, apart);
            if (lane < 2) partial[which][warp][lane * W + j] = total;
        }
    __syncthreads();
    int which = threadIdx.x / (2 * W), i = threadIdx.x % (2 * W);
    if (which >= 2) return;
    float total = 0;
    for (int w = 0; w < WARPS; w++) total += partial[which][w][i];
    means[which * IC + blockIdx.x * 2 * W + i] = total / rows * (which ? *x.inverse : 1);
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU: a task takes 16 columns of the rows.

static inline void mean_bias_means(real* means, RoundedTensor x, int N, int IC) {
    size_t width = (size_t)IC;
    float number[256];
    int rows = mean_bias_rows(N);
    fp8_numbers(number, FP8_E4M3);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < width; i += QUANTIZE_ALIGNMENT) {
        double sum[2][QUANTIZE_ALIGNMENT] = {{0}};
        for (int k = 0; k < rows; k++) {
            size_t row = (size_t)mean_bias_row(k, N), at = row * width + i;
            floatX exact[QUANTIZE_ALIGNMENT];
            quantize_source(exact, x.exact, row, i, QUANTIZE_ALIGNMENT, width);
            for (size_t j = 0; j < QUANTIZE_ALIGNMENT; j++)
                sum[0][j] += (double)exact[j], sum[1][j] += (double)number[x.bytes[at + j]];
        }
        for (size_t j = 0; j < QUANTIZE_ALIGNMENT; j++) {
            means[i + j] = (real)(sum[0][j] / rows);
            means[width + i + j] = (real)(sum[1][j] / rows * (double)*x.inverse);
        }
    }
}

#endif

// The center of quantize_centered(), or the means of a bias that quantize() computes.
COMPILED_IF_CALLED static inline void mean_bias_center(real* means, RoundedTensor x, int N, int IC, Context* ctx) {
    CHECK(N >= 0 && IC > 0 && IC % QUANTIZE_ALIGNMENT == 0);
    if (!N) return;
    Scope scope =
        scope_open(ctx, "mean_bias_center", MEAN_BIAS_FLOPS(N, IC), MEAN_BIAS_BYTES(N, IC), "N=%d IC=%d", N, IC);
#ifdef __CUDACC__
    mean_bias_means_kernel<<<IC / (2 * MEAN_BIAS_COLUMNS), MEAN_BIAS_THREADS, 0, ctx->stream>>>(means, x, N, IC);
    cudaCheck(cudaGetLastError());
#else
    mean_bias_means(means, x, N, IC);
#endif
    scope_close(&scope);
}

#endif
