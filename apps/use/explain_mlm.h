/* --explain for a masked language model: a text, or a pair of texts. The model predicts each "[MASK]" and
 * "[MASK=word]"; the word is the label for the loss. */
#ifndef APPS_USE_EXPLAIN_MLM_H
#define APPS_USE_EXPLAIN_MLM_H

#include "apps/explain/run.h"
#include "apps/use/mlm_texts.h"

// The token ID of a label of n bytes.
static inline int explain_mlm_label(const WordPiece* words, const char* flag, const char* label, size_t n) {
    TokenIds ids = {NULL, 0, 0, 0, NULL};
    wordpiece_encode(&ids, words, label, n);
    if (ids.count != 1)
        die(USAGE, "%s: [MASK=%.*s]: is %zu tokens of the vocabulary; a label must be one", flag, (int)n, label,
            ids.count);
    int id = ids.id[0];
    if (id == words->unk) die(USAGE, "%s: [MASK=%.*s]: is not in the vocabulary", flag, (int)n, label);
    token_ids_free(&ids);
    return id;
}

// Append the tokens of a text to `ids` and, for each of its masks, the label or -1 to `labels`.
static inline void explain_mlm_encode(TokenIds* ids, TokenIds* labels, const WordPiece* words, const char* flag,
                                      const char* text, size_t length) {
    static const char begin[] = "[MASK=", mask[] = "[MASK]";
    Text plain = {NULL, 0, 0};
    TokenIds added = {NULL, 0, 0, 0, NULL};
    for (size_t i = 0; i < length; i++) {
        if (length - i >= strlen(mask) && memcmp(text + i, mask, strlen(mask)) == 0) token_ids_add(labels, -1);
        if (length - i < strlen(begin) || memcmp(text + i, begin, strlen(begin)) != 0) {
            text_append(&plain, text + i, 1);
            continue;
        }
        const char* label = text + i + strlen(begin);
        const char* end = (const char*)memchr(label, ']', length - i - strlen(begin));
        if (!end) die(USAGE, "%s: '%.40s': has no closing bracket", flag, text + i);
        token_ids_add(labels, explain_mlm_label(words, flag, label, (size_t)(end - label)));
        text_append(&plain, mask, strlen(mask));
        i = (size_t)(end - text);
    }
    wordpiece_encode(&added, words, plain.text ? plain.text : "", plain.length);
    for (size_t i = 0; i < added.count; i++) token_ids_add(ids, added.id[i]);
    token_ids_add(ids, words->sep);
    token_ids_free(&added), free(plain.text);
}

// Whether the page shows next-sentence prediction. It does not if the weights (NULL: random ones) lack the head.
static inline int explain_mlm_has_next(Explanation* e, const ExplainSettings* s, const char* weights, int asked) {
    SafeTensors file;
    if (!asked || !explain_is_asked(s) || !weights || tensors_are_llmc(weights)) return asked;
    weights_open(&file, weights);
    int has_next = safetensors_find(&file, "cls.seq_relationship.weight") != NULL &&
                   safetensors_find(&file, "bert.pooler.dense.weight") != NULL;
    safetensors_close(&file);
    if (!has_next && s->next) die(USAGE, "--explain-next 1: %s has no next-sentence head", weights);
    if (!has_next) e->why_no_next = "the model's files have no next-sentence head";
    return has_next;
}

// The reason why there is no backward pass, or NULL.
static inline const char* explain_mlm_why(const Explanation* e, const ExplainSettings* s) {
    if (e->labels || e->text.next_target >= 0) return NULL;
    return *s->second ? "no [MASK=word] gives a label, and without a next-sentence head the pair has none"
                      : "no [MASK=word] and no --explain-second give a label to compare the predictions with";
}

