/* Checkpoints: complete or absent, whatever kills the process, and checked before they are used.
 *
 *   OUT/ckpt/00000120/   config.json, model.safetensors, tokenizer files: a Hugging Face directory
 *                        optimizer.safetensors: the moments, and the master weights where there are any; or, where each
 *                        rank keeps a shard of them, optimizer-00002-of-00004.safetensors from each (counted from 0)
 *                        trainer.json: step, position in the data, settings
 *                        manifest.json: size and CRC-32 of every other file, and of itself
 *   OUT/                 shows the newest model: the same files, hard-linked
 *
 * A checkpoint is written as 00000120.tmp, every file and the directory flushed, then renamed: the rename is the
 * commit. Checkpoints beyond those to keep are deleted only after that. One that was found damaged when a run was
 * resumed is kept for its owner as 00000120.damaged. Any number of ranks can go on from either kind. The ranks see one
 * file system; saving.h has them write together. */
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include <dirent.h>

#include "../data/tokenizer.h"
#include "comm.h"
#include "exact.h"

typedef struct {
    const char* out;  // the run's directory
    const TensorTable* table;
    floatX* params;
    Optimizer* optimizer;
    const char* tokenizer;  // directory whose tokenizer files go along; NULL if there is none
    int keep;               // newest checkpoints that stay; 0 = all
    int keep_every;         // those of steps that are multiples of it stay for good; 0 = none
    Context* ctx;
} Checkpoints;

#define CHECKPOINT_MANIFEST_LIMIT ((size_t)1 << 20)
enum { CHECKPOINT_NAME = 64, CHECKPOINT_WHY = 1024 };

// ---------------------------------------------------------------------------------------------------------
// Ranks; a `comm` of NULL is one that is alone

static inline int checkpoint_rank(const Comm* comm) { return comm ? comm->rank : 0; }
static inline int checkpoint_ranks(const Comm* comm) { return comm ? comm->size : 1; }

// Every rank's `mine`, of `bytes`, on all of them: [ranks][bytes].
static inline void checkpoint_gather(const Comm* comm, void* all, const void* mine, size_t bytes) {
    if (checkpoint_ranks(comm) > 1) comm_gather(comm, all, mine, bytes);
    else memcpy(all, mine, bytes);
}

// End all ranks at the same place, rank 0 with a line that says why.
__attribute__((format(printf, 3, 4), noreturn)) static inline void checkpoint_die(const Comm* comm, int status,
                                                                                  const char* format, ...) {
    va_list args;
    char line[CHECKPOINT_WHY];
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (checkpoint_ranks(comm) == 1) die(status, "%s", line);
    if (comm->rank == 0) fprintf(stderr, "error: %s\n", line);
    comm_exit(comm, status);
}

// ---------------------------------------------------------------------------------------------------------
// Directories

// Remove a directory and the plain files in it. Returns 0, or -1 with errno.
static inline int checkpoint_remove(const char* path) {
    DIR* dir = opendir(path);
    if (!dir) return errno == ENOENT ? 0 : -1;
    for (struct dirent* e = readdir(dir); e; e = readdir(dir))
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) unlinkat(dirfd(dir), e->d_name, 0);
    closedir(dir);
    return rmdir(path);
}

static inline int checkpoint_is_kind(const char* name, const char* kind) {
    size_t n = strlen(name), m = strlen(kind);
    return n > m && strcmp(name + n - m, kind) == 0;
}

typedef enum { COUNT_THEM, DELETE_THEM } CheckpointUse;

// Directories of OUT/ckpt whose names end with `kind`: ".tmp" or ".damaged". Returns their number.
static inline int checkpoint_of_kind(const char* out, const char* kind, CheckpointUse use) {
    char* path = xprintf("%s/ckpt", out);
    DIR* dir = opendir(path);
    int count = 0;
    for (struct dirent* e = dir ? readdir(dir) : NULL; e; e = readdir(dir)) {
        if (!checkpoint_is_kind(e->d_name, kind)) continue;
        char* found = xprintf("%s/%s", path, e->d_name);
        if (use == DELETE_THEM) checkpoint_remove(found);
        free(found);
        count++;
    }
    if (dir) closedir(dir);
    free(path);
    return count;
}

