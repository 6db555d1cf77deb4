/* The files of a WordPiece vocabulary: vocab.txt, one token per line whose number is its id, or else tokenizer.json,
 * whose vocabulary is used and whose other settings must match what wordpiece.h does. tokenizer_config.json may set
 * do_lower_case, strip_accents (null: same as do_lower_case) and tokenize_chinese_chars. Its settings take precedence
 * over the normalizer of tokenizer.json, as in `transformers`.
 *
 * A vocabulary whose first 256 tokens are the bytes (in the spelling of tokenizer.h), such as that of the built-in
 * corpus, is used byte by byte. */
#ifndef LLMC_TEXT_WORDPIECE_FILES_H
#define LLMC_TEXT_WORDPIECE_FILES_H

#include "llmc/text/tokenizer.h"

enum { WORDPIECE_MAX_CHARACTERS = 100 };

// Whether a text is lower-cased: CASE_OF_MODEL follows the files (without a setting there: UNCASED).
typedef enum { CASE_OF_MODEL, CASED, UNCASED } LetterCase;

typedef struct {
    int size;
    int pad, unk, cls, sep, mask;
    LetterCase letter_case;  // CASED or UNCASED
    int strips_accents;
    int splits_ideographs;  // each ideograph is a word
    int is_bytes;
    char* text;        // the tokens' spellings
    TokenText* token;  // [size] into `text`
    int* slot;         // [slots] a hash table of ids, -1 for none
    uint32_t slots;    // a power of 2
    size_t longest;    // bytes of the longest token
} WordPiece;

// ---------------------------------------------------------------------------------------------------------
// The vocabulary

// The slot of a token, or the free slot where it belongs.
static inline uint32_t wordpiece_slot(const WordPiece* w, const char* bytes, size_t n) {
    for (uint32_t i = (uint32_t)fnv_update(FNV_START, bytes, n) & (w->slots - 1);; i = (i + 1) & (w->slots - 1)) {
        if (w->slot[i] < 0) return i;
        const TokenText* t = &w->token[w->slot[i]];
        if ((size_t)t->length == n && memcmp(w->text + t->start, bytes, n) == 0) return i;
    }
}

// The id of a token, -1 if there is none.
static inline int wordpiece_id(const WordPiece* w, const char* bytes, size_t n) {
    return w->slot[wordpiece_slot(w, bytes, n)];
}

// The spelling of a token, not NUL-terminated; NULL for an id without a token.
static inline const char* wordpiece_token(const WordPiece* w, int id, size_t* length) {
    *length = 0;
    if (id < 0 || id >= w->size) return NULL;
    *length = (size_t)w->token[id].length;
    return w->text + w->token[id].start;
}

static inline int wordpiece_special(const WordPiece* w, const char* name, const char* path) {
    int id = wordpiece_id(w, name, strlen(name));
    if (id < 0) die(USAGE, "%s: has no %s, which masked-token models need; use the model's own file", path, name);
    return id;
}

// Whether the first 256 tokens are the bytes in order.
static inline int wordpiece_of_bytes(const WordPiece* w) {
    int byte_of[BYTE_ALPHABET_END];
    byte_alphabet(byte_of);
    for (int id = 0; id < 256; id++) {
        char byte[2];
        if (id >= w->size || w->token[id].length < 1 || w->token[id].length > 2) return 0;
        size_t n = tokenizer_spell(byte, w->text + w->token[id].start, (size_t)w->token[id].length, byte_of);
        if (n != 1 || (unsigned char)byte[0] != id) return 0;
    }
    return 1;
}

// A file's settings for characters.
typedef struct {
    int is_lower, splits_ideographs;
    int strips_accents;  // -1: same as is_lower
} WordPieceRules;

// Take the settings that an object has, and leave the others unchanged.
static inline void wordpiece_read_rules(WordPieceRules* r, const JsonNode* part, const char* lower,
                                        const char* ideographs, const char* path) {
    const char* accents = "strip_accents";
    r->is_lower = json_get_bool_or(part, lower, r->is_lower, path);
    r->splits_ideographs = json_get_bool_or(part, ideographs, r->splits_ideographs, path);
    if (json_get(part, accents)) r->strips_accents = json_get_bool_or(part, accents, -1, path);
}

