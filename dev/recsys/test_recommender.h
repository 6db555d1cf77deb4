/* What test_dlrm.cu and test_ncf.cu share: values from a hash, comparisons, timing. Included after the trainer. */
#ifndef DEV_RECSYS_TEST_RECOMMENDER_H
#define DEV_RECSYS_TEST_RECOMMENDER_H

#include "dev/test/tests.h"
#include "llmc/device/trace.h"

// Element i of tensor number t, in 0 .. 1: the same on every machine and in any language.
static double hash01(int t, uint32_t i) {
    uint32_t h = (i + (uint32_t)t * 1000003u) * 2654435761u;
    h ^= h >> 16, h *= 2246822519u, h ^= h >> 13;
    return h / 4294967296.0;
}

static real hash_value(int t, uint32_t i) { return (real)((hash01(t, i) - 0.5) * 0.2); }

static void expect_near(Tests* t, const char* name, double got, double want, double tolerance) {
    expect(t, fabs(got - want) <= tolerance, name, "%.12g instead of %.12g, tolerance %.1e", got, want, tolerance);
}

// Losses and norms of a golden case: the digits of the notes end at 1e-10.
static double loss_tolerance(void) {
    return sizeof(real) == 8 ? 1e-10 : sizeof(floatX) == sizeof(real) ? 1e-6 : 2e-3;  // bf16 has 8 bits
}
static double norm_tolerance(void) { return sizeof(real) == 8 ? 1e-7 : sizeof(floatX) == sizeof(real) ? 1e-5 : 2e-2; }

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
                c < columns ? hash_value(id, (uint32_t)(r * columns + c)) : 0;
}

// Give all parameters, and the optimizer's copies of them, these values.
static void weights_write(const ModelBuffers* b, const Optimizer* o, const real* values, Context* ctx) {
    HostView view = host_view_open(b->params, b->table.elements, VIEW_FLOATX);
    memcpy(view.values, values, view.n * sizeof(real));
    optimizer_write_weights(o, &view, ctx);
    host_view_close(&view);
}

// The norm of a tensor's stored gradient.
static double gradient_norm(const ModelBuffers* b, const char* name, Context* ctx) {
    const Tensor* t = tensor_named(&b->table, name);
    real* g = reals_of(ctx, b->grads + t->offset, t->size);
    double norm = norm_of(g, t->size);
    free(g);
    return norm;
}

// A checksum of n reals, to compare runs bit for bit.
static uint64_t bits_of(Context* ctx, const real* device, size_t n) {
    real* x = reals_of(ctx, device, n);
    uint64_t hash = fnv_update(FNV_START, (const char*)x, n * sizeof(real));
    free(x);
    return hash;
}

#ifdef __CUDACC__
// The time of a step, the mean over many; after them the loss, and a checksum of all weights.
static void speed_report(const char* model, int B, double ms, double loss, uint64_t bits) {
    printf("RESULT recsys_%s B=%d ms=%.4f samples_s=%.0f loss=%.9f weights=%016llx type=%s\n", model, B, ms,
           1e3 * B / ms, loss, (unsigned long long)bits, FLOATX_NAME);
}

// List what is launched from here on until speed_kernels_end(), fills and copies included.
static KernelTrace* speed_kernels_begin(Context* ctx) {
    KernelTrace* t = (KernelTrace*)xcalloc(1, sizeof *t);
    if (kernel_trace_start(t, ctx) != 0) die(FAILED, "no list of kernels");
    kernel_trace_collect(t);
    kernel_trace_clear(t);
    return t;
}

static void speed_kernels_end(const char* model, KernelTrace* t) {
    kernel_trace_collect(t);
    double sum = 0;
    for (size_t i = 0; i < t->count; i++) {
        double us = 1e-3 * (double)(t->rows[i].end - t->rows[i].start);
        printf("%3zu %9.1f us  %s\n", i + 1, us, t->rows[i].name);
        sum += us;
    }
    printf("RESULT recsys_%s kernels=%zu sum_us=%.1f\n", model, t->count, sum);
    kernel_trace_stop(t);
    kernel_trace_free(t);
    free(t);
}
#endif

#endif
