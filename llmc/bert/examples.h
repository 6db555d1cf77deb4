/* Examples of a task: sequences of tokens, [CLS] A [SEP] or [CLS] A [SEP] B [SEP], with targets. They are held in
 * memory and become batches: for training in a seeded order of each epoch, for evaluation in their own order. */
#ifndef LLMC_BERT_EXAMPLES_H
#define LLMC_BERT_EXAMPLES_H

#include "llmc/bert/batch_mlm.h"
#include "llmc/text/room_words.h"

typedef struct {
    int count;
    size_t* begin;  // [count + 1] first token of each
    int* tokens;    // [begin[count]]
    int* second;    // [count] position where segment B begins; the length of the sequence if there is none
    int* label;     // [count, 2] class and 0, or first and last position
    int* group;     // [count] its group, ascending: a window's question; else its own number
    int targets;    // of an example: 1, its class; or 2, the first and the last position of the answer
    size_t capacity, token_capacity;
} Examples;

static inline void examples_open(Examples* e, int targets) {
    memset(e, 0, sizeof *e);
    e->targets = targets;
}

static inline void examples_close(Examples* e) {
    free(e->begin), free(e->tokens), free(e->second), free(e->label), free(e->group);
    memset(e, 0, sizeof *e);
}

static inline int examples_length(const Examples* e, int i) { return (int)(e->begin[i + 1] - e->begin[i]); }

// Append a sequence of n tokens whose second segment begins at position `second`.
static inline void examples_add(Examples* e, const int* tokens, int n, int second, int label0, int label1, int group) {
    size_t at = e->count ? e->begin[e->count] : 0;
    size_t need = (size_t)e->count + 2, before = e->capacity;  // one more for the end of the last example
    e->begin = (size_t*)array_reserve(e->begin, &e->capacity, need, sizeof(size_t));
    if (e->capacity > before) {
        e->second = (int*)xrealloc(e->second, e->capacity * sizeof(int));
        e->label = (int*)xrealloc(e->label, 2 * e->capacity * sizeof(int));
        e->group = (int*)xrealloc(e->group, e->capacity * sizeof(int));
    }
    e->tokens = (int*)array_reserve(e->tokens, &e->token_capacity, at + (size_t)n, sizeof(int));
    memcpy(e->tokens + at, tokens, (size_t)n * sizeof(int));
    e->begin[e->count] = at;
    e->second[e->count] = second;
    e->label[2 * e->count] = label0, e->label[2 * e->count + 1] = label1;
    e->group[e->count] = group;
    e->begin[++e->count] = at + (size_t)n;
}

// CRC-32 of all training data.
static inline uint32_t examples_fingerprint(const Examples* e) {
    size_t n = (size_t)e->count;
    uint32_t crc = crc32_of(0, e->tokens, e->count ? e->begin[n] * sizeof(int) : 0);
    crc = crc32_of(crc, e->second, n * sizeof(int));
    return crc32_of(crc, e->label, 2 * n * sizeof(int));
}

// ---------------------------------------------------------------------------------------------------------
// Batches. Targets take the place of masked tokens: a class at the first row of the sequence, or two positions.

static inline void examples_batch_add(MlmBatch* b, const Examples* e, int i) {
    const int *tokens = e->tokens + e->begin[i], length = examples_length(e, i), second = e->second[i];
    CHECK(b->masked + e->targets <= b->masked_room);
    mlm_batch_append(b, tokens, (uint32_t)second, 0);
    mlm_batch_append(b, tokens + second, (uint32_t)(length - second), 1);
    for (int k = 0; k < e->targets; k++) {
        b->masked_rows[b->masked] = b->cu_seqlens[b->count];
        b->targets[b->masked++] = e->label[2 * i + k];
    }
    mlm_batch_end(b, -1);
}

// Examples index .. index + B - 1, counted over all epochs. With `shuffle` every epoch has its own order.
static inline void examples_batch_read(MlmBatch* b, const Examples* e, uint64_t seed, int shuffle, uint64_t index,
                                       int B, int64_t first) {
    uint64_t n = (uint64_t)e->count;
    mlm_batch_begin(b, first);
    for (uint64_t i = index; i < index + (uint64_t)B; i++) {
        uint64_t at = shuffle ? rng_permute(i % n, n, rng_stream(seed, i / n, 0, SITE_SHUFFLE)) : i % n;
        examples_batch_add(b, e, (int)at);
    }
}

