/* Tests of DLRM: golden numbers, finite differences (double build), equalities. With a GPU also its speed:
 *
 *     test_dlrm                 the tests
 *     test_dlrm speed           milliseconds and kernels of a step of the published size */
#define NO_MAIN
#include "dev/recsys/train_dlrm.cu"

#include "dev/recsys/test_recommender.h"

static void bench_step(Bench* b, uint64_t step) {
    (void)step;
    train_batch(&b->m, &b->o, &b->batch, b->lr, &b->ctx);
}

// With a learning rate of 1 the update is the negative gradient.
static real* bench_gradients(Bench* b, const real* before) {
    real* g = bench_weights(b);
    for (size_t i = 0; i < b->m.buffers.table.elements; i++) g[i] = before[i] - g[i];
    return g;
}

// ---------------------------------------------------------------------------------------------------------
// The golden case; golden.py prints the losses

static const double DLRM_LOSSES[] = {0.68139063018393, 0.66109198303498, 0.65005644568234, 0.64401277252029,
                                     0.64068689819818, 0.63883396523366, 0.63780080986686, 0.63722447175617,
                                     0.63690155326316, 0.63671256245981};

static Bench* golden_open(void) {
    enum { B = 6, NUMBERS = 5, PADDED = 8, TABLES = 4 };
    Config c = {NUMBERS, TABLES, {11, 12, 13, 14}, {2, {0, 16, 8}, 1}, {1, {0, 16}, 1}};
    Bench* b = bench_open(c, B);
    const TensorTable* table = &b->m.buffers.table;
    real* w = (real*)xcalloc(table->elements, sizeof *w);
    // Of each tensor in the table's order: number of the hash tensor, and columns without the padding.
    static const int ids[] = {10, 11, 12, 13, 14, 15, 16, 17, 0, 1, 2, 3},
                     columns[] = {NUMBERS, 1, 16, 1, 24, 1, 16, 1, 8, 8, 8, 8};
    for (int k = 0; k < table->count; k++) hash_fill(w, &table->tensors[k], ids[k], columns[k]);
    bench_write(b, w);
    floatX numbers[B * PADDED];
    real labels[B];
    int rows[B * TABLES];
    for (int n = 0; n < B; n++) {
        labels[n] = (5 * n + 2) % 3 == 0;
        for (int i = 0; i < PADDED; i++)
            numbers[n * PADDED + i] = (floatX)(real)(i < NUMBERS ? 2 * hash01(30, (uint32_t)(n * NUMBERS + i)) - 1 : 0);
        for (int t = 0; t < TABLES; t++)
            rows[n * TABLES + t] = b->m.first_row[t] + (7 * n + 3 * t + 1) % b->m.config.rows[t];
    }
    Batch batch = {(floatX*)on_device(&b->ctx, numbers, sizeof numbers),
                   (real*)on_device(&b->ctx, labels, sizeof labels), (int*)on_device(&b->ctx, rows, sizeof rows), B};
    b->batch = batch, b->lr = 1;
    free(w);
    return b;
}

// The norms of tables are of differences of weights of 0.1, which have 24 bits or, in double, 53.
static const GoldenNorm GOLDEN_NORMS[] = {{"bottom_mlp.0.weight", 2.469957e-4},
                                          {"top_mlp.0.weight", 1.9748275e-3},
                                          {"last.weight", 2.55996427e-2},
                                          {"tables.0.weight", 6.067118e-4},
                                          {"tables.3.weight", 6.160236e-4}};

#ifdef REAL_DOUBLE
static double forward_loss(Bench* b) {
    forward(&b->m, &b->batch, FORWARD, &b->ctx);
    return bench_loss(b);
}
#endif

// ---------------------------------------------------------------------------------------------------------
// A middle-sized model with skewed ids, and the published one

