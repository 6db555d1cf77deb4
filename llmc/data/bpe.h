/* Text to the tokens of a byte-level BPE vocabulary, as GPT-2's tokenizer makes them; tokenizer.h goes the other way.
 *
 * A text is cut into words: a contraction ('s 't 're 've 'm 'll 'd), or a run of letters, of numbers, or of anything
 * else that is no white space, each with a space before it where there is one. Of white space before a word the last
 * character is left for that word. A word's bytes are its first symbols; of all neighbours that the merges know, the
 * pair of the lowest rank becomes one symbol, the leftmost first, until no merge applies. What is left are the tokens.
 *
 * The tokens are those of Hugging Face's `tokenizers` for every text. Bytes that are no UTF-8 become U+FFFD, one for
 * each beginning of a character that is not completed and for each other byte, as Python's decode(errors="replace")
 * does it. Tokens that a tokenizer would add around a text are not added.
 *
 * A word of n bytes takes n log n steps; short words are remembered. 50,000 merges take 2 MB, remembered words 1 MB.
 *
 * Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; Sennrich et al., "Neural machine
 * translation of rare words with subword units", 2016. */
#ifndef LLMC_BPE_H
#define LLMC_BPE_H

#include "tokenizer.h"
#include "unicode_classes.h"

enum { BPE_CACHED_BYTES = 30, BPE_CACHED_IDS = 8, BPE_CACHE = 1 << 14 };

// What becomes of a special token such as <|endoftext|> in a text: it is encoded as any text, or is that token.
typedef enum { AS_TEXT, AS_TOKEN } SpecialTokens;

// Two neighbours become one.
typedef struct {
    int left, right;  // -1: a free slot of the table
    int rank, id;
} BpeMerge;

// A token that is looked for in the text as it is, before the text is cut into words.
typedef struct {
    char* text;
    size_t length;
    int id, is_special, round;
} BpeAdded;

// Tokens are looked for in two rounds, the second between the finds of the first: those that a normalized text would be
// searched for come second. The files that are read here normalize nothing, but the order matters where tokens overlap.
enum { BPE_ROUNDS = 2 };

// A word of `length` bytes (0: none) and its tokens.
typedef struct {
    unsigned char length, count;
    char bytes[BPE_CACHED_BYTES];
    int id[BPE_CACHED_IDS];
} BpeCached;

// A symbol of a word that is being merged. Those that are left form a list.
typedef struct {
    int id, previous, next;  // -1: merged into the one before; none
} BpeSymbol;

typedef struct {
    int byte_id[256];
    unsigned char ascii_class[128];  // UnicodeClass
    BpeMerge* merge;                 // [slots] a hash table
    uint32_t slots;                  // a power of 2
    BpeAdded* added;                 // [added_count], the longest first
    size_t added_count;
    unsigned char begins[BPE_ROUNDS][256];  // does an added token begin with this byte?
    BpeCached* cache;                       // [BPE_CACHE]
    BpeSymbol* symbol;                      // [room]
    uint64_t* queue;                        // [2 * room] a heap of rank << 32 | place, the least on top
    size_t room, queued;
} Bpe;

static inline uint32_t bpe_hash(const char* bytes, size_t n) {
    uint32_t hash = 2166136261u;  // FNV-1a
    for (size_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)bytes[i]) * 16777619u;
    return hash ^ hash >> 15;
}

// Where the merge of two symbols is in the table, or the free slot where it belongs.
static inline BpeMerge* bpe_merge_slot(const Bpe* b, int left, int right) {
    uint64_t hash = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;
    for (uint32_t i = (uint32_t)(hash >> 40) & (b->slots - 1);; i = (i + 1) & (b->slots - 1)) {
        BpeMerge* m = &b->merge[i];
        if (m->left < 0 || (m->left == left && m->right == right)) return m;
    }
}

// ---------------------------------------------------------------------------------------------------------
// The files

// What is needed while they are read: the vocabulary by its spellings.
typedef struct {
    Bpe* bpe;
    char *vocabulary, *merges;    // file names, one and the same for tokenizer.json
    const JsonNode** slot;        // a hash table, NULL for none
    uint32_t slots, merge_count;  // a power of 2; merges so far
} BpeFiles;

