/* What a run is apart from its model: where it stands, what it goes on from, and how it is saved. Everything here is the
 * same for every model. */
#ifndef LLMC_SESSION_H
#define LLMC_SESSION_H

#include <glob.h>
#include <sys/file.h>

#include "../base/log.h"
#include "../data/shards.h"
#include "../ops/matmul.h"
#include "agreement.h"
#include "comm.h"
#include "saving.h"
#include "settings.h"

enum { SESSION_TIME_IS_UP = -1 };

typedef struct {
    const Settings* settings;
    Comm* comm;
    const char* out;  // settings->out, the run's directory; "" writes nothing, as on all ranks but 0
    double began;     // now_seconds() then
    Flag* flags;
    int flag_count;
    Context* ctx;
    int is_locked;       // OUT/.lock is this process's
    int shares_plans;    // all ranks have rank 0's chosen algorithms
    char* matmul_cache;  // file of the GPU's chosen algorithms; NULL: none
    char* matmul_plans;  // those of the checkpoint; NULL: there is none, or it has none

    char* checkpoint;        // the directory the run goes on from; NULL: a new run
    char* started;           // the directory of another run that this one began with; NULL: none
    int64_t step;            // optimizer steps done
    uint64_t samples;        // sequences trained on
    int64_t step_sequences;  // sequences in a step over all ranks; 0: not known yet
    uint32_t data;           // fingerprint of the training data, of the checkpoint's until session_check_data()
    Saving* saving;          // what is being saved, from session_begin() on
    int64_t last;            // the run ends after this step
    int64_t end;             // this process after this one, at the latest: --stop-after, or the run's last
    int stop;                // what ends it before: a signal's number, or SESSION_TIME_IS_UP; 0: nothing
    LossScale scale;         // of the checkpoint; scale 0: it was not dynamic
    Outliers outliers;       // of the checkpoint
    Tokenizer tokenizer;
    char* tokenizer_dir;  // NULL: there is no tokenizer
} Session;

// Join the other ranks, as the settings and the environment say.
static inline void session_join(const Settings* s, Comm* comm) {
    CommSettings c = {s->start,  s->rank,        s->ranks,      s->ranks_per_machine,
                      s->server, s->server_port, s->rendezvous, s->timeout};
    comm_init(comm, &c);
}

// Before anything is written: all ranks are about to train the same model (as config.json has it) on the same data, with
// settings that may be a checkpoint's by now.
static inline void session_check_ranks(const Session* s, const char* config_json, uint32_t val_data) {
    agree_on_flags(s->comm, s->flags, s->flag_count);
    agree_on_model(s->comm, config_json, s->data, val_data);
}

// Flags that cannot be meant together, named both.
static inline void session_check_flags(const Settings* s) {
    if (s->resume && s->overwrite)
        die(USAGE, "-y 1 and --overwrite 1: one goes on with the run in -o, the other deletes it; leave one out");
    if (s->resume && !*s->out)
        die(USAGE, "-y 1 and -o '': there is nothing to go on from; name the run's directory with -o");
    if (s->mode != MODE_TRAIN && !s->profile)
        die(USAGE, "--mode short of train is for --profile, which is not given: such a run trains nothing");
    if (!s->profile && strcmp(s->ceilings, "measure") != 0)
        die(USAGE, "--ceilings %s: is for --profile, which is not given", s->ceilings);
    if (s->override && !s->resume)
        die(USAGE, "--override 1 without -y 1: it is about a run that is resumed; add -y 1 or leave it out");
}

