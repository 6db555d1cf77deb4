/* LAMB: AdamW's direction, scaled tensor by tensor so that a step's length goes with the tensor's own.
 *
 *   g = grads * min(1, max_norm / norm) / scale                   norm of grads / scale;  max_norm 0: no clipping
 *   m = beta1 * m + (1 - beta1) * g
 *   v = beta2 * v + (1 - beta2) * g * g
 *   u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * decay * p      t: number of this update
 *   ratio = |p| / |u|, norms over the tensor, p before the update;  1 where either is 0 or `trust` is 0
 *   p = p - lr * ratio * u
 *
 *   update     params (and master), m, v [flat buffer] in place; the rest as for AdamW (adamw.h), but with a step that
 *              was worked out without lr: lamb_without_lr()
 *   moments    of a shard: m and v, and squares [2 * tensors]: for every tensor of the whole model the sums of p^2 and u^2
 *              over its elements in the shard, 0 where it has none. The ranks' squares are then added
 *   apply      of a shard: p, with the ratios of the added squares
 *
 * spans      one for each tensor, also where several are stored as one (Q, K and V): each has norms of its own. What lies
 *            between spans is not touched; padding rows of a tensor are 0 with zero gradients: they stay 0 and add
 *            nothing to the norms. spans[].blocks are to be filled in by lamb_number_blocks(), for a shard after
 *            adam_clip_spans().
 * dtypes     params floatX; master, m, v, grads and step real; squares double.
 * numerics   elementwise in real; the squares of a block of LAMB_BLOCK elements are summed in an order that depends on
 *            the tensor's size alone, on the CPU in double, on the GPU in fp32 over a thread's 64 and then in double; the
 *            blocks' sums in double. u is not stored: the second pass works it out again from m and v, which costs the
 *            same bytes and no memory.
 *            How a tensor is cut into shards moves its sums by no more than their rounding: relative 64 * 2^-24 = 3.8e-6
 *            on the GPU, where 64 terms, none negative, are added in fp32; on the CPU that of a double. A ratio is the
 *            root of two such sums' quotient, so two cuts agree in it, and in the step, within 7.6e-6, on the CPU within
 *            one rounding to real. m and v have the same bits (on the GPU their FMAs are written out).
 *            Where there is no master, params is rounded stochastically, as by AdamW.
 * NaN        a norm that is not finite updates nothing at all.
 * source     You et al., arXiv 1904.00962, in the form of NVIDIA's multi-tensor LAMB: clipping by the global norm first,
 *            bias correction, the ratio not limited. */
#ifndef LLMC_LAMB_H
#define LLMC_LAMB_H

#include "../device/adam.h"
#include "../device/scope.h"

#define LAMB_BLOCK 16384
#define LAMB_TILE 256
#define LAMB_LANES 16

#define LAMB_MOMENTS_FLOPS(n) (21.0 * (double)(n))
#define LAMB_APPLY_FLOPS(n) (11.0 * (double)(n))
#define LAMB_UPDATE_FLOPS(n) (LAMB_MOMENTS_FLOPS(n) + LAMB_APPLY_FLOPS(n))
// Read grads, m, v and the parameters, write m and v; then read m, v and the parameters, write the parameters. `master`:
// the number of copies in full precision, 0 or 1.
#define LAMB_MOMENTS_BYTES(n, master)                                                                                  \
    ((double)(n) * ((5.0 + (master)) * sizeof(real) + (1.0 - (master)) * sizeof(floatX)))
#define LAMB_APPLY_BYTES(n, master)                                                                                    \
    ((double)(n) * ((2.0 + 2.0 * (master)) * sizeof(real) + (2.0 - (master)) * sizeof(floatX)))
#define LAMB_UPDATE_BYTES(n, master) (LAMB_MOMENTS_BYTES(n, master) + LAMB_APPLY_BYTES(n, master))

HOST_DEVICE static inline int lamb_blocks(size_t size) { return (int)((size + LAMB_BLOCK - 1) / LAMB_BLOCK); }

