/* The harness of dev/ops.cu: cases, their memory, comparisons, timing.
 *
 *     case_begin(h, "layernorm/forward N=%d C=%d", N, C);   seeds the random numbers from the case's name
 *     Array x = input(h, n, 1.0), y = output(h, n, SET);    y holds NaN: an element that is not written fails
 *     layernorm_forward(y.device, ..., &h->ctx);
 *     expect_close(h, "y", y, want, tolerance(1e-5));
 *     case_end(h);                                          looks at the canaries, prints one line, frees
 *
 * A comparison passes only if err <= tol, and the bits of both numbers are looked at first: NaN and infinity
 * never pass, whatever the compiler thinks of them. */
#ifndef DEV_OPS_HARNESS_H
#define DEV_OPS_HARNESS_H

#include "../../llmc/base/rng.h"
#include "../../llmc/device/device.h"

#define CANARY_BYTES 256
#define CANARY_VALUE 0xC5

// A buffer of the case. On the CPU all pointers are the same memory.
typedef struct {
    real* host;
    floatX* device;     // for the launchers: weights, activations, gradients
    real* device_real;  // for the launchers: what stays in full precision (statistics, losses, moments)
    real* initial;      // host copy of what it held at first
    size_t n;
} Array;

typedef struct Block {
    struct Block* next;
    unsigned char* memory;
    size_t bytes;  // in use; the canary follows
} Block;

typedef struct {
    Context ctx;
    const char* op;  // the row of the table that runs
    Block* blocks;   // memory of the running case
    char name[160];  // of the running case
    uint64_t key, drawn;
    int comparisons, bad;  // of the running case
    double worst, worst_tolerance;
    int passed, failed;
    double spread;  // of the last bench_seconds: (slowest quarter - fastest quarter) / median
} Harness;

// The tolerance for the type that is built: `single` is meant for float; double is 1e8 times finer.
static inline double tolerance(double single) { return sizeof(real) == sizeof(double) ? 1e-8 * single : single; }

static inline const char* mode_name(Mode mode) { return mode == SET ? "SET" : "ADD"; }

static inline int is_finite_number(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits >> 52 & 0x7ff) != 0x7ff;
}

// ---------------------------------------------------------------------------------------------------------
// Memory of a case

static inline void* case_memory(Harness* h, size_t bytes) {
    Block* block = (Block*)xmalloc(sizeof *block);
    block->bytes = bytes;
    block->memory = (unsigned char*)aligned_alloc(64, round_up(bytes + CANARY_BYTES, 64));
    if (!block->memory) die(FAILED, "out of memory: %zu bytes for %s", bytes, h->name);
    memset(block->memory, 0, bytes);
    memset(block->memory + bytes, CANARY_VALUE, CANARY_BYTES);
    block->next = h->blocks;
    h->blocks = block;
    return block->memory;
}

// Free the case's memory. Returns the number of buffers that were written past their end.
static inline int case_free(Harness* h) {
    int overrun = 0;
    while (h->blocks) {
        Block* block = h->blocks;
        int hurt = 0;
        for (size_t i = 0; i < CANARY_BYTES; i++) hurt |= block->memory[block->bytes + i] != CANARY_VALUE;
        overrun += hurt;
        h->blocks = block->next;
        free(block->memory);
        free(block);
    }
    return overrun;
}

// Forget what a launcher wrote: the buffer is again as it was made.
static inline void array_restore(Array a) {
    if (a.n) memcpy(a.host, a.initial, a.n * sizeof(real));
}

static inline Array array_make(Harness* h, size_t n) {
    Array a;
    a.host = (real*)case_memory(h, n * sizeof(real));
    a.device = (floatX*)a.host;
    a.device_real = a.host;
    a.initial = (real*)case_memory(h, n * sizeof(real));
    a.n = n;
    return a;
}

// Normal random numbers with standard deviation `scale`.
static inline Array input(Harness* h, size_t n, double scale) {
    Array a = array_make(h, n);
    for (size_t i = 0; i < n; i++) a.initial[i] = (real)(scale * rng_normal(h->key, h->drawn++));
    array_restore(a);
    return a;
}

// For an output: NaN where the op has to write everything (SET), numbers where it adds to them (ADD).
static inline Array output(Harness* h, size_t n, Mode mode) {
    if (mode == ADD) return input(h, n, 1.0);
    Array a = array_make(h, n);
    memset(a.initial, 0xff, n * sizeof(real));
    array_restore(a);
    return a;
}

// A host copy of what the array holds now, for a reference to write to.
static inline real* copy_of(Harness* h, Array a) {
    real* copy = (real*)case_memory(h, a.n * sizeof(real));
    if (a.n) memcpy(copy, a.host, a.n * sizeof(real));
    return copy;
}

static inline int* int_array(Harness* h, size_t n) { return (int*)case_memory(h, n * sizeof(int)); }

// A number in 0 .. n - 1.
static inline int random_below(Harness* h, int n) {
    return (int)(rng_uniform(philox((uint32_t)h->drawn++, 0, 1, 0, h->key).v[0]) * n);
}

