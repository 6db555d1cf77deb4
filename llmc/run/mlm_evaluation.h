/* Losses and accuracies of a masked language model on held-out text. */
#ifndef LLMC_RUN_MLM_EVALUATION_H
#define LLMC_RUN_MLM_EVALUATION_H

#include "llmc/run/mlm_data.h"
#include "llmc/run/nonfinite.h"

typedef struct {
    double loss, masked_loss, masked_correct;  // the sum of losses that training minimises; means over masked tokens
    int has_next;
    double next_loss, next_correct;  // means over sequences
    ValShare share;                  // the rows that were measured
} MlmEvaluation;

// Of masked tokens, then of sequences: summed losses and correct predictions; then their counts. All double, for
// group_sum_counts().
typedef struct {
    double losses[2], correct[2], masked, sequences;
} MlmSums;

// losses, correct [2]: on the device.
static inline void mlm_sums_read(MlmSums* sums, const real* losses, const real* correct, Context* ctx) {
    real values[4];
    device_download(ctx, values, losses, 2 * sizeof(real));
    device_download(ctx, values + 2, correct, 2 * sizeof(real));
    for (int i = 0; i < 2; i++) sums->losses[i] = (double)values[i], sums->correct[i] = (double)values[2 + i];
}

// From each rank's sums.
static inline MlmEvaluation mlm_evaluation(MlmSums sums, int has_next, ValShare share, const Session* s) {
    group_sum_counts(s->group, (double*)&sums, sizeof sums / sizeof(double));
    session_check_finite(s, "the validation loss", sums.losses[0] + (has_next ? sums.losses[1] : 0));
    MlmEvaluation e;
    memset(&e, 0, sizeof e);
    e.masked_loss = sums.losses[0] / sums.masked, e.masked_correct = sums.correct[0] / sums.masked;
    e.has_next = has_next;
    e.share = share;
    if (has_next) e.next_loss = sums.losses[1] / sums.sequences, e.next_correct = sums.correct[1] / sums.sequences;
    e.loss = e.masked_loss + e.next_loss;
    return e;
}

static inline void mlm_evaluation_print(MlmEvaluation e) {
    printf("val loss %.6f | masked tokens: loss %.6f, %.2f %% correct", e.loss, e.masked_loss, 100 * e.masked_correct);
    if (e.has_next) printf(" | next sentence: loss %.6f, %.2f %% correct", e.next_loss, 100 * e.next_correct);
    val_share_print(&e.share);
}

// Write a line of the log, or without a log print the result.
static inline void mlm_evaluation_show(Log* log, const Session* s, MlmEvaluation e) {
    Text t = {NULL, 0, 0};
    if (!log) {
        mlm_evaluation_print(e);
        return;
    }
    log_put(&t, "val_mlm_loss", e.masked_loss, 9);
    log_put(&t, "val_mlm_accuracy", e.masked_correct, 6);
    if (e.has_next) log_put(&t, "val_nsp_loss", e.next_loss, 9);
    if (e.has_next) log_put(&t, "val_nsp_accuracy", e.next_correct, 6);
    log_validation(log, s->step, s->last, e.loss, t.text);
    free(t.text);
}

#endif
