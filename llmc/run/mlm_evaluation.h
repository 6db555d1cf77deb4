/* Losses and accuracies of a masked language model on held-out text. */
#ifndef LLMC_RUN_MLM_EVALUATION_H
#define LLMC_RUN_MLM_EVALUATION_H

#include "llmc/run/mlm_data.h"
#include "llmc/run/run.h"

// Of masked tokens, then of sequences: summed losses and correct predictions; then their counts. All double, for
// group_sum_counts().
typedef struct {
    double losses[2], correct[2], masked, sequences;
} MlmSums;

typedef struct {
    ValShare share;  // the rows that are measured
    MlmInput in;     // this rank's current micro-batch
    MlmSums sums;    // the counts of this rank's micro-batches so far
    // The result: the sum of losses that training minimises, and means over masked tokens and over sequences.
    double loss, masked_loss, masked_correct;
    int has_next;
    double next_loss, next_correct;
} MlmEvaluation;

// Begin an evaluation on the data's validation part, in micro-batches of at most B rows.
static inline MlmEvaluation mlm_evaluation_begin(const Run* r, const MlmSource* data, int B) {
    MlmEvaluation e;
    memset(&e, 0, sizeof e);
    e.share = val_share(&r->settings, mlm_sequences(&data->val), B, &r->group);
    return e;
}

// Load this rank's next micro-batch into e->in. Returns 0 after the last one, or early because of a `signal` (0: none).
static inline int mlm_evaluation_next(MlmEvaluation* e, Run* r, MlmSource* data, int signal) {
    MlmBatch* batch = &data->batches[0];
    if (!run_next_val(r, &e->share, signal)) return 0;
    mlm_batch_build(batch, &data->val, e->share.first, e->share.count);
    e->in = mlm_load(&data->loader, batch, &r->ctx);
    e->sums.masked += batch->masked, e->sums.sequences += batch->count;
    return 1;
}

static inline void mlm_evaluation_print(const MlmEvaluation* e) {
    printf("val loss %.6f | masked tokens: loss %.6f, %.2f %% correct", e->loss, e->masked_loss,
           100 * e->masked_correct);
    if (e->has_next) printf(" | next sentence: loss %.6f, %.2f %% correct", e->next_loss, 100 * e->next_correct);
    val_share_print(&e->share);
}

// Write a line of the log, or without a log print the result. Does nothing if a signal ended the evaluation.
static inline void mlm_evaluation_show(const MlmEvaluation* e, Log* log, const Session* s) {
    Text t = {NULL, 0, 0};
    if (e->share.is_stopped) return;
    if (!log) {
        mlm_evaluation_print(e);
        return;
    }
    log_put(&t, "val_mlm_loss", e->masked_loss, 9);
    log_put(&t, "val_mlm_accuracy", e->masked_correct, 6);
    if (e->has_next) log_put(&t, "val_nsp_loss", e->next_loss, 9);
    if (e->has_next) log_put(&t, "val_nsp_accuracy", e->next_correct, 6);
    log_validation(log, s->step, s->last, e->loss, t.text);
    free(t.text);
}

// Compute the result over all ranks from this rank's summed losses and correct predictions, [2] each, on the device. Log
// or print it.
static inline void mlm_evaluation_end(MlmEvaluation* e, const Session* s, Log* log, const real* losses,
                                      const real* correct, int has_next) {
    MlmSums sums = e->sums;
    real values[4] = {0, 0, 0, 0};
    if (e->share.count) {
        device_download(s->ctx, values, losses, 2 * sizeof(real));
        device_download(s->ctx, values + 2, correct, 2 * sizeof(real));
    }
    for (int i = 0; i < 2; i++) sums.losses[i] = (double)values[i], sums.correct[i] = (double)values[2 + i];
    group_sum_counts(s->group, (double*)&sums, sizeof sums / sizeof(double));
    session_check_finite(s, "the validation loss", sums.losses[0] + (has_next ? sums.losses[1] : 0));
    e->masked_loss = sums.losses[0] / sums.masked, e->masked_correct = sums.correct[0] / sums.masked;
    e->has_next = has_next;
    if (has_next) e->next_loss = sums.losses[1] / sums.sequences, e->next_correct = sums.correct[1] / sums.sequences;
    e->loss = e->masked_loss + e->next_loss;
    mlm_evaluation_show(e, log, s);
}

#endif
