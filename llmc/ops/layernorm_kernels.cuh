/* Kernels and launchers of layernorm.h.
 *
 * A row belongs to a team of threads, a warp for short rows and several or a block for long ones, that keeps it in
 * registers: it is read once. A thread holds up to E of its elements, W (16 bytes, or one where rows do not start on 16
 * bytes) at a time, as many vectors apart as the team has threads. */
#ifndef LLMC_LAYERNORM_KERNELS_CUH
#define LLMC_LAYERNORM_KERNELS_CUH

#include "../device/device.cuh"
#include "layernorm.h"

#ifdef __CUDACC__
#include <cooperative_groups.h>
#include <cuda_pipeline_primitives.h>

// 800 for sm_80; 0 where host code is compiled.
#ifdef __CUDA_ARCH__
#define LAYERNORM_ARCH __CUDA_ARCH__
#else
#define LAYERNORM_ARCH 0
#endif

// As many channels as the threads' registers hold.
static inline void layernorm_check_size(int N, int C) {
    CHECK(N > 0 && C > 0);
    int longest = sizeof(floatX) == 2 && rows_are_vectors<floatX>(C) ? 16384 : 8192;
    if (C > longest)
        die(USAGE, "layernorm of %d channels: at most %d fit on the GPU (16384 in bf16 and fp16, in steps of 8)", C,
            longest);
}

// What goes before the normalisation.
typedef enum { LAYERNORM_ALONE, LAYERNORM_RESIDUAL, LAYERNORM_RESIDUAL_DROPOUT } LayernormBranch;

typedef struct {
    floatX *y, *r;
    Moments stats;
    const floatX* x;
    Norm p;
    int N, C;
    float inverse_C, eps;
    DropoutRows dropout;
} LayernormForward;

HOST_DEVICE static constexpr int layernorm_forward_threads(int team) { return team == WARP ? 256 : team; }

// Blocks that a multiprocessor is meant to hold; 0: as ptxas thinks best. On sm_80, and in fp32, it aims at 64
// registers where more are needed, and spills.
HOST_DEVICE static constexpr int layernorm_forward_residents(int W, int E, int team, LayernormBranch branch) {
    int tight = branch == LAYERNORM_RESIDUAL_DROPOUT && E == 32 && (W == 4 || (W == 8 && LAYERNORM_ARCH < 900));
    return tight ? (W == 4 ? 512 : 768) / layernorm_forward_threads(team) : 0;
}

// One team for a row.
template <int W, int E, int TEAM, LayernormBranch BRANCH>
__global__ void __launch_bounds__(layernorm_forward_threads(TEAM), layernorm_forward_residents(W, E, TEAM, BRANCH))
    layernorm_forward_kernel(LayernormForward a) {
    constexpr int VECTORS = E / W;
    int row = (int)(blockIdx.x * (blockDim.x / TEAM) + threadIdx.x / TEAM), first = (int)(threadIdx.x % TEAM) * W;
    if (row >= a.N) return;  // a warp as a whole: a team that is a block always has a row
    size_t start = (size_t)row * (size_t)a.C;
    Vector<floatX, W> x[VECTORS] = {}, branch[VECTORS] = {};
    float v[E], sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = first + i * TEAM * W;
        if (c < a.C) x[i] = load_vector<W>(a.x + start + c);
        if (BRANCH != LAYERNORM_ALONE && c < a.C) branch[i] = load_vector<W>(a.r + start + c);
    }
    DropoutPlace place = {0, 0};
    if (BRANCH == LAYERNORM_RESIDUAL_DROPOUT) place = dropout_place(a.dropout, row);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = first + i * TEAM * W;
        if constexpr (BRANCH != LAYERNORM_ALONE) {
            float old[W], more[W];
            to_floats(old, x[i]);
            to_floats(more, branch[i]);
            if (BRANCH == LAYERNORM_RESIDUAL_DROPOUT) dropout_multiply<W>(more, a.dropout.dropout, place, c);
#pragma unroll
            for (int k = 0; k < W; k++) old[k] += more[k];
            x[i] = from_floats<floatX, W>(old);  // what is normalised is what the backward pass will find in r
            if (c < a.C) store_vector(a.r + start + c, x[i]);
        }
        to_floats(v + i * W, x[i]);
