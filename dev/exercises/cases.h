/* The cases of each exercise: those of the op's suite in dev/ops that call the exercise's function, and what is timed.
 * Included where calls of the op already go to the learner's function. */
#ifndef DEV_EXERCISES_CASES_H
#define DEV_EXERCISES_CASES_H

#if defined(EXERCISE_gelu_forward) || defined(EXERCISE_gelu_backward)
#include "dev/ops/gelu.h"

#ifdef EXERCISE_gelu_forward
enum { EXERCISE_PASS = 0 };
#else
enum { EXERCISE_PASS = 1 };
#endif

static void exercise_test(Harness* h) { op_test_pass(h, &GELU, EXERCISE_PASS); }

static void exercise_bench(Harness* h) {
    const Pass* pass = &GELU.passes[EXERCISE_PASS];
    exercise_time("256 rows of 3072 channels", pass->run, op_case(h, &GELU, pass, GELU_CPU, OP_PLAIN));
}
#endif

#ifdef EXERCISE_softmax_backward
typedef struct {
    Array ds, p, dp;
    int N, T;
    Context* ctx;
} SoftmaxCase;

static void softmax_run(void* state) {
    SoftmaxCase* s = (SoftmaxCase*)state;
    softmax_backward(s->ds.device, s->p.device, s->dp.device, s->N, s->T, s->ctx);
}

// Probabilities: positive numbers, and rows that add up to 1.
static SoftmaxCase softmax_case(Harness* h, int N, int T) {
    SoftmaxCase s = {.N = N, .T = T, .ctx = &h->ctx};
    case_begin(h, "softmax/backward N=%d T=%d", N, T);
    s.p = input(h, (size_t)N * (size_t)T, 1.0);
    s.dp = input(h, s.p.n, 1.0);
    s.ds = output(h, s.p.n, SET);
    for (size_t row = 0; row < s.p.n; row += (size_t)T) {
        double sum = 0;
        for (size_t k = row; k < row + (size_t)T; k++) sum += exp((double)s.p.host[k]);
        for (size_t k = row; k < row + (size_t)T; k++) s.p.host[k] = (real)(exp((double)s.p.host[k]) / sum);
    }
    return s;
}

// The sum is an average of numbers near 1: it is right to some roundings of partial sums.
static void exercise_test(Harness* h) {
    static const int SHAPES[][2] = {{1, 1}, {1, 48}, {77, 33}, {5, 1024}, {300, 7}};
    for (size_t i = 0; i < COUNT_OF(SHAPES); i++) {
        SoftmaxCase s = softmax_case(h, SHAPES[i][0], SHAPES[i][1]);
        real* want = copy_of(h, s.ds);
        softmax_backward_ref(want, s.p.host, s.dp.host, s.N, s.T);
        softmax_run(&s);
        expect_close(h, "ds", s.ds, want, tolerance(1e-6));
        case_end(h);
    }
}

static void exercise_bench(Harness* h) {
    SoftmaxCase s = softmax_case(h, 4 * 12 * 256, 256);
    exercise_time("12288 rows of 256 keys", softmax_run, &s);
}
#endif

#if defined(EXERCISE_layernorm_forward) || defined(EXERCISE_layernorm_backward)
#include "dev/ops/layernorm.h"

#ifdef EXERCISE_layernorm_forward
enum { EXERCISE_PASS = 0 };
#else
enum { EXERCISE_PASS = 1 };
#endif

static void exercise_test(Harness* h) {
    op_test_pass(h, &LAYERNORM, EXERCISE_PASS);
    if (EXERCISE_PASS == 0) test_layernorm_precision(h);
}

static void exercise_bench(Harness* h) {
    exercise_time("1024 rows of 768 channels", LAYERNORM.passes[EXERCISE_PASS].run,
                  layernorm_case(h, &LAYERNORM, EXERCISE_PASS, 1024, 768, 0));
}
#endif

#ifdef EXERCISE_classifier_backward
#include "dev/ops/classifier.h"

static void exercise_test(Harness* h) {
    op_test_pass(h, &CLASSIFIER, 1);
    test_classifier_of(h, 1);
}

static void exercise_bench(Harness* h) {
    exercise_time("64 rows of 50257 logits", classifier_run_backward, classifier_case(h, 1, 64, 50257, 50304));
}
#endif

#ifdef EXERCISE_embedding_backward
#include "dev/ops/embedding.h"

// Without dropout.
static void exercise_test(Harness* h) {
    Op op = EMBEDDING;
    op.rates[1] = 0;
    op_test_pass(h, &op, 1);
}

