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
 * Read it from top to bottom: configuration, tables of tensors, forward pass, backward pass, a step, settings.
 * main() is in recommender.h. Source: Naumov et al., arXiv 1906.00091; sizes and initial values as in NVIDIA's
 * DeepLearningExamples. */
#include "dev/recsys/dlrm_data.h"
#include "dev/recsys/mlp.h"
#include "dev/recsys/ops/interaction.h"
#include "dev/recsys/ops/linear_bce.h"
#include "llmc/run/run.h"

typedef struct {
    int numbers;  // numerical features; columns of the input are padded to a multiple of 8
    int tables, rows[CLICK_TABLES];
    Mlp bottom, top;  // top without the last layer
} Config;

typedef struct {
    Linear bottom[MLP_LAYERS], top[MLP_LAYERS], last;
    floatX* tables[CLICK_TABLES];  // adjacent: the first is also one table with all rows
} Params;

typedef struct {
    LinearGrads bottom[MLP_LAYERS], top[MLP_LAYERS], last;
    real* unused[CLICK_TABLES];
} Grads;

typedef struct {
    MlpActs bottom, top;
    floatX *z, *dz, *dvectors;
    real *logits, *losses, *loss, *parts;  // parts: of the MLPs' weight gradients
} Acts;

typedef struct {
    Config config;
    int B, E, all_rows, padded;   // all_rows: of all tables; padded: columns of the numbers
    int first_row[CLICK_TABLES];  // of each table among all rows
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
        m->first_row[t] = m->all_rows;
        m->all_rows += c->rows[t];
    }
    mlp_add_acts(acts, "bottom_mlp", offsetof(Acts, bottom), &c->bottom, B);
    mlp_add_acts(acts, "top_mlp", offsetof(Acts, top), &c->top, B);
    rows_add(acts, offsetof(Acts, z), B, width, OWN, "z");
    rows_add(acts, offsetof(Acts, dz), B, width, OWN, "dz");
    rows_add(acts, offsetof(Acts, dvectors), B * c->tables, m->E, OWN, "dvectors");
    rows_add(stats, offsetof(Acts, logits), B, 0, OWN, "logits");
    rows_add(stats, offsetof(Acts, losses), B, 0, OWN, "losses");
    rows_add(stats, offsetof(Acts, loss), 1, 0, OWN, "loss");
    rows_add(stats, offsetof(Acts, parts), (int)(mlp_parts_size(&c->top, B) + mlp_parts_size(&c->bottom, B)) + 1, 0,
             OWN, "parts");
    model_buffers_finish_tables(&m->buffers);
    m->elements = table->tensors[first_table].offset;
    // No layers. The pointers to them fall on fields that are bound after them.
    const TensorStructs structs[] = {{&m->p, 0, 0}, {&m->g, 0, 0}, {&m->a, 0, 0}};
    memcpy(m->buffers.structs, structs, sizeof structs);
}

// After the buffers are allocated: allocate what else the model needs.
static void model_alloc(Model* m, Context* ctx) {
    m->segments = row_segments_alloc(m->B * m->config.tables, m->all_rows, ctx);
}

static void model_free(Model* m) { row_segments_free(&m->segments); }

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
    int B = in->B, last = c->top.count - 1;
    scope_at(ctx, FORWARD, -1);
    mlp_forward(&c->bottom, m->p.bottom, &m->a.bottom, in->numbers, NULL, B, ctx);
    interaction_forward(m->a.z, m->a.bottom.h[c->bottom.count - 1], m->p.tables[0], in->rows, interaction_shape(m, B),
                        ctx);
    mlp_forward(&c->top, m->p.top, &m->a.top, m->a.z, NULL, B, ctx);
    Losses losses = {m->a.losses, m->a.loss, 1.0 / B, SET};
    LinearBceInput input = {m->a.top.h[last], m->p.last, in->labels};
    LinearBceOutput output = {m->a.logits, m->a.top.dz[last], m->g.last, m->g.top[last].b};
    LinearBceShape shape = {B, c->top.width[last + 1], 0, 1};
    linear_bce(losses, output, input, shape, direction, ctx);
}

