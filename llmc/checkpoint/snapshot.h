/* A snapshot of device buffers, copied to the host while later work is launched, and a background thread that processes
 * it. The training loop pays only for the copy. On the GPU the copies are asynchronous, ordered on the stream, and go
 * to memory that is pinned once. On the CPU they are made immediately. */
#ifndef LLMC_CHECKPOINT_SNAPSHOT_H
#define LLMC_CHECKPOINT_SNAPSHOT_H

#include <pthread.h>

#include "llmc/base/thread.h"
#include "llmc/device/device.h"

enum { SNAPSHOT_BUFFERS = 5 };

// Zero-initialise it, then call snapshot_open().
typedef struct {
    void* copies[SNAPSHOT_BUFFERS];  // NULL: nothing to copy
    size_t bytes[SNAPSHOT_BUFFERS];
    int is_open;
#ifdef __CUDACC__
    cudaEvent_t begun, taken;
#endif
} Snapshot;

#ifdef __CUDACC__

static inline void* snapshot_alloc(size_t bytes) {
    void* p = NULL;
    if (cudaMallocHost(&p, bytes) == cudaSuccess) return p;
    cudaGetLastError();  // clear the error, so that no later call returns it
    return NULL;
}

static inline void snapshot_release(void* p) { cudaCheck(cudaFreeHost(p)); }

// Copy the sources as they are after everything launched so far. Later launches do not affect the copies.
static inline void snapshot_take(Snapshot* s, const void* const* sources, Context* ctx) {
    cudaCheck(cudaEventRecord(s->begun, ctx->stream));
    for (int i = 0; i < SNAPSHOT_BUFFERS; i++)
        if (s->copies[i])
            cudaCheck(cudaMemcpyAsync(s->copies[i], sources[i], s->bytes[i], cudaMemcpyDeviceToHost, ctx->stream));
    cudaCheck(cudaEventRecord(s->taken, ctx->stream));
}

// Wait until the copies are complete. Any thread may call this.
static inline void snapshot_wait(const Snapshot* s) { cudaCheck(cudaEventSynchronize(s->taken)); }

// How long the copies delayed later launches. Call snapshot_wait() first.
static inline double snapshot_seconds(const Snapshot* s) {
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, s->begun, s->taken));
    return 1e-3 * (double)ms;
}

static inline int snapshot_device(void) {
    int device;
    cudaCheck(cudaGetDevice(&device));
    return device;
}

// Let the calling thread use the GPU `device`, which another thread got from snapshot_device().
static inline void snapshot_use_device(int device) { cudaCheck(cudaSetDevice(device)); }

#else

static inline void* snapshot_alloc(size_t bytes) { return malloc(bytes); }

static inline void snapshot_release(void* p) { free(p); }

static inline void snapshot_take(Snapshot* s, const void* const* sources, Context* ctx) {
    (void)ctx;
    for (int i = 0; i < SNAPSHOT_BUFFERS; i++)
        if (s->copies[i]) memcpy(s->copies[i], sources[i], s->bytes[i]);
}

static inline void snapshot_wait(const Snapshot* s) { (void)s; }

// Always 0: the copies are synchronous, so the caller has already waited for them.
static inline double snapshot_seconds(const Snapshot* s) {
    (void)s;
    return 0;
}

static inline int snapshot_device(void) { return 0; }

// One thread only: a second OpenMP team would take cores from training.
static inline void snapshot_use_device(int device) {
    (void)device;
    device_set_threads(1);
}

#endif

static inline void snapshot_close(Snapshot* s) {
    for (int i = 0; i < SNAPSHOT_BUFFERS; i++)
        if (s->copies[i]) snapshot_release(s->copies[i]);
#ifdef __CUDACC__
    if (s->is_open) cudaCheck(cudaEventDestroy(s->begun)), cudaCheck(cudaEventDestroy(s->taken));
#endif
    memset(s, 0, sizeof *s);
}

// Allocate host buffers of the given sizes (0: none). All `ranks` of a machine together take at most half of the host's
// available memory. The rest is for the page cache while files are written to disk. Returns 0, or -1 if there is not
// enough memory.
static inline int snapshot_open(Snapshot* s, const size_t bytes[SNAPSHOT_BUFFERS], int ranks) {
    size_t total = 0;
    int bad = 0;
    memset(s, 0, sizeof *s);
    for (int i = 0; i < SNAPSHOT_BUFFERS; i++) total += bytes[i];
    if (total > host_memory_available() / 2 / (size_t)ranks) return -1;
    for (int i = 0; i < SNAPSHOT_BUFFERS && !bad; i++) {
        s->bytes[i] = bytes[i];
        if (bytes[i]) s->copies[i] = snapshot_alloc(bytes[i]);
        bad = bytes[i] && !s->copies[i];
    }
    if (bad) {
        snapshot_close(s);
        return -1;
    }
#ifdef __CUDACC__
    cudaCheck(cudaEventCreate(&s->begun)), cudaCheck(cudaEventCreate(&s->taken));
#endif
    s->is_open = 1;
    return 0;
}

// ---------------------------------------------------------------------------------------------------------
// Background thread

// Zero-initialise it, then call background_start().
typedef struct {
    pthread_t thread;
    void (*body)(void*);
    void* argument;
    int device;
    int is_running;  // the thread must be joined
    int is_done;     // read it with background_is_done()
} Background;

static inline void* background_main(void* argument) {
    Background* b = (Background*)argument;
    snapshot_use_device(b->device);
    b->body(b->argument);
    __atomic_store_n(&b->is_done, 1, __ATOMIC_RELEASE);
    return NULL;
}

// Run `body(argument)` in a background thread. If no thread can be created, run it synchronously.
static inline void background_start(Background* b, void (*body)(void*), void* argument) {
    b->body = body, b->argument = argument, b->device = snapshot_device(), b->is_done = 0;
    b->is_running = thread_start(&b->thread, background_main, b) == 0;
    if (b->is_running) return;
    body(argument);
    b->is_done = 1;
}

static inline int background_is_done(const Background* b) { return __atomic_load_n(&b->is_done, __ATOMIC_ACQUIRE); }

// Wait until the thread ends.
static inline void background_join(Background* b) {
    if (b->is_running) pthread_join(b->thread, NULL);
    b->is_running = 0;
}

#endif
