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

// Without dropout.
static void exercise_test(Harness* h) {
    Op op = ATTENTION;
    op.rates[1] = 0;
    op_test_pass(h, &op, 0);
}

static void exercise_bench(Harness* h) {
    static const int ROW[] = {1024, 4, 12, 64, 1};
    OpCase* k = op_case(h, &ATTENTION, ATTENTION.passes, ROW, OP_PLAIN);
    exercise_time("4 sequences of 256, 12 heads of 64", attention_run_forward, k);
}
#endif

#if defined(EXERCISE_adamw_step) || defined(EXERCISE_adamw_update)
#include "dev/ops/adamw.h"

// Without cautious decay, which the exercises leave out.
static void exercise_test(Harness* h) {
    for (int i = 0; i < (int)COUNT_OF(OPTIMIZER_ROWS); i++)
        if (!OPTIMIZER_STEPS[OPTIMIZER_ROWS[i][1]].cautious) op_test_row(h, &ADAMW, ADAMW.passes, OPTIMIZER_ROWS[i]);
}

static void exercise_bench(Harness* h) {
#ifdef EXERCISE_adamw_update
    static const int ROW[] = {1 << 20, 0};
    OpWay way = OP_PLAIN;
    way.is_bench = 1;
    exercise_time("1048576 parameters", adamw_run, op_case(h, &ADAMW, ADAMW.passes, ROW, way));
#else
    (void)h;  // a few numbers a step: nothing to time
#endif
}
#endif

#ifdef EXERCISE_lamb_update
#include "dev/ops/lamb.h"

static void exercise_test(Harness* h) { op_test_pass(h, &LAMB, 0); }

static void exercise_bench(Harness* h) {
    static const int ROW[] = {1 << 20, 0, 0};
    OpWay way = OP_PLAIN;
    way.is_bench = 1;
    exercise_time("1048576 parameters", lamb_run, op_case(h, &LAMB, LAMB.passes, ROW, way));
}
#endif

#endif
