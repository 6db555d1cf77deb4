/* The directories of a run: OUT, with a copy of the newest model's files, and OUT/ckpt, with the checkpoints. Functions
 * list, keep and remove them.
 *
 * manifest.json of a checkpoint holds the size and CRC-32 of every file. Its last line holds the CRC-32 of the bytes
 * before it, so that it also verifies itself. */
#ifndef LLMC_CHECKPOINT_DIRECTORY_H
#define LLMC_CHECKPOINT_DIRECTORY_H

#include <dirent.h>

#include "llmc/checkpoint/checkpoint.h"

// ---------------------------------------------------------------------------------------------------------
// The manifest

#define CHECKPOINT_MANIFEST "manifest.json"
#define CHECKPOINT_MANIFEST_LIMIT ((size_t)1 << 20)

// Size and CRC-32 of a file. Returns 0, or -1 with errno.
static inline int checkpoint_digest(const char* path, uint64_t* bytes, uint32_t* crc) {
    enum { CHUNK = 1 << 20 };
    int fd = open_file(path);
    *bytes = 0, *crc = 0;
    if (fd < 0) return -1;
    Crc32 table;
    crc32_init(&table);
    char* buffer = (char*)xmalloc(CHUNK);
    ssize_t got;
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

// A file whose digest is known from writing it.
typedef struct {
    char name[CHECKPOINT_NAME];
    FileDigest digest;
} CheckpointFile;

// Write `dir`/manifest.json, over all files in `dir`, of which the `known` ones must be there. Returns 0, or -1 with
// errno.
static inline int checkpoint_write_manifest(const char* dir, const CheckpointFile* known, int count) {
    struct dirent** entries = NULL;
    int n = scandir(dir, &entries, NULL, alphasort), why = n < 0 ? errno : 0, left = count;
    Text t = {NULL, 0, 0};
    Path path = path_of("%s/%s", dir, CHECKPOINT_MANIFEST);
    text_printf(&t, "{\"files\": [");
    for (int i = 0, written = 0; i < n; free(entries[i++])) {
        const char* name = entries[i]->d_name;
        FileDigest digest;
        int k = 0;
        if (name[0] == '.' || strcmp(name, CHECKPOINT_MANIFEST) == 0) continue;
        while (k < count && strcmp(known[k].name, name) != 0) k++;
        if (k < count) digest = known[k].digest, left--;
        else {
            Path file = path_of("%s/%s", dir, name);
            if (checkpoint_digest(file.text, &digest.bytes, &digest.crc) != 0 && !why) why = errno;
        }
        text_printf(&t, "%s\n  {\"name\": ", written++ ? "," : "");
        text_json_string(&t, name, strlen(name));
        text_printf(&t, ", \"bytes\": %llu, \"crc32\": \"%08x\"}", (unsigned long long)digest.bytes, digest.crc);
    }
    if (left > 0 && !why) why = ENOENT;  // another rank's file, on a disk that is not shared
    text_printf(&t, "],\n");
    text_printf(&t, "\"crc32\": \"%08x\"}\n", crc32_of(0, t.text, t.length));
    if (!why && write_file(path.text, t.text, t.length) != 0) why = errno;
    free(entries), free(t.text);
    errno = why;
    return why ? -1 : 0;
}

// An open manifest.
typedef struct {
    char *path, *text;
    Json json;
    const JsonNode* files;
    uint32_t crc;  // of the whole manifest: ranks with the same CRC see the same checkpoint
} CheckpointManifest;

static inline void checkpoint_manifest_close(CheckpointManifest* m) {
    if (m->files) json_free(&m->json);
    free(m->text), free(m->path);
}

// Open a manifest. Returns 0, or -1 and the reason in `why`.
static inline int checkpoint_manifest_open(CheckpointManifest* m, const char* dir, char why[CHECKPOINT_WHY]) {
    const size_t last = strlen("\"crc32\": \"00000000\"}\n");
    struct stat st;
    size_t n;
    char line[32] = "", error[JSON_ERROR_SIZE];
    memset(m, 0, sizeof *m);
    m->path = xprintf("%s/%s", dir, CHECKPOINT_MANIFEST);
    if (stat(m->path, &st) != 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size > CHECKPOINT_MANIFEST_LIMIT) {
        snprintf(why, CHECKPOINT_WHY, "%s: missing or damaged", m->path);
        return -1;
    }
    m->text = read_file(m->path, CHECKPOINT_MANIFEST_LIMIT, &n, FAILED);
    m->crc = crc32_of(0, m->text, n);
    if (n > last) snprintf(line, sizeof line, "\"crc32\": \"%08x\"}\n", crc32_of(0, m->text, n - last));
    if (n > last && strcmp(m->text + n - last, line) == 0 && json_parse(&m->json, m->text, n, error) == 0)
        m->files = json_get(m->json.root, "files");
    if (!m->files) snprintf(why, CHECKPOINT_WHY, "%s: damaged (its own checksum does not match)", m->path);
    return m->files ? 0 : -1;
}

// Whether a checkpoint has every file with its recorded size. This is quick; checkpoint_verify() also checks the
// contents.
static inline int checkpoint_is_whole(const char* dir) {
    CheckpointManifest m;
    char why[CHECKPOINT_WHY];
    int ok = checkpoint_manifest_open(&m, dir, why) == 0;
    for (const JsonNode* f = ok ? m.files->first : NULL; f && ok; f = f->next) {
        struct stat st;
        Path file = path_of("%s/%s", dir, json_get_string(f, "name", m.path));
        ok = stat(file.text, &st) == 0 && (int64_t)st.st_size == json_get_int(f, "bytes", m.path);
    }
    checkpoint_manifest_close(&m);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------
// Checkpoints in OUT/ckpt

// Create a directory that checkpoint_remove() may remove: it has a manifest from the start.
static inline int checkpoint_make_directory(const char* path) {
    Path manifest = path_of("%s/%s", path, CHECKPOINT_MANIFEST);
    int fd = mkdir(path, 0777) == 0 ? open(manifest.text, O_WRONLY | O_CREAT | O_CLOEXEC, 0666) : -1;
    if (fd >= 0) close(fd);
    return fd < 0 ? -1 : 0;
}

// Whether `path` may be removed: a directory, no link to one, that holds a manifest, a trainer.json (a damaged
// checkpoint may lack the manifest) or nothing. A user's own is not. True if there is nothing.
static inline int checkpoint_is_own(const char* path) {
    struct stat st;
    if (lstat(path, &st) != 0) return errno == ENOENT;
    DIR* dir = S_ISDIR(st.st_mode) ? opendir(path) : NULL;
    int is_own = 0, entries = 0;
    for (struct dirent* e = dir ? readdir(dir) : NULL; e; e = readdir(dir), entries++)
        is_own = is_own || strcmp(e->d_name, CHECKPOINT_MANIFEST) == 0 || strcmp(e->d_name, "trainer.json") == 0;
    if (dir) closedir(dir);
    return dir && (is_own || entries == 2);  // "." and ".."
}

// Remove a directory below OUT and its plain files, the manifest last, in case of a kill. Returns 0, or -1 with errno.
static inline int checkpoint_remove(const char* path) {
    DIR* dir = opendir(path);
    if (!dir) return errno == ENOENT ? 0 : -1;
    int is_own = checkpoint_is_own(path);
    for (struct dirent* e = readdir(dir); e && is_own; e = readdir(dir))
        if (strcmp(e->d_name, CHECKPOINT_MANIFEST) != 0 && strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            unlinkat(dirfd(dir), e->d_name, 0);
    if (is_own) unlinkat(dirfd(dir), CHECKPOINT_MANIFEST, 0);
    closedir(dir);
    if (!is_own) errno = EPERM;
    return is_own ? rmdir(path) : -1;
}

// The step in the name of a checkpoint's directory, which ends with `kind`: "", ".tmp" or ".damaged"; -1 if it is not
// such a name.
static inline int64_t checkpoint_step(const char* name, const char* kind) {
    char given[64];
    int64_t step = strtoll(name, NULL, 10);
    snprintf(given, sizeof given, "%08lld%s", (long long)step, kind);
    return step >= 0 && strcmp(name, given) == 0 ? step : -1;
}

static inline int checkpoint_ascending(const void* a, const void* b) {
    int64_t x = *(const int64_t*)a, y = *(const int64_t*)b;
    return (x > y) - (x < y);
}

// The steps of the directories of a kind in OUT/ckpt, ascending, into *steps (caller frees). The kinds are "", the
// complete checkpoints, ".tmp" and ".damaged". Returns their number.
static inline int checkpoint_list(const char* out, const char* kind, int64_t** steps) {
    Path path = path_of("%s/ckpt", out);
    DIR* dir = opendir(path.text);
    int count = 0;
    size_t capacity = 0;
    *steps = (int64_t*)array_reserve(NULL, &capacity, 1, sizeof(int64_t));
    for (struct dirent* e = dir ? readdir(dir) : NULL; e; e = readdir(dir)) {
        int64_t step = checkpoint_step(e->d_name, kind);
        if (step < 0) continue;
        *steps = (int64_t*)array_reserve(*steps, &capacity, (size_t)count + 1, sizeof(int64_t));
        (*steps)[count++] = step;
    }
    if (dir) closedir(dir);
    qsort(*steps, (size_t)count, sizeof(int64_t), checkpoint_ascending);
    return count;
}

static inline char* checkpoint_path(const char* out, int64_t step) {
    return xprintf("%s/ckpt/%08lld", out, (long long)step);
}

// End with USAGE if `path` is something that the run would remove, though no run of this program has written it.
static inline void checkpoint_refuse_foreign(const char* path) {
    if (!checkpoint_is_own(path))
        die(USAGE,
            "%s: cannot be deleted: no run of this program has written it; move it elsewhere, or choose another -o",
            path);
}

enum { REFUSE_FOREIGN, DELETE_THEM };

// Look at, or delete, the directories of a kind in OUT/ckpt.
static inline void checkpoint_of_kind(const char* out, const char* kind, int use) {
    int64_t* steps;
    for (int i = checkpoint_list(out, kind, &steps) - 1; i >= 0; i--) {
        Path dir = path_of("%s/ckpt/%08lld%s", out, (long long)steps[i], kind);
        if (use == REFUSE_FOREIGN) checkpoint_refuse_foreign(dir.text);
        else if (checkpoint_remove(dir.text) != 0 && !*kind)
            die(FAILED, "%s: cannot be deleted: %s", dir.text, strerror(errno));
    }
    free(steps);
}

// ---------------------------------------------------------------------------------------------------------
// OUT

// Before the first step: create OUT and check that checkpoints can be written there.
static inline void run_directory_prepare(const char* out) {
    Path path = path_of("%s/ckpt", out);
    if (make_directories(path.text) != 0 || access(path.text, W_OK) != 0)
        die(errno == ENOSPC ? FAILED : USAGE, "%s: cannot be written: %s; give another directory with -o", path.text,
            strerror(errno));
}

// Refuse to replace a model in OUT that is not from a checkpoint there, because this program has not written it.
static inline void run_directory_refuse_foreign(const char* out) {
    static const char* const names[] = {"model.safetensors", "config.json"};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        Path path = path_of("%s/%s", out, names[i]);
        if (file_exists(path.text))
            die(USAGE,
                "%s: belongs to a model that is not from a run of this program; choose another -o, or --overwrite 1 "
                "(without -y) replaces it",
                path.text);
    }
}

// Whether OUT has a user's own README.md: one without the line that marks our cards, or one that cannot be read.
static inline int checkpoint_has_users_card(const char* out) {
    char text[4096], *path = xprintf("%s/%s", out, CHECKPOINT_CARD);
    int fd = open_file(path), is_there = fd >= 0 || errno != ENOENT;
    free(path);
    if (fd < 0) return is_there;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = '\0';
    return !strstr(text, CHECKPOINT_CARD_MARKER);
}

// Copy the model's files from a checkpoint to OUT. They are not linked, because an edit of a linked file would change
// the checkpoint. Each copy appears by a rename, so a reader never sees half a file. Returns 0, or -1 with errno.
static inline int checkpoint_publish(const char* out, const char* dir) {
    DIR* listing = opendir(dir);
    int bad = !listing;
    for (struct dirent* e = listing ? readdir(listing) : NULL; e && !bad; e = readdir(listing)) {
        const char* name = e->d_name;
        if (name[0] == '.' || strncmp(name, "optimizer", strlen("optimizer")) == 0 ||
            strcmp(name, "trainer.json") == 0 || strcmp(name, CHECKPOINT_MANIFEST) == 0)
            continue;
        if (strcmp(name, CHECKPOINT_CARD) == 0 && checkpoint_has_users_card(out)) continue;
        Path from = path_of("%s/%s", dir, name), to = path_of("%s/%s", out, name), tmp = path_of("%s.tmp", to.text);
        unlink(tmp.text);  // left by a killed run; older versions linked the checkpoint's file
        bad = copy_file(from.text, tmp.text) != 0 || rename(tmp.text, to.text) != 0;
        int why = errno;
        if (bad) unlink(tmp.text);
        errno = why;
    }
    bad = bad || sync_directory(out) != 0;
    int saved = errno;
    if (listing) closedir(listing);
    errno = saved;
    return bad ? -1 : 0;
}

// Delete a checkpoint, unless it is not the run's own. A failure only leaves files behind.
static inline void checkpoint_delete(const char* dir) {
    Path gone = path_of("%s.tmp", dir);
    int is_own = checkpoint_is_own(dir);
    if (is_own) checkpoint_remove(gone.text);
    // Renamed first: a checkpoint that is being deleted must not look complete.
    if (is_own && rename(dir, gone.text) == 0) checkpoint_remove(gone.text);
}

// After `step` was saved: delete the checkpoints that -nk, -nm and --keep-best do not keep. Incomplete checkpoints do
// not count for -nk.
static inline void checkpoint_retire(const Checkpoints* c, int64_t step) {
    int64_t* steps;
    int count = checkpoint_list(c->out, "", &steps), whole = 0;
    while (count > 0 && steps[count - 1] > step) count--;
    for (int i = count - 1; i >= 0 && c->keep > 0; i--) {
        char* dir = checkpoint_path(c->out, steps[i]);
        int is_kept = (c->keep_every > 0 && steps[i] % c->keep_every == 0) || (c->best > 0 && steps[i] == c->best);
        int stays = whole < c->keep || is_kept;
        if (whole < c->keep) whole += checkpoint_is_whole(dir);
        if (!stays) checkpoint_delete(dir);
        free(dir);
    }
    free(steps);
}

// Clean OUT when a run starts, before its first save: delete files that a killed process left half written, rename the
// checkpoints after `step`, which are all damaged, and copy the model of the resumed `checkpoint` (NULL: none).
static inline void checkpoint_clean(const char* out, const char* checkpoint, int64_t step) {
    int64_t* steps;
    checkpoint_of_kind(out, ".tmp", DELETE_THEM);
    for (int i = checkpoint_list(out, "", &steps) - 1; i >= 0 && steps[i] > step; i--) {
        char *dir = checkpoint_path(out, steps[i]), *aside = xprintf("%s.damaged", dir);
        checkpoint_remove(aside);
        if (rename(dir, aside) == 0) printf("%s: is damaged; kept as %s\n", dir, aside);
        else warn("%s: is damaged and cannot be renamed: %s; move it elsewhere", dir, strerror(errno));
        free(dir), free(aside);
    }
    free(steps);
    if (checkpoint && checkpoint_publish(out, checkpoint) != 0)
        warn("%s: the model of %s could not be copied there: %s", out, checkpoint, strerror(errno));
}

#endif
