/* Attention on the CPU. A work item is one head of one sequence. It copies its operands into panels, takes
 * ATTENTION_BLOCK queries at a time, and computes all matmuls with one register-blocked tile. No other item writes its
 * rows and channels, so the number of threads does not change the result. Numerics: matmuls and softmax accumulate in
 * real. */
#ifndef LLMC_OPS_ATTENTION_CPU_H
#define LLMC_OPS_ATTENTION_CPU_H

#include "llmc/ops/common/product.h"

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

// The panels of a right operand [K, columns] whose (k, column) is x[column * stride + k * k_stride]. Columns past the
// last become zero.
static inline void attention_pack(real* panels, const real* x, size_t stride, size_t k_stride, int columns, int K) {
    for (int j = 0; j < columns; j += ATTENTION_PANEL, panels += (size_t)K * ATTENTION_PANEL)
        product_pack(panels, ATTENTION_PANEL, x + (size_t)j * stride, stride, k_stride,
                     min_int(ATTENTION_PANEL, columns - j), K);
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

// One item's copies in its thread's scratch: their sizes and places. The forward pass uses the first six buffers.
typedef struct {
    size_t keys;                  // T rounded up to whole panels
    size_t channels;              // HS rounded up to whole panels
    size_t width;                 // of a row of scores: one extra panel, so that tiles may read past the keys, and so
                                  // that rows whose length is a power of two do not map to the same cache sets
    size_t taken;                 // reals of all buffers
    real* k_rows;                 // K of the head in panels; a column is a key
    real* columns;                // V, or in the backward pass K / sqrt(HS), in panels; a column is a channel
    real* q;                      // [BLOCK, HS] queries / sqrt(HS)
    real* s;                      // [BLOCK, width] scores, then probabilities
    real* o;                      // [BLOCK, channels] sums
    real* keep;                   // [width] dropout's factors of one row
    real *v_rows, *g, *ds;        // as k_rows, q and s: V; dout of the queries; dP, then ds
    real *q_columns, *g_columns;  // q and g in panels
    real *dk, *dv;                // [keys + ROWS, channels] sums
} AttentionScratch;

// Takes `count` reals, in whole cache lines, from the scratch at `base`. If `base` is NULL it only counts.
static inline real* attention_take(AttentionScratch* a, real* base, size_t count) {
    real* p = base ? base + a->taken : NULL;
    a->taken += round_up(count, 64 / sizeof(real));
    return p;
}

static inline AttentionScratch attention_scratch(real* base, int T, int HS) {
    AttentionScratch a;
    size_t block = ATTENTION_BLOCK, channels = round_up((size_t)HS, ATTENTION_PANEL);
    a.keys = round_up((size_t)T, ATTENTION_PANEL), a.channels = channels;
    a.width = a.keys + ATTENTION_PANEL, a.taken = 0;
    a.k_rows = attention_take(&a, base, a.keys * (size_t)HS);
    a.columns = attention_take(&a, base, channels * a.keys);
    a.q = attention_take(&a, base, block * (size_t)HS);
    a.s = attention_take(&a, base, block * a.width);
    a.o = attention_take(&a, base, block * channels);
    a.keep = attention_take(&a, base, a.width);
    a.v_rows = attention_take(&a, base, a.keys * (size_t)HS);
    a.g = attention_take(&a, base, block * (size_t)HS);
    a.ds = attention_take(&a, base, block * a.width);
    a.q_columns = attention_take(&a, base, block * channels);
    a.g_columns = attention_take(&a, base, block * channels);
    a.dk = attention_take(&a, base, (a.keys + ATTENTION_ROWS) * channels);
    a.dv = attention_take(&a, base, (a.keys + ATTENTION_ROWS) * channels);
    return a;
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
    AttentionScratch a = attention_scratch(item.scratch, T, HS);
    attention_pack(a.k_rows, base + C, 3 * C, 1, T, HS);
    attention_pack(a.columns, base + 2 * C, 1, 3 * C, HS, T);
    for (int q0 = 0; q0 < T; q0 += ATTENTION_BLOCK) {
        int count = min_int(ATTENTION_BLOCK, T - q0), limit[ATTENTION_GROUPS];
        real sums[ATTENTION_BLOCK];
        attention_limits(limit, shape.mask, q0, T);
        attention_copy_rows(a.q, base + (size_t)q0 * 3 * C, 3 * C, count, HS, (real)(1 / sqrt((double)HS)));
        attention_scores(a.s, a.q, a.k_rows, limit, &a, HS);
        for (int i = 0; i < count; i++) {
            real* p = a.s + (size_t)i * a.width;
            int n = attention_visible(shape.mask, q0 + i, T);
            real max = attention_exponentials(p, n, (int)a.width, &sums[i]);
            lse[(size_t)head * (size_t)s->rows + row + (size_t)(q0 + i)] = (real)((double)max + log((double)sums[i]));
            if (!shape.dropout.threshold) continue;
            attention_dropout_factors(a.keep, shape.dropout, sequences_number(s, sequence), head, q0 + i, n);
            for (int k = 0; k < n; k++) p[k] *= a.keep[k];
        }
        attention_weighted_sum(a.o, a.s, a.columns, (size_t)T, limit, &a);
        for (int i = 0; i < count; i++) {
            floatX* o = out + (row + (size_t)(q0 + i)) * C + (size_t)(head * HS);
            for (int l = 0; l < HS; l++) o[l] = a.o[(size_t)i * a.channels + (size_t)l] / sums[i];
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
    AttentionScratch a = attention_scratch(item.scratch, T, HS);
    attention_pack(a.k_rows, base + C, 3 * C, 1, T, HS);
    attention_pack(a.v_rows, base + 2 * C, 3 * C, 1, T, HS);
    attention_pack(a.columns, base + C, 1, 3 * C, HS, T);
    for (size_t i = 0; i < a.channels * (size_t)T; i++) a.columns[i] *= factor;
    memset(a.dk, 0, (a.keys + ATTENTION_ROWS) * a.channels * sizeof(real));
    memset(a.dv, 0, (a.keys + ATTENTION_ROWS) * a.channels * sizeof(real));
    for (size_t k = 0; k < a.width; k++) a.keep[k] = 1;
    for (int q0 = 0; q0 < T; q0 += ATTENTION_BLOCK) {
        int count = min_int(ATTENTION_BLOCK, T - q0), limit[ATTENTION_GROUPS];
        int visible = attention_visible(shape.mask, q0 + count - 1, T);
        const floatX* g = dout + (row + (size_t)q0) * C + channel;
        attention_limits(limit, shape.mask, q0, T);
        attention_copy_rows(a.q, base + (size_t)q0 * 3 * C, 3 * C, count, HS, factor);
        attention_copy_rows(a.g, g, C, count, HS, 1);
        attention_pack(a.q_columns, a.q, 1, (size_t)HS, HS, count);
        attention_pack(a.g_columns, a.g, 1, (size_t)HS, HS, count);
        attention_scores(a.s, a.q, a.k_rows, limit, &a, HS);
        attention_scores(a.ds, a.g, a.v_rows, limit, &a, HS);
        for (int i = 0; i < count; i++) {
            const floatX* o = out + (row + (size_t)(q0 + i)) * C + channel;
            int n = attention_visible(shape.mask, q0 + i, T);
            double delta = 0;
            for (int l = 0; l < HS; l++) delta += (double)a.g[i * HS + l] * (double)o[l];
            if (shape.dropout.threshold)
                attention_dropout_factors(a.keep, shape.dropout, sequences_number(s, sequence), head, q0 + i, n);
            attention_backward_row(a.s + (size_t)i * a.width, a.ds + (size_t)i * a.width, a.keep,
                                   lse[(size_t)head * (size_t)s->rows + row + (size_t)(q0 + i)], (real)delta, n,
                                   (int)a.width);
        }
        attention_weighted_sum(a.o, a.ds, a.columns, (size_t)T, limit, &a);
        attention_add_transposed(a.dv, a.s, a.g_columns, q0, count, visible, shape.mask, &a);
        attention_add_transposed(a.dk, a.ds, a.q_columns, q0, count, visible, shape.mask, &a);
        for (int i = 0; i < count; i++)
            memcpy(dbase + (size_t)(q0 + i) * 3 * C, a.o + (size_t)i * a.channels, (size_t)HS * sizeof(real));
    }
    for (int k = 0; k < T; k++) {
        memcpy(dbase + (size_t)k * 3 * C + C, a.dk + (size_t)k * a.channels, (size_t)HS * sizeof(real));
        memcpy(dbase + (size_t)k * 3 * C + 2 * C, a.dv + (size_t)k * a.channels, (size_t)HS * sizeof(real));
    }
}

// Scratch of one thread.
static inline size_t attention_thread_bytes(int T, int HS) {
    return attention_scratch(NULL, T, HS).taken * sizeof(real);
}

// Item `index` on this thread; each thread has `each` bytes of scratch.
static inline AttentionItem attention_item(const Sequences* s, int index, AttentionShape shape, char* scratch,
                                           size_t each) {
    AttentionItem item = {.s = s, .sequence = index / shape.NH, .head = index % shape.NH, .shape = shape};
    item.scratch = (real*)(scratch + (size_t)device_thread_index() * each);
    return item;
}

#endif
