/* The harness of dev/ops.cu: cases, their memory, comparisons, timing.
 *
 *     case_begin(h, "layernorm/forward N=%d C=%d", N, C);   seeds the random numbers from the case's name
 *     Array x = input(h, n, 1.0), y = output(h, n, SET);    y holds NaN: an element that is not written fails
 *     layernorm_forward(y.device, ..., &h->ctx);
 *     expect_close(h, "y", y, want, tolerance(1e-5));
 *     case_end(h);                                          looks at the canaries, prints one line, frees
 *
 * A comparison passes only if err <= tol, and the bits of both numbers are looked at first: NaN and infinity
 * never pass, whatever the compiler thinks of them.
 *
 * On the GPU an array is three buffers: `host` for references, `device` (floatX) and `device_real` for launchers.
 * input, output and array_restore fill all three with the same numbers, rounded to floatX; comparisons and copy_of
 * download whichever device buffer a launcher changed. A case that writes `host` itself calls array_upload before
 * a launcher reads it; one that reads `host` itself calls array_download after the launcher. On the CPU all three
 * are the same memory and both calls do nothing. */
#ifndef DEV_OPS_HARNESS_H
#define DEV_OPS_HARNESS_H

#include <float.h>

#include "llmc/base/rng.h"
#include "llmc/device/device.h"
#include "llmc/device/scope.h"

#define CANARY_BYTES 256
#define CANARY_VALUE 0xC5
#define INPUT_PERIOD 1048573  // a prime: rows of no width repeat

#ifdef __CUDACC__
enum { HAS_DEVICE_MEMORY = 1 };
#else
enum { HAS_DEVICE_MEMORY = 0 };
#endif

// A buffer of the case. On the CPU all pointers but `initial` are the same memory.
typedef struct {
    real* host;
    floatX* device;     // for the launchers: weights, activations, gradients
    real* device_real;  // for the launchers: what stays in full precision (statistics, losses, moments)
    real* initial;      // host copy of what it held at first
    size_t n;
#ifdef __CUDACC__
    floatX* seen;  // host copies of what the device buffers held at the last transfer
    real* seen_real;
    int* rounded;  // source of the numbers in `host`: 1: floatX buffer, 0: real one, 2: no launcher wrote either
#endif
} Array;

// Where a block lies: ordinary memory, host memory that kernels can read too, or device memory.
typedef enum { ON_HOST, ON_BOTH, ON_DEVICE } Place;

typedef struct Block {
    struct Block* next;
    Place place;
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
    double spread;       // of the last bench_seconds: (slowest quarter - fastest quarter) / median
    double ceiling_gbs;  // measured ceilings of this machine; 0: not known
    double ceiling_tflops;
    void* flush;  // GPU: what is read between timed runs, so that they find no operand in the L2
} Harness;

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
// Memory of a case

// Zero-filled memory with a canary behind its last byte.
static inline void* case_block(Harness* h, size_t bytes, Place place) {
    Block* block = (Block*)xmalloc(sizeof *block);
    block->bytes = bytes;
    block->place = place;
    block->next = h->blocks;
    h->blocks = block;
#ifdef __CUDACC__
    if (place == ON_DEVICE) {
        cudaCheck(cudaMalloc(&block->memory, bytes + CANARY_BYTES));
        cudaCheck(cudaMemset(block->memory, 0, bytes));
        cudaCheck(cudaMemset(block->memory + bytes, CANARY_VALUE, CANARY_BYTES));
        cudaCheck(cudaDeviceSynchronize());
        return block->memory;
    }
    if (place == ON_BOTH) cudaCheck(cudaMallocHost(&block->memory, bytes + CANARY_BYTES));
    else
#endif
        block->memory = (unsigned char*)aligned_alloc(64, round_up(bytes + CANARY_BYTES, 64));
    if (!block->memory) die(FAILED, "out of memory: %zu bytes for %s", bytes, h->name);
    memset(block->memory, 0, bytes);
    memset(block->memory + bytes, CANARY_VALUE, CANARY_BYTES);
    return block->memory;
}

// For the case itself and its references; launchers must not be given it.
static inline void* case_memory(Harness* h, size_t bytes) { return case_block(h, bytes, ON_HOST); }

// For what both the case and launchers read (indices, spans): the same pointer serves both.
static inline void* pinned_memory(Harness* h, size_t bytes) { return case_block(h, bytes, ON_BOTH); }

