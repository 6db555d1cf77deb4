/* Read the tensors of a table from safetensors files, with Hugging Face names and layouts. model_writer.h writes them.
 *
 * A file holds logical shapes: rows of padding are not stored, and matrices that a model's files store as [in, out] are
 * transposed when they are read and written. Loading is strict: a tensor that is missing, unknown, or has another shape
 * or a type that is not floating point ends the program with its name, unless FileRules allow it. So does a non-finite
 * value.
 *
 * A model's weights are model.safetensors, the shards of a large model, or an llm.c checkpoint (a file whose name ends
 * with .bin). In all cases its tensors become entries of a SafeTensors. */
#ifndef LLMC_MODEL_MODEL_FILES_H
#define LLMC_MODEL_MODEL_FILES_H

#include "llmc/data/safetensors.h"
#include "llmc/device/copies.h"
#include "llmc/import/room.h"
#include "llmc/model/tensors.h"

// ---------------------------------------------------------------------------------------------------------
// Open a model's weights

static inline int name_ends_with(const char* name, const char* ending) {
    size_t n = strlen(name), m = strlen(ending);
    return n >= m && strcmp(name + n - m, ending) == 0;
}

static inline int tensors_are_llmc(const char* path) { return name_ends_with(path, ".bin"); }

// Remove the prefixes that all names have because a wrapper's state was saved: torch.compile's, DistributedDataParallel's
// or a Lightning module's.
static inline void weights_unwrap(SafeTensors* file) {
    static const char* const prefixes[] = {"_orig_mod.", "module.", "model."};
    for (size_t k = 0; k < COUNT_OF(prefixes) && file->count;) {
        size_t n = strlen(prefixes[k++]);
        const char *first = file->tensors[0].name, *last = file->tensors[file->count - 1].name;  // they are sorted
        if (strncmp(first, prefixes[k - 1], n) != 0 || strncmp(last, prefixes[k - 1], n) != 0) continue;
        for (int i = 0; i < file->count; i++) file->tensors[i].name += n;
        k = 0;
    }
}

// Open the weights at `path`. If `path` is a missing model.safetensors, open the shards in the same directory instead,
// as transformers does.
static inline void weights_open(SafeTensors* file, const char* path) {
    const char* slash = strrchr(path, '/');
    Path index = path_of("%.*s/" SAFETENSORS_INDEX, slash ? (int)(slash - path) : 0, path);
    int is_sharded = slash && strcmp(slash, "/model.safetensors") == 0 && !file_exists(path) && file_exists(index.text);
    if (is_sharded) safetensors_open_index(file, index.text);
    else safetensors_open(file, path);
    weights_unwrap(file);
}

// Open a weight file of either kind. Returns its layout of the matrices that the table marks TRANSPOSED.
static inline FileLayout tensors_open(SafeTensors* file, const char* path, const TensorTable* table) {
    int is_llmc = tensors_are_llmc(path);
    if (is_llmc) tensors_open_llmc(file, path, table);
    else weights_open(file, path);
    return is_llmc ? AS_IN_MEMORY : TRANSPOSED;
}

// Whether tensors of one file have different values.
static inline int tensors_differ(const SafeTensor* a, const SafeTensor* b) {
    enum { PIECE = 1 << 16 };  // elements
    int differ = a->elements != b->elements;
    real *x = (real*)xmalloc(2 * PIECE * sizeof(real)), *y = x + PIECE;
    for (uint64_t at = 0; !differ && at < a->elements; at += PIECE) {
        size_t n = min_size(a->elements - at, PIECE);
        safetensors_read_real(a, at, n, x), safetensors_read_real(b, at, n, y);
        for (size_t i = 0; i < n; i++) differ |= x[i] != y[i];
    }
    free(x);
    return differ;
}

// Whether a file agrees with a config.json that ties the head to the embedding: it has no head, or one with equal
// values. As in transformers, a head with other values is loaded untied. `pairs`: the embedding, which may lack the
// prefix, and the head; then other tensors and the tensors that are read instead. If `warns`, this rank prints warnings
// about pairs that differ.
static inline int weights_tie(const char* path, const char* prefix, const char* const (*pairs)[2], int count,
                              int warns) {
    SafeTensors file;
    int is_tied = 1;
    if (tensors_are_llmc(path)) return 1;  // it has no head
    weights_open(&file, path);
    for (int i = 0; i < count; i++) {
        Path whole = path_of("%s%s", prefix, pairs[i][0]);
        const SafeTensor *a = safetensors_find(&file, whole.text), *b = safetensors_find(&file, pairs[i][1]);
        if (!a) a = safetensors_find(&file, pairs[i][0]);
        if (!a || !b || !tensors_differ(a, b)) continue;
        if (i == 0) is_tied = 0;
        if (warns)
            warn("%s: tensor \"%s\" differs from \"%s\", to which config.json ties it; it is loaded untied", b->file,
                 b->name, a->name);
    }
    safetensors_close(&file);
    return is_tied;
}