static inline uint32_t bpe_table_size(size_t entries) {
    uint32_t slots = 64;
    while (slots < 2 * entries) slots *= 2;
    return slots;
}

static inline const JsonNode** bpe_token_slot(const BpeFiles* f, const char* spelling, size_t n) {
    for (uint32_t i = bpe_hash(spelling, n) & (f->slots - 1);; i = (i + 1) & (f->slots - 1)) {
        const JsonNode* m = f->slot[i];
        if (!m || (m->key_length == n && memcmp(m->key, spelling, n) == 0)) return &f->slot[i];
    }
}

// The id of a token by its spelling, -1 where there is none.
static inline int bpe_token_id(const BpeFiles* f, const char* spelling, size_t n) {
    const JsonNode* found = *bpe_token_slot(f, spelling, n);
    return found ? (int)found->integer : -1;
}

static inline void bpe_read_vocabulary(BpeFiles* f, const JsonNode* vocabulary) {
    int byte_of[BYTE_ALPHABET_END];
    if (!vocabulary || vocabulary->type != JSON_OBJECT || vocabulary->count == 0)
        die(USAGE, "%s: holds no object of tokens and their ids; the file is damaged or of another kind",
            f->vocabulary);
    f->slots = bpe_table_size(vocabulary->count);
    f->slot = (const JsonNode**)xcalloc(f->slots, sizeof(f->slot[0]));
    for (const JsonNode* m = vocabulary->first; m; m = m->next) {
        tokenizer_id(m, f->vocabulary, m->key);
        *bpe_token_slot(f, m->key, m->key_length) = m;
    }
    byte_alphabet(byte_of);
    for (int c = 0; c < BYTE_ALPHABET_END; c++) {
        if (byte_of[c] < 0) continue;
        char spelling[2] = {(char)c, 0};
        if (c >= 0x80) spelling[0] = (char)(0xC0 | c >> 6), spelling[1] = (char)(0x80 | (c & 63));
        int id = bpe_token_id(f, spelling, c < 0x80 ? 1 : 2);
        if (id < 0)
            die(USAGE, "%s: has no token for the byte 0x%02x, so that not every text can be encoded with it",
                f->vocabulary, (unsigned)byte_of[c]);
        f->bpe->byte_id[byte_of[c]] = id;
    }
}

static inline void bpe_reserve_merges(BpeFiles* f, size_t most) {
    f->bpe->slots = bpe_table_size(most);
    f->bpe->merge = (BpeMerge*)xmalloc(f->bpe->slots * sizeof(BpeMerge));
    for (uint32_t i = 0; i < f->bpe->slots; i++) f->bpe->merge[i].left = -1;
}

static inline int bpe_symbol_id(const BpeFiles* f, const char* spelling, size_t n) {
    int id = bpe_token_id(f, spelling, n);
    if (id < 0) {
        Text quoted = {NULL, 0, 0};
        text_json_string(&quoted, spelling, min_size(n, 80));
        die(USAGE, "%s: merge %u: %s is not in the vocabulary in %s; both must be of one tokenizer", f->merges,
            f->merge_count + 1, quoted.text, f->vocabulary);
    }
    return id;
}

// The next merge, spelled as two symbols with a space between them.
static inline void bpe_add_merge(BpeFiles* f, const char* spelling, size_t n) {
    const char* space = (const char*)memchr(spelling, ' ', n);
    size_t left = space ? (size_t)(space - spelling) : 0, right = space ? n - left - 1 : 0;
    if (left == 0 || right == 0 || memchr(space + 1, ' ', right))
        die(USAGE, "%s: merge %u is not two symbols with a space between them; the file is damaged", f->merges,
            f->merge_count + 1);
    char* joined = (char*)xmalloc(n);
    memcpy(joined, spelling, left);
    memcpy(joined + left, space + 1, right);
    int left_id = bpe_symbol_id(f, spelling, left), right_id = bpe_symbol_id(f, space + 1, right);
    BpeMerge* m = bpe_merge_slot(f->bpe, left_id, right_id);
    m->left = left_id, m->right = right_id;
    m->id = bpe_symbol_id(f, joined, left + right);
    m->rank = (int)f->merge_count++;
    free(joined);
}

