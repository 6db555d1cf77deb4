/* Data loading for a language model: shards for training, optional shards for validation, and the upload of their
 * batches.
 *
 * A rank's micro-batches are B * ranks sequences apart, across steps and epochs. So the next ones are known, and a
 * thread reads them ahead. After a jump, they are discarded. Reading ahead never changes the batches. */
#ifndef LLMC_DATA_LM_DATA_H
#define LLMC_DATA_LM_DATA_H

#include "llmc/base/sequences.h"
#include "llmc/data/batch_lm.h"
#include "llmc/data/prefetch.h"
#include "llmc/data/val_entropy.h"
#include "llmc/device/copies.h"

enum { LM_AHEAD = 4, LM_MEAN_DOCUMENT = 64 };
enum { NO_CUTS = -1 };  // LmData.end_of_text instead of a token

// A micro-batch on the host: inputs [B, T], targets [B, T], and the three arrays of `documents` with --doc-mask.
typedef struct {
    uint64_t sequence;  // number of its first sequence, set by the caller
    int* ints;
    Documents documents;
    ReadError error;
} LmBatch;

typedef struct {
    Shards train_shards, val_shards;
    BatchLm train, val;
    int has_val;
    ValEntropy val_entropy;
    int end_of_text;  // first token of each document, or NO_CUTS
    int* documents;   // on the device: the arrays of Documents for the micro-batch
    Staging staging;  // the arrays of an LmBatch
    LmBatch now;      // read by the trainer itself
    // Read ahead: job n reads into batch[n % LM_AHEAD].
    Prefetch ahead;
    int is_ahead;  // the thread is running
    LmBatch batch[LM_AHEAD];
    uint64_t next;    // the next job to use
    uint64_t stride;  // from one micro-batch of this rank to its next
} LmData;

// The number of documents in a micro-batch of N rows that the memory plan assumes. A batch with more needs more memory.
// Planning for the worst case, N, would take 16 KiB per row and head where attention's scratch is tiled.
static inline int lm_data_planned_documents(int B, int N) { return B + N / LM_MEAN_DOCUMENT; }

static inline size_t lm_batch_ints(const LmData* data) {
    int N = data->train.B * data->train.T;
    return 2 * (size_t)N + (data->end_of_text >= 0 ? documents_ints(N) : 0);
}

static inline void lm_batch_alloc(LmBatch* b, const LmData* data) {
    memset(b, 0, sizeof *b);
    b->ints = (int*)xmalloc(lm_batch_ints(data) * sizeof(int));
    documents_place(&b->documents, b->ints + 2 * (size_t)data->train.B * (size_t)data->train.T,
                    data->train.B * data->train.T);
}

// Read B sequences, starting with number `sequence`.
static inline void lm_batch_read(LmBatch* b, const LmData* data, const BatchLm* from, uint64_t sequence,
                                 ReadError* error) {
    batch_lm_read(from, sequence, b->ints, b->ints + (size_t)data->train.B * (size_t)data->train.T, error);
    if (data->end_of_text >= 0) documents_find(&b->documents, b->ints, from->B, from->T, data->end_of_text);
}

// The thread that reads ahead.
static inline void* lm_data_work(void* state) {
    LmData* data = (LmData*)state;
    for (uint64_t job; prefetch_take(&data->ahead, &job); prefetch_done(&data->ahead)) {
        LmBatch* b = &data->batch[job % LM_AHEAD];
        lm_batch_read(b, data, &data->train, b->sequence, &b->error);
    }
    return NULL;
}

// Warn if the first tokens of the data contain no start of a document: `end_of_text` may be the wrong token.
static inline void lm_data_check_documents(const LmData* data) {
    enum { LOOKED_AT = 1 << 20 };
    const Shard* shard = &data->train_shards.shard[0];
    size_t n = shard->tokens < LOOKED_AT ? (size_t)shard->tokens : (size_t)LOOKED_AT, documents = 0;
    int* tokens = (int*)xmalloc(n * sizeof(int));
    shards_read(&data->train_shards, 0, 0, n, tokens, NULL);
    for (size_t i = 0; i < n; i++) documents += tokens[i] == data->end_of_text;
    if (documents == 0)
        warn("%s: none of its first %zu tokens is %d, the start of a document; check the tokenizer", shard->path, n,
             data->end_of_text);
    free(tokens);
}

// Open both patterns (val_pattern may be NULL) for batches of B sequences of T tokens below V. This rank takes every
// `ranks`th batch. Validation data is read in file order. Attention does not cross documents, which begin with
// `end_of_text` (NO_CUTS: it does).
static inline void lm_data_open(LmData* data, const char* train_pattern, const char* val_pattern, int B, int T, int V,
                                uint64_t seed, int shuffle, int ranks, int end_of_text, Context* ctx) {
    memset(data, 0, sizeof *data);
    shards_open(&data->train_shards, train_pattern);
    batch_lm_init(&data->train, &data->train_shards, B, T, V, seed, shuffle);
    data->has_val = val_pattern != NULL;
    if (data->has_val) shards_open(&data->val_shards, val_pattern);
    if (data->has_val) batch_lm_init(&data->val, &data->val_shards, B, T, V, 0, IN_ORDER);
    if (data->has_val) val_entropy_open(&data->val_entropy, &data->val_shards, T);
    data->stride = (uint64_t)B * (uint64_t)ranks;
    data->end_of_text = end_of_text;
    if (end_of_text >= 0) lm_data_check_documents(data);
    if (end_of_text >= 0) data->documents = (int*)device_alloc(ctx, documents_ints(B * T) * sizeof(int), "batch");
    staging_open(&data->staging, lm_batch_ints(data) * sizeof(int));
    lm_batch_alloc(&data->now, data);
    for (int i = 0; i < LM_AHEAD; i++) lm_batch_alloc(&data->batch[i], data);
}