// The number of examples, from the first, that form whole groups: at most `most` (0: no limit), but at least one group.
static inline int examples_first(const Examples* e, uint64_t most) {
    if (most == 0 || most >= (uint64_t)e->count) return e->count;
    int n = (int)most;
    while (n > 0 && e->group[n] == e->group[n - 1]) n--;
    if (n == 0)
        while (n < e->count && e->group[n] == e->group[0]) n++;
    return n;
}

// Read the next examples for evaluation: at most B, from number *next on among the first `count`, whose groups belong
// to this rank. Returns how many there are, 0 after the last, and their numbers in number [B].
static inline int examples_batch_next(MlmBatch* b, int* number, const Examples* e, int* next, int count, int B,
                                      int rank, int ranks) {
    mlm_batch_begin(b, 0);
    for (; *next < count && b->count < B; ++*next) {
        if (e->group[*next] % ranks != rank) continue;
        number[b->count] = *next;
        examples_batch_add(b, e, *next);
    }
    return b->count;
}

// ---------------------------------------------------------------------------------------------------------
// Predictions: a file that is complete or absent

// End with USAGE if `path` is a file that does not begin with `start`, as this program's own do. An empty file may be
// replaced.
static inline void predictions_refuse_foreign(const char* flag, const char* path, const char* start) {
    char found[16];
    size_t wanted = min_size(strlen(start), sizeof found);
    int fd = open_file(path);
    ssize_t n = fd < 0 ? 0 : read(fd, found, wanted);
    if (fd >= 0) close(fd);
    if (n < 0 || memcmp(found, start, (size_t)n) != 0)
        die(USAGE, "%s %s: exists and is not a file of this flag; choose another name, or remove it", flag, path);
}

// End with USAGE if `path`, the file of `flag`, is the input file `input` (NULL: none), under whatever name.
static inline void predictions_refuse_input(const char* flag, const char* path, const char* input) {
    struct stat out, in;
    if (input && stat(path, &out) == 0 && stat(input, &in) == 0 && out.st_dev == in.st_dev && out.st_ino == in.st_ino)
        die(USAGE, "%s %s: is an input of this run; choose another name", flag, path);
}

// End with USAGE if the file of `flag` could not be written, or if it would replace a file that does not begin with
// `start`, such as an input or a model's file. Changes nothing on the disk.
static inline void predictions_check(const char* flag, const char* path, const char* start) {
    struct stat found;
    Path temporary = path_of("%s.tmp", path);
    int is_there = stat(path, &found) == 0, was_there = access(temporary.text, F_OK) == 0;
    if (is_there && !S_ISREG(found.st_mode)) die(USAGE, "%s %s: exists and is not a regular file", flag, path);
    predictions_refuse_foreign(flag, path, start);
    predictions_refuse_foreign(flag, temporary.text, start);
    int fd = is_there && access(path, W_OK) != 0
                 ? -1
                 : open(temporary.text, O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
    int error = errno;
    if (fd >= 0 && !was_there) unlink(temporary.text);
    if (fd < 0) die(USAGE, "%s %s: cannot be written: %s", flag, path, strerror(error));
    close(fd);
}

// End because of errno; nothing is left of the file.
static inline void predictions_fail(const char* temporary, const char* path) {
    int error = errno;
    unlink(temporary);
    die(FAILED, "%s: cannot be written: %s", path, strerror(error));
}

static inline void predictions_write(const char* path, const Text* t) {
    Path temporary = path_of("%s.tmp", path);
    if (write_file(temporary.text, t->text, t->length) != 0 || rename_into_place(temporary.text, path) != 0)
        predictions_fail(temporary.text, path);
}

// End with USAGE unless the texts of `flag` can be encoded for a model of V tokens.
static inline void examples_check_texts(const WordPiece* words, int V, const char* flag) {
    if (words->size == 0)
        die(USAGE,
            "%s: there is no vocab.txt or tokenizer.json to encode texts with; put the model's into its directory",
            flag);
    if (words->size > V)
        die(USAGE, "%s: the vocabulary has %d tokens, but the model %d; put the model's own into its directory", flag,
            words->size, V);
}

#endif
