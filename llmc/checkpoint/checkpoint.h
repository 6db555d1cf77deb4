/* Checkpoints: complete or absent, even if the process is killed, and verified before they are used.
 *
 *   OUT/ckpt/00000120/   config.json, model.safetensors, tokenizer files, README.md: a Hugging Face directory
 *                        optimizer.safetensors: the moments, and the master weights if there are any; with ZeRO-1,
 *                        each rank writes its shard, optimizer-00002-of-00004.safetensors (counted from 0)
 *                        trainer.json: step, position in the data, settings
 *                        manifest.json: size and CRC-32 of every other file, and of itself
 *   OUT/                 the newest model: copies of the same files, which users may edit
 *
 * A checkpoint is written as 00000120.tmp. Every file and the directory are flushed, then it is renamed: the rename is
 * the commit. Older checkpoints are deleted only after that. If a resumed run finds a damaged checkpoint, it keeps it
 * for its owner as 00000120.damaged. Any number of ranks can resume from either kind of optimizer files. All ranks share
 * one file system.
 *
 * This file: the contents of a checkpoint. directory.h: its manifest, and the directories of OUT. resume.h: find, verify
 * and load. writer.h: save, by all ranks together, while the run continues. */
#ifndef LLMC_CHECKPOINT_CHECKPOINT_H
#define LLMC_CHECKPOINT_CHECKPOINT_H

#include "llmc/base/run_lock.h"
#include "llmc/checkpoint/shard_files.h"
#include "llmc/dist/process_group.h"
#include "llmc/optim/fp32_copies.h"
#include "llmc/text/tokenizer.h"

enum { CHECKPOINT_NAME = 64, CHECKPOINT_WHY = 1024 };

// The model card. In OUT it replaces only a file that has this line; any other README is the user's own.
#define CHECKPOINT_CARD "README.md"
#define CHECKPOINT_CARD_MARKER "<!-- Written with each checkpoint. Delete this line to keep a card of your own. -->"

// A run's checkpoints: where they are, what they hold and which are kept.
typedef struct {
    const char* out;  // the run's directory
    const TensorTable* table;
    floatX* params;
    Optimizer* optimizer;
    const TokenizerFiles* tokenizer;  // copied into each; NULL: none
    int keep;                         // number of newest checkpoints to keep; 0 = all
    int keep_every;                   // also keep those at multiples of this step; 0 = none
    Context* ctx;
    RunLock* lock;    // of `out`; NULL: there is none
    int64_t best;     // also keep the checkpoint of this step; 0 = none
    int starts_anew;  // to load: skip the average of another run's weights
} Checkpoints;

// End all ranks. Rank 0 prints the reason. All ranks call it.
__attribute__((format(printf, 3, 4), noreturn)) static inline void checkpoint_die(const ProcessGroup* group, int status,
                                                                                  const char* format, ...) {
    va_list args;
    char line[CHECKPOINT_WHY];
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (group->size == 1) die(status, "%s", line);
    if (group->rank == 0) fprintf(stderr, "error: %s\n", line);
    group_exit(group, status);
}

// ---------------------------------------------------------------------------------------------------------
// The optimizer's files

#define CHECKPOINT_AVERAGE "ema."
enum { CHECKPOINT_PARTS = 4 };

// The buffers that are saved with the optimizer. Returns their number.
static inline int checkpoint_optimizer_parts(const Checkpoints* c, TensorPart parts[CHECKPOINT_PARTS]) {
    const TensorPart all[CHECKPOINT_PARTS] = {{"m.", c->optimizer->m, VIEW_REAL},
                                              {"v.", c->optimizer->v, VIEW_REAL},
                                              {"master.", c->optimizer->master, VIEW_REAL},
                                              {CHECKPOINT_AVERAGE, c->optimizer->average, VIEW_REAL}};
    int count = 0;
    for (int i = 0; i < CHECKPOINT_PARTS; i++)
        if (all[i].device) parts[count++] = all[i];
    return count;
}

// The name of the optimizer's file: of rank `rank` of `ranks` if `sharded`, else of the whole state.
static inline void checkpoint_optimizer_name(char name[CHECKPOINT_NAME], int sharded, int rank, int ranks) {
    if (sharded) snprintf(name, CHECKPOINT_NAME, "optimizer-%05d-of-%05d.safetensors", rank, ranks);
    else snprintf(name, CHECKPOINT_NAME, "optimizer.safetensors");
}

#endif
