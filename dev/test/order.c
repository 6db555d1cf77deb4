/* Gradients are summed and parameters broadcast on a side stream, overlapped with the ops; only events keep the two
 * streams in order. Here both streams are queues of tasks, which run in any order that the events allow: collectives as
 * early or as late as possible, or at random. The result must be correct in every order. Without any one of the waits
 * it is wrong in at least one: dev/mutants.txt.
 *
 * This file replaces llmc/dist/collectives.h, so that the order under test is that of llmc/dist/grad_sync.h. */
#define LLMC_DIST_COLLECTIVES_H
#include "dev/test/tests.h"
#include "llmc/dist/process_group.h"

typedef enum { SUM_REAL, SUM_DOUBLE } ReduceType;
typedef enum { OPS, COLLECTIVES, STREAMS } Stream;
typedef enum { RECORD, WAIT, BACKWARD_PASS, NORM, UPDATE, FORWARD_PASS, ALL_REDUCE, REDUCE, BROADCAST } TaskKind;

typedef struct {
    int recorded;  // how often it was recorded so far
} StreamEvent;

typedef struct {
    TaskKind kind;
    const StreamEvent* event;
    int number;    // of the event's recording
    void* values;  // [n]
    size_t n;
    int root, layer, step;
} Task;

enum { MOST_TASKS = 4096 };

typedef struct {
    Task tasks[MOST_TASKS];
    int count, done;
} Queue;

static Queue queues[STREAMS];  // the GPU's stand-in

typedef struct {
    ProcessGroup* group;
} Collectives;

static void put(Stream stream, Task task) {
    Queue* q = &queues[stream];
    CHECK(q->count < MOST_TASKS);
    q->tasks[q->count++] = task;
}

static void put_record(Stream stream, StreamEvent* event) {
    put(stream, (Task){.kind = RECORD, .event = event, .number = ++event->recorded});
}

static void put_wait(Stream stream, const StreamEvent* event) {
    put(stream, (Task){.kind = WAIT, .event = event, .number = event->recorded});
}

static void put_sum(TaskKind kind, void* values, size_t n, ReduceType type, int root) {
    CHECK(type == SUM_REAL);
    put(COLLECTIVES, (Task){.kind = kind, .values = values, .n = n, .root = root});
}

static void stream_event_open(StreamEvent* m) { m->recorded = 0; }
static void stream_event_close(StreamEvent* m) { (void)m; }
static void collectives_open(Collectives* c, ProcessGroup* group) { c->group = group; }
static void collectives_close(Collectives* c) { (void)c; }
static void collectives_begin(void) {}
static void collectives_end(void) {}
static void collectives_wait_for_ops(Collectives* c, StreamEvent* m, Context* ctx) {
    (void)c, (void)ctx;
    put_record(OPS, m);
    put_wait(COLLECTIVES, m);
}
static void collectives_record_event(Collectives* c, StreamEvent* m) { (void)c, put_record(COLLECTIVES, m); }
static void ops_wait_for_collectives(Context* ctx, StreamEvent* m) { (void)ctx, put_wait(OPS, m); }
static void all_reduce(Collectives* c, void* values, size_t n, ReduceType type) {
    (void)c, put_sum(ALL_REDUCE, values, n, type, 0);
}
static void reduce(Collectives* c, void* values, size_t n, ReduceType type, int root) {
    (void)c, put_sum(REDUCE, values, n, type, root);
}
static void broadcast(Collectives* c, void* bytes, size_t n, int root) {
    (void)c, put_sum(BROADCAST, bytes, n / sizeof(floatX), SUM_REAL, root);
}

#include "llmc/dist/grad_sync.h"

// ---------------------------------------------------------------------------------------------------------
// A model whose gradients and parameters are numbers that encode the step. This is the middle one of three ranks with
// the same gradients, so a sum is three times as much.

enum { LAYERS = 5, STEPS = 3, RANKS = 3, ME = 1 };  // so that elements cannot be divided evenly

typedef struct {
    TensorTable table;
    real* grads;     // step number s: 10 s, summed 30 s
    floatX* params;  // after the update of step s: s
    real norm;       // 7 s, summed 21 s, from the summed gradients
    int wrong;
    FlatRange shard;
} Toy;

static void toy_open(Toy* toy) {
    const int dims[] = {0, 96, 5};
    const TensorRow front = {"front", 0, {1, 2}}, inner = {"h.%d", 0, {1, 2}}, back = {"back", 0, {1, 0}};
    memset(toy, 0, sizeof *toy);
    tensors_add(&toy->table, &front, 1, dims, -1);
    for (int l = 0; l < LAYERS; l++) tensors_add(&toy->table, &inner, 1, dims, l);
    tensors_add(&toy->table, &back, 1, dims, -1);
    tensors_finish(&toy->table);
    toy->grads = (real*)xcalloc(toy->table.elements, sizeof(real));
    toy->params = (floatX*)xcalloc(toy->table.elements, sizeof(floatX));
}

static void toy_close(Toy* toy) {
    free(toy->grads), free(toy->params);
    tensors_free(&toy->table);
}

// The elements of a layer; -1: those before the layers; LAYERS: those after them.
static FlatRange toy_layer(const Toy* toy, int layer) {
    const Tensor* t = &toy->table.tensors[layer + 1];
    FlatRange range = {t->offset, (layer == LAYERS ? toy->table.elements : t[1].offset) - t->offset};
    return range;
}

