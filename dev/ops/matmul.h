/* Cases of matmul: all directions, both modes, fused GELU, with and without bias; sizes around and below the CPU
 * version's tiles and blocks. matmul_bench.h has the bench. */
#ifndef DEV_OPS_MATMUL_H
#define DEV_OPS_MATMUL_H

#include <float.h>

#include "harness.h"
#include "llmc/ops/matmul/matmul.h"

typedef struct {
    int N, IC, OC;
} MatmulShape;

typedef struct {
    MatmulShape s;
    Array x, w, b, y, pre, dx, dw, db, dy;  // of which a case fills what it needs
    Linear p;
    LinearGrads d;
    real* dbias;  // of the layer before GELU; NULL: not wanted
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
    BiasGrad d = {m->dbias, m->mode};
    matmul_gelu_backward_input(m->dx.device, d, m->dy.device, m->w.device, m->pre.device, m->s.N, m->s.IC, m->s.OC,
                               m->kind, m->ctx);
}

static void matmul_run_backward_weight(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    matmul_backward_weight(m->d, m->dy.device, m->x.device, m->s.N, m->s.IC, m->s.OC, m->mode, m->ctx);
}

#ifdef __CUDACC__
static void matmul_run_backward_bias(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    BiasGrad d = {m->d.b, m->mode};
    matmul_backward_bias(d, m->dy.device, m->s.N, m->s.OC, m->ctx);
}
#endif

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
// far, with random signs. The CPU sums blocks of 256 terms apart, then the sums of the blocks. On the GPU fp32 products
// may be summed in one go, and tensor cores add 16 products at a time, but cut the digits off instead of rounding:
// those errors have one sign.
static double matmul_tolerance(int terms) {
    double epsilon = sizeof(real) == sizeof(double) ? DBL_EPSILON : FLT_EPSILON;
    if (sizeof(floatX) < sizeof(real)) return epsilon * (4 + terms / 8);
    if (HAS_DEVICE_MEMORY) return epsilon * (4 + sqrt(terms));
    return epsilon * (2 + sqrt(min_int(terms, 256) + terms / 256));
}

// Error bound of an epilogue's GELU, for a downloaded array: the hardware's tanh is accurate to 2^-11 only.
static double matmul_epilogue_error(Array a) { return array_rounding(a) > 0 ? 4e-3 : 0; }

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
    // Where no epilogue adds the bias, the sum is rounded to floatX before and after; so it is where cuBLASLt adds to y
    // (seen in fp16: 0.86 of the last digit).
    int is_rounded_twice = with_bias || mode == ADD;
    expect_close_to_sum(h, "y", m.y, want, sum, matmul_tolerance(s.IC) + (is_rounded_twice ? array_rounding(m.y) : 0));
    case_end(h);
}

static void test_matmul_gelu_forward(Harness* h, MatmulShape s, Gelu kind, const char* way) {
    case_begin(h, "matmul/gelu_forward N=%d IC=%d OC=%d %s%s", s.N, s.IC, s.OC, kind == GELU_ERF ? "ERF" : "TANH", way);
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
    expect_close_to_sum(h, "pre", m.pre, want_pre, sum, matmul_tolerance(s.IC) + array_rounding(m.pre));
    for (size_t i = 0; i < m.y.n; i++) want[i] = (real)gelu_exact(m.pre.host[i], kind);
    // For the launcher's own pre: 3e-7 as in ops/common/activation.h. An epilogue uses unrounded pre; |gelu'| < 1.13.
    expect_close(h, "y", m.y, want, tolerance(5e-7) + 1.4 * array_rounding(m.y) + matmul_epilogue_error(m.y));
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
    expect_close_to_sum(h, "dx", m.dx, want, sum, matmul_tolerance(s.OC) + (mode == ADD ? array_rounding(m.dx) : 0));
    case_end(h);
}

