/* Attention with all scores in memory, for fp32 and for head sizes that the flash kernels do not support. Read this
 * version first. Sequences are processed one after the other. A line is one launch for all heads of a sequence:
 *
 *   forward     S = Q K^T                                          batched matmul
 *               D = dropout(softmax(S / sqrt(HS), masked)), lse    attention_forward_softmax_kernel
 *               out = D V                                          batched matmul
 *
 *   backward    S = Q K^T,  dD = dout V^T                          two batched matmuls
 *               D and ds from S, dD, lse and delta                 attention_backward_softmax_kernel
 *               dV = D^T dout,  dQ = ds K / sqrt(HS),  dK = ds^T Q / sqrt(HS)
 *
 * Q, K and V are read where the preceding matmul wrote them. dQ, dK and dV are written where the next matmul reads
 * them. A head is HS channels wide and its rows are 3C apart.
 * The matmuls compute the whole T x T square. With CAUSAL the softmax kernels read only the visible half. They write
 * zeros into the other half, because the next matmul reads it.
 * Memory: scores [NH, T, T] of the longest sequence in fp32, T rounded up to 8 so that every row is aligned. This takes
 * 4 NH T^2 bytes forward and twice that backward. D and ds replace S and dD: a row of floatX starts where its fp32 row
 * started.
 * Numerics: S and dD stay in fp32, whatever floatX is: a bf16 score of 16 would be off by up to 1/16, and P by the same
 * relative error. D and ds are rounded to floatX for the matmuls, relative errors of 2^-8 (bf16) and 2^-11 (fp16). */
#ifndef LLMC_OPS_ATTENTION_MATERIALIZED_CUH
#define LLMC_OPS_ATTENTION_MATERIALIZED_CUH

#include "llmc/device/cublaslt.cuh"
#include "llmc/ops/common/vector_math.h"

enum { MATERIALIZED_WARPS = 8, MATERIALIZED_THREADS = MATERIALIZED_WARPS * WARP };

// The kernels' description of one sequence.
typedef struct {
    int T, row;         // length, first row in the batch
    int width;          // floats from one row of scores to the next
    int N, NH, HS;      // of the batch
    uint32_t sequence;  // number in the whole step
    float factor;       // 1 / sqrt(HS)
    Mask mask;
    Dropout dropout;
} MaterializedSequence;

static inline int materialized_width(int T) { return (int)round_up((size_t)T, 8); }

// Scratch of the forward pass; the backward pass takes twice as much.
static inline size_t materialized_scratch_bytes(int T, int NH) {
    return round_up((size_t)NH * (size_t)T * (size_t)materialized_width(T) * sizeof(float), 256);
}

static inline size_t materialized_scratch_bound(int N, int fewest, int most, int T, AttentionShape shape,
                                                const Context* ctx) {
    return (void)N, (void)fewest, (void)most, (void)ctx, 2 * materialized_scratch_bytes(T, shape.NH);
}

// ---------------------------------------------------------------------------------------------------------
// Kernels. A warp takes one row of scores: one query of one head. The grid covers all rows. A lane takes four
// neighbouring keys at a time, half of the eight that share one Philox call.

enum { MATERIALIZED_STEP = 4 * WARP };  // keys that a warp takes at a time

