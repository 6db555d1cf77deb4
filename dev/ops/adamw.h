/* adamw, and what the other optimizers (lamb.h, muon.h) share with it. */
#ifndef DEV_OPS_ADAMW_H
#define DEV_OPS_ADAMW_H

#include "llmc/lamb/lamb.h"
#include "llmc/ops/adamw.h"
#include "op.h"
#include "rounding.h"

// The type of floatX.
static inline const NarrowType* narrow_type(void) { return &CAST_BF16_TYPES[strcmp(FLOATX_NAME, "F16") == 0]; }

// Where floatX is narrow the parameters have a master copy in full precision; elsewhere it is not used. Without one
// (kind 1) parameters are rounded at random.
enum { OPTIMIZER_HAS_MASTER = sizeof(floatX) < sizeof(real), OPTIMIZER_KINDS = OPTIMIZER_HAS_MASTER ? 2 : 1 };

// Decay, trust, rate. A cut after 128 elements leaves one element of the first tensor for the next rank. The next two
// tensors follow it directly, at offsets where no vector begins, like biases. Then come one of several blocks, a gap of
// several blocks, one of a single element, and one of a block and a few more. The last 128 elements are padding.
static const ParamSpan OPTIMIZER_SPANS[] = {{0, 129, 1, 1, 1},     {129, 1, 0, 0, 0.5f},    {130, 33, 1, 0, 2},
                                            {256, 20000, 0, 1, 1}, {40320, 1, 1, 1, 0.25f}, {40448, 16417, 1, 1, 1}};
#define OPTIMIZER_SIZE 57088

// Kinds of steps: the number of the update; the largest norm; what the gradients carry; a factor on their norm.
static const struct {
    int64_t update;
    double max_norm, scale, norm;
    int cautious;
} OPTIMIZER_STEPS[] = {{1, 0, 1, 1, 0},   {2, 1, 1024, 1, 0},    {1000, 1e9, 1, 1, 1}, {5000000000, 1, 1, 1, 1},
                       {7, 1, 1, NAN, 0}, {7, 0, 1, INFINITY, 0}};  // the last two move nothing

// Of a case: `own`.
typedef struct {
    const ParamSpan *spans, *device_spans;  // for the reference, and for the launcher
    int count, blocks;                      // blocks: LAMB's
    size_t updated;                         // AdamW's
    double norm, scale;
    int64_t update;
    AdamWStep* step;  // on the device
    int has_master;
    OptimizerSettings h;
} Optimizer;

// Sizes of BERT-large's layers, one after another.
static inline ParamSpan* optimizer_bench_spans(OpCase* k, int* count) {
    static const size_t LAYER[] = {1048576, 1048576, 1048576, 1024, 1024,    1024, 1048576, 1024,
                                   1024,    1024,    4194304, 4096, 4194304, 1024, 1024,    1024};
    size_t end = 0, n = (size_t)k->n;
    ParamSpan* spans = (ParamSpan*)case_memory(k->h, n / 1024 * sizeof *spans);
    for (*count = 0; end < n; end += spans[(*count)++].size) {
        spans[*count].offset = end, spans[*count].size = min_size(LAYER[*count % (int)COUNT_OF(LAYER)], n - end);
        spans[*count].rate = 1, spans[*count].decay = spans[*count].trust = spans[*count].size > 4096;
    }
    return spans;
}

// M: the kind of step. v is of squares; the gradients carry the scale.
static inline void optimizer_start(OpCase* k, Optimizer* o, const ParamSpan* spans, int count) {
    double sum = 0;
    ParamSpan* copy = (ParamSpan*)case_memory(k->h, (size_t)count * sizeof *copy);
    k->own = o;
    o->update = OPTIMIZER_STEPS[k->M].update, o->scale = OPTIMIZER_STEPS[k->M].scale;
    for (size_t i = 0; i < k->g.n; i++) {
        sum += (double)k->g.initial[i] * (double)k->g.initial[i];
        k->g.initial[i] *= (real)o->scale, k->v.initial[i] *= k->v.initial[i];
        // The sign of what a cautious step moves must not hang on a rounding.
        if (OPTIMIZER_STEPS[k->M].cautious) k->m.initial[i] += (real)(k->m.initial[i] < 0 ? -0.2 : 0.2);
    }
    memcpy(k->master.initial, k->params.initial, k->params.n * sizeof(real));
    array_restore(k->m), array_restore(k->v), array_restore(k->g), array_restore(k->master);
    memcpy(copy, spans, (size_t)count * sizeof *copy);
    o->blocks = lamb_number_blocks(copy, count);
    o->spans = copy, o->count = count;
    o->device_spans = (const ParamSpan*)resident(k->h, copy, (size_t)count * sizeof *copy);
    o->norm = sqrt(sum) * OPTIMIZER_STEPS[k->M].norm, o->has_master = OPTIMIZER_HAS_MASTER && k->kind == 0;
    o->h = (OptimizerSettings){.lr = 3e-3,
                               .beta1 = 0.9,
                               .beta2 = 0.999,
                               .eps = 1e-8,
                               .weight_decay = 0.1,
                               .max_norm = OPTIMIZER_STEPS[k->M].max_norm,
                               .rounding = rng_stream(7, 1, 0, SITE_ROUNDING),
                               .cautious = OPTIMIZER_STEPS[k->M].cautious};
}

