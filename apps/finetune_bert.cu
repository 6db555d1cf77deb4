/* Fine-tune any pre-trained BERT, ours or Hugging Face's, to classify texts or to answer questions, on the CPU (gcc) or
 * the GPU (nvcc). train_bert.cu has the encoder. This file has the heads, their losses, and the run.
 *
 *   classify   logits [S, K] = output(dropout(tanh(pooler(first row of each sequence))))   K classes; K = 1: regression
 *   answer     logits [N, 2] = output(x): two softmaxes over a sequence's rows, for the answer's start and its end
 *
 * x [N, C] is the encoder's output: N tokens in S sequences. The loss is the mean cross-entropy over all targets, one
 * per sequence for classify and two for answer. For regression it is the mean squared error. K is padded to Kp, a
 * multiple of 8, so that rows of logits are aligned to 16 bytes.
 *
 * Source: Devlin et al., "BERT", 2018, section 4; dropout as in Hugging Face's BertForSequenceClassification. */
#ifndef NO_MAIN
#define NO_MAIN  // include only the model of train_bert.cu
#define FINETUNE_MAIN
#endif
#include "train_bert.cu"

#include "apps/tune/span.h"
#include "apps/tune/squared_error.h"
#include "apps/tune/tanh.h"
#include "apps/tune/task_evaluation.h"  // scores
#include "apps/tune/tasks.h"            // flags and examples of the tasks
#include "llmc/ops/dropout.h"

// ---------------------------------------------------------------------------------------------------------
// Parameters and activations: the encoder's, then the head's

typedef struct {
    Params p;
    Linear output;
} TaskParams;

typedef struct {
    Grads g;
    LinearGrads output;
} TaskGrads;

typedef struct {
    Acts a;
    floatX *first, *pooled, *work;  // [S, C], classify only
    floatX* logits;
    real *losses, *loss;  // per target; [1] their sum
} TaskActs;

typedef struct {
    Model encoder;
    Task task;
    int K, Kp;  // outputs; columns of the logits, padded
    TaskParams p;
    TaskGrads g;
    TaskActs a;
    int* ints;             // on the device: cu_seqlens, sequence and position of first_rows
    Sequences first_rows;  // of a micro-batch, each its own sequence, for dropout masks
} TaskModel;

enum { DIM_K = DIMS, DIM_KP, DIM_ROWS, TASK_DIMS };

// clang-format off
static const TensorRow TASK_ROWS[][2] = {  // in the order of Task
    {{"classifier.weight", offsetof(TaskParams, output.w), {DIM_K, DIM_C}, OWN, DIM_KP, INIT_NORMAL, 1},
     {"classifier.bias",   offsetof(TaskParams, output.b), {DIM_K},        OWN, DIM_KP, INIT_ZERO,   0}},
    {{"qa_outputs.weight", offsetof(TaskParams, output.w), {DIM_K, DIM_C}, OWN, DIM_KP, INIT_NORMAL, 1},
     {"qa_outputs.bias",   offsetof(TaskParams, output.b), {DIM_K},        OWN, DIM_KP, INIT_ZERO,   0}},
};
// clang-format on

// ---------------------------------------------------------------------------------------------------------
// Forward

// Dropout for the pooled first rows of a micro-batch.
static Dropout pooled_dropout(TaskModel* m, const MlmInput* in) {
    const Model* e = &m->encoder;
    Sequences s = {.rows = in->sequences.count,
                   .count = in->sequences.count,
                   .max_length = 1,
                   .sum_sq_len = in->sequences.count,
                   .first = in->sequences.first};
    s.cu_seqlens = m->ints, s.sequence = m->ints + e->S + 1, s.position = m->ints + 2 * e->S + 1;
    m->first_rows = s;
    double p = e->config.classifier_dropout;
    return dropout_of(e->buffers.dropout, p, 0, SITE_DROPOUT_POOLED, &m->first_rows);
}

