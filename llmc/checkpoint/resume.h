/* Resuming: find the newest complete checkpoint, verify it on all ranks, and load it. The number of ranks may differ
 * from the run that wrote it. */
#ifndef LLMC_CHECKPOINT_RESUME_H
#define LLMC_CHECKPOINT_RESUME_H

#include "llmc/checkpoint/directory.h"

// ---------------------------------------------------------------------------------------------------------
// Verify

// What a rank found when it checked its share of a checkpoint.
typedef struct {
    int32_t sees, bad;  // the directory exists; the manifest or a file is damaged
    uint32_t manifest;
    char why[CHECKPOINT_WHY];
} CheckpointFinding;

// Check this rank's share of the files, every `ranks`th, against the manifest.
static inline CheckpointFinding checkpoint_examine(const char* dir, const ProcessGroup* group) {
    int rank = group->rank, ranks = group->size;
    CheckpointFinding found;
    CheckpointManifest m;
    memset(&found, 0, sizeof found);
    found.sees = is_directory(dir);
    found.bad = checkpoint_manifest_open(&m, dir, found.why) != 0;
    found.manifest = m.crc;
    int i = 0;
    for (const JsonNode* f = m.files ? m.files->first : NULL; f && !found.bad; f = f->next) {
        if (i++ % ranks != rank) continue;
        Path file = path_of("%s/%s", dir, json_get_string(f, "name", m.path));
        char wanted[16];
        FileDigest digest = {0, 0};
        found.bad = 1;
        if (checkpoint_digest(file.text, &digest.bytes, &digest.crc) != 0) {
            snprintf(found.why, CHECKPOINT_WHY, "%.900s: cannot be read: %s", file.text, strerror(errno));
        } else {
            snprintf(wanted, sizeof wanted, "%08x", digest.crc);
            found.bad = digest.bytes != (uint64_t)json_get_int(f, "bytes", m.path) ||
                        strcmp(wanted, json_get_string(f, "crc32", m.path)) != 0;
            if (found.bad)
                snprintf(found.why, CHECKPOINT_WHY, "%.450s: damaged (its size or checksum is not that of %.450s)",
                         file.text, m.path);
        }
    }
    checkpoint_manifest_close(&m);
    return found;
}

// Check every file of a checkpoint against its manifest; each rank checks a share. Returns 0, or -1 after a warning
// that names the file. All ranks return the same.
static inline int checkpoint_verify(const char* dir, const ProcessGroup* group) {
    int ranks = group->size, bad = 0;
    CheckpointFinding mine = checkpoint_examine(dir, group);
    CheckpointFinding* all = (CheckpointFinding*)xmalloc((size_t)ranks * sizeof *all);
    group_gather(group, all, &mine, sizeof mine);
    for (int r = 1; r < ranks; r++)
        if (all[0].sees && (!all[r].sees || all[r].manifest != all[0].manifest))
            group_die(group, USAGE,
                      "%s: rank %d does not see what rank 0 sees there; -o must be on a file system that all share",
                      dir, r);
    for (int r = 0; r < ranks && !bad; r++) {
        bad = all[r].bad;
        if (bad && group->rank == 0) warn("%s; this checkpoint is not used", all[r].why);
    }
    free(all);
    return bad ? -1 : 0;
}

// ---------------------------------------------------------------------------------------------------------
// Find

// Ends with USAGE if `out` belongs to a run without a complete checkpoint. A command that only resumes does not name a
// model, and the default model would replace the run's.
static inline void checkpoint_refuse_default(const char* out, const ProcessGroup* group) {
    Path log = path_of("%s/log.jsonl", out);
    if (file_exists(log.text))
        group_die(group, USAGE,
                  "-y 1: the run in %s has no complete checkpoint; give -e and -i to start again, or choose another -o",
                  out);
}

// Find the newest complete checkpoint of OUT. Warns about newer ones, which are damaged. Returns its directory (caller
// frees) and its step, or NULL if there is none; the same on every rank, as rank 0 sees it.
static inline char* checkpoint_find(const char* out, int64_t* step, const ProcessGroup* group) {
    int64_t *steps = NULL, count = 0;
    char* found = NULL;
    if (group->rank == 0) count = checkpoint_list(out, "", &steps);
    if (group->size > 1) {
        group_broadcast(group, &count, sizeof count);
        if (!steps) steps = (int64_t*)xcalloc((size_t)count, sizeof *steps);
        group_broadcast(group, steps, (size_t)count * sizeof *steps);
    }
    for (int64_t i = count - 1; i >= 0 && !found; i--) {
        char* dir = checkpoint_path(out, steps[i]);
        if (checkpoint_verify(dir, group) == 0) found = dir, *step = steps[i];
        else free(dir);
    }
    free(steps);
    return found;
}

// ---------------------------------------------------------------------------------------------------------
// Load

// The number of shards that hold a directory's optimizer state; 0 if one file holds it. Ends with USAGE if there are
// files of both kinds, or of different numbers of shards.
static inline int checkpoint_shards(const char* dir) {
    int shards = -1;
    DIR* listing = opendir(dir);
    if (!listing) die(USAGE, "%s: cannot be read: %s", dir, strerror(errno));
    for (struct dirent* e = readdir(listing); e; e = readdir(listing)) {
        int rank, ranks = 0;
        char name[CHECKPOINT_NAME];
        int is_shard = sscanf(e->d_name, "optimizer-%5d-of-%5d", &rank, &ranks) == 2;
        checkpoint_optimizer_name(name, is_shard, is_shard ? rank : 0, ranks);
        if (strcmp(name, e->d_name) != 0) continue;
        if (shards >= 0 && shards != ranks)
            die(USAGE, "%s: holds %s next to another optimizer's files; remove one of them", dir, name);
        shards = ranks;
    }
    closedir(listing);
    if (shards < 0) die(USAGE, "%s: optimizer.safetensors is missing", dir);
    return shards;
}

