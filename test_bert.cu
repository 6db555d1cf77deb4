/* Tests of train_bert.cu and apps/finetune_bert.cu as a whole: they are included here without their main().
 *
 *     ./test_bert                     golden numbers, equalities, finite differences (double build)
 *     ./test_bert batches PATTERN T COUNT SEED OUT     COUNT sequences as the trainer draws them, for
 *                                     dev/reference/compare_autocast.py
 *
 * The golden files and the script that made them are in dev/reference/. */
#define NO_MAIN
#include "apps/finetune_bert.cu"

typedef BertConfig Config;
#define config_read bert_config_read

// A model with its optimizer and one batch, without files or flags.
typedef struct {
    Context ctx;
    Model m;
    TaskModel task;  // instead of m where is_task is 1
    int is_task;
    Optimizer o;
    MlmLoader loader;
    MlmBatch batch;
    MlmInput in;
} Bench;

#include "dev/test/model_tests.h"

static const OptimizerSettings STEP = {
    .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-6, .weight_decay = 0.01, .max_norm = 1.0};

// `task`: -1 for pre-training, else fine-tuning. `most`: masked tokens of a batch, or outputs of the task.
static Bench* bench_open_as(Config config, int task, int most, int B, int T, int recompute, uint64_t seed,
                            OptimizerKind kind) {
    const int M = task < 0 ? most : B * (task == TASK_ANSWER ? SPAN_ENDS : 1);
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    ModelBuffers* buffers = task < 0 ? &b->m.buffers : &b->task.encoder.buffers;
    b->is_task = task >= 0;
    context_init(&b->ctx);
    if (task < 0) model_plan(&b->m, config, B, T, M, B, recompute);
    else task_plan(&b->task, config, (Task)task, most, B, T, recompute);
    model_buffers_alloc(buffers, &b->ctx);
    if (task >= 0) task_alloc(&b->task, &b->ctx);
    optimizer_init_shard(&b->o, &buffers->table, (UpdateSettings){.kind = kind, .master = WITH_MASTER},
                         tensors_updated(&buffers->table), &b->ctx);
    buffers->master = b->o.master;
    WeightRules rules = bert_weight_rules(&config);
    model_buffers_init(buffers, &b->o, &rules, seed, &b->ctx);
    buffers->dropout.seed = seed;
    mlm_batch_alloc(&b->batch, B, T, max_int(3, M / B));  // tiny_batch() masks up to 3 tokens, before tiny_targets()
    mlm_loader_open(&b->loader, B * T, M, B, &b->ctx);
    return b;
}

static void bench_load(Bench* b, const char* path) {
    WeightRules rules = bert_weight_rules(&b->m.config);
    model_buffers_read(&b->m.buffers, &b->o, path, &rules.file, &b->ctx);
}

static Model* bench_model(Bench* b) { return b->is_task ? &b->task.encoder : &b->m; }

static Bench* bench_open(Config config, int B, int T, int M, int recompute, uint64_t seed) {
    return bench_open_as(config, -1, M, B, T, recompute, seed, ADAMW);
}

static void bench_close(Bench* b) {
    mlm_loader_close(&b->loader);
    mlm_batch_free(&b->batch);
    optimizer_free(&b->o);
    if (b->is_task) task_free(&b->task);
    model_buffers_free(&bench_model(b)->buffers);
    matmul_plans_free(&b->ctx);
    context_free(&b->ctx);
    free(b);
}

static double bench_loss(Bench* b, int which) {
    real loss[STEP_LOSSES] = {0};
    if (b->is_task) device_download(&b->ctx, loss, b->task.a.loss, sizeof loss[0]);
    else device_download(&b->ctx, loss, b->m.a.loss, sizeof loss);
    return which < 0 ? (double)loss[0] + (double)loss[1] : (double)loss[which];
}

static MlmScales means(const MlmBatch* b) { return (MlmScales){.masked = 1.0 / b->masked, .next = 1.0 / b->count}; }

