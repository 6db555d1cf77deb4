/* layernorm: alone, and of the sum of a residual stream and a branch with dropout. */
#ifndef DEV_OPS_LAYERNORM_H
#define DEV_OPS_LAYERNORM_H

#include "llmc/ops/layernorm/layernorm.h"
#include "op.h"

#define LAYERNORM_EPS 1e-5

// The backward passes read sum: x, or x + dropout(r), which is what the forward pass leaves in r.
typedef struct {
    OpCase z;
    Array x, r, sum, y, dy, dx, dbranch, w, b, dw, db, dbias, mean, rstd;
    Rows size;
    Dropout dropout;
    Sequences sequences;
} LayernormCase;

static inline void layernorm_prepare(void* state) {
    LayernormCase* k = (LayernormCase*)state;
    k->size.N = k->z.N, k->size.C = k->z.C;
    k->sequences = sequences_split(k->z.h, k->z.N, 3, 5);
    k->dropout = dropout_make(k->z.p, 1, 2, 3, SITE_DROPOUT_MLP_OUT, &k->sequences);
    if (k->z.is_bench) k->sequences = resident_sequences(k->z.h, k->sequences);
}

static inline LayerNorm layernorm_norm(const LayernormCase* k) {
    LayerNorm p = {NULL, k->b.device, k->w.device_real};
    return p;
}

static inline LayerNormStats layernorm_stats(const LayernormCase* k) {
    LayerNormStats stats = {k->mean.device_real, k->rstd.device_real};
    return stats;
}

static inline LayerNormInputs layernorm_inputs(const LayernormCase* k) {
    LayerNormInputs in = {
        .dy = k->dy.device, .x = k->sum.device, .stats = layernorm_stats(k), .w = k->w.device, .size = k->size};
    return in;
}

static inline LayerNormGrads layernorm_grads(const LayernormCase* k) {
    LayerNormGrads d = {.w = k->dw.device_real, .b = k->db.device_real};
    return d;
}

static inline void layernorm_run_forward(void* state) {
    LayernormCase* k = (LayernormCase*)state;
    layernorm_forward(k->y.device, layernorm_stats(k), k->x.device, layernorm_norm(k), k->size, (real)LAYERNORM_EPS,
                      k->z.ctx);
}

static inline void layernorm_run_residual_of(LayernormCase* k, Fp8Copy* q) {
    ResidualBranch branch = {.r = k->r.device, .dropout = k->dropout};
    Operand y = {.v = k->y.device, .q = q};
    residual_layernorm_forward(y, branch, layernorm_stats(k), k->x.device, layernorm_norm(k), k->size,
                               (real)LAYERNORM_EPS, k->z.ctx);
}

static inline void layernorm_run_residual(void* state) { layernorm_run_residual_of((LayernormCase*)state, NULL); }

static inline void layernorm_run_backward(void* state) {
    LayernormCase* k = (LayernormCase*)state;
    layernorm_backward(k->dx.device, layernorm_grads(k), layernorm_inputs(k), k->z.mode, k->z.other_mode, k->z.ctx);
}

static inline void layernorm_run_residual_backward(void* state) {
    LayernormCase* k = (LayernormCase*)state;
    ResidualGrad r = {
        .dx = k->dx.device, .dbranch = k->dbranch.device, .dbias = k->dbias.device_real, .dropout = k->dropout};
    residual_layernorm_backward(r, layernorm_grads(k), layernorm_inputs(k), k->z.mode, k->z.other_mode, k->z.ctx);
}

// Of x, of x + dropout(r), or of r as it is stored.
static inline void layernorm_want_of(LayernormCase* k, const real* x) {
    layernorm_forward_ref(k->y.want, k->mean.want, k->rstd.want, x, k->w.host, k->b.host, k->size, LAYERNORM_EPS);
}

static inline void layernorm_want_forward(void* k) {
    layernorm_want_of((LayernormCase*)k, ((LayernormCase*)k)->x.host);
}

