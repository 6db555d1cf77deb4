/* embedding: with and without token types, repeated tokens, dropout, the modes of the two kinds of table. */
#ifndef DEV_OPS_EMBEDDING_H
#define DEV_OPS_EMBEDDING_H

#include "llmc/ops/embedding/embedding.h"
#include "op.h"

// How the tokens of a case lie: the rows of equal ones are added up, in one chunk of the sorted list or in many. In text
// token k is drawn with a probability of about 1 / k.
enum { TOKENS_RANDOM, TOKENS_EQUAL, TOKENS_DIFFERENT, TOKENS_FREQUENT, TOKENS_TEXT };

static inline int embedding_token(Harness* h, int kind, int n, int V) {
    int random = random_below(h, V);
    if (kind == TOKENS_TEXT) return (int)exp(log((double)V) * ((double)random_below(h, 1 << 30) + 0.5) / (1 << 30)) - 1;
    if (kind == TOKENS_EQUAL) return V - 1;
    if (kind == TOKENS_DIFFERENT) return (int)((int64_t)n * 7919 % V);  // a prime that divides no V
    if (kind == TOKENS_FREQUENT && random_below(h, 2))                  // two that are equal in their low bytes
        return min_int(random_below(h, 8) ? 257 : 65793, V - 1);
    return random;
}

OP_FN(embedding_prepare) {
    Harness* h = k->h;
    k->sequences = sequences_split(h, k->N, k->S, 11);
    CHECK(k->sequences.max_length <= k->T);
    k->dropout = dropout_make(k->p, 42, 7, 0, SITE_DROPOUT_EMBEDDING, &k->sequences);
    k->token_of = int_array(h, (size_t)k->N), k->type_of = k->types ? int_array(h, (size_t)k->N) : NULL;
    for (int n = 0; n < k->N; n++) {
        k->token_of[n] = embedding_token(h, k->tokens, n, k->V);
        if (k->types) k->type_of[n] = k->tokens == TOKENS_EQUAL ? 0 : random_below(h, k->types);
    }
    if (!k->is_bench) return;
    k->token_of = resident_ints(h, k->token_of, (size_t)k->N), k->sequences = resident_sequences(h, k->sequences);
    if (k->types) k->type_of = resident_ints(h, k->type_of, (size_t)k->N);
}

static inline EmbeddingSizes embedding_sizes(const OpCase* k) {
    return (EmbeddingSizes){k->V, k->T, k->types, k->C, k->padding};
}

static inline EmbeddingInputs embedding_inputs(const OpCase* k) {
    return (EmbeddingInputs){k->token_of, k->type_of, &k->sequences};
}

RUN_AND_WANT(embedding, forward,
             embedding_forward(k->x.device, embedding_inputs(k),
                               (Embeddings){k->word.device, k->position.device, k->types ? k->type.device : NULL},
                               embedding_sizes(k), k->dropout, k->ctx),
             embedding_forward_ref(k->x.want, embedding_inputs(k),
                                   (EmbeddingRefTables){k->word.host, k->position.host, k->types ? k->type.host : NULL},
                                   k->C, k->dropout));

OP_FN(embedding_run_backward) {
    embedding_backward(
        (EmbeddingGrads){k->dword.device_real, k->dposition.device_real, k->types ? k->dtype.device_real : NULL},
        k->dx.device, embedding_inputs(k), embedding_sizes(k), k->dropout, k->mode, k->other_mode, k->ctx);
}

static inline void embedding_want_table(OpCase* k, Array d, EmbeddingRefIndex index, Mode mode) {
    embedding_backward_ref(d.want, k->dx.host, index, &k->sequences, k->C, k->dropout, mode);
}

