/* Tests of reading ahead (llmc/data/prefetch.h, lm_data.h, mlm_data.h) and of what ranks read: the thread does not
 * change batches, reports errors in the data, and ends. Also built with -fsanitize=thread.
 *
 *     ./test_prefetch [NAME]      the cases whose name contains NAME */

#include "dev/data/corpus_files.h"
#include "dev/test/tests.h"
#include "llmc/bert/mlm_data.h"
#include "llmc/data/lm_data.h"

// ---------------------------------------------------------------------------------------------------------
// Language models: two files of WINDOWS windows together, whose tokens count up from 1; 0 begins a document

enum { T = 6, B = 2, FIRST_FILE = 14, WINDOWS = 47, V = 1 + T * WINDOWS + 1 };

static char* put_tokens(const Tests* t, const char* name, int first, int n, int planted, int value) {
    char* path = path_in(t, name);
    int* tokens = (int*)xmalloc((size_t)n * sizeof(int));
    for (int i = 0; i < n; i++) tokens[i] = i == planted ? value : first + i;
    CHECK(shard_write(path, tokens, (uint64_t)n, 2) == 0);
    free(tokens);
    return path;
}

static char* put_windows(const Tests* t) {
    free(put_tokens(t, "a.bin", 1, T * FIRST_FILE + 1, -1, 0));
    free(put_tokens(t, "b.bin", 1 + T * FIRST_FILE, T * (WINDOWS - FIRST_FILE) + 1, -1, 0));
    return path_in(t, "?.bin");
}

static void open_windows(LmData* data, const char* pattern, int shuffle, int ranks, int end_of_text, Context* ctx) {
    context_init(ctx);
    lm_data_alloc(data, B, T, end_of_text, ctx);
    lm_data_open(data, pattern, pattern, V, 5, shuffle, ranks);
}

static void close_windows(LmData* data, Context* ctx) {
    lm_data_close(data);
    context_free(ctx);
}

static int is_window(const Batch* b, const BatchLm* from, uint64_t sequence) {
    int want[2 * B * T];
    batch_lm_read(from, sequence, want, want + B * T, NULL);
    return memcmp(b->inputs, want, B * T * sizeof(int)) == 0 &&
           memcmp(b->targets, want + B * T, B * T * sizeof(int)) == 0;
}

// Steps of several micro-batches, in order, after jumps and again, and validations in between: a rank has its share of
// each, as a plain reader reads it. data.c tests that the reader has every window once an epoch.
static void test_windows(Tests* t) {
    enum { MICRO_STEPS = 3 };
    char* pattern = put_windows(t);
    for (int way = 0; way < 8; way++) {
        LmData data;
        Context ctx;
        uint64_t start = 0;
        int ranks = 1 + way / 2;
        open_windows(&data, pattern, way % 2 ? SHUFFLED : IN_ORDER, ranks, -1, &ctx);
        for (uint32_t step = 0; step < 200; step++) {
            uint32_t draw = philox(step, 0, 0, 0, 77).v[0];
            int rank = draw % 13 ? ranks - 1 : 0;
            if (draw % 7 == 0) start = draw >> 8;
            for (int i = 0; i < MICRO_STEPS; i++) {
                int first = (i * ranks + rank) * B;
                Batch b = lm_data_train(&data, start, first, &ctx);
                EXPECT(t, is_window(&b, &data.train, start + (uint64_t)first) && b.s.first == first && !b.s.parts);
            }
            Batch b = draw % 5 ? lm_data_train(&data, start, 0, &ctx) : lm_data_val(&data, draw >> 8, B, &ctx);
            EXPECT(t, draw % 5 ? is_window(&b, &data.train, start) : is_window(&b, &data.val, draw >> 8));
            if (draw % 11) start += (uint64_t)(B * ranks * MICRO_STEPS);
        }
        close_windows(&data, &ctx);
    }
    free(pattern);
}

