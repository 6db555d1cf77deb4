/* layernorm: alone, and of the sum of a residual stream and a branch with dropout. */
#ifndef DEV_OPS_LAYERNORM_H
#define DEV_OPS_LAYERNORM_H

#include "llmc/ops/layernorm/layernorm.h"
#include "op.h"

#define LAYERNORM_EPS 1e-5

OP_FN(layernorm_prepare) {
    k->sequences = sequences_split(k->h, k->N, 3, 5);
    k->dropout = dropout_make(k->p, 1, 2, 3, SITE_DROPOUT_MLP_OUT, &k->sequences);
    if (k->is_bench) k->sequences = resident_sequences(k->h, k->sequences);
}

static inline Rows layernorm_size(const OpCase* k) { return (Rows){.N = k->N, .C = k->C}; }

static inline LayerNorm layernorm_norm(const OpCase* k) { return (LayerNorm){NULL, k->b.device, k->w.device_real}; }

static inline LayerNormStats layernorm_stats(const OpCase* k) {
    return (LayerNormStats){k->mean.device_real, k->rstd.device_real};
}

static inline LayerNormInputs layernorm_inputs(const OpCase* k) {
    return (LayerNormInputs){.dy = k->dy.device,
                             .x = k->sum.device,
                             .stats = layernorm_stats(k),
                             .w = k->w.device,
                             .size = layernorm_size(k)};
}

static inline LayerNormGrads layernorm_grads(const OpCase* k) {
    return (LayerNormGrads){.w = k->dw.device_real, .b = k->db.device_real};
}

OP_FN(layernorm_run_forward) {
    layernorm_forward(k->y.device, layernorm_stats(k), k->x.device, layernorm_norm(k), layernorm_size(k),
                      (real)LAYERNORM_EPS, k->ctx);
}

static inline void layernorm_run_residual_of(OpCase* k, Fp8Copy* q) {
    ResidualBranch branch = {.r = k->r.device, .dropout = k->dropout};
    Operand y = {.v = k->y.device, .q = q};
    residual_layernorm_forward(y, branch, layernorm_stats(k), k->x.device, layernorm_norm(k), layernorm_size(k),
                               (real)LAYERNORM_EPS, k->ctx);
}

OP_FN(layernorm_run_residual) { layernorm_run_residual_of(k, NULL); }

OP_FN(layernorm_run_backward) {
    layernorm_backward(k->dx.device, layernorm_grads(k), layernorm_inputs(k), k->mode, k->other_mode, k->ctx);
}

OP_FN(layernorm_run_residual_backward) {
    residual_layernorm_backward(
        (ResidualGrad){
            .dx = k->dx.device, .dbranch = k->dbranch.device, .dbias = k->dbias.device_real, .dropout = k->dropout},
        layernorm_grads(k), layernorm_inputs(k), k->mode, k->other_mode, k->ctx);
}

// Of x, of x + dropout(r), or of r as it is stored.
static inline void layernorm_want_of(OpCase* k, const real* x) {
    layernorm_forward_ref(k->y.want, k->mean.want, k->rstd.want, x, k->w.host, k->b.host, layernorm_size(k),
                          LAYERNORM_EPS);
}

OP_FN(layernorm_want_forward) { layernorm_want_of(k, k->x.host); }

OP_FN(layernorm_want_residual) {
    residual_dropout_ref(k->r.want, k->x.host, k->N, k->C, k->dropout);
    layernorm_want_of(k, k->r.want);
}

// The rounding of r is checked on its own.
OP_FN(layernorm_after_residual) { layernorm_want_of(k, k->r.host); }

static inline void layernorm_before(OpCase* k, const real* r) {
    memcpy(k->sum.host, r, k->sum.n * sizeof(real));
    if (r == k->r.host && !k->is_bench)  // whose sequences the host may not read
        residual_dropout_ref(k->sum.host, k->x.host, k->N, k->C, k->dropout);
    array_upload(k->sum);
    layernorm_forward_ref(k->y.host, k->mean.host, k->rstd.host, k->sum.host, k->w.host, k->b.host, layernorm_size(k),
                          LAYERNORM_EPS);
    array_upload_real(k->mean), array_upload_real(k->rstd);
}

OP_FN(layernorm_before_backward) { layernorm_before(k, k->x.host); }
OP_FN(layernorm_before_residual) { layernorm_before(k, k->r.host); }

