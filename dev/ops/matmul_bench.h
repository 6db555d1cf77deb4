/* Bench of matmul: the shapes of the models, on the GPU in each way that a product can take, and the GPU's ceilings. */
#ifndef DEV_OPS_MATMUL_BENCH_H
#define DEV_OPS_MATMUL_BENCH_H

#include "matmul.h"

typedef struct {
    const char* model;
    int N, IC, OC;
    int gelu;  // GELU goes with it: 1 after it, forward; -1 before it, in the backward pass
} MatmulBench;

static void bench_matmul_all(Harness* h, OpCase* k, int gelu, int has_bias, const char* how) {
    k->kind = has_bias;
    bench(h, how, matmul_run_forward, k);
    bench(h, how, matmul_run_backward_input, k);
    k->kind = HAS_DEVICE_MEMORY ? 0 : has_bias;  // on the GPU the bias gradient has its own row
    bench(h, how, matmul_run_backward_weight, k);
    k->kind = GELU_TANH;
    if (gelu > 0) bench(h, how, matmul_run_gelu_forward, k);
    if (gelu < 0) bench(h, how, matmul_run_gelu_backward_input, k);
}

#ifdef __CUDACC__

OP_FN(matmul_run_backward_bias) {
    matmul_backward_bias((BiasGrad){k->db.device_real, k->mode}, k->dy.device, k->N, k->OC, k->ctx);
}

// cuBLASLt's first choice, and the fastest of its candidates.
static void bench_matmul_ways(Harness* h, OpCase* k, int gelu, int has_bias) {
    for (int tuned = 0; tuned < 2; tuned++) {
        h->ctx.autotune = tuned;
        matmul_plans_free(&h->ctx);
        bench_matmul_all(h, k, gelu, has_bias, tuned ? " tuned" : " first choice");
        if (gelu < 0) bench(h, tuned ? " dbias tuned" : " dbias", matmul_run_gelu_backward_bias, k);
    }
    h->ctx.autotune = 0;
    matmul_plans_free(&h->ctx);
    double elements = (double)k->N * k->OC;
    char shapes[64];
    snprintf(shapes, sizeof shapes, "N=%d OC=%d", k->N, k->OC);
    if (has_bias)
        bench_report(h, "matmul_backward_bias", shapes, bench_seconds(h, matmul_run_backward_bias, k), elements,
                     elements * sizeof(floatX));
}

enum { CEILING_COPY_BYTES = 1 << 30 };

OP_FN(matmul_run_copy) {
    cudaCheck(cudaMemcpyAsync(k->y.device, k->x.device, CEILING_COPY_BYTES, cudaMemcpyDeviceToDevice, k->ctx->stream));
}

// What this GPU reaches at best, measured: a copy that does not fit into the L2, counting bytes read and written, and a
// large product of normal random numbers, which heat more than zeros do.
static void bench_ceilings(Harness* h) {
    enum { SIDE = 8192 };
    OpCase k;
    case_begin(h, "ceilings");
    memset(&k, 0, sizeof k);
    k.N = k.IC = k.OC = SIDE, k.ctx = &h->ctx;
    Array noise = input(h, 1 << 20, 1.0);
    k.x.device = (floatX*)bench_memory(h, CEILING_COPY_BYTES, 1, noise);
    k.y.device = (floatX*)bench_memory(h, CEILING_COPY_BYTES, 1, noise);
    k.w.device = (floatX*)bench_memory(h, (size_t)SIDE * SIDE, sizeof(floatX), noise);
    h->ceiling_gbs = 2e-9 * CEILING_COPY_BYTES / bench_seconds(h, matmul_run_copy, &k);
    h->ctx.autotune = 1;
    h->ceiling_tflops = 1e-12 * MATMUL_FLOPS(SIDE, SIDE, SIDE) / bench_seconds(h, matmul_run_forward, &k);
    h->ctx.autotune = 0;
    matmul_plans_free(&h->ctx);
    case_free(h);
}

#endif

static void bench_matmul(Harness* h) {
    // clang-format off
#ifdef __CUDACC__
    static const MatmulBench rows[] = {
        {"124M", 65536, 768, 2304, 0},  {"124M", 65536, 768, 768, 0},    {"124M", 65536, 768, 3072, 1},
        {"124M", 65536, 3072, 768, -1}, {"124M", 65536, 768, 50304, 0},
        {"1558M", 16384, 1600, 4800, 0},  {"1558M", 16384, 1600, 1600, 0}, {"1558M", 16384, 1600, 6400, 1},
        {"1558M", 16384, 6400, 1600, -1}, {"1558M", 16384, 1600, 50304, 0},
        {"large", 32768, 1024, 3072, 0},  {"large", 32768, 1024, 1024, 0}, {"large", 32768, 1024, 4096, 1},
        {"large", 32768, 4096, 1024, -1}, {"large", 5120, 1024, 30592, 0},  // the decoder of masked positions
    };
#else
    static const MatmulBench rows[] = {
        {"124M", 256, 768, 2304, 0},  {"124M", 256, 768, 768, 0},    {"124M", 256, 768, 3072, 1},
        {"124M", 256, 3072, 768, -1}, {"124M", 256, 768, 50304, 0},
        {"small", 1024, 128, 384, 0},  {"small", 1024, 128, 128, 0},   {"small", 1024, 128, 512, 1},
        {"small", 1024, 512, 128, -1}, {"small", 1024, 128, 50304, 0}, {"sample", 1, 768, 50304, 0},
        {"large", 128, 1024, 30592, 0},
    };
#endif
    // clang-format on
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        OpCase k;
        int has_bias = rows[i].OC != 50304;  // a head has none
        printf("%s\n", rows[i].model);
        case_begin(h, "matmul bench");
        memset(&k, 0, sizeof k);
        k.N = rows[i].N, k.IC = rows[i].IC, k.OC = rows[i].OC, k.ctx = &h->ctx;
        Array noise = input(h, HAS_DEVICE_MEMORY ? 1 << 20 : 1009, 1.0);
        for (const Arg* arg = rows[i].gelu ? MATMUL_GELU_ARGS : MATMUL_ARGS; arg->name; arg++)
            op_array(&k, arg)->n = op_elements(&k, arg->shape);
        k.y.n = k.dy.n = (size_t)k.N * (size_t)k.OC, k.dx.n = k.x.n, k.dw.n = k.w.n, k.db.n = k.b.n;
        Array* all[] = {&k.x, &k.w, &k.b, &k.y, &k.pre, &k.dx, &k.dy, &k.before, &k.dbefore};
        for (size_t a = 0; a < COUNT_OF(all); a++)
            if (all[a]->n) all[a]->device = (floatX*)bench_memory(h, all[a]->n, sizeof(floatX), noise);
        Array* full[] = {&k.dw, &k.db, &k.dbias};
        for (size_t a = 0; a < COUNT_OF(full); a++)
            if (full[a]->n) full[a]->device_real = (real*)bench_memory(h, full[a]->n, sizeof(real), noise);
#ifdef __CUDACC__
        bench_matmul_ways(h, &k, rows[i].gelu, has_bias);
#else
        bench_matmul_all(h, &k, rows[i].gelu, has_bias, "");
#endif
        case_free(h);
    }
}

#endif
