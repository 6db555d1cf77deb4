/* Cases of the kernels that follow a product on the GPU, without the products. cuBLASLt's kernels crash
 * compute-sanitizer's racecheck, so it checks only our own kernels here. */
#ifndef DEV_OPS_MATMUL_EPILOGUE_H
#define DEV_OPS_MATMUL_EPILOGUE_H

#include "matmul.h"

#ifdef __CUDACC__

// db of dy [N, OC].
static void test_matmul_epilogue_bias(Harness* h, int N, int OC, Mode mode) {
    case_begin(h, "matmul_epilogue/backward_bias N=%d OC=%d %s", N, OC, mode_name(mode));
    MatmulShape s = {N, 1, OC};
    MatmulCase m = matmul_case(h, s, mode);
    m.db = output(h, (size_t)OC, mode);
    m.d.b = m.db.device_real;
    real *want = copy_of(h, m.db), *sum = matmul_magnitudes(h, m.db), *dy = matmul_magnitudes(h, m.dy);
    matmul_backward_bias_ref(want, m.dy.host, N, OC, mode);
    matmul_backward_bias_ref(sum, dy, N, OC, mode);
    expect_same_for_any_threads(h, "db", matmul_run_backward_bias, &m, &m.db, 1);
    expect_close_to_sum(h, "db", m.db, want, sum, matmul_tolerance(N));
    case_end(h);
}

static void matmul_epilogue_run_gelu(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    BiasGrad d = {m->dbias, m->mode};
    // In place, and the case runs it more than once: from the same start each time.
    cudaCheck(cudaMemcpyAsync(m->dx.device, m->dy.device, m->dy.n * sizeof(floatX), cudaMemcpyDeviceToDevice,
                              m->ctx->stream));
    matmul_gelu_backward_bias(d, m->dx.device, m->pre.device, m->s.N, m->s.OC, m->kind, m->ctx);
}

// dpre = gelu'(pre) dy, and db of that unless it is not wanted.
static void test_matmul_epilogue_gelu(Harness* h, int N, int OC, Gelu kind, int has_bias, Mode mode) {
    case_begin(h, "matmul_epilogue/gelu_backward_bias N=%d OC=%d %s %s", N, OC, kind == GELU_ERF ? "ERF" : "TANH",
               has_bias ? mode_name(mode) : "without");
    MatmulShape s = {N, 1, OC};
    MatmulCase m = matmul_case(h, s, mode);
    m.kind = kind;
    m.pre = input(h, matmul_size(N, OC), 2.0);
    m.dx = output(h, m.pre.n, SET);
    m.db = output(h, (size_t)OC, mode);
    m.dbias = has_bias ? m.db.device_real : NULL;
    real *want = copy_of(h, m.dx), *sizes = copy_of(h, m.dx);
    for (size_t i = 0; i < m.dx.n; i++) {
        want[i] = (real)(m.dy.host[i] * gelu_derivative_exact(m.pre.host[i], kind));
        sizes[i] = (real)fmax(fabs((double)want[i]), fabs((double)m.dy.host[i]));
    }
    real *want_bias = copy_of(h, m.db), *sum_bias = matmul_magnitudes(h, m.db);
    matmul_backward_bias_ref(want_bias, want, N, OC, mode);
    matmul_backward_bias_ref(sum_bias, sizes, N, OC, mode);
    Array both[2];
    both[0] = m.dx, both[1] = m.db;
    expect_same_for_any_threads(h, "dpre and db", matmul_epilogue_run_gelu, &m, both, has_bias ? 2 : 1);
    expect_close(h, "dpre", m.dx, want, tolerance(1e-6));
    // Terms are good to 1e-6 of dy, and a kernel may sum them after it has rounded them.
    double terms = tolerance(1e-6) + array_rounding(m.dx);
    if (has_bias) expect_close_to_sum(h, "db", m.db, want_bias, sum_bias, matmul_tolerance(N) + terms);
    case_end(h);
}

static void test_matmul_epilogue(Harness* h) {
    static const int rows[] = {1, 17, 1000}, columns[] = {33, 48, 768, 1600};
    for (size_t i = 0; i < COUNT_OF(rows); i++)
        for (size_t k = 0; k < COUNT_OF(columns); k++)
            for (int add = 0; add < 2; add++) {
                int N = rows[i], OC = columns[k];
                test_matmul_epilogue_bias(h, N, OC, add ? ADD : SET);
                for (int erf = 0; erf < 2; erf++) {
                    test_matmul_epilogue_gelu(h, N, OC, erf ? GELU_ERF : GELU_TANH, 1, add ? ADD : SET);
                    if (!add) test_matmul_epilogue_gelu(h, N, OC, erf ? GELU_ERF : GELU_TANH, 0, SET);
                }
            }
}

#endif
#endif
