/* Settings of a masked language model's run: how sequences are drawn and masked, and which samples are shown. */
#ifndef LLMC_BERT_MLM_SETTINGS_H
#define LLMC_BERT_MLM_SETTINGS_H

#include "llmc/bert/batch_mlm.h"
#include "llmc/explain/settings.h"
#include "llmc/use/multiple_choice.h"

// In the order of the flag's choices.
typedef enum { MEAN_MICRO, MEAN_GLOBAL } LossMean;
typedef enum { POOL_MEAN, POOL_CLS } Pool;

typedef struct {
    int loss_mean, next_sentence, whole_words, pack;
    double mask_fraction, short_fraction;
    int sample_every;
    const char *phase2, *fill;
    const char *embed, *vectors;  // texts, and the file for their vectors
    int pool;
    ExplainSettings explain;
    MultipleChoiceSets choices;  // clozes: mlm_evaluation.h
} MlmSettings;

// Append the rows of these settings. Returns the new count.
static inline int mlm_settings_rows(MlmSettings* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {NULL, "--loss-mean",          FLAG_CHOICE, &s->loss_mean,       "global", 0,   0,       "micro|global", SCOPE_RUN, TOPIC_MASKING,
         "Loss of a step. micro: mean of its micro-batches' means, as published; global: mean over all its masked "
         "tokens."},
        {NULL, "--nsp",                FLAG_INT,    &s->next_sentence,   "1",      0,   1,       NULL,   SCOPE_RUN,     TOPIC_MASKING,
         "1: also predict whether the second segment follows the first."},
        {NULL, "--mask-fraction",      FLAG_REAL,   &s->mask_fraction,   "0.15",   1e-6, 1,      NULL,   SCOPE_RUN,     TOPIC_MASKING,
         "Fraction of a sequence's tokens to predict."},
        {NULL, "--whole-word-masking", FLAG_INT,    &s->whole_words,     "0",      0,   1,       NULL,   SCOPE_RUN,     TOPIC_MASKING,
         "1: mask all pieces of a word together."},
        {NULL, "--short-sequences",    FLAG_REAL,   &s->short_fraction,  "0.1",    0,   1,       NULL,   SCOPE_RUN,     TOPIC_MASKING,
         "Fraction of sequences that are deliberately shorter than -t."},
        {NULL, "--pack",               FLAG_INT,    &s->pack,            "1",      1,   64,      NULL,   SCOPE_RUN,     TOPIC_MASKING,
         "Maximum sequences in a row of -t tokens."},
        {NULL, "--phase2",             FLAG_STRING, &s->phase2,          "",       0,   0,       NULL,   SCOPE_RUN,     TOPIC_RUN,
         "Directory of another run: start from its newest weights and moments instead of -e, at step 0, with any -t."},
        {"-s", "--sample-every",       FLAG_INT,    &s->sample_every,    "500",    0,   1e9,     NULL,   SCOPE_FREE,    TOPIC_SAMPLES,
         "Steps between samples (a held-out sequence with masks filled in), and one at the end. 0: never."},
        {NULL, "--fill",               FLAG_STRING, &s->fill,            "",       0,   0,       NULL,   SCOPE_PROCESS, TOPIC_SAMPLES,
         "Print this text with its [MASK]s filled in by -e (or by -o with -y 1) and exit."},
        {NULL, "--embed",              FLAG_STRING, &s->embed,           "",       0,   0,       NULL,   SCOPE_PROCESS, TOPIC_SAMPLES,
         "Embed each line of this text file with -e (or -o with -y 1), write the vectors and exit."},
        {NULL, "--vectors",            FLAG_STRING, &s->vectors,         "",       0,   0,       NULL,   SCOPE_PROCESS, TOPIC_SAMPLES,
         "NumPy file for the vectors, float32 [lines, channels]. Empty: the name of --embed plus .npy."},
        {NULL, "--pool",               FLAG_CHOICE, &s->pool,            "mean",   0,   0,       "mean|cls", SCOPE_PROCESS, TOPIC_SAMPLES,
         "Vector of a line. mean: the mean of all last hidden states, with [CLS] and [SEP]; cls: that of [CLS]."},
    };
    // clang-format on
    count = settings_add_rows(table, count, rows, COUNT_OF(rows));
    count = explain_rows(
        &s->explain, table, count,
        "Do not train: write OUT/explain/explain.html, a page of what -e computes for this text (@FILE: for "
        "that of a file or a pipe; -: of standard input) with [MASK]s. [MASK=word] gives a target, for a loss and a "
        "backward pass.");
    count = explain_pair_rows(&s->explain, table, count);
    return multiple_choice_rows(&s->choices, table, count);
}

// Set the defaults: published hyperparameters, and a small model. Returns the count.
static inline int mlm_default_settings(Flag* table, int count) {
    settings_default(table, count, "--model", "L=4,C=128,NH=4,T=128");
    settings_default(table, count, "--batch", "8");
    settings_default(table, count, "--schedule", "linear");
    settings_default(table, count, "--final-lr", "0");
    settings_default(table, count, "--weight-decay", "0.01");
    settings_default(table, count, "--beta2", "0.999");
    settings_default(table, count, "--eps", "1e-6");
    return count;
}

// For sequences of T tokens.
static inline MlmRecipe mlm_settings_recipe(const MlmSettings* s, int T) {
    int most = s->explain.predictions ? s->explain.predictions
               : *s->fill             ? T
               : *s->embed            ? 1
                                      : max_int(1, (int)rint(s->mask_fraction * T));
    MlmRecipe recipe;
    memset(&recipe, 0, sizeof recipe);
    recipe.max_predictions = min_int(most, T);
    recipe.mask_fraction = s->mask_fraction, recipe.short_fraction = s->short_fraction;
    recipe.whole_words = s->whole_words, recipe.next_sentence = s->next_sentence;
    recipe.pack = s->explain.predictions ? 1 : s->pack;
    if (!s->explain.predictions && !*s->fill && !*s->embed) mlm_check_length(T);
    return recipe;
}

#endif
