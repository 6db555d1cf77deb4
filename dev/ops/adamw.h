/* adamw: test and bench, and what the other optimizers share with it. */
#ifndef DEV_OPS_ADAMW_H
#define DEV_OPS_ADAMW_H

#include "harness.h"
#include "llmc/ops/adamw.h"
#include "rounding.h"

// The type of floatX.
static inline const NarrowType* narrow_type(void) { return &CAST_BF16_TYPES[strcmp(FLOATX_NAME, "F16") == 0]; }

// Two spans that decay, two that do not, pads between them and at the end; the second needs several blocks.
static const ParamSpan ADAMW_SPANS[] = {{0, 100, 1}, {128, 40000, 1}, {40192, 33, 0}, {40320, 1, 0}};
#define ADAMW_SIZE 40448

// Where floatX is narrow the parameters have a master copy in full precision; elsewhere it is not used.
enum { ADAMW_HAS_MASTER = sizeof(floatX) < sizeof(real) };

// The same for LAMB and Muon (lamb.h, muon.h), which set run, state and want.
typedef struct AdamWCase {
    Array p, m, v, g, master;
    void (*run)(void* state);
    void* state;
    void (*want)(struct AdamWCase* k, AdamWRefState reference);
    double norm, scale;  // of g; what g carries
    int64_t update;      // its number
    AdamWStep* step;     // on the device
    AdamWStep uploaded;  // what is there
    int has_master;
    const ParamSpan* spans;         // for the reference
    const ParamSpan* device_spans;  // the same, for the launcher
    int count;
    OptimizerSettings h;
    Context* ctx;
} AdamWCase;

// What an update writes: parameters, moments, and the parameters in full precision where they have a copy.
enum { ADAMW_WRITTEN = 4 };
static const char* const ADAMW_NAMES[ADAMW_WRITTEN] = {"params", "m", "v", "master"};

static inline Array adamw_written(const AdamWCase* k, int i) {
    return i == 0 ? k->p : i == 1 ? k->m : i == 2 ? k->v : k->master;
}

static inline void adamw_restore(const AdamWCase* k) {
    for (int i = 0; i < ADAMW_WRITTEN; i++) array_restore(adamw_written(k, i));
}

static inline void adamw_run(void* state);
static inline void adamw_want(AdamWCase* k, AdamWRefState reference) {
    adamw_update_ref(reference, k->norm, 1, k->update, k->spans, k->count, k->h);
}

static inline AdamWCase* adamw_case(Harness* h, size_t n, const ParamSpan* spans, int count) {
    AdamWCase* k = (AdamWCase*)case_memory(h, sizeof *k);
    k->run = adamw_run, k->state = k, k->want = adamw_want;
    k->p = input(h, n, 1.0), k->m = input(h, n, 0.1), k->v = input(h, n, 0.1);
    k->g = input(h, n, 0.3), k->master = input(h, n, 1.0);
    memcpy(k->master.initial, k->p.initial, n * sizeof(real));
    for (size_t i = 0; i < n; i++) k->v.initial[i] *= k->v.initial[i];
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)k->g.host[i] * (double)k->g.host[i];
    k->norm = sqrt(sum), k->scale = 1, k->update = 1;
    array_restore(k->v), array_restore(k->master);
    k->has_master = ADAMW_HAS_MASTER;
    k->step = (AdamWStep*)case_block(h, sizeof(AdamWStep), ON_DEVICE);
    // Spans whose rate is not given have the rate 1.
    ParamSpan* rated = (ParamSpan*)case_memory(h, (size_t)count * sizeof *spans);
    memcpy(rated, spans, (size_t)count * sizeof *spans);
    for (int s = 0; s < count; s++) rated[s].rate = spans[s].rate == 0 ? 1 : spans[s].rate;
    k->spans = rated, k->count = count;
    k->device_spans = (const ParamSpan*)resident(h, rated, (size_t)count * sizeof *spans);
    k->h.lr = 3e-3, k->h.beta1 = 0.9, k->h.beta2 = 0.999, k->h.eps = 1e-8;
    k->h.weight_decay = 0.1, k->h.max_norm = 1;
    k->ctx = &h->ctx;
    return k;
}

