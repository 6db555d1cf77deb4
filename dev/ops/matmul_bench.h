/* Bench of matmul: the shapes of the models, on the GPU in each way that a product can take, and the GPU's ceilings. */
#ifndef DEV_OPS_MATMUL_BENCH_H
#define DEV_OPS_MATMUL_BENCH_H

#include "matmul.h"

typedef struct {
    const char* model;
    MatmulShape s;
    int gelu;  // GELU goes with it: 1 after it, forward; -1 before it, in the backward pass
} MatmulBench;

static void bench_matmul_row(Harness* h, MatmulCase* m, const char* how, void (*run)(void*), const char* name,
                             double bytes, const char* shapes) {
    char label[64];
    MatmulShape s = m->s;
    snprintf(label, sizeof label, "%s%s", name, how);
    bench_report(h, label, shapes, bench_seconds(h, run, m), MATMUL_FLOPS(s.N, s.IC, s.OC), bytes);
}

// Forward with GELU for gelu = 1, backward for -1.
static void bench_matmul_gelu(Harness* h, MatmulCase* m, int gelu, const char* how, const char* shapes) {
    MatmulShape s = m->s;
    if (gelu > 0)
        bench_matmul_row(h, m, how, matmul_run_gelu_forward, "gelu_forward", MATMUL_GELU_FORWARD_BYTES(s.N, s.IC, s.OC),
                         shapes);
    if (gelu < 0)
        bench_matmul_row(h, m, how, matmul_run_gelu_backward_input, "gelu_backward_input",
                         MATMUL_GELU_BACKWARD_INPUT_BYTES(s.N, s.IC, s.OC), shapes);
}

static void bench_matmul_all(Harness* h, MatmulCase* m, int gelu, const char* how, const char* shapes) {
    MatmulShape s = m->s;
    bench_matmul_row(h, m, how, matmul_run_forward, "forward", MATMUL_FORWARD_BYTES(s.N, s.IC, s.OC, m->mode), shapes);
    bench_matmul_row(h, m, how, matmul_run_backward_input, "backward_input",
                     MATMUL_BACKWARD_INPUT_BYTES(s.N, s.IC, s.OC, m->mode), shapes);
    bench_matmul_row(h, m, how, matmul_run_backward_weight, "backward_weight",
                     MATMUL_BACKWARD_WEIGHT_BYTES(s.N, s.IC, s.OC, m->mode), shapes);
    bench_matmul_gelu(h, m, gelu, how, shapes);
}

#ifdef __CUDACC__

// Benchmarks cuBLASLt's first choice, the fastest of its candidates, the same without GELU in the epilogue, and
// GELU_ERF; in the backward pass the last three include the bias gradient. The weight gradient is without the bias
// gradient, which has its own row.
static void bench_matmul_ways(Harness* h, MatmulCase* m, int gelu, const char* shapes) {
    static const char* const WAYS[] = {" first choice", " tuned", " tuned, no fusion", " tuned, ERF"};
    static const char* const WITH_BIAS[] = {"", " dbias tuned", " dbias no fusion", " dbias ERF"};
    real *db = m->d.b, *dbias = m->dbias;
    m->d.b = NULL;
    for (int way = 0; way < 4; way++) {
        h->ctx.autotune = way > 0;
        h->ctx.gelu_fusion = way < 2;
        m->kind = way < 3 ? GELU_TANH : GELU_ERF;
        m->dbias = NULL;
        matmul_plans_free(&h->ctx);
        if (way < 2) bench_matmul_all(h, m, gelu, WAYS[way], shapes);
        else bench_matmul_gelu(h, m, gelu, WAYS[way], shapes);
        m->dbias = dbias;
        if (gelu < 0 && way > 0) bench_matmul_gelu(h, m, gelu, WITH_BIAS[way], shapes);
    }
    m->kind = GELU_TANH;
    h->ctx.autotune = 0;
    h->ctx.gelu_fusion = 1;
    matmul_plans_free(&h->ctx);
    m->d.b = db;
    double elements = (double)m->s.N * m->s.OC;
    if (m->p.b)
        bench_report(h, "backward_bias", shapes, bench_seconds(h, matmul_run_backward_bias, m), elements,
                     elements * sizeof(floatX));
}

enum { CEILING_COPY_BYTES = 1 << 30 };

static void matmul_run_copy(void* state) {
    MatmulCase* m = (MatmulCase*)state;
    cudaCheck(cudaMemcpyAsync(m->y.device, m->x.device, CEILING_COPY_BYTES, cudaMemcpyDeviceToDevice, m->ctx->stream));
}

