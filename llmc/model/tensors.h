/* One table for tensors. A model lists its tensors as rows (name, field of a struct, shape, ...). This file turns
 * the rows into offsets in one flat buffer and binds structs of pointers to it. Parameters, gradients, moments,
 * activations, checkpoints, tests and printing all use the same table, so no code computes x + l * B * T * C.
 *
 * Layout: rows in the order in which they are added, so layer by layer. A tensor starts on a multiple of 128 elements,
 * except if its row continues a group, such as Q, K, V, which one matmul uses as one tensor. A group has no padding.
 * Rows of padding at a tensor's end (a vocabulary of 50,257 is stored as 50,304) are zero and stay zero. */
#ifndef LLMC_MODEL_TENSORS_H
#define LLMC_MODEL_TENSORS_H

#include "llmc/base/rng.h"
#include "llmc/device/device.h"

#define TENSOR_ALIGNMENT 128  // elements

typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL, INIT_NORMAL_RESIDUAL } Init;
// How a file stores a matrix that is [out, in] in memory: the same way, or as [in, out] (GPT-2's Conv1D).
typedef enum { AS_IN_MEMORY, TRANSPOSED } FileLayout;
typedef enum { OWN, GROUPED, SHARED, SAME } Placement;
// OWN: starts on an aligned element.  GROUPED: follows the previous row without padding.
// SHARED: all layers use one buffer (gradients, and activations that the backward pass recomputes for a layer).
// SAME: the buffer of the previous row.

// A row as written in a model's source. Omitted fields are zero, which is the first value of each enum. Dimensions are
// symbols: indices into an array of sizes, 0 = no dimension.
typedef struct {
    const char* name;  // as in files (the Hugging Face name); %d stands for the layer
    size_t field;      // offsetof the floatX* or real* in the struct to bind
    int shape[2];      // symbols; the logical shape in memory
    Placement placement;
    int stored;  // symbol of the number of stored rows if more than shape[0], else 0
    Init init;
    int decay;  // 1: weight decay applies
    FileLayout file;
    size_t fp32_copy;  // offsetof the real* for the fp32 copy (optim/fp32_copies.h); 0: none
    int matrices;      // Muon updates it as this many stacked matrices of equal shape; 0: AdamW updates it
    // A linear layer's weight: offsetof the q of the operands x and dy that it is multiplied with, in the structs of
    // activations (fp8/state.h). 0: they have none.
    size_t x_q, dy_q;
    int x_is_read;  // 1: other ops read x.v too
} TensorRow;

typedef struct {
    char name[96];
    size_t field;
    int layer;        // -1: not part of a layer
    int ndim;         // 1 or 2
    int is_grouped;   // 1: continues the group of the tensor before it
    int shape[2];     // shape[1] is 1 for a vector
    int stored_rows;  // >= shape[0]
    Init init;
    int decay;
    FileLayout file;
    size_t offset, size;            // elements in the flat buffer; the size includes rows of padding
    size_t fp32_copy, fp32_offset;  // the row's fp32_copy; elements in the buffer of fp32 copies
    int matrices;                   // the row's
    size_t x_q, dy_q;
    int x_is_read;
} Tensor;

// Usage: zero-initialise, tensors_add() rows, tensors_finish(), at the end tensors_free().
typedef struct {
    Tensor* tensors;
    int count;
    size_t capacity;
    size_t elements;       // of the flat buffer, padding included
    size_t parameters;     // logical elements
    size_t fp32_elements;  // of the buffer of fp32 copies
    int fixed;             // 1: the parameters are never updated and have neither gradients nor moments
} TensorTable;

// A part of the flat buffer, in multiples of TENSOR_ALIGNMENT elements, such as one rank's shard.
typedef struct {
    size_t begin, size;
} FlatRange;

// The whole flat buffer.
static inline FlatRange tensors_whole(const TensorTable* table) {
    FlatRange shard = {.begin = 0, .size = table->elements};
    return shard;
}

// The part that updates change: all of it, or nothing if the parameters are fixed.
static inline FlatRange tensors_updated(const TensorTable* table) {
    FlatRange shard = {.begin = 0, .size = table->fixed ? 0 : table->elements};
    return shard;
}

// Levels of --recompute, and FORWARD_ONLY: there is no backward pass, so no activations are kept for it, and the
// parameters are fixed.
enum { RECOMPUTE_NOTHING, RECOMPUTE_GELU, RECOMPUTE_NORMS, FORWARD_ONLY };

