/* global_norm: test and bench (nothing differentiates it). */
#ifndef DEV_OPS_GLOBAL_NORM_H
#define DEV_OPS_GLOBAL_NORM_H

#include "harness.h"
#include "llmc/ops/global_norm.h"

typedef struct {
    Array g, norm;
    AfterNorm after;  // its pointers: on the device
    Context* ctx;
} GlobalNormCase;

static inline GlobalNormCase* global_norm_case(Harness* h, size_t n) {
    GlobalNormCase* k = (GlobalNormCase*)case_memory(h, sizeof *k);
    k->g = input(h, n, 1.0), k->norm = output(h, 1, SET), k->ctx = &h->ctx;
    LossScale unscaled = {1, 1, 0, 0};
    k->after.loss_scale = (LossScale*)resident(h, &unscaled, sizeof unscaled);
    k->after.step = (AdamWStep*)case_block(h, sizeof(AdamWStep), ON_DEVICE);
    k->after.settings.lr = 3e-3, k->after.settings.beta1 = 0.9, k->after.settings.beta2 = 0.999;
    return k;
}

static inline void global_norm_run(void* state) {
    GlobalNormCase* k = (GlobalNormCase*)state;
    global_norm_forward(k->norm.device_real, k->g.device_real, k->g.n, k->after, k->ctx);
}

// What one launch leaves. A gradient of one element is its own norm.
typedef struct {
    AdamWStep step;
    LossScale scale;
    double norm;
} GlobalNormResult;

static inline GlobalNormResult global_norm_of(GlobalNormCase* k, double gradient) {
    GlobalNormResult got;
    k->g.host[0] = (real)gradient;
    array_upload_real(k->g);
    global_norm_run(k);
    device_download(k->ctx, &got.step, k->after.step, sizeof got.step);
    device_download(k->ctx, &got.scale, k->after.loss_scale, sizeof got.scale);
    array_download(k->norm);
    got.norm = (double)k->norm.host[0];
    return got;
}

// What after_norm() leaves, against the formulas in double.
static inline void test_after_norm(Harness* h) {
    static const struct {
        double g, scale, max_norm;
        int64_t updates;  // before this one
    } CASES[] = {{3, 1, 0, 0}, {3, 1, 4, 1}, {3, 1, 2, 999}, {3072, 1024, 2, 4999999999}, {-96, 64, 1, 7}};
    for (size_t i = 0; i <= COUNT_OF(CASES); i++) {
        int bad = i == COUNT_OF(CASES);  // the last gradient again, but infinite
        size_t c = bad ? i - 1 : i;
        case_begin(h, "global_norm/forward, the step: g=%g scale=%g max_norm=%g updates=%lld",
                   bad ? INFINITY : CASES[c].g, CASES[c].scale, CASES[c].max_norm, (long long)CASES[c].updates);
        GlobalNormCase* k = global_norm_case(h, 1);
        LossScale state = {(real)CASES[c].scale, 0, 0, CASES[c].updates};
        device_upload(&h->ctx, k->after.loss_scale, &state, sizeof state);
        k->after.rule.kind = LOSS_SCALE_DYNAMIC;  // the scale moves, but this step's gradients carry the old one
        k->after.rule.growth_interval = 1;
        k->after.settings.max_norm = CASES[c].max_norm;
        GlobalNormResult got = global_norm_of(k, bad ? INFINITY : CASES[c].g);
        const AdamWStep step = got.step;
        expect_true(h, "is_taken", step.is_taken == !bad);
        expect_true(h, "updates are counted", got.scale.updates == CASES[c].updates + !bad);
        if (!bad) {
            double norm = fabs(CASES[c].g) / CASES[c].scale, t = (double)CASES[c].updates + 1, tol = tolerance(1e-7);
            double clip = CASES[c].max_norm > 0 ? fmin(1, CASES[c].max_norm / norm) : 1;
            expect_within(h, "norm", got.norm / norm, 1, tol);
            expect_within(h, "gradient", step.gradient * CASES[c].scale / clip, 1, tol);
            expect_within(h, "step_size", step.step_size * (1 - pow(0.9, t)) / 3e-3, 1, tol);
            expect_within(h, "root_scale", step.root_scale * sqrt(1 - pow(0.999, t)), 1, tol);
        }
        case_end(h);
    }
}

