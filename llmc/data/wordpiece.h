/* Text to the tokens of a WordPiece vocabulary and back, as the tokenizer of BERT does it.
 *
 * vocab.txt has one token a line; its number is its id. Where there is none, tokenizer.json has the vocabulary, and must
 * say of the rest what is said here. A text is cleaned of control characters and, for an uncased
 * vocabulary, taken to lower case without accents; split at white space, around punctuation and CJK ideographs; and each
 * word is cut from its left into the longest tokens that there are, those after the first spelled "##...". A word that
 * cannot be cut so, or has more than 100 characters, is [UNK]. [PAD], [UNK], [CLS], [SEP] and [MASK] in a text stand for
 * themselves. Characters are treated as Hugging Face's `tokenizers` treats them but for what unicode.h names.
 *
 * A vocabulary whose first 256 tokens are the bytes (in the spelling of tokenizer.h), as the built-in corpus has it, is
 * used byte by byte.
 *
 * Wu et al., "Google's neural machine translation system", 2016; Devlin et al., "BERT", 2018. */
#ifndef LLMC_WORDPIECE_H
#define LLMC_WORDPIECE_H

#include "tokenizer.h"
#include "unicode.h"

enum { WORDPIECE_MAX_CHARACTERS = 100 };

// Whether a text is folded to lower case: what tokenizer_config.json beside vocab.txt says (if nothing: UNCASED), or
// tokenizer.json; or given.
typedef enum { CASE_OF_MODEL, CASED, UNCASED } LetterCase;

typedef struct {
    int size;
    int pad, unk, cls, sep, mask;
    LetterCase letter_case;  // CASED or UNCASED
    int is_bytes;
    char* text;        // their spellings
    TokenText* token;  // [size] into `text`
    int* slot;         // [slots] a hash table of ids, -1 for none
    uint32_t slots;    // a power of 2
    size_t longest;    // bytes of the longest token
} WordPiece;

// Bytes begin .. end - 1 of a text.
typedef struct {
    uint32_t begin, end;
} TextSpan;

// Zero-initialise it; set `has_origins` before the first token to learn where in the text each comes from.
typedef struct {
    int* id;
    size_t count, capacity;
    int has_origins;
    TextSpan* origin;  // [count]
} TokenIds;

// A token that comes from bytes begin .. end - 1.
static inline void token_ids_add_from(TokenIds* t, int id, size_t begin, size_t end) {
    if (t->count == t->capacity) {
        t->capacity = 2 * t->capacity + 64;
        t->id = (int*)xrealloc(t->id, t->capacity * sizeof *t->id);
        if (t->has_origins) t->origin = (TextSpan*)xrealloc(t->origin, t->capacity * sizeof *t->origin);
    }
    if (t->has_origins) t->origin[t->count].begin = (uint32_t)begin, t->origin[t->count].end = (uint32_t)end;
    t->id[t->count++] = id;
}

static inline void token_ids_add(TokenIds* t, int id) { token_ids_add_from(t, id, 0, 0); }

static inline void token_ids_free(TokenIds* t) {
    free(t->id), free(t->origin);
    memset(t, 0, sizeof *t);
}

// ---------------------------------------------------------------------------------------------------------
// The vocabulary

// Where `bytes` are in the table, or the free slot where they belong (FNV-1a, then the next slot that serves).
static inline uint32_t wordpiece_slot(const WordPiece* w, const char* bytes, size_t n) {
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)bytes[i]) * 16777619u;
    for (uint32_t i = hash & (w->slots - 1);; i = (i + 1) & (w->slots - 1)) {
        if (w->slot[i] < 0) return i;
        const TokenText* t = &w->token[w->slot[i]];
        if ((size_t)t->length == n && memcmp(w->text + t->start, bytes, n) == 0) return i;
    }
}

// The id of a token, -1 where there is none.
static inline int wordpiece_id(const WordPiece* w, const char* bytes, size_t n) {
    return w->slot[wordpiece_slot(w, bytes, n)];
}

// The spelling of a token, not NUL-terminated; NULL for an id that there is not.
static inline const char* wordpiece_token(const WordPiece* w, int id, size_t* length) {
    *length = 0;
    if (id < 0 || id >= w->size) return NULL;
    *length = (size_t)w->token[id].length;
    return w->text + w->token[id].start;
}

static inline int wordpiece_special(const WordPiece* w, const char* name, const char* path) {
    int id = wordpiece_id(w, name, strlen(name));
    if (id < 0) die(USAGE, "%s: has no %s, which a model of masked text needs; give the model's own file", path, name);
    return id;
}

