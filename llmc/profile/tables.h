/* The tables of a profile, made from its rows (rows.h). Every table is in the text report and on the page; the kernels
 * also in a CSV file. */
#ifndef LLMC_PROFILE_TABLES_H
#define LLMC_PROFILE_TABLES_H

#include "llmc/profile/rows.h"
#include "llmc/profile/text_table.h"

// Names of Kind, Bound and Gap.
static const char* const PROFILE_KINDS[KINDS] = {"matmul",       "attention",     "memory-bound",
                                                 "launch-bound", "communication", "host copy"};
static const char* const PROFILE_BOUNDS[] = {NULL, "compute", "memory", "launch"};
static const char* const PROFILE_GAPS[GAPS] = {"host", "another stream", "between kernels"};

// ---------------------------------------------------------------------------------------------------------
// Groups of rows and their sums

typedef struct {
    const ProfileRow* row;  // the first one; if grouped by op, one with work
    size_t rows, calls;     // calls of the op; a call may have several rows
    double seconds, flops, bytes, roofline, lost;
    double by_direction[DIRECTIONS];  // seconds
    int has_roofline;
} ProfileGroup;

typedef enum { BY_LAYER, BY_OP, BY_KIND } Grouping;

static inline int profile_is_same(const ProfileRow* a, const ProfileRow* b, Grouping grouping) {
    switch (grouping) {
    case BY_LAYER:
        return a->layer == b->layer;
    case BY_OP:
        return a->direction == b->direction && !strcmp(a->op, b->op) && !strcmp(a->shapes, b->shapes);
    case BY_KIND:
        return profile_kind(a) == profile_kind(b);
    }
    return 0;
}

static inline int profile_group_descending(const void* a, const void* b) {
    double x = ((const ProfileGroup*)a)->seconds, y = ((const ProfileGroup*)b)->seconds;
    return (x < y) - (x > y);
}

static inline int profile_layer_ascending(const void* a, const void* b) {
    return ((const ProfileGroup*)a)->row->layer - ((const ProfileGroup*)b)->row->layer;
}

// The groups of a step's rows, longest first; layers in ascending order (caller frees).
static inline ProfileGroup* profile_group(const ProfileStep* step, Grouping grouping, size_t* count) {
    ProfileGroup* groups = (ProfileGroup*)xcalloc(step->count + 1, sizeof *groups);
    *count = 0;
    for (size_t i = 0; i < step->count; i++) {
        const ProfileRow* row = &step->rows[i];
        size_t k = 0;
        while (k < *count && !profile_is_same(groups[k].row, row, grouping)) k++;
        ProfileGroup* g = &groups[k];
        if (k == *count) g->row = row, ++*count;
        if (g->row->is_helper) g->row = row;
        g->rows++;
        g->seconds += row->seconds;
        g->by_direction[row->direction] += row->seconds;
        if (!row->is_helper) g->calls++, g->flops += row->flops, g->bytes += row->bytes;
        if (isnan(row->roofline)) continue;
        g->has_roofline = 1, g->roofline += row->roofline, g->lost += profile_lost(row);
    }
    qsort(groups, *count, sizeof *groups, grouping == BY_LAYER ? profile_layer_ascending : profile_group_descending);
    return groups;
}

static inline double profile_rate(double work, double seconds) { return seconds > 0 ? work / seconds : (double)NAN; }
static inline double positive(double x) { return x > 0 ? x : (double)NAN; }

// ---------------------------------------------------------------------------------------------------------
// Tables

// Part of notes.
#define PROFILE_ABOVE_ROOFLINE                                                                                         \
    "Above 100 %: operands were still in a cache, or this matmul runs faster than the large one whose rate was "       \
    "measured."

// Times of whole steps in seconds.
typedef struct {
    double plain;     // median of the steps that are not profiled; NaN: there was none
    double profiled;  // of the reported step, by the host's clock
} ProfileTimes;

