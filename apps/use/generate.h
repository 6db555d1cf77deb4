/* Text generation: extend a prompt token by token.
 *
 * The model computes only new positions. The keys and values of earlier positions are still in the layers' activations
 * (the KV cache), so a token costs one position.
 *
 * The model has T positions; position 0 is the first token of a window. When a text exceeds T tokens, the window moves
 * by T / 4 and all of its tokens are recomputed at their new positions. The next T / 4 tokens cost one position each
 * again. So a token sees at least its last 3 T / 4 predecessors. */
#ifndef APPS_USE_GENERATE_H
#define APPS_USE_GENERATE_H

#include "apps/use/bpe.h"
#include "apps/use/sampler.h"
#include "llmc/base/process.h"
#include "llmc/base/rng.h"
#include "llmc/run/vocabulary.h"

typedef struct {
    int generate, samples;  // tokens of a text, and texts
    const char *prompt, *chat;
    double temperature, top_p;
    int top_k;
} GenerateSettings;

// Append the rows of these settings. Returns the new count.
static inline int generate_rows(GenerateSettings* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {NULL, "--generate",      FLAG_INT,    &s->generate,      "0",   0, 1e8, NULL, SCOPE_PROCESS, TOPIC_SAMPLES,
         "Print texts of this many new tokens by -e (or by -o with -y 1). 0: off."},
        {NULL, "--samples",       FLAG_INT,    &s->samples,       "1",   1, 1e6, NULL, SCOPE_FREE,    TOPIC_SAMPLES,
         "Number of texts that --generate prints, each with its own random numbers."},
        {NULL, "--prompt",        FLAG_STRING, &s->prompt,        "",    0, 0,   NULL, SCOPE_FREE,    TOPIC_SAMPLES,
         "Beginning of the texts: a text, @FILE for a file or a pipe to its last byte, or - for standard input. "
         "Empty: the start of a document."},
        {NULL, "--chat",          FLAG_STRING, &s->chat,          "",    0, 0,   NULL, SCOPE_FREE,    TOPIC_SAMPLES,
         "User message instead of a prompt: the texts answer it. For models tuned for chat."},
        {NULL, "--temperature",   FLAG_REAL,   &s->temperature,   "1.0", 0, 100, NULL, SCOPE_FREE,    TOPIC_SAMPLES,
         "Sampling temperature. 0: always the most likely token."},
        {NULL, "--top-k",         FLAG_INT,    &s->top_k,         "0",   0, 1e9, NULL, SCOPE_FREE,    TOPIC_SAMPLES,
         "Sample from the k most likely tokens. 0: from all."},
        {NULL, "--top-p",         FLAG_REAL,   &s->top_p,         "0",   0, 1,   NULL, SCOPE_FREE,    TOPIC_SAMPLES,
         "Of these, sample from the smallest set of top tokens whose probabilities add up to p. 0: from all."},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

// Refuse flags that contradict each other. Returns whether --generate is given.
static inline int generate_check(const GenerateSettings* g, Settings* s, Flag* table, int count) {
    if (!*g->chat && flag_is_given(table, count, "--chat")) die(USAGE, "--chat '': is empty; give a message");
    if (*g->chat && *g->prompt) die(USAGE, "--chat and --prompt: both give the prompt; leave one out");
    if (g->samples > 1 && !g->generate)
        die(USAGE, "--samples %d: needs --generate, the number of tokens of a text", g->samples);
    if (g->generate && s->evaluate)
        die(USAGE, "--generate %d and --evaluate 1: one prints texts, the other a loss; leave one out", g->generate);
    if (g->generate) s->evaluate = 1, s->B = 1, s->total_batch = 0;  // one sequence
    return g->generate > 0;
}

// A text that is being generated.
typedef struct {
    int* tokens;
    int count;  // so far; the first `prompt` of them are the prompt
    int prompt;
    int hidden;      // leading tokens that are not printed: end-of-text, or the message of a chat
    int begin;       // first token of the window
    int past_len;    // tokens of the window whose keys and values are cached
    int not_finite;  // the logits were not finite: the text is meaningless
    int end;         // the token that ends an answer; it is not part of the text; -1: none
    int is_over;     // that token was drawn
    int T, V, can_cache;
    Sampler sampler;
    uint64_t key;
    int64_t written;  // new tokens of the texts that are printed
    double begun;     // when the first token was drawn, 0 before
} Generation;

// Input of the next forward pass, which computes the logits after the last of `count` tokens. The keys and values of
// the first `past_len` tokens are cached.
typedef struct {
    const int* tokens;
    int count, past_len;
} Window;

// The bytes of the prompt file (caller frees). Rank 0 reads it for all ranks, because a pipe can be read only once.
// Reading a pipe may block, so meanwhile signals end the program.
static inline char* generation_read_file(const char* path, const ProcessGroup* group, size_t* length) {
    enum { MOST_BYTES = 1 << 28 };
    char* text = NULL;
    *length = 0;
    if (group->rank == 0) {
        StopHandler on_stop = process_on_stop(SIG_DFL);
        text = read_to_end(path, MOST_BYTES, length, USAGE);
        process_on_stop(on_stop);
    }
    group_broadcast(group, length, sizeof *length);
    if (group->rank > 0) text = (char*)xcalloc(*length + 1, 1);
    group_broadcast(group, text, *length);
    return text;
}

// The tokens of a message in the chat template, up to the start of the answer (caller frees). *end: the token that ends
// the answer. dev/data/prepare_chat.py uses the same template. Special tokens in the message are ordinary text.
static inline size_t generation_encode_chat(int** ids, int* end, const Bpe* bpe, const char* message) {
    static const char* const names[] = {"<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>"};
    int token[COUNT_OF(names)], *text;
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        token[i] = bpe_special_id(bpe, names[i]);
        if (token[i] < 0)
            die(USAGE, "--chat: %s has no special token %s; tune the model for chat first (dev/data/prepare_chat.py)",
                bpe->vocabulary, names[i]);
    }
    size_t n = bpe_encode(&text, bpe, message, strlen(message), AS_TEXT);
    *ids = (int*)xmalloc((n + COUNT_OF(names)) * sizeof(int));
    memcpy(*ids, token, 2 * sizeof(int));
    memcpy(*ids + 2, text, n * sizeof(int));
    memcpy(*ids + 2 + n, token + 2, 2 * sizeof(int));
    *end = token[2];
    free(text);
    return n + COUNT_OF(names);
}

