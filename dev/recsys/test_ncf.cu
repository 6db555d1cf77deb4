/* Tests of NeuMF: golden numbers, finite differences (double build), equalities. With a GPU also its speed:
 *
 *     test_ncf                  the tests
 *     test_ncf losses           losses of 20 steps of a middle-sized model, to compare builds
 *     test_ncf speed            milliseconds and kernels of a step of the published size */
#define NO_MAIN
#include "dev/recsys/train_ncf.cu"

#include "dev/recsys/golden.h"
#include "dev/recsys/test_recommender.h"

typedef struct {
    Context ctx;
    Model m;
    Optimizer o;
    Batch batch;
} Bench;

static const OptimizerSettings PUBLISHED_ADAM = {.lr = 0.0045, .beta1 = 0.25, .beta2 = 0.5, .eps = 1e-8};

static Bench* bench_open(Config config, int B) {
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    context_init(&b->ctx);
    model_plan(&b->m, config, B);
    model_buffers_alloc(&b->m.buffers, &b->ctx);
    model_alloc(&b->m, &b->ctx);
    optimizer_init_shard(&b->o, &b->m.buffers.table, (UpdateSettings){.kind = ADAMW, .master = WITH_MASTER},
                         tensors_updated(&b->m.buffers.table), &b->ctx);
    return b;
}

static void bench_close(Bench* b) {
    optimizer_free(&b->o);
    model_free(&b->m);
    model_buffers_free(&b->m.buffers);
    matmul_plans_free(&b->ctx);
    context_free(&b->ctx);
    free(b);
}

static void bench_write(Bench* b, const real* values) { weights_write(&b->m.buffers, &b->o, values, &b->ctx); }

static double bench_loss(Bench* b) {
    real loss;
    device_download(&b->ctx, &loss, b->m.a.loss, sizeof loss);
    return (double)loss;
}

static void bench_batch(Bench* b, const int* users, const int* items, const real* labels, int B) {
    size_t n = (size_t)B * sizeof(int);
    Batch batch = {(int*)on_device(&b->ctx, users, n), (int*)on_device(&b->ctx, items, n),
                   (real*)on_device(&b->ctx, labels, (size_t)B * sizeof(real)), B, 0};
    b->batch = batch;
}

static void test_published_size(Tests* t) {
    Model m;
    model_plan(&m, config_published(), 1);
    expect(t, m.buffers.table.parameters == 31725504 + 107073, "published size", "%zu parameters",
           m.buffers.table.parameters);
    model_buffers_free_tables(&m.buffers);
}

// ---------------------------------------------------------------------------------------------------------
// The golden case

static Bench* golden_open(void) {
    enum { B = 10 };
    Config c = {9, 7, 4, 4, {2, {0, 8, 4}, 1}, 0};
    Bench* b = bench_open(c, B);
    const TensorTable* table = &b->m.buffers.table;
    real* w = (real*)xcalloc(table->elements, sizeof *w);
    static const char* const names[] = {"mf_user.weight", "mf_item.weight", "mlp_user.weight", "mlp_item.weight",
                                        "mlp.0.weight",   "mlp.0.bias",     "mlp.1.weight",    "mlp.1.bias",
                                        "last.weight",    "last.bias"};
    for (int i = 0; i < (int)COUNT_OF(names); i++) {
        const Tensor* x = tensor_named(table, names[i]);
        hash_fill(w, x, 40 + i, x->shape[1]);
    }
    bench_write(b, w);
    int users[B], items[B];
    real labels[B];
    for (int n = 0; n < B; n++) users[n] = (4 * n + 1) % 9, items[n] = (3 * n + 2) % 7, labels[n] = n % 5 == 0;
    bench_batch(b, users, items, labels, B);
    free(w);
    return b;
}

