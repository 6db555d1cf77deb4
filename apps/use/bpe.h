/* Text to the tokens of a byte-level BPE vocabulary, like GPT-2's tokenizer. tokenizer.h decodes; bpe_files.h reads the
 * files.
 *
 * A text is split into words: a contraction ('s 't 're 've 'm 'll 'd), or a run of letters, of numbers, or of anything
 * else except white space, each with the space before it if there is one. Of white space before a word, the last
 * character belongs to that word. The bytes of a word are its first symbols. Then, as long as a merge applies, the pair
 * of neighbours with the lowest rank (the leftmost of equal ones) becomes one symbol. The remaining symbols are the
 * tokens.
 *
 * The tokens are those of Hugging Face's `tokenizers`, except where added tokens overlap in a text: here the first wins,
 * and of those that begin together the longest. Invalid UTF-8 becomes U+FFFD, as in Python's decode(errors="replace").
 * Tokens that a tokenizer would add around a text are not added. A vocabulary need not have a token for every byte; a
 * text with a missing one is refused, where the library drops the byte or writes an unknown token.
 *
 * A word of n bytes in which m different merges apply takes O(n * m) steps. That suits prompts: words are short.
 *
 * Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; Sennrich et al., "Neural machine
 * translation of rare words with subword units", 2016. */
#ifndef APPS_USE_BPE_H
#define APPS_USE_BPE_H

#include "apps/use/bpe_files.h"
#include "llmc/text/unicode.h"

// How a special token such as <|endoftext|> in a text is encoded: like any other text, or as that token.
typedef enum { AS_TEXT, AS_TOKEN } SpecialTokens;

// ---------------------------------------------------------------------------------------------------------
// Text to words

// Append the text to `out`, with U+FFFD for invalid UTF-8.
static inline void bpe_repair(Text* out, const char* text, size_t n) {
    for (size_t i = 0, bytes; i < n; i += bytes) {
        int is_valid = utf8_decode(text + i, n - i, &bytes) >= 0;
        text_append(out, is_valid ? text + i : "\xEF\xBF\xBD", is_valid ? bytes : 3);
    }
}

// The class of the character at `text`, which is valid UTF-8, and its number of bytes.
static inline UnicodeClass bpe_class(const char* text, size_t n, size_t* bytes) {
    return unicode_class((uint32_t)utf8_decode(text, n, bytes));
}

// Bytes of the contraction at the start of a text, 0 if there is none.
static inline size_t bpe_contraction(const char* text, size_t n) {
    if (n < 2 || text[0] != '\'') return 0;
    if (strchr("stmd", text[1]) && text[1]) return 2;
    int is_two = n > 2 && ((text[1] == 'r' && text[2] == 'e') || (text[1] == 'v' && text[2] == 'e') ||
                           (text[1] == 'l' && text[2] == 'l'));
    return is_two ? 3 : 0;
}

// Bytes of the word at the start of a text of n > 0 bytes.
static inline size_t bpe_word(const char* text, size_t n) {
    size_t end = bpe_contraction(text, n), last = 0, bytes;
    if (end > 0) return end;
    if (text[0] == ' ' && n > 1) end = 1;  // belongs to the word after it
    UnicodeClass first = bpe_class(text + end, n - end, &bytes);
    for (; end < n && bpe_class(text + end, n - end, &bytes) == first; end += bytes) last = end;
    return first == UNICODE_SPACE && end < n && last > 0 ? last : end;
}

// ---------------------------------------------------------------------------------------------------------
// Words to tokens

enum { BPE_NO_MERGE = INT32_MAX };

// The merge of two neighbours, NULL for none.
static inline const BpeMerge* bpe_find_merge(const Bpe* b, int left, int right) {
    const BpeMerge* m = bpe_merge_slot(b, left, right);
    return m->left < 0 ? NULL : m;
}

// The symbols of a word while it is merged. rank [i] is that of the merge of symbols i and i + 1, or BPE_NO_MERGE.
typedef struct {
    int *id, *rank;
    size_t count;
} BpeSymbols;

static inline void bpe_set_rank(const Bpe* b, BpeSymbols* s, size_t i, int right) {
    const BpeMerge* m = right < 0 ? NULL : bpe_find_merge(b, s->id[i], right);
    s->rank[i] = m ? m->rank : BPE_NO_MERGE;
}

