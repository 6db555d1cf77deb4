/* Data loading for a masked language model: sentences for training and optionally for validation, or the examples of a
 * task instead, and the upload of their batches. While a step uses its micro-batches, a thread draws and masks those of
 * the next step. */
#ifndef LLMC_BERT_MLM_DATA_H
#define LLMC_BERT_MLM_DATA_H

#include "llmc/bert/examples.h"
#include "llmc/bert/mlm_settings.h"
#include "llmc/data/prefetch.h"
#include "llmc/device/copies.h"
#include "llmc/dist/process_group.h"
#include "llmc/text/room_words.h"

// A micro-batch on the device: the sequences one after the other, without padding.
typedef struct {
    Sequences sequences;
    int masked;                 // number of tokens to predict; with examples: of targets
    const int *tokens, *types;  // [rows]
    const int* masked_rows;     // [masked] their rows, in ascending order
    const int* targets;         // [masked] the original tokens; with examples: the targets, sequence by sequence
    const int* next_targets;    // [sequences] 0: the second segment follows the first, 1: it is a random one
} MlmInput;

// Uploads one micro-batch at a time.
typedef struct {
    Staging staging;
    int* device;
    size_t ints;  // capacity
} MlmLoader;

// Device memory of a loader for micro-batches of these sizes, in ints. Every array starts at a multiple of 16 bytes.
static inline size_t mlm_loader_ints(int rows, int masked, int sequences) {
    return 4 * round_up((size_t)rows, 4) + 2 * round_up((size_t)masked, 4) + 2 * round_up((size_t)sequences + 1, 4);
}

static inline void mlm_loader_open(MlmLoader* l, int rows, int masked, int sequences, Context* ctx) {
    l->ints = mlm_loader_ints(rows, masked, sequences);
    l->device = (int*)device_alloc(ctx, l->ints * sizeof(int), "batch");
    staging_open(&l->staging, l->ints * sizeof(int));
}

static inline void mlm_loader_close(MlmLoader* l) {
    staging_close(&l->staging);
    device_free(l->device, l->ints * sizeof(int));
}

// Upload a batch to the device for all later launches, until the next one is loaded. The caller must keep the batch
// until then.
static inline MlmInput mlm_load(MlmLoader* l, const MlmBatch* b, Context* ctx) {
    MlmInput in;
    memset(&in, 0, sizeof in);
    in.sequences.rows = b->rows, in.sequences.count = b->count, in.sequences.first = (int)b->first;
    in.sequences.max_length = b->max_length, in.sequences.sum_sq_len = b->sum_sq_len;
    in.sequences.host_cu_seqlens = b->cu_seqlens;
    in.masked = b->masked;
    const size_t rows = (size_t)b->rows, masked = (size_t)b->masked, count = (size_t)b->count;
    const struct {
        const int* from;
        size_t n;
        const int** to;
    } parts[] = {{b->tokens, rows, &in.tokens},
                 {b->types, rows, &in.types},
                 {b->sequence, rows, &in.sequences.sequence},
                 {b->position, rows, &in.sequences.position},
                 {b->cu_seqlens, count + 1, &in.sequences.cu_seqlens},
                 {b->masked_rows, masked, &in.masked_rows},
                 {b->targets, masked, &in.targets},
                 {b->next_targets, count, &in.next_targets}};
    scope_at(ctx, FORWARD, -1);
    Scope scope = scope_open(ctx, "batch_load", 0, (double)((4 * rows + 2 * masked + 2 * count) * sizeof(int)),
                             "rows=%d sequences=%d masked=%d", b->rows, b->count, b->masked);
    int* host = (int*)staging_begin(&l->staging);
    size_t at = 0;
    for (size_t i = 0; i < COUNT_OF(parts); i++) {
        CHECK(at + round_up(parts[i].n, 4) <= l->ints);
        memcpy(host + at, parts[i].from, parts[i].n * sizeof(int));
        *parts[i].to = l->device + at;
        at += round_up(parts[i].n, 4);
    }
    device_upload(ctx, l->device, host, at * sizeof(int));
    staging_end(&l->staging, ctx);
    scope_close(&scope);
    return in;
}

// ---------------------------------------------------------------------------------------------------------
// Batches of a step

