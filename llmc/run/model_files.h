/* Tensors of a table, to and from safetensors files under their Hugging Face names and layouts.
 *
 * A file holds logical shapes: rows of padding are left out, and matrices that a model's files keep as [in, out] are
 * transposed on the way. A rank's shard of the optimizer lies as it is in a file of its own. Loading is strict: a tensor
 * that is missing, unknown, or of another shape or a type that is no floating type ends the program with its name, unless
 * FileRules let it pass. Weights may also be in a checkpoint of llm.c (a file whose name ends with .bin): it holds the
 * table's tensors without their names, in the table's order but for layers, and matrices as they are in memory. */
#ifndef LLMC_MODEL_FILES_H
#define LLMC_MODEL_FILES_H

#include "../data/llmc_files.h"
#include "../data/safetensors.h"
#include "../device/host_view.h"
#include "tensors.h"

// One flat buffer of the device laid out by the table, stored under the table's names with a prefix ("m." for a first
// moment) in the type that the buffer has.
typedef struct {
    const char* prefix;
    void* device;
    ViewType type;
    const void* host;  // a copy of the buffer's bytes, which is written instead; NULL: there is none
} TensorPart;

// A file as it was written.
typedef struct {
    uint64_t bytes;
    uint32_t crc;  // CRC-32
} FileDigest;

// What a foreign file may do: leave out the first part of names ("transformer."), hold tensors nobody needs, call some by
// older names, and lack some, which then keep the values that they have.
typedef struct {
    const char* optional_prefix;  // NULL: none
    const char* const* ignored;   // endings of names
    int ignored_count;
    const char* const (*aliases)[2];  // an ending of names, and what may be there instead
    int alias_count;
    const char* const* may_lack;  // beginnings of names
    int may_lack_count;
} FileRules;

enum { TRANSPOSE_TILE = 64 };

// out[j, i] = in[i, j] for in [rows, cols].
static inline void transpose(real* out, const real* in, int rows, int cols) {
#pragma omp parallel for schedule(static)
    for (int i0 = 0; i0 < rows; i0 += TRANSPOSE_TILE)
        for (int j0 = 0; j0 < cols; j0 += TRANSPOSE_TILE)
            for (int i = i0; i < min_int(rows, i0 + TRANSPOSE_TILE); i++)
                for (int j = j0; j < min_int(cols, j0 + TRANSPOSE_TILE); j++)
                    out[(size_t)j * (size_t)rows + (size_t)i] = in[(size_t)i * (size_t)cols + (size_t)j];
}

static inline size_t tensor_elements(const Tensor* t) { return (size_t)t->shape[0] * (size_t)t->shape[1]; }

// The shape that the file has. Returns its dimensions.
static inline int tensor_file_shape(const Tensor* t, uint64_t shape[2]) {
    int swap = t->file == TRANSPOSED;
    shape[0] = (uint64_t)t->shape[swap];
    shape[1] = (uint64_t)t->shape[!swap];
    return t->ndim;
}

static inline const char* tensor_part_dtype(const TensorPart* part) {
    return part->type == VIEW_FLOATX ? FLOATX_NAME : safetensors_real_dtype();
}

// The same for 16-bit elements.
static inline void transpose_halves(uint16_t* out, const uint16_t* in, int rows, int cols) {
#pragma omp parallel for schedule(static)
    for (int i0 = 0; i0 < rows; i0 += TRANSPOSE_TILE)
        for (int j0 = 0; j0 < cols; j0 += TRANSPOSE_TILE)
            for (int i = i0; i < min_int(rows, i0 + TRANSPOSE_TILE); i++)
                for (int j = j0; j < min_int(cols, j0 + TRANSPOSE_TILE); j++)
                    out[(size_t)j * (size_t)rows + (size_t)i] = in[(size_t)i * (size_t)cols + (size_t)j];
}

static inline size_t tensor_part_element(const TensorPart* part) {
    return part->type == VIEW_FLOATX ? sizeof(floatX) : sizeof(real);
}

// The n elements from `first` of the part's buffer as they are stored there: in its copy, or brought to `space`.
static inline const void* tensor_part_elements(const TensorPart* part, size_t first, size_t n, void* space,
                                               Context* ctx) {
    size_t size = tensor_part_element(part);
    if (part->host) return (const char*)part->host + first * size;
    device_download(ctx, space, (const char*)part->device + first * size, n * size);
    return space;
}

