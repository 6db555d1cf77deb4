/* Measure where the time of a step goes. A profiled run has warm-up steps, then plain steps (to show the cost of
 * profiling), then the same number of profiled steps. The report describes the step of median time, with min and max
 * over all. With several ranks the slowest rank's time counts, so that all ranks report the same step.
 *
 * In a normal run the host is ahead of the GPU. Profiled steps are synchronized before and after. So each begins with a
 * delay kernel, during which the host queues work as in a normal run. The step lasts from the end of that kernel to the
 * end of everything launched after it.
 *
 * On the GPU rows are kernels, traced by CUPTI; on the CPU they are ops, timed by the host's clock.
 *
 * steps.h calls profiler_prepare_step(), profiler_begin_step() and profiler_end_step() around each step, and
 * profiler_step_took() with the times of plain ones. */
#ifndef LLMC_PROFILE_PROFILER_H
#define LLMC_PROFILE_PROFILER_H

#include "llmc/base/rng.h"
#include "llmc/device/energy.h"
#include "llmc/device/host_view.h"
#include "llmc/model/linear.h"
#include "llmc/profile/energy.h"

#ifdef __CUDACC__
#define GPU_BUILD 1
// Whether matmuls compute in 16 bits or may round to TF32.
#define PROFILER_HALF(ctx) (sizeof(floatX) == 2 || (ctx)->tf32)
// Dense peak FLOP/s of the tensor cores in the build's type, from the vendor's data sheets; 0 for a GPU that is not in
// the table.
static inline double profiler_known_peak(void) {
    static const struct {
        const char* name;
        double half, tf32;
    } known[] = {{"H100 PCIe", 756e12, 378e12},
                 {"H100", 989.4e12, 494.7e12},
                 {"H200", 989.4e12, 494.7e12},
                 {"A100", 312e12, 156e12}};
    struct cudaDeviceProp properties;
    cudaCheck(cudaGetDeviceProperties(&properties, 0));
    for (size_t i = 0; i < COUNT_OF(known); i++)
        if (strstr(properties.name, known[i].name)) return sizeof(floatX) == 2 ? known[i].half : known[i].tf32;
    return 0;
}
#define PEAK_SIZES 8192
enum { PEAK_SIZE = 8192, PEAK_REPEATS = 60 };
#define PEAK_SECONDS 0.1
#define COPY_BYTES ((size_t)1 << 30)
#else
#define GPU_BUILD 0
#define PROFILER_HALF(ctx) 0
static inline double profiler_known_peak(void) { return 0; }
#define PEAK_SIZES 384, 512, 768, 1024
enum { PEAK_SIZE = 1024, PEAK_REPEATS = 1000 };
#define PEAK_SECONDS 0.4
#define COPY_BYTES ((size_t)1 << 27)
#endif

// Operands of square matmuls: x, w and y in floatX, and for fp8 matmuls the rounded x and w.
typedef struct {
    floatX* x;       // [3, PEAK_SIZE, PEAK_SIZE], y last
    uint8_t* bytes;  // [2, PEAK_SIZE, PEAK_SIZE]; NULL: matmuls in floatX
    real* one;
} PeakOperands;

static inline PeakOperands profiler_peak_operands(int fp8, Context* ctx) {
    static const real ones[2 * FP8_INVERSE_APART] = {1, 1, 1, 1, 1, 1, 1, 1};  // of x and of w
    size_t n = (size_t)PEAK_SIZE * PEAK_SIZE;
    PeakOperands o = {.x = (floatX*)device_alloc(ctx, 3 * n * sizeof(floatX), "measurement")};
    HostView view = host_view_open(o.x, 2 * n, VIEW_FLOATX);
    for (size_t i = 0; i < 2 * n; i++) view.values[i] = (real)(rng_uniform((uint32_t)i * 2654435761u) - 0.5);
    host_view_write(ctx, &view);
    host_view_close(&view);
    if (!fp8) return o;
    o.bytes = (uint8_t*)device_alloc(ctx, 2 * n, "measurement");
    o.one = (real*)device_alloc(ctx, sizeof ones, "measurement");
    device_upload(ctx, o.one, ones, sizeof ones);
    QuantizeOutput out = {.y = o.bytes, .scale = o.one, .format = FP8_E4M3};
    quantize(out, quantize_plain(o.x), 2 * PEAK_SIZE, PEAK_SIZE, ctx);
    return o;
}

