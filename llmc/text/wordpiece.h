/* Text to the tokens of a WordPiece vocabulary and back, like BERT's tokenizer. wordpiece_files.h reads the files.
 *
 * Control characters are removed from the text and, for an uncased vocabulary, it is lower-cased and stripped of
 * accents. It is split at white space and around punctuation and CJK ideographs. Each word is cut from its left into
 * the longest tokens of the vocabulary; those after the first are spelled "##...". A word that cannot be cut this way,
 * or has more than 100 characters, becomes [UNK]. [PAD], [UNK], [CLS], [SEP] and [MASK] in a text stand for themselves.
 * Characters are treated as in Hugging Face's `tokenizers`, except that marks that are not stripped, such as musical
 * symbols, stay in the order of the text.
 *
 * Wu et al., "Google's neural machine translation system", 2016; Devlin et al., "BERT", 2018. */
#ifndef LLMC_TEXT_WORDPIECE_H
#define LLMC_TEXT_WORDPIECE_H

#include "llmc/text/unicode.h"
#include "llmc/text/wordpiece_files.h"

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