// Apply `rules`, then the settings of tokenizer_config.json if it exists, then `letter_case`. The last one wins.
static inline void wordpiece_set_rules(WordPiece* w, WordPieceRules rules, const char* directory,
                                       LetterCase letter_case) {
    char* path = xprintf("%s/tokenizer_config.json", directory);
    if (file_exists(path)) {
        Json json;
        json_load(&json, path, TOKENIZER_MAX_FILE);
        wordpiece_read_rules(&rules, json.root, "do_lower_case", "tokenize_chinese_chars", path);
        json_free(&json);
    }
    if (letter_case != CASE_OF_MODEL) rules.is_lower = letter_case == UNCASED;
    w->letter_case = rules.is_lower ? UNCASED : CASED;
    w->strips_accents = rules.strips_accents < 0 ? rules.is_lower : rules.strips_accents;
    w->splits_ideographs = rules.splits_ideographs;
    free(path);
}

static inline void wordpiece_free(WordPiece* w) {
    free(w->text);
    free(w->token);
    free(w->slot);
    memset(w, 0, sizeof(*w));
}

// The tokens of vocab.txt.
static inline void wordpiece_read_lines(WordPiece* w, const char* path) {
    size_t n;
    int lines = 0;
    w->text = read_file(path, TOKENIZER_MAX_FILE, &n, USAGE);
    if (utf8_mark(w->text, n)) die(USAGE, "%s: begins with a byte order mark; save it without", path);
    for (size_t i = 0; i < n; i++) lines += w->text[i] == '\n' || i + 1 == n;
    w->token = (TokenText*)xmalloc((size_t)lines * sizeof(TokenText));
    for (size_t i = 0; i < n; w->size++) {
        const char* line_end = (const char*)memchr(w->text + i, '\n', n - i);
        size_t end = line_end ? (size_t)(line_end - w->text) : n, length = end - i;
        if (length > 0 && w->text[end - 1] == '\r') length--;
        w->token[w->size].start = i;
        w->token[w->size].length = (int)length;
        i = end + 1;
    }
}

// Check a string of tokenizer.json for which only `value` is supported.
static inline void wordpiece_expect(const JsonNode* part, const char* key, const char* value, const char* of,
                                    const char* path) {
    const char* actual = json_get_string(part, key, path);
    if (strcmp(actual, value) != 0)
        die(USAGE, "%s: the %s's \"%s\" is \"%s\"; only \"%s\" is supported", path, of, key, actual, value);
}

// Read the rules of tokenizer.json. Otherwise its normalizer must match what wordpiece.h does.
static inline void wordpiece_read_normalizer(WordPieceRules* rules, const JsonNode* root, const char* path) {
    const JsonNode* part = json_need(root, "normalizer", JSON_OBJECT, path);
    wordpiece_expect(part, "type", "BertNormalizer", "normalizer", path);
    json_need(part, "lowercase", JSON_BOOL, path);
    if (!json_get_bool_or(part, "clean_text", 1, path))
        die(USAGE, "%s: the normalizer's \"clean_text\" is false; only true is supported", path);
    wordpiece_read_rules(rules, part, "lowercase", "handle_chinese_chars", path);
}

// The tokens of tokenizer.json.
static inline void wordpiece_read_vocabulary(WordPiece* w, const JsonNode* root, const char* path) {
    const JsonNode *model = json_need(root, "model", JSON_OBJECT, path), *m;
    if (json_has(model, "type")) wordpiece_expect(model, "type", "WordPiece", "model", path);  // old files have no type
    wordpiece_expect(model, "unk_token", "[UNK]", "model", path);
    wordpiece_expect(model, "continuing_subword_prefix", "##", "model", path);
    int64_t most = json_get_int_or(model, "max_input_chars_per_word", WORDPIECE_MAX_CHARACTERS, path);
    if (most != WORDPIECE_MAX_CHARACTERS)
        die(USAGE, "%s: the model's \"max_input_chars_per_word\" is %lld; only %d is supported", path, (long long)most,
            (int)WORDPIECE_MAX_CHARACTERS);
    const JsonNode* vocabulary = json_need(model, "vocab", JSON_OBJECT, path);
    Text text = {NULL, 0, 0};
    w->token = (TokenText*)xmalloc(max_size(vocabulary->count, 1) * sizeof(TokenText));
    for (size_t i = 0; i < vocabulary->count; i++) w->token[i].length = -1;
    for (m = vocabulary->first; m; m = m->next) {
        int id = tokenizer_id(m, path, m->key);
        if ((size_t)id >= vocabulary->count || w->token[id].length >= 0)
            die(USAGE, "%s: token \"%s\": its id %d is %s", path, m->key, id,
                (size_t)id < vocabulary->count ? "also another token's" : "not below the number of tokens");
        w->token[id].start = text.length;
        w->token[id].length = (int)m->key_length;
        text_append(&text, m->key, m->key_length);
    }
    text_append(&text, "", 0);
    w->text = text.text, w->size = (int)vocabulary->count;
}

