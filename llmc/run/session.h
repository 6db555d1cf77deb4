/* The life of a run, independent of its model:
 *
 *   session_open      open context, lock, checkpoint; writes nothing
 *   ...               the trainer builds its model: find_files.h, resume.h
 *   session_begin     from here on the run writes files
 *   ...               steps; session_state.h decides what is due, save.h saves
 *   session_end       reports how it ended
 *   session_close */
#ifndef LLMC_RUN_SESSION_H
#define LLMC_RUN_SESSION_H

#include "llmc/run/consistency.h"
#include "llmc/run/find_files.h"
#include "llmc/run/recipe.h"
#include "llmc/run/resume.h"
#include "llmc/run/save.h"
#include "llmc/run/val_share.h"

// Refuse flags that contradict each other.
static inline void session_check_flags(const Settings* s) {
    if (s->resume && s->overwrite)
        die(USAGE, "-y 1 and --overwrite 1: one resumes the run in -o, the other deletes it; leave one out");
    if (s->resume && !*s->out)
        die(USAGE, "-y 1 and -o '': there is nothing to resume; name the run's directory with -o");
    if (s->passes != PASSES_TRAIN && !s->profile)
        die(USAGE, "--mode other than train needs --profile: such a run trains nothing");
    if (!s->profile && s->profile_energy) die(USAGE, "--profile-energy 1: needs --profile");
    if (s->optimizer == LAMB && s->cautious_decay)
        die(USAGE, "--cautious-decay 1 does not combine with --optimizer lamb, whose update includes the decay");
    if (s->optimizer == LAMB && (s->embedding_lr > 0 || s->vector_lr > 0))
        die(USAGE, "--embedding-lr and --vector-lr do not combine with --optimizer lamb, which scales each tensor");
    if (s->lr == 0 && (s->embedding_lr > 0 || s->vector_lr > 0))
        die(USAGE, "-l 0 does not combine with --embedding-lr and --vector-lr, which follow its schedule");
    if (s->override && !s->resume)
        die(USAGE, "--override 1 without -y 1: it applies to a resumed run; add -y 1 or leave it out");
}

// Refuse settings that contradict --keep-best or --ema. The settings of a checkpoint must be known by now.
static inline void session_check_recipe(const Session* session, int has_val) {
    const Settings* s = session->settings;
    if (s->evaluate) return;
    if (s->keep_best && (s->val_every == 0 || !has_val))
        die(USAGE, "--keep-best 1 goes by the validation loss; give -v and validation data (-j)");
    if (s->keep_best && !*s->out) die(USAGE, "--keep-best 1 and -o '': there is nowhere to keep a checkpoint");
    if (s->ema > 0 && s->fp8) die(USAGE, "--ema does not combine with --fp8, whose scales follow the last weights");
    if (s->ema == 0 && s->ema_start > 1 && flag_is_given(session->flags, session->flag_count, "--ema-start"))
        die(USAGE, "--ema-start: needs --ema");
}

// A resumed run skipped its recipe, but no checkpoint is usable: a new run needs it. OUT is open and stays.
static inline void session_read_recipe(const Session* s) {
    settings_find(s->flags, s->flag_count, "--output")->is_set |= FLAG_IS_GIVEN;
    recipe_apply(s->flags, s->flag_count, s->settings->recipe);
    session_check_flags(s->settings);
}

// Open the run with parsed flags: context, lock, and the checkpoint to resume. Writes nothing.
static inline void session_open(Session* s, const Settings* settings, Flag* flags, int flag_count, ProcessGroup* group,
                                Context* ctx) {
    session_check_flags(settings);
    s->settings = settings, s->group = group, s->out = group->rank == 0 ? settings->out : "";
    s->flags = flags, s->flag_count = flag_count;
    s->ctx = ctx, s->lock = (RunLock*)xcalloc(1, sizeof *s->lock), s->held = -1;
    // An evaluation ends when its output is closed (SIGPIPE); training continues.
    if (!settings->evaluate && settings->steps != 0) signal(SIGPIPE, SIG_IGN);
    // Rank 0 prints for all. Each rank reports its own errors.
    if (group->rank > 0 && !freopen("/dev/null", "w", stdout)) die(FAILED, "/dev/null: %s", strerror(errno));
    check_same_flags(group, flags, flag_count);  // first, because the flags determine what the ranks do together
    device_choose(group->local_rank);
    context_init(ctx);
    device_set_threads(settings->threads);
    if (!settings->evaluate && settings->steps != 0) session_lock(s, 0);
    if (settings->resume || !(settings->overwrite || settings->evaluate || settings->steps == 0))
        session_find_checkpoint(s);
    if (s->skips_recipe && !s->checkpoint) session_read_recipe(s);
    device_set_matmul(ctx, settings->autotune, settings->gelu_fusion, settings->tf32);
    device_set_attention(ctx, (AttentionPath)settings->attention);
    if (s->matmul_plans) matmul_plans_load(ctx, s->matmul_plans);
}

// Before anything is written: check that all ranks train the same model (config.json) on the same data with the same
// settings, which may by now be a checkpoint's.
static inline void session_check_ranks(const Session* s, const char* config_json, uint32_t val_data) {
    check_same_flags(s->group, s->flags, s->flag_count);
    check_same_model(s->group, config_json, s->data, val_data);
}

