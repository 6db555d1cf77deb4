/* Files of named tensors in the safetensors format. safetensors_writer.h writes them.
 *
 *   8 bytes    n, the header's length, little-endian
 *   n bytes    JSON: {"__metadata__": {string: string}, NAME: {"dtype", "shape", "data_offsets": [begin, end]}}
 *   the rest   the tensors' bytes, row-major and little-endian, without overlap and without gaps
 *
 * Metadata {"a": "b"}, where b is a tensor and a is not, says that a is b: safetensors.torch.save_model stores a tensor
 * that has several names once.
 *
 * Of a model in several files, as transformers writes large ones, model.safetensors.index.json maps tensors to files,
 * and all files are read as if they were one: {"weight_map": {NAME: "model-00001-of-00002.safetensors", ...}}. A tensor
 * that the index names must be in its file, and no tensor may be in two files.
 *
 * The reader checks all of this before it returns a tensor, and dies naming the file and the tensor. */
#ifndef LLMC_DATA_SAFETENSORS_H
#define LLMC_DATA_SAFETENSORS_H

#include "llmc/base/json.h"

enum { SAFETENSORS_MAX_HEADER = 100000000, SAFETENSORS_MAX_DIMS = 8, SAFETENSORS_CHUNK = 65536 };

typedef struct {
    const char* name;
    const char* dtype;  // "F32", "BF16", ...
    int element_size;   // bytes
    int ndim;
    uint64_t shape[SAFETENSORS_MAX_DIMS];
    uint64_t elements;    // product of the shape; 1 for a scalar
    uint64_t begin, end;  // byte offsets in the file (not in its data part)
    const char* file;     // the file with the tensor
    int fd;
} SafeTensor;

typedef struct SafeTensors {
    char* file;
    int fd;  // -1: the tensors are in shards
    int count;
    SafeTensor* tensors;  // [count] sorted by name
    Json header;          // owns the names
    struct SafeTensors* shards;
    int shard_count;
    size_t shard_capacity;
} SafeTensors;

// The dtype of `real` in a file.
static inline const char* safetensors_real_dtype(void) { return sizeof(real) == 8 ? "F64" : "F32"; }

// The name of a floating-point dtype in config.json.
static inline const char* safetensors_dtype_name(const char* dtype) {
    if (strcmp(dtype, "BF16") == 0) return "bfloat16";
    if (strcmp(dtype, "F16") == 0) return "float16";
    return strcmp(dtype, "F64") == 0 ? "float64" : "float32";
}

// Bytes of an element; 0 for an unknown dtype.
static inline int safetensors_element_size(const char* dtype) {
    static const char* const names[] = {"BOOL", "U8",  "I8",  "F8_E4M3", "F8_E5M2", "U16", "I16", "F16",
                                        "BF16", "U32", "I32", "F32",     "U64",     "I64", "F64"};
    static const int sizes[] = {1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8};
    for (size_t i = 0; i < COUNT_OF(names); i++)
        if (strcmp(names[i], dtype) == 0) return sizes[i];
    return 0;
}

// ---------------------------------------------------------------------------------------------------------
// Reading

// A dimension or an offset. Returns whether it is one.
static inline int safetensors_natural(const JsonNode* node, uint64_t* n) {
    *n = (uint64_t)node->integer;
    return node->is_integer && node->integer >= 0;
}

