/* Inputs of the fuzzer, and how they are mutated.
 *
 * An input is a few files with names. Each mutation draws one of them: a binary file is changed byte by byte, most
 * often in its place, so that its length stays the one that its header gives; a text token by token. Every draw comes
 * from one stream, so that an input is a function of (seed, reader, number). */
#ifndef FUZZ_MUTATE_H
#define FUZZ_MUTATE_H

#include "llmc/base/json.h"
#include "llmc/base/rng.h"

enum { CASE_FILES = 24, CASE_NAME = 96, CASE_LARGEST = 1 << 18, MOST_SEEDS = 16 };

typedef struct {
    char name[CASE_NAME];  // with "/" where it lies in a directory
    Text bytes;
} CaseFile;

typedef struct {
    int count;
    CaseFile file[CASE_FILES];
} Case;

typedef struct {
    int count;
    Case cases[MOST_SEEDS];
} Seeds;

typedef struct {
    uint64_t key;
    uint32_t used;
} Draws;

static inline uint32_t draw(Draws* d) { return philox(d->used++, 0, 0, 0, d->key).v[0]; }

// 0 .. n - 1; 0 for n = 0.
static inline size_t draw_below(Draws* d, size_t n) { return n ? draw(d) % n : 0; }

static inline int one_in(Draws* d, size_t n) { return draw_below(d, n) == 0; }

// ---------------------------------------------------------------------------------------------------------
// Inputs

// Bytes [at, at + gone) give way to `n` others, which may be part of the same text.
static inline void text_splice(Text* t, size_t at, size_t gone, const char* bytes, size_t n) {
    Text result = {NULL, 0, 0};
    text_append(&result, t->text ? t->text : "", at);
    text_append(&result, bytes ? bytes : "", n);
    text_append(&result, (t->text ? t->text : "") + at + gone, t->length - at - gone);
    free(t->text);
    *t = result;
}

static inline CaseFile* case_find(Case* c, const char* name) {
    for (int i = 0; i < c->count; i++)
        if (strcmp(c->file[i].name, name) == 0) return &c->file[i];
    return NULL;
}

static inline void case_add(Case* c, const char* name, const char* bytes, size_t n) {
    CHECK(c->count < CASE_FILES && strlen(name) < CASE_NAME);
    CaseFile* f = &c->file[c->count++];
    memset(f, 0, sizeof *f);
    snprintf(f->name, CASE_NAME, "%s", name);
    text_append(&f->bytes, bytes, n);
}

static inline void case_free(Case* c) {
    for (int i = 0; i < c->count; i++) free(c->file[i].bytes.text);
    c->count = 0;
}

static inline Case case_copy(const Case* from) {
    Case c;
    c.count = 0;
    for (int i = 0; i < from->count; i++)
        case_add(&c, from->file[i].name, from->file[i].bytes.text, from->file[i].bytes.length);
    return c;
}

static inline Case* case_new(Seeds* seeds) {
    CHECK(seeds->count < MOST_SEEDS);
    return &seeds->cases[seeds->count++];
}

// ---------------------------------------------------------------------------------------------------------
// Bytes

// Half of the time where headers are.
static inline size_t draw_place(Draws* d, size_t n) { return draw_below(d, one_in(d, 2) ? min_size(n, 64) : n); }

// An integer of 1, 2, 4 or 8 bytes becomes a border of its range or of the file's size, or moves a little.
static inline void mutate_integer(Text* t, Draws* d) {
    size_t width = (size_t)1 << draw_below(d, 4), at = draw_place(d, t->length) / width * width;
    if (t->length < at + width) return;
    uint64_t x = 0, half = (uint64_t)1 << (8 * width - 1);
    const uint64_t borders[] = {0, 1, UINT64_MAX, half, half - 1, (uint64_t)1 << 32, t->length, t->length + 1, 256};
    memcpy(&x, t->text + at, width);
    x = one_in(d, 2) ? borders[draw_below(d, COUNT_OF(borders))] : x + (uint64_t)draw_below(d, 71) - 35;
    memcpy(t->text + at, &x, width);
}

