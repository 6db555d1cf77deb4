/* LAMB: AdamW's update direction, scaled for each tensor so that a step's norm is proportional to the tensor's norm.
 *
 *   g = grads * min(1, max_norm / norm) / scale                   norm of grads / scale;  max_norm 0: no clipping
 *   m = beta1 * m + (1 - beta1) * g
 *   v = beta2 * v + (1 - beta2) * g * g
 *   u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * decay * p      t: number of this update
 *   ratio = |p| / |u|, norms over the tensor, p before the update;  1 where either is 0 or `trust` is 0
 *   p = p - lr * ratio * u
 *
 *   update     params (and master), m, v [flat buffer] in place; the rest as for AdamW (adamw.h), but with a step that
 *              was computed without lr: lamb_without_lr()
 *   moments    for a shard: m and v, and sum_sq [2 * tensors], which has for every tensor of the whole model the sums
 *              of p^2 and u^2 over its elements in the shard, 0 if it has none. The squares are then summed over ranks
 *   apply      for a shard: p, with the ratios from the summed squares
 *
 * spans      one for each tensor. Q, K and V, which are stored as one tensor, have a span each, because each has its
 *            own norms. Elements between spans are not changed. Padding rows of a tensor are 0 with zero gradients, so
 *            they stay 0 and add nothing to the norms. lamb_number_blocks() must fill in spans[].blocks, for a shard
 *            after adam_clip_spans().
 * dtypes     params floatX; master, m, v, grads and step real; sum_sq double.
 * numerics   Elementwise in real. The squares of a block of LAMB_BLOCK elements are summed in an order that depends
 *            only on the tensor's size: on the CPU in double, on the GPU in fp32 over a thread's 64 elements, then in
 *            double. The blocks' sums are added in double. u is not stored: the second pass recomputes it from m and v,
 *            which costs the same traffic and no memory.
 *            Sharding a tensor changes its sums only by their rounding error. On the GPU, where 64 non-negative terms
 *            are added in fp32, the relative error is 64 * 2^-24 = 3.8e-6; on the CPU it is that of a double. A ratio
 *            is the square root of the quotient of two such sums. So for two ways of sharding, the ratio and the step
 *            agree within 7.6e-6, on the CPU within one rounding to real. m and v have the same bits (on the GPU their
 *            FMAs are explicit).
 *            Without a master, params is rounded stochastically, as in AdamW.
 * NaN        If the norm is not finite, nothing is updated.
 * source     You et al., arXiv 1904.00962, in the form of NVIDIA's multi-tensor LAMB: clipping by the global norm
 *            first, bias correction, no limit on the ratio. */
#ifndef LLMC_LAMB_LAMB_H
#define LLMC_LAMB_LAMB_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/adam.h"

#define LAMB_BLOCK 16384

#define LAMB_MOMENTS_FLOPS(n) (21.0 * (double)(n))
#define LAMB_APPLY_FLOPS(n) (11.0 * (double)(n))
#define LAMB_UPDATE_FLOPS(n) (LAMB_MOMENTS_FLOPS(n) + LAMB_APPLY_FLOPS(n))
// The first pass reads grads, m, v and the parameters, and writes m and v. The second reads m, v and the parameters,
// and writes the parameters. `master`: the number of full-precision copies, 0 or 1.
#define LAMB_MOMENTS_BYTES(n, master)                                                                                  \
    ((double)(n) * ((5.0 + (master)) * sizeof(real) + (1.0 - (master)) * sizeof(floatX)))
#define LAMB_APPLY_BYTES(n, master)                                                                                    \
    ((double)(n) * ((2.0 + 2.0 * (master)) * sizeof(real) + (2.0 - (master)) * sizeof(floatX)))
#define LAMB_UPDATE_BYTES(n, master) (LAMB_MOMENTS_BYTES(n, master) + LAMB_APPLY_BYTES(n, master))

HOST_DEVICE static inline int lamb_blocks(size_t size) { return (int)((size + LAMB_BLOCK - 1) / LAMB_BLOCK); }

// Fill in spans[].blocks. Returns the total number of blocks.
static inline int lamb_number_blocks(ParamSpan* spans, int count) {
    int blocks = 0;
    for (int s = 0; s < count; s++) {
        spans[s].blocks = blocks;
        blocks += lamb_blocks(spans[s].size);
    }
    return blocks;
}

