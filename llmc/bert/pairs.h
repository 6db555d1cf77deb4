/* Pairs of segments for masked-token prediction, drawn from a data set of sentences (sentences.h) after the recipe of
 * Devlin et al., "BERT", 2018. batch_mlm.h masks them and makes batches.
 *
 *   [CLS] A [SEP] B [SEP]   types 0 up to the first [SEP], then 1; at most T tokens; next_sentence = 0: [CLS] A [SEP]
 *   A and B   consecutive sentences up to the target (T - 3 tokens; with probability short_fraction uniform in
 *             2 .. T - 3), at least two; A ends after one of them, drawn at random
 *   label     0: B is the rest; 1, with probability 1/2, and always in a document of one sentence: B is consecutive
 *             sentences from a uniformly drawn sentence of another, uniformly drawn document
 *   length    while A and B are too long together, the longer one loses a token, its first or its last by a fair draw
 *
 * Every document is first cut into chunks of about T tokens. An epoch visits every chunk once, in an order of its own
 * or, with in_order, in the order of the files. A chunk between two others of its document begins up to half a chunk
 * earlier or later in each epoch. All draws depend on (seed, epoch, chunk) alone: any rank, batch size and resumed run
 * sees the same sequences.
 *
 * With pack > 1, a batch counts rows. A row is up to `pack` sequences that together have at most T tokens and
 * max_predictions masks, combined from the lengths of the chunks by best fit, longest first. A sequence then has at
 * most the length of its chunk. Without packing a row is one sequence. */
#ifndef LLMC_BERT_PAIRS_H
#define LLMC_BERT_PAIRS_H

#include "llmc/base/rng.h"
#include "llmc/bert/sentences.h"

enum { MLM_MIN_LENGTH = 8 };
#define MLM_VAL_MASK_FRACTION 0.15  // of validation data, so that losses compare whatever --mask-fraction is

typedef struct {
    int max_predictions;
    double mask_fraction;  // of the first row
    int whole_words, next_sentence;
    int pack;  // most sequences in a row; 0 and 1: one
    double short_fraction;
    double last_mask_fraction;  // at most mask_fraction; of row `fall_rows` and of all after it
    uint64_t fall_rows;         // 0: mask_fraction for all rows
} MlmRecipe;

typedef struct {
    uint32_t document, first;  // where it begins: a sentence of the document
} MlmChunk;

typedef struct {
    Sentences text;
    MlmRecipe recipe;
    int T;
    uint64_t seed;
    int in_order;  // 1: rows in the order of the files in every epoch; 0: in a seeded order of each epoch
    uint64_t chunks, rows;
    MlmChunk* chunk;     // [chunks] in the order of the documents
    uint32_t* order;     // [chunks] chunks row by row; NULL without packing
    uint32_t* row_ends;  // [rows] the end of each row in `order`
} MlmData;

// ---------------------------------------------------------------------------------------------------------
// Draws

// The random numbers of one sequence, one after the other.
typedef struct {
    uint64_t key, sequence;
    uint32_t used;
    Philox bits;
} MlmDraws;

static inline MlmDraws mlm_draws(const MlmData* data, uint64_t epoch, uint32_t site, uint64_t sequence) {
    MlmDraws r;
    memset(&r, 0, sizeof(r));
    r.key = rng_stream(data->seed, epoch, 0, site);
    r.sequence = sequence;
    return r;
}

static inline uint32_t mlm_draw(MlmDraws* r) {
    if (r->used % 4 == 0)
        r->bits = philox((uint32_t)r->sequence, (uint32_t)(r->sequence >> 32), r->used / 4, 0, r->key);
    return r->bits.v[r->used++ % 4];
}

// Uniform in 0 .. n - 1, exactly (Lemire, "Fast random integer generation in an interval", 2019).
static inline uint32_t mlm_draw_below(MlmDraws* r, uint32_t n) {
    uint64_t product = (uint64_t)mlm_draw(r) * n;
    if ((uint32_t)product < n)
        for (uint32_t least = (0u - n) % n; (uint32_t)product < least;) product = (uint64_t)mlm_draw(r) * n;
    return (uint32_t)(product >> 32);
}

// ---------------------------------------------------------------------------------------------------------
// The data set: chunks, and rows of several chunks

// [CLS] and one or two [SEP].
static inline uint32_t mlm_special_tokens(const MlmData* data) { return data->recipe.next_sentence ? 3 : 2; }

// The end of the shortest range of sentences from `first` on with at least `tokens` tokens and `least` sentences; at
// most the end of the document.
static inline uint32_t mlm_fill(const MlmData* data, uint64_t document, uint32_t first, uint32_t tokens,
                                uint32_t least) {
    uint32_t end = first, n = data->text.document[document].sentences;
    while (end < n && (end - first < least || sentences_length(&data->text, document, first, end) < tokens)) end++;
    return end;
}

