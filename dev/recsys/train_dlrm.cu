/* Train DLRM, a click model: one source for the CPU (gcc) and the GPU (nvcc).
 *
 * A sample has numbers and, for each embedding table, an id. The bottom MLP turns the numbers into a vector as wide as the
 * tables' rows. All vectors are multiplied with each other, and the top MLP turns the products into one logit.
 *
 *   bottom [B, E] = MLP(numbers)                     ReLU after every layer
 *   z [B, width]  = [bottom | dot products of all pairs of bottom and the looked-up rows | 0]
 *   logit [B]     = MLP(z)                           ReLU after every layer but the last
 *
 * Updates are SGD without momentum. Gradients of tables are never stored: ops/embedding_rows.h.
 *
 * Read it from top to bottom: configuration, tables of tensors, forward pass, backward pass, a step.
 * Source: Naumov et al., arXiv 1906.00091; sizes and initial values as in NVIDIA's DeepLearningExamples. */
#include "dev/recsys/mlp.h"
#include "dev/recsys/ops/interaction.h"
#include "dev/recsys/ops/linear_bce.h"

enum { DLRM_TABLES = 32 };

typedef struct {
    int numbers;  // numerical features; columns of the input are padded to a multiple of 8
    int tables, rows[DLRM_TABLES];
    Mlp bottom, top;  // top without the last layer
} Config;

typedef struct {
    Linear bottom[MLP_LAYERS], top[MLP_LAYERS], last;
    floatX* tables[DLRM_TABLES];  // adjacent: tables[0] is also one table with all rows
} Params;

typedef struct {
    LinearGrads bottom[MLP_LAYERS], top[MLP_LAYERS], last;
    real* unused[DLRM_TABLES];
} Grads;

typedef struct {
    MlpActs bottom, top;
    floatX *z, *dz, *dvectors;
    real *logits, *losses, *loss;
} Acts;

// A batch on the device. Row numbers count from the first row of the first table.
typedef struct {
    const floatX* numbers;  // [B, padded numbers]
    const int* rows;        // [B, tables]
    const real* labels;     // [B]
    int B;
} Batch;

typedef struct {
    Config config;
    int B, E, all_rows, padded;  // padded: columns of the numbers
    int first_row[DLRM_TABLES + 1];
    ModelBuffers buffers;
    size_t elements;  // of the MLPs
    RowSegments segments;
    Params p;
    Grads g;
    Acts a;
} Model;

// ---------------------------------------------------------------------------------------------------------
// Tables

// The published configuration: 26 tables of 100000 + 100 x rows.
static Config config_published(void) {
    Config c = {13, 26, {0}, {3, {16, 512, 256, 128}, 1}, {4, {480, 1024, 1024, 512, 256}, 1}};
    for (int t = 0; t < c.tables; t++) c.rows[t] = 100000 + 100 * t;
    return c;
}

// Fill the tables of tensors for batches of at most B samples. Allocates only the tables.
static void model_plan(Model* m, Config config, int B) {
    char name[64];
    memset(m, 0, sizeof *m);
    m->config = config, m->B = B;
    Config* c = &m->config;
    TensorTable *table = &m->buffers.table, *acts = &m->buffers.acts_table, *stats = &m->buffers.stats_table;
    m->E = c->bottom.width[c->bottom.count];
    m->padded = c->bottom.width[0] = (int)round_up((size_t)c->numbers, 8);
    int width = c->top.width[0] = interaction_width(c->tables, m->E);
    c->bottom.scale = c->top.scale = 1;
    mlp_add_params(table, "bottom_mlp", offsetof(Params, bottom), &c->bottom);
    mlp_add_params(table, "top_mlp", offsetof(Params, top), &c->top);
    rows_add(table, offsetof(Params, last.w), 1, c->top.width[c->top.count], OWN, "last.weight");
    rows_add(table, offsetof(Params, last.b), 1, 0, OWN, "last.bias");
    int first_table = table->count;
    for (int t = 0; t < c->tables; t++) {
        snprintf(name, sizeof name, "tables.%d.weight", t);
        rows_add(table, offsetof(Params, tables) + (size_t)t * sizeof(floatX*), c->rows[t], m->E, t ? GROUPED : OWN,
                 name);
        m->first_row[t + 1] = m->first_row[t] + c->rows[t];
    }
    m->all_rows = m->first_row[c->tables];
    mlp_add_acts(acts, "bottom_mlp", offsetof(Acts, bottom), &c->bottom, B);
    mlp_add_acts(acts, "top_mlp", offsetof(Acts, top), &c->top, B);
    rows_add(acts, offsetof(Acts, z), B, width, OWN, "z");
    rows_add(acts, offsetof(Acts, dz), B, width, OWN, "dz");
    rows_add(acts, offsetof(Acts, dvectors), B * c->tables, m->E, OWN, "dvectors");
    rows_add(stats, offsetof(Acts, logits), B, 0, OWN, "logits");
    rows_add(stats, offsetof(Acts, losses), B, 0, OWN, "losses");
    rows_add(stats, offsetof(Acts, loss), 1, 0, OWN, "loss");
    model_buffers_finish_tables(&m->buffers);
    m->elements = mlp_elements(table, first_table);
}

static void model_alloc(Model* m, Context* ctx) {
    recommender_alloc(&m->buffers, m->elements, &m->p, &m->g, &m->a, ctx);
    m->segments = row_segments_alloc(m->B * m->config.tables, m->all_rows, ctx);
}

static void model_free(Model* m) {
    row_segments_free(&m->segments);
    recommender_free(&m->buffers, m->elements);
}