// Append `count` rows for `layer` (-1: outside the layers), with sizes from dims[symbol].
static inline void tensors_add(TensorTable* table, const TensorRow* rows, int count, const int* dims, int layer) {
    for (int i = 0; i < count; i++) {
        const TensorRow* row = &rows[i];
        table->tensors =
            (Tensor*)array_reserve(table->tensors, &table->capacity, (size_t)table->count + 1, sizeof(Tensor));
        Tensor t;
        memset(&t, 0, sizeof t);
        const char* percent = strstr(row->name, "%d");
        if (percent)
            snprintf(t.name, sizeof t.name, "%.*s%d%s", (int)(percent - row->name), row->name, layer, percent + 2);
        else snprintf(t.name, sizeof t.name, "%s", row->name);
        t.field = row->field;
        t.layer = layer;
        t.ndim = row->shape[1] ? 2 : 1;
        t.is_grouped = row->placement == GROUPED;
        t.shape[0] = dims[row->shape[0]];
        t.shape[1] = row->shape[1] ? dims[row->shape[1]] : 1;
        t.stored_rows = row->stored ? dims[row->stored] : t.shape[0];
        t.init = row->init;
        t.decay = row->decay;
        t.file = row->file;
        t.size = (size_t)t.stored_rows * (size_t)t.shape[1];
        int first = -1;
        for (int k = 0; row->placement == SHARED && k < table->count && first < 0; k++)
            if (table->tensors[k].layer >= 0 && table->tensors[k].field == t.field) first = k;
        if (row->placement == SAME) first = table->count - 1;
        if (first >= 0) {
            t.offset = table->tensors[first].offset;
        } else {
            t.offset = t.is_grouped ? table->elements : round_up(table->elements, TENSOR_ALIGNMENT);
            table->elements = t.offset + t.size;
            table->parameters += (size_t)t.shape[0] * (size_t)t.shape[1];
        }
        t.matrices = row->matrices;
        t.x_q = row->x_q, t.dy_q = row->dy_q, t.x_is_read = row->x_is_read;
        if ((t.fp32_copy = row->fp32_copy) != 0) {
            t.fp32_offset = table->fp32_elements;
            table->fp32_elements += round_up(t.size, TENSOR_ALIGNMENT);
        }
        table->tensors[table->count++] = t;
    }
}

// Append all rows of a model. Adjacent rows whose names have a %d are appended once for each of L layers, layer by
// layer, the others once.
static inline void tensors_add_layers(TensorTable* table, const TensorRow* rows, int count, const int* dims, int L) {
    for (int i = 0, n; i < count; i += n) {
        int in_layer = strstr(rows[i].name, "%d") != NULL;
        for (n = 1; i + n < count && (strstr(rows[i + n].name, "%d") != NULL) == in_layer;) n++;
        for (int l = in_layer ? 0 : -1; l < (in_layer ? L : 0); l++) tensors_add(table, rows + i, n, dims, l);
    }
}

// Call after the last row. Rounds the flat buffer up to whole aligned blocks, so that it can be split between them.
static inline void tensors_finish(TensorTable* table) { table->elements = round_up(table->elements, TENSOR_ALIGNMENT); }

static inline void tensors_free(TensorTable* table) {
    free(table->tensors);
    memset(table, 0, sizeof *table);
}

// Point the fields of `outer` (tensors outside the layers) and of `layers` (an array of structs of `layer_bytes`
// each) to the flat buffer `base`, whose elements have `element_bytes` bytes.
static inline void tensors_bind(const TensorTable* table, void* base, size_t element_bytes, void* outer, void* layers,
                                size_t layer_bytes) {
    for (int i = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        char* target = t->layer < 0 ? (char*)outer : (char*)layers + (size_t)t->layer * layer_bytes;
        void* pointer = (char*)base + t->offset * element_bytes;
        memcpy(target + t->field, &pointer, sizeof pointer);
    }
}

// Initial values of new weights: normal with standard deviation `std` (`residual_std` for projections into the residual
// stream), ones, zeros.
typedef struct {
    double std, residual_std;
    uint64_t seed;
} TensorInit;

// Set n elements of the table's tensor k, from element `first` on. Element i depends on (seed, k, i) only.
static inline void tensor_init(real* w, const TensorTable* table, int k, size_t first, size_t n, TensorInit init) {
    const Tensor* t = &table->tensors[k];
    uint64_t key = rng_stream(init.seed, (uint64_t)k, 0, SITE_INIT);
    double deviation = t->init == INIT_NORMAL ? init.std : t->init == INIT_NORMAL_RESIDUAL ? init.residual_std : 0;
    double other = t->init == INIT_ONE;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) w[i] = (real)(deviation > 0 ? deviation * rng_normal(key, first + i) : other);
}

// Fill host parameters for training from scratch. Padding is zero.
static inline void tensors_init(const TensorTable* table, real* params, TensorInit init) {
    // One thread would need seconds for zeros alone: the memory is new, and each page is a fault.
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < table->elements; i++) params[i] = 0;
    for (int k = 0; k < table->count; k++) {
        const Tensor* t = &table->tensors[k];
        tensor_init(params + t->offset, table, k, 0, (size_t)t->shape[0] * (size_t)t->shape[1], init);
    }
}

// Index of the first tensor that holds a value that is not finite, or -1. For error messages: not optimised for speed.
static inline int tensors_first_not_finite(const TensorTable* table, const real* values) {
    for (int k = 0; k < table->count; k++)
        for (size_t i = 0; i < table->tensors[k].size; i++)
            if (!isfinite((double)values[table->tensors[k].offset + i])) return k;
    return -1;
}

static inline void tensors_print(FILE* out, const TensorTable* table) {
    fprintf(out, "%5s  %-40s %-15s %12s %14s  %s\n", "index", "tensor", "shape", "parameters", "offset", "decay");
    for (int i = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        char shape[32];
        if (t->ndim == 2) snprintf(shape, sizeof shape, "[%d, %d]", t->shape[0], t->shape[1]);
        else snprintf(shape, sizeof shape, "[%d]", t->shape[0]);
        fprintf(out, "%5d  %-40s %-15s %12zu %14zu  %s\n", i, t->name, shape, (size_t)t->shape[0] * (size_t)t->shape[1],
                t->offset, t->decay ? "yes" : "no");
    }
    fprintf(out, "%d tensors, %zu parameters\n", table->count, table->parameters);
}

#endif