// Take OUT/.lock, which ends with the process: two processes would write over each other's files. `create` is O_CREAT, or
// 0 to take it only where there is one, which changes nothing on the disk. The file is never deleted: another process
// could then hold a lock on a file that nobody sees.
static inline void session_lock(Session* s, int create) {
    if (!*s->out || s->is_locked) return;
    char* path = xprintf("%s/.lock", s->out);
    int fd = open(path, O_RDWR | O_CLOEXEC | create, 0666);
    if (fd < 0 && (create || (errno != ENOENT && errno != ENOTDIR && errno != ENAMETOOLONG)))
        die(errno == ENOSPC ? FAILED : USAGE, "%s: cannot be opened for writing: %s; give another directory with -o",
            path, strerror(errno));
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0) {
        s->is_locked = 1;
    } else if (fd >= 0) {
        if (errno == EWOULDBLOCK)
            die(USAGE, "%s: another process is training there; wait for its end, or give another directory with -o",
                s->out);
        warn("%s: cannot be locked: %s; see to it that no other process trains there", path, strerror(errno));
        close(fd);
    }
    free(path);
}

// Make OUT this process's own and see that checkpoints can be written there, before the first step is spent.
static inline void session_claim(Session* s) {
    if (!*s->out) return;
    char* path = xprintf("%s/ckpt", s->out);
    if (make_directories(path) != 0 || access(path, W_OK) != 0)
        die(errno == ENOSPC ? FAILED : USAGE, "%s: cannot be written: %s; give another directory with -o", path,
            strerror(errno));
    free(path);
    session_lock(s, O_CREAT);
}

// A model in OUT that is not that of a checkpoint there is somebody else's: never replaced unasked.
static inline void session_refuse_foreign(const char* out) {
    static const char* const names[] = {"model.safetensors", "config.json"};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        char* path = xprintf("%s/%s", out, names[i]);
        if (file_exists(path))
            die(USAGE,
                "%s: is of a model that is not from a run of this program; choose another -o, or --overwrite 1 "
                "(without -y) replaces it",
                path);
        free(path);
    }
}

// A count that a checkpoint's trainer.json has under `key`.
static inline int64_t session_count(int64_t n, int64_t most, const char* key, const char* file) {
    if (n < 0 || n > most)
        die(USAGE, "%s: key \"%s\": is %lld; allowed: 0..%lld", file, key, (long long)n, (long long)most);
    return n;
}

// With -y 1, go on from the newest whole checkpoint in s->out: its settings enter s->flags; those of the list
// `free_to_change` may be given anew. Without, refuse a directory that holds checkpoints.
static inline void session_find_checkpoint(Session* s, const char* free_to_change) {
    int resume = s->settings->resume;
    int64_t* steps = NULL;
    int earlier = *s->out ? checkpoint_list(s->out, &steps) : 0;
    free(steps);
    if (*s->out) earlier += checkpoint_of_kind(s->out, ".damaged", COUNT_THEM);
    if (!resume && earlier)
        die(USAGE,
            "%s/ckpt holds %d checkpoint%s of an earlier run; -y 1 goes on with it, --overwrite 1 deletes it, or "
            "choose another -o",
            s->out, earlier, earlier == 1 ? "" : "s");
    if (*s->out && !earlier) session_refuse_foreign(s->out);
    if (!resume) return;
    s->checkpoint = checkpoint_find(s->settings->out, &s->step, s->comm);
    if (!s->checkpoint && s->settings->evaluate)
        die(USAGE,
            "%s: holds no whole checkpoint; name the directory of a run with -o, or a model with -e and without -y",
            s->settings->out);
    if (!s->checkpoint) {
        int is_said =
            flag_is_given(s->flags, s->flag_count, "--model") || flag_is_given(s->flags, s->flag_count, "--train-data");
        if (!is_said) checkpoint_refuse_default(s->settings->out, s->comm);
        if (s->comm->rank == 0) warn("%s: there is no usable checkpoint to resume from; starting afresh", s->out);
        return;
    }
    char* path = xprintf("%s/trainer.json", s->checkpoint);
    Json json;
    json_load(&json, path, (size_t)1 << 20);
    if (json_get_int(json.root, "step", path) != s->step)
        die(USAGE, "%s: key \"step\": is not that of its directory; restore the directory's name", path);
    settings_restore(s->flags, s->flag_count, json_get(json.root, "settings"), SETTINGS_OF_PROCESS, free_to_change,
                     s->settings->override, path);
    s->samples = (uint64_t)session_count(json_get_int(json.root, "samples", path), INT64_MAX, "samples", path);
    s->data = (uint32_t)json_get_int(json.root, "train_data_fingerprint", path);
    // With --override another -b or -d may mean another step.
    int64_t sequences = json_get_int_or(json.root, "step_sequences", 0, path);
    int is_other = s->settings->override && (flag_is_given(s->flags, s->flag_count, "--batch") ||
                                             flag_is_given(s->flags, s->flag_count, "--total-batch"));
    if (!is_other) s->step_sequences = session_count(sequences, INT_MAX, "step_sequences", path);
    s->scale.updates = session_count(json_get_int(json.root, "updates", path), s->step, "updates", path);
    double scale = json_get_double_or(json.root, "loss_scale", 0, path);
    if (!(scale >= 0 && scale <= 3e38)) die(USAGE, "%s: key \"loss_scale\": is %g; allowed: 0..3e38", path, scale);
    s->scale.scale = (real)scale;
    int64_t good = json_get_int_or(json.root, "loss_scale_good_steps", 0, path);
    s->scale.good = session_count(good, s->step, "loss_scale_good_steps", path);
    s->outliers = outliers_get(json.root, path);
    if (json_has(json.root, "matmul_plans"))
        s->matmul_plans = xprintf("%s", json_get_string(json.root, "matmul_plans", path));
    json_free(&json);
    free(path);
}

