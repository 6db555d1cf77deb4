/* Writing a checkpoint while the run goes on. The step loop pays for a snapshot (device/snapshot.h); a thread of each rank
 * writes what is that rank's: rank 0 the model, the settings and an optimizer that is whole, every rank its shard of one
 * that is not. The ranks' main threads look after their threads at the same steps, so that all of them know, and in the
 * same step, when every file is on the disk or that one could not be written. Only then rank 0 commits: manifest, flush,
 * rename. One checkpoint is written at a time.
 *
 * Where there are several ranks each says which weights it holds; a checkpoint of ranks that have come apart ends the
 * run. */
#ifndef LLMC_SAVING_H
#define LLMC_SAVING_H

#include "../base/log.h"
#include "../device/snapshot.h"
#include "checkpoint.h"

typedef enum { SAVING_NOTHING, SAVING_FILES, SAVING_COMMIT } SavingPhase;

// What a rank tells the others.
typedef struct {
    int32_t done, error;  // errno of the first failure; 0: none so far
    int32_t is_shard;     // its optimizer's state is not all of it
    int32_t no_snapshot;  // it must write before it goes on
    uint32_t weights;     // CRC-32 of its parameters
    FileDigest shard;
    char doing[96];  // what failed
} SavingShare;

// Zero-initialise it, then saving_open(). What a thread writes is not looked at before it has ended.
typedef struct {
    const Comm* comm;  // NULL: alone
    Log* log;          // NULL: nothing is reported
    int stop_on_error;
    int64_t saved;  // step of the newest checkpoint; -1: none

    SavingPhase phase;
    Checkpoints c;  // of the checkpoint that is being written; the rest too
    int64_t step;   // its own, or of the last one; -1: there was none, or it failed
    int sharded;    // every rank writes a shard of the optimizer's state
    char *dir, *tmp, *config, *trainer;
    TensorPart weights, moments[3];
    int moment_count;

    Snapshot snapshot;
    int has_warned;  // that there is no memory for one
    int is_taken;    // the snapshot is what is written
    Background thread;
    SavingShare mine, *all;                // [ranks]
    FileDigest model, optimizer, *shards;  // [ranks]
    char* complaint;                       // what went wrong after the commit; NULL: nothing
    double began, ended;                   // of the writing
    double lost, waited;                   // what the steps lost by it; of that, waiting for its end
} Saving;

static inline void saving_open(Saving* s, const Comm* comm, Log* log, int stop_on_error, int64_t saved) {
    s->comm = comm, s->log = log, s->stop_on_error = stop_on_error, s->saved = s->step = saved;
    s->all = (SavingShare*)xcalloc((size_t)checkpoint_ranks(comm), sizeof(SavingShare));
    s->shards = (FileDigest*)xcalloc((size_t)checkpoint_ranks(comm), sizeof(FileDigest));
}

// ---------------------------------------------------------------------------------------------------------
// What the threads do

// Note what failed with errno, if it did and was the first. Returns `bad`.
static inline int saving_fails(Saving* s, int bad, const char* doing) {
    if (bad && !s->mine.error) {
        s->mine.error = errno ? errno : EIO;
        snprintf(s->mine.doing, sizeof s->mine.doing, "%s", doing);
    }
    return bad;
}

static inline int saving_write_text(Saving* s, const char* name, const char* text) {
    char *path = xprintf("%s/%s", s->tmp, name), *doing = xprintf("write %s", name);
    int bad = saving_fails(s, write_file(path, text, strlen(text)) != 0, doing);
    free(path), free(doing);
    return bad;
}

// CRC-32 of a buffer of `elements`.
static inline uint32_t checkpoint_weights_hash(const TensorPart* part, size_t elements, Context* ctx) {
    enum { PIECE = 1 << 20 };  // elements
    Crc32 table;
    uint32_t crc = 0;
    crc32_init(&table);
    void* space = xmalloc(PIECE * sizeof(real));
    for (size_t at = 0, n; at < elements; at += n) {
        n = min_size(elements - at, PIECE);
        crc = crc32_update(&table, crc, tensor_part_elements(part, at, n, space, ctx), n * tensor_part_element(part));
    }
    free(space);
    return crc;
}