typedef struct {
    WordPiece words;  // the vocabulary, set before mlm_source_alloc(); size 0: none
    MlmRecipe recipe;
    int T;
    MlmData train, val;
    int has_train, has_val;
    const Examples* examples;  // train on these instead of sentences; NULL: none
    uint64_t seed;             // of the order of the examples
    int shuffle;               // 0: in the order of their file
    // The micro-batches of a step on this rank. All are built before the first is used, so that their tokens can
    // be counted.
    MlmBatch* batches;
    int micro_steps;
    MlmLoader loader;
    // The micro-batches of the next step. The thread owns them while it builds them.
    Prefetch ahead;
    int is_ahead;  // the thread is running
    MlmBatch* next;
    uint64_t start;      // of `next`: row number start + rank * B is the first of this rank's micro-batches
    int B, rank, ranks;  // likewise: rows of a micro-batch
    ReadError error;
} MlmSource;

// What the micro-batches of a step contain, over all ranks.
typedef struct {
    double sequences, tokens, sum_sq_len, masked;
} MlmCounts;

// Allocate for steps of `micro_steps` micro-batches of B rows of T tokens.
static inline void mlm_source_alloc(MlmSource* source, MlmRecipe recipe, int B, int T, int micro_steps, Context* ctx) {
    source->recipe = recipe;
    source->T = T;
    source->micro_steps = micro_steps;
    source->batches = (MlmBatch*)xcalloc((size_t)micro_steps, sizeof(MlmBatch));
    source->next = (MlmBatch*)xcalloc((size_t)micro_steps, sizeof(MlmBatch));
    for (int i = 0; i < micro_steps; i++) {
        mlm_batch_alloc(&source->batches[i], B, T, recipe.max_predictions);
        mlm_batch_alloc(&source->next[i], B, T, recipe.max_predictions);
    }
    mlm_loader_open(&source->loader, B * T, B * recipe.max_predictions, B * max_int(1, recipe.pack), ctx);
}

// Open both patterns (val_pattern may be NULL). Their tokens must be below V. Validation data always has the same
// masks, of the same fraction.
static inline void mlm_source_open(MlmSource* source, const char* train_pattern, const char* val_pattern, int V,
                                   uint64_t seed) {
    mlm_open(&source->train, train_pattern, source->T, source->recipe, seed);
    mlm_check_vocabulary(&source->train, V);
    source->has_train = 1;
    if (!val_pattern) return;
    MlmRecipe val = source->recipe;
    val.mask_fraction = MLM_VAL_MASK_FRACTION;
    mlm_open(&source->val, val_pattern, source->T, val, 0);
    mlm_check_vocabulary(&source->val, V);
    if (!sentences_same_vocabulary(&source->train.text.vocabulary, &source->val.text.vocabulary,
                                   source->train.text.continues, source->val.text.continues))
        die(USAGE, "%s: was made with another vocabulary than %s; prepare both with one vocab.txt",
            source->val.text.files.shard[0].path, source->train.text.files.shard[0].path);
    source->has_val = 1;
}

// Ends with USAGE if the data was made with another vocabulary than `words`. Does nothing if `words` is empty.
static inline void mlm_check_words(const MlmData* data, const WordPiece* words) {
    const SentencesHeader* v = &data->text.vocabulary;
    uint64_t hash = FNV_START;
    int differs = 0;
    if (words->size == 0) return;
    if (words->size != v->V || words->pad != v->pad || words->cls != v->cls || words->sep != v->sep ||
        words->mask != v->mask)
        die(USAGE,
            "%s: was made with a vocabulary of %d tokens, [MASK] being %d, which is not the vocab.txt of %d tokens, "
            "[MASK] being %d; prepare the data with the model's own vocab.txt",
            data->text.files.shard[0].path, v->V, v->mask, words->size, words->mask);
    for (int id = 0; id < words->size; id++) {
        size_t length;
        const char* token = wordpiece_token(words, id, &length);
        hash = fnv_update(fnv_update(hash, token, length), "\n", 1);
        int is_piece = length > 2 && memcmp(token, "##", 2) == 0;
        differs |= !words->is_bytes && is_piece != sentences_continues(&data->text, id);
    }
    if (differs || words->unk != v->unk || (v->hash && v->hash != hash))
        die(USAGE,
            "%s: was made with another vocabulary than this vocab.txt, though both have %d tokens; prepare the data "
            "with the model's own vocab.txt",
            data->text.files.shard[0].path, v->V);
}

static inline void mlm_source_close(MlmSource* source) {
    if (source->is_ahead) prefetch_close(&source->ahead);
    mlm_loader_close(&source->loader);
    for (int i = 0; i < source->micro_steps; i++) mlm_batch_free(&source->batches[i]), mlm_batch_free(&source->next[i]);
    free(source->batches), free(source->next), free(source->error.message);
    wordpiece_free(&source->words);
    if (source->has_train) mlm_close(&source->train);
    if (source->has_val) mlm_close(&source->val);
}

