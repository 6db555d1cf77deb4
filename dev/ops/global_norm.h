/* global_norm: test and bench (nothing differentiates it). */
#ifndef DEV_OPS_GLOBAL_NORM_H
#define DEV_OPS_GLOBAL_NORM_H

#include "../../llmc/ops/global_norm.h"
#include "harness.h"

typedef struct {
    Array g, norm;
    Context* ctx;
} GlobalNormCase;

static inline GlobalNormCase* global_norm_case(Harness* h, size_t n) {
    GlobalNormCase* k = (GlobalNormCase*)case_memory(h, sizeof *k);
    k->g = input(h, n, 1.0);
    k->norm = output(h, 1, SET);
    k->ctx = &h->ctx;
    return k;
}

static inline void global_norm_run(void* state) {
    GlobalNormCase* k = (GlobalNormCase*)state;
    global_norm_forward(k->norm.device_real, k->g.device_real, k->g.n, k->ctx);
}

static inline void test_global_norm(Harness* h) {
    static const size_t SIZES[] = {0, 1, 15, 16, 33, 16384, 16385, 200001};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        case_begin(h, "global_norm/forward n=%zu", SIZES[i]);
        GlobalNormCase* k = global_norm_case(h, SIZES[i]);
        real* norm = copy_of(h, k->norm);
        global_norm_forward_ref(norm, k->g.host, k->g.n);
        expect_same_for_any_threads(h, "forward", global_norm_run, k, &k->norm, 1);
        // Double sums: only the rounding of the result is left (in the double build, that of n additions).
        expect_close_to_sum(h, "norm", k->norm, norm, norm, sizeof(real) == sizeof(double) ? 1e-13 : 2e-7);
        case_end(h);
    }

    // What is not finite anywhere must show; so must squares that float could not hold.
    static const double ODD[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < COUNT_OF(ODD); i++) {
        case_begin(h, "global_norm/forward one element is %g", ODD[i]);
        GlobalNormCase* k = global_norm_case(h, 40000);
        k->g.host[39999] = (real)ODD[i];
        array_upload_real(k->g);
        global_norm_run(k);
        array_download(k->norm);
        expect_true(h, "norm is not finite", !is_finite_number(k->norm.host[0]));
        case_end(h);
    }
    case_begin(h, "global_norm/forward elements of 1e30");
    GlobalNormCase* k = global_norm_case(h, 10000);
    for (size_t i = 0; i < k->g.n; i++) k->g.host[i] = (real)1e30;
    array_upload_real(k->g);
    global_norm_run(k);
    array_download(k->norm);
    expect_within(h, "norm / 1e32", k->norm.host[0] / 1e32, 1, 1e-6);
    case_end(h);
}

static inline void bench_global_norm(Harness* h) {
    size_t n = (size_t)(HAS_DEVICE_MEMORY ? 128 : 16) << 20;
    GlobalNormCase* k = global_norm_case(h, n);
    char shapes[64];
    snprintf(shapes, sizeof shapes, "n=%zu", n);
    bench_report(h, "global_norm_forward", shapes, bench_seconds(h, global_norm_run, k), GLOBAL_NORM_FORWARD_FLOPS(n),
                 GLOBAL_NORM_FORWARD_BYTES(n));
}

#endif
