/* The rows of a profiled step: every launch, the op that launched it, its work and its roofline time; and the gaps
 * between launches. tables.h prints them, profiler.h measures them.
 *
 * A row is a kernel, a copy or a fill on the GPU. On the CPU it is an op. An op's
 * work (flops and bytes, as its header counts them) is assigned to its longest row. Its other rows are helpers: their
 * time counts as lost, except for roofline time that the longest row does not use. So if an op passes over memory
 * twice, each pass gets its part.
 *
 * The roofline time of a row is the maximum of three: its flops at the measured rate of a large matmul (an fp8 matmul
 * for fp8), its bytes at the measured rate of a copy, and the shortest launch. The maximum is the row's bound; time
 * above it is lost. Operands that are still in a cache can beat the memory bound: such rows show more than 100 % and
 * lose nothing. */
#ifndef LLMC_PROFILE_ROWS_H
#define LLMC_PROFILE_ROWS_H

#include "llmc/profile/scope_log.h"

// What limits a row's time.
typedef enum { BOUND_NONE, BOUND_COMPUTE, BOUND_MEMORY, BOUND_LAUNCH } Bound;

// Category of a row, by its op and its bound.
typedef enum { KIND_MATMUL, KIND_ATTENTION, KIND_MEMORY, KIND_LAUNCH, KIND_COMMUNICATION, KIND_COPY, KINDS } Kind;

typedef struct {
    double flops, bytes;  // per second
    double launch;        // seconds of the shortest launch
    double fp8_flops;     // of fp8 matmuls; 0: as `flops`
} MeasuredPeaks;

typedef struct {
    Direction direction;
    int layer;       // -1 outside the blocks
    const char* op;  // "": the launch was in no scope
    char shapes[64];
    char *kernel, *full;  // owned; NULL: the row is a whole op
    int stream;           // -1: unknown
    int grid[3], block[3];
    int registers, shared_bytes;
    double start, seconds;    // from the beginning of the step's first row
    double issued;            // when the host's launch call returned, on the same clock; NaN: unknown
    double min, median, max;  // seconds over the profiled steps; NaN if a step lacks the row
    int is_helper;            // its op has a longer row, which carries the op's work
    size_t longest;           // a helper's: index of that row
    double flops, bytes;      // of the op; NaN in helpers
    int tensor_cores;         // 1, 0; -1: unknown
    Bound bound;
    double roofline;  // seconds; NaN: none (communication, copies to and from the host)
} ProfileRow;

typedef struct {
    ProfileRow* rows;  // in order of execution
    size_t count;
    double seconds;        // of the step by the host's clock, from its first launch to the end of its work
    double before, after;  // seconds before the first row starts and after the last one ends; NaN: unknown
    size_t dropped;        // launches that could not be recorded
    size_t host_waits;     // host waits for the device, including the one at the end of the step
    size_t stream_waits;   // stream waits for an event; 0 on the CPU
} ProfileStep;

// What a gap between rows waits for: the host's launch, a row of another stream, or the switch from one kernel to the
// next. On the CPU it counts as GAP_SWITCH.
typedef enum { GAP_HOST, GAP_STREAM, GAP_SWITCH, GAPS } Gap;

// kernels - overlap + all gaps = span.
typedef struct {
    double kernels;                          // seconds of all rows added up
    double overlap;                          // the part counted more than once, because rows of several streams overlap
    double gap[GAPS];                        // seconds in which nothing runs, by cause
    double span;                             // from the beginning of the first row to the end of the last
    size_t unscoped;                         // rows that belong to no op
    double communication, overlapped;        // seconds of communication, and its part overlapped with other work
    double broadcast, broadcast_overlapped;  // the same of share_parameters, which a run may overlap with its next step
} Accounting;

// ---------------------------------------------------------------------------------------------------------
// Rows

static inline int text_begins(const char* text, const char* with) { return strncmp(text, with, strlen(with)) == 0; }

// Whether a kernel uses tensor cores. `half`: the build computes in 16 bits, or fp32 may be rounded to TF32. Libraries
// put "simt" into the names of kernels that do not use them; splitKreduce kernels only add up partial sums.
static inline int profile_tensor_cores(const ProfileRow* r, int half) {
    static const char* const ours[] = {"attention_forward_hopper", "attention_backward_hopper",
                                       "attention_forward_flash", "attention_backward_query", "attention_backward_key"};
    static const char* const others[] = {"nvjet", "cutlass", "gemm", "xmma"};
    if (!r->kernel) return -1;
    for (size_t i = 0; i < COUNT_OF(ours); i++)
        if (text_begins(r->kernel, ours[i])) return 1;
    if (strstr(r->full, "simt") || strstr(r->full, "splitKreduce")) return 0;
    for (size_t i = 0; i < COUNT_OF(others); i++)
        if (strstr(r->full, others[i])) return half;
    return 0;
}

