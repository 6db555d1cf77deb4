/* The steps of a run. The host launches one and goes on: its loss and its norm are read, logged and judged when they have
 * arrived, which is one step later where launching is not computing. */
#ifndef LLMC_STEPS_H
#define LLMC_STEPS_H

#include "../device/readback.h"
#include "profiler.h"
#include "session.h"

// A step whose results are not read yet.
typedef struct {
    int64_t step;  // its number, from 1
    double lr;
    Readback result;  // loss, gradient norm, the scale that the gradients carried
} LaunchedStep;

typedef struct {
    LaunchedStep launched[READBACK_LAG + 1];
    int64_t finished;  // steps whose results are read
    double last_finish;
    double tokens, token_flops, peak_flops;  // of a step; of a token; what the hardware can do in a second
} Steps;

static inline void steps_open(Steps* s) {
    for (size_t i = 0; i < COUNT_OF(s->launched); i++) readback_open(&s->launched[i].result);
}

static inline void steps_close(Steps* s) {
    for (size_t i = 0; i < COUNT_OF(s->launched); i++) readback_close(&s->launched[i].result);
}

// Time between steps, validation for instance, is no step's.
static inline void steps_restart_clock(Steps* s) { s->last_finish = now_seconds(); }

// Steps of `tokens` over all ranks, which cost `token_flops` each, begin where the session stands.
static inline void steps_begin(Steps* s, const Session* session, double tokens, double token_flops) {
    s->finished = session->step;
    s->tokens = tokens;
    s->token_flops = token_flops;
    s->peak_flops = profiler_peak_flops(session->ctx);
    steps_restart_clock(s);
}

// The line that says what begins.
static inline void steps_print_start(const Steps* s, const Session* session, size_t parameters, uint64_t data_tokens) {
    printf("%zu parameters, %s | %llu training tokens, %.0f a step | steps %lld to %lld | %d CPU threads | ",
           parameters, session->checkpoint ? session->checkpoint : session->settings->model,
           (unsigned long long)data_tokens, s->tokens, (long long)session->step + 1, (long long)session->last,
           device_threads());
    printf("mfu is of %.4g TFLOP/s, %s\n", 1e-12 * s->peak_flops,
           profiler_known_peak() > 0 ? "the data sheet's peak" : "measured on a large matmul");
}

// The settings of the optimizer's update that comes next.
static inline AdamW steps_adamw(const Session* session, double lr) {
    const Settings* s = session->settings;
    uint64_t rounding = rng_stream((uint64_t)s->seed, (uint64_t)session->step, 0, SITE_ROUNDING);
    AdamW adamw = {lr, s->beta1, s->beta2, s->eps, s->weight_decay, s->clip, rounding};
    return adamw;
}

// All of a step has been launched, `sequences` of them: its results are on their way from now on.
static inline void steps_launched(Steps* s, Session* session, double lr, int sequences, const real* loss,
                                  const Optimizer* o) {
    LaunchedStep* launched = &s->launched[session->step % (int64_t)COUNT_OF(s->launched)];
    const real* results[] = {loss, o->norm, &o->loss_scale->applied};
    readback_start(session->ctx, &launched->result, results, COUNT_OF(results));
    launched->lr = lr;
    launched->step = ++session->step;
    session->samples += (uint64_t)sequences;
}

// Whether a step's gradients were too large only because of the scale: then the optimizer has left the step out and lowered
// the scale, and all is well. A loss that is no number, or gradients that are none with the lowest scale, are not.
static inline int steps_is_overflow(LossScaleRule rule, double loss, double norm, double scale) {
    return !isfinite(norm) && isfinite(loss) && rule.kind == LOSS_SCALE_DYNAMIC && scale > LOSS_SCALE_FLOOR;
}

// Wait for the oldest step, log it, and see to it that its numbers are numbers.
static inline void steps_finish_one(Steps* s, const Session* session, Log* log, const TensorTable* table,
                                    const real* grads, const Optimizer* o) {
    LaunchedStep* done = &s->launched[s->finished % (int64_t)COUNT_OF(s->launched)];
    readback_wait(&done->result);
    double loss = (double)done->result.values[0], norm = (double)done->result.values[1];
    double scale = (double)done->result.values[2], now = now_seconds(), seconds = now - s->last_finish;
    int overflow = steps_is_overflow(o->rule, loss, norm, scale);
    int is_scaled = o->rule.kind == LOSS_SCALE_DYNAMIC || scale != 1;
    LogStep line = {done->step,
                    session->last,
                    loss,
                    done->lr,
                    norm,
                    seconds,
                    s->tokens / seconds,
                    s->token_flops * s->tokens / seconds / s->peak_flops,
                    is_scaled ? scale : 0,
                    overflow ? "gradients overflowed: update left out, loss scale lowered" : NULL,
                    NULL};
    s->last_finish = now;
    s->finished = done->step;
    if (!isfinite(norm) && !overflow) session_report_nan(session, done->step, table, grads, loss, norm);
    log_step(log, &line);
}

// Finish all steps but the last `lag`.
static inline void steps_finish(Steps* s, int lag, const Session* session, Log* log, const TensorTable* table,
                                const real* grads, const Optimizer* o) {
    while (session->step - s->finished > lag) steps_finish_one(s, session, log, table, grads, o);
}

#endif
