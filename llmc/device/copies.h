/* Copies between host and device memory that need more than device_upload() and device_download(): data uploaded ahead
 * of the launches that read it (Staging), a few numbers that the host reads later (Readback), and the values of a buffer
 * in full precision (HostView). */
#ifndef LLMC_DEVICE_COPIES_H
#define LLMC_DEVICE_COPIES_H

#include "llmc/device/scope.h"

// ---------------------------------------------------------------------------------------------------------
// Staging: double-buffered uploads. The data is produced in pinned memory, so its copy is asynchronous, ordered on the
// stream, and the host continues immediately. The host fills one buffer while the copy from the other may still be
// pending. It waits only if it is two copies ahead.

enum { STAGING_BUFFERS = 2 };

typedef struct {
    void* buffers[STAGING_BUFFERS];
    size_t bytes;  // of each
    int next;      // the buffer to fill
#ifdef __CUDACC__
    cudaEvent_t sent[STAGING_BUFFERS];  // recorded after the buffer's copy
#endif
} Staging;

static inline void staging_open(Staging* s, size_t bytes) {
    s->bytes = bytes;
    s->next = 0;
    for (int i = 0; i < STAGING_BUFFERS; i++) {
#ifdef __CUDACC__
        cudaCheck(cudaMallocHost(&s->buffers[i], bytes));
        cudaCheck(cudaEventCreateWithFlags(&s->sent[i], cudaEventDisableTiming));
#else
        s->buffers[i] = xmalloc(bytes);
#endif
    }
}

// Waits for pending copies.
static inline void staging_close(Staging* s) {
    for (int i = 0; i < STAGING_BUFFERS; i++) {
#ifdef __CUDACC__
        cudaCheck(cudaEventSynchronize(s->sent[i]));
        cudaCheck(cudaEventDestroy(s->sent[i]));
        cudaCheck(cudaFreeHost(s->buffers[i]));
#else
        free(s->buffers[i]);
#endif
    }
}

// Returns the buffer to fill, and waits if its previous copy is still pending.
static inline void* staging_begin(Staging* s) {
#ifdef __CUDACC__
    cudaCheck(cudaEventSynchronize(s->sent[s->next]));
#endif
    return s->buffers[s->next];
}

// Call this after all copies from the buffer were launched.
static inline void staging_end(Staging* s, Context* ctx) {
#ifdef __CUDACC__
    cudaCheck(cudaEventRecord(s->sent[s->next], ctx->stream));
#endif
    (void)ctx;
    s->next = (s->next + 1) % STAGING_BUFFERS;
}

// Upload data that may change or be freed as soon as this returns. `bytes` must not exceed the size of a buffer.
static inline void staging_upload(Staging* s, void* device, const void* host, size_t bytes, Context* ctx) {
    CHECK(bytes <= s->bytes);
    void* buffer = memcpy(staging_begin(s), host, bytes);
    device_upload(ctx, device, buffer, bytes);
    staging_end(s, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Readback: asynchronous copies of a few numbers to the host, ordered after everything launched before them. The host
// waits only when it needs the values: it can read a step's loss while the next step runs.

// Number of later steps that may be launched before a step's results are read. On the CPU it is 0, because a launch
// computes its results immediately.
enum { READBACK_LAG = GPU_BUILD, READBACK_LIMIT = 8 };

typedef struct {
    real* values;  // [READBACK_LIMIT]
#ifdef __CUDACC__
    cudaEvent_t arrived;
#else
    double arrived;  // now_seconds() at the time of the copy
#endif
} Readback;

#ifdef __CUDACC__

static inline void readback_open(Readback* r) {
    cudaCheck(cudaMallocHost(&r->values, READBACK_LIMIT * sizeof(real)));
    cudaCheck(cudaEventCreate(&r->arrived));
}

static inline void readback_close(Readback* r) {
    cudaCheck(cudaFreeHost(r->values));
    cudaCheck(cudaEventDestroy(r->arrived));
}

typedef struct {
    const real* value[READBACK_LIMIT];
} ReadbackSources;

// Grid: one block of `count` threads. `to` is pinned host memory.
static __global__ void readback_kernel(real* to, const __grid_constant__ ReadbackSources from) {
    to[threadIdx.x] = *from.value[threadIdx.x];
}

// Launch copies of `count` numbers from the device. They replace the previous values. In a graph one kernel takes less
// time than several copies.
static inline void readback_copy(Context* ctx, Readback* r, const real* const* sources, int count) {
    Scope scope = scope_open(ctx, "readback", 0, (double)((size_t)count * sizeof(real)), "n=%d", count);
    CHECK(count <= READBACK_LIMIT);
    if (ctx->is_captured) {
        ReadbackSources from = {{NULL}};
        memcpy(from.value, sources, (size_t)count * sizeof *sources);
        readback_kernel<<<1, (unsigned)count, 0, ctx->stream>>>(r->values, from);
        cudaCheck(cudaGetLastError());
    }
    for (int i = 0; i < count && !ctx->is_captured; i++)
        cudaCheck(cudaMemcpyAsync(&r->values[i], sources[i], sizeof(real), cudaMemcpyDeviceToHost, ctx->stream));
    scope_close(&scope);
}

// Call after the copies: readback_wait() waits for this event.
static inline void readback_record(Context* ctx, Readback* r) { cudaCheck(cudaEventRecord(r->arrived, ctx->stream)); }

static inline int readback_has_arrived(const Readback* r) {
    cudaError_t state = cudaEventQuery(r->arrived);
    if (state == cudaErrorNotReady) cudaGetLastError();  // clear it, so that no later call returns it
    else cudaCheck(state);
    return state == cudaSuccess;
}

// Wait until the numbers are in r->values.
static inline void readback_wait(Readback* r) { cudaCheck(cudaEventSynchronize(r->arrived)); }

// Time on the device between two completed readbacks. It does not depend on when the host reads them.
static inline double readback_seconds(const Readback* from, const Readback* to) {
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, from->arrived, to->arrived));
    return 1e-3 * (double)ms;
}

