/* Multiple-choice sets, as llm.c writes them: a context, some endings of it, and which of them is the right one.
 *
 *   256 x int32   header: [0] magic 20240522, [1] version 1, [2] number of examples, [3] bytes of the longest, zeros
 *   an example    uint16, little-endian: 65535, its bytes, its number from 0, the label (number of the right ending), the
 *                 number of endings, then the length and the tokens of the context, and the same of each ending
 *
 * An example that has 65,536 bytes or more, and one whose number is so large, has the low 16 bits of either there: lengths
 * tell where an example ends. (llm.c itself finds its way by the bytes, and takes four endings and fewer examples.)
 * An example with one ending is a cloze: it asks for that ending, as LAMBADA for the last word of a text.
 *
 * The file is checked as a whole and kept in memory. */
#ifndef LLMC_CHOICES_H
#define LLMC_CHOICES_H

#include "shards.h"

enum { CHOICES_VERSION = 1, CHOICES_BEGIN = 65535 };
#define CHOICES_MAX_FILE ((size_t)1 << 31)

typedef struct {
    char* file;
    int count;
    int is_cloze;     // every example is
    uint16_t* words;  // all examples
    size_t* first;    // [count] the word of each with its label
    int longest;      // tokens of a context and one of its endings together, and of an ending
    int longest_ending;
    uint32_t crc;  // of all examples
} Choices;

// Tokens of a context or an ending.
typedef struct {
    const uint16_t* tokens;
    int length;
} ChoicesText;

typedef struct {
    int label, endings;
    ChoicesText context;
} ChoicesExample;

// The context or ending that begins at its length.
static inline ChoicesText choices_text_at(const uint16_t* word) {
    ChoicesText text = {word + 1, *word};
    return text;
}

static inline ChoicesExample choices_example(const Choices* c, int i) {
    const uint16_t* word = c->words + c->first[i];
    ChoicesExample e = {word[0], word[1], choices_text_at(word + 2)};
    return e;
}

// The text after another one: the first ending after the context, and so on.
static inline ChoicesText choices_next(ChoicesText text) { return choices_text_at(text.tokens + text.length); }

// Check example i, whose words begin at `at` of n, and return where the next one begins.
static inline size_t choices_check(Choices* c, int i, size_t at, size_t n, int V) {
    enum { BYTES = 1, NUMBER, LABEL, ENDINGS, CONTEXT };
    const uint16_t* w = c->words + at;
    size_t left = n - at, used = CONTEXT;
    if (left <= CONTEXT) die(USAGE, "%s: ends inside example %d of %d; the file is truncated", c->file, i, c->count);
    if (w[0] != CHOICES_BEGIN || w[NUMBER] != (i & 65535))
        die(USAGE, "%s: example %d begins with %d and has the number %d, not with %d and %d; the file is damaged",
            c->file, i, w[0], w[NUMBER], (int)CHOICES_BEGIN, i & 65535);
    if (w[LABEL] >= w[ENDINGS])
        die(USAGE, "%s: example %d: its label is %d, but it has %d endings, from 0 on; the file is damaged", c->file, i,
            w[LABEL], w[ENDINGS]);
    c->first[i] = at + LABEL;
    c->is_cloze = c->is_cloze && w[ENDINGS] == 1;
    for (int text = 0; text <= w[ENDINGS]; text++) {
        size_t length = used < left ? w[used] : 0;
        if (used >= left || length > left - used - 1)
            die(USAGE, "%s: ends inside example %d of %d; the file is truncated", c->file, i, c->count);
        if (length == 0)
            die(USAGE, "%s: example %d: %s has no tokens; the file is damaged", c->file, i,
                text ? "an ending" : "its context");
        for (size_t k = 0; k < length; k++)
            if (w[used + 1 + k] >= V)
                die(USAGE,
                    "%s: example %d: token %d is outside the vocabulary of %d; prepare the data with the model's own "
                    "tokenizer",
                    c->file, i, w[used + 1 + k], V);
        if (text) c->longest = max_int(c->longest, (int)(w[CONTEXT] + length));
        if (text) c->longest_ending = max_int(c->longest_ending, (int)length);
        used += 1 + length;
    }
    if (w[BYTES] != (2 * used & 65535))
        die(USAGE, "%s: example %d: it says that it has %d bytes, but its texts take %zu; the file is damaged", c->file,
            i, w[BYTES], 2 * used);
    return at + used;
}

// Read a set of tokens below V. Ends with USAGE where it is not sound.
static inline void choices_open(Choices* c, const char* path, int V) {
    int32_t header[4];
    size_t size, at = 0;
    char* bytes = read_file(path, CHOICES_MAX_FILE, &size, USAGE);
    memset(c, 0, sizeof *c);
    c->file = xprintf("%s", path);
    if (size < SHARD_HEADER_BYTES)
        die(USAGE, "%s: %zu bytes are too few for the header of %d bytes; it is truncated or no multiple-choice set",
            path, size, (int)SHARD_HEADER_BYTES);
    memcpy(header, bytes, sizeof header);
    if (header[0] != SHARD_MAGIC_EVALUATION)
        die(USAGE,
            "%s: is no multiple-choice set: its magic number is %d where %d is expected; make one with "
            "dev/data/hellaswag.py",
            path, (int)header[0], (int)SHARD_MAGIC_EVALUATION);
    if (header[1] != CHOICES_VERSION)
        die(USAGE, "%s: multiple-choice set of version %d, but version %d is understood", path, (int)header[1],
            (int)CHOICES_VERSION);
    size_t n = (size - SHARD_HEADER_BYTES) / sizeof *c->words;
    c->count = (int)header[2];
    // An example takes nine words at least: what the header says needs no more memory than the file gives reason for.
    if (c->count < 1 || (size_t)c->count > n / 9)
        die(USAGE, "%s: its header promises %d examples, but %zu bytes follow it; the file is truncated or damaged",
            path, c->count, size - SHARD_HEADER_BYTES);
    c->words = (uint16_t*)xmalloc(n * sizeof *c->words);
    memcpy(c->words, bytes + SHARD_HEADER_BYTES, n * sizeof *c->words);
    free(bytes);
    Crc32 crc;
    crc32_init(&crc);
    c->crc = crc32_update(&crc, 0, c->words, n * sizeof *c->words);
    c->first = (size_t*)xmalloc((size_t)c->count * sizeof *c->first);
    c->is_cloze = 1;
    for (int i = 0; i < c->count; i++) at = choices_check(c, i, at, n, V);
    if (SHARD_HEADER_BYTES + at * sizeof *c->words != size)
        die(USAGE, "%s: %zu bytes follow its last example; the file is damaged", path,
            size - SHARD_HEADER_BYTES - at * sizeof *c->words);
}

// What the set is called in logs: its file's name up to the first character that is no letter or digit.
static inline void choices_name(const Choices* c, char name[32]) {
    const char* slash = strrchr(c->file, '/');
    const char* base = slash ? slash + 1 : c->file;
    size_t n = strspn(base, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789");
    snprintf(name, 32, "%.*s", (int)(n ? min_size(n, 31) : 7), n ? base : "choices");
}

static inline void choices_close(Choices* c) {
    free(c->file), free(c->words), free(c->first);
    memset(c, 0, sizeof *c);
}

#endif
