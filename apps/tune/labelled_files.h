/* Labelled text as CSV or as JSON lines, rewritten as the tab-separated lines that labelled.h reads. Tabs and line ends
 * inside a field become spaces, which are the same to BERT's tokenizer.
 *
 *   .csv     fields with commas between them (RFC 4180): one that begins with a quotation mark ends with one, and has
 *            two for each inside. A record counts as one line in errors
 *   .jsonl   an object a line; the keys of the first one become a header. Arrays and objects in it are no columns */
#ifndef APPS_TUNE_LABELLED_FILES_H
#define APPS_TUNE_LABELLED_FILES_H

#include "llmc/base/json.h"

static inline char labelled_character(char c) { return c == '\t' || c == '\n' || c == '\r' ? ' ' : c; }

// Rewrite `text` [size] in place. Returns the new size, which is not larger.
static inline size_t labelled_from_csv(const char* path, char* text, size_t size) {
    size_t out = utf8_mark(text, size), begin = out, line = 1, opened = 0;  // line of an open quotation mark; 0: none
    for (size_t at = begin; at < size; at++) {
        char c = text[at];
        int starts_field = out == begin || text[out - 1] == '\t' || text[out - 1] == '\n';
        line += c == '\n';
        if (c == '"' && opened && at + 1 < size && text[at + 1] == '"') {
            at++;
        } else if (c == '"' && (opened || starts_field)) {
            opened = opened ? 0 : line;
            continue;
        } else if (opened || c == '\t') {
            c = labelled_character(c);
        } else if (c == ',') {
            c = '\t';
        }
        text[out++] = c;
    }
    if (opened) die(USAGE, "%s: line %zu: a quotation mark that begins a field is not closed", path, opened);
    return out;
}

static inline void labelled_put(Text* t, const char* bytes, size_t n) {
    text_append(t, bytes, n);
    for (char* c = t->text + t->length - n; n > 0; n--, c++) *c = labelled_character(*c);
}

// The lines of `text` [size], after a line of the keys (caller frees).
static inline Text labelled_from_json(const char* path, const char* text, size_t size) {
    Text out = {NULL, 0, 0};
    Json first = {NULL, NULL, NULL}, json;
    char error[JSON_ERROR_SIZE];
    for (size_t at = utf8_mark(text, size), line = 1, n; at < size; at += n + 1, line++) {
        n = strcspn(text + at, "\n");
        int row = first.root != NULL;  // 0: the keys come first
        if (n == 0) continue;
        if (json_parse(&json, text + at, n, error) != 0) die(USAGE, "%s: line %zu: is not JSON: %s", path, line, error);
        if (json.root->type != JSON_OBJECT) die(USAGE, "%s: line %zu: is not an object", path, line);
        for (first = row ? first : json; row < 2; row++) {
            int columns = 0;
            for (const JsonNode* c = first.root->first; c; c = c->next) {
                const JsonNode* value = json_get(json.root, c->key);
                if (c->type >= JSON_ARRAY) continue;
                if (!value || value->type >= JSON_ARRAY)
                    die(USAGE, "%s: line %zu: has no text or number under the key \"%s\" of line 1", path, line,
                        c->key);
                if (columns++) text_append(&out, "\t", 1);
                if (row == 0) labelled_put(&out, c->key, c->key_length);
                else if (value->string) labelled_put(&out, value->string, value->length);
                else if (value->type == JSON_BOOL) text_printf(&out, "%d", (int)value->integer);
            }
            text_append(&out, "\n", 1);
        }
        if (json.root != first.root) json_free(&json);
    }
    json_free(&first);
    return out;
}

#endif
