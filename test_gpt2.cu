/* Tests of train_gpt2.cu as a whole: it is included here without its main(). Golden files of transformers, equalities,
 * finite differences (double build). The golden files and the script that made them are in dev/reference/. */
#define NO_MAIN
#include "train_gpt2.cu"

typedef Gpt2Config Config;
#define config_read gpt2_config_read

// A model with its optimizer and one batch, without files or flags.
typedef struct {
    Context ctx;
    Model m;
    LmData data;
    Optimizer o;
} Bench;

#include "dev/test/model_tests.h"

static const OptimizerSettings ADAMW_STEP = {
    .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .max_norm = 1.0};

// `fp8`: --fp8.
static Bench* bench_open_fp8(Config config, int B, int T, int recompute, int fp8, uint64_t seed) {
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    ModelBuffers* buffers = &b->m.buffers;
    WeightRules rules = gpt2_weight_rules(&config);
    context_init(&b->ctx);
    model_plan(&b->m, config, B, T, recompute, 0);
    buffers->fp8.is_wanted = fp8, buffers->fp8.keeps_x = recompute == RECOMPUTE_NOTHING;
    fp8_state_plan(&buffers->fp8, &buffers->table, b->m.N);
    model_buffers_alloc(buffers, &b->ctx);
    lm_data_alloc(&b->data, B, T, NO_CUTS, &b->ctx);
    optimizer_init_shard(&b->o, &buffers->table, (UpdateSettings){.kind = ADAMW, .master = WITH_MASTER},
                         tensors_updated(&buffers->table), &b->ctx);
    buffers->master = b->o.master;
    model_buffers_init(buffers, &b->o, &rules, seed, &b->ctx);
    buffers->dropout.seed = seed;
    return b;
}

static Bench* bench_open(Config config, int B, int T, int recompute, uint64_t seed) {
    return bench_open_fp8(config, B, T, recompute, 0, seed);
}

static void bench_load(Bench* b, const char* path) {
    WeightRules rules = gpt2_weight_rules(&b->m.config);
    model_buffers_read(&b->m.buffers, &b->o, path, &rules.file, &b->ctx);
}

static void bench_close(Bench* b) {
    optimizer_free(&b->o);
    lm_data_close(&b->data);
    model_buffers_free(&b->m.buffers);
    matmul_plans_free(&b->ctx);
    context_free(&b->ctx);
    free(b);
}

// Losses and gradients of the sequences in b->data, which are number first and up of step number `step`.
static void train_batch(Bench* b, uint64_t step, int first, double scale, Mode mode) {
    Model* m = &b->m;
    Batch batch = lm_data_batch(&b->data, m->B, first);
    m->buffers.dropout.is_on = 1, m->buffers.dropout.step = step;
    forward(m, &batch, &b->ctx);
    forward_head(m, m->a.lnf, batch.s.rows, &b->ctx);
    compute_loss(m, &batch, scale, BACKWARD, mode, &b->ctx);
    backward(m, &batch, mode, &b->ctx);
    m->buffers.dropout.is_on = 0;
}

// Logits and losses of the sequences in b->data.
static void evaluate_bench(Bench* b, double scale) {
    Batch batch = lm_data_batch(&b->data, b->m.B, 0);
    evaluate_batch(&b->m, &batch, scale, SET, &b->ctx);
}

static void bench_batch(Bench* b, const int* inputs, const int* targets) {
    device_upload(&b->ctx, b->data.inputs, inputs, (size_t)b->m.N * sizeof(int));
    device_upload(&b->ctx, b->data.targets, targets, (size_t)b->m.N * sizeof(int));
    device_synchronize(&b->ctx);
}

static void random_tokens(int* tokens, int n, int V, uint64_t seed) {
    for (int i = 0; i < n; i++) tokens[i] = (int)(philox((uint32_t)i, 0, 0, 0, seed).v[0] % (uint32_t)V);
}

static void bench_random(Bench* b, uint64_t seed) {
    int* tokens = (int*)xmalloc(2 * (size_t)b->m.N * sizeof(int));
    random_tokens(tokens, 2 * b->m.N, b->m.config.V, seed);
    bench_batch(b, tokens, tokens + b->m.N);
    free(tokens);
}

