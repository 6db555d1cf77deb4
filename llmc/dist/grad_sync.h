/* Data parallelism: the gradients of all ranks are summed, in buckets that overlap with the backward pass (as in
 * PyTorch's DistributedDataParallel) or all at once after it. With ZeRO-1 each rank keeps and updates a shard of the
 * optimizer's state, and broadcasts the parameters of its shard, overlapped with the next forward pass.
 *
 * A bucket holds the gradients of neighbouring layers, a range of the flat buffer. The backward pass ends with the
 * first layer, so buckets become ready from the end of the buffer. The embeddings, which belong to no layer and lie
 * before the layers, are ready last. Collectives run on a stream of their own, the side stream; events keep it in order
 * with the main stream.
 *
 *   backward     layer by layer    grad_sync_ready()   reduce a bucket, overlapped with the ops that follow
 *   update       before it         grad_sync_finish()  wait for the buckets, or reduce the whole buffer at once
 *                after it          broadcast_params()  ZeRO-1: parameters to all ranks, bucket by bucket from the front
 *   forward      before each layer grad_sync_wait()    for its parameters
 *
 * A shard is a contiguous part of the flat buffer and may begin and end inside a tensor: any number of ranks, tensors
 * of any size. Only Muon's matrices are never cut; with Muon, shards have equal cost instead of equal size. With ZeRO-1
 * each part of a bucket is reduced to the rank that owns it; without ZeRO-1 a bucket is all-reduced. */
#ifndef LLMC_DIST_GRAD_SYNC_H
#define LLMC_DIST_GRAD_SYNC_H

#include "llmc/device/scope.h"
#include "llmc/dist/collectives.h"
#include "llmc/model/tensors.h"

enum { GRAD_SYNC_LAST = 1 << 30 };  // a layer number above all layers: wait for everything

// Elements begin .. end - 1 of the flat buffer. Their gradients are complete after the backward pass of layer `layer`;
// -1: at its end.
typedef struct {
    size_t begin, end;
    int layer;
    StreamEvent params_ready;  // ZeRO-1: all ranks' parameters have arrived
} Bucket;

typedef struct {
    Collectives collectives;
    int zero;           // 1: ZeRO-1
    int is_active;      // sum the gradients of this micro-step
    int at_once;        // as one buffer, after the backward pass
    FlatRange shard;    // of this rank; all elements without ZeRO-1
    FlatRange* shards;  // ZeRO-1: [ranks]
    size_t elements;    // of the flat buffer, without tensors that belong to one rank
    Bucket* buckets;    // in the order of the buffer
    int count, sent;    // buckets; those that this step has reduced so far, from the back
    StreamEvent ready, done;
} GradSync;

// The cost of updating one of the tensor's elements, relative to AdamW's. AdamW moves 30 bytes per element, Muon about
// as many; in that time a GPU does some 4500 flops of Muon's matmuls (muon/muon.h counts them).
static inline double update_cost(const Tensor* t) {
    if (!t->matrices) return 1;
    int rows = t->shape[0] / t->matrices, s = min_int(rows, t->shape[1]), l = max_int(rows, t->shape[1]);
    return 1 + 5 * (4.0 * s + 2.0 * s * s / l) / 4500;
}

// The end of the first `share` of the total update cost: an element of the flat buffer, rounded to the nearest multiple
// of TENSOR_ALIGNMENT that is not inside a matrix.
static inline size_t shard_border(const TensorTable* table, double share) {
    double total = 0, cost = 0;
    size_t before = 0;  // the last possible border
    int is_past = 0;
    for (int i = 0; i < table->count; i++) total += update_cost(&table->tensors[i]) * (double)table->tensors[i].size;
    for (int i = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        int pieces = t->matrices ? t->matrices : (int)((t->size + TENSOR_ALIGNMENT - 1) / TENSOR_ALIGNMENT);
        size_t piece = t->matrices ? t->size / (size_t)t->matrices : TENSOR_ALIGNMENT;
        for (int k = 0; k < pieces; k++) {
            size_t at = t->offset + (size_t)k * piece, n = min_size(piece, t->size - (size_t)k * piece);
            double more = update_cost(t) * (double)n;
            if (at % TENSOR_ALIGNMENT == 0) {
                if (is_past) return at;
                before = at;
            }
            is_past = is_past || cost + more / 2 > share * total;
            if (is_past && at == before) return at;
            cost += more;
        }
    }
    return table->elements;
}

// Rank `rank`'s shard, in multiples of TENSOR_ALIGNMENT. `whole_matrices`: cut no matrix, and give shards equal cost.
static inline FlatRange shard_of(const TensorTable* table, int whole_matrices, int rank, int size) {
    size_t groups = table->elements / TENSOR_ALIGNMENT, ends[2];
    for (int i = 0; i < 2; i++)
        ends[i] = whole_matrices ? shard_border(table, (double)(rank + i) / size)
                                 : groups * (size_t)(rank + i) / (size_t)size * TENSOR_ALIGNMENT;
    FlatRange shard = {.begin = ends[0], .size = ends[1] - ends[0]};
    return shard;
}

