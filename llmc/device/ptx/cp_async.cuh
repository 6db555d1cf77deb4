/* Asynchronous copies from global to shared memory, which need no registers while they are under way. One PTX instruction
 * per function; `shared` is an address in shared memory. sm_75 has none: there they are a load and a store.
 * Source: PTX ISA, section on cp.async. */
#ifndef LLMC_DEVICE_PTX_CP_ASYNC_CUH
#define LLMC_DEVICE_PTX_CP_ASYNC_CUH

#include "llmc/device/cuda_utils.cuh"

#ifdef __CUDACC__

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
// Stand-ins for cp.async: a load and a store. The barrier after cp_async_wait_all() orders them too.
__device__ inline void cp_async_cg_16(uint32_t shared, const void* global, int exists) {
    int4 x = exists ? *(const int4*)global : make_int4(0, 0, 0, 0);
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

__device__ inline void cp_async_ca_8(uint32_t shared, const void* global, int exists) {
    int2 x = exists ? *(const int2*)global : make_int2(0, 0);
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(shared), "r"(x.x), "r"(x.y) : "memory");
}

__device__ inline void cp_async_wait_all(void) {}
#else
// cp.async.cg: start copying 16 bytes to shared memory, past the L1 cache. Zeros unless `exists`.
__device__ inline void cp_async_cg_16(uint32_t shared, const void* global, int exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(exists ? 16 : 0)
                 : "memory");
}

// cp.async.ca: start copying 8 bytes to shared memory. Zeros unless `exists`.
__device__ inline void cp_async_ca_8(uint32_t shared, const void* global, int exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(exists ? 8 : 0)
                 : "memory");
}

// cp.async.wait_all: wait for this thread's copies. A barrier must follow before other threads read them.
__device__ inline void cp_async_wait_all(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

#endif
#endif