// Fill in spans[].blocks; returns the number of all blocks.
static inline int lamb_number_blocks(ParamSpan* spans, int count) {
    int blocks = 0;
    for (int s = 0; s < count; s++) {
        spans[s].blocks = blocks;
        blocks += lamb_blocks(spans[s].size);
    }
    return blocks;
}

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void lamb_update_ref(real* params, real* m, real* v, const real* grads, double norm, double scale,
                                   int64_t update, const ParamSpan* spans, int count, OptimizerSettings h) {
    if (!isfinite(norm)) return;
    double clip = h.max_norm > 0 && norm > h.max_norm ? h.max_norm / norm : 1, t = (double)update;
    for (int s = 0; s < count; s++) {
        double *u = (double*)xmalloc(spans[s].size * sizeof *u), squares_p = 0, squares_u = 0;
        for (size_t k = 0; k < spans[s].size; k++) {
            size_t i = spans[s].offset + k;
            double g = clip * grads[i] / scale;
            double mi = h.beta1 * m[i] + (1 - h.beta1) * g;
            double vi = h.beta2 * v[i] + (1 - h.beta2) * g * g;
            double root = sqrt(vi / (1 - pow(h.beta2, t)));
            u[k] = mi / (1 - pow(h.beta1, t)) / (root + h.eps) + h.weight_decay * spans[s].decay * params[i];
            squares_p += (double)params[i] * params[i];
            squares_u += u[k] * u[k];
            m[i] = (real)mi;
            v[i] = (real)vi;
        }
        double ratio = spans[s].trust != 0 && squares_p > 0 && squares_u > 0 ? sqrt(squares_p / squares_u) : 1;
        for (size_t k = 0; k < spans[s].size; k++) {
            size_t i = spans[s].offset + k;
            params[i] = (real)(params[i] - h.lr * ratio * u[k]);
        }
        free(u);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Both

// u of one element, from its updated moments; step->step_size is 1 / (1 - beta1^t).
HOST_DEVICE static inline real lamb_direction(real p, real m, real v, real decay, const AdamWStep* step,
                                              const AdamWCoefficients* c) {
    real root = step->root_scale * (sizeof(real) == sizeof(float) ? (real)sqrtf((float)v) : (real)sqrt((double)v));
    return step->step_size * m / (root + c->eps) + decay * p;
}

HOST_DEVICE static inline real lamb_ratio(float trust, double squares_p, double squares_u) {
    return (real)(trust != 0 && squares_p > 0 && squares_u > 0 ? sqrt(squares_p / squares_u) : 1);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: a pass over the flat buffers for the moments and the squares, which the last block of each span adds; a second
// pass applies. In both a block takes LAMB_BLOCK elements of one span, and a thread four neighbours at a time, on 16
// bytes: at a span's ends it leaves out those of its neighbours.

// The sums of squares over a block.
typedef struct {
    double p, u;
} LambSquares;

// Elements begin .. end - 1 of span number `span` are this block's.
typedef struct {
    int span;
    size_t begin, end;
    float decay;
} LambBlock;

__device__ inline LambBlock lamb_block(const ParamSpan* spans, int count) {
    int low = 0, high = count, block = (int)blockIdx.x;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (spans[middle].blocks <= block) low = middle;
        else high = middle;
    }
    ParamSpan span = spans[low];
    LambBlock b = {low, span.offset + (size_t)(block - span.blocks) * LAMB_BLOCK, span.offset + span.size, span.decay};
    b.end = b.end - b.begin > LAMB_BLOCK ? b.begin + LAMB_BLOCK : b.end;
    return b;
}

// A span's sums from those of its blocks, by all threads of a block, which all get them.
__device__ inline LambSquares lamb_squares_of_span(const LambSquares* squares, ParamSpan span) {
    LambSquares sum = {0, 0};
    for (int i = (int)threadIdx.x; i < lamb_blocks(span.size); i += ADAMW_THREADS) {
        LambSquares more = squares[span.blocks + i];
        sum.p += more.p;
        sum.u += more.u;
    }
    sum.p = block_sum(sum.p);
    sum.u = block_sum(sum.u);
    return sum;
}

// Leaves each span's ratio, or where `tensors` is not NULL the sums for it, at its tensor's number.
template <int STORAGE>
__global__ void __launch_bounds__(ADAMW_THREADS)
    lamb_moments_kernel(real* ratio, LambSquares* tensors, LambSquares* squares, unsigned* arrivals, AdamWState a,
                        const ParamSpan* spans, int count, AdamWCoefficients c, real weight_decay) {
    AdamWStep step = adamw_load_step(a);
    if (!step.is_taken) return;
    LambBlock b = lamb_block(spans, count);
    real decay = weight_decay * b.decay, squares_p = 0, squares_u = 0;
#pragma unroll 2
    for (size_t i = b.begin / ADAMW_VECTOR * ADAMW_VECTOR + ADAMW_VECTOR * threadIdx.x; i < b.end;
         i += ADAMW_VECTOR * ADAMW_THREADS) {
        Vector<real> g = load128_streaming(a.grads + i), m = load128(a.m + i), v = load128(a.v + i);
        Vector<real> p = adamw_load<STORAGE>(a, i);
        int whole = i >= b.begin && i + ADAMW_VECTOR <= b.end;
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++) {
            real gradient = step.gradient * g.v[k];
            m.v[k] = fmaf(c.beta1, m.v[k], c.beta1_rest * gradient);
            v.v[k] = fmaf(c.beta2_rest, gradient * gradient, c.beta2 * v.v[k]);
            real u = lamb_direction(p.v[k], m.v[k], v.v[k], decay, &step, &c);
            if (!whole && (i + k < b.begin || i + k >= b.end)) continue;
            squares_p += p.v[k] * p.v[k];
            squares_u += u * u;
            if (whole) continue;
            a.m[i + k] = m.v[k];
            a.v[i + k] = v.v[k];
        }
        if (!whole) continue;
        store128(a.m + i, m);
        store128(a.v + i, v);
    }
    LambSquares sum = {block_sum((double)squares_p), 0};
    sum.u = block_sum((double)squares_u);
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
    ParamSpan span = spans[b.span];
    if (!last_to_arrive(&arrivals[b.span], (unsigned)lamb_blocks(span.size))) return;
    sum = lamb_squares_of_span(squares, span);
    if (threadIdx.x > 0) return;
    if (tensors) tensors[span.tensor] = sum;
    else ratio[b.span] = lamb_ratio(span.trust, sum.p, sum.u);
}

// Thread: a span.
static __global__ void lamb_ratios_kernel(real* ratio, const LambSquares* tensors, const ParamSpan* spans, int count) {
    int s = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (s >= count) return;
    LambSquares sum = tensors[spans[s].tensor];
    ratio[s] = lamb_ratio(spans[s].trust, sum.p, sum.u);
}

template <int STORAGE>
__global__ void __launch_bounds__(ADAMW_THREADS)
    lamb_apply_kernel(AdamWState a, const real* ratio, const ParamSpan* spans, int count, AdamWCoefficients c,
                      real weight_decay, real lr, uint64_t rounding) {
    AdamWStep step = adamw_load_step(a);
    if (!step.is_taken) return;
    LambBlock b = lamb_block(spans, count);
    real decay = weight_decay * b.decay, length = lr * ratio[b.span];
#pragma unroll 2
    for (size_t i = b.begin / ADAMW_VECTOR * ADAMW_VECTOR + ADAMW_VECTOR * threadIdx.x; i < b.end;
         i += ADAMW_VECTOR * ADAMW_THREADS) {
        Vector<real> m = load128(a.m + i), v = load128(a.v + i), p = adamw_load<STORAGE>(a, i);
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++)
            p.v[k] -= length * lamb_direction(p.v[k], m.v[k], v.v[k], decay, &step, &c);
        if (i >= b.begin && i + ADAMW_VECTOR <= b.end) {
            adamw_store<STORAGE>(a, i, p, rounding);
            continue;
        }
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++)
            if (i + k >= b.begin && i + k < b.end) adamw_store_one<STORAGE>(a, i, k, p.v[k], rounding);
    }
}