#else

static inline void readback_open(Readback* r) { r->values = (real*)xcalloc(READBACK_LIMIT, sizeof(real)); }
static inline void readback_close(Readback* r) { free(r->values); }

static inline void readback_copy(Context* ctx, Readback* r, const real* const* sources, int count) {
    (void)ctx;
    CHECK(count <= READBACK_LIMIT);
    for (int i = 0; i < count; i++) r->values[i] = *sources[i];
}

static inline void readback_record(Context* ctx, Readback* r) { (void)ctx, r->arrived = now_seconds(); }
static inline int readback_has_arrived(const Readback* r) { return (void)r, 1; }
static inline void readback_wait(Readback* r) { (void)r; }
static inline double readback_seconds(const Readback* from, const Readback* to) { return to->arrived - from->arrived; }

#endif

// ---------------------------------------------------------------------------------------------------------
// HostView: the values of a device buffer as full-precision numbers on the host, for initialization, loading, saving
// and testing. On the CPU a view is the buffer itself and costs nothing. On the GPU it is a copy.

typedef enum { VIEW_REAL, VIEW_FLOATX } ViewType;

typedef struct {
    real* values;  // [n]
    size_t n;
    void* device;
    ViewType type;
} HostView;

#ifdef __CUDACC__

// Host memory for the values of `device`. Its contents are undefined until they are read or set.
static inline HostView host_view_open(void* device, size_t n, ViewType type) {
    HostView v = {.values = (real*)xmalloc(n * sizeof(real)), .n = n, .device = device, .type = type};
    return v;
}

static inline void host_view_close(HostView* v) { free(v->values); }

// Below this many values, converting with one thread takes less time than starting the threads on a busy machine.
enum { HOST_VIEW_SMALL = 1 << 18 };

// Copy from device to host.
static inline void host_view_read(Context* ctx, HostView* v) {
    if (v->type == VIEW_REAL || sizeof(floatX) == sizeof(real)) {
        device_download(ctx, v->values, v->device, v->n * sizeof(real));
        return;
    }
    floatX* narrow = (floatX*)xmalloc(v->n * sizeof(floatX));
    device_download(ctx, narrow, v->device, v->n * sizeof(floatX));
#pragma omp parallel for if (v->n >= HOST_VIEW_SMALL)
    for (size_t i = 0; i < v->n; i++) v->values[i] = (real)(float)narrow[i];
    free(narrow);
}

// Copy from host to device, rounded to nearest if the device's type is narrower.
static inline void host_view_write(Context* ctx, const HostView* v) {
    if (v->type == VIEW_REAL || sizeof(floatX) == sizeof(real)) {
        device_upload(ctx, v->device, v->values, v->n * sizeof(real));
    } else {
        floatX* narrow = (floatX*)xmalloc(v->n * sizeof(floatX));
#pragma omp parallel for if (v->n >= HOST_VIEW_SMALL)
        for (size_t i = 0; i < v->n; i++) narrow[i] = (floatX)(float)v->values[i];
        device_upload(ctx, v->device, narrow, v->n * sizeof(floatX));
        device_synchronize(ctx);
        free(narrow);
    }
    device_synchronize(ctx);
}

#else

static inline HostView host_view_open(void* device, size_t n, ViewType type) {
    HostView v = {.values = (real*)device, .n = n, .device = device, .type = type};
    return v;
}

static inline void host_view_close(HostView* v) { v->values = NULL; }
static inline void host_view_read(Context* ctx, HostView* v) { (void)ctx, (void)v; }
static inline void host_view_write(Context* ctx, const HostView* v) { (void)ctx, (void)v; }

#endif

#endif
