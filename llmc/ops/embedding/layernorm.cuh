/* embedding.h's fused forward kernel: the sum of word, position and type vectors, layernorm, dropout.
 *
 * One warp takes a row; a block of 512 threads takes a long one. A thread holds up to E elements of the row, as vectors
 * of W elements (16 bytes, or one element) that are TEAM * W apart. */
#include "llmc/ops/embedding/embedding.h"  // before the guard: it includes this file

#ifndef LLMC_OPS_EMBEDDING_LAYERNORM_CUH
#define LLMC_OPS_EMBEDDING_LAYERNORM_CUH

#ifdef __CUDACC__

enum { EMBEDDING_LONGEST = 16384 };  // what 512 threads hold in registers

// EmbeddingNorm as the kernel reads it.
typedef struct {
    Embeddings tables;
    LayerNormArgs norm;
    real eps;
    Dropout dropout;
} EmbeddingNormArgs;

HOST_DEVICE static constexpr int embedding_layernorm_threads(int team) { return team == WARP ? 128 : team; }

template <int W, int E, int TEAM, int DROPPED>
__global__ void __launch_bounds__(embedding_layernorm_threads(TEAM))
    embedding_layernorm_forward_kernel(floatX* x, floatX* e, LayerNormStats stats, const int* tokens, const int* types,
                                       EmbeddingNormArgs layer, const int* position, int N, int C,
                                       DropoutRows dropout) {
    constexpr int VECTORS = E / W;
    int n = (int)(blockIdx.x * (blockDim.x / TEAM) + threadIdx.x / TEAM), first = (int)(threadIdx.x % TEAM) * W;
    if (n >= N) return;  // only whole warps return: a block-wide team always has a row
    size_t row = (size_t)n * (size_t)C;
    const floatX* word = layer.tables.word + (size_t)tokens[n] * (size_t)C;
    const floatX* place = layer.tables.position + (size_t)position[n] * (size_t)C;
    const floatX* type = layer.tables.type ? layer.tables.type + (size_t)types[n] * (size_t)C : NULL;
    float v[E], sum = 0, sum_sq = 0;
    Vector<floatX, W> vector[VECTORS] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = first + i * TEAM * W;
        if (c < C) vector[i] = load_vector<W>(word + c);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = first + i * TEAM * W;
        float f[W];
        to_floats(v + i * W, vector[i]);
        if (c < C) {
            to_floats(f, load_vector<W>(place + c));
#pragma unroll
            for (int k = 0; k < W; k++) v[i * W + k] += f[k];
            if (type) {
                to_floats(f, load_vector<W>(type + c));
#pragma unroll
                for (int k = 0; k < W; k++) v[i * W + k] += f[k];
            }
            vector[i] = from_floats<floatX, W>(v + i * W);
            store_vector(e + row + c, vector[i]);
            to_floats(v + i * W, vector[i]);  // normalize the rounded value that the backward pass reads from e
        }
#pragma unroll
        for (int k = 0; k < W; k++) sum += v[i * W + k];  // 0 beyond the row
    }
    float inverse_C = 1.0f / (float)C;
    float mean = team_sum<TEAM>(make_float2(sum, 0), 0).x * inverse_C;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
#pragma unroll
        for (int k = 0; k < W; k++) {
            float deviation = first + i * TEAM * W < C ? v[i * W + k] - mean : 0;
            sum_sq += deviation * deviation;
        }
    float rstd = rsqrtf(team_sum<TEAM>(make_float2(sum_sq, 0), 1).x * inverse_C + layer.eps);
    DropoutPlace drop = {0, 0};
    if (DROPPED) drop = dropout_place(dropout, n);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = first + i * TEAM * W;
        if (c >= C) break;
        if (E > 8) {  // to save registers: one vector's loads and masks at a time, no round keys kept
            __syncwarp(__activemask());
            asm volatile("" : "+l"(dropout.dropout.key));
        }
        float w[W], b[W];
        load_reals<W>(w, layer.norm.w + c);
        to_floats(b, load_vector<W>(layer.norm.b + c));
#pragma unroll
        for (int k = 0; k < W; k++) w[k] = (v[i * W + k] - mean) * rstd * w[k] + b[k];
        if constexpr (DROPPED) dropout_multiply<W>(w, dropout.dropout, drop, c);
        store_vector(x + row + c, from_floats<floatX, W>(w));
    }
    if (first == 0) {
        stats.mean[n] = mean;
        stats.rstd[n] = rstd;
    }
}

template <int W, int E, int TEAM>
static inline void embedding_layernorm_start(floatX* x, floatX* e, LayerNormStats stats, EmbeddingInputs in,
                                             EmbeddingNorm layer, int C, Context* ctx) {
    constexpr int threads = embedding_layernorm_threads(TEAM);
    const Sequences* s = in.s;
    unsigned blocks = blocks_for((size_t)s->rows, threads / TEAM);
    DropoutRows dropout = {
        .dropout = layer.dropout, .sequence = s->sequence, .position = s->position, .first = s->first};
    EmbeddingNormArgs args = {.tables = layer.tables,
                              .norm = {.w = layer.norm.w_fp32, .b = layer.norm.b},
                              .eps = layer.eps,
                              .dropout = layer.dropout};
    auto kernel = layer.dropout.threshold ? embedding_layernorm_forward_kernel<W, E, TEAM, 1>
                                          : embedding_layernorm_forward_kernel<W, E, TEAM, 0>;
    kernel<<<blocks, threads, 0, ctx->stream>>>(x, e, stats, in.tokens, in.types, args, s->position, s->rows, C,
                                                dropout);
    cudaCheck(cudaGetLastError());
}

COMPILED_IF_CALLED static inline void embedding_layernorm_forward_rows(floatX* x, floatX* e, LayerNormStats stats,
                                                                       EmbeddingInputs in, EmbeddingNorm layer, int C,
                                                                       Context* ctx) {
    constexpr int W = Vector<floatX>::SIZE;
    if (C > EMBEDDING_LONGEST) die(USAGE, "embedding of %d channels: at most %d fit on the GPU", C, EMBEDDING_LONGEST);
    int vectors = rows_are_vectors<floatX>(C);
    if (!vectors && C <= 8 * WARP) embedding_layernorm_start<1, 8, WARP>(x, e, stats, in, layer, C, ctx);
    else if (!vectors) embedding_layernorm_start<1, 32, 512>(x, e, stats, in, layer, C, ctx);
    else if (C <= 8 * WARP) embedding_layernorm_start<W, 8, WARP>(x, e, stats, in, layer, C, ctx);
    else if (C <= 24 * WARP) embedding_layernorm_start<W, 24, WARP>(x, e, stats, in, layer, C, ctx);
    else if (C <= 32 * WARP) embedding_layernorm_start<W, 32, WARP>(x, e, stats, in, layer, C, ctx);
    else embedding_layernorm_start<W, 32, 512>(x, e, stats, in, layer, C, ctx);
}

#endif
#endif