// Open the encoder in the model's directory, for a text from the flag `flag`.
static inline void generation_open_encoder(Bpe* bpe, const char* flag, const Run* r) {
    if (!r->tokenizer_files.directory || bpe_open(bpe, r->tokenizer_files.directory) != 0)
        die(USAGE,
            "%s: no tokenizer to encode it with; put tokenizer.json, or vocab.json and merges.txt, into the "
            "directory of the model",
            flag);
}

// Check that these n tokens are below V, the model's vocabulary size.
static inline void generation_check_tokens(const int* ids, size_t n, const char* flag, const Run* r, int V) {
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= V)
            die(USAGE,
                "%s: contains token %d of the tokenizer in %s, but the model has %d tokens; put the model's own there",
                flag, ids[i], r->tokenizer_files.directory, V);
}

// The tokens of the prompt (caller frees), at least one; NULL without a prompt. *end: the token that ends an answer, or
// -1.
static inline int* generation_read_prompt(const GenerateSettings* s, const Run* r, int V, int* count, int* end) {
    const char *flag = *s->chat ? "--chat" : "--prompt", *file = flags_text_file(s->prompt);
    size_t length = strlen(s->prompt);
    int* ids;
    Bpe bpe;
    *end = -1;
    if (!*s->prompt && !*s->chat) return NULL;
    char* text = file ? generation_read_file(file, &r->group, &length) : NULL;
    if (length == 0 && !*s->chat) die(USAGE, "--prompt %s: is empty; leave it out to start a document", s->prompt);
    generation_open_encoder(&bpe, flag, r);
    size_t n = *s->chat ? generation_encode_chat(&ids, end, &bpe, s->chat)
                        : bpe_encode(&ids, &bpe, text ? text : s->prompt, length, AS_TOKEN);
    generation_check_tokens(ids, n, flag, r, V);
    *count = (int)n;
    bpe_free(&bpe);
    free(text);
    return ids;
}