static void test_golden(Tests* t) {
    Bench* b = golden_open();
    double loss_tol = loss_tolerance(), norm_tol = norm_tolerance();
    for (size_t s = 0; s < COUNT_OF(NCF_LOSSES); s++) {
        train_batch(&b->m, &b->o, &b->batch, s, PUBLISHED_ADAM, &b->ctx);
        char* name = xprintf("golden: loss after %zu steps of Adam", s);
        expect_near(t, name, bench_loss(b), NCF_LOSSES[s], loss_tol);
        free(name);
        if (s) continue;
        expect_near(t, "golden: norm of the gradient of mlp.0.weight",
                    gradient_norm(&b->m.buffers, "mlp.0.weight", &b->ctx), 1.854214e-4, norm_tol * 1.854214e-4 + 5e-11);
        expect_near(t, "golden: norm of the gradient of last.weight",
                    gradient_norm(&b->m.buffers, "last.weight", &b->ctx), 1.32446189e-2,
                    norm_tol * 1.32446189e-2 + 5e-11);
        // After the first step a table's first moment is (1 - beta1) g.
        static const struct {
            int table;
            double norm;
        } norms[] = {{MF_USER, 1.0250906e-3}, {MLP_ITEM, 1.849712e-4}};
        for (size_t i = 0; i < COUNT_OF(norms); i++) {
            const Tensor* x = tensor_named(&b->m.buffers.table, norms[i].table ? "mlp_item.weight" : "mf_user.weight");
            real* m = reals_of(&b->ctx, b->o.m + x->offset, x->size);
            name = xprintf("golden: norm of the gradient of %s", x->name);
            expect_near(t, name, norm_of(m, x->size) / 0.75, norms[i].norm, norm_tol * norms[i].norm + 5e-11);
            free(name), free(m);
        }
    }
    bench_close(b);
}

#ifdef REAL_DOUBLE
// The first moment after one step, over 1 - beta1, is the gradient: of every tensor, against central differences.
static void test_finite_differences(Tests* t) {
    Bench* b = golden_open();
    real* w = (real*)b->m.buffers.params;
    size_t n = b->m.buffers.table.elements;
    real* kept = reals_of(&b->ctx, w, n);
    train_batch(&b->m, &b->o, &b->batch, 0, PUBLISHED_ADAM, &b->ctx);
    memcpy(w, kept, n * sizeof *w);
    for (int k = 0; k < b->m.buffers.table.count; k++) {
        const Tensor* x = &b->m.buffers.table.tensors[k];
        double worst = 0;
        for (size_t i = x->offset; i < x->offset + x->size; i++) {
            double step = 1e-5, above, below;
            w[i] = kept[i] + step;
            forward(&b->m, &b->batch, 0, 0.1, FORWARD, &b->ctx), above = bench_loss(b);
            w[i] = kept[i] - step;
            forward(&b->m, &b->batch, 0, 0.1, FORWARD, &b->ctx), below = bench_loss(b);
            w[i] = kept[i];
            worst = fmax(worst, fabs((above - below) / (2 * step) - b->o.m[i] / 0.75));
        }
        char* name = xprintf("finite differences: %s", x->name);
        expect_near(t, name, worst, 0, 1e-9);
        free(name);
    }
    free(kept);
    bench_close(b);
}
#endif

// ---------------------------------------------------------------------------------------------------------
// A middle-sized model of the published widths, with dropout and skewed ids

static Bench* middle_open(double dropout) {
    enum { B = 1000 };
    Config c = {300, 70, 64, 128, {3, {0, 256, 128, 64}, 1}, dropout};
    Bench* b = bench_open(c, B);
    real* w = (real*)xcalloc(b->m.buffers.table.elements, sizeof *w);
    random_weights(&b->m, w, 7);
    // Weights that floatX holds exactly, so that differences are those of a step.
    for (size_t i = 0; i < b->m.buffers.table.elements; i++) w[i] = (real)(floatX)w[i];
    bench_write(b, w);
    b->m.seed = 11;
    int users[B], items[B];
    real labels[B];
    for (int n = 0; n < B; n++) {
        double u = hash01(1, (uint32_t)n), i = hash01(2, (uint32_t)n);
        users[n] = (int)(u * u * 300), items[n] = (int)(i * i * 70);
        labels[n] = (users[n] + items[n]) % 3 == 0;
    }
    bench_batch(b, users, items, labels, B);
    free(w);
    return b;
}

