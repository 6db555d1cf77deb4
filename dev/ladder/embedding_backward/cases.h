/* The op's own tests, and what is timed: the embeddings of GPT-2 124M, for 64 sequences of 1,024 tokens, on the CPU
 * for eight. */
#include "dev/ops/embedding.h"

enum {
    LADDER_SEQUENCES = HAS_DEVICE_MEMORY ? 64 : 8,
    LADDER_T = 1024,
    LADDER_N = LADDER_SEQUENCES * LADDER_T,
    LADDER_V = 50257,
    LADDER_C = 768
};

// Draw tokens as in text: token k with a probability of about 1 / k. Returns how many words occur.
static int ladder_draw(Harness* h, int* tokens) {
    unsigned char* seen = (unsigned char*)xcalloc(LADDER_V, 1);
    int words = 0;
    for (int n = 0; n < LADDER_N; n++) {
        tokens[n] = (int)exp(log((double)LADDER_V) * ((double)random_below(h, 1 << 30) + 0.5) / (1 << 30)) - 1;
        words += !seen[tokens[n]];
        seen[tokens[n]] = 1;
    }
    free(seen);
    return words;
}

static double ladder_peak(Harness* h) {
    case_begin(h, "embedding ladder peak");
    double row = LADDER_C * sizeof(real), rows = ladder_draw(h, int_array(h, LADDER_N)) + LADDER_T;
    case_free(h);
    return ladder_memory_peak(h, (LADDER_N + rows) * row, rows * row);
}

static void ladder_test(Harness* h) { op_test_pass(h, &EMBEDDING, 1); }

static LadderWork ladder_time(Harness* h) {
    static const int ROW[] = {LADDER_N, LADDER_SEQUENCES, 64, 8, 2 * LADDER_T, 0, -1, TOKENS_RANDOM};
    const EmbeddingSizes sizes = {LADDER_V, LADDER_T, 0, LADDER_C, -1};
    LadderWork work = {0, 0, 0, 1};
    int lengths[LADDER_SEQUENCES];
    OpCase* k = op_case(h, &EMBEDDING, &EMBEDDING.passes[1], ROW, OP_PLAIN);
    Array noise = input(h, 1 << 20, 1.0);
    for (int i = 0; i < LADDER_SEQUENCES; i++) lengths[i] = LADDER_T;
    k->sequences = sequences_of(h, lengths, LADDER_SEQUENCES, 11);
    k->V = LADDER_V, k->T = LADDER_T, k->C = LADDER_C, k->mode = ADD;
    k->dx.device = (floatX*)bench_memory(h, (size_t)LADDER_N * LADDER_C, sizeof(floatX), noise);
    k->dword.device_real = (real*)bench_memory(h, (size_t)LADDER_V * LADDER_C, sizeof(real), noise);
    k->dposition.device_real = (real*)bench_memory(h, (size_t)LADDER_T * LADDER_C, sizeof(real), noise);
    // The rows of the words that occur are counted, because only they move.
    EmbeddingSizes moved = sizes;
    moved.V = ladder_draw(h, k->token_of);
    work.bytes = EMBEDDING_BACKWARD_BYTES(LADDER_N, moved, ADD, SET);
    k->token_of = resident_ints(h, k->token_of, LADDER_N);
    k->sequences = resident_sequences(h, k->sequences);
    work.seconds = ladder_seconds(h, embedding_run_backward, k);
    return work;
}
