/* Steps whose loss or gradient norm lies far above those of the steps before: their update can be left out.
 *
 *   score(x) = (x - mean) / deviation      of the last OUTLIER_WINDOW values, x itself not among them
 *   left out where score(loss) > limit of losses, or score(norm) > limit of norms; a limit of 0 judges nothing
 *
 * Nothing is judged before the window is full. A value enters it after it was judged, an outlier too, so that a run whose
 * losses rise for good is not stopped for good. A value that is not finite has no score and does not enter: what becomes of
 * such a step is decided elsewhere (loss_scale.h, --on-nan).
 *
 * It happens where the ops run, after the norm is known and before the update: the host need not wait.
 *
 * dtypes     double throughout.
 * numerics   mean and variance in two passes over the window, so that a small spread around a large mean is not lost.
 * work       2 * OUTLIER_WINDOW * 3 flops a step, by one thread.
 * source     the scores and the window of 128 are those that llm.c's flags -sl and -sg mean; its window holds the new value. */
#ifndef LLMC_OUTLIERS_H
#define LLMC_OUTLIERS_H

#include "../base/json.h"

enum { OUTLIER_WINDOW = 128, OUTLIER_LOSSES = 2 };

// Zero-initialise it.
typedef struct {
    double value[OUTLIER_WINDOW];
    int64_t count;  // of values that have entered; the next one goes to count % OUTLIER_WINDOW
} OutlierWindow;

// What lies where the ops run.
typedef struct {
    OutlierWindow loss, norm;
    real left_out;  // 1: the last step was
} Outliers;

// Limits of scores; 0: not judged.
typedef struct {
    double loss, norm;
} OutlierLimits;

static inline int outliers_are_judged(OutlierLimits limits) { return limits.loss > 0 || limits.norm > 0; }

// NaN without a score. Where all values of the window are equal, whatever is larger is infinitely far.
HOST_DEVICE static inline double outlier_score(const OutlierWindow* w, double x) {
    double sum = 0, squares = 0;
    if (!isfinite(x) || w->count < OUTLIER_WINDOW) return (double)NAN;
        // Not unrolled on a GPU, where this ends a kernel whose registers are worth more than one thread's time.
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int i = 0; i < OUTLIER_WINDOW; i++) sum += w->value[i];
    double mean = sum / OUTLIER_WINDOW;
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int i = 0; i < OUTLIER_WINDOW; i++) squares += (w->value[i] - mean) * (w->value[i] - mean);
    if (x == mean) return 0;
    return (x - mean) / sqrt(squares / OUTLIER_WINDOW);
}

HOST_DEVICE static inline void outlier_enter(OutlierWindow* w, double x) {
    if (isfinite(x)) w->value[w->count++ % OUTLIER_WINDOW] = x;
}

// Judge a step by its loss and norm, then remember both. Returns whether it is to be left out.
HOST_DEVICE static inline int outliers_judge(Outliers* o, OutlierLimits limits, double loss, double norm) {
    int far_loss = limits.loss > 0 && outlier_score(&o->loss, loss) > limits.loss;
    int far_norm = limits.norm > 0 && outlier_score(&o->norm, norm) > limits.norm;
    outlier_enter(&o->loss, loss);
    outlier_enter(&o->norm, norm);
    o->left_out = (real)(far_loss || far_norm);
    return far_loss || far_norm;
}

// ---------------------------------------------------------------------------------------------------------
// In trainer.json: "outliers": {"loss": [oldest, ..., newest], "norm": [...]}

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

static inline void outliers_put(Text* t, const Outliers* o) {
    json_put_key(t, "outliers");
    text_append(t, "{", 1);
    outlier_window_put(t, "loss", &o->loss);
    outlier_window_put(t, "norm", &o->norm);
    text_append(t, "}", 1);
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

// From the object that outliers_put() wrote into; nothing remembered where it wrote nothing.
static inline Outliers outliers_get(const JsonNode* object, const char* file) {
    const JsonNode* saved = json_get(object, "outliers");
    Outliers o;
    memset(&o, 0, sizeof o);
    if (!saved) return o;
    outlier_window_get(&o.loss, saved, "loss", file);
    outlier_window_get(&o.norm, saved, "norm", file);
    return o;
}

#endif
