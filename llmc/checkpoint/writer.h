/* Saving a checkpoint while the run continues. The step loop only waits for a snapshot (checkpoint/snapshot.h). Then a
 * thread of each rank writes that rank's files: rank 0 the model, the settings and an optimizer state that is not
 * sharded; every rank its shard if it is. The main threads poll their threads at the same steps, so all ranks learn in
 * the same step that every file is on the disk, or that one could not be written. Only then rank 0 commits: manifest,
 * flush, rename. One checkpoint is written at a time.
 *
 * Ranks compare a hash of the weights that they all hold. If the hashes differ, the run ends. */
#ifndef LLMC_CHECKPOINT_WRITER_H
#define LLMC_CHECKPOINT_WRITER_H

#include "llmc/base/log.h"
#include "llmc/checkpoint/directory.h"
#include "llmc/checkpoint/snapshot.h"

typedef enum { WRITER_IDLE, WRITER_FILES, WRITER_COMMIT } WriterPhase;

// A rank's state, which all ranks exchange.
typedef struct {
    int32_t done, error;  // errno of the first failure; 0: none so far
    int32_t is_shard;     // it holds only a shard of the optimizer state
    int32_t no_snapshot;  // its step loop must wait until the files are written
    int32_t is_lost;      // another run has locked OUT
    uint32_t weights;     // CRC-32 of the parameters that all ranks hold
    FileDigest shard;
    char task[96];  // that failed
} WriterShare;

// Zero-initialise it, then call writer_open(). The main thread reads fields that the writing thread sets only after
// that thread has ended.
typedef struct CheckpointWriter {
    const ProcessGroup* group;
    Log* log;       // NULL: nothing is reported
    int64_t saved;  // step of the newest checkpoint; -1: none

    WriterPhase phase;
    Checkpoints c;                              // of the checkpoint that is being written, like the next fields
    int64_t step;                               // its step, or that of the last checkpoint; -1: none, or it failed
    int sharded;                                // 1: every rank writes a shard of the optimizer state
    char *dir, *tmp, *config, *trainer, *card;  // paths, and the texts of files; card NULL: none
    TensorPart weights, moments[CHECKPOINT_PARTS];
    int moment_count;

    Snapshot snapshot;
    int has_warned;  // has warned that there is no memory for a snapshot
    int is_taken;    // 1: the snapshot is written, not the buffers
    Background thread;
    WriterShare mine, *all;                // [ranks]
    FileDigest model, optimizer, *shards;  // [ranks]
    char* warning;                         // what failed after the commit; NULL: nothing
    double began, ended;                   // start and end of writing
    double lost, waited;                   // seconds that the step loop lost; of these, waiting for the thread
} CheckpointWriter;

static inline void writer_open(CheckpointWriter* w, const ProcessGroup* group, Log* log, int64_t saved) {
    w->group = group, w->log = log, w->saved = w->step = saved;
    w->all = (WriterShare*)xcalloc((size_t)group->size, sizeof(WriterShare));
    w->shards = (FileDigest*)xcalloc((size_t)group->size, sizeof(FileDigest));
}

// ---------------------------------------------------------------------------------------------------------
// The threads

// If `bad` and if this is the first failure, record the task and errno. Returns `bad`.
static inline int writer_fails(CheckpointWriter* w, int bad, const char* task) {
    if (bad && !w->mine.error) {
        w->mine.error = errno ? errno : EIO;
        w->mine.is_lost = run_lock_check(w->c.lock) != 0;
        snprintf(w->mine.task, sizeof w->mine.task, "%s", task);
    }
    return bad;
}

static inline int writer_write_text(CheckpointWriter* w, const char* name, const char* text) {
    Path path = path_of("%s/%s", w->tmp, name);
    char task[sizeof w->mine.task];
    snprintf(task, sizeof task, "write %s", name);
    int bad = writer_fails(w, write_file(path.text, text, strlen(text)) != 0, task);
    return bad;
}

// Write this rank's file of the optimizer state: a shard, or on rank 0 all of it.
static inline void writer_write_optimizer(CheckpointWriter* w) {
    const Checkpoints* c = &w->c;
    int rank = w->group->rank;
    char name[CHECKPOINT_NAME];
    if (!w->sharded && rank > 0) return;
    checkpoint_optimizer_name(name, w->sharded, rank, w->group->size);
    Path path = path_of("%s/%s", w->tmp, name);
    char task[sizeof w->mine.task];
    snprintf(task, sizeof task, "write %s", name);
    int bad;
    if (w->sharded)
        bad = tensors_write_shard(path.text, c->table, w->moments, w->moment_count, c->optimizer->shard, &w->mine.shard,
                                  c->ctx);
    else bad = tensors_write(path.text, c->table, w->moments, w->moment_count, &w->optimizer, c->ctx);
    // Rank 0 has made the directory before any rank's thread began.
    if (bad && errno == ENOENT && rank > 0)
        writer_fails(w, 1, "find rank 0's directory: -o must be on a shared file system");
    writer_fails(w, bad, task);
}