static uint64_t middle_steps(double dropout, double* losses, int steps) {
    Bench* b = middle_open(dropout);
    for (int s = 0; s < steps; s++) {
        train_batch(&b->m, &b->o, &b->batch, (uint64_t)s, PUBLISHED_ADAM, &b->ctx);
        losses[s] = bench_loss(b);
    }
    uint64_t bits = bits_of(&b->ctx, recommender_weights(&b->m.buffers, &b->o), b->m.buffers.table.elements);
    bench_close(b);
    return bits;
}

static void test_equalities(Tests* t) {
    double losses[20], again[20], without[2];
    uint64_t bits = middle_steps(0.5, losses, 20);
    expect(t, losses[19] < losses[0] - 0.02, "twenty steps learn", "%g, then %g", losses[0], losses[19]);
    middle_steps(0, without, 2);
    expect_that(t, without[1] != losses[1], "dropout changes the loss");
#ifdef __CUDACC__
    expect_that(t, middle_steps(0.5, again, 20) == bits && memcmp(losses, again, sizeof losses) == 0,
                "the same bits again");
#elif defined _OPENMP
    int usual = omp_get_max_threads();
    omp_set_num_threads(3);
    expect_that(t, middle_steps(0.5, again, 20) == bits && memcmp(losses, again, sizeof losses) == 0,
                "the same bits again, with three threads");
    omp_set_num_threads(usual);
#endif
}

// Rows that no sample looks up: the dense Adam moves them by their moments, the lazy one leaves them.
static void test_lazy_adam(Tests* t) {
    double change[2] = {0, 0};
    for (int lazy = 0; lazy < 2; lazy++) {
        Bench* b = golden_open();
        b->m.adam_rows = lazy ? LAZY : DENSE;
        train_batch(&b->m, &b->o, &b->batch, 0, PUBLISHED_ADAM, &b->ctx);
        const Tensor* x = tensor_named(&b->m.buffers.table, "mf_user.weight");
        real* w = recommender_weights(&b->m.buffers, &b->o) + x->offset;
        real* before = reals_of(&b->ctx, w, x->size);
        Batch one = b->batch;  // the first sample looks up user 1 only
        one.B = 1;
        train_batch(&b->m, &b->o, &one, 1, PUBLISHED_ADAM, &b->ctx);
        real* after = reals_of(&b->ctx, w, x->size);
        for (size_t i = 2 * 4; i < x->size; i++) change[lazy] += fabs((double)(after[i] - before[i]));
        free(before), free(after);
        bench_close(b);
    }
    expect(t, change[DENSE] > 1e-3, "dense Adam moves rows without lookups", "by %g", change[DENSE]);
    expect(t, change[LAZY] == 0, "lazy Adam does not", "by %g", change[LAZY]);
}

// ---------------------------------------------------------------------------------------------------------
// The same training in fp32 on the host, by the ops' references: what steps with 16-bit activations are measured
// against

typedef struct {
    real *w, *g, *m, *v;  // weights, gradients and moments in the model's layout
    int *users, *items;
    real *labels, *h[MLP_LAYERS + 1], *dz[MLP_LAYERS + 1], *x, *dx, *logits, *losses;  // h[0]: the first layer's input
} HostNcf;

// Begin with the weights and the batch of `b`.
static HostNcf* host_open(Bench* b) {
    HostNcf* t = (HostNcf*)xcalloc(1, sizeof *t);
    const Config* c = &b->m.config;
    size_t n = b->m.buffers.table.elements, B = (size_t)b->batch.B, width = (size_t)(c->F + b->m.H);
    t->w = reals_of(&b->ctx, recommender_weights(&b->m.buffers, &b->o), n);
    t->labels = reals_of(&b->ctx, b->batch.labels, B);
    t->g = (real*)xcalloc(n, sizeof(real)), t->m = (real*)xcalloc(n, sizeof(real)),
    t->v = (real*)xcalloc(n, sizeof(real));
    t->x = (real*)xcalloc(B * width, sizeof(real)), t->dx = (real*)xcalloc(B * width, sizeof(real));
    t->logits = (real*)xcalloc(B, sizeof(real)), t->losses = (real*)xcalloc(B, sizeof(real));
    t->users = (int*)xmalloc(B * sizeof(int)), t->items = (int*)xmalloc(B * sizeof(int));
    device_download(&b->ctx, t->users, b->batch.users, B * sizeof(int));
    device_download(&b->ctx, t->items, b->batch.items, B * sizeof(int));
    for (int l = 0; l <= c->mlp.count; l++) {
        t->h[l] = (real*)xcalloc(B * (size_t)c->mlp.width[l], sizeof(real));
        t->dz[l] = (real*)xcalloc(B * (size_t)c->mlp.width[l], sizeof(real));
    }
    return t;
}

