/* The next-sentence prediction head after the pooler's matmul: tanh, a linear layer with two classes, softmax and
 * cross-entropy, with all of their gradients, in one launch. The rows are few and short.
 *
 *   t[s, c]      = tanh(pre[s, c])
 *   logits[s, k] = sum over c of t[s, c] w[k, c], + b[k]                                     k = 0, 1
 *   loss  (SET or ADD) = scale * sum over s of (log(sum over k of exp(logits[s, k])) - logits[s, labels[s]])
 *   correct (SET or ADD) = number of s whose label has the largest logit; the first one wins ties
 *   backward, with factor = scale * loss_scale[0] (loss_scale NULL: scale):
 *   dlogits[s, k] = factor * (softmax(logits[s])[k] - [k == labels[s]])
 *   dpre[s, c]    = (sum over k of dlogits[s, k] w[k, c]) * (1 - t[s, c]^2)                   written over pre
 *   dbias[c] (SET or ADD) = sum over s of dpre[s, c]                          for the pooler's bias, part of pre
 *   dw[k, c], db[k] (SET or ADD) = sum over s of dlogits[s, k] t[s, c], and of dlogits[s, k]
 *
 * Shapes: pre [S, C], w [2, C], b [2] floatX; labels [S] int; logits [S, 2], loss [1], correct [1], loss_scale [1],
 * dw [2, C], db [2], dbias [C] real. A label is 0 or 1; a label below 0 is ignored: loss 0, gradients 0, never correct.
 * loss_scale is on the device. It never scales the losses.
 * Numerics: all in real, except that the losses are summed over s in double. t and dpre are not rounded to floatX
 * before they are summed. The two classes have opposite gradients, so only one is computed: the softmax of the wrong
 * class, from the difference of the logits. Confident predictions lose no digits. A NaN in pre makes its loss NaN.
 * Source: Devlin et al., "BERT: Pre-training of deep bidirectional transformers", 2018, section 3.1; definitions. */
#ifndef LLMC_BERT_NEXT_SENTENCE_H
#define LLMC_BERT_NEXT_SENTENCE_H

#include "llmc/device/cuda_utils.cuh"
#include "llmc/device/scope.h"
#include "llmc/ops/common/vector_math.h"

// A tanh counts as twenty flops.
#define NEXT_SENTENCE_FORWARD_FLOPS(S, C) (24.0 * (S) * (C))
#define NEXT_SENTENCE_BACKWARD_FLOPS(S, C) (31.0 * (S) * (C))
#define NEXT_SENTENCE_FORWARD_BYTES(S, C) (((S) + 2.0) * (C) * sizeof(floatX) + (S) * (2 * sizeof(real) + sizeof(int)))
#define NEXT_SENTENCE_BACKWARD_BYTES(S, C, mode)                                                                       \
    (NEXT_SENTENCE_FORWARD_BYTES(S, C) + 1.0 * (S) * (C) * sizeof(floatX) +                                            \
     ((mode) == ADD ? 6.0 : 3.0) * (C) * sizeof(real))

typedef struct {
    real* logits;          // [S, 2] out
    real *loss, *correct;  // [1] out
    const int* labels;     // [S]
    double scale;
    const real* loss_scale;  // [1]; NULL: 1
} NextSentenceLoss;

typedef struct {
    LinearGrads d;  // dw [2, C], db [2]
    real* dbias;    // [C]
} NextSentenceGrads;

static inline Scope next_sentence_scope(Context* ctx, Direction direction, int S, int C, Mode mode) {
    int forward = direction == FORWARD;
    CHECK(S > 0 && C > 0);
    return scope_open(ctx, forward ? "next_sentence_forward" : "next_sentence_backward",
                      forward ? NEXT_SENTENCE_FORWARD_FLOPS(S, C) : NEXT_SENTENCE_BACKWARD_FLOPS(S, C),
                      forward ? NEXT_SENTENCE_FORWARD_BYTES(S, C) : NEXT_SENTENCE_BACKWARD_BYTES(S, C, mode),
                      "S=%d C=%d", S, C);
}

// ---------------------------------------------------------------------------------------------------------
// References

