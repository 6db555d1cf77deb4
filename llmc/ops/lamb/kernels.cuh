/* lamb.h on the GPU.
 *
 * The first pass over the flat buffers updates the moments and sums the squares; the last block of each span to arrive
 * adds up the span's sums. The second pass applies the update. In both a block takes LAMB_BLOCK elements of one span at
 * a time. A thread takes four adjacent elements at a time, aligned to 16 bytes. At the ends of a span it skips elements
 * of adjacent spans.
 *
 * lamb_update() makes both passes in one kernel where a multiprocessor has shared memory for LAMB_RESIDENTS blocks and
 * their update directions u. Then the second pass need not read m and v again: 30 bytes an element instead of 42 with
 * master weights in bf16. The blocks of the grid are all resident and take the blocks of the spans in turn. After its
 * part of a span, a block waits for the others' sums of squares, while its neighbors on the multiprocessor use the
 * memory. A span with more blocks than the grid does not fit: its second pass comes at the end and computes u anew.
 * All ways write the same bits. */
#ifndef LLMC_OPS_LAMB_KERNELS_CUH
#define LLMC_OPS_LAMB_KERNELS_CUH

#include "llmc/ops/lamb/lamb.h"

#ifdef __CUDACC__
#include "llmc/device/ptx/mbarrier.cuh"

// u of a block: up to three elements more, because a thread's four are aligned.
enum { LAMB_RESIDENTS = 3, LAMB_SHARED = (LAMB_BLOCK + ADAMW_VECTOR) * sizeof(real) };

// The sums of squares over a block.
typedef struct {
    double p, u;
} LambSumSq;

// The arguments of the kernels.
typedef struct {
    AdamWState a;
    const ParamSpan* spans;
    int count, blocks;
    AdamWCoefficients c;
    real weight_decay, lr;
    uint64_t rounding;
    LambSumSq* sum_sq;   // [blocks]
    LambSumSq* tensors;  // [tensors of the whole model] the result of lamb_moments_kernel
    real* ratio;         // [count]
    unsigned* arrivals;  // [count] 0 before and after each kernel
} LambArgs;

// Elements begin .. end - 1 of span number `span` are this block's; first: begin, rounded down to a whole vector.
typedef struct {
    int span;
    size_t first, begin, end;
    real decay;
} LambBlock;

__device__ inline LambBlock lamb_block(const LambArgs& z, int block) {
    int low = 0, high = z.count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (z.spans[middle].blocks <= block) low = middle;
        else high = middle;
    }
    ParamSpan span = z.spans[low];
    LambBlock b = {.span = low, .end = span.offset + span.size, .decay = z.weight_decay * span.decay};
    b.begin = span.offset + (size_t)(block - span.blocks) * LAMB_BLOCK;
    b.first = b.begin / ADAMW_VECTOR * ADAMW_VECTOR;
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

// The first pass over a block. Returns the sums of squares, the same in all threads. If KEPT, u gets the update
// directions; each thread reads only its own again.
template <int STORAGE, int KEPT>
__device__ inline LambSumSq lamb_moments_pass(real* u, const LambArgs& z, LambBlock b, AdamWStep step) {
    AdamWState a = z.a;
    real sum_sq_p = 0, sum_sq_u = 0;
#pragma unroll 2
    for (size_t i = b.first + ADAMW_VECTOR * threadIdx.x; i < b.end; i += ADAMW_VECTOR * ADAMW_THREADS) {
        Vector<real> g = load128_streaming(a.grads + i), m = load128_streaming(a.m + i);
        Vector<real> v = load128_streaming(a.v + i), p = adamw_load<STORAGE>(a, i), direction;
        int whole = i >= b.begin && i + ADAMW_VECTOR <= b.end;
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++) {
            real gradient = step.gradient * g.v[k];
            m.v[k] = fmaf(z.c.beta1, m.v[k], z.c.beta1_rest * gradient);
            v.v[k] = fmaf(z.c.beta2_rest, gradient * gradient, z.c.beta2 * v.v[k]);
            direction.v[k] = lamb_direction(p.v[k], m.v[k], v.v[k], b.decay, &step, &z.c);
            if (!whole && (i + k < b.begin || i + k >= b.end)) continue;
            sum_sq_p += p.v[k] * p.v[k];
            sum_sq_u += direction.v[k] * direction.v[k];
            if (whole) continue;
            a.m[i + k] = m.v[k];
            a.v[i + k] = v.v[k];
        }
        if constexpr (KEPT) store128(u + (i - b.first), direction);
        if (!whole) continue;
        store128(a.m + i, m);
        store128(a.v + i, v);
    }
    LambSumSq sum = {.p = block_sum((double)sum_sq_p)};
    sum.u = block_sum((double)sum_sq_u);
    return sum;
}

