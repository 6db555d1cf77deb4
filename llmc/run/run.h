/* A run: the parts of a trainer that do not depend on its model and data. A trainer calls the functions in this order:
 *
 *   run_parse         parse the flags
 *   run_join          join the other ranks, open the device, find the checkpoint to resume and the data
 *   run_find_model    find the model's directory and weights
 *   run_search_batch  plan the memory. If it does not fit, report the largest micro-batch that does, and exit
 *   run_check_ranks   check that all ranks train the same model on the same data
 *   run_init_model    allocate the model's buffers and the optimizer, and set the weights
 *   run_begin         open the log. From here on the run writes files
 *   run_next_step     save a checkpoint if one is due. If another step follows, the trainer launches it:
 *     run_begin_step, run_next_micro_batch, run_capture, run_all_reduce, run_update, run_log
 *   run_end_step      read and log results. Then the trainer does what else is due, such as validation, which
 *                     run_average() repeats for the average of the weights
 *   run_end           the last results, the last checkpoint, the plot
 *   run_close */
#ifndef LLMC_RUN_RUN_H
#define LLMC_RUN_RUN_H

#include "llmc/base/process.h"
#include "llmc/fp8/report.h"
#include "llmc/optim/model_buffers.h"
#include "llmc/run/hub.h"
#include "llmc/run/model_card.h"
#include "llmc/run/steps.h"

typedef struct {
    Settings settings;
    Flag flags[MAX_FLAGS];
    int flag_count;
    Session session;
    Context ctx;
    ProcessGroup group;
    char *train_pattern, *val_pattern, *data_directory;  // of the data; NULL: none
    char* start;                // checkpoint with the weights and moments to start from; NULL: none
    char* hub;                  // directory of -e hub:NAME; NULL: -e names something else
    const char* source;         // `start`, or `hub`, or -e
    char *directory, *weights;  // of the model in `source`; NULL: none
    Text config;                // the model's config.json
    int has_val;
    GradSync grad_sync;
    MemoryPlan plan;
    ModelBuffers* buffers;
    Optimizer optimizer;
    int micro_steps;  // micro-batches of a step on this rank
    Steps steps;
    Schedule schedule;
    double lr;  // learning rate of the current step
    Log log;
    int checkpoint_is_due;  // after the step that just ended
    int is_paused;          // exclude the time until the next step from that step
} Run;

// ---------------------------------------------------------------------------------------------------------
// Start. Nothing is written until run_begin()

// Parse the command line into the rows of r->flags, and then the recipe that it names, unless -y 1 takes the flags from
// a checkpoint. `usage`: the first line of --help.
static inline void run_parse(Run* r, int flag_count, int argc, char** argv, const char* usage) {
    r->flag_count = flag_count;
    flags_parse(r->flags, flag_count, argc, argv, usage);
    if (!*r->settings.recipe) return;
    r->session.skips_recipe = r->settings.resume && session_count_checkpoints(r->settings.out) > 0;
    if (!r->session.skips_recipe) recipe_apply(r->flags, flag_count, r->settings.recipe);
}

// Join the other ranks, open the device, and find the checkpoint to resume, the data and its directory. `builtin`: the
// data that an empty -i selects; NULL: none, because the run needs no data.
static inline void run_join(Run* r, const char* builtin) {
    group_init(&r->group, r->settings.timeout);
    session_open(&r->session, &r->settings, r->flags, r->flag_count, &r->group, &r->ctx);
    if (builtin) session_find_data(&r->session, builtin, &r->train_pattern, &r->val_pattern);
    const char* data = *r->settings.train_data ? r->settings.train_data : r->train_pattern;
    r->data_directory = data ? session_directory_of(data) : NULL;
}

