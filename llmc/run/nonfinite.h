/* Non-finite gradients and losses: the run ends with an error and STOPPED_BY_NAN, or continues with --on-nan skip.
 * Loading non-finite weights is an error (model_files.h). */
#ifndef LLMC_RUN_NONFINITE_H
#define LLMC_RUN_NONFINITE_H

#include "llmc/run/session.h"

// A value is not finite. Rank 0 prints `what`; then the run ends or continues. All ranks call it.
static inline void session_not_finite(const Session* s, const char* what) {
    int trains = s->writer != NULL, stops = !trains || s->settings->on_nan == NAN_STOP;
    if (trains && stops) session_finish_save(s);
    if (s->group->rank == 0 && !stops) warn("%s", what);
    if (s->group->rank == 0 && stops) {
        char* good = trains && s->writer->saved >= 0 ? checkpoint_path(s->out, s->writer->saved) : xprintf("none");
        fflush(stdout);
        if (trains)
            fprintf(stderr, "error: %s; the last good checkpoint: %s; --on-nan skip would continue\n", what, good);
        else fprintf(stderr, "error: %s; take an earlier checkpoint or another model\n", what);
        free(good);
    }
    if (stops) group_exit(s->group, STOPPED_BY_NAN);
}

// The optimizer skipped the update of `step` because the gradients were not finite. Report the first such tensor of
// `grads`, which may be of a later step.
static inline void session_report_nan(const Session* s, int64_t step, const TensorTable* table, const real* grads,
                                      double loss, double norm) {
    int first = -1;
    if (s->group->rank == 0) {  // all ranks have the same norm
        HostView view = host_view_open((void*)grads, table->elements, VIEW_REAL);
        host_view_read(s->ctx, &view);
        first = tensors_first_not_finite(table, view.values);
        host_view_close(&view);
    }
    char* what = xprintf("step %lld: loss %g, gradient norm %g, first in the gradient of %s; the update was skipped",
                         (long long)step, plain_nan(loss), plain_nan(norm),
                         first >= 0 ? table->tensors[first].name : "no single tensor (their norm overflowed)");
    session_not_finite(s, what);
    free(what);
}

// Check the result of an evaluation, which all ranks have. `what` names it.
static inline void session_check_finite(const Session* s, const char* what, double value) {
    if (isfinite(value)) return;
    char* text = s->writer ? xprintf("step %lld: %s is %g", (long long)s->step, what, plain_nan(value))
                           : xprintf("%s is %g", what, plain_nan(value));
    session_not_finite(s, text);
    free(text);
}

// Log a validation loss over all ranks, with `extra` as in LogStep. The loss of the average of the weights has its own
// line, and does not count for --keep-best.
static inline void session_log_validation(Session* s, Log* log, double loss, const char* extra) {
    if (!s->average.is_in) {
        best_judge(&s->best, s->step, loss);
        log_validation(log, s->step, s->last, loss, extra);
        return;
    }
    Text t = {NULL, 0, 0};
    log_print_step(s->step, s->last);
    printf("val loss of the average %.4f\n", plain_nan(loss));
    fflush(stdout);
    text_append(&t, "{", 1);
    json_put_integer(&t, "step", s->step);
    log_put(&t, "ema_val_loss", loss, 9);
    text_append(&t, "}", 1);
    log_line(log, &t);
    free(t.text);
}

// Sum the validation loss over the ranks, and log it, or print it if `log` is NULL. All ranks call it.
static inline void session_show_validation(Session* s, Log* log, double loss, const ValShare* share) {
    group_sum_counts(s->group, &loss, 1);
    if (share->is_stopped) return;
    session_check_finite(s, "the validation loss", loss);
    if (log) session_log_validation(s, log, loss, NULL);
    else printf("val loss %.6f", loss), val_share_print(share);
}

#endif