static inline int tensors_close(SafeTensorsWriter* w, FileDigest* digest) {
    int result = safetensors_writer_finish(w);
    digest->bytes = w->bytes;
    digest->crc = w->crc;
    return result;
}

// Write all parts to one file. Returns 0 and the file's digest, or -1 with errno; the file is then incomplete.
static inline int tensors_write(const char* path, const TensorTable* table, const TensorPart* parts, int count,
                                FileDigest* digest, Context* ctx) {
    SafeTensorsWriter w;
    size_t largest = 0;
    safetensors_writer_create(&w, path);
    // transformers refuses a file that does not say which framework's layout it has.
    safetensors_writer_metadata(&w, "format", "pt");
    for (int p = 0; p < count; p++) {
        for (int i = 0; i < table->count; i++) {
            const Tensor* t = &table->tensors[i];
            char name[128];
            uint64_t shape[2];
            snprintf(name, sizeof name, "%s%s", parts[p].prefix, t->name);
            safetensors_writer_add(&w, name, tensor_part_dtype(&parts[p]), tensor_file_shape(t, shape), shape);
            if (tensor_elements(t) > largest) largest = tensor_elements(t);
        }
    }
    safetensors_writer_begin(&w);
    void *space = xmalloc(largest * sizeof(real)), *turned = xmalloc(largest * sizeof(real));
    for (int p = 0; p < count && !w.error; p++) {
        size_t size = tensor_part_element(&parts[p]);
        for (int i = 0; i < table->count && !w.error; i++) {
            const Tensor* t = &table->tensors[i];
            const void* values = tensor_part_elements(&parts[p], t->offset, tensor_elements(t), space, ctx);
            if (t->file == TRANSPOSED) {
                if (size == sizeof(real)) transpose((real*)turned, (const real*)values, t->shape[0], t->shape[1]);
                else transpose_halves((uint16_t*)turned, (const uint16_t*)values, t->shape[0], t->shape[1]);
                values = turned;
            }
            safetensors_writer_append(&w, values, size * tensor_elements(t));
        }
    }
    free(space), free(turned);
    return tensors_close(&w, digest);
}

static inline int name_ends_with(const char* name, const char* ending) {
    size_t n = strlen(name), m = strlen(ending);
    return n >= m && strcmp(name + n - m, ending) == 0;
}

// The entry of the file for this tensor, under its name, an older one, or either without the optional prefix; NULL if
// none.
static inline const SafeTensor* tensors_file_entry(const SafeTensors* file, const char* prefix, const Tensor* t,
                                                   const FileRules* rules) {
    char name[128];
    snprintf(name, sizeof name, "%s%s", prefix, t->name);
    const SafeTensor* entry = safetensors_find(file, name);
    size_t n = rules && rules->optional_prefix ? strlen(rules->optional_prefix) : 0;
    if (!n || strncmp(t->name, rules->optional_prefix, n) != 0) n = 0;
    if (!entry && n) entry = safetensors_find(file, t->name + n);
    for (int i = 0; rules && i < rules->alias_count && !entry; i++) {
        const char* const* alias = rules->aliases[i];
        if (!name_ends_with(t->name, alias[0])) continue;
        snprintf(name, sizeof name, "%.*s%s", (int)(strlen(t->name) - strlen(alias[0])), t->name, alias[1]);
        entry = safetensors_find(file, name);
        if (!entry && n) entry = safetensors_find(file, name + n);
    }
    return entry;
}

static inline int tensors_may_lack(const FileRules* rules, const Tensor* t) {
    for (int i = 0; rules && i < rules->may_lack_count; i++)
        if (strncmp(t->name, rules->may_lack[i], strlen(rules->may_lack[i])) == 0) return 1;
    return 0;
}

