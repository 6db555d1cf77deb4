/* gather: moves rows, so everything is exact. */
#ifndef DEV_OPS_GATHER_H
#define DEV_OPS_GATHER_H

#include "llmc/ops/gather.h"
#include "op.h"

typedef struct {
    OpCase z;
    Array x, y, dy, dx;
    int* index;
} GatherCase;

static inline void gather_prepare(void* state) {
    GatherCase* k = (GatherCase*)state;
    k->index = int_array(k->z.h, (size_t)k->z.M);
    for (int m = 0; m < k->z.M; m++) k->index[m] = (int)rng_permute((uint64_t)m, (uint64_t)k->z.N, k->z.h->key);
    k->index = op_ints(&k->z, k->index, k->z.M);
}

static inline void gather_run_forward(void* state) {
    GatherCase* k = (GatherCase*)state;
    gather_forward(k->y.device, k->x.device, k->index, k->z.M, k->z.C, k->z.ctx);
}

static inline void gather_want_forward(void* state) {
    GatherCase* k = (GatherCase*)state;
    gather_forward_ref(k->y.want, k->x.host, k->index, k->z.M, k->z.C);
}

static inline void gather_run_backward(void* state) {
    GatherCase* k = (GatherCase*)state;
    gather_backward(k->dx.device, k->dy.device, k->index, k->z.M, k->z.N, k->z.C, k->z.mode, k->z.ctx);
}

static inline void gather_want_backward(void* state) {
    GatherCase* k = (GatherCase*)state;
    gather_backward_ref(k->dx.want, k->dy.host, k->index, k->z.M, k->z.N, k->z.C, k->z.mode);
}

static const Arg GATHER_ARGS[] = {{"x", offsetof(GatherCase, x), "N C", IN, 1, 0},
                                  {"y", offsetof(GatherCase, y), "M C", OUT, 0, 0},
                                  {"dy", offsetof(GatherCase, dy), "M C", IN, 1, 0, "y"},
                                  {"dx", offsetof(GatherCase, dx), "N C", BY_MODE, 0, 0, "x"},
                                  {NULL}};
static const int GATHER_ROWS[][3] = {{1, 1, 1},      {1, 77, 48},       {13, 77, 33},     {77, 77, 768},  {0, 5, 48},
                                     {17, 77, 1024}, {154, 1024, 1600}, {17, 1024, 1025}, {1, 1024, 1024}};
static const int GATHER_GRAD[] = {5, 9, 7};
static const int GATHER_GPU[][3] = {{5120, 32768, 1024}},
                 GATHER_CPU[][3] = {{160, 1024, 1024}};  // masked rows of BERT-large

static const Op GATHER = {.name = "gather",
                          .bytes = sizeof(GatherCase),
                          .sizes = "M N C",
                          .args = GATHER_ARGS,
                          .passes = {{"forward", "y", gather_run_forward, gather_want_forward},
                                     {"backward", "dx", gather_run_backward, gather_want_backward}},
                          .prepare = gather_prepare,
                          .rows = SIZE_ROWS(GATHER_ROWS),
                          .gpu_bench = SIZE_ROWS(GATHER_GPU),
                          .cpu_bench = SIZE_ROWS(GATHER_CPU),
                          .grad = GATHER_GRAD};

#endif