// One member of the header. `data` is where the data part begins, `size` its number of bytes.
static inline SafeTensor safetensors_entry(const JsonNode* node, const char* file, uint64_t data, uint64_t size) {
    SafeTensor t;
    memset(&t, 0, sizeof(t));
    t.name = node->key, t.elements = 1;
    const JsonNode *dtype = json_get(node, "dtype"), *shape = json_get(node, "shape");
    const JsonNode* offsets = json_get(node, "data_offsets");
    int is_sound = strlen(t.name) == node->key_length && node->count == 3 && dtype && dtype->type == JSON_STRING &&
                   shape && shape->type == JSON_ARRAY && offsets && offsets->type == JSON_ARRAY && offsets->count == 2;
    if (is_sound && shape->count > SAFETENSORS_MAX_DIMS)
        die(USAGE, "%s: tensor \"%s\": %zu dimensions, but at most %d are supported", file, t.name, shape->count,
            (int)SAFETENSORS_MAX_DIMS);
    for (const JsonNode* n = is_sound ? shape->first : NULL; n && is_sound; n = n->next) {
        is_sound = safetensors_natural(n, &t.shape[t.ndim]) &&
                   !__builtin_mul_overflow(t.elements, t.shape[t.ndim], &t.elements);
        t.ndim++;
    }
    is_sound =
        is_sound && safetensors_natural(offsets->first, &t.begin) && safetensors_natural(offsets->first->next, &t.end);
    if (!is_sound)
        die(USAGE,
            "%s: tensor \"%s\": its entry is not an object of a dtype, a shape and two data_offsets; the file is "
            "damaged",
            file, t.name);
    t.dtype = dtype->string;
    t.element_size = safetensors_element_size(t.dtype);
    if (t.element_size == 0)
        die(USAGE, "%s: tensor \"%s\": its dtype \"%s\" is unknown; save it as F32, F16 or BF16", file, t.name,
            t.dtype);
    if (t.begin > t.end || t.end > size)
        die(USAGE,
            "%s: tensor \"%s\": bytes %llu to %llu are not inside the file's %llu bytes of data; it is truncated "
            "or damaged",
            file, t.name, (unsigned long long)t.begin, (unsigned long long)t.end, (unsigned long long)size);
    uint64_t bytes, given = t.end - t.begin;
    if (__builtin_mul_overflow(t.elements, (uint64_t)t.element_size, &bytes) || given != bytes)
        die(USAGE, "%s: tensor \"%s\": its shape and dtype do not fit its %llu bytes; the file is damaged", file,
            t.name, (unsigned long long)given);
    t.begin += data, t.end += data;
    return t;
}

static inline int safetensors_compare_place(const void* left, const void* right) {
    const SafeTensor *a = (const SafeTensor*)left, *b = (const SafeTensor*)right;
    if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
    return a->end < b->end ? -1 : a->end > b->end;
}

static inline int safetensors_compare_name(const void* left, const void* right) {
    return strcmp(((const SafeTensor*)left)->name, ((const SafeTensor*)right)->name);
}

// No overlap and no gaps: each tensor begins where the one before it ends.
static inline void safetensors_check_places(SafeTensors* st, uint64_t data, uint64_t file_size) {
    uint64_t at = data;
    qsort(st->tensors, (size_t)st->count, sizeof(SafeTensor), safetensors_compare_place);
    for (int i = 0; i < st->count; i++) {
        const SafeTensor* t = &st->tensors[i];
        if (t->begin != at)
            die(USAGE, "%s: tensor \"%s\": begins at byte %llu, but %llu is the next one; the file is damaged",
                st->file, t->name, (unsigned long long)t->begin, (unsigned long long)at);
        at = t->end;
    }
    if (at != file_size)
        die(USAGE, "%s: %llu bytes at its end belong to no tensor; the file is damaged", st->file,
            (unsigned long long)(file_size - at));
}

static inline void safetensors_check_metadata(const SafeTensors* st, const JsonNode* node) {
    int is_sound = node->type == JSON_OBJECT;
    for (const JsonNode* m = node->first; m; m = m->next) is_sound = is_sound && m->type == JSON_STRING;
    if (!is_sound) die(USAGE, "%s: its __metadata__ is not an object of strings", st->file);
}

// The tensor with that name, or NULL.
static inline const SafeTensor* safetensors_find(const SafeTensors* st, const char* name) {
    SafeTensor key;
    key.name = name;
    if (st->count == 0) return NULL;
    return (const SafeTensor*)bsearch(&key, st->tensors, (size_t)st->count, sizeof(key), safetensors_compare_name);
}

