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

// `count` batches one after the other, whose labels are the same.
static void bench_batches(Bench* b, const int* users, const int* items, const real* labels, int B, size_t count) {
    size_t bytes = (size_t)B * count * sizeof(int);
    Batch batch = {(int*)on_device(&b->ctx, users, bytes), (int*)on_device(&b->ctx, items, bytes),
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
    bench_batches(b, users, items, labels, B, 1);
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
// A middle-sized model of the published widths, with dropout and skewed ids, and the published one

// Random weights, and `count` batches of random samples.
static Bench* random_open(Config config, int B, size_t count, int is_middle) {
    Bench* b = bench_open(config, B);
    const Config* c = &b->m.config;
    size_t n = (size_t)B * count, elements = b->m.buffers.table.elements;
    real *w = (real*)xcalloc(elements, sizeof *w), *labels = (real*)xcalloc((size_t)B, sizeof *labels);
    int *users = (int*)xmalloc(n * sizeof *users), *items = (int*)xmalloc(n * sizeof *items);
    random_weights(&b->m, w, 7);
    // Weights that floatX holds exactly, so that differences are those of a step.
    for (size_t i = 0; i < elements && is_middle; i++) w[i] = (real)(floatX)w[i];
    bench_write(b, w);
#pragma omp parallel for
    for (size_t k = 0; k < n; k++) {
        Philox bits = philox((uint32_t)k, (uint32_t)(k >> 32), 0, 0, 99);
        double u = hash01(1, (uint32_t)k), i = hash01(2, (uint32_t)k);
        users[k] = is_middle ? (int)(u * u * c->users) : (int)((uint64_t)bits.v[0] * (uint64_t)c->users >> 32);
        items[k] = is_middle ? (int)(i * i * c->items) : (int)((uint64_t)bits.v[1] * (uint64_t)c->items >> 32);
    }
    for (int k = 0; k < B; k++) labels[k] = is_middle ? (users[k] + items[k]) % 3 == 0 : hash01(2, (uint32_t)k) < 0.2;
    bench_batches(b, users, items, labels, B, count);
    free(w), free(labels), free(users), free(items);
    return b;
}

static Bench* middle_with(double dropout) {
    Config c = {300, 70, 64, 128, {3, {0, 256, 128, 64}, 1}, dropout, 11};
    return random_open(c, 1000, 1, 1);
}

static Bench* middle_open(void) { return middle_with(0.5); }

#ifdef __CUDACC__
static void batch_next(Batch* batch) { batch->users += batch->B, batch->items += batch->B; }

static Bench* speed_open(void) { return random_open(config_published(), 1048576, SPEED_BATCHES, 0); }

// ---------------------------------------------------------------------------------------------------------
// The fused step against the list of ops, with the same weights, batch and dropout masks

// Both round to bf16, at other places: measured on an H200, gradients are 3.5 to 5 % of their norms apart, losses 0.015
// to 0.033 (dev/LOG.md). Losses get more room because later steps amplify any difference.
#define FUSED_GRADIENTS 0.08
#define FUSED_LOSSES 0.066

static void test_fused(Tests* t, double p) {
    enum { STEPS = 10, FIRST = 3 };  // the number of the first step, whose masks are its own
    Bench *b = middle_with(p), *list = middle_with(p);
    double apart = 0;
    expect_that(t, b->m.is_fused, "the fused step supports the published widths");
    list->m.is_fused = 0;
    for (uint64_t s = 0; s < STEPS; s++) {
        bench_step(b, FIRST + s), bench_step(list, FIRST + s);
        apart += fabs(bench_loss(b) - bench_loss(list)) / STEPS;
        if (s) continue;
        size_t n = b->m.buffers.table.elements;
        real *got = bench_gradients(b, NULL), *want = bench_gradients(list, NULL);
        for (size_t i = 0; i < n; i++) got[i] -= want[i];
        for (int k = 0; k < b->m.buffers.table.count; k++) {
            const Tensor* x = &b->m.buffers.table.tensors[k];
            expect_near(t, named("fused: gradient of %s, dropout %g", x->name, p), norm_of(got + x->offset, x->size), 0,
                        FUSED_GRADIENTS * norm_of(want + x->offset, x->size));
        }
        free(got), free(want);
    }
    expect_near(t, named("fused: losses, dropout %g", p), apart, 0, FUSED_LOSSES);
    bench_close(b), bench_close(list);
}
#endif

// ---------------------------------------------------------------------------------------------------------
// Evaluation

// The score of 1 among 12 rivals: the first of them score 2, the next ones the same 1, the others 0.
static void test_ranks(Tests* t) {
    static const struct {
        const char* name;
        int above, equal, masked;
        double score, hits, gain;
    } cases[] = {{"a constant model scores 0", 0, 12, 0, 1, 0, 0},
                 {"two rivals are above", 2, 0, 0, 1, 1, 0.5},
                 {"a masked rival outranks nothing", 2, 0, 1, 1, 1, 0.63092975357145742},
                 {"NaN counts against the model", 0, 0, 0, NAN, 0, 0},
                 {"place eleven is no hit", 10, 0, 0, 1, 0, 0},
                 {"place ten is a hit", 9, 0, 0, 1, 1, 0.28906482631788788}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int items[13];
        real scores[13] = {(real)cases[i].score};
        RankSums sums = {0, 0, 0};
        for (int k = 0; k < 13; k++) items[k] = k && k <= cases[i].masked ? RIVAL_MASKED : k;
        for (int k = 1; k < 13; k++) scores[k] = k <= cases[i].above ? 2 : k <= cases[i].above + cases[i].equal;
        rank_add(&sums, scores, items, 12);
        expect(t, sums.hits == cases[i].hits && fabs(sums.gain - cases[i].gain) < 1e-15, cases[i].name, "%g, %.17g",
               sums.hits, sums.gain);
    }
}

// Three users who rated items 0 .. 2 of 8 in training. Item 3 is held out, which training does not know.
static void test_rivals(Tests* t) {
    enum { N = 27 };
    const int pair[] = {0, 0, 0, 1, 0, 2, 1, 0, 1, 1, 1, 2, 2, 0, 2, 1, 2, 2}, held_out[] = {3, 3, 3};
    int rivals[33], times[8], users[2][N], items[2][N], positives[9] = {0}, rated = 0, held = 0;
    real labels[2][N];
    Ratings r = {3, 8, 9};
    Batch all = {users[0], items[0], labels[0], N};
    ratings_bind(&r, xcalloc(1, ratings_bytes(&r)));
    memcpy(r.pair, pair, sizeof pair), memcpy(r.held_out, held_out, sizeof held_out);
    ratings_index(&r);
    case_begin(t, "rivals are distinct, duplicates masked, and unseen where asked for");
    for (int k = 0; k < 3 * 2; k++) {
        int pool = k % 2, count = pool == POOL_ALL ? 32 : 4;
        memset(times, 0, sizeof times);
        ratings_rivals(&r, k / 2, count, (EvalPool)pool, 1, rivals);
        for (int i = 0; i <= count; i++)
            if (rivals[i] != RIVAL_MASKED) times[rivals[i]]++;
        for (int i = 0; i < 8; i++) EXPECT_EQ(t, times[i], pool == POOL_ALL || i >= 3);
    }
    case_end(t);

    case_begin(t, "an epoch has each pair once, and negatives without a training rating");
    for (uint64_t epoch = 0; epoch < 9; epoch++) {
        ratings_batch(all, &r, epoch_draws(2, 1, epoch), 0, N);
        for (int b = 0; b < N; b++) {
            if (labels[0][b] == 1) positives[3 * users[0][b] + items[0][b]]++;
            else rated += items[0][b] < 3, held += items[0][b] == 3;
        }
    }
    for (int p = 0; p < 9; p++) EXPECT_EQ(t, positives[p], 9);
    EXPECT_EQ(t, rated, 0);
    EXPECT(t, held > 10);
    case_end(t);

    // 20 from number 5 on
    Context ctx;
    BatchLoader loader;
    EpochDraws draws = epoch_draws(2, 3, 4);
    memset(&ctx, 0, sizeof ctx);
    context_init(&ctx);
    batch_loader_open(&loader, &r, N, &ctx);
    Batch drawn = batch_draw(&loader, draws, 5, 20, &ctx);
    device_download(&ctx, users[1], drawn.users, 20 * sizeof(int));
    device_download(&ctx, items[1], drawn.items, 20 * sizeof(int));
    device_download(&ctx, labels[1], drawn.labels, 20 * sizeof(real));
    ratings_batch(all, &r, draws, 5, 20);
    expect_that(t,
                memcmp(users[0], users[1], 20 * sizeof(int)) == 0 &&
                    memcmp(items[0], items[1], 20 * sizeof(int)) == 0 &&
                    memcmp(labels[0], labels[1], 20 * sizeof(real)) == 0,
                "the device draws the host's samples");
    batch_loader_close(&loader);
    context_free(&ctx);
    free(r.pair);
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
    if (sizeof(real) == sizeof(float)) test_equalities(&t, middle_open);
#ifdef NCF_FUSED
    test_fused(&t, 0), test_fused(&t, 0.5);
#endif
    test_ranks(&t);
    test_rivals(&t);
    return tests_close(&t);
}
