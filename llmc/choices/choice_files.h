/* Multiple-choice sets, as llm.c writes them: a context, several endings, and the number of the correct one.
 *
 *   256 x int32   header: [0] magic 20240522, [1] version 1 or 2, [2] number of examples, [3] bytes of the longest,
 *                 [4] accuracy of a guess in millionths, 0 if unknown (an addition of this project), zeros
 *   an example    uint16, little-endian: 65535, its bytes, its number from 0, the label (number of the correct ending),
 *                 the number of endings, then the length and the tokens of the context, and the same for each ending;
 *                 with version 2 (of this project) last the characters of each ending, which losses are divided by
 *
 * Fields for bytes and numbers of 65,536 or more hold the low 16 bits only; the lengths determine where an example
 * ends. (llm.c uses the bytes instead, and expects four endings and fewer examples.) An example with one ending is a
 * cloze: it asks for that ending, as LAMBADA asks for the last word of a text.
 *
 * The whole file is checked and kept in memory. */
#ifndef LLMC_CHOICES_CHOICE_FILES_H
#define LLMC_CHOICES_CHOICE_FILES_H

#include "llmc/data/shards.h"

enum {
    MULTIPLE_CHOICE_VERSION = 1,
    MULTIPLE_CHOICE_WITH_CHARACTERS = 2,
    MULTIPLE_CHOICE_BEGIN = 65535,
    MULTIPLE_CHOICE_CHANCE = 4
};
#define MULTIPLE_CHOICE_MAX_FILE ((size_t)1 << 31)

typedef struct {
    char* file;
    char key[48];  // of its score in log.jsonl
    int count;
    int is_cloze;        // every example is a cloze
    size_t* characters;  // [count] index of the first ending's number of characters; NULL: version 1
    double chance;       // accuracy of a guess; 0: unknown
    uint16_t* words;     // all examples
    size_t* first;       // [count] index of the word with the label of each example
    int longest;         // most tokens of a context and an ending together
    int longest_ending;  // most tokens of an ending
    uint32_t crc;        // of all examples
} MultipleChoice;

// Tokens of a context or an ending.
typedef struct {
    const uint16_t* tokens;
    int length;
} MultipleChoiceText;

typedef struct {
    int label, endings;
    MultipleChoiceText context;
    const uint16_t* characters;  // [endings], or NULL
} MultipleChoiceExample;

// The context or ending whose length is at `word`.
static inline MultipleChoiceText multiple_choice_text_at(const uint16_t* word) {
    MultipleChoiceText text = {.tokens = word + 1, .length = *word};
    return text;
}

static inline MultipleChoiceExample multiple_choice_example(const MultipleChoice* c, int i) {
    const uint16_t* word = c->words + c->first[i];
    MultipleChoiceExample e = {.label = word[0],
                               .endings = word[1],
                               .context = multiple_choice_text_at(word + 2),
                               .characters = c->characters ? c->words + c->characters[i] : NULL};
    return e;
}

// The next text: the first ending after the context, and so on.
static inline MultipleChoiceText multiple_choice_next(MultipleChoiceText text) {
    return multiple_choice_text_at(text.tokens + text.length);
}

// Check example i, whose words begin at `at` of n. Returns where the next one begins.
static inline size_t multiple_choice_check(MultipleChoice* c, int i, size_t at, size_t n, int V) {
    enum { BYTES = 1, NUMBER, LABEL, ENDINGS, CONTEXT };
    const uint16_t* w = c->words + at;
    size_t left = n - at, used = CONTEXT;
    if (left <= CONTEXT) die(USAGE, "%s: ends inside example %d of %d; the file is truncated", c->file, i, c->count);
    if (w[0] != MULTIPLE_CHOICE_BEGIN || w[NUMBER] != (i & 65535))
        die(USAGE, "%s: example %d begins with %d and has the number %d, not with %d and %d; the file is damaged",
            c->file, i, w[0], w[NUMBER], (int)MULTIPLE_CHOICE_BEGIN, i & 65535);
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
    if (c->characters) {
        c->characters[i] = at + used;
        if (left - used < w[ENDINGS])
            die(USAGE, "%s: ends inside example %d of %d; the file is truncated", c->file, i, c->count);
        for (size_t k = 0; k < w[ENDINGS]; k++)
            if (w[used + k] == 0)
                die(USAGE, "%s: example %d: an ending has no characters; the file is damaged", c->file, i);
        used += w[ENDINGS];
    }
    if (w[BYTES] != (2 * used & 65535))
        die(USAGE, "%s: example %d: its header gives %d bytes, but its texts take %zu; the file is damaged", c->file, i,
            w[BYTES], 2 * used);
    return at + used;
}

