/* The op's own tests of its forward pass, and what is timed: GPT-2 124M's, for 8 sequences of 1,024 tokens, on the
 * CPU for one. */
#include "dev/ops/attention.h"

enum {
    LADDER_SEQUENCES = HAS_DEVICE_MEMORY ? 8 : 1,
    LADDER_T = 1024,
    LADDER_STEP = HAS_DEVICE_MEMORY ? 64 : 1,  // sequences of a step
    LADDER_NH = 12,
    LADDER_HS = 64,
    LADDER_L = 12
};

static double ladder_peak(Harness* h) { return ladder_flops_peak(h); }

static void ladder_check(Harness* h, AttentionCase* a, double tol) {
    attention_reference(h, a);
    attention_check_forward(h, a, FLASH, tol);
    case_end(h);
}

// The forward half of test_attention().
static void ladder_test(Harness* h) {
    int length = 50;
    for (size_t i = 0; i < COUNT_OF(ATTENTION_SIZES); i++)
        for (int mask = CAUSAL; mask <= FULL; mask++) {
            AttentionCase a = attention_case_of(h, "forward", ATTENTION_SIZES[i], (Mask)mask);
            ladder_check(h, &a, 3e-6);
        }
    case_begin(h, "attention/forward large scores");
    AttentionCase large = attention_case(h, &length, 1, 2, 16, CAUSAL, 0.1, 8.0);
    ladder_check(h, &large, 3e-4);
    test_attention_nan(h, FLASH);
}

static LadderWork ladder_time(Harness* h) {
    int lengths[LADDER_SEQUENCES], one = 1;
    case_begin(h, "attention ladder");
    AttentionCase a = attention_case(h, &one, 1, LADDER_NH, LADDER_HS, CAUSAL, 0, 1.0);
    for (int i = 0; i < LADDER_SEQUENCES; i++) lengths[i] = LADDER_T;
    a.s = sequences_of(h, lengths, LADDER_SEQUENCES, 0);
    LadderWork work = {0, ATTENTION_FORWARD_FLOPS(attention_pairs(&a.s, CAUSAL), LADDER_NH, LADDER_HS), 0, 0};
    work.per_step = LADDER_L * LADDER_STEP / (double)LADDER_SEQUENCES;
    a.s = resident_sequences(h, a.s);
    Array noise = input(h, 1 << 20, 1.0);
    size_t n = (size_t)a.s.rows * LADDER_NH * LADDER_HS;
    a.qkv.device = (floatX*)bench_memory(h, 3 * n, sizeof(floatX), noise);
    a.out.device = (floatX*)bench_memory(h, n, sizeof(floatX), noise);
    a.lse.device_real = (real*)bench_memory(h, (size_t)a.s.rows * LADDER_NH, sizeof(real), noise);
    work.seconds = ladder_seconds(h, attention_run_forward, &a);
    return work;
}
