/* lamb: test and bench, on the cases of adamw. */
#ifndef DEV_OPS_LAMB_H
#define DEV_OPS_LAMB_H

#include "adamw.h"
#include "llmc/lamb/lamb.h"

// A tensor of several blocks; tensors without decay and without trust; three that are adjacent at offsets where no
// vector begins, like the biases of Q, K and V; one of one element; padding between them and at the end.
static const ParamSpan LAMB_SPANS[] = {{0, 100, 1, 1, 0},      {128, 40000, 1, 1, 0}, {40192, 33, 0, 0, 0},
                                       {40225, 33, 0, 1, 0},   {40258, 33, 1, 0, 0},  {40320, 1, 1, 1, 0},
                                       {40448, 16384, 1, 1, 0}};
#define LAMB_SIZE 56960

typedef struct {
    AdamWCase* k;
    int blocks;
} LambCase;

static inline void lamb_run(void* state);
static inline void lamb_want(AdamWCase* k, AdamWRefState reference) {
    lamb_update_ref(reference, k->norm, 1, k->update, k->spans, k->count, k->h);
}

static inline LambCase* lamb_case(Harness* h, size_t n, const ParamSpan* spans, int count) {
    LambCase* l = (LambCase*)case_memory(h, sizeof *l);
    ParamSpan* numbered = (ParamSpan*)case_memory(h, (size_t)count * sizeof *numbered);
    memcpy(numbered, spans, (size_t)count * sizeof *numbered);
    l->blocks = lamb_number_blocks(numbered, count);
    l->k = adamw_case(h, n, numbered, count);
    l->k->run = lamb_run, l->k->state = l, l->k->want = lamb_want;
    l->k->h.eps = 1e-6;
    l->k->h.weight_decay = 0.01;
    return l;
}

static inline void lamb_run(void* state) {
    LambCase* l = (LambCase*)state;
    AdamWCase* k = l->k;
    LambSpans spans = {.spans = k->device_spans, .count = k->count, .blocks = l->blocks, .elements = k->p.n};
    lamb_update(adamw_state(k, lamb_without_lr(k->h)), spans, k->h, k->ctx);
}

static inline AdamWCase* lamb_usual_case(Harness* h) {
    return lamb_case(h, LAMB_SIZE, LAMB_SPANS, (int)COUNT_OF(LAMB_SPANS))->k;
}

// The reference's sums are of n terms.
static inline double lamb_tolerance(void) { return sizeof(real) == sizeof(double) ? 1e-13 : tolerance(1e-6); }

static inline size_t lamb_bits_changed(Array a, size_t from, size_t to) {
    size_t changed = 0;
    for (size_t i = from; i < to; i++) changed += memcmp(a.host + i, a.initial + i, sizeof(real)) != 0;
    return changed;
}

static inline LambSpans lamb_spans_of(const AdamWShard* s) {
    return (LambSpans){.spans = s->spans, .count = s->count, .blocks = s->blocks, .elements = s->n};
}

