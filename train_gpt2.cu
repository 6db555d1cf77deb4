/* Train GPT-2, from scratch or from a Hugging Face directory, on the CPU (gcc) or the GPU (nvcc): one source.
 *
 * Read it from top to bottom: the model's configuration, its tables of tensors, the forward pass, the backward pass,
 * then the settings and main(). A transformer block is two lists of ops, forward_block() and backward_block(); each
 * op is a header in llmc/ops/ that holds its formula, a plain C reference and the fast version.
 *
 * B batch, T sequence length, N = B * T rows, V vocabulary (Vp as stored, padded), L layers, NH heads, HS head size,
 * C = NH * HS channels, F channels inside the MLP (4 C). */
#include <signal.h>

#include "llmc/base/log.h"       // terminal, log.jsonl, loss.svg
#include "llmc/base/schedule.h"  // learning rate of a step
#include "llmc/ops/attention.h"
#include "llmc/ops/attention_decode.h"
#include "llmc/ops/classifier.h"
#include "llmc/ops/embedding.h"
#include "llmc/ops/gather.h"
#include "llmc/ops/gelu.h"
#include "llmc/ops/layernorm.h"
#include "llmc/ops/matmul.h"
#include "llmc/run/choices_evaluation.h"  // HellaSwag and its like
#include "llmc/run/comm.h"                // ranks
#include "llmc/run/config.h"              // config.json as rows
#include "llmc/run/generate.h"            // prompts, texts, the next token
#include "llmc/run/lm_data.h"             // token shards, their batches
#include "llmc/run/optimizer.h"           // norm, loss scale, clipping, AdamW
#include "llmc/run/plan.h"                // memory by what needs it
#include "llmc/run/profiler.h"            // where a step's time goes
#include "llmc/run/session.h"             // where a run stands, checkpoints, resume
#include "llmc/run/settings.h"            // flags that all trainers share
#include "llmc/run/steps.h"               // steps launched ahead, their results
#include "llmc/run/tensors.h"             // one table for tensors

// ---------------------------------------------------------------------------------------------------------
// Parameters. w of a linear layer is [out, in] in memory; GPT-2's files hold [in, out] ("Conv1D").

typedef struct {
    Affine ln1, qkv, attproj, ln2, fc, fcproj;
    const real *ln1_exact, *ln2_exact;  // their w in full precision
} BlockParams;

typedef struct {
    floatX *wte, *wpe;
    Affine lnf;
    floatX* head;  // the output matrix [Vp, C]: wte itself where the model ties them
    const real* lnf_exact;
    BlockParams* h;
} Params;

// The same fields for gradients: the tables below bind both kinds of structs.
typedef struct {
    AffineGradient ln1, qkv, attproj, ln2, fc, fcproj;
} BlockGradients;

typedef struct {
    real *wte, *wpe;
    AffineGradient lnf;
    real* head;
    BlockGradients* h;
} Gradients;

// Symbols of the tables' dimensions; ONE_DIM ends the shape of a vector.
enum { ONE_DIM, DIM_V, DIM_VP, DIM_T, DIM_C, DIM_3C, DIM_F, DIM_N, DIM_NH, DIM_DN, DIMS };

