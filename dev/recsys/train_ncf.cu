/* Train NeuMF, a recommender of items to users: one source for the CPU (gcc) and the GPU (nvcc).
 *
 *   x [B, F]     = mf_user[u] * mf_item[i]                              elementwise
 *   h0 [B, 2 E]  = [mlp_user[u] | mlp_item[i]];  h = MLP(h0)            ReLU and dropout after every layer
 *   logit [B]    = w . [x | h] + b
 *
 * Updates are Adam. Each row of each table is updated in every step, looked up or not, as published; LAZY updates only the
 * rows of the step, which is another optimizer. Gradients of tables are never stored: ops/embedding_rows.h.
 *
 * Read it from top to bottom: configuration, tables of tensors, forward pass, backward pass, a step.
 * Source: He et al., "Neural Collaborative Filtering", 2017; sizes and initial values as in NVIDIA's
 * DeepLearningExamples. */
#include "dev/recsys/mlp.h"
#include "dev/recsys/ops/gmf.h"
#include "dev/recsys/ops/linear_bce.h"
#ifdef __CUDACC__
#include "dev/recsys/ops/ncf_fused.cuh"
#endif
#if defined(__CUDACC__) && defined(PRECISION_BF16)
#define NCF_FUSED  // the GPU has a faster list of ops for the published widths
#endif

typedef struct {
    int users, items, F, E;  // E: width of each of the MLP's two embeddings
    Mlp mlp;                 // without the last layer
    double dropout;
} Config;

enum { MF_USER, MF_ITEM, MLP_USER, MLP_ITEM, NCF_TABLES };

typedef struct {
    Linear mlp[MLP_LAYERS], last;
    floatX* tables[NCF_TABLES];
} Params;

typedef struct {
    LinearGrads mlp[MLP_LAYERS], last;
    real* unused[NCF_TABLES];
} Grads;

typedef struct {
    MlpActs mlp;
    floatX *h0, *dh0, *x, *dx, *dmf_user, *dmf_item;
    real *logits, *losses, *loss;
    // Of the fused step only.
    floatX *products[2], *sums[2], *dmlp[2];  // users, items: [rows, H0], [rows, H0], [rows, E]
    real *dmf[2], *dlogits, *partial, *row_partial, *partial_loss;
} Acts;

// A batch on the device. `first`: number of its first sample in the whole step.
typedef struct {
    const int *users, *items;  // [B]
    const real* labels;        // [B]
    int B;
    uint64_t first;
} Batch;

typedef struct {
    Config config;
    int B, H;  // H: width of the MLP's output
    ModelBuffers buffers;
    size_t elements;  // of the MLP
    RowSegments users, items;
    ParamSpan* span;  // the MLP as one span of AdamW, on the device
    AdamRows adam_rows;
    int is_fused;  // 1: the fused step, if fused_supports() the widths. Off: its gradients are not close enough yet
    uint64_t seed;
    Params p;
    Grads g;
    Acts a;
} Model;

// ---------------------------------------------------------------------------------------------------------
// Tables

// The published configuration: MovieLens 20M.
static Config config_published(void) {
    Config c = {138493, 26744, 64, 128, {3, {256, 256, 128, 64}, 1}, 0.5};
    return c;
}

// The dropout of all layers in this step; p = 0 for evaluations.
static void dropouts(ReluDropout* dropout, const Model* m, uint64_t step, uint64_t first, double p) {
    for (int l = 0; l < m->config.mlp.count; l++)
        dropout[l] = relu_dropout_make(p, rng_stream(m->seed, step, (uint32_t)l, SITE_DROPOUT_RELU), first);
}

#ifdef NCF_FUSED
#include "dev/recsys/ncf_fused_step.cuh"
#endif

