/* tanh: the backward pass reads what forward left. */
#ifndef DEV_OPS_TANH_H
#define DEV_OPS_TANH_H

#include "apps/tune/tanh.h"
#include "op.h"

RUN_AND_WANT(tanh, forward, tanh_forward(k->y.device, k->x.device, k->x.n, k->ctx),
             tanh_forward_ref(k->y.want, k->x.host, k->x.n));

OP_FN(tanh_before_backward) {
    tanh_forward_ref(k->y.host, k->x.host, k->x.n);
    array_upload(k->y);
}

RUN_AND_WANT(tanh, backward, tanh_backward(k->dx.device, k->dy.device, k->y.device, k->x.n, k->ctx),
             tanh_backward_ref(k->dx.want, k->dy.host, k->y.host, k->x.n));

static const Arg TANH_ARGS[] =
    ARGS(ARG(x, "n", IN, 3), ARG(y, "n", OUT, 0, 1e-6), ARG(dy, "n", IN, 1, 0, "y"), ARG(dx, "n", OUT, 0, 1e-6, "x"));
static const int TANH_ROWS[] = {1, 33, 77 * 48, 20011}, TANH_GRAD[] = {60};
static const int TANH_BENCH[] = {256 * 1024};  // the pooler of BERT-large

static const Op TANH = {OP_OF("tanh", "n", TANH_ARGS, TANH_ROWS), OP_BENCH(TANH_BENCH, TANH_BENCH),
                        .passes = {{"forward", "y", OP_PAIR(tanh, forward)},
                                   {"backward", "dx", OP_PAIR(tanh, backward), tanh_before_backward}},
                        .grad = TANH_GRAD};

// Both passes may overwrite what they read.
static inline void test_tanh_in_place(Harness* h) {
    for (int pass = 0; pass < 2; pass++) {
        OpCase* k = op_case(h, &TANH, &TANH.passes[pass], &TANH_ROWS[2], OP_PLAIN);
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
