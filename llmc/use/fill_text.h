/* --fill: print a text with its [MASK]s filled in, and the most likely tokens for each. */
#ifndef LLMC_USE_FILL_TEXT_H
#define LLMC_USE_FILL_TEXT_H

#include "llmc/bert/fill_mask.h"

enum { FILL_TEXT_GUESSES = 5 };

// Make `text`, which contains [MASK], the only sequence of a batch with room for T tokens. Its masks have no targets.
static inline void fill_text_batch(MlmBatch* b, const WordPiece* words, const char* text, int T, int V) {
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

// Print the text of fill_text_batch(), without and with the predictions from `logits` [masked, Vp] on the device, and the
// most likely tokens for each mask with their probabilities.
static inline void fill_text_print(const WordPiece* words, const MlmBatch* b, floatX* logits, int V, int Vp,
                                   Context* ctx) {
    int guess[FILL_TEXT_GUESSES];
    double probability[FILL_TEXT_GUESSES];
    HostView view = host_view_open(logits, (size_t)b->masked * (size_t)Vp, VIEW_FLOATX);
    Text t = {NULL, 0, 0};
    host_view_read(ctx, &view);
    fill_mask_write(&t, words, b, view.values, 1, V, Vp);
    for (int i = 0; i < b->masked; i++) {
        top_k(guess, probability, view.values + (size_t)i * (size_t)Vp, V, FILL_TEXT_GUESSES);
        if (!isfinite(probability[0]))
            die(STOPPED_BY_NAN,
                "--fill: the model's logits are not finite; take an earlier checkpoint or another model");
        for (int k = 0; k < min_int(V, FILL_TEXT_GUESSES); k++) {
            text_printf(&t, "%s", k ? ", " : "  ");
            fill_mask_decode(&t, words, &guess[k], 1);
            text_printf(&t, " %.3f", probability[k]);
        }
        text_printf(&t, "\n");
    }
    fwrite(t.text, 1, t.length, stdout);
    host_view_close(&view);
    free(t.text);
}

#endif