// clang-format off
static const TensorRow EMBEDDING_ROWS[] = {
    // name in files                         field                              shape                 stored  initial values        decay, layout in files
    {"transformer.wte.weight",                offsetof(Params, wte),             {DIM_V, DIM_C},  OWN, DIM_VP, INIT_NORMAL,          1},
    {"transformer.wpe.weight",                offsetof(Params, wpe),             {DIM_T, DIM_C},  OWN, 0,      INIT_NORMAL,          1},
};
static const TensorRow BLOCK_ROWS[] = {
    {"transformer.h.%d.ln_1.weight",          offsetof(BlockParams, ln1.w),      {DIM_C},         OWN, 0,      INIT_ONE,             0, AS_IN_MEMORY, offsetof(BlockParams, ln1_exact)},
    {"transformer.h.%d.ln_1.bias",            offsetof(BlockParams, ln1.b),      {DIM_C},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.attn.c_attn.weight",   offsetof(BlockParams, qkv.w),      {DIM_3C, DIM_C}, OWN, 0,      INIT_NORMAL,          1, TRANSPOSED},
    {"transformer.h.%d.attn.c_attn.bias",     offsetof(BlockParams, qkv.b),      {DIM_3C},        OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.attn.c_proj.weight",   offsetof(BlockParams, attproj.w),  {DIM_C, DIM_C},  OWN, 0,      INIT_NORMAL_RESIDUAL, 1, TRANSPOSED},
    {"transformer.h.%d.attn.c_proj.bias",     offsetof(BlockParams, attproj.b),  {DIM_C},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.ln_2.weight",          offsetof(BlockParams, ln2.w),      {DIM_C},         OWN, 0,      INIT_ONE,             0, AS_IN_MEMORY, offsetof(BlockParams, ln2_exact)},
    {"transformer.h.%d.ln_2.bias",            offsetof(BlockParams, ln2.b),      {DIM_C},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.mlp.c_fc.weight",      offsetof(BlockParams, fc.w),       {DIM_F, DIM_C},  OWN, 0,      INIT_NORMAL,          1, TRANSPOSED},
    {"transformer.h.%d.mlp.c_fc.bias",        offsetof(BlockParams, fc.b),       {DIM_F},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.mlp.c_proj.weight",    offsetof(BlockParams, fcproj.w),   {DIM_C, DIM_F},  OWN, 0,      INIT_NORMAL_RESIDUAL, 1, TRANSPOSED},
    {"transformer.h.%d.mlp.c_proj.bias",      offsetof(BlockParams, fcproj.b),   {DIM_C},         OWN, 0,      INIT_ZERO,            0},
};
static const TensorRow FINAL_ROWS[] = {
    {"transformer.ln_f.weight",               offsetof(Params, lnf.w),           {DIM_C},         OWN, 0,      INIT_ONE,             0, AS_IN_MEMORY, offsetof(Params, lnf_exact)},
    {"transformer.ln_f.bias",                 offsetof(Params, lnf.b),           {DIM_C},         OWN, 0,      INIT_ZERO,            0},
};
static const TensorRow HEAD_ROWS[] = {  // only where the head is not tied to wte
    {"lm_head.weight",                        offsetof(Params, head),            {DIM_V, DIM_C},  OWN, DIM_VP, INIT_NORMAL,          1},
};
// clang-format on

// ---------------------------------------------------------------------------------------------------------
// Activations, all [N, ...]. A residual buffer first holds a branch's output, then the sum with the residual.

typedef struct {
    floatX *ln1, *qkv, *att, *mid, *ln2, *fc_pre, *fc, *out;
    Moments ln1_stats, ln2_stats;
    real* lse;
} BlockActs;

typedef struct {
    floatX *embedded, *lnf, *logits;
    Moments lnf_stats;
    real *losses, *loss;                             // [N] of each row; [1] what they add up to
    floatX *dx, *dbranch, *dln, *dfc, *dqkv, *datt;  // gradients on their way down; dx is the residual stream's
    BlockActs* h;
} Acts;

typedef struct {
    int L, NH, C, F, V, T;  // T: positions, the longest sequence the model knows
    int tied;               // 1: the head is the token embedding
    Gelu gelu;
    double eps, init_range;
    double embedding_dropout, attention_dropout, residual_dropout;
} Config;

typedef struct {
    Config config;
    int B, T, N;  // of a micro-batch: N = B * T rows
    int Vp;       // stored rows of the vocabulary
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
    ExactParameters exact;
    Reduction* reduction;    // NULL: one rank
    const real* master;      // the parameters in full precision; NULL: there are none
    const real* loss_scale;  // [1] where the ops run; NULL: 1
    int *inputs, *targets;   // [N]
    int* single;             // [2] cu_seqlens of one sequence, for sampling
    int* layout;             // cu_seqlens, sequence and position of B sequences of T rows
    int for_choices;         // memory is planned for multiple-choice sets too
    int doc_mask;            // attention does not cross documents,
    Sequences documents;     // which these are in the micro-batch
    int known;               // positions before row 0 of a forward pass: their keys and values are in each layer's qkv
    // Dropout of the running step; training 0 switches it off.
    int training;
    uint64_t seed, step;
} Model;

// ---------------------------------------------------------------------------------------------------------
// Forward

static Dropout dropout_at(const Model* m, const Sequences* s, int layer, int site) {
    double p = site == SITE_DROPOUT_EMBEDDING   ? m->config.embedding_dropout
               : site == SITE_DROPOUT_ATTENTION ? m->config.attention_dropout
                                                : m->config.residual_dropout;
    return m->training ? dropout_make(p, m->seed, m->step, layer, site, s) : dropout_none(s);
}

static AttentionShape attention_at(const Model* m, const Sequences* s, int layer) {
    AttentionShape shape = {m->config.NH, m->config.C / m->config.NH, CAUSAL,
                            dropout_at(m, s, layer, SITE_DROPOUT_ATTENTION)};
    return shape;
}

// What enters block l: the residual stream after the block before it.
static floatX* residual_into(const Model* m, int l) { return l == 0 ? m->a.embedded : m->a.h[l - 1].out; }

// One pre-layernorm block. It begins with its ln1 computed and ends by computing the next layernorm, because a residual
// sum and the layernorm that reads it are one op.
static void forward_block(Model* m, int l, const Sequences* s, Context* ctx) {
    const Config* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    BlockActs* a = &m->a.h[l];
    int last = l + 1 == c->L, N = s->rows, C = c->C;
    floatX *next = last ? m->a.lnf : m->a.h[l + 1].ln1, *qkv = a->qkv + (size_t)m->known * 3 * (size_t)C;
    Moments next_stats = last ? m->a.lnf_stats : m->a.h[l + 1].ln1_stats;
    Norm next_norm = last ? norm_of(m->p.lnf, m->p.lnf_exact) : norm_of(p[1].ln1, p[1].ln1_exact);

    scope_at(ctx, FORWARD, l);
    matmul_forward(qkv, a->ln1, p->qkv, N, C, 3 * C, SET, ctx);
    if (m->known) attention_decode(a->att, a->qkv, m->known, c->NH, C / c->NH, ctx);
    else attention_forward(a->att, a->lse, a->qkv, sequences_parts(s), attention_at(m, s, l), ctx);
    matmul_forward(a->mid, a->att, p->attproj, N, C, C, SET, ctx);
    residual_layernorm_forward(a->ln2, a->mid, a->ln2_stats, residual_into(m, l), norm_of(p->ln2, p->ln2_exact), N, C,
                               (real)c->eps, dropout_at(m, s, l, SITE_DROPOUT_ATTENTION_OUT), ctx);
    matmul_gelu_forward(a->fc, a->fc_pre, a->ln2, p->fc, N, C, c->F, c->gelu, ctx);
    matmul_forward(a->out, a->fc, p->fcproj, N, c->F, C, SET, ctx);
    residual_layernorm_forward(next, a->out, next_stats, a->mid, next_norm, N, C, (real)c->eps,
                               dropout_at(m, s, l, SITE_DROPOUT_MLP_OUT), ctx);
}

// Up to the last layernorm, m->a.lnf [N, C].
static void forward(Model* m, const int* inputs, const Sequences* s, Context* ctx) {
    const Config* c = &m->config;
    Embeddings tables = {m->p.wte, m->p.wpe, NULL};
    EmbeddingSizes sizes = {m->Vp, c->T, 0, c->C, -1};
    scope_at(ctx, FORWARD, -1);
    reduction_wait(m->reduction, 0, ctx);
    exact_update(&m->exact, &m->table, m->params, m->master, m->reduction, ctx);
    embedding_forward(m->a.embedded, inputs, NULL, tables, s, sizes, dropout_at(m, s, 0, SITE_DROPOUT_EMBEDDING), ctx);
    layernorm_forward(m->a.h[0].ln1, m->a.h[0].ln1_stats, m->a.embedded, norm_of(m->p.h[0].ln1, m->p.h[0].ln1_exact),
                      s->rows, c->C, (real)c->eps, ctx);
    for (int l = 0; l < c->L; l++) {
        reduction_wait(m->reduction, l + 1, ctx);  // the block's last op reads parameters of the next
        forward_block(m, l, s, ctx);
    }
    scope_at(ctx, FORWARD, -1);
}

// logits [N, Vp] of the rows x [N, C] of the last layernorm.
static void forward_head(Model* m, const floatX* x, int N, Context* ctx) {
    Affine head = {m->p.head, NULL};
    matmul_forward(m->a.logits, x, head, N, m->config.C, m->Vp, SET, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Backward. `mode` says how parameter gradients are written: SET by a step's first micro-batch, ADD by the others.

// Where the gradient of a residual sum goes: to the stream, and through dropout to the branch of layer l, which ends in
// a bias. Layer -1 is the embedding, which is no branch.
static ResidualGradient residual_gradient(const Model* m, const Sequences* s, int l, int site) {
    ResidualGradient r = {m->a.dx, m->a.dbranch, NULL, dropout_none(s)};
    if (l < 0) return r;
    r.dbias = site == SITE_DROPOUT_ATTENTION_OUT ? m->g.h[l].attproj.b : m->g.h[l].fcproj.b;
    r.dropout = dropout_at(m, s, l, site);
    return r;
}

// The gradient of a branch's output, which residual_layernorm_backward() has left: that of the stream, but for dropout.
static const floatX* branch_gradient(const Model* m, const Sequences* s, int l, int site) {
    return dropout_at(m, s, l, site).threshold ? m->a.dbranch : m->a.dx;
}

// Begins and ends as forward_block() ends and begins: the layernorm after the block has been done by the one after it.
static void backward_block(Model* m, int l, const Sequences* s, Mode mode, Context* ctx) {
    const Config* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    const BlockGradients* g = &m->g.h[l];
    BlockActs* a = &m->a.h[l];
    int N = s->rows, C = c->C;
    Rows rows = {N, C};
    // These biases' gradients come from ops that have the gradient in their hands: layernorm, GELU.
    AffineGradient dfcproj = {g->fcproj.w, NULL}, dattproj = {g->attproj.w, NULL}, dfc = {g->fc.w, NULL};
    BiasGradient dfc_bias = {g->fc.b, mode};
    floatX* x = residual_into(m, l);

    scope_at(ctx, BACKWARD, l);
    if (m->recompute >= 1) gelu_forward(a->fc, a->fc_pre, (size_t)N * (size_t)c->F, c->gelu, ctx);
    if (m->recompute >= 2)
        layernorm_forward(a->ln2, a->ln2_stats, a->mid, norm_of(p->ln2, p->ln2_exact), N, C, (real)c->eps, ctx);
    const floatX* dbranch = branch_gradient(m, s, l, SITE_DROPOUT_MLP_OUT);
    matmul_backward_weight(dfcproj, dbranch, a->fc, N, c->F, C, mode, ctx);
    matmul_gelu_backward_input(m->a.dfc, dfc_bias, dbranch, p->fcproj.w, a->fc_pre, N, c->F, C, c->gelu, ctx);
    matmul_backward_weight(dfc, m->a.dfc, a->ln2, N, C, c->F, mode, ctx);
    matmul_backward_input(m->a.dln, m->a.dfc, p->fc.w, N, C, c->F, SET, ctx);
    residual_layernorm_backward(residual_gradient(m, s, l, SITE_DROPOUT_ATTENTION_OUT), g->ln2, m->a.dln, a->mid,
                                a->ln2_stats, p->ln2.w, rows, ADD, mode, ctx);

    dbranch = branch_gradient(m, s, l, SITE_DROPOUT_ATTENTION_OUT);
    matmul_backward_weight(dattproj, dbranch, a->att, N, C, C, mode, ctx);
    matmul_backward_input(m->a.datt, dbranch, p->attproj.w, N, C, C, SET, ctx);
    // Buckets are summed beside attention, which makes do with the multiprocessors that are free: matmuls would not.
    reduction_ready(m->reduction, l + 1, m->grads, ctx);
    attention_backward(m->a.dqkv, m->a.datt, a->qkv, a->att, a->lse, sequences_parts(s), attention_at(m, s, l), ctx);
    if (m->recompute >= 2)
        layernorm_forward(a->ln1, a->ln1_stats, x, norm_of(p->ln1, p->ln1_exact), N, C, (real)c->eps, ctx);
    matmul_backward_weight(g->qkv, m->a.dqkv, a->ln1, N, C, 3 * C, mode, ctx);
    matmul_backward_input(m->a.dln, m->a.dqkv, p->qkv.w, N, C, 3 * C, SET, ctx);
    residual_layernorm_backward(residual_gradient(m, s, l - 1, SITE_DROPOUT_MLP_OUT), g->ln1, m->a.dln, x, a->ln1_stats,
                                p->ln1.w, rows, ADD, mode, ctx);
}

// From m->a.logits, which hold the gradient of the logits, to the gradients of all parameters.
static void backward(Model* m, const int* inputs, const Sequences* s, Mode mode, Context* ctx) {
    const Config* c = &m->config;
    int N = s->rows, C = c->C;
    AffineGradient dhead = {m->g.head, NULL};
    Rows rows = {N, C};
    EmbeddingGradients dtables = {m->g.wte, m->g.wpe, NULL};
    EmbeddingSizes sizes = {m->Vp, c->T, 0, C, -1};

    scope_at(ctx, BACKWARD, -1);
    matmul_backward_weight(dhead, m->a.logits, m->a.lnf, N, C, m->Vp, mode, ctx);
    matmul_backward_input(m->a.dln, m->a.logits, m->p.head, N, C, m->Vp, SET, ctx);
    residual_layernorm_backward(residual_gradient(m, s, c->L - 1, SITE_DROPOUT_MLP_OUT), m->g.lnf, m->a.dln,
                                residual_into(m, c->L), m->a.lnf_stats, m->p.lnf.w, rows, SET, mode, ctx);
    for (int l = c->L - 1; l >= 0; l--) backward_block(m, l, s, mode, ctx);
    scope_at(ctx, BACKWARD, -1);
    // A tied head has already written the token embedding's gradient.
    embedding_backward(dtables, m->a.dx, inputs, NULL, s, sizes, dropout_at(m, s, 0, SITE_DROPOUT_EMBEDDING),
                       c->tied ? ADD : mode, mode, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Losses

// The B sequences of the micro-batch, the first of them number `first` of the whole step, and the documents in them.
static Sequences model_sequences(Model* m, int first) {
    Sequences s = {
        m->N, m->B, m->T, (int64_t)m->N * m->T, first, m->layout, m->layout + m->B + 1, m->layout + m->B + 1 + m->N};
    m->documents.first = (int)((uint32_t)first * (uint32_t)m->T);
    if (m->doc_mask) s.parts = &m->documents;
    return s;
}

// Loss of the micro-batch in m->inputs and m->targets, `scale` times the sum over its tokens, put into or added to
// m->a.loss by `mode`; no gradients, no dropout.
static void evaluate_batch(Model* m, double scale, Mode mode, Context* ctx) {
    Sequences s = model_sequences(m, 0);
    ClassifierLosses losses = {m->a.losses, m->a.loss, scale, mode};
    m->training = 0;
    forward(m, m->inputs, &s, ctx);
    forward_head(m, m->a.lnf, s.rows, ctx);
    classifier_forward(losses, m->a.logits, m->targets, s.rows, m->config.V, m->Vp, ctx);
}

// As evaluate_batch(), with dropout, and with the gradients of all parameters, *m->loss_scale times too large, which
// `mode` writes too. The micro-batch holds the sequences first .. first + B - 1 of step number `step`.
static void train_batch(Model* m, uint64_t step, int first, double scale, Mode mode, Context* ctx) {
    Sequences s = model_sequences(m, first);
    ClassifierLosses losses = {m->a.losses, m->a.loss, scale, mode};
    m->training = 1;
    m->step = step;
    forward(m, m->inputs, &s, ctx);
    forward_head(m, m->a.lnf, s.rows, ctx);
    scope_at(ctx, BACKWARD, -1);
    classifier_backward(losses, m->a.logits, m->targets, m->loss_scale, s.rows, m->config.V, m->Vp, ctx);
    backward(m, m->inputs, &s, mode, ctx);
}

// The number in m->a.loss. Waits for it.
static double model_loss(const Model* m, Context* ctx) {
    real loss;
    device_download(ctx, &loss, m->a.loss, sizeof loss);
    return (double)loss;
}

// ---------------------------------------------------------------------------------------------------------
// Memory

// Fill the tables for this configuration and batch; allocates nothing but the tables.
static void model_plan(Model* m, Config config, int B, int T, int recompute) {
    memset(m, 0, sizeof *m);
    m->config = config;
    m->B = B, m->T = T, m->N = B * T;
    m->Vp = (int)round_up((size_t)config.V, 128);
    m->recompute = recompute;
    m->table.fixed = recompute >= FORWARD_ALONE;
    int dims[DIMS] = {
        1, config.V, m->Vp, config.T, config.C, 3 * config.C, config.F, m->N, config.NH, m->table.fixed ? 0 : m->N};
    tensors_add(&m->table, EMBEDDING_ROWS, COUNT_OF(EMBEDDING_ROWS), dims, -1);
    for (int l = 0; l < config.L; l++) tensors_add(&m->table, BLOCK_ROWS, COUNT_OF(BLOCK_ROWS), dims, l);
    tensors_add(&m->table, FINAL_ROWS, COUNT_OF(FINAL_ROWS), dims, -1);
    if (!config.tied) tensors_add(&m->table, HEAD_ROWS, COUNT_OF(HEAD_ROWS), dims, -1);
    tensors_finish(&m->table);

    // What the backward pass recomputes needs one buffer for all layers; without that pass all does but what texts go on
    // from, the keys and values.
    Placement gelu = recompute >= RECOMPUTE_GELU ? SHARED : OWN, norm = recompute >= RECOMPUTE_NORMS ? SHARED : OWN,
              kept = recompute >= FORWARD_ALONE ? SHARED : OWN;
    // clang-format off
    const TensorRow block_acts[] = {
        {"h.%d.ln1",      offsetof(BlockActs, ln1),      {DIM_N, DIM_C}, norm},
        {"h.%d.qkv",      offsetof(BlockActs, qkv),      {DIM_N, DIM_3C}},
        {"h.%d.att",      offsetof(BlockActs, att),      {DIM_N, DIM_C}, kept},
        {"h.%d.mid",      offsetof(BlockActs, mid),      {DIM_N, DIM_C}, kept},
        {"h.%d.ln2",      offsetof(BlockActs, ln2),      {DIM_N, DIM_C}, norm},
        {"h.%d.fc_pre",   offsetof(BlockActs, fc_pre),   {DIM_N, DIM_F}, kept},
        {"h.%d.fc",       offsetof(BlockActs, fc),       {DIM_N, DIM_F}, gelu},
        {"h.%d.out",      offsetof(BlockActs, out),      {DIM_N, DIM_C}, kept},
    };
    const TensorRow outer_acts[] = {
        {"embedded",      offsetof(Acts, embedded),      {DIM_N, DIM_C}},
        {"lnf",           offsetof(Acts, lnf),           {DIM_N, DIM_C}},
        {"logits",        offsetof(Acts, logits),        {DIM_N, DIM_VP}},
        {"dx",            offsetof(Acts, dx),            {DIM_DN, DIM_C}},
        {"dbranch",       offsetof(Acts, dbranch),       {DIM_DN, DIM_C}},
        {"dln",           offsetof(Acts, dln),           {DIM_DN, DIM_C}},
        {"dfc",           offsetof(Acts, dfc),           {DIM_DN, DIM_F}},
        {"dqkv",          offsetof(Acts, dqkv),          {DIM_DN, DIM_3C}},
        {"datt",          offsetof(Acts, datt),          {DIM_DN, DIM_C}},
    };
    const TensorRow block_stats[] = {
        {"h.%d.ln1_mean", offsetof(BlockActs, ln1_stats.mean), {DIM_N}, kept},
        {"h.%d.ln1_rstd", offsetof(BlockActs, ln1_stats.rstd), {DIM_N}, kept},
        {"h.%d.ln2_mean", offsetof(BlockActs, ln2_stats.mean), {DIM_N}, kept},
        {"h.%d.ln2_rstd", offsetof(BlockActs, ln2_stats.rstd), {DIM_N}, kept},
        {"h.%d.lse",      offsetof(BlockActs, lse),            {DIM_NH, DIM_N}, kept},
    };
    const TensorRow outer_stats[] = {
        {"lnf_mean",      offsetof(Acts, lnf_stats.mean),      {DIM_N}},
        {"lnf_rstd",      offsetof(Acts, lnf_stats.rstd),      {DIM_N}},
        {"losses",        offsetof(Acts, losses),              {DIM_N}},
        {"loss",          offsetof(Acts, loss),                {ONE_DIM}},
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

// Ints of the batch's tokens with a single sequence's boundaries, and of what says how the sequences lie.
static size_t batch_ints(const Model* m) { return 2 * (size_t)m->N + 2; }
static size_t layout_ints(const Model* m) { return (size_t)m->B + 1 + 2 * (size_t)m->N; }

// What the run takes, before anything is allocated.
static MemoryPlan model_memory(const Model* m, UpdateSettings update, const Context* ctx) {
    const Config* c = &m->config;
    AttentionShape shape = {c->NH, c->C / c->NH, CAUSAL, dropout_make(c->attention_dropout, 0, 0, 0, 0, NULL)};
    EmbeddingSizes tables = {m->Vp, c->T, 0, c->C, -1};
    int parts = m->doc_mask ? lm_data_planned_documents(m->B, m->N) : m->B;
    size_t documents = m->doc_mask ? documents_ints(m->N) : 0,
           choices = m->for_choices ? choices_device_bytes(m->N) : 0;
    StepSizes step = {shape, tables, m->N, m->B, m->T, parts, m->N, c->F, 0};
    return plan_make(&m->table, &m->acts_table, &m->stats_table, update,
                     (batch_ints(m) + layout_ints(m) + documents) * sizeof(int) + choices, &step, ctx);
}

static void model_alloc(Model* m, uint64_t seed, Context* ctx) {
    const Config* c = &m->config;
    m->seed = seed;
    m->params = (floatX*)device_alloc(ctx, m->table.elements * sizeof(floatX), "parameters");
    m->grads = (real*)device_alloc(ctx, tensors_updated(&m->table).size * sizeof(real), "gradients");
    m->acts_buffer = (floatX*)device_alloc(ctx, m->acts_table.elements * sizeof(floatX), "activations");
    m->stats_buffer = (real*)device_alloc(ctx, m->stats_table.elements * sizeof(real), "activations");
    m->inputs = (int*)device_alloc(ctx, batch_ints(m) * sizeof(int), "batch");
    m->targets = m->inputs + m->N;
    m->single = m->targets + m->N;
    m->layout = (int*)device_alloc(ctx, layout_ints(m) * sizeof(int), "batch");
    m->p.h = (BlockParams*)xcalloc((size_t)c->L, sizeof(BlockParams));
    m->g.h = (BlockGradients*)xcalloc((size_t)c->L, sizeof(BlockGradients));
    m->a.h = (BlockActs*)xcalloc((size_t)c->L, sizeof(BlockActs));
    tensors_bind(&m->table, m->params, sizeof(floatX), &m->p, m->p.h, sizeof(BlockParams));
    exact_open(&m->exact, &m->table, m->params, &m->p, m->p.h, sizeof(BlockParams), ctx);
    tensors_bind(&m->table, m->grads, sizeof(real), &m->g, m->g.h, sizeof(BlockGradients));
    tensors_bind(&m->acts_table, m->acts_buffer, sizeof(floatX), &m->a, m->a.h, sizeof(BlockActs));
    tensors_bind(&m->stats_table, m->stats_buffer, sizeof(real), &m->a, m->a.h, sizeof(BlockActs));
    if (c->tied) m->p.head = m->p.wte, m->g.head = m->g.wte;

    int* layout = (int*)xmalloc(layout_ints(m) * sizeof(int));
    sequences_uniform(layout, layout + m->B + 1, layout + m->B + 1 + m->N, m->B, m->T);
    device_upload(ctx, m->layout, layout, layout_ints(m) * sizeof(int));
    free(layout);
}

static void model_forget_plan(Model* m) {
    tensors_free(&m->table), tensors_free(&m->acts_table), tensors_free(&m->stats_table);
}

static void model_free(Model* m) {
    exact_close(&m->exact, &m->table);
    device_free(m->params, m->table.elements * sizeof(floatX));
    device_free(m->grads, tensors_updated(&m->table).size * sizeof(real));
    device_free(m->acts_buffer, m->acts_table.elements * sizeof(floatX));
    device_free(m->stats_buffer, m->stats_table.elements * sizeof(real));
    device_free(m->inputs, batch_ints(m) * sizeof(int));
    device_free(m->layout, layout_ints(m) * sizeof(int));
    free(m->p.h), free(m->g.h), free(m->a.h);
    model_forget_plan(m);
}

// ---------------------------------------------------------------------------------------------------------
// Configuration: Hugging Face's config.json, or a descriptor

// clang-format off
static const ConfigRow CONFIG_ROWS[] = {
    // key                             type         field                               default        allowed
    {"n_layer",                         CONFIG_INT,  offsetof(Config, L),                 CONFIG_NEEDED, 1, 1 << 12},
    {"n_head",                          CONFIG_INT,  offsetof(Config, NH),                CONFIG_NEEDED, 1, 1 << 12},
    {"n_embd",                          CONFIG_INT,  offsetof(Config, C),                 CONFIG_NEEDED, 1, 1 << 20},
    {"n_inner",                         CONFIG_INT,  offsetof(Config, F),                 0,             0, 1 << 22},
    {"n_positions",                     CONFIG_INT,  offsetof(Config, T),                 CONFIG_NEEDED, 1, 1 << 20},
    {"vocab_size",                      CONFIG_INT,  offsetof(Config, V),                 CONFIG_NEEDED, 1, 1 << 24},
    {"layer_norm_epsilon",              CONFIG_REAL, offsetof(Config, eps),               1e-5,          0, 1},
    {"initializer_range",               CONFIG_REAL, offsetof(Config, init_range),        0.02,          0, 1},
    {"embd_pdrop",                      CONFIG_REAL, offsetof(Config, embedding_dropout), 0.1,           0, 0.999},
    {"attn_pdrop",                      CONFIG_REAL, offsetof(Config, attention_dropout), 0.1,           0, 0.999},
    {"resid_pdrop",                     CONFIG_REAL, offsetof(Config, residual_dropout),  0.1,           0, 0.999},
    {"tie_word_embeddings",             CONFIG_BOOL, offsetof(Config, tied),              1,             0, 1},
    {"scale_attn_weights",              CONFIG_BOOL, CONFIG_NO_FIELD,                     1,             1, 1},
    {"scale_attn_by_inverse_layer_idx", CONFIG_BOOL, CONFIG_NO_FIELD,                     0,             0, 0},
    {"add_cross_attention",             CONFIG_BOOL, CONFIG_NO_FIELD,                     0,             0, 0},
};
// clang-format on

static void config_check(const Config* c, const char* source) {
    config_rows_check(c, CONFIG_ROWS, COUNT_OF(CONFIG_ROWS), source);
    if (c->C % c->NH != 0) die(USAGE, "%s: %d channels cannot be cut into %d heads", source, c->C, c->NH);
}

// "d12", "d24", "d36", "d48": the published sizes; or "L=4,C=128,NH=4,V=257,T=256,F=512,tied=1", where V defaults
// to `data_V` and F to 4 C.
static Config config_from_descriptor(const char* text, int data_V) {
    static const char* const published[][2] = {{"d12", "L=12,NH=12,C=768,V=50257,T=1024"},
                                               {"d24", "L=24,NH=16,C=1024,V=50257,T=1024"},
                                               {"d36", "L=36,NH=20,C=1280,V=50257,T=1024"},
                                               {"d48", "L=48,NH=25,C=1600,V=50257,T=1024"}};
    Config c = {4, 4, 128, 0, data_V, 256, 1, GELU_TANH, 1e-5, 0.02, 0, 0, 0};
    const ConfigSize sizes[] = {{"L", &c.L}, {"C", &c.C}, {"NH", &c.NH},    {"V", &c.V},
                                {"T", &c.T}, {"F", &c.F}, {"tied", &c.tied}};
    const char* expanded = text;
    for (size_t i = 0; i < COUNT_OF(published); i++)
        if (strcmp(text, published[i][0]) == 0) expanded = published[i][1];
    if (config_sizes_read(sizes, COUNT_OF(sizes), expanded) != 0 || c.tied > 1)
        die(USAGE,
            "-e %s: is neither a model directory, a .safetensors file, d12, d24, d36, d48, nor sizes like "
            "L=4,C=128,NH=4,T=256 (V, F and tied=0|1 may follow)",
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
    json_load(&json, path, (size_t)1 << 20);
    config_expect(json.root, "model_type", "gpt2", path);
    c.gelu = config_gelu(json.root, "activation_function", "gelu_new", path);
    config_rows_read(&c, CONFIG_ROWS, COUNT_OF(CONFIG_ROWS), json.root, path);
    if (c.F == 0) c.F = 4 * c.C;
    config_check(&c, path);
    json_free(&json);
    return c;
}

// Take the parameters from a file, into the full-precision copy too where the optimizer has one.
static void load_weights(Model* m, const Optimizer* o, const char* path, Context* ctx) {
    static const char* const ignored[] = {".attn.bias", ".attn.masked_bias", "lm_head.weight"};
    FileRules rules = {"transformer.", ignored, m->config.tied ? 3 : 2, NULL, 0, NULL, 0};
    TensorPart part = {"", m->params, VIEW_FLOATX};
    tensors_read(path, &m->table, &part, 1, &rules, NULL, ctx);
    exact_read_master(&m->exact, &m->table, o, path, &rules, ctx);
}

static void random_weights(Model* m, const Optimizer* o, uint64_t seed, Context* ctx) {
    double std = m->config.init_range;
    HostView view = host_view_open(m->params, m->table.elements, VIEW_FLOATX);
    tensors_init(&m->table, view.values, seed, std, std / sqrt(2.0 * m->config.L));
    optimizer_write_weights(o, &view, ctx);
    exact_update(&m->exact, &m->table, m->params, NULL, NULL, ctx);  // of fixed parameters, unless a file has them
    host_view_close(&view);
}

#ifndef NO_MAIN  // tests include this file for the model alone

// ---------------------------------------------------------------------------------------------------------
// Settings

static const char FREE_TO_CHANGE[] = SETTINGS_FREE_TO_CHANGE GENERATE_FREE_TO_CHANGE CHOICES_FREE_TO_CHANGE;

// Those of this trainer alone; llmc/run/settings.h has the others.
static int settings_flags(Settings* shared, GenerateSettings* s, ChoicesSets* choices, int* doc_mask, Flag* table) {
    // clang-format off
    const Flag rows[] = {
        {"-e",  "--model",          FLAG_STRING, &shared->model,          "L=4,C=128,NH=4,T=256", 0, 0, NULL, "Hugging Face directory, .safetensors file, llm.c's .bin, config.json (from scratch), d12|d24|d36|d48, or sizes L= C= NH= V= T= F= tied=", 0},
        {NULL,  "--doc-mask",       FLAG_INT,    doc_mask,             "0",      0, 1, NULL, "1: attention does not cross documents, which begin with the end-of-text token; positions stay those of the sequence", 0},
    };
    // clang-format on
    int count = settings_add_rows(table, settings_rows(shared, table, 0), rows, COUNT_OF(rows));
    return choices_rows(choices, table, generate_rows(s, table, count));
}

// ---------------------------------------------------------------------------------------------------------
// A run

typedef struct {
    Settings settings;
    GenerateSettings generate;
    Generation text;
    ChoicesSets choices;
    int doc_mask;
    Flag flags[MAX_FLAGS];
    Session session;
    Context ctx;
    Comm comm;
    Reduction reduction;
    Model model;
    MemoryPlan plan;
    Optimizer optimizer;
    LmData data;
    int micro_steps;  // micro-batches of a step on this rank
    Steps steps;
    Log log;
} Run;

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

static void config_write(Text* t, const Config* c, int end_of_text) {
    text_printf(t, "{\"architectures\": [\"GPT2LMHeadModel\"], \"model_type\": \"gpt2\"");
    json_put_string(t, "activation_function", c->gelu == GELU_TANH ? "gelu_new" : "gelu");
    config_rows_write(t, c, CONFIG_ROWS, COUNT_OF(CONFIG_ROWS));
    json_put_integer(t, "bos_token_id", end_of_text);
    json_put_integer(t, "eos_token_id", end_of_text);
    json_put_string(t, "dtype", safetensors_dtype_name(FLOATX_NAME));
    text_printf(t, "}\n");
}

// The largest micro-batch whose plan fits, 0 if none does.
static int largest_batch(const Model* like, UpdateSettings update, const Context* ctx) {
    int low = 0, high = like->B;
    while (low < high) {
        Model m;
        int middle = (low + high + 1) / 2;
        model_plan(&m, like->config, middle, like->T, like->recompute);
        m.doc_mask = like->doc_mask, m.for_choices = like->for_choices;
        if (plan_fits(model_memory(&m, update, ctx))) low = middle;
        else high = middle - 1;
        model_forget_plan(&m);
    }
    return low;
}

// Everything that can be said of a run before any data is read: settings, configuration, memory. Returns where its
// weights are (caller frees), NULL for training from scratch.
static char* run_plan(Run* r, const char* data_dir) {
    Settings* s = &r->settings;
    const char* source = r->session.checkpoint ? r->session.checkpoint : s->model;
    char *directory, *weights, *sizes = session_find_llmc(source, &directory, &weights);
    if (!sizes) session_find_model(source, &directory, &weights);
    char* path = directory ? xprintf("%s/config.json", directory) : NULL;
    session_find_tokenizer(&r->session, directory, data_dir);
    int data_V = r->session.tokenizer_dir ? r->session.tokenizer.size : 50257;
    Config config = directory && !sizes ? config_read(path) : config_from_descriptor(sizes ? sizes : source, data_V);
    free(directory), free(path), free(sizes);

    if (s->dropout >= 0) config.embedding_dropout = config.attention_dropout = config.residual_dropout = s->dropout;
    int T = s->T ? s->T : config.T;
    if (T > config.T) die(USAGE, "-t %d: the model knows %d positions; choose at most that", T, config.T);
    r->micro_steps = session_micro_steps(&r->session, s->B, T);
    model_plan(&r->model, config, s->B, T, s->evaluate ? FORWARD_ALONE : s->recompute);
    r->model.doc_mask = r->doc_mask;
    r->model.for_choices = *r->choices.files != '\0';
    return weights;
}

// All ranks are about to train the same.
static void run_check_ranks(const Run* r) {
    Text config = {NULL, 0, 0};
    config_write(&config, &r->model.config, session_end_of_text(&r->session, r->model.config.V));
    session_check_ranks(&r->session, config.text, r->data.has_val ? shards_fingerprint(&r->data.val_shards) : 0);
    free(config.text);
}

static void run_open_data(Run* r, const char* train_pattern, const char* val_pattern) {
    const Settings* s = &r->settings;
    Session* session = &r->session;
    const Model* m = &r->model;
    lm_data_open(&r->data, train_pattern, val_pattern, m->B, m->T, m->config.V, (uint64_t)s->seed,
                 s->shuffle ? SHUFFLED : IN_ORDER, r->comm.size,
                 m->doc_mask ? session_end_of_text(session, m->config.V) : -1, &r->ctx);
    choices_sets_open(&r->choices, m->config.V, m->T, &r->comm);
    if (s->evaluate && !r->data.has_val && !r->choices.count)
        die(USAGE, "--evaluate 1 needs validation data or multiple-choice sets; name them with -j or --choices");
    session_check_data(session, shards_fingerprint(&r->data.train_shards), train_pattern);
    run_check_ranks(r);
    session_set_last(session, batch_lm_windows(&r->data.train), m->B * r->comm.size * r->micro_steps);
}

// Check and open everything that the run needs. Nothing is written before all of it was found sound.
static void run_open(Run* r, int argc, char** argv) {
    Settings* s = &r->settings;
    Session* session = &r->session;
    Model* m = &r->model;
    char *train_pattern, *val_pattern;
    int flag_count = settings_flags(s, &r->generate, &r->choices, &r->doc_mask, r->flags);
    flags_parse(r->flags, flag_count, argc, argv,
                "./train_gpt2 [flags]   (none: a small model on the built-in corpus)");
    const int trains = generate_check(&r->generate, s);
    session_join(s, &r->comm);
    session_open(session, s, r->flags, flag_count, FREE_TO_CHANGE, &r->comm, &r->ctx);
    if (!trains) s->B = 1, s->total_batch = 0;  // of the model's batch a text needs one sequence
    session_find_data(session, "data/builtin/train.bin", &train_pattern, &val_pattern);
    char* data_dir = trains || *s->train_data ? session_directory_of(train_pattern) : NULL;
    char* weights = run_plan(r, data_dir);
    generation_open(&r->text, &r->generate, session, m->T, m->config.V,
                    attention_decode_takes(m->config.C / m->config.NH));
    UpdateSettings update = session_update(session);
    r->plan = model_memory(m, update, &r->ctx);
    if (s->steps == 0) plan_show(r->flags, session->flag_count, &m->table, &r->plan, &r->comm);
    if (!plan_fits(r->plan)) plan_refuse(&r->plan, largest_batch(m, update, &r->ctx));

    if (trains) run_open_data(r, train_pattern, val_pattern);
    if (!trains && !weights && !session->checkpoint) warn("-e %s: has random weights; name a trained model", s->model);
    model_alloc(m, (uint64_t)s->seed, &r->ctx);
    optimizer_join(&r->optimizer, &r->reduction, &m->table, update, &r->comm, &r->ctx);
    m->reduction = &r->reduction;
    session_set_steps(session, &r->optimizer);
    m->loss_scale = &r->optimizer.loss_scale->scale;
    m->master = r->optimizer.master;
    steps_open(&r->steps, s);
    if (session->checkpoint) session_load(session, session->checkpoint, &m->table, m->params, &m->exact, &r->optimizer);
    else if (weights) load_weights(m, &r->optimizer, weights, &r->ctx);
    else random_weights(m, &r->optimizer, (uint64_t)s->seed, &r->ctx);
    agree_on_weights(&r->comm, &m->table, m->params, &r->ctx);
    exact_share(&m->exact, &m->table, m->params, m->master, m->reduction, &r->ctx);
    free(weights), free(data_dir), free(train_pattern), free(val_pattern);
}

static void run_close(Run* r) {
    steps_close(&r->steps);
    model_free(&r->model);
    optimizer_free(&r->optimizer);
    generation_close(&r->text);
    if (!r->generate.generate) lm_data_close(&r->data);
    choices_sets_close(&r->choices);
    log_close(&r->log);
    session_close(&r->session);
    matmul_plans_free(&r->ctx);
    reduction_close(&r->reduction);
    context_free(&r->ctx);
    comm_close(&r->comm);
}

// On held-out text, of which each rank takes its share: log the loss, or without a log print it. A signal to any rank cuts
// it short, and then there is nothing to tell.
static void validate(Run* r, Log* log) {
    Model* m = &r->model;
    uint64_t batches = session_val_batches(&r->session, batch_lm_windows(&r->data.val), m->B);
    uint64_t rank = (uint64_t)r->comm.rank, ranks = (uint64_t)r->comm.size;
    double scale = 1.0 / ((double)batches * m->N), loss = 0;
    for (uint64_t i = rank; i < batches && !stop_signal; i += ranks) {
        lm_data_load(m->inputs, m->targets, &m->documents, &r->data, &r->data.val, i * (uint64_t)m->B, &r->ctx);
        evaluate_batch(m, scale, i == rank ? SET : ADD, &r->ctx);
        steps_evaluating(&r->log, &r->session, "validation", (double)(i + ranks), (double)batches);
    }
    if (rank < batches) loss = model_loss(m, &r->ctx);
    comm_sum_counts(&r->comm, &loss, 1);
    if (comm_any(&r->comm, stop_signal != 0)) return;
    if (log) log_validation(log, r->session.step, r->session.last, loss, NULL);
    else printf("val loss %.6f\n", plain_nan(loss));
}

// Count a micro-batch of endings, whose sequences are `s`. Only the rows that are scored go on to the head;
// they take the place of the embeddings, which have been read.
static void evaluate_endings(Model* m, ChoicesEvaluation* e, const Sequences* s, Context* ctx) {
    ClassifierLosses losses = {m->a.losses, m->a.loss, 1, SET};
    m->training = 0;
    forward(m, m->inputs, s, ctx);
    gather_forward(m->a.embedded, m->a.lnf, e->device_rows, e->scored, m->config.C, ctx);
    forward_head(m, m->a.embedded, e->scored, ctx);
    classifier_forward(losses, m->a.logits, m->targets, e->scored, m->config.V, m->Vp, ctx);
    choices_take(e, m->a.losses, m->a.logits, m->targets, m->config.V, m->Vp, ctx);
}

// The same on one of the multiple-choice sets, of whose examples each rank takes its share.
static void validate_choices(Run* r, const Choices* set, Log* log) {
    Model* m = &r->model;
    ChoicesEvaluation e;
    choices_begin(&e, set, m->N, m->T, r->comm.rank, r->comm.size);
    choices_alloc(&e, &r->ctx);
    for (Sequences s; !stop_signal && choices_load(&e, m->inputs, m->targets, &s, &r->ctx);) {
        evaluate_endings(m, &e, &s, &r->ctx);
        steps_evaluating(&r->log, &r->session, set->file, e.example, set->count);
    }
    ChoicesResult result = choices_result(&e, &r->comm);
    choices_free(&e);
    choices_end(&e);
    if (comm_any(&r->comm, stop_signal != 0)) return;
    if (log) choices_log(log, r->session.step, r->session.last, set, result);
    else choices_print(set, result);
}

// --evaluate 1: of the data and of all sets.
static void evaluate(Run* r) {
    signal(SIGINT, SIG_DFL), signal(SIGTERM, SIG_DFL);  // nothing is written that has to be whole
    if (r->data.has_val) validate(r, NULL);
    for (int i = 0; i < r->choices.count; i++) validate_choices(r, &r->choices.set[i], NULL);
}

// Logits of the token after a window, in the first row of m->a.logits. Of a window that goes on from the one of the call
// before, with the keys and values of all tokens but the last, only the last is computed.
static void predict_next(Model* m, Window w, Context* ctx) {
    int rows = w.count - w.known, cu_seqlens[2] = {0, rows};
    CHECK(w.known == 0 || rows == 1);
    Sequences s = model_sequences(m, 0);
    s.count = 1, s.rows = s.max_length = rows, s.squares = (int64_t)rows * rows, s.parts = NULL;
    s.cu_seqlens = m->single, s.position += w.known;
    device_upload(ctx, m->single, cu_seqlens, sizeof cu_seqlens);
    device_upload(ctx, m->inputs, w.tokens + w.known, (size_t)rows * sizeof(int));
    m->training = 0, m->known = w.known;
    forward(m, m->inputs, &s, ctx);
    m->known = 0;
    forward_head(m, m->a.lnf + (size_t)(rows - 1) * (size_t)m->config.C, 1, ctx);
}

// Have the model add so many tokens to the prompt, fewer where a signal comes; r->text is text number `number` then.
static void write_text(Run* r, int number, int tokens) {
    Generation* g = &r->text;
    HostView logits = host_view_open(r->model.a.logits, (size_t)r->model.Vp, VIEW_FLOATX);
    generation_begin(g, &r->session, number);
    for (int i = 0; i < tokens && !stop_signal; i++) {
        comm_progress(&r->comm, r->session.step);  // the other ranks wait
        predict_next(&r->model, generation_window(g), &r->ctx);
        host_view_read(&r->ctx, &logits);
        generation_draw(g, logits.values);
    }
    host_view_close(&logits);
}

// Print what the model makes of the prompt by now, and keep it in OUT/sample.txt.
static void sample(Run* r) {
    write_text(r, 0, r->generate.sample_tokens);
    Text text = generation_text(&r->text, &r->session);
    session_show_text(&r->session, &text);
    free(text.text);
}

// --generate: the texts, and how fast they came.
static void generate(Run* r) {
    int64_t tokens = 0;
    double start = now_seconds();
    for (int number = 0; number < r->generate.samples && !stop_signal; number++) {
        write_text(r, number, r->generate.generate);
        generation_print(&r->text, &r->session, number);
        tokens += r->text.count - r->text.prompt;
    }
    generation_print_speed(&r->session, tokens, now_seconds() - start);
}

// Returns 0, or -1 after a warning.
static int save(Run* r) {
    Text config = {NULL, 0, 0};
    reduction_wait(&r->reduction, REDUCTION_LAST, &r->ctx);  // the other ranks' parameters are on their way
    config_write(&config, &r->model.config, session_end_of_text(&r->session, r->model.config.V));
    int result = session_save(&r->session, &r->model.table, r->model.params, &r->optimizer, config.text);
    free(config.text);
    return result;
}

// What every step does: full sequences, whose attention is counted as if it saw all of them.
static StepWork step_work(const Run* r) {
    const Model* m = &r->model;
    const Config* c = &m->config;
    double N = (double)m->table.parameters - (double)c->T * c->C;
    double token_flops = 6 * N + 12.0 * c->L * c->C * m->T;
    int sequences = m->B * r->comm.size * r->micro_steps;
    double tokens = (double)sequences * m->T;
    StepWork work = {sequences, (double)sequences, tokens, tokens * token_flops};
    return work;
}

// Launch one optimizer step. Its results are on their way when this returns; finish_steps() reads them.
static void launch_step(Run* r, const Schedule* schedule) {
    const Settings* s = &r->settings;
    Model* m = &r->model;
    Session* session = &r->session;
    StepWork work = step_work(r);
    StepLosses losses = {1, {m->a.loss}, {"loss"}};
    double scale = 1.0 / work.tokens, lr = schedule_at(schedule, session->step);
    scope_step(&r->ctx, session->step + 1);
    for (int i = 0; i < r->micro_steps; i++) {
        if (i + 1 == r->micro_steps && s->mode != MODE_FORWARD) reduction_begin(&r->reduction);
        int first = (i * r->comm.size + r->comm.rank) * s->B;
        uint64_t sample = (s->overfit ? 0 : session->samples) + (uint64_t)first;
        steps_begin_launch(session);
        lm_data_load(m->inputs, m->targets, &m->documents, &r->data, &r->data.train, sample, &r->ctx);
        if (s->mode == MODE_FORWARD) evaluate_batch(m, scale, i == 0 ? SET : ADD, &r->ctx);
        else train_batch(m, (uint64_t)session->step, first, scale, i == 0 ? SET : ADD, &r->ctx);
        steps_end_launch(session);
    }
    StepModel model = {&m->table, m->params, m->grads, &m->exact};
    steps_update(session, model, losses, &r->optimizer, &r->reduction, lr);
    steps_launched(&r->steps, session, lr, work, losses, &r->optimizer);
    scope_step(&r->ctx, -1);
}

// Read and log the results of all steps but the last `lag`.
static void finish_steps(Run* r, int lag) {
    steps_finish(&r->steps, lag, &r->session, &r->log, &r->model.table, r->model.grads, &r->optimizer);
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
        if (r->generate.generate) generate(r);
        else evaluate(r);
        run_close(r);
        return DONE;
    }
    session_begin(session, &r->log);

    steps_begin(&r->steps, session, &r->reduction);
    steps_print_start(&r->steps, session, m->table.parameters, r->data.train_shards.tokens, step_work(r).tokens);
    plan_print(stdout, &r->plan);

    Schedule schedule = session_schedule(session);
    if (session->step == 0 && r->data.has_val && s->val_every > 0) validate(r, &r->log);
    steps_restart_clock(&r->steps);
    while (session->step < session->end && !session_must_stop(session, (int)stop_signal)) {
        steps_profile_begin(&r->steps, session);
        launch_step(r, &schedule);
        int profile = steps_profile_end(&r->steps, session, &r->plan);
        int validation = r->data.has_val && session_is_due(session, s->val_every, 1);
        int choices = r->choices.count > 0 && session_is_due(session, r->choices.every, 1);
        int text = session_is_due(session, r->generate.sample_every, 1);
        int checkpoint = session_checkpoint_is_due(session);
        int lag =
            profile || validation || choices || text || checkpoint || session->step == session->end ? 0 : READBACK_LAG;
        finish_steps(r, lag);
        if (validation) validate(r, &r->log);
        for (int i = 0; choices && i < r->choices.count; i++) validate_choices(r, &r->choices.set[i], &r->log);
        if (text && r->comm.rank == 0) sample(r);
        if (checkpoint) save(r);
        if (profile || validation || choices || text || checkpoint) steps_restart_clock(&r->steps);
    }
    finish_steps(r, 0);
    int failed = save(r) != 0 || session_finish_save(session) != 0;
    log_write_svg(&r->log, "GPT-2 training");
    steps_end(&r->steps, session, &r->plan, failed);
    run_close(r);
    return DONE;
}
#endif