// One merge a line; a first line that begins with #version is none.
static inline void bpe_read_merge_lines(BpeFiles* f) {
    size_t n, lines = 1;
    char* text = read_file(f->merges, TOKENIZER_MAX_FILE, &n, USAGE);
    for (size_t i = 0; i < n; i++) lines += text[i] == '\n';
    bpe_reserve_merges(f, min_size(lines, n / 4 + 1));  // a line of a merge has four bytes at least
    for (size_t begin = 0, end; begin < n; begin = end + 1) {
        for (end = begin; end < n && text[end] != '\n';) end++;
        size_t length = end - begin - (end > begin && text[end - 1] == '\r');
        int is_version = begin == 0 && length >= 8 && memcmp(text, "#version", 8) == 0;
        if (length > 0 && !is_version) bpe_add_merge(f, text + begin, length);
    }
    free(text);
}

// An array of merges, each a string or an array of two.
static inline void bpe_read_merge_array(BpeFiles* f, const JsonNode* merges) {
    if (!merges || merges->type != JSON_ARRAY)
        die(USAGE, "%s: its model has no array of merges; the file is damaged or of another kind", f->merges);
    bpe_reserve_merges(f, merges->count);
    for (const JsonNode* m = merges->first; m; m = m->next) {
        const JsonNode *left = m->type == JSON_ARRAY && m->count == 2 ? m->first : NULL,
                       *right = left ? left->next : NULL;
        Text pair = {NULL, 0, 0};
        if (m->type == JSON_STRING) text_append(&pair, m->string, m->length);
        if (right && left->type == JSON_STRING && right->type == JSON_STRING) {
            text_append(&pair, left->string, left->length);
            text_append(&pair, " ", 1);
            text_append(&pair, right->string, right->length);
        }
        bpe_add_merge(f, pair.text ? pair.text : "", pair.length);
        free(pair.text);
    }
}

static inline void bpe_add_token(Bpe* b, const char* text, size_t n, int id, int is_special, int round) {
    b->added = (BpeAdded*)xrealloc(b->added, (b->added_count + 1) * sizeof(BpeAdded));
    BpeAdded* a = &b->added[b->added_count++];
    a->text = (char*)xmalloc(n);
    memcpy(a->text, text, n);
    a->length = n, a->id = id, a->is_special = is_special, a->round = round;
    b->begins[round][(unsigned char)text[0]] = 1;
}

static inline int bpe_compare_added(const void* left, const void* right) {
    const BpeAdded *a = (const BpeAdded*)left, *b = (const BpeAdded*)right;
    return a->length != b->length ? (a->length < b->length ? 1 : -1) : memcmp(a->text, b->text, a->length);
}

static inline void bpe_read_added(Bpe* b, const JsonNode* added, const char* file) {
    static const char* const unknown[] = {"single_word", "lstrip", "rstrip"};
    for (const JsonNode* m = added && added->type == JSON_ARRAY ? added->first : NULL; m; m = m->next) {
        const JsonNode* content = json_need(m, "content", JSON_STRING, file);
        int is_special = json_get_bool_or(m, "special", 0, file);
        for (size_t i = 0; i < COUNT_OF(unknown); i++)
            if (json_get_bool_or(m, unknown[i], 0, file))
                die(USAGE, "%s: token \"%s\": has \"%s\", which is not known here; text cannot be encoded", file,
                    content->string, unknown[i]);
        if (content->length > 0)
            bpe_add_token(b, content->string, content->length, tokenizer_id(json_get(m, "id"), file, content->string),
                          is_special, json_get_bool_or(m, "normalized", !is_special, file) ? 1 : 0);
    }
    if (b->added_count > 0) qsort(b->added, b->added_count, sizeof(BpeAdded), bpe_compare_added);
}

static inline void bpe_refuse(const char* file, const char* key) {
    die(USAGE, "%s: key \"%s\": another value than in GPT-2's tokenizer; text cannot be encoded with it", file, key);
}