static inline int checkpoint_ascending(const void* a, const void* b) {
    int64_t x = *(const int64_t*)a, y = *(const int64_t*)b;
    return (x > y) - (x < y);
}

// The steps of the complete checkpoints in OUT/ckpt, ascending, into *steps (caller frees). Returns their number.
static inline int checkpoint_list(const char* out, int64_t** steps) {
    char* path = xprintf("%s/ckpt", out);
    DIR* dir = opendir(path);
    int count = 0, capacity = 16;
    *steps = (int64_t*)xmalloc((size_t)capacity * sizeof(int64_t));
    for (struct dirent* e = dir ? readdir(dir) : NULL; e; e = readdir(dir)) {
        size_t n = strlen(e->d_name);
        if (n < 8 || n > 18 || strspn(e->d_name, "0123456789") != n) continue;
        if (count == capacity) *steps = (int64_t*)xrealloc(*steps, (size_t)(capacity *= 2) * sizeof(int64_t));
        (*steps)[count++] = strtoll(e->d_name, NULL, 10);
    }
    if (dir) closedir(dir);
    free(path);
    qsort(*steps, (size_t)count, sizeof(int64_t), checkpoint_ascending);
    return count;
}

static inline char* checkpoint_path(const char* out, int64_t step) {
    return xprintf("%s/ckpt/%08lld", out, (long long)step);
}

// ---------------------------------------------------------------------------------------------------------
// Manifest

// Size and CRC-32 of a file, while other ranks may wait (comm NULL: there are none). Returns 0, or -1 with errno.
static inline int checkpoint_digest(const char* path, uint64_t* bytes, uint32_t* crc, const Comm* comm) {
    enum { CHUNK = 1 << 20 };
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    Crc32 table;
    crc32_init(&table);
    char* buffer = (char*)xmalloc(CHUNK);
    ssize_t got;
    *bytes = 0;
    *crc = 0;
    while ((got = read(fd, buffer, CHUNK)) > 0 || (got < 0 && errno == EINTR)) {
        if (got < 0) continue;
        *crc = crc32_update(&table, *crc, buffer, (size_t)got);
        *bytes += (uint64_t)got;
        if (comm) comm_progress(comm, 0);
    }
    int saved = errno;
    free(buffer);
    close(fd);
    errno = saved;
    return got < 0 ? -1 : 0;
}

static inline uint32_t checkpoint_text_crc(const char* text, size_t n) {
    Crc32 table;
    crc32_init(&table);
    return crc32_update(&table, 0, text, n);
}

// A file whose digest is known from writing it.
typedef struct {
    char name[CHECKPOINT_NAME];
    FileDigest digest;
} CheckpointFile;

// Take the digest of dir/name from those that are known, else by reading it. Returns 0, or -1 with errno.
static inline int checkpoint_find_digest(const char* dir, const char* name, const CheckpointFile* known, int count,
                                         FileDigest* digest) {
    for (int i = 0; i < count; i++) {
        if (strcmp(known[i].name, name) != 0) continue;
        *digest = known[i].digest;
        return 0;
    }
    char* path = xprintf("%s/%s", dir, name);
    int result = checkpoint_digest(path, &digest->bytes, &digest->crc, NULL), why = errno;
    free(path);
    errno = why;
    return result;
}

// Write `dir`/manifest.json over all files that are there. Its last line holds the CRC-32 of the bytes before that
// line, so that the manifest vouches for itself too. Returns 0, or -1 with errno.
static inline int checkpoint_write_manifest(const char* dir, const CheckpointFile* known, int count) {
    struct dirent** entries = NULL;
    int n = scandir(dir, &entries, NULL, alphasort), bad = n < 0;
    Text t = {NULL, 0, 0};
    text_printf(&t, "{\"files\": [");
    for (int i = 0, written = 0; i < n; i++) {
        FileDigest digest;
        if (!bad && entries[i]->d_name[0] != '.') {
            bad = checkpoint_find_digest(dir, entries[i]->d_name, known, count, &digest) != 0;
            if (!bad) {
                text_printf(&t, "%s\n  {\"name\": ", written++ ? "," : "");
                text_json_string(&t, entries[i]->d_name, strlen(entries[i]->d_name));
                text_printf(&t, ", \"bytes\": %llu, \"crc32\": \"%08x\"}", (unsigned long long)digest.bytes,
                            digest.crc);
            }
        }
        free(entries[i]);
    }
    free(entries);
    text_printf(&t, "],\n");
    text_printf(&t, "\"crc32\": \"%08x\"}\n", checkpoint_text_crc(t.text, t.length));
    char* path = xprintf("%s/manifest.json", dir);
    if (!bad) bad = write_file(path, t.text, t.length) != 0;
    int saved = errno;
    free(path);
    free(t.text);
    errno = saved;
    return bad ? -1 : 0;
}

