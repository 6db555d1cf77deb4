/* The op's own tests, and what is timed: the classifier of GPT-2 124M, for four sequences of 1,024 tokens, on the
 * CPU for 64 tokens. */
#include "dev/ops/classifier.h"

enum {
    LADDER_N = HAS_DEVICE_MEMORY ? 4096 : 64,
    LADDER_V = 50257,
    LADDER_VP = 50304,
    LADDER_STEP = HAS_DEVICE_MEMORY ? 65536 : 1024
};

static double ladder_peak(Harness* h) {
    double logits = (double)LADDER_N * LADDER_VP * sizeof(floatX);
    return ladder_memory_peak(h, logits, logits);
}

static void ladder_test(Harness* h) {
    op_test(h, &CLASSIFIER);
    test_classifier(h);
}

// The logits are overwritten by their gradients, of which each further run computes gradients as well.
static LadderWork ladder_time(Harness* h) {
    LadderWork work = {0, 0, CLASSIFIER_BACKWARD_BYTES(LADDER_N, LADDER_V, LADDER_VP), 0};
    work.per_step = LADDER_STEP / (double)LADDER_N;
    OpCase* k = classifier_case(h, 1, 1, 64, 64);
    Array noise = input(h, 1 << 20, 1.0);
    k->N = LADDER_N, k->V = LADDER_V, k->Vp = LADDER_VP;
    k->logits.device = (floatX*)bench_memory(h, (size_t)LADDER_N * LADDER_VP, sizeof(floatX), noise);
    k->each.device_real = (real*)bench_memory(h, LADDER_N, sizeof(real), noise);
    k->targets = int_array(h, LADDER_N);
    for (int n = 0; n < LADDER_N; n++) k->targets[n] = random_below(h, LADDER_V);
    k->targets = resident_ints(h, k->targets, LADDER_N);
    work.seconds = ladder_seconds(h, classifier_run_backward, k);
    return work;
}
