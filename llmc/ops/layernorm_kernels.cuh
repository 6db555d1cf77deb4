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

// The sum of both over the threads of a team; `turn` alternates between 0 and 1 from call to call.
template <int TEAM> __device__ inline float2 layernorm_team_sum(float2 x, int turn) {
    x.x = warp_sum(x.x);
    x.y = warp_sum(x.y);
    if constexpr (TEAM > WARP) {
        __shared__ float2 partial[2][TEAM / WARP];  // two, so that one barrier a call is enough
        if (threadIdx.x % WARP == 0) partial[turn][threadIdx.x / WARP] = x;
        __syncthreads();
        x = make_float2(0, 0);
#pragma unroll
        for (int i = 0; i < TEAM / WARP; i++) {
            x.x += partial[turn][i].x;
            x.y += partial[turn][i].y;
        }
    }
    return x;
}

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

// One team for a row.
template <int W, int E, int TEAM, LayernormBranch BRANCH>
__global__ void __launch_bounds__(layernorm_forward_threads(TEAM)) layernorm_forward_kernel(LayernormForward a) {
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
    float mean = layernorm_team_sum<TEAM>(make_float2(sum, 0), 0).x * a.inverse_C;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
#pragma unroll
        for (int k = 0; k < W; k++) {
            float d = first + i * TEAM * W < a.C ? v[i * W + k] - mean : 0;
            squares += d * d;
        }
    float rstd = rsqrtf(layernorm_team_sum<TEAM>(make_float2(squares, 0), 1).x * a.inverse_C + a.eps);
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
    floatX* dx;
    float* partial;  // [blocks, 2, C]: what each block's rows add to d.w and d.b
    const floatX *dy, *x;
    Moments stats;
    const floatX* w;
    int N, C;
} LayernormBackward;

// Blocks that a multiprocessor is meant to hold, which bounds a thread's registers: two sums for each of E channels, and
// what is kept of a row.
HOST_DEVICE static constexpr int layernorm_backward_threads(int team) { return team == WARP ? 128 : team; }
HOST_DEVICE static constexpr int layernorm_backward_residents(int E, int team) {
    if (team == WARP) return E <= 8 ? 6 : sizeof(floatX) > 2 ? 2 : E <= 24 ? 4 : 3;
    if (E <= 8) return 1024 / team;
    return E <= 16 ? (sizeof(floatX) > 2 ? 2 : 3) : 1;
}

// As many blocks as run at a time; their teams take rows in turn and keep the sums for d.w and d.b of all of them in
// registers.
template <int W, int E, int TEAM, Mode DX_MODE>
__global__ void __launch_bounds__(layernorm_backward_threads(TEAM), layernorm_backward_residents(E, TEAM))
    layernorm_backward_kernel(LayernormBackward a) {
    constexpr int VECTORS = E / W, TEAMS = layernorm_backward_threads(TEAM) / TEAM;
    constexpr int EARLY = TEAM == WARP;  // blocks have no registers left for more than dy and x
    int team = (int)threadIdx.x / TEAM, first = (int)(threadIdx.x % TEAM) * W, turn = 0;
    Vector<floatX, W> kept[VECTORS] = {};
    float dw[E] = {}, db[E] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (EARLY && first + i * TEAM * W < a.C) kept[i] = load_vector<W>(a.w + first + i * TEAM * W);
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
                db[i * W + k] += g[k];
            }
        }
        sums = layernorm_team_sum<TEAM>(sums, turn);
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
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = first + i * TEAM * W;
            if (c >= a.C) break;
            float d[W], u[W], weight[W], sum[W];
            Vector<floatX, W> w = kept[i];
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
        }
    }
    // The block's teams, one after the other, then its share of the partial sums.
    float *weight = a.partial + (size_t)blockIdx.x * 2 * (size_t)a.C, *bias = weight + a.C;
    if constexpr (TEAMS > 1) {
        __shared__ float shared[2][E][WARP];  // [e][lane], so that lanes use different banks
        int lane = (int)threadIdx.x % WARP;
        for (int t = 0; t < TEAMS; t++) {
#pragma unroll
            for (int e = 0; e < E && team == t; e++) {
                shared[0][e][lane] = t ? shared[0][e][lane] + dw[e] : dw[e];
                shared[1][e][lane] = t ? shared[1][e][lane] + db[e] : db[e];
            }
            __syncthreads();
        }
        for (int c = (int)threadIdx.x; c < a.C; c += (int)blockDim.x) {
            int e = c / (WARP * W) * W + c % W, owner = c % (WARP * W) / W;
            weight[c] = shared[0][e][owner];
            bias[c] = shared[1][e][owner];
        }
    } else {
#pragma unroll
        for (int e = 0; e < E; e++) {
            int c = first + e / W * TEAM * W + e % W;
            if (c >= a.C) continue;
            weight[c] = dw[e];
            bias[c] = db[e];
        }
    }
}

