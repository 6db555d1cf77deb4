/* Cases of gelu: both forms, both modes, small and block-crossing sizes, far values. */
#ifndef DEV_OPS_GELU_H
#define DEV_OPS_GELU_H

#include "harness.h"
#include "llmc/ops/gelu.h"

typedef struct {
    Array y, x, dy;
    Gelu kind;
    Mode mode;
    Context* ctx;
} GeluCase;

static const char* gelu_name(Gelu kind) { return kind == GELU_ERF ? "ERF" : "TANH"; }

static void gelu_run_forward(void* state) {
    GeluCase* g = (GeluCase*)state;
    gelu_forward(g->y.device, g->x.device, g->x.n, g->kind, g->ctx);
}

static void gelu_run_backward(void* state) {
    GeluCase* g = (GeluCase*)state;
    gelu_backward(g->y.device, g->dy.device, g->x.device, g->x.n, g->kind, g->mode, g->ctx);
}

static void gelu_far_values(Array x) {
    static const double far[] = {60, -60, 0, -1e4};
    for (size_t i = 0; i < COUNT_OF(far) && x.n > 4; i++) x.host[i] = (real)far[i];
    array_upload(x);
}

static const size_t GELU_SIZES[] = {1, 33, 77 * 48, 20011};

// The float versions promise 3e-7 max(1, |y|).
static void test_gelu_forward(Harness* h) {
    for (int kind = GELU_TANH; kind <= GELU_ERF; kind++)
        for (size_t s = 0; s < COUNT_OF(GELU_SIZES); s++) {
            size_t n = GELU_SIZES[s];
            GeluCase g;
            g.kind = (Gelu)kind;
            g.ctx = &h->ctx;
            case_begin(h, "gelu/forward %s n=%zu", gelu_name(g.kind), n);
            g.x = input(h, n, 3.0);
            g.y = output(h, n, SET);
            gelu_far_values(g.x);
            real* want = copy_of(h, g.y);
            gelu_forward_ref(want, g.x.host, n, g.kind);
            gelu_run_forward(&g);
            expect_close(h, "y", g.y, want, tolerance(5e-7));
            case_end(h);
        }
}

// The derivative, right to 3e-7, is multiplied by a dy of up to 5.
static void test_gelu_backward(Harness* h) {
    for (int kind = GELU_TANH; kind <= GELU_ERF; kind++)
        for (size_t s = 0; s < COUNT_OF(GELU_SIZES); s++)
            for (int mode = SET; mode <= ADD; mode++) {
                size_t n = GELU_SIZES[s];
                GeluCase g;
                g.kind = (Gelu)kind;
                g.ctx = &h->ctx;
                g.mode = (Mode)mode;
                case_begin(h, "gelu/backward %s n=%zu %s", gelu_name(g.kind), n, mode_name(g.mode));
                g.x = input(h, n, 3.0);
                g.dy = input(h, n, 1.0);
                g.y = output(h, n, g.mode);
                gelu_far_values(g.x);
                real* want = copy_of(h, g.y);
                gelu_backward_ref(want, g.dy.host, g.x.host, n, g.kind, g.mode);
                gelu_run_backward(&g);
                expect_close(h, "dx", g.y, want, tolerance(2e-6));
                expect_same_for_any_threads(h, "dx", gelu_run_backward, &g, &g.y, 1);
                case_end(h);
            }
}

static void test_gelu(Harness* h) {
    test_gelu_forward(h);
    test_gelu_backward(h);
}

static double gelu_loss(void* state) {
    GeluCase* g = (GeluCase*)state;
    gelu_run_forward(g);
    double loss = 0;
    for (size_t i = 0; i < g->x.n; i++) loss += (double)g->dy.host[i] * g->y.host[i];
    return loss;
}

static void grad_gelu(Harness* h) {
    for (int kind = GELU_TANH; kind <= GELU_ERF; kind++) {
        GeluCase g;
        g.kind = (Gelu)kind;
        g.ctx = &h->ctx;
        size_t n = 60;
        case_begin(h, "gelu/grad %s n=%zu", gelu_name(g.kind), n);
        g.x = input(h, n, 2.0);
        g.dy = input(h, n, 1.0);
        g.y = output(h, n, SET);
        real* dx = (real*)case_memory(h, n * sizeof(real));
        gelu_backward_ref(dx, g.dy.host, g.x.host, n, g.kind, SET);
        expect_gradient(h, "dx", gelu_loss, &g, g.x.host, n, dx, 1e-8);
        Array got = output(h, n, SET);
        gelu_backward(got.device, g.dy.device, g.x.device, n, g.kind, SET, &h->ctx);
        expect_gradient(h, "dx of the launcher", gelu_loss, &g, g.x.host, n, got.host, 1e-8);
        case_end(h);
    }
}

static void bench_gelu(Harness* h) {
    size_t n = (size_t)(HAS_DEVICE_MEMORY ? 65536 : 256) * 3072;
    const char* shapes = HAS_DEVICE_MEMORY ? "n=65536*3072" : "n=256*3072";
    for (int kind = GELU_TANH; kind <= GELU_ERF; kind++) {
        GeluCase g;
        g.kind = (Gelu)kind;
        g.mode = SET;
        g.ctx = &h->ctx;
        case_begin(h, "gelu bench");
        g.x = input(h, n, 1.0);
        g.dy = input(h, n, 1.0);
        g.y = output(h, n, SET);
        char name[64];
        snprintf(name, sizeof name, "gelu_forward %s", gelu_name(g.kind));
        double seconds = bench_seconds(h, gelu_run_forward, &g);
        bench_report(h, name, shapes, seconds, GELU_FORWARD_FLOPS(n), GELU_FORWARD_BYTES(n));
        snprintf(name, sizeof name, "gelu_backward %s", gelu_name(g.kind));
        seconds = bench_seconds(h, gelu_run_backward, &g);
        bench_report(h, name, shapes, seconds, GELU_BACKWARD_FLOPS(n), GELU_BACKWARD_BYTES(n, SET));
        case_free(h);
    }
}

#endif
