/* matmul_parts: test. The products alone are matmul's. */
#ifndef DEV_OPS_MATMUL_PARTS_H
#define DEV_OPS_MATMUL_PARTS_H

#include "dev/recsys/ops/matmul_parts.h"
#include "harness.h"

enum { PARTS_LAYERS = 3 };

// Two layers whose samples are cut into parts where that is done, and one whose are not.
typedef struct {
    int N[PARTS_LAYERS], IC[PARTS_LAYERS], OC[PARTS_LAYERS];
    Array x[PARTS_LAYERS], dy[PARTS_LAYERS], dw[PARTS_LAYERS];
    real* memory;
    Context* ctx;
} PartsCase;

static inline void parts_run(void* state) {
    PartsCase* k = (PartsCase*)state;
    PartsSum sum;
    memset(&sum, 0, sizeof sum);
    sum.free = k->memory;
    for (int l = 0; l < PARTS_LAYERS; l++)
        matmul_parts_backward_weight(&sum, k->dw[l].device_real, k->dy[l].device, k->x[l].device, k->N[l], k->IC[l],
                                     k->OC[l], k->ctx);
    matmul_parts_sum(&sum, k->ctx);
}

static inline void test_matmul_parts(Harness* h) {
    static const int SHAPES[PARTS_LAYERS][3] = {{8192, 16, 40}, {8192, 8, 24}, {1000, 24, 16}};
    case_begin(h, "matmul_parts");
    PartsCase* k = (PartsCase*)case_memory(h, sizeof *k);
    size_t size = 1;
    k->ctx = &h->ctx;
    for (int l = 0; l < PARTS_LAYERS; l++) {
        int N = k->N[l] = SHAPES[l][0], IC = k->IC[l] = SHAPES[l][1], OC = k->OC[l] = SHAPES[l][2];
        k->x[l] = input(h, (size_t)N * (size_t)IC, 1.0);
        k->dy[l] = input(h, (size_t)N * (size_t)OC, 1 / sqrt(N));
        k->dw[l] = output(h, (size_t)IC * (size_t)OC, SET);
        size += matmul_parts_size(N, IC, OC);
    }
    k->memory = input(h, size, 1.0).device_real;
    real* want[PARTS_LAYERS];
    for (int l = 0; l < PARTS_LAYERS; l++) {
        want[l] = copy_of(h, k->dw[l]);
        matmul_backward_weight_ref(want[l], NULL, k->dy[l].host, k->x[l].host, k->N[l], k->IC[l], k->OC[l], SET);
    }
    expect_same_for_any_threads(h, "dw", parts_run, k, k->dw, PARTS_LAYERS);
    for (int l = 0; l < PARTS_LAYERS; l++) expect_close(h, "dw", k->dw[l], want[l], tolerance(1e-5));
    case_end(h);
}

#endif