// Read a range of one part from shards. In order, they must hold the whole buffer.
static inline void checkpoint_read_shards(const Checkpoints* c, const char* dir, int shards, const TensorPart* part,
                                          FlatRange range) {
    char name[CHECKPOINT_NAME];
    HostView view = host_view_open(part->device, range.size, part->type);
    size_t at = 0;
    for (int r = 0; r < shards; r++) {
        SafeTensors file;
        checkpoint_optimizer_name(name, 1, r, shards);
        Path path = path_of("%s/%s", dir, name);
        if (!file_exists(path.text)) die(USAGE, "%s: is missing; all %d shards are needed", path.text, shards);
        FlatRange held = tensors_open_shard(&file, path.text, c->table);
        if (held.size > 0 && held.begin != at)
            die(USAGE, "%s: begins at element %zu, but %zu comes next; it is not rank %d's shard", path.text,
                held.begin, at, r);
        at += held.size;
        tensors_read_shard(&file, held, part, range, view.values);
        safetensors_close(&file);
    }
    if (at != c->table->elements)
        die(USAGE, "%s: its %d shards end after %zu of %zu elements", dir, shards, at, c->table->elements);
    host_view_write(c->ctx, &view);
    host_view_close(&view);
}

// Whether the file of an optimizer's state has a part with this prefix: tensors of its own, or one of a shard.
static inline int checkpoint_has_part(const Checkpoints* c, const char* path, const char* prefix) {
    SafeTensors file;
    char name[16], whole[128];
    const TensorPart part = {.prefix = prefix};
    tensors_shard_name(name, &part);
    snprintf(whole, sizeof whole, "%s%s", prefix, c->table->tensors[0].name);
    safetensors_open(&file, path);
    int has = safetensors_find(&file, whole) || safetensors_find(&file, name);
    safetensors_close(&file);
    return has;
}

// End with USAGE if the file's parts do not suit the run. A resumed run cannot gain or lose master weights, because
// copies of rounded weights have other values. An average of the weights can only begin with a new run.
static inline void checkpoint_check_parts(const Checkpoints* c, const char* path) {
    int has = checkpoint_has_part(c, path, "master."), wants = c->optimizer->master != NULL;
    if (has && !wants)
        die(USAGE, "%s: holds master weights, but this run has none; resume with -w 1 and the same build", path);
    if (wants && !has) die(USAGE, "%s: holds no master weights; resume with -w 0 and the same build", path);
    if (c->optimizer->average && !c->starts_anew && !checkpoint_has_part(c, path, CHECKPOINT_AVERAGE))
        die(USAGE, "%s: holds no average of the weights; resume without --ema, or start a new run", path);
}

// Read the weights and this rank's range of the moments from a verified checkpoint. Fixed parameters have no moments;
// of the master weights, only the fp32 `copies` are read. Otherwise `copies` may be NULL.
static inline void checkpoint_load(const Checkpoints* c, const Fp32Copies* copies, const char* dir) {
    static const char* const all[] = {""};
    const FileRules other_parts = {.optional_prefix = NULL, .ignored = all, .ignored_count = 1};
    int shards = checkpoint_shards(dir);
    char name[CHECKPOINT_NAME];
    checkpoint_optimizer_name(name, shards > 0, 0, shards);
    Path model = path_of("%s/model.safetensors", dir), moments = path_of("%s/%s", dir, name);
    const TensorPart weights = {.prefix = "", .device = c->params, .type = VIEW_FLOATX};
    const FileRules not_average = {.ignored_prefix = CHECKPOINT_AVERAGE};
    TensorPart parts[CHECKPOINT_PARTS];
    int count = checkpoint_optimizer_parts(c, parts);
    if (file_exists(moments.text)) checkpoint_check_parts(c, moments.text);
    if (c->optimizer->average && c->starts_anew) count--;  // it is the last part
    tensors_read(model.text, c->table, &weights, 1, NULL, NULL, c->ctx);
    for (int p = 0; p < count && shards; p++) checkpoint_read_shards(c, dir, shards, &parts[p], c->optimizer->shard);
    if (!shards)
        tensors_read_range(moments.text, c->table, parts, count, c->optimizer->shard, &not_average, NULL, c->ctx);
    int reads_copies = c->table->fixed && c->optimizer->master && copies->copies;
    if (reads_copies && !shards) fp32_copies_read(copies, c->table, moments.text, "master.", &other_parts, c->ctx);
    for (int i = 0; reads_copies && shards && i < c->table->count; i++) {
        const Tensor* t = &c->table->tensors[i];
        const TensorPart part = {.prefix = "master.", .device = copies->copies + t->fp32_offset, .type = VIEW_REAL};
        const FlatRange range = {.begin = t->offset, .size = t->size};
        if (t->fp32_copy) checkpoint_read_shards(c, dir, shards, &part, range);
    }
}

#endif
