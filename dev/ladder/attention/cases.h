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

static void ladder_test(Harness* h) {
    op_test_pass(h, &ATTENTION, 0);
    test_attention_nan(h, &ATTENTION);
}

static LadderWork ladder_time(Harness* h) {
    static const int ROW[] = {LADDER_SEQUENCES * LADDER_T, LADDER_SEQUENCES, LADDER_NH, LADDER_HS, 1};
    const double pairs = LADDER_SEQUENCES * (LADDER_T * (LADDER_T + 1.0) / 2);
    LadderWork work = {0, ATTENTION_FORWARD_FLOPS(pairs, LADDER_NH, LADDER_HS), 0, 0};
    OpWay way = OP_PLAIN;
    way.is_bench = 1;
    work.per_step = LADDER_L * LADDER_STEP / (double)LADDER_SEQUENCES;
    work.seconds = ladder_seconds(h, attention_run_forward, op_case(h, &ATTENTION, ATTENTION.passes, ROW, way));
    return work;
}
