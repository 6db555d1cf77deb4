/* Find the largest token of a shard. Otherwise a vocabulary too small for the data would be noticed only at the first
 * such token, perhaps thousands of steps into a run. All threads read; the disk or the page cache is the limit.
 *
 * The result of a scan is kept as a line of text for each shard: size in bytes, modification time in nanoseconds,
 * fingerprint, largest token, position of its first occurrence. A shard with the same first three is not read again. */
#ifndef LLMC_DATA_LM_TOKEN_SCAN_H
#define LLMC_DATA_LM_TOKEN_SCAN_H

#include "llmc/data/files/shards.h"

enum { SCAN_PIECE = 1 << 16 };  // bytes that a thread reads at once: they stay in its cache

typedef struct {
    uint64_t bytes;  // of the file
    int64_t time;    // modification time, in ns
    uint32_t fingerprint;
    uint32_t largest;
    uint64_t position;  // of the first occurrence of the largest token
    int is_known;       // the last two are set
} TokenScan;

// Everything except the largest token.
static inline TokenScan token_scan_begin(const Shard* file) {
    struct stat st;
    TokenScan s = {.fingerprint = shard_fingerprint(file, 0)};
    if ((file->fd >= 0 ? fstat(file->fd, &st) : stat(file->path, &st)) != 0)
        die(FAILED, "%s: cannot be read: %s", file->path, strerror(errno));
    s.bytes = (uint64_t)st.st_size;
    s.time = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    return s;
}

// The largest of n tokens of `width` bytes.
static inline uint32_t token_scan_largest(const void* tokens, size_t n, int width) {
    const uint16_t* narrow = (const uint16_t*)tokens;
    const uint32_t* wide = (const uint32_t*)tokens;
    uint16_t most = 0;  // as narrow as the tokens, for more lanes in a vector
    uint32_t largest = 0;
    if (width == 4)
        for (size_t i = 0; i < n; i++) largest = wide[i] > largest ? wide[i] : largest;
    else
        for (size_t i = 0; i < n; i++) most = narrow[i] > most ? narrow[i] : most;
    return width == 4 ? largest : most;
}

// The index of the first `token` among n; it must occur.
static inline size_t token_scan_find(const void* tokens, size_t n, int width, uint32_t token) {
    size_t i = 0;
    while (i + 1 < n && (width == 4 ? ((const uint32_t*)tokens)[i] : ((const uint16_t*)tokens)[i]) != token) i++;
    return i;
}

// Read the whole shard.
static inline void token_scan_read(TokenScan* s, const Shard* file) {
    enum { AT_ONCE = 4096 };  // pieces between two reports of progress: other ranks may be waiting
    const uint64_t room = SCAN_PIECE / (uint64_t)file->width, pieces = (file->tokens + room - 1) / room;
    int failed = -1;  // errno
    s->largest = 0, s->position = file->tokens;
    for (uint64_t begin = 0; begin < pieces && failed < 0; begin += AT_ONCE) {
        const int count = (int)min_size(pieces - begin, AT_ONCE);
#pragma omp parallel for schedule(static)
        for (int i = 0; i < count; i++) {
            uint32_t tokens[SCAN_PIECE / sizeof(uint32_t)], largest = 0;
            uint64_t first = (begin + (uint64_t)i) * room, position = 0;
            size_t n = (size_t)(file->tokens - first < room ? file->tokens - first : room);
            int bad = shard_pread(file, tokens, n * (size_t)file->width,
                                  SHARD_HEADER_BYTES + first * (uint64_t)file->width) != 0,
                why = errno;
            if (!bad) largest = token_scan_largest(tokens, n, file->width);
#pragma omp critical
            {
                if (bad) failed = why;
                if (!bad && (largest > s->largest || (largest == s->largest && first < s->position))) {
                    position = first + token_scan_find(tokens, n, file->width, largest);
                    s->largest = largest, s->position = position;
                }
            }
        }
    }
    if (failed >= 0)
        die(FAILED, "%s: cannot be read: %s", file->path,
            failed ? strerror(failed) : "the file became shorter while it was in use");
    s->is_known = 1;
}

static inline void token_scan_write(Text* t, const TokenScan* s) {
    text_printf(t, "%llu %lld %08x %u %llu\n", (unsigned long long)s->bytes, (long long)s->time, s->fingerprint,
                s->largest, (unsigned long long)s->position);
}

// Look the shard up among lines of token_scan_write(). Damaged lines match no shard.
static inline void token_scan_recall(TokenScan* s, const char* lines) {
    char* key = xprintf("%llu %lld %08x ", (unsigned long long)s->bytes, (long long)s->time, s->fingerprint);
    const size_t n = strlen(key);
    for (const char* line = lines; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        unsigned largest;
        unsigned long long position;
        char end;
        if (strncmp(line, key, n) != 0 || sscanf(line + n, "%10u %20llu%c", &largest, &position, &end) != 3) continue;
        if (end != '\n') continue;
        s->largest = largest, s->position = position, s->is_known = 1;
    }
    free(key);
}

#endif