// The thread that builds the next step's batches. One thread is enough, because it has a whole step's time.
static inline void* mlm_source_work(void* state) {
    MlmSource* source = (MlmSource*)state;
    for (uint64_t job; prefetch_take(&source->ahead, &job); prefetch_done(&source->ahead)) {
        for (int i = 0; i < source->micro_steps; i++) {
            uint64_t before = (uint64_t)(i * source->ranks + source->rank) * (uint64_t)source->B;
            MlmBatch* b = &source->next[i];
            uint64_t index = source->start + before;
            if (source->examples) {
                examples_batch_read(b, source->examples, source->seed, source->shuffle, index, source->B,
                                    (int64_t)before);
                continue;
            }
            mlm_batch_read(b, &source->train, index, source->B, &source->error);
            b->first = mlm_count(&source->train, source->start, before);
        }
    }
    return NULL;
}

// Let the thread prepare source->next, after the job it is working on.
static inline void mlm_source_ask(MlmSource* source, uint64_t start, int B, int rank, int ranks) {
    if (source->ahead.asked > 0) prefetch_wait(&source->ahead, source->ahead.asked - 1);
    free(source->error.message);
    source->error.message = NULL;
    source->start = start, source->B = B, source->rank = rank, source->ranks = ranks;
    prefetch_ask(&source->ahead);
}

// Get this rank's first `count` micro-batches of B rows for the step that starts with row number `start`. For the step
// that follows the last one, the thread has built them. Otherwise, as at the start of a run, they are built now.
static inline void mlm_source_build(MlmSource* source, uint64_t start, int B, int count, int rank, int ranks) {
    if (!source->is_ahead) prefetch_open(&source->ahead, mlm_source_work, source);
    source->is_ahead = 1;
    int is_ready = source->ahead.asked > 0 && source->start == start && source->B == B && source->rank == rank &&
                   source->ranks == ranks;
    if (!is_ready) mlm_source_ask(source, start, B, rank, ranks);
    prefetch_wait(&source->ahead, source->ahead.asked - 1);
    read_error_end(&source->error);
    MlmBatch* made = source->next;
    source->next = source->batches;
    source->batches = made;
    mlm_source_ask(source, start + (uint64_t)B * (uint64_t)ranks * (uint64_t)count, B, rank, ranks);
}

// Build the step's micro-batches on this rank, as mlm_source_build() does. Returns what they contain over all ranks.
static inline MlmCounts mlm_source_step(MlmSource* source, uint64_t start, int B, int count,
                                        const ProcessGroup* group) {
    MlmCounts counts = {0, 0, 0, 0};
    mlm_source_build(source, start, B, count, group->rank, group->size);
    for (int i = 0; i < count; i++) {
        const MlmBatch* b = &source->batches[i];
        counts.sequences += b->count, counts.tokens += b->rows, counts.masked += b->masked;
        counts.sum_sq_len += (double)b->sum_sq_len;
    }
    if (group->size > 1) group_sum_counts(group, &counts.sequences, sizeof counts / sizeof counts.sequences);
    return counts;
}

// FLOPs of a step in L encoder layers of C channels and F in the MLP, for real tokens. Attention is counted as if every
// token attended to its whole sequence.
static inline double mlm_encoder_flops(MlmCounts counts, int L, int C, int F) {
    double matmuls = 4.0 * C * C + 2.0 * C * F;
    return L * (6 * matmuls * counts.tokens + 12.0 * C * counts.sum_sq_len);
}

// Factors on the summed losses of a micro-batch.
typedef struct {
    double masked, next;
} MlmScales;

// The loss of a step is the mean of its `parts` micro-batches' means (--loss-mean micro), or the mean over all targets
// of the step (global).
static inline MlmScales mlm_scales(int mean, const MlmBatch* batch, MlmCounts step, int parts) {
    MlmScales micro = {.masked = 1.0 / parts / batch->masked, .next = 1.0 / parts / batch->count};
    MlmScales global = {.masked = 1 / step.masked, .next = 1 / step.sequences};
    return mean == MEAN_MICRO ? micro : global;
}

// FLOPs of the heads of a model of V tokens. `next`: 1 if it predicts the next sentence. The decoder is counted for
// masked tokens only.
static inline double mlm_heads_flops(MlmCounts counts, double C, int V, int next) {
    return 6 * ((V * C + C * C) * counts.masked + (next ? C * C * counts.sequences : 0));
}

#endif
