/* Barriers: mbarrier objects in shared memory, which also count the bytes of asynchronous copies, the named barriers of
 * a block, and flags for other blocks. One PTX instruction per function; `barrier` is an address in shared memory.
 *
 * A phase of an mbarrier ends when all expected arrivals and bytes have come; the next phase begins at once. A waiting
 * thread identifies the phase by its parity, 0 for the first.
 * Source: PTX ISA, sections on mbarrier, bar and fence.proxy. */
#ifndef LLMC_HOPPER_MBARRIER_CUH
#define LLMC_HOPPER_MBARRIER_CUH

#include "llmc/device/cuda_utils.cuh"

#ifdef __CUDACC__

// mbarrier.init: each phase expects `arrivals` arrivals.
__device__ inline void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes mbarrier_init() visible to the asynchronous copies of the cluster. __syncthreads() must
// follow before other threads use the barriers.
__device__ inline void fence_mbarrier_init(void) { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// mbarrier.arrive
__device__ inline void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.expect_tx: arrive, and let the phase wait for `bytes` more bytes of copies.
__device__ inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// mbarrier.try_wait, repeated until the phase of this parity has ended.
__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "bra again;\n"
                 "over:\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// bar.sync: wait until `threads` threads of the block have reached barrier `id`. __syncthreads() uses id 0.
__device__ inline void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// st.release.gpu and ld.acquire.gpu: a flag in global memory for other blocks. A thread that reads the flag sees
// everything that the writer saw or wrote before it.
__device__ inline void st_release_gpu(int* flag, int x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(x) : "memory");
}

__device__ inline int ld_acquire_gpu(const int* flag) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
    return x;
}

// fence.proxy.async: orders this thread's memory accesses before those of the asynchronous proxy (TMA, wgmma).
__device__ inline void fence_proxy_async(void) { asm volatile("fence.proxy.async;" ::: "memory"); }

// fence.proxy.async.shared::cta: the same for shared memory only. A barrier must follow before another thread starts
// the copy or the wgmma.
__device__ inline void fence_proxy_async_shared(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif
#endif
