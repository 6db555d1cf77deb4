/* Data parallelism: gradients of all ranks become one sum, while the backward pass goes on or at its end, and with ZeRO-1
 * each rank keeps and updates a shard of the optimizer's state and hands its parameters to the others while the next
 * forward pass goes on.
 *
 * The flat buffer is cut into buckets of neighbouring layers. The backward pass ends with the first layer, so buckets
 * become ready from the buffer's end on; what belongs to no layer and lies before them, the embeddings, is ready last.
 *
 *   backward     layer by layer    reduction_ready()   a bucket is summed, beside the ops that follow
 *   update       before it         reduction_finish()  waits for the sums, or sums the whole buffer at once
 *                after it          reduction_share()   ZeRO-1: parameters to all, bucket by bucket from the front
 *   forward      before each layer reduction_wait()    for its parameters
 *
 * A shard is a contiguous part of the flat buffer, cut without regard to tensors: any number of ranks, tensors of any
 * size. With ZeRO-1 a bucket's parts go to those who own them; without, the sum goes to all.
 *
 * Sums are of real, or with `narrow` of gradients rounded to bf16 before, which halves the bytes. */
#ifndef LLMC_REDUCTION_H
#define LLMC_REDUCTION_H

#include "../ops/narrow.h"
#include "collective.h"
#include "tensors.h"

enum { REDUCTION_LAST = 1 << 30 };  // a layer that stands for all

// Elements begin .. end - 1 of the flat buffer, whose gradients are there once those of layer `layer` are, and with them
// all layers behind it; -1: at the end of the backward pass.
typedef struct {
    size_t begin, end;
    int layer;
    Mark shared;  // its parameters are there
} Bucket;

typedef struct {
    Collective collective;
    int zero;         // 1: ZeRO-1
    int is_open;      // gradients of this micro-step are to be summed
    int is_whole;     // all of them at once, when all are there
    FlatRange shard;  // of this rank; all elements without ZeRO-1
    size_t elements;  // of the flat buffer
    Bucket* buckets;  // in the order of the buffer
    int count, sent;  // buckets; those that this step has sent, from the back
    Bf16* narrow;     // [elements that are summed at once, at most]; NULL: sums are of real
    Mark ready, done;
} Reduction;

// Rank `rank`'s part of `elements`, whole groups of TENSOR_ALIGNMENT.
static inline FlatRange shard_of(size_t elements, int rank, int size) {
    size_t groups = elements / TENSOR_ALIGNMENT;
    size_t begin = groups * (size_t)rank / (size_t)size, end = groups * ((size_t)rank + 1) / (size_t)size;
    FlatRange shard = {begin * TENSOR_ALIGNMENT, (end - begin) * TENSOR_ALIGNMENT};
    return shard;
}

// What [begin, end) and a rank's shard have in common; size 0 where that is nothing.
static inline FlatRange reduction_part(const Reduction* r, int rank, size_t begin, size_t end) {
    FlatRange whole = shard_of(r->elements, rank, r->collective.comm->size);
    FlatRange part = {begin > whole.begin ? begin : whole.begin, 0};
    size_t last = min_size(end, whole.begin + whole.size);
    part.size = last > part.begin ? last - part.begin : 0;
    return part;
}

// Where the elements of `layer` begin: its first tensor.
static inline size_t reduction_layer_begin(const TensorTable* table, int layer) {
    for (int i = 0; i < table->count; i++)
        if (table->tensors[i].layer == layer) return table->tensors[i].offset;
    return table->elements;
}

// How gradients are summed.
typedef struct {
    int zero;           // 1: ZeRO-1
    int narrow;         // 1: in bf16
    double bucket_mib;  // of gradients in a bucket, at least; BUCKET_AUTO
    int is_near;        // collective_is_near()
} ReductionSettings;

// BUCKET_AUTO: buckets of BUCKET_MIB, but the whole buffer at once where GPUs are near each other and gradients at most
// WHOLE_BYTES. There a sum takes so little that waiting for it costs less than what it takes from the ops beside it
// (dev/BENCH.md, "Several GPUs").
#define BUCKET_AUTO (-1)
#define BUCKET_MIB 16
#define WHOLE_BYTES 2147483648.0

static inline int reduction_is_whole(const TensorTable* table, ReductionSettings settings) {
    double bytes = (double)table->elements * sizeof(real);
    if (settings.bucket_mib < 0) return settings.is_near && bytes <= WHOLE_BYTES;
    return bytes <= settings.bucket_mib * 1048576;
}

