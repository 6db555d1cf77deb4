/* Find the largest token of a shard. Otherwise a vocabulary too small for the data would be noticed only at the first
 * such token, perhaps thousands of steps into a run. All threads read; the disk or the page cache is the limit. */
#ifndef LLMC_DATA_TOKEN_SCAN_H
#define LLMC_DATA_TOKEN_SCAN_H

#include "llmc/data/shards.h"

enum { SCAN_PIECE = 1 << 16 };  // bytes that a thread reads at once: they stay in its cache

typedef struct {
    uint32_t largest;
    uint64_t position;  // of the first occurrence of the largest token
} TokenScan;

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
    const uint64_t room = SCAN_PIECE / (uint64_t)file->width, pieces = (file->tokens + room - 1) / room;
    int failed = -1;  // errno
    s->largest = 0, s->position = file->tokens;
#pragma omp parallel for schedule(static)
    for (uint64_t i = 0; i < pieces; i++) {
        uint32_t tokens[SCAN_PIECE / sizeof(uint32_t)], largest = 0;
        uint64_t first = i * room;
        size_t n = (size_t)(file->tokens - first < room ? file->tokens - first : room), bytes = (size_t)file->width;
        int bad = pread_all(file->fd, tokens, n * bytes, SHARD_HEADER_BYTES + first * bytes) != 0, why = errno;
        if (!bad) largest = token_scan_largest(tokens, n, file->width);
#pragma omp critical
        {
            if (bad) failed = why;
            else if (largest > s->largest || (largest == s->largest && first < s->position)) {
                s->largest = largest;
                s->position = first + token_scan_find(tokens, n, file->width, largest);
            }
        }
    }
    if (failed >= 0) {
        errno = failed;
        die(FAILED, "%s: cannot be read: %s", file->path, pread_error());
    }
}

#endif