// Does tokenizer.json say that a text is treated as GPT-2's tokenizer does it?
static inline void bpe_check_kind(const JsonNode* root, const char* file) {
    static const char* const absent[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"};
    const JsonNode *pre = json_get(root, "pre_tokenizer"), *model = json_get(root, "model");
    if (json_has(root, "normalizer")) bpe_refuse(file, "normalizer");
    if (!pre || pre->type != JSON_OBJECT || strcmp(json_get_string_or(pre, "type", "", file), "ByteLevel") != 0)
        bpe_refuse(file, "pre_tokenizer");
    if (json_get_bool_or(pre, "add_prefix_space", 1, file)) bpe_refuse(file, "add_prefix_space");
    if (!json_get_bool_or(pre, "use_regex", 1, file)) bpe_refuse(file, "use_regex");
    if (strcmp(json_get_string_or(model, "type", "BPE", file), "BPE") != 0) bpe_refuse(file, "type");
    for (size_t i = 0; i < COUNT_OF(absent); i++) {
        const JsonNode* m = json_get(model, absent[i]);
        if (m && (m->length > 0 || m->integer != 0)) bpe_refuse(file, absent[i]);  // a text, a number or true
    }
}

static inline char* bpe_first_file(const char* directory, const char* const* names, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char* file = xprintf("%s/%s", directory, names[i]);
        if (file_exists(file)) return file;
        free(file);
    }
    return NULL;
}

static inline void bpe_free(Bpe* b) {
    for (size_t i = 0; i < b->added_count; i++) free(b->added[i].text);
    free(b->added);
    free(b->merge);
    free(b->cache);
    free(b->symbol);
    free(b->queue);
    memset(b, 0, sizeof(*b));
}

