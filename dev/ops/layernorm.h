/* layernorm: test, grad and bench. */
#ifndef DEV_OPS_LAYERNORM_H
#define DEV_OPS_LAYERNORM_H

#include "harness.h"
#include "llmc/ops/layernorm/layernorm.h"

#define LAYERNORM_EPS 1e-5

typedef struct {
    Array x, r, y, dy, dx, dbranch, w, b, dw, db, dbias, mean, rstd;
    Rows size;
    Dropout dropout;
    Mode dx_mode, d_mode;
    Sequences sequences;
    double* weights;  // of the loss, see layernorm_loss
    Context* ctx;
} LayernormCase;

static inline LayerNormGrads layernorm_grads(Array w, Array b) {
    LayerNormGrads d = {.w = w.device_real, .b = b.device_real};
    return d;
}

static inline LayerNorm layernorm_norm(Array w, Array b) {
    LayerNorm p = {NULL, b.device, w.device_real};
    return p;
}

static inline LayerNormStats layernorm_stats(LayernormCase* k) {
    LayerNormStats m;
    m.mean = k->mean.device_real;
    m.rstd = k->rstd.device_real;
    return m;
}

static inline LayerNormRefInputs layernorm_ref_inputs(const LayernormCase* k) {
    LayerNormRefInputs in = {
        .dy = k->dy.host, .x = k->x.host, .mean = k->mean.host, .rstd = k->rstd.host, .w = k->w.host, .size = k->size};
    return in;
}

static inline LayerNormInputs layernorm_inputs(LayernormCase* k, Array x) {
    LayerNormInputs in = {
        .dy = k->dy.device, .x = x.device, .stats = layernorm_stats(k), .w = k->w.device, .size = k->size};
    return in;
}

static inline LinearGrads layernorm_ref_grads(real* w, real* b) {
    LinearGrads d = {w, b};
    return d;
}

static inline LayernormCase* layernorm_case(Harness* h, int N, int C, Mode dx_mode, Mode d_mode, double p) {
    LayernormCase* k = (LayernormCase*)case_memory(h, sizeof *k);
    size_t n = (size_t)N * (size_t)C;
    int lengths[3] = {N / 3, (N + 1) / 3, N - N / 3 - (N + 1) / 3};
    k->sequences = sequences_of(h, lengths, 3, 5);
    k->dropout = dropout_make(p, 1, 2, 3, SITE_DROPOUT_MLP_OUT, &k->sequences);
    k->size.N = N;
    k->size.C = C;
    k->dx_mode = dx_mode;
    k->d_mode = d_mode;
    k->x = input(h, n, 2.0);
    k->r = input(h, n, 1.0);
    k->dy = input(h, n, 1.0);
    k->w = input(h, (size_t)C, 1.0);
    k->b = input(h, (size_t)C, 1.0);
    k->y = output(h, n, SET);
    k->dx = output(h, n, dx_mode);
    k->dbranch = output(h, n, SET);
    k->dbias = output(h, (size_t)C, d_mode);
    k->dw = output(h, (size_t)C, d_mode);
    k->db = output(h, (size_t)C, d_mode);
    k->mean = output(h, (size_t)N, SET);
    k->rstd = output(h, (size_t)N, SET);
    k->ctx = &h->ctx;
    return k;
}

static inline void layernorm_run_forward(void* state) {
    LayernormCase* k = (LayernormCase*)state;
    layernorm_forward(k->y.device, layernorm_stats(k), k->x.device, layernorm_norm(k->w, k->b), k->size,
                      (real)LAYERNORM_EPS, k->ctx);
}

static inline void layernorm_run_residual(void* state) {
    LayernormCase* k = (LayernormCase*)state;
    ResidualBranch branch = {.r = k->r.device, .dropout = k->dropout};
    Operand y = {.v = k->y.device, .q = NULL};
    residual_layernorm_forward(y, branch, layernorm_stats(k), k->x.device, layernorm_norm(k->w, k->b), k->size,
                               (real)LAYERNORM_EPS, k->ctx);
}

