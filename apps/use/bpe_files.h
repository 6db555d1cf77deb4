/* The files of a byte-level BPE vocabulary: tokenizer.json, or vocab.json with merges.txt (encoder.json with vocab.bpe
 * in older releases). They give the token of each byte, the merges, and added tokens. A file with a setting that bpe.h
 * would encode differently is refused, with the name of the key.
 *
 * 50,000 merges take 2 MB. */
#ifndef APPS_USE_BPE_FILES_H
#define APPS_USE_BPE_FILES_H

#include "llmc/text/tokenizer.h"

// A merge of two neighbours into one symbol.
typedef struct {
    int left, right;  // -1: a free slot of the table
    int rank, id;
} BpeMerge;

// A token that is searched for in the text itself, before the text is split into words.
typedef struct {
    char* text;
    size_t length;
    int id, is_special;
} BpeAdded;

typedef struct {
    char* vocabulary;  // name of its file
    int byte_id[256];  // -1: texts with this byte are refused
    BpeMerge* merge;   // [slots] a hash table
    uint32_t slots;    // a power of 2
    BpeAdded* added;   // [added_count], the longest first
    size_t added_count, added_capacity;
    unsigned char begins[256];  // whether an added token begins with this byte
} Bpe;

// The slot of the merge of two symbols, or the free slot where it belongs.
static inline BpeMerge* bpe_merge_slot(const Bpe* b, int left, int right) {
    uint64_t hash = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;
    for (uint32_t i = (uint32_t)(hash >> 40) & (b->slots - 1);; i = (i + 1) & (b->slots - 1)) {
        BpeMerge* m = &b->merge[i];
        if (m->left < 0 || (m->left == left && m->right == right)) return m;
    }
}

// State while reading: the vocabulary by spelling.
typedef struct {
    Bpe* bpe;
    char *vocabulary, *merges;    // file names; the same for tokenizer.json
    const JsonNode** slot;        // a hash table, NULL: free
    uint32_t slots, merge_count;  // a power of 2; merges so far
} BpeFiles;

static inline uint32_t bpe_table_size(size_t entries) {
    uint32_t slots = 64;
    while (slots < 2 * entries) slots *= 2;
    return slots;
}

// ---------------------------------------------------------------------------------------------------------
// Vocabulary

static inline const JsonNode** bpe_token_slot(const BpeFiles* f, const char* spelling, size_t n) {
    for (uint32_t i = (uint32_t)fnv_update(FNV_START, spelling, n) & (f->slots - 1);; i = (i + 1) & (f->slots - 1)) {
        const JsonNode* m = f->slot[i];
        if (!m || (m->key_length == n && memcmp(m->key, spelling, n) == 0)) return &f->slot[i];
    }
}

// The id of a token by its spelling, -1 if there is none.
static inline int bpe_token_id(const BpeFiles* f, const char* spelling, size_t n) {
    const JsonNode* found = *bpe_token_slot(f, spelling, n);
    return found ? (int)found->integer : -1;
}

static inline void bpe_read_vocabulary(BpeFiles* f, const JsonNode* vocabulary) {
    int byte_of[BYTE_ALPHABET_END];
    if (!vocabulary || vocabulary->type != JSON_OBJECT || vocabulary->count == 0)
        die(USAGE, "%s: contains no object of tokens and their ids; the file is damaged or of another kind",
            f->vocabulary);
    f->slots = bpe_table_size(vocabulary->count);
    f->slot = (const JsonNode**)xcalloc(f->slots, sizeof(f->slot[0]));
    for (const JsonNode* m = vocabulary->first; m; m = m->next) {
        tokenizer_id(m, f->vocabulary, m->key);
        *bpe_token_slot(f, m->key, m->key_length) = m;
    }
    byte_alphabet(byte_of);
    for (int c = 0; c < BYTE_ALPHABET_END; c++) {
        char spelling[4];
        if (byte_of[c] >= 0)
            f->bpe->byte_id[byte_of[c]] = bpe_token_id(f, spelling, utf8_encode(spelling, (uint32_t)c));
    }
}

