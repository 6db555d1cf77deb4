/* Saving: a checkpoint of the run after the steps that are done. resume.h reads it. */
#ifndef LLMC_RUN_SAVE_H
#define LLMC_RUN_SAVE_H

#include "llmc/ops/matmul/matmul.h"
#include "llmc/optim/model_buffers.h"
#include "llmc/run/session_state.h"

// The arguments for the functions of checkpoint/.
static inline Checkpoints session_checkpoints(const Session* s, const TensorTable* table, floatX* params,
                                              Optimizer* o) {
    Checkpoints c;
    memset(&c, 0, sizeof c);
    c.out = s->settings->out, c.lock = s->lock, c.ctx = s->ctx;
    c.table = table, c.params = params, c.optimizer = o;
    c.tokenizer = &s->tokenizer_files;
    c.keep = s->settings->keep, c.keep_every = s->settings->keep_every;
    c.best = s->settings->keep_best ? s->best.step : 0;
    return c;
}

// Number of shards of the run's optimizer state.
static inline int session_shards(const Session* s, const TensorTable* table, const Optimizer* o) {
    return group_any(s->group, o->shard.size < table->elements) ? s->group->size : 1;
}

// Save the state after s->step steps, including all launches so far, unless it is already saved. If more steps follow,
// it is written in the background. `config_json` and `card`: texts of config.json and README.md. Returns 0, or -1 after
// a warning. All ranks call it.
static inline int session_save(Session* s, const ModelBuffers* b, Optimizer* o, const char* config_json,
                               const char* card) {
    const Settings* settings = s->settings;
    int more = settings->checkpoint_every > 0 && s->step != s->last && s->step != settings->stop_after;
    if (!*settings->out || s->writer->step == s->step || settings->passes != PASSES_TRAIN) return 0;
    Text trainer = {NULL, 0, 0}, plans = {NULL, 0, 0};
    Checkpoints c = session_checkpoints(s, &b->table, b->params, o);
    LossScale scale = optimizer_loss_scale(o, s->ctx);
    text_printf(&trainer, "{");
    json_put_integer(&trainer, "step", s->step);
    json_put_integer(&trainer, "samples", (int64_t)s->consumed);
    json_put_integer(&trainer, "train_data_fingerprint", (int64_t)s->data);
    json_put_integer(&trainer, "step_sequences", s->step_sequences);
    json_put_integer(&trainer, "ranks", s->group->size);
    json_put_integer(&trainer, "shards", session_shards(s, &b->table, o));
    json_put_integer(&trainer, "updates", scale.updates);
    if (o->rule.kind == LOSS_SCALE_DYNAMIC) {
        json_put_number(&trainer, "loss_scale", (double)scale.scale);
        json_put_integer(&trainer, "loss_scale_good_steps", scale.good);
    }
    if (outliers_are_judged(o->limits)) {
        Outliers outliers = optimizer_outliers(o, s->ctx);
        outliers_put(&trainer, &outliers);
    }
    best_put(&trainer, &s->best);
    fp8_state_put(&trainer, &b->fp8, s->step, s->ctx);
    matmul_plans_text(s->ctx, &plans);
    json_put_string(&trainer, "matmul_plans", plans.text ? plans.text : "");
    json_put_key(&trainer, "settings");
    flags_to_json(&trainer, s->flags, s->flag_count);
    text_printf(&trainer, "}\n");
    int background = settings->async_checkpoint && more;
    int result = writer_begin(s->writer, &c, s->step, config_json, trainer.text, card, background);
    free(trainer.text), free(plans.text);
    return result;
}

// Save the average of the weights, which is swapped in for the parameters, as a separate model in OUT/ema. It is
// complete or absent. A failure is only a warning, because the checkpoint also has the average.
static inline void session_save_average(const Session* s, const ModelBuffers* b, const char* config_json,
                                        const char* card) {
    const TensorPart part = {.prefix = "", .device = b->params, .type = VIEW_FLOATX};
    CheckpointFile known = {.name = "model.safetensors"};
    if (!*s->out || run_lock_check(s->lock) != 0) return;
    char *dir = xprintf("%s/ema", s->out), *tmp = xprintf("%s.tmp", dir), *model = xprintf("%s/%s", tmp, known.name),
         *config = xprintf("%s/config.json", tmp), *readme = xprintf("%s/%s", tmp, CHECKPOINT_CARD);
    int bad = checkpoint_remove(s->lock, tmp) != 0 || checkpoint_make_directory(tmp) != 0 ||
              tensors_write(model, &b->table, &part, 1, &known.digest, s->ctx) != 0 ||
              write_file(config, config_json, strlen(config_json)) != 0 ||
              write_file(readme, card, strlen(card)) != 0 || tokenizer_files_write(&s->tokenizer_files, tmp) != 0 ||
              checkpoint_write_manifest(tmp, &known, 1) != 0 || sync_directory(tmp) != 0 ||
              checkpoint_remove(s->lock, dir) != 0 || run_lock_check(s->lock) != 0 || rename_into_place(tmp, dir) != 0;
    if (bad) {
        warn("%s: the average of the weights cannot be saved: %s", dir, strerror(errno));
        checkpoint_remove(s->lock, tmp);
    }
    free(dir), free(tmp), free(model), free(config), free(readme);
}

// Whether a checkpoint is due after this step. Also polls the previous checkpoint, which may still be written in the
// background. All ranks call it once per step.
static inline int session_checkpoint_is_due(const Session* s) {
    writer_poll(s->writer);
    return session_is_due(s, s->settings->checkpoint_every, 0);
}

// Wait until the last checkpoint is written. Returns 0, or -1 after a warning. All ranks call it.
static inline int session_finish_save(const Session* s) { return writer_finish(s->writer); }

#endif
