/* AdamW: the optimizer's update of every parameter, with clipping of the gradient built in.
 *
 *   g = grads * min(1, max_norm / norm) / scale                   norm of grads / scale;  max_norm 0: no clipping
 *   p = p * (1 - lr * weight_decay * decay)                       decay: 1 or 0, by span
 *   m = beta1 * m + (1 - beta1) * g
 *   v = beta2 * v + (1 - beta2) * g * g
 *   p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)          t: the number of this update
 *
 *   update     params (and master), m, v [flat buffer] in place, from grads [same layout] and step [1]: what is the same
 *              for all elements, as adamw_step() works it out where the ops run, once the norm is known (global_norm.h)
 *
 * spans      the pieces of the flat buffer that are parameters; what lies between them is not touched. A shard gives its
 *            own (device/adam.h), and its elements get the same bits as in the whole: on the GPU no FMA is left to the
 *            compiler, which might choose otherwise in another copy of a loop.
 * dtypes     params floatX; master, m, v, grads and step real; the step is worked out in double.
 * numerics   elementwise in real, one pass, bound by memory. Where floatX is narrower than real, the master copy is
 *            updated and params is its rounding to nearest; without a master, params itself is the sum, rounded
 *            stochastically (base/rounding.h) with random bits that depend on h.rounding and the element's place in the
 *            flat buffer alone: every rank and every launch draws the same.
 * NaN        a norm that is not finite updates nothing at all: the trainer's policy reads the norm later.
 * source     Loshchilov and Hutter, arXiv 1711.05101, in the form of torch.optim.AdamW. */
#ifndef LLMC_ADAMW_H
#define LLMC_ADAMW_H

#include "../device/adam.h"
#include "../device/scope.h"

#define ADAMW_BLOCK 16384

