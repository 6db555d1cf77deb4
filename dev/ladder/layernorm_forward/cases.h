/* The op's own tests, and what is timed: a layernorm of GPT-2 124M on 64 sequences of 1,024 tokens. */
#include "dev/ops/layernorm.h"

static double ladder_peak(Harness* h) { return ladder_copy_peak(h); }

static void ladder_test(Harness* h) {
    test_layernorm_sizes(h, test_layernorm_forward);
    test_layernorm_precision(h);
}

static LadderWork ladder_time(Harness* h) {
    enum { N = 65536, C = 768, LAYERNORMS = 25 };
    LadderWork work = {0, 0, LAYERNORM_FORWARD_BYTES(N, C), LAYERNORMS};
    case_begin(h, "layernorm ladder");
    LayernormCase* k = layernorm_case(h, N, C, SET, SET, 0);
    work.seconds = ladder_seconds(h, layernorm_run_forward, k);
    return work;
}
