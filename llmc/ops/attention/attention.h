/* Attention over packed sequences. No T x T matrix is kept for the backward pass.
 *
 *   s[q, k]    = Q[q] . K[k] / sqrt(HS)                 k in q's own sequence; CAUSAL: k <= q
 *   lse[q]     = log(sum over k of exp(s[q, k]))
 *   P[q, k]    = exp(s[q, k] - lse[q])
 *   D[q, k]    = P[q, k] * keep[q, k]                   keep is 0 or 1 / (1 - p)
 *   out[q]     = sum over k of D[q, k] V[k]
 *
 *   delta[q]   = dout[q] . out[q]                       = sum over k of dD[q, k] D[q, k], with and without dropout
 *   dV[k]      = sum over q of D[q, k] dout[q]
 *   dP[q, k]   = keep[q, k] (dout[q] . V[k])
 *   ds[q, k]   = P[q, k] (dP[q, k] - delta[q])
 *   dQ[q]      = sum over k of ds[q, k] K[k] / sqrt(HS)
 *   dK[k]      = sum over q of ds[q, k] Q[q] / sqrt(HS)
 *
 * Shapes: qkv, dqkv [N, 3C], each row Q | K | V, each of these [NH, HS]; out, dout [N, C]; lse [NH, N]; C = NH * HS.
 * Any NH, HS and sequence lengths. dqkv is SET.
 * Dropout: the random bits are a function of (sequence, head, query, key). Query and key are counted within the
 * sequence, so packing does not change the bits. Each pair uses 16 bits (base/rng.h).
 * Numerics: matmuls and softmax accumulate in real, the log is in double. The backward pass reads out and lse of the
 * forward pass and recomputes P.
 * Files: materialized.cuh (read it first), flash_forward.cuh and flash_backward.cuh (tensor cores of sm_75 and later),
 * hopper/attention.cuh (sm_90a), cpu.h. apps/use/decode.h has the attention of one new token.
 * Source: Dao et al., "FlashAttention", arXiv 2205.14135, for lse, delta and the recomputation. */
#ifndef LLMC_OPS_ATTENTION_ATTENTION_H
#define LLMC_OPS_ATTENTION_ATTENTION_H

#include "llmc/base/rng.h"
#include "llmc/device/scope.h"
#include "llmc/ops/common/vector_math.h"

typedef struct {
    int NH, HS;
    Mask mask;
    Dropout dropout;  // on the probabilities
} AttentionShape;

// The number of keys, from the sequence's first, that a query attends to.
HOST_DEVICE static inline int attention_visible(Mask mask, int query, int length) {
    return mask == CAUSAL ? query + 1 : length;
}

// `pairs` counts the (query, key) pairs of one head that the mask allows.
#define ATTENTION_FORWARD_FLOPS(pairs, NH, HS) (4.0 * (pairs) * (NH) * (HS))
#define ATTENTION_BACKWARD_FLOPS(pairs, NH, HS) (10.0 * (pairs) * (NH) * (HS))
#define ATTENTION_FORWARD_BYTES(N, NH, HS) (4.0 * (N) * (NH) * (HS) * sizeof(floatX) + 1.0 * (N) * (NH) * sizeof(real))
#define ATTENTION_BACKWARD_BYTES(N, NH, HS) (8.0 * (N) * (NH) * (HS) * sizeof(floatX) + 1.0 * (N) * (NH) * sizeof(real))

// (query, key) pairs of one head that the mask allows.
static inline double attention_pairs(const Sequences* s, Mask mask) {
    return mask == CAUSAL ? 0.5 * (double)(s->sum_sq_len + s->rows) : (double)s->sum_sq_len;
}

static inline Scope attention_scope(Context* ctx, Direction direction, const Sequences* s, AttentionShape shape) {
    double pairs = attention_pairs(s, shape.mask);
    int N = s->rows, NH = shape.NH, HS = shape.HS, forward = direction == FORWARD;
    return scope_open(ctx, forward ? "attention_forward" : "attention_backward",
                      forward ? ATTENTION_FORWARD_FLOPS(pairs, NH, HS) : ATTENTION_BACKWARD_FLOPS(pairs, NH, HS),
                      forward ? ATTENTION_FORWARD_BYTES(N, NH, HS) : ATTENTION_BACKWARD_BYTES(N, NH, HS),
                      "N=%d sequences=%d NH=%d HS=%d", N, s->count, NH, HS);
}

// ---------------------------------------------------------------------------------------------------------
// References

// Dropout's factor for one probability.
static inline double attention_keep_ref(Dropout dropout, uint32_t sequence, int head, int query, int key) {
    Philox r = dropout_bits_attention(dropout, sequence, (uint32_t)head, (uint32_t)query, (uint32_t)key / 8);
    return dropout_keeps_attention(r, key % 8, dropout_threshold_attention(dropout)) ? (double)dropout.scale : 0;
}

