/* The CPU's part of collectives.h: MPI if it started the ranks, else TCP over the process group's links.
 *
 * Every link ends at rank 0, which adds in rank order and forwards what other ranks exchange. MPI is faster. */
#ifndef LLMC_DIST_COLLECTIVES_CPU_H
#define LLMC_DIST_COLLECTIVES_CPU_H

#include "llmc/dist/collectives.h"
#ifndef __CUDACC__

enum { TO_ALL = -1 };  // instead of the root of a sum

static inline void collectives_open(Collectives* c, ProcessGroup* group) {
    c->group = group;
    c->piece = (size_t)1 << 30;
}

static inline size_t collectives_element(ReduceType type) {
    return type == SUM_DOUBLE ? sizeof(double) : type == MAX_UINT32 ? sizeof(uint32_t) : sizeof(real);
}

// ---------------------------------------------------------------------------------------------------------
// TCP

// Add n values of another rank, or take the larger ones.
static inline void links_add(void* values, const void* other, size_t n, ReduceType type) {
    for (size_t i = 0; i < n; i++) {
        if (type == SUM_REAL) ((real*)values)[i] += ((const real*)other)[i];
        else if (type == SUM_DOUBLE) ((double*)values)[i] += ((const double*)other)[i];
        else if (((const uint32_t*)other)[i] > ((uint32_t*)values)[i])
            ((uint32_t*)values)[i] = ((const uint32_t*)other)[i];
    }
}

// The sum of all ranks' values, on rank `root` or TO_ALL.
static inline void links_sum(Collectives* c, void* values, size_t n, ReduceType type, int root) {
    const ProcessGroup* group = c->group;
    size_t bytes = n * collectives_element(type);
    if (group->rank > 0) {
        group_send(group, 0, values, bytes);
        if (root == TO_ALL || root == group->rank) group_receive(group, 0, values, bytes);
        return;
    }
    char *sum = (char*)xmalloc(bytes), *other = (char*)xmalloc(bytes);
    memcpy(sum, values, bytes);
    for (int r = 1; r < group->size; r++) {
        group_receive(group, r, other, bytes);
        links_add(sum, other, n, type);
    }
    if (root <= 0) memcpy(values, sum, bytes);
    for (int r = 1; r < group->size; r++)
        if (root == TO_ALL || root == r) group_send(group, r, sum, bytes);
    free(sum), free(other);
}

static inline void links_broadcast(Collectives* c, void* bytes, size_t n, int root) {
    const ProcessGroup* group = c->group;
    if (root > 0 && group->rank == root) group_send(group, 0, bytes, n);
    if (root > 0 && group->rank == 0) group_receive(group, root, bytes, n);
    for (int r = 1; r < group->size && group->rank == 0; r++)
        if (r != root) group_send(group, r, bytes, n);
    if (group->rank > 0 && group->rank != root) group_receive(group, 0, bytes, n);
}

static inline void links_all_to_all(Collectives* c, void* receive, const size_t* receive_bytes, const void* send,
                                    const size_t* send_bytes) {
    const ProcessGroup* group = c->group;
    size_t size = (size_t)group->size, total = collectives_total(c, send_bytes), most = 0;
    size_t* bytes = (size_t*)xmalloc(size * size * sizeof *bytes);  // [from][to]
    group_gather(group, bytes, send_bytes, size * sizeof *bytes);
    for (size_t r = 0; r < size; r++) CHECK(bytes[r * size + (size_t)group->rank] == receive_bytes[r]);
    if (group->rank > 0) {
        group_send(group, 0, send, total);
        group_receive(group, 0, receive, collectives_total(c, receive_bytes));
        free(bytes);
        return;
    }
    const char** from = (const char**)xcalloc(size, sizeof *from);  // the next block of each rank
    char** held = (char**)xcalloc(size, sizeof *held);
    from[0] = (const char*)send;
    for (size_t r = 1; r < size; r++) {
        total = collectives_total(c, bytes + r * size);
        from[r] = held[r] = (char*)xmalloc(total);
        group_receive(group, (int)r, held[r], total);
    }
    for (size_t to = 0; to < size; to++) {
        total = 0;
        for (size_t r = 0; r < size; r++) total += bytes[r * size + to];
        most = max_size(most, total);
    }
    char* joined = (char*)xmalloc(most);
    for (size_t to = 0; to < size; to++) {
        total = 0;
        for (size_t r = 0; r < size; r++) {
            size_t n = bytes[r * size + to];
            memcpy((to ? joined : (char*)receive) + total, from[r], n);
            from[r] += n, total += n;
        }
        if (to) group_send(group, (int)to, joined, total);
    }
    for (size_t r = 1; r < size; r++) free(held[r]);
    free(joined), free(held), free(from), free(bytes);
}

// ---------------------------------------------------------------------------------------------------------
// MPI

#ifdef USE_MPI
// MPI counts in int: longer buffers are sent in pieces.
enum { COLLECTIVES_PIECE = 1 << 28 };

#define mpiCheck(call) group_mpi_check(c->group, (call), #call)

static inline MPI_Datatype collectives_type(ReduceType type) {
    if (type == MAX_UINT32) return MPI_UINT32_T;
    return collectives_element(type) == sizeof(double) ? MPI_DOUBLE : MPI_FLOAT;
}