// Add an entry for each second name of a tensor.
static inline void safetensors_add_aliases(SafeTensors* st, const JsonNode* metadata) {
    int count = st->count;
    for (const JsonNode* m = metadata ? metadata->first : NULL; m; m = m->next) {
        const SafeTensor* stored = safetensors_find(st, m->string);
        if (!stored || safetensors_find(st, m->key)) continue;
        st->tensors[count] = *stored;
        st->tensors[count++].name = m->key;
    }
    st->count = count;
    qsort(st->tensors, (size_t)st->count, sizeof(SafeTensor), safetensors_compare_name);
}

static inline void safetensors_open(SafeTensors* st, const char* path) {
    unsigned char length[8];
    char error[JSON_ERROR_SIZE];
    uint64_t size, n = 0;
    memset(st, 0, sizeof(*st));
    st->file = xprintf("%s", path);
    st->fd = open_input(path, &size, ".safetensors file", USAGE);
    if (size < sizeof(length))
        die(USAGE, "%s: %llu bytes are too few for a safetensors file; it is truncated", path,
            (unsigned long long)size);
    read_input(st->fd, path, length, sizeof(length), 0);
    for (int i = 7; i >= 0; i--) n = n << 8 | length[i];
    if (n > size - sizeof(length))
        die(USAGE,
            "%s: its header should have %llu bytes, but the file ends after %llu; it is truncated or not a "
            "safetensors file",
            path, (unsigned long long)n, (unsigned long long)(size - sizeof(length)));
    if (n > SAFETENSORS_MAX_HEADER)
        die(USAGE, "%s: its header of %llu bytes is above the format's limit of %d; it is not a safetensors file", path,
            (unsigned long long)n, (int)SAFETENSORS_MAX_HEADER);

    char* text = (char*)xmalloc((size_t)n + 1);
    read_input(st->fd, path, text, (size_t)n, sizeof(length));
    if (n == 0 || text[0] != '{') die(USAGE, "%s: its header is not a JSON object; it is not a safetensors file", path);
    if (json_parse(&st->header, text, (size_t)n, error) != 0)
        die(USAGE, "%s: its header is not valid JSON: %s; the file is damaged", path, error);
    free(text);

    uint64_t data = sizeof(length) + n;
    const JsonNode* metadata = json_get(st->header.root, "__metadata__");
    st->tensors = (SafeTensor*)xcalloc(st->header.root->count + (metadata ? metadata->count : 0), sizeof(SafeTensor));
    for (const JsonNode* node = st->header.root->first; node; node = node->next) {
        if (strcmp(node->key, "__metadata__") == 0) safetensors_check_metadata(st, node);
        else st->tensors[st->count++] = safetensors_entry(node, path, data, size - data);
    }
    safetensors_check_places(st, data, size);
    for (int i = 0; i < st->count; i++) st->tensors[i].file = st->file, st->tensors[i].fd = st->fd;
    qsort(st->tensors, (size_t)st->count, sizeof(SafeTensor), safetensors_compare_name);
    safetensors_add_aliases(st, metadata);
}

static inline void safetensors_close(SafeTensors* st) {
    for (int i = 0; i < st->shard_count; i++) safetensors_close(&st->shards[i]);
    if (st->fd >= 0) close(st->fd);
    free(st->shards);
    free(st->file);
    free(st->tensors);
    json_free(&st->header);
    memset(st, 0, sizeof(*st));
}

// Read bytes first .. first + n - 1 of a tensor.
static inline void safetensors_read_bytes(const SafeTensor* t, uint64_t first, size_t n, void* out) {
    CHECK(first <= t->end - t->begin && n <= t->end - t->begin - first);
    if (pread_all(t->fd, out, n, t->begin + first) != 0)
        die(FAILED, "%s: tensor \"%s\": cannot be read: %s", t->file, t->name, pread_error());
}

