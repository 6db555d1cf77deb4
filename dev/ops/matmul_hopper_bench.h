/* Bench of llmc/ops/matmul/hopper.cuh: cuBLASLt and our kernel in turn, each for over a second back to back, because a
 * GPU that has rested is faster than one at its power limit.
 *
 *     ops bench matmul_hopper 0 0        about 45 seconds; 0 0: ceilings are not measured
 *
 *   usual     cuBLASLt, tuned as in a run, with GELU in its epilogue or in kernels after it, whichever is faster
 *   own       hopper.cuh
 *   product   cuBLASLt alone, tuned, with the bias: what GELU and bias sums cost above it could be saved
 *
 * Before that, results of the first two are compared on rows from the start, the middle and the end. */
#ifndef DEV_OPS_MATMUL_HOPPER_BENCH_H
#define DEV_OPS_MATMUL_HOPPER_BENCH_H

#include "llmc/device/energy.h"
#include "matmul_hopper.h"

#ifdef __CUDACC__

enum { HOPPER_BENCH_ROWS = 64, HOPPER_BENCH_TURNS = 2 };
#define HOPPER_BENCH_SECONDS 1.2
#define HOPPER_BENCH_DIFFERENCE 2e-2  // roundings to bf16 of the product and of its product with the derivative

typedef struct {
    const char* model;
    MatmulShape s;  // of the forward product; the backward one goes the other way
    Gelu kind;
} HopperBench;

// A way, and its seconds over all turns.
typedef struct {
    const char* name;
    void (*run)(void*);
    int gelu_fusion;
    double seconds;
} HopperWay;

// Run a way back to back, and print what a call took.
static void hopper_bench_turn(Harness* h, EnergyMeter* meter, MatmulCase* m, HopperWay* way, const char* shapes) {
    cudaEvent_t events[2];
    float once, all;
    h->ctx.gelu_fusion = way->gelu_fusion;
    for (int i = 0; i < 2; i++) cudaCheck(cudaEventCreate(&events[i]));
    way->run(m);  // chooses the algorithm, if it is the first
    cudaCheck(cudaEventRecord(events[0], h->ctx.stream));
    for (int i = 0; i < 4; i++) way->run(m);
    cudaCheck(cudaEventRecord(events[1], h->ctx.stream));
    cudaCheck(cudaEventSynchronize(events[1]));
    cudaCheck(cudaEventElapsedTime(&once, events[0], events[1]));
    int n = 1 + (int)(HOPPER_BENCH_SECONDS / (1e-3 * once / 4));
    double joules = energy_total(meter), mhz = (double)NAN;
    cudaCheck(cudaEventRecord(events[0], h->ctx.stream));
    for (int i = 0; i < n; i++) {
        way->run(m);
        if (i == n / 2) mhz = energy_mhz(meter);
    }
    cudaCheck(cudaEventRecord(events[1], h->ctx.stream));
    cudaCheck(cudaEventSynchronize(events[1]));
    joules = energy_total(meter) - joules;
    cudaCheck(cudaEventElapsedTime(&all, events[0], events[1]));
    double seconds = 1e-3 * all / n;
    printf("%-8s %-8s %-38s %8.1f us  %6.1f TFLOP/s  %6.3f J  %4.0f W  %4.0f MHz\n", way->name,
           m->dx.device ? "backward" : "forward", shapes, 1e6 * seconds,
           1e-12 * MATMUL_FLOPS(m->s.N, m->s.IC, m->s.OC) / seconds, joules / n, joules / (1e-3 * all), mhz);
    fflush(stdout);
    way->seconds += seconds / HOPPER_BENCH_TURNS;
    for (int i = 0; i < 2; i++) cudaCheck(cudaEventDestroy(events[i]));
}

// The largest difference of two arrays of n elements of `size` bytes on the device, floatX or real, relative to the
// largest element; INFINITY if one is not a number.
static double hopper_bench_difference(Harness* h, const void* a, const void* b, size_t n, size_t size) {
    unsigned char* host[2];
    double largest = 1e-30, most = 0;
    for (int i = 0; i < 2; i++) {
        host[i] = (unsigned char*)case_memory(h, n * size);
        device_download(&h->ctx, host[i], i ? b : a, n * size);
    }
    for (size_t i = 0; i < n; i++) {
        double x[2];
        for (int k = 0; k < 2; k++)
            x[k] = size == sizeof(real) ? (double)((real*)host[k])[i] : (double)(float)((floatX*)host[k])[i];
        if (!is_finite_number(x[0]) || !is_finite_number(x[1])) return INFINITY;
        largest = fmax(largest, fabs(x[0])), most = fmax(most, fabs(x[0] - x[1]));
    }
    return most / largest;
}

