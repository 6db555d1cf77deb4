/* AdamW: the optimizer's update of every parameter, with built-in gradient clipping.
 *
 *   g = grads * min(1, max_norm / norm) / scale                   norm of grads / scale;  max_norm 0: no clipping
 *   p = p * (1 - lr * weight_decay * decay)                       decay: 1 or 0, by span; lr: times the span's rate
 *   m = beta1 * m + (1 - beta1) * g
 *   v = beta2 * v + (1 - beta2) * g * g
 *   p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)          t: the number of this update
 *
 *   update     params (and master), m, v [flat buffer] in place, from grads [same layout] and step [1]. step holds the
 *              values that all elements share. adamw_step() computes it on the device after the norm (global_norm.h).
 *
 * spans      the ranges of the flat buffer that are parameters. Gaps between them are not touched. A shard passes its
 *            own spans (ops/common/adam.h), and its elements get the same bits as in the whole buffer. To ensure this,
 *            GPU code writes every FMA explicitly: the compiler might contract two copies of a loop differently.
 * dtypes     params floatX; master, m, v, grads and step real; the step is computed in double.
 * numerics   elementwise in real, one pass, memory-bound. If floatX is narrower than real, the master copy is updated
 *            and params is the master rounded to nearest. Without a master, the updated value is rounded stochastically
 *            to params (base/rounding.h). The random bits depend only on h.rounding and the element's position in the
 *            flat buffer, so all ranks and launches draw the same bits.
 * cautious   weight decay only where the step and the parameter have the same sign, or one of them is 0:
 *            arXiv 2510.12402.
 * NaN        if the norm is not finite, nothing is updated. The trainer reads the norm later and applies --on-nan.
 * source     Loshchilov and Hutter, arXiv 1711.05101, in the form of torch.optim.AdamW. */
#ifndef LLMC_OPS_ADAMW_H
#define LLMC_OPS_ADAMW_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/adam.h"

#define ADAMW_BLOCK 16384

#define ADAMW_UPDATE_FLOPS(n) (15.0 * (double)(n))
// Reads grads, m, v and the parameters, writes all but grads. `master`: the number of full-precision copies, 0 or 1.
#define ADAMW_UPDATE_BYTES(n, master)                                                                                  \
    ((double)(n) * ((5.0 + 2.0 * (master)) * sizeof(real) + (2.0 - (master)) * sizeof(floatX)))

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void adamw_update_ref(AdamWRefState a, double norm, double scale, int64_t update, const ParamSpan* spans,
                                    int count, OptimizerSettings h) {
    real *params = a.params, *m = a.m, *v = a.v;
    const real* grads = a.grads;
    if (!isfinite(norm)) return;
    double clip = h.max_norm > 0 && norm > h.max_norm ? h.max_norm / norm : 1;
    for (int s = 0; s < count; s++)
        for (size_t i = spans[s].offset; i < spans[s].offset + spans[s].size; i++) {
            double g = clip * grads[i] / scale, lr = h.lr * spans[s].rate;
            double mi = h.beta1 * m[i] + (1 - h.beta1) * g;
            double vi = h.beta2 * v[i] + (1 - h.beta2) * g * g;
            double mean = mi / (1 - pow(h.beta1, (double)update));
            double root = sqrt(vi) / sqrt(1 - pow(h.beta2, (double)update));
            int decays = !h.cautious || mean * params[i] >= 0;
            double kept = params[i] * (1 - lr * h.weight_decay * spans[s].decay * decays);
            params[i] = (real)(kept - lr * mean / (root + h.eps));
            m[i] = (real)mi;
            v[i] = (real)vi;
        }
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: each thread updates four adjacent elements of the flat buffers.

// `rate` and `shrink` belong to the element's span.
__device__ inline void adamw_element(real* p, real* m, real* v, real gradient, real rate, real shrink,
                                     const AdamWStep* step, const AdamWCoefficients* c) {
    real g = step->gradient * gradient;
    *m = fmaf(c->beta1, *m, c->beta1_rest * g);
    *v = fmaf(c->beta2_rest, g * g, c->beta2 * *v);
    if (c->cautious && *m * *p < 0) shrink = 1;
    *p = __fmul_rn(*p, shrink) - step->step_size * rate * *m / fmaf(step->root_scale, sqrtf(*v), c->eps);
}

__device__ inline real adamw_shrink(ParamSpan span, real decay_rate) {
    return fmaf(-decay_rate * span.rate, span.decay, 1);
}

// The last span that begins at or before element i; the first span if there is none.
__device__ inline int adamw_span_at(const ParamSpan* spans, int count, size_t i) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (spans[middle].offset <= i) low = middle;
        else high = middle;
    }
    return low;
}

