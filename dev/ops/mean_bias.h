/* mean_bias: test (nothing differentiates it, and it is too short to time). */
#ifndef DEV_OPS_MEAN_BIAS_H
#define DEV_OPS_MEAN_BIAS_H

#include "harness.h"
#include "llmc/ops/quantize/mean_bias.h"

typedef struct {
    Array x, w, b, bias, means;
    RoundedTensor x8, w8;
    MeanBias out;
    const floatX* b_of;  // NULL: no bias
    int N, IC, OC;
    Context* ctx;
} MeanBiasCase;

// Bytes on both sides of `n` numbers times `scale`.
static inline RoundedTensor mean_bias_rounded(Harness* h, QuantizeInput exact, const real* x, size_t n, double scale) {
    uint8_t* bytes = (uint8_t*)pinned_memory(h, n);
    real* inverse = (real*)pinned_memory(h, sizeof *inverse);
    for (size_t i = 0; i < n; i++) bytes[i] = fp8_from_float((float)((double)x[i] * scale), FP8_E4M3);
    *inverse = (real)(1 / scale);
    RoundedTensor t = {.exact = exact, .bytes = bytes, .inverse = inverse};
    return t;
}

// x has a mean, for which rounding errors do not cancel. *before: x, or its GELU, as numbers.
static inline MeanBiasCase* mean_bias_case(Harness* h, int N, int IC, int OC, int is_gelu, real** before) {
    MeanBiasCase* k = (MeanBiasCase*)case_memory(h, sizeof *k);
    size_t nx = (size_t)N * (size_t)IC, nw = (size_t)IC * (size_t)OC;
    k->N = N, k->IC = IC, k->OC = OC, k->ctx = &h->ctx;
    k->x = input(h, nx, 1.0), k->w = input(h, nw, 0.1), k->b = input(h, (size_t)OC, 1.0);
    k->bias = output(h, (size_t)OC, SET), k->means = output(h, 2 * (size_t)IC, SET);
    for (size_t i = 0; i < nx; i++) k->x.host[i] += (real)((int)(i % 7) - 2);
    array_upload(k->x);
    array_download(k->x);
    *before = (real*)case_memory(h, nx * sizeof **before);
    for (size_t i = 0; i < nx; i++)
        (*before)[i] = is_gelu ? (real)gelu_exact((double)k->x.host[i], GELU_TANH) : k->x.host[i];
    QuantizeInput x = is_gelu ? quantize_gelu(k->x.device, GELU_TANH) : quantize_plain(k->x.device);
    k->x8 = mean_bias_rounded(h, x, *before, nx, 1024);  // most are clipped: errors above the tolerance
    k->w8 = mean_bias_rounded(h, quantize_plain(k->w.device), k->w.host, nw, 512);
    k->out.bias = k->bias.device, k->out.means = k->means.device_real;
    k->b_of = is_gelu ? NULL : k->b.device;
    return k;
}

static inline void mean_bias_launch(void* state) {
    MeanBiasCase* k = (MeanBiasCase*)state;
    mean_bias(k->out, k->b_of, k->x8, k->w8, k->N, k->IC, k->OC, k->ctx);
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
    static const int SIZES[][3] = {{1, 16, 1},    {3, 48, 33},   {512, 64, 80}, {1000, 272, 100},
                                   {8192, 32, 9}, {40, 2064, 6}, {0, 16, 16}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (int is_gelu = 0; is_gelu < 2; is_gelu++) {
            int N = SIZES[i][0], IC = SIZES[i][1], OC = SIZES[i][2];
            real *x, *want, *sum;
            case_begin(h, "mean_bias N=%d IC=%d OC=%d%s", N, IC, OC, is_gelu ? " gelu, no bias" : "");
            MeanBiasCase* k = mean_bias_case(h, N, IC, OC, is_gelu, &x);
            want = copy_of(h, k->bias), sum = (real*)case_memory(h, (size_t)OC * sizeof *sum);
            for (size_t o = 0; o < (size_t)OC && N; o++)
                want[o] =
                    (real)((is_gelu ? 0 : (double)k->b.host[o]) + mean_bias_ref(o, x, k->x8, k->w.host, k->w8, N, IC));
            expect_same_for_any_threads(h, "bias", mean_bias_launch, k, &k->bias, 1);
            // The sum is of differences of products of this size.
            for (int o = 0; o < OC; o++) {
                sum[o] = is_gelu ? 0 : (real)fabs((double)k->b.host[o]);
                for (int c = 0; c < IC; c++) sum[o] += (real)(2 * fabs((double)k->w.host[o * IC + c]));
            }
            if (N)
                expect_close_to_sum(h, "bias", k->bias, want, sum,
                                    HAS_DEVICE_MEMORY && is_gelu ? 1e-4 : tolerance(1e-5));
            else expect_equal(h, "bias", k->bias, want);
            if (N) mean_bias_check_rows(h, N);
            case_end(h);
        }
}

#endif