// This rank's file of the optimizer: a shard, or all of it, which is rank 0's.
static inline void saving_write_optimizer(Saving* s) {
    const Checkpoints* c = &s->c;
    int rank = checkpoint_rank(s->comm);
    char name[CHECKPOINT_NAME];
    if (!s->sharded && rank > 0) return;
    checkpoint_optimizer_name(name, s->sharded, rank, checkpoint_ranks(s->comm));
    char *path = xprintf("%s/%s", s->tmp, name), *doing = xprintf("write %s", name);
    int bad = s->sharded ? tensors_write_shard(path, c->table, s->moments, s->moment_count, c->optimizer->shard,
                                               &s->mine.shard, c->ctx)
                         : tensors_write(path, c->table, s->moments, s->moment_count, &s->optimizer, c->ctx);
    // Rank 0 has made the directory before any rank's thread began.
    if (bad && errno == ENOENT && rank > 0)
        saving_fails(s, 1, "find rank 0's directory: -o must be on a shared file system");
    saving_fails(s, bad, doing);
    free(path), free(doing);
}

// All files are written: add the manifest, look whether all are there, and make it a checkpoint.
static inline void saving_commit(Saving* s) {
    const Checkpoints* c = &s->c;
    int ranks = checkpoint_ranks(s->comm), bad = 0, known = 0;
    CheckpointFile* files = (CheckpointFile*)xcalloc((size_t)ranks + 1, sizeof *files);
    char* parent = xprintf("%s/ckpt", c->out);
    snprintf(files[known].name, CHECKPOINT_NAME, "model.safetensors");
    files[known++].digest = s->model;
    for (int r = 0; r < (s->sharded ? ranks : 1); r++) {
        checkpoint_optimizer_name(files[known].name, s->sharded, r, ranks);
        files[known++].digest = s->sharded ? s->shards[r] : s->optimizer;
    }
    bad = saving_fails(s, checkpoint_write_manifest(s->tmp, files, known) != 0, "write manifest.json");
    for (int i = 0; i < known && !bad; i++) {
        struct stat st;
        char* path = xprintf("%s/%s", s->tmp, files[i].name);
        errno = 0;
        bad = stat(path, &st) != 0 || (uint64_t)st.st_size != files[i].digest.bytes;
        if (saving_fails(s, bad, "find all that was written")) bad = 1;
        free(path);
    }
    if (!bad) bad = saving_fails(s, sync_directory(s->tmp) != 0, "flush its directory");
    // A directory of that name is a damaged checkpoint that checkpoint_clean() could not rename.
    if (!bad) bad = saving_fails(s, checkpoint_remove(s->dir) != 0, "replace an earlier one");
    if (!bad) bad = saving_fails(s, rename(s->tmp, s->dir) != 0 || sync_directory(parent) != 0, "rename it");
    if (!bad && checkpoint_publish(c->out, s->dir) != 0)
        s->complaint =
            xprintf("%s: the newest model could not be shown there: %s; it is in %s", c->out, strerror(errno), s->dir);
    if (!bad && checkpoint_is_whole(s->dir)) checkpoint_retire(c, s->step);
    else if (!bad && !s->complaint)
        s->complaint = xprintf("%s: is not whole, though it was just written; none before it is deleted", s->dir);
    free(files), free(parent);
}

static inline void saving_write_thread(void* argument) {
    Saving* s = (Saving*)argument;
    const Checkpoints* c = &s->c;
    if (s->is_taken) snapshot_wait(&s->snapshot);
    if (checkpoint_rank(s->comm) == 0) {
        char* model = xprintf("%s/model.safetensors", s->tmp);
        int bad = tensors_write(model, c->table, &s->weights, 1, &s->model, c->ctx) != 0;
        saving_fails(s, bad, "write model.safetensors");
        free(model);
    }
    if (!s->mine.error) saving_write_optimizer(s);
    if (checkpoint_rank(s->comm) == 0 && !s->mine.error) {
        int bad = saving_write_text(s, "config.json", s->config) || saving_write_text(s, "trainer.json", s->trainer);
        if (!bad && c->tokenizer)
            saving_fails(s, tokenizer_copy_files(c->tokenizer, s->tmp) != 0, "copy the tokenizer");
    }
    if (checkpoint_ranks(s->comm) > 1)
        s->mine.weights = checkpoint_weights_hash(&s->weights, c->table->elements, c->ctx);
    else if (!s->mine.error) saving_commit(s);
    s->ended = now_seconds();
}

static inline void saving_commit_thread(void* argument) {
    Saving* s = (Saving*)argument;
    saving_commit(s);
    s->ended = now_seconds();
}

// ---------------------------------------------------------------------------------------------------------
// What the main threads do, all ranks at the same places

