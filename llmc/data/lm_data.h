/* The loader of a language model. It reads shards for training, and optionally for validation, and it owns the
 * micro-batch on the device: tokens, targets, and the layout of the sequences.
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

// A micro-batch on the device, valid until the next one is loaded.
typedef struct {
    int *inputs, *targets;  // [s.rows] tokens, and the tokens to predict; -1 does not count for the loss
    Sequences s;
} Batch;

// The same on the host, one array after the other: inputs [B, T], targets [B, T], and with --doc-mask `documents`.
typedef struct {
    uint64_t sequence;  // number of its first sequence
    int *inputs, *targets;
    Documents documents;
    ReadError error;
} HostBatch;

typedef struct {
    int B, T;         // sequences of the largest micro-batch, and their tokens
    int end_of_text;  // first token of each document, which attention does not leave; NO_CUTS: it does
    int* device;      // the arrays of a micro-batch, one after the other:
    int *inputs, *targets, *layout, *documents;  // layout: cu_seqlens, sequence and position of B sequences of T rows
    Sequences parts;                             // the documents of the micro-batch; count 0: none
    Staging staging;
    Shards train_shards, val_shards;
    BatchLm train, val;
    int has_val;
    ValEntropy val_entropy;
    HostBatch now;  // read by the trainer itself
    // Read ahead: job n reads into batch[n % LM_AHEAD].
    Prefetch ahead;
    int is_ahead;  // the thread is running
    HostBatch batch[LM_AHEAD];
    uint64_t next;    // the next job to use
    uint64_t stride;  // from one micro-batch of this rank to its next
} LmData;

// The number of documents in a micro-batch of N rows that the memory plan assumes. A batch with more needs more memory.
// Planning for the worst case, N, would take 16 KiB per row and head where attention's scratch is tiled.
static inline int lm_data_planned_documents(int B, int N) { return B + N / LM_MEAN_DOCUMENT; }

// Numbers of ints: of a micro-batch as it is read, of the layout, and of everything on the device, where the cu_seqlens
// of a text come last.
static inline size_t host_batch_ints(int B, int T, int has_documents) {
    return 2 * (size_t)B * (size_t)T + (has_documents ? documents_ints(B * T) : 0);
}
static inline size_t lm_layout_ints(int B, int T) { return (size_t)B + 1 + 2 * (size_t)B * (size_t)T; }
static inline size_t lm_data_ints(int B, int T, int has_documents) {
    return host_batch_ints(B, T, has_documents) + lm_layout_ints(B, T) + 2;
}

// ---------------------------------------------------------------------------------------------------------
// Memory and files

// Allocate for micro-batches of at most B sequences of T tokens. lm_data_open() opens files to fill them from.
static inline void lm_data_alloc(LmData* data, int B, int T, int end_of_text, Context* ctx) {
    const size_t N = (size_t)B * (size_t)T, n = lm_layout_ints(B, T), read = host_batch_ints(B, T, end_of_text >= 0);
    memset(data, 0, sizeof *data);
    data->B = B, data->T = T, data->end_of_text = end_of_text;
    data->device = (int*)device_alloc(ctx, lm_data_ints(B, T, end_of_text >= 0) * sizeof(int), "batch");
    data->inputs = data->device, data->targets = data->inputs + N, data->documents = data->targets + N;
    data->layout = data->device + read;
    staging_open(&data->staging, max_size(n, read) * sizeof(int));
    int* layout = (int*)staging_begin(&data->staging);
    sequences_uniform(layout, layout + B + 1, layout + B + 1 + N, B, T);
    device_upload(ctx, data->layout, layout, n * sizeof(int));
    staging_end(&data->staging, ctx);
}

static inline void host_batch_alloc(HostBatch* b, const LmData* data) {
    const size_t N = (size_t)data->B * (size_t)data->T;
    b->inputs = (int*)xmalloc(host_batch_ints(data->B, data->T, data->end_of_text >= 0) * sizeof(int));
    b->targets = b->inputs + N;
    documents_place(&b->documents, b->targets + N, (int)N);
}

// The thread that reads ahead.
static inline void* lm_data_work(void* state) {
    LmData* data = (LmData*)state;
    for (uint64_t job; prefetch_take(&data->ahead, &job); prefetch_done(&data->ahead)) {
        HostBatch* b = &data->batch[job % LM_AHEAD];
        batch_lm_read(&data->train, b->sequence, b->inputs, b->targets, &b->error);
        if (data->end_of_text >= 0) documents_find(&b->documents, b->inputs, data->B, data->T, data->end_of_text);
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

// Open both patterns (val_pattern may be NULL), whose tokens are below V. This rank takes every `ranks`th batch.
// Validation data is read in file order.
static inline void lm_data_open(LmData* data, const char* train_pattern, const char* val_pattern, int V, uint64_t seed,
                                int shuffle, int ranks) {
    const int B = data->B, T = data->T;
    shards_open(&data->train_shards, train_pattern);
    batch_lm_init(&data->train, &data->train_shards, B, T, V, seed, shuffle);
    data->has_val = val_pattern != NULL;
    if (data->has_val) shards_open(&data->val_shards, val_pattern);
    if (data->has_val) batch_lm_init(&data->val, &data->val_shards, B, T, V, 0, IN_ORDER);
    if (data->has_val) val_entropy_open(&data->val_entropy, &data->val_shards, T);
    data->stride = (uint64_t)B * (uint64_t)ranks;
    if (data->end_of_text >= 0) lm_data_check_documents(data);
    host_batch_alloc(&data->now, data);
    for (int i = 0; i < LM_AHEAD; i++) host_batch_alloc(&data->batch[i], data);
}

static inline void lm_data_close(LmData* data) {
    if (data->is_ahead) prefetch_close(&data->ahead);
    for (int i = 0; i < LM_AHEAD; i++) free(data->batch[i].inputs), free(data->batch[i].error.message);
    free(data->now.inputs);
    staging_close(&data->staging);
    device_free(data->device, lm_data_ints(data->B, data->T, data->end_of_text >= 0) * sizeof(int));
    if (data->train_shards.count) batch_lm_free(&data->train), shards_close(&data->train_shards);
    if (data->has_val)
        batch_lm_free(&data->val), shards_close(&data->val_shards), val_entropy_close(&data->val_entropy);
}

// ---------------------------------------------------------------------------------------------------------
// Batches

// Let the thread read the micro-batch that starts with sequence number `sequence`.
static inline void lm_data_ask(LmData* data, uint64_t sequence) {
    HostBatch* b = &data->batch[data->ahead.asked % LM_AHEAD];
    free(b->error.message);
    b->error.message = NULL;
    b->sequence = sequence;
    prefetch_ask(&data->ahead);
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

// B sequences of T rows each, the first of which is number `first` in the whole step.
static inline Batch lm_data_batch(LmData* data, int B, int first) {
    const int *layout = data->layout, *rows = layout + data->B + 1, T = data->T;
    Batch b = {.inputs = data->inputs, .targets = data->targets};
    b.s.rows = B * T, b.s.count = B, b.s.max_length = T, b.s.sum_sq_len = (int64_t)B * T * T, b.s.first = first;
    b.s.cu_seqlens = layout, b.s.sequence = rows, b.s.position = rows + data->B * T;
    data->parts.first = (int)((uint32_t)first * (uint32_t)T);
    if (data->parts.count) b.s.parts = &data->parts;
    return b;
}

// Copy B sequences of `read` to the device, for all later launches.
static inline Batch lm_data_upload(LmData* data, const HostBatch* read, int B, int first, Context* ctx) {
    size_t n = (size_t)B * (size_t)data->T, N = (size_t)data->B * (size_t)data->T;
    size_t ints = host_batch_ints(data->B, data->T, data->end_of_text >= 0);
    scope_at(ctx, FORWARD, -1);
    Scope scope = scope_open(ctx, "batch_load", 0, (double)(ints * sizeof(int)), "B=%d T=%d", B, data->T);
    int* host = (int*)memcpy(staging_begin(&data->staging), read->inputs, ints * sizeof(int));
    device_upload(ctx, data->inputs, host, n * sizeof(int));
    device_upload(ctx, data->targets, host + N, n * sizeof(int));
    if (data->end_of_text >= 0) {
        const int* documents = data->documents;
        Sequences parts = {.rows = (int)n, .count = read->documents.count, .max_length = read->documents.longest};
        parts.sum_sq_len = read->documents.sum_sq_len, parts.is_numbered_by_row = 1;
        parts.sequence = documents, parts.position = documents + N, parts.cu_seqlens = documents + 2 * N;
        parts.host_cu_seqlens = read->documents.cu_seqlens;
        device_upload(ctx, data->documents, host + 2 * N, documents_ints((int)N) * sizeof(int));
        data->parts = parts;
    }
    staging_end(&data->staging, ctx);
    scope_close(&scope);
    return lm_data_batch(data, B, first);
}

// Load the training micro-batch that starts `first` sequences after number `step_sequence`, the first of its step. The
// thread has read it: lm_data_work().
static inline Batch lm_data_train(LmData* data, uint64_t step_sequence, int first, Context* ctx) {
    uint64_t sequence = step_sequence + (uint64_t)first, asked = data->ahead.asked;
    if (!data->is_ahead) prefetch_open(&data->ahead, lm_data_work, data);
    data->is_ahead = 1;
    if (asked > 0 && data->batch[data->next % LM_AHEAD].sequence == sequence) {
        // The previous batch's buffer is free again.
        lm_data_ask(data, data->batch[(asked - 1) % LM_AHEAD].sequence + data->stride);
    } else {
        // The run starts here, or jumps: discard batches that were read ahead.
        if (asked > 0) prefetch_wait(&data->ahead, asked - 1);
        data->next = asked;
        for (uint64_t i = 0; i < LM_AHEAD; i++) lm_data_ask(data, sequence + i * data->stride);
    }
    const HostBatch* b = &data->batch[data->next % LM_AHEAD];
    prefetch_wait(&data->ahead, data->next++);
    read_error_end(&b->error);
    return lm_data_upload(data, b, data->B, first, ctx);
}

// Load B sequences of the validation data.
static inline Batch lm_data_val(LmData* data, uint64_t sequence, int B, Context* ctx) {
    HostBatch* b = &data->now;
    data->val.B = B;
    batch_lm_read(&data->val, sequence, b->inputs, b->targets, NULL);
    if (data->end_of_text >= 0) documents_find(&b->documents, b->inputs, B, data->T, data->end_of_text);
    return lm_data_upload(data, b, B, 0, ctx);
}

// Load one text: `rows` tokens that follow `past_len` earlier ones. It has no targets.
static inline Batch lm_data_text(LmData* data, const int* tokens, int rows, int past_len, Context* ctx) {
    int cu_seqlens[2] = {0, rows}, *device = data->layout + lm_layout_ints(data->B, data->T);
    Batch b = lm_data_batch(data, 1, 0);
    b.s.rows = b.s.max_length = rows, b.s.sum_sq_len = (int64_t)rows * rows, b.s.parts = NULL;
    b.s.cu_seqlens = device, b.s.position += past_len;
    staging_upload(&data->staging, device, cu_seqlens, sizeof cu_seqlens, ctx);
    staging_upload(&data->staging, data->inputs, tokens, (size_t)rows * sizeof(int), ctx);
    return b;
}

#endif
