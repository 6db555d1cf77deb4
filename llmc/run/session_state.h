/* The model-independent state of a run: its position, the checkpoint that it was resumed from, and its output files.
 * session.h opens, begins and ends a run. */
#ifndef LLMC_RUN_SESSION_STATE_H
#define LLMC_RUN_SESSION_STATE_H

#include <signal.h>

#include "llmc/base/log.h"
#include "llmc/checkpoint/writer.h"
#include "llmc/dist/process_group.h"
#include "llmc/optim/weight_average.h"
#include "llmc/run/best.h"
#include "llmc/run/settings.h"

enum { SESSION_LOCK_LOST = -1 };

typedef struct {
    const Settings* settings;
    ProcessGroup* group;
    const char* out;  // settings->out, the run's directory; "": write nothing, as on all ranks but 0
    Flag* flags;
    int flag_count;
    int skips_recipe;  // the recipe is not read: -o holds checkpoints to resume, which may still be damaged
    Context* ctx;
    RunLock* lock;       // of OUT
    int earlier;         // checkpoints in OUT when the run looked for them
    int held;            // until session_begin(): lock that keeps others from deleting the checkpoint (checkpoint_hold)
    int shares_plans;    // all ranks use the matmul algorithms that rank 0 chose
    char* matmul_plans;  // the algorithms in the checkpoint; NULL: none
    char* fp8;           // the checkpoint's state of fp8 scales; NULL: none

    char* checkpoint;          // directory of the checkpoint that the run resumes; NULL: a new run
    char* started;             // directory of another run's checkpoint that this run starts from; NULL: none
    int64_t step;              // optimizer steps done
    uint64_t consumed;         // sequences trained on: the position in the data
    int64_t step_sequences;    // sequences in a step, over all ranks; 0: not known yet
    uint32_t data;             // fingerprint of the training data; until session_check_data() the checkpoint's
    CheckpointWriter* writer;  // from session_begin() on
    int64_t last;              // last step of the run
    int64_t end;               // last step of this process: --stop-after, or the run's last
    int stop;                  // why it stops earlier: a signal's number, or SESSION_LOCK_LOST; 0: it does not
    LossScale scale;           // the checkpoint's; scale 0: not dynamic
    Outliers outliers;         // the checkpoint's
    Best best;                 // of the validations so far
    WeightAverage average;
    Tokenizer tokenizer;
    TokenizerFiles tokenizer_files;
} Session;

// ---------------------------------------------------------------------------------------------------------
// The run's directory

// Lock OUT for this run, unless it is already locked.
static inline void session_lock(Session* s, int create) {
    if (*s->out && !s->lock->path) run_lock_take(s->lock, s->out, create);
}

// Number of checkpoints in OUT, damaged ones included.
static inline int session_count_checkpoints(const char* out) {
    int64_t* steps = NULL;
    int count = *out ? checkpoint_list(out, &steps) + checkpoint_of_kind(NULL, out, ".damaged", COUNT_THEM) : 0;
    free(steps);
    return count;
}

// End all ranks with an error, because another run has locked OUT.
__attribute__((noreturn)) static inline void session_lost(const Session* s) {
    checkpoint_die(s->group, FAILED, RUN_LOCK_LOST, s->settings->out);
}

// End the run if another run has locked OUT. All ranks call it.
static inline void session_check_lock(const Session* s) {
    if (group_any(s->group, run_lock_check(s->lock) != 0)) session_lost(s);
}

// Write a file in OUT. If that fails, the run warns and continues.
static inline void session_write(const Session* s, const char* name, const Text* text) {
    if (run_lock_check(s->lock) != 0) return;
    char* path = xprintf("%s/%s", s->out, name);
    if (write_file(path, text->text, text->length) != 0) warn("%s: cannot be written: %s", path, strerror(errno));
    free(path);
}

// Print a sample of the model and write it to OUT/sample.txt.
static inline void session_show_text(const Session* s, const Text* text) {
    printf("sample after step %lld:\n---\n", (long long)s->step);
    fwrite(text->text, 1, text->length, stdout);  // bytes of any kind
    printf("\n---\n");
    if (*s->out) session_write(s, "sample.txt", text);
}

// ---------------------------------------------------------------------------------------------------------
// Values that follow from the settings

