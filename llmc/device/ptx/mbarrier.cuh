/* Barriers: mbarrier objects in shared memory, which also count the bytes of asynchronous copies, the named barriers of
 * a block, and flags for other blocks. One PTX instruction per function; `barrier` is an address in shared memory.
 *
 * A phase of an mbarrier ends when all expected arrivals and bytes have come; the next phase begins at once. A waiting
 * thread identifies the phase by its parity, 0 for the first.
 * Source: PTX ISA, sections on mbarrier, bar and fence.proxy. */
#ifndef LLMC_DEVICE_PTX_MBARRIER_CUH
#define LLMC_DEVICE_PTX_MBARRIER_CUH

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

// mapa and mbarrier.arrive on the barrier at the same address in block `rank` of the cluster. The arrival signals that
// this thread's asynchronous matmuls and copies are complete, so the default scope is enough: release.cluster would
// wait for all of the thread's stores each time.
__device__ inline void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

// barrier.cluster: wait for all threads of the cluster. No block may exit while others still use its shared memory.
__device__ inline void cluster_sync(void) {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// griddepcontrol.wait: wait until the kernels before this one in its stream are complete and their results visible.
// Needed in kernels whose launch has cudaLaunchAttributeProgrammaticStreamSerialization, before they touch global
// memory.
__device__ inline void grid_dependency_wait(void) { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// griddepcontrol.launch_dependents: let blocks of the next kernel, if its launch has that attribute, start as soon as
// there is room.
__device__ inline void grid_launch_dependents(void) { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

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