// What this GPU reaches at best, measured: a copy that does not fit into the L2, counting bytes read and written, and a
// large product of normal random numbers, which heat more than zeros do.
static void bench_ceilings(Harness* h) {
    MatmulShape s = {8192, 8192, 8192};
    MatmulCase m;
    case_begin(h, "ceilings");
    memset(&m, 0, sizeof m);
    m.s = s;
    m.ctx = &h->ctx;
    Array noise = input(h, 1 << 20, 1.0);
    m.x.device = (floatX*)bench_memory(h, CEILING_COPY_BYTES, 1, noise);
    m.y.device = (floatX*)bench_memory(h, CEILING_COPY_BYTES, 1, noise);
    m.w.device = (floatX*)bench_memory(h, matmul_size(s.OC, s.IC), sizeof(floatX), noise);
    m.p.w = m.w.device;
    h->ceiling_gbs = 2e-9 * CEILING_COPY_BYTES / bench_seconds(h, matmul_run_copy, &m);
    h->ctx.autotune = 1;
    h->ceiling_tflops = 1e-12 * MATMUL_FLOPS(s.N, s.IC, s.OC) / bench_seconds(h, matmul_run_forward, &m);
    h->ctx.autotune = 0;
    matmul_plans_free(&h->ctx);
    case_free(h);
}

#endif

static void bench_matmul(Harness* h) {
    // clang-format off
#ifdef __CUDACC__
    static const MatmulBench rows[] = {
        {"124M", {65536, 768, 2304}, 0},  {"124M", {65536, 768, 768}, 0},    {"124M", {65536, 768, 3072}, 1},
        {"124M", {65536, 3072, 768}, -1}, {"124M", {65536, 768, 50304}, 0},
        {"1558M", {16384, 1600, 4800}, 0},  {"1558M", {16384, 1600, 1600}, 0}, {"1558M", {16384, 1600, 6400}, 1},
        {"1558M", {16384, 6400, 1600}, -1}, {"1558M", {16384, 1600, 50304}, 0},
        {"large", {32768, 1024, 3072}, 0},  {"large", {32768, 1024, 1024}, 0}, {"large", {32768, 1024, 4096}, 1},
        {"large", {32768, 4096, 1024}, -1}, {"large", {5120, 1024, 30592}, 0},  // the decoder of masked positions
    };
#else
    static const MatmulBench rows[] = {
        {"124M", {256, 768, 2304}, 0},  {"124M", {256, 768, 768}, 0},    {"124M", {256, 768, 3072}, 1},
        {"124M", {256, 3072, 768}, -1}, {"124M", {256, 768, 50304}, 0},
        {"small", {1024, 128, 384}, 0},  {"small", {1024, 128, 128}, 0},   {"small", {1024, 128, 512}, 1},
        {"small", {1024, 512, 128}, -1}, {"small", {1024, 128, 50304}, 0}, {"sample", {1, 768, 50304}, 0},
        {"large", {128, 1024, 30592}, 0},
    };
#endif
    // clang-format on
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        MatmulShape s = rows[i].s;
        char shapes[64];
        snprintf(shapes, sizeof shapes, "%s N=%d IC=%d OC=%d", rows[i].model, s.N, s.IC, s.OC);
        case_begin(h, "matmul bench %s", shapes);
        MatmulCase m;
        memset(&m, 0, sizeof m);
        m.s = s;
        m.ctx = &h->ctx;
        Array noise = input(h, HAS_DEVICE_MEMORY ? 1 << 20 : 1009, 1.0);
        Array* all[] = {&m.x, &m.w, &m.b, &m.y, &m.pre, &m.dx, &m.dy};
        size_t sizes[] = {matmul_size(s.N, s.IC),
                          matmul_size(s.OC, s.IC),
                          (size_t)s.OC,
                          matmul_size(s.N, s.OC),
                          matmul_size(s.N, rows[i].gelu < 0 ? s.IC : s.OC),
                          matmul_size(s.N, s.IC),
                          matmul_size(s.N, s.OC)};
        for (size_t k = 0; k < COUNT_OF(all); k++)
            if (all[k] != &m.pre || rows[i].gelu)
                all[k]->device = (floatX*)bench_memory(h, sizes[k], sizeof(floatX), noise);
        m.p.w = m.w.device;
        m.p.b = s.OC == 50304 ? NULL : m.b.device;  // a head has no bias
        m.d.w = (real*)bench_memory(h, matmul_size(s.OC, s.IC), sizeof(real), noise);
        m.dbias = rows[i].gelu < 0 ? (real*)bench_memory(h, (size_t)s.IC, sizeof(real), noise) : NULL;
        m.d.b = m.p.b ? (real*)bench_memory(h, (size_t)s.OC, sizeof(real), noise) : NULL;
#ifdef __CUDACC__
        bench_matmul_ways(h, &m, rows[i].gelu, shapes);
#else
        bench_matmul_all(h, &m, rows[i].gelu, "", shapes);
#endif
        case_free(h);
    }
}

#endif