// ---------------------------------------------------------------------------------------------------------
// Merges

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
        die(USAGE, "%s: merge %u: %s is not in the vocabulary in %s; both must come from one tokenizer", f->merges,
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

// One merge per line; a first line that begins with #version is skipped.
static inline void bpe_read_merge_lines(BpeFiles* f) {
    size_t n, lines = 1;
    char* text = read_file(f->merges, TOKENIZER_MAX_FILE, &n, USAGE);
    if (utf8_mark(text, n)) die(USAGE, "%s: begins with a byte order mark; save it without", f->merges);
    for (size_t i = 0; i < n; i++) lines += text[i] == '\n';
    bpe_reserve_merges(f, min_size(lines, n / 4 + 1));  // the line of a merge has at least four bytes
    for (size_t begin = 0, end; begin < n; begin = end + 1) {
        for (end = begin; end < n && text[end] != '\n';) end++;
        size_t length = end - begin - (end > begin && text[end - 1] == '\r');
        int is_version = begin == 0 && length >= 8 && memcmp(text, "#version", 8) == 0;
        if (length > 0 && !is_version) bpe_add_merge(f, text + begin, length);
    }
    free(text);
}

// An array of merges, each a string or an array of two strings.
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

// ---------------------------------------------------------------------------------------------------------
// Added tokens

static inline void bpe_add_token(Bpe* b, const char* text, size_t n, int id, int is_special) {
    b->added = (BpeAdded*)array_reserve(b->added, &b->added_capacity, b->added_count + 1, sizeof(BpeAdded));
    BpeAdded* a = &b->added[b->added_count++];
    a->text = (char*)xmalloc(n);
    memcpy(a->text, text, n);
    a->length = n, a->id = id, a->is_special = is_special;
    b->begins[(unsigned char)text[0]] = 1;
}

// The id of a special token, -1 if there is none.
static inline int bpe_special_id(const Bpe* b, const char* text) {
    for (size_t i = 0; i < b->added_count; i++) {
        const BpeAdded* a = &b->added[i];
        if (a->is_special && a->length == strlen(text) && memcmp(a->text, text, a->length) == 0) return a->id;
    }
    return -1;
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
                die(USAGE, "%s: token \"%s\": \"%s\" is not supported; text cannot be encoded", file, content->string,
                    unknown[i]);
        if (content->length > 0)
            bpe_add_token(b, content->string, content->length, tokenizer_id(json_get(m, "id"), file, content->string),
                          is_special);
    }
    if (b->added_count > 0) qsort(b->added, b->added_count, sizeof(BpeAdded), bpe_compare_added);
}

// ---------------------------------------------------------------------------------------------------------
// Opening

static inline void bpe_refuse(const char* file, const char* key) {
    die(USAGE, "%s: key \"%s\": differs from GPT-2's tokenizer; text cannot be encoded with it", file, key);
}

// End with USAGE unless tokenizer.json treats a text as GPT-2's tokenizer does.
static inline void bpe_check_kind(const JsonNode* root, const char* file) {
    static const char* const absent[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"};
    const JsonNode *model = json_get(root, "model"), *splitter = json_need(root, "pre_tokenizer", JSON_OBJECT, file);
    const char* type = json_get_string_or(splitter, "type", "", file);
    if (json_has(root, "normalizer")) bpe_refuse(file, "normalizer");
    if (strcmp(type, "ByteLevel") != 0)
        die(USAGE, "%s: key \"pre_tokenizer\": \"%s\" differs from GPT-2's; text cannot be encoded with it", file,
            type);
    if (json_get_bool_or(splitter, "add_prefix_space", 1, file)) bpe_refuse(file, "add_prefix_space");
    if (!json_get_bool_or(splitter, "use_regex", 1, file)) bpe_refuse(file, "use_regex");
    if (strcmp(json_get_string_or(model, "type", "BPE", file), "BPE") != 0) bpe_refuse(file, "type");
    for (size_t i = 0; i < COUNT_OF(absent); i++) {
        const JsonNode* m = json_get(model, absent[i]);
        if (m && (m->length > 0 || m->integer != 0)) bpe_refuse(file, absent[i]);  // a text, a number or true
    }
}

static inline void bpe_free(Bpe* b) {
    for (size_t i = 0; i < b->added_count; i++) free(b->added[i].text);
    free(b->added);
    free(b->vocabulary);
    free(b->merge);
    memset(b, 0, sizeof(*b));
}

// Returns 0, or -1 if `directory` has neither tokenizer.json nor a vocabulary. Ends with USAGE if the vocabulary is
// damaged, has no merges file, or encodes text differently from GPT-2's.
static inline int bpe_open(Bpe* b, const char* directory) {
    static const char* const vocabularies[] = {"tokenizer.json", "vocab.json", "encoder.json"};
    static const char* const merges[] = {"merges.txt", "vocab.bpe"};
    BpeFiles f;
    Json json;
    memset(b, 0, sizeof(*b));
    memset(&f, 0, sizeof(f));
    f.bpe = b;
    f.vocabulary = tokenizer_first_file(directory, vocabularies, COUNT_OF(vocabularies));
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
        f.merges = tokenizer_first_file(directory, merges, COUNT_OF(merges));
        if (!f.merges)
            die(USAGE, "%s: neither merges.txt nor vocab.bpe is next to it; text cannot be encoded without one",
                f.vocabulary);
        bpe_read_vocabulary(&f, json.root);
        bpe_read_merge_lines(&f);
        int end_of_text = bpe_token_id(&f, "<|endoftext|>", 13);
        if (end_of_text >= 0) bpe_add_token(b, "<|endoftext|>", 13, end_of_text, 1);
    }
    json_free(&json);
    free(f.slot);
    free(f.merges);
    b->vocabulary = f.vocabulary;
    return 0;
}

#endif
