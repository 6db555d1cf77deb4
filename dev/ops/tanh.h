/* tanh: test, grad and bench. */
#ifndef DEV_OPS_TANH_H
#define DEV_OPS_TANH_H

#include "apps/tune/tanh.h"
#include "harness.h"

typedef struct {
    Array x, y, dy, dx;
    Context* ctx;
} TanhCase;

static inline TanhCase* tanh_case(Harness* h, size_t n) {
    TanhCase* k = (TanhCase*)case_memory(h, sizeof *k);
    k->x = input(h, n, 3.0);
    k->y = output(h, n, SET);
    k->dy = input(h, n, 1.0);
    k->dx = output(h, n, SET);
    k->ctx = &h->ctx;
    return k;
}

static inline void tanh_run_forward(void* state) {
    TanhCase* k = (TanhCase*)state;
    tanh_forward(k->y.device, k->x.device, k->x.n, k->ctx);
}

static inline void tanh_run_backward(void* state) {
    TanhCase* k = (TanhCase*)state;
    tanh_backward(k->dx.device, k->dy.device, k->x.device, k->x.n, k->ctx);
}

// The backward pass reads what forward left; here any numbers will do.
static inline void test_tanh(Harness* h) {
    static const size_t SIZES[] = {1, 33, 77 * 48, 20011};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        size_t n = SIZES[i];
        case_begin(h, "tanh/forward n=%zu", n);
        TanhCase* k = tanh_case(h, n);
        real* want = copy_of(h, k->y);
        tanh_forward_ref(want, k->x.host, n);
        expect_same_for_any_threads(h, "forward", tanh_run_forward, k, &k->y, 1);
        expect_close(h, "y", k->y, want, tolerance(1e-6));
        case_end(h);
        case_begin(h, "tanh/backward n=%zu", n);
        k = tanh_case(h, n);
        want = copy_of(h, k->dx);
        tanh_backward_ref(want, k->dy.host, k->x.host, n);
        expect_same_for_any_threads(h, "backward", tanh_run_backward, k, &k->dx, 1);
        expect_close(h, "dx", k->dx, want, tolerance(1e-6));
        case_end(h);
    }
    case_begin(h, "tanh/both in place");
    TanhCase* k = tanh_case(h, 777);
    real* want = copy_of(h, k->x);
    tanh_forward_ref(want, k->x.host, 777);
    tanh_forward(k->x.device, k->x.device, 777, k->ctx);
    expect_close(h, "y", k->x, want, tolerance(1e-6));
    real* dx = copy_of(h, k->dy);
    tanh_backward_ref(dx, k->dy.host, k->x.host, 777);
    tanh_backward(k->dy.device, k->dy.device, k->x.device, 777, k->ctx);
    expect_close(h, "dx", k->dy, dx, tolerance(1e-6));
    case_end(h);
}

static inline double tanh_loss(void* state) {
    TanhCase* k = (TanhCase*)state;
    tanh_run_forward(k);
    double loss = 0;
    for (size_t i = 0; i < k->x.n; i++) loss += (double)k->dy.host[i] * (double)k->y.host[i];
    return loss;
}

static inline void grad_tanh(Harness* h) {
    for (int launcher = 0; launcher < 2; launcher++) {
        case_begin(h, "tanh/backward%s n=60", launcher ? "" : "_ref");
        TanhCase* k = tanh_case(h, 60);
        tanh_run_forward(k);
        if (launcher) tanh_backward(k->dx.device, k->dy.device, k->y.device, 60, k->ctx);
        else tanh_backward_ref(k->dx.host, k->dy.host, k->y.host, 60);
        expect_gradient(h, "dx", tanh_loss, k, k->x.host, k->x.n, k->dx.host, 1e-8);
        case_end(h);
    }
}

// The pooler of BERT-large.
static inline void bench_tanh(Harness* h) {
    size_t n = (size_t)256 * 1024;
    case_begin(h, "tanh bench");
    TanhCase* k = tanh_case(h, n);
    bench_report(h, "tanh_forward", "n=256*1024", bench_seconds(h, tanh_run_forward, k), TANH_FORWARD_FLOPS(n),
                 TANH_FORWARD_BYTES(n));
    bench_report(h, "tanh_backward", "n=256*1024", bench_seconds(h, tanh_run_backward, k), TANH_BACKWARD_FLOPS(n),
                 TANH_BACKWARD_BYTES(n));
    case_free(h);
}

#endif