// Find the model to start from: the checkpoint to resume, else the newest checkpoint of the run in the directory
// `other` ("": none), which the flag `flag` names, else -e.
static inline void run_find_model(Run* r, const char* flag, const char* other) {
    r->start = session_find_start(&r->session, flag, other);
    r->hub = r->start ? NULL : hub_find(r->settings.model);
    r->source = r->start ? r->start : r->hub ? r->hub : r->settings.model;
    session_find_model(r->source, &r->directory, &r->weights);
}

// The sequence length: -t, or by default the model's number of positions. Sets r->micro_steps.
static inline int run_sequence_length(Run* r, int positions) {
    int T = r->settings.T ? r->settings.T : positions;
    if (T > positions) die(USAGE, "-t %d: the model knows %d positions; choose at most that", T, positions);
    r->micro_steps = session_micro_steps(&r->session, r->settings.B, T);
    return T;
}

// A binary search for the largest micro-batch that fits into memory.
typedef struct {
    int low, high;  // the largest size that fits is one of these
    int B;          // the size to plan next
    UpdateSettings update;
} BatchSearch;

// The caller plans the tables for each size that run_next_batch() asks for: first the size of -b, and if it does not
// fit, others.
static inline BatchSearch run_search_batch(const Run* r) {
    BatchSearch search;
    memset(&search, 0, sizeof search);
    search.high = r->settings.B;
    search.update = session_update(&r->session);
    return search;
}

// Returns 1 if the caller must plan `b` for micro-batches of search->B sequences, 0 if the plan for -b fits. If -b does
// not fit, reports the largest size that does, and exits. With --steps 0, prints settings, tensors and plan, and exits.
static inline int run_next_batch(Run* r, BatchSearch* search, ModelBuffers* b) {
    if (!search->B) {
        search->B = search->high;
        return 1;
    }
    b->fp8.is_wanted = r->settings.fp8, b->fp8.keeps_x = !b->table.fixed && r->settings.recompute == RECOMPUTE_NOTHING;
    b->fp8.exact_forward = r->settings.fp8_exclude_forward;
    b->fp8.steps = r->settings.fp8_steps;
    fp8_state_plan(&b->fp8, &b->table, b->step.N);
    MemoryPlan plan = model_buffers_memory(b, search->update, &r->ctx);
    int fits = memory_plan_fits(plan);
    if (search->B == r->settings.B) {
        r->plan = plan;
        if (r->settings.steps == 0) memory_plan_show(r->flags, r->flag_count, &b->table, &plan, &r->group);
        if (fits) return 0;
    }
    if (fits) search->low = search->B;
    else search->high = search->B - 1;
    if (search->low == search->high) memory_plan_refuse(&r->plan, search->low);
    model_buffers_free_tables(b);
    search->B = (search->low + search->high + 1) / 2;
    return 1;
}

// Check that all ranks train the same model on the same data. `config`: the text of config.json; the run takes
// ownership. `val`: fingerprint of the validation data; 0: none.
static inline void run_check_ranks(Run* r, Text config, int has_val, uint32_t val) {
    r->config = config, r->has_val = has_val;
    session_check_recipe(&r->session, has_val);
    session_check_ranks(&r->session, config.text, val);
}

// Allocate the model's buffers and the optimizer, and connect them. If the run starts from a checkpoint, load its
// weights and moments; otherwise the caller sets the weights.
static inline void run_alloc(Run* r, ModelBuffers* b) {
    r->buffers = b;
    model_buffers_alloc(b, &r->ctx);
    optimizer_join(&r->optimizer, &r->grad_sync, &b->table, session_update(&r->session), &r->group, &r->ctx);
    session_set_steps(&r->session, &r->optimizer);
    b->grad_sync = &r->grad_sync;
    b->loss_scale = &r->optimizer.loss_scale->scale;
    b->master = r->optimizer.master;
    steps_open(&r->steps, &r->settings, r->group.size, &r->ctx);
    r->session.average.decay = r->settings.ema, r->session.average.start = r->settings.ema_start;
    fp8_state_set(&b->fp8, r->session.fp8, r->session.checkpoint, &r->ctx);
    fp8_state_switch(&b->fp8, r->session.step);
    if (r->start) session_load(&r->session, r->start, &b->table, b->params, &b->fp32_copies, &r->optimizer);
}