// An open manifest.
typedef struct {
    char *path, *text;
    Json json;
    const JsonNode* files;
    uint32_t crc;  // of all of it: two ranks that see the same see the same checkpoint
} CheckpointManifest;

static inline void checkpoint_manifest_close(CheckpointManifest* m) {
    if (m->files) json_free(&m->json);
    free(m->text), free(m->path);
}

// Returns 0, or -1 and why not.
static inline int checkpoint_manifest_open(CheckpointManifest* m, const char* dir, char why[CHECKPOINT_WHY]) {
    const size_t last = strlen("\"crc32\": \"00000000\"}\n");
    struct stat st;
    size_t n;
    char line[32] = "", error[JSON_ERROR_SIZE];
    memset(m, 0, sizeof *m);
    m->path = xprintf("%s/manifest.json", dir);
    if (stat(m->path, &st) != 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size > CHECKPOINT_MANIFEST_LIMIT) {
        snprintf(why, CHECKPOINT_WHY, "%s: missing or damaged", m->path);
        return -1;
    }
    m->text = read_file(m->path, CHECKPOINT_MANIFEST_LIMIT, &n, FAILED);
    m->crc = checkpoint_text_crc(m->text, n);
    if (n > last) snprintf(line, sizeof line, "\"crc32\": \"%08x\"}\n", checkpoint_text_crc(m->text, n - last));
    if (n > last && strcmp(m->text + n - last, line) == 0 && json_parse(&m->json, m->text, n, error) == 0)
        m->files = json_get(m->json.root, "files");
    if (!m->files) snprintf(why, CHECKPOINT_WHY, "%s: damaged (its own checksum does not match)", m->path);
    return m->files ? 0 : -1;
}

// Whether a checkpoint has every file in its size, which is seen at once. That they are also undamaged is for
// checkpoint_verify() to say.
static inline int checkpoint_is_whole(const char* dir) {
    CheckpointManifest m;
    char why[CHECKPOINT_WHY];
    int ok = checkpoint_manifest_open(&m, dir, why) == 0;
    for (const JsonNode* f = ok ? m.files->first : NULL; f && ok; f = f->next) {
        struct stat st;
        char* file = xprintf("%s/%s", dir, json_get_string(f, "name", m.path));
        ok = stat(file, &st) == 0 && (int64_t)st.st_size == json_get_int(f, "bytes", m.path);
        free(file);
    }
    checkpoint_manifest_close(&m);
    return ok;
}

// What a rank found of a checkpoint.
typedef struct {
    int32_t sees, bad;
    uint32_t manifest;
    char why[CHECKPOINT_WHY];
} CheckpointFinding;

// Check this rank's share of a checkpoint's files, every `ranks`th, against its manifest.
static inline CheckpointFinding checkpoint_examine(const char* dir, const Comm* comm) {
    int rank = checkpoint_rank(comm), ranks = checkpoint_ranks(comm);
    CheckpointFinding found;
    CheckpointManifest m;
    memset(&found, 0, sizeof found);
    found.sees = is_directory(dir);
    found.bad = checkpoint_manifest_open(&m, dir, found.why) != 0;
    found.manifest = m.crc;
    int i = 0;
    for (const JsonNode* f = m.files ? m.files->first : NULL; f && !found.bad; f = f->next) {
        if (i++ % ranks != rank) continue;
        char *file = xprintf("%s/%s", dir, json_get_string(f, "name", m.path)), wanted[16];
        FileDigest digest = {0, 0};
        found.bad = 1;
        if (checkpoint_digest(file, &digest.bytes, &digest.crc, comm) != 0) {
            snprintf(found.why, CHECKPOINT_WHY, "%s: cannot be read: %s", file, strerror(errno));
        } else {
            snprintf(wanted, sizeof wanted, "%08x", digest.crc);
            found.bad = digest.bytes != (uint64_t)json_get_int(f, "bytes", m.path) ||
                        strcmp(wanted, json_get_string(f, "crc32", m.path)) != 0;
            if (found.bad)
                snprintf(found.why, CHECKPOINT_WHY, "%s: damaged (its size or checksum is not that of %s)", file,
                         m.path);
        }
        free(file);
    }
    checkpoint_manifest_close(&m);
    return found;
}

