/* How well one text matches another, by SQuAD's metrics: exact match, and F1 of the words in common.
 *
 * Both are compared in lower case, without ASCII punctuation, without the articles a, an and the, and with one space
 * between words. Letters, digits and white space are Unicode's, as in the official Python scripts. Two things differ:
 * U+03C2 counts as U+03C3 (Python lower-cases a sigma at the end of a word to U+03C2), and characters added after
 * Unicode 14 may be of another class.
 *
 * If one of the two texts normalizes to nothing, F1 is 0 in v1.1; in v2.0 it is 1 if both do. */
#ifndef APPS_TUNE_SQUAD_MATCH_H
#define APPS_TUNE_SQUAD_MATCH_H

#include "llmc/text/wordpiece.h"

typedef struct {
    const char* text;
    size_t length;
} SquadWord;

typedef struct {
    double exact, f1;
} SquadMatch;

static inline int squad_compare_words(const void* left, const void* right) {
    const SquadWord *a = (const SquadWord*)left, *b = (const SquadWord*)right;
    int order = memcmp(a->text, b->text, min_size(a->length, b->length));
    return order ? order : (a->length > b->length) - (a->length < b->length);
}

// ---------------------------------------------------------------------------------------------------------
// Normalization

typedef struct {
    Text* out;
    int in_word;  // `out` ends with letters and digits, which begin at `word`
    size_t word;
    int has_gap;  // there is white space before the next character
} SquadNormalizer;

// The word at the end of `out` is complete: remove it if it is an article.
static inline void squad_end_word(SquadNormalizer* z) {
    static const char* const articles[] = {"a", "an", "the"};
    Text* out = z->out;
    int is_article = 0;
    for (size_t i = 0; i < COUNT_OF(articles) && z->in_word; i++) {
        size_t n = strlen(articles[i]);
        is_article |= out->length - z->word == n && memcmp(out->text + z->word, articles[i], n) == 0;
    }
    z->in_word = 0;
    if (!is_article) return;
    out->length = z->word > 0 && out->text[z->word - 1] == ' ' ? z->word - 1 : z->word;
    z->has_gap = 1;
}

static inline void squad_put(SquadNormalizer* z, uint32_t c) {
    int is_ascii_punctuation = c > ' ' && c < 0x7F && unicode_is_punctuation(c);
    if (is_ascii_punctuation) return;
    UnicodeClass kind = unicode_class(c);
    int is_letter_or_digit = kind == UNICODE_LETTER || kind == UNICODE_NUMBER;
    if (!is_letter_or_digit) squad_end_word(z);
    if (kind == UNICODE_SPACE || (c >= 0x1C && c <= 0x1F)) {
        z->has_gap = 1;
        return;
    }
    if (z->has_gap && z->out->length) text_append(z->out, " ", 1);
    z->has_gap = 0;
    if (is_letter_or_digit && !z->in_word) z->in_word = 1, z->word = z->out->length;
    wordpiece_put(z->out, c);
}

// Replace `out` by the normalized text.
static inline void squad_normalize(Text* out, const char* text, size_t n) {
    SquadNormalizer z = {.out = out};
    out->length = 0;
    for (size_t i = 0, bytes; i < n; i += bytes) {
        int32_t decoded = utf8_decode(text + i, n - i, &bytes);
        uint32_t c = unicode_lower(decoded < 0 ? 0xFFFD : (uint32_t)decoded);
        squad_put(&z, c == 0x130 ? 'i' : c == 0x3C2 ? 0x3C3 : c);
        if (c == 0x130) squad_put(&z, 0x307);  // lower-cases to two characters
    }
    squad_end_word(&z);
    text_append(out, "", 0);
}

// ---------------------------------------------------------------------------------------------------------
// Comparison

// The words of a normalized text, sorted by their bytes (caller frees). Returns their number.
static inline size_t squad_split(SquadWord** words, const Text* t) {
    size_t count = 0;
    *words = (SquadWord*)xmalloc((t->length / 2 + 1) * sizeof **words);
    for (size_t i = 0; i < t->length; i++, count++) {
        SquadWord* word = &(*words)[count];
        word->text = t->text + i;
        while (i < t->length && t->text[i] != ' ') i++;
        word->length = (size_t)(t->text + i - word->text);
    }
    qsort(*words, count, sizeof **words, squad_compare_words);
    return count;
}

// Compare an answer with a gold answer, both normalized.
static inline SquadMatch squad_match(const Text* answer, const Text* gold, int is_v2) {
    SquadWord *a, *b;
    SquadMatch match = {0, 0};
    size_t n = squad_split(&a, answer), m = squad_split(&b, gold), common = 0;
    for (size_t i = 0, k = 0; i < n && k < m;) {
        int order = squad_compare_words(&a[i], &b[k]);
        common += order == 0;
        i += order <= 0, k += order >= 0;
    }
    free(a), free(b);
    match.exact = answer->length == gold->length && memcmp(answer->text, gold->text, gold->length) == 0;
    if (common) {
        double precision = (double)common / (double)n, recall = (double)common / (double)m;
        match.f1 = 2 * precision * recall / (precision + recall);
    } else if (is_v2 && (n == 0 || m == 0)) {
        match.f1 = n == m;
    }
    return match;
}

#endif