// After setting the weights: check that they are equal on all ranks, and share the fp32 copies.
static inline void run_share(Run* r) {
    check_same_weights(&r->group, &r->buffers->table, r->buffers->params, &r->ctx);
    model_buffers_share(r->buffers, &r->ctx);
}

// Allocate as run_alloc() does, and set the weights: from the checkpoint, else from the model's file, else random.
// Tensors that the file may lack keep their random values.
static inline void run_init_model(Run* r, ModelBuffers* b, WeightRules rules) {
    int is_zero_out = r->settings.init == INIT_ZERO_OUT;
    if (is_zero_out && !r->start && r->weights && !r->settings.evaluate)
        die(USAGE, "--init zero-out is for a new model, but %s has weights; leave one out", r->weights);
    if (is_zero_out) rules.residual_std = 0;
    run_alloc(r, b);
    if (!r->start && (!r->weights || rules.file.may_lack_count))
        model_buffers_init(b, &r->optimizer, &rules, (uint64_t)r->settings.seed, &r->ctx);
    if (!r->start && r->weights) model_buffers_read(b, &r->optimizer, r->weights, &rules.file, &r->ctx);
    run_share(r);
}

// ---------------------------------------------------------------------------------------------------------
// Steps

// After a validation of the weights: swap in their average for another validation, then swap back. Returns whether a
// validation follows. All ranks call it.
static inline int run_average(Run* r) {
    WeightAverage* average = &r->session.average;
    int64_t step = r->session.step;
    if (!average->is_in && (!weight_average_is_on(average, step) || average->shown == step)) return 0;
    average->shown = step;
    weight_average_exchange(average, r->buffers, &r->optimizer, &r->ctx);
    return average->is_in;
}

// Whether a validation is due now whose result `key` log.jsonl lacks. All ranks call it.
static inline int run_is_missing(const Run* r, const char* key) {
    return r->has_val && session_is_missing(&r->session, &r->log, r->settings.val_every, key);
}

// From here on the run writes files. Prints the first line, with the number of training tokens (`tokens`) and of tokens
// in a step over all ranks (`step_tokens`). `about`: "" if the latter is exact, else "about " or
// "at most ". Returns 1 if log.jsonl lacks a validation that is due. If it is only that of the average of the weights,
// the average is swapped in.
static inline int run_begin(Run* r, uint64_t tokens, const char* about, double step_tokens) {
    session_begin(&r->session, &r->log);
    steps_begin(&r->steps, &r->session, &r->grad_sync);
    steps_print_start(&r->steps, &r->session, r->buffers->table.parameters, tokens, about, step_tokens);
    memory_plan_print(stdout, &r->plan);
    r->schedule = session_schedule(&r->session);
    r->is_paused = 1;
    // A run that was killed may lack the last validation and the average of the last checkpoint, which follows it.
    r->session.average.saved = -1;
    r->session.average.shown = run_is_missing(r, "ema_val_loss") ? -1 : r->session.step;
    return run_is_missing(r, "val_loss") || run_average(r);
}

// Save the model and the optimizer. Returns 0, -1 after a warning.
static inline int run_save(Run* r) {
    WeightAverage* average = &r->session.average;
    grad_sync_wait(&r->grad_sync, GRAD_SYNC_LAST, &r->ctx);  // the other ranks' parameters are on their way
    const char* val = r->settings.val_every ? r->val_pattern : NULL;
    size_t parameters = r->buffers->table.parameters;
    Text card = model_card(&r->session, &r->log, r->config.text, parameters, val, 0);
    int result = session_save(&r->session, r->buffers, &r->optimizer, r->config.text, card.text);
    free(card.text);
    if (!weight_average_is_on(average, r->session.step) || average->saved == r->session.step) return result;
    average->saved = r->session.step;
    weight_average_exchange(average, r->buffers, &r->optimizer, &r->ctx);
    grad_sync_wait(&r->grad_sync, GRAD_SYNC_LAST, &r->ctx);
    card = model_card(&r->session, &r->log, r->config.text, parameters, val, 1);
    session_save_average(&r->session, r->buffers, r->config.text, card.text);
    free(card.text);
    weight_average_exchange(average, r->buffers, &r->optimizer, &r->ctx);
    return result;
}

