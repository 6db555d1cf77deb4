/* Cases of matmul: all directions, both modes, fused GELU, with and without bias; sizes around and below the CPU
 * version's tiles and blocks; the shapes of GPT-2 124M for the bench. */
#ifndef DEV_OPS_MATMUL_H
#define DEV_OPS_MATMUL_H

#include <float.h>

#include "../../llmc/ops/matmul.h"
#include "harness.h"

typedef struct {
    int N, IC, OC;
} MatmulShape;

typedef struct {
    MatmulShape s;
    Array x, w, b, y, pre, dx, dw, db, dy;  // of which a case fills what it needs
    Affine p;
    AffineGradient d;
    Gelu kind;
    Mode mode;
    Context* ctx;
} MatmulCase;

static void matmul_run_forward(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    matmul_forward(m->y.device, m->x.device, m->p, m->s.N, m->s.IC, m->s.OC, m->mode, m->ctx);
}

static void matmul_run_gelu_forward(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    matmul_gelu_forward(m->y.device, m->pre.device, m->x.device, m->p, m->s.N, m->s.IC, m->s.OC, m->kind, m->ctx);
}

static void matmul_run_backward_input(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    matmul_backward_input(m->dx.device, m->dy.device, m->w.device, m->s.N, m->s.IC, m->s.OC, m->mode, m->ctx);
}

static void matmul_run_gelu_backward_input(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    matmul_gelu_backward_input(m->dx.device, m->dy.device, m->w.device, m->pre.device, m->s.N, m->s.IC, m->s.OC,
                               m->kind, m->ctx);
}

static void matmul_run_backward_weight(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    matmul_backward_weight(m->d, m->dy.device, m->x.device, m->s.N, m->s.IC, m->s.OC, m->mode, m->ctx);
}

static size_t matmul_size(int rows, int columns) { return (size_t)rows * (size_t)columns; }

// Inputs of every direction, with the spread of real ones; outputs are made by the case.
static MatmulCase matmul_case(Harness* h, MatmulShape s, Mode mode) {
    MatmulCase m;
    memset(&m, 0, sizeof m);
    m.s = s;
    m.mode = mode;
    m.ctx = &h->ctx;
    m.x = input(h, matmul_size(s.N, s.IC), 1.0);
    m.w = input(h, matmul_size(s.OC, s.IC), 1.0);
    m.b = input(h, (size_t)s.OC, 1.0);
    m.dy = input(h, matmul_size(s.N, s.OC), 1.0);
    m.p.w = m.w.device;
    m.p.b = m.b.device;
    return m;
}

static real* matmul_magnitudes(Harness* h, Array a) {
    real* copy = copy_of(h, a);
    for (size_t i = 0; i < a.n; i++) copy[i] = (real)fabs(copy[i]);
    return copy;
}

// Each of the n additions that follow one another in a sum errs by up to half an epsilon of what was summed so
// far, with random signs. Blocks of 256 terms are summed apart, then the sums of the blocks.
static double matmul_tolerance(int terms) {
    double epsilon = sizeof(real) == sizeof(double) ? DBL_EPSILON : FLT_EPSILON;
    return epsilon * (2 + sqrt(min_int(terms, 256) + terms / 256));
}

static void test_matmul_forward(Harness* h, MatmulShape s, Mode mode, int with_bias) {
    case_begin(h, "matmul/forward N=%d IC=%d OC=%d %s%s", s.N, s.IC, s.OC, mode_name(mode), with_bias ? " bias" : "");
    MatmulCase m = matmul_case(h, s, mode);
    m.y = output(h, matmul_size(s.N, s.OC), mode);
    if (!with_bias) m.p.b = NULL;
    real *want = copy_of(h, m.y), *sum = matmul_magnitudes(h, m.y);
    real *x = matmul_magnitudes(h, m.x), *w = matmul_magnitudes(h, m.w), *b = matmul_magnitudes(h, m.b);
    matmul_forward_ref(want, m.x.host, m.w.host, with_bias ? m.b.host : NULL, s.N, s.IC, s.OC, mode);
    matmul_forward_ref(sum, x, w, with_bias ? b : NULL, s.N, s.IC, s.OC, mode);
    expect_same_for_any_threads(h, "y", matmul_run_forward, &m, &m.y, 1);
    expect_close_to_sum(h, "y", m.y, want, sum, matmul_tolerance(s.IC));
    case_end(h);
}