// Losses and gradients of the batch in step number `step`.
static void bench_train_as(Bench* b, uint64_t step, MlmScales scales, Mode mode) {
    Model* m = bench_model(b);
    m->buffers.dropout.is_on = 1, m->buffers.dropout.step = step;
    if (b->is_task) {
        forward_task(&b->task, &b->in, &b->ctx);
        task_loss(&b->task, &b->in, scales.masked, BACKWARD, mode, &b->ctx);
        backward_task(&b->task, &b->in, mode, &b->ctx);
    } else {
        forward(m, &b->in, &b->ctx);
        compute_loss(m, &b->in, scales, BACKWARD, mode, &b->ctx);
        backward(m, &b->in, mode, &b->ctx);
    }
    m->buffers.dropout.is_on = 0;
}

static void bench_train(Bench* b, uint64_t step) { bench_train_as(b, step, means(&b->batch), SET); }

// Append a sequence of n tokens and their types.
static void batch_add(MlmBatch* b, const int* tokens, const int* types, int n, int next_label) {
    int row = b->count ? b->cu_seqlens[b->count] : 0;
    b->cu_seqlens[b->count] = row;
    for (int i = 0; i < n; i++, row++) {
        b->tokens[row] = tokens[i], b->types[row] = types[i];
        b->sequence[row] = b->count, b->position[row] = i;
    }
    b->next_targets[b->count++] = next_label;
    b->cu_seqlens[b->count] = b->rows = row;
    b->max_length = max_int(b->max_length, n);
    b->sum_sq_len += (int64_t)n * n;
}

static void batch_mask(MlmBatch* b, int row, int target) {
    CHECK(b->masked < b->masked_room);
    b->masked_rows[b->masked] = row;
    b->targets[b->masked++] = target;
}

static void bench_take(Bench* b) { b->in = mlm_load(&b->loader, &b->batch, &b->ctx); }

// A batch of whole sequences with `masks` of the tokens from the third on.
static void bench_fill(Bench* b, int B, int T, int masks) {
    int tokens[1024] = {0}, types[1024] = {0};
    CHECK(T <= (int)COUNT_OF(tokens));
    for (int s = 0; s < B; s++) {
        batch_add(&b->batch, tokens, types, T, 0);
        for (int k = 0; k < masks; k++) batch_mask(&b->batch, s * T + 2 + k, k);
    }
    bench_take(b);
}

static void bench_step(Bench* b) {
    bench_train(b, 0);
    optimizer_step(&b->o, b->m.buffers.params, b->m.buffers.grads, STEP, NULL, NULL, &b->ctx);
    device_synchronize(&b->ctx);
}

// ---------------------------------------------------------------------------------------------------------
// A golden file of transformers

enum { GOLDEN_B = 3, GOLDEN_T = 13, GOLDEN_STEPS = 10 };

// The model in `directory` with the golden file's batch without its padding.
static Bench* golden_open(const char* directory, const SafeTensors* file, OptimizerKind kind) {
    int tokens[GOLDEN_B * GOLDEN_T], types[GOLDEN_B * GOLDEN_T], lengths[GOLDEN_B], next[GOLDEN_B], masked[32][3];
    Bench* b = bench_open_as(bert_config_read(named("%s/config.json", directory)), -1, GOLDEN_B * GOLDEN_T, GOLDEN_B,
                             GOLDEN_T, 0, 1, kind);
    bench_load(b, named("%s/model.safetensors", directory));
    golden_integers(file, "tokens", tokens, COUNT_OF(tokens));
    golden_integers(file, "types", types, COUNT_OF(types));
    golden_integers(file, "lengths", lengths, COUNT_OF(lengths));
    golden_integers(file, "next", next, COUNT_OF(next));
    int count = golden_integers(file, "masked", &masked[0][0], 3 * COUNT_OF(masked)) / 3;
    for (int s = 0; s < GOLDEN_B; s++)
        batch_add(&b->batch, tokens + s * GOLDEN_T, types + s * GOLDEN_T, lengths[s], next[s]);
    for (int i = 0; i < count; i++)
        batch_mask(&b->batch, b->batch.cu_seqlens[masked[i][0]] + masked[i][1], masked[i][2]);
    bench_take(b);
    return b;
}