// The tensors of a checkpoint of llm.c as entries under the table's names, so that they are read as those of any file.
static inline void tensors_open_llmc(SafeTensors* file, const char* path, const TensorTable* table) {
    LlmcWeights w;
    llmc_weights_open(&w, path);
    memset(file, 0, sizeof *file);
    file->file = w.file, file->fd = w.fd;
    file->tensors = (SafeTensor*)xcalloc((size_t)table->count, sizeof(SafeTensor));
    for (int i = 0, layer = -1, outer = 0, inner = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        if (t->layer != layer) inner = 0;
        layer = t->layer;
        int* kind = layer < 0 ? &outer : &inner;  // the next one of those that are in layers, or are not
        while (*kind < LLMC_KINDS && w.kind[*kind].in_layers != (layer >= 0)) ++*kind;
        if (*kind == LLMC_KINDS || layer >= w.L) continue;  // the model has more tensors
        const LlmcKind* k = &w.kind[(*kind)++];
        SafeTensor* e = &file->tensors[file->count++];
        e->name = t->name;
        e->dtype = w.is_bfloat16 ? "BF16" : "F32";
        e->element_size = w.is_bfloat16 ? 2 : 4;
        e->ndim = k->ndim;
        e->shape[0] = k->shape[0], e->shape[1] = k->shape[1];
        e->elements = k->shape[0] * k->shape[1];
        e->begin = k->begin + (uint64_t)max_int(layer, 0) * k->bytes;
        e->end = e->begin + e->elements * (uint64_t)e->element_size;
    }
    if (file->count != llmc_weights_count(&w))
        die(USAGE, "%s: holds %d tensors, of which this model has %d; the file is of another model", path,
            llmc_weights_count(&w), file->count);
    qsort(file->tensors, (size_t)file->count, sizeof(SafeTensor), safetensors_compare_name);
}

static inline int tensors_are_llmc(const char* path) { return name_ends_with(path, ".bin"); }

// Ends with USAGE where `path`, a directory's model.safetensors, is missing and other files beside it hold the weights.
static inline void tensors_check_form(const char* path) {
    static const char* const others[] = {"model.safetensors.index.json", "pytorch_model.bin",
                                         "pytorch_model.bin.index.json"};
    const char* slash = strrchr(path, '/');
    int length = slash ? (int)(slash - path) : 0;
    if (!slash || strcmp(slash, "/model.safetensors") != 0 || file_exists(path)) return;
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        char* other = xprintf("%.*s/%s", length, path, others[i]);
        if (file_exists(other))
            die(USAGE,
                "%s: its weights are not in one model.safetensors; write them so with transformers: "
                "AutoModelForPreTraining.from_pretrained(\"%.*s\").save_pretrained(NEW, max_shard_size=\"1TB\")",
                other, length, path);
        free(other);
    }
}

// Open a file of weights. Returns how it holds the matrices that the table calls TRANSPOSED.
static inline FileLayout tensors_open(SafeTensors* file, const char* path, const TensorTable* table) {
    int is_llmc = tensors_are_llmc(path);
    if (is_llmc) {
        tensors_open_llmc(file, path, table);
    } else {
        tensors_check_form(path);
        safetensors_open(file, path);
    }
    return is_llmc ? AS_IN_MEMORY : TRANSPOSED;
}

// Elements first .. first + n - 1 of a tensor as it lies in memory, from its entry in a file. Of a matrix that the file
// has turned, only the rows that they touch are read.
static inline void tensor_read(const SafeTensors* file, const SafeTensor* entry, const Tensor* t, size_t first,
                               size_t n, real* out) {
    if (t->file != TRANSPOSED) {
        safetensors_read_real(file, entry, first, n, out);
        return;
    }
    size_t cols = (size_t)t->shape[1], row = first / cols, rows = (first + n + cols - 1) / cols - row;
    real* turned = (real*)xmalloc(2 * rows * cols * sizeof(real));  // [cols, rows], then [rows, cols]
    if (rows == (size_t)t->shape[0]) safetensors_read_real(file, entry, 0, rows * cols, turned);
    else
        for (size_t j = 0; j < cols; j++)
            safetensors_read_real(file, entry, j * (size_t)t->shape[0] + row, rows, turned + j * rows);
    transpose(turned + rows * cols, turned, (int)cols, (int)rows);
    memcpy(out, turned + rows * cols + first - row * cols, n * sizeof(real));
    free(turned);
}

