/* A training step. The trainer launches it between run_begin_step() and run_end_step(), and the host does not wait for
 * it. On the GPU, loss and norm are read, logged and checked one step late, so the host never stalls the device. */
#ifndef LLMC_RUN_STEP_H
#define LLMC_RUN_STEP_H

#include "llmc/run/evaluate.h"
#include "llmc/run/peak.h"

// Sequences in a step over all ranks.
static inline int run_step_sequences(const Run* r) { return r->micro_steps * r->settings.B * r->group.size; }

// The number, in the run's data, of the step's first sequence.
static inline uint64_t run_step_sequence(const Run* r) { return r->settings.overfit ? 0 : r->consumed; }

// The number, in the whole step, of the first sequence of this rank's micro-batch i.
static inline int run_micro_batch_first(const Run* r, int i) {
    return (i * r->group.size + r->group.rank) * r->settings.B;
}

// ---------------------------------------------------------------------------------------------------------
// Open and close

// Check --profile and --graph before anything is written. There must be steps to profile.
static inline void run_open_steps(Run* r) {
    const Settings* settings = &r->settings;
    if (settings->profile && settings->evaluate)
        die(USAGE, "--profile %d measures training steps; --evaluate has none", settings->profile);
    if (settings->profile_energy && !GPU_BUILD)
        die(USAGE, "--profile-energy 1 measures a GPU by its driver's NVML; this is the CPU build");
    step_graph_open(&r->graph, settings, r->group.size);
    nvtx_open(&r->ranges, &r->ctx);
    for (size_t i = 0; i < COUNT_OF(r->launched); i++) readback_open(&r->launched[i].result);
    readback_open(&r->clock);
}

static inline void run_close_steps(Run* r) {
    for (size_t i = 0; i < COUNT_OF(r->launched); i++) readback_close(&r->launched[i].result);
    readback_close(&r->clock);
    step_graph_close(&r->graph);
    profiler_close(&r->profiler);
    nvtx_close(&r->ranges, &r->ctx);
}

// Exclude the time between steps, such as a validation, from the next step.
static inline void run_restart_clock(Run* r) {
    readback_record(&r->ctx, &r->clock);
    r->step_start = &r->clock;
    energy_begin(&r->energy, now_seconds());
}

// Start at the run's current step.
static inline void run_begin_steps(Run* r) {
    const Settings* settings = &r->settings;
    r->finished = r->step;
    double known = peak_of_data_sheet();
    r->peak_flops = (known > 0 ? known : peak_matmul_flops(&r->ctx)) * r->group.size;
    r->peak_is_measured = known == 0;
    if (settings->profile_energy || (r->group.rank == 0 && *settings->out)) energy_open(&r->energy);
    if (settings->profile_energy && !r->energy.device) warn("--profile-energy 1: NVML has no energy counter here");
    profiler_open(&r->profiler, settings->profile_warmup, settings->profile, settings->fp8 > 0, r->step, &r->ctx);
    r->profiler.meter = r->energy.device ? &r->energy : NULL;
    r->profiler.measures_ops = settings->profile_energy && r->energy.device;
    run_restart_clock(r);
}

// ---------------------------------------------------------------------------------------------------------
// Launch

// Begin a step. The caller launches its r->micro_steps micro-batches.
static inline void run_begin_step(Run* r, StepWork work) {
    r->work = work;
    r->direction = r->settings.passes == PASSES_FORWARD ? FORWARD : BACKWARD;
    r->buffers->dropout =
        (DropoutStep){.is_on = r->direction == BACKWARD, .seed = (uint64_t)r->settings.seed, .step = (uint64_t)r->step};
    r->lr = schedule_at(&r->schedule, r->step);
    scope_step(&r->ctx, r->step + 1);
    if (r->settings.fp8) fp8_state_begin_step(&r->buffers->fp8);
    if (r->step == r->buffers->fp8.steps) step_graph_restart(&r->graph);  // with other matmuls
}