// Whether rows are ops, as on the CPU.
static inline int profile_rows_are_ops(const ProfileStep* step) { return step->count && !step->rows[0].kernel; }

static inline Kind profile_kind(const ProfileRow* r) {
    if (r->direction == COMMUNICATION) return KIND_COMMUNICATION;
    if (scope_is_copy(r->op)) return KIND_COPY;
    if (r->bound == BOUND_LAUNCH) return KIND_LAUNCH;
    if (text_begins(r->op, "matmul")) return KIND_MATMUL;
    if (text_begins(r->op, "attention")) return KIND_ATTENTION;
    return KIND_MEMORY;
}

// The measured peak for an op's matmuls. Other ops whose names contain _fp8 write fp8, but do not multiply it.
static inline double profile_peak_flops(const char* op, const MeasuredPeaks* c) {
    return c->fp8_flops > 0 && text_begins(op, "matmul") && strstr(op, "_fp8") ? c->fp8_flops : c->flops;
}

// A row's roofline time and bound.
static inline void profile_set_roofline(ProfileRow* r, const MeasuredPeaks* c) {
    r->bound = BOUND_NONE;
    r->roofline = (double)NAN;
    if (r->direction == COMMUNICATION || scope_is_copy(r->op)) return;
    r->roofline = 0;
    if (r->is_helper || !*r->op) return;
    double compute = r->flops / profile_peak_flops(r->op, c), memory = r->bytes / c->bytes;
    r->roofline = fmax(c->launch, fmax(compute, memory));
    r->bound = r->roofline == compute ? BOUND_COMPUTE : r->roofline == memory ? BOUND_MEMORY : BOUND_LAUNCH;
}

// Roofline times of all rows. Roofline time that an op's longest row does not use goes to its helpers, in order.
static inline void profile_set_rooflines(ProfileStep* step, const MeasuredPeaks* c) {
    for (size_t i = 0; i < step->count; i++) profile_set_roofline(&step->rows[i], c);
    for (size_t i = 0; i < step->count; i++) {
        ProfileRow *row = &step->rows[i], *longest = &step->rows[row->longest];
        if (!row->is_helper || !(longest->roofline > longest->seconds)) continue;
        row->roofline = fmin(row->seconds, longest->roofline - longest->seconds);
        longest->roofline -= row->roofline;
    }
}

// Seconds above the roofline time; NaN without one.
static inline double profile_lost(const ProfileRow* r) {
    return isnan(r->roofline) ? (double)NAN : fmax(0, r->seconds - r->roofline);
}

// A row of scope `r` (NULL: of no scope).
static inline ProfileRow profile_row(const ScopeRecord* r) {
    ProfileRow row;
    memset(&row, 0, sizeof row);
    row.op = "";
    row.layer = row.stream = -1;
    row.issued = row.min = row.median = row.max = (double)NAN;
    row.flops = row.bytes = (double)NAN;
    row.tensor_cores = -1;
    if (!r) return row;
    row.direction = r->scope.direction, row.layer = r->scope.layer, row.op = r->scope.op;
    memcpy(row.shapes, r->scope.shapes, sizeof row.shapes);
    row.start = r->start, row.seconds = r->seconds;
    row.flops = r->scope.flops, row.bytes = r->scope.bytes;
    return row;
}

// All rows of a scope except the longest are helpers and carry no work.
static inline void profile_find_helpers(ProfileStep* step, const KernelTrace* t, size_t scope_count) {
    size_t* longest = (size_t*)xmalloc((scope_count + 1) * sizeof *longest);
    for (size_t s = 0; s < scope_count; s++) longest[s] = SIZE_MAX;
    for (size_t i = 0; i < step->count; i++) {
        if (t->rows[i].scope >= scope_count) continue;
        size_t* best = &longest[t->rows[i].scope];
        if (*best == SIZE_MAX || step->rows[i].seconds > step->rows[*best].seconds) *best = i;
    }
    for (size_t i = 0; i < step->count; i++) {
        ProfileRow* row = &step->rows[i];
        row->longest = t->rows[i].scope < scope_count ? longest[t->rows[i].scope] : i;
        row->is_helper = row->longest != i;
        if (row->is_helper) row->flops = row->bytes = (double)NAN;
    }
    free(longest);
}

