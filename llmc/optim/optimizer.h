/* The optimizer's state and its step over the flat parameter buffer: AdamW, LAMB, Muon or NorMuon.
 *
 * A step computes the norm of all gradients, adjusts the loss scale, and updates the parameters. The update clips by
 * the norm and divides by the loss scale. All optimizers keep the same state. Muon and NorMuon update the matrices that
 * the table marks (TensorRow.matrices), and AdamW updates the rest. Everything stays on the device, so the host does
 * not wait. If the norm is not finite, the device skips the update; the host checks the norm later.
 *
 * With ZeRO-1, a rank keeps the state of its shard and updates only that shard. With Muon, shards hold whole matrices.
 * The sum of squares for the norm, and LAMB's sums for each tensor, are all-reduced. */
#ifndef LLMC_OPTIM_OPTIMIZER_H
#define LLMC_OPTIM_OPTIMIZER_H

#include "llmc/device/copies.h"
#include "llmc/dist/grad_sync.h"
#include "llmc/lamb/room.h"
#include "llmc/muon/room.h"
#include "llmc/ops/adamw.h"
#include "llmc/ops/global_norm.h"

// Whether to keep fp32 master weights if floatX is narrower.
typedef enum { NO_MASTER, WITH_MASTER } MasterWeights;
// LAMB scales AdamW's direction by each tensor's trust ratio, as usual only where weights decay.
typedef enum { ADAMW, LAMB, MUON, NORMUON } OptimizerKind;

static inline int optimizer_is_muon(int kind) { return kind == MUON || kind == NORMUON; }

typedef struct {
    OptimizerKind kind;
    FlatRange shard;        // of the flat buffer: all of it, or this rank's part
    real *m, *v;            // [shard.size] first and second moments
    real* master;           // [shard.size] master weights in full precision; NULL: none, or floatX is full precision
    real* average;          // [shard.size] average of the weights; NULL: none
    floatX* kept;           // [shard.size] the parameters while the average is swapped in; NULL: no average
    real* norm;             // [1] gradient norm of the last step, unscaled, before clipping
    LossScale* loss_scale;  // [1] on the device
    LossScaleRule rule;
    Outliers* outliers;  // [1] on the device
    OutlierLimits limits;
    AdamWStep* step;   // [1] on the device: values computed from the last norm
    ParamSpan* spans;  // [spans_of_model] on the device; the first span_count are this shard's
    int span_count, lamb_blocks, spans_of_model;
    size_t adamw_elements;  // Muon: elements in spans; 0: all
    MuonState muon;         // of this shard
    double* sum_sq;         // [2 * spans_of_model] sums over all ranks; NULL if nothing is sharded
} Optimizer;

// How parameters are updated. Each rank updates all of them, or with ZeRO-1 its own shard.
typedef struct {
    OptimizerKind kind;
    MasterWeights master;
    int rank, ranks;
    GradSyncSettings sums;
    double adamw_rate;  // factor on the learning rate of what Muon does not update; 0: none
    int keeps_average;  // of the weights
} UpdateSettings;

static inline FlatRange update_shard(const TensorTable* table, UpdateSettings u) {
    return u.sums.zero && !table->fixed ? shard_of(table, u.sums.whole_matrices, u.rank, u.ranks)
                                        : tensors_updated(table);
}

static inline size_t optimizer_buffers(MasterWeights master) {
    return master == WITH_MASTER && sizeof(floatX) < sizeof(real) ? 3 : 2;
}

// Bytes of the state for `elements` parameters.
static inline size_t optimizer_bytes(size_t elements, MasterWeights master) {
    return (optimizer_buffers(master) * elements + 1) * sizeof(real);
}

// Bytes of the average of `elements` weights and of the copy of the parameters that it replaces.
static inline size_t optimizer_average_bytes(size_t elements, UpdateSettings u) {
    return u.keeps_average ? (elements + 1) * (sizeof(real) + sizeof(floatX)) : 0;
}

// Set the state of dynamic loss scaling and the update count.
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

static inline int optimizer_judges_outliers(const Optimizer* o) { return o->limits.loss > 0 || o->limits.norm > 0; }

// Set the state and the limits of outlier detection.
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

