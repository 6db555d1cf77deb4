/* matmul_relu: test and grad. The products alone are matmul's. */
#ifndef DEV_OPS_MATMUL_RELU_H
#define DEV_OPS_MATMUL_RELU_H

#include "dev/recsys/ops/matmul_relu.h"
#include "harness.h"
#include "matmul.h"

typedef struct {
    int N, IC, OC;
    Array x, w, b, h, dy, below, dz, db, db_below;
    ReluDropout dropout;
    Context* ctx;
} MatmulReluCase;

// A layer IC -> OC. Its input `below` is itself an output of ReLU, written by a first layer of the same shapes.
static inline MatmulReluCase* matmul_relu_case(Harness* h, int N, int IC, int OC, double p) {
    MatmulReluCase* k = (MatmulReluCase*)case_memory(h, sizeof *k);
    k->N = N, k->IC = IC, k->OC = OC, k->ctx = &h->ctx;
    k->dropout = relu_dropout_make(p, h->key, 1000);
    k->x = input(h, (size_t)N * (size_t)IC, 1.0);
    k->w = input(h, (size_t)OC * (size_t)IC, 1 / sqrt(IC));
    k->b = input(h, (size_t)OC, 0.5);
    k->h = output(h, (size_t)N * (size_t)OC, SET);
    k->dy = input(h, (size_t)N * (size_t)IC, 1.0);
    k->dz = output(h, (size_t)N * (size_t)OC, SET);
    k->db = output(h, (size_t)OC, SET), k->db_below = output(h, (size_t)IC, SET);
    return k;
}

// h [N, OC] from x, then dz [N, OC] from dy [N, IC] through the next layer's weight w^T: [IC, OC] read as w of OC
// inputs.
static inline void matmul_relu_run(void* state) {
    MatmulReluCase* k = (MatmulReluCase*)state;
    Linear p = {k->w.device, k->b.device};
    ReluOutput out = {k->h.device, k->dropout.scale};
    ReluGrads d = {k->dz.device, k->db.device_real};
    matmul_relu_forward(out, k->x.device, p, k->N, k->IC, k->OC, k->dropout, k->ctx);
    matmul_relu_backward_input(d, k->dy.device, k->w.device, out, k->N, k->OC, k->IC, k->ctx);
    matmul_relu_backward_bias(k->db_below.device_real, k->dy.device, k->N, k->IC, k->ctx);
}

static inline void test_matmul_relu(Harness* h) {
    // The last two are of several tiles a multiprocessor, an odd number of them, and in columns too.
    static const int SHAPES[][3] = {{64, 256, 128},  {300, 128, 512}, {33, 24, 40},    {1, 8, 16},
                                    {2000, 16, 256}, {1500, 328, 72}, {20000, 8, 136}, {10000, 40, 264}};
    for (size_t i = 0; i < 2 * (COUNT_OF(SHAPES) - (HAS_DEVICE_MEMORY ? 0 : 2)); i++) {
        int N = SHAPES[i / 2][0], IC = SHAPES[i / 2][1], OC = SHAPES[i / 2][2];
        double p = i % 2 ? 0.5 : 0;
        if (case_is_left_out(h, (double)N * IC)) continue;
        case_begin(h, "matmul_relu/both N=%d IC=%d OC=%d dropout=%g", N, IC, OC, p);
        MatmulReluCase* k = matmul_relu_case(h, N, IC, OC, p);
        Array all[] = {k->h, k->dz, k->db, k->db_below};
        real *want = copy_of(h, k->h), *dz = copy_of(h, k->dz), *db = copy_of(h, k->db),
             *below = copy_of(h, k->db_below);
        matmul_forward_ref(want, k->x.host, k->w.host, k->b.host, N, IC, OC, SET);
        relu_dropout_ref(want, k->dropout, N, OC);
        expect_same_for_any_threads(h, "both", matmul_relu_run, k, all, 4);
        expect_close(h, "h", k->h, want, tolerance(1e-5));
        matmul_backward_input_ref(dz, k->dy.host, k->w.host, N, OC, IC, SET);
        relu_mask_ref(dz, k->h.host, (real)k->dropout.scale, (size_t)N * (size_t)OC);
        expect_close(h, "dz", k->dz, dz, tolerance(1e-5));
        matmul_backward_bias_ref(db, k->dz.host, N, OC, SET);
        matmul_backward_bias_ref(below, k->dy.host, N, IC, SET);
        // Sums of thousands of terms that cancel: their error is judged by the sizes of the terms.
        real *sizes = copy_of(h, k->db), *below_sizes = copy_of(h, k->db_below);
        matmul_backward_bias_ref(sizes, array_absolute(h, k->dz), N, OC, SET);
        matmul_backward_bias_ref(below_sizes, array_absolute(h, k->dy), N, IC, SET);
        expect_close_to_sum(h, "db", k->db, db, sizes, tolerance(1e-6));
        expect_close_to_sum(h, "db of the layer below", k->db_below, below, below_sizes, tolerance(1e-6));
        case_end(h);
    }
    // The fraction that a ReLU's output lets through, and that another key is another mask.
    case_begin(h, "matmul_relu/dropout");
    real* x = (real*)case_memory(h, 400 * 1000 * sizeof *x);
    for (int i = 0; i < 400 * 1000; i++) x[i] = 1;
    relu_dropout_ref(x, relu_dropout_make(0.3, 5, 0), 1000, 400);
    double sum = 0;
    for (int i = 0; i < 400 * 1000; i++) sum += (double)x[i];
    expect_within(h, "mean", sum / 400000, 1, 4 * sqrt(0.3 / 0.7 / 400000));  // four standard deviations
    case_end(h);
}

#endif
