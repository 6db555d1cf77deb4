/* The model card, README.md of a checkpoint: architecture, training data, settings, results, and how to load the model.
 * It contains neither paths nor times, so that a resumed run writes the same card as an uninterrupted one. */
#ifndef LLMC_CHECKPOINT_MODEL_CARD_H
#define LLMC_CHECKPOINT_MODEL_CARD_H

#include "llmc/checkpoint/checkpoint.h"
#include "llmc/import/room.h"
#include "llmc/run/state.h"

// The commit of the sources, from the Makefile. A build that compiles nothing keeps the commit of the last compilation.
#ifndef BUILD_COMMIT
#define BUILD_COMMIT "unknown"
#endif

// Append a user's text in backticks. Characters that could end them, and invalid UTF-8, become "?".
static inline void card_code(Text* t, const char* s, size_t n) {
    text_append(t, "`", 1);
    for (size_t i = 0, bytes; i < n; i += bytes ? bytes : 1) {
        bytes = utf8_length(s + i, n - i);
        int is_plain = bytes > 0 && (unsigned char)s[i] >= ' ' && s[i] != '`' && s[i] != 127;
        text_append(t, is_plain ? s + i : "?", is_plain ? bytes : 1);
    }
    text_append(t, "`", 1);
}

// The same for the last part of a path; a name on the Hub is not shortened.
static inline void card_name(Text* t, const char* path) {
    size_t end = strlen(path), begin = 0;
    int is_path = !hub_is_name(path);
    while (is_path && end > 1 && path[end - 1] == '/') end--;
    for (size_t i = 0; is_path && i + 1 < end; i++)
        if (path[i] == '/') begin = i + 1;
    card_code(t, path + begin, end - begin);
}

// The numbers, strings and booleans of config.json, one per line.
static inline void card_architecture(Text* t, const JsonNode* config) {
    text_printf(t, "\n## Architecture\n\n");
    for (const JsonNode* m = config->first; m; m = m->next) {
        if (m->type != JSON_NUMBER && m->type != JSON_STRING && m->type != JSON_BOOL) continue;
        text_printf(t, "- %s: ", m->key);
        if (m->type == JSON_BOOL) card_code(t, m->integer ? "true" : "false", m->integer ? 4 : 5);
        else card_code(t, m->string, m->length);
        text_printf(t, "\n");
    }
}

// The settings of SCOPE_RUN that differ from the defaults, and --model.
static inline void card_settings(Text* t, const Run* r) {
    static const char* const elsewhere[] = {"--train-data", "--val-data"};  // listed under "Data"
    text_printf(t, "\n## Settings\n\nThose that differ from the program's defaults:\n\n");
    for (int i = 0; i < r->flag_count; i++) {
        char value[FLAG_TEXT_SIZE], usual[FLAG_TEXT_SIZE], error[FLAG_ERROR_SIZE];
        const Flag* row = &r->flags[i];
        int64_t space[2];  // room for a value of any type
        Flag standard = *row;
        standard.value = space;
        int shows = row->scope == SCOPE_RUN;
        for (size_t k = 0; k < COUNT_OF(elsewhere); k++) shows = shows && strcmp(row->long_name, elsewhere[k]) != 0;
        if (!shows || flags_assign(&standard, row->default_text, error) != 0) continue;
        flags_format_value(row, value, sizeof value);
        flags_format_value(&standard, usual, sizeof usual);
        if (strcmp(value, usual) == 0 && strcmp(row->long_name, "--model") != 0) continue;
        text_printf(t, "- %s ", row->long_name);
        if (row->type == FLAG_STRING) card_name(t, *(const char* const*)row->value);
        else card_code(t, value, strlen(value));
        text_printf(t, "\n");
    }
}

