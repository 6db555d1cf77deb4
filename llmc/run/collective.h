/* Sums and copies over the ranks of what lies where the ops run: by NCCL on GPUs, by MPI on the CPU.
 *
 * They run beside the ops, on a stream of their own, and marks keep the two in order: a mark is a moment of one of them
 * that the other waits for. On the CPU everything is done when the call returns, and marks say nothing.
 *
 * All ranks make the same calls in the same order. Sums have one order for a number of ranks: the same bits on every rank
 * and every time. */
#ifndef LLMC_COLLECTIVE_H
#define LLMC_COLLECTIVE_H

#include "comm.h"

#if defined(__CUDACC__) && defined(USE_NCCL)
#include <nccl.h>
#endif

#include "../device/device.h"

typedef enum { SUM_REAL, SUM_DOUBLE, SUM_BF16 } SumType;

typedef struct {
#ifdef __CUDACC__
    cudaEvent_t event;
#else
    int unused;
#endif
} Mark;

typedef struct {
    Comm* comm;
#ifdef __CUDACC__
    cudaStream_t stream;
#ifdef USE_NCCL
    ncclComm_t nccl;
#endif
#endif
} Collective;

#if defined(__CUDACC__) && defined(USE_NCCL)
// ---------------------------------------------------------------------------------------------------------
// GPU

#define COLLECTIVE_BYTES ((size_t)512 << 20)  // what NCCL takes for itself, about

static inline void mark_open(Mark* m) { cudaCheck(cudaEventCreateWithFlags(&m->event, cudaEventDisableTiming)); }
static inline void mark_close(Mark* m) { cudaCheck(cudaEventDestroy(m->event)); }

// What is launched on the other side from now on begins after all that has been launched on this one so far.
static inline void collective_waits_for_ops(Collective* c, Mark* m, Context* ctx) {
    cudaCheck(cudaEventRecord(m->event, ctx->stream));
    cudaCheck(cudaStreamWaitEvent(c->stream, m->event, 0));
}

// Mark this moment of the collectives.
static inline void collective_mark(Collective* c, Mark* m) { cudaCheck(cudaEventRecord(m->event, c->stream)); }

// Ops launched from now on begin after that moment.
static inline void ops_wait_for_collective(Context* ctx, Mark* m) {
    cudaCheck(cudaStreamWaitEvent(ctx->stream, m->event, 0));
}

#define ncclCheck(call) nccl_check((call), #call, __FILE__, __LINE__)

static inline void nccl_check(ncclResult_t status, const char* call, const char* file, int line) {
    if (status != ncclSuccess && status != ncclInProgress)
        die(FAILED, "%s:%d: %s: %s; NCCL_DEBUG=WARN in the environment says more", file, line, call,
            ncclGetErrorString(status));
}

// Each rank's GPU is the current one.
static inline void collective_open(Collective* c, Comm* comm) {
    ncclUniqueId id;
    memset(c, 0, sizeof *c);
    c->comm = comm;
    if (comm->size == 1) return;
    if (comm->rank == 0) ncclCheck(ncclGetUniqueId(&id));
    comm_broadcast(comm, &id, sizeof id);
    comm_wait_begin(comm);
    ncclCheck(ncclCommInitRank(&c->nccl, comm->size, id, comm->rank));
    comm_wait_end(comm);
    // Before what the ops have in store, so that a sum that is due does not wait behind them.
    int least, greatest;
    cudaCheck(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaCheck(cudaStreamCreateWithPriority(&c->stream, cudaStreamNonBlocking, greatest));
}

// Whether the ranks' GPUs are all in this machine and each reaches the others' memory over NVLink: only there do GPUs have
// atomics in each other's memory. Where a process does not see the others' GPUs this is not known, and the answer no. The
// same on all ranks, which call it together.
static inline int collective_is_near(const Comm* comm) {
    int seen = 0, mine = -1, is_near = comm->local_size == comm->size;
    if (comm->size == 1) return 0;
    int* all = (int*)xcalloc((size_t)comm->size, sizeof *all);
    if (cudaGetDeviceCount(&seen) == cudaSuccess && seen >= comm->size) cudaCheck(cudaGetDevice(&mine));
    comm_gather(comm, all, &mine, sizeof mine);
    for (int r = 0; is_near && r < comm->size; r++) {
        int atomics = 0;
        if (r == comm->rank) continue;
        if (mine >= 0 && all[r] >= 0 && all[r] != mine)  // each may know its own GPU as 0
            cudaCheck(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, mine, all[r]));
        is_near = atomics;
    }
    free(all);
    return !comm_any(comm, !is_near);
}

static inline void collective_close(Collective* c) {
    if (c->comm->size == 1) return;
    cudaCheck(cudaStreamSynchronize(c->stream));
    ncclCheck(ncclCommDestroy(c->nccl));
    cudaCheck(cudaStreamDestroy(c->stream));
}

// Errors that NCCL has met since: to be called now and then. Mostly another rank is gone, which the watch can name.
static inline void collective_check(const Collective* c) {
    ncclResult_t status;
    if (c->comm->size == 1) return;
    ncclCheck(ncclCommGetAsyncError(c->nccl, &status));
    if (status != ncclSuccess && status != ncclInProgress) comm_lost(c->comm, ncclGetErrorString(status));
}

static inline ncclDataType_t collective_type(SumType type) {
    return type == SUM_REAL ? ncclFloat32 : type == SUM_DOUBLE ? ncclFloat64 : ncclBfloat16;
}

