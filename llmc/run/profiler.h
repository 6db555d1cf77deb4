/* What a step spends its time on. A profiled run takes so many steps of warm-up, then as many plain steps as profiled ones,
 * which say what profiling costs, then the profiled ones; the report is of the one in the middle of these by its time, with
 * several ranks by the slowest one's, so that all report the same; with the extremes of all.
 *
 * In a run the host is ahead of the GPU. Profiled steps are apart from each other, so each begins with a kernel that does
 * nothing, behind which the host gets ahead; the step is what comes after it, up to the end of all that it launched.
 *
 * Rows are kernels where CUPTI traces them, else ops: on the GPU between two events, on the CPU by the host's clock.
 *
 * steps.h puts profiler_prepare_step(), profiler_begin_step() and profiler_end_step() around steps and tells the times of
 * plain ones. */
#ifndef LLMC_PROFILER_H
#define LLMC_PROFILER_H

#include "../base/json.h"
#include "../base/rng.h"
#include "../device/host_view.h"
#include "../ops/matmul.h"
#include "profile.h"

#ifdef __CUDACC__
#define GPU_BUILD 1
// Whether products run in 16 bits or may be rounded to TF32.
#define PROFILER_HALF(ctx) (sizeof(floatX) == 2 || (ctx)->tf32)
// Dense peak FLOP/s of the matrix units in the type that is built, by the vendor's data sheets; 0 for a GPU that is not
// in the table.
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
enum { PEAK_SIZE = 8192, PEAK_REPEATS = 60 };
#define COPY_BYTES ((size_t)1 << 30)
#else
#define GPU_BUILD 0
#define PROFILER_HALF(ctx) 0
static inline double profiler_known_peak(void) { return 0; }
enum { PEAK_SIZE = 768, PEAK_REPEATS = 6 };
#define COPY_BYTES ((size_t)1 << 27)
#endif

// FLOP/s of a square matmul, the best of a few, by the library's own choice: to time others would heat the GPU.
static inline double profiler_matmul_flops(Context* ctx) {
    const double limit = 0.1;  // seconds: enough, also where a build is slow
    size_t n = (size_t)PEAK_SIZE * PEAK_SIZE;
    int autotune = device_set_autotune(ctx, 0);
    double best = INFINITY, began = 0;
    floatX* a = (floatX*)device_alloc(ctx, 3 * n * sizeof(floatX), "measurement");
    HostView view = host_view_open(a, 2 * n, VIEW_FLOATX);
    Affine w = {a + n, NULL};
    for (size_t i = 0; i < 2 * n; i++) view.values[i] = (real)(rng_uniform((uint32_t)i * 2654435761u) - 0.5);
    host_view_write(ctx, &view);
    host_view_close(&view);
    for (int i = -1; i < PEAK_REPEATS && (i <= 0 || now_seconds() - began < limit); i++) {
        device_synchronize(ctx);
        double start = now_seconds();
        matmul_forward(a + 2 * n, a, w, PEAK_SIZE, PEAK_SIZE, PEAK_SIZE, SET, ctx);
        device_synchronize(ctx);
        if (i < 0) began = now_seconds();  // the first one loads its kernel
        else best = fmin(best, now_seconds() - start);
    }
    device_set_autotune(ctx, autotune);
    device_free(a, 3 * n * sizeof(floatX));
    return MATMUL_FLOPS(PEAK_SIZE, PEAK_SIZE, PEAK_SIZE) / best;
}

