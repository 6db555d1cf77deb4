/* The tables of a profile, from its rows (profile.h), and its largest losses in plain words. Every table is printed as text,
 * Markdown and on the page; the kernels as CSV too. */
#ifndef LLMC_PROFILE_TABLES_H
#define LLMC_PROFILE_TABLES_H

#include "../base/table.h"
#include "profile.h"

static inline const char* profile_kind_name(Kind kind) {
    static const char* const names[KINDS] = {"matmul",       "attention",     "bound by memory",
                                             "launch-bound", "communication", "copy to or from the host"};
    return names[kind];
}

static inline const char* profile_roof_name(Roof roof) {
    static const char* const names[] = {NULL, "compute", "memory", "launch"};
    return names[roof];
}

static inline const char* profile_gap_name(Gap gap) {
    static const char* const names[GAPS] = {"the host", "another stream", "between kernels"};
    return names[gap];
}

// ---------------------------------------------------------------------------------------------------------
// Sums of rows that have something in common

typedef struct {
    const ProfileRow* row;                               // the first of them; of a group by op, one that has work
    size_t rows, calls;                                  // calls: of the op, which may be several rows
    double seconds, flops, bytes, floor, lost, helpers;  // helpers: what is lost in them
    double by_direction[DIRECTIONS];                     // seconds
    int has_floor;
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

// The groups of a step's rows (caller frees), the longest first, layers in their order.
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
        if (isnan(row->floor)) continue;
        g->has_floor = 1, g->floor += row->floor, g->lost += profile_lost(row);
        if (row->is_helper) g->helpers += profile_lost(row);
    }
    qsort(groups, *count, sizeof *groups, grouping == BY_LAYER ? profile_layer_ascending : profile_group_descending);
    return groups;
}

static inline double profile_rate(double work, double seconds) { return seconds > 0 ? work / seconds : (double)NAN; }
static inline double positive(double x) { return x > 0 ? x : (double)NAN; }

// ---------------------------------------------------------------------------------------------------------
// Tables

// For notes, which are formats.
#define PROFILE_ABOVE_ROOF                                                                                             \
    "Above 100 %%: operands were still in a cache, or a matmul suits the machine better than the large one that the "  \
    "ceiling is measured with."

// What the profiler knows beyond the rows.
typedef struct {
    double plain;     // seconds of a step that is not profiled; NaN: there was none
    double profiled;  // of the chosen one, by the host's clock
} ProfileTimes;

static inline void profile_table_accounting(Table* t, const ProfileStep* step, const Accounting* a,
                                            ProfileTimes times) {
    static const TableColumn columns[] = {
        {"what", TABLE_TEXT, 0, 0}, {"ms", TABLE_NUMBER, 3, 0}, {"percent", TABLE_NUMBER, 1, 0}};
    int ops = profile_is_of_ops(step);
    const struct {
        const char* what;
        double seconds;
    } lines[] = {
        {"all rows", a->kernels},
        {"- beside other rows", a->beside},
        {"+ gaps: waiting for the host", ops ? (double)NAN : a->gap[GAP_HOST]},
        {"+ gaps: waiting for another stream", ops ? (double)NAN : a->gap[GAP_STREAM]},
        {ops ? "+ gaps: between ops" : "+ gaps: between kernels of a stream", a->gap[GAP_SWITCH]},
        {"= from the first row to the end of the last", a->span},
        {"+ before the first row", step->before},
        {"+ after the last row", step->after},
        {"step by the host's clock, profiled", times.profiled},
        {"step, plain (median)", times.plain},
    };
    table_open(t, "accounting", "Where the time of the step is", columns, COUNT_OF(columns));
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        if (isnan(lines[i].seconds)) continue;
        table_text(t, lines[i].what);
        table_number(t, 1e3 * lines[i].seconds);
        table_number(t, 100 * lines[i].seconds / a->span);
    }
    if (a->unscoped || step->lost)
        t->note = xprintf("%zu rows are in no scope; %zu launches could not be recorded.", a->unscoped, step->lost);
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
        table_number(t, groups[k].has_floor ? 1e3 * groups[k].lost : (double)NAN);
    }
    free(groups);
}

