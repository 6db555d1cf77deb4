/* How a run saves its state in checkpoints and resumes from them: what the run's directory may hold, what trainer.json has,
 * and which checkpoint a run starts from. */
#ifndef LLMC_CHECKPOINT_RUN_H
#define LLMC_CHECKPOINT_RUN_H

#include "llmc/checkpoint/resume.h"
#include "llmc/checkpoint/state.h"
#include "llmc/checkpoint/writer.h"
#include "llmc/run/state.h"

// ---------------------------------------------------------------------------------------------------------
// The run's directory

// Number of checkpoints in OUT, damaged ones included.
static inline int run_count_checkpoints(const char* out) {
    int64_t *whole, *damaged;
    if (!*out) return 0;
    int count = checkpoint_list(out, "", &whole) + checkpoint_list(out, ".damaged", &damaged);
    free(whole), free(damaged);
    return count;
}

// Before anything is written: end with USAGE if the run would have to replace what no run has written.
static inline void run_refuse_foreign(const Run* r) {
    int replaces = r->settings.overwrite;
    checkpoint_of_kind(r->out, ".tmp", REFUSE_FOREIGN);
    if (replaces) checkpoint_of_kind(r->out, "", REFUSE_FOREIGN);
    if (replaces) checkpoint_of_kind(r->out, ".damaged", REFUSE_FOREIGN);
    if (r->settings.ema > 0) checkpoint_refuse_foreign(path_of("%s/ema", r->out).text);
    if (r->settings.ema > 0) checkpoint_refuse_foreign(path_of("%s/ema.tmp", r->out).text);
    for (int i = 0; i < r->tokenizer_files.count && !r->earlier && !replaces; i++) {
        TokenizerFiles one = {.file = {r->tokenizer_files.file[i]}, .count = 1};
        char* path = xprintf("%s/%s", r->out, one.file[0].name);
        if (file_exists(path) && !tokenizer_files_match(&one, r->out))
            die(USAGE, "%s: belongs to another tokenizer; choose another -o, or --overwrite 1 (without -y) replaces it",
                path);
        free(path);
    }
}

// Delete an earlier run's checkpoints with --overwrite, and the average of the weights if this run does not resume it.
static inline void run_delete_earlier(Run* r) {
    char *average = xprintf("%s/ema", r->out), *half = xprintf("%s.tmp", average);
    if (r->settings.overwrite) checkpoint_of_kind(r->out, ".damaged", DELETE_THEM);
    if (r->settings.overwrite) checkpoint_of_kind(r->out, "", DELETE_THEM);
    if (r->settings.overwrite || (r->checkpoint && r->settings.ema == 0)) checkpoint_remove(average);
    checkpoint_remove(half);
    free(average), free(half);
}

// ---------------------------------------------------------------------------------------------------------
// Save

// The arguments for the functions of checkpoint/.
static inline Checkpoints run_checkpoints(Run* r) {
    Checkpoints c;
    memset(&c, 0, sizeof c);
    c.out = r->settings.out, c.lock = &r->lock, c.ctx = &r->ctx;
    c.table = &r->buffers->table, c.params = r->buffers->params, c.optimizer = &r->optimizer;
    c.tokenizer = &r->tokenizer_files;
    c.keep = r->settings.keep, c.keep_every = r->settings.keep_every;
    c.best = r->settings.keep_best ? r->best.step : 0;
    return c;
}

// The state now, for trainer.json. All ranks call it.
static inline SavedState run_state(Run* r) {
    const Optimizer* o = &r->optimizer;
    SavedState s;
    Text plans = {NULL, 0, 0};
    memset(&s, 0, sizeof s);
    matmul_plans_text(&r->ctx, &plans);
    s.step = r->step, s.samples = (int64_t)r->consumed, s.data = (int64_t)r->data;
    s.step_sequences = r->step_sequences;
    s.ranks = r->group.size;
    s.shards = group_any(&r->group, o->shard.size < r->buffers->table.elements) ? r->group.size : 1;
    s.scale = optimizer_loss_scale(o, &r->ctx);
    if (o->rule.kind != LOSS_SCALE_DYNAMIC) s.scale.scale = 0;
    s.has_outliers = optimizer_judges_outliers(o);
    if (s.has_outliers) s.outliers = optimizer_outliers(o, &r->ctx);
    s.best = r->best;
    s.fp8 = fp8_state_text(&r->buffers->fp8, r->step, &r->ctx);
    s.matmul_plans = plans.text ? plans.text : (char*)xcalloc(1, 1);
    return s;
}

