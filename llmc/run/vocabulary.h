/* The vocabulary of a language model: find the tokenizer, and check that the model has every token of the data. */
#ifndef LLMC_RUN_VOCABULARY_H
#define LLMC_RUN_VOCABULARY_H

#include "llmc/base/process.h"
#include "llmc/data/lm_data.h"
#include "llmc/data/token_scan.h"
#include "llmc/run/run.h"

// Append the rows of the data and the samples. Returns the new count.
static inline int vocabulary_rows(Settings* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {NULL, "--doc-mask",      FLAG_INT, &s->doc_mask,      "0",   0, 1,   NULL, SCOPE_RUN,  TOPIC_DATA,
         "1: attention stays within a document, which begins with the end-of-text token. Positions do not restart at "
         "documents."},
        {"-g", "--sample-tokens", FLAG_INT, &s->sample_tokens, "128", 1, 1e6, NULL, SCOPE_FREE, TOPIC_SAMPLES,
         "Tokens per sample."},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

// Open the tokenizer of the first of these directories that has one: checkpoint, model, data. Reads all of its files
// now, because the directory may be gone when the run saves.
static inline void run_find_tokenizer(Run* r, const char* model, const char* data_dir) {
    const char* places[] = {r->checkpoint, model, data_dir};
    for (size_t i = 0; i < COUNT_OF(places) && !r->tokenizer_files.directory; i++)
        if (places[i] && is_directory(places[i]) && tokenizer_open(&r->tokenizer, places[i]) == 0)
            tokenizer_files_read(&r->tokenizer_files, places[i]);
}

// The token that ends a text, or an answer of a chat model: eos_token of tokenizer_config.json, or else of
// special_tokens_map.json, else `fallback`.
static inline int run_eos(const Run* r, int V, int fallback) {
    const TokenizerFiles* f = &r->tokenizer_files;
    char error[JSON_ERROR_SIZE];
    int id = -1;
    Json json;
    for (int i = 0; i < f->count && id < 0; i++) {
        const TokenizerFile* file = &f->file[i];
        if (strcmp(file->name, "tokenizer_config.json") != 0 && strcmp(file->name, "special_tokens_map.json") != 0)
            continue;
        if (json_parse(&json, file->bytes, file->size, error) != 0) continue;
        const JsonNode *eos = json_get(json.root, "eos_token"), *content = json_get(eos, "content");
        if (content) eos = content;  // `transformers` has written both forms
        if (eos && eos->type == JSON_STRING) id = tokenizer_find(&r->tokenizer, eos->string, eos->length);
        json_free(&json);
    }
    return id >= 0 && id < V ? id : fallback;
}

// The token that separates documents: <|endoftext|>, else eos_token, else the last of V, as in GPT-2's vocabulary.
static inline int run_end_of_text(const Run* r, int V) {
    int id = r->tokenizer_files.directory ? tokenizer_end_of_text(&r->tokenizer) : -1;
    return id >= 0 && id < V ? id : run_eos(r, V, V - 1);
}

// These n tokens as text; without a tokenizer, their IDs.
static inline Text run_decode(const Run* r, const int* tokens, int n) {
    Text text = {NULL, 0, 0};
    for (int i = 0; i < n; i++) {
        size_t bytes = 0;
        const char* piece = r->tokenizer_files.directory ? tokenizer_decode(&r->tokenizer, tokens[i], &bytes) : NULL;
        if (piece) text_append(&text, piece, bytes);
        else text_printf(&text, "%d ", tokens[i]);
    }
    return text;
}

// Show a sample of n tokens, on rank 0 (run_show_text).
static inline void run_show_tokens(Run* r, const int* tokens, int n) {
    Text text = run_decode(r, tokens, n);
    if (r->group.rank == 0) run_show_text(r, &text);
    free(text.text);
}

// Whether the shards' directory has the run's tokenizer and that tokenizer fits the model.
static inline int vocabulary_is_beside(const Run* r, const Shards* shards, int V) {
    char* directory = directory_of(shards->pattern);
    int is_beside = r->tokenizer.size <= V && tokenizer_files_match(&r->tokenizer_files, directory);
    free(directory);
    return is_beside;
}

// Scan the shards, distributed over the ranks. Adds the bytes read to *bytes.
static inline TokenScan* vocabulary_scan(const Run* r, const Shards* shards, double* bytes) {
    const int ranks = r->group.size;
    const size_t n = (size_t)shards->count;
    TokenScan *mine = (TokenScan*)xcalloc(n, sizeof *mine), *all = (TokenScan*)xcalloc(n * (size_t)ranks, sizeof *all);
    for (size_t i = 0; i < n; i++) {
        *bytes += (double)shards->shard[i].tokens * shards->shard[i].width;
        if ((int)(i % (size_t)ranks) == r->group.rank) token_scan_read(&mine[i], &shards->shard[i]);
    }
    group_gather(&r->group, all, mine, n * sizeof *mine);
    for (size_t i = 0; i < n; i++) mine[i] = all[(i % (size_t)ranks) * n + i];
    free(all);
    return mine;
}

// Ends with USAGE if a token of the shards is not below V. Returns the largest token.
static inline uint32_t vocabulary_check_shards(const Run* r, const Shards* shards, int V, double* bytes) {
    uint32_t largest = 0;
    TokenScan* scan = vocabulary_scan(r, shards, bytes);
    for (int i = 0; i < shards->count; i++) {
        if (scan[i].largest >= (uint32_t)V)
            group_die(&r->group, USAGE,
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
static inline void vocabulary_check(const Run* r, const LmData* data, int V) {
    const Shards* const sets[] = {&data->train_shards, data->has_val ? &data->val_shards : NULL};
    double bytes = 0, began = now_seconds();
    uint32_t largest = 0;
    int shards = 0;
    if (r->settings.evaluate) return;
    StopHandler on_stop = process_on_stop(SIG_DFL);
    for (size_t i = 0; i < COUNT_OF(sets); i++) {
        if (!sets[i] || !group_any(&r->group, !vocabulary_is_beside(r, sets[i], V))) continue;
        uint32_t most = vocabulary_check_shards(r, sets[i], V, &bytes);
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

// Open the data of a model of V tokens, whose config.json is `config`, and check both.
static inline void vocabulary_open_data(Run* r, LmData* data, int V, Text config) {
    lm_data_open(data, r->train_pattern, r->val_pattern, V, (uint64_t)r->settings.seed,
                 r->settings.shuffle ? SHUFFLED : IN_ORDER, r->group.size);
    run_check_data(r, shards_fingerprint(&data->train_shards), r->train_pattern);
    run_check_ranks(r, config, data->has_val, data->has_val ? shards_fingerprint(&data->val_shards) : 0);
    vocabulary_check(r, data, V);
    run_set_last(r, batch_lm_windows(&data->train));
}

#endif
