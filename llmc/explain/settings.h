/* The settings of --explain. */
#ifndef LLMC_EXPLAIN_SETTINGS_H
#define LLMC_EXPLAIN_SETTINGS_H

#include "llmc/run/settings.h"

typedef struct {
    const char* text;
    const char* second;  // second text of a pair
    int next, tensors;
    int predictions;  // number of masks in the text, set when it is read
} ExplainSettings;

// Append the rows of these settings. `help`: help text of --explain. Returns the new count.
static inline int explain_rows(ExplainSettings* s, Flag* table, int count, const char* help) {
    // clang-format off
    const Flag rows[] = {
        {NULL, "--explain",         FLAG_STRING, &s->text,    "",  0, 0, NULL, SCOPE_PROCESS, TOPIC_SAMPLES, help},
        {NULL, "--explain-tensors", FLAG_INT,    &s->tensors, "0", 0, 1, NULL, SCOPE_PROCESS, TOPIC_SAMPLES,
         "1: --explain also writes all activations and gradients, as OUT/explain/*.safetensors."},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

static inline int explain_pair_rows(ExplainSettings* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {NULL, "--explain-second",  FLAG_STRING, &s->second, "",  0, 0, NULL, SCOPE_PROCESS, TOPIC_SAMPLES,
         "Second text of --explain's pair, for next-sentence prediction. Empty: none."},
        {NULL, "--explain-next",    FLAG_INT,    &s->next,   "0", 0, 1, NULL, SCOPE_PROCESS, TOPIC_SAMPLES,
         "Label of the pair. 0: the second text follows the first; 1: it does not."},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

static inline int explain_is_asked(const ExplainSettings* s) { return *s->text != '\0'; }

// Returns whether --explain is given. Ends with USAGE if the text is empty, as from an unset shell variable, or if flags
// contradict it.
static inline int explain_check(const ExplainSettings* e, Settings* s, Flag* table, int count) {
    if (flag_is_given(table, count, "--explain") && !*e->text) die(USAGE, "--explain '': is empty; give a text");
    if (!explain_is_asked(e)) {
        if (e->tensors || (e->second && *e->second) || e->next)
            die(USAGE, "%s: needs --explain",
                e->tensors ? "--explain-tensors"
                : e->next  ? "--explain-next"
                           : "--explain-second");
        return 0;
    }
    if (e->next && !*e->second) die(USAGE, "--explain-next 1: needs --explain-second, the other text of the pair");
    if (s->evaluate) die(USAGE, "--explain: does not combine with --evaluate, --generate, --fill or --embed");
    if (s->fp8) die(USAGE, "--explain and --fp8 1: an fp8 model keeps no activations to show; leave --fp8 out");
    if (!*s->out) die(USAGE, "--explain: writes to -o, which is empty; name a directory");
    s->evaluate = 1, s->B = 1, s->total_batch = 0;
    return 1;
}

#endif
