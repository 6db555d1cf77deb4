/* Writing JSON: numbers, strings and members of an object, appended to a Text. The reader is json.h. */
#ifndef LLMC_BASE_JSON_WRITE_H
#define LLMC_BASE_JSON_WRITE_H

#include "llmc/base/utf8.h"
#include "llmc/base/util.h"

// A string in quotes. Each byte that is not valid UTF-8 (in a model's sample, in a file name) becomes U+FFFD.
static inline void text_json_string(Text* t, const char* s, size_t n) {
    text_append(t, "\"", 1);
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)s[i];
        size_t bytes = utf8_length(s + i, n - i);
        if (bytes == 0) text_append(t, "\\ufffd", 6);
        else if (c == '"' || c == '\\') text_printf(t, "\\%c", c);
        else if (c == '\n') text_append(t, "\\n", 2);
        else if (c == '\t') text_append(t, "\\t", 2);
        else if (c < 0x20) text_printf(t, "\\u%04x", c);
        else text_append(t, s + i, bytes);
        i += bytes ? bytes : 1;
    }
    text_append(t, "\"", 1);
}

// The shortest digits that read back as the same double; whole numbers below 2^53 without a fraction.
static inline void format_number(char out[32], double x) {
    if (floor(x) == x && fabs(x) < 9007199254740992.0) {
        snprintf(out, 32, "%.0f", x);
        return;
    }
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(out, 32, "%.*g", digits, x);
        if (strtod(out, NULL) == x) return;
    }
}

// A number. JSON has no NaN and no infinity: both become null.
static inline void text_json_number(Text* t, double x) {
    char digits[32] = "null";
    if (isfinite(x)) format_number(digits, x);
    text_append(t, digits, strlen(digits));
}

// Members of an object. The caller writes `{` and `}`; these functions write the commas.
static inline void json_put_key(Text* t, const char* key) {
    if (t->length && t->text[t->length - 1] != '{') text_append(t, ", ", 2);
    text_json_string(t, key, strlen(key));
    text_append(t, ": ", 2);
}

static inline void json_put_number(Text* t, const char* key, double x) {
    json_put_key(t, key);
    text_json_number(t, x);
}

static inline void json_put_integer(Text* t, const char* key, int64_t x) {
    json_put_key(t, key);
    text_printf(t, "%lld", (long long)x);
}

static inline void json_put_bool(Text* t, const char* key, int truth) {
    json_put_key(t, key);
    text_printf(t, "%s", truth ? "true" : "false");
}

static inline void json_put_string(Text* t, const char* key, const char* s) {
    json_put_key(t, key);
    text_json_string(t, s, strlen(s));
}

#endif
