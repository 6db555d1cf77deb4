/* The op's own tests, and what is timed: the first product of GPT-2 124M's MLP, for 256 tokens. */
#include "dev/ops/matmul.h"

enum { LADDER_TOKENS = 256, LADDER_C = 768, LADDER_F = 3072, LADDER_VP = 50304, LADDER_L = 12 };

static double ladder_peak(Harness* h) { return ladder_flops_peak(h); }

static void ladder_test(Harness* h) { op_test_pass(h, &MATMUL, 0); }

// A step has three products for each linear layer: forward, and two backward.
static LadderWork ladder_time(Harness* h) {
    static const int ROW[] = {LADDER_TOKENS, LADDER_C, LADDER_F};
    const double C = LADDER_C, F = LADDER_F, weights = LADDER_L * (4 * C * C + 2 * C * F) + C * LADDER_VP;
    LadderWork work = {0, MATMUL_FLOPS(LADDER_TOKENS, C, F), 0, 3 * weights / (C * F)};
    work.seconds = ladder_seconds(h, matmul_run_forward, matmul_case(h, &MATMUL, 0, ROW, SET, 1));
    return work;
}
