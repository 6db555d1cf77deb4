/* lamb, on the cases of adamw. */
#ifndef DEV_OPS_LAMB_H
#define DEV_OPS_LAMB_H

#include "adamw.h"
#include "llmc/lamb/lamb.h"

// S: 0: the tensors of adamw's cases; 1: one of more blocks than a block has threads; 2: more tensors than a context
// has counters for.
enum { LAMB_LARGE = 4915584, LAMB_MANY = 9001 };
static inline const ParamSpan* lamb_spans(OpCase* k, int* count) {
    static const ParamSpan LARGE[] = {{0, 40, 1, 1}, {128, 300 * LAMB_BLOCK + 3, 1, 1}, {4915456, 33, 0, 0}};
    *count = k->S == 0 ? (int)COUNT_OF(OPTIMIZER_SPANS) : k->S == 1 ? (int)COUNT_OF(LARGE) : LAMB_MANY;
    if (k->is_bench) return optimizer_bench_spans(k, count);
    if (k->S < 2) return k->S ? LARGE : OPTIMIZER_SPANS;
    ParamSpan* many = (ParamSpan*)case_memory(k->h, LAMB_MANY * sizeof *many);
    for (int s = 0; s < LAMB_MANY; s++) {
        many[s].offset = 8 * (size_t)s, many[s].size = (size_t)(s % 8) + 1;
        many[s].decay = s % 3 == 0, many[s].trust = s % 2 == 0;
    }
    return many;
}

OP_FN(lamb_prepare) {
    Optimizer* o = (Optimizer*)case_memory(k->h, sizeof *o);
    int count;
    const ParamSpan* spans = lamb_spans(k, &count);
    optimizer_start(k, o, spans, count);
    o->h.eps = 1e-6, o->h.weight_decay = 0.01;
    optimizer_set_step(k, lamb_without_lr(o->h));
}

OP_FN(lamb_run) {
    const Optimizer* o = OP_OWN(Optimizer);
    LambSpans spans = {.spans = o->device_spans, .count = o->count, .blocks = o->blocks, .elements = k->params.n};
    lamb_update(optimizer_state(k), spans, o->h, k->ctx);
}

OP_FN(lamb_want) {
    const Optimizer* o = OP_OWN(Optimizer);
    lamb_update_ref(optimizer_want(k), o->norm, o->scale, o->update, o->spans, o->count, o->h);
}

// The reference's sums are of n terms.
OP_FN(lamb_after) {
    k->params.slack = k->master.slack = sizeof(real) == sizeof(double) ? 1e-13 : 0;
    optimizer_after(k);
}

static const int LAMB_ROWS[][3] = {{OPTIMIZER_SIZE, 0, 0}, {OPTIMIZER_SIZE, 1, 0},     {OPTIMIZER_SIZE, 2, 0},
                                   {OPTIMIZER_SIZE, 3, 0}, {OPTIMIZER_SIZE, 4, 0},     {OPTIMIZER_SIZE, 5, 0},
                                   {LAMB_LARGE, 1, 1},     {8 * (LAMB_MANY + 7), 1, 2}};
static const int LAMB_GPU[][3] = {{24 * 12596224, 0, 0}}, LAMB_CPU[][3] = {{12596224, 0, 0}};

static const Op LAMB = {
    OP_OF("lamb", "n M S", OPTIMIZER_ARGS, LAMB_ROWS), OP_BENCH(LAMB_GPU, LAMB_CPU),
    .passes = {{"update", OPTIMIZER_WRITES, lamb_run, lamb_want, NULL, lamb_after, OPTIMIZER_KINDS}},
    .prepare = lamb_prepare, .kinds = {"master", "no master"}};

// Rows of padding do not count, and a tensor that is 0, or does not move, has the ratio 1.
static inline void test_lamb_zeros(Harness* h) {
    static const size_t ZEROS[][2] = {{0, 129}, {10256, 20256}, {40320, 40321}};
    OpCase* k = op_case(h, &LAMB, LAMB.passes, LAMB_ROWS[0], OP_PLAIN);
    const Array all[] = {k->params, k->master, k->g, k->m, k->v};
    for (size_t a = 0; a < COUNT_OF(all); a++) {
        for (size_t z = a < 2 ? 0 : 1; z < COUNT_OF(ZEROS); z++)  // the first tensor has a gradient
            for (size_t i = ZEROS[z][0]; i < ZEROS[z][1]; i++) all[a].initial[i] = 0;
        array_restore(all[a]);
    }
    op_check(h, k, &LAMB, LAMB.passes);
    for (size_t z = 0; z < COUNT_OF(ZEROS); z++) {
        size_t moved = 0;
        for (size_t i = ZEROS[z][0]; i < ZEROS[z][1]; i++) moved += k->params.host[i] != 0;
        expect_true(h, "only what has a gradient moves", moved == (z ? 0 : 129));
    }
    case_end(h);
}

// Both halves of the update of each shard. In between, the sums of the shards are added, as ranks do.
OP_FN(lamb_shards) {
    const Optimizer* o = OP_OWN(Optimizer);
    const ShardCut* cut = &SHARD_CUTS[k->M % (int)COUNT_OF(SHARD_CUTS)];
    size_t sums = 2 * (size_t)o->count, all = (size_t)cut->shards * sums;
    double* sum_sq = (double*)pinned_memory(k->h, all * sizeof *sum_sq);
    AdamWState a[COUNT_OF(cut->ends)];
    LambSpans of[COUNT_OF(cut->ends)];
    for (int i = 0; i < cut->shards; i++) {
        OptimizerShard s = optimizer_shard(k, cut, i);
        a[i] = s.a, of[i] = (LambSpans){s.spans, s.count, lamb_number_blocks(s.spans, s.count), s.n};
        lamb_moments(sum_sq + (size_t)i * sums, o->count, a[i], of[i], o->h, k->ctx);
    }
    device_synchronize(k->ctx);
    for (size_t i = sums; i < all; i++) sum_sq[i % sums] += sum_sq[i];
    for (int i = 0; i < cut->shards; i++) lamb_apply(a[i], sum_sq, of[i], o->h, k->ctx);
}

static inline void test_lamb(Harness* h) {
    static const Pass SHARDS = {"shards", OPTIMIZER_WRITES, lamb_shards, lamb_want, NULL, lamb_after, OPTIMIZER_KINDS};
    for (int M = 0; M < (int)COUNT_OF(OPTIMIZER_STEPS); M++) op_test_row(h, &LAMB, &SHARDS, LAMB_ROWS[M]);
    test_lamb_zeros(h);
}

#endif
