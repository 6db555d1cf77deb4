/* What a run leaves in OUT besides its log, as the rest of a program sees it: checkpoints, the model with its card, the
 * plot. With -DNO_CHECKPOINT it leaves none of them, and neither resumes nor starts from another run. */
#ifndef LLMC_CHECKPOINT_ROOM_H
#define LLMC_CHECKPOINT_ROOM_H

#ifndef NO_CHECKPOINT
#include "llmc/checkpoint/loss_svg.h"
#include "llmc/checkpoint/model_card.h"
#include "llmc/checkpoint/run.h"
#else
#include "llmc/base/rooms.h"
#include "llmc/run/state.h"

enum { WRITER_IDLE };

typedef struct CheckpointWriter {
    int phase;
    int64_t step, saved;
} CheckpointWriter;

static inline void writer_open(CheckpointWriter* w, const ProcessGroup* group, Log* log, int64_t saved) {
    (void)saved;
    w->step = w->saved = -1;
    if (group->rank == 0 && log->directory) warn("built without checkpoint: the model will not be saved");
}

// Create OUT, for the log.
static inline void run_directory_prepare(const char* out) {
    if (make_directories(out) != 0) die(USAGE, "%s: cannot be written: %s", out, strerror(errno));
}

static inline void run_find_start(Run* r, const char* flag, const char* other) {
    (void)r;
    if (*other) die(USAGE, "%s %s: built without checkpoint", flag, other);
}

#define writer_poll(...) room_absent(0, __VA_ARGS__)
#define writer_finish(...) room_absent(0, __VA_ARGS__)
#define writer_close(...) room_absent(0, __VA_ARGS__)
#define checkpoint_clean(...) room_absent(0, __VA_ARGS__)
#define checkpoint_path(...) xprintf("none")
#define run_count_checkpoints(...) room_absent(0, __VA_ARGS__)
#define run_find_checkpoint(...) room_absent(0, __VA_ARGS__)
#define run_refuse_foreign(...) room_absent(0, __VA_ARGS__)
#define run_delete_earlier(...) room_absent(0, __VA_ARGS__)
#define run_load_start(...) room_absent(0, __VA_ARGS__)
#define run_save_checkpoint(...) room_absent(0, __VA_ARGS__)
#define run_save_average(...) room_absent(0, __VA_ARGS__)
#define log_write_svg(...) room_absent(0, __VA_ARGS__)
#define model_card(...) (room_absent(0, __VA_ARGS__), (Text){NULL, 0, 0})

#endif
#endif