// Documents are cut at their first token, 0, and at the end of a row. There are some at both ends of a row.
static void test_documents(Tests* t) {
    int tokens[T * WINDOWS + 1], most = 0;
    char* path = path_in(t, "documents.bin");
    for (uint32_t i = 0; i < COUNT_OF(tokens); i++) tokens[i] = philox(i, 0, 0, 0, 3).v[0] % 4 ? 1 + (int)i : 0;
    CHECK(shard_write(path, tokens, COUNT_OF(tokens), 2) == 0);
    LmData data;
    Context ctx;
    open_windows(&data, path, IN_ORDER, 1, 0, &ctx);
    for (uint64_t sequence = 0; sequence < 2 * WINDOWS; sequence += B) {
        Batch batch = sequence % 3 ? lm_data_train(&data, sequence, 0, &ctx) : lm_data_val(&data, sequence, B, &ctx);
        const Sequences s = *batch.s.parts;
        int64_t squares = 0;
        int longest = 0, begin = 0, count = 0;
        EXPECT(t, s.rows == B * T && s.is_numbered_by_row);
        for (int i = 0; i < B * T; i++) {
            if (i % T == 0 || !batch.inputs[i]) begin = i, count++;
            EXPECT(t, s.sequence[i] == count - 1 && s.position[i] == i - begin);
            EXPECT(t, s.cu_seqlens[count - 1] == begin && s.host_cu_seqlens[count - 1] == begin);
            squares += 2 * (i - begin) + 1;
            longest = max_int(longest, i - begin + 1);
        }
        most = max_int(most, count);
        EXPECT(t,
               s.count == count && s.cu_seqlens[count] == B * T && squares == s.sum_sq_len && longest == s.max_length);
    }
    EXPECT(t, most > 4);
    close_windows(&data, &ctx);
    free(path);
}

// Windows up to `last`; window 8 has the token out of range. Says each before it is loaded, and waits at the last until
// what is read ahead is read.
static void load_bad_token(const char* path, uint64_t last) {
    LmData data;
    Context ctx;
    context_init(&ctx);
    lm_data_alloc(&data, B, T, NO_CUTS, &ctx);
    lm_data_open(&data, path, NULL, V, 5, IN_ORDER, 1);
    for (uint64_t sequence = 0; sequence <= last; sequence += B) {
        fprintf(stderr, "%d ", (int)sequence);
        lm_data_train(&data, sequence, 0, &ctx);
    }
    prefetch_wait(&data.ahead, data.ahead.asked - 1);
    lm_data_train(&data, last + 4, 0, &ctx);  // a jump over window 8
    close_windows(&data, &ctx);
}

static void load_to_bad_token(const char* path) { load_bad_token(path, WINDOWS); }
static void load_before_bad_token(const char* path) { load_bad_token(path, 6); }

static void test_bad_token(Tests* t) {
    char* path = put_tokens(t, "bad.bin", 1, T * WINDOWS + 1, 8 * T + 2, V + 3);
    char* message = xprintf("0 2 4 6 8 error: %s: token %d at position %d is outside the vocabulary of %d; ", path,
                            V + 3, 8 * T + 2, V);
    expect_end(t, USAGE, "a token out of range ends the run where its batch is used, with its own message", message,
               load_to_bad_token, path);
    expect_end(t, DONE, "one that was only read ahead does not", "0 2 4 6 ", load_before_bad_token, path);
    free(message), free(path);
}

// ---------------------------------------------------------------------------------------------------------
// Masked language models: a file of documents of three sentences of five tokens each

enum { MLM_T = 24, MLM_DOCUMENTS = 40, MLM_V = 400, FIRST_TOKEN = 5 };

static void open_documents(MlmSource* source, const Tests* t, int micro_steps, Context* ctx) {
    enum { SENTENCES = 3 * MLM_DOCUMENTS, TOKENS = 5 * SENTENCES };
    SentencesHeader h = {TOKENS, SENTENCES, MLM_DOCUMENTS, MLM_V, 0, 1, 2, 3, 4};
    MlmRecipe recipe = {4, 0.15, 0, 1, 2, 0.1};
    int tokens[TOKENS];
    uint32_t begin[SENTENCES + 1], first[MLM_DOCUMENTS + 1], continues[(MLM_V + 31) / 32] = {0};
    for (int i = 0; i < TOKENS; i++) tokens[i] = FIRST_TOKEN + i % (MLM_V - FIRST_TOKEN);
    for (uint32_t i = 0; i <= SENTENCES; i++) begin[i] = 5 * i;
    for (uint32_t i = 0; i <= MLM_DOCUMENTS; i++) first[i] = 3 * i;
    char* path = path_in(t, "sentences.bin");
    CHECK(sentences_write(path, h, tokens, begin, first, continues) == 0);
    context_init(ctx);
    memset(source, 0, sizeof *source);
    mlm_source_alloc(source, recipe, B, MLM_T, micro_steps, ctx);
    mlm_source_open(source, path, path, MLM_V, 11);
    free(path);
}

