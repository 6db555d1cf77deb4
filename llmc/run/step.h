/* A training step. The trainer launches it between run_begin_step() and run_end_step(), and the host does not wait for
 * it. On the GPU, loss and norm are read, logged and checked one step late, so the host never stalls the device. */
#ifndef LLMC_RUN_STEP_H
#define LLMC_RUN_STEP_H

#include "llmc/fp8/report.h"
#include "llmc/run/evaluate.h"
#include "llmc/run/model_card.h"
#include "llmc/run/peak.h"

// A micro-batch of a step on this rank.
typedef struct {
    int index;            // of r->micro_steps
    int first;            // number of its first sequence in the whole step
    uint64_t sequence;    // number of that sequence in the run's data
    Direction direction;  // FORWARD: --mode excludes the backward pass
    Mode mode;            // how losses and gradients are written: SET for the step's first micro-batch, then ADD
} MicroBatch;

// Sequences in a step over all ranks.
static inline int run_step_sequences(const Run* r) { return r->micro_steps * r->settings.B * r->group.size; }

// The number, in the run's data, of the step's first sequence.
static inline uint64_t run_step_sequence(const Run* r) { return r->settings.overfit ? 0 : r->consumed; }

// ---------------------------------------------------------------------------------------------------------
// Open and close

// Check --profile and --graph before anything is written. There must be steps to profile.
static inline void run_open_steps(Run* r) {
    const Settings* settings = &r->settings;
    Steps* s = &r->steps;
    if (settings->profile && settings->evaluate)
        die(USAGE, "--profile %d measures training steps; --evaluate has none", settings->profile);
    if (settings->profile_energy && !GPU_BUILD)
        die(USAGE, "--profile-energy 1 measures a GPU by its driver's NVML; this is the CPU build");
    step_graph_open(&s->graph, settings, r->group.size);
    nvtx_open(&s->ranges, &r->ctx);
    for (size_t i = 0; i < COUNT_OF(s->launched); i++) readback_open(&s->launched[i].result);
    readback_open(&s->clock);
}

static inline void steps_close(Steps* s, Context* ctx) {
    for (size_t i = 0; i < COUNT_OF(s->launched); i++) readback_close(&s->launched[i].result);
    readback_close(&s->clock);
    step_graph_close(&s->graph);
    profiler_close(&s->profiler);
    nvtx_close(&s->ranges, ctx);
}

// Exclude the time between steps, such as a validation, from the next step.
static inline void run_restart_clock(Run* r) {
    Steps* s = &r->steps;
    readback_record(&r->ctx, &s->clock);
    s->last = &s->clock;
    energy_begin(&s->energy, now_seconds());
}

// Start at the run's current step.
static inline void run_begin_steps(Run* r) {
    const Settings* settings = &r->settings;
    Steps* s = &r->steps;
    s->finished = r->step;
    double known = peak_of_data_sheet();
    s->peak_flops = (known > 0 ? known : peak_matmul_flops(&r->ctx)) * r->group.size;
    s->peak_is_measured = known == 0;
    if (settings->profile_energy || (r->group.rank == 0 && *settings->out)) energy_open(&s->energy);
    if (settings->profile_energy && !s->energy.device) warn("--profile-energy 1: NVML has no energy counter here");
    profiler_open(&s->profiler, settings->profile_warmup, settings->profile, settings->fp8 > 0, r->step, &r->ctx);
    s->profiler.meter = s->energy.device ? &s->energy : NULL;
    s->profiler.measures_ops = settings->profile_energy && s->energy.device;
    run_restart_clock(r);
}

// ---------------------------------------------------------------------------------------------------------
// Launch

