/* The tables of a profile, made from its rows (rows.h). Every table is in the text report and on the page; the kernels
 * also in a CSV file. */
#ifndef LLMC_PROFILE_TABLES_H
#define LLMC_PROFILE_TABLES_H

#include "llmc/profile/rows.h"
#include "llmc/profile/text_table.h"

static inline const char* profile_kind_name(Kind kind) {
    static const char* const names[KINDS] = {"matmul",       "attention",     "memory-bound",
                                             "launch-bound", "communication", "host copy"};
    return names[kind];
}

static inline const char* profile_bound_name(Bound bound) {
    static const char* const names[] = {NULL, "compute", "memory", "launch"};
    return names[bound];
}

static inline const char* profile_gap_name(Gap gap) {
    static const char* const names[GAPS] = {"host", "another stream", "between kernels"};
    return names[gap];
}

// ---------------------------------------------------------------------------------------------------------
// Groups of rows and their sums

typedef struct {
    const ProfileRow* row;                                  // the first one; if grouped by op, one with work
    size_t rows, calls;                                     // calls of the op; a call may have several rows
    double seconds, flops, bytes, roofline, lost, helpers;  // helpers: seconds lost in them
    double by_direction[DIRECTIONS];                        // seconds
    int has_roofline;
} ProfileGroup;

typedef enum { BY_DIRECTION, BY_LAYER, BY_OP, BY_KERNEL, BY_KIND } Grouping;

static inline int profile_is_same(const ProfileRow* a, const ProfileRow* b, Grouping grouping) {
    switch (grouping) {
    case BY_DIRECTION:
        return a->direction == b->direction;
    case BY_LAYER:
        return a->layer == b->layer;
    case BY_OP:
        return a->direction == b->direction && !strcmp(a->op, b->op) && !strcmp(a->shapes, b->shapes);
    case BY_KERNEL:
        return !strcmp(a->kernel ? a->kernel : a->op, b->kernel ? b->kernel : b->op);
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
        if (row->is_helper) g->helpers += profile_lost(row);
    }
    qsort(groups, *count, sizeof *groups, grouping == BY_LAYER ? profile_layer_ascending : profile_group_descending);
    return groups;
}

static inline double profile_rate(double work, double seconds) { return seconds > 0 ? work / seconds : (double)NAN; }
static inline double positive(double x) { return x > 0 ? x : (double)NAN; }

// ---------------------------------------------------------------------------------------------------------
// Tables

// Part of notes, which are format strings.
#define PROFILE_ABOVE_ROOFLINE                                                                                         \
    "Above 100 %%: operands were still in a cache, or this matmul runs faster than the large one whose rate was "      \
    "measured."

// Times of whole steps in seconds.
typedef struct {
    double plain;     // median of the steps that are not profiled; NaN: there was none
    double profiled;  // of the reported step, by the host's clock
    double at_limit;  // of a step by its energy, at the GPU's power limit; NaN: unknown
} ProfileTimes;

static inline void profile_table_accounting(Table* t, const ProfileStep* step, const Accounting* a,
                                            ProfileTimes times) {
    static const TableColumn columns[] = {
        {"what", TABLE_TEXT, 0, 0}, {"ms", TABLE_NUMBER, 3, 0}, {"percent", TABLE_NUMBER, 1, 0}};
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
        {"step at the power limit: its energy / the limit", times.at_limit},
    };
    table_open(t, "accounting", "Where the step's time goes", columns, COUNT_OF(columns));
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        if (isnan(lines[i].seconds)) continue;
        table_text(t, lines[i].what);
        table_number(t, 1e3 * lines[i].seconds);
        table_number(t, 100 * lines[i].seconds / a->span);
    }
    if (a->unscoped || step->dropped)
        t->note = xprintf("%zu rows have no scope; %zu launches could not be recorded.", a->unscoped, step->dropped);
    else t->note = xprintf("Every row belongs to an op.");
}

static inline void profile_table_directions(Table* t, const ProfileStep* step, double span) {
    static const TableColumn columns[] = {{"direction", TABLE_TEXT, 0, 0},
                                          {"rows", TABLE_NUMBER, 0, 0},
                                          {"ms", TABLE_NUMBER, 3, 0},
                                          {"percent", TABLE_NUMBER, 1, 0},
                                          {"lost_ms", TABLE_NUMBER, 3, 0}};
    size_t count;
    ProfileGroup* groups = profile_group(step, BY_DIRECTION, &count);
    table_open(t, "directions", "By direction", columns, COUNT_OF(columns));
    for (size_t k = 0; k < count; k++) {
        table_text(t, direction_name(groups[k].row->direction));
        table_number(t, (double)groups[k].rows);
        table_number(t, 1e3 * groups[k].seconds);
        table_number(t, 100 * groups[k].seconds / span);
        table_number(t, groups[k].has_roofline ? 1e3 * groups[k].lost : (double)NAN);
    }
    free(groups);
}