// The shards' results together: moments bit for bit those of the whole, the rest within the rounding of the sums.
static inline void test_lamb_shards(Harness* h) {
    const int TENSORS = (int)COUNT_OF(SHARDED_SPANS), SUMS = 2 * TENSORS;
    // Of a sum in another order: the bound that lamb.h states on the GPU; on the CPU sums are of doubles.
    double bound = HAS_DEVICE_MEMORY ? 2 * 3.8e-6 : 1e-12;
    double tol = lamb_tolerance();
    for (size_t c = 0; c < COUNT_OF(SHARD_CUTS); c++)
        for (int has_master = ADAMW_HAS_MASTER; has_master >= 0; has_master--) {
            const ShardCut* cut = &SHARD_CUTS[c];
            int rounded = ADAMW_HAS_MASTER && !has_master;
            case_begin(h, "lamb/update in shards: %s%s", cut->name, rounded ? ", no master weights" : "");
            LambCase* l = lamb_case(h, SHARDED_SIZE, SHARDED_SPANS, TENSORS);
            AdamWCase* k = l->k;
            size_t bytes = (size_t)SUMS * sizeof(double);
            double *sum_sq = (double*)case_block(h, bytes, ON_DEVICE), *sum = (double*)case_memory(h, bytes);
            double *part = (double*)case_memory(h, bytes), *whole = (double*)case_memory(h, bytes);
            k->has_master = has_master;
            k->h.rounding = rng_stream(7, 1, 0, SITE_ROUNDING);
            AdamWState a = adamw_state(k, lamb_without_lr(k->h));
            LambSpans all = {.spans = adamw_shards(h, a, k->spans, k->count, &SHARD_CUTS[0])->spans,
                             .count = TENSORS,
                             .blocks = l->blocks,
                             .elements = SHARDED_SIZE};
            lamb_moments(sum_sq, TENSORS, a, all, k->h, k->ctx);
            device_download(k->ctx, whole, sum_sq, bytes);
            array_restore(k->m), array_restore(k->v);
            lamb_run(l);
            real *p = copy_of(h, k->p), *m = copy_of(h, k->m), *v = copy_of(h, k->v);
            adamw_restore(k);

            AdamWShard* shard = adamw_shards(h, a, k->spans, k->count, cut);
            size_t not_zero = 0, equal = 0;
            for (int i = 0; i < cut->shards; i++) {
                AdamWShard* s = &shard[i];
                memset(part, 0xff, bytes);
                device_upload(k->ctx, sum_sq, part, bytes);
                s->blocks = lamb_number_blocks(s->spans, s->count);
                lamb_moments(sum_sq, TENSORS, s->a, lamb_spans_of(s), k->h, k->ctx);
                device_download(k->ctx, part, sum_sq, bytes);
                for (int t = 0; t < SUMS; t++) {
                    int here = 0;
                    for (int n = 0; n < s->count; n++) here |= s->spans[n].tensor == t / 2;
                    not_zero += !here && part[t] != 0;
                    sum[t] += part[t];
                }
            }
            expect_true(h, "0 for a tensor that lies elsewhere", not_zero == 0);
            for (int t = 0; t < SUMS; t++) expect_within(h, "a tensor's sum", sum[t] / whole[t], 1, bound);
            device_upload(k->ctx, sum_sq, sum, bytes);
            for (int i = 0; i < cut->shards; i++)
                lamb_apply(shard[i].a, sum_sq, lamb_spans_of(&shard[i]), k->h, k->ctx);
            expect_equal(h, "m", k->m, m);
            expect_equal(h, "v", k->v, v);
            array_download(k->p);
            for (size_t i = 0; i < SHARDED_SIZE; i++) equal += k->p.host[i] == p[i];
            // A step that is longer by the rounding of a sum may fall on the other side of the random bits.
            expect_true(h, "params of the whole", equal >= (rounded ? 0.99 : 0.9) * SHARDED_SIZE);
            AdamWRefState reference = {k->p.initial, k->m.initial, k->v.initial, k->g.host};
            lamb_want(k, reference);
            if (!rounded) expect_close(h, "params", k->p, reference.params, tol);
            if (has_master) expect_close(h, "master", k->master, reference.params, tol);
            case_end(h);
        }
}

static inline void test_lamb_first_step(Harness* h) {
    // By hand: at step 1 from m = v = 0 the direction is g / (|g| + eps), and a tensor moves by lr times its own norm.
    case_begin(h, "lamb/update first step, worked out by hand");
    AdamWCase* k = lamb_usual_case(h);
    k->h.max_norm = k->h.weight_decay = 0;
    array_clear(k->m), array_clear(k->v);
    k->run(k->state);
    Array after = ADAMW_HAS_MASTER ? k->master : k->p;
    array_download(after);
    for (int s = 0; s < k->count; s++) {
        double before = 0, direction = 0, moved = 0;
        char what[48];
        snprintf(what, sizeof what, "length of span %d's step", s);
        for (size_t i = LAMB_SPANS[s].offset; i < LAMB_SPANS[s].offset + LAMB_SPANS[s].size; i++) {
            double d = (double)after.host[i] - (double)after.initial[i];
            double g = (double)k->g.host[i], u = g / (fabs(g) + 1e-6);
            before += (double)after.initial[i] * (double)after.initial[i];
            direction += u * u;
            moved += d * d;
        }
        double want = sqrt(LAMB_SPANS[s].trust != 0 ? before : direction);
        expect_within(h, what, sqrt(moved) / (k->h.lr * want), 1, tolerance(1e-4));  // the sums are of rounded steps
    }
    case_end(h);
}