static inline void layernorm_run_backward(void* state) {
    LayernormCase* k = (LayernormCase*)state;
    layernorm_backward(k->dx.device, layernorm_grads(k->dw, k->db), layernorm_inputs(k, k->x), k->dx_mode, k->d_mode,
                       k->ctx);
}

static inline void layernorm_run_residual_backward(void* state) {
    LayernormCase* k = (LayernormCase*)state;
    ResidualGrad r = {
        .dx = k->dx.device, .dbranch = k->dbranch.device, .dbias = k->dbias.device_real, .dropout = k->dropout};
    residual_layernorm_backward(r, layernorm_grads(k->dw, k->db), layernorm_inputs(k, k->x), k->dx_mode, k->d_mode,
                                k->ctx);
}

// What a comparison of dx is relative to: it subtracts terms of the size of rstd * dy * w.
static inline real* layernorm_dx_scale(Harness* h, LayernormCase* k, const real* dx) {
    real* scale = copy_of(h, k->dx);
    for (size_t at = 0; at < k->dx.n; at++)
        scale[at] = (real)(1 + fabs((double)dx[at]) + 4 * fabs((double)k->rstd.host[at / (size_t)k->size.C]));
    return scale;
}

// What comparisons of dw and db are relative to, the sums of absolute values behind them: added to w and b, which hold
// what was there before.
static inline void layernorm_sum_scales(const LayernormCase* k, real* w, real* b) {
    int C = k->size.C;
    for (int c = 0; c < C; c++) {
        w[c] = k->d_mode == ADD ? (real)fabs((double)w[c]) : 0;
        b[c] = k->d_mode == ADD ? (real)fabs((double)b[c]) : 0;
        for (int row = 0; row < k->size.N; row++) {
            size_t at = (size_t)row * (size_t)C + (size_t)c;
            double d = fabs((double)k->dy.host[at]);
            double u = ((double)fabs((double)k->x.host[at]) + fabs((double)k->mean.host[row]));
            w[c] += (real)(d * u * k->rstd.host[row]);
            b[c] += (real)d;
        }
    }
}

// The residual form against the plain form's reference and what residual_gradient_ref adds.
static inline void test_residual_layernorm_backward(Harness* h, int N, int C, Mode dx_mode, Mode d_mode, double p) {
    case_begin(h, "layernorm/residual_backward N=%d C=%d dx %s, dw %s p=%g", N, C, mode_name(dx_mode),
               mode_name(d_mode), p);
    LayernormCase* k = layernorm_case(h, N, C, dx_mode, d_mode, p);
    layernorm_run_forward(k);
    array_download(k->mean);
    array_download(k->rstd);
    real *dx = copy_of(h, k->dx), *dw = copy_of(h, k->dw), *db = copy_of(h, k->db), *dbias = copy_of(h, k->dbias);
    real *dbranch = copy_of(h, k->dbranch), *scale = copy_of(h, k->dbias), *untouched = copy_of(h, k->dbranch);
    layernorm_backward_ref(dx, layernorm_ref_grads(dw, db), layernorm_ref_inputs(k), dx_mode, d_mode);
    residual_gradient_ref(dbranch, dbias, dx, k->size, k->dropout, d_mode);
    real *scale_x = layernorm_dx_scale(h, k, dx), *scale_w = copy_of(h, k->dw), *scale_b = copy_of(h, k->db);
    layernorm_sum_scales(k, scale_w, scale_b);
    for (int c = 0; c < C; c++) {
        scale[c] = d_mode == ADD ? (real)fabs((double)scale[c]) : 0;
        for (int row = 0; row < N; row++) scale[c] += scale_x[(size_t)row * (size_t)C + (size_t)c];
    }
    Array written[] = {k->dx, k->dbranch, k->dw, k->db, k->dbias};
    expect_same_for_any_threads(h, "residual_backward", layernorm_run_residual_backward, k, written, 5);
    expect_close_to_sum(h, "dx", k->dx, dx, scale_x, tolerance(2e-6));
    if (p > 0) expect_close_to_sum(h, "dbranch", k->dbranch, dbranch, scale_x, tolerance(4e-6));
    else expect_equal(h, "dbranch", k->dbranch, untouched);
    expect_close_to_sum(h, "dbias", k->dbias, dbias, scale, tolerance(2e-6));
    expect_close_to_sum(h, "dw", k->dw, dw, scale_w, tolerance(2e-6));
    expect_close_to_sum(h, "db", k->db, db, scale_b, tolerance(2e-6));
    case_end(h);
}

