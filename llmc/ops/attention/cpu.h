/* Attention on the CPU. A work item is one head of one sequence. It copies its operands into panels, takes
 * ATTENTION_BLOCK queries at a time, and computes all matmuls with one register-blocked tile. No other item writes its
 * rows and channels, so the number of threads does not change the result. Numerics: matmuls and softmax accumulate in
 * real. */
#ifndef LLMC_OPS_ATTENTION_CPU_H
#define LLMC_OPS_ATTENTION_CPU_H

#include "llmc/ops/common/vector_math.h"

// The right operand of a matmul, [K, columns], is stored as panels of ATTENTION_PANEL columns:
// [columns / panel][K][panel]. A tile of the result is ATTENTION_ROWS rows of one panel. It stays in registers: 12 of
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

// Dropout's factors keep[k] of one row for keys 0 .. n - 1, rounded up to whole groups of eight.
static inline void attention_dropout_factors(real* keep, Dropout dropout, uint32_t sequence, int head, int query,
                                             int n) {
    uint32_t threshold = dropout_threshold_attention(dropout);
    for (int group = 0; 8 * group < n; group++) {
        Philox r = dropout_bits_attention(dropout, sequence, (uint32_t)head, (uint32_t)query, (uint32_t)group);
        for (int i = 0; i < 8; i++)
            keep[8 * group + i] = dropout_keeps_attention(r, i, threshold) ? (real)dropout.scale : 0;
    }
}

// s[k] = exp(s[k] - max) for k < n, zero from n to `width` (whole panels). Sets *sum to their sum, returns max. Maximum
// and sum are taken over one panel of lanes first, so the order is fixed and the loops vectorize.
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

// Sizes of one item's copies in its thread's scratch.
typedef struct {
    size_t keys;      // T rounded up to whole panels
    size_t channels;  // HS rounded up to whole panels
    size_t width;     // of a row of scores: one extra panel, so that tiles may read past the keys, and so that rows
                      // whose length is a power of two do not map to the same cache sets
    size_t at;        // reals taken so far
} AttentionScratch;

static inline AttentionScratch attention_scratch(int T, int HS) {
    AttentionScratch a;
    a.keys = round_up((size_t)T, ATTENTION_PANEL);
    a.channels = round_up((size_t)HS, ATTENTION_PANEL);
    a.width = a.keys + ATTENTION_PANEL;
    a.at = 0;
    return a;
}

// Takes `count` reals, in whole cache lines, from the scratch at `base`. If `base` is NULL it only counts.
static inline real* attention_take(AttentionScratch* a, real* base, size_t count) {
    real* p = base ? base + a->at : NULL;
    a->at += round_up(count, 64 / sizeof(real));
    return p;
}

