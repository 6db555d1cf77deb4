/* Inputs of the fuzzer, the stream of draws, and how bytes and lines are mutated. */
#ifndef FUZZ_INPUT_H
#define FUZZ_INPUT_H

#include "llmc/base/json.h"
#include "llmc/base/rng.h"

enum { CASE_FILES = 24, CASE_NAME = 96, CASE_LARGEST = 1 << 18, SPANS = 512 };

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
    size_t capacity;
    Case* cases;
} CaseList;

typedef struct {
    uint64_t key;
    uint32_t used;
    Philox bits;
} Draws;

// ---------------------------------------------------------------------------------------------------------
// Draws

static inline uint32_t draw(Draws* d) {
    if (d->used % 4 == 0) d->bits = philox(d->used / 4, 0, 0, 0, d->key);
    return d->bits.v[d->used++ % 4];
}

// 0 .. n - 1; 0 for n = 0.
static inline size_t draw_below(Draws* d, size_t n) { return n ? draw(d) % n : 0; }

static inline int one_in(Draws* d, size_t n) { return draw_below(d, n) == 0; }

// A few more often than many: 1 .. most.
static inline size_t draw_length(Draws* d, size_t most) {
    size_t n = most ? 1 + draw_below(d, most) : 0;
    return one_in(d, 4) ? n : n ? 1 + draw_below(d, min_size(n, 16)) : 0;
}

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

static inline CaseFile* case_find(const Case* c, const char* name) {
    for (int i = 0; i < c->count; i++)
        if (strcmp(c->file[i].name, name) == 0) return (CaseFile*)&c->file[i];
    return NULL;
}

