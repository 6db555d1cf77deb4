/* Texts that a model writes: a prompt, to which one token after the other is added.
 *
 * To find a token the model computes the positions of the text that are new. Of the earlier ones it needs the keys and
 * values, and these are still where they were computed: in its layers' activations. So a token costs one position.
 *
 * The model knows T positions, and position 0 is the first token of a window. A text that grows beyond T moves the window on
 * by T / 4 at once, and all tokens in it are computed again at their new positions; then T / 4 tokens cost one position
 * each again. So a token sees at least 3 T / 4 of those before it. Without the cache every token costs the whole window,
 * and the tokens are the same. */
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include <signal.h>

#include "../base/rng.h"
#include "../data/bpe.h"
#include "sampler.h"
#include "session.h"

typedef struct {
    int sample_every, sample_tokens;  // while training
    int generate, samples;            // instead of training
    const char *prompt, *prompt_file;
    double temperature, top_p;
    int top_k, kv_cache;
} GenerateSettings;

// None of them changes what is trained.
#define GENERATE_FREE_TO_CHANGE                                                                                        \
    " --sample-every --sample-tokens --generate --samples --prompt --prompt-file --temperature --top-k --top-p "       \
    "--kv-cache"

// Append the rows of these settings. Returns the new count.
static inline int generate_rows(GenerateSettings* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {"-s",  "--sample-every",   FLAG_INT,    &s->sample_every,     "500",    0, 1e9, NULL, "steps between samples, and one at the end; 0: never", 0},
        {"-g",  "--sample-tokens",  FLAG_INT,    &s->sample_tokens,    "128",    1, 1e6, NULL, "tokens of a sample", 0},
        {NULL,  "--generate",       FLAG_INT,    &s->generate,         "0",      0, 1e8, NULL, "do not train: print texts of so many new tokens by the model of -e, or of -o with -y 1", 0},
        {NULL,  "--samples",        FLAG_INT,    &s->samples,          "1",      1, 1e6, NULL, "texts that --generate prints, each with random numbers of its own", 0},
        {NULL,  "--prompt",         FLAG_STRING, &s->prompt,           "",       0, 0, NULL, "what samples and texts begin with; empty: with the start of a document", 0},
        {NULL,  "--prompt-file",    FLAG_STRING, &s->prompt_file,      "",       0, 0, NULL, "the same, from a file or a pipe, to its last byte", 0},
        {NULL,  "--temperature",    FLAG_REAL,   &s->temperature,      "1.0",    0, 100, NULL, "of samples; 0: always the most likely token", 0},
        {NULL,  "--top-k",          FLAG_INT,    &s->top_k,            "0",      0, 1e9, NULL, "samples draw from the k most likely tokens; 0: from all", 0},
        {NULL,  "--top-p",          FLAG_REAL,   &s->top_p,            "0",      0, 1, NULL, "of these, from the fewest most likely ones whose probabilities add up to p; 0: from all", 0},
        {NULL,  "--kv-cache",       FLAG_INT,    &s->kv_cache,         "1",      0, 1, NULL, "0: compute all positions for every token of a sample, for comparison", 0},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

// Refuse flags that cannot be meant together. Returns whether the run trains; where it only writes texts, it is one that
// trains and saves nothing (s->evaluate).
static inline int generate_check(const GenerateSettings* g, Settings* s) {
    if (*g->prompt && *g->prompt_file) die(USAGE, "--prompt and --prompt-file: both give the prompt; leave one out");
    if (g->samples > 1 && !g->generate)
        die(USAGE, "--samples %d: is for --generate, which is not given; say with it how many tokens a text gets",
            g->samples);
    if (g->generate && s->evaluate)
        die(USAGE, "--generate %d and --evaluate 1: one writes texts, the other measures; leave one out", g->generate);
    if (g->generate) s->evaluate = 1;
    return !g->generate;
}

// A text in the making.
typedef struct {
    int* tokens;
    int count;  // so far; the first `prompt` of them are the prompt
    int prompt;
    int hidden;  // tokens at the front that are not shown: the end of the document before
    int begin;   // the window's first token
    int known;   // tokens of the window whose keys and values the model has
    int is_nan;  // logits were not numbers: the text means nothing
    int T, V, kv_cache;
    Sampler sampler;
    uint64_t key;
} Generation;

// What the model is to find next: the logits after the last of `count` tokens, of which it has computed `known`.
typedef struct {
    const int* tokens;
    int count, known;
} Window;

// The bytes of the prompt's file (caller frees), which rank 0 reads for all: a pipe has them once. It may be long in coming,
// and the user may think better of it: signals end the program meanwhile.
static inline char* generation_read_file(const char* path, const Comm* comm, size_t* length) {
    enum { MOST_BYTES = 1 << 28 };
    char* text = NULL;
    *length = 0;
    if (comm->rank == 0) {
        void (*on_interrupt)(int) = signal(SIGINT, SIG_DFL);
        void (*on_end)(int) = signal(SIGTERM, SIG_DFL);
        comm_wait_begin(comm);
        text = read_to_end(path, MOST_BYTES, length, USAGE);
        comm_wait_end(comm);
        signal(SIGINT, on_interrupt), signal(SIGTERM, on_end);
    }
    comm_broadcast(comm, length, sizeof *length);
    if (comm->rank > 0) text = (char*)xcalloc(*length + 1, 1);
    comm_broadcast(comm, text, *length);
    return text;
}

// The tokens of the prompt (caller frees), at least one; NULL where there is no prompt.
static inline int* generation_read_prompt(const GenerateSettings* s, const Session* session, int V, int* count) {
    const char* flag = *s->prompt_file ? "--prompt-file" : "--prompt";
    size_t length = strlen(s->prompt);
    int* ids;
    Bpe bpe;
    if (!*s->prompt && !*s->prompt_file) return NULL;
    char* text = *s->prompt ? NULL : generation_read_file(s->prompt_file, session->comm, &length);
    if (length == 0) die(USAGE, "--prompt-file %s: is empty; leave it out to begin a document", s->prompt_file);
    if (!session->tokenizer_dir || bpe_open(&bpe, session->tokenizer_dir) != 0)
        die(USAGE,
            "%s: there is no tokenizer to read it with; put tokenizer.json, or vocab.json and merges.txt, into the "
            "directory of the model",
            flag);
    size_t n = bpe_encode(&ids, &bpe, text ? text : s->prompt, length, AS_TOKEN);
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= V)
            die(USAGE,
                "%s: holds token %d of the tokenizer in %s, but the model has %d tokens; put the model's own there",
                flag, ids[i], session->tokenizer_dir, V);
    *count = (int)n;
    bpe_free(&bpe);
    free(text);
    return ids;
}

