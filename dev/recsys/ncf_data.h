/* Ratings for NeuMF: the file of dev/data/prepare_recsys.py, the batches of a run, and the held-out items' rivals.
 *
 * A sample of an epoch is a positive or one of its negatives: number p of n = pairs * (1 + negatives) is slot p % (1 +
 * negatives) of pair p / (1 + negatives), slot 0 the positive. A negative's item is drawn uniformly from the items that
 * the user has no training rating of (He et al.). The held-out item may be drawn: training does not know it. Order and
 * items depend on (seed, epoch, number) only: a GPU draws each batch itself, from its copy of the ratings. */
#ifndef DEV_RECSYS_NCF_DATA_H
#define DEV_RECSYS_NCF_DATA_H

#include "llmc/base/log.h"
#include "llmc/base/rng.h"
#include "llmc/base/util.h"
#include "llmc/device/copies.h"
#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif

enum { RATINGS_MAGIC = 20261123, RATINGS_VERSION = 1, RATINGS_HEADER = 256 };
// The purposes of random streams, beside those of llmc/base/rng.h.
enum { SITE_DROPOUT_RELU = 11, SITE_NEGATIVE = 12, SITE_RIVAL = 13 };

// The items that a held-out item is ranked with: those that the user never rated, or any.
typedef enum { POOL_UNSEEN, POOL_ALL } EvalPool;
#define POOL_CHOICES "unseen|all"

enum { NEGATIVE_DRAWS = 64 };  // then a rated item is taken: the user has rated nearly all

typedef struct {
    int users, items, pairs;
    int *pair, *held_out;  // [pairs, 2] user and item; [users]
    int *begin, *seen;     // user u's items, held-out one included, ascending: seen[begin[u]] .. seen[begin[u + 1] - 1]
    uint32_t fingerprint;
} Ratings;

// The arrays lie in one block of memory.
static inline size_t ratings_bytes(const Ratings* r) {
    return (3 * (size_t)r->pairs + 3 * (size_t)r->users + 2) * sizeof(int);
}

static inline void ratings_bind(Ratings* r, void* memory) {
    r->pair = (int*)memory, r->held_out = r->pair + 2 * (size_t)r->pairs;
    r->begin = r->held_out + r->users, r->seen = r->begin + r->users + 2;
}

static inline int ratings_compare(const void* a, const void* b) { return *(const int*)a - *(const int*)b; }

// Set the items of each user, in a block that was filled with zeros.
static inline void ratings_index(Ratings* r) {
    for (int p = 0; p < r->pairs; p++) r->begin[r->pair[2 * p] + 2]++;
    for (int u = 0; u < r->users; u++) r->begin[u + 2] += r->begin[u + 1] + 1;
    // begin[u + 1] is now where the next item of user u goes.
    for (int p = 0; p < r->pairs; p++) r->seen[r->begin[r->pair[2 * p] + 1]++] = r->pair[2 * p + 1];
    for (int u = 0; u < r->users; u++) {
        r->seen[r->begin[u + 1]++] = r->held_out[u];
        qsort(r->seen + r->begin[u], (size_t)(r->begin[u + 1] - r->begin[u]), sizeof *r->seen, ratings_compare);
    }
}

// Read and check a prepared file.
static inline void ratings_open(Ratings* r, const char* path) {
    size_t bytes;
    Crc32 crc;
    memset(r, 0, sizeof *r);
    char* file = read_file(path, (size_t)1 << 33, &bytes, USAGE);
    const int* header = (const int*)file;
    if (bytes < RATINGS_HEADER * sizeof(int) || header[0] != RATINGS_MAGIC)
        die(USAGE, "%s: is not a file of ratings; make one with dev/data/prepare_recsys.py", path);
    if (header[1] != RATINGS_VERSION) die(USAGE, "%s: version %d is not known", path, header[1]);
    r->users = header[2], r->items = header[3], r->pairs = header[4];
    if (r->users < 1 || r->items < 1 || r->pairs < 1)
        die(USAGE, "%s: %d users, %d items, %d pairs: there is nothing to train on", path, r->users, r->items,
            r->pairs);
    size_t want = ((size_t)RATINGS_HEADER + 2 * (size_t)r->pairs + (size_t)r->users) * sizeof(int);
    if (bytes != want) die(USAGE, "%s: has %zu bytes instead of %zu; prepare it again", path, bytes, want);
    ratings_bind(r, xcalloc(1, ratings_bytes(r)));
    memcpy(r->pair, header + RATINGS_HEADER, bytes - RATINGS_HEADER * sizeof(int));
    for (int p = 0; p < r->pairs + r->users; p++) {
        int is_pair = p < r->pairs, user = is_pair ? r->pair[2 * p] : p - r->pairs,
            item = is_pair ? r->pair[2 * p + 1] : r->held_out[user];
        if (user < 0 || user >= r->users || item < 0 || item >= r->items)
            die(USAGE, "%s: %s %d: user %d, item %d; there are %d users and %d items", path,
                is_pair ? "pair" : "held-out item", is_pair ? p : user, user, item, r->users, r->items);
    }
    ratings_index(r);
    crc32_init(&crc);
    r->fingerprint = crc32_update(&crc, 0, file, bytes);
    free(file);
}