// Save the state after r->step steps, including all launches so far, unless it is already saved. If more steps follow,
// it is written in the background. `card`: text of README.md. Returns 0, or -1 after a warning. All ranks call it.
static inline int run_save_checkpoint(Run* r, const char* card) {
    const Settings* settings = &r->settings;
    int more = settings->checkpoint_every > 0 && r->step != r->last && r->step != settings->stop_after;
    if (!*settings->out || r->writer->step == r->step || settings->passes != PASSES_TRAIN) return 0;
    Text trainer = {NULL, 0, 0};
    Checkpoints c = run_checkpoints(r);
    SavedState state = run_state(r);
    text_printf(&trainer, "{");
    state_put(&trainer, &state);
    json_put_key(&trainer, "settings");
    flags_to_json(&trainer, r->flags, r->flag_count);
    text_printf(&trainer, "}\n");
    int result = writer_begin(r->writer, &c, r->step, r->config.text, trainer.text, card, more);
    free(trainer.text), state_free(&state);
    return result;
}

// Save the average of the weights, which is swapped in for the parameters, as a separate model in OUT/ema. It is
// complete or absent. A failure is only a warning, because the checkpoint also has the average.
static inline void run_save_average(Run* r, const char* card) {
    const TensorPart part = {.prefix = "", .device = r->buffers->params, .type = VIEW_FLOATX};
    const char* config_json = r->config.text;
    CheckpointFile known = {.name = "model.safetensors"};
    if (!*r->out) return;
    char *dir = xprintf("%s/ema", r->out), *tmp = xprintf("%s.tmp", dir), *model = xprintf("%s/%s", tmp, known.name),
         *config = xprintf("%s/config.json", tmp), *readme = xprintf("%s/%s", tmp, CHECKPOINT_CARD);
    int bad = checkpoint_remove(tmp) != 0 || checkpoint_make_directory(tmp) != 0 ||
              tensors_write(model, &r->buffers->table, &part, 1, &known.digest, &r->ctx) != 0 ||
              write_file(config, config_json, strlen(config_json)) != 0 ||
              write_file(readme, card, strlen(card)) != 0 || tokenizer_files_write(&r->tokenizer_files, tmp) != 0 ||
              checkpoint_write_manifest(tmp, &known, 1) != 0 || sync_directory(tmp) != 0 ||
              checkpoint_remove(dir) != 0 || rename_into_place(tmp, dir) != 0;
    if (bad) {
        warn("%s: the average of the weights cannot be saved: %s", dir, strerror(errno));
        checkpoint_remove(tmp);
    }
    free(dir), free(tmp), free(model), free(config), free(readme);
}

// ---------------------------------------------------------------------------------------------------------
// Resume

// Refuse another value of a flag than the checkpoint's, even with --override 1: the checkpoint has the weights and
// moments that it determines, and a resumed run does not read a recipe.
static inline void run_check_same(Run* r, const JsonNode* settings, const char* key, const char* file) {
    char is[4200], flag[16];  // a path is at most 4096 bytes long
    snprintf(flag, sizeof flag, "--%s", key);
    const Flag* row = flags_find(r->flags, r->flag_count, flag, strlen(flag));
    if (!row) return;  // a program without this choice
    flags_format_value(row, is, sizeof is);
    const char* was = json_get_string_or(settings, key, is, file);
    if (flag_is_given(r->flags, r->flag_count, flag) && strcmp(was, is) != 0)
        die(USAGE, "%s %s: %s is of a run with '%s'; leave it out, or start a new run", flag, is, r->checkpoint, was);
}

// Refuse another --ema-start than the checkpoint's unless it is still to come: the steps up to it are not averaged.
static inline void run_check_ema_start(const Run* r, const JsonNode* settings, const char* file) {
    int64_t start = r->settings.ema_start;
    if (r->settings.ema == 0 || r->settings.evaluate || start > r->step) return;
    if (start != json_get_int_or(settings, "ema-start", start, file))
        die(USAGE, "--ema-start %lld: %s is of step %lld; the average of a resumed run can only begin later",
            (long long)start, r->checkpoint, (long long)r->step);
}

// Refuse a checkpoint of another program. Pre-training and fine-tuning were once one program with a "task" setting, so
// checkpoints have that key.
static inline void run_check_program(Run* r, const JsonNode* settings, const char* file) {
    const char* task = settings ? json_get_string_or(settings, "task", "pretrain", file) : "pretrain";
    int is_task = strcmp(task, "pretrain") != 0, has_task = flags_find(r->flags, r->flag_count, "--task", 6) != NULL;
    if (is_task == has_task) return;
    die(USAGE, "%s: is a checkpoint of %s; resume it with that program", r->checkpoint,
        is_task                     ? "finetune_bert"
        : json_has(settings, "nsp") ? "train_bert"
                                    : "train_gpt2");
}

