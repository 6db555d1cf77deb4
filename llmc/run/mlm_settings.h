/* Settings of a run that predicts masked tokens: how sequences are drawn and masked, and what is shown of it. */
#ifndef LLMC_MLM_SETTINGS_H
#define LLMC_MLM_SETTINGS_H

#include "../data/batch_mlm.h"
#include "settings.h"

// In the order of the flag's choices.
typedef enum { MEAN_MICRO, MEAN_GLOBAL } LossMean;

typedef struct {
    int loss_mean, next_sentence, max_predictions, whole_words, static_masks, pack;
    double mask_fraction, short_fraction;
    int sample_every;
    const char *phase2, *fill;
} MlmSettings;

// Append the rows of these settings. Returns the new count.
static inline int mlm_settings_rows(MlmSettings* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {NULL,  "--loss-mean",          FLAG_CHOICE, &s->loss_mean,       "global", 0, 0, "micro|global", "of a step: micro is the mean of its micro-batches' means, as published; global the mean over all its masked tokens, however it is cut", 0},
        {NULL,  "--nsp",                FLAG_INT,    &s->next_sentence,   "1",      0, 1, NULL, "1: also predict whether the second segment follows the first", 0},
        {NULL,  "--max-predictions",    FLAG_INT,    &s->max_predictions, "-1",     -1, 1 << 20, NULL, "most masked tokens in a sequence; -1: as many as --mask-fraction of -t are", 0},
        {NULL,  "--mask-fraction",      FLAG_REAL,   &s->mask_fraction,   "0.15",   1e-6, 1, NULL, "of a sequence's tokens, to be predicted", 0},
        {NULL,  "--whole-word-masking", FLAG_INT,    &s->whole_words,     "0",      0, 1, NULL, "1: the pieces of a word are masked together", 0},
        {NULL,  "--static-masking",     FLAG_INT,    &s->static_masks,    "0",      0, 1e6, NULL, "draw pairs and masks anew in so many epochs, then repeat them; 0: always anew", 0},
        {NULL,  "--short-sequences",    FLAG_REAL,   &s->short_fraction,  "0.1",    0, 1, NULL, "of the sequences, made shorter than -t on purpose", 0},
        {NULL,  "--pack",               FLAG_INT,    &s->pack,            "1",      1, 64, NULL, "most sequences in a row of -t tokens", 0},
        {NULL,  "--phase2",             FLAG_STRING, &s->phase2,          "",       0, 0, NULL, "directory of another run: begin with its newest weights and moments instead of -e, at step 0, with any -t", 0},
        {"-s",  "--sample-every",       FLAG_INT,    &s->sample_every,    "500",    0, 1e9, NULL, "steps between looks at how a held-out sequence is filled in, and one at the end; 0: never", 0},
        {NULL,  "--fill",               FLAG_STRING, &s->fill,            "",       0, 0, NULL, "print this text with its [MASK]s filled in by -e (or by -o with -y 1) and end", 0},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

// For sequences of T tokens.
static inline MlmRecipe mlm_settings_recipe(const MlmSettings* s, int T) {
    int most = *s->fill                  ? T
               : s->max_predictions >= 0 ? s->max_predictions
                                         : max_int(1, (int)rint(s->mask_fraction * T));
    MlmRecipe recipe = {min_int(most, T), s->mask_fraction, s->whole_words,   s->next_sentence,
                        s->static_masks,  s->pack,          s->short_fraction};
    if (!*s->fill) mlm_check_recipe(recipe, T);
    return recipe;
}

#endif
