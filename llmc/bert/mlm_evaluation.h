/* A masked language model's data, the work of a step, and losses and accuracies on held-out text and on a set of clozes
 * (llmc/choices/choice_files.h). In a cloze it predicts the first token of the ending, from the context and the
 * rest of the ending:
 *
 *   [CLS] Ben goes to the park . Where is Ben ? Ben is in the [MASK] . [SEP]
 *
 * A cloze counts in acc if the model's most likely token of the vocabulary is the correct one; perplexity is exp(mean
 * loss). */
#ifndef LLMC_BERT_MLM_EVALUATION_H
#define LLMC_BERT_MLM_EVALUATION_H

#include "llmc/bert/mlm_data.h"
#include "llmc/run/run.h"

// Summed losses, correct predictions and counts, first of masked tokens, then of sequences. All double, for
// group_sum_counts().
typedef struct {
    double losses[2], correct[2], masked, sequences;
} MlmSums;

typedef struct {
    const MultipleChoice* set;  // of clozes; NULL: held-out text
    ValShare share;             // the rows or clozes to evaluate
    MlmInput in;                // this rank's current micro-batch
    MlmSums sums;               // the counts of this rank's micro-batches so far
    // The result: the sum of losses that training minimises, and means over masked tokens and over sequences.
    double loss, masked_loss, masked_correct;
    int has_next;
    double next_loss, next_correct;
} MlmEvaluation;

// Begin an evaluation on `set`, or if it is NULL on the data's validation part, in micro-batches of at most B rows.
static inline MlmEvaluation mlm_evaluation_begin(const Run* r, const MlmSource* data, const MultipleChoice* set,
                                                 int B) {
    MlmEvaluation e;
    memset(&e, 0, sizeof e);
    e.set = set;
    e.share = val_share(set ? 0 : r->settings.val_batches, set ? (uint64_t)set->count : mlm_sequences(&data->val), B,
                        &r->group);
    return e;
}

// Open the sets of a run. Their examples must be clozes. A sequence also has [CLS] and [SEP].
static inline void mlm_clozes_open(MultipleChoiceSets* s, int V, int T, const ProcessGroup* group) {
    multiple_choice_sets_open(s, V, T - 3, group);
    for (int i = 0; i < s->count; i++)
        if (!s->set[i].is_cloze)
            die(USAGE, "%s: has examples of several endings; BERT fills in clozes, which have one each",
                s->set[i].file);
}

// Append a cloze to the batch, as at most T tokens. If it is too long, its context is cut at the beginning.
static inline void mlm_batch_add_cloze(MlmBatch* b, MultipleChoiceText context, const SentencesHeader* v, int T) {
    MultipleChoiceText ending = multiple_choice_next(context);
    int kept = min_int(context.length, T - 2 - ending.length), masked = b->rows + 1 + kept;
    b->cu_seqlens[b->count] = b->rows;
    b->tokens[b->rows] = v->cls;
    for (int i = 0; i < kept; i++) b->tokens[b->rows + 1 + i] = context.tokens[context.length - kept + i];
    for (int i = 0; i < ending.length; i++) b->tokens[masked + i] = ending.tokens[i];
    b->tokens[masked] = v->mask, b->tokens[masked + ending.length] = v->sep;
    b->masked_rows[b->masked] = masked, b->targets[b->masked++] = ending.tokens[0];
    mlm_batch_append(b, NULL, (uint32_t)(kept + ending.length + 2), 0);
    mlm_batch_end(b, -1);
}

// Load this rank's next micro-batch into e->in. Returns 0 after the last one, or early because of a `signal` (0: none).
static inline int mlm_evaluation_next(MlmEvaluation* e, Run* r, MlmSource* data, int signal) {
    MlmBatch* batch = &data->batches[0];
    if (!run_next_val(r, &e->share, signal)) return 0;
    if (!e->set) mlm_batch_build(batch, &data->val, e->share.first, e->share.count);
    else {
        mlm_batch_begin(batch, 0);
        for (int i = 0; i < e->share.count; i++)
            mlm_batch_add_cloze(batch, multiple_choice_example(e->set, (int)e->share.first + i).context,
                                &data->train.text.vocabulary, data->T);
    }
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

// Log the result, or with --evaluate print it. Does nothing if a signal ended the evaluation.
static inline void mlm_evaluation_show(const MlmEvaluation* e, Run* r) {
    Text t = {NULL, 0, 0};
    if (e->share.is_stopped) return;
    if (r->settings.evaluate) {
        mlm_evaluation_print(e);
        return;
    }
    log_put(&t, "val_mlm_loss", e->masked_loss, 9);
    log_put(&t, "val_mlm_accuracy", e->masked_correct, 6);
    if (e->has_next) log_put(&t, "val_nsp_loss", e->next_loss, 9);
    if (e->has_next) log_put(&t, "val_nsp_accuracy", e->next_correct, 6);
    run_log_validation(r, e->loss, t.text);
    free(t.text);
}

static inline void mlm_evaluation_show_clozes(const MlmEvaluation* e, MlmSums sums, Run* r) {
    MultipleChoiceResult result = {.examples = sums.masked, .acc = sums.correct[0] / sums.masked, .is_cloze = 1};
    result.perplexity = exp(sums.losses[0] / sums.masked), result.not_finite = !isfinite(sums.losses[0]);
    if (!e->share.is_stopped) multiple_choice_show(r, e->set, result);
}

// Compute the result over all ranks from this rank's summed losses and correct predictions, [2] each, on the device.
// Log or print it.
static inline void mlm_evaluation_end(MlmEvaluation* e, Run* r, const real* losses, const real* correct, int has_next) {
    MlmSums sums = e->sums;
    real values[4] = {0, 0, 0, 0};
    if (e->share.count) {
        device_download(&r->ctx, values, losses, 2 * sizeof(real));
        device_download(&r->ctx, values + 2, correct, 2 * sizeof(real));
    }
    for (int i = 0; i < 2; i++) sums.losses[i] = (double)values[i], sums.correct[i] = (double)values[2 + i];
    group_sum_counts(&r->group, (double*)&sums, sizeof sums / sizeof(double));
    if (e->set) {
        mlm_evaluation_show_clozes(e, sums, r);
        return;
    }
    run_check_finite(r, "the validation loss", sums.losses[0] + (has_next ? sums.losses[1] : 0));
    e->masked_loss = sums.losses[0] / sums.masked, e->masked_correct = sums.correct[0] / sums.masked;
    e->has_next = has_next;
    if (has_next) e->next_loss = sums.losses[1] / sums.sequences, e->next_correct = sums.correct[1] / sums.sequences;
    e->loss = e->masked_loss + e->next_loss;
    mlm_evaluation_show(e, r);
}

// Open the data, and the sets of clozes, of a model of V tokens and T positions.
static inline void mlm_run_open_data(Run* r, MlmSettings* m, MlmSource* source, int V, int T, Text config) {
    mlm_clozes_open(&m->choices, V, T, &r->group);
    mlm_source_open(source, r->train_pattern, r->val_pattern, V, (uint64_t)r->settings.seed);
    mlm_check_words(&source->train, &source->words);
    source->train.in_order = !r->settings.shuffle;
    run_check_data(r, mlm_fingerprint(&source->train), r->train_pattern);
    run_set_last(r, mlm_sequences(&source->train));
    source->train.recipe.fall_rows = (uint64_t)(r->last - 1) * (uint64_t)run_step_sequences(r);
    run_check_ranks(r, config, source->has_val, source->has_val ? mlm_fingerprint(&source->val) : 0);
}

#endif
