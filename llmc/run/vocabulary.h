/* The vocabulary of a language model: find the tokenizer, and check that the model has every token of the data. */
#ifndef LLMC_RUN_VOCABULARY_H
#define LLMC_RUN_VOCABULARY_H

#include "llmc/base/process.h"
#include "llmc/data/lm_data.h"
#include "llmc/data/token_scan.h"
#include "llmc/run/session.h"

// Open the tokenizer of the first of these directories that has one: checkpoint, model, data. Reads all of its files
// now, because the directory may be gone when the run saves.
static inline void session_find_tokenizer(Session* s, const char* model, const char* data_dir) {
    const char* places[] = {s->checkpoint, model, data_dir};
    for (size_t i = 0; i < COUNT_OF(places) && !s->tokenizer_files.directory; i++)
        if (places[i] && is_directory(places[i]) && tokenizer_open(&s->tokenizer, places[i]) == 0)
            tokenizer_files_read(&s->tokenizer_files, places[i]);
}

// The token that separates documents: from the tokenizer, or else the last of V, as in GPT-2's vocabulary.
static inline int session_end_of_text(const Session* s, int V) {
    int id = s->tokenizer_files.directory ? tokenizer_end_of_text(&s->tokenizer) : -1;
    return id >= 0 && id < V ? id : V - 1;
}

// The token that ends a text, or an answer of a chat model: from tokenizer_config.json, else `fallback`.
static inline int session_eos(const Session* s, int V, int fallback) {
    const TokenizerFiles* f = &s->tokenizer_files;
    char error[JSON_ERROR_SIZE];
    int id = -1, i = 0;
    Json json;
    while (i < f->count && strcmp(f->file[i].name, "tokenizer_config.json") != 0) i++;
    if (i == f->count || json_parse(&json, f->file[i].bytes, f->file[i].size, error) != 0) return fallback;
    const JsonNode *eos = json_get(json.root, "eos_token"), *content = json_get(eos, "content");
    if (content) eos = content;  // `transformers` has written both forms
    if (eos && eos->type == JSON_STRING) id = tokenizer_find(&s->tokenizer, eos->string, eos->length);
    json_free(&json);
    return id >= 0 && id < V ? id : fallback;
}

// These n tokens as text; without a tokenizer, their IDs.
static inline Text session_decode(const Session* s, const int* tokens, int n) {
    Text text = {NULL, 0, 0};
    for (int i = 0; i < n; i++) {
        size_t bytes = 0;
        const char* piece = s->tokenizer_files.directory ? tokenizer_decode(&s->tokenizer, tokens[i], &bytes) : NULL;
        if (piece) text_append(&text, piece, bytes);
        else text_printf(&text, "%d ", tokens[i]);
    }
    return text;
}

// Whether the shards' directory has the run's tokenizer and that tokenizer fits the model.
static inline int vocabulary_is_beside(const Session* s, const Shards* shards, int V) {
    char* directory = session_directory_of(shards->pattern);
    int is_beside = s->tokenizer.size <= V && tokenizer_files_match(&s->tokenizer_files, directory);
    free(directory);
    return is_beside;
}

// Scan the shards, distributed over the ranks. Adds the bytes read to *bytes.
static inline TokenScan* vocabulary_scan(const Session* s, const Shards* shards, double* bytes) {
    const int ranks = s->group->size;
    const size_t n = (size_t)shards->count;
    TokenScan *mine = (TokenScan*)xcalloc(n, sizeof *mine), *all = (TokenScan*)xcalloc(n * (size_t)ranks, sizeof *all);
    for (size_t i = 0; i < n; i++) {
        *bytes += (double)shards->shard[i].tokens * shards->shard[i].width;
        if ((int)(i % (size_t)ranks) == s->group->rank) token_scan_read(&mine[i], &shards->shard[i]);
    }
    group_gather(s->group, all, mine, n * sizeof *mine);
    for (size_t i = 0; i < n; i++) mine[i] = all[(i % (size_t)ranks) * n + i];
    free(all);
    return mine;
}

// Ends with USAGE if a token of the shards is not below V. Returns the largest token.
static inline uint32_t vocabulary_check_shards(const Session* s, const Shards* shards, int V, double* bytes) {
    uint32_t largest = 0;
    TokenScan* scan = vocabulary_scan(s, shards, bytes);
    for (int i = 0; i < shards->count; i++) {
        if (scan[i].largest >= (uint32_t)V)
            checkpoint_die(s->group, USAGE,
                           "%s: token %u at position %llu is outside the vocabulary of %d; prepare the data with the "
                           "model's own tokenizer, or choose a model with a larger vocabulary",
                           shards->shard[i].path, scan[i].largest, (unsigned long long)scan[i].position, V);
        largest = scan[i].largest > largest ? scan[i].largest : largest;
    }
    free(scan);
    return largest;
}

// Before step 0: end with USAGE if the training or validation data has a token that the model lacks. Data next to the
// run's tokenizer is not scanned. A scan may take long, and nothing is written yet, so meanwhile signals end the program.
// All ranks call it.
static inline void vocabulary_check(const Session* s, const LmData* data, int V) {
    const Shards* const sets[] = {&data->train_shards, data->has_val ? &data->val_shards : NULL};
    double bytes = 0, began = now_seconds();
    uint32_t largest = 0;
    int shards = 0;
    if (s->settings->evaluate) return;
    StopHandler on_stop = process_on_stop(SIG_DFL);
    for (size_t i = 0; i < COUNT_OF(sets); i++) {
        if (!sets[i] || !group_any(s->group, !vocabulary_is_beside(s, sets[i], V))) continue;
        uint32_t most = vocabulary_check_shards(s, sets[i], V, &bytes);
        largest = most > largest ? most : largest;
        shards += sets[i]->count;
    }
    if (bytes > 0) {
        double gb = 1e-9 * bytes, seconds = fmax(now_seconds() - began, 1e-9);
        printf("largest token: %u in %d shard%s, the model has %d; scanned %.3g GB at %.3g GB/s\n", largest, shards,
               shards == 1 ? "" : "s", V, gb, gb / seconds);
        fflush(stdout);
    }
    process_on_stop(on_stop);
}

#endif
