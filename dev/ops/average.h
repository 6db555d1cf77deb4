/* average: of weights, and the exchange of weights and average. */
#ifndef DEV_OPS_AVERAGE_H
#define DEV_OPS_AVERAGE_H

#include "llmc/average/average.h"
#include "op.h"

static const double AVERAGE_RATES[] = {1e-4, 0.25, 1};

static inline double average_rate(const OpCase* k) { return AVERAGE_RATES[k->M]; }

// M: which rate. With a rate of 1 the average, of zeros, becomes the weights exactly.
OP_FN(average_prepare) {
    if (average_rate(k) == 1) memset(k->average.host, 0, k->average.n * sizeof(real)), array_begin(k->average);
}

// kind 0: of the parameters; 1: of their copies in full precision.
RUN_AND_WANT(average, update,
             average_update(k->average.device_real, k->params.device, k->kind ? k->master.device_real : NULL,
                            k->average.n, average_rate(k), k->ctx),
             average_update_ref(k->average.want, k->kind ? k->master.host : k->params.host, k->average.n,
                                average_rate(k)));

OP_FN(average_after_update) {
    k->average.slack = average_rate(k) == 1 ? 0 : tolerance(3 * 1.2e-7);  // three roundings of numbers up to 2
}

OP_FN(average_run_exchange) {
    average_exchange(k->params.device, k->kept.device, k->average.device_real, k->average.n, k->ctx);
}

// The average, rounded; the parameters are kept.
OP_FN(average_want_exchange) {
    memcpy(k->params.want, k->average.host, k->params.n * sizeof(real));
    memcpy(k->kept.want, k->params.host, k->params.n * sizeof(real));
}

OP_FN(average_before_restore) {
    for (size_t i = 0; i < k->kept.n; i++) k->kept.host[i] = -k->params.host[i];
    array_begin(k->kept);
}

RUN_AND_WANT(average, restore, average_restore(k->params.device, k->kept.device, k->params.n, k->ctx),
             memcpy(k->params.want, k->kept.host, k->params.n * sizeof(real)));

static const Arg AVERAGE_ARGS[] =
    ARGS(ARG(average, "n", IN_OUT, 1), ARG(params, "n", IN_OUT, 1), ARG(master, "n", IN, 1), ARG(kept, "n", OUT));
static const int AVERAGE_ROWS[][2] = {{1, 1}, {255, 0}, {255, 2}, {2000, 0}, {2000, 1}, {2000, 2}};
static const int AVERAGE_GPU[][2] = {{124475904, 0}}, AVERAGE_CPU[][2] = {{1 << 20, 0}};  // GPT-2 124M

static const Op AVERAGE = {
    OP_OF("average", "n M", AVERAGE_ARGS, AVERAGE_ROWS), OP_BENCH(AVERAGE_GPU, AVERAGE_CPU),
    .passes = {{"update", "average", OP_PAIR(average, update), NULL, average_after_update},
               {"exchange", "params kept average", OP_PAIR(average, exchange), NULL, NULL, 1},
               {"restore", "params kept average", OP_PAIR(average, restore), average_before_restore, NULL, 1}},
    .prepare = average_prepare, .kinds = {"params", "master"}};

#endif
