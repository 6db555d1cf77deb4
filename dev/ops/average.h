/* average: of weights, and the exchange of weights and average. */
#ifndef DEV_OPS_AVERAGE_H
#define DEV_OPS_AVERAGE_H

#include "llmc/average/average.h"
#include "op.h"

typedef struct {
    OpCase z;
    Array average, params, master, kept;
    double rate;
} AverageCase;

static const double AVERAGE_RATES[] = {1e-4, 0.25, 1};

// M: which rate. With a rate of 1 the average, of zeros, becomes the weights exactly.
static inline void average_prepare(void* state) {
    AverageCase* k = (AverageCase*)state;
    k->rate = AVERAGE_RATES[k->z.M];
    if (k->rate == 1) memset(k->average.host, 0, k->average.n * sizeof(real)), array_begin(k->average);
}

// kind 0: of the parameters; 1: of their copies in full precision.
static inline void average_run_update(void* state) {
    AverageCase* k = (AverageCase*)state;
    average_update(k->average.device_real, k->params.device, k->z.kind ? k->master.device_real : NULL, k->average.n,
                   k->rate, k->z.ctx);
}

static inline void average_want_update(void* state) {
    AverageCase* k = (AverageCase*)state;
    average_update_ref(k->average.want, k->z.kind ? k->master.host : k->params.host, k->average.n, k->rate);
}

static inline void average_after_update(void* state) {
    AverageCase* k = (AverageCase*)state;
    k->average.slack = k->rate == 1 ? 0 : tolerance(3 * 1.2e-7);  // three roundings of numbers up to 2
}

static inline void average_run_exchange(void* state) {
    AverageCase* k = (AverageCase*)state;
    average_exchange(k->params.device, k->kept.device, k->average.device_real, k->average.n, k->z.ctx);
}

// The average, rounded; the parameters are kept.
static inline void average_want_exchange(void* state) {
    AverageCase* k = (AverageCase*)state;
    memcpy(k->params.want, k->average.host, k->params.n * sizeof(real));
    memcpy(k->kept.want, k->params.host, k->params.n * sizeof(real));
}

static inline void average_before_restore(void* state) {
    AverageCase* k = (AverageCase*)state;
    for (size_t i = 0; i < k->kept.n; i++) k->kept.host[i] = -k->params.host[i];
    array_begin(k->kept);
}

static inline void average_run_restore(void* state) {
    AverageCase* k = (AverageCase*)state;
    average_restore(k->params.device, k->kept.device, k->params.n, k->z.ctx);
}

static inline void average_want_restore(void* state) {
    AverageCase* k = (AverageCase*)state;
    memcpy(k->params.want, k->kept.host, k->params.n * sizeof(real));
}

static const Arg AVERAGE_ARGS[] = {{"average", offsetof(AverageCase, average), "n", IN_OUT, 1, 0},
                                   {"params", offsetof(AverageCase, params), "n", IN_OUT, 1, 0},
                                   {"master", offsetof(AverageCase, master), "n", IN, 1, 0},
                                   {"kept", offsetof(AverageCase, kept), "n", OUT, 0, 0},
                                   {NULL}};
static const int AVERAGE_ROWS[][2] = {{1, 1}, {255, 0}, {255, 2}, {2000, 0}, {2000, 1}, {2000, 2}};
static const int AVERAGE_GPU[][2] = {{124475904, 0}}, AVERAGE_CPU[][2] = {{1 << 20, 0}};  // GPT-2 124M

static const Op AVERAGE = {
    .name = "average",
    .bytes = sizeof(AverageCase),
    .sizes = "n M",
    .args = AVERAGE_ARGS,
    .passes = {{"update", "average", average_run_update, average_want_update, NULL, average_after_update},
               {"exchange", "params kept average", average_run_exchange, average_want_exchange, NULL, NULL, 1},
               {"restore", "params kept average", average_run_restore, average_want_restore, average_before_restore,
                NULL, 1}},
    .prepare = average_prepare,
    .kinds = {"params", "master"},
    .rows = SIZE_ROWS(AVERAGE_ROWS),
    .gpu_bench = SIZE_ROWS(AVERAGE_GPU),
    .cpu_bench = SIZE_ROWS(AVERAGE_CPU),
};

#endif
