/* Shards of the text that tests train on, with bytes as tokens. No network, no Python.
 *
 *   byte_corpus TEXT_FOLDER OUT_DIR
 *
 * Token id = byte, 256 = end of text. A file is a document: token 256, then its bytes; documents are in the
 * order of their names. Of the resulting row of tokens every tenth block of 2,048 is validation. OUT_DIR gets
 * train.bin and val.bin (token shards) and the files that make GPT-2's byte-level tokenizer of it, with an
 * empty list of merges: vocab.json, merges.txt, tokenizer.json, tokenizer_config.json.
 *
 * OUT_DIR/bert gets the same text as sentences: train.bin and val.bin (files of sentences), vocab.txt and
 * tokenizer_config.json. Token id = byte, then [PAD] [UNK] [CLS] [SEP] [MASK]. A line with its line break is a
 * sentence, but for lines of white space, which are left out; a file is a document. A line that begins in a validation
 * block is validation: that divides a file into documents of training and of validation by turns. */
#include <dirent.h>

#include "dev/data/corpus_files.h"

enum { BYTE_PAD = 256, BYTE_UNK, BYTE_CLS, BYTE_SEP, BYTE_MASK, BYTE_VOCABULARY };
enum { END_OF_TEXT = 256, BLOCK = 2048, VALIDATION_EVERY = 10, FILE_LIMIT = 16 << 20 };

typedef struct {
    char** path;  // relative to the folder
    size_t count, capacity;
} Paths;

static void paths_add(Paths* p, const char* path) {
    p->path = (char**)array_reserve(p->path, &p->capacity, p->count + 1, sizeof(char*));
    p->path[p->count++] = xprintf("%s", path);
}

static int compare_paths(const void* a, const void* b) { return strcmp(*(char* const*)a, *(char* const*)b); }

static Paths paths_of_folder(const char* folder) {
    Paths p = {NULL, 0, 0};
    DIR* listing = opendir(folder);
    if (!listing) die(USAGE, "%s: cannot be listed: %s; give the folder that test_text wrote", folder, strerror(errno));
    for (struct dirent* entry = readdir(listing); entry; entry = readdir(listing))
        if (entry->d_name[0] != '.') paths_add(&p, entry->d_name);
    closedir(listing);
    if (p.count == 0) die(USAGE, "%s: holds no text; give the folder that test_text wrote", folder);
    qsort(p.path, p.count, sizeof(char*), compare_paths);
    return p;
}

static Tokens tokens_of_files(const char* folder, const Paths* p) {
    Tokens t = {NULL, 0, 0};
    for (size_t i = 0; i < p->count; i++) {
        char* full = xprintf("%s/%s", folder, p->path[i]);
        size_t n;
        char* bytes = read_file(full, FILE_LIMIT, &n, FAILED);
        int* ids = (int*)xmalloc((n + 1) * sizeof(int));
        ids[0] = END_OF_TEXT;
        for (size_t k = 0; k < n; k++) ids[k + 1] = (unsigned char)bytes[k];
        tokens_add(&t, ids, n + 1);
        free(ids);
        free(bytes);
        free(full);
    }
    return t;
}

static int is_validation(size_t position) { return position / BLOCK % VALIDATION_EVERY == VALIDATION_EVERY - 1; }

typedef struct {
    Tokens tokens, begin, first;  // begin: of the sentences among the tokens; first: sentences of the documents
} SentenceSet;

// Cut the row of tokens into sentences: set[0] for training, set[1] for validation.
static void sentences_of_tokens(SentenceSet* set, const Tokens* all) {
    SentenceSet* open_set = NULL;  // whose last document may go on
    for (size_t i = 0, end; i < all->count; i = end) {
        int is_blank = 1;
        end = i + 1;
        if (all->id[i] == END_OF_TEXT) {
            open_set = NULL;
            continue;
        }
        while (end < all->count && all->id[end] != END_OF_TEXT && all->id[end - 1] != '\n') end++;
        for (size_t k = i; k < end; k++)
            is_blank = is_blank && (all->id[k] == ' ' || (all->id[k] >= 9 && all->id[k] <= 13));
        if (is_blank) continue;
        SentenceSet* to = &set[is_validation(i)];
        int token = (int)to->tokens.count, sentence = (int)to->begin.count;
        if (to != open_set) tokens_add(&to->first, &sentence, 1);
        open_set = to;
        tokens_add(&to->begin, &token, 1);
        tokens_add(&to->tokens, all->id + i, end - i);
    }
}