// Begin with settings whose flags are parsed: open the context and find what the run goes on from. Nothing is written.
static inline void session_open(Session* s, const Settings* settings, Flag* flags, int flag_count,
                                const char* free_to_change, Comm* comm, Context* ctx) {
    session_check_flags(settings);
    s->settings = settings, s->comm = comm, s->out = comm->rank == 0 ? settings->out : "";
    s->flags = flags, s->flag_count = flag_count;
    s->ctx = ctx;
    s->began = now_seconds();
    // One rank speaks for all; errors are each rank's own.
    if (comm->rank > 0 && !freopen("/dev/null", "w", stdout)) die(FAILED, "/dev/null: %s", strerror(errno));
    agree_on_flags(comm, flags, flag_count);  // before they say what the ranks do together
    device_choose(comm->local_rank);
    context_init(ctx);
    device_set_threads(settings->threads);
    if (!settings->evaluate && settings->steps != 0) session_lock(s, 0);
    if (settings->resume || !(settings->overwrite || settings->evaluate || settings->steps == 0))
        session_find_checkpoint(s, free_to_change);
    s->matmul_cache = *s->out && !settings->evaluate ? xprintf("%s/matmul_plans.txt", s->out) : NULL;
    device_set_matmul(ctx, settings->autotune, s->matmul_cache, settings->gelu_fusion, settings->tf32);
    device_set_attention(ctx, (AttentionPath)settings->attention);
    if (s->matmul_plans) matmul_plans_load(ctx, s->matmul_plans);
}

static inline char* session_directory_of(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? xprintf("%.*s", (int)(slash - path), path) : xprintf(".");
}

// The patterns of the training and validation shards (caller frees). An empty -i means the corpus that is built in, below
// the working directory or beside the program; an empty -j means -i with "train" replaced by "val" at the start of the
// file's name. *val_pattern is NULL where there is nothing to validate on.
static inline void session_find_data(const Session* s, const char* builtin, char** train_pattern, char** val_pattern) {
    const char *train = s->settings->train_data, *val = s->settings->val_data;
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
    if (file_exists(*val_pattern)) return;
    if (glob(*val_pattern, 0, NULL, &found) == 0) {
        globfree(&found);
        return;
    }
    free(*val_pattern);
    *val_pattern = NULL;
}