// Check every file of a checkpoint against its manifest, each rank some of them. Returns 0, or -1 after a warning that
// names the file, on every rank alike.
static inline int checkpoint_verify(const char* dir, const Comm* comm) {
    int ranks = checkpoint_ranks(comm), bad = 0;
    CheckpointFinding mine = checkpoint_examine(dir, comm);
    CheckpointFinding* all = (CheckpointFinding*)xmalloc((size_t)ranks * sizeof *all);
    checkpoint_gather(comm, all, &mine, sizeof mine);
    for (int r = 1; r < ranks; r++)
        if (all[0].sees && (!all[r].sees || all[r].manifest != all[0].manifest))
            checkpoint_die(
                comm, USAGE,
                "%s: rank %d does not see what rank 0 sees there; -o must be on a file system that all share", dir, r);
    for (int r = 0; r < ranks && !bad; r++) {
        bad = all[r].bad;
        if (bad && checkpoint_rank(comm) == 0) warn("%s; this checkpoint is not used", all[r].why);
    }
    free(all);
    return bad ? -1 : 0;
}

// Ends with USAGE where `out` is a run's that has no whole checkpoint: the command that asks to go on with it does not say
// what to begin anew, and the default model would take its place.
static inline void checkpoint_refuse_default(const char* out, const Comm* comm) {
    char* log = xprintf("%s/log.jsonl", out);
    if (file_exists(log))
        checkpoint_die(comm, USAGE,
                       "-y 1: the run in %s has no whole checkpoint; say with -e and -i what to begin anew, or choose "
                       "another -o",
                       out);
    free(log);
}

// The newest checkpoint of OUT that is whole; the damaged ones after it are named. Returns its directory (caller
// frees) and its step, or NULL if there is none; the same on every rank, as rank 0 sees it.
static inline char* checkpoint_find(const char* out, int64_t* step, const Comm* comm) {
    int64_t *steps = NULL, count = 0;
    char* found = NULL;
    if (checkpoint_rank(comm) == 0) count = checkpoint_list(out, &steps);
    if (checkpoint_ranks(comm) > 1) {
        comm_broadcast(comm, &count, sizeof count);
        if (!steps) steps = (int64_t*)xcalloc((size_t)count, sizeof *steps);
        comm_broadcast(comm, steps, (size_t)count * sizeof *steps);
    }
    for (int64_t i = count - 1; i >= 0 && !found; i--) {
        char* dir = checkpoint_path(out, steps[i]);
        if (checkpoint_verify(dir, comm) == 0) {
            found = dir;
            *step = steps[i];
        } else {
            free(dir);
        }
    }
    free(steps);
    return found;
}

// ---------------------------------------------------------------------------------------------------------
// Save and load

// Make OUT show the files of a checkpoint that make up the model. Each appears by a rename, so a reader never sees half
// a file. Returns 0, or -1 with errno.
static inline int checkpoint_publish(const char* out, const char* dir) {
    DIR* d = opendir(dir);
    int bad = !d;
    for (struct dirent* e = d ? readdir(d) : NULL; e && !bad; e = readdir(d)) {
        const char* name = e->d_name;
        if (name[0] == '.' || strncmp(name, "optimizer", strlen("optimizer")) == 0 ||
            strcmp(name, "trainer.json") == 0 || strcmp(name, "manifest.json") == 0)
            continue;
        char *from = xprintf("%s/%s", dir, name), *to = xprintf("%s/%s", out, name), *tmp = xprintf("%s.tmp", to);
        unlink(tmp);
        bad = link(from, tmp) != 0;
        // Not every file system knows hard links, and OUT/ckpt may be a link to another one.
        if (bad && (errno == EPERM || errno == EXDEV || errno == EOPNOTSUPP)) bad = copy_file(from, tmp) != 0;
        bad = bad || rename(tmp, to) != 0;
        int why = errno;
        unlink(tmp);  // rename() does nothing where both names already are the same file
        errno = why;
        free(from), free(to), free(tmp);
    }
    int saved = errno;
    if (d) closedir(d);
    errno = saved;
    return bad ? -1 : 0;
}

