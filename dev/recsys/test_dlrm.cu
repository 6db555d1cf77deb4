/* Tests of DLRM: golden numbers, finite differences (double build), equalities. With a GPU also its speed:
 *
 *     test_dlrm                 the tests
 *     test_dlrm losses          losses of 20 steps of a middle-sized model, to compare builds
 *     test_dlrm speed           milliseconds and kernels of a step of the published size */
#define NO_MAIN
#include "dev/recsys/train_dlrm.cu"

#include "dev/recsys/golden.h"
#include "dev/recsys/test_recommender.h"

typedef struct {
    Context ctx;
    Model m;
    Optimizer o;
    Batch batch;
} Bench;

// Write values, rounded to floatX, to device memory of floatX elements.
static floatX* floats_on_device(Context* ctx, const real* values, size_t n) {
    floatX* p = (floatX*)device_alloc(ctx, n * sizeof(floatX), "batch");
    HostView view = host_view_open(p, n, VIEW_FLOATX);
    memcpy(view.values, values, n * sizeof(real));
    host_view_write(ctx, &view);
    host_view_close(&view);
    return p;
}

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

// Parameters of the published configuration, and three columns of padding in the first layer.
static void test_published_size(Tests* t) {
    Model m;
    model_plan(&m, config_published(), 1);
    size_t tables = (26 * 100000 + 100 * 325) * (size_t)128, mlps = 171392 + 2198529 + 3 * 512;
    expect(t, m.buffers.table.parameters == tables + mlps, "published size", "%zu parameters, not %zu",
           m.buffers.table.parameters, tables + mlps);
    model_buffers_free_tables(&m.buffers);
}

// ---------------------------------------------------------------------------------------------------------
// The golden case

static Bench* golden_open(Interaction interaction) {
    enum { B = 6, NUMBERS = 5, PADDED = 8, TABLES = 4 };
    Config c = {NUMBERS, TABLES, {11, 12, 13, 14}, {2, {0, 16, 8}, 1}, {1, {0, 16}, 1}, interaction};
    Bench* b = bench_open(c, B);
    const TensorTable* table = &b->m.buffers.table;
    real* w = (real*)xcalloc(table->elements, sizeof *w);
    static const struct {
        const char* name;
        int id, columns;
    } fill[] = {{"bottom_mlp.0.weight", 10, NUMBERS},
                {"bottom_mlp.0.bias", 11, 1},
                {"bottom_mlp.1.weight", 12, 16},
                {"bottom_mlp.1.bias", 13, 1},
                {"top_mlp.0.bias", 15, 1},
                {"last.weight", 16, 16},
                {"last.bias", 17, 1},
                {"tables.0.weight", 0, 8},
                {"tables.1.weight", 1, 8},
                {"tables.2.weight", 2, 8},
                {"tables.3.weight", 3, 8},
                {"top_mlp.0.weight", 14, 24}};
    for (size_t i = 0; i < COUNT_OF(fill); i++)
        hash_fill(w, tensor_named(table, fill[i].name), fill[i].id, fill[i].columns);
    bench_write(b, w);
    real numbers[B * PADDED] = {0}, labels[B];
    int rows[B * TABLES];
    for (int n = 0; n < B; n++) {
        labels[n] = (5 * n + 2) % 3 == 0;
        for (int i = 0; i < NUMBERS; i++)
            numbers[n * PADDED + i] = (real)(2 * hash01(30, (uint32_t)(n * NUMBERS + i)) - 1);
        for (int t = 0; t < TABLES; t++)
            rows[n * TABLES + t] = b->m.first_row[t] + (7 * n + 3 * t + 1) % b->m.config.rows[t];
    }
    Batch batch = {floats_on_device(&b->ctx, numbers, COUNT_OF(numbers)), (int*)on_device(&b->ctx, rows, sizeof rows),
                   (real*)on_device(&b->ctx, labels, sizeof labels), B};
    b->batch = batch;
    free(w);
    return b;
}