// `bias`: 0 no dbias, 1 SET, 2 ADD.
static void test_matmul_gelu_backward_input(Harness* h, MatmulShape s, Gelu kind, int bias, const char* way) {
    static const char* const BIASES[] = {"", " dbias SET", " dbias ADD"};
    Mode mode = bias == 2 ? ADD : SET;
    case_begin(h, "matmul/gelu_backward_input N=%d IC=%d OC=%d %s%s%s", s.N, s.IC, s.OC,
               kind == GELU_ERF ? "ERF" : "TANH", BIASES[bias], way);
    MatmulCase m = matmul_case(h, s, mode);
    Array dbias = output(h, (size_t)s.IC, mode);
    if (bias) m.dbias = dbias.device_real;
    m.kind = kind;
    m.pre = input(h, matmul_size(s.N, s.IC), 2.0);
    m.dx = output(h, m.pre.n, SET);
    real *want = copy_of(h, m.dx), *sum = copy_of(h, m.dx);
    real *dy = matmul_magnitudes(h, m.dy), *w = matmul_magnitudes(h, m.w);
    matmul_gelu_backward_input_ref(want, m.dy.host, m.w.host, m.pre.host, s.N, s.IC, s.OC, kind);
    matmul_backward_input_ref(sum, dy, w, s.N, s.IC, s.OC, SET);
    real *want_bias = copy_of(h, dbias), *sum_bias = matmul_magnitudes(h, dbias), *untouched = copy_of(h, dbias);
    Array both[2];
    both[0] = m.dx, both[1] = dbias;
    expect_same_for_any_threads(h, "dpre and dbias", matmul_run_gelu_backward_input, &m, both, 2);
    // |gelu'| < 1.13, and the launcher's is within 1e-6; without an epilogue the product is rounded to floatX too
    double product = 1.2 * (matmul_tolerance(s.OC) + array_rounding(m.dx));
    expect_close_to_sum(h, "dpre", m.dx, want, sum, product + tolerance(1e-6) + 2 * matmul_epilogue_error(m.dx));
    // Of the launcher's own dpre, which a kernel may sum before it rounds it.
    double rounding = array_rounding(m.dx);
    matmul_backward_bias_ref(want_bias, m.dx.host, s.N, s.IC, mode);
    real* sizes = matmul_magnitudes(h, m.dx);
    for (size_t i = 0; i < m.dx.n; i++) sizes[i] = (real)fmax(sizes[i], array_smallest(m.dx));
    matmul_backward_bias_ref(sum_bias, sizes, s.N, s.IC, mode);
    if (bias)
        expect_close_to_sum(h, "dbias", dbias, want_bias, sum_bias,
                            matmul_tolerance(HAS_DEVICE_MEMORY ? s.N : 1) + rounding);
    else expect_equal(h, "dbias, not asked for", dbias, untouched);
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
    // The CPU sums db in double.
    if (with_bias) expect_close_to_sum(h, "db", m.db, want_b, sum_b, matmul_tolerance(HAS_DEVICE_MEMORY ? s.N : 1));
    else expect_equal(h, "db, not asked for", m.db, want_b);
    case_end(h);
}

// `way`: how the GPU computes it; a part of the case's name.
static void test_matmul_gelu(Harness* h, MatmulShape s, Gelu kind, const char* way) {
    test_matmul_gelu_forward(h, s, kind, way);
    for (int bias = 0; bias < 3; bias++) test_matmul_gelu_backward_input(h, s, kind, bias, way);
}

#ifdef __CUDACC__

// Choices that were timed are found again in their text, and give the same bits.
static void test_matmul_autotune(Harness* h) {
    MatmulShape s = {2048, 1024, 1024};
    Text chosen = {NULL, 0, 0};
    real *first_y = NULL, *first_dw = NULL;
    case_begin(h, "matmul/autotune N=%d IC=%d OC=%d", s.N, s.IC, s.OC);
    MatmulCase m = matmul_case(h, s, ADD);
    m.kind = GELU_TANH;
    m.y = output(h, matmul_size(s.N, s.OC), SET);
    m.pre = output(h, m.y.n, SET);
    m.dw = output(h, matmul_size(s.OC, s.IC), ADD);
    m.d.w = m.dw.device_real;
    m.d.b = NULL;
    for (int round = 0; round < 2; round++) {  // times; reads the text
        matmul_plans_free(&h->ctx);
        h->ctx.autotune = round == 0;
        if (round == 1) {
            Text kept = {NULL, 0, 0};
            matmul_plans_load(&h->ctx, chosen.text);
            matmul_plans_text(&h->ctx, &kept);
            expect_true(h, "choices that are not needed yet are kept",
                        kept.text && strcmp(kept.text, chosen.text) == 0);
            free(kept.text);
        }
        array_restore(m.dw);
        matmul_run_gelu_forward(&m);
        matmul_run_backward_weight(&m);
        Text now = {NULL, 0, 0};
        matmul_plans_text(&h->ctx, &now);
        if (round == 0) {
            first_y = copy_of(h, m.y), first_dw = copy_of(h, m.dw);
            chosen = now;
            continue;
        }
        expect_equal(h, "y", m.y, first_y);
        expect_equal(h, "dw", m.dw, first_dw);
        for (char* line = strtok(now.text, "\n"); line; line = strtok(NULL, "\n"))
            expect_true(h, "the choice is the first one", strstr(chosen.text, line) != NULL);
        free(now.text);
    }
    case_end(h);
    free(chosen.text);
    matmul_plans_free(&h->ctx);
}