// Restore settings and state from the trainer.json of r->checkpoint. All ranks call it.
static inline void run_restore(Run* r) {
    char* path = xprintf("%s/trainer.json", r->checkpoint);
    SavedState* s = &r->restored;
    Json json;
    json_load(&json, path, (size_t)16 << 20);  // with --fp8 it has 1.6 KB per layer
    s->step = r->step;
    if (json_get_int(json.root, "step", path) != r->step)
        die(USAGE, "%s: key \"step\": differs from the directory's name; restore that name", path);
    const JsonNode* settings = json_get(json.root, "settings");
    static const char* const same[] = {"model", "init", "optimizer", "recipe"};
    run_check_program(r, settings, path);
    for (size_t i = 0; i < COUNT_OF(same); i++) run_check_same(r, settings, same[i], path);
    settings_restore(r->flags, r->flag_count, settings, r->settings.override, path);
    run_check_ema_start(r, settings, path);
    state_get(s, json.root, path);
    r->consumed = (uint64_t)s->samples, r->data = (uint32_t)s->data;
    // With --override, -b or -d may change the size of a step.
    int is_other = r->settings.override && (flag_is_given(r->flags, r->flag_count, "--batch") ||
                                            flag_is_given(r->flags, r->flag_count, "--total-batch"));
    if (!is_other) r->step_sequences = s->step_sequences;
    r->best = s->best;
    // Forget a best validation that has no checkpoint, as before --keep-best was given. Those so far stay judged.
    char* kept = checkpoint_path(r->settings.out, r->best.step);
    if (r->settings.keep_best && group_any(&r->group, r->group.rank == 0 && !checkpoint_is_whole(kept)))
        r->best.loss = 0, r->best.step = 0;
    json_free(&json);
    free(kept), free(path);
}

// With -y 1, find the newest complete checkpoint in r->out and restore it. Without -y 1, a directory that has
// checkpoints is an error.
static inline void run_find_checkpoint(Run* r) {
    int resume = r->settings.resume, earlier = r->earlier = run_count_checkpoints(r->out);
    if (!resume && earlier)
        die(USAGE,
            "%s/ckpt holds %d checkpoint%s of an earlier run; -y 1 resumes it, --overwrite 1 deletes it, or "
            "choose another -o",
            r->out, earlier, earlier == 1 ? "" : "s");
    if (*r->out && !earlier) run_directory_refuse_foreign(r->out);
    if (!resume) return;
    r->checkpoint = checkpoint_find(r->settings.out, &r->step, &r->group);
    if (r->checkpoint) {
        run_restore(r);
        return;
    }
    if (r->settings.evaluate)
        die(USAGE, "%s: has no complete checkpoint; name the directory of a run with -o, or a model with -e without -y",
            r->settings.out);
    int is_chosen =
        flag_is_given(r->flags, r->flag_count, "--model") || flag_is_given(r->flags, r->flag_count, "--train-data");
    if (!is_chosen) checkpoint_refuse_default(r->settings.out, &r->group);
    if (r->group.rank == 0) warn("%s: no usable checkpoint to resume from; starting a new run", r->out);
}

// A run that starts from another one's moments needs its optimizer.
static inline void run_check_optimizer(Run* r, const char* flag, const char* other) {
    char is[FLAG_TEXT_SIZE], *path = xprintf("%s/trainer.json", r->start);
    Json json;
    json_load(&json, path, (size_t)16 << 20);
    flags_format_value(settings_find(r->flags, r->flag_count, "--optimizer"), is, sizeof is);
    const char* was = json_get_string_or(json_get(json.root, "settings"), "optimizer", is, path);
    if (strcmp(was, is) != 0)
        die(USAGE, "%s %s: has the moments of --optimizer %s, but this run uses %s; give --optimizer %s", flag, other,
            was, is, was);
    json_free(&json), free(path);
}

// Set r->start: the checkpoint that the run resumes, or the newest complete one of the run in the directory `other`
// ("": none), which the flag `flag` names.
static inline void run_find_start(Run* r, const char* flag, const char* other) {
    int64_t step;
    if (r->checkpoint) r->start = xprintf("%s", r->checkpoint);
    if (r->checkpoint || !*other) return;
    r->start = checkpoint_find(other, &step, &r->group);
    if (!r->start) die(USAGE, "%s %s: has no complete checkpoint; name the directory of a run", flag, other);
    if (flag_is_given(r->flags, r->flag_count, "--model"))
        die(USAGE, "%s %s: the model comes from that run; leave -e out", flag, other);
    run_check_optimizer(r, flag, other);
}

// Load weights and moments of the checkpoint that the run resumes or starts from.
static inline void run_load_start(Run* r) {
    Checkpoints c = run_checkpoints(r);
    c.starts_anew = !r->checkpoint;
    checkpoint_load(&c, &r->buffers->fp32_copies, r->start);
}

#endif
