/* Pre-train BERT, from scratch or from a Hugging Face directory, on the CPU (gcc) or the GPU (nvcc).
 * apps/finetune_bert.cu trains the same encoder for tasks; apps/use_bert.cu uses it.
 *
 * Read it from top to bottom: tables of tensors, forward pass, backward pass, a step, main().
 * A block is two lists of ops, forward_block() and backward_block(). An op is a header in llmc/ops/: formula,
 * reference, fast version. Most functions begin with the name of their header or its folder.
 *
 * No padding: a micro-batch packs N tokens of S sequences. The masked-token head reads the M masked tokens.
 * B batch size, T maximum sequence length, V vocabulary size (Vp: padded), L layers, NH heads of HS channels,
 * C = NH * HS channels, F channels inside the MLP (4 C). s: how the rows are split into sequences.
 * floatX: type of weights and activations. real: full precision. Operand: linear input and its 8-bit copy. */
#define ATTENTION_MASK FULL            // compile attention with this mask only
#include "llmc/bert/config.h"          // BertConfig: config.json, initial values, names in files
#include "llmc/bert/fill_mask.h"       // samples
#include "llmc/bert/mlm_evaluation.h"  // sentences, their pairs and masks; results on held-out text
#include "llmc/bert/next_sentence.h"
#include "llmc/model/linear.h"  // linear layers, GELU and the loss, in floatX and in fp8
#include "llmc/ops/accuracy.h"
#include "llmc/ops/dropout.h"
#include "llmc/ops/gather.h"
#include "llmc/run/run.h"  // a run, and its steps (step.h)

// ---------------------------------------------------------------------------------------------------------
// Parameters. A linear layer's weight is [out, in], in memory and in files. Q, K and V are three adjacent
// tensors. qkv points to the first, so it is also one layer [3C, C].

typedef struct {
    Linear qkv, key, value, attproj, fc, fcproj;
    LayerNorm ln1, ln2;
} BlockParams;

typedef struct {
    floatX *word, *position, *type;
    LayerNorm ln0, lnt;         // of the embeddings, and of the masked-token head:
    Linear transform, decoder;  // transform, lnt, decoder. Its weight [Vp, C] may be tied to `word`
    Linear pooler, next;        // the next-sentence head
    BlockParams* h;
} Params;

// The same fields for gradients. The tables below bind the structs of parameters and of gradients.
typedef struct {
    LinearGrads qkv, key, value, attproj, fc, fcproj;
    LayerNormGrads ln1, ln2;
} BlockGrads;

typedef struct {
    real *word, *position, *type;
    LayerNormGrads ln0, lnt;
    LinearGrads transform, decoder, pooler, next;
    BlockGrads* h;
} Grads;

// ---------------------------------------------------------------------------------------------------------
// Activations. A buffer of a residual sum first holds a branch's output, then the sum.

typedef struct {               // all [N, ...]
    Operand in, att, ln1, fc;  // in: the block's input; .v: the values; .q: their 8-bit copy with --fp8
    floatX *qkv, *mid, *fc_pre, *out, *ln2;
    Operand dqkv, dfc, dmid, dout;  // gradients; dmid, dout: of the branches' outputs, branch_gradient()
    LayerNormStats ln1_stats, ln2_stats;
    real* lse;
} BlockActs;

typedef struct {
    floatX *embedded, *ln0;                                     // [N, C]; ln0 after its dropout
    floatX *masked, *transform_pre, *transform, *lnt, *logits;  // [M, ...] the masked rows
    floatX *first, *pooled;  // [S, C] first rows of sequences; the pooler's matmul output, then its gradient
    LayerNormStats ln0_stats, lnt_stats;
    real *next_logits, *losses;  // [S, 2]; [M] per masked row
    real *loss, *correct;        // [2] masked tokens, next sentence: summed losses; correct predictions
    floatX *dx, *dbranch, *datt, *dlnt, *dmasked, *dfirst;  // gradients; dx is the residual stream's
    BlockActs* h;
} Acts;

// Symbols for dimensions in the tables. ONE_DIM: no second dimension. DIM_DN: rows of activation gradients.
// clang-format off
enum { ONE_DIM, DIM_V, DIM_VP, DIM_T, DIM_TYPES, DIM_C, DIM_3C, DIM_F, DIM_N, DIM_NH, DIM_M, DIM_S, DIM_NEXT,
       DIM_LOSSES, DIM_DN, DIMS };

