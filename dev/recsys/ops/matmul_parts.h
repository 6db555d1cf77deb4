/* Weight gradients of several layers, each a product with few outputs that sums over many samples.
 *
 *   dw [OC, IC] = dy^T x = sum over parts of dy_p^T x_p          dy [N, OC], x [N, IC], in parts of N / parts rows
 *
 * One launch a layer multiplies all parts, and one launch for all layers adds them in their order. cuBLASLt's own way
 * to cut the sum has two launches a layer.
 *
 * Modes: dw is SET. dtypes: dy, x floatX; dw and parts real. Numerics: those of matmul; parts are added in fp32.
 * On the CPU, in fp32 and for few samples there is one part, and the product writes dw. Source: the definition. */
#ifndef DEV_RECSYS_OPS_MATMUL_PARTS_H
#define DEV_RECSYS_OPS_MATMUL_PARTS_H

#include "llmc/ops/matmul/matmul.h"

enum { PARTS_JOBS = 16, PARTS_LEAST_ROWS = 8192 };

// One layer's parts.
typedef struct {
    real* dw;
    const real* parts;  // [count, n]
    int count, n;
} PartsJob;

typedef struct {
    PartsJob job[PARTS_JOBS];
    unsigned first_block[PARTS_JOBS + 1];
    int jobs;
    real* free;  // memory for the next layer's parts
} PartsSum;

// The number of parts of a layer: enough to occupy a GPU.
static inline int matmul_parts_count(int N, int IC, int OC) {
    if (sizeof(floatX) == sizeof(real) || N < PARTS_LEAST_ROWS || IC * OC % 4) return 1;
    int count = IC * OC >= 1 << 18 ? 4 : 16;
    return N % count == 0 ? count : 1;
}

// Elements that a layer's parts need.
static inline size_t matmul_parts_size(int N, int IC, int OC) {
    int count = matmul_parts_count(N, IC, OC);
    return count > 1 ? (size_t)count * (size_t)IC * (size_t)OC : 0;
}

#ifdef __CUDACC__
enum { PARTS_THREADS = 256 };

// Each thread adds four adjacent elements of one layer.
static __global__ void __launch_bounds__(PARTS_THREADS) matmul_parts_sum_kernel(PartsSum sum) {
    int j = 0;
    while (blockIdx.x >= sum.first_block[j + 1]) j++;
    const PartsJob& job = sum.job[j];
    int i = 4 * (int)((blockIdx.x - sum.first_block[j]) * PARTS_THREADS + threadIdx.x);
    if (i >= job.n) return;
    Vector<real> total = load128_streaming(job.parts + i);
#pragma unroll 3
    for (int p = 1; p < job.count; p++) {
        Vector<real> x = load128_streaming(job.parts + (size_t)p * job.n + i);
#pragma unroll
        for (int k = 0; k < 4; k++) total.v[k] += x.v[k];
    }
    store128(job.dw + i, total);
}
#endif

// dw of one layer, complete after matmul_parts_sum().
static inline void matmul_parts_backward_weight(PartsSum* sum, real* dw, const floatX* dy, const floatX* x, int N,
                                                int IC, int OC, Context* ctx) {
    int count = matmul_parts_count(N, IC, OC);
    (void)sum;
    if (count == 1) {
        LinearGrads weight = {dw, NULL};
        matmul_backward_weight(weight, dy, x, N, IC, OC, SET, ctx);
        return;
    }
#ifdef __CUDACC__
    Scope scope = scope_open(ctx, "matmul_parts_backward_weight", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_BACKWARD_WEIGHT_BYTES(N, IC, OC, SET), "N=%d IC=%d OC=%d", N, IC, OC);
    PartsJob job = {dw, sum->free, count, IC * OC};
    int rows = N / count;
    BatchMatrix out = {sum->free, {CUDA_R_32F, CUBLAS_OP_N, IC, job.n}},
                left = {(void*)dy, {cublaslt_type(), CUBLAS_OP_T, OC, (int64_t)rows * OC}},
                right = {(void*)x, {cublaslt_type(), CUBLAS_OP_N, IC, (int64_t)rows * IC}};
    BatchSize size = {OC, IC, rows, count};
    CHECK(sum->jobs < (int)PARTS_JOBS);
    batched_product(out, left, right, size, 1, ctx);
    sum->job[sum->jobs++] = job;
    sum->free += matmul_parts_size(N, IC, OC);
    scope_close(&scope);
#endif
}

static inline void matmul_parts_sum(PartsSum* sum, Context* ctx) {
#ifdef __CUDACC__
    double read = 0, written = 0;
    for (int j = 0; j < sum->jobs; j++) {
        const PartsJob* job = &sum->job[j];
        sum->first_block[j + 1] = sum->first_block[j] + blocks_for((size_t)job->n, 4 * PARTS_THREADS);
        read += (double)job->count * job->n, written += job->n;
    }
    if (!sum->jobs) return;
    Scope scope = scope_open(ctx, "matmul_parts_sum", read, (read + written) * sizeof(real), "layers=%d", sum->jobs);
    matmul_parts_sum_kernel<<<sum->first_block[sum->jobs], PARTS_THREADS, 0, ctx->stream>>>(*sum);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
#else
    (void)sum, (void)ctx;
#endif
}

#endif
