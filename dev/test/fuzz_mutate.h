/* Inputs of the fuzzer and how they are spoiled.
 *
 * An input is a few files with names. Each mutation draws one of them and damages it as its kind suggests: bytes
 * anywhere, JSON value by value, text line by line, a safetensors file in its header. Splices take pieces of another
 * input. Every draw comes from one stream, so that the input is a function of (seed, reader, number). */
#ifndef FUZZ_MUTATE_H
#define FUZZ_MUTATE_H

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
    int count, capacity;
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
    if (list->count == list->capacity) {
        list->capacity = 2 * list->capacity + 16;
        list->cases = (Case*)xrealloc(list->cases, (size_t)list->capacity * sizeof(Case));
    }
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

// ---------------------------------------------------------------------------------------------------------
// JSON

typedef struct {
    size_t begin, end;  // of a value
    size_t member;      // where its key begins; `begin` without one
} JsonSpan;

// The end of the string or word that begins at `i`.
static inline size_t json_token_end(const char* text, size_t n, size_t i) {
    if (text[i] != '"') {
        while (i < n && !strchr(" \n\r\t,:{}[]\"", text[i])) i++;
        return i;
    }
    for (i++; i < n && text[i] != '"'; i++) i += text[i] == '\\';
    return min_size(n, i + 1);
}

// The values of a text that is JSON or was once. Returns how many of them are in `spans` [SPANS].
static inline int json_spans(JsonSpan* spans, const char* text, size_t n) {
    int open[JSON_MAX_DEPTH * 2], depth = 0, count = 0;
    size_t key = SIZE_MAX;
    for (size_t i = 0; i < n && count < SPANS;) {
        char c = text[i];
        if (c == '}' || c == ']') {
            if (depth > 0) spans[open[--depth]].end = i + 1;
            i++;
        } else if (c == '{' || c == '[') {
            if (depth == (int)COUNT_OF(open)) break;
            spans[count].begin = i, spans[count].end = n, spans[count].member = key == SIZE_MAX ? i : key;
            open[depth++] = count++;
            key = SIZE_MAX, i++;
        } else if (strchr(" \n\r\t,:", c)) {  // a NUL byte too
            i++;
        } else {
            size_t end = json_token_end(text, n, i), after = end + strspn(end < n ? text + end : "", " \n\r\t");
            if (c == '"' && after < n && text[after] == ':' && key == SIZE_MAX) {
                key = i;
            } else {
                spans[count].begin = i, spans[count].end = end, spans[count].member = key == SIZE_MAX ? i : key;
                count++, key = SIZE_MAX;
            }
            i = end > i ? end : i + 1;
        }
    }
    return count;
}

// Whether a value is a number, or a string that begins as one: then *s becomes what is in its quotes.
static inline int json_is_number(const Text* t, JsonSpan* s) {
    int is_quoted = s->begin < t->length && t->text[s->begin] == '"' && s->end - s->begin > 2;
    char first = s->begin + (size_t)is_quoted < t->length ? t->text[s->begin + (size_t)is_quoted] : 'x';
    if (first != '-' && (first < '0' || first > '9')) return 0;
    s->begin += (size_t)is_quoted, s->end -= (size_t)is_quoted;
    return 1;
}

// A value that a reader may not expect, as text.
static inline void odd_json(Text* out, Draws* d) {
    // clang-format off
    static const char* const values[] = {
        "null", "true", "false", "\"\"", "[]", "{}", "\"\\u0000\"", "\"a\\u0000b\"", "\"\\ud83d\\ude00\"",
        "\"\\ud800\"", "\"\\ud83d\\u0041\"", "\"\\n\\t\\u001b[31m\"", "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"",
        "\"\xff\"", "\"\xc4\xa0\"", "NaN", "-Infinity", "[[[[[[[[]]]]]]]]", "{\"a\": {\"a\": [1, 2, {\"a\": null}]}}",
        "[0, 0]", "[-1, 18446744073709551616]", "\"F32\"", "\"-1\"", "\"nan\"", "\"%s%n\"",
    };
    // clang-format on
    size_t k = draw_below(d, COUNT_OF(values) + 2);
    if (k < COUNT_OF(values)) {
        text_append(out, values[k], strlen(values[k]));
        return;
    }
    if (k == COUNT_OF(values)) {  // as deep as the reader goes, and deeper
        size_t depth = 50 + draw_below(d, 30);
        int is_object = one_in(d, 2);
        for (size_t i = 0; i < depth; i++) text_printf(out, "%s", is_object ? "{\"a\":" : "[");
        text_printf(out, "1");
        for (size_t i = 0; i < depth; i++) text_printf(out, "%s", is_object ? "}" : "]");
        return;
    }
    text_printf(out, "\"");
    for (size_t n = draw_below(d, 5000); n > 0; n--) text_printf(out, "y");
    text_printf(out, "\"");
}

static inline const char* odd_number(Draws* d) {
    // clang-format off
    static const char* const numbers[] = {
        "0", "-0", "-1", "1", "2", "3", "1e308", "1e400", "-1e400", "1e-400", "9223372036854775807",
        "9223372036854775808", "-9223372036854775808", "-9223372036854775809", "18446744073709551615",
        "18446744073709551616", "4611686018427387904", "2147483647", "2147483648", "-2147483648", "4294967295",
        "4294967296", "16777216", "1048576", "65536", "0.5", "1.0", "1E+2", "00", "1.", ".5", "-", "1e", "0x10",
        "NaN", "123456789012345678901234567890", "0.1000000000000000055511151231257827021181583404541015625",
    };
    // clang-format on
    return numbers[draw_below(d, COUNT_OF(numbers))];
}

