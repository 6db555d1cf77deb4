/* Open a model's weights: model.safetensors, the shards of a large model, or an llm.c checkpoint (a file whose name ends
 * with .bin). In all cases its tensors become entries of a SafeTensors. */
#ifndef LLMC_MODEL_WEIGHT_FILES_H
#define LLMC_MODEL_WEIGHT_FILES_H

#include "llmc/data/llmc_files.h"
#include "llmc/data/safetensors.h"
#include "llmc/model/tensors.h"

static inline int name_ends_with(const char* name, const char* ending) {
    size_t n = strlen(name), m = strlen(ending);
    return n >= m && strcmp(name + n - m, ending) == 0;
}

// Open an llm.c checkpoint. It holds the table's tensors without names, in table order except for the order of layers.
// They become entries with the table's names, so that they are read like any other file's.
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
        int* kind = layer < 0 ? &outer : &inner;  // the next kind inside layers, or outside
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
        e->file = file->file, e->fd = file->fd;
    }
    if (file->count != llmc_weights_count(&w))
        die(USAGE, "%s: holds %d tensors, of which this model has %d; the file is of another model", path,
            llmc_weights_count(&w), file->count);
    qsort(file->tensors, (size_t)file->count, sizeof(SafeTensor), safetensors_compare_name);
}

static inline int tensors_are_llmc(const char* path) { return name_ends_with(path, ".bin"); }

// Instructions to convert a model to safetensors with transformers. They name the class in config.json, because another
// class would drop heads, or add random heads that look like trained ones. `from` completes the arguments.
static inline char* tensors_recipe(const char* directory, const char* from) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_";
    Json json;
    json_load(&json, path_of("%s/config.json", directory).text, (size_t)1 << 26);
    const JsonNode *all = json_get(json.root, "architectures"), *first = all ? all->first : NULL;
    const char* name = all && all->type == JSON_ARRAY && first && first->type == JSON_STRING ? first->string : "";
    char* recipe = *name && strspn(name, letters) == strlen(name)
                       ? xprintf("transformers.%s.from_pretrained(\"%s\"%s).save_pretrained(NEW), and copy the "
                                 "tokenizer's files to NEW",
                                 name, directory, from)
                       : xprintf("from_pretrained() and save_pretrained() of the model's class, which config.json does "
                                 "not name");
    json_free(&json);
    return recipe;
}

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
// as transformers does. Ends with USAGE if there are only files of PyTorch, TensorFlow or Flax.
static inline void weights_open(SafeTensors* file, const char* path) {
    static const char* const foreign[][4] = {{"pytorch_model.bin", "PyTorch", "", ""},
                                             {"pytorch_model.bin.index.json", "PyTorch", "", ""},
                                             {"tf_model.h5", "TensorFlow", " 4", ", from_tf=True"},
                                             {"flax_model.msgpack", "Flax", " 4", ", from_flax=True"}};
    const char* slash = strrchr(path, '/');
    if (!slash || strcmp(slash, "/model.safetensors") != 0 || file_exists(path)) {
        safetensors_open(file, path);
        weights_unwrap(file);
        return;
    }
    Path directory = path_of("%.*s", (int)(slash - path), path),
         index = path_of("%s/" SAFETENSORS_INDEX, directory.text);
    int is_sharded = file_exists(index.text);
    if (is_sharded) safetensors_open_index(file, index.text);
    for (size_t i = 0; i < COUNT_OF(foreign) && !is_sharded; i++) {
        Path other = path_of("%s/%s", directory.text, foreign[i][0]);
        if (file_exists(other.text))
            die(USAGE, "%s: holds weights as %s writes them; write model.safetensors with transformers%s: %s",
                other.text, foreign[i][1], foreign[i][2], tensors_recipe(directory.text, foreign[i][3]));
    }
    if (!is_sharded) safetensors_open(file, path);  // reports that it is missing
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

#endif