// Micro-batch i is on the device. Gradients are all-reduced during the backward pass of the last one. With --graph,
// launches are captured from here on.
static inline void run_begin_micro_batch(Run* r, int i) {
    int is_last = i + 1 == r->micro_steps;
    if (r->group.size > 1 && r->direction == BACKWARD && is_last) grad_sync_begin(&r->grad_sync);
    if (r->graph.is_on) step_graph_begin(&r->graph, i == 0, is_last, &r->ctx);
}

// All of micro-batch i is launched. With --graph, the captured launches run now; those of the last micro-batch run in
// run_read_results().
static inline void run_end_micro_batch(Run* r, int i) {
    int is_last = i + 1 == r->micro_steps;
    if (r->graph.is_on && !is_last) step_graph_end(&r->graph, &r->ctx);
    if (is_last) r->buffers->dropout.is_on = 0;
}

// Finish the all-reduce of the gradients, and all-reduce the losses.
static inline void run_all_reduce(Run* r) {
    if (r->group.size > 1 && r->direction == BACKWARD) grad_sync_finish(&r->grad_sync, r->buffers->grads, &r->ctx);
    for (int i = 0; r->group.size > 1 && i < STEP_LOSSES && r->work.losses[i]; i++)
        grad_sync_all_reduce(&r->grad_sync, r->work.losses[i], 1, SUM_REAL, &r->ctx);
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
    if (optimizer_is_muon(s->optimizer)) o.muon.momentum = muon_momentum_at(s->muon_warmup, r->step);
    return o;
}