static inline void profile_table_kinds(Table* t, const ProfileStep* step, double span) {
    static const TableColumn columns[] = {{"kind", TABLE_TEXT, 0, 0},          {"rows", TABLE_NUMBER, 0, 0},
                                          {"ms", TABLE_NUMBER, 3, 0},          {"percent", TABLE_NUMBER, 1, 0},
                                          {"at_floor_ms", TABLE_NUMBER, 3, 0}, {"lost_ms", TABLE_NUMBER, 3, 0}};
    size_t count;
    ProfileGroup* groups = profile_group(step, BY_KIND, &count);
    table_open(t, "kinds", "By what binds it", columns, COUNT_OF(columns));
    for (size_t k = 0; k < count; k++) {
        table_text(t, profile_kind_name(profile_kind(groups[k].row)));
        table_number(t, (double)groups[k].rows);
        table_number(t, 1e3 * groups[k].seconds);
        table_number(t, 100 * groups[k].seconds / span);
        table_number(t, groups[k].has_floor ? 1e3 * groups[k].floor : (double)NAN);
        table_number(t, groups[k].has_floor ? 1e3 * groups[k].lost : (double)NAN);
    }
    t->note =
        xprintf("at_floor_ms: the time of the same work at the measured ceilings. Launch-bound: work so small that a "
                "launch takes longer.");
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
        for (int d = 0; d < DIRECTIONS; d++) table_number(t, positive(1e3 * groups[k].by_direction[d]));
        table_number(t, 1e3 * groups[k].seconds);
        table_number(t, 100 * groups[k].seconds / span);
        table_number(t, 1e3 * groups[k].lost);
    }
    t->note = xprintf("No layer: embeddings, heads, losses and the optimizer.");
    free(groups);
}