// The tensors to update, in the flat buffers of the model or of a shard.
typedef struct {
    const ParamSpan* spans;  // [count] in device memory, in order and without overlaps
    int count;               // may be 0 in a shard
    int blocks;              // the result of lamb_number_blocks()
    size_t elements;         // size of the flat buffers
} LambSpans;

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void lamb_update_ref(AdamWRefState a, double norm, double scale, int64_t update, const ParamSpan* spans,
                                   int count, OptimizerSettings h) {
    real *params = a.params, *m = a.m, *v = a.v;
    const real* grads = a.grads;
    if (!isfinite(norm)) return;
    double clip = h.max_norm > 0 && norm > h.max_norm ? h.max_norm / norm : 1, t = (double)update;
    for (int s = 0; s < count; s++) {
        double *u = (double*)xmalloc(spans[s].size * sizeof *u), sum_sq_p = 0, sum_sq_u = 0;
        for (size_t k = 0; k < spans[s].size; k++) {
            size_t i = spans[s].offset + k;
            double g = clip * grads[i] / scale;
            double mi = h.beta1 * m[i] + (1 - h.beta1) * g;
            double vi = h.beta2 * v[i] + (1 - h.beta2) * g * g;
            double root = sqrt(vi / (1 - pow(h.beta2, t)));
            u[k] = mi / (1 - pow(h.beta1, t)) / (root + h.eps) + h.weight_decay * spans[s].decay * params[i];
            sum_sq_p += (double)params[i] * params[i];
            sum_sq_u += u[k] * u[k];
            m[i] = (real)mi;
            v[i] = (real)vi;
        }
        double ratio = spans[s].trust != 0 && sum_sq_p > 0 && sum_sq_u > 0 ? sqrt(sum_sq_p / sum_sq_u) : 1;
        for (size_t k = 0; k < spans[s].size; k++) {
            size_t i = spans[s].offset + k;
            params[i] = (real)(params[i] - h.lr * ratio * u[k]);
        }
        free(u);
    }
}

// ---------------------------------------------------------------------------------------------------------
// One element and one tensor; shared by both devices

// u of one element, from its updated moments; step->step_size is 1 / (1 - beta1^t).
HOST_DEVICE static inline real lamb_direction(real p, real m, real v, real decay, const AdamWStep* step,
                                              const AdamWCoefficients* c) {
    real root = step->root_scale * (sizeof(real) == sizeof(float) ? (real)sqrtf((float)v) : (real)sqrt((double)v));
    return step->step_size * m / (root + c->eps) + decay * p;
}

HOST_DEVICE static inline real lamb_ratio(float trust, double sum_sq_p, double sum_sq_u) {
    return (real)(trust != 0 && sum_sq_p > 0 && sum_sq_u > 0 ? sqrt(sum_sq_p / sum_sq_u) : 1);
}

#ifdef __CUDACC__
#include "llmc/lamb/kernels.cuh"
#else
// ---------------------------------------------------------------------------------------------------------
// CPU: threads share blocks of LAMB_BLOCK elements

#define LAMB_TILE 256
#define LAMB_LANES 16

// A task's elements of the flat buffers, and their sums of squares.
typedef struct {
    size_t begin, count;
    int span;
    double sum_sq_p, sum_sq_u;
} LambBlock;

static inline double lamb_sum_sq(const real* x, size_t n) {
    double lane[LAMB_LANES] = {0}, sum = 0;
    size_t i = 0;
    for (; i + LAMB_LANES <= n; i += LAMB_LANES) {
#pragma omp simd
        for (size_t k = 0; k < LAMB_LANES; k++) lane[k] += (double)x[i + k] * (double)x[i + k];
    }
    for (size_t k = 0; i < n; i++, k++) lane[k] += (double)x[i] * (double)x[i];
    for (size_t k = 0; k < LAMB_LANES; k++) sum += lane[k];
    return sum;
}

