/* NeuMF's training step on the GPU for the published widths: factors 64, embeddings 128 + 128, layers 256, 128, 64.
 *
 * The same sums as the ops of train_ncf.cu's list, with less traffic:
 *   products    the first layer is linear in its halves, W0 [u | i] = W0u u + W0i i. So every row of both tables is
 *               multiplied once: user_products [users, 256], item_products [items, 256]
 *   step        one persistent block per multiprocessor takes tiles of 64 samples through the other layers, forward and
 *               backward, in shared memory. It writes dz0 [B, 256], the gradient of what goes into the first ReLU, and
 *               dlogits [B]; its sums of the gradients of W1, W2, ... stay in registers until the end
 *   rows        S[r] = the sum of dz0 over the samples of row r; G[r] = w_mf * the sum of dlogit times the other factor
 *   gradients   of an embedding row: S[r] W0u; of W0u: S^T times the table. Both are matmuls over rows, not samples
 *   reduce      adds the blocks' partial sums in their order
 *   adam        all four tables in one launch
 *
 * h0 [B, 256] and its gradient never exist. Products are mma.sync of bf16 with fp32 sums; activations, products and S
 * are rounded to bf16. Deterministic: a block's tiles and rows depend on the shape and the number of multiprocessors
 * only.
 *
 * ncf_step.cuh has the step and what all kernels share; this file has the other kernels and the launchers. */
#ifndef DEV_RECSYS_OPS_NCF_FUSED_CUH
#define DEV_RECSYS_OPS_NCF_FUSED_CUH

#include "dev/recsys/ops/gmf.h"
#include "dev/recsys/ops/ncf_step.cuh"
#include "llmc/device/cublaslt.cuh"

#if defined(__CUDACC__) && defined(PRECISION_BF16)

// ---------------------------------------------------------------------------------------------------------
// Sums by row

// One table's rows: sums S [rows, 256] of dz0 and G [rows, 64] of the factors' gradients.
typedef struct {
    RowSegments segments;
    const int* others;            // [B] the other id of each sample
    const floatX *mine, *theirs;  // factors
    floatX* S;
    float* G;
} NcfRows;

// The sums of row r; a lane has eight columns of dz0 and two of the factors.
__device__ inline void ncf_store_row(const NcfRows& t, int r, const float (&S)[8], float g0, float g1) {
    int lane = threadIdx.x % WARP;
    store128(t.S + (size_t)r * NCF_H0 + lane * 8, from_floats<floatX>(S));
    *(float2*)(t.G + (size_t)r * NCF_F + lane * 2) = make_float2(g0, g1);
}

// Rows begin .. end - 1 have no samples.
__device__ inline void ncf_clear_rows(const NcfRows& t, int begin, int end) {
    const float zeros[8] = {0};
    for (int r = begin; r < end; r++) ncf_store_row(t, r, zeros, 0, 0);
}

// Sums over the rows of one table that a warp has seen.
typedef struct {
    float db0[8], dw3[2];
} NcfRowTotals;