// A step of training, but for the ranks and the schedule.
static void bench_step(Bench* b) {
    train_batch(b, 0, 0, 1.0 / b->m.N, SET);
    optimizer_step(&b->o, b->m.buffers.params, b->m.buffers.grads, ADAMW_STEP, NULL, NULL, &b->ctx);
    device_synchronize(&b->ctx);
}

// Logits, loss, the gradient of every tensor and ten AdamW steps, as transformers and torch computed them in float64.
static void test_golden(Tests* t, const char* directory) {
    enum { STEPS = 10 };
    const double tolerance = golden_tolerance();
    SafeTensors file;
    safetensors_open(&file, named("%s/golden.safetensors", directory));
    const SafeTensor* tokens = safetensors_find(&file, "tokens");
    int B = (int)tokens->shape[0], T = (int)tokens->shape[1], N = B * T;
    Bench* b = bench_open(gpt2_config_read(named("%s/config.json", directory)), B, T, 0, 1);
    Model* m = &b->m;
    real losses[STEPS], norms[STEPS], loss;
    int* ids = (int*)xmalloc(2 * (size_t)N * sizeof(int));
    bench_load(b, named("%s/model.safetensors", directory));
    if (golden_integers(&file, "tokens", ids, (size_t)N) + golden_integers(&file, "targets", ids + N, (size_t)N) !=
        2 * N)
        die(FAILED, "%s: the golden file has other tokens", directory);
    bench_batch(b, ids, ids + N);
    evaluate_bench(b, 1.0 / N);
    loss = (real)model_loss(m, &b->ctx);
    report_golden_logits(t, directory, &file, m, (size_t)N, tolerance, &b->ctx);
    report_golden(t, directory, "loss", &file, &loss, 1, tolerance);
    train_batch(b, 0, 0, 1.0 / N, SET);
    report_golden_gradients(t, directory, &file, &m->buffers, tolerance, &b->ctx);
    for (int step = 0; step < STEPS; step++) {
        bench_step(b);
        losses[step] = (real)model_loss(m, &b->ctx);
        device_download(&b->ctx, &norms[step], b->o.norm, sizeof(real));
    }
    report_golden(t, directory, "losses", &file, losses, STEPS, tolerance);
    report_golden(t, directory, "norms", &file, norms, STEPS, tolerance);
    report_padding(t, directory, &m->buffers, &b->ctx);
    free(ids), safetensors_close(&file);
    bench_close(b);
}

// ---------------------------------------------------------------------------------------------------------
// Equalities

static Config tiny_config(int tied, double dropout) {
    Config c = gpt2_config_from_descriptor("L=2,C=36,NH=3,V=53,T=19,F=100", 0);
    c.tied = tied;
    c.embedding_dropout = c.attention_dropout = c.residual_dropout = dropout;
    c.init_range = 0.2;  // far from zero, so that every path of the gradient matters
    return c;
}

static const char* tied_name(int tied) { return tied ? "tied" : "untied"; }

// The gradients of one batch, in micro-batches, with recomputation.
static real* gradients(Config config, int micro_batches, int recompute) {
    enum { B = 4, T = 13 };
    Bench* b = bench_open(config, B / micro_batches, T, recompute, 5);
    int all[2 * B * T], n = b->m.N;
    random_tokens(all, 2 * B * T, config.V, 9);
    for (int k = 0; k < micro_batches; k++) {
        bench_batch(b, all + k * n, all + B * T + k * n);
        train_batch(b, 3, k * (B / micro_batches), 1.0 / (B * T), k == 0 ? SET : ADD);
    }
    real* result = device_values(&b->ctx, b->m.buffers.grads, b->m.buffers.table.elements, VIEW_REAL);
    bench_close(b);
    return result;
}

// The number of elements of a model's tensors.
static size_t elements_of(Config config) {
    Model plan;
    model_plan(&plan, config, 1, 1, 0, 0);
    size_t n = plan.buffers.table.elements;
    model_buffers_free_tables(&plan.buffers);
    return n;
}

static void report_bits(Tests* t, const real* got, const real* want, size_t n, int tied, const char* what) {
    report(t, memcmp(got, want, n * sizeof(real)) != 0, 0, "%s: %s the same bits", tied_name(tied), what);
}