// What the launcher takes; of_step: the settings from which the step is worked out.
static inline AdamWState adamw_state(AdamWCase* k, OptimizerSettings of_step) {
    AdamWStep step = adamw_step(k->norm, k->scale, k->update, of_step);
    if (memcmp(&step, &k->uploaded, sizeof step) != 0) {
        device_upload(k->ctx, k->step, &step, sizeof step);
        device_synchronize(k->ctx);
        k->uploaded = step;
    }
    real* master = k->has_master ? k->master.device_real : NULL;
    return (AdamWState){k->p.device, master, k->m.device_real, k->v.device_real, k->g.device_real, k->step, 0};
}

static inline void adamw_run(void* state) {
    AdamWCase* k = (AdamWCase*)state;
    adamw_update(adamw_state(k, k->h), k->p.n, k->device_spans, k->count, k->h, k->ctx);
}

// What the reference makes of the case's state as it is now.
static inline AdamWRefState adamw_wanted(Harness* h, AdamWCase* k) {
    AdamWRefState reference = {copy_of(h, k->p), copy_of(h, k->m), copy_of(h, k->v), k->g.host};
    k->want(k, reference);
    return reference;
}

// Elements outside of the spans whose bits are others than at first.
static inline size_t adamw_touched(const AdamWCase* k, Array a) {
    size_t touched = 0, end = 0;
    for (int s = 0; s <= k->count; s++) {
        size_t next = s < k->count ? k->spans[s].offset : a.n;
        for (; end < next; end++) touched += memcmp(a.host + end, a.initial + end, sizeof(real)) != 0;
        if (s < k->count) end += k->spans[s].size;
    }
    return touched;
}

static inline void adamw_expect(Harness* h, AdamWCase* k, AdamWRefState want, double tol) {
    size_t touched = 0;
    expect_close(h, "params", k->p, want.params, tol);
    if (k->has_master) expect_close(h, "master", k->master, want.params, tol);
    expect_close(h, "m", k->m, want.m, tolerance(5e-7));
    expect_close(h, "v", k->v, want.v, tolerance(5e-7));
    for (int i = 0; i < ADAMW_WRITTEN; i++) touched += adamw_touched(k, adamw_written(k, i));
    expect_true(h, "pads keep their bits", touched == 0);
}

static inline void adamw_run_for_any_threads(Harness* h, AdamWCase* k) {
    Array written[ADAMW_WRITTEN];
    for (int i = 0; i < ADAMW_WRITTEN; i++) written[i] = adamw_written(k, i);
    expect_same_for_any_threads(h, "update", k->run, k->state, written, k->has_master ? 4 : 3);
}

// The launcher against the reference.
static inline void adamw_check(Harness* h, AdamWCase* k, double tol) {
    AdamWRefState want = adamw_wanted(h, k);
    adamw_run_for_any_threads(h, k);
    adamw_expect(h, k, want, tol);
}

static inline void test_optimizer_steps(Harness* h, const char* name, AdamWCase* (*make)(Harness* h), double tol) {
    static const int64_t STEPS[] = {1, 2, 1000, 5000000000};
    for (size_t i = 0; i < COUNT_OF(STEPS); i++)
        for (int clipped = 0; clipped < 2; clipped++) {
            case_begin(h, "%s/update step=%lld %s", name, (long long)STEPS[i], clipped ? "clipped" : "not clipped");
            AdamWCase* k = make(h);
            k->update = STEPS[i], k->h.max_norm = clipped;
            adamw_check(h, k, tol);
            case_end(h);
        }
}

// What an update leaves, from the case's start.
typedef struct {
    real* of[ADAMW_WRITTEN];
} AdamWBits;

static inline AdamWBits adamw_bits_after(Harness* h, AdamWCase* k) {
    AdamWBits bits;
    adamw_restore(k);
    k->run(k->state);
    for (int i = 0; i < ADAMW_WRITTEN; i++) bits.of[i] = copy_of(h, adamw_written(k, i));
    adamw_restore(k);
    return bits;
}