static int write_sentences(const char* path, SentenceSet* set) {
    SentencesHeader h = {(uint32_t)set->tokens.count,
                         (uint32_t)set->begin.count,
                         (uint32_t)set->first.count,
                         BYTE_VOCABULARY,
                         BYTE_PAD,
                         BYTE_UNK,
                         BYTE_CLS,
                         BYTE_SEP,
                         BYTE_MASK};
    uint32_t continues[(BYTE_VOCABULARY + 31) / 32] = {0};
    int tokens = (int)set->tokens.count, sentences = (int)set->begin.count;
    tokens_add(&set->begin, &tokens, 1);
    tokens_add(&set->first, &sentences, 1);
    return sentences_write(path, h, set->tokens.id, (const uint32_t*)set->begin.id, (const uint32_t*)set->first.id,
                           continues);
}

// One token a line.
static Text vocabulary_lines(void) {
    Text t = {NULL, 0, 0};
    for (int b = 0; b < 256; b++) {
        append_byte_name(&t, b);
        text_printf(&t, "\n");
    }
    text_printf(&t, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n");
    return t;
}

enum {
    TRAIN,
    VAL,
    VOCAB,
    MERGES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    SENTENCES_TRAIN,
    SENTENCES_VAL,
    SENTENCES_VOCAB,
    SENTENCES_CONFIG,
    OUTPUTS
};
static const char* const output_names[OUTPUTS] = {"train.bin",      "val.bin",
                                                  "vocab.json",     "merges.txt",
                                                  "tokenizer.json", "tokenizer_config.json",
                                                  "bert/train.bin", "bert/val.bin",
                                                  "bert/vocab.txt", "bert/tokenizer_config.json"};

static void write_outputs(const char* out, const Tokens* train, const Tokens* val, SentenceSet* set) {
    const Merges none = {NULL, 0};
    Text text[OUTPUTS];
    memset(text, 0, sizeof(text));
    text[VOCAB] = vocab_json(none);
    text[MERGES] = merges_txt(none);
    text[TOKENIZER] = tokenizer_json(none);
    text[TOKENIZER_CONFIG] = tokenizer_config_json();
    text[SENTENCES_VOCAB] = vocabulary_lines();
    text_printf(&text[SENTENCES_CONFIG], "{\n  \"do_lower_case\": false\n}\n");
    output_directories(out);
    for (int i = 0; i < OUTPUTS; i++) {
        char* temporary = output_temporary(out, output_names[i]);
        const Tokens* tokens = i == TRAIN ? train : val;
        int is_shard = i == TRAIN || i == VAL, is_sentences = i == SENTENCES_TRAIN || i == SENTENCES_VAL;
        int bad = is_shard       ? shard_write(temporary, tokens->id, tokens->count, 2)
                  : is_sentences ? write_sentences(temporary, &set[i - SENTENCES_TRAIN])
                                 : write_file(temporary, text[i].text, text[i].length);
        if (bad) output_failed(out, output_names, OUTPUTS, output_names[i]);
        free(temporary);
        free(text[i].text);
    }
    output_rename(out, output_names, OUTPUTS);
}

int main(int argc, char** argv) {
    if (argc != 3) die(USAGE, "two arguments are needed: byte_corpus REPO_ROOT OUT_DIR");
    const char *folder = argv[1], *out = argv[2];
    Paths paths = paths_of_folder(folder);
    Tokens all = tokens_of_files(folder, &paths), train = {NULL, 0, 0}, val = {NULL, 0, 0};
    if (all.count <= (size_t)BLOCK * (VALIDATION_EVERY - 1))
        die(USAGE,
            "%s: only %zu bytes of text, too few to cut a validation set from; give the folder that test_text wrote",
            folder, all.count);
    for (size_t i = 0; i < all.count; i += BLOCK) {
        tokens_add(is_validation(i) ? &val : &train, all.id + i, min_size(BLOCK, all.count - i));
    }
    SentenceSet set[2];
    memset(set, 0, sizeof(set));
    sentences_of_tokens(set, &all);
    write_outputs(out, &train, &val, set);
    printf("%s: %zu files, %zu tokens for training, %zu for validation, vocabulary of %d\n", out, paths.count,
           train.count, val.count, END_OF_TEXT + 1);
    for (size_t i = 0; i < COUNT_OF(set); i++) {
        printf("%s/%s: %zu documents, %zu sentences, %zu tokens\n", out, output_names[SENTENCES_TRAIN + i],
               set[i].first.count - 1, set[i].begin.count - 1, set[i].tokens.count);
        free(set[i].tokens.id);
        free(set[i].begin.id);
        free(set[i].first.id);
    }
    for (size_t i = 0; i < paths.count; i++) free(paths.path[i]);
    free(paths.path);
    free(all.id);
    free(train.id);
    free(val.id);
    return DONE;
}
