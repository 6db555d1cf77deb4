/* Texts for a masked language model: the settings of --fill and --embed (embed.h), and --fill, which prints a text with
 * its [MASK]s filled in, and the most likely tokens for each. */
#ifndef APPS_USE_MLM_TEXTS_H
#define APPS_USE_MLM_TEXTS_H

#include "llmc/bert/fill_mask.h"

enum { FILL_TEXT_GUESSES = 5 };

typedef enum { POOL_MEAN, POOL_CLS } Pool;  // in the order of the flag's choices

typedef struct {
    const char* fill;
    const char *embed, *vectors;  // texts, and the file for their vectors
    int pool;
} MlmTextSettings;

// Append the rows of --fill and --embed. Returns the new count.
static inline int mlm_text_rows(MlmTextSettings* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {NULL, "--fill",               FLAG_STRING, &s->fill,            "",       0,   0,       NULL,   SCOPE_PROCESS, TOPIC_SAMPLES,
         "Print this text with its [MASK]s filled in by -e (or by -o with -y 1) and exit."},
        {NULL, "--embed",              FLAG_STRING, &s->embed,           "",       0,   0,       NULL,   SCOPE_PROCESS, TOPIC_SAMPLES,
         "Embed each line of this text file with -e (or -o with -y 1), write the vectors and exit."},
        {NULL, "--vectors",            FLAG_STRING, &s->vectors,         "",       0,   0,       NULL,   SCOPE_PROCESS, TOPIC_SAMPLES,
         "NumPy file for the vectors, float32 [lines, channels]. Empty: the name of --embed plus .npy."},
        {NULL, "--pool",               FLAG_CHOICE, &s->pool,            "mean",   0,   0,       "mean|cls", SCOPE_PROCESS, TOPIC_SAMPLES,
         "Vector of a line. mean: the mean of all last hidden states, with [CLS] and [SEP]; cls: that of [CLS]."},
    };
    // clang-format on
    settings_default(table, count, "--autotune", "0");  // it takes longer than most uses gain
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

// Returns whether --fill or --embed is given. Ends with USAGE if one is empty, for example from an unset shell
// variable, or if both are given.
static inline int mlm_text_check(const MlmTextSettings* m, Settings* s, Flag* table, int count) {
    if (!*m->fill && flag_is_given(table, count, "--fill")) die(USAGE, "--fill '': is empty; give a text with [MASK]");
    if (*m->embed && *m->fill) die(USAGE, "--embed %s: --fill is given too; choose one", m->embed);
    if (!*m->embed && flag_is_given(table, count, "--embed")) die(USAGE, "--embed '': is empty; give a file of texts");
    const int is_given = *m->embed || *m->fill;
    if (is_given && s->evaluate)
        die(USAGE, "%s and --evaluate 1: the other prints a loss; leave one out", *m->embed ? "--embed" : "--fill");
    if (is_given) s->evaluate = 1;
    return is_given;
}

// Make n tokens the only sequence of a batch, without masks.
static inline void mlm_text_batch(MlmBatch* b, const int* tokens, int n) {
    b->count = 1, b->rows = b->max_length = n, b->masked = 0, b->first = 0;
    b->sum_sq_len = (int64_t)n * n;
    b->cu_seqlens[0] = 0, b->cu_seqlens[1] = n, b->next_targets[0] = -1;
    for (int i = 0; i < n; i++) b->tokens[i] = tokens[i], b->types[i] = 0, b->sequence[i] = 0, b->position[i] = i;
}

// Make `text`, which contains [MASK], the only sequence of a batch with room for T tokens. Its masks have no targets.
static inline void fill_text_batch(MlmBatch* b, const WordPiece* words, const char* text, int T, int V) {
    TokenIds ids = {NULL, 0, 0, 0, NULL};
    examples_check_texts(words, V, "--fill");
    token_ids_add(&ids, words->cls);
    wordpiece_encode(&ids, words, text, strlen(text));
    token_ids_add(&ids, words->sep);
    if (ids.count > (size_t)T)
        die(USAGE, "--fill '%.80s': has %zu tokens with [CLS] and [SEP]; the maximum is %d", text, ids.count, T);
    mlm_text_batch(b, ids.id, (int)ids.count);
    for (int i = 0; i < b->rows; i++)
        if (ids.id[i] == words->mask) b->masked_rows[b->masked] = i, b->targets[b->masked++] = -1;
    if (b->masked == 0) die(USAGE, "--fill '%.80s': contains no [MASK]", text);
    free(ids.id);
}

// Print the text of fill_text_batch(), without and with the predictions from `logits` [masked, Vp] on the device, and
// the most likely tokens for each mask with their probabilities.
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
