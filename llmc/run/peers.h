/* Sums of gradients and copies of parameters between the GPUs of one machine, moved by their copy engines.
 *
 * A collective's kernels hold multiprocessors for as long as data is on its way, and a matmul that wants all of them
 * waits. Copy engines hold none: a rank fetches its part of every other rank's gradients, adds them up, in the order of
 * ranks, by a kernel that reads local memory only, and writes the sum into the others' buffers. Nothing is rounded but the
 * sum, and all ranks get the same bits.
 *
 * Each rank sees the others' buffers through CUDA's interprocess handles. Order between ranks is kept by numbers in
 * memory: before a turn a rank writes the turn's number into READY of all others and waits for theirs, after it into
 * DONE. The stream's front end writes them and waits for them, no multiprocessor does.
 *
 * Where ranks are on several machines, or GPUs cannot see each other's memory, peers_open() or peers_see() say so, the same
 * on all ranks, and the caller has NCCL. */
#ifndef LLMC_PEERS_H
#define LLMC_PEERS_H

#include "comm.h"

#if defined(__CUDACC__) && defined(USE_NCCL)
#include <cuda.h>

enum { PEERS_MOST = 16, PEERS_BUFFERS = 2 };
#define PEERS_PIECE ((size_t)4 << 20)     // elements of a part that are summed at once, by way of copies of the others'
#define PEERS_SMALLEST ((size_t)2 << 20)  // bytes: what is smaller shares its handle with other allocations

// Where READY and DONE of each rank lie among a rank's numbers.
typedef enum { PEERS_READY, PEERS_DONE, PEERS_NUMBERS } PeersNumber;

typedef struct {
    const Comm* comm;
    cudaStream_t stream;
    CUresult (*write)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    CUresult (*wait)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    uint32_t turn;
    void* numbers[PEERS_MOST];  // of each rank: [PEERS_NUMBERS][PEERS_MOST] of uint32_t
    real* fetched;              // [size - 1][PEERS_PIECE]
    struct {
        void* of[PEERS_MOST];  // where each rank's buffer is seen here
    } buffers[PEERS_BUFFERS];
    int count;  // buffers
} Peers;

// What is to be added up, in the order of ranks.
typedef struct {
    const float4* from[PEERS_MOST];
} PeersSummands;

__global__ void peers_sum_kernel(float4* out, PeersSummands s, int ranks, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        float4 sum = s.from[0][i];
        for (int r = 1; r < ranks; r++) {
            float4 v = s.from[r][i];
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        out[i] = sum;
    }
}

// ---------------------------------------------------------------------------------------------------------
// Seeing each other

// Whether all ranks say yes.
static inline int peers_agree(const Comm* comm, int yes) {
    double missing = !yes;
    comm_sum_counts(comm, &missing, 1);
    return missing == 0;
}

