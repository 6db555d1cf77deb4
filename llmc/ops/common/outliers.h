/* Outlier detection: the update of a step is skipped if its loss or gradient norm is far above recent steps.
 *
 *   score(x) = (x - mean) / deviation      of the last OUTLIER_WINDOW values, without x itself
 *   skip the update if score(loss) > limit of losses or score(norm) > limit of norms; a limit of 0 disables the check
 *
 * No step is skipped before the window is full. Each value is added to the window after its check, even if it is an
 * outlier. Otherwise a run whose loss rises for good would skip every later update. A value that is not finite has no
 * score and is not added. Such a step is handled elsewhere (loss_scale.h, --on-nan).
 *
 * The check runs on the device, after the norm and before the update, so the host need not wait.
 *
 * dtypes     double throughout.
 * numerics   mean and variance in two passes over the window, so that a small spread around a large mean is not lost.
 * work       2 * OUTLIER_WINDOW * 3 flops per step, by one thread.
 * source     the scores and the window of 128 are those of llm.c's flags -sl and -sg, whose window includes the new
 *            value. */
#ifndef LLMC_OPS_COMMON_OUTLIERS_H
#define LLMC_OPS_COMMON_OUTLIERS_H

#include "llmc/base/json.h"

enum { OUTLIER_WINDOW = 128, OUTLIER_LOSSES = 2 };

// Zero-initialise it.
typedef struct {
    double value[OUTLIER_WINDOW];
    int64_t count;  // number of values added so far; the next one goes to count % OUTLIER_WINDOW
} OutlierWindow;

// The state on the device.
typedef struct {
    OutlierWindow loss, norm;
    real skipped;  // 1: the last step was skipped
} Outliers;

// Limits of the scores; 0: no check.
typedef struct {
    double loss, norm;
} OutlierLimits;

// NaN if there is no score. If all values of the window are equal, a larger value has an infinite score.
HOST_DEVICE static inline double outlier_score(const OutlierWindow* w, double x) {
    double sum = 0, sum_sq = 0;
    if (!isfinite(x) || w->count < OUTLIER_WINDOW) return (double)NAN;
        // Not unrolled on the GPU: one thread runs this at the end of a kernel, so low register use matters more.
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int i = 0; i < OUTLIER_WINDOW; i++) sum += w->value[i];
    double mean = sum / OUTLIER_WINDOW;
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int i = 0; i < OUTLIER_WINDOW; i++) sum_sq += (w->value[i] - mean) * (w->value[i] - mean);
    if (x == mean) return 0;
    return (x - mean) / sqrt(sum_sq / OUTLIER_WINDOW);
}

HOST_DEVICE static inline void outlier_enter(OutlierWindow* w, double x) {
    if (isfinite(x)) w->value[w->count++ % OUTLIER_WINDOW] = x;
}

// Check a step's loss and norm, then add both to the windows. Returns whether to skip the step.
HOST_DEVICE static inline int outliers_judge(Outliers* o, OutlierLimits limits, double loss, double norm) {
    int far_loss = limits.loss > 0 && outlier_score(&o->loss, loss) > limits.loss;
    int far_norm = limits.norm > 0 && outlier_score(&o->norm, norm) > limits.norm;
    outlier_enter(&o->loss, loss);
    outlier_enter(&o->norm, norm);
    o->skipped = (real)(far_loss || far_norm);
    return far_loss || far_norm;
}

// ---------------------------------------------------------------------------------------------------------
// In trainer.json: a list from the oldest value to the newest

static inline void outlier_window_put(Text* t, const char* key, const OutlierWindow* w) {
    int64_t held = w->count < (int64_t)OUTLIER_WINDOW ? w->count : (int64_t)OUTLIER_WINDOW;
    json_put_key(t, key);
    text_append(t, "[", 1);
    for (int64_t i = w->count - held; i < w->count; i++) {
        if (i > w->count - held) text_append(t, ", ", 2);
        text_json_number(t, w->value[i % OUTLIER_WINDOW]);
    }
    text_append(t, "]", 1);
}

static inline void outlier_window_get(OutlierWindow* w, const JsonNode* object, const char* key, const char* file) {
    const JsonNode* list = json_need(object, key, JSON_ARRAY, file);
    memset(w, 0, sizeof *w);
    if (list->count > OUTLIER_WINDOW)
        die(USAGE, "%s: key \"%s\": %zu values, but at most %d are kept", file, key, list->count, OUTLIER_WINDOW);
    for (const JsonNode* x = list->first; x; x = x->next) {
        if (x->type != JSON_NUMBER) die(USAGE, "%s: key \"%s\": is not a list of numbers", file, key);
        outlier_enter(w, x->number);
    }
}

#endif
