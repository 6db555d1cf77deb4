/* Copies in full precision of some tensors of the flat parameter buffer.
 *
 * A layernorm's weights lie near 1, where floatX has few digits: in bf16 the next number after 1 is 1.0078, and what a few
 * hundred updates change is not there. The forward pass reads such tensors from these copies instead.
 *
 *   forward    copies[s.to + i] = values[s.from + i],  i < s.size, for each span s: of the master weights, or where there
 *              are none of params
 *   forward_shard   the same of a rank's shard of the master weights, elements [begin, begin + n) of the flat buffer:
 *              copies[s.to + i] = master[s.from + i - begin] where the shard has it, else 0; the ranks' copies are then
 *              added, and x + 0 is x
 *
 * dtypes     copies and master real, params floatX. `count` spans, which lie where the ops run.
 * bytes      at most 2 sizeof(real) for each element; no arithmetic. */
#ifndef LLMC_WIDEN_H
#define LLMC_WIDEN_H

#ifdef __CUDACC__
#include "../device/device.cuh"
#endif
#include "../device/scope.h"

typedef struct {
    size_t from, to, size;  // elements
} WidenSpan;

#define WIDEN_FORWARD_BYTES(elements) (2.0 * (elements) * sizeof(real))

static inline void widen_forward_ref(real* copies, const real* params, const real* master, const WidenSpan* spans,
                                     int count) {
    const real* values = master ? master : params;
    for (int s = 0; s < count; s++)
        for (size_t i = 0; i < spans[s].size; i++) copies[spans[s].to + i] = values[spans[s].from + i];
}

static inline void widen_forward_shard_ref(real* copies, const real* master, size_t begin, size_t n,
                                           const WidenSpan* spans, int count) {
    for (int s = 0; s < count; s++)
        for (size_t i = 0; i < spans[s].size; i++) {
            size_t from = spans[s].from + i;
            copies[spans[s].to + i] = from >= begin && from < begin + n ? master[from - begin] : 0;
        }
}

#ifdef __CUDACC__
enum { WIDEN_THREADS = 256 };

// Block: a span.
static __global__ void __launch_bounds__(WIDEN_THREADS)
    widen_forward_kernel(real* copies, const floatX* params, const real* master, const WidenSpan* spans) {
    WidenSpan s = spans[blockIdx.x];
    for (size_t i = threadIdx.x; i < s.size; i += WIDEN_THREADS)
        copies[s.to + i] = master ? master[s.from + i] : to_float(params[s.from + i]);
}

// Block: a span.
static __global__ void __launch_bounds__(WIDEN_THREADS)
    widen_forward_shard_kernel(real* copies, const real* master, size_t begin, size_t n, const WidenSpan* spans) {
    WidenSpan s = spans[blockIdx.x];
    for (size_t i = threadIdx.x; i < s.size; i += WIDEN_THREADS) {
        size_t from = s.from + i;
        copies[s.to + i] = from >= begin && from < begin + n ? master[from - begin] : 0;
    }
}
#endif

// `elements`: of all spans together. master may be NULL.
static inline void widen_forward(real* copies, const floatX* params, const real* master, const WidenSpan* spans,
                                 int count, size_t elements, Context* ctx) {
    CHECK(count > 0);
    Scope scope = scope_open(ctx, "widen_forward", 0, WIDEN_FORWARD_BYTES(elements), "n=%zu", elements);
#ifdef __CUDACC__
    widen_forward_kernel<<<(unsigned)count, WIDEN_THREADS, 0, ctx->stream>>>(copies, params, master, spans);
    cudaCheck(cudaGetLastError());
#else
    widen_forward_ref(copies, params, master, spans, count);
#endif
    scope_close(&scope);
}

// master: of the n elements from `begin` on; n may be 0. Spans are those of the whole model, as is `elements`.
static inline void widen_forward_shard(real* copies, const real* master, size_t begin, size_t n, const WidenSpan* spans,
                                       int count, size_t elements, Context* ctx) {
    CHECK(count > 0);
    Scope scope = scope_open(ctx, "widen_forward_shard", 0, WIDEN_FORWARD_BYTES(elements), "n=%zu", elements);
#ifdef __CUDACC__
    widen_forward_shard_kernel<<<(unsigned)count, WIDEN_THREADS, 0, ctx->stream>>>(copies, master, begin, n, spans);
    cudaCheck(cudaGetLastError());
#else
    widen_forward_shard_ref(copies, master, begin, n, spans, count);
#endif
    scope_close(&scope);
}

#endif
