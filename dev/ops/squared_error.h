/* squared_error: targets that are ignored, negative ones, padding columns that hold NaN. */
#ifndef DEV_OPS_SQUARED_ERROR_H
#define DEV_OPS_SQUARED_ERROR_H

#include "apps/tune/squared_error.h"
#include "losses.h"

// Every fifth target is none.
OP_FN(squared_error_prepare) {
    k->targets = int_array(k->h, (size_t)k->N);
    for (int n = 0; n < k->N; n++)
        k->targets[n] = n % 5 == 3 ? -1 : squared_error_bits(0.75 * random_below(k->h, 9) - 3);
    loss_case_start(k, 1, k->Vp > 1 ? 64 : 1);
}

static inline void squared_error_run(OpCase* k, Direction direction) {
    squared_error(loss_device(k), k->logits.device, k->targets, k->loss_scale.device_real, k->N, k->Vp, direction,
                  k->ctx);
}

// The definition once more: on the CPU the op is its reference.
static inline void squared_error_want(OpCase* k, Direction direction) {
    double total = 0, factor = 0.25 * (k->loss_scale.n ? (double)*k->loss_scale.host : 1);
    for (int n = 0; n < k->N; n++) {
        real* logit = k->logits.want + (size_t)n * (size_t)k->Vp;
        double error = n % 5 == 3 ? 0 : (double)*logit - squared_error_target(k->targets[n]);
        k->each.want[n] = (real)(error * error), total += error * error;
        if (direction == FORWARD) continue;
        *logit = (real)(factor * 2 * error);
        for (int c = 1; c < k->Vp; c++) logit[c] = 0;
    }
    *k->sum.want = (real)(0.25 * total + (k->mode == ADD ? (double)*k->sum.want : 0));
}

RUN_AND_WANT(squared_error, forward, squared_error_run(k, FORWARD), squared_error_want(k, FORWARD));
RUN_AND_WANT(squared_error, backward, squared_error_run(k, BACKWARD), squared_error_want(k, BACKWARD));

static const Arg SQUARED_ERROR_ARGS[] = ARGS(LOSS_LOGITS(2, 1e-6), LOSS_EACH("N"), LOSS_SUM, LOSS_SCALE);
static const int SQUARED_ERROR_ROWS[][2] = {{1, 8}, {33, 8}, {300, 3}}, SQUARED_ERROR_GRAD[] = {9, 1};

static const Op SQUARED_ERROR = {OP_OF("squared_error", "N Vp", SQUARED_ERROR_ARGS, SQUARED_ERROR_ROWS),
                                 .passes = {{"forward", "losses sum dlogits", OP_PAIR(squared_error, forward)},
                                            {"backward", "losses sum dlogits", OP_PAIR(squared_error, backward)}},
                                 .prepare = squared_error_prepare, .grad = SQUARED_ERROR_GRAD, .loss = "sum"};

#endif
