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
 * run/step.h calls profiler_prepare_step(), profiler_begin_step() and profiler_end_step() around each step, and
 * profiler_step_took() with the times of plain ones. */
#ifndef LLMC_PROFILE_PROFILER_H
#define LLMC_PROFILE_PROFILER_H

#include "llmc/model/linear.h"
#include "llmc/profile/energy.h"
#include "llmc/run/peak.h"

#ifdef __CUDACC__
// Whether matmuls compute in 16 bits or may round to TF32.
#define PROFILER_HALF(ctx) (sizeof(floatX) == 2 || (ctx)->tf32)
#define COPY_BYTES ((size_t)1 << 30)
#else
#define PROFILER_HALF(ctx) 0
#define COPY_BYTES ((size_t)1 << 27)
#endif

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
    int measures_ops;  // 1: the step after the profiled ones is captured, and its ops are measured after the run
    EnergyCapture capture;
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
    p->peaks.flops = peak_matmul_flops(ctx);
    p->peaks.bytes = profiler_copy_bytes(ctx);
    p->peaks.launch = profiler_launch_seconds(ctx);
    if (GPU_BUILD && fp8) p->peaks.fp8_flops = fp8_peak_flops(ctx);
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
    if (profiler_stage(p, step) == STAGE_CAPTURED) return 1;
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
    scope_attach(ctx, p->taken < p->count ? &p->log.observer : energy_capture_observer(&p->capture));
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
    if (profiler_stage(p, step) == STAGE_CAPTURED) scope_detach(ctx, &p->capture.observer);
    if (profiler_stage(p, step) != STAGE_PROFILED) return 0;
    profiler_wait(ctx);
    double seconds = now_seconds() - p->began, before = 0;
    uint64_t ended = p->is_tracing ? kernel_trace_now(&p->trace) : 0;
    ProfileStep* s = &p->steps[p->taken];
    scope_detach(ctx, &p->log.observer);
    if (p->is_tracing) {
        kernel_trace_collect(&p->trace);
        uint64_t began = kernel_trace_take_lead(&p->trace);
        if (!(p->trace.count && began)) die(FAILED, "--profile: CUPTI lost the records of a step");
        before = 1e-9 * (double)((int64_t)p->trace.rows[0].start - (int64_t)began);
        seconds = 1e-9 * (double)(ended - began);
    } else if (p->log.count) before = p->log.records[0].start - p->began;
    profile_from_log(s, &p->log, PROFILER_HALF(ctx));
    s->seconds = seconds, s->before = before, s->after = seconds - before - profile_span(s);
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
    if (!p->capture.count) return 0;
#ifdef __CUDACC__
    if (p->capture.scratch == ctx->scratch) op_energies_measure(&p->ops, &p->capture, p->meter, group, ctx);
    else warn("--profile-energy 1: what followed the last step needed more scratch: no energy of ops");
#else
    (void)group, (void)ctx;
#endif
    return 1;
}

static inline void profiler_close(Profiler* p) {
    for (int i = 0; i < p->taken; i++) profile_step_free(&p->steps[i]);
    free(p->steps), free(p->plain), free(p->ops.ops);
    energy_capture_free(&p->capture);
    memset(p, 0, sizeof *p);
}

#endif
