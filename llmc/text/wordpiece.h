/* Text to the tokens of a WordPiece vocabulary and back, like BERT's tokenizer, and the files of the vocabulary.
 *
 * Control characters are removed from the text and, for an uncased vocabulary, it is lower-cased and stripped of
 * accents. It is split at white space and around punctuation and CJK ideographs. Each word is cut from its left into
 * the longest tokens of the vocabulary; those after the first are spelled "##...". A word that cannot be cut this way,
 * or has more than 100 characters, becomes [UNK]. [PAD], [UNK], [CLS], [SEP] and [MASK] in a text stand for themselves.
 * Characters are treated as in Hugging Face's `tokenizers`, except that marks that are not stripped, such as musical
 * symbols, stay in the order of the text.
 *
 * The files are vocab.txt, one token per line whose number is its id, or else tokenizer.json, whose vocabulary is used
 * and whose other settings must match what is done here. tokenizer_config.json may set do_lower_case, strip_accents
 * (null: same as do_lower_case) and tokenize_chinese_chars. Its settings take precedence over the normalizer of
 * tokenizer.json, as in `transformers`. A vocabulary whose first 256 tokens are the bytes (in the spelling of
 * tokenizer.h), such as that of the built-in corpus, is used byte by byte.
 *
 * Wu et al., "Google's neural machine translation system", 2016; Devlin et al., "BERT", 2018. */
#ifndef LLMC_TEXT_WORDPIECE_H
#define LLMC_TEXT_WORDPIECE_H

#include "llmc/text/tokenizer.h"
#include "llmc/text/unicode.h"

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
    Path path = path_of("%s/tokenizer_config.json", directory);
    if (file_exists(path.text)) {
        Json json;
        json_load(&json, path.text, TOKENIZER_MAX_FILE);
        wordpiece_read_rules(&rules, json.root, "do_lower_case", "tokenize_chinese_chars", path.text);
        json_free(&json);
    }
    if (letter_case != CASE_OF_MODEL) rules.is_lower = letter_case == UNCASED;
    w->letter_case = rules.is_lower ? UNCASED : CASED;
    w->strips_accents = rules.strips_accents < 0 ? rules.is_lower : rules.strips_accents;
    w->splits_ideographs = rules.splits_ideographs;
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

// Check that the added tokens of tokenizer.json are exactly the five special ones, because no others are supported.
static inline void wordpiece_check_added(const WordPiece* w, const JsonNode* root, const char* path) {
    static const char* const flags[] = {"single_word", "lstrip", "rstrip", "normalized"};
    const int ids[] = {w->pad, w->unk, w->cls, w->sep, w->mask};
    unsigned found = 0;
    for (const JsonNode* m = json_need(root, "added_tokens", JSON_ARRAY, path)->first; m; m = m->next) {
        const char* content = json_get_string(m, "content", path);
        int id = tokenizer_id(json_get(m, "id"), path, content), k = 0;
        while (k < (int)COUNT_OF(ids) && ids[k] != id) k++;
        if (k == (int)COUNT_OF(ids) || wordpiece_id(w, content, strlen(content)) != id)
            die(USAGE,
                "%s: added token %s with the id %d is not supported; only [PAD], [UNK], [CLS], [SEP] and [MASK] are, "
                "with their ids in \"vocab\"",
                path, content, id);
        for (size_t i = 0; i < COUNT_OF(flags); i++)
            if (json_get_bool_or(m, flags[i], 0, path))
                die(USAGE, "%s: the added token %s's \"%s\" is true; only false is supported", path, content, flags[i]);
        found |= 1u << k;
    }
    if (found != (1u << COUNT_OF(ids)) - 1)
        die(USAGE, "%s: has no added token for one of [PAD], [UNK], [CLS], [SEP] and [MASK]", path);
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
    Path lines = path_of("%s/vocab.txt", directory), whole = path_of("%s/tokenizer.json", directory);
    WordPieceRules rules = {.is_lower = 1, .splits_ideographs = 1, .strips_accents = -1};
    memset(w, 0, sizeof(*w));
    if (file_exists(lines.text)) {
        wordpiece_read_lines(w, lines.text);
        wordpiece_index(w, lines.text);
    } else if (file_exists(whole.text)) {
        Json json;
        json_load(&json, whole.text, TOKENIZER_MAX_FILE);
        wordpiece_read_vocabulary(w, json.root, whole.text);
        wordpiece_index(w, whole.text);
        wordpiece_read_normalizer(&rules, json.root, whole.text);
        const JsonNode* splitter = json_need(json.root, "pre_tokenizer", JSON_OBJECT, whole.text);
        wordpiece_expect(splitter, "type", "BertPreTokenizer", "pre_tokenizer", whole.text);
        wordpiece_check_added(w, json.root, whole.text);
        json_free(&json);
    }
    if (w->size > 0) wordpiece_set_rules(w, rules, directory, letter_case);
    return w->size > 0 ? 0 : -1;
}

