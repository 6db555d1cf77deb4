/* Train GPT-2, from scratch or from a Hugging Face directory, on the CPU (gcc) or the GPU (nvcc).
 *
 * Read it from top to bottom: tables of tensors, forward pass, backward pass, a step, main().
 * A block is two lists of ops, forward_block() and backward_block(). An op is a header in llmc/ops/: formula,
 * reference, fast version. Most functions begin with the name of their header or its folder.
 *
 * B batch size, T sequence length, N = B * T rows, V vocabulary size (Vp: padded), L layers, NH heads of HS
 * channels, C = NH * HS channels, F channels inside the MLP (4 C). s: how the rows are split into sequences.
 * floatX: type of weights and activations. real: full precision. Operand: linear input and its 8-bit copy. */
#define ATTENTION_MASK CAUSAL     // compile attention with this mask only
#include "llmc/base/top_k.h"      // softmax_draw(), for samples
#include "llmc/choices/room.h"    // HellaSwag and similar sets
#include "llmc/data/lm_data.h"    // the loader of token batches
#include "llmc/gpt2/config.h"     // Gpt2Config: config.json, initial values, names in files
#include "llmc/model/linear.h"    // linear layers, GELU and the loss, in floatX and in fp8
#include "llmc/run/vocabulary.h"  // a run (run.h), its steps (step.h), and its tokenizer

// ---------------------------------------------------------------------------------------------------------
// Parameters. A linear layer's weight is [out, in] in memory, and [in, out] in GPT-2's files ("Conv1D").

typedef struct {
    LayerNorm ln1, ln2;
    Linear qkv, attproj, fc, fcproj;
} BlockParams;

typedef struct {
    floatX *wte, *wpe;
    LayerNorm lnf;
    Linear head;  // output matrix [Vp, C], without a bias; it is wte if the model ties them
    BlockParams* h;
} Params;

// The same fields for gradients. The tables below bind the structs of parameters and of gradients.
typedef struct {
    LayerNormGrads ln1, ln2;
    LinearGrads qkv, attproj, fc, fcproj;
} BlockGrads;

typedef struct {
    real *wte, *wpe;
    LayerNormGrads lnf;
    LinearGrads head;
    BlockGrads* h;
} Grads;

// ---------------------------------------------------------------------------------------------------------
// Activations, of N rows. A buffer of the residual stream first holds a branch's output, then the sum.

typedef struct {
    Operand ln1, att, ln2, fc;  // .v: the values; .q: their 8-bit copy with --fp8, else NULL
    floatX *qkv, *mid, *fc_pre, *out;
    Operand dqkv, dfc, dmid, dout;  // gradients; dmid, dout: of the branches' outputs, branch_gradient()
    LayerNormStats ln1_stats, ln2_stats;
    real* lse;
} BlockActs;

typedef struct {
    floatX *embedded, *lnf, *logits;
    Operand head_in, dlogits;  // in the memory of lnf and of logits: the gradient replaces the logits
    LayerNormStats lnf_stats;
    real *losses, *loss;                // [N] per row; [1] their sum
    floatX *dx, *dbranch, *dln, *datt;  // activation gradients; dx is the residual stream's
    BlockActs* h;
} Acts;

// Symbols for the dimensions in the tables. DIM_DN: rows of activation gradients.
enum { ONE_DIM, DIM_V, DIM_VP, DIM_T, DIM_C, DIM_3C, DIM_F, DIM_N, DIM_NH, DIM_DN, DIMS };

