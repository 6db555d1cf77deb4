/* Faster than passes: one thread reads an element's gradient, moments and parameter, and writes all but the gradient.
 * No byte crosses the memory bus twice, so there are 30 bytes an element instead of 42, and an element's tensor is
 * looked up once instead of three times. What limits it now are instructions: that lookup is a binary search, and
 * each load and store moves two or four bytes. */
// The arithmetic and how parameters are stored are the shipped op's: adamw_element() and adamw_store_one().
template <int STORAGE>
static __global__ void fused_kernel(AdamWState a, size_t n, const ParamSpan* spans, int count, AdamWCoefficients c,
                                    OptimizerSettings h) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    AdamWStep step = adamw_load_step(a);
    ParamSpan span = spans[adamw_span_at(spans, count, i)];
    if (!step.is_taken || i < span.offset || i >= span.offset + span.size) return;
    real p = STORAGE == ADAMW_MASTER ? a.master[i] : to_float(a.params[i]), m = a.m[i], v = a.v[i];
    adamw_element(&p, &m, &v, a.grads[i], span.rate, adamw_shrink(span, (real)(h.lr * h.weight_decay)), &step, &c);
    a.m[i] = m, a.v[i] = v;
    adamw_store_one<STORAGE>(a, i / ADAMW_VECTOR * ADAMW_VECTOR, (int)(i % ADAMW_VECTOR), p, h.rounding);
}

static inline void rung_adamw_update(AdamWState a, size_t elements, const ParamSpan* spans, int count,
                                     OptimizerSettings h, Context* ctx) {
    if (!count) return;
    AdamWCoefficients c = adamw_coefficients(h);
    unsigned blocks = blocks_for(elements, 256);
    if (!ADAMW_NARROW) fused_kernel<ADAMW_EXACT><<<blocks, 256, 0, ctx->stream>>>(a, elements, spans, count, c, h);
    else if (a.master) fused_kernel<ADAMW_MASTER><<<blocks, 256, 0, ctx->stream>>>(a, elements, spans, count, c, h);
    else fused_kernel<ADAMW_ROUNDED><<<blocks, 256, 0, ctx->stream>>>(a, elements, spans, count, c, h);
    cudaCheck(cudaGetLastError());
}
