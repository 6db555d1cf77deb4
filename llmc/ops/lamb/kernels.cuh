/* lamb.h on the GPU.
 *
 * The first pass over the flat buffers updates the moments and sums the squares; the last block of each span to arrive
 * adds up the span's sums. The second pass applies the update. Both take parts of LAMB_BLOCK elements of one span. A
 * thread takes four adjacent elements at a time, aligned to 16 bytes. At the ends of a span it skips elements of
 * adjacent spans.
 *
 * lamb_update() makes both passes in one kernel. Its blocks are all resident and take part after part. A block keeps the
 * update directions u of its last parts, four on an H100, in shared memory, so that the second pass need not read m and
 * v again: 30 bytes an element instead of 42, with bf16 and master weights. It makes the second pass over a part when
 * it has no room to go on. By then the others have usually left their sums of squares, and it need not wait. The second
 * pass over a span of more parts than the grid can keep comes at the end and computes u anew. The bits are those of
 * lamb_moments() and lamb_apply(). */
#ifndef LLMC_OPS_LAMB_KERNELS_CUH
#define LLMC_OPS_LAMB_KERNELS_CUH

#include "llmc/ops/lamb/lamb.h"

#ifdef __CUDACC__
#include "llmc/device/ptx/mbarrier.cuh"

// LAMB_ROOM: u of a part, with up to three elements more, because a thread's four are aligned.
enum { LAMB_RESIDENTS = 3, LAMB_ROOM = LAMB_BLOCK + ADAMW_VECTOR, LAMB_WARPS = ADAMW_THREADS / WARP };

// The sums of squares over a part.
typedef struct {
    double p, u;
} LambSumSq;

// The arguments of the kernels.
typedef struct {
    AdamWState a;
    const ParamSpan* spans;
    int count, blocks;
    int kept;  // parts whose u a block has room for
    AdamWCoefficients c;
    real weight_decay, lr;
    uint64_t rounding;
    LambSumSq* sum_sq;   // [blocks]
    LambSumSq* tensors;  // [tensors of the whole model] the result of lamb_moments_kernel
    real* ratio;         // [count]
    unsigned* arrivals;  // [count + 1] 0 before and after each kernel; the last one counts parts
} LambArgs;

// Elements begin .. end - 1 of span number `span`; first: begin, rounded down to a whole vector.
typedef struct alignas(16) {
    int span, parts;  // parts: of the span
    size_t first, begin, end;
    real decay;
} LambPart;

// All lanes of a warp must call it. They search together: each step of a search by one thread would wait for memory.
__device__ inline LambPart lamb_part(const LambArgs& z, int part) {
    int low = 0, lane = threadIdx.x % WARP;
    for (int left = z.count; left > 1;) {  // it is one of spans[low .. low + left - 1]
        int step = (left + WARP - 1) / WARP, at = lane * step;
        unsigned begun = __ballot_sync(ALL_LANES, at < left && z.spans[low + (at < left ? at : 0)].blocks <= part);
        int last = step * (__popc(begun) - 1);
        low += last;
        left = min(step, left - last);
    }
    ParamSpan span = z.spans[low];
    LambPart b = {.span = low, .parts = lamb_blocks(span.size), .end = span.offset + span.size};
    b.decay = z.weight_decay * span.decay;
    b.begin = span.offset + (size_t)(part - span.blocks) * LAMB_BLOCK;
    b.first = b.begin / ADAMW_VECTOR * ADAMW_VECTOR;
    b.end = b.end - b.begin > LAMB_BLOCK ? b.begin + LAMB_BLOCK : b.end;
    return b;
}

// The first pass over a part. Returns the thread's sums of squares. If KEPT, u gets the update directions; each thread
// reads only its own again.
template <int STORAGE, int KEPT>
__device__ inline LambSumSq lamb_moments_pass(real* u, const LambArgs& z, LambPart b, AdamWStep step) {
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
    LambSumSq sum = {(double)sum_sq_p, (double)sum_sq_u};
    return sum;
}

__device__ inline LambSumSq lamb_warp_sum(LambSumSq sum) {
    sum.p = warp_sum(sum.p);
    sum.u = warp_sum(sum.u);
    return sum;
}