static inline void profile_table_kinds(Table* t, const ProfileStep* step, double span) {
    static const TableColumn columns[] = {{"kind", TABLE_TEXT, 0, 0},          {"rows", TABLE_NUMBER, 0, 0},
                                          {"ms", TABLE_NUMBER, 3, 0},          {"percent", TABLE_NUMBER, 1, 0},
                                          {"roofline_ms", TABLE_NUMBER, 3, 0}, {"lost_ms", TABLE_NUMBER, 3, 0}};
    size_t count;
    ProfileGroup* groups = profile_group(step, BY_KIND, &count);
    table_open(t, "kinds", "By bound", columns, COUNT_OF(columns));
    for (size_t k = 0; k < count; k++) {
        table_text(t, profile_kind_name(profile_kind(groups[k].row)));
        table_number(t, (double)groups[k].rows);
        table_number(t, 1e3 * groups[k].seconds);
        table_number(t, 100 * groups[k].seconds / span);
        table_number(t, groups[k].has_roofline ? 1e3 * groups[k].roofline : (double)NAN);
        table_number(t, groups[k].has_roofline ? 1e3 * groups[k].lost : (double)NAN);
    }
    t->note = xprintf(
        "roofline_ms: the time of the same work at the measured peaks. Launch-bound: the launch takes longer than "
        "the work.");
    free(groups);
}

static inline void profile_table_layers(Table* t, const ProfileStep* step, double span) {
    static const TableColumn columns[] = {
        {"layer", TABLE_NUMBER, 0, 0},        {"rows", TABLE_NUMBER, 0, 0},
        {"forward_ms", TABLE_NUMBER, 3, 0},   {"backward_ms", TABLE_NUMBER, 3, 0},
        {"optimizer_ms", TABLE_NUMBER, 3, 0}, {"communication_ms", TABLE_NUMBER, 3, 0},
        {"ms", TABLE_NUMBER, 3, 0},           {"percent", TABLE_NUMBER, 1, 0},
        {"lost_ms", TABLE_NUMBER, 3, 0}};
    size_t count;
    ProfileGroup* groups = profile_group(step, BY_LAYER, &count);
    table_open(t, "layers", "By layer", columns, COUNT_OF(columns));
    for (size_t k = 0; k < count; k++) {
        int layer = groups[k].row->layer;
        table_number(t, layer >= 0 ? layer : (double)NAN);
        table_number(t, (double)groups[k].rows);
        for (int direction = 0; direction < DIRECTIONS; direction++)
            table_number(t, positive(1e3 * groups[k].by_direction[direction]));
        table_number(t, 1e3 * groups[k].seconds);
        table_number(t, 100 * groups[k].seconds / span);
        table_number(t, 1e3 * groups[k].lost);
    }
    t->note = xprintf("Rows without a layer: embeddings, heads, losses and the optimizer.");
    free(groups);
}

