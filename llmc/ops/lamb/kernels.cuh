/* lamb.h on the GPU.
 *
 * The first pass over the flat buffers updates the moments and sums the squares; the last block of each span to arrive
 * adds up the span's sums. The second pass applies the update. In both a block takes LAMB_BLOCK elements of one span. A
 * thread takes four neighbouring elements at a time, aligned to 16 bytes. At the ends of a span it skips elements of
 * neighbouring spans. */
#ifndef LLMC_OPS_LAMB_KERNELS_CUH
#define LLMC_OPS_LAMB_KERNELS_CUH

#include "llmc/ops/lamb/lamb.h"

#ifdef __CUDACC__

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

// Adds the sums of a span's blocks. All threads of a block take part, and all get the result.
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

// Writes each span's ratio or, if `tensors` is not NULL, its sums to its tensor's place in `tensors`.
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

// One thread per span.
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

// tensors: as in lamb_moments_kernel().
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

// `spans` is in device memory, in order and without overlaps. `elements` is the size of the flat buffers, `blocks` the
// result of lamb_number_blocks().
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

// The first half of the update of a shard. spans, blocks and elements are the shard's. count may be 0. squares: [2 *
// tensors] in device memory.
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

// The second half of the update of the same shard, after lamb_moments(). squares: summed over the ranks.
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

#endif
#endif