// Fill the tables of tensors for batches of at most B samples. Allocates only the tables.
static void model_plan(Model* m, Config config, int B) {
    memset(m, 0, sizeof *m);
    m->config = config, m->B = B;
    Config* c = &m->config;
    TensorTable *table = &m->buffers.table, *acts = &m->buffers.acts_table, *stats = &m->buffers.stats_table;
    c->mlp.width[0] = 2 * c->E;
    c->mlp.scale = relu_dropout_make(c->dropout, 0, 0).scale;
    m->H = c->mlp.width[c->mlp.count];
    mlp_add_params(table, "mlp", offsetof(Params, mlp), &c->mlp);
    rows_add(table, offsetof(Params, last.w), 1, c->F + m->H, OWN, "last.weight");
    rows_add(table, offsetof(Params, last.b), 1, 0, OWN, "last.bias");
    int first_table = table->count;
    rows_add(table, offsetof(Params, tables[MF_USER]), c->users, c->F, OWN, "mf_user.weight");
    rows_add(table, offsetof(Params, tables[MF_ITEM]), c->items, c->F, OWN, "mf_item.weight");
    rows_add(table, offsetof(Params, tables[MLP_USER]), c->users, c->E, OWN, "mlp_user.weight");
    rows_add(table, offsetof(Params, tables[MLP_ITEM]), c->items, c->E, OWN, "mlp_item.weight");
    mlp_add_acts(acts, "mlp", offsetof(Acts, mlp), &c->mlp, B);
    rows_add(acts, offsetof(Acts, h0), B, 2 * c->E, OWN, "h0");
    rows_add(acts, offsetof(Acts, dh0), B, 2 * c->E, OWN, "dh0");
    rows_add(acts, offsetof(Acts, x), B, c->F + m->H, OWN, "x");
    rows_add(acts, offsetof(Acts, dx), B, c->F + m->H, OWN, "dx");
    rows_add(acts, offsetof(Acts, dmf_user), B, c->F, OWN, "dmf_user");
    rows_add(acts, offsetof(Acts, dmf_item), B, c->F, OWN, "dmf_item");
    rows_add(stats, offsetof(Acts, logits), B, 0, OWN, "logits");
    rows_add(stats, offsetof(Acts, losses), B, 0, OWN, "losses");
    rows_add(stats, offsetof(Acts, loss), 1, 0, OWN, "loss");
#ifdef NCF_FUSED
    if (fused_supports(c)) fused_plan(m, acts, stats);
#endif
    model_buffers_finish_tables(&m->buffers);
    m->elements = mlp_elements(table, first_table);
}

static void model_alloc(Model* m, Context* ctx) {
    ParamSpan span;
    memset(&span, 0, sizeof span);
    span.size = m->elements;
    recommender_alloc(&m->buffers, m->elements, &m->p, &m->g, &m->a, ctx);
    m->users = row_segments_alloc(m->B, m->config.users, ctx);
    m->items = row_segments_alloc(m->B, m->config.items, ctx);
    m->span = (ParamSpan*)device_alloc(ctx, sizeof span, "optimizer");
    device_upload(ctx, m->span, &span, sizeof span);
    device_synchronize(ctx);
}

static void model_free(Model* m) {
    row_segments_free(&m->users), row_segments_free(&m->items);
    device_free(m->span, sizeof *m->span);
    recommender_free(&m->buffers, m->elements);
}

