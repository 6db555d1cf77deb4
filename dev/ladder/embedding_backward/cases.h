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

static void ladder_test(Harness* h) {
    test_embedding_both(h, 4);
    test_embedding_lists(h);
}

static LadderWork ladder_time(Harness* h) {
    int lengths[LADDER_SEQUENCES];
    const EmbeddingSizes small = {64, LADDER_T, 0, 8, -1}, sizes = {LADDER_V, LADDER_T, 0, LADDER_C, -1};
    LadderWork work = {0, 0, 0, 1};
    for (int i = 0; i < LADDER_SEQUENCES; i++) lengths[i] = LADDER_T;
    case_begin(h, "embedding ladder");
    EmbeddingCase e = embedding_case(h, lengths, LADDER_SEQUENCES, small, 0, ADD, SET);
    Array noise = input(h, 1 << 20, 1.0);
    e.sizes = sizes;
    e.dx.device = (floatX*)bench_memory(h, (size_t)LADDER_N * LADDER_C, sizeof(floatX), noise);
    e.dword.device_real = (real*)bench_memory(h, (size_t)LADDER_V * LADDER_C, sizeof(real), noise);
    e.dposition.device_real = (real*)bench_memory(h, (size_t)LADDER_T * LADDER_C, sizeof(real), noise);
    // The rows of the words that occur are counted, because only they move.
    EmbeddingSizes moved = sizes;
    moved.V = ladder_draw(h, e.tokens);
    work.bytes = EMBEDDING_BACKWARD_BYTES(LADDER_N, moved, ADD, SET);
    e.tokens = resident_ints(h, e.tokens, LADDER_N);
    e.s = resident_sequences(h, e.s);
    work.seconds = ladder_seconds(h, embedding_run_backward, &e);
    return work;
}