// Micro-batches per step on each rank, of B sequences of T tokens. A step has --total-batch tokens. Without that flag,
// a resumed run keeps its number of sequences, and a new run has one micro-batch per rank. An evaluation has one.
static inline int session_micro_steps(Session* s, int B, int T) {
    int64_t total_batch = s->settings->total_batch, ranks = s->group->size, micro_tokens = (int64_t)B * T * ranks;
    if (s->settings->evaluate) total_batch = s->step_sequences = 0;
    if ((int64_t)B * T > 1 << 30)
        die(USAGE, "-b %d: a micro-batch of -t %d has more than 2^30 tokens; use -d for large steps", B, T);
    if (total_batch % micro_tokens != 0)
        die(USAGE, "-d %lld: is not a multiple of the %lld tokens of a micro-batch over all ranks (-b x -t x ranks)",
            (long long)total_batch, (long long)micro_tokens);
    if (total_batch / T > INT_MAX || B * ranks > INT_MAX)
        die(USAGE, "-d %lld: %lld sequences of -t %d in a step exceed the maximum of %d", (long long)total_batch,
            (long long)(total_batch ? total_batch / T : B * ranks), T, INT_MAX);
    int64_t sequences = total_batch ? total_batch / T : s->step_sequences ? s->step_sequences : B * ranks;
    if (sequences % (B * ranks) != 0)
        die(USAGE,
            "%s: its run has %lld sequences in a step, which %lld ranks of -b %d cannot share; change the number of "
            "ranks, or give -b or -d with --override 1",
            s->checkpoint, (long long)sequences, (long long)ranks, B);
    s->step_sequences = sequences;
    return (int)(sequences / (B * ranks));
}

// The run ends after --steps, or after --epochs passes over the data's `sequences`.
static inline void session_set_last(Session* s, uint64_t sequences) {
    const Settings* settings = s->settings;
    int64_t all = (int64_t)(settings->epochs * (double)sequences / (double)s->step_sequences);
    s->last = settings->steps > 0 ? settings->steps : all > 0 ? all : 1;
    s->end = settings->stop_after > 0 && settings->stop_after < s->last ? settings->stop_after : s->last;
    settings_check_average(settings, s->last);
    settings_check_profile(settings, s->end - s->step);
}

// The learning-rate schedule of the run.
static inline Schedule session_schedule(const Session* session) {
    const Settings* s = session->settings;
    Schedule schedule;
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = (ScheduleKind)s->schedule;
    schedule.peak = s->lr;
    schedule.warmup = s->warmup;
    schedule.total = session->last;
    schedule.final_fraction = s->final_fraction;
    schedule.power = s->poly_power;
    return schedule;
}

// The optimizer's settings: update rule, master weights, sharding. All ranks call it.
static inline UpdateSettings session_update(const Session* session) {
    const Settings* s = session->settings;
    int is_muon = optimizer_is_muon((OptimizerKind)s->optimizer);
    GradSyncSettings sums = {
        .zero = s->zero, .bucket_mib = s->bucket, .has_p2p = has_p2p(session->group), .whole_matrices = is_muon};
    UpdateSettings update;
    memset(&update, 0, sizeof update);
    update.kind = (OptimizerKind)s->optimizer;
    update.master = s->master_weights ? WITH_MASTER : NO_MASTER;
    update.rank = session->group->rank, update.ranks = session->group->size;
    update.sums = sums;
    update.keeps_average = s->ema > 0;
    update.embedding_rate = s->embedding_lr / s->lr, update.vector_rate = s->vector_lr / s->lr;
    return update;
}

// ---------------------------------------------------------------------------------------------------------
// After each step

// Whether something is due now: every `every` steps (0: never), and with `at_end` also after the run's last step.
static inline int session_is_due(const Session* s, int every, int at_end) {
    return every > 0 && (s->step % every == 0 || (at_end && s->step == s->last));
}

// The same before the first step of this process, for a result with key `key` in log.jsonl. It is due only if the log
// lacks it, as in a new run, or if a signal interrupted it. All ranks call it.
static inline int session_is_missing(const Session* s, const Log* log, int every, const char* key) {
    return group_any(s->group, s->group->rank == 0 && session_is_due(s, every, 1) && !log_has(log, key));
}

// Whether all ranks stop now: a rank received a signal (`signal`; 0: this one did not). Ends the run if another run has
// locked OUT.
static inline int session_must_stop(Session* s, int signal) {
    int stop = run_lock_check(s->lock) != 0 ? SESSION_LOCK_LOST : signal;
    int* stops = (int*)xmalloc((size_t)s->group->size * sizeof *stops);
    group_gather(s->group, stops, &stop, sizeof stop);
    int is_lost = 0;
    for (int r = 0; r < s->group->size; r++) {
        is_lost |= stops[r] == SESSION_LOCK_LOST;
        if (!s->stop) s->stop = stops[r];
    }
    free(stops);
    if (is_lost) session_lost(s);
    return s->stop != 0;
}

#endif
