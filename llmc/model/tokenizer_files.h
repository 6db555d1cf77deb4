/* The files of a tokenizer, kept in memory from the start of a run. Every checkpoint gets a copy. Their directory may
 * be renamed or deleted during the run, for example if it is an older checkpoint of the same run. */
#ifndef LLMC_MODEL_TOKENIZER_FILES_H
#define LLMC_MODEL_TOKENIZER_FILES_H

#include "llmc/base/util.h"

enum { TOKENIZER_FILES_MOST = 9, TOKENIZER_MAX_FILE = 100000000 };

typedef struct {
    const char* name;
    char* bytes;
    size_t size;
} TokenizerFile;

typedef struct {
    char* directory;  // where they were read from; NULL: no tokenizer
    TokenizerFile file[TOKENIZER_FILES_MOST];
    int count;
} TokenizerFiles;

// Read all files of a tokenizer that `directory` has. Ends with USAGE if one cannot be read.
static inline void tokenizer_files_read(TokenizerFiles* f, const char* directory) {
    static const char* const names[TOKENIZER_FILES_MOST] = {
        "vocab.json",   "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "encoder.json", "vocab.bpe",  "vocab.txt",      "gpt2_tokenizer.bin"};
    memset(f, 0, sizeof *f);
    f->directory = xprintf("%s", directory);
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        Path path = path_of("%s/%s", directory, names[i]);
        TokenizerFile* file = &f->file[f->count];
        if (file_exists(path.text)) {
            file->name = names[i];
            file->bytes = read_file(path.text, TOKENIZER_MAX_FILE, &file->size, USAGE);
            f->count++;
        }
    }
}

// Write the files into a directory, flushed to the disk. Returns 0, or -1 with errno.
static inline int tokenizer_files_write(const TokenizerFiles* f, const char* directory) {
    int bad = 0;
    for (int i = 0; i < f->count && !bad; i++) {
        Path path = path_of("%s/%s", directory, f->file[i].name);
        bad = write_file(path.text, f->file[i].bytes, f->file[i].size) != 0;
    }
    return bad ? -1 : 0;
}

// Whether a directory has the same tokenizer, file by file.
static inline int tokenizer_files_match(const TokenizerFiles* f, const char* directory) {
    int same = f->count > 0;
    for (int i = 0; i < f->count && same; i++) {
        struct stat st;
        Path path = path_of("%s/%s", directory, f->file[i].name);
        same = stat(path.text, &st) == 0 && S_ISREG(st.st_mode) && (uint64_t)st.st_size == f->file[i].size;
        char* bytes = same ? read_file(path.text, TOKENIZER_MAX_FILE, NULL, USAGE) : NULL;
        same = same && memcmp(bytes, f->file[i].bytes, f->file[i].size) == 0;
        free(bytes);
    }
    return same;
}

static inline void tokenizer_files_free(TokenizerFiles* f) {
    for (int i = 0; i < f->count; i++) free(f->file[i].bytes);
    free(f->directory);
    memset(f, 0, sizeof *f);
}

#endif
