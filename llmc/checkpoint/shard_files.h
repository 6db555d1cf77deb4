/* The file of a rank's shard of the optimizer state: a range of the flat buffers as in memory, padding included. The
 * file's metadata holds the range. A part's tensor has the name of its prefix without the dot. */
#ifndef LLMC_CHECKPOINT_SHARD_FILES_H
#define LLMC_CHECKPOINT_SHARD_FILES_H

#include "llmc/model/model_files.h"

// CRC-32 of the flat buffer's layout: names, shapes and offsets.
static inline uint32_t tensors_fingerprint(const TensorTable* table) {
    Text text = {NULL, 0, 0};
    for (int i = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        text_printf(&text, "%s %d %d %d %zu\n", t->name, t->ndim, t->shape[0], t->shape[1], t->offset);
    }
    uint32_t result = crc32_of(0, text.text, text.length);
    free(text.text);
    return result;
}

static inline void tensors_shard_name(char name[16], const TensorPart* part) {
    snprintf(name, 16, "%.*s", (int)strlen(part->prefix) - 1, part->prefix);
}

// Write parts that hold the elements `range`. Returns 0 and the file's digest, or -1 with errno.
static inline int tensors_write_shard(const char* path, const TensorTable* table, const TensorPart* parts, int count,
                                      FlatRange range, FileDigest* digest, Context* ctx) {
    enum { PIECE = 1 << 20 };  // elements
    const struct {
        const char* key;
        unsigned long long value;
    } facts[] = {{"begin", range.begin},
                 {"size", range.size},
                 {"elements", table->elements},
                 {"table", tensors_fingerprint(table)}};
    const uint64_t shape = range.size;
    SafeTensorsWriter w;
    char name[16], number[24];
    safetensors_writer_create(&w, path);
    safetensors_writer_metadata(&w, "format", "pt");
    for (size_t i = 0; i < COUNT_OF(facts); i++) {
        snprintf(number, sizeof number, "%llu", facts[i].value);
        safetensors_writer_metadata(&w, facts[i].key, number);
    }
    for (int p = 0; p < count; p++) {
        tensors_shard_name(name, &parts[p]);
        safetensors_writer_add(&w, name, tensor_part_dtype(&parts[p]), 1, &shape);
    }
    safetensors_writer_begin(&w);
    void* space = xmalloc(PIECE * sizeof(real));
    for (int p = 0; p < count; p++) {
        for (size_t at = 0, n; at < range.size && !w.error; at += n) {
            n = min_size(range.size - at, PIECE);
            const void* values = tensor_part_elements(&parts[p], at, n, space, ctx);
            safetensors_writer_append(&w, values, n * tensor_part_element(&parts[p]));
        }
    }
    free(space);
    return tensors_close(&w, digest);
}

static inline uint64_t tensors_shard_fact(const SafeTensors* file, const char* key) {
    const JsonNode* metadata = json_get(file->header.root, "__metadata__");
    const JsonNode* fact = metadata ? json_get(metadata, key) : NULL;
    size_t n = fact ? strlen(fact->string) : 0;
    if (n == 0 || n > 19 || strspn(fact->string, "0123456789") != n)
        die(USAGE, "%s: its __metadata__ has no number \"%s\"; it is not a shard of an optimizer", file->file, key);
    return strtoull(fact->string, NULL, 10);
}

// Open a shard of this table. Returns the range of its elements.
static inline FlatRange tensors_open_shard(SafeTensors* file, const char* path, const TensorTable* table) {
    safetensors_open(file, path);
    FlatRange range = {.begin = (size_t)tensors_shard_fact(file, "begin"),
                       .size = (size_t)tensors_shard_fact(file, "size")};
    if (tensors_shard_fact(file, "table") != tensors_fingerprint(table) ||
        tensors_shard_fact(file, "elements") != table->elements)
        die(USAGE, "%s: is a shard of another model's optimizer", path);
    if (range.begin > table->elements || range.size > table->elements - range.begin)
        die(USAGE, "%s: claims %zu elements from %zu, but there are %zu; the file is damaged", path, range.size,
            range.begin, table->elements);
    return range;
}

// Read the elements of a part that are in `wanted` from an open shard with the elements `held`. `values` begins with
// the first element of `wanted`.
static inline void tensors_read_shard(const SafeTensors* file, FlatRange held, const TensorPart* part, FlatRange wanted,
                                      real* values) {
    char name[16];
    tensors_shard_name(name, part);
    const SafeTensor* entry = safetensors_find(file, name);
    if (!entry || entry->elements != held.size)
        die(USAGE, "%s: tensor \"%s\" is missing or not of %zu elements; the file is damaged", file->file, name,
            held.size);
    size_t from = held.begin > wanted.begin ? held.begin : wanted.begin;
    size_t to = min_size(held.begin + held.size, wanted.begin + wanted.size);
    if (from >= to) return;
    safetensors_read_real(entry, from - held.begin, to - from, values + from - wanted.begin);
    tensor_check_finite(entry, part, values + from - wanted.begin, to - from);
}

#endif
