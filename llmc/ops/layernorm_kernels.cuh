/* Kernels and launchers of layernorm.h.
 *
 * A row belongs to a team of threads, a warp for short rows and a block for long ones, that keeps it in registers: it
 * is read once. A thread holds up to E of its elements, W (16 bytes, or one where rows do not start on 16 bytes) at a
 * time, TEAM * W apart. */
#ifndef LLMC_LAYERNORM_KERNELS_CUH
#define LLMC_LAYERNORM_KERNELS_CUH

#include "../device/device.cuh"
#include "layernorm.h"

#ifdef __CUDACC__

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
    Affine p;
    int N, C;
    float inverse_C, eps;
    DropoutRows dropout;
} LayernormForward;

HOST_DEVICE static constexpr int layernorm_forward_threads(int team) { return team == WARP ? 256 : team; }

// Blocks that a multiprocessor is meant to hold; 0: as ptxas thinks best. On sm_80 it aims at 64 registers where 80 are
// needed, and spills.
HOST_DEVICE static constexpr int layernorm_forward_residents(int W, int E, int team, LayernormBranch branch) {
    int tight = LAYERNORM_ARCH < 900 && branch == LAYERNORM_RESIDUAL_DROPOUT && W == 8 && E == 32;
    return tight ? 768 / layernorm_forward_threads(team) : 0;
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
        to_floats(w, load_vector<W>(a.p.w + c));
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

static inline void layernorm_forward(floatX* y, Moments stats, const floatX* x, Affine p, int N, int C, real eps,
                                     Context* ctx) {
    Scope scope = scope_open(ctx, "layernorm_forward", LAYERNORM_FORWARD_FLOPS(N, C), LAYERNORM_FORWARD_BYTES(N, C),
                             "N=%d C=%d", N, C);
    LayernormForward a = {y, NULL, stats, x, p, N, C, 1.0f / (float)C, (float)eps, {}};
    layernorm_forward_any<LAYERNORM_ALONE>(a, ctx);
    scope_close(&scope);
}

static inline void residual_layernorm_forward(floatX* y, floatX* r, Moments stats, const floatX* x, Affine p, int N,
                                              int C, real eps, Dropout dropout, Context* ctx) {
    CHECK(dropout.threshold == 0 || dropout.sequences->rows == N);
    Scope scope = scope_open(ctx, "residual_layernorm_forward", RESIDUAL_LAYERNORM_FORWARD_FLOPS(N, C),
                             RESIDUAL_LAYERNORM_FORWARD_BYTES(N, C), "N=%d C=%d", N, C);
    LayernormForward a = {y, r, stats, x, p, N, C, 1.0f / (float)C, (float)eps, dropout_rows(dropout)};
    if (dropout.threshold) layernorm_forward_any<LAYERNORM_RESIDUAL_DROPOUT>(a, ctx);
    else layernorm_forward_any<LAYERNORM_RESIDUAL>(a, ctx);
    scope_close(&scope);
}

typedef struct {
    floatX *dx, *dbranch;
    float* partial;  // [blocks, layernorm_sums(branch), C]: what each block's rows add to d.w, d.b and dbias
    const floatX *dy, *x;
    Moments stats;
    const floatX* w;
    int N, C;
    DropoutRows dropout;
} LayernormBackward;

HOST_DEVICE static constexpr int layernorm_sums(LayernormBranch branch) { return branch == LAYERNORM_ALONE ? 2 : 3; }

// How many of them lie in shared memory: dbias, and d.b too where drawing the masks takes registers.
HOST_DEVICE static constexpr int layernorm_shared_sums(LayernormBranch branch) { return (int)branch; }
static_assert(LAYERNORM_ALONE == 0 && LAYERNORM_RESIDUAL == 1 && LAYERNORM_RESIDUAL_DROPOUT == 2, "they count sums");

// Blocks that a multiprocessor is meant to hold, which bounds a thread's registers: two sums for each of E channels, and
// what is kept of a row.
HOST_DEVICE static constexpr int layernorm_backward_threads(int team) { return team == WARP ? 128 : team; }
HOST_DEVICE static constexpr int layernorm_backward_residents(int E, int team, LayernormBranch branch) {
    if (branch == LAYERNORM_RESIDUAL_DROPOUT && team == WARP) return E <= 8 ? 5 : sizeof(floatX) > 2 ? 2 : 3;
    if (branch == LAYERNORM_RESIDUAL_DROPOUT) return E <= 8 ? 768 / team : E <= 16 ? 512 / team : 1;
    if (team == WARP) return E <= 8 ? 6 : sizeof(floatX) > 2 ? 2 : E <= 24 ? 4 : 3;
    if (E <= 8) return 1024 / team;
    return E <= 16 ? (sizeof(floatX) > 2 ? 2 : 3) : 1;
}

// Whether a row is read a second time, because it does not fit into the registers.
HOST_DEVICE static constexpr int layernorm_backward_rereads(int E, int team, LayernormBranch branch) {
    return branch == LAYERNORM_RESIDUAL_DROPOUT && team > WARP && E * team > 4096;
}

// Whether loads must stay below a fence. On sm_100 ptxas moves those of a whole row up where a thread has many channels,
// and spills; everywhere it does so with what the masks are drawn from.
HOST_DEVICE static constexpr int layernorm_backward_fenced(int E, int team, LayernormBranch branch) {
    int dropped = branch == LAYERNORM_RESIDUAL_DROPOUT;
    return team > WARP && (dropped || (LAYERNORM_ARCH >= 1000 && E > 8));
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

// As many blocks as run at a time; their teams take rows in turn and keep the sums for d.w and d.b of all of them in
// registers, as long as there are any left, and the others in shared memory.
template <int W, int E, int TEAM, Mode DX_MODE, LayernormBranch BRANCH>
__global__ void __launch_bounds__(layernorm_backward_threads(TEAM), layernorm_backward_residents(E, TEAM, BRANCH))
    layernorm_backward_kernel(LayernormBackward a) {
    constexpr int THREADS = layernorm_backward_threads(TEAM), G = W < 4 ? 1 : 4;
    constexpr int VECTORS = E / W, TEAMS = layernorm_backward_threads(TEAM) / TEAM;
    constexpr int EARLY = TEAM == WARP;  // blocks have no registers left for more than dy and x
    constexpr int REREAD = layernorm_backward_rereads(E, TEAM, BRANCH);
    constexpr int FENCED = layernorm_backward_fenced(E, TEAM, BRANCH);
    constexpr int SHARED_SUMS = layernorm_shared_sums(BRANCH), SHARED_DB = SHARED_SUMS > 1;
    extern __shared__ float4 layernorm_shared[];  // [SHARED_SUMS][E / G][THREADS][G]
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
            if (c < a.C) dy[i] = load_vector<W>(a.dy + start + c);
            if (c < a.C) x[i] = load_vector<W>(a.x + start + c);
            if (DX_MODE == ADD && EARLY && c < a.C) old[i] = load_vector<W>(a.dx + start + c);
        }
        float mean = a.stats.mean[row], rstd = a.stats.rstd[row];
        float2 sums = make_float2(0, 0);  // of e and of e * u; beyond the row both are 0 because dy is
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            float g[W], u[W], weight[W];
            Vector<floatX, W> w = kept[i];
            if (!EARLY && first + i * TEAM * W < a.C) w = load_vector<W>(a.w + first + i * TEAM * W);
            to_floats(g, dy[i]);
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
                layernorm_add_group<G>(shared_sums + ((E + i * W + k) * THREADS + (int)threadIdx.x * G), g + k);
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
        DropoutPlace place = {0, 0};
        if (BRANCH == LAYERNORM_RESIDUAL_DROPOUT) place = dropout_place(a.dropout, (int)row);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = first + i * TEAM * W;
            if (c >= a.C) break;
            float d[W], u[W], weight[W], sum[W];
            Vector<floatX, W> w = kept[i];
            if (FENCED) __syncwarp(__activemask());
            if (REREAD) dy[i] = load_vector<W>(a.dy + start + c), x[i] = load_vector<W>(a.x + start + c);
            if (!EARLY) w = load_vector<W>(a.w + c);
            if (!EARLY && DX_MODE == ADD) old[i] = load_vector<W>(a.dx + start + c);
            to_floats(d, dy[i]);
            to_floats(u, x[i]);
            to_floats(weight, w);
            to_floats(sum, old[i]);
#pragma unroll
            for (int k = 0; k < W; k++) {
                d[k] = rstd * (d[k] * weight[k] - average - (u[k] - mean) * rstd * slope);
                if (DX_MODE == ADD) d[k] += sum[k];
            }
            store_vector(a.dx + start + c, from_floats<floatX, W>(d));
            if constexpr (BRANCH == LAYERNORM_RESIDUAL_DROPOUT) {
                dropout_multiply<W>(d, a.dropout.dropout, place, c);
                store_vector(a.dbranch + start + c, from_floats<floatX, W>(d));
            }
#pragma unroll
            for (int k = 0; k < W && SHARED_SUMS > 0; k += G)
                layernorm_add_group<G>(shared_sums + ((i * W + k) * THREADS + (int)threadIdx.x * G), d + k);
        }
    }
    // The block's teams, one after the other, then its share of the partial sums.
    float *weight = a.partial + (size_t)blockIdx.x * layernorm_sums(BRANCH) * (size_t)a.C, *bias = weight + a.C;
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
            bias[(1 - s) * a.C + c] = sum;
        }
}