// Begin a step. The caller launches its micro-batches in a loop over run_next_micro_batch().
static inline MicroBatch run_begin_step(Run* r) {
    MicroBatch micro;
    memset(&micro, 0, sizeof micro);
    micro.index = -1;
    micro.sequence = run_step_sequence(r);
    micro.direction = r->settings.passes == PASSES_FORWARD ? FORWARD : BACKWARD;
    r->buffers->dropout = (DropoutStep){
        .is_on = micro.direction == BACKWARD, .seed = (uint64_t)r->settings.seed, .step = (uint64_t)r->step};
    r->lr = schedule_at(&r->schedule, r->step);
    scope_step(&r->ctx, r->step + 1);
    if (r->settings.fp8) fp8_state_begin_step(&r->buffers->fp8);
    if (r->step == r->buffers->fp8.steps) step_graph_restart(&r->steps.graph);  // with other matmuls
    return micro;
}

// Advance to the next micro-batch. Returns 0 after the last one. Gradients are all-reduced during the backward pass of
// the last one.
static inline int run_next_micro_batch(Run* r, MicroBatch* micro) {
    int i = ++micro->index, first = (i * r->group.size + r->group.rank) * r->settings.B;
    if (r->steps.graph.is_on && i > 0 && i < r->micro_steps) step_graph_end(&r->steps.graph, &r->ctx);
    if (i == r->micro_steps) {
        r->buffers->dropout.is_on = 0;
        return 0;
    }
    micro->sequence += (uint64_t)(first - micro->first);
    micro->first = first;
    micro->mode = i == 0 ? SET : ADD;
    int syncs = r->group.size > 1 && micro->direction == BACKWARD;
    if (syncs && i + 1 == r->micro_steps) grad_sync_begin(&r->grad_sync);
    return 1;
}

// Call after the micro-batch is on the device. With --graph, launches are captured from here on. run_next_micro_batch()
// runs them; for the last micro-batch, run_log() does.
static inline void run_capture(Run* r, MicroBatch micro) {
    StepGraph* graph = &r->steps.graph;
    if (graph->is_on) step_graph_begin(graph, micro.index == 0, micro.index + 1 == r->micro_steps, &r->ctx);
}

// Finish the all-reduce of the gradients, and all-reduce the losses.
static inline void run_all_reduce(Run* r, StepLosses losses) {
    GradSync* sync = &r->grad_sync;
    if (r->group.size > 1 && r->settings.passes != PASSES_FORWARD) grad_sync_finish(sync, r->buffers->grads, &r->ctx);
    for (int i = 0; r->group.size > 1 && i < losses.count; i++)
        grad_sync_all_reduce(sync, losses.values[i], 1, SUM_REAL, &r->ctx);
    if (r->settings.fp8) fp8_state_end_step(&r->buffers->fp8, r->step, &r->grad_sync, &r->ctx);
}

// Settings of the optimizer's update in this step.
static inline OptimizerSettings run_optimizer_settings(const Run* r) {
    const Settings* s = &r->settings;
    OptimizerSettings o;
    memset(&o, 0, sizeof o);
    o.lr = r->lr;
    o.beta1 = s->beta1, o.beta2 = s->beta2, o.eps = s->eps;
    o.weight_decay = s->weight_decay;
    o.max_norm = s->clip;
    o.rounding = rng_stream((uint64_t)s->seed, (uint64_t)r->step, 0, SITE_ROUNDING);
    o.cautious = s->cautious_decay;
    if (optimizer_is_muon((OptimizerKind)s->optimizer)) o.muon.momentum = muon_momentum_at(s->muon_warmup, r->step);
    return o;
}

// Update the parameters and share them among the ranks, unless --mode excludes the update.
static inline void run_update(Run* r, StepLosses losses) {
    if (r->settings.passes != PASSES_TRAIN) return;
    const real* all[OUTLIER_LOSSES] = {losses.values[0], losses.count > 1 ? losses.values[1] : NULL};
    optimizer_step(&r->optimizer, r->buffers->params, r->buffers->grads, run_optimizer_settings(r), all, &r->grad_sync,
                   &r->ctx);
    if (r->group.size > 1) {
        model_buffers_share(r->buffers, &r->ctx);
        collectives_check(&r->grad_sync.collectives);
    }
    if (r->average.decay > 0) weight_average_step(&r->average, r->step + 1, r->buffers, &r->optimizer, &r->ctx);
}

