/* A moment of some buffers, copied to the host while what comes after it is launched, and a thread that does something with
 * it: the training loop pays for the copy only. On the GPU the copies take their place among the launches, in memory that
 * is pinned once; on the CPU they are made at once. */
#ifndef LLMC_SNAPSHOT_H
#define LLMC_SNAPSHOT_H

#include <pthread.h>
#include <signal.h>

#include "device.h"

enum { SNAPSHOT_BUFFERS = 4 };

// Zero-initialise it; snapshot_open().
typedef struct {
    void* copies[SNAPSHOT_BUFFERS];  // NULL where there is nothing to copy
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
    cudaGetLastError();  // it is no error of a later call
    return NULL;
}

static inline void snapshot_release(void* p) { cudaCheck(cudaFreeHost(p)); }

static inline void snapshot_open_clock(Snapshot* s) {
    cudaCheck(cudaEventCreate(&s->begun));
    cudaCheck(cudaEventCreate(&s->taken));
}

static inline void snapshot_close_clock(Snapshot* s) {
    cudaCheck(cudaEventDestroy(s->begun));
    cudaCheck(cudaEventDestroy(s->taken));
}

// Copy the sources as they are after everything launched so far; what is launched later changes nothing.
static inline void snapshot_take(Snapshot* s, const void* const* sources, Context* ctx) {
    cudaCheck(cudaEventRecord(s->begun, ctx->stream));
    for (int i = 0; i < SNAPSHOT_BUFFERS; i++)
        if (s->copies[i])
            cudaCheck(cudaMemcpyAsync(s->copies[i], sources[i], s->bytes[i], cudaMemcpyDeviceToHost, ctx->stream));
    cudaCheck(cudaEventRecord(s->taken, ctx->stream));
}

// Wait, in any thread, until the copies are there.
static inline void snapshot_wait(const Snapshot* s) { cudaCheck(cudaEventSynchronize(s->taken)); }

// How long the launches that came after it were held up, once it has been waited for.
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

// The thread that calls it may use the GPU that `device` names, as snapshot_device() said in another one.
static inline void snapshot_use_device(int device) { cudaCheck(cudaSetDevice(device)); }

#else

static inline void* snapshot_alloc(size_t bytes) { return malloc(bytes); }

static inline void snapshot_release(void* p) { free(p); }

static inline void snapshot_open_clock(Snapshot* s) { (void)s; }

static inline void snapshot_close_clock(Snapshot* s) { (void)s; }

static inline void snapshot_take(Snapshot* s, const void* const* sources, Context* ctx) {
    (void)ctx;
    for (int i = 0; i < SNAPSHOT_BUFFERS; i++)
        if (s->copies[i]) memcpy(s->copies[i], sources[i], s->bytes[i]);
}

static inline void snapshot_wait(const Snapshot* s) { (void)s; }

// The host waited for the copies itself.
static inline double snapshot_seconds(const Snapshot* s) {
    (void)s;
    return 0;
}

static inline int snapshot_device(void) { return 0; }

// A second team of threads would only take the cores from the one that trains.
static inline void snapshot_use_device(int device) {
    (void)device;
    device_set_threads(1);
}

#endif

static inline void snapshot_close(Snapshot* s) {
    for (int i = 0; i < SNAPSHOT_BUFFERS; i++)
        if (s->copies[i]) snapshot_release(s->copies[i]);
    if (s->is_open) snapshot_close_clock(s);
    memset(s, 0, sizeof *s);
}

// Room for buffers of so many bytes each (0: none). All `ranks` of a machine together take no more than half of what the
// host has free: the files' pages on their way to the disk need the rest. Returns 0, or -1 where there is not so much.
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
    snapshot_open_clock(s);
    s->is_open = 1;
    return 0;
}

// ---------------------------------------------------------------------------------------------------------
// The thread

// Zero-initialise it; background_start().
typedef struct {
    pthread_t thread;
    void (*body)(void*);
    void* argument;
    int device;
    int is_running;  // to be joined
    int is_done;     // read through background_is_done()
} Background;

static inline void* background_main(void* argument) {
    Background* b = (Background*)argument;
    snapshot_use_device(b->device);
    b->body(b->argument);
    __atomic_store_n(&b->is_done, 1, __ATOMIC_RELEASE);
    return NULL;
}

// Have `body(argument)` run beside this thread; where no thread can be had, here and now.
static inline void background_start(Background* b, void (*body)(void*), void* argument) {
    sigset_t all, before;
    b->body = body, b->argument = argument, b->device = snapshot_device(), b->is_done = 0;
    // Signals are for the thread that trains.
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    b->is_running = pthread_create(&b->thread, NULL, background_main, b) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (b->is_running) return;
    body(argument);
    b->is_done = 1;
}

static inline int background_is_done(const Background* b) { return __atomic_load_n(&b->is_done, __ATOMIC_ACQUIRE); }

// Wait for its end.
static inline void background_join(Background* b) {
    if (b->is_running) pthread_join(b->thread, NULL);
    b->is_running = 0;
}

#endif
