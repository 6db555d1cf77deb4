/* muon: values of the iterations that do not come from the reference. */
#ifndef DEV_OPS_MUON_VALUES_H
#define DEV_OPS_MUON_VALUES_H

#include "harness.h"
#include "llmc/device/copies.h"
#include "llmc/muon/muon.h"

// Orthogonalize x, one matrix of rows x cols, by the launcher and by the reference.
static inline void muon_run_iterations(Harness* h, double* got, double* reference, const double* x, int rows,
                                       int cols) {
    const MuonGroup group = {rows, cols, 0, 1, 1};
    const MuonChunk chunk = {NULL, rows, cols, 1, 1};
    MuonSpace space;
    size_t n = muon_elements(group);
    muon_space_bind(&space, case_block(h, muon_space_bind(NULL, NULL, &group, 1), ON_DEVICE), &group, 1);
    HostView in = host_view_open(space.x, n, VIEW_FLOATX);
    for (size_t i = 0; i < n; i++) in.values[i] = (real)(reference[i] = x[i]);
    host_view_write(&h->ctx, &in);
    host_view_close(&in);
    muon_orthogonalize_ref(reference, rows, cols);
    HostView out = host_view_open((void*)muon_orthogonalize(&space, chunk, &h->ctx), n, VIEW_FLOATX);
    host_view_read(&h->ctx, &out);
    for (size_t i = 0; i < n; i++) got[i] = (double)out.values[i];
    host_view_close(&out);
}

// The five iterations on diag(values), which is N x cols.
static inline void test_muon_diagonal(Harness* h, const double* values, const double* want, int N) {
    static const int extra[] = {0, 3};
    for (size_t e = 0; e < COUNT_OF(extra); e++)
        for (int tall = 0; tall <= (extra[e] > 0); tall++) {
            int l = N + extra[e], rows = tall ? l : N, cols = tall ? N : l;
            case_begin(h, "muon/orthogonalize a diagonal, %d x %d", rows, cols);
            size_t bytes = (size_t)(rows * cols) * sizeof(double);
            double *x = (double*)case_memory(h, bytes), *got = (double*)case_memory(h, bytes);
            double* reference = (double*)case_memory(h, bytes);
            for (int i = 0; i < N; i++) x[i * cols + i] = values[i];
            muon_run_iterations(h, got, reference, x, rows, cols);
            for (int i = 0; i < rows * cols; i++) {
                double value = i % cols == i / cols ? want[i / cols] : 0;
                if (sizeof(floatX) <
                    sizeof(real)) {  // five roundings of some per cent: held against one that rounds too
                    expect_within(h, "launcher", got[i], reference[i], 0.01);
                    continue;
                }
                expect_within(h, "reference", reference[i], value, 1e-6);  // the value has six digits
                expect_within(h, "launcher", got[i], value, 1e-5);
            }
            case_end(h);
        }
}

static inline void test_muon_values(Harness* h) {
    static const double S[] = {1, 0.5, 0.1, 0.01, 0.001};
    static const double NEWTON_SCHULZ[] = {0.696436, 0.765439, 0.712120, 0.698917, 0.470544};
    test_muon_diagonal(h, S, NEWTON_SCHULZ, 5);

    // P diag(s) Q^T with two reflections P and Q becomes P diag(f(s)) Q^T.
    enum { ROWS = 5, COLS = 9 };
    case_begin(h, "muon/orthogonalize with singular vectors");
    double p[ROWS][ROWS], q[COLS][COLS], in[ROWS * COLS], out[ROWS * COLS], ref[ROWS * COLS];
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < ROWS; k++) p[i][k] = (i == k) - 2.0 / ROWS * (i % 2 ? -1 : 1) * (k % 2 ? -1 : 1);
    for (int i = 0; i < COLS; i++)
        for (int k = 0; k < COLS; k++) q[i][k] = (i == k) - 2.0 / COLS;
    for (int i = 0; i < ROWS * COLS; i++) {
        in[i] = 0;
        for (int k = 0; k < ROWS; k++) in[i] += p[i / COLS][k] * S[k] * q[i % COLS][k];
    }
    muon_run_iterations(h, out, ref, in, ROWS, COLS);
    for (int i = 0; i < ROWS * COLS; i++) {
        double value = 0;
        for (int k = 0; k < ROWS; k++) value += p[i / COLS][k] * NEWTON_SCHULZ[k] * q[i % COLS][k];
        // In 16 bits the smallest singular value is lost, which is below the rounding of the others.
        if (sizeof(floatX) < sizeof(real)) expect_within(h, "launcher", out[i], ref[i], 0.02);
        else expect_within(h, "launcher", out[i], value, 2e-5);
        if (sizeof(floatX) == sizeof(real))
            expect_within(h, "reference", ref[i], value, 1e-6);  // the value has six digits
    }
    case_end(h);
}

#endif
