/* What the tests of a whole model share: counting, comparing, golden files. Included after the trainer. */
#ifndef DEV_MODEL_TESTS_H
#define DEV_MODEL_TESTS_H

#include "dev/test/tests.h"

// One case: an error within a tolerance. The format names it.
__attribute__((format(printf, 4, 5))) static void report(Tests* t, double error, double tolerance, const char* format,
                                                         ...) {
    int ok = error <= tolerance;
    va_list name;
    va_start(name, format);
    printf("%s ", ok ? "ok  " : "FAIL");
    vprintf(format, name);
    printf("  err=%.3g tol=%.3g\n", error, tolerance);
    va_end(name);
    t->passed += ok, t->failed += !ok;
}

// A host copy of device values; free() it.
static real* device_values(Context* ctx, void* device, size_t n, ViewType type) {
    HostView view = host_view_open(device, n, type);
    real* copy = (real*)xmalloc(n * sizeof(real));
    host_view_read(ctx, &view);
    memcpy(copy, view.values, n * sizeof(real));
    host_view_close(&view);
    return copy;
}

// A large epsilon in config.json is that of every layernorm: next to it no variance counts in rstd.
#define LARGE_EPSILON 1e8

static void report_epsilon(Tests* t, const char* name, real* rstd, int rows, Context* ctx) {
    real* got = device_values(ctx, rstd, (size_t)rows, VIEW_REAL);
    int wrong = 0;
    for (int i = 0; i < rows; i++) wrong += !(fabs((double)got[i] * sqrt(LARGE_EPSILON) - 1) <= 1e-5);
    report(t, wrong, 0, "epsilon of %s", name);
    free(got);
}

// ---------------------------------------------------------------------------------------------------------
// The table of tensors

// Weight decay is for matrices: not for biases and layernorms, which are the vectors. Tensors are aligned, but for
// BERT's keys and values, which follow its queries as one matrix.
static void report_places(Tests* t, const char* name, const TensorTable* table) {
    int wrong = 0;
    for (const Tensor* x = table->tensors; x < table->tensors + table->count; x++) {
        int follows = strstr(x->name, "self.key") || strstr(x->name, "self.value");
        wrong += x->decay != (x->ndim == 2);
        wrong += follows ? x->offset != x[-1].offset + x[-1].size : x->offset % TENSOR_ALIGNMENT != 0;
    }
    report(t, wrong, 0, "%s: places, and weight decay of matrices only", name);
}

// Training from scratch begins as published: N(0, 0.02), biases 0, layernorms the identity, BERT's [PAD] 0, and GPT-2's
// projections onto the residual stream N(0, 0.02 / sqrt(2 `layers`)). Judged by the names, not by the table that made
// the values.
static void report_initial_values(Tests* t, const char* what, const ModelBuffers* b, int layers, Context* ctx) {
    real* params = device_values(ctx, b->params, b->table.elements, VIEW_FLOATX);
    for (const Tensor* x = b->table.tensors; x < b->table.tensors + b->table.count; x++) {
        const real* w = params + x->offset;
        int is_bias = strstr(x->name, ".bias") != NULL;
        int is_norm = strstr(x->name, ".ln_") != NULL || strstr(x->name, "LayerNorm") != NULL;
        size_t n = tensor_elements(x), first = strstr(x->name, "word_embeddings") ? (size_t)x->shape[1] : 0;
        double std = is_bias || is_norm ? 0 : strstr(x->name, ".c_proj.") ? 0.02 / sqrt(2.0 * layers) : 0.02;
        double mean = 0, square = 0, want = is_norm && !is_bias, count = (double)(n - first);
        for (size_t i = first; i < n; i++) mean += (double)w[i] / count;
        for (size_t i = first; i < n; i++) square += ((double)w[i] - mean) * ((double)w[i] - mean) / count;
        // Five standard errors of a mean and of a deviation, and what storing in bf16 may add.
        double error = fabs(mean - want) + fabs(sqrt(square) - std);
        double tolerance = 5 * std * (1 / sqrt(count) + 1 / sqrt(2.0 * count)) + 1e-3 * std + 1e-12;
        for (size_t i = 0; i < first; i++) error = w[i] == 0 ? error : INFINITY;
        report(t, error, tolerance, "%s: initial values of %s", what, x->name);
    }
    free(params);
}

