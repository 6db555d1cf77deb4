/* gelu: both forms, both modes, small and block-crossing sizes, far values. */
#ifndef DEV_OPS_GELU_H
#define DEV_OPS_GELU_H

#include "llmc/ops/gelu.h"
#include "op.h"

typedef struct {
    OpCase z;
    Array x, y, dy, dx;
} GeluCase;

static inline void gelu_prepare(void* state) {
    static const double FAR[] = {60, -60, 0, -1e4};
    Array x = ((GeluCase*)state)->x;
    for (size_t i = 0; i < COUNT_OF(FAR) && x.n > 4; i++) x.host[i] = (real)FAR[i];
    array_upload(x);
}

static inline void gelu_run_forward(void* state) {
    GeluCase* k = (GeluCase*)state;
    gelu_forward(k->y.device, k->x.device, k->x.n, (Gelu)k->z.kind, k->z.ctx);
}

static inline void gelu_want_forward(void* state) {
    GeluCase* k = (GeluCase*)state;
    gelu_forward_ref(k->y.want, k->x.host, k->x.n, (Gelu)k->z.kind);
}

static inline void gelu_run_backward(void* state) {
    GeluCase* k = (GeluCase*)state;
    gelu_backward(k->dx.device, k->dy.device, k->x.device, k->x.n, (Gelu)k->z.kind, k->z.mode, k->z.ctx);
}

static inline void gelu_want_backward(void* state) {
    GeluCase* k = (GeluCase*)state;
    gelu_backward_ref(k->dx.want, k->dy.host, k->x.host, k->x.n, (Gelu)k->z.kind, k->z.mode);
}

// The float versions promise 3e-7 max(1, |y|). The derivative, right to 3e-7, is multiplied by a dy of up to 5.
static const Arg GELU_ARGS[] = {{"x", offsetof(GeluCase, x), "n", IN, 3, 0},
                                {"y", offsetof(GeluCase, y), "n", OUT, 0, 5e-7},
                                {"dy", offsetof(GeluCase, dy), "n", IN, 1, 0, "y"},
                                {"dx", offsetof(GeluCase, dx), "n", BY_MODE, 0, 2e-6, "x"},
                                {NULL}};
static const int GELU_ROWS[] = {1, 33, 77 * 48, 20011}, GELU_GRAD[] = {60};
static const int GELU_GPU[] = {65536 * 3072}, GELU_CPU[] = {256 * 3072};

static const Op GELU = {.name = "gelu",
                        .bytes = sizeof(GeluCase),
                        .sizes = "n",
                        .args = GELU_ARGS,
                        .passes = {{"forward", "y", gelu_run_forward, gelu_want_forward},
                                   {"backward", "dx", gelu_run_backward, gelu_want_backward}},
                        .prepare = gelu_prepare,
                        .kinds = {"TANH", "ERF"},
                        .rows = SIZE_ROWS(GELU_ROWS),
                        .gpu_bench = SIZE_ROWS(GELU_GPU),
                        .cpu_bench = SIZE_ROWS(GELU_CPU),
                        .grad = GELU_GRAD};

#endif
