/* Text generation: extend a prompt token by token, by several texts at a time.
 *
 * The model computes only new positions. The keys and values of earlier positions are cached, so a token costs one
 * position, and texts that are generated together read the weights once.
 *
 * The model has T positions; position 0 is the first token of a window. When a text exceeds T tokens, the window moves
 * by T / 4 and all of its tokens are recomputed at their new positions. The next T / 4 tokens cost one position each
 * again. So a token sees at least its last 3 T / 4 predecessors. All texts have the same length, so their windows move
 * together. */
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
    int top_k, graph;
} GenerateSettings;

// On the GPU steps are launched as graphs, where that room is compiled in.
#if GPU_BUILD && !defined(NO_GRAPH)
#define GENERATE_GRAPH "1"
#else
#define GENERATE_GRAPH "0"
#endif

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
        {NULL, "--graph",         FLAG_INT,    &s->graph, GENERATE_GRAPH, 0, 1,  NULL, SCOPE_PROCESS, TOPIC_DEVICE,
         "GPU: 1 launches the pass of a token as a CUDA graph. The texts are the same."},
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
    if (g->generate) s->evaluate = 1, s->B = 1, s->total_batch = 0, s->graph = g->graph;  // one sequence
    return g->generate > 0;
}

enum { GENERATION_TEXTS = 64 };  // the most that are generated together

// Texts that are being generated.
typedef struct {
    int* tokens;      // [texts, room]; the first `prompt` of each are the prompt
    int* length;      // [texts]; below `count` if the token that ends an answer was drawn
    int texts, room;  // of this group; tokens for which each has memory
    int going;        // texts that have not ended
    int count;        // tokens so far
    int prompt;
    int hidden;      // leading tokens that are not printed: end-of-text, or the message of a chat
    int begin;       // first token of the window
    int not_finite;  // the logits were not finite: the texts are meaningless
    int end;         // the token that ends an answer; it is not part of the text; -1: none
    int T, V, can_cache;
    Sampler sampler;
    int64_t written;                 // new tokens of the texts that are printed
    int64_t first;                   // those that were drawn first
    double begun;                    // and when, 0 before
    uint64_t key[GENERATION_TEXTS];  // of the random numbers
} Generation;

static inline int* generation_text(const Generation* g, int n) { return g->tokens + (size_t)n * (size_t)g->room; }

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
    g->texts = min_int(s->samples, min_int(T, GENERATION_TEXTS)), g->room = g->prompt + s->generate;
    g->tokens = (int*)xmalloc((size_t)g->texts * (size_t)g->room * sizeof(int));
    g->length = (int*)xmalloc((size_t)g->texts * sizeof(int));
    for (int n = 0; n < g->texts; n++)
        if (prompt) memcpy(generation_text(g, n), prompt + dropped, (size_t)g->prompt * sizeof(int));
        else *generation_text(g, n) = run_end_of_text(r, V);
    free(prompt);
}

static inline void generation_close(Generation* g) { free(g->tokens), free(g->length); }

// Restart `texts` texts from the prompt. Each text number, here from `number` on, and each step of the run that is
// resumed has its own random numbers.
static inline void generation_begin(Generation* g, const Run* r, int number, int texts) {
    g->texts = g->going = texts, g->count = g->prompt, g->begin = g->not_finite = 0;
    for (int n = 0; n < texts; n++) {
        g->length[n] = g->count;
        g->key[n] = rng_stream((uint64_t)r->settings.seed, (uint64_t)r->step, (uint32_t)(number + n), SITE_SAMPLE);
    }
}

// Place the window for the next token. Returns the number of its tokens.
static inline int generation_window(Generation* g) {
    if (g->count - g->begin > g->T) g->begin += max_int(g->T / 4, 1);
    return g->count - g->begin;
}

// Append a token to each text; -1: the logits were not finite. After the one that ends a text, they do not count.
static inline void generation_append(Generation* g, const int* tokens) {
    g->going = 0;
    for (int n = 0; n < g->texts; n++) {
        g->not_finite |= tokens[n] < 0;
        generation_text(g, n)[g->count] = max_int(tokens[n], 0);
        if (g->length[n] == g->count && tokens[n] != g->end) g->length[n]++, g->going++;
    }
    g->count++;
    if (!g->begun) g->begun = now_seconds(), g->first = g->texts;
}

// Print the texts, of which the first is number `number`, with lines that separate them.
static inline void generation_print(Generation* g, const Run* r, int number) {
    if (g->not_finite)
        die(STOPPED_BY_NAN,
            "--generate: the model's logits are not finite; take an earlier checkpoint or another model");
    for (int n = 0; n < g->texts; n++) {
        Text text = run_decode(r, generation_text(g, n) + g->hidden, g->length[n] - g->hidden);
        if (number + n > 0) printf("---\n");
        fwrite(text.text, 1, text.length, stdout);  // bytes of any kind
        printf("\n");
        free(text.text);
        g->written += g->length[n] - g->prompt;
    }
    fflush(stdout);
}

// Print the speed to stderr, because stdout has only the texts. The first tokens load kernels and try matmul
// algorithms, which may take longer than all others.
static inline void generation_print_speed(const Generation* g, const Run* r, double seconds) {
    if (r->group.rank > 0 || ferror(stdout)) return;
    fprintf(stderr, "%lld tokens in %.2f s", (long long)g->written, seconds);
    if (g->written > g->first)
        fprintf(stderr, ": %.1f tokens/s after the first",
                (double)(g->written - g->first) / fmax(now_seconds() - g->begun, 1e-9));
    fprintf(stderr, "\n");
}

#endif