// The FLOP/s that a step's mfu is of: the hardware's peak where it is known.
static inline double profiler_peak_flops(Context* ctx) {
    return profiler_known_peak() > 0 ? profiler_known_peak() : profiler_matmul_flops(ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Ceilings

// Copy `bytes`, where the ops run, with all that it has.
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

// Bytes a second that a large copy reads and writes, the best of a few.
static inline double profiler_copy_bytes(Context* ctx) {
    size_t bytes = min_size(COPY_BYTES, device_memory_available() / 8);
    double best = INFINITY;
    char* a = (char*)device_alloc(ctx, 2 * bytes, "measurement");
    for (int i = 0; i < 5; i++) {
        device_synchronize(ctx);
        double start = now_seconds();
        profiler_copy(a + bytes, a, bytes, ctx);
        device_synchronize(ctx);
        if (i > 0) best = fmin(best, now_seconds() - start);  // the first one meets fresh pages
    }
    device_free(a, 2 * bytes);
    return 2 * (double)bytes / best;
}

// Seconds that a launch takes at least, work or none: one of many small fills on the GPU, a parallel region on the CPU.
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

static inline Ceilings profiler_measure_ceilings(Context* ctx) {
    Ceilings c = {profiler_matmul_flops(ctx), profiler_copy_bytes(ctx), profiler_launch_seconds(ctx)};
    return c;
}

// From a file that a profile has written: {"flops": FLOP/s, "bytes": byte/s, "launch_us": microseconds}, also inside of
// "ceilings".
static inline Ceilings profiler_read_ceilings(const char* path) {
    Json json;
    json_load(&json, path, (size_t)16 << 20);
    const JsonNode* node = json_get(json.root, "ceilings");
    if (!node) node = json.root;
    Ceilings c = {json_get_double(node, "flops", path), json_get_double(node, "bytes", path),
                  1e-6 * json_get_double(node, "launch_us", path)};
    if (!(c.flops > 0 && c.bytes > 0 && c.launch > 0))
        die(USAGE, "%s: flops, bytes and launch_us must all be above 0", path);
    json_free(&json);
    return c;
}

// ---------------------------------------------------------------------------------------------------------
// Steps

#define PROFILER_LEAD 5e-3  // seconds in which the host gets ahead of a GPU before a profiled step

typedef struct {
    int warmup, count;  // steps before, and of each kind; count 0: nothing is profiled
    int64_t first;      // the run's first step, from 0
    Ceilings ceilings;
    const char* ceilings_from;
    ScopeLog log;
    KernelTrace trace;
    int is_tracing, taken, plain_count;
    ProfileStep* steps;  // [count], of which `taken` are there
    double* plain;       // [count] seconds, of which `plain_count`
    double began;        // the newest step, by the host's clock
} Profiler;

typedef enum { STAGE_NONE, STAGE_PLAIN, STAGE_PROFILED } ProfilerStage;

// Before the first step, number `first`. `ceilings`: "measure", or a file.
static inline void profiler_open(Profiler* p, int warmup, int count, const char* ceilings, int64_t first,
                                 Context* ctx) {
    memset(p, 0, sizeof *p);
    p->warmup = warmup, p->count = count, p->first = first;
    if (!count) return;
    p->ceilings_from = ceilings;
    p->ceilings = strcmp(ceilings, "measure") == 0 ? profiler_measure_ceilings(ctx) : profiler_read_ceilings(ceilings);
    p->steps = (ProfileStep*)xcalloc((size_t)count, sizeof *p->steps);
    p->plain = (double*)xcalloc((size_t)count, sizeof *p->plain);
}

static inline ProfilerStage profiler_stage(const Profiler* p, int64_t step) {
    int64_t i = step - p->first - p->warmup;
    if (i < 0 || i >= 2 * (int64_t)p->count) return STAGE_NONE;
    return i < p->count ? STAGE_PLAIN : STAGE_PROFILED;
}

// Whether this step's results have to be read before the next is launched: no step is in flight when a profiled one begins,
// and the plain ones are all finished when the report is made.
static inline int profiler_reads_at_once(const Profiler* p, int64_t step) {
    return profiler_stage(p, step) == STAGE_PROFILED || profiler_stage(p, step + 1) == STAGE_PROFILED;
}

// Step number `step`, from 0, took so long.
static inline void profiler_step_took(Profiler* p, int64_t step, double seconds) {
    if (profiler_stage(p, step) == STAGE_PLAIN && p->plain_count < p->count) p->plain[p->plain_count++] = seconds;
}

// Wait for everything that was launched, on the collectives' stream too.
static inline void profiler_wait(Context* ctx) {
#ifdef __CUDACC__
    (void)ctx;
    cudaCheck(cudaDeviceSynchronize());
#else
    device_synchronize(ctx);
#endif
}

// Returns 1 where this step is to be profiled, for which all is ready then, and the idle kernel is launched.
static inline int profiler_prepare_step(Profiler* p, int64_t step, Context* ctx) {
    if (profiler_stage(p, step) != STAGE_PROFILED) return 0;
    profiler_wait(ctx);
    if (p->taken == 0) p->is_tracing = kernel_trace_start(&p->trace, ctx) == 0;
    scope_log_open(&p->log, p->is_tracing ? &p->trace : NULL);
    if (p->is_tracing) {
        kernel_trace_collect(&p->trace);  // what ran between the steps, which is of no interest
        kernel_trace_clear(&p->trace);
        kernel_trace_lead((uint64_t)(1e9 * PROFILER_LEAD), ctx);
    }
    return 1;
}

// Before the first launch of a step that is prepared.
static inline void profiler_begin_step(Profiler* p, Context* ctx) {
    ctx->scope_log = &p->log;
    p->began = now_seconds();
}

// After the last step that was profiled.
static inline void profiler_end_trace(Profiler* p) {
    if (!p->is_tracing) return;
    kernel_trace_stop(&p->trace);
    kernel_trace_free(&p->trace);
}

// Returns 1 after the last one.
static inline int profiler_end_step(Profiler* p, int64_t step, Context* ctx) {
    if (profiler_stage(p, step) != STAGE_PROFILED) return 0;
    profiler_wait(ctx);
    double seconds = now_seconds() - p->began;
    uint64_t ended = p->is_tracing ? kernel_trace_now(&p->trace) : 0;
    ProfileStep* s = &p->steps[p->taken];
    ctx->scope_log = NULL;
    scope_log_resolve(&p->log);
    uint64_t began = p->is_tracing ? kernel_trace_take_lead(&p->trace) : 0;
    if (p->is_tracing && p->trace.count && began) {
        uint64_t first = p->trace.rows[0].start;
        profile_take(s, &p->log, PROFILER_HALF(ctx));
        s->before = 1e-9 * (double)((int64_t)first - (int64_t)began);
        s->after = 1e-9 * (double)((int64_t)ended - (int64_t)first) - profile_span(s);
        seconds = 1e-9 * (double)(ended - began);
    } else {
        if (p->log.count) p->began = p->log.records[0].start - p->began;
        profile_take(s, &p->log, PROFILER_HALF(ctx));
#ifndef __CUDACC__
        s->before = p->began;
        s->after = seconds - s->before - profile_span(s);
#endif
    }
    s->seconds = seconds;
    profile_set_roofs(s, &p->ceilings);
    scope_log_close(&p->log);
    if (++p->taken < p->count) return 0;
    profiler_end_trace(p);
    return 1;
}

static inline void profiler_close(Profiler* p) {
    for (int i = 0; i < p->taken; i++) profile_step_free(&p->steps[i]);
    free(p->steps), free(p->plain);
    memset(p, 0, sizeof *p);
}

#endif
