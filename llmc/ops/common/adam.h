/* Code shared by the optimizers: Adam's two moments, the flat buffers of a model, the per-step values that depend on
 * the gradient norm, and how parameters are stored.
 *
 * If floatX is narrower than real, a master copy may hold the full-precision parameters. Without a master copy, the sum
 * of parameter and update is rounded stochastically (base/rounding.h). The random bits depend only on a key and the
 * element's position in the flat buffer.
 *
 * A rank may own a shard of the flat buffers: elements [begin, begin + n), where begin and n are multiples of 128. The
 * launchers then get pointers to the start of the shard, and the spans from adam_clip_spans(). n may be 0. A shard
 * boundary may lie anywhere within a tensor.
 *
 * Source: Kingma and Ba, arXiv 1412.6980. */
#ifndef LLMC_OPS_COMMON_ADAM_H
#define LLMC_OPS_COMMON_ADAM_H

#include "llmc/base/rng.h"
#include "llmc/base/rounding.h"
#include "llmc/device/device.h"
#include "llmc/ops/common/loss_scale.h"
#include "llmc/ops/common/outliers.h"
#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif

// A range of the flat buffers.
typedef struct {
    size_t offset, size;
    float decay;  // 1: weight decay applies, 0: it does not
    float trust;  // LAMB: 1: the trust ratio scales its step, 0: it does not
    float rate;   // AdamW: factor on the learning rate
    int blocks;   // LAMB: number of blocks in the spans before it
    int tensor;   // LAMB, on a shard: its index among the spans of the whole model
} ParamSpan;

// Clip a model's spans to a shard of n elements from `begin` on. The clipped spans have offsets in the shard and the
// index of their original span. Returns their number, at most `count`.
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

// muon/muon.h
typedef struct {
    double momentum;
    int is_normuon;
} MuonSettings;

// Settings of all optimizers.
typedef struct {
    double lr, beta1, beta2, eps, weight_decay, max_norm;
    uint64_t rounding;  // key of the random bits: rng_stream(seed, step, 0, SITE_ROUNDING)
    int cautious;       // AdamW, Muon: weight decay only where the update brings the parameter closer to zero
    MuonSettings muon;
} OptimizerSettings;

// ---------------------------------------------------------------------------------------------------------
// Values that all elements of a step share

// Values that the host knows at launch.
typedef struct {
    real beta1, beta1_rest, beta2, beta2_rest, eps;
    int cautious;
} AdamWCoefficients;

// Values that the device computes from the norm. 16 bytes on the GPU: one load.
typedef struct {
    real gradient;  // factor on the gradients
    real step_size, root_scale;
    int is_taken;  // 0: the step is skipped
} AdamWStep;

// The flat buffers of a model or of a shard, all with the same layout, and the step that the device computes from the
// norm.
typedef struct {
    floatX* params;
    real* master;  // the parameters in full precision; NULL: no copy is kept, or floatX is real
    real *m, *v;
    const real* grads;
    const AdamWStep* step;  // [1]
    size_t first;           // position of element 0 in the whole flat buffers, a multiple of 4
    size_t updated;         // AdamW: elements in spans, if there are long gaps between spans; 0: gaps are short
} AdamWState;

// The same in full precision, for the references.
typedef struct {
    real *params, *m, *v;
    const real* grads;
} AdamWRefState;

static inline AdamWCoefficients adamw_coefficients(OptimizerSettings h) {
    AdamWCoefficients c = {.beta1 = (real)h.beta1,
                           .beta1_rest = (real)(1 - h.beta1),
                           .beta2 = (real)h.beta2,
                           .beta2_rest = (real)(1 - h.beta2),
                           .eps = (real)h.eps,
                           .cautious = h.cautious};
    return c;
}

// `norm` is the norm of grads / scale. `update` is the number of this update, from 1; skipped steps do not count.
HOST_DEVICE static inline AdamWStep adamw_step(double norm, double scale, int64_t update, OptimizerSettings h) {
    double t = (double)update;
    AdamWStep step;
    step.gradient = (real)((h.max_norm > 0 && norm > h.max_norm ? h.max_norm / norm : 1) / scale);
    step.step_size = (real)(h.lr / (1 - pow(h.beta1, t)));
    step.root_scale = (real)(1 / sqrt(1 - pow(h.beta2, t)));
    step.is_taken = isfinite(norm) != 0;
    return step;
}

// LAMB multiplies by lr at the end, so its step size does not include lr.
static inline OptimizerSettings lamb_without_lr(OptimizerSettings h) {
    h.lr = 1;
    return h;
}

// The inputs and outputs of after_norm(). All pointers are on the device.
typedef struct {
    LossScale* loss_scale;  // updated
    AdamWStep* step;        // [1] aligned to 16 bytes
    LossScaleRule rule;
    OptimizerSettings settings;
    Outliers* outliers;  // updated; NULL: no outlier detection
    OutlierLimits limits;
    const real* losses[OUTLIER_LOSSES];  // [1] each; their sum is the step's loss; NULL: none
} AfterNorm;

// On entry, `norm` is the norm of the scaled gradients. It is divided by the loss scale.
HOST_DEVICE static inline void after_norm(AfterNorm a, real* norm) {
    loss_scale_update(a.loss_scale, norm, a.rule);
    *a.step = adamw_step((double)*norm, (double)a.loss_scale->applied, a.loss_scale->updates, a.settings);
    if (!a.outliers) return;
    double loss = 0;
    for (int i = 0; i < OUTLIER_LOSSES; i++) loss += a.losses[i] ? (double)*a.losses[i] : 0;
    if (!outliers_judge(a.outliers, a.limits, loss, (double)*norm) || !a.step->is_taken) return;
    a.step->is_taken = 0;
    a.loss_scale->updates--;  // skipped updates do not count
}

// Random bits for rounding the four adjacent elements 4 * group .. 4 * group + 3 of the flat buffer.
HOST_DEVICE static inline Philox adamw_bits(uint64_t key, size_t group) {
    return philox((uint32_t)group, (uint32_t)((uint64_t)group >> 32), 0, 0, key);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: each thread updates four adjacent elements of the flat buffers

enum { ADAMW_THREADS = 256, ADAMW_VECTOR = 4, ADAMW_NARROW = sizeof(floatX) < sizeof(real) };
// Where the full-precision parameters are: in params itself, in master, or nowhere.
enum { ADAMW_EXACT, ADAMW_MASTER, ADAMW_ROUNDED };
// With a master and without; in fp32 there is none.
enum {
    ADAMW_WITH_MASTER = ADAMW_NARROW ? ADAMW_MASTER : ADAMW_EXACT,
    ADAMW_NO_MASTER = ADAMW_NARROW ? ADAMW_ROUNDED : ADAMW_EXACT
};

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

// Store only element i + k.
template <int STORAGE>
__device__ inline void adamw_store_one(AdamWState a, size_t i, int k, real p, uint64_t rounding) {
    if constexpr (STORAGE == ADAMW_MASTER) a.master[i + k] = p;
    if constexpr (STORAGE == ADAMW_ROUNDED)
        adamw_round(&a.params[i + k], p, adamw_bits(rounding, (a.first + i) / ADAMW_VECTOR).v[k]);
    else a.params[i + k] = from_float<floatX>(p);
}

#endif
#endif
