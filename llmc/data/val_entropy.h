/* For generated data: the generator's own loss on the validation data, and the entropy, a lower bound on the mean loss
 * of any model. Both are in a file next to the shard: X_entropy.txt next to X.bin.
 *
 *   T BOUND      tokens in a block; the entropy of the text in nats per token
 *   NATS         for each block of the shard, one per line: -log of its probability
 *
 * The shard is blocks of T tokens, each of which begins with end-of-text, and one more end-of-text. So the targets of a
 * window of T tokens are exactly one block. */
#ifndef LLMC_DATA_VAL_ENTROPY_H
#define LLMC_DATA_VAL_ENTROPY_H

#include "llmc/data/shards.h"

typedef struct {
    double bound;     // nats per token
    double* nats;     // [blocks]
    uint64_t blocks;  // 0: unknown
} ValEntropy;

// Read the file next to a data set's only shard. e->blocks stays 0 if there is no file, if it is for another T, or if
// it lacks a block.
static inline void val_entropy_open(ValEntropy* e, const Shards* shards, int T) {
    enum { MOST_BYTES = 1 << 30 };
    memset(e, 0, sizeof *e);
    size_t length = strlen(shards->shard[0].path), bytes;
    uint64_t blocks = (shards->tokens - 1) / (uint64_t)T;
    if (shards->count > 1 || length < 4) return;
    Path path = path_of("%.*s_entropy.txt", (int)length - 4, shards->shard[0].path);
    if (file_exists(path.text)) {
        char *text = read_file(path.text, MOST_BYTES, &bytes, USAGE), *end = text;
        int is_mine = strtol(text, &end, 10) == T;
        e->bound = strtod(end, &end);
        e->nats = (double*)xmalloc((size_t)blocks * sizeof(double));
        while (is_mine && e->blocks < blocks) {
            char* from = end;
            e->nats[e->blocks] = strtod(from, &end);
            if (end == from) break;
            e->blocks++;
        }
        if (e->blocks < blocks) e->blocks = 0;
        free(text);
    }
}

static inline void val_entropy_close(ValEntropy* e) { free(e->nats); }

// Print the generator's loss on the first `sequences` blocks, and the bound, if the file covers all of them.
static inline void val_entropy_print(const ValEntropy* e, uint64_t sequences, int T) {
    double sum = 0;
    if (sequences == 0 || sequences > e->blocks) return;
    for (uint64_t i = 0; i < sequences; i++) sum += e->nats[i];
    printf("the generator of this text: loss %.4f on these tokens, %.4f on average, the least that a model can reach\n",
           sum / (double)sequences / T, e->bound);
    fflush(stdout);
}

#endif
