/* A kernel for each line of the formula, an element for each thread, as an optimizer written in tensor operations
 * launches them. Accesses are coalesced, so every fetched byte is used; but the gradient is read twice, and m and v
 * are written by one kernel and read by another. With master weights: 12 + 12 + 18 bytes an element,
 * where the op needs 30. */
// The element's span; NULL between spans.
static __device__ inline const ParamSpan* passes_span(const ParamSpan* spans, int count, size_t i) {
    const ParamSpan* span = spans + adamw_span_at(spans, count, i);
    return span->offset <= i && i < span->offset + span->size ? span : NULL;
}

static __global__ void passes_m_kernel(AdamWState a, size_t n, const ParamSpan* spans, int count, AdamWCoefficients c) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || !a.step->is_taken || !passes_span(spans, count, i)) return;
    a.m[i] = fmaf(c.beta1, a.m[i], c.beta1_rest * (a.step->gradient * a.grads[i]));
}

static __global__ void passes_v_kernel(AdamWState a, size_t n, const ParamSpan* spans, int count, AdamWCoefficients c) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || !a.step->is_taken || !passes_span(spans, count, i)) return;
    real g = a.step->gradient * a.grads[i];
    a.v[i] = fmaf(c.beta2_rest, g * g, c.beta2 * a.v[i]);
}

template <int STORAGE>
static __global__ void passes_params_kernel(AdamWState a, size_t n, const ParamSpan* spans, int count,
                                            AdamWCoefficients c, OptimizerSettings h) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || !a.step->is_taken) return;
    const ParamSpan* span = passes_span(spans, count, i);
    if (!span) return;
    real p = STORAGE == ADAMW_MASTER ? a.master[i] : to_float(a.params[i]), m = a.m[i];
    real shrink = adamw_shrink(*span, (real)(h.lr * h.weight_decay));
    if (c.cautious && m * p < 0) shrink = 1;
    p = __fmul_rn(p, shrink) - a.step->step_size * span->rate * m / fmaf(a.step->root_scale, sqrtf(a.v[i]), c.eps);
    adamw_store_one<STORAGE>(a, i / ADAMW_VECTOR * ADAMW_VECTOR, (int)(i % ADAMW_VECTOR), p, h.rounding);
}

static inline void rung_adamw_update(AdamWState a, size_t elements, const ParamSpan* spans, int count,
                                     OptimizerSettings h, Context* ctx) {
    if (!count) return;
    AdamWCoefficients c = adamw_coefficients(h);
    unsigned blocks = blocks_for(elements, 256);
    passes_m_kernel<<<blocks, 256, 0, ctx->stream>>>(a, elements, spans, count, c);
    passes_v_kernel<<<blocks, 256, 0, ctx->stream>>>(a, elements, spans, count, c);
    if (!ADAMW_NARROW)
        passes_params_kernel<ADAMW_EXACT><<<blocks, 256, 0, ctx->stream>>>(a, elements, spans, count, c, h);
    else if (a.master)
        passes_params_kernel<ADAMW_MASTER><<<blocks, 256, 0, ctx->stream>>>(a, elements, spans, count, c, h);
    else passes_params_kernel<ADAMW_ROUNDED><<<blocks, 256, 0, ctx->stream>>>(a, elements, spans, count, c, h);
    cudaCheck(cudaGetLastError());
}