// All files are written: add the manifest, and rename the directory.
static inline void writer_commit(CheckpointWriter* w) {
    const Checkpoints* c = &w->c;
    int ranks = w->group->size, bad = 0, known = 0;
    CheckpointFile* files = (CheckpointFile*)xcalloc((size_t)ranks + 1, sizeof *files);
    Path parent = path_of("%s/ckpt", c->out);
    snprintf(files[known].name, CHECKPOINT_NAME, "model.safetensors");
    files[known++].digest = w->model;
    for (int r = 0; r < (w->sharded ? ranks : 1); r++) {
        checkpoint_optimizer_name(files[known].name, w->sharded, r, ranks);
        files[known++].digest = w->sharded ? w->shards[r] : w->optimizer;
    }
    bad = checkpoint_write_manifest(w->tmp, files, known) != 0;
    writer_fails(w, bad, "write manifest.json");
    if (!bad) bad = writer_fails(w, sync_directory(w->tmp) != 0, "flush its directory");
    if (!bad) bad = writer_fails(w, run_lock_check(c->lock) != 0 || rename(w->tmp, w->dir) != 0, "rename it");
    if (!bad) bad = writer_fails(w, sync_directory(parent.text) != 0, "flush the directory above it");
    if (!bad && run_lock_check(c->lock) == 0 && checkpoint_publish(c->out, w->dir) != 0)
        w->warning =
            xprintf("%s: the newest model could not be copied there: %s; it is in %s", c->out, strerror(errno), w->dir);
    if (!bad) checkpoint_retire(c, w->step);
    free(files);
}

static inline void writer_write_thread(void* argument) {
    CheckpointWriter* w = (CheckpointWriter*)argument;
    const Checkpoints* c = &w->c;
    if (w->is_taken) snapshot_wait(&w->snapshot);
    if (w->group->rank == 0) {
        Path model = path_of("%s/model.safetensors", w->tmp);
        int bad = tensors_write(model.text, c->table, &w->weights, 1, &w->model, c->ctx) != 0;
        writer_fails(w, bad, "write model.safetensors");
    }
    if (!w->mine.error) writer_write_optimizer(w);
    if (w->group->rank == 0 && !w->mine.error) {
        int bad = writer_write_text(w, "config.json", w->config) || writer_write_text(w, "trainer.json", w->trainer) ||
                  (w->card && writer_write_text(w, CHECKPOINT_CARD, w->card));
        if (!bad && c->tokenizer) {
            bad = tokenizer_files_write(c->tokenizer, w->tmp) != 0;
            writer_fails(w, bad, "write the tokenizer");
        }
    }
    if (w->group->size > 1) w->mine.weights = tensor_part_hash(&w->weights, c->table->elements, c->ctx);
    else if (!w->mine.error) writer_commit(w);
    w->ended = now_seconds();
}

static inline void writer_commit_thread(void* argument) {
    CheckpointWriter* w = (CheckpointWriter*)argument;
    writer_commit(w);
    w->ended = now_seconds();
}

// ---------------------------------------------------------------------------------------------------------
// The main threads: all ranks call these at the same places

// Report a written checkpoint on the terminal and in log.jsonl: the step loop's lost time in ms, and the time and speed
// of writing.
static inline void writer_report(const CheckpointWriter* w) {
    int ranks = w->group->size;
    double bytes = (double)w->model.bytes + (double)w->optimizer.bytes, seconds = w->ended - w->began;
    Text t = {NULL, 0, 0};
    for (int r = 0; r < ranks && w->sharded; r++) bytes += (double)w->shards[r].bytes;
    if (w->group->rank > 0 || !w->log) return;
    printf("checkpoint of step %lld: %.3g GB in %.3g s, %.3g GB/s; training waited %.1f ms", (long long)w->step,
           1e-9 * bytes, seconds, 1e-9 * bytes / seconds, 1e3 * w->lost);
    if (w->waited > 0) printf(", %.1f of them for the write to end", 1e3 * w->waited);
    printf("\n");
    fflush(stdout);
    text_append(&t, "{", 1);
    json_put_integer(&t, "step", w->step);
    log_put(&t, "checkpoint_ms", 1e3 * w->lost, 6);
    log_put(&t, "checkpoint_write_s", seconds, 6);
    log_put(&t, "checkpoint_gb_s", 1e-9 * bytes / seconds, 4);
    log_put(&t, "checkpoint_wait_ms", 1e3 * w->waited, 6);
    if (ranks > 1) {
        char hash[16];
        snprintf(hash, sizeof hash, "%08x", w->all[0].weights);
        json_put_string(&t, "weights_hash", hash);
    }
    text_append(&t, "}", 1);
    log_line(w->log, &t);
    free(t.text);
}