// Load the four scores from `key` on. Scores of masked keys are not read and become `hidden`.
__device__ inline void materialized_load(float (&x)[4], const float* row, int key, int visible, float hidden) {
    if (key + 4 <= visible) {
        to_floats(x, load128(row + key));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = key + i < visible ? row[key + i] : hidden;
}

__device__ inline void materialized_store(floatX* row, int key, const float (&x)[4]) {
    *(Vector<floatX, 4>*)(row + key) = from_floats<floatX, 4>(x);
}

// Dropout's factors for the four probabilities.
__device__ inline void materialized_keep(float (&keep)[4], const MaterializedSequence& z, int head, int query,
                                         int key) {
    if (!z.dropout.threshold) {
        keep[0] = keep[1] = keep[2] = keep[3] = 1;
        return;
    }
    Philox r = dropout_bits_attention(z.dropout, z.sequence, (uint32_t)head, (uint32_t)query, (uint32_t)key / 8);
    uint32_t threshold = dropout_threshold_attention(z.dropout);
    if (key % 8) r.v[0] = r.v[2], r.v[1] = r.v[3];
#pragma unroll
    for (int i = 0; i < 4; i++) keep[i] = dropout_keeps_attention(r, i, threshold) ? z.dropout.scale : 0;
}

// scores: S [NH, T, width], which becomes D.
__global__ void __launch_bounds__(MATERIALIZED_THREADS)
    attention_forward_softmax_kernel(float* scores, float* lse, MaterializedSequence z) {
    size_t at = (size_t)blockIdx.x * MATERIALIZED_WARPS + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP, head = (int)(at / z.T), query = (int)(at % z.T);
    if (head >= z.NH) return;
    const float* s = scores + at * z.width;
    floatX* d = (floatX*)s;
    int visible = attention_visible(z.mask, query, z.T);

    // Online softmax: the maximum and the sum of exponentials relative to it, first of each lane, then of the row.
    float top = -INFINITY, sum = 0, x[4], keep[4];
    for (int key = 4 * lane; key < visible; key += MATERIALIZED_STEP) {
        materialized_load(x, s, key, visible, -INFINITY);
        float old = top, added = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) top = fmaxf(top, x[i] *= z.factor);
#pragma unroll
        for (int i = 0; i < 4; i++) added += real_exp(x[i] - top);
        sum = sum * real_exp(old - top) + added;
    }
    float largest = warp_max(top);  // above -infinity unless all are NaN: every query sees key 0
    sum = warp_sum(sum * real_exp(top - largest));
    float inverse = 1 / sum;
    if (lane == 0) lse[(size_t)head * z.N + z.row + query] = largest + logf(sum);

    for (int step = 0; step < z.width; step += MATERIALIZED_STEP) {
        int key = step + 4 * lane;
        float p[4] = {0, 0, 0, 0};
        if (key < visible) {
            materialized_load(x, s, key, visible, -INFINITY);
            materialized_keep(keep, z, head, query, key);
#pragma unroll
            for (int i = 0; i < 4; i++) p[i] = real_exp(x[i] * z.factor - largest) * inverse * keep[i];
        }
        __syncwarp();  // all lanes have read this step's scores; D overwrites no later ones
        if (key < z.width) materialized_store(d, key, p);
    }
}

