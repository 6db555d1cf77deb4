/* --explain for a masked language model, which predicts each "[MASK]" and "[MASK=word]" of a text; the word is the
 * label for the loss. */
#ifndef APPS_USE_EXPLAIN_MLM_H
#define APPS_USE_EXPLAIN_MLM_H

#include "apps/explain/run.h"
#include "apps/use/mlm_texts.h"

// The token ID of a label of n bytes.
static inline int explain_mlm_label(const WordPiece* words, const char* label, size_t n) {
    TokenIds ids = {NULL, 0, 0, 0, NULL};
    wordpiece_encode(&ids, words, label, n);
    if (ids.count != 1)
        die(USAGE, "--explain: [MASK=%.*s]: is %zu tokens of the vocabulary; a label must be one", (int)n, label,
            ids.count);
    int id = ids.id[0];
    if (id == words->unk) die(USAGE, "--explain: [MASK=%.*s]: is not in the vocabulary", (int)n, label);
    token_ids_free(&ids);
    return id;
}

// Leave the next-sentence head out: it is not shown. A checkpoint has its moments too, so its model has the head.
static inline void explain_mlm_without_next(int* next, const Run* r) {
    if (r->checkpoint && *next)
        die(USAGE,
            "--explain and -y 1: a run with next-sentence prediction, which is not shown; give its model with -e");
    *next = 0;
}

// Append the tokens of a text to `ids` and, for each of its masks, the label or -1 to `labels`.
static inline void explain_mlm_encode(TokenIds* ids, TokenIds* labels, const WordPiece* words, const char* text,
                                      size_t length) {
    static const char begin[] = "[MASK=", mask[] = "[MASK]";
    Text plain = {NULL, 0, 0};
    for (size_t i = 0; i < length; i++) {
        if (length - i >= strlen(mask) && memcmp(text + i, mask, strlen(mask)) == 0) token_ids_add(labels, -1);
        if (length - i < strlen(begin) || memcmp(text + i, begin, strlen(begin)) != 0) {
            text_append(&plain, text + i, 1);
            continue;
        }
        const char* label = text + i + strlen(begin);
        const char* end = (const char*)memchr(label, ']', length - i - strlen(begin));
        if (!end) die(USAGE, "--explain: '%.40s': has no closing bracket", text + i);
        token_ids_add(labels, explain_mlm_label(words, label, (size_t)(end - label)));
        text_append(&plain, mask, strlen(mask));
        i = (size_t)(end - text);
    }
    wordpiece_encode(ids, words, plain.text ? plain.text : "", plain.length);
    token_ids_add(ids, words->sep);
    free(plain.text);
}

// Read the text for a model of V tokens and `most` positions. Returns the number of tokens.
static inline int explain_mlm_open(Explanation* e, ExplainSettings* s, Run* r, const WordPiece* words, int V,
                                   int most) {
    TokenIds ids = {NULL, 0, 0, 0, NULL}, labels = {NULL, 0, 0, 0, NULL};
    size_t length;
    char* text = explain_read_text(s, &length);
    explain_check_model(e, s, r);
    examples_check_texts(words, V, "--explain");
    token_ids_add(&ids, words->cls);
    explain_mlm_encode(&ids, &labels, words, text, length);
    if (ids.count > (size_t)most)
        die(USAGE, "--explain: the text has %zu tokens with [CLS] and [SEP]; the model takes %d", ids.count, most);
    if (!labels.count) die(USAGE, "--explain: has neither [MASK] nor [MASK=word], so there is nothing to predict");
    explain_alloc_text(&e->text, (int)ids.count, (int)labels.count);
    for (size_t i = 0, k = 0; i < ids.count; i++) {
        e->text.tokens[i] = ids.id[i];
        if (ids.id[i] != words->mask) continue;
        CHECK(k < labels.count);
        e->text.rows[k] = (int)i, e->text.targets[k] = labels.id[k];
        e->labels += labels.id[k++] >= 0;
    }
    if (!e->labels) e->why_no_loss = "no [MASK=word] gives a label to compare the predictions with";
    e->vocabulary.words = words;
    s->predictions = (int)labels.count;
    token_ids_free(&ids), token_ids_free(&labels), free(text);
    return e->text.T;
}

// Plan what to record.
static inline void explain_mlm_plan(ExplainRecord* r, int has_loss) {
    static const ExplainSection forward[] = {EXPLAIN_SECTION(POST_NORM_START, FORWARD, 0),
                                             EXPLAIN_SECTION(POST_NORM_BLOCK, FORWARD, 1),
                                             EXPLAIN_SECTION(POST_NORM_MASKED, FORWARD, 0)},
                                loss[] = {EXPLAIN_SECTION(POST_NORM_MASKED_LOSS, FORWARD, 0)},
                                backward[] = {EXPLAIN_SECTION(POST_NORM_LOSS_BACKWARD, BACKWARD, 0),
                                              EXPLAIN_SECTION(POST_NORM_MASKED_BACKWARD, BACKWARD, 0),
                                              EXPLAIN_SECTION(POST_NORM_BLOCK_BACKWARD, BACKWARD, 1),
                                              EXPLAIN_SECTION(POST_NORM_START_BACKWARD, BACKWARD, 0)};
    explain_record_add(r, forward, COUNT_OF(forward));
    if (has_loss) explain_record_add(r, backward, COUNT_OF(backward));
    else explain_record_add(r, loss, 1);
}

// Make the text the only sequence of a micro-batch and upload it. The model's buffers must be allocated.
static inline MlmInput explain_mlm_load(Explanation* e, MlmSource* source, const ModelBuffers* buffers,
                                        ExplainSizes sizes, Context* ctx) {
    const ExplainText* t = &e->text;
    MlmBatch* b = &source->batches[0];
    sizes.T = t->T;
    explain_record_open(&e->record, buffers, sizes);
    explain_mlm_plan(&e->record, !e->why_no_loss);
    explain_check_directory(e);
    mlm_text_batch(b, t->tokens, t->T);
    b->masked = t->count;
    for (int i = 0; i < t->count; i++) b->masked_rows[i] = t->rows[i], b->targets[i] = t->targets[i];
    MlmInput in = mlm_load(&source->loader, b, ctx);
    explain_begin(e, ctx);
    return in;
}

#endif
