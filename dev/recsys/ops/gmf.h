/* The embeddings of NeuMF: gather, elementwise product, and the two concatenations.
 *
 *   gather     h0[n] = [mlp_user[u] | mlp_item[i]]                           u = users[n], i = items[n]
 *   join       x[n]  = [mf_user[u] * mf_item[i] | h[n]]
 *   split      dmf_user[n] = dx[n, 0 .. F-1] * mf_item[i];  dmf_item[n] = dx[n, 0 .. F-1] * mf_user[u];  dh = the rest
 *
 * Shapes: mf tables [rows, F], mlp tables [rows, E], h0 [N, 2 E], h, dh [N, H], x, dx [N, F + H], dmf_... [N, F]. All
 * outputs are SET. dtypes: floatX; users, items int, which whoever loads a batch has checked.
 * Source: He et al., "Neural Collaborative Filtering", 2017. */
#ifndef DEV_RECSYS_OPS_GMF_H
#define DEV_RECSYS_OPS_GMF_H

#include "llmc/device/scope.h"
#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif

typedef struct {
    const floatX *mf_user, *mf_item, *mlp_user, *mlp_item;
    const int *users, *items;
    int N, F, E, H;
} NcfLookups;

// Element c of row n of each output; the kernels and the CPU share them.
HOST_DEVICE static inline floatX gmf_gather_at(NcfLookups s, size_t n, int c) {
    size_t E = (size_t)s.E;
    return c < s.E ? s.mlp_user[(size_t)s.users[n] * E + (size_t)c]
                   : s.mlp_item[(size_t)s.items[n] * E + (size_t)(c - s.E)];
}

#ifdef __CUDACC__
enum { GMF_THREADS = 256 };

// One element per thread, in all three. ncf_fused.cuh is the fast path of the published shape.
static __global__ void gmf_gather_kernel(floatX* h0, NcfLookups s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, width = 2 * (size_t)s.E;
    if (i < (size_t)s.N * width) h0[i] = gmf_gather_at(s, i / width, (int)(i % width));
}

static __global__ void gmf_join_kernel(floatX* x, const floatX* h, NcfLookups s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, width = (size_t)(s.F + s.H), n = i / width, c = i % width;
    if (i >= (size_t)s.N * width) return;
    size_t F = (size_t)s.F;
    x[i] = c >= F ? h[n * (size_t)s.H + c - F]
                  : from_float<floatX>(to_float(s.mf_user[(size_t)s.users[n] * F + c]) *
                                       to_float(s.mf_item[(size_t)s.items[n] * F + c]));
}

static __global__ void gmf_split_kernel(floatX* dmf_user, floatX* dmf_item, floatX* dh, const floatX* dx,
                                        NcfLookups s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, width = (size_t)(s.F + s.H), n = i / width, c = i % width;
    if (i >= (size_t)s.N * width) return;
    size_t F = (size_t)s.F, at = n * F + c;
    if (c >= F) dh[n * (size_t)s.H + c - F] = dx[i];
    if (c >= F) return;
    dmf_user[at] = from_float<floatX>(to_float(dx[i]) * to_float(s.mf_item[(size_t)s.items[n] * F + c]));
    dmf_item[at] = from_float<floatX>(to_float(dx[i]) * to_float(s.mf_user[(size_t)s.users[n] * F + c]));
}
#endif

static inline void gmf_gather(floatX* h0, NcfLookups s, Context* ctx) {
    size_t n = 2 * (size_t)s.N * (size_t)s.E;
    Scope scope = scope_open(ctx, "gmf_gather", 0, 2.0 * (double)n * sizeof(floatX) + 8.0 * s.N, "N=%d E=%d", s.N, s.E);
#ifdef __CUDACC__
    gmf_gather_kernel<<<blocks_for(n, GMF_THREADS), GMF_THREADS, 0, ctx->stream>>>(h0, s);
    cudaCheck(cudaGetLastError());
#else
#pragma omp parallel for schedule(static)
    for (int b = 0; b < s.N; b++)
        for (int c = 0; c < 2 * s.E; c++) h0[(size_t)b * 2 * (size_t)s.E + (size_t)c] = gmf_gather_at(s, (size_t)b, c);
    (void)n;
#endif
    scope_close(&scope);
}

static inline void gmf_join(floatX* x, const floatX* h, NcfLookups s, Context* ctx) {
    Scope scope = scope_open(ctx, "gmf_join", 1.0 * s.N * s.F, (3.0 * s.F + 2.0 * s.H) * s.N * sizeof(floatX),
                             "N=%d F=%d H=%d", s.N, s.F, s.H);
#ifdef __CUDACC__
    size_t n = (size_t)s.N * (size_t)(s.F + s.H);
    gmf_join_kernel<<<blocks_for(n, GMF_THREADS), GMF_THREADS, 0, ctx->stream>>>(x, h, s);
    cudaCheck(cudaGetLastError());
#else
#pragma omp parallel for schedule(static)
    for (int n = 0; n < s.N; n++) {
        real* out = x + (size_t)n * (size_t)(s.F + s.H);
        const real *u = s.mf_user + (size_t)s.users[n] * (size_t)s.F, *i = s.mf_item + (size_t)s.items[n] * (size_t)s.F;
        for (int c = 0; c < s.F; c++) out[c] = u[c] * i[c];
        memcpy(out + s.F, h + (size_t)n * (size_t)s.H, (size_t)s.H * sizeof *out);
    }
#endif
    scope_close(&scope);
}

static inline void gmf_split(floatX* dmf_user, floatX* dmf_item, floatX* dh, const floatX* dx, NcfLookups s,
                             Context* ctx) {
    Scope scope = scope_open(ctx, "gmf_split", 2.0 * s.N * s.F, (5.0 * s.F + 2.0 * s.H) * s.N * sizeof(floatX),
                             "N=%d F=%d H=%d", s.N, s.F, s.H);
#ifdef __CUDACC__
    size_t n = (size_t)s.N * (size_t)(s.F + s.H);
    gmf_split_kernel<<<blocks_for(n, GMF_THREADS), GMF_THREADS, 0, ctx->stream>>>(dmf_user, dmf_item, dh, dx, s);
    cudaCheck(cudaGetLastError());
#else
#pragma omp parallel for schedule(static)
    for (int n = 0; n < s.N; n++) {
        const real *d = dx + (size_t)n * (size_t)(s.F + s.H), *u = s.mf_user + (size_t)s.users[n] * (size_t)s.F,
                   *i = s.mf_item + (size_t)s.items[n] * (size_t)s.F;
        size_t at = (size_t)n * (size_t)s.F;
        for (size_t c = 0; c < (size_t)s.F; c++) dmf_user[at + c] = d[c] * i[c], dmf_item[at + c] = d[c] * u[c];
        memcpy(dh + (size_t)n * (size_t)s.H, d + s.F, (size_t)s.H * sizeof *dh);
    }
#endif
    scope_close(&scope);
}

#endif
