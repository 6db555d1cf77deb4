/* Ranks that train together. This build has one: every call returns at once and costs nothing.
 *
 * The trainers are written against this interface: a rank takes its share of each step's sequences, gradients and
 * losses are summed over the ranks before the update, and rank 0 writes the files. */
#ifndef LLMC_COMM_H
#define LLMC_COMM_H

#include "../device/device.h"

typedef struct {
    int rank, size;
} Comm;

static inline void comm_init(Comm* comm) {
    comm->rank = 0;
    comm->size = 1;
}

// Sum `n` elements over all ranks, in place, on every rank.
static inline void comm_sum(const Comm* comm, real* values, size_t n, Context* ctx) {
    (void)values, (void)n, (void)ctx;
    CHECK(comm->size == 1);
}

// The same for numbers that the host holds.
static inline void comm_sum_counts(const Comm* comm, double* values, size_t n) {
    (void)values, (void)n;
    CHECK(comm->size == 1);
}

#endif