static void test_golden(Tests* t) {
    Bench* b = golden_open(ALL_PAIRS);
    const TensorTable* table = &b->m.buffers.table;
    real* before = reals_of(&b->ctx, recommender_weights(&b->m.buffers, &b->o), table->elements);
    double loss_tol = loss_tolerance(), norm_tol = norm_tolerance();
    train_batch(&b->m, &b->o, &b->batch, 1, &b->ctx);
    expect_near(t, "golden: loss", bench_loss(b), 0.6813906302, loss_tol);
    real* after = reals_of(&b->ctx, recommender_weights(&b->m.buffers, &b->o), table->elements);
    static const struct {
        const char* name;
        double norm;
    } norms[] = {{"bottom_mlp.0.weight", 2.469957e-4},
                 {"top_mlp.0.weight", 1.9748275e-3},
                 {"last.weight", 2.55996427e-2},
                 {"tables.0.weight", 6.067118e-4},
                 {"tables.3.weight", 6.160236e-4}};
    for (size_t i = 0; i < COUNT_OF(norms); i++) {
        const Tensor* x = tensor_named(table, norms[i].name);
        char* name = xprintf("golden: norm of the gradient of %s", norms[i].name);
        double got = 0;
        if (x->offset < b->m.elements) got = gradient_norm(&b->m.buffers, norms[i].name, &b->ctx);
        for (size_t k = 0; k < x->size && x->offset >= b->m.elements; k++)
            after[x->offset + k] -= before[x->offset + k];
        if (x->offset >= b->m.elements) got = norm_of(after + x->offset, x->size);  // lr is 1
        // A table's gradient is a difference of weights of 0.1, which have 24 bits or, in double, 53.
        double limit = x->offset < b->m.elements ? norm_tol : fmax(norm_tol, sizeof(real) == 8 ? 0 : 1e-5);
        expect_near(t, name, got, norms[i].norm, limit * norms[i].norm + (sizeof(real) == 8 ? 5e-11 : 1e-8));
        free(name);
    }
    for (size_t s = 1; s < COUNT_OF(DLRM_LOSSES); s++) {
        train_batch(&b->m, &b->o, &b->batch, 1, &b->ctx);
        char* name = xprintf("golden: loss after %zu steps of SGD", s);
        expect_near(t, name, bench_loss(b), DLRM_LOSSES[s], loss_tol);
        free(name);
    }
    free(before), free(after);
    bench_close(b);
}

#ifdef REAL_DOUBLE
// The update with lr 1 is the negative gradient: of every tensor, against central differences of the loss.
static void test_finite_differences(Tests* t, Interaction interaction) {
    Bench* b = golden_open(interaction);
    real *w = (real*)b->m.buffers.params, *kept = reals_of(&b->ctx, w, b->m.buffers.table.elements);
    train_batch(&b->m, &b->o, &b->batch, 1, &b->ctx);
    real* moved = reals_of(&b->ctx, w, b->m.buffers.table.elements);
    memcpy(w, kept, b->m.buffers.table.elements * sizeof *w);
    for (int k = 0; k < b->m.buffers.table.count; k++) {
        const Tensor* x = &b->m.buffers.table.tensors[k];
        double worst = 0;
        for (size_t i = x->offset; i < x->offset + x->size; i++) {
            double step = 1e-5, above, below;
            w[i] = kept[i] + step;
            forward(&b->m, &b->batch, FORWARD, &b->ctx), above = bench_loss(b);
            w[i] = kept[i] - step;
            forward(&b->m, &b->batch, FORWARD, &b->ctx), below = bench_loss(b);
            w[i] = kept[i];
            worst = fmax(worst, fabs((above - below) / (2 * step) - (kept[i] - moved[i])));
        }
        char* name = xprintf("finite differences%s: %s", interaction == ALL_PAIRS ? "" : ", bottom pairs", x->name);
        expect_near(t, name, worst, 0, 1e-9);
        free(name);
    }
    free(kept), free(moved);
    bench_close(b);
}
#endif

// ---------------------------------------------------------------------------------------------------------
// A middle-sized model with skewed ids

