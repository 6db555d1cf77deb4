/* Resuming: find the checkpoint that a run continues, and restore settings, position, loss scale, weights and moments
 * from it.
 *
 * The checkpoint's trainer.json, written by session_save() (save.h), holds all but weights and moments. */
#ifndef LLMC_RUN_RESUME_H
#define LLMC_RUN_RESUME_H

#include <float.h>

#include "llmc/checkpoint/resume.h"
#include "llmc/run/save.h"

// Check a count from a checkpoint's trainer.json against its range.
static inline int64_t session_count(int64_t n, int64_t most, const char* key, const char* file) {
    if (n < 0 || n > most)
        die(USAGE, "%s: key \"%s\": is %lld; allowed: 0..%lld", file, key, (long long)n, (long long)most);
    return n;
}

// Refuse another value of a flag than the checkpoint's, even with --override 1: the checkpoint has the weights and
// moments that it determines, and a resumed run does not read a recipe.
static inline void session_check_same(const Session* s, const JsonNode* settings, const char* key, const char* file) {
    char is[4200], flag[16];  // a path is at most 4096 bytes long
    snprintf(flag, sizeof flag, "--%s", key);
    const Flag* row = flags_find(s->flags, s->flag_count, flag, strlen(flag));
    if (!row) return;  // a program without this choice
    flags_format_value(row, is, sizeof is);
    const char* was = json_get_string_or(settings, key, is, file);
    if (flag_is_given(s->flags, s->flag_count, flag) && strcmp(was, is) != 0)
        die(USAGE, "%s %s: %s is of a run with '%s'; leave it out, or start a new run", flag, is, s->checkpoint, was);
}

// Refuse another --ema-start than the checkpoint's unless it is still to come: the steps up to it are not averaged.
static inline void session_check_start(const Session* s, const JsonNode* settings, const char* file) {
    int64_t start = s->settings->ema_start;
    if (s->settings->ema == 0 || s->settings->evaluate || start > s->step) return;
    if (start != json_get_int_or(settings, "ema-start", start, file))
        die(USAGE, "--ema-start %lld: %s is of step %lld; the average of a resumed run can only begin later",
            (long long)start, s->checkpoint, (long long)s->step);
}

// --keep-best: forget a best validation that has no checkpoint, as before --keep-best was given. All ranks call it.
static inline void session_check_best(Session* s) {
    char* kept = checkpoint_path(s->settings->out, s->best.step);
    if (group_any(s->group, s->group->rank == 0 && !checkpoint_is_whole(kept))) best_forget(&s->best);
    free(kept);
}

// With -y 1, find the newest complete checkpoint in s->out, and restore s->flags and the state from its trainer.json.
// Without -y 1, a directory that has checkpoints is an error.
static inline void session_find_checkpoint(Session* s) {
    int resume = s->settings->resume, earlier = s->earlier = session_count_checkpoints(s->out);
    if (!resume && earlier)
        die(USAGE,
            "%s/ckpt holds %d checkpoint%s of an earlier run; -y 1 resumes it, --overwrite 1 deletes it, or "
            "choose another -o",
            s->out, earlier, earlier == 1 ? "" : "s");
    if (*s->out && !earlier) run_directory_refuse_foreign(s->out);
    if (!resume) return;
    s->checkpoint = checkpoint_find(s->settings->out, &s->step, &s->held, s->group);
    if (!s->checkpoint && s->settings->evaluate)
        die(USAGE, "%s: has no complete checkpoint; name the directory of a run with -o, or a model with -e without -y",
            s->settings->out);
    if (!s->checkpoint) {
        int is_chosen =
            flag_is_given(s->flags, s->flag_count, "--model") || flag_is_given(s->flags, s->flag_count, "--train-data");
        if (!is_chosen) checkpoint_refuse_default(s->settings->out, s->group);
        if (s->group->rank == 0) warn("%s: no usable checkpoint to resume from; starting a new run", s->out);
        return;
    }
    char* path = xprintf("%s/trainer.json", s->checkpoint);
    Json json;
    json_load(&json, path, (size_t)16 << 20);  // with --fp8 it has 1.6 KB per layer
    if (json_get_int(json.root, "step", path) != s->step)
        die(USAGE, "%s: key \"step\": differs from the directory's name; restore that name", path);
    const JsonNode* settings = json_get(json.root, "settings");
    // Pre-training and fine-tuning were once one program with a "task" setting, so checkpoints have that key.
    const char* task = settings ? json_get_string_or(settings, "task", "pretrain", path) : "pretrain";
    int is_task = strcmp(task, "pretrain") != 0, has_task = flags_find(s->flags, s->flag_count, "--task", 6) != NULL;
    if (is_task != has_task)
        die(USAGE, "%s: is a checkpoint of %s; resume it with that program", s->checkpoint,
            is_task                     ? "finetune_bert"
            : json_has(settings, "nsp") ? "train_bert"
                                        : "train_gpt2");
    session_check_same(s, settings, "model", path);
    session_check_same(s, settings, "init", path);
    session_check_same(s, settings, "optimizer", path);
    session_check_same(s, settings, "recipe", path);
    settings_restore(s->flags, s->flag_count, settings, s->settings->override, path);
    session_check_start(s, settings, path);
    s->consumed = (uint64_t)session_count(json_get_int(json.root, "samples", path), INT64_MAX, "samples", path);
    s->data = (uint32_t)json_get_int(json.root, "train_data_fingerprint", path);
    // With --override, -b or -d may change the size of a step.
    int64_t sequences = json_get_int_or(json.root, "step_sequences", 0, path);
    int is_other = s->settings->override && (flag_is_given(s->flags, s->flag_count, "--batch") ||
                                             flag_is_given(s->flags, s->flag_count, "--total-batch"));
    if (!is_other) s->step_sequences = session_count(sequences, INT_MAX, "step_sequences", path);
    s->scale.updates = session_count(json_get_int(json.root, "updates", path), s->step, "updates", path);
    double scale = json_get_double_or(json.root, "loss_scale", 0, path);
    // At most FLT_MAX, because the largest --loss-scale-start, 3e38, is 3.00000006e38 as a float.
    if (!(scale >= 0 && scale <= FLT_MAX))
        die(USAGE, "%s: key \"loss_scale\": is %g; allowed: 0..%g", path, scale, (double)FLT_MAX);
    s->scale.scale = (real)scale;
    int64_t good = json_get_int_or(json.root, "loss_scale_good_steps", 0, path);
    s->scale.good = session_count(good, s->step, "loss_scale_good_steps", path);
    s->outliers = outliers_get(json.root, path);
    s->best = best_get(json.root, path);
    if (s->settings->keep_best) session_check_best(s);
    if (json_has(json.root, "matmul_plans"))
        s->matmul_plans = xprintf("%s", json_get_string(json.root, "matmul_plans", path));
    if (json_has(json.root, "fp8")) s->fp8 = xprintf("%s", json_get_string(json.root, "fp8", path));
    json_free(&json);
    free(path);
}