#pragma unroll
        for (int k = 0; k < W; k++) sum += v[i * W + k];  // 0 beyond the row
    }
    float mean = team_sum<TEAM>(make_float2(sum, 0), 0).x * a.inverse_C;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
#pragma unroll
        for (int k = 0; k < W; k++) {
            float d = first + i * TEAM * W < a.C ? v[i * W + k] - mean : 0;
            squares += d * d;
        }
    float rstd = rsqrtf(team_sum<TEAM>(make_float2(squares, 0), 1).x * a.inverse_C + a.eps);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = first + i * TEAM * W;
        if (c >= a.C) break;
        float w[W], b[W];
        load_reals<W>(w, a.p.w + c);
        to_floats(b, load_vector<W>(a.p.b + c));
#pragma unroll
        for (int k = 0; k < W; k++) w[k] = (v[i * W + k] - mean) * rstd * w[k] + b[k];
        store_vector(a.y + start + c, from_floats<floatX, W>(w));
    }
    if (first == 0) {
        a.stats.mean[row] = mean;
        a.stats.rstd[row] = rstd;
    }
}

template <int W, int E, int TEAM, LayernormBranch BRANCH>
static inline void layernorm_forward_start(LayernormForward a, Context* ctx) {
    constexpr int threads = layernorm_forward_threads(TEAM);
    layernorm_forward_kernel<W, E, TEAM, BRANCH>
        <<<blocks_for((size_t)a.N, threads / TEAM), threads, 0, ctx->stream>>>(a);
    cudaCheck(cudaGetLastError());
}

template <LayernormBranch BRANCH> static inline void layernorm_forward_any(LayernormForward a, Context* ctx) {
    constexpr int W = Vector<floatX>::SIZE;
    layernorm_check_size(a.N, a.C);
    if (!rows_are_vectors<floatX>(a.C)) {
        if (a.C <= 8 * WARP) layernorm_forward_start<1, 8, WARP, BRANCH>(a, ctx);
        else layernorm_forward_start<1, 32, 512, BRANCH>(a, ctx);
    } else if (a.C <= 8 * WARP) layernorm_forward_start<W, 8, WARP, BRANCH>(a, ctx);
    else if (a.C <= 24 * WARP) layernorm_forward_start<W, 24, WARP, BRANCH>(a, ctx);
    else if (a.C <= 32 * WARP) layernorm_forward_start<W, 32, WARP, BRANCH>(a, ctx);
    else if (a.C <= 64 * WARP) layernorm_forward_start<W, 64, WARP, BRANCH>(a, ctx);
    else if (a.C <= 8 * 512) layernorm_forward_start<W, 8, 512, BRANCH>(a, ctx);
    else layernorm_forward_start<W, 32, 512, BRANCH>(a, ctx);
}

static inline void layernorm_forward(floatX* y, Moments stats, const floatX* x, Norm p, int N, int C, real eps,
                                     Context* ctx) {
    Scope scope = scope_open(ctx, "layernorm_forward", LAYERNORM_FORWARD_FLOPS(N, C), LAYERNORM_FORWARD_BYTES(N, C),
                             "N=%d C=%d", N, C);
    LayernormForward a = {y, NULL, stats, x, p, N, C, 1.0f / (float)C, (float)eps, {}};
    layernorm_forward_any<LAYERNORM_ALONE>(a, ctx);
    scope_close(&scope);
}

