/* layernorm.h's forward kernel, and how all its kernels share rows among threads.
 *
 * A team of threads takes a row: a warp for short rows, several warps or a block for long ones. The team reads the row
 * once and keeps it in registers. A thread holds up to E elements of the row, as vectors of W elements (16 bytes, or
 * one element if rows are not aligned to 16 bytes) that are TEAM * W elements apart. */
#ifndef LLMC_OPS_LAYERNORM_FORWARD_CUH
#define LLMC_OPS_LAYERNORM_FORWARD_CUH

#include "llmc/device/cuda_utils.cuh"

// 800 for sm_80; 0 in host code.
#ifdef __CUDA_ARCH__
#define LAYERNORM_ARCH __CUDA_ARCH__
#else
#define LAYERNORM_ARCH 0
#endif

// C is limited by the registers of a team.
static inline void layernorm_check_size(int N, int C) {
    CHECK(N > 0 && C > 0);
    if (C > 4096) die(USAGE, "layernorm of %d channels: at most 4096 fit on the GPU", C);
}

// The members of a LayerNorm that kernels read.
typedef struct {
    const real* w;
    const floatX* b;
} LayerNormArgs;

// What precedes the normalization.
typedef enum { LAYERNORM_ALONE, LAYERNORM_RESIDUAL, LAYERNORM_RESIDUAL_DROPOUT } LayerNormBranch;

typedef struct {
    floatX *y, *r;
    LayerNormStats stats;
    const floatX* x;
    LayerNormArgs p;
    int N, C;
    float inverse_C, eps;
    DropoutRows dropout;
} LayerNormForward;

HOST_DEVICE static constexpr int layernorm_forward_threads(int team) { return team == WARP ? 256 : team; }

// Minimum resident blocks per multiprocessor; 0: no bound. Without a bound ptxas aims at 64 registers on sm_80, and in
// fp32. These kernels need more and would spill.
HOST_DEVICE static constexpr int layernorm_forward_residents(int W, int E, int team, LayerNormBranch branch) {
    int tight = branch == LAYERNORM_RESIDUAL_DROPOUT && E == 32 && (W == 4 || (W == 8 && LAYERNORM_ARCH < 900));
    return tight ? (W == 4 ? 512 : 768) / layernorm_forward_threads(team) : 0;
}

// The elements of a row that a thread normalizes, v, which become r too. Returns the row's mean and rstd.
template <int W, int E, int TEAM, LayerNormBranch BRANCH>
__device__ inline float2 layernorm_forward_read(float* v, const LayerNormForward& a, int row, int first) {
    constexpr int VECTORS = E / W;
    size_t start = (size_t)row * (size_t)a.C;
    Vector<floatX, W> x[VECTORS] = {}, branch[VECTORS] = {};
    float sum = 0, sum_sq = 0;
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
            x[i] = from_floats<floatX, W>(old);  // normalize the rounded value that the backward pass reads from r
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
            float deviation = first + i * TEAM * W < a.C ? v[i * W + k] - mean : 0;
            sum_sq += deviation * deviation;
        }
    float rstd = rsqrtf(team_sum<TEAM>(make_float2(sum_sq, 0), 1).x * a.inverse_C + a.eps);
    return make_float2(mean, rstd);
}

// y of W elements v, from column c on.
template <int W>
__device__ inline Vector<floatX, W> layernorm_forward_vector(const float* v, LayerNormArgs p, float2 stats, int c) {
    float w[W], b[W];
    load_reals<W>(w, p.w + c);
    to_floats(b, load_vector<W>(p.b + c));
#pragma unroll
    for (int k = 0; k < W; k++) w[k] = (v[k] - stats.x) * stats.y * w[k] + b[k];
    return from_floats<floatX, W>(w);
}

// One team per row.
template <int W, int E, int TEAM, LayerNormBranch BRANCH>
__global__ void __launch_bounds__(layernorm_forward_threads(TEAM), layernorm_forward_residents(W, E, TEAM, BRANCH))
    layernorm_forward_kernel(LayerNormForward a) {
    int row = (int)(blockIdx.x * (blockDim.x / TEAM) + threadIdx.x / TEAM), first = (int)(threadIdx.x % TEAM) * W;
    if (row >= a.N) return;  // only whole warps return: a block-wide team always has a row
    float v[E];
    float2 stats = layernorm_forward_read<W, E, TEAM, BRANCH>(v, a, row, first);
#pragma unroll
    for (int i = 0; i < E / W; i++) {
        int c = first + i * TEAM * W;
        if (c >= a.C) break;
        store_vector(a.y + (size_t)row * (size_t)a.C + c, layernorm_forward_vector<W>(v + i * W, a.p, stats, c));
    }
    if (first == 0) {
        a.stats.mean[row] = stats.x;
        a.stats.rstd[row] = stats.y;
    }
}

static inline LayerNormForward layernorm_forward_args(floatX* y, LayerNormStats stats, const floatX* x, LayerNorm p,
                                                      Rows size, real eps) {
    LayerNormForward a = {.y = y, .stats = stats, .x = x, .p = {.w = p.w_fp32, .b = p.b}, .N = size.N, .C = size.C};
    a.inverse_C = 1.0f / (float)size.C;
    a.eps = (float)eps;
    return a;
}

// Choose the kernel by the number of channels, and launch it.
template <LayerNormBranch BRANCH> static inline void layernorm_forward_launch(LayerNormForward a, Context* ctx) {
    constexpr int W = Vector<floatX>::SIZE;
    void (*kernel)(LayerNormForward) = layernorm_forward_kernel<W, 8, 512, BRANCH>;
    int team = 512;
    layernorm_check_size(a.N, a.C);
    if (!rows_are_vectors<floatX>(a.C)) kernel = layernorm_forward_kernel<1, 32, 512, BRANCH>;
    else if (a.C <= 24 * WARP) kernel = layernorm_forward_kernel<W, 24, WARP, BRANCH>, team = WARP;
    else if (a.C <= 32 * WARP) kernel = layernorm_forward_kernel<W, 32, WARP, BRANCH>, team = WARP;
    else if (a.C <= 64 * WARP) kernel = layernorm_forward_kernel<W, 64, WARP, BRANCH>, team = WARP;
    int threads = layernorm_forward_threads(team);
    kernel<<<blocks_for((size_t)a.N, (size_t)(threads / team)), (unsigned)threads, 0, ctx->stream>>>(a);
    cudaCheck(cudaGetLastError());
}

#endif