// Where a model comes from: a Hugging Face directory; a .safetensors file (its directory holds the rest); a config.json,
// for a model from scratch, without weights; or a descriptor of one, with both paths NULL. The caller frees them.
static inline void session_find_model(const char* source, char** directory, char** weights) {
    const char* slash = strrchr(source, '/');
    int is_file = strlen(source) > 12 && name_ends_with(source, ".safetensors");
    int is_config = strcmp(slash ? slash + 1 : source, "config.json") == 0;
    *directory = is_file || is_config   ? session_directory_of(source)
                 : is_directory(source) ? xprintf("%s", source)
                                        : NULL;
    *weights = is_file                    ? xprintf("%s", source)
               : *directory && !is_config ? xprintf("%s/model.safetensors", source)
                                          : NULL;
}

// The same of a checkpoint of llm.c, a .bin file, which says itself what model it holds: returns the model's sizes, as a
// descriptor has them (caller frees), or NULL where `source` is something else.
static inline char* session_find_llmc(const char* source, char** directory, char** weights) {
    LlmcWeights w;
    if (!tensors_are_llmc(source) || is_directory(source)) return NULL;
    llmc_weights_open(&w, source);
    char* sizes = xprintf("L=%d,C=%d,NH=%d,V=%d,T=%d", w.L, w.C, w.NH, w.V, w.T);
    llmc_weights_close(&w);
    *directory = session_directory_of(source);
    *weights = xprintf("%s", source);
    return sizes;
}

// The directory that a run begins with instead of a model (caller frees): its own checkpoint, or the newest whole one of
// the run in the directory `other` ("": none); NULL where there is neither.
static inline char* session_find_start(Session* s, const char* flag, const char* other) {
    int64_t step;
    if (s->checkpoint) return xprintf("%s", s->checkpoint);
    char* found = *other ? checkpoint_find(other, &step, s->comm) : NULL;
    if (*other && !found) die(USAGE, "%s %s: holds no whole checkpoint; name the directory of a run", flag, other);
    if (found && flag_is_given(s->flags, s->flag_count, "--model"))
        die(USAGE, "%s %s: the model is that run's; leave -e out", flag, other);
    if (found) s->started = xprintf("%s", found);
    return found;
}

// The micro-batches of B sequences of T tokens that each rank takes for a step: of --total-batch tokens, else of as many
// sequences as the run has had from its start, else one; and one where nothing is trained.
static inline int session_micro_steps(Session* s, int B, int T) {
    int64_t total_batch = s->settings->total_batch, ranks = s->comm->size, micro_tokens = (int64_t)B * T * ranks;
    if (s->settings->evaluate) total_batch = s->step_sequences = 0;
    if ((int64_t)B * T > 1 << 30)
        die(USAGE, "-b %d: more than 2^30 tokens in a micro-batch of -t %d; make large steps with -d", B, T);
    if (total_batch % micro_tokens != 0)
        die(USAGE, "-d %lld: is no multiple of the %lld tokens that all ranks take in a micro-batch (-b x -t x ranks)",
            (long long)total_batch, (long long)micro_tokens);
    if (total_batch / T > INT_MAX || B * ranks > INT_MAX)
        die(USAGE, "-d %lld: %lld sequences of -t %d in a step are more than the %d that it may have",
            (long long)total_batch, (long long)(total_batch ? total_batch / T : B * ranks), T, INT_MAX);
    int64_t sequences = total_batch ? total_batch / T : s->step_sequences ? s->step_sequences : B * ranks;
    if (sequences % (B * ranks) != 0)
        die(USAGE,
            "%s: its run has %lld sequences in a step, which %lld ranks of -b %d cannot share; start another number of "
            "ranks, or give -b or -d with --override 1",
            s->checkpoint, (long long)sequences, (long long)ranks, B);
    s->step_sequences = sequences;
    return (int)(sequences / (B * ranks));
}

