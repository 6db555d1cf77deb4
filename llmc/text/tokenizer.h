/* From token ids back to text, for samples: GPT-2's byte-level tokenizer.
 *
 * A directory has tokenizer.json, or vocab.json (encoder.json in older releases), or llm.c's list of tokens. In llm.c's
 * list tokens are raw bytes. In the others a token is spelled in GPT-2's byte alphabet, one character for each byte:
 * printable Latin-1 characters stand for themselves, the 68 other bytes are U+0100 and up. Special tokens, and tokens
 * with any other character, stand for their own text.
 *
 * Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. */
#ifndef LLMC_TEXT_TOKENIZER_H
#define LLMC_TEXT_TOKENIZER_H

#include "llmc/base/json.h"
#include "llmc/model/tokenizer_files.h"
#include "llmc/text/llmc_tokens.h"

enum { TOKENIZER_MAX_ID = 1 << 24, BYTE_ALPHABET_END = 256 + 68 };

typedef struct {
    size_t start;
    int length;  // -1: there is no such token
} TokenText;

typedef struct {
    int size;          // greatest id + 1
    TokenText* token;  // [size] into `bytes`
    Text bytes;
    int end_of_text;  // id of <|endoftext|>; -1: there is none
} Tokenizer;

// byte_of [BYTE_ALPHABET_END]: the byte that a character stands for, -1 for none.
static inline void byte_alphabet(int* byte_of) {
    for (int c = 0; c < BYTE_ALPHABET_END; c++) byte_of[c] = -1;
    for (int byte = 0, shifted = 256; byte < 256; byte++) {
        int printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        byte_of[printable ? byte : shifted++] = byte;
    }
}

// The bytes that a token's spelling stands for, into out [n]. Returns their number.
static inline size_t tokenizer_spell(char* out, const char* spelling, size_t n, const int* byte_of) {
    size_t length = 0;
    for (size_t i = 0, bytes; i < n; i += bytes) {
        int32_t c = utf8_decode(spelling + i, n - i, &bytes);
        if (c < 0 || c >= BYTE_ALPHABET_END || byte_of[c] < 0) {
            memcpy(out, spelling, n);
            return n;
        }
        out[length++] = (char)byte_of[c];
    }
    return length;
}

static inline void tokenizer_put(Tokenizer* t, int id, const char* text, size_t n) {
    if (id >= t->size) {
        t->token = (TokenText*)xrealloc(t->token, ((size_t)id + 1) * sizeof(TokenText));
        while (t->size <= id) t->token[t->size++].length = -1;
    }
    t->token[id].start = t->bytes.length;
    t->token[id].length = (int)n;
    text_append(&t->bytes, text, n);
    if (n == 13 && memcmp(text, "<|endoftext|>", 13) == 0) t->end_of_text = id;
}

static inline int tokenizer_id(const JsonNode* node, const char* file, const char* token) {
    if (!node || !node->is_integer || node->integer < 0 || node->integer >= TOKENIZER_MAX_ID)
        die(USAGE, "%s: token \"%s\": its id is not an integer from 0 to %d; the file is damaged", file, token,
            TOKENIZER_MAX_ID - 1);
    return (int)node->integer;
}

static inline void tokenizer_add_vocabulary(Tokenizer* t, const JsonNode* vocabulary, const char* file) {
    int byte_of[BYTE_ALPHABET_END], last = -1;
    byte_alphabet(byte_of);
    if (!vocabulary || vocabulary->type != JSON_OBJECT || vocabulary->count == 0)
        die(USAGE, "%s: contains no object of tokens and their ids; the file is damaged or of another kind", file);
    for (const JsonNode* m = vocabulary->first; m; m = m->next) last = max_int(last, tokenizer_id(m, file, m->key));
    tokenizer_put(t, last, "", 0);
    t->token[last].length = -1;
    for (const JsonNode* m = vocabulary->first; m; m = m->next) {
        int id = (int)m->integer;
        if (t->token[id].length >= 0)
            die(USAGE, "%s: token \"%s\": its id %d is also another token's; the file is damaged", file, m->key, id);
        char* bytes = (char*)xmalloc(m->key_length);
        tokenizer_put(t, id, bytes, tokenizer_spell(bytes, m->key, m->key_length, byte_of));
        free(bytes);
    }
}