// Update the parameters and share them among the ranks, unless --mode excludes the update.
static inline void run_update(Run* r) {
    if (r->settings.passes != PASSES_TRAIN) return;
    const real* losses[OUTLIER_LOSSES] = {r->work.losses[0], r->work.losses[1]};
    optimizer_step(&r->optimizer, r->buffers->params, r->buffers->grads, run_optimizer_settings(r), losses,
                   &r->grad_sync, &r->ctx);
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

// The step is launched: start the read of its results, which run_end_step() logs, and advance r->step.
static inline void run_read_results(Run* r) {
    const Optimizer* o = &r->optimizer;
    LaunchedStep* launched = &r->launched[r->step % (int64_t)COUNT_OF(r->launched)];
    const real* results[STEP_LOSSES + 3] = {o->norm, &o->loss_scale->applied};
    int count = 2;
    for (int i = 0; i < STEP_LOSSES && r->work.losses[i]; i++) results[count++] = r->work.losses[i];
    if (optimizer_judges_outliers(o)) results[count++] = &o->outliers->skipped;
    readback_copy(&r->ctx, &launched->result, results, count);
    if (r->graph.is_on) step_graph_end(&r->graph, &r->ctx);
    readback_record(&r->ctx, &launched->result);
    r->graph.steps++;
    launched->lr = r->lr;
    launched->work = r->work;
    if (r->settings.passes == PASSES_FORWARD) launched->work.flops /= 3;  // the backward pass has the other two thirds
    launched->step = ++r->step;
    if (r->group.size > 1 && !r->shares_plans) run_share_plans(r);
    device_set_autotune(&r->ctx, 0);
    r->consumed += (uint64_t)r->work.consumed;
    scope_step(&r->ctx, -1);
}

// ---------------------------------------------------------------------------------------------------------
// Read and log results

// Add to a line of log.jsonl: energy and clock, if their measurement ended with this step; and with several losses,
// each loss and sequences per second.
static inline void run_put_extra(Run* r, Text* t, const LaunchedStep* done, double seconds) {
    double joules = r->energy.device ? energy_step(&r->energy, now_seconds()) : (double)NAN;
    if (!isnan(joules)) log_put(t, "joules", joules, 6), log_put(t, "mhz", energy_mhz(&r->energy), 6);
    if (!done->work.losses[1]) return;
    for (int i = 0; i < STEP_LOSSES; i++) log_put(t, done->work.loss_names[i], (double)done->result.values[2 + i], 9);
    log_put(t, "seq_s", done->work.sequences / seconds, 6);
}

// Whether the gradients overflowed only because of the loss scale. Then the optimizer has skipped the update and
// lowered the scale, and the run continues. A non-finite loss, or an overflow at the lowest scale, is an error.
static inline int run_has_overflowed(int is_scaled, double loss, double norm, double scale) {
    return !isfinite(norm) && isfinite(loss) && is_scaled && scale > LOSS_SCALE_FLOOR;
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
    const Optimizer* o = &r->optimizer;
    LaunchedStep* done = &r->launched[r->finished % (int64_t)COUNT_OF(r->launched)];
    run_await(r, &done->result);
    double loss = 0, norm = (double)done->result.values[0], scale = (double)done->result.values[1];
    double seconds = readback_seconds(r->step_start, &done->result);
    int next = 2;
    for (int i = 0; i < STEP_LOSSES && done->work.losses[i]; i++) loss += (double)done->result.values[next++];
    int is_scaled = o->rule.kind == LOSS_SCALE_DYNAMIC, overflow = run_has_overflowed(is_scaled, loss, norm, scale);
    int is_outlier = optimizer_judges_outliers(o) && done->result.values[next] != 0;
    // If the machine was busy at the start, the measured peak was too low.
    if (r->peak_is_measured) r->peak_flops = fmax(r->peak_flops, done->work.flops / seconds);
    Text extra = {NULL, 0, 0};
    run_put_extra(r, &extra, done, seconds);
    if (is_outlier) json_put_bool(&extra, "skipped", 1);
    LogStep line;
    memset(&line, 0, sizeof line);
    line.step = done->step, line.steps = r->last;
    line.loss = loss, line.lr = done->lr, line.grad_norm = norm;
    line.seconds = seconds;
    line.tokens_per_second = done->work.tokens / seconds;
    line.mfu = done->work.flops / seconds / r->peak_flops;
    line.loss_scale = is_scaled ? scale : 0;
    line.note = overflow     ? "gradients overflowed: update skipped, loss scale lowered"
                : is_outlier ? "an outlier: update skipped"
                             : NULL;
    line.extra = extra.text;
    r->step_start = &done->result;
    r->finished = done->step;
    if (r->profiler.count) profiler_step_took(&r->profiler, done->step - 1, seconds);
    if (!isfinite(norm) && !overflow) run_report_nan(r, done->step, loss, norm);
    log_step(&r->log, &line);
    free(extra.text);
}

// Finish all launched steps but the last `lag`.
static inline void run_finish_steps(Run* r, int lag) {
    while (r->step - r->finished > lag) run_finish_step(r);
}

// ---------------------------------------------------------------------------------------------------------
// --profile

static inline ProfiledRun run_profiled(Run* r) {
    const int64_t count = (int64_t)COUNT_OF(r->launched);
    const LaunchedStep* newest = &r->launched[(r->step + count - 1) % count];  // before the first step: an empty one
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
    if (!profiler_prepare_step(&r->profiler, r->step, &r->ctx)) return;
    run_restart_clock(r);  // the step's time excludes its preparation
    profiler_begin_step(&r->profiler, &r->ctx);
}

// After the launch of a step: write the report after the last profiled one. Returns 1 if the step's results must be
// read at once and the clock restarted.
static inline int run_end_profiled_step(Run* r) {
    Profiler* profiler = &r->profiler;
    int at_once = profiler_reads_at_once(profiler, r->step - 1);
    if (profiler_end_step(profiler, r->step - 1, &r->ctx)) {
        group_begin_work(&r->group);
        ProfiledRun run = run_profiled(r);
        profiler_report(stdout, profiler, &run);
    }
    return at_once;
}

// ---------------------------------------------------------------------------------------------------------
// Between steps: work that is due

static inline int run_is_due(const Run* r, const DueWork* d) {
    return d->every > 0 && (r->step % d->every == 0 || r->step == r->last);
}

// Whether the log has a result of this step. All ranks call it.
static inline int run_has_result(const Run* r, const char* key) {
    return group_any(&r->group, r->group.rank == 0 && log_has_result(&r->log, key, r->step));
}

static inline void run_do(Run* r, const DueWork* d) {
    int exchanges = d->of_average;
    if (exchanges && !weight_average_is_on(&r->average, r->step)) return;
    if (exchanges) weight_average_exchange(&r->average, r->buffers, &r->optimizer, &r->ctx);
    d->work(r);
    if (exchanges) weight_average_exchange(&r->average, r->buffers, &r->optimizer, &r->ctx);
}

// Work of a table: the statistics of --fp8, which precede a validation.
static inline void run_report_fp8(Run* r) { fp8_report(&r->buffers->fp8, &r->group, &r->log, r->step, &r->ctx); }

// Save the model and the optimizer. A failure is only a warning here, and a status in r->save_failed.
static inline void run_save(Run* r) {
    WeightAverage* average = &r->average;
    grad_sync_wait(&r->grad_sync, GRAD_SYNC_LAST, &r->ctx);  // the other ranks' parameters are on their way
    const char* val = r->settings.val_every ? r->val_pattern : NULL;
    Text card = model_card(r, val, 0);
    r->save_failed = run_save_checkpoint(r, card.text) != 0;
    free(card.text);
    if (!weight_average_is_on(average, r->step) || average->saved == r->step) return;
    average->saved = r->step;
    weight_average_exchange(average, r->buffers, &r->optimizer, &r->ctx);
    grad_sync_wait(&r->grad_sync, GRAD_SYNC_LAST, &r->ctx);
    card = model_card(r, val, 1);
    run_save_average(r, card.text);
    free(card.text);
    weight_average_exchange(average, r->buffers, &r->optimizer, &r->ctx);
}

// Before the first step of this process: do the due work whose results the log lacks, as that of a new run does, or of
// one that a signal or a kill has ended too early.
static inline void run_catch_up(Run* r) {
    for (const DueWork* d = r->due; d < r->due + r->due_count; d++)
        if (d->result && run_is_due(r, d) && !run_has_result(r, d->result)) run_do(r, d);
    run_restart_clock(r);
}

// Read and log the results of all launched steps, or of all but the last if nothing is due. Then do what is due, which
// takes time and needs a complete log.
static inline void run_end_step(Run* r) {
    int pauses = r->profiler.count && run_end_profiled_step(r);
    if (r->writer->phase != WRITER_IDLE) writer_poll(r->writer);  // a checkpoint is written in the background
    for (const DueWork* d = r->due; d < r->due + r->due_count; d++) pauses |= run_is_due(r, d);
    run_finish_steps(r, pauses || r->step == r->end ? 0 : READBACK_LAG);
    if (!pauses) return;
    group_begin_work(&r->group);
    for (const DueWork* d = r->due; d < r->due + r->due_count; d++)
        if (run_is_due(r, d)) run_do(r, d);
    if (r->settings.keep_best && r->best.step == r->step) run_save(r);
    run_restart_clock(r);
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

// Whether another step follows. A `signal` to any rank (0: none to this one) ends the run, and so does another run that
// has locked OUT. All ranks call it.
static inline int run_next_step(Run* r, int signal) {
    if (r->step >= r->end) return 0;
    int stop = r->lock.path && run_lock_check(&r->lock) != 0 ? LOCK_IS_LOST : signal;
    if (r->group.size > 1) stop = run_gather_stop(r, stop);
    if (stop == LOCK_IS_LOST) group_die(&r->group, FAILED, RUN_LOCK_LOST, r->settings.out);
    if (!r->stop) r->stop = stop;
    if (r->stop) return 0;
    if (r->group.size > 1) group_begin_step(&r->group, r->step + 1);
    if (r->profiler.count) run_begin_profiled_step(r);
    return 1;
}

#endif