static void test_equalities(Tests* t, int tied) {
    Config config = tiny_config(tied, 0.15);
    size_t n = elements_of(config);
    real *plain = gradients(config, 1, 0), *four = gradients(config, 4, 0);
    for (int recompute = 1; recompute <= 2; recompute++) {
        real* other = gradients(config, 1, recompute);
        report_bits(t, other, plain, n, tied, named("recompute %d gives", recompute));
        free(other);
    }
    // With dropout on: masks depend on a sequence's number in the whole step, not on how the step is cut.
    report(t, largest_error(four, plain, n), cut_tolerance(1e-3), "%s: four micro-batches equal one", tied_name(tied));
    free(plain), free(four);
}

static void test_initial_values(Tests* t, int tied) {
    Config config = gpt2_config_from_descriptor("L=3,C=96,NH=3,V=257,T=64", 0);
    config.tied = tied;
    Bench* b = bench_open(config, 1, 1, 0, 4);
    report_initial_values(t, tied_name(tied), &b->m.buffers, 3, &b->ctx);
    report_places(t, tied_name(tied), &b->m.buffers.table);
    bench_close(b);
}

static void test_epsilon(Tests* t) {
    Config config = tiny_config(1, 0);
    config.eps = LARGE_EPSILON;
    Bench* b = bench_open(config, 2, 13, 0, 5);
    Acts* a = &b->m.a;
    bench_random(b, 9);
    evaluate_bench(b, 1.0 / b->m.N);
    report_epsilon(t, "the first layernorm", a->h[0].ln1_stats.rstd, b->m.N, &b->ctx);
    report_epsilon(t, "ln_2", a->h[0].ln2_stats.rstd, b->m.N, &b->ctx);
    report_epsilon(t, "ln_1", a->h[1].ln1_stats.rstd, b->m.N, &b->ctx);
    report_epsilon(t, "ln_f", a->lnf_stats.rstd, b->m.N, &b->ctx);
    bench_close(b);
}

// ---------------------------------------------------------------------------------------------------------
// Dropout by the rates of config.json

enum { DROPOUT_B = 3, DROPOUT_T = 13, DROPOUT_N = DROPOUT_B * DROPOUT_T, DROPOUT_FIRST = 5 };

static floatX* after_attention(const Model* m, int l) { return m->a.h[l].mid; }

static void test_dropout(Tests* t) {
    Config config =
        config_of("{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_head\": 3, \"n_embd\": 48, \"n_positions\": 19, "
                  "\"vocab_size\": 53, "
                  "\"initializer_range\": 0.2, \"embd_pdrop\": 0.1, \"attn_pdrop\": 0.3, \"resid_pdrop\": 0.6}");
    int layout[DROPOUT_B + 1 + 2 * DROPOUT_N], *sequence = layout + DROPOUT_B + 1, *position = sequence + DROPOUT_N;
    Bench* b = bench_open(config, DROPOUT_B, DROPOUT_T, 0, 7 | (uint64_t)3 << 40);
    Sequences s = lm_data_batch(&b->data, DROPOUT_B, DROPOUT_FIRST).s;
    DropoutCheck c = {0.1, 0.3, 0.6, CAUSAL, s, s, b->m.a.embedded, {residual_into, after_attention}};
    sequences_uniform(layout, sequence, position, DROPOUT_B, DROPOUT_T);
    c.host.sequence = sequence, c.host.position = position;
    bench_random(b, 9);
    for (uint64_t step = 2; step < 4; step++) {
        train_batch(b, step, DROPOUT_FIRST, 1.0 / DROPOUT_N, SET);
        report_dropout(t, &b->m, &c, &b->ctx);
    }
    bench_close(b);
}

// ---------------------------------------------------------------------------------------------------------
// Documents that attention keeps apart

enum { DOCUMENT_B = 4, DOCUMENT_T = 13, DOCUMENT_N = DOCUMENT_B * DOCUMENT_T, END_OF_TEXT = 52 };

// inputs, then targets: 9 documents of 1 to 13 tokens, some over a whole row.
static void document_tokens(int* tokens, int V) {
    static const int begins[] = {4, 5, 13, 30, 38, 51};
    random_tokens(tokens, 2 * DOCUMENT_N, V - 1, 9);
    for (size_t i = 0; i < COUNT_OF(begins); i++) tokens[begins[i]] = END_OF_TEXT;
}

