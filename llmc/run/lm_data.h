/* The data of a language model's run: shards for training, optional shards for validation, and their batches on the way
 * to the device.
 *
 * From one micro-batch of a rank to its next it is B * ranks sequences, across steps and epochs, so the next ones are
 * known: a thread reads them ahead. After a jump, what was read ahead is discarded. The batches never depend on it. */
#ifndef LLMC_RUN_LM_DATA_H
#define LLMC_RUN_LM_DATA_H

#include "llmc/base/sequences.h"
#include "llmc/data/lm/batch_lm.h"
#include "llmc/device/staging.h"
#include "llmc/run/prefetch.h"
#include "llmc/run/val_entropy.h"

enum { LM_AHEAD = 4, LM_MEAN_DOCUMENT = 64 };

// A micro-batch on the host: inputs [B, T], targets [B, T], and the three arrays of `documents` with --doc-mask.
typedef struct {
    uint64_t sample;  // number of its first sequence, set by the caller
    int* ints;
    Documents documents;
    ReadError error;
} LmBatch;

typedef struct {
    Shards train_shards, val_shards;
    BatchLm train, val;
    int has_val;
    ValEntropy val_entropy;
    int end_of_text;  // first token of each document; -1: attention crosses documents
    int* documents;   // on the device: the arrays of Documents for the micro-batch
    Staging staging;  // the arrays of an LmBatch
    LmBatch now;      // read without the thread
    // Read ahead: job n reads into batch[n % LM_AHEAD].
    Prefetch ahead;
    int is_ahead;  // the thread runs
    LmBatch batch[LM_AHEAD];
    uint64_t next;    // the next job to use
    uint64_t stride;  // from one micro-batch of this rank to its next
} LmData;

// Documents in a micro-batch of N rows that the memory plan assumes. A batch with more takes more memory when it comes.
// The worst case, N, would plan 16 KiB per row and head where attention's scratch is tiled.
static inline int lm_data_planned_documents(int B, int N) { return B + N / LM_MEAN_DOCUMENT; }

static inline size_t lm_batch_ints(const LmData* d) {
    int N = d->train.B * d->train.T;
    return 2 * (size_t)N + (d->end_of_text >= 0 ? documents_ints(N) : 0);
}

static inline void lm_batch_alloc(LmBatch* b, const LmData* d) {
    memset(b, 0, sizeof *b);
    b->ints = (int*)xmalloc(lm_batch_ints(d) * sizeof(int));
    documents_place(&b->documents, b->ints + 2 * (size_t)d->train.B * (size_t)d->train.T, d->train.B * d->train.T);
}

// Read B sequences, starting with number `sample`.
static inline void lm_batch_read(LmBatch* b, const LmData* d, const BatchLm* from, uint64_t sample, ReadError* error) {
    batch_lm_read(from, sample, b->ints, b->ints + (size_t)d->train.B * (size_t)d->train.T, error);
    if (d->end_of_text >= 0) documents_find(&b->documents, b->ints, from->B, from->T, d->end_of_text);
}

// The thread that reads ahead.
static inline void* lm_data_work(void* data) {
    LmData* d = (LmData*)data;
    for (uint64_t job; prefetch_take(&d->ahead, &job); prefetch_done(&d->ahead)) {
        LmBatch* b = &d->batch[job % LM_AHEAD];
        lm_batch_read(b, d, &d->train, b->sample, &b->error);
    }
    return NULL;
}

// Warn if the first tokens of the data contain no start of a document: `end_of_text` may be the wrong token.
static inline void lm_data_check_documents(const LmData* d) {
    enum { LOOKED_AT = 1 << 20 };
    const Shard* shard = &d->train_shards.shard[0];
    size_t n = shard->tokens < LOOKED_AT ? (size_t)shard->tokens : (size_t)LOOKED_AT, documents = 0;
    int* tokens = (int*)xmalloc(n * sizeof(int));
    shards_read(&d->train_shards, 0, 0, n, tokens, NULL);
    for (size_t i = 0; i < n; i++) documents += tokens[i] == d->end_of_text;
    if (documents == 0)
        warn("%s: none of its first %zu tokens is %d, the start of a document; check the tokenizer", shard->path, n,
             d->end_of_text);
    free(tokens);
}

