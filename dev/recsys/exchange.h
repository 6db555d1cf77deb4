/* Embedding tables over several ranks: each table belongs to one rank, and rows travel to the samples that look them
 * up.
 *
 *   forward    ids go to the owners of the tables, the owners gather rows, the rows return:   exchange_lookup()
 *   backward   the gradients of the looked-up rows go to the owners, which update them:       exchange_gradients()
 *
 * Tables go to ranks by size, the largest first, each to the rank that has the fewest elements so far.
 *
 * An owner sees the lookups of the whole batch in the order of its samples, so a row's gradients are added in the order
 * in which one rank adds them. An owner's buffers are [samples of all ranks, its tables]: a joined row holds, for one
 * sample, the rows of all its tables side by side. A sample's rank has a block [its samples, tables of the owner] from
 * each owner. */
#ifndef DEV_RECSYS_EXCHANGE_H
#define DEV_RECSYS_EXCHANGE_H

#include "dev/recsys/ops/table_rows.h"
#include "llmc/dist/grad_sync.h"

// Rows of one table.
typedef struct {
    const floatX* table;
    const int* rows;
} Lookups;

typedef struct {
    int rank, ranks, tables;
    int owner[TABLE_PARTS], width[TABLE_PARTS];
    int slot[TABLE_PARTS], column[TABLE_PARTS];        // among its owner's tables; first column of a joined row
    int owned[TABLE_PARTS];                            // this rank's tables, ascending
    int count_of[TABLE_PARTS], width_of[TABLE_PARTS];  // of each rank: tables, elements of a joined row
    int B, samples[TABLE_PARTS];                       // most samples of a rank; samples of each in the current batch
    int *ids, *owned_ids, *split_ids;                  // [n, tables]; [all samples, owned]; the same transposed
    int *place, *numbers, placed;                      // [n, tables] and [B]: exchange_lookup(); `placed` samples
    floatX *rows, *owned_rows;  // [n, all widths] in blocks of owners; [all samples, width of this rank]
} Exchange;

// Choose the owners of tables with rows[t] * widths[t] elements. There are no more ranks than tables.
static inline void exchange_plan(Exchange* x, const ProcessGroup* group, int tables, const int* rows,
                                 const int* widths) {
    double held[TABLE_PARTS] = {0};
    int is_placed[TABLE_PARTS] = {0};
    memset(x, 0, sizeof *x);
    x->rank = group ? group->rank : 0, x->ranks = group ? group->size : 1, x->tables = tables;
    CHECK(tables <= TABLE_PARTS && x->ranks <= tables);
    for (int placed = 0; placed < tables; placed++) {
        int largest = -1, least = 0;
        for (int t = 0; t < tables; t++) {
            double size = (double)rows[t] * widths[t];
            if (!is_placed[t] && (largest < 0 || size > (double)rows[largest] * widths[largest])) largest = t;
        }
        for (int r = 1; r < x->ranks; r++)
            if (held[r] < held[least]) least = r;
        is_placed[largest] = 1, x->owner[largest] = least;
        held[least] += (double)rows[largest] * widths[largest];
    }
    for (int t = 0; t < tables; t++) {
        int owner = x->owner[t];
        x->width[t] = widths[t], x->slot[t] = x->count_of[owner], x->column[t] = x->width_of[owner];
        if (owner == x->rank) x->owned[x->slot[t]] = t;
        x->count_of[owner]++, x->width_of[owner] += widths[t];
    }
}

static inline int exchange_is_mine(const Exchange* x, int table) { return x->owner[table] == x->rank; }

// ---------------------------------------------------------------------------------------------------------
// Memory

static inline size_t exchange_all_widths(const Exchange* x) {
    size_t width = 0;
    for (int t = 0; t < x->tables; t++) width += (size_t)x->width[t];
    return width;
}

// Numbers and elements of the buffers for at most B samples of each rank.
static inline size_t exchange_ints(const Exchange* x, int B) {
    size_t lookups = (size_t)x->ranks * (size_t)x->count_of[x->rank];
    return (size_t)B * (2 * (size_t)x->tables + 2 * lookups + 1);
}

static inline size_t exchange_elements(const Exchange* x, int B) {
    return (size_t)B * (exchange_all_widths(x) + (size_t)x->ranks * (size_t)x->width_of[x->rank]);
}