static inline void profiler_peak_product(const PeakOperands* o, int size, Context* ctx) {
    size_t n = (size_t)PEAK_SIZE * PEAK_SIZE;
    if (!o->bytes) {
        Linear w = {.w = o->x + n};
        matmul_forward(o->x + 2 * n, o->x, w, size, size, size, SET, ctx);
        return;
    }
    Fp8Shared shared = {.scales = {.inverse = o->one}};
    Fp8Linear layer = {.shared = &shared};
    fp8_product(&layer,
                (Fp8Product){MATMUL_FORWARD, o->bytes + n, o->bytes, o->x + 2 * n, NULL, {size, size, size}, SET}, ctx);
}

// The best FLOP/s of repeated square matmuls, in floatX or fp8, with the library's default algorithm: timing others
// would heat the GPU. On the CPU each size gets the same time: large ones are the fastest on
// an idle machine, small ones sometimes on a busy one, where they fit into a time slice.
static inline double profiler_matmul_flops(int fp8, Context* ctx) {
    size_t n = (size_t)PEAK_SIZE * PEAK_SIZE;
    static const int sizes[] = {PEAK_SIZES};
    int autotune = device_set_autotune(ctx, 0);
    double best = 0, began = 0, spent[COUNT_OF(sizes)] = {0};
    PeakOperands operands = profiler_peak_operands(fp8, ctx);
    for (int i = -1; i < PEAK_REPEATS; i++) {
        size_t k = 0;  // the size that has had the least time
        for (size_t j = 1; j < COUNT_OF(sizes); j++)
            if (i >= 0 && spent[j] < spent[k]) k = j;
        int size = sizes[k];
        if (i > 1 && now_seconds() - began >= PEAK_SECONDS) break;
        device_synchronize(ctx);
        double start = now_seconds();
        profiler_peak_product(&operands, size, ctx);
        device_synchronize(ctx);
        double took = now_seconds() - start, flops = MATMUL_FLOPS(size, size, size) / took;
        if (i < 0) {  // the first one loads its kernel
            began = now_seconds();
            continue;
        }
        best = fmax(best, flops);
        spent[k] += took;
    }
    device_set_autotune(ctx, autotune);
    device_free(operands.x, 3 * n * sizeof(floatX));
    if (fp8) device_free(operands.bytes, 2 * n), device_free(operands.one, 2 * FP8_INVERSE_APART * sizeof(real));
    return best;
}

// The FLOP/s that MFU is relative to: the hardware's peak if it is known, else the measured one.
static inline double profiler_peak_flops(Context* ctx) {
    return profiler_known_peak() > 0 ? profiler_known_peak() : profiler_matmul_flops(0, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// MeasuredPeaks

// Copy `bytes` on the device; a CPU uses all its cores.
static inline void profiler_copy(char* to, const char* from, size_t bytes, Context* ctx) {
#ifdef __CUDACC__
    cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, ctx->stream));
#else
    const size_t piece = 1 << 20;
    (void)ctx;
#pragma omp parallel for schedule(static)
    for (size_t at = 0; at < bytes; at += piece) memcpy(to + at, from + at, min_size(piece, bytes - at));
#endif
}

// Bytes per second that a large copy reads and writes, the best of a few.
static inline double profiler_copy_bytes(Context* ctx) {
    size_t bytes = min_size(COPY_BYTES, device_memory_available() / 8);
    double best = INFINITY;
    char* a = (char*)device_alloc(ctx, 2 * bytes, "measurement");
    for (int i = 0; i < 5; i++) {
        device_synchronize(ctx);
        double start = now_seconds();
        profiler_copy(a + bytes, a, bytes, ctx);
        device_synchronize(ctx);
        if (i > 0) best = fmin(best, now_seconds() - start);  // the first one touches fresh pages
    }
    device_free(a, 2 * bytes);
    return 2 * (double)bytes / best;
}

