/* What the tests of a whole model share: counting, comparing, golden files. Included after the trainer. */
#ifndef DEV_MODEL_TESTS_H
#define DEV_MODEL_TESTS_H

typedef struct {
    int passed, failed;
} Tests;

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

// What the plan says of each kind of memory against what was allocated for a model, its optimizer and a batch, and against
// the scratch of the steps that were run.
static void report_memory(Tests* t, const char* what, const MemoryPlan* plan, const Context* ctx) {
    size_t planned = 0, counted = 0;
    char name[192];
    for (int i = 0; i < PLAN_PARTS; i++) {
        size_t want = plan->part[i].bytes, got = 0;
        int is_scratch = strcmp(plan->part[i].name, "scratch") == 0;
        for (int k = 0; k < MEMORY_CATEGORIES && ctx->memory[k].name; k++)
            if (strcmp(ctx->memory[k].name, plan->part[i].name) == 0) got = ctx->memory[k].bytes;
        if (is_scratch) got = ctx->scratch_bytes;
        else planned += want;
        snprintf(name, sizeof name, "%s: %s, %zu bytes of %zu planned", what, plan->part[i].name, got, want);
        // Scratch is planned for the largest blocks that a product may be cut into, and for as many blocks of threads as a
        // GPU may hold and a batch of other lengths may need: more than a step takes, but not twice as much.
        report(t, is_scratch ? got > 0 && got <= want && want <= 2 * got : got == want, name, 0, 0);
    }
    for (int k = 0; k < MEMORY_CATEGORIES; k++) counted += ctx->memory[k].bytes;
    snprintf(name, sizeof name, "%s: nothing else, %zu bytes of %zu planned", what, counted, planned);
    report(t, counted == planned, name, 0, 0);
}

static void golden_values(const SafeTensors* file, const char* name, real* out, size_t n) {
    const SafeTensor* entry = safetensors_find(file, name);
    if (!entry || entry->elements != n) die(FAILED, "golden file: \"%s\" is missing or of another size", name);
    safetensors_read_real(file, entry, 0, n, out);
}

#endif