static inline void test_lamb_zeros(Harness* h) {
    // Rows of padding do not count, and a tensor that is 0, or does not move, has the ratio 1.
    case_begin(h, "lamb/update zeros");
    AdamWCase* k = lamb_usual_case(h);
    for (size_t i = 20128; i < 40128; i++)  // the second half of span 1
        k->p.initial[i] = k->master.initial[i] = k->g.initial[i] = k->m.initial[i] = k->v.initial[i] = 0;
    memset(k->p.initial, 0, 100 * sizeof(real)), memset(k->master.initial, 0, 100 * sizeof(real));   // span 0
    k->p.initial[40320] = k->master.initial[40320] = k->g.initial[40320] = k->m.initial[40320] = 0;  // span 5
    array_restore(k->p), array_restore(k->master), array_restore(k->g), array_restore(k->m), array_restore(k->v);
    adamw_check(h, k, lamb_tolerance());
    expect_true(h, "padding stays 0", lamb_bits_changed(k->p, 20128, 40128) == 0);
    expect_true(h, "a tensor of zeros begins to move", lamb_bits_changed(k->p, 0, 100) == 100);
    expect_true(h, "one without a gradient does not", lamb_bits_changed(k->p, 40320, 40321) == 0);
    case_end(h);
}

static inline void test_lamb_update(Harness* h) {
    test_optimizer_steps(h, "lamb", lamb_usual_case, lamb_tolerance());
    test_lamb_first_step(h);
    test_lamb_zeros(h);
    test_optimizer(h, "lamb", lamb_usual_case);
}

// Of millions of elements, and of thousands of tensors.
static inline void test_lamb_large(Harness* h) {
    // A tensor of more blocks than a block has threads, next to small ones.
    case_begin(h, "lamb/update hundreds of blocks");
    static const ParamSpan LARGE[] = {{0, 40, 1, 1, 0}, {128, 300 * LAMB_BLOCK + 3, 1, 1, 0}, {4915456, 33, 0, 0, 0}};
    LambCase* l = lamb_case(h, 4915584, LARGE, (int)COUNT_OF(LARGE));
    adamw_check(h, l->k, lamb_tolerance());
    case_end(h);

    // More tensors than a context has counters for.
    case_begin(h, "lamb/update thousands of tensors");
    enum { MANY = 9001 };
    ParamSpan* many = (ParamSpan*)case_memory(h, MANY * sizeof *many);
    for (int s = 0; s < MANY; s++) {
        many[s].offset = 8 * (size_t)s, many[s].size = (size_t)(s % 8) + 1;
        many[s].decay = s % 3 == 0, many[s].trust = s % 2 == 0;
    }
    adamw_check(h, lamb_case(h, 8 * (MANY + 7), many, MANY)->k, lamb_tolerance());
    case_end(h);
}

static inline void test_lamb(Harness* h) {
    test_lamb_update(h);
    if (!h->is_quick) test_lamb_large(h);
    test_lamb_shards(h);
    if (!ADAMW_HAS_MASTER) return;
    case_begin(h, "lamb/update without master weights");
    AdamWCase* k = lamb_usual_case(h);
    k->has_master = 0;
    k->h.rounding = rng_stream(7, 1, 0, SITE_ROUNDING);
    AdamWRefState want = adamw_wanted(h, k);
    adamw_run_for_any_threads(h, k);
    adamw_expect_keyed(h, k, want.params);
    expect_close(h, "m", k->m, want.m, tolerance(5e-7));
    case_end(h);
}

// The sizes of 24 layers of BERT-large, or of one on the CPU.
static inline void bench_lamb(Harness* h) {
    static const size_t LAYER[] = {1048576, 1048576, 1048576, 1024, 1024,    1024, 1048576, 1024,
                                   1024,    1024,    4194304, 4096, 4194304, 1024, 1024,    1024};
    int layers = HAS_DEVICE_MEMORY ? 24 : 1, count = layers * (int)COUNT_OF(LAYER);
    size_t n = 0;
    ParamSpan* spans = (ParamSpan*)case_memory(h, (size_t)count * sizeof *spans);
    for (int s = 0; s < count; s++) {
        spans[s].offset = n;
        spans[s].size = LAYER[s % (int)COUNT_OF(LAYER)];
        spans[s].decay = spans[s].trust = spans[s].size > 4096;
        n += spans[s].size;
    }
    LambCase* l = lamb_case(h, n, spans, count);
    for (l->k->has_master = ADAMW_HAS_MASTER; l->k->has_master >= 0; l->k->has_master--)
        bench(h, ADAMW_HAS_MASTER && !l->k->has_master ? ", no master" : "", lamb_run, l);
}

#endif