static inline void test_layernorm_forward(Harness* h, int N, int C) {
    case_begin(h, "layernorm/forward N=%d C=%d", N, C);
    LayernormCase* k = layernorm_case(h, N, C, SET, SET, 0);
    real *y = copy_of(h, k->y), *mean = copy_of(h, k->mean), *rstd = copy_of(h, k->rstd);
    layernorm_forward_ref(y, mean, rstd, k->x.host, k->w.host, k->b.host, k->size, LAYERNORM_EPS);
    Array written[] = {k->y, k->mean, k->rstd};
    expect_same_for_any_threads(h, "forward", layernorm_run_forward, k, written, 3);
    expect_close(h, "mean", k->mean, mean, tolerance(1e-6));
    expect_close(h, "rstd", k->rstd, rstd, tolerance(2e-6));
    expect_close(h, "y", k->y, y, tolerance(5e-6));
    case_end(h);
}

static inline void test_residual_layernorm_forward(Harness* h, int N, int C, double p) {
    case_begin(h, "layernorm/residual_forward N=%d C=%d p=%g", N, C, p);
    LayernormCase* k = layernorm_case(h, N, C, SET, SET, p);
    real *sum = copy_of(h, k->r), *y = copy_of(h, k->y), *mean = copy_of(h, k->mean), *rstd = copy_of(h, k->rstd);
    residual_dropout_ref(sum, k->x.host, N, C, k->dropout);
    Array written[] = {k->y, k->r, k->mean, k->rstd};
    expect_same_for_any_threads(h, "residual_forward", layernorm_run_residual, k, written, 4);
    expect_close(h, "r", k->r, sum, tolerance(5e-7));
    // of r as it is stored: its rounding is checked above
    layernorm_forward_ref(y, mean, rstd, k->r.host, k->w.host, k->b.host, k->size, LAYERNORM_EPS);
    expect_close(h, "mean", k->mean, mean, tolerance(1e-6));
    expect_close(h, "rstd", k->rstd, rstd, tolerance(2e-6));
    expect_close(h, "y", k->y, y, tolerance(5e-6));
    case_end(h);
}

static inline void test_layernorm_backward(Harness* h, int N, int C, Mode dx_mode, Mode d_mode) {
    case_begin(h, "layernorm/backward N=%d C=%d dx %s, dw %s", N, C, mode_name(dx_mode), mode_name(d_mode));
    LayernormCase* k = layernorm_case(h, N, C, dx_mode, d_mode, 0);
    layernorm_forward_ref(k->y.host, k->mean.host, k->rstd.host, k->x.host, k->w.host, k->b.host, k->size,
                          LAYERNORM_EPS);
    array_upload_real(k->mean);
    array_upload_real(k->rstd);
    real *dx = copy_of(h, k->dx), *dw = copy_of(h, k->dw), *db = copy_of(h, k->db);
    layernorm_backward_ref(dx, layernorm_ref_grads(dw, db), layernorm_ref_inputs(k), dx_mode, d_mode);
    real *scale_x = layernorm_dx_scale(h, k, dx), *scale_w = copy_of(h, k->dw), *scale_b = copy_of(h, k->db);
    layernorm_sum_scales(k, scale_w, scale_b);
    Array written[] = {k->dx, k->dw, k->db};
    expect_same_for_any_threads(h, "backward", layernorm_run_backward, k, written, 3);
    expect_close_to_sum(h, "dx", k->dx, dx, scale_x, tolerance(2e-6));
    expect_close_to_sum(h, "dw", k->dw, dw, scale_w, tolerance(2e-6));
    expect_close_to_sum(h, "db", k->db, db, scale_b, tolerance(2e-6));
    case_end(h);
}

