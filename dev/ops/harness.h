/* The harness of dev/ops.cu: cases and comparisons. arrays.h allocates their memory, timing.h measures time.
 *
 *     case_begin(h, "layernorm/forward N=%d C=%d", N, C);   seeds the random numbers from the case's name
 *     Array x = input(h, n, 1.0), y = output(h, n, SET);    y holds NaN: an element that is not written fails
 *     layernorm_forward(y.device, ..., &h->ctx);
 *     expect_close(h, "y", y, want, tolerance(1e-5));
 *     case_end(h);                                          checks the canaries, prints one line, frees
 *
 * A comparison passes only if err <= tol. It checks the bits of both values first: NaN and infinity never pass,
 * whatever the compiler assumes about them. */
#ifndef DEV_OPS_HARNESS_H
#define DEV_OPS_HARNESS_H

#include "arrays.h"
#include "llmc/profile/scope_log.h"
#include "timing.h"

// The tolerance for the type of the build. `single` is for float on the CPU and the GPU. It is at most 1e-5, unless a
// case explains why not. For double the tolerance is 1e8 times smaller. array_rounding() accounts for floatX.
static inline double tolerance(double single) { return sizeof(real) == sizeof(double) ? 1e-8 * single : single; }

static inline const char* mode_name(Mode mode) { return mode == SET ? "SET" : "ADD"; }

static inline int is_finite_number(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits >> 52 & 0x7ff) != 0x7ff;
}

// ---------------------------------------------------------------------------------------------------------
// Cases

// Of a quick test, by the number of its elements.
static inline int case_is_left_out(const Harness* h, double elements) { return h->is_quick && elements > 100000; }

// The random numbers depend on the case's name only, so a case that runs alone sees the same ones.
__attribute__((format(printf, 2, 3))) static inline void case_begin(Harness* h, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(h->name, sizeof h->name, format, args);
    va_end(args);
    h->key = fnv_update(FNV_START, h->name, strlen(h->name));
    h->drawn = 0;
    h->comparisons = h->bad = 0;
    h->worst = h->worst_tolerance = 0;
}

__attribute__((format(printf, 2, 3))) static inline void case_fail(Harness* h, const char* format, ...) {
    va_list args;
    va_start(args, format);
    printf("FAIL %s  ", h->name);
    vprintf(format, args);
    putchar('\n');
    va_end(args);
    h->bad++;
}

static inline void case_end(Harness* h) {
    int overrun = case_free(h);
    if (overrun) case_fail(h, "wrote outside of %d buffer%s", overrun, overrun > 1 ? "s" : "");
    if (!h->comparisons) case_fail(h, "compared nothing");
    if (h->bad) {
        h->failed++;
        return;
    }
    h->passed++;
    if (h->worst_tolerance > 0) printf("ok   %s  err=%.1e tol=%.0e\n", h->name, h->worst, h->worst_tolerance);
    else printf("ok   %s  exact\n", h->name);
}

// ---------------------------------------------------------------------------------------------------------
// Comparisons

typedef struct {
    size_t count, first;  // elements that fail, and the first of them
    double error;         // the largest; of what is not finite nothing is said
    int compared;
} Comparison;

// Add element i, whose error counts against `scale`.
static inline void comparison_add(Comparison* c, size_t i, double got, double want, double scale, double tol) {
    int finite = is_finite_number(got) && is_finite_number(want) && is_finite_number(scale);
    double error = finite ? fabs(got - want) / scale : 0;
    if (error > c->error) c->error = error;
    c->compared = 1;
    if (finite && error <= tol) return;
    if (!c->count++) c->first = i;
}

static inline void comparison_report(Harness* h, const char* what, const Comparison* c, double got, double want,
                                     double tol) {
    h->comparisons += c->compared;
    if (c->count)
        case_fail(h, "%s[%zu] is %.9g, expected %.9g (%zu wrong; err=%.1e tol=%.0e)", what, c->first, got, want,
                  c->count, c->error, tol);
    else if (tol > 0 && (h->worst_tolerance == 0 || c->error / tol > h->worst / h->worst_tolerance)) {
        h->worst = c->error;
        h->worst_tolerance = tol;
    }
}

// |got - want| <= tol * magnitude, where magnitude[i] is the sum of the absolute values that made want[i]; NULL: the
// magnitude is max(1, |want|).
static inline void expect_close_to_sum(Harness* h, const char* what, Array got, const real* want, const real* magnitude,
                                       double tol) {
    Comparison c = {0, 0, 0, 0};
    array_download(got);
    tol += array_rounding(got);
    for (size_t i = 0; i < got.n; i++) {
        double scale = magnitude ? fmax(1e-30, fabs((double)magnitude[i])) : fmax(1, fabs((double)want[i]));
        comparison_add(&c, i, got.host[i], want[i], scale, tol);
    }
    if (got.n) comparison_report(h, what, &c, got.host[c.first], want[c.first], tol);
}