// ---------------------------------------------------------------------------------------------------------
// Golden files

// What sums in another order may differ by: torch's own fp32 is within 1.4e-6 on these models, and a GPU has yet
// another order. In bf16 and fp16 this is a check of plumbing only: 2^-8 an operation adds up to a few per cent of a
// logit.
static double golden_tolerance(void) { return !GPU_BUILD ? 1e-5 : sizeof(floatX) == sizeof(real) ? 1e-4 : 6e-2; }

static void golden_values(const SafeTensors* file, const char* name, real* out, size_t n) {
    const SafeTensor* entry = safetensors_find(file, name);
    if (!entry || entry->elements != n) die(FAILED, "golden file: \"%s\" is missing or of another size", name);
    safetensors_read_real(entry, 0, n, out);
}

// The number of integers under `name`, read into out, which has room for `most`.
static int golden_integers(const SafeTensors* file, const char* name, int* out, size_t most) {
    const SafeTensor* entry = safetensors_find(file, name);
    if (!entry || entry->elements > most || strcmp(entry->dtype, "I32") != 0)
        die(FAILED, "golden file: \"%s\" is missing or of another size", name);
    safetensors_read_bytes(entry, 0, entry->elements * sizeof(int), out);
    return (int)entry->elements;
}

// The numbers [n] under `key`.
static void report_golden(Tests* t, const char* what, const char* key, const SafeTensors* file, const real* got,
                          size_t n, double tolerance) {
    real* want = (real*)xmalloc(n * sizeof(real));
    golden_values(file, key, want, n);
    const double error = largest_error(got, want, n);
    report(t, error, tolerance, "%s: %s", what, key);
    size_t worst = 0;
    for (size_t i = 1; i < n; i++)
        if (!(fabs(got[i] - want[i]) <= fabs(got[worst] - want[worst]))) worst = i;
    if (!(error <= tolerance))
        printf("     element %zu is %.9g, expected %.9g\n", worst, (double)got[worst], (double)want[worst]);
    free(want);
}

// The first N rows of the model's logits [N, Vp], without what pads them to Vp.
static void report_golden_logits(Tests* t, const char* what, const SafeTensors* file, const Model* m, size_t N,
                                 double tolerance, Context* ctx) {
    const size_t V = (size_t)m->config.V, Vp = (size_t)m->Vp;
    real* got = device_values(ctx, m->a.logits, N * Vp, VIEW_FLOATX);
    for (size_t i = 0; i < N; i++) memmove(got + i * V, got + i * Vp, V * sizeof(real));
    report_golden(t, what, "logits", file, got, N * V, tolerance);
    free(got);
}

static void report_golden_gradients(Tests* t, const char* what, const SafeTensors* file, const ModelBuffers* b,
                                    double tolerance, Context* ctx) {
    real *grads = device_values(ctx, b->grads, b->table.elements, VIEW_REAL), *turned = NULL;
    for (const Tensor* x = b->table.tensors; x < b->table.tensors + b->table.count; x++) {
        size_t n = tensor_elements(x);
        uint64_t shape[2];
        tensor_file_shape(x, shape);
        turned = (real*)xrealloc(turned, n * sizeof(real));
        if (x->file == TRANSPOSED) transpose(turned, grads + x->offset, (int)shape[1], (int)shape[0]);
        else memcpy(turned, grads + x->offset, n * sizeof(real));
        report_golden(t, what, named("grad.%s", x->name), file, turned, n, tolerance);
    }
    free(grads), free(turned);
}

