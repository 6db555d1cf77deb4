/* manifest.json of a checkpoint: size and CRC-32 of every file. Its last line holds the CRC-32 of the preceding bytes,
 * so that it also verifies itself. */
#ifndef LLMC_CHECKPOINT_MANIFEST_H
#define LLMC_CHECKPOINT_MANIFEST_H

#include <dirent.h>

#include "llmc/checkpoint/checkpoint.h"

#define CHECKPOINT_MANIFEST "manifest.json"
#define CHECKPOINT_MANIFEST_LIMIT ((size_t)1 << 20)

// Size and CRC-32 of a file. Returns 0, or -1 with errno.
static inline int checkpoint_digest(const char* path, uint64_t* bytes, uint32_t* crc) {
    enum { CHUNK = 1 << 20 };
    int fd = open_file(path);
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

// A file whose digest is known from writing it.
typedef struct {
    char name[CHECKPOINT_NAME];
    FileDigest digest;
} CheckpointFile;

// The digest of dir/name: from `known`, else by reading the file. Returns 0, or -1 with errno.
static inline int checkpoint_find_digest(const char* dir, const char* name, const CheckpointFile* known, int count,
                                         FileDigest* digest) {
    for (int i = 0; i < count; i++) {
        if (strcmp(known[i].name, name) != 0) continue;
        *digest = known[i].digest;
        return 0;
    }
    char* path = xprintf("%s/%s", dir, name);
    int result = checkpoint_digest(path, &digest->bytes, &digest->crc), why = errno;
    free(path);
    errno = why;
    return result;
}

// Write `dir`/manifest.json, over all files in `dir`. Returns 0, or -1 with errno.
static inline int checkpoint_write_manifest(const char* dir, const CheckpointFile* known, int count) {
    struct dirent** entries = NULL;
    int n = scandir(dir, &entries, NULL, alphasort), bad = n < 0;
    Text t = {NULL, 0, 0};
    text_printf(&t, "{\"files\": [");
    for (int i = 0, written = 0; i < n; i++) {
        FileDigest digest;
        if (!bad && entries[i]->d_name[0] != '.' && strcmp(entries[i]->d_name, CHECKPOINT_MANIFEST) != 0) {
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
    text_printf(&t, "\"crc32\": \"%08x\"}\n", crc32_of(0, t.text, t.length));
    char* path = xprintf("%s/%s", dir, CHECKPOINT_MANIFEST);
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
        char* file = xprintf("%s/%s", dir, json_get_string(f, "name", m.path));
        ok = stat(file, &st) == 0 && (int64_t)st.st_size == json_get_int(f, "bytes", m.path);
        free(file);
    }
    checkpoint_manifest_close(&m);
    return ok;
}

#endif
