/* The values of a device buffer as full-precision numbers on the host, for initialization, loading, saving and
 * testing. On the CPU a view is the buffer itself and costs nothing. On the GPU it is a copy. */
#ifndef LLMC_DEVICE_HOST_VIEW_H
#define LLMC_DEVICE_HOST_VIEW_H

#include "llmc/device/device.h"

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