static inline real real_from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof(x));
    return (real)x;
}

static inline real real_from_f16(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double x;
    if (exponent == 0) x = ldexp(fraction, -24);
    else if (exponent == 31) x = fraction ? NAN : INFINITY;
    else x = ldexp(fraction + 1024, exponent - 25);
    return (real)(bits >> 15 ? -x : x);
}

// Convert n elements of a floating-point dtype at `in`, which may be unaligned.
static inline void safetensors_convert(real* out, const char* in, size_t n, const char* dtype) {
    int is_f16 = strcmp(dtype, "F16") == 0, is_bf16 = strcmp(dtype, "BF16") == 0, is_f32 = strcmp(dtype, "F32") == 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t half;
        float single;
        double wide;
        if (is_f16 || is_bf16) {
            memcpy(&half, in + 2 * i, sizeof(half));
            out[i] = is_f16 ? real_from_f16(half) : real_from_bf16(half);
        } else if (is_f32) {
            memcpy(&single, in + 4 * i, sizeof(single));
            out[i] = (real)single;
        } else {
            memcpy(&wide, in + 8 * i, sizeof(wide));
            out[i] = (real)wide;
        }
    }
}

// Read elements first .. first + n - 1 of a tensor of F64, F32, F16 or BF16 as `real`. Ends with USAGE for other
// dtypes.
static inline void safetensors_read_real(const SafeTensor* t, uint64_t first, size_t n, real* out) {
    size_t size = (size_t)t->element_size;
    if (strcmp(t->dtype, "F64") != 0 && strcmp(t->dtype, "F32") != 0 && strcmp(t->dtype, "F16") != 0 &&
        strcmp(t->dtype, "BF16") != 0)
        die(USAGE, "%s: tensor \"%s\": its dtype is %s, but F64, F32, F16 or BF16 is needed", t->file, t->name,
            t->dtype);
    if (strcmp(t->dtype, safetensors_real_dtype()) == 0) {
        safetensors_read_bytes(t, first * size, n * size, out);
        return;
    }
    char* bytes = (char*)xmalloc(SAFETENSORS_CHUNK * size);
    for (size_t done = 0; done < n; done += SAFETENSORS_CHUNK) {
        size_t m = min_size(n - done, SAFETENSORS_CHUNK);
        safetensors_read_bytes(t, (first + done) * size, m * size, bytes);
        safetensors_convert(out + done, bytes, m, t->dtype);
    }
    free(bytes);
}

// ---------------------------------------------------------------------------------------------------------
// Several files

#define SAFETENSORS_INDEX "model.safetensors.index.json"

// The shard that an entry of the index names, in the directory of the index. It is opened at its first use.
static inline const SafeTensors* safetensors_shard(SafeTensors* st, const JsonNode* entry) {
    const char *slash = strrchr(st->file, '/'), *name = entry->string;
    if (entry->type != JSON_STRING || !*name || strlen(name) != entry->length || strchr(name, '/') ||
        strcmp(name, "..") == 0)
        die(USAGE, "%s: tensor \"%s\": is not mapped to a file in the same directory; the index is damaged", st->file,
            entry->key);
    Path path = path_of("%.*s%s", slash ? (int)(slash + 1 - st->file) : 0, st->file, name);
    // Most tensors are in the same shard as the previous one.
    for (int i = st->shard_count - 1; i >= 0; i--) {
        if (strcmp(st->shards[i].file, path.text) != 0) continue;
        return &st->shards[i];
    }
    if (!file_exists(path.text))
        die(USAGE, "%s: is missing, but %s names it; download it too", path.text, slash ? slash + 1 : st->file);
    st->shards =
        (SafeTensors*)array_reserve(st->shards, &st->shard_capacity, (size_t)st->shard_count + 1, sizeof(SafeTensors));
    safetensors_open(&st->shards[st->shard_count], path.text);
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