static inline void lamb_moments_block(LambBlock* b, AdamWState a, real decay, const AdamWCoefficients* coefficients) {
    AdamWStep k = *a.step;
    AdamWCoefficients c = *coefficients;
    b->sum_sq_p = b->sum_sq_u = 0;
    for (size_t start = b->begin; start < b->begin + b->count; start += LAMB_TILE) {
        real u[LAMB_TILE];
        size_t n = min_size(LAMB_TILE, b->begin + b->count - start);
        const real *p = a.params + start, *grads = a.grads + start;
        real *m = a.m + start, *v = a.v + start;
#pragma omp simd
        for (size_t i = 0; i < n; i++) {
            real g = k.gradient * grads[i];
            m[i] = c.beta1 * m[i] + c.beta1_rest * g;
            v[i] = c.beta2 * v[i] + c.beta2_rest * (g * g);
            u[i] = lamb_direction(p[i], m[i], v[i], decay, &k, &c);
        }
        b->sum_sq_p += lamb_sum_sq(p, n);
        b->sum_sq_u += lamb_sum_sq(u, n);
    }
}

static inline void lamb_apply_block(const LambBlock* b, AdamWState a, real decay, real length,
                                    const AdamWCoefficients* coefficients) {
    AdamWStep k = *a.step;
    AdamWCoefficients c = *coefficients;
    real* p = a.params + b->begin;
    const real *m = a.m + b->begin, *v = a.v + b->begin;
#pragma omp simd
    for (size_t i = 0; i < b->count; i++) p[i] -= length * lamb_direction(p[i], m[i], v[i], decay, &k, &c);
}

// Divide the spans into blocks. Returns shared scratch: the blocks [blocks], followed by [2 * count] sums of squares.
static inline LambBlock* lamb_cut(LambSpans l, Context* ctx) {
    const ParamSpan* spans = l.spans;
    LambBlock* block =
        (LambBlock*)device_scratch(ctx, (size_t)l.blocks * sizeof *block + 2 * (size_t)l.count * sizeof(double));
    for (int s = 0; s < l.count; s++) {
        CHECK(spans[s].offset + spans[s].size <= l.elements);
        for (int b = 0; b < lamb_blocks(spans[s].size); b++) {
            LambBlock* to = &block[spans[s].blocks + b];
            size_t start = (size_t)b * LAMB_BLOCK;
            to->begin = spans[s].offset + start;
            to->count = min_size(LAMB_BLOCK, spans[s].size - start);
            to->span = s;
        }
    }
    return block;
}

// Update the moments, and write the sums of squares of p and u over span s to sums[2 * s] and sums[2 * s + 1].
static inline void lamb_run_moments(double* sums, LambBlock* block, AdamWState a, LambSpans l, OptimizerSettings h) {
    const ParamSpan* spans = l.spans;
    AdamWCoefficients c = adamw_coefficients(h);
#pragma omp parallel for schedule(static)
    for (int b = 0; b < l.blocks; b++)
        lamb_moments_block(&block[b], a, (real)(h.weight_decay * spans[block[b].span].decay), &c);
    for (int s = 0; s < l.count; s++) {
        sums[2 * s] = sums[2 * s + 1] = 0;
        for (int b = 0; b < lamb_blocks(spans[s].size); b++) {
            sums[2 * s] += block[spans[s].blocks + b].sum_sq_p;
            sums[2 * s + 1] += block[spans[s].blocks + b].sum_sq_u;
        }
    }
}

static inline void lamb_run_apply(const double* sums, const LambBlock* block, AdamWState a, LambSpans l,
                                  OptimizerSettings h) {
    const ParamSpan* spans = l.spans;
    AdamWCoefficients c = adamw_coefficients(h);
#pragma omp parallel for schedule(static)
    for (int b = 0; b < l.blocks; b++) {
        int s = block[b].span;
        real ratio = lamb_ratio(spans[s].trust, sums[2 * s], sums[2 * s + 1]);
        lamb_apply_block(&block[b], a, (real)(h.weight_decay * spans[s].decay), (real)(h.lr * ratio), &c);
    }
}

#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers

// Scratch of an update, in bytes.
static inline size_t lamb_scratch_bytes(const ParamSpan* spans, int count) {
    size_t blocks = 0;
    for (int s = 0; s < count; s++) blocks += (size_t)lamb_blocks(spans[s].size);
    return blocks * sizeof(LambBlock) + (size_t)count * sizeof(real);
}

