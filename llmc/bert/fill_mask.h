/* Fill-mask: print a model's predictions for masked tokens. */
#ifndef LLMC_BERT_FILL_MASK_H
#define LLMC_BERT_FILL_MASK_H

#include "llmc/base/top_k.h"
#include "llmc/bert/mlm_data.h"
#include "llmc/run/run.h"

// Open the vocabulary from the first of these directories that has one: checkpoint, model, data. words->size is 0 if
// none has one.
static inline void fill_mask_find_words(WordPiece* words, Run* r, const char* model, const char* data_dir) {
    const char* places[] = {r->checkpoint, model, data_dir};
    for (size_t i = 0; i < COUNT_OF(places) && !r->tokenizer_files.directory; i++)
        if (places[i] && is_directory(places[i]) && wordpiece_open(words, places[i], CASE_OF_MODEL) == 0)
            tokenizer_files_read(&r->tokenizer_files, places[i]);
}

// Append tokens as text; without a vocabulary, their IDs.
static inline void fill_mask_decode(Text* t, const WordPiece* words, const int* tokens, int n) {
    if (words->size) wordpiece_decode(t, words, tokens, (size_t)n);
    for (int i = 0; i < n && !words->size; i++) text_printf(t, "%d ", tokens[i]);
}

// Write the batch's only sequence to `t` twice: with [MASK] for every masked token, even if its input was another
// token, then with the most likely tokens from `logits` [masked, Vp]. `edge`: tokens to omit at both ends. Returns how
// many are the targets.
static inline int fill_mask_write(Text* t, const WordPiece* words, const MlmBatch* b, const real* logits, int edge,
                                  int V, int Vp) {
    int guess, *tokens = (int*)xmalloc((size_t)b->rows * sizeof(int)), correct = 0;
    double probability;
    for (int filled = 0; filled < 2; filled++) {
        memcpy(tokens, b->tokens, (size_t)b->rows * sizeof(int));
        for (int i = 0; i < b->masked; i++) {
            top_k(&guess, &probability, logits + (size_t)i * (size_t)Vp, V, 1);
            tokens[b->masked_rows[i]] = filled || !words->size ? guess : words->mask;
            correct += filled && guess == b->targets[i];
        }
        fill_mask_decode(t, words, tokens + edge, b->rows - 2 * edge);
        text_printf(t, "\n");
    }
    free(tokens);
    return correct;
}

// Show the predictions for the batch's only sequence, from `logits` [masked, Vp] on the device, as a sample of the run.
static inline void fill_mask_show(Run* r, const WordPiece* words, const MlmBatch* b, floatX* logits, int V, int Vp) {
    HostView view = host_view_open(logits, (size_t)b->masked * (size_t)Vp, VIEW_FLOATX);
    Text text = {NULL, 0, 0};
    host_view_read(&r->ctx, &view);
    int correct = fill_mask_write(&text, words, b, view.values, 0, V, Vp);
    text_printf(&text, "%d of %d correct", correct, b->masked);
    host_view_close(&view);
    run_show_text(r, &text);
    free(text.text);
}

#endif
