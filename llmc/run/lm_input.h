/* A micro-batch of a language model on the device: its tokens, and the layout of its sequences. */
#ifndef LLMC_RUN_LM_INPUT_H
#define LLMC_RUN_LM_INPUT_H

#include "llmc/data/lm_data.h"
#include "llmc/device/copies.h"
#include "llmc/run/state.h"

typedef struct {
    int B, T;                // maximum micro-batch: B sequences of T tokens
    int *inputs, *targets;   // [B * T]
    int* sample_cu_seqlens;  // [2] for one sequence, for sampling
    int* layout;             // cu_seqlens, sequence and position of B sequences of T rows
    Staging staging;         // for uploads from this file; lm_data_load() has its own
    int doc_mask;            // 1: attention is limited to documents
    Sequences documents;     // of the micro-batch; count 0: attention crosses documents
} LmInput;

static inline size_t lm_input_token_ints(int B, int T) { return 2 * (size_t)B * (size_t)T + 2; }
static inline size_t lm_input_layout_ints(int B, int T) { return (size_t)B + 1 + 2 * (size_t)B * (size_t)T; }

// Bytes on the device for micro-batches of at most B sequences of T tokens, their documents included.
static inline size_t lm_input_bytes(const LmInput* in, int B, int T) {
    size_t documents = in->doc_mask ? documents_ints(B * T) : 0;
    return (lm_input_token_ints(B, T) + lm_input_layout_ints(B, T) + documents) * sizeof(int);
}

// The caller sets in->doc_mask.
static inline void lm_input_alloc(LmInput* in, int B, int T, Context* ctx) {
    size_t n = lm_input_layout_ints(B, T);
    in->B = B, in->T = T;
    in->inputs = (int*)device_alloc(ctx, lm_input_token_ints(B, T) * sizeof(int), "batch");
    in->targets = in->inputs + B * T, in->sample_cu_seqlens = in->targets + B * T;
    in->layout = (int*)device_alloc(ctx, n * sizeof(int), "batch");
    staging_open(&in->staging, n * sizeof(int));
    int* layout = (int*)staging_begin(&in->staging);
    sequences_uniform(layout, layout + B + 1, layout + B + 1 + B * T, B, T);
    device_upload(ctx, in->layout, layout, n * sizeof(int));
    staging_end(&in->staging, ctx);
}

static inline void lm_input_free(LmInput* in) {
    staging_close(&in->staging);
    device_free(in->inputs, lm_input_token_ints(in->B, in->T) * sizeof(int));
    device_free(in->layout, lm_input_layout_ints(in->B, in->T) * sizeof(int));
}

// The layout of B <= in->B sequences and their documents. `first`: number of the first sequence in the whole step.
static inline Sequences lm_input_sequences(LmInput* in, int B, int first) {
    const int *layout = in->layout, *rows = layout + in->B + 1;
    Sequences s = {.rows = B * in->T,
                   .count = B,
                   .max_length = in->T,
                   .sum_sq_len = (int64_t)B * in->T * in->T,
                   .first = first,
                   .cu_seqlens = layout,
                   .sequence = rows,
                   .position = rows + in->B * in->T};
    in->documents.first = (int)((uint32_t)first * (uint32_t)in->T);
    if (in->doc_mask && in->documents.count) s.parts = &in->documents;
    return s;
}

// One sequence for sampling: upload `rows` tokens that follow `past_len` earlier ones.
static inline Sequences lm_input_text(LmInput* in, const int* tokens, int rows, int past_len, Context* ctx) {
    int cu_seqlens[2] = {0, rows};
    Sequences s = lm_input_sequences(in, 1, 0);
    s.count = 1, s.rows = s.max_length = rows, s.sum_sq_len = (int64_t)rows * rows, s.parts = NULL;
    s.cu_seqlens = in->sample_cu_seqlens, s.position += past_len;
    staging_upload(&in->staging, in->sample_cu_seqlens, cu_seqlens, sizeof cu_seqlens, ctx);
    staging_upload(&in->staging, in->inputs, tokens, (size_t)rows * sizeof(int), ctx);
    return s;
}

// The work of a step of `sequences` full sequences of T tokens. FLOPs per token: 6 for each of `parameters`, plus
// `attention_flops`, counted as if every token attended to its whole sequence.
static inline StepWork lm_step_work(size_t parameters, double attention_flops, int sequences, int T) {
    double token_flops = 6 * (double)parameters + attention_flops, tokens = (double)sequences * T;
    StepWork work = {
        .consumed = sequences, .sequences = (double)sequences, .tokens = tokens, .flops = tokens * token_flops};
    return work;
}

#endif
