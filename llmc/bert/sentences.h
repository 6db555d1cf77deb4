/* Files of tokenized sentences and documents, from which pairs of sentences are drawn.
 *
 *   256 x int32       header: [0] magic 20261121, [1] version, [2] tokens, [3] sentences, [4] documents,
 *                     [5] vocabulary size V, ids of [6] [PAD], [7] [UNK], [8] [CLS], [9] [SEP], [10] [MASK],
 *                     [11], [12] low and high half of the vocabulary's hash, 0 if unknown: FNV-1a, 64 bits, of all
 *                     tokens in the order of ids, a newline after each; zeros
 *   tokens            uint16 (version 1) or uint32 (version 2); zero bytes up to a multiple of 4
 *   sentences + 1     uint32: where each sentence's tokens begin, then the number of tokens
 *   documents + 1     uint32: the first sentence of each document, then the number of sentences
 *   (V + 31) / 32     uint32: bit id % 32 of word id / 32 is set if the token continues a word ("##...")
 *
 * All numbers are little-endian; the counts are unsigned. No sentence and no document is empty, and none crosses from
 * one file to the next. A data set is a glob of such files with the same vocabulary. Tokens are read when they are
 * needed. The starts of the sentences are held in memory, 4 bytes per sentence. */
#ifndef LLMC_BERT_SENTENCES_H
#define LLMC_BERT_SENTENCES_H

#include "llmc/data/shards.h"

enum {
    SENTENCES_MAGIC = 20261121,
    SENTENCES_VERSION_UINT16 = 1,
    SENTENCES_VERSION_UINT32 = 2,
    SENTENCES_MAX_VOCABULARY = 1 << 28
};

// The fields of a file's header, in its order.
typedef struct {
    uint32_t tokens, sentences, documents;
    int V, pad, unk, cls, sep, mask;
    uint64_t hash;  // of the vocabulary; 0: unknown
} SentencesHeader;

typedef struct {
    uint64_t sentence;  // index of its first sentence in `begin`
    uint32_t sentences;
    uint32_t file;
} Document;

typedef struct {
    Shards files;
    SentencesHeader vocabulary;  // of the first file: V and ids
    uint64_t documents;          // in all files
    Document* document;          // [documents]
    uint32_t* begin;             // per file: where its sentences begin, then its end
    uint32_t* continues;         // bitmap over the vocabulary
} Sentences;

static inline uint64_t sentences_words(int V) { return ((uint64_t)V + 31) / 32; }

static inline uint64_t sentences_tokens_end(const Shard* file) {
    return SHARD_HEADER_BYTES + round_up(file->tokens * (uint64_t)file->width, 4);
}

static inline SentencesHeader sentences_header_from(const int32_t* h) {
    SentencesHeader r;
    r.tokens = (uint32_t)h[2], r.sentences = (uint32_t)h[3], r.documents = (uint32_t)h[4];
    r.V = h[5], r.pad = h[6], r.unk = h[7], r.cls = h[8], r.sep = h[9], r.mask = h[10];
    r.hash = (uint32_t)h[11] | (uint64_t)(uint32_t)h[12] << 32;
    return r;
}

// Open one file and check its header against its size.
static inline Shard sentences_open_file(const char* path) {
    int32_t start[SHARD_HEADER_INTS];
    uint64_t present;
    Shard s = shard_begin(path, start, &present, "file of sentences");
    if (start[0] == SHARD_MAGIC_UINT16 || start[0] == SHARD_MAGIC_UINT32)
        die(USAGE,
            "%s: is a token shard without sentences (magic %d); make files of sentences with dev/data/prepare_bert.py",
            path, (int)start[0]);
    if (start[0] != SENTENCES_MAGIC)
        die(USAGE,
            "%s: is not a file of sentences: its magic number is %d, not %d; make such files with "
            "dev/data/prepare_bert.py",
            path, (int)start[0], (int)SENTENCES_MAGIC);
    if (start[1] != SENTENCES_VERSION_UINT16 && start[1] != SENTENCES_VERSION_UINT32)
        die(USAGE, "%s: file of sentences of version %d, but only 1 and 2 are supported; make it again", path,
            (int)start[1]);
    s.width = start[1] == SENTENCES_VERSION_UINT16 ? 2 : 4;
    SentencesHeader h = sentences_header_from(start);
    s.tokens = h.tokens;
    if (h.V < 1 || h.V > SENTENCES_MAX_VOCABULARY)
        die(USAGE, "%s: its header gives a vocabulary of %d tokens; the file is damaged, make it again", path, h.V);
    const int ids[] = {h.pad, h.unk, h.cls, h.sep, h.mask};
    for (size_t i = 0; i < COUNT_OF(ids); i++)
        if (ids[i] < 0 || ids[i] >= h.V)
            die(USAGE,
                "%s: its header gives a special token the id %d, but the vocabulary has %d; the file is damaged, "
                "make it again",
                path, ids[i], h.V);
    uint64_t size = sentences_tokens_end(&s) + 4 * ((uint64_t)h.sentences + h.documents + 2 + sentences_words(h.V));
    if (size != present)
        die(USAGE, "%s: its header gives %llu bytes, but the file has %llu; it is %s", path, (unsigned long long)size,
            (unsigned long long)present,
            size > present ? "truncated, copy or make it again" : "damaged, make it again");
    if (h.documents == 0) die(USAGE, "%s: contains no documents; prepare the data again or remove the file", path);
    return s;
}

