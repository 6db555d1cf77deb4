/* Tests of reading ahead (llmc/data/prefetch.h, lm_data.h, mlm_data.h) and of what ranks read: the thread does not
 * change batches, reports errors in the data, and ends. Also built with -fsanitize=thread.
 *
 *     ./test_prefetch [NAME]      the cases whose name contains NAME
 *
 * Prints a line per case and `N passed, N failed`; exit status 1 if one failed. */

#include "dev/data/corpus_files.h"
#include "dev/test/tests.h"
#include "llmc/bert/mlm_data.h"
#include "llmc/data/lm_data.h"

// ---------------------------------------------------------------------------------------------------------
// Language models: two files of WINDOWS windows together, whose tokens count up from 1; 0 begins a document

enum { T = 6, B = 2, FIRST_FILE = 14, WINDOWS = 47, V = 1 + T * WINDOWS + 1 };

static char* put_tokens(const char* directory, const char* name, int first, int n, int planted, int value) {
    char* path = xprintf("%s/%s", directory, name);
    int* tokens = (int*)xmalloc((size_t)n * sizeof(int));
    for (int i = 0; i < n; i++) tokens[i] = first + i;
    if (planted >= 0) tokens[planted] = value;
    if (shard_write(path, tokens, (uint64_t)n, 2) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    free(tokens);
    return path;
}

static char* put_windows(const char* directory) {
    free(put_tokens(directory, "a.bin", 1, T * FIRST_FILE + 1, -1, 0));
    free(put_tokens(directory, "b.bin", 1 + T * FIRST_FILE, T * (WINDOWS - FIRST_FILE) + 1, -1, 0));
    return xprintf("%s/?.bin", directory);
}

static void open_windows(LmData* data, const char* pattern, int shuffle, int ranks, int end_of_text, Context* ctx) {
    lm_data_alloc(data, B, T, end_of_text, ctx);
    lm_data_open(data, pattern, pattern, V, 5, shuffle, ranks);
}

// Read the step of one rank: micro-batches of B sequences, numbers (i * ranks + rank) * B .. from `start` on. Adds one
// to seen [windows of the step] for each sequence, by its place in the whole order. Returns 0 if a batch differs.
static int take_step(LmData* data, const BatchLm* order, uint64_t start, int micro_steps, int rank, int ranks,
                     int* seen, Context* ctx) {
    int right = 1;
    for (int i = 0; i < micro_steps; i++) {
        int first = (i * ranks + rank) * B;
        Batch b = lm_data_train(data, start, first, ctx);
        right &= b.s.first == first && b.s.parts == NULL;
        for (int row = 0; row < B; row++) {
            int want = 1 + T * (int)batch_lm_window(order, start + (uint64_t)(first + row));
            for (int k = 0; k < T; k++)
                right &= b.inputs[row * T + k] == want + k && b.targets[row * T + k] == want + k + 1;
            seen[first + row]++;
        }
    }
    return right;
}

// Together the ranks read every sequence of every step once, and so every window of an epoch, also in a resumed run.
static void test_slices(Tests* t) {
    char *pattern = put_windows(t->directory), *name;
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int micro_steps = 1; micro_steps <= 3; micro_steps += 2)
            for (int shuffle = IN_ORDER; shuffle <= SHUFFLED; shuffle++) {
                enum { EPOCHS = 3 };
                int per_step = ranks * micro_steps * B, right = 1, steps = EPOCHS * WINDOWS / per_step + 1;
                int *seen = (int*)xcalloc((size_t)(steps * per_step), sizeof(int)), windows[EPOCHS][WINDOWS];
                memset(windows, 0, sizeof windows);
                for (int rank = 0; rank < ranks; rank++) {
                    LmData data;
                    Context ctx;
                    context_init(&ctx);
                    open_windows(&data, pattern, shuffle, ranks, -1, &ctx);
                    for (int step = 0; step < steps; step++) {
                        if (step == steps / 2) {  // stopped here, and resumed
                            lm_data_close(&data);
                            open_windows(&data, pattern, shuffle, ranks, -1, &ctx);
                        }
                        right &= take_step(&data, &data.train, (uint64_t)(step * per_step), micro_steps, rank, ranks,
                                           seen + step * per_step, &ctx);
                    }
                    for (int i = 0; i < EPOCHS * WINDOWS && rank == 0; i++)
                        windows[i / WINDOWS][batch_lm_window(&data.train, (uint64_t)i)]++;
                    lm_data_close(&data);
                    context_free(&ctx);
                }
                for (int i = 0; i < steps * per_step; i++) right &= seen[i] == 1;
                for (int i = 0; i < EPOCHS * WINDOWS; i++) right &= windows[i / WINDOWS][i % WINDOWS] == 1;
                name = xprintf("%d ranks, %d micro-batches a step%s: every sequence once", ranks, micro_steps,
                               shuffle == SHUFFLED ? ", shuffled" : "");
                expect_that(t, right, name);
                free(name), free(seen);
            }
    free(pattern);
}

