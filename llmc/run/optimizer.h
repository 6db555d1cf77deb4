/* The optimizer's state and its step over the flat parameter buffer: AdamW or LAMB.
 *
 * A step is the norm of all gradients, with it the loss scale's move, and the update, which clips with the norm and
 * divides by the scale. Both kinds keep the same state. All of it stays where the ops run, so the host need not wait: a
 * norm that is not finite updates nothing, and the trainer's policy reads it afterwards.
 *
 * With ZeRO-1 a rank has the state of its shard only and updates that: the sums of squares for the norm, and LAMB's for
 * every tensor, are added over the ranks. */
#ifndef LLMC_OPTIMIZER_H
#define LLMC_OPTIMIZER_H

#include "../device/host_view.h"
#include "../ops/adamw.h"
#include "../ops/global_norm.h"
#include "../ops/lamb.h"
#include "reduction.h"

// Whether the parameters are kept in full precision too, where floatX is narrower than that.
typedef enum { NO_MASTER, WITH_MASTER } MasterWeights;
// LAMB scales AdamW's direction by each tensor's norm; of what decays only, as is usual: not of biases and layernorms.
typedef enum { ADAMW, LAMB } OptimizerKind;

typedef struct {
    OptimizerKind kind;
    FlatRange shard;        // of the flat buffer: all of it, or this rank's
    real *m, *v;            // [shard.size] first and second moments
    real* master;           // [shard.size] the parameters in full precision; NULL: none, or floatX is that already
    real* norm;             // [1] of the last step's gradients, unscaled, before clipping
    LossScale* loss_scale;  // [1] where the ops run
    LossScaleRule rule;
    Outliers* outliers;  // [1] where the ops run
    OutlierLimits limits;
    AdamWStep* step;   // [1] where the ops run: what the last norm has settled
    ParamSpan* spans;  // [spans_of_model], where the ops run, of which span_count lie in the shard
    int span_count, lamb_blocks, spans_of_model;
    double* squares;  // [2 * spans_of_model] sums over all ranks; NULL where nothing is sharded
} Optimizer;

// How parameters are updated: on each rank all of them, or with ZeRO-1 this rank's shard.
typedef struct {
    OptimizerKind kind;
    MasterWeights master;
    int rank, ranks;
    ReductionSettings sums;
} UpdateSettings;

static inline FlatRange update_shard(const TensorTable* table, UpdateSettings u) {
    return u.sums.zero && !table->fixed ? shard_of(table->elements, u.rank, u.ranks) : tensors_updated(table);
}

static inline size_t optimizer_buffers(MasterWeights master) {
    return master == WITH_MASTER && sizeof(floatX) < sizeof(real) ? 3 : 2;
}