// Open both patterns (val_pattern may be NULL) for batches of B sequences of T tokens below V; this rank takes one
// batch in `ranks`. Validation data is read in the order of its files. Unless `end_of_text` is -1, documents that begin
// with this token are kept apart.
static inline void lm_data_open(LmData* d, const char* train_pattern, const char* val_pattern, int B, int T, int V,
                                uint64_t seed, int shuffle, int ranks, int end_of_text, Context* ctx) {
    memset(d, 0, sizeof *d);
    shards_open(&d->train_shards, train_pattern);
    batch_lm_init(&d->train, &d->train_shards, B, T, V, seed, shuffle);
    d->has_val = val_pattern != NULL;
    if (d->has_val) shards_open(&d->val_shards, val_pattern);
    if (d->has_val) batch_lm_init(&d->val, &d->val_shards, B, T, V, 0, IN_ORDER);
    if (d->has_val) val_entropy_open(&d->val_entropy, &d->val_shards, T);
    d->stride = (uint64_t)B * (uint64_t)ranks;
    d->end_of_text = end_of_text;
    if (end_of_text >= 0) {
        lm_data_check_documents(d);
        d->documents = (int*)device_alloc(ctx, documents_ints(B * T) * sizeof(int), "batch");
    }
    staging_open(&d->staging, lm_batch_ints(d) * sizeof(int));
    lm_batch_alloc(&d->now, d);
    for (int i = 0; i < LM_AHEAD; i++) lm_batch_alloc(&d->batch[i], d);
}

static inline void lm_data_close(LmData* d) {
    if (d->is_ahead) prefetch_close(&d->ahead);
    for (int i = 0; i < LM_AHEAD; i++) free(d->batch[i].ints), free(d->batch[i].error.message);
    free(d->now.ints);
    staging_close(&d->staging);
    if (d->documents) device_free(d->documents, documents_ints(d->train.B * d->train.T) * sizeof(int));
    batch_lm_free(&d->train), shards_close(&d->train_shards);
    if (d->has_val) batch_lm_free(&d->val), shards_close(&d->val_shards), val_entropy_close(&d->val_entropy);
}

// Let the thread read the micro-batch that starts with sequence number `sample`.
static inline void lm_data_ask(LmData* d, uint64_t sample) {
    LmBatch* b = &d->batch[d->ahead.asked % LM_AHEAD];
    free(b->error.message);
    b->error.message = NULL;
    b->sample = sample;
    prefetch_ask(&d->ahead);
}

// The training micro-batch that starts with sequence number `sample`, valid until the next call.
static inline const LmBatch* lm_data_take(LmData* d, uint64_t sample) {
    if (!d->is_ahead) prefetch_open(&d->ahead, lm_data_work, d);
    d->is_ahead = 1;
    uint64_t asked = d->ahead.asked;
    if (asked > 0 && d->batch[d->next % LM_AHEAD].sample == sample) {
        // The place of the previous batch is free again.
        lm_data_ask(d, d->batch[(asked - 1) % LM_AHEAD].sample + d->stride);
    } else {
        // The run starts here, or jumps: discard what was read ahead.
        if (asked > 0) prefetch_wait(&d->ahead, asked - 1);
        d->next = asked;
        for (uint64_t i = 0; i < LM_AHEAD; i++) lm_data_ask(d, sample + i * d->stride);
    }
    const LmBatch* b = &d->batch[d->next % LM_AHEAD];
    prefetch_wait(&d->ahead, d->next++);
    read_error_end(&b->error);
    return b;
}

// Upload the micro-batch of d->train or d->val that starts with sequence number `sample` to inputs and targets [B, T]
// on the device, for all later launches. d->val.B may be smaller than d->train.B. `documents` receives the sequences
// that attention keeps apart, valid until the next call, with count 0 if it crosses documents; the caller sets its
// `first`.
static inline void lm_data_load(int* inputs, int* targets, Sequences* documents, LmData* d, const BatchLm* from,
                                uint64_t sample, Context* ctx) {
    size_t n = (size_t)from->B * (size_t)from->T, N = (size_t)d->train.B * (size_t)d->train.T, ints = lm_batch_ints(d);
    scope_at(ctx, FORWARD, -1);
    Scope scope = scope_open(ctx, "batch_load", 0, (double)(ints * sizeof(int)), "B=%d T=%d", from->B, from->T);
    const LmBatch* b = &d->now;
    if (from == &d->train) b = lm_data_take(d, sample);
    else lm_batch_read(&d->now, d, from, sample, NULL);
    int* host = (int*)staging_begin(&d->staging);
    memcpy(host, b->ints, ints * sizeof(int));
    device_upload(ctx, inputs, host, n * sizeof(int));
    device_upload(ctx, targets, host + N, n * sizeof(int));
    memset(documents, 0, sizeof *documents);
    if (d->documents) {
        Documents on_device;
        Sequences s;
        memset(&s, 0, sizeof s);
        s.rows = (int)n, s.count = b->documents.count;
        s.max_length = b->documents.longest, s.sum_sq_len = b->documents.sum_sq_len;
        documents_place(&on_device, d->documents, (int)N);
        s.cu_seqlens = on_device.cu_seqlens, s.sequence = on_device.document, s.position = on_device.position;
        s.host_cu_seqlens = b->documents.cu_seqlens;
        s.is_numbered_by_row = 1;
        device_upload(ctx, d->documents, host + 2 * N, documents_ints((int)N) * sizeof(int));
        *documents = s;
    }
    staging_end(&d->staging, ctx);
    scope_close(&scope);
}

#endif
