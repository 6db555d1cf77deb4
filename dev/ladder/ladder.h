/* What dev/ladder/run.sh puts around a rung: the op's own tests, the clock, and this machine's peak. The file that it
 * generates includes the shipped header, this one, the rung; then it directs calls of the op to the rung, and includes
 * cases.h of the op's folder. */
#ifndef DEV_LADDER_LADDER_H
#define DEV_LADDER_LADDER_H

#include "dev/ops/harness.h"

// What was timed: its seconds; its flops where these are what limits it, else 0; its bytes likewise; and how often as
// much work a training step of GPT-2 124M has.
typedef struct {
    double seconds, flops, bytes, per_step;
} LadderWork;

// These are written by cases.h. The peak: flops or bytes in a second.
static void ladder_test(Harness* h);
static LadderWork ladder_time(Harness* h);
static double ladder_peak(Harness* h);

#ifdef __CUDACC__

// The median of bench_seconds(), which finds no operand in the L2.
static inline double ladder_seconds(Harness* h, void (*run)(void* state), void* state) {
    return bench_seconds(h, run, state);
}

enum { LADDER_COPY_BYTES = 1 << 30 };

typedef struct {
    void *to, *from;
    Context* ctx;
} LadderCopy;

static void ladder_run_copy(void* state) {
    LadderCopy* c = (LadderCopy*)state;
    cudaCheck(cudaMemcpyAsync(c->to, c->from, LADDER_COPY_BYTES, cudaMemcpyDeviceToDevice, c->ctx->stream));
}

// Bytes that a second of copying reads and writes. No operand is in the L2, whatever the op touches.
static inline double ladder_memory_peak(Harness* h, double touched, double written) {
    case_begin(h, "ladder peak");
    LadderCopy c = {case_block(h, LADDER_COPY_BYTES, ON_DEVICE), case_block(h, LADDER_COPY_BYTES, ON_DEVICE), &h->ctx};
    double bytes = 2.0 * LADDER_COPY_BYTES / bench_seconds(h, ladder_run_copy, &c);
    (void)touched, (void)written;
    case_free(h);
    return bytes;
}

// The dense bf16 peak of H100 and H200, to which MFU refers too.
static inline double ladder_flops_peak(Harness* h) { return (void)h, 989.4e12; }

#else
#include "llmc/ops/common/product.h"

// The fastest of the runs of a second: a machine that also does something else slows most of them down.
static inline double ladder_seconds(Harness* h, void (*run)(void*), void* state) {
    double fastest = INFINITY, total = 0;
    (void)h;
    for (int i = 0; i < 1000 && (i < 3 || total < 1); i++) {
        double start = now_seconds();
        run(state);
        double seconds = now_seconds() - start;
        fastest = fmin(fastest, seconds), total += seconds;
    }
    return fastest;
}

// Words of memory: all are read, and the first `written` of them are written back.
typedef struct {
    uint32_t* words;
    size_t count, written;
    uint32_t parity;
} LadderSweep;

enum { LADDER_SWEEP_WORDS = 1024 };  // that a thread reads at once

static void ladder_run_sweep(void* state) {
    LadderSweep* s = (LadderSweep*)state;
    const size_t pieces = s->count / LADDER_SWEEP_WORDS + 1;
    uint32_t parity = 0;
#pragma omp parallel for schedule(static) reduction(^ : parity)
    for (size_t i = 0; i < pieces; i++) {
        const size_t rest = s->count - s->written;
        uint32_t *w = s->words, *r = s->words + s->written;
#pragma omp simd
        for (size_t k = s->written * i / pieces; k < s->written * (i + 1) / pieces; k++) w[k] = ~w[k];
#pragma omp simd reduction(^ : parity)
        for (size_t k = rest * i / pieces; k < rest * (i + 1) / pieces; k++) parity ^= r[k];
    }
    s->parity ^= parity;
}

// Bytes that a second of reading `touched` bytes and writing `written` of them back moves, all threads together. As
// many as the op touches, because what fits into the caches moves faster; in place, as a copy reads its destination
// uncounted.
static inline double ladder_memory_peak(Harness* h, double touched, double written) {
    case_begin(h, "ladder peak");
    LadderSweep s = {.count = (size_t)(touched / sizeof *s.words), .written = (size_t)(written / sizeof *s.words)};
    s.words = (uint32_t*)case_memory(h, s.count * sizeof *s.words);
    memset(s.words, 1, s.count * sizeof *s.words);
    double bytes = (touched + written) / ladder_seconds(h, ladder_run_sweep, &s);
    case_free(h);
    return bytes;
}

// Flops of one thread, with sums in registers and no loads.
static void ladder_run_peak(void* state) {
    enum { SUMS = 12, ROUNDS = 100000 };
    Vector sum[SUMS], factor = {0};
    for (int i = 0; i < SUMS; i++) sum[i] = factor + (real)(i + 1);
    factor += (real)0.999999;
    for (int k = 0; k < ROUNDS; k++)
        for (int i = 0; i < SUMS; i++) sum[i] = vector_fma(sum[i], factor, factor);
    for (int i = 1; i < SUMS; i++) sum[0] += sum[i];
    *(double*)state = sum[0][0] > 0 ? 2.0 * SUMS * ROUNDS * LANES : 0;
}

// Flops in a second of all threads: one's, times their number.
static inline double ladder_flops_peak(Harness* h) {
    double flops = 0, seconds = ladder_seconds(h, ladder_run_peak, &flops);
    return flops / seconds * device_threads();
}

#endif

// ladder test|time|peak
static int ladder_main(int argc, char** argv) {
    Harness h;
    memset(&h, 0, sizeof h);
    CHECK(argc == 2);
    context_init(&h.ctx);
    if (strcmp(argv[1], "peak") == 0) printf("peak %.6g\n", ladder_peak(&h));
    if (strcmp(argv[1], "test") == 0) {
        ladder_test(&h);
        printf("%d passed, %d failed\n", h.passed, h.failed);
    }
    if (strcmp(argv[1], "time") == 0) {
        LadderWork work = ladder_time(&h);
        case_free(&h);
        printf("seconds %.6g flops %.6g bytes %.6g step %.6g\n", work.seconds, work.flops, work.bytes, work.per_step);
    }
#ifdef LLMC_OPS_MATMUL_MATMUL_H
    matmul_plans_free(&h.ctx);
#endif
    context_free(&h.ctx);
    return h.failed ? FAILED : DONE;
}

#endif
