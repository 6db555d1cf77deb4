/* dev/ladder/gpt2_in_one_file.c for a web page: what the page calls, besides start(), step(), text() and tensor(), to
 * look into the model, and calls out of each function, by which the page marks what runs. Compiled to WebAssembly with
 * -finstrument-functions (build.py). worker.js calls it. */
#define EXPORT(name) __attribute__((export_name(#name)))
#define UNMARKED __attribute__((no_instrument_function))
#define IMPORT(name) UNMARKED __attribute__((import_module("page"), import_name(#name)))

// Called too often to be marked.
UNMARKED static float dot(const float* a, const float* b, int n);
UNMARKED static void add_scaled(float* y, float factor, const float* x, int n);
UNMARKED static void row_statistics(const float* x, int C, float* mean, float* rstd);
UNMARKED static void softmax(float* p, const float* x, int n);
UNMARKED static float gelu_tanh(float x);
UNMARKED static double random_uniform(void);
EXPORT(start) void start(int seed, int L, int C, int NH, int total);
EXPORT(step) double step(void);
EXPORT(text) void text(void);

#include "dev/ladder/gpt2_in_one_file.c"

// clang-format off
#define MARK(name) {#name, (void*)name}
#define MARK_BOTH(op) MARK(op##_forward), MARK(op##_backward)
static const struct {
    const char* name;
    void* function;
} MARKED[] = {
    MARK(step), MARK(zero_derivatives), MARK(forward), MARK(cross_entropy), MARK(backward), MARK(adamw),
    MARK(learning_rate), MARK_BOTH(embedding), MARK_BOTH(linear), MARK_BOTH(layernorm), MARK_BOTH(attention),
    MARK_BOTH(gelu), MARK_BOTH(residual)};
// clang-format on

IMPORT(enter) void page_enter(const char* name);
IMPORT(leave) void page_leave(void);

UNMARKED static const char* marked_name(const void* function) {
    for (size_t i = 0; i < sizeof MARKED / sizeof MARKED[0]; i++)
        if (MARKED[i].function == function) return MARKED[i].name;
    return NULL;
}

// The compiler puts calls of these at the beginning and at the end of every function.
UNMARKED void __cyg_profile_func_enter(void* function, void* caller) {
    const char* name = marked_name(function);
    (void)caller;
    if (name) page_enter(name);
}

UNMARKED void __cyg_profile_func_exit(void* function, void* caller) {
    (void)caller;
    if (marked_name(function)) page_leave();
}

// The page's text: at most T tokens. Its bytes are also where the page writes a tensor's name.
static int page_tokens[64];

EXPORT(tokens) int* tokens(void) { return page_tokens; }

EXPORT(find) Tensor* find(void) { return tensor((const char*)page_tokens); }

// Probabilities are to be read from the logits that this leaves, a row for each of the n tokens.
EXPORT(predict) void predict(int n) { forward(&model, page_tokens, 1, n); }

// Forward and backward for n > 1 tokens, each the target of the one before it. Returns the mean loss of the n - 1.
EXPORT(look) double look(int n) {
    zero_derivatives();
    predict(n);
    double loss = cross_entropy(model.logits, page_tokens + 1, n - 1, model.V);
    backward(&model, page_tokens, 1, n);
    return loss;
}

// The logits if the model ended after l layers: its head on what layer l reads.
EXPORT(lens) void lens(int l, int n) {
    layernorm_forward(model.lnf, l ? model.block[l - 1].out : model.embedded, model.to_lnf, n, model.C);
    linear_forward(model.logits, model.lnf, model.to_logits, n, model.C, model.V);
}