static void toy_do(Toy* toy, const Task* t) {
    FlatRange part = t->kind == UPDATE || t->kind == NORM ? toy->shard : toy_layer(toy, t->layer);
    if (t->kind == ALL_REDUCE || (t->kind == REDUCE && t->root == ME))
        for (size_t i = 0; i < t->n; i++) ((real*)t->values)[i] *= RANKS;
    if (t->kind == BROADCAST && t->root != ME)  // the other ranks are at the step of this one's parameters
        for (size_t i = 0; i < t->n; i++) ((floatX*)t->values)[i] = toy->params[toy->shard.begin];
    if (t->kind == UPDATE) toy->wrong += toy->norm != (real)(7 * RANKS * t->step);
    if (t->kind == NORM) toy->norm = (real)(7 * t->step);
    if (t->kind < BACKWARD_PASS || t->kind > FORWARD_PASS) return;
    for (size_t i = part.begin; i < part.begin + part.size; i++) {
        if (t->kind == BACKWARD_PASS) toy->grads[i] = (real)(10 * t->step);
        if (t->kind == NORM) toy->wrong += toy->grads[i] != (real)(10 * RANKS * t->step);
        if (t->kind == UPDATE) toy->params[i] = (floatX)t->step;
        if (t->kind == FORWARD_PASS) toy->wrong += toy->params[i] != (floatX)(t->step - 1);
    }
}

static void toy_put(TaskKind kind, int layer, int step) {
    put(OPS, (Task){.kind = kind, .layer = layer, .step = step});
}

// Enqueue the steps of a run, as the trainers launch them.
static void toy_launch(Toy* toy, GradSync* r, Context* ctx) {
    for (int step = 1; step <= STEPS; step++) {
        for (int l = -1; l <= LAYERS; l++) {
            grad_sync_wait(r, l < LAYERS ? l : GRAD_SYNC_LAST, ctx);
            toy_put(FORWARD_PASS, l, step);
        }
        grad_sync_begin(r);
        toy_put(BACKWARD_PASS, LAYERS, step);
        for (int l = LAYERS - 1; l >= 0; l--) {
            toy_put(BACKWARD_PASS, l, step);
            grad_sync_ready(r, l, toy->grads, ctx);
        }
        toy_put(BACKWARD_PASS, -1, step);
        grad_sync_ready(r, -1, toy->grads, ctx);
        grad_sync_finish(r, toy->grads, ctx);
        toy_put(NORM, 0, step);
        grad_sync_all_reduce(r, &toy->norm, 1, SUM_REAL, ctx);
        toy_put(UPDATE, 0, step);
        broadcast_params(r, toy->params, ctx);
    }
}

static int is_recorded(const Task* wait) {
    for (int stream = 0; stream < STREAMS; stream++)
        for (int i = 0; i < queues[stream].done; i++) {
            const Task* t = &queues[stream].tasks[i];
            if (t->kind == RECORD && t->event == wait->event && t->number >= wait->number) return 1;
        }
    return wait->number == 0;
}

static int step_of(Toy* toy, int stream) {
    Queue* q = &queues[stream];
    const Task* t = &q->tasks[q->done];
    if (q->done == q->count || (t->kind == WAIT && !is_recorded(t))) return 0;
    toy_do(toy, t);
    q->done++;
    return 1;
}

// Enqueue a run and do its tasks. `seed` 0: ops as early as possible, 1: collectives as early as possible, else at
// random. Returns how many values were wrong.
static int run_in_order(GradSyncSettings settings, uint64_t seed) {
    static Context ctx;
    Toy toy;
    GradSync r;
    ProcessGroup group = {.rank = ME, .size = RANKS};
    memset(queues, 0, sizeof queues);
    context_init(&ctx);
    toy_open(&toy);
    grad_sync_open(&r, &group, &toy.table, settings);
    toy.shard = r.shard;
    toy_launch(&toy, &r, &ctx);
    for (uint32_t n = 0; queues[OPS].done < queues[OPS].count || queues[COLLECTIVES].done < queues[COLLECTIVES].count;
         n++) {
        int first = seed < 2 ? (int)seed : (int)(philox(n, 0, 0, 0, seed).v[0] & 1);
        int progressed = step_of(&toy, first) || step_of(&toy, !first);
        CHECK(progressed);
    }
    grad_sync_close(&r);
    toy_close(&toy);
    context_free(&ctx);
    return toy.wrong;
}

static void test_orders(Tests* t) {
    static const struct {
        const char* name;
        double bucket_mib;
        int has_p2p;
    } ways[] = {
        {"buckets of a layer", 0, 0},
        {"buckets of two layers", 1.5 * 96 * 5 * sizeof(real) / 1048576, 0},
        {"all at once", 1, 0},
        {"GPUs with NVLink", BUCKET_AUTO, 1},
    };
    for (int zero = 0; zero < 2; zero++)
        for (size_t way = 0; way < COUNT_OF(ways); way++) {
            int wrong = 0;
            for (uint64_t seed = 0; seed < 64; seed++)
                wrong += run_in_order((GradSyncSettings){zero, ways[way].bucket_mib, ways[way].has_p2p, 0}, seed) > 0;
            expect(t, !wrong, named("-z %d, %s", zero, ways[way].name), "%d of 64 orders are wrong", wrong);
        }
}

int main(int argc, char** argv) {
    Tests t;
    tests_choose(&t, argc, argv);
    test_orders(&t);
    return tests_close(&t);
}
