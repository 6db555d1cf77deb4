/* The corpus that comes with the project: its own sources and documentation, as bytes. No network, no Python.
 *
 *   builtin_corpus REPO_ROOT OUT_DIR
 *
 * Token id = byte, 256 = end of text. A file is a document: token 256, then its bytes; documents are in the
 * order of their paths. Of the resulting row of tokens every tenth block of 2,048 is validation. OUT_DIR gets
 * train.bin and val.bin (token shards) and the files that make GPT-2's byte-level tokenizer of it, with an
 * empty list of merges: vocab.json, merges.txt, tokenizer.json, tokenizer_config.json.
 *
 * OUT_DIR/bert gets the same text as sentences: train.bin and val.bin (files of sentences), vocab.txt and
 * tokenizer_config.json. Token id = byte, then [PAD] [UNK] [CLS] [SEP] [MASK]. A line with its line break is a sentence,
 * but for lines of white space, which are left out; a file is a document. A line that begins in a validation block is
 * validation: that divides a file into documents of training and of validation by turns. */
#include <dirent.h>

#include "llmc/data/mlm/sentences.h"

enum { BYTE_PAD = 256, BYTE_UNK, BYTE_CLS, BYTE_SEP, BYTE_MASK, BYTE_VOCABULARY };
enum { END_OF_TEXT = 256, BLOCK = 2048, VALIDATION_EVERY = 10, FILE_LIMIT = 16 << 20 };

typedef struct {
    char** path;  // relative to the root
    size_t count, capacity;
} Paths;

typedef struct {
    int* id;
    size_t count, capacity;
} Tokens;

static void paths_add(Paths* p, const char* path) {
    if (p->count == p->capacity) {
        p->capacity = 2 * p->capacity + 64;
        p->path = (char**)xrealloc(p->path, p->capacity * sizeof(char*));
    }
    p->path[p->count++] = xprintf("%s", path);
}

static void tokens_add(Tokens* t, const int* id, size_t n) {
    if (t->count + n > t->capacity) {
        t->capacity = 2 * (t->count + n);
        t->id = (int*)xrealloc(t->id, t->capacity * sizeof(int));
    }
    memcpy(t->id + t->count, id, n * sizeof(int));
    t->count += n;
}

static int is_source(const char* name) {
    static const char* const endings[] = {".cu", ".h", ".c", ".cuh", ".py", ".sh", ".md"};
    size_t n = strlen(name);
    if (strcmp(name, "Makefile") == 0 || strcmp(name, "LICENSE") == 0) return 1;
    for (size_t i = 0; i < COUNT_OF(endings); i++) {
        size_t m = strlen(endings[i]);
        if (n > m && strcmp(name + n - m, endings[i]) == 0) return 1;
    }
    return 0;
}

// Directories that runs, builds and references fill: the corpus should not depend on what was run before.
static int is_generated(const char* path, const char* name) {
    return strncmp(name, "out", 3) == 0 || strncmp(name, "build", 5) == 0 || strcmp(path, "dev/results") == 0;
}

typedef enum { THIS_LEVEL, ALL_LEVELS } Depth;

// Add the sources in `directory` (relative to the root, "" is the root itself). Links are not followed.
static void paths_collect(Paths* p, const char* root, const char* directory, Depth depth) {
    char* full = xprintf("%s/%s", root, directory);
    DIR* d = opendir(full);
    if (!d) die(USAGE, "%s: cannot be listed: %s; give the root of the project", full, strerror(errno));
    for (struct dirent* entry = readdir(d); entry; entry = readdir(d)) {
        struct stat st;
        if (entry->d_name[0] == '.') continue;
        char* path = xprintf("%s%s%s", directory, directory[0] ? "/" : "", entry->d_name);
        char* file = xprintf("%s/%s", root, path);
        if (lstat(file, &st) == 0) {
            if (S_ISREG(st.st_mode) && is_source(entry->d_name)) paths_add(p, path);
            if (S_ISDIR(st.st_mode) && depth == ALL_LEVELS && !is_generated(path, entry->d_name))
                paths_collect(p, root, path, depth);
        }
        free(file);
        free(path);
    }
    closedir(d);
    free(full);
}

static int compare_paths(const void* a, const void* b) { return strcmp(*(char* const*)a, *(char* const*)b); }

static Paths paths_of_project(const char* root) {
    static const char* const directories[] = {"llmc", "dev", "scripts"};
    Paths p = {NULL, 0, 0};
    paths_collect(&p, root, "", THIS_LEVEL);
    for (size_t i = 0; i < COUNT_OF(directories); i++) {
        char* full = xprintf("%s/%s", root, directories[i]);
        if (is_directory(full)) paths_collect(&p, root, directories[i], ALL_LEVELS);
        free(full);
    }
    if (p.count == 0) die(USAGE, "%s: holds no sources; give the root of the project", root);
    qsort(p.path, p.count, sizeof(char*), compare_paths);
    return p;
}