// Finish a checkpoint that is written, or that rank `failed` could not write. Returns 0, or -1 after a warning.
static inline int writer_end(CheckpointWriter* w, int failed) {
    int is_first = w->group->rank == 0, ranks = w->group->size;
    w->phase = WRITER_IDLE;
    if (failed >= 0 && w->all[failed].is_lost) group_die(w->group, FAILED, RUN_LOCK_LOST, w->c.out);
    if (w->is_taken) {
        snapshot_wait(&w->snapshot);
        w->lost += snapshot_seconds(&w->snapshot);
    }
    if (failed < 0) {
        w->saved = w->step;
        if (w->warning) warn("%s", w->warning);
        writer_report(w);
    } else if (is_first) {
        const WriterShare* why = &w->all[failed];
        char who[24] = "";
        if (ranks > 1) snprintf(who, sizeof who, "rank %d: ", failed);
        checkpoint_remove(w->tmp);
        warn("%s: the checkpoint could not be saved (%s%s: %s); earlier checkpoints are untouched", w->dir, who,
             why->task, strerror(why->error));
    }
    if (failed >= 0) w->step = -1;
    free(w->dir), free(w->tmp), free(w->config), free(w->trainer), free(w->card), free(w->warning);
    w->dir = w->tmp = w->config = w->trainer = w->card = w->warning = NULL;
    return failed < 0 ? 0 : -1;
}

// The first rank that failed, or -1.
static inline int writer_failed_rank(const CheckpointWriter* w) {
    for (int r = 0; r < w->group->size; r++)
        if (w->all[r].error) return r;
    return -1;
}

static inline void writer_compare_weights(const CheckpointWriter* w) {
    for (int r = 1; r < w->group->size; r++) {
        if (w->all[r].weights == w->all[0].weights) continue;
        if (w->group->rank == 0) checkpoint_remove(w->tmp);
        group_die(w->group, FAILED,
                  "step %lld: rank %d holds other weights than rank 0 (%08x and %08x); the ranks have diverged",
                  (long long)w->step, r, w->all[r].weights, w->all[0].weights);
    }
}

// Poll the threads of all ranks, once per step. Returns 0, or -1 after a warning if the checkpoint has just failed.
static inline int writer_poll(CheckpointWriter* w) {
    int ranks = w->group->size, is_done = w->phase != WRITER_IDLE && background_is_done(&w->thread);
    WriterShare mine;
    if (w->phase == WRITER_IDLE || (ranks == 1 && !is_done)) return 0;
    memset(&mine, 0, sizeof mine);
    group_gather(w->group, w->all, is_done ? &w->mine : &mine, sizeof mine);
    for (int r = 0; r < ranks; r++)
        if (!w->all[r].done) return 0;
    background_join(&w->thread);
    int failed = writer_failed_rank(w);
    if (failed >= 0 || ranks == 1 || w->phase == WRITER_COMMIT) return writer_end(w, failed);
    writer_compare_weights(w);
    w->phase = WRITER_COMMIT;
    for (int r = 0; r < ranks; r++) w->shards[r] = w->all[r].shard;
    if (w->group->rank == 0) background_start(&w->thread, writer_commit_thread, w);
    return 0;
}

// Wait until the checkpoint is written, if there is one. Returns 0, or -1 after a warning if it failed.
static inline int writer_finish(CheckpointWriter* w) {
    double began = now_seconds();
    int result = 0;
    while (w->phase != WRITER_IDLE) {
        const struct timespec moment = {.tv_sec = 0, .tv_nsec = 1000000};
        if (w->group->size == 1) background_join(&w->thread);
        else nanosleep(&moment, NULL);
        double now = now_seconds();
        w->lost += now - began, w->waited += now - began;
        began = now;
        result = writer_poll(w);
    }
    return result;
}

