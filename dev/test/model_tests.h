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

static void golden_values(const SafeTensors* file, const char* name, real* out, size_t n) {
    const SafeTensor* entry = safetensors_find(file, name);
    if (!entry || entry->elements != n) die(FAILED, "golden file: \"%s\" is missing or of another size", name);
    safetensors_read_real(file, entry, 0, n, out);
}

#endif
