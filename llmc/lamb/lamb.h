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
#include "llmc/lamb/cpu.h"
#endif

#endif
