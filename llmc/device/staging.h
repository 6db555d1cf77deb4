/* Data on its way from the host to the device, ahead of the launches that read it: it is made in pinned memory, so its copy
 * takes its place among the launches and the host goes on at once. Of two buffers one is filled while the other one's copy
 * may still wait for its turn; the host is held up only where it is two copies ahead. */
#ifndef LLMC_STAGING_H
#define LLMC_STAGING_H

#include "scope.h"

enum { STAGING_BUFFERS = 2 };

typedef struct {
    void* buffers[STAGING_BUFFERS];
    size_t bytes;  // of each
    int next;      // the buffer to fill
#ifdef __CUDACC__
    cudaEvent_t sent[STAGING_BUFFERS];  // its copy has left the buffer
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

// After the copies.
static inline void staging_close(Staging* s) {
    for (int i = 0; i < STAGING_BUFFERS; i++) {
        cudaCheck(cudaEventSynchronize(s->sent[i]));
        cudaCheck(cudaEventDestroy(s->sent[i]));
        cudaCheck(cudaFreeHost(s->buffers[i]));
    }
}

// The buffer to fill.
static inline void* staging_begin(Staging* s) {
    cudaCheck(cudaEventSynchronize(s->sent[s->next]));
    return s->buffers[s->next];
}

// All that is to be sent from it is on its way.
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

#endif