// After the settings are set; of_step: those from which the step is worked out.
static inline void optimizer_set_step(OpCase* k, OptimizerSettings of_step) {
    Optimizer* o = OP_OWN(Optimizer);
    AdamWStep step = adamw_step(o->norm, o->scale, o->update, of_step);
    o->step = (AdamWStep*)resident(k->h, &step, sizeof step);
}

static inline AdamWState optimizer_state(const OpCase* k) {
    const Optimizer* o = OP_OWN(Optimizer);
    real* master = o->has_master ? k->master.device_real : NULL;
    return (AdamWState){k->params.device, master, k->m.device_real, k->v.device_real, k->g.device_real,
                        o->step,          0,      o->updated};
}

static inline AdamWRefState optimizer_want(const OpCase* k) {
    return (AdamWRefState){k->params.want, k->m.want, k->v.want, k->g.host};
}

// Elements outside of the spans whose bits are others than at first.
static inline size_t optimizer_touched(const Optimizer* o, Array a) {
    size_t touched = 0, end = 0;
    for (int s = 0; s <= o->count; s++) {
        size_t next = s < o->count ? o->spans[s].offset : a.n;
        for (; end < next; end++) touched += memcmp(a.host + end, a.initial + end, sizeof(real)) != 0;
        if (s < o->count) end += o->spans[s].size;
    }
    return touched;
}

// Whether parameters without a master copy are rounded by the bits of (key, element). A sum in another order may fall
// on the other side of the random bits, once in about a thousand.
static inline void optimizer_expect_keyed(OpCase* k, const real* want) {
    const Optimizer* o = OP_OWN(Optimizer);
    size_t as_keyed = 0, elements = 0;
    for (int s = 0; s < o->count; s++)
        for (size_t i = o->spans[s].offset; i < o->spans[s].offset + o->spans[s].size; i++, elements++) {
            uint16_t bits = narrow_type()->round((float)want[i], adamw_bits(o->h.rounding, i / 4).v[i % 4]);
            as_keyed += (double)k->params.host[i] == narrow_value(narrow_type(), bits);
        }
    expect_true(k->h, "the bits are those of (key, element)", (double)as_keyed >= 0.99 * (double)elements);
}

// The master's and the rounded parameters' part of what is wanted; what lies between the spans.
static inline void optimizer_after(OpCase* k) {
    const Optimizer* o = OP_OWN(Optimizer);
    const Array written[] = {k->params, k->m, k->v, k->master};
    size_t touched = 0;
    if (o->has_master) memcpy(k->master.want, k->params.want, k->params.n * sizeof(real));
    for (size_t i = 0; i < COUNT_OF(written); i++) touched += optimizer_touched(o, written[i]);
    expect_true(k->h, "what lies between the spans keeps its bits", touched == 0);
    if (!OPTIMIZER_HAS_MASTER || o->has_master || !isfinite(o->norm)) return;
    k->params.slack += array_rounding(k->params);  // up or down
    optimizer_expect_keyed(k, k->params.want);
}

static const Arg OPTIMIZER_ARGS[] =
    ARGS(ARG(params, "n", IN_OUT, 1, 1e-6), ARG(m, "n", IN_OUT, 0.1, 5e-7), ARG(v, "n", IN_OUT, 0.1, 5e-7),
         ARG(g, "n", IN, 0.3), ARG(master, "n", IN_OUT, 1, 1e-6));
#define OPTIMIZER_WRITES "params m v master"

// ---------------------------------------------------------------------------------------------------------
// AdamW

// Of every other step the launcher knows how many elements lie in spans, and passes over the gaps.
OP_FN(adamw_prepare) {
    Optimizer* o = (Optimizer*)case_memory(k->h, sizeof *o);
    int count = (int)COUNT_OF(OPTIMIZER_SPANS);
    const ParamSpan* spans = k->is_bench ? optimizer_bench_spans(k, &count) : OPTIMIZER_SPANS;
    optimizer_start(k, o, spans, count);
    for (int s = 0; s < count && k->M % 2; s++) o->updated += spans[s].size;
    optimizer_set_step(k, o->h);
}