// Each block updates ADAMW_THREADS * ADAMW_VECTOR adjacent elements. Most blocks lie within one span. In the other
// blocks, each element looks up its span, and elements between spans are not stored.
// HAS_GAPS: blocks that lie between two spans read nothing but the spans.
template <int STORAGE, bool HAS_GAPS>
__global__ void __launch_bounds__(ADAMW_THREADS, STORAGE == ADAMW_ROUNDED ? 4 : 0)  // else it spills on sm_100
    adamw_update_kernel(AdamWState a, size_t elements, const ParamSpan* spans, int count, AdamWCoefficients c,
                        real decay_rate, uint64_t rounding) {
    const size_t BLOCK = ADAMW_THREADS * ADAMW_VECTOR;
    size_t first = blockIdx.x * BLOCK, i = first + ADAMW_VECTOR * threadIdx.x;
    if (i >= elements) return;
    if constexpr (HAS_GAPS) {
        int at = adamw_span_at(spans, count, first);
        int ends_before =
            spans[at].offset + spans[at].size <= first && (at + 1 == count || spans[at + 1].offset >= first + BLOCK);
        if (ends_before || spans[at].offset >= first + BLOCK) return;
    }
    Vector<real> g = load128_streaming(a.grads + i), m = load128(a.m + i), v = load128(a.v + i);
    Vector<real> p = adamw_load<STORAGE>(a, i);
    AdamWStep step = adamw_load_step(a);
    if (!step.is_taken) return;

    int s = adamw_span_at(spans, count, first);
    ParamSpan span = spans[s];
    if (span.offset <= first && first + BLOCK <= span.offset + span.size) {
        real shrink = adamw_shrink(span, decay_rate);
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++)
            adamw_element(&p.v[k], &m.v[k], &v.v[k], g.v[k], span.rate, shrink, &step, &c);
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
        adamw_element(&p.v[k], &m.v[k], &v.v[k], g.v[k], span.rate, adamw_shrink(span, decay_rate), &step, &c);
        a.m[i + k] = m.v[k];
        a.v[i + k] = v.v[k];
        adamw_store_one<STORAGE>(a, i, k, p.v[k], rounding);
    }
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU

// Update one block. `rate` is its span's, `shrink` is 1 - lr * rate * weight_decay * decay. The square root vectorizes
// only with -fno-math-errno (set in the Makefile; it changes no result). Without this flag the loop takes twice as
// long.
static inline void adamw_block(AdamWState a, size_t begin, size_t n, real rate, real shrink,
                               const AdamWCoefficients* coefficients) {
    AdamWStep k = *a.step;
    AdamWCoefficients c = *coefficients;
    real *params = a.params + begin, *m = a.m + begin, *v = a.v + begin, unchanged = c.cautious ? 1 : shrink;
    const real* grads = a.grads + begin;
    k.step_size *= rate;
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        real g = k.gradient * grads[i];
        real mi = c.beta1 * m[i] + c.beta1_rest * g;
        real vi = c.beta2 * v[i] + c.beta2_rest * (g * g);
        real root = k.root_scale * (sizeof(real) == sizeof(float) ? (real)sqrtf((float)vi) : (real)sqrt(vi));
        params[i] = params[i] * (mi * params[i] < 0 ? unchanged : shrink) - k.step_size * mi / (root + c.eps);
        m[i] = mi;
        v[i] = vi;
    }
}

#endif

// `spans` are on the device, in ascending order, without overlaps. `elements` is the size of the flat buffers or of the
// shard. Without spans, nothing is done.
static inline void adamw_update(AdamWState a, size_t elements, const ParamSpan* spans, int count, OptimizerSettings h,
                                Context* ctx) {
    size_t n = a.updated ? a.updated : elements;
    if (!count) return;
    Scope scope =
        scope_open(ctx, "adamw_update", ADAMW_UPDATE_FLOPS(n), ADAMW_UPDATE_BYTES(n, a.master != NULL), "n=%zu", n);
#ifdef __CUDACC__
    CHECK(elements % ADAMW_VECTOR == 0 && a.first % ADAMW_VECTOR == 0 && (ADAMW_NARROW || !a.master));
    auto kernel =
        a.master ? adamw_update_kernel<ADAMW_WITH_MASTER, false> : adamw_update_kernel<ADAMW_NO_MASTER, false>;
    if (a.updated)
        kernel = a.master ? adamw_update_kernel<ADAMW_WITH_MASTER, true> : adamw_update_kernel<ADAMW_NO_MASTER, true>;
    kernel<<<blocks_for(elements, ADAMW_THREADS * ADAMW_VECTOR), ADAMW_THREADS, 0, ctx->stream>>>(
        a, elements, spans, count, adamw_coefficients(h), (real)(h.lr * h.weight_decay), h.rounding);
    cudaCheck(cudaGetLastError());
#else
    AdamWCoefficients c = adamw_coefficients(h);
    size_t blocks = 0, filled = 0;
    CHECK(!a.master);
    for (int s = 0; s < count; s++) {
        CHECK(spans[s].offset + spans[s].size <= elements);
        blocks += (spans[s].size + ADAMW_BLOCK - 1) / ADAMW_BLOCK;
    }
    // Span sizes differ by five orders of magnitude. Split them into equal blocks to balance the threads.
    ParamSpan* block = (ParamSpan*)device_scratch(ctx, blocks * sizeof *block);
    for (int s = 0; s < count; s++)
        for (size_t start = 0; start < spans[s].size; start += ADAMW_BLOCK) {
            block[filled].offset = spans[s].offset + start;
            block[filled].size = min_size(ADAMW_BLOCK, spans[s].size - start);
            block[filled].rate = spans[s].rate;
            block[filled++].decay = spans[s].decay;
        }
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < blocks; b++) {
        if (!a.step->is_taken) continue;
        real shrink = (real)(1 - h.lr * block[b].rate * h.weight_decay * block[b].decay);
        adamw_block(a, block[b].offset, block[b].size, block[b].rate, shrink, &c);
    }
#endif
    scope_close(&scope);
}

#endif