// Ten steps of an optimizer on the golden batch.
static void test_golden_steps(Tests* t, const char* directory, const SafeTensors* file, OptimizerKind kind) {
    Bench* b = golden_open(directory, file, kind);
    real got[2 * GOLDEN_STEPS];  // losses and norms
    for (int step = 0; step < GOLDEN_STEPS; step++) {
        bench_step(b);
        got[step] = (real)bench_loss(b, -1);
        device_download(&b->ctx, &got[GOLDEN_STEPS + step], b->o.norm, sizeof(real));
    }
    report_golden(t, "golden", kind == LAMB ? "lamb" : "adamw", file, got, COUNT_OF(got), golden_tolerance());
    report_padding(t, "golden", &b->m.buffers, &b->ctx);
    bench_close(b);
}

static void test_golden(Tests* t, const char* directory) {
    // In double the file's own precision is met: the padding there is absent here, and nothing else differs.
    const double tolerance = sizeof(real) == 8 ? 1e-10 : golden_tolerance();
    SafeTensors file;
    safetensors_open(&file, named("%s/golden.safetensors", directory));
    Bench* b = golden_open(directory, &file, ADAMW);
    Model* m = &b->m;
    evaluate_batch(m, &b->in, means(&b->batch), SET, &b->ctx);
    real *next = device_values(&b->ctx, m->a.next_logits, 2 * GOLDEN_B, VIEW_REAL),
         loss[2] = {(real)bench_loss(b, 0), (real)bench_loss(b, 1)};
    report_golden_logits(t, "golden", &file, m, (size_t)b->in.masked, tolerance, &b->ctx);
    report_golden(t, "golden", "next_logits", &file, next, 2 * GOLDEN_B, tolerance);
    report_golden(t, "golden", "loss", &file, loss, 2, tolerance);
    bench_train(b, 0);
    report_golden_gradients(t, "golden", &file, &m->buffers, tolerance, &b->ctx);
    free(next);
    bench_close(b);
    test_golden_steps(t, directory, &file, ADAMW);
    test_golden_steps(t, directory, &file, LAMB);
    safetensors_close(&file);
}

// The names of a plain BertModel, without "bert." before them, and old ones of LayerNorm: the same weights.
static void test_other_names(Tests* t, const char* directory) {
    static const char* const names[][2] = {{"\"bert.", "     \""},  // of the same length, as the header's must stay
                                           {"LayerNorm.weight\"", "LayerNorm.gamma\" "},
                                           {"LayerNorm.bias", "LayerNorm.beta"}};
    Config config = bert_config_read(named("%s/config.json", directory));
    Bench *b = bench_open(config, 1, 8, 1, 0, 1), *other = bench_open(config, 1, 8, 1, 0, 9);
    char *folder = make_scratch_directory("test_bert"), *path = xprintf("%s/model.safetensors", folder);
    size_t bytes, n = b->m.buffers.table.elements;
    char* file = read_file(named("%s/model.safetensors", directory), SIZE_MAX, &bytes, FAILED);
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        CHECK(strstr(file + 8, names[i][0]));
        for (char* at = file + 8; (at = strstr(at, names[i][0])) != NULL; at++)
            memcpy(at, names[i][1], strlen(names[i][1]));
    }
    CHECK(write_file(path, file, bytes) == 0);
    bench_load(b, named("%s/model.safetensors", directory)), bench_load(other, path);
    real *want = device_values(&b->ctx, b->m.buffers.params, n, VIEW_FLOATX),
         *got = device_values(&other->ctx, other->m.buffers.params, n, VIEW_FLOATX);
    report(t, memcmp(want, got, n * sizeof(real)) != 0, 0, "the names of a plain BertModel");
    free(want), free(got), free(file);
    bench_close(b), bench_close(other);
    remove_directory(folder);
    free(path), free(folder);
}

