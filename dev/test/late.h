/* Collectives that are as late as possible: included before a trainer (make's build/late), this replaces
 * llmc/dist/collectives.h on the CPU. What the trainer hands to the collectives stays in a queue until the trainer
 * waits for it, or for something that was enqueued later. A forward pass or a checkpoint that does not wait uses the
 * parameters of the step before, and the group "late" of dev/test/equal.txt finds that.
 *
 * Only for runs in which all ranks make the same calls: if one rank takes a sample, or validates more batches than
 * another, it waits alone, and MPI never ends. */
#ifndef LLMC_LATE_H
#define LLMC_LATE_H

#define all_reduce all_reduce_now
#define reduce reduce_now
#define broadcast broadcast_now
#define collectives_record_event collectives_record_event_now
#define ops_wait_for_collectives ops_wait_for_collectives_now
#include "llmc/dist/collectives.h"
#undef all_reduce
#undef reduce
#undef broadcast
#undef collectives_record_event
#undef ops_wait_for_collectives

typedef enum { LATE_ALL_REDUCE, LATE_REDUCE, LATE_BROADCAST } LateKind;

typedef struct {
    LateKind kind;
    Collectives* collectives;
    void* values;
    size_t n;
    ReduceType type;
    int root;
} LateTask;

enum { LATE_MOST = 4096 };

static struct {
    LateTask tasks[LATE_MOST];  // a ring
    int put, done;              // counted from the start
} late;

static inline void late_put(LateKind kind, Collectives* c, void* values, size_t n, ReduceType type, int root) {
    CHECK(late.put - late.done < LATE_MOST);
    late.tasks[late.put++ % LATE_MOST] = (LateTask){kind, c, values, n, type, root};
}

static inline void all_reduce(Collectives* c, void* values, size_t n, ReduceType type) {
    late_put(LATE_ALL_REDUCE, c, values, n, type, 0);
}

static inline void reduce(Collectives* c, void* values, size_t n, ReduceType type, int root) {
    late_put(LATE_REDUCE, c, values, n, type, root);
}

static inline void broadcast(Collectives* c, void* bytes, size_t n, int root) {
    late_put(LATE_BROADCAST, c, bytes, n, SUM_REAL, root);
}

// The CPU's event is an int that nobody reads: here, how many tasks were enqueued before it.
static inline void collectives_record_event(Collectives* c, StreamEvent* e) { (void)c, e->unused = late.put; }

static inline void ops_wait_for_collectives(Context* ctx, StreamEvent* e) {
    (void)ctx;
    for (; late.done < e->unused; late.done++) {
        LateTask* t = &late.tasks[late.done % LATE_MOST];
        if (t->kind == LATE_ALL_REDUCE) all_reduce_now(t->collectives, t->values, t->n, t->type);
        if (t->kind == LATE_REDUCE) reduce_now(t->collectives, t->values, t->n, t->type, t->root);
        if (t->kind == LATE_BROADCAST) broadcast_now(t->collectives, t->values, t->n, t->root);
    }
}

#endif
