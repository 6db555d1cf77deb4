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
}

#endif