static inline void lamb_check_state(AdamWState a, size_t elements) {
#ifdef __CUDACC__
    CHECK(elements % ADAMW_VECTOR == 0 && a.first % ADAMW_VECTOR == 0 && (ADAMW_NARROW || !a.master));
#else
    (void)elements;
    CHECK(!a.master);
#endif
}

static inline void lamb_update(AdamWState a, LambSpans of, OptimizerSettings h, Context* ctx) {
    lamb_check_state(a, of.elements);
    CHECK(of.count > 0);
    Scope scope = scope_open(ctx, "lamb_update", LAMB_UPDATE_FLOPS(of.elements),
                             LAMB_UPDATE_BYTES(of.elements, a.master != NULL), "n=%zu", of.elements);
#ifdef __CUDACC__
    LambLaunch l = lamb_launch(of, h, ctx);
    lamb_run_moments(a, &l, NULL, ctx);
    lamb_run_apply(a, &l, ctx);
#else
    if (a.step->is_taken) {
        LambBlock* block = lamb_cut(of, ctx);
        double* sums = (double*)(block + of.blocks);
        lamb_run_moments(sums, block, a, of, h);
        lamb_run_apply(sums, block, a, of, h);
    }
#endif
    scope_close(&scope);
}

// The first half of the update of a shard. sum_sq: [2 * tensors] in device memory.
static inline void lamb_moments(double* sum_sq, int tensors, AdamWState a, LambSpans of, OptimizerSettings h,
                                Context* ctx) {
    lamb_check_state(a, of.elements);
    Scope scope = scope_open(ctx, "lamb_moments", LAMB_MOMENTS_FLOPS(of.elements),
                             LAMB_MOMENTS_BYTES(of.elements, a.master != NULL), "n=%zu", of.elements);
#ifdef __CUDACC__
    static_assert(sizeof(LambSumSq) == 2 * sizeof(double), "two sums for each tensor");
    cudaCheck(cudaMemsetAsync(sum_sq, 0, (size_t)tensors * sizeof(LambSumSq), ctx->stream));
    if (of.count > 0) {
        LambLaunch l = lamb_launch(of, h, ctx);
        lamb_run_moments(a, &l, (LambSumSq*)sum_sq, ctx);
    }
#else
    memset(sum_sq, 0, 2 * (size_t)tensors * sizeof *sum_sq);
    if (of.count > 0 && a.step->is_taken) {
        LambBlock* block = lamb_cut(of, ctx);
        double* sums = (double*)(block + of.blocks);
        lamb_run_moments(sums, block, a, of, h);
        for (int s = 0; s < of.count; s++) {
            CHECK(of.spans[s].tensor < tensors);
            memcpy(sum_sq + 2 * of.spans[s].tensor, sums + 2 * s, 2 * sizeof *sums);
        }
    }
#endif
    scope_close(&scope);
}

// The second half of the update of the same shard, after lamb_moments(). sum_sq: summed over the ranks.
static inline void lamb_apply(AdamWState a, const double* sum_sq, LambSpans of, OptimizerSettings h, Context* ctx) {
    lamb_check_state(a, of.elements);
    if (!of.count) return;
    Scope scope = scope_open(ctx, "lamb_apply", LAMB_APPLY_FLOPS(of.elements),
                             LAMB_APPLY_BYTES(of.elements, a.master != NULL), "n=%zu", of.elements);
#ifdef __CUDACC__
    LambLaunch l = lamb_launch(of, h, ctx);
    lamb_ratios_kernel<<<blocks_for((size_t)of.count, ADAMW_THREADS), ADAMW_THREADS, 0, ctx->stream>>>(
        l.ratio, (const LambSumSq*)sum_sq, of.spans, of.count);
    cudaCheck(cudaGetLastError());
    lamb_run_apply(a, &l, ctx);
#else
    if (a.step->is_taken) {
        LambBlock* block = lamb_cut(of, ctx);
        double* sums = (double*)(block + of.blocks);
        for (int s = 0; s < of.count; s++) memcpy(sums + 2 * s, sum_sq + 2 * of.spans[s].tensor, 2 * sizeof *sums);
        lamb_run_apply(sums, block, a, of, h);
    }
#endif
    scope_close(&scope);
}

#endif
