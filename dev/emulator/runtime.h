/* The CUDA runtime without a GPU: device memory is host memory. Only the functions that the project calls. The stream,
 * graphs and events are in graph.h. */
#ifndef DEV_EMULATOR_RUNTIME_H
#define DEV_EMULATOR_RUNTIME_H

#include <limits.h>
#include <malloc.h>

#include "threads.h"

enum { EMULATED_MULTIPROCESSORS = 4 };

// Keep freed memory in the process: kernels that follow each other ask for the same sizes again.
static const int emulated_malloc = mallopt(M_MMAP_THRESHOLD, 1 << 30) + mallopt(M_TRIM_THRESHOLD, INT_MAX);

// Freed memory is NaN: what still reads it gives other results.
static inline cudaError_t emulated_free(void* p) {
    if (p) memset(p, 0xff, malloc_usable_size(p));
    return free(p), cudaSuccess;
}

extern "C" {

cudaError_t cudaMalloc(void** p, size_t bytes) {
    *p = NULL;
    return posix_memalign(p, 256, bytes) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* p) {
    cudaError_t status = emulated_wait();
    return status == cudaSuccess ? emulated_free(p) : status;
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeHost(void* p) { return emulated_free(p); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    emulated_do(EMULATED_COPY, [=] { bytes ? memmove(to, from, bytes) : to; });
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    cudaError_t status = emulated_wait();
    if (status == cudaSuccess && bytes) memmove(to, from, bytes);
    return status;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
    emulated_do(EMULATED_FILL, [=] { bytes ? memset(p, value, bytes) : p; });
    return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
    cudaError_t status = emulated_wait();
    if (status == cudaSuccess && bytes) memset(p, value, bytes);
    return status;
}
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    return *available = *total = (size_t)8 << 30, cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, __CUDA_ARCH__ >= 900 ? "emulated H100" : "emulated A100");  // their peaks are known: not measured
    p->major = __CUDA_ARCH__ / 100, p->minor = __CUDA_ARCH__ % 100 / 10;
    p->multiProcessorCount = EMULATED_MULTIPROCESSORS;
    p->totalGlobalMem = (size_t)8 << 30;
    p->sharedMemPerMultiprocessor = (__CUDA_ARCH__ >= 900 ? 228 : 164) << 10;
    p->sharedMemPerBlockOptin = p->sharedMemPerMultiprocessor - 1024;
    p->warpSize = 32;
    p->l2CacheSize = 1 << 20;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    return *blocks = 1, cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int) {
    return snprintf(id, (size_t)size, "0000:00:00.0"), cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return emulated_wait(); }
cudaError_t cudaGetLastError(void) {
    cudaError_t last = emulated_error;
    return emulated_error = cudaSuccess, last;
}
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "not in the emulator"; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return *s = NULL, cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return *s = NULL, cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return emulated_wait(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

}  // extern "C"

template <typename T> static inline cudaError_t cudaFuncSetAttribute(T*, cudaFuncAttribute, int) { return cudaSuccess; }
#endif
