/* fp32 copies (ops/cast_to_fp32.h) of the parameters that the forward pass reads in full precision
 * (TensorRow.fp32_copy), and pointers to them. If floatX is fp32, the pointers are to the parameters themselves.
 *
 * The copies are made from the master weights if there are any, else from the parameters. A run with fixed parameters
 * has no master weights. It reads only the copies from the file with the master weights. */
#ifndef LLMC_OPTIM_FP32_COPIES_H
#define LLMC_OPTIM_FP32_COPIES_H

#include "llmc/model/model_files.h"
#include "llmc/ops/cast_to_fp32.h"
#include "llmc/optim/optimizer.h"

typedef struct {
    real* copies;     // [table.fp32_elements]; NULL: none needed
    CastSpan* spans;  // [count], on the device
    int count;
} Fp32Copies;

static inline size_t fp32_copies_bytes(const TensorTable* table) {
    return sizeof(floatX) < sizeof(real) ? table->fp32_elements * sizeof(real) : 0;
}

// Point the fp32_copy fields of `outer` and `layers` to the copies, or to params if there are no copies.
static inline void fp32_copies_open(Fp32Copies* e, const TensorTable* table, floatX* params, void* outer, void* layers,
                                    size_t layer_bytes, Context* ctx) {
    memset(e, 0, sizeof *e);
    CastSpan* spans = (CastSpan*)xcalloc((size_t)table->count, sizeof *spans);
    if (fp32_copies_bytes(table)) e->copies = (real*)device_alloc(ctx, fp32_copies_bytes(table), "parameters");
    for (int i = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        if (!t->fp32_copy) continue;
        CastSpan span = {.from = t->offset, .to = t->fp32_offset, .size = t->size};
        spans[e->count++] = span;
        char* target = t->layer < 0 ? (char*)outer : (char*)layers + (size_t)t->layer * layer_bytes;
        void* pointer = e->copies ? (void*)(e->copies + t->fp32_offset) : (void*)(params + t->offset);
        memcpy(target + t->fp32_copy, &pointer, sizeof pointer);
    }
    if (e->copies) {
        e->spans = (CastSpan*)device_alloc(ctx, (size_t)e->count * sizeof *spans, "parameters");
        device_upload(ctx, e->spans, spans, (size_t)e->count * sizeof *spans);
        device_synchronize(ctx);
    }
    free(spans);
}

// Read the copies from a file that holds their values in the part with prefix `prefix`.
static inline void fp32_copies_read(const Fp32Copies* e, const TensorTable* table, const char* path, const char* prefix,
                                    const FileRules* rules, Context* ctx) {
    for (int i = 0; e->copies && i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        TensorPart part = {.prefix = prefix, .device = e->copies + t->fp32_offset, .type = VIEW_REAL};
        FlatRange range = {.begin = t->offset, .size = t->size};
        if (t->fp32_copy) tensors_read_range(path, table, &part, 1, range, rules, NULL, ctx);
    }
}

// Read this optimizer's shard of the master weights from a model's file, if there are master weights. If the parameters
// are fixed, read only the copies.
static inline void fp32_copies_read_master(const Fp32Copies* e, const TensorTable* table, const Optimizer* o,
                                           const char* path, const FileRules* rules, Context* ctx) {
    TensorPart master = {.prefix = "", .device = o->master, .type = VIEW_REAL};
    if (!o->master) return;
    if (table->fixed) fp32_copies_read(e, table, path, "", rules, ctx);
    else tensors_read_range(path, table, &master, 1, o->shard, rules, NULL, ctx);
}

// Before a forward pass: update the copies from the master weights, or else from the parameters. With master weights
// there is nothing to do in two cases: if parameters are fixed, the copies were read from the file; and if master
// weights are sharded, fp32_copies_share() has updated them. `r`: NULL for one rank.
static inline void fp32_copies_update(const Fp32Copies* e, const TensorTable* table, const floatX* params,
                                      const real* master, GradSync* r, Context* ctx) {
    int is_sharded = r && r->zero;
    if (!e->copies || ((is_sharded || table->fixed) && master)) return;
    if (is_sharded) grad_sync_wait(r, GRAD_SYNC_LAST, ctx);
    cast_to_fp32(e->copies, params, master, e->spans, e->count, table->fp32_elements, ctx);
}

// With ZeRO-1, each rank has updated its shard. Broadcast the new parameters, and update the copies on all ranks.
static inline void fp32_copies_share(const Fp32Copies* e, const TensorTable* table, floatX* params, const real* master,
                                     GradSync* r, Context* ctx) {
    if (!r || !r->zero) return;
    if (e->copies && master) {
        cast_to_fp32_shard(e->copies, master, r->shard.begin, r->shard.size, e->spans, e->count, table->fp32_elements,
                           ctx);
        grad_sync_all_reduce(r, e->copies, table->fp32_elements, SUM_REAL, ctx);
    }
    broadcast_params(r, params, ctx);
}

static inline void fp32_copies_close(Fp32Copies* e, const TensorTable* table) {
    if (!e->copies) return;
    device_free(e->copies, fp32_copies_bytes(table));
    device_free(e->spans, (size_t)e->count * sizeof *e->spans);
}

#endif