static void test_matmul_gelu_forward(Harness* h, MatmulShape s, Gelu kind) {
    case_begin(h, "matmul/gelu_forward N=%d IC=%d OC=%d %s", s.N, s.IC, s.OC, kind == GELU_ERF ? "ERF" : "TANH");
    MatmulCase m = matmul_case(h, s, SET);
    m.kind = kind;
    m.y = output(h, matmul_size(s.N, s.OC), SET);
    m.pre = output(h, m.y.n, SET);
    real *want = copy_of(h, m.y), *want_pre = copy_of(h, m.y), *sum = copy_of(h, m.y);
    real *x = matmul_magnitudes(h, m.x), *w = matmul_magnitudes(h, m.w), *b = matmul_magnitudes(h, m.b);
    matmul_gelu_forward_ref(want, want_pre, m.x.host, m.w.host, m.b.host, s.N, s.IC, s.OC, kind);
    matmul_forward_ref(sum, x, w, b, s.N, s.IC, s.OC, SET);
    Array both[2];
    both[0] = m.y, both[1] = m.pre;
    expect_same_for_any_threads(h, "y and pre", matmul_run_gelu_forward, &m, both, 2);
    expect_close_to_sum(h, "pre", m.pre, want_pre, sum, matmul_tolerance(s.IC));
    for (size_t i = 0; i < m.y.n; i++) want[i] = (real)gelu_exact(m.pre.host[i], kind);
    expect_close(h, "y", m.y, want, tolerance(5e-7));  // of the launcher's own pre: device/activation.h's 3e-7
    case_end(h);
}

static void test_matmul_backward_input(Harness* h, MatmulShape s, Mode mode) {
    case_begin(h, "matmul/backward_input N=%d IC=%d OC=%d %s", s.N, s.IC, s.OC, mode_name(mode));
    MatmulCase m = matmul_case(h, s, mode);
    m.dx = output(h, matmul_size(s.N, s.IC), mode);
    real *want = copy_of(h, m.dx), *sum = matmul_magnitudes(h, m.dx);
    real *dy = matmul_magnitudes(h, m.dy), *w = matmul_magnitudes(h, m.w);
    matmul_backward_input_ref(want, m.dy.host, m.w.host, s.N, s.IC, s.OC, mode);
    matmul_backward_input_ref(sum, dy, w, s.N, s.IC, s.OC, mode);
    expect_same_for_any_threads(h, "dx", matmul_run_backward_input, &m, &m.dx, 1);
    expect_close_to_sum(h, "dx", m.dx, want, sum, matmul_tolerance(s.OC));
    case_end(h);
}

static void test_matmul_gelu_backward_input(Harness* h, MatmulShape s, Gelu kind) {
    case_begin(h, "matmul/gelu_backward_input N=%d IC=%d OC=%d %s", s.N, s.IC, s.OC, kind == GELU_ERF ? "ERF" : "TANH");
    MatmulCase m = matmul_case(h, s, SET);
    m.kind = kind;
    m.pre = input(h, matmul_size(s.N, s.IC), 2.0);
    m.dx = output(h, m.pre.n, SET);
    real *want = copy_of(h, m.dx), *sum = copy_of(h, m.dx);
    real *dy = matmul_magnitudes(h, m.dy), *w = matmul_magnitudes(h, m.w);
    matmul_gelu_backward_input_ref(want, m.dy.host, m.w.host, m.pre.host, s.N, s.IC, s.OC, kind);
    matmul_backward_input_ref(sum, dy, w, s.N, s.IC, s.OC, SET);
    expect_same_for_any_threads(h, "dpre", matmul_run_gelu_backward_input, &m, &m.dx, 1);
    // |gelu'| < 1.13, and the launcher's is within 1e-6
    expect_close_to_sum(h, "dpre", m.dx, want, sum, 1.2 * matmul_tolerance(s.OC) + tolerance(1e-6));
    case_end(h);
}

