/* loss_scale: the rule, step by step, on the device, where the norm of a step's gradients moves it. */
#ifndef DEV_OPS_LOSS_SCALE_H
#define DEV_OPS_LOSS_SCALE_H

#include "global_norm.h"

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
        char what[64];
        const GlobalNormResult after = global_norm_of(k, s->norm);
        double got = after.norm;
        state = after.scale;
        snprintf(what, sizeof what, "norm after step %d", i + 1);
        expect_true(h, what, is_finite_number(s->unscaled) ? got == s->unscaled : !is_finite_number(got));
        snprintf(what, sizeof what, "scale after step %d", i + 1);
        expect_true(h, what, state.scale == (real)s->scale && state.applied == (real)s->applied);
        snprintf(what, sizeof what, "counters after step %d", i + 1);
        expect_true(h, what, state.good == s->good && state.updates == s->updates);
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

#endif
