/* Bench of matmul: the shapes of the models, on the GPU in each way that a product can take, and the GPU's ceilings. */
#ifndef DEV_OPS_MATMUL_BENCH_H
#define DEV_OPS_MATMUL_BENCH_H

#include "matmul.h"

// gelu: GELU goes with the product: 1: after it, forward; -1: before it, in the backward pass.
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

static void bench_matmul_product(Harness* h, int N, int IC, int OC, int gelu, int has_bias) {
    OpCase k;
    case_begin(h, "matmul bench");
    memset(&k, 0, sizeof k);
    k.N = N, k.IC = IC, k.OC = OC, k.ctx = &h->ctx;
    Array noise = input(h, HAS_DEVICE_MEMORY ? 1 << 20 : 1009, 1.0);
    for (const Arg* arg = gelu ? MATMUL_GELU_ARGS : MATMUL_ARGS; arg->name; arg++)
        op_array(&k, arg)->n = op_elements(&k, arg->shape);
    k.y.n = k.dy.n = (size_t)N * (size_t)OC, k.dx.n = k.x.n, k.dw.n = k.w.n, k.db.n = k.b.n;
    Array* all[] = {&k.x, &k.w, &k.b, &k.y, &k.pre, &k.dx, &k.dy, &k.before, &k.dbefore};
    for (size_t a = 0; a < COUNT_OF(all); a++)
        if (all[a]->n) all[a]->device = (floatX*)bench_memory(h, all[a]->n, sizeof(floatX), noise);
    Array* full[] = {&k.dw, &k.db, &k.dbias};
    for (size_t a = 0; a < COUNT_OF(full); a++)
        if (full[a]->n) full[a]->device_real = (real*)bench_memory(h, full[a]->n, sizeof(real), noise);
#ifdef __CUDACC__
    bench_matmul_ways(h, &k, gelu, has_bias);
#else
    bench_matmul_all(h, &k, gelu, has_bias, "");
#endif
    case_free(h);
}

// The products of a block, and of the head, which GPT-2 has without a bias.
static void bench_matmul(Harness* h) {
    static const struct {
        const char* model;
        int N, C, head_N, head;
    } MODELS[] = {
#ifdef __CUDACC__
        {"124M", 65536, 768, 65536, 50304},
        {"1558M", 16384, 1600, 16384, 50304},
        {"large", 32768, 1024, 5120, 30592},  // of BERT's masked positions
#else
        {"124M", 256, 768, 256, 50304},
        {"small", 1024, 128, 1, 50304},  // one token of a sample
        {"large", 128, 1024, 128, 30592},
#endif
    };
    for (size_t i = 0; i < COUNT_OF(MODELS); i++) {
        int N = MODELS[i].N, C = MODELS[i].C, head = MODELS[i].head;
        printf("%s\n", MODELS[i].model);
        bench_matmul_product(h, N, C, 3 * C, 0, 1);
        bench_matmul_product(h, N, C, C, 0, 1);
        bench_matmul_product(h, N, C, 4 * C, 1, 1);
        bench_matmul_product(h, N, 4 * C, C, -1, 1);
        bench_matmul_product(h, MODELS[i].head_N, C, head, 0, head != 50304);
    }
}

#endif