// Random weights, and `count` batches one after the other. With `is_skewed` some rows are frequent.
static Bench* random_open(Config config, int B, int count, int is_skewed) {
    Bench* b = bench_open(config, B);
    const Config* c = &b->m.config;
    Context* ctx = &b->ctx;
    size_t ids = (size_t)count * (size_t)B * (size_t)c->tables, n = (size_t)B * (size_t)b->m.padded;
    real *w = (real*)xcalloc(b->m.buffers.table.elements, sizeof *w),
         *labels = (real*)xcalloc((size_t)B, sizeof *labels);
    floatX* numbers = (floatX*)xmalloc(n * sizeof *numbers);
    int* rows = (int*)xmalloc(ids * sizeof *rows);
    random_weights(&b->m, w, 7);
    bench_write(b, w);
    for (size_t k = 0; k < n; k++)
        numbers[k] = (floatX)(real)((int)(k % (size_t)b->m.padded) < c->numbers ? hash01(1, (uint32_t)k) : 0);
    for (int k = 0; k < B; k++) labels[k] = hash01(2, (uint32_t)k) < 0.25;
#pragma omp parallel for
    for (size_t k = 0; k < ids; k++) {
        int t = (int)(k % (size_t)c->tables);
        uint64_t bits = philox((uint32_t)k, (uint32_t)(k >> 32), 0, 0, 99).v[0];
        if (is_skewed) bits = (bits * bits >> 32) * bits >> 32;
        rows[k] = b->m.first_row[t] + (int)(bits * (uint64_t)c->rows[t] >> 32);
    }
    Batch batch = {(floatX*)on_device(ctx, numbers, n * sizeof *numbers),
                   (real*)on_device(ctx, labels, (size_t)B * sizeof *labels),
                   (int*)on_device(ctx, rows, ids * sizeof *rows), B};
    b->batch = batch;
    free(w), free(numbers), free(rows), free(labels);
    return b;
}

static Bench* middle_open(void) {
    Config c = {13, 26, {0}, {2, {0, 64, 128}, 1}, {2, {0, 256, 128}, 1}};
    for (int t = 0; t < c.tables; t++) c.rows[t] = 40 + 13 * t;
    Bench* b = random_open(c, 512, 1, 1);
    b->lr = 0.5;
    return b;
}

#ifdef __CUDACC__
static void batch_next(Batch* batch) { batch->rows += (size_t)batch->B * 26; }

static Bench* speed_open(void) {
    Bench* b = random_open(config_published(), 32768, SPEED_BATCHES, 0);
    b->lr = 0.1;
    return b;
}
#endif

// ---------------------------------------------------------------------------------------------------------
// Data and evaluation

// Against the definition: the share of pairs of a positive and a negative in the right order, a tie counting half.
static void test_auc(Tests* t) {
    enum { N = 60 };
    Scored s[N];
    double right = 0, pairs = 0;
    for (int i = 0; i < N; i++) s[i].score = (i * 7) % 11, s[i].label = (i * i) % 3 == 1 && i % 4 != 0;
    for (int i = 0; i < N; i++)
        for (int k = 0; k < N; k++)
            if (s[i].label > s[k].label)
                right += s[i].score > s[k].score ? 1 : s[i].score == s[k].score ? 0.5 : 0, pairs++;
    expect_near(t, "AUC with ties", area_under_curve(s, N), right / pairs, 1e-15);
    s[5].score = NAN;
    expect_that(t, isnan(area_under_curve(s, N)), "AUC with a NaN is NaN");
    for (int i = 0; i < N; i++) s[i].score = i, s[i].label = 1;
    expect_that(t, isnan(area_under_curve(s, N)), "AUC without a negative is NaN");
}

// Generated samples: ids by Zipf's law, labels by the logit.
static void test_generated(Tests* t) {
    enum { N = 40000, ROWS = 50 };
    Clicks c;
    float numbers[CLICK_NUMBERS];
    int ids[CLICK_TABLES], found[ROWS] = {0};
    double logit, excess = 0, worst = 0;
    clicks_generate(&c, 8, ROWS, N, 1, 5);
    for (int n = 0; n < N; n++) {
        excess += clicks_sample(&c, (uint64_t)n, numbers, ids, &logit) - bce_sigmoid(logit);
        found[ids[3] % ROWS]++;
    }
    for (int id = 0; id < ROWS; id++) {
        double p = log((id + 2.0) / (id + 1.0)) / log(ROWS + 1.0);
        worst = fmax(worst, fabs(found[id] - N * p) / sqrt(N * p * (1 - p)));
    }
    expect(t, worst < 4.5, "generated ids follow Zipf's law", "%.2f standard deviations", worst);
    expect_near(t, "generated labels have the logits' mean", excess / N, 0, 4.5 * 0.5 / sqrt((double)N));
}

int main(int argc, char** argv) {
    static Tests t;
    if (bench_speed(argc, argv, "dlrm")) return DONE;
    tests_open(&t);
    // With three columns of padding in the first layer.
    test_published_size(&t, (26 * 100000 + 100 * 325) * (size_t)128 + 171392 + 2198529 + 3 * 512);
    test_golden(&t, golden_open(), DLRM_LOSSES, GOLDEN_NORMS, COUNT_OF(GOLDEN_NORMS), sizeof(real) == 8 ? 5e-11 : 1e-8);
#ifdef REAL_DOUBLE
    test_finite_differences(&t, golden_open(), forward_loss);
#endif
    if (sizeof(real) == sizeof(float)) test_equalities(&t, middle_open);
    test_auc(&t);
    test_generated(&t);
    return tests_close(&t);
}
