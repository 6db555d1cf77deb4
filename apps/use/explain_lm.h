/* --explain for a language model: every token is predicted from its predecessors. */
#ifndef APPS_USE_EXPLAIN_LM_H
#define APPS_USE_EXPLAIN_LM_H

#include "apps/explain/run.h"
#include "apps/use/generate.h"
#include "llmc/data/lm_data.h"
#include "llmc/run/run.h"

// Read the text for a model of V tokens and `most` positions. Returns its number of tokens.
static inline int explain_lm_open(Explanation* e, const ExplainSettings* s, Run* r, int V, int most) {
    size_t length;
    int count, *ids;
    Bpe bpe;
    explain_check_model(e, s, r);
    char* text = explain_read_text(s, &length);
    generation_open_encoder(&bpe, "--explain", r);
    count = (int)bpe_encode(&ids, &bpe, text, length, AS_TOKEN);
    bpe_free(&bpe);
    generation_check_tokens(ids, (size_t)count, "--explain", r, V);
    if (count > most) die(USAGE, "--explain: the text has %d tokens; the model takes %d", count, most);
    explain_alloc_text(&e->text, count, count);
    for (int i = 0; i < count; i++) {
        e->text.tokens[i] = ids[i], e->text.rows[i] = i;
        e->text.targets[i] = i + 1 < count ? ids[i + 1] : -1;
    }
    e->labels = count - 1;
    if (!e->labels) e->why_no_loss = "the text is one token, so there is no next one to predict";
    e->vocabulary.bytes = &r->tokenizer;
    free(ids), free(text);
    return count;
}

// Upload the text and plan what to record. The model's buffers must be allocated.
static inline Batch explain_lm_load(Explanation* e, LmData* data, const ModelBuffers* b, ExplainSizes sizes,
                                    Context* ctx) {
    ExplainText* t = &e->text;
    sizes.T = t->T, sizes.is_causal = 1;
    explain_record_open(&e->record, b, sizes);
    explain_record_add(&e->record, PRE_NORM_FORWARD, COUNT_OF(PRE_NORM_FORWARD));
    if (e->why_no_loss) explain_record_add(&e->record, PRE_NORM_LOSS_ONLY, COUNT_OF(PRE_NORM_LOSS_ONLY));
    else explain_record_add(&e->record, PRE_NORM_BACKWARD, COUNT_OF(PRE_NORM_BACKWARD));
    explain_check_directory(e);
    staging_upload(&data->staging, data->targets, t->targets, (size_t)t->T * sizeof(int), ctx);
    Batch batch = lm_data_text(data, t->tokens, t->T, 0, ctx);
    explain_begin(e, ctx);
    return batch;
}

#endif
