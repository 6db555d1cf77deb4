/* What the tests of a whole model share: counting, comparing, golden files. Included after the trainer. */
#ifndef DEV_MODEL_TESTS_H
#define DEV_MODEL_TESTS_H

#include "dev/test/tests.h"

static void report(Tests* t, int ok, const char* name, double error, double tolerance) {
    printf("%s %s  err=%.3g tol=%.3g\n", ok ? "ok  " : "FAIL", name, error, tolerance);
    if (ok) t->passed++;
    else t->failed++;
}

// Largest |got - want| / max(1, |want|); infinite where either is not finite.
static double largest_error(const real* got, const real* want, size_t n) {
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        double g = (double)got[i], w = (double)want[i], error = fabs(g - w) / fmax(1, fabs(w));
        if (!isfinite(g) || !isfinite(w)) return INFINITY;
        if (!(error <= worst)) worst = error;
    }
    return worst;
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

// A large epsilon in config.json is that of every layernorm: each row's rstd is 1 / sqrt(variance + epsilon).
static double epsilon_error(Context* ctx, floatX* x, real* rstd, int rows, int C, double eps) {
    real *values = device_values(ctx, x, (size_t)rows * (size_t)C, VIEW_FLOATX),
         *got = device_values(ctx, rstd, (size_t)rows, VIEW_REAL);
    double worst = 0;
    for (int n = 0; n < rows; n++) {
        const real* row = values + (size_t)n * (size_t)C;
        double mean = 0, variance = 0;
        for (int c = 0; c < C; c++) mean += (double)row[c] / C;
        for (int c = 0; c < C; c++) variance += ((double)row[c] - mean) * ((double)row[c] - mean) / C;
        worst = fmax(worst, fabs((double)got[n] * sqrt(variance + eps) - 1));
    }
    free(values), free(got);
    return worst;
}

// Weight decay is for matrices: not for biases and layernorms, which are the vectors.
static void report_decay(Tests* t, const TensorTable* table) {
    const char* wrong = NULL;
    for (int i = 0; i < table->count; i++)
        if (table->tensors[i].decay != (table->tensors[i].ndim == 2)) wrong = table->tensors[i].name;
    char* name = xprintf("weight decay of %s", wrong ? wrong : "all matrices, and of nothing else");
    report(t, !wrong, name, 0, 0);
    free(name);
}

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
        double error = largest_error(got + tensor->offset, p + tensor->offset, tensor->size);
        char* name = xprintf("NorMuon's step: %s", tensor->name);
        report(t, error <= tolerance, name, error, tolerance);
        free(name);
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
    char* name = xprintf("%s: %zu bytes of %zu planned", what, ctx->allocated, planned);
    report(t, ctx->allocated == planned, name, 0, 0);
    free(name);
    // Scratch is planned for the largest blocks that a product may be cut into, and for as many blocks of threads as a
    // GPU may hold and a batch of other lengths may need: more than a step takes, but not twice as much. It is that of
    // a step where only the forward pass is run, too.
    name = xprintf("%s: scratch, %zu bytes of %zu planned", what, used, scratch);
    report(t, used <= scratch && (plan->forward_only || (used > 0 && scratch <= 2 * used)), name, 0, 0);
    free(name);
}

// The plan of forward passes only has the same parameters as training, and hardly more.
static void report_forward_alone(Tests* t, const MemoryPlan* alone, const MemoryPlan* training) {
    enum { PLAN_PARAMETERS, PLAN_GRADIENTS, PLAN_STATE, PLAN_ACTIVATIONS };
    int good = alone->part[PLAN_PARAMETERS].bytes == training->part[PLAN_PARAMETERS].bytes &&
               alone->part[PLAN_GRADIENTS].bytes == 0 &&
               16 * alone->part[PLAN_STATE].bytes < training->part[PLAN_STATE].bytes &&
               3 * alone->part[PLAN_ACTIVATIONS].bytes < 2 * training->part[PLAN_ACTIVATIONS].bytes;
    char* name =
        xprintf("forward passes only: %zu bytes, training %zu", memory_plan_bytes(alone), memory_plan_bytes(training));
    report(t, good, name, 0, 0);
    free(name);
}

// ---------------------------------------------------------------------------------------------------------
// The ops of a step by name, and on the GPU its kernels: a fusion that is lost is one more

typedef struct {
    ScopeLog log;
    KernelTrace trace;
    int is_tracing;
} LoggedStep;

