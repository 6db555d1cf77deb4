/* A few numbers on their way from the device to the host. The copies are ordered after everything launched before them,
 * and the host need not wait until it wants the values: a step's loss can be read while the next step runs. */
#ifndef LLMC_READBACK_H
#define LLMC_READBACK_H

#include "scope.h"

// Steps that may be launched before the first of them is read: none where launching is computing.
#ifdef __CUDACC__
enum { READBACK_LAG = 1 };
#else
enum { READBACK_LAG = 0 };
#endif
enum { READBACK_LIMIT = 8 };

typedef struct {
    real* values;  // [READBACK_LIMIT]
#ifdef __CUDACC__
    cudaEvent_t arrived;
#else
    double arrived;  // now_seconds() then
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

// Start to bring `count` numbers of the device, replacing what was brought before.
static inline void readback_start(Context* ctx, Readback* r, const real* const* sources, int count) {
    Scope scope = scope_open(ctx, "readback", 0, (double)((size_t)count * sizeof(real)), "n=%d", count);
    CHECK(count <= READBACK_LIMIT);
    for (int i = 0; i < count; i++)
        cudaCheck(cudaMemcpyAsync(&r->values[i], sources[i], sizeof(real), cudaMemcpyDeviceToHost, ctx->stream));
    cudaCheck(cudaEventRecord(r->arrived, ctx->stream));
    scope_close(&scope);
}

static inline int readback_has_arrived(const Readback* r) {
    cudaError_t state = cudaEventQuery(r->arrived);
    if (state == cudaErrorNotReady) cudaGetLastError();  // it is no error of a later call
    else cudaCheck(state);
    return state == cudaSuccess;
}

// Wait until they are in r->values.
static inline void readback_wait(Readback* r) { cudaCheck(cudaEventSynchronize(r->arrived)); }

// Time between the arrivals of two that have been waited for, where the ops run: the host may look at both much later.
static inline double readback_seconds(const Readback* from, const Readback* to) {
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, from->arrived, to->arrived));
    return 1e-3 * (double)ms;
}

#else

static inline void readback_open(Readback* r) { r->values = (real*)xcalloc(READBACK_LIMIT, sizeof(real)); }

static inline void readback_close(Readback* r) { free(r->values); }

static inline void readback_start(Context* ctx, Readback* r, const real* const* sources, int count) {
    (void)ctx;
    CHECK(count <= READBACK_LIMIT);
    for (int i = 0; i < count; i++) r->values[i] = *sources[i];
    r->arrived = now_seconds();
}

static inline int readback_has_arrived(const Readback* r) {
    (void)r;
    return 1;
}

static inline void readback_wait(Readback* r) { (void)r; }

// Time between the arrivals of two that have been waited for.
static inline double readback_seconds(const Readback* from, const Readback* to) { return to->arrived - from->arrived; }

#endif

#endif