// IS_USER: add to the totals too. One warp: the rows that begin among the WARP positions from `begin` on, and the empty
// rows before each of them.
template <bool IS_USER>
__device__ __forceinline__ void ncf_rows_chunk(const NcfStep& s, const NcfRows& t, int begin, const float (&w)[2],
                                               NcfRowTotals& totals) {
    const RowSegments& segments = t.segments;
    int lane = threadIdx.x % WARP;
    float S[8] = {0}, G[2] = {0};
    for (int first = begin; first < segments.N; first += WARP) {
        RowChunk c = row_chunk(segments, first);
        if (first == begin && !c.heads) return;  // all belongs to a row that began before
        int other = t.others[c.source], k = first == begin ? __ffs((int)c.heads) - 1 : 0, end = c.count;
        float dlogit = s.dlogits[c.source];
        if (first > begin && c.tails) end = __ffs((int)c.tails);
        unsigned gaps = __ballot_sync(ALL_LANES, lane >= k && lane < end && c.key > c.before + 1);
        for (; gaps; gaps &= gaps - 1) {
            int at = __ffs((int)gaps) - 1;
            ncf_clear_rows(t, __shfl_sync(ALL_LANES, c.before, at) + 1, __shfl_sync(ALL_LANES, c.key, at));
        }
        if (first + end == segments.N) ncf_clear_rows(t, __shfl_sync(ALL_LANES, c.key, end - 1) + 1, segments.rows);
        for (; k < end; k += ROWS_LOADS) {
            Vector<floatX> x[ROWS_LOADS];
            __nv_bfloat162 f[ROWS_LOADS];
#pragma unroll
            for (int j = 0; j < ROWS_LOADS; j++) {
                int at = min(k + j, end - 1), n = __shfl_sync(ALL_LANES, c.source, at),
                    o = __shfl_sync(ALL_LANES, other, at);
                x[j] = load128_streaming(s.dz0 + (size_t)n * NCF_H0 + lane * 8);
                f[j] = *(const __nv_bfloat162*)(t.theirs + (size_t)o * NCF_F + lane * 2);
            }
#pragma unroll
            for (int j = 0; j < ROWS_LOADS; j++) {
                int at = min(k + j, end - 1), r = __shfl_sync(ALL_LANES, c.key, at);
                float d = __shfl_sync(ALL_LANES, dlogit, at), values[8];
                if (k + j >= end) break;
                to_floats(values, x[j]);
#pragma unroll
                for (int e = 0; e < 8; e++) S[e] += values[e];
                G[0] += d * __low2float(f[j]), G[1] += d * __high2float(f[j]);
                if (!(c.tails >> at & 1)) continue;
                ncf_store_row(t, r, S, w[0] * G[0], w[1] * G[1]);
                if constexpr (IS_USER) {
                    __nv_bfloat162 mine = *(const __nv_bfloat162*)(t.mine + (size_t)r * NCF_F + lane * 2);
#pragma unroll
                    for (int e = 0; e < 8; e++) totals.db0[e] += S[e];
                    totals.dw3[0] += G[0] * __low2float(mine), totals.dw3[1] += G[1] * __high2float(mine);
                }
#pragma unroll
                for (int e = 0; e < 8; e++) S[e] = 0;
                G[0] = G[1] = 0;
            }
        }
        if (c.tails >> (end - 1) & 1) return;
    }
}

// A warp takes every so many chunks of the users' sorted samples, then of the items'. Sums over all samples, db0 and
// the last layer's, come from the users' rows.
static __global__ void __launch_bounds__(NCF_THREADS) ncf_rows_kernel(NcfStep s, NcfRows user, NcfRows item) {
    __shared__ float sums[NCF_THREADS / WARP][NCF_ROW_PARTIAL];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, stride = gridDim.x * NCF_THREADS;
    int begin = (blockIdx.x * (NCF_THREADS / WARP) + warp) * WARP;
    float w[2] = {to_float(s.w3[lane * 2]), to_float(s.w3[lane * 2 + 1])};
    NcfRowTotals totals = {{0}, {0}};
    for (int first = begin; first < s.B; first += stride) ncf_rows_chunk<true>(s, user, first, w, totals);
    for (int first = begin; first < s.B; first += stride) ncf_rows_chunk<false>(s, item, first, w, totals);
#pragma unroll
    for (int c = 0; c < 8; c++) sums[warp][lane * 8 + c] = totals.db0[c];
    sums[warp][NCF_H0 + lane * 2] = totals.dw3[0], sums[warp][NCF_H0 + lane * 2 + 1] = totals.dw3[1];
    __syncthreads();
    for (int c = threadIdx.x; c < NCF_ROW_PARTIAL; c += NCF_THREADS) {
        float total = 0;
        for (int k = 0; k < NCF_THREADS / WARP; k++) total += sums[k][c];
        s.row_partial[(size_t)blockIdx.x * NCF_ROW_PARTIAL + c] = total;
    }
}

