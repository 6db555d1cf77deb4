/* How the fuzzer mutates JSON, value by value, and the header of a safetensors file. */
#ifndef FUZZ_JSON_H
#define FUZZ_JSON_H

#include "fuzz_input.h"

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

// A safetensors file: most often its header, whose length is then corrected most often.
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

#endif