// ---------------------------------------------------------------------------------------------------------
// Equalities

static Config tiny_config(double dropout) {
    Config c = bert_config_from_descriptor("L=2,C=36,NH=3,V=53,T=19,F=100", 0);
    c.hidden_dropout = c.attention_dropout = c.classifier_dropout = dropout;
    c.init_range = 0.2;  // far from zero, so that every path of the gradient matters
    return c;
}

enum { TINY_COUNT = 4, TINY_T = 17 };

// Sequences first .. first + count - 1 of the four tiny ones, of lengths 17, 9, 12 and 8, with 3, 1, 2 and 1 masks.
static void tiny_batch(MlmBatch* b, int first, int count) {
    static const int lengths[TINY_COUNT] = {17, 9, 12, 8}, masks[TINY_COUNT] = {3, 1, 2, 1};
    b->count = b->rows = b->masked = b->max_length = 0;
    b->sum_sq_len = 0, b->first = first;
    for (int s = first; s < first + count; s++) {
        int tokens[TINY_T], types[TINY_T];
        for (int i = 0; i < lengths[s]; i++) {
            tokens[i] = (int)(philox((uint32_t)i, (uint32_t)s, 0, 0, 5).v[0] % 53);
            types[i] = i >= lengths[s] / 2;
        }
        batch_add(b, tokens, types, lengths[s], s % 2);
        for (int i = 0; i < masks[s]; i++)
            batch_mask(b, b->cu_seqlens[b->count - 1] + 2 + 3 * i, (11 * s + 7 * i) % 53);
    }
}

// Loss and gradients of the four sequences, in micro-batches of `count` each; the losses follow the gradients.
static real* gradients(int count, int recompute, size_t* n) {
    Bench* b = bench_open(tiny_config(0.15), TINY_COUNT, TINY_T, TINY_COUNT * TINY_T, recompute, 5);
    MlmScales scales = {.masked = 1.0 / 7, .next = 1.0 / TINY_COUNT};
    for (int first = 0; first < TINY_COUNT; first += count) {
        tiny_batch(&b->batch, first, count);
        bench_take(b);
        bench_train_as(b, 3, scales, first == 0 ? SET : ADD);
    }
    size_t elements = b->m.buffers.table.elements;
    real* result =
        (real*)xrealloc(device_values(&b->ctx, b->m.buffers.grads, elements, VIEW_REAL), (elements + 2) * sizeof(real));
    device_download(&b->ctx, result + elements, b->m.a.loss, 2 * sizeof(real));
    *n = elements + 2;
    bench_close(b);
    return result;
}

static void test_equalities(Tests* t) {
    size_t n;
    real* plain = gradients(TINY_COUNT, 0, &n);
    for (int recompute = 1; recompute <= 2; recompute++) {
        real* other = gradients(TINY_COUNT, recompute, &n);
        report(t, memcmp(other, plain, n * sizeof(real)) != 0, 0, "recompute %d gives the same bits", recompute);
        free(other);
    }
    // Another number of rows may get another algorithm, whose sums have another order; floatX rounds them.
    real* alone = gradients(1, 0, &n);
    double tolerance = GPU_BUILD && sizeof(floatX) == sizeof(real) ? 1e-5 : cut_tolerance(1e-2);
    report(t, largest_error(alone, plain, n), tolerance, "sequences packed into one batch equal each alone");
    free(alone), free(plain);
}

static floatX* after_attention(const Model* m, int l) { return m->a.h[l].ln1.v; }