// ---------------------------------------------------------------------------------------------------------
// Tensors of a table

// A flat buffer on the device with the table's layout. It is stored in its own type, under the table's names with a
// prefix ("m." for a first moment).
typedef struct {
    const char* prefix;
    void* device;
    ViewType type;
    const void* host;  // a copy of the buffer, to write instead; NULL: none
} TensorPart;

// Deviations that are allowed in files of other programs: names without a prefix ("transformer."), tensors that are not
// needed, older names, and missing tensors, which get initial values.
typedef struct {
    const char* optional_prefix;  // NULL: none
    const char* const* ignored;   // suffixes of names
    int ignored_count;
    const char* const (*aliases)[2];  // a suffix of names, and its alternative
    int alias_count;
    int preferred_count;          // the first aliases, which are preferred if the file has both names
    const char* const* may_lack;  // prefixes of names
    int may_lack_count;
    TensorInit init;             // of tensors that the file lacks
    const char* ignored_prefix;  // of names that only a part with a prefix reads; NULL: none
} FileRules;

// ---------------------------------------------------------------------------------------------------------
// Layouts

static inline size_t tensor_elements(const Tensor* t) { return (size_t)t->shape[0] * (size_t)t->shape[1]; }

// The shape in the file. Returns the number of dimensions.
static inline int tensor_file_shape(const Tensor* t, uint64_t shape[2]) {
    int swap = t->file == TRANSPOSED;
    shape[0] = (uint64_t)t->shape[swap];
    shape[1] = (uint64_t)t->shape[!swap];
    return t->ndim;
}

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

static inline size_t tensor_part_element(const TensorPart* part) {
    return part->type == VIEW_FLOATX ? sizeof(floatX) : sizeof(real);
}

// n elements of the part's buffer from `first` on, in the buffer's type: from its copy, or downloaded to `space`.
static inline const void* tensor_part_elements(const TensorPart* part, size_t first, size_t n, void* space,
                                               Context* ctx) {
    size_t size = tensor_part_element(part);
    if (part->host) return (const char*)part->host + first * size;
    device_download(ctx, space, (const char*)part->device + first * size, n * size);
    return space;
}

// CRC-32 of a buffer of `elements` elements.
static inline uint32_t tensor_part_hash(const TensorPart* part, size_t elements, Context* ctx) {
    enum { PIECE = 1 << 20 };  // elements
    Crc32 table;
    uint32_t crc = 0;
    crc32_init(&table);
    void* space = xmalloc(PIECE * sizeof(real));
    for (size_t at = 0, n; at < elements; at += n) {
        n = min_size(elements - at, PIECE);
        crc = crc32_update(&table, crc, tensor_part_elements(part, at, n, space, ctx), n * tensor_part_element(part));
    }
    free(space);
    return crc;
}

// ---------------------------------------------------------------------------------------------------------
// Read

static inline int tensors_ignore_prefix(const FileRules* rules, const char* name) {
    const char* prefix = rules ? rules->ignored_prefix : NULL;
    return prefix && strncmp(name, prefix, strlen(prefix)) == 0;
}

// The file's entry for this tensor, under its name or an older one, with or without the optional prefix; NULL if there
// is none, or if the rules ignore it and the part has no prefix.
static inline const SafeTensor* tensors_file_entry(const SafeTensors* file, const char* prefix, const Tensor* t,
                                                   const FileRules* rules) {
    char name[128];
    snprintf(name, sizeof name, "%s%s", prefix, t->name);
    const SafeTensor* entry = safetensors_find(file, name);
    size_t n = rules && rules->optional_prefix ? strlen(rules->optional_prefix) : 0;
    if (!n || strncmp(t->name, rules->optional_prefix, n) != 0) n = 0;
    if (!entry && n) entry = safetensors_find(file, t->name + n);
    for (int i = 0; rules && i < rules->alias_count && (!entry || i < rules->preferred_count); i++) {
        const char* const* alias = rules->aliases[i];
        if (!name_ends_with(t->name, alias[0])) continue;
        snprintf(name, sizeof name, "%.*s%s", (int)(strlen(t->name) - strlen(alias[0])), t->name, alias[1]);
        const SafeTensor* other = safetensors_find(file, name);
        if (!other && n) other = safetensors_find(file, name + n);
        if (other) entry = other;
    }
    return entry && !*prefix && tensors_ignore_prefix(rules, entry->name) ? NULL : entry;
}

static inline int tensors_may_lack(const FileRules* rules, const Tensor* t) {
    for (int i = 0; rules && i < rules->may_lack_count; i++)
        if (strncmp(t->name, rules->may_lack[i], strlen(rules->may_lack[i])) == 0) return 1;
    return 0;
}

