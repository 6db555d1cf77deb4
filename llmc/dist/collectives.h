/* Collectives in device memory: NCCL on GPUs, MPI on the CPU.
 *
 * They run on a side stream, overlapped with the ops on the main stream. Events keep the two in order: one stream
 * records an event, the other waits for it. On the CPU a collective is done when the call returns, and events do
 * nothing.
 *
 * All ranks make the same calls in the same order. A sum over a given number of ranks is always added in the same
 * order: the same bits on every rank and every time. */
#ifndef LLMC_DIST_COLLECTIVES_H
#define LLMC_DIST_COLLECTIVES_H

#include "llmc/dist/process_group.h"

#if defined(__CUDACC__) && defined(USE_NCCL)
#include <nccl.h>
#endif

#include "llmc/device/device.h"

typedef enum { SUM_REAL, SUM_DOUBLE, MAX_UINT32 } ReduceType;

typedef struct {
#ifdef __CUDACC__
    cudaEvent_t event;
#else
    int unused;
#endif
} StreamEvent;

typedef struct {
    ProcessGroup* group;
#ifdef __CUDACC__
    cudaStream_t stream;
#ifdef USE_NCCL
    ncclComm_t nccl;
#endif
#endif
} Collectives;

#if defined(__CUDACC__) && defined(USE_NCCL)
// ---------------------------------------------------------------------------------------------------------
// GPU

#define COLLECTIVES_BYTES ((size_t)512 << 20)  // about what NCCL allocates for itself

static inline void stream_event_open(StreamEvent* e) {
    cudaCheck(cudaEventCreateWithFlags(&e->event, cudaEventDisableTiming));
}
static inline void stream_event_close(StreamEvent* e) { cudaCheck(cudaEventDestroy(e->event)); }

// Make collectives launched from now on wait for all ops launched so far.
static inline void collectives_wait_for_ops(Collectives* c, StreamEvent* e, Context* ctx) {
    cudaCheck(cudaEventRecord(e->event, ctx->stream));
    cudaCheck(cudaStreamWaitEvent(c->stream, e->event, 0));
}

// Record an event after the collectives that were launched so far.
static inline void collectives_record_event(Collectives* c, StreamEvent* e) {
    cudaCheck(cudaEventRecord(e->event, c->stream));
}

// Make ops launched from now on wait for that event.
static inline void ops_wait_for_collectives(Context* ctx, StreamEvent* e) {
    cudaCheck(cudaStreamWaitEvent(ctx->stream, e->event, 0));
}

#define ncclCheck(call) nccl_check((call), #call, __FILE__, __LINE__)

static inline void nccl_check(ncclResult_t status, const char* call, const char* file, int line) {
    if (status != ncclSuccess && status != ncclInProgress)
        die(FAILED, "%s:%d: %s: %s; set NCCL_DEBUG=WARN in the environment for details", file, line, call,
            ncclGetErrorString(status));
}

// Start the collectives of all ranks. Each rank has already selected its GPU.
static inline void collectives_open(Collectives* c, ProcessGroup* group) {
    ncclUniqueId id;
    memset(c, 0, sizeof *c);
    c->group = group;
    if (group->size == 1) return;
    if (group->rank == 0) ncclCheck(ncclGetUniqueId(&id));
    group_broadcast(group, &id, sizeof id);
    ncclCheck(ncclCommInitRank(&c->nccl, group->size, id, group->rank));
    // A higher priority than the main stream's, so that collectives do not wait behind ops that were launched earlier.
    int least, greatest;
    cudaCheck(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaCheck(cudaStreamCreateWithPriority(&c->stream, cudaStreamNonBlocking, greatest));
}

// Whether all ranks' GPUs are in this machine and joined by NVLink, which is what native atomics in each other's memory
// require. The answer is no if it is unknown, because a process does not see the others' GPUs. A collective call; all
// ranks get the same answer.
static inline int has_p2p(const ProcessGroup* group) {
    int seen = 0, mine = -1, has_all = group->local_size == group->size;
    if (group->size == 1) return 0;
    int* all = (int*)xcalloc((size_t)group->size, sizeof *all);
    if (cudaGetDeviceCount(&seen) == cudaSuccess && seen >= group->size) cudaCheck(cudaGetDevice(&mine));
    group_gather(group, all, &mine, sizeof mine);
    for (int r = 0; has_all && r < group->size; r++) {
        int atomics = 0;
        if (r == group->rank) continue;
        if (mine >= 0 && all[r] >= 0 && all[r] != mine)  // each may know its own GPU as 0
            cudaCheck(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, mine, all[r]));
        has_all = atomics;
    }
    free(all);
    return !group_any(group, !has_all);
}

static inline void collectives_close(Collectives* c) {
    if (c->group->size == 1) return;
    cudaCheck(cudaStreamSynchronize(c->stream));
    ncclCheck(ncclCommDestroy(c->nccl));
    cudaCheck(cudaStreamDestroy(c->stream));
}