// Returns 0, or -1 where `directory` holds neither tokenizer.json nor a vocabulary. Ends with USAGE where it holds one
// that is damaged, has no merges beside it, or treats a text in another way than GPT-2's.
static inline int bpe_open(Bpe* b, const char* directory) {
    static const char* const vocabularies[] = {"tokenizer.json", "vocab.json", "encoder.json"};
    static const char* const merges[] = {"merges.txt", "vocab.bpe"};
    BpeFiles f;
    Json json;
    memset(b, 0, sizeof(*b));
    memset(&f, 0, sizeof(f));
    f.bpe = b;
    f.vocabulary = bpe_first_file(directory, vocabularies, COUNT_OF(vocabularies));
    if (!f.vocabulary) return -1;
    json_load(&json, f.vocabulary, TOKENIZER_MAX_FILE);
    if (strcmp(strrchr(f.vocabulary, '/'), "/tokenizer.json") == 0) {
        const JsonNode* model = json_get(json.root, "model");
        f.merges = xprintf("%s", f.vocabulary);
        bpe_check_kind(json.root, f.vocabulary);
        bpe_read_vocabulary(&f, json_get(model, "vocab"));
        bpe_read_merge_array(&f, json_get(model, "merges"));
        bpe_read_added(b, json_get(json.root, "added_tokens"), f.vocabulary);
    } else {
        f.merges = bpe_first_file(directory, merges, COUNT_OF(merges));
        if (!f.merges)
            die(USAGE, "%s: has neither merges.txt nor vocab.bpe beside it, without which no text can be encoded",
                f.vocabulary);
        bpe_read_vocabulary(&f, json.root);
        bpe_read_merge_lines(&f);
        int end_of_text = bpe_token_id(&f, "<|endoftext|>", 13);
        if (end_of_text >= 0) bpe_add_token(b, "<|endoftext|>", 13, end_of_text, 1, 0);
    }
    json_free(&json);
    free(f.slot);
    free(f.vocabulary);
    free(f.merges);
    b->cache = (BpeCached*)xcalloc(BPE_CACHE, sizeof(BpeCached));
    for (uint32_t c = 0; c < 128; c++) b->ascii_class[c] = (unsigned char)unicode_class(c);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------
// Text to words

// Bytes of the valid UTF-8 that a text begins with.
static inline size_t bpe_valid_bytes(const char* text, size_t n) {
    size_t i = 0;
    for (size_t bytes; i < n && (bytes = utf8_sequence(text + i, n - i)) > 0; i += bytes) continue;
    return i;
}

// Bytes at `text`, where no character is, that together become one U+FFFD.
static inline size_t bpe_invalid_bytes(const char* text, size_t n) {
    const unsigned char* p = (const unsigned char*)text;
    size_t need = p[0] < 0xC2 || p[0] > 0xF4 ? 1 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4, i = 1;
    int least = p[0] == 0xE0   ? 0xA0
                : p[0] == 0xF0 ? 0x90
                               : 0x80,
        most = p[0] == 0xED   ? 0x9F
               : p[0] == 0xF4 ? 0x8F
                              : 0xBF;
    for (; i < need && i < n && p[i] >= least && p[i] <= most; i++) least = 0x80, most = 0xBF;
    return i;
}

// The text with U+FFFD for what is no UTF-8, added to `out`.
static inline void bpe_repair(Text* out, const char* text, size_t n) {
    for (size_t i = 0; i < n; i += bpe_invalid_bytes(text + i, n - i)) {
        size_t valid = bpe_valid_bytes(text + i, n - i);
        text_append(out, text + i, valid);
        i += valid;
        if (i == n) break;
        text_append(out, "\xEF\xBF\xBD", 3);
    }
}

// The class of the character at `text`, which is valid UTF-8, and its number of bytes.
static inline UnicodeClass bpe_class(const Bpe* b, const char* text, size_t* bytes) {
    const unsigned char* p = (const unsigned char*)text;
    *bytes = p[0] < 0x80 ? 1 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    if (*bytes == 1) return (UnicodeClass)b->ascii_class[p[0]];
    uint32_t c = p[0] & (0x7Fu >> *bytes);
    for (size_t i = 1; i < *bytes; i++) c = c << 6 | (p[i] & 0x3F);
    return unicode_class(c);
}

// Bytes of the contraction that a text begins with, 0 for none.
static inline size_t bpe_contraction(const char* text, size_t n) {
    if (n < 2 || text[0] != '\'') return 0;
    if (strchr("stmd", text[1]) && text[1]) return 2;
    int is_two = n > 2 && ((text[1] == 'r' && text[2] == 'e') || (text[1] == 'v' && text[2] == 'e') ||
                           (text[1] == 'l' && text[2] == 'l'));
    return is_two ? 3 : 0;
}

// Bytes of the word that a text of n > 0 bytes begins with.
static inline size_t bpe_word(const Bpe* b, const char* text, size_t n) {
    size_t end = bpe_contraction(text, n), last = 0, bytes;
    if (end > 0) return end;
    if (text[0] == ' ' && n > 1) end = 1;  // goes with what comes after it
    UnicodeClass first = bpe_class(b, text + end, &bytes);
    for (; end < n && bpe_class(b, text + end, &bytes) == first; end += bytes) last = end;
    return first == UNICODE_SPACE && end < n && last > 0 ? last : end;
}

// ---------------------------------------------------------------------------------------------------------
// Words to tokens

// Queue the merge of the symbol at `place` with the next one, where there is one.
static inline void bpe_push(Bpe* b, int place) {
    const BpeSymbol* s = &b->symbol[place];
    if (s->next < 0) return;
    const BpeMerge* m = bpe_merge_slot(b, s->id, b->symbol[s->next].id);
    if (m->left < 0) return;
    uint64_t item = (uint64_t)m->rank << 32 | (uint32_t)place;
    size_t i = b->queued++;
    for (; i > 0 && b->queue[(i - 1) / 2] > item; i = (i - 1) / 2) b->queue[i] = b->queue[(i - 1) / 2];
    b->queue[i] = item;
}

static inline uint64_t bpe_pop(Bpe* b) {
    uint64_t top = b->queue[0], item = b->queue[--b->queued];
    size_t i = 0, n = b->queued;
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && b->queue[child + 1] < b->queue[child]) child++;
        if (b->queue[child] >= item) break;
        b->queue[i] = b->queue[child];
    }
    b->queue[i] = item;
    return top;
}