// What is launched from here on is logged. The same was run before: the first time, matmuls are chosen.
static void logged_begin(LoggedStep* s, Context* ctx) {
    device_synchronize(ctx);
    const char* why = kernel_trace_start(&s->trace, ctx);
    s->is_tracing = !why;
#ifdef __CUDACC__
    if (why) printf("skip the kernels of a step: %s\n", why);
#endif
    scope_log_open(&s->log, s->is_tracing ? &s->trace : NULL);
    if (s->is_tracing) {
        kernel_trace_collect(&s->trace);
        kernel_trace_clear(&s->trace);
    }
    scope_attach(ctx, &s->log.observer);
}

static void logged_end(LoggedStep* s, Context* ctx) {
    scope_detach(ctx, &s->log.observer);
    device_synchronize(ctx);
    if (s->is_tracing) kernel_trace_collect(&s->trace);
}

static void logged_close(LoggedStep* s) {
    kernel_trace_stop(&s->trace);
    kernel_trace_free(&s->trace);
    scope_log_close(&s->log);
}

// `want`: the ops of a layer in one direction, a space after each.
static void report_ops(Tests* t, const char* what, const LoggedStep* s, Direction direction, int layer,
                       const char* want) {
    Text ops = {NULL, 0, 0};
    char* name = xprintf("%s: the ops of layer %d, %s", what, layer, direction_name(direction));
    text_append(&ops, "", 0);
    for (size_t i = 0; i < s->log.count; i++)
        if (s->log.records[i].scope.direction == direction && s->log.records[i].scope.layer == layer)
            text_printf(&ops, "%s ", s->log.records[i].scope.op);
    int same = strcmp(ops.text, want) == 0;
    if (!same) printf("got  %s\nwant %s\n", ops.text, want);
    report(t, same, name, !same, 0);
    free(ops.text), free(name);
}

// Kernels of a layer in one direction: neither fills and copies, nor cuBLASLt's helper kernels. Not in full precision,
// whose attention launches one kernel per sequence. Every op has launched something.
static void report_kernels(Tests* t, const char* what, const LoggedStep* s, const ProfileStep* step,
                           Direction direction, int layer, int want) {
    int kernels = 0, ops = 0, without = 0, is_full_precision = sizeof(floatX) == sizeof(real);
    if (is_full_precision) return;
    for (size_t i = 0; i < step->count; i++) {
        const ProfileRow* row = &step->rows[i];
        if (row->direction != direction || row->layer != layer || !*row->op) continue;
        kernels += row->grid[0] && !strstr(row->full, "cublasLt::");
        ops += !row->is_helper;
    }
    for (size_t i = 0; i < s->log.count; i++)
        without += s->log.records[i].scope.direction == direction && s->log.records[i].scope.layer == layer;
    without -= ops;
    char* name = xprintf("%s: %d kernels of layer %d, %s, and %d ops without any", what, kernels, layer,
                         direction_name(direction), without);
    report(t, kernels == want && without == 0, name, kernels, want);
    for (size_t i = 0; i < step->count && kernels != want; i++)
        if (step->rows[i].direction == direction && step->rows[i].layer == layer)
            printf("     %s %s: %s\n", step->rows[i].op, step->rows[i].shapes, step->rows[i].full);
    free(name);
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
    char* name = xprintf("%s: %zu of %zu are kept", what, kept, n);
    report(t, not_dropped == 0 && lost <= most, name, (double)(not_dropped + lost), (double)most);
    free(name), free(got), free(before);
}

// `out` [N, C] is what attention in this shape makes of qkv; the sequences `s` are on the device.
static void report_attention(Tests* t, const char* what, floatX* out, const floatX* qkv, const Sequences* s,
                             AttentionShape shape, Context* ctx) {
    size_t n = (size_t)s->rows * (size_t)(shape.NH * shape.HS), rows = (size_t)s->rows * (size_t)shape.NH;
    floatX* again = (floatX*)device_alloc(ctx, n * sizeof(floatX), "batch");
    real* lse = (real*)device_alloc(ctx, rows * sizeof(real), "batch");
    attention_forward(again, lse, qkv, s, shape, ctx);
    real *got = device_values(ctx, out, n, VIEW_FLOATX), *want = device_values(ctx, again, n, VIEW_FLOATX);
    report(t, memcmp(got, want, n * sizeof(real)) == 0, what, largest_error(got, want, n), 0);
    device_free(again, n * sizeof(floatX)), device_free(lse, rows * sizeof(real));
    free(got), free(want);
}

static void golden_values(const SafeTensors* file, const char* name, real* out, size_t n) {
    const SafeTensor* entry = safetensors_find(file, name);
    if (!entry || entry->elements != n) die(FAILED, "golden file: \"%s\" is missing or of another size", name);
    safetensors_read_real(entry, 0, n, out);
}

#endif
