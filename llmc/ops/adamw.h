/* AdamW: the optimizer's update of every parameter, with clipping of the gradient built in.
 *
 *   g = grads * min(1, max_norm / grad_norm)                      max_norm 0: g = grads
 *   p = p * (1 - lr * weight_decay * decay)                       decay: 1 or 0, by span
 *   m = beta1 * m + (1 - beta1) * g
 *   v = beta2 * v + (1 - beta2) * g * g
 *   p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
 *
 *   update     params (and master), m, v [flat buffer] in place, from grads [same layout] and grad_norm [1]
 *
 * spans      the pieces of the flat buffer that are parameters; what lies between them is not touched.
 * dtypes     params floatX; master, m, v, grads, grad_norm real; coefficients are worked out in double.
 * numerics   elementwise in real, one pass, bound by memory.
 * NaN        a gradient norm that is not finite updates nothing at all: the trainer's policy reads the norm later.
 * source     Loshchilov and Hutter, arXiv 1711.05101, in the form of torch.optim.AdamW. */
#ifndef LLMC_ADAMW_H
#define LLMC_ADAMW_H

#include "../device/scope.h"
#ifdef __CUDACC__
#include "../device/device.cuh"
#endif

typedef struct {
    size_t offset, size;
    float decay;  // 1: weight decay applies, 0: it does not
} ParamSpan;

// The flat buffers of a model, all of the same layout.
typedef struct {
    floatX* params;
    real* master;  // the parameters in full precision, of which params is the rounded copy; NULL where floatX is real
    real *m, *v;
    const real* grads;
    const real* grad_norm;  // [1]
} AdamWState;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, max_norm;
    int64_t step;  // counts from 1
} AdamW;

#define ADAMW_BLOCK 16384

#define ADAMW_UPDATE_FLOPS(n) (15.0 * (double)(n))
#define ADAMW_UPDATE_BYTES(n)                                                                                          \
    ((double)(n) * (sizeof(floatX) == sizeof(real) ? 7 * sizeof(real) : 7 * sizeof(real) + sizeof(floatX)))

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void adamw_update_ref(real* params, real* m, real* v, const real* grads, const real* grad_norm,
                                    const ParamSpan* spans, int count, AdamW h) {
    double norm = *grad_norm;
    if (!isfinite(norm)) return;
    double clip = h.max_norm > 0 && norm > h.max_norm ? h.max_norm / norm : 1;
    for (int s = 0; s < count; s++)
        for (size_t i = spans[s].offset; i < spans[s].offset + spans[s].size; i++) {
            double g = clip * grads[i], p = params[i] * (1 - h.lr * h.weight_decay * spans[s].decay);
            double mi = h.beta1 * m[i] + (1 - h.beta1) * g;
            double vi = h.beta2 * v[i] + (1 - h.beta2) * g * g;
            double mean = mi / (1 - pow(h.beta1, (double)h.step));
            double root = sqrt(vi) / sqrt(1 - pow(h.beta2, (double)h.step));
            params[i] = (real)(p - h.lr * mean / (root + h.eps));
            m[i] = (real)mi;
            v[i] = (real)vi;
        }
}

// ---------------------------------------------------------------------------------------------------------
// What is the same for every element of a step

typedef struct {
    real clip, beta1, beta1_rest, beta2, beta2_rest, step_size, root_scale, eps;
} AdamWCoefficients;

// All but the clipping, which needs the norm.
static inline AdamWCoefficients adamw_coefficients(AdamW h) {
    AdamWCoefficients c;
    c.clip = 1;
    c.beta1 = (real)h.beta1;
    c.beta1_rest = (real)(1 - h.beta1);
    c.beta2 = (real)h.beta2;
    c.beta2_rest = (real)(1 - h.beta2);
    c.step_size = (real)(h.lr / (1 - pow(h.beta1, (double)h.step)));
    c.root_scale = (real)(1 / sqrt(1 - pow(h.beta2, (double)h.step)));
    c.eps = (real)h.eps;
    return c;
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: one launch over the flat buffers, a thread takes four neighbours. Where floatX is narrow the master copy is
// updated, and its rounding stored beside it.

enum { ADAMW_THREADS = 256, ADAMW_VECTOR = 4, ADAMW_NARROW = sizeof(floatX) < sizeof(real) };

__device__ inline void adamw_element(real* p, real* m, real* v, real gradient, real shrink,
                                     const AdamWCoefficients* c) {
    real g = c->clip * gradient;
    *m = c->beta1 * *m + c->beta1_rest * g;
    *v = c->beta2 * *v + c->beta2_rest * (g * g);
    *p = *p * shrink - c->step_size * *m / (c->root_scale * sqrtf(*v) + c->eps);
}

// The last span that begins at or before element i, or the first span.
__device__ inline int adamw_span_at(const ParamSpan* spans, int count, size_t i) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (spans[middle].offset <= i) low = middle;
        else high = middle;
    }
    return low;
}