static Bench* middle_open(void) {
    enum { B = 512, TABLES = 26, NUMBERS = 13 };
    Config c = {NUMBERS, TABLES, {0}, {2, {0, 64, 128}, 1}, {2, {0, 256, 128}, 1}};
    for (int t = 0; t < TABLES; t++) c.rows[t] = 40 + 13 * t;
    Bench* b = bench_open(c, B);
    real *w = (real*)xcalloc(b->m.buffers.table.elements, sizeof *w), *labels = (real*)xcalloc(B, sizeof *labels);
    real* numbers = (real*)xcalloc((size_t)B * (size_t)b->m.padded, sizeof *numbers);
    int* rows = (int*)xcalloc(B * TABLES, sizeof *rows);
    random_weights(&b->m, w, 7);
    bench_write(b, w);
    for (int n = 0; n < B; n++) {
        labels[n] = hash01(1, (uint32_t)n) < 0.3;
        for (int i = 0; i < NUMBERS; i++) numbers[n * b->m.padded + i] = (real)hash01(2, (uint32_t)(n * NUMBERS + i));
        for (int k = 0; k < TABLES; k++) {
            double u = hash01(3, (uint32_t)(n * TABLES + k));
            rows[n * TABLES + k] = b->m.first_row[k] + (int)(u * u * u * c.rows[k]);  // some rows are frequent
        }
    }
    Batch batch = {floats_on_device(&b->ctx, numbers, (size_t)B * (size_t)b->m.padded),
                   (int*)on_device(&b->ctx, rows, B * TABLES * sizeof *rows),
                   (real*)on_device(&b->ctx, labels, B * sizeof *labels), B};
    b->batch = batch;
    free(w), free(labels), free(numbers), free(rows);
    return b;
}

// Twenty steps; a checksum of all weights.
static uint64_t middle_steps(double* losses) {
    Bench* b = middle_open();
    for (int s = 0; s < 20; s++) {
        train_batch(&b->m, &b->o, &b->batch, 0.5, &b->ctx);
        losses[s] = bench_loss(b);
    }
    uint64_t bits = bits_of(&b->ctx, recommender_weights(&b->m.buffers, &b->o), b->m.buffers.table.elements);
    bench_close(b);
    return bits;
}

static void test_equalities(Tests* t) {
    double losses[20], again[20];
    uint64_t bits = middle_steps(losses);
    expect(t, losses[19] < losses[0] - 0.02, "twenty steps learn", "%g, then %g", losses[0], losses[19]);
#ifdef __CUDACC__
    expect_that(t, middle_steps(again) == bits && memcmp(losses, again, sizeof losses) == 0, "the same bits again");
#elif defined _OPENMP
    int usual = omp_get_max_threads();
    omp_set_num_threads(3);
    expect_that(t, middle_steps(again) == bits && memcmp(losses, again, sizeof losses) == 0,
                "the same bits again, with three threads");
    omp_set_num_threads(usual);
#endif
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// Speed

enum { SPEED_BATCHES = 130, SPEED_WARMUP = 20 };

static void speed(void) {
    enum { B = 32768 };
    Bench* b = bench_open(config_published(), B);
    const Config* c = &b->m.config;
    Context* ctx = &b->ctx;
    size_t ids = (size_t)B * (size_t)c->tables, n = (size_t)B * (size_t)b->m.padded;
    real *w = (real*)xcalloc(b->m.buffers.table.elements, sizeof *w), *numbers = (real*)xcalloc(n, sizeof *numbers);
    random_weights(&b->m, w, 7);
    bench_write(b, w);
    int *rows = (int*)xmalloc(SPEED_BATCHES * ids * sizeof *rows), *on_gpu;
    for (size_t k = 0; k < n; k++)
        numbers[k] = (int)(k % (size_t)b->m.padded) < c->numbers ? (real)hash01(1, (uint32_t)k) : 0;
    real* labels = (real*)xcalloc(B, sizeof *labels);
    for (int k = 0; k < B; k++) labels[k] = hash01(2, (uint32_t)k) < 0.25;
#pragma omp parallel for
    for (size_t k = 0; k < SPEED_BATCHES * ids; k++) {
        int t = (int)(k % (size_t)c->tables);
        uint32_t bits = philox((uint32_t)k, (uint32_t)(k >> 32), 0, 0, 99).v[0];
        rows[k] = b->m.first_row[t] + (int)((uint64_t)bits * (uint64_t)c->rows[t] >> 32);
    }
    on_gpu = (int*)on_device(ctx, rows, SPEED_BATCHES * ids * sizeof *rows);
    Batch in = {floats_on_device(ctx, numbers, n), on_gpu, (real*)on_device(ctx, labels, B * sizeof *labels), B};
    ctx->autotune = 1;
    cudaEvent_t start, stop;
    cudaCheck(cudaEventCreate(&start)), cudaCheck(cudaEventCreate(&stop));
    for (int s = 0; s < SPEED_BATCHES; s++) {
        in.rows = on_gpu + (size_t)s * ids;
        if (s == SPEED_WARMUP) cudaCheck(cudaEventRecord(start, ctx->stream));
        train_batch(&b->m, &b->o, &in, 0.1, ctx);
    }
    cudaCheck(cudaEventRecord(stop, ctx->stream));
    device_synchronize(ctx);
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, start, stop));
    uint64_t bits = bits_of(ctx, recommender_weights(&b->m.buffers, &b->o), b->m.buffers.table.elements);
    speed_report("dlrm", B, ms / (SPEED_BATCHES - SPEED_WARMUP), bench_loss(b), bits);
    KernelTrace* trace = speed_kernels_begin(ctx);
    train_batch(&b->m, &b->o, &in, 0.1, ctx);
    speed_kernels_end("dlrm", trace);
    bench_close(b);
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
    for (int i = 0; i < N; i++) s[i].score = 3;
    expect_near(t, "AUC of equal scores", area_under_curve(s, N), 0.5, 0);
    for (int i = 0; i < N; i++) s[i].score = s[i].label;
    expect_near(t, "AUC of the labels", area_under_curve(s, N), 1, 0);
    s[5].score = NAN;
    expect_that(t, isnan(area_under_curve(s, N)), "AUC with a NaN is NaN");
    for (int i = 0; i < N; i++) s[i].score = i, s[i].label = 1;
    expect_that(t, isnan(area_under_curve(s, N)), "AUC without a negative is NaN");
}

