/* The ops of a model in launch order, with the tensors that each of them writes. --explain copies and describes these.
 * A list here follows the trainer's forward() or backward(). explain/record.h compares each op that runs with the list
 * and ends the run if they differ.
 *
 * Tensors have the names of the trainer's activation tables. A buffer that is written twice has two names: `attproj`
 * and `fcproj` are the outputs of the branches, which the residual sums `mid` and `out` overwrite. `grad.X` is the
 * gradient of the tensor X. */
#ifndef APPS_EXPLAIN_OPS_H
#define APPS_EXPLAIN_OPS_H

#include "llmc/device/scope.h"

enum { EXPLAIN_OUTPUTS = 5 };

// A tensor of the op's layer, or outside the layers if the op is. If `shift` is not 0, it is in the layer `shift` away
// instead or, if there is no such layer, `edge`, outside the layers.
typedef struct {
    const char* name;
    const char* about;   // NULL: `about` of nothing but its name
    const char* buffer;  // row of the tables of activations; NULL: `name`
    int shift;
    const char* edge;
} ExplainOutput;

typedef struct {
    const char *op, *formula;
    ExplainOutput out[EXPLAIN_OUTPUTS];
} ExplainOp;

// Consecutive ops, run once or for each layer: upwards in the forward pass, downwards in the backward pass.
typedef struct {
    const ExplainOp* ops;
    int count;
    Direction direction;
    int per_layer;
} ExplainSection;

// clang-format off
#define EXPLAIN_SECTION(ops, direction, per_layer) {ops, COUNT_OF(ops), direction, per_layer}

// ---------------------------------------------------------------------------------------------------------
// Pre-layernorm blocks and a language model's head

