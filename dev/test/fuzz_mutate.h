/* How the fuzzer changes a file: a binary one byte by byte, most often in its place, so that its length stays the one
 * that its header gives; a text token by token. Every draw comes from one stream, so that an input is a function of
 * (seed, reader, number). */
#ifndef FUZZ_MUTATE_H
#define FUZZ_MUTATE_H

#include "llmc/base/rng.h"
#include "llmc/base/util.h"

typedef struct {
    uint64_t key;
    uint32_t used;
} Draws;

// 0 .. n - 1; 0 for n = 0.
static inline size_t draw(Draws* d, size_t n) { return n ? philox(d->used++, 0, 0, 0, d->key).v[0] % n : 0; }

// Bytes [at, at + gone) give way to `n` others, which may be part of the same text.
static inline void text_splice(Text* t, size_t at, size_t gone, const char* bytes, size_t n) {
    Text result = {NULL, 0, 0};
    text_append(&result, t->text, at);
    text_append(&result, bytes, n);
    text_append(&result, t->text + at + gone, t->length - at - gone);
    free(t->text);
    *t = result;
}

// A byte, an integer of 1 to 8 bytes, or a piece; half of the time where headers are.
static inline void mutate_bytes(Text* t, Draws* d) {
    size_t at = draw(d, draw(d, 2) ? t->length : min_size(t->length, 64)), some = draw(d, min_size(t->length - at, 40));
    size_t width = (size_t)1 << draw(d, 4), kind = draw(d, 8);
    char byte = (char)draw(d, 256);
    uint64_t x = 0, half = (uint64_t)1 << (8 * width - 1);
    const uint64_t borders[] = {0, 1, UINT64_MAX, half, half - 1, (uint64_t)1 << 32, t->length, t->length + 1, 256};
    if (t->length == 0) return;
    if (kind == 0) t->text[at] = (char)(t->text[at] ^ 1 << draw(d, 8));
    else if (kind == 1) t->text[at] = byte;
    else if (kind == 2) text_splice(t, at, t->length - at, "", 0);
    else if (kind == 3) text_splice(t, at, 0, t->text + at, some);
    else if (kind == 4) text_splice(t, at, some, &byte, draw(d, 2));
    else if ((at = at / width * width) + width <= t->length) {
        memcpy(&x, t->text + at, width);
        x = draw(d, 2) ? borders[draw(d, COUNT_OF(borders))] : x + (uint64_t)draw(d, 71) - 35;
        memcpy(t->text + at, &x, width);
    }
}

// A word that a reader may not expect in the place of another: one of these, or one as deep or long as may be and more.
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
    size_t k = draw(d, COUNT_OF(words) + 2), is_deep = k == COUNT_OF(words), n = 50 + draw(d, is_deep ? 30 : 5000);
    text_append(&word, "", 0);
    if (k < COUNT_OF(words)) text_append(&word, words[k], strlen(words[k]));
    for (size_t i = 0; k >= COUNT_OF(words) && i < n; i++) text_append(&word, is_deep ? "[" : "y", 1);
    for (size_t i = 0; is_deep && i < n; i++) text_append(&word, "]", 1);
    return word;
}

// The token around a byte: [begin, returned).
static inline size_t token_at(const Text* t, size_t at, size_t* begin) {
    static const char delimiters[] = " \n\r\t,:{}[]=";
    size_t end = at;
    while (at > 0 && !strchr(delimiters, t->text[at - 1])) at--;
    while (end < t->length && !strchr(delimiters, t->text[end])) end++;
    *begin = at;
    return end;
}

static inline void mutate_text(Text* t, Draws* d) {
    size_t begin, from, end = token_at(t, draw(d, t->length), &begin), kind = draw(d, 8);
    size_t to = token_at(t, draw(d, t->length), &from), next = min_size(end + 1, t->length);
    Text word = odd_word(d);
    char number[32], *rest;
    if (t->length == 0 || kind == 0) {
        mutate_bytes(t, d);
    } else if (kind < 4) {
        text_splice(t, begin, end - begin, word.text, word.length);
    } else if (kind == 4) {  // another number nearby
        uint64_t value = (uint64_t)strtoll(t->text + begin, &rest, 10) + draw(d, 9) - 4;
        int digits = snprintf(number, sizeof number, "%lld", (long long)value);
        if (rest != t->text + begin) text_splice(t, begin, (size_t)(rest - t->text) - begin, number, (size_t)digits);
    } else if (kind == 5) {
        text_splice(t, begin, next - begin, "", 0);
    } else if (kind == 6) {  // another token in its place
        text_splice(t, begin, end - begin, t->text + from, to - from);
    } else if (from < end) {  // what comes between two tokens, here again
        text_splice(t, end, 0, t->text + from, end - from);
    }
    free(word.text);
}

// A safetensors file: most often its header, whose length is then corrected most often.
static inline void mutate_safetensors(Text* t, Draws* d) {
    uint64_t n = 0;
    memcpy(&n, t->text, t->length < sizeof n ? 0 : sizeof n);
    if (t->length < sizeof n || n > t->length - sizeof n || draw(d, 3) == 0) {
        mutate_bytes(t, d);
        return;
    }
    Text header = {NULL, 0, 0};
    text_append(&header, t->text + sizeof n, (size_t)n);
    mutate_text(&header, d);
    text_splice(t, sizeof n, (size_t)n, header.text, header.length);
    n = header.length;
    if (draw(d, 16)) memcpy(t->text, &n, sizeof n);
    free(header.text);
}

#endif