// Let every rank see the others' allocation `own`, which is as large on all. Returns 0 where one cannot.
static inline int peers_exchange(const Comm* comm, void* own, void** of) {
    struct {
        cudaIpcMemHandle_t handle;
        int good;
    } mine, all[PEERS_MOST];
    int good = 1;
    memset(&mine, 0, sizeof mine);
    mine.good = cudaIpcGetMemHandle(&mine.handle, own) == cudaSuccess;
    comm_gather(comm, all, &mine, sizeof mine);
    for (int r = 0; r < comm->size; r++) {
        of[r] = r == comm->rank ? own : NULL;
        if (r == comm->rank || !all[r].good) good &= all[r].good;
        else if (cudaIpcOpenMemHandle(&of[r], all[r].handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess)
            of[r] = NULL, good = 0;
    }
    cudaGetLastError();  // what failed is no error of the calls that follow
    return peers_agree(comm, good);
}

static inline void peers_forget(const Peers* p, void** of) {
    for (int r = 0; r < p->comm->size; r++)
        if (r != p->comm->rank && of[r]) cudaCheck(cudaIpcCloseMemHandle(of[r]));
}

// A function of the driver, or NULL.
static inline void* peers_driver(const char* name) {
    enum cudaDriverEntryPointQueryResult found;
    void* function = NULL;
    if (cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        function = NULL;
    return function;
}

static inline void peers_close(Peers* p) {
    if (!p->comm) return;
    cudaCheck(cudaStreamSynchronize(p->stream));
    comm_barrier(p->comm);  // nobody writes to a buffer that is gone
    for (int i = 0; i < p->count; i++) peers_forget(p, p->buffers[i].of);
    peers_forget(p, p->numbers);
    if (p->fetched) cudaCheck(cudaFree(p->fetched));
    comm_barrier(p->comm);
    cudaCheck(cudaFree(p->numbers[p->comm->rank]));
    memset(p, 0, sizeof *p);
}

// What is summed and copied runs on `stream`. Returns 0, and leaves p->comm NULL, where these ranks cannot do that.
static inline int peers_open(Peers* p, const Comm* comm, cudaStream_t stream) {
    memset(p, 0, sizeof *p);
    if (comm->size == 1 || comm->size > PEERS_MOST || comm->local_size != comm->size) return 0;
    void *write = peers_driver("cuStreamWriteValue32"), *wait = peers_driver("cuStreamWaitValue32");
    memcpy(&p->write, &write, sizeof write), memcpy(&p->wait, &wait, sizeof wait);
    if (!peers_agree(comm, write && wait)) return 0;
    p->comm = comm, p->stream = stream;
    cudaCheck(cudaMalloc(&p->numbers[comm->rank], PEERS_SMALLEST));
    cudaCheck(cudaMemset(p->numbers[comm->rank], 0, PEERS_SMALLEST));
    cudaCheck(cudaDeviceSynchronize());
    int good = peers_exchange(comm, p->numbers[comm->rank], p->numbers);
    if (good)
        good = peers_agree(comm, cudaMalloc(&p->fetched, (size_t)(comm->size - 1) * PEERS_PIECE * sizeof(real)) ==
                                     cudaSuccess);
    if (!good) cudaGetLastError(), peers_close(p);
    return good;
}

// Let the others see this buffer, an allocation of its own that is as large on all ranks. Returns its number, which is the
// same everywhere, or -1 on all where that is not possible.
static inline int peers_see(Peers* p, void* own, size_t bytes) {
    if (!p->comm || bytes < PEERS_SMALLEST) return -1;
    for (int i = 0; i < p->count; i++)
        if (p->buffers[i].of[p->comm->rank] == own) return i;
    CHECK(p->count < PEERS_BUFFERS);
    void** of = p->buffers[p->count].of;
    if (peers_exchange(p->comm, own, of)) return p->count++;
    peers_forget(p, of);
    return -1;
}

// ---------------------------------------------------------------------------------------------------------
// Turns

static inline CUdeviceptr peers_number(const Peers* p, int of, PeersNumber which, int from) {
    return (CUdeviceptr)((uint32_t*)p->numbers[of] + which * PEERS_MOST + from);
}

// Tell all others that this rank's stream has come here in this turn.
static inline void peers_tell(const Peers* p, PeersNumber which) {
    for (int r = 0; r < p->comm->size; r++)
        if (r != p->comm->rank)
            CHECK(p->write((CUstream)p->stream, peers_number(p, r, which, p->comm->rank), p->turn, 0) == CUDA_SUCCESS);
}

// What is launched from here on begins once all others have told so.
static inline void peers_await(const Peers* p, PeersNumber which) {
    for (int r = 0; r < p->comm->size; r++)
        if (r != p->comm->rank)
            CHECK(p->wait((CUstream)p->stream, peers_number(p, p->comm->rank, which, r), p->turn,
                          CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
}

static inline void peers_copy(const Peers* p, void* to, const void* from, size_t bytes) {
    cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, p->stream));
}

// Elements begin .. begin + n - 1 of this rank, written into the buffers of the others.
static inline void peers_hand_out(const Peers* p, int buffer, size_t begin, size_t bytes) {
    int rank = p->comm->rank, size = p->comm->size;
    void* const* of = p->buffers[buffer].of;
    for (int k = 1; k < size; k++)  // not all to the same one at once
        peers_copy(p, (char*)of[(rank + k) % size] + begin, (char*)of[rank] + begin, bytes);
}

// Elements of this rank's own part become the sums over all ranks; with `all` the others get them too. The others' parts
// are theirs: their sums are there, and this rank's gradients may be written again, after peers_settle().
static inline void peers_sum(Peers* p, int buffer, size_t begin, size_t n, int all) {
    int rank = p->comm->rank, size = p->comm->size;
    void* const* of = p->buffers[buffer].of;
    p->turn++;
    peers_tell(p, PEERS_READY);
    peers_await(p, PEERS_READY);
    for (size_t at = begin; at < begin + n; at += PEERS_PIECE) {
        size_t count = min_size(PEERS_PIECE, begin + n - at);
        PeersSummands s;
        s.from[rank] = (const float4*)((real*)of[rank] + at);
        for (int k = 1; k < size; k++) {
            int r = (rank + k) % size;
            real* fetched = p->fetched + (size_t)(k - 1) * PEERS_PIECE;
            peers_copy(p, fetched, (real*)of[r] + at, count * sizeof(real));
            s.from[r] = (const float4*)fetched;
        }
        unsigned blocks = (unsigned)min_size(64, (count / 4 + 255) / 256);
        peers_sum_kernel<<<blocks, 256, 0, p->stream>>>((float4*)((real*)of[rank] + at), s, size, count / 4);
        cudaCheck(cudaGetLastError());
    }
    if (all && n) peers_hand_out(p, buffer, begin * sizeof(real), n * sizeof(real));
    peers_tell(p, PEERS_DONE);
}

// What is launched on the stream from here on comes after this turn of all ranks.
static inline void peers_settle(const Peers* p) { peers_await(p, PEERS_DONE); }

// Bytes of this rank, `begin` bytes into the buffer, to all others: they have come after peers_settle(). Before the first
// of several that follow each other (`first`) the others have to be done with what they had there.
static inline void peers_share(Peers* p, int buffer, size_t begin, size_t bytes, int first) {
    p->turn++;
    if (first) {
        peers_tell(p, PEERS_READY);
        peers_await(p, PEERS_READY);
    }
    if (bytes) peers_hand_out(p, buffer, begin, bytes);
    peers_tell(p, PEERS_DONE);
}

#endif
#endif
