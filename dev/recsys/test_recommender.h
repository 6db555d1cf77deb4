/* What test_dlrm.cu and test_ncf.cu share: values from a hash, golden cases, finite differences, equalities, timing.
 * Included after the trainer. */
#ifndef DEV_RECSYS_TEST_RECOMMENDER_H
#define DEV_RECSYS_TEST_RECOMMENDER_H

#include "dev/test/tests.h"
#include "llmc/profile/trace.h"

// A model with its optimizer, and a batch on the device.
typedef struct {
    Context ctx;
    Model m;
    Optimizer o;
    Batch batch;
    double lr;  // of DLRM
} Bench;

// Each test defines these. `before`: the weights before a step, from whose update the gradients of all tensors follow.
static void bench_step(Bench* b, uint64_t step);
static real* bench_gradients(Bench* b, const real* before);

// Element i of tensor number t, in 0 .. 1: the same on every machine and in any language.
static double hash01(int t, uint32_t i) {
    uint32_t h = (i + (uint32_t)t * 1000003u) * 2654435761u;
    h ^= h >> 16, h *= 2246822519u, h ^= h >> 13;
    return h / 4294967296.0;
}

static void expect_near(Tests* t, const char* name, double got, double want, double tolerance) {
    expect(t, fabs(got - want) <= tolerance, name, "%.12g instead of %.12g, tolerance %.1e", got, want, tolerance);
}

