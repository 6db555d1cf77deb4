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

#include "llmc/ops/classifier/span.h"
#include "llmc/ops/dropout.h"
#include "llmc/ops/squared_error.h"
#include "llmc/ops/tanh.h"
#include "llmc/run/task_evaluation.h"  // scores
#include "llmc/run/tasks.h"            // flags and examples of the tasks

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
    Sequences s = {in->sequences.count, in->sequences.count, 1, in->sequences.count, in->sequences.first};
    s.cu_seqlens = m->ints, s.sequence = m->ints + e->S + 1, s.position = m->ints + 2 * e->S + 1;
    m->first_rows = s;
    double p = e->config.classifier_dropout;
    return e->training ? dropout_make(p, e->seed, e->step, 0, SITE_DROPOUT_POOLED, &m->first_rows)
                       : dropout_none(&m->first_rows);
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
// gradient, multiplied by *loss_scale (NULL: 1).
static void task_loss(TaskModel* m, const MlmInput* in, double scale, const real* loss_scale, Direction direction,
                      Mode mode, Context* ctx) {
    floatX* logits = m->a.logits;
    Losses losses = {m->a.losses, m->a.loss, scale, mode};
    const Sequences* s = &in->sequences;
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

// Backpropagate from the gradient of the logits to all parameters, after forward_task(). For classify, that has left
// the output layer's input in `work`.
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
        dropout_backward(a->work, a->work, S, C, pooled_dropout(m, in), SET, ctx);
        tanh_backward(a->work, a->work, a->pooled, (size_t)S * (size_t)C, ctx);
        matmul_backward_weight(e->g.pooler, a->work, a->first, S, C, C, mode, ctx);
        matmul_backward_input(a->pooled, a->work, e->p.pooler.w, S, C, C, SET, ctx);
        gather_backward(e->a.dx, a->pooled, in->sequences.cu_seqlens, S, N, C, SET, ctx);
    }
    backward_encoder(e, in, mode, mode, ctx);
}

// Evaluate a micro-batch without gradients or dropout. `mode` sets or adds to m->a.loss, the summed loss times `scale`.
static void evaluate_task(TaskModel* m, const MlmInput* in, double scale, Mode mode, Context* ctx) {
    m->encoder.training = 0;
    forward_task(m, in, ctx);
    task_loss(m, in, scale, NULL, FORWARD, mode, ctx);
}

