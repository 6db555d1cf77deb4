/* Settings of a run: the flags that all trainers share. checkpoint/state.h restores them. */
#ifndef LLMC_RUN_SETTINGS_H
#define LLMC_RUN_SETTINGS_H

#include "llmc/base/flags.h"
#include "llmc/base/schedule.h"
#include "llmc/optim/optimizer.h"

typedef struct {
    const char *train_data, *val_data, *model, *out, *recipe;
    int resume, override, overwrite, evaluate;
    int B, T;
    int64_t total_batch, steps, stop_after;
    double epochs;
    int optimizer, schedule;
    int64_t warmup;
    double lr, final_fraction, poly_power;
    double weight_decay, beta1, beta2, eps, clip;
    int cautious_decay;
    double adamw_lr;
    int64_t muon_warmup;
    int keep_best, sample_every, sample_tokens, doc_mask;
    int64_t ema_start, fp8_steps;
    double ema;
    double loss_outlier, norm_outlier;
    int master_weights;
    double loss_scale;
    double dropout;
    int init, recompute, fp8, shuffle, overfit, on_nan;
    const char* fp8_exclude_forward;
    int64_t seed;
    int zero;
    double bucket;
    double timeout;
    int val_every, val_batches, checkpoint_every, keep, keep_every;
    int profile, profile_warmup, profile_energy, passes, threads, autotune, graph, tf32;
} Settings;

// Values of choices, in the order of their names.
enum { NAN_STOP, NAN_SKIP };
enum { INIT_BY_CONFIG, INIT_ZERO_OUT };
enum { PASSES_TRAIN, PASSES_BACKWARD, PASSES_FORWARD };
#define PASSES_CHOICES "train|backward|forward"

static inline const char* settings_passes_name(int passes) {
    return passes == PASSES_FORWARD ? "forward" : passes == PASSES_BACKWARD ? "forward and backward" : "train";
}

enum { MAX_FLAGS = 128 };

// Append rows to a table that has `count`. Returns the new count.
static inline int settings_add_rows(Flag* table, int count, const Flag* rows, size_t added) {
    CHECK((size_t)count + added <= MAX_FLAGS);
    memcpy(table + count, rows, added * sizeof *rows);
    return count + (int)added;
}

static inline Flag* settings_find(Flag* table, int count, const char* long_name) {
    Flag* row = flags_find(table, count, long_name, strlen(long_name));
    CHECK(row);
    return row;
}

// Replace the default of a row.
static inline void settings_default(Flag* table, int count, const char* long_name, const char* text) {
    settings_find(table, count, long_name)->default_text = text;
}

// Replace the help of a row.
static inline void settings_help(Flag* table, int count, const char* long_name, const char* text) {
    settings_find(table, count, long_name)->help = text;
}