enum { LAYERNORM_SLICES = 16 };

// One block of 32 x LAYERNORM_SLICES threads for 32 columns of partial [blocks, columns]: the first C are d.w's, the
// next d.b's, and the last, if there are any, dbias's.
template <Mode D_MODE>
__global__ void layernorm_backward_sum_kernel(AffineGradient d, real* dbias, const float* partial, int blocks, int C,
                                              int columns) {
    __shared__ float slices[LAYERNORM_SLICES][WARP];
    int column = (int)blockIdx.x * WARP + (int)threadIdx.x;
    float sum = 0;
    if (column < columns) {
#pragma unroll 8
        for (int b = (int)threadIdx.y; b < blocks; b += LAYERNORM_SLICES) sum += partial[(size_t)b * columns + column];
    }
    slices[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= columns || (column >= 2 * C && !dbias)) return;
    for (int i = 1; i < LAYERNORM_SLICES; i++) sum += slices[i][threadIdx.x];
    real* to = column < C ? d.w + column : column < 2 * C ? d.b + (column - C) : dbias + (column - 2 * C);
    *to = D_MODE == ADD ? *to + sum : sum;
}

// Launch the first kernel; the number of its blocks.
template <LayernormBranch BRANCH, int W, int E, int TEAM>
static inline int layernorm_backward_start(LayernormBackward a, Mode dx_mode, Context* ctx) {
    constexpr int threads = layernorm_backward_threads(TEAM), teams = threads / TEAM;
    constexpr int shared = layernorm_shared_sums(BRANCH) * threads * E * (int)sizeof(float);
    int most = ctx->multiprocessors * layernorm_backward_residents(E, TEAM, BRANCH);
    int blocks = min_int(most, (a.N + teams - 1) / teams);
    size_t partials = (size_t)blocks * layernorm_sums(BRANCH) * (size_t)a.C;
    void (*kernel)(LayernormBackward) = dx_mode == SET ? layernorm_backward_kernel<W, E, TEAM, SET, BRANCH>
                                                       : layernorm_backward_kernel<W, E, TEAM, ADD, BRANCH>;
    a.partial = (float*)device_scratch(ctx, partials * sizeof(float));
    if (shared > 32 << 10)  // more than every launch may have
        cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    kernel<<<blocks, threads, shared, ctx->stream>>>(a);
    cudaCheck(cudaGetLastError());
    return blocks;
}

