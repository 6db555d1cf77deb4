/* What a run is apart from its model: where it stands, what it goes on from, and how it is saved.
 *
 * A trainer fills the first part from its flags. Everything here is the same for every model. */
#ifndef LLMC_SESSION_H
#define LLMC_SESSION_H

#include <glob.h>

#include "../data/shards.h"
#include "checkpoint.h"
#include "settings.h"

typedef struct {
    const char* out;  // the run's directory; "" writes nothing
    Flag* flags;
    int flag_count;
    int keep, keep_every;
    Context* ctx;

    char* checkpoint;  // the directory the run goes on from; NULL: a new run
    int64_t step;      // optimizer steps done
    uint64_t samples;  // sequences trained on
    uint32_t data;     // fingerprint of the training data of the checkpoint
    int64_t saved;     // step of the newest checkpoint; -1: none
    Tokenizer tokenizer;
    char* tokenizer_dir;  // NULL: there is no tokenizer
} Session;

// With `resume`, go on from the newest whole checkpoint in s->out: its settings enter s->flags (settings_restore says
// how the three flags after it matter). Without, refuse a directory that holds checkpoints.
static inline void session_find_checkpoint(Session* s, int resume, int override, const char* of_process,
                                           const char* free_to_change) {
    int64_t* steps = NULL;
    int earlier = *s->out ? checkpoint_list(s->out, &steps) : 0;
    free(steps);
    s->saved = -1;
    if (!resume && earlier)
        die(USAGE,
            "%s/ckpt holds %d checkpoint%s of an earlier run; -y 1 goes on with it, --overwrite 1 deletes it, or "
            "choose another -o",
            s->out, earlier, earlier == 1 ? "" : "s");
    char* model = xprintf("%s/model.safetensors", s->out);
    if (!resume && *s->out && file_exists(model))
        die(USAGE,
            "%s: is a model that is not from a run of this program; choose another -o, or --overwrite 1 replaces it",
            model);
    free(model);
    if (!resume) return;
    s->checkpoint = earlier ? checkpoint_find(s->out, &s->step) : NULL;
    if (!s->checkpoint) {
        warn("%s: there is no usable checkpoint to resume from; starting afresh", *s->out ? s->out : "-o is empty");
        return;
    }
    char* path = xprintf("%s/trainer.json", s->checkpoint);
    Json json;
    json_load(&json, path, (size_t)1 << 20);
    settings_restore(s->flags, s->flag_count, json_get(json.root, "settings"), of_process, free_to_change, override,
                     path);
    s->samples = (uint64_t)json_get_int(json.root, "samples", path);
    s->data = (uint32_t)json_get_int(json.root, "train_data_fingerprint", path);
    if (json_get_int(json.root, "step", path) != s->step)
        die(USAGE, "%s: key \"step\": is not that of its directory; restore the directory's name", path);
    s->saved = s->step;
    json_free(&json);
    free(path);
}

static inline char* session_directory_of(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? xprintf("%.*s", (int)(slash - path), path) : xprintf(".");
}

// The patterns of the training and validation shards (caller frees). An empty `train` means the built-in corpus, below
// the working directory or beside the program; an empty `val` means `train` with "train" replaced by "val" at the start
// of the file's name. *val_pattern is NULL where there is nothing to validate on.
static inline void session_find_data(const char* train, const char* val, char** train_pattern, char** val_pattern) {
    static const char builtin[] = "data/builtin/train.bin";
    char program[4096];
    *train_pattern = xprintf("%s", *train ? train : builtin);
    if (!*train && !file_exists(builtin)) {
        ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
        program[n > 0 ? n : 0] = '\0';
        char* beside = session_directory_of(program);
        free(*train_pattern);
        *train_pattern = xprintf("%s/%s", beside, builtin);
        free(beside);
    }
    *val_pattern = *val ? xprintf("%s", val) : NULL;
    const char* slash = strrchr(*train_pattern, '/');
    const char* name = slash ? slash + 1 : *train_pattern;
    if (*val || strncmp(name, "train", 5) != 0) return;
    glob_t found;
    *val_pattern = xprintf("%.*sval%s", (int)(name - *train_pattern), *train_pattern, name + 5);
    if (glob(*val_pattern, 0, NULL, &found) == 0) {
        globfree(&found);
        return;
    }
    free(*val_pattern);
    *val_pattern = NULL;
}

