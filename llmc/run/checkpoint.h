/* Checkpoints: complete or absent, whatever kills the process, and checked before they are used.
 *
 *   OUT/ckpt/00000120/   config.json, model.safetensors, tokenizer files: a Hugging Face directory
 *                        optimizer.safetensors: the moments, and the master weights where there are any
 *                        trainer.json: step, position in the data, settings
 *                        manifest.json: size and CRC-32 of every other file, and of itself
 *   OUT/                 shows the newest model: the same files, hard-linked
 *
 * A checkpoint is written as 00000120.tmp, every file and the directory flushed, then renamed: the rename is the
 * commit. Checkpoints beyond those to keep are deleted only after that. One that was found damaged when a run was
 * resumed is kept for its owner as 00000120.damaged. */
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include <dirent.h>

#include "../data/tokenizer.h"
#include "model_files.h"
#include "optimizer.h"

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

// Size and CRC-32 of a file. Returns 0, or -1 with errno.
static inline int checkpoint_digest(const char* path, uint64_t* bytes, uint32_t* crc) {
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

// Write `dir`/manifest.json over all files that are there. Its last line holds the CRC-32 of the bytes before that
// line, so that the manifest vouches for itself too. Returns 0, or -1 with errno.
static inline int checkpoint_write_manifest(const char* dir) {
    struct dirent** entries = NULL;
    int n = scandir(dir, &entries, NULL, alphasort), bad = n < 0;
    Text t = {NULL, 0, 0};
    text_printf(&t, "{\"files\": [");
    for (int i = 0, written = 0; i < n; i++) {
        uint64_t bytes;
        uint32_t crc;
        if (!bad && entries[i]->d_name[0] != '.') {
            char* path = xprintf("%s/%s", dir, entries[i]->d_name);
            if (checkpoint_digest(path, &bytes, &crc) != 0) bad = 1;
            else {
                text_printf(&t, "%s\n  {\"name\": ", written++ ? "," : "");
                text_json_string(&t, entries[i]->d_name, strlen(entries[i]->d_name));
                text_printf(&t, ", \"bytes\": %llu, \"crc32\": \"%08x\"}", (unsigned long long)bytes, crc);
            }
            free(path);
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

// Check every file of a checkpoint against its manifest. Returns 0, or -1 after a warning that names the file.
static inline int checkpoint_verify(const char* dir) {
    char* path = xprintf("%s/manifest.json", dir);
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size > CHECKPOINT_MANIFEST_LIMIT) {
        warn("%s: missing or damaged; this checkpoint is not used", path);
        free(path);
        return -1;
    }
    size_t n;
    char* text = read_file(path, CHECKPOINT_MANIFEST_LIMIT, &n, FAILED);
    char line[32] = "", error[JSON_ERROR_SIZE];
    const size_t last = strlen("\"crc32\": \"00000000\"}\n");
    if (n > last) snprintf(line, sizeof line, "\"crc32\": \"%08x\"}\n", checkpoint_text_crc(text, n - last));
    Json json;
    int ok = n > last && strcmp(text + n - last, line) == 0 && json_parse(&json, text, n, error) == 0;
    if (!ok) warn("%s: damaged (its own checksum does not match); this checkpoint is not used", path);
    const JsonNode* files = ok ? json_get(json.root, "files") : NULL;
    for (const JsonNode* f = files ? files->first : NULL; f && ok; f = f->next) {
        const char* name = json_get_string(f, "name", path);
        char* file = xprintf("%s/%s", dir, name);
        char wanted[16];
        uint64_t bytes = 0;
        uint32_t crc = 0;
        if (checkpoint_digest(file, &bytes, &crc) != 0) {
            warn("%s: cannot be read: %s; this checkpoint is not used", file, strerror(errno));
            ok = 0;
        }
        snprintf(wanted, sizeof wanted, "%08x", crc);
        if (ok && (bytes != (uint64_t)json_get_int(f, "bytes", path) ||
                   strcmp(wanted, json_get_string(f, "crc32", path)) != 0)) {
            warn("%s: damaged (its size or checksum is not that of %s); this checkpoint is not used", file, path);
            ok = 0;
        }
        free(file);
    }
    if (text && (ok || files)) json_free(&json);
    free(text);
    free(path);
    return ok ? 0 : -1;
}

// The newest checkpoint of OUT that is whole; the damaged ones after it are named. Returns its directory (caller
// frees) and its step, or NULL if there is none.
static inline char* checkpoint_find(const char* out, int64_t* step) {
    int64_t* steps;
    char* found = NULL;
    for (int i = checkpoint_list(out, &steps) - 1; i >= 0 && !found; i--) {
        char* dir = checkpoint_path(out, steps[i]);
        if (checkpoint_verify(dir) == 0) {
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
        if (name[0] == '.' || strcmp(name, "optimizer.safetensors") == 0 || strcmp(name, "trainer.json") == 0 ||
            strcmp(name, "manifest.json") == 0)
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

// Delete what -nk and -nm do not keep, now that `step` is saved. Failures leave files behind and harm nothing.
static inline void checkpoint_retire(const Checkpoints* c, int64_t step) {
    int64_t* steps;
    int count = checkpoint_list(c->out, &steps);
    while (count > 0 && steps[count - 1] > step) count--;
    for (int i = 0; i < count; i++) {
        if (c->keep == 0 || i >= count - c->keep || (c->keep_every > 0 && steps[i] % c->keep_every == 0)) continue;
        char *dir = checkpoint_path(c->out, steps[i]), *gone = xprintf("%s.tmp", dir);
        // Renamed first: a checkpoint that is being deleted must not look complete.
        checkpoint_remove(gone);
        if (rename(dir, gone) == 0) checkpoint_remove(gone);
        free(dir), free(gone);
    }
    free(steps);
}

static inline int checkpoint_write_text(const char* dir, const char* name, const char* text) {
    char* path = xprintf("%s/%s", dir, name);
    int result = write_file(path, text, strlen(text));
    free(path);
    return result;
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

// Save the state after `step` steps. Returns 0, or -1 after a warning that says what failed; then no earlier checkpoint
// was touched and no incomplete one is visible.
static inline int checkpoint_save(const Checkpoints* c, int64_t step, const char* config_json,
                                  const char* trainer_json) {
    char *parent = xprintf("%s/ckpt", c->out), *dir = checkpoint_path(c->out, step), *tmp = xprintf("%s.tmp", dir);
    char *model = xprintf("%s/model.safetensors", tmp), *moments = xprintf("%s/optimizer.safetensors", tmp);
    const TensorPart weights = {"", c->params, VIEW_FLOATX};
    TensorPart parts[3];
    int count = checkpoint_optimizer_parts(c, parts);
    const char* doing = "create its directory";
    int bad = checkpoint_remove(tmp) != 0 || make_directories(tmp) != 0;
    if (!bad) doing = "write model.safetensors", bad = tensors_write(model, c->table, &weights, 1, c->ctx) != 0;
    if (!bad) doing = "write optimizer.safetensors", bad = tensors_write(moments, c->table, parts, count, c->ctx) != 0;
    if (!bad) doing = "write config.json", bad = checkpoint_write_text(tmp, "config.json", config_json) != 0;
    if (!bad) doing = "write trainer.json", bad = checkpoint_write_text(tmp, "trainer.json", trainer_json) != 0;
    if (!bad && c->tokenizer) doing = "copy the tokenizer", bad = tokenizer_copy_files(c->tokenizer, tmp) != 0;
    if (!bad) doing = "write manifest.json", bad = checkpoint_write_manifest(tmp) != 0;
    if (!bad) doing = "flush its directory", bad = sync_directory(tmp) != 0;
    // A directory of that name is a damaged checkpoint that checkpoint_clean() could not rename.
    if (!bad) doing = "replace an earlier one", bad = checkpoint_remove(dir) != 0;
    if (!bad) doing = "rename it", bad = rename(tmp, dir) != 0 || sync_directory(parent) != 0;
    if (bad) {
        warn("%s: the checkpoint could not be saved (%s: %s); the checkpoints before it are untouched", dir, doing,
             strerror(errno));
        checkpoint_remove(tmp);
    } else {
        if (checkpoint_publish(c->out, dir) != 0)
            warn("%s: the newest model could not be shown there: %s; it is in %s", c->out, strerror(errno), dir);
        checkpoint_retire(c, step);
    }
    free(parent), free(dir), free(tmp), free(model), free(moments);
    return bad ? -1 : 0;
}

// Whether a run has master weights cannot change on the way: taken from rounded weights they would be other ones.
static inline void checkpoint_check_master(const Checkpoints* c, const char* path) {
    SafeTensors file;
    char* name = xprintf("master.%s", c->table->tensors[0].name);
    safetensors_open(&file, path);
    int has = safetensors_find(&file, name) != NULL, wants = c->optimizer->master != NULL;
    if (has && !wants)
        die(USAGE, "%s: holds master weights, which this run has not; go on with -w 1 and the same build", path);
    if (wants && !has) die(USAGE, "%s: holds no master weights; go on with -w 0 and the same build", path);
    safetensors_close(&file);
    free(name);
}

// Read weights and moments of a verified checkpoint.
static inline void checkpoint_load(const Checkpoints* c, const char* dir) {
    char *model = xprintf("%s/model.safetensors", dir), *moments = xprintf("%s/optimizer.safetensors", dir);
    const TensorPart weights = {"", c->params, VIEW_FLOATX};
    TensorPart parts[3];
    checkpoint_check_master(c, moments);
    tensors_read(model, c->table, &weights, 1, NULL, NULL, c->ctx);
    tensors_read(moments, c->table, parts, checkpoint_optimizer_parts(c, parts), NULL, NULL, c->ctx);
    free(model), free(moments);
}

#endif
