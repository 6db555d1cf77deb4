/* Copy rows of several tables, and row numbers, between layouts: to where an exchange between ranks needs them and
 * back.
 *
 *   rows   out part k, row n = in part k, row n             or with an index: row index[n, k]
 *   ids    out part k, number n = in part k, number n
 *
 * Shapes: a part has N rows of width[k] elements (of ids: one), row n at p[k] + n * stride[k]; index [N, parts]. Parts
 * may be buffers of their own, columns of one buffer, or tables. All outputs are SET; N may be 0.
 * dtypes: floatX, of ids int. Widths and strides are multiples of 4 elements. Numerics: copies, exact.
 * Source: the definition. */
#ifndef DEV_RECSYS_OPS_TABLE_ROWS_H
#define DEV_RECSYS_OPS_TABLE_ROWS_H

#include "llmc/device/scope.h"
#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif

enum { TABLE_PARTS = 32 };

// As an input only read.
typedef struct {
    int count, width[TABLE_PARTS];
    size_t stride[TABLE_PARTS];
    floatX* p[TABLE_PARTS];
} TableRows;

typedef struct {
    int count;
    size_t stride[TABLE_PARTS];
    int* p[TABLE_PARTS];
} TableIds;

// Append a part.
static inline void table_rows_add(TableRows* r, floatX* p, size_t stride, int width) {
    CHECK(r->count < TABLE_PARTS && width % 4 == 0 && stride % 4 == 0);
    r->p[r->count] = p, r->stride[r->count] = stride, r->width[r->count++] = width;
}

static inline void table_ids_add(TableIds* r, int* p, size_t stride) {
    CHECK(r->count < TABLE_PARTS);
    r->p[r->count] = p, r->stride[r->count++] = stride;
}

// Elements of one row of all parts.
static inline double table_rows_width(const TableRows* r) {
    double width = 0;
    for (int k = 0; k < r->count; k++) width += r->width[k];
    return width;
}

// ---------------------------------------------------------------------------------------------------------
// Reference, which is also the CPU's

static inline void table_rows_copy_ref(const TableRows* out, const TableRows* in, const int* index, int N) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        for (int k = 0; k < out->count; k++) {
            size_t from = index ? (size_t)index[(size_t)n * (size_t)out->count + (size_t)k] : (size_t)n;
            memcpy(out->p[k] + (size_t)n * out->stride[k], in->p[k] + from * in->stride[k],
                   (size_t)out->width[k] * sizeof(floatX));
        }
}

static inline void table_ids_copy_ref(const TableIds* out, const TableIds* in, int N) {
    for (int k = 0; k < out->count; k++)
        for (size_t n = 0; n < (size_t)N; n++) out->p[k][n * out->stride[k]] = in->p[k][n * in->stride[k]];
}

#ifdef __CUDACC__
enum { TABLE_ROWS_THREADS = 256 };

// One warp per row of a part; a lane copies four adjacent elements at a time.
static __global__ void table_rows_copy_kernel(const __grid_constant__ TableRows out,
                                              const __grid_constant__ TableRows in, const int* index, int N) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (i >= (size_t)N * out.count) return;
    size_t n = i / out.count;
    int k = (int)(i % out.count);
    const floatX* from = in.p[k] + (index ? (size_t)index[i] : n) * in.stride[k];
    floatX* to = out.p[k] + n * out.stride[k];
    for (int c = 4 * lane; c < out.width[k]; c += 4 * WARP) {
        if constexpr (sizeof(floatX) == 2) *(int2*)(to + c) = *(const int2*)(from + c);
        else *(int4*)(to + c) = *(const int4*)(from + c);
    }
}

// One thread per number.
static __global__ void table_ids_copy_kernel(const __grid_constant__ TableIds out, const __grid_constant__ TableIds in,
                                             int N) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * out.count) return;
    size_t n = i / out.count;
    int k = (int)(i % out.count);
    out.p[k][n * out.stride[k]] = in.p[k][n * in.stride[k]];
}
#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers

// `index` NULL: row n of the input.
static inline void table_rows_copy(const TableRows* out, const TableRows* in, const int* index, int N, Context* ctx) {
    double width = table_rows_width(out);
    Scope scope = scope_open(ctx, "table_rows", 0, 2 * width * N * sizeof(floatX), "N=%d parts=%d", N, out->count);
    CHECK(out->count == in->count);
#ifdef __CUDACC__
    size_t threads = (size_t)N * (size_t)out->count * WARP;
    if (threads)
        table_rows_copy_kernel<<<blocks_for(threads, TABLE_ROWS_THREADS), TABLE_ROWS_THREADS, 0, ctx->stream>>>(
            *out, *in, index, N);
    cudaCheck(cudaGetLastError());
#else
    table_rows_copy_ref(out, in, index, N);
#endif
    scope_close(&scope);
}

static inline void table_ids_copy(const TableIds* out, const TableIds* in, int N, Context* ctx) {
    Scope scope = scope_open(ctx, "table_ids", 0, 8.0 * N * out->count, "N=%d parts=%d", N, out->count);
    CHECK(out->count == in->count);
#ifdef __CUDACC__
    size_t threads = (size_t)N * (size_t)out->count;
    if (threads)
        table_ids_copy_kernel<<<blocks_for(threads, TABLE_ROWS_THREADS), TABLE_ROWS_THREADS, 0, ctx->stream>>>(*out,
                                                                                                               *in, N);
    cudaCheck(cudaGetLastError());
#else
    table_ids_copy_ref(out, in, N);
#endif
    scope_close(&scope);
}

#endif