// d_losses (may be NULL): [S, 2], the gradient of the sum of the losses with respect to the logits.
static inline void next_sentence_forward_ref(NextSentenceLoss out, double* d_losses, const real* pre, const real* w,
                                             const real* b, int S, int C, Mode mode) {
    double loss = 0, correct = 0;
    for (int s = 0; s < S; s++) {
        double x[2] = {(double)b[0], (double)b[1]};
        for (int k = 0; k < 2; k++) {
            for (int c = 0; c < C; c++) x[k] += tanh((double)pre[(size_t)s * (size_t)C + (size_t)c]) * w[k * C + c];
            out.logits[2 * s + k] = (real)x[k];
        }
        int label = out.labels[s];
        double max = fmax(x[0], x[1]), sum = exp(x[0] - max) + exp(x[1] - max);
        for (int k = 0; k < 2 && d_losses; k++)
            d_losses[2 * s + k] = label < 0 ? 0 : exp(x[k] - max) / sum - (k == label);
        if (label < 0) continue;
        loss += max + log(sum) - x[label];
        correct += label == 0 ? x[0] >= x[1] : x[1] > x[0];
    }
    *out.loss = (real)(out.scale * loss + (mode == ADD ? (double)*out.loss : 0));
    *out.correct = (real)(correct + (mode == ADD ? (double)*out.correct : 0));
}

static inline void next_sentence_backward_ref(real* pre, NextSentenceGrads g, NextSentenceLoss out, const real* w,
                                              const real* b, int S, int C, Mode mode) {
    real *dw = g.d.w, *db = g.d.b, *dbias = g.dbias;
    double factor = out.scale * (out.loss_scale ? (double)*out.loss_scale : 1);
    double* dlogits = (double*)xmalloc(2 * (size_t)S * sizeof *dlogits);
    next_sentence_forward_ref(out, dlogits, pre, w, b, S, C, mode);
    for (int s = 0; s < 2 * S; s++) dlogits[s] *= factor;
    for (int k = 0; k < 2; k++) {
        double sum = mode == ADD ? (double)db[k] : 0;
        for (int s = 0; s < S; s++) sum += dlogits[2 * s + k];
        db[k] = (real)sum;
    }
    for (int c = 0; c < C; c++) {
        int is_added = mode == ADD;
        double sum[3] = {is_added ? (double)dw[c] : 0, is_added ? (double)dw[C + c] : 0,
                         is_added ? (double)dbias[c] : 0};
        for (int s = 0; s < S; s++) {
            real* x = &pre[(size_t)s * (size_t)C + (size_t)c];
            double t = tanh((double)*x), dpre = (dlogits[2 * s] * w[c] + dlogits[2 * s + 1] * w[C + c]) * (1 - t * t);
            sum[0] += dlogits[2 * s] * t;
            sum[1] += dlogits[2 * s + 1] * t;
            sum[2] += dpre;
            *x = (real)dpre;
        }
        dw[c] = (real)sum[0], dw[C + c] = (real)sum[1], dbias[c] = (real)sum[2];
    }
    free(dlogits);
}

// ---------------------------------------------------------------------------------------------------------
// CPU and GPU

// The terms of one sequence: its loss, the gradient of the loss with respect to logit 0 (that of logit 1 is its
// negative), and 1 if the prediction is correct.
typedef struct {
    real loss, gradient, correct;
} NextSentenceTerms;

