/* What dev/ladder/run.sh puts around a rung: the op's own tests, the clock, and this machine's peak. The file that it
 * generates includes the shipped header, this one, the rung; then it directs calls of the op to the rung, and includes
 * cases.h of the op's folder. */
#ifndef DEV_LADDER_LADDER_H
#define DEV_LADDER_LADDER_H

#include "dev/ops/harness.h"

// What was timed: its seconds, flops and bytes; how often as much work a training step of GPT-2 124M has.
typedef struct {
    double seconds, flops, bytes, per_step;
} LadderWork;

// Both are written by cases.h.
static void ladder_test(Harness* h);
static LadderWork ladder_time(Harness* h);

// The fastest of the runs of a second: a machine that also does something else slows most of them down.
static inline double ladder_fastest(void (*run)(void*), void* state) {
    double fastest = INFINITY, total = 0;
    for (int i = 0; i < 1000 && (i < 3 || total < 1); i++) {
        double start = now_seconds();
        run(state);
        double seconds = now_seconds() - start;
        fastest = fmin(fastest, seconds), total += seconds;
    }
    return fastest;
}

// Flops in a second that all threads reach with sums in registers and no loads.
static void ladder_run_peak(void* state) {
    enum { SUMS = 12, ROUNDS = 1000000 };
    double total = 0;
#pragma omp parallel reduction(+ : total)
    {
        Vector sum[SUMS], factor = {0};
        for (int i = 0; i < SUMS; i++) sum[i] = factor + (real)(i + 1);
        factor += (real)0.999999;
        for (int k = 0; k < ROUNDS; k++)
            for (int i = 0; i < SUMS; i++) sum[i] = vector_fma(sum[i], factor, factor);
        for (int i = 0; i < SUMS; i++) total += (double)sum[i][0];
    }
    *(double*)state = total > 0 ? 2.0 * SUMS * ROUNDS * LANES * device_threads() : 0;
}

static inline double ladder_peak(void) {
    double flops = 0, seconds = ladder_fastest(ladder_run_peak, &flops);
    return flops / seconds;
}

// ladder test|time|peak
static int ladder_main(int argc, char** argv) {
    Harness h;
    memset(&h, 0, sizeof h);
    CHECK(argc == 2);
    context_init(&h.ctx);
    if (strcmp(argv[1], "peak") == 0) printf("peak %.6g threads %d\n", ladder_peak(), device_threads());
    if (strcmp(argv[1], "test") == 0) {
        ladder_test(&h);
        printf("%d passed, %d failed\n", h.passed, h.failed);
    }
    if (strcmp(argv[1], "time") == 0) {
        LadderWork work = ladder_time(&h);
        case_free(&h);
        printf("seconds %.6g flops %.6g bytes %.6g step %.6g\n", work.seconds, work.flops, work.bytes, work.per_step);
    }
    context_free(&h.ctx);
    return h.failed ? FAILED : DONE;
}

#endif
