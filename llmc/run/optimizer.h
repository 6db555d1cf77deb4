/* The optimizer's state and its step over the flat parameter buffer: AdamW or LAMB.
 *
 * A step is the norm of all gradients, with it the loss scale's move, and the update, which clips with the norm and
 * divides by the scale. Both kinds keep the same state. All of it stays where the ops run, so the host need not wait: a
 * norm that is not finite updates nothing, and the trainer's policy reads it afterwards. */
#ifndef LLMC_OPTIMIZER_H
#define LLMC_OPTIMIZER_H

#include "../device/host_view.h"
#include "../ops/adamw.h"
#include "../ops/global_norm.h"
#include "../ops/lamb.h"
#include "tensors.h"

// Whether the parameters are kept in full precision too, where floatX is narrower than that.
typedef enum { NO_MASTER, WITH_MASTER } MasterWeights;
// LAMB scales AdamW's direction by each tensor's norm; of what decays only, as is usual: not of biases and layernorms.
typedef enum { ADAMW, LAMB } OptimizerKind;

typedef struct {
    OptimizerKind kind;
    size_t elements;        // of the flat buffer, as in the table
    real *m, *v;            // [elements] first and second moments
    real* master;           // [elements] the parameters in full precision; NULL: none, or floatX is that already
    real* norm;             // [1] of the last step's gradients, unscaled, before clipping
    LossScale* loss_scale;  // [1] where the ops run
    LossScaleRule rule;
    AdamWStep* step;   // [1] where the ops run: what the last norm has settled
    ParamSpan* spans;  // where the ops run
    int span_count, lamb_blocks;
} Optimizer;

static inline size_t optimizer_buffers(MasterWeights master) {
    return master == WITH_MASTER && sizeof(floatX) < sizeof(real) ? 3 : 2;
}

static inline size_t optimizer_bytes(const TensorTable* table, MasterWeights master) {
    return (optimizer_buffers(master) * table->elements + 1) * sizeof(real);
}

// What dynamic loss scaling and the count of updates go on from.
static inline void optimizer_set_loss_scale(Optimizer* o, LossScale state, LossScaleRule rule, Context* ctx) {
    o->rule = rule;
    device_upload(ctx, o->loss_scale, &state, sizeof state);
    device_synchronize(ctx);
}

static inline LossScale optimizer_loss_scale(const Optimizer* o, Context* ctx) {
    LossScale state;
    device_download(ctx, &state, o->loss_scale, sizeof state);
    return state;
}

// What the kind is to take as one piece: for LAMB every tensor, for AdamW all neighbours of equal decay. The padding
// between tensors is zero with zero gradients: it stays zero. Returns the number of spans.
static inline int optimizer_spans(ParamSpan* spans, const TensorTable* table, OptimizerKind kind) {
    int count = 0;
    for (int i = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        size_t next = i + 1 < table->count ? table->tensors[i + 1].offset : table->elements;
        ParamSpan* last = count ? &spans[count - 1] : NULL;
        if (kind == LAMB || !last || last->decay != (float)t->decay) {
            last = &spans[count++];
            last->offset = t->offset;
            last->decay = last->trust = (float)t->decay;
        }
        last->size = (kind == LAMB ? t->offset + t->size : next) - last->offset;
    }
    return count;
}

// Moments are zero, the loss is not scaled.
static inline void optimizer_init(Optimizer* o, const TensorTable* table, OptimizerKind kind, MasterWeights master,
                                  Context* ctx) {
    const LossScale unscaled = {1, 1, 0, 0};
    const LossScaleRule fixed = {LOSS_SCALE_FIXED, 0};
    o->kind = kind;
    o->elements = table->elements;
    o->m = (real*)device_alloc(ctx, optimizer_bytes(table, master), "optimizer");
    o->v = o->m + o->elements;
    o->master = optimizer_buffers(master) == 3 ? o->v + o->elements : NULL;
    o->norm = o->v + o->elements + (o->master ? o->elements : 0);
    o->loss_scale = (LossScale*)device_alloc(ctx, sizeof(LossScale), "optimizer");
    o->step = (AdamWStep*)device_alloc(ctx, sizeof(AdamWStep), "optimizer");
    optimizer_set_loss_scale(o, unscaled, fixed, ctx);
    ParamSpan* spans = (ParamSpan*)xcalloc((size_t)table->count, sizeof(ParamSpan));
    o->span_count = optimizer_spans(spans, table, kind);
    o->lamb_blocks = lamb_number_blocks(spans, o->span_count);
    o->spans = (ParamSpan*)device_alloc(ctx, (size_t)o->span_count * sizeof(ParamSpan), "optimizer");
    device_upload(ctx, o->spans, spans, (size_t)o->span_count * sizeof(ParamSpan));
    device_synchronize(ctx);
    free(spans);
}

static inline void optimizer_free(Optimizer* o) {
    device_free(o->m, ((o->master ? 3 : 2) * o->elements + 1) * sizeof(real));
    device_free(o->loss_scale, sizeof(LossScale));
    device_free(o->step, sizeof(AdamWStep));
    device_free(o->spans, (size_t)o->span_count * sizeof(ParamSpan));
    memset(o, 0, sizeof *o);
}

// Bring the view's values to the parameters that it is of, and to the full-precision copy if there is one.
static inline void optimizer_write_weights(const Optimizer* o, const HostView* view, Context* ctx) {
    HostView master = *view;
    host_view_write(ctx, view);
    master.device = o->master, master.type = VIEW_REAL;
    if (o->master) host_view_write(ctx, &master);
}

// `grads` carry the loss scale that the backward pass read at &o->loss_scale->scale.
static inline void optimizer_step(Optimizer* o, floatX* params, const real* grads, OptimizerSettings settings,
                                  Context* ctx) {
    AdamWState state = {params, o->master, o->m, o->v, grads, o->step};
    AfterNorm after = {o->loss_scale, o->step, o->rule, o->kind == LAMB ? lamb_without_lr(settings) : settings};
    scope_at(ctx, OPTIMIZER, -1);
    global_norm_forward(o->norm, grads, o->elements, after, ctx);
    if (o->kind == LAMB) lamb_update(state, o->elements, o->spans, o->span_count, o->lamb_blocks, settings, ctx);
    else adamw_update(state, o->elements, o->spans, o->span_count, settings, ctx);
}

#endif