OP_FN(adamw_run) {
    const Optimizer* o = OP_OWN(Optimizer);
    adamw_update(optimizer_state(k), k->params.n, o->device_spans, o->count, o->h, k->ctx);
}

OP_FN(adamw_want) {
    const Optimizer* o = OP_OWN(Optimizer);
    adamw_update_ref(optimizer_want(k), o->norm, o->scale, o->update, o->spans, o->count, o->h);
}

OP_FN(adamw_after) { optimizer_after(k); }

static const int OPTIMIZER_ROWS[][2] = {{OPTIMIZER_SIZE, 0}, {OPTIMIZER_SIZE, 1}, {OPTIMIZER_SIZE, 2},
                                        {OPTIMIZER_SIZE, 3}, {OPTIMIZER_SIZE, 4}, {OPTIMIZER_SIZE, 5}};
static const int OPTIMIZER_GPU[][2] = {{24 * 12596224, 0}}, OPTIMIZER_CPU[][2] = {{12596224, 0}};

static const Op ADAMW = {
    OP_OF("adamw", "n M", OPTIMIZER_ARGS, OPTIMIZER_ROWS), OP_BENCH(OPTIMIZER_GPU, OPTIMIZER_CPU),
    .passes = {{"update", OPTIMIZER_WRITES, adamw_run, adamw_want, NULL, adamw_after, OPTIMIZER_KINDS}},
    .prepare = adamw_prepare, .kinds = {"master", "no master"}};

// ---------------------------------------------------------------------------------------------------------
// Shards of the flat buffers, as ranks own them

typedef struct {
    size_t ends[6];
    int shards;
} ShardCut;

// A cut before a tensor's last element; a tensor over four; empty ones, and one of padding.
static const ShardCut SHARD_CUTS[] = {{{128, OPTIMIZER_SIZE}, 2},
                                      {{384, 8192, 16384, OPTIMIZER_SIZE}, 4},
                                      {{0, 0, 40320, 40320, OPTIMIZER_SIZE - 128, OPTIMIZER_SIZE}, 6}};

typedef struct {
    AdamWState a;
    size_t n;
    ParamSpan* spans;  // both the case and launchers read them
    int count;
} OptimizerShard;

static inline OptimizerShard optimizer_shard(const OpCase* k, const ShardCut* cut, int i) {
    const Optimizer* o = OP_OWN(Optimizer);
    size_t begin = i ? cut->ends[i - 1] : 0;
    OptimizerShard s = {optimizer_state(k), cut->ends[i] - begin, NULL, 0};
    s.spans = (ParamSpan*)pinned_memory(k->h, (size_t)o->count * sizeof *s.spans);
    s.count = adam_clip_spans(s.spans, o->spans, o->count, begin, s.n);
    s.a.params += begin, s.a.m += begin, s.a.v += begin, s.a.grads += begin, s.a.first = begin;
    if (s.a.master) s.a.master += begin;
    return s;
}

// The shards' results after those of all at once: the same bits.
static inline void test_adamw_shards(Harness* h, const ShardCut* cut, OpWay way) {
    OpCase* k = op_case(h, &ADAMW, ADAMW.passes, OPTIMIZER_ROWS[1], way);
    const Array written[] = {k->params, k->m, k->v, k->master};
    real* want[COUNT_OF(written)];
    adamw_run(k);
    for (size_t i = 0; i < COUNT_OF(written); i++) want[i] = copy_of(h, written[i]), array_restore(written[i]);
    for (int i = 0; i < cut->shards; i++) {
        OptimizerShard s = optimizer_shard(k, cut, i);
        adamw_update(s.a, s.n, s.spans, s.count, OP_OWN(Optimizer)->h, k->ctx);
    }
    for (size_t i = 0; i < COUNT_OF(written); i++) expect_equal(h, "the same in parts", written[i], want[i]);
    case_end(h);
}

static inline void test_adamw(Harness* h) {
    test_rounding(h);
    for (size_t way = 0; way < COUNT_OF(SHARD_CUTS) * OPTIMIZER_KINDS; way++) {
        OpWay w = {SET, SET, (int)(way % OPTIMIZER_KINDS), 0, 0};
        test_adamw_shards(h, &SHARD_CUTS[way / OPTIMIZER_KINDS], w);
    }
}

#endif
