/* Evaluation: which sequences a validation takes, its result over all ranks, and what follows from a result that is not
 * finite.
 *
 * A validation takes the first sequences of the held-out data, in at most --val-batches micro-batches of B. The last
 * micro-batch may be smaller. The result is the mean over these sequences. If they are all of the data, B changes it
 * only by rounding. */
#ifndef LLMC_RUN_EVALUATE_H
#define LLMC_RUN_EVALUATE_H

#include "llmc/checkpoint/room.h"
#include "llmc/run/state.h"

// ---------------------------------------------------------------------------------------------------------
// The sequences of a validation

typedef struct {
    uint64_t B, sequences, batches;       // to measure
    uint64_t all_sequences, all_batches;  // in the data
    // This rank's current micro-batch, from val_share_next().
    uint64_t first;  // its first sequence
    int count;       // number of its sequences; 0: this rank has had no micro-batch
    Mode mode;       // how its loss is written: SET for the rank's first, then ADD
    uint64_t next, ranks;
    int is_stopped;  // after the last: a signal to any rank ended the validation early, so it has no result
} ValShare;

// Divide the first `sequences` sequences into micro-batches of B, at most `most_batches` (0: all). Micro-batches are
// distributed round-robin over the ranks.
static inline ValShare val_share(int most_batches, uint64_t sequences, int B, const ProcessGroup* group) {
    uint64_t most = (uint64_t)most_batches;
    ValShare v;
    memset(&v, 0, sizeof v);
    v.B = (uint64_t)B, v.sequences = v.all_sequences = sequences;
    v.batches = v.all_batches = (sequences + v.B - 1) / v.B;
    if (most > 0 && v.batches > most) v.batches = most, v.sequences = most * v.B;
    v.mode = SET, v.next = (uint64_t)group->rank, v.ranks = (uint64_t)group->size;
    return v;
}

// Advance to this rank's next micro-batch. Returns 0 after the last one.
static inline int val_share_next(ValShare* v) {
    if (v->next >= v->batches) return 0;
    if (v->count) v->mode = ADD;
    v->first = v->next * v->B;
    v->count = (int)(v->sequences - v->first < v->B ? v->sequences - v->first : v->B);
    v->next += v->ranks;
    return 1;
}

// The same in a run. A `signal` (0: none) ends the loop early, on this rank. After the last micro-batch,
// share->is_stopped tells whether any rank received a signal. All ranks call it.
static inline int run_next_val(Run* r, ValShare* share, int signal) {
    group_begin_work(&r->group);
    if (!signal && val_share_next(share)) return 1;
    share->is_stopped = group_any(&r->group, signal != 0);
    return 0;
}

// Print the end of the result's line.
static inline void val_share_print(const ValShare* v) {
    unsigned long long n = v->batches, all = v->all_batches, sequences = v->sequences, all_sequences = v->all_sequences;
    if (n == all) printf(" | all %llu micro-batches, %llu sequences\n", all, all_sequences);
    else
        printf(" | %llu of %llu micro-batches, %llu of %llu sequences; -m 0 takes all\n", n, all, sequences,
               all_sequences);
}

// ---------------------------------------------------------------------------------------------------------
// Gradients and losses that are not finite: the run ends with STOPPED_BY_NAN, or continues with --on-nan skip. Loading
// weights that are not finite is an error (model_files.h).

// A value is not finite. Rank 0 prints `what`; then the run ends or continues. All ranks call it.
static inline void run_not_finite(const Run* r, const char* what) {
    int trains = r->writer != NULL, stops = !trains || r->settings.on_nan == NAN_STOP;
    if (trains && stops) writer_finish(r->writer);
    if (r->group.rank == 0 && !stops) warn("%s", what);
    if (r->group.rank == 0 && stops) {
        char* good = trains && r->writer->saved >= 0 ? checkpoint_path(r->out, r->writer->saved) : xprintf("none");
        fflush(stdout);
        if (trains)
            fprintf(stderr, "error: %s; the last good checkpoint: %s; --on-nan skip would continue\n", what, good);
        else fprintf(stderr, "error: %s; take an earlier checkpoint or another model\n", what);
        free(good);
    }
    if (stops) group_exit(&r->group, STOPPED_BY_NAN);
}