// Split the parameters into spans with a common update. For LAMB a span is a tensor, for AdamW adjacent tensors of
// equal weight decay and rate. Padding between tensors is zero with zero gradients, so it stays zero. Matrices that
// Muon updates are in no span. Returns the number of spans.
static inline int optimizer_spans(ParamSpan* spans, const TensorTable* table, UpdateSettings u) {
    int count = 0, is_apart = u.kind == LAMB;
    for (int i = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        size_t next = i + 1 < table->count ? table->tensors[i + 1].offset : table->elements;
        ParamSpan* last = count ? &spans[count - 1] : NULL;
        float rate = u.adamw_rate > 0 && !t->matrices ? (float)u.adamw_rate : 1;
        if (optimizer_is_muon(u.kind) && t->matrices) continue;
        if (is_apart || !last || last->decay != (float)t->decay || last->rate != rate ||
            last->offset + last->size != t->offset) {
            last = &spans[count++];
            last->offset = t->offset;
            last->decay = last->trust = (float)t->decay;
            last->rate = rate;
        }
        last->size = (is_apart ? t->offset + t->size : next) - last->offset;
    }
    return count;
}

// Allocate the state for a shard of the table's tensors. Moments are zero, and the loss is not scaled.
static inline void optimizer_init_shard(Optimizer* o, const TensorTable* table, UpdateSettings u, FlatRange shard,
                                        Context* ctx) {
    const LossScale unscaled = {.scale = 1, .applied = 1};
    const LossScaleRule fixed = {.kind = LOSS_SCALE_FIXED};
    size_t n = shard.size;
    o->kind = u.kind;
    o->shard = shard;
    o->m = (real*)device_alloc(ctx, optimizer_bytes(n, u.master), "optimizer");
    o->v = o->m + n;
    o->master = optimizer_buffers(u.master) == 3 ? o->v + n : NULL;
    o->norm = o->v + n + (o->master ? n : 0);
    o->average = u.keeps_average ? (real*)device_alloc(ctx, optimizer_average_bytes(n, u), "optimizer") : NULL;
    o->kept = u.keeps_average ? (floatX*)(o->average + n) : NULL;
    o->loss_scale = (LossScale*)device_alloc(ctx, sizeof(LossScale), "optimizer");
    o->step = (AdamWStep*)device_alloc(ctx, sizeof(AdamWStep), "optimizer");
    o->outliers = (Outliers*)device_alloc(ctx, sizeof(Outliers), "optimizer");
    o->limits.loss = o->limits.norm = 0;
    optimizer_set_loss_scale(o, unscaled, fixed, ctx);
    size_t bytes = (size_t)table->count * sizeof(ParamSpan);
    ParamSpan *all = (ParamSpan*)xmalloc(bytes), *spans = (ParamSpan*)xmalloc(bytes);
    o->spans_of_model = optimizer_spans(all, table, u);
    o->span_count = adam_clip_spans(spans, all, o->spans_of_model, shard.begin, n);
    o->lamb_blocks = lamb_number_blocks(spans, o->span_count);
    o->adamw_elements = 0;
    for (int i = 0; i < o->span_count && optimizer_is_muon(u.kind); i++) o->adamw_elements += spans[i].size;
    bytes = (size_t)o->spans_of_model * sizeof(ParamSpan);
    o->spans = (ParamSpan*)device_alloc(ctx, bytes, "optimizer");
    device_upload(ctx, o->spans, spans, (size_t)o->span_count * sizeof(ParamSpan));
    device_synchronize(ctx);
    o->sum_sq = NULL;
    if (n < table->elements)
        o->sum_sq = (double*)device_alloc(ctx, 2 * (size_t)o->spans_of_model * sizeof(double), "optimizer");
    free(all), free(spans);
    if (optimizer_is_muon(u.kind)) muon_state_open(&o->muon, table, shard, ctx);
}

// Open gradient synchronisation with the other ranks, and allocate this rank's part of the state.
static inline void optimizer_join(Optimizer* o, GradSync* r, const TensorTable* table, UpdateSettings u,
                                  ProcessGroup* group, Context* ctx) {
    grad_sync_open(r, group, table, u.sums);
    optimizer_init_shard(o, table, u, r->shard, ctx);
}