// Read the text for a model of V tokens and `most` positions, with a next-sentence head if `has_next`. Returns the
// number of tokens.
static inline int explain_mlm_open(Explanation* e, ExplainSettings* s, Run* r, const WordPiece* words, int V, int most,
                                   int has_next) {
    const char* flag = "--explain";
    TokenIds ids = {NULL, 0, 0, 0, NULL}, labels = {NULL, 0, 0, 0, NULL};
    size_t length;
    char* text = explain_read_text(s, &length);
    explain_check_model(e, s, r);
    mlm_check_texts(words, V, flag);
    if (!has_next && s->next) die(USAGE, "--explain-next 1: there is no next-sentence head with --nsp 0");
    token_ids_add(&ids, words->cls);
    explain_mlm_encode(&ids, &labels, words, flag, text, length);
    size_t first = ids.count;
    explain_check_utf8("--explain-second", s->second, strlen(s->second));
    if (*s->second) explain_mlm_encode(&ids, &labels, words, "--explain-second", s->second, strlen(s->second));
    if (ids.count > (size_t)most)
        die(USAGE, "%s: the text has %zu tokens with [CLS] and [SEP]; the model takes %d", flag, ids.count, most);
    if (!labels.count) die(USAGE, "%s: has neither [MASK] nor [MASK=word], so there is nothing to predict", flag);
    explain_alloc_text(&e->text, (int)ids.count, (int)labels.count);
    e->text.types = (int*)xcalloc(ids.count, sizeof(int));
    for (size_t i = 0, k = 0; i < ids.count; i++) {
        e->text.tokens[i] = ids.id[i], e->text.types[i] = i >= first;
        if (ids.id[i] != words->mask) continue;
        CHECK(k < labels.count);
        e->text.rows[k++] = (int)i;
    }
    for (size_t k = 0; k < labels.count; k++) {
        e->text.targets[k] = labels.id[k];
        e->labels += labels.id[k] >= 0;
    }
    if (*s->second && has_next) e->text.next_target = s->next;
    e->why_no_loss = explain_mlm_why(e, s);
    e->vocabulary.words = words;
    s->predictions = (int)labels.count;
    token_ids_free(&ids), token_ids_free(&labels), free(text);
    return e->text.T;
}

// Plan what to record.
static inline void explain_mlm_plan(ExplainRecord* r, int has_next, int has_loss) {
    static const ExplainSection forward[] = {EXPLAIN_SECTION(POST_NORM_START, FORWARD, 0),
                                             EXPLAIN_SECTION(POST_NORM_BLOCK, FORWARD, 1),
                                             EXPLAIN_SECTION(POST_NORM_MASKED, FORWARD, 0)},
                                next[] = {EXPLAIN_SECTION(POST_NORM_NEXT, FORWARD, 0)},
                                loss[] = {EXPLAIN_SECTION(POST_NORM_MASKED_LOSS, FORWARD, 0)},
                                next_loss[] = {EXPLAIN_SECTION(POST_NORM_NEXT_LOSS, FORWARD, 0)},
                                losses[] = {EXPLAIN_SECTION(POST_NORM_LOSS_BACKWARD, BACKWARD, 0)},
                                next_losses[] = {EXPLAIN_SECTION(POST_NORM_NEXT_LOSS_BACKWARD, BACKWARD, 0)},
                                head[] = {EXPLAIN_SECTION(POST_NORM_MASKED_BACKWARD, BACKWARD, 0)},
                                scatter[] = {EXPLAIN_SECTION(POST_NORM_SCATTER, BACKWARD, 0)},
                                next_head[] = {EXPLAIN_SECTION(POST_NORM_NEXT_BACKWARD, BACKWARD, 0)},
                                encoder[] = {EXPLAIN_SECTION(POST_NORM_BLOCK_BACKWARD, BACKWARD, 1),
                                             EXPLAIN_SECTION(POST_NORM_START_BACKWARD, BACKWARD, 0)};
    explain_record_add(r, forward, COUNT_OF(forward));
    if (has_next) explain_record_add(r, next, 1);
    explain_record_add(r, has_loss ? losses : loss, 1);
    if (has_next) explain_record_add(r, has_loss ? next_losses : next_loss, 1);
    if (!has_loss) return;
    explain_record_add(r, head, 1);
    explain_record_add(r, has_next ? next_head : scatter, 1);
    explain_record_add(r, encoder, COUNT_OF(encoder));
}

// Make the text the only sequence of a micro-batch and upload it. The model's buffers must be allocated.
static inline MlmInput explain_mlm_load(Explanation* e, MlmSource* source, const ModelBuffers* buffers,
                                        ExplainSizes sizes, int has_next, Context* ctx) {
    const ExplainText* t = &e->text;
    MlmBatch* b = &source->batches[0];
    sizes.T = t->T;
    explain_record_open(&e->record, buffers, sizes);
    explain_mlm_plan(&e->record, has_next, !e->why_no_loss);
    explain_check_directory(e);
    mlm_text_batch(b, t->tokens, t->types, t->T);
    b->masked = t->count, b->next_targets[0] = t->next_target;
    for (int i = 0; i < t->count; i++) b->masked_rows[i] = t->rows[i], b->targets[i] = t->targets[i];
    MlmInput in = mlm_load(&source->loader, b, ctx);
    explain_begin(e, ctx);
    return in;
}

#endif
