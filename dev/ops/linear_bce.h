/* linear_bce: a linear layer of one output and its loss, forward and backward in one. */
#ifndef DEV_OPS_LINEAR_BCE_H
#define DEV_OPS_LINEAR_BCE_H

#include "dev/recsys/ops/linear_bce.h"
#include "op.h"

typedef struct {
    OpCase z;
    Array x, w, b, labels, logits, each, sum, dx, dw, db, dbias;
    LinearBceShape s;
} LinearBceCase;

// The last M columns have gone through ReLU.
static inline void linear_bce_prepare(void* state) {
    LinearBceCase* k = (LinearBceCase*)state;
    LinearBceShape s = {k->z.N, k->z.C, k->z.C - k->z.M, 2};
    k->s = s;
    for (int n = 0; n < k->z.N; n++) k->labels.host[n] = random_below(k->z.h, 3) == 0;
    for (size_t i = 0; i < k->w.n; i++) k->w.host[i] /= (real)sqrt(k->z.C);
    array_upload(k->labels), array_upload(k->w);
}

static inline void linear_bce_run(LinearBceCase* k, Direction direction) {
    Losses losses = {k->each.device_real, k->sum.device_real, 1.0 / k->s.N, k->z.mode};
    LinearBceInput in = {k->x.device, {k->w.device, k->b.device}, k->labels.device_real};
    LinearBceOutput out = {k->logits.device_real,
                           k->dx.device,
                           {k->dw.device_real, k->db.device_real},
                           k->dbias.n ? k->dbias.device_real : NULL};
    linear_bce(losses, out, in, k->s, direction, k->z.ctx);
}

static inline void linear_bce_want(LinearBceCase* k, Direction direction) {
    Losses losses = {k->each.want, k->sum.want, 1.0 / k->s.N, k->z.mode};
    LinearBceRef r = {k->logits.want, k->dx.want, k->dw.want, k->db.want,    k->dbias.n ? k->dbias.want : NULL,
                      k->x.host,      k->w.host,  k->b.host,  k->labels.host};
    linear_bce_ref(losses, r, k->s, direction);
}

static inline void linear_bce_run_forward(void* k) { linear_bce_run((LinearBceCase*)k, FORWARD); }
static inline void linear_bce_want_forward(void* k) { linear_bce_want((LinearBceCase*)k, FORWARD); }
static inline void linear_bce_run_backward(void* k) { linear_bce_run((LinearBceCase*)k, BACKWARD); }
static inline void linear_bce_want_backward(void* k) { linear_bce_want((LinearBceCase*)k, BACKWARD); }

// On the GPU dbias sums dx as it is stored: each of at most 1 / N has half a unit of floatX.
static inline void linear_bce_after(void* state) {
    LinearBceCase* k = (LinearBceCase*)state;
    k->dbias.slack = array_rounding(k->dx);
}

static const Arg LINEAR_BCE_ARGS[] = {{"x", offsetof(LinearBceCase, x), "N C", IN, 1, 0},
                                      {"w", offsetof(LinearBceCase, w), "C", IN, 1, 0},
                                      {"b", offsetof(LinearBceCase, b), "", IN, 1, 0},
                                      {"labels", offsetof(LinearBceCase, labels), "N", IN, 1, 0},
                                      {"logits", offsetof(LinearBceCase, logits), "N", OUT, 0, 1e-5},
                                      {"losses", offsetof(LinearBceCase, each), "N", OUT, 0, 1e-5},
                                      {"sum", offsetof(LinearBceCase, sum), "", BY_MODE, 0, 1e-5},
                                      {"dx", offsetof(LinearBceCase, dx), "N C", OUT, 0, 1e-6, "x"},
                                      {"dw", offsetof(LinearBceCase, dw), "C", OUT, 0, 1e-5, "w"},
                                      {"db", offsetof(LinearBceCase, db), "", OUT, 0, 1e-5, "b"},
                                      {"dbias", offsetof(LinearBceCase, dbias), "M", OUT, 0, 1e-5},
                                      {NULL}};
static const int LINEAR_BCE_ROWS[][3] = {{70, 256, 256}, {1000, 128, 64}, {1, 16, 16},
                                         {33, 300, 290}, {5000, 8, 4},    {40, 512, 0}};
static const int LINEAR_BCE_GRAD[] = {6, 8, 0};  // no column with ReLU, so dx is the gradient of x itself
static const int LINEAR_BCE_BENCH[][3] = {{32768, 256, 256}};

static const Op LINEAR_BCE = {
    .name = "linear_bce",
    .bytes = sizeof(LinearBceCase),
    .sizes = "N C M",
    .args = LINEAR_BCE_ARGS,
    .passes = {{"forward", "logits losses sum", linear_bce_run_forward, linear_bce_want_forward},
               {"backward", "logits losses sum dx dw db dbias", linear_bce_run_backward, linear_bce_want_backward, NULL,
                linear_bce_after}},
    .prepare = linear_bce_prepare,
    .rows = SIZE_ROWS(LINEAR_BCE_ROWS),
    .gpu_bench = SIZE_ROWS(LINEAR_BCE_BENCH),
    .cpu_bench = SIZE_ROWS(LINEAR_BCE_BENCH),
    .grad = LINEAR_BCE_GRAD,
    .loss = "sum"};

#endif
