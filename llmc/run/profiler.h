/* What a step spends its time on: the launchers' scopes of some steps, added up by op. */
#ifndef LLMC_PROFILER_H
#define LLMC_PROFILER_H

#include "../base/rng.h"
#include "../device/scope.h"
#include "../ops/matmul.h"

// FLOP/s of a square matmul, the best of a few: the ceiling that a step is reported against where the hardware's peak is
// not known.
static inline double profiler_peak_flops(Context* ctx) {
    enum { SIZE = 768, REPEATS = 6 };
    const double limit = 0.1;  // seconds: enough, also where a build is slow
    size_t n = (size_t)SIZE * SIZE;
    floatX* a = (floatX*)xmalloc(3 * n * sizeof(floatX));
    Affine w = {a + n, NULL};
    double best = INFINITY, began = now_seconds();
    for (size_t i = 0; i < 2 * n; i++) a[i] = (floatX)rng_uniform((uint32_t)i * 2654435761u);
    for (int i = 0; i < REPEATS && now_seconds() - began < limit; i++) {
        double start = now_seconds();
        matmul_forward(a + 2 * n, a, w, SIZE, SIZE, SIZE, SET, ctx);
        best = fmin(best, now_seconds() - start);
    }
    free(a);
    return MATMUL_FLOPS(SIZE, SIZE, SIZE) / best;
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