static inline void expect_close(Harness* h, const char* what, Array got, const real* want, double tol) {
    expect_close_to_sum(h, what, got, want, NULL, tol);
}

// Bit for bit, in the type in which the array is stored. NaN equals the same NaN: an untouched destination can be
// expected too.
static inline void expect_equal(Harness* h, const char* what, Array got, const real* want) {
    size_t wrong = 0, first = 0;
    array_download(got);
    for (size_t i = got.n; i-- > 0;) {
        real expected = array_stored(got, want[i]);
        if (memcmp(&got.host[i], &expected, sizeof(real)) != 0) {
            wrong++;
            first = i;
        }
    }
    h->comparisons++;
    if (wrong)
        case_fail(h, "%s[%zu] is %.9g, expected exactly %.9g (%zu differ)", what, first, (double)got.host[first],
                  (double)want[first], wrong);
}

// One number: |got - want| <= tol.
static inline void expect_within(Harness* h, const char* what, double got, double want, double tol) {
    Comparison c = {0, 0, 0, 0};
    comparison_add(&c, 0, got, want, 1, tol);
    comparison_report(h, what, &c, got, want, tol);
}

static inline void expect_true(Harness* h, const char* what, int condition) {
    h->comparisons++;
    if (!condition) case_fail(h, "%s does not hold", what);
}

// Time run(state). Its name, shapes, flops and bytes are those of the scopes that it opens.
static inline void bench(Harness* h, const char* suffix, void (*run)(void* state), void* state) {
    ScopeLog log;
    double flops = 0, bytes = 0;
    char name[96];
    scope_log_open(&log, NULL);
    scope_attach(&h->ctx, &log.observer);
    run(state);
    scope_detach(&h->ctx, &log.observer);
    CHECK(log.count > 0);
    for (size_t i = 0; i < log.count; i++)
        if (log.records[i].outer == NO_SCOPE) flops += log.records[i].scope.flops, bytes += log.records[i].scope.bytes;
    snprintf(name, sizeof name, "%s%s", log.records->scope.op, suffix);
    bench_report(h, name, log.records->scope.shapes, bench_seconds(h, run, state), flops, bytes);
    scope_log_close(&log);
}

// run(state) must give the same bits in every array for any number of threads; on the GPU, in every run. Each run
// starts from the arrays as they were made (so ADD, and work in place, is not a special case); the last result stays.
static inline void expect_same_for_any_threads(Harness* h, const char* what, void (*run)(void* state), void* state,
                                               const Array* arrays, int count) {
    static const int threads[] = {1, 2, 3, 4};
    size_t runs = HAS_DEVICE_MEMORY ? 2 : COUNT_OF(threads);
    real* first[8] = {NULL};
    CHECK(count <= (int)COUNT_OF(first));
#ifdef _OPENMP
    int usual = omp_get_max_threads();
#endif
    for (size_t k = 0; k < runs; k++) {
        for (int i = 0; i < count; i++) array_restore(arrays[i]);
#ifdef _OPENMP
        omp_set_num_threads(threads[k]);
#endif
        run(state);
        for (int i = 0; i < count; i++) {
            char label[96];
            if (HAS_DEVICE_MEMORY) snprintf(label, sizeof label, "%s, array %d, run again", what, i);
            else snprintf(label, sizeof label, "%s, array %d, %d threads", what, i, threads[k]);
            if (k == 0) first[i] = copy_of(h, arrays[i]);
            else expect_equal(h, label, arrays[i], first[i]);
        }
    }
#ifdef _OPENMP
    omp_set_num_threads(usual);
#endif
}

// Central differences of loss(state) in the elements of x against `gradient`: error against max(1, |gradient|).
// Every element of a small array, a seeded choice of a large one. Sharp in the double build only.
static inline void expect_gradient(Harness* h, const char* what, double (*loss)(void* state), void* state, real* x,
                                   size_t n, const real* gradient, double tol) {
    Comparison c = {0, 0, 0, 0};
    size_t tries = min_size(n, 64), index = 0;
    double got = 0, want = 0;
    for (size_t k = 0; k < tries; k++) {
        size_t i = n <= 64 ? k : (size_t)rng_permute(k, n, h->key);
        real kept = x[i];
        double step = 1e-5 * fmax(1, fabs((double)kept));
        x[i] = (real)(kept + step);
        double above = loss(state);
        x[i] = (real)(kept - step);
        double below = loss(state);
        x[i] = kept;
        double difference = (above - below) / (2 * step);
        size_t before = c.count;
        comparison_add(&c, i, gradient[i], difference, fmax(1, fabs((double)gradient[i])), tol);
        if (c.count == 1 && before == 0) index = i, got = gradient[i], want = difference;
    }
    c.first = index;
    if (n) comparison_report(h, what, &c, got, want, tol);
}

#endif