static void host_close(HostNcf* t) {
    for (int l = 0; l <= MLP_LAYERS; l++) free(t->h[l]), free(t->dz[l]);
    free(t->w), free(t->g), free(t->m), free(t->v), free(t->x), free(t->dx), free(t->logits), free(t->losses);
    free(t->users), free(t->items), free(t->labels), free(t);
}

// Element 0 of layer l's weight or bias in `flat`.
static real* host_layer(const Bench* b, real* flat, int l, const char* which) {
    char name[64];
    snprintf(name, sizeof name, "mlp.%d.%s", l, which);
    return flat + tensor_named(&b->m.buffers.table, name)->offset;
}

// Adam of everything.
static void host_update(const Bench* b, HostNcf* t, uint64_t step, OptimizerSettings h) {
    double bias1 = 1 - pow(h.beta1, (double)step + 1), bias2 = 1 - pow(h.beta2, (double)step + 1);
    for (size_t i = 0; i < b->m.buffers.table.elements; i++) {
        t->m[i] = (real)(h.beta1 * (double)t->m[i] + (1 - h.beta1) * (double)t->g[i]);
        t->v[i] = (real)(h.beta2 * (double)t->v[i] + (1 - h.beta2) * (double)t->g[i] * (double)t->g[i]);
        t->w[i] -= (real)(h.lr * ((double)t->m[i] / bias1) / (sqrt((double)t->v[i] / bias2) + h.eps));
    }
}