// Jumps, repeated batches, and validation in between: the loaded batch is always the requested one.
static void test_jumps(Tests* t) {
    char* pattern = put_windows(t->directory);
    int want[2 * B * T], right = 1;
    uint64_t sequence = 0;
    LmData data;
    Context ctx;
    context_init(&ctx);
    open_windows(&data, pattern, SHUFFLED, 3, -1, &ctx);
    for (uint32_t i = 0; i < 600; i++) {
        uint32_t draw = philox(i, 0, 0, 0, 77).v[0];
        BatchLm* from = draw % 5 == 0 ? &data.val : &data.train;
        if (draw % 7 == 0) sequence = draw >> 8;
        else if (draw % 11) sequence += 3 * B;
        Batch b = from == &data.val ? lm_data_val(&data, sequence, B, &ctx) : lm_data_train(&data, sequence, 0, &ctx);
        batch_lm_read(from, sequence, want, want + B * T, NULL);
        right &= memcmp(b.inputs, want, B * T * sizeof(int)) == 0;
        right &= memcmp(b.targets, want + B * T, B * T * sizeof(int)) == 0;
        if (from == &data.val) sequence -= 3 * B;
    }
    expect_that(t, right, "jumps, repetitions and validation load what a plain reader reads");
    lm_data_close(&data);
    context_free(&ctx);
    free(pattern);
}

