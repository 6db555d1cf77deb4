/* The op's own tests, and what is timed: a layernorm of GPT-2 124M, for 64 sequences of 1,024 tokens, on the CPU for
 * one. */
#include "dev/ops/layernorm.h"

enum { LADDER_N = HAS_DEVICE_MEMORY ? 65536 : 1024, LADDER_C = 768, LADDER_LAYERNORMS = 25 };

static double ladder_peak(Harness* h) {
    double rows = (double)LADDER_N * LADDER_C * sizeof(floatX);
    return ladder_memory_peak(h, 2 * rows, rows);
}

static void ladder_test(Harness* h) {
    op_test_pass(h, &LAYERNORM, 0);
    test_layernorm_precision(h);
}

static LadderWork ladder_time(Harness* h) {
    LadderWork work = {0, 0, LAYERNORM_FORWARD_BYTES(LADDER_N, LADDER_C), LADDER_LAYERNORMS};
    OpCase* k = layernorm_case(h, &LAYERNORM, 0, 64, LADDER_C, 0);
    Array noise = input(h, 1 << 20, 1.0);
    size_t n = (size_t)LADDER_N * LADDER_C;
    k->N = LADDER_N;
    k->x.device = (floatX*)bench_memory(h, n, sizeof(floatX), noise);
    k->y.device = (floatX*)bench_memory(h, n, sizeof(floatX), noise);
    k->mean.device_real = (real*)bench_memory(h, LADDER_N, sizeof(real), noise);
    k->rstd.device_real = (real*)bench_memory(h, LADDER_N, sizeof(real), noise);
    work.seconds = ladder_seconds(h, layernorm_run_forward, k);
    return work;
}
