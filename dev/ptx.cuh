/* PTX instructions for clusters of blocks, stores by TMA and kernels that begin early, which no op of llmc needs: one
 * instruction per function, as in llmc/device/ptx and llmc/hopper. The recommenders and the ladder use them.
 * Source: PTX ISA, sections on mbarrier, barrier.cluster, griddepcontrol and cp.async.bulk.tensor. */
#ifndef DEV_PTX_CUH
#define DEV_PTX_CUH

#include "llmc/hopper/mbarrier.cuh"
#include "llmc/hopper/tma.cuh"

#ifdef __CUDACC__

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

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)
// tma_load_3d(), multicast to the blocks of the cluster in the bit mask `blocks`, each at the same address and
// `barrier`.
__device__ inline void tma_load_3d_multicast(uint32_t tile, const CUtensorMap* map, int channel, int head, int row,
                                             uint32_t barrier, uint16_t blocks) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(tile),
                 "l"(map), "r"(channel), "r"(head), "r"(row), "r"(barrier), "h"(blocks)
                 : "memory");
}

// cp.async.bulk.prefetch.tensor.3d: bring the box at (channel, head, row) into L2.
__device__ inline void tma_prefetch_3d(const CUtensorMap* map, int channel, int head, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(channel), "r"(head),
                 "r"(row)
                 : "memory");
}

// cp.async.bulk.tensor.3d: copy `tile` to the box at (channel, head, row). Elements outside the tensor are not written.
// Writes to the tile must be followed by fence_proxy_async_shared() and a barrier.
__device__ inline void tma_store_3d(const CUtensorMap* map, int channel, int head, int row, uint32_t tile) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(channel), "r"(head), "r"(row), "r"(tile)
                 : "memory");
}

// cp.async.bulk.commit_group: the copies since the last commit are one group.
__device__ inline void bulk_commit_group(void) { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// cp.async.bulk.wait_group.read: wait until no group reads shared memory any more.
__device__ inline void bulk_wait_group_read(void) { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
#endif

#endif
#endif
