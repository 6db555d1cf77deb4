/* The data of a language model's run: shards to train on, shards to validate on if there are any, and their batches on the
 * way to where the ops run. */
#ifndef LLMC_LM_DATA_H
#define LLMC_LM_DATA_H

#include "../data/batch_lm.h"
#include "../device/staging.h"

typedef struct {
    Shards train_shards, val_shards;
    BatchLm train, val;
    int has_val;
    Staging staging;  // of micro-batches: inputs, then targets
} LmData;

// Open both patterns (val_pattern may be NULL) for batches of B sequences of T tokens below V. Validation data is read in
// the order of its files.
static inline void lm_data_open(LmData* d, const char* train_pattern, const char* val_pattern, int B, int T, int V,
                                uint64_t seed, int shuffle) {
    memset(d, 0, sizeof *d);
    shards_open(&d->train_shards, train_pattern);
    batch_lm_init(&d->train, &d->train_shards, B, T, V, seed, shuffle);
    d->has_val = val_pattern != NULL;
    if (d->has_val) shards_open(&d->val_shards, val_pattern);
    if (d->has_val) batch_lm_init(&d->val, &d->val_shards, B, T, V, 0, IN_ORDER);
    staging_open(&d->staging, 2 * (size_t)B * (size_t)T * sizeof(int));
}

static inline void lm_data_close(LmData* d) {
    staging_close(&d->staging);
    batch_lm_free(&d->train), shards_close(&d->train_shards);
    if (d->has_val) batch_lm_free(&d->val), shards_close(&d->val_shards);
}

// Bring the micro-batch of d->train or d->val that begins with sequence number `sample` into inputs and targets [B, T] on
// the device. It is there for what is launched after this.
static inline void lm_data_load(int* inputs, int* targets, LmData* d, const BatchLm* from, uint64_t sample,
                                Context* ctx) {
    size_t n = (size_t)from->B * (size_t)from->T;
    scope_at(ctx, FORWARD, -1);
    Scope scope = scope_open(ctx, "batch_load", 0, (double)(2 * n * sizeof(int)), "B=%d T=%d", from->B, from->T);
    int* host = (int*)staging_begin(&d->staging);
    batch_lm_read(from, sample, host, host + n);
    device_upload(ctx, inputs, host, n * sizeof(int));
    device_upload(ctx, targets, host + n, n * sizeof(int));
    staging_end(&d->staging, ctx);
    scope_close(&scope);
}

#endif
