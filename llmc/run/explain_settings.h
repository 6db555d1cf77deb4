/* The settings of --explain. */
#ifndef LLMC_RUN_EXPLAIN_SETTINGS_H
#define LLMC_RUN_EXPLAIN_SETTINGS_H

#include "llmc/model/tensors.h"
#include "llmc/run/settings.h"

typedef struct {
    const char *text, *file;
    const char* second;  // second text of a pair
    int next, tensors;
    int predictions;  // number of masks in the text, set when it is read
} ExplainSettings;

// Append the rows of these settings. `help`: help text of --explain. Returns the new count.
static inline int explain_rows(ExplainSettings* s, Flag* table, int count, const char* help) {
    // clang-format off
    const Flag rows[] = {
        {NULL, "--explain",         FLAG_STRING, &s->text,    "",  0, 0, NULL, SCOPE_PROCESS, TOPIC_SAMPLES, help},
        {NULL, "--explain-file",    FLAG_STRING, &s->file,    "",  0, 0, NULL, SCOPE_PROCESS, TOPIC_SAMPLES,
         "The same, with the text of a file or a pipe, to its last byte."},
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

// Name of the flag that gives the text.
static inline const char* explain_flag(const ExplainSettings* s) { return *s->file ? "--explain-file" : "--explain"; }

static inline int explain_is_asked(const ExplainSettings* s) { return *s->text || *s->file; }

// Returns whether --explain or --explain-file is given; then the run neither trains nor saves (s->evaluate). Ends with
// USAGE if the text is empty, as from an unset shell variable, or if flags contradict it.
static inline int explain_check(const ExplainSettings* e, Settings* s, Flag* table, int count) {
    static const char* const flags[] = {"--explain", "--explain-file"};
    for (size_t i = 0; i < COUNT_OF(flags); i++)
        if (flag_is_given(table, count, flags[i]) && !*(i ? e->file : e->text))
            die(USAGE, "%s '': is empty; give a text", flags[i]);
    if (!explain_is_asked(e)) {
        if (e->tensors || (e->second && *e->second) || e->next)
            die(USAGE, "%s: needs --explain",
                e->tensors ? "--explain-tensors"
                : e->next  ? "--explain-next"
                           : "--explain-second");
        return 0;
    }
    if (e->next && !*e->second) die(USAGE, "--explain-next 1: needs --explain-second, the other text of the pair");
    if (*e->text && *e->file) die(USAGE, "--explain and --explain-file: both give the text; leave one out");
    if (s->evaluate) die(USAGE, "%s: does not combine with --evaluate, --generate, --fill or --embed", explain_flag(e));
    if (s->profile) die(USAGE, "%s and --profile: explain the model after the profiled run", explain_flag(e));
    if (s->fp8)
        die(USAGE, "%s and --fp8 1: an fp8 model keeps no activations to show; leave --fp8 out", explain_flag(e));
    if (!*s->out) die(USAGE, "%s: writes to -o, which is empty; name a directory", explain_flag(e));
    s->evaluate = 1, s->B = 1, s->total_batch = 0;
    return 1;
}

// Which activations the model keeps (model/tensors.h).
static inline int explain_recompute(const ExplainSettings* e, const Settings* s) {
    return explain_is_asked(e) ? RECOMPUTE_NOTHING : s->evaluate ? FORWARD_ONLY : s->recompute;
}

#endif