// The norm of shards: their sums of squares, added as ranks do, then finished.
static inline void global_norm_run_shards(GlobalNormCase* k, double* sum, const size_t* ends, int shards) {
    size_t begin = 0;
    double total = 0, part = NAN;
    for (int i = 0; i < shards; begin = ends[i++]) {
        device_upload(k->ctx, sum, &part, sizeof part);
        global_norm_squares(sum, k->g.device_real + begin, ends[i] - begin, k->ctx);
        device_download(k->ctx, &part, sum, sizeof part);
        total += part;
    }
    device_upload(k->ctx, sum, &total, sizeof total);
    global_norm_finish(k->norm.device_real, sum, k->after, k->ctx);
}

static inline void test_global_norm_shards(Harness* h) {
    static const struct {
        size_t ends[5];
        int shards;
    } CUTS[] = {{{300032}, 1},
                {{128, 300032}, 2},
                {{0, 16384, 16384, 300032, 300032}, 5},
                {{99968, 100096, 200064, 300032}, 4}};
    const int ODD = (int)COUNT_OF(CUTS);  // the last cut again, with a gradient that is not finite in one shard
    for (int c = 0; c <= ODD; c++) {
        const size_t* ends = CUTS[c < ODD ? c : ODD - 1].ends;
        int shards = CUTS[c < ODD ? c : ODD - 1].shards;
        case_begin(h, "global_norm/squares and finish, %d shards%s", shards, c < ODD ? "" : ", one NaN");
        GlobalNormCase* k = global_norm_case(h, 300032);
        double* sum = (double*)case_block(h, sizeof *sum, ON_DEVICE);
        LossScale start = {8, 1, 3, 41}, fused, state;
        AdamWStep fused_step, step;
        k->after.rule.kind = LOSS_SCALE_DYNAMIC;
        k->after.rule.growth_interval = 4;
        k->after.settings.max_norm = 1;
        if (c == ODD) k->g.host[100000] = NAN;
        array_upload_real(k->g);
        device_upload(&h->ctx, k->after.loss_scale, &start, sizeof start);
        global_norm_run(k);
        real* norm = copy_of(h, k->norm);
        device_download(&h->ctx, &fused, k->after.loss_scale, sizeof fused);
        device_download(&h->ctx, &fused_step, k->after.step, sizeof step);
        device_upload(&h->ctx, k->after.loss_scale, &start, sizeof start);
        global_norm_run_shards(k, sum, ends, shards);
        device_download(&h->ctx, &state, k->after.loss_scale, sizeof state);
        device_download(&h->ctx, &step, k->after.step, sizeof step);
        expect_true(h, "the loss scale moves as in one launch",
                    state.scale == fused.scale && state.applied == fused.applied && state.good == fused.good &&
                        state.updates == fused.updates && state.scale == (c < ODD ? 16 : 4));
        expect_true(h, "is_taken", step.is_taken == (c < ODD) && step.is_taken == fused_step.is_taken);
        if (shards == 1) expect_equal(h, "norm", k->norm, norm);
        if (c < ODD) {
            double tol = sizeof(real) == sizeof(double) ? 1e-12 : 2e-7;  // a sum of doubles in another order
            expect_close_to_sum(h, "norm", k->norm, norm, norm, tol);
            expect_within(h, "gradient", step.gradient / fused_step.gradient, 1, tol);
            expect_true(h, "the step",
                        step.step_size == fused_step.step_size && step.root_scale == fused_step.root_scale);
        }
        case_end(h);
    }
}

static inline void test_global_norm(Harness* h) {
    static const size_t SIZES[] = {0, 1, 15, 16, 33, 16384, 16385, 200001, 513 * GLOBAL_NORM_BLOCK + 5};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        case_begin(h, "global_norm/forward n=%zu", SIZES[i]);
        GlobalNormCase* k = global_norm_case(h, SIZES[i]);
        real* norm = copy_of(h, k->norm);
        LossScale state = {1, 1, 0, 0};
        AdamWStep step;
        AfterNorm after = {&state, &step, k->after.rule, k->after.settings};
        global_norm_forward_ref(norm, k->g.host, k->g.n, after);
        expect_same_for_any_threads(h, "forward", global_norm_run, k, &k->norm, 1);
        // Double sums: only the rounding of the result is left (in the double build, that of n additions).
        expect_close_to_sum(h, "norm", k->norm, norm, norm, sizeof(real) == sizeof(double) ? 1e-12 : 2e-7);
        case_end(h);
    }

    // What is not finite anywhere must show; so must squares that float could not hold.
    static const double ODD[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < COUNT_OF(ODD); i++) {
        case_begin(h, "global_norm/forward one element is %g", ODD[i]);
        GlobalNormCase* k = global_norm_case(h, 40000);
        k->g.host[39999] = (real)ODD[i];
        array_upload_real(k->g);
        global_norm_run(k);
        array_download(k->norm);
        expect_true(h, "norm is not finite", !is_finite_number(k->norm.host[0]));
        case_end(h);
    }
    case_begin(h, "global_norm/forward elements of 1e30");
    GlobalNormCase* k = global_norm_case(h, 10000);
    for (size_t i = 0; i < k->g.n; i++) k->g.host[i] = (real)1e30;
    array_upload_real(k->g);
    global_norm_run(k);
    array_download(k->norm);
    expect_within(h, "norm / 1e32", k->norm.host[0] / 1e32, 1, 1e-6);
    case_end(h);
    test_after_norm(h);
    test_global_norm_shards(h);
}