// Gradients, then the loss, in micro-batches of `rows`; documents are kept apart.
static real* document_gradients(Config config, const int* tokens, int rows) {
    Bench* b = bench_open(config, rows, DOCUMENT_T, 0, 5);
    Model* m = &b->m;
    size_t ints = documents_ints(m->N), n = m->buffers.table.elements;
    int *host = (int*)xmalloc(ints * sizeof(int)), *device = (int*)device_alloc(&b->ctx, ints * sizeof(int), "batch");
    Documents found, placed;
    documents_place(&found, host, m->N), documents_place(&placed, device, m->N);
    for (int row = 0; row < DOCUMENT_B; row += rows) {
        const int* inputs = tokens + row * DOCUMENT_T;
        documents_find(&found, inputs, rows, DOCUMENT_T, END_OF_TEXT);
        device_upload(&b->ctx, device, host, ints * sizeof(int));
        Sequences s = {.rows = m->N, .count = found.count, .max_length = found.longest, .is_numbered_by_row = 1};
        s.sum_sq_len = found.sum_sq_len, s.host_cu_seqlens = found.cu_seqlens, s.cu_seqlens = placed.cu_seqlens;
        s.sequence = placed.document, s.position = placed.position;
        b->data.parts = s;
        bench_batch(b, inputs, inputs + DOCUMENT_N);
        train_batch(b, 3, row, 1.0 / DOCUMENT_N, row == 0 ? SET : ADD);
    }
    real* result = device_values(&b->ctx, m->buffers.grads, n, VIEW_REAL);
    result = (real*)xrealloc(result, (n + 1) * sizeof(real));
    result[n] = (real)model_loss(m, &b->ctx);
    free(host), device_free(device, ints * sizeof(int));
    bench_close(b);
    return result;
}

#ifndef __CUDACC__
// The same from each document alone, with the positions that it has in its row.
static real* documents_alone(Config config, const int* tokens) {
    real* sums = NULL;
    for (int begin = 0, end; begin < DOCUMENT_N; begin = end) {
        for (end = begin + 1; end % DOCUMENT_T != 0 && tokens[end] != END_OF_TEXT;) end++;
        Bench* b = bench_open(config, 1, end - begin, 0, 5);
        Model* m = &b->m;
        size_t n = m->buffers.table.elements;
        for (int i = 0; i < m->N; i++) b->data.layout[2 + m->N + i] += begin % DOCUMENT_T;
        bench_batch(b, tokens + begin, tokens + DOCUMENT_N + begin);
        train_batch(b, 3, 0, 1.0 / DOCUMENT_N, SET);
        if (!sums) sums = (real*)xcalloc(n + 1, sizeof(real));
        for (size_t i = 0; i < n; i++) sums[i] += m->buffers.grads[i];
        sums[n] += (real)model_loss(m, &b->ctx);
        bench_close(b);
    }
    return sums;
}
#endif

static void test_documents(Tests* t, int tied) {
    Config config = tiny_config(tied, 0), dropped = tiny_config(tied, 0.15);
    config.C = dropped.C = 48;  // heads of 16 channels, which every kind of attention takes
    int tokens[2 * DOCUMENT_N];
    size_t n = elements_of(config);
    document_tokens(tokens, config.V);
#ifndef __CUDACC__
    real *apart = document_gradients(config, tokens, DOCUMENT_B), *alone = documents_alone(config, tokens);
    report(t, largest_error(apart, alone, n + 1), sizeof(real) == 8 ? 1e-10 : 1e-5,
           "%s: loss and gradients of packed documents are those of each alone", tied_name(tied));
    free(apart), free(alone);
#endif
    // Dropout's masks do not depend on how many documents there are in the micro-batches before.
    real *one = document_gradients(dropped, tokens, DOCUMENT_B), *cut = document_gradients(dropped, tokens, 1);
    report(t, largest_error(cut, one, n), cut_tolerance(1e-3),
           "%s: documents in 4 micro-batches drop what they drop in one batch", tied_name(tied));
    free(one), free(cut);
}

// ---------------------------------------------------------------------------------------------------------
// Loss scaling and master weights

