/* squared_error: targets that are ignored, negative ones, padding columns that hold NaN. */
#ifndef DEV_OPS_SQUARED_ERROR_H
#define DEV_OPS_SQUARED_ERROR_H

#include "apps/tune/squared_error.h"
#include "losses.h"

// Every fifth target is none.
static inline void squared_error_prepare(void* state) {
    LossCase* k = (LossCase*)state;
    k->targets = int_array(k->z.h, (size_t)k->z.N);
    for (int n = 0; n < k->z.N; n++)
        k->targets[n] = n % 5 == 3 ? -1 : squared_error_bits(0.75 * random_below(k->z.h, 9) - 3);
    loss_case_start(k, 1, k->z.Vp > 1 ? 64 : 1);
}

static inline void squared_error_run(LossCase* k, Direction direction) {
    squared_error(loss_device(k), k->logits.device, k->targets, k->loss_scale.device_real, k->z.N, k->z.Vp, direction,
                  k->z.ctx);
}

// The definition once more: on the CPU the op is its reference.
static inline void squared_error_want(LossCase* k, Direction direction) {
    double total = 0, factor = 0.25 * (k->loss_scale.n ? (double)*k->loss_scale.host : 1);
    for (int n = 0; n < k->z.N; n++) {
        real* logit = k->logits.want + (size_t)n * (size_t)k->z.Vp;
        double error = n % 5 == 3 ? 0 : (double)*logit - squared_error_target(k->targets[n]);
        k->each.want[n] = (real)(error * error), total += error * error;
        if (direction == FORWARD) continue;
        *logit = (real)(factor * 2 * error);
        for (int c = 1; c < k->z.Vp; c++) logit[c] = 0;
    }
    *k->sum.want = (real)(0.25 * total + (k->z.mode == ADD ? (double)*k->sum.want : 0));
}

static inline void squared_error_run_forward(void* k) { squared_error_run((LossCase*)k, FORWARD); }
static inline void squared_error_run_backward(void* k) { squared_error_run((LossCase*)k, BACKWARD); }
static inline void squared_error_want_forward(void* k) { squared_error_want((LossCase*)k, FORWARD); }
static inline void squared_error_want_backward(void* k) { squared_error_want((LossCase*)k, BACKWARD); }

static const Arg SQUARED_ERROR_ARGS[] = {LOSS_LOGITS(2, 1e-6), LOSS_EACH("N"), LOSS_SUM, LOSS_SCALE, {NULL}};
static const int SQUARED_ERROR_ROWS[][2] = {{1, 8}, {33, 8}, {300, 3}}, SQUARED_ERROR_GRAD[] = {9, 1};

static const Op SQUARED_ERROR = {
    .name = "squared_error",
    .bytes = sizeof(LossCase),
    .sizes = "N Vp",
    .args = SQUARED_ERROR_ARGS,
    .passes = {{"forward", "losses sum dlogits", squared_error_run_forward, squared_error_want_forward},
               {"backward", "losses sum dlogits", squared_error_run_backward, squared_error_want_backward}},
    .prepare = squared_error_prepare,
    .rows = SIZE_ROWS(SQUARED_ERROR_ROWS),
    .grad = SQUARED_ERROR_GRAD,
    .loss = "sum",
};

#endif