static inline void profile_table_accounting(Table* t, const ProfileStep* step, const Accounting* a,
                                            ProfileTimes times) {
    int ops = profile_rows_are_ops(step);
    const struct {
        const char* what;
        double seconds;
    } lines[] = {
        {"all rows", a->kernels},
        {"- overlapping with other rows", a->overlap},
        {"+ gaps: waiting for the host", ops ? (double)NAN : a->gap[GAP_HOST]},
        {"+ gaps: waiting for another stream", ops ? (double)NAN : a->gap[GAP_STREAM]},
        {ops ? "+ gaps: between ops" : "+ gaps: between kernels of a stream", a->gap[GAP_SWITCH]},
        {"= start of the first row to the end of the last", a->span},
        {"+ before the first row", step->before},
        {"+ after the last row", step->after},
        {"profiled step by the host's clock", times.profiled},
        {"step without profiling (median)", times.plain},
    };
    table_open(t, "accounting", "Where the step's time goes");
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        if (isnan(lines[i].seconds)) continue;
        table_text(t, "what", lines[i].what);
        table_number(t, "ms", 3, 1e3 * lines[i].seconds);
        table_number(t, "percent", 1, 100 * lines[i].seconds / a->span);
    }
    if (a->unscoped || step->dropped)
        t->note = xprintf("%zu rows have no scope; %zu launches could not be recorded.", a->unscoped, step->dropped);
    else t->note = xprintf("Every row belongs to an op.");
}

static inline void profile_table_op(Table* t, Direction direction, const char* op, const char* shapes) {
    table_text(t, "direction", direction_name(direction));
    table_text(t, "op", op);
    table_text(t, "shapes", shapes);
}

// Cells for the work of a row, or of the rows like it: in all `flops` and `bytes` in `seconds`.
static inline void profile_table_work(Table* t, const ProfileRow* row, double seconds, double flops, double bytes,
                                      double roofline) {
    table_number(t, "gflop", 3, positive(1e-9 * flops));
    table_number(t, "mbyte", 3, positive(1e-6 * bytes));
    table_number(t, "tflop_s", 3, positive(1e-12 * profile_rate(flops, seconds)));
    table_number(t, "gb_s", 1, positive(1e-9 * profile_rate(bytes, seconds)));
    table_text(t, "tensor_cores", row->tensor_cores < 0 ? NULL : row->tensor_cores ? "yes" : "no");
    table_text(t, "bound", PROFILE_BOUNDS[row->bound]);
    table_number(t, "roofline_percent", 1, row->bound ? 100 * profile_rate(roofline, seconds) : (double)NAN);
}

// The rows by layer, op or kind, with what they share first.
static inline void profile_table_groups(Table* t, const ProfileStep* step, double span, Grouping grouping) {
    static const char* const directions[DIRECTIONS] = {"forward_ms", "backward_ms", "optimizer_ms", "communication_ms"};
    static const struct {
        const char *id, *title, *note;
    } tables[] = {
        {"layers", "By layer", "Rows without a layer: embeddings, heads, losses and the optimizer."},
        {"ops", "By op",
         "Flops and bytes are those of the op's header: every operand once. roofline_percent: the roofline time "
         "divided "
         "by the time of all of the op's kernels. " PROFILE_ABOVE_ROOFLINE},
        {"kinds", "By bound",
         "roofline_ms: the time of the same work at the measured peaks. Launch-bound: the launch takes longer than the "
         "work."}};
    size_t count;
    ProfileGroup* groups = profile_group(step, grouping, &count);
    table_open(t, tables[grouping].id, tables[grouping].title);
    t->note = xprintf("%s", tables[grouping].note);
    for (size_t k = 0; k < count; k++) {
        const ProfileGroup* g = &groups[k];
        const ProfileRow* row = g->row;
        if (grouping == BY_LAYER) table_number(t, "layer", 0, row->layer >= 0 ? row->layer : (double)NAN);
        if (grouping == BY_KIND) table_text(t, "kind", PROFILE_KINDS[profile_kind(row)]);
        if (grouping == BY_OP) {
            profile_table_op(t, row->direction, row->op, row->shapes);
            table_number(t, "calls", 0, (double)g->calls);
        }
        table_number(t, grouping == BY_OP ? "kernels" : "rows", 0, (double)g->rows);
        for (int d = 0; grouping == BY_LAYER && d < DIRECTIONS; d++)
            table_number(t, directions[d], 3, positive(1e3 * g->by_direction[d]));
        table_number(t, "ms", 3, 1e3 * g->seconds);
        table_number(t, "percent", 1, 100 * g->seconds / span);
        if (grouping == BY_OP) profile_table_work(t, row, g->seconds, g->flops, g->bytes, g->roofline);
        if (grouping == BY_KIND) table_number(t, "roofline_ms", 3, g->has_roofline ? 1e3 * g->roofline : (double)NAN);
        table_number(t, "lost_ms", 3, g->has_roofline || grouping == BY_LAYER ? 1e3 * g->lost : (double)NAN);
    }
    free(groups);
}