static inline void case_add(Case* c, const char* name, const char* bytes, size_t n) {
    CHECK(c->count < CASE_FILES && strlen(name) < CASE_NAME);
    CaseFile* f = &c->file[c->count++];
    memset(f, 0, sizeof *f);
    snprintf(f->name, CASE_NAME, "%s", name);
    text_append(&f->bytes, bytes ? bytes : "", n);
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

// A new, empty one at the end of the list; others of the list move.
static inline Case* case_new(CaseList* list) {
    list->cases = (Case*)array_reserve(list->cases, &list->capacity, (size_t)list->count + 1, sizeof(Case));
    list->cases[list->count].count = 0;
    return &list->cases[list->count++];
}

static inline void case_list_free(CaseList* list) {
    for (int i = 0; i < list->count; i++) case_free(&list->cases[i]);
    free(list->cases);
    memset(list, 0, sizeof *list);
}

// ---------------------------------------------------------------------------------------------------------
// Bytes

// Half of the time where headers are, else often where tables are that follow what they are about.
static inline size_t draw_place(Draws* d, size_t n) {
    size_t least = one_in(d, 2) ? 0 : n > 256 && one_in(d, 2) ? n - 256 : 0, most = least == 0 && one_in(d, 2) ? 64 : n;
    return n ? least + draw_below(d, min_size(n - least, most)) : 0;
}

// An integer of 1, 2, 4 or 8 bytes becomes one of the borders of its range or of the file's size, or that which is
// before it, or moves a little.
static inline void mutate_integer(Text* t, Draws* d) {
    size_t width = (size_t)1 << draw_below(d, 4), at = draw_place(d, t->length);
    if (t->length < width) return;
    if (one_in(d, 2)) at = at / width * width;
    at = min_size(at, t->length - width);
    uint64_t x = 0, borders[] = {0,
                                 1,
                                 UINT64_MAX,
                                 UINT64_MAX >> 1,
                                 (UINT64_MAX >> 1) + 1,
                                 (uint64_t)1 << (8 * width - 1),
                                 ((uint64_t)1 << (8 * width - 1)) - 1,
                                 (uint64_t)1 << 32,
                                 t->length,
                                 t->length + 1,
                                 t->length / 2,
                                 256};
    int is_copy = at >= width && one_in(d, 8);
    memcpy(&x, t->text + at - (is_copy ? width : 0), width);
    if (is_copy) x += draw_below(d, 2);
    else if (one_in(d, 2)) x = borders[draw_below(d, COUNT_OF(borders))];
    else x += (uint64_t)draw_below(d, 71) - 35;
    memcpy(t->text + at, &x, width);
}

static inline void mutate_bytes(Text* t, Draws* d, const Text* other) {
    size_t n = t->length, at = draw_place(d, n), some = draw_length(d, n - at);
    char byte = (char)draw(d);
    switch (draw_below(d, 10)) {
    case 0:
        if (n) t->text[at] = (char)(t->text[at] ^ 1 << draw_below(d, 8));
        break;
    case 1:
        if (n) t->text[at] = byte;
        break;
    case 2:
    case 3:
        mutate_integer(t, d);
        break;
    case 4:  // truncated, perhaps inside a character
        while (byte & 1 && at + 1 < n && !(t->text[at] & 0x80)) at++;
        at += (byte & 1) && at < n;
        text_splice(t, at, n - at, NULL, 0);
        break;
    case 5:  // twice
        text_splice(t, at, 0, t->text + at, some);
        break;
    case 6:  // gone
        text_splice(t, at, some, NULL, 0);
        break;
    case 7:  // one more
        text_splice(t, at, 0, &byte, 1);
        break;
    case 8: {  // a piece of another
        size_t from = draw_place(d, other->length), m = draw_length(d, other->length - from);
        text_splice(t, at, one_in(d, 2) ? min_size(m, n - at) : 0, other->text + from, m);
        break;
    }
    default:  // begins as this, ends as another
        if (one_in(d, 4)) text_splice(t, at, n - at, other->text, other->length);
        else if (at < other->length) text_splice(t, at, n - at, other->text + at, other->length - at);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Lines

// The line that begins at or before `at`: its start, and in *end the start of the next one.
static inline size_t line_at(const Text* t, size_t at, size_t* end) {
    size_t start = at;
    while (start > 0 && t->text[start - 1] != '\n') start--;
    const char* newline = start < t->length ? (const char*)memchr(t->text + start, '\n', t->length - start) : NULL;
    *end = newline ? (size_t)(newline - t->text) + 1 : t->length;
    return start;
}

// What numbers and names may turn into where they are text.
static inline const char* odd_word(Draws* d) {
    // clang-format off
    static const char* const words[] = {
        "0", "-1", "1", "2147483647", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808",
        "1e400", "nan", "-0", "0.5", "1e-400", "0x10", "", " 7", "7 ", "=", "-", "--", "+3",
        "00000000000000000000000001", "\xff\xfe", "%s%n%d", "[UNK]", "##", "1,2", "65536", "host:65536", "[::1]:0",
        "node[1",
    };
    // clang-format on
    return words[draw_below(d, COUNT_OF(words))];
}

static inline void mutate_lines(Text* t, Draws* d, const Text* other) {
    size_t end, start = line_at(t, t->length ? draw_below(d, t->length) : 0, &end), n = end - start, from_end;
    size_t from = line_at(other, other->length ? draw_below(d, other->length) : 0, &from_end);
    switch (draw_below(d, 9)) {
    case 0:
        text_splice(t, start, 0, t->text + start, n);
        break;
    case 1:
        text_splice(t, start, n, NULL, 0);
        break;
    case 2:
    case 3:
        text_splice(t, start, one_in(d, 2) ? n : 0, other->text + from, from_end - from);
        break;
    case 4:  // joined with the next one
        if (n && t->text[end - 1] == '\n') text_splice(t, end - 1, 1, "\r ", draw_below(d, 3));
        break;
    case 5: {  // very long
        static const size_t lengths[] = {101, 255, 256, 4095, 5000, 70000};
        size_t m = lengths[draw_below(d, COUNT_OF(lengths))];
        char* many = (char*)xmalloc(m);
        memset(many, n ? t->text[start] : 'x', m);
        text_splice(t, start, 0, many, m);
        free(many);
        break;
    }
    case 6:
    case 7: {  // another value behind the last "=", or the whole line
        const char* word = odd_word(d);
        size_t keep = 0, line = n - (n && t->text[end - 1] == '\n');
        for (size_t i = 0; i < line; i++)
            if (t->text[start + i] == '=') keep = i + 1;
        text_splice(t, start + keep, line - keep, word, strlen(word));
        break;
    }
    default:
        mutate_bytes(t, d, other);
    }
}

#endif
