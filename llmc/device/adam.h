/* What the optimizers share: Adam's two moments, the flat buffers of a model, the numbers that are the same for all
 * elements of a step and follow from the gradients' norm, and how parameters are stored.
 *
 * Where floatX is narrower than real, the exact parameters are in a master copy, or nowhere: then the sum of parameter
 * and update is rounded stochastically (base/rounding.h), with random bits that depend on a key and the element's place
 * in the flat buffer alone.
 *
 * A rank may own a shard of the flat buffers, elements [begin, begin + n) with both on 128 elements: the launchers then
 * take pointers that begin there, and the spans that adam_clip_spans() leaves. n may be 0; tensors may be cut anywhere.
 *
 * Source: Kingma and Ba, arXiv 1412.6980. */
#ifndef LLMC_ADAM_H
#define LLMC_ADAM_H

#include "../base/rng.h"
#include "../base/rounding.h"
#include "device.h"
#include "loss_scale.h"
#include "outliers.h"
#ifdef __CUDACC__
#include "device.cuh"
#endif

// A piece of the flat buffers.
typedef struct {
    size_t offset, size;
    float decay;  // 1: weight decay applies, 0: it does not
    float trust;  // LAMB: 1: its step is scaled by its norm, 0: it is not
    int blocks;   // LAMB: blocks of the spans before it
    int tensor;   // LAMB, on a shard: its number among the spans of the whole model
} ParamSpan;

// The parts of a model's spans that lie in a shard of n elements from `begin` on, with offsets in the shard and the
// numbers of the spans that they are parts of. Returns how many there are, `count` at most.
static inline int adam_clip_spans(ParamSpan* clipped, const ParamSpan* spans, int count, size_t begin, size_t n) {
    int left = 0;
    for (int s = 0; s < count; s++) {
        size_t from = spans[s].offset > begin ? spans[s].offset : begin;
        size_t to = min_size(spans[s].offset + spans[s].size, begin + n);
        if (from >= to) continue;
        clipped[left] = spans[s];
        clipped[left].offset = from - begin;
        clipped[left].size = to - from;
        clipped[left++].tensor = s;
    }
    return left;
}

// Of all kinds.
typedef struct {
    double lr, beta1, beta2, eps, weight_decay, max_norm;
    uint64_t rounding;  // key of the random bits: rng_stream(seed, step, 0, SITE_ROUNDING)
} OptimizerSettings;

// ---------------------------------------------------------------------------------------------------------
// What is the same for every element of a step

// Known to the host when it launches.
typedef struct {
    real beta1, beta1_rest, beta2, beta2_rest, eps;
} AdamWCoefficients;

// Known where the ops run, once the norm is. 16 bytes on the GPU: one load.
typedef struct {
    real gradient;  // what gradients are multiplied by
    real step_size, root_scale;
    int is_taken;  // 0: the step is left out
} AdamWStep;

// The flat buffers of a model or a shard of them, all of the same layout, and what the norm has left on the device.
typedef struct {
    floatX* params;
    real* master;  // the parameters in full precision; NULL: there are none, or floatX is real
    real *m, *v;
    const real* grads;
    const AdamWStep* step;  // [1]
    size_t first;           // the place of element 0 in the whole flat buffers, a multiple of 4
} AdamWState;

static inline AdamWCoefficients adamw_coefficients(OptimizerSettings h) {
    AdamWCoefficients c = {(real)h.beta1, (real)(1 - h.beta1), (real)h.beta2, (real)(1 - h.beta2), (real)h.eps};
    return c;
}

// From the norm of grads / scale, and the number of this update from 1: steps that were left out do not count.
HOST_DEVICE static inline AdamWStep adamw_step(double norm, double scale, int64_t update, OptimizerSettings h) {
    double t = (double)update;
    AdamWStep step;
    step.gradient = (real)((h.max_norm > 0 && norm > h.max_norm ? h.max_norm / norm : 1) / scale);
    step.step_size = (real)(h.lr / (1 - pow(h.beta1, t)));
    step.root_scale = (real)(1 / sqrt(1 - pow(h.beta2, t)));
    step.is_taken = isfinite(norm) != 0;
    return step;
}

// LAMB multiplies by lr at last: its step size is without.
static inline OptimizerSettings lamb_without_lr(OptimizerSettings h) {
    h.lr = 1;
    return h;
}

