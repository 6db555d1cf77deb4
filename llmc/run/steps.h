/* The steps of a run. The host launches a step without waiting for it. On the GPU, loss and norm are read, logged and
 * checked one step late, so that the host never stalls the device. */
#ifndef LLMC_RUN_STEPS_H
#define LLMC_RUN_STEPS_H

#include "llmc/device/energy.h"
#include "llmc/device/readback.h"
#include "llmc/optim/model_buffers.h"
#include "llmc/profile/report.h"
#include "llmc/run/nonfinite.h"
#include "llmc/run/step_graph.h"

enum { STEP_LOSSES = 2 };

// The work of a step, over all ranks.
typedef struct {
    int consumed;  // sequences by which the position in the data advances
    double sequences, tokens, flops;
} StepWork;

// The losses whose sum a step minimises, [1] each, on the device, and their names in log.jsonl.
typedef struct {
    int count;
    real* values[STEP_LOSSES];
    const char* names[STEP_LOSSES];
} StepLosses;

// A launched step whose results are not read yet.
typedef struct {
    int64_t step;  // its number, from 1
    double lr;
    StepWork work;
    StepLosses losses;
    Readback result;  // gradient norm, loss scale of the gradients, losses, whether the update was skipped
} LaunchedStep;

typedef struct {
    LaunchedStep launched[READBACK_LAG + 2];  // steps in flight, and the previous one, whose end is their start
    int64_t finished;                         // steps whose results are read
    Readback clock;                           // without values: only a time, between steps
    const Readback* last;                     // its end is the start of the next step to finish
    Context* ctx;
    const GradSync* grad_sync;
    StepGraph graph;
    double peak_flops;     // of the hardware of all ranks, per second
    int peak_is_measured;  // 1: this device is not in the table of data-sheet peaks
    Profiler profiler;
    EnergyMeter energy;  // on rank 0, which writes the log, and on all ranks with --profile-energy
} Steps;

// Check --profile and --graph before anything is written. There must be steps to profile.
static inline void steps_open(Steps* s, const Settings* settings, int ranks) {
    if (settings->profile && settings->evaluate)
        die(USAGE, "--profile %d measures training steps; --evaluate has none", settings->profile);
    if (settings->profile_energy && !GPU_BUILD)
        die(USAGE, "--profile-energy 1 measures a GPU by its driver's NVML; this is the CPU build");
    step_graph_open(&s->graph, settings, ranks);
    for (size_t i = 0; i < COUNT_OF(s->launched); i++) readback_open(&s->launched[i].result);
    readback_open(&s->clock);
}

static inline void steps_close(Steps* s) {
    for (size_t i = 0; i < COUNT_OF(s->launched); i++) readback_close(&s->launched[i].result);
    readback_close(&s->clock);
    step_graph_close(&s->graph);
    profiler_close(&s->profiler);
}

// Exclude the time between steps, such as a validation, from the next step.
static inline void steps_restart_clock(Steps* s) {
    readback_record(s->ctx, &s->clock);
    s->last = &s->clock;
    energy_begin(&s->energy, now_seconds());
}

// Start at the session's current step.
static inline void steps_begin(Steps* s, const Session* session, const GradSync* grad_sync) {
    const Settings* settings = session->settings;
    s->finished = session->step;
    s->ctx = session->ctx;
    s->grad_sync = grad_sync;
    s->peak_flops = profiler_peak_flops(session->ctx) * session->group->size;
    s->peak_is_measured = profiler_known_peak() == 0;
    if (settings->profile_energy || (session->group->rank == 0 && *settings->out)) energy_open(&s->energy);
    if (settings->profile_energy && !s->energy.device) warn("--profile-energy 1: NVML has no energy counter here");
    profiler_open(&s->profiler, settings->profile_warmup, settings->profile, settings->fp8 > 0, session->step,
                  session->ctx);
    s->profiler.meter = s->energy.device ? &s->energy : NULL;
    s->profiler.measures_ops = settings->profile_energy && s->energy.device;
    steps_restart_clock(s);
}