// One step of training. Returns the loss before the update.
static double host_step(const Bench* b, HostNcf* t, uint64_t step) {
    const TensorTable* table = &b->m.buffers.table;
    const Config* c = &b->m.config;
    const Mlp* mlp = &c->mlp;
    int B = b->batch.B, F = c->F, E = c->E, H = b->m.H, width = F + H, last = mlp->count;
    ReluDropout dropout[MLP_LAYERS];
    real loss, *w[NCF_TABLES], *g[NCF_TABLES];
    static const char* const names[NCF_TABLES] = {"mf_user.weight", "mf_item.weight", "mlp_user.weight",
                                                  "mlp_item.weight"};
    dropouts(dropout, &b->m, step, 0, c->dropout);
    memset(t->g, 0, table->elements * sizeof(real));
    for (int k = 0; k < NCF_TABLES; k++)
        w[k] = t->w + tensor_named(table, names[k])->offset, g[k] = t->g + tensor_named(table, names[k])->offset;
    for (int k = 0; k < B * 2 * E; k++) {
        int n = k / (2 * E), e = k % (2 * E);
        t->h[0][k] = e < E ? w[MLP_USER][t->users[n] * E + e] : w[MLP_ITEM][t->items[n] * E + e - E];
    }
    for (int l = 0; l < last; l++) {
        matmul_forward_ref(t->h[l + 1], t->h[l], host_layer(b, t->w, l, "weight"), host_layer(b, t->w, l, "bias"), B,
                           mlp->width[l], mlp->width[l + 1], SET);
        relu_dropout_ref(t->h[l + 1], dropout[l], B, mlp->width[l + 1]);
    }
    for (int k = 0; k < B * width; k++) {
        int n = k / width, f = k % width;
        t->x[k] = f < F ? w[MF_USER][t->users[n] * F + f] * w[MF_ITEM][t->items[n] * F + f] : t->h[last][n * H + f - F];
    }
    size_t last_w = tensor_named(table, "last.weight")->offset, last_b = tensor_named(table, "last.bias")->offset;
    LinearBceRef r = {t->logits, t->dx,         t->g + last_w, t->g + last_b, NULL,
                      t->x,      t->w + last_w, t->w + last_b, t->labels};
    LinearBceShape shape = {B, width, F, (real)mlp->scale};
    Losses losses = {t->losses, &loss, 1.0 / B, SET};
    linear_bce_ref(losses, r, shape, BACKWARD);
    for (int k = 0; k < B * width; k++) {
        int n = k / width, f = k % width, user = t->users[n] * F + f, item = t->items[n] * F + f;
        if (f < F) g[MF_USER][user] += t->dx[k] * w[MF_ITEM][item], g[MF_ITEM][item] += t->dx[k] * w[MF_USER][user];
        else t->dz[last][n * H + f - F] = t->dx[k];
    }
    for (int l = last - 1; l >= 0; l--) {
        int IC = mlp->width[l], OC = mlp->width[l + 1];
        matmul_backward_weight_ref(host_layer(b, t->g, l, "weight"), host_layer(b, t->g, l, "bias"), t->dz[l + 1],
                                   t->h[l], B, IC, OC, SET);
        matmul_backward_input_ref(t->dz[l], t->dz[l + 1], host_layer(b, t->w, l, "weight"), B, IC, OC, SET);
        if (l) relu_mask_ref(t->dz[l], t->h[l], (real)mlp->scale, (size_t)B * (size_t)IC);
    }
    for (int k = 0; k < B * 2 * E; k++) {
        int n = k / (2 * E), e = k % (2 * E);
        *(e < E ? &g[MLP_USER][t->users[n] * E + e] : &g[MLP_ITEM][t->items[n] * E + e - E]) += t->dz[0][k];
    }
    host_update(b, t, step, PUBLISHED_ADAM);
    return (double)loss;
}

// The distance of `gradient`, the first moments after one step, from the host's gradient of a tensor, over its norm.
static double host_distance(const HostNcf* t, const real* moments, const Tensor* x) {
    double sum = 0;
    for (size_t i = x->offset; i < x->offset + x->size; i++) {
        double d = (double)moments[i] / (1 - PUBLISHED_ADAM.beta1) - (double)t->g[i];
        sum += d * d;
    }
    return sqrt(sum) / norm_of(t->g + x->offset, x->size);
}

// In fp32 the training step is the host's.
static void test_host(Tests* t) {
    Bench* b = middle_open(0.5);
    HostNcf* host = host_open(b);
    double worst = 0;
    for (int s = 0; s < 2; s++) {
        double want = host_step(b, host, (uint64_t)s);
        train_batch(&b->m, &b->o, &b->batch, (uint64_t)s, PUBLISHED_ADAM, &b->ctx);
        worst = fmax(worst, fabs(bench_loss(b) - want));
        real* moments = reals_of(&b->ctx, b->o.m, b->m.buffers.table.elements);
        for (int k = 0; k < b->m.buffers.table.count && s == 0; k++) {
            const Tensor* x = &b->m.buffers.table.tensors[k];
            char* name = xprintf("host: gradient of %s", x->name);
            expect_near(t, name, host_distance(host, moments, x), 0, 1e-5);
            free(name);
        }
        free(moments);
    }
    expect_near(t, "host: losses of two steps", worst, 0, 1e-5);
    host_close(host), bench_close(b);
}

#ifdef NCF_FUSED
// The fused step may be this much farther from fp32 than the list of ops. It rounds at other places: each half of the
// first layer's product before they are added, so more inputs of the first ReLU change sign. Both roundings emulated on
// the CPU, this model, four seeds, with and without dropout: gradients are up to 5 % from fp32 in both, the fused ones
// up to 1.47 times as far; the mean of ten losses 0.46 to 1.37 times. Losses get room because later steps amplify any
// difference.
#define FUSED_GRADIENTS 1.6
#define FUSED_LOSSES 2.0

