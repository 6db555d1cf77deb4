/* What a step spends its time on: the launchers' scopes of some steps added up by op and, on a GPU with CUPTI, the
 * kernels of the newest step, one by one and added up.
 *
 * The trainer puts profiler_begin_step() and profiler_end_step() around steps, then calls profiler_report(). */
#ifndef LLMC_PROFILER_H
#define LLMC_PROFILER_H

#include "../base/rng.h"
#include "../device/host_view.h"
#include "../device/scope.h"
#include "../ops/matmul.h"

#ifdef __CUDACC__
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
enum { PEAK_SIZE = 8192, PEAK_REPEATS = 6 };
#else
static inline double profiler_known_peak(void) { return 0; }
enum { PEAK_SIZE = 768, PEAK_REPEATS = 6 };
#endif

// The FLOP/s that a step is reported against: the hardware's peak where it is known, else those of a square matmul, the
// best of a few.
static inline double profiler_peak_flops(Context* ctx) {
    const double limit = 0.1;  // seconds: enough, also where a build is slow
    size_t n = (size_t)PEAK_SIZE * PEAK_SIZE;
    double best = INFINITY, began = now_seconds();
    if (profiler_known_peak() > 0) return profiler_known_peak();
    floatX* a = (floatX*)device_alloc(ctx, 3 * n * sizeof(floatX), "peak measurement");
    HostView view = host_view_open(a, 2 * n, VIEW_FLOATX);
    Affine w = {a + n, NULL};
    for (size_t i = 0; i < 2 * n; i++) view.values[i] = (real)(rng_uniform((uint32_t)i * 2654435761u) - 0.5);
    host_view_write(ctx, &view);
    host_view_close(&view);
    for (int i = 0; i < PEAK_REPEATS && (i == 0 || now_seconds() - began < limit); i++) {
        double start = now_seconds();
        matmul_forward(a + 2 * n, a, w, PEAK_SIZE, PEAK_SIZE, PEAK_SIZE, SET, ctx);
        device_synchronize(ctx);
        best = fmin(best, now_seconds() - start);
    }
    device_free(a, 3 * n * sizeof(floatX));
    return MATMUL_FLOPS(PEAK_SIZE, PEAK_SIZE, PEAK_SIZE) / best;
}

typedef struct {
    ScopeLog log;
    KernelTrace trace;
    int steps;
    double seconds, began;  // of all steps, from their first launch to the end of their work; when the newest began
} Profiler;

static inline void profiler_begin_step(Profiler* p, Context* ctx) {
    device_synchronize(ctx);
    if (p->steps++ == 0 && kernel_trace_start(&p->trace, ctx) == 0) p->log.trace = &p->trace;
    if (p->log.trace) kernel_trace_collect(p->log.trace);  // what ran between the steps, which is of no interest
    kernel_trace_clear(&p->trace);
    ctx->scope_log = &p->log;
    p->began = now_seconds();
}

static inline void profiler_end_step(Profiler* p, Context* ctx) {
    device_synchronize(ctx);
    p->seconds += now_seconds() - p->began;
    ctx->scope_log = NULL;
    scope_log_resolve(&p->log);
}

// ---------------------------------------------------------------------------------------------------------
// By op

typedef struct {
    const char *op, *kernel;  // kernel: NULL where it is the op's total
    Direction direction;
    size_t calls;
    double seconds, flops, bytes;
} OpTotal;

static inline int op_total_descending(const void* a, const void* b) {
    double x = ((const OpTotal*)a)->seconds, y = ((const OpTotal*)b)->seconds;
    return (x < y) - (x > y);
}

// The total of an op (and kernel) in a direction among the first *count; a new one if there is none yet.
static inline OpTotal* op_total_of(OpTotal* totals, size_t* count, Direction direction, const char* op,
                                   const char* kernel) {
    size_t k = 0;
    while (k < *count && (totals[k].direction != direction || strcmp(totals[k].op, op) != 0 ||
                          (kernel && strcmp(totals[k].kernel, kernel) != 0)))
        k++;
    if (k == *count) {
        OpTotal fresh = {op, kernel, direction, 0, 0, 0, 0};
        totals[(*count)++] = fresh;
    }
    return &totals[k];
}

