/* Tensors of a table, to and from safetensors files under their Hugging Face names and layouts.
 *
 * A file holds logical shapes: rows of padding are left out, and matrices that a model's files keep as [in, out] are
 * transposed on the way. Loading is strict: a tensor that is missing, unknown, or of another shape or a type that is
 * no floating type ends the program with its name, unless FileRules let it pass. */
#ifndef LLMC_MODEL_FILES_H
#define LLMC_MODEL_FILES_H

#include "../data/safetensors.h"
#include "../device/host_view.h"
#include "tensors.h"

// One flat buffer of the device laid out by the table, stored under the table's names with a prefix ("m." for a first
// moment) in the type that the buffer has.
typedef struct {
    const char* prefix;
    void* device;
    ViewType type;
} TensorPart;

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

// Round n values in place to what `dtype` stores, packed at the start of the same memory. They came from that type, so
// nothing is lost.
static inline void tensor_pack(real* values, size_t n, const char* dtype) {
#ifdef __CUDACC__
    int is_bf16 = strcmp(dtype, "BF16") == 0, is_f16 = strcmp(dtype, "F16") == 0;
    for (size_t i = 0; i < n && (is_bf16 || is_f16); i++) {
        __nv_bfloat16 b = __float2bfloat16(values[i]);
        __half h = __float2half(values[i]);
        memcpy((char*)values + 2 * i, is_bf16 ? (void*)&b : (void*)&h, 2);
    }
#else
    (void)values, (void)n, (void)dtype;
#endif
}

// Write all parts to one file. Returns 0, or -1 with errno; the file is then incomplete.
static inline int tensors_write(const char* path, const TensorTable* table, const TensorPart* parts, int count,
                                Context* ctx) {
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
    real* turned = (real*)xmalloc(largest * sizeof(real));
    for (int p = 0; p < count; p++) {
        HostView view = host_view_open(parts[p].device, table->elements, parts[p].type);
        const char* dtype = tensor_part_dtype(&parts[p]);
        host_view_read(ctx, &view);
        for (int i = 0; i < table->count; i++) {
            const Tensor* t = &table->tensors[i];
            const real* values = view.values + t->offset;
            size_t n = tensor_elements(t), bytes = (size_t)safetensors_element_size(dtype) * n;
            if (t->file == TRANSPOSED) transpose(turned, values, t->shape[0], t->shape[1]);
            else if (bytes != n * sizeof(real)) memcpy(turned, values, n * sizeof(real));
            if (t->file == TRANSPOSED || bytes != n * sizeof(real)) values = turned;
            if (values == turned) tensor_pack(turned, n, dtype);
            safetensors_writer_append(&w, values, bytes);
        }
        host_view_close(&view);
    }
    free(turned);
    return safetensors_writer_finish(&w);
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

// Read all parts from one file; padding is set to zero. `rules` may be NULL; what they let a file lack is appended to
// `lacking` by name, if that is not NULL.
static inline void tensors_read(const char* path, const TensorTable* table, const TensorPart* parts, int count,
                                const FileRules* rules, Text* lacking, Context* ctx) {
    SafeTensors file;
    safetensors_open(&file, path);
    char* used = (char*)xcalloc((size_t)file.count, 1);
    for (int p = 0; p < count; p++) {
        HostView view = host_view_open(parts[p].device, table->elements, parts[p].type);
        if (rules && rules->may_lack_count) host_view_read(ctx, &view);
        else memset(view.values, 0, table->elements * sizeof(real));
        for (int i = 0; i < table->count; i++) {
            const Tensor* t = &table->tensors[i];
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
            real* values = view.values + t->offset;
            if (t->file == TRANSPOSED) {
                real* turned = (real*)xmalloc(tensor_elements(t) * sizeof(real));
                safetensors_read_real(&file, entry, 0, tensor_elements(t), turned);
                transpose(values, turned, (int)shape[0], (int)shape[1]);
                free(turned);
            } else {
                safetensors_read_real(&file, entry, 0, tensor_elements(t), values);
            }
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

#endif
