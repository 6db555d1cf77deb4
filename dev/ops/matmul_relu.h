/* matmul_relu: a layer with ReLU and dropout, and the layer's gradients. The products alone are matmul's. */
#ifndef DEV_OPS_MATMUL_RELU_H
#define DEV_OPS_MATMUL_RELU_H

#include "dev/recsys/ops/matmul_relu.h"
#include "op.h"

OP_FN(matmul_relu_prepare) {
    k->own = case_memory(k->h, sizeof(ReluDropout));
    *OP_OWN(ReluDropout) = relu_dropout_make(k->p, k->h->key, 1000);
    for (size_t i = 0; i < k->w.n; i++) k->w.host[i] /= (real)sqrt(k->IC);
    array_upload(k->w);
}

// y [N, OC] from x, then dpre [N, OC] from dy [N, IC] through the next layer's weight w^T: [IC, OC] read as w of OC
// inputs. dbias: of the layer below, which is an output of ReLU too.
OP_FN(matmul_relu_run) {
    const ReluDropout* dropout = OP_OWN(ReluDropout);
    ReluOutput out = {k->y.device, dropout->scale};
    matmul_relu_forward(out, k->x.device, (Linear){k->w.device, k->b.device}, k->N, k->IC, k->OC, *dropout, k->ctx);
    matmul_relu_backward_input((ReluGrads){k->pre.device, k->db.device_real}, k->dy.device, k->w.device, out, k->N,
                               k->OC, k->IC, k->ctx);
    matmul_relu_backward_bias(k->dbias.device_real, k->dy.device, k->N, k->IC, k->ctx);
}

OP_FN(matmul_relu_want) {
    matmul_forward_ref(k->y.want, k->x.host, k->w.host, k->b.host, k->N, k->IC, k->OC, SET);
    relu_dropout_ref(k->y.want, *OP_OWN(ReluDropout), k->N, k->OC);
    matmul_backward_input_ref(k->pre.want, k->dy.host, k->w.host, k->N, k->OC, k->IC, SET);
    matmul_backward_bias_ref(k->dbias.want, k->dy.host, k->N, k->IC, SET);
    k->dbias.magnitude = copy_of(k->h, k->dbias);
    matmul_backward_bias_ref(k->dbias.magnitude, array_absolute(k->h, k->dy), k->N, k->IC, SET);
}

// The gradients behind ReLU are those of the launcher's own output. Sums of thousands of terms that cancel: their error
// is judged by the sizes of the terms.
OP_FN(matmul_relu_after) {
    relu_mask_ref(k->pre.want, k->y.host, (real)OP_OWN(ReluDropout)->scale, (size_t)k->N * (size_t)k->OC);
    matmul_backward_bias_ref(k->db.want, k->pre.host, k->N, k->OC, SET);
    k->db.magnitude = copy_of(k->h, k->db);
    matmul_backward_bias_ref(k->db.magnitude, array_absolute(k->h, k->pre), k->N, k->OC, SET);
}

static const Arg MATMUL_RELU_ARGS[] =
    ARGS(ARG(x, "N IC", IN, 1), ARG(w, "OC IC", IN, 1), ARG(b, "OC", IN, 0.5), ARG(y, "N OC", OUT, 0, 1e-5),
         ARG(dy, "N IC", IN, 1), ARG_AS("dpre", pre, "N OC", OUT, 0, 1e-5), ARG(db, "OC", OUT, 0, 1e-6),
         ARG(dbias, "IC", OUT, 0, 1e-6));
// The last two are of several tiles a multiprocessor, an odd number of them, and in columns too.
static const int MATMUL_RELU_ROWS[][3] = {{64, 256, 128},  {300, 128, 512}, {33, 24, 40},    {1, 8, 16},
                                          {2000, 16, 256}, {1500, 328, 72}, {20000, 8, 136}, {10000, 40, 264}};

static inline int matmul_relu_takes(const Harness* h, int* row) { return (void)h, HAS_DEVICE_MEMORY || row[0] < 5000; }

static const Op MATMUL_RELU = {
    OP_OF("matmul_relu", "N IC OC", MATMUL_RELU_ARGS, MATMUL_RELU_ROWS),
    .passes = {{"both", "y dpre db dbias", matmul_relu_run, matmul_relu_want, NULL, matmul_relu_after}},
    .prepare = matmul_relu_prepare, .rates = {0, 0.5}, .takes = matmul_relu_takes};

// The mean that dropout keeps.
static inline void test_matmul_relu(Harness* h) {
    enum { N = 1000, C = 400 };
    case_begin(h, "matmul_relu/dropout");
    real* x = (real*)case_memory(h, N * C * sizeof *x);
    double sum = 0;
    for (int i = 0; i < N * C; i++) x[i] = 1;
    relu_dropout_ref(x, relu_dropout_make(0.3, 5, 0), N, C);
    for (int i = 0; i < N * C; i++) sum += (double)x[i];
    expect_within(h, "mean", sum / (N * C), 1, 4 * sqrt(0.3 / 0.7 / (N * C)));  // four standard deviations
    case_end(h);
}

#endif