// Rows of padding must never be touched.
static void report_padding(Tests* t, const char* what, const ModelBuffers* b, Context* ctx) {
    size_t strays = 0;
    real* params = device_values(ctx, b->params, b->table.elements, VIEW_FLOATX);
    for (const Tensor* x = b->table.tensors; x < b->table.tensors + b->table.count; x++)
        for (size_t i = tensor_elements(x); i < x->size; i++) strays += params[x->offset + i] != 0;
    report(t, (double)strays, 0, "%s: rows of padding stay zero", what);
    free(params);
}

// ---------------------------------------------------------------------------------------------------------
// An optimizer's step, memory

// A step of NorMuon on the gradients at hand, tensor by tensor against the references: the matrices of the layers, of
// which GPT-2 stores three as one, and everything else by AdamW with a rate of its own. Replaces the optimizer.
static void report_muon_step(Tests* t, const ModelBuffers* b, Optimizer* o, Context* ctx) {
    const TensorTable* table = &b->table;
    const OptimizerSettings settings = {1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0, 0, 0, {0.9, 1}};
    UpdateSettings update;
    size_t n = table->elements;
    memset(&update, 0, sizeof update);
    update.kind = NORMUON, update.master = WITH_MASTER, update.adamw_rate = 0.5;
    HostView view = host_view_open(b->params, n, VIEW_FLOATX);
    host_view_read(ctx, &view);
    real *grads = device_values(ctx, b->grads, n, VIEW_REAL), *p = (real*)xmalloc(n * sizeof(real));
    real *m = (real*)xcalloc(n, sizeof(real)), *v = (real*)xcalloc(n, sizeof(real));
    memcpy(p, view.values, n * sizeof(real));
    optimizer_free(o);
    optimizer_init_shard(o, table, update, tensors_whole(table), ctx);
    optimizer_write_weights(o, &view, ctx);
    host_view_close(&view);
    optimizer_step(o, b->params, b->grads, settings, NULL, NULL, ctx);
    real* got = o->master ? device_values(ctx, o->master, n, VIEW_REAL) : device_values(ctx, b->params, n, VIEW_FLOATX);
    double sum = 0,
           tolerance = sizeof(floatX) < sizeof(real) ? 1e-3 : 1e-5;  // of a step of 1e-2 with matrices in floatX
    for (size_t i = 0; i < n; i++) sum += (double)grads[i] * (double)grads[i];
    AdamWRefState reference = {p, m, v, grads};
    for (int i = 0; i < table->count; i++) {
        const Tensor* tensor = &table->tensors[i];
        int stacked = strstr(tensor->name, "c_attn") ? 3 : 1, is_matrix = tensor->layer >= 0 && tensor->ndim == 2;
        MuonGroup group = {tensor->shape[0] / stacked, tensor->shape[1], 0, is_matrix ? stacked : 0, stacked};
        ParamSpan span = {tensor->offset, tensor->size, (float)tensor->decay, 0, 0.5f};
        for (int k = 0; k < group.count; k++) {
            MuonMatrix matrix = {tensor->offset + (size_t)k * muon_elements(group), (float)tensor->decay};
            group.count = 1;
            muon_update_ref(reference, sqrt(sum), 1, &matrix, group, settings);
            group.count = stacked;
        }
        if (!is_matrix) adamw_update_ref(reference, sqrt(sum), 1, 1, &span, 1, settings);
        report(t, largest_error(got + tensor->offset, p + tensor->offset, tensor->size), tolerance,
               "NorMuon's step: %s", tensor->name);
    }
    free(grads), free(p), free(m), free(v), free(got);
}