// Seconds of the shortest launch: one of many small fills on the GPU, an empty parallel region on the CPU.
static inline double profiler_launch_seconds(Context* ctx) {
    enum { LAUNCHES = 500 };
    double best = INFINITY;
    for (int i = 0; i < 5; i++) {
        device_synchronize(ctx);
        double start = now_seconds();
        for (int k = 0; k < LAUNCHES; k++) {
#ifdef __CUDACC__
            cudaCheck(cudaMemsetAsync(ctx->cublaslt_workspace, 0, 256, ctx->stream));
#else
            int threads = 0;
#pragma omp parallel reduction(+ : threads)
            threads += 1;
            CHECK(threads > 0);
#endif
        }
        device_synchronize(ctx);
        best = fmin(best, (now_seconds() - start) / LAUNCHES);
    }
    return best;
}

// ---------------------------------------------------------------------------------------------------------
// Steps

#define PROFILER_LEAD 20e-3  // seconds of the delay kernel, in which the host queues work before a profiled step

typedef struct {
    int warmup, count;  // warm-up steps; number of plain steps and of profiled ones; 0: no profile
    int64_t first;      // the run's first step, from 0
    MeasuredPeaks peaks;
    ScopeLog log;
    KernelTrace trace;
    int is_tracing, taken, plain_count;  // is_tracing: kernels, on a GPU
    ProfileStep* steps;                  // [count], `taken` of them filled
    double* plain;                       // [count] seconds, `plain_count` of them filled
    const EnergyMeter* meter;            // NULL: energy is not measured
    double began;                        // when the newest step began, by the host's clock
    int measures_ops;    // 1: the step after the profiled ones is captured, and its ops are measured after the run
    ScopeGraphs graphs;  // of that step
    OpEnergies ops;
    size_t waits_before;  // the device's host_waits then
} Profiler;

typedef enum { STAGE_NONE, STAGE_PLAIN, STAGE_PROFILED, STAGE_CAPTURED } ProfilerStage;

// Call before the first step, number `first`. `fp8`: also measure the peak of fp8 matmuls; on the CPU these are matmuls
// in floatX.
static inline void profiler_open(Profiler* p, int warmup, int count, int fp8, int64_t first, Context* ctx) {
    memset(p, 0, sizeof *p);
    p->warmup = warmup, p->count = count, p->first = first;
    if (!count) return;
    p->peaks.flops = profiler_matmul_flops(0, ctx);
    p->peaks.bytes = profiler_copy_bytes(ctx);
    p->peaks.launch = profiler_launch_seconds(ctx);
    if (GPU_BUILD && fp8) p->peaks.fp8_flops = profiler_matmul_flops(1, ctx);
    p->steps = (ProfileStep*)xcalloc((size_t)count, sizeof *p->steps);
    p->plain = (double*)xcalloc((size_t)count, sizeof *p->plain);
}

static inline ProfilerStage profiler_stage(const Profiler* p, int64_t step) {
    int64_t i = step - p->first - p->warmup;
    if (i < 0 || i >= 2 * (int64_t)p->count)
        return p->measures_ops && i == 2 * (int64_t)p->count ? STAGE_CAPTURED : STAGE_NONE;
    return i < p->count ? STAGE_PLAIN : STAGE_PROFILED;
}

// Whether this step's results must be read before the next step is launched. No step may be in flight when a profiled
// one begins, and all plain ones must be finished when the report is written.
static inline int profiler_reads_at_once(const Profiler* p, int64_t step) {
    return profiler_stage(p, step) >= STAGE_PROFILED || profiler_stage(p, step + 1) >= STAGE_PROFILED;
}

// Step number `step`, from 0, took this many seconds.
static inline void profiler_step_took(Profiler* p, int64_t step, double seconds) {
    if (profiler_stage(p, step) == STAGE_PLAIN && p->plain_count < p->count) p->plain[p->plain_count++] = seconds;
}

// Wait for all launched work, including the collectives' stream.
static inline void profiler_wait(Context* ctx) {
#ifdef __CUDACC__
    (void)ctx;
    cudaCheck(cudaDeviceSynchronize());
#else
    device_synchronize(ctx);
#endif
}

