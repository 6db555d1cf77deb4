/* Pre-train BERT, from scratch or from a Hugging Face directory, or fine-tune it to classify texts or to find answers in
 * them, on the CPU (gcc) or the GPU (nvcc): one source.
 *
 * Read it from top to bottom: the model's configuration, its tables of tensors, the forward pass, the backward pass,
 * then the settings and main(). A transformer block is two lists of ops, forward_block() and backward_block(); each
 * op is a header in llmc/ops/ that holds its formula, a plain C reference and the fast version.
 *
 * There is no padding: a micro-batch is a list of N real tokens, cut into S sequences of T tokens at most. The head sees
 * only the M of them that were masked.
 *
 * B batch, T longest sequence, V vocabulary (Vp as stored, padded), L layers, NH heads, HS head size, C = NH * HS
 * channels, F channels inside the MLP (4 C). */
#include <signal.h>

#include "llmc/base/log.h"       // terminal, log.jsonl, loss.svg
#include "llmc/base/schedule.h"  // learning rate of a step
#include "llmc/ops/accuracy.h"
#include "llmc/ops/attention.h"
#include "llmc/ops/classifier.h"
#include "llmc/ops/embedding.h"
#include "llmc/ops/gather.h"
#include "llmc/ops/gelu.h"
#include "llmc/ops/layernorm.h"
#include "llmc/ops/matmul.h"
#include "llmc/ops/next_sentence.h"
#include "llmc/run/comm.h"            // ranks
#include "llmc/run/config.h"          // config.json as rows
#include "llmc/run/fill.h"            // masked text, filled in
#include "llmc/run/mlm_data.h"        // sentences, their pairs and masks
#include "llmc/run/mlm_evaluation.h"  // losses and accuracies on held-out text
#include "llmc/run/mlm_settings.h"    // flags of pairs and masks
#include "llmc/run/optimizer.h"       // norm, loss scale, clipping, LAMB or AdamW
#include "llmc/run/plan.h"            // memory by what needs it
#include "llmc/run/profiler.h"        // where a step's time goes
#include "llmc/run/session.h"         // where a run stands, checkpoints, resume
#include "llmc/run/settings.h"        // flags that all trainers share
#include "llmc/run/steps.h"           // steps launched ahead, their results
#include "llmc/run/task_head.h"       // what fine-tuning puts on the encoder
#include "llmc/run/tasks.h"           // its examples and scores
#include "llmc/run/tensors.h"         // one table for tensors

// ---------------------------------------------------------------------------------------------------------
// Parameters. w of a linear layer is [out, in], in memory as in files. Q, K and V are three tensors that lie side by side,
// so that qkv, which points at the first, is one layer [3C, C] too.

typedef struct {
    Affine qkv, key, value, attproj, ln1, fc, fcproj, ln2;
    const real *ln1_exact, *ln2_exact;  // their w in full precision
} BlockParams;

typedef struct {
    floatX *word, *position, *type;
    Affine ln0;             // of the embeddings
    Affine transform, lnt;  // before the decoder, whose weight is `word`
    floatX* decoder_bias;   // [Vp]
    Affine pooler, next;    // what says whether the second segment follows the first
    Affine output;          // of a task, instead of all heads above
    const real *ln0_exact, *lnt_exact;
    BlockParams* h;
} Params;

// The same fields for gradients: the tables below bind both kinds of structs.
typedef struct {
    AffineGradient qkv, key, value, attproj, ln1, fc, fcproj, ln2;
} BlockGradients;

typedef struct {
    real *word, *position, *type;
    AffineGradient ln0, transform, lnt;
    real* decoder_bias;
    AffineGradient pooler, next, output;
    BlockGradients* h;
} Gradients;

// Symbols of the tables' dimensions; ONE_DIM ends the shape of a vector.
// clang-format off
enum { ONE_DIM, DIM_V, DIM_VP, DIM_T, DIM_TYPES, DIM_C, DIM_3C, DIM_F, DIM_N, DIM_NH, DIM_M, DIM_S, DIM_NEXT,
       DIM_LOSSES, DIM_K, DIM_KP, DIM_ROWS, DIM_OUT, DIM_DN, DIMS };

