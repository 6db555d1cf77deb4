/* Settings of a run: the flags that all trainers share, and what becomes of them when a run is resumed.
 *
 * The settings of the checkpoint win over flags, and a flag that contradicts them is refused, because it would silently
 * make another run of it. */
#ifndef LLMC_SETTINGS_H
#define LLMC_SETTINGS_H

#include "../base/flags.h"
#include "../base/schedule.h"
#include "launch.h"

typedef struct {
    const char *train_data, *val_data, *model, *out;  // the row of `model` is the trainer's
    int resume, override, overwrite, evaluate;
    int B, T;
    int64_t total_batch, steps, stop_after;
    double epochs;
    int optimizer, schedule;
    int64_t warmup;
    double lr, final_fraction, wsd_decay, poly_power;
    double weight_decay, beta1, beta2, eps, clip;
    double loss_outlier, norm_outlier;
    int master_weights, loss_scale, loss_scale_growth;
    double loss_scale_start;
    double dropout;
    int recompute, shuffle, overfit, on_nan;
    int64_t seed;
    int zero, reduce;
    double bucket;
    int start, ranks, rank, ranks_per_machine, server_port;
    const char *server, *rendezvous;
    double timeout, max_hours;
    int val_every, val_batches, checkpoint_every, keep, keep_every, async_checkpoint, on_checkpoint_error;
    int profile, profile_warmup, mode, threads, autotune, gelu_fusion, tf32, attention;
    const char* ceilings;
} Settings;

// Values of choices, in the order of their names.
enum { NAN_STOP, NAN_SKIP };
enum { CHECKPOINT_ERROR_STOP, CHECKPOINT_ERROR_CONTINUE };
enum { SCALE_AUTO, SCALE_OFF, SCALE_FIXED, SCALE_DYNAMIC };
enum { MODE_TRAIN, MODE_BACKWARD, MODE_FORWARD };
#define MODE_CHOICES "train|backward|forward"

static inline const char* settings_mode_name(int mode) {
    return mode == MODE_FORWARD ? "forward" : mode == MODE_BACKWARD ? "forward and backward" : "train";
}

enum { MAX_FLAGS = 96 };

// Flags that belong to a process, not to the run it continues; and flags that may change when a run is resumed.
#define SETTINGS_OF_PROCESS                                                                                            \
    "--output --resume --override --overwrite --evaluate --generate --fill --stop-after --threads --profile "          \
    "--profile-warmup --ceilings --mode --ranks-start --ranks --rank --ranks-per-machine --server --server-port "      \
    "--rendezvous --timeout --max-hours"
#define SETTINGS_FREE_TO_CHANGE                                                                                        \
    "--val-every --val-batches --checkpoint-every --keep --keep-every --on-nan --recompute --zero --reduce "           \
    "--bucket --async-checkpoint --on-checkpoint-error"

// Append rows to a table that has `count`. Returns the new count.
static inline int settings_add_rows(Flag* table, int count, const Flag* rows, size_t added) {
    CHECK((size_t)count + added <= MAX_FLAGS);
    memcpy(table + count, rows, added * sizeof *rows);
    return count + (int)added;
}

// Give a row of the table another default.
static inline void settings_default(Flag* table, int count, const char* long_name, const char* text) {
    Flag* row = flags_find(table, count, long_name, strlen(long_name));
    CHECK(row);
    row->default_text = text;
}