static Tokens tokens_of_files(const char* root, const Paths* p) {
    Tokens t = {NULL, 0, 0};
    for (size_t i = 0; i < p->count; i++) {
        char* full = xprintf("%s/%s", root, p->path[i]);
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

// The tokenizer's name of a byte: GPT-2 shows printable Latin-1 as itself and the 68 others as U+0100 and up.
static void append_byte_name(Text* t, int byte) {
    int character = 0, shifted = 256;
    for (int b = 0; b <= byte; b++) {
        int printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        character = printable ? b : shifted++;
    }
    if (character < 128) text_printf(t, "%c", character);
    else text_printf(t, "%c%c", 0xC0 | character >> 6, 0x80 | (character & 63));
}

static void append_vocabulary(Text* t) {
    text_printf(t, "{");
    for (int b = 0; b < 256; b++) {
        text_printf(t, b == '"' || b == '\\' ? "\"\\" : "\"");
        append_byte_name(t, b);
        text_printf(t, "\":%d,", b);
    }
    text_printf(t, "\"<|endoftext|>\":%d}", END_OF_TEXT);
}

static Text tokenizer_json(void) {
    Text t = {NULL, 0, 0};
    text_printf(&t,
                "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[{\"id\":%d,"
                "\"content\":\"<|endoftext|>\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,"
                "\"normalized\":false,\"special\":true}],\"normalizer\":null,",
                END_OF_TEXT);
    text_printf(&t, "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,"
                    "\"use_regex\":true},\"post_processor\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                    "\"trim_offsets\":false,\"use_regex\":true},\"decoder\":{\"type\":\"ByteLevel\","
                    "\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true},");
    text_printf(&t, "\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"
                    "\"continuing_subword_prefix\":\"\",\"end_of_word_suffix\":\"\",\"fuse_unk\":false,"
                    "\"byte_fallback\":false,\"vocab\":");
    append_vocabulary(&t);
    text_printf(&t, ",\"merges\":[]}}\n");
    return t;
}

// The length is the library's own way to write "no limit": the model's is in its config.json.
static Text tokenizer_config_json(void) {
    Text t = {NULL, 0, 0};
    text_printf(&t, "{\n  \"add_prefix_space\": false,\n  \"bos_token\": \"<|endoftext|>\",\n"
                    "  \"clean_up_tokenization_spaces\": false,\n  \"eos_token\": \"<|endoftext|>\",\n"
                    "  \"model_max_length\": 1000000000000000019884624838656,\n"
                    "  \"tokenizer_class\": \"GPT2Tokenizer\",\n  \"unk_token\": \"<|endoftext|>\"\n}\n");
    return t;
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

// Every file is written under a temporary name first; the names appear when all of them are complete.
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

static char* temporary_name(const char* out, int output) {
    return xprintf("%s/%s.tmp%ld", out, output_names[output], (long)getpid());
}

static void write_failed(const char* out, const char* name) {
    int saved = errno;
    for (int i = 0; i < OUTPUTS; i++) {
        char* temporary = temporary_name(out, i);
        unlink(temporary);
        free(temporary);
    }
    die(FAILED, "%s/%s: cannot be written: %s; free space, or choose another directory", out, name, strerror(saved));
}

static void write_outputs(const char* out, const Tokens* train, const Tokens* val, SentenceSet* set) {
    Text text[OUTPUTS];
    memset(text, 0, sizeof(text));
    append_vocabulary(&text[VOCAB]);
    text_printf(&text[VOCAB], "\n");
    text_printf(&text[MERGES], "#version: 0.2\n");
    text[TOKENIZER] = tokenizer_json();
    text[TOKENIZER_CONFIG] = tokenizer_config_json();
    text[SENTENCES_VOCAB] = vocabulary_lines();
    text_printf(&text[SENTENCES_CONFIG], "{\n  \"do_lower_case\": false\n}\n");
    char* folder = xprintf("%s/bert", out);
    if (make_directories(folder) != 0)
        die(USAGE, "%s: the directory cannot be made: %s; choose another one", folder, strerror(errno));
    for (int i = 0; i < OUTPUTS; i++) {
        char* temporary = temporary_name(out, i);
        const Tokens* tokens = i == TRAIN ? train : val;
        int is_shard = i == TRAIN || i == VAL, is_sentences = i == SENTENCES_TRAIN || i == SENTENCES_VAL;
        int bad = is_shard       ? shard_write(temporary, tokens->id, tokens->count, 2)
                  : is_sentences ? write_sentences(temporary, &set[i - SENTENCES_TRAIN])
                                 : write_file(temporary, text[i].text, text[i].length);
        if (bad) write_failed(out, output_names[i]);
        free(temporary);
        free(text[i].text);
    }
    for (int i = 0; i < OUTPUTS; i++) {
        char* temporary = temporary_name(out, i);
        char* name = xprintf("%s/%s", out, output_names[i]);
        if (rename(temporary, name) != 0) write_failed(out, output_names[i]);
        free(temporary);
        free(name);
    }
    if (sync_directory(out) != 0 || sync_directory(folder) != 0) write_failed(out, "");
    free(folder);
}

int main(int argc, char** argv) {
    if (argc != 3) die(USAGE, "two arguments are needed: builtin_corpus REPO_ROOT OUT_DIR");
    const char *root = argv[1], *out = argv[2];
    Paths paths = paths_of_project(root);
    Tokens all = tokens_of_files(root, &paths), train = {NULL, 0, 0}, val = {NULL, 0, 0};
    if (all.count <= (size_t)BLOCK * (VALIDATION_EVERY - 1))
        die(USAGE, "%s: only %zu bytes of sources, too few to cut a validation set from; give the root of the project",
            root, all.count);
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
