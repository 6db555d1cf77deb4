/* Batches for masked-token prediction: pairs of segments (pairs.h), masked when a batch is built.
 *
 *   masks     min(max_predictions, max(1, round(fraction * length))) positions (mlm_masks), never [CLS] or [SEP]; a
 *             half rounds to even. Of these, 80 % become [MASK], 10 % a token drawn from the whole vocabulary, 10 %
 *             stay unchanged
 *   words     with whole_words the tokens of a word are chosen together, and a word that would exceed the count is
 *   skipped; if only such words are left, the first of them supplies the missing tokens */
#ifndef LLMC_BERT_BATCH_MLM_H
#define LLMC_BERT_BATCH_MLM_H

#include "llmc/base/rng.h"
#include "llmc/bert/pairs.h"

// Host arrays with room for B * T rows. They hold only real tokens, one sequence after the other.
typedef struct {
    int count, rows, max_length, masked;
    int64_t sum_sq_len;                         // sum of the squared lengths
    int64_t first;                              // number of its first sequence in the whole step; the caller sets it
    int *tokens, *types, *sequence, *position;  // [rows]
    int* cu_seqlens;                            // [count + 1]
    int *masked_rows, *targets;                 // [masked] row numbers, ascending, and their original tokens
    int* next_targets;                          // [count] 0: B follows A, 1: it does not; -1 without next_sentence
    int room, masked_room;                      // most rows and most masked rows
} MlmBatch;

// ---------------------------------------------------------------------------------------------------------
// Masks

typedef struct {
    int first, size;
} MlmWord;

// Append the words of rows first .. end - 1 to word [count]. Returns the new count.
static inline int mlm_find_words(MlmWord* word, int count, const MlmData* data, const int* tokens, int first, int end) {
    for (int row = first; row < end; row++) {
        if (data->recipe.whole_words && row > first && sentences_continues(&data->text, tokens[row])) {
            word[count - 1].size++;
        } else {
            word[count].first = row;
            word[count++].size = 1;
        }
    }
    return count;
}

// Set chosen [row] for `wanted` rows of the words. Shuffles only as many words as it needs.
static inline void mlm_choose(unsigned char* chosen, MlmWord* word, int count, int wanted, MlmDraws* draws) {
    MlmWord skipped = {0, 0};  // the first word that was too long
    for (int i = 0; i < count && wanted > 0; i++) {
        int k = i + (int)mlm_draw_below(draws, (uint32_t)(count - i));
        MlmWord w = word[k];
        word[k] = word[i];
        if (w.size > wanted) {
            if (skipped.size == 0) skipped = w;
            continue;
        }
        memset(chosen + w.first, 1, (size_t)w.size);
        wanted -= w.size;
    }
    if (wanted > 0) memset(chosen + skipped.first, 1, (size_t)wanted);
}

// ---------------------------------------------------------------------------------------------------------
// Batches

// Allocate room for B rows of T tokens.
static inline void mlm_batch_alloc(MlmBatch* b, int B, int T, int max_predictions) {
    memset(b, 0, sizeof(*b));
    b->room = B * T;
    b->masked_room = B * max_predictions;  // also the most sequences: each has a mask
    size_t rows = (size_t)b->room * sizeof(int), masked = (size_t)b->masked_room * sizeof(int);
    b->tokens = (int*)xmalloc(rows);
    b->types = (int*)xmalloc(rows);
    b->sequence = (int*)xmalloc(rows);
    b->position = (int*)xmalloc(rows);
    b->masked_rows = (int*)xmalloc(masked);
    b->targets = (int*)xmalloc(masked);
    b->next_targets = (int*)xmalloc(masked);
    b->cu_seqlens = (int*)xmalloc(masked + sizeof(int));
}

static inline void mlm_batch_free(MlmBatch* b) {
    free(b->tokens);
    free(b->types);
    free(b->sequence);
    free(b->position);
    free(b->masked_rows);
    free(b->targets);
    free(b->next_targets);
    free(b->cu_seqlens);
    memset(b, 0, sizeof(*b));
}

// Empty the batch. `first` is the number of its first sequence in the step.
static inline void mlm_batch_begin(MlmBatch* b, int64_t first) {
    b->count = b->rows = b->max_length = b->masked = 0;
    b->sum_sq_len = 0;
    b->first = first;
    b->cu_seqlens[0] = 0;
}

// Append tokens [n] (NULL: they are already there) to the batch as rows of one type.
static inline void mlm_batch_append(MlmBatch* b, const int* tokens, uint32_t n, int type) {
    CHECK((int64_t)b->rows + n <= b->room);
    for (uint32_t i = 0; i < n; i++, b->rows++) {
        if (tokens) b->tokens[b->rows] = tokens[i];
        b->types[b->rows] = type;
        b->sequence[b->rows] = b->count;
        b->position[b->rows] = b->rows - b->cu_seqlens[b->count];
    }
}