// The tokenizer of the first of these directories that has one: the checkpoint, the model, the data.
static inline void session_find_tokenizer(Session* s, const char* model, const char* data_dir) {
    const char* places[] = {s->checkpoint, model, data_dir};
    for (size_t i = 0; i < COUNT_OF(places) && !s->tokenizer_dir; i++)
        if (places[i] && is_directory(places[i]) && tokenizer_open(&s->tokenizer, places[i]) == 0)
            s->tokenizer_dir = xprintf("%s", places[i]);
}

// The token that separates documents: the tokenizer's, else the last of V, which is where GPT-2's vocabulary has it.
static inline int session_end_of_text(const Session* s, int V) {
    int id = s->tokenizer_dir ? tokenizer_end_of_text(&s->tokenizer) : -1;
    return id >= 0 && id < V ? id : V - 1;
}

// Print tokens as text (as numbers where there is no tokenizer), and keep it in OUT/sample.txt.
static inline void session_show_sample(const Session* s, const int* tokens, int count) {
    Text text = {NULL, 0, 0};
    for (int i = 0; i < count; i++) {
        size_t bytes = 0;
        const char* piece = s->tokenizer_dir ? tokenizer_decode(&s->tokenizer, tokens[i], &bytes) : NULL;
        if (piece) text_append(&text, piece, bytes);
        else text_printf(&text, "%d ", tokens[i]);
    }
    printf("sample after step %lld:\n---\n%s\n---\n", (long long)s->step, text.text);
    if (*s->out) {
        char* path = xprintf("%s/sample.txt", s->out);
        if (write_file(path, text.text, text.length) != 0) warn("%s: cannot be written: %s", path, strerror(errno));
        free(path);
    }
    free(text.text);
}

static inline Checkpoints session_checkpoints(const Session* s, const TensorTable* table, floatX* params,
                                              Optimizer* o) {
    Checkpoints c = {s->out, table, params, o, s->tokenizer_dir, s->keep, s->keep_every, s->ctx};
    return c;
}

// Save the state after s->step steps unless that was done. Returns 0, or -1 after a warning.
static inline int session_save(Session* s, const TensorTable* table, floatX* params, Optimizer* o,
                               const char* config_json, uint32_t data) {
    if (!*s->out || s->saved == s->step) return 0;
    Text trainer = {NULL, 0, 0};
    Checkpoints c = session_checkpoints(s, table, params, o);
    text_printf(&trainer, "{");
    json_put_integer(&trainer, "step", s->step);
    json_put_integer(&trainer, "samples", (int64_t)s->samples);
    json_put_integer(&trainer, "train_data_fingerprint", (int64_t)data);
    json_put_key(&trainer, "settings");
    flags_to_json(&trainer, s->flags, s->flag_count);
    text_printf(&trainer, "}\n");
    int result = checkpoint_save(&c, s->step, config_json, trainer.text);
    if (result == 0) s->saved = s->step;
    free(trainer.text);
    return result;
}

// The optimizer left the update of `step` out because the gradients were not finite: say where (in the gradients as they
// are now), and end with STOPPED_BY_NAN if `stop`.
static inline void session_report_nan(const Session* s, int64_t step, const TensorTable* table, const real* grads,
                                      double loss, double norm, int stop) {
    HostView view = host_view_open((void*)grads, table->elements, VIEW_REAL);
    host_view_read(s->ctx, &view);
    int first = tensors_first_not_finite(table, view.values);
    host_view_close(&view);
    char* good = s->saved >= 0 ? checkpoint_path(s->out, s->saved) : xprintf("none");
    char* what = xprintf("step %lld: loss %g, gradient norm %g, first in the gradient of %s; the update was left out",
                         (long long)step, loss, norm,
                         first >= 0 ? table->tensors[first].name : "no single tensor (their norm overflowed)");
    if (stop) die(STOPPED_BY_NAN, "%s; the last good checkpoint: %s; --on-nan skip would go on", what, good);
    warn("%s", what);
    free(good), free(what);
}

static inline void session_close(Session* s) {
    if (s->tokenizer_dir) tokenizer_free(&s->tokenizer);
    free(s->tokenizer_dir), free(s->checkpoint);
    flags_free(s->flags, s->flag_count);
}

#endif