static inline void tokenizer_add_special(Tokenizer* t, const JsonNode* added, const char* file) {
    if (!added || added->type == JSON_NULL) return;
    if (added->type != JSON_ARRAY) die(USAGE, "%s: its added_tokens are not an array; the file is damaged", file);
    for (const JsonNode* m = added->first; m; m = m->next) {
        const JsonNode* content = json_get(m, "content");
        if (!content || content->type != JSON_STRING)
            die(USAGE, "%s: one of its added_tokens has no content; the file is damaged", file);
        tokenizer_put(t, tokenizer_id(json_get(m, "id"), file, content->string), content->string, content->length);
    }
}

// Whether this part of tokenizer.json uses GPT-2's byte alphabet. It may be a sequence of parts.
static inline int tokenizer_is_byte_level(const JsonNode* part, const char* list) {
    const JsonNode *type = json_get(part, "type"), *parts = json_get(part, list);
    if (type && type->type == JSON_STRING && strcmp(type->string, "ByteLevel") == 0) return 1;
    for (const JsonNode* p = parts && parts->type == JSON_ARRAY ? parts->first : NULL; p; p = p->next)
        if (tokenizer_is_byte_level(p, list)) return 1;
    return 0;
}

// Read tokenizer.json (is_whole), or a file of only the vocabulary.
static inline void tokenizer_add_json(Tokenizer* t, const char* file, int is_whole) {
    Json json;
    json_load(&json, file, TOKENIZER_MAX_FILE);
    if (!is_whole) {
        tokenizer_add_vocabulary(t, json.root, file);
    } else {
        if (!tokenizer_is_byte_level(json_get(json.root, "decoder"), "decoders") &&
            !tokenizer_is_byte_level(json_get(json.root, "pre_tokenizer"), "pretokenizers"))
            die(USAGE, "%s: is not a byte-level tokenizer like GPT-2's; use a model and data made with one", file);
        tokenizer_add_vocabulary(t, json_get(json_get(json.root, "model"), "vocab"), file);
        tokenizer_add_special(t, json_get(json.root, "added_tokens"), file);
    }
    json_free(&json);
}

// Read llm.c's list.
static inline void tokenizer_add_list(Tokenizer* t, const char* file) {
    LlmcTokens list;
    llmc_tokens_read(&list, file);
    for (int id = list.count - 1; id >= 0; id--)  // the largest first, to allocate once
        tokenizer_put(t, id, list.text + list.start[id], llmc_token_length(&list, id));
    t->end_of_text = list.end_of_text;
    llmc_tokens_free(&list);
}

static inline void tokenizer_free(Tokenizer* t) {
    free(t->token);
    free(t->bytes.text);
    memset(t, 0, sizeof(*t));
}

// The path of the first of `names` that `directory` has (caller frees), NULL if it has none.
static inline char* tokenizer_first_file(const char* directory, const char* const* names, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char* file = xprintf("%s/%s", directory, names[i]);
        if (file_exists(file)) return file;
        free(file);
    }
    return NULL;
}

// Returns 0, or -1 if `directory` has no tokenizer. Ends with USAGE if the tokenizer is damaged or not byte-level.
static inline int tokenizer_open(Tokenizer* t, const char* directory) {
    static const char* const names[] = {"tokenizer.json", "vocab.json", "encoder.json", "gpt2_tokenizer.bin"};
    char* file = tokenizer_first_file(directory, names, COUNT_OF(names));
    memset(t, 0, sizeof(*t));
    t->end_of_text = -1;
    if (!file) return -1;
    const char* name = strrchr(file, '/') + 1;
    if (strcmp(name, "gpt2_tokenizer.bin") == 0) tokenizer_add_list(t, file);
    else tokenizer_add_json(t, file, strcmp(name, "tokenizer.json") == 0);
    free(file);
    return 0;
}

// The bytes of a token, not NUL-terminated; NULL for an id without a token. A token may be a part of a character.
static inline const char* tokenizer_decode(const Tokenizer* t, int id, size_t* length) {
    *length = 0;
    if (id < 0 || id >= t->size || t->token[id].length < 0) return NULL;
    *length = (size_t)t->token[id].length;
    return t->bytes.text + t->token[id].start;
}

static inline int tokenizer_end_of_text(const Tokenizer* t) { return t->end_of_text; }

// The id of the token with these bytes; -1 if there is none. Special tokens are the last ones.
static inline int tokenizer_find(const Tokenizer* t, const char* text, size_t n) {
    for (int id = t->size - 1; id >= 0; id--)
        if (t->token[id].length == (int)n && memcmp(t->bytes.text + t->token[id].start, text, n) == 0) return id;
    return -1;
}

#endif
