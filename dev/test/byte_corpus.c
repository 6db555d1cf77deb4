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

static int is_shown(const struct dirent* entry) { return entry->d_name[0] != '.'; }

// All files of a folder in the order of their names.
static Tokens tokens_of_files(const char* folder, int* count) {
    Tokens t = {NULL, 0, 0};
    struct dirent** entries = NULL;
    *count = scandir(folder, &entries, is_shown, alphasort);
    if (*count < 1) die(USAGE, "%s: holds no text; give the folder that test_text wrote", folder);
    for (int i = 0; i < *count; i++) {
        char* path = xprintf("%s/%s", folder, entries[i]->d_name);
        size_t n;
        char* bytes = read_file(path, FILE_LIMIT, &n, FAILED);
        int* ids = (int*)xmalloc((n + 1) * sizeof(int));
        ids[0] = END_OF_TEXT;
        for (size_t k = 0; k < n; k++) ids[k + 1] = (unsigned char)bytes[k];
        tokens_add(&t, ids, n + 1);
        free(ids), free(bytes), free(path), free(entries[i]);
    }
    free(entries);
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

static void put_output(const char* out, const char* name, Text text) {
    char* path = xprintf("%s/%s", out, name);
    if (write_file(path, text.text, text.length) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    free(path), free(text.text);
}

// One side of the data: 0 training, 1 validation.
static void write_side(const char* out, int side, const Tokens* tokens, SentenceSet* set) {
    const char* name = side ? "val.bin" : "train.bin";
    char *path = xprintf("%s/%s", out, name), *sentences = xprintf("%s/bert/%s", out, name);
    if (shard_write(path, tokens->id, tokens->count, 2) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    if (write_sentences(sentences, set) != 0) die(FAILED, "%s: %s", sentences, strerror(errno));
    printf("%s: %zu tokens, vocabulary of %d\n", path, tokens->count, END_OF_TEXT + 1);
    printf("%s: %zu documents, %zu sentences, %zu tokens\n", sentences, set->first.count - 1, set->begin.count - 1,
           set->tokens.count);
    free(path), free(sentences);
}

int main(int argc, char** argv) {
    if (argc != 3) die(USAGE, "two arguments are needed: byte_corpus TEXT_FOLDER OUT_DIR");
    const char *folder = argv[1], *out = argv[2];
    const Merges none = {NULL, 0};
    int count;
    Tokens all = tokens_of_files(folder, &count), sides[2] = {{NULL, 0, 0}, {NULL, 0, 0}};
    SentenceSet set[2];
    memset(set, 0, sizeof(set));
    if (all.count <= (size_t)BLOCK * (VALIDATION_EVERY - 1))
        die(USAGE, "%s: only %zu bytes of text in %d files, too few to cut a validation set from", folder, all.count,
            count);
    for (size_t i = 0; i < all.count; i += BLOCK)
        tokens_add(&sides[is_validation(i)], all.id + i, min_size(BLOCK, all.count - i));
    sentences_of_tokens(set, &all);
    char* bert = xprintf("%s/bert", out);
    if (make_directories(bert) != 0) die(FAILED, "%s: %s", bert, strerror(errno));
    put_output(out, "vocab.json", vocab_json(none));
    put_output(out, "merges.txt", merges_txt(none));
    put_output(out, "tokenizer.json", tokenizer_json(none));
    put_output(out, "tokenizer_config.json", tokenizer_config_json());
    put_output(bert, "vocab.txt", vocabulary_lines());
    Text settings = {NULL, 0, 0};
    text_printf(&settings, "{\n  \"do_lower_case\": false\n}\n");
    put_output(bert, "tokenizer_config.json", settings);
    for (int side = 1; side >= 0; side--) {
        write_side(out, side, &sides[side], &set[side]);
        free(sides[side].id), free(set[side].tokens.id), free(set[side].begin.id), free(set[side].first.id);
    }
    free(bert), free(all.id);
    return DONE;
}