// What the launches of one update share.
typedef struct {
    const ParamSpan* spans;
    int count, blocks;
    OptimizerSettings h;
    LambSquares* squares;  // [blocks] scratch
    real* ratio;           // [count] scratch
    unsigned* arrivals;    // [count] all 0
} LambLaunch;

static inline LambLaunch lamb_launch(const ParamSpan* spans, int count, int blocks, OptimizerSettings h, Context* ctx) {
    LambLaunch l = {spans, count, blocks, h, NULL, NULL, ctx->arrivals};
    size_t squares = (size_t)blocks * sizeof(LambSquares), ratios = (size_t)count * sizeof(real);
    size_t arrivals = count > DEVICE_ARRIVALS ? (size_t)count * sizeof(unsigned) : 0;
    CHECK(blocks >= count);
    l.squares = (LambSquares*)device_scratch(ctx, squares + ratios + arrivals);
    l.ratio = (real*)(l.squares + blocks);
    if (arrivals) {  // more spans than the context has counters for
        l.arrivals = (unsigned*)(l.ratio + count);
        cudaCheck(cudaMemsetAsync(l.arrivals, 0, arrivals, ctx->stream));
    }
    return l;
}

template <int STORAGE>
static inline void lamb_start_moments(AdamWState a, const LambLaunch* l, LambSquares* tensors, Context* ctx) {
    lamb_moments_kernel<STORAGE><<<(unsigned)l->blocks, ADAMW_THREADS, 0, ctx->stream>>>(
        l->ratio, tensors, l->squares, l->arrivals, a, l->spans, l->count, adamw_coefficients(l->h),
        (real)l->h.weight_decay);
    cudaCheck(cudaGetLastError());
}