// The results of the weights, or of their average (is_average).
static inline void card_results(Text* t, const Log* log, int is_average) {
    const LossCurve* losses = &log->train;
    const char* title = "\n## Results\n\n| | value | after step |\n|---|---:|---:|\n";
    if (losses->count > 0 && !is_average) {
        text_printf(t, "%s| loss of the last step | %.5g | %lld |\n", title, (double)losses->value[losses->count - 1],
                    (long long)losses->step[losses->count - 1]);
        title = "";
    }
    for (size_t i = 0; i < log->result_count; i++) {
        const LogResult* r = &log->results[i];
        if ((strncmp(r->key, "ema_", 4) == 0) != is_average || !isfinite(r->value)) continue;
        text_printf(t, "%s| ", title);
        title = "";
        card_code(t, r->key, strlen(r->key));
        text_printf(t, " | %.5g | %lld |\n", r->value, (long long)r->step);
    }
}

// Whether `transformers` can load the tokenizer. It cannot load the original GPT-2 file names, nor llm.c's file.
static inline int card_has_tokenizer(const TokenizerFiles* f) {
    static const char* const names[] = {"tokenizer.json", "vocab.json", "vocab.txt"};
    for (int i = 0; i < f->count; i++)
        for (size_t k = 0; k < COUNT_OF(names); k++)
            if (strcmp(f->file[i].name, names[k]) == 0) return 1;
    return 0;
}

// Example code that loads a model of the class `architecture` with `transformers`.
static inline void card_use(Text* t, const char* architecture, int has_tokenizer) {
    text_printf(t, "\n## Use\n\n```python\nfrom transformers import %s%s\n\n", has_tokenizer ? "AutoTokenizer, " : "",
                architecture);
    text_printf(t, "model = %s.from_pretrained(\"NAME\")  # this directory, or its name on the Hub\n", architecture);
    if (has_tokenizer) text_printf(t, "tokenizer = AutoTokenizer.from_pretrained(\"NAME\")\n");
    text_printf(t, "```\n");
}

// The card of the model after r->step steps (the caller frees the text). "architectures" in config.json names a class
// of `transformers` if one can load it. `val`: pattern of the validation data, or NULL. `is_average`: for OUT/ema. That
// directory is replaced as a whole, so the card needs no CHECKPOINT_CARD_MARKER.
static inline Text model_card(const Run* r, const char* val, int is_average) {
    Text t = {NULL, 0, 0};
    Json config;
    char error[JSON_ERROR_SIZE], count[32];
    int has_config = json_parse(&config, r->config.text, r->config.length, error) == 0;
    const JsonNode* classes = has_config ? json_get(config.root, "architectures") : NULL;
    const char* architecture = classes && classes->first && classes->first->string ? classes->first->string : NULL;
    const char* kind = has_config ? json_get_string_or(config.root, "model_type", "model", "config.json") : "model";
    const char *train = r->settings.train_data, *program = program_invocation_short_name;
    format_count(count, (int64_t)r->buffers->table.parameters);
    if (architecture) text_printf(&t, "---\nlibrary_name: transformers\n---\n\n");
    if (!is_average) text_printf(&t, "%s\n\n", CHECKPOINT_CARD_MARKER);
    text_printf(&t, "# %s, %s parameters\n\n", architecture ? architecture : kind, count);
    if (is_average) text_printf(&t, "The average of the weights of several steps (`--ema`).\n");
    text_printf(&t, "After step %lld of %lld by ", (long long)r->step, (long long)r->last);
    card_code(&t, program, strlen(program));
    text_printf(&t, ", commit `%s`.\n", BUILD_COMMIT);
    if (has_config) card_architecture(&t, config.root);
    text_printf(&t, "\n## Data\n\n- training: ");
    if (*train) card_name(&t, train);
    else text_printf(&t, "built-in data");
    text_printf(&t, ", fingerprint `%08x`; %llu sequences so far\n", r->data, (unsigned long long)r->consumed);
    if (val) text_printf(&t, "- validation: "), card_name(&t, val), text_printf(&t, "\n");
    card_settings(&t, r);
    card_results(&t, &r->log, is_average);
    if (architecture) card_use(&t, architecture, card_has_tokenizer(&r->tokenizer_files));
    if (has_config) json_free(&config);
    return t;
}

#endif