// The plan against what was allocated for a model, its optimizer and a batch, and against the scratch of the steps that
// were run.
static void report_memory(Tests* t, const char* what, const MemoryPlan* plan, const Context* ctx) {
    size_t scratch = 0, used = ctx->scratch_bytes;
    for (int i = 0; i < MEMORY_PLAN_PARTS; i++)
        if (strcmp(plan->part[i].name, "scratch") == 0) scratch = plan->part[i].bytes;
    size_t planned = memory_plan_bytes(plan) - scratch;
    report(t, ctx->allocated != planned, 0, "%s: %zu bytes of %zu planned", what, ctx->allocated, planned);
    // Scratch is planned for the largest blocks that a product may be cut into, and for as many blocks of threads as a
    // GPU may hold and a batch of other lengths may need: more than a step takes, but not twice as much. It is that of
    // a step where only the forward pass is run, too.
    int good = used <= scratch && (plan->forward_only || (used > 0 && scratch <= 2 * used));
    report(t, !good, 0, "%s: scratch, %zu bytes of %zu planned", what, used, scratch);
}

// ---------------------------------------------------------------------------------------------------------
// The ops of a step by name, and on the GPU its kernels: a fusion that is lost is one more

// Each test has its own.
static void bench_step(Bench* b);

// `want`: the ops of a layer in one direction, a space after each.
static void report_ops(Tests* t, const char* what, const ScopeLog* log, Direction direction, int layer,
                       const char* want) {
    Text ops = {NULL, 0, 0};
    text_append(&ops, "", 0);
    for (size_t i = 0; i < log->count; i++)
        if (log->records[i].scope.direction == direction && log->records[i].scope.layer == layer)
            text_printf(&ops, "%s ", log->records[i].scope.op);
    int same = strcmp(ops.text, want) == 0;
    if (!same) printf("got  %s\nwant %s\n", ops.text, want);
    report(t, !same, 0, "%s: the ops of layer %d, %s", what, layer, direction_name(direction));
    free(ops.text);
}

// Kernels of a layer in one direction: neither fills and copies, nor cuBLASLt's helper kernels. Not in full precision,
// whose attention launches one kernel per sequence. Every op has launched something.
static void report_kernels(Tests* t, const char* what, const ScopeLog* log, const ProfileStep* step,
                           Direction direction, int layer, int want) {
    int kernels = 0, ops = 0, without = 0, is_full_precision = sizeof(floatX) == sizeof(real);
    if (is_full_precision) return;
    for (size_t i = 0; i < step->count; i++) {
        const ProfileRow* row = &step->rows[i];
        if (row->direction != direction || row->layer != layer || !*row->op) continue;
        kernels += row->grid[0] && !strstr(row->full, "cublasLt::");
        ops += !row->is_helper;
    }
    for (size_t i = 0; i < log->count; i++)
        without += log->records[i].scope.direction == direction && log->records[i].scope.layer == layer;
    without -= ops;
    report(t, abs(kernels - want) + without, 0, "%s: %d kernels of layer %d, %s, and %d ops without any", what, kernels,
           layer, direction_name(direction), without);
    for (size_t i = 0; i < step->count && kernels != want; i++)
        if (step->rows[i].direction == direction && step->rows[i].layer == layer)
            printf("     %s %s: %s\n", step->rows[i].op, step->rows[i].shapes, step->rows[i].full);
}

// What a logged step of `layers` layers launches: a layer's ops, `outside` of layers, and a layer's kernels.
typedef struct {
    const char *forward, *backward;
    int layers, outside, a_layer, forward_kernels, backward_kernels;
} StepOps;