// Rows from traced launches; moves the names out of the trace.
static inline void profile_add_trace(ProfileStep* step, const ScopeLog* log) {
    KernelTrace* t = log->trace;
    for (size_t i = 0; i < t->count; i++) {
        TracedLaunch* launch = &t->rows[i];
        ProfileRow* row = &step->rows[i];
        int64_t first = (int64_t)t->rows[0].start;
        *row = profile_row(launch->scope < log->count ? &log->records[launch->scope] : NULL);
        row->kernel = launch->name, row->full = launch->full ? launch->full : xprintf("%s", launch->name);
        launch->name = launch->full = NULL;
        row->stream = launch->stream;
        memcpy(row->grid, launch->grid, sizeof row->grid);
        memcpy(row->block, launch->block, sizeof row->block);
        row->registers = launch->registers, row->shared_bytes = launch->shared_bytes;
        row->start = 1e-9 * (double)((int64_t)launch->start - first);
        row->seconds = 1e-9 * (double)(launch->end - launch->start);
        if (launch->issued) row->issued = 1e-9 * (double)((int64_t)launch->issued - first);
    }
    profile_find_helpers(step, t, log->count);
}

// The rows of a step from its log; call kernel_trace_collect() before, if it has a trace.
static inline void profile_from_log(ProfileStep* step, const ScopeLog* log, int half) {
    memset(step, 0, sizeof *step);
    step->before = step->after = (double)NAN;
    step->count = log->trace ? log->trace->count : log->count;
    step->rows = (ProfileRow*)xcalloc(step->count, sizeof *step->rows);
    if (log->trace) {
        step->dropped = log->trace->lost;
        profile_add_trace(step, log);
    }
    for (size_t i = 0; i < step->count && !log->trace; i++) {
        step->rows[i] = profile_row(&log->records[i]);
        step->rows[i].start -= log->records[0].start;
    }
    for (size_t i = 0; i < step->count; i++) step->rows[i].tensor_cores = profile_tensor_cores(&step->rows[i], half);
}

static inline void profile_step_free(ProfileStep* step) {
    for (size_t i = 0; i < step->count; i++) free(step->rows[i].kernel), free(step->rows[i].full);
    free(step->rows);
    memset(step, 0, sizeof *step);
}

// ---------------------------------------------------------------------------------------------------------
// Over steps

static inline double profile_span(const ProfileStep* step) {
    double end = 0;
    for (size_t i = 0; i < step->count; i++) end = fmax(end, step->rows[i].start + step->rows[i].seconds);
    return end;
}