// A run that starts from another one's moments needs its optimizer.
static inline void session_check_optimizer(const Session* s, const char* flag, const char* other, const char* found) {
    char is[FLAG_TEXT_SIZE], *path = xprintf("%s/trainer.json", found);
    Json json;
    json_load(&json, path, (size_t)16 << 20);
    flags_format_value(settings_find(s->flags, s->flag_count, "--optimizer"), is, sizeof is);
    const char* was = json_get_string_or(json_get(json.root, "settings"), "optimizer", is, path);
    if (strcmp(was, is) != 0)
        die(USAGE, "%s %s: has the moments of --optimizer %s, but this run uses %s; give --optimizer %s", flag, other,
            was, is, was);
    json_free(&json), free(path);
}

// The checkpoint that a run starts from instead of a model (caller frees): its own, or the newest complete one of the
// run in the directory `other` ("": none). NULL if there is neither.
static inline char* session_find_start(Session* s, const char* flag, const char* other) {
    int64_t step;
    if (s->checkpoint) return xprintf("%s", s->checkpoint);
    char* found = *other ? checkpoint_find(other, &step, &s->held, s->group) : NULL;
    if (*other && !found) die(USAGE, "%s %s: has no complete checkpoint; name the directory of a run", flag, other);
    if (found && flag_is_given(s->flags, s->flag_count, "--model"))
        die(USAGE, "%s %s: the model comes from that run; leave -e out", flag, other);
    if (found) session_check_optimizer(s, flag, other, found);
    if (found) s->started = xprintf("%s", found);
    return found;
}

// Resuming with other training data than the checkpoint's is an error, except for an evaluation.
static inline void session_check_data(Session* s, uint32_t fingerprint, const char* pattern) {
    if (s->checkpoint && !s->settings->override && !s->settings->evaluate && s->data != fingerprint)
        die(USAGE, "%s: is not the data that %s was trained on; restore it, or add --override 1", pattern,
            s->checkpoint);
    s->data = fingerprint;
}

// Set the optimizer's loss scale and outlier limits from the settings, and their state from the checkpoint.
static inline void session_set_steps(const Session* s, Optimizer* o) {
    const int automatic = strcmp(FLOATX_NAME, "F16") == 0 ? SCALE_DYNAMIC : SCALE_OFF;
    int kind = s->settings->loss_scale == SCALE_AUTO ? automatic : s->settings->loss_scale;
    LossScaleRule rule = {.kind = kind == SCALE_DYNAMIC ? LOSS_SCALE_DYNAMIC : LOSS_SCALE_FIXED,
                          .growth_interval = LOSS_SCALE_GROWTH};
    LossScale state = s->scale;
    if (kind != SCALE_DYNAMIC || state.scale == 0) {
        state.scale = kind == SCALE_OFF ? 1 : (real)s->settings->loss_scale_start;
        state.good = 0;
    }
    OutlierLimits limits = {.loss = s->settings->loss_outlier, .norm = s->settings->norm_outlier};
    optimizer_set_loss_scale(o, state, rule, s->ctx);
    optimizer_set_outliers(o, &s->outliers, limits, s->ctx);
}

// Load weights and moments from a complete checkpoint.
static inline void session_load(const Session* s, const char* checkpoint, const TensorTable* table, floatX* params,
                                const Fp32Copies* fp32_copies, Optimizer* o) {
    Checkpoints c = session_checkpoints(s, table, params, o);
    c.starts_anew = !s->checkpoint;
    checkpoint_load(&c, fp32_copies, checkpoint);
}

#endif