static inline void optimizer_free(Optimizer* o) {
    device_free(o->m, ((o->master ? 3 : 2) * o->shard.size + 1) * sizeof(real));
    if (o->average) device_free(o->average, (o->shard.size + 1) * (sizeof(real) + sizeof(floatX)));
    device_free(o->loss_scale, sizeof(LossScale));
    device_free(o->step, sizeof(AdamWStep));
    device_free(o->outliers, sizeof(Outliers));
    device_free(o->spans, (size_t)o->spans_of_model * sizeof(ParamSpan));
    if (o->sum_sq) device_free(o->sum_sq, 2 * (size_t)o->spans_of_model * sizeof(double));
    if (optimizer_is_muon(o->kind)) muon_state_close(&o->muon);
    memset(o, 0, sizeof *o);
}

// Write the view's values to the parameters that it covers, and to this rank's master weights if there are any. If the
// optimizer is sharded, the view must cover all parameters.
static inline void optimizer_write_weights(const Optimizer* o, const HostView* view, Context* ctx) {
    HostView master = *view;
    host_view_write(ctx, view);
    if (!o->master) return;
    master.device = o->master, master.type = VIEW_REAL;
    if (o->sum_sq) master.values += o->shard.begin, master.n = o->shard.size;
    host_view_write(ctx, &master);
}

static inline LambSpans optimizer_lamb_spans(const Optimizer* o) {
    LambSpans spans = {.spans = o->spans, .count = o->span_count, .blocks = o->lamb_blocks, .elements = o->shard.size};
    return spans;
}

// AdamW's update, and Muon's update of the matrices that AdamW skips.
static inline void optimizer_update(const Optimizer* o, AdamWState state, OptimizerSettings settings, Context* ctx) {
    settings.muon.is_normuon = o->kind == NORMUON;
    adamw_update(state, o->shard.size, o->spans, o->span_count, settings, ctx);
    if (optimizer_is_muon(o->kind)) muon_state_update(&o->muon, state, settings, ctx);
}

// optimizer_step() for a shard.
static inline void optimizer_step_shard(Optimizer* o, AdamWState state, AfterNorm after, OptimizerSettings settings,
                                        GradSync* r, Context* ctx) {
    size_t n = o->shard.size;
    global_norm_squares(o->sum_sq, state.grads, n, ctx);
    grad_sync_all_reduce(r, o->sum_sq, 1, SUM_DOUBLE, ctx);
    global_norm_finish(o->norm, o->sum_sq, after, ctx);
    if (o->kind != LAMB) {
        optimizer_update(o, state, settings, ctx);
        return;
    }
    lamb_moments(o->sum_sq, o->spans_of_model, state, optimizer_lamb_spans(o), settings, ctx);
    grad_sync_all_reduce(r, o->sum_sq, 2 * (size_t)o->spans_of_model, SUM_DOUBLE, ctx);
    lamb_apply(state, o->sum_sq, optimizer_lamb_spans(o), settings, ctx);
}

// Update the parameters. `grads` is the whole flat buffer, multiplied by the loss scale that the backward pass read
// from &o->loss_scale->scale. Losses and gradients (at least the shard's) must already be summed over the ranks. Only
// outlier detection reads `losses` (NULL: none). `r`: read only if the state is sharded.
static inline void optimizer_step(Optimizer* o, floatX* params, const real* grads, OptimizerSettings settings,
                                  const real* const losses[OUTLIER_LOSSES], GradSync* r, Context* ctx) {
    size_t begin = o->shard.begin, n = o->shard.size;
    AdamWState state = {.params = params + begin, .master = o->master, .m = o->m, .v = o->v};
    state.grads = grads + begin, state.step = o->step, state.first = begin, state.updated = o->adamw_elements;
    AfterNorm after = {.loss_scale = o->loss_scale, .step = o->step, .rule = o->rule};
    after.settings = o->kind == LAMB ? lamb_without_lr(settings) : settings;
    if (optimizer_judges_outliers(o)) after.outliers = o->outliers, after.limits = o->limits;
    for (int i = 0; i < OUTLIER_LOSSES; i++) after.losses[i] = losses ? losses[i] : NULL;
    scope_at(ctx, OPTIMIZER, -1);
    if (o->sum_sq) {
        optimizer_step_shard(o, state, after, settings, r, ctx);
        return;
    }
    global_norm_forward(o->norm, grads, n, after, ctx);
    if (o->kind == LAMB) lamb_update(state, optimizer_lamb_spans(o), settings, ctx);
    else optimizer_update(o, state, settings, ctx);
}

#endif