// clang-format off
static const TensorRow PARAMETERS[] = {
    // name in files                         field                              shape                 stored  initial values        decay, layout in files, fp32 copy, Muon's matrices, 8-bit x and dy
    {"transformer.wte.weight",                offsetof(Params, wte),             {DIM_V, DIM_C},  OWN, DIM_VP, INIT_NORMAL,          1, AS_IN_MEMORY, 0, 0, offsetof(Acts, head_in.q), offsetof(Acts, dlogits.q)},
    {"transformer.wpe.weight",                offsetof(Params, wpe),             {DIM_T, DIM_C},  OWN, 0,      INIT_NORMAL,          1},
    {"transformer.h.%d.ln_1.weight",          offsetof(BlockParams, ln1.w),      {DIM_C},         OWN, 0,      INIT_ONE,             0, AS_IN_MEMORY, offsetof(BlockParams, ln1.w_fp32)},
    {"transformer.h.%d.ln_1.bias",            offsetof(BlockParams, ln1.b),      {DIM_C},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.attn.c_attn.weight",   offsetof(BlockParams, qkv.w),      {DIM_3C, DIM_C}, OWN, 0,      INIT_NORMAL,          1, TRANSPOSED, 0, 3, offsetof(BlockActs, ln1.q), offsetof(BlockActs, dqkv.q)},
    {"transformer.h.%d.attn.c_attn.bias",     offsetof(BlockParams, qkv.b),      {DIM_3C},        OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.attn.c_proj.weight",   offsetof(BlockParams, attproj.w),  {DIM_C, DIM_C},  OWN, 0,      INIT_NORMAL_RESIDUAL, 1, TRANSPOSED, 0, 1, offsetof(BlockActs, att.q), offsetof(BlockActs, dmid.q)},
    {"transformer.h.%d.attn.c_proj.bias",     offsetof(BlockParams, attproj.b),  {DIM_C},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.ln_2.weight",          offsetof(BlockParams, ln2.w),      {DIM_C},         OWN, 0,      INIT_ONE,             0, AS_IN_MEMORY, offsetof(BlockParams, ln2.w_fp32)},
    {"transformer.h.%d.ln_2.bias",            offsetof(BlockParams, ln2.b),      {DIM_C},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.mlp.c_fc.weight",      offsetof(BlockParams, fc.w),       {DIM_F, DIM_C},  OWN, 0,      INIT_NORMAL,          1, TRANSPOSED, 0, 1, offsetof(BlockActs, ln2.q), offsetof(BlockActs, dfc.q)},
    {"transformer.h.%d.mlp.c_fc.bias",        offsetof(BlockParams, fc.b),       {DIM_F},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.h.%d.mlp.c_proj.weight",    offsetof(BlockParams, fcproj.w),   {DIM_C, DIM_F},  OWN, 0,      INIT_NORMAL_RESIDUAL, 1, TRANSPOSED, 0, 1, offsetof(BlockActs, fc.q), offsetof(BlockActs, dout.q)},
    {"transformer.h.%d.mlp.c_proj.bias",      offsetof(BlockParams, fcproj.b),   {DIM_C},         OWN, 0,      INIT_ZERO,            0},
    {"transformer.ln_f.weight",               offsetof(Params, lnf.w),           {DIM_C},         OWN, 0,      INIT_ONE,             0, AS_IN_MEMORY, offsetof(Params, lnf.w_fp32)},
    {"transformer.ln_f.bias",                 offsetof(Params, lnf.b),           {DIM_C},         OWN, 0,      INIT_ZERO,            0},
    // Only if the head is not tied to wte:
    {"lm_head.weight",                        offsetof(Params, head.w),          {DIM_V, DIM_C},  OWN, DIM_VP, INIT_NORMAL,          1, AS_IN_MEMORY, 0, 0, offsetof(Acts, head_in.q), offsetof(Acts, dlogits.q)},
};
// clang-format on

typedef struct {
    Gpt2Config config;
    int B, T, N;  // size of a micro-batch: N = B * T rows
    int Vp;       // vocabulary size with padding
    int recompute;
    ModelBuffers buffers;  // the memory that the next fields point to
    Params p;
    Grads g;
    Acts a;
} Model;

// ---------------------------------------------------------------------------------------------------------
// Forward

static Dropout dropout_at(const Model* m, const Sequences* s, int layer, int site) {
    double p = site == SITE_DROPOUT_EMBEDDING   ? m->config.embedding_dropout
               : site == SITE_DROPOUT_ATTENTION ? m->config.attention_dropout
                                                : m->config.residual_dropout;
    return dropout_of(m->buffers.dropout, p, layer, site, s);
}

static AttentionShape attention_at(const Model* m, const Sequences* s, int layer) {
    const Gpt2Config* c = &m->config;
    Dropout dropout = dropout_at(m, s, layer, SITE_DROPOUT_ATTENTION);
    return (AttentionShape){.NH = c->NH, .HS = c->C / c->NH, .mask = CAUSAL, .dropout = dropout};
}

// The input of block l: the residual stream after block l - 1.
static floatX* residual_into(const Model* m, int l) { return l == 0 ? m->a.embedded : m->a.h[l - 1].out; }

// One pre-layernorm block. Its ln1 has already been computed. It ends with the next layernorm, because the
// residual addition and the layernorm that reads the sum are one fused op.
static void forward_block(Model* m, int l, const Sequences* s, Context* ctx) {
    const Gpt2Config* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    BlockActs* a = &m->a.h[l];
    const int last = l + 1 == c->L;
    int N = s->rows, C = c->C;
    real eps = (real)c->eps;
    Operand next = last ? (Operand){.v = m->a.lnf, .q = NULL} : a[1].ln1;
    LayerNormStats next_stats = last ? m->a.lnf_stats : a[1].ln1_stats;
    LayerNorm next_norm = last ? m->p.lnf : p[1].ln1;
    ResidualBranch attention = {.r = a->mid, .dropout = dropout_at(m, s, l, SITE_DROPOUT_ATTENTION_OUT)};
    ResidualBranch mlp = {.r = a->out, .dropout = dropout_at(m, s, l, SITE_DROPOUT_MLP_OUT)};
    Rows rows = {.N = N, .C = C};

    scope_at(ctx, FORWARD, l);
    linear_forward(a->qkv, a->ln1, p->qkv, N, C, 3 * C, ctx);
    attention_forward(a->att.v, a->lse, a->qkv, sequences_parts(s), attention_at(m, s, l), ctx);
    operand_fill(a->att, N, C, ctx);
    linear_forward(a->mid, a->att, p->attproj, N, C, C, ctx);
    residual_layernorm_forward(a->ln2, attention, a->ln2_stats, residual_into(m, l), p->ln2, rows, eps, ctx);
    linear_gelu_forward(a->fc, (GeluInput){a->fc_pre, c->gelu}, a->ln2, p->fc, (LinearSize){N, C, c->F}, ctx);
    linear_forward(a->out, a->fc, p->fcproj, N, c->F, C, ctx);
    residual_layernorm_forward(next, mlp, next_stats, a->mid, next_norm, rows, eps, ctx);
}

// Forward pass up to the final layernorm, m->a.lnf [N, C].
static void forward(Model* m, const Batch* b, Context* ctx) {
    const Gpt2Config* c = &m->config;
    const Sequences* s = &b->s;
    Embeddings tables = {.word = m->p.wte, .position = m->p.wpe};
    EmbeddingInputs in = {.tokens = b->inputs, .types = NULL, .s = s};
    Dropout dropout = dropout_at(m, s, 0, SITE_DROPOUT_EMBEDDING);
    scope_at(ctx, FORWARD, -1);
    if (m->buffers.grad_sync) grad_sync_wait(m->buffers.grad_sync, 0, ctx);  // what is outside the layers
    if (m->buffers.fp32_copies.copies) model_buffers_update_copies(&m->buffers, ctx);
    embedding_forward(m->a.embedded, in, tables, m->buffers.step.embedding, dropout, ctx);
    layernorm_forward(m->a.h[0].ln1.v, m->a.h[0].ln1_stats, m->a.embedded, m->p.h[0].ln1,
                      (Rows){.N = s->rows, .C = c->C}, (real)c->eps, ctx);
    operand_fill(m->a.h[0].ln1, s->rows, c->C, ctx);
    for (int l = 0; l < c->L; l++) {
        // The block's last op reads parameters of the next.
        if (m->buffers.grad_sync) grad_sync_wait(m->buffers.grad_sync, l + 1, ctx);
        forward_block(m, l, s, ctx);
    }
    scope_at(ctx, FORWARD, -1);
}

// Compute logits [N, Vp] from rows x [N, C] of the final layernorm.
static void forward_head(Model* m, floatX* x, int N, Context* ctx) {
    Operand in = {.v = x, .q = m->a.head_in.q};
    linear_forward(m->a.logits, in, m->p.head, N, m->config.C, m->Vp, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Backward. `mode`: how parameter gradients are written. SET in a step's first micro-batch, then ADD.

// Where the gradient of a residual sum is written: to the stream and, through dropout, to the branch of layer
// l and the bias at its end. Layer -1 is the embedding, which has no branch.
static ResidualGrad residual_gradient(const Model* m, const Sequences* s, int l, int site) {
    ResidualGrad r = {.dx = m->a.dx, .dbranch = m->a.dbranch, .dbias = NULL, .dropout = dropout_none(s)};
    if (l < 0) return r;
    r.dbias = site == SITE_DROPOUT_ATTENTION_OUT ? m->g.h[l].attproj.b : m->g.h[l].fcproj.b;
    r.dropout = dropout_at(m, s, l, site);
    return r;
}

// The gradient of a branch's output after residual_layernorm_backward(). Without dropout it is the stream's.
static Operand branch_gradient(const Model* m, const Sequences* s, int l, int site, Context* ctx) {
    Operand d = site == SITE_DROPOUT_ATTENTION_OUT ? m->a.h[l].dmid : m->a.h[l].dout;
    d.v = dropout_at(m, s, l, site).threshold ? m->a.dbranch : m->a.dx;
    operand_fill(d, s->rows, m->config.C, ctx);
    return d;
}

// The reverse of forward_block(). The next layernorm's backward pass has already run. The last op is ln1's.
static void backward_block(Model* m, int l, const Sequences* s, Mode mode, Context* ctx) {
    const Gpt2Config* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    const BlockGrads* g = &m->g.h[l];
    BlockActs* a = &m->a.h[l];
    const Sequences* parts = sequences_parts(s);
    int N = s->rows, C = c->C;
    Rows rows = {.N = N, .C = C};
    // Without biases, whose gradients are fused into the layernorm and GELU backward ops.
    LinearGrads dfcproj = {.w = g->fcproj.w}, dfc = {.w = g->fc.w}, dattproj = {.w = g->attproj.w};
    GeluInput gelu = {.pre = a->fc_pre, .kind = c->gelu};
    size_t fc_size = (size_t)N * (size_t)c->F;
    floatX* x = residual_into(m, l);
    ResidualGrad mid_grad = residual_gradient(m, s, l, SITE_DROPOUT_ATTENTION_OUT);
    ResidualGrad in_grad = residual_gradient(m, s, l - 1, SITE_DROPOUT_MLP_OUT);
    LayerNormInputs ln1 = {.dy = m->a.dln, .x = x, .stats = a->ln1_stats, .w = p->ln1.w, .size = rows};
    LayerNormInputs ln2 = {.dy = m->a.dln, .x = a->mid, .stats = a->ln2_stats, .w = p->ln2.w, .size = rows};

    scope_at(ctx, BACKWARD, l);
    if (m->recompute >= RECOMPUTE_GELU) gelu_forward(a->fc.v, a->fc_pre, fc_size, c->gelu, ctx);
    const int norms = m->recompute >= RECOMPUTE_NORMS;
    if (norms) layernorm_forward(a->ln2.v, a->ln2_stats, a->mid, p->ln2, rows, (real)c->eps, ctx);
    Operand dbranch = branch_gradient(m, s, l, SITE_DROPOUT_MLP_OUT, ctx);
    linear_backward_weight(dfcproj, dbranch, a->fc, N, c->F, C, mode, ctx);
    linear_gelu_backward_input(a->dfc, g->fc, mode, dbranch, p->fcproj, gelu, (LinearSize){N, c->F, C}, ctx);
    linear_backward_weight(dfc, a->dfc, a->ln2, N, C, c->F, mode, ctx);
    linear_backward_input(m->a.dln, a->dfc, p->fc, N, C, c->F, SET, ctx);
    residual_layernorm_backward(mid_grad, g->ln2, ln2, ADD, mode, ctx);

    dbranch = branch_gradient(m, s, l, SITE_DROPOUT_ATTENTION_OUT, ctx);
    linear_backward_weight(dattproj, dbranch, a->att, N, C, C, mode, ctx);
    linear_backward_input(m->a.datt, dbranch, p->attproj, N, C, C, SET, ctx);
    // Overlap the all-reduce of buckets with attention, which tolerates fewer SMs. The matmuls would not.
    if (m->buffers.grad_sync) grad_sync_ready(m->buffers.grad_sync, l + 1, m->buffers.grads, ctx);
    attention_backward(a->dqkv.v, m->a.datt, a->qkv, a->att.v, a->lse, parts, attention_at(m, s, l), ctx);
    if (norms) layernorm_forward(a->ln1.v, a->ln1_stats, x, p->ln1, rows, (real)c->eps, ctx);
    linear_backward_weight(g->qkv, a->dqkv, a->ln1, N, C, 3 * C, mode, ctx);
    linear_backward_input(m->a.dln, a->dqkv, p->qkv, N, C, 3 * C, SET, ctx);
    residual_layernorm_backward(in_grad, g->ln1, ln1, ADD, mode, ctx);
}

// Backpropagate from the gradient of the logits, which compute_loss() wrote, to all parameters.
static void backward(Model* m, const Batch* b, Mode mode, Context* ctx) {
    const Gpt2Config* c = &m->config;
    const Sequences* s = &b->s;
    int N = s->rows, C = c->C;
    Rows rows = {.N = N, .C = C};
    LayerNormInputs lnf = {
        .dy = m->a.dln, .x = residual_into(m, c->L), .stats = m->a.lnf_stats, .w = m->p.lnf.w, .size = rows};
    ResidualGrad out_grad = residual_gradient(m, s, c->L - 1, SITE_DROPOUT_MLP_OUT);
    EmbeddingGrads dtables = {.word = m->g.wte, .position = m->g.wpe};
    EmbeddingInputs in = {.tokens = b->inputs, .types = NULL, .s = s};
    Dropout dropout = dropout_at(m, s, 0, SITE_DROPOUT_EMBEDDING);

    scope_at(ctx, BACKWARD, -1);
    linear_backward_weight(m->g.head, m->a.dlogits, m->a.head_in, N, C, m->Vp, mode, ctx);
    linear_backward_input(m->a.dln, m->a.dlogits, m->p.head, N, C, m->Vp, SET, ctx);
    residual_layernorm_backward(out_grad, m->g.lnf, lnf, SET, mode, ctx);
    for (int l = c->L - 1; l >= 0; l--) backward_block(m, l, s, mode, ctx);
    scope_at(ctx, BACKWARD, -1);
    // A tied head has already written the token embedding's gradient.
    Mode word_mode = c->tied ? ADD : mode;
    embedding_backward(dtables, m->a.dx, in, m->buffers.step.embedding, dropout, word_mode, mode, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Losses

// The loss of a micro-batch from its logits: m->a.loss (`mode`) is `scale` times the sum of the token losses.
// BACKWARD also writes the gradient of the logits, times *m->buffers.loss_scale, over them or in fp8.
static void compute_loss(Model* m, const Batch* b, double scale, Direction pass, Mode mode, Context* ctx) {
    Losses losses = {.each = m->a.losses, .sum = m->a.loss, .scale = scale, .mode = mode};
    const real* loss_scale = m->buffers.loss_scale;
    int N = b->s.rows, V = m->config.V;
    scope_at(ctx, pass, -1);
    if (pass == FORWARD) classifier_forward(losses, m->a.logits, b->targets, N, V, m->Vp, ctx);
    else linear_classifier_backward(m->a.dlogits, losses, b->targets, loss_scale, N, V, m->Vp, ctx);
}

// Evaluate a micro-batch, without gradients.
static void evaluate_batch(Model* m, const Batch* b, double scale, Mode mode, Context* ctx) {
    forward(m, b, ctx);
    forward_head(m, m->a.lnf, b->s.rows, ctx);
    compute_loss(m, b, scale, FORWARD, mode, ctx);
}

// Read m->a.loss. Waits for the device.
static double model_loss(const Model* m, Context* ctx) { return model_buffers_number(m->a.loss, ctx); }

// ---------------------------------------------------------------------------------------------------------
// Memory

// Fill the tables for this configuration and micro-batches of B sequences of T tokens. `doc_mask`: 1 keeps
// attention within documents or other parts of a sequence. Allocates only the tables.
static void model_plan(Model* m, Gpt2Config c, int B, int T, int recompute, int doc_mask) {
    ModelBuffers* b = &m->buffers;
    *m = (Model){.config = c, .B = B, .T = T, .N = B * T, .recompute = recompute};
    m->Vp = (int)round_up((size_t)c.V, 128);
    b->table.fixed = recompute >= FORWARD_ONLY;
    const int dims[DIMS] = {1, c.V, m->Vp, c.T, c.C, 3 * c.C, c.F, m->N, c.NH, b->table.fixed ? 0 : m->N};

    // All layers share one buffer for an activation that the backward pass recomputes. Without a backward
    // pass they share all activations but qkv, whose keys and values are the KV cache of text generation.
    Placement gelu = recompute >= RECOMPUTE_GELU ? SHARED : OWN;
    Placement norm = recompute >= RECOMPUTE_NORMS ? SHARED : OWN;
    Placement kept = recompute >= FORWARD_ONLY ? SHARED : OWN;
    // clang-format off
    const TensorRow acts[] = {
        {"embedded",      offsetof(Acts, embedded),      {DIM_N, DIM_C}},
        {"lnf",           offsetof(Acts, lnf),           {DIM_N, DIM_C}},
        {"head_in",       offsetof(Acts, head_in.v),     {DIM_N, DIM_C}, SAME},
        {"logits",        offsetof(Acts, logits),        {DIM_N, DIM_VP}},
        {"dlogits",       offsetof(Acts, dlogits.v),     {DIM_N, DIM_VP}, SAME},
        {"dx",            offsetof(Acts, dx),            {DIM_DN, DIM_C}},
        {"dbranch",       offsetof(Acts, dbranch),       {DIM_DN, DIM_C}},
        {"dln",           offsetof(Acts, dln),           {DIM_DN, DIM_C}},
        {"datt",          offsetof(Acts, datt),          {DIM_DN, DIM_C}},
        {"h.%d.ln1",      offsetof(BlockActs, ln1.v),    {DIM_N, DIM_C}, norm},
        {"h.%d.qkv",      offsetof(BlockActs, qkv),      {DIM_N, DIM_3C}},
        {"h.%d.att",      offsetof(BlockActs, att.v),    {DIM_N, DIM_C}, kept},
        {"h.%d.mid",      offsetof(BlockActs, mid),      {DIM_N, DIM_C}, kept},
        {"h.%d.ln2",      offsetof(BlockActs, ln2.v),    {DIM_N, DIM_C}, norm},
        {"h.%d.fc_pre",   offsetof(BlockActs, fc_pre),   {DIM_N, DIM_F}, kept},
        {"h.%d.fc",       offsetof(BlockActs, fc.v),     {DIM_N, DIM_F}, gelu},
        {"h.%d.out",      offsetof(BlockActs, out),      {DIM_N, DIM_C}, kept},
        {"h.%d.dqkv",     offsetof(BlockActs, dqkv.v),   {DIM_DN, DIM_3C}, SHARED},
        {"h.%d.dfc",      offsetof(BlockActs, dfc.v),    {DIM_DN, DIM_F}, SHARED},
    };
    const TensorRow stats[] = {
        {"lnf_mean",      offsetof(Acts, lnf_stats.mean),      {DIM_N}},
        {"lnf_rstd",      offsetof(Acts, lnf_stats.rstd),      {DIM_N}},
        {"losses",        offsetof(Acts, losses),              {DIM_N}},
        {"loss",          offsetof(Acts, loss),                {ONE_DIM}},
        {"h.%d.ln1_mean", offsetof(BlockActs, ln1_stats.mean), {DIM_N}, kept},
        {"h.%d.ln1_rstd", offsetof(BlockActs, ln1_stats.rstd), {DIM_N}, kept},
        {"h.%d.ln2_mean", offsetof(BlockActs, ln2_stats.mean), {DIM_N}, kept},
        {"h.%d.ln2_rstd", offsetof(BlockActs, ln2_stats.rstd), {DIM_N}, kept},
        {"h.%d.lse",      offsetof(BlockActs, lse),            {DIM_NH, DIM_N}, kept},
    };
    // clang-format on
    tensors_add_layers(&b->table, PARAMETERS, COUNT_OF(PARAMETERS) - c.tied, dims, c.L);
    tensors_add_layers(&b->acts_table, acts, COUNT_OF(acts), dims, c.L);
    tensors_add_layers(&b->stats_table, stats, COUNT_OF(stats), dims, c.L);
    if (c.tied) model_buffers_tie(b, offsetof(Params, head.w), offsetof(Params, wte));
    model_buffers_finish_tables(b);
    b->structs[0] = (TensorStructs){&m->p, offsetof(Params, h), sizeof(BlockParams)};
    b->structs[1] = (TensorStructs){&m->g, offsetof(Grads, h), sizeof(BlockGrads)};
    b->structs[2] = (TensorStructs){&m->a, offsetof(Acts, h), sizeof(BlockActs)};

    StepSizes step = {.N = m->N, .sequences = B, .T = T, .fewest = B, .head_rows = m->N, .F = c.F};
    step.parts = doc_mask ? lm_data_planned_documents(B, m->N) : B;
    step.attention = (AttentionShape){.NH = c.NH, .HS = c.C / c.NH, .mask = CAUSAL};
    step.attention.dropout = dropout_make(c.attention_dropout, 0, 0, 0, 0, NULL);
    step.embedding = (EmbeddingSizes){.V = m->Vp, .T = c.T, .types = 0, .C = c.C, .padding = -1};
    b->step = step;
    b->batch_bytes = lm_data_ints(B, T, doc_mask) * sizeof(int);
}

#ifndef NO_MAIN  // tests include this file for the model only

typedef struct {
    Run run;  // settings, ranks, optimizer, log: llmc/run/state.h
    Model model;
    LmData data;
    MultipleChoiceSets choices;
} Trainer;

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

// ---------------------------------------------------------------------------------------------------------
// Step

// The work of a step of `sequences` sequences. FLOPs per token: 6 for each parameter but position embeddings,
// and those of attention, counted as if every token attended to its whole sequence.
static StepWork step_work(const Model* m, int sequences) {
    const Gpt2Config* c = &m->config;
    double N = (double)(m->buffers.table.parameters - (size_t)c->T * (size_t)c->C);
    StepWork work = {.consumed = sequences, .sequences = (double)sequences, .losses = {m->a.loss}};
    work.tokens = work.sequences * m->T;
    work.flops = work.tokens * (6 * N + 12.0 * c->L * c->C * m->T);
    return work;
}

// One optimizer step. The GPU runs it asynchronously. run_end_step() reads its results and logs them.
static void train_step(Run* r, Model* m, LmData* data) {
    Context* ctx = &r->ctx;
    StepWork work = step_work(m, run_step_sequences(r));
    double targets = lm_data_targets(&data->train, run_step_sequence(r), (uint64_t)work.consumed);
    run_begin_step(r, work);
    for (int i = 0; i < r->micro_steps; i++) {
        Mode mode = i == 0 ? SET : ADD;
        Batch b = lm_data_train(data, run_step_sequence(r), run_micro_batch_first(r, i), ctx);
        run_begin_micro_batch(r, i);
        forward(m, &b, ctx);
        forward_head(m, m->a.lnf, b.s.rows, ctx);
        compute_loss(m, &b, 1.0 / targets, r->direction, mode, ctx);
        if (r->direction == BACKWARD) backward(m, &b, mode, ctx);
        run_end_micro_batch(r, i);
    }
    run_all_reduce(r);
    run_update(r);
    run_read_results(r);
}

// ---------------------------------------------------------------------------------------------------------
// Validation and samples

// Evaluate this rank's share of the held-out text, and log the loss over all ranks. A signal to any rank ends
// the validation without a result.
static void validate(Run* r) {
    Model* m = &((Trainer*)r)->model;
    LmData* data = &((Trainer*)r)->data;
    ValShare share = val_share(r->settings.val_batches, batch_lm_windows(&data->val), m->B, &r->group);
    double scale = 1.0 / lm_data_targets(&data->val, 0, share.sequences);
    while (run_next_val(r, &share, (int)stop_signal)) {
        Batch b = lm_data_val(data, share.first, share.count, &r->ctx);
        evaluate_batch(m, &b, scale, share.mode, &r->ctx);
    }
    run_show_validation(r, share.count ? model_loss(m, &r->ctx) : 0, &share);
    if (!share.is_stopped) val_entropy_print(&data->val_entropy, share.sequences, m->T);
}

// Score the multiple-choice sets. The head reads only the scored rows, which overwrite the embeddings.
static void validate_choices(Run* r) {
    Model* m = &((Trainer*)r)->model;
    const int C = m->config.C, V = m->config.V, Vp = m->Vp;
    Losses losses = {.each = m->a.losses, .sum = m->a.loss, .scale = 1, .mode = SET};
    Batch b = lm_data_batch(&((Trainer*)r)->data, 1, 0);
    MultipleChoiceEvaluation e;
    multiple_choice_evaluation_next(&e, &((Trainer*)r)->choices, -1, m->N, m->T, r);
    while (multiple_choice_load(&e, b.inputs, b.targets, &b.s, r, (int)stop_signal)) {
        forward(m, &b, &r->ctx);
        multiple_choice_gather(m->a.embedded, m->a.lnf, &e, C, &r->ctx);
        forward_head(m, m->a.embedded, e.scored, &r->ctx);
        classifier_forward(losses, m->a.logits, b.targets, e.scored, V, Vp, &r->ctx);
        multiple_choice_take(&e, m->a.losses, m->a.logits, b.targets, V, Vp, &r->ctx);
    }
}

// Print a text by the model, from the start of a document, and save it in OUT/sample.txt. A signal ends it
// early. Each token takes a forward pass over the text, of which the model sees its T positions: a text that
// exceeds them loses a quarter. apps/use_gpt2.cu keeps keys and values instead, and takes a prompt.
static void sample(Run* r) {
    Model* m = &((Trainer*)r)->model;
    const int V = m->config.V, T = m->T, tokens = r->settings.sample_tokens;
    int begin = 0, count = 1;
    int* text = (int*)xmalloc(((size_t)tokens + 1) * sizeof(int));
    uint64_t key = rng_stream((uint64_t)r->settings.seed, (uint64_t)r->step, 0, SITE_SAMPLE);
    HostView logits = host_view_open(m->a.logits, (size_t)m->Vp, VIEW_FLOATX);
    text[0] = run_end_of_text(r, V);
    for (; count <= tokens && !stop_signal && r->group.rank == 0; count++) {
        if (count - begin > T) begin += max_int(T / 4, 1);
        group_begin_work(&r->group);
        Batch b = lm_data_text(&((Trainer*)r)->data, text + begin, count - begin, 0, &r->ctx);
        forward(m, &b, &r->ctx);
        forward_head(m, m->a.lnf + (size_t)(b.s.rows - 1) * (size_t)m->config.C, 1, &r->ctx);
        host_view_read(&r->ctx, &logits);
        text[count] = softmax_draw(logits.values, V, rng_uniform(philox((uint32_t)count, 0, 0, 0, key).v[0]));
    }
    run_show_tokens(r, text + 1, count - 1);
    host_view_close(&logits);
    free(text);
}

// ---------------------------------------------------------------------------------------------------------
// Settings and startup

// The flags. Returns their number.
static int settings_flags(Trainer* t) {
    static const char model[] =
        "Hugging Face directory, hub:NAME, .safetensors file, llm.c's .bin, config.json (random weights), "
        "d12|d24|d36|d48, or sizes L= C= NH= V= T= F= tied=.";
    Flag* table = t->run.flags;
    int count = settings_language_rows(&t->run.settings, table, model);
    settings_default(table, count, "--model", "L=4,C=128,NH=4,T=256");
    return multiple_choice_rows(&t->choices, table, vocabulary_rows(&t->run.settings, table, count));
}

// The configuration of the model at r->source.
static Gpt2Config find_config(Run* r) {
    char* sizes = find_llmc_model(r->source, &r->directory, &r->weights);
    char* path = r->directory && !sizes ? xprintf("%s/config.json", r->directory) : NULL;
    run_find_tokenizer(r, r->directory, r->data_directory);
    int data_V = r->tokenizer.size ? r->tokenizer.size : 50257;
    const char* descriptor = sizes ? sizes : r->source;
    Gpt2Config c = path ? gpt2_config_read(path) : gpt2_config_from_descriptor(descriptor, data_V);
    const int reports = r->group.rank == 0;
    if (r->weights && c.tied) c.tied = weights_tie(r->weights, "transformer.", GPT2_HEAD, 1, reports);
    const double p = r->settings.dropout;
    if (p >= 0) c.embedding_dropout = c.attention_dropout = c.residual_dropout = p;
    free(path);
    free(sizes);
    return c;
}

// Plan the tensors and memory of a model for sequences of T tokens, and allocate its batches.
static void plan_model(Trainer* t, Gpt2Config config, int T, int recompute) {
    Run* r = &t->run;
    Model* m = &t->model;
    const int doc_mask = r->settings.doc_mask;
    const int cuts = doc_mask ? run_end_of_text(r, config.V) : NO_CUTS;
    for (BatchSearch search = run_search_batch(r); run_next_batch(r, &search, &m->buffers);) {
        model_plan(m, config, search.B, T, recompute, doc_mask);
        if (*t->choices.files) m->buffers.batch_bytes += multiple_choice_device_bytes(m->N);
    }
    lm_data_alloc(&t->data, m->B, T, cuts, &r->ctx);
}

// Open the data and the sets, and write the text of the model's config.json.
static void open_data(Trainer* t) {
    Run* r = &t->run;
    const Gpt2Config* c = &t->model.config;
    int end_of_text = run_end_of_text(r, c->V);
    Text keys = {NULL, 0, 0};
    json_put_integer(&keys, "n_ctx", c->T);  // n_positions under an older name, which some converters read
    json_put_integer(&keys, "bos_token_id", end_of_text);
    json_put_integer(&keys, "eos_token_id", run_eos(r, c->V, end_of_text));
    Text text = config_text("GPT2LMHeadModel", "gpt2", keys, c, GPT2_CONFIG, COUNT_OF(GPT2_CONFIG));
    multiple_choice_sets_open(&t->choices, c->V, t->model.T, &r->group);
    vocabulary_open_data(r, &t->data, c->V, text);
}

static void trainer_close(Trainer* t) {
    lm_data_close(&t->data);
    multiple_choice_sets_close(&t->choices);
    run_close(&t->run);
}

// Check and open everything that the run needs. Nothing is written until all checks have passed.
static void trainer_open(Trainer* t, int argc, char** argv) {
    static const char usage[] = "./train_gpt2 [flags]   (none: a small model on the built-in corpus)";
    Run* r = &t->run;
    run_parse(r, settings_flags(t), argc, argv, usage);
    run_join(r, "data/builtin/train.bin");
    run_find_model(r, "", "");
    Gpt2Config config = find_config(r);
    plan_model(t, config, run_sequence_length(r, config.T), r->settings.recompute);
    open_data(t);
    run_init_model(r, &t->model.buffers, gpt2_weight_rules(&t->model.config));
}

#ifndef OTHER_MAIN  // apps/use_gpt2.cu has its own
int main(int argc, char** argv) {
    static Trainer t;
    Run* r = &t.run;
    process_begin(on_signal, argv);
    trainer_open(&t, argc, argv);
    uint64_t tokens = t.data.train_shards.tokens;
    // What is due every N steps, and after the last one, in this order.
    const DueWork due[] = {
        {r->val_every, run_report_fp8},
        {r->val_every, validate, "val_loss"},
        {r->val_every, validate, "ema_val_loss", 1},
        {t.choices.every, validate_choices, multiple_choice_last_key(&t.choices)},
        {r->settings.sample_every, sample},
        {r->settings.checkpoint_every, run_save},
    };
    run_begin(r, due, COUNT_OF(due), tokens, "", (double)t.model.T * run_step_sequences(r));
    while (run_next_step(r, (int)stop_signal)) {
        train_step(r, &t.model, &t.data);
        run_end_step(r);
    }
    run_end(r, "GPT-2 training");
    trainer_close(&t);
    return DONE;
}
#endif
#endif