// A number in 0 .. n - 1 from 32 random bits.
HOST_DEVICE static inline int ratings_below(uint32_t bits, int n) { return (int)((uint64_t)bits * (uint64_t)n >> 32); }

// Whether the user rated the item, in training or held out.
HOST_DEVICE static inline int ratings_has(const Ratings* r, int user, int item) {
    int begin = r->begin[user], end = r->begin[user + 1], last = end;
    while (begin < end) {  // the first item that is not below it is at begin .. end
        int middle = begin + (end - begin) / 2;
        if (r->seen[middle] < item) begin = middle + 1;
        else end = middle;
    }
    return begin < last && r->seen[begin] == item;
}

// ---------------------------------------------------------------------------------------------------------
// Batches

// A batch on the host or on the device.
typedef struct {
    int *users, *items;  // [B]
    real* labels;        // [B]
    int B;
} Batch;

// Draws or uploads batches of at most B samples.
typedef struct {
    Staging staging;
    Batch device;
    Ratings ratings;  // on the device
} BatchLoader;

enum { SAMPLE_BYTES = 2 * sizeof(int) + sizeof(real) };

// The device's copy of the ratings. The CPU needs none.
static inline Ratings ratings_on_device(const Ratings* r, Context* ctx) {
    Ratings d = *r;
    if (!GPU_BUILD) return d;
    ratings_bind(&d, device_alloc(ctx, ratings_bytes(r), "ratings"));
    device_upload(ctx, d.pair, r->pair, ratings_bytes(r));
    device_synchronize(ctx);
    return d;
}

// Split memory of B samples.
static inline Batch batch_split(void* memory, int B) {
    real* labels = (real*)memory;
    Batch batch = {(int*)(labels + B), (int*)(labels + B) + B, labels, B};
    return batch;
}

static inline size_t batch_loader_bytes(const Ratings* r, int B) {
    return (size_t)B * SAMPLE_BYTES + GPU_BUILD * ratings_bytes(r);
}

static inline void batch_loader_open(BatchLoader* l, const Ratings* ratings, int B, Context* ctx) {
    size_t bytes = (size_t)B * SAMPLE_BYTES;
    l->ratings = ratings_on_device(ratings, ctx);
    staging_open(&l->staging, bytes);
    l->device = batch_split(device_alloc(ctx, bytes, "batch"), B);
}

static inline void batch_loader_close(BatchLoader* l) {
    device_free(l->device.labels, l->staging.bytes);
    staging_close(&l->staging);
    if (GPU_BUILD) device_free(l->ratings.pair, ratings_bytes(&l->ratings));
}

// How the samples of an epoch are ordered and drawn.
typedef struct {
    int negatives;
    uint64_t order, drawn;  // keys
} EpochDraws;

static inline EpochDraws epoch_draws(int negatives, uint64_t seed, uint64_t epoch) {
    EpochDraws d = {negatives, rng_stream(seed, epoch, 0, SITE_SHUFFLE), rng_stream(seed, epoch, 0, SITE_NEGATIVE)};
    return d;
}

// The item of negative number p of `user`.
HOST_DEVICE static inline int ratings_negative(const Ratings* r, int user, uint64_t p, uint64_t key) {
    for (uint32_t draw = 0;; draw++) {
        int item = ratings_below(philox((uint32_t)p, (uint32_t)(p >> 32), draw, 0, key).v[0], r->items);
        int is_rated = item != r->held_out[user] && ratings_has(r, user, item);
        if (!is_rated || draw + 1 == NEGATIVE_DRAWS) return item;
    }
}

