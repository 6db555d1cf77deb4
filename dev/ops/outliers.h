/* outliers: which steps are skipped, decided on the device from the norm of a step's gradients, against scores in long
 * double over the values of earlier steps. */
#ifndef DEV_OPS_OUTLIERS_H
#define DEV_OPS_OUTLIERS_H

#include "global_norm.h"

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
    k->after.outliers = (Outliers*)case_block(h, sizeof none, ON_DEVICE);
    k->after.losses[0] = losses.device_real, k->after.losses[1] = losses.device_real + 1;
    k->after.limits.loss = limit;
    device_upload(&h->ctx, k->after.outliers, &none, sizeof none);
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
    k->after.outliers = (Outliers*)case_block(h, sizeof none, ON_DEVICE);
    k->after.limits.norm = 3;
    device_upload(&h->ctx, k->after.outliers, &none, sizeof none);
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