// Returns 1 if this step is captured, or profiled: tracing is ready and the delay kernel launched.
static inline int profiler_prepare_step(Profiler* p, int64_t step, Context* ctx) {
    if (profiler_stage(p, step) < STAGE_PROFILED) return 0;
    if (profiler_stage(p, step) == STAGE_CAPTURED) {
        scope_log_open(&p->log, NULL);
        p->graphs.open = NO_SCOPE, p->log.graphs = &p->graphs;
        return 1;
    }
    profiler_wait(ctx);
    if (GPU_BUILD && p->taken == 0) {
        const char* why = kernel_trace_start(&p->trace, ctx);
        if (why) die(FAILED, "--profile: kernels cannot be traced: %s", why);
        p->is_tracing = 1;
    }
    scope_log_open(&p->log, p->is_tracing ? &p->trace : NULL);
    if (p->is_tracing) {
        kernel_trace_collect(&p->trace);  // discard work between the steps
        kernel_trace_clear(&p->trace);
        kernel_trace_lead((uint64_t)(1e9 * PROFILER_LEAD), ctx);
    }
    return 1;
}

// Call before the first launch of a prepared step.
static inline void profiler_begin_step(Profiler* p, Context* ctx) {
    ctx->scope_log = &p->log;
    p->waits_before = ctx->host_waits;
    p->began = now_seconds();
}

// Call after the last profiled step.
static inline void profiler_end_trace(Profiler* p) {
    if (!p->is_tracing) return;
    kernel_trace_stop(&p->trace);
    kernel_trace_free(&p->trace);
}

// Returns 1 after the last profiled step, unless the next step is captured: then the report follows the run.
static inline int profiler_end_step(Profiler* p, int64_t step, Context* ctx) {
    if (profiler_stage(p, step) == STAGE_CAPTURED) ctx->scope_log = NULL;
    if (profiler_stage(p, step) != STAGE_PROFILED) return 0;
    profiler_wait(ctx);
    double seconds = now_seconds() - p->began;
    uint64_t ended = p->is_tracing ? kernel_trace_now(&p->trace) : 0;
    ProfileStep* s = &p->steps[p->taken];
    ctx->scope_log = NULL;
    if (p->is_tracing) kernel_trace_collect(&p->trace);
    uint64_t began = p->is_tracing ? kernel_trace_take_lead(&p->trace) : 0;
    if (p->is_tracing && !(p->trace.count && began)) die(FAILED, "--profile: CUPTI lost the records of a step");
    if (p->is_tracing) {
        uint64_t first = p->trace.rows[0].start;
        profile_from_log(s, &p->log, PROFILER_HALF(ctx));
        s->before = 1e-9 * (double)((int64_t)first - (int64_t)began);
        s->after = 1e-9 * (double)((int64_t)ended - (int64_t)first) - profile_span(s);
        seconds = 1e-9 * (double)(ended - began);
    } else {
        if (p->log.count) p->began = p->log.records[0].start - p->began;
        profile_from_log(s, &p->log, PROFILER_HALF(ctx));
        s->before = p->began;
        s->after = seconds - s->before - profile_span(s);
    }
    s->seconds = seconds;
    s->host_waits = p->is_tracing ? p->trace.host_waits : ctx->host_waits - p->waits_before;
    s->stream_waits = p->is_tracing ? p->trace.stream_waits : 0;
    profile_set_rooflines(s, &p->peaks);
    scope_log_close(&p->log);
    if (++p->taken < p->count) return 0;
    profiler_end_trace(p);
    return !p->measures_ops;
}

// Call after the run has saved its state, which this destroys. Returns 1 if a step was captured and can be reported.
static inline int profiler_measure_ops(Profiler* p, ProcessGroup* group, Context* ctx) {
    if (!p->graphs.capacity) return 0;
#ifdef __CUDACC__
    if (p->graphs.scratch == ctx->scratch) op_energies_measure(&p->ops, &p->log, p->meter, group, ctx);
    else warn("--profile-energy 1: what followed the last step needed more scratch: no energy of ops");
#else
    (void)group, (void)ctx;
#endif
    return 1;
}

static inline void profiler_close(Profiler* p) {
    for (int i = 0; i < p->taken; i++) profile_step_free(&p->steps[i]);
    free(p->steps), free(p->plain), free(p->ops.ops);
    if (p->log.graphs) scope_log_close(&p->log);
    scope_graphs_free(&p->graphs);
    memset(p, 0, sizeof *p);
}

#endif