// Set sample b of `batch` to number `at` in the order of an epoch.
HOST_DEVICE static inline void ratings_sample(Batch batch, const Ratings* r, EpochDraws d, uint64_t at, int b) {
    uint64_t each = (uint64_t)(1 + d.negatives), p = rng_permute(at, (uint64_t)r->pairs * each, d.order),
             pair = p / each;
    int is_positive = p % each == 0, user = r->pair[2 * pair];
    batch.users[b] = user;
    batch.items[b] = is_positive ? r->pair[2 * pair + 1] : ratings_negative(r, user, p, d.drawn);
    batch.labels[b] = (real)is_positive;
}

// Set `batch` to samples first .. first + B - 1 of an epoch, on the host.
static inline void ratings_batch(Batch batch, const Ratings* r, EpochDraws d, uint64_t first, int B) {
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) ratings_sample(batch, r, d, first + (uint64_t)b, b);
}

#ifdef __CUDACC__
static __global__ void ratings_batch_kernel(Batch batch, Ratings r, EpochDraws d, uint64_t first, int B) {
    int b = blockIdx.x * blockDim.x + threadIdx.x;
    if (b < B) ratings_sample(batch, &r, d, first + (uint64_t)b, b);
}
#endif

// Samples first .. first + B - 1 of an epoch, drawn by the device.
static inline Batch batch_draw(BatchLoader* l, EpochDraws d, uint64_t first, int B, Context* ctx) {
    Scope scope = scope_open(ctx, "ratings_batch", 0, (double)B * SAMPLE_BYTES, "B=%d", B);
#ifdef __CUDACC__
    ratings_batch_kernel<<<blocks_for((size_t)B, 256), 256, 0, ctx->stream>>>(l->device, l->ratings, d, first, B);
    cudaCheck(cudaGetLastError());
#else
    ratings_batch(l->device, &l->ratings, d, first, B);
#endif
    scope_close(&scope);
    Batch batch = l->device;
    batch.B = B;
    return batch;
}

// ---------------------------------------------------------------------------------------------------------
// Evaluation: rank the held-out item among `count` others, drawn by the seed and fixed for the whole run

enum { RIVAL_MASKED = -1 };  // a duplicate, which outranks nothing

// Set items[0] to the user's held-out item and items[1 .. count] to its rivals: from POOL_UNSEEN distinct items that
// the user never rated; from POOL_ALL any items, duplicates of others and of the held-out one masked.
static inline void ratings_rivals(const Ratings* r, int user, int count, EvalPool pool, uint64_t seed, int* items) {
    uint64_t key = rng_stream(seed, (uint64_t)user, 0, SITE_RIVAL);
    items[0] = r->held_out[user];
    int found = 0;
    for (uint32_t draw = 0; found < count; draw++) {
        int item = ratings_below(philox(draw, 0, 0, 0, key).v[0], r->items), is_new = 1;
        for (int k = 0; k <= found && is_new; k++) is_new = items[k] != item;
        if (pool == POOL_ALL) items[++found] = is_new ? item : RIVAL_MASKED;
        else if (is_new && !ratings_has(r, user, item)) items[++found] = item;
    }
}

// Upload samples of B rivals, `width` of each user from `first` on, held-out item included.
static inline Batch batch_rivals(BatchLoader* l, int first, const int* rivals, int width, int B, Context* ctx) {
    Batch host = batch_split(staging_begin(&l->staging), l->device.B);
    size_t n = (size_t)B;
    for (int k = 0; k < B; k++)
        host.users[k] = first + k / width, host.items[k] = max_int(rivals[k], 0), host.labels[k] = 0;
    device_upload(ctx, l->device.users, host.users, n * sizeof(int));
    device_upload(ctx, l->device.items, host.items, n * sizeof(int));
    device_upload(ctx, l->device.labels, host.labels, n * sizeof(real));
    staging_end(&l->staging, ctx);
    Batch batch = l->device;
    batch.B = B;
    return batch;
}

typedef struct {
    double users, hits, gain;  // hits and gain at 10
} RankSums;

// Add a user: scores[0] is the held-out item's. An equal score counts against it, and so does a NaN.
static inline void rank_add(RankSums* sums, const real* scores, const int* items, int count) {
    int above = 0;
    for (int k = 1; k <= count; k++) above += items[k] != RIVAL_MASKED && !(scores[k] < scores[0]);
    sums->users++;
    sums->hits += above < 10;
    sums->gain += above < 10 ? log(2) / log(above + 2) : 0;
}

#endif
