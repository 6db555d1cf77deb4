/* Filling in: what a model puts where a token is masked. */
#ifndef LLMC_FILL_H
#define LLMC_FILL_H

#include "../data/wordpiece.h"
#include "mlm_data.h"
#include "session.h"

enum { FILL_GUESSES = 5 };

// The vocabulary of the first of these directories that has one: the checkpoint, the model, the data. words->size is 0
// where none has.
static inline void fill_find_words(WordPiece* words, Session* s, const char* model, const char* data_dir) {
    const char* places[] = {s->checkpoint, model, data_dir};
    for (size_t i = 0; i < COUNT_OF(places) && !s->tokenizer_dir; i++)
        if (places[i] && is_directory(places[i]) && wordpiece_open(words, places[i], CASE_OF_MODEL) == 0)
            s->tokenizer_dir = xprintf("%s", places[i]);
}

// Ends with USAGE where --fill is given and empty, as an unset variable of a shell is: that is no wish to train.
static inline void fill_check_flag(const char* text, Flag* table, int count) {
    if (!*text && flag_is_given(table, count, "--fill"))
        die(USAGE, "--fill '': is empty; give a text that holds [MASK]");
}

// Make `text`, which holds [MASK], the only sequence of a batch with room for T tokens. What is asked for has no target.
static inline void fill_batch(MlmBatch* b, const WordPiece* words, const char* text, int T, int V) {
    TokenIds ids = {NULL, 0, 0, 0, NULL};
    if (words->size == 0)
        die(USAGE,
            "--fill '%.80s': there is no vocab.txt or tokenizer.json to read it with; put the model's into its "
            "directory",
            text);
    if (words->size > V)
        die(USAGE, "--fill '%.80s': the vocabulary has %d tokens, but the model %d; put the model's own there", text,
            words->size, V);
    token_ids_add(&ids, words->cls);
    wordpiece_encode(&ids, words, text, strlen(text));
    token_ids_add(&ids, words->sep);
    if (ids.count > (size_t)T)
        die(USAGE, "--fill '%.80s': has %zu tokens with [CLS] and [SEP]; at most %d are possible", text, ids.count, T);
    b->count = 1, b->rows = b->max_length = (int)ids.count, b->masked = 0, b->first = 0;
    b->squares = (int64_t)ids.count * (int64_t)ids.count;
    b->cu_seqlens[0] = 0, b->cu_seqlens[1] = b->rows;
    b->next_labels[0] = -1;
    for (int i = 0; i < b->rows; i++) {
        b->tokens[i] = ids.id[i], b->types[i] = b->sequence[i] = 0, b->position[i] = i;
        if (ids.id[i] != words->mask) continue;
        b->masked_rows[b->masked] = i;
        b->masked_targets[b->masked++] = -1;
    }
    if (b->masked == 0) die(USAGE, "--fill '%.80s': holds no [MASK] to be filled in", text);
    free(ids.id);
}

// The most likely tokens of a row of logits, the best first, and their probabilities.
static inline void fill_guess(int* guess, double* probability, const real* logits, int V) {
    double total = 0;
    int found = 0;
    for (int v = 0; v < V; v++) {
        int k = found < FILL_GUESSES ? found++ : FILL_GUESSES;
        for (; k > 0 && logits[v] > logits[guess[k - 1]]; k--)
            if (k < FILL_GUESSES) guess[k] = guess[k - 1];
        if (k < FILL_GUESSES) guess[k] = v;
    }
    for (int v = 0; v < V; v++) total += exp((double)(logits[v] - logits[guess[0]]));
    for (int k = 0; k < found; k++) probability[k] = exp((double)(logits[guess[k]] - logits[guess[0]])) / total;
}

// Tokens as text, as numbers where there is no vocabulary.
static inline void fill_decode(Text* t, const WordPiece* words, const int* tokens, int n) {
    if (words->size) wordpiece_decode(t, words, tokens, (size_t)n);
    for (int i = 0; i < n && !words->size; i++) text_printf(t, "%d ", tokens[i]);
}

// The batch's only sequence as the model saw it and with its masked tokens filled in; `logits` [masked, Vp]. Every masked
// token is shown as [MASK], whatever stood in its place. Of a text that was asked for (fill_batch()), [CLS] and [SEP] are
// left out, and what else is likely follows.
static inline void fill_show(Text* t, const WordPiece* words, const MlmBatch* b, const real* logits, int V, int Vp) {
    int guess[FILL_GUESSES], *tokens = (int*)xmalloc((size_t)b->rows * sizeof(int)), right = 0;
    int is_asked = b->masked_targets[0] < 0;
    double probability[FILL_GUESSES];
    for (int filled = 0; filled < 2; filled++) {
        memcpy(tokens, b->tokens, (size_t)b->rows * sizeof(int));
        for (int i = 0; i < b->masked; i++) {
            fill_guess(guess, probability, logits + (size_t)i * (size_t)Vp, V);
            tokens[b->masked_rows[i]] = filled || !words->size ? guess[0] : words->mask;
            right += filled && guess[0] == b->masked_targets[i];
        }
        if (is_asked) fill_decode(t, words, tokens + 1, b->rows - 2);
        else fill_decode(t, words, tokens, b->rows);
        text_printf(t, "\n");
    }
    if (!is_asked) text_printf(t, "%d of %d are as they were", right, b->masked);
    for (int i = 0; i < b->masked && is_asked; i++) {
        fill_guess(guess, probability, logits + (size_t)i * (size_t)Vp, V);
        for (int k = 0; k < min_int(V, FILL_GUESSES); k++) {
            text_printf(t, "%s", k ? ", " : "  ");
            fill_decode(t, words, &guess[k], 1);
            text_printf(t, " %.3f", probability[k]);
        }
        text_printf(t, "\n");
    }
    free(tokens);
}

#endif