#define ADAMW_UPDATE_FLOPS(n) (15.0 * (double)(n))
// Read grads, m, v and the parameters, write all but grads; `master`: the number of copies in full precision, 0 or 1.
#define ADAMW_UPDATE_BYTES(n, master)                                                                                  \
    ((double)(n) * ((5.0 + 2.0 * (master)) * sizeof(real) + (2.0 - (master)) * sizeof(floatX)))

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void adamw_update_ref(real* params, real* m, real* v, const real* grads, double norm, double scale,
                                    int64_t update, const ParamSpan* spans, int count, OptimizerSettings h) {
    if (!isfinite(norm)) return;
    double clip = h.max_norm > 0 && norm > h.max_norm ? h.max_norm / norm : 1;
    for (int s = 0; s < count; s++)
        for (size_t i = spans[s].offset; i < spans[s].offset + spans[s].size; i++) {
            double g = clip * grads[i] / scale, p = params[i] * (1 - h.lr * h.weight_decay * spans[s].decay);
            double mi = h.beta1 * m[i] + (1 - h.beta1) * g;
            double vi = h.beta2 * v[i] + (1 - h.beta2) * g * g;
            double mean = mi / (1 - pow(h.beta1, (double)update));
            double root = sqrt(vi) / sqrt(1 - pow(h.beta2, (double)update));
            params[i] = (real)(p - h.lr * mean / (root + h.eps));
            m[i] = (real)mi;
            v[i] = (real)vi;
        }
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: a thread takes four neighbours of the flat buffers.

__device__ inline void adamw_element(real* p, real* m, real* v, real gradient, real shrink, const AdamWStep* step,
                                     const AdamWCoefficients* c) {
    real g = step->gradient * gradient;
    *m = fmaf(c->beta1, *m, c->beta1_rest * g);
    *v = fmaf(c->beta2_rest, g * g, c->beta2 * *v);
    *p = __fmul_rn(*p, shrink) - step->step_size * *m / fmaf(step->root_scale, sqrtf(*v), c->eps);
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
// own, and what lies between spans is not stored.
template <int STORAGE>
__global__ void __launch_bounds__(ADAMW_THREADS, STORAGE == ADAMW_ROUNDED ? 4 : 0)  // on sm_100 it spills otherwise
    adamw_update_kernel(AdamWState a, size_t elements, const ParamSpan* spans, int count, AdamWCoefficients c,
                        real decay_rate, uint64_t rounding) {
    const size_t BLOCK = ADAMW_THREADS * ADAMW_VECTOR;
    size_t first = blockIdx.x * BLOCK, i = first + ADAMW_VECTOR * threadIdx.x;
    if (i >= elements) return;
    Vector<real> g = load128_streaming(a.grads + i), m = load128(a.m + i), v = load128(a.v + i);
    Vector<real> p = adamw_load<STORAGE>(a, i);
    AdamWStep step = adamw_load_step(a);
    if (!step.is_taken) return;

    int s = adamw_span_at(spans, count, first);
    ParamSpan span = spans[s];
    if (span.offset <= first && first + BLOCK <= span.offset + span.size) {
        real shrink = fmaf(-decay_rate, span.decay, 1);
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++) adamw_element(&p.v[k], &m.v[k], &v.v[k], g.v[k], shrink, &step, &c);
        store128(a.m + i, m);
        store128(a.v + i, v);
        adamw_store<STORAGE>(a, i, p, rounding);
        return;
    }
#pragma unroll
    for (int k = 0; k < ADAMW_VECTOR; k++) {
        while (s + 1 < count && spans[s + 1].offset <= i + k) s++;
        span = spans[s];
        if (i + k < span.offset || i + k >= span.offset + span.size) continue;
        adamw_element(&p.v[k], &m.v[k], &v.v[k], g.v[k], fmaf(-decay_rate, span.decay, 1), &step, &c);
        a.m[i + k] = m.v[k];
        a.v[i + k] = v.v[k];
        adamw_store_one<STORAGE>(a, i, k, p.v[k], rounding);
    }
}

template <int STORAGE>
static inline void adamw_launch(AdamWState a, size_t elements, const ParamSpan* spans, int count, OptimizerSettings h,
                                Context* ctx) {
    adamw_update_kernel<STORAGE><<<blocks_for(elements, ADAMW_THREADS * ADAMW_VECTOR), ADAMW_THREADS, 0, ctx->stream>>>(
        a, elements, spans, count, adamw_coefficients(h), (real)(h.lr * h.weight_decay), h.rounding);
}

// `spans` lie where the ops run, in order, without overlaps; `elements` are those of the flat buffers or the shard. With
// no spans nothing is done.
static inline void adamw_update(AdamWState a, size_t elements, const ParamSpan* spans, int count, OptimizerSettings h,
                                Context* ctx) {
    CHECK(elements % ADAMW_VECTOR == 0 && a.first % ADAMW_VECTOR == 0 && (ADAMW_NARROW || !a.master));
    if (!count) return;
    Scope scope = scope_open(ctx, "adamw_update", ADAMW_UPDATE_FLOPS(elements),
                             ADAMW_UPDATE_BYTES(elements, a.master != NULL), "n=%zu", elements);
    if constexpr (!ADAMW_NARROW) adamw_launch<ADAMW_EXACT>(a, elements, spans, count, h, ctx);
    else if (a.master) adamw_launch<ADAMW_MASTER>(a, elements, spans, count, h, ctx);
    else adamw_launch<ADAMW_ROUNDED>(a, elements, spans, count, h, ctx);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU

// One block; `shrink` is 1 - lr * weight_decay * decay. The square root becomes a vector instruction only with
// -fno-math-errno (the Makefile's flag; it changes no result): without it this loop takes twice as long.

static inline void adamw_block(real* params, real* m, real* v, const real* grads, size_t n, real shrink,
                               const AdamWStep* step, const AdamWCoefficients* coefficients) {
    AdamWStep k = *step;
    AdamWCoefficients c = *coefficients;
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        real g = k.gradient * grads[i];
        real mi = c.beta1 * m[i] + c.beta1_rest * g;
        real vi = c.beta2 * v[i] + c.beta2_rest * (g * g);
        real root = k.root_scale * (sizeof(real) == sizeof(float) ? (real)sqrtf((float)vi) : (real)sqrt(vi));
        params[i] = params[i] * shrink - k.step_size * mi / (root + c.eps);
        m[i] = mi;
        v[i] = vi;
    }
}

// `spans` lie where the ops run; `elements` are those of the flat buffers or the shard. With no spans nothing is done.
static inline void adamw_update(AdamWState a, size_t elements, const ParamSpan* spans, int count, OptimizerSettings h,
                                Context* ctx) {
    CHECK(!a.master);
    if (!count) return;
    size_t blocks = 0;
    for (int s = 0; s < count; s++) {
        CHECK(spans[s].offset + spans[s].size <= elements);
        blocks += (spans[s].size + ADAMW_BLOCK - 1) / ADAMW_BLOCK;
    }
    Scope scope = scope_open(ctx, "adamw_update", ADAMW_UPDATE_FLOPS(elements), ADAMW_UPDATE_BYTES(elements, 0),
                             "n=%zu", elements);
    if (a.step->is_taken) {
        AdamWCoefficients c = adamw_coefficients(h);
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
            adamw_block(a.params + i, a.m + i, a.v + i, a.grads + i, block[b].size, shrink, a.step, &c);
        }
    }
    scope_close(&scope);
}

#endif
#endif
