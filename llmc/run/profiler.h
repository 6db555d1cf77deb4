/* What a step spends its time on: the launchers' scopes of some steps, added up by op. */
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
    for (int i = 0; i < PEAK_REPEATS && now_seconds() - began < limit; i++) {
        double start = now_seconds();
        matmul_forward(a + 2 * n, a, w, PEAK_SIZE, PEAK_SIZE, PEAK_SIZE, SET, ctx);
        device_synchronize(ctx);
        best = fmin(best, now_seconds() - start);
    }
    device_free(a, 3 * n * sizeof(floatX));
    return MATMUL_FLOPS(PEAK_SIZE, PEAK_SIZE, PEAK_SIZE) / best;
}

typedef struct {
    const char* op;
    Direction direction;
    size_t calls;
    double seconds, flops, bytes;
} OpTotal;

static inline int op_total_descending(const void* a, const void* b) {
    double x = ((const OpTotal*)a)->seconds, y = ((const OpTotal*)b)->seconds;
    return (x < y) - (x > y);
}

// Print one row an op and direction, for an average step of `steps` that together took `seconds`. Rates are of the
// work that the op headers count. The last row is the time outside all ops (data, logging, the host's own work).
static inline void profiler_print(FILE* out, ScopeLog* log, int steps, double seconds) {
    scope_log_resolve(log);
    OpTotal* totals = (OpTotal*)xcalloc(log->count + 1, sizeof *totals);
    size_t count = 0;
    double inside = 0;
    for (size_t i = 0; i < log->count; i++) {
        const ScopeRecord* r = &log->records[i];
        size_t k = 0;
        while (k < count && (totals[k].direction != r->direction || strcmp(totals[k].op, r->op) != 0)) k++;
        if (k == count) totals[count++].op = r->op;
        totals[k].direction = r->direction;
        totals[k].calls++;
        totals[k].seconds += r->seconds;
        totals[k].flops += r->flops;
        totals[k].bytes += r->bytes;
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

#endif
