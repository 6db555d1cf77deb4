/* Asynchronous copies of a few numbers from the device to the host. The copies are ordered after everything launched
 * before them. The host waits only when it needs the values: it can read a step's loss while the next step runs. */
#ifndef LLMC_DEVICE_READBACK_H
#define LLMC_DEVICE_READBACK_H

#include "llmc/device/scope.h"

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

static inline int readback_has_arrived(const Readback* r) {
    (void)r;
    return 1;
}

static inline void readback_wait(Readback* r) { (void)r; }

// Time between two completed readbacks.
static inline double readback_seconds(const Readback* from, const Readback* to) { return to->arrived - from->arrived; }

#endif

#endif