// Run both ways once, and print how much their results differ. The first one's go to the second set of outputs.
static void hopper_bench_compare(Harness* h, MatmulCase* m, HopperWay* ways, const char* shapes) {
    int is_forward = !m->dx.device, C = is_forward ? m->s.OC : m->s.IC, N = m->s.N;
    const int starts[] = {0, N / 2 - HOPPER_BENCH_ROWS / 2, N - HOPPER_BENCH_ROWS};
    floatX* out[] = {is_forward ? m->y.device : m->dx.device, m->pre.device};
    size_t bytes = matmul_size(HOPPER_BENCH_ROWS, C) * sizeof(floatX);
    char *kept = (char*)case_block(h, 6 * bytes, ON_DEVICE), *kept_bias = NULL;
    double worst = 0;
    if (!is_forward) kept_bias = (char*)case_block(h, (size_t)C * sizeof(real), ON_DEVICE);
    for (int i = 0; i < 2; i++) {
        cudaCheck(cudaMemsetAsync(out[0], 0xff, matmul_size(N, C) * sizeof(floatX), h->ctx.stream));
        if (is_forward) cudaCheck(cudaMemsetAsync(out[1], 0xff, matmul_size(N, C) * sizeof(floatX), h->ctx.stream));
        h->ctx.gelu_fusion = ways[i].gelu_fusion;
        ways[i].run(m);
        for (int k = 0; k < 6; k++) {
            floatX* rows = out[k / 3] + matmul_size(starts[k % 3], C);
            if (i == 0)
                cudaCheck(cudaMemcpyAsync(kept + (size_t)k * bytes, rows, bytes, cudaMemcpyDefault, h->ctx.stream));
            else
                worst = fmax(worst, hopper_bench_difference(h, kept + (size_t)k * bytes, rows, bytes / sizeof(floatX),
                                                            sizeof(floatX)));
        }
        if (is_forward) continue;
        size_t bias_bytes = (size_t)C * sizeof(real);
        if (i == 0) cudaCheck(cudaMemcpyAsync(kept_bias, m->dbias, bias_bytes, cudaMemcpyDefault, h->ctx.stream));
        else worst = fmax(worst, hopper_bench_difference(h, kept_bias, m->dbias, (size_t)C, sizeof(real)));
    }
    printf("%s %s: results differ by %.1e of the largest element\n", is_forward ? "forward" : "backward", shapes,
           worst);
    if (!(worst <= HOPPER_BENCH_DIFFERENCE)) die(FAILED, "the results are wrong");
}

static void hopper_bench_row(Harness* h, EnergyMeter* meter, HopperBench b, int is_forward) {
    MatmulShape turned = {b.s.N, b.s.OC, b.s.IC}, s = is_forward ? b.s : turned;
    int C = is_forward ? s.OC : s.IC;  // columns of what is written
    HopperWay ways[] = {
        {"usual", is_forward ? matmul_run_gelu_forward : matmul_run_gelu_backward_input, MATMUL_USUAL, 0},
        {"own", is_forward ? matmul_hopper_run_forward : matmul_hopper_run_backward, MATMUL_OWN, 0},
        {"product", is_forward ? matmul_run_forward : matmul_run_backward_input, MATMUL_USUAL, 0}};
    char shapes[64];
    case_begin(h, "matmul_hopper bench %s", b.model);
    snprintf(shapes, sizeof shapes, "%s N=%d IC=%d OC=%d %s", b.model, s.N, s.IC, s.OC, gelu_name(b.kind));
    MatmulCase m;
    memset(&m, 0, sizeof m);
    m.s = s, m.kind = b.kind, m.ctx = &h->ctx;
    Array noise = input(h, 1 << 20, 1.0);
    Array *in = is_forward ? &m.x : &m.dy, *out = is_forward ? &m.y : &m.dx, *all[] = {in, &m.w, &m.b, out, &m.pre};
    size_t sizes[] = {matmul_size(s.N, is_forward ? s.IC : s.OC), matmul_size(s.OC, s.IC), (size_t)s.OC,
                      matmul_size(s.N, C), matmul_size(s.N, C)};
    for (size_t k = 0; k < COUNT_OF(all); k++)
        all[k]->device = (floatX*)bench_memory(h, sizes[k], sizeof(floatX), noise);
    m.p.w = m.w.device, m.p.b = m.b.device;
    m.dbias = is_forward ? NULL : (real*)bench_memory(h, (size_t)s.IC, sizeof(real), noise);
    h->ctx.autotune = 1;
    hopper_bench_compare(h, &m, ways, shapes);
    for (int turn = 0; turn < HOPPER_BENCH_TURNS; turn++)
        for (int way = 0; way < 3; way++) hopper_bench_turn(h, meter, &m, &ways[way], shapes);
    printf("RESULT matmul_hopper %s model=%s usual_us=%.1f own_us=%.1f product_us=%.1f own_tflops=%.1f ratio=%.3f\n",
           is_forward ? "forward" : "backward", b.model, 1e6 * ways[0].seconds, 1e6 * ways[1].seconds,
           1e6 * ways[2].seconds, 1e-12 * MATMUL_FLOPS(s.N, s.IC, s.OC) / ways[1].seconds,
           ways[0].seconds / ways[1].seconds);
    h->ctx.autotune = 0, h->ctx.gelu_fusion = MATMUL_OWN;
    matmul_plans_free(&h->ctx);
    case_free(h);
}

static void bench_matmul_hopper(Harness* h) {
    static const HopperBench rows[] = {{"d12", {65536, 768, 3072}, GELU_TANH},
                                       {"d48", {16384, 1600, 6400}, GELU_TANH},
                                       {"BERT-large", {32768, 1024, 4096}, GELU_ERF}};
    EnergyMeter meter;
    if (!matmul_hopper_runs(&h->ctx)) return;
    energy_open(&meter);
    for (size_t i = 0; i < COUNT_OF(rows); i++)
        for (int is_forward = 1; is_forward >= 0; is_forward--) hopper_bench_row(h, &meter, rows[i], is_forward);
}

#endif
#endif