// Read a set of tokens below V. Ends with USAGE if it is invalid.
static inline void multiple_choice_open(MultipleChoice* c, const char* path, int V) {
    int32_t header[MULTIPLE_CHOICE_CHANCE + 1];
    size_t size, at = 0;
    char* bytes = read_file(path, MULTIPLE_CHOICE_MAX_FILE, &size, USAGE);
    memset(c, 0, sizeof *c);
    c->file = xprintf("%s", path);
    if (size < SHARD_HEADER_BYTES)
        die(USAGE, "%s: %zu bytes are too few for the header of %d bytes; it is truncated or not a multiple-choice set",
            path, size, (int)SHARD_HEADER_BYTES);
    memcpy(header, bytes, sizeof header);
    if (header[0] != SHARD_MAGIC_EVALUATION)
        die(USAGE,
            "%s: is not a multiple-choice set: its magic number is %d, not %d; make one with dev/data/hellaswag.py",
            path, (int)header[0], (int)SHARD_MAGIC_EVALUATION);
    if (header[1] != MULTIPLE_CHOICE_VERSION && header[1] != MULTIPLE_CHOICE_WITH_CHARACTERS)
        die(USAGE, "%s: multiple-choice set of version %d, but only versions %d and %d are supported", path,
            (int)header[1], (int)MULTIPLE_CHOICE_VERSION, (int)MULTIPLE_CHOICE_WITH_CHARACTERS);
    size_t n = (size - SHARD_HEADER_BYTES) / sizeof *c->words;
    c->count = (int)header[2];
    c->chance = header[MULTIPLE_CHOICE_CHANCE] / 1e6;
    // An example takes at least nine words, so a damaged header cannot make this allocate more than the file justifies.
    if (c->count < 1 || (size_t)c->count > n / 9)
        die(USAGE, "%s: its header gives %d examples, but %zu bytes follow it; the file is truncated or damaged", path,
            c->count, size - SHARD_HEADER_BYTES);
    c->words = (uint16_t*)xmalloc(n * sizeof *c->words);
    memcpy(c->words, bytes + SHARD_HEADER_BYTES, n * sizeof *c->words);
    free(bytes);
    c->crc = crc32_of(0, c->words, n * sizeof *c->words);
    c->first = (size_t*)xmalloc((size_t)c->count * sizeof *c->first);
    if (header[1] == MULTIPLE_CHOICE_WITH_CHARACTERS)
        c->characters = (size_t*)xmalloc((size_t)c->count * sizeof *c->characters);
    c->is_cloze = 1;
    for (int i = 0; i < c->count; i++) at = multiple_choice_check(c, i, at, n, V);
    if (SHARD_HEADER_BYTES + at * sizeof *c->words != size)
        die(USAGE, "%s: %zu bytes follow its last example; the file is damaged", path,
            size - SHARD_HEADER_BYTES - at * sizeof *c->words);
}

// The name of the set in logs: its file's name up to the first character that is not a letter or digit.
static inline void multiple_choice_name(const MultipleChoice* c, char name[32]) {
    const char* slash = strrchr(c->file, '/');
    const char* base = slash ? slash + 1 : c->file;
    size_t n = strspn(base, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789");
    snprintf(name, 32, "%.*s", (int)(n ? min_size(n, 31) : 7), n ? base : "choices");
}

static inline void multiple_choice_close(MultipleChoice* c) {
    free(c->file), free(c->words), free(c->first), free(c->characters);
    memset(c, 0, sizeof *c);
}

#endif