// Read n + 1 numbers at `offset` of a file. Returns whether they rise from 0 to `end`.
static inline int sentences_read_starts(uint32_t* starts, const Shard* file, uint64_t offset, uint64_t n,
                                        uint32_t end) {
    read_input(file->fd, file->path, starts, (size_t)(4 * (n + 1)), offset);
    int is_sound = starts[0] == 0 && starts[n] == end;
    for (uint64_t i = 0; i < n && is_sound; i++) is_sound = starts[i] < starts[i + 1];
    return is_sound;
}

// The bitmap of tokens that continue a word (caller frees).
static inline uint32_t* sentences_read_continues(const Shard* file, const SentencesHeader* h) {
    size_t bytes = (size_t)(4 * sentences_words(h->V));
    uint32_t* continues = (uint32_t*)xmalloc(bytes);
    read_input(file->fd, file->path, continues, bytes,
               sentences_tokens_end(file) + 4 * ((uint64_t)h->sentences + h->documents + 2));
    return continues;
}

// Compare the headers and bitmaps of two files. Without a hash, different vocabularies mostly differ in their bitmaps.
static inline int sentences_same_vocabulary(const SentencesHeader* a, const SentencesHeader* b,
                                            const uint32_t* continues_a, const uint32_t* continues_b) {
    return a->V == b->V && a->pad == b->pad && a->unk == b->unk && a->cls == b->cls && a->sep == b->sep &&
           a->mask == b->mask && (a->hash == b->hash || !a->hash || !b->hash) &&
           memcmp(continues_a, continues_b, (size_t)(4 * sentences_words(a->V))) == 0;
}

// Append the documents of file f.
static inline void sentences_add_file(Sentences* s, int f, uint64_t* used, size_t* begins, size_t* documents) {
    const Shard* file = &s->files.shard[f];
    int32_t header[SHARD_HEADER_INTS];
    read_input(file->fd, file->path, header, SHARD_HEADER_BYTES, 0);
    SentencesHeader h = sentences_header_from(header);
    uint32_t *continues = sentences_read_continues(file, &h), *first;
    if (f == 0) s->vocabulary = h, s->continues = continues;
    if (!sentences_same_vocabulary(&h, &s->vocabulary, continues, s->continues))
        die(USAGE, "%s: its vocabulary differs from that of %s; make all files of a data set with one vocabulary",
            file->path, s->files.shard[0].path);
    if (f > 0) free(continues);
    uint64_t at = sentences_tokens_end(file);
    size_t count = (size_t)h.sentences + 1;
    s->begin = (uint32_t*)array_reserve(s->begin, begins, (size_t)*used + count, sizeof(uint32_t));
    s->document =
        (Document*)array_reserve(s->document, documents, (size_t)s->documents + h.documents, sizeof(Document));
    first = (uint32_t*)xmalloc(((size_t)h.documents + 1) * sizeof(uint32_t));
    if (!sentences_read_starts(s->begin + *used, file, at, h.sentences, h.tokens) ||
        !sentences_read_starts(first, file, at + 4 * count, h.documents, h.sentences))
        die(USAGE, "%s: the starts of its sentences and documents are not in order; the file is damaged, make it again",
            file->path);
    for (uint32_t d = 0; d < h.documents; d++) {
        Document* to = &s->document[s->documents++];
        to->sentence = *used + first[d];
        to->sentences = first[d + 1] - first[d];
        to->file = (uint32_t)f;
    }
    *used += count;
    free(first);
}

static inline void sentences_open(Sentences* s, const char* pattern) {
    uint64_t used = 0;
    size_t begins = 0, documents = 0;
    memset(s, 0, sizeof(*s));
    shards_open_with(&s->files, pattern, sentences_open_file);
    for (int f = 0; f < s->files.count; f++) sentences_add_file(s, f, &used, &begins, &documents);
}

static inline void sentences_close(Sentences* s) {
    shards_close(&s->files);
    free(s->document);
    free(s->begin);
    free(s->continues);
    memset(s, 0, sizeof(*s));
}

static inline int sentences_continues(const Sentences* s, int token) {
    return s->continues[token / 32] >> (token % 32) & 1;
}

// The number of tokens in sentences first .. end - 1 of a document.
static inline uint32_t sentences_length(const Sentences* s, uint64_t document, uint32_t first, uint32_t end) {
    const uint32_t* begin = s->begin + s->document[document].sentence;
    return begin[end] - begin[first];
}

// Read n tokens of a document from token `skip` of sentence `first` on.
static inline void sentences_read(int* out, const Sentences* s, uint64_t document, uint32_t first, uint32_t skip,
                                  size_t n, ReadError* error) {
    const Document* found = &s->document[document];
    uint64_t offset = (uint64_t)s->begin[found->sentence + first] + skip;
    shards_read(&s->files, (int)found->file, offset, n, out, error);
    for (size_t i = 0; i < n; i++)
        if ((uint32_t)out[i] >= (uint32_t)s->vocabulary.V) {
            read_failed(error, USAGE,
                        "%s: token %u at position %llu is outside the file's vocabulary of %d; the file is damaged, "
                        "make it again",
                        s->files.shard[found->file].path, (uint32_t)out[i], (unsigned long long)(offset + i),
                        s->vocabulary.V);
            out[i] = 0;
        }
}

#endif