static inline void mutate_bytes(Text* t, Draws* d) {
    size_t at = draw_place(d, t->length), some = draw_below(d, min_size(t->length - at, 40));
    char byte = (char)draw(d);
    if (t->length == 0) return;
    switch (draw_below(d, 8)) {
    case 0:
        t->text[at] = (char)(t->text[at] ^ 1 << draw_below(d, 8));
        break;
    case 1:
        t->text[at] = byte;
        break;
    case 2:
        text_splice(t, at, t->length - at, NULL, 0);
        break;
    case 3:
        text_splice(t, at, 0, t->text + at, some);
        break;
    case 4:
        text_splice(t, at, some, &byte, (size_t)one_in(d, 2));
        break;
    default:
        mutate_integer(t, d);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Texts

// A word that a reader may not expect in the place of another.
static inline Text odd_word(Draws* d) {
    // clang-format off
    static const char* const words[] = {
        "0", "-0", "-1", "1", "2", "1e308", "1e400", "1e-400", "9223372036854775807", "9223372036854775808",
        "-9223372036854775808", "18446744073709551616", "2147483647", "2147483648", "4294967296", "16777216", "65536",
        "0.5", "1.0", "1E+2", "00", "1.", "-", "--", "0x10", "nan", "NaN", "-Infinity", "null", "true", "false", "",
        "\"\"", "[]", "{}", "\"\\u0000\"", "\"a\\u0000b\"", "\"\\ud800\"", "\"\\ud83d\\u0041\"", "\"\\n\\u001b[31m\"",
        "\"\xff\"", "\xe2\x82", "\xc4\xa0", "[0, 0]", "{\"a\": {\"a\": [1]}}", "\"F32\"", "%s%n", "[UNK]", "##", "=",
    };
    // clang-format on
    Text word = {NULL, 0, 0};
    size_t k = draw_below(d, COUNT_OF(words) + 2), n = 50 + draw_below(d, k == COUNT_OF(words) ? 30 : 5000);
    text_append(&word, "", 0);
    if (k < COUNT_OF(words)) text_append(&word, words[k], strlen(words[k]));
    for (size_t i = 0; k == COUNT_OF(words) && i < n; i++) text_append(&word, "[", 1);  // as deep as may be, and deeper
    for (size_t i = 0; k == COUNT_OF(words) && i < n; i++) text_append(&word, "]", 1);
    for (size_t i = 0; k > COUNT_OF(words) && i < n; i++) text_append(&word, "y", 1);
    return word;
}

static inline int is_delimiter(char c) { return c && strchr(" \n\r\t,:{}[]=", c) != NULL; }

// The token around a byte: [begin, returned).
static inline size_t token_at(const Text* t, size_t at, size_t* begin) {
    size_t end = at;
    while (at > 0 && !is_delimiter(t->text[at - 1])) at--;
    while (end < t->length && !is_delimiter(t->text[end])) end++;
    *begin = at;
    return end;
}

static inline void mutate_text(Text* t, Draws* d) {
    size_t begin, from, end = token_at(t, draw_below(d, t->length), &begin), next = min_size(end + 1, t->length);
    size_t to = token_at(t, draw_below(d, t->length), &from), kind = draw_below(d, 9);
    char number[32], *rest;
    long long value = begin < t->length ? strtoll(t->text + begin, &rest, 10) : 0;
    if (t->length == 0 || kind == 0) {
        mutate_bytes(t, d);
    } else if (kind < 4) {
        Text word = odd_word(d);
        text_splice(t, begin, end - begin, word.text, word.length);
        free(word.text);
    } else if (kind == 4) {  // another number nearby
        int n = snprintf(number, sizeof number, "%lld", (long long)((uint64_t)value + draw_below(d, 9) - 4));
        if (rest != t->text + begin) text_splice(t, begin, (size_t)(rest - t->text) - begin, number, (size_t)n);
    } else if (kind == 5) {
        text_splice(t, begin, next - begin, NULL, 0);
    } else if (kind == 6) {  // another token in its place
        text_splice(t, begin, end - begin, t->text + from, to - from);
    } else if (kind == 7) {  // what comes between two tokens, here again
        if (from < end) text_splice(t, end, 0, t->text + from, end - from);
    } else {  // up to another token, all is gone
        if (begin < to) text_splice(t, begin, min_size(to - begin, 200), NULL, 0);
    }
}

// A safetensors file: most often its header, whose length is then corrected most often.
static inline void mutate_safetensors(Text* t, Draws* d) {
    uint64_t n = 0;
    memcpy(&n, t->text, t->length < sizeof n ? 0 : sizeof n);
    if (t->length < sizeof n || n > t->length - sizeof n || one_in(d, 3)) {
        mutate_bytes(t, d);
        return;
    }
    Text header = {NULL, 0, 0};
    text_append(&header, t->text + sizeof n, (size_t)n);
    mutate_text(&header, d);
    text_splice(t, sizeof n, (size_t)n, header.text, header.length);
    n = header.length;
    if (!one_in(d, 16)) memcpy(t->text, &n, sizeof n);
    free(header.text);
}

// One of the seeds, with one to about eight mutations.
static inline Case case_mutated(const Seeds* seeds, Draws* d) {
    Case c = case_copy(&seeds->cases[draw_below(d, (size_t)seeds->count)]);
    do {
        CaseFile* f = &c.file[draw_below(d, (size_t)c.count)];
        if (!strstr(f->name, ".json")) f = &c.file[draw_below(d, (size_t)c.count)];  // settings decide more
        if (c.count > 1 && one_in(d, 40)) {
            free(f->bytes.text);
            *f = c.file[--c.count];
        } else if (strstr(f->name, ".safetensors")) mutate_safetensors(&f->bytes, d);
        else if (strstr(f->name, ".bin")) mutate_bytes(&f->bytes, d);
        else mutate_text(&f->bytes, d);
        if (f->bytes.length > CASE_LARGEST)
            text_splice(&f->bytes, CASE_LARGEST, f->bytes.length - CASE_LARGEST, NULL, 0);
    } while (!one_in(d, 2));
    return c;
}

#endif