static void test_matmul_backward_weight(Harness* h, MatmulShape s, Mode mode, int with_bias) {
    case_begin(h, "matmul/backward_weight N=%d IC=%d OC=%d %s%s", s.N, s.IC, s.OC, mode_name(mode),
               with_bias ? " bias" : "");
    MatmulCase m = matmul_case(h, s, mode);
    m.dw = output(h, matmul_size(s.OC, s.IC), mode);
    m.db = output(h, (size_t)s.OC, mode);
    m.d.w = m.dw.device_real;
    m.d.b = with_bias ? m.db.device_real : NULL;
    real *want = copy_of(h, m.dw), *sum = matmul_magnitudes(h, m.dw);
    real *want_b = copy_of(h, m.db), *sum_b = matmul_magnitudes(h, m.db);
    real *dy = matmul_magnitudes(h, m.dy), *x = matmul_magnitudes(h, m.x);
    matmul_backward_weight_ref(want, with_bias ? want_b : NULL, m.dy.host, m.x.host, s.N, s.IC, s.OC, mode);
    matmul_backward_weight_ref(sum, sum_b, dy, x, s.N, s.IC, s.OC, mode);
    Array both[2];
    both[0] = m.dw, both[1] = m.db;
    expect_same_for_any_threads(h, "dw and db", matmul_run_backward_weight, &m, both, 2);
    expect_close_to_sum(h, "dw", m.dw, want, sum, matmul_tolerance(s.N));
    if (with_bias) expect_close_to_sum(h, "db", m.db, want_b, sum_b, matmul_tolerance(1));  // sums in double
    else expect_equal(h, "db, not asked for", m.db, want_b);
    case_end(h);
}

static void test_matmul(Harness* h) {
    static const MatmulShape shapes[] = {
        {1, 1, 1},    {1, 48, 33},  {77, 48, 144},  {77, 33, 1},    {5, 300, 97},
        {3, 768, 48}, {33, 7, 600}, {300, 103, 77}, {600, 131, 33}, {17, 520, 1030},
    };
    for (size_t i = 0; i < COUNT_OF(shapes); i++)
        for (int k = 0; k < 2; k++) {
            Mode mode = k ? ADD : SET;
            Gelu kind = k ? GELU_ERF : GELU_TANH;
            for (int with_bias = 0; with_bias < 2; with_bias++) {
                test_matmul_forward(h, shapes[i], mode, with_bias);
                test_matmul_backward_weight(h, shapes[i], mode, with_bias);
            }
            test_matmul_backward_input(h, shapes[i], mode);
            test_matmul_gelu_forward(h, shapes[i], kind);
            test_matmul_gelu_backward_input(h, shapes[i], kind);
        }
}

// The sum of dy times what a forward function gives.
static double matmul_loss(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    double loss = 0;
    matmul_run_forward(m);
    for (size_t i = 0; i < m->y.n; i++) loss += (double)m->dy.host[i] * m->y.host[i];
    return loss;
}

// The same with GELU before the layer: x = gelu(pre).
static double matmul_gelu_loss(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    for (size_t i = 0; i < m->x.n; i++) m->x.host[i] = (real)gelu_exact(m->pre.host[i], m->kind);
    return matmul_loss(state);
}