// Whether all ranks are to stop now: one got a signal (0: this one got none), or the time is up.
static inline int session_must_stop(Session* s, int signal) {
    double hours = (now_seconds() - s->began) / 3600, most = s->settings->max_hours;
    int stop = signal ? signal : most > 0 && hours >= most ? SESSION_TIME_IS_UP : 0;
    int* stops = (int*)xmalloc((size_t)s->comm->size * sizeof *stops);
    comm_gather(s->comm, stops, &stop, sizeof stop);
    for (int r = 0; r < s->comm->size && !s->stop; r++) s->stop = stops[r];
    free(stops);
    return s->stop != 0;
}

// Whether something is due now: every `every` steps (0: never) and, with `at_end`, after the run's last.
static inline int session_is_due(const Session* s, int every, int at_end) {
    return every > 0 && (s->step % every == 0 || (at_end && s->step == s->last));
}

// The micro-batches of B of a validation on `samples`.
static inline uint64_t session_val_batches(const Session* s, uint64_t samples, int B) {
    uint64_t batches = samples / (uint64_t)B, most = (uint64_t)s->settings->val_batches;
    if (batches == 0) batches = 1;
    return most > 0 && batches > most ? most : batches;
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

// Print what the model makes of the run so far, and keep it in OUT/sample.txt.
static inline void session_show_text(const Session* s, const Text* text) {
    printf("sample after step %lld:\n---\n", (long long)s->step);
    fwrite(text->text, 1, text->length, stdout);  // bytes of any kind
    printf("\n---\n");
    if (!*s->out) return;
    char* path = xprintf("%s/sample.txt", s->out);
    if (write_file(path, text->text, text->length) != 0) warn("%s: cannot be written: %s", path, strerror(errno));
    free(path);
}

// Refuse to go on with other training data than the checkpoint's.
static inline void session_check_data(Session* s, uint32_t fingerprint, const char* pattern) {
    if (s->checkpoint && !s->settings->override && s->data != fingerprint)
        die(USAGE, "%s: is not the data that %s was trained on; restore it, or add --override 1", pattern,
            s->checkpoint);
    s->data = fingerprint;
}

// From here on the run writes: take OUT, open the log with the settings as its first line, delete what --overwrite says.
static inline void session_begin(Session* s, Log* log) {
    Text settings = {NULL, 0, 0};
    session_claim(s);
    log_open(log, s->out, s->checkpoint ? s->step : -1);
    if (*s->out && s->settings->overwrite) checkpoint_delete_all(s->out);
    if (*s->out) checkpoint_clean(s->out, s->checkpoint, s->checkpoint ? s->step : -1);
    flags_to_json(&settings, s->flags, s->flag_count);
    log_line(log, &settings);
    free(settings.text);
    s->saving = (Saving*)xcalloc(1, sizeof *s->saving);
    saving_open(s->saving, s->comm, log, s->settings->on_checkpoint_error == CHECKPOINT_ERROR_STOP,
                s->checkpoint ? s->step : -1);
}

static inline Checkpoints session_checkpoints(const Session* s, const TensorTable* table, floatX* params,
                                              Optimizer* o) {
    Checkpoints c = {s->settings->out,        table, params, o, s->tokenizer_dir, s->settings->keep,
                     s->settings->keep_every, s->ctx};
    return c;
}

// After the first step: the matmul algorithms that rank 0 has chosen are those of all ranks from now on, as they are of a
// run that goes on from a checkpoint, which holds rank 0's.
static inline void session_share_plans(Session* s) {
    Text plans = {NULL, 0, 0};
    if (s->shares_plans || s->comm->size == 1) return;
    s->shares_plans = 1;
    if (s->comm->rank == 0) matmul_plans_text(s->ctx, &plans);
    uint64_t length = plans.length;
    comm_broadcast(s->comm, &length, sizeof length);
    char* text = (char*)xcalloc(length + 1, 1);
    if (plans.length) memcpy(text, plans.text, plans.length);
    comm_broadcast(s->comm, text, length);
    if (s->comm->rank > 0 && length) {
        matmul_plans_free(s->ctx);
        matmul_plans_load(s->ctx, text);
    }
    free(text), free(plans.text);
}

// Take weights and moments from a whole checkpoint.
static inline void session_load(const Session* s, const char* checkpoint, const TensorTable* table, floatX* params,
                                const ExactParameters* exact, Optimizer* o) {
    Checkpoints c = session_checkpoints(s, table, params, o);
    checkpoint_load(&c, exact, checkpoint);
}

// What the settings say of updates. All ranks call it.
static inline UpdateSettings session_update(const Session* session) {
    const Settings* s = session->settings;
    UpdateSettings update = {(OptimizerKind)s->optimizer,
                             s->master_weights ? WITH_MASTER : NO_MASTER,
                             session->comm->rank,
                             session->comm->size,
                             {s->zero, s->reduce, s->bucket, collective_is_near(session->comm)}};
    return update;
}

// Have the optimizer scale the loss and judge steps as the settings say, and go on where the checkpoint stood.
static inline void session_set_steps(const Session* s, Optimizer* o) {
    const int automatic = strcmp(FLOATX_NAME, "F16") == 0 ? SCALE_DYNAMIC : SCALE_OFF;
    int kind = s->settings->loss_scale == SCALE_AUTO ? automatic : s->settings->loss_scale;
    LossScaleRule rule = {kind == SCALE_DYNAMIC ? LOSS_SCALE_DYNAMIC : LOSS_SCALE_FIXED,
                          s->settings->loss_scale_growth};
    LossScale state = s->scale;
    if (kind != SCALE_DYNAMIC || state.scale == 0) {
        state.scale = kind == SCALE_OFF ? 1 : (real)s->settings->loss_scale_start;
        state.good = 0;
    }
    OutlierLimits limits = {s->settings->loss_outlier, s->settings->norm_outlier};
    optimizer_set_loss_scale(o, state, rule, s->ctx);
    optimizer_set_outliers(o, &s->outliers, limits, s->ctx);
}

// The shards that a run's optimizer is in.
static inline int session_shards(const Session* s, const TensorTable* table, const Optimizer* o) {
    return comm_any(s->comm, o->shard.size < table->elements) ? s->comm->size : 1;
}

// Save the state after s->step steps, which all launches so far make, unless that was done; in the background where the run
// goes on. Returns 0, or -1 after a warning. All ranks call it.
static inline int session_save(Session* s, const TensorTable* table, floatX* params, Optimizer* o,
                               const char* config_json) {
    const Settings* settings = s->settings;
    int goes_on = settings->checkpoint_every > 0 && s->step != s->last && s->step != settings->stop_after;
    if (!*settings->out || s->saving->step == s->step || settings->mode != MODE_TRAIN) return 0;
    Text trainer = {NULL, 0, 0}, plans = {NULL, 0, 0};
    Checkpoints c = session_checkpoints(s, table, params, o);
    LossScale scale = optimizer_loss_scale(o, s->ctx);
    text_printf(&trainer, "{");
    json_put_integer(&trainer, "step", s->step);
    json_put_integer(&trainer, "samples", (int64_t)s->samples);
    json_put_integer(&trainer, "train_data_fingerprint", (int64_t)s->data);
    json_put_integer(&trainer, "step_sequences", s->step_sequences);
    json_put_integer(&trainer, "ranks", s->comm->size);
    json_put_integer(&trainer, "shards", session_shards(s, table, o));
    json_put_integer(&trainer, "updates", scale.updates);
    if (o->rule.kind == LOSS_SCALE_DYNAMIC) {
        json_put_number(&trainer, "loss_scale", (double)scale.scale);
        json_put_integer(&trainer, "loss_scale_good_steps", scale.good);
    }
    if (outliers_are_judged(o->limits)) {
        Outliers outliers = optimizer_outliers(o, s->ctx);
        outliers_put(&trainer, &outliers);
    }
    matmul_plans_text(s->ctx, &plans);
    json_put_string(&trainer, "matmul_plans", plans.text ? plans.text : "");
    json_put_key(&trainer, "settings");
    flags_to_json(&trainer, s->flags, s->flag_count);
    text_printf(&trainer, "}\n");
    int result = saving_begin(s->saving, &c, s->step, config_json, trainer.text, settings->async_checkpoint && goes_on);
    free(trainer.text), free(plans.text);
    return result;
}

// Whether the step that is done now ends with a checkpoint. Looks after the one before it, which may still be in writing;
// all ranks call it once a step.
static inline int session_checkpoint_is_due(const Session* s) {
    saving_poll(s->saving);
    return session_is_due(s, s->settings->checkpoint_every, 0);
}

// Wait until what was saved is written. Returns 0, or -1 after a warning. All ranks call it.
static inline int session_finish_save(const Session* s) { return saving_finish(s->saving); }

// The optimizer left the update of `step` out because the gradients were not finite: say where (in the gradients as they
// are now), and end with STOPPED_BY_NAN unless --on-nan says skip.
static inline void session_report_nan(const Session* s, int64_t step, const TensorTable* table, const real* grads,
                                      double loss, double norm) {
    int stops = s->settings->on_nan == NAN_STOP;
    if (stops) session_finish_save(s);
    if (s->comm->rank > 0) {  // all have the same norm, and rank 0 speaks
        if (stops) comm_exit(s->comm, STOPPED_BY_NAN);
        return;
    }
    HostView view = host_view_open((void*)grads, table->elements, VIEW_REAL);
    host_view_read(s->ctx, &view);
    int first = tensors_first_not_finite(table, view.values);
    host_view_close(&view);
    char* good = s->saving->saved >= 0 ? checkpoint_path(s->out, s->saving->saved) : xprintf("none");
    char* what = xprintf("step %lld: loss %g, gradient norm %g, first in the gradient of %s; the update was left out",
                         (long long)step, plain_nan(loss), plain_nan(norm),
                         first >= 0 ? table->tensors[first].name : "no single tensor (their norm overflowed)");
    if (stops) {
        fflush(stdout);
        fprintf(stderr, "error: %s; the last good checkpoint: %s; --on-nan skip would go on\n", what, good);
    } else {
        warn("%s", what);
    }
    free(good), free(what);
    if (stops) comm_exit(s->comm, STOPPED_BY_NAN);
}

// The run ends after --steps, else after --epochs of `samples` in steps of `step`.
static inline void session_set_last(Session* s, uint64_t samples, int step) {
    const Settings* settings = s->settings;
    int64_t all = (int64_t)(settings->epochs * (double)samples / step);
    s->last = settings->steps > 0 ? settings->steps : all > 0 ? all : 1;
    s->end = settings->stop_after > 0 && settings->stop_after < s->last ? settings->stop_after : s->last;
    settings_check_profile(settings, s->end - s->step);
}

// The learning rates of the run.
static inline Schedule session_schedule(const Session* session) {
    const Settings* s = session->settings;
    Schedule schedule = {(ScheduleKind)s->schedule, s->lr,         s->warmup,   session->last,
                         s->final_fraction,         s->poly_power, s->wsd_decay};
    return schedule;
}

// Say how the run ended, after the last save. Ends with FAILED where the save failed.
static inline void session_end(const Session* s, int failed) {
    const char* saved = failed || !*s->out ? "" : ", saved";
    if (s->stop == SESSION_TIME_IS_UP) printf("stopped by --max-hours after step %lld%s\n", (long long)s->step, saved);
    else if (s->stop) printf("stopped by signal %d after step %lld%s\n", s->stop, (long long)s->step, saved);
    if (failed)
        die(FAILED, "%s: the state after step %lld could not be saved; make room there, then go on with -y 1",
            s->settings->out, (long long)s->step);
}

static inline void session_close(Session* s) {
    if (s->saving) saving_close(s->saving);
    free(s->saving);
    if (s->tokenizer_dir) tokenizer_free(&s->tokenizer);
    free(s->tokenizer_dir), free(s->checkpoint), free(s->started), free(s->matmul_cache), free(s->matmul_plans);
    flags_free(s->flags, s->flag_count);
}

#endif
