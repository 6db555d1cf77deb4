/* Cases of llmc/ops/matmul/hopper.cuh, which other GPUs than Hopper's refuse: shapes of one tile, of several for a block,
 * and such that end within a tile. matmul_hopper_bench.h has the bench. */
#ifndef DEV_OPS_MATMUL_HOPPER_H
#define DEV_OPS_MATMUL_HOPPER_H

#include "gelu.h"
#include "matmul.h"

#ifdef __CUDACC__

enum { MATMUL_OWN = 3, MATMUL_USUAL = 2 };  // ctx->gelu_fusion

static GemmProduct matmul_hopper_forward_product(const MatmulCase* m) {
    GemmProduct z = {m->y.device, m->pre.device, m->p.b, NULL, m->s.N, m->s.OC, m->s.IC};
    return z;
}

static GemmProduct matmul_hopper_backward_product(const MatmulCase* m) {
    GemmProduct z = {m->dx.device, m->pre.device, NULL, NULL, m->s.N, m->s.IC, m->s.OC};
    return z;
}

static void matmul_hopper_run_forward(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    CHECK(matmul_hopper_gelu_forward(matmul_hopper_forward_product(m), m->x.device, m->w.device, m->kind, m->ctx));
}

static void matmul_hopper_run_backward(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    BiasGrad d = {m->dbias, m->mode};
    CHECK(
        matmul_hopper_gelu_backward(matmul_hopper_backward_product(m), d, m->dy.device, m->w.device, m->kind, m->ctx));
}

static void test_matmul_hopper_forward(Harness* h, MatmulShape s, Gelu kind, int with_bias) {
    case_begin(h, "matmul_hopper/forward N=%d IC=%d OC=%d %s%s", s.N, s.IC, s.OC, gelu_name(kind),
               with_bias ? " bias" : "");
    MatmulCase m = matmul_case(h, s, SET);
    m.kind = kind;
    m.y = output(h, matmul_size(s.N, s.OC), SET);
    m.pre = output(h, m.y.n, SET);
    if (!with_bias) m.p.b = NULL;
    real *want = copy_of(h, m.y), *sum = copy_of(h, m.y);
    real *x = matmul_magnitudes(h, m.x), *w = matmul_magnitudes(h, m.w), *b = matmul_magnitudes(h, m.b);
    matmul_forward_ref(want, m.x.host, m.w.host, with_bias ? m.b.host : NULL, s.N, s.IC, s.OC, SET);
    matmul_forward_ref(sum, x, w, with_bias ? b : NULL, s.N, s.IC, s.OC, SET);
    Array both[2];
    both[0] = m.y, both[1] = m.pre;
    expect_same_for_any_threads(h, "y and pre", matmul_hopper_run_forward, &m, both, 2);
    expect_close_to_sum(h, "pre", m.pre, want, sum, matmul_tolerance(s.IC));
    for (size_t i = 0; i < m.y.n; i++) want[i] = (real)gelu_exact(m.pre.host[i], kind);
    expect_close(h, "y", m.y, want, tolerance(1e-6));  // of the rounded pre
    case_end(h);
}

// `bias`: 0 no dbias, 1 SET, 2 ADD.
static void test_matmul_hopper_backward(Harness* h, MatmulShape s, Gelu kind, int bias) {
    static const char* const BIASES[] = {"", " dbias SET", " dbias ADD"};
    Mode mode = bias == 2 ? ADD : SET;
    case_begin(h, "matmul_hopper/backward N=%d IC=%d OC=%d %s%s", s.N, s.IC, s.OC, gelu_name(kind), BIASES[bias]);
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
    expect_same_for_any_threads(h, "dpre and dbias", matmul_hopper_run_backward, &m, both, 2);
    // |gelu'| < 1.13, and the product is rounded to floatX before it is multiplied by that.
    double product = 1.2 * (matmul_tolerance(s.OC) + array_rounding(m.dx)), rounding = array_rounding(m.dx);
    expect_close_to_sum(h, "dpre", m.dx, want, sum, product + tolerance(1e-6));
    // Of the kernel's own dpre, which it sums before it rounds it.
    matmul_backward_bias_ref(want_bias, m.dx.host, s.N, s.IC, mode);
    real* sizes = matmul_magnitudes(h, m.dx);
    for (size_t i = 0; i < m.dx.n; i++) sizes[i] = (real)fmax(sizes[i], array_smallest(m.dx));
    matmul_backward_bias_ref(sum_bias, sizes, s.N, s.IC, mode);
    if (bias) expect_close_to_sum(h, "dbias", dbias, want_bias, sum_bias, matmul_tolerance(s.N) + rounding);
    else expect_equal(h, "dbias, not asked for", dbias, untouched);
    case_end(h);
}

// The share of elements whose bits differ.
static double matmul_hopper_share(Array got, const real* want) {
    size_t wrong = 0;
    array_download(got);
    for (size_t i = 0; i < got.n; i++) wrong += memcmp(&got.host[i], &want[i], sizeof(real)) != 0;
    return (double)wrong / (double)got.n;
}

