/* mean_bias_center: nothing differentiates it, and it is too short to time. */
#ifndef DEV_OPS_MEAN_BIAS_H
#define DEV_OPS_MEAN_BIAS_H

#include "llmc/fp8/mean_bias.h"
#include "op.h"

typedef struct {
    real* exact;  // x, or its GELU, as numbers
    RoundedTensor x8;
} MeanBiasOwn;

// x has a mean, for which rounding errors do not cancel.
OP_FN(mean_bias_prepare) {
    MeanBiasOwn* o = (MeanBiasOwn*)(k->own = case_memory(k->h, sizeof *o));
    const double scale = 1024;  // most are clipped: errors above the tolerance
    size_t n = k->x.n;
    uint8_t* bytes = (uint8_t*)pinned_memory(k->h, n);
    real* inverse = (real*)pinned_memory(k->h, sizeof *inverse);
    for (size_t i = 0; i < n; i++) k->x.host[i] += (real)((int)(i % 7) - 2);
    array_upload(k->x);
    array_download(k->x);
    o->exact = (real*)case_memory(k->h, n * sizeof *o->exact);
    for (size_t i = 0; i < n; i++) {
        o->exact[i] = k->kind ? (real)gelu_exact((double)k->x.host[i], GELU_TANH) : k->x.host[i];
        bytes[i] = fp8_from_float((float)((double)o->exact[i] * scale), FP8_E4M3);
    }
    *inverse = (real)(1 / scale);
    o->x8.exact = k->kind ? quantize_gelu(k->x.device, GELU_TANH) : quantize_plain(k->x.device);
    o->x8.bytes = bytes, o->x8.inverse = inverse;
}

OP_FN(mean_bias_run) { mean_bias_center(k->means.device_real, OP_OWN(MeanBiasOwn)->x8, k->N, k->IC, k->ctx); }

OP_FN(mean_bias_want) {
    if (k->N) mean_bias_center_ref(k->means.want, OP_OWN(MeanBiasOwn)->exact, OP_OWN(MeanBiasOwn)->x8, k->N, k->IC);
    k->means.slack = HAS_DEVICE_MEMORY && k->kind ? 1e-4 : tolerance(1e-5);
}

static const Arg MEAN_BIAS_ARGS[] = ARGS(ARG(x, "N IC", IN, 1), ARG(means, "2 IC", OUT));
static const int MEAN_BIAS_SIZES[][2] = {{1, 16}, {3, 48}, {512, 64}, {1000, 272}, {8192, 32}, {40, 2064}, {0, 16}};

static const Op MEAN_BIAS = {OP_OF("mean_bias", "N IC", MEAN_BIAS_ARGS, MEAN_BIAS_SIZES),
                             .passes = {{"center", "means", mean_bias_run, mean_bias_want}},
                             .prepare = mean_bias_prepare, .kinds = {"plain", "gelu"}};

// The rows of the means are in the tensor, in order, and in all places of a sequence of 16: none is taken more often.
static inline void test_mean_bias_rows(Harness* h) {
    case_begin(h, "mean_bias/rows of the means");
    for (size_t s = 0; s < COUNT_OF(MEAN_BIAS_SIZES); s++) {
        int N = MEAN_BIAS_SIZES[s][0], are_good = 1, before = -1, places[16] = {0};
        for (int k = 0; k < mean_bias_rows(N); k++) {
            int row = mean_bias_row(k, N);
            are_good &= row > before && row < N;
            for (before++; before < row; before++) are_good &= !mean_bias_reads(before, N);
            are_good &= mean_bias_reads(row, N), places[row % 16]++;
        }
        for (before++; before < N; before++) are_good &= !mean_bias_reads(before, N);
        for (int i = 0; i < 16 && N >= 16; i++) are_good &= places[i] >= mean_bias_rows(N) / 32;
        expect_true(h, "the rows of the means", are_good);
    }
    case_end(h);
}

#endif