static double norm_of(const real* x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

// Memory that the device reads, with the given bytes.
static void* on_device(Context* ctx, const void* host, size_t bytes) {
    void* p = device_alloc(ctx, bytes, "batch");
    device_upload(ctx, p, host, bytes);
    device_synchronize(ctx);
    return p;
}

// A host copy of n reals; free() it.
static real* reals_of(Context* ctx, const real* device, size_t n) {
    real* copy = (real*)xmalloc(n * sizeof(real));
    device_download(ctx, copy, device, n * sizeof(real));
    return copy;
}

static const Tensor* tensor_named(const TensorTable* table, const char* name) {
    for (int k = 0; k < table->count; k++)
        if (strcmp(table->tensors[k].name, name) == 0) return &table->tensors[k];
    die(FAILED, "no tensor is called %s", name);
}

// Fill a tensor with the values of hash tensor `id`; only its first `columns` columns, the others are zero.
static void hash_fill(real* values, const Tensor* t, int id, int columns) {
    for (int r = 0; r < t->shape[0]; r++)
        for (int c = 0; c < t->shape[1]; c++)
            values[t->offset + (size_t)r * (size_t)t->shape[1] + (size_t)c] =
                c < columns ? (real)((hash01(id, (uint32_t)(r * columns + c)) - 0.5) * 0.2) : 0;
}

static Bench* bench_open(Config config, int B) {
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    context_init(&b->ctx);
    model_plan(&b->m, config, B);
    model_buffers_alloc(&b->m.buffers, &b->ctx);
    model_alloc(&b->m, &b->ctx);
    optimizer_init_shard(&b->o, &b->m.buffers.table, (UpdateSettings){.kind = ADAMW, .master = WITH_MASTER},
                         tensors_updated(&b->m.buffers.table), &b->ctx);
    return b;
}

static void bench_close(Bench* b) {
    optimizer_free(&b->o);
    model_free(&b->m);
    model_buffers_free(&b->m.buffers);
    matmul_plans_free(&b->ctx);
    context_free(&b->ctx);
    free(b);
}

// Give all parameters, and the optimizer's copies of them, these values.
static void bench_write(Bench* b, const real* values) {
    HostView view = host_view_open(b->m.buffers.params, b->m.buffers.table.elements, VIEW_FLOATX);
    memcpy(view.values, values, view.n * sizeof(real));
    optimizer_write_weights(&b->o, &view, &b->ctx);
    host_view_close(&view);
}

// A host copy of the weights in full precision; free() it.
static real* bench_weights(Bench* b) {
    return reals_of(&b->ctx, recommender_weights(&b->m.buffers, &b->o), b->m.buffers.table.elements);
}

static double bench_loss(Bench* b) {
    real loss;
    device_download(&b->ctx, &loss, b->m.a.loss, sizeof loss);
    return (double)loss;
}

// A checksum of all weights, to compare runs bit for bit.
static uint64_t bench_bits(Bench* b) {
    real* w = bench_weights(b);
    uint64_t hash = fnv_update(FNV_START, (const char*)w, b->m.buffers.table.elements * sizeof *w);
    free(w);
    return hash;
}

// Parameters of the published configuration.
static void test_published_size(Tests* t, size_t parameters) {
    Model m;
    model_plan(&m, config_published(), 1);
    expect(t, m.buffers.table.parameters == parameters, "published size", "%zu parameters, not %zu",
           m.buffers.table.parameters, parameters);
    model_buffers_free_tables(&m.buffers);
}

// ---------------------------------------------------------------------------------------------------------
// The golden cases

typedef struct {
    const char* name;  // of a tensor
    double norm;       // of its gradient in the first step
} GoldenNorm;

// The losses of ten steps, each before its update, and norms [count]. `rounding`: of a norm, besides its last digit.
static void test_golden(Tests* t, Bench* b, const double losses[10], const GoldenNorm* norms, size_t count,
                        double rounding) {
    // The digits of the notes end at 1e-10. bf16 has 8 bits.
    int is_fp32 = sizeof(floatX) == sizeof(real);
    double loss_tolerance = sizeof(real) == 8 ? 1e-10
                            : is_fp32         ? 1e-6
                                              : 2e-3,
           norm_tolerance = sizeof(real) == 8 ? 1e-7
                            : is_fp32         ? 1e-5
                                              : 2e-2;
    real* before = bench_weights(b);
    for (uint64_t s = 0; s < 10; s++) {
        bench_step(b, s);
        expect_near(t, named("golden: loss after %d steps", (int)s), bench_loss(b), losses[s], loss_tolerance);
        if (s) continue;
        real* gradient = bench_gradients(b, before);
        for (size_t i = 0; i < count; i++) {
            const Tensor* x = tensor_named(&b->m.buffers.table, norms[i].name);
            double got = norm_of(gradient + x->offset, x->size);
            expect_near(t, named("golden: norm of the gradient of %s", x->name), got, norms[i].norm,
                        norm_tolerance * norms[i].norm + rounding);
        }
        free(gradient);
    }
    free(before);
    bench_close(b);
}

#ifdef REAL_DOUBLE
// The gradients of every tensor against central differences of the loss, which `forward_loss` computes.
static void test_finite_differences(Tests* t, Bench* b, double (*forward_loss)(Bench*)) {
    real *w = (real*)b->m.buffers.params, *kept = bench_weights(b);
    bench_step(b, 0);
    real* gradient = bench_gradients(b, kept);
    memcpy(w, kept, b->m.buffers.table.elements * sizeof *w);
    for (int k = 0; k < b->m.buffers.table.count; k++) {
        const Tensor* x = &b->m.buffers.table.tensors[k];
        double worst = 0, step = 1e-5;
        for (size_t i = x->offset; i < x->offset + x->size; i++) {
            w[i] = kept[i] + step;
            double above = forward_loss(b);
            w[i] = kept[i] - step;
            worst = fmax(worst, fabs((above - forward_loss(b)) / (2 * step) - gradient[i]));
            w[i] = kept[i];
        }
        expect_near(t, named("finite differences: %s", x->name), worst, 0, 1e-9);
    }
    free(kept), free(gradient);
    bench_close(b);
}
#endif

// ---------------------------------------------------------------------------------------------------------
// A middle-sized model

// Twenty steps; a checksum of all weights, and how much the loss went down.
static uint64_t twenty_steps(Bench* b, double* less) {
    for (uint64_t s = 0; s < 20; s++) {
        bench_step(b, s);
        *less = s ? *less : bench_loss(b);
    }
    *less -= bench_loss(b);
    uint64_t bits = bench_bits(b);
    bench_close(b);
    return bits;
}

// Twenty steps of the model that `open` makes.
static void test_equalities(Tests* t, Bench* (*open)(void)) {
    double less, again;
    uint64_t bits = twenty_steps(open(), &less);
    expect(t, less > 0.02, "twenty steps learn", "the loss went down by %g", less);
    expect_that(t, twenty_steps(open(), &again) == bits && less == again, "the same bits again");
}

// ---------------------------------------------------------------------------------------------------------
// Speed

#ifdef __CUDACC__
enum { SPEED_BATCHES = 130, SPEED_WARMUP = 20 };

// Each test defines these: the published model with the first of SPEED_BATCHES batches, and the next one in memory.
static Bench* speed_open(void);
static void batch_next(Batch* batch);
#endif

// With the argument "speed" and a GPU: the time of a step, the mean over 110; after them the loss, a checksum of all
// weights, and the kernels of one more step, fills and copies included. Returns whether it was asked for.
static int bench_speed(int argc, char** argv, const char* model) {
    if (argc < 2 || strcmp(argv[1], "speed") != 0) return 0;
#ifdef __CUDACC__
    Bench* b = speed_open();
    Context* ctx = &b->ctx;
    cudaEvent_t start, stop;
    float ms;
    ctx->autotune = 1;
    cudaCheck(cudaEventCreate(&start)), cudaCheck(cudaEventCreate(&stop));
    for (int s = 0; s < SPEED_BATCHES; s++) {
        if (s) batch_next(&b->batch);
        if (s == SPEED_WARMUP) cudaCheck(cudaEventRecord(start, ctx->stream));
        bench_step(b, (uint64_t)s);
    }
    cudaCheck(cudaEventRecord(stop, ctx->stream));
    device_synchronize(ctx);
    cudaCheck(cudaEventElapsedTime(&ms, start, stop));
    ms /= SPEED_BATCHES - SPEED_WARMUP;
    printf("RESULT recsys_%s B=%d ms=%.4f samples_s=%.0f loss=%.9f weights=%016llx type=%s\n", model, b->batch.B,
           (double)ms, 1e3 * b->batch.B / (double)ms, bench_loss(b), (unsigned long long)bench_bits(b), FLOATX_NAME);
    KernelTrace* t = (KernelTrace*)xcalloc(1, sizeof *t);
    double sum = 0;
    const char* why = kernel_trace_start(t, ctx);
    if (why) die(FAILED, "no list of kernels: %s", why);
    kernel_trace_collect(t);
    kernel_trace_clear(t);
    bench_step(b, SPEED_BATCHES);
    kernel_trace_collect(t);
    for (size_t i = 0; i < t->count; i++) {
        double us = 1e-3 * (double)(t->rows[i].end - t->rows[i].start);
        printf("%3zu %9.1f us  %s\n", i + 1, us, t->rows[i].name);
        sum += us;
    }
    printf("RESULT recsys_%s kernels=%zu sum_us=%.1f\n", model, t->count, sum);
    kernel_trace_stop(t);
    kernel_trace_free(t);
    free(t);
    bench_close(b);
#else
    die(USAGE, "speed of %s: only with a GPU", model);
#endif
    return 1;
}

#endif