// Cut the buffer, from its end: whole layers until a bucket has as much as settings say, and what lies before the first
// layer. Parameters are shared by buckets also where gradients are summed at once.
static inline void reduction_cut(Reduction* r, const TensorTable* table, ReductionSettings settings) {
    r->is_whole = reduction_is_whole(table, settings);
    double mib = r->is_whole || settings.bucket_mib < 0 ? BUCKET_MIB : settings.bucket_mib;
    int layers = 0;
    for (int i = 0; i < table->count; i++) layers = max_int(layers, table->tensors[i].layer + 1);
    r->buckets = (Bucket*)xcalloc((size_t)layers + 1, sizeof(Bucket));
    size_t end = table->elements;
    for (int l = layers - 1; l >= -1; l--) {
        size_t begin = l < 0 ? 0 : reduction_layer_begin(table, l);
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

// Bytes of the buffer in which gradients are narrow.
static inline size_t reduction_narrow_bytes(const Reduction* r) {
    size_t largest = 0;
    for (int i = 0; i < r->count; i++) {
        size_t n = r->buckets[i].end - r->buckets[i].begin;
        largest = r->is_whole ? largest + n : max_size(n, largest);
    }
    return largest * sizeof(Bf16);
}

// Join the other ranks. The table's tensors are the parameters.
static inline void reduction_open(Reduction* r, Comm* comm, const TensorTable* table, ReductionSettings settings,
                                  Context* ctx) {
    memset(r, 0, sizeof *r);
    collective_open(&r->collective, comm);
    r->elements = table->elements;
    r->zero = settings.zero && comm->size > 1 && !table->fixed;
    r->shard = r->zero ? shard_of(table->elements, comm->rank, comm->size) : tensors_updated(table);
    if (comm->size == 1) return;
    reduction_cut(r, table, settings);
    mark_open(&r->ready), mark_open(&r->done);
    for (int i = 0; i < r->count; i++) mark_open(&r->buckets[i].shared);
    if (settings.narrow && !table->fixed) r->narrow = (Bf16*)device_alloc(ctx, reduction_narrow_bytes(r), "gradients");
}

static inline void reduction_close(Reduction* r) {
    if (r->collective.comm->size > 1) {
        for (int i = 0; i < r->count; i++) mark_close(&r->buckets[i].shared);
        mark_close(&r->ready), mark_close(&r->done);
        if (r->narrow) device_free(r->narrow, reduction_narrow_bytes(r));
        free(r->buckets);
    }
    collective_close(&r->collective);
}

static inline int reduction_is_alone(const Reduction* r) { return !r || r->collective.comm->size == 1; }

// Where the ops' context stood while it is lent to the collectives.
typedef struct {
    Direction direction;
    int layer;
#ifdef __CUDACC__
    cudaStream_t stream;
#endif
} OpsPlace;

// Ops and scopes that are launched from now on, up to reduction_back(), are on the collectives' stream, after all that has
// been launched on the ops'.
static inline OpsPlace reduction_beside(Reduction* r, int layer, Context* ctx) {
    OpsPlace place = {ctx->direction, ctx->layer};
    collective_waits_for_ops(&r->collective, &r->ready, ctx);
#ifdef __CUDACC__
    place.stream = ctx->stream;
    ctx->stream = r->collective.stream;
#endif
    scope_at(ctx, COMMUNICATION, layer);
    return place;
}

static inline void reduction_back(OpsPlace place, Context* ctx) {
#ifdef __CUDACC__
    ctx->stream = place.stream;
#endif
    scope_at(ctx, place.direction, place.layer);
}

// Sum gradients begin .. end - 1, which those of `layer` complete, over the ranks, in place: with ZeRO-1 each part on the
// rank whose shard it is in, else on all of them.
static inline void reduction_send(Reduction* r, size_t begin, size_t end, int layer, real* grads, Context* ctx) {
    OpsPlace place = reduction_beside(r, layer, ctx);
    size_t n = end - begin, size = sizeof(real);
    char* values = (char*)(grads + begin);
    SumType type = SUM_REAL;
    FlatRange ours = {begin, n};
    Scope scope = scope_open(ctx, "sum_gradients", 0, (double)n * sizeof(real), "n=%zu", n);
    if (r->narrow) narrow_forward(r->narrow, grads + begin, n, ctx);
#ifdef __CUDACC__
    if (r->narrow) values = (char*)r->narrow, type = SUM_BF16, size = sizeof(Bf16);
#else  // MPI knows no bf16: what was rounded is summed in full
    if (r->narrow) narrow_back(grads + begin, r->narrow, n, SET, ctx);
#endif
    if (r->zero) {
        collective_begin();
        for (int rank = 0; rank < r->collective.comm->size; rank++) {
            FlatRange part = reduction_part(r, rank, begin, end);
            if (rank == r->collective.comm->rank) ours = part;
            if (part.size)
                collective_sum_to(&r->collective, values + (part.begin - begin) * size, part.size, type, rank);
        }
        collective_end();
    } else {
        collective_sum(&r->collective, values, n, type);
    }
    if (type == SUM_BF16 && ours.size)
        narrow_back(grads + ours.begin, r->narrow + (ours.begin - begin), ours.size, SET, ctx);
    scope_close(&scope);
    reduction_back(place, ctx);
}

// A step's last micro-batch begins: its gradients are to be summed.
static inline void reduction_begin(Reduction* r) {
    if (reduction_is_alone(r)) return;
    r->is_open = 1;
    r->sent = 0;
}

// The backward pass is through with `layer` and all behind it.
static inline void reduction_ready(Reduction* r, int layer, real* grads, Context* ctx) {
    if (reduction_is_alone(r) || !r->is_open || r->is_whole) return;
    for (; r->sent < r->count && r->buckets[r->count - 1 - r->sent].layer >= layer; r->sent++) {
        const Bucket* b = &r->buckets[r->count - 1 - r->sent];
        reduction_send(r, b->begin, b->end, b->layer, grads, ctx);
    }
}

// The backward pass is through: ops launched from now on find the sums.
static inline void reduction_finish(Reduction* r, real* grads, Context* ctx) {
    if (reduction_is_alone(r)) return;
    CHECK(r->is_open);
    if (r->is_whole) reduction_send(r, 0, r->elements, -1, grads, ctx);
    else reduction_ready(r, -1, grads, ctx);
    CHECK(r->is_whole || r->sent == r->count);
    r->is_open = 0;
    collective_mark(&r->collective, &r->done);
    ops_wait_for_collective(ctx, &r->done);
}

// Sum a few numbers over the ranks, in place where the ops run, between the ops before and after this call.
static inline void reduction_sum(Reduction* r, void* values, size_t n, SumType type, Context* ctx) {
    if (reduction_is_alone(r) || n == 0) return;
    OpsPlace place = reduction_beside(r, -1, ctx);
    Scope scope = scope_open(ctx, "sum_numbers", 0, (double)(n * (type == SUM_DOUBLE ? sizeof(double) : sizeof(real))),
                             "n=%zu", n);
    collective_sum(&r->collective, values, n, type);
    scope_close(&scope);
    reduction_back(place, ctx);
    collective_mark(&r->collective, &r->done);
    ops_wait_for_collective(ctx, &r->done);
}

// ZeRO-1: each rank has new parameters in its shard. Every other one gets them, the first layers first.
static inline void reduction_share(Reduction* r, floatX* params, Context* ctx) {
    if (reduction_is_alone(r) || !r->zero) return;
    OpsPlace place = reduction_beside(r, -1, ctx);
    Scope scope = scope_open(ctx, "share_parameters", 0, (double)r->elements * sizeof(floatX), "n=%zu", r->elements);
    for (int i = 0; i < r->count; i++) {
        Bucket* b = &r->buckets[i];
        collective_begin();
        for (int rank = 0; rank < r->collective.comm->size; rank++) {
            FlatRange part = reduction_part(r, rank, b->begin, b->end);
            if (part.size) collective_broadcast(&r->collective, params + part.begin, part.size * sizeof(floatX), rank);
        }
        collective_end();
        collective_mark(&r->collective, &b->shared);
    }
    scope_close(&scope);
    reduction_back(place, ctx);
}

// Ops launched from now on find the parameters of `layer` and of what lies before it; all, where the model has no such
// layer. The collectives run in order: one mark speaks for the buckets before it.
static inline void reduction_wait(Reduction* r, int layer, Context* ctx) {
    if (reduction_is_alone(r) || !r->zero) return;
    int last = 0;
    while (last + 1 < r->count && r->buckets[last + 1].layer <= layer) last++;
    ops_wait_for_collective(ctx, &r->buckets[last].shared);
}

#endif