// Sequences of the given lengths, as if `first` sequences of the step lay before them.
static inline Sequences sequences_of(Harness* h, const int* lengths, int count, int first) {
    Sequences s;
    int* cu_seqlens = int_array(h, (size_t)count + 1);
    s.count = count;
    s.first = first;
    s.rows = s.max_length = 0;
    s.squares = 0;
    for (int i = 0; i < count; i++) {
        s.rows += lengths[i];
        s.squares += (int64_t)lengths[i] * lengths[i];
        s.max_length = max_int(s.max_length, lengths[i]);
        cu_seqlens[i + 1] = s.rows;
    }
    int* sequence = int_array(h, (size_t)s.rows);
    int* position = int_array(h, (size_t)s.rows);
    for (int i = 0; i < count; i++)
        for (int t = 0; t < lengths[i]; t++) {
            sequence[cu_seqlens[i] + t] = i;
            position[cu_seqlens[i] + t] = t;
        }
    s.cu_seqlens = cu_seqlens;
    s.sequence = sequence;
    s.position = position;
    return s;
}

// ---------------------------------------------------------------------------------------------------------
// Cases

// The random numbers depend on the case's name only, so a case that runs alone sees the same ones.
__attribute__((format(printf, 2, 3))) static inline void case_begin(Harness* h, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(h->name, sizeof h->name, format, args);
    va_end(args);
    h->key = 0xcbf29ce484222325u;
    for (const char* c = h->name; *c; c++) h->key = (h->key ^ (unsigned char)*c) * 0x100000001b3u;
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
    if (overrun) case_fail(h, "wrote past the end of %d buffer%s", overrun, overrun > 1 ? "s" : "");
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

// |got - want| <= tol * max(1, |want|)
static inline void expect_close(Harness* h, const char* what, Array got, const real* want, double tol) {
    Comparison c = {0, 0, 0, 0};
    for (size_t i = 0; i < got.n; i++) comparison_add(&c, i, got.host[i], want[i], fmax(1, fabs(want[i])), tol);
    if (got.n) comparison_report(h, what, &c, got.host[c.first], want[c.first], tol);
}

// |got - want| <= tol * magnitude, where magnitude[i] is the sum of the absolute values that made want[i].
static inline void expect_close_to_sum(Harness* h, const char* what, Array got, const real* want, const real* magnitude,
                                       double tol) {
    Comparison c = {0, 0, 0, 0};
    for (size_t i = 0; i < got.n; i++)
        comparison_add(&c, i, got.host[i], want[i], fmax(1e-30, fabs(magnitude[i])), tol);
    if (got.n) comparison_report(h, what, &c, got.host[c.first], want[c.first], tol);
}

// Bit for bit. NaN equals the same NaN: an untouched destination can be expected too.
static inline void expect_equal(Harness* h, const char* what, Array got, const real* want) {
    size_t wrong = 0, first = 0;
    for (size_t i = got.n; i-- > 0;)
        if (memcmp(&got.host[i], &want[i], sizeof(real)) != 0) {
            wrong++;
            first = i;
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

// run(state) must give the same bits in every array for any number of threads. Each run starts from the
// arrays as they were made (so ADD, and work in place, is no special case); the last result stays in them.
static inline void expect_same_for_any_threads(Harness* h, const char* what, void (*run)(void* state), void* state,
                                               const Array* arrays, int count) {
    static const int threads[] = {1, 2, 3, 4};
    real* first[8];
    CHECK(count <= (int)COUNT_OF(first));
#ifdef _OPENMP
    int usual = omp_get_max_threads();
#endif
    for (size_t k = 0; k < COUNT_OF(threads); k++) {
        for (int i = 0; i < count; i++) array_restore(arrays[i]);
#ifdef _OPENMP
        omp_set_num_threads(threads[k]);
#endif
        run(state);
        for (int i = 0; i < count; i++) {
            char label[96];
            snprintf(label, sizeof label, "%s, array %d, %d threads", what, i, threads[k]);
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

// ---------------------------------------------------------------------------------------------------------
// Timing

static inline int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// Median seconds of run(state), after a warm-up: at least 5 runs, at most 100, about a second in all.
static inline double bench_seconds(Harness* h, void (*run)(void* state), void* state) {
    double seconds[100], total = 0;
    int n = 0;
    run(state);
    while (n < (int)COUNT_OF(seconds) && (n < 5 || total < 1)) {
        double start = now_seconds();
        run(state);
        seconds[n] = now_seconds() - start;
        total += seconds[n++];
    }
    qsort(seconds, (size_t)n, sizeof *seconds, compare_doubles);
    h->spread = (seconds[3 * n / 4] - seconds[n / 4]) / seconds[n / 2];
    return seconds[n / 2];
}

static inline void bench_report(Harness* h, const char* name, const char* shapes, double seconds, double flops,
                                double bytes) {
    printf("%-26s %-34s %10.1f us (+-%2.0f %%)  %7.2f GFLOP/s  %7.2f GB/s\n", name, shapes, 1e6 * seconds,
           50 * h->spread, 1e-9 * flops / seconds, 1e-9 * bytes / seconds);
    fflush(stdout);
}

#endif