// Initial values: tables N(0, 0.01), weights of the MLP U with the limit sqrt(6 / (in + out)), the last layer's
// sqrt(3 / in), biases U with 1 / sqrt(in).
static void random_weights(const Model* m, real* values, uint64_t seed) {
    for (int k = 0; k < m->buffers.table.count; k++) {
        const Tensor* t = &m->buffers.table.tensors[k];
        uint64_t key = rng_stream(seed, (uint64_t)k, 0, SITE_INIT), n = (uint64_t)t->shape[0] * (uint64_t)t->shape[1];
        int is_table = t->offset >= m->elements, is_last = strncmp(t->name, "last.", 5) == 0;
        const Tensor* weight = t->ndim == 2 ? t : t - 1;  // a bias follows its weight
        double in = weight->shape[1], out = weight->shape[0];
        double limit = weight != t ? 1 / sqrt(in) : is_last ? sqrt(3 / in) : sqrt(6 / (in + out));
#pragma omp parallel for schedule(static)
        for (uint64_t i = 0; i < n; i++) {
            double uniform = 2 * rng_uniform(philox((uint32_t)i, (uint32_t)(i >> 32), 0, 0, key).v[0]) - 1;
            values[t->offset + i] = (real)(is_table ? 0.01 * rng_normal(key, i) : limit * uniform);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Forward and backward

static NcfLookups lookups(const Model* m, const Batch* in) {
    NcfLookups s = {in->users, in->items, in->B, m->config.F, m->config.E, m->H};
    return s;
}

static NcfTables tables(const Model* m) {
    NcfTables t = {m->p.tables[MF_USER], m->p.tables[MF_ITEM], m->p.tables[MLP_USER], m->p.tables[MLP_ITEM]};
    return t;
}

// Forward pass. BACKWARD: with dropout of this step, and the gradient at the last layer. m->a.loss [1] is SET to the sum
// of the losses times `scale`.
static void forward(Model* m, const Batch* in, uint64_t step, double scale, Direction direction, Context* ctx) {
    const Config* c = &m->config;
    int B = in->B, last = c->mlp.count - 1;
    ReluDropout dropout[MLP_LAYERS];
    dropouts(dropout, m, step, in->first, direction == BACKWARD ? c->dropout : 0);
    scope_at(ctx, FORWARD, -1);
    gmf_gather(m->a.h0, tables(m), lookups(m, in), ctx);
    mlp_forward(&c->mlp, m->p.mlp, &m->a.mlp, m->a.h0, dropout, B, ctx);
    gmf_join(m->a.x, m->a.mlp.h[last], tables(m), lookups(m, in), ctx);
    Losses losses = {m->a.losses, m->a.loss, scale, SET};
    LinearBceInput input = {m->a.x, m->p.last, in->labels};
    LinearBceOutput output = {m->a.logits, m->a.dx, m->g.last, m->g.mlp[last].b};
    LinearBceShape shape = {B, c->F + m->H, c->F, (real)c->mlp.scale};
    linear_bce(losses, output, input, shape, direction, ctx);
}

// After forward() with BACKWARD: gradients of the MLP and of the looked-up rows.
static void backward(Model* m, const Batch* in, Context* ctx) {
    const Config* c = &m->config;
    int last = c->mlp.count - 1;
    BiasJob jobs[BIAS_JOBS];
    scope_at(ctx, BACKWARD, -1);
    gmf_split(m->a.dmf_user, m->a.dmf_item, m->a.mlp.dz[last], m->a.dx, tables(m), lookups(m, in), ctx);
    mlp_backward(&c->mlp, m->p.mlp, m->g.mlp, &m->a.mlp, m->a.h0, m->a.dh0, in->B, ctx);
    int count = mlp_bias_jobs(jobs, 0, &c->mlp, m->g.mlp, &m->a.mlp, last);  // the last one's is done
    if (count) matmul_backward_biases(jobs, count, in->B, ctx);
}

// Adam of everything. The norm in o->norm is that of the MLP's gradients.
static void update(Model* m, Optimizer* o, OptimizerSettings h, Context* ctx) {
    const Config* c = &m->config;
    ModelBuffers* b = &m->buffers;
    AdamWState state = {b->params, o->master, o->m, o->v, b->grads, o->step, 0};
    const RowGradients dx[NCF_TABLES] = {{m->a.dmf_user, (size_t)c->F},
                                         {m->a.dmf_item, (size_t)c->F},
                                         {m->a.dh0, 2 * (size_t)c->E},
                                         {m->a.dh0 + c->E, 2 * (size_t)c->E}};
    recommender_norm(b, o, m->elements, h, ctx);
    adamw_update(state, m->elements, m->span, 1, h, ctx);
    for (int t = 0; t < NCF_TABLES; t++) {
        int is_user = t == MF_USER || t == MLP_USER, E = t < MLP_USER ? c->F : c->E;
        EmbeddingTable table = recommender_table(b, o, (size_t)(m->p.tables[t] - b->params), E);
        embedding_adam(table, dx[t], is_user ? m->users : m->items, h, m->adam_rows, o->step, ctx);
    }
}

// One step of training: forward, backward, update. m->a.loss gets the loss before the update.
static void train_batch(Model* m, Optimizer* o, const Batch* in, uint64_t step, OptimizerSettings h, Context* ctx) {
    scope_at(ctx, FORWARD, -1);
    row_segments_find(&m->users, in->users, in->B, WITH_STARTS, ctx);
    row_segments_find(&m->items, in->items, in->B, WITH_STARTS, ctx);
#ifdef NCF_FUSED
    if (m->is_fused && m->adam_rows == DENSE) {
        train_fused(m, o, in, step, h, ctx);
        return;
    }
#endif
    forward(m, in, step, 1.0 / in->B, BACKWARD, ctx);
    backward(m, in, ctx);
    update(m, o, h, ctx);
}
