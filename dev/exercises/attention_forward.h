/* Exercise 8, attention_forward: flash attention. The scores of a query are used as they are made, so there is no
 * T x T matrix.
 *
 *   s[q, k]  = Q[q] . K[k] / sqrt(HS)            for the keys k that q sees, in q's own sequence and head
 *   lse[q]   = log(sum over k of exp(s[q, k]))
 *   out[q]   = sum over k of exp(s[q, k] - lse[q]) V[k]
 *
 * One pass over the keys of a query: keep the largest score m so far, l = the sum of exp(s - m), and o [HS] = the
 * sum of exp(s - m) V; m begins at -INFINITY, l and o at 0. A new score s that is larger than m makes m' = s; then l
 * and o are multiplied by exp(m - m') first. At the end out = o / l, lse = m + log(l).
 *
 * qkv [N, 3C]: row n holds Q, K, V of C = NH * HS channels each; head h of them begins at h * HS. So channel i of head
 * h of K in row n is qkv[n * 3 * C + C + h * HS + i]. out [N, C], head h at h * HS; lse [NH, N]: (h, n) is at h * N +
 * n. NH is shape.NH, HS is shape.HS. N = s->rows rows hold s->count sequences: number b is rows s->cu_seqlens[b] to
 * s->cu_seqlens[b + 1] - 1, and may be empty. shape.mask CAUSAL: a query sees the keys up to its own position, that
 * one included; FULL: all keys of its sequence. Dropout is off in the cases. out and lse are overwritten. In this build
 * floatX and real are both float. ctx is the device; the CPU does not need it. */
static void exercise_attention_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s,
                                       AttentionShape shape, Context* ctx) {
    // your code
}