// Initial values: weights N(0, sqrt(2 / (in + out))), biases N(0, sqrt(1 / out)), tables U(-1, 1) / sqrt(rows). Columns
// of padding are zero and stay zero, because their inputs are.
static void random_weights(const Model* m, real* values, uint64_t seed) {
    const Config* c = &m->config;
    int padding = c->top.width[0] - m->E - INTERACTION_PAIRS(c->tables);
    for (int k = 0; k < m->buffers.table.count; k++) {
        const Tensor* t = &m->buffers.table.tensors[k];
        uint64_t key = rng_stream(seed, (uint64_t)k, 0, SITE_INIT);
        int rows = t->shape[0], columns = t->shape[1], used = columns;
        int is_table = strncmp(t->name, "tables.", 7) == 0, is_weight = t->ndim == 2;
        if (strcmp(t->name, "bottom_mlp.0.weight") == 0) used = c->numbers;
        if (strcmp(t->name, "top_mlp.0.weight") == 0) used = columns - padding;
        double scale = is_table ? 1 / sqrt(rows) : sqrt(is_weight ? 2.0 / (rows + used) : 1.0 / rows);
#pragma omp parallel for schedule(static)
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < columns; i++) {
                uint64_t at = (uint64_t)r * (uint64_t)columns + (uint64_t)i;
                double uniform = 2 * rng_uniform(philox((uint32_t)at, (uint32_t)(at >> 32), 0, 0, key).v[0]) - 1;
                values[t->offset + at] = i < used ? (real)(scale * (is_table ? uniform : rng_normal(key, at))) : 0;
            }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Forward and backward

static InteractionShape interaction_shape(const Model* m, int B) {
    InteractionShape s = {B, m->config.tables, m->E, m->config.top.width[0]};
    return s;
}

// Forward pass, and with BACKWARD also the gradient at the last layer. m->a.loss [1] is SET to the mean loss.
static void forward(Model* m, const Batch* in, Direction direction, Context* ctx) {
    const Config* c = &m->config;
    static const ReluDropout none[MLP_LAYERS] = {{0, 0, 0, 1}, {0, 0, 0, 1}, {0, 0, 0, 1}, {0, 0, 0, 1},
                                                 {0, 0, 0, 1}, {0, 0, 0, 1}, {0, 0, 0, 1}, {0, 0, 0, 1}};
    int B = in->B, last = c->top.count - 1;
    scope_at(ctx, FORWARD, -1);
    mlp_forward(&c->bottom, m->p.bottom, &m->a.bottom, in->numbers, none, B, ctx);
    interaction_forward(m->a.z, m->a.bottom.h[c->bottom.count - 1], m->p.tables[0], in->rows, interaction_shape(m, B),
                        ctx);
    mlp_forward(&c->top, m->p.top, &m->a.top, m->a.z, none, B, ctx);
    Losses losses = {m->a.losses, m->a.loss, 1.0 / B, SET};
    LinearBceInput input = {m->a.top.h[last], m->p.last, in->labels};
    LinearBceOutput output = {m->a.logits, m->a.top.dz[last], m->g.last, m->g.top[last].b};
    LinearBceShape shape = {B, c->top.width[last + 1], 0, 1};
    linear_bce(losses, output, input, shape, direction, ctx);
}

// After forward() with BACKWARD: gradients of the MLPs and of the looked-up rows.
static void backward(Model* m, const Batch* in, Context* ctx) {
    const Config* c = &m->config;
    int B = in->B, bottom = c->bottom.count - 1;
    BiasJob jobs[BIAS_JOBS];
    scope_at(ctx, BACKWARD, -1);
    mlp_backward(&c->top, m->p.top, m->g.top, &m->a.top, m->a.z, m->a.dz, B, ctx);
    InteractionBackward g = {m->a.bottom.dz[bottom], m->a.dvectors,  m->a.dz,
                             m->a.bottom.h[bottom],  m->p.tables[0], in->rows};
    interaction_backward(g, interaction_shape(m, B), ctx);
    mlp_backward(&c->bottom, m->p.bottom, m->g.bottom, &m->a.bottom, in->numbers, NULL, B, ctx);
    int count = mlp_bias_jobs(jobs, 0, &c->top, m->g.top, &m->a.top, c->top.count - 1);  // the last one's is done
    count = mlp_bias_jobs(jobs, count, &c->bottom, m->g.bottom, &m->a.bottom, c->bottom.count);
    matmul_backward_biases(jobs, count, B, ctx);
}

// SGD of everything. The norm in o->norm is that of the MLPs' gradients.
static void update(Model* m, Optimizer* o, double lr, Context* ctx) {
    OptimizerSettings h = {lr, 0, 0, 1, 0, 0, 0};
    ModelBuffers* b = &m->buffers;
    RowGradients dx = {m->a.dvectors, (size_t)m->E};
    EmbeddingTable table = recommender_table(b, o, (size_t)(m->p.tables[0] - b->params), m->E);
    recommender_norm(b, o, m->elements, h, ctx);
    sgd_update(b->params, recommender_weights(b, o), b->grads, o->step, lr, m->elements, ctx);
    embedding_sgd(table, dx, m->segments, lr, o->step, ctx);
}

// One step of training: forward, backward, update. m->a.loss gets the mean loss before the update.
static void train_batch(Model* m, Optimizer* o, const Batch* in, double lr, Context* ctx) {
    scope_at(ctx, FORWARD, -1);
    row_segments_find(&m->segments, in->rows, in->B * m->config.tables, NO_STARTS, ctx);
    forward(m, in, BACKWARD, ctx);
    backward(m, in, ctx);
    update(m, o, lr, ctx);
}