static const ExplainOp PRE_NORM_START[] = {
    {"embedding_forward", "embedded[t] = wte[token[t]] + wpe[t]", {{"embedded", "token plus position: the residual stream begins"}}},
    {"layernorm_forward", "ln1 = (embedded - mean) * rstd * ln1.w + ln1.b",
     {{"ln1", "the first layer's input, normalised", NULL, 1}, {"ln1_mean", "mean of each row", NULL, 1}, {"ln1_rstd", "1 / standard deviation of each row", NULL, 1}}},
};
static const ExplainOp PRE_NORM_BLOCK[] = {
    {"matmul_forward", "qkv = ln1 qkv.w^T + qkv.b", {{"qkv", "queries, keys and values of all heads"}}},
    {"attention_forward", "att = P v,  P = softmax(q k^T / sqrt(HS)), each token over itself and earlier ones",
     {{"att", "values, mixed by the attention of each head"}, {"lse", "log of the softmax's denominator, for each head and token"}}},
    {"matmul_forward", "attproj = att attproj.w^T + attproj.b", {{"attproj", "what the attention adds to the residual stream", "mid"}}},
    {"residual_layernorm_forward", "mid = residual + attproj;  ln2 = (mid - mean) * rstd * ln2.w + ln2.b",
     {{"mid", "residual stream after the attention"}, {"ln2", "the MLP's input, normalised"}, {"ln2_mean", "mean of each row"}, {"ln2_rstd", "1 / standard deviation of each row"}}},
    {"matmul_gelu_forward", "fc_pre = ln2 fc.w^T + fc.b;  fc = gelu(fc_pre)",
     {{"fc_pre", "the MLP's hidden layer before GELU"}, {"fc", "the MLP's hidden layer"}}},
    {"matmul_forward", "fcproj = fc fcproj.w^T + fcproj.b", {{"fcproj", "what the MLP adds to the residual stream", "out"}}},
    {"residual_layernorm_forward", "out = mid + fcproj;  next layer's ln1, or lnf = (out - mean) * rstd * w + b",
     {{"out", "residual stream after the layer"}, {"ln1", "the next layer's input, normalised", NULL, 1, "lnf"},
      {"ln1_mean", "mean of each row", NULL, 1, "lnf_mean"}, {"ln1_rstd", "1 / standard deviation of each row", NULL, 1, "lnf_rstd"}}},
};
static const ExplainOp PRE_NORM_HEAD[] = {
    {"matmul_forward", "logits = lnf head^T", {{"logits", "score of each token of the vocabulary as the next one"}}},
};
static const ExplainOp PRE_NORM_LOSS[] = {
    {"classifier_forward", "loss[t] = log(sum of exp(logits[t])) - logits[t, next token]", {{"losses", "loss of each token"}}},
};
static const ExplainOp PRE_NORM_HEAD_BACKWARD[] = {
    {"classifier_backward", "loss[t] = log(sum of exp(logits[t])) - logits[t, next token];  grad.logits = (softmax(logits) - onehot(next token)) / tokens",
     {{"losses", "loss of each token"}, {"grad.logits", "gradient of the logits", "logits"}}},
    {"matmul_backward_weight", "grad of head = grad.logits^T lnf", {{NULL}}},
    {"matmul_backward_input", "grad.lnf = grad.logits head", {{"grad.lnf", "gradient of the final layernorm's output", "dln"}}},
    {"residual_layernorm_backward", "grad.out = through the layernorm from grad.lnf",
     {{"grad.out", "gradient of the last layer's output", "dx", -1, "grad.embedded"}}},
};
static const ExplainOp PRE_NORM_BLOCK_BACKWARD[] = {
    {"matmul_backward_weight", "grad of fcproj.w = grad.out^T fc", {{NULL}}},
    {"matmul_gelu_backward_input", "grad.fc_pre = (grad.out fcproj.w) * gelu'(fc_pre);  grad of fc.b = column sums",
     {{"grad.fc_pre", "gradient of the MLP's hidden layer before GELU", "dfc"}}},
    {"matmul_backward_weight", "grad of fc.w = grad.fc_pre^T ln2", {{NULL}}},
    {"matmul_backward_input", "grad.ln2 = grad.fc_pre fc.w", {{"grad.ln2", "gradient of the MLP's input", "dln"}}},
    {"residual_layernorm_backward", "grad.mid = grad.out + through the layernorm from grad.ln2;  grad of attproj.b = column sums",
     {{"grad.mid", "gradient of the residual stream after the attention", "dx"}}},
    {"matmul_backward_weight", "grad of attproj.w = grad.mid^T att", {{NULL}}},
    {"matmul_backward_input", "grad.att = grad.mid attproj.w", {{"grad.att", "gradient of the attention's output", "datt"}}},
    {"attention_backward", "grad.qkv: through att = P v and the softmax", {{"grad.qkv", "gradient of queries, keys and values", "dqkv"}}},
    {"matmul_backward_weight", "grad of qkv.w = grad.qkv^T ln1;  grad of qkv.b = column sums", {{NULL}}},
    {"matmul_backward_input", "grad.ln1 = grad.qkv qkv.w", {{"grad.ln1", "gradient of the attention's input", "dln"}}},
    {"residual_layernorm_backward", "gradient of the layer's input = grad.mid + through the layernorm from grad.ln1",
     {{"grad.out", "gradient of the layer below's output", "dx", -1, "grad.embedded"}}},
};
static const ExplainOp PRE_NORM_START_BACKWARD[] = {
    {"embedding_backward", "grad of wte[token[t]] += grad.embedded[t];  grad of wpe[t] += grad.embedded[t]", {{NULL}}},
};

static const ExplainSection PRE_NORM_FORWARD[] = {
    EXPLAIN_SECTION(PRE_NORM_START, FORWARD, 0), EXPLAIN_SECTION(PRE_NORM_BLOCK, FORWARD, 1), EXPLAIN_SECTION(PRE_NORM_HEAD, FORWARD, 0),
};
static const ExplainSection PRE_NORM_LOSS_ONLY[] = {EXPLAIN_SECTION(PRE_NORM_LOSS, FORWARD, 0)};
static const ExplainSection PRE_NORM_BACKWARD[] = {
    EXPLAIN_SECTION(PRE_NORM_HEAD_BACKWARD, BACKWARD, 0), EXPLAIN_SECTION(PRE_NORM_BLOCK_BACKWARD, BACKWARD, 1),
    EXPLAIN_SECTION(PRE_NORM_START_BACKWARD, BACKWARD, 0),
};