HOST_DEVICE static inline NextSentenceTerms next_sentence_terms(real x0, real x1, int label) {
    NextSentenceTerms r = {0, 0, 0};
    if (label < 0) return r;
    real margin = label ? x1 - x0 : x0 - x1;  // the correct class's logit minus the other's
    real e = real_exp(margin < 0 ? margin : -margin), wrong = (margin < 0 ? 1 : e) / (1 + e);
    r.loss = (margin < 0 ? -margin : 0) + (real)log1p(e);
    r.gradient = label ? wrong : -wrong;
    r.correct = (real)(label ? x0 < x1 : x1 <= x0);
    return r;
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: one kernel. Each block processes a few sequences, and each thread the same columns of all of them. The last
// block to arrive adds the partial results that the blocks stored in scratch, in block order. pre is read twice, the
// second time from cache. Recomputing its tanh costs less than storing it.

enum {
    NEXT_SENTENCE_THREADS = 512,
    NEXT_SENTENCE_MOST = 8,     // maximum number of sequences per block
    NEXT_SENTENCE_BLOCKS = 16,  // maximum number of blocks, unless S exceeds MOST * BLOCKS
};

typedef struct {
    const floatX* pre;
    floatX* dpre;  // may be pre
    Linear p;
    LinearGrads d;
    real* dbias;
    NextSentenceLoss out;
    int S, C, each, add;  // each: sequences per block
    unsigned* arrivals;
    float* terms;    // [3, S] losses, correct (0 or 1), gradients of logit 0
    float* columns;  // [blocks, 2, C] sums for dw[0] and dbias
} NextSentenceTask;

// Load one column of the block's sequences; sequences beyond `count` are 0.
__device__ inline void next_sentence_column(float* x, const floatX* pre, int C, int c, int count) {
#pragma unroll
    for (int i = 0; i < NEXT_SENTENCE_MOST; i++)
        x[i] = i < count ? to_float(pre[(size_t)i * (size_t)C + (size_t)c]) : 0;
}

// Compute the logits and terms of the block's sequences. `dlogits` receives the gradients of logit 0, multiplied by
// factor.
__device__ inline void next_sentence_block(float* dlogits, const NextSentenceTask& k, int first, int count) {
    __shared__ float2 partial[NEXT_SENTENCE_THREADS / WARP][NEXT_SENTENCE_MOST];
    const floatX* pre = k.pre + (size_t)first * (size_t)k.C;
    float2 sum[NEXT_SENTENCE_MOST];
#pragma unroll
    for (int i = 0; i < NEXT_SENTENCE_MOST; i++) sum[i] = make_float2(0, 0);
    for (int c = (int)threadIdx.x; c < k.C; c += NEXT_SENTENCE_THREADS) {
        float w0 = to_float(k.p.w[c]), w1 = to_float(k.p.w[(size_t)k.C + (size_t)c]), x[NEXT_SENTENCE_MOST];
        next_sentence_column(x, pre, k.C, c, count);
#pragma unroll
        for (int i = 0; i < NEXT_SENTENCE_MOST; i++) {
            if (i >= count) break;
            float t = real_tanh(x[i]);
            sum[i].x += t * w0;
            sum[i].y += t * w1;
        }
    }
#pragma unroll
    for (int i = 0; i < NEXT_SENTENCE_MOST; i++) {
        if (i >= count) break;
        sum[i] = make_float2(warp_sum(sum[i].x), warp_sum(sum[i].y));
        if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP][i] = sum[i];
    }
    __syncthreads();
    if ((int)threadIdx.x < count) {
        int s = first + (int)threadIdx.x;
        float x0 = 0, x1 = 0;
        for (int warp = 0; warp < NEXT_SENTENCE_THREADS / WARP; warp++) {
            x0 += partial[warp][threadIdx.x].x;
            x1 += partial[warp][threadIdx.x].y;
        }
        x0 += to_float(k.p.b[0]);
        x1 += to_float(k.p.b[1]);
        NextSentenceTerms terms = next_sentence_terms(x0, x1, k.out.labels[s]);
        float factor = (float)k.out.scale * (k.out.loss_scale ? *k.out.loss_scale : 1);
        k.out.logits[2 * s] = x0;
        k.out.logits[2 * s + 1] = x1;
        k.terms[s] = terms.loss;
        k.terms[k.S + s] = terms.correct;
        k.terms[2 * k.S + s] = dlogits[threadIdx.x] = factor * terms.gradient;
    }
    __syncthreads();
}

// Compute dpre of the block's sequences, and their partial sums for each column.
__device__ inline void next_sentence_gradient(const float* dlogits, const NextSentenceTask& k, int first, int count) {
    size_t C = (size_t)k.C;
    float* columns = k.columns + 2 * blockIdx.x * C;
    for (int c = (int)threadIdx.x; c < k.C; c += NEXT_SENTENCE_THREADS) {
        float w = to_float(k.p.w[c]) - to_float(k.p.w[C + (size_t)c]), x[NEXT_SENTENCE_MOST], dw = 0, dbias = 0;
        next_sentence_column(x, k.pre + (size_t)first * C, k.C, c, count);
#pragma unroll
        for (int i = 0; i < NEXT_SENTENCE_MOST; i++) {
            if (i >= count) break;
            float t = real_tanh(x[i]), dpre = dlogits[i] * w * (1 - t * t);
            dw += dlogits[i] * t;
            dbias += dpre;
            k.dpre[(size_t)(first + i) * C + (size_t)c] = from_float<floatX>(dpre);
        }
        columns[c] = dw;
        columns[C + (size_t)c] = dbias;
    }
}

// The sum of one of the terms over all sequences, computed by one warp.
__device__ inline double next_sentence_sum(const float* terms, int S) {
    double sum = 0;
    for (int s = (int)threadIdx.x % WARP; s < S; s += WARP) sum += (double)terms[s];
    return warp_sum(sum);
}

__device__ inline void next_sentence_put(real* to, double x, int add) { *to = (real)(add ? (double)*to + x : x); }

