/* What is told of a masked language model on held-out text. */
#ifndef LLMC_MLM_EVALUATION_H
#define LLMC_MLM_EVALUATION_H

#include "mlm_data.h"
#include "session.h"

typedef struct {
    double loss, masked_loss, masked_right;  // the sum that training minimises; means over masked tokens
    int has_next;
    double next_loss, next_right;  // means over sequences
} MlmEvaluation;

// Of masked tokens, then of sequences: losses and right predictions; and how many there are. Nothing but double.
typedef struct {
    double losses[2], right[2], masked, sequences;
} MlmSums;

// losses and right [2]: where the ops run.
static inline void mlm_sums_read(MlmSums* sums, const real* losses, const real* right, Context* ctx) {
    real values[4];
    device_download(ctx, values, losses, 2 * sizeof(real));
    device_download(ctx, values + 2, right, 2 * sizeof(real));
    for (int i = 0; i < 2; i++) sums->losses[i] = (double)values[i], sums->right[i] = (double)values[2 + i];
}

// From each rank's sums.
static inline MlmEvaluation mlm_evaluation(MlmSums sums, int has_next, Comm* comm) {
    comm_sum_counts(comm, (double*)&sums, sizeof sums / sizeof(double));
    MlmEvaluation e = {0, sums.losses[0] / sums.masked, sums.right[0] / sums.masked, has_next, 0, 0};
    if (has_next) e.next_loss = sums.losses[1] / sums.sequences, e.next_right = sums.right[1] / sums.sequences;
    e.loss = e.masked_loss + e.next_loss;
    return e;
}

static inline void mlm_evaluation_log(Log* log, const Session* s, MlmEvaluation e) {
    Text t = {NULL, 0, 0};
    log_put(&t, "val_mlm_loss", e.masked_loss, 9);
    log_put(&t, "val_mlm_accuracy", e.masked_right, 6);
    if (e.has_next) log_put(&t, "val_nsp_loss", e.next_loss, 9);
    if (e.has_next) log_put(&t, "val_nsp_accuracy", e.next_right, 6);
    log_validation(log, s->step, s->last, e.loss, t.text);
    free(t.text);
}

static inline void mlm_evaluation_print(MlmEvaluation e) {
    printf("val loss %.6f | masked tokens: loss %.6f, %.2f %% right", e.loss, e.masked_loss, 100 * e.masked_right);
    if (e.has_next) printf(" | next sentence: loss %.6f, %.2f %% right", e.next_loss, 100 * e.next_right);
    printf("\n");
}

#endif