enum { LAYERNORM_SLICES = 16 };

// One block of 32 x LAYERNORM_SLICES threads for 32 columns of partial [blocks, columns]: the first C are d.w's, the
// others d.b's.
template <Mode D_MODE>
__global__ void layernorm_backward_sum_kernel(AffineGradient d, const float* partial, int blocks, int C) {
    __shared__ float slices[LAYERNORM_SLICES][WARP];
    int column = (int)blockIdx.x * WARP + (int)threadIdx.x;
    float sum = 0;
    if (column < 2 * C) {
#pragma unroll 8
        for (int b = (int)threadIdx.y; b < blocks; b += LAYERNORM_SLICES) sum += partial[(size_t)b * 2 * C + column];
    }
    slices[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= 2 * C) return;
    for (int i = 1; i < LAYERNORM_SLICES; i++) sum += slices[i][threadIdx.x];
    real* to = column < C ? d.w + column : d.b + (column - C);
    *to = D_MODE == ADD ? *to + sum : sum;
}

// Launch the first kernel; the number of its blocks.
template <int W, int E, int TEAM>
static inline int layernorm_backward_start(LayernormBackward a, Mode dx_mode, Context* ctx) {
    constexpr int threads = layernorm_backward_threads(TEAM), teams = threads / TEAM;
    int most = ctx->multiprocessors * layernorm_backward_residents(E, TEAM);
    int blocks = min_int(most, (a.N + teams - 1) / teams);
    a.partial = (float*)device_scratch(ctx, (size_t)blocks * 2 * (size_t)a.C * sizeof(float));
    if (dx_mode == SET) layernorm_backward_kernel<W, E, TEAM, SET><<<blocks, threads, 0, ctx->stream>>>(a);
    else layernorm_backward_kernel<W, E, TEAM, ADD><<<blocks, threads, 0, ctx->stream>>>(a);
    cudaCheck(cudaGetLastError());
    return blocks;
}

static inline int layernorm_backward_any(LayernormBackward a, Mode dx_mode, Context* ctx) {
    constexpr int W = Vector<floatX>::SIZE;
    if (!rows_are_vectors<floatX>(a.C)) {
        if (a.C <= 8 * WARP) return layernorm_backward_start<1, 8, WARP>(a, dx_mode, ctx);
        return layernorm_backward_start<1, 8, 1024>(a, dx_mode, ctx);
    }
    if (a.C <= 8 * WARP) return layernorm_backward_start<W, 8, WARP>(a, dx_mode, ctx);
    if (a.C <= 24 * WARP) return layernorm_backward_start<W, 24, WARP>(a, dx_mode, ctx);
    if (a.C <= 32 * WARP) return layernorm_backward_start<W, 32, WARP>(a, dx_mode, ctx);
    if (a.C <= 8 * 256) return layernorm_backward_start<W, 8, 256>(a, dx_mode, ctx);
    if (a.C <= 16 * 256) return layernorm_backward_start<W, 16, 256>(a, dx_mode, ctx);
    return layernorm_backward_start < W, 32, sizeof(floatX) == 2 ? 512 : 256 > (a, dx_mode, ctx);
}

static inline void layernorm_backward(floatX* dx, AffineGradient d, const floatX* dy, const floatX* x, Moments stats,
                                      const floatX* w, Rows size, Mode dx_mode, Mode d_mode, Context* ctx) {
    layernorm_check_size(size.N, size.C);
    Scope scope = scope_open(ctx, "layernorm_backward", LAYERNORM_BACKWARD_FLOPS(size.N, size.C),
                             LAYERNORM_BACKWARD_BYTES(size.N, size.C, dx_mode), "N=%d C=%d", size.N, size.C);
    LayernormBackward a = {dx, NULL, dy, x, stats, w, size.N, size.C};
    int blocks = layernorm_backward_any(a, dx_mode, ctx);
    const float* partial = (const float*)ctx->scratch;
    unsigned columns = blocks_for(2 * (size_t)size.C, WARP);
    dim3 threads(WARP, LAYERNORM_SLICES);
    if (d_mode == SET)
        layernorm_backward_sum_kernel<SET><<<columns, threads, 0, ctx->stream>>>(d, partial, blocks, size.C);
    else layernorm_backward_sum_kernel<ADD><<<columns, threads, 0, ctx->stream>>>(d, partial, blocks, size.C);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

#endif
#endif