// Token 0 begins a document: at random places, at both ends of a row, and two in a row.
static void test_documents(Tests* t) {
    enum { N = B * T };
    int tokens[T * WINDOWS + 1], right = 1, most = 0;
    char* path = xprintf("%s/documents.bin", t->directory);
    for (uint32_t i = 0; i < COUNT_OF(tokens); i++) tokens[i] = philox(i, 0, 0, 0, 3).v[0] % 4 ? 1 + (int)i : 0;
    if (shard_write(path, tokens, COUNT_OF(tokens), 2) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    LmData data;
    Context ctx;
    context_init(&ctx);
    open_windows(&data, path, IN_ORDER, 1, 0, &ctx);
    for (uint64_t sequence = 0; sequence < 2 * WINDOWS; sequence += B) {
        Batch batch = sequence % 3 ? lm_data_train(&data, sequence, 0, &ctx) : lm_data_val(&data, sequence, B, &ctx);
        const Sequences s = *batch.s.parts;
        int64_t squares = 0;
        int longest = 0;
        right &= s.rows == N && s.cu_seqlens[0] == 0 && s.cu_seqlens[s.count] == N && s.is_numbered_by_row;
        for (int b = 0; b < s.count; b++) {
            int begin = s.cu_seqlens[b], length = s.cu_seqlens[b + 1] - begin;
            right &=
                length > 0 && begin / T == (begin + length - 1) / T && (begin % T == 0 || batch.inputs[begin] == 0);
            right &= s.host_cu_seqlens[b] == begin && sequences_number(&s, b) == (uint32_t)begin;
            for (int i = 0; i < length; i++) {
                right &= (i == 0 || batch.inputs[begin + i] != 0) && s.sequence[begin + i] == b &&
                         s.position[begin + i] == i;
            }
            squares += (int64_t)length * length;
            longest = max_int(longest, length);
        }
        most = max_int(most, s.count);
        right &= squares == s.sum_sq_len && longest == s.max_length;
    }
    expect_that(t, right && most > 4, "documents are cut at their first token and at the end of a row");
    lm_data_close(&data);
    context_free(&ctx);
    free(path);
}

// The token out of range is in window 8 in the order of the file.
static void load_bad_token(const char* path) {
    LmData data;
    Context ctx;
    context_init(&ctx);
    lm_data_alloc(&data, B, T, NO_CUTS, &ctx);
    lm_data_open(&data, path, NULL, V, 5, IN_ORDER, 1);
    for (uint64_t sequence = 0; sequence < WINDOWS; sequence += B) {
        fprintf(stderr, "%d ", (int)sequence);
        lm_data_train(&data, sequence, 0, &ctx);
    }
    lm_data_close(&data);
}

static void stop_before_bad_token(const char* path) {
    LmData data;
    Context ctx;
    context_init(&ctx);
    lm_data_alloc(&data, B, T, NO_CUTS, &ctx);
    lm_data_open(&data, path, NULL, V, 5, IN_ORDER, 1);
    for (uint64_t sequence = 0; sequence < 8; sequence += B) lm_data_train(&data, sequence, 0, &ctx);
    prefetch_wait(&data.ahead, data.ahead.asked - 1);  // the thread has met it
    lm_data_train(&data, 10, 0, &ctx);
    lm_data_close(&data);
}

static void test_bad_token(Tests* t) {
    char* path = put_tokens(t->directory, "bad.bin", 1, T * WINDOWS + 1, 8 * T + 2, V + 3);
    Text text = {NULL, 0, 0};
    int status = exit_status_of(load_bad_token, path, &text);
    char* message = xprintf("0 2 4 6 8 error: %s: token %d at position %d is outside the vocabulary of %d; ", path,
                            V + 3, 8 * T + 2, V);
    expect_that(t, status == USAGE && text.text && strncmp(text.text, message, strlen(message)) == 0,
                "a token out of range ends the run where its batch is used, with its own message");
    free(text.text), free(message);
    Text other = {NULL, 0, 0};
    status = exit_status_of(stop_before_bad_token, path, &other);
    expect_that(t, status == DONE && other.length == 0, "one that was only read ahead does not");
    free(other.text), free(path);
}

// ---------------------------------------------------------------------------------------------------------
// Masked language models: a file of documents of three sentences of five tokens each

enum { MLM_T = 24, MLM_DOCUMENTS = 40, MLM_V = 400, FIRST_TOKEN = 5 };

static char* put_documents(const char* directory, int planted, int value) {
    enum { SENTENCES = 3 * MLM_DOCUMENTS, TOKENS = 5 * SENTENCES };
    SentencesHeader h = {TOKENS, SENTENCES, MLM_DOCUMENTS, MLM_V, 0, 1, 2, 3, 4};
    int tokens[TOKENS];
    uint32_t begin[SENTENCES + 1], first[MLM_DOCUMENTS + 1], continues[(MLM_V + 31) / 32] = {0};
    for (int i = 0; i < TOKENS; i++) tokens[i] = FIRST_TOKEN + i % (MLM_V - FIRST_TOKEN);
    for (uint32_t i = 0; i <= SENTENCES; i++) begin[i] = 5 * i;
    for (uint32_t i = 0; i <= MLM_DOCUMENTS; i++) first[i] = 3 * i;
    if (planted >= 0) tokens[planted] = value;
    char* path = xprintf("%s/sentences.bin", directory);
    if (sentences_write(path, h, tokens, begin, first, continues) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    return path;
}

static void open_documents(MlmSource* source, const char* path, int micro_steps, Context* ctx) {
    MlmRecipe recipe = {4, 0.15, 0, 1, 2, 0.1};
    memset(source, 0, sizeof *source);
    mlm_source_alloc(source, recipe, B, MLM_T, micro_steps, ctx);
    mlm_source_open(source, path, path, MLM_V, 11);
}

static int same_batch(const MlmBatch* a, const MlmBatch* b) {
    size_t rows = (size_t)a->rows * sizeof(int), masked = (size_t)a->masked * sizeof(int),
           count = (size_t)a->count * sizeof(int);
    return a->count == b->count && a->rows == b->rows && a->masked == b->masked && a->first == b->first &&
           memcmp(a->tokens, b->tokens, rows) == 0 && memcmp(a->types, b->types, rows) == 0 &&
           memcmp(a->cu_seqlens, b->cu_seqlens, count) == 0 && memcmp(a->masked_rows, b->masked_rows, masked) == 0 &&
           memcmp(a->targets, b->targets, masked) == 0 && memcmp(a->next_targets, b->next_targets, count) == 0;
}

static void test_masked(Tests* t) {
    char* path = put_documents(t->directory, -1, 0);
    int right = 1;
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int micro_steps = 1; micro_steps <= 3; micro_steps += 2) {
            MlmSource source;
            MlmBatch plain;
            Context ctx;
            uint64_t start = 0;
            context_init(&ctx);
            open_documents(&source, path, micro_steps, &ctx);
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
                    right &= same_batch(&source.batches[i], &plain);
                }
                if (draw % 5 == 0) mlm_batch_build(&source.batches[0], &source.val, draw >> 8, B);  // a validation
                if (draw % 11) start += (uint64_t)(B * ranks * micro_steps);
            }
            mlm_batch_free(&plain);
            mlm_source_close(&source);
            context_free(&ctx);
        }
    expect_that(t, right, "masked batches: jumps, repetitions and validation load what a plain reader reads");
    free(path);
}