// The number of masked positions in a sequence of `length` tokens of row `index` over all epochs; the most are those of
// row 0. The fraction falls linearly (Ankner et al., "Dynamic Masking Rate Schedules for MLM Pretraining", 2023).
static inline int mlm_masks(const MlmRecipe* r, uint64_t index, int length, int special_tokens) {
    double fallen = r->fall_rows == 0 ? 0 : index < r->fall_rows ? (double)index / (double)r->fall_rows : 1;
    double fraction = r->mask_fraction + (r->last_mask_fraction - r->mask_fraction) * fallen;
    int wanted = max_int(1, (int)rint(fraction * length));
    return min_int(min_int(r->max_predictions, wanted), length - special_tokens);
}

static inline void mlm_cut_chunks(MlmData* data) {
    uint32_t room = (uint32_t)data->T - mlm_special_tokens(data), least = data->recipe.next_sentence ? 2 : 1;
    size_t capacity = 0;
    for (uint64_t i = 0; i < data->text.documents; i++) {
        for (uint32_t first = 0; first < data->text.document[i].sentences;) {
            data->chunk = (MlmChunk*)array_reserve(data->chunk, &capacity, (size_t)data->chunks + 1, sizeof(MlmChunk));
            data->chunk[data->chunks].document = (uint32_t)i;
            data->chunk[data->chunks++].first = first;
            first = mlm_fill(data, i, first, room, least);
        }
    }
}

// The most tokens that the sequence of a chunk may have.
static inline int mlm_budget(const MlmData* data, uint64_t chunk) {
    const MlmChunk* c = &data->chunk[chunk];
    if (!data->order) return data->T;
    int is_last = chunk + 1 == data->chunks || c[1].document != c->document;
    uint32_t end = is_last ? data->text.document[c->document].sentences : c[1].first;
    uint32_t length = sentences_length(&data->text, c->document, c->first, end);
    if (length > (uint32_t)data->T) length = (uint32_t)data->T;
    return min_int(data->T, max_int(MLM_MIN_LENGTH, (int)(length + mlm_special_tokens(data))));
}

static inline void mlm_pack_rows(MlmData* data) {
    const uint32_t none = UINT32_MAX;
    uint32_t* next = (uint32_t*)xmalloc((size_t)data->chunks * sizeof(uint32_t));  // the next chunk of the same length
    uint32_t* head = (uint32_t*)xmalloc(((size_t)data->T + 1) * sizeof(uint32_t));
    data->order = (uint32_t*)xmalloc((size_t)data->chunks * sizeof(uint32_t));
    data->row_ends = (uint32_t*)xmalloc((size_t)data->chunks * sizeof(uint32_t));
    for (int length = 0; length <= data->T; length++) head[length] = none;
    for (uint64_t i = data->chunks; i-- > 0;) {
        int length = mlm_budget(data, i);
        next[i] = head[length];
        head[length] = (uint32_t)i;
    }
    int longest = data->T, special = (int)mlm_special_tokens(data);
    data->rows = 0;
    for (uint64_t used = 0; used < data->chunks; data->row_ends[data->rows++] = (uint32_t)used) {
        int room = data->T, masks = data->recipe.max_predictions;
        while (head[longest] == none) longest--;
        for (int length = longest, n = 0; n < data->recipe.pack && length >= MLM_MIN_LENGTH;) {
            if (length > room || head[length] == none || mlm_masks(&data->recipe, 0, length, special) > masks) {
                length--;
                continue;
            }
            data->order[used++] = head[length];
            head[length] = next[head[length]];
            room -= length;
            masks -= mlm_masks(&data->recipe, 0, length, special);
            n++;
        }
    }
    free(next);
    free(head);
}

// Ends with USAGE if sequences of T tokens are too short.
static inline void mlm_check_length(int T) {
    if (T < MLM_MIN_LENGTH)
        die(USAGE, "sequences of %d tokens are too short; -t must be at least %d", T, (int)MLM_MIN_LENGTH);
}

// Open every file that `pattern` matches for sequences of at most T tokens. Ends with USAGE if they are unusable.
static inline void mlm_open(MlmData* data, const char* pattern, int T, MlmRecipe recipe, uint64_t seed) {
    mlm_check_length(T);
    CHECK(recipe.mask_fraction > 0 && recipe.mask_fraction <= 1 && recipe.max_predictions > 0 && recipe.pack >= 0);
    memset(data, 0, sizeof(*data));
    sentences_open(&data->text, pattern);
    if (recipe.next_sentence && data->text.documents < 2)
        die(USAGE,
            "%s: contains one document, but a random next sentence needs another; give more documents, or --nsp 0",
            pattern);
    if (data->text.documents >= UINT32_MAX) die(USAGE, "%s: contains too many documents; use fewer files", pattern);
    data->recipe = recipe;
    data->T = T;
    data->seed = seed;
    mlm_cut_chunks(data);
    if (data->chunks >= UINT32_MAX) die(USAGE, "%s: too much text for sequences of %d; use fewer files", pattern, T);
    data->rows = data->chunks;
    if (recipe.pack > 1) mlm_pack_rows(data);
}