static inline void test_layernorm_in_place(Harness* h) {
    case_begin(h, "layernorm/backward in place");
    LayernormCase* k = layernorm_case(h, 17, 100, SET, SET, 0);
    layernorm_run_forward(k);
    layernorm_run_backward(k);
    real *dx = copy_of(h, k->dx), *dw = copy_of(h, k->dw);
    k->dx = k->dy;
    layernorm_run_backward(k);
    expect_equal(h, "dx", k->dx, dx);
    expect_equal(h, "dw", k->dw, dw);
    case_end(h);

    case_begin(h, "layernorm/residual_backward without dbias, dbranch in place of dy");
    k = layernorm_case(h, 17, 104, ADD, SET, 0.3);
    layernorm_run_forward(k);
    layernorm_run_residual_backward(k);
    real *sum = copy_of(h, k->dx), *dbranch = copy_of(h, k->dbranch), *dbias = copy_of(h, k->dbias);
    ResidualGrad r = {.dx = k->dx.device, .dbranch = k->dy.device, .dbias = NULL, .dropout = k->dropout};
    array_restore(k->dx);
    residual_layernorm_backward(r, layernorm_grads(k->dw, k->db), layernorm_inputs(k, k->x), ADD, SET, k->ctx);
    expect_equal(h, "dx", k->dx, sum);
    expect_equal(h, "dbranch", k->dy, dbranch);
    expect_equal(h, "dbias", k->dbias, dbias);
    case_end(h);
}

static inline void test_layernorm_precision(Harness* h) {
    // A mean a thousand times the deviation: a one-pass variance would lose every digit.
    case_begin(h, "layernorm/forward large mean");
    LayernormCase* k = layernorm_case(h, 4, 768, SET, SET, 0);
    for (size_t i = 0; i < k->x.n; i++) k->x.host[i] = (real)(k->x.host[i] + 2000);
    array_upload(k->x);
    real *y = copy_of(h, k->y), *mean = copy_of(h, k->mean), *rstd = copy_of(h, k->rstd);
    layernorm_forward_ref(y, mean, rstd, k->x.host, k->w.host, k->b.host, k->size, LAYERNORM_EPS);
    layernorm_run_forward(k);
    expect_close(h, "y", k->y, y, tolerance(1e-3));  // x - mean carries the rounding of a mean of 2000
    case_end(h);

    // Weights that floatX would round to 1: on average over many elements the results show them.
    case_begin(h, "layernorm/forward weights in full precision");
    k = layernorm_case(h, 64, 768, SET, SET, 0);
    for (size_t i = 0; i < k->w.n; i++) k->w.host[i] = (real)1.0003, k->b.host[i] = 0;
    array_upload_real(k->w), array_upload(k->b);
    y = copy_of(h, k->y), mean = copy_of(h, k->mean), rstd = copy_of(h, k->rstd);
    layernorm_forward_ref(y, mean, rstd, k->x.host, k->w.host, k->b.host, k->size, LAYERNORM_EPS);
    layernorm_run_forward(k);
    array_download(k->y);
    double got = 0, want = 0;
    for (size_t i = 0; i < k->y.n; i++) got += fabs((double)k->y.host[i]), want += fabs((double)y[i]);
    expect_within(h, "mean size", got / want, 1, 1e-4);
    case_end(h);
}