// Mask `wanted` tokens of the sequence that begins at row `begin`. The [SEP] of its segments are at rows a_end, b_end.
static inline void mlm_batch_mask(MlmBatch* b, const MlmData* data, int wanted, int begin, int a_end, int b_end,
                                  MlmDraws* draws) {
    int length = b->rows - begin, words = 0;
    MlmWord* word = (MlmWord*)xmalloc((size_t)length * sizeof(MlmWord));
    unsigned char* chosen = (unsigned char*)xcalloc((size_t)length, 1);
    int* tokens = b->tokens + begin;
    words = mlm_find_words(word, 0, data, tokens, 1, a_end - begin);
    if (b_end > a_end) words = mlm_find_words(word, words, data, tokens, a_end - begin + 1, b_end - begin);
    mlm_choose(chosen, word, words, wanted, draws);
    CHECK(b->masked + wanted <= b->masked_room);
    for (int i = 0; i < length; i++) {
        if (!chosen[i]) continue;
        b->masked_rows[b->masked] = begin + i;
        b->targets[b->masked++] = tokens[i];
        uint32_t fate = mlm_draw_below(draws, 10);
        if (fate < 8) tokens[i] = data->text.vocabulary.mask;
        if (fate == 8) tokens[i] = (int)mlm_draw_below(draws, (uint32_t)data->text.vocabulary.V);
    }
    free(chosen);
    free(word);
}

// End the sequence whose rows have been appended.
static inline void mlm_batch_end(MlmBatch* b, int next_target) {
    int length = b->rows - b->cu_seqlens[b->count];
    b->next_targets[b->count++] = next_target;
    b->cu_seqlens[b->count] = b->rows;
    b->max_length = max_int(b->max_length, length);
    b->sum_sq_len += (int64_t)length * length;
}

// Append the sequence of a chunk, which belongs to row `index` over all epochs.
static inline void mlm_batch_add(MlmBatch* b, const MlmData* data, uint64_t index, uint64_t chunk, ReadError* error) {
    const uint64_t epoch = index / data->rows;
    MlmDraws draws = mlm_draws(data, epoch, SITE_PAIR, chunk), masks = mlm_draws(data, epoch, SITE_MASK, chunk);
    MlmPair p = mlm_pair(data, chunk, mlm_budget(data, chunk), &draws);
    const int *cls = &data->text.vocabulary.cls, *sep = &data->text.vocabulary.sep;
    int begin = b->rows;
    CHECK(b->count < b->masked_room && begin + (int64_t)p.a.n + p.b.n + mlm_special_tokens(data) <= b->room);
    b->cu_seqlens[b->count] = begin;
    mlm_batch_append(b, cls, 1, 0);
    sentences_read(b->tokens + b->rows, &data->text, p.a.document, p.a.first, p.a.skip, p.a.n, error);
    mlm_batch_append(b, NULL, p.a.n, 0);
    int a_end = b->rows, b_end = a_end;
    mlm_batch_append(b, sep, 1, 0);
    if (p.b.n > 0) {
        sentences_read(b->tokens + b->rows, &data->text, p.b.document, p.b.first, p.b.skip, p.b.n, error);
        mlm_batch_append(b, NULL, p.b.n, 1);
        b_end = b->rows;
        mlm_batch_append(b, sep, 1, 1);
    }
    int wanted = mlm_masks(&data->recipe, index, b->rows - begin, (int)mlm_special_tokens(data));
    mlm_batch_mask(b, data, wanted, begin, a_end, b_end, &masks);
    mlm_batch_end(b, p.label);
}

// The row with number `index` over all epochs.
static inline uint64_t mlm_row(const MlmData* data, uint64_t index) {
    if (data->in_order) return index % data->rows;
    return rng_permute(index % data->rows, data->rows, rng_stream(data->seed, index / data->rows, 0, SITE_SHUFFLE));
}

// The number of sequences in n rows from number `index` on: n without packing.
static inline int64_t mlm_count(const MlmData* data, uint64_t index, uint64_t n) {
    if (!data->order) return (int64_t)n;
    int64_t count = 0;
    for (uint64_t i = index; i < index + n; i++) {
        uint64_t row = mlm_row(data, i);
        count += data->row_ends[row] - (row ? data->row_ends[row - 1] : 0);
    }
    return count;
}

// Read rows index .. index + B - 1, counted over all epochs. After the last row of an epoch the next epoch begins, also
// inside a batch. The caller sets `first`: mlm_count(data, start, index - start) for a step that begins at `start`.
// Read errors go to `error`; with NULL they end the program.
static inline void mlm_batch_read(MlmBatch* b, const MlmData* data, uint64_t index, int B, ReadError* error) {
    mlm_batch_begin(b, 0);
    for (uint64_t i = index; i < index + (uint64_t)B; i++) {
        uint64_t row = mlm_row(data, i);
        uint64_t at = row, end = row + 1;
        if (data->order) at = row ? data->row_ends[row - 1] : 0, end = data->row_ends[row];
        for (; at < end; at++) mlm_batch_add(b, data, i, data->order ? data->order[at] : at, error);
    }
}

// The same; read errors end the program.
static inline void mlm_batch_build(MlmBatch* b, const MlmData* data, uint64_t index, int B) {
    mlm_batch_read(b, data, index, B, NULL);
}

#endif