OP_FN(embedding_want_backward) {
    embedding_want_table(k, k->dword, (EmbeddingRefIndex){k->token_of, k->V, k->padding}, k->mode);
    embedding_want_table(k, k->dposition, (EmbeddingRefIndex){k->sequences.position, k->T, -1}, k->other_mode);
    if (k->types) embedding_want_table(k, k->dtype, (EmbeddingRefIndex){k->type_of, k->types, -1}, k->other_mode);
}

// A sum of three numbers rounds twice. A row of a gradient table adds up to 16,000 numbers near 1, with as many
// roundings of partial sums near 100. The error is less than 1e-7 of the sum of absolute values. For few numbers it is
// a few roundings.
static const Arg EMBEDDING_ARGS[] =
    ARGS(ARG(x, "N C", OUT, 0, 3e-7), ARG(word, "V C", IN, 1), ARG(position, "T C", IN, 1), ARG(type, "types C", IN, 1),
         ARG(dx, "N C", IN, 1, 0, "x"), ARG(dword, "V C", BY_MODE, 0, 1e-6, "word", 1),
         ARG(dposition, "T C", BY_OTHER_MODE, 0, 1e-6, "position", 1),
         ARG(dtype, "types C", BY_OTHER_MODE, 0, 1e-6, "type", 1));
// The backward pass's lists: up to as many rows as are sorted in one launch, and more; token numbers of one to three
// bytes; words, positions and types in one chunk of rows and in many, a table's rows that are skipped or not reached;
// widths of one vector, of parts of one, and the channels of models that are trained.
static const int EMBEDDING_ROWS[][8] = {
    {1, 1, 257, 8, 4, 2, -1, TOKENS_RANDOM},
    {1, 1, 19, 1, 80, 0, -1, TOKENS_RANDOM},
    {95, 3, 19, 33, 80, 2, 0, TOKENS_RANDOM},
    {95, 3, 19, 768, 80, 2, -1, TOKENS_RANDOM},
    {7, 3, 257, 264, 7, 8, -1, TOKENS_EQUAL},
    {512, 4, 30522, 40, 200, 2, 257, TOKENS_FREQUENT},
    {512, 4, 257, 264, 200, 2, 256, TOKENS_EQUAL},
    {875, 70, 257, 40, 24, 1000, 3, TOKENS_RANDOM},
    {4096, 2, 50257, 24, 3100, 2, 7, TOKENS_FREQUENT},
    {4097, 1, 50257, 24, 4100, 3, -1, TOKENS_DIFFERENT},
    {7500, 150, 70000, 24, 80, 3, 257, TOKENS_FREQUENT},
    {235, 5, 300, 1024, 77, 2, 0, TOKENS_FREQUENT},
    {940, 20, 300, 1600, 77, 0, -1, TOKENS_FREQUENT},
};
static const int EMBEDDING_GRAD[] = {9, 3, 7, 5, 6, 2, -1, TOKENS_RANDOM};
static const int EMBEDDING_GPU[][8] = {{65536, 64, 50257, 768, 1540, 0, -1, TOKENS_TEXT},
                                       {32768, 256, 30528, 1024, 512, 2, 0, TOKENS_TEXT},
                                       {512, 4, 30528, 1024, 512, 2, 0, TOKENS_TEXT}};
static const int EMBEDDING_CPU[][8] = {{256, 4, 50257, 768, 1024, 0, -1, TOKENS_TEXT},
                                       {256, 4, 30528, 1024, 512, 2, 0, TOKENS_TEXT}};

static const Op EMBEDDING = {OP_OF("embedding", "N S V C T types padding tokens", EMBEDDING_ARGS, EMBEDDING_ROWS),
                             OP_BENCH(EMBEDDING_GPU, EMBEDDING_CPU),
                             .passes = {{"forward", "x", OP_PAIR(embedding, forward)},
                                        {"backward", "dword dposition dtype", OP_PAIR(embedding, backward)}},
                             .prepare = embedding_prepare,
                             .rates = {0, 0.3},
                             .grad = EMBEDDING_GRAD};

#endif
