/* linear_bce: a linear layer of one output and its loss, forward and backward in one. */
#ifndef DEV_OPS_LINEAR_BCE_H
#define DEV_OPS_LINEAR_BCE_H

#include "dev/recsys/ops/linear_bce.h"
#include "op.h"

// The last M columns have gone through ReLU.
OP_FN(linear_bce_prepare) {
    for (int n = 0; n < k->N; n++) k->labels.host[n] = random_below(k->h, 3) == 0;
    for (size_t i = 0; i < k->w.n; i++) k->w.host[i] /= (real)sqrt(k->C);
    array_upload(k->labels), array_upload(k->w);
}

static inline LinearBceShape linear_bce_shape(const OpCase* k) { return (LinearBceShape){k->N, k->C, k->C - k->M, 2}; }

static inline void linear_bce_run(OpCase* k, Direction direction) {
    Losses losses = {k->each.device_real, k->sum.device_real, 1.0 / k->N, k->mode};
    LinearBceInput in = {k->x.device, {k->w.device, k->b.device}, k->labels.device_real};
    LinearBceOutput out = {k->logits.device_real,
                           k->dx.device,
                           {k->dw.device_real, k->db.device_real},
                           k->dbias.n ? k->dbias.device_real : NULL};
    linear_bce(losses, out, in, linear_bce_shape(k), direction, k->ctx);
}

static inline void linear_bce_want(OpCase* k, Direction direction) {
    Losses losses = {k->each.want, k->sum.want, 1.0 / k->N, k->mode};
    LinearBceRef r = {k->logits.want, k->dx.want, k->dw.want, k->db.want,    k->dbias.n ? k->dbias.want : NULL,
                      k->x.host,      k->w.host,  k->b.host,  k->labels.host};
    linear_bce_ref(losses, r, linear_bce_shape(k), direction);
}

RUN_AND_WANT(linear_bce, forward, linear_bce_run(k, FORWARD), linear_bce_want(k, FORWARD));
RUN_AND_WANT(linear_bce, backward, linear_bce_run(k, BACKWARD), linear_bce_want(k, BACKWARD));

// On the GPU dbias sums dx as it is stored: each of at most 1 / N has half a unit of floatX.
OP_FN(linear_bce_after) { k->dbias.slack = array_rounding(k->dx); }

static const Arg LINEAR_BCE_ARGS[] =
    ARGS(ARG(x, "N C", IN, 1), ARG(w, "C", IN, 1), ARG(b, "", IN, 1), ARG(labels, "N", IN, 1),
         ARG(logits, "N", OUT, 0, 1e-5), ARG_AS("losses", each, "N", OUT, 0, 1e-5), ARG(sum, "", BY_MODE, 0, 1e-5),
         ARG(dx, "N C", OUT, 0, 1e-6, "x"), ARG(dw, "C", OUT, 0, 1e-5, "w"), ARG(db, "", OUT, 0, 1e-5, "b"),
         ARG(dbias, "M", OUT, 0, 1e-5));
static const int LINEAR_BCE_ROWS[][3] = {{70, 256, 256}, {1000, 128, 64}, {1, 16, 16},
                                         {33, 300, 290}, {5000, 8, 4},    {40, 512, 0}};
static const int LINEAR_BCE_GRAD[] = {6, 8, 0};  // no column with ReLU, so dx is the gradient of x itself
static const int LINEAR_BCE_BENCH[][3] = {{32768, 256, 256}};

static const Op LINEAR_BCE = {
    OP_OF("linear_bce", "N C M", LINEAR_BCE_ARGS, LINEAR_BCE_ROWS),
    OP_BENCH(LINEAR_BCE_BENCH, LINEAR_BCE_BENCH),
    .passes = {{"forward", "logits losses sum", OP_PAIR(linear_bce, forward)},
               {"backward", "logits losses sum dx dw db dbias", OP_PAIR(linear_bce, backward), NULL, linear_bce_after}},
    .prepare = linear_bce_prepare,
    .grad = LINEAR_BCE_GRAD,
    .loss = "sum"};

#endif