// p[k] = P[query, k] for the keys that the query attends to. Returns lse. Rows of qkv are `stride` apart.
static inline double attention_probabilities_ref(double* p, const real* qkv, int query, int visible, int head,
                                                 AttentionShape shape) {
    size_t C = (size_t)shape.NH * (size_t)shape.HS, stride = 3 * C, channel = (size_t)head * (size_t)shape.HS;
    const real* q = qkv + (size_t)query * stride + channel;
    double max = -INFINITY, sum = 0;
    for (int k = 0; k < visible; k++) {
        const real* key = qkv + (size_t)k * stride + C + channel;
        double dot = 0;
        for (int i = 0; i < shape.HS; i++) dot += (double)q[i] * (double)key[i];
        p[k] = dot / sqrt((double)shape.HS);
        max = fmax(max, p[k]);
    }
    for (int k = 0; k < visible; k++) sum += exp(p[k] - max);
    for (int k = 0; k < visible; k++) p[k] = exp(p[k] - max) / sum;
    return max + log(sum);
}

static inline void attention_forward_ref(real* out, real* lse, const real* qkv, const Sequences* s,
                                         AttentionShape shape) {
    size_t N = (size_t)s->rows, HS = (size_t)shape.HS, C = (size_t)shape.NH * HS;
    double* p = (double*)xmalloc((size_t)s->max_length * sizeof *p);
    for (int b = 0; b < s->count; b++) {
        size_t row = (size_t)s->cu_seqlens[b];
        int T = s->cu_seqlens[b + 1] - s->cu_seqlens[b];
        for (int h = 0; h < shape.NH; h++) {
            for (int q = 0; q < T; q++) {
                int visible = attention_visible(shape.mask, q, T);
                lse[(size_t)h * N + row + (size_t)q] =
                    (real)attention_probabilities_ref(p, qkv + row * 3 * C, q, visible, h, shape);
                for (int k = 0; k < visible; k++)
                    p[k] *= attention_keep_ref(shape.dropout, sequences_number(s, b), h, q, k);
                for (size_t i = 0; i < HS; i++) {
                    double sum = 0;
                    for (int k = 0; k < visible; k++)
                        sum += p[k] * (double)qkv[(row + (size_t)k) * 3 * C + 2 * C + (size_t)h * HS + i];
                    out[(row + (size_t)q) * C + (size_t)h * HS + i] = (real)sum;
                }
            }
        }
    }
    free(p);
}