// Block: ADAMW_THREADS * ADAMW_VECTOR neighbours. Most blocks lie in one span; in the others each element looks for its
// own, and what lies between spans is not stored. c.clip is still to be worked out, from max_norm (0: no clipping).
__global__ void __launch_bounds__(ADAMW_THREADS)
    adamw_update_kernel(AdamWState a, size_t elements, const ParamSpan* spans, int count, AdamWCoefficients c,
                        real max_norm, real decay_rate) {
    const size_t BLOCK = ADAMW_THREADS * ADAMW_VECTOR;
    size_t first = blockIdx.x * BLOCK, i = first + ADAMW_VECTOR * threadIdx.x;
    if (i >= elements) return;
    real* exact = ADAMW_NARROW ? a.master : (real*)a.params;
    Vector<real> g = load128_streaming(a.grads + i), m = load128(a.m + i), v = load128(a.v + i), p = load128(exact + i);
    real norm = *a.grad_norm;
    if (!isfinite(norm)) return;
    c.clip = max_norm > 0 && norm > max_norm ? max_norm / norm : 1;

    int s = adamw_span_at(spans, count, first);
    ParamSpan span = spans[s];
    if (span.offset <= first && first + BLOCK <= span.offset + span.size) {
        real shrink = 1 - decay_rate * span.decay;
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++) adamw_element(&p.v[k], &m.v[k], &v.v[k], g.v[k], shrink, &c);
        store128(a.m + i, m);
        store128(a.v + i, v);
        store128(exact + i, p);
        if constexpr (ADAMW_NARROW) {
            Vector<floatX, ADAMW_VECTOR> rounded = from_floats<floatX, ADAMW_VECTOR>(p.v);
            *(int2*)(a.params + i) = *(const int2*)&rounded;
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < ADAMW_VECTOR; k++) {
        while (s + 1 < count && spans[s + 1].offset <= i + k) s++;
        span = spans[s];
        if (i + k < span.offset || i + k >= span.offset + span.size) continue;
        adamw_element(&p.v[k], &m.v[k], &v.v[k], g.v[k], 1 - decay_rate * span.decay, &c);
        a.m[i + k] = m.v[k];
        a.v[i + k] = v.v[k];
        exact[i + k] = p.v[k];
        if constexpr (ADAMW_NARROW) a.params[i + k] = from_float<floatX>(p.v[k]);
    }
}

// `spans` lie where the ops run, in order, without overlaps; `elements` are those of the flat buffers.
static inline void adamw_update(AdamWState a, size_t elements, const ParamSpan* spans, int count, AdamW h,
                                Context* ctx) {
    CHECK(h.step >= 1 && count > 0 && elements % ADAMW_VECTOR == 0 && ADAMW_NARROW == (a.master != NULL));
    Scope scope =
        scope_open(ctx, "adamw_update", ADAMW_UPDATE_FLOPS(elements), ADAMW_UPDATE_BYTES(elements), "n=%zu", elements);
    adamw_update_kernel<<<blocks_for(elements, ADAMW_THREADS * ADAMW_VECTOR), ADAMW_THREADS, 0, ctx->stream>>>(
        a, elements, spans, count, adamw_coefficients(h), (real)h.max_norm, (real)(h.lr * h.weight_decay));
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU

// One block; `shrink` is 1 - lr * weight_decay * decay. The square root becomes a vector instruction only with
// -fno-math-errno (the Makefile's flag; it changes no result): without it this loop takes twice as long.

static inline void adamw_block(real* params, real* m, real* v, const real* grads, size_t n, real shrink,
                               const AdamWCoefficients* k) {
    AdamWCoefficients c = *k;
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        real g = c.clip * grads[i];
        real mi = c.beta1 * m[i] + c.beta1_rest * g;
        real vi = c.beta2 * v[i] + c.beta2_rest * (g * g);
        real root = c.root_scale * (sizeof(real) == sizeof(float) ? (real)sqrtf((float)vi) : (real)sqrt(vi));
        params[i] = params[i] * shrink - c.step_size * mi / (root + c.eps);
        m[i] = mi;
        v[i] = vi;
    }
}

// `spans` lie where the ops run; `elements` are those of the flat buffers.
static inline void adamw_update(AdamWState a, size_t elements, const ParamSpan* spans, int count, AdamW h,
                                Context* ctx) {
    CHECK(h.step >= 1 && !a.master);
    size_t blocks = 0;
    for (int s = 0; s < count; s++) {
        CHECK(spans[s].offset + spans[s].size <= elements);
        blocks += (spans[s].size + ADAMW_BLOCK - 1) / ADAMW_BLOCK;
    }
    Scope scope =
        scope_open(ctx, "adamw_update", ADAMW_UPDATE_FLOPS(elements), ADAMW_UPDATE_BYTES(elements), "n=%zu", elements);
    double norm = *a.grad_norm;
    if (isfinite(norm)) {
        AdamWCoefficients c = adamw_coefficients(h);
        c.clip = (real)(h.max_norm > 0 && norm > h.max_norm ? h.max_norm / norm : 1);

        // Spans differ in size by five orders of magnitude: threads share equal blocks instead.
        ParamSpan* block = (ParamSpan*)device_scratch(ctx, blocks * sizeof *block);
        size_t filled = 0;
        for (int s = 0; s < count; s++)
            for (size_t start = 0; start < spans[s].size; start += ADAMW_BLOCK) {
                block[filled].offset = spans[s].offset + start;
                block[filled].size = min_size(ADAMW_BLOCK, spans[s].size - start);
                block[filled++].decay = spans[s].decay;
            }
#pragma omp parallel for schedule(static)
        for (size_t b = 0; b < blocks; b++) {
            size_t i = block[b].offset;
            real shrink = (real)(1 - h.lr * h.weight_decay * block[b].decay);
            adamw_block(a.params + i, a.m + i, a.v + i, a.grads + i, block[b].size, shrink, &c);
        }
    }
    scope_close(&scope);
}

#endif
#endif