static inline int canary_hurt(const Block* block) {
    unsigned char copy[CANARY_BYTES];
    int hurt = 0;
#ifdef __CUDACC__
    if (block->place == ON_DEVICE)
        cudaCheck(cudaMemcpy(copy, block->memory + block->bytes, CANARY_BYTES, cudaMemcpyDeviceToHost));
    else
#endif
        memcpy(copy, block->memory + block->bytes, CANARY_BYTES);
    for (size_t i = 0; i < CANARY_BYTES; i++) hurt |= copy[i] != CANARY_VALUE;
    return hurt;
}

// Free the case's memory. Returns the number of buffers that were written past their end.
static inline int case_free(Harness* h) {
    int overrun = 0;
    device_synchronize(&h->ctx);
    while (h->blocks) {
        Block* block = h->blocks;
        overrun += canary_hurt(block);
        h->blocks = block->next;
#ifdef __CUDACC__
        if (block->place == ON_DEVICE) cudaCheck(cudaFree(block->memory));
        if (block->place == ON_BOTH) cudaCheck(cudaFreeHost(block->memory));
#endif
        if (block->place == ON_HOST || !HAS_DEVICE_MEMORY) free(block->memory);
        free(block);
    }
    return overrun;
}

#ifdef __CUDACC__

// To the nearest number that floatX can hold; NaN keeps its bits.
static inline real round_to_floatX(real x) { return x == x ? (real)(float)(floatX)(float)x : x; }

// Everything in `host`, unrounded where a launcher reads device_real: for what stays in full precision.
static inline void array_upload_real(Array a) {
    if (!a.n) return;
    for (size_t i = 0; i < a.n; i++) {
        a.seen[i] = (floatX)(float)a.host[i];
        a.seen_real[i] = a.host[i];
        if (a.host[i] != a.host[i]) memset((void*)&a.seen[i], 0xff, sizeof(floatX));
    }
    cudaCheck(cudaDeviceSynchronize());  // no launch is still at work on the array
    cudaCheck(cudaMemcpy(a.device, a.seen, a.n * sizeof(floatX), cudaMemcpyHostToDevice));
    cudaCheck(cudaMemcpy(a.device_real, a.seen_real, a.n * sizeof(real), cudaMemcpyHostToDevice));
    cudaCheck(cudaDeviceSynchronize());  // cudaMemcpy may return before its last bytes arrived
    *a.rounded = 2;
}

// Round `host` to floatX and hand it to the device.
static inline void array_upload(Array a) {
    for (size_t i = 0; i < a.n; i++) a.host[i] = round_to_floatX(a.host[i]);
    array_upload_real(a);
}

// Bring into `host` what a launcher changed since the last transfer, in either of the buffers.
static inline void array_download(Array a) {
    if (!a.n) return;
    size_t bytes = a.n * sizeof(floatX), bytes_real = a.n * sizeof(real);
    floatX* now = (floatX*)xmalloc(bytes);
    real* now_real = (real*)xmalloc(bytes_real);
    cudaCheck(cudaDeviceSynchronize());
    cudaCheck(cudaMemcpy(now, a.device, bytes, cudaMemcpyDeviceToHost));
    cudaCheck(cudaMemcpy(now_real, a.device_real, bytes_real, cudaMemcpyDeviceToHost));
    int changed = memcmp(now, a.seen, bytes) != 0, changed_real = memcmp(now_real, a.seen_real, bytes_real) != 0;
    if (changed && changed_real) die(FAILED, "a case wrote an array both as floatX and as real");
    for (size_t i = 0; i < a.n && changed; i++)
        if (memcmp(&now[i], &a.seen[i], sizeof(floatX)) != 0) a.host[i] = (real)(float)now[i];
    for (size_t i = 0; i < a.n && changed_real; i++)
        if (memcmp(&now_real[i], &a.seen_real[i], sizeof(real)) != 0) a.host[i] = now_real[i];
    if (changed || changed_real) *a.rounded = changed;
    memcpy(a.seen, now, bytes);
    memcpy(a.seen_real, now_real, bytes_real);
    free(now);
    free(now_real);
}

// What storing a result in floatX adds to its error, relative to the result: half a unit in the last place, which is
// 2^-8 for the 8 significant bits of bf16 and 2^-11 for the 11 of fp16. Nothing where it was stored in real.
static inline double array_rounding(Array a) {
    if (!*a.rounded || sizeof(floatX) == sizeof(real)) return 0;
#ifdef PRECISION_FP16
    return 1.0 / 2048;
#else
    return 1.0 / 256;
#endif
}

// Numbers smaller than this are rounded as coarsely as it is.
static inline double array_smallest(Array a) {
#ifdef PRECISION_FP16
    return *a.rounded ? 1.0 / 16384 : 0;
#else
    return *a.rounded ? FLT_MIN : 0;
#endif
}

