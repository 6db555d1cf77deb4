/* BERT's configuration: Hugging Face's config.json or a descriptor, and the tensors that weight files may have. */
#ifndef LLMC_BERT_CONFIG_H
#define LLMC_BERT_CONFIG_H

#include "llmc/bert/fill_mask.h"
#include "llmc/model/config.h"

typedef struct {
    int L, NH, C, F, V, T, types;  // T: positions, the maximum sequence length
    int padding;                   // the padding token, whose embedding is not trained; -1: none
    int next;                      // 1: next-sentence prediction
    int tied;                      // 1: the decoder uses the word embedding's weight
    Gelu gelu;
    double eps, init_range;
    double hidden_dropout, attention_dropout, classifier_dropout;
} BertConfig;

// clang-format off
static const char* const BERT_HEAD[][2] = {  // may be tied
    {"embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"},
    {"cls.predictions.bias",              "cls.predictions.decoder.bias"},
};
static const char* const BERT_OLD_NAMES[][2] = {  // older names in files
    {"cls.predictions.bias",         "cls.predictions.decoder.bias"},
    {"cls.predictions.decoder.bias", "cls.predictions.bias"},
    {"LayerNorm.weight",             "LayerNorm.gamma"},
    {"LayerNorm.bias",               "LayerNorm.beta"},
};

static const ConfigRow BERT_CONFIG[] = {
    // key                            type         field                                   default        allowed     descriptor
    {"hidden_act",                     CONFIG_GELU, offsetof(BertConfig, gelu),              GELU_ERF,      0, 1},
    {"num_hidden_layers",              CONFIG_INT,  offsetof(BertConfig, L),                 CONFIG_NEEDED, 1, 1 << 12, "L"},
    {"num_attention_heads",            CONFIG_INT,  offsetof(BertConfig, NH),                CONFIG_NEEDED, 1, 1 << 12, "NH"},
    {"hidden_size",                    CONFIG_INT,  offsetof(BertConfig, C),                 CONFIG_NEEDED, 1, 1 << 20, "C"},
    {"intermediate_size",              CONFIG_INT,  offsetof(BertConfig, F),                 CONFIG_NEEDED, 1, 1 << 22, "F"},
    {"max_position_embeddings",        CONFIG_INT,  offsetof(BertConfig, T),                 CONFIG_NEEDED, 1, 1 << 20, "T"},
    {"vocab_size",                     CONFIG_INT,  offsetof(BertConfig, V),                 CONFIG_NEEDED, 1, 1 << 24, "V"},
    {"type_vocab_size",                CONFIG_INT,  offsetof(BertConfig, types),             2,             2, 1 << 10},
    {"layer_norm_eps",                 CONFIG_REAL, offsetof(BertConfig, eps),               1e-12,         0, 1},
    {"initializer_range",              CONFIG_REAL, offsetof(BertConfig, init_range),        0.02,          0, 1},
    {"hidden_dropout_prob",            CONFIG_REAL, offsetof(BertConfig, hidden_dropout),    0.1,           0, 0.999},
    {"attention_probs_dropout_prob",   CONFIG_REAL, offsetof(BertConfig, attention_dropout), 0.1,           0, 0.999},
    {"pad_token_id",                   CONFIG_TOKEN, offsetof(BertConfig, padding),          0,             -1, 1 << 24},
    {"tie_word_embeddings",            CONFIG_BOOL, offsetof(BertConfig, tied),              1,             0, 1, "tied"},
    {"is_decoder",                     CONFIG_BOOL, CONFIG_NO_FIELD,                         0,             0, 0},
    {"add_cross_attention",            CONFIG_BOOL, CONFIG_NO_FIELD,                         0,             0, 0},
};
// clang-format on

// "bert-base", "bert-large", or "L=4,C=128,NH=4,V=261,T=128,F=512,tied=1". V: `data_V` by default, F: 4 C.
static inline BertConfig bert_config_from_descriptor(const char* text, int data_V) {
    static const ConfigPublished published[] = {{"bert-base", "L=12,NH=12,C=768,V=30522,T=512"},
                                                {"bert-large", "L=24,NH=16,C=1024,V=30522,T=512"}};
    BertConfig c = {.L = 4, .NH = 4, .C = 128, .V = data_V, .T = 128, .types = 2, .next = 1, .tied = 1};
    c.gelu = GELU_ERF, c.eps = 1e-12, c.init_range = 0.02;
    config_sizes_find(&c, BERT_CONFIG, COUNT_OF(BERT_CONFIG), published, COUNT_OF(published), text,
                      "bert-base, bert-large, nor sizes like L=4,C=128,NH=4,T=128");
    return c;
}

// The value of `key`, a probability, or `fallback` if the key is absent.
static inline double bert_config_probability(const JsonNode* json, const char* key, double fallback, const char* file) {
    double p = json_get_double_or(json, key, fallback, file);
    if (!(p >= 0 && p < 1)) die(USAGE, "%s: key \"%s\": %g is out of range; allowed: 0..1", file, key, p);
    return p;
}