static inline void layernorm_want_residual(void* state) {
    LayernormCase* k = (LayernormCase*)state;
    residual_dropout_ref(k->r.want, k->x.host, k->z.N, k->z.C, k->dropout);
    layernorm_want_of(k, k->r.want);
}

// The rounding of r is checked on its own.
static inline void layernorm_after_residual(void* k) {
    layernorm_want_of((LayernormCase*)k, ((LayernormCase*)k)->r.host);
}

static inline void layernorm_before(LayernormCase* k, const real* r) {
    memcpy(k->sum.host, r, k->sum.n * sizeof(real));
    if (r == k->r.host && !k->z.is_bench)  // whose sequences the host may not read
        residual_dropout_ref(k->sum.host, k->x.host, k->z.N, k->z.C, k->dropout);
    array_upload(k->sum);
    layernorm_forward_ref(k->y.host, k->mean.host, k->rstd.host, k->sum.host, k->w.host, k->b.host, k->size,
                          LAYERNORM_EPS);
    array_upload_real(k->mean), array_upload_real(k->rstd);
}

static inline void layernorm_before_backward(void* k) {
    layernorm_before((LayernormCase*)k, ((LayernormCase*)k)->x.host);
}
static inline void layernorm_before_residual(void* k) {
    layernorm_before((LayernormCase*)k, ((LayernormCase*)k)->r.host);
}

// What comparisons are relative to. dx: it subtracts terms of the size of rstd * dy * w. The others: the sums of
// absolute values behind them, added to what was there before.
static inline void layernorm_magnitudes(LayernormCase* k) {
    size_t C = (size_t)k->z.C;
    real *dx = copy_of(k->z.h, k->dx), *dw = copy_of(k->z.h, k->dw), *db = copy_of(k->z.h, k->db);
    real* dbias = copy_of(k->z.h, k->dbias);
    for (size_t c = 0; c < C; c++) {
        int adds = k->z.other_mode == ADD;
        dw[c] = adds ? (real)fabs((double)dw[c]) : 0, db[c] = adds ? (real)fabs((double)db[c]) : 0;
        dbias[c] = adds ? (real)fabs((double)dbias[c]) : 0;
    }
    for (size_t at = 0; at < k->dx.n; at++) {
        double d = fabs((double)k->dy.host[at]), rstd = (double)k->rstd.host[at / C];
        double u = fabs((double)k->sum.host[at]) + fabs((double)k->mean.host[at / C]);
        dx[at] = (real)(1 + fabs((double)k->dx.want[at]) + 4 * fabs(rstd));
        dw[at % C] += (real)(d * u * rstd), db[at % C] += (real)d, dbias[at % C] += dx[at];
    }
    k->dx.magnitude = k->dbranch.magnitude = dx, k->dbias.magnitude = dbias;
    k->dw.magnitude = dw, k->db.magnitude = db;
}

static inline void layernorm_want_backward(void* state) {
    LayernormCase* k = (LayernormCase*)state;
    LayerNormGrads d = {k->dw.want, k->db.want};
    LayerNormRefInputs in = {k->dy.host, k->sum.host, k->mean.host, k->rstd.host, k->w.host, k->size};
    layernorm_backward_ref(k->dx.want, d, in, k->z.mode, k->z.other_mode);
    layernorm_magnitudes(k);
}

// Without dropout dbranch is dx, and stays as it was.
static inline void layernorm_want_residual_backward(void* state) {
    LayernormCase* k = (LayernormCase*)state;
    layernorm_want_backward(k);
    real* dbranch = k->z.p > 0 ? k->dbranch.want : copy_of(k->z.h, k->dbranch);
    residual_gradient_ref(dbranch, k->dbias.want, k->dx.want, k->size, k->dropout, k->z.other_mode);
}