// Read parts that hold the elements `range` of the table's flat buffer from one file; padding is set to zero. `rules` may
// be NULL; what they let a file lack is appended to `lacking` by name, if that is not NULL.
static inline void tensors_read_range(const char* path, const TensorTable* table, const TensorPart* parts, int count,
                                      FlatRange range, const FileRules* rules, Text* lacking, Context* ctx) {
    SafeTensors file;
    FileLayout layout = tensors_open(&file, path, table);
    char* used = (char*)xcalloc((size_t)file.count, 1);
    for (int p = 0; p < count; p++) {
        HostView view = host_view_open(parts[p].device, range.size, parts[p].type);
        if (rules && rules->may_lack_count) host_view_read(ctx, &view);
        else memset(view.values, 0, range.size * sizeof(real));
        for (int i = 0; i < table->count; i++) {
            Tensor in_file = table->tensors[i];
            const Tensor* t = &in_file;
            if (t->file == TRANSPOSED) in_file.file = layout;
            const SafeTensor* entry = tensors_file_entry(&file, parts[p].prefix, t, rules);
            uint64_t shape[2];
            int ndim = tensor_file_shape(t, shape);
            if (!entry && tensors_may_lack(rules, t)) {
                if (lacking) text_printf(lacking, "%s%s", lacking->length ? ", " : "", t->name);
                continue;
            }
            if (!entry)
                die(USAGE, "%s: tensor \"%s%s\" is missing; the file is of another model", path, parts[p].prefix,
                    t->name);
            if (entry->ndim != ndim || entry->shape[0] != shape[0] || (ndim == 2 && entry->shape[1] != shape[1])) {
                char expected[64];
                snprintf(expected, sizeof expected, ndim == 2 ? "[%d, %d]" : "[%d]", (int)shape[0], (int)shape[1]);
                die(USAGE, "%s: tensor \"%s\": its shape is not the %s that config.json implies", path, entry->name,
                    expected);
            }
            used[entry - file.tensors] = 1;
            size_t from = t->offset > range.begin ? t->offset : range.begin;
            size_t to = min_size(t->offset + tensor_elements(t), range.begin + range.size);
            if (from < to) tensor_read(&file, entry, t, from - t->offset, to - from, view.values + from - range.begin);
        }
        host_view_write(ctx, &view);
        host_view_close(&view);
    }
    for (int i = 0; i < file.count; i++) {
        const char* name = file.tensors[i].name;
        int known = used[i];
        for (int k = 0; rules && k < rules->ignored_count && !known; k++)
            known = name_ends_with(name, rules->ignored[k]);
        if (!known) die(USAGE, "%s: tensor \"%s\" is not part of this model; the file is of another model", path, name);
    }
    free(used);
    safetensors_close(&file);
}

// The same for parts that hold the whole buffer.
static inline void tensors_read(const char* path, const TensorTable* table, const TensorPart* parts, int count,
                                const FileRules* rules, Text* lacking, Context* ctx) {
    tensors_read_range(path, table, parts, count, tensors_whole(table), rules, lacking, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Shards: a range of the flat buffers as it lies in memory, padding included, in a file that says which. A part's tensor
// has the prefix without its dot for a name.

// Of what the flat buffer's layout is made: names, shapes, places.
static inline uint32_t tensors_fingerprint(const TensorTable* table) {
    Text text = {NULL, 0, 0};
    Crc32 crc;
    for (int i = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        text_printf(&text, "%s %d %d %d %zu\n", t->name, t->ndim, t->shape[0], t->shape[1], t->offset);
    }
    crc32_init(&crc);
    uint32_t result = crc32_update(&crc, 0, text.text, text.length);
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
        die(USAGE, "%s: its __metadata__ has no number \"%s\"; it is no shard of an optimizer", file->file, key);
    return strtoull(fact->string, NULL, 10);
}

// Open a shard of this table. Returns the elements that it holds.
static inline FlatRange tensors_open_shard(SafeTensors* file, const char* path, const TensorTable* table) {
    safetensors_open(file, path);
    FlatRange range = {(size_t)tensors_shard_fact(file, "begin"), (size_t)tensors_shard_fact(file, "size")};
    if (tensors_shard_fact(file, "table") != tensors_fingerprint(table) ||
        tensors_shard_fact(file, "elements") != table->elements)
        die(USAGE, "%s: is a shard of another model's optimizer", path);
    if (range.begin > table->elements || range.size > table->elements - range.begin)
        die(USAGE, "%s: claims %zu elements from %zu, but there are %zu; the file is damaged", path, range.size,
            range.begin, table->elements);
    return range;
}

// Read of an open shard, which holds `held`, what lies in `wanted` of one part: `values` are those of `wanted`.
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
    if (from < to) safetensors_read_real(file, entry, from - held.begin, to - from, values + from - wanted.begin);
}

#endif
