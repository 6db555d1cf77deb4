/* A run: what every trainer has besides its model and its data. A trainer calls the functions in this order:
 *
 *   run_join          after parsing the flags: join the other ranks, open the device, find the checkpoint to resume
 *   run_check_memory  check that the memory plan fits. If not, report the largest micro-batch that does, and exit
 *   run_prepare       make the optimizer, and give the model's buffers what they need from it
 *   run_share         after loading the weights: check that all ranks have the same
 *   run_begin         open the log. From here on the run writes files
 *   run_next_step     is another step due? The trainer launches it: run_lr, run_begin_micro_batch, run_end_micro_batch
 *   run_end_step      read and log results. Then the trainer does what else is due, such as validation
 *   run_save          write a checkpoint
 *   run_end           the last results, the last checkpoint, the plot
 *   run_close */
#ifndef LLMC_RUN_RUN_H
#define LLMC_RUN_RUN_H

#include "llmc/base/process.h"
#include "llmc/optim/model_buffers.h"
#include "llmc/run/steps.h"

typedef struct {
    Settings settings;
    Flag flags[MAX_FLAGS];
    int flag_count;
    Session session;
    Context ctx;
    ProcessGroup group;
    GradSync grad_sync;
    MemoryPlan plan;
    Optimizer optimizer;
    int micro_steps;  // micro-batches of a step on this rank
    Steps steps;
    Schedule schedule;
    Log log;
    int checkpoint_is_due;  // after the step that just ended
    int is_paused;          // exclude the time until the next step from that step
} Run;

// After parsing the flags: join the other ranks, open the device and find the checkpoint to resume. Writes nothing.
static inline void run_join(Run* r) {
    session_join(&r->settings, &r->group);
    session_open(&r->session, &r->settings, r->flags, r->flag_count, &r->group, &r->ctx);
}

// The sequence length: -t, or by default the model's number of positions. Sets r->micro_steps.
static inline int run_sequence_length(Run* r, int positions) {
    int T = r->settings.T ? r->settings.T : positions;
    if (T > positions) die(USAGE, "-t %d: the model knows %d positions; choose at most that", T, positions);
    r->micro_steps = session_micro_steps(&r->session, r->settings.B, T);
    return T;
}

// Check that all ranks train the same model on the same data. Frees `config`, the text of the model's config.json.
static inline void run_check_ranks(const Run* r, Text config, uint32_t val_data) {
    session_check_ranks(&r->session, config.text, val_data);
    free(config.text);
}

// A search for the largest micro-batch whose memory plan fits.
typedef struct {
    const MemoryPlan* refused;  // NULL: the plan fits
    int low, high;
    int B;            // the size to plan next
    MemoryPlan plan;  // the plan for B, set by the caller
} BatchSearch;

// r->plan is the plan for micro-batches of B sequences. --steps 0 prints it with the settings and the tensors, and
// exits. If the plan does not fit, the caller plans each size that batch_search_next() asks for, until that exits.
static inline BatchSearch run_check_memory(Run* r, const TensorTable* table, int B) {
    BatchSearch search;
    memset(&search, 0, sizeof search);
    if (r->settings.steps == 0) memory_plan_show(r->flags, r->flag_count, table, &r->plan, &r->group);
    if (!memory_plan_fits(r->plan)) search.refused = &r->plan, search.high = B;
    return search;
}

// Returns 1 if the caller must set search->plan to the plan for micro-batches of search->B, 0 if the first plan fits.
static inline int batch_search_next(BatchSearch* search) {
    if (!search->refused) return 0;
    if (search->B && memory_plan_fits(search->plan)) search->low = search->B;
    else if (search->B) search->high = search->B - 1;
    if (search->low == search->high) memory_plan_refuse(search->refused, search->low);
    search->B = (search->low + search->high + 1) / 2;
    return 1;
}

// After allocating the model: make the optimizer, and give the buffers what they need from it.
static inline void run_prepare(Run* r, ModelBuffers* b) {
    optimizer_join(&r->optimizer, &r->grad_sync, &b->table, session_update(&r->session), &r->group, &r->ctx);
    session_set_steps(&r->session, &r->optimizer);
    b->grad_sync = &r->grad_sync;
    b->loss_scale = &r->optimizer.loss_scale->scale;
    b->master = r->optimizer.master;
    steps_open(&r->steps, &r->settings);
}