static inline void residual_layernorm_forward(floatX* y, floatX* r, Moments stats, const floatX* x, Norm p, int N,
                                              int C, real eps, Dropout dropout, Context* ctx) {
    CHECK(dropout.threshold == 0 || dropout.sequences->rows == N);
    Scope scope = scope_open(ctx, "residual_layernorm_forward", RESIDUAL_LAYERNORM_FORWARD_FLOPS(N, C),
                             RESIDUAL_LAYERNORM_FORWARD_BYTES(N, C), "N=%d C=%d", N, C);
    LayernormForward a = {y, r, stats, x, p, N, C, 1.0f / (float)C, (float)eps, dropout_rows(dropout)};
    if (dropout.threshold) layernorm_forward_any<LAYERNORM_RESIDUAL_DROPOUT>(a, ctx);
    else layernorm_forward_any<LAYERNORM_RESIDUAL>(a, ctx);
    scope_close(&scope);
}

// What the backward pass does besides: nothing; dbias; dbranch and dbias; dy, the gradient of dropout(y), is taken
// through dropout first.
typedef enum {
    LAYERNORM_BACKWARD,
    LAYERNORM_BACKWARD_RESIDUAL,
    LAYERNORM_BACKWARD_RESIDUAL_DROPOUT,
    LAYERNORM_BACKWARD_DROPOUT
} LayernormExtra;

typedef struct {
    LayernormGradients to;
    float* partial;  // [blocks, layernorm_sums(extra), C]: what each block's rows add to d.w, d.b and dbias
    const floatX *dy, *x;
    Moments stats;
    const floatX* w;
    int N, C;
    Mode d_mode;
    DropoutRows dropout;
} LayernormBackward;

HOST_DEVICE static constexpr int layernorm_masked(LayernormExtra extra) {
    return extra == LAYERNORM_BACKWARD_RESIDUAL_DROPOUT || extra == LAYERNORM_BACKWARD_DROPOUT;
}
HOST_DEVICE static constexpr int layernorm_sums(LayernormExtra extra) {
    return extra == LAYERNORM_BACKWARD || extra == LAYERNORM_BACKWARD_DROPOUT ? 2 : 3;
}

// Those that lie in shared memory: dbias, and d.b where drawing the masks takes registers.
HOST_DEVICE static constexpr int layernorm_shared_dbias(LayernormExtra extra) { return layernorm_sums(extra) - 2; }
HOST_DEVICE static constexpr int layernorm_shared_sums(LayernormExtra extra) {
    return layernorm_shared_dbias(extra) + layernorm_masked(extra);
}

// Blocks that a multiprocessor holds, which bounds a thread's registers: two sums for each of E channels, and what is kept
// of a row.
HOST_DEVICE static constexpr int layernorm_backward_threads(int team) { return team == WARP ? 128 : team; }
HOST_DEVICE static constexpr int layernorm_backward_residents(int E, int team, LayernormExtra extra) {
    if (layernorm_masked(extra) && team == WARP) return E <= 8 ? 5 : sizeof(floatX) > 2 ? 2 : 3;
    if (layernorm_masked(extra)) return E <= 8 ? 768 / team : E <= 16 ? 512 / team : 1;
    if (team == WARP) return E <= 8 ? 6 : sizeof(floatX) > 2 ? 2 : E <= 24 ? 4 : 3;
    if (E <= 8) return 1024 / team;
    return E <= 16 ? (sizeof(floatX) > 2 ? 2 : 3) : 1;
}

// Whether a row is read a second time, because it does not fit into the registers.
HOST_DEVICE static constexpr int layernorm_backward_rereads(int E, int team, LayernormExtra extra) {
    return layernorm_masked(extra) && team > WARP && E * team > 4096;
}

// Whether loads must stay below a fence. On sm_100 ptxas moves those of a whole row up where a thread has many
// channels, and spills; everywhere it does so with what the masks are drawn from.
HOST_DEVICE static constexpr int layernorm_backward_fenced(int E, int team, LayernormExtra extra) {
    return team > WARP && (layernorm_masked(extra) || (LAYERNORM_ARCH >= 1000 && E > 8));
}

// A thread's sums in shared memory lie in groups of up to four (G) that are read and written as one; the same group of
// all threads lies side by side.
template <int G> __device__ inline void layernorm_add_group(float* sums, const float* d) {
    if constexpr (G == 4) {
        float4 sum = *(const float4*)sums;
        *(float4*)sums = make_float4(sum.x + d[0], sum.y + d[1], sum.z + d[2], sum.w + d[3]);
    } else {
        *sums += *d;
    }
    static_assert(G == 4 || G == 1, "four or one");
}