static inline void bench_global_norm(Harness* h) {
    bench(h, "", global_norm_run, global_norm_case(h, (size_t)(HAS_DEVICE_MEMORY ? 128 : 16) << 20));
}

// ---------------------------------------------------------------------------------------------------------
// The loss scale: its rule, step by step, where the norm of a step's gradients moves it

// A step: the norm of the scaled gradients, and what must be there after it.
typedef struct {
    double norm, unscaled, applied, scale;
    int good, updates;
} LossScaleStep;

static inline void loss_scale_check(Harness* h, const char* name, LossScaleKind kind, int interval, double start,
                                    const LossScaleStep* steps, int count) {
    LossScale state = {(real)start, 0, 0, 0};
    case_begin(h, "loss_scale/update %s", name);
    GlobalNormCase* k = global_norm_case(h, 1);  // one gradient is its own norm
    k->after.rule.kind = kind;
    k->after.rule.growth_interval = interval;
    device_upload(&h->ctx, k->after.loss_scale, &state, sizeof state);
    for (int i = 0; i < count; i++) {
        const LossScaleStep* s = &steps[i];
        const GlobalNormResult after = global_norm_of(k, s->norm);
        int is_norm = is_finite_number(s->unscaled) ? after.norm == s->unscaled : !is_finite_number(after.norm);
        state = after.scale;
        if (!is_norm || state.scale != (real)s->scale || state.applied != (real)s->applied || state.good != s->good ||
            state.updates != s->updates)
            case_fail(h, "step %d: norm=%g scale=%g applied=%g good=%d updates=%d", i + 1, after.norm,
                      (double)state.scale, (double)state.applied, (int)state.good, (int)state.updates);
        h->comparisons++;
    }
    case_end(h);
}

static inline void test_loss_scale(Harness* h) {
    const double inf = INFINITY;
    static const LossScaleStep grows[] = {
        {8, 2, 4, 4, 1, 1}, {8, 2, 4, 4, 2, 2}, {8, 2, 4, 8, 0, 3}, {8, 1, 8, 8, 1, 4}};
    loss_scale_check(h, "doubles after three good steps", LOSS_SCALE_DYNAMIC, 3, 4, grows, COUNT_OF(grows));
    const LossScaleStep shrinks[] = {{8, 2, 4, 4, 1, 1},     {inf, inf, 4, 2, 0, 1}, {NAN, NAN, 2, 1, 0, 1},
                                     {inf, inf, 1, 1, 0, 1}, {8, 8, 1, 1, 1, 2},     {8, 8, 1, 2, 0, 3}};
    loss_scale_check(h, "halves, not below 1", LOSS_SCALE_DYNAMIC, 2, 4, shrinks, COUNT_OF(shrinks));
    const LossScaleStep above_floor[] = {{inf, inf, 3, 1.5, 0, 0}, {inf, inf, 1.5, 1, 0, 0}};
    loss_scale_check(h, "halves to 1, not to 3/4", LOSS_SCALE_DYNAMIC, 2, 3, above_floor, COUNT_OF(above_floor));
    static const LossScaleStep ceiling[] = {{0, 0, 1 << 23, 1 << 24, 0, 1}, {0, 0, 1 << 24, 1 << 24, 0, 2}};
    loss_scale_check(h, "stops at 2^24", LOSS_SCALE_DYNAMIC, 1, 1 << 23, ceiling, COUNT_OF(ceiling));
    const LossScaleStep above[] = {{0, 0, 0x1p30, 0x1p30, 0, 1}, {inf, inf, 0x1p30, 0x1p29, 0, 1}};
    loss_scale_check(h, "from above 2^24 only down", LOSS_SCALE_DYNAMIC, 1, 0x1p30, above, COUNT_OF(above));
    const LossScaleStep fixed[] = {{3000, 3, 1000, 1000, 1, 1}, {inf, inf, 1000, 1000, 0, 1}, {0, 0, 1000, 1000, 1, 2}};
    loss_scale_check(h, "fixed stays", LOSS_SCALE_FIXED, 1, 1000, fixed, COUNT_OF(fixed));
}