static const Arg LAYERNORM_ARGS[] = {{"x", offsetof(LayernormCase, x), "N C", IN, 2, 0},
                                     {"r", offsetof(LayernormCase, r), "N C", IN_OUT, 1, 5e-7},
                                     {"sum", offsetof(LayernormCase, sum), "N C", SCRATCH},
                                     {"w", offsetof(LayernormCase, w), "C", IN, 1, 0},
                                     {"b", offsetof(LayernormCase, b), "C", IN, 1, 0},
                                     {"y", offsetof(LayernormCase, y), "N C", OUT, 0, 5e-6},
                                     {"mean", offsetof(LayernormCase, mean), "N", OUT, 0, 1e-6},
                                     {"rstd", offsetof(LayernormCase, rstd), "N", OUT, 0, 2e-6},
                                     {"dy", offsetof(LayernormCase, dy), "N C", IN, 1, 0, "y"},
                                     {"dx", offsetof(LayernormCase, dx), "N C", BY_MODE, 0, 2e-6, "x"},
                                     {"dbranch", offsetof(LayernormCase, dbranch), "N C", OUT, 0, 4e-6, "r"},
                                     {"dw", offsetof(LayernormCase, dw), "C", BY_OTHER_MODE, 0, 2e-6, "w"},
                                     {"db", offsetof(LayernormCase, db), "C", BY_OTHER_MODE, 0, 2e-6, "b"},
                                     {"dbias", offsetof(LayernormCase, dbias), "C", BY_OTHER_MODE, 0, 2e-6},
                                     {NULL}};
// The later sizes are for the GPU: more rows than its teams take in one round, every team size, and a number of warps
// that does not divide into teams. The CPU has one code path and skips the largest.
static const int LAYERNORM_ROWS[][2] = {{1, 1},      {1, 48},      {77, 33},    {17, 768},  {77, 48},
                                        {96, 16},    {131, 1},     {33, 1600},  {7001, 8},  {3300, 33},
                                        {2500, 264}, {20, 1024},   {800, 1032}, {5, 4096},  {3, 5001},
                                        {3, 16384},  {1100, 1024}, {700, 1600}, {150, 7000}};
static const int LAYERNORM_GRAD[] = {37, 5};
static const int LAYERNORM_GPU[][2] = {{65536, 768}, {16384, 1600}, {32768, 1024}};
static const int LAYERNORM_CPU[][2] = {{256, 768}, {4096, 768}, {1024, 1600}};

// A GPU with few multiprocessors, as the emulated one, needs fewer rows for the same.
static inline int layernorm_takes(const Harness* h, int* row) {
#ifdef __CUDACC__
    if (row[0] > 100 && h->ctx.multiprocessors <= 16) row[0] = max_int(row[0] / 8, 100);
    return layernorm_backward_fits(row[1], &h->ctx) && (sizeof(floatX) == 2 || row[1] <= 8192);
#else
    return (void)h, row[0] * row[1] <= 1000000;
#endif
}

static const Op LAYERNORM = {
    .name = "layernorm",
    .bytes = sizeof(LayernormCase),
    .sizes = "N C",
    .args = LAYERNORM_ARGS,
    .passes = {{"forward", "y mean rstd", layernorm_run_forward, layernorm_want_forward},
               {"backward", "dx dw db", layernorm_run_backward, layernorm_want_backward, layernorm_before_backward}},
    .prepare = layernorm_prepare,
    .takes = layernorm_takes,
    .rows = SIZE_ROWS(LAYERNORM_ROWS),
    .gpu_bench = SIZE_ROWS(LAYERNORM_GPU),
    .cpu_bench = SIZE_ROWS(LAYERNORM_CPU),
    .grad = LAYERNORM_GRAD,
    .grad_tol = 1e-7,
};