static inline void lm_data_close(LmData* data) {
    if (data->is_ahead) prefetch_close(&data->ahead);
    for (int i = 0; i < LM_AHEAD; i++) free(data->batch[i].ints), free(data->batch[i].error.message);
    free(data->now.ints);
    staging_close(&data->staging);
    if (data->documents) device_free(data->documents, documents_ints(data->train.B * data->train.T) * sizeof(int));
    batch_lm_free(&data->train), shards_close(&data->train_shards);
    if (data->has_val)
        batch_lm_free(&data->val), shards_close(&data->val_shards), val_entropy_close(&data->val_entropy);
}

// Let the thread read the micro-batch that starts with sequence number `sequence`.
static inline void lm_data_ask(LmData* data, uint64_t sequence) {
    LmBatch* b = &data->batch[data->ahead.asked % LM_AHEAD];
    free(b->error.message);
    b->error.message = NULL;
    b->sequence = sequence;
    prefetch_ask(&data->ahead);
}

// The training micro-batch that starts with sequence number `sequence`, valid until the next call.
static inline const LmBatch* lm_data_take(LmData* data, uint64_t sequence) {
    if (!data->is_ahead) prefetch_open(&data->ahead, lm_data_work, data);
    data->is_ahead = 1;
    uint64_t asked = data->ahead.asked;
    if (asked > 0 && data->batch[data->next % LM_AHEAD].sequence == sequence) {
        // The previous batch's buffer is free again.
        lm_data_ask(data, data->batch[(asked - 1) % LM_AHEAD].sequence + data->stride);
    } else {
        // The run starts here, or jumps: discard batches that were read ahead.
        if (asked > 0) prefetch_wait(&data->ahead, asked - 1);
        data->next = asked;
        for (uint64_t i = 0; i < LM_AHEAD; i++) lm_data_ask(data, sequence + i * data->stride);
    }
    const LmBatch* b = &data->batch[data->next % LM_AHEAD];
    prefetch_wait(&data->ahead, data->next++);
    read_error_end(&b->error);
    return b;
}

// The number of targets that count for the loss, in `sequences` sequences of data->train or data->val from number
// `sequence` on. The loss is the mean over them, in all micro-batches and ranks of a step, so every rank counts them
// all. Only the mask bits are read. Ends with USAGE if there are none.
static inline double lm_data_targets(const BatchLm* from, uint64_t sequence, uint64_t sequences) {
    uint64_t count = batch_lm_count(from, sequence, sequences);
    if (count == 0)
        die(USAGE,
            "%s: none of the targets of %llu sequences from number %llu counts for the loss, so it has no mean; make "
            "the data again, or take more sequences a step (-d)",
            from->shards->pattern, (unsigned long long)sequences, (unsigned long long)sequence);
    return (double)count;
}

// Upload the micro-batch of data->train or data->val that starts with number `sequence` to inputs and targets [B, T] on
// the device, for all later launches. data->val.B may be smaller than data->train.B. `documents` receives the documents
// that attention does not cross, valid until the next call; count 0: attention crosses all. The caller sets its
// `first`.
static inline void lm_data_load(int* inputs, int* targets, Sequences* documents, LmData* data, const BatchLm* from,
                                uint64_t sequence, Context* ctx) {
    size_t n = (size_t)from->B * (size_t)from->T, N = (size_t)data->train.B * (size_t)data->train.T,
           ints = lm_batch_ints(data);
    scope_at(ctx, FORWARD, -1);
    Scope scope = scope_open(ctx, "batch_load", 0, (double)(ints * sizeof(int)), "B=%d T=%d", from->B, from->T);
    const LmBatch* b = &data->now;
    if (from == &data->train) b = lm_data_take(data, sequence);
    else lm_batch_read(&data->now, data, from, sequence, NULL);
    int* host = (int*)staging_begin(&data->staging);
    memcpy(host, b->ints, ints * sizeof(int));
    device_upload(ctx, inputs, host, n * sizeof(int));
    device_upload(ctx, targets, host + N, n * sizeof(int));
    memset(documents, 0, sizeof *documents);
    if (data->end_of_text >= 0) {
        Documents on_device;
        Sequences s;
        memset(&s, 0, sizeof s);
        s.rows = (int)n, s.count = b->documents.count;
        s.max_length = b->documents.longest, s.sum_sq_len = b->documents.sum_sq_len;
        documents_place(&on_device, data->documents, (int)N);
        s.cu_seqlens = on_device.cu_seqlens, s.sequence = on_device.document, s.position = on_device.position;
        s.host_cu_seqlens = b->documents.cu_seqlens;
        s.is_numbered_by_row = 1;
        device_upload(ctx, data->documents, host + 2 * N, documents_ints((int)N) * sizeof(int));
        *documents = s;
    }
    staging_end(&data->staging, ctx);
    scope_close(&scope);
}

#endif