// The second of two steps: the first time, matmuls are chosen.
static void report_launches(Tests* t, const char* what, Bench* b, const StepOps* want) {
    enum { MIDDLE = 1 };
    ScopeLog log;
    KernelTrace trace;
    Context* ctx = &b->ctx;
    bench_step(b);
    device_synchronize(ctx);
    const char* why = kernel_trace_start(&trace, ctx);
#ifdef __CUDACC__
    if (why) printf("skip the kernels of a step: %s\n", why);
#endif
    scope_log_open(&log, why ? NULL : &trace);
    if (!why) kernel_trace_collect(&trace), kernel_trace_clear(&trace);
    scope_attach(ctx, &log.observer);
    bench_step(b);
    scope_detach(ctx, &log.observer);
    device_synchronize(ctx);
    for (int layer = 0; layer < want->layers; layer++) {
        report_ops(t, what, &log, FORWARD, layer, want->forward);
        report_ops(t, what, &log, BACKWARD, layer, want->backward);
    }
    int outside = want->outside + (fp32_copies_bytes(&b->m.buffers.table) > 0);
    report(t, fabs((double)log.count - (outside + want->layers * want->a_layer)), 0,
           "%s: and as many ops in the whole step", what);
    if (!why) {
        ProfileStep step;
        kernel_trace_collect(&trace);
        profile_from_log(&step, &log, 1);
        report_kernels(t, what, &log, &step, FORWARD, MIDDLE, want->forward_kernels);
        report_kernels(t, what, &log, &step, BACKWARD, MIDDLE, want->backward_kernels);
        profile_step_free(&step);
    }
    kernel_trace_stop(&trace);
    kernel_trace_free(&trace);
    scope_log_close(&log);
}

// ---------------------------------------------------------------------------------------------------------
// Dropout: what a model drops, by which rate and which stream