// The blocks' partial sums [blocks, columns] become d.w, d.b and dbias. A block takes `width` columns at a time, and
// thread groups of that size take every so many-th row.
template <int THREADS> __device__ inline void layernorm_sum_blocks(LayernormBackward a, int columns, float* shared) {
    int blocks = (int)gridDim.x, each = (columns + blocks - 1) / blocks;
    int width = min(THREADS, (each + 7) / 8 * 8);  // whole sectors of 32 bytes
    int slices = THREADS / width, slice = (int)threadIdx.x / width, at = (int)threadIdx.x % width;
    for (int first = (int)blockIdx.x * width; first < columns; first += blocks * width) {
        int column = first + at;
        float sum = 0;
        if (slice < slices && column < columns) {
#pragma unroll 4
            for (int b = slice; b < blocks; b += slices) sum += a.partial[(size_t)b * (size_t)columns + (size_t)column];
        }
        __syncthreads();
        shared[threadIdx.x] = sum;
        __syncthreads();
        if (slice > 0 || column >= columns) continue;
#pragma unroll 4
        for (int i = 1; i < slices; i++) sum += shared[i * width + at];
        real* to = column < a.C       ? a.to.d.w + column
                   : column < 2 * a.C ? a.to.d.b + (column - a.C)
                   : a.to.r.dbias     ? a.to.r.dbias + (column - 2 * a.C)
                                      : NULL;
        if (to) *to = a.d_mode == ADD ? *to + sum : sum;
    }
}