static inline void mutate_number(Text* t, JsonSpan s, Draws* d) {
    char moved[32];
    const char* word = odd_number(d);
    if (one_in(d, 2)) {
        long long x = strtoll(t->text + s.begin, NULL, 10), step = (long long)draw_below(d, 9) - 4;
        snprintf(moved, sizeof moved, "%lld", x < (1ll << 60) && x > -(1ll << 60) ? x + step : x);
        word = moved;
    }
    text_splice(t, s.begin, s.end - s.begin, word, strlen(word));
}

// Take a member or an element away, with a comma.
static inline void json_remove(Text* t, JsonSpan s) {
    size_t begin = s.member, end = s.end;
    while (end < t->length && strchr(" \n", t->text[end])) end++;
    if (end < t->length && t->text[end] == ',') {
        end++;
    } else {
        end = s.end;
        while (begin > 0 && strchr(" \n", t->text[begin - 1])) begin--;
        if (begin > 0 && t->text[begin - 1] == ',') begin--;
    }
    text_splice(t, begin, end - begin, NULL, 0);
}

static inline void mutate_json(Text* t, Draws* d, const Text* other) {
    JsonSpan spans[SPANS], theirs[SPANS];
    int count = t->text ? json_spans(spans, t->text, t->length) : 0;
    int their_count = other->text ? json_spans(theirs, other->text, other->length) : 0;
    if (count == 0 || one_in(d, 8)) {
        mutate_bytes(t, d, other);
        return;
    }
    JsonSpan s = spans[draw_below(d, (size_t)count)], r = spans[draw_below(d, (size_t)count)];
    size_t kind = draw_below(d, 10);
    for (int tries = 0; kind < 4 && tries < 16; tries++) {
        JsonSpan number = s;
        if (json_is_number(t, &number)) {
            mutate_number(t, number, d);
            return;
        }
        s = spans[draw_below(d, (size_t)count)];
    }
    if (kind == 4) {
        Text odd = {NULL, 0, 0};
        odd_json(&odd, d);
        text_splice(t, s.begin, s.end - s.begin, odd.text, odd.length);
        free(odd.text);
    } else if (kind == 5) {  // again, or where another one is; most often under another key
        Text again = {NULL, 0, 0};
        size_t times = one_in(d, 3) ? 1 + draw_below(d, 20) : 1, where = one_in(d, 2) ? s.member : r.member;
        for (size_t i = 0; i < times; i++) {
            size_t from = s.member;
            if (t->text[from] == '"' && s.member < s.begin && !one_in(d, 4)) {
                text_printf(&again, "\"%zu", i);
                from++;
            }
            text_append(&again, t->text + from, s.end - from);
            text_append(&again, ", ", 2);
        }
        text_splice(t, where, 0, again.text, again.length);
        free(again.text);
    } else if (kind == 6) {
        json_remove(t, s);
    } else if (kind == 7) {  // in the place of another one
        text_splice(t, r.begin, r.end - r.begin, t->text + s.begin, s.end - s.begin);
    } else if (kind == 8 && t->text[s.begin] == '"') {  // inside a string
        static const char* const bits[] = {"\\u0000",        "\\n", "\\",   "\xe2\x82", "\\ud800\\udc00",
                                           "\\ud800\\ue000", "/",   "\x01", "\xc4\xa0"};
        const char* bit = bits[draw_below(d, COUNT_OF(bits))];
        text_splice(t, s.begin + 1 + draw_below(d, s.end - s.begin - 1), 0, bit, strlen(bit));
    } else if (their_count > 0) {
        JsonSpan from = theirs[draw_below(d, (size_t)their_count)];
        text_splice(t, s.begin, s.end - s.begin, other->text + from.begin, from.end - from.begin);
    }
}

// A safetensors file: most often its header, whose length is then put right most often.
static inline void mutate_safetensors(Text* t, Draws* d, const Text* other) {
    uint64_t n = 0, other_n = 0;
    memcpy(&n, t->text ? t->text : "", t->length < sizeof n ? 0 : sizeof n);
    memcpy(&other_n, other->text ? other->text : "", other->length < sizeof n ? 0 : sizeof n);
    if (t->length < sizeof n || n > t->length - sizeof n || one_in(d, 4)) {
        mutate_bytes(t, d, other);
        return;
    }
    Text header = {NULL, 0, 0}, their_header = {NULL, 0, 0};
    text_append(&header, t->text + sizeof n, (size_t)n);
    text_append(&their_header, other->text && other->length >= 8 ? other->text + sizeof n : "",
                other->length >= 8 && other_n <= other->length - 8 ? (size_t)other_n : 0);
    mutate_json(&header, d, &their_header);
    text_splice(t, sizeof n, (size_t)n, header.text, header.length);
    n = header.length;
    if (!one_in(d, 16)) memcpy(t->text, &n, sizeof n);
    free(header.text), free(their_header.text);
}

// ---------------------------------------------------------------------------------------------------------
// Whole inputs

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
