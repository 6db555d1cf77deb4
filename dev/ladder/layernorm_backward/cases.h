/* The op's own tests, and what is timed: a layernorm of GPT-2 124M, for 64 sequences of 1,024 tokens, on the CPU for
 * one. */
#include "dev/ops/layernorm.h"

enum { LADDER_N = HAS_DEVICE_MEMORY ? 65536 : 1024, LADDER_C = 768, LADDER_LAYERNORMS = 25 };

static double ladder_peak(Harness* h) {
    double rows = (double)LADDER_N * LADDER_C * sizeof(floatX);
    return ladder_memory_peak(h, 3 * rows, rows);
}

static void ladder_test(Harness* h) { op_test_pass(h, &LAYERNORM, 1); }

static LadderWork ladder_time(Harness* h) {
    LadderWork work = {0, 0, LAYERNORM_BACKWARD_BYTES(LADDER_N, LADDER_C, SET), LADDER_LAYERNORMS};
    OpCase* k = layernorm_case(h, &LAYERNORM, 1, 64, LADDER_C, 0);
    Array noise = input(h, 1 << 20, 1.0);
    size_t n = (size_t)LADDER_N * LADDER_C;
    k->N = LADDER_N;
    k->x.device = k->sum.device = (floatX*)bench_memory(h, n, sizeof(floatX), noise);
    k->dy.device = (floatX*)bench_memory(h, n, sizeof(floatX), noise);
    k->dx.device = (floatX*)bench_memory(h, n, sizeof(floatX), noise);
    k->y.device = k->dx.device;
    k->mean.device_real = (real*)bench_memory(h, LADDER_N, sizeof(real), noise);
    k->rstd.device_real = (real*)bench_memory(h, LADDER_N, sizeof(real), noise);
    layernorm_run_forward(k);
    work.seconds = ladder_seconds(h, layernorm_run_backward, k);
    return work;
}