static void forward_task(TaskModel* m, const MlmInput* in, Context* ctx) {
    const floatX* x = input_of(&m->encoder, m->encoder.config.L);
    TaskActs* a = &m->a;
    int S = in->sequences.count, C = m->encoder.config.C;
    forward_encoder(&m->encoder, in, ctx);
    if (m->task == TASK_ANSWER) {
        matmul_forward(a->logits, x, m->p.output, in->sequences.rows, C, m->Kp, SET, ctx);
        return;
    }
    gather_forward(a->first, x, in->sequences.cu_seqlens, S, C, ctx);
    matmul_forward(a->pooled, a->first, m->encoder.p.pooler, S, C, C, SET, ctx);
    tanh_forward(a->pooled, a->pooled, (size_t)S * (size_t)C, ctx);
    dropout_forward(a->work, a->pooled, S, C, pooled_dropout(m, in), ctx);
    matmul_forward(a->logits, a->work, m->p.output, S, C, m->Kp, SET, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Losses

// `mode` sets or adds to m->a.loss, the sum of the losses times `scale`. BACKWARD also replaces the logits by their
// gradient, multiplied by the loss scale.
static void task_loss(TaskModel* m, const MlmInput* in, double scale, Direction direction, Mode mode, Context* ctx) {
    floatX* logits = m->a.logits;
    Losses losses = {.each = m->a.losses, .sum = m->a.loss, .scale = scale, .mode = mode};
    const Sequences* s = &in->sequences;
    const real* loss_scale = m->encoder.buffers.loss_scale;
    const int *targets = in->targets, S = s->count, is_forward = direction == FORWARD;
    scope_at(ctx, direction, -1);
    if (m->task == TASK_ANSWER && is_forward) span_forward(losses, logits, targets, s, m->Kp, ctx);
    else if (m->task == TASK_ANSWER) span_backward(losses, logits, targets, loss_scale, s, m->Kp, ctx);
    else if (m->K == 1) squared_error(losses, logits, targets, loss_scale, S, m->Kp, direction, ctx);
    else if (is_forward) classifier_forward(losses, logits, targets, S, m->K, m->Kp, ctx);
    else classifier_backward(losses, logits, targets, loss_scale, S, m->K, m->Kp, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Backward. `mode` selects how parameter gradients are written: SET in a step's first micro-batch, ADD in the others.

// Backpropagate from the gradient of the logits to all parameters, after forward_task(). For classify, `work`
// still holds the output layer's input.
static void backward_task(TaskModel* m, const MlmInput* in, Mode mode, Context* ctx) {
    Model* e = &m->encoder;
    TaskActs* a = &m->a;
    const floatX* x = input_of(e, e->config.L);
    int S = in->sequences.count, N = in->sequences.rows, C = e->config.C;
    if (m->task == TASK_ANSWER) {
        matmul_backward_weight(m->g.output, a->logits, x, N, C, m->Kp, mode, ctx);
        matmul_backward_input(e->a.dx, a->logits, m->p.output.w, N, C, m->Kp, SET, ctx);
    } else {
        matmul_backward_weight(m->g.output, a->logits, a->work, S, C, m->Kp, mode, ctx);
        matmul_backward_input(a->work, a->logits, m->p.output.w, S, C, m->Kp, SET, ctx);
        dropout_backward(a->work, a->work, S, C, pooled_dropout(m, in), ctx);
        tanh_backward(a->work, a->work, a->pooled, (size_t)S * (size_t)C, ctx);
        matmul_backward_weight(e->g.pooler, a->work, a->first, S, C, C, mode, ctx);
        matmul_backward_input(a->pooled, a->work, e->p.pooler.w, S, C, C, SET, ctx);
        gather_backward(e->a.dx, a->pooled, in->sequences.cu_seqlens, S, N, C, SET, ctx);
    }
    backward_encoder(e, in, mode, mode, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Memory

// Ints on the device for first_rows, in addition to the micro-batch.
static size_t task_ints(const TaskModel* m) { return m->task == TASK_CLASSIFY ? 3 * (size_t)m->encoder.S + 1 : 0; }

// Fill the tables for micro-batches of at most B sequences of at most T tokens. Allocates only the tables.
static void task_plan(TaskModel* m, BertConfig config, Task task, int K, int B, int T, int recompute) {
    int dims[TASK_DIMS], is_answer = task == TASK_ANSWER, M = is_answer ? B * T : B;
    memset(m, 0, sizeof *m);
    encoder_plan(&m->encoder, config, B, T, M, B, recompute, dims);
    m->task = task, m->K = K, m->Kp = (int)round_up((size_t)K, 8);
    dims[DIM_K] = K, dims[DIM_KP] = m->Kp, dims[DIM_ROWS] = M;
    ModelBuffers* b = &m->encoder.buffers;
    // clang-format off
    static const TensorRow acts[] = {
        {"logits", offsetof(TaskActs, logits), {DIM_ROWS, DIM_KP}},
        {"first",  offsetof(TaskActs, first),  {DIM_S, DIM_C}},  // this and the next rows: classify only
        {"pooled", offsetof(TaskActs, pooled), {DIM_S, DIM_C}},
        {"work",   offsetof(TaskActs, work),   {DIM_S, DIM_C}},
    };
    static const TensorRow stats[] = {
        {"losses", offsetof(TaskActs, losses), {DIM_ROWS}},
        {"loss",   offsetof(TaskActs, loss),   {ONE_DIM}},
    };
    // clang-format on
    if (!is_answer) tensors_add(&b->table, NEXT_ROWS, 2, dims, -1);  // the pooler
    tensors_add(&b->table, TASK_ROWS[task], COUNT_OF(TASK_ROWS[0]), dims, -1);
    tensors_add(&b->acts_table, acts, is_answer ? 1 : COUNT_OF(acts), dims, -1);
    tensors_add(&b->stats_table, stats, COUNT_OF(stats), dims, -1);
    model_buffers_finish_tables(b);

    b->structs[0] = (TensorStructs){&m->p, offsetof(TaskParams, p.h), sizeof(BlockParams)};
    b->structs[1] = (TensorStructs){&m->g, offsetof(TaskGrads, g.h), sizeof(BlockGrads)};
    b->structs[2] = (TensorStructs){&m->a, offsetof(TaskActs, a.h), sizeof(BlockActs)};
    CHECK(offsetof(TaskParams, output) == offsetof(TaskGrads, output));
    b->batch_bytes = (mlm_loader_ints(B * T, is_answer ? SPAN_ENDS * B : B, B) + task_ints(m)) * sizeof(int);
}

// After the buffers are allocated: bind the encoder to them, and allocate first_rows.
static void task_alloc(TaskModel* m, Context* ctx) {
    Model* e = &m->encoder;
    size_t n = task_ints(m);
    e->p = m->p.p, e->g = m->g.g, e->a = m->a.a;
    if (!n) return;
    int* host = (int*)xmalloc(n * sizeof(int));
    m->ints = (int*)device_alloc(ctx, n * sizeof(int), "batch");
    sequences_uniform(host, host + e->S + 1, host + 2 * e->S + 1, e->S, 1);
    device_upload(ctx, m->ints, host, n * sizeof(int));
    device_synchronize(ctx);
    free(host);
}

static void task_free(TaskModel* m) {
    if (m->ints) device_free(m->ints, task_ints(m) * sizeof(int));
}

// Accept the encoder weights of any BERT, with or without heads. `starts_head`: a head in the file is not read.
static WeightRules task_weight_rules(const BertConfig* c, Task task, int starts_head) {
    // clang-format off
    static const char* const ignored[] = {
        "embeddings.position_ids", "predictions.decoder.weight", "predictions.decoder.bias", "predictions.bias",
        "transform.dense.weight", "transform.dense.bias", "transform.LayerNorm.weight", "transform.LayerNorm.bias",
        "LayerNorm.gamma", "LayerNorm.beta", "seq_relationship.weight", "seq_relationship.bias",
        "pooler.dense.weight", "pooler.dense.bias",
        "classifier.weight", "classifier.bias", "qa_outputs.weight", "qa_outputs.bias"};
    // clang-format on
    static const char* const may_lack[] = {"bert.pooler.", "classifier.", "qa_outputs."};
    WeightRules rules = bert_weight_rules(c);
    rules.file.ignored = ignored, rules.file.ignored_count = COUNT_OF(ignored);
    rules.file.may_lack = may_lack, rules.file.may_lack_count = COUNT_OF(may_lack);
    if (starts_head) rules.file.ignored_prefix = may_lack[task == TASK_CLASSIFY ? 1 : 2];
    return rules;
}

#ifdef FINETUNE_MAIN

typedef struct {
    Run run;  // settings, ranks, optimizer, log: llmc/run/state.h
    TaskModel model;
    TaskSettings task;
    TaskData examples;
    MlmSource data;
} Trainer;

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

// ---------------------------------------------------------------------------------------------------------
// Step

// The work of a step of `sequences` examples that contains `counts`.
static StepWork step_work(const TaskModel* m, MlmCounts counts, int sequences) {
    const BertConfig* c = &m->encoder.config;
    double head = c->C * (m->task == TASK_CLASSIFY ? counts.sequences : m->K * counts.tokens);
    return (StepWork){.consumed = sequences,
                      .sequences = counts.sequences,
                      .tokens = counts.tokens,
                      .flops = mlm_encoder_flops(counts, c->L, c->C, c->F) + 6 * head,
                      .losses = {m->a.loss}};
}

// One optimizer step. The GPU runs it asynchronously. run_end_step() reads its results and logs them.
static void train_step(Run* r, TaskModel* m, MlmSource* data) {
    MlmCounts counts = mlm_source_step(data, run_step_sequence(r), m->encoder.B, r->micro_steps, &r->group);
    run_begin_step(r, step_work(m, counts, run_step_sequences(r)));
    for (int i = 0; i < r->micro_steps; i++) {
        Mode mode = i == 0 ? SET : ADD;
        MlmInput in = mlm_load(&data->loader, &data->batches[i], &r->ctx);
        run_begin_micro_batch(r, i);
        forward_task(m, &in, &r->ctx);
        task_loss(m, &in, 1 / counts.masked, r->direction, mode, &r->ctx);  // the mean over all targets of the step
        if (r->direction == BACKWARD) backward_task(m, &in, mode, &r->ctx);
        run_end_micro_batch(r, i);
    }
    run_all_reduce(r);
    run_update(r);
    run_read_results(r);
}

// ---------------------------------------------------------------------------------------------------------
// Validation

// Evaluate this rank's share of the held-out examples. Log the scores over all ranks, or print them if `log` is NULL. A
// signal to any rank ends the validation without a result.
static void validate(Run* r) {
    Trainer* t = (Trainer*)r;
    TaskModel* m = &t->model;
    TaskEvaluation e;
    TaskOutputs outputs = {.task = m->task, .K = m->K, .Kp = m->Kp, .logits = m->a.logits};
    task_evaluation_begin(&e, &t->examples, &t->data.batches[0], m->encoder.B, r->settings.val_batches, &r->group);
    while (task_evaluation_next(&e, r, (int)stop_signal)) {
        MlmInput in = mlm_load(&t->data.loader, e.batch, &r->ctx);
        forward_task(m, &in, &r->ctx);
        task_evaluation_take(&e, outputs, &r->ctx);
    }
    task_evaluation_end(&e, t->task.predictions, r);
}

// ---------------------------------------------------------------------------------------------------------
// Settings and startup

// The flags. Returns their number.
static int settings_flags(Trainer* t) {
    int count =
        settings_rows(&t->run.settings, t->run.flags,
                      "Pre-trained Hugging Face directory, hub:NAME or .safetensors file, "
                      "or config.json, bert-base|bert-large or sizes L= C= NH= V= T= F= tied= for random weights.");
    count = settings_evaluate_row(&t->run.settings, t->run.flags, count);
    return mlm_default_settings(t->run.flags, task_settings_rows(&t->task, t->run.flags, count));
}

// The text of the model's config.json. `names`: the class names.
static Text task_config_write(const TaskModel* m, const LabelNames* names) {
    const BertConfig* c = &m->encoder.config;
    Text keys = {NULL, 0, 0};
    if (m->task == TASK_ANSWER) return bert_config_write(c, "BertForQuestionAnswering", keys);
    json_put_number(&keys, "classifier_dropout", c->classifier_dropout);
    json_put_string(&keys, "problem_type", m->K == 1 ? "regression" : "single_label_classification");
    task_write_names(&keys, names, m->K);
    return bert_config_write(c, "BertForSequenceClassification", keys);
}

// Find the model, and plan its tensors and memory.
static void open_model(Trainer* t) {
    Run* r = &t->run;
    const Settings* s = &r->settings;
    ModelBuffers* buffers = &t->model.encoder.buffers;
    run_find_model(r, "", "");
    fill_mask_find_words(&t->data.words, r, r->directory, r->data_directory);
    BertConfig config = bert_config_find(r->directory, s, &t->data.words);
    int reads_head = !task_starts_head(&t->task, r), K, T;
    if (r->directory && reads_head) t->examples.classes = task_find_names(&t->examples.names, r->directory, &t->task);
    K = task_outputs(&t->task, t->examples.classes);
    if (reads_head) task_check_head(&t->task, s, r->weights, K);
    config.next = 0, T = run_sequence_length(r, config.T);
    for (BatchSearch search = run_search_batch(r); run_next_batch(r, &search, buffers);)
        task_plan(&t->model, config, (Task)t->task.task, K, search.B, T, s->evaluate ? FORWARD_ONLY : s->recompute);
}

static void open_data(Trainer* t, TaskData* data) {
    Run* r = &t->run;
    const Settings* s = &r->settings;
    const Model* e = &t->model.encoder;
    task_data_open(data, &t->task, s->evaluate ? NULL : r->train_pattern, r->val_pattern, &t->data.words, t->model.K,
                   e->config.V, e->T, r->group.rank == 0);
    t->data.examples = &data->train, t->data.seed = (uint64_t)s->seed, t->data.shuffle = s->shuffle;
    if (s->evaluate && !data->has_val) die(USAGE, "--evaluate 1 needs validation data; name it with -j");
    if (data->train.count) run_check_data(r, examples_fingerprint(&data->train), r->train_pattern);
    run_check_ranks(r, task_config_write(&t->model, &data->names), data->has_val, examples_fingerprint(&data->val));
    run_set_last(r, (uint64_t)data->train.count);
}

// Check and open everything that the run needs. Nothing is written until all checks have passed.
static void trainer_open(Trainer* t, int argc, char** argv) {
    Run* r = &t->run;
    Model* e = &t->model.encoder;
    run_parse(r, settings_flags(t), argc, argv, "./finetune_bert -e MODEL --task classify|answer -i FILE [flags]");
    run_join(r, "");
    task_check_settings(&t->task, &r->settings);
    open_model(t);
    mlm_source_alloc(&t->data, task_recipe(t->model.task), e->B, e->T, r->micro_steps, &r->ctx);
    open_data(t, &t->examples);
    WeightRules rules = task_weight_rules(&e->config, t->model.task, task_starts_head(&t->task, r));
    bert_init_model(r, &e->buffers, rules, 1);
    task_alloc(&t->model, &r->ctx);
}

int main(int argc, char** argv) {
    static Trainer trainer, *t = &trainer;
    Run* r = &t->run;
    const Examples* e = &t->examples.train;
    process_begin(on_signal, argv);
    trainer_open(t, argc, argv);
    if (r->settings.evaluate) {
        process_on_stop(SIG_DFL);  // a signal may end the process at once: no checkpoint is written
        validate(r);
    } else {
        uint64_t tokens = e->begin[e->count];
        double step_tokens = (double)tokens / e->count * run_step_sequences(r);
        const DueWork due[] = {{r->val_every, run_report_fp8},
                               {r->val_every, validate, "val_loss"},
                               {r->settings.checkpoint_every, run_save}};
        run_begin(r, due, COUNT_OF(due), tokens, "about ", step_tokens);
        while (run_next_step(r, (int)stop_signal)) {
            train_step(r, &t->model, &t->data);
            run_end_step(r);
        }
        run_end(r, "BERT fine-tuning");
    }
    task_free(&t->model);
    task_data_close(&t->examples);
    mlm_source_close(&t->data);
    run_close(r);
    return DONE;
}
#endif