// What becomes known with the norm of a step's gradients, and what that takes. All pointers lie where the ops run.
typedef struct {
    LossScale* loss_scale;  // moves
    AdamWStep* step;        // [1] on 16 bytes
    LossScaleRule rule;
    OptimizerSettings settings;
    Outliers* outliers;  // moves; NULL: nothing is judged
    OutlierLimits limits;
    const real* losses[OUTLIER_LOSSES];  // [1] each, whose sum is the step's loss; NULL: none
} AfterNorm;

// The norm is that of gradients that carry the loss scale; it is divided out.
HOST_DEVICE static inline void after_norm(AfterNorm a, real* norm) {
    loss_scale_update(a.loss_scale, norm, a.rule);
    *a.step = adamw_step((double)*norm, (double)a.loss_scale->applied, a.loss_scale->updates, a.settings);
    if (!a.outliers) return;
    double loss = 0;
    for (int i = 0; i < OUTLIER_LOSSES; i++) loss += a.losses[i] ? (double)*a.losses[i] : 0;
    if (!outliers_judge(a.outliers, a.limits, loss, (double)*norm) || !a.step->is_taken) return;
    a.step->is_taken = 0;
    a.loss_scale->updates--;  // the optimizer's count is of the updates that were made
}

// Random bits for the rounding of the four neighbouring elements 4 * group .. 4 * group + 3 of the flat buffer.
HOST_DEVICE static inline Philox adamw_bits(uint64_t key, size_t group) {
    return philox((uint32_t)group, (uint32_t)((uint64_t)group >> 32), 0, 0, key);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: a thread takes four neighbours of the flat buffers

enum { ADAMW_THREADS = 256, ADAMW_VECTOR = 4, ADAMW_NARROW = sizeof(floatX) < sizeof(real) };
// Where the exact parameters are: in params itself, in master, nowhere.
enum { ADAMW_EXACT, ADAMW_MASTER, ADAMW_ROUNDED };

__device__ inline AdamWStep adamw_load_step(AdamWState a) {
    static_assert(sizeof(AdamWStep) == sizeof(int4), "one load");
    AdamWStep step;
    *(int4*)&step = *(const int4*)a.step;
    return step;
}

__device__ inline void adamw_round(__nv_bfloat16* p, float x, uint32_t random) {
    *p = __ushort_as_bfloat16(round_randomly_to_bf16(x, random));
}
__device__ inline void adamw_round(__half* p, float x, uint32_t random) {
    *p = __ushort_as_half(round_randomly_to_fp16(x, random));
}
__device__ inline void adamw_round(float* p, float x, uint32_t) { *p = x; }

// The four parameters from element i on.
template <int STORAGE> __device__ inline Vector<real> adamw_load(AdamWState a, size_t i) {
    Vector<real> p;
    if constexpr (STORAGE == ADAMW_EXACT) return load128((const real*)a.params + i);
    if constexpr (STORAGE == ADAMW_MASTER) return load128(a.master + i);
    Vector<floatX, ADAMW_VECTOR> narrow;
    *(int2*)&narrow = *(const int2*)(a.params + i);
    to_floats(p.v, narrow);
    return p;
}

template <int STORAGE> __device__ inline void adamw_store(AdamWState a, size_t i, Vector<real> p, uint64_t rounding) {
    if constexpr (STORAGE == ADAMW_EXACT) {
        store128((real*)a.params + i, p);
        return;
    }
    Vector<floatX, ADAMW_VECTOR> narrow;
    if constexpr (STORAGE == ADAMW_MASTER) {
        store128(a.master + i, p);
        narrow = from_floats<floatX, ADAMW_VECTOR>(p.v);
    } else {
        Philox random = adamw_bits(rounding, (a.first + i) / ADAMW_VECTOR);
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++) adamw_round(&narrow.v[k], p.v[k], random.v[k]);
    }
    *(int2*)(a.params + i) = *(const int2*)&narrow;
}

// Element i + k alone.
template <int STORAGE>
__device__ inline void adamw_store_one(AdamWState a, size_t i, int k, real p, uint64_t rounding) {
    if constexpr (STORAGE == ADAMW_MASTER) a.master[i + k] = p;
    if constexpr (STORAGE == ADAMW_ROUNDED)
        adamw_round(&a.params[i + k], p, adamw_bits(rounding, (a.first + i) / ADAMW_VECTOR).v[k]);
    else a.params[i + k] = from_float<floatX>(p);
}

#endif
#endif