template <LayernormBranch BRANCH>
static inline int layernorm_backward_choose(LayernormBackward a, Mode dx_mode, Context* ctx) {
    constexpr int W = Vector<floatX>::SIZE;
    if (!rows_are_vectors<floatX>(a.C)) {
        if (a.C <= 8 * WARP) return layernorm_backward_start<BRANCH, 1, 8, WARP>(a, dx_mode, ctx);
        if constexpr (BRANCH == LAYERNORM_RESIDUAL_DROPOUT)
            return layernorm_backward_start<BRANCH, 1, 16, 512>(a, dx_mode, ctx);
        else return layernorm_backward_start<BRANCH, 1, 8, 1024>(a, dx_mode, ctx);
    }
    if (a.C <= 8 * WARP) return layernorm_backward_start<BRANCH, W, 8, WARP>(a, dx_mode, ctx);
    if (a.C <= 24 * WARP) return layernorm_backward_start<BRANCH, W, 24, WARP>(a, dx_mode, ctx);
    if (a.C <= 32 * WARP) return layernorm_backward_start<BRANCH, W, 32, WARP>(a, dx_mode, ctx);
    if (a.C <= 8 * 256) return layernorm_backward_start<BRANCH, W, 8, 256>(a, dx_mode, ctx);
    if (a.C <= 16 * 256) return layernorm_backward_start<BRANCH, W, 16, 256>(a, dx_mode, ctx);
    return layernorm_backward_start < BRANCH, W, 32, sizeof(floatX) == 2 ? 512 : 256 > (a, dx_mode, ctx);
}

static inline void layernorm_backward_any(ResidualGradient r, AffineGradient d, const floatX* dy, const floatX* x,
                                          Moments stats, const floatX* w, Rows size, Mode dx_mode, Mode d_mode,
                                          Context* ctx) {
    LayernormBackward a = {r.dx, r.dbranch, NULL, dy, x, stats, w, size.N, size.C, dropout_rows(r.dropout)};
    layernorm_check_size(size.N, size.C);
    int blocks = r.dropout.threshold ? layernorm_backward_choose<LAYERNORM_RESIDUAL_DROPOUT>(a, dx_mode, ctx)
                 : r.dbias           ? layernorm_backward_choose<LAYERNORM_RESIDUAL>(a, dx_mode, ctx)
                                     : layernorm_backward_choose<LAYERNORM_ALONE>(a, dx_mode, ctx);
    const float* partial = (const float*)ctx->scratch;
    int columns = (r.dbias || r.dropout.threshold ? 3 : 2) * size.C;
    dim3 threads(WARP, LAYERNORM_SLICES);
    unsigned grid = blocks_for((size_t)columns, WARP);
    if (d_mode == SET)
        layernorm_backward_sum_kernel<SET>
            <<<grid, threads, 0, ctx->stream>>>(d, r.dbias, partial, blocks, size.C, columns);
    else
        layernorm_backward_sum_kernel<ADD>
            <<<grid, threads, 0, ctx->stream>>>(d, r.dbias, partial, blocks, size.C, columns);
    cudaCheck(cudaGetLastError());
}

#endif
#endif