// As many blocks as run at a time, and they must: their teams take rows in turn and keep the sums for d.w and d.b of all of
// them in registers, as long as there are any left, and the others in shared memory.
template <int W, int E, int TEAM, Mode DX_MODE, LayernormExtra EXTRA>
__global__ void __launch_bounds__(layernorm_backward_threads(TEAM), layernorm_backward_residents(E, TEAM, EXTRA))
    layernorm_backward_kernel(LayernormBackward a) {
    constexpr int THREADS = layernorm_backward_threads(TEAM), G = W < 4 ? 1 : 4;
    constexpr int VECTORS = E / W, TEAMS = THREADS / TEAM;
    constexpr int EARLY = TEAM == WARP;          // blocks have no registers left for more than dy and x
    constexpr int EARLY_OLD = EARLY && E <= 24;  // more channels would spill a register or two
    constexpr int REREAD = layernorm_backward_rereads(E, TEAM, EXTRA);
    constexpr int FENCED = layernorm_backward_fenced(E, TEAM, EXTRA);
    constexpr int SHARED_DBIAS = layernorm_shared_dbias(EXTRA), SHARED_DB = layernorm_masked(EXTRA);
    constexpr int SHARED_SUMS = SHARED_DBIAS + SHARED_DB, SUMS = layernorm_sums(EXTRA);
    constexpr int OUTPUT = EXTRA == LAYERNORM_BACKWARD_DROPOUT;
    extern __shared__ float4 layernorm_shared[];  // [sums][E / G][THREADS][G]; at last THREADS floats
    float* shared_sums = (float*)layernorm_shared;
    int team = (int)threadIdx.x / TEAM, first = (int)(threadIdx.x % TEAM) * W, turn = 0;
    Vector<floatX, W> kept[VECTORS] = {};
    float dw[E] = {}, db[SHARED_DB ? 1 : E] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (EARLY && first + i * TEAM * W < a.C) kept[i] = load_vector<W>(a.w + first + i * TEAM * W);
    for (int e = 0; e < SHARED_SUMS * E; e++) shared_sums[e * THREADS + (int)threadIdx.x] = 0;
    if (SHARED_SUMS > 0) __syncthreads();
    for (unsigned row = blockIdx.x * TEAMS + team; row < (unsigned)a.N; row += gridDim.x * TEAMS) {
        size_t start = (size_t)row * (size_t)a.C;
        Vector<floatX, W> x[VECTORS] = {}, dy[VECTORS] = {}, old[VECTORS] = {};
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = first + i * TEAM * W;
            if (!(REREAD && OUTPUT) && c < a.C) dy[i] = load_vector<W>(a.dy + start + c);
            if (!(REREAD && OUTPUT) && c < a.C) x[i] = load_vector<W>(a.x + start + c);
            if (DX_MODE == ADD && EARLY_OLD && c < a.C) old[i] = load_vector<W>(a.to.r.dx + start + c);
        }
        float mean = a.stats.mean[row], rstd = a.stats.rstd[row];
        DropoutPlace place = {0, 0};
        if (OUTPUT) place = dropout_place(a.dropout, (int)row);
        float2 sums = make_float2(0, 0);  // of e and of e * u; beyond the row both are 0 because dy is
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            float g[W], u[W], weight[W];
            Vector<floatX, W> w = kept[i];
            int c = first + i * TEAM * W;
            if (!EARLY && c < a.C) w = load_vector<W>(a.w + c);
            if (OUTPUT && FENCED) __syncwarp();
            if (REREAD && OUTPUT && c < a.C) {
                dy[i] = load_vector<W>(a.dy + start + c);
                x[i] = load_vector<W>(a.x + start + c);
            }
            to_floats(g, dy[i]);
            if constexpr (OUTPUT) {
                dropout_multiply<W>(g, a.dropout.dropout, place, c);
                dy[i] = from_floats<floatX, W>(g);
                to_floats(g, dy[i]);
                if (REREAD && c < a.C) store_vector(a.to.r.dx + start + c, dy[i]);  // dx is SET: to be read again
            }
            to_floats(u, x[i]);
            to_floats(weight, w);
#pragma unroll
            for (int k = 0; k < W; k++) {
                float e = g[k] * weight[k];
                u[k] = (u[k] - mean) * rstd;
                sums.x += e;
                sums.y += e * u[k];
                dw[i * W + k] += g[k] * u[k];
                if constexpr (!SHARED_DB) db[i * W + k] += g[k];
            }
#pragma unroll
            for (int k = 0; k < W && SHARED_DB; k += G)
                layernorm_add_group<G>(shared_sums + ((SHARED_DBIAS * E + i * W + k) * THREADS + (int)threadIdx.x * G),
                                       g + k);
        }
        sums = team_sum<TEAM>(sums, turn);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            keep_packed(&x[i]);
            keep_packed(&dy[i]);
            keep_packed(&kept[i]);
        }
        turn ^= 1;
        // Divided, not multiplied by 1 / C: the division's rare path ends a basic block, and ptxas does not keep floats
        // across it either. Without that the kernel for 768 channels spills 300 bytes.
        float average = sums.x / (float)a.C, slope = sums.y / (float)a.C;
        if (EXTRA == LAYERNORM_BACKWARD_RESIDUAL_DROPOUT) place = dropout_place(a.dropout, (int)row);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = first + i * TEAM * W;
            if (c >= a.C) break;
            float d[W], u[W], weight[W], sum[W];
            Vector<floatX, W> w = kept[i];
            if (FENCED) __syncwarp(__activemask());
            if (REREAD) {
                dy[i] = load_vector<W>((OUTPUT ? a.to.r.dx : a.dy) + start + c);
                x[i] = load_vector<W>(a.x + start + c);
            }
            if (!EARLY) w = load_vector<W>(a.w + c);
            if (!EARLY_OLD && DX_MODE == ADD) old[i] = load_vector<W>(a.to.r.dx + start + c);
            to_floats(d, dy[i]);
            to_floats(u, x[i]);
            to_floats(weight, w);
            to_floats(sum, old[i]);