// A model that trains on one batch.
static Bench* overfit_open(MasterWeights master, double scale, LossScaleKind kind, int growth_interval) {
    Bench* b = bench_open(tiny_config(1, 0.1), 2, 13, 0, 5);
    LossScale state = {.scale = (real)scale};
    LossScaleRule rule = {.kind = kind, .growth_interval = growth_interval};
    if (master == NO_MASTER) {
        optimizer_free(&b->o);
        optimizer_init_shard(&b->o, &b->m.buffers.table, (UpdateSettings){.kind = ADAMW, .master = master},
                             tensors_updated(&b->m.buffers.table), &b->ctx);
        b->m.buffers.master = b->o.master;
    }
    optimizer_set_loss_scale(&b->o, state, rule, &b->ctx);
    b->m.buffers.loss_scale = &b->o.loss_scale->scale;
    bench_random(b, 9);
    return b;
}

// One step, number `step` of the masks; `planted` becomes one of the gradients unless it is 0. Returns the loss.
static double overfit_step(Bench* b, int step, double planted) {
    Model* m = &b->m;
    OptimizerSettings adamw = ADAMW_STEP;
    adamw.lr = 1e-2, adamw.rounding = rng_stream(5, (uint64_t)step, 0, SITE_ROUNDING);
    real value = (real)planted;
    train_batch(b, (uint64_t)step, 0, 1.0 / m->N, SET);
    if (planted != 0) device_upload(&b->ctx, m->buffers.grads + m->buffers.table.elements / 2, &value, sizeof value);
    optimizer_step(&b->o, m->buffers.params, m->buffers.grads, adamw, NULL, NULL, &b->ctx);
    return model_loss(m, &b->ctx);
}

// The parameters and the moments, `n` numbers; free() them.
static real* overfit_state(Bench* b, size_t* n) {
    size_t elements = b->m.buffers.table.elements, more = optimizer_buffers(WITH_MASTER) * elements;
    *n = elements + more;
    real *params = device_values(&b->ctx, b->m.buffers.params, elements, VIEW_FLOATX),
         *rest = device_values(&b->ctx, b->o.m, more, VIEW_REAL);
    params = (real*)xrealloc(params, *n * sizeof(real));
    memcpy(params + elements, rest, more * sizeof(real));
    free(rest);
    return params;
}

static void test_loss_scaling(Tests* t) {
    const int is_fp16 = strcmp(FLOATX_NAME, "F16") == 0;
    size_t n;
    // Powers of two change no bit where gradients have the exponents for it.
    Bench* plain = overfit_open(WITH_MASTER, 1, LOSS_SCALE_FIXED, 0);
    Bench* scaled = overfit_open(WITH_MASTER, 1024, LOSS_SCALE_DYNAMIC, 2);
    for (int step = 0; step < 5; step++) overfit_step(plain, step, 0), overfit_step(scaled, step, 0);
    real *want = overfit_state(plain, &n), *got = overfit_state(scaled, &n);
    double error = largest_error(got, want, n), tolerance = 1e-6;
    if (is_fp16) tolerance = 0.12;  // what vanishes without a scale moves a parameter by two learning rates a step
    report(t, error, tolerance, "five steps with loss scales 1024 to 4096 equal those without");
    LossScale state = optimizer_loss_scale(&scaled->o, &scaled->ctx);
    report(t, fabs((double)state.scale - 4096), 0, "the loss scale has doubled twice");
    report(t, abs((int)state.good - 1) + abs((int)state.updates - 5), 0, "and counts five updates");
    free(want), free(got);

    // An infinite gradient: the step is skipped. It changes nothing, not even the optimizer's count, except that the
    // scale is halved.
    for (int bad = 0; bad < 2; bad++) {
        real* before = overfit_state(scaled, &n);
        state = optimizer_loss_scale(&scaled->o, &scaled->ctx);
        overfit_step(scaled, 5, bad ? (double)NAN : -INFINITY);
        LossScale after = optimizer_loss_scale(&scaled->o, &scaled->ctx);
        real* left = overfit_state(scaled, &n);
        report(t, memcmp(before, left, n * sizeof(real)) != 0, 0, "%s among the gradients skips the step",
               bad ? "NaN" : "infinity");
        report(t, fabs((double)after.scale - (double)state.scale / 2), 0, "and halves the loss scale");
        report(t, after.good + fabs((double)(after.updates - state.updates)), 0, "and is no update");
        free(before), free(left);
    }
    bench_close(plain), bench_close(scaled);
}

