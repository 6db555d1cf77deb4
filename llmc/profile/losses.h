/* The largest losses of a step, as sentences: ops that exceed their roofline time, and the causes of gaps between
 * launches. */
#ifndef LLMC_PROFILE_LOSSES_H
#define LLMC_PROFILE_LOSSES_H

#include "llmc/profile/tables.h"

typedef struct {
    double seconds;
    char* sentence;
} ProfileLoss;

static inline int profile_loss_descending(const void* a, const void* b) {
    double x = ((const ProfileLoss*)a)->seconds, y = ((const ProfileLoss*)b)->seconds;
    return (x < y) - (x > y);
}

static inline ProfileLoss profile_loss_of_op(const ProfileGroup* g, const MeasuredPeaks* c, double span) {
    const ProfileRow* r = g->row;
    Text t = {NULL, 0, 0};
    ProfileLoss loss = {.seconds = g->lost};
    size_t helpers = g->rows - g->calls;
    double own = g->lost - g->helpers;
    text_printf(&t, "%.3f ms, %.1f %% of the step: %s %s%s%s, %zu %s in %.3f ms.", 1e3 * g->lost, 100 * g->lost / span,
                direction_name(r->direction), *r->op ? r->op : "launches without a scope", *r->shapes ? " " : "",
                r->shapes, g->calls, g->calls == 1 ? "call" : "calls", 1e3 * g->seconds);
    if (r->bound == BOUND_COMPUTE)
        text_printf(&t, " Its flops take %.3f ms at the %.4g TFLOP/s of a large matmul%s.", 1e3 * g->roofline,
                    1e-12 * profile_peak_flops(r->op, c), profile_peak_flops(r->op, c) == c->flops ? "" : " in fp8");
    if (r->bound == BOUND_MEMORY)
        text_printf(&t, " Its bytes take %.3f ms at the %.4g GB/s of a copy.", 1e3 * g->roofline, 1e-9 * c->bytes);
    if (r->bound == BOUND_LAUNCH)
        text_printf(&t, " Its work takes less than the shortest launch, %.2f us.", 1e6 * c->launch);
    if (g->helpers > 0.1 * g->lost)
        text_printf(&t, " %.3f ms of the loss are in %zu helper %s, %.3f ms in the longest. Fuse the %s.",
                    1e3 * g->helpers, helpers, helpers == 1 ? "row" : "rows", 1e3 * own,
                    helpers == 1 ? "helper" : "helpers");
    Bound bound = own > 0.1 * g->lost ? r->bound : BOUND_NONE;
    if (bound == BOUND_COMPUTE) text_printf(&t, " Look at its tile sizes, its epilogue and its algorithm.");
    if (bound == BOUND_MEMORY)
        text_printf(&t, " Look at its memory accesses; then fuse it with a neighbour to move fewer bytes.");
    if (bound == BOUND_LAUNCH) text_printf(&t, " Fuse it with a neighbour, or give it more work per launch.");
    loss.sentence = t.text;
    return loss;
}

// The row that waited longest for the host.
static inline const ProfileRow* profile_most_delayed(const ProfileStep* step) {
    size_t count, most = 0;
    ProfileGap* gaps = profile_gaps(step, &count);
    for (size_t i = 0; i < count; i++)
        if (gaps[i].host > gaps[most].host) most = i;
    const ProfileRow* row = count ? &step->rows[gaps[most].before] : NULL;
    free(gaps);
    return row;
}

// The largest losses of the step in descending order, *count of them, at most `most` (caller frees the list and its
// sentences). `broadcast_overlaps`: a run overlaps share_parameters with its next step.
static inline ProfileLoss* profile_losses(const ProfileStep* step, const MeasuredPeaks* c, int broadcast_overlaps,
                                          size_t most, size_t* count) {
    size_t ops, n = 0;
    Accounting a = profile_account(step);
    ProfileGroup* groups = profile_group(step, BY_OP, &ops);
    ProfileLoss* losses = (ProfileLoss*)xcalloc(ops + 4, sizeof *losses);
    for (size_t k = 0; k < ops; k++)
        if (groups[k].lost > 1e-12) losses[n++] = profile_loss_of_op(&groups[k], c, a.span);
    double communication = a.communication - (broadcast_overlaps ? a.broadcast : 0);
    double exposed = communication - a.overlapped + (broadcast_overlaps ? a.broadcast_overlapped : 0);
    const ProfileRow* late = profile_most_delayed(step);
    const ProfileLoss others[] = {
        {a.gap[GAP_HOST],
         late ? xprintf("%.3f ms, %.1f %% of the step: the GPU waits for the host to launch, longest before %s.",
                        1e3 * a.gap[GAP_HOST], 100 * a.gap[GAP_HOST] / a.span, late->kernel ? late->kernel : late->op)
              : NULL},
        {a.gap[GAP_STREAM],
         xprintf("%.3f ms, %.1f %% of the step: nothing runs between the work of one stream and another's.",
                 1e3 * a.gap[GAP_STREAM], 100 * a.gap[GAP_STREAM] / a.span)},
        {a.gap[GAP_SWITCH], xprintf("%.3f ms, %.1f %% of the step: nothing runs in the %zu gaps between consecutive "
                                    "kernels, while one drains and "
                                    "the next starts. Fewer, longer kernels leave fewer gaps.",
                                    1e3 * a.gap[GAP_SWITCH], 100 * a.gap[GAP_SWITCH] / a.span, a.gaps[GAP_SWITCH])},
        {exposed,
         xprintf("%.3f ms, %.1f %% of the step: communication that overlaps with nothing, of %.3f ms in all%s.",
                 1e3 * exposed, 100 * exposed / a.span, 1e3 * communication,
                 communication < a.communication ? " without share_parameters" : "")},
    };
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        // The gaps come first. Without traced kernels it is unknown whether they are losses.
        int is_known = others[i].sentence && !(profile_rows_are_ops(step) && i < GAPS);
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