// Save a checkpoint if one is due. Returns whether another step follows. A `signal` (0: none) ends the run. All ranks
// call it.
static inline int run_next_step(Run* r, int signal) {
    Session* s = &r->session;
    // A resumed run made up a validation that a signal had ended: its checkpoint is saved again, with the result.
    if (s->writer->step == s->step && group_any(s->group, log_has_late_result(&r->log, s->step)))
        s->writer->step = -1, r->checkpoint_is_due = 1;
    if (r->checkpoint_is_due || (r->settings.keep_best && s->best.step == s->step && s->step > 0)) run_save(r);
    if (r->is_paused) steps_restart_clock(&r->steps);
    r->checkpoint_is_due = r->is_paused = 0;
    if (s->step >= s->end || session_must_stop(s, signal)) return 0;
    group_begin_step(&r->group, s->step + 1);
    steps_profile_begin(&r->steps, s);
    return 1;
}

// A micro-batch of a step on this rank.
typedef struct {
    int index;            // of r->micro_steps
    int first;            // number of its first sequence in the whole step
    uint64_t sequence;    // number of that sequence in the run's data
    Direction direction;  // FORWARD: --mode excludes the backward pass
    Mode mode;            // how losses and gradients are written: SET for the step's first micro-batch, then ADD
} MicroBatch;

// The number, in the run's data, of the step's first sequence.
static inline uint64_t run_step_sequence(const Run* r) { return r->settings.overfit ? 0 : r->session.consumed; }

// Begin a step. The caller launches its micro-batches in a loop over run_next_micro_batch().
static inline MicroBatch run_begin_step(Run* r) {
    MicroBatch micro;
    memset(&micro, 0, sizeof micro);
    micro.index = -1;
    micro.sequence = run_step_sequence(r);
    micro.direction = r->settings.passes == PASSES_FORWARD ? FORWARD : BACKWARD;
    DropoutStep dropout = {
        .is_on = micro.direction == BACKWARD, .seed = (uint64_t)r->settings.seed, .step = (uint64_t)r->session.step};
    r->buffers->dropout = dropout;
    r->lr = schedule_at(&r->schedule, r->session.step);
    scope_step(&r->ctx, r->session.step + 1);
    fp8_state_begin_step(&r->buffers->fp8);
    if (r->session.step == r->buffers->fp8.steps) step_graph_restart(&r->steps.graph);  // with other matmuls
    return micro;
}

// Advance to the next micro-batch. Returns 0 after the last one. Gradients are all-reduced during the backward pass of
// the last one.
static inline int run_next_micro_batch(Run* r, MicroBatch* micro) {
    int i = ++micro->index, first = (i * r->group.size + r->group.rank) * r->settings.B;
    if (i > 0 && i < r->micro_steps) step_graph_end(&r->steps.graph, &r->ctx);
    if (i == r->micro_steps) {
        r->buffers->dropout.is_on = 0;
        return 0;
    }
    micro->sequence += (uint64_t)(first - micro->first);
    micro->first = first;
    micro->mode = i == 0 ? SET : ADD;
    if (i + 1 == r->micro_steps && micro->direction == BACKWARD) grad_sync_begin(&r->grad_sync);
    return 1;
}