// The intersection of [begin, end) with a rank's shard; size 0 if it is empty.
static inline FlatRange shard_part(const GradSync* r, int rank, size_t begin, size_t end) {
    FlatRange whole = r->shards[rank];
    FlatRange part = {.begin = begin > whole.begin ? begin : whole.begin};
    size_t last = min_size(end, whole.begin + whole.size);
    part.size = last > part.begin ? last - part.begin : 0;
    return part;
}

// The first element of `layer`.
static inline size_t grad_sync_layer_begin(const TensorTable* table, int layer) {
    for (int i = 0; i < table->count; i++)
        if (table->tensors[i].layer == layer) return table->tensors[i].offset;
    return table->elements;
}

// How gradients are summed.
typedef struct {
    int zero;            // 1: ZeRO-1
    double bucket_mib;   // minimum MiB of gradients per bucket, or BUCKET_AUTO
    int has_p2p;         // has_p2p()
    int whole_matrices;  // ZeRO-1: shards cut no matrices (Muon)
} GradSyncSettings;

// BUCKET_AUTO: buckets of BUCKET_MIB, but the whole buffer at once if the GPUs are joined by NVLink and there are at
// most AT_ONCE_BYTES of gradients. There an all-reduce is so fast that waiting for it costs less than overlapping it,
// which slows down the ops (dev/BENCH.md, "Several GPUs").
#define BUCKET_AUTO (-1)
#define BUCKET_MIB 16
#define AT_ONCE_BYTES 2147483648.0

static inline int grad_sync_at_once(const TensorTable* table, GradSyncSettings settings) {
    double bytes = (double)table->elements * sizeof(real);
    if (settings.bucket_mib < 0) return settings.has_p2p && bytes <= AT_ONCE_BYTES;
    return bytes <= settings.bucket_mib * 1048576;
}

// Cut the buffer into buckets, from its end: whole layers until a bucket is large enough. The last bucket also gets
// everything before the first layer. Parameters are broadcast by buckets even if gradients are summed at once.
static inline void grad_sync_cut(GradSync* r, const TensorTable* table, GradSyncSettings settings) {
    r->at_once = grad_sync_at_once(table, settings);
    double mib = r->at_once || settings.bucket_mib < 0 ? BUCKET_MIB : settings.bucket_mib;
    int layers = 0;
    for (int i = 0; i < table->count; i++) layers = max_int(layers, table->tensors[i].layer + 1);
    r->buckets = (Bucket*)xcalloc((size_t)layers + 1, sizeof(Bucket));
    size_t end = table->elements;
    for (int l = layers - 1; l >= -1; l--) {
        size_t begin = l < 0 ? 0 : grad_sync_layer_begin(table, l);
        if (l >= 0 && (double)((end - begin) * sizeof(real)) < mib * 1048576) continue;
        if (begin == end) continue;
        Bucket* b = &r->buckets[r->count++];
        b->begin = begin, b->end = end, b->layer = l;
        end = begin;
    }
    for (int i = 0; i < r->count / 2; i++) {
        Bucket kept = r->buckets[i];
        r->buckets[i] = r->buckets[r->count - 1 - i], r->buckets[r->count - 1 - i] = kept;
    }
}

// Start gradient sync with the other ranks, for the parameters of `table`.
static inline void grad_sync_open(GradSync* r, ProcessGroup* group, const TensorTable* table,
                                  GradSyncSettings settings) {
    memset(r, 0, sizeof *r);
    collectives_open(&r->collectives, group);
    r->elements = table->elements;
    r->zero = settings.zero && group->size > 1 && !table->fixed;
    r->shard = tensors_updated(table);
    if (group->size == 1) return;
    if (r->zero) {
        r->shards = (FlatRange*)xcalloc((size_t)group->size, sizeof *r->shards);
        for (int i = 0; i < group->size; i++) r->shards[i] = shard_of(table, settings.whole_matrices, i, group->size);
        r->shard = r->shards[group->rank];
    }
    grad_sync_cut(r, table, settings);
    stream_event_open(&r->ready), stream_event_open(&r->done);
    for (int i = 0; i < r->count; i++) stream_event_open(&r->buckets[i].params_ready);
}

static inline void grad_sync_close(GradSync* r) {
    if (r->collectives.group->size > 1) {
        for (int i = 0; i < r->count; i++) stream_event_close(&r->buckets[i].params_ready);
        stream_event_close(&r->ready), stream_event_close(&r->done);
        free(r->buckets), free(r->shards);
    }
    collectives_close(&r->collectives);
}

static inline int grad_sync_is_alone(const GradSync* r) { return !r || r->collectives.group->size == 1; }

// The context's state before grad_sync_side_stream().
typedef struct {
    Direction direction;
    int layer;
#ifdef __CUDACC__
    cudaStream_t stream;
#endif
} MainStream;

// Switch ops and scopes to the side stream, until grad_sync_main_stream(). They wait for everything launched on the
// main stream so far.
static inline MainStream grad_sync_side_stream(GradSync* r, int layer, Context* ctx) {
    MainStream kept = {.direction = ctx->direction, .layer = ctx->layer};
    collectives_wait_for_ops(&r->collectives, &r->ready, ctx);
#ifdef __CUDACC__
    kept.stream = ctx->stream;
    ctx->stream = r->collectives.stream;
#endif
    scope_at(ctx, COMMUNICATION, layer);
    return kept;
}