#pragma unroll
            for (int k = 0; k < W; k++) {
                d[k] = rstd * (d[k] * weight[k] - average - (u[k] - mean) * rstd * slope);
                if (DX_MODE == ADD) d[k] += sum[k];
            }
            store_vector(a.to.r.dx + start + c, from_floats<floatX, W>(d));
            if constexpr (EXTRA == LAYERNORM_BACKWARD_RESIDUAL_DROPOUT) {
                dropout_multiply<W>(d, a.dropout.dropout, place, c);
                store_vector(a.to.r.dbranch + start + c, from_floats<floatX, W>(d));
            }
#pragma unroll
            for (int k = 0; k < W && SHARED_DBIAS; k += G)
                layernorm_add_group<G>(shared_sums + ((i * W + k) * THREADS + (int)threadIdx.x * G), d + k);
        }
    }
    // The block's teams, one after the other, then its share of the partial sums.
    float *weight = a.partial + (size_t)blockIdx.x * SUMS * (size_t)a.C, *bias = weight + a.C;
    if constexpr (TEAMS > 1) {
        __shared__ float shared[SHARED_DB ? 1 : 2][E][WARP];  // [e][lane], so that lanes use different banks
        int lane = (int)threadIdx.x % WARP;
        for (int t = 0; t < TEAMS; t++) {
#pragma unroll
            for (int e = 0; e < E && team == t; e++) {
                shared[0][e][lane] = t ? shared[0][e][lane] + dw[e] : dw[e];
                if constexpr (!SHARED_DB) shared[1][e][lane] = t ? shared[1][e][lane] + db[e] : db[e];
            }
            __syncthreads();
        }
        for (int c = (int)threadIdx.x; c < a.C; c += (int)blockDim.x) {
            int e = c / (WARP * W) * W + c % W, owner = c % (WARP * W) / W;
            weight[c] = shared[0][e][owner];
            if constexpr (!SHARED_DB) bias[c] = shared[1][e][owner];
        }
    } else {
#pragma unroll
        for (int e = 0; e < E; e++) {
            int c = first + e / W * TEAM * W + e % W;
            if (c >= a.C) continue;
            weight[c] = dw[e];
            if constexpr (!SHARED_DB) bias[c] = db[e];
        }
    }
    if (SHARED_SUMS > 0) __syncthreads();
    for (int s = 0; s < SHARED_SUMS; s++)  // dbias, d.b
        for (int c = (int)threadIdx.x; c < a.C; c += THREADS) {
            int e = s * E + c / (TEAM * W) * W + c % W / G * G, owner = c % (TEAM * W) / W;
            float sum = 0;
            for (int t = 0; t < TEAMS; t++) sum += shared_sums[e * THREADS + (t * TEAM + owner) * G + c % G];
            bias[(SHARED_DBIAS - s) * a.C + c] = sum;
        }
    cooperative_groups::this_grid().sync();
    layernorm_sum_blocks<THREADS>(a, SUMS * a.C, shared_sums);
}

// Scratch that any launch takes at most, for N rows at most: with the teams of layernorm_backward_choose(), below, and as
// many blocks as their registers were bounded for.
static inline size_t layernorm_scratch_bytes(int N, int C, const Context* ctx) {
    int E = 8, team = WARP;
    if (C > 8 * WARP && !rows_are_vectors<floatX>(C)) team = 1024;
    else if (C > 16 * 256) E = 32, team = 512;
    else if (C > 8 * 256) E = 16, team = 256;
    else if (C > 32 * WARP) team = 256;
    else if (C > 24 * WARP) E = 32;
    else if (C > 8 * WARP) E = 24;
    int residents = max_int(layernorm_backward_residents(E, team, LAYERNORM_BACKWARD_RESIDUAL),
                            layernorm_backward_residents(E, team, LAYERNORM_BACKWARD_RESIDUAL_DROPOUT));
    size_t rows = (size_t)(layernorm_backward_threads(team) / team);
    int blocks = min_int(ctx->multiprocessors * residents, (int)blocks_for((size_t)N, rows));
    return (size_t)blocks * layernorm_sums(LAYERNORM_BACKWARD_RESIDUAL) * (size_t)C * sizeof(float);
}

