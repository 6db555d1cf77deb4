/* Batches for masked-token prediction: pairs of segments from a data set of sentences (sentences.h), truncated, labelled
 * and masked when a batch is built, after the recipe of Devlin et al., "BERT", 2018:
 *
 *   [CLS] A [SEP] B [SEP]   types 0 up to the first [SEP], then 1; at most T tokens; next_sentence = 0: [CLS] A [SEP]
 *   A and B   sentences in a row up to the target (T - 3 tokens; with probability short_fraction uniform in 2 .. T - 3),
 *             at least two; A ends after a sentence drawn among them
 *   label     0: B is the rest; 1, with probability 1/2, and always in a document of one sentence: B is sentences in a
 *             row from a uniformly drawn sentence of another, uniformly drawn document
 *   length    while A and B are too long together, the longer one loses a token, its first or its last by a fair draw
 *   masks     min(max_predictions, max(1, round(mask_fraction * length))) positions, never [CLS] or [SEP]; a half rounds
 *             to even. Of those 80 % become [MASK], 10 % a token drawn from the whole vocabulary, 10 % stay
 *   words     with whole_words a word's tokens are chosen together, and a word that would exceed the count is passed
 *             over; where only such words are left, the first of them gives as many tokens as are missing
 *
 * At the start every document is cut into chunks of about T tokens, and an epoch visits every chunk once, in an order of
 * its own. A chunk that lies between two others begins up to half a chunk earlier or later in each epoch. All draws
 * depend on nothing but (seed, epoch, chunk): any rank, batch size and resumed run sees the same sequences. With
 * static_masks = N the draws of epoch e are those of epoch e % N, as if N copies had been prepared beforehand.
 *
 * pack > 1 counts in rows: a row is up to `pack` sequences that together have at most T tokens and max_predictions
 * masks, put together from the lengths of the chunks by best fit, longest first. A sequence then has at most its chunk's
 * length. Else a row is one sequence. */
#ifndef LLMC_BATCH_MLM_H
#define LLMC_BATCH_MLM_H

#include "../base/rng.h"
#include "sentences.h"

enum { MLM_MIN_LENGTH = 8 };

typedef struct {
    int max_predictions;
    double mask_fraction;
    int whole_words, next_sentence;
    int static_masks;  // 0: new draws in every epoch
    int pack;          // sequences a row, at most; 0 and 1: one
    double short_fraction;
} MlmRecipe;

typedef struct {
    uint32_t document, first;  // where it begins: a sentence of the document
} MlmChunk;

typedef struct {
    Sentences text;
    MlmRecipe recipe;
    int T;
    uint64_t seed;
    uint64_t chunks, rows;
    MlmChunk* chunk;     // [chunks] in the order of the documents
    uint32_t* order;     // [chunks] row by row; NULL without packing
    uint32_t* row_ends;  // [rows] in `order`
} MlmData;

// Host arrays with room for B * T rows; only real tokens, one sequence after the other.
typedef struct {
    int count, rows, max_length, masked;
    int64_t squares;                            // sum of the squared lengths
    int64_t first;                              // number of its first sequence in the whole step: set by the caller
    int *tokens, *types, *sequence, *position;  // [rows]
    int* cu_seqlens;                            // [count + 1]
    int *masked_rows, *masked_targets;          // [masked] row numbers, ascending, and the tokens that were there
    int* next_labels;                           // [count] 0: B follows A, 1: it does not; -1 without next_sentence
    int room, masked_room;                      // what the arrays were made for
} MlmBatch;

// ---------------------------------------------------------------------------------------------------------
// Draws

// The random numbers of one sequence, one after the other.
typedef struct {
    uint64_t key, sequence;
    uint32_t used;
    Philox bits;
} MlmDraws;

