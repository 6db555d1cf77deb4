/* --explain: run one text through a model, forward and backward, and record what every op computed. A program calls
 *
 *   explain_begin   before its forward pass
 *   explain_end     after its backward pass
 *   explain_lens    with the logits of its head on the input of the first layer, then on the output of each layer
 *   explain_write   writes OUT/explain (files.h) and frees everything
 *
 * explain/run.h fills in the request. */
#ifndef APPS_EXPLAIN_EXPLAIN_H
#define APPS_EXPLAIN_EXPLAIN_H

#include "apps/explain/record.h"
#include "llmc/base/top_k.h"
#include "llmc/text/tokenizer.h"
#include "llmc/text/wordpiece.h"

enum { EXPLAIN_TOP = 5 };

// The text, and the rows for which the model predicts a token: all rows, or the masked ones.
typedef struct {
    int T, count;
    int* tokens;          // [T]
    int *rows, *targets;  // [count]; a negative target: none
} ExplainText;

// The vocabulary as text. One of the two is set.
typedef struct {
    const Tokenizer* bytes;
    const WordPiece* words;
} ExplainVocabulary;

// The most likely tokens of each row after the embeddings (layer 0) and after each layer.
typedef struct {
    int layers, top;
    int* id;        // [layers][count][top]
    float* p;       // of each
    float* target;  // [layers][count] probability of the target; NaN without one
} ExplainLens;

typedef struct {
    const char* model;  // where its weights come from
    const char* out;    // the run's directory
    int writes_tensors;
    ExplainText text;
    ExplainVocabulary vocabulary;
    ExplainRecord record;
    ExplainLens lens;
    const char* why_no_loss;  // why there is no loss and no backward pass; NULL: there are both
    int labels;               // number of targets
} Explanation;

static inline Direction explain_direction(const Explanation* e) { return e->why_no_loss ? FORWARD : BACKWARD; }

// The loss is a mean: the factor that scales the sum of the tokens' losses.
static inline double explain_scale(const Explanation* e) { return e->labels ? 1.0 / e->labels : 1; }

// Append a token as text; its number if there is no such token.
static inline void explain_put_token(Text* t, const ExplainVocabulary* v, int id) {
    size_t length = 0;
    const char* text = v->words ? wordpiece_token(v->words, id, &length) : tokenizer_decode(v->bytes, id, &length);
    if (text) text_append(t, text, length);
    else text_printf(t, "%d", id);
}

static inline void explain_begin(Explanation* e, Context* ctx) {
    ExplainLens* lens = &e->lens;
    size_t n = (size_t)(e->record.sizes.L + 1) * (size_t)e->text.count;
    lens->top = min_int(EXPLAIN_TOP, e->record.sizes.V);
    lens->id = (int*)xcalloc(n * (size_t)lens->top, sizeof *lens->id);
    lens->p = (float*)xcalloc(n * (size_t)lens->top, sizeof *lens->p);
    lens->target = (float*)xcalloc(n, sizeof *lens->target);
    explain_record_begin(&e->record, ctx);
}

static inline void explain_end(Explanation* e, Context* ctx) { explain_record_end(&e->record, ctx); }

// The logits [count, Vp] of the model's head on the output of the next layer.
static inline void explain_lens(Explanation* e, floatX* logits, int Vp, Context* ctx) {
    ExplainLens* lens = &e->lens;
    const int V = e->record.sizes.V, count = e->text.count, top = lens->top;
    HostView view = host_view_open(logits, (size_t)count * (size_t)Vp, VIEW_FLOATX);
    host_view_read(ctx, &view);
    size_t first = (size_t)lens->layers++ * (size_t)count;
    CHECK(lens->layers <= e->record.sizes.L + 1);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < count; i++) {
        const real* row = view.values + (size_t)i * (size_t)Vp;
        size_t at = first + (size_t)i;
        double p[EXPLAIN_TOP];
        int target = e->text.targets[i], *id = lens->id + at * (size_t)top;
        top_k(id, p, row, V, top);
        for (int k = 0; k < top; k++) lens->p[at * (size_t)top + (size_t)k] = (float)p[k];
        lens->target[at] = target < 0 ? NAN : (float)(p[0] * exp((double)(row[target] - row[id[0]])));
    }
    host_view_close(&view);
}

static inline void explain_close(Explanation* e) {
    explain_record_close(&e->record);
    free(e->text.tokens), free(e->text.rows), free(e->text.targets);
    free(e->lens.id), free(e->lens.p), free(e->lens.target);
}

#endif
