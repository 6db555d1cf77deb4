/* tanh: the backward pass reads what forward left. */
#ifndef DEV_OPS_TANH_H
#define DEV_OPS_TANH_H

#include "apps/tune/tanh.h"
#include "op.h"

typedef struct {
    OpCase z;
    Array x, y, dy, dx;
} TanhCase;

static inline void tanh_run_forward(void* state) {
    TanhCase* k = (TanhCase*)state;
    tanh_forward(k->y.device, k->x.device, k->x.n, k->z.ctx);
}

static inline void tanh_want_forward(void* state) {
    TanhCase* k = (TanhCase*)state;
    tanh_forward_ref(k->y.want, k->x.host, k->x.n);
}

static inline void tanh_before_backward(void* state) {
    TanhCase* k = (TanhCase*)state;
    tanh_forward_ref(k->y.host, k->x.host, k->x.n);
    array_upload(k->y);
}

static inline void tanh_run_backward(void* state) {
    TanhCase* k = (TanhCase*)state;
    tanh_backward(k->dx.device, k->dy.device, k->y.device, k->x.n, k->z.ctx);
}

static inline void tanh_want_backward(void* state) {
    TanhCase* k = (TanhCase*)state;
    tanh_backward_ref(k->dx.want, k->dy.host, k->y.host, k->x.n);
}

static const Arg TANH_ARGS[] = {{"x", offsetof(TanhCase, x), "n", IN, 3, 0},
                                {"y", offsetof(TanhCase, y), "n", OUT, 0, 1e-6},
                                {"dy", offsetof(TanhCase, dy), "n", IN, 1, 0, "y"},
                                {"dx", offsetof(TanhCase, dx), "n", OUT, 0, 1e-6, "x"},
                                {NULL}};
static const int TANH_ROWS[] = {1, 33, 77 * 48, 20011}, TANH_GRAD[] = {60};
static const int TANH_BENCH[] = {256 * 1024};  // the pooler of BERT-large

static const Op TANH = {
    .name = "tanh",
    .bytes = sizeof(TanhCase),
    .sizes = "n",
    .args = TANH_ARGS,
    .passes = {{"forward", "y", tanh_run_forward, tanh_want_forward},
               {"backward", "dx", tanh_run_backward, tanh_want_backward, tanh_before_backward}},
    .rows = SIZE_ROWS(TANH_ROWS),
    .gpu_bench = SIZE_ROWS(TANH_BENCH),
    .cpu_bench = SIZE_ROWS(TANH_BENCH),
    .grad = TANH_GRAD,
};

// Both passes may overwrite what they read.
static inline void test_tanh_in_place(Harness* h) {
    for (int pass = 0; pass < 2; pass++) {
        TanhCase* k = (TanhCase*)op_case(h, &TANH, &TANH.passes[pass], &TANH_ROWS[2], OP_PLAIN);
        TANH.passes[pass].run(k);
        real* want = copy_of(h, pass ? k->dx : k->y);
        if (pass) k->dx = k->dy;
        else k->y = k->x;
        TANH.passes[pass].run(k);
        expect_equal(h, "in place", pass ? k->dx : k->y, want);
        case_end(h);
    }
}

#endif