// Before anything is written: end with USAGE if the run would have to replace what no run has written.
static inline void session_refuse_foreign(const Session* s) {
    int replaces = s->settings->overwrite;
    char *average = xprintf("%s/ema", s->out), *half = xprintf("%s.tmp", average);
    checkpoint_of_kind(NULL, s->out, ".tmp", REFUSE_FOREIGN);
    if (replaces) checkpoint_of_kind(NULL, s->out, "", REFUSE_FOREIGN);
    if (replaces) checkpoint_of_kind(NULL, s->out, ".damaged", REFUSE_FOREIGN);
    if (s->settings->ema > 0) checkpoint_refuse_foreign(average), checkpoint_refuse_foreign(half);
    for (int i = 0; i < s->tokenizer_files.count && !s->earlier && !replaces; i++) {
        TokenizerFiles one = {.file = {s->tokenizer_files.file[i]}, .count = 1};
        char* path = xprintf("%s/%s", s->out, one.file[0].name);
        if (file_exists(path) && !tokenizer_files_match(&one, s->out))
            die(USAGE, "%s: belongs to another tokenizer; choose another -o, or --overwrite 1 (without -y) replaces it",
                path);
        free(path);
    }
    free(average), free(half);
}

// Delete an earlier run's checkpoints with --overwrite, and the average of the weights if this run does not resume it.
static inline void session_delete_earlier(const Session* s) {
    char *average = xprintf("%s/ema", s->out), *half = xprintf("%s.tmp", average);
    if (s->settings->overwrite) checkpoint_delete_all(s->lock, s->out);
    if (s->settings->overwrite || (s->checkpoint && s->settings->ema == 0)) checkpoint_remove(s->lock, average);
    checkpoint_remove(s->lock, half);
    free(average), free(half);
}

// A run that was killed may have logged a validation of its step after the checkpoint. All ranks call it.
static inline void session_judge_logged(Session* s, const Log* log) {
    for (size_t i = 0; i < log->result_count; i++)
        if (strcmp(log->results[i].key, "val_loss") == 0 && log->results[i].step == s->step)
            best_judge(&s->best, s->step, log->results[i].value);
    group_broadcast(s->group, &s->best, sizeof s->best);
}

// From here on the run writes files. Lock OUT, open the log with the settings as its first line, and delete what an
// earlier run has left.
static inline void session_begin(Session* s, Log* log) {
    Text settings = {NULL, 0, 0};
    session_check_lock(s);
    if (*s->out) session_refuse_foreign(s);
    if (*s->out) run_directory_prepare(s->out);
    int was_open = *s->out && !s->lock->path && !s->settings->overwrite;  // other runs could lock it until now
    session_lock(s, O_CREAT);
    if (was_open && session_count_checkpoints(s->out) != s->earlier)
        die(USAGE, "%s: another run has saved there since this one started; choose another -o", s->out);
    group_barrier(s->group);  // the lock exists now
    if (s->group->rank > 0 && *s->settings->out) run_lock_follow(s->lock, s->settings->out);
    if (s->held >= 0) close(s->held);
    s->held = -1;
    log_open(log, s->out, s->lock, s->checkpoint ? s->step : -1);
    if (s->settings->keep_best) session_judge_logged(s, log);
    if (*s->out) session_delete_earlier(s);
    if (*s->out) checkpoint_clean(s->lock, s->out, s->checkpoint, s->checkpoint ? s->step : -1);
    flags_to_json(&settings, s->flags, s->flag_count);
    log_line(log, &settings);
    free(settings.text);
    s->writer = (CheckpointWriter*)xcalloc(1, sizeof *s->writer);
    writer_open(s->writer, s->group, log, s->checkpoint ? s->step : -1);
}

// After the first step: from now on, all ranks use the matmul algorithms that rank 0 chose. So does a resumed run,
// because the checkpoint has the algorithms of rank 0.
static inline void session_share_plans(Session* s) {
    Text plans = {NULL, 0, 0};
    if (s->shares_plans || s->group->size == 1) return;
    s->shares_plans = 1;
    if (s->group->rank == 0) matmul_plans_text(s->ctx, &plans);
    uint64_t length = plans.length;
    group_broadcast(s->group, &length, sizeof length);
    char* text = (char*)xcalloc(length + 1, 1);
    if (plans.length) memcpy(text, plans.text, plans.length);
    group_broadcast(s->group, text, length);
    if (s->group->rank > 0 && length) {
        matmul_plans_free(s->ctx);
        matmul_plans_load(s->ctx, text);
    }
    free(text), free(plans.text);
}

// Report how the run ended, after the last save. Ends with FAILED if the save failed. All ranks call it.
static inline void session_end(const Session* s, int failed) {
    session_check_lock(s);
    const char* saved = failed || !*s->out ? "" : ", saved";
    if (s->best.step > 0 && s->settings->keep_best)
        printf("lowest validation loss: %.4f after step %lld\n", s->best.loss, (long long)s->best.step);
    if (s->average.decay > 0 && !s->settings->evaluate && !weight_average_is_on(&s->average, s->step))
        printf("no average of the weights: --ema-start %lld is not reached\n", (long long)s->settings->ema_start);
    if (s->stop) printf("stopped by signal %d after step %lld%s\n", s->stop, (long long)s->step, saved);
    if (failed)
        die(FAILED, "%s: the state after step %lld could not be saved; make room there, then resume with -y 1",
            s->settings->out, (long long)s->step);
}

static inline void session_close(Session* s) {
    if (s->writer) writer_close(s->writer);
    free(s->writer);
    if (s->held >= 0) close(s->held);
    run_lock_close(s->lock), free(s->lock);
    tokenizer_free(&s->tokenizer);
    tokenizer_files_free(&s->tokenizer_files);
    free(s->checkpoint), free(s->started), free(s->matmul_plans), free(s->fp8);
    flags_free(s->flags, s->flag_count);
}

#endif