// Check for asynchronous errors of NCCL, from time to time. The usual cause is a lost rank.
static inline void collectives_check(const Collectives* c) {
    ncclResult_t status;
    if (c->group->size == 1) return;
    ncclCheck(ncclCommGetAsyncError(c->nccl, &status));
    if (status != ncclSuccess && status != ncclInProgress) group_lost(c->group, ncclGetErrorString(status));
}

static inline ncclDataType_t collectives_type(ReduceType type) {
    return type == SUM_REAL ? ncclFloat32 : type == SUM_DOUBLE ? ncclFloat64 : ncclUint32;
}

// Launch the collectives between these two calls as one.
static inline void collectives_begin(void) { ncclCheck(ncclGroupStart()); }
static inline void collectives_end(void) { ncclCheck(ncclGroupEnd()); }

// Sum n values over the ranks, or take their maximum, in place, on every rank.
static inline void all_reduce(Collectives* c, void* values, size_t n, ReduceType type) {
    ncclRedOp_t op = type == MAX_UINT32 ? ncclMax : ncclSum;
    ncclCheck(ncclAllReduce(values, values, n, collectives_type(type), op, c->nccl, c->stream));
}

// The same on rank `root` only; the other ranks' values do not change.
static inline void reduce(Collectives* c, void* values, size_t n, ReduceType type, int root) {
    ncclCheck(ncclReduce(values, values, n, collectives_type(type), ncclSum, root, c->nccl, c->stream));
}

// Copy n bytes from rank `root` to all.
static inline void broadcast(Collectives* c, void* bytes, size_t n, int root) {
    ncclCheck(ncclBroadcast(bytes, bytes, n, ncclUint8, root, c->nccl, c->stream));
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU, and GPU builds without NCCL, for one rank: nothing overlaps

#define COLLECTIVES_BYTES ((size_t)0)  // of device memory that they allocate

static inline void stream_event_open(StreamEvent* e) { (void)e; }
static inline void stream_event_close(StreamEvent* e) { (void)e; }
static inline void collectives_wait_for_ops(Collectives* c, StreamEvent* e, Context* ctx) {
    (void)c, (void)e, (void)ctx;
}
static inline void collectives_record_event(Collectives* c, StreamEvent* e) { (void)c, (void)e; }
static inline void ops_wait_for_collectives(Context* ctx, StreamEvent* e) { (void)ctx, (void)e; }
static inline void collectives_check(const Collectives* c) { (void)c; }
static inline int has_p2p(const ProcessGroup* group) { return (void)group, 0; }
static inline void collectives_begin(void) {}
static inline void collectives_end(void) {}
static inline void collectives_close(Collectives* c) { (void)c; }

enum { TO_ALL = -1 };  // instead of the root of a sum

static inline void collectives_open(Collectives* c, ProcessGroup* group) {
    memset(c, 0, sizeof *c);
    c->group = group;
    if (GPU_BUILD && group->size > 1)
        die(USAGE, "this program was built without NCCL, so it runs on one GPU; install libnccl-dev and build again");
}

// With one rank there is nothing to do.
static inline void mpi_sum(const Collectives* c, void* values, size_t n, ReduceType type, int root) {
#if defined(USE_MPI) && !defined(__CUDACC__)
    const size_t PIECE = 1 << 28;  // MPI counts in int
    size_t size = type == SUM_DOUBLE ? sizeof(double) : type == MAX_UINT32 ? sizeof(uint32_t) : sizeof(real);
    MPI_Datatype kind = type == MAX_UINT32 ? MPI_UINT32_T : size == sizeof(double) ? MPI_DOUBLE : MPI_FLOAT;
    MPI_Op op = type == MAX_UINT32 ? MPI_MAX : MPI_SUM;
    int is_root = c->group->rank == root;
    for (size_t i = 0; i < n && c->group->size > 1; i += PIECE) {
        char* piece = (char*)values + i * size;
        int count = (int)min_size(n - i, PIECE);
        if (root == TO_ALL) MPI_Allreduce(MPI_IN_PLACE, piece, count, kind, op, MPI_COMM_WORLD);
        else MPI_Reduce(is_root ? MPI_IN_PLACE : piece, piece, count, kind, MPI_SUM, root, MPI_COMM_WORLD);
    }
#else
    (void)c, (void)values, (void)n, (void)type, (void)root;
#endif
}

// Sum n values over the ranks, or take their maximum, in place, on every rank.
static inline void all_reduce(Collectives* c, void* values, size_t n, ReduceType type) {
    mpi_sum(c, values, n, type, TO_ALL);
}

// The same on rank `root` only; the other ranks' values do not change.
static inline void reduce(Collectives* c, void* values, size_t n, ReduceType type, int root) {
    mpi_sum(c, values, n, type, root);
}

// Copy n bytes from rank `root` to all.
static inline void broadcast(Collectives* c, void* bytes, size_t n, int root) {
    group_broadcast_from(c->group, bytes, n, root);
}
#endif

#endif