static const TensorRow EMBEDDING_ROWS[] = {
    // name in files                                             field                               shape                 stored           initial values  decay
    {"bert.embeddings.word_embeddings.weight",                     offsetof(Params, word),             {DIM_V, DIM_C},     OWN,     DIM_VP, INIT_NORMAL,    1},
    {"bert.embeddings.position_embeddings.weight",                 offsetof(Params, position),         {DIM_T, DIM_C},     OWN,     0,      INIT_NORMAL,    1},
    {"bert.embeddings.token_type_embeddings.weight",               offsetof(Params, type),             {DIM_TYPES, DIM_C}, OWN,     0,      INIT_NORMAL,    1},
    {"bert.embeddings.LayerNorm.weight",                           offsetof(Params, ln0.w),            {DIM_C},            OWN,     0,      INIT_ONE,       0, AS_IN_MEMORY, offsetof(Params, ln0_exact)},
    {"bert.embeddings.LayerNorm.bias",                             offsetof(Params, ln0.b),            {DIM_C},            OWN,     0,      INIT_ZERO,      0},
};
static const TensorRow BLOCK_ROWS[] = {
    {"bert.encoder.layer.%d.attention.self.query.weight",          offsetof(BlockParams, qkv.w),       {DIM_C, DIM_C},     OWN,     0,      INIT_NORMAL,    1},
    {"bert.encoder.layer.%d.attention.self.key.weight",            offsetof(BlockParams, key.w),       {DIM_C, DIM_C},     GROUPED, 0,      INIT_NORMAL,    1},
    {"bert.encoder.layer.%d.attention.self.value.weight",          offsetof(BlockParams, value.w),     {DIM_C, DIM_C},     GROUPED, 0,      INIT_NORMAL,    1},
    {"bert.encoder.layer.%d.attention.self.query.bias",            offsetof(BlockParams, qkv.b),       {DIM_C},            OWN,     0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.attention.self.key.bias",              offsetof(BlockParams, key.b),       {DIM_C},            GROUPED, 0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.attention.self.value.bias",            offsetof(BlockParams, value.b),     {DIM_C},            GROUPED, 0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.attention.output.dense.weight",        offsetof(BlockParams, attproj.w),   {DIM_C, DIM_C},     OWN,     0,      INIT_NORMAL,    1},
    {"bert.encoder.layer.%d.attention.output.dense.bias",          offsetof(BlockParams, attproj.b),   {DIM_C},            OWN,     0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.attention.output.LayerNorm.weight",    offsetof(BlockParams, ln1.w),       {DIM_C},            OWN,     0,      INIT_ONE,       0, AS_IN_MEMORY, offsetof(BlockParams, ln1_exact)},
    {"bert.encoder.layer.%d.attention.output.LayerNorm.bias",      offsetof(BlockParams, ln1.b),       {DIM_C},            OWN,     0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.intermediate.dense.weight",            offsetof(BlockParams, fc.w),        {DIM_F, DIM_C},     OWN,     0,      INIT_NORMAL,    1},
    {"bert.encoder.layer.%d.intermediate.dense.bias",              offsetof(BlockParams, fc.b),        {DIM_F},            OWN,     0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.output.dense.weight",                  offsetof(BlockParams, fcproj.w),    {DIM_C, DIM_F},     OWN,     0,      INIT_NORMAL,    1},
    {"bert.encoder.layer.%d.output.dense.bias",                    offsetof(BlockParams, fcproj.b),    {DIM_C},            OWN,     0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.output.LayerNorm.weight",              offsetof(BlockParams, ln2.w),       {DIM_C},            OWN,     0,      INIT_ONE,       0, AS_IN_MEMORY, offsetof(BlockParams, ln2_exact)},
    {"bert.encoder.layer.%d.output.LayerNorm.bias",                offsetof(BlockParams, ln2.b),       {DIM_C},            OWN,     0,      INIT_ZERO,      0},
};
static const TensorRow HEAD_ROWS[] = {
    {"cls.predictions.bias",                                       offsetof(Params, decoder_bias),     {DIM_V},            OWN,     DIM_VP, INIT_ZERO,      0},
    {"cls.predictions.transform.dense.weight",                     offsetof(Params, transform.w),      {DIM_C, DIM_C},     OWN,     0,      INIT_NORMAL,    1},
    {"cls.predictions.transform.dense.bias",                       offsetof(Params, transform.b),      {DIM_C},            OWN,     0,      INIT_ZERO,      0},
    {"cls.predictions.transform.LayerNorm.weight",                 offsetof(Params, lnt.w),            {DIM_C},            OWN,     0,      INIT_ONE,       0, AS_IN_MEMORY, offsetof(Params, lnt_exact)},
    {"cls.predictions.transform.LayerNorm.bias",                   offsetof(Params, lnt.b),            {DIM_C},            OWN,     0,      INIT_ZERO,      0},
};
static const TensorRow POOLER_ROWS[] = {  // only with next-sentence prediction and where texts are classified
    {"bert.pooler.dense.weight",                                   offsetof(Params, pooler.w),         {DIM_C, DIM_C},     OWN,     0,      INIT_NORMAL,    1},
    {"bert.pooler.dense.bias",                                     offsetof(Params, pooler.b),         {DIM_C},            OWN,     0,      INIT_ZERO,      0},
};
static const TensorRow NEXT_ROWS[] = {  // only with next-sentence prediction
    {"cls.seq_relationship.weight",                                offsetof(Params, next.w),           {DIM_NEXT, DIM_C},  OWN,     0,      INIT_NORMAL,    1},
    {"cls.seq_relationship.bias",                                  offsetof(Params, next.b),           {DIM_NEXT},         OWN,     0,      INIT_ZERO,      0},
};
static const TensorRow TASK_ROWS[][2] = {  // in the order of tasks, instead of all heads above
    {{NULL}},
    {{"classifier.weight",                                         offsetof(Params, output.w),         {DIM_K, DIM_C},     OWN,     DIM_KP, INIT_NORMAL,    1},
     {"classifier.bias",                                           offsetof(Params, output.b),         {DIM_K},            OWN,     DIM_KP, INIT_ZERO,      0}},
    {{"qa_outputs.weight",                                         offsetof(Params, output.w),         {DIM_K, DIM_C},     OWN,     DIM_KP, INIT_NORMAL,    1},
     {"qa_outputs.bias",                                           offsetof(Params, output.b),         {DIM_K},            OWN,     DIM_KP, INIT_ZERO,      0}},
};
// clang-format on

// ---------------------------------------------------------------------------------------------------------
// Activations. A residual buffer first holds a branch's output, then the sum with the residual.

typedef struct {
    floatX *qkv, *att, *mid, *ln1, *fc_pre, *fc, *out, *ln2;  // [N, ...]
    Moments ln1_stats, ln2_stats;
    real* lse;
} BlockActs;

typedef struct {
    floatX *embedded, *ln0;                                     // [N, C]; ln0 after its dropout
    floatX *masked, *transform_pre, *transform, *lnt, *logits;  // [M, ...] the masked rows
    floatX *first, *pooled;  // [S, C] the first row of each sequence; the pooler's product, then its gradient
    Moments ln0_stats, lnt_stats;
    real* next_logits;                         // [S, 2]
    real* losses;                              // [M] of each masked row
    real *loss, *right;                        // [2] masked, next: losses added up; predictions that were right
    floatX *dx, *dbranch, *dfc, *dqkv, *datt;  // gradients on their way down; dx is the residual stream's
    floatX *dlnt, *dmasked, *dfirst;
    BlockActs* h;
} Acts;

typedef struct {
    int L, NH, C, F, V, T, types;  // T: positions, the longest sequence the model knows
    int padding;                   // the token that stands for none, whose embedding is not trained; -1: there is none
    int next;                      // 1: next-sentence prediction
    Task task;
    int outputs;  // of a task: classes, or the two ends of an answer
    Gelu gelu;
    double eps, init_range;
    double hidden_dropout, attention_dropout, classifier_dropout;
} Config;

typedef struct {
    Config config;
    // The largest micro-batch: B rows of T tokens; N tokens in S sequences; M rows with logits: the masked tokens, for a
    // task the sequences, or all tokens.
    int B, T, N, M, S;
    int Vp;  // stored rows of the vocabulary
    int recompute;
    TensorTable table;  // of the parameters; gradients and moments lie the same way
    floatX* params;
    real* grads;
    Params p;
    Gradients g;
    TensorTable acts_table, stats_table;
    floatX* acts_buffer;
    real* stats_buffer;
    Acts a;
    TaskHead head;
    ExactParameters exact;
    Reduction* reduction;    // NULL: one rank
    const real* master;      // the parameters in full precision; NULL: there are none
    const real* loss_scale;  // [1] where the ops run; NULL: 1
    // Dropout of the running step; training 0 switches it off.
    int training;
    uint64_t seed, step;
} Model;

// ---------------------------------------------------------------------------------------------------------
// Forward

static Dropout dropout_at(const Model* m, const Sequences* s, int layer, int site) {
    double p = site == SITE_DROPOUT_ATTENTION ? m->config.attention_dropout : m->config.hidden_dropout;
    return m->training ? dropout_make(p, m->seed, m->step, layer, site, s) : dropout_none(s);
}

static AttentionShape attention_at(const Model* m, const Sequences* s, int layer) {
    AttentionShape shape = {m->config.NH, m->config.C / m->config.NH, FULL,
                            dropout_at(m, s, layer, SITE_DROPOUT_ATTENTION)};
    return shape;
}

// What enters block l: the layernorm that ends the block before it.
static floatX* input_of(const Model* m, int l) { return l == 0 ? m->a.ln0 : m->a.h[l - 1].ln2; }

// One post-layernorm block: each branch's output is added to what the branch read, and the sum is normalised.
static void forward_block(Model* m, int l, const Sequences* s, Context* ctx) {
    const Config* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    BlockActs* a = &m->a.h[l];
    int N = s->rows, C = c->C;
    floatX* x = input_of(m, l);

    scope_at(ctx, FORWARD, l);
    matmul_forward(a->qkv, x, p->qkv, N, C, 3 * C, SET, ctx);
    attention_forward(a->att, a->lse, a->qkv, s, attention_at(m, s, l), ctx);
    matmul_forward(a->mid, a->att, p->attproj, N, C, C, SET, ctx);
    residual_layernorm_forward(a->ln1, a->mid, a->ln1_stats, x, norm_of(p->ln1, p->ln1_exact), N, C, (real)c->eps,
                               dropout_at(m, s, l, SITE_DROPOUT_ATTENTION_OUT), ctx);
    matmul_gelu_forward(a->fc, a->fc_pre, a->ln1, p->fc, N, C, c->F, c->gelu, ctx);
    matmul_forward(a->out, a->fc, p->fcproj, N, c->F, C, SET, ctx);
    residual_layernorm_forward(a->ln2, a->out, a->ln2_stats, a->ln1, norm_of(p->ln2, p->ln2_exact), N, C, (real)c->eps,
                               dropout_at(m, s, l, SITE_DROPOUT_MLP_OUT), ctx);
}

// Up to the last block's layernorm [N, C].
static void forward_encoder(Model* m, const MlmInput* in, Context* ctx) {
    const Config* c = &m->config;
    const Sequences* s = &in->sequences;
    EmbeddingNorm start = {{m->p.word, m->p.position, m->p.type},
                           norm_of(m->p.ln0, m->p.ln0_exact),
                           (real)c->eps,
                           dropout_at(m, s, 0, SITE_DROPOUT_EMBEDDING)};
    EmbeddingSizes sizes = {m->Vp, c->T, c->types, c->C, c->padding};
    scope_at(ctx, FORWARD, -1);
    reduction_wait(m->reduction, 0, ctx);
    exact_update(&m->exact, &m->table, m->params, m->master, m->reduction, ctx);
    embedding_layernorm_forward(m->a.ln0, m->a.embedded, m->a.ln0_stats, in->tokens, in->types, start, s, sizes, ctx);
    for (int l = 0; l < c->L; l++) {
        reduction_wait(m->reduction, l, ctx);
        forward_block(m, l, s, ctx);
    }
    scope_at(ctx, FORWARD, -1);
}

// logits [M, Vp] of the masked rows.
static void forward_masked(Model* m, const MlmInput* in, Context* ctx) {
    const Config* c = &m->config;
    int M = in->masked, C = c->C;
    Affine decoder = {m->p.word, m->p.decoder_bias};
    gather_forward(m->a.masked, input_of(m, c->L), in->masked_rows, M, C, ctx);
    matmul_gelu_forward(m->a.transform, m->a.transform_pre, m->a.masked, m->p.transform, M, C, C, c->gelu, ctx);
    layernorm_forward(m->a.lnt, m->a.lnt_stats, m->a.transform, norm_of(m->p.lnt, m->p.lnt_exact), M, C, (real)c->eps,
                      ctx);
    matmul_forward(m->a.logits, m->a.lnt, decoder, M, C, m->Vp, SET, ctx);
}

// The pooler's product [S, C] of the sequences' first rows, before its tanh: next_sentence.h has the rest of the head.
static void forward_next(Model* m, const MlmInput* in, Context* ctx) {
    int S = in->sequences.count, C = m->config.C;
    gather_forward(m->a.first, input_of(m, m->config.L), in->sequences.cu_seqlens, S, C, ctx);
    matmul_forward(m->a.pooled, m->a.first, m->p.pooler, S, C, C, SET, ctx);
}

static Dropout task_dropout(Model* m, const MlmInput* in) {
    const Sequences* s = task_first_rows(&m->head, in);
    double p = m->config.classifier_dropout;
    return m->training ? dropout_make(p, m->seed, m->step, 0, SITE_DROPOUT_POOLED, s) : dropout_none(s);
}

// Up to the logits of all heads.
static void forward(Model* m, const MlmInput* in, Context* ctx) {
    forward_encoder(m, in, ctx);
    if (m->config.task) task_forward(&m->head, input_of(m, m->config.L), in, task_dropout(m, in), ctx);
    else forward_masked(m, in, ctx);
    if (m->config.next) forward_next(m, in, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Backward. `mode` says how parameter gradients are written: SET by a step's first micro-batch, ADD by the others.

// Where the gradient of a residual sum goes: to the stream, and through dropout to the branch of layer l, which ends in
// a bias.
static ResidualGradient residual_gradient(const Model* m, const Sequences* s, int l, int site) {
    const BlockGradients* g = &m->g.h[l];
    real* dbias = site == SITE_DROPOUT_ATTENTION_OUT ? g->attproj.b : g->fcproj.b;
    ResidualGradient r = {m->a.dx, m->a.dbranch, dbias, dropout_at(m, s, l, site)};
    return r;
}

// The gradient of a branch's output, which residual_layernorm_backward() has left: that of the stream, but for dropout.
static const floatX* branch_gradient(const Model* m, const Sequences* s, int l, int site) {
    return dropout_at(m, s, l, site).threshold ? m->a.dbranch : m->a.dx;
}

static void backward_block(Model* m, int l, const Sequences* s, Mode mode, Context* ctx) {
    const Config* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    const BlockGradients* g = &m->g.h[l];
    BlockActs* a = &m->a.h[l];
    int N = s->rows, C = c->C;
    Rows rows = {N, C};
    floatX *x = input_of(m, l), *dx = m->a.dx;
    // Gradients of biases that are not a matmul's to compute: the pass before it sums them on its way.
    AffineGradient dfcproj = {g->fcproj.w, NULL}, dfc = {g->fc.w, NULL}, dattproj = {g->attproj.w, NULL};
    BiasGradient dfc_bias = {g->fc.b, mode};

    scope_at(ctx, BACKWARD, l);
    if (m->recompute >= 1) gelu_forward(a->fc, a->fc_pre, (size_t)N * (size_t)c->F, c->gelu, ctx);
    if (m->recompute >= 2)
        layernorm_forward(a->ln1, a->ln1_stats, a->mid, norm_of(p->ln1, p->ln1_exact), N, C, (real)c->eps, ctx);
    residual_layernorm_backward(residual_gradient(m, s, l, SITE_DROPOUT_MLP_OUT), g->ln2, dx, a->out, a->ln2_stats,
                                p->ln2.w, rows, SET, mode, ctx);
    const floatX* dbranch = branch_gradient(m, s, l, SITE_DROPOUT_MLP_OUT);
    matmul_backward_weight(dfcproj, dbranch, a->fc, N, c->F, C, mode, ctx);
    matmul_gelu_backward_input(m->a.dfc, dfc_bias, dbranch, p->fcproj.w, a->fc_pre, N, c->F, C, c->gelu, ctx);
    matmul_backward_weight(dfc, m->a.dfc, a->ln1, N, C, c->F, mode, ctx);
    matmul_backward_input(dx, m->a.dfc, p->fc.w, N, C, c->F, ADD, ctx);

    residual_layernorm_backward(residual_gradient(m, s, l, SITE_DROPOUT_ATTENTION_OUT), g->ln1, dx, a->mid,
                                a->ln1_stats, p->ln1.w, rows, SET, mode, ctx);
    dbranch = branch_gradient(m, s, l, SITE_DROPOUT_ATTENTION_OUT);
    matmul_backward_weight(dattproj, dbranch, a->att, N, C, C, mode, ctx);
    matmul_backward_input(m->a.datt, dbranch, p->attproj.w, N, C, C, SET, ctx);
    // Buckets are summed beside attention, which makes do with the multiprocessors that are free: matmuls would not.
    reduction_ready(m->reduction, l + 1, m->grads, ctx);
    attention_backward(m->a.dqkv, m->a.datt, a->qkv, a->att, a->lse, s, attention_at(m, s, l), ctx);
    if (m->recompute >= 2 && l > 0)
        layernorm_forward(x, a[-1].ln2_stats, a[-1].out, norm_of(p[-1].ln2, p[-1].ln2_exact), N, C, (real)c->eps, ctx);
    matmul_backward_weight(g->qkv, m->a.dqkv, x, N, C, 3 * C, mode, ctx);
    matmul_backward_input(dx, m->a.dqkv, p->qkv.w, N, C, 3 * C, ADD, ctx);
}

// From m->a.logits, which hold the gradient of the logits, to that of the last layernorm in m->a.dx.
static void backward_masked(Model* m, const MlmInput* in, Mode mode, Context* ctx) {
    int M = in->masked, C = m->config.C;
    AffineGradient ddecoder = {m->g.word, m->g.decoder_bias};
    Rows rows = {M, C};
    matmul_backward_weight(ddecoder, m->a.logits, m->a.lnt, M, C, m->Vp, mode, ctx);
    matmul_backward_input(m->a.dlnt, m->a.logits, m->p.word, M, C, m->Vp, SET, ctx);
    layernorm_backward(m->a.dlnt, m->g.lnt, m->a.dlnt, m->a.transform, m->a.lnt_stats, m->p.lnt.w, rows, SET, mode,
                       ctx);
    gelu_backward(m->a.dlnt, m->a.dlnt, m->a.transform_pre, (size_t)M * (size_t)C, m->config.gelu, SET, ctx);
    matmul_backward_weight(m->g.transform, m->a.dlnt, m->a.masked, M, C, C, mode, ctx);
    matmul_backward_input(m->a.dmasked, m->a.dlnt, m->p.transform.w, M, C, C, SET, ctx);
    gather_backward(m->a.dx, m->a.dmasked, in->masked_rows, M, in->sequences.rows, C, SET, ctx);
}

// From m->a.pooled, which holds its gradient, into m->a.dx. A first row is never a masked one.
static void backward_next(Model* m, const MlmInput* in, Mode mode, Context* ctx) {
    int S = in->sequences.count, C = m->config.C;
    AffineGradient dpooler = {m->g.pooler.w, NULL};  // next_sentence_backward() has written that of its bias
    matmul_backward_weight(dpooler, m->a.pooled, m->a.first, S, C, C, mode, ctx);
    matmul_backward_input(m->a.dfirst, m->a.pooled, m->p.pooler.w, S, C, C, SET, ctx);
    gather_backward(m->a.dx, m->a.dfirst, in->sequences.cu_seqlens, S, in->sequences.rows, C, ADD, ctx);
}

// From the gradients of both kinds of logits to those of all parameters.
static void backward(Model* m, const MlmInput* in, Mode mode, Context* ctx) {
    const Config* c = &m->config;
    const Sequences* s = &in->sequences;
    EmbeddingGradients dtables = {m->g.word, m->g.position, m->g.type};
    EmbeddingSizes sizes = {m->Vp, c->T, c->types, c->C, c->padding};
    Rows rows = {s->rows, c->C};

    scope_at(ctx, BACKWARD, -1);
    if (c->task) task_backward(&m->head, m->a.dx, input_of(m, c->L), in, task_dropout(m, in), mode, ctx);
    else backward_masked(m, in, mode, ctx);
    if (c->next) backward_next(m, in, mode, ctx);
    for (int l = c->L - 1; l >= 0; l--) backward_block(m, l, s, mode, ctx);
    scope_at(ctx, BACKWARD, -1);
    layernorm_dropout_backward(m->a.dx, m->g.ln0, m->a.dx, m->a.embedded, m->a.ln0_stats, m->p.ln0.w, rows,
                               dropout_at(m, s, 0, SITE_DROPOUT_EMBEDDING), mode, ctx);
    // The decoder, where there is one, has already written the word embedding's gradient.
    embedding_backward(dtables, m->a.dx, in->tokens, in->types, s, sizes, dropout_none(s), c->task ? mode : ADD, mode,
                       ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Losses: the mean over masked tokens, and with next-sentence prediction the mean over sequences too; or a task's

static NextSentenceLoss next_loss(const Model* m, const MlmInput* in, MlmScales scales) {
    NextSentenceLoss loss = {m->a.next_logits, &m->a.loss[1], &m->a.right[1],
                             in->next_labels,  scales.next,   m->loss_scale};
    return loss;
}

// Losses of a micro-batch, sums times `scales`, put into or added to m->a.loss by `mode`, and the numbers of predictions
// that were right into m->a.right; no gradients, no dropout.
static void evaluate_batch(Model* m, const MlmInput* in, MlmScales scales, Mode mode, Context* ctx) {
    int M = in->masked, S = in->sequences.count;
    ClassifierLosses losses = {m->a.losses, &m->a.loss[0], scales.masked, mode};
    m->training = 0;
    forward(m, in, ctx);
    if (m->config.task) {
        task_loss(&m->head, in, scales.masked, NULL, FORWARD, mode, ctx);
        return;
    }
    classifier_forward(losses, m->a.logits, in->masked_targets, M, m->config.V, m->Vp, ctx);
    accuracy_forward(&m->a.right[0], m->a.logits, in->masked_targets, M, m->config.V, m->Vp, mode, ctx);
    if (m->config.next)
        next_sentence_forward(next_loss(m, in, scales), m->a.pooled, m->p.next, S, m->config.C, mode, ctx);
}

// The losses with dropout, and with the gradients of all parameters, *m->loss_scale times too large, which `mode` writes
// too, in step number `step`.
static void train_batch(Model* m, const MlmInput* in, uint64_t step, MlmScales scales, Mode mode, Context* ctx) {
    int M = in->masked, S = in->sequences.count;
    ClassifierLosses losses = {m->a.losses, &m->a.loss[0], scales.masked, mode};
    m->training = 1;
    m->step = step;
    forward(m, in, ctx);
    scope_at(ctx, BACKWARD, -1);
    if (m->config.task) task_loss(&m->head, in, scales.masked, m->loss_scale, BACKWARD, mode, ctx);
    else classifier_backward(losses, m->a.logits, in->masked_targets, m->loss_scale, M, m->config.V, m->Vp, ctx);
    if (m->config.next)
        next_sentence_backward(m->a.pooled, m->g.next, m->g.pooler.b, next_loss(m, in, scales), m->p.next, S,
                               m->config.C, mode, ctx);
    backward(m, in, mode, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Memory

// Fill the tables for this configuration and micro-batches of at most B * T tokens, M of them masked, in S sequences;
// allocates nothing but the tables.
static void model_plan(Model* m, Config config, int B, int T, int M, int S, int recompute) {
    memset(m, 0, sizeof *m);
    m->config = config;
    m->B = B, m->T = T, m->N = B * T, m->M = M, m->S = S;
    m->Vp = (int)round_up((size_t)config.V, 128);
    m->recompute = recompute;
    m->table.fixed = recompute >= FORWARD_ALONE;
    int is_task = config.task != TASK_PRETRAIN, Kp = task_stored_outputs(config.outputs), masked = is_task ? 0 : M;
    // clang-format off
    int dims[DIMS] = {1, config.V, m->Vp, config.T, config.types, config.C, 3 * config.C, config.F, m->N, config.NH, masked, S, 2,
                      STEP_LOSSES, config.outputs, Kp, M, is_task ? Kp : m->Vp, m->table.fixed ? 0 : m->N};
    // clang-format on
    tensors_add(&m->table, EMBEDDING_ROWS, COUNT_OF(EMBEDDING_ROWS), dims, -1);
    for (int l = 0; l < config.L; l++) tensors_add(&m->table, BLOCK_ROWS, COUNT_OF(BLOCK_ROWS), dims, l);
    if (!is_task) tensors_add(&m->table, HEAD_ROWS, COUNT_OF(HEAD_ROWS), dims, -1);
    if (config.next || config.task == TASK_CLASSIFY)
        tensors_add(&m->table, POOLER_ROWS, COUNT_OF(POOLER_ROWS), dims, -1);
    if (is_task) tensors_add(&m->table, TASK_ROWS[config.task], COUNT_OF(TASK_ROWS[0]), dims, -1);
    if (config.next) tensors_add(&m->table, NEXT_ROWS, COUNT_OF(NEXT_ROWS), dims, -1);
    tensors_finish(&m->table);

    // What the backward pass recomputes needs one buffer for all layers; without that pass all does.
    Placement gelu = recompute >= RECOMPUTE_GELU ? SHARED : OWN, norm = recompute >= RECOMPUTE_NORMS ? SHARED : OWN,
              kept = recompute >= FORWARD_ALONE ? SHARED : OWN;
    // clang-format off
    const TensorRow block_acts[] = {
        {"h.%d.qkv",      offsetof(BlockActs, qkv),      {DIM_N, DIM_3C}, kept},
        {"h.%d.att",      offsetof(BlockActs, att),      {DIM_N, DIM_C}, kept},
        {"h.%d.mid",      offsetof(BlockActs, mid),      {DIM_N, DIM_C}, kept},
        {"h.%d.ln1",      offsetof(BlockActs, ln1),      {DIM_N, DIM_C}, norm},
        {"h.%d.fc_pre",   offsetof(BlockActs, fc_pre),   {DIM_N, DIM_F}, kept},
        {"h.%d.fc",       offsetof(BlockActs, fc),       {DIM_N, DIM_F}, gelu},
        {"h.%d.out",      offsetof(BlockActs, out),      {DIM_N, DIM_C}, kept},
        {"h.%d.ln2",      offsetof(BlockActs, ln2),      {DIM_N, DIM_C}, norm},
    };
    const TensorRow outer_acts[] = {
        {"embedded",      offsetof(Acts, embedded),      {DIM_N, DIM_C}},
        {"ln0",           offsetof(Acts, ln0),           {DIM_N, DIM_C}},
        {"masked",        offsetof(Acts, masked),        {DIM_M, DIM_C}},
        {"transform_pre", offsetof(Acts, transform_pre), {DIM_M, DIM_C}},
        {"transform",     offsetof(Acts, transform),     {DIM_M, DIM_C}},
        {"lnt",           offsetof(Acts, lnt),           {DIM_M, DIM_C}},
        {"logits",        offsetof(Acts, logits),        {DIM_ROWS, DIM_OUT}},
        {"first",         offsetof(Acts, first),         {DIM_S, DIM_C}},
        {"pooled",        offsetof(Acts, pooled),        {DIM_S, DIM_C}},
        {"dx",            offsetof(Acts, dx),            {DIM_DN, DIM_C}},
        {"dbranch",       offsetof(Acts, dbranch),       {DIM_DN, DIM_C}},
        {"dfc",           offsetof(Acts, dfc),           {DIM_DN, DIM_F}},
        {"dqkv",          offsetof(Acts, dqkv),          {DIM_DN, DIM_3C}},
        {"datt",          offsetof(Acts, datt),          {DIM_DN, DIM_C}},
        {"dlnt",          offsetof(Acts, dlnt),          {DIM_M, DIM_C}},
        {"dmasked",       offsetof(Acts, dmasked),       {DIM_M, DIM_C}},
        {"dfirst",        offsetof(Acts, dfirst),        {DIM_S, DIM_C}},
    };
    const TensorRow block_stats[] = {
        {"h.%d.ln1_mean", offsetof(BlockActs, ln1_stats.mean), {DIM_N}, kept},
        {"h.%d.ln1_rstd", offsetof(BlockActs, ln1_stats.rstd), {DIM_N}, kept},
        {"h.%d.ln2_mean", offsetof(BlockActs, ln2_stats.mean), {DIM_N}, kept},
        {"h.%d.ln2_rstd", offsetof(BlockActs, ln2_stats.rstd), {DIM_N}, kept},
        {"h.%d.lse",      offsetof(BlockActs, lse),            {DIM_NH, DIM_N}, kept},
    };
    const TensorRow outer_stats[] = {
        {"ln0_mean",      offsetof(Acts, ln0_stats.mean),      {DIM_N}},
        {"ln0_rstd",      offsetof(Acts, ln0_stats.rstd),      {DIM_N}},
        {"lnt_mean",      offsetof(Acts, lnt_stats.mean),      {DIM_M}},
        {"lnt_rstd",      offsetof(Acts, lnt_stats.rstd),      {DIM_M}},
        {"next_logits",   offsetof(Acts, next_logits),         {DIM_S, DIM_NEXT}},
        {"losses",        offsetof(Acts, losses),              {DIM_ROWS}},
        {"loss",          offsetof(Acts, loss),                {DIM_LOSSES}},
        {"right",         offsetof(Acts, right),               {DIM_LOSSES}},
    };
    // clang-format on
    tensors_add(&m->acts_table, outer_acts, COUNT_OF(outer_acts), dims, -1);
    tensors_add(&m->stats_table, outer_stats, COUNT_OF(outer_stats), dims, -1);
    for (int l = 0; l < config.L; l++) {
        tensors_add(&m->acts_table, block_acts, COUNT_OF(block_acts), dims, l);
        tensors_add(&m->stats_table, block_stats, COUNT_OF(block_stats), dims, l);
    }
    tensors_finish(&m->acts_table);
    tensors_finish(&m->stats_table);
}

// What the run takes, before anything is allocated.
static MemoryPlan model_memory(const Model* m, UpdateSettings update, const Context* ctx) {
    const Config* c = &m->config;
    AttentionShape shape = {c->NH, c->C / c->NH, FULL, dropout_make(c->attention_dropout, 0, 0, 0, 0, NULL)};
    EmbeddingSizes tables = {m->Vp, c->T, c->types, c->C, c->padding};
    StepSizes step = {shape, tables, m->N, m->S, m->T, m->S, m->M, c->F, next_sentence_scratch_bytes(m->S, c->C)};
    int targets = c->task == TASK_ANSWER ? SPAN_ENDS * m->S : m->M;
    size_t ints = mlm_loader_ints(m->N, targets, m->S) + task_head_ints(c->task, m->S);
    return plan_make(&m->table, &m->acts_table, &m->stats_table, update, ints * sizeof(int), &step, ctx);
}

static void model_alloc(Model* m, uint64_t seed, Context* ctx) {
    const Config* c = &m->config;
    m->seed = seed;
    m->params = (floatX*)device_alloc(ctx, m->table.elements * sizeof(floatX), "parameters");
    m->grads = (real*)device_alloc(ctx, tensors_updated(&m->table).size * sizeof(real), "gradients");
    m->acts_buffer = (floatX*)device_alloc(ctx, m->acts_table.elements * sizeof(floatX), "activations");
    m->stats_buffer = (real*)device_alloc(ctx, m->stats_table.elements * sizeof(real), "activations");
    m->p.h = (BlockParams*)xcalloc((size_t)c->L, sizeof(BlockParams));
    m->g.h = (BlockGradients*)xcalloc((size_t)c->L, sizeof(BlockGradients));
    m->a.h = (BlockActs*)xcalloc((size_t)c->L, sizeof(BlockActs));
    tensors_bind(&m->table, m->params, sizeof(floatX), &m->p, m->p.h, sizeof(BlockParams));
    exact_open(&m->exact, &m->table, m->params, &m->p, m->p.h, sizeof(BlockParams), ctx);
    tensors_bind(&m->table, m->grads, sizeof(real), &m->g, m->g.h, sizeof(BlockGradients));
    tensors_bind(&m->acts_table, m->acts_buffer, sizeof(floatX), &m->a, m->a.h, sizeof(BlockActs));
    tensors_bind(&m->stats_table, m->stats_buffer, sizeof(real), &m->a, m->a.h, sizeof(BlockActs));
    TaskLayers layers = {m->p.pooler, m->p.output, m->g.pooler, m->g.output};
    TaskBuffers buffers = {m->a.first, m->a.pooled, m->a.dfirst, m->a.logits, m->a.losses, &m->a.loss[0]};
    task_head_open(&m->head, c->task, c->outputs, c->C, m->S, layers, buffers, ctx);
}

static void model_forget_plan(Model* m) {
    tensors_free(&m->table), tensors_free(&m->acts_table), tensors_free(&m->stats_table);
}

static void model_free(Model* m) {
    task_head_close(&m->head);
    exact_close(&m->exact, &m->table);
    device_free(m->params, m->table.elements * sizeof(floatX));
    device_free(m->grads, tensors_updated(&m->table).size * sizeof(real));
    device_free(m->acts_buffer, m->acts_table.elements * sizeof(floatX));
    device_free(m->stats_buffer, m->stats_table.elements * sizeof(real));
    free(m->p.h), free(m->g.h), free(m->a.h);
    model_forget_plan(m);
}

// ---------------------------------------------------------------------------------------------------------
// Configuration: Hugging Face's config.json, or a descriptor

// clang-format off
static const ConfigRow CONFIG_ROWS[] = {
    // key                            type         field                               default        allowed
    {"num_hidden_layers",              CONFIG_INT,  offsetof(Config, L),                 CONFIG_NEEDED, 1, 1 << 12},
    {"num_attention_heads",            CONFIG_INT,  offsetof(Config, NH),                CONFIG_NEEDED, 1, 1 << 12},
    {"hidden_size",                    CONFIG_INT,  offsetof(Config, C),                 CONFIG_NEEDED, 1, 1 << 20},
    {"intermediate_size",              CONFIG_INT,  offsetof(Config, F),                 CONFIG_NEEDED, 1, 1 << 22},
    {"max_position_embeddings",        CONFIG_INT,  offsetof(Config, T),                 CONFIG_NEEDED, 1, 1 << 20},
    {"vocab_size",                     CONFIG_INT,  offsetof(Config, V),                 CONFIG_NEEDED, 1, 1 << 24},
    {"type_vocab_size",                CONFIG_INT,  offsetof(Config, types),             2,             2, 1 << 10},
    {"layer_norm_eps",                 CONFIG_REAL, offsetof(Config, eps),               1e-12,         0, 1},
    {"initializer_range",              CONFIG_REAL, offsetof(Config, init_range),        0.02,          0, 1},
    {"hidden_dropout_prob",            CONFIG_REAL, offsetof(Config, hidden_dropout),    0.1,           0, 0.999},
    {"attention_probs_dropout_prob",   CONFIG_REAL, offsetof(Config, attention_dropout), 0.1,           0, 0.999},
    {"pad_token_id",                   CONFIG_TOKEN, offsetof(Config, padding),          0,             -1, 1 << 24},
    {"tie_word_embeddings",            CONFIG_BOOL, CONFIG_NO_FIELD,                     1,             1, 1},
    {"is_decoder",                     CONFIG_BOOL, CONFIG_NO_FIELD,                     0,             0, 0},
    {"add_cross_attention",            CONFIG_BOOL, CONFIG_NO_FIELD,                     0,             0, 0},
};
// clang-format on

static void config_check(const Config* c, const char* source) {
    config_rows_check(c, CONFIG_ROWS, COUNT_OF(CONFIG_ROWS), source);
    if (c->C % c->NH != 0) die(USAGE, "%s: %d channels cannot be cut into %d heads", source, c->C, c->NH);
    if (c->padding >= c->V)
        die(USAGE, "%s: key \"pad_token_id\": %d is not below vocab_size, %d", source, c->padding, c->V);
}

// "bert-base", "bert-large": the published sizes; or "L=4,C=128,NH=4,V=261,T=128,F=512", where V defaults to `data_V`
// and F to 4 C.
static Config config_from_descriptor(const char* text, int data_V) {
    static const char* const published[][2] = {{"bert-base", "L=12,NH=12,C=768,V=30522,T=512"},
                                               {"bert-large", "L=24,NH=16,C=1024,V=30522,T=512"}};
    Config c = {4, 4, 128, 0, data_V, 128, 2, 0, 1, TASK_PRETRAIN, 0, GELU_ERF, 1e-12, 0.02, 0, 0, 0};
    const ConfigSize sizes[] = {{"L", &c.L}, {"C", &c.C}, {"NH", &c.NH}, {"V", &c.V}, {"T", &c.T}, {"F", &c.F}};
    const char* expanded = text;
    for (size_t i = 0; i < COUNT_OF(published); i++)
        if (strcmp(text, published[i][0]) == 0) expanded = published[i][1];
    if (config_sizes_read(sizes, COUNT_OF(sizes), expanded) != 0)
        die(USAGE,
            "-e %s: is neither a model directory, a .safetensors file, bert-base, bert-large, nor sizes like "
            "L=4,C=128,NH=4,T=128 (V and F may follow)",
            text);
    if (c.F == 0) c.F = 4 * c.C;
    char* source = xprintf("-e %s", text);
    config_check(&c, source);
    free(source);
    return c;
}

// What the file declares is honoured, or refused with the name of its key.
static Config config_read(const char* path) {
    Json json;
    Config c;
    json_load(&json, path, CONFIG_MAX_FILE);
    config_expect(json.root, "model_type", "bert", path);
    config_expect(json.root, "position_embedding_type", "absolute", path);
    c.gelu = config_gelu(json.root, "hidden_act", "gelu", path);
    config_rows_read(&c, CONFIG_ROWS, COUNT_OF(CONFIG_ROWS), json.root, path);
    c.classifier_dropout = json_get_double_or(json.root, "classifier_dropout", c.hidden_dropout, path);
    if (!(c.classifier_dropout >= 0 && c.classifier_dropout < 1))
        die(USAGE, "%s: key \"classifier_dropout\": %g is out of range; allowed: 0..1", path, c.classifier_dropout);
    c.next = 1, c.task = TASK_PRETRAIN, c.outputs = 0;
    config_check(&c, path);
    json_free(&json);
    return c;
}

// Take the parameters from a file, into the full-precision copy too where the optimizer has one. A model without heads,
// or without that for the next sentence, is as good: what it lacks keeps its values and is named.
static void load_weights(Model* m, const Optimizer* o, const char* path, Context* ctx) {
    static const char* const ignored[] = {
        "embeddings.position_ids", "predictions.decoder.weight", "predictions.decoder.bias", "pooler.dense.weight",
        "pooler.dense.bias",       "seq_relationship.weight",                               // without next sentences
        "seq_relationship.bias",   "predictions.bias",           "transform.dense.weight",  // for a task
        "transform.dense.bias",    "transform.LayerNorm.weight", "transform.LayerNorm.bias", "LayerNorm.gamma",
        "LayerNorm.beta",          "classifier.weight",          "classifier.bias",          "qa_outputs.weight",
        "qa_outputs.bias"};
    static const char* const aliases[][2] = {{"LayerNorm.weight", "LayerNorm.gamma"},
                                             {"LayerNorm.bias", "LayerNorm.beta"},
                                             {"cls.predictions.bias", "cls.predictions.decoder.bias"}};
    static const char* const may_lack[] = {"bert.pooler.", "cls.", "classifier.", "qa_outputs."};
    int passed_over = m->config.next ? 3 : m->config.task ? (int)COUNT_OF(ignored) : 7;
    FileRules rules = {"bert.", ignored, passed_over, aliases, COUNT_OF(aliases), may_lack, COUNT_OF(may_lack)};
    TensorPart part = {"", m->params, VIEW_FLOATX};
    Text lacking = {NULL, 0, 0};
    tensors_read(path, &m->table, &part, 1, &rules, &lacking, ctx);
    exact_read_master(&m->exact, &m->table, o, path, &rules, ctx);
    if (lacking.length) printf("%s: lacks what is initialised instead: %s\n", path, lacking.text);
    free(lacking.text);
}

static void random_weights(Model* m, const Optimizer* o, uint64_t seed, Context* ctx) {
    const Config* c = &m->config;
    HostView view = host_view_open(m->params, m->table.elements, VIEW_FLOATX);
    tensors_init(&m->table, view.values, seed, c->init_range, c->init_range);
    // The word embedding is the first tensor.
    if (c->padding >= 0) memset(view.values + (size_t)c->padding * (size_t)c->C, 0, (size_t)c->C * sizeof(real));
    optimizer_write_weights(o, &view, ctx);
    exact_update(&m->exact, &m->table, m->params, NULL, NULL, ctx);  // of fixed parameters, unless a file has them
    host_view_close(&view);
}

#ifndef NO_MAIN  // tests include this file for the model alone

// ---------------------------------------------------------------------------------------------------------
// Settings

// llmc/run/settings.h and llmc/run/mlm_settings.h have all but the model.
static const char FREE_TO_CHANGE[] = SETTINGS_FREE_TO_CHANGE " --sample-every" TASK_FREE_TO_CHANGE;

static int settings_flags(Settings* shared, MlmSettings* mlm, TaskSettings* task, Flag* table) {
    // clang-format off
    const Flag rows[] = {
        {"-e",  "--model",  FLAG_STRING, &shared->model, "L=4,C=128,NH=4,T=128", 0, 0, NULL, "Hugging Face directory, .safetensors file, config.json (from scratch), bert-base|bert-large, or sizes L= C= NH= V= T= F=", 0},
    };
    // clang-format on
    int count = task_settings_rows(task, table, mlm_settings_rows(mlm, table, settings_rows(shared, table, 0)));
    count = settings_add_rows(table, count, rows, COUNT_OF(rows));
    settings_default(table, count, "--batch", "8");
    settings_default(table, count, "--schedule", "linear");
    settings_default(table, count, "--final-lr", "0");
    settings_default(table, count, "--weight-decay", "0.01");
    settings_default(table, count, "--beta2", "0.999");
    settings_default(table, count, "--eps", "1e-6");
    return count;
}

// ---------------------------------------------------------------------------------------------------------
// A run

typedef struct {
    Settings settings;
    MlmSettings mlm;
    TaskSettings task;
    Flag flags[MAX_FLAGS];
    Session session;
    Context ctx;
    Comm comm;
    Reduction reduction;
    Model model;
    MemoryPlan plan;
    Optimizer optimizer;
    MlmRecipe recipe;
    MlmSource data;
    TaskData examples;  // of a task, instead of sentences
    int has_val;
    WordPiece words;  // size 0: there is no vocabulary
    int micro_steps;  // micro-batches of a step on this rank
    Steps steps;
    Log log;
} Run;

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

static void config_write(Text* t, const Config* c, const LabelNames* names) {
    static const char* const of_task[] = {"BertForMaskedLM", "BertForSequenceClassification",
                                          "BertForQuestionAnswering"};
    text_printf(t, "{\"architectures\": [\"%s\"], \"model_type\": \"bert\"",
                c->next ? "BertForPreTraining" : of_task[c->task]);
    if (c->task == TASK_CLASSIFY) {
        json_put_number(t, "classifier_dropout", c->classifier_dropout);
        json_put_string(t, "problem_type", "single_label_classification");
        task_write_names(t, names, c->outputs);
    }
    json_put_string(t, "hidden_act", c->gelu == GELU_TANH ? "gelu_new" : "gelu");
    config_rows_write(t, c, CONFIG_ROWS, COUNT_OF(CONFIG_ROWS));
    json_put_string(t, "dtype", safetensors_dtype_name(FLOATX_NAME));
    text_printf(t, "}\n");
}

// The largest micro-batch whose plan fits, 0 if none does.
static int largest_batch(const Model* like, UpdateSettings update, const Context* ctx) {
    int low = 0, high = like->B;
    while (low < high) {
        Model m;
        int middle = (low + high + 1) / 2, M = like->M / like->B, S = like->S / like->B;
        model_plan(&m, like->config, middle, like->T, middle * M, middle * S, like->recompute);
        if (plan_fits(model_memory(&m, update, ctx))) low = middle;
        else high = middle - 1;
        model_forget_plan(&m);
    }
    return low;
}

// Everything that can be said of a run before any data is read: settings, configuration, memory. Returns where its
// weights are (caller frees), NULL for training from scratch.
static char* run_plan(Run* r, const char* source, const char* data_dir) {
    Settings* s = &r->settings;
    char *directory, *weights;
    session_find_model(source ? source : s->model, &directory, &weights);
    char* path = directory ? xprintf("%s/config.json", directory) : NULL;
    if (*r->mlm.fill && !weights)
        die(USAGE, "--fill needs a trained model; name it with -e, or its run with -o and -y 1");
    fill_find_words(&r->words, &r->session, directory, data_dir);
    Config config =
        directory ? config_read(path) : config_from_descriptor(s->model, r->words.size ? r->words.size : 30522);
    if (!directory && r->words.size) config.padding = r->words.pad;
    if (directory) r->examples.classes = task_find_names(&r->examples.names, path, (Task)r->task.task);
    free(directory), free(path);

    if (s->dropout >= 0) config.hidden_dropout = config.attention_dropout = config.classifier_dropout = s->dropout;
    config.task = (Task)r->task.task;
    config.outputs = task_outputs(&r->task, r->examples.classes);
    if (config.task == TASK_CLASSIFY && weights) task_check_labels(weights, config.outputs);
    config.next = r->mlm.next_sentence && !config.task;
    int T = s->T ? s->T : config.T;
    if (T > config.T) die(USAGE, "-t %d: the model knows %d positions; choose at most that", T, config.T);
    MlmRecipe recipe = r->recipe = config.task ? task_recipe(config.task) : mlm_settings_recipe(&r->mlm, T);
    int M = s->B * (config.task == TASK_ANSWER ? T : recipe.max_predictions);
    r->micro_steps = session_micro_steps(&r->session, s->B, T);
    model_plan(&r->model, config, s->B, T, M, s->B * recipe.pack, s->evaluate ? FORWARD_ALONE : s->recompute);
    return weights;
}

// Of training or validation data; 0 where there is none.
static uint32_t data_fingerprint(const Run* r, int is_val) {
    if (r->task.task) return examples_fingerprint(is_val ? &r->examples.val : &r->examples.train);
    if (is_val && !r->has_val) return 0;
    return mlm_fingerprint(is_val ? &r->data.val : &r->data.train);
}

// All ranks are about to train the same.
static void run_check_ranks(const Run* r) {
    Text config = {NULL, 0, 0};
    config_write(&config, &r->model.config, &r->examples.names);
    session_check_ranks(&r->session, config.text, data_fingerprint(r, 1));
    free(config.text);
}

// Open what is trained and validated on. Returns the sequences of an epoch.
static uint64_t run_open_data(Run* r, const char* train, const char* val) {
    const Settings* s = &r->settings;
    const Config* c = &r->model.config;
    if (c->task) {
        task_data_open(&r->examples, &r->task, s->evaluate ? NULL : train, val, &r->words, c->outputs, c->V, r->model.T,
                       r->comm.rank == 0);
        r->data.examples = &r->examples.train, r->data.seed = (uint64_t)s->seed, r->data.shuffle = s->shuffle;
        r->has_val = r->examples.has_val;
        return (uint64_t)r->examples.train.count;
    }
    mlm_source_open(&r->data, train, val, c->V, (uint64_t)s->seed);
    mlm_check_words(&r->data.train, &r->words);
    r->has_val = r->data.has_val;
    return mlm_sequences(&r->data.train);
}

// Check and open everything that the run needs. Nothing is written before all of it was found sound.
static void run_open(Run* r, int argc, char** argv) {
    Settings* s = &r->settings;
    Session* session = &r->session;
    Model* m = &r->model;
    char *train_pattern, *val_pattern;
    int flag_count = settings_flags(s, &r->mlm, &r->task, r->flags);
    flags_parse(r->flags, flag_count, argc, argv,
                "./train_bert [flags]   (none: a small model on the built-in corpus)");
    task_default_batches(&r->task, s, r->flags, flag_count);
    fill_check_flag(r->mlm.fill, r->flags, flag_count);
    const int fills = *r->mlm.fill != '\0';
    if (fills) s->evaluate = 1;  // nothing is written either
    session_join(s, &r->comm);
    session_open(session, s, r->flags, flag_count, FREE_TO_CHANGE, &r->comm, &r->ctx);
    task_check_settings(&r->task, s, &r->mlm);
    if (r->task.task) task_find_data(session, &train_pattern, &val_pattern);
    else session_find_data(session, "data/builtin/bert/train.bin", &train_pattern, &val_pattern);
    char *data_dir = fills ? NULL : session_directory_of(train_pattern),
         *source = session_find_start(session, "--phase2", r->mlm.phase2);
    char* weights = run_plan(r, source, data_dir);
    UpdateSettings update = session_update(session);
    r->plan = model_memory(m, update, &r->ctx);
    if (s->steps == 0) plan_show(r->flags, session->flag_count, &m->table, &r->plan, &r->comm);
    if (!plan_fits(r->plan)) plan_refuse(&r->plan, largest_batch(m, update, &r->ctx));

    mlm_source_alloc(&r->data, r->recipe, m->B, m->T, r->micro_steps, &r->ctx);
    if (!fills) {
        uint64_t epoch = run_open_data(r, train_pattern, val_pattern);
        if (s->evaluate && !r->has_val) die(USAGE, "--evaluate 1 needs validation data; name it with -j");
        if (epoch) session_check_data(session, data_fingerprint(r, 0), train_pattern);
        run_check_ranks(r);
        session_set_last(session, epoch, m->B * r->comm.size * r->micro_steps);
    }

    model_alloc(m, (uint64_t)s->seed, &r->ctx);
    optimizer_join(&r->optimizer, &r->reduction, &m->table, update, &r->comm, &r->ctx);
    m->reduction = &r->reduction;
    session_set_steps(session, &r->optimizer);
    m->loss_scale = &r->optimizer.loss_scale->scale;
    m->master = r->optimizer.master;
    steps_open(&r->steps, s);
    if (!source) random_weights(m, &r->optimizer, (uint64_t)s->seed, &r->ctx);  // a model's file may lack some
    if (source) session_load(session, source, &m->table, m->params, &m->exact, &r->optimizer);
    else if (weights) load_weights(m, &r->optimizer, weights, &r->ctx);
    agree_on_weights(&r->comm, &m->table, m->params, &r->ctx);
    exact_share(&m->exact, &m->table, m->params, m->master, m->reduction, &r->ctx);
    free(weights), free(data_dir), free(source), free(train_pattern), free(val_pattern);
}

static void run_close(Run* r) {
    steps_close(&r->steps);
    model_free(&r->model);
    optimizer_free(&r->optimizer);
    mlm_source_close(&r->data);
    task_data_close(&r->examples);
    wordpiece_free(&r->words);
    log_close(&r->log);
    session_close(&r->session);
    matmul_plans_free(&r->ctx);
    reduction_close(&r->reduction);
    context_free(&r->ctx);
    comm_close(&r->comm);
}

// Scores on held-out examples, of which each rank takes its share.
static TaskScore validate_task(Run* r) {
    Model* m = &r->model;
    TaskEvaluation e;
    task_evaluation_begin(&e, &r->examples, &r->data.batches[0], m->B, r->settings.val_batches, &r->comm);
    m->training = 0;
    while (!stop_signal && task_evaluation_next(&e)) {
        MlmInput in = mlm_load(&r->data.loader, e.batch, &r->ctx);
        forward(m, &in, &r->ctx);
        task_evaluation_take(&e, &m->head, &r->ctx);
        steps_evaluating(&r->log, &r->session, "validation", e.next, e.count);
    }
    return task_evaluation_end(&e, r->task.predictions, &r->comm);
}

// Means over held-out text, of which each rank takes its share.
static MlmEvaluation validate_masked(Run* r) {
    Model* m = &r->model;
    MlmBatch* batch = &r->data.batches[0];
    MlmScales scales = {1, 1};
    MlmSums sums = {{0}, {0}, 0, 0};
    uint64_t rows = mlm_sequences(&r->data.val), B = (uint64_t)m->B;
    uint64_t batches = session_val_batches(&r->session, rows + B - 1, m->B);  // the last one may be smaller
    uint64_t rank = (uint64_t)r->comm.rank, ranks = (uint64_t)r->comm.size;
    for (uint64_t i = rank; i < batches && !stop_signal; i += ranks) {
        mlm_batch_build(batch, &r->data.val, i * B, (int)min_size(B, rows - i * B));
        MlmInput in = mlm_load(&r->data.loader, batch, &r->ctx);
        evaluate_batch(m, &in, scales, i == rank ? SET : ADD, &r->ctx);
        sums.masked += batch->masked, sums.sequences += batch->count;
        steps_evaluating(&r->log, &r->session, "validation", (double)(i + ranks), (double)batches);
    }
    if (rank < batches) mlm_sums_read(&sums, m->a.loss, m->a.right, &r->ctx);
    return mlm_evaluation(sums, m->config.next, &r->comm);
}

// Log it, or without a log print it. A signal to any rank cuts it short, and then there is nothing to tell.
static void validate(Run* r, Log* log) {
    TaskScore score = {0};
    MlmEvaluation e = {0};
    if (r->task.task) score = validate_task(r);
    else e = validate_masked(r);
    if (comm_any(&r->comm, stop_signal != 0)) return;
    if (r->task.task && log) task_score_log(log, &r->session, score);
    else if (r->task.task) task_score_print(score);
    else if (log) mlm_evaluation_log(log, &r->session, e);
    else mlm_evaluation_print(e);
}

// Have the model fill in the batch's only sequence, as text.
static Text fill(Run* r, const MlmBatch* batch) {
    Model* m = &r->model;
    MlmInput in = mlm_load(&r->data.loader, batch, &r->ctx);
    HostView logits = host_view_open(m->a.logits, (size_t)in.masked * (size_t)m->Vp, VIEW_FLOATX);
    Text text = {NULL, 0, 0};
    m->training = 0;
    forward(m, &in, &r->ctx);
    host_view_read(&r->ctx, &logits);
    fill_show(&text, &r->words, batch, logits.values, m->config.V, m->Vp);
    host_view_close(&logits);
    return text;
}

// Show how a held-out sequence is filled in.
static void sample(Run* r) {
    MlmBatch* batch = &r->data.batches[0];
    mlm_batch_build(batch, &r->data.val, 0, 1);
    Text text = fill(r, batch);
    session_show_text(&r->session, &text);
    free(text.text);
}

// Returns 0, or -1 after a warning.
static int save(Run* r) {
    Text config = {NULL, 0, 0};
    reduction_wait(&r->reduction, REDUCTION_LAST, &r->ctx);  // the other ranks' parameters are on their way
    config_write(&config, &r->model.config, &r->examples.names);
    int result = session_save(&r->session, &r->model.table, r->model.params, &r->optimizer, config.text);
    free(config.text);
    return result;
}

// What the micro-batches of a step hold over all ranks, once they are built. Floating-point operations are counted for real
// tokens, attention as if every token saw its whole sequence, the decoder for masked tokens only.
static StepWork step_work(const Run* r, MlmCounts counts) {
    const Config* c = &r->model.config;
    double C = c->C, layers = 6 * (4 * C * C + 2 * C * c->F) * counts.tokens + 12 * C * counts.squares;
    double heads = 6 * (c->V * C + C * C) * counts.masked + (c->next ? 6 * C * C * counts.sequences : 0);
    if (c->task) heads = 6 * C * (c->task == TASK_CLASSIFY ? C * counts.sequences : c->outputs * counts.tokens);
    StepWork work = {r->model.B * r->comm.size * r->micro_steps, counts.sequences, counts.tokens,
                     c->L * layers + heads};
    return work;
}

// Launch one optimizer step. Its results are on their way when this returns; finish_steps() reads them.
static void launch_step(Run* r, const Schedule* schedule) {
    Model* m = &r->model;
    Session* session = &r->session;
    StepLosses losses = {m->config.next ? 2 : 1, {&m->a.loss[0], &m->a.loss[1]}, {"mlm_loss", "nsp_loss"}};
    double lr = schedule_at(schedule, session->step);
    scope_step(&r->ctx, session->step + 1);
    mlm_source_build(&r->data, r->settings.overfit ? 0 : session->samples, m->B, r->comm.rank, r->comm.size);
    MlmCounts counts = mlm_source_count(&r->data, &r->comm);
    for (int i = 0; i < r->micro_steps; i++) {
        if (i + 1 == r->micro_steps && r->settings.mode != MODE_FORWARD) reduction_begin(&r->reduction);
        const MlmBatch* batch = &r->data.batches[i];
        steps_begin_launch(session);
        MlmInput in = mlm_load(&r->data.loader, batch, &r->ctx);
        MlmScales scales = mlm_scales((LossMean)r->mlm.loss_mean, batch, counts, r->micro_steps * r->comm.size);
        if (r->settings.mode == MODE_FORWARD) evaluate_batch(m, &in, scales, i == 0 ? SET : ADD, &r->ctx);
        else train_batch(m, &in, (uint64_t)session->step, scales, i == 0 ? SET : ADD, &r->ctx);
        steps_end_launch(session);
    }
    StepModel model = {&m->table, m->params, m->grads, &m->exact};
    steps_update(session, model, losses, &r->optimizer, &r->reduction, lr);
    steps_launched(&r->steps, session, lr, step_work(r, counts), losses, &r->optimizer);
    scope_step(&r->ctx, -1);
}

// Read and log the results of all steps but the last `lag`.
static void finish_steps(Run* r, int lag) {
    steps_finish(&r->steps, lag, &r->session, &r->log, &r->model.table, r->model.grads, &r->optimizer);
}

// --fill or --evaluate: print and end.
static void answer(Run* r) {
    signal(SIGINT, SIG_DFL), signal(SIGTERM, SIG_DFL);  // nothing is written that has to be whole
    if (*r->mlm.fill) {
        MlmBatch* batch = &r->data.batches[0];
        fill_batch(batch, &r->words, r->mlm.fill, r->model.T, r->model.config.V);
        Text text = fill(r, batch);
        fwrite(text.text, 1, text.length, stdout);
        free(text.text);
        return;
    }
    validate(r, NULL);
}

int main(int argc, char** argv) {
    static Run run;
    Run* r = &run;
    signal(SIGINT, on_signal), signal(SIGTERM, on_signal);
    run_open(r, argc, argv);
    Settings* s = &r->settings;
    Session* session = &r->session;
    Model* m = &r->model;
    if (s->evaluate) {
        answer(r);
        run_close(r);
        return DONE;
    }
    session_begin(session, &r->log);
    steps_begin(&r->steps, session, &r->reduction);
    uint64_t tokens = r->task.task ? r->examples.train.begin[r->examples.train.count] : r->data.train.text.files.tokens;
    steps_print_start(&r->steps, session, m->table.parameters, tokens, (double)m->N * r->comm.size * r->micro_steps);
    plan_print(stdout, &r->plan);

    Schedule schedule = session_schedule(session);
    if (session->step == 0 && r->has_val && s->val_every > 0) validate(r, &r->log);
    steps_restart_clock(&r->steps);
    while (session->step < session->end && !session_must_stop(session, (int)stop_signal)) {
        steps_profile_begin(&r->steps, session);
        launch_step(r, &schedule);
        int profile = steps_profile_end(&r->steps, session, &r->plan);
        int validation = r->has_val && session_is_due(session, s->val_every, 1);
        int text = r->has_val && !r->task.task && session_is_due(session, r->mlm.sample_every, 1);
        int checkpoint = session_checkpoint_is_due(session);
        int lag = profile || validation || text || checkpoint || session->step == session->end ? 0 : READBACK_LAG;
        finish_steps(r, lag);
        if (validation) validate(r, &r->log);
        if (text && r->comm.rank == 0) sample(r);
        if (checkpoint) save(r);
        if (profile || validation || text || checkpoint) steps_restart_clock(&r->steps);
    }
    finish_steps(r, 0);
    int failed = save(r) != 0 || session_finish_save(session) != 0;
    log_write_svg(&r->log, "BERT training");
    steps_end(&r->steps, session, &r->plan, failed);
    run_close(r);
    return DONE;
}
#endif