// Check that the added tokens of tokenizer.json are the special ones, because no others are supported.
static inline void wordpiece_check_added(const WordPiece* w, const JsonNode* root, const char* path) {
    const int ids[] = {w->pad, w->unk, w->cls, w->sep, w->mask};
    for (const JsonNode* m = json_need(root, "added_tokens", JSON_ARRAY, path)->first; m; m = m->next) {
        const char* content = json_get_string(m, "content", path);
        int id = tokenizer_id(json_get(m, "id"), path, content), is_known = 0;
        for (size_t k = 0; k < COUNT_OF(ids); k++) is_known |= ids[k] == id;
        if (!is_known || wordpiece_id(w, content, strlen(content)) != id)
            die(USAGE,
                "%s: added token %s with the id %d is not supported; only [PAD], [UNK], [CLS], [SEP] and [MASK] are, "
                "with their ids in \"vocab\"",
                path, content, id);
    }
}

// Fill in everything that follows from the tokens.
static inline void wordpiece_index(WordPiece* w, const char* path) {
    for (w->slots = 64; w->slots < 2 * (uint32_t)w->size;) w->slots *= 2;
    w->slot = (int*)xmalloc(w->slots * sizeof(int));
    memset(w->slot, -1, w->slots * sizeof(int));
    for (int id = 0; id < w->size; id++) {
        size_t length = (size_t)w->token[id].length;
        w->slot[wordpiece_slot(w, w->text + w->token[id].start, length)] = id;
        if (length > w->longest) w->longest = length;
    }
    w->pad = wordpiece_special(w, "[PAD]", path);
    w->unk = wordpiece_special(w, "[UNK]", path);
    w->cls = wordpiece_special(w, "[CLS]", path);
    w->sep = wordpiece_special(w, "[SEP]", path);
    w->mask = wordpiece_special(w, "[MASK]", path);
    w->is_bytes = wordpiece_of_bytes(w);
}

// Returns 0, or -1 if `directory` has neither vocab.txt nor tokenizer.json. Ends with USAGE if the vocabulary is
// unusable.
static inline int wordpiece_open(WordPiece* w, const char* directory, LetterCase letter_case) {
    char *lines = xprintf("%s/vocab.txt", directory), *whole = xprintf("%s/tokenizer.json", directory);
    WordPieceRules rules = {.is_lower = 1, .splits_ideographs = 1, .strips_accents = -1};
    memset(w, 0, sizeof(*w));
    if (file_exists(lines)) {
        wordpiece_read_lines(w, lines);
        wordpiece_index(w, lines);
    } else if (file_exists(whole)) {
        Json json;
        json_load(&json, whole, TOKENIZER_MAX_FILE);
        wordpiece_read_vocabulary(w, json.root, whole);
        wordpiece_index(w, whole);
        wordpiece_read_normalizer(&rules, json.root, whole);
        const JsonNode* splitter = json_need(json.root, "pre_tokenizer", JSON_OBJECT, whole);
        wordpiece_expect(splitter, "type", "BertPreTokenizer", "pre_tokenizer", whole);
        wordpiece_check_added(w, json.root, whole);
        json_free(&json);
    }
    if (w->size > 0) wordpiece_set_rules(w, rules, directory, letter_case);
    free(lines);
    free(whole);
    return w->size > 0 ? 0 : -1;
}

#endif