// After the first step: from now on, all ranks use the matmul algorithms that rank 0 chose. So does a resumed run,
// because the checkpoint has the algorithms of rank 0.
static inline void run_share_plans(Run* r) {
    Text plans = {NULL, 0, 0};
    r->shares_plans = 1;
    if (r->group.rank == 0) matmul_plans_text(&r->ctx, &plans);
    uint64_t length = plans.length;
    group_broadcast(&r->group, &length, sizeof length);
    char* text = (char*)xcalloc(length + 1, 1);
    if (plans.length) memcpy(text, plans.text, plans.length);
    group_broadcast(&r->group, text, length);
    if (r->group.rank > 0 && length) {
        matmul_plans_free(&r->ctx);
        matmul_plans_load(&r->ctx, text);
    }
    free(text), free(plans.text);
}

// The step is launched: start reading its results, which run_end_step() logs.
static inline void run_log(Run* r, StepLosses losses, StepWork work) {
    Steps* s = &r->steps;
    const Optimizer* o = &r->optimizer;
    LaunchedStep* launched = &s->launched[r->step % (int64_t)COUNT_OF(s->launched)];
    const real* results[STEP_LOSSES + 3] = {o->norm, &o->loss_scale->applied};
    int count = 2;
    for (int i = 0; i < losses.count; i++) results[count++] = losses.values[i];
    if (optimizer_judges_outliers(o)) results[count++] = &o->outliers->skipped;
    readback_copy(&r->ctx, &launched->result, results, count);
    if (s->graph.is_on) step_graph_end(&s->graph, &r->ctx);
    readback_record(&r->ctx, &launched->result);
    s->graph.steps++;
    launched->lr = r->lr;
    launched->work = work;
    if (r->settings.passes == PASSES_FORWARD) launched->work.flops /= 3;  // the backward pass has the other two thirds
    launched->losses = losses;
    launched->step = ++r->step;
    if (r->group.size > 1 && !r->shares_plans) run_share_plans(r);
    device_set_autotune(&r->ctx, 0);
    r->consumed += (uint64_t)work.consumed;
    scope_step(&r->ctx, -1);
}

// ---------------------------------------------------------------------------------------------------------
// Read and log results

// Add to a line of log.jsonl: energy and clock, if their measurement ended with this step; and with several losses,
// each loss and sequences per second.
static inline void steps_extra(Text* t, const LaunchedStep* done, double seconds, EnergyMeter* energy) {
    double joules = energy->device ? energy_step(energy, now_seconds()) : (double)NAN;
    if (!isnan(joules)) log_put(t, "joules", joules, 6), log_put(t, "mhz", energy_mhz(energy), 6);
    if (done->losses.count < 2) return;
    for (int i = 0; i < done->losses.count; i++)
        log_put(t, done->losses.names[i], (double)done->result.values[2 + i], 9);
    log_put(t, "seq_s", done->work.sequences / seconds, 6);
}

// Whether the gradients overflowed only because of the loss scale. Then the optimizer has skipped the update and
// lowered the scale, and the run continues. A non-finite loss, or an overflow at the lowest scale, is an error.
static inline int steps_is_overflow(LossScaleRule rule, double loss, double norm, double scale) {
    return !isfinite(norm) && isfinite(loss) && rule.kind == LOSS_SCALE_DYNAMIC && scale > LOSS_SCALE_FLOOR;
}

// Wait for a step's results, which depend on the other ranks. Polls for NCCL errors; otherwise the wait might not end.
static inline void run_await(const Run* r, Readback* result) {
    const struct timespec moment = {.tv_sec = 0, .tv_nsec = 100000};
    while (r->group.size > 1 && !readback_has_arrived(result)) {
        collectives_check(&r->grad_sync.collectives);
        nanosleep(&moment, NULL);
    }
    readback_wait(result);
}