// What comparisons are relative to. dx: it subtracts terms of the size of rstd * dy * w. The others: the sums of
// absolute values behind them, added to what was there before.
static inline void layernorm_magnitudes(OpCase* k) {
    size_t C = (size_t)k->C;
    real *dx = copy_of(k->h, k->dx), *dw = copy_of(k->h, k->dw), *db = copy_of(k->h, k->db);
    real* dbias = copy_of(k->h, k->dbias);
    for (size_t c = 0; c < C; c++) {
        int adds = k->other_mode == ADD;
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

OP_FN(layernorm_want_backward) {
    layernorm_backward_ref(
        k->dx.want, (LayerNormGrads){k->dw.want, k->db.want},
        (LayerNormRefInputs){k->dy.host, k->sum.host, k->mean.host, k->rstd.host, k->w.host, layernorm_size(k)},
        k->mode, k->other_mode);
    layernorm_magnitudes(k);
}

// Without dropout dbranch is dx, and stays as it was.
OP_FN(layernorm_want_residual_backward) {
    layernorm_want_backward(k);
    real* dbranch = k->p > 0 ? k->dbranch.want : copy_of(k->h, k->dbranch);
    residual_gradient_ref(dbranch, k->dbias.want, k->dx.want, layernorm_size(k), k->dropout, k->other_mode);
}

static const Arg LAYERNORM_ARGS[] =
    ARGS(ARG(x, "N C", IN, 2), ARG(r, "N C", IN_OUT, 1, 5e-7), ARG(sum, "N C", SCRATCH), ARG(w, "C", IN, 1),
         ARG(b, "C", IN, 1), ARG(y, "N C", OUT, 0, 5e-6), ARG(mean, "N", OUT, 0, 1e-6), ARG(rstd, "N", OUT, 0, 2e-6),
         ARG(dy, "N C", IN, 1, 0, "y"), ARG(dx, "N C", BY_MODE, 0, 2e-6, "x"), ARG(dbranch, "N C", OUT, 0, 4e-6, "r"),
         ARG(dw, "C", BY_OTHER_MODE, 0, 2e-6, "w"), ARG(db, "C", BY_OTHER_MODE, 0, 2e-6, "b"),
         ARG(dbias, "C", BY_OTHER_MODE, 0, 2e-6));
// The later sizes are for the GPU: more rows than its teams take in one round, every team size, and a number of warps
// that does not divide into teams. The CPU has one code path and skips the largest.
static const int LAYERNORM_ROWS[][2] = {{1, 1},      {1, 48},    {77, 33},  {17, 768},   {77, 48},     {96, 16},
                                        {131, 1},    {33, 1600}, {7001, 8}, {3300, 33},  {2500, 264},  {20, 1024},
                                        {800, 1032}, {5, 4096},  {3, 3001}, {150, 3000}, {1100, 1024}, {700, 1600}};
static const int LAYERNORM_GRAD[] = {37, 5};
static const int LAYERNORM_GPU[][2] = {{65536, 768}, {16384, 1600}, {32768, 1024}};
static const int LAYERNORM_CPU[][2] = {{256, 768}, {4096, 768}, {1024, 1600}};

// A GPU with few multiprocessors, as the emulated one, needs fewer rows for the same.
static inline int layernorm_takes(const Harness* h, int* row) {
#ifdef __CUDACC__
    if (row[0] > 100 && h->ctx.multiprocessors <= 16) row[0] = max_int(row[0] / 8, 100);
    return 1;
#else
    return (void)h, row[0] * row[1] <= 1000000;
#endif
}

static const Op LAYERNORM = {
    OP_OF("layernorm", "N C", LAYERNORM_ARGS, LAYERNORM_ROWS),
    OP_BENCH(LAYERNORM_GPU, LAYERNORM_CPU),
    .passes = {{"forward", "y mean rstd", OP_PAIR(layernorm, forward)},
               {"backward", "dx dw db", OP_PAIR(layernorm, backward), layernorm_before_backward}},
    .prepare = layernorm_prepare,
    .takes = layernorm_takes,
    .grad = LAYERNORM_GRAD,
    .grad_tol = 1e-7};

static const Op RESIDUAL_LAYERNORM = {
    OP_OF("layernorm", "N C", LAYERNORM_ARGS, LAYERNORM_ROWS),
    OP_BENCH(LAYERNORM_GPU, LAYERNORM_CPU),
    .passes = {{"residual_forward", "y r mean rstd", OP_PAIR(layernorm, residual), NULL, layernorm_after_residual},
               {"residual_backward", "dx dbranch dw db dbias", OP_PAIR(layernorm, residual_backward),
                layernorm_before_residual}},
    .prepare = layernorm_prepare,
    .rates = {0, 0.3},
    .takes = layernorm_takes,
    .grad = LAYERNORM_GRAD,
    .grad_tol = 1e-7};

static inline OpCase* layernorm_case(Harness* h, const Op* op, int pass, int N, int C, double p) {
    const int row[] = {N, C};
    OpWay way = {SET, SET, 0, p, 0};
    return op_case(h, op, &op->passes[pass], row, way);
}

// Both gradients may overwrite dy. dbias: not asked for, it stays.
static inline void test_layernorm_in_place(Harness* h) {
    OpCase* k = layernorm_case(h, &LAYERNORM, 1, 17, 100, 0);
    layernorm_run_backward(k);
    real* dx = copy_of(h, k->dx);
    k->dx = k->dy;
    layernorm_run_backward(k);
    expect_equal(h, "dx in place of dy", k->dx, dx);
    case_end(h);

    k = layernorm_case(h, &RESIDUAL_LAYERNORM, 1, 17, 104, 0.3);
    layernorm_run_residual_backward(k);
    real *dbranch = copy_of(h, k->dbranch), *dbias = copy_of(h, k->dbias);
    ResidualGrad r = {.dx = k->dx.device, .dbranch = k->dy.device, .dbias = NULL, .dropout = k->dropout};
    residual_layernorm_backward(r, layernorm_grads(k), layernorm_inputs(k), SET, SET, k->ctx);
    expect_equal(h, "dbranch in place of dy", k->dy, dbranch);
    expect_equal(h, "dbias", k->dbias, dbias);
    case_end(h);
}

static inline void test_layernorm_precision(Harness* h) {
    // A mean a thousand times the deviation: a one-pass variance would lose every digit.
    OpCase* k = layernorm_case(h, &LAYERNORM, 0, 4, 768, 0);
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