// Take the snapshot. Returns whether there is memory for one.
static inline int writer_snapshot(CheckpointWriter* w) {
    const Checkpoints* c = &w->c;
    int writes = w->sharded || w->group->rank == 0;
    const void* sources[SNAPSHOT_BUFFERS] = {c->params};
    size_t bytes[SNAPSHOT_BUFFERS] = {c->table->elements * sizeof(floatX)};
    for (int i = 0; i < w->moment_count && writes; i++) {
        sources[1 + i] = w->moments[i].device;
        bytes[1 + i] = c->optimizer->shard.size * sizeof(real);
    }
    if (!w->snapshot.is_open && !w->has_warned &&
        snapshot_open(&w->snapshot, bytes, max_int(1, w->group->local_size)) != 0) {
        double total = 0;
        for (int i = 0; i < SNAPSHOT_BUFFERS; i++) total += (double)bytes[i];
        char who[24] = "";
        if (w->group->size > 1) snprintf(who, sizeof who, "rank %d: ", w->group->rank);
        warn("%sthe host has no %.2f GB to spare for a snapshot; each checkpoint stops the run until it is written",
             who, 1e-9 * total);
        w->has_warned = 1;
    }
    if (!w->snapshot.is_open) return 0;
    CHECK(memcmp(bytes, w->snapshot.bytes, sizeof bytes) == 0);
    snapshot_take(&w->snapshot, sources, c->ctx);
    w->weights.host = w->snapshot.copies[0];
    for (int i = 0; i < w->moment_count; i++) w->moments[i].host = w->snapshot.copies[1 + i];
    return 1;
}

// Create the directory to write to. A missing OUT is not created: it was moved or deleted. Returns 0, or -1 with errno.
static inline int writer_make_directory(const CheckpointWriter* w) {
    Path parent = path_of("%s/ckpt", w->c.out);
    int bad = checkpoint_remove(w->tmp) != 0 || (mkdir(parent.text, 0777) != 0 && errno != EEXIST) ||
              checkpoint_make_directory(w->tmp) != 0;
    return bad ? -1 : 0;
}

// Save the state after `step` steps, including all launches so far. With `background` this returns as soon as the state
// may change again, and writer_poll() and writer_finish() return the result. `card`: the text of README.md, or NULL.
// Returns 0, or -1 after a warning that gives the reason; then earlier checkpoints are untouched, and no incomplete one
// is visible.
static inline int writer_begin(CheckpointWriter* w, const Checkpoints* c, int64_t step, const char* config_json,
                               const char* trainer_json, const char* card, int background) {
    int bad = writer_finish(w), waits = !background;
    double began = now_seconds();
    (void)bad;  // writer_finish() has reported the earlier checkpoint
    w->c = *c, w->step = step;
    w->dir = checkpoint_path(c->out, step), w->tmp = xprintf("%s.tmp", w->dir);
    w->config = xprintf("%s", config_json), w->trainer = xprintf("%s", trainer_json);
    w->card = card ? xprintf("%s", card) : NULL;
    TensorPart weights = {.prefix = "", .device = c->params, .type = VIEW_FLOATX};
    w->weights = weights;
    w->moment_count = checkpoint_optimizer_parts(c, w->moments);
    w->lost = w->waited = 0;
    memset(&w->mine, 0, sizeof w->mine);
    memset(&w->model, 0, sizeof w->model), memset(&w->optimizer, 0, sizeof w->optimizer);
    if (w->group->rank == 0) writer_fails(w, writer_make_directory(w) != 0, "create its directory");
    w->mine.is_shard = c->optimizer->shard.size < c->table->elements;
    group_gather(w->group, w->all, &w->mine, sizeof w->mine);
    w->sharded = w->is_taken = 0;
    for (int r = 0; r < w->group->size; r++) w->sharded = w->sharded || w->all[r].is_shard;
    if (writer_failed_rank(w) >= 0) return writer_end(w, writer_failed_rank(w));
    w->is_taken = background && writer_snapshot(w);
    w->mine.no_snapshot = background && !w->is_taken;
    group_gather(w->group, w->all, &w->mine, sizeof w->mine);
    for (int r = 0; r < w->group->size; r++) waits = waits || w->all[r].no_snapshot;
    w->mine.done = 1;  // the others see this once the thread has ended
    w->began = now_seconds();
    w->phase = WRITER_FILES;
    background_start(&w->thread, writer_write_thread, w);
    w->lost = now_seconds() - began;
    return waits ? writer_finish(w) : 0;
}

static inline void writer_close(CheckpointWriter* w) {
    writer_finish(w);
    snapshot_close(&w->snapshot);
    free(w->all), free(w->shards);
    memset(w, 0, sizeof *w);
}

#endif
