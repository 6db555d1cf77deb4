/* squared_error: test and grad: targets that are ignored, negative ones, padding columns that hold NaN. */
#ifndef DEV_OPS_SQUARED_ERROR_H
#define DEV_OPS_SQUARED_ERROR_H

#include "apps/tune/squared_error.h"
#include "harness.h"

typedef struct {
    Array each, sum, logits, loss_scale;
    int* targets;
    int N, Kp;
    Mode mode;
    Direction direction;
    Context* ctx;
} SquaredErrorCase;

static inline Losses squared_error_losses(const SquaredErrorCase* k, real* each, real* sum) {
    Losses losses = {each, sum, 0.25, k->mode};
    return losses;
}

static inline void squared_error_run(void* state) {
    SquaredErrorCase* k = (SquaredErrorCase*)state;
    squared_error(squared_error_losses(k, k->each.device_real, k->sum.device_real), k->logits.device, k->targets,
                  k->loss_scale.device_real, k->N, k->Kp, k->direction, k->ctx);
}

// Every fifth target is none.
static inline SquaredErrorCase* squared_error_case(Harness* h, int N, int Kp, Mode mode) {
    SquaredErrorCase* k = (SquaredErrorCase*)case_memory(h, sizeof *k);
    k->N = N, k->Kp = Kp, k->mode = mode, k->ctx = &h->ctx, k->direction = BACKWARD;
    k->logits = input(h, (size_t)N * (size_t)Kp, 2.0);
    k->each = output(h, (size_t)N, SET);
    k->sum = output(h, 1, mode);
    k->loss_scale = input(h, 1, 1.0);
    k->loss_scale.initial[0] = 64;
    array_restore(k->loss_scale), array_upload_real(k->loss_scale);
    k->targets = int_array(h, (size_t)N);
    for (int n = 0; n < N; n++) k->targets[n] = n % 5 == 3 ? -1 : squared_error_bits(0.75 * random_below(h, 9) - 3);
    for (size_t i = 0; i < k->logits.n; i++)
        if (i % (size_t)Kp) k->logits.initial[i] = (real)NAN;
    array_restore(k->logits), array_upload(k->logits);
    memcpy(k->logits.initial, k->logits.host, k->logits.n * sizeof(real));
    return k;
}

static inline void test_squared_error(Harness* h) {
    static const int SIZES[][2] = {{1, 8}, {33, 8}, {300, 3}};
    for (size_t i = 0; i < 2 * COUNT_OF(SIZES); i++) {
        int N = SIZES[i / 2][0], Kp = SIZES[i / 2][1];
        Mode mode = i % 2 ? ADD : SET;
        case_begin(h, "squared_error/both N=%d Kp=%d %s", N, Kp, mode_name(mode));
        SquaredErrorCase* k = squared_error_case(h, N, Kp, mode);
        real *each = copy_of(h, k->each), *sum = copy_of(h, k->sum), *x = copy_of(h, k->logits);
        Array all[3] = {k->each, k->sum, k->logits};
        double total = 0;
        for (int n = 0; n < N; n++) {
            real* logit = x + (size_t)n * (size_t)Kp;
            double error = n % 5 == 3 ? 0 : (double)*logit - squared_error_target(k->targets[n]);
            each[n] = (real)(error * error), total += error * error;
            *logit = (real)(0.25 * 64 * 2 * error);
            for (int c = 1; c < Kp; c++) logit[c] = 0;
        }
        *sum = (real)(0.25 * total + (mode == ADD ? (double)*sum : 0));
        k->direction = FORWARD;
        expect_same_for_any_threads(h, "forward", squared_error_run, k, all, 3);
        expect_close(h, "losses of forward", k->each, each, tolerance(1e-6));
        expect_close(h, "sum of forward", k->sum, sum, tolerance(1e-6));
        k->direction = BACKWARD;
        expect_same_for_any_threads(h, "backward", squared_error_run, k, all, 3);
        expect_close(h, "losses", k->each, each, tolerance(1e-6));
        expect_close(h, "sum", k->sum, sum, tolerance(1e-6));
        expect_close(h, "dlogits", k->logits, x, tolerance(1e-6));
        case_end(h);
    }
}

static inline double squared_error_loss(void* state) {
    SquaredErrorCase* k = (SquaredErrorCase*)state;
    squared_error_ref(squared_error_losses(k, k->each.host, k->sum.host), k->logits.host, k->targets, NULL, k->N, k->Kp,
                      FORWARD);
    return (double)*k->sum.host;
}

static inline void grad_squared_error(Harness* h) {
    case_begin(h, "squared_error/backward_ref");
    SquaredErrorCase* k = squared_error_case(h, 9, 1, SET);
    real* d = copy_of(h, k->logits);
    squared_error_ref(squared_error_losses(k, k->each.host, k->sum.host), d, k->targets, NULL, 9, 1, BACKWARD);
    expect_gradient(h, "dlogits", squared_error_loss, k, k->logits.host, k->logits.n, d, 1e-8);
    case_end(h);
}

#endif