// Without master weights training works. In full precision there is no difference to see.
static void test_no_master(Tests* t) {
    Bench* with = overfit_open(WITH_MASTER, 1, LOSS_SCALE_FIXED, 0);
    Bench* without = overfit_open(NO_MASTER, 1, LOSS_SCALE_FIXED, 0);
    double first = 0, last = 0, exact = 0;
    for (int step = 0; step < 40; step++) {
        last = overfit_step(without, step, 0);
        exact = overfit_step(with, step, 0);
        if (step == 0) first = last;
    }
    report(t, !without->o.master && last < first / 2 ? fabs(last - exact) : INFINITY, first / 10,
           "without master weights the loss falls as it does with them");
    bench_close(with), bench_close(without);
}

// ---------------------------------------------------------------------------------------------------------
// What a step launches

static void test_ops(Tests* t, int recompute) {
    static const char forward_ops[] =
        "matmul_forward attention_forward matmul_forward residual_layernorm_forward matmul_gelu_forward matmul_forward "
        "residual_layernorm_forward ";
    static const char backward_ops[] =
        "matmul_backward_weight matmul_gelu_backward_input matmul_backward_weight matmul_backward_input "
        "residual_layernorm_backward matmul_backward_weight matmul_backward_input attention_backward "
        "matmul_backward_weight matmul_backward_input residual_layernorm_backward ";
    static const char recomputing_ops[] =
        "gelu_forward layernorm_forward matmul_backward_weight matmul_gelu_backward_input matmul_backward_weight "
        "matmul_backward_input residual_layernorm_backward matmul_backward_weight matmul_backward_input "
        "attention_backward layernorm_forward matmul_backward_weight matmul_backward_input "
        "residual_layernorm_backward ";
    const int more = recompute ? 3 : 0;
    const StepOps want = {forward_ops, recompute ? recomputing_ops : backward_ops, 3, 10, 18 + more};
    Bench* b = bench_open(gpt2_config_from_descriptor("L=3,C=128,NH=2,V=53,T=64", 0), 2, 64, recompute, 5);
    bench_random(b, 5);
    report_step_ops(t, recompute ? "recompute 2" : "a step", b, &want);
    bench_close(b);
}

// ---------------------------------------------------------------------------------------------------------
// The plan of the memory against what a step uses

static void test_memory(Tests* t) {
    const int paths = 1 + GPU_BUILD;  // the CPU has one attention
    // Attention, the head or a block needs the most scratch; sizes that are multiples of nothing.
    static const struct {
        Config config;
        int B, T, recompute, fp8;
    } cases[] = {
        {{2, 2, 32, 128, 257, 64, 1, GELU_TANH, 1e-5, 0.02, 0.1, 0.1, 0.1}, 1, 64, 0, 0},
        {{1, 3, 48, 192, 61, 160, 0, GELU_TANH, 1e-5, 0.02, 0, 0, 0}, 3, 150, 1, 0},
        {{3, 1, 65, 77, 3001, 40, 1, GELU_ERF, 1e-5, 0.02, 0, 0.1, 0}, 5, 33, 2, 0},
        {{1, 12, 768, 3072, 300, 32, 1, GELU_TANH, 1e-5, 0.02, 0, 0, 0}, 2, 32, 0, 0},
        {{2, 2, 32, 128, 257, 64, 1, GELU_TANH, 1e-5, 0.02, 0.1, 0.1, 0.1}, 1, 64, 0, 1},
        {{1, 3, 48, 192, 61, 160, 0, GELU_TANH, 1e-5, 0.02, 0, 0, 0}, 3, 150, 1, 1},
#ifdef __CUDACC__
        {{1, 12, 768, 3072, 50257, 1024, 1, GELU_TANH, 1e-5, 0.02, 0.1, 0.1, 0.1}, 8, 1024, 0, 0},
        {{1, 12, 768, 3072, 50257, 1024, 1, GELU_TANH, 1e-5, 0.02, 0.1, 0.1, 0.1}, 8, 1024, 0, 1},
#endif
    };
    const int has_fp8 = !GPU_BUILD || strcmp(FLOATX_NAME, "BF16") == 0;
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (int path = FLASH; path < FLASH + paths && (has_fp8 || !cases[i].fp8); path++) {
            Bench* b = bench_open_fp8(cases[i].config, cases[i].B, cases[i].T, cases[i].recompute, cases[i].fp8, 3);
            device_set_attention(&b->ctx, (AttentionPath)path);
            UpdateSettings alone = {.kind = ADAMW, .master = WITH_MASTER, .ranks = 1};
            MemoryPlan plan = model_buffers_memory(&b->m.buffers, alone, &b->ctx);
            bench_random(b, 5);
            fp8_state_begin_step(&b->m.buffers.fp8);
            bench_step(b);
            const char* what = named("memory of case %zu, attention path %d", i, path);
            report_memory(t, what, &plan, &b->ctx);
            bench_close(b);
        }
}

