/* GPT-2's configuration: Hugging Face's config.json or a descriptor, and the tensors that weight files may have. */
#ifndef LLMC_GPT2_CONFIG_H
#define LLMC_GPT2_CONFIG_H

#include "llmc/model/config.h"
#include "llmc/optim/model_buffers.h"

typedef struct {
    int L, NH, C, F, V, T;  // T: positions, the maximum sequence length
    int tied;               // 1: the head uses the token embedding's weight
    Gelu gelu;
    double eps, init_range;
    double embedding_dropout, attention_dropout, residual_dropout;
} Gpt2Config;

static const char* const GPT2_HEAD[][2] = {{"wte.weight", "lm_head.weight"}};  // tensors that may be tied

// clang-format off
static const ConfigRow GPT2_CONFIG[] = {
    // key                             type         field                                   default        allowed     descriptor
    {"activation_function",             CONFIG_GELU, offsetof(Gpt2Config, gelu),              GELU_TANH,     0, 1},
    {"n_layer",                         CONFIG_INT,  offsetof(Gpt2Config, L),                 CONFIG_NEEDED, 1, 1 << 12, "L"},
    {"n_head",                          CONFIG_INT,  offsetof(Gpt2Config, NH),                CONFIG_NEEDED, 1, 1 << 12, "NH"},
    {"n_embd",                          CONFIG_INT,  offsetof(Gpt2Config, C),                 CONFIG_NEEDED, 1, 1 << 20, "C"},
    {"n_inner",                         CONFIG_INT,  offsetof(Gpt2Config, F),                 0,             0, 1 << 22, "F"},
    {"n_positions",                     CONFIG_INT,  offsetof(Gpt2Config, T),                 CONFIG_NEEDED, 1, 1 << 20, "T"},
    {"vocab_size",                      CONFIG_INT,  offsetof(Gpt2Config, V),                 CONFIG_NEEDED, 1, 1 << 24, "V"},
    {"layer_norm_epsilon",              CONFIG_REAL, offsetof(Gpt2Config, eps),               1e-5,          0, 1},
    {"initializer_range",               CONFIG_REAL, offsetof(Gpt2Config, init_range),        0.02,          0, 1},
    {"embd_pdrop",                      CONFIG_REAL, offsetof(Gpt2Config, embedding_dropout), 0.1,           0, 0.999},
    {"attn_pdrop",                      CONFIG_REAL, offsetof(Gpt2Config, attention_dropout), 0.1,           0, 0.999},
    {"resid_pdrop",                     CONFIG_REAL, offsetof(Gpt2Config, residual_dropout),  0.1,           0, 0.999},
    {"tie_word_embeddings",             CONFIG_BOOL, offsetof(Gpt2Config, tied),              1,             0, 1, "tied"},
    {"scale_attn_weights",              CONFIG_BOOL, CONFIG_NO_FIELD,                         1,             1, 1},
    {"scale_attn_by_inverse_layer_idx", CONFIG_BOOL, CONFIG_NO_FIELD,                         0,             0, 0},
    {"add_cross_attention",             CONFIG_BOOL, CONFIG_NO_FIELD,                         0,             0, 0},
};
// clang-format on

// A published size, or "L=4,C=128,NH=4,V=257,T=256,F=512,tied=1", where V defaults to `data_V` and F to 4 C.
static inline Gpt2Config gpt2_config_from_descriptor(const char* text, int data_V) {
    static const ConfigPublished published[] = {{"d12", "L=12,NH=12,C=768,V=50257,T=1024"},
                                                {"d24", "L=24,NH=16,C=1024,V=50257,T=1024"},
                                                {"d36", "L=36,NH=20,C=1280,V=50257,T=1024"},
                                                {"d48", "L=48,NH=25,C=1600,V=50257,T=1024"}};
    Gpt2Config c = {.L = 4, .NH = 4, .C = 128, .V = data_V, .T = 256, .tied = 1, .gelu = GELU_TANH};
    c.eps = 1e-5, c.init_range = 0.02;
    config_sizes_find(&c, GPT2_CONFIG, COUNT_OF(GPT2_CONFIG), published, COUNT_OF(published), text,
                      "d12, d24, d36, d48, nor sizes like L=4,C=128,NH=4,T=256");
    return c;
}

// Read a config.json. An unsupported value is an error that reports the key.
static inline Gpt2Config gpt2_config_read(const char* path) {
    Json json;
    Gpt2Config c;
    json_load(&json, path, (size_t)1 << 20);
    config_expect(json.root, "model_type", "gpt2", path);
    config_rows_read(&c, GPT2_CONFIG, COUNT_OF(GPT2_CONFIG), json.root, path);
    json_free(&json);
    return c;
}

// Initial values, and which tensors a weight file may have or lack.
static inline WeightRules gpt2_weight_rules(const Gpt2Config* c) {
    static const char* const ignored[] = {".attn.bias", ".attn.masked_bias", "lm_head.weight"};
    const double std = c->init_range;
    FileRules file = {.optional_prefix = "transformer.", .ignored = ignored, .ignored_count = 2 + c->tied};
    file.init.std = std, file.init.residual_std = std / sqrt(2.0 * c->L);
    return (WeightRules){.file = file};
}

#endif
