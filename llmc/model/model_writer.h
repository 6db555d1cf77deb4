/* Write the tensors of a table to a safetensors file, with the names and layouts of model_files.h. */
#ifndef LLMC_MODEL_MODEL_WRITER_H
#define LLMC_MODEL_MODEL_WRITER_H

#include "llmc/data/safetensors_writer.h"
#include "llmc/model/model_files.h"

// Size and checksum of a written file.
typedef struct {
    uint64_t bytes;
    uint32_t crc;  // CRC-32
} FileDigest;

static inline const char* tensor_part_dtype(const TensorPart* part) {
    return part->type == VIEW_FLOATX ? FLOATX_NAME : safetensors_real_dtype();
}

// transpose() of 16-bit elements.
static inline void transpose_halves(uint16_t* out, const uint16_t* in, int rows, int cols) {
#pragma omp parallel for schedule(static)
    for (int i0 = 0; i0 < rows; i0 += TRANSPOSE_TILE)
        for (int j0 = 0; j0 < cols; j0 += TRANSPOSE_TILE)
            for (int i = i0; i < min_int(rows, i0 + TRANSPOSE_TILE); i++)
                for (int j = j0; j < min_int(cols, j0 + TRANSPOSE_TILE); j++)
                    out[(size_t)j * (size_t)rows + (size_t)i] = in[(size_t)i * (size_t)cols + (size_t)j];
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
    // transformers refuses a file that does not name its framework.
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

#endif