// The bits that `want` has in the type in which the array was stored.
static inline real array_stored(Array a, real want) { return *a.rounded == 1 ? round_to_floatX(want) : want; }

#else

static inline void array_upload(Array a) { (void)a; }
static inline void array_upload_real(Array a) { (void)a; }
static inline void array_download(Array a) { (void)a; }

static inline double array_rounding(Array a) {
    (void)a;
    return 0;
}

static inline double array_smallest(Array a) {
    (void)a;
    return 0;
}

static inline real array_stored(Array a, real want) {
    (void)a;
    return want;
}

#endif

// Forget what a launcher wrote: the buffer is again as it was made.
static inline void array_restore(Array a) {
    if (a.n) memcpy(a.host, a.initial, a.n * sizeof(real));
    array_upload_real(a);
}

static inline Array array_make(Harness* h, size_t n) {
    Array a;
    a.host = (real*)case_memory(h, n * sizeof(real));
    a.initial = (real*)case_memory(h, n * sizeof(real));
    a.n = n;
#ifdef __CUDACC__
    a.device = (floatX*)case_block(h, n * sizeof(floatX), ON_DEVICE);
    a.device_real = (real*)case_block(h, n * sizeof(real), ON_DEVICE);
    a.seen = (floatX*)case_memory(h, n * sizeof(floatX));
    a.seen_real = (real*)case_memory(h, n * sizeof(real));
    a.rounded = (int*)case_memory(h, sizeof(int));
#else
    a.device = (floatX*)a.host;
    a.device_real = a.host;
#endif
    return a;
}

// Normal random numbers with standard deviation `scale`; large arrays, which only a bench has, repeat them.
static inline Array input(Harness* h, size_t n, double scale) {
    Array a = array_make(h, n);
    for (size_t i = 0; i < n; i++)
        a.initial[i] = i < INPUT_PERIOD ? (real)(scale * rng_normal(h->key, h->drawn++)) : a.initial[i - INPUT_PERIOD];
#ifdef __CUDACC__
    for (size_t i = 0; i < n; i++) a.initial[i] = round_to_floatX(a.initial[i]);
#endif
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
    array_download(a);
    if (a.n) memcpy(copy, a.host, a.n * sizeof(real));
    return copy;
}

static inline int* int_array(Harness* h, size_t n) { return (int*)pinned_memory(h, n * sizeof(int)); }

// For a bench: a copy that a launcher reads at full speed (pinned memory is read over the bus), but the host may not.
static inline int* resident_ints(Harness* h, const int* ints, size_t n) {
    int* copy = (int*)case_block(h, n * sizeof(int), ON_DEVICE);
    device_upload(&h->ctx, copy, ints, n * sizeof(int));
    device_synchronize(&h->ctx);
    return copy;
}

// A number in 0 .. n - 1.
static inline int random_below(Harness* h, int n) {
    return (int)(rng_uniform(philox((uint32_t)h->drawn++, 0, 1, 0, h->key).v[0]) * n);
}

// Sequences of the given lengths, as if `first` sequences of the step lay before them.
static inline Sequences sequences_of(Harness* h, const int* lengths, int count, int first) {
    Sequences s;
    int* cu_seqlens = int_array(h, (size_t)count + 1);
    memset(&s, 0, sizeof s);
    s.count = count;
    s.first = first;
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
    s.cu_seqlens = s.host_cu_seqlens = cu_seqlens;
    s.sequence = sequence;
    s.position = position;
    return s;
}

// The same in device memory, for a bench.
static inline Sequences resident_sequences(Harness* h, Sequences s) {
    s.cu_seqlens = resident_ints(h, s.cu_seqlens, (size_t)s.count + 1);
    s.sequence = resident_ints(h, s.sequence, (size_t)s.rows);
    s.position = resident_ints(h, s.position, (size_t)s.rows);
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
    array_download(got);
    tol += array_rounding(got);
    for (size_t i = 0; i < got.n; i++) comparison_add(&c, i, got.host[i], want[i], fmax(1, fabs(want[i])), tol);
    if (got.n) comparison_report(h, what, &c, got.host[c.first], want[c.first], tol);
}

