/* Train GPT-2, from scratch or from a Hugging Face directory. One source builds for the CPU (gcc) and GPU (nvcc).
 *
 * Read it from top to bottom: the model's configuration, its tables of tensors, the forward pass, the backward pass,
 * then the settings and main(). A transformer block is two lists of ops, forward_block() and backward_block(); each
 * op is a header in llmc/ops/ that holds its formula, a plain C reference and the fast version.
 *
 * B batch size, T sequence length, N = B * T rows, V vocabulary size (Vp: padded), L layers, NH heads, HS head size,
 * C = NH * HS channels, F channels inside the MLP (4 C). */
#include "llmc/model/config.h"  // config.json as a table
#include "llmc/ops/attention/attention.h"
#include "llmc/ops/attention/decode.h"
#include "llmc/ops/classifier/classifier.h"
#include "llmc/ops/embedding/embedding.h"
#include "llmc/ops/gather.h"
#include "llmc/ops/gelu.h"
#include "llmc/ops/layernorm/layernorm.h"
#include "llmc/ops/matmul/matmul.h"
#include "llmc/run/generate.h"         // text generation from a prompt
#include "llmc/run/lm_input.h"         // token batches on the device
#include "llmc/run/multiple_choice.h"  // HellaSwag and similar sets
#include "llmc/run/run.h"              // opens, steps and closes a run
#include "llmc/run/steps.h"            // a step: all-reduce, update, log
#include "llmc/run/vocabulary.h"       // token shards, their batches, their tokenizer

// ---------------------------------------------------------------------------------------------------------
// Parameters. A linear layer's weight is [out, in] in memory, and [in, out] in GPT-2's files ("Conv1D").

typedef struct {
    LayerNorm ln1;
    Linear qkv, attproj;
    LayerNorm ln2;
    Linear fc, fcproj;
} BlockParams;

typedef struct {
    floatX *wte, *wpe;
    LayerNorm lnf;
    floatX* head;  // output matrix [Vp, C]; it is wte if the model ties them
    BlockParams* h;
} Params;

// The same fields for gradients. The tables below bind the structs of parameters and of gradients.
typedef struct {
    LayerNormGrads ln1;
    LinearGrads qkv, attproj;
    LayerNormGrads ln2;
    LinearGrads fc, fcproj;
} BlockGrads;

typedef struct {
    real *wte, *wpe;
    LayerNormGrads lnf;
    real* head;
    BlockGrads* h;
} Grads;

// Symbols for the dimensions in the tables. ONE_DIM ends the shape of a vector.
enum { ONE_DIM, DIM_V, DIM_VP, DIM_T, DIM_C, DIM_3C, DIM_F, DIM_N, DIM_NH, DIM_DN, DIMS };