// Each block processes k.each sequences.
template <int BACKWARD>
__global__ void __launch_bounds__(NEXT_SENTENCE_THREADS) next_sentence_kernel(NextSentenceTask k) {
    __shared__ float dlogits[NEXT_SENTENCE_MOST];
    int first = (int)blockIdx.x * k.each, count = min(k.each, k.S - first), warp = (int)threadIdx.x / WARP;
    next_sentence_block(dlogits, k, first, count);
    if constexpr (BACKWARD) next_sentence_gradient(dlogits, k, first, count);
    if (!last_to_arrive(k.arrivals, gridDim.x)) return;

    if (warp < 2 + BACKWARD) {
        double sum = next_sentence_sum(k.terms + (size_t)warp * (size_t)k.S, k.S);
        if (threadIdx.x % WARP == 0 && warp == 0) next_sentence_put(k.out.loss, k.out.scale * sum, k.add);
        if (threadIdx.x % WARP == 0 && warp == 1) next_sentence_put(k.out.correct, sum, k.add);
        if (threadIdx.x % WARP == 0 && warp == 2) {
            next_sentence_put(&k.d.b[0], sum, k.add);
            next_sentence_put(&k.d.b[1], -sum, k.add);
        }
    }
    if constexpr (BACKWARD) {
        size_t C = (size_t)k.C;
        for (size_t c = threadIdx.x; c < C; c += NEXT_SENTENCE_THREADS) {
            float dw = 0, dbias = 0;
#pragma unroll 8
            for (unsigned block = 0; block < gridDim.x; block++) {
                dw += k.columns[2 * block * C + c];
                dbias += k.columns[(2 * block + 1) * C + c];
            }
            k.d.w[c] = k.add ? k.d.w[c] + dw : dw;
            k.d.w[C + c] = k.add ? k.d.w[C + c] - dw : -dw;
            k.dbias[c] = k.add ? k.dbias[c] + dbias : dbias;
        }
    }
}

// Upper bound of the scratch of a launch with up to S sequences.
static inline size_t next_sentence_scratch_bytes(int S, int C) {
    int blocks = min_int(S, max_int(NEXT_SENTENCE_BLOCKS, (S + NEXT_SENTENCE_MOST - 1) / NEXT_SENTENCE_MOST));
    return (3 * (size_t)S + 2 * (size_t)blocks * (size_t)C) * sizeof(float);
}

