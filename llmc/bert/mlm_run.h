/* The model-independent part of a masked language model's run: its data, and the work of a step. */
#ifndef LLMC_BERT_MLM_RUN_H
#define LLMC_BERT_MLM_RUN_H

#include "llmc/bert/fill_mask.h"
#include "llmc/bert/mlm_evaluation.h"

// Open the data, and the sets of clozes, of a model of V tokens and T positions.
static inline void mlm_run_open_data(Run* r, MlmSettings* m, MlmSource* source, int V, int T) {
    mlm_clozes_open(&m->choices, V, T, &r->group);
    mlm_source_open(source, r->train_pattern, r->val_pattern, V, (uint64_t)r->settings.seed);
    mlm_check_words(&source->train, &source->words);
    source->train.in_order = !r->settings.shuffle;
    session_check_data(&r->session, mlm_fingerprint(&source->train), r->train_pattern);
    session_set_last(&r->session, mlm_sequences(&source->train));
}

// Sizes of an encoder and its heads. next: 1 if there is a next-sentence head.
typedef struct {
    int L, C, F, V, next;
} MlmSizes;

// The work of a step of `sequences` rows that contains `counts`. The decoder is counted for masked tokens only.
static inline StepWork mlm_step_work(MlmCounts counts, int sequences, MlmSizes z) {
    double C = z.C, heads = (z.V * C + C * C) * counts.masked + (z.next ? C * C * counts.sequences : 0);
    double flops = mlm_encoder_flops(counts, z.L, z.C, z.F) + 6 * heads;
    StepWork work = {.consumed = sequences, .sequences = counts.sequences, .tokens = counts.tokens, .flops = flops};
    return work;
}

#endif
