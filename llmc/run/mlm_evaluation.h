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

// From the sums of losses and of right predictions, first those of masked tokens, then those of sequences.
static inline MlmEvaluation mlm_evaluation(const real* losses, const real* right, MlmCounts counts, int has_next) {
    MlmEvaluation e = {0, (double)losses[0] / counts.masked, (double)right[0] / counts.masked, has_next, 0, 0};
    if (has_next)
        e.next_loss = (double)losses[1] / counts.sequences, e.next_right = (double)right[1] / counts.sequences;
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