// Wait for the oldest step, log it, and check that its loss and norm are finite.
static inline void run_finish_step(Run* r) {
    Steps* s = &r->steps;
    const Optimizer* o = &r->optimizer;
    LaunchedStep* done = &s->launched[s->finished % (int64_t)COUNT_OF(s->launched)];
    run_await(r, &done->result);
    double loss = 0, norm = (double)done->result.values[0], scale = (double)done->result.values[1];
    double seconds = readback_seconds(s->last, &done->result);
    for (int i = 0; i < done->losses.count; i++) loss += (double)done->result.values[2 + i];
    int overflow = steps_is_overflow(o->rule, loss, norm, scale);
    int is_outlier = optimizer_judges_outliers(o) && done->result.values[2 + done->losses.count] != 0;
    int is_scaled = o->rule.kind == LOSS_SCALE_DYNAMIC || scale != 1;
    // If the machine was busy at the start, the measured peak was too low.
    if (s->peak_is_measured) s->peak_flops = fmax(s->peak_flops, done->work.flops / seconds);
    Text extra = {NULL, 0, 0};
    steps_extra(&extra, done, seconds, &s->energy);
    if (is_outlier) json_put_bool(&extra, "skipped", 1);
    LogStep line;
    memset(&line, 0, sizeof line);
    line.step = done->step, line.steps = r->last;
    line.loss = loss, line.lr = done->lr, line.grad_norm = norm;
    line.seconds = seconds;
    line.tokens_per_second = done->work.tokens / seconds;
    line.mfu = done->work.flops / seconds / s->peak_flops;
    line.loss_scale = is_scaled ? scale : 0;
    line.note = overflow     ? "gradients overflowed: update skipped, loss scale lowered"
                : is_outlier ? "an outlier: update skipped"
                             : NULL;
    line.extra = extra.text;
    s->last = &done->result;
    s->finished = done->step;
    if (s->profiler.count) profiler_step_took(&s->profiler, done->step - 1, seconds);
    if (!isfinite(norm) && !overflow) run_report_nan(r, done->step, loss, norm);
    log_step(&r->log, &line);
    free(extra.text);
}

// Finish all launched steps but the last `lag`.
static inline void run_finish_steps(Run* r, int lag) {
    while (r->step - r->steps.finished > lag) run_finish_step(r);
}

// ---------------------------------------------------------------------------------------------------------
// --profile

static inline ProfiledRun run_profiled(Run* r) {
    const Steps* s = &r->steps;
    const int64_t count = (int64_t)COUNT_OF(s->launched);
    const LaunchedStep* newest = &s->launched[(r->step + count - 1) % count];  // before the first step: an empty one
    ProfiledRun run;
    memset(&run, 0, sizeof run);
    run.out = r->settings.out, run.lock = &r->lock;
    run.passes = settings_passes_name(r->settings.passes);
    run.flops = newest->work.flops;
    run.group = &r->group;
    run.broadcast_overlaps = READBACK_LAG > 0 && r->settings.zero && r->group.size > 1;
    return run;
}

// Before the launch of a step.
static inline void run_begin_profiled_step(Run* r) {
    if (!profiler_prepare_step(&r->steps.profiler, r->step, &r->ctx)) return;
    run_restart_clock(r);  // the step's time excludes its preparation
    profiler_begin_step(&r->steps.profiler, &r->ctx);
}

// After the launch of a step: write the report after the last profiled one. Returns 1 if the step's results must be
// read at once and the clock restarted.
static inline int run_end_profiled_step(Run* r) {
    Profiler* profiler = &r->steps.profiler;
    int at_once = profiler_reads_at_once(profiler, r->step - 1);
    if (profiler_end_step(profiler, r->step - 1, &r->ctx)) {
        group_begin_work(&r->group);
        ProfiledRun run = run_profiled(r);
        profiler_report(stdout, profiler, &run);
    }
    return at_once;
}

// ---------------------------------------------------------------------------------------------------------
// Between steps

// Whether something is due now: every `every` steps (0: never), and with `at_end` also after the run's last step.
static inline int run_is_due(const Run* r, int every, int at_end) {
    return every > 0 && (r->step % every == 0 || (at_end && r->step == r->last));
}