// Sequences of any length: N changes from call to call, and calls of one range share a timed choice.
static void test_matmul_rows(Harness* h) {
    static const int ROWS[] = {2048, 1999, 2048, 1793};
    MatmulShape s = {2048, 1024, 1024};
    case_begin(h, "matmul/forward IC=%d OC=%d for N of one range", s.IC, s.OC);
    matmul_plans_free(&h->ctx);
    h->ctx.autotune = 1;
    MatmulCase m = matmul_case(h, s, SET);
    m.y = output(h, matmul_size(s.N, s.OC), SET);
    real *untouched = copy_of(h, m.y), *full = NULL;
    size_t length = 0;
    for (size_t i = 0; i < COUNT_OF(ROWS); i++) {
        m.s.N = ROWS[i];
        array_restore(m.y);
        matmul_run_forward(&m);
        Text chosen = {NULL, 0, 0};
        matmul_plans_text(&h->ctx, &chosen);
        expect_true(h, "one choice", chosen.length > 0 && (i == 0 || chosen.length == length));
        length = chosen.length;
        free(chosen.text);
        array_download(m.y);
        if (i == 0) full = copy_of(h, m.y);
        size_t n = matmul_size(ROWS[i], s.OC), wrong = 0;
        for (size_t k = n; k < m.y.n; k++) wrong += memcmp(&m.y.host[k], &untouched[k], sizeof(real)) != 0;
        expect_true(h, "rows past N untouched", wrong == 0);
        m.y.n = n;
        expect_close(h, "y", m.y, full, 1e-3);
        m.y.n = matmul_size(s.N, s.OC);
    }
    case_end(h);
    h->ctx.autotune = 0;
    matmul_plans_free(&h->ctx);
}

#endif

// Weight gradients are of full precision, whatever the operands are.
static void test_matmul_bytes(Harness* h, Mode mode) {
    const double x = 3 * 5, w = 7 * 5, y = 3 * 7, again = mode == ADD;
    MatmulShape s = {3, 5, 7};
    case_begin(h, "matmul/bytes %s", mode_name(mode));
    MatmulCase m = matmul_case(h, s, mode);
    m.y = output(h, m.dy.n, mode);
    m.dx = output(h, m.x.n, mode);
    m.dw = output(h, m.w.n, mode);
    m.d.w = m.dw.device_real;
    expect_bytes(h, "matmul_forward", matmul_run_forward, &m, (x + w + y + again * y) * sizeof(floatX));
    expect_bytes(h, "matmul_backward_input", matmul_run_backward_input, &m, (x + w + y + again * x) * sizeof(floatX));
    expect_bytes(h, "matmul_backward_weight", matmul_run_backward_weight, &m,
                 (x + y) * sizeof(floatX) + (w + again * w) * sizeof(real));
    m.pre = input(h, m.dy.n, 1.0);
    expect_bytes(h, "matmul_gelu_forward", matmul_run_gelu_forward, &m, (x + w + 2 * y) * sizeof(floatX));
    m.pre = input(h, m.x.n, 1.0);
    expect_bytes(h, "matmul_gelu_backward_input", matmul_run_gelu_backward_input, &m, (2 * x + w + y) * sizeof(floatX));
    case_end(h);
}

static const MatmulShape MATMUL_SHAPES[] = {
    {1, 1, 1},       {1, 48, 33},     {77, 48, 144},   {77, 33, 1},     {5, 300, 97},
    {3, 768, 48},    {33, 7, 600},    {300, 103, 77},  {600, 131, 33},  {17, 520, 1030},
    {512, 128, 256}, {64, 1600, 64},  {449, 128, 256}, {501, 128, 256},  // of the same range as 512
    {1, 1600, 768},  {17, 768, 1024}, {1, 1024, 1600}, {1024, 48, 64},
};

static void test_matmul_forward_shapes(Harness* h) {
    for (size_t i = 0; i < COUNT_OF(MATMUL_SHAPES); i++)
        for (int k = 0; k < 4; k++) test_matmul_forward(h, MATMUL_SHAPES[i], k & 2 ? ADD : SET, k & 1);
}

static void test_matmul(Harness* h) {
    test_matmul_forward_shapes(h);
    for (size_t i = 0; i < COUNT_OF(MATMUL_SHAPES); i++)
        for (int k = 0; k < 2; k++) {
            const MatmulShape shape = MATMUL_SHAPES[i];
            Mode mode = k ? ADD : SET;
            Gelu kind = k ? GELU_ERF : GELU_TANH;
            for (int with_bias = 0; with_bias < 2; with_bias++) test_matmul_backward_weight(h, shape, mode, with_bias);
            test_matmul_backward_input(h, shape, mode);
            test_matmul_gelu(h, shape, kind, "");
#ifdef __CUDACC__
            h->ctx.gelu_fusion = 0;
            if (kind == GELU_TANH) test_matmul_gelu(h, shape, kind, " without epilogue");
            h->ctx.gelu_fusion = 1;
#endif
        }
    for (int k = 0; k < 2; k++) test_matmul_bytes(h, k ? ADD : SET);
#ifdef __CUDACC__
    test_matmul_autotune(h);
    test_matmul_rows(h);
#endif
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

#endif
