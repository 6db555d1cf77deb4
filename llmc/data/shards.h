/* Token shards: flat files of token ids, as llm.c writes them.
 *
 *   256 x int32   header: [0] magic, [1] version, [2] count (low 32 bits), [3] count (high 32 bits), [4] whether there
 *                 is a mask, [5] row length, zeros
 *   count tokens  uint16 (magic 20240520, version 1) or uint32 (magic 20240801, version 7), little-endian
 *   mask          if [4] is 1: (count + 7) / 8 bytes; bit i % 8 of byte i / 8: token i counts as a target
 *
 * [4] and [5] are zero in llm.c's files: all tokens are targets. With a row length, documents are packed so that none
 * crosses a multiple of it. dev/data/prepare_chat.py sets both, so that only answers count for the loss. The count is
 * an int32 in llm.c and [3] is zero there; the high half extends it to files of any size. A data set is a glob of such
 * files, read in the order of their names with pread, without file positions or mappings. So any number of threads may
 * read, and a disk error is a message instead of a signal. */
#ifndef LLMC_DATA_SHARDS_H
#define LLMC_DATA_SHARDS_H

#include <glob.h>
#include <sys/resource.h>

#include "llmc/base/util.h"

enum {
    SHARD_HEADER_INTS = 256,
    SHARD_HEADER_BYTES = 1024,
    SHARD_MAGIC_UINT16 = 20240520,
    SHARD_VERSION_UINT16 = 1,
    SHARD_MAGIC_UINT32 = 20240801,
    SHARD_VERSION_UINT32 = 7,
    SHARD_MAGIC_EVALUATION = 20240522,
    SHARD_FINGERPRINT_BYTES = 65536
};

// The first error while reading. A thread that reads ahead does not end the program, but reports it here.
typedef struct {
    int status;
    char* message;  // NULL: nothing
} ReadError;

typedef struct {
    char* path;
    int fd;
    int width;        // bytes of a token: 2 or 4
    uint64_t tokens;  // in this file
    int has_mask;     // not all tokens are targets
    int row;          // no document crosses a multiple of this; 0: documents are anywhere
} Shard;

typedef struct {
    char* pattern;
    int count;
    uint64_t tokens;  // in all files
    Shard* shard;     // [count] sorted by path
} Shards;

// Store an error for read_error_end(), unless there is one already. With `e` NULL, end the program.
__attribute__((format(printf, 3, 4))) static inline void read_failed(ReadError* e, int status, const char* format,
                                                                     ...) {
    va_list args;
    char* message = NULL;
    if (e && e->message) return;
    va_start(args, format);
    int n = vasprintf(&message, format, args);
    va_end(args);
    if (n < 0) die(FAILED, "out of memory while formatting a string");
    if (!e) die(status, "%s", message);
    e->status = status;
    e->message = message;
}

// If there was an error, end the program as the reader would have.
static inline void read_error_end(const ReadError* e) {
    if (e->message) die(e->status, "%s", e->message);
}

// Open one file and read its header [SHARD_HEADER_INTS] and its size. `kind` is what the file should be. Copies `path`.
static inline Shard shard_begin(const char* path, int32_t* header, uint64_t* size, const char* kind) {
    Shard s;
    memset(&s, 0, sizeof(s));
    s.path = xprintf("%s", path);
    s.fd = open_input(path, size, kind, USAGE);
    if (*size == 0) die(USAGE, "%s: is empty; prepare the data again", path);
    if (*size < SHARD_HEADER_BYTES)
        die(USAGE, "%s: %llu bytes are too few for the header of %d bytes; it is truncated or not a %s", path,
            (unsigned long long)*size, (int)SHARD_HEADER_BYTES, kind);
    read_input(s.fd, path, header, SHARD_HEADER_BYTES, 0);
    return s;
}

