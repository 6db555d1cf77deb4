/* What the programs that write a corpus share: token shards, files of sentences, the files of a byte-level BPE
 * tokenizer, and files that appear all at once.
 *
 * Token id = byte for the 256 bytes, then one token a merge, then end of text. */
#ifndef DEV_DATA_CORPUS_FILES_H
#define DEV_DATA_CORPUS_FILES_H

#include "llmc/bert/sentences.h"

// Create or replace one shard of n tokens, each `width` (2 or 4) bytes, flushed to the disk. Returns 0, or -1
// with errno; what is then at `path` is incomplete, so write to a temporary name and rename.
static inline int shard_write(const char* path, const int* tokens, uint64_t n, int width) {
    enum { CHUNK = 65536 };
    int32_t header[SHARD_HEADER_INTS];
    CHECK(width == 2 || width == 4);
    memset(header, 0, sizeof(header));
    header[0] = width == 2 ? SHARD_MAGIC_UINT16 : SHARD_MAGIC_UINT32;
    header[1] = width == 2 ? SHARD_VERSION_UINT16 : SHARD_VERSION_UINT32;
    header[2] = (int32_t)(uint32_t)n;
    header[3] = (int32_t)(uint32_t)(n >> 32);

    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) return -1;
    int bad = write_all(fd, header, sizeof(header)) != 0;
    uint16_t* narrow = (uint16_t*)xmalloc(CHUNK * sizeof(uint16_t));
    for (uint64_t i = 0; i < n && !bad; i += CHUNK) {
        size_t m = n - i < CHUNK ? (size_t)(n - i) : (size_t)CHUNK;
        if (width == 2) {
            for (size_t k = 0; k < m; k++) narrow[k] = (uint16_t)tokens[i + k];
            bad = write_all(fd, narrow, m * sizeof(uint16_t)) != 0;
        } else {
            bad = write_all(fd, tokens + i, m * sizeof(int)) != 0;
        }
    }
    bad = bad || fsync(fd) != 0;
    int saved = errno;
    free(narrow);
    if (close(fd) != 0 && !bad) return -1;
    errno = saved;
    return bad ? -1 : 0;
}