// The fused step and the list of ops, with the same dropout masks, against fp32: the gradients of a first step, and the
// mean difference of the losses of ten steps.
static void test_fused(Tests* t) {
    for (int with = 0; with < 2; with++) {
        double p = with ? 0.5 : 0, fused_loss = 0, ops_loss = 0;
        Bench *fused = middle_open(p), *ops = middle_open(p);
        HostNcf* host = host_open(ops);
        size_t n = fused->m.buffers.table.elements;
        expect_that(t, fused->m.is_fused, "the fused step supports the published widths");
        ops->m.is_fused = 0;
        for (int s = 0; s < 10; s++) {
            double want = host_step(ops, host, (uint64_t)s);
            train_batch(&fused->m, &fused->o, &fused->batch, (uint64_t)s, PUBLISHED_ADAM, &fused->ctx);
            train_batch(&ops->m, &ops->o, &ops->batch, (uint64_t)s, PUBLISHED_ADAM, &ops->ctx);
            fused_loss += fabs(bench_loss(fused) - want) / 10, ops_loss += fabs(bench_loss(ops) - want) / 10;
            if (s) continue;
            real *of_fused = reals_of(&fused->ctx, fused->o.m, n), *of_ops = reals_of(&ops->ctx, ops->o.m, n);
            for (int k = 0; k < fused->m.buffers.table.count; k++) {
                const Tensor* x = &fused->m.buffers.table.tensors[k];
                double got = host_distance(host, of_fused, x), list = host_distance(host, of_ops, x);
                // The last bias sums fp32 values: its error is below 1e-4 and says nothing. The other tensors' are
                // above.
                char* name = xprintf("fused: gradient of %s, dropout %g", x->name, p);
                expect(t, got <= fmax(FUSED_GRADIENTS * list, 1e-4), name,
                       "%.4g of its norm from fp32, the list of ops %.4g", got, list);
                printf("     %s: %.4g of its norm from fp32, the list of ops %.4g\n", x->name, got, list);
                free(name);
            }
            free(of_fused), free(of_ops);
        }
        expect(t, fused_loss <= FUSED_LOSSES * ops_loss, with ? "fused: losses, dropout 0.5" : "fused: losses",
               "%.4g from fp32 on average, the list of ops %.4g", fused_loss, ops_loss);
        printf("     losses: %.4g from fp32 on average, the list of ops %.4g\n", fused_loss, ops_loss);
        host_close(host), bench_close(fused), bench_close(ops);
    }
}
#endif

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// Speed

enum { SPEED_BATCHES = 130, SPEED_WARMUP = 20 };

static void speed(void) {
    enum { B = 1048576 };
    Bench* b = bench_open(config_published(), B);
    Context* ctx = &b->ctx;
    const Config* c = &b->m.config;
    size_t n = (size_t)B * SPEED_BATCHES;
    real *w = (real*)xcalloc(b->m.buffers.table.elements, sizeof *w), *labels = (real*)xcalloc(B, sizeof *labels);
    int *users = (int*)xmalloc(n * sizeof *users), *items = (int*)xmalloc(n * sizeof *items);
    random_weights(&b->m, w, 7);
    bench_write(b, w);
    for (int k = 0; k < B; k++) labels[k] = hash01(2, (uint32_t)k) < 0.2;
#pragma omp parallel for
    for (size_t k = 0; k < n; k++) {
        Philox bits = philox((uint32_t)k, (uint32_t)(k >> 32), 0, 0, 99);
        users[k] = (int)((uint64_t)bits.v[0] * (uint64_t)c->users >> 32);
        items[k] = (int)((uint64_t)bits.v[1] * (uint64_t)c->items >> 32);
    }
    int *all_users = (int*)on_device(ctx, users, n * sizeof *users),
        *all_items = (int*)on_device(ctx, items, n * sizeof *items);
    Batch in = {NULL, NULL, (real*)on_device(ctx, labels, B * sizeof *labels), B, 0};
    ctx->autotune = 1;
    cudaEvent_t start, stop;
    cudaCheck(cudaEventCreate(&start)), cudaCheck(cudaEventCreate(&stop));
    for (int s = 0; s < SPEED_BATCHES; s++) {
        in.users = all_users + (size_t)s * B, in.items = all_items + (size_t)s * B;
        if (s == SPEED_WARMUP) cudaCheck(cudaEventRecord(start, ctx->stream));
        train_batch(&b->m, &b->o, &in, (uint64_t)s, PUBLISHED_ADAM, ctx);
    }
    cudaCheck(cudaEventRecord(stop, ctx->stream));
    device_synchronize(ctx);
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, start, stop));
    uint64_t bits = bits_of(ctx, recommender_weights(&b->m.buffers, &b->o), b->m.buffers.table.elements);
    speed_report("ncf", B, ms / (SPEED_BATCHES - SPEED_WARMUP), bench_loss(b), bits);
    KernelTrace* trace = speed_kernels_begin(ctx);
    train_batch(&b->m, &b->o, &in, SPEED_BATCHES, PUBLISHED_ADAM, ctx);
    speed_kernels_end("ncf", trace);
    bench_close(b);
}
#endif

