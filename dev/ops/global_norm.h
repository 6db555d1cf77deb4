/* global_norm: test and bench (nothing differentiates it). */
#ifndef DEV_OPS_GLOBAL_NORM_H
#define DEV_OPS_GLOBAL_NORM_H

#include "llmc/ops/global_norm.h"
#include "op.h"

// `own`: an AfterNorm, whose pointers are on the device.
OP_FN(global_norm_prepare) {
    AfterNorm* a = (AfterNorm*)(k->own = case_memory(k->h, sizeof *a));
    LossScale unscaled = {1, 1, 0, 0};
    a->loss_scale = (LossScale*)resident(k->h, &unscaled, sizeof unscaled);
    a->step = (AdamWStep*)case_block(k->h, sizeof(AdamWStep), ON_DEVICE);
    a->settings.lr = 3e-3, a->settings.beta1 = 0.9, a->settings.beta2 = 0.999;
}

OP_FN(global_norm_run) {
    global_norm_forward(k->sum.device_real, k->g.device_real, k->g.n, *OP_OWN(AfterNorm), k->ctx);
}

// Double sums: only the rounding of the result is left; in the double build, that of n additions.
OP_FN(global_norm_want) {
    LossScale state = {1, 1, 0, 0};
    AdamWStep step;
    AfterNorm after = *OP_OWN(AfterNorm);
    after.loss_scale = &state, after.step = &step;
    global_norm_forward_ref(k->sum.want, k->g.host, k->g.n, after);
    k->sum.magnitude = k->sum.want, k->sum.slack = sizeof(real) == sizeof(double) ? 1e-12 : 2e-7;
}

static const Arg GLOBAL_NORM_ARGS[] = ARGS(ARG(g, "n", IN, 1), ARG_AS("norm", sum, "", OUT));
static const int GLOBAL_NORM_ROWS[] = {0, 1, 15, 16, 33, 16384, 16385, 200001, 513 * GLOBAL_NORM_BLOCK + 5};
static const int GLOBAL_NORM_GPU[] = {128 << 20}, GLOBAL_NORM_CPU[] = {16 << 20};

static const Op GLOBAL_NORM = {
    OP_OF("global_norm", "n", GLOBAL_NORM_ARGS, GLOBAL_NORM_ROWS), OP_BENCH(GLOBAL_NORM_GPU, GLOBAL_NORM_CPU),
    .passes = {{"forward", "norm", global_norm_run, global_norm_want}}, .prepare = global_norm_prepare};

static inline OpCase* global_norm_case(Harness* h, int n) {
    return op_case(h, &GLOBAL_NORM, GLOBAL_NORM.passes, &n, OP_PLAIN);
}

// What one launch leaves. A gradient of one element is its own norm.
typedef struct {
    AdamWStep step;
    LossScale scale;
    double norm;
} GlobalNormResult;

static inline GlobalNormResult global_norm_result(OpCase* k) {
    GlobalNormResult got;
    device_download(k->ctx, &got.step, OP_OWN(AfterNorm)->step, sizeof got.step);
    device_download(k->ctx, &got.scale, OP_OWN(AfterNorm)->loss_scale, sizeof got.scale);
    array_download(k->sum);
    got.norm = (double)k->sum.host[0];
    return got;
}

static inline GlobalNormResult global_norm_of(OpCase* k, double gradient) {
    k->g.host[0] = (real)gradient;
    array_upload_real(k->g);
    global_norm_run(k);
    return global_norm_result(k);
}

static inline void global_norm_set(OpCase* k, LossScale state) {
    device_upload(k->ctx, OP_OWN(AfterNorm)->loss_scale, &state, sizeof state);
}