// Make all merges of rank `lowest`, the lowest rank in the word, from left to right. A merge may form pairs of a lower
// or the same rank with its neighbours. Those come first: lower before higher rank, left before right.
static inline void bpe_merge_lowest(const Bpe* b, BpeSymbols* s, int lowest) {
    size_t to = 0;  // symbols before it are done; those from i on are unchanged
    for (size_t i = 0; i < s->count;) {
        s->id[to] = s->id[i], s->rank[to++] = s->rank[i++];
        for (;;) {
            int before = to > 1 ? s->rank[to - 2] : BPE_NO_MERGE, after = s->rank[to - 1];
            if (min_int(before, after) > lowest) break;
            if (before <= after) {
                to--;
                s->id[to - 1] = bpe_find_merge(b, s->id[to - 1], s->id[to])->id;
            } else {
                s->id[to - 1] = bpe_find_merge(b, s->id[to - 1], s->id[i])->id;
                i++;
            }
            bpe_set_rank(b, s, to - 1, i < s->count ? s->id[i] : -1);
            if (to > 1) bpe_set_rank(b, s, to - 2, s->id[to - 1]);
        }
    }
    s->count = to;
}

// The tokens of one word, to ids [n]. Returns their number. `rank` [n] is scratch memory.
static inline size_t bpe_merge(int* ids, int* rank, const Bpe* b, const char* word, size_t n) {
    BpeSymbols s = {.id = ids, .rank = rank, .count = n};
    for (size_t i = 0; i < n; i++) {
        ids[i] = b->byte_id[(unsigned char)word[i]];
        if (ids[i] < 0)
            die(USAGE,
                "%s: has no token for the byte 0x%02x, which the text contains; remove it or use another "
                "tokenizer",
                b->vocabulary, (unsigned)(unsigned char)word[i]);
    }
    for (size_t i = 0; i < n; i++) bpe_set_rank(b, &s, i, i + 1 < n ? ids[i + 1] : -1);
    for (;;) {
        int lowest = BPE_NO_MERGE;
        for (size_t i = 0; i < s.count; i++) lowest = min_int(lowest, rank[i]);
        if (lowest == BPE_NO_MERGE) return s.count;
        bpe_merge_lowest(b, &s, lowest);
    }
}

// The longest added token at the start of a text, NULL if there is none.
static inline const BpeAdded* bpe_added_at(const Bpe* b, const char* text, size_t n) {
    for (size_t i = 0; i < b->added_count && b->begins[(unsigned char)text[0]]; i++) {
        const BpeAdded* a = &b->added[i];
        if (a->length <= n && memcmp(a->text, text, a->length) == 0) return a;
    }
    return NULL;
}

// Encode a text between added tokens. Returns the number of tokens; ids and rank have room for n.
static inline size_t bpe_encode_words(int* ids, int* rank, const Bpe* b, const char* text, size_t n) {
    size_t count = 0;
    for (size_t begin = 0, bytes; begin < n; begin += bytes) {
        bytes = bpe_word(text + begin, n - begin);
        count += bpe_merge(ids + count, rank, b, text + begin, bytes);
    }
    return count;
}

// The tokens of a text, to *ids (caller frees). Returns their number.
static inline size_t bpe_encode(int** ids, const Bpe* b, const char* text, size_t n, SpecialTokens special) {
    Text repaired = {NULL, 0, 0};
    text_append(&repaired, "", 0);  // not NULL for an empty text
    bpe_repair(&repaired, text, n);
    n = repaired.length;
    *ids = (int*)xmalloc(n * sizeof(int));  // no token is shorter than a byte
    int* rank = (int*)xmalloc(n * sizeof(int));
    size_t count = 0, begin = 0;
    for (size_t i = 0; i < n;) {
        const BpeAdded* a = bpe_added_at(b, repaired.text + i, n - i);
        i += a ? a->length : 1;
        if (!a || (a->is_special && special == AS_TEXT)) continue;
        count += bpe_encode_words(*ids + count, rank, b, repaired.text + begin, i - a->length - begin);
        (*ids)[count++] = a->id;
        begin = i;
    }
    count += bpe_encode_words(*ids + count, rank, b, repaired.text + begin, n - begin);
    *ids = (int*)xrealloc(*ids, count * sizeof(int));
    free(rank);
    free(repaired.text);
    return count;
}

#endif
