/* The steps of a run. The host launches one and goes on: its loss and its norm are read, logged and judged when they have
 * arrived, which is one step later where launching is not computing. */
#ifndef LLMC_STEPS_H
#define LLMC_STEPS_H

#include "../device/readback.h"
#include "exact.h"
#include "optimizer.h"
#include "plan.h"
#include "profiler_report.h"
#include "session.h"

enum { STEP_LOSSES = 2 };

// What a step does, over all ranks.
typedef struct {
    int samples;  // by which the run's position in the data moves on
    double sequences, tokens, flops;
} StepWork;

// The losses that a step minimises the sum of, [1] each, where the ops run; and what log.jsonl calls them.
typedef struct {
    int count;
    real* values[STEP_LOSSES];
    const char* names[STEP_LOSSES];
} StepLosses;

// So much of an evaluation is done: a sign to the other ranks, and of rank 0 one to a user at a terminal.
static inline void steps_evaluating(Log* log, const Session* s, const char* what, double done, double all) {
    comm_progress(s->comm, s->step);
    if (s->comm->rank == 0 && isatty(STDERR_FILENO))
        log_progress(&log->progress, stderr, what, done, all, now_seconds());
}

// A step whose results are not read yet.
typedef struct {
    int64_t step;  // its number, from 1
    double lr;
    StepWork work;
    StepLosses losses;
    Readback result;  // gradient norm, the scale that the gradients carried, losses, whether the update was left out
} LaunchedStep;

typedef struct {
    LaunchedStep launched[READBACK_LAG + 2];  // those that run, and the one before them, whose end is their beginning
    int64_t finished;                         // steps whose results are read
    Readback clock;                           // no values: a moment between steps
    const Readback* last;                     // what the next step to be finished began after
    Context* ctx;
    const Reduction* reduction;
    double peak_flops;  // what the hardware of all ranks can do in a second
    Profiler profiler;
} Steps;

// Before anything is written: there have to be steps to profile, and the file that the ceilings are in has to be sound.
static inline void steps_open(Steps* s, const Settings* settings) {
    if (settings->profile && settings->evaluate)
        die(USAGE, "--profile %d is of training steps; --evaluate, --generate and --fill take none", settings->profile);
    if (settings->profile && strcmp(settings->ceilings, "measure") != 0) profiler_read_ceilings(settings->ceilings);
    for (size_t i = 0; i < COUNT_OF(s->launched); i++) readback_open(&s->launched[i].result);
    readback_open(&s->clock);
}

static inline void steps_close(Steps* s) {
    for (size_t i = 0; i < COUNT_OF(s->launched); i++) readback_close(&s->launched[i].result);
    readback_close(&s->clock);
    profiler_close(&s->profiler);
}

// Time between steps, validation for instance, is no step's.
static inline void steps_restart_clock(Steps* s) {
    readback_start(s->ctx, &s->clock, NULL, 0);
    s->last = &s->clock;
}

// Steps begin where the session stands.
static inline void steps_begin(Steps* s, const Session* session, const Reduction* reduction) {
    const Settings* settings = session->settings;
    s->finished = session->step;
    s->ctx = session->ctx;
    s->reduction = reduction;
    s->peak_flops = profiler_peak_flops(session->ctx) * session->comm->size;
    profiler_open(&s->profiler, settings->profile_warmup, settings->profile, settings->ceilings, session->step,
                  session->ctx);
    steps_restart_clock(s);
}

// The line that says what begins: steps of at most `tokens` over all ranks.
static inline void steps_print_start(const Steps* s, const Session* session, size_t parameters, uint64_t data_tokens,
                                     double tokens) {
    printf("%zu parameters, %s | %llu training tokens, %.0f a step | steps %lld to %lld | %d CPU threads | ",
           parameters,
           session->checkpoint ? session->checkpoint
           : session->started  ? session->started
                               : session->settings->model,
           (unsigned long long)data_tokens, tokens, (long long)session->step + 1, (long long)session->last,
           device_threads());
    if (session->comm->size > 1 && session->settings->mode != MODE_FORWARD)
        printf("%d ranks, gradients summed %s | ", session->comm->size,
               s->reduction->is_whole ? "at once" : "bucket by bucket");
    printf("mfu is of %.4g TFLOP/s%s, %s\n", 1e-12 * s->peak_flops / session->comm->size,
           session->comm->size > 1 ? " a rank" : "",
           profiler_known_peak() > 0 ? "the data sheet's peak" : "measured on a large matmul");
}

