/* A model in several safetensors files, as transformers writes large ones: model.safetensors.index.json maps tensors to
 * files, and all files are read as if they were one.
 *
 *   {"metadata": {...}, "weight_map": {NAME: "model-00001-of-00002.safetensors", ...}}
 *
 * A tensor that the index names must be in its file, and no tensor may be in two files. */
#ifndef LLMC_DATA_SAFETENSORS_INDEX_H
#define LLMC_DATA_SAFETENSORS_INDEX_H

#include "llmc/data/safetensors.h"

#define SAFETENSORS_INDEX "model.safetensors.index.json"

// The shard that an entry of the index names, in the directory of the index. It is opened at its first use.
static inline const SafeTensors* safetensors_shard(SafeTensors* st, const JsonNode* entry) {
    const char *slash = strrchr(st->file, '/'), *name = entry->string;
    if (entry->type != JSON_STRING || !*name || strlen(name) != entry->length || strchr(name, '/') ||
        strcmp(name, "..") == 0)
        die(USAGE, "%s: tensor \"%s\": is not mapped to a file in the same directory; the index is damaged", st->file,
            entry->key);
    char* path = xprintf("%.*s%s", slash ? (int)(slash + 1 - st->file) : 0, st->file, name);
    // Most tensors are in the same shard as the previous one.
    for (int i = st->shard_count - 1; i >= 0; i--) {
        if (strcmp(st->shards[i].file, path) != 0) continue;
        free(path);
        return &st->shards[i];
    }
    if (!file_exists(path))
        die(USAGE, "%s: is missing, but %s names it; download it too", path, slash ? slash + 1 : st->file);
    st->shards =
        (SafeTensors*)array_reserve(st->shards, &st->shard_capacity, (size_t)st->shard_count + 1, sizeof(SafeTensors));
    safetensors_open(&st->shards[st->shard_count], path);
    free(path);
    return &st->shards[st->shard_count++];
}

// Open all files of an index.
static inline void safetensors_open_index(SafeTensors* st, const char* path) {
    memset(st, 0, sizeof *st);
    st->file = xprintf("%s", path);
    st->fd = -1;
    json_load(&st->header, path, (size_t)1 << 24);
    const JsonNode* map = json_need(st->header.root, "weight_map", JSON_OBJECT, path);
    for (const JsonNode* n = map->first; n; n = n->next) {
        const SafeTensors* shard = safetensors_shard(st, n);
        if (!safetensors_find(shard, n->key))
            die(USAGE, "%s: tensor \"%s\": is not in %s, to which this file maps it; download both again", path, n->key,
                shard->file);
    }
    for (int i = 0; i < st->shard_count; i++) st->count += st->shards[i].count;
    st->tensors = (SafeTensor*)xcalloc((size_t)st->count, sizeof(SafeTensor));
    for (int i = 0, at = 0; i < st->shard_count; at += st->shards[i++].count)
        memcpy(st->tensors + at, st->shards[i].tensors, (size_t)st->shards[i].count * sizeof(SafeTensor));
    qsort(st->tensors, (size_t)st->count, sizeof(SafeTensor), safetensors_compare_name);
    for (int i = 1; i < st->count; i++)
        if (strcmp(st->tensors[i].name, st->tensors[i - 1].name) == 0)
            die(USAGE, "%s: tensor \"%s\": is in %s too; remove the files of the other model", st->tensors[i].file,
                st->tensors[i].name, st->tensors[i - 1].file);
}

#endif
