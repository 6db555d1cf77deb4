/* --explain: its settings; read and check the text, and allocate for it. The other headers record and write results. */
#ifndef APPS_EXPLAIN_RUN_H
#define APPS_EXPLAIN_RUN_H

#include "apps/explain/files.h"
#include "llmc/base/process.h"
#include "llmc/run/run.h"

typedef struct {
    const char* text;
    int tensors;
    int predictions;  // number of masks in the text, set when it is read
} ExplainSettings;

// Append the rows of these settings, for a masked language model or another. Returns the new count.
static inline int explain_rows(ExplainSettings* s, Flag* table, int count, int is_masked) {
    // clang-format off
    const Flag rows[] = {
        {NULL, "--explain",         FLAG_STRING, &s->text,    "",  0, 0, NULL, SCOPE_PROCESS, TOPIC_SAMPLES, is_masked ?
         "Write OUT/explain/explain.html, a page of what -e computes for this text (@FILE: for that of a file or a pipe; "
         "-: of standard input) with [MASK]s. [MASK=word] gives a target, for a loss and a backward pass." :
         "Write OUT/explain/explain.html, a page of what -e computes for this text (@FILE: for that of a file or a pipe; "
         "-: of standard input)."},
        {NULL, "--explain-tensors", FLAG_INT,    &s->tensors, "0", 0, 1, NULL, SCOPE_PROCESS, TOPIC_SAMPLES,
         "1: --explain also writes all activations and gradients, as OUT/explain/*.safetensors."},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

static inline int explain_is_asked(const ExplainSettings* s) { return *s->text != '\0'; }

// Returns whether --explain is given. Ends with USAGE if the text is empty, as from an unset shell variable, or if
// flags contradict it.
static inline int explain_check(const ExplainSettings* e, Settings* s, Flag* table, int count) {
    if (flag_is_given(table, count, "--explain") && !*e->text) die(USAGE, "--explain '': is empty; give a text");
    const int is_asked = explain_is_asked(e);
    if (!is_asked && e->tensors) die(USAGE, "--explain-tensors: needs --explain");
    if (!is_asked) return 0;
    if (s->evaluate) die(USAGE, "--explain: does not combine with --evaluate, --generate, --fill or --embed");
    if (s->fp8) die(USAGE, "--explain and --fp8 1: an fp8 model keeps no activations to show; leave --fp8 out");
    if (!*s->out) die(USAGE, "--explain: writes to -o, which is empty; name a directory");
    s->evaluate = 1, s->B = 1, s->total_batch = 0;
    return 1;
}

// Read the text (caller frees). It must not be empty, and be valid UTF-8.
static inline char* explain_read_text(const ExplainSettings* s, size_t* length) {
    enum { MOST_BYTES = 1 << 24 };
    const char* file = flags_text_file(s->text);
    char* text;
    *length = strlen(s->text);
    if (file) {
        StopHandler on_stop = process_on_stop(SIG_DFL);  // a pipe may block for long
        text = read_to_end(file, MOST_BYTES, length, USAGE);
        process_on_stop(on_stop);
    } else {
        text = xprintf("%s", s->text);
    }
    if (!*length) die(USAGE, "--explain %s: is empty; give a text", s->text);
    for (size_t i = 0, n; i < *length; i += n)
        if ((n = utf8_length(text + i, *length - i)) == 0)
            die(USAGE, "--explain: byte %zu of the text is not UTF-8; convert it first", i + 1);
    return text;
}

// Checks for all kinds of models. By now, -y 1 has restored the settings of the resumed run, including those that
// explain_check() set or refuses.
static inline void explain_check_model(Explanation* e, const ExplainSettings* s, Run* r) {
    if (r->group.size > 1) die(USAGE, "--explain: is the work of one process; start it without other ranks");
    r->settings.B = 1, r->settings.total_batch = 0, r->settings.fp8 = 0;
    e->model = r->source, e->out = r->settings.out, e->writes_tensors = s->tensors;
}

// Allocate for T tokens and `count` predictions.
static inline void explain_alloc_text(ExplainText* t, int T, int count) {
    t->T = T, t->count = count;
    t->tokens = (int*)xcalloc((size_t)T, sizeof(int));
    t->rows = (int*)xcalloc((size_t)count, sizeof(int)), t->targets = (int*)xcalloc((size_t)count, sizeof(int));
}

#endif