template <int STORAGE> static inline void lamb_start_apply(AdamWState a, const LambLaunch* l, Context* ctx) {
    lamb_apply_kernel<STORAGE><<<(unsigned)l->blocks, ADAMW_THREADS, 0, ctx->stream>>>(
        a, l->ratio, l->spans, l->count, adamw_coefficients(l->h), (real)l->h.weight_decay, (real)l->h.lr,
        l->h.rounding);
    cudaCheck(cudaGetLastError());
}

static inline void lamb_check_state(AdamWState a, size_t elements) {
    CHECK(elements % ADAMW_VECTOR == 0 && a.first % ADAMW_VECTOR == 0 && (ADAMW_NARROW || !a.master));
}

// tensors: as the moments kernel takes them.
static inline void lamb_start_moments_of(AdamWState a, const LambLaunch* l, LambSquares* tensors, Context* ctx) {
    if constexpr (!ADAMW_NARROW) lamb_start_moments<ADAMW_EXACT>(a, l, tensors, ctx);
    else if (a.master) lamb_start_moments<ADAMW_MASTER>(a, l, tensors, ctx);
    else lamb_start_moments<ADAMW_ROUNDED>(a, l, tensors, ctx);
}

static inline void lamb_start_apply_of(AdamWState a, const LambLaunch* l, Context* ctx) {
    if constexpr (!ADAMW_NARROW) lamb_start_apply<ADAMW_EXACT>(a, l, ctx);
    else if (a.master) lamb_start_apply<ADAMW_MASTER>(a, l, ctx);
    else lamb_start_apply<ADAMW_ROUNDED>(a, l, ctx);
}