static inline MlmDraws mlm_draws(const MlmData* d, uint64_t epoch, uint32_t site, uint64_t sequence) {
    MlmDraws r;
    if (d->recipe.static_masks > 0) epoch %= (uint64_t)d->recipe.static_masks;
    memset(&r, 0, sizeof(r));
    r.key = rng_stream(d->seed, epoch, 0, site);
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
// The data set: chunks, and rows of several

// [CLS] and one or two [SEP].
static inline uint32_t mlm_special_tokens(const MlmData* d) { return d->recipe.next_sentence ? 3 : 2; }

// The end of the sentences from `first` on that have at least `tokens` tokens and are at least `least`, as far as the
// document goes.
static inline uint32_t mlm_fill(const MlmData* d, uint64_t document, uint32_t first, uint32_t tokens, uint32_t least) {
    uint32_t end = first, n = d->text.document[document].sentences;
    while (end < n && (end - first < least || sentences_length(&d->text, document, first, end) < tokens)) end++;
    return end;
}

// Positions that are masked in a sequence of `length` tokens.
static inline int mlm_masks(const MlmRecipe* r, int length, int special_tokens) {
    int wanted = max_int(1, (int)rint(r->mask_fraction * length));
    return min_int(min_int(r->max_predictions, wanted), length - special_tokens);
}

static inline void mlm_cut_chunks(MlmData* d) {
    uint32_t room = (uint32_t)d->T - mlm_special_tokens(d), least = d->recipe.next_sentence ? 2 : 1;
    uint64_t capacity = 0;
    for (uint64_t i = 0; i < d->text.documents; i++) {
        for (uint32_t first = 0; first < d->text.document[i].sentences;) {
            if (d->chunks == capacity) {
                capacity = 2 * capacity + 1024;
                d->chunk = (MlmChunk*)xrealloc(d->chunk, (size_t)capacity * sizeof(MlmChunk));
            }
            d->chunk[d->chunks].document = (uint32_t)i;
            d->chunk[d->chunks++].first = first;
            first = mlm_fill(d, i, first, room, least);
        }
    }
}

// The most tokens that a chunk's sequence may have.
static inline int mlm_budget(const MlmData* d, uint64_t chunk) {
    const MlmChunk* c = &d->chunk[chunk];
    if (!d->order) return d->T;
    int is_last = chunk + 1 == d->chunks || c[1].document != c->document;
    uint32_t end = is_last ? d->text.document[c->document].sentences : c[1].first;
    uint32_t length = sentences_length(&d->text, c->document, c->first, end);
    if (length > (uint32_t)d->T) length = (uint32_t)d->T;
    return min_int(d->T, max_int(MLM_MIN_LENGTH, (int)(length + mlm_special_tokens(d))));
}

static inline void mlm_pack_rows(MlmData* d) {
    const uint32_t none = UINT32_MAX;
    uint32_t* next = (uint32_t*)xmalloc((size_t)d->chunks * sizeof(uint32_t));  // of the same length
    uint32_t* head = (uint32_t*)xmalloc(((size_t)d->T + 1) * sizeof(uint32_t));
    d->order = (uint32_t*)xmalloc((size_t)d->chunks * sizeof(uint32_t));
    d->row_ends = (uint32_t*)xmalloc((size_t)d->chunks * sizeof(uint32_t));
    for (int length = 0; length <= d->T; length++) head[length] = none;
    for (uint64_t i = d->chunks; i-- > 0;) {
        int length = mlm_budget(d, i);
        next[i] = head[length];
        head[length] = (uint32_t)i;
    }
    int longest = d->T, special = (int)mlm_special_tokens(d);
    d->rows = 0;
    for (uint64_t used = 0; used < d->chunks; d->row_ends[d->rows++] = (uint32_t)used) {
        int room = d->T, masks = d->recipe.max_predictions;
        while (head[longest] == none) longest--;
        for (int length = longest, n = 0; n < d->recipe.pack && length >= MLM_MIN_LENGTH;) {
            if (length > room || head[length] == none || mlm_masks(&d->recipe, length, special) > masks) {
                length--;
                continue;
            }
            d->order[used++] = head[length];
            head[length] = next[head[length]];
            room -= length;
            masks -= mlm_masks(&d->recipe, length, special);
            n++;
        }
    }
    free(next);
    free(head);
}

// Ends with USAGE where no data could be served so.
static inline void mlm_check_recipe(MlmRecipe recipe, int T) {
    if (T < MLM_MIN_LENGTH)
        die(USAGE, "sequences of %d tokens are too short; -t must be at least %d", T, (int)MLM_MIN_LENGTH);
    if (recipe.max_predictions < 1)
        die(USAGE, "--max-predictions %d: at least one token of a sequence must be masked", recipe.max_predictions);
}

// Open every file that `pattern` matches for sequences of at most T tokens. Ends with USAGE where it cannot serve.
static inline void mlm_open(MlmData* d, const char* pattern, int T, MlmRecipe recipe, uint64_t seed) {
    mlm_check_recipe(recipe, T);
    CHECK(recipe.mask_fraction > 0 && recipe.mask_fraction <= 1 && recipe.static_masks >= 0 && recipe.pack >= 0);
    memset(d, 0, sizeof(*d));
    sentences_open(&d->text, pattern);
    if (recipe.next_sentence && d->text.documents < 2)
        die(USAGE, "%s: holds one document, but a random next sentence needs another; give more documents, or --nsp 0",
            pattern);
    if (d->text.documents >= UINT32_MAX) die(USAGE, "%s: holds too many documents; use fewer files", pattern);
    d->recipe = recipe;
    d->T = T;
    d->seed = seed;
    mlm_cut_chunks(d);
    if (d->chunks >= UINT32_MAX) die(USAGE, "%s: holds too much text for sequences of %d; use fewer files", pattern, T);
    d->rows = d->chunks;
    if (recipe.pack > 1) mlm_pack_rows(d);
}

static inline void mlm_close(MlmData* d) {
    sentences_close(&d->text);
    free(d->chunk);
    free(d->order);
    free(d->row_ends);
    memset(d, 0, sizeof(*d));
}

// An epoch's sequences; with packing its rows.
static inline uint64_t mlm_sequences(const MlmData* d) { return d->rows; }

// Tells data sets apart, for a resumed run.
static inline uint32_t mlm_fingerprint(const MlmData* d) { return shards_fingerprint(&d->text.files); }

// Ends with USAGE unless a model with V tokens can read this data.
static inline void mlm_check_vocabulary(const MlmData* d, int V) {
    if (d->text.vocabulary.V > V)
        die(USAGE,
            "%s: was made with a vocabulary of %d tokens, which does not fit the model's %d; prepare the data with the "
            "model's own vocab.txt, or choose a model with a larger vocabulary",
            d->text.files.shard[0].path, d->text.vocabulary.V, V);
}

// ---------------------------------------------------------------------------------------------------------
// One sequence

typedef struct {
    uint64_t document;
    uint32_t first, skip, n;  // n tokens, `skip` after the begin of sentence `first`
} MlmSegment;

typedef struct {
    MlmSegment a, b;  // b.n is 0 without a second one
    int label;
} MlmPair;

static inline MlmSegment mlm_segment(const MlmData* d, uint64_t document, uint32_t first, uint32_t end) {
    MlmSegment s;
    s.document = document, s.first = first, s.skip = 0;
    s.n = sentences_length(&d->text, document, first, end);
    return s;
}

static inline void mlm_shorten(MlmSegment* s, MlmDraws* draws) {
    s->n--;
    s->skip += mlm_draw(draws) & 1;
}

// The sentence that a chunk's sequence begins with.
static inline uint32_t mlm_start(const MlmData* d, uint64_t chunk, MlmDraws* draws) {
    const MlmChunk* c = &d->chunk[chunk];
    uint32_t first = c->first, n = d->text.document[c->document].sentences;
    int is_between =
        chunk > 0 && chunk + 1 < d->chunks && c[-1].document == c->document && c[1].document == c->document;
    if (is_between) {
        uint32_t before = (c->first - c[-1].first) / 2, after = (c[1].first - c->first) / 2;
        first = c->first - before + mlm_draw_below(draws, before + after + 1);
    }
    return d->recipe.next_sentence && n > 1 && first > n - 2 ? n - 2 : first;
}

// Segments of at most `budget` tokens together with the special ones.
static inline MlmPair mlm_pair(const MlmData* d, uint64_t chunk, int budget, MlmDraws* draws) {
    MlmPair p;
    uint64_t document = d->chunk[chunk].document;
    uint32_t n = d->text.document[document].sentences, room = (uint32_t)budget - mlm_special_tokens(d), target = room;
    if (rng_uniform(mlm_draw(draws)) < d->recipe.short_fraction) target = 2 + mlm_draw_below(draws, room - 1);
    uint32_t first = mlm_start(d, chunk, draws);
    uint32_t end = mlm_fill(d, document, first, target, d->recipe.next_sentence ? 2 : 1);
    memset(&p, 0, sizeof(p));
    if (!d->recipe.next_sentence) {
        p.a = mlm_segment(d, document, first, end);
        p.label = -1;
    } else {
        uint32_t middle = end - first > 1 ? first + 1 + mlm_draw_below(draws, end - first - 1) : end;
        p.a = mlm_segment(d, document, first, middle);
        p.label = n == 1 || (mlm_draw(draws) & 1);
        if (p.label) {
            // Any document but this one, as if it were drawn again until it is another.
            uint64_t other = mlm_draw_below(draws, (uint32_t)(d->text.documents - 1));
            other += other >= document;
            first = mlm_draw_below(draws, d->text.document[other].sentences);
            end = mlm_fill(d, other, first, target > p.a.n ? target - p.a.n : 1, 1);
            p.b = mlm_segment(d, other, first, end);
        } else {
            p.b = mlm_segment(d, document, middle, end);
        }
    }
    while ((uint64_t)p.a.n + p.b.n > room) mlm_shorten(p.a.n > p.b.n ? &p.a : &p.b, draws);
    return p;
}

// ---------------------------------------------------------------------------------------------------------
// Masks

typedef struct {
    int first, size;
} MlmWord;

// Words of rows first .. end - 1, added to word [count]; returns the new count.
static inline int mlm_find_words(MlmWord* word, int count, const MlmData* d, const int* tokens, int first, int end) {
    for (int row = first; row < end; row++) {
        if (d->recipe.whole_words && row > first && sentences_continues(&d->text, tokens[row])) {
            word[count - 1].size++;
        } else {
            word[count].first = row;
            word[count++].size = 1;
        }
    }
    return count;
}

// Set chosen [row] for `wanted` rows of the words; shuffles the words as far as it needs.
static inline void mlm_choose(unsigned char* chosen, MlmWord* word, int count, int wanted, MlmDraws* draws) {
    MlmWord passed = {0, 0};  // the first that was too long
    for (int i = 0; i < count && wanted > 0; i++) {
        int k = i + (int)mlm_draw_below(draws, (uint32_t)(count - i));
        MlmWord w = word[k];
        word[k] = word[i];
        if (w.size > wanted) {
            if (passed.size == 0) passed = w;
            continue;
        }
        memset(chosen + w.first, 1, (size_t)w.size);
        wanted -= w.size;
    }
    if (wanted > 0) memset(chosen + passed.first, 1, (size_t)wanted);
}

// ---------------------------------------------------------------------------------------------------------
// Batches

// Room for B rows of T tokens.
static inline void mlm_batch_alloc(MlmBatch* b, int B, int T, int max_predictions) {
    memset(b, 0, sizeof(*b));
    b->room = B * T;
    b->masked_room = B * max_predictions;  // also the most sequences there can be: each has a mask
    size_t rows = (size_t)b->room * sizeof(int), masked = (size_t)b->masked_room * sizeof(int);
    b->tokens = (int*)xmalloc(rows);
    b->types = (int*)xmalloc(rows);
    b->sequence = (int*)xmalloc(rows);
    b->position = (int*)xmalloc(rows);
    b->masked_rows = (int*)xmalloc(masked);
    b->masked_targets = (int*)xmalloc(masked);
    b->next_labels = (int*)xmalloc(masked);
    b->cu_seqlens = (int*)xmalloc(masked + sizeof(int));
}

static inline void mlm_batch_free(MlmBatch* b) {
    free(b->tokens);
    free(b->types);
    free(b->sequence);
    free(b->position);
    free(b->masked_rows);
    free(b->masked_targets);
    free(b->next_labels);
    free(b->cu_seqlens);
    memset(b, 0, sizeof(*b));
}

// Put tokens [n] (NULL: already there) at the end of the batch as rows of one type.
static inline void mlm_batch_append(MlmBatch* b, const int* tokens, uint32_t n, int type) {
    CHECK((int64_t)b->rows + n <= b->room);
    for (uint32_t i = 0; i < n; i++, b->rows++) {
        if (tokens) b->tokens[b->rows] = tokens[i];
        b->types[b->rows] = type;
        b->sequence[b->rows] = b->count;
        b->position[b->rows] = b->rows - b->cu_seqlens[b->count];
    }
}

// Mask the sequence that begins at row `begin` and whose segments end where their [SEP] is, at rows a_end and b_end.
static inline void mlm_batch_mask(MlmBatch* b, const MlmData* d, int begin, int a_end, int b_end, MlmDraws* draws) {
    int length = b->rows - begin, wanted = mlm_masks(&d->recipe, length, (int)mlm_special_tokens(d)), words = 0;
    MlmWord* word = (MlmWord*)xmalloc((size_t)length * sizeof(MlmWord));
    unsigned char* chosen = (unsigned char*)xcalloc((size_t)length, 1);
    int* tokens = b->tokens + begin;
    words = mlm_find_words(word, 0, d, tokens, 1, a_end - begin);
    if (b_end > a_end) words = mlm_find_words(word, words, d, tokens, a_end - begin + 1, b_end - begin);
    mlm_choose(chosen, word, words, wanted, draws);
    CHECK(b->masked + wanted <= b->masked_room);
    for (int i = 0; i < length; i++) {
        if (!chosen[i]) continue;
        b->masked_rows[b->masked] = begin + i;
        b->masked_targets[b->masked++] = tokens[i];
        uint32_t fate = mlm_draw_below(draws, 10);
        if (fate < 8) tokens[i] = d->text.vocabulary.mask;
        if (fate == 8) tokens[i] = (int)mlm_draw_below(draws, (uint32_t)d->text.vocabulary.V);
    }
    free(chosen);
    free(word);
}

static inline void mlm_batch_add(MlmBatch* b, const MlmData* d, uint64_t epoch, uint64_t chunk, ReadError* error) {
    MlmDraws draws = mlm_draws(d, epoch, SITE_PAIR, chunk), masks = mlm_draws(d, epoch, SITE_MASK, chunk);
    MlmPair p = mlm_pair(d, chunk, mlm_budget(d, chunk), &draws);
    const int *cls = &d->text.vocabulary.cls, *sep = &d->text.vocabulary.sep;
    int begin = b->rows;
    CHECK(b->count < b->masked_room && begin + (int64_t)p.a.n + p.b.n + mlm_special_tokens(d) <= b->room);
    b->cu_seqlens[b->count] = begin;
    mlm_batch_append(b, cls, 1, 0);
    sentences_read(b->tokens + b->rows, &d->text, p.a.document, p.a.first, p.a.skip, p.a.n, error);
    mlm_batch_append(b, NULL, p.a.n, 0);
    int a_end = b->rows, b_end = a_end;
    mlm_batch_append(b, sep, 1, 0);
    if (p.b.n > 0) {
        sentences_read(b->tokens + b->rows, &d->text, p.b.document, p.b.first, p.b.skip, p.b.n, error);
        mlm_batch_append(b, NULL, p.b.n, 1);
        b_end = b->rows;
        mlm_batch_append(b, sep, 1, 1);
    }
    mlm_batch_mask(b, d, begin, a_end, b_end, &masks);
    int length = b->rows - begin;
    b->next_labels[b->count++] = p.label;
    b->cu_seqlens[b->count] = b->rows;
    b->max_length = max_int(b->max_length, length);
    b->squares += (int64_t)length * length;
}

// The row that is number `index` over all epochs.
static inline uint64_t mlm_row(const MlmData* d, uint64_t index) {
    return rng_permute(index % d->rows, d->rows, rng_stream(d->seed, index / d->rows, 0, SITE_SHUFFLE));
}

// Sequences in n rows from number `index` on: n without packing.
static inline int64_t mlm_count(const MlmData* d, uint64_t index, uint64_t n) {
    if (!d->order) return (int64_t)n;
    int64_t count = 0;
    for (uint64_t i = index; i < index + n; i++) {
        uint64_t row = mlm_row(d, i);
        count += d->row_ends[row] - (row ? d->row_ends[row - 1] : 0);
    }
    return count;
}

// Rows index .. index + B - 1, counted over all epochs. Past the last the next epoch begins, also inside a batch.
// `first` is left for the caller, who knows where the step begins: mlm_count(d, start, index - start).
// What cannot be read goes to `error`; NULL ends the program then.
static inline void mlm_batch_read(MlmBatch* b, const MlmData* d, uint64_t index, int B, ReadError* error) {
    b->count = b->rows = b->max_length = b->masked = 0;
    b->squares = b->first = 0;
    b->cu_seqlens[0] = 0;
    for (uint64_t i = index; i < index + (uint64_t)B; i++) {
        uint64_t row = mlm_row(d, i), epoch = i / d->rows;
        uint64_t at = row, end = row + 1;
        if (d->order) at = row ? d->row_ends[row - 1] : 0, end = d->row_ends[row];
        for (; at < end; at++) mlm_batch_add(b, d, epoch, d->order ? d->order[at] : at, error);
    }
}

// The same; what cannot be read ends the program.
static inline void mlm_batch_build(MlmBatch* b, const MlmData* d, uint64_t index, int B) {
    mlm_batch_read(b, d, index, B, NULL);
}

#endif
