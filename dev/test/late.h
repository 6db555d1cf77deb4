/* Collectives that come as late as they may: included before a trainer (make's build/late), this takes the place of
 * llmc/run/collective.h on the CPU. What the trainer hands to the collectives is kept in a queue until it waits for it, or for
 * what was put there later. A forward pass or a checkpoint that does not wait has parameters of the step before, and
 * dev/test/late.sh sees it.
 *
 * Only for runs in which all ranks do the same: where one takes a sample, or validates more batches than another, it alone
 * waits, and MPI never ends. */
#ifndef LLMC_LATE_H
#define LLMC_LATE_H

#define collective_sum collective_sum_now
#define collective_sum_to collective_sum_to_now
#define collective_broadcast collective_broadcast_now
#define collective_mark collective_mark_now
#define ops_wait_for_collective ops_wait_for_collective_now
#include "../../llmc/run/collective.h"
#undef collective_sum
#undef collective_sum_to
#undef collective_broadcast
#undef collective_mark
#undef ops_wait_for_collective

typedef enum { LATE_SUM, LATE_SUM_TO, LATE_BROADCAST } LateKind;

typedef struct {
    LateKind kind;
    Collective* collective;
    void* values;
    size_t n;
    SumType type;
    int root;
} LateTask;

enum { LATE_MOST = 4096 };

static struct {
    LateTask tasks[LATE_MOST];  // a ring
    int put, done;              // since the start
} late;

static inline void late_put(LateTask task) {
    CHECK(late.put - late.done < LATE_MOST);
    late.tasks[late.put++ % LATE_MOST] = task;
}

static inline void collective_sum(Collective* c, void* values, size_t n, SumType type) {
    LateTask task = {LATE_SUM, c, values, n, type, 0};
    late_put(task);
}

static inline void collective_sum_to(Collective* c, void* values, size_t n, SumType type, int root) {
    LateTask task = {LATE_SUM_TO, c, values, n, type, root};
    late_put(task);
}

static inline void collective_broadcast(Collective* c, void* bytes, size_t n, int root) {
    LateTask task = {LATE_BROADCAST, c, bytes, n, SUM_REAL, root};
    late_put(task);
}

// The CPU's marks are an int that nobody reads: here, how much had been put into the queue.
static inline void collective_mark(Collective* c, Mark* m) { (void)c, m->unused = late.put; }

static inline void ops_wait_for_collective(Context* ctx, Mark* m) {
    (void)ctx;
    for (; late.done < m->unused; late.done++) {
        LateTask* t = &late.tasks[late.done % LATE_MOST];
        if (t->kind == LATE_SUM) collective_sum_now(t->collective, t->values, t->n, t->type);
        if (t->kind == LATE_SUM_TO) collective_sum_to_now(t->collective, t->values, t->n, t->type, t->root);
        if (t->kind == LATE_BROADCAST) collective_broadcast_now(t->collective, t->values, t->n, t->root);
    }
}

#endif