// What after_norm() leaves, by formulas in double. The scale moves, but this step's gradients carry the old one.
static inline void test_after_norm(Harness* h) {
    static const struct {
        double g, scale, max_norm;
        int64_t updates;  // before this one
    } CASES[] = {{3, 1, 0, 0}, {3, 1, 4, 1}, {3072, 1024, 2, 4999999999}, {-96, 64, 1, 7}, {INFINITY, 64, 1, 7}};
    for (size_t i = 0; i < COUNT_OF(CASES); i++) {
        OpCase* k = global_norm_case(h, 1);
        AfterNorm* a = OP_OWN(AfterNorm);
        int is_good = isfinite(CASES[i].g) != 0;
        global_norm_set(k, (LossScale){(real)CASES[i].scale, 0, 0, CASES[i].updates});
        a->rule.kind = LOSS_SCALE_DYNAMIC, a->rule.growth_interval = 1, a->settings.max_norm = CASES[i].max_norm;
        GlobalNormResult got = global_norm_of(k, CASES[i].g);
        expect_true(h, "is_taken", got.step.is_taken == is_good);
        expect_true(h, "updates are counted", got.scale.updates == CASES[i].updates + is_good);
        double norm = fabs(CASES[i].g) / CASES[i].scale, t = (double)CASES[i].updates + 1, tol = tolerance(1e-7);
        double clip = CASES[i].max_norm > 0 ? fmin(1, CASES[i].max_norm / norm) : 1;
        if (is_good) {
            expect_within(h, "norm", got.norm / norm, 1, tol);
            expect_within(h, "gradient", got.step.gradient * CASES[i].scale / clip, 1, tol);
            expect_within(h, "step_size", got.step.step_size * (1 - pow(0.9, t)) / 3e-3, 1, tol);
            expect_within(h, "root_scale", got.step.root_scale * sqrt(1 - pow(0.999, t)), 1, tol);
        }
        case_end(h);
    }
}

// The norm of shards: their sums of squares, added as ranks do, then finished. A NaN in one of them, too.
static inline void test_global_norm_shards(Harness* h, int has_nan) {
    static const size_t ENDS[] = {0, 128, 16384, 16384, 200064, 300032};
    OpCase* k = global_norm_case(h, 300032);
    AfterNorm* a = OP_OWN(AfterNorm);
    const LossScale start = {8, 1, 3, 41};
    double total = 0, part, *sum = (double*)case_block(h, sizeof *sum, ON_DEVICE);
    a->rule.kind = LOSS_SCALE_DYNAMIC, a->rule.growth_interval = 4, a->settings.max_norm = 1;
    if (has_nan) k->g.host[100000] = (real)NAN;
    array_upload_real(k->g);
    global_norm_set(k, start);
    global_norm_run(k);
    const GlobalNormResult want = global_norm_result(k);
    global_norm_set(k, start);
    for (size_t i = 0, begin = 0; i < COUNT_OF(ENDS); begin = ENDS[i++]) {
        part = NAN;
        device_upload(k->ctx, sum, &part, sizeof part);
        global_norm_squares(sum, k->g.device_real + begin, ENDS[i] - begin, k->ctx);
        device_download(k->ctx, &part, sum, sizeof part);
        total += part;
    }
    device_upload(k->ctx, sum, &total, sizeof total);
    global_norm_finish(k->sum.device_real, sum, *a, k->ctx);
    const GlobalNormResult got = global_norm_result(k);
    expect_true(h, "the scale moves", got.scale.scale == (has_nan ? 4 : 16) && got.step.is_taken == !has_nan);
    expect_true(h, "as in one launch", memcmp(&got.scale, &want.scale, sizeof got.scale) == 0);
    if (!has_nan) {
        double tol = sizeof(real) == sizeof(double) ? 1e-12 : 2e-7;  // a sum of doubles in another order
        expect_within(h, "norm", got.norm / want.norm, 1, tol);
        expect_within(h, "gradient", got.step.gradient / want.step.gradient, 1, tol);
    }
    case_end(h);
}

static inline void test_global_norm(Harness* h) {
    // What is not finite anywhere must show; so must squares that float could not hold.
    static const double ODD[] = {NAN, INFINITY, -INFINITY, 1e30};
    for (size_t i = 0; i < COUNT_OF(ODD); i++) {
        OpCase* k = global_norm_case(h, 40000);
        k->g.host[39999] = (real)ODD[i];
        array_upload_real(k->g);
        global_norm_run(k);
        array_download(k->sum);
        if (isfinite(ODD[i])) expect_within(h, "norm / 1e30", (double)k->sum.host[0] / ODD[i], 1, 1e-6);
        else expect_true(h, "norm is not finite", !is_finite_number(k->sum.host[0]));
        case_end(h);
    }
    test_after_norm(h);
    for (int has_nan = 0; has_nan < 2; has_nan++) test_global_norm_shards(h, has_nan);
}

// ---------------------------------------------------------------------------------------------------------
// The loss scale: its rule, step by step, where the norm of a step's gradients moves it