// The buffers of one item.
typedef struct {
    real *k_rows, *v_rows;        // K and V of the head in panels; a column is a key
    real *k_columns, *v_columns;  // panels; a column is a channel
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

// s [BLOCK, width] = q [BLOCK, HS] times the panels of keys. A group of rows stops at the panel of the last key that it
// attends to, limit[group] - 1.
static inline void attention_scores(real* s, const real* q, const real* panels, const int* limit,
                                    const AttentionScratch* a, int HS) {
    for (int k0 = 0; k0 < limit[ATTENTION_GROUPS - 1]; k0 += ATTENTION_PANEL, panels += (size_t)HS * ATTENTION_PANEL)
        for (int i = 0; i < ATTENTION_GROUPS; i++)
            if (k0 < limit[i])
                attention_tile(s + (size_t)i * ATTENTION_ROWS * a->width + k0, a->width, q + i * ATTENTION_ROWS * HS,
                               (size_t)HS, 1, panels, HS, SET);
}

// o [BLOCK, channels] = s [BLOCK, width] times panels of channels.
static inline void attention_weighted_sum(real* o, const real* s, const real* panels, size_t keys, const int* limit,
                                          const AttentionScratch* a) {
    for (size_t c = 0; c < a->channels; c += ATTENTION_PANEL, panels += keys * ATTENTION_PANEL)
        for (int i = 0; i < ATTENTION_GROUPS; i++)
            attention_tile(o + (size_t)i * ATTENTION_ROWS * a->channels + c, a->channels,
                           s + (size_t)i * ATTENTION_ROWS * a->width, a->width, 1, panels, limit[i], SET);
}

// sums [keys, channels] += s^T [width, count] times panels of the block's rows. With CAUSAL, queries before a key add
// nothing to it.
static inline void attention_add_transposed(real* sums, const real* s, const real* panels, int q0, int count,
                                            int visible, Mask mask, const AttentionScratch* a) {
    for (size_t c = 0; c < a->channels; c += ATTENTION_PANEL, panels += count * ATTENTION_PANEL)
        for (int k = 0; k < visible; k += ATTENTION_ROWS) {
            int skip = mask == CAUSAL ? max_int(0, k - q0) : 0;
            attention_tile(sums + (size_t)k * a->channels + c, a->channels, s + (size_t)skip * a->width + k, 1,
                           a->width, panels + skip * ATTENTION_PANEL, count - skip, ADD);
        }
}

// For each group of rows of the block at q0: the number of keys that its last row attends to.
static inline void attention_limits(int* limit, Mask mask, int q0, int T) {
    for (int i = 0; i < ATTENTION_GROUPS; i++)
        limit[i] = min_int(T, attention_visible(mask, q0 + (i + 1) * ATTENTION_ROWS - 1, T));
}

// One head of one sequence, and the scratch of the thread that works on it.
typedef struct {
    const Sequences* s;
    int sequence, head;
    AttentionShape shape;
    real* scratch;
} AttentionItem;

static inline void attention_forward_item(floatX* out, real* lse, const floatX* qkv, AttentionItem item) {
    const Sequences* s = item.s;
    AttentionShape shape = item.shape;
    int sequence = item.sequence, head = item.head;
    int HS = shape.HS, T = s->cu_seqlens[sequence + 1] - s->cu_seqlens[sequence];
    size_t C = (size_t)shape.NH * (size_t)HS, row = (size_t)s->cu_seqlens[sequence];
    const floatX* base = qkv + row * 3 * C + (size_t)(head * HS);
    AttentionScratch a = attention_scratch(T, HS);
    AttentionBuffers b = attention_buffers(&a, item.scratch, HS, FORWARD);
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
            attention_dropout_factors(b.keep, shape.dropout, sequences_number(s, sequence), head, q0 + i, n);
            for (int k = 0; k < n; k++) p[k] *= b.keep[k];
        }
        attention_weighted_sum(b.o, b.s, b.v_columns, (size_t)T, limit, &a);
        for (int i = 0; i < count; i++) {
            floatX* o = out + (row + (size_t)(q0 + i)) * C + (size_t)(head * HS);
            for (int l = 0; l < HS; l++) o[l] = b.o[(size_t)i * a.channels + (size_t)l] / sums[i];
        }
    }
}

// For the n keys that the row attends to: p holds scores on entry and D on return; dp holds dout . V on entry and ds on
// return. After these keys both are zero.
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
                                           const real* lse, AttentionItem item) {
    const Sequences* s = item.s;
    AttentionShape shape = item.shape;
    int sequence = item.sequence, head = item.head;
    int HS = shape.HS, T = s->cu_seqlens[sequence + 1] - s->cu_seqlens[sequence];
    size_t C = (size_t)shape.NH * (size_t)HS, row = (size_t)s->cu_seqlens[sequence], channel = (size_t)(head * HS);
    const floatX* base = qkv + row * 3 * C + channel;
    floatX* dbase = dqkv + row * 3 * C + channel;
    real factor = (real)(1 / sqrt((double)HS));
    AttentionScratch a = attention_scratch(T, HS);
    AttentionBuffers b = attention_buffers(&a, item.scratch, HS, BACKWARD);
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
                attention_dropout_factors(b.keep, shape.dropout, sequences_number(s, sequence), head, q0 + i, n);
            attention_backward_row(b.s + (size_t)i * a.width, b.ds + (size_t)i * a.width, b.keep,
                                   lse[(size_t)head * (size_t)s->rows + row + (size_t)(q0 + i)], (real)delta, n,
                                   (int)a.width);
        }
        attention_weighted_sum(b.o, b.ds, b.k_columns, (size_t)T, limit, &a);
        attention_add_transposed(b.dv, b.s, b.g_columns, q0, count, visible, shape.mask, &a);
        attention_add_transposed(b.dk, b.ds, b.q_columns, q0, count, visible, shape.mask, &a);
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

// Item `index` on this thread; each thread has `each` bytes of scratch.
static inline AttentionItem attention_item(const Sequences* s, int index, AttentionShape shape, char* scratch,
                                           size_t each) {
    AttentionItem item = {.s = s, .sequence = index / shape.NH, .head = index % shape.NH, .shape = shape};
    item.scratch = (real*)(scratch + (size_t)device_thread_index() * each);
    return item;
}

#endif