// The second pass over a block. KEPT: u has the update directions. Otherwise they are computed anew.
template <int STORAGE, int KEPT>
__device__ inline void lamb_apply_pass(const real* u, const LambArgs& z, LambBlock b, AdamWStep step, real ratio) {
    AdamWState a = z.a;
    real length = z.lr * ratio;
#pragma unroll 2
    for (size_t i = b.first + ADAMW_VECTOR * threadIdx.x; i < b.end; i += ADAMW_VECTOR * ADAMW_THREADS) {
        Vector<real> p = adamw_load<STORAGE>(a, i), direction;
        if constexpr (KEPT) {
            direction = load128(u + (i - b.first));
        } else {
            Vector<real> m = load128_streaming(a.m + i), v = load128_streaming(a.v + i);
#pragma unroll
            for (int k = 0; k < ADAMW_VECTOR; k++)
                direction.v[k] = lamb_direction(p.v[k], m.v[k], v.v[k], b.decay, &step, &z.c);
        }
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++) p.v[k] -= length * direction.v[k];
        if (i >= b.begin && i + ADAMW_VECTOR <= b.end) {
            adamw_store<STORAGE>(a, i, p, z.rounding);
            continue;
        }
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++)
            if (i + k >= b.begin && i + k < b.end) adamw_store_one<STORAGE>(a, i, k, p.v[k], z.rounding);
    }
}

// Write the sums of each span to its tensor's place in `tensors` or, without `tensors`, its ratio.
template <int STORAGE> __global__ void __launch_bounds__(ADAMW_THREADS) lamb_moments_kernel(LambArgs z) {
    AdamWStep step = adamw_load_step(z.a);
    if (!step.is_taken) return;
    LambBlock b = lamb_block(z, (int)blockIdx.x);
    LambSumSq sum = lamb_moments_pass<STORAGE, 0>(NULL, z, b, step);
    if (threadIdx.x == 0) z.sum_sq[blockIdx.x] = sum;
    ParamSpan span = z.spans[b.span];
    if (!last_to_arrive(&z.arrivals[b.span], (unsigned)lamb_blocks(span.size))) return;
    sum = lamb_sum_sq_of_span(z.sum_sq, span);
    if (threadIdx.x > 0) return;
    if (z.tensors) z.tensors[span.tensor] = sum;
    else z.ratio[b.span] = lamb_ratio(span.trust, sum.p, sum.u);
}

// One thread per span.
static __global__ void lamb_ratios_kernel(LambArgs z) {
    int s = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (s >= z.count) return;
    LambSumSq sum = z.tensors[z.spans[s].tensor];
    z.ratio[s] = lamb_ratio(z.spans[s].trust, sum.p, sum.u);
}

template <int STORAGE> __global__ void __launch_bounds__(ADAMW_THREADS) lamb_apply_kernel(LambArgs z) {
    AdamWStep step = adamw_load_step(z.a);
    if (!step.is_taken) return;
    LambBlock b = lamb_block(z, (int)blockIdx.x);
    lamb_apply_pass<STORAGE, 0>(NULL, z, b, step, z.ratio[b.span]);
}

// A span's counter in lamb_update_kernel, for a span of n blocks: n when all sums are written, n + 1 when the last
// block has written the ratio, and one more for each block that has read it. The last one sets it to 0.