static const TensorRow ENCODER_ROWS[] = {
    // name in files                                             field                               shape                 stored           initial values  decay, layout in files, fp32 copy, Muon's matrices, 8-bit x and dy, x is read by others
    {"bert.embeddings.word_embeddings.weight",                     offsetof(Params, word),             {DIM_V, DIM_C},     OWN,     DIM_VP, INIT_NORMAL,    1},
    {"bert.embeddings.position_embeddings.weight",                 offsetof(Params, position),         {DIM_T, DIM_C},     OWN,     0,      INIT_NORMAL,    1},
    {"bert.embeddings.token_type_embeddings.weight",               offsetof(Params, type),             {DIM_TYPES, DIM_C}, OWN,     0,      INIT_NORMAL,    1},
    {"bert.embeddings.LayerNorm.weight",                           offsetof(Params, ln0.w),            {DIM_C},            OWN,     0,      INIT_ONE,       0, AS_IN_MEMORY, offsetof(Params, ln0.w_fp32)},
    {"bert.embeddings.LayerNorm.bias",                             offsetof(Params, ln0.b),            {DIM_C},            OWN,     0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.attention.self.query.weight",          offsetof(BlockParams, qkv.w),       {DIM_C, DIM_C},     OWN,     0,      INIT_NORMAL,    1, AS_IN_MEMORY, 0, 1, offsetof(BlockActs, in.q), offsetof(BlockActs, dqkv.q), 1},
    {"bert.encoder.layer.%d.attention.self.key.weight",            offsetof(BlockParams, key.w),       {DIM_C, DIM_C},     GROUPED, 0,      INIT_NORMAL,    1, AS_IN_MEMORY, 0, 1},
    {"bert.encoder.layer.%d.attention.self.value.weight",          offsetof(BlockParams, value.w),     {DIM_C, DIM_C},     GROUPED, 0,      INIT_NORMAL,    1, AS_IN_MEMORY, 0, 1},
    {"bert.encoder.layer.%d.attention.self.query.bias",            offsetof(BlockParams, qkv.b),       {DIM_C},            OWN,     0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.attention.self.key.bias",              offsetof(BlockParams, key.b),       {DIM_C},            GROUPED, 0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.attention.self.value.bias",            offsetof(BlockParams, value.b),     {DIM_C},            GROUPED, 0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.attention.output.dense.weight",        offsetof(BlockParams, attproj.w),   {DIM_C, DIM_C},     OWN,     0,      INIT_NORMAL_RESIDUAL, 1, AS_IN_MEMORY, 0, 1, offsetof(BlockActs, att.q), offsetof(BlockActs, dmid.q)},
    {"bert.encoder.layer.%d.attention.output.dense.bias",          offsetof(BlockParams, attproj.b),   {DIM_C},            OWN,     0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.attention.output.LayerNorm.weight",    offsetof(BlockParams, ln1.w),       {DIM_C},            OWN,     0,      INIT_ONE,       0, AS_IN_MEMORY, offsetof(BlockParams, ln1.w_fp32)},
    {"bert.encoder.layer.%d.attention.output.LayerNorm.bias",      offsetof(BlockParams, ln1.b),       {DIM_C},            OWN,     0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.intermediate.dense.weight",            offsetof(BlockParams, fc.w),        {DIM_F, DIM_C},     OWN,     0,      INIT_NORMAL,    1, AS_IN_MEMORY, 0, 1, offsetof(BlockActs, ln1.q), offsetof(BlockActs, dfc.q), 1},
    {"bert.encoder.layer.%d.intermediate.dense.bias",              offsetof(BlockParams, fc.b),        {DIM_F},            OWN,     0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.output.dense.weight",                  offsetof(BlockParams, fcproj.w),    {DIM_C, DIM_F},     OWN,     0,      INIT_NORMAL_RESIDUAL, 1, AS_IN_MEMORY, 0, 1, offsetof(BlockActs, fc.q), offsetof(BlockActs, dout.q)},
    {"bert.encoder.layer.%d.output.dense.bias",                    offsetof(BlockParams, fcproj.b),    {DIM_C},            OWN,     0,      INIT_ZERO,      0},
    {"bert.encoder.layer.%d.output.LayerNorm.weight",              offsetof(BlockParams, ln2.w),       {DIM_C},            OWN,     0,      INIT_ONE,       0, AS_IN_MEMORY, offsetof(BlockParams, ln2.w_fp32)},
    {"bert.encoder.layer.%d.output.LayerNorm.bias",                offsetof(BlockParams, ln2.b),       {DIM_C},            OWN,     0,      INIT_ZERO,      0},
};
static const TensorRow DECODER_ROWS[][2] = {  // untied, then tied
    {{"cls.predictions.decoder.bias",                              offsetof(Params, decoder.b),        {DIM_V},            OWN,     DIM_VP, INIT_ZERO,      0},
     {"cls.predictions.decoder.weight",                            offsetof(Params, decoder.w),        {DIM_V, DIM_C},     OWN,     DIM_VP, INIT_NORMAL,    1}},
    {{"cls.predictions.bias",                                      offsetof(Params, decoder.b),        {DIM_V},            OWN,     DIM_VP, INIT_ZERO,      0}},
};
static const TensorRow HEAD_ROWS[] = {
    {"cls.predictions.transform.dense.weight",                     offsetof(Params, transform.w),      {DIM_C, DIM_C},     OWN,     0,      INIT_NORMAL,    1},
    {"cls.predictions.transform.dense.bias",                       offsetof(Params, transform.b),      {DIM_C},            OWN,     0,      INIT_ZERO,      0},
    {"cls.predictions.transform.LayerNorm.weight",                 offsetof(Params, lnt.w),            {DIM_C},            OWN,     0,      INIT_ONE,       0, AS_IN_MEMORY, offsetof(Params, lnt.w_fp32)},
    {"cls.predictions.transform.LayerNorm.bias",                   offsetof(Params, lnt.b),            {DIM_C},            OWN,     0,      INIT_ZERO,      0},
};
static const TensorRow NEXT_ROWS[] = {  // only with next-sentence prediction; the first two: the pooler
    {"bert.pooler.dense.weight",                                   offsetof(Params, pooler.w),         {DIM_C, DIM_C},     OWN,     0,      INIT_NORMAL,    1},
    {"bert.pooler.dense.bias",                                     offsetof(Params, pooler.b),         {DIM_C},            OWN,     0,      INIT_ZERO,      0},
    {"cls.seq_relationship.weight",                                offsetof(Params, next.w),           {DIM_NEXT, DIM_C},  OWN,     0,      INIT_NORMAL,    1},
    {"cls.seq_relationship.bias",                                  offsetof(Params, next.b),           {DIM_NEXT},         OWN,     0,      INIT_ZERO,      0},
};
// clang-format on

typedef struct {
    BertConfig config;
    // The largest micro-batch: N = B * T tokens, in at most S sequences; M of them are masked.
    int B, T, N, M, S;
    int Vp;  // vocabulary size with padding
    int recompute;
    ModelBuffers buffers;  // the memory that the next fields point to
    Params p;
    Grads g;
    Acts a;
} Model;

// ---------------------------------------------------------------------------------------------------------
// Forward

static Dropout dropout_at(const Model* m, const Sequences* s, int layer, int site) {
    double p = site == SITE_DROPOUT_ATTENTION ? m->config.attention_dropout : m->config.hidden_dropout;
    return dropout_of(m->buffers.dropout, p, layer, site, s);
}

static AttentionShape attention_at(const Model* m, const Sequences* s, int layer) {
    int NH = m->config.NH;
    Dropout dropout = dropout_at(m, s, layer, SITE_DROPOUT_ATTENTION);
    return (AttentionShape){.NH = NH, .HS = m->config.C / NH, .mask = FULL, .dropout = dropout};
}

// The input of block l: the output of the layernorm that ends block l - 1, or of the embeddings' layernorm.
static floatX* input_of(const Model* m, int l) { return l == 0 ? m->a.ln0 : m->a.h[l - 1].ln2; }

// One post-layernorm block: each branch's output is added to the branch's input, and the sum is normalised.
static void forward_block(Model* m, int l, const Sequences* s, Context* ctx) {
    const BertConfig* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    BlockActs* a = &m->a.h[l];
    int N = s->rows, C = c->C;
    Rows rows = {.N = N, .C = C};
    Operand next = l + 1 < c->L ? a[1].in : (Operand){.v = a->ln2, .q = NULL};
    ResidualBranch attention = {.r = a->mid, .dropout = dropout_at(m, s, l, SITE_DROPOUT_ATTENTION_OUT)};
    ResidualBranch mlp = {.r = a->out, .dropout = dropout_at(m, s, l, SITE_DROPOUT_MLP_OUT)};

    scope_at(ctx, FORWARD, l);
    linear_forward(a->qkv, a->in, p->qkv, N, C, 3 * C, ctx);
    attention_forward(a->att.v, a->lse, a->qkv, s, attention_at(m, s, l), ctx);
    operand_fill(a->att, N, C, ctx);
    linear_forward(a->mid, a->att, p->attproj, N, C, C, ctx);
    residual_layernorm_forward(a->ln1, attention, a->ln1_stats, a->in.v, p->ln1, rows, (real)c->eps, ctx);
    linear_gelu_forward(a->fc, (GeluInput){a->fc_pre, c->gelu}, a->ln1, p->fc, (LinearSize){N, C, c->F}, ctx);
    linear_forward(a->out, a->fc, p->fcproj, N, c->F, C, ctx);
    residual_layernorm_forward(next, mlp, a->ln2_stats, a->ln1.v, p->ln2, rows, (real)c->eps, ctx);
}

// Forward pass up to the last block's layernorm [N, C].
static void forward_encoder(Model* m, const MlmInput* in, Context* ctx) {
    const BertConfig* c = &m->config;
    const Sequences* s = &in->sequences;
    Embeddings tables = {.word = m->p.word, .position = m->p.position, .type = m->p.type};
    EmbeddingInputs inputs = {.tokens = in->tokens, .types = in->types, .s = s};
    scope_at(ctx, FORWARD, -1);
    if (m->buffers.grad_sync) grad_sync_wait(m->buffers.grad_sync, 0, ctx);  // what is outside the layers
    if (m->buffers.fp32_copies.copies) model_buffers_update_copies(&m->buffers, ctx);
    embedding_forward(m->a.embedded, inputs, tables, m->buffers.step.embedding, dropout_none(s), ctx);
    Rows rows = {.N = s->rows, .C = c->C};
    layernorm_forward(m->a.ln0, m->a.ln0_stats, m->a.embedded, m->p.ln0, rows, (real)c->eps, ctx);
    dropout_forward(m->a.ln0, m->a.ln0, s->rows, c->C, dropout_at(m, s, 0, SITE_DROPOUT_EMBEDDING), ctx);
    operand_fill(m->a.h[0].in, s->rows, c->C, ctx);
    for (int l = 0; l < c->L; l++) {
        if (m->buffers.grad_sync) grad_sync_wait(m->buffers.grad_sync, l, ctx);
        forward_block(m, l, s, ctx);
    }
    scope_at(ctx, FORWARD, -1);
}

// Compute the logits [M, Vp] of the masked rows of x, the output of a layer.
static void forward_masked(Model* m, const floatX* x, const MlmInput* in, Context* ctx) {
    const BertConfig* c = &m->config;
    const Acts* a = &m->a;
    int M = in->masked, C = c->C;
    Rows rows = {.N = M, .C = C};
    gather_forward(a->masked, x, in->masked_rows, M, C, ctx);
    matmul_gelu_forward(a->transform, a->transform_pre, a->masked, m->p.transform, M, C, C, c->gelu, ctx);
    layernorm_forward(a->lnt, a->lnt_stats, a->transform, m->p.lnt, rows, (real)c->eps, ctx);
    matmul_forward(a->logits, a->lnt, m->p.decoder, M, C, m->Vp, SET, ctx);
}

// Forward pass up to the masked tokens' logits and, with next-sentence prediction, the pooler's matmul [S, C]
// on the first row of each sequence. next_sentence.h has the rest of that head.
static void forward(Model* m, const MlmInput* in, Context* ctx) {
    const floatX* x = input_of(m, m->config.L);
    int S = in->sequences.count, C = m->config.C;
    forward_encoder(m, in, ctx);
    forward_masked(m, x, in, ctx);
    if (!m->config.next) return;
    gather_forward(m->a.first, x, in->sequences.cu_seqlens, S, C, ctx);
    matmul_forward(m->a.pooled, m->a.first, m->p.pooler, S, C, C, SET, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Backward. `mode`: how parameter gradients are written. SET in a step's first micro-batch, then ADD.

// Where the gradient of a residual sum is written: to the stream, and through dropout to l's branch and bias.
static ResidualGrad residual_gradient(const Model* m, const Sequences* s, int l, int site) {
    real* dbias = site == SITE_DROPOUT_ATTENTION_OUT ? m->g.h[l].attproj.b : m->g.h[l].fcproj.b;
    Dropout dropout = dropout_at(m, s, l, site);
    return (ResidualGrad){.dx = m->a.dx, .dbranch = m->a.dbranch, .dbias = dbias, .dropout = dropout};
}

// The gradient of a branch's output after residual_layernorm_backward(). Without dropout it is the stream's.
static Operand branch_gradient(const Model* m, const Sequences* s, int l, int site, Context* ctx) {
    Operand d = site == SITE_DROPOUT_ATTENTION_OUT ? m->a.h[l].dmid : m->a.h[l].dout;
    d.v = dropout_at(m, s, l, site).threshold ? m->a.dbranch : m->a.dx;
    operand_fill(d, s->rows, m->config.C, ctx);
    return d;
}

static void backward_block(Model* m, int l, const Sequences* s, Mode mode, Context* ctx) {
    const BertConfig* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    const BlockGrads* g = &m->g.h[l];
    BlockActs* a = &m->a.h[l];
    int N = s->rows, C = c->C;
    Rows rows = {.N = N, .C = C};
    LayerNormInputs ln1 = {.dy = m->a.dx, .x = a->mid, .stats = a->ln1_stats, .w = p->ln1.w, .size = rows};
    LayerNormInputs ln2 = {.dy = m->a.dx, .x = a->out, .stats = a->ln2_stats, .w = p->ln2.w, .size = rows};
    // Without biases, whose gradients are fused into the layernorm and GELU backward ops.
    LinearGrads dfcproj = {.w = g->fcproj.w}, dfc = {.w = g->fc.w}, dattproj = {.w = g->attproj.w};
    GeluInput gelu = {.pre = a->fc_pre, .kind = c->gelu};
    size_t fc_size = (size_t)N * (size_t)c->F;
    const int norms = m->recompute >= RECOMPUTE_NORMS;
    const real eps = (real)c->eps;
    ResidualGrad out_grad = residual_gradient(m, s, l, SITE_DROPOUT_MLP_OUT);
    ResidualGrad mid_grad = residual_gradient(m, s, l, SITE_DROPOUT_ATTENTION_OUT);

    scope_at(ctx, BACKWARD, l);
    if (m->recompute >= RECOMPUTE_GELU) gelu_forward(a->fc.v, a->fc_pre, fc_size, c->gelu, ctx);
    if (norms) layernorm_forward(a->ln1.v, a->ln1_stats, a->mid, p->ln1, rows, eps, ctx);
    residual_layernorm_backward(out_grad, g->ln2, ln2, SET, mode, ctx);
    Operand dbranch = branch_gradient(m, s, l, SITE_DROPOUT_MLP_OUT, ctx);
    linear_backward_weight(dfcproj, dbranch, a->fc, N, c->F, C, mode, ctx);
    linear_gelu_backward_input(a->dfc, g->fc, mode, dbranch, p->fcproj, gelu, (LinearSize){N, c->F, C}, ctx);
    linear_backward_weight(dfc, a->dfc, a->ln1, N, C, c->F, mode, ctx);
    linear_backward_input(m->a.dx, a->dfc, p->fc, N, C, c->F, ADD, ctx);

    residual_layernorm_backward(mid_grad, g->ln1, ln1, SET, mode, ctx);
    dbranch = branch_gradient(m, s, l, SITE_DROPOUT_ATTENTION_OUT, ctx);
    linear_backward_weight(dattproj, dbranch, a->att, N, C, C, mode, ctx);
    linear_backward_input(m->a.datt, dbranch, p->attproj, N, C, C, SET, ctx);
    // Overlap the all-reduce of buckets with attention, which tolerates fewer SMs. The matmuls would not.
    if (m->buffers.grad_sync) grad_sync_ready(m->buffers.grad_sync, l + 1, m->buffers.grads, ctx);
    attention_backward(a->dqkv.v, m->a.datt, a->qkv, a->att.v, a->lse, s, attention_at(m, s, l), ctx);
    if (norms && l > 0) layernorm_forward(a->in.v, a[-1].ln2_stats, a[-1].out, p[-1].ln2, rows, eps, ctx);
    linear_backward_weight(g->qkv, a->dqkv, a->in, N, C, 3 * C, mode, ctx);
    linear_backward_input(m->a.dx, a->dqkv, p->qkv, N, C, 3 * C, ADD, ctx);
}

// Backpropagate from the gradient of the logits to that of the last block's layernorm, in m->a.dx.
static void backward_masked(Model* m, const MlmInput* in, Mode mode, Context* ctx) {
    int M = in->masked, C = m->config.C;
    LayerNormInputs lnt = {.dy = m->a.dlnt, .x = m->a.transform, .stats = m->a.lnt_stats, .w = m->p.lnt.w};
    lnt.size = (Rows){.N = M, .C = C};
    matmul_backward_weight(m->g.decoder, m->a.logits, m->a.lnt, M, C, m->Vp, mode, ctx);
    matmul_backward_input(m->a.dlnt, m->a.logits, m->p.decoder.w, M, C, m->Vp, SET, ctx);
    layernorm_backward(m->a.dlnt, m->g.lnt, lnt, SET, mode, ctx);
    gelu_backward(m->a.dlnt, m->a.dlnt, m->a.transform_pre, (size_t)M * (size_t)C, m->config.gelu, SET, ctx);
    matmul_backward_weight(m->g.transform, m->a.dlnt, m->a.masked, M, C, C, mode, ctx);
    matmul_backward_input(m->a.dmasked, m->a.dlnt, m->p.transform.w, M, C, C, SET, ctx);
    gather_backward(m->a.dx, m->a.dmasked, in->masked_rows, M, in->sequences.rows, C, SET, ctx);
}

// Backpropagate from m->a.pooled, which holds its gradient, and add to m->a.dx. First rows are never masked.
static void backward_next(Model* m, const MlmInput* in, Mode mode, Context* ctx) {
    int S = in->sequences.count, C = m->config.C;
    LinearGrads dpooler = {.w = m->g.pooler.w};  // next_sentence_backward() has written its bias gradient
    matmul_backward_weight(dpooler, m->a.pooled, m->a.first, S, C, C, mode, ctx);
    matmul_backward_input(m->a.dfirst, m->a.pooled, m->p.pooler.w, S, C, C, SET, ctx);
    gather_backward(m->a.dx, m->a.dfirst, in->sequences.cu_seqlens, S, in->sequences.rows, C, ADD, ctx);
}

// Backpropagate from the gradient of the last block's layernorm, in m->a.dx, to the encoder's parameters.
// `word_mode`: how the gradient of the word embedding is written.
static void backward_encoder(Model* m, const MlmInput* in, Mode word_mode, Mode mode, Context* ctx) {
    const BertConfig* c = &m->config;
    const Sequences* s = &in->sequences;
    EmbeddingGrads dtables = {.word = m->g.word, .position = m->g.position, .type = m->g.type};
    EmbeddingInputs inputs = {.tokens = in->tokens, .types = in->types, .s = s};
    LayerNormInputs ln0 = {.dy = m->a.dx, .x = m->a.embedded, .stats = m->a.ln0_stats, .w = m->p.ln0.w};
    ln0.size = (Rows){.N = s->rows, .C = c->C};
    EmbeddingSizes sizes = m->buffers.step.embedding;
    for (int l = c->L - 1; l >= 0; l--) backward_block(m, l, s, mode, ctx);
    scope_at(ctx, BACKWARD, -1);
    dropout_backward(m->a.dx, m->a.dx, s->rows, c->C, dropout_at(m, s, 0, SITE_DROPOUT_EMBEDDING), ctx);
    layernorm_backward(m->a.dx, m->g.ln0, ln0, SET, mode, ctx);
    embedding_backward(dtables, m->a.dx, inputs, sizes, dropout_none(s), word_mode, mode, ctx);
}

// Backpropagate from the gradients in m->a.logits and m->a.pooled to all parameters.
static void backward(Model* m, const MlmInput* in, Mode mode, Context* ctx) {
    scope_at(ctx, BACKWARD, -1);
    backward_masked(m, in, mode, ctx);
    if (m->config.next) backward_next(m, in, mode, ctx);
    // A tied decoder has already written the word embedding's gradient.
    backward_encoder(m, in, m->config.tied ? ADD : mode, mode, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Losses: the mean over masked tokens and, with next-sentence prediction, the mean over sequences

// The losses of a micro-batch from the outputs of forward(): m->a.loss (`mode`), the summed losses times
// `f`. FORWARD also counts correct predictions, in m->a.correct. BACKWARD also replaces the outputs by their
// gradients, times *m->buffers.loss_scale, and writes the gradients of the next-sentence head (`mode`).
static void compute_loss(Model* m, const MlmInput* in, MlmScales f, Direction pass, Mode mode, Context* ctx) {
    Losses losses = {.each = m->a.losses, .sum = &m->a.loss[0], .scale = f.masked, .mode = mode};
    NextSentenceLoss next = {.logits = m->a.next_logits, .labels = in->next_targets, .scale = f.next};
    next.loss = &m->a.loss[1];
    next.correct = &m->a.correct[1];
    next.loss_scale = m->buffers.loss_scale;
    NextSentenceGrads dnext = {.d = m->g.next, .dbias = m->g.pooler.b};
    const int M = in->masked, S = in->sequences.count, C = m->config.C, V = m->config.V;
    scope_at(ctx, pass, -1);
    if (pass == FORWARD) {
        classifier_forward(losses, m->a.logits, in->targets, M, V, m->Vp, ctx);
        accuracy_forward(&m->a.correct[0], m->a.logits, in->targets, M, V, m->Vp, mode, ctx);
        if (m->config.next) next_sentence_forward(next, m->a.pooled, m->p.next, S, C, mode, ctx);
    } else {
        classifier_backward(losses, m->a.logits, in->targets, m->buffers.loss_scale, M, V, m->Vp, ctx);
        if (m->config.next) next_sentence_backward(m->a.pooled, dnext, next, m->p.next, S, C, mode, ctx);
    }
}

// Evaluate a micro-batch, without gradients.
static void evaluate_batch(Model* m, const MlmInput* in, MlmScales scales, Mode mode, Context* ctx) {
    forward(m, in, ctx);
    compute_loss(m, in, scales, FORWARD, mode, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Memory

// Begin the tables with the encoder's rows. A micro-batch has at most B * T tokens, M of them masked, in S
// sequences. `dims` [DIMS] gets the sizes. Allocates only the tables.
static void encoder_plan(Model* m, BertConfig c, int B, int T, int M, int S, int recompute, int* dims) {
    ModelBuffers* b = &m->buffers;
    *m = (Model){.config = c, .B = B, .T = T, .N = B * T, .M = M, .S = S, .recompute = recompute};
    m->Vp = (int)round_up((size_t)c.V, 128);
    b->table.fixed = recompute >= FORWARD_ONLY;
    // clang-format off
    const int sizes[DIMS] = {1, c.V, m->Vp, c.T, c.types, c.C, 3 * c.C, c.F, m->N, c.NH, M, S, 2, STEP_LOSSES,
                             b->table.fixed ? 0 : m->N};
    memcpy(dims, sizes, sizeof sizes);

    // Layers share the buffers of what the backward pass recomputes. Without that pass, they share all.
    Placement gelu = recompute >= RECOMPUTE_GELU ? SHARED : OWN;
    Placement norm = recompute >= RECOMPUTE_NORMS ? SHARED : OWN;
    Placement kept = recompute >= FORWARD_ONLY ? SHARED : OWN;
    const TensorRow acts[] = {
        {"embedded",      offsetof(Acts, embedded),      {DIM_N, DIM_C}},
        {"dx",            offsetof(Acts, dx),            {DIM_DN, DIM_C}},
        {"dbranch",       offsetof(Acts, dbranch),       {DIM_DN, DIM_C}},
        {"datt",          offsetof(Acts, datt),          {DIM_DN, DIM_C}},
        {"ln0",           offsetof(Acts, ln0),           {DIM_N, DIM_C}},  // last: the first layer's `in` is SAME
        {"h.%d.in",       offsetof(BlockActs, in.v),     {DIM_N, DIM_C}, SAME},  // ln0, or ln2 of the layer before
        {"h.%d.dqkv",     offsetof(BlockActs, dqkv.v),   {DIM_DN, DIM_3C}, SHARED},
        {"h.%d.dfc",      offsetof(BlockActs, dfc.v),    {DIM_DN, DIM_F}, SHARED},
        {"h.%d.qkv",      offsetof(BlockActs, qkv),      {DIM_N, DIM_3C}, kept},
        {"h.%d.att",      offsetof(BlockActs, att.v),    {DIM_N, DIM_C}, kept},
        {"h.%d.mid",      offsetof(BlockActs, mid),      {DIM_N, DIM_C}, kept},
        {"h.%d.ln1",      offsetof(BlockActs, ln1.v),    {DIM_N, DIM_C}, norm},
        {"h.%d.fc_pre",   offsetof(BlockActs, fc_pre),   {DIM_N, DIM_F}, kept},
        {"h.%d.fc",       offsetof(BlockActs, fc.v),     {DIM_N, DIM_F}, gelu},
        {"h.%d.out",      offsetof(BlockActs, out),      {DIM_N, DIM_C}, kept},
        {"h.%d.ln2",      offsetof(BlockActs, ln2),      {DIM_N, DIM_C}, norm},
    };
    const TensorRow stats[] = {
        {"ln0_mean",      offsetof(Acts, ln0_stats.mean),      {DIM_N}},
        {"ln0_rstd",      offsetof(Acts, ln0_stats.rstd),      {DIM_N}},
        {"h.%d.ln1_mean", offsetof(BlockActs, ln1_stats.mean), {DIM_N}, kept},
        {"h.%d.ln1_rstd", offsetof(BlockActs, ln1_stats.rstd), {DIM_N}, kept},
        {"h.%d.ln2_mean", offsetof(BlockActs, ln2_stats.mean), {DIM_N}, kept},
        {"h.%d.ln2_rstd", offsetof(BlockActs, ln2_stats.rstd), {DIM_N}, kept},
        {"h.%d.lse",      offsetof(BlockActs, lse),            {DIM_NH, DIM_N}, kept},
    };
    // clang-format on
    tensors_add_layers(&b->table, ENCODER_ROWS, COUNT_OF(ENCODER_ROWS), dims, c.L);
    tensors_add_layers(&b->acts_table, acts, COUNT_OF(acts), dims, c.L);
    tensors_add_layers(&b->stats_table, stats, COUNT_OF(stats), dims, c.L);
    b->structs[0] = (TensorStructs){&m->p, offsetof(Params, h), sizeof(BlockParams)};
    b->structs[1] = (TensorStructs){&m->g, offsetof(Grads, h), sizeof(BlockGrads)};
    b->structs[2] = (TensorStructs){&m->a, offsetof(Acts, h), sizeof(BlockActs)};

    StepSizes step = {.N = m->N, .sequences = S, .T = T, .fewest = B, .parts = S, .head_rows = M, .F = c.F};
    step.attention = (AttentionShape){.NH = c.NH, .HS = c.C / c.NH, .mask = FULL};
    step.attention.dropout = dropout_make(c.attention_dropout, 0, 0, 0, 0, NULL);
    step.embedding = (EmbeddingSizes){m->Vp, c.T, c.types, c.C, c.padding};
    b->step = step;
    b->batch_bytes = mlm_loader_ints(m->N, M, S) * sizeof(int);
}

// Fill the tables: the encoder, then the pre-training heads.
static void model_plan(Model* m, BertConfig c, int B, int T, int M, int S, int recompute) {
    int dims[DIMS];
    encoder_plan(m, c, B, T, M, S, recompute, dims);
    ModelBuffers* b = &m->buffers;
    // clang-format off
    static const TensorRow head_acts[] = {
        {"masked",        offsetof(Acts, masked),        {DIM_M, DIM_C}},
        {"transform_pre", offsetof(Acts, transform_pre), {DIM_M, DIM_C}},
        {"transform",     offsetof(Acts, transform),     {DIM_M, DIM_C}},
        {"lnt",           offsetof(Acts, lnt),           {DIM_M, DIM_C}},
        {"logits",        offsetof(Acts, logits),        {DIM_M, DIM_VP}},
        {"first",         offsetof(Acts, first),         {DIM_S, DIM_C}},
        {"pooled",        offsetof(Acts, pooled),        {DIM_S, DIM_C}},
        {"dlnt",          offsetof(Acts, dlnt),          {DIM_M, DIM_C}},
        {"dmasked",       offsetof(Acts, dmasked),       {DIM_M, DIM_C}},
        {"dfirst",        offsetof(Acts, dfirst),        {DIM_S, DIM_C}},
    };
    static const TensorRow head_stats[] = {
        {"lnt_mean",      offsetof(Acts, lnt_stats.mean),      {DIM_M}},
        {"lnt_rstd",      offsetof(Acts, lnt_stats.rstd),      {DIM_M}},
        {"next_logits",   offsetof(Acts, next_logits),         {DIM_S, DIM_NEXT}},
        {"losses",        offsetof(Acts, losses),              {DIM_M}},
        {"loss",          offsetof(Acts, loss),                {DIM_LOSSES}},
        {"correct",       offsetof(Acts, correct),             {DIM_LOSSES}},
    };
    // clang-format on
    tensors_add(&b->table, DECODER_ROWS[c.tied], c.tied ? 1 : 2, dims, -1);
    tensors_add(&b->table, HEAD_ROWS, COUNT_OF(HEAD_ROWS), dims, -1);
    if (c.next) tensors_add(&b->table, NEXT_ROWS, COUNT_OF(NEXT_ROWS), dims, -1);
    tensors_add(&b->acts_table, head_acts, COUNT_OF(head_acts), dims, -1);
    tensors_add(&b->stats_table, head_stats, COUNT_OF(head_stats), dims, -1);
    if (c.tied) model_buffers_tie(b, offsetof(Params, decoder.w), offsetof(Params, word));
    b->step.other_scratch = next_sentence_scratch_bytes(S, c.C);
    model_buffers_finish_tables(b);
}

#ifndef NO_MAIN  // tests and apps/finetune_bert.cu include this file for the model only

typedef struct {
    Run run;  // settings, ranks, optimizer, log: llmc/run/state.h
    Model model;
    MlmSettings mlm;
    MlmSource data;
} Trainer;

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

// ---------------------------------------------------------------------------------------------------------
// Step

// The work of a step of `sequences` rows that contains `counts`.
static StepWork step_work(const Model* m, MlmCounts counts, int sequences) {
    const BertConfig* c = &m->config;
    StepWork work = {.consumed = sequences, .sequences = counts.sequences, .tokens = counts.tokens};
    work.flops = mlm_encoder_flops(counts, c->L, c->C, c->F) + mlm_heads_flops(counts, c->C, c->V, c->next);
    work.losses[0] = &m->a.loss[0];
    work.losses[1] = c->next ? &m->a.loss[1] : NULL;
    work.loss_names[0] = "mlm_loss";
    work.loss_names[1] = "nsp_loss";
    return work;
}

// One optimizer step. The GPU runs it asynchronously. run_end_step() reads its results and logs them.
static void train_step(Run* r, Model* m, MlmSource* data, int mean) {
    Context* ctx = &r->ctx;
    MlmCounts counts = mlm_source_step(data, run_step_sequence(r), m->B, r->micro_steps, &r->group);
    run_begin_step(r, step_work(m, counts, run_step_sequences(r)));
    for (int i = 0; i < r->micro_steps; i++) {
        Mode mode = i == 0 ? SET : ADD;
        MlmInput in = mlm_load(&data->loader, &data->batches[i], ctx);
        MlmScales scales = mlm_scales(mean, &data->batches[i], counts, r->micro_steps * r->group.size);
        run_begin_micro_batch(r, i);
        forward(m, &in, ctx);
        compute_loss(m, &in, scales, r->direction, mode, ctx);
        if (r->direction == BACKWARD) backward(m, &in, mode, ctx);
        run_end_micro_batch(r, i);
    }
    run_all_reduce(r);
    run_update(r);
    run_read_results(r);
}

// ---------------------------------------------------------------------------------------------------------
// Validation and samples

// Evaluate this rank's share of the held-out text, or of a set of clozes, and log the means over all ranks. A
// signal to any rank ends the evaluation without a result.
static void evaluate_text(Run* r, const MultipleChoice* set) {
    Trainer* t = (Trainer*)r;
    MlmEvaluation e = mlm_evaluation_begin(r, &t->data, set, t->model.B);
    while (mlm_evaluation_next(&e, r, &t->data, (int)stop_signal))
        evaluate_batch(&t->model, &e.in, (MlmScales){.masked = 1, .next = 1}, e.share.mode, &r->ctx);
    mlm_evaluation_end(&e, r, t->model.a.loss, t->model.a.correct, t->model.config.next);
}

static void validate(Run* r) { evaluate_text(r, NULL); }

static void validate_clozes(Run* r) {
    const MultipleChoiceSets* s = &((Trainer*)r)->mlm.choices;
    for (int i = multiple_choice_next_set(s, -1, r); i < s->count; i = multiple_choice_next_set(s, i, r))
        evaluate_text(r, &s->set[i]);
}

// Predict the masked tokens of a held-out sequence, show them, and save them in OUT/sample.txt.
static void sample(Run* r) {
    Trainer* t = (Trainer*)r;
    MlmBatch* batch = &t->data.batches[0];
    if (r->group.rank > 0) return;
    mlm_batch_build(batch, &t->data.val, 0, 1);
    MlmInput in = mlm_load(&t->data.loader, batch, &r->ctx);
    forward(&t->model, &in, &r->ctx);
    fill_mask_show(r, &t->data.words, batch, t->model.a.logits, t->model.config.V, t->model.Vp);
}

// ---------------------------------------------------------------------------------------------------------
// Settings and startup

static int settings_flags(Trainer* t) {
    static const char model[] = "Hugging Face directory, hub:NAME, .safetensors file, config.json "
                                "(random weights), bert-base|bert-large, or sizes L= C= NH= V= T= F= tied=.";
    int count = settings_language_rows(&t->run.settings, t->run.flags, model);
    return mlm_default_settings(t->run.flags, mlm_settings_rows(&t->mlm, t->run.flags, count));
}

// Plan the tensors and memory of a model for sequences of T tokens, and allocate its batches.
static void plan_model(Trainer* t, BertConfig c, MlmRecipe recipe, int T, int recompute) {
    Run* r = &t->run;
    Model* m = &t->model;
    for (BatchSearch search = run_search_batch(r); run_next_batch(r, &search, &m->buffers);)
        model_plan(m, c, search.B, T, search.B * recipe.max_predictions, search.B * recipe.pack, recompute);
    mlm_source_alloc(&t->data, recipe, m->B, T, r->micro_steps, &r->ctx);
}

// Check and open everything that the run needs. Nothing is written until all checks have passed.
static void trainer_open(Trainer* t, int argc, char** argv) {
    static const char usage[] = "./train_bert [flags]   (none: a small model on the built-in corpus)";
    Run* r = &t->run;
    run_parse(r, settings_flags(t), argc, argv, usage);
    run_join(r, "data/builtin/bert/train.bin");
    run_find_model(r, "--phase2", t->mlm.phase2);
    BertConfig config = bert_config_of_run(r, &t->mlm, &t->data.words);
    int T = run_sequence_length(r, config.T);
    plan_model(t, config, mlm_settings_recipe(&t->mlm, T), T, r->settings.recompute);
    mlm_run_open_data(r, &t->mlm, &t->data, config.V, T, bert_config_write_pretraining(&config));
    bert_init_model(r, &t->model.buffers, bert_weight_rules(&t->model.config), BERT_UNREPORTED);
}

static void trainer_close(Trainer* t) {
    mlm_source_close(&t->data);
    multiple_choice_sets_close(&t->mlm.choices);
    run_close(&t->run);
}

#ifndef OTHER_MAIN  // apps/use_bert.cu has its own
int main(int argc, char** argv) {
    static Trainer t;
    Run* r = &t.run;
    process_begin(on_signal, argv);
    trainer_open(&t, argc, argv);
    // What is due every N steps, and after the last one, in this order.
    const DueWork due[] = {
        {r->val_every, run_report_fp8},
        {r->val_every, validate, "val_loss"},
        {r->val_every, validate, "ema_val_loss", 1},
        {t.mlm.choices.every, validate_clozes, multiple_choice_last_key(&t.mlm.choices)},
        {r->has_val ? r->settings.sample_every : 0, sample},
        {r->settings.checkpoint_every, run_save},
    };
    uint64_t tokens = t.data.train.text.files.tokens;
    run_begin(r, due, COUNT_OF(due), tokens, "at most ", (double)t.model.T * run_step_sequences(r));
    while (run_next_step(r, (int)stop_signal)) {
        train_step(r, &t.model, &t.data, t.mlm.loss_mean);
        run_end_step(r);
    }
    run_end(r, "BERT training");
    trainer_close(&t);
    return DONE;
}
#endif
#endif