// The line about a checkpoint that is written, on the terminal and in log.jsonl: what the steps lost by it in ms, how long
// it took to be on the disk and how fast that was.
static inline void saving_report(const Saving* s) {
    int ranks = checkpoint_ranks(s->comm);
    double bytes = (double)s->model.bytes + (double)s->optimizer.bytes, seconds = s->ended - s->began;
    Text t = {NULL, 0, 0};
    for (int r = 0; r < ranks && s->sharded; r++) bytes += (double)s->shards[r].bytes;
    if (checkpoint_rank(s->comm) > 0 || !s->log) return;
    printf("checkpoint of step %lld: %.3g GB in %.3g s, %.3g GB/s; the steps lost %.1f ms", (long long)s->step,
           1e-9 * bytes, seconds, 1e-9 * bytes / seconds, 1e3 * s->lost);
    if (s->waited > 0) printf(", %.1f of them waiting for its end", 1e3 * s->waited);
    printf("\n");
    fflush(stdout);
    text_append(&t, "{", 1);
    json_put_integer(&t, "step", s->step);
    log_put(&t, "checkpoint_ms", 1e3 * s->lost, 6);
    log_put(&t, "checkpoint_write_s", seconds, 6);
    log_put(&t, "checkpoint_gb_s", 1e-9 * bytes / seconds, 4);
    log_put(&t, "checkpoint_wait_ms", 1e3 * s->waited, 6);
    if (ranks > 1) {
        char hash[16];
        snprintf(hash, sizeof hash, "%08x", s->all[0].weights);
        json_put_string(&t, "weights_hash", hash);
    }
    text_append(&t, "}", 1);
    log_line(s->log, &t);
    free(t.text);
}

// The checkpoint is written, or `failed` names the rank that could not. Returns 0, or -1 after a warning, where the policy
// does not end the run.
static inline int saving_end(Saving* s, int failed) {
    int is_first = checkpoint_rank(s->comm) == 0, ranks = checkpoint_ranks(s->comm);
    s->phase = SAVING_NOTHING;
    if (s->is_taken) {
        snapshot_wait(&s->snapshot);
        s->lost += snapshot_seconds(&s->snapshot);
    }
    if (failed < 0) {
        s->saved = s->step;
        if (s->complaint) warn("%s", s->complaint);
        saving_report(s);
    } else if (is_first) {
        const SavingShare* why = &s->all[failed];
        char* who = ranks > 1 ? xprintf("rank %d: ", failed) : xprintf("%s", "");
        checkpoint_remove(s->tmp);
        warn("%s: the checkpoint could not be saved (%s%s: %s); the checkpoints before it are untouched", s->dir, who,
             why->doing, strerror(why->error));
        free(who);
    }
    if (failed >= 0 && s->stop_on_error)
        checkpoint_die(s->comm, FAILED, "%s: could not be saved, and --on-checkpoint-error stop ends the run", s->dir);
    if (failed >= 0) s->step = -1;
    free(s->dir), free(s->tmp), free(s->config), free(s->trainer), free(s->complaint);
    s->dir = s->tmp = s->config = s->trainer = s->complaint = NULL;
    return failed < 0 ? 0 : -1;
}

// The first rank with a failure, or -1.
static inline int saving_failed_rank(const Saving* s) {
    for (int r = 0; r < checkpoint_ranks(s->comm); r++)
        if (s->all[r].error) return r;
    return -1;
}

static inline void saving_compare_weights(const Saving* s) {
    for (int r = 1; r < checkpoint_ranks(s->comm); r++) {
        if (s->all[r].weights == s->all[0].weights) continue;
        if (checkpoint_rank(s->comm) == 0) checkpoint_remove(s->tmp);
        checkpoint_die(s->comm, FAILED,
                       "step %lld: rank %d holds other weights than rank 0 (%08x and %08x); the run is no longer one",
                       (long long)s->step, r, s->all[r].weights, s->all[0].weights);
    }
}

// Look after what is being written. To be called every step. Returns 0, or -1 where a checkpoint has failed just now,
// after a warning.
static inline int saving_poll(Saving* s) {
    int ranks = checkpoint_ranks(s->comm), is_done = s->phase != SAVING_NOTHING && background_is_done(&s->thread);
    SavingShare mine;
    if (s->phase == SAVING_NOTHING || (ranks == 1 && !is_done)) return 0;
    memset(&mine, 0, sizeof mine);
    checkpoint_gather(s->comm, s->all, is_done ? &s->mine : &mine, sizeof mine);
    for (int r = 0; r < ranks; r++)
        if (!s->all[r].done) return 0;
    background_join(&s->thread);
    int failed = saving_failed_rank(s);
    if (failed >= 0 || ranks == 1 || s->phase == SAVING_COMMIT) return saving_end(s, failed);
    saving_compare_weights(s);
    s->phase = SAVING_COMMIT;
    for (int r = 0; r < ranks; r++) s->shards[r] = s->all[r].shard;
    if (checkpoint_rank(s->comm) == 0) background_start(&s->thread, saving_commit_thread, s);
    return 0;
}

