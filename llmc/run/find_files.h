/* Paths of the data and of the model, from the flags that name them. Callers free the paths. */
#ifndef LLMC_RUN_FIND_FILES_H
#define LLMC_RUN_FIND_FILES_H

#include <glob.h>

#include "llmc/data/shards.h"
#include "llmc/model/model_files.h"
#include "llmc/run/settings.h"

// The directory that holds `path`.
static inline char* directory_of(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? xprintf("%.*s", (int)(slash - path), path) : xprintf(".");
}

// `path`, below the working directory, or else below the program's directory if it is absent.
static inline char* find_beside_program(const char* path) {
    char program[4096];
    if (file_exists(path)) return xprintf("%s", path);
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    program[n > 0 ? n : 0] = '\0';
    char *directory = directory_of(program), *beside = xprintf("%s/%s", directory, path);
    free(directory);
    return beside;
}

// The patterns of the training and validation shards. An empty -i selects the built-in corpus in the working directory,
// or else in the program's directory. An empty -j selects -i with "train" replaced by "val" at the start of the file
// name. *val_pattern is NULL without validation data. To evaluate -j, both are -j.
static inline void find_data(const Settings* s, const char* builtin, char** train_pattern, char** val_pattern) {
    const char *val = s->val_data, *train = s->train_data;
    if (s->evaluate && *val) train = val;
    *train_pattern = *train ? xprintf("%s", train) : find_beside_program(builtin);
    *val_pattern = *val ? xprintf("%s", val) : NULL;
    const char* slash = strrchr(*train_pattern, '/');
    const char* name = slash ? slash + 1 : *train_pattern;
    if (*val || strncmp(name, "train", 5) != 0) return;
    glob_t found;
    *val_pattern = xprintf("%.*sval%s", (int)(name - *train_pattern), *train_pattern, name + 5);
    if (file_exists(*val_pattern)) return;
    if (glob(*val_pattern, 0, NULL, &found) == 0) {
        globfree(&found);
        return;
    }
    free(*val_pattern);
    *val_pattern = NULL;
}

// A model's directory and weights, from a Hugging Face directory, a .safetensors file, whose directory has the other
// files, or a config.json, for a model from scratch without weights. Both paths are NULL for a descriptor.
static inline void find_model(const char* source, char** directory, char** weights) {
    foreign_refuse(source);
    const char* slash = strrchr(source, '/');
    int is_file = strlen(source) > 12 && name_ends_with(source, ".safetensors");
    int is_config = strcmp(slash ? slash + 1 : source, "config.json") == 0;
    *directory = is_file || is_config ? directory_of(source) : is_directory(source) ? xprintf("%s", source) : NULL;
    *weights = is_file                    ? xprintf("%s", source)
               : *directory && !is_config ? xprintf("%s/model.safetensors", source)
                                          : NULL;
}

// The same for an llm.c checkpoint, a .bin file. Returns the model's sizes as a descriptor, or NULL if `source` is
// something else.
static inline char* find_llmc_model(const char* source, char** directory, char** weights) {
    if (!tensors_are_llmc(source) || is_directory(source)) return NULL;
    char* sizes = llmc_model_sizes(source);
    *directory = directory_of(source);
    *weights = xprintf("%s", source);
    return sizes;
}

#endif