// Print one row an op and direction, for an average step. Rates are of the work that the op headers count. The last row
// but one is the time outside all ops: data, the host's own work, gaps between kernels.
static inline void profiler_print_ops(FILE* out, const Profiler* p) {
    OpTotal* totals = (OpTotal*)xcalloc(p->log.count + 1, sizeof *totals);
    size_t count = 0;
    double inside = 0, steps = p->steps, seconds = p->seconds;
    for (size_t i = 0; i < p->log.count; i++) {
        const ScopeRecord* r = &p->log.records[i];
        OpTotal* t = op_total_of(totals, &count, r->direction, r->op, NULL);
        t->calls++;
        t->seconds += r->seconds;
        t->flops += r->flops;
        t->bytes += r->bytes;
        inside += r->seconds;
    }
    qsort(totals, count, sizeof *totals, op_total_descending);
    fprintf(out, "%-28s %-13s %6s %10s %7s %9s %8s\n", "op", "direction", "calls", "ms", "share", "GFLOP/s", "GB/s");
    for (size_t k = 0; k < count; k++) {
        const OpTotal* t = &totals[k];
        fprintf(out, "%-28s %-13s %6.4g %10.3f %6.1f%% %9.1f %8.1f\n", t->op, direction_name(t->direction),
                (double)t->calls / steps, 1e3 * t->seconds / steps, 100 * t->seconds / seconds,
                t->seconds > 0 ? 1e-9 * t->flops / t->seconds : 0, t->seconds > 0 ? 1e-9 * t->bytes / t->seconds : 0);
    }
    fprintf(out, "%-28s %-13s %6s %10.3f %6.1f%%\n", "outside ops", "", "", 1e3 * (seconds - inside) / steps,
            100 * (seconds - inside) / seconds);
    fprintf(out, "%-28s %-13s %6s %10.3f %6.1f%%\n", "step", "", "", 1e3 * seconds / steps, 100.0);
    free(totals);
}

// ---------------------------------------------------------------------------------------------------------
// By kernel

// What the launches of a step add up to.
typedef struct {
    double busy, gaps;  // seconds in kernels, and between one's end and the next one's start
    size_t unscoped;    // launches outside every scope
} KernelTotals;

static inline KernelTotals profiler_kernel_totals(const KernelTrace* trace) {
    KernelTotals totals = {0, 0, 0};
    uint64_t end = trace->count ? trace->rows[0].start : 0;  // of what ran so far
    for (size_t i = 0; i < trace->count; i++) {
        const TracedLaunch* row = &trace->rows[i];
        totals.busy += 1e-9 * (double)(row->end - row->start);
        if (row->start > end) totals.gaps += 1e-9 * (double)(row->start - end);
        if (row->end > end) end = row->end;
        totals.unscoped += row->scope == NO_SCOPE;
    }
    return totals;
}

static inline void profiler_put_totals(Text* t, const KernelTrace* trace) {
    KernelTotals totals = profiler_kernel_totals(trace);
    text_printf(t, "total: %zu launches, %.3f ms in kernels, %.3f ms in gaps between them, %zu without a scope",
                trace->count, 1e3 * totals.busy, 1e3 * totals.gaps, totals.unscoped);
    if (trace->lost) text_printf(t, ", %zu not recorded", trace->lost);
    text_printf(t, "\n");
}

// "96x32x1", or "-" for what has none.
static inline const char* profiler_dimensions(char text[40], const int d[3]) {
    if (d[0]) snprintf(text, 40, "%dx%dx%d", d[0], d[1], d[2]);
    else snprintf(text, 40, "-");
    return text;
}