static inline void mlm_close(MlmData* data) {
    sentences_close(&data->text);
    free(data->chunk);
    free(data->order);
    free(data->row_ends);
    memset(data, 0, sizeof(*data));
}

// The number of sequences in an epoch; with packing, of rows.
static inline uint64_t mlm_sequences(const MlmData* data) { return data->rows; }

// Identifies the data set when a run is resumed.
static inline uint32_t mlm_fingerprint(const MlmData* data) { return shards_fingerprint(&data->text.files); }

// Ends with USAGE unless the data fits a model with V tokens.
static inline void mlm_check_vocabulary(const MlmData* data, int V) {
    if (data->text.vocabulary.V > V)
        die(USAGE,
            "%s: was made with a vocabulary of %d tokens, which is larger than the model's %d; prepare the data with "
            "the model's own vocab.txt, or choose a model with a larger vocabulary",
            data->text.files.shard[0].path, data->text.vocabulary.V, V);
}

// ---------------------------------------------------------------------------------------------------------
// One sequence

typedef struct {
    uint64_t document;
    uint32_t first, skip, n;  // n tokens, starting `skip` tokens after the start of sentence `first`
} MlmSegment;

typedef struct {
    MlmSegment a, b;  // b.n is 0 without a second segment
    int label;
} MlmPair;

static inline MlmSegment mlm_segment(const MlmData* data, uint64_t document, uint32_t first, uint32_t end) {
    MlmSegment s;
    s.document = document, s.first = first, s.skip = 0;
    s.n = sentences_length(&data->text, document, first, end);
    return s;
}

static inline void mlm_shorten(MlmSegment* s, MlmDraws* draws) {
    s->n--;
    s->skip += mlm_draw(draws) & 1;
}

// The sentence that the sequence of a chunk begins with.
static inline uint32_t mlm_start(const MlmData* data, uint64_t chunk, MlmDraws* draws) {
    const MlmChunk* c = &data->chunk[chunk];
    uint32_t first = c->first, n = data->text.document[c->document].sentences;
    int is_between =
        chunk > 0 && chunk + 1 < data->chunks && c[-1].document == c->document && c[1].document == c->document;
    if (is_between) {
        uint32_t before = (c->first - c[-1].first) / 2, after = (c[1].first - c->first) / 2;
        first = c->first - before + mlm_draw_below(draws, before + after + 1);
    }
    return data->recipe.next_sentence && n > 1 && first > n - 2 ? n - 2 : first;
}

// Two segments that have at most `budget` tokens together with the special ones.
static inline MlmPair mlm_pair(const MlmData* data, uint64_t chunk, int budget, MlmDraws* draws) {
    MlmPair p;
    uint64_t document = data->chunk[chunk].document;
    uint32_t n = data->text.document[document].sentences, room = (uint32_t)budget - mlm_special_tokens(data),
             target = room;
    if (rng_uniform(mlm_draw(draws)) < data->recipe.short_fraction) target = 2 + mlm_draw_below(draws, room - 1);
    uint32_t first = mlm_start(data, chunk, draws);
    uint32_t end = mlm_fill(data, document, first, target, data->recipe.next_sentence ? 2 : 1);
    memset(&p, 0, sizeof(p));
    if (!data->recipe.next_sentence) {
        p.a = mlm_segment(data, document, first, end);
        p.label = -1;
    } else {
        uint32_t middle = end - first > 1 ? first + 1 + mlm_draw_below(draws, end - first - 1) : end;
        p.a = mlm_segment(data, document, first, middle);
        p.label = n == 1 || (mlm_draw(draws) & 1);
        if (p.label) {
            // Any other document, uniformly.
            uint64_t other = mlm_draw_below(draws, (uint32_t)(data->text.documents - 1));
            other += other >= document;
            first = mlm_draw_below(draws, data->text.document[other].sentences);
            end = mlm_fill(data, other, first, target > p.a.n ? target - p.a.n : 1, 1);
            p.b = mlm_segment(data, other, first, end);
        } else {
            p.b = mlm_segment(data, document, middle, end);
        }
    }
    while ((uint64_t)p.a.n + p.b.n > room) mlm_shorten(p.a.n > p.b.n ? &p.a : &p.b, draws);
    return p;
}

#endif