// Of a model: what an update changes, and what it takes.
typedef struct {
    const TensorTable* table;
    floatX* params;
    real* grads;
    const ExactParameters* exact;
} StepModel;

// The settings of the optimizer's update that comes next.
static inline OptimizerSettings steps_adamw(const Session* session, double lr) {
    const Settings* s = session->settings;
    uint64_t rounding = rng_stream((uint64_t)s->seed, (uint64_t)session->step, 0, SITE_ROUNDING);
    OptimizerSettings adamw = {lr, s->beta1, s->beta2, s->eps, s->weight_decay, s->clip, rounding};
    return adamw;
}

// All of a step's micro-batches have been launched: sum gradients and losses over the ranks, update, as far as --mode goes.
static inline void steps_update(const Session* session, StepModel m, StepLosses losses, Optimizer* o, Reduction* r,
                                double lr) {
    Context* ctx = session->ctx;
    int mode = session->settings->mode;
    if (mode != MODE_FORWARD) reduction_finish(r, m.grads, ctx);
    for (int i = 0; i < losses.count; i++) reduction_sum(r, losses.values[i], 1, SUM_REAL, ctx);
    if (mode != MODE_TRAIN) return;
    const real* all[OUTLIER_LOSSES] = {losses.values[0], losses.count > 1 ? losses.values[1] : NULL};
    optimizer_step(o, m.params, m.grads, steps_adamw(session, lr), all, r, ctx);
    exact_share(m.exact, m.table, m.params, o->master, r, ctx);
    collective_check(&r->collective);
}

// Around the launches of a micro-batch: a host that is as far ahead of the device as it may be waits there for what the
// device waits for. Not in the first step, which times matmuls.
static inline void steps_begin_launch(const Session* session) {
    if (READBACK_LAG > 0 && session->shares_plans) comm_wait_begin(session->comm);
}

static inline void steps_end_launch(const Session* session) {
    if (READBACK_LAG > 0 && session->shares_plans) comm_wait_end(session->comm);
}

// All of a step has been launched: its results are on their way from now on.
static inline void steps_launched(Steps* s, Session* session, double lr, StepWork work, StepLosses losses,
                                  const Optimizer* o) {
    LaunchedStep* launched = &s->launched[session->step % (int64_t)COUNT_OF(s->launched)];
    const real* results[STEP_LOSSES + 3] = {o->norm, &o->loss_scale->applied};
    int count = 2;
    for (int i = 0; i < losses.count; i++) results[count++] = losses.values[i];
    if (outliers_are_judged(o->limits)) results[count++] = &o->outliers->left_out;
    readback_start(session->ctx, &launched->result, results, count);
    launched->lr = lr;
    launched->work = work;
    if (session->settings->mode == MODE_FORWARD)
        launched->work.flops /= 3;  // the backward pass is the other two thirds
    launched->losses = losses;
    launched->step = ++session->step;
    session_share_plans(session);
    device_set_autotune(session->ctx, 0);
    session->samples += (uint64_t)work.samples;
}

// The losses apart, where there are several, and what is counted in sequences then, as members of a line of log.jsonl.
static inline void steps_extra(Text* t, const LaunchedStep* done, double seconds) {
    if (done->losses.count < 2) return;
    for (int i = 0; i < done->losses.count; i++)
        log_put(t, done->losses.names[i], (double)done->result.values[2 + i], 9);
    log_put(t, "seq_s", done->work.sequences / seconds, 6);
}

// Whether a step's gradients were too large only because of the scale: then the optimizer has left the step out and lowered
// the scale, and all is well. A loss that is no number, or gradients that are none with the lowest scale, are not.
static inline int steps_is_overflow(LossScaleRule rule, double loss, double norm, double scale) {
    return !isfinite(norm) && isfinite(loss) && rule.kind == LOSS_SCALE_DYNAMIC && scale > LOSS_SCALE_FLOOR;
}