// Delete what -nk and -nm do not keep, now that `step` is saved. What is not whole does not count as kept. Failures leave
// files behind and harm nothing.
static inline void checkpoint_retire(const Checkpoints* c, int64_t step) {
    int64_t* steps;
    int count = checkpoint_list(c->out, &steps), whole = 0;
    while (count > 0 && steps[count - 1] > step) count--;
    for (int i = count - 1; i >= 0 && c->keep > 0; i--) {
        char *dir = checkpoint_path(c->out, steps[i]), *gone = xprintf("%s.tmp", dir);
        int stays = whole < c->keep || (c->keep_every > 0 && steps[i] % c->keep_every == 0);
        if (whole < c->keep) whole += checkpoint_is_whole(dir);
        // Renamed first: a checkpoint that is being deleted must not look complete.
        if (!stays) checkpoint_remove(gone);
        if (!stays && rename(dir, gone) == 0) checkpoint_remove(gone);
        free(dir), free(gone);
    }
    free(steps);
}

// What lies with the optimizer. Returns the number of parts.
static inline int checkpoint_optimizer_parts(const Checkpoints* c, TensorPart parts[3]) {
    const TensorPart all[] = {{"m.", c->optimizer->m, VIEW_REAL},
                              {"v.", c->optimizer->v, VIEW_REAL},
                              {"master.", c->optimizer->master, VIEW_REAL}};
    memcpy(parts, all, sizeof all);
    return c->optimizer->master ? 3 : 2;
}

// Put OUT in order when a run starts, before its first save: delete what a killed process left half written, set aside
// the checkpoints after `step`, which were all found damaged, and show the one that the run goes on from (NULL: none).
static inline void checkpoint_clean(const char* out, const char* checkpoint, int64_t step) {
    int64_t* steps;
    checkpoint_of_kind(out, ".tmp", DELETE_THEM);
    for (int i = checkpoint_list(out, &steps) - 1; i >= 0 && steps[i] > step; i--) {
        char *dir = checkpoint_path(out, steps[i]), *aside = xprintf("%s.damaged", dir);
        checkpoint_remove(aside);
        if (rename(dir, aside) == 0) printf("%s: is damaged; kept as %s\n", dir, aside);
        else warn("%s: is damaged and cannot be renamed: %s; move it away", dir, strerror(errno));
        free(dir), free(aside);
    }
    free(steps);
    if (checkpoint && checkpoint_publish(out, checkpoint) != 0)
        warn("%s: the model of %s could not be shown there: %s", out, checkpoint, strerror(errno));
}

// Delete every checkpoint of OUT.
static inline void checkpoint_delete_all(const char* out) {
    int64_t* steps;
    checkpoint_of_kind(out, ".damaged", DELETE_THEM);
    for (int i = checkpoint_list(out, &steps) - 1; i >= 0; i--) {
        char* dir = checkpoint_path(out, steps[i]);
        if (checkpoint_remove(dir) != 0) die(FAILED, "%s: cannot be deleted: %s", dir, strerror(errno));
        free(dir);
    }
    free(steps);
}

// ---------------------------------------------------------------------------------------------------------
// The optimizer's files

// The file of rank `rank` of `ranks`; of one that holds all of it where `sharded` is 0.
static inline void checkpoint_optimizer_name(char name[CHECKPOINT_NAME], int sharded, int rank, int ranks) {
    if (sharded) snprintf(name, CHECKPOINT_NAME, "optimizer-%05d-of-%05d.safetensors", rank, ranks);
    else snprintf(name, CHECKPOINT_NAME, "optimizer.safetensors");
}

// The number of shards that a directory's optimizer is in; 0 where it is whole. Ends with USAGE where there are the files
// of two.
static inline int checkpoint_shards(const char* dir) {
    int shards = -1;
    DIR* d = opendir(dir);
    if (!d) die(USAGE, "%s: cannot be read: %s", dir, strerror(errno));
    for (struct dirent* e = readdir(d); e; e = readdir(d)) {
        int rank, ranks = 0;
        char name[CHECKPOINT_NAME];
        int is_shard = sscanf(e->d_name, "optimizer-%5d-of-%5d", &rank, &ranks) == 2;
        checkpoint_optimizer_name(name, is_shard, is_shard ? rank : 0, ranks);
        if (strcmp(name, e->d_name) != 0) continue;
        if (shards >= 0 && shards != ranks)
            die(USAGE, "%s: holds %s beside another optimizer's files; one must go", dir, name);
        shards = ranks;
    }
    closedir(d);
    if (shards < 0) die(USAGE, "%s: optimizer.safetensors is missing", dir);
    return shards;
}