static void grad_matmul(Harness* h) {
    MatmulShape s = {7, 33, 19};
    case_begin(h, "matmul/grad N=%d IC=%d OC=%d", s.N, s.IC, s.OC);
    MatmulCase m = matmul_case(h, s, SET);
    m.y = output(h, matmul_size(s.N, s.OC), SET);
    m.dx = output(h, m.x.n, SET);
    m.dw = output(h, m.w.n, SET);
    m.db = output(h, m.b.n, SET);
    m.d.w = m.dw.device_real;
    m.d.b = m.db.device_real;
    real *dx = copy_of(h, m.dx), *dw = copy_of(h, m.dw), *db = copy_of(h, m.db);
    matmul_backward_input_ref(dx, m.dy.host, m.w.host, s.N, s.IC, s.OC, SET);
    matmul_backward_weight_ref(dw, db, m.dy.host, m.x.host, s.N, s.IC, s.OC, SET);
    matmul_run_backward_input(&m);
    matmul_run_backward_weight(&m);
    expect_gradient(h, "dx of the reference", matmul_loss, &m, m.x.host, m.x.n, dx, 1e-7);
    expect_gradient(h, "dw of the reference", matmul_loss, &m, m.w.host, m.w.n, dw, 1e-7);
    expect_gradient(h, "db of the reference", matmul_loss, &m, m.b.host, m.b.n, db, 1e-7);
    expect_gradient(h, "dx", matmul_loss, &m, m.x.host, m.x.n, m.dx.host, 1e-7);
    expect_gradient(h, "dw", matmul_loss, &m, m.w.host, m.w.n, m.dw.host, 1e-7);
    expect_gradient(h, "db", matmul_loss, &m, m.b.host, m.b.n, m.db.host, 1e-7);
    case_end(h);

    for (int kind = GELU_TANH; kind <= GELU_ERF; kind++) {
        case_begin(h, "matmul/gelu_grad N=%d IC=%d OC=%d %s", s.N, s.IC, s.OC, kind == GELU_ERF ? "ERF" : "TANH");
        m = matmul_case(h, s, SET);
        m.kind = (Gelu)kind;
        m.y = output(h, matmul_size(s.N, s.OC), SET);
        m.pre = input(h, m.x.n, 2.0);
        m.dx = output(h, m.x.n, SET);
        dx = copy_of(h, m.dx);
        matmul_gelu_backward_input_ref(dx, m.dy.host, m.w.host, m.pre.host, s.N, s.IC, s.OC, m.kind);
        matmul_run_gelu_backward_input(&m);
        expect_gradient(h, "dpre of the reference", matmul_gelu_loss, &m, m.pre.host, m.pre.n, dx, 1e-7);
        expect_gradient(h, "dpre", matmul_gelu_loss, &m, m.pre.host, m.pre.n, m.dx.host, 1e-7);
        case_end(h);
    }
}

static void bench_matmul(Harness* h) {
    static const MatmulShape shapes[] = {
        {256, 768, 2304}, {256, 768, 768},  {256, 768, 3072}, {256, 3072, 768},   {256, 768, 50304}, {1024, 128, 384},
        {1024, 128, 128}, {1024, 128, 512}, {1024, 512, 128}, {1024, 128, 50304}, {1, 768, 50304},
    };
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        MatmulShape s = shapes[i];
        double flops = MATMUL_FLOPS(s.N, s.IC, s.OC), bytes = MATMUL_BYTES(s.N, s.IC, s.OC);
        char name[64];
        snprintf(name, sizeof name, "N=%d IC=%d OC=%d", s.N, s.IC, s.OC);
        case_begin(h, "matmul bench %s", name);
        MatmulCase m;
        memset(&m, 0, sizeof m);
        m.s = s;
        m.ctx = &h->ctx;
        Array noise = input(h, 1009, 1.0);  // repeated: normal numbers for all would take longer than the bench
        Array* all[] = {&m.x, &m.w, &m.b, &m.y, &m.pre, &m.dx, &m.dw, &m.dy};
        size_t sizes[] = {matmul_size(s.N, s.IC),  matmul_size(s.OC, s.IC), (size_t)s.OC,
                          matmul_size(s.N, s.OC),  matmul_size(s.N, s.OC),  matmul_size(s.N, s.IC),
                          matmul_size(s.OC, s.IC), matmul_size(s.N, s.OC)};
        for (size_t k = 0; k < COUNT_OF(all); k++) {
            all[k]->n = sizes[k];
            all[k]->host = (real*)case_memory(h, sizes[k] * sizeof(real));
            all[k]->device = (floatX*)all[k]->host;
            for (size_t e = 0; e < sizes[k]; e++) all[k]->host[e] = noise.host[e % noise.n];
        }
        m.p.w = m.w.device;
        m.p.b = m.b.device;
        m.d.w = m.dw.device_real;
        m.d.b = m.b.device_real;
        bench_report(h, "matmul_forward", name, bench_seconds(h, matmul_run_forward, &m), flops, bytes);
        bench_report(h, "matmul_backward_input", name, bench_seconds(h, matmul_run_backward_input, &m), flops, bytes);
        bench_report(h, "matmul_backward_weight", name, bench_seconds(h, matmul_run_backward_weight, &m), flops, bytes);
        if (s.OC == 3072)
            bench_report(h, "matmul_gelu_forward", name, bench_seconds(h, matmul_run_gelu_forward, &m), flops, bytes);
        if (s.IC == 3072)
            bench_report(h, "matmul_gelu_backward_input", name, bench_seconds(h, matmul_run_gelu_backward_input, &m),
                         flops, bytes);
        case_free(h);
    }
}

#endif