// Print the first lines of a run. `tokens`: in a step over all ranks. `about`: "" if exact, else
// "about " or "at most ".
static inline void steps_print_start(const Steps* s, const Session* session, size_t parameters, uint64_t data_tokens,
                                     const char* about, double tokens) {
    int64_t step = session->step, last = session->last;
    Schedule schedule = session_schedule(session);
    schedule.peak = 1;  // so its rates are parts of -l
    printf("%zu parameters, %s | %llu training tokens, %s%.0f a step | ", parameters,
           session->checkpoint ? session->checkpoint
           : session->started  ? session->started
                               : session->settings->model,
           (unsigned long long)data_tokens, about, tokens);
    if (step < last) printf("steps %lld to %lld | ", (long long)step + 1, (long long)last);
    else printf("no steps left: step %lld is done, the last one is %lld | ", (long long)step, (long long)last);
    printf("%d CPU threads | ", device_threads());
    if (session->group->size > 1 && session->settings->passes != PASSES_FORWARD)
        printf("%d ranks, gradients summed %s | ", session->group->size,
               s->grad_sync->at_once ? "at once" : "bucket by bucket");
    printf("100 %% mfu is %.4g TFLOP/s%s, %s\n", 1e-12 * s->peak_flops / session->group->size,
           session->group->size > 1 ? " a rank" : "",
           s->peak_is_measured ? "measured on a large matmul" : "the data sheet's peak");
    if (schedule.warmup > last && step < last)
        printf("the warm-up (-u %lld) is longer than the run: the learning rate ends at %.3g of -l\n",
               (long long)schedule.warmup, schedule_at(&schedule, last - 1));
}

// Settings of the optimizer's next update.
static inline OptimizerSettings optimizer_settings(const Session* session, double lr) {
    const Settings* s = session->settings;
    uint64_t rounding = rng_stream((uint64_t)s->seed, (uint64_t)session->step, 0, SITE_ROUNDING);
    OptimizerSettings o;
    memset(&o, 0, sizeof o);
    o.lr = lr;
    o.beta1 = s->beta1, o.beta2 = s->beta2, o.eps = s->eps;
    o.weight_decay = s->weight_decay;
    o.max_norm = s->clip;
    o.rounding = rounding;
    o.cautious = s->cautious_decay;
    o.muon.momentum = muon_momentum_at(s->muon_warmup, session->step);
    return o;
}

// After launching a step's micro-batches: finish the all-reduce of the gradients, and all-reduce the losses.
static inline void steps_all_reduce(const Session* session, real* grads, StepLosses losses, GradSync* r) {
    if (session->settings->passes != PASSES_FORWARD) grad_sync_finish(r, grads, session->ctx);
    for (int i = 0; i < losses.count; i++) grad_sync_all_reduce(r, losses.values[i], 1, SUM_REAL, session->ctx);
}

// Update the parameters and share them among the ranks, unless --mode excludes the update.
static inline void steps_update(const Session* session, const ModelBuffers* b, StepLosses losses, Optimizer* o,
                                double lr) {
    Context* ctx = session->ctx;
    if (session->settings->passes != PASSES_TRAIN) return;
    const real* all[OUTLIER_LOSSES] = {losses.values[0], losses.count > 1 ? losses.values[1] : NULL};
    optimizer_step(o, b->params, b->grads, optimizer_settings(session, lr), all, b->grad_sync, ctx);
    model_buffers_share(b, ctx);
    collectives_check(&b->grad_sync->collectives);
}

// After all launches of a step: start reading its results.
static inline void steps_launched(Steps* s, Session* session, double lr, StepWork work, StepLosses losses,
                                  const Optimizer* o) {
    LaunchedStep* launched = &s->launched[session->step % (int64_t)COUNT_OF(s->launched)];
    const real* results[STEP_LOSSES + 3] = {o->norm, &o->loss_scale->applied};
    int count = 2;
    for (int i = 0; i < losses.count; i++) results[count++] = losses.values[i];
    if (outliers_are_judged(o->limits)) results[count++] = &o->outliers->skipped;
    readback_copy(session->ctx, &launched->result, results, count);
    step_graph_end(&s->graph, session->ctx);
    readback_record(session->ctx, &launched->result);
    s->graph.steps++;
    launched->lr = lr;
    launched->work = work;
    if (session->settings->passes == PASSES_FORWARD)
        launched->work.flops /= 3;  // the backward pass has the other two thirds
    launched->losses = losses;
    launched->step = ++session->step;
    session_share_plans(session);
    device_set_autotune(session->ctx, 0);
    session->consumed += (uint64_t)work.consumed;
}

