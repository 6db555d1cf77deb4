/* gather: moves rows, so everything is exact. */
#ifndef DEV_OPS_GATHER_H
#define DEV_OPS_GATHER_H

#include "llmc/ops/gather.h"
#include "op.h"

OP_FN(gather_prepare) {
    k->index = int_array(k->h, (size_t)k->M);
    for (int m = 0; m < k->M; m++) k->index[m] = (int)rng_permute((uint64_t)m, (uint64_t)k->N, k->h->key);
    k->index = op_ints(k, k->index, k->M);
}

RUN_AND_WANT(gather, forward, gather_forward(k->y.device, k->x.device, k->index, k->M, k->C, k->ctx),
             gather_forward_ref(k->y.want, k->x.host, k->index, k->M, k->C));
RUN_AND_WANT(gather, backward, gather_backward(k->dx.device, k->dy.device, k->index, k->M, k->N, k->C, k->mode, k->ctx),
             gather_backward_ref(k->dx.want, k->dy.host, k->index, k->M, k->N, k->C, k->mode));

static const Arg GATHER_ARGS[] =
    ARGS(ARG(x, "N C", IN, 1), ARG(y, "M C", OUT), ARG(dy, "M C", IN, 1, 0, "y"), ARG(dx, "N C", BY_MODE, 0, 0, "x"));
static const int GATHER_ROWS[][3] = {{1, 1, 1},      {1, 77, 48},       {13, 77, 33},     {77, 77, 768},  {0, 5, 48},
                                     {17, 77, 1024}, {154, 1024, 1600}, {17, 1024, 1025}, {1, 1024, 1024}};
static const int GATHER_GRAD[] = {5, 9, 7};
static const int GATHER_GPU[][3] = {{5120, 32768, 1024}},
                 GATHER_CPU[][3] = {{160, 1024, 1024}};  // masked rows of BERT-large

static const Op GATHER = {
    OP_OF("gather", "M N C", GATHER_ARGS, GATHER_ROWS), OP_BENCH(GATHER_GPU, GATHER_CPU),
    .passes = {{"forward", "y", OP_PAIR(gather, forward)}, {"backward", "dx", OP_PAIR(gather, backward)}},
    .prepare = gather_prepare, .grad = GATHER_GRAD};

#endif