// ---------------------------------------------------------------------------------------------------------
// Evaluation

// Scores that are easy to get wrong: equal ones, a NaN, masked rivals.
static void test_ranks(Tests* t) {
    enum { RIVALS = 12 };
    int items[RIVALS + 1];
    real scores[RIVALS + 1];
    RankSums constant = {0, 0, 0}, sums = {0, 0, 0};
    for (int k = 0; k <= RIVALS; k++) items[k] = k, scores[k] = 1;
    rank_add(&constant, scores, items, RIVALS);
    expect_that(t, constant.users == 1 && constant.hits == 0 && constant.gain == 0, "a constant model scores 0");
    for (int k = 1; k <= RIVALS; k++) scores[k] = k <= 2 ? 2 : 0;  // two outrank the held-out item
    rank_add(&sums, scores, items, RIVALS);
    expect_near(t, "NDCG of rank 2", sums.gain, log(2) / log(4), 1e-15);
    items[1] = RIVAL_MASKED;
    rank_add(&sums, scores, items, RIVALS);
    expect_near(t, "a masked rival outranks nothing", sums.gain, log(2) / log(4) + log(2) / log(3), 1e-15);
    scores[0] = (real)NAN;
    rank_add(&sums, scores, items, RIVALS);
    expect_that(t, sums.users == 3 && sums.hits == 2, "NaN counts against the model");
    for (int k = 0; k <= RIVALS; k++) items[k] = k, scores[k] = k && k <= 10 ? 2 : 1 / (real)(1 + k);
    rank_add(&constant, scores, items, RIVALS);
    expect_that(t, constant.hits == 0 && constant.gain == 0, "place eleven is no hit");
    scores[10] = 0;
    rank_add(&constant, scores, items, RIVALS);
    expect_that(t, constant.hits == 1 && constant.gain > 0, "place ten is a hit");
}

