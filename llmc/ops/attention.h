/* Attention over packed sequences; no T x T matrix outlives a launch.
 *
 *   s[q, k]    = Q[q] . K[k] / sqrt(HS)                 k in q's own sequence; CAUSAL: k <= q
 *   lse[q]     = log(sum over k of exp(s[q, k]))
 *   P[q, k]    = exp(s[q, k] - lse[q])
 *   D[q, k]    = P[q, k] * keep[q, k]                   keep is 0 or 1 / (1 - p)
 *   out[q]     = sum over k of D[q, k] V[k]
 *
 *   delta[q]   = dout[q] . out[q]                       = sum over k of dD[q, k] D[q, k], dropout or not
 *   dV[k]      = sum over q of D[q, k] dout[q]
 *   dP[q, k]   = keep[q, k] (dout[q] . V[k])
 *   ds[q, k]   = P[q, k] (dP[q, k] - delta[q])
 *   dQ[q]      = sum over k of ds[q, k] K[k] / sqrt(HS)
 *   dK[k]      = sum over q of ds[q, k] Q[q] / sqrt(HS)
 *
 * Shapes: qkv, dqkv [N, 3C], a row being Q | K | V, each [NH, HS]; out, dout [N, C]; lse [NH, N]; C = NH * HS.
 * Any NH, HS and sequence lengths. dqkv is SET. Dropout bits belong to (sequence, head, query, key), the last
 * two counted inside the sequence, so packing cannot change them; 16 bits decide one pair (base/rng.h).
 * Numerics: products and softmax accumulate in real; log in double. What the backward pass needs of the forward
 * pass is out and lse: P is computed again.
 * Source: Dao et al., "FlashAttention", arXiv 2205.14135, for lse, delta and the recomputation. */
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H

#include "../base/rng.h"
#include "../device/scope.h"
#include "../device/vector_math.h"

typedef struct {
    int NH, HS;
    Mask mask;
    Dropout dropout;  // on the probabilities
} AttentionShape;

// Of one head; `pairs` counts the (query, key) pairs that the mask lets through.
#define ATTENTION_FORWARD_FLOPS(pairs, NH, HS) (4.0 * (pairs) * (NH) * (HS))
#define ATTENTION_BACKWARD_FLOPS(pairs, NH, HS) (10.0 * (pairs) * (NH) * (HS))
#define ATTENTION_FORWARD_BYTES(N, NH, HS) (4.0 * (N) * (NH) * (HS) * sizeof(floatX) + 1.0 * (N) * (NH) * sizeof(real))
#define ATTENTION_BACKWARD_BYTES(N, NH, HS) (8.0 * (N) * (NH) * (HS) * sizeof(floatX) + 1.0 * (N) * (NH) * sizeof(real))

// How many keys of its sequence, from the first on, a query may see.
HOST_DEVICE static inline int attention_visible(Mask mask, int query, int length) {
    return mask == CAUSAL ? query + 1 : length;
}

// Pairs of query and key that the mask lets through, in one head.
static inline double attention_pairs(const Sequences* s, Mask mask) {
    return mask == CAUSAL ? 0.5 * (double)(s->squares + s->rows) : (double)s->squares;
}

static inline Scope attention_scope(Context* ctx, Direction direction, const Sequences* s, AttentionShape shape) {
    double pairs = attention_pairs(s, shape.mask);
    int N = s->rows, NH = shape.NH, HS = shape.HS, forward = direction == FORWARD;
    return scope_open(ctx, forward ? "attention_forward" : "attention_backward",
                      forward ? ATTENTION_FORWARD_FLOPS(pairs, NH, HS) : ATTENTION_BACKWARD_FLOPS(pairs, NH, HS),
                      forward ? ATTENTION_FORWARD_BYTES(N, NH, HS) : ATTENTION_BACKWARD_BYTES(N, NH, HS),
                      "N=%d sequences=%d NH=%d HS=%d", N, s->count, NH, HS);
}

// ---------------------------------------------------------------------------------------------------------
// References

