/* Train NeuMF, a recommender of items to users: one source for the CPU (gcc) and the GPU (nvcc).
 *
 *   x [B, F]     = mf_user[u] * mf_item[i]                              elementwise
 *   h0 [B, 2 E]  = [mlp_user[u] | mlp_item[i]];  h = MLP(h0)            ReLU and dropout after every layer
 *   logit [B]    = w . [x | h] + b
 *
 * Updates are Adam. Each row of each table is updated in every step, looked up or not, as published. Gradients of
 * tables are never stored: ops/embedding_rows.h.
 *
 * Read it from top to bottom: configuration, tables of tensors, forward pass, backward pass, a step, settings.
 * main() is in recommender.h. Source: He et al., "Neural Collaborative Filtering", 2017; sizes, initial values:
 * NVIDIA's DeepLearningExamples. */
#include "dev/recsys/mlp.h"
#include "dev/recsys/ncf_data.h"
#include "dev/recsys/ops/gmf.h"
#include "dev/recsys/ops/linear_bce.h"
#include "llmc/run/run.h"
#if defined(__CUDACC__) && defined(PRECISION_BF16)
#define NCF_FUSED  // the GPU has a faster list of ops for the published widths
#include "dev/recsys/ops/ncf_fused.cuh"
#endif

typedef struct {
    int users, items, F, E;  // E: width of each of the MLP's two embeddings
    Mlp mlp;                 // without the last layer
    double dropout;
    uint64_t seed;
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
    real *logits, *losses, *loss, *parts;     // parts: of the MLP's weight gradients
    floatX *products[2], *sums[2], *dmlp[2];  // of the fused step; users, items: [rows, H0], [rows, H0], [rows, E]
    real *dmf[2], *dlogits, *partial, *row_partial, *partial_loss;
} Acts;

