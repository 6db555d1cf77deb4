/* Tests of NeuMF: golden numbers, finite differences (double build), equalities. With a GPU also its speed:
 *
 *     test_ncf                  the tests
 *     test_ncf speed            milliseconds and kernels of a step of the published size */
#define NO_MAIN
#include "dev/recsys/train_ncf.cu"

#include "dev/recsys/test_recommender.h"

static const OptimizerSettings PUBLISHED_ADAM = {.lr = 0.0045, .beta1 = 0.25, .beta2 = 0.5, .eps = 1e-8};

static void bench_step(Bench* b, uint64_t step) { train_batch(&b->m, &b->o, &b->batch, step, PUBLISHED_ADAM, &b->ctx); }

// After the first step the first moment is (1 - beta1) times the gradient.
static real* bench_gradients(Bench* b, const real* before) {
    real* g = reals_of(&b->ctx, b->o.m, b->m.buffers.table.elements);
    (void)before;
    for (size_t i = 0; i < b->m.buffers.table.elements; i++) g[i] /= (real)(1 - PUBLISHED_ADAM.beta1);
    return g;
}

static void bench_batch(Bench* b, const int* users, const int* items, const real* labels, int B) {
    size_t n = (size_t)B * sizeof(int);
    Batch batch = {(int*)on_device(&b->ctx, users, n), (int*)on_device(&b->ctx, items, n),
                   (real*)on_device(&b->ctx, labels, (size_t)B * sizeof(real)), B};
    b->batch = batch;
}

// ---------------------------------------------------------------------------------------------------------
// The golden case; golden.py prints the losses

static const double NCF_LOSSES[] = {0.67188046874561, 0.67020999517066, 0.66853610904133, 0.66684775783814,
                                    0.66524926769167, 0.66363632829017, 0.66198804796163, 0.66030261668533,
                                    0.65857786427169, 0.65681195720099};

static Bench* golden_open(double dropout) {
    enum { B = 10 };
    Config c = {9, 7, 4, 4, {2, {0, 8, 4}, 1}, dropout};
    Bench* b = bench_open(c, B);
    const TensorTable* table = &b->m.buffers.table;
    real* w = (real*)xcalloc(table->elements, sizeof *w);
    for (int k = 0; k < table->count; k++)  // hash tensors 40 .. 43 are the tables, which come last
        hash_fill(w, &table->tensors[k], 40 + (k + 4) % 10, table->tensors[k].shape[1]);
    bench_write(b, w);
    int users[B], items[B];
    real labels[B];
    for (int n = 0; n < B; n++) users[n] = (4 * n + 1) % 9, items[n] = (3 * n + 2) % 7, labels[n] = n % 5 == 0;
    bench_batch(b, users, items, labels, B);
    free(w);
    return b;
}

static const GoldenNorm GOLDEN_NORMS[] = {{"mlp.0.weight", 1.854214e-4},
                                          {"last.weight", 1.32446189e-2},
                                          {"mf_user.weight", 1.0250906e-3},
                                          {"mlp_item.weight", 1.849712e-4}};

#ifdef REAL_DOUBLE
static double forward_loss(Bench* b) {
    forward(&b->m, &b->batch, 0, BACKWARD, &b->ctx);  // with dropout
    return bench_loss(b);
}
#endif

// ---------------------------------------------------------------------------------------------------------
// A middle-sized model of the published widths, with dropout and skewed ids

