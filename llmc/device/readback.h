/* Two numbers on their way from the device to the host. The copy is ordered after everything launched before it, and
 * the host need not wait until it wants the values: a step's loss can be read while the next step runs. */
#ifndef LLMC_READBACK_H
#define LLMC_READBACK_H

#include "device.h"

// Steps that may be launched before the first of them is read: none where launching is computing.
#ifdef __CUDACC__
enum { READBACK_LAG = 1 };
#else
enum { READBACK_LAG = 0 };
#endif

typedef struct {
    real* values;  // [2]
#ifdef __CUDACC__
    cudaEvent_t arrived;
#endif
} Readback;

#ifdef __CUDACC__

static inline void readback_open(Readback* r) {
    cudaCheck(cudaMallocHost(&r->values, 2 * sizeof(real)));
    cudaCheck(cudaEventCreateWithFlags(&r->arrived, cudaEventDisableTiming));
}

static inline void readback_close(Readback* r) {
    cudaCheck(cudaFreeHost(r->values));
    cudaCheck(cudaEventDestroy(r->arrived));
}

// Start to bring two numbers of the device, replacing what was brought before.
static inline void readback_start(Context* ctx, Readback* r, const real* first, const real* second) {
    cudaCheck(cudaMemcpyAsync(&r->values[0], first, sizeof(real), cudaMemcpyDeviceToHost, ctx->stream));
    cudaCheck(cudaMemcpyAsync(&r->values[1], second, sizeof(real), cudaMemcpyDeviceToHost, ctx->stream));
    cudaCheck(cudaEventRecord(r->arrived, ctx->stream));
}

// Wait until they are in r->values.
static inline void readback_wait(Readback* r) { cudaCheck(cudaEventSynchronize(r->arrived)); }

#else

static inline void readback_open(Readback* r) { r->values = (real*)xcalloc(2, sizeof(real)); }

static inline void readback_close(Readback* r) { free(r->values); }

static inline void readback_start(Context* ctx, Readback* r, const real* first, const real* second) {
    (void)ctx;
    r->values[0] = *first;
    r->values[1] = *second;
}

static inline void readback_wait(Readback* r) { (void)r; }

#endif

#endif