// Whether a result with key `key` in log.jsonl is due before the first step of this process. It is due only if the log
// lacks it, as in a new run, or if a signal interrupted it. All ranks call it.
static inline int run_is_missing(const Run* r, int every, const char* key) {
    return group_any(&r->group, r->group.rank == 0 && run_is_due(r, every, 1) && !log_has(&r->log, key));
}

// The same for a validation.
static inline int run_lacks_validation(const Run* r, const char* key) {
    return r->has_val && run_is_missing(r, r->settings.val_every, key);
}

// Read and log the results of all launched steps, or of all but the last. `pauses`: 1 if something other than a step
// and validation follows, which takes time and needs a complete log. Returns whether a validation is due.
static inline int run_end_step(Run* r, int pauses) {
    int profile = r->steps.profiler.count && run_end_profiled_step(r);
    int validation = r->has_val && run_is_due(r, r->settings.val_every, 1);
    if (r->writer->phase != WRITER_IDLE) writer_poll(r->writer);  // a checkpoint is written in the background
    r->checkpoint_is_due = run_is_due(r, r->settings.checkpoint_every, 0);
    r->is_paused = profile || pauses || validation || r->checkpoint_is_due;
    run_finish_steps(r, r->is_paused || r->step == r->end ? 0 : READBACK_LAG);
    if (r->is_paused) group_begin_work(&r->group);
    if (validation) fp8_report(&r->buffers->fp8, &r->group, &r->log, r->step, &r->ctx);
    return validation;
}

// Save the model and the optimizer. Returns 0, -1 after a warning.
static inline int run_save(Run* r) {
    WeightAverage* average = &r->average;
    grad_sync_wait(&r->grad_sync, GRAD_SYNC_LAST, &r->ctx);  // the other ranks' parameters are on their way
    const char* val = r->settings.val_every ? r->val_pattern : NULL;
    Text card = model_card(r, val, 0);
    int result = run_save_checkpoint(r, card.text);
    free(card.text);
    if (!weight_average_is_on(average, r->step) || average->saved == r->step) return result;
    average->saved = r->step;
    weight_average_exchange(average, r->buffers, &r->optimizer, &r->ctx);
    grad_sync_wait(&r->grad_sync, GRAD_SYNC_LAST, &r->ctx);
    card = model_card(r, val, 1);
    run_save_average(r, card.text);
    free(card.text);
    weight_average_exchange(average, r->buffers, &r->optimizer, &r->ctx);
    return result;
}

// The first of the ranks' reasons to stop.
static inline int run_gather_stop(const Run* r, int stop) {
    int first = 0, *stops = (int*)xmalloc((size_t)r->group.size * sizeof *stops);
    group_gather(&r->group, stops, &stop, sizeof stop);
    for (int rank = 0; rank < r->group.size; rank++)
        if (!first || stops[rank] == LOCK_IS_LOST) first = stops[rank];
    free(stops);
    return first;
}

// Whether all ranks stop now: a rank received a signal (`signal`; 0: this one did not). Ends the run if another run has
// locked OUT.
static inline int run_must_stop(Run* r, int signal) {
    int stop = r->lock.path && run_lock_check(&r->lock) != 0 ? LOCK_IS_LOST : signal;
    if (r->group.size > 1) stop = run_gather_stop(r, stop);
    if (stop == LOCK_IS_LOST) checkpoint_die(&r->group, FAILED, RUN_LOCK_LOST, r->settings.out);
    if (!r->stop) r->stop = stop;
    return r->stop != 0;
}

// Save a checkpoint if one is due. Returns whether another step follows. A `signal` (0: none) ends the run. All ranks
// call it.
static inline int run_next_step(Run* r, int signal) {
    if (r->checkpoint_is_due || (r->settings.keep_best && r->best.step == r->step && r->step > 0)) run_save(r);
    if (r->is_paused) run_restart_clock(r);
    r->checkpoint_is_due = r->is_paused = 0;
    if (r->step >= r->end || run_must_stop(r, signal)) return 0;
    if (r->group.size > 1) group_begin_step(&r->group, r->step + 1);
    if (r->steps.profiler.count) run_begin_profiled_step(r);
    return 1;
}

#endif