static inline int double_ascending(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// Sorts the values.
static inline double median_of(double* values, size_t n) {
    if (n == 0) return (double)NAN;
    qsort(values, n, sizeof *values, double_ascending);
    return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

// Compare by direction, layer and op.
static inline int profile_compare_places(const ProfileRow* a, const ProfileRow* b) {
    if (a->direction != b->direction) return a->direction < b->direction ? -1 : 1;
    if (a->layer != b->layer) return a->layer < b->layer ? -1 : 1;
    return strcmp(a->op, b->op);
}

// The same, then by order of execution.
static inline int profile_place_ascending(const void* a, const void* b) {
    const ProfileRow *x = *(const ProfileRow*const*)a, *y = *(const ProfileRow*const*)b;
    int order = profile_compare_places(x, y);
    return order ? order : (x > y) - (x < y);
}

// The rows of a step sorted by place (caller frees).
static inline const ProfileRow** profile_by_place(const ProfileStep* step) {
    const ProfileRow** sorted = (const ProfileRow**)xmalloc((step->count + 1) * sizeof *sorted);
    for (size_t i = 0; i < step->count; i++) sorted[i] = &step->rows[i];
    qsort(sorted, step->count, sizeof *sorted, profile_place_ascending);
    return sorted;
}

// Find the row of `other` that matches each row of `step`: the k-th of its direction, layer and op matches the k-th
// there. seconds[i * stride]: the time of the match of rows[i], NaN without one.
static inline void profile_match_rows(double* seconds, size_t stride, const ProfileStep* step,
                                      const ProfileStep* other) {
    const ProfileRow **mine = profile_by_place(step), **theirs = profile_by_place(other);
    for (size_t i = 0, k = 0; i < step->count; i++) {
        while (k < other->count && profile_compare_places(theirs[k], mine[i]) < 0) k++;
        int is_there = k < other->count && profile_compare_places(theirs[k], mine[i]) == 0;
        seconds[(size_t)(mine[i] - step->rows) * stride] = is_there ? theirs[k++]->seconds : (double)NAN;
    }
    free(mine), free(theirs);
}

// Fill in min, median and max over all steps for the rows of one.
static inline void profile_compare_steps(ProfileStep* chosen, const ProfileStep* steps, size_t count) {
    double* all = (double*)xmalloc((chosen->count * count + 1) * sizeof *all);
    for (size_t s = 0; s < count; s++) profile_match_rows(all + s, count, chosen, &steps[s]);
    for (size_t i = 0; i < chosen->count; i++) {
        double* seconds = all + i * count;
        size_t found = 0;
        while (found < count && !isnan(seconds[found])) found++;
        if (found < count) continue;
        chosen->rows[i].median = median_of(seconds, count);
        chosen->rows[i].min = seconds[0], chosen->rows[i].max = seconds[count - 1];
    }
    free(all);
}

// ---------------------------------------------------------------------------------------------------------
// Accounting

// An interval in which nothing runs, before rows[before].
typedef struct {
    double start, seconds;
    double host;  // the part until the host has launched the next row
    Gap rest;     // cause of the remaining seconds
    size_t before;
} ProfileGap;

// The gaps of a step in order of time (caller frees).
static inline ProfileGap* profile_gaps(const ProfileStep* step, size_t* count) {
    ProfileGap* gaps = (ProfileGap*)xmalloc((step->count + 1) * sizeof *gaps);
    double end = 0;                                            // of the rows so far
    int last_stream = step->count ? step->rows[0].stream : 0;  // stream of the row that ended last
    *count = 0;
    for (size_t i = 0; i < step->count; i++) {
        const ProfileRow* row = &step->rows[i];
        double gap = row->start - end, late = row->issued - end;
        if (i > 0 && gap > 0.5e-9) {  // the clocks count nanoseconds: less is rounding
            ProfileGap g = {.start = end,
                            .seconds = gap,
                            .host = isnan(late) ? 0 : fmin(gap, fmax(0, late)),
                            .rest = row->stream == last_stream ? GAP_SWITCH : GAP_STREAM,
                            .before = i};
            gaps[(*count)++] = g;
        }
        if (row->start + row->seconds > end) end = row->start + row->seconds, last_stream = row->stream;
    }
    return gaps;
}

// Seconds of rows[i] during which a row other than communication runs.
static inline double profile_overlapped(const ProfileStep* step, size_t i) {
    const ProfileRow* row = &step->rows[i];
    double overlapped = 0, to = row->start;  // counted up to `to`; rows are sorted by start
    for (size_t k = 0; k < step->count; k++) {
        const ProfileRow* other = &step->rows[k];
        if (other->direction == COMMUNICATION) continue;
        double begin = fmax(to, other->start), end = fmin(row->start + row->seconds, other->start + other->seconds);
        if (end > begin) overlapped += end - begin, to = end;
    }
    return overlapped;
}

static inline Accounting profile_account(const ProfileStep* step) {
    Accounting a;
    size_t count;
    ProfileGap* gaps = profile_gaps(step, &count);
    memset(&a, 0, sizeof a);
    a.span = profile_span(step);
    a.overlap = -a.span;
    for (size_t i = 0; i < count; i++) {
        double rest = gaps[i].seconds - gaps[i].host;
        a.gap[GAP_HOST] += gaps[i].host, a.gap[gaps[i].rest] += rest;
        a.overlap += gaps[i].seconds;
    }
    for (size_t i = 0; i < step->count; i++) {
        const ProfileRow* row = &step->rows[i];
        a.kernels += row->seconds;
        a.unscoped += !*row->op;
        if (row->direction != COMMUNICATION) continue;
        double overlapped = profile_overlapped(step, i);
        a.communication += row->seconds, a.overlapped += overlapped;
        if (strcmp(row->op, "share_parameters") == 0) a.broadcast += row->seconds, a.broadcast_overlapped += overlapped;
    }
    a.overlap = fmax(0, a.overlap + a.kernels);  // rounding may leave a negative number
    free(gaps);
    return a;
}

#endif