static inline void grad_sync_main_stream(MainStream kept, Context* ctx) {
#ifdef __CUDACC__
    ctx->stream = kept.stream;
#endif
    scope_at(ctx, kept.direction, kept.layer);
}

// Sum gradients begin .. end - 1, in place: with ZeRO-1 each part on the rank that owns it, else on all ranks. `layer`
// is for the profile.
static inline void grad_sync_reduce(GradSync* r, size_t begin, size_t end, int layer, real* grads, Context* ctx) {
    MainStream kept = grad_sync_side_stream(r, layer, ctx);
    size_t n = end - begin;
    Scope scope = scope_open(ctx, "sum_gradients", 0, (double)n * sizeof(real), "n=%zu", n);
    if (r->zero) {
        collectives_begin();
        for (int rank = 0; rank < r->collectives.group->size; rank++) {
            FlatRange part = shard_part(r, rank, begin, end);
            if (part.size) reduce(&r->collectives, grads + part.begin, part.size, SUM_REAL, rank);
        }
        collectives_end();
    } else {
        all_reduce(&r->collectives, grads + begin, n, SUM_REAL);
    }
    scope_close(&scope);
    grad_sync_main_stream(kept, ctx);
}

// The last micro-batch of a step begins: sum its gradients.
static inline void grad_sync_begin(GradSync* r) {
    if (grad_sync_is_alone(r)) return;
    r->is_active = 1;
    r->sent = 0;
}

// The backward pass has finished `layer` and all layers above it: reduce the buckets that are complete.
static inline void grad_sync_ready(GradSync* r, int layer, real* grads, Context* ctx) {
    if (grad_sync_is_alone(r) || !r->is_active || r->at_once) return;
    for (; r->sent < r->count && r->buckets[r->count - 1 - r->sent].layer >= layer; r->sent++) {
        const Bucket* b = &r->buckets[r->count - 1 - r->sent];
        grad_sync_reduce(r, b->begin, b->end, b->layer, grads, ctx);
    }
}

// The backward pass has ended: ops launched from now on see the summed gradients.
static inline void grad_sync_finish(GradSync* r, real* grads, Context* ctx) {
    if (grad_sync_is_alone(r)) return;
    CHECK(r->is_active);
    if (r->at_once) grad_sync_reduce(r, 0, r->elements, -1, grads, ctx);
    else grad_sync_ready(r, -1, grads, ctx);
    CHECK(r->at_once || r->sent == r->count);
    r->is_active = 0;
    collectives_record_event(&r->collectives, &r->done);
    ops_wait_for_collectives(ctx, &r->done);
}

// Sum a few numbers over the ranks, in place on the device, in order with the ops before and after this call.
static inline void grad_sync_all_reduce(GradSync* r, void* values, size_t n, ReduceType type, Context* ctx) {
    if (grad_sync_is_alone(r) || n == 0) return;
    MainStream kept = grad_sync_side_stream(r, -1, ctx);
    Scope scope = scope_open(ctx, "sum_numbers", 0, (double)(n * (type == SUM_DOUBLE ? sizeof(double) : sizeof(real))),
                             "n=%zu", n);
    all_reduce(&r->collectives, values, n, type);
    scope_close(&scope);
    grad_sync_main_stream(kept, ctx);
    collectives_record_event(&r->collectives, &r->done);
    ops_wait_for_collectives(ctx, &r->done);
}

// ZeRO-1: each rank has updated the parameters of its shard. Broadcast them to the others, the first layers first.
static inline void broadcast_params(GradSync* r, floatX* params, Context* ctx) {
    if (grad_sync_is_alone(r) || !r->zero) return;
    MainStream kept = grad_sync_side_stream(r, -1, ctx);
    Scope scope = scope_open(ctx, "share_parameters", 0, (double)r->elements * sizeof(floatX), "n=%zu", r->elements);
    for (int i = 0; i < r->count; i++) {
        Bucket* b = &r->buckets[i];
        collectives_begin();
        for (int rank = 0; rank < r->collectives.group->size; rank++) {
            FlatRange part = shard_part(r, rank, b->begin, b->end);
            if (part.size) broadcast(&r->collectives, params + part.begin, part.size * sizeof(floatX), rank);
        }
        collectives_end();
        collectives_record_event(&r->collectives, &b->params_ready);
    }
    scope_close(&scope);
    grad_sync_main_stream(kept, ctx);
}

// Make ops launched from now on see the updated parameters of `layer` and of everything before it in the buffer (all
// parameters, if the model has no such layer). Collectives run in order: a bucket's event covers the buckets before it.
static inline void grad_sync_wait(GradSync* r, int layer, Context* ctx) {
    if (grad_sync_is_alone(r) || !r->zero) return;
    int last = 0;
    while (last + 1 < r->count && r->buckets[last + 1].layer <= layer) last++;
    ops_wait_for_collectives(ctx, &r->buckets[last].params_ready);
}

#endif
