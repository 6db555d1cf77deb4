/* What the programs that write a corpus share: the files of a byte-level BPE tokenizer, and files that appear all at
 * once.
 *
 * Token id = byte for the 256 bytes, then one token a merge, then end of text. */
#ifndef DEV_DATA_CORPUS_FILES_H
#define DEV_DATA_CORPUS_FILES_H

#include "llmc/data/mlm/sentences.h"

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
