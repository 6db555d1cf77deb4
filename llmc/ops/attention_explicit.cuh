/* Attention step by step, with all scores in memory: for fp32, for head sizes that the flash kernels do not take, and
 * the text to read first. One sequence after the other, each line a launch for all heads:
 *
 *   forward     S = Q K^T                                          batched product
 *               D = dropout(softmax(S / sqrt(HS), masked)), lse    attention_forward_softmax_kernel
 *               out = D V                                          batched product
 *
 *   backward    S = Q K^T,  dD = dout V^T                          two batched products
 *               D and ds from S, dD, lse and delta                 attention_backward_softmax_kernel
 *               dV = D^T dout,  dQ = ds K / sqrt(HS),  dK = ds^T Q / sqrt(HS)
 *
 * Q, K and V are read where the matmul before left them, and dQ, dK and dV written where the one after reads them: a
 * head is HS channels wide, and its rows are 3C apart.
 * The products do the whole square; with CAUSAL the kernels read the visible half of it only, and write zeros into the
 * other, which the next product reads.
 * Memory: scores [NH, T, T] of the longest sequence, in fp32, T rounded up to 8 so that every row is aligned: 4 NH T^2
 * bytes forward, twice that backward. D and ds take the places of S and dD: a row of floatX lies in the front of the
 * row of fp32 that it is made from.
 * Numerics: S and dD stay in fp32, whatever floatX is: a bf16 score of 16 would be off by up to 1/16, and so would P.
 * D and ds are rounded to floatX for the products they enter, which costs a relative 2^-8 in bf16, 2^-11 in fp16. */
#ifndef LLMC_ATTENTION_EXPLICIT_CUH
#define LLMC_ATTENTION_EXPLICIT_CUH

#include "../base/rng.h"
#include "../device/cublaslt.cuh"

enum { EXPLICIT_WARPS = 8, EXPLICIT_THREADS = EXPLICIT_WARPS * WARP };

// Of one sequence.
typedef struct {
    int T, row;         // its length, its first row in the batch
    int width;          // floats from one row of scores to the next
    int N, NH, HS;      // of the batch
    uint32_t sequence;  // its number in the whole step
    float factor;       // 1 / sqrt(HS)
    Mask mask;
    Dropout dropout;
} ExplicitSequence;

static inline int explicit_width(int T) { return (int)round_up((size_t)T, 8); }

// Of the forward pass; the backward pass takes twice as much.
static inline size_t explicit_scratch_bytes(int T, int NH) {
    return round_up((size_t)NH * (size_t)T * (size_t)explicit_width(T) * sizeof(float), 256);
}

// ---------------------------------------------------------------------------------------------------------
// Kernels. A warp takes one row of scores: one query of one head. Grid: all rows. A lane takes four neighbouring keys at
// a time, half of those that share one draw of random numbers.

enum { EXPLICIT_STEP = 4 * WARP };  // keys that a warp takes at a time