// Leave a block's sums of squares. The last block of the span writes its ratio.
__device__ inline void lamb_leave_sums(const LambArgs& z, int block, LambBlock b, LambSumSq sum) {
    __shared__ int last;
    ParamSpan span = z.spans[b.span];
    if (threadIdx.x == 0) {
        z.sum_sq[block] = sum;
        __threadfence();
        last = atomicAdd(&z.arrivals[b.span], 1u) == (unsigned)lamb_blocks(span.size) - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    sum = lamb_sum_sq_of_span(z.sum_sq, span);
    if (threadIdx.x > 0) return;
    z.ratio[b.span] = lamb_ratio(span.trust, sum.p, sum.u);
    __threadfence();
    atomicAdd(&z.arrivals[b.span], 1u);
}

// Wait for the ratio of a block's span. All threads get it.
__device__ inline real lamb_await_ratio(const LambArgs& z, LambBlock b) {
    __shared__ real ratio;
    if (threadIdx.x == 0) {
        unsigned blocks = (unsigned)lamb_blocks(z.spans[b.span].size), *arrivals = &z.arrivals[b.span];
        wait_for_count_gpu(arrivals, blocks + 1);
        ratio = __ldcg(&z.ratio[b.span]);
        if (atomicAdd(arrivals, 1u) == 2 * blocks) *arrivals = 0;
    }
    __syncthreads();
    return ratio;
}

// Both passes. All blocks must be resident at once (cooperative launch), as they wait for each other. They do so in the
// order of the spans, and no block has two parts of a span for which it waits before the end. So none waits for itself.
template <int STORAGE> __global__ void __launch_bounds__(ADAMW_THREADS, LAMB_RESIDENTS) lamb_update_kernel(LambArgs z) {
    extern __shared__ float4 lamb_shared[];
    real* u = (real*)lamb_shared;
    AdamWStep step = adamw_load_step(z.a);
    if (!step.is_taken) return;
    int grid = (int)gridDim.x, left_begin = z.blocks, left_end = 0;  // blocks left for the end are among these
    for (int block = (int)blockIdx.x; block < z.blocks; block += grid) {
        LambBlock b = lamb_block(z, block);
        int fits = lamb_blocks(z.spans[b.span].size) <= grid;
        lamb_leave_sums(z, block, b,
                        fits ? lamb_moments_pass<STORAGE, 1>(u, z, b, step)
                             : lamb_moments_pass<STORAGE, 0>(NULL, z, b, step));
        if (fits) {
            lamb_apply_pass<STORAGE, 1>(u, z, b, step, lamb_await_ratio(z, b));
        } else {
            left_begin = min(left_begin, block);
            left_end = block + 1;
        }
    }
    for (int block = left_begin; block < left_end; block += grid) {
        LambBlock b = lamb_block(z, block);
        if (lamb_blocks(z.spans[b.span].size) <= grid) continue;
        lamb_apply_pass<STORAGE, 0>(NULL, z, b, step, lamb_await_ratio(z, b));
    }
}

// tensors: as in lamb_moments_kernel().
static inline LambArgs lamb_args(AdamWState a, LambSumSq* tensors, LambSpans of, OptimizerSettings h, Context* ctx) {
    CHECK(of.elements % ADAMW_VECTOR == 0 && a.first % ADAMW_VECTOR == 0 && (ADAMW_NARROW || !a.master));
    CHECK(of.blocks >= of.count);
    LambArgs z = {.a = a, .spans = of.spans, .count = of.count, .blocks = of.blocks, .c = adamw_coefficients(h)};
    z.weight_decay = (real)h.weight_decay, z.lr = (real)h.lr, z.rounding = h.rounding;
    z.tensors = tensors;
    z.arrivals = ctx->arrivals;
    size_t sums = (size_t)of.blocks * sizeof(LambSumSq), ratios = (size_t)of.count * sizeof(real);
    size_t arrivals = of.count > DEVICE_ARRIVALS ? (size_t)of.count * sizeof(unsigned) : 0;
    z.sum_sq = (LambSumSq*)device_scratch(ctx, sums + ratios + arrivals);
    z.ratio = (real*)(z.sum_sq + of.blocks);
    if (arrivals) {  // more spans than the context has counters
        z.arrivals = (unsigned*)(z.ratio + of.count);
        cudaCheck(cudaMemsetAsync(z.arrivals, 0, arrivals, ctx->stream));
    }
    return z;
}

typedef enum { LAMB_MOMENTS, LAMB_APPLY, LAMB_BOTH } LambPasses;

template <int STORAGE> static inline void lamb_start_both(LambArgs z, Context* ctx) {
    void (*kernel)(LambArgs) = lamb_update_kernel<STORAGE>;
    int residents = 0;
    if (LAMB_SHARED <= ctx->shared_of_block) {
        kernel_allow_shared(kernel, LAMB_SHARED, ctx);
        cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&residents, kernel, ADAMW_THREADS, LAMB_SHARED));
    }
    if (residents < LAMB_RESIDENTS) {  // too few to hide each other's waits
        lamb_moments_kernel<STORAGE><<<(unsigned)z.blocks, ADAMW_THREADS, 0, ctx->stream>>>(z);
        lamb_apply_kernel<STORAGE><<<(unsigned)z.blocks, ADAMW_THREADS, 0, ctx->stream>>>(z);
        return;
    }
    unsigned grid = (unsigned)min_int(z.blocks, ctx->multiprocessors * LAMB_RESIDENTS);
    void* arguments[] = {&z};
    cudaCheck(cudaLaunchCooperativeKernel((const void*)kernel, dim3(grid), dim3(ADAMW_THREADS), arguments, LAMB_SHARED,
                                          ctx->stream));
}