// Call after the micro-batch is on the device. With --graph, launches are captured from here on. run_next_micro_batch()
// runs them; for the last micro-batch, run_log() does.
static inline void run_capture(Run* r, MicroBatch micro) {
    step_graph_begin(&r->steps.graph, micro.index == 0, micro.index + 1 == r->micro_steps, &r->ctx);
}

// Finish the all-reduce of the gradients, and all-reduce the losses.
static inline void run_all_reduce(Run* r, StepLosses losses) {
    steps_all_reduce(&r->session, r->buffers->grads, losses, &r->grad_sync);
    fp8_state_end_step(&r->buffers->fp8, r->session.step, &r->grad_sync, &r->ctx);
}

// Update the parameters, unless --mode excludes it.
static inline void run_update(Run* r, StepLosses losses) {
    steps_update(&r->session, r->buffers, losses, &r->optimizer, r->lr);
    if (r->settings.passes == PASSES_TRAIN)
        weight_average_step(&r->session.average, r->session.step + 1, r->buffers, &r->optimizer, &r->ctx);
}

// Sequences in a step over all ranks.
static inline int run_step_sequences(const Run* r) { return r->micro_steps * r->settings.B * r->group.size; }

// The step is launched: start reading its results, which run_end_step() logs.
static inline void run_log(Run* r, StepLosses losses, StepWork work) {
    steps_launched(&r->steps, &r->session, r->lr, work, losses, &r->optimizer);
    scope_step(&r->ctx, -1);
}

// After launching a step: read and log the results of all steps, or of all but the last. `pauses`: 1 if something other
// than a step and validation follows, which takes time and needs a complete log. Returns whether a validation is due.
static inline int run_end_step(Run* r, int pauses) {
    int profile = steps_profile_end(&r->steps, &r->session);
    int validation = r->has_val && session_is_due(&r->session, r->settings.val_every, 1);
    r->checkpoint_is_due = session_checkpoint_is_due(&r->session);
    r->is_paused = profile || pauses || validation || r->checkpoint_is_due;
    int lag = r->is_paused || r->session.step == r->session.end ? 0 : READBACK_LAG;
    steps_finish(&r->steps, lag, &r->session, &r->log, r->buffers, &r->optimizer);
    if (r->is_paused) group_begin_work(&r->group);
    if (validation) fp8_report(&r->buffers->fp8, r->session.group, &r->log, r->session.step, r->session.ctx);
    return validation;
}

// ---------------------------------------------------------------------------------------------------------
// Validation

// Advance to this rank's next micro-batch of the validation. A `signal` (0: none) ends the loop early, on this rank.
// Returns 0 after the last one: then share->is_stopped tells whether any rank received a signal. All ranks call it.
static inline int run_next_val(Run* r, ValShare* share, int signal) {
    group_begin_work(&r->group);
    if (!signal && val_share_next(share)) return 1;
    share->is_stopped = group_any(&r->group, signal != 0);
    return 0;
}

// After the last step: read and log the remaining results, save, draw the plot, and report how the run ended.
static inline void run_end(Run* r, const char* title) {
    steps_finish(&r->steps, 0, &r->session, &r->log, r->buffers, &r->optimizer);
    group_begin_work(&r->group);
    int failed = run_save(r) != 0 || session_finish_save(&r->session) != 0;
    log_write_svg(&r->log, title);
    steps_end(&r->steps, &r->session, failed);
}

// Free the model's buffers and everything else of the run.
static inline void run_close(Run* r) {
    model_buffers_free(r->buffers);
    steps_close(&r->steps);
    optimizer_free(&r->optimizer);
    log_close(&r->log);
    session_close(&r->session);
    matmul_plans_free(&r->ctx);
    grad_sync_close(&r->grad_sync);
    context_free(&r->ctx);
    group_close(&r->group);
    free(r->train_pattern), free(r->val_pattern), free(r->data_directory);
    free(r->start), free(r->hub), free(r->directory), free(r->weights), free(r->config.text);
}

#endif
