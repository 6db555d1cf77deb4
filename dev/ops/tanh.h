/* tanh: test and grad. */
#ifndef DEV_OPS_TANH_H
#define DEV_OPS_TANH_H

#include "../../llmc/ops/tanh.h"
#include "harness.h"

typedef struct {
    Array x, y, dy, dx;
    Mode mode;
    Context* ctx;
} TanhCase;

static inline TanhCase* tanh_case(Harness* h, size_t n, Mode mode) {
    TanhCase* k = (TanhCase*)case_memory(h, sizeof *k);
    k->x = input(h, n, 2.0);
    k->y = output(h, n, SET);
    k->dy = input(h, n, 1.0);
    k->dx = output(h, n, mode);
    k->mode = mode;
    k->ctx = &h->ctx;
    return k;
}

static inline void tanh_run_forward(void* state) {
    TanhCase* k = (TanhCase*)state;
    tanh_forward(k->y.device, k->x.device, k->x.n, k->ctx);
}

static inline void tanh_run_backward(void* state) {
    TanhCase* k = (TanhCase*)state;
    tanh_backward(k->dx.device, k->dy.device, k->y.device, k->x.n, k->mode, k->ctx);
}

static inline void test_tanh(Harness* h) {
    static const size_t SIZES[] = {1, 33, 77 * 48, 20011};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (int add = 0; add < 2; add++) {
            Mode mode = add ? ADD : SET;
            case_begin(h, "tanh/both n=%zu %s", SIZES[i], mode_name(mode));
            TanhCase* k = tanh_case(h, SIZES[i], mode);
            real *y = copy_of(h, k->y), *dx = copy_of(h, k->dx);
            tanh_forward_ref(y, k->x.host, k->x.n);
            expect_same_for_any_threads(h, "forward", tanh_run_forward, k, &k->y, 1);
            expect_close(h, "y", k->y, y, tolerance(5e-7));
            tanh_backward_ref(dx, k->dy.host, k->y.host, k->x.n, mode);  // of y as it is stored
            expect_same_for_any_threads(h, "backward", tanh_run_backward, k, &k->dx, 1);
            expect_close(h, "dx", k->dx, dx, tolerance(1e-6));
            case_end(h);
        }

    case_begin(h, "tanh/both in place");
    TanhCase* k = tanh_case(h, 1000, SET);
    tanh_run_forward(k);
    tanh_run_backward(k);
    real *y = copy_of(h, k->y), *dx = copy_of(h, k->dx);
    tanh_forward(k->x.device, k->x.device, k->x.n, &h->ctx);
    tanh_backward(k->dy.device, k->dy.device, k->y.device, k->x.n, SET, &h->ctx);
    expect_equal(h, "y", k->x, y);
    expect_equal(h, "dx", k->dy, dx);
    case_end(h);
}

static inline double tanh_loss(void* state) {
    TanhCase* k = (TanhCase*)state;
    tanh_forward_ref(k->y.host, k->x.host, k->x.n);
    double loss = 0;
    for (size_t i = 0; i < k->y.n; i++) loss += (double)k->y.host[i] * (double)k->dy.host[i];
    return loss;
}

static inline void grad_tanh(Harness* h) {
    for (int launcher = 0; launcher < 2; launcher++) {
        case_begin(h, "tanh/backward%s n=60", launcher ? "" : "_ref");
        TanhCase* k = tanh_case(h, 60, SET);
        tanh_loss(k);
        if (launcher) tanh_run_backward(k);
        else tanh_backward_ref(k->dx.host, k->dy.host, k->y.host, k->x.n, SET);
        expect_gradient(h, "dx", tanh_loss, k, k->x.host, k->x.n, k->dx.host, 1e-8);
        case_end(h);
    }
}

#endif
