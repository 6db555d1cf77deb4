/* The op's own tests, and what is timed: the first product of GPT-2 124M's MLP, for 64 sequences of 1,024 tokens, on
 * the CPU for 256 tokens. */
#include "dev/ops/matmul.h"

enum {
    LADDER_TOKENS = HAS_DEVICE_MEMORY ? 65536 : 256,
    LADDER_C = 768,
    LADDER_F = 3072,
    LADDER_VP = 50304,
    LADDER_L = 12
};

static void ladder_test(Harness* h) { op_test_pass(h, &MATMUL, 0); }

static double ladder_peak(Harness* h) { return ladder_flops_peak(h); }

// A step has three products for each linear layer: forward, and two backward.
static LadderWork ladder_time(Harness* h) {
    const double C = LADDER_C, F = LADDER_F, weights = LADDER_L * (4 * C * C + 2 * C * F) + C * LADDER_VP;
    LadderWork work = {0, MATMUL_FLOPS(LADDER_TOKENS, C, F), 0, 3 * weights / (C * F)};
    case_begin(h, "matmul ladder");
    OpCase k;
    memset(&k, 0, sizeof k);
    k.N = LADDER_TOKENS, k.IC = LADDER_C, k.OC = LADDER_F, k.kind = 1, k.ctx = &h->ctx;
    Array noise = input(h, 1 << 20, 1.0);
    k.x.device = (floatX*)bench_memory(h, (size_t)LADDER_TOKENS * LADDER_C, sizeof(floatX), noise);
    k.y.device = (floatX*)bench_memory(h, (size_t)LADDER_TOKENS * LADDER_F, sizeof(floatX), noise);
    k.w.device = (floatX*)bench_memory(h, (size_t)LADDER_F * LADDER_C, sizeof(floatX), noise);
    k.b.device = (floatX*)bench_memory(h, LADDER_F, sizeof(floatX), noise);
#ifdef __CUDACC__
    h->ctx.autotune = 1;
#endif
    work.seconds = ladder_seconds(h, matmul_run_forward, &k);
    return work;
}