static inline void profile_table_ops(Table* t, const ProfileStep* step, double span) {
    static const TableColumn columns[] = {{"direction", TABLE_TEXT, 0, 0}, {"op", TABLE_TEXT, 0, 0},
                                          {"shapes", TABLE_TEXT, 0, 0},    {"calls", TABLE_NUMBER, 0, 0},
                                          {"kernels", TABLE_NUMBER, 0, 0}, {"ms", TABLE_NUMBER, 3, 0},
                                          {"percent", TABLE_NUMBER, 1, 0}, {"gflop", TABLE_NUMBER, 3, 0},
                                          {"mbyte", TABLE_NUMBER, 3, 0},   {"tflop_s", TABLE_NUMBER, 3, 0},
                                          {"gb_s", TABLE_NUMBER, 1, 0},    {"tensor_cores", TABLE_TEXT, 0, 0},
                                          {"roof", TABLE_TEXT, 0, 0},      {"roof_percent", TABLE_NUMBER, 1, 0},
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
        table_text(t, profile_roof_name(g->row->roof));
        table_number(t, g->row->roof ? 100 * profile_rate(g->floor, g->seconds) : (double)NAN);
        table_number(t, g->has_floor ? 1e3 * g->lost : (double)NAN);
    }
    t->note =
        xprintf("Flops and bytes are those of the op's header: every operand once. Per cent of the roof: the time at "
                "the measured ceiling against the time of all of the op's kernels. " PROFILE_ABOVE_ROOF);
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

// "96x32x1"; NULL for what has none.
static inline const char* profile_dimensions(char text[40], const int d[3]) {
    if (!d[0]) return NULL;
    snprintf(text, 40, "%dx%dx%d", d[0], d[1], d[2]);
    return text;
}

static inline void profile_table_kernels(Table* t, const ProfileStep* step) {
    static const TableColumn columns[] = {
        {"index", TABLE_NUMBER, 0, 0},     {"direction", TABLE_TEXT, 0, 0},      {"layer", TABLE_NUMBER, 0, 0},
        {"op", TABLE_TEXT, 0, 0},          {"shapes", TABLE_TEXT, 0, 0},         {"kernel", TABLE_TEXT, 0, 0},
        {"stream", TABLE_NUMBER, 0, 0},    {"grid", TABLE_TEXT, 0, 0},           {"block", TABLE_TEXT, 0, 0},
        {"registers", TABLE_NUMBER, 0, 0}, {"shared_bytes", TABLE_NUMBER, 0, 0}, {"start_us", TABLE_NUMBER, 2, 0},
        {"us", TABLE_NUMBER, 2, 0},        {"min_us", TABLE_NUMBER, 2, 0},       {"median_us", TABLE_NUMBER, 2, 0},
        {"max_us", TABLE_NUMBER, 2, 0},    {"gflop", TABLE_NUMBER, 3, 0},        {"mbyte", TABLE_NUMBER, 3, 0},
        {"tflop_s", TABLE_NUMBER, 3, 0},   {"gb_s", TABLE_NUMBER, 1, 0},         {"tensor_cores", TABLE_TEXT, 0, 0},
        {"roof", TABLE_TEXT, 0, 0},        {"roof_percent", TABLE_NUMBER, 1, 0}, {"lost_us", TABLE_NUMBER, 2, 0},
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
        table_number(t, 1e6 * r->least);
        table_number(t, 1e6 * r->median);
        table_number(t, 1e6 * r->most);
        table_number(t, positive(1e-9 * r->flops));
        table_number(t, positive(1e-6 * r->bytes));
        table_number(t, positive(1e-12 * profile_rate(r->flops, r->seconds)));
        table_number(t, positive(1e-9 * profile_rate(r->bytes, r->seconds)));
        table_text(t, r->tensor_cores < 0 ? NULL : r->tensor_cores ? "yes" : "no");
        table_text(t, profile_roof_name(r->roof));
        table_number(t, r->roof ? 100 * profile_rate(r->floor, r->seconds) : (double)NAN);
        table_number(t, 1e6 * profile_lost(r));
        table_text(t, r->full);
    }
    t->note = xprintf("An op's work is that of its longest row; its other rows, which help it, show none and count as "
                      "lost. " PROFILE_ABOVE_ROOF);
}

static inline void profile_table_gaps(Table* t, const ProfileStep* step) {
    static const TableColumn columns[] = {{"start_us", TABLE_NUMBER, 2, 0},
                                          {"us", TABLE_NUMBER, 2, 0},
                                          {"cause", TABLE_TEXT, 0, 0},
                                          {"before", TABLE_TEXT, 0, 0},
                                          {"index", TABLE_NUMBER, 0, 0}};
    size_t count;
    int ops = profile_is_of_ops(step);
    ProfileGap* gaps = profile_gaps(step, &count);
    table_open(t, "gaps", "Gaps in which nothing runs", columns, COUNT_OF(columns));
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
        "%s", ops ? "Between ops the program goes on from one to the next; what it waits for there is not known."
                  : "The host: it had not launched yet what comes next. Another stream: what ran last was there.");
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

// ---------------------------------------------------------------------------------------------------------
// The largest losses, in plain words

typedef struct {
    double seconds;
    char* sentence;
} ProfileLoss;

static inline int profile_loss_descending(const void* a, const void* b) {
    double x = ((const ProfileLoss*)a)->seconds, y = ((const ProfileLoss*)b)->seconds;
    return (x < y) - (x > y);
}

static inline ProfileLoss profile_loss_of_op(const ProfileGroup* g, const Ceilings* c, double span) {
    const ProfileRow* r = g->row;
    Text t = {NULL, 0, 0};
    ProfileLoss loss = {g->lost, NULL};
    size_t helpers = g->rows - g->calls;
    double own = g->lost - g->helpers;
    text_printf(&t, "%.3f ms, %.1f %% of the step: %s %s%s%s, %zu %s in %.3f ms.", 1e3 * g->lost, 100 * g->lost / span,
                direction_name(r->direction), *r->op ? r->op : "launches in no scope", *r->shapes ? " " : "", r->shapes,
                g->calls, g->calls == 1 ? "call" : "calls", 1e3 * g->seconds);
    if (r->roof == ROOF_COMPUTE)
        text_printf(&t, " At the %.4g TFLOP/s of a large matmul its arithmetic takes %.3f ms.", 1e-12 * c->flops,
                    1e3 * g->floor);
    if (r->roof == ROOF_MEMORY)
        text_printf(&t, " At the %.4g GB/s of a copy its operands take %.3f ms to move.", 1e-9 * c->bytes,
                    1e3 * g->floor);
    if (r->roof == ROOF_LAUNCH)
        text_printf(&t, " Its work is smaller than a launch, of which the shortest takes %.2f us.", 1e6 * c->launch);
    if (g->helpers > 0.1 * g->lost)
        text_printf(&t, " Of the loss %.3f ms are %zu %s; the longest itself loses %.3f ms.", 1e3 * g->helpers, helpers,
                    helpers == 1 ? "row that helps the longest: fuse it" : "rows that help the longest: fuse them",
                    1e3 * own);
    Roof roof = own > 0.1 * g->lost ? r->roof : ROOF_NONE;
    if (roof == ROOF_COMPUTE) text_printf(&t, " Look at its tiles, at what its epilogue does, and at its algorithm.");
    if (roof == ROOF_MEMORY) text_printf(&t, " Look at its accesses; then fuse it with a neighbour, to move less.");
    if (roof == ROOF_LAUNCH) text_printf(&t, " Fuse it with a neighbour, or give it more rows.");
    loss.sentence = t.text;
    return loss;
}

// The row before which the host was late most, in seconds.
static inline const ProfileRow* profile_latest(const ProfileStep* step) {
    size_t count, most = 0;
    ProfileGap* gaps = profile_gaps(step, &count);
    for (size_t i = 0; i < count; i++)
        if (gaps[i].host > gaps[most].host) most = i;
    const ProfileRow* row = count ? &step->rows[gaps[most].before] : NULL;
    free(gaps);
    return row;
}

// What costs the step most, the largest first (caller frees the list and its sentences); *count of them, `most` at most.
// `shares_ahead`: a run has share_parameters beside its next step.
static inline ProfileLoss* profile_losses(const ProfileStep* step, const Ceilings* c, int shares_ahead, size_t most,
                                          size_t* count) {
    size_t ops, n = 0;
    Accounting a = profile_account(step);
    ProfileGroup* groups = profile_group(step, BY_OP, &ops);
    ProfileLoss* losses = (ProfileLoss*)xcalloc(ops + 4, sizeof *losses);
    for (size_t k = 0; k < ops; k++)
        if (groups[k].lost > 1e-12) losses[n++] = profile_loss_of_op(&groups[k], c, a.span);
    double communication = a.communication - (shares_ahead ? a.shared : 0);
    double exposed = communication - a.hidden + (shares_ahead ? a.shared_hidden : 0);
    const ProfileRow* late = profile_latest(step);
    const ProfileLoss others[] = {
        {a.gap[GAP_HOST],
         late ? xprintf(
                    "%.3f ms, %.1f %% of the step: nothing runs because the host is late, the longest time before %s.",
                    1e3 * a.gap[GAP_HOST], 100 * a.gap[GAP_HOST] / a.span, late->kernel ? late->kernel : late->op)
              : NULL},
        {a.gap[GAP_STREAM],
         xprintf("%.3f ms, %.1f %% of the step: nothing runs between one stream's work and another's.",
                 1e3 * a.gap[GAP_STREAM], 100 * a.gap[GAP_STREAM] / a.span)},
        {a.gap[GAP_SWITCH],
         xprintf(
             "%.3f ms, %.1f %% of the step: nothing runs in the %zu gaps between kernels that follow each other, where "
             "one drains and the next starts. Fewer, longer kernels have fewer.",
             1e3 * a.gap[GAP_SWITCH], 100 * a.gap[GAP_SWITCH] / a.span, a.gaps[GAP_SWITCH])},
        {exposed,
         xprintf("%.3f ms, %.1f %% of the step: communication beside which nothing else runs, of %.3f ms in all%s.",
                 1e3 * exposed, 100 * exposed / a.span, 1e3 * communication,
                 communication < a.communication ? " without share_parameters" : "")},
    };
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        // The gaps come first. Between ops nobody knows whether they are losses.
        int is_known = others[i].sentence && !(profile_is_of_ops(step) && i < GAPS);
        if (is_known && others[i].seconds > 0) losses[n++] = others[i];
        else free(others[i].sentence);
    }
    qsort(losses, n, sizeof *losses, profile_loss_descending);
    *count = min_size(n, most);
    for (size_t i = *count; i < n; i++) free(losses[i].sentence);
    free(groups);
    return losses;
}

#endif
