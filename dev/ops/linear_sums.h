/* How exact the GPU adds up products of fp8 numbers, fast and not. */
#ifndef DEV_OPS_LINEAR_SUMS_H
#define DEV_OPS_LINEAR_SUMS_H

#include "harness.h"
#include "llmc/fp8/quantize.h"
#include "llmc/ops/matmul/matmul.h"

#if defined(__CUDACC__) && !defined(DEV_EMULATOR_EMULATOR_H)

enum { LINEAR_SUM_SIDE = 2048, LINEAR_SUM_SAMPLES = 512, LINEAR_SUM_NUMBERS = 4096 };

// Random numbers in fp8, `count` of them, on host and device.
static inline uint8_t* linear_random_bytes(Harness* h, uint8_t** device, size_t count, Fp8Format format) {
    uint8_t numbers[LINEAR_SUM_NUMBERS], *bytes = (uint8_t*)case_memory(h, count);
    uint64_t state = h->drawn++;
    for (int i = 0; i < LINEAR_SUM_NUMBERS; i++)
        numbers[i] = fp8_from_float((float)(64 * rng_normal(h->key, h->drawn++)), format);
    for (size_t i = 0; i < count; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        bytes[i] = numbers[state >> 52];
    }
    *device = (uint8_t*)case_block(h, count, ON_DEVICE);
    device_upload(&h->ctx, *device, bytes, count);
    return bytes;
}

// rms(error) / rms(sum) of a product dw in fp32 over N tokens. `is_fast`: as if its sums were short. The output is
// large enough that cuBLASLt does not cut the sums.
static inline double linear_sum_error(Harness* h, int N, int is_fast) {
    static const real ones[FP8_INVERSE_APART] = {1};
    const int C = LINEAR_SUM_SIDE;
    size_t n = (size_t)N * (size_t)C;
    uint8_t *xt, *dyt;
    const uint8_t* x = linear_random_bytes(h, &xt, n, FP8_E4M3);
    const uint8_t* dy = linear_random_bytes(h, &dyt, n, FP8_E5M2);
    real *one = (real*)case_block(h, sizeof ones, ON_DEVICE), got;
    real* dw = (real*)case_block(h, (size_t)C * (size_t)C * sizeof *dw, ON_DEVICE);
    device_upload(&h->ctx, one, ones, sizeof ones);
    MatmulOperands o = {.a = xt, .b = dyt, .d = dw, .N = N, .a_inverse = one, .b_inverse = one};
    MatmulKey key = matmul_key(MATMUL_PASSES + MATMUL_BACKWARD_WEIGHT, N, C, C, SET, &h->ctx);
    MatmulPlan* plan = matmul_plan(key, &o, &h->ctx);
    if (is_fast) {
        cublasLtMatmulHeuristicResult_t result;
        cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)1);
        CHECK(matmul_propose(plan, &result, 1, &h->ctx) == 1);
        matmul_plan_set_operands(plan, &o);
        cublasCheck(matmul_launch(plan, &result.algo, &o, dw, &h->ctx));
        cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)0);
    } else matmul_product(key, &o, &h->ctx);
    double error = 0, sums = 0;
    for (int k = 0; k < LINEAR_SUM_SAMPLES; k++) {
        size_t i = (size_t)random_below(h, C), j = (size_t)random_below(h, C);
        double want = 0;
        for (size_t t = 0; t < (size_t)N; t++)
            want += (double)fp8_to_float(x[i * (size_t)N + t], FP8_E4M3) *
                    (double)fp8_to_float(dy[j * (size_t)N + t], FP8_E5M2);
        device_download(&h->ctx, &got, dw + j * (size_t)C + i, sizeof got);
        error += ((double)got - want) * ((double)got - want), sums += want * want;
    }
    return sqrt(error / sums);
}

static inline void linear_expect_sum(Harness* h, int N, int is_fast, double least, double most) {
    char what[96];
    double error = linear_sum_error(h, N, is_fast);
    snprintf(what, sizeof what, "%s sums of %d terms are %.3f %% off", is_fast ? "fast" : "the op's", N, 100 * error);
    expect_true(h, what, error > least && error <= most);
}

#endif

static inline void test_linear_sums(Harness* h) {
    case_begin(h, "linear/fp8 sums");
    expect_true(h, "sums over channels are fast", matmul_fp8_is_fast(matmul_terms(MATMUL_FORWARD, 65536, 3072, 50304)));
    expect_true(h, "sums over outputs are fast",
                matmul_fp8_is_fast(matmul_terms(MATMUL_BACKWARD_INPUT, 65536, 50304, 3072)));
    expect_true(h, "sums over tokens are not",
                !matmul_fp8_is_fast(matmul_terms(MATMUL_BACKWARD_WEIGHT, 65536, 768, 3072)));
    expect_true(h, "sums over the vocabulary are not",
                !matmul_fp8_is_fast(matmul_terms(MATMUL_BACKWARD_INPUT, 65536, 768, 50304)));
#if defined(__CUDACC__) && !defined(DEV_EMULATOR_EMULATOR_H)
    linear_expect_sum(h, 768, 0, 0, 0.005);
    linear_expect_sum(h, 3072, 0, 0, 0.005);
    linear_expect_sum(h, 65536, 0, 0, 0.001);
    linear_expect_sum(h, 65536, 1, 0.005, 0.1);  // why dw is not fast
#endif
    case_end(h);
}

#endif
