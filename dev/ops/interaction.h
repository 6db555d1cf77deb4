/* interaction: dot products of a sample's vectors. */
#ifndef DEV_OPS_INTERACTION_H
#define DEV_OPS_INTERACTION_H

#include "dev/recsys/ops/interaction.h"
#include "op.h"

typedef struct {
    OpCase z;
    Array out, bottom, table, dout, dbottom, dvectors;
    InteractionShape s;
    int* rows;
} InteractionCase;

// The table has N rows. For finite differences each is looked up once, so its gradient is that of one lookup, and the
// bottom vectors have gone through ReLU.
static inline void interaction_prepare(void* state) {
    InteractionCase* k = (InteractionCase*)state;
    int n = k->z.B * k->z.tables, is_grad = k->z.N == n;
    InteractionShape s = {k->z.B, k->z.tables, k->z.E, k->z.C};
    CHECK(s.width == interaction_width(s.tables, s.E));
    k->s = s, k->rows = int_array(k->z.h, (size_t)n);
    for (int i = 0; i < n; i++) k->rows[i] = is_grad ? i : random_below(k->z.h, k->z.N);
    k->rows = op_ints(&k->z, k->rows, n);
    for (size_t i = 0; i < k->bottom.n && is_grad; i++) k->bottom.host[i] = (real)fabs((double)k->bottom.host[i]);
}

static inline void interaction_run_forward(void* state) {
    InteractionCase* k = (InteractionCase*)state;
    interaction_forward(k->out.device, k->bottom.device, k->table.device, k->rows, k->s, k->z.ctx);
}

static inline void interaction_want_forward(void* state) {
    InteractionCase* k = (InteractionCase*)state;
    interaction_forward_ref(k->out.want, k->bottom.host, k->table.host, k->rows, k->s);
}

static inline void interaction_run_backward(void* state) {
    InteractionCase* k = (InteractionCase*)state;
    InteractionBackward g = {k->dbottom.device, k->dvectors.device, k->dout.device,
                             k->bottom.device,  k->table.device,    k->rows};
    interaction_backward(g, k->s, k->z.ctx);
}

static inline void interaction_want_backward(void* state) {
    InteractionCase* k = (InteractionCase*)state;
    InteractionBackwardRef g = {k->dbottom.want, k->dvectors.want, k->dout.host,
                                k->bottom.host,  k->table.host,    k->rows};
    interaction_backward_ref(g, k->s);
}

static const Arg INTERACTION_ARGS[] = {
    {"bottom", offsetof(InteractionCase, bottom), "B E", IN, 1, 0},  // half of it is not positive
    {"table", offsetof(InteractionCase, table), "N E", IN, 0.5, 0},
    {"z", offsetof(InteractionCase, out), "B C", OUT, 0, 1e-5},
    {"dz", offsetof(InteractionCase, dout), "B C", IN, 1, 0, "z"},
    {"dbottom", offsetof(InteractionCase, dbottom), "B E", OUT, 0, 1e-5, "bottom"},
    {"dvectors", offsetof(InteractionCase, dvectors), "B tables E", OUT, 0, 1e-5, "table"},
    {NULL}};
// The published shape, the most tables that a warp takes, more, and other widths.
static const int INTERACTION_ROWS[][5] = {{5, 26, 128, 480, 50}, {9, 31, 128, 624, 50}, {4, 32, 128, 656, 50},
                                          {6, 4, 8, 24, 50},     {3, 1, 128, 136, 50},  {7, 5, 24, 40, 50}};
static const int INTERACTION_GRAD[] = {2, 3, 8, 16, 6};
static const int INTERACTION_GPU[][5] = {{32768, 26, 128, 480, 1000000}};
static const int INTERACTION_CPU[][5] = {{1024, 26, 128, 480, 26000}};

static const Op INTERACTION = {
    .name = "interaction",
    .bytes = sizeof(InteractionCase),
    .sizes = "B tables E C N",
    .args = INTERACTION_ARGS,
    .passes = {{"forward", "z", interaction_run_forward, interaction_want_forward},
               {"backward", "dbottom dvectors", interaction_run_backward, interaction_want_backward}},
    .prepare = interaction_prepare,
    .rows = SIZE_ROWS(INTERACTION_ROWS),
    .gpu_bench = SIZE_ROWS(INTERACTION_GPU),
    .cpu_bench = SIZE_ROWS(INTERACTION_CPU),
    .grad = INTERACTION_GRAD};

#endif