// Create or replace one file, flushed to the disk: tokens [h.tokens], begin [h.sentences + 1], first [h.documents + 1],
// continues [sentences_words(h.V)]. Returns 0, or -1 with errno; what is then at `path` is incomplete.
static inline int sentences_write(const char* path, SentencesHeader h, const int* tokens, const uint32_t* begin,
                                  const uint32_t* first, const uint32_t* continues) {
    int width = h.V <= 65536 ? 2 : 4;
    size_t bytes = round_up((size_t)h.tokens * (size_t)width, 4);
    int32_t header[SHARD_HEADER_INTS];
    memset(header, 0, sizeof(header));
    header[0] = SENTENCES_MAGIC;
    header[1] = width == 2 ? SENTENCES_VERSION_UINT16 : SENTENCES_VERSION_UINT32;
    header[2] = (int32_t)h.tokens, header[3] = (int32_t)h.sentences, header[4] = (int32_t)h.documents, header[5] = h.V;
    header[6] = h.pad, header[7] = h.unk, header[8] = h.cls, header[9] = h.sep, header[10] = h.mask;
    header[11] = (int32_t)(uint32_t)h.hash, header[12] = (int32_t)(uint32_t)(h.hash >> 32);
    char* raw = (char*)xcalloc(bytes, 1);
    if (width == 4) memcpy(raw, tokens, bytes);
    for (size_t i = 0; i < h.tokens && width == 2; i++) {
        uint16_t token = (uint16_t)tokens[i];
        memcpy(raw + 2 * i, &token, sizeof(token));
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    int bad = fd < 0 || write_all(fd, header, sizeof(header)) != 0 || write_all(fd, raw, bytes) != 0 ||
              write_all(fd, begin, 4 * ((size_t)h.sentences + 1)) != 0 ||
              write_all(fd, first, 4 * ((size_t)h.documents + 1)) != 0 ||
              write_all(fd, continues, (size_t)(4 * sentences_words(h.V))) != 0 || fsync(fd) != 0;
    int saved = errno;
    free(raw);
    if (fd >= 0 && close(fd) != 0 && !bad) return -1;
    errno = saved;
    return bad ? -1 : 0;
}

typedef struct {
    int* id;
    size_t count, capacity;
} Tokens;

static inline void tokens_add(Tokens* t, const int* id, size_t n) {
    t->id = (int*)array_reserve(t->id, &t->capacity, t->count + n, sizeof(int));
    memcpy(t->id + t->count, id, n * sizeof(int));
    t->count += n;
}

// The merges of a vocabulary, in the order in which they apply: merge i makes the token 256 + i of two earlier ones.
typedef struct {
    int left, right;
} Merge;

typedef struct {
    const Merge* merge;
    int count;
} Merges;

// The tokenizer's name of a byte: GPT-2 shows printable Latin-1 as itself and the 68 others as U+0100 and up.
static inline void append_byte_name(Text* t, int byte) {
    int character = 0, shifted = 256;
    for (int b = 0; b <= byte; b++) {
        int printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        character = printable ? b : shifted++;
    }
    if (character < 128) text_printf(t, "%c", character);
    else text_printf(t, "%c%c", 0xC0 | character >> 6, 0x80 | (character & 63));
}

static inline void append_token_name(Text* t, Merges m, int token) {
    if (token < 256) {
        append_byte_name(t, token);
        return;
    }
    append_token_name(t, m, m.merge[token - 256].left);
    append_token_name(t, m, m.merge[token - 256].right);
}

static inline void append_vocabulary(Text* t, Merges m) {
    text_printf(t, "{");
    for (int token = 0; token < 256 + m.count; token++) {
        text_printf(t, token == '"' || token == '\\' ? "\"\\" : "\"");
        append_token_name(t, m, token);
        text_printf(t, "\":%d,", token);
    }
    text_printf(t, "\"<|endoftext|>\":%d}", 256 + m.count);
}

// One merge a line, as in merges.txt, or as strings of a JSON list. Names of merged tokens here have no quotes.
static inline void append_merges(Text* t, Merges m, const char* before, const char* after, const char* between) {
    for (int i = 0; i < m.count; i++) {
        text_printf(t, "%s%s", i ? between : "", before);
        append_token_name(t, m, m.merge[i].left);
        text_printf(t, " ");
        append_token_name(t, m, m.merge[i].right);
        text_printf(t, "%s", after);
    }
}

static inline Text vocab_json(Merges m) {
    Text t = {NULL, 0, 0};
    append_vocabulary(&t, m);
    text_printf(&t, "\n");
    return t;
}

static inline Text merges_txt(Merges m) {
    Text t = {NULL, 0, 0};
    text_printf(&t, "#version: 0.2\n");
    append_merges(&t, m, "", "\n", "");
    return t;
}

static inline Text tokenizer_json(Merges m) {
    Text t = {NULL, 0, 0};
    text_printf(&t,
                "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[{\"id\":%d,"
                "\"content\":\"<|endoftext|>\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,"
                "\"normalized\":false,\"special\":true}],\"normalizer\":null,",
                256 + m.count);
    text_printf(&t, "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,"
                    "\"use_regex\":true},\"post_processor\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                    "\"trim_offsets\":false,\"use_regex\":true},\"decoder\":{\"type\":\"ByteLevel\","
                    "\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true},");
    text_printf(&t, "\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"
                    "\"continuing_subword_prefix\":\"\",\"end_of_word_suffix\":\"\",\"fuse_unk\":false,"
                    "\"byte_fallback\":false,\"vocab\":");
    append_vocabulary(&t, m);
    text_printf(&t, ",\"merges\":[");
    append_merges(&t, m, "\"", "\"", ",");
    text_printf(&t, "]}}\n");
    return t;
}

// The length is the library's own way to write "no limit": the model's is in its config.json.
static inline Text tokenizer_config_json(void) {
    Text t = {NULL, 0, 0};
    text_printf(&t, "{\n  \"add_prefix_space\": false,\n  \"bos_token\": \"<|endoftext|>\",\n"
                    "  \"clean_up_tokenization_spaces\": false,\n  \"eos_token\": \"<|endoftext|>\",\n"
                    "  \"model_max_length\": 1000000000000000019884624838656,\n"
                    "  \"tokenizer_class\": \"GPT2Tokenizer\",\n  \"unk_token\": \"<|endoftext|>\"\n}\n");
    return t;
}

// ---------------------------------------------------------------------------------------------------------
// Files of a directory. Each is written under a temporary name; all get their names when the last is complete.

static inline char* output_temporary(const char* out, const char* name) {
    return xprintf("%s/%s.tmp%ld", out, name, (long)getpid());
}

// One of `names` [count] could not be written, for the reason in errno: delete what was written, and exit.
static inline void output_failed(const char* out, const char* const* names, int count, const char* name) {
    int saved = errno;
    for (int i = 0; i < count; i++) {
        char* temporary = output_temporary(out, names[i]);
        unlink(temporary);
        free(temporary);
    }
    die(FAILED, "%s/%s: cannot be written: %s; free space, or choose another directory", out, name, strerror(saved));
}

// OUT and OUT/bert are there.
static inline void output_directories(const char* out) {
    char* folder = xprintf("%s/bert", out);
    if (make_directories(folder) != 0)
        die(USAGE, "%s: the directory cannot be made: %s; choose another one", folder, strerror(errno));
    free(folder);
}

static inline void output_rename(const char* out, const char* const* names, int count) {
    char* folder = xprintf("%s/bert", out);
    for (int i = 0; i < count; i++) {
        char *temporary = output_temporary(out, names[i]), *name = xprintf("%s/%s", out, names[i]);
        if (rename(temporary, name) != 0) output_failed(out, names, count, names[i]);
        free(temporary), free(name);
    }
    if (sync_directory(out) != 0 || sync_directory(folder) != 0) output_failed(out, names, count, "");
    free(folder);
}

#endif
