/* Double-buffered uploads of data, ahead of the launches that read it. The data is produced in pinned memory, so its
 * copy is asynchronous, ordered on the stream, and the host continues immediately. The host fills one buffer while the
 * copy from the other may still be pending. It waits only if it is two copies ahead. */
#ifndef LLMC_DEVICE_STAGING_H
#define LLMC_DEVICE_STAGING_H

#include "llmc/device/scope.h"

enum { STAGING_BUFFERS = 2 };

typedef struct {
    void* buffers[STAGING_BUFFERS];
    size_t bytes;  // of each
    int next;      // the buffer to fill
#ifdef __CUDACC__
    cudaEvent_t sent[STAGING_BUFFERS];  // recorded after the buffer's copy
#endif
} Staging;

#ifdef __CUDACC__

static inline void staging_open(Staging* s, size_t bytes) {
    s->bytes = bytes;
    s->next = 0;
    for (int i = 0; i < STAGING_BUFFERS; i++) {
        cudaCheck(cudaMallocHost(&s->buffers[i], bytes));
        cudaCheck(cudaEventCreateWithFlags(&s->sent[i], cudaEventDisableTiming));
    }
}

// Waits for pending copies.
static inline void staging_close(Staging* s) {
    for (int i = 0; i < STAGING_BUFFERS; i++) {
        cudaCheck(cudaEventSynchronize(s->sent[i]));
        cudaCheck(cudaEventDestroy(s->sent[i]));
        cudaCheck(cudaFreeHost(s->buffers[i]));
    }
}

// Returns the buffer to fill, and waits if its previous copy is still pending.
static inline void* staging_begin(Staging* s) {
    cudaCheck(cudaEventSynchronize(s->sent[s->next]));
    return s->buffers[s->next];
}

// Call this after all copies from the buffer were launched.
static inline void staging_end(Staging* s, Context* ctx) {
    cudaCheck(cudaEventRecord(s->sent[s->next], ctx->stream));
    s->next = (s->next + 1) % STAGING_BUFFERS;
}

#else

static inline void staging_open(Staging* s, size_t bytes) {
    s->bytes = bytes;
    s->next = 0;
    for (int i = 0; i < STAGING_BUFFERS; i++) s->buffers[i] = xmalloc(bytes);
}

static inline void staging_close(Staging* s) {
    for (int i = 0; i < STAGING_BUFFERS; i++) free(s->buffers[i]);
}

static inline void* staging_begin(Staging* s) { return s->buffers[s->next]; }

static inline void staging_end(Staging* s, Context* ctx) {
    (void)ctx;
    s->next = (s->next + 1) % STAGING_BUFFERS;
}

#endif

// Upload data that may change or be freed as soon as this returns. `bytes` must not exceed the size of a buffer.
static inline void staging_upload(Staging* s, void* device, const void* host, size_t bytes, Context* ctx) {
    CHECK(bytes <= s->bytes);
    void* buffer = memcpy(staging_begin(s), host, bytes);
    device_upload(ctx, device, buffer, bytes);
    staging_end(s, ctx);
}

#endif
