/* The optimizer's state and its step over the flat parameter buffer.
 *
 * Two launches: the norm of all gradients, and one AdamW pass that clips with it. The norm stays where the ops run,
 * so the host need not wait for it; a norm that is not finite updates nothing, and the trainer's NaN policy reads it
 * afterwards. */
#ifndef LLMC_OPTIMIZER_H
#define LLMC_OPTIMIZER_H

#include "../ops/adamw.h"
#include "../ops/global_norm.h"
#include "tensors.h"

typedef struct {
    size_t elements;   // of the flat buffer, as in the table
    real *m, *v;       // [elements] first and second moments
    real* master;      // [elements] the parameters in full precision; NULL where floatX is that already
    real* norm;        // [1] of the last step's gradients, before clipping
    ParamSpan* spans;  // where the ops run
    int span_count;
} Optimizer;

static inline size_t optimizer_bytes(const TensorTable* table) {
    size_t buffers = sizeof(floatX) == sizeof(real) ? 2 : 3;
    return (buffers * table->elements + 1) * sizeof(real);
}

static inline void optimizer_init(Optimizer* o, const TensorTable* table, Context* ctx) {
    o->elements = table->elements;
    o->m = (real*)device_alloc(ctx, optimizer_bytes(table), "optimizer");
    o->v = o->m + o->elements;
    o->master = sizeof(floatX) == sizeof(real) ? NULL : o->v + o->elements;
    o->norm = o->v + o->elements + (o->master ? o->elements : 0);
    ParamSpan* spans = (ParamSpan*)xcalloc((size_t)table->count, sizeof(ParamSpan));
    o->span_count = 0;
    // Neighbours of equal decay become one span. The padding between tensors is zero with zero gradients: it stays zero.
    for (int i = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        size_t end = i + 1 < table->count ? table->tensors[i + 1].offset : table->elements;
        ParamSpan* last = o->span_count ? &spans[o->span_count - 1] : NULL;
        if (!last || last->decay != (float)t->decay) {
            last = &spans[o->span_count++];
            last->offset = t->offset;
            last->decay = (float)t->decay;
        }
        last->size = end - last->offset;
    }
    o->spans = (ParamSpan*)device_alloc(ctx, (size_t)o->span_count * sizeof(ParamSpan), "optimizer");
    device_upload(ctx, o->spans, spans, (size_t)o->span_count * sizeof(ParamSpan));
    device_synchronize(ctx);
    free(spans);
}

static inline void optimizer_free(Optimizer* o) {
    device_free(o->m, ((o->master ? 3 : 2) * o->elements + 1) * sizeof(real));
    device_free(o->spans, (size_t)o->span_count * sizeof(ParamSpan));
    memset(o, 0, sizeof *o);
}

static inline void optimizer_step(Optimizer* o, floatX* params, const real* grads, AdamW settings, Context* ctx) {
    AdamWState state = {params, o->master, o->m, o->v, grads, o->norm};
    scope_at(ctx, OPTIMIZER, -1);
    global_norm_forward(o->norm, grads, o->elements, ctx);
    adamw_update(state, o->elements, o->spans, o->span_count, settings, ctx);
}

#endif