// ---------------------------------------------------------------------------------------------------------
// Outliers: which steps are skipped, against scores in long double over the values of earlier steps

enum { OUTLIER_STEPS = 400 };

// (x - mean) / deviation of the last OUTLIER_WINDOW of n values; NaN where there are fewer.
static inline double outlier_score_wanted(const double* values, int n, double x) {
    long double sum = 0, sum_sq = 0;
    if (n < OUTLIER_WINDOW) return (double)NAN;
    for (int i = n - OUTLIER_WINDOW; i < n; i++) sum += values[i];
    for (int i = n - OUTLIER_WINDOW; i < n; i++) {
        long double d = values[i] - sum / OUTLIER_WINDOW;
        sum_sq += d * d;
    }
    return (double)((x - sum / OUTLIER_WINDOW) / sqrtl(sum_sq / OUTLIER_WINDOW));
}

// Losses `mean` and a little more or less; now and then one that is far above, one that is far below, or none at all.
static inline double outlier_loss(int step, double mean, double spread) {
    double x = mean + spread * (rng_uniform((uint32_t)step * 2654435761u) - 0.5);
    if (step % 37 == 36) x += 10 * spread;
    if (step % 41 == 40) x -= 3 * spread;
    return step % 53 == 52 ? (double)NAN : x;
}

static inline void outliers_check(Harness* h, const char* name, double mean, double spread, double limit) {
    static const Outliers none = {{{0}, 0}, {{0}, 0}, 0};
    OutlierWindow window = none.loss;
    double values[OUTLIER_STEPS], worst = 0;
    int entered = 0, wrong = 0, skipped = 0, near = 0;
    case_begin(h, "outliers/judge %s", name);
    GlobalNormCase* k = global_norm_case(h, 1);  // one gradient is its own norm
    Array losses = input(h, 2, 1.0);
    k->after.outliers = (Outliers*)resident(h, &none, sizeof none);
    k->after.losses[0] = losses.device_real, k->after.losses[1] = losses.device_real + 1;
    k->after.limits.loss = limit;
    for (int i = 0; i < OUTLIER_STEPS; i++) {
        losses.host[0] = (real)outlier_loss(i, mean, spread), losses.host[1] = (real)(0.25 * mean);
        double x = (double)losses.host[0] + (double)losses.host[1], score = outlier_score_wanted(values, entered, x);
        int want = score > limit;
        if (isfinite(score)) worst = fmax(worst, fabs(outlier_score(&window, x) - score) / fmax(1, fabs(score)));
        outlier_enter(&window, x);
        array_upload_real(losses);
        GlobalNormResult got = global_norm_of(k, (double)k->g.host[0]);
        skipped += want;
        if (fabs(score - limit) < 1e-6 * limit) near++;
        wrong += got.step.is_taken == want || got.scale.updates != i + 1 - skipped;
        if (isfinite(x)) values[entered++] = x;
    }
    expect_true(h, "some are skipped, most are not", skipped >= 5 && skipped <= OUTLIER_STEPS / 20);
    expect_true(h, "scores within 1e-9", worst < 1e-9);
    expect_true(h, "none is at the limit", near == 0);
    expect_true(h, "the same as in long double", wrong == 0);
    case_end(h);
}

static inline void test_outliers(Harness* h) {
    outliers_check(h, "losses of 3", 3, 0.1, 4);
    outliers_check(h, "a small spread around a large mean", 30000, 1, 4);
    // The norm, and limits that judge nothing.
    case_begin(h, "outliers/judge norms");
    static const Outliers none = {{{0}, 0}, {{0}, 0}, 0};
    GlobalNormCase* k = global_norm_case(h, 1);
    k->after.outliers = (Outliers*)resident(h, &none, sizeof none);
    k->after.limits.norm = 3;
    for (int i = 0; i <= OUTLIER_WINDOW + 2; i++) {
        const double ends[] = {1e6, INFINITY, 1e3};
        GlobalNormResult got = global_norm_of(k, i < OUTLIER_WINDOW ? 1 + i % 2 : ends[i - OUTLIER_WINDOW]);
        // 1e6 has entered the window, so 1e3 is not an outlier.
        expect_true(h, "is_taken", got.step.is_taken == (i < OUTLIER_WINDOW || i == OUTLIER_WINDOW + 2));
    }
    Outliers state;
    device_download(&h->ctx, &state, k->after.outliers, sizeof state);
    expect_true(h, "what is not finite does not enter", state.norm.count == OUTLIER_WINDOW + 2);
    case_end(h);
}

#endif