static inline void mpi_sum(Collectives* c, void* values, size_t n, ReduceType type, int root) {
    MPI_Datatype kind = collectives_type(type);
    MPI_Op op = type == MAX_UINT32 ? MPI_MAX : MPI_SUM;
    int is_root = c->group->rank == root;
    for (size_t i = 0; i < n; i += COLLECTIVES_PIECE) {
        char* piece = (char*)values + i * collectives_element(type);
        int count = (int)min_size(n - i, COLLECTIVES_PIECE);
        if (root == TO_ALL) mpiCheck(MPI_Allreduce(MPI_IN_PLACE, piece, count, kind, op, MPI_COMM_WORLD));
        else mpiCheck(MPI_Reduce(is_root ? MPI_IN_PLACE : piece, piece, count, kind, MPI_SUM, root, MPI_COMM_WORLD));
    }
}

static inline void mpi_broadcast(Collectives* c, void* bytes, size_t n, int root) {
    for (size_t i = 0; i < n; i += COLLECTIVES_PIECE)
        mpiCheck(MPI_Bcast((char*)bytes + i, (int)min_size(n - i, COLLECTIVES_PIECE), MPI_BYTE, root, MPI_COMM_WORLD));
}

// Plan one call of mpi_all_to_all(): bytes `done` .. `done + most` - 1 of each block, packed into one buffer. Returns
// the total bytes, and sets each rank's count and place in that buffer.
static inline size_t mpi_pieces(const Collectives* c, int* counts, int* places, const size_t* bytes, size_t done,
                                size_t most) {
    size_t total = 0;
    for (int r = 0; r < c->group->size; r++) {
        size_t n = bytes[r] > done ? min_size(bytes[r] - done, most) : 0;
        counts[r] = (int)n, places[r] = (int)total;
        total += n;
    }
    return total;
}

// MPI_Alltoallv's counts and offsets are int. Larger buffers are exchanged in several calls, each with a piece of every
// block. All ranks must make the same number of calls.
static inline void mpi_all_to_all(Collectives* c, void* receive, const size_t* receive_bytes, const void* send,
                                  const size_t* send_bytes) {
    int size = c->group->size, *counts = (int*)xmalloc(4 * (size_t)size * sizeof *counts);
    int *places = counts + size, *in_counts = counts + 2 * size, *in_places = counts + 3 * size;
    size_t most = max_size(c->piece / (size_t)size, 1);
    uint64_t largest = 0;
    for (int r = 0; r < size; r++) largest = max_size(largest, send_bytes[r]);
    mpiCheck(MPI_Allreduce(MPI_IN_PLACE, &largest, 1, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD));
    int is_whole = largest <= most;
    char *out = is_whole ? (char*)send : (char*)xmalloc(most * (size_t)size),
         *in = is_whole ? (char*)receive : (char*)xmalloc(most * (size_t)size);
    for (size_t done = 0; done < largest; done += most) {
        mpi_pieces(c, counts, places, send_bytes, done, most);
        mpi_pieces(c, in_counts, in_places, receive_bytes, done, most);
        const char* from = (const char*)send + done;
        for (int r = 0; r < size && !is_whole; from += send_bytes[r], r++)
            memcpy(out + places[r], counts[r] ? from : (const char*)send, (size_t)counts[r]);
        mpiCheck(MPI_Alltoallv(out, counts, places, MPI_BYTE, in, in_counts, in_places, MPI_BYTE, MPI_COMM_WORLD));
        char* to = (char*)receive + done;
        for (int r = 0; r < size && !is_whole; to += receive_bytes[r], r++)
            memcpy(in_counts[r] ? to : (char*)receive, in + in_places[r], (size_t)in_counts[r]);
    }
    if (!is_whole) free(out), free(in);
    free(counts);
}
#else
static inline void mpi_sum(Collectives* c, void* values, size_t n, ReduceType type, int root) {
    (void)c, (void)values, (void)n, (void)type, (void)root;
}
static inline void mpi_broadcast(Collectives* c, void* bytes, size_t n, int root) {
    (void)c, (void)bytes, (void)n, (void)root;
}
static inline void mpi_all_to_all(Collectives* c, void* receive, const size_t* receive_bytes, const void* send,
                                  const size_t* send_bytes) {
    (void)c, (void)receive, (void)receive_bytes, (void)send, (void)send_bytes;
}
#endif

// ---------------------------------------------------------------------------------------------------------
// The collectives

static inline void collectives_sum(Collectives* c, void* values, size_t n, ReduceType type, int root) {
    group_wait_begin(c->group);
    if (c->group->is_mpi) mpi_sum(c, values, n, type, root);
    else links_sum(c, values, n, type, root);
    group_wait_end(c->group);
}

// Sum n values over the ranks, or take their maximum, in place, on every rank.
static inline void all_reduce(Collectives* c, void* values, size_t n, ReduceType type) {
    collectives_sum(c, values, n, type, TO_ALL);
}

// The same on rank `root` only; the other ranks' values do not change.
static inline void reduce(Collectives* c, void* values, size_t n, ReduceType type, int root) {
    collectives_sum(c, values, n, type, root);
}

// Copy n bytes from rank `root` to all.
static inline void broadcast(Collectives* c, void* bytes, size_t n, int root) {
    group_wait_begin(c->group);
    if (c->group->is_mpi) mpi_broadcast(c, bytes, n, root);
    else links_broadcast(c, bytes, n, root);
    group_wait_end(c->group);
}

// Send a block of bytes from each rank to each. Both buffers hold the blocks in the order of ranks without gaps; sizes
// [ranks].
static inline void all_to_all(Collectives* c, void* receive, const size_t* receive_bytes, const void* send,
                              const size_t* send_bytes) {
    if (c->group->size == 1) {
        memcpy(receive, send, send_bytes[0]);
        return;
    }
    group_wait_begin(c->group);
    if (c->group->is_mpi) mpi_all_to_all(c, receive, receive_bytes, send, send_bytes);
    else links_all_to_all(c, receive, receive_bytes, send, send_bytes);
    group_wait_end(c->group);
}

#endif
#endif