static inline void profile_table_ops(Table* t, const ProfileStep* step, double span) {
    static const TableColumn columns[] = {{"direction", TABLE_TEXT, 0, 0}, {"op", TABLE_TEXT, 0, 0},
                                          {"shapes", TABLE_TEXT, 0, 0},    {"calls", TABLE_NUMBER, 0, 0},
                                          {"kernels", TABLE_NUMBER, 0, 0}, {"ms", TABLE_NUMBER, 3, 0},
                                          {"percent", TABLE_NUMBER, 1, 0}, {"gflop", TABLE_NUMBER, 3, 0},
                                          {"mbyte", TABLE_NUMBER, 3, 0},   {"tflop_s", TABLE_NUMBER, 3, 0},
                                          {"gb_s", TABLE_NUMBER, 1, 0},    {"tensor_cores", TABLE_TEXT, 0, 0},
                                          {"bound", TABLE_TEXT, 0, 0},     {"roofline_percent", TABLE_NUMBER, 1, 0},
                                          {"lost_ms", TABLE_NUMBER, 3, 0}};
    size_t count;
    ProfileGroup* groups = profile_group(step, BY_OP, &count);
    table_open(t, "ops", "By op", columns, COUNT_OF(columns));
    for (size_t k = 0; k < count; k++) {
        const ProfileGroup* g = &groups[k];
        table_text(t, direction_name(g->row->direction));
        table_text(t, *g->row->op ? g->row->op : NULL);
        table_text(t, *g->row->shapes ? g->row->shapes : NULL);
        table_number(t, (double)g->calls);
        table_number(t, (double)g->rows);
        table_number(t, 1e3 * g->seconds);
        table_number(t, 100 * g->seconds / span);
        table_number(t, positive(1e-9 * g->flops));
        table_number(t, positive(1e-6 * g->bytes));
        table_number(t, positive(1e-12 * profile_rate(g->flops, g->seconds)));
        table_number(t, positive(1e-9 * profile_rate(g->bytes, g->seconds)));
        table_text(t, g->row->tensor_cores < 0 ? NULL : g->row->tensor_cores ? "yes" : "no");
        table_text(t, profile_bound_name(g->row->bound));
        table_number(t, g->row->bound ? 100 * profile_rate(g->roofline, g->seconds) : (double)NAN);
        table_number(t, g->has_roofline ? 1e3 * g->lost : (double)NAN);
    }
    t->note =
        xprintf("Flops and bytes are those of the op's header: every operand once. roofline_percent: the roofline time "
                "divided by the time of all of the op's kernels. " PROFILE_ABOVE_ROOFLINE);
    free(groups);
}