// `spans` lie where the ops run, in order, without overlaps; `elements` are those of the flat buffers, `blocks` what
// lamb_number_blocks() has returned.
static inline void lamb_update(AdamWState a, size_t elements, const ParamSpan* spans, int count, int blocks,
                               OptimizerSettings h, Context* ctx) {
    lamb_check_state(a, elements);
    CHECK(count > 0);
    Scope scope = scope_open(ctx, "lamb_update", LAMB_UPDATE_FLOPS(elements),
                             LAMB_UPDATE_BYTES(elements, a.master != NULL), "n=%zu", elements);
    LambLaunch l = lamb_launch(spans, count, blocks, h, ctx);
    lamb_start_moments_of(a, &l, NULL, ctx);
    lamb_start_apply_of(a, &l, ctx);
    scope_close(&scope);
}

// Of a shard, whose spans, blocks and elements these are; count may be 0. squares [2 * tensors], where the ops run.
static inline void lamb_moments(double* squares, int tensors, AdamWState a, size_t elements, const ParamSpan* spans,
                                int count, int blocks, OptimizerSettings h, Context* ctx) {
    lamb_check_state(a, elements);
    static_assert(sizeof(LambSquares) == 2 * sizeof(double), "two sums for each tensor");
    Scope scope = scope_open(ctx, "lamb_moments", LAMB_MOMENTS_FLOPS(elements),
                             LAMB_MOMENTS_BYTES(elements, a.master != NULL), "n=%zu", elements);
    cudaCheck(cudaMemsetAsync(squares, 0, (size_t)tensors * sizeof(LambSquares), ctx->stream));
    if (count > 0) {
        LambLaunch l = lamb_launch(spans, count, blocks, h, ctx);
        lamb_start_moments_of(a, &l, (LambSquares*)squares, ctx);
    }
    scope_close(&scope);
}