// Of those four scores, the ones that the query may see; the others are not even read, and count as `hidden`.
__device__ inline void explicit_load(float (&x)[4], const float* row, int key, int visible, float hidden) {
    if (key + 4 <= visible) {
        to_floats(x, load128(row + key));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = key + i < visible ? row[key + i] : hidden;
}

__device__ inline void explicit_store(floatX* row, int key, const float (&x)[4]) {
    *(Vector<floatX, 4>*)(row + key) = from_floats<floatX, 4>(x);
}

// What dropout multiplies the four probabilities with.
__device__ inline void explicit_keep(float (&keep)[4], const ExplicitSequence& z, int head, int query, int key) {
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
__global__ void __launch_bounds__(EXPLICIT_THREADS)
    attention_forward_softmax_kernel(float* scores, float* lse, ExplicitSequence z) {
    size_t at = (size_t)blockIdx.x * EXPLICIT_WARPS + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP, head = (int)(at / z.T), query = (int)(at % z.T);
    if (head >= z.NH) return;
    const float* s = scores + at * z.width;
    floatX* d = (floatX*)s;
    int visible = attention_visible(z.mask, query, z.T);

    // Each lane's largest score, and its sum of exponentials relative to that; then the row's.
    float top = -INFINITY, sum = 0, x[4], keep[4];
    for (int key = 4 * lane; key < visible; key += EXPLICIT_STEP) {
        explicit_load(x, s, key, visible, -INFINITY);
        float old = top, added = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) top = fmaxf(top, x[i] *= z.factor);
#pragma unroll
        for (int i = 0; i < 4; i++) added += real_exp(x[i] - top);
        sum = sum * real_exp(old - top) + added;
    }
    float largest = warp_max(top);  // key 0 is visible to all: a number, unless all are NaN
    sum = warp_sum(sum * real_exp(top - largest));
    float inverse = 1 / sum;
    if (lane == 0) lse[(size_t)head * z.N + z.row + query] = largest + logf(sum);

    for (int step = 0; step < z.width; step += EXPLICIT_STEP) {
        int key = step + 4 * lane;
        float p[4] = {0, 0, 0, 0};
        if (key < visible) {
            explicit_load(x, s, key, visible, -INFINITY);
            explicit_keep(keep, z, head, query, key);
#pragma unroll
            for (int i = 0; i < 4; i++) p[i] = real_exp(x[i] * z.factor - largest) * inverse * keep[i];
        }
        __syncwarp();  // all have read this step's scores, and D's row is never ahead of that
        if (key < z.width) explicit_store(d, key, p);
    }
}

// scores: S, which becomes D; gradients: dD, which becomes ds. Both [NH, T, width].
__global__ void __launch_bounds__(EXPLICIT_THREADS)
    attention_backward_softmax_kernel(float* scores, float* gradients, const floatX* dout, const floatX* out,
                                      const float* lses, ExplicitSequence z) {
    size_t at = (size_t)blockIdx.x * EXPLICIT_WARPS + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP, head = (int)(at / z.T), query = (int)(at % z.T);
    if (head >= z.NH) return;
    const float *s = scores + at * z.width, *dd = gradients + at * z.width;
    floatX *d = (floatX*)s, *ds = (floatX*)dd;
    int visible = attention_visible(z.mask, query, z.T);
    size_t channel = ((size_t)(z.row + query) * z.NH + head) * z.HS;
    float lse = lses[(size_t)head * z.N + z.row + query], delta = 0;
    for (int c = lane; c < z.HS; c += WARP) delta += to_float(dout[channel + c]) * to_float(out[channel + c]);
    delta = warp_sum(delta);

    for (int step = 0; step < z.width; step += EXPLICIT_STEP) {
        int key = step + 4 * lane;
        float p[4] = {0, 0, 0, 0}, dp[4] = {0, 0, 0, 0}, keep[4];
        if (key < visible) {
            explicit_load(p, s, key, visible, -INFINITY);
            explicit_load(dp, dd, key, visible, 0);
            explicit_keep(keep, z, head, query, key);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float e = real_exp(p[i] * z.factor - lse);
                p[i] = e * keep[i];
                dp[i] = e * (keep[i] * dp[i] - delta);
            }
        }
        __syncwarp();
        if (key < z.width) {
            explicit_store(d, key, p);
            explicit_store(ds, key, dp);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Launches

static inline ExplicitSequence explicit_sequence(const Sequences* s, int index, AttentionShape shape) {
    ExplicitSequence z;
    z.row = sequences_start(s, index);
    z.T = sequences_start(s, index + 1) - z.row;
    z.width = explicit_width(z.T);
    z.N = s->rows;
    z.NH = shape.NH;
    z.HS = shape.HS;
    z.sequence = sequences_number(s, index);
    z.factor = (float)(1 / sqrt((double)shape.HS));
    z.mask = shape.mask;
    z.dropout = shape.dropout;
    return z;
}

// The heads of the sequence's rows of x, which are `row` elements apart, as [T, HS] matrices.
static inline BatchMatrix explicit_heads(const floatX* x, size_t row, const ExplicitSequence* z) {
    BatchMatrix m = {(void*)(x + (size_t)z->row * row), {cublaslt_type(), CUBLAS_OP_N, (int64_t)row, z->HS}};
    return m;
}

// [T, T] matrices: of scores in fp32 (CUDA_R_32F), or of what the kernels put in their places.
static inline BatchMatrix explicit_pairs(float* x, cudaDataType_t type, const ExplicitSequence* z) {
    int64_t width = type == CUDA_R_32F ? z->width : z->width * (int64_t)(sizeof(float) / sizeof(floatX));
    BatchMatrix m = {x, {type, CUBLAS_OP_N, width, z->T * width}};
    return m;
}

static inline BatchMatrix explicit_transposed(BatchMatrix m) {
    m.lies.op = CUBLAS_OP_T;
    return m;
}

static inline void explicit_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s, AttentionShape shape,
                                    Context* ctx) {
    int NH = shape.NH, HS = shape.HS;
    size_t C = (size_t)NH * (size_t)HS;
    float* scores = (float*)device_scratch(ctx, explicit_scratch_bytes(s->max_length, NH));
    for (int index = 0; index < s->count; index++) {
        ExplicitSequence z = explicit_sequence(s, index, shape);
        int T = z.T;
        if (T == 0) continue;
        BatchMatrix q = explicit_heads(qkv, 3 * C, &z), k = explicit_heads(qkv + C, 3 * C, &z);
        BatchMatrix v = explicit_heads(qkv + 2 * C, 3 * C, &z), o = explicit_heads(out, C, &z);
        BatchMatrix S = explicit_pairs(scores, CUDA_R_32F, &z), D = explicit_pairs(scores, cublaslt_type(), &z);

        batched_product(S, q, explicit_transposed(k), T, T, HS, NH, 1, ctx);
        attention_forward_softmax_kernel<<<blocks_for((size_t)NH * (size_t)T, EXPLICIT_WARPS), EXPLICIT_THREADS, 0,
                                           ctx->stream>>>(scores, lse, z);
        cudaCheck(cudaGetLastError());
        batched_product(o, D, v, T, HS, T, NH, 1, ctx);
    }
}

static inline void explicit_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                     const real* lse, const Sequences* s, AttentionShape shape, Context* ctx) {
    int NH = shape.NH, HS = shape.HS;
    size_t C = (size_t)NH * (size_t)HS, bytes = explicit_scratch_bytes(s->max_length, NH);
    float* scores = (float*)device_scratch(ctx, 2 * bytes);
    float* gradients = scores + bytes / sizeof(float);
    for (int index = 0; index < s->count; index++) {
        ExplicitSequence z = explicit_sequence(s, index, shape);
        int T = z.T;
        if (T == 0) continue;
        BatchMatrix q = explicit_heads(qkv, 3 * C, &z), k = explicit_heads(qkv + C, 3 * C, &z);
        BatchMatrix v = explicit_heads(qkv + 2 * C, 3 * C, &z), g = explicit_heads(dout, C, &z);
        BatchMatrix dq = explicit_heads(dqkv, 3 * C, &z), dk = explicit_heads(dqkv + C, 3 * C, &z);
        BatchMatrix dv = explicit_heads(dqkv + 2 * C, 3 * C, &z);
        BatchMatrix S = explicit_pairs(scores, CUDA_R_32F, &z), dD = explicit_pairs(gradients, CUDA_R_32F, &z);
        BatchMatrix D = explicit_pairs(scores, cublaslt_type(), &z),
                    ds = explicit_pairs(gradients, cublaslt_type(), &z);

        batched_product(S, q, explicit_transposed(k), T, T, HS, NH, 1, ctx);
        batched_product(dD, g, explicit_transposed(v), T, T, HS, NH, 1, ctx);
        attention_backward_softmax_kernel<<<blocks_for((size_t)NH * (size_t)T, EXPLICIT_WARPS), EXPLICIT_THREADS, 0,
                                            ctx->stream>>>(scores, gradients, dout, out, lse, z);
        cudaCheck(cudaGetLastError());
        batched_product(dv, explicit_transposed(D), g, T, HS, T, NH, 1, ctx);
        batched_product(dq, ds, k, T, HS, T, NH, z.factor, ctx);
        batched_product(dk, explicit_transposed(ds), q, T, HS, T, NH, z.factor, ctx);
    }
}

#endif