typedef struct {
    Config config;
    int B, H;  // H: width of the MLP's output
    ModelBuffers buffers;
    size_t elements;  // of the MLP
    RowSegments users, items;
    ParamSpan* span;  // the MLP as one span of AdamW, on the device
    int is_fused;     // 1: the fused step
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

// The dropout of all layers in this step.
static void dropouts(ReluDropout* dropout, const Model* m, uint64_t step, double p) {
    for (int l = 0; l < m->config.mlp.count; l++)
        dropout[l] = relu_dropout_make(p, rng_stream(m->config.seed, step, (uint32_t)l, SITE_DROPOUT_RELU), 0);
}

#ifdef NCF_FUSED
static int fused_supports(const Config* c) {
    return c->F == NCF_F && c->E == NCF_E && c->mlp.count == 3 && c->mlp.width[1] == NCF_H0 &&
           c->mlp.width[2] == NCF_H1 && c->mlp.width[3] == NCF_H2;
}

// What the fused step needs besides: dz0 is the first layer's dz.
static void fused_plan(Model* m, TensorTable* acts, TensorTable* stats) {
    const int rows[2] = {m->config.users, m->config.items};
    for (int i = 0; i < 2; i++) {
        size_t field = (size_t)i * sizeof(floatX*);
        rows_add(acts, offsetof(Acts, products) + field, rows[i], NCF_H0, OWN, i ? "item_products" : "user_products");
        rows_add(acts, offsetof(Acts, sums) + field, rows[i], NCF_H0, OWN, i ? "item_sums" : "user_sums");
        rows_add(acts, offsetof(Acts, dmlp) + field, rows[i], NCF_E, OWN, i ? "dmlp_item" : "dmlp_user");
        rows_add(stats, offsetof(Acts, dmf) + field, rows[i], NCF_F, OWN, i ? "dmf_item_rows" : "dmf_user_rows");
    }
    rows_add(stats, offsetof(Acts, dlogits), m->B, 0, OWN, "dlogits");
    rows_add(stats, offsetof(Acts, partial), NCF_THREADS, NCF_PARTIAL, OWN, "partial");  // blocks: one for each SM
    rows_add(stats, offsetof(Acts, row_partial), NCF_THREADS * NCF_ROW_BLOCKS, NCF_ROW_PARTIAL, OWN, "row_partial");
    rows_add(stats, offsetof(Acts, partial_loss), NCF_THREADS, 2, OWN, "partial_loss");  // doubles
}
#endif

// Fill the tables of tensors for batches of at most B samples. Allocates only the tables.
static void model_plan(Model* m, Config config, int B) {
    static const char* const names[NCF_TABLES] = {"mf_user.weight", "mf_item.weight", "mlp_user.weight",
                                                  "mlp_item.weight"};
    memset(m, 0, sizeof *m);
    m->config = config, m->B = B;
    Config* c = &m->config;
    const int rows[NCF_TABLES] = {c->users, c->items, c->users, c->items},
              widths[NCF_TABLES] = {c->F, c->F, c->E, c->E};
    TensorTable *table = &m->buffers.table, *acts = &m->buffers.acts_table, *stats = &m->buffers.stats_table;
    c->mlp.width[0] = 2 * c->E, c->mlp.scale = relu_dropout_make(c->dropout, 0, 0).scale;
    m->H = c->mlp.width[c->mlp.count];
    mlp_add_params(table, "mlp", offsetof(Params, mlp), &c->mlp);
    rows_add(table, offsetof(Params, last.w), 1, c->F + m->H, OWN, "last.weight");
    rows_add(table, offsetof(Params, last.b), 1, 0, OWN, "last.bias");
    int first_table = table->count;
    for (int t = 0; t < NCF_TABLES; t++)
        rows_add(table, offsetof(Params, tables) + (size_t)t * sizeof(floatX*), rows[t], widths[t], OWN, names[t]);
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
    rows_add(stats, offsetof(Acts, parts), (int)mlp_parts_size(&c->mlp, B) + 1, 0, OWN, "parts");
#ifdef NCF_FUSED
    if ((m->is_fused = fused_supports(c))) fused_plan(m, acts, stats);
#endif
    model_buffers_finish_tables(&m->buffers);
    m->elements = table->tensors[first_table].offset;
    // No layers. The pointers to them fall on fields that are bound after them.
    const TensorStructs structs[] = {{&m->p, 0, 0}, {&m->g, 0, 0}, {&m->a, 0, 0}};
    memcpy(m->buffers.structs, structs, sizeof structs);
}

// After the buffers are allocated: allocate what else the model needs.
static void model_alloc(Model* m, Context* ctx) {
    ParamSpan span = {.size = m->elements, .rate = 1};
#ifdef NCF_FUSED
    m->is_fused = m->is_fused && ncf_step_fits(ctx);
#endif
    m->users = row_segments_alloc(m->B, m->config.users, ctx);
    m->items = row_segments_alloc(m->B, m->config.items, ctx);
    m->span = (ParamSpan*)device_alloc(ctx, sizeof span, "optimizer");
    device_upload(ctx, m->span, &span, sizeof span);
    device_synchronize(ctx);
}

static void model_free(Model* m) {
    row_segments_free(&m->users), row_segments_free(&m->items);
    device_free(m->span, sizeof *m->span);
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
    floatX* const* t = m->p.tables;
    NcfLookups s = {t[MF_USER], t[MF_ITEM], t[MLP_USER], t[MLP_ITEM], in->users,
                    in->items,  in->B,      m->config.F, m->config.E, m->H};
    return s;
}

// Forward pass. BACKWARD: with dropout of this step, and the gradient at the last layer. m->a.loss [1] is SET to the
// mean loss.
static void forward(Model* m, const Batch* in, uint64_t step, Direction direction, Context* ctx) {
    const Config* c = &m->config;
    int B = in->B, last = c->mlp.count - 1;
    ReluDropout dropout[MLP_LAYERS];
    dropouts(dropout, m, step, direction == BACKWARD ? c->dropout : 0);
    scope_at(ctx, FORWARD, -1);
    gmf_gather(m->a.h0, lookups(m, in), ctx);
    mlp_forward(&c->mlp, m->p.mlp, &m->a.mlp, m->a.h0, dropout, B, ctx);
    gmf_join(m->a.x, m->a.mlp.h[last], lookups(m, in), ctx);
    Losses losses = {m->a.losses, m->a.loss, 1.0 / B, SET};
    LinearBceInput input = {m->a.x, m->p.last, in->labels};
    LinearBceOutput output = {m->a.logits, m->a.dx, m->g.last, m->g.mlp[last].b};
    LinearBceShape shape = {B, c->F + m->H, c->F, (real)c->mlp.scale};
    linear_bce(losses, output, input, shape, direction, ctx);
}

// After forward() with BACKWARD: gradients of the MLP and of the looked-up rows.
static void backward(Model* m, const Batch* in, Context* ctx) {
    const Config* c = &m->config;
    PartsSum parts = {.free = m->a.parts};
    MlpBackward d = {m->g.mlp, m->a.dh0, &parts};
    scope_at(ctx, BACKWARD, -1);
    gmf_split(m->a.dmf_user, m->a.dmf_item, m->a.mlp.dz[c->mlp.count - 1], m->a.dx, lookups(m, in), ctx);
    mlp_backward(d, &c->mlp, m->p.mlp, &m->a.mlp, m->a.h0, in->B, ctx);
    matmul_parts_sum(&parts, ctx);
}

// Adam of everything. The norm in o->norm is that of the MLP's gradients.
static void update(Model* m, Optimizer* o, OptimizerSettings h, Context* ctx) {
    ModelBuffers* b = &m->buffers;
    int F = m->config.F, E = m->config.E;
    const RowGradients dx[NCF_TABLES] = {{m->a.dmf_user, (size_t)F},
                                         {m->a.dmf_item, (size_t)F},
                                         {m->a.dh0, 2 * (size_t)E},
                                         {m->a.dh0 + E, 2 * (size_t)E}};
    AdamWState state = {b->params, o->master, o->m, o->v, b->grads, o->step, 0};
    recommender_norm(b, o, m->elements, h, ctx);
    adamw_update(state, m->elements, m->span, 1, h, ctx);
    row_segments_wait(&m->users, ctx), row_segments_wait(&m->items, ctx);
    for (int t = 0; t < NCF_TABLES; t++) {
        int is_user = t == MF_USER || t == MLP_USER, width = t < MLP_USER ? F : E;
        EmbeddingTable table = recommender_table(b, o, (size_t)(m->p.tables[t] - b->params), width);
        embedding_adam(table, dx[t], is_user ? m->users : m->items, h, o->step, ctx);
    }
}

#ifdef NCF_FUSED
// The same on the GPU for the published widths: ops/ncf_fused.cuh
static void train_fused(Model* m, Optimizer* o, const Batch* in, uint64_t step, OptimizerSettings h, Context* ctx) {
    const Config* c = &m->config;
    const Linear* p = m->p.mlp;
    const LinearGrads* g = m->g.mlp;
    ModelBuffers* b = &m->buffers;
    const int rows[2] = {c->users, c->items};
    const floatX* mlp[2] = {m->p.tables[MLP_USER], m->p.tables[MLP_ITEM]};
    NcfStep s = {m->a.products[0], m->a.products[1], m->p.tables[MF_USER], m->p.tables[MF_ITEM]};
    s.b0 = p[0].b, s.w1 = p[1].w, s.b1 = p[1].b, s.w2 = p[2].w, s.b2 = p[2].b, s.w3 = m->p.last.w, s.b3 = m->p.last.b;
    s.users = in->users, s.items = in->items, s.labels = in->labels, s.B = in->B, s.scale = 1.0f / in->B;
    s.dz0 = m->a.mlp.dz[0], s.dlogits = m->a.dlogits, s.partial = m->a.partial, s.row_partial = m->a.row_partial;
    s.partial_loss = (double*)m->a.partial_loss;
    dropouts(s.dropout, m, step, c->dropout);

    for (int i = 0; i < 2; i++) {
        NcfMatrix table = {mlp[i], NCF_E, CUBLAS_OP_N}, w0 = {p[0].w + i * NCF_E, NCF_H0, CUBLAS_OP_T};
        BatchSize size = {rows[i], NCF_H0, NCF_E, 1};
        ncf_matmul(m->a.products[i], NCF_H0, 0, table, w0, size, ctx);
    }
    ncf_step(s, ctx);
    scope_at(ctx, BACKWARD, -1);
    NcfRows user = {m->users, in->items, s.mf_user, s.mf_item, m->a.sums[0], m->a.dmf[0]};
    NcfRows item = {m->items, in->users, s.mf_item, s.mf_user, m->a.sums[1], m->a.dmf[1]};
    row_segments_wait(&m->users, ctx), row_segments_wait(&m->items, ctx);
    ncf_rows(s, user, item, ctx);
    for (int i = 0; i < 2; i++) {
        NcfMatrix sums = {m->a.sums[i], NCF_H0, CUBLAS_OP_N}, transposed = {m->a.sums[i], NCF_H0, CUBLAS_OP_T};
        NcfMatrix table = {mlp[i], NCF_E, CUBLAS_OP_N}, w0 = {p[0].w + i * NCF_E, NCF_H0, CUBLAS_OP_N};
        BatchSize of_rows = {rows[i], NCF_E, NCF_H0, 1}, of_weights = {NCF_H0, NCF_E, rows[i], 1};
        ncf_matmul(m->a.dmlp[i], NCF_E, 0, sums, w0, of_rows, ctx);
        ncf_matmul(g[0].w + i * NCF_E, NCF_H0, 1, transposed, table, of_weights, ctx);
    }
    NcfSums sums = {g[0].b, g[1].w, g[1].b, g[2].w, g[2].b, m->g.last.w, m->g.last.b, m->a.loss};
    ncf_reduce(sums, s, ctx);
    AdamWState state = {b->params, o->master, o->m, o->v, b->grads, o->step, 0};
    recommender_norm(b, o, m->elements, h, ctx);
    adamw_update(state, m->elements, m->span, 1, h, ctx);
    NcfAdamJobs jobs;
    memset(&jobs, 0, sizeof jobs);
    for (int t = 0; t < NCF_TABLES; t++) {
        int i = t % 2, is_mlp = t >= MLP_USER, E = is_mlp ? c->E : c->F;
        NcfAdamJob job = {recommender_table(b, o, (size_t)(m->p.tables[t] - b->params), E), is_mlp ? NULL : m->a.dmf[i],
                          is_mlp ? m->a.dmlp[i] : NULL, (size_t)rows[i] * (size_t)E};
        jobs.job[t] = job;
    }
    ncf_adam(jobs, h, o->step, ctx);
}
#endif

// One step of training: forward, backward, update. m->a.loss gets the loss before the update.
static void train_batch(Model* m, Optimizer* o, const Batch* in, uint64_t step, OptimizerSettings h, Context* ctx) {
    RowStarts starts = m->is_fused ? NO_STARTS : WITH_STARTS;
    scope_at(ctx, FORWARD, -1);
    row_segments_begin(&m->users, in->users, in->B, starts, ctx);
    row_segments_begin(&m->items, in->items, in->B, starts, ctx);
#ifdef NCF_FUSED
    if (m->is_fused) {
        train_fused(m, o, in, step, h, ctx);
        return;
    }
#endif
    forward(m, in, step, BACKWARD, ctx);
    backward(m, in, ctx);
    update(m, o, h, ctx);
}

#ifndef NO_MAIN  // tests include this file for the model only
// About what model_alloc() allocates.
static size_t model_segments_bytes(const Model* m) {
    return ((size_t)m->config.users + (size_t)m->config.items + 12 * (size_t)m->B) * sizeof(int);
}

// Floating-point operations of a step.
static double model_flops(const Model* m) { return mlp_flops(&m->config.mlp, m->B); }

typedef struct {
    Run run;  // settings, optimizer, log: llmc/run/state.h
    Model model;
    Ratings data;
    BatchLoader loader;
    int negatives, eval_negatives, eval_pool;
    uint64_t samples, epoch_steps;  // samples of an epoch
} Trainer;

#include "dev/recsys/recommender.h"

static void train_samples(Trainer* t, uint64_t epoch, uint64_t first) {
    Run* r = &t->run;
    Model* m = &t->model;
    EpochDraws draws = epoch_draws(t->negatives, m->config.seed, epoch);
    Batch batch = batch_draw(&t->loader, draws, first, m->B, &r->ctx);
    train_batch(m, &r->optimizer, &batch, m->buffers.dropout.step, run_optimizer_settings(r), &r->ctx);
}

// Rank each user's held-out item among its rivals.
static void validate(Run* r) {
    Trainer* t = (Trainer*)r;
    Model* m = &t->model;
    const Ratings* data = &t->data;
    int width = t->eval_negatives + 1, most = m->B / width;
    int* rivals = (int*)xmalloc((size_t)width * sizeof *rivals * (size_t)most);
    RankSums sums = {0, 0, 0};
    for (int first = 0; first < data->users && !stop_signal; first += most) {
        int count = min_int(data->users - first, most), B = count * width;
        for (int u = 0; u < count; u++)
            ratings_rivals(data, first + u, t->eval_negatives, (EvalPool)t->eval_pool, m->config.seed,
                           rivals + u * width);
        Batch batch = batch_rivals(&t->loader, first, rivals, width, B, &r->ctx);
        forward(m, &batch, 0, FORWARD, &r->ctx);
        HostView logits = host_view_open(m->a.logits, (size_t)B, VIEW_REAL);
        host_view_read(&r->ctx, &logits);
        for (int u = 0; u < count; u++) rank_add(&sums, logits.values + u * width, rivals + u * width, width - 1);
        host_view_close(&logits);
    }
    free(rivals);
    if (stop_signal) return;
    double hr = sums.hits / sums.users, ndcg = sums.gain / sums.users;
    const char* pool = t->eval_pool == POOL_ALL ? "all" : "unseen";
    if (!r->settings.evaluate) {
        Text line = {NULL, 0, 0};
        text_printf(&line, "{\"step\": %lld, \"hr_at_10\": %.6g, \"ndcg_at_10\": %.6g, ", (long long)r->step, hr, ndcg);
        text_printf(&line, "\"eval_negatives\": %d, \"eval_pool\": \"%s\"}", t->eval_negatives, pool);
        log_line(&r->log, &line);
        free(line.text);
        log_print_step(r->step, r->last);
    }
    printf("HR@10 %.4f, NDCG@10 %.4f with %d negatives, pool %s\n", hr, ndcg, t->eval_negatives, pool);
}

static int settings_flags(Trainer* t, Flag* table) {
    // clang-format off
    const Flag rows[] = {
        {NULL, "--negatives", FLAG_INT, &t->negatives, "4", 0, 1000, NULL, SCOPE_RUN, TOPIC_DATA,
         "Negatives per rating, items without a training rating of the user, drawn again each epoch."},
        {NULL, "--eval-negatives", FLAG_INT, &t->eval_negatives, "99", 1, 100000, NULL, SCOPE_FREE, TOPIC_VALIDATION,
         "Items that each held-out one is ranked with."},
        {NULL, "--eval-pool", FLAG_CHOICE, &t->eval_pool, "unseen", 0, 0, POOL_CHOICES, SCOPE_FREE, TOPIC_VALIDATION,
         "Where they are drawn from: items that the user never rated, or all, with duplicates masked."},
    };
    // clang-format on
    int count = settings_rows(&t->run.settings, table,
                              "published, or sizes: factors F, each of the MLP's two embeddings E, its layers H.");
    count = settings_evaluate_row(&t->run.settings, table, settings_add_rows(table, count, rows, COUNT_OF(rows)));
    settings_help(table, count, "--train-data", "Ratings: a file of dev/data/prepare_recsys.py.");
    settings_help(table, count, "--evaluate", "1: print HR@10 and NDCG@10 of -o with -y 1, and exit.");
    settings_default(table, count, "--model", "F=32,E=64,H=64-32-32");
    settings_default(table, count, "--batch", "1024");
    settings_default(table, count, "--epochs", "13");
    settings_default(table, count, "--lr", "1e-3");
    settings_default(table, count, "--beta2", "0.999");
    settings_default(table, count, "--val-every", "1000");
    return recommender_rows(table, count, NULL, 0);
}

static Config config_from_settings(const Trainer* t) {
    const Settings* s = &t->run.settings;
    const char* text = s->model;
    Config c = config_published();
    int end = 0, is_published = strcmp(text, "published") == 0;
    c.users = t->data.users, c.items = t->data.items;
    c.dropout = s->dropout < 0 && is_published ? c.dropout : fmax(s->dropout, 0);
    c.seed = (uint64_t)s->seed;
    if (is_published) return c;
    const char* rest =
        sscanf(text, "F=%d,E=%d,H=%n", &c.F, &c.E, &end) == 2 && end ? mlp_parse(&c.mlp, text + end, 4) : NULL;
    if (!rest || *rest || c.F < 4 || c.E < 4 || c.F % 4 || c.E % 4 || c.E > MLP_MAX_WIDTH ||
        c.F + c.mlp.width[c.mlp.count] > LINEAR_BCE_MAX_C)
        die(USAGE,
            "-e %s: is not like F=32,E=64,H=64-32-32, of 1 to %d widths, all multiples of 4 up to %d, F and the last "
            "one together up to %d",
            text, MLP_LAYERS, MLP_MAX_WIDTH, LINEAR_BCE_MAX_C);
    return c;
}

static void open_data(Trainer* t) {
    const Settings* s = &t->run.settings;
    if (!*s->train_data) die(USAGE, "no ratings: give a file of dev/data/prepare_recsys.py with -i");
    ratings_open(&t->data, s->train_data);
    for (int u = 0; u < t->data.users && t->eval_pool == POOL_UNSEEN; u++) {
        int unseen = t->data.items - (t->data.begin[u + 1] - t->data.begin[u]);
        if (unseen < t->eval_negatives)
            die(USAGE, "--eval-negatives %d: user %d of %s has only %d items that it never rated", t->eval_negatives, u,
                s->train_data, unseen);
    }
    t->samples = (uint64_t)t->data.pairs * (uint64_t)(1 + t->negatives);
    if (s->B <= t->eval_negatives) die(USAGE, "-b %d: must be above --eval-negatives %d", s->B, t->eval_negatives);
}

static void close_data(Trainer* t) { free(t->data.pair); }

int main(int argc, char** argv) {
    return recommender_main(argc, argv, "neumf", "train_ncf -i RATINGS.bin [flags]", "hr_at_10");
}
#endif