// |got - want| <= tol * magnitude, where magnitude[i] is the sum of the absolute values that made want[i].
static inline void expect_close_to_sum(Harness* h, const char* what, Array got, const real* want, const real* magnitude,
                                       double tol) {
    Comparison c = {0, 0, 0, 0};
    array_download(got);
    tol += array_rounding(got);
    for (size_t i = 0; i < got.n; i++)
        comparison_add(&c, i, got.host[i], want[i], fmax(1e-30, fabs(magnitude[i])), tol);
    if (got.n) comparison_report(h, what, &c, got.host[c.first], want[c.first], tol);
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

// What the op says it moves at least, in the scope that run(state) opens.
static inline void expect_bytes(Harness* h, const char* op, void (*run)(void* state), void* state, double want) {
    ScopeLog log;
    scope_log_open(&log, NULL);
    h->ctx.scope_log = &log;
    run(state);
    h->ctx.scope_log = NULL;
    scope_log_resolve(&log);
    expect_true(h, "a scope", log.count > 0 && strcmp(log.records[0].op, op) == 0);
    expect_within(h, op, log.count ? log.records[0].bytes : 0, want, 0);
    scope_log_close(&log);
}

// run(state) must give the same bits in every array for any number of threads; on the GPU, in every run. Each run
// starts from the arrays as they were made (so ADD, and work in place, is no special case); the last result stays.
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

// ---------------------------------------------------------------------------------------------------------
// Timing

static inline int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static inline double bench_median(Harness* h, double* seconds, int n) {
    qsort(seconds, (size_t)n, sizeof *seconds, compare_doubles);
    h->spread = (seconds[3 * n / 4] - seconds[n / 4]) / seconds[n / 2];
    return seconds[n / 2];
}

#ifdef __CUDACC__

enum { BENCH_RUNS = 100, FLUSH_BYTES = 256 << 20 };  // the flush is three times the L2 of any GPU that is meant

// One thread for 16 bytes of a buffer of zeros; `never` keeps the compiler from leaving the reads out.
static __global__ void bench_flush_kernel(const int4* p, int* never) {
    int4 v = p[(size_t)blockIdx.x * blockDim.x + threadIdx.x];
    if (v.x | v.y | v.z | v.w) *never = 1;
}

// Median seconds of run(state) by events, after a warm-up: 20 to 100 runs, about half a second in all. Before each of
// them a read of FLUSH_BYTES pushes the operands out of the L2, and gives the host time to queue the run: neither
// cached data nor launch latency is timed.
static inline double bench_seconds(Harness* h, void (*run)(void* state), void* state) {
    cudaEvent_t start[BENCH_RUNS], stop[BENCH_RUNS];
    double seconds[BENCH_RUNS];
    int n = 20;
    if (!h->flush) {
        cudaCheck(cudaMalloc(&h->flush, FLUSH_BYTES));
        cudaCheck(cudaMemset(h->flush, 0, FLUSH_BYTES));
    }
    for (int i = 0; i < 3; i++) run(state);
    device_synchronize(&h->ctx);
    double first = now_seconds();
    run(state);
    device_synchronize(&h->ctx);
    n = (int)fmin(BENCH_RUNS, fmax(n, 0.5 / (now_seconds() - first)));
    for (int i = 0; i < n; i++) {
        cudaCheck(cudaEventCreate(&start[i]));
        cudaCheck(cudaEventCreate(&stop[i]));
    }
    for (int i = 0; i < n; i++) {
        bench_flush_kernel<<<FLUSH_BYTES / 16 / 256, 256, 0, h->ctx.stream>>>((const int4*)h->flush, (int*)h->flush);
        cudaCheck(cudaGetLastError());
        cudaCheck(cudaEventRecord(start[i], h->ctx.stream));
        run(state);
        cudaCheck(cudaEventRecord(stop[i], h->ctx.stream));
    }
    device_synchronize(&h->ctx);
    for (int i = 0; i < n; i++) {
        float milliseconds;
        cudaCheck(cudaEventElapsedTime(&milliseconds, start[i], stop[i]));
        seconds[i] = 1e-3 * milliseconds;
        cudaCheck(cudaEventDestroy(start[i]));
        cudaCheck(cudaEventDestroy(stop[i]));
    }
    return bench_median(h, seconds, n);
}

#else

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
    return bench_median(h, seconds, n);
}

#endif

static inline void bench_report(Harness* h, const char* name, const char* shapes, double seconds, double flops,
                                double bytes) {
    double gflops = 1e-9 * flops / seconds, gbs = 1e-9 * bytes / seconds;
    printf("%-26s %-34s %10.1f us (+-%2.0f %%)  %9.2f GFLOP/s", name, shapes, 1e6 * seconds, 50 * h->spread, gflops);
    if (h->ceiling_tflops > 0) printf(" (%3.0f %%)", 0.1 * gflops / h->ceiling_tflops);
    printf("  %8.2f GB/s", gbs);
    if (h->ceiling_gbs > 0) printf(" (%3.0f %%)", 100 * gbs / h->ceiling_gbs);
    putchar('\n');
    fflush(stdout);
}

#endif
