/* Settings of the programs that use a model. Their table has those rows of the trainer's that say what the model
 * computes and on which data. Other settings keep their defaults. */
#ifndef APPS_USE_SETTINGS_H
#define APPS_USE_SETTINGS_H

#include "llmc/run/settings.h"

// Take other rows out of the trainer's table, and append that of --evaluate. Returns the new count.
static inline int use_rows(Settings* s, Flag* table, int count) {
    static const char kept[] =
        " --model --train-data --val-data --choices --doc-mask --output --resume --override --steps --seed --batch "
        "--seq-len "
        "--fp8 --fp8-steps --fp8-exclude-forward --master-weights --loss-scale --val-batches "
        "--timeout --autotune --tf32 --threads --nsp --pack --whole-word-masking --short-sequences ";
    char error[FLAG_ERROR_SIZE], name[64];
    int left = 0;
    for (int i = 0; i < count; i++) {
        snprintf(name, sizeof name, " %s ", table[i].long_name);
        if (strstr(kept, name)) table[left++] = table[i];
        else CHECK(flags_assign(&table[i], table[i].default_text, error) == 0);
    }
    Flag* steps = settings_find(table, left, "--steps");
    steps->max = 0, steps->scope = SCOPE_PROCESS;
    steps->help = "0: print settings, tensors and memory plan, then exit.";
    settings_help(table, left, "--output", "Directory of a run for -y 1, and of the page of --explain.");
    settings_help(table, left, "--resume",
                  "1: use the newest complete checkpoint in -o, with its settings, instead of -e.");
    settings_help(table, left, "--seed", "Seed of drawn tokens, and of the weights that the files of a model lack.");
    return settings_evaluate_row(s, table, left);
}

#endif