// The configuration that this text of a config.json says.
static Config config_of(const char* json) {
    char path[] = "/tmp/llmc_config_XXXXXX";
    int fd = mkstemp(path);
    size_t n = strlen(json);
    if (fd < 0 || write(fd, json, n) != (ssize_t)n || close(fd) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    Config config = config_read(path);
    unlink(path);
    return config;
}

// `sum` [N, C] is x, or 0 where x is NULL, and what dropout `d` has left of something that is nowhere 0. Where it
// drops, that is x; elsewhere it is not, but for what is lost where floatX is short. d.sequences is the host's.
static void report_dropped(Tests* t, const char* what, floatX* sum, floatX* x, int C, Dropout d, Context* ctx) {
    const Sequences* s = d.sequences;
    size_t n = (size_t)s->rows * (size_t)C, kept = 0, lost = 0, not_dropped = 0;
    real *got = device_values(ctx, sum, n, VIEW_FLOATX), *before = x ? device_values(ctx, x, n, VIEW_FLOATX) : NULL;
    for (size_t i = 0; i < n; i++) {
        int row = (int)(i / (size_t)C), is_x = got[i] == (before ? before[i] : 0);
        int is_kept = dropout_factor_ref(d, s->sequence[row], s->position[row], (int)(i % (size_t)C)) != 0;
        kept += (size_t)is_kept, lost += (size_t)(is_kept && is_x), not_dropped += (size_t)(!is_kept && !is_x);
    }
    size_t most = sizeof(floatX) == sizeof(real) ? 0 : n / 20;
    report(t, not_dropped ? INFINITY : (double)lost, (double)most, "%s: %zu of %zu are kept", what, kept, n);
    free(got), free(before);
}

// `out` [N, C] is what attention in this shape makes of qkv; the sequences `s` are on the device.
static void report_attention(Tests* t, const char* what, floatX* out, const floatX* qkv, const Sequences* s,
                             AttentionShape shape, Context* ctx) {
    size_t n = (size_t)s->rows * (size_t)(shape.NH * shape.HS), rows = (size_t)s->rows * (size_t)shape.NH;
    floatX* again = (floatX*)device_alloc(ctx, n * sizeof(floatX), "batch");
    real* lse = (real*)device_alloc(ctx, rows * sizeof(real), "batch");
    attention_forward(again, lse, qkv, s, shape, ctx);
    real *got = device_values(ctx, out, n, VIEW_FLOATX), *want = device_values(ctx, again, n, VIEW_FLOATX);
    report(t, memcmp(got, want, n * sizeof(real)) != 0, 0, "%s", what);
    device_free(again, n * sizeof(floatX)), device_free(lse, rows * sizeof(real));
    free(got), free(want);
}

// A step of training, whose sequences are `host` and on the device `device`, with the rates of config.json: of the
// embeddings, of attention and of a layer's two sums with their residuals. Drawn by (seed, step, layer, site).
typedef struct {
    double embedding, attention, residual;
    Mask mask;
    Sequences host, device;
    floatX* embedded;
    floatX* (*residuals[2])(const Model* m, int l);
} DropoutCheck;

static void report_dropout(Tests* t, const Model* m, const DropoutCheck* c, Context* ctx) {
    static const int sites[] = {SITE_DROPOUT_ATTENTION_OUT, SITE_DROPOUT_MLP_OUT};
    const int C = m->config.C, NH = m->config.NH;
    uint64_t seed = m->buffers.dropout.seed, step = m->buffers.dropout.step;
    Dropout d = dropout_make(c->embedding, seed, step, 0, SITE_DROPOUT_EMBEDDING, &c->host);
    report_dropped(t, "dropout of embeddings", c->embedded, NULL, C, d, ctx);
    for (int l = 0; l < m->config.L; l++) {
        const BlockActs* a = &m->a.h[l];
        AttentionShape shape = {.NH = NH, .HS = C / NH, .mask = c->mask};
        shape.dropout = dropout_make(c->attention, seed, step, l, SITE_DROPOUT_ATTENTION, &c->device);
        report_attention(t, named("dropout of attention, layer %d", l), a->att.v, a->qkv, &c->device, shape, ctx);
        for (int k = 0; k < 2; k++) {
            d = dropout_make(c->residual, seed, step, l, sites[k], &c->host);
            report_dropped(t, named("dropout, layer %d, sum %d", l, k), k ? a->out : a->mid, c->residuals[k](m, l), C,
                           d, ctx);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Equalities and derivatives

// What matmuls of other shapes may differ by, where floatX rounds activations.
static double cut_tolerance(double rounded) {
    return sizeof(floatX) != sizeof(real) ? rounded : sizeof(real) == 8 ? 1e-13 : 1e-6;
}

#ifdef REAL_DOUBLE
// Gradients against finite differences: sharp in the double build, so only there. train(bench) computes the loss and
// the gradients.
static void report_finite_differences(Tests* t, const char* what, ModelBuffers* b, double (*train)(void*),
                                      void* bench) {
    const double tolerance = 1e-8, h = 1e-5;
    const char* where = "";
    double worst = 0;
    for (int i = 0; i < 2; i++) train(bench);  // nothing of the step before stays
    real* analytic = (real*)xmalloc(b->table.elements * sizeof(real));
    memcpy(analytic, b->grads, b->table.elements * sizeof(real));
    for (int k = 0; k < b->table.count; k++) {
        const Tensor* x = &b->table.tensors[k];
        for (int sample = 0; sample < 12; sample++) {
            size_t i = x->offset + philox((uint32_t)k, (uint32_t)sample, 0, 0, 77).v[0] % tensor_elements(x);
            real kept = b->params[i];
            b->params[i] = kept + h;
            double above = train(bench);
            b->params[i] = kept - h;
            double below = train(bench);
            b->params[i] = kept;
            double error = fabs((above - below) / (2 * h) - analytic[i]) / fmax(1, fabs(analytic[i]));
            if (!(error <= worst)) worst = isfinite(error) ? error : INFINITY, where = x->name;
        }
    }
    report(t, worst, tolerance, "finite differences, %s (worst in %s)", what, where);
    free(analytic);
}

// Move biases and layernorms away from their 0 and 1, but not padding.
static void shake_parameters(ModelBuffers* b) {
    for (const Tensor* x = b->table.tensors; x < b->table.tensors + b->table.count; x++)
        for (size_t i = x->offset; i < x->offset + tensor_elements(x); i++)
            if (b->params[i] == 0 || b->params[i] == 1) b->params[i] += 0.1 * rng_normal(11, i);
}
#endif

#endif