// Wait for a step's results, which come when the other ranks have done theirs; an error that NCCL meets on the way would
// keep them for ever.
static inline void steps_await(const Steps* s, const Session* session, Readback* result) {
    const struct timespec moment = {0, 100000};
    comm_wait_begin(session->comm);
    while (session->comm->size > 1 && !readback_has_arrived(result)) {
        collective_check(&s->reduction->collective);
        nanosleep(&moment, NULL);
    }
    readback_wait(result);
    comm_wait_end(session->comm);
}

// Wait for the oldest step, log it, and see to it that its numbers are numbers.
static inline void steps_finish_one(Steps* s, const Session* session, Log* log, const TensorTable* table,
                                    const real* grads, const Optimizer* o) {
    LaunchedStep* done = &s->launched[s->finished % (int64_t)COUNT_OF(s->launched)];
    steps_await(s, session, &done->result);
    comm_progress(session->comm, done->step);
    double loss = 0, norm = (double)done->result.values[0], scale = (double)done->result.values[1];
    double seconds = readback_seconds(s->last, &done->result);
    for (int i = 0; i < done->losses.count; i++) loss += (double)done->result.values[2 + i];
    int overflow = steps_is_overflow(o->rule, loss, norm, scale);
    int is_outlier = outliers_are_judged(o->limits) && done->result.values[2 + done->losses.count] != 0;
    int is_scaled = o->rule.kind == LOSS_SCALE_DYNAMIC || scale != 1;
    Text extra = {NULL, 0, 0};
    steps_extra(&extra, done, seconds);
    if (is_outlier) json_put_bool(&extra, "left_out", 1);
    LogStep line = {done->step,
                    session->last,
                    loss,
                    done->lr,
                    norm,
                    seconds,
                    done->work.tokens / seconds,
                    done->work.flops / seconds / s->peak_flops,
                    is_scaled ? scale : 0,
                    overflow     ? "gradients overflowed: update left out, loss scale lowered"
                    : is_outlier ? "an outlier: update left out"
                                 : NULL,
                    extra.text};
    s->last = &done->result;
    s->finished = done->step;
    profiler_step_took(&s->profiler, done->step - 1, seconds);
    if (!isfinite(norm) && !overflow) session_report_nan(session, done->step, table, grads, loss, norm);
    log_step(log, &line);
    free(extra.text);
}

// Around launch_step(), where --profile may want to see the step. The second returns 1 where the step's results have to be
// read at once and the clock has to begin anew after it, and reports after the last profiled step.
static inline void steps_profile_begin(Steps* s, const Session* session) {
    if (!profiler_prepare_step(&s->profiler, session->step, session->ctx)) return;
    steps_restart_clock(s);  // what prepares a step is not part of it
    profiler_begin_step(&s->profiler, session->ctx);
}

static inline ProfiledRun steps_profiled(const Steps* s, const Session* session, const MemoryPlan* plan) {
    const int64_t count = (int64_t)COUNT_OF(s->launched);
    const LaunchedStep* newest = &s->launched[(session->step + count - 1) % count];  // of none: one without work
    ProfiledRun run = {session->settings->out,
                       settings_mode_name(session->settings->mode),
                       plan,
                       newest->work.flops,
                       session->comm,
                       READBACK_LAG > 0 && session->settings->zero && session->comm->size > 1};
    return run;
}

static inline int steps_profile_end(Steps* s, const Session* session, const MemoryPlan* plan) {
    int64_t step = session->step - 1;
    int at_once = profiler_reads_at_once(&s->profiler, step);
    if (profiler_end_step(&s->profiler, step, session->ctx)) {
        ProfiledRun run = steps_profiled(s, session, plan);
        profiler_report(stdout, &s->profiler, &run, session->ctx);
    }
    return at_once;
}

// After the last save: what there is of a profile that was not completed, and how the run ended.
static inline void steps_end(Steps* s, const Session* session, const MemoryPlan* plan, int failed) {
    if (session->stop) {
        ProfiledRun run = steps_profiled(s, session, plan);
        profiler_stop(stdout, &s->profiler, &run, session->ctx);
    }
    session_end(session, failed);
}

// Finish all steps but the last `lag`.
static inline void steps_finish(Steps* s, int lag, const Session* session, Log* log, const TensorTable* table,
                                const real* grads, const Optimizer* o) {
    while (session->step - s->finished > lag) steps_finish_one(s, session, log, table, grads, o);
}

#endif