// ---------------------------------------------------------------------------------------------------------
// Post-layernorm blocks, with the head of masked-token prediction

static const ExplainOp POST_NORM_START[] = {
    {"embedding_forward", "embedded[t] = word[token[t]] + position[t] + type[t]", {{"embedded", "token plus position plus segment"}}},
    {"layernorm_forward", "ln0 = (embedded - mean) * rstd * ln0.w + ln0.b",
     {{"ln0", "the first layer's input"}, {"ln0_mean", "mean of each row"}, {"ln0_rstd", "1 / standard deviation of each row"}}},
};
static const ExplainOp POST_NORM_BLOCK[] = {
    {"matmul_forward", "qkv = x qkv.w^T + qkv.b,  x the layer's input", {{"qkv", "queries, keys and values of all heads"}}},
    {"attention_forward", "att = P v,  P = softmax(q k^T / sqrt(HS)), each token over all",
     {{"att", "values, mixed by the attention of each head"}, {"lse", "log of the softmax's denominator, for each head and token"}}},
    {"matmul_forward", "attproj = att attproj.w^T + attproj.b", {{"attproj", "what the attention adds to the residual stream", "mid"}}},
    {"residual_layernorm_forward", "mid = x + attproj;  ln1 = (mid - mean) * rstd * ln1.w + ln1.b",
     {{"mid", "sum before the attention's layernorm"}, {"ln1", "residual stream after the attention"}, {"ln1_mean", "mean of each row"},
      {"ln1_rstd", "1 / standard deviation of each row"}}},
    {"matmul_gelu_forward", "fc_pre = ln1 fc.w^T + fc.b;  fc = gelu(fc_pre)",
     {{"fc_pre", "the MLP's hidden layer before GELU"}, {"fc", "the MLP's hidden layer"}}},
    {"matmul_forward", "fcproj = fc fcproj.w^T + fcproj.b", {{"fcproj", "what the MLP adds to the residual stream", "out"}}},
    {"residual_layernorm_forward", "out = ln1 + fcproj;  ln2 = (out - mean) * rstd * ln2.w + ln2.b",
     {{"out", "sum before the MLP's layernorm"}, {"ln2", "residual stream after the layer"}, {"ln2_mean", "mean of each row"},
      {"ln2_rstd", "1 / standard deviation of each row"}}},
};
static const ExplainOp POST_NORM_MASKED[] = {
    {"gather_forward", "masked = the masked tokens' rows of the last layer's output", {{"masked", "last hidden states of the masked tokens"}}},
    {"matmul_gelu_forward", "transform_pre = masked transform.w^T + transform.b;  transform = gelu(transform_pre)",
     {{"transform_pre", "the head's hidden layer before GELU"}, {"transform", "the head's hidden layer"}}},
    {"layernorm_forward", "lnt = (transform - mean) * rstd * lnt.w + lnt.b",
     {{"lnt", "the head's hidden layer, normalised"}, {"lnt_mean", "mean of each row"}, {"lnt_rstd", "1 / standard deviation of each row"}}},
    {"matmul_forward", "logits = lnt decoder.w^T + decoder.b", {{"logits", "score of each token of the vocabulary for each [MASK]"}}},
};
static const ExplainOp POST_NORM_MASKED_LOSS[] = {
    {"classifier_forward", "loss[i] = log(sum of exp(logits[i])) - logits[i, the word]", {{"losses", "loss of each masked token"}}},
    {"accuracy_forward", "correct = masked tokens whose word has the largest logit", {{NULL}}},
};
static const ExplainOp POST_NORM_LOSS_BACKWARD[] = {
    {"classifier_backward", "loss[i] = log(sum of exp(logits[i])) - logits[i, the word];  grad.logits = (softmax(logits) - onehot(word)) / words",
     {{"losses", "loss of each masked token"}, {"grad.logits", "gradient of the logits", "logits"}}},
};
static const ExplainOp POST_NORM_MASKED_BACKWARD[] = {
    {"matmul_backward_weight", "grad of decoder.w = grad.logits^T lnt;  grad of decoder.b = column sums", {{NULL}}},
    {"matmul_backward_input", "grad.lnt = grad.logits decoder.w", {{"grad.lnt", "gradient of the normalised hidden layer", "dlnt"}}},
    {"layernorm_backward", "grad.transform = through the layernorm from grad.lnt", {{"grad.transform", "gradient of the head's hidden layer", "dlnt"}}},
    {"gelu_backward", "grad.transform_pre = grad.transform * gelu'(transform_pre)", {{"grad.transform_pre", "gradient before GELU", "dlnt"}}},
    {"matmul_backward_weight", "grad of transform.w = grad.transform_pre^T masked;  grad of transform.b = column sums", {{NULL}}},
    {"matmul_backward_input", "grad.masked = grad.transform_pre transform.w", {{"grad.masked", "gradient of the masked tokens' hidden states", "dmasked"}}},
    {"gather_backward", "grad.ln2 = grad.masked in the masked tokens' rows, 0 elsewhere",
     {{"grad.ln2", "gradient of the last layer's output", "dx", -1, "grad.ln0"}}},
};
static const ExplainOp POST_NORM_BLOCK_BACKWARD[] = {
    {"residual_layernorm_backward", "grad.out = through the layernorm from grad.ln2;  grad of fcproj.b = column sums",
     {{"grad.out", "gradient of the sum before the MLP's layernorm", "dx"}}},
    {"matmul_backward_weight", "grad of fcproj.w = grad.out^T fc", {{NULL}}},
    {"matmul_gelu_backward_input", "grad.fc_pre = (grad.out fcproj.w) * gelu'(fc_pre);  grad of fc.b = column sums",
     {{"grad.fc_pre", "gradient of the MLP's hidden layer before GELU", "dfc"}}},
    {"matmul_backward_weight", "grad of fc.w = grad.fc_pre^T ln1", {{NULL}}},
    {"matmul_backward_input", "grad.ln1 = grad.out + grad.fc_pre fc.w", {{"grad.ln1", "gradient of the residual stream after the attention", "dx"}}},
    {"residual_layernorm_backward", "grad.mid = through the layernorm from grad.ln1;  grad of attproj.b = column sums",
     {{"grad.mid", "gradient of the sum before the attention's layernorm", "dx"}}},
    {"matmul_backward_weight", "grad of attproj.w = grad.mid^T att", {{NULL}}},
    {"matmul_backward_input", "grad.att = grad.mid attproj.w", {{"grad.att", "gradient of the attention's output", "datt"}}},
    {"attention_backward", "grad.qkv: through att = P v and the softmax", {{"grad.qkv", "gradient of queries, keys and values", "dqkv"}}},
    {"matmul_backward_weight", "grad of qkv.w = grad.qkv^T x;  grad of qkv.b = column sums", {{NULL}}},
    {"matmul_backward_input", "gradient of the layer's input = grad.mid + grad.qkv qkv.w",
     {{"grad.ln2", "gradient of the layer below's output", "dx", -1, "grad.ln0"}}},
};
static const ExplainOp POST_NORM_START_BACKWARD[] = {
    {"layernorm_backward", "grad.embedded = through the layernorm from grad.ln0", {{"grad.embedded", "gradient of the embeddings' sum", "dx"}}},
    {"embedding_backward", "grad of word[token[t]] += grad.embedded[t];  likewise position and type", {{NULL}}},
};
// clang-format on

#endif