// What is called between these two is one launch.
static inline void collective_begin(void) { ncclCheck(ncclGroupStart()); }
static inline void collective_end(void) { ncclCheck(ncclGroupEnd()); }

// Sum n values over the ranks, in place, on every rank.
static inline void collective_sum(Collective* c, void* values, size_t n, SumType type) {
    ncclCheck(ncclAllReduce(values, values, n, collective_type(type), ncclSum, c->nccl, c->stream));
}

// The same on rank `root` alone; the others keep theirs.
static inline void collective_sum_to(Collective* c, void* values, size_t n, SumType type, int root) {
    ncclCheck(ncclReduce(values, values, n, collective_type(type), ncclSum, root, c->nccl, c->stream));
}

// Bytes of rank `root` to all.
static inline void collective_broadcast(Collective* c, void* bytes, size_t n, int root) {
    ncclCheck(ncclBroadcast(bytes, bytes, n, ncclUint8, root, c->nccl, c->stream));
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU, and builds whose ranks nothing joins: nothing runs beside anything

#define COLLECTIVE_BYTES ((size_t)0)  // of device memory that they take

static inline void mark_open(Mark* m) { (void)m; }
static inline void mark_close(Mark* m) { (void)m; }
static inline void collective_waits_for_ops(Collective* c, Mark* m, Context* ctx) { (void)c, (void)m, (void)ctx; }
static inline void collective_mark(Collective* c, Mark* m) { (void)c, (void)m; }
static inline void ops_wait_for_collective(Context* ctx, Mark* m) { (void)ctx, (void)m; }
static inline void collective_check(const Collective* c) { (void)c; }
static inline int collective_is_near(const Comm* comm) { return (void)comm, 0; }
static inline void collective_begin(void) {}
static inline void collective_end(void) {}
static inline void collective_close(Collective* c) { (void)c; }

#if !defined(__CUDACC__) && defined(USE_MPI)
static inline void collective_open(Collective* c, Comm* comm) {
    c->comm = comm;
    if (comm->size > 1 && !comm->is_mpi)
        die(USAGE, "on the CPU ranks are joined by MPI: start them with mpirun (-pi env, tcp and fs are for GPUs)");
}

// MPI counts in int: pieces of what is longer.
enum { COLLECTIVE_PIECE = 1 << 28 };

#define mpiCheck(call) comm_mpi_check(c->comm, (call), #call)

static inline MPI_Datatype collective_type(SumType type) {
    CHECK(type != SUM_BF16);
    return type == SUM_DOUBLE || sizeof(real) == sizeof(double) ? MPI_DOUBLE : MPI_FLOAT;
}

// Sum n values over the ranks, in place, on every rank.
static inline void collective_sum(Collective* c, void* values, size_t n, SumType type) {
    MPI_Datatype kind = collective_type(type);
    size_t size = kind == MPI_DOUBLE ? sizeof(double) : sizeof(float);
    comm_wait_begin(c->comm);
    for (size_t i = 0; i < n; i += COLLECTIVE_PIECE)
        mpiCheck(MPI_Allreduce(MPI_IN_PLACE, (char*)values + i * size, (int)min_size(n - i, COLLECTIVE_PIECE), kind,
                               MPI_SUM, MPI_COMM_WORLD));
    comm_wait_end(c->comm);
}

// The same on rank `root` alone; the others keep theirs.
static inline void collective_sum_to(Collective* c, void* values, size_t n, SumType type, int root) {
    MPI_Datatype kind = collective_type(type);
    size_t size = kind == MPI_DOUBLE ? sizeof(double) : sizeof(float);
    int is_root = c->comm->rank == root;
    comm_wait_begin(c->comm);
    for (size_t i = 0; i < n; i += COLLECTIVE_PIECE) {
        char* piece = (char*)values + i * size;
        mpiCheck(MPI_Reduce(is_root ? MPI_IN_PLACE : piece, piece, (int)min_size(n - i, COLLECTIVE_PIECE), kind,
                            MPI_SUM, root, MPI_COMM_WORLD));
    }
    comm_wait_end(c->comm);
}

// Bytes of rank `root` to all.
static inline void collective_broadcast(Collective* c, void* bytes, size_t n, int root) {
    comm_wait_begin(c->comm);
    for (size_t i = 0; i < n; i += COLLECTIVE_PIECE)
        mpiCheck(MPI_Bcast((char*)bytes + i, (int)min_size(n - i, COLLECTIVE_PIECE), MPI_BYTE, root, MPI_COMM_WORLD));
    comm_wait_end(c->comm);
}

#else  // one rank
static inline void collective_open(Collective* c, Comm* comm) {
    memset(c, 0, sizeof *c);
    c->comm = comm;
    if (comm->size == 1) return;
#ifdef __CUDACC__
    die(USAGE, "this build knows no NCCL, so it runs on one GPU; install libnccl-dev and build again");
#else
    die(USAGE, "this build knows no MPI, so it runs as one process; make setup installs it, then build again");
#endif
}

static inline void collective_sum(Collective* c, void* values, size_t n, SumType type) {
    (void)values, (void)n, (void)type;
    CHECK(c->comm->size == 1);
}
static inline void collective_sum_to(Collective* c, void* values, size_t n, SumType type, int root) {
    (void)values, (void)n, (void)type, (void)root;
    CHECK(c->comm->size == 1);
}
static inline void collective_broadcast(Collective* c, void* bytes, size_t n, int root) {
    (void)bytes, (void)n, (void)root;
    CHECK(c->comm->size == 1);
}
#endif
#endif

#endif