static void test_dropout(Tests* t) {
    Config config = config_of(
        "{\"model_type\": \"bert\", \"num_hidden_layers\": 2, \"num_attention_heads\": 3, \"hidden_size\": 48, "
        "\"intermediate_size\": 100, \"max_position_embeddings\": 19, \"vocab_size\": 53, \"initializer_range\": 0.2, "
        "\"hidden_dropout_prob\": 0.1, \"attention_probs_dropout_prob\": 0.6}");
    Bench* b = bench_open(config, TINY_COUNT, TINY_T, TINY_COUNT * TINY_T, 0, 7 | (uint64_t)3 << 40);
    tiny_batch(&b->batch, 1, 3);  // number 1 of the step on
    bench_take(b);
    for (uint64_t step = 2; step < 4; step++) {
        bench_train(b, step);
        DropoutCheck c = {
            0.1, 0.6, 0.1, FULL, b->in.sequences, b->in.sequences, b->m.a.ln0, {input_of, after_attention}};
        c.host.sequence = b->batch.sequence, c.host.position = b->batch.position;
        report_dropout(t, &b->m, &c, &b->ctx);
    }
    bench_close(b);
}

static void test_initial_values(Tests* t) {
    Bench* b = bench_open(bert_config_from_descriptor("L=2,C=96,NH=3,V=257,T=64", 0), 1, 8, 1, 0, 4);
    report_initial_values(t, "BERT", &b->m.buffers, 2, &b->ctx);
    report_places(t, "BERT", &b->m.buffers.table);
    bench_close(b);
}

static void test_epsilon(Tests* t) {
    Config config = tiny_config(0);
    config.eps = LARGE_EPSILON;
    Bench* b = bench_open(config, TINY_COUNT, TINY_T, TINY_COUNT * TINY_T, 0, 5);
    Acts* a = &b->m.a;
    tiny_batch(&b->batch, 0, TINY_COUNT);
    bench_take(b);
    evaluate_batch(&b->m, &b->in, means(&b->batch), SET, &b->ctx);
    report_epsilon(t, "the embeddings' layernorm", a->ln0_stats.rstd, b->batch.rows, &b->ctx);
    report_epsilon(t, "attention's layernorm", a->h[0].ln1_stats.rstd, b->batch.rows, &b->ctx);
    report_epsilon(t, "the MLP's layernorm", a->h[1].ln2_stats.rstd, b->batch.rows, &b->ctx);
    report_epsilon(t, "the head's layernorm", a->lnt_stats.rstd, b->batch.masked, &b->ctx);
    bench_close(b);
}

// ---------------------------------------------------------------------------------------------------------
// What a step launches

static void test_ops(Tests* t) {
    static const char forward_ops[] =
        "matmul_forward attention_forward matmul_forward residual_layernorm_forward matmul_gelu_forward matmul_forward "
        "residual_layernorm_forward ";
    static const char backward_ops[] =
        "residual_layernorm_backward matmul_backward_weight matmul_gelu_backward_input matmul_backward_weight "
        "matmul_backward_input residual_layernorm_backward matmul_backward_weight matmul_backward_input "
        "attention_backward matmul_backward_weight matmul_backward_input ";
    enum { B = 2, T = 64, M = 8 };
    const StepOps want = {forward_ops, backward_ops, 3, 24, 18};
    Bench* b = bench_open(bert_config_from_descriptor("L=3,C=128,NH=2,V=53,T=64", 0), B, T, M, 0, 5);
    bench_fill(b, B, T, M / B);
    report_step_ops(t, "a step", b, &want);
    bench_close(b);
}

// ---------------------------------------------------------------------------------------------------------
// The plan of the memory against what a step uses