// Append the rows of the shared settings. Returns the new count.
static inline int settings_rows(Settings* s, Flag* table, int count) {
    const double inf = INFINITY;
    // clang-format off
    const Flag rows[] = {
        {"-i",  "--train-data",     FLAG_STRING, &s->train_data,       "",       0, 0, NULL, "token shards to train on, a glob; empty: the built-in corpus", 0},
        {"-j",  "--val-data",       FLAG_STRING, &s->val_data,         "",       0, 0, NULL, "token shards to validate on, a glob; empty: -i with train replaced by val", 0},
        {"-o",  "--output",         FLAG_STRING, &s->out,              "out",    0, 0, NULL, "directory for log, checkpoints and model; empty: write nothing", 0},
        {"-y",  "--resume",         FLAG_INT,    &s->resume,           "0",      0, 1, NULL, "1: go on from the newest whole checkpoint in -o", 0},
        {NULL,  "--override",       FLAG_INT,    &s->override,         "0",      0, 1, NULL, "1: flags that contradict the resumed run win", 0},
        {NULL,  "--overwrite",      FLAG_INT,    &s->overwrite,        "0",      0, 1, NULL, "1: delete an earlier run's checkpoints in -o", 0},
        {"-b",  "--batch",          FLAG_INT,    &s->B,                "4",      1, 65536, NULL, "sequences in a micro-batch on each rank", 0},
        {"-t",  "--seq-len",        FLAG_INT,    &s->T,                "0",      0, 1 << 20, NULL, "tokens in a sequence; 0: all that the model allows", 0},
        {"-d",  "--total-batch",    FLAG_SIZE,   &s->total_batch,      "0",      0, 1e12, NULL, "tokens in an optimizer step over all ranks and micro-batches; 0: one micro-batch a rank", 0},
        {"-x",  "--steps",          FLAG_SIZE,   &s->steps,            "-1",     -1, 1e12, NULL, "optimizer steps; -1: as many as --epochs takes; 0: print settings, tensors and memory plan", 0},
        {NULL,  "--epochs",         FLAG_REAL,   &s->epochs,           "1",      1e-6, 1e6, NULL, "passes over the training data, where --steps is -1", 0},
        {NULL,  "--stop-after",     FLAG_SIZE,   &s->stop_after,       "0",      0, 1e12, NULL, "stop, saved, after this step without changing the schedule; 0: off", 0},
        {NULL,  "--optimizer",      FLAG_CHOICE, &s->optimizer,        "adamw",  0, 0, "adamw|lamb", "rule of the update; lamb scales it tensor by tensor, for very large batches", 0},
        {"-k",  "--schedule",       FLAG_CHOICE, &s->schedule,         "cosine", 0, 0, SCHEDULE_CHOICES, "shape of the learning rate", 0},
        {"-l",  "--lr",             FLAG_REAL,   &s->lr,               "3e-4",   0, inf, NULL, "peak learning rate", 0},
        {"-u",  "--warmup",         FLAG_SIZE,   &s->warmup,           "0",      0, 1e12, NULL, "steps of linear warm-up", 0},
        {"-q",  "--final-lr",       FLAG_REAL,   &s->final_fraction,   "1.0",    0, 1, NULL, "learning rate at the end, as a fraction of the peak", 0},
        {NULL,  "--wsd-decay",      FLAG_REAL,   &s->wsd_decay,        "0.2",    1e-9, 1, NULL, "wsd: fraction of the steps that decay", 0},
        {NULL,  "--poly-power",     FLAG_REAL,   &s->poly_power,       "1.0",    0, inf, NULL, "poly: exponent", 0},
        {"-c",  "--weight-decay",   FLAG_REAL,   &s->weight_decay,     "0.0",    0, inf, NULL, "decay of matrices (never of biases and layernorms)", 0},
        {NULL,  "--beta1",          FLAG_REAL,   &s->beta1,            "0.9",    0, 0.999999, NULL, "decay of the first moment", 0},
        {NULL,  "--beta2",          FLAG_REAL,   &s->beta2,            "0.95",   0, 0.999999, NULL, "decay of the second moment", 0},
        {NULL,  "--eps",            FLAG_REAL,   &s->eps,              "1e-8",   0, 1, NULL, "added to the root of the second moment", 0},
        {NULL,  "--clip",           FLAG_REAL,   &s->clip,             "1.0",    0, inf, NULL, "largest norm of all gradients; 0: no clipping", 0},
        {"-sl", "--loss-outlier",   FLAG_REAL,   &s->loss_outlier,     "0",      0, inf, NULL, "leave an update out where the step's loss is so many standard deviations above those of the 128 steps before; 0: never", 0},
        {"-sg", "--norm-outlier",   FLAG_REAL,   &s->norm_outlier,     "0",      0, inf, NULL, "the same for the norm of the gradients", 0},
        {"-w",  "--master-weights", FLAG_INT,    &s->master_weights,   "1",      0, 1, NULL, "bf16 and fp16 builds: 1 keeps the weights in fp32 too; 0 saves these 4 bytes a weight and rounds stochastically", 0},
        {NULL,  "--loss-scale",     FLAG_CHOICE, &s->loss_scale,       "auto",   0, 0, "auto|off|fixed|dynamic", "factor on the loss that keeps small gradients from vanishing; auto: dynamic in the fp16 build, else off", 0},
        {NULL,  "--loss-scale-start", FLAG_REAL, &s->loss_scale_start, "65536",  1, 3e38, NULL, "fixed: the factor; dynamic: the first one, halved (down to 1) when gradients overflow, which leaves the step out", 0},
        {NULL,  "--loss-scale-growth", FLAG_INT, &s->loss_scale_growth, "2000",  1, 1e9, NULL, "dynamic: steps in a row without overflow after which the factor doubles (up to 2^24)", 0},
        {NULL,  "--dropout",        FLAG_REAL,   &s->dropout,          "-1",     -1, 0.999, NULL, "at all sites; -1: as the model says (0 from scratch)", 0},
        {"-r",  "--recompute",      FLAG_INT,    &s->recompute,        "0",      0, 2, NULL, "in the backward pass, to save memory: 1 GELU, 2 also layernorm", 0},
        {"-a",  "--overfit",        FLAG_INT,    &s->overfit,          "0",      0, 1, NULL, "1: train on the first batch again and again", 0},
        {NULL,  "--shuffle",        FLAG_INT,    &s->shuffle,          "1",      0, 1, NULL, "1: sequences in a new seeded order every epoch; 0: in the order of the files", 0},
        {NULL,  "--seed",           FLAG_SIZE,   &s->seed,             "1337",   0, 9e15, NULL, "of initial weights, data order, dropout and samples", 0},
        {NULL,  "--on-nan",         FLAG_CHOICE, &s->on_nan,           "stop",   0, 0, "stop|skip", "when loss or gradients are not finite (the update is left out in both cases)", 0},
        {"-z",  "--zero",           FLAG_INT,    &s->zero,             "0",      0, 1, NULL, "ranks: 1 gives each a shard of the optimizer's state (ZeRO-1)", 0},
        {NULL,  "--reduce",         FLAG_CHOICE, &s->reduce,           "fp32",   0, 0, "fp32|bf16", "ranks: type in which gradients are summed; bf16 halves what is sent and rounds it, in a copy of what is summed at once", 0},
        {NULL,  "--bucket",         FLAG_REAL,   &s->bucket,           "-1",     -1, 1e6, NULL, "ranks: MiB of gradients that are summed at once while the backward pass goes on, at least; 0: layer by layer; as many as there are: after it; below 0: after it where GPUs are joined by NVLink and gradients take 2 GiB at most, else 16", 0},
        {"-pi", "--ranks-start",    FLAG_CHOICE, &s->start,            "auto",   0, 0, COMM_START_CHOICES, "how ranks find each other: mpirun, the environment (torchrun, Slurm), -ps, or a shared directory -pf", 0},
        {"-pn", "--ranks",          FLAG_INT,    &s->ranks,            "-1",     -1, 65536, NULL, "tcp, fs: processes of the run; -1: from the environment", 0},
        {"-pr", "--rank",           FLAG_INT,    &s->rank,             "-1",     -1, 65535, NULL, "tcp, fs: number of this process from 0; -1: from the environment", 0},
        {"-pg", "--ranks-per-machine", FLAG_INT, &s->ranks_per_machine, "-1",    -1, 1024, NULL, "tcp, fs: processes on each machine; a process takes GPU number rank modulo this; -1: from the environment", 0},
        {"-ps", "--server",         FLAG_STRING, &s->server,           "",       0, 0, NULL, "tcp: name or address of rank 0's machine", 0},
        {NULL,  "--server-port",    FLAG_INT,    &s->server_port,      "0",      0, 65535, NULL, "tcp: port there; 0: 29500", 0},
        {"-pf", "--rendezvous",     FLAG_STRING, &s->rendezvous,       "",       0, 0, NULL, "fs: directory that all ranks see", 0},
        {NULL,  "--timeout",        FLAG_REAL,   &s->timeout,          "60",     1, 86400, NULL, "ranks: seconds, more than a step takes, after which one that does not answer, or that the others wait for, ends the run with status 4", 0},
        {NULL,  "--max-hours",      FLAG_REAL,   &s->max_hours,        "0",      0, 1e6, NULL, "stop, saved, after so many hours; 0: never", 0},
        {"-v",  "--val-every",      FLAG_INT,    &s->val_every,        "100",    0, 1e9, NULL, "steps between validations; 0: never", 0},
        {"-m",  "--val-batches",    FLAG_INT,    &s->val_batches,      "20",     0, 1e9, NULL, "micro-batches of a validation at most; 0: all", 0},
        {"-n",  "--checkpoint-every", FLAG_INT,  &s->checkpoint_every, "500",    0, 1e9, NULL, "steps between checkpoints; 0: only one, at the end", 0},
        {"-nk", "--keep",           FLAG_INT,    &s->keep,             "2",      0, 1e9, NULL, "newest checkpoints that are kept; 0: all", 0},
        {"-nm", "--keep-every",     FLAG_INT,    &s->keep_every,       "0",      0, 1e9, NULL, "checkpoints at multiples of this are kept for good; 0: none", 0},
        {NULL,  "--async-checkpoint", FLAG_INT,  &s->async_checkpoint, "1",      0, 1, NULL, "1: checkpoints are written beside the steps, from a copy in the host's memory; 0: the steps wait", 0},
        {NULL,  "--on-checkpoint-error", FLAG_CHOICE, &s->on_checkpoint_error, "continue", 0, 0, "stop|continue", "when a checkpoint cannot be written; the ones before it stay in both cases", 0},
        {NULL,  "--evaluate",       FLAG_INT,    &s->evaluate,         "0",      0, 1, NULL, "1: print the validation loss of -e (or of -o with -y 1) and end", 0},
        {NULL,  "--profile",        FLAG_INT,    &s->profile,          "0",      0, 1000, NULL, "explain where the time of a step goes, from so many of them: OUT/profile", 0},
        {NULL,  "--profile-warmup", FLAG_INT,    &s->profile_warmup,   "5",      0, 1e6, NULL, "steps before; then come as many plain steps as profiled ones, for comparison, then these", 0},
        {NULL,  "--ceilings",       FLAG_STRING, &s->ceilings,         "measure", 0, 0, NULL, "of the profile: measure, or a file of measured ones, such as another profile's summary.json", 0},
        {NULL,  "--mode",           FLAG_CHOICE, &s->mode,             "train",  0, 0, MODE_CHOICES, "how far a profiled step goes; short of train nothing is trained or saved", 0},
        {NULL,  "--autotune",       FLAG_INT,    &s->autotune,         "1",      0, 1, NULL, "GPU: 1 times the candidates of each large matmul once and keeps the choice in -o", 0},
        {"-ge", "--gelu-fusion",    FLAG_INT,    &s->gelu_fusion,      "2",      0, 2, NULL, "GPU: GELU inside the matmul: 0 never, 1 forward, 2 also backward where it is faster", 0},
        {"-f",  "--tf32",           FLAG_INT,    &s->tf32,             "0",      0, 1, NULL, "GPU, fp32 build: 1 lets matmuls and explicit attention round their inputs to TF32", 0},
        {NULL,  "--attention",      FLAG_CHOICE, &s->attention,        "flash",  0, 0, "flash|explicit", "GPU: flash keeps scores on the chip (bf16 and fp16, heads of 8, 16, .. 128 channels; else explicit); explicit goes step by step", 0},
        {NULL,  "--threads",        FLAG_INT,    &s->threads,          "0",      0, 4096, NULL, "CPU threads; 0: all. The results do not depend on it", 0},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

// A run with `left` steps to go can be profiled as asked for, or is refused.
static inline void settings_check_profile(const Settings* s, int64_t left) {
    int64_t needs = (int64_t)s->profile_warmup + 2 * (int64_t)s->profile;
    if (s->profile && !s->evaluate && left < needs)
        die(USAGE,
            "--profile %d needs %lld steps (--profile-warmup %d, then as many plain ones as profiled ones), but %lld "
            "are left: raise -x",
            s->profile, (long long)needs, s->profile_warmup, (long long)left);
}

// ---------------------------------------------------------------------------------------------------------
// Resuming

// Does `name` (a long name) occur in the list, "--a --b --c"?
static inline int settings_listed(const char* list, const char* name) {
    size_t n = strlen(name);
    for (const char* p = strstr(list, name); p; p = strstr(p + 1, name))
        if ((p == list || p[-1] == ' ') && (p[n] == ' ' || p[n] == '\0')) return 1;
    return 0;
}

// Take the saved `settings` (an object as flags_to_json() writes it) into the rows. Flags of the list `of_process` belong
// to this process alone and are left as they are; those of `free` may be given anew; all others must not contradict
// what was saved unless `override` is set.
static inline void settings_restore(Flag* rows, int count, const JsonNode* settings, const char* of_process,
                                    const char* free_to_change, int override, const char* file) {
    for (int i = 0; i < count; i++) {
        const JsonNode* saved = json_get(settings, rows[i].long_name + 2);
        char was[FLAG_TEXT_SIZE], is[FLAG_TEXT_SIZE], error[FLAG_ERROR_SIZE];
        if (!saved || settings_listed(of_process, rows[i].long_name)) continue;
        if (!saved->string) die(USAGE, "%s: key \"%s\": is not a setting's value", file, rows[i].long_name + 2);
        if (rows[i].is_set) {
            // Compared as the same flag would print them: 1e-3 and 0.001 are no contradiction.
            Flag copy = rows[i];
            double number;
            int index;
            int64_t size;
            const char* string = NULL;
            copy.value = copy.type == FLAG_REAL     ? (void*)&number
                         : copy.type == FLAG_STRING ? (void*)&string
                         : copy.type == FLAG_SIZE   ? (void*)&size
                                                    : (void*)&index;
            if (flags_assign(&copy, saved->string, error) != 0) die(USAGE, "%s: %s", file, error);
            flags_format_value(&copy, was, sizeof was);
            flags_format_value(&rows[i], is, sizeof is);
            const char* was_text = copy.type == FLAG_STRING ? string : was;
            const char* is_text = copy.type == FLAG_STRING ? *(const char* const*)rows[i].value : is;
            if (strcmp(was_text, is_text) != 0 && !override && !settings_listed(free_to_change, rows[i].long_name))
                die(USAGE, "%s %s contradicts the run that is resumed (%s has %s); leave it out, or add --override 1",
                    rows[i].long_name, is_text, file, was_text);
            continue;
        }
        if (flags_set(&rows[i], saved->string, error) != 0) die(USAGE, "%s: %s", file, error);
    }
}

#endif