// Read elements first .. first + n - 1 of a tensor, in memory order, from its entry in a file. From a matrix that is
// transposed in the file, only the rows with these elements are read.
static inline void tensor_read(const SafeTensor* entry, const Tensor* t, size_t first, size_t n, real* out) {
    if (t->file != TRANSPOSED) {
        safetensors_read_real(entry, first, n, out);
        return;
    }
    size_t cols = (size_t)t->shape[1], row = first / cols, rows = (first + n + cols - 1) / cols - row;
    real* turned = (real*)xmalloc(2 * rows * cols * sizeof(real));  // [cols, rows], then [rows, cols]
    if (rows == (size_t)t->shape[0]) safetensors_read_real(entry, 0, rows * cols, turned);
    else
        for (size_t j = 0; j < cols; j++)
            safetensors_read_real(entry, j * (size_t)t->shape[0] + row, rows, turned + j * rows);
    transpose(turned + rows * cols, turned, (int)cols, (int)rows);
    memcpy(out, turned + rows * cols + first - row * cols, n * sizeof(real));
    free(turned);
}

// End with STOPPED_BY_NAN if one of n values of a part's tensor is not finite, because all results would be
// meaningless. A second moment may be infinite, because the square of a large gradient is; such an element is no longer
// updated.
static inline void tensor_check_finite(const SafeTensor* entry, const TensorPart* part, const real* values, size_t n) {
    int bad = 0, may_overflow = strcmp(part->prefix, "v.") == 0;
#pragma omp parallel for schedule(static) reduction(| : bad)
    for (size_t i = 0; i < n; i++)
        bad |= !(values[i] - values[i] == 0) && !(may_overflow && values[i] == (real)INFINITY);
    if (bad)
        die(STOPPED_BY_NAN,
            "%s: tensor \"%s\": holds values that are not finite (NaN or infinity); take an earlier checkpoint or "
            "another model",
            entry->file, entry->name);
}

// Read the elements `range` of the flat buffer, for all parts, from one file. Padding is set to zero. `rules` may be
// NULL. Names of tensors that the file lacks, as the rules allow, are appended to `lacking` if that is not NULL.
static inline void tensors_read_range(const char* path, const TensorTable* table, const TensorPart* parts, int count,
                                      FlatRange range, const FileRules* rules, Text* lacking, Context* ctx) {
    SafeTensors file;
    FileLayout layout = tensors_open(&file, path, table);
    char* used = (char*)xcalloc((size_t)file.count, 1);
    for (int p = 0; p < count; p++) {
        HostView view = host_view_open(parts[p].device, range.size, parts[p].type);
#pragma omp parallel for schedule(static)
        for (size_t k = 0; k < range.size; k++) view.values[k] = 0;
        for (int i = 0; i < table->count; i++) {
            Tensor in_file = table->tensors[i];
            const Tensor* t = &in_file;
            if (t->file == TRANSPOSED) in_file.file = layout;
            const SafeTensor* entry = tensors_file_entry(&file, parts[p].prefix, t, rules);
            uint64_t shape[2];
            int ndim = tensor_file_shape(t, shape);
            size_t from = max_size(t->offset, range.begin);
            size_t to = min_size(t->offset + tensor_elements(t), range.begin + range.size);
            real* values = view.values + from - range.begin;
            if (!entry && tensors_may_lack(rules, t)) {
                if (lacking) text_printf(lacking, "%s%s", lacking->length ? ", " : "", t->name);
                if (from < to) tensor_init(values, table, i, from - t->offset, to - from, rules->init);
                continue;
            }
            if (!entry)
                die(USAGE, "%s: tensor \"%s%s\" is missing; the file is of another model", file.file, parts[p].prefix,
                    t->name);
            if (entry->ndim != ndim || entry->shape[0] != shape[0] || (ndim == 2 && entry->shape[1] != shape[1])) {
                char expected[64];
                snprintf(expected, sizeof expected, ndim == 2 ? "[%d, %d]" : "[%d]", (int)shape[0], (int)shape[1]);
                die(USAGE, "%s: tensor \"%s\": its shape is not the %s that config.json implies", entry->file,
                    entry->name, expected);
            }
            used[entry - file.tensors] = 1;
            if (from >= to) continue;
            tensor_read(entry, t, from - t->offset, to - from, values);
            tensor_check_finite(entry, &parts[p], values, to - from);
        }
        host_view_write(ctx, &view);
        host_view_close(&view);
    }
    for (int i = 0; i < file.count; i++) {
        const SafeTensor* entry = &file.tensors[i];
        int known = used[i] || tensors_ignore_prefix(rules, entry->name);
        for (int k = 0; rules && k < rules->ignored_count && !known; k++)
            known = name_ends_with(entry->name, rules->ignored[k]);
        if (!known)
            die(USAGE, "%s: tensor \"%s\" is not part of this model; the file is of another model", entry->file,
                entry->name);
    }
    free(used);
    safetensors_close(&file);
}

// The same for the whole buffer.
static inline void tensors_read(const char* path, const TensorTable* table, const TensorPart* parts, int count,
                                const FileRules* rules, Text* lacking, Context* ctx) {
    tensors_read_range(path, table, parts, count, tensors_whole(table), rules, lacking, ctx);
}

#endif