// Leave the sums of squares of part number `part`, from those of the block's threads. The block that leaves a span's
// last ones, of `arrivals` of them, adds up the span's. Returns 1 in one of its threads, which gets the sum; 0 in all
// others. The first warp does this alone, while the others go on. turn: 0 and 1 from call to call.
__device__ inline int lamb_leave_sums(LambSumSq* sum, const LambArgs& z, int part, LambPart b, int turn) {
    __shared__ LambSumSq of_warp[2][LAMB_WARPS];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, last = 0;
    LambSumSq none = {0, 0};
    *sum = lamb_warp_sum(*sum);
    if (lane == 0) of_warp[turn][warp] = *sum;
    __syncthreads();
    if (warp > 0) return 0;
    *sum = lamb_warp_sum(lane < LAMB_WARPS ? of_warp[turn][lane] : none);
    if (lane == 0) {
        z.sum_sq[part] = *sum;
        __threadfence();
        last = atomicAdd(&z.arrivals[b.span], 1u) == (unsigned)b.parts - 1;
    }
    if (!__shfl_sync(ALL_LANES, last, 0)) return 0;
    __threadfence();
    *sum = none;
    const LambSumSq* of_part = z.sum_sq + z.spans[b.span].blocks;
#pragma unroll 8
    for (int i = lane; i < b.parts; i += WARP) sum->p += of_part[i].p, sum->u += of_part[i].u;
    *sum = lamb_warp_sum(*sum);
    return lane == 0;
}