// Computed from the definition, without out and lse. So it also checks how the kernels use delta and lse.
static inline void attention_backward_ref(real* dqkv, const real* dout, const real* qkv, const Sequences* s,
                                          AttentionShape shape) {
    size_t N = (size_t)s->rows, HS = (size_t)shape.HS, C = (size_t)shape.NH * HS;
    double factor = 1 / sqrt((double)shape.HS);
    double* p = (double*)xmalloc((size_t)s->max_length * sizeof *p);
    double* dp = (double*)xmalloc((size_t)s->max_length * sizeof *dp);
    double* sums = (double*)xcalloc(N * 3 * C, sizeof *sums);
    for (int b = 0; b < s->count; b++) {
        size_t row = (size_t)s->cu_seqlens[b];
        int T = s->cu_seqlens[b + 1] - s->cu_seqlens[b];
        for (int h = 0; h < shape.NH; h++) {
            size_t base = row * 3 * C + (size_t)h * HS;  // of this sequence's and head's Q
            for (int q = 0; q < T; q++) {
                int visible = attention_visible(shape.mask, q, T);
                const real* g = dout + (row + (size_t)q) * C + (size_t)h * HS;
                size_t at_q = base + (size_t)q * 3 * C;
                double mean = 0;
                attention_probabilities_ref(p, qkv + row * 3 * C, q, visible, h, shape);
                for (int k = 0; k < visible; k++) {
                    size_t at_v = base + (size_t)k * 3 * C + 2 * C;
                    double keep = attention_keep_ref(shape.dropout, sequences_number(s, b), h, q, k), dot = 0;
                    for (size_t i = 0; i < HS; i++) {
                        dot += (double)g[i] * (double)qkv[at_v + i];
                        sums[at_v + i] += p[k] * keep * (double)g[i];
                    }
                    dp[k] = dot * keep;
                    mean += p[k] * dp[k];
                }
                for (int k = 0; k < visible; k++) {
                    size_t at_k = base + (size_t)k * 3 * C + C;
                    double ds = p[k] * (dp[k] - mean) * factor;
                    for (size_t i = 0; i < HS; i++) {
                        sums[at_q + i] += ds * (double)qkv[at_k + i];
                        sums[at_k + i] += ds * (double)qkv[at_q + i];
                    }
                }
            }
        }
    }
    for (size_t i = 0; i < N * 3 * C; i++) dqkv[i] = (real)sums[i];
    free(sums);
    free(dp);
    free(p);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU

// A program with only one attention mask defines ATTENTION_MASK before its includes. nvcc then compiles the fast
// kernels for this mask only.
static constexpr bool attention_compiles(Mask mask) {
#ifdef ATTENTION_MASK
    return mask == ATTENTION_MASK;
#else
    return mask == CAUSAL || mask == FULL;
#endif
}

// What runs for a shape on a GPU: both passes, and an upper bound of their scratch with up to N rows in `fewest` to
// `most` sequences of up to T rows.
typedef struct {
    void (*forward)(floatX* out, real* lse, const floatX* qkv, const Sequences* s, AttentionShape shape, Context* ctx);
    void (*backward)(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const real* lse,
                     const Sequences* s, AttentionShape shape, Context* ctx);
    size_t (*scratch_bytes)(int N, int fewest, int most, int T, AttentionShape shape, const Context* ctx);
} AttentionKernels;

#include "llmc/ops/attention/materialized.cuh"
#if defined(PRECISION_BF16) || defined(PRECISION_FP16)
#define ATTENTION_FLASH
#ifndef NO_HOPPER
#include "llmc/hopper/attention.cuh"
#endif
#include "llmc/ops/attention/flash_backward.cuh"
#include "llmc/ops/attention/flash_forward.cuh"
#endif

// Whether flash attention takes this shape: if ctx->attention selects it, tensor cores support floatX, and a head
// consists of whole 16-byte vectors.
static inline int attention_is_flash(AttentionShape shape, const Context* ctx) {
    return sizeof(floatX) == 2 && ctx->attention != MATERIALIZED && shape.HS % 8 == 0 && shape.HS <= 128;
}

// Flash attention's tiles must fit in shared memory too: on sm_75, with 64 KB, those of heads of up to 64.
static inline AttentionKernels attention_choose(AttentionShape shape, const Context* ctx) {
    (void)shape, (void)ctx;  // without flash attention
    AttentionKernels k = {materialized_forward, materialized_backward, materialized_scratch_bound};
#ifdef ATTENTION_FLASH
    if (!attention_is_flash(shape, ctx) || !flash_fits(shape.HS, ctx)) return k;
    k.forward = flash_forward, k.backward = flash_backward, k.scratch_bytes = flash_scratch_bound;
#ifndef NO_HOPPER
    hopper_choose(&k, shape, ctx);
#endif
#endif
    return k;
}

#else
#include "llmc/ops/attention/cpu.h"
#endif

// Upper bound of the scratch of a launch with up to N rows in `fewest` to `most` sequences of up to T rows.
static inline size_t attention_scratch_bytes(int N, int fewest, int most, int T, AttentionShape shape,
                                             const Context* ctx) {
#ifdef __CUDACC__
    return attention_choose(shape, ctx).scratch_bytes(N, fewest, most, T, shape, ctx);
#else
    return (void)N, (void)fewest, (void)most, (void)ctx, (size_t)device_threads() * attention_thread_bytes(T, shape.HS);
#endif
}

// ---------------------------------------------------------------------------------------------------------
// Launchers

static inline void attention_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s,
                                     AttentionShape shape, Context* ctx) {
    if (s->rows == 0) return;
    Scope scope = attention_scope(ctx, FORWARD, s, shape);
#ifdef __CUDACC__
    AttentionKernels kernels = attention_choose(shape, ctx);
    if (kernels.forward == materialized_forward && attention_is_flash(shape, ctx) && !ctx->attention_told) {
        warn("attention of heads of %d channels is materialized, because flash attention needs more shared memory than "
             "the %zu KB that a block has on this GPU",
             shape.HS, ctx->shared_of_block >> 10);
        ctx->attention_told = 1;
    }
    kernels.forward(out, lse, qkv, s, shape, ctx);
#else
    size_t each = attention_thread_bytes(s->max_length, shape.HS);
    char* scratch = (char*)device_scratch(ctx, (size_t)device_threads() * each);
#pragma omp parallel for schedule(dynamic)
    for (int item = 0; item < s->count * shape.NH; item++)
        attention_forward_item(out, lse, qkv, attention_item(s, item, shape, scratch, each));
#endif
    scope_close(&scope);
}

static inline void attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                      const real* lse, const Sequences* s, AttentionShape shape, Context* ctx) {
    if (s->rows == 0) return;
    Scope scope = attention_scope(ctx, BACKWARD, s, shape);
#ifdef __CUDACC__
    attention_choose(shape, ctx).backward(dqkv, dout, qkv, out, lse, s, shape, ctx);
#else
    size_t each = attention_thread_bytes(s->max_length, shape.HS);
    char* scratch = (char*)device_scratch(ctx, (size_t)device_threads() * each);
#pragma omp parallel for schedule(dynamic)
    for (int item = 0; item < s->count * shape.NH; item++)
        attention_backward_item(dqkv, dout, qkv, out, lse, attention_item(s, item, shape, scratch, each));
#endif
    scope_close(&scope);
}

#endif