template <int BACKWARD> static inline void next_sentence_start(NextSentenceTask k, Context* ctx) {
    k.each = min_int(NEXT_SENTENCE_MOST, (k.S + NEXT_SENTENCE_BLOCKS - 1) / NEXT_SENTENCE_BLOCKS);
    unsigned blocks = blocks_for((size_t)k.S, (size_t)k.each);
    size_t terms = 3 * (size_t)k.S, columns = BACKWARD ? 2 * (size_t)blocks * (size_t)k.C : 0;
    k.arrivals = ctx->arrivals;
    k.terms = (float*)device_scratch(ctx, (terms + columns) * sizeof(float));
    k.columns = k.terms + terms;
    next_sentence_kernel<BACKWARD><<<blocks, NEXT_SENTENCE_THREADS, 0, ctx->stream>>>(k);
    cudaCheck(cudaGetLastError());
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU: parallel over sequences first, then over blocks of columns. The order of every sum depends only on the shapes.

enum { NEXT_SENTENCE_LANES = 16, NEXT_SENTENCE_COLUMNS = 256 };

// Compute the logits of one sequence. Its tanh is stored in `t` (may be pre) unless `t` is NULL.
static inline void next_sentence_row(real* logits, floatX* t, const floatX* pre, Linear p, int C) {
    double sum[2] = {(double)p.b[0], (double)p.b[1]};
    for (int c0 = 0; c0 < C; c0 += NEXT_SENTENCE_COLUMNS) {
        int n = min_int(NEXT_SENTENCE_COLUMNS, C - c0);
        real y[NEXT_SENTENCE_COLUMNS];
        for (int c = 0; c < n; c++) y[c] = real_tanh(pre[c0 + c]);
        for (int k = 0; k < 2; k++) {
            const floatX* w = p.w + (size_t)k * (size_t)C + (size_t)c0;
            real lane[NEXT_SENTENCE_LANES] = {0};
            int c = 0;
            for (; c + NEXT_SENTENCE_LANES <= n; c += NEXT_SENTENCE_LANES)
                for (int j = 0; j < NEXT_SENTENCE_LANES; j++) lane[j] += y[c + j] * w[c + j];
            for (; c < n; c++) lane[c % NEXT_SENTENCE_LANES] += y[c] * w[c];
            for (int j = 0; j < NEXT_SENTENCE_LANES; j++) sum[k] += (double)lane[j];
        }
        if (t) memcpy(t + c0, y, (size_t)n * sizeof *y);
    }
    logits[0] = (real)sum[0], logits[1] = (real)sum[1];
}

// Compute the logits, the loss and the number of correct predictions. d [S]: the gradients of logit 0, multiplied by
// factor; t: as in next_sentence_row().
static inline void next_sentence_rows(real* d, NextSentenceLoss out, floatX* t, const floatX* pre, Linear p, int S,
                                      int C, Mode mode) {
    double loss = 0, correct = 0, factor = out.scale * (out.loss_scale ? (double)*out.loss_scale : 1);
#pragma omp parallel for schedule(static)
    for (int s = 0; s < S; s++) {
        size_t at = (size_t)s * (size_t)C;
        next_sentence_row(out.logits + 2 * s, t ? t + at : NULL, pre + at, p, C);
    }
    for (int s = 0; s < S; s++) {
        NextSentenceTerms terms = next_sentence_terms(out.logits[2 * s], out.logits[2 * s + 1], out.labels[s]);
        loss += (double)terms.loss;
        correct += (double)terms.correct;
        d[s] = (real)(factor * (double)terms.gradient);
    }
    *out.loss = (real)(out.scale * loss + (mode == ADD ? (double)*out.loss : 0));
    *out.correct = (real)(correct + (mode == ADD ? (double)*out.correct : 0));
}

// The scratch of any launch with S sequences.
static inline size_t next_sentence_scratch_bytes(int S, int C) { return (void)C, (size_t)S * sizeof(real); }

#endif

static inline void next_sentence_forward(NextSentenceLoss out, const floatX* pre, Linear p, int S, int C, Mode mode,
                                         Context* ctx) {
    Scope scope = next_sentence_scope(ctx, FORWARD, S, C, mode);
#ifdef __CUDACC__
    NextSentenceTask k = {.pre = pre, .p = p, .out = out, .S = S, .C = C, .add = mode == ADD};
    next_sentence_start<0>(k, ctx);
#else
    real* d = (real*)device_scratch(ctx, next_sentence_scratch_bytes(S, C));
    next_sentence_rows(d, out, NULL, pre, p, S, C, mode);
#endif
    scope_close(&scope);
}

static inline void next_sentence_backward(floatX* pre, NextSentenceGrads g, NextSentenceLoss out, Linear p, int S,
                                          int C, Mode mode, Context* ctx) {
    Scope scope = next_sentence_scope(ctx, BACKWARD, S, C, mode);
#ifdef __CUDACC__
    NextSentenceTask k = {
        .pre = pre, .dpre = pre, .p = p, .d = g.d, .dbias = g.dbias, .out = out, .S = S, .C = C, .add = mode == ADD};
    next_sentence_start<1>(k, ctx);
#else
    LinearGrads d = g.d;
    real* dlogit = (real*)device_scratch(ctx, next_sentence_scratch_bytes(S, C));
    next_sentence_rows(dlogit, out, pre, pre, p, S, C, mode);
    double db = 0;
    for (int s = 0; s < S; s++) db += (double)dlogit[s];
    d.b[0] = (real)(mode == ADD ? (double)d.b[0] + db : db);
    d.b[1] = (real)(mode == ADD ? (double)d.b[1] - db : -db);
#pragma omp parallel for schedule(static)
    for (int c0 = 0; c0 < C; c0 += NEXT_SENTENCE_COLUMNS) {
        double dw[NEXT_SENTENCE_COLUMNS] = {0}, sums[NEXT_SENTENCE_COLUMNS] = {0};
        int n = min_int(NEXT_SENTENCE_COLUMNS, C - c0);
        const floatX *w0 = p.w + c0, *w1 = w0 + C;
        real *dw0 = d.w + c0, *dw1 = dw0 + C, *db_pre = g.dbias + c0;
        for (int s = 0; s < S; s++) {
            floatX* x = pre + (size_t)s * (size_t)C + (size_t)c0;  // holds the tanh of pre here
            for (int j = 0; j < n; j++) {
                real t = x[j];
                dw[j] += (double)(dlogit[s] * t);
                x[j] = dlogit[s] * (w0[j] - w1[j]) * (1 - t * t);
                sums[j] += (double)x[j];
            }
        }
        for (int j = 0; j < n; j++) {
            dw0[j] = (real)(mode == ADD ? (double)dw0[j] + dw[j] : dw[j]);
            dw1[j] = (real)(mode == ADD ? (double)dw1[j] - dw[j] : -dw[j]);
            db_pre[j] = (real)(mode == ADD ? (double)db_pre[j] + sums[j] : sums[j]);
        }
    }
#endif
    scope_close(&scope);
}

#endif