// Where the sums go.
typedef struct {
    real *db0, *dw1, *db1, *dw2, *db2, *dw3, *db3, *loss;
} NcfSums;

// A block adds the partial sums of WARP elements of all blocks: each warp every so many of them, in order. The last
// block adds the losses.
static __global__ void __launch_bounds__(NCF_THREADS)
    ncf_reduce_kernel(NcfSums out, NcfStep s, int blocks, int row_blocks) {
    constexpr int WARPS = NCF_THREADS / WARP;
    __shared__ float sums[WARPS][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, e = blockIdx.x * WARP + lane;
    if (blockIdx.x + 1 == gridDim.x) {
        double loss = threadIdx.x < blocks ? s.partial_loss[threadIdx.x] : 0;
        loss = block_sum(loss);
        if (threadIdx.x == 0) *out.loss = (real)(s.scale * loss);
        return;
    }
    int of_rows = e >= NCF_PARTIAL, count = of_rows ? row_blocks : blocks, k = of_rows ? e - NCF_PARTIAL : e;
    const float* from = of_rows ? s.row_partial + k : s.partial + k;
    size_t stride = of_rows ? NCF_ROW_PARTIAL : NCF_PARTIAL;
    float sum = 0;
    if (e < NCF_PARTIAL + NCF_ROW_PARTIAL) {
#pragma unroll 8
        for (int b = warp; b < count; b += WARPS) sum += from[(size_t)b * stride];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || e >= NCF_PARTIAL + NCF_ROW_PARTIAL) return;
    sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += sums[i][lane];
    if (of_rows && k < NCF_H0) out.db0[k] = sum;
    else if (of_rows) out.dw3[k - NCF_H0] = sum;
    else if (k < NCF_DW2) out.dw1[k] = sum;
    else if (k < NCF_DB1) out.dw2[k - NCF_DW2] = sum;
    else if (k < NCF_DB2) out.db1[k - NCF_DB1] = sum;
    else if (k < NCF_DW3) out.db2[k - NCF_DB2] = sum;
    else if (k < NCF_DB3) out.dw3[NCF_F + k - NCF_DW3] = sum;
    else *out.db3 = sum;
}

// ---------------------------------------------------------------------------------------------------------
// Adam of all tables

// `g32` or `g16` [n]: the gradient.
typedef struct {
    EmbeddingTable table;
    const float* g32;
    const floatX* g16;
    size_t n;
} NcfAdamJob;

typedef struct {
    NcfAdamJob job[4];
    unsigned first_block[5];
} NcfAdamJobs;

// Each thread updates four adjacent elements of one table.
static __global__ void __launch_bounds__(NCF_THREADS)
    ncf_adam_kernel(NcfAdamJobs jobs, AdamWCoefficients c, const AdamWStep* step) {
    int j = 0;
    while (blockIdx.x >= jobs.first_block[j + 1]) j++;
    const NcfAdamJob& job = jobs.job[j];
    size_t i = 4 * ((size_t)(blockIdx.x - jobs.first_block[j]) * NCF_THREADS + threadIdx.x);
    if (i >= job.n || !step->is_taken) return;
    const EmbeddingTable& t = job.table;
    Vector<real> w = load128(t.w + i), m = load128(t.m + i), v = load128(t.v + i);
    float g[4];
    if (job.g32) *(float4*)g = *(const float4*)(job.g32 + i);
    else to_floats(g, row_load(job.g16 + i));
    row_adam(t, i, w, m, v, g, c, step);
}

// ---------------------------------------------------------------------------------------------------------
// Launchers

// C [M, N] = A [M, K] B [K, N]; row: elements between rows, T: stored transposed.
typedef struct {
    const void* p;
    int row;
    cublasOperation_t op;
} NcfMatrix;

static inline void ncf_matmul(void* c, int c_row, int c_is_real, NcfMatrix a, NcfMatrix b, BatchSize n, Context* ctx) {
    double elements = (double)n.M * n.K + (double)n.K * n.N, bytes = c_is_real ? sizeof(real) : sizeof(floatX);
    Scope scope = scope_open(ctx, "ncf_matmul", 2.0 * n.M * n.N * n.K,
                             elements * sizeof(floatX) + (double)n.M * n.N * bytes, "M=%d N=%d K=%d", n.M, n.N, n.K);
    BatchMatrix C = {c, {c_is_real ? CUDA_R_32F : cublaslt_type(), CUBLAS_OP_N, c_row, 0}};
    BatchMatrix A = {(void*)a.p, {cublaslt_type(), a.op, a.row, 0}},
                B = {(void*)b.p, {cublaslt_type(), b.op, b.row, 0}};
    batched_product(C, A, B, n, 1, ctx);
    scope_close(&scope);
}

static inline unsigned ncf_row_blocks(const Context* ctx) { return (unsigned)(NCF_ROW_BLOCKS * ctx->multiprocessors); }

// Whether this GPU can run the step, whose body is compiled for compute capability 9.0 and later.
static inline int ncf_step_fits(const Context* ctx) {
    cudaFuncAttributes attributes;
    cudaCheck(cudaFuncGetAttributes(&attributes, ncf_step_kernel));
    return attributes.ptxVersion >= 90 && attributes.sharedSizeBytes + sizeof(NcfShared) <= ctx->shared_of_block;
}

static inline void ncf_step(NcfStep s, Context* ctx) {
    Scope scope = scope_open(ctx, "ncf_step", 6.0 * s.B * (NCF_H0 * NCF_H1 + NCF_H1 * NCF_H2),
                             (double)s.B * (3.0 * NCF_H0 + 2 * NCF_F) * sizeof(floatX), "B=%d", s.B);
    CHECK(ctx->multiprocessors <= (int)NCF_THREADS);
    kernel_allow_shared(ncf_step_kernel, sizeof(NcfShared), ctx);
    ncf_step_kernel<<<(unsigned)ctx->multiprocessors, NCF_STEP_THREADS, sizeof(NcfShared), ctx->stream>>>(s);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

static inline void ncf_rows(NcfStep s, NcfRows user, NcfRows item, Context* ctx) {
    double rows = user.segments.rows + item.segments.rows;
    Scope scope = scope_open(ctx, "ncf_rows", 2.0 * s.B * (NCF_H0 + 2 * NCF_F),
                             2.0 * s.B * (NCF_H0 + NCF_F) * sizeof(floatX) +
                                 rows * (NCF_H0 * sizeof(floatX) + NCF_F * sizeof(float)),
                             "B=%d rows=%.0f", s.B, rows);
    ncf_rows_kernel<<<ncf_row_blocks(ctx), NCF_THREADS, 0, ctx->stream>>>(s, user, item);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

static inline void ncf_reduce(NcfSums out, NcfStep s, Context* ctx) {
    Scope scope =
        scope_open(ctx, "ncf_reduce", 0, 4.0 * ctx->multiprocessors * NCF_PARTIAL, "blocks=%d", ctx->multiprocessors);
    ncf_reduce_kernel<<<blocks_for(NCF_PARTIAL + NCF_ROW_PARTIAL, WARP) + 1, NCF_THREADS, 0, ctx->stream>>>(
        out, s, ctx->multiprocessors, (int)ncf_row_blocks(ctx));
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

static inline void ncf_adam(NcfAdamJobs jobs, OptimizerSettings h, const AdamWStep* step, Context* ctx) {
    double n = 0;
    for (int j = 0; j < 4; j++) {
        n += (double)jobs.job[j].n;
        jobs.first_block[j + 1] = jobs.first_block[j] + blocks_for(jobs.job[j].n, 4 * NCF_THREADS);
    }
    Scope scope = scope_open(ctx, "ncf_adam", 15 * n, n * (7 * sizeof(real) + sizeof(floatX)), "n=%.0f", n);
    ncf_adam_kernel<<<jobs.first_block[4], NCF_THREADS, 0, ctx->stream>>>(jobs, adamw_coefficients(h), step);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

#endif
#endif