static Bench* middle_with(double dropout) {
    enum { B = 1000 };
    Config c = {300, 70, 64, 128, {3, {0, 256, 128, 64}, 1}, dropout};
    Bench* b = bench_open(c, B);
    real* w = (real*)xcalloc(b->m.buffers.table.elements, sizeof *w);
    random_weights(&b->m, w, 7);
    // Weights that floatX holds exactly, so that differences are those of a step.
    for (size_t i = 0; i < b->m.buffers.table.elements; i++) w[i] = (real)(floatX)w[i];
    bench_write(b, w);
    b->m.config.seed = 11;
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

static Bench* middle_open(void) { return middle_with(0.5); }

// ---------------------------------------------------------------------------------------------------------
// The same training in fp32 on the host, sample by sample: what steps with 16-bit activations are measured against

typedef struct {
    real *w, *m, *v;  // weights and moments in the model's layout
    double* g;        // gradients
    int *users, *items;
    real* labels;
} HostNcf;

// Begin with the weights and the batch of `b`.
static HostNcf* host_open(Bench* b) {
    HostNcf* t = (HostNcf*)xcalloc(1, sizeof *t);
    size_t n = b->m.buffers.table.elements, B = (size_t)b->batch.B;
    t->w = bench_weights(b), t->labels = reals_of(&b->ctx, b->batch.labels, B);
    t->m = (real*)xcalloc(n, sizeof(real)), t->v = (real*)xcalloc(n, sizeof(real));
    t->g = (double*)xcalloc(n, sizeof(double));
    t->users = (int*)xmalloc(B * sizeof(int)), t->items = (int*)xmalloc(B * sizeof(int));
    device_download(&b->ctx, t->users, b->batch.users, B * sizeof(int));
    device_download(&b->ctx, t->items, b->batch.items, B * sizeof(int));
    return t;
}

static void host_close(HostNcf* t) {
    free(t->w), free(t->m), free(t->v), free(t->g), free(t->users), free(t->items), free(t->labels), free(t);
}

// Add the gradients of sample n. Returns its loss.
static double host_sample(const Bench* b, HostNcf* t, const ReluDropout* dropout, int n) {
    enum { WIDEST = 256 };
    const Tensor* x = b->m.buffers.table.tensors;  // weight and bias of each layer, of the last one, and the tables
    const Mlp* mlp = &b->m.config.mlp;
    int F = b->m.config.F, E = b->m.config.E, H = b->m.H, last = mlp->count, u = t->users[n], i = t->items[n];
    const int rows[NCF_TABLES] = {u, i, u, i};
    real h[MLP_LAYERS + 1][WIDEST], dz[MLP_LAYERS + 1][WIDEST], *row[NCF_TABLES], *w = t->w + x[2 * last].offset;
    double *drow[NCF_TABLES], *dw = t->g + x[2 * last].offset, logit = (double)t->w[x[2 * last + 1].offset];
    for (int k = 0; k < NCF_TABLES; k++) {
        size_t at = x[2 * last + 2 + k].offset + (size_t)rows[k] * (size_t)(k < MLP_USER ? F : E);
        row[k] = t->w + at, drow[k] = t->g + at;
    }
    for (int e = 0; e < E; e++) h[0][e] = row[MLP_USER][e], h[0][E + e] = row[MLP_ITEM][e];
    for (int l = 0; l < last; l++) {
        ReluDropout of_sample = dropout[l];
        of_sample.first = (uint64_t)n;
        matmul_forward_ref(h[l + 1], h[l], t->w + x[2 * l].offset, t->w + x[2 * l + 1].offset, 1, mlp->width[l],
                           mlp->width[l + 1], SET);
        relu_dropout_ref(h[l + 1], of_sample, 1, mlp->width[l + 1]);
    }
    for (int f = 0; f < F; f++) logit += (double)w[f] * (double)row[MF_USER][f] * (double)row[MF_ITEM][f];
    for (int k = 0; k < H; k++) logit += (double)w[F + k] * (double)h[last][k];
    double d = (bce_sigmoid(logit) - (double)t->labels[n]) / b->batch.B;
    t->g[x[2 * last + 1].offset] += d;
    for (int f = 0; f < F; f++) {
        double user = (double)row[MF_USER][f], item = (double)row[MF_ITEM][f];
        dw[f] += d * user * item, drow[MF_USER][f] += d * (double)w[f] * item,
            drow[MF_ITEM][f] += d * (double)w[f] * user;
    }
    for (int k = 0; k < H; k++) {
        dw[F + k] += d * (double)h[last][k];
        dz[last][k] = relu_gradient((real)(d * (double)w[F + k]), h[last][k], (real)mlp->scale);
    }
    for (int l = last - 1; l >= 0; l--) {
        int IC = mlp->width[l], OC = mlp->width[l + 1];
        for (int o = 0; o < OC; o++) {
            t->g[x[2 * l + 1].offset + (size_t)o] += (double)dz[l + 1][o];
            for (int k = 0; k < IC; k++)
                t->g[x[2 * l].offset + (size_t)(o * IC + k)] += (double)dz[l + 1][o] * (double)h[l][k];
        }
        matmul_backward_input_ref(dz[l], dz[l + 1], t->w + x[2 * l].offset, 1, IC, OC, SET);
        if (l) relu_mask_ref(dz[l], h[l], (real)mlp->scale, (size_t)IC);
    }
    for (int e = 0; e < E; e++) drow[MLP_USER][e] += (double)dz[0][e], drow[MLP_ITEM][e] += (double)dz[0][E + e];
    return bce_loss(logit, (double)t->labels[n]);
}

// One step of training. Returns the loss before the update.
static double host_step(const Bench* b, HostNcf* t, uint64_t step) {
    OptimizerSettings h = PUBLISHED_ADAM;
    ReluDropout dropout[MLP_LAYERS];
    double bias1 = 1 - pow(h.beta1, (double)step + 1), bias2 = 1 - pow(h.beta2, (double)step + 1), loss = 0;
    size_t elements = b->m.buffers.table.elements;
    dropouts(dropout, &b->m, step, b->m.config.dropout);
    memset(t->g, 0, elements * sizeof *t->g);
    for (int n = 0; n < b->batch.B; n++) loss += host_sample(b, t, dropout, n) / b->batch.B;
    for (size_t i = 0; i < elements; i++) {
        t->m[i] = (real)(h.beta1 * (double)t->m[i] + (1 - h.beta1) * t->g[i]);
        t->v[i] = (real)(h.beta2 * (double)t->v[i] + (1 - h.beta2) * t->g[i] * t->g[i]);
        t->w[i] -= (real)(h.lr * ((double)t->m[i] / bias1) / (sqrt((double)t->v[i] / bias2) + h.eps));
    }
    return loss;
}

// The distance of the gradients `got` from the host's in a tensor, over their norm.
static double host_distance(const HostNcf* t, const real* got, const Tensor* x) {
    double sum = 0, norm = 0;
    for (size_t i = x->offset; i < x->offset + x->size; i++) {
        double d = (double)got[i] - t->g[i];
        sum += d * d, norm += t->g[i] * t->g[i];
    }
    return sqrt(sum / norm);
}

// The fused step may be this much farther from fp32 than the list of ops. It rounds at other places: each half of the
// first layer's product before they are added, so more inputs of the first ReLU change sign. Both roundings emulated on
// the CPU, this model, four seeds, with and without dropout: gradients are up to 5 % from fp32 in both, the fused ones
// up to 1.47 times as far; the mean of ten losses 0.46 to 1.37 times. Losses get room because later steps amplify any
// difference.
#define FUSED_GRADIENTS 1.6
#define FUSED_LOSSES 2.0

// The training step against the host's: the gradients of a first step, and the mean difference of the losses of ten. In
// fp32 it is the host's, in bf16 the fused step is compared with the list of ops, with the same dropout masks.
static void test_host(Tests* t, double p) {
    double step_loss = 0, ops_loss = 0;
    Bench *b = middle_with(p), *ops = middle_with(p);
    HostNcf* host = host_open(ops);
    int is_fp32 = sizeof(floatX) == sizeof(real);
    expect_that(t, is_fp32 || b->m.is_fused, "the fused step supports the published widths");
    ops->m.is_fused = 0;
    for (int s = 0; s < 10; s++) {
        double want = host_step(ops, host, (uint64_t)s);
        bench_step(b, (uint64_t)s), bench_step(ops, (uint64_t)s);
        step_loss += fabs(bench_loss(b) - want) / 10, ops_loss += fabs(bench_loss(ops) - want) / 10;
        if (s) continue;
        real *of_step = bench_gradients(b, NULL), *of_ops = bench_gradients(ops, NULL);
        for (int k = 0; k < b->m.buffers.table.count; k++) {
            const Tensor* x = &b->m.buffers.table.tensors[k];
            double got = host_distance(host, of_step, x), list = host_distance(host, of_ops, x);
            // The last bias sums fp32 values: its error is below 1e-4 and says nothing. The other tensors' are above.
            char* name = xprintf("host: gradient of %s, dropout %g", x->name, p);
            expect(t, got <= (is_fp32 ? 1e-5 : fmax(FUSED_GRADIENTS * list, 1e-4)), name,
                   "%.4g of its norm from fp32, the list of ops %.4g", got, list);
            free(name);
        }
        free(of_step), free(of_ops);
    }
    expect(t, step_loss <= (is_fp32 ? 1e-5 : FUSED_LOSSES * ops_loss), p > 0 ? "host: losses, dropout" : "host: losses",
           "%.4g from fp32 on average, the list of ops %.4g", step_loss, ops_loss);
    host_close(host), bench_close(b), bench_close(ops);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// Speed

static void batch_next(Batch* batch) { batch->users += batch->B, batch->items += batch->B; }

static Bench* speed_open(void) {
    enum { B = 1048576 };
    Bench* b = bench_open(config_published(), B);
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
    Batch batch = {(int*)on_device(&b->ctx, users, n * sizeof *users),
                   (int*)on_device(&b->ctx, items, n * sizeof *items),
                   (real*)on_device(&b->ctx, labels, B * sizeof *labels), B};
    b->batch = batch;
    free(w), free(labels), free(users), free(items);
    return b;
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
    for (int k = 0; k < 3 * 2; k++) {
        int pool = k % 2, count = pool == POOL_ALL ? 32 : 4;
        ratings_rivals(&r, k / 2, count, (EvalPool)pool, 1, rivals);
        for (int i = 0; i <= count; i++) {
            int is_masked = rivals[i] == RIVAL_MASKED;
            masked += pool == POOL_ALL && is_masked,
                unseen &= pool == POOL_ALL || !i || (rivals[i] >= 4 && rivals[i] < 8);
            for (int j = 0; j < i; j++) distinct &= is_masked || rivals[j] != rivals[i];
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
    batch_loader_open(&loader, &r, N, &ctx);
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
    if (bench_speed(argc, argv, "ncf")) return DONE;
    tests_open(&t);
    test_published_size(&t, 31725504 + 107073);
    test_golden(&t, golden_open(0), NCF_LOSSES, GOLDEN_NORMS, COUNT_OF(GOLDEN_NORMS), 5e-11);
#ifdef REAL_DOUBLE
    test_finite_differences(&t, golden_open(0), forward_loss);
    test_finite_differences(&t, golden_open(0.5), forward_loss);
#endif
    if (sizeof(real) == sizeof(float)) test_equalities(&t, middle_open), test_host(&t, 0), test_host(&t, 0.5);
    test_ranks(&t);
    test_rivals(&t);
    return tests_close(&t);
}