// Bytes begin .. end - 1 of a text.
typedef struct {
    uint32_t begin, end;
} TextSpan;

// Zero-initialise it. Set `has_origins` before the first token to record the place of each token in the text.
typedef struct {
    int* id;
    size_t count, capacity;
    int has_origins;
    TextSpan* origin;  // [count]
} TokenIds;

// Append a token that comes from bytes begin .. end - 1.
static inline void token_ids_add_from(TokenIds* t, int id, size_t begin, size_t end) {
    size_t capacity = t->capacity;
    t->id = (int*)array_reserve(t->id, &t->capacity, t->count + 1, sizeof *t->id);
    if (t->has_origins) {
        t->origin = (TextSpan*)array_reserve(t->origin, &capacity, t->count + 1, sizeof *t->origin);
        t->origin[t->count].begin = (uint32_t)begin, t->origin[t->count].end = (uint32_t)end;
    }
    t->id[t->count++] = id;
}

static inline void token_ids_add(TokenIds* t, int id) { token_ids_add_from(t, id, 0, 0); }

static inline void token_ids_free(TokenIds* t) {
    free(t->id), free(t->origin);
    memset(t, 0, sizeof *t);
}

// ---------------------------------------------------------------------------------------------------------
// Text to tokens

static inline void wordpiece_put(Text* word, uint32_t c) {
    char bytes[4];
    text_append(word, bytes, utf8_encode(bytes, c));
}

// A word in the form that is looked up. If requested, also the character of the text that each of its bytes comes from.
typedef struct {
    Text text;
    TextSpan* origin;  // [text.length]
    size_t capacity;
} WordPieceWord;

static inline void wordpiece_add(const TokenIds* out, WordPieceWord* word, uint32_t c, size_t begin, size_t end) {
    size_t i = word->text.length;
    wordpiece_put(&word->text, c);
    if (!out->has_origins) return;
    word->origin = (TextSpan*)array_reserve(word->origin, &word->capacity, word->text.length, sizeof *word->origin);
    for (; i < word->text.length; i++) word->origin[i].begin = (uint32_t)begin, word->origin[i].end = (uint32_t)end;
}

// Append a token made of bytes begin .. end - 1 of the word.
static inline void wordpiece_add_token(TokenIds* out, const WordPieceWord* word, int id, size_t begin, size_t end) {
    if (out->has_origins) token_ids_add_from(out, id, word->origin[begin].begin, word->origin[end - 1].end);
    else token_ids_add(out, id);
}

// Cut a word into tokens, and empty it.
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

// Write the character, lower-cased and stripped of accents as the vocabulary requires. Returns how many characters it
// becomes, 0 to 3.
static inline int wordpiece_normalize(const WordPiece* w, uint32_t out[3], uint32_t c) {
    int n = 1;
    out[0] = c;
    if (w->strips_accents) n = unicode_strip(out, c);
    else if (w->letter_case == UNCASED && c == 0x130) n = 2, out[0] = 'i', out[1] = 0x307;
    for (int k = 0; k < n && w->letter_case == UNCASED; k++) out[k] = unicode_lower(out[k]);
    return n;
}

// Encode bytes begin .. end - 1 of a text, which contain no special tokens.
static inline void wordpiece_encode_plain(TokenIds* out, const WordPiece* w, const char* text, size_t begin,
                                          size_t end) {
    WordPieceWord word;
    memset(&word, 0, sizeof word);
    for (size_t i = begin, next; i < end; i = next) {
        int32_t decoded = utf8_decode(text + i, end - i, &next);
        uint32_t c = (uint32_t)decoded, form[3];
        next += i;
        if (decoded < 0 || unicode_is_removed(c)) continue;
        if (unicode_is_space(c)) {
            wordpiece_cut(out, w, &word);
            continue;
        }
        int is_word = w->splits_ideographs && unicode_is_ideograph(c), n = wordpiece_normalize(w, form, c);
        for (int k = 0; k < n; k++) {
            if (is_word || unicode_is_punctuation(form[k])) wordpiece_add_alone(out, w, &word, form[k], i, next);
            else wordpiece_add(out, &word, form[k], i, next);
        }
    }
    wordpiece_cut(out, w, &word);
    free(word.text.text), free(word.origin);
}

// The special token at the start of `text`, -1 if there is none.
static inline int wordpiece_special_at(const WordPiece* w, const char* text, size_t n) {
    const int ids[] = {w->pad, w->unk, w->cls, w->sep, w->mask};
    for (size_t i = 0; i < COUNT_OF(ids) && n > 0 && text[0] == '['; i++) {
        size_t length;
        const char* name = wordpiece_token(w, ids[i], &length);
        if (n >= length && memcmp(text, name, length) == 0) return ids[i];
    }
    return -1;
}

// Append the tokens of a text; the caller adds [CLS] and [SEP].
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

// Append the text of n tokens: words separated by a space, except before .,!?; "##" pieces joined to the word.
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