// Whether the GPU has the registers and the shared memory for rows of C channels.
static inline int layernorm_case_fits(const Harness* h, int C) {
#ifdef __CUDACC__
    return layernorm_backward_fits(C, &h->ctx) && (sizeof(floatX) == 2 || C <= 8192);
#else
    return (void)h, (void)C, 1;
#endif
}

// Calls test for every size. The later sizes are for the GPU: more rows than its teams take in one round, every team
// size, and a number of warps that does not divide into teams. The CPU has one code path and skips the largest. A GPU with
// few multiprocessors, as the emulated one, needs fewer rows for the same.
static inline void test_layernorm_sizes(Harness* h, void (*test)(Harness* h, int N, int C)) {
    static const Rows SIZES[] = {{1, 1},     {1, 48},    {77, 33},     {17, 768},   {77, 48},   {96, 16},    {131, 1},
                                 {33, 1600}, {7001, 8},  {3300, 33},   {2500, 264}, {20, 1024}, {800, 1032}, {5, 4096},
                                 {3, 5001},  {3, 16384}, {1100, 1024}, {700, 1600}, {150, 7000}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        int N = SIZES[i].N, C = SIZES[i].C;
        if (!layernorm_case_fits(h, C)) continue;
#ifdef __CUDACC__
        if (N > 100 && h->ctx.multiprocessors <= 16) N = max_int(N / 8, 100);
#endif
        if (HAS_DEVICE_MEMORY || N * C <= 1000000) test(h, N, C);
    }
}

static inline void test_layernorm_backward_modes(Harness* h, int N, int C) {
    for (int modes = 0; modes < 4; modes++)
        test_layernorm_backward(h, N, C, modes & 1 ? ADD : SET, modes & 2 ? ADD : SET);
}

static inline void test_layernorm_fused(Harness* h, int N, int C) {
    for (int dropped = 0; dropped < 2; dropped++) test_residual_layernorm_forward(h, N, C, dropped ? 0.3 : 0);
    for (int modes = 0; modes < 4; modes++) {
        Mode dx_mode = modes & 1 ? ADD : SET, d_mode = modes & 2 ? ADD : SET;
        for (int dropped = 0; dropped < 2; dropped++)
            test_residual_layernorm_backward(h, N, C, dx_mode, d_mode, dropped ? 0.3 : 0);
    }
}

static inline void test_layernorm(Harness* h) {
    test_layernorm_sizes(h, test_layernorm_forward);
    test_layernorm_sizes(h, test_layernorm_backward_modes);
    test_layernorm_sizes(h, test_layernorm_fused);
    test_layernorm_in_place(h);
    test_layernorm_precision(h);
}

// ---------------------------------------------------------------------------------------------------------
// Finite differences

// Sum of dy * LN(x), or of dy * LN(x + dropout(branch)) where the case has a branch in `y`.
static inline double layernorm_loss(void* state) {
    LayernormCase* k = (LayernormCase*)state;
    memcpy(k->r.host, k->r.initial, k->r.n * sizeof(real));
    residual_dropout_ref(k->r.host, k->x.host, k->size.N, k->size.C, k->dropout);
    layernorm_forward_ref(k->y.host, k->mean.host, k->rstd.host, k->r.host, k->w.host, k->b.host, k->size,
                          LAYERNORM_EPS);
    double loss = 0;
    for (size_t i = 0; i < k->y.n; i++) loss += (double)k->y.host[i] * (double)k->dy.host[i];
    return loss;
}

