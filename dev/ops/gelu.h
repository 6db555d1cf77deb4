/* gelu: both forms, both modes, small and block-crossing sizes, far values. */
#ifndef DEV_OPS_GELU_H
#define DEV_OPS_GELU_H

#include "llmc/ops/gelu.h"
#include "op.h"

OP_FN(gelu_prepare) {
    static const double FAR[] = {60, -60, 0, -1e4};
    for (size_t i = 0; i < COUNT_OF(FAR) && k->x.n > 4; i++) k->x.host[i] = (real)FAR[i];
    array_upload(k->x);
}

RUN_AND_WANT(gelu, forward, gelu_forward(k->y.device, k->x.device, k->x.n, (Gelu)k->kind, k->ctx),
             gelu_forward_ref(k->y.want, k->x.host, k->x.n, (Gelu)k->kind));
RUN_AND_WANT(gelu, backward,
             gelu_backward(k->dx.device, k->dy.device, k->x.device, k->x.n, (Gelu)k->kind, k->mode, k->ctx),
             gelu_backward_ref(k->dx.want, k->dy.host, k->x.host, k->x.n, (Gelu)k->kind, k->mode));

// The float versions promise 3e-7 max(1, |y|). The derivative, right to 3e-7, is multiplied by a dy of up to 5.
static const Arg GELU_ARGS[] = ARGS(ARG(x, "n", IN, 3), ARG(y, "n", OUT, 0, 5e-7), ARG(dy, "n", IN, 1, 0, "y"),
                                    ARG(dx, "n", BY_MODE, 0, 2e-6, "x"));
static const int GELU_ROWS[] = {1, 33, 77 * 48, 20011}, GELU_GRAD[] = {60};
static const int GELU_GPU[] = {65536 * 3072}, GELU_CPU[] = {256 * 3072};

static const Op GELU = {
    OP_OF("gelu", "n", GELU_ARGS, GELU_ROWS),
    OP_BENCH(GELU_GPU, GELU_CPU),
    .passes = {{"forward", "y", OP_PAIR(gelu, forward)}, {"backward", "dx", OP_PAIR(gelu, backward)}},
    .prepare = gelu_prepare,
    .kinds = {"TANH", "ERF"},
    .grad = GELU_GRAD};

#endif