// After forward() with BACKWARD: gradients of the MLPs and looked-up rows. The lookups are sorted beside the interaction.
static void backward(Model* m, const Batch* in, Context* ctx) {
    const Config* c = &m->config;
    int B = in->B, bottom = c->bottom.count - 1;
    scope_at(ctx, BACKWARD, -1);
    PartsSum parts = {.free = m->a.parts};
    MlpBackward of_top = {m->g.top, m->a.dz, &parts}, of_bottom = {m->g.bottom, NULL, &parts};
    mlp_backward(of_top, &c->top, m->p.top, &m->a.top, m->a.z, B, ctx);
    row_segments_begin(&m->segments, in->rows, B * c->tables, NO_STARTS, ctx);
    InteractionBackward g = {m->a.bottom.dz[bottom], m->a.dvectors,  m->a.dz,
                             m->a.bottom.h[bottom],  m->p.tables[0], in->rows};
    interaction_backward(g, interaction_shape(m, B), ctx);
    mlp_backward(of_bottom, &c->bottom, m->p.bottom, &m->a.bottom, in->numbers, B, ctx);
    matmul_relu_backward_bias(m->g.bottom[bottom].b, m->a.bottom.dz[bottom], B, m->E, ctx);
    matmul_parts_sum(&parts, ctx);
}

// SGD of everything. The norm in o->norm is that of the MLPs' gradients.
static void update(Model* m, Optimizer* o, double lr, Context* ctx) {
    OptimizerSettings h = {.lr = lr, .eps = 1};
    ModelBuffers* b = &m->buffers;
    RowGradients dx = {m->a.dvectors, (size_t)m->E};
    EmbeddingTable table = recommender_table(b, o, (size_t)(m->p.tables[0] - b->params), m->E);
    recommender_norm(b, o, m->elements, h, ctx);
    sgd_update(b->params, recommender_weights(b, o), b->grads, o->step, lr, m->elements, ctx);
    row_segments_wait(&m->segments, ctx);
    embedding_sgd(table, dx, m->segments, lr, o->step, ctx);
}

// One step of training: forward, backward, update. m->a.loss gets the mean loss before it.
static void train_batch(Model* m, Optimizer* o, const Batch* in, double lr, Context* ctx) {
    forward(m, in, BACKWARD, ctx);
    backward(m, in, ctx);
    update(m, o, lr, ctx);
}

#ifndef NO_MAIN  // tests include this file for the model only
// About what model_alloc() allocates.
static size_t model_segments_bytes(const Model* m) {
    return ((size_t)m->all_rows + 6 * (size_t)m->B * (size_t)m->config.tables) * sizeof(int);
}

// Floating-point operations of a step.
static double model_flops(const Model* m) {
    double interaction = INTERACTION_FORWARD_FLOPS(interaction_shape(m, m->B));
    return mlp_flops(&m->config.bottom, m->B) + mlp_flops(&m->config.top, m->B) + 3 * interaction;
}

typedef struct {
    Run run;  // settings, optimizer, log: llmc/run/state.h
    Model model;
    Clicks data;
    BatchLoader loader;
    int tables, rows;
    int64_t generated, held_out;
    uint64_t samples, epoch_steps;  // samples of an epoch
} Trainer;

#include "dev/recsys/recommender.h"

static void train_samples(Trainer* t, uint64_t epoch, uint64_t first) {
    Run* r = &t->run;
    Model* m = &t->model;
    uint64_t order = rng_stream((uint64_t)r->settings.seed, epoch, 0, SITE_SHUFFLE);
    Batch batch = batch_load(&t->loader, &t->data, first, m->B, order, m->first_row, NULL, &r->ctx);
    train_batch(m, &r->optimizer, &batch, r->lr, &r->ctx);
}

// The loss and the AUC of the held-out samples.
static void validate(Run* r) {
    Trainer* t = (Trainer*)r;
    Model* m = &t->model;
    const Clicks* data = &t->data;
    double loss = 0, *logits = (double*)xmalloc((size_t)m->B * sizeof *logits);
    Scored *scores = (Scored*)xmalloc(data->held_out * sizeof *scores),
           *truth = (Scored*)xmalloc(data->held_out * sizeof *truth);
    for (uint64_t first = 0; first < data->held_out && !stop_signal; first += (uint64_t)m->B) {
        int B = (int)min_size((size_t)m->B, (size_t)(data->held_out - first));
        Batch batch = batch_load(&t->loader, data, data->train + first, B, 0, m->first_row, logits, &r->ctx);
        forward(m, &batch, FORWARD, &r->ctx);
        HostView view = host_view_open(m->a.logits, (size_t)B, VIEW_REAL);
        host_view_read(&r->ctx, &view);
        for (int b = 0; b < B; b++) {
            int label = t->loader.host.labels[b] == 1;
            Scored score = {(double)view.values[b], label}, best = {logits[b], label};
            scores[first + (uint64_t)b] = score, truth[first + (uint64_t)b] = best;
            loss += bce_loss(score.score, label);
        }
        host_view_close(&view);
    }
    if (!stop_signal) {
        double auc = area_under_curve(scores, data->held_out), best = area_under_curve(truth, data->held_out);
        Text extra = {NULL, 0, 0};
        log_put(&extra, "auc", auc, 8);
        if (!data->records) log_put(&extra, "true_auc", best, 8);
        json_put_integer(&extra, "held_out", (int64_t)data->held_out);
        if (!r->settings.evaluate) log_validation(&r->log, r->step, r->last, loss / (double)data->held_out, extra.text);
        printf("AUC %.5f of %llu held-out samples", auc, (unsigned long long)data->held_out);
        if (data->records) printf("\n");
        else printf("; the true logit's is %.5f\n", best);
        free(extra.text);
    }
    free(logits), free(scores), free(truth);
}