// The residual form: r = x + dropout(branch), y = LN(r). dr comes from the reference or from the launcher.
static inline void grad_layernorm(Harness* h) {
    static const Rows SIZES[] = {{1, 48}, {5, 33}, {3, 768}, {37, 5}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (int launcher = 0; launcher < 2; launcher++) {
            int N = SIZES[i].N, C = SIZES[i].C;
            case_begin(h, "layernorm/backward%s N=%d C=%d", launcher ? "" : "_ref", N, C);
            LayernormCase* k = layernorm_case(h, N, C, SET, SET, 0.25);
            layernorm_loss(k);
            LayerNormRefInputs in = layernorm_ref_inputs(k);
            in.x = k->r.host;
            if (launcher)
                layernorm_backward(k->dx.device, layernorm_grads(k->dw, k->db), layernorm_inputs(k, k->r), SET, SET,
                                   &h->ctx);
            else layernorm_backward_ref(k->dx.host, layernorm_ref_grads(k->dw.host, k->db.host), in, SET, SET);
            real* dbranch = copy_of(h, k->dx);
            for (int n = 0; n < N; n++)
                for (int c = 0; c < C; c++)
                    dbranch[(size_t)n * (size_t)C + (size_t)c] *=
                        (real)dropout_factor_ref(k->dropout, k->sequences.sequence[n], k->sequences.position[n], c);
            expect_gradient(h, "dx", layernorm_loss, k, k->x.host, k->x.n, k->dx.host, 1e-7);
            expect_gradient(h, "dbranch", layernorm_loss, k, k->r.initial, k->r.n, dbranch, 1e-7);
            expect_gradient(h, "dw", layernorm_loss, k, k->w.host, k->w.n, k->dw.host, 1e-7);
            expect_gradient(h, "db", layernorm_loss, k, k->b.host, k->b.n, k->db.host, 1e-7);
            case_end(h);
        }
}

static inline void bench_layernorm(Harness* h) {
#ifdef __CUDACC__
    static const Rows SIZES[] = {{65536, 768}, {16384, 1600}, {32768, 1024}};
#else
    static const Rows SIZES[] = {{256, 768}, {4096, 768}, {1024, 1600}};
#endif
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        int N = SIZES[i].N, C = SIZES[i].C;
        char shapes[64];
        snprintf(shapes, sizeof shapes, "N=%d C=%d", N, C);
        LayernormCase* k = layernorm_case(h, N, C, ADD, ADD, 0);
        bench_report(h, "layernorm_forward", shapes, bench_seconds(h, layernorm_run_forward, k),
                     LAYERNORM_FORWARD_FLOPS(N, C), LAYERNORM_FORWARD_BYTES(N, C));
        bench_report(h, "residual_layernorm_forward", shapes, bench_seconds(h, layernorm_run_residual, k),
                     RESIDUAL_LAYERNORM_FORWARD_FLOPS(N, C), RESIDUAL_LAYERNORM_FORWARD_BYTES(N, C));
        k->sequences = resident_sequences(h, k->sequences);
        k->dropout = dropout_make(0.1, 1, 2, 3, SITE_DROPOUT_MLP_OUT, &k->sequences);
        bench_report(h, "  with dropout", shapes, bench_seconds(h, layernorm_run_residual, k),
                     RESIDUAL_LAYERNORM_FORWARD_FLOPS(N, C), RESIDUAL_LAYERNORM_FORWARD_BYTES(N, C));
        layernorm_run_forward(k);
        bench_report(h, "layernorm_backward", shapes, bench_seconds(h, layernorm_run_backward, k),
                     LAYERNORM_BACKWARD_FLOPS(N, C), LAYERNORM_BACKWARD_BYTES(N, C, ADD));
        for (int modes = 0; modes < 4; modes++) {  // of dx; dropout is still on
            char name[48];
            k->dx_mode = modes & 1 ? ADD : SET;
            if (modes == 2) k->dropout = dropout_none(&k->sequences);
            snprintf(name, sizeof name, "residual_backward %s%s", mode_name(k->dx_mode), modes < 2 ? " dropout" : "");
            bench_report(h, name, shapes, bench_seconds(h, layernorm_run_residual_backward, k),
                         RESIDUAL_LAYERNORM_BACKWARD_FLOPS(N, C, modes < 2),
                         RESIDUAL_LAYERNORM_BACKWARD_BYTES(N, C, k->dx_mode, modes < 2));
        }
        case_free(h);
    }
}

#endif