// Generated samples: ids by Zipf's law, numbers of unit variance, labels by the logit.
static void test_generated(Tests* t) {
    enum { N = 40000, ROWS = 50 };
    Clicks c, other;
    float numbers[CLICK_NUMBERS], again[CLICK_NUMBERS];
    int ids[CLICK_TABLES], found[ROWS] = {0}, in_range = 1;
    double logit, excess = 0, squares = 0, worst = 0;
    clicks_generate(&c, 8, ROWS, N, 1, 5), clicks_generate(&other, 8, ROWS, N, 1, 6);
    for (int n = 0; n < N; n++) {
        int label = clicks_sample(&c, (uint64_t)n, numbers, ids, &logit);
        for (int k = 0; k < 8; k++) in_range &= ids[k] >= 0 && ids[k] < ROWS;
        found[ids[3] % ROWS]++;
        excess += label - bce_sigmoid(logit), squares += (double)numbers[7] * (double)numbers[7];
    }
    expect_that(t, in_range, "generated ids are in range");
    for (int id = 0; id < ROWS; id++) {
        double p = log((id + 2.0) / (id + 1.0)) / log(ROWS + 1.0);
        worst = fmax(worst, fabs(found[id] - N * p) / sqrt(N * p * (1 - p)));
    }
    expect(t, worst < 4.5, "generated ids follow Zipf's law", "%.2f standard deviations", worst);
    // Variances of a label at most 1/4, of a square of a uniform number 4/5.
    expect_near(t, "generated labels have the logits' mean", excess / N, 0, 4.5 * 0.5 / sqrt((double)N));
    expect_near(t, "generated numbers have variance 1", squares / N, 1, 4.5 * sqrt(0.8 / (double)N));
    clicks_sample(&c, 9, numbers, ids, &logit), clicks_sample(&other, 9, again, ids, &logit);
    expect_that(t, memcmp(numbers, again, 13 * sizeof *numbers) != 0, "another seed gives other samples");
}

int main(int argc, char** argv) {
    static Tests t;
    if (argc > 1 && strcmp(argv[1], "losses") == 0) {
        double losses[20];
        middle_steps(losses);
        for (int s = 0; s < 20; s++) printf("dlrm loss %d %.9f\n", s, losses[s]);
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
    test_finite_differences(&t, ALL_PAIRS);
    test_finite_differences(&t, BOTTOM_PAIRS);
#endif
    if (sizeof(real) == sizeof(float)) test_equalities(&t);
    test_auc(&t);
    test_generated(&t);
    return tests_close(&t);
}
