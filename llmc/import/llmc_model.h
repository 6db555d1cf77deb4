/* llm.c's checkpoints as the files of a model: their tensors and its sizes. */
#ifndef LLMC_IMPORT_LLMC_MODEL_H
#define LLMC_IMPORT_LLMC_MODEL_H

#include "llmc/data/safetensors.h"
#include "llmc/import/llmc_files.h"
#include "llmc/model/tensors.h"

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

// The model's sizes as a descriptor.
static inline char* llmc_model_sizes(const char* path) {
    LlmcWeights w;
    llmc_weights_open(&w, path);
    char* sizes = xprintf("L=%d,C=%d,NH=%d,V=%d,T=%d", w.L, w.C, w.NH, w.V, w.T);
    llmc_weights_close(&w);
    return sizes;
}

#endif
