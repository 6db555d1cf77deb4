/* How the fuzzer mutates its inputs.
 *
 * An input is a few files with names. Each mutation draws one of them and damages it as its kind suggests: bytes
 * anywhere, JSON value by value, text line by line, a safetensors file in its header. Splices take pieces of another
 * input. Every draw comes from one stream, so that the input is a function of (seed, reader, number). */
#ifndef FUZZ_MUTATE_H
#define FUZZ_MUTATE_H

#include "fuzz_json.h"

static inline void mutate_file(CaseFile* f, Draws* d, const Text* other) {
    const char* kind = strrchr(f->name, '.');
    if (!kind || f->bytes.length > CASE_LARGEST) kind = "";
    if (strcmp(kind, ".json") == 0) mutate_json(&f->bytes, d, other);
    else if (strcmp(kind, ".safetensors") == 0) mutate_safetensors(&f->bytes, d, other);
    else if (strcmp(kind, ".txt") == 0 && !one_in(d, 4)) mutate_lines(&f->bytes, d, other);
    else if (strcmp(kind, ".jsonl") == 0 && f->bytes.length && one_in(d, 2)) {
        size_t end, start = line_at(&f->bytes, draw_below(d, f->bytes.length), &end);
        Text line = {NULL, 0, 0};
        text_append(&line, f->bytes.text + start, end - start);
        mutate_json(&line, d, other);
        text_splice(&f->bytes, start, end - start, line.text, line.length);
        free(line.text);
    } else if (strcmp(kind, ".jsonl") == 0) mutate_lines(&f->bytes, d, other);
    else mutate_bytes(&f->bytes, d, other);
    if (f->bytes.length > CASE_LARGEST) text_splice(&f->bytes, CASE_LARGEST, f->bytes.length - CASE_LARGEST, NULL, 0);
}

// One of `seeds`, with one to about eight mutations.
static inline Case case_mutated(const CaseList* seeds, Draws* d) {
    Case c = case_copy(&seeds->cases[draw_below(d, (size_t)seeds->count)]);
    char end = '\0';
    const Text nothing = {&end, 0, 0};
    do {
        const Case* other = &seeds->cases[draw_below(d, (size_t)seeds->count)];
        CaseFile* f = &c.file[draw_below(d, (size_t)c.count)];
        // Settings decide more than weights do.
        if (!strstr(f->name, ".json")) f = &c.file[draw_below(d, (size_t)c.count)];
        const CaseFile* same = case_find(other, f->name);
        if (c.count > 1 && one_in(d, 40)) {  // gone
            free(f->bytes.text);
            *f = c.file[--c.count];
        } else if (c.count > 1 && same && one_in(d, 40)) {  // another input's
            text_splice(&f->bytes, 0, f->bytes.length, same->bytes.text, same->bytes.length);
        } else {
            mutate_file(f, d, same ? &same->bytes : &nothing);
        }
    } while (!one_in(d, 2));
    return c;
}

#endif