// Read the prompt, after generate_check(), for a model of V tokens and T positions that can cache keys and values if
// `can_cache`.
static inline void generation_open(Generation* g, const GenerateSettings* s, const Run* r, int T, int V,
                                   int can_cache) {
    int most = max_int(T - 1, 1), *prompt;
    memset(g, 0, sizeof *g);
    g->T = T, g->V = V, g->can_cache = can_cache;
    g->sampler.temperature = s->temperature, g->sampler.top_k = s->top_k, g->sampler.top_p = s->top_p;
    prompt = generation_read_prompt(s, r, V, &g->prompt, &g->end);
    if (!prompt) g->prompt = g->hidden = 1;
    int dropped = max_int(g->prompt - most, 0);
    if (dropped && r->group.rank == 0)
        warn("the prompt has %d tokens; the model sees the last %d of them, one less than -t", g->prompt, most);
    g->prompt -= dropped;
    if (*s->chat) g->hidden = g->prompt;
    g->tokens = (int*)xmalloc(((size_t)g->prompt + (size_t)s->generate) * sizeof(int));
    if (prompt) memcpy(g->tokens, prompt + dropped, (size_t)g->prompt * sizeof(int));
    else g->tokens[0] = run_end_of_text(r, V);
    free(prompt);
}

static inline void generation_close(Generation* g) { free(g->tokens); }

// Restart from the prompt. Each text number and each step of the run that is resumed has its own random numbers.
static inline void generation_begin(Generation* g, const Run* r, int number) {
    g->count = g->prompt;
    g->begin = g->past_len = g->not_finite = g->is_over = 0;
    g->key = rng_stream((uint64_t)r->settings.seed, (uint64_t)r->step, (uint32_t)number, SITE_SAMPLE);
}

static inline Window generation_window(Generation* g) {
    if (g->count - g->begin > g->T) {
        g->begin += max_int(g->T / 4, 1);
        g->past_len = 0;
    }
    Window w = {.tokens = g->tokens + g->begin, .count = g->count - g->begin, .past_len = g->past_len};
    if (g->can_cache) g->past_len = w.count;
    return w;
}

// Draw the next token from these logits and append it, unless it ends the text.
static inline void generation_draw(Generation* g, const real* logits) {
    double uniform = rng_uniform(philox((uint32_t)g->count, 0, 0, 0, g->key).v[0]);
    int not_finite = 0;
    for (int v = 0; v < g->V; v++) not_finite |= !isfinite(logits[v]);
    g->not_finite |= not_finite;
    int token = sampler_draw(logits, g->V, g->sampler, uniform);
    if (!g->begun) g->begun = now_seconds();
    if (token == g->end) g->is_over = 1;
    else g->tokens[g->count++] = token;
}

// Print text number `number`, after a line that separates it from the previous one.
static inline void generation_print(Generation* g, const Run* r, int number) {
    if (g->not_finite)
        die(STOPPED_BY_NAN,
            "--generate: the model's logits are not finite; take an earlier checkpoint or another model");
    Text text = run_decode(r, g->tokens + g->hidden, g->count - g->hidden);
    if (number > 0) printf("---\n");
    fwrite(text.text, 1, text.length, stdout);  // bytes of any kind
    printf("\n");
    fflush(stdout);
    free(text.text);
    g->written += g->count - g->prompt;
}

// Print the speed to stderr, because stdout has only the texts. The first token loads kernels and tries matmul
// algorithms, which may take longer than all others.
static inline void generation_print_speed(const Generation* g, const Run* r, double seconds) {
    if (r->group.rank > 0 || ferror(stdout)) return;
    fprintf(stderr, "%lld tokens in %.2f s", (long long)g->written, seconds);
    if (g->written > 1)
        fprintf(stderr, ": %.1f tokens/s after the first",
                (double)(g->written - 1) / fmax(now_seconds() - g->begun, 1e-9));
    fprintf(stderr, "\n");
}

#endif
