/* UTF-8: one decoder and one encoder.
 *
 * Valid means what RFC 3629 says: no overlong forms, no surrogates, nothing above U+10FFFF. */
#ifndef LLMC_BASE_UTF8_H
#define LLMC_BASE_UTF8_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// The bytes of the byte order mark that a text begins with: 3, or 0 without one.
static inline size_t utf8_mark(const char* s, size_t n) { return n >= 3 && memcmp(s, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0; }

// Decode the character at `s`, of which n >= 1 bytes are readable; *length becomes its bytes (1 to 4). Returns -1 if no
// valid character begins here. *length is then the number of bytes that one U+FFFD replaces, as in Python's
// decode(errors="replace"): a truncated character, or one other byte.
static inline int32_t utf8_decode(const char* s, size_t n, size_t* length) {
    const unsigned char* p = (const unsigned char*)s;
    *length = 1;
    if (p[0] < 0x80) return p[0];
    if (p[0] < 0xC2 || p[0] > 0xF4) return -1;
    size_t need = p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4, i = 1;
    int32_t c = p[0] & (0x7F >> need);
    // The range of the second byte excludes overlong forms, surrogates and what is above U+10FFFF.
    int low = 0x80, high = 0xBF;
    if (p[0] == 0xE0) low = 0xA0;
    if (p[0] == 0xED) high = 0x9F;
    if (p[0] == 0xF0) low = 0x90;
    if (p[0] == 0xF4) high = 0x8F;
    for (; i < need && i < n && p[i] >= low && p[i] <= high; i++) {
        c = c << 6 | (p[i] & 0x3F);
        low = 0x80, high = 0xBF;
    }
    *length = i;
    return i == need ? c : -1;
}

// Bytes of the valid character at `s` (1 to 4), 0 if there is none. n >= 1 bytes are readable.
static inline size_t utf8_length(const char* s, size_t n) {
    size_t length;
    return utf8_decode(s, n, &length) < 0 ? 0 : length;
}

// Encode character c, which is at most U+10FFFF. Returns the number of bytes.
static inline size_t utf8_encode(char out[4], uint32_t c) {
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = n; i-- > 1; c >>= 6) out[i] = (char)(0x80 | (c & 0x3F));
    out[0] = (char)(n == 1 ? c : (0xF00u >> n & 0xFF) | c);
    return n;
}

#endif