// An evaluation takes the memory that the plan gives, which has neither gradients nor moments, and finds the same
// losses.
static void test_forward_alone(Tests* t, int tied) {
    const UpdateSettings settings = {.kind = ADAMW, .master = WITH_MASTER, .ranks = 1};
    real* losses[2];
    size_t N = 0;
    for (int i = 0; i < 2; i++) {
        Bench* b = bench_open(tiny_config(tied, 0.15), 4, 13, i ? FORWARD_ONLY : RECOMPUTE_NOTHING, 3);
        MemoryPlan plan = model_buffers_memory(&b->m.buffers, settings, &b->ctx);
        N = (size_t)b->m.N;
        bench_random(b, 5);
        evaluate_bench(b, 1);
        losses[i] = device_values(&b->ctx, b->m.a.losses, N, VIEW_REAL);
        if (i == 1) report_memory(t, "memory of forward passes only", &plan, &b->ctx);
        bench_close(b);
    }
    report_bits(t, losses[1], losses[0], N, tied, "forward passes only give");
    free(losses[0]), free(losses[1]);
}

// ---------------------------------------------------------------------------------------------------------

#ifdef REAL_DOUBLE
static double train_again(void* bench) {
    Bench* b = (Bench*)bench;
    train_batch(b, 3, 0, 1.0 / b->m.N, SET);
    return model_loss(&b->m, &b->ctx);
}

static void test_finite_differences(Tests* t, int tied, double dropout, Gelu gelu) {
    Config config = tiny_config(tied, dropout);
    config.gelu = gelu;
    Bench* b = bench_open(config, 2, 13, 0, 7);
    bench_random(b, 21);
    shake_parameters(&b->m.buffers);
    report_finite_differences(t,
                              named("%s, dropout %g, %s", tied_name(tied), dropout, gelu == GELU_TANH ? "tanh" : "erf"),
                              &b->m.buffers, train_again, b);
    bench_close(b);
}
#endif

// ---------------------------------------------------------------------------------------------------------

static void test_muon_step(Tests* t) {
    Bench* b = bench_open(tiny_config(0, 0), 2, 13, 0, 5);
    bench_random(b, 9);
    train_batch(b, 0, 0, 1.0 / b->m.N, SET);
    report_muon_step(t, &b->m.buffers, &b->o, &b->ctx);
    bench_close(b);
}

int main(void) {
    Tests t;
    tests_open(&t);
    test_golden(&t, "dev/reference/golden_gpt2_tied");
    test_golden(&t, "dev/reference/golden_gpt2_untied");
    for (int tied = 0; tied < 2; tied++) test_equalities(&t, tied);
    test_dropout(&t);
    for (int tied = 0; tied < 2; tied++) test_documents(&t, tied);
    for (int tied = 0; tied < 2; tied++) test_initial_values(&t, tied);
    test_epsilon(&t);
    test_loss_scaling(&t);
    test_no_master(&t);
    test_muon_step(&t);
    for (int recompute = 0; recompute <= 2; recompute += 2) test_ops(&t, recompute);
    test_memory(&t);
    for (int tied = 0; tied < 2; tied++) test_forward_alone(&t, tied);
#ifdef REAL_DOUBLE
    test_finite_differences(&t, 1, 0.15, GELU_TANH);
    test_finite_differences(&t, 0, 0.15, GELU_TANH);
    test_finite_differences(&t, 1, 0, GELU_ERF);
#endif
    return tests_close(&t);
}