// Within these epochs a sequence contains the planted token.
static void build_bad_token(const char* path) {
    MlmSource source;
    Context ctx;
    context_init(&ctx);
    open_documents(&source, path, 2, &ctx);
    for (uint64_t step = 0; step < MLM_DOCUMENTS; step++) mlm_source_build(&source, 2 * B * step, B, 2, 0, 1);
    mlm_source_close(&source);
}

static void test_masked_bad_token(Tests* t) {
    char* path = put_documents(t->directory, 100, MLM_V);
    expect_end(t, USAGE, "masked batches: a token out of range ends the run with the reader's message",
               "token 400 at position 100 is outside the file's vocabulary of 400", build_bad_token, path);
    free(path);
}

// ---------------------------------------------------------------------------------------------------------
// The thread

static volatile sig_atomic_t handled;
static pthread_t handler;
static void on_signal(int number) { handled = number, handler = pthread_self(); }

// The thread can be stopped at any moment; it handles no signals.
static void test_ends(Tests* t) {
    char* pattern = put_windows(t->directory);
    int mine = 1;
    sigset_t one, before;
    signal(SIGUSR1, on_signal);
    sigemptyset(&one), sigaddset(&one, SIGUSR1);
    for (int i = 0; i < 200; i++) {
        LmData data;
        Context ctx;
        context_init(&ctx);
        open_windows(&data, pattern, SHUFFLED, 2, -1, &ctx);
        for (int k = 0; k < i % 4; k++) lm_data_train(&data, (uint64_t)(2 * B * k), 0, &ctx);
        if (i == 150) {
            // While this thread blocks a signal, the other one must not handle it.
            pthread_sigmask(SIG_BLOCK, &one, &before);
            kill(getpid(), SIGUSR1);
            usleep(20000);
            mine &= handled == 0;
            pthread_sigmask(SIG_SETMASK, &before, NULL);
            mine &= handled == SIGUSR1 && pthread_equal(handler, pthread_self());
        }
        lm_data_close(&data);
        context_free(&ctx);
    }
    signal(SIGUSR1, SIG_DFL);
    expect_that(t, 1, "the thread ends whenever it is asked to");
    expect_that(t, mine, "signals are handled by the trainer's thread");
    free(pattern);
}

int main(int argc, char** argv) {
    Tests t;
    tests_choose(&t, argc, argv);
    t.directory = make_scratch_directory("test_prefetch");
    test_slices(&t);
    test_jumps(&t);
    test_documents(&t);
    test_bad_token(&t);
    test_masked(&t);
    test_masked_bad_token(&t);
    test_ends(&t);
    return tests_close(&t);
}