// The second pass over a part. KEPT: u has the update directions. Otherwise they are computed anew.
template <int STORAGE, int KEPT>
__device__ inline void lamb_apply_pass(const real* u, const LambArgs& z, LambPart b, AdamWStep step, real ratio) {
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

// Write the sums of each span to its tensor's place in `tensors`.
template <int STORAGE> __global__ void __launch_bounds__(ADAMW_THREADS) lamb_moments_kernel(LambArgs z) {
    AdamWStep step = adamw_load_step(z.a);
    if (!step.is_taken) return;
    LambPart b = lamb_part(z, (int)blockIdx.x);
    LambSumSq sum = lamb_moments_pass<STORAGE, 0>(NULL, z, b, step);
    if (!lamb_leave_sums(&sum, z, (int)blockIdx.x, b, 0)) return;
    z.tensors[z.spans[b.span].tensor] = sum;
    z.arrivals[b.span] = 0;
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
    LambPart b = lamb_part(z, (int)blockIdx.x);
    lamb_apply_pass<STORAGE, 0>(NULL, z, b, step, z.ratio[b.span]);
}

typedef struct {
    int part;
    real ratio;
} LambNext;

// Wait for the ratio of the span of part `b`, if it is not NULL. Then, if `more`, take the next part that no block has;
// it is z.blocks or more when none is left. All threads get both. turn: 0 and 1 from call to call.
// The counter of parts wraps back to 0, because each block asks once in vain. The span's counter has one for each part
// whose sums have been left, one for the ratio, and one for each part for which the ratio has been read. The last
// reader clears it.
__device__ inline LambNext lamb_next(const LambArgs& z, const LambPart* b, int more, int turn) {
    __shared__ LambNext next[2];
    unsigned* arrivals = b ? &z.arrivals[b->span] : NULL;
    if (threadIdx.x == 0) {
        if (b) wait_for_count_gpu(arrivals, (unsigned)b->parts + 1);
        if (more) next[turn].part = (int)atomicInc(&z.arrivals[z.count], (unsigned)z.blocks + gridDim.x - 1);
        if (b) next[turn].ratio = __ldcg(&z.ratio[b->span]);
    }
    __syncthreads();
    if (b && threadIdx.x == 0 && atomicAdd(arrivals, 1u) == 2 * (unsigned)b->parts) *arrivals = 0;
    return next[turn];
}

// The second pass over the spans that have more parts than the grid can keep.
template <int STORAGE> __device__ inline void lamb_apply_left(const LambArgs& z, AdamWStep step, int turn) {
    int grid = (int)gridDim.x, lane = threadIdx.x % WARP;
    for (int first = 0; first < z.count; first += WARP) {
        int s = first + lane;
        unsigned left = __ballot_sync(ALL_LANES, s < z.count && lamb_blocks(z.spans[s].size) > z.kept * grid);
        for (; left; left &= left - 1) {
            ParamSpan span = z.spans[first + __ffs((int)left) - 1];
            for (int i = (int)blockIdx.x; i < lamb_blocks(span.size); i += grid) {
                LambPart b = lamb_part(z, span.blocks + i);
                lamb_apply_pass<STORAGE, 0>(NULL, z, b, step, lamb_next(z, &b, 0, turn++ % 2).ratio);
            }
        }
    }
}

// Both passes. All blocks must be resident at once (cooperative launch), as they wait for each other. This ends: a block
// that waits has made the first pass over all parts that it has taken, and as long as a part of a span is not taken,
// some block has room for it.
template <int STORAGE> __global__ void __launch_bounds__(ADAMW_THREADS, LAMB_RESIDENTS) lamb_update_kernel(LambArgs z) {
    extern __shared__ float4 lamb_shared[];
    LambPart* kept = (LambPart*)lamb_shared;  // the last z.kept parts, then their u
    real* u = (real*)(kept + z.kept);
    AdamWStep step = adamw_load_step(z.a);
    if (!step.is_taken) return;
    int taken = 0, turn = 0, part = lamb_next(z, NULL, 1, 1).part;
    for (;; turn++) {
        int more = part < z.blocks, oldest = turn - (z.kept - 1), place = oldest % z.kept;
        if (more) {
            LambPart b = lamb_part(z, part);
            if (threadIdx.x == 0) kept[turn % z.kept] = b;
            taken = turn + 1;
            LambSumSq sum = lamb_moments_pass<STORAGE, 1>(u + turn % z.kept * LAMB_ROOM, z, b, step);
            if (lamb_leave_sums(&sum, z, part, b, turn % 2)) {
                z.ratio[b.span] = lamb_ratio(z.spans[b.span].trust, sum.p, sum.u);
                __threadfence();
                atomicAdd(&z.arrivals[b.span], 1u);
            }
        } else if (oldest >= taken) {
            break;
        }
        LambPart b = kept[max(place, 0)];
        int fits = oldest >= 0 && b.parts <= z.kept * (int)gridDim.x;
        LambNext next = lamb_next(z, fits ? &b : NULL, more, turn % 2);
        if (fits) lamb_apply_pass<STORAGE, 1>(u + place * LAMB_ROOM, z, b, step, next.ratio);
        if (more) part = next.part;
    }
    lamb_apply_left<STORAGE>(z, step, turn);
}

// tensors: as in lamb_moments_kernel().
static inline LambArgs lamb_args(AdamWState a, LambSumSq* tensors, LambSpans of, OptimizerSettings h, Context* ctx) {
    CHECK(of.elements % ADAMW_VECTOR == 0 && a.first % ADAMW_VECTOR == 0 && (ADAMW_NARROW || !a.master));
    LambArgs z = {.a = a, .spans = of.spans, .count = of.count, .blocks = of.blocks, .c = adamw_coefficients(h)};
    z.weight_decay = (real)h.weight_decay, z.lr = (real)h.lr, z.rounding = h.rounding;
    z.tensors = tensors;
    z.arrivals = ctx->arrivals;
    size_t sums = (size_t)of.blocks * sizeof(LambSumSq), ratios = (size_t)of.count * sizeof(real);
    size_t arrivals = of.count >= DEVICE_ARRIVALS ? ((size_t)of.count + 1) * sizeof(unsigned) : 0;
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
    // 2048: the system's reserve per block and the kernel's other shared memory.
    size_t part = LAMB_ROOM * sizeof(real) + sizeof(LambPart),
           of_block = ctx->shared_of_multiprocessor / LAMB_RESIDENTS - 2048;
    z.kept = max_int(1, (int)(of_block / part));
    size_t shared = (size_t)z.kept * part;
    void (*kernel)(LambArgs) = lamb_update_kernel<STORAGE>;
    kernel_allow_shared(kernel, shared, ctx);
    unsigned grid = (unsigned)min_int(z.blocks, ctx->multiprocessors * LAMB_RESIDENTS);
    void* arguments[] = {&z};
    cudaCheck(cudaLaunchCooperativeKernel((const void*)kernel, dim3(grid), dim3(ADAMW_THREADS), arguments, shared,
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