// The tokens of one word, to ids [n]. Returns their number.
static inline size_t bpe_merge(int* ids, Bpe* b, const char* word, size_t n) {
    CHECK(n > 0 && n <= INT32_MAX);
    if (n > b->room) {
        b->room = 2 * n + 64;
        b->symbol = (BpeSymbol*)xrealloc(b->symbol, b->room * sizeof(BpeSymbol));
        b->queue = (uint64_t*)xrealloc(b->queue, 2 * b->room * sizeof(uint64_t));
    }
    BpeSymbol* s = b->symbol;
    for (size_t i = 0; i < n; i++) {
        s[i].id = b->byte_id[(unsigned char)word[i]];
        s[i].previous = (int)i - 1, s[i].next = i + 1 < n ? (int)i + 1 : -1;
    }
    b->queued = 0;
    for (size_t i = 0; i < n; i++) bpe_push(b, (int)i);
    while (b->queued > 0) {
        uint64_t item = bpe_pop(b);
        int here = (int)(item & UINT32_MAX), rank = (int)(item >> 32), next = s[here].next;
        if (s[here].id < 0 || next < 0) continue;
        const BpeMerge* m = bpe_merge_slot(b, s[here].id, s[next].id);
        if (m->left < 0 || m->rank != rank) continue;  // one of the two is no longer what it was
        s[here].id = m->id, s[next].id = -1;
        s[here].next = s[next].next;
        if (s[here].next >= 0) s[s[here].next].previous = here;
        if (s[here].previous >= 0) bpe_push(b, s[here].previous);
        bpe_push(b, here);
    }
    size_t count = 0;
    for (int i = 0; i >= 0; i = s[i].next) ids[count++] = s[i].id;
    return count;
}

// The same from the cache, where the word is in it.
static inline size_t bpe_encode_word(int* ids, Bpe* b, const char* word, size_t n) {
    if (n > BPE_CACHED_BYTES) return bpe_merge(ids, b, word, n);
    BpeCached* c = &b->cache[bpe_hash(word, n) & (BPE_CACHE - 1)];
    if (c->length != n || memcmp(c->bytes, word, n) != 0) {
        size_t count = bpe_merge(ids, b, word, n);
        if (count > BPE_CACHED_IDS) return count;
        c->length = (unsigned char)n, c->count = (unsigned char)count;
        memcpy(c->bytes, word, n);
        memcpy(c->id, ids, count * sizeof(int));
    }
    memcpy(ids, c->id, c->count * sizeof(int));
    return c->count;
}

// The longest added token of this round that a text begins with, NULL for none.
static inline const BpeAdded* bpe_added_at(const Bpe* b, const char* text, size_t n, int round) {
    for (size_t i = 0; i < b->added_count && b->begins[round][(unsigned char)text[0]]; i++) {
        const BpeAdded* a = &b->added[i];
        if (a->round == round && a->length <= n && memcmp(a->text, text, a->length) == 0) return a;
    }
    return NULL;
}

// A text between added tokens that were found in the rounds before this one.
static inline size_t bpe_encode_part(int* ids, Bpe* b, const char* text, size_t n, SpecialTokens special, int round) {
    size_t count = 0, begin = 0;
    if (round == BPE_ROUNDS) {
        for (size_t bytes; begin < n; begin += bytes) {
            bytes = bpe_word(b, text + begin, n - begin);
            count += bpe_encode_word(ids + count, b, text + begin, bytes);
        }
        return count;
    }
    for (size_t i = 0; i < n;) {
        const BpeAdded* a = bpe_added_at(b, text + i, n - i, round);
        i += a ? a->length : 1;
        if (!a || (a->is_special && special == AS_TEXT)) continue;
        count += bpe_encode_part(ids + count, b, text + begin, i - a->length - begin, special, round + 1);
        ids[count++] = a->id;
        begin = i;
    }
    return count + bpe_encode_part(ids + count, b, text + begin, n - begin, special, round + 1);
}

// The tokens of a text, to *ids (caller frees). Returns their number. Not for two threads at a time with one Bpe.
static inline size_t bpe_encode(int** ids, Bpe* b, const char* text, size_t n, SpecialTokens special) {
    Text repaired = {NULL, 0, 0};
    if (bpe_valid_bytes(text, n) < n) {
        bpe_repair(&repaired, text, n);
        text = repaired.text, n = repaired.length;
    }
    *ids = (int*)xmalloc(n * sizeof(int));  // no token is shorter than a byte
    size_t count = bpe_encode_part(*ids, b, text, n, special, 0);
    *ids = (int*)xrealloc(*ids, count * sizeof(int));
    free(repaired.text);
    return count;
}

#endif
