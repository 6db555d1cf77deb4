/* Write a safetensors file: create; metadata and add for all; begin; append the bytes in the order of add; finish.
 *
 * The writer reports errors: a full disk must not end a run. After its first error it does nothing more, so it is
 * enough to check the result of safetensors_writer_finish(). */
#ifndef LLMC_DATA_SAFETENSORS_WRITER_H
#define LLMC_DATA_SAFETENSORS_WRITER_H

#include "llmc/data/safetensors.h"

enum { SAFETENSORS_WRITE = 1 << 20, SAFETENSORS_FLUSH = 32 << 20 };  // bytes

typedef struct {
    int fd;
    int error;  // errno of the first failure, 0 so far
    Text metadata, entries;
    uint64_t expected, written;  // bytes of data
    uint64_t bytes;              // of the whole file up to here
    uint64_t flushed;            // of these, being written to the disk
    uint32_t crc;                // of the whole file up to here
    Crc32 table;
} SafeTensorsWriter;

static inline int safetensors_writer_result(SafeTensorsWriter* w) {
    errno = w->error;
    return w->error ? -1 : 0;
}

// Create or replace `path`. Like all of these functions, returns 0, or -1 with errno.
static inline int safetensors_writer_create(SafeTensorsWriter* w, const char* path) {
    memset(w, 0, sizeof(*w));
    crc32_init(&w->table);
    w->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (w->fd < 0) w->error = errno;
    return safetensors_writer_result(w);
}

static inline void safetensors_writer_metadata(SafeTensorsWriter* w, const char* key, const char* value) {
    if (w->metadata.length) text_append(&w->metadata, ",", 1);
    text_json_string(&w->metadata, key, strlen(key));
    text_append(&w->metadata, ":", 1);
    text_json_string(&w->metadata, value, strlen(value));
}

static inline void safetensors_writer_add(SafeTensorsWriter* w, const char* name, const char* dtype, int ndim,
                                          const uint64_t* shape) {
    uint64_t bytes = (uint64_t)safetensors_element_size(dtype);
    CHECK(bytes > 0 && ndim >= 0 && ndim <= SAFETENSORS_MAX_DIMS);
    text_append(&w->entries, ",", 1);
    text_json_string(&w->entries, name, strlen(name));
    text_printf(&w->entries, ":{\"dtype\":\"%s\",\"shape\":[", dtype);
    for (int i = 0; i < ndim; i++) {
        text_printf(&w->entries, "%s%llu", i ? "," : "", (unsigned long long)shape[i]);
        bytes *= shape[i];
    }
    text_printf(&w->entries, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)w->expected,
                (unsigned long long)(w->expected + bytes));
    w->expected += bytes;
}

// Write in pieces: the checksum finds each piece in the cache, and the disk starts before the fsync at the end. Only
// that fsync confirms that everything was written.
static inline void safetensors_writer_write(SafeTensorsWriter* w, const void* bytes, size_t n) {
    const char* p = (const char*)bytes;
    for (size_t m; n && !w->error; p += m, n -= m) {
        m = min_size(n, SAFETENSORS_WRITE);
        if (write_all(w->fd, p, m) != 0) {
            w->error = errno;
            return;
        }
        w->crc = crc32_update(&w->table, w->crc, p, m);
        w->bytes += m;
        if (w->bytes - w->flushed < SAFETENSORS_FLUSH) continue;
        sync_file_range(w->fd, (off_t)w->flushed, (off_t)(w->bytes - w->flushed), SYNC_FILE_RANGE_WRITE);
        w->flushed = w->bytes;
    }
}

// Write the header; spaces make its length a multiple of 8, so that the data is aligned.
static inline int safetensors_writer_begin(SafeTensorsWriter* w) {
    Text header = {NULL, 0, 0};
    unsigned char length[8];
    text_append(&header, "{", 1);
    if (w->metadata.length) text_printf(&header, "\"__metadata__\":{%s}", w->metadata.text);
    size_t skip = w->metadata.length ? 0 : 1;  // the comma before the first entry
    if (w->entries.length) text_append(&header, w->entries.text + skip, w->entries.length - skip);
    text_append(&header, "}", 1);
    while (header.length % 8) text_append(&header, " ", 1);
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)((uint64_t)header.length >> (8 * i));
    safetensors_writer_write(w, length, sizeof(length));
    safetensors_writer_write(w, header.text, header.length);
    free(header.text);
    return safetensors_writer_result(w);
}

static inline int safetensors_writer_append(SafeTensorsWriter* w, const void* bytes, size_t n) {
    safetensors_writer_write(w, bytes, n);
    w->written += n;
    return safetensors_writer_result(w);
}

// Flush to the disk and close. Call it after an error, too. w->crc and w->bytes are then those of the file.
static inline int safetensors_writer_finish(SafeTensorsWriter* w) {
    if (!w->error) CHECK(w->written == w->expected);
    if (!w->error && fsync(w->fd) != 0) w->error = errno;
    if (w->fd >= 0 && close(w->fd) != 0 && !w->error) w->error = errno;
    w->fd = -1;
    free(w->metadata.text);
    free(w->entries.text);
    memset(&w->metadata, 0, sizeof(w->metadata));
    memset(&w->entries, 0, sizeof(w->entries));
    return safetensors_writer_result(w);
}

#endif