// A step: the norm of the scaled gradients, and what must be there after it; start > 0: the first of a run.
static const struct {
    double norm, applied, scale;
    int good, updates;
    double start;
    int interval, is_fixed;
} LOSS_SCALE_STEPS[] = {
    // It doubles after three good steps.
    {8, 4, 4, 1, 1, 4, 3},
    {8, 4, 4, 2, 2},
    {8, 4, 8, 0, 3},
    {8, 8, 8, 1, 4},
    // It halves, not below 1.
    {8, 4, 4, 1, 1, 4, 2},
    {INFINITY, 4, 2, 0, 1},
    {NAN, 2, 1, 0, 1},
    {INFINITY, 1, 1, 0, 1},
    {8, 1, 1, 1, 2},
    {8, 1, 2, 0, 3},
    {INFINITY, 3, 1.5, 0, 0, 3, 2},
    {INFINITY, 1.5, 1, 0, 0},
    // It stops at 2^24; from above that it goes down only.
    {0, 1 << 23, 1 << 24, 0, 1, 1 << 23, 1},
    {0, 1 << 24, 1 << 24, 0, 2},
    {0, 0x1p30, 0x1p30, 0, 1, 0x1p30, 1},
    {INFINITY, 0x1p30, 0x1p29, 0, 1},
    // A fixed one stays.
    {3000, 1000, 1000, 1, 1, 1000, 1, 1},
    {INFINITY, 1000, 1000, 0, 1},
};

static inline void test_loss_scale(Harness* h) {
    OpCase* k = global_norm_case(h, 1);
    AfterNorm* a = OP_OWN(AfterNorm);
    for (size_t i = 0; i < COUNT_OF(LOSS_SCALE_STEPS); i++) {
        double norm = LOSS_SCALE_STEPS[i].norm, start = LOSS_SCALE_STEPS[i].start, scale = LOSS_SCALE_STEPS[i].scale;
        double applied = LOSS_SCALE_STEPS[i].applied;
        char what[32];
        if (start > 0) {
            a->rule.kind = LOSS_SCALE_STEPS[i].is_fixed ? LOSS_SCALE_FIXED : LOSS_SCALE_DYNAMIC;
            a->rule.growth_interval = LOSS_SCALE_STEPS[i].interval;
            global_norm_set(k, (LossScale){(real)start, 0, 0, 0});
        }
        const GlobalNormResult got = global_norm_of(k, norm);
        snprintf(what, sizeof what, "step %zu", i);
        expect_true(h, what, is_finite_number(norm) ? got.norm == norm / applied : !is_finite_number(got.norm));
        expect_true(h, what, got.scale.scale == (real)scale && got.scale.applied == (real)applied);
        expect_within(h, what, (double)got.scale.good, LOSS_SCALE_STEPS[i].good, 0);
        expect_within(h, what, (double)got.scale.updates, LOSS_SCALE_STEPS[i].updates, 0);
    }
    case_end(h);
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

// Of losses that an outlier's norm goes with, or that are outliers themselves: limits judge one of the two.
static inline void outliers_check(Harness* h, const char* name, double mean, double spread, OutlierLimits limits) {
    static const Outliers none = {{{0}, 0}, {{0}, 0}, 0};
    double values[OUTLIER_STEPS], limit = fmax(limits.loss, limits.norm);
    int entered = 0, wrong = 0, skipped = 0;
    OpCase* k = global_norm_case(h, 1);
    case_begin(h, "outliers/judge %s", name);
    AfterNorm* a = OP_OWN(AfterNorm);
    Array losses = input(h, 2, 1.0);
    a->outliers = (Outliers*)resident(h, &none, sizeof none), a->limits = limits;
    a->losses[0] = losses.device_real, a->losses[1] = losses.device_real + 1;
    for (int i = 0; i < OUTLIER_STEPS; i++) {
        real loss = (real)outlier_loss(i, mean, spread), more = (real)(0.25 * mean);
        double x = limits.loss > 0 ? (double)loss + (double)more : (double)loss;
        losses.host[0] = limits.loss > 0 ? loss : 1, losses.host[1] = more;
        array_upload_real(losses);
        GlobalNormResult got = global_norm_of(k, limits.loss > 0 ? 1 : (double)loss);
        int want = outlier_score_wanted(values, entered, x) > limit || (limits.norm > 0 && !isfinite(x));
        skipped += want;
        wrong += got.step.is_taken == want || got.scale.updates != i + 1 - skipped;
        if (isfinite(x)) values[entered++] = x;
    }
    expect_true(h, "some are skipped, most are not", skipped >= 5 && skipped <= OUTLIER_STEPS / 20);
    expect_true(h, "the same as in long double", wrong == 0);
    case_end(h);
}

static inline void test_outliers(Harness* h) {
    outliers_check(h, "losses of 3", 3, 0.1, (OutlierLimits){.loss = 4});
    outliers_check(h, "norms", 3, 0.1, (OutlierLimits){.norm = 4});
}

#endif