// Add to a line of log.jsonl: energy and clock, if their measurement ended with this step; and with several losses,
// each loss and sequences per second.
static inline void steps_extra(Text* t, const LaunchedStep* done, double seconds, EnergyMeter* energy) {
    double joules = energy_step(energy, now_seconds());
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
static inline void steps_await(const Steps* s, const Session* session, Readback* result) {
    const struct timespec moment = {.tv_sec = 0, .tv_nsec = 100000};
    while (session->group->size > 1 && !readback_has_arrived(result)) {
        collectives_check(&s->grad_sync->collectives);
        nanosleep(&moment, NULL);
    }
    readback_wait(result);
}

// Wait for the oldest step, log it, and check that its loss and norm are finite.
static inline void steps_finish_one(Steps* s, const Session* session, Log* log, const ModelBuffers* b,
                                    const Optimizer* o) {
    LaunchedStep* done = &s->launched[s->finished % (int64_t)COUNT_OF(s->launched)];
    steps_await(s, session, &done->result);
    double loss = 0, norm = (double)done->result.values[0], scale = (double)done->result.values[1];
    double seconds = readback_seconds(s->last, &done->result);
    for (int i = 0; i < done->losses.count; i++) loss += (double)done->result.values[2 + i];
    int overflow = steps_is_overflow(o->rule, loss, norm, scale);
    int is_outlier = outliers_are_judged(o->limits) && done->result.values[2 + done->losses.count] != 0;
    int is_scaled = o->rule.kind == LOSS_SCALE_DYNAMIC || scale != 1;
    // If the machine was busy at the start, the measured peak was too low.
    if (s->peak_is_measured) s->peak_flops = fmax(s->peak_flops, done->work.flops / seconds);
    Text extra = {NULL, 0, 0};
    steps_extra(&extra, done, seconds, &s->energy);
    if (is_outlier) json_put_bool(&extra, "skipped", 1);
    LogStep line;
    memset(&line, 0, sizeof line);
    line.step = done->step, line.steps = session->last;
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
    profiler_step_took(&s->profiler, done->step - 1, seconds);
    if (!isfinite(norm) && !overflow) session_report_nan(session, done->step, &b->table, b->grads, loss, norm);
    log_step(log, &line);
    free(extra.text);
}

// Called around the launch of a step, for --profile. steps_profile_end() writes the report after the last profiled
// step. It returns 1 if the step's results must be read at once and the clock restarted.
static inline void steps_profile_begin(Steps* s, const Session* session) {
    if (!profiler_prepare_step(&s->profiler, session->step, session->ctx)) return;
    steps_restart_clock(s);  // the step's time excludes its preparation
    profiler_begin_step(&s->profiler, session->ctx);
}

static inline ProfiledRun steps_profiled(const Steps* s, const Session* session) {
    const int64_t count = (int64_t)COUNT_OF(s->launched);
    const LaunchedStep* newest =
        &s->launched[(session->step + count - 1) % count];  // before the first step: an empty one
    ProfiledRun run;
    memset(&run, 0, sizeof run);
    run.out = session->settings->out, run.lock = session->lock;
    run.passes = settings_passes_name(session->settings->passes);
    run.flops = newest->work.flops;
    run.group = session->group;
    run.broadcast_overlaps = READBACK_LAG > 0 && session->settings->zero && session->group->size > 1;
    return run;
}

static inline int steps_profile_end(Steps* s, const Session* session) {
    int64_t step = session->step - 1;
    int at_once = profiler_reads_at_once(&s->profiler, step);
    if (profiler_end_step(&s->profiler, step, session->ctx)) {
        group_begin_work(session->group);
        ProfiledRun run = steps_profiled(s, session);
        profiler_report(stdout, &s->profiler, &run);
    }
    return at_once;
}

// After the last save: report a profile with the energy of ops, or an incomplete profile, and how the run ended.
static inline void steps_end(Steps* s, const Session* session, int failed) {
    int is_measured = profiler_measure_ops(&s->profiler, session->group, session->ctx);
    ProfiledRun run = steps_profiled(s, session);
    if (is_measured) profiler_report(stdout, &s->profiler, &run);
    else if (session->stop) profiler_stop(stdout, &s->profiler, &run);
    step_graph_report(&s->graph);
    session_end(session, failed);
}

// Finish all launched steps but the last `lag`.
static inline void steps_finish(Steps* s, int lag, const Session* session, Log* log, const ModelBuffers* b,
                                const Optimizer* o) {
    while (session->step - s->finished > lag) steps_finish_one(s, session, log, b, o);
}

#endif
