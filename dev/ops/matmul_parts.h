/* matmul_parts: the weight gradients of two layers, whose samples are cut into parts where that is done. The products
 * alone are matmul's. */
#ifndef DEV_OPS_MATMUL_PARTS_H
#define DEV_OPS_MATMUL_PARTS_H

#include "dev/recsys/ops/matmul_parts.h"
#include "op.h"

// The second layer has the first one's sides exchanged. `own`: room for the parts.
OP_FN(parts_prepare) {
    for (size_t i = 0; i < k->dy.n; i++) k->dy.host[i] /= (real)sqrt(k->N);
    array_upload(k->dy);
    size_t n = 1 + matmul_parts_size(k->N, k->IC, k->OC) + matmul_parts_size(k->N, k->OC, k->IC);
    k->own = case_block(k->h, n * sizeof(real), ON_DEVICE);
}

OP_FN(parts_run) {
    PartsSum sum;
    memset(&sum, 0, sizeof sum);
    sum.free = OP_OWN(real);
    matmul_parts_backward_weight(&sum, k->dw.device_real, k->dy.device, k->x.device, k->N, k->IC, k->OC, k->ctx);
    matmul_parts_backward_weight(&sum, k->w.device_real, k->x.device, k->dy.device, k->N, k->OC, k->IC, k->ctx);
    matmul_parts_sum(&sum, k->ctx);
}

OP_FN(parts_want) {
    matmul_backward_weight_ref(k->dw.want, NULL, k->dy.host, k->x.host, k->N, k->IC, k->OC, SET);
    matmul_backward_weight_ref(k->w.want, NULL, k->x.host, k->dy.host, k->N, k->OC, k->IC, SET);
}

static const Arg PARTS_ARGS[] = ARGS(ARG(x, "N IC", IN, 1), ARG(dy, "N OC", IN, 1), ARG(dw, "OC IC", OUT, 0, 1e-5),
                                     ARG_AS("second", w, "IC OC", OUT, 0, 1e-5));
static const int PARTS_SIZES[][3] = {{8192, 16, 40}, {8192, 8, 24}, {1000, 24, 16}};

static const Op PARTS = {OP_OF("matmul_parts", "N IC OC", PARTS_ARGS, PARTS_SIZES),
                         .passes = {{"weights", "dw second", parts_run, parts_want}}, .prepare = parts_prepare};

#endif
