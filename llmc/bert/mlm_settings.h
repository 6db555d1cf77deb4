/* Settings of a masked language model's run: how sequences are drawn and masked. */
#ifndef LLMC_BERT_MLM_SETTINGS_H
#define LLMC_BERT_MLM_SETTINGS_H

#include "llmc/bert/batch_mlm.h"
#include "llmc/choices/room.h"

enum { MEAN_MICRO, MEAN_GLOBAL };  // in the order of the flag's choices

typedef struct {
    int loss_mean, next_sentence, whole_words, pack;
    double short_fraction;
    const char *mask_fraction, *phase2;
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
        {NULL, "--mask-fraction",      FLAG_STRING, &s->mask_fraction,   "0.15",   0,   0,       NULL,   SCOPE_RUN,     TOPIC_MASKING,
         "Fraction of a sequence's tokens to predict. A:B: falls linearly from A to B over the run. Validation: 0.15."},
        {NULL, "--whole-word-masking", FLAG_INT,    &s->whole_words,     "0",      0,   1,       NULL,   SCOPE_RUN,     TOPIC_MASKING,
         "1: mask all pieces of a word together."},
        {NULL, "--short-sequences",    FLAG_REAL,   &s->short_fraction,  "0.1",    0,   1,       NULL,   SCOPE_RUN,     TOPIC_MASKING,
         "Fraction of sequences that are deliberately shorter than -t."},
        {NULL, "--pack",               FLAG_INT,    &s->pack,            "1",      1,   64,      NULL,   SCOPE_RUN,     TOPIC_MASKING,
         "Maximum sequences in a row of -t tokens."},
        {NULL, "--phase2",             FLAG_STRING, &s->phase2,          "",       0,   0,       NULL,   SCOPE_RUN,     TOPIC_RUN,
         "Directory of another run: start from its newest weights and moments instead of -e, at step 0, with any -t."},
    };
    // clang-format on
    return multiple_choice_rows(&s->choices, table, settings_add_rows(table, count, rows, COUNT_OF(rows)));
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

// Read --mask-fraction. Ends with USAGE if it is wrong.
static inline void mlm_settings_fractions(const char* text, double* first, double* last) {
    int end = 0, count = sscanf(text, "%lf%n:%lf%n", first, &end, last, &end);
    if (count == 1) *last = *first;
    if (count < 1 || text[end] || !(*last >= 1e-6 && *last <= *first && *first <= 1))
        die(USAGE, "--mask-fraction %.80s: not a fraction of 1e-6..1, or two that fall, as 0.3:0.15", text);
}

// For sequences of T tokens. mlm_run_open_data() sets over how many rows the fraction falls.
static inline MlmRecipe mlm_settings_recipe(const MlmSettings* s, int T) {
    MlmRecipe recipe = {.whole_words = s->whole_words, .next_sentence = s->next_sentence, .pack = s->pack};
    mlm_settings_fractions(s->mask_fraction, &recipe.mask_fraction, &recipe.last_mask_fraction);
    recipe.max_predictions = max_int(1, (int)rint(fmax(recipe.mask_fraction, MLM_VAL_MASK_FRACTION) * T));
    recipe.short_fraction = s->short_fraction;
    return recipe;
}

#endif