static void exercise_bench(Harness* h) {
    static const int ROW[] = {1024, 4, 5000, 768, 400, 0, -1, TOKENS_RANDOM};
    const Pass* pass = &EMBEDDING.passes[1];
    exercise_time("1024 rows of 768 channels", pass->run, op_case(h, &EMBEDDING, pass, ROW, OP_PLAIN));
}
#endif

#ifdef EXERCISE_matmul_forward
#include "dev/ops/matmul.h"

static void exercise_test(Harness* h) { op_test_pass(h, &MATMUL, 0); }

static void exercise_bench(Harness* h) {
    static const int ROW[] = {256, 768, 768};
    exercise_time("N=256 IC=768 OC=768", matmul_run_forward, matmul_case(h, &MATMUL, 0, ROW, SET, 1));
}
#endif

#ifdef EXERCISE_attention_forward
#include "dev/ops/attention.h"

// Without dropout. The tolerances are those of attention_check_path().
static void exercise_test(Harness* h) {
    static const struct {
        int lengths[3], count, NH, HS;
    } SHAPES[] = {{{1}, 1, 1, 1},          {{2}, 1, 1, 4},        {{17, 1, 77}, 3, 3, 16}, {{64, 64}, 2, 2, 64},
                  {{6, 23, 24}, 3, 2, 33}, {{16, 0, 8}, 3, 2, 8}, {{130, 47}, 2, 12, 64},  {{1024}, 1, 1, 64}};
    for (size_t i = 0; i < 2 * COUNT_OF(SHAPES); i++) {
        Mask mask = i % 2 ? FULL : CAUSAL;
        const int* lengths = SHAPES[i / 2].lengths;
        int count = SHAPES[i / 2].count;
        case_begin(h, "attention/forward %s T=%d,%d,%d NH=%d HS=%d", mask == CAUSAL ? "CAUSAL" : "FULL", lengths[0],
                   lengths[1], lengths[2], SHAPES[i / 2].NH, SHAPES[i / 2].HS);
        AttentionCase a = attention_case(h, lengths, count, SHAPES[i / 2].NH, SHAPES[i / 2].HS, mask, 0, 1.0);
        real *out = copy_of(h, a.out), *lse = copy_of(h, a.lse);
        attention_forward_ref(out, lse, a.qkv.host, &a.s, a.shape);
        attention_run_forward(&a);
        expect_close(h, "out", a.out, out, tolerance(3e-6));
        expect_close(h, "lse", a.lse, lse, tolerance(3e-6));
        case_end(h);
    }
    // Scores up to some hundreds, whose exponentials would overflow; a score of 300 is right to 3e-5.
    int length = 50;
    case_begin(h, "attention/forward large scores");
    AttentionCase large = attention_case(h, &length, 1, 2, 16, CAUSAL, 0, 8.0);
    real *out = copy_of(h, large.out), *lse = copy_of(h, large.lse);
    attention_forward_ref(out, lse, large.qkv.host, &large.s, large.shape);
    attention_run_forward(&large);
    expect_close(h, "out", large.out, out, tolerance(3e-4));
    expect_close(h, "lse", large.lse, lse, tolerance(3e-4));
    case_end(h);
}

static void exercise_bench(Harness* h) {
    static const int LENGTHS[] = {256, 256, 256, 256};
    case_begin(h, "attention bench");
    AttentionCase a = attention_case(h, LENGTHS, 4, 12, 64, CAUSAL, 0, 1.0);
    exercise_time("4 sequences of 256, 12 heads of 64", attention_run_forward, &a);
}
#endif

#if defined(EXERCISE_adamw_step) || defined(EXERCISE_adamw_update)
#include "dev/ops/adamw.h"

static void exercise_test(Harness* h) { test_adamw_update(h); }

static void exercise_bench(Harness* h) {
#ifdef EXERCISE_adamw_update
    static const ParamSpan ALL[] = {{0, 1 << 20, 1}};
    case_begin(h, "adamw bench");
    exercise_time("1048576 parameters", adamw_run, adamw_case(h, 1 << 20, ALL, 1));
#else
    (void)h;  // a few numbers a step: nothing to time
#endif
}
#endif

#ifdef EXERCISE_lamb_update
#include "dev/ops/lamb.h"

static void exercise_test(Harness* h) { test_lamb_update(h); }

static void exercise_bench(Harness* h) {
    static const ParamSpan ALL[] = {{0, 1 << 20, 1, 1, 0}};
    case_begin(h, "lamb bench");
    exercise_time("1048576 parameters", lamb_run, lamb_case(h, 1 << 20, ALL, 1));
}
#endif

#endif