// Wait until nothing is being written any more. Returns 0, or -1 where that failed, after a warning.
static inline int saving_finish(Saving* s) {
    double began = now_seconds();
    int result = 0;
    while (s->phase != SAVING_NOTHING) {
        const struct timespec moment = {0, 1000000};
        if (checkpoint_ranks(s->comm) == 1) background_join(&s->thread);
        else nanosleep(&moment, NULL);
        double now = now_seconds();
        s->lost += now - began, s->waited += now - began;
        began = now;
        result = saving_poll(s);
    }
    return result;
}

// Take the snapshot. Returns whether there is one.
static inline int saving_snapshot(Saving* s) {
    const Checkpoints* c = &s->c;
    int writes = s->sharded || checkpoint_rank(s->comm) == 0;
    const void* sources[SNAPSHOT_BUFFERS] = {c->params};
    size_t bytes[SNAPSHOT_BUFFERS] = {c->table->elements * sizeof(floatX)};
    for (int i = 0; i < s->moment_count && writes; i++) {
        sources[1 + i] = s->moments[i].device;
        bytes[1 + i] = c->optimizer->shard.size * sizeof(real);
    }
    if (!s->snapshot.is_open && !s->has_warned &&
        snapshot_open(&s->snapshot, bytes, s->comm ? max_int(1, s->comm->local_size) : 1) != 0) {
        double total = 0;
        for (int i = 0; i < SNAPSHOT_BUFFERS; i++) total += (double)bytes[i];
        char* who = checkpoint_ranks(s->comm) > 1 ? xprintf("rank %d: ", s->comm->rank) : xprintf("%s", "");
        warn("%sthe host has no %.2f GB to spare for a snapshot; each checkpoint holds the run up until it is written",
             who, 1e-9 * total);
        free(who);
        s->has_warned = 1;
    }
    if (!s->snapshot.is_open) return 0;
    CHECK(memcmp(bytes, s->snapshot.bytes, sizeof bytes) == 0);
    snapshot_take(&s->snapshot, sources, c->ctx);
    s->weights.host = s->snapshot.copies[0];
    for (int i = 0; i < s->moment_count; i++) s->moments[i].host = s->snapshot.copies[1 + i];
    return 1;
}

// Save the state after `step` steps, as it is after everything launched so far. With `background` this returns as soon as
// the state may change again, and saving_poll() and saving_finish() say how it ended. Returns 0, or -1 after a warning that
// says what failed; then no earlier checkpoint was touched and no incomplete one is visible.
static inline int saving_begin(Saving* s, const Checkpoints* c, int64_t step, const char* config_json,
                               const char* trainer_json, int background) {
    int bad = saving_finish(s), waits = !background;
    double began = now_seconds();
    (void)bad;  // it was reported; this one is another
    s->c = *c, s->step = step;
    s->dir = checkpoint_path(c->out, step), s->tmp = xprintf("%s.tmp", s->dir);
    s->config = xprintf("%s", config_json), s->trainer = xprintf("%s", trainer_json);
    TensorPart weights = {"", c->params, VIEW_FLOATX, NULL};
    s->weights = weights;
    s->moment_count = checkpoint_optimizer_parts(c, s->moments);
    s->lost = s->waited = 0;
    memset(&s->mine, 0, sizeof s->mine);
    memset(&s->model, 0, sizeof s->model), memset(&s->optimizer, 0, sizeof s->optimizer);
    if (checkpoint_rank(s->comm) == 0)
        saving_fails(s, checkpoint_remove(s->tmp) != 0 || make_directories(s->tmp) != 0, "create its directory");
    s->mine.is_shard = c->optimizer->shard.size < c->table->elements;
    checkpoint_gather(s->comm, s->all, &s->mine, sizeof s->mine);
    s->sharded = s->is_taken = 0;
    for (int r = 0; r < checkpoint_ranks(s->comm); r++) s->sharded = s->sharded || s->all[r].is_shard;
    if (saving_failed_rank(s) >= 0) return saving_end(s, saving_failed_rank(s));
    s->is_taken = background && saving_snapshot(s);
    s->mine.no_snapshot = background && !s->is_taken;
    checkpoint_gather(s->comm, s->all, &s->mine, sizeof s->mine);
    for (int r = 0; r < checkpoint_ranks(s->comm); r++) waits = waits || s->all[r].no_snapshot;
    s->mine.done = 1;  // as the others see it once the thread has ended
    s->began = now_seconds();
    s->phase = SAVING_FILES;
    background_start(&s->thread, saving_write_thread, s);
    s->lost = now_seconds() - began;
    return waits ? saving_finish(s) : 0;
}

static inline void saving_close(Saving* s) {
    saving_finish(s);
    snapshot_close(&s->snapshot);
    free(s->all), free(s->shards);
    memset(s, 0, sizeof *s);
}

#endif