static int settings_flags(Trainer* t, Flag* table) {
    static const char* const adam[] = {"--dropout", "--beta1", "--beta2", "--eps"};
    // clang-format off
    const Flag rows[] = {
        {NULL, "--tables", FLAG_INT, &t->tables, "8", 2, CLICK_TABLES, NULL, SCOPE_RUN, TOPIC_DATA,
         "Generated data: embedding tables."},
        {NULL, "--rows", FLAG_INT, &t->rows, "200", 1, INT_MAX - 1, NULL, SCOPE_RUN, TOPIC_DATA,
         "Generated data: rows of each table."},
        {NULL, "--samples", FLAG_SIZE, &t->generated, "8000000", 1, 1e15, NULL, SCOPE_RUN, TOPIC_DATA,
         "Generated data: training samples."},
        {NULL, "--held-out", FLAG_SIZE, &t->held_out, "200000", 1, 1e9, NULL, SCOPE_RUN, TOPIC_DATA,
         "Generated data: held-out samples, for the AUC."},
    };
    // clang-format on
    int count =
        settings_rows(&t->run.settings, table,
                      "published, or the MLPs' layers. The bottom MLP's last width is that of the tables' rows.");
    count = settings_evaluate_row(&t->run.settings, table, settings_add_rows(table, count, rows, COUNT_OF(rows)));
    settings_help(table, count, "--train-data", "Clicks: a file of dev/data/prepare_recsys.py. Empty: generated.");
    settings_help(table, count, "--evaluate", "1: print the AUC of -o with -y 1, and exit.");
    settings_default(table, count, "--model", "bottom=64-16,top=64-32");
    settings_default(table, count, "--batch", "128");
    settings_default(table, count, "--lr", "2");
    settings_default(table, count, "--schedule", "linear");
    settings_default(table, count, "--warmup", "200");
    settings_default(table, count, "--final-lr", "0");
    settings_default(table, count, "--val-every", "10000");
    return recommender_rows(table, count, adam, COUNT_OF(adam));
}

static Config config_from_settings(const Trainer* t) {
    const char* text = t->run.settings.model;
    Config c = config_published();
    if (strcmp(text, "published") != 0) {
        const char* at = strncmp(text, "bottom=", 7) == 0 ? mlp_parse(&c.bottom, text + 7, 8) : NULL;
        at = at && strncmp(at, ",top=", 5) == 0 ? mlp_parse(&c.top, at + 5, 8) : NULL;
        if (!at || *at || c.top.width[c.top.count] > LINEAR_BCE_MAX_C)
            die(USAGE,
                "-e %s: is not like bottom=64-16,top=64-32, of 1 to %d widths, multiples of 8 up to %d, the "
                "last one up to %d",
                text, MLP_LAYERS, MLP_MAX_WIDTH, LINEAR_BCE_MAX_C);
    }
    int64_t all = 0;
    c.tables = t->data.tables, c.numbers = t->data.numbers;
    for (int k = 0; k < c.tables; k++) all += c.rows[k] = t->data.rows[k];
    if (all > INT_MAX - 1) die(USAGE, "all tables have %lld rows; %d are known", (long long)all, INT_MAX - 1);
    return c;
}

static void open_data(Trainer* t) {
    static const char* const generated[] = {"--tables", "--rows", "--samples", "--held-out"};
    Run* r = &t->run;
    const Settings* s = &r->settings;
    for (size_t i = 0; i < COUNT_OF(generated) && *s->train_data; i++)
        if (flag_is_given(r->flags, r->flag_count, generated[i]))
            die(USAGE, "%s: is of generated data; leave it or -i out", generated[i]);
    if (*s->train_data) clicks_open(&t->data, s->train_data);
    else clicks_generate(&t->data, t->tables, t->rows, t->generated, t->held_out, (uint64_t)s->seed);
    t->samples = t->data.train;
}

static void close_data(Trainer* t) {
    if (t->data.file) munmap(t->data.file, t->data.bytes);
}

int main(int argc, char** argv) {
    return recommender_main(argc, argv, "dlrm", "train_dlrm [-i CLICKS.bin] [flags]", "val_loss");
}
#endif
