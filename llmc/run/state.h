/* The state of a run. run.h has the order of calls. */
#ifndef LLMC_RUN_STATE_H
#define LLMC_RUN_STATE_H

#include <signal.h>

#include "llmc/average/room.h"
#include "llmc/base/log.h"
#include "llmc/base/run_lock.h"
#include "llmc/device/copies.h"
#include "llmc/graph/room.h"
#include "llmc/model/tokenizer_files.h"
#include "llmc/ops/matmul/matmul.h"
#include "llmc/optim/model_buffers.h"
#include "llmc/profile/room.h"
#include "llmc/run/settings.h"
#include "llmc/text/room.h"

enum { STEP_LOSSES = 2, LOCK_IS_LOST = -1 };

// A step's work, over all ranks, and the losses whose sum it minimises.
typedef struct {
    int consumed;  // sequences by which the position in the data advances
    double sequences, tokens, flops;
    real* losses[STEP_LOSSES];            // [1] each, on the device; NULL: no more
    const char* loss_names[STEP_LOSSES];  // in log.jsonl, if there are several
} StepWork;

// A launched step whose results are not read yet.
typedef struct {
    int64_t step;  // its number, from 1
    double lr;
    StepWork work;
    Readback result;  // gradient norm, loss scale of the gradients, losses, whether the update was skipped
} LaunchedStep;

// The validation with the lowest loss so far, for --keep-best. Those before the first step do not count.
typedef struct {
    double loss;     // the lowest
    int64_t step;    // its step; 0: none yet
    int64_t judged;  // the newest step that was counted: a validation repeated after a resume does not count twice
} Best;

// What a checkpoint keeps besides weights, moments and settings.
typedef struct {
    int64_t step, samples, data, step_sequences, ranks, shards;  // samples: sequences; data: its fingerprint
    LossScale scale;                                             // scale 0: not dynamic
    Outliers outliers;
    int has_outliers;
    Best best;
    char *fp8, *matmul_plans;  // texts of the fp8 scales and of the matmul algorithms; NULL: none
} SavedState;

static inline void state_free(SavedState* s) { free(s->fp8), free(s->matmul_plans); }

typedef struct Run Run;

// Work that is due every `every` steps (0: never), and after the run's last step. All ranks do it.
typedef struct {
    int every;
    void (*work)(Run* r);  // r is the first member of the program's Trainer
    const char*
        result;      // its key in log.jsonl: a process that starts does the work if the log lacks it; NULL: not then
    int of_average;  // 1: with the average of the weights (--ema) in the place of the weights, if there is one
} DueWork;

struct Run {
    Settings settings;
    Flag flags[MAX_FLAGS];
    int flag_count;
    int skips_recipe;  // the recipe is not read: -o holds checkpoints to resume, which may still be damaged
    Context ctx;
    ProcessGroup group;
    const char* out;                                     // the run's directory; "": write nothing, as on ranks > 0
    RunLock lock;                                        // of `out`
    int earlier;                                         // checkpoints in `out` when the run looked for them
    char *train_pattern, *val_pattern, *data_directory;  // of the data; NULL: none
    char* checkpoint;                                    // directory of the one that the run resumes; NULL: a new run
    char* start;                                         // `checkpoint`, or that of another run to start from; or NULL
    char* hub;                                           // directory of -e hub:NAME; NULL: -e names something else
    const char* source;                                  // `start`, or `hub`, or -e
    char *directory, *weights;                           // of the model in `source`; NULL: none
    Text config;                                         // the model's config.json
    Tokenizer tokenizer;
    TokenizerFiles tokenizer_files;
    int has_val, val_every;  // val_every: steps between validations; 0: none
    GradSync grad_sync;
    MemoryPlan plan;
    ModelBuffers* buffers;
    Optimizer optimizer;
    Schedule schedule;
    Log log;
    struct CheckpointWriter* writer;  // from run_begin() on

    int64_t step;            // optimizer steps done
    uint64_t consumed;       // sequences trained on: the position in the data
    int64_t step_sequences;  // sequences in a step, over all ranks; 0: not known yet
    int micro_steps;         // micro-batches of a step on this rank
    double lr;               // of the current step
    StepWork work;           // likewise
    Direction direction;     // of its last pass: FORWARD if --mode excludes the backward pass
    uint32_t data;           // fingerprint of the training data; until run_check_data() the checkpoint's
    int64_t last;            // last step of the run
    int64_t end;             // last step of this process: --stop-after, or the run's last
    int stop;                // why it stops earlier: a signal's number, or LOCK_IS_LOST; 0: it does not
    LaunchedStep launched[READBACK_LAG + 2];  // steps in flight, and the previous one, whose end is their start
    int64_t finished;                         // steps whose results are read
    Readback clock;                           // without values: only a time, between steps
    const Readback* step_start;               // its end is the start of the next step to finish
    StepGraph graph;
    double peak_flops;     // of the hardware of all ranks, per second
    int peak_is_measured;  // 1: this device is not in the table of data-sheet peaks
    Profiler profiler;
    EnergyMeter energy;  // on rank 0, which writes the log, and on all ranks with --profile-energy
    NvtxRanges ranges;
    SavedState restored;  // the checkpoint's
    int shares_plans;     // all ranks use the matmul algorithms that rank 0 chose
    Best best;
    WeightAverage average;
    const DueWork* due;  // [due_count] in the order in which it is done
    int due_count;
    int save_failed;  // the last checkpoint
};

// ---------------------------------------------------------------------------------------------------------
// The run's directory

// Lock OUT for this run, unless it is already locked.
static inline void run_lock(Run* r, int create) {
    if (*r->out && !r->lock.path) run_lock_take(&r->lock, r->out, create);
}

// End the run if another run has locked OUT. All ranks call it.
static inline void run_check_lock(Run* r) {
    if (group_any(&r->group, run_lock_check(&r->lock) != 0))
        group_die(&r->group, FAILED, RUN_LOCK_LOST, r->settings.out);
}

// Resuming with other training data than the checkpoint's is an error, except for an evaluation.
static inline void run_check_data(Run* r, uint32_t fingerprint, const char* pattern) {
    if (r->checkpoint && !r->settings.override && !r->settings.evaluate && r->data != fingerprint)
        die(USAGE, "%s: is not the data that %s was trained on; restore it, or add --override 1", pattern,
            r->checkpoint);
    r->data = fingerprint;
}

#endif