// The rows for training: data, run, batch and optimization.
static inline int settings_training_rows(Settings* s, Flag* table, int count) {
    const double inf = INFINITY;
    // clang-format off
    const Flag rows[] = {
        {"-i",  "--train-data",          FLAG_STRING, &s->train_data,          "",        0,   0,        NULL,   SCOPE_RUN,     TOPIC_DATA,
         "Training data: path or glob of token shards. Empty: the built-in corpus."},
        {"-j",  "--val-data",            FLAG_STRING, &s->val_data,            "",        0,   0,        NULL,   SCOPE_RUN,     TOPIC_DATA,
         "Validation data: path or glob. Empty: -i with train replaced by val."},
        {NULL,  "--shuffle",             FLAG_INT,    &s->shuffle,             "1",       0,   1,        NULL,   SCOPE_RUN,     TOPIC_DATA,
         "1: shuffle the sequences each epoch, by --seed; 0: keep the order of the files."},
        {"-a",  "--overfit",             FLAG_INT,    &s->overfit,             "0",       0,   1,        NULL,   SCOPE_RUN,     TOPIC_DATA,
         "1: train on the first batch in every step."},
        {"-o",  "--output",              FLAG_STRING, &s->out,                 "out",     0,   0,        NULL,   SCOPE_PROCESS, TOPIC_RUN,
         "Directory for the log, checkpoints and the model. Empty: write nothing."},
        {NULL,  "--recipe",              FLAG_STRING, &s->recipe,              "",        0,   0,        NULL,   SCOPE_RUN,     TOPIC_RUN,
         "File of flags, or the name of one in scripts/recipes. The command line overrides it. A resumed run "
         "does not read it."},
        {"-y",  "--resume",              FLAG_INT,    &s->resume,              "0",       0,   1,        NULL,   SCOPE_PROCESS, TOPIC_RUN,
         "1: resume from the newest complete checkpoint in -o; start a new run if there is none."},
        {NULL,  "--override",            FLAG_INT,    &s->override,            "0",       0,   1,        NULL,   SCOPE_PROCESS, TOPIC_RUN,
         "1: flags override the settings of the resumed run."},
        {NULL,  "--overwrite",           FLAG_INT,    &s->overwrite,           "0",       0,   1,        NULL,   SCOPE_PROCESS, TOPIC_RUN,
         "1: delete an earlier run's checkpoints in -o."},
        {"-x",  "--steps",               FLAG_SIZE,   &s->steps,               "-1",      -1,  1e12,     NULL,   SCOPE_RUN,     TOPIC_RUN,
         "Optimizer steps. -1: from --epochs; 0: print settings, tensors and memory plan, then exit."},
        {NULL,  "--epochs",              FLAG_REAL,   &s->epochs,              "1",       1e-6, 1e6,     NULL,   SCOPE_RUN,     TOPIC_RUN,
         "Passes over the training data if --steps is -1."},
        {NULL,  "--stop-after",          FLAG_SIZE,   &s->stop_after,          "0",       0,   1e12,     NULL,   SCOPE_PROCESS, TOPIC_RUN,
         "Save and stop after this step. The learning-rate schedule still spans all steps. 0: off."},
        {NULL,  "--on-nan",              FLAG_CHOICE, &s->on_nan,              "stop",    0,   0,        "stop|skip", SCOPE_FREE, TOPIC_RUN,
         "What to do if the loss or the gradients are not finite. Both skip the update."},
        {NULL,  "--seed",                FLAG_SIZE,   &s->seed,                "1337",    0,   9e15,     NULL,   SCOPE_RUN,     TOPIC_RUN,
         "Seed of the initial weights, the data order, dropout and samples."},
        {NULL,  "--init",                FLAG_CHOICE, &s->init,                "config",  0,   0,        "config|zero-out", SCOPE_RUN, TOPIC_RUN,
         "Initial weights of a new model. config: random, by the config's initializer_range; zero-out: the same, but "
         "the output projections of attention and MLP start at zero."},
        {"-b",  "--batch",               FLAG_INT,    &s->B,                   "4",       1,   65536,    NULL,   SCOPE_RUN,     TOPIC_BATCH,
         "Sequences per micro-batch on each rank."},
        {"-t",  "--seq-len",             FLAG_INT,    &s->T,                   "0",       0,   1 << 20,  NULL,   SCOPE_RUN,     TOPIC_BATCH,
         "Tokens per sequence. 0: the model's maximum."},
        {"-d",  "--total-batch",         FLAG_SIZE,   &s->total_batch,         "0",       0,   1e12,     NULL,   SCOPE_RUN,     TOPIC_BATCH,
         "Tokens per optimizer step, over all ranks and micro-batches. 0: one micro-batch per rank."},
        {"-r",  "--recompute",           FLAG_INT,    &s->recompute,           "0",       0,   2,        NULL,   SCOPE_FREE,    TOPIC_BATCH,
         "Recompute in the backward pass, to save memory. 1: GELU; 2: also layernorm."},
        {NULL,  "--fp8",                 FLAG_INT,    &s->fp8,                 "0",       0,   1,        NULL,   SCOPE_RUN,     TOPIC_BATCH,
         "1: matmuls in fp8, those of the layers and of GPT-2's output matrix. Needs the bf16 build and sm_89 or later; "
         "the CPU build emulates the rounding."},
        {NULL,  "--fp8-steps",           FLAG_SIZE,   &s->fp8_steps,           "0",       0,   1e12,     NULL,   SCOPE_RUN,     TOPIC_BATCH,
         "With --fp8: the number of first steps in fp8; after them, matmuls use the build's own type. 0: all steps."},
        {NULL,  "--fp8-exclude-forward", FLAG_STRING, &s->fp8_exclude_forward, "",        0,   0,        NULL,   SCOPE_RUN,     TOPIC_BATCH,
         "With --fp8: layers whose forward matmul stays in the build's own type: parts of their weights' names, "
         "separated by commas, such as attn.c_attn. BERT's query, key and value are one layer."},
        {"-w",  "--master-weights",      FLAG_INT,    &s->master_weights,      "1",       0,   1,        NULL,   SCOPE_RUN,     TOPIC_BATCH,
         "bf16 and fp16 builds: 1 also keeps the weights in fp32; 0 saves these 4 bytes per weight and rounds "
         "updates stochastically."},
        {NULL,  "--optimizer",           FLAG_CHOICE, &s->optimizer,           "adamw",   0,   0,        "adamw|lamb|muon|normuon", SCOPE_RUN, TOPIC_OPTIMIZATION,
         "Update rule. lamb scales the update of each tensor, for very large batches. muon orthogonalizes the momentum of "
         "the layers' matrices; adamw updates the rest. normuon is muon with normalized rows."},
        {"-k",  "--schedule",            FLAG_CHOICE, &s->schedule,            "cosine",  0,   0,        SCHEDULE_CHOICES, SCOPE_RUN, TOPIC_OPTIMIZATION,
         "Learning rate after the warmup. wsd: constant, then decaying in the last fifth of the steps; poly: a power "
         "of the fraction of steps left."},
        {"-l",  "--lr",                  FLAG_REAL,   &s->lr,                  "3e-4",    0,   inf,      NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "Peak learning rate."},
        {"-u",  "--warmup",              FLAG_SIZE,   &s->warmup,              "0",       0,   1e12,     NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "Steps of linear warmup."},
        {"-q",  "--final-lr",            FLAG_REAL,   &s->final_fraction,      "1.0",     0,   1,        NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "Final learning rate, as a fraction of the peak."},
        {NULL,  "--poly-power",          FLAG_REAL,   &s->poly_power,          "1.0",     0,   inf,      NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "poly: exponent."},
        {"-c",  "--weight-decay",        FLAG_REAL,   &s->weight_decay,        "0.0",     0,   inf,      NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "Weight decay of matrices; biases and layernorms have none."},
        {NULL,  "--beta1",               FLAG_REAL,   &s->beta1,               "0.9",     0,   0.999999, NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "Decay of the first moment."},
        {NULL,  "--beta2",               FLAG_REAL,   &s->beta2,               "0.95",    0,   0.999999, NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "Decay of the second moment."},
        {NULL,  "--eps",                 FLAG_REAL,   &s->eps,                 "1e-8",    1.17549435e-38, 1, NULL, SCOPE_RUN,   TOPIC_OPTIMIZATION,
         "Added to the square root of the second moment. The minimum is the smallest normal float: with less, "
         "elements that never had a gradient would become 0/0."},
        {NULL,  "--clip",                FLAG_REAL,   &s->clip,                "1.0",     0,   inf,      NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "Maximum norm of all gradients. 0: no clipping."},
        {NULL,  "--adamw-lr",            FLAG_REAL,   &s->adamw_lr,            "0",       0,   inf,      NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "Peak learning rate of what Muon leaves to AdamW: embeddings, biases and layernorms. 0: same as -l."},
        {NULL,  "--cautious-decay",      FLAG_INT,    &s->cautious_decay,      "0",       0,   1,        NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "1: decay a weight only in steps that move it towards zero."},
        {NULL,  "--muon-warmup",         FLAG_SIZE,   &s->muon_warmup,         "0",       0,   1e12,     NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "muon, normuon: steps over which the momentum rises from 0.85."},
        {NULL,  "--dropout",             FLAG_REAL,   &s->dropout,             "-1",      -1,  0.999,    NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "Dropout probability, everywhere. -1: from the model's config (from scratch: 0)."},
        {"-sl", "--loss-outlier",        FLAG_REAL,   &s->loss_outlier,        "0",       0,   inf,      NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "Skip the update if the loss is this many standard deviations above the mean of the last 128 steps. 0: never."},
        {"-sg", "--norm-outlier",        FLAG_REAL,   &s->norm_outlier,        "0",       0,   inf,      NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "The same for the gradient norm."},
        {NULL,  "--loss-scale",          FLAG_REAL,   &s->loss_scale,          "-1",      -1,  3e38,     NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "Initial factor on the loss, which keeps small gradients from underflowing; an overflow halves it (down to 1) and "
         "skips the update. 0: none; -1: 65536 in the fp16 build, else none."},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

// The rows for everything else: validation, checkpoints, ranks, profile and device.
static inline int settings_running_rows(Settings* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {"-v",  "--val-every",           FLAG_INT,    &s->val_every,           "100",     0,   1e9,      NULL,   SCOPE_FREE,    TOPIC_VALIDATION,
         "Steps between validations. 0: never."},
        {"-m",  "--val-batches",         FLAG_INT,    &s->val_batches,         "20",      0,   1e9,      NULL,   SCOPE_FREE,    TOPIC_VALIDATION,
         "Maximum micro-batches per validation. 0: all."},
        {"-n",  "--checkpoint-every",    FLAG_INT,    &s->checkpoint_every,    "500",     0,   1e9,      NULL,   SCOPE_FREE,    TOPIC_CHECKPOINTS,
         "Steps between checkpoints. 0: only one, at the end."},
        {"-nk", "--keep",                FLAG_INT,    &s->keep,                "2",       0,   1e9,      NULL,   SCOPE_FREE,    TOPIC_CHECKPOINTS,
         "Number of newest checkpoints to keep. 0: all."},
        {"-nm", "--keep-every",          FLAG_INT,    &s->keep_every,          "0",       0,   1e9,      NULL,   SCOPE_FREE,    TOPIC_CHECKPOINTS,
         "Never delete checkpoints at multiples of this step. 0: no such steps."},
        {"-z",  "--zero",                FLAG_INT,    &s->zero,                "0",       0,   1,        NULL,   SCOPE_FREE,    TOPIC_RANKS,
         "1: each rank holds one shard of the optimizer state (ZeRO-1)."},
        {NULL,  "--bucket",              FLAG_REAL,   &s->bucket,              "-1",      -1,  1e6,      NULL,   SCOPE_FREE,    TOPIC_RANKS,
         "Gradient bucket size in MiB. 0: one per layer; larger than the model: one all-reduce after the backward "
         "pass; -1: automatic (NVLink and at most 2 GiB of gradients: one all-reduce; else 16)."},
        {NULL,  "--timeout",             FLAG_REAL,   &s->timeout,             "600",     1,   86400,    NULL,   SCOPE_RANK,    TOPIC_RANKS,
         "Several ranks: seconds that a step may take; then the run ends with status 4, because a rank is lost."},
        {NULL,  "--profile",             FLAG_INT,    &s->profile,             "0",       0,   1000,     NULL,   SCOPE_PROCESS, TOPIC_PROFILE,
         "Profile this many steps and report where their time goes, in OUT/profile. 0: off."},
        {NULL,  "--profile-warmup",      FLAG_INT,    &s->profile_warmup,      "5",       0,   1e6,      NULL,   SCOPE_PROCESS, TOPIC_PROFILE,
         "Warm-up steps. Then --profile steps are timed without the profiler, and as many are profiled."},
        {NULL,  "--profile-energy",      FLAG_INT,    &s->profile_energy,      "0",       0,   1,        NULL,   SCOPE_PROCESS, TOPIC_PROFILE,
         "GPU: 1 captures one more step, the run's last, and then measures the energy of each op alone. Needs -v 0."},
        {NULL,  "--mode",                FLAG_CHOICE, &s->passes,              "train",   0,   0,        PASSES_CHOICES, SCOPE_PROCESS, TOPIC_PROFILE,
         "Part of a step to profile. forward and backward neither train nor save."},
        {NULL,  "--autotune",            FLAG_INT,    &s->autotune,            "1",       0,   1,        NULL,   SCOPE_RUN,     TOPIC_DEVICE,
         "GPU: 1 times candidate algorithms for each large matmul once; checkpoints hold the choices."},
        {NULL,  "--graph",               FLAG_INT,    &s->graph,               "0",       0,   1,        NULL,   SCOPE_FREE,    TOPIC_DEVICE,
         "GPU: 1 launches each step as a CUDA graph, which helps steps of a few milliseconds; results are bitwise equal."},
        {"-f",  "--tf32",                FLAG_INT,    &s->tf32,                "0",       0,   1,        NULL,   SCOPE_RUN,     TOPIC_DEVICE,
         "GPU, fp32 build: 1 lets matmuls and materialized attention round their inputs to TF32."},
        {NULL,  "--threads",             FLAG_INT,    &s->threads,             "0",       0,   4096,     NULL,   SCOPE_RANK,    TOPIC_DEVICE,
         "CPU threads. 0: all. Results do not depend on it."},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

// Begin a table with the rows of the shared settings. `model_help`: help of -e. Returns their count.
static inline int settings_rows(Settings* s, Flag* table, const char* model_help) {
    const Flag row = {"-e", "--model", FLAG_STRING, &s->model, "", 0, 0, NULL, SCOPE_RUN, TOPIC_MODEL, model_help};
    int count = settings_running_rows(s, table, settings_training_rows(s, table, 0));
    return settings_add_rows(table, count, &row, 1);
}

// Begin a table with the rows of language models: the shared settings, and those that need a validation loss.
static inline int settings_language_rows(Settings* s, Flag* table, const char* model_help) {
    // clang-format off
    const Flag rows[] = {
        {NULL,  "--ema",                 FLAG_REAL,   &s->ema,                 "0",       0,   1,        NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "Decay of an average of the weights, which is also validated and saved in OUT/ema. 1: plain mean; 0: off."},
        {NULL,  "--ema-start",           FLAG_SIZE,   &s->ema_start,           "1",       1,   1e12,     NULL,   SCOPE_RUN,     TOPIC_OPTIMIZATION,
         "--ema: first step to include in the average."},
        {"-s",  "--sample-every",        FLAG_INT,    &s->sample_every,        "500",     0,   1e9,      NULL,   SCOPE_FREE,    TOPIC_SAMPLES,
         "Steps between samples, and one at the end: GPT-2's text, BERT's masks filled in. 0: never."},
        {NULL,  "--keep-best",           FLAG_INT,    &s->keep_best,           "0",       0,   1,        NULL,   SCOPE_FREE,    TOPIC_CHECKPOINTS,
         "1: save a checkpoint at each new lowest validation loss, and keep the one with the lowest."},
    };
    // clang-format on
    return settings_add_rows(table, settings_rows(s, table, model_help), rows, COUNT_OF(rows));
}

// Append the row of --evaluate, for programs that score a model without training it. Returns the new count.
static inline int settings_evaluate_row(Settings* s, Flag* table, int count) {
    // clang-format off
    const Flag row = {NULL, "--evaluate", FLAG_INT, &s->evaluate, "0", 0, 1, NULL, SCOPE_PROCESS, TOPIC_VALIDATION,
                      "1: print the validation loss of -e (or of -o with -y 1) and exit."};
    // clang-format on
    return settings_add_rows(table, count, &row, 1);
}

// Refuse flags that contradict each other.
static inline void settings_check(const Settings* s) {
    if (s->resume && s->overwrite)
        die(USAGE, "-y 1 and --overwrite 1: one resumes the run in -o, the other deletes it; leave one out");
    if (s->resume && !*s->out)
        die(USAGE, "-y 1 and -o '': there is nothing to resume; name the run's directory with -o");
    if (s->passes != PASSES_TRAIN && !s->profile)
        die(USAGE, "--mode other than train needs --profile: such a run trains nothing");
    if (!s->profile && s->profile_energy) die(USAGE, "--profile-energy 1: needs --profile");
    if (s->optimizer == LAMB && s->cautious_decay)
        die(USAGE, "--cautious-decay 1 does not combine with --optimizer lamb, whose update includes the decay");
    if (s->optimizer == LAMB && s->adamw_lr > 0)
        die(USAGE, "--adamw-lr does not combine with --optimizer lamb, which scales each tensor");
    if (s->lr == 0 && s->adamw_lr > 0) die(USAGE, "-l 0 does not combine with --adamw-lr, which follows its schedule");
    if (s->loss_scale != -1 && s->loss_scale != 0 && s->loss_scale < 1)
        die(USAGE, "--loss-scale %g: is below 1; allowed: 0 (none), -1 (automatic), or a factor from 1 on",
            s->loss_scale);
    if (s->override && !s->resume)
        die(USAGE, "--override 1 without -y 1: it applies to a resumed run; add -y 1 or leave it out");
}

// Refuse an average of the weights that begins with the run's `last` step or later: it would hold those weights alone,
// or none.
static inline void settings_check_average(const Settings* s, int64_t last) {
    if (s->ema > 0 && !s->evaluate && s->ema_start > 1 && s->ema_start >= last)
        die(USAGE, "--ema-start %lld leaves nothing to average: the run ends after step %lld; lower it, or raise -x",
            (long long)s->ema_start, (long long)last);
}

// Refuse --profile if the `left` steps of the run are too few for it.
static inline void settings_check_profile(const Settings* s, int64_t left) {
    int64_t needs = (int64_t)s->profile_warmup + 2 * (int64_t)s->profile + s->profile_energy;
    if (s->profile_energy && !s->evaluate && s->val_every)
        die(USAGE, "--profile-energy 1 needs -v 0: a validation replaces the data of the step that it repeats");
    if (s->profile_energy && !s->evaluate && left != needs)
        die(USAGE,
            "--profile-energy 1 needs a run that ends with the step after the profiled ones: %lld steps, but %lld are "
            "left; change -x",
            (long long)needs, (long long)left);
    if (s->profile && !s->evaluate && left < needs)
        die(USAGE,
            "--profile %d needs %lld steps (--profile-warmup %d, then as many plain ones as profiled ones), but %lld "
            "are left: raise -x",
            s->profile, (long long)needs, s->profile_warmup, (long long)left);
}

#endif
