/* mean_bias_center: test (nothing differentiates it, and it is too short to time). */
#ifndef DEV_OPS_MEAN_BIAS_H
#define DEV_OPS_MEAN_BIAS_H

#include "harness.h"
#include "llmc/fp8/mean_bias.h"

typedef struct {
    Array x, means;
    RoundedTensor x8;
    int N, IC;
    Context* ctx;
} MeanBiasCase;

// x has a mean, for which rounding errors do not cancel. *before: x, or its GELU, as numbers.
static inline MeanBiasCase* mean_bias_case(Harness* h, int N, int IC, int is_gelu, real** before) {
    MeanBiasCase* k = (MeanBiasCase*)case_memory(h, sizeof *k);
    size_t n = (size_t)N * (size_t)IC;
    const double scale = 1024;  // most are clipped: errors above the tolerance
    k->N = N, k->IC = IC, k->ctx = &h->ctx;
    k->x = input(h, n, 1.0), k->means = output(h, 2 * (size_t)IC, SET);
    for (size_t i = 0; i < n; i++) k->x.host[i] += (real)((int)(i % 7) - 2);
    array_upload(k->x);
    array_download(k->x);
    *before = (real*)case_memory(h, n * sizeof **before);
    for (size_t i = 0; i < n; i++)
        (*before)[i] = is_gelu ? (real)gelu_exact((double)k->x.host[i], GELU_TANH) : k->x.host[i];
    uint8_t* bytes = (uint8_t*)pinned_memory(h, n);
    real* inverse = (real*)pinned_memory(h, sizeof *inverse);
    for (size_t i = 0; i < n; i++) bytes[i] = fp8_from_float((float)((double)(*before)[i] * scale), FP8_E4M3);
    *inverse = (real)(1 / scale);
    k->x8.exact = is_gelu ? quantize_gelu(k->x.device, GELU_TANH) : quantize_plain(k->x.device);
    k->x8.bytes = bytes, k->x8.inverse = inverse;
    return k;
}

static inline void mean_bias_launch(void* state) {
    MeanBiasCase* k = (MeanBiasCase*)state;
    mean_bias_center(k->means.device_real, k->x8, k->N, k->IC, k->ctx);
}

// The rows of the means are in the tensor, in order, and in all places of a sequence of 16: none is taken more often.
static inline void mean_bias_check_rows(Harness* h, int N) {
    int are_good = 1, before = -1, places[16] = {0};
    for (int k = 0; k < mean_bias_rows(N); k++) {
        int row = mean_bias_row(k, N);
        are_good &= row > before && row < N;
        before = row, places[row % 16]++;
    }
    for (int i = 0; i < 16 && N >= 16; i++) are_good &= places[i] >= mean_bias_rows(N) / 32;
    expect_true(h, "the rows of the means", are_good);
}

static inline void test_mean_bias(Harness* h) {
    static const int SIZES[][2] = {{1, 16}, {3, 48}, {512, 64}, {1000, 272}, {8192, 32}, {40, 2064}, {0, 16}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (int is_gelu = 0; is_gelu < 2; is_gelu++) {
            int N = SIZES[i][0], IC = SIZES[i][1];
            real* x;
            case_begin(h, "mean_bias N=%d IC=%d%s", N, IC, is_gelu ? " gelu" : "");
            MeanBiasCase* k = mean_bias_case(h, N, IC, is_gelu, &x);
            real* want = copy_of(h, k->means);
            if (N) mean_bias_center_ref(want, x, k->x8, N, IC);
            expect_same_for_any_threads(h, "means", mean_bias_launch, k, &k->means, 1);
            if (N) {
                expect_close(h, "means", k->means, want, HAS_DEVICE_MEMORY && is_gelu ? 1e-4 : tolerance(1e-5));
                mean_bias_check_rows(h, N);
            } else {
                expect_equal(h, "means", k->means, want);
            }
            case_end(h);
        }
}

#endif