// Load weights and moments from a complete checkpoint.
static inline void run_load_checkpoint(Run* r, const ModelBuffers* b, const char* checkpoint) {
    session_load(&r->session, checkpoint, &b->table, b->params, &b->fp32_copies, &r->optimizer);
}

// After loading the weights: check that all ranks have the same, and share the fp32 copies.
static inline void run_share(Run* r, const ModelBuffers* b) {
    check_same_weights(&r->group, &b->table, b->params, &r->ctx);
    fp32_copies_share(&b->fp32_copies, &b->table, b->params, b->master, b->grad_sync, &r->ctx);
}

// From here on the run writes files. The first line on the terminal reports the number of training tokens (`tokens`)
// and of tokens in a step over all ranks (`step_tokens`). `about`: "" if the latter is exact, else "about " or
// "at most ".
static inline void run_begin(Run* r, const ModelBuffers* b, uint64_t tokens, const char* about, double step_tokens) {
    session_begin(&r->session, &r->log);
    steps_begin(&r->steps, &r->session, &r->grad_sync);
    steps_print_start(&r->steps, &r->session, b->table.parameters, tokens, about, step_tokens);
    memory_plan_print(stdout, &r->plan);
    r->schedule = session_schedule(&r->session);
    r->is_paused = 1;
}

// Whether another step follows. `signal` (0: none) or the time limit ends the run. All ranks call it.
static inline int run_next_step(Run* r, int signal) {
    if (r->is_paused) steps_restart_clock(&r->steps);
    r->is_paused = 0;
    if (r->session.step >= r->session.end || session_must_stop(&r->session, signal)) return 0;
    steps_profile_begin(&r->steps, &r->session);
    return 1;
}

// The learning rate of the current step.
static inline double run_lr(const Run* r) { return schedule_at(&r->schedule, r->session.step); }

// Begin micro-batch i of the step on this rank. Gradients are all-reduced during the backward pass of the last one.
static inline void run_begin_micro_batch(Run* r, int i) {
    if (i + 1 == r->micro_steps && r->settings.mode != MODE_FORWARD) grad_sync_begin(&r->grad_sync);
    steps_begin_launch(&r->session);
}

static inline void run_end_micro_batch(Run* r) { steps_end_launch(&r->session); }

static inline StepModel run_step_model(const ModelBuffers* b) {
    StepModel model = {&b->table, b->params, b->grads, &b->fp32_copies};
    return model;
}

// After launching a step: read and log the results of all steps, or of all but the last. `pauses`: 1 if something other
// than a step follows, such as validation, which takes time and needs a complete log.
static inline void run_end_step(Run* r, const ModelBuffers* b, int pauses) {
    int profile = steps_profile_end(&r->steps, &r->session, &r->plan);
    r->checkpoint_is_due = session_checkpoint_is_due(&r->session);
    r->is_paused = profile || pauses || r->checkpoint_is_due;
    int lag = r->is_paused || r->session.step == r->session.end ? 0 : READBACK_LAG;
    steps_finish(&r->steps, lag, &r->session, &r->log, &b->table, b->grads, &r->optimizer);
}

// Save the model, with `config` as its config.json, and the optimizer. Frees `config`. Returns 0, -1 after a warning.
static inline int run_save(Run* r, const ModelBuffers* b, Text config) {
    grad_sync_wait(&r->grad_sync, GRAD_SYNC_LAST, &r->ctx);  // the other ranks' parameters are on their way
    int result = session_save(&r->session, &b->table, b->params, &r->optimizer, config.text);
    free(config.text);
    return result;
}

// After the last step: read and log the remaining results, save, draw the plot, and report how the run ended.
static inline void run_end(Run* r, const ModelBuffers* b, Text config, const char* title) {
    steps_finish(&r->steps, 0, &r->session, &r->log, &b->table, b->grads, &r->optimizer);
    int failed = run_save(r, b, config) != 0 || session_finish_save(&r->session) != 0;
    log_write_svg(&r->log, title);
    steps_end(&r->steps, &r->session, &r->plan, failed);
}

// Call after the trainer has freed its model and closed its data.
static inline void run_close(Run* r) {
    steps_close(&r->steps);
    optimizer_free(&r->optimizer);
    log_close(&r->log);
    session_close(&r->session);
    matmul_plans_free(&r->ctx);
    grad_sync_close(&r->grad_sync);
    context_free(&r->ctx);
    group_close(&r->group);
}

#endif