// scores: S, which becomes D; gradients: dD, which becomes ds. Both [NH, T, width].
__global__ void __launch_bounds__(MATERIALIZED_THREADS)
    attention_backward_softmax_kernel(float* scores, float* gradients, const floatX* dout, const floatX* out,
                                      const float* lses, MaterializedSequence z) {
    size_t at = (size_t)blockIdx.x * MATERIALIZED_WARPS + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP, head = (int)(at / z.T), query = (int)(at % z.T);
    if (head >= z.NH) return;
    const float *s = scores + at * z.width, *dd = gradients + at * z.width;
    floatX *d = (floatX*)s, *ds = (floatX*)dd;
    int visible = attention_visible(z.mask, query, z.T);
    size_t channel = ((size_t)(z.row + query) * z.NH + head) * z.HS;
    float lse = lses[(size_t)head * z.N + z.row + query], delta = 0;
    for (int c = lane; c < z.HS; c += WARP) delta += to_float(dout[channel + c]) * to_float(out[channel + c]);
    delta = warp_sum(delta);

    for (int step = 0; step < z.width; step += MATERIALIZED_STEP) {
        int key = step + 4 * lane;
        float p[4] = {0, 0, 0, 0}, dp[4] = {0, 0, 0, 0}, keep[4];
        if (key < visible) {
            materialized_load(p, s, key, visible, -INFINITY);
            materialized_load(dp, dd, key, visible, 0);
            materialized_keep(keep, z, head, query, key);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float e = real_exp(p[i] * z.factor - lse);
                p[i] = e * keep[i];
                dp[i] = e * (keep[i] * dp[i] - delta);
            }
        }
        __syncwarp();
        if (key < z.width) {
            materialized_store(d, key, p);
            materialized_store(ds, key, dp);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Launches

static inline MaterializedSequence materialized_sequence(const Sequences* s, int index, AttentionShape shape) {
    MaterializedSequence z;
    z.row = sequences_start(s, index);
    z.T = sequences_start(s, index + 1) - z.row;
    z.width = materialized_width(z.T);
    z.N = s->rows;
    z.NH = shape.NH;
    z.HS = shape.HS;
    z.sequence = sequences_number(s, index);
    z.factor = (float)(1 / sqrt((double)shape.HS));
    z.mask = shape.mask;
    z.dropout = shape.dropout;
    return z;
}

// The sequence's rows of x as one [T, HS] matrix per head; rows are `row` elements apart.
static inline BatchMatrix materialized_heads(const floatX* x, size_t row, const MaterializedSequence* z) {
    BatchMatrix m = {.p = (void*)(x + (size_t)z->row * row),
                     .layout = {.type = cublaslt_type(), .op = CUBLAS_OP_N, .row = (int64_t)row, .next = z->HS}};
    return m;
}

// [T, T] matrices: scores in fp32 (CUDA_R_32F), or D or ds in floatX, which replace them.
static inline BatchMatrix materialized_pairs(float* x, cudaDataType_t type, const MaterializedSequence* z) {
    int64_t width = type == CUDA_R_32F ? z->width : z->width * (int64_t)(sizeof(float) / sizeof(floatX));
    BatchMatrix m = {.p = x, .layout = {.type = type, .op = CUBLAS_OP_N, .row = width, .next = z->T * width}};
    return m;
}

static inline BatchMatrix materialized_transposed(BatchMatrix m) {
    m.layout.op = CUBLAS_OP_T;
    return m;
}

static inline void materialized_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s,
                                        AttentionShape shape, Context* ctx) {
    int NH = shape.NH, HS = shape.HS;
    size_t C = (size_t)NH * (size_t)HS;
    float* scores = (float*)device_scratch(ctx, materialized_scratch_bytes(s->max_length, NH));
    for (int index = 0; index < s->count; index++) {
        MaterializedSequence z = materialized_sequence(s, index, shape);
        int T = z.T;
        if (T == 0) continue;
        BatchSize scores_size = {.M = T, .N = T, .K = HS, .batch = NH},
                  heads_size = {.M = T, .N = HS, .K = T, .batch = NH};
        BatchMatrix q = materialized_heads(qkv, 3 * C, &z), k = materialized_heads(qkv + C, 3 * C, &z);
        BatchMatrix v = materialized_heads(qkv + 2 * C, 3 * C, &z), o = materialized_heads(out, C, &z);
        BatchMatrix S = materialized_pairs(scores, CUDA_R_32F, &z), D = materialized_pairs(scores, cublaslt_type(), &z);

        batched_product(S, q, materialized_transposed(k), scores_size, 1, ctx);
        attention_forward_softmax_kernel<<<blocks_for((size_t)NH * (size_t)T, MATERIALIZED_WARPS), MATERIALIZED_THREADS,
                                           0, ctx->stream>>>(scores, lse, z);
        cudaCheck(cudaGetLastError());
        batched_product(o, D, v, heads_size, 1, ctx);
    }
}

static inline void materialized_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                         const real* lse, const Sequences* s, AttentionShape shape, Context* ctx) {
    int NH = shape.NH, HS = shape.HS;
    size_t C = (size_t)NH * (size_t)HS, bytes = materialized_scratch_bytes(s->max_length, NH);
    float* scores = (float*)device_scratch(ctx, 2 * bytes);
    float* gradients = scores + bytes / sizeof(float);
    for (int index = 0; index < s->count; index++) {
        MaterializedSequence z = materialized_sequence(s, index, shape);
        int T = z.T;
        if (T == 0) continue;
        BatchSize scores_size = {.M = T, .N = T, .K = HS, .batch = NH},
                  heads_size = {.M = T, .N = HS, .K = T, .batch = NH};
        BatchMatrix q = materialized_heads(qkv, 3 * C, &z), k = materialized_heads(qkv + C, 3 * C, &z);
        BatchMatrix v = materialized_heads(qkv + 2 * C, 3 * C, &z), g = materialized_heads(dout, C, &z);
        BatchMatrix dq = materialized_heads(dqkv, 3 * C, &z), dk = materialized_heads(dqkv + C, 3 * C, &z);
        BatchMatrix dv = materialized_heads(dqkv + 2 * C, 3 * C, &z);
        BatchMatrix S = materialized_pairs(scores, CUDA_R_32F, &z), dD = materialized_pairs(gradients, CUDA_R_32F, &z);
        BatchMatrix D = materialized_pairs(scores, cublaslt_type(), &z),
                    ds = materialized_pairs(gradients, cublaslt_type(), &z);

        batched_product(S, q, materialized_transposed(k), scores_size, 1, ctx);
        batched_product(dD, g, materialized_transposed(v), scores_size, 1, ctx);
        attention_backward_softmax_kernel<<<blocks_for((size_t)NH * (size_t)T, MATERIALIZED_WARPS),
                                            MATERIALIZED_THREADS, 0, ctx->stream>>>(scores, gradients, dout, out, lse,
                                                                                    z);
        cudaCheck(cudaGetLastError());
        batched_product(dv, materialized_transposed(D), g, heads_size, 1, ctx);
        batched_product(dq, ds, k, heads_size, z.factor, ctx);
        batched_product(dk, materialized_transposed(ds), q, heads_size, z.factor, ctx);
    }
}

#endif