static inline size_t exchange_bytes(const Exchange* x, int B) {
    return x->ranks == 1 ? 0 : exchange_ints(x, B) * sizeof(int) + exchange_elements(x, B) * sizeof(floatX);
}

static inline void exchange_alloc(Exchange* x, int B, Context* ctx) {
    size_t n = (size_t)B, lookups = n * (size_t)x->ranks * (size_t)x->count_of[x->rank];
    x->B = B, x->samples[0] = B;
    if (x->ranks == 1) return;
    x->ids = (int*)device_alloc(ctx, exchange_ints(x, B) * sizeof(int), "exchange");
    x->place = x->ids + n * (size_t)x->tables;
    x->owned_ids = x->place + n * (size_t)x->tables;
    x->split_ids = x->owned_ids + lookups;
    x->numbers = x->split_ids + lookups;
    x->rows = (floatX*)device_alloc(ctx, exchange_elements(x, B) * sizeof(floatX), "exchange");
    x->owned_rows = x->rows + n * exchange_all_widths(x);
}

// The most lookups of this rank's tables.
static inline int exchange_most_lookups(const Exchange* x) { return x->B * x->ranks * x->count_of[x->rank]; }

static inline void exchange_free(Exchange* x) {
    if (x->ranks == 1) return;
    device_free(x->ids, exchange_ints(x, x->B) * sizeof(int));
    device_free(x->rows, exchange_elements(x, x->B) * sizeof(floatX));
}

// ---------------------------------------------------------------------------------------------------------
// A batch

// Begin a batch: of `left` units each rank takes the next `most`, in the order of ranks; the last ones may get fewer or
// none. A unit has `size` samples. Returns the units of this rank.
static inline int exchange_share(Exchange* x, uint64_t left, int most, int size) {
    int mine = 0;
    for (int r = 0; r < x->ranks; r++) {
        int units = (int)min_size((size_t)left, (size_t)most);
        left -= (uint64_t)units;
        x->samples[r] = units * size;
        if (r == x->rank) mine = units;
    }
    CHECK(most * size <= x->B);
    return mine;
}

// Samples of all ranks in the current batch.
static inline int exchange_samples(const Exchange* x) {
    int all = 0;
    for (int r = 0; r < x->ranks; r++) all += x->samples[r];
    return all;
}

// How often these samples look up a row of this rank's tables.
static inline int exchange_lookups(const Exchange* x) { return exchange_samples(x) * x->count_of[x->rank]; }

// Number of tables and of elements in the blocks of the owners before `owner`.
static inline size_t exchange_before(const int* of_rank, int owner) {
    size_t sum = 0;
    for (int r = 0; r < owner; r++) sum += (size_t)of_rank[r];
    return sum;
}

// The tables' rows in x->rows.
static inline TableRows exchange_rows(const Exchange* x) {
    TableRows parts = {0};
    size_t n = (size_t)x->samples[x->rank];
    for (int t = 0; t < x->tables; t++) {
        int owner = x->owner[t];
        floatX* block = x->rows + n * exchange_before(x->width_of, owner);
        table_rows_add(&parts, block + x->column[t], (size_t)x->width_of[owner], x->width[t]);
    }
    return parts;
}

// This rank's tables in x->owned_rows.
static inline TableRows exchange_owned_rows(const Exchange* x) {
    TableRows parts = {0};
    for (int k = 0; k < x->count_of[x->rank]; k++) {
        int t = x->owned[k];
        table_rows_add(&parts, x->owned_rows + x->column[t], (size_t)x->width_of[x->rank], x->width[t]);
    }
    return parts;
}

// Set x->place [n, tables] to the row numbers of the lookups in x->rows, if all tables have one width, and x->numbers
// to 0, 1, ...
static inline void exchange_places(Exchange* x, Context* ctx) {
    int n = x->samples[x->rank];
    size_t tables = (size_t)x->tables;
    if (x->placed == n) return;
    int* numbers = (int*)xmalloc((size_t)n * (tables + 1) * sizeof *numbers);
    for (size_t b = 0; b < (size_t)n; b++) {
        for (size_t t = 0; t < tables; t++) {
            size_t owner = (size_t)x->owner[t], first = (size_t)n * exchange_before(x->count_of, x->owner[t]);
            numbers[b * tables + t] = (int)(first + b * (size_t)x->count_of[owner]) + x->slot[t];
        }
        numbers[(size_t)n * tables + b] = (int)b;
    }
    device_upload(ctx, x->place, numbers, (size_t)n * tables * sizeof *numbers);
    device_upload(ctx, x->numbers, numbers + (size_t)n * tables, (size_t)n * sizeof *numbers);
    device_synchronize(ctx);
    free(numbers);
    x->placed = n;
}