// What dropout multiplies one probability with.
static inline double attention_keep_ref(Dropout d, uint32_t sequence, int head, int query, int key) {
    Philox r = dropout_bits_attention(d, sequence, (uint32_t)head, (uint32_t)query, (uint32_t)key / 8);
    return dropout_keeps_attention(r, key % 8, dropout_threshold_attention(d)) ? (double)d.scale : 0;
}

// p[k] = P[query, k] for the keys that the query may see; returns lse. Rows of qkv are `stride` apart.
static inline double attention_probabilities_ref(double* p, const real* qkv, int query, int visible, int head,
                                                 AttentionShape shape) {
    size_t C = (size_t)shape.NH * (size_t)shape.HS, stride = 3 * C, channel = (size_t)head * (size_t)shape.HS;
    const real* q = qkv + (size_t)query * stride + channel;
    double max = -INFINITY, sum = 0;
    for (int k = 0; k < visible; k++) {
        const real* key = qkv + (size_t)k * stride + C + channel;
        double dot = 0;
        for (int i = 0; i < shape.HS; i++) dot += (double)q[i] * (double)key[i];
        p[k] = dot / sqrt((double)shape.HS);
        max = fmax(max, p[k]);
    }
    for (int k = 0; k < visible; k++) sum += exp(p[k] - max);
    for (int k = 0; k < visible; k++) p[k] = exp(p[k] - max) / sum;
    return max + log(sum);
}

static inline void attention_forward_ref(real* out, real* lse, const real* qkv, const Sequences* s,
                                         AttentionShape shape) {
    size_t N = (size_t)s->rows, HS = (size_t)shape.HS, C = (size_t)shape.NH * HS;
    double* p = (double*)xmalloc((size_t)s->max_length * sizeof *p);
    for (int b = 0; b < s->count; b++) {
        size_t row = (size_t)s->cu_seqlens[b];
        int T = s->cu_seqlens[b + 1] - s->cu_seqlens[b];
        for (int h = 0; h < shape.NH; h++) {
            for (int q = 0; q < T; q++) {
                int visible = attention_visible(shape.mask, q, T);
                lse[(size_t)h * N + row + (size_t)q] =
                    (real)attention_probabilities_ref(p, qkv + row * 3 * C, q, visible, h, shape);
                for (int k = 0; k < visible; k++)
                    p[k] *= attention_keep_ref(shape.dropout, sequences_number(s, b), h, q, k);
                for (size_t i = 0; i < HS; i++) {
                    double sum = 0;
                    for (int k = 0; k < visible; k++)
                        sum += p[k] * (double)qkv[(row + (size_t)k) * 3 * C + 2 * C + (size_t)h * HS + i];
                    out[(row + (size_t)q) * C + (size_t)h * HS + i] = (real)sum;
                }
            }
        }
    }
    free(p);
}