// Open one file and check its header against its size.
static inline Shard shard_open(const char* path) {
    int32_t header[SHARD_HEADER_INTS];
    uint64_t size;
    Shard s = shard_begin(path, header, &size, "token shard");

    int version = 0;
    if (header[0] == SHARD_MAGIC_UINT16) s.width = 2, version = SHARD_VERSION_UINT16;
    if (header[0] == SHARD_MAGIC_UINT32) s.width = 4, version = SHARD_VERSION_UINT32;
    if (header[0] == SHARD_MAGIC_EVALUATION)
        die(USAGE, "%s: is a multiple-choice evaluation set (magic %d), not a token shard; give .bin files of tokens",
            path, (int)header[0]);
    if (s.width == 0)
        die(USAGE,
            "%s: is not a token shard: its magic number is %d, not %d (uint16) or %d (uint32); make shards with "
            "dev/data/prepare_gpt2.py",
            path, (int)header[0], (int)SHARD_MAGIC_UINT16, (int)SHARD_MAGIC_UINT32);
    if (header[1] != version)
        die(USAGE,
            "%s: token shard of version %d, but only version %d is supported; make it again with "
            "dev/data/prepare_gpt2.py",
            path, (int)header[1], version);

    s.tokens = (uint64_t)(uint32_t)header[3] << 32 | (uint32_t)header[2];
    s.has_mask = header[4], s.row = header[5];
    if (s.has_mask < 0 || s.has_mask > 1 || s.row < 0)
        die(USAGE, "%s: its header has the mask %d and the row length %d; the file is damaged or of a later version",
            path, s.has_mask, s.row);
    uint64_t present = size - SHARD_HEADER_BYTES, width = (uint64_t)s.width;
    if (s.has_mask) {
        uint64_t mask = present < s.tokens ? present : s.tokens / 8 + (s.tokens % 8 > 0);
        present -= mask < present ? mask : present;
    }
    if (s.tokens != present / width || present % width != 0)
        die(USAGE, "%s: its header gives %llu tokens of %d bytes, but %llu bytes follow it; the file is %s", path,
            (unsigned long long)s.tokens, s.width, (unsigned long long)present,
            s.tokens > present / width ? "truncated, copy or make it again" : "damaged, make it again");
    if (s.tokens == 0) die(USAGE, "%s: contains no tokens; prepare the data again or remove the file", path);
    return s;
}

// Open every file that `pattern` (a shell glob) matches, or the file with exactly that name, with `open_one`.
static inline void shards_open_with(Shards* s, const char* pattern, Shard (*open_one)(const char* path)) {
    glob_t found;
    struct rlimit limit;
    int is_name = file_exists(pattern), result = is_name ? 0 : glob(pattern, 0, NULL, &found);
    if (result == GLOB_NOMATCH)
        die(USAGE, "%s: no file matches; check the path, or make the data first (dev/data/)", pattern);
    if (result != 0)
        die(FAILED, "%s: the directory cannot be searched: %s", pattern, errno ? strerror(errno) : "out of memory");
    s->pattern = xprintf("%s", pattern);
    s->count = is_name ? 1 : (int)found.gl_pathc;
    s->tokens = 0;
    s->shard = (Shard*)xcalloc((size_t)s->count, sizeof(Shard));
    // All files stay open: allow as many as the system does.
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) limit.rlim_cur = limit.rlim_max, setrlimit(RLIMIT_NOFILE, &limit);
    for (int i = 0; i < s->count; i++) {
        s->shard[i] = open_one(is_name ? pattern : found.gl_pathv[i]);
        s->tokens += s->shard[i].tokens;
    }
    if (!is_name) globfree(&found);
}

// Ends with USAGE at the first invalid file.
static inline void shards_open(Shards* s, const char* pattern) { shards_open_with(s, pattern, shard_open); }

static inline void shards_close(Shards* s) {
    for (int i = 0; i < s->count; i++) {
        close(s->shard[i].fd);
        free(s->shard[i].path);
    }
    free(s->shard);
    free(s->pattern);
    memset(s, 0, sizeof(*s));
}