// Of the state of `elements` elements.
static inline size_t optimizer_bytes(size_t elements, MasterWeights master) {
    return (optimizer_buffers(master) * elements + 1) * sizeof(real);
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

// What the judging of outliers goes on from.
static inline void optimizer_set_outliers(Optimizer* o, const Outliers* state, OutlierLimits limits, Context* ctx) {
    o->limits = limits;
    device_upload(ctx, o->outliers, state, sizeof *state);
    device_synchronize(ctx);
}

static inline Outliers optimizer_outliers(const Optimizer* o, Context* ctx) {
    Outliers state;
    device_download(ctx, &state, o->outliers, sizeof state);
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

// For a shard of the table's tensors. Moments are zero, the loss is not scaled.
static inline void optimizer_init_shard(Optimizer* o, const TensorTable* table, OptimizerKind kind,
                                        MasterWeights master, FlatRange shard, Context* ctx) {
    const LossScale unscaled = {1, 1, 0, 0};
    const LossScaleRule fixed = {LOSS_SCALE_FIXED, 0};
    size_t n = shard.size;
    o->kind = kind;
    o->shard = shard;
    o->m = (real*)device_alloc(ctx, optimizer_bytes(n, master), "optimizer");
    o->v = o->m + n;
    o->master = optimizer_buffers(master) == 3 ? o->v + n : NULL;
    o->norm = o->v + n + (o->master ? n : 0);
    o->loss_scale = (LossScale*)device_alloc(ctx, sizeof(LossScale), "optimizer");
    o->step = (AdamWStep*)device_alloc(ctx, sizeof(AdamWStep), "optimizer");
    o->outliers = (Outliers*)device_alloc(ctx, sizeof(Outliers), "optimizer");
    o->limits.loss = o->limits.norm = 0;
    optimizer_set_loss_scale(o, unscaled, fixed, ctx);
    size_t bytes = (size_t)table->count * sizeof(ParamSpan);
    ParamSpan *all = (ParamSpan*)xmalloc(bytes), *spans = (ParamSpan*)xmalloc(bytes);
    o->spans_of_model = optimizer_spans(all, table, kind);
    o->span_count = adam_clip_spans(spans, all, o->spans_of_model, shard.begin, n);
    o->lamb_blocks = lamb_number_blocks(spans, o->span_count);
    bytes = (size_t)o->spans_of_model * sizeof(ParamSpan);
    o->spans = (ParamSpan*)device_alloc(ctx, bytes, "optimizer");
    device_upload(ctx, o->spans, spans, (size_t)o->span_count * sizeof(ParamSpan));
    device_synchronize(ctx);
    o->squares = NULL;
    if (n < table->elements)
        o->squares = (double*)device_alloc(ctx, 2 * (size_t)o->spans_of_model * sizeof(double), "optimizer");
    free(all), free(spans);
}

static inline void optimizer_init(Optimizer* o, const TensorTable* table, OptimizerKind kind, MasterWeights master,
                                  Context* ctx) {
    optimizer_init_shard(o, table, kind, master, tensors_updated(table), ctx);
}

// Join the other ranks, and keep this rank's part of the state.
static inline void optimizer_join(Optimizer* o, Reduction* r, const TensorTable* table, UpdateSettings u, Comm* comm,
                                  Context* ctx) {
    reduction_open(r, comm, table, u.sums, ctx);
    optimizer_init_shard(o, table, u.kind, u.master, r->shard, ctx);
}

static inline void optimizer_free(Optimizer* o) {
    device_free(o->m, ((o->master ? 3 : 2) * o->shard.size + 1) * sizeof(real));
    device_free(o->loss_scale, sizeof(LossScale));
    device_free(o->step, sizeof(AdamWStep));
    device_free(o->outliers, sizeof(Outliers));
    device_free(o->spans, (size_t)o->spans_of_model * sizeof(ParamSpan));
    if (o->squares) device_free(o->squares, 2 * (size_t)o->spans_of_model * sizeof(double));
    memset(o, 0, sizeof *o);
}

// Bring the view's values to the parameters that it is of, and to the full-precision copy if there is one, as far as it is
// here. The view is of all parameters, or nothing is sharded.
static inline void optimizer_write_weights(const Optimizer* o, const HostView* view, Context* ctx) {
    HostView master = *view;
    host_view_write(ctx, view);
    if (!o->master) return;
    master.device = o->master, master.type = VIEW_REAL;
    if (o->squares) master.values += o->shard.begin, master.n = o->shard.size;
    host_view_write(ctx, &master);
}

// Of a shard: as optimizer_step().
static inline void optimizer_step_shard(Optimizer* o, AdamWState state, AfterNorm after, OptimizerSettings settings,
                                        Reduction* r, Context* ctx) {
    size_t n = o->shard.size;
    global_norm_squares(o->squares, state.grads, n, ctx);
    reduction_sum(r, o->squares, 1, SUM_DOUBLE, ctx);
    global_norm_finish(o->norm, o->squares, after, ctx);
    if (o->kind == ADAMW) {
        adamw_update(state, n, o->spans, o->span_count, settings, ctx);
        return;
    }
    lamb_moments(o->squares, o->spans_of_model, state, n, o->spans, o->span_count, o->lamb_blocks, settings, ctx);
    reduction_sum(r, o->squares, 2 * (size_t)o->spans_of_model, SUM_DOUBLE, ctx);
    lamb_apply(state, n, o->squares, o->spans, o->span_count, o->lamb_blocks, settings, ctx);
}

// `grads`, of the whole flat buffer, carry the loss scale that the backward pass read at &o->loss_scale->scale. They are
// summed over the ranks, at least in the shard, like the losses, which only the judging of outliers reads (NULL: there are
// none). NULL for `r`: there is one rank.
static inline void optimizer_step(Optimizer* o, floatX* params, const real* grads, OptimizerSettings settings,
                                  const real* const losses[OUTLIER_LOSSES], Reduction* r, Context* ctx) {
    size_t begin = o->shard.begin, n = o->shard.size;
    AdamWState state = {params + begin, o->master, o->m, o->v, grads + begin, o->step, begin};
    AfterNorm after = {o->loss_scale, o->step, o->rule, o->kind == LAMB ? lamb_without_lr(settings) : settings};
    if (outliers_are_judged(o->limits)) after.outliers = o->outliers, after.limits = o->limits;
    for (int i = 0; i < OUTLIER_LOSSES; i++) after.losses[i] = losses ? losses[i] : NULL;
    scope_at(ctx, OPTIMIZER, -1);
    if (o->squares) {
        optimizer_step_shard(o, state, after, settings, r, ctx);
        return;
    }
    global_norm_forward(o->norm, grads, n, after, ctx);
    if (o->kind == LAMB) lamb_update(state, n, o->spans, o->span_count, o->lamb_blocks, settings, ctx);
    else adamw_update(state, n, o->spans, o->span_count, settings, ctx);
}

#endif