// From the definition alone: needs neither out nor lse, so it also checks that delta and lse say the same.
static inline void attention_backward_ref(real* dqkv, const real* dout, const real* qkv, const Sequences* s,
                                          AttentionShape shape) {
    size_t N = (size_t)s->rows, HS = (size_t)shape.HS, C = (size_t)shape.NH * HS;
    double factor = 1 / sqrt((double)shape.HS);
    double* p = (double*)xmalloc((size_t)s->max_length * sizeof *p);
    double* dp = (double*)xmalloc((size_t)s->max_length * sizeof *dp);
    double* sums = (double*)xcalloc(N * 3 * C, sizeof *sums);
    for (int b = 0; b < s->count; b++) {
        size_t row = (size_t)s->cu_seqlens[b];
        int T = s->cu_seqlens[b + 1] - s->cu_seqlens[b];
        for (int h = 0; h < shape.NH; h++) {
            size_t base = row * 3 * C + (size_t)h * HS;  // of this sequence's and head's Q
            for (int q = 0; q < T; q++) {
                int visible = attention_visible(shape.mask, q, T);
                const real* g = dout + (row + (size_t)q) * C + (size_t)h * HS;
                size_t at_q = base + (size_t)q * 3 * C;
                double mean = 0;
                attention_probabilities_ref(p, qkv + row * 3 * C, q, visible, h, shape);
                for (int k = 0; k < visible; k++) {
                    size_t at_v = base + (size_t)k * 3 * C + 2 * C;
                    double keep = attention_keep_ref(shape.dropout, sequences_number(s, b), h, q, k), dot = 0;
                    for (size_t i = 0; i < HS; i++) {
                        dot += (double)g[i] * (double)qkv[at_v + i];
                        sums[at_v + i] += p[k] * keep * (double)g[i];
                    }
                    dp[k] = dot * keep;
                    mean += p[k] * dp[k];
                }
                for (int k = 0; k < visible; k++) {
                    size_t at_k = base + (size_t)k * 3 * C + C;
                    double ds = p[k] * (dp[k] - mean) * factor;
                    for (size_t i = 0; i < HS; i++) {
                        sums[at_q + i] += ds * (double)qkv[at_k + i];
                        sums[at_k + i] += ds * (double)qkv[at_q + i];
                    }
                }
            }
        }
    }
    for (size_t i = 0; i < N * 3 * C; i++) dqkv[i] = (real)sums[i];
    free(sums);
    free(dp);
    free(p);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: flash if it is asked for (ctx->attention), tensor cores take floatX, and a head is read in whole 16-byte pieces;
// else explicit. Flash has a Hopper version; which one is taken depends on the shape and the GPU alone.

#include "attention_explicit.cuh"
#include "attention_hopper_backward.cuh"

static inline int attention_is_flash(int HS, const Context* ctx) {
#ifdef ATTENTION_FLASH
    return ctx->attention == FLASH && HS % 8 == 0 && HS <= 128;
#else
    return (void)HS, (void)ctx, 0;
#endif
}

// Scratch that a launch takes at most, for N rows in so many sequences of T at most.
static inline size_t attention_scratch_bytes(int N, int sequences, int T, AttentionShape shape, const Context* ctx) {
#ifdef ATTENTION_FLASH
    if (attention_is_flash(shape.HS, ctx)) {
        int is_hopper = HOPPER_BUILD && ctx->capability == 90;
        size_t hopper = is_hopper ? hopper_scratch_bytes(N, sequences, shape.NH) : 0;
        size_t flash = flash_rows_bytes(N, shape.NH), bits = shape.dropout.threshold ? draw_bytes(N, T, shape.NH) : 0;
        return bits + (hopper > flash ? hopper : flash);
    }
#endif
    return (void)N, (void)sequences, (void)ctx, 2 * explicit_scratch_bytes(T, shape.NH);
}

static inline void attention_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s,
                                     AttentionShape shape, Context* ctx) {
    if (s->rows == 0) return;
    Scope scope = attention_scope(ctx, FORWARD, s, shape);
    if (!attention_is_flash(shape.HS, ctx)) explicit_forward(out, lse, qkv, s, shape, ctx);
#ifdef ATTENTION_FLASH
    else if (hopper_takes(FORWARD, shape, ctx) && shape.HS <= 64) hopper_forward<64>(out, lse, qkv, s, shape, ctx);
    else if (hopper_takes(FORWARD, shape, ctx)) hopper_forward<128>(out, lse, qkv, s, shape, ctx);
    else if (shape.HS <= 64) flash_forward<64>(out, lse, qkv, s, shape, ctx);
    else flash_forward<128>(out, lse, qkv, s, shape, ctx);
#endif
    scope_close(&scope);
}