static const Op RESIDUAL_LAYERNORM = {
    .name = "layernorm",
    .bytes = sizeof(LayernormCase),
    .sizes = "N C",
    .args = LAYERNORM_ARGS,
    .passes = {{"residual_forward", "y r mean rstd", layernorm_run_residual, layernorm_want_residual, NULL,
                layernorm_after_residual},
               {"residual_backward", "dx dbranch dw db dbias", layernorm_run_residual_backward,
                layernorm_want_residual_backward, layernorm_before_residual}},
    .prepare = layernorm_prepare,
    .rates = {0, 0.3},
    .takes = layernorm_takes,
    .rows = SIZE_ROWS(LAYERNORM_ROWS),
    .gpu_bench = SIZE_ROWS(LAYERNORM_GPU),
    .cpu_bench = SIZE_ROWS(LAYERNORM_CPU),
    .grad = LAYERNORM_GRAD,
    .grad_tol = 1e-7,
};

static inline LayernormCase* layernorm_case(Harness* h, const Op* op, int pass, int N, int C, double p) {
    const int row[] = {N, C};
    OpWay way = {SET, SET, 0, p, 0};
    return (LayernormCase*)op_case(h, op, &op->passes[pass], row, way);
}

static inline void test_layernorm_in_place(Harness* h) {
    LayernormCase* k = layernorm_case(h, &LAYERNORM, 1, 17, 100, 0);
    layernorm_run_backward(k);
    real *dx = copy_of(h, k->dx), *dw = copy_of(h, k->dw);
    k->dx = k->dy;
    layernorm_run_backward(k);
    expect_equal(h, "dx in place of dy", k->dx, dx);
    expect_equal(h, "dw", k->dw, dw);
    case_end(h);

    k = layernorm_case(h, &RESIDUAL_LAYERNORM, 1, 17, 104, 0.3);
    layernorm_run_residual_backward(k);
    dx = copy_of(h, k->dx);
    real *dbranch = copy_of(h, k->dbranch), *dbias = copy_of(h, k->dbias);
    ResidualGrad r = {.dx = k->dx.device, .dbranch = k->dy.device, .dbias = NULL, .dropout = k->dropout};
    residual_layernorm_backward(r, layernorm_grads(k), layernorm_inputs(k), SET, SET, k->z.ctx);
    expect_equal(h, "dx", k->dx, dx);
    expect_equal(h, "dbranch in place of dy", k->dy, dbranch);
    expect_equal(h, "dbias, not asked for", k->dbias, dbias);
    case_end(h);
}

static inline void test_layernorm_precision(Harness* h) {
    // A mean a thousand times the deviation: a one-pass variance would lose every digit.
    LayernormCase* k = layernorm_case(h, &LAYERNORM, 0, 4, 768, 0);
    for (size_t i = 0; i < k->x.n; i++) k->x.host[i] = (real)(k->x.host[i] + 2000);
    array_upload(k->x);
    op_reference(h, k, &LAYERNORM, LAYERNORM.passes);
    layernorm_run_forward(k);
    // x - mean carries the rounding of a mean of 2000.
    expect_close(h, "y where the mean is large", k->y, k->y.want, tolerance(1e-3));
    case_end(h);

    // Weights that floatX would round to 1: on average over many elements the results show them.
    k = layernorm_case(h, &LAYERNORM, 0, 64, 768, 0);
    for (size_t i = 0; i < k->w.n; i++) k->w.host[i] = (real)1.0003, k->b.host[i] = 0;
    array_upload_real(k->w), array_upload(k->b);
    op_reference(h, k, &LAYERNORM, LAYERNORM.passes);
    layernorm_run_forward(k);
    array_download(k->y);
    double got = 0, want = 0;
    for (size_t i = 0; i < k->y.n; i++) got += fabs((double)k->y.host[i]), want += fabs((double)k->y.want[i]);
    expect_within(h, "mean size by weights in full precision", got / want, 1, 1e-4);
    case_end(h);
}

static inline void test_layernorm(Harness* h) {
    test_layernorm_in_place(h);
    test_layernorm_precision(h);
}

#endif