typedef enum { TO_OWNERS, TO_SAMPLES } ExchangeWay;

// Exchange what belongs to each sample and table: of[r] elements of `bytes` bytes for a sample and the tables of rank
// r.
static inline void exchange_blocks(const Exchange* x, GradSync* r, void* receive, const void* send, const int* of,
                                   size_t bytes, ExchangeWay way, Context* ctx) {
    size_t here[TABLE_PARTS], there[TABLE_PARTS];  // with each rank: this rank's samples; this rank's tables
    for (int k = 0; k < x->ranks; k++) {
        here[k] = (size_t)x->samples[x->rank] * (size_t)of[k] * bytes;
        there[k] = (size_t)x->samples[k] * (size_t)of[x->rank] * bytes;
    }
    const size_t *sent = way == TO_OWNERS ? here : there, *received = way == TO_OWNERS ? there : here;
    MainStream kept = grad_sync_side_stream(r, -1, ctx);
    double n = (double)collectives_total(&r->collectives, sent);
    Scope scope = scope_open(ctx, "all_to_all", 0, n, "%s", way == TO_OWNERS ? "to the owners" : "to the samples");
    all_to_all(&r->collectives, receive, received, send, sent);
    scope_close(&scope);
    grad_sync_main_stream(kept, ctx);
    collectives_record_event(&r->collectives, &r->done);
    ops_wait_for_collectives(ctx, &r->done);
}

// Fetch the rows of this rank's samples. `ids`: row numbers of each table, counted as its owner's entry in `tables`,
// this rank's own tables, counts them. Afterwards exchange_rows() has the rows, and x->owned_ids this rank's lookups.
static inline void exchange_lookup(Exchange* x, GradSync* sync, TableIds ids, TableRows tables, Context* ctx) {
    TableIds packed = {0};
    int n = x->samples[x->rank];
    for (int t = 0; t < x->tables; t++) {
        int* block = x->ids + (size_t)n * exchange_before(x->count_of, x->owner[t]);
        table_ids_add(&packed, block + x->slot[t], (size_t)x->count_of[x->owner[t]]);
    }
    TableRows owned = exchange_owned_rows(x);
    exchange_places(x, ctx);
    table_ids_copy(&packed, &ids, n, ctx);
    exchange_blocks(x, sync, x->owned_ids, x->ids, x->count_of, sizeof(int), TO_OWNERS, ctx);
    table_rows_copy(&owned, &tables, x->owned_ids, exchange_samples(x), ctx);
    exchange_blocks(x, sync, x->rows, x->owned_rows, x->width_of, sizeof(floatX), TO_SAMPLES, ctx);
}

// Send the gradients of the rows to their owners; x->rows is overwritten. Afterwards x->owned_rows has those of this
// rank's lookups.
static inline void exchange_gradients(Exchange* x, GradSync* sync, TableRows gradients, Context* ctx) {
    TableRows packed = exchange_rows(x);
    table_rows_copy(&packed, &gradients, NULL, x->samples[x->rank], ctx);
    exchange_blocks(x, sync, x->owned_rows, x->rows, x->width_of, sizeof(floatX), TO_OWNERS, ctx);
}

// After exchange_lookup(): the row numbers that the samples of all ranks look up in one of this rank's tables.
static inline const int* exchange_table_ids(Exchange* x, int table, Context* ctx) {
    TableIds in = {0}, out = {0};
    int N = exchange_samples(x), slot = x->slot[table];
    int* ids = x->split_ids + (size_t)slot * (size_t)N;
    table_ids_add(&in, x->owned_ids + slot, (size_t)x->count_of[x->rank]);
    table_ids_add(&out, ids, 1);
    table_ids_copy(&out, &in, N, ctx);
    return ids;
}

#endif
