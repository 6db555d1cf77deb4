/* The op's own tests, and what is timed: the first product of GPT-2 124M's MLP, for 64 sequences of 1,024 tokens. */
#include "dev/ops/matmul.h"

enum { LADDER_TOKENS = 65536, LADDER_C = 768, LADDER_F = 3072, LADDER_VP = 50304, LADDER_L = 12 };

static void ladder_test(Harness* h) { test_matmul_forward_shapes(h); }

static double ladder_peak(Harness* h) { return ladder_flops_peak(h); }

// A step has three products for each linear layer: forward, and two backward.
static LadderWork ladder_time(Harness* h) {
    const double C = LADDER_C, F = LADDER_F, weights = LADDER_L * (4 * C * C + 2 * C * F) + C * LADDER_VP;
    LadderWork work = {0, MATMUL_FLOPS(LADDER_TOKENS, C, F), 0, 3 * weights / (C * F)};
    MatmulShape shape = {LADDER_TOKENS, LADDER_C, LADDER_F};
    case_begin(h, "matmul ladder");
    MatmulCase m;
    memset(&m, 0, sizeof m);
    m.s = shape, m.mode = SET, m.ctx = &h->ctx;
    Array noise = input(h, 1 << 20, 1.0);
    m.x.device = (floatX*)bench_memory(h, matmul_size(shape.N, shape.IC), sizeof(floatX), noise);
    m.y.device = (floatX*)bench_memory(h, matmul_size(shape.N, shape.OC), sizeof(floatX), noise);
    m.p.w = (floatX*)bench_memory(h, matmul_size(shape.OC, shape.IC), sizeof(floatX), noise);
    m.p.b = (floatX*)bench_memory(h, (size_t)shape.OC, sizeof(floatX), noise);
    h->ctx.autotune = 1;
    work.seconds = ladder_seconds(h, matmul_run_forward, &m);
    return work;
}