// Read a config.json. An unsupported value is an error that reports the key.
static inline BertConfig bert_config_read(const char* path) {
    Json json;
    BertConfig c;
    json_load(&json, path, CONFIG_MAX_FILE);
    config_expect(json.root, "model_type", "bert", path);
    config_expect(json.root, "position_embedding_type", "absolute", path);
    config_rows_read(&c, BERT_CONFIG, COUNT_OF(BERT_CONFIG), json.root, path);
    c.classifier_dropout = bert_config_probability(json.root, "classifier_dropout", c.hidden_dropout, path);
    c.next = 1;
    json_free(&json);
    return c;
}

// The configuration of the model in `directory`, or of -e if NULL. --dropout overrides all probabilities.
static inline BertConfig bert_config_find(const char* directory, const Settings* s, const WordPiece* words) {
    char* path = directory ? xprintf("%s/config.json", directory) : NULL;
    int data_V = words->size ? words->size : 30522;
    BertConfig config = path ? bert_config_read(path) : bert_config_from_descriptor(s->model, data_V);
    if (!path && words->size) config.padding = words->pad;
    const double p = s->dropout;
    if (p >= 0) config.hidden_dropout = config.attention_dropout = config.classifier_dropout = p;
    free(path);
    return config;
}

// The text of the model's config.json. `keys`: members that describe a task's head.
static inline Text bert_config_write(const BertConfig* c, const char* architecture, Text keys) {
    return config_text(architecture, "bert", keys, c, BERT_CONFIG, COUNT_OF(BERT_CONFIG));
}

// The configuration of the model at r->source, for pre-training.
static inline BertConfig bert_config_of_run(Run* r, const MlmSettings* s, WordPiece* words) {
    fill_mask_find_words(words, r, r->directory, r->data_directory);
    BertConfig config = bert_config_find(r->directory, &r->settings, words);
    config.next = s->next_sentence;
    if (r->weights && config.tied)
        config.tied = weights_tie(r->weights, "bert.", BERT_HEAD, COUNT_OF(BERT_HEAD), r->group.rank == 0);
    return config;
}

// The same of a model for pre-training.
static inline Text bert_config_write_pretraining(const BertConfig* c) {
    return bert_config_write(c, c->next ? "BertForPreTraining" : "BertForMaskedLM", (Text){NULL, 0, 0});
}

// Initial values, and which tensors a weight file may have or lack: all heads, or only the second one.
static inline WeightRules bert_weight_rules(const BertConfig* c) {
    static const char* const ignored[] = {
        "embeddings.position_ids", "predictions.decoder.weight", "predictions.decoder.bias",
        "predictions.bias",                                                              // of a tied decoder
        "classifier.weight", "classifier.bias", "qa_outputs.weight", "qa_outputs.bias",  // of a fine-tuned model
        // Without a next-sentence head:
        "pooler.dense.weight", "pooler.dense.bias", "seq_relationship.weight", "seq_relationship.bias"};
    static const char* const may_lack[] = {"bert.pooler.", "cls."};
    FileRules file = {.optional_prefix = "bert.", .ignored = ignored, .ignored_count = c->next ? 8 : 12};
    file.aliases = BERT_OLD_NAMES, file.alias_count = COUNT_OF(BERT_OLD_NAMES), file.preferred_count = 1;
    file.may_lack = may_lack, file.may_lack_count = 2;
    file.init.std = file.init.residual_std = c->init_range;
    WeightRules rules = {.file = file};
    // The word embedding is the first tensor. The padding token's row starts as zero.
    if (c->padding >= 0) rules.zero_count = (size_t)c->C;
    rules.zero_begin = (size_t)max_int(c->padding, 0) * (size_t)c->C;
    return rules;
}

enum { BERT_UNREPORTED = 4 };  // the first names that bert_weight_rules() ignores: nothing is lost with them

// run_init_model(), and a line about tensors of the weight file that the model leaves out, such as another head. The
// first `unreported` names that the rules ignore are not worth a line.
static inline void bert_init_model(Run* r, ModelBuffers* b, WeightRules rules, int unreported) {
    run_init_model(r, b, rules);
    if (!r->weights || r->start) return;
    SafeTensors file;
    Text left_out = {NULL, 0, 0};
    weights_open(&file, r->weights);
    for (int i = 0; i < file.count; i++) {
        const SafeTensor* entry = &file.tensors[i];
        int is_known = 0;
        for (int k = 0; k < unreported; k++) is_known |= name_ends_with(entry->name, rules.file.ignored[k]);
        for (int k = 0; k < b->table.count && !is_known; k++)
            is_known = tensors_file_entry(&file, "", &b->table.tensors[k], &rules.file) == entry;
        if (!is_known) text_printf(&left_out, "%s%s", left_out.length ? ", " : "", entry->name);
    }
    if (left_out.length) printf("%s: has tensors that are left out: %s\n", r->weights, left_out.text);
    free(left_out.text);
    safetensors_close(&file);
}

#endif
