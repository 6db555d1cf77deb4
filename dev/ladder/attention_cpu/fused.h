/* Faster than materialized: a query at a time. Its scores are T numbers, which stay in the nearest cache until they
 * have been used. And the loops vectorize: a score is summed in lanes, the exponential is one that has no branches
 * (llmc/ops/common/vector_math.h), and the output adds up whole rows of V, its channels in lanes. */
static inline void fused_query(floatX* out, real* lse, real* p, const floatX* q, const floatX* k, int visible,
                               size_t stride, int HS) {
    const floatX* v = k + stride / 3;
    real factor = (real)(1 / sqrt((double)HS)), max = -INFINITY, sum = 0;
    for (int key = 0; key < visible; key++) {
        const floatX* row = k + (size_t)key * stride;
        real dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int i = 0; i < HS; i++) dot += q[i] * row[i];
        p[key] = dot * factor;
    }
#pragma omp simd reduction(max : max)
    for (int key = 0; key < visible; key++) max = p[key] > max ? p[key] : max;
    for (int key = 0; key < visible; key++) p[key] = real_exp(p[key] - max);
#pragma omp simd reduction(+ : sum)
    for (int key = 0; key < visible; key++) sum += p[key];
    *lse = (real)((double)max + log((double)sum));
    for (int i = 0; i < HS; i++) out[i] = 0;
    for (int key = 0; key < visible; key++) {
        const floatX* row = v + (size_t)key * stride;
        real weight = p[key] / sum;
#pragma omp simd
        for (int i = 0; i < HS; i++) out[i] += weight * row[i];
    }
}

// The same with dropout's factors on the probabilities.
static inline void fused_query_dropped(floatX* out, real* p, const floatX* v, int visible, size_t stride, int HS,
                                       const real* keep, real sum) {
    for (int i = 0; i < HS; i++) out[i] = 0;
    for (int key = 0; key < visible; key++)
        for (int i = 0; i < HS; i++) out[i] += p[key] / sum * keep[key] * v[(size_t)key * stride + (size_t)i];
}

static inline void fused_attention_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s,
                                           AttentionShape shape, Context* ctx) {
    size_t HS = (size_t)shape.HS, C = (size_t)shape.NH * HS, longest = round_up((size_t)s->max_length, 8);
    real *p = (real*)device_scratch(ctx, 2 * longest * sizeof *p), *keep = p + longest;
    for (int b = 0; b < s->count; b++)
        for (int head = 0; head < shape.NH; head++) {
            size_t row = (size_t)s->cu_seqlens[b], at = row * 3 * C + (size_t)head * HS;
            int T = s->cu_seqlens[b + 1] - s->cu_seqlens[b];
            for (int t = 0; t < T; t++) {
                int visible = attention_visible(shape.mask, t, T);
                floatX* to = out + (row + (size_t)t) * C + (size_t)head * HS;
                real* lse_to = lse + (size_t)head * (size_t)s->rows + row + (size_t)t;
                fused_query(to, lse_to, p, qkv + at + (size_t)t * 3 * C, qkv + at + C, visible, 3 * C, shape.HS);
                if (!shape.dropout.threshold) continue;
                real sum = 0;
                for (int key = 0; key < visible; key++) sum += p[key];
                attention_dropout_factors(keep, shape.dropout, sequences_number(s, b), head, t, visible);
                fused_query_dropped(to, p, qkv + at + 2 * C, visible, 3 * C, shape.HS, keep, sum);
            }
        }
}