static int same(const int* a, const int* b, int n) { return memcmp(a, b, (size_t)n * sizeof(int)) == 0; }

// What follows from the tokens, masks and labels of a row: data.c.
static int same_batch(const MlmBatch* a, const MlmBatch* b) {
    return a->rows == b->rows && a->masked == b->masked && a->first == b->first &&
           same(a->tokens, b->tokens, a->rows) && same(a->masked_rows, b->masked_rows, a->masked) &&
           same(a->next_targets, b->next_targets, a->count);
}

// Jumps, repetitions and validation load what a plain reader reads.
static void test_masked(Tests* t) {
    for (int way = 0; way < 8; way++) {
        MlmSource source;
        MlmBatch plain;
        Context ctx;
        uint64_t start = 0;
        int ranks = 1 + way / 2, micro_steps = way % 2 ? 3 : 1;
        open_documents(&source, t, micro_steps, &ctx);
        mlm_batch_alloc(&plain, B, MLM_T, source.recipe.max_predictions);
        for (uint32_t step = 0; step < 120; step++) {
            uint32_t draw = philox(step, 0, 0, 0, 78).v[0];
            int rank = draw % 13 ? ranks - 1 : 0;
            if (draw % 7 == 0) start = draw >> 8;
            mlm_source_build(&source, start, B, micro_steps, rank, ranks);
            for (int i = 0; i < micro_steps; i++) {
                uint64_t before = (uint64_t)((i * ranks + rank) * B);
                mlm_batch_build(&plain, &source.train, start + before, B);
                plain.first = mlm_count(&source.train, start, before);
                EXPECT(t, same_batch(&source.batches[i], &plain));
            }
            if (draw % 5 == 0) mlm_batch_build(&source.batches[0], &source.val, draw >> 8, B);  // a validation
            if (draw % 11) start += (uint64_t)(B * ranks * micro_steps);
        }
        mlm_batch_free(&plain), mlm_source_close(&source);
        context_free(&ctx);
    }
}

// ---------------------------------------------------------------------------------------------------------
// The thread

static volatile sig_atomic_t handled;
static pthread_t handler;
static void on_signal(int number) { handled = number, handler = pthread_self(); }

// The thread can be stopped at any moment; it handles no signals.
static void test_ends(Tests* t) {
    char* pattern = put_windows(t);
    sigset_t one, before;
    signal(SIGUSR1, on_signal);
    sigemptyset(&one), sigaddset(&one, SIGUSR1);
    for (int i = 0; i < 200; i++) {
        LmData data;
        Context ctx;
        open_windows(&data, pattern, SHUFFLED, 2, -1, &ctx);
        for (int k = 0; k < i % 4; k++) lm_data_train(&data, (uint64_t)(2 * B * k), 0, &ctx);
        if (i == 150) {
            // While this thread blocks a signal, the other one must not handle it.
            pthread_sigmask(SIG_BLOCK, &one, &before);
            kill(getpid(), SIGUSR1);
            usleep(20000);
            EXPECT_EQ(t, handled, 0);
            pthread_sigmask(SIG_SETMASK, &before, NULL);
            EXPECT(t, handled == SIGUSR1 && pthread_equal(handler, pthread_self()));
        }
        close_windows(&data, &ctx);
    }
    signal(SIGUSR1, SIG_DFL);
    free(pattern);
}

int main(int argc, char** argv) {
    static const TestCase cases[] = {{"prefetch/windows", test_windows},
                                     {"prefetch/documents", test_documents},
                                     {"prefetch/bad_token", test_bad_token},
                                     {"prefetch/masked", test_masked},
                                     {"prefetch/ends", test_ends}};
    return tests_main(argc, argv, cases, COUNT_OF(cases));
}