static inline void attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                      const real* lse, const Sequences* s, AttentionShape shape, Context* ctx) {
    if (s->rows == 0) return;
    Scope scope = attention_scope(ctx, BACKWARD, s, shape);
    if (!attention_is_flash(shape.HS, ctx)) explicit_backward(dqkv, dout, qkv, out, lse, s, shape, ctx);
#ifdef ATTENTION_FLASH
    else if (hopper_takes(BACKWARD, shape, ctx)) hopper_backward(dqkv, dout, qkv, out, lse, s, shape, ctx);
    else if (shape.HS <= 64) flash_backward<64>(dqkv, dout, qkv, out, lse, s, shape, ctx);
    else flash_backward<128>(dqkv, dout, qkv, out, lse, s, shape, ctx);
#endif
    scope_close(&scope);
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU: a work item is one head of one sequence. It copies its operands into panels, takes ATTENTION_BLOCK
// queries at a time, and does all products with one register-blocked tile. It alone writes its rows and
// channels, so the number of threads changes nothing.

// The right operand of a product, [K, columns], is stored as panels of ATTENTION_PANEL columns: [columns /
// panel][K][panel]. A tile of the product is ATTENTION_ROWS rows of one panel and stays in registers: 12 of
// AVX2's 16.
typedef real AttentionVector __attribute__((vector_size(32), aligned(sizeof(real)), may_alias));
enum {
    ATTENTION_VECTOR = 32 / sizeof(real),
    ATTENTION_PANEL = 2 * ATTENTION_VECTOR,
    ATTENTION_ROWS = 6,
    ATTENTION_GROUPS = 4,
    ATTENTION_BLOCK = ATTENTION_GROUPS * ATTENTION_ROWS
};

// c[i, j] (+)= sum over l < K of a[i * a_row + l * a_step] * panel[l, j] for one tile.
static inline void attention_tile(real* c, size_t c_row, const real* a, size_t a_row, size_t a_step, const real* panel,
                                  int K, Mode mode) {
    AttentionVector sum[ATTENTION_ROWS][2];
    for (int i = 0; i < ATTENTION_ROWS; i++)
        for (int j = 0; j < 2; j++) {
            const AttentionVector zero = {0};
            const AttentionVector* old = (const AttentionVector*)(c + (size_t)i * c_row + j * ATTENTION_VECTOR);
            sum[i][j] = mode == ADD ? *old : zero;
        }
    for (int l = 0; l < K; l++, a += a_step, panel += ATTENTION_PANEL) {
        AttentionVector left = *(const AttentionVector*)panel;
        AttentionVector right = *(const AttentionVector*)(panel + ATTENTION_VECTOR);
        for (int i = 0; i < ATTENTION_ROWS; i++) {
            real x = a[(size_t)i * a_row];
            sum[i][0] += x * left;
            sum[i][1] += x * right;
        }
    }
    for (int i = 0; i < ATTENTION_ROWS; i++)
        for (int j = 0; j < 2; j++) *(AttentionVector*)(c + (size_t)i * c_row + j * ATTENTION_VECTOR) = sum[i][j];
}

// Panels whose columns are the rows of x: panel[l, j] = x[j, l]. Columns past `rows` become zero.
static inline void attention_pack_rows(real* panels, const real* x, size_t stride, int rows, int columns) {
    for (int j0 = 0; j0 < rows; j0 += ATTENTION_PANEL, panels += (size_t)columns * ATTENTION_PANEL) {
        int n = min_int(ATTENTION_PANEL, rows - j0);
        if (n < ATTENTION_PANEL) memset(panels, 0, (size_t)columns * ATTENTION_PANEL * sizeof(real));
        for (int j = 0; j < n; j++) {
            const real* row = x + (size_t)(j0 + j) * stride;
            for (int l = 0; l < columns; l++) panels[l * ATTENTION_PANEL + j] = row[l];
        }
    }
}

// Panels whose columns are the columns of x, times `scale`: panel[l, j] = scale * x[l, j].
static inline void attention_pack_columns(real* panels, const real* x, size_t stride, int rows, int columns,
                                          real scale) {
    for (int j0 = 0; j0 < columns; j0 += ATTENTION_PANEL) {
        int n = min_int(ATTENTION_PANEL, columns - j0);
        for (int l = 0; l < rows; l++, panels += ATTENTION_PANEL) {
            for (int j = 0; j < n; j++) panels[j] = scale * x[(size_t)l * stride + (size_t)(j0 + j)];
            for (int j = n; j < ATTENTION_PANEL; j++) panels[j] = 0;
        }
    }
}

// rows [ATTENTION_BLOCK, HS] = scale * x; zeros past the `count` rows that exist.
static inline void attention_copy_rows(real* rows, const real* x, size_t stride, int count, int HS, real scale) {
    for (int i = 0; i < count; i++)
        for (int l = 0; l < HS; l++) rows[i * HS + l] = scale * x[(size_t)i * stride + (size_t)l];
    memset(rows + count * HS, 0, (size_t)((ATTENTION_BLOCK - count) * HS) * sizeof(real));
}

// keep[k] for the keys 0 .. n - 1 of one row, rounded up to whole groups of eight.
static inline void attention_draw(real* keep, Dropout d, uint32_t sequence, int head, int query, int n) {
    uint32_t threshold = dropout_threshold_attention(d);
    for (int group = 0; 8 * group < n; group++) {
        Philox r = dropout_bits_attention(d, sequence, (uint32_t)head, (uint32_t)query, (uint32_t)group);
        for (int i = 0; i < 8; i++) keep[8 * group + i] = dropout_keeps_attention(r, i, threshold) ? (real)d.scale : 0;
    }
}

// s[k] = exp(s[k] - max) for k < n, zero from there to `width` (whole panels). *sum is theirs; returns max.
// Maximum and sum go through one panel of lanes: the order is fixed, and the loops vectorise.
static inline real attention_exponentials(real* s, int n, int width, real* sum) {
    real lane[ATTENTION_PANEL], max, total = 0;
    int whole = (int)round_up((size_t)n, ATTENTION_PANEL);
    for (int k = n; k < whole; k++) s[k] = -INFINITY;
    memcpy(lane, s, sizeof lane);
    for (int k = ATTENTION_PANEL; k < whole; k += ATTENTION_PANEL)
        for (int j = 0; j < ATTENTION_PANEL; j++) lane[j] = s[k + j] > lane[j] ? s[k + j] : lane[j];
    max = lane[0];
    for (int j = 1; j < ATTENTION_PANEL; j++) max = lane[j] > max ? lane[j] : max;
    for (int k = 0; k < whole; k++) s[k] = real_exp(s[k] - max);
    memset(s + n, 0, (size_t)(width - n) * sizeof(real));
    memcpy(lane, s, sizeof lane);
    for (int k = ATTENTION_PANEL; k < whole; k += ATTENTION_PANEL)
        for (int j = 0; j < ATTENTION_PANEL; j++) lane[j] += s[k + j];
    for (int j = 0; j < ATTENTION_PANEL; j++) total += lane[j];
    *sum = total;
    return max;
}

// Sizes of one item's copies and where they lie in its thread's scratch. `at` counts reals.
typedef struct {
    size_t keys;      // T rounded up to whole panels
    size_t channels;  // HS rounded up to whole panels
    size_t width;     // of a row of scores: one panel more, so that tiles may read past the keys, and so that
                      // rows of a power of two do not fall on the same cache lines
    size_t at;
} AttentionScratch;

static inline AttentionScratch attention_scratch(int T, int HS) {
    AttentionScratch a;
    a.keys = round_up((size_t)T, ATTENTION_PANEL);
    a.channels = round_up((size_t)HS, ATTENTION_PANEL);
    a.width = a.keys + ATTENTION_PANEL;
    a.at = 0;
    return a;
}

// The next `count` reals, in whole cache lines, of the scratch that begins at `base`; NULL only counts.
static inline real* attention_take(AttentionScratch* a, real* base, size_t count) {
    real* p = base ? base + a->at : NULL;
    a->at += round_up(count, 64 / sizeof(real));
    return p;
}

// What one item works on.
typedef struct {
    real *k_rows, *v_rows;        // K and V of the head, panels with a key a column
    real *k_columns, *v_columns;  // panels with a channel a column
    real *q, *g;                  // [BLOCK, HS] queries / sqrt(HS) and their dout
    real *q_columns, *g_columns;  // the same in panels
    real *s, *ds;                 // [BLOCK, width] scores, then probabilities; dP, then ds
    real *o, *dk, *dv;            // [BLOCK, channels], [keys + ROWS, channels] sums
    real* keep;                   // [width] dropout's factors of one row
} AttentionBuffers;

static inline AttentionBuffers attention_buffers(AttentionScratch* a, real* base, int HS, Direction direction) {
    AttentionBuffers b;
    size_t by_key = a->keys * (size_t)HS, by_channel = a->channels * a->keys, block = ATTENTION_BLOCK;
    memset(&b, 0, sizeof b);
    b.k_rows = attention_take(a, base, by_key);
    b.q = attention_take(a, base, block * (size_t)HS);
    b.s = attention_take(a, base, block * a->width);
    b.o = attention_take(a, base, block * a->channels);
    b.keep = attention_take(a, base, a->width);
    if (direction == FORWARD) {
        b.v_columns = attention_take(a, base, by_channel);
        return b;
    }
    b.v_rows = attention_take(a, base, by_key);
    b.k_columns = attention_take(a, base, by_channel);
    b.g = attention_take(a, base, block * (size_t)HS);
    b.q_columns = attention_take(a, base, block * a->channels);
    b.g_columns = attention_take(a, base, block * a->channels);
    b.ds = attention_take(a, base, block * a->width);
    b.dk = attention_take(a, base, (a->keys + ATTENTION_ROWS) * a->channels);
    b.dv = attention_take(a, base, (a->keys + ATTENTION_ROWS) * a->channels);
    return b;
}

// s [BLOCK, width] = q [BLOCK, HS] times the panels of keys; a group of rows stops at the panel with the last
// key that it may see, which limit[] gives.
static inline void attention_scores(real* s, const real* q, const real* panels, const int* limit,
                                    const AttentionScratch* a, int HS) {
    for (int k0 = 0; k0 < limit[ATTENTION_GROUPS - 1]; k0 += ATTENTION_PANEL, panels += (size_t)HS * ATTENTION_PANEL)
        for (int i = 0; i < ATTENTION_GROUPS; i++)
            if (k0 < limit[i])
                attention_tile(s + (size_t)i * ATTENTION_ROWS * a->width + k0, a->width, q + i * ATTENTION_ROWS * HS,
                               (size_t)HS, 1, panels, HS, SET);
}

// o [BLOCK, channels] = s [BLOCK, width] times panels of channels.
static inline void attention_mix(real* o, const real* s, const real* panels, size_t keys, const int* limit,
                                 const AttentionScratch* a) {
    for (size_t c = 0; c < a->channels; c += ATTENTION_PANEL, panels += keys * ATTENTION_PANEL)
        for (int i = 0; i < ATTENTION_GROUPS; i++)
            attention_tile(o + (size_t)i * ATTENTION_ROWS * a->channels + c, a->channels,
                           s + (size_t)i * ATTENTION_ROWS * a->width, a->width, 1, panels, limit[i], SET);
}

// sums [keys, channels] += transposed s [count, width] times panels of the block's rows. A key of a CAUSAL
// sequence gets nothing from the queries before it.
static inline void attention_scatter(real* sums, const real* s, const real* panels, int q0, int count, int visible,
                                     Mask mask, const AttentionScratch* a) {
    for (size_t c = 0; c < a->channels; c += ATTENTION_PANEL, panels += count * ATTENTION_PANEL)
        for (int k = 0; k < visible; k += ATTENTION_ROWS) {
            int skip = mask == CAUSAL ? max_int(0, k - q0) : 0;
            attention_tile(sums + (size_t)k * a->channels + c, a->channels, s + (size_t)skip * a->width + k, 1,
                           a->width, panels + skip * ATTENTION_PANEL, count - skip, ADD);
        }
}

// For each group of rows of the block at q0: the keys that its last row may see.
static inline void attention_limits(int* limit, Mask mask, int q0, int T) {
    for (int i = 0; i < ATTENTION_GROUPS; i++)
        limit[i] = min_int(T, attention_visible(mask, q0 + (i + 1) * ATTENTION_ROWS - 1, T));
}

static inline void attention_forward_item(floatX* out, real* lse, const floatX* qkv, const Sequences* s, int sequence,
                                          int head, AttentionShape shape, real* scratch) {
    int HS = shape.HS, T = s->cu_seqlens[sequence + 1] - s->cu_seqlens[sequence];
    size_t C = (size_t)shape.NH * (size_t)HS, row = (size_t)s->cu_seqlens[sequence];
    const floatX* base = qkv + row * 3 * C + (size_t)(head * HS);
    AttentionScratch a = attention_scratch(T, HS);
    AttentionBuffers b = attention_buffers(&a, scratch, HS, FORWARD);
    attention_pack_rows(b.k_rows, base + C, 3 * C, T, HS);
    attention_pack_columns(b.v_columns, base + 2 * C, 3 * C, T, HS, 1);
    for (int q0 = 0; q0 < T; q0 += ATTENTION_BLOCK) {
        int count = min_int(ATTENTION_BLOCK, T - q0), limit[ATTENTION_GROUPS];
        real sums[ATTENTION_BLOCK];
        attention_limits(limit, shape.mask, q0, T);
        attention_copy_rows(b.q, base + (size_t)q0 * 3 * C, 3 * C, count, HS, (real)(1 / sqrt((double)HS)));
        attention_scores(b.s, b.q, b.k_rows, limit, &a, HS);
        for (int i = 0; i < count; i++) {
            real* p = b.s + (size_t)i * a.width;
            int n = attention_visible(shape.mask, q0 + i, T);
            real max = attention_exponentials(p, n, (int)a.width, &sums[i]);
            lse[(size_t)head * (size_t)s->rows + row + (size_t)(q0 + i)] = (real)((double)max + log((double)sums[i]));
            if (!shape.dropout.threshold) continue;
            attention_draw(b.keep, shape.dropout, sequences_number(s, sequence), head, q0 + i, n);
            for (int k = 0; k < n; k++) p[k] *= b.keep[k];
        }
        attention_mix(b.o, b.s, b.v_columns, (size_t)T, limit, &a);
        for (int i = 0; i < count; i++) {
            floatX* o = out + (row + (size_t)(q0 + i)) * C + (size_t)(head * HS);
            for (int l = 0; l < HS; l++) o[l] = b.o[(size_t)i * a.channels + (size_t)l] / sums[i];
        }
    }
}

// p: scores, then D; dp: dout . V, then ds; for the n keys that the row may see, zeros after them.
static inline void attention_backward_row(real* p, real* dp, const real* keep, real lse, real delta, int n, int width) {
    for (int k = 0; k < n; k++) {
        real e = real_exp(p[k] - lse);
        p[k] = e * keep[k];
        dp[k] = e * (dp[k] * keep[k] - delta);
    }
    memset(p + n, 0, (size_t)(width - n) * sizeof(real));
    memset(dp + n, 0, (size_t)(width - n) * sizeof(real));
}

static inline void attention_backward_item(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                           const real* lse, const Sequences* s, int sequence, int head,
                                           AttentionShape shape, real* scratch) {
    int HS = shape.HS, T = s->cu_seqlens[sequence + 1] - s->cu_seqlens[sequence];
    size_t C = (size_t)shape.NH * (size_t)HS, row = (size_t)s->cu_seqlens[sequence], channel = (size_t)(head * HS);
    const floatX* base = qkv + row * 3 * C + channel;
    floatX* dbase = dqkv + row * 3 * C + channel;
    real factor = (real)(1 / sqrt((double)HS));
    AttentionScratch a = attention_scratch(T, HS);
    AttentionBuffers b = attention_buffers(&a, scratch, HS, BACKWARD);
    attention_pack_rows(b.k_rows, base + C, 3 * C, T, HS);
    attention_pack_rows(b.v_rows, base + 2 * C, 3 * C, T, HS);
    attention_pack_columns(b.k_columns, base + C, 3 * C, T, HS, factor);
    memset(b.dk, 0, (a.keys + ATTENTION_ROWS) * a.channels * sizeof(real));
    memset(b.dv, 0, (a.keys + ATTENTION_ROWS) * a.channels * sizeof(real));
    for (size_t k = 0; k < a.width; k++) b.keep[k] = 1;
    for (int q0 = 0; q0 < T; q0 += ATTENTION_BLOCK) {
        int count = min_int(ATTENTION_BLOCK, T - q0), limit[ATTENTION_GROUPS];
        int visible = attention_visible(shape.mask, q0 + count - 1, T);
        const floatX* g = dout + (row + (size_t)q0) * C + channel;
        attention_limits(limit, shape.mask, q0, T);
        attention_copy_rows(b.q, base + (size_t)q0 * 3 * C, 3 * C, count, HS, factor);
        attention_copy_rows(b.g, g, C, count, HS, 1);
        attention_pack_columns(b.q_columns, b.q, (size_t)HS, count, HS, 1);
        attention_pack_columns(b.g_columns, b.g, (size_t)HS, count, HS, 1);
        attention_scores(b.s, b.q, b.k_rows, limit, &a, HS);
        attention_scores(b.ds, b.g, b.v_rows, limit, &a, HS);
        for (int i = 0; i < count; i++) {
            const floatX* o = out + (row + (size_t)(q0 + i)) * C + channel;
            int n = attention_visible(shape.mask, q0 + i, T);
            double delta = 0;
            for (int l = 0; l < HS; l++) delta += (double)b.g[i * HS + l] * (double)o[l];
            if (shape.dropout.threshold)
                attention_draw(b.keep, shape.dropout, sequences_number(s, sequence), head, q0 + i, n);
            attention_backward_row(b.s + (size_t)i * a.width, b.ds + (size_t)i * a.width, b.keep,
                                   lse[(size_t)head * (size_t)s->rows + row + (size_t)(q0 + i)], (real)delta, n,
                                   (int)a.width);
        }
        attention_mix(b.o, b.ds, b.k_columns, (size_t)T, limit, &a);
        attention_scatter(b.dv, b.s, b.g_columns, q0, count, visible, shape.mask, &a);
        attention_scatter(b.dk, b.ds, b.q_columns, q0, count, visible, shape.mask, &a);
        for (int i = 0; i < count; i++)
            memcpy(dbase + (size_t)(q0 + i) * 3 * C, b.o + (size_t)i * a.channels, (size_t)HS * sizeof(real));
    }
    for (int k = 0; k < T; k++) {
        memcpy(dbase + (size_t)k * 3 * C + C, b.dk + (size_t)k * a.channels, (size_t)HS * sizeof(real));
        memcpy(dbase + (size_t)k * 3 * C + 2 * C, b.dv + (size_t)k * a.channels, (size_t)HS * sizeof(real));
    }
}

// Scratch of one thread.
static inline size_t attention_thread_bytes(int T, int HS, Direction direction) {
    AttentionScratch a = attention_scratch(T, HS);
    attention_buffers(&a, NULL, HS, direction);
    return a.at * sizeof(real);
}

// Scratch that a launch takes at most, for sequences of T rows at most.
static inline size_t attention_scratch_bytes(int N, int sequences, int T, AttentionShape shape, const Context* ctx) {
    (void)N, (void)sequences, (void)ctx;
    return (size_t)device_threads() * attention_thread_bytes(T, shape.HS, BACKWARD);
}

static inline void attention_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s,
                                     AttentionShape shape, Context* ctx) {
    int NH = shape.NH, HS = shape.HS;
    size_t each = attention_thread_bytes(s->max_length, HS, FORWARD);
    Scope scope = attention_scope(ctx, FORWARD, s, shape);
    char* scratch = (char*)device_scratch(ctx, (size_t)device_threads() * each);
#pragma omp parallel for schedule(dynamic)
    for (int item = 0; item < s->count * NH; item++)
        attention_forward_item(out, lse, qkv, s, item / NH, item % NH, shape,
                               (real*)(scratch + (size_t)device_thread_index() * each));
    scope_close(&scope);
}

static inline void attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                      const real* lse, const Sequences* s, AttentionShape shape, Context* ctx) {
    int NH = shape.NH, HS = shape.HS;
    size_t each = attention_thread_bytes(s->max_length, HS, BACKWARD);
    Scope scope = attention_scope(ctx, BACKWARD, s, shape);
    char* scratch = (char*)device_scratch(ctx, (size_t)device_threads() * each);
#pragma omp parallel for schedule(dynamic)
    for (int item = 0; item < s->count * NH; item++)
        attention_backward_item(dqkv, dout, qkv, out, lse, s, item / NH, item % NH, shape,
                                (real*)(scratch + (size_t)device_thread_index() * each));
    scope_close(&scope);
}
#endif

#endif