// Loss and gradients of a micro-batch in step number `step`, with dropout. Gradients are multiplied by *loss_scale.
static void train_task(TaskModel* m, const MlmInput* in, uint64_t step, double scale, Mode mode, Context* ctx) {
    m->encoder.training = 1;
    m->encoder.step = step;
    forward_task(m, in, ctx);
    task_loss(m, in, scale, m->encoder.buffers.loss_scale, BACKWARD, mode, ctx);
    backward_task(m, in, mode, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Memory

// Fill the tables for micro-batches of at most B sequences of at most T tokens. Allocates only the tables.
static void task_plan(TaskModel* m, Config config, Task task, int K, int B, int T, int recompute) {
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
    if (!is_answer) tensors_add(&b->table, POOLER_ROWS, COUNT_OF(POOLER_ROWS), dims, -1);
    tensors_add(&b->table, TASK_ROWS[task], COUNT_OF(TASK_ROWS[0]), dims, -1);
    tensors_add(&b->acts_table, acts, is_answer ? 1 : COUNT_OF(acts), dims, -1);
    tensors_add(&b->stats_table, stats, COUNT_OF(stats), dims, -1);
    model_buffers_finish_tables(b);
}

static size_t task_ints(const TaskModel* m) { return m->task == TASK_CLASSIFY ? 3 * (size_t)m->encoder.S + 1 : 0; }

// The run's memory, computed before anything is allocated.
static MemoryPlan task_memory(const TaskModel* m, UpdateSettings update, const Context* ctx) {
    const Model* e = &m->encoder;
    StepSizes step = step_sizes(e, 0);
    size_t ints = mlm_loader_ints(e->N, m->task == TASK_ANSWER ? SPAN_ENDS * e->S : e->M, e->S) + task_ints(m);
    return memory_plan_make(&e->buffers.table, &e->buffers.acts_table, &e->buffers.stats_table, update,
                            ints * sizeof(int), &step, ctx);
}

static void task_alloc(TaskModel* m, uint64_t seed, Context* ctx) {
    Model* e = &m->encoder;
    size_t n = task_ints(m);
    TensorStructs params = {&m->p, NULL, 0}, grads = {&m->g, NULL, 0}, acts = {&m->a, NULL, 0};
    CHECK(offsetof(TaskParams, output) == offsetof(TaskGrads, output));
    model_alloc_as(e, params, grads, acts, seed, ctx);
    m->p.p.h = e->p.h, m->g.g.h = e->g.h, m->a.a.h = e->a.h;
    e->p = m->p.p, e->g = m->g.g, e->a = m->a.a;  // the encoder's fields, now bound
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
    model_free(&m->encoder);
}

// Load the encoder of any BERT, with or without heads.
static void load_task_weights(TaskModel* m, const Optimizer* o, const char* path, Context* ctx) {
    static const char* const ignored[] = {"embeddings.position_ids",
                                          "predictions.decoder.weight",
                                          "predictions.decoder.bias",
                                          "predictions.bias",
                                          "pooler.dense.weight",
                                          "pooler.dense.bias",
                                          "seq_relationship.weight",
                                          "seq_relationship.bias",
                                          "transform.dense.weight",
                                          "transform.dense.bias",
                                          "transform.LayerNorm.weight",
                                          "transform.LayerNorm.bias",
                                          "LayerNorm.gamma",
                                          "LayerNorm.beta",
                                          "classifier.weight",
                                          "classifier.bias",
                                          "qa_outputs.weight",
                                          "qa_outputs.bias"};
    static const char* const may_lack[] = {"bert.pooler.", "classifier.", "qa_outputs."};
    load_weights_by(&m->encoder, o, path, ignored, COUNT_OF(ignored), may_lack, COUNT_OF(may_lack), ctx);
}

#ifdef FINETUNE_MAIN

typedef struct {
    Run run;  // settings, ranks, optimizer, log: llmc/run/run.h
    TaskModel model;
    TaskSettings task;
    TaskData examples;
    MlmSource data;
    WordPiece words;
} Trainer;

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

// ---------------------------------------------------------------------------------------------------------
// A step

// The work of a step over all ranks, once its micro-batches are built. The FLOP count covers real tokens; attention is
// counted as if every token attended to its whole sequence.
static StepWork step_work(const Trainer* t, MlmCounts counts) {
    const Config* c = &t->model.encoder.config;
    double C = c->C, heads = t->model.task == TASK_CLASSIFY ? C * counts.sequences : t->model.K * counts.tokens;
    double layers = 6 * (4 * C * C + 2 * C * c->F) * counts.tokens + 12 * C * counts.squares;
    StepWork work = {t->model.encoder.B * t->run.group.size * t->run.micro_steps, counts.sequences, counts.tokens,
                     c->L * layers + 6 * C * heads};
    return work;
}

// One optimizer step. The GPU runs it asynchronously. run_end_step() reads its results and logs them.
static void train_step(Trainer* t) {
    Run* r = &t->run;
    TaskModel* m = &t->model;
    ModelBuffers* b = &m->encoder.buffers;
    StepLosses losses = {1, {m->a.loss}, {"loss"}};
    double lr = run_lr(r);
    scope_step(&r->ctx, r->session.step + 1);
    mlm_source_build(&t->data, r->settings.overfit ? 0 : r->session.samples, m->encoder.B, r->group.rank,
                     r->group.size);
    MlmCounts counts = mlm_source_count(&t->data, &r->group);
    double scale = 1 / counts.masked;  // the mean over all targets of the step
    for (int i = 0; i < r->micro_steps; i++) {
        const MlmBatch* batch = &t->data.batches[i];

        run_begin_micro_batch(r, i);
        MlmInput in = mlm_load(&t->data.loader, batch, &r->ctx);
        if (r->settings.mode == MODE_FORWARD) evaluate_task(m, &in, scale, i == 0 ? SET : ADD, &r->ctx);
        else train_task(m, &in, (uint64_t)r->session.step, scale, i == 0 ? SET : ADD, &r->ctx);
        run_end_micro_batch(r);
    }
    steps_all_reduce(&r->session, b->grads, losses, &r->grad_sync);
    steps_update(&r->session, run_step_model(b), losses, &r->optimizer, &r->grad_sync, lr);
    steps_launched(&r->steps, &r->session, lr, step_work(t, counts), losses, &r->optimizer);
    scope_step(&r->ctx, -1);
}

// ---------------------------------------------------------------------------------------------------------
// Validation

// Evaluate this rank's share of the held-out examples. Log the scores over all ranks, or print them if `log` is NULL. A
// signal to any rank ends the validation without a result.
static void validate(Trainer* t, Log* log) {
    Run* r = &t->run;
    TaskModel* m = &t->model;
    TaskEvaluation e;
    TaskOutputs outputs = {m->task, m->K, m->Kp, m->a.logits};
    task_evaluation_begin(&e, &t->examples, &t->data.batches[0], m->encoder.B, r->settings.val_batches, &r->group);
    m->encoder.training = 0;
    while (!stop_signal && task_evaluation_next(&e)) {
        MlmInput in = mlm_load(&t->data.loader, e.batch, &r->ctx);
        forward_task(m, &in, &r->ctx);
        task_evaluation_take(&e, outputs, &r->ctx);
        steps_evaluating(&r->log, &r->session, "validation", e.next, e.count);
    }
    TaskScore score = task_evaluation_end(&e, t->task.predictions, &r->session);
    if (!group_any(&r->group, stop_signal != 0)) task_score_show(log, &r->session, score);
}

// ---------------------------------------------------------------------------------------------------------
// Settings and startup

static int settings_flags(Trainer* t, Flag* table) {
    // clang-format off
    const Flag rows[] = {
        {"-e", "--model", FLAG_STRING, &t->run.settings.model, "L=4,C=128,NH=4,T=128", 0, 0, NULL, SCOPE_RUN, TOPIC_MODEL,
         "Pre-trained Hugging Face directory or .safetensors file, or config.json, bert-base|bert-large or sizes L= C= "
         "NH= V= T= F= tied= for random weights."},
    };
    // clang-format on
    int count = task_settings_rows(&t->task, table, settings_rows(&t->run.settings, table, 0));
    return mlm_default_settings(table, settings_add_rows(table, count, rows, COUNT_OF(rows)));
}

// The model's config.json.
static Text config_text(const Trainer* t) {
    const Config* c = &t->model.encoder.config;
    Text text = {NULL, 0, 0};
    int classifies = t->model.task == TASK_CLASSIFY;
    text_printf(&text, "{\"architectures\": [\"%s\"], \"model_type\": \"bert\"",
                classifies ? "BertForSequenceClassification" : "BertForQuestionAnswering");
    if (classifies) {
        json_put_number(&text, "classifier_dropout", c->classifier_dropout);
        json_put_string(&text, "problem_type", t->model.K == 1 ? "regression" : "single_label_classification");
        task_write_names(&text, &t->examples.names, t->model.K);
    }
    config_write(&text, c);
    return text;
}

// Find the model and plan its tensors. Returns the path of its weights (the caller frees it), NULL if there are none.
static char* open_model(Trainer* t, const char* data_dir) {
    Run* r = &t->run;
    Settings* s = &r->settings;
    char *directory, *weights;
    session_find_model(r->session.checkpoint ? r->session.checkpoint : s->model, &directory, &weights);
    fill_mask_find_words(&t->words, &r->session, directory, data_dir);
    Config config = config_find(directory, s, &t->words);
    if (directory) t->examples.classes = task_find_names(&t->examples.names, directory, &t->task);
    int K = task_outputs(&t->task, t->examples.classes);
    task_check_head(&t->task, s, weights, K);
    config.next = 0;
    free(directory);
    task_plan(&t->model, config, (Task)t->task.task, K, s->B, run_sequence_length(r, config.T),
              s->evaluate ? FORWARD_ONLY : s->recompute);
    return weights;
}

// Check that the memory plan fits. If not, report the largest micro-batch that does, and exit.
static void check_memory(Trainer* t) {
    Run* r = &t->run;
    const TaskModel* m = &t->model;
    const Model* e = &m->encoder;
    UpdateSettings update = session_update(&r->session);
    r->plan = task_memory(m, update, &r->ctx);
    BatchSearch search = run_check_memory(r, &e->buffers.table, e->B);
    while (batch_search_next(&search)) {
        TaskModel smaller;
        task_plan(&smaller, e->config, m->task, m->K, search.B, e->T, e->recompute);
        search.plan = task_memory(&smaller, update, &r->ctx);
        model_buffers_free_tables(&smaller.encoder.buffers);
    }
}

static void open_data(Trainer* t, const char* train, const char* val) {
    Run* r = &t->run;
    const Settings* s = &r->settings;
    const Model* e = &t->model.encoder;
    task_data_open(&t->examples, &t->task, s->evaluate ? NULL : train, val, &t->words, t->model.K, e->config.V, e->T,
                   r->group.rank == 0);
    t->data.examples = &t->examples.train, t->data.seed = (uint64_t)s->seed, t->data.shuffle = s->shuffle;
    if (s->evaluate && !t->examples.has_val) die(USAGE, "--evaluate 1 needs validation data; name it with -j");
    if (t->examples.train.count) session_check_data(&r->session, examples_fingerprint(&t->examples.train), train);
    run_check_ranks(r, config_text(t), examples_fingerprint(&t->examples.val));
    session_set_last(&r->session, (uint64_t)t->examples.train.count, e->B * r->group.size * r->micro_steps);
}

// Check and open everything that the run needs. Nothing is written until all checks have passed.
static void trainer_open(Trainer* t, int argc, char** argv) {
    Run* r = &t->run;
    Settings* s = &r->settings;
    Model* e = &t->model.encoder;
    char *train, *val;
    r->flag_count = settings_flags(t, r->flags);
    flags_parse(r->flags, r->flag_count, argc, argv, "./finetune_bert -e MODEL --task classify|answer -i FILE [flags]");
    task_default_batches(s, r->flags, r->flag_count);
    run_join(r);
    task_check_settings(&t->task, s);
    task_find_data(&r->session, &train, &val);
    char *data_dir = session_directory_of(*s->train_data ? s->train_data : train), *weights = open_model(t, data_dir);
    check_memory(t);

    mlm_source_alloc(&t->data, task_recipe(t->model.task), e->B, e->T, r->micro_steps, &r->ctx);
    open_data(t, train, val);
    task_alloc(&t->model, (uint64_t)s->seed, &r->ctx);
    run_prepare(r, &e->buffers);
    if (!r->session.checkpoint) random_weights(e, &r->optimizer, (uint64_t)s->seed, &r->ctx);  // for the head at least
    if (r->session.checkpoint) run_load_checkpoint(r, &e->buffers, r->session.checkpoint);
    else if (weights) load_task_weights(&t->model, &r->optimizer, weights, &r->ctx);
    run_share(r, &e->buffers);
    free(weights), free(data_dir), free(train), free(val);
}

static void trainer_close(Trainer* t) {
    task_free(&t->model);
    mlm_source_close(&t->data);
    task_data_close(&t->examples);
    wordpiece_free(&t->words);
    run_close(&t->run);
}

int main(int argc, char** argv) {
    static Trainer trainer;
    Trainer* t = &trainer;
    Run* r = &t->run;
    const ModelBuffers* buffers = &t->model.encoder.buffers;
    process_begin(on_signal, argv);
    trainer_open(t, argc, argv);
    if (r->settings.evaluate) {
        process_on_stop(SIG_DFL);  // a signal may end the process at once: no checkpoint is written
        validate(t, NULL);
        trainer_close(t);
        return DONE;
    }
    const Examples* e = &t->examples.train;
    uint64_t tokens = e->begin[e->count];
    run_begin(r, buffers, tokens, "about ",
              (double)tokens / e->count * t->model.encoder.B * r->group.size * r->micro_steps);
    int val_every = t->examples.has_val ? r->settings.val_every : 0;
    if (session_is_missing(&r->session, &r->log, val_every, "val_loss")) validate(t, &r->log);
    while (run_next_step(r, (int)stop_signal)) {
        train_step(t);
        int validation = session_is_due(&r->session, val_every, 1);
        run_end_step(r, buffers, validation);
        if (validation) validate(t, &r->log);
        if (r->checkpoint_is_due) run_save(r, buffers, config_text(t));
    }
    run_end(r, buffers, config_text(t), "BERT fine-tuning");
    trainer_close(t);
    return DONE;
}
#endif