template <int STORAGE> static inline void lamb_start_stored(LambArgs z, LambPasses passes, Context* ctx) {
    unsigned blocks = (unsigned)z.blocks;
    if (passes == LAMB_BOTH) lamb_start_both<STORAGE>(z, ctx);
    else if (passes == LAMB_MOMENTS) lamb_moments_kernel<STORAGE><<<blocks, ADAMW_THREADS, 0, ctx->stream>>>(z);
    else lamb_apply_kernel<STORAGE><<<blocks, ADAMW_THREADS, 0, ctx->stream>>>(z);
    cudaCheck(cudaGetLastError());
}

static inline void lamb_start(LambArgs z, LambPasses passes, Context* ctx) {
    if constexpr (!ADAMW_NARROW) lamb_start_stored<ADAMW_EXACT>(z, passes, ctx);
    else if (z.a.master) lamb_start_stored<ADAMW_MASTER>(z, passes, ctx);
    else lamb_start_stored<ADAMW_ROUNDED>(z, passes, ctx);
}

static inline void lamb_update(AdamWState a, LambSpans of, OptimizerSettings h, Context* ctx) {
    CHECK(of.count > 0);
    Scope scope = scope_open(ctx, "lamb_update", LAMB_UPDATE_FLOPS(of.elements),
                             LAMB_UPDATE_BYTES(of.elements, a.master != NULL), "n=%zu", of.elements);
    lamb_start(lamb_args(a, NULL, of, h, ctx), LAMB_BOTH, ctx);
    scope_close(&scope);
}

// The first half of the update of a shard. sum_sq: [2 * tensors] in device memory.
static inline void lamb_moments(double* sum_sq, int tensors, AdamWState a, LambSpans of, OptimizerSettings h,
                                Context* ctx) {
    static_assert(sizeof(LambSumSq) == 2 * sizeof(double), "two sums for each tensor");
    Scope scope = scope_open(ctx, "lamb_moments", LAMB_MOMENTS_FLOPS(of.elements),
                             LAMB_MOMENTS_BYTES(of.elements, a.master != NULL), "n=%zu", of.elements);
    cudaCheck(cudaMemsetAsync(sum_sq, 0, (size_t)tensors * sizeof(LambSumSq), ctx->stream));
    if (of.count > 0) lamb_start(lamb_args(a, (LambSumSq*)sum_sq, of, h, ctx), LAMB_MOMENTS, ctx);
    scope_close(&scope);
}

// The second half of the update of the same shard, after lamb_moments(). sum_sq: summed over the ranks.
static inline void lamb_apply(AdamWState a, const double* sum_sq, LambSpans of, OptimizerSettings h, Context* ctx) {
    if (!of.count) return;
    Scope scope = scope_open(ctx, "lamb_apply", LAMB_APPLY_FLOPS(of.elements),
                             LAMB_APPLY_BYTES(of.elements, a.master != NULL), "n=%zu", of.elements);
    LambArgs z = lamb_args(a, (LambSumSq*)sum_sq, of, h, ctx);
    lamb_ratios_kernel<<<blocks_for((size_t)of.count, ADAMW_THREADS), ADAMW_THREADS, 0, ctx->stream>>>(z);
    cudaCheck(cudaGetLastError());
    lamb_start(z, LAMB_APPLY, ctx);
    scope_close(&scope);
}

#endif
#endif