static void test_memory(Tests* t) {
    static const struct {
        const char* model;
        int B, T, M;
        double dropout;
        OptimizerKind kind;
        AttentionPath attention;
    } cases[] = {
        {"L=2,C=36,NH=3,V=53,T=19,F=100", 4, 17, 12, 0.1, ADAMW, FLASH},
        {"L=1,C=128,NH=2,V=3001,T=64", 3, 64, 60, 0.1, LAMB, FLASH},
        {"L=2,C=64,NH=1,V=61,T=200", 2, 200, 8, 0, LAMB, MATERIALIZED},
        {"L=1,C=768,NH=12,V=300,T=32", 1, 32, 5, 0.1, LAMB, FLASH},
        {"L=2,C=64,NH=2,V=61,T=40,F=100", 2, 40, 8, 0, NORMUON, FLASH},
#ifdef __CUDACC__
        {"L=1,C=1024,NH=16,V=30522,T=128", 64, 128, 64 * 20, 0.1, LAMB, FLASH},
#endif
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int B = cases[i].B, T = cases[i].T, M = cases[i].M;
        Config config = bert_config_from_descriptor(cases[i].model, 0);
        config.hidden_dropout = config.attention_dropout = cases[i].dropout;
        Bench* b = bench_open_as(config, -1, M, B, T, 0, 3, cases[i].kind);
        device_set_attention(&b->ctx, cases[i].attention);
        UpdateSettings alone = {.kind = cases[i].kind, .master = WITH_MASTER, .ranks = 1};
        MemoryPlan plan = model_buffers_memory(&b->m.buffers, alone, &b->ctx);
        bench_fill(b, B, T, M / B);
        bench_step(b);
        report_memory(t, named("memory of %s B=%d T=%d", cases[i].model, B, T), &plan, &b->ctx);
        if (cases[i].kind == NORMUON) report_muon_step(t, &b->m.buffers, &b->o, &b->ctx);
        bench_close(b);
    }
}

// An evaluation takes the memory that the plan gives, which has neither gradients nor moments, and finds the same
// losses.
static void test_forward_alone(Tests* t) {
    enum { B = 4, T = 17, MASKED = 3 };
    const UpdateSettings settings = {.kind = LAMB, .master = WITH_MASTER, .ranks = 1};
    Config config = bert_config_from_descriptor("L=3,C=36,NH=3,V=53,T=19,F=100", 0);
    double losses[2];
    for (int i = 0; i < 2; i++) {
        Bench* b = bench_open_as(config, -1, B * MASKED, B, T, i ? FORWARD_ONLY : RECOMPUTE_NOTHING, 3, LAMB);
        MemoryPlan plan = model_buffers_memory(&b->m.buffers, settings, &b->ctx);
        bench_fill(b, B, T, MASKED);
        evaluate_batch(&b->m, &b->in, means(&b->batch), SET, &b->ctx);
        losses[i] = bench_loss(b, -1);
        if (i == 1) report_memory(t, "memory of forward passes only", &plan, &b->ctx);
        bench_close(b);
    }
    report(t, losses[0] > 0 ? fabs(losses[1] - losses[0]) : INFINITY, 0, "forward passes only: the same loss");
}

// ---------------------------------------------------------------------------------------------------------

#ifdef REAL_DOUBLE
// Targets of a task in place of masks.
static void tiny_targets(MlmBatch* b, Task task, int outputs) {
    b->masked = 0;
    for (int s = 0; s < b->count; s++)
        for (int k = 0; k < (task == TASK_ANSWER ? 2 : 1); k++)
            batch_mask(b, b->cu_seqlens[s],
                       task == TASK_ANSWER ? 1 + s + 3 * k
                       : outputs == 1      ? squared_error_bits(0.5 - s)
                                           : s % 3);
}

static double train_again(void* bench) {
    Bench* b = (Bench*)bench;
    bench_train(b, 3);
    return bench_loss(b, bench_model(b)->config.next ? -1 : 0);
}

static void test_finite_differences(Tests* t, double dropout, Gelu gelu, int next, int task, int outputs, int tied) {
    static const char* const names[] = {"masked loss", "classes", "answers"};  // of task -1, 0, 1
    Config config = tiny_config(dropout);
    config.tied = tied;
    config.gelu = gelu;
    config.next = next;
    int most = task < 0 ? TINY_COUNT * TINY_T : outputs;
    Bench* b = bench_open_as(config, task, most, TINY_COUNT, TINY_T, 0, 7, ADAMW);
    Model* m = bench_model(b);
    tiny_batch(&b->batch, 0, TINY_COUNT);
    if (task >= 0) tiny_targets(&b->batch, (Task)task, outputs);
    shake_parameters(&m->buffers);
    // Padding's embedding is not trained by its look-up: that is no derivative, so there is none in the batch.
    for (int i = 0; i < b->batch.rows; i++) b->batch.tokens[i] += b->batch.tokens[i] == m->config.padding;
    bench_take(b);
    report_finite_differences(t,
                              named("dropout %g, %s, %s%s", dropout, gelu == GELU_TANH ? "tanh" : "erf",
                                    next ? "both losses" : names[task + 1], tied ? "" : ", untied"),
                              &m->buffers, train_again, b);
    bench_close(b);
}
#endif

