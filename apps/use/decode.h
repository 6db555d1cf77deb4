/* Attention of the newest token to itself and all earlier tokens, for text generation. qkv is the KV cache. This is one
 * row of CAUSAL attention, without dropout.
 *
 *   s[k]   = Q[p] . K[k] / sqrt(HS)                  k = 0 .. p; p is the position of the newest token
 *   P[k]   = exp(s[k]) / sum over j of exp(s[j])
 *   out    = sum over k of P[k] V[k]
 *
 * Shapes: qkv [p + 1, 3C], each row Q | K | V, each of these [NH, HS]; out [C]; C = NH * HS. p is any position.
 * attention_decode_takes() checks HS.
 * Numerics: dot products and softmax accumulate in double on the CPU, which runs the reference, and in float on the
 * GPU. P is not rounded.
 * Cost: memory-bound; keys and values are read once.
 * Source: Dao et al., arXiv 2205.14135, for the running maximum and sum. */
#ifndef APPS_USE_DECODE_H
#define APPS_USE_DECODE_H

#include "llmc/device/cuda_utils.cuh"
#include "llmc/ops/attention/attention.h"

#define ATTENTION_DECODE_FLOPS(position, NH, HS) ATTENTION_FORWARD_FLOPS((position) + 1.0, NH, HS)
#define ATTENTION_DECODE_BYTES(position, NH, HS) ((2.0 * (position) + 4.0) * (NH) * (HS) * sizeof(floatX))

static inline Scope attention_decode_scope(Context* ctx, int position, int NH, int HS) {
    return scope_open(ctx, "attention_decode", ATTENTION_DECODE_FLOPS(position, NH, HS),
                      ATTENTION_DECODE_BYTES(position, NH, HS), "position=%d NH=%d HS=%d", position, NH, HS);
}

// ---------------------------------------------------------------------------------------------------------
// Reference, which the CPU runs too: a head belongs to one thread

static inline void attention_decode_ref(real* out, const real* qkv, int position, int NH, int HS) {
    AttentionShape shape = {.NH = NH, .HS = HS, .mask = CAUSAL, .dropout = dropout_none(NULL)};
    size_t C = (size_t)NH * (size_t)HS;
#pragma omp parallel for schedule(static)
    for (int head = 0; head < NH; head++) {
        size_t first = (size_t)(head * HS);
        double *p = (double*)xcalloc((size_t)(position + 1 + HS), sizeof *p), *sum = p + position + 1;
        attention_probabilities_ref(p, qkv, position, position + 1, head, shape);
        for (int k = 0; k <= position; k++)
            for (int i = 0; i < HS; i++) sum[i] += p[k] * (double)qkv[(size_t)k * 3 * C + 2 * C + first + (size_t)i];
        for (int i = 0; i < HS; i++) out[first + (size_t)i] = (real)sum[i];
        free(p);
    }
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU

enum { DECODE_THREADS = 256, DECODE_HS = 256 };

static inline int attention_decode_takes(int HS) { return HS <= DECODE_HS; }

// This thread's part of a row of HS elements: COUNT vectors of W elements, TEAM vectors apart; zeros past the row.
template <int W, int TEAM, int COUNT>
__device__ inline void decode_load(float (&x)[COUNT][W], const floatX* row, int member, int HS) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int at = (i * TEAM + member) * W;
        if (at < HS) to_floats(x[i], load_vector<W>(row + at));
        else
#pragma unroll
            for (int j = 0; j < W; j++) x[i][j] = 0;
    }
}

// One block per head. A team of TEAM lanes takes every TEAMS-th key. It tracks the maximum of its scores, the sum of
// their exponentials relative to it, and the values weighted by these. At the end the block combines the teams.
template <int W, int TEAM, int COUNT>
__global__ void __launch_bounds__(DECODE_THREADS)
    attention_decode_kernel(floatX* out, const floatX* qkv, int position, int NH, int HS, float factor) {
    constexpr int TEAMS = DECODE_THREADS / TEAM;
    __shared__ float team_max[TEAMS], team_total[TEAMS], team_mix[TEAMS][TEAM * COUNT * W];
    int team = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
    size_t C = (size_t)NH * (size_t)HS, head = (size_t)blockIdx.x * (size_t)HS;
    float q[COUNT][W], mix[COUNT][W] = {}, max = -INFINITY, total = 0;
    decode_load<W, TEAM, COUNT>(q, qkv + (size_t)position * 3 * C + head, member, HS);
#pragma unroll 4
    for (int first = 0; first <= position; first += TEAMS) {
        // All lanes of a warp must take part in the shuffles, so a team without a key loads the newest one again.
        bool has_key = first + team <= position;
        const floatX* key = qkv + (size_t)(has_key ? first + team : position) * 3 * C + C + head;
        float k[COUNT][W], v[COUNT][W], score = 0;
        decode_load<W, TEAM, COUNT>(k, key, member, HS);
        decode_load<W, TEAM, COUNT>(v, key + C, member, HS);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = 0; j < W; j++) score += q[i][j] * k[i][j];
#pragma unroll
        for (int distance = TEAM / 2; distance; distance /= 2) score += __shfl_xor_sync(ALL_LANES, score, distance);
        score *= factor;
        if (!has_key) continue;
        float higher = fmaxf(max, score), scale = expf(max - higher), weight = expf(score - higher);
        max = higher;
        total = total * scale + weight;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = 0; j < W; j++) mix[i][j] = mix[i][j] * scale + weight * v[i][j];
    }
    if (member == 0) team_max[team] = max, team_total[team] = total;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int j = 0; j < W; j++) team_mix[team][(i * TEAM + member) * W + j] = mix[i][j];
    __syncthreads();
    if ((int)threadIdx.x >= HS) return;
    float highest = -INFINITY, sum = 0, all = 0;
    for (int t = 0; t < TEAMS; t++) highest = fmaxf(highest, team_max[t]);
    for (int t = 0; t < TEAMS; t++) {
        float scale = expf(team_max[t] - highest);  // 0 for a team without keys
        all += scale * team_total[t];
        sum += scale * team_mix[t][threadIdx.x];
    }
    out[head + threadIdx.x] = from_float<floatX>(sum / all);
}

#else
static inline int attention_decode_takes(int HS) { return HS > 0; }
#endif

static inline void attention_decode(floatX* out, const floatX* qkv, int position, int NH, int HS, Context* ctx) {
    CHECK(position >= 0 && attention_decode_takes(HS));
    Scope scope = attention_decode_scope(ctx, position, NH, HS);
#ifdef __CUDACC__
    constexpr int W = Vector<floatX>::SIZE, WIDE = DECODE_HS / (WARP * W);
    auto kernel = !rows_are_vectors<floatX>(HS) ? attention_decode_kernel<1, WARP, DECODE_HS / WARP>
                  : HS <= 64                    ? attention_decode_kernel<W, 64 / W, 1>
                  : HS <= 128                   ? attention_decode_kernel<W, 128 / W, 1>
                                                : attention_decode_kernel<W, WARP, WIDE>;
    kernel<<<(unsigned)NH, DECODE_THREADS, 0, ctx->stream>>>(out, qkv, position, NH, HS, (float)(1 / sqrt((double)HS)));
    cudaCheck(cudaGetLastError());
#else
    attention_decode_ref(out, qkv, position, NH, HS);
#endif
    scope_close(&scope);
}

#endif