// Read a range of one part from shards, which must be those of the whole buffer one after the other.
static inline void checkpoint_read_shards(const Checkpoints* c, const char* dir, int shards, const TensorPart* part,
                                          FlatRange range) {
    char name[CHECKPOINT_NAME];
    HostView view = host_view_open(part->device, range.size, part->type);
    size_t at = 0;
    for (int r = 0; r < shards; r++) {
        SafeTensors file;
        checkpoint_optimizer_name(name, 1, r, shards);
        char* path = xprintf("%s/%s", dir, name);
        if (!file_exists(path)) die(USAGE, "%s: is missing; all %d shards are needed", path, shards);
        FlatRange held = tensors_open_shard(&file, path, c->table);
        if (held.size > 0 && held.begin != at)
            die(USAGE, "%s: begins at element %zu, where %zu comes next; it is not rank %d's shard", path, held.begin,
                at, r);
        at += held.size;
        tensors_read_shard(&file, held, part, range, view.values);
        safetensors_close(&file);
        free(path);
    }
    if (at != c->table->elements)
        die(USAGE, "%s: its %d shards end after %zu of %zu elements", dir, shards, at, c->table->elements);
    host_view_write(c->ctx, &view);
    host_view_close(&view);
}

// Whether a run has master weights cannot change on the way: taken from rounded weights they would be other ones.
static inline void checkpoint_check_master(const Checkpoints* c, const char* path) {
    SafeTensors file;
    char* name = xprintf("master.%s", c->table->tensors[0].name);
    safetensors_open(&file, path);
    int has = safetensors_find(&file, name) || safetensors_find(&file, "master"), wants = c->optimizer->master != NULL;
    if (has && !wants)
        die(USAGE, "%s: holds master weights, which this run has not; go on with -w 1 and the same build", path);
    if (wants && !has) die(USAGE, "%s: holds no master weights; go on with -w 0 and the same build", path);
    safetensors_close(&file);
    free(name);
}

// Read weights and this rank's range of the moments of a verified checkpoint, whichever ranks have written it. Of fixed
// parameters there are no moments, and of the master weights only `exact` is read, which others may leave NULL.
static inline void checkpoint_load(const Checkpoints* c, const ExactParameters* exact, const char* dir) {
    static const char* const all[] = {""};
    const FileRules other_parts = {NULL, all, 1};
    int shards = checkpoint_shards(dir);
    char name[CHECKPOINT_NAME];
    checkpoint_optimizer_name(name, shards > 0, 0, shards);
    char *model = xprintf("%s/model.safetensors", dir), *moments = xprintf("%s/%s", dir, name);
    const TensorPart weights = {"", c->params, VIEW_FLOATX};
    TensorPart parts[3];
    int count = checkpoint_optimizer_parts(c, parts);
    tensors_read(model, c->table, &weights, 1, NULL, NULL, c->ctx);
    if (file_exists(moments)) checkpoint_check_master(c, moments);
    for (int p = 0; p < count && shards; p++) checkpoint_read_shards(c, dir, shards, &parts[p], c->optimizer->shard);
    if (!shards) tensors_read_range(moments, c->table, parts, count, c->optimizer->shard, NULL, NULL, c->ctx);
    int reads_exact = c->table->fixed && c->optimizer->master && exact->copies;
    if (reads_exact && !shards) exact_read(exact, c->table, moments, "master.", &other_parts, c->ctx);
    for (int i = 0; reads_exact && shards && i < c->table->count; i++) {
        const Tensor* t = &c->table->tensors[i];
        const TensorPart part = {"master.", exact->copies + t->exact_offset, VIEW_REAL};
        const FlatRange range = {t->offset, t->size};
        if (t->exact) checkpoint_read_shards(c, dir, shards, &part, range);
    }
    free(model), free(moments);
}

#endif