// ---------------------------------------------------------------------------------------------------------

// Write sequences as a run with this -t and --seed reads them.
static int write_batches(const char* pattern, int T, int count, uint64_t seed, const char* out) {
    MlmRecipe recipe = {.max_predictions = max_int(1, (int)rint(0.15 * T)), .mask_fraction = 0.15};
    recipe.next_sentence = 1, recipe.pack = 1, recipe.short_fraction = 0.1;
    MlmData data;
    MlmBatch all;
    mlm_open(&data, pattern, T, recipe, seed);
    mlm_batch_alloc(&all, count, T, recipe.max_predictions);
    mlm_batch_build(&all, &data, 0, count);
    const struct {
        const char* name;
        const int* values;
        int n;
    } parts[] = {{"tokens", all.tokens, all.rows},
                 {"types", all.types, all.rows},
                 {"cu_seqlens", all.cu_seqlens, all.count + 1},
                 {"masked_rows", all.masked_rows, all.masked},
                 {"targets", all.targets, all.masked},
                 {"next_targets", all.next_targets, all.count}};
    SafeTensorsWriter w;
    safetensors_writer_create(&w, out);
    for (size_t i = 0; i < COUNT_OF(parts); i++) {
        uint64_t n = (uint64_t)parts[i].n;
        safetensors_writer_add(&w, parts[i].name, "I32", 1, &n);
    }
    safetensors_writer_begin(&w);
    for (size_t i = 0; i < COUNT_OF(parts); i++)
        safetensors_writer_append(&w, parts[i].values, (size_t)parts[i].n * sizeof(int));
    if (safetensors_writer_finish(&w) != 0) die(FAILED, "%s: %s", out, strerror(errno));
    mlm_batch_free(&all);
    mlm_close(&data);
    return DONE;
}

int main(int argc, char** argv) {
    Tests t;
    tests_open(&t);
    if (argc == 7 && strcmp(argv[1], "batches") == 0)
        return write_batches(argv[2], (int)strtol(argv[3], NULL, 10), (int)strtol(argv[4], NULL, 10),
                             strtoull(argv[5], NULL, 10), argv[6]);
    if (argc != 1) die(USAGE, "usage: test_bert [batches PATTERN T COUNT SEED OUT.safetensors]");
    test_golden(&t, "dev/reference/golden_bert");
    test_other_names(&t, "dev/reference/golden_bert");
    test_equalities(&t);
    test_dropout(&t);
    test_initial_values(&t);
    test_epsilon(&t);
    test_ops(&t);
    test_memory(&t);
    test_forward_alone(&t);
#ifdef REAL_DOUBLE
    test_finite_differences(&t, 0.15, GELU_ERF, 1, -1, 0, 1);
    test_finite_differences(&t, 0, GELU_TANH, 1, -1, 0, 1);
    test_finite_differences(&t, 0.15, GELU_ERF, 0, -1, 0, 1);
    test_finite_differences(&t, 0.15, GELU_ERF, 1, -1, 0, 0);
    test_finite_differences(&t, 0.15, GELU_ERF, 0, TASK_CLASSIFY, 3, 1);
    test_finite_differences(&t, 0, GELU_TANH, 0, TASK_CLASSIFY, 3, 1);
    test_finite_differences(&t, 0.15, GELU_ERF, 0, TASK_CLASSIFY, 1, 1);
    test_finite_differences(&t, 0.15, GELU_ERF, 0, TASK_ANSWER, 2, 1);
#endif
    return tests_close(&t);
}