// clang-format off
static const TensorRow EMBEDDING_ROWS[] = {
    // name in files                         field                              shape                 stored  initial values        decay, layout in files
    {"transformer.wte.weight",                offsetof(Params, wte),             {DIM_V, DIM_C},  OWN, DIM_VP, INIT_NORMAL,          1},
    {"transformer.wpe.weight",                offsetof(Params, wpe),             {DIM_T, DIM_C},  OWN, 0,      INIT_NORMAL,          1},
};
static const TensorRow BLOCK_ROWS[] = {
    {"transformer.h.%d.ln_1.weight",          offsetof(BlockParams, ln1.w),      {DIM_C},         OWN, 0,      INIT_ONE,             0, AS_IN_MEMORY, offsetof(BlockParams, ln1.w_fp32)},
    {"transformer.h.%d.ln_1.bias",            offsetof(BlockParams, ln1.b),      {DIM_C},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.attn.c_attn.weight",   offsetof(BlockParams, qkv.w),      {DIM_3C, DIM_C}, OWN, 0,      INIT_NORMAL,          1, TRANSPOSED},
    {"transformer.h.%d.attn.c_attn.bias",     offsetof(BlockParams, qkv.b),      {DIM_3C},        OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.attn.c_proj.weight",   offsetof(BlockParams, attproj.w),  {DIM_C, DIM_C},  OWN, 0,      INIT_NORMAL_RESIDUAL, 1, TRANSPOSED},
    {"transformer.h.%d.attn.c_proj.bias",     offsetof(BlockParams, attproj.b),  {DIM_C},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.ln_2.weight",          offsetof(BlockParams, ln2.w),      {DIM_C},         OWN, 0,      INIT_ONE,             0, AS_IN_MEMORY, offsetof(BlockParams, ln2.w_fp32)},
    {"transformer.h.%d.ln_2.bias",            offsetof(BlockParams, ln2.b),      {DIM_C},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.mlp.c_fc.weight",      offsetof(BlockParams, fc.w),       {DIM_F, DIM_C},  OWN, 0,      INIT_NORMAL,          1, TRANSPOSED},
    {"transformer.h.%d.mlp.c_fc.bias",        offsetof(BlockParams, fc.b),       {DIM_F},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.mlp.c_proj.weight",    offsetof(BlockParams, fcproj.w),   {DIM_C, DIM_F},  OWN, 0,      INIT_NORMAL_RESIDUAL, 1, TRANSPOSED},
    {"transformer.h.%d.mlp.c_proj.bias",      offsetof(BlockParams, fcproj.b),   {DIM_C},         OWN, 0,      INIT_ZERO,            0},
};
static const TensorRow FINAL_ROWS[] = {
    {"transformer.ln_f.weight",               offsetof(Params, lnf.w),           {DIM_C},         OWN, 0,      INIT_ONE,             0, AS_IN_MEMORY, offsetof(Params, lnf.w_fp32)},
    {"transformer.ln_f.bias",                 offsetof(Params, lnf.b),           {DIM_C},         OWN, 0,      INIT_ZERO,            0},
};
static const TensorRow HEAD_ROWS[] = {  // only if the head is not tied to wte
    {"lm_head.weight",                        offsetof(Params, head),            {DIM_V, DIM_C},  OWN, DIM_VP, INIT_NORMAL,          1},
};
static const char* const HEAD[][2] = {{"wte.weight", "lm_head.weight"}};  // tensors that may be tied
// clang-format on

// ---------------------------------------------------------------------------------------------------------
// Activations, all [N, ...]. A residual buffer first holds a branch's output, then its sum with the residual.

typedef struct {
    floatX *ln1, *qkv, *att, *mid, *ln2, *fc_pre, *fc, *out;
    LayerNormStats ln1_stats, ln2_stats;
    real* lse;
} BlockActs;

typedef struct {
    floatX *embedded, *lnf, *logits;
    LayerNormStats lnf_stats;
    real *losses, *loss;                             // [N] per row; [1] their sum
    floatX *dx, *dbranch, *dln, *dfc, *dqkv, *datt;  // activation gradients; dx is the residual stream's
    BlockActs* h;
} Acts;

typedef struct {
    int L, NH, C, F, V, T;  // T: positions, the maximum sequence length
    int tied;               // 1: the head uses the token embedding's weight
    Gelu gelu;
    double eps, init_range;
    double embedding_dropout, attention_dropout, residual_dropout;
} Config;

typedef struct {
    Config config;
    int B, T, N;  // size of a micro-batch: N = B * T rows
    int Vp;       // vocabulary size with padding
    int recompute;
    ModelBuffers buffers;  // the memory that the next fields point to
    Params p;
    Grads g;
    Acts a;
    LmInput in;
    int for_choices;  // 1: the memory plan includes multiple-choice sets
    int past_len;     // positions before row 0 of a forward pass; each layer's qkv holds their keys and values
    // Dropout of the current step; training = 0 disables it.
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

static int has_dropout(const Config* c) {
    return c->embedding_dropout > 0 || c->attention_dropout > 0 || c->residual_dropout > 0;
}

static AttentionShape attention_at(const Model* m, const Sequences* s, int layer) {
    AttentionShape shape = {m->config.NH, m->config.C / m->config.NH, CAUSAL,
                            dropout_at(m, s, layer, SITE_DROPOUT_ATTENTION)};
    return shape;
}

// The input of block l: the residual stream after block l - 1.
static floatX* residual_into(const Model* m, int l) { return l == 0 ? m->a.embedded : m->a.h[l - 1].out; }

// One pre-layernorm block. Its ln1 has already been computed. It ends with the next layernorm, because the residual
// addition and the layernorm that reads the sum are one fused op.
static void forward_block(Model* m, int l, const Sequences* s, Context* ctx) {
    const Config* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    BlockActs* a = &m->a.h[l];
    int last = l + 1 == c->L, N = s->rows, C = c->C;
    floatX *next = last ? m->a.lnf : m->a.h[l + 1].ln1, *qkv = a->qkv + (size_t)m->past_len * 3 * (size_t)C;
    LayerNormStats next_stats = last ? m->a.lnf_stats : m->a.h[l + 1].ln1_stats;
    LayerNorm next_norm = last ? m->p.lnf : p[1].ln1;

    scope_at(ctx, FORWARD, l);
    matmul_forward(qkv, a->ln1, p->qkv, N, C, 3 * C, SET, ctx);
    if (m->past_len) attention_decode(a->att, a->qkv, m->past_len, c->NH, C / c->NH, ctx);
    else attention_forward(a->att, a->lse, a->qkv, sequences_parts(s), attention_at(m, s, l), ctx);
    matmul_forward(a->mid, a->att, p->attproj, N, C, C, SET, ctx);
    residual_layernorm_forward(a->ln2, a->mid, a->ln2_stats, residual_into(m, l), p->ln2, N, C, (real)c->eps,
                               dropout_at(m, s, l, SITE_DROPOUT_ATTENTION_OUT), ctx);
    matmul_gelu_forward(a->fc, a->fc_pre, a->ln2, p->fc, N, C, c->F, c->gelu, ctx);
    matmul_forward(a->out, a->fc, p->fcproj, N, c->F, C, SET, ctx);
    residual_layernorm_forward(next, a->out, next_stats, a->mid, next_norm, N, C, (real)c->eps,
                               dropout_at(m, s, l, SITE_DROPOUT_MLP_OUT), ctx);
}

// Forward pass up to the final layernorm, m->a.lnf [N, C].
static void forward(Model* m, const int* inputs, const Sequences* s, Context* ctx) {
    const Config* c = &m->config;
    Embeddings tables = {m->p.wte, m->p.wpe, NULL};
    EmbeddingSizes sizes = {m->Vp, c->T, 0, c->C, -1};
    scope_at(ctx, FORWARD, -1);
    model_buffers_update_copies(&m->buffers, ctx);
    embedding_forward(m->a.embedded, inputs, NULL, tables, s, sizes, dropout_at(m, s, 0, SITE_DROPOUT_EMBEDDING), ctx);
    layernorm_forward(m->a.h[0].ln1, m->a.h[0].ln1_stats, m->a.embedded, m->p.h[0].ln1, s->rows, c->C, (real)c->eps,
                      ctx);
    for (int l = 0; l < c->L; l++) {
        grad_sync_wait(m->buffers.grad_sync, l + 1, ctx);  // the block's last op reads parameters of the next
        forward_block(m, l, s, ctx);
    }
    scope_at(ctx, FORWARD, -1);
}

// Compute logits [N, Vp] from rows x [N, C] of the final layernorm.
static void forward_head(Model* m, const floatX* x, int N, Context* ctx) {
    Linear head = {m->p.head, NULL};
    matmul_forward(m->a.logits, x, head, N, m->config.C, m->Vp, SET, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Backward. `mode` selects how parameter gradients are written: SET in a step's first micro-batch, ADD in the others.

// Where the gradient of a residual sum is written: to the stream and, through dropout, to the branch of layer l and the
// bias at its end. Layer -1 is the embedding, which has no branch.
static ResidualGrad residual_gradient(const Model* m, const Sequences* s, int l, int site) {
    ResidualGrad r = {m->a.dx, m->a.dbranch, NULL, dropout_none(s)};
    if (l < 0) return r;
    r.dbias = site == SITE_DROPOUT_ATTENTION_OUT ? m->g.h[l].attproj.b : m->g.h[l].fcproj.b;
    r.dropout = dropout_at(m, s, l, site);
    return r;
}

// The gradient of a branch's output after residual_layernorm_backward(). Without dropout it is the stream's gradient.
static const floatX* branch_gradient(const Model* m, const Sequences* s, int l, int site) {
    return dropout_at(m, s, l, site).threshold ? m->a.dbranch : m->a.dx;
}

// The reverse of forward_block(): the backward pass of the next layernorm has already run. It ends with that of ln1.
static void backward_block(Model* m, int l, const Sequences* s, Mode mode, Context* ctx) {
    const Config* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    const BlockGrads* g = &m->g.h[l];
    BlockActs* a = &m->a.h[l];
    int N = s->rows, C = c->C;
    Rows rows = {N, C};
    // These bias gradients are fused into the layernorm and GELU backward ops.
    LinearGrads dfcproj = {g->fcproj.w, NULL}, dattproj = {g->attproj.w, NULL}, dfc = {g->fc.w, NULL};
    BiasGrad dfc_bias = {g->fc.b, mode};
    floatX* x = residual_into(m, l);

    scope_at(ctx, BACKWARD, l);
    if (m->recompute >= RECOMPUTE_GELU) gelu_forward(a->fc, a->fc_pre, (size_t)N * (size_t)c->F, c->gelu, ctx);
    if (m->recompute >= RECOMPUTE_NORMS)
        layernorm_forward(a->ln2, a->ln2_stats, a->mid, p->ln2, N, C, (real)c->eps, ctx);
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
    // Overlap the all-reduce of buckets with attention, which tolerates fewer SMs. The matmuls would not.
    grad_sync_ready(m->buffers.grad_sync, l + 1, m->buffers.grads, ctx);
    attention_backward(m->a.dqkv, m->a.datt, a->qkv, a->att, a->lse, sequences_parts(s), attention_at(m, s, l), ctx);
    if (m->recompute >= RECOMPUTE_NORMS) layernorm_forward(a->ln1, a->ln1_stats, x, p->ln1, N, C, (real)c->eps, ctx);
    matmul_backward_weight(g->qkv, m->a.dqkv, a->ln1, N, C, 3 * C, mode, ctx);
    matmul_backward_input(m->a.dln, m->a.dqkv, p->qkv.w, N, C, 3 * C, SET, ctx);
    residual_layernorm_backward(residual_gradient(m, s, l - 1, SITE_DROPOUT_MLP_OUT), g->ln1, m->a.dln, x, a->ln1_stats,
                                p->ln1.w, rows, ADD, mode, ctx);
}

// Backpropagate from m->a.logits, which holds the gradient of the logits, to all parameters.
static void backward(Model* m, const int* inputs, const Sequences* s, Mode mode, Context* ctx) {
    const Config* c = &m->config;
    int N = s->rows, C = c->C;
    LinearGrads dhead = {m->g.head, NULL};
    Rows rows = {N, C};
    EmbeddingGrads dtables = {m->g.wte, m->g.wpe, NULL};
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

// Evaluate the B sequences in m->in.inputs and m->in.targets, without gradients or dropout. `mode` sets or adds to
// m->a.loss, which is `scale` times the sum of the token losses.
static void evaluate_batch(Model* m, int B, double scale, Mode mode, Context* ctx) {
    Sequences s = lm_input_sequences(&m->in, B, 0);
    Losses losses = {m->a.losses, m->a.loss, scale, mode};
    m->training = 0;
    forward(m, m->in.inputs, &s, ctx);
    forward_head(m, m->a.lnf, s.rows, ctx);
    classifier_forward(losses, m->a.logits, m->in.targets, s.rows, m->config.V, m->Vp, ctx);
}

// Like evaluate_batch(), but with dropout and the backward pass. Gradients are multiplied by *m->buffers.loss_scale and
// written by `mode` too. The micro-batch holds sequences first .. first + B - 1 of step number `step`.
static void train_batch(Model* m, uint64_t step, int first, double scale, Mode mode, Context* ctx) {
    Sequences s = lm_input_sequences(&m->in, m->B, first);
    Losses losses = {m->a.losses, m->a.loss, scale, mode};
    m->training = 1;
    m->step = step;
    forward(m, m->in.inputs, &s, ctx);
    forward_head(m, m->a.lnf, s.rows, ctx);
    scope_at(ctx, BACKWARD, -1);
    classifier_backward(losses, m->a.logits, m->in.targets, m->buffers.loss_scale, s.rows, m->config.V, m->Vp, ctx);
    backward(m, m->in.inputs, &s, mode, ctx);
}

// Read m->a.loss. Waits for the device.
static double model_loss(const Model* m, Context* ctx) { return model_buffers_number(m->a.loss, ctx); }

// ---------------------------------------------------------------------------------------------------------
// Memory

// Fill the tables for this configuration and batch size. Allocates only the tables.
static void model_plan(Model* m, Config config, int B, int T, int recompute) {
    memset(m, 0, sizeof *m);
    m->config = config;
    m->B = B, m->T = T, m->N = B * T;
    m->Vp = (int)round_up((size_t)config.V, 128);
    m->recompute = recompute;
    m->buffers.table.fixed = recompute >= FORWARD_ONLY;
    const int dN = m->buffers.table.fixed ? 0 : m->N;  // rows of activation gradients
    int dims[DIMS] = {1, config.V, m->Vp, config.T, config.C, 3 * config.C, config.F, m->N, config.NH, dN};
    tensors_add(&m->buffers.table, EMBEDDING_ROWS, COUNT_OF(EMBEDDING_ROWS), dims, -1);
    for (int l = 0; l < config.L; l++) tensors_add(&m->buffers.table, BLOCK_ROWS, COUNT_OF(BLOCK_ROWS), dims, l);
    tensors_add(&m->buffers.table, FINAL_ROWS, COUNT_OF(FINAL_ROWS), dims, -1);
    if (!config.tied) tensors_add(&m->buffers.table, HEAD_ROWS, COUNT_OF(HEAD_ROWS), dims, -1);

    // All layers share one buffer for an activation that the backward pass recomputes. Without a backward pass they
    // share all activations but qkv, whose keys and values are the KV cache of text generation.
    Placement gelu = recompute >= RECOMPUTE_GELU ? SHARED : OWN, norm = recompute >= RECOMPUTE_NORMS ? SHARED : OWN,
              kept = recompute >= FORWARD_ONLY ? SHARED : OWN;
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
    tensors_add(&m->buffers.acts_table, outer_acts, COUNT_OF(outer_acts), dims, -1);
    tensors_add(&m->buffers.stats_table, outer_stats, COUNT_OF(outer_stats), dims, -1);
    for (int l = 0; l < config.L; l++) {
        tensors_add(&m->buffers.acts_table, block_acts, COUNT_OF(block_acts), dims, l);
        tensors_add(&m->buffers.stats_table, block_stats, COUNT_OF(block_stats), dims, l);
    }
    model_buffers_finish_tables(&m->buffers);
}

// The run's memory, computed before anything is allocated.
static MemoryPlan model_memory(const Model* m, UpdateSettings update, const Context* ctx) {
    const Config* c = &m->config;
    AttentionShape shape = {c->NH, c->C / c->NH, CAUSAL, dropout_make(c->attention_dropout, 0, 0, 0, 0, NULL)};
    EmbeddingSizes tables = {m->Vp, c->T, 0, c->C, -1};
    int parts = m->in.doc_mask ? lm_data_planned_documents(m->B, m->N) : m->B;
    size_t choices = m->for_choices ? multiple_choice_device_bytes(m->N) : 0;
    StepSizes step = {shape, tables, m->N, m->B, m->T, m->B, parts, m->N, c->F, 0};
    return memory_plan_make(&m->buffers.table, &m->buffers.acts_table, &m->buffers.stats_table, update,
                            lm_input_bytes(&m->in, m->B, m->T) + choices, &step, ctx);
}

static void model_alloc(Model* m, uint64_t seed, Context* ctx) {
    size_t L = (size_t)m->config.L;
    m->seed = seed;
    m->p.h = (BlockParams*)xcalloc(L, sizeof(BlockParams));
    m->g.h = (BlockGrads*)xcalloc(L, sizeof(BlockGrads));
    m->a.h = (BlockActs*)xcalloc(L, sizeof(BlockActs));
    TensorStructs params = {&m->p, m->p.h, sizeof(BlockParams)}, grads = {&m->g, m->g.h, sizeof(BlockGrads)},
                  acts = {&m->a, m->a.h, sizeof(BlockActs)};
    model_buffers_alloc(&m->buffers, params, grads, acts, ctx);
    if (m->config.tied) m->p.head = m->p.wte, m->g.head = m->g.wte;
    lm_input_alloc(&m->in, m->B, m->T, ctx);
}

static void model_free(Model* m) {
    lm_input_free(&m->in);
    free(m->p.h), free(m->g.h), free(m->a.h);
    model_buffers_free(&m->buffers);
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

// A published size: "d12", "d24", "d36" or "d48". Or "L=4,C=128,NH=4,V=257,T=256,F=512,tied=1", where V defaults to
// `data_V` and F to 4 C.
static Config config_from_descriptor(const char* text, int data_V) {
    static const ConfigPublished published[] = {{"d12", "L=12,NH=12,C=768,V=50257,T=1024"},
                                                {"d24", "L=24,NH=16,C=1024,V=50257,T=1024"},
                                                {"d36", "L=36,NH=20,C=1280,V=50257,T=1024"},
                                                {"d48", "L=48,NH=25,C=1600,V=50257,T=1024"}};
    Config c = {4, 4, 128, 0, data_V, 256, 1, GELU_TANH, 1e-5, 0.02, 0, 0, 0};
    const ConfigSize sizes[] = {{"L", &c.L}, {"C", &c.C}, {"NH", &c.NH},    {"V", &c.V},
                                {"T", &c.T}, {"F", &c.F}, {"tied", &c.tied}};
    config_sizes_find(sizes, COUNT_OF(sizes), &c.tied, published, COUNT_OF(published), text,
                      "d12, d24, d36, d48, nor sizes like L=4,C=128,NH=4,T=256");
    if (c.F == 0) c.F = 4 * c.C;
    char* source = xprintf("-e %s", text);
    config_check(&c, source);
    free(source);
    return c;
}

// Read a config.json. An unsupported value is an error that reports the key.
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

// Load the parameters from a file, and the master weights too if the optimizer has them.
static void load_weights(Model* m, const Optimizer* o, const char* path, Context* ctx) {
    static const char* const ignored[] = {".attn.bias", ".attn.masked_bias", "lm_head.weight"};
    FileRules rules = {"transformer.", ignored, m->config.tied ? 3 : 2, NULL, 0, 0, NULL, 0};
    model_buffers_read(&m->buffers, o, path, &rules, NULL, ctx);
}

static void random_weights(Model* m, const Optimizer* o, uint64_t seed, Context* ctx) {
    double std = m->config.init_range;
    HostView view = host_view_open(m->buffers.params, m->buffers.table.elements, VIEW_FLOATX);
    tensors_init(&m->buffers.table, view.values, seed, std, std / sqrt(2.0 * m->config.L));
    model_buffers_write(&m->buffers, o, &view, ctx);
    host_view_close(&view);
}

#ifndef NO_MAIN  // tests include this file for the model only

typedef struct {
    Run run;  // settings, ranks, optimizer, log: llmc/run/run.h
    Model model;
    LmData data;
    MultipleChoiceSets choices;
    GenerateSettings generate;
    Generation text;
    int doc_mask;
} Trainer;

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

// ---------------------------------------------------------------------------------------------------------
// A step

static StepWork step_work(const Trainer* t) {
    const Model* m = &t->model;
    const Config* c = &m->config;
    size_t N = m->buffers.table.parameters - (size_t)c->T * (size_t)c->C;  // without position embeddings
    return lm_step_work(N, 12.0 * c->L * c->C * m->T, m->B * t->run.group.size * t->run.micro_steps, m->T);
}

// One optimizer step. The GPU runs it asynchronously. run_end_step() reads its results and logs them.
static void train_step(Trainer* t) {
    Run* r = &t->run;
    Model* m = &t->model;
    StepWork work = step_work(t);
    StepLosses losses = {1, {m->a.loss}, {"loss"}};
    double scale = 1.0 / work.tokens, lr = run_lr(r);
    scope_step(&r->ctx, r->session.step + 1);
    for (int i = 0; i < r->micro_steps; i++) {
        int first = (i * r->group.size + r->group.rank) * m->B;
        uint64_t sample = (r->settings.overfit ? 0 : r->session.samples) + (uint64_t)first;
        Mode mode = i == 0 ? SET : ADD;
        run_begin_micro_batch(r, i);
        lm_data_load(m->in.inputs, m->in.targets, &m->in.documents, &t->data, &t->data.train, sample, &r->ctx);
        if (r->settings.mode == MODE_FORWARD) evaluate_batch(m, m->B, scale, mode, &r->ctx);
        else train_batch(m, (uint64_t)r->session.step, first, scale, mode, &r->ctx);  // forward, loss, backward
        run_end_micro_batch(r);
    }
    steps_all_reduce(&r->session, m->buffers.grads, losses, &r->grad_sync);
    steps_update(&r->session, run_step_model(&m->buffers), losses, &r->optimizer, &r->grad_sync, lr);
    steps_launched(&r->steps, &r->session, lr, work, losses, &r->optimizer);
    scope_step(&r->ctx, -1);
}

// ---------------------------------------------------------------------------------------------------------
// Validation

// Evaluate this rank's share of the held-out text. Log the loss over all ranks, or print it if `log` is NULL. A signal
// to any rank ends the validation without a result.
static void validate(Trainer* t, Log* log) {
    Run* r = &t->run;
    Model* m = &t->model;
    ValShare share = val_share(&r->settings, batch_lm_windows(&t->data.val), m->B, &r->group);
    double scale = 1.0 / ((double)share.samples * m->T), loss = 0;
    while (!stop_signal && val_share_next(&share)) {
        t->data.val.B = share.count;
        lm_data_load(m->in.inputs, m->in.targets, &m->in.documents, &t->data, &t->data.val, share.first, &r->ctx);
        evaluate_batch(m, share.count, scale, (Mode)share.mode, &r->ctx);
        steps_evaluating(&r->log, &r->session, "validation", (double)share.next, (double)share.batches);
    }
    if (share.count) loss = model_loss(m, &r->ctx);
    group_sum_counts(&r->group, &loss, 1);
    if (group_any(&r->group, stop_signal != 0)) return;
    session_show_validation(&r->session, log, loss, &share);
    if (!has_dropout(&m->config)) val_entropy_print(&t->data.val_entropy, share.samples, m->T);
}

// Score a micro-batch of endings with the sequences `s`. The head reads only the scored rows. They overwrite the
// embeddings, which are no longer needed.
static void evaluate_endings(Model* m, MultipleChoiceEvaluation* e, const Sequences* s, Context* ctx) {
    Losses losses = {m->a.losses, m->a.loss, 1, SET};
    m->training = 0;
    forward(m, m->in.inputs, s, ctx);
    gather_forward(m->a.embedded, m->a.lnf, e->device_rows, e->scored, m->config.C, ctx);
    forward_head(m, m->a.embedded, e->scored, ctx);
    classifier_forward(losses, m->a.logits, m->in.targets, e->scored, m->config.V, m->Vp, ctx);
    multiple_choice_take(e, m->a.losses, m->a.logits, m->in.targets, m->config.V, m->Vp, ctx);
}

// Like validate(), for one multiple-choice set.
static void validate_choices(Trainer* t, const MultipleChoice* set, Log* log) {
    Run* r = &t->run;
    Model* m = &t->model;
    MultipleChoiceEvaluation e;
    multiple_choice_evaluation_open(&e, set, m->N, m->T, &r->group, &r->ctx);
    for (Sequences s; !stop_signal && multiple_choice_load(&e, m->in.inputs, m->in.targets, &s, &r->ctx);) {
        evaluate_endings(m, &e, &s, &r->ctx);
        steps_evaluating(&r->log, &r->session, set->file, e.example, set->count);
    }
    MultipleChoiceResult result = multiple_choice_result(&e, &r->group);
    multiple_choice_evaluation_close(&e);
    if (!group_any(&r->group, stop_signal != 0)) multiple_choice_show(&r->session, log, set, result);
}

// --evaluate 1: validate on the held-out text and on all multiple-choice sets.
static void evaluate(Trainer* t) {
    process_on_stop(SIG_DFL);  // a signal may end the process at once: no checkpoint is written
    if (t->data.has_val) validate(t, NULL);
    for (int i = 0; i < t->choices.count; i++) validate_choices(t, &t->choices.set[i], NULL);
}

// ---------------------------------------------------------------------------------------------------------
// Generation

// Compute the logits of the token after a window into the first row of m->a.logits. If the keys and values of all
// tokens but the last are cached from the previous call, only the last token is computed.
static void predict_next(Model* m, Window w, Context* ctx) {
    int rows = w.count - w.past_len;
    CHECK(w.past_len == 0 || rows == 1);
    Sequences s = lm_input_text(&m->in, w.tokens + w.past_len, rows, w.past_len, ctx);
    m->training = 0, m->past_len = w.past_len;
    forward(m, m->in.inputs, &s, ctx);
    m->past_len = 0;
    forward_head(m, m->a.lnf + (size_t)(rows - 1) * (size_t)m->config.C, 1, ctx);
}

// Generate text number `number` into t->text: the prompt and up to `tokens` tokens. A signal ends it early.
static void write_text(Trainer* t, int number, int tokens) {
    Run* r = &t->run;
    HostView logits = host_view_open(t->model.a.logits, (size_t)t->model.Vp, VIEW_FLOATX);
    generation_begin(&t->text, &r->session, number);
    for (int i = 0; i < tokens && !stop_signal; i++) {
        group_progress(&r->group, r->session.step);  // the other ranks wait
        predict_next(&t->model, generation_window(&t->text), &r->ctx);
        host_view_read(&r->ctx, &logits);
        generation_draw(&t->text, logits.values);
    }
    host_view_close(&logits);
}

// Print the model's current continuation of the prompt, and save it in OUT/sample.txt.
static void sample(Trainer* t) {
    write_text(t, 0, t->generate.sample_tokens);
    generation_show(&t->text, &t->run.session);
}

// --generate: print the texts and the speed.
static void generate(Trainer* t) {
    double start = now_seconds();
    for (int number = 0; number < t->generate.samples && !stop_signal; number++) {
        write_text(t, number, t->generate.generate);
        generation_print(&t->text, &t->run.session, number);
    }
    generation_print_speed(&t->text, &t->run.session, now_seconds() - start);
}

// ---------------------------------------------------------------------------------------------------------
// Settings and startup

// Flags of this trainer only. llmc/run/ has the others.
static int settings_flags(Trainer* t, Flag* table) {
    // clang-format off
    const Flag rows[] = {
        {"-e", "--model",    FLAG_STRING, &t->run.settings.model, "L=4,C=128,NH=4,T=256", 0, 0, NULL, SCOPE_RUN, TOPIC_MODEL,
         "Hugging Face directory, .safetensors file, llm.c's .bin, config.json (random weights), d12|d24|d36|d48, or "
         "sizes L= C= NH= V= T= F= tied=."},
        {NULL, "--doc-mask", FLAG_INT,    &t->doc_mask,           "0",       0, 1, NULL, SCOPE_RUN, TOPIC_DATA,
         "1: attention stays within a document; documents begin with the end-of-text token. Positions remain those "
         "in the sequence."},
    };
    // clang-format on
    int count = settings_add_rows(table, settings_rows(&t->run.settings, table, 0), rows, COUNT_OF(rows));
    return multiple_choice_rows(&t->choices, table, generate_rows(&t->generate, table, count));
}

// The model's config.json.
static Text config_text(const Trainer* t) {
    const Config* c = &t->model.config;
    Text text = {NULL, 0, 0};
    int end_of_text = session_end_of_text(&t->run.session, c->V);
    text_printf(&text, "{\"architectures\": [\"GPT2LMHeadModel\"], \"model_type\": \"gpt2\"");
    json_put_string(&text, "activation_function", c->gelu == GELU_TANH ? "gelu_new" : "gelu");
    config_rows_write(&text, c, CONFIG_ROWS, COUNT_OF(CONFIG_ROWS));
    json_put_integer(&text, "bos_token_id", end_of_text);
    json_put_integer(&text, "eos_token_id", end_of_text);
    json_put_string(&text, "dtype", safetensors_dtype_name(FLOATX_NAME));
    text_printf(&text, "}\n");
    return text;
}

// Find the model and plan its tensors. Returns the path of its weights (caller frees it), NULL to train from scratch.
static char* open_model(Trainer* t, const char* data_dir) {
    Run* r = &t->run;
    Settings* s = &r->settings;
    const char* source = r->session.checkpoint ? r->session.checkpoint : s->model;
    char *directory, *weights, *sizes = session_find_llmc(source, &directory, &weights);
    if (!sizes) session_find_model(source, &directory, &weights);
    char* path = directory ? xprintf("%s/config.json", directory) : NULL;
    session_find_tokenizer(&r->session, directory, data_dir);
    int data_V = r->session.tokenizer.size ? r->session.tokenizer.size : 50257;
    Config config = directory && !sizes ? config_read(path) : config_from_descriptor(sizes ? sizes : source, data_V);
    if (weights && config.tied) config.tied = weights_tie(weights, "transformer.", HEAD, 1, r->group.rank == 0);
    free(directory), free(path), free(sizes);
    if (s->dropout >= 0) config.embedding_dropout = config.attention_dropout = config.residual_dropout = s->dropout;
    int T = run_sequence_length(r, config.T);
    model_plan(&t->model, config, s->B, T, s->evaluate ? FORWARD_ONLY : s->recompute);
    t->model.in.doc_mask = t->doc_mask;
    t->model.for_choices = *t->choices.files != '\0';
    return weights;
}

// Check that the memory plan fits. If not, report the largest micro-batch that does, and exit.
static void check_memory(Trainer* t) {
    Run* r = &t->run;
    const Model* m = &t->model;
    UpdateSettings update = session_update(&r->session);
    r->plan = model_memory(m, update, &r->ctx);
    BatchSearch search = run_check_memory(r, &m->buffers.table, m->B);
    while (batch_search_next(&search)) {
        Model smaller;
        model_plan(&smaller, m->config, search.B, m->T, m->recompute);
        smaller.in.doc_mask = m->in.doc_mask, smaller.for_choices = m->for_choices;
        search.plan = model_memory(&smaller, update, &r->ctx);
        model_buffers_free_tables(&smaller.buffers);
    }
}

static void open_data(Trainer* t, const char* train_pattern, const char* val_pattern) {
    Run* r = &t->run;
    const Settings* s = &r->settings;
    const Model* m = &t->model;
    lm_data_open(&t->data, train_pattern, val_pattern, m->B, m->T, m->config.V, (uint64_t)s->seed,
                 s->shuffle ? SHUFFLED : IN_ORDER, r->group.size,
                 m->in.doc_mask ? session_end_of_text(&r->session, m->config.V) : -1, &r->ctx);
    multiple_choice_sets_open(&t->choices, m->config.V, m->T, &r->group);
    if (s->evaluate && !t->data.has_val && !t->choices.count)
        die(USAGE, "--evaluate 1 needs validation data or multiple-choice sets; name them with -j or --choices");
    session_check_data(&r->session, shards_fingerprint(&t->data.train_shards), train_pattern);
    run_check_ranks(r, config_text(t), t->data.has_val ? shards_fingerprint(&t->data.val_shards) : 0);
    vocabulary_check(&r->session, &t->data, m->config.V);
    session_set_last(&r->session, batch_lm_windows(&t->data.train), m->B * r->group.size * r->micro_steps);
}

// Check and open everything that the run needs. Nothing is written until all checks have passed.
static void trainer_open(Trainer* t, int argc, char** argv) {
    Run* r = &t->run;
    Settings* s = &r->settings;
    Model* m = &t->model;
    char *train_pattern, *val_pattern;
    r->flag_count = settings_flags(t, r->flags);
    flags_parse(r->flags, r->flag_count, argc, argv,
                "./train_gpt2 [flags]   (none: a small model on the built-in corpus)");
    const int trains = generate_check(&t->generate, s);
    run_join(r);
    if (!trains) s->B = 1, s->total_batch = 0;  // generation uses one sequence
    session_find_data(&r->session, "data/builtin/train.bin", &train_pattern, &val_pattern);
    const char* data = *s->train_data ? s->train_data : trains ? train_pattern : NULL;
    char *data_dir = data ? session_directory_of(data) : NULL, *weights = open_model(t, data_dir);
    generation_open(&t->text, &t->generate, &r->session, m->T, m->config.V,
                    attention_decode_takes(m->config.C / m->config.NH));
    check_memory(t);

    if (trains) open_data(t, train_pattern, val_pattern);
    if (!trains && !weights && !r->session.checkpoint)
        warn("-e %s: has random weights; name a trained model", s->model);
    model_alloc(m, (uint64_t)s->seed, &r->ctx);
    run_prepare(r, &m->buffers);
    if (r->session.checkpoint) run_load_checkpoint(r, &m->buffers, r->session.checkpoint);
    else if (weights) load_weights(m, &r->optimizer, weights, &r->ctx);
    else random_weights(m, &r->optimizer, (uint64_t)s->seed, &r->ctx);
    run_share(r, &m->buffers);
    free(weights), free(data_dir), free(train_pattern), free(val_pattern);
}

static void trainer_close(Trainer* t) {
    model_free(&t->model);
    generation_close(&t->text);
    if (!t->generate.generate) lm_data_close(&t->data);
    multiple_choice_sets_close(&t->choices);
    run_close(&t->run);
}

int main(int argc, char** argv) {
    static Trainer trainer;
    Trainer* t = &trainer;
    Run* r = &t->run;
    const Session* session = &r->session;
    const ModelBuffers* buffers = &t->model.buffers;
    process_begin(on_signal, argv);
    trainer_open(t, argc, argv);
    if (r->settings.evaluate) {
        t->generate.generate ? generate(t) : evaluate(t);
        trainer_close(t);
        return DONE;
    }
    run_begin(r, buffers, t->data.train_shards.tokens, "", step_work(t).tokens);
    if (t->data.has_val && session_is_missing(session, &r->log, r->settings.val_every, "val_loss"))
        validate(t, &r->log);
    for (int i = 0; session->step > 0 && i < t->choices.count; i++)
        if (multiple_choice_are_missing(session, &r->log, &t->choices, i))
            validate_choices(t, &t->choices.set[i], &r->log);
    while (run_next_step(r, (int)stop_signal)) {
        train_step(t);
        int validation = t->data.has_val && session_is_due(session, r->settings.val_every, 1);
        int choices = t->choices.count > 0 && session_is_due(session, t->choices.every, 1);
        int text = session_is_due(session, t->generate.sample_every, 1);
        run_end_step(r, buffers, validation || choices || text);
        if (validation) validate(t, &r->log);
        for (int i = 0; choices && i < t->choices.count; i++) validate_choices(t, &t->choices.set[i], &r->log);
        if (text && r->group.rank == 0) sample(t);
        if (r->checkpoint_is_due) run_save(r, buffers, config_text(t));
    }
    run_end(r, buffers, config_text(t), "GPT-2 training");
    trainer_close(t);
    return DONE;
}
#endif