// "96x32x1"; NULL if there are no dimensions.
static inline const char* profile_dimensions(char text[40], const int dims[3]) {
    if (!dims[0]) return NULL;
    snprintf(text, 40, "%dx%dx%d", dims[0], dims[1], dims[2]);
    return text;
}

static inline void profile_table_kernels(Table* t, const ProfileStep* step) {
    char text[40];
    table_open(t, "kernels", "Rows in order of execution");
    for (size_t i = 0; i < step->count; i++) {
        const ProfileRow* r = &step->rows[i];
        table_number(t, "index", 0, (double)i);
        table_text(t, "direction", direction_name(r->direction));
        table_number(t, "layer", 0, r->layer >= 0 ? r->layer : (double)NAN);
        table_text(t, "op", r->op);
        table_text(t, "shapes", r->shapes);
        table_text(t, "kernel", r->kernel);
        table_number(t, "stream", 0, r->stream >= 0 ? r->stream : (double)NAN);
        table_text(t, "grid", profile_dimensions(text, r->grid));
        table_text(t, "block", profile_dimensions(text, r->block));
        table_number(t, "registers", 0, r->grid[0] ? r->registers : (double)NAN);
        table_number(t, "shared_bytes", 0, r->grid[0] ? r->shared_bytes : (double)NAN);
        table_number(t, "start_us", 2, 1e6 * r->start);
        table_number(t, "us", 2, 1e6 * r->seconds);
        table_number(t, "min_us", 2, 1e6 * r->min);
        table_number(t, "median_us", 2, 1e6 * r->median);
        table_number(t, "max_us", 2, 1e6 * r->max);
        profile_table_work(t, r, r->seconds, r->flops, r->bytes, r->roofline);
        table_number(t, "lost_us", 2, 1e6 * profile_lost(r));
        table_add(t, "full_name", TABLE_LONG_TEXT, xprintf("%s", r->full ? r->full : ""));
    }
    t->note = xprintf("%s", "An op's work is shown at its longest row. Its other rows are helpers, whose time counts "
                            "as lost. " PROFILE_ABOVE_ROOFLINE);
}

static inline void profile_table_gaps(Table* t, const ProfileStep* step) {
    size_t count;
    int ops = profile_rows_are_ops(step);
    ProfileGap* gaps = profile_gaps(step, &count);
    table_open(t, "gaps", "Gaps");
    for (size_t i = 0; i < count; i++) {
        const ProfileRow* before = &step->rows[gaps[i].before];
        table_number(t, "start_us", 2, 1e6 * gaps[i].start);
        table_number(t, "us", 2, 1e6 * gaps[i].seconds);
        Gap cause = gaps[i].host > 0.5 * gaps[i].seconds ? GAP_HOST : gaps[i].rest;
        table_text(t, "cause", ops ? "between ops" : PROFILE_GAPS[cause]);
        table_text(t, "before", before->kernel ? before->kernel : before->op);
        table_number(t, "index", 0, (double)gaps[i].before);
    }
    t->note = xprintf(
        "%s",
        ops ? "Nothing runs in a gap between ops."
            : "Nothing runs in a gap. host: the next row was not launched yet. another stream: the row before ran on "
              "another stream.");
    free(gaps);
}

#endif