// Against products and kernels of GELU apart, which compute the same numbers: sums of eight terms hardly depend on their
// order. The two forms of GELU round to different numbers in some hundredths of the elements, which no tolerance of
// 16-bit numbers sees.
static void test_matmul_hopper_bits(Harness* h, Gelu kind) {
    const double most = 2e-3;
    MatmulShape s = {300, 8, 264}, turned = {300, 264, 8};
    case_begin(h, "matmul_hopper/bits N=%d %s", s.N, gelu_name(kind));
    MatmulCase m = matmul_case(h, s, SET);
    m.kind = kind;
    m.y = output(h, matmul_size(s.N, s.OC), SET);
    m.pre = output(h, m.y.n, SET);
    matmul_hopper_run_forward(&m);
    real *y = copy_of(h, m.y), *pre = copy_of(h, m.pre);
    matmul_run_forward(&m);
    expect_within(h, "share of pre that differs", matmul_hopper_share(m.y, pre), 0, most);
    matmul_apply_gelu(m.y.device, m.pre.device, m.y.n, FORWARD, kind, m.ctx);
    expect_within(h, "share of y that differs", matmul_hopper_share(m.y, y), 0, most);
    m.s = turned;
    m.dy = m.x, m.dx = m.y;
    matmul_hopper_run_backward(&m);
    real* dx = copy_of(h, m.dx);
    matmul_run_backward_input(&m);
    matmul_apply_gelu(m.dx.device, m.pre.device, m.dx.n, BACKWARD, kind, m.ctx);
    expect_within(h, "share of dpre that differs", matmul_hopper_share(m.dx, dx), 0, most);
    case_end(h);
}

// Rows that are not of 16 bytes, and pointers between them: nothing is written.
static void test_matmul_hopper_refuses(Harness* h, MatmulShape s, int offset) {
    case_begin(h, "matmul_hopper/refuses N=%d IC=%d OC=%d, %d elements off", s.N, s.IC, s.OC, offset);
    MatmulCase m = matmul_case(h, s, SET);
    m.y = output(h, matmul_size(s.N, s.OC), SET);
    m.pre = output(h, m.y.n, SET);
    real* untouched = copy_of(h, m.y);
    GemmProduct z = matmul_hopper_forward_product(&m);
    int ran = matmul_hopper_gelu_forward(z, m.x.device + offset, m.w.device, GELU_TANH, m.ctx);
    expect_true(h, "it says that it did nothing", ran == 0);
    expect_equal(h, "y", m.y, untouched);
    expect_equal(h, "pre", m.pre, untouched);
    case_end(h);
}

// Large matmuls with short sums prefer this kernel.
static void test_matmul_hopper_preferred(Harness* h) {
    static const struct {
        int fusion, M, N, K, is_preferred;
    } cases[] = {
        {3, 65536, 3072, 768, 1}, {2, 65536, 3072, 768, 0}, {3, 32768, 4096, 1024, 1}, {3, 32768, 4096, 1032, 0},
        {3, 512, 4096, 1024, 0},  {3, 8448, 2048, 64, 1},   {3, 8320, 2048, 64, 0},
    };
    Context ctx = h->ctx;
    ctx.multiprocessors = 132;
    case_begin(h, "matmul_hopper/preferred");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        GemmProduct z = {.M = cases[i].M, .N = cases[i].N, .K = cases[i].K};
        ctx.gelu_fusion = cases[i].fusion;
        expect_true(h, "as listed", matmul_prefers_own(&z, &ctx) == cases[i].is_preferred);
    }
    case_end(h);
}

static void test_matmul_hopper(Harness* h) {
    static const MatmulShape shapes[] = {{1, 8, 8},       {128, 64, 256},  {256, 192, 512}, {300, 72, 264},
                                         {129, 200, 520}, {40, 264, 1032}, {900, 136, 776}};
    static const MatmulShape many = {4200, 72, 2056};  // two or three tiles for each block of an H100
    static const MatmulShape refused[] = {{64, 64, 12}, {64, 12, 64}, {64, 64, 64}};
    static const MatmulShape odd[] = {{900, 136, 12}, {900, 12, 136}};
    for (size_t i = 0; i < COUNT_OF(refused); i++) test_matmul_hopper_refuses(h, refused[i], i == 2 ? 4 : 0);
    test_matmul_hopper_preferred(h);
    int multiprocessors = h->ctx.multiprocessors;
    h->ctx.gelu_fusion = MATMUL_OWN, h->ctx.multiprocessors = 2;  // so that eight tiles are enough
    for (int kind = 0; kind < 2; kind++) test_matmul_gelu(h, odd[kind], kind ? GELU_ERF : GELU_TANH, " own refuses");
    test_matmul_gelu(h, shapes[6], GELU_TANH, " own");
    h->ctx.multiprocessors = multiprocessors;
    if (!matmul_hopper_runs(&h->ctx)) return;
    for (int kind = 0; kind < 2; kind++) test_matmul_hopper_bits(h, kind ? GELU_ERF : GELU_TANH);
    for (size_t i = 0; i < COUNT_OF(shapes); i++)
        for (int k = 0; k < 2; k++) {
            Gelu kind = k ? GELU_ERF : GELU_TANH;
            MatmulShape s = shapes[i], turned = {s.N, s.OC, s.IC};
            test_matmul_hopper_forward(h, s, kind, (int)i % 2 == k);
            test_matmul_hopper_backward(h, turned, kind, (int)(i + (size_t)k) % 3);
        }
#ifndef DEV_EMULATOR_EMULATOR_H
    MatmulShape turned = {many.N, many.OC, many.IC};
    test_matmul_hopper_forward(h, many, GELU_TANH, 1);
    test_matmul_hopper_backward(h, turned, GELU_ERF, 2);
#else
    (void)many;
#endif
}

#endif
#endif
