/* The parameters that the forward pass reads in full precision (TensorRow.exact): their copies (ops/widen.h), and the
 * pointers to them. Where floatX is full precision there are no copies: the pointers are to the parameters themselves.
 *
 * They are those of the master weights, or without these of the parameters. A run whose parameters are fixed keeps no master
 * weights: it reads the copies alone from the file that has them. */
#ifndef LLMC_EXACT_H
#define LLMC_EXACT_H

#include "../ops/widen.h"
#include "model_files.h"
#include "optimizer.h"

typedef struct {
    real* copies;      // [table.exact_elements]; NULL: none needed
    WidenSpan* spans;  // [count], where the ops run
    int count;
} ExactParameters;

static inline size_t exact_bytes(const TensorTable* table) {
    return sizeof(floatX) < sizeof(real) ? table->exact_elements * sizeof(real) : 0;
}

// Point the fields of `outer` and `layers` that the table's rows name to the copies, or to params.
static inline void exact_open(ExactParameters* e, const TensorTable* table, floatX* params, void* outer, void* layers,
                              size_t layer_bytes, Context* ctx) {
    memset(e, 0, sizeof *e);
    WidenSpan* spans = (WidenSpan*)xcalloc((size_t)table->count, sizeof *spans);
    if (exact_bytes(table)) e->copies = (real*)device_alloc(ctx, exact_bytes(table), "parameters");
    for (int i = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        if (!t->exact) continue;
        WidenSpan span = {t->offset, t->exact_offset, t->size};
        spans[e->count++] = span;
        char* target = t->layer < 0 ? (char*)outer : (char*)layers + (size_t)t->layer * layer_bytes;
        void* pointer = e->copies ? (void*)(e->copies + t->exact_offset) : (void*)(params + t->offset);
        memcpy(target + t->exact, &pointer, sizeof pointer);
    }
    if (e->copies) {
        e->spans = (WidenSpan*)device_alloc(ctx, (size_t)e->count * sizeof *spans, "parameters");
        device_upload(ctx, e->spans, spans, (size_t)e->count * sizeof *spans);
        device_synchronize(ctx);
    }
    free(spans);
}

// Read the copies from a file that has them as part `prefix`.
static inline void exact_read(const ExactParameters* e, const TensorTable* table, const char* path, const char* prefix,
                              const FileRules* rules, Context* ctx) {
    for (int i = 0; e->copies && i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        TensorPart part = {prefix, e->copies + t->exact_offset, VIEW_REAL};
        FlatRange range = {t->offset, t->size};
        if (t->exact) tensors_read_range(path, table, &part, 1, range, rules, NULL, ctx);
    }
}

// From a model's file, into the master weights if there are any: as far as this optimizer has them, or just the copies.
static inline void exact_read_master(const ExactParameters* e, const TensorTable* table, const Optimizer* o,
                                     const char* path, const FileRules* rules, Context* ctx) {
    TensorPart master = {"", o->master, VIEW_REAL};
    if (!o->master) return;
    if (table->fixed) exact_read(e, table, path, "", rules, ctx);
    else tensors_read_range(path, table, &master, 1, o->shard, rules, NULL, ctx);
}

// Before a forward pass: bring the copies up to date, of the master weights if there are any. Of fixed parameters they were
// read, and where master weights are sharded exact_share() has made them. NULL for `r`: there is one rank.
static inline void exact_update(const ExactParameters* e, const TensorTable* table, const floatX* params,
                                const real* master, Reduction* r, Context* ctx) {
    int is_sharded = r && r->zero;
    if (!e->copies || ((is_sharded || table->fixed) && master)) return;
    if (is_sharded) reduction_wait(r, REDUCTION_LAST, ctx);
    widen_forward(e->copies, params, master, e->spans, e->count, table->exact_elements, ctx);
}

// Each rank has new parameters in its shard: all get them, and the copies.
static inline void exact_share(const ExactParameters* e, const TensorTable* table, floatX* params, const real* master,
                               Reduction* r, Context* ctx) {
    if (!r || !r->zero) return;
    if (e->copies && master) {
        widen_forward_shard(e->copies, master, r->shard.begin, r->shard.size, e->spans, e->count, table->exact_elements,
                            ctx);
        reduction_sum(r, e->copies, table->exact_elements, SUM_REAL, ctx);
    }
    reduction_share(r, params, ctx);
}

static inline void exact_close(ExactParameters* e, const TensorTable* table) {
    if (!e->copies) return;
    device_free(e->copies, exact_bytes(table));
    device_free(e->spans, (size_t)e->count * sizeof *e->spans);
}

#endif