static inline void profile_table_kernel_names(Table* t, const ProfileStep* step, double span) {
    static const TableColumn columns[] = {{"kernel", TABLE_TEXT, 0, 0},
                                          {"rows", TABLE_NUMBER, 0, 0},
                                          {"ms", TABLE_NUMBER, 3, 0},
                                          {"percent", TABLE_NUMBER, 1, 0},
                                          {"mean_us", TABLE_NUMBER, 2, 0}};
    size_t count;
    ProfileGroup* groups = profile_group(step, BY_KERNEL, &count);
    table_open(t, "kernel_names", "By kernel", columns, COUNT_OF(columns));
    for (size_t k = 0; k < count; k++) {
        table_text(t, groups[k].row->kernel ? groups[k].row->kernel : groups[k].row->op);
        table_number(t, (double)groups[k].rows);
        table_number(t, 1e3 * groups[k].seconds);
        table_number(t, 100 * groups[k].seconds / span);
        table_number(t, 1e6 * groups[k].seconds / (double)groups[k].rows);
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
    static const TableColumn columns[] = {{"index", TABLE_NUMBER, 0, 0},
                                          {"direction", TABLE_TEXT, 0, 0},
                                          {"layer", TABLE_NUMBER, 0, 0},
                                          {"op", TABLE_TEXT, 0, 0},
                                          {"shapes", TABLE_TEXT, 0, 0},
                                          {"kernel", TABLE_TEXT, 0, 0},
                                          {"stream", TABLE_NUMBER, 0, 0},
                                          {"grid", TABLE_TEXT, 0, 0},
                                          {"block", TABLE_TEXT, 0, 0},
                                          {"registers", TABLE_NUMBER, 0, 0},
                                          {"shared_bytes", TABLE_NUMBER, 0, 0},
                                          {"start_us", TABLE_NUMBER, 2, 0},
                                          {"us", TABLE_NUMBER, 2, 0},
                                          {"min_us", TABLE_NUMBER, 2, 0},
                                          {"median_us", TABLE_NUMBER, 2, 0},
                                          {"max_us", TABLE_NUMBER, 2, 0},
                                          {"gflop", TABLE_NUMBER, 3, 0},
                                          {"mbyte", TABLE_NUMBER, 3, 0},
                                          {"tflop_s", TABLE_NUMBER, 3, 0},
                                          {"gb_s", TABLE_NUMBER, 1, 0},
                                          {"tensor_cores", TABLE_TEXT, 0, 0},
                                          {"bound", TABLE_TEXT, 0, 0},
                                          {"roofline_percent", TABLE_NUMBER, 1, 0},
                                          {"lost_us", TABLE_NUMBER, 2, 0},
                                          {"full_name", TABLE_TEXT, 0, 1}};
    char text[40];
    table_open(t, "kernels", "Rows in order of execution", columns, COUNT_OF(columns));
    for (size_t i = 0; i < step->count; i++) {
        const ProfileRow* r = &step->rows[i];
        table_number(t, (double)i);
        table_text(t, direction_name(r->direction));
        table_number(t, r->layer >= 0 ? r->layer : (double)NAN);
        table_text(t, *r->op ? r->op : NULL);
        table_text(t, *r->shapes ? r->shapes : NULL);
        table_text(t, r->kernel);
        table_number(t, r->stream >= 0 ? r->stream : (double)NAN);
        table_text(t, profile_dimensions(text, r->grid));
        table_text(t, profile_dimensions(text, r->block));
        table_number(t, r->grid[0] ? r->registers : (double)NAN);
        table_number(t, r->grid[0] ? r->shared_bytes : (double)NAN);
        table_number(t, 1e6 * r->start);
        table_number(t, 1e6 * r->seconds);
        table_number(t, 1e6 * r->min);
        table_number(t, 1e6 * r->median);
        table_number(t, 1e6 * r->max);
        table_number(t, positive(1e-9 * r->flops));
        table_number(t, positive(1e-6 * r->bytes));
        table_number(t, positive(1e-12 * profile_rate(r->flops, r->seconds)));
        table_number(t, positive(1e-9 * profile_rate(r->bytes, r->seconds)));
        table_text(t, r->tensor_cores < 0 ? NULL : r->tensor_cores ? "yes" : "no");
        table_text(t, profile_bound_name(r->bound));
        table_number(t, r->bound ? 100 * profile_rate(r->roofline, r->seconds) : (double)NAN);
        table_number(t, 1e6 * profile_lost(r));
        table_text(t, r->full);
    }
    t->note = xprintf("An op's work is shown at its longest row. Its other rows are helpers, whose time counts as "
                      "lost. " PROFILE_ABOVE_ROOFLINE);
}

static inline void profile_table_gaps(Table* t, const ProfileStep* step) {
    static const TableColumn columns[] = {{"start_us", TABLE_NUMBER, 2, 0},
                                          {"us", TABLE_NUMBER, 2, 0},
                                          {"cause", TABLE_TEXT, 0, 0},
                                          {"before", TABLE_TEXT, 0, 0},
                                          {"index", TABLE_NUMBER, 0, 0}};
    size_t count;
    int ops = profile_rows_are_ops(step);
    ProfileGap* gaps = profile_gaps(step, &count);
    table_open(t, "gaps", "Gaps", columns, COUNT_OF(columns));
    for (size_t i = 0; i < count; i++) {
        const ProfileRow* before = &step->rows[gaps[i].before];
        table_number(t, 1e6 * gaps[i].start);
        table_number(t, 1e6 * gaps[i].seconds);
        Gap cause = gaps[i].host > 0.5 * gaps[i].seconds ? GAP_HOST : gaps[i].rest;
        table_text(t, ops ? "between ops" : profile_gap_name(cause));
        table_text(t, before->kernel ? before->kernel : before->op);
        table_number(t, (double)gaps[i].before);
    }
    t->note = xprintf(
        "%s",
        ops ? "Nothing runs in a gap. Its cause is unknown, because kernels were not traced."
            : "Nothing runs in a gap. host: the next row was not launched yet. another stream: the row before ran on "
              "another stream.");
    free(gaps);
}

static inline void profile_table_steps(Table* t, const ProfileStep* steps, size_t count, int64_t first) {
    static const TableColumn columns[] = {{"step", TABLE_NUMBER, 0, 0},       {"rows", TABLE_NUMBER, 0, 0},
                                          {"kernels_ms", TABLE_NUMBER, 3, 0}, {"gaps_ms", TABLE_NUMBER, 3, 0},
                                          {"span_ms", TABLE_NUMBER, 3, 0},    {"host_ms", TABLE_NUMBER, 3, 0}};
    table_open(t, "steps", "The profiled steps", columns, COUNT_OF(columns));
    for (size_t i = 0; i < count; i++) {
        Accounting a = profile_account(&steps[i]);
        table_number(t, (double)(first + (int64_t)i));
        table_number(t, (double)steps[i].count);
        table_number(t, 1e3 * a.kernels);
        table_number(t, 1e3 * (a.gap[GAP_HOST] + a.gap[GAP_STREAM] + a.gap[GAP_SWITCH]));
        table_number(t, 1e3 * a.span);
        table_number(t, 1e3 * steps[i].seconds);
    }
}

#endif
