/* Fill-mask: print a model's predictions for masked tokens. */
#ifndef LLMC_BERT_FILL_MASK_H
#define LLMC_BERT_FILL_MASK_H

#include "llmc/base/top_k.h"
#include "llmc/bert/mlm_data.h"
#include "llmc/run/run.h"
#include "llmc/text/wordpiece.h"

enum { FILL_MASK_GUESSES = 5 };

// Open the vocabulary from the first of these directories that has one: checkpoint, model, data. words->size is 0 if
// none has one.
static inline void fill_mask_find_words(WordPiece* words, Run* r, const char* model, const char* data_dir) {
    const char* places[] = {r->checkpoint, model, data_dir};
    for (size_t i = 0; i < COUNT_OF(places) && !r->tokenizer_files.directory; i++)
        if (places[i] && is_directory(places[i]) && wordpiece_open(words, places[i], CASE_OF_MODEL) == 0)
            tokenizer_files_read(&r->tokenizer_files, places[i]);
}

// Returns whether --fill is given; then the run neither trains nor saves (s->evaluate). Ends with USAGE if its value is
// empty, for example from an unset shell variable: such a command must not start training.
static inline int fill_mask_check(const char* text, Settings* s, Flag* table, int count) {
    if (!*text && flag_is_given(table, count, "--fill")) die(USAGE, "--fill '': is empty; give a text with [MASK]");
    if (*text) s->evaluate = 1;
    return *text != '\0';
}

// Make `text`, which contains [MASK], the only sequence of a batch with room for T tokens. Its masks have no targets.
static inline void fill_mask_batch(MlmBatch* b, const WordPiece* words, const char* text, int T, int V) {
    TokenIds ids = {NULL, 0, 0, 0, NULL};
    mlm_check_texts(words, V, "--fill");
    token_ids_add(&ids, words->cls);
    wordpiece_encode(&ids, words, text, strlen(text));
    token_ids_add(&ids, words->sep);
    if (ids.count > (size_t)T)
        die(USAGE, "--fill '%.80s': has %zu tokens with [CLS] and [SEP]; the maximum is %d", text, ids.count, T);
    b->count = 1, b->rows = b->max_length = (int)ids.count, b->masked = 0, b->first = 0;
    b->sum_sq_len = (int64_t)ids.count * (int64_t)ids.count;
    b->cu_seqlens[0] = 0, b->cu_seqlens[1] = b->rows;
    b->next_targets[0] = -1;
    for (int i = 0; i < b->rows; i++) {
        b->tokens[i] = ids.id[i], b->types[i] = b->sequence[i] = 0, b->position[i] = i;
        if (ids.id[i] != words->mask) continue;
        b->masked_rows[b->masked] = i;
        b->targets[b->masked++] = -1;
    }
    if (b->masked == 0) die(USAGE, "--fill '%.80s': contains no [MASK]", text);
    free(ids.id);
}

// Append tokens as text; without a vocabulary, their IDs.
static inline void fill_mask_decode(Text* t, const WordPiece* words, const int* tokens, int n) {
    if (words->size) wordpiece_decode(t, words, tokens, (size_t)n);
    for (int i = 0; i < n && !words->size; i++) text_printf(t, "%d ", tokens[i]);
}

// Write the batch's only sequence to `t` twice: with [MASK] for every masked token, even if its input was another
// token, then with the predictions from `logits` [masked, Vp]. For the text of --fill (fill_mask_batch()), omit [CLS]
// and [SEP], and add the most likely tokens with their probabilities.
static inline void fill_mask_write(Text* t, const WordPiece* words, const MlmBatch* b, const real* logits, int V,
                                   int Vp) {
    int guess[FILL_MASK_GUESSES], *tokens = (int*)xmalloc((size_t)b->rows * sizeof(int)), correct = 0;
    int is_asked = b->targets[0] < 0;
    double probability[FILL_MASK_GUESSES];
    for (int filled = 0; filled < 2; filled++) {
        memcpy(tokens, b->tokens, (size_t)b->rows * sizeof(int));
        for (int i = 0; i < b->masked; i++) {
            top_k(guess, probability, logits + (size_t)i * (size_t)Vp, V, FILL_MASK_GUESSES);
            tokens[b->masked_rows[i]] = filled || !words->size ? guess[0] : words->mask;
            correct += filled && guess[0] == b->targets[i];
        }
        if (is_asked) fill_mask_decode(t, words, tokens + 1, b->rows - 2);
        else fill_mask_decode(t, words, tokens, b->rows);
        text_printf(t, "\n");
    }
    if (!is_asked) text_printf(t, "%d of %d correct", correct, b->masked);
    for (int i = 0; i < b->masked && is_asked; i++) {
        top_k(guess, probability, logits + (size_t)i * (size_t)Vp, V, FILL_MASK_GUESSES);
        if (!isfinite(probability[0]))
            die(STOPPED_BY_NAN,
                "--fill: the model's logits are not finite; take an earlier checkpoint or another model");
        for (int k = 0; k < min_int(V, FILL_MASK_GUESSES); k++) {
            text_printf(t, "%s", k ? ", " : "  ");
            fill_mask_decode(t, words, &guess[k], 1);
            text_printf(t, " %.3f", probability[k]);
        }
        text_printf(t, "\n");
    }
    free(tokens);
}

// Show the predictions for the batch's only sequence, from `logits` [masked, Vp] on the device. For the text of --fill
// they are only printed; for a held-out sequence they are a sample of the run.
static inline void fill_mask_show(Run* r, const WordPiece* words, const MlmBatch* b, floatX* logits, int V, int Vp) {
    HostView view = host_view_open(logits, (size_t)b->masked * (size_t)Vp, VIEW_FLOATX);
    Text text = {NULL, 0, 0};
    host_view_read(&r->ctx, &view);
    fill_mask_write(&text, words, b, view.values, V, Vp);
    host_view_close(&view);
    if (b->targets[0] < 0) fwrite(text.text, 1, text.length, stdout);
    else run_show_text(r, &text);
    free(text.text);
}

#endif