// Are the first 256 tokens the bytes in order?
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

static inline LetterCase wordpiece_case_of(const char* config) {
    LetterCase found = UNCASED;
    if (!file_exists(config)) return found;
    Json json;
    json_load(&json, config, TOKENIZER_MAX_FILE);
    const JsonNode* lower = json_get(json.root, "do_lower_case");
    if (lower && lower->type == JSON_BOOL && !lower->integer) found = CASED;
    json_free(&json);
    return found;
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

// A string of tokenizer.json that can only be `value`.
static inline void wordpiece_expect(const JsonNode* part, const char* key, const char* value, const char* of,
                                    const char* path) {
    const char* is = json_get_string(part, key, path);
    if (strcmp(is, value) != 0)
        die(USAGE, "%s: the %s's \"%s\" is \"%s\"; only \"%s\" can be read", path, of, key, is, value);
}

static inline void wordpiece_expect_bool(const JsonNode* part, const char* key, int value, const char* of,
                                         const char* path) {
    if (json_get_bool_or(part, key, value, path) != value)
        die(USAGE, "%s: the %s's \"%s\" is %s; only %s can be read", path, of, key, value ? "false" : "true",
            value ? "true" : "false");
}

// The letter case of tokenizer.json, whose normalizer must be what this file describes.
static inline LetterCase wordpiece_read_normalizer(const JsonNode* root, const char* path) {
    const char* of = "normalizer";
    const JsonNode* part = json_need(root, of, JSON_OBJECT, path);
    wordpiece_expect(part, "type", "BertNormalizer", of, path);
    int is_lower = json_get_bool(part, "lowercase", path);
    wordpiece_expect_bool(part, "clean_text", 1, of, path);
    wordpiece_expect_bool(part, "handle_chinese_chars", 1, of, path);
    wordpiece_expect_bool(part, "strip_accents", is_lower, of, path);
    return is_lower ? UNCASED : CASED;
}

// The tokens of tokenizer.json.
static inline void wordpiece_read_vocabulary(WordPiece* w, const JsonNode* root, const char* path) {
    const JsonNode *model = json_need(root, "model", JSON_OBJECT, path), *m;
    if (json_has(model, "type")) wordpiece_expect(model, "type", "WordPiece", "model", path);  // old files do not say
    wordpiece_expect(model, "unk_token", "[UNK]", "model", path);
    wordpiece_expect(model, "continuing_subword_prefix", "##", "model", path);
    int64_t most = json_get_int_or(model, "max_input_chars_per_word", WORDPIECE_MAX_CHARACTERS, path);
    if (most != WORDPIECE_MAX_CHARACTERS)
        die(USAGE, "%s: the model's \"max_input_chars_per_word\" is %lld; only %d can be read", path, (long long)most,
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

// What tokenizer.json takes as a token wherever it stands in a text: no more and no less than the five that are here.
static inline void wordpiece_check_added(const WordPiece* w, const JsonNode* root, const char* path) {
    static const char* const flags[] = {"single_word", "lstrip", "rstrip", "normalized"};
    const int ids[] = {w->pad, w->unk, w->cls, w->sep, w->mask};
    unsigned found = 0;
    for (const JsonNode* m = json_need(root, "added_tokens", JSON_ARRAY, path)->first; m; m = m->next) {
        const char* content = json_get_string(m, "content", path);
        int id = tokenizer_id(json_get(m, "id"), path, content), k = 0;
        char* of = xprintf("added token %s", content);
        while (k < (int)COUNT_OF(ids) && ids[k] != id) k++;
        if (k == (int)COUNT_OF(ids) || wordpiece_id(w, content, strlen(content)) != id)
            die(USAGE,
                "%s: %s with the id %d cannot be read; only [PAD], [UNK], [CLS], [SEP] and [MASK] can, with the "
                "ids that they have in \"vocab\"",
                path, of, id);
        for (size_t i = 0; i < COUNT_OF(flags); i++) wordpiece_expect_bool(m, flags[i], 0, of, path);
        found |= 1u << k;
        free(of);
    }
    for (size_t k = 0; k < COUNT_OF(ids); k++) {
        size_t length;
        const char* name = wordpiece_token(w, ids[k], &length);
        if (!(found >> k & 1)) die(USAGE, "%s: has no added token %.*s", path, (int)length, name);
    }
}

// Everything that follows from the tokens.
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

// Returns 0, or -1 where `directory` holds neither vocab.txt nor tokenizer.json. Ends with USAGE where that cannot serve.
static inline int wordpiece_open(WordPiece* w, const char* directory, LetterCase letter_case) {
    char *lines = xprintf("%s/vocab.txt", directory), *whole = xprintf("%s/tokenizer.json", directory);
    memset(w, 0, sizeof(*w));
    if (file_exists(lines)) {
        char* config = xprintf("%s/tokenizer_config.json", directory);
        wordpiece_read_lines(w, lines);
        wordpiece_index(w, lines);
        w->letter_case = letter_case == CASE_OF_MODEL ? wordpiece_case_of(config) : letter_case;
        free(config);
    } else if (file_exists(whole)) {
        Json json;
        json_load(&json, whole, TOKENIZER_MAX_FILE);
        wordpiece_read_vocabulary(w, json.root, whole);
        wordpiece_index(w, whole);
        LetterCase of_model = wordpiece_read_normalizer(json.root, whole);
        const JsonNode* splitter = json_need(json.root, "pre_tokenizer", JSON_OBJECT, whole);
        wordpiece_expect(splitter, "type", "BertPreTokenizer", "pre_tokenizer", whole);
        wordpiece_check_added(w, json.root, whole);
        w->letter_case = letter_case == CASE_OF_MODEL ? of_model : letter_case;
        json_free(&json);
    }
    free(lines);
    free(whole);
    return w->size > 0 ? 0 : -1;
}

// ---------------------------------------------------------------------------------------------------------
// Text to tokens

// The character at `text` and its number of bytes; U+FFFD for a byte that is not part of one.
static inline uint32_t wordpiece_character(const char* text, size_t n, size_t* bytes) {
    const unsigned char* p = (const unsigned char*)text;
    size_t more = p[0] < 0x80                   ? 0
                  : p[0] >= 0xC2 && p[0] < 0xE0 ? 1
                  : (p[0] & 0xF0) == 0xE0       ? 2
                  : (p[0] & 0xF8) == 0xF0       ? 3
                                                : 4;
    static const uint32_t least[4] = {0, 0x80, 0x800, 0x10000};
    uint32_t c = more == 0 ? p[0] : p[0] & (0x3Fu >> more);
    *bytes = 1;
    if (more == 4 || more >= n) return 0xFFFD;
    for (size_t i = 1; i <= more; i++) {
        if ((p[i] & 0xC0) != 0x80) return 0xFFFD;
        c = c << 6 | (p[i] & 0x3F);
    }
    if (c < least[more] || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)) return 0xFFFD;
    *bytes = more + 1;
    return c;
}

static inline void wordpiece_put(Text* word, uint32_t c) {
    char bytes[4];
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = n; i-- > 1; c >>= 6) bytes[i] = (char)(0x80 | (c & 0x3F));
    bytes[0] = (char)(n == 1 ? c : (0xF00u >> n & 0xFF) | c);
    text_append(word, bytes, n);
}

// A word as it is looked up, and for each of its bytes, where that is wanted, the character of the text it comes from.
typedef struct {
    Text text;
    TextSpan* origin;  // [text.length]
    size_t capacity;
} WordPieceWord;

static inline void wordpiece_add(const TokenIds* out, WordPieceWord* word, uint32_t c, size_t begin, size_t end) {
    size_t i = word->text.length;
    wordpiece_put(&word->text, c);
    if (!out->has_origins) return;
    if (word->text.length > word->capacity) {
        word->capacity = 2 * word->text.length + 64;
        word->origin = (TextSpan*)xrealloc(word->origin, word->capacity * sizeof *word->origin);
    }
    for (; i < word->text.length; i++) word->origin[i].begin = (uint32_t)begin, word->origin[i].end = (uint32_t)end;
}

// A token of bytes begin .. end - 1 of the word.
static inline void wordpiece_add_token(TokenIds* out, const WordPieceWord* word, int id, size_t begin, size_t end) {
    if (out->has_origins) token_ids_add_from(out, id, word->origin[begin].begin, word->origin[end - 1].end);
    else token_ids_add(out, id);
}

// Cut one word into tokens, and empty it.
static inline void wordpiece_cut(TokenIds* out, const WordPiece* w, WordPieceWord* word) {
    const char* text = word->text.text;
    size_t n = word->text.length, before = out->count, characters = 0;
    for (size_t i = 0; i < n; i++) characters += (text[i] & 0xC0) != 0x80;
    word->text.length = 0;
    if (n == 0) return;
    int is_known = characters <= WORDPIECE_MAX_CHARACTERS;
    char* piece = (char*)xmalloc(n + 2);
    memcpy(piece, "##", 2);
    for (size_t start = 0, end; start < n && is_known; start = end) {
        size_t prefix = start ? 2 : 0;
        int id = -1;
        memcpy(piece + 2, text + start, n - start);
        for (end = start + min_size(n - start, w->longest); end > start; end--) {
            int is_inside = end < n && (text[end] & 0xC0) == 0x80;  // of a character
            if (!is_inside && (id = wordpiece_id(w, piece + 2 - prefix, end - start + prefix)) >= 0) break;
        }
        is_known = id >= 0;
        if (is_known) wordpiece_add_token(out, word, id, start, end);
    }
    free(piece);
    if (is_known) return;
    out->count = before;
    wordpiece_add_token(out, word, w->unk, 0, n);
}

static inline void wordpiece_add_alone(TokenIds* out, const WordPiece* w, WordPieceWord* word, uint32_t c, size_t begin,
                                       size_t end) {
    wordpiece_cut(out, w, word);
    wordpiece_add(out, word, c, begin, end);
    wordpiece_cut(out, w, word);
}

// Bytes begin .. end - 1 of a text, which hold no special tokens.
static inline void wordpiece_encode_plain(TokenIds* out, const WordPiece* w, const char* text, size_t begin,
                                          size_t end) {
    WordPieceWord word;
    memset(&word, 0, sizeof word);
    for (size_t i = begin, next; i < end; i = next) {
        uint32_t c = wordpiece_character(text + i, end - i, &next), hangul = c - 0xAC00;
        next += i;
        if (unicode_is_removed(c)) continue;
        if (unicode_is_space(c)) {
            wordpiece_cut(out, w, &word);
        } else if (unicode_is_ideograph(c)) {
            wordpiece_add_alone(out, w, &word, c, i, next);
        } else if (w->letter_case == UNCASED && hangul < 11172) {  // a syllable, taken apart
            wordpiece_add(out, &word, 0x1100 + hangul / 588, i, next);
            wordpiece_add(out, &word, 0x1161 + hangul / 28 % 21, i, next);
            if (hangul % 28) wordpiece_add(out, &word, 0x11A7 + hangul % 28, i, next);
        } else {
            if (w->letter_case == UNCASED) c = unicode_fold(c);
            if (c && unicode_is_punctuation(c)) wordpiece_add_alone(out, w, &word, c, i, next);
            else if (c) wordpiece_add(out, &word, c, i, next);
        }
    }
    wordpiece_cut(out, w, &word);
    free(word.text.text), free(word.origin);
}

// The special token that `text` begins with, -1 for none.
static inline int wordpiece_special_at(const WordPiece* w, const char* text, size_t n) {
    const int ids[] = {w->pad, w->unk, w->cls, w->sep, w->mask};
    for (size_t i = 0; i < COUNT_OF(ids) && n > 0 && text[0] == '['; i++) {
        size_t length;
        const char* name = wordpiece_token(w, ids[i], &length);
        if (n >= length && memcmp(text, name, length) == 0) return ids[i];
    }
    return -1;
}

// The tokens of a text, added to `out`; [CLS] and [SEP] are for the caller to add.
static inline void wordpiece_encode(TokenIds* out, const WordPiece* w, const char* text, size_t n) {
    CHECK(!out->has_origins || n <= UINT32_MAX);
    for (size_t i = 0, begin = 0; i <= n; i++) {
        int id = wordpiece_special_at(w, text + i, n - i);
        if (id < 0 && i < n) continue;
        if (w->is_bytes)
            for (; begin < i; begin++) token_ids_add_from(out, (unsigned char)text[begin], begin, begin + 1);
        else wordpiece_encode_plain(out, w, text, begin, i);
        if (i == n) break;
        begin = i + (size_t)w->token[id].length;
        token_ids_add_from(out, id, i, begin);
        i = begin - 1;
    }
}

// ---------------------------------------------------------------------------------------------------------
// Tokens to text

// Text of n tokens, added to `out`: words apart by a space but before .,!? and pieces joined.
static inline void wordpiece_decode(Text* out, const WordPiece* w, const int* ids, size_t n) {
    for (size_t i = 0; i < n; i++) {
        size_t length;
        const char* token = wordpiece_token(w, ids[i], &length);
        if (!token) continue;
        if (w->is_bytes) {
            char byte = (char)ids[i];
            text_append(out, ids[i] < 256 ? &byte : token, ids[i] < 256 ? 1 : length);
            continue;
        }
        int is_piece = length > 2 && memcmp(token, "##", 2) == 0, is_stop = length == 1 && strchr(".,!?", token[0]);
        if (i > 0 && is_piece) token += 2, length -= 2;
        else if (i > 0 && !is_stop) text_append(out, " ", 1);
        text_append(out, token, length);
    }
}

#endif
