/* interaction: dot products of a sample's vectors. */
#ifndef DEV_OPS_INTERACTION_H
#define DEV_OPS_INTERACTION_H

#include "dev/recsys/ops/interaction.h"
#include "op.h"

// The table has N rows. For finite differences each is looked up once, so its gradient is that of one lookup, and the
// bottom vectors have gone through ReLU.
OP_FN(interaction_prepare) {
    int n = k->B * k->tables, is_grad = k->N == n;
    CHECK(k->C == interaction_width(k->tables, k->E));
    k->index = int_array(k->h, (size_t)n);
    for (int i = 0; i < n; i++) k->index[i] = is_grad ? i : random_below(k->h, k->N);
    k->index = op_ints(k, k->index, n);
    for (size_t i = 0; i < k->bottom.n && is_grad; i++) k->bottom.host[i] = (real)fabs((double)k->bottom.host[i]);
}

static inline InteractionShape interaction_shape(const OpCase* k) {
    return (InteractionShape){k->B, k->tables, k->E, k->C};
}

RUN_AND_WANT(interaction, forward,
             interaction_forward(k->out.device, k->bottom.device, k->table.device, k->index, interaction_shape(k),
                                 k->ctx),
             interaction_forward_ref(k->out.want, k->bottom.host, k->table.host, k->index, interaction_shape(k)));
RUN_AND_WANT(interaction, backward,
             interaction_backward((InteractionBackward){k->dbottom.device, k->dvectors.device, k->dout.device,
                                                        k->bottom.device, k->table.device, k->index},
                                  interaction_shape(k), k->ctx),
             interaction_backward_ref((InteractionBackwardRef){k->dbottom.want, k->dvectors.want, k->dout.host,
                                                               k->bottom.host, k->table.host, k->index},
                                      interaction_shape(k)));

static const Arg INTERACTION_ARGS[] =
    ARGS(ARG(bottom, "B E", IN, 1),  // half of it is not positive
         ARG(table, "N E", IN, 0.5), ARG_AS("z", out, "B C", OUT, 0, 1e-5), ARG_AS("dz", dout, "B C", IN, 1, 0, "z"),
         ARG(dbottom, "B E", OUT, 0, 1e-5, "bottom"), ARG(dvectors, "B tables E", OUT, 0, 1e-5, "table"));
// The published shape, the most tables that a warp takes, more, and other widths.
static const int INTERACTION_ROWS[][5] = {{5, 26, 128, 480, 50}, {9, 31, 128, 624, 50}, {4, 32, 128, 656, 50},
                                          {6, 4, 8, 24, 50},     {3, 1, 128, 136, 50},  {7, 5, 24, 40, 50}};
static const int INTERACTION_GRAD[] = {2, 3, 8, 16, 6};
static const int INTERACTION_GPU[][5] = {{32768, 26, 128, 480, 1000000}};
static const int INTERACTION_CPU[][5] = {{1024, 26, 128, 480, 26000}};

static const Op INTERACTION = {OP_OF("interaction", "B tables E C N", INTERACTION_ARGS, INTERACTION_ROWS),
                               OP_BENCH(INTERACTION_GPU, INTERACTION_CPU),
                               .passes = {{"forward", "z", OP_PAIR(interaction, forward)},
                                          {"backward", "dbottom dvectors", OP_PAIR(interaction, backward)}},
                               .prepare = interaction_prepare, .grad = INTERACTION_GRAD};

#endif