template <int W, int E, int TEAM, LayernormExtra EXTRA>
static inline void layernorm_backward_start(LayernormBackward a, Mode dx_mode, Context* ctx) {
    constexpr int threads = layernorm_backward_threads(TEAM), teams = threads / TEAM;
    constexpr int sums = layernorm_shared_sums(EXTRA), shared = threads * (sums ? sums * E : 1) * (int)sizeof(float);
    void (*kernel)(LayernormBackward) = layernorm_backward_kernel<W, E, TEAM, SET, EXTRA>;
    if constexpr (EXTRA != LAYERNORM_BACKWARD_DROPOUT)
        if (dx_mode == ADD) kernel = layernorm_backward_kernel<W, E, TEAM, ADD, EXTRA>;
    if (shared > 32 << 10)  // more than every launch may have
        cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    int residents;
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&residents, kernel, threads, shared));
    residents = min_int(residents, layernorm_backward_residents(E, TEAM, EXTRA));
    int blocks = min_int(ctx->multiprocessors * residents, (int)blocks_for((size_t)a.N, teams));
    a.partial = (float*)device_scratch(ctx, (size_t)blocks * layernorm_sums(EXTRA) * (size_t)a.C * sizeof(float));
    void* arguments[] = {&a};
    cudaCheck(cudaLaunchCooperativeKernel((const void*)kernel, dim3((unsigned)blocks), dim3(threads), arguments, shared,
                                          ctx->stream));
}

template <LayernormExtra EXTRA>
static inline void layernorm_backward_choose(LayernormBackward a, Mode dx_mode, Context* ctx) {
    constexpr int W = Vector<floatX>::SIZE;
    if (!rows_are_vectors<floatX>(a.C)) {
        if (a.C <= 8 * WARP) return layernorm_backward_start<1, 8, WARP, EXTRA>(a, dx_mode, ctx);
        if constexpr (layernorm_masked(EXTRA)) return layernorm_backward_start<1, 16, 512, EXTRA>(a, dx_mode, ctx);
        else return layernorm_backward_start<1, 8, 1024, EXTRA>(a, dx_mode, ctx);
    }
    if (a.C <= 8 * WARP) return layernorm_backward_start<W, 8, WARP, EXTRA>(a, dx_mode, ctx);
    if (a.C <= 24 * WARP) return layernorm_backward_start<W, 24, WARP, EXTRA>(a, dx_mode, ctx);
    if (a.C <= 32 * WARP) return layernorm_backward_start<W, 32, WARP, EXTRA>(a, dx_mode, ctx);
    if (a.C <= 8 * 256) return layernorm_backward_start<W, 8, 256, EXTRA>(a, dx_mode, ctx);
    if (a.C <= 16 * 256) return layernorm_backward_start<W, 16, 256, EXTRA>(a, dx_mode, ctx);
    layernorm_backward_start<W, 32, sizeof(floatX) == 2 ? 512 : 256, EXTRA>(a, dx_mode, ctx);
}

static inline void layernorm_backward_any(LayernormGradients to, const floatX* dy, const floatX* x, Moments stats,
                                          const floatX* w, Rows size, Mode dx_mode, Mode d_mode, Context* ctx) {
    Dropout dropout = to.output.threshold ? to.output : to.r.dropout;
    LayernormBackward a = {to, NULL, dy, x, stats, w, size.N, size.C, d_mode, dropout_rows(dropout)};
    layernorm_check_size(size.N, size.C);
    if (to.output.threshold) layernorm_backward_choose<LAYERNORM_BACKWARD_DROPOUT>(a, dx_mode, ctx);
    else if (dropout.threshold) layernorm_backward_choose<LAYERNORM_BACKWARD_RESIDUAL_DROPOUT>(a, dx_mode, ctx);
    else if (to.r.dbias) layernorm_backward_choose<LAYERNORM_BACKWARD_RESIDUAL>(a, dx_mode, ctx);
    else layernorm_backward_choose<LAYERNORM_BACKWARD>(a, dx_mode, ctx);
}

#endif
#endif
