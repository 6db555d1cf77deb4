/* --explain: read and check the text, and allocate for it. llmc/explain/ records and writes the results. */
#ifndef LLMC_EXPLAIN_RUN_H
#define LLMC_EXPLAIN_RUN_H

#include "llmc/base/process.h"
#include "llmc/explain/files.h"
#include "llmc/explain/settings.h"
#include "llmc/run/run.h"

static inline void explain_check_utf8(const char* flag, const char* text, size_t length) {
    for (size_t i = 0, n; i < length; i += n)
        if ((n = utf8_length(text + i, length - i)) == 0)
            die(USAGE, "%s: byte %zu of the text is not UTF-8; convert it first", flag, i + 1);
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
    explain_check_utf8("--explain", text, *length);
    return text;
}

// Checks for all kinds of models. By now, -y 1 has restored the settings of the resumed run, including those that
// explain_check() set or refuses.
static inline void explain_check_model(Explanation* e, const ExplainSettings* s, Run* r) {
    if (r->group.size > 1) die(USAGE, "--explain: is the work of one process; start it without other ranks");
    r->settings.B = 1, r->settings.total_batch = 0, r->settings.fp8 = 0;
    if (r->start) r->hub = r->start, r->start = NULL;  // read the weights of a checkpoint, not its moments
    e->model = r->source, e->out = r->settings.out, e->writes_tensors = s->tensors;
}

// Allocate for T tokens and `count` predictions.
static inline void explain_alloc_text(ExplainText* t, int T, int count) {
    t->T = T, t->count = count, t->next_target = -1;
    t->tokens = (int*)xcalloc((size_t)T, sizeof(int));
    t->rows = (int*)xcalloc((size_t)count, sizeof(int)), t->targets = (int*)xcalloc((size_t)count, sizeof(int));
}

#endif