// Read the prompt, after generate_check(), for a model of V tokens that knows T positions and has the cache only where `can_cache`.
static inline void generation_open(Generation* g, const GenerateSettings* s, const Session* session, int T, int V,
                                   int can_cache) {
    int most = max_int(T - 1, 1), *prompt;
    memset(g, 0, sizeof *g);
    g->T = T, g->V = V, g->kv_cache = s->kv_cache && can_cache;
    g->sampler.temperature = s->temperature, g->sampler.top_k = s->top_k, g->sampler.top_p = s->top_p;
    prompt = generation_read_prompt(s, session, V, &g->prompt);
    if (!prompt) g->prompt = g->hidden = 1;
    int dropped = max_int(g->prompt - most, 0);
    if (dropped && session->comm->rank == 0)
        warn("the prompt has %d tokens; the model sees the last %d of them, one less than -t", g->prompt, most);
    g->prompt -= dropped;
    g->tokens = (int*)xmalloc(((size_t)g->prompt + (size_t)max_int(s->sample_tokens, s->generate)) * sizeof(int));
    if (prompt) memcpy(g->tokens, prompt + dropped, (size_t)g->prompt * sizeof(int));
    else g->tokens[0] = session_end_of_text(session, V);
    free(prompt);
}

static inline void generation_close(Generation* g) { free(g->tokens); }

// Begin with the prompt again. Texts of different numbers have their own random numbers, at every step of a run.
static inline void generation_begin(Generation* g, const Session* session, int number) {
    g->count = g->prompt;
    g->begin = g->known = g->is_nan = 0;
    g->key = rng_stream((uint64_t)session->settings->seed, (uint64_t)session->step, (uint32_t)number, SITE_SAMPLE);
}

static inline Window generation_window(Generation* g) {
    if (g->count - g->begin > g->T) {
        g->begin += max_int(g->T / 4, 1);
        g->known = 0;
    }
    Window w = {g->tokens + g->begin, g->count - g->begin, g->known};
    if (g->kv_cache) g->known = w.count;
    return w;
}

// Add a token that is drawn from these logits.
static inline void generation_draw(Generation* g, const real* logits) {
    double uniform = rng_uniform(philox((uint32_t)g->count, 0, 0, 0, g->key).v[0]);
    int drawn = sampler_draw(logits, g->V, g->sampler, uniform);
    g->is_nan |= isnan((double)logits[drawn]) != 0;
    g->tokens[g->count++] = drawn;
}

// The text so far, as numbers where there is no tokenizer.
static inline Text generation_text(const Generation* g, const Session* session) {
    Text text = {NULL, 0, 0};
    for (int i = g->hidden; i < g->count; i++) {
        size_t bytes = 0;
        const char* piece = session->tokenizer_dir ? tokenizer_decode(&session->tokenizer, g->tokens[i], &bytes) : NULL;
        if (piece) text_append(&text, piece, bytes);
        else text_printf(&text, "%d ", g->tokens[i]);
    }
    return text;
}

// Print text number `number`; a line separates it from the one before.
static inline void generation_print(const Generation* g, const Session* session, int number) {
    if (g->is_nan) die(FAILED, "the model's logits are not numbers, so there is no next token");
    Text text = generation_text(g, session);
    if (number > 0) printf("---\n");
    fwrite(text.text, 1, text.length, stdout);  // bytes of any kind
    printf("\n");
    fflush(stdout);
    free(text.text);
}

// Say on stderr, which is not the texts', how fast they came.
static inline void generation_print_speed(const Session* session, int64_t tokens, double seconds) {
    if (session->comm->rank == 0)
        fprintf(stderr, "%lld tokens in %.2f s: %.1f tokens/s\n", (long long)tokens, seconds,
                (double)tokens / fmax(seconds, 1e-9));
}

#endif