// Read tokens offset .. offset + n - 1 of one shard into out [n]. Ids of 2^31 or more become negative. If reading
// fails, `error` is set and out is zeros; with `error` NULL the program ends. Readers built on this do the same.
static inline void shards_read(const Shards* s, int shard, uint64_t offset, size_t n, int* out, ReadError* error) {
    const Shard* file = &s->shard[shard];
    CHECK(offset <= file->tokens && n <= file->tokens - offset);
    size_t width = (size_t)file->width;
    // Narrow tokens go to the buffer's upper half and are widened from its start: the write never overtakes.
    char* raw = (char*)out + (sizeof(int) - width) * n;
    if (pread_all(file->fd, raw, n * width, SHARD_HEADER_BYTES + offset * width) != 0) {
        read_failed(error, FAILED, "%s: cannot be read at token %llu: %s", file->path, (unsigned long long)offset,
                    pread_error());
        memset(out, 0, n * sizeof(int));
        return;
    }
    if (width == 2) {
        for (size_t i = 0; i < n; i++) {
            uint16_t token;
            memcpy(&token, raw + 2 * i, sizeof(token));
            out[i] = token;
        }
    }
}

// The bytes of the mask that cover n > 0 tokens from `offset` on, of a shard that has one (caller frees). The bit of
// token i is shard_mask_bit(mask, offset, i). If reading fails, they are zeros, as in shards_read().
static inline unsigned char* shards_read_mask(const Shards* s, int shard, uint64_t offset, size_t n, ReadError* error) {
    const Shard* file = &s->shard[shard];
    CHECK(file->has_mask && offset <= file->tokens && n <= file->tokens - offset);
    size_t bytes = (size_t)((offset + n - 1) / 8 - offset / 8 + 1);
    unsigned char* mask = (unsigned char*)xmalloc(bytes);
    if (pread_all(file->fd, mask, bytes, SHARD_HEADER_BYTES + file->tokens * (uint64_t)file->width + offset / 8) != 0) {
        read_failed(error, FAILED, "%s: its mask cannot be read at token %llu: %s", file->path,
                    (unsigned long long)offset, pread_error());
        memset(mask, 0, bytes);
    }
    return mask;
}

// Whether token offset + i counts as a target, by the bytes from shards_read_mask().
static inline int shard_mask_bit(const unsigned char* mask, uint64_t offset, size_t i) {
    size_t bit = (size_t)(offset % 8) + i;
    return mask[bit / 8] >> bit % 8 & 1;
}

// CRC-32 of a shard's count and width and of its file's first and last 64 KiB, continued from `crc`.
static inline uint32_t shard_fingerprint(const Shard* file, uint32_t crc) {
    Crc32 table;
    crc32_init(&table);
    uint64_t mask = file->has_mask ? file->tokens / 8 + (file->tokens % 8 > 0) : 0;
    uint64_t size = SHARD_HEADER_BYTES + file->tokens * (uint64_t)file->width + mask;
    uint64_t identity[2] = {file->tokens, (uint64_t)file->width};
    size_t n = size < SHARD_FINGERPRINT_BYTES ? (size_t)size : (size_t)SHARD_FINGERPRINT_BYTES;
    char* bytes = (char*)xmalloc(n);
    crc = crc32_update(&table, crc, identity, sizeof(identity));
    for (int end = 0; end < 2; end++) {
        read_input(file->fd, file->path, bytes, n, end ? size - n : 0);
        crc = crc32_update(&table, crc, bytes, n);
    }
    free(bytes);
    return crc;
}

// A number that identifies a data set: the CRC of the fingerprints of its shards. It does not depend on names, so data
// may move. A resumed run compares it with the one in its checkpoint.
static inline uint32_t shards_fingerprint(const Shards* s) {
    uint32_t crc = 0;
    for (int i = 0; i < s->count; i++) crc = shard_fingerprint(&s->shard[i], crc);
    return crc;
}

#endif
