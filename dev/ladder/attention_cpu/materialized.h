/* The definition, one step after the other for each head: the T x T scores, the softmax of each row, the sums over
 * V. For 1,024 tokens the scores of a head are 4 MB, which leave the nearest caches before they are used again. The
 * inner loops have one sum each, and the library's exp takes one number at a time. */
static inline void materialized_head(floatX* out, real* lse, real* p, const floatX* qkv, const Sequences* s, int b,
                                     int head, AttentionShape shape) {
    size_t HS = (size_t)shape.HS, C = (size_t)shape.NH * HS, row = (size_t)s->cu_seqlens[b];
    int T = s->cu_seqlens[b + 1] - s->cu_seqlens[b];
    const floatX *q = qkv + row * 3 * C + (size_t)head * HS, *k = q + C, *v = k + C;
    for (int t = 0; t < T; t++)
        for (int key = 0; key < attention_visible(shape.mask, t, T); key++) {
            real dot = 0;
            for (size_t i = 0; i < HS; i++) dot += q[(size_t)t * 3 * C + i] * k[(size_t)key * 3 * C + i];
            p[(size_t)t * (size_t)T + (size_t)key] = (real)((double)dot / sqrt((double)HS));
        }
    for (int t = 0; t < T; t++) {
        real *s_row = p + (size_t)t * (size_t)T, max = -INFINITY;
        double sum = 0;
        int visible = attention_visible(shape.mask, t, T);
        for (int key = 0; key < visible; key++) max = s_row[key] > max ? s_row[key] : max;
        for (int key = 0; key < visible; key++) sum += exp((double)(s_row[key] - max));
        for (int key = 0; key < visible; key++)
            s_row[key] = (real)(exp((double)(s_row[key] - max)) / sum *
                                (shape.dropout.threshold
                                     ? attention_keep_ref(shape.dropout, sequences_number(s, b), head, t, key)
                                     : 1));
        lse[(size_t)head * (size_t)s->rows + row + (size_t)t] = (real)((double)max + log(sum));
    }
    for (int t = 0; t < T; t++)
        for (size_t i = 0; i < HS; i++) {
            real sum = 0;
            for (int key = 0; key < attention_visible(shape.mask, t, T); key++)
                sum += p[(size_t)t * (size_t)T + (size_t)key] * v[(size_t)key * 3 * C + i];
            out[(row + (size_t)t) * C + (size_t)head * HS + i] = sum;
        }
}

static inline void materialized_attention_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s,
                                                  AttentionShape shape, Context* ctx) {
    real* p = (real*)device_scratch(ctx, (size_t)s->max_length * (size_t)s->max_length * sizeof *p);
    for (int b = 0; b < s->count; b++)
        for (int head = 0; head < shape.NH; head++) materialized_head(out, lse, p, qkv, s, b, head, shape);
}
