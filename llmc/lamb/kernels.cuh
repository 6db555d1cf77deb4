/* lamb.h on the GPU.
 *
 * The first pass over the flat buffers updates the moments and sums the squares; the last block of each span to arrive
 * adds up the span's sums. The second pass applies the update. In both a block takes LAMB_BLOCK elements of one span. A
 * thread takes four adjacent elements at a time, aligned to 16 bytes. At the ends of a span it skips elements of
 * adjacent spans. */
#ifndef LLMC_LAMB_KERNELS_CUH
#define LLMC_LAMB_KERNELS_CUH

#include "llmc/device/cuda_utils.cuh"

// The sums of squares over a block.
typedef struct {
    double p, u;
} LambSumSq;

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
    LambBlock b = {.span = low,
                   .begin = span.offset + (size_t)(block - span.blocks) * LAMB_BLOCK,
                   .end = span.offset + span.size,
                   .decay = span.decay};
    b.end = b.end - b.begin > LAMB_BLOCK ? b.begin + LAMB_BLOCK : b.end;
    return b;
}

// Add the sums of a span's blocks. All threads of a block must call it, and all get the result.
__device__ inline LambSumSq lamb_sum_sq_of_span(const LambSumSq* sum_sq, ParamSpan span) {
    LambSumSq sum = {0, 0};
    for (int i = (int)threadIdx.x; i < lamb_blocks(span.size); i += ADAMW_THREADS) {
        LambSumSq more = sum_sq[span.blocks + i];
        sum.p += more.p;
        sum.u += more.u;
    }
    sum.p = block_sum(sum.p);
    sum.u = block_sum(sum.u);
    return sum;
}

// Write each span's ratio or, if `tensors` is not NULL, its sums to its tensor's place in `tensors`.
template <int STORAGE>
__global__ void __launch_bounds__(ADAMW_THREADS)
    lamb_moments_kernel(real* ratio, LambSumSq* tensors, LambSumSq* sum_sq, unsigned* arrivals, AdamWState a,
                        const ParamSpan* spans, int count, AdamWCoefficients c, real weight_decay) {
    AdamWStep step = adamw_load_step(a);
    if (!step.is_taken) return;
    LambBlock b = lamb_block(spans, count);
    real decay = weight_decay * b.decay, sum_sq_p = 0, sum_sq_u = 0;
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
            sum_sq_p += p.v[k] * p.v[k];
            sum_sq_u += u * u;
            if (whole) continue;
            a.m[i + k] = m.v[k];
            a.v[i + k] = v.v[k];
        }
        if (!whole) continue;
        store128(a.m + i, m);
        store128(a.v + i, v);
    }
    LambSumSq sum = {.p = block_sum((double)sum_sq_p)};
    sum.u = block_sum((double)sum_sq_u);
    if (threadIdx.x == 0) sum_sq[blockIdx.x] = sum;
    ParamSpan span = spans[b.span];
    if (!last_to_arrive(&arrivals[b.span], (unsigned)lamb_blocks(span.size))) return;
    sum = lamb_sum_sq_of_span(sum_sq, span);
    if (threadIdx.x > 0) return;
    if (tensors) tensors[span.tensor] = sum;
    else ratio[b.span] = lamb_ratio(span.trust, sum.p, sum.u);
}

// One thread per span.
static __global__ void lamb_ratios_kernel(real* ratio, const LambSumSq* tensors, const ParamSpan* spans, int count) {
    int s = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (s >= count) return;
    LambSumSq sum = tensors[spans[s].tensor];
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

// Arguments that the launches of one update share.
typedef struct {
    LambSpans of;
    OptimizerSettings h;
    LambSumSq* sum_sq;   // [blocks] scratch
    real* ratio;         // [count] scratch
    unsigned* arrivals;  // [count] all 0
} LambLaunch;

static inline LambLaunch lamb_launch(LambSpans of, OptimizerSettings h, Context* ctx) {
    LambLaunch l = {.of = of, .h = h, .arrivals = ctx->arrivals};
    size_t sums = (size_t)of.blocks * sizeof(LambSumSq), ratios = (size_t)of.count * sizeof(real);
    size_t arrivals = of.count > DEVICE_ARRIVALS ? (size_t)of.count * sizeof(unsigned) : 0;
    CHECK(of.blocks >= of.count);
    l.sum_sq = (LambSumSq*)device_scratch(ctx, sums + ratios + arrivals);
    l.ratio = (real*)(l.sum_sq + of.blocks);
    if (arrivals) {  // more spans than the context has counters
        l.arrivals = (unsigned*)(l.ratio + of.count);
        cudaCheck(cudaMemsetAsync(l.arrivals, 0, arrivals, ctx->stream));
    }
    return l;
}

// tensors: as in lamb_moments_kernel().
static inline void lamb_run_moments(AdamWState a, const LambLaunch* l, LambSumSq* tensors, Context* ctx) {
    auto kernel = a.master ? lamb_moments_kernel<ADAMW_WITH_MASTER> : lamb_moments_kernel<ADAMW_NO_MASTER>;
    kernel<<<(unsigned)l->of.blocks, ADAMW_THREADS, 0, ctx->stream>>>(
        l->ratio, tensors, l->sum_sq, l->arrivals, a, l->of.spans, l->of.count, adamw_coefficients(l->h),
        (real)l->h.weight_decay);
    cudaCheck(cudaGetLastError());
}

static inline void lamb_run_apply(AdamWState a, const LambLaunch* l, Context* ctx) {
    auto kernel = a.master ? lamb_apply_kernel<ADAMW_WITH_MASTER> : lamb_apply_kernel<ADAMW_NO_MASTER>;
    kernel<<<(unsigned)l->of.blocks, ADAMW_THREADS, 0, ctx->stream>>>(a, l->ratio, l->of.spans, l->of.count,
                                                                      adamw_coefficients(l->h), (real)l->h.weight_decay,
                                                                      (real)l->h.lr, l->h.rounding);
    cudaCheck(cudaGetLastError());
}

#endif
