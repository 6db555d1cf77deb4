/* Full-precision copies of some tensors of the flat parameter buffer.
 *
 * Layernorm weights are near 1, where floatX is coarse: in bf16 the next value after 1 is 1.0078, so rounding loses the
 * change of a few hundred updates. The forward pass reads such tensors from these copies instead.
 *
 *   forward    copies[s.to + i] = values[s.from + i],  i < s.size, for each span s; values are the master weights, or
 *              params if there are none
 *   forward_shard   the same for a rank's shard of the master weights, elements [begin, begin + n) of the flat buffer:
 *              copies[s.to + i] = master[s.from + i - begin] if the element is in the shard, else 0. The sum of the
 *              ranks' copies is then exact, because x + 0 is x.
 *
 * dtypes     copies and master real, params floatX. The `count` spans are on the device.
 * bytes      at most 2 sizeof(real) for each element; no arithmetic. */
#ifndef LLMC_OPS_CAST_TO_FP32_H
#define LLMC_OPS_CAST_TO_FP32_H

#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif
#include "llmc/device/scope.h"

typedef struct {
    size_t from, to, size;  // elements
} CastSpan;

#define CAST_TO_FP32_FORWARD_BYTES(elements) (2.0 * (elements) * sizeof(real))

static inline void cast_to_fp32_ref(real* copies, const real* params, const real* master, const CastSpan* spans,
                                    int count) {
    const real* values = master ? master : params;
    for (int s = 0; s < count; s++)
        for (size_t i = 0; i < spans[s].size; i++) copies[spans[s].to + i] = values[spans[s].from + i];
}

static inline void cast_to_fp32_shard_ref(real* copies, const real* master, size_t begin, size_t n,
                                          const CastSpan* spans, int count) {
    for (int s = 0; s < count; s++)
        for (size_t i = 0; i < spans[s].size; i++) {
            size_t from = spans[s].from + i;
            copies[spans[s].to + i] = from >= begin && from < begin + n ? master[from - begin] : 0;
        }
}

#ifdef __CUDACC__
enum { CAST_TO_FP32_THREADS = 256 };

// One block per span.
static __global__ void __launch_bounds__(CAST_TO_FP32_THREADS)
    cast_to_fp32_kernel(real* copies, const floatX* params, const real* master, const CastSpan* spans) {
    CastSpan s = spans[blockIdx.x];
    for (size_t i = threadIdx.x; i < s.size; i += CAST_TO_FP32_THREADS)
        copies[s.to + i] = master ? master[s.from + i] : to_float(params[s.from + i]);
}

// One block per span.
static __global__ void __launch_bounds__(CAST_TO_FP32_THREADS)
    cast_to_fp32_shard_kernel(real* copies, const real* master, size_t begin, size_t n, const CastSpan* spans) {
    CastSpan s = spans[blockIdx.x];
    for (size_t i = threadIdx.x; i < s.size; i += CAST_TO_FP32_THREADS) {
        size_t from = s.from + i;
        copies[s.to + i] = from >= begin && from < begin + n ? master[from - begin] : 0;
    }
}
#endif

// `elements` is the total size of all spans. master may be NULL.
static inline void cast_to_fp32(real* copies, const floatX* params, const real* master, const CastSpan* spans,
                                int count, size_t elements, Context* ctx) {
    CHECK(count > 0);
    Scope scope = scope_open(ctx, "cast_to_fp32", 0, CAST_TO_FP32_FORWARD_BYTES(elements), "n=%zu", elements);
#ifdef __CUDACC__
    cast_to_fp32_kernel<<<(unsigned)count, CAST_TO_FP32_THREADS, 0, ctx->stream>>>(copies, params, master, spans);
    cudaCheck(cudaGetLastError());
#else
    cast_to_fp32_ref(copies, params, master, spans, count);
#endif
    scope_close(&scope);
}

// master holds the n elements from `begin` on; n may be 0. The spans and `elements` are those of the whole model.
static inline void cast_to_fp32_shard(real* copies, const real* master, size_t begin, size_t n, const CastSpan* spans,
                                      int count, size_t elements, Context* ctx) {
    CHECK(count > 0);
    Scope scope = scope_open(ctx, "cast_to_fp32_shard", 0, CAST_TO_FP32_FORWARD_BYTES(elements), "n=%zu", elements);
#ifdef __CUDACC__
    cast_to_fp32_shard_kernel<<<(unsigned)count, CAST_TO_FP32_THREADS, 0, ctx->stream>>>(copies, master, begin, n,
                                                                                         spans);
    cudaCheck(cudaGetLastError());
#else
    cast_to_fp32_shard_ref(copies, master, begin, n, spans, count);
#endif
    scope_close(&scope);
}

#endif