// The optimizer skipped the update of `step` because the gradients were not finite. Report the first such tensor of the
// gradients, which may be of a later step.
static inline void run_report_nan(Run* r, int64_t step, double loss, double norm) {
    const TensorTable* table = &r->buffers->table;
    int first = -1;
    if (r->group.rank == 0) {  // all ranks have the same norm
        HostView view = host_view_open(r->buffers->grads, table->elements, VIEW_REAL);
        host_view_read(&r->ctx, &view);
        first = tensors_first_not_finite(table, view.values);
        host_view_close(&view);
    }
    char* what = xprintf("step %lld: loss %g, gradient norm %g, first in the gradient of %s; the update was skipped",
                         (long long)step, plain_nan(loss), plain_nan(norm),
                         first >= 0 ? table->tensors[first].name : "no single tensor (their norm overflowed)");
    run_not_finite(r, what);
    free(what);
}

// Check the result of an evaluation, which all ranks have. `what` names it.
static inline void run_check_finite(const Run* r, const char* what, double value) {
    if (isfinite(value)) return;
    char* text = r->writer ? xprintf("step %lld: %s is %g", (long long)r->step, what, plain_nan(value))
                           : xprintf("%s is %g", what, plain_nan(value));
    run_not_finite(r, text);
    free(text);
}

// ---------------------------------------------------------------------------------------------------------
// The result of a validation

// A loss as log.jsonl has it: a resumed run may know it only from there.
static inline double best_logged(double loss) {
    char digits[32];
    snprintf(digits, sizeof digits, "%.9g", loss);
    return strtod(digits, NULL);
}

// Record the loss of a validation after `step` steps.
static inline void best_judge(Best* b, int64_t step, double loss) {
    if (step <= b->judged) return;
    b->judged = step;
    if (!isfinite(loss) || (b->step > 0 && best_logged(loss) >= best_logged(b->loss))) return;
    b->loss = loss, b->step = step;
}

// Log a validation loss over all ranks, with `extra` as in LogStep. The loss of the average of the weights has its own
// line, and does not count for --keep-best.
static inline void run_log_validation(Run* r, double loss, const char* extra) {
    if (!r->average.is_in) {
        best_judge(&r->best, r->step, loss);
        log_validation(&r->log, r->step, r->last, loss, extra);
        return;
    }
    Text t = {NULL, 0, 0};
    log_print_step(r->step, r->last);
    printf("val loss of the average %.4f\n", plain_nan(loss));
    fflush(stdout);
    text_append(&t, "{", 1);
    json_put_integer(&t, "step", r->step);
    log_put(&t, "ema_val_loss", loss, 9);
    text_append(&t, "}", 1);
    log_line(&r->log, &t);
    free(t.text);
}

// Sum the validation loss over the ranks, and log it, or with --evaluate print it. All ranks call it.
static inline void run_show_validation(Run* r, double loss, const ValShare* share) {
    group_sum_counts(&r->group, &loss, 1);
    if (share->is_stopped) return;
    run_check_finite(r, "the validation loss", loss);
    if (!r->settings.evaluate) run_log_validation(r, loss, NULL);
    else printf("val loss %.6f", loss), val_share_print(share);
}

// Print a sample of the model and write it to OUT/sample.txt. If that fails, the run warns and continues.
static inline void run_show_text(Run* r, const Text* text) {
    printf("sample after step %lld:\n---\n", (long long)r->step);
    fwrite(text->text, 1, text->length, stdout);  // bytes of any kind
    printf("\n---\n");
    if (!*r->out || run_lock_check(&r->lock) != 0) return;
    char* path = xprintf("%s/sample.txt", r->out);
    if (write_file(path, text->text, text->length) != 0) warn("%s: cannot be written: %s", path, strerror(errno));
    free(path);
}

#endif