// Three users who rated items 0 .. 3 of 8, the last held out.
static void test_rivals(Tests* t) {
    const int pair[] = {0, 0, 0, 1, 0, 2, 1, 0, 1, 1, 1, 2, 2, 0, 2, 1, 2, 2}, held_out[] = {3, 3, 3};
    int unseen = 1, distinct = 1, masked = 0, right = 1, rivals[33];
    Ratings r = {3, 8, 9, pair, held_out, NULL, NULL, 0, NULL};
    ratings_index(&r);
    for (int user = 0; user < 3; user++) {
        ratings_rivals(&r, user, 4, POOL_UNSEEN, 1, rivals);
        for (int k = 1; k <= 4; k++) {
            unseen &= rivals[k] >= 4 && rivals[k] < 8;
            for (int j = 0; j < k; j++) distinct &= rivals[j] != rivals[k];
        }
        ratings_rivals(&r, user, 32, POOL_ALL, 1, rivals);
        for (int k = 0; k <= 32; k++) {
            masked += rivals[k] == RIVAL_MASKED;
            for (int j = 0; j < k; j++) distinct &= rivals[j] != rivals[k] || rivals[k] == RIVAL_MASKED;
        }
    }
    expect_that(t, unseen && distinct, "rivals are distinct, and unseen where asked for");
    expect(t, masked >= 3 * 25, "of 33 draws from 8 items all but 8 are masked", "%d masked", masked);

    // An epoch of all samples: each pair once as a positive, and with two negatives.
    enum { N = 27 };
    int users[N], items[N], positives[9] = {0};
    real labels[N];
    HostBatch all = {users, items, labels};
    ratings_batch(all, &r, epoch_draws(2, NEGATIVES_UNRATED, 1, 0), 0, N);
    for (int b = 0; b < N; b++)
        for (int p = 0; p < 9; p++)
            positives[p] += labels[b] == 1 && users[b] == pair[2 * p] && items[b] == pair[2 * p + 1];
    for (int p = 0; p < 9; p++) right &= positives[p] == 1;
    expect_that(t, right, "each pair is one positive of an epoch");

    // Users rated items 0 .. 2 in training. Item 3 is held out, which training does not know.
    int rated[2] = {0, 0}, held = 0;
    for (int pool = NEGATIVES_UNRATED; pool <= NEGATIVES_ALL; pool++)
        for (uint64_t epoch = 0; epoch < 9; epoch++) {
            ratings_batch(all, &r, epoch_draws(2, (NegativePool)pool, 1, epoch), 0, N);
            for (int b = 0; b < N; b++) rated[pool] += labels[b] == 0 && items[b] < 3;
            for (int b = 0; b < N && pool == NEGATIVES_UNRATED; b++) held += labels[b] == 0 && items[b] == 3;
        }
    expect(t, rated[NEGATIVES_UNRATED] == 0 && rated[NEGATIVES_ALL] > 30, "unrated negatives have no training rating",
           "%d and %d have one", rated[NEGATIVES_UNRATED], rated[NEGATIVES_ALL]);
    expect(t, held > 10, "a held-out item may be a negative", "%d of 162 are", held);

    // The device draws the same samples: 20 from number 5 on.
    Context ctx;
    BatchLoader loader;
    EpochDraws draws = epoch_draws(2, NEGATIVES_UNRATED, 3, 4);
    int device_users[N], device_items[N];
    real device_labels[N];
    memset(&ctx, 0, sizeof ctx);
    context_init(&ctx);
    batch_loader_open(&loader, N, &r, &ctx);
    Batch drawn = batch_draw(&loader, draws, 5, 20, &ctx);
    device_download(&ctx, device_users, drawn.users, 20 * sizeof(int));
    device_download(&ctx, device_items, drawn.items, 20 * sizeof(int));
    device_download(&ctx, device_labels, drawn.labels, 20 * sizeof(real));
    ratings_batch(all, &r, draws, 5, 20);
    expect_that(t,
                memcmp(users, device_users, 20 * sizeof(int)) == 0 &&
                    memcmp(items, device_items, 20 * sizeof(int)) == 0 &&
                    memcmp(labels, device_labels, 20 * sizeof(real)) == 0,
                "the device draws the host's samples");
    batch_loader_close(&loader);
    context_free(&ctx);
    free(r.begin), free(r.seen);
}

int main(int argc, char** argv) {
    static Tests t;
    if (argc > 1 && strcmp(argv[1], "losses") == 0) {
        double losses[20];
        middle_steps(0.5, losses, 20);
        for (int s = 0; s < 20; s++) printf("ncf loss %d %.9f\n", s, losses[s]);
        return DONE;
    }
#ifdef __CUDACC__
    if (argc > 1 && strcmp(argv[1], "speed") == 0) {
        speed();
        return DONE;
    }
#endif
    tests_open(&t);
    test_published_size(&t);
    test_golden(&t);
#ifdef REAL_DOUBLE
    test_finite_differences(&t);
#endif
    if (sizeof(real) == sizeof(float)) test_equalities(&t);
    if (sizeof(floatX) == sizeof(float)) test_host(&t);
    test_lazy_adam(&t);
    test_ranks(&t);
    test_rivals(&t);
#ifdef NCF_FUSED
    test_fused(&t);
#endif
    return tests_close(&t);
}
