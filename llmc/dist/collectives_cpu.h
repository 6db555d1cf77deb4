/* The CPU's part of collectives.h: MPI if it started the ranks, else TCP over the process group's links.
 *
 * Every link ends at rank 0, which adds in rank order and forwards what other ranks exchange. MPI is faster. */
#ifndef LLMC_DIST_COLLECTIVES_CPU_H
#define LLMC_DIST_COLLECTIVES_CPU_H

#include "llmc/dist/collectives.h"
#ifndef __CUDACC__

enum { TO_ALL = -1 };  // instead of the root of a sum

static inline void collectives_open(Collectives* c, ProcessGroup* group) { c->group = group; }

static inline size_t collectives_element(ReduceType type) {
    CHECK(type != SUM_BF16);
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

#else
static inline void mpi_sum(Collectives* c, void* values, size_t n, ReduceType type, int root) {
    (void)c, (void)values, (void)n, (void)type, (void)root;
}
static inline void mpi_broadcast(Collectives* c, void* bytes, size_t n, int root) {
    (void)c, (void)bytes, (void)n, (void)root;
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

#endif
#endif