// Append the launches in order of execution, a row each, columns without spaces inside, then what they add up to.
static inline void profiler_put_kernels(Text* t, const ScopeLog* log, const KernelTrace* trace) {
    text_printf(t, "%-5s %-13s %5s %-26s %-34s %-56s %14s %10s %4s %7s %11s %9s\n", "index", "direction", "layer", "op",
                "shapes", "kernel", "grid", "block", "regs", "shared", "start_us", "us");
    for (size_t i = 0; i < trace->count; i++) {
        const TracedLaunch* row = &trace->rows[i];
        const ScopeRecord* r = row->scope < log->count ? &log->records[row->scope] : NULL;
        char shapes[sizeof r->shapes] = "-", layer[16] = "-", grid[40], block[40];
        if (r && r->shapes[0]) memcpy(shapes, r->shapes, sizeof shapes);
        for (char* c = shapes; *c; c++)
            if (*c == ' ') *c = ',';
        if (r && r->layer >= 0) snprintf(layer, sizeof layer, "%d", r->layer);
        text_printf(t, "%-5zu %-13s %5s %-26s %-34s %-56s %14s %10s %4d %7d %11.2f %9.2f\n", i,
                    r ? direction_name(r->direction) : "-", layer, r ? r->op : "-", shapes, row->name,
                    profiler_dimensions(grid, row->grid), profiler_dimensions(block, row->block), row->registers,
                    row->shared_bytes, 1e-3 * (double)(row->start - trace->rows[0].start),
                    1e-3 * (double)(row->end - row->start));
    }
    profiler_put_totals(t, trace);
}

// Append one row a kernel, op and direction of the newest step, the longest first.
static inline void profiler_put_kernel_totals(Text* t, const ScopeLog* log, const KernelTrace* trace) {
    OpTotal* totals = (OpTotal*)xcalloc(trace->count + 1, sizeof *totals);
    double busy = profiler_kernel_totals(trace).busy;
    size_t count = 0;
    for (size_t i = 0; i < trace->count; i++) {
        const TracedLaunch* row = &trace->rows[i];
        const ScopeRecord* r = row->scope < log->count ? &log->records[row->scope] : NULL;
        OpTotal* total = op_total_of(totals, &count, r ? r->direction : FORWARD, r ? r->op : "-", row->name);
        total->calls++;
        total->seconds += 1e-9 * (double)(row->end - row->start);
    }
    qsort(totals, count, sizeof *totals, op_total_descending);
    text_printf(t, "%-56s %-28s %-13s %6s %10s %7s\n", "kernel", "op", "direction", "calls", "ms", "share");
    for (size_t k = 0; k < count; k++)
        text_printf(t, "%-56s %-28s %-13s %6zu %10.3f %6.1f%%\n", totals[k].kernel, totals[k].op,
                    direction_name(totals[k].direction), totals[k].calls, 1e3 * totals[k].seconds,
                    100 * totals[k].seconds / busy);
    profiler_put_totals(t, trace);
    free(totals);
}

// ---------------------------------------------------------------------------------------------------------

// Print what the profiled steps spent their time on, and write the newest one's kernels to `directory`/kernels.txt ("":
// do not). Ends the profile.
static inline void profiler_report(FILE* out, Profiler* p, const char* directory) {
    if (p->steps) profiler_print_ops(out, p);
    if (p->log.trace) {
        Text kernels = {NULL, 0, 0}, totals = {NULL, 0, 0};
        char* path = xprintf("%s/kernels.txt", directory);
        profiler_put_kernels(&kernels, &p->log, &p->trace);
        profiler_put_kernel_totals(&totals, &p->log, &p->trace);
        fputs(totals.text, out);
        if (*directory && write_file(path, kernels.text, kernels.length) != 0)
            warn("%s: cannot be written: %s", path, strerror(errno));
        free(kernels.text), free(totals.text), free(path);
        kernel_trace_stop(&p->trace);
        kernel_trace_free(&p->trace);
    }
    free(p->log.records);
    memset(p, 0, sizeof *p);
}

#endif
