/* llm.c's list of tokens. All numbers are little-endian.
 *
 *   256 x uint32   header: [0] magic 20240328, [1] version 2, [2] count, [3] end of text
 *   count times    a length, one byte, and as many bytes: the token */
#ifndef LLMC_TEXT_LLMC_TOKENS_H
#define LLMC_TEXT_LLMC_TOKENS_H

#include "llmc/base/util.h"

enum {
    LLMC_TOKENS_HEADER = 1024,  // bytes
    LLMC_TOKENS_MAGIC = 20240328,
    LLMC_TOKENS_MOST = 1 << 24,
    LLMC_TOKENS_MAX_FILE = 1 << 28
};

typedef struct {
    int count;
    int end_of_text;  // id of the end-of-text token
    char* text;       // the whole file
    size_t* start;    // [count] where each token begins in `text`; the byte before is its length
} LlmcTokens;

static inline size_t llmc_token_length(const LlmcTokens* t, int id) { return (unsigned char)t->text[t->start[id] - 1]; }

// Ends with USAGE if the file is invalid.
static inline void llmc_tokens_read(LlmcTokens* t, const char* path) {
    uint32_t header[4];
    size_t size, at = LLMC_TOKENS_HEADER;
    t->text = read_file(path, LLMC_TOKENS_MAX_FILE, &size, USAGE);
    if (size < at)
        die(USAGE, "%s: %zu bytes are too few for the header of %zu bytes; it is truncated or not a list of tokens",
            path, size, at);
    memcpy(header, t->text, sizeof header);
    if (header[0] != LLMC_TOKENS_MAGIC)
        die(USAGE, "%s: is not a list of tokens of llm.c: its magic number is %u, not %d", path, header[0],
            (int)LLMC_TOKENS_MAGIC);
    if (header[1] != 2) die(USAGE, "%s: is a list of tokens of version %u; 2 is supported", path, header[1]);
    if (header[2] < 1 || header[2] > LLMC_TOKENS_MOST || header[3] >= header[2])
        die(USAGE, "%s: its header gives %u tokens, allowed: 1..%d, and token %u as the end of text", path, header[2],
            (int)LLMC_TOKENS_MOST, header[3]);
    t->count = (int)header[2], t->end_of_text = (int)header[3];
    // A token takes at least two bytes, so a damaged header cannot make this allocate more than the file justifies.
    if ((size - at) / 2 < (size_t)t->count)
        die(USAGE, "%s: its header gives %d tokens, but only %zu bytes follow it; the file is truncated", path,
            t->count, size - at);
    t->start = (size_t*)xmalloc((size_t)t->count * sizeof *t->start);
    for (int id = 0; id < t->count; id++) {
        size_t left = size - at, length = left ? (unsigned char)t->text[at] : 0;
        if (left == 0 || length >= left)
            die(USAGE, "%s: ends inside token %d of %d; the file is truncated", path, id, t->count);
        if (length == 0) die(USAGE, "%s: token %d is empty; the file is damaged", path, id);
        t->start[id] = at + 1;
        at += 1 + length;
    }
    if (at != size) die(USAGE, "%s: %zu bytes follow its last token; the file is damaged", path, size - at);
}

static inline void llmc_tokens_free(LlmcTokens* t) {
    free(t->text);
    free(t->start);
    memset(t, 0, sizeof *t);
}

#endif