// The same shard, after lamb_moments(); squares: added over the ranks.
static inline void lamb_apply(AdamWState a, size_t elements, const double* squares, const ParamSpan* spans, int count,
                              int blocks, OptimizerSettings h, Context* ctx) {
    lamb_check_state(a, elements);
    if (!count) return;
    Scope scope = scope_open(ctx, "lamb_apply", LAMB_APPLY_FLOPS(elements),
                             LAMB_APPLY_BYTES(elements, a.master != NULL), "n=%zu", elements);
    LambLaunch l = lamb_launch(spans, count, blocks, h, ctx);
    lamb_ratios_kernel<<<blocks_for((size_t)count, ADAMW_THREADS), ADAMW_THREADS, 0, ctx->stream>>>(
        l.ratio, (const LambSquares*)squares, spans, count);
    cudaCheck(cudaGetLastError());
    lamb_start_apply_of(a, &l, ctx);
    scope_close(&scope);
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU

// A task's elements of the flat buffers, and their sums of squares.
typedef struct {
    size_t begin, count;
    int span;
    double squares_p, squares_u;
} LambBlock;

static inline double lamb_squares(const real* x, size_t n) {
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
    b->squares_p = b->squares_u = 0;
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
        b->squares_p += lamb_squares(p, n);
        b->squares_u += lamb_squares(u, n);
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

// What the threads share: [blocks] in scratch, followed by [2 * count] sums of squares.
static inline LambBlock* lamb_cut(size_t elements, const ParamSpan* spans, int count, int blocks, Context* ctx) {
    LambBlock* block =
        (LambBlock*)device_scratch(ctx, (size_t)blocks * sizeof *block + 2 * (size_t)count * sizeof(double));
    for (int s = 0; s < count; s++) {
        CHECK(spans[s].offset + spans[s].size <= elements);
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

// Moments, and the sums of squares of p and u over span s at sums[2 * s].
static inline void lamb_run_moments(double* sums, LambBlock* block, AdamWState a, const ParamSpan* spans, int count,
                                    int blocks, OptimizerSettings h) {
    AdamWCoefficients c = adamw_coefficients(h);
#pragma omp parallel for schedule(static)
    for (int b = 0; b < blocks; b++)
        lamb_moments_block(&block[b], a, (real)(h.weight_decay * spans[block[b].span].decay), &c);
    for (int s = 0; s < count; s++) {
        sums[2 * s] = sums[2 * s + 1] = 0;
        for (int b = 0; b < lamb_blocks(spans[s].size); b++) {
            sums[2 * s] += block[spans[s].blocks + b].squares_p;
            sums[2 * s + 1] += block[spans[s].blocks + b].squares_u;
        }
    }
}

static inline void lamb_run_apply(const double* sums, const LambBlock* block, AdamWState a, const ParamSpan* spans,
                                  int blocks, OptimizerSettings h) {
    AdamWCoefficients c = adamw_coefficients(h);
#pragma omp parallel for schedule(static)
    for (int b = 0; b < blocks; b++) {
        int s = block[b].span;
        real ratio = lamb_ratio(spans[s].trust, sums[2 * s], sums[2 * s + 1]);
        lamb_apply_block(&block[b], a, (real)(h.weight_decay * spans[s].decay), (real)(h.lr * ratio), &c);
    }
}

// `spans` lie where the ops run; `elements` are those of the flat buffers, `blocks` what lamb_number_blocks() has
// returned.
static inline void lamb_update(AdamWState a, size_t elements, const ParamSpan* spans, int count, int blocks,
                               OptimizerSettings h, Context* ctx) {
    CHECK(!a.master && count > 0);
    Scope scope =
        scope_open(ctx, "lamb_update", LAMB_UPDATE_FLOPS(elements), LAMB_UPDATE_BYTES(elements, 0), "n=%zu", elements);
    if (a.step->is_taken) {
        LambBlock* block = lamb_cut(elements, spans, count, blocks, ctx);
        double* sums = (double*)(block + blocks);
        lamb_run_moments(sums, block, a, spans, count, blocks, h);
        lamb_run_apply(sums, block, a, spans, blocks, h);
    }
    scope_close(&scope);
}

// Of a shard, whose spans, blocks and elements these are; count may be 0. squares [2 * tensors], where the ops run.
static inline void lamb_moments(double* squares, int tensors, AdamWState a, size_t elements, const ParamSpan* spans,
                                int count, int blocks, OptimizerSettings h, Context* ctx) {
    CHECK(!a.master);
    Scope scope = scope_open(ctx, "lamb_moments", LAMB_MOMENTS_FLOPS(elements), LAMB_MOMENTS_BYTES(elements, 0),
                             "n=%zu", elements);
    memset(squares, 0, 2 * (size_t)tensors * sizeof *squares);
    if (count > 0 && a.step->is_taken) {
        LambBlock* block = lamb_cut(elements, spans, count, blocks, ctx);
        double* sums = (double*)(block + blocks);
        lamb_run_moments(sums, block, a, spans, count, blocks, h);
        for (int s = 0; s < count; s++) {
            CHECK(spans[s].tensor < tensors);
            memcpy(squares + 2 * spans[s].tensor, sums + 2 * s, 2 * sizeof *sums);
        }
    }
    scope_close(&scope);
}

// The same shard, after lamb_moments(); squares: added over the ranks.
static inline void lamb_apply(AdamWState a, size_t elements, const double* squares, const ParamSpan* spans, int count,
                              int blocks, OptimizerSettings h, Context* ctx) {
    CHECK(!a.master);
    if (!count) return;
    Scope scope =
        scope_open(ctx, "lamb_apply", LAMB_APPLY_FLOPS(elements), LAMB_APPLY_BYTES(elements, 0), "n=%zu", elements);
    if (a.step->is_taken) {
        LambBlock* block = lamb_cut(elements, spans, count, blocks, ctx);
        double* sums = (double*)(block + blocks);
        for (int s = 0; s < count; s++) memcpy(sums + 2 * s, squares + 2 * spans[s].tensor, 2 * sizeof *sums);
        lamb_run_apply(sums, block, a, spans, blocks, h);
    }
    scope_close(&scope);
}

#endif
#endif