static inline void adamw_expect_bits(Harness* h, const AdamWCase* k, AdamWBits want) {
    for (int i = 0; i < ADAMW_WRITTEN; i++) expect_equal(h, ADAMW_NAMES[i], adamw_written(k, i), want.of[i]);
}

// Equalities of an optimizer, whose cases `make` makes.
static inline void test_optimizer(Harness* h, const char* name, AdamWCase* (*make)(Harness* h)) {
    // Gradients that carry a loss scale, the norm none: a power of two changes no bit.
    case_begin(h, "%s/update gradients 1024 times too large", name);
    AdamWCase* k = make(h);
    AdamWBits want = adamw_bits_after(h, k);
    for (size_t i = 0; i < k->g.n; i++) k->g.host[i] *= 1024;
    k->scale = 1024;
    array_upload_real(k->g);
    k->run(k->state);
    adamw_expect_bits(h, k, want);
    case_end(h);

    static const double ODD[] = {NAN, INFINITY};
    for (size_t o = 0; o < COUNT_OF(ODD); o++) {
        case_begin(h, "%s/update gradient norm is %g: nothing moves", name, ODD[o]);
        k = make(h);
        k->norm = ODD[o];
        k->run(k->state);
        for (int i = 0; i < ADAMW_WRITTEN; i++)
            expect_equal(h, ADAMW_NAMES[i], adamw_written(k, i), adamw_written(k, i).initial);
        case_end(h);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Shards of the flat buffers, as ranks own them

// A cut after 128 elements leaves one element of the first tensor for the next rank. The next two tensors follow it
// directly, at offsets where no vector begins, like biases. Then come one of many blocks, one of a single element, and
// one of a block and a few more. The last 128 elements are padding.
static const ParamSpan SHARDED_SPANS[] = {{0, 129, 1, 1},     {129, 1, 0, 0},   {130, 33, 0, 1},
                                          {256, 40000, 1, 1}, {40320, 1, 1, 1}, {40448, 16417, 0, 1}};
#define SHARDED_SIZE 57088

typedef struct {
    const char* name;
    size_t every;    // elements of a shard; 0: they end at
    size_t ends[6];  // these
    int shards;
} ShardCut;

static const ShardCut SHARD_CUTS[] = {
    {"one", 0, {SHARDED_SIZE}, 1},
    {"a cut before a tensor's last element", 0, {128, SHARDED_SIZE}, 2},
    {"a tensor over three", 0, {384, 20480, 30080, SHARDED_SIZE}, 4},
    {"empty ones, and one of padding", 0, {0, 0, 40320, 40320, SHARDED_SIZE - 128, SHARDED_SIZE}, 6},
    {"seven", 8192, {0}, 7},
    {"128 elements each", 128, {0}, SHARDED_SIZE / 128},
};

typedef struct {
    AdamWState a;
    size_t n;
    ParamSpan* spans;  // both the case and launchers read them
    int count, blocks;
} AdamWShard;

static inline AdamWShard* adamw_shards(Harness* h, AdamWState whole, const ParamSpan* spans, int count,
                                       const ShardCut* cut) {
    AdamWShard* shard = (AdamWShard*)case_memory(h, (size_t)cut->shards * sizeof *shard);
    size_t begin = 0;
    for (int i = 0; i < cut->shards; i++) {
        AdamWShard* s = &shard[i];
        size_t end = cut->every ? min_size(begin + cut->every, SHARDED_SIZE) : cut->ends[i];
        s->n = end - begin;
        s->spans = (ParamSpan*)pinned_memory(h, (size_t)count * sizeof *spans);
        s->count = adam_clip_spans(s->spans, spans, count, begin, s->n);
        s->a = whole;
        s->a.params += begin, s->a.m += begin, s->a.v += begin, s->a.grads += begin, s->a.first = begin;
        if (s->a.master) s->a.master += begin;
        begin = end;
    }
    CHECK(begin == SHARDED_SIZE);
    return shard;
}

// The shards' results together are those of the whole, bit for bit.
static inline void test_adamw_shards(Harness* h) {
    for (size_t c = 0; c < COUNT_OF(SHARD_CUTS); c++)
        for (int has_master = ADAMW_HAS_MASTER; has_master >= 0; has_master--) {
            const ShardCut* cut = &SHARD_CUTS[c];
            case_begin(h, "adamw/update in shards: %s%s", cut->name,
                       ADAMW_HAS_MASTER && !has_master ? ", no master weights" : "");
            AdamWCase* k = adamw_case(h, SHARDED_SIZE, SHARDED_SPANS, (int)COUNT_OF(SHARDED_SPANS));
            k->has_master = has_master;
            k->h.rounding = rng_stream(7, 1, 0, SITE_ROUNDING);
            AdamWBits want = adamw_bits_after(h, k);
            AdamWShard* shard = adamw_shards(h, adamw_state(k, k->h), k->spans, k->count, cut);
            for (int i = 0; i < cut->shards; i++)
                adamw_update(shard[i].a, shard[i].n, shard[i].spans, shard[i].count, k->h, k->ctx);
            adamw_expect_bits(h, k, want);
            case_end(h);
        }
}

// ---------------------------------------------------------------------------------------------------------
// Without master weights

// Whether a parameter without a master copy is rounded by the bits of (key, element).
static inline int adamw_is_keyed(const AdamWCase* k, const real* got, const real* want, size_t i) {
    uint16_t bits = narrow_type()->round((float)want[i], adamw_bits(k->h.rounding, i / 4).v[i % 4]);
    return (double)got[i] == narrow_value(narrow_type(), bits);
}

// For a case without master weights: after an update. A sum in another order may fall on the other side of the random
// bits, once in about a thousand.
static inline void adamw_expect_keyed(Harness* h, const AdamWCase* k, const real* want) {
    size_t as_keyed = 0, elements = 0;
    array_download(k->p);
    for (int s = 0; s < k->count; s++)
        for (size_t i = k->spans[s].offset; i < k->spans[s].offset + k->spans[s].size; i++, elements++)
            as_keyed += adamw_is_keyed(k, k->p.host, want, i);
    expect_true(h, "the bits are those of (key, element)", (double)as_keyed >= 0.99 * (double)elements);
}

// The kernel without master weights, against the reference and the functions above.
static inline void test_adamw_rounded(Harness* h) {
    const NarrowType* type = narrow_type();
    enum { KEYS = 64 };
    case_begin(h, "adamw/update without master weights");
    AdamWCase* k = adamw_case(h, ADAMW_SIZE, ADAMW_SPANS, (int)COUNT_OF(ADAMW_SPANS));
    k->has_master = 0;
    double excess = 0, variance = 0;
    const real *want = adamw_wanted(h, k).params, *before = NULL;
    size_t far = 0, as_keyed = 0, changed = 0;
    for (uint64_t key = 1; key <= KEYS; key++) {
        k->h.rounding = rng_stream(7, key, 0, SITE_ROUNDING);
        adamw_restore(k);
        if (key == 1) adamw_run_for_any_threads(h, k);
        else adamw_run(k);
        real* got = copy_of(h, k->p);
        for (size_t i = 0; i < k->p.n; i++) {
            double w = (double)want[i], gap = narrow_gap(type, w), share = fabs(w - narrow_toward_zero(type, w)) / gap;
            far += !(fabs((double)got[i] - w) <= gap * 1.001);
            as_keyed += adamw_is_keyed(k, got, want, i);
            changed += before && before[i] != got[i];
            excess += ((double)got[i] - w) / gap;
            variance += share * (1 - share);
        }
        before = got;
    }
    expect_true(h, "only neighbours", far == 0);
    // A sum in another order may fall on the other side of the random bits, once in about a thousand.
    expect_true(h, "the bits are those of (key, element)", (double)as_keyed >= 0.99 * KEYS * (double)k->p.n);
    expect_true(h, "another key, other bits", (double)changed >= 0.1 * KEYS * (double)k->p.n);
    expect_true(h, "unbiased within five deviations", fabs(excess) <= 5 * sqrt(variance));
    k->h.lr = 0;
    for (int again = 0; again < 2; again++) {
        array_restore(k->p);
        k->h.rounding += 1;
        adamw_run(k);
        expect_equal(h, "params that do not move", k->p, k->p.initial);
    }
    case_end(h);
}

// Rates of their own, cautious weight decay, and spans with long gaps between them, whose blocks are passed over.
static inline void test_adamw_variants(Harness* h) {
    static const ParamSpan SPANS[] = {{100, 3000, 1, 0, 0.5f}, {20480, 1, 1, 0, 2}, {40000, 300, 0, 0, 0.25f}};
    for (int cautious = 0; cautious < 2; cautious++) {
        case_begin(h, "adamw/update rates of spans, long gaps%s", cautious ? ", cautious" : "");
        AdamWCase* k = adamw_case(h, ADAMW_SIZE, SPANS, (int)COUNT_OF(SPANS));
        k->h.cautious = cautious;
        AdamWRefState want = adamw_wanted(h, k);
        AdamWState a = adamw_state(k, k->h);
        a.updated = 3301;
        adamw_update(a, k->p.n, k->device_spans, k->count, k->h, k->ctx);
        adamw_expect(h, k, want, tolerance(1e-6));
        case_end(h);
    }
}

static inline AdamWCase* adamw_usual_case(Harness* h) {
    return adamw_case(h, ADAMW_SIZE, ADAMW_SPANS, (int)COUNT_OF(ADAMW_SPANS));
}

static inline void test_adamw_update(Harness* h) {
    test_optimizer_steps(h, "adamw", adamw_usual_case, tolerance(1e-6));

    // By hand: at step 1 from m = v = 0, m / (1 - beta1) = g and v / (1 - beta2) = g^2, so p moves by
    // lr * g / (|g| + eps), after it shrank by lr * weight_decay where decay applies.
    case_begin(h, "adamw/update first step, worked out by hand");
    AdamWCase* k = adamw_usual_case(h);
    k->h.max_norm = 0;
    array_clear(k->m), array_clear(k->v);
    real* p = copy_of(h, k->p);
    for (int s = 0; s < k->count; s++)
        for (size_t i = k->spans[s].offset; i < k->spans[s].offset + k->spans[s].size; i++) {
            double g = k->g.host[i];
            p[i] = (real)(p[i] * (k->spans[s].decay ? 1 - 3e-4 : 1) - 3e-3 * g / (fabs(g) + 1e-8));
        }
    adamw_run(k);
    expect_close(h, "params", k->p, p, tolerance(1e-6));
    case_end(h);

    // A norm below max_norm does not scale the gradient: the same bits as without clipping.
    case_begin(h, "adamw/update norm below max_norm");
    k = adamw_usual_case(h);
    k->h.max_norm = 1e9;
    AdamWBits unclipped = adamw_bits_after(h, k);
    k->h.max_norm = 0;
    adamw_run(k);
    adamw_expect_bits(h, k, unclipped);
    case_end(h);
    test_optimizer(h, "adamw", adamw_usual_case);
}

static inline void test_adamw(Harness* h) {
    test_adamw_variants(h);
    test_rounding(h);
    if (ADAMW_HAS_MASTER) test_adamw_rounded(h);
    test_adamw_shards(h);
    test_adamw_update(h);
}

static inline void bench_adamw(Harness* h) {
    ParamSpan* span = (ParamSpan*)case_memory(h, sizeof *span);
    span->size = (size_t)(HAS_DEVICE_MEMORY ? 64 : 8) << 20, span->decay = 1;
    AdamWCase* k = adamw_case(h, span->size, span, 1);
    for (k->has_master = ADAMW_HAS_MASTER; k->has_master >= 0; k->has_master--)
        bench(h, ADAMW_HAS_MASTER && !k->has_master ? ", no master" : "", adamw_run, k);
}

#endif
