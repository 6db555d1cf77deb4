/* lamb.h on the CPU: threads share blocks of LAMB_BLOCK elements. */
#ifndef LLMC_LAMB_CPU_H
#define LLMC_LAMB_CPU_H

#include "llmc/lamb/lamb.h"

#ifndef __CUDACC__

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

static inline void lamb_update(AdamWState a, LambSpans l, OptimizerSettings h, Context* ctx) {
    CHECK(!a.master && l.count > 0);
    Scope scope = scope_open(ctx, "lamb_update", LAMB_UPDATE_FLOPS(l.elements), LAMB_UPDATE_BYTES(l.elements, 0),
                             "n=%zu", l.elements);
    if (a.step->is_taken) {
        LambBlock* block = lamb_cut(l, ctx);
        double* sums = (double*)(block + l.blocks);
        lamb_run_moments(sums, block, a, l, h);
        lamb_run_apply(sums, block, a, l, h);
    }
    scope_close(&scope);
}

// The first half of the update of a shard. sum_sq: [2 * tensors] in device memory.
static inline void lamb_moments(double* sum_sq, int tensors, AdamWState a, LambSpans l, OptimizerSettings h,
                                Context* ctx) {
    CHECK(!a.master);
    Scope scope = scope_open(ctx, "lamb_moments", LAMB_MOMENTS_FLOPS(l.elements), LAMB_MOMENTS_BYTES(l.elements, 0),
                             "n=%zu", l.elements);
    memset(sum_sq, 0, 2 * (size_t)tensors * sizeof *sum_sq);
    if (l.count > 0 && a.step->is_taken) {
        LambBlock* block = lamb_cut(l, ctx);
        double* sums = (double*)(block + l.blocks);
        lamb_run_moments(sums, block, a, l, h);
        for (int s = 0; s < l.count; s++) {
            CHECK(l.spans[s].tensor < tensors);
            memcpy(sum_sq + 2 * l.spans[s].tensor, sums + 2 * s, 2 * sizeof *sums);
        }
    }
    scope_close(&scope);
}

// The second half of the update of the same shard, after lamb_moments(). sum_sq: summed over the ranks.
static inline void lamb_apply(AdamWState a, const double* sum_sq, LambSpans l, OptimizerSettings h, Context* ctx) {
    CHECK(!a.master);
    if (!l.count) return;
    Scope scope = scope_open(ctx, "lamb_apply", LAMB_APPLY_FLOPS(l.elements), LAMB_APPLY_BYTES(l.elements, 0), "n=%zu",
                             l.elements);
    if (a.step->is_taken) {
        LambBlock* block = lamb_cut(l, ctx);
        double* sums = (double*)(block + l.blocks);
        for (int s = 0; s < l.count; s++) memcpy(sums + 2 * s, sum_sq + 2 * l.spans[s].tensor, 2 * sizeof *sums);
        lamb_run_apply(sums, block, a, l, h);
    }
    scope_close(&scope);
}

#endif
#endif
