/* Gradients are summed and parameters shared beside the ops, and marks alone keep the two in order. Here both sides are
 * queues of things to do, which run in whatever order the marks allow: the collectives as early or as late as they may, or
 * by chance. The result must be right each time; with any one kind of wait left out it must be wrong at least once.
 *
 * This file takes the place of llmc/run/collective.h, so that the order under test is that of llmc/run/reduction.h. */
#define LLMC_COLLECTIVE_H
#include "../../llmc/run/comm.h"

typedef enum { SUM_REAL, SUM_DOUBLE, SUM_BF16 } SumType;
typedef enum { OPS, COLLECTIVES, SIDES } Side;
typedef enum { DO_RECORD, DO_WAIT, DO_BACKWARD, DO_NORM, DO_UPDATE, DO_FORWARD, DO_SUM, DO_SUM_TO, DO_BROADCAST } Doing;

typedef struct {
    int recorded;  // how often its record has been put into a queue
} Mark;

typedef struct {
    Doing doing;
    const Mark* mark;
    int number;    // of the mark's record
    void* values;  // and n of them, in what unit `doing` has
    size_t n;
    int root, layer, step;
} Task;

enum { MOST_TASKS = 4096 };

typedef struct {
    Task tasks[MOST_TASKS];
    int count, done;
} Queue;

// Where a wait is made: what is left out is named by it.
typedef enum { NOWHERE, IN_READY, IN_FINISH, IN_SUM, IN_SHARE, IN_WAIT, SITES } Site;

typedef struct {
    Queue queues[SIDES];
    Site site;
    Side side_of_wait;
    Site left_out;
    Side side_left_out;
} World;

typedef struct {
    Comm* comm;
    World* world;
} Collective;

static World the_world;  // what stands for the GPU

static void put(Side side, Task task) {
    Queue* q = &the_world.queues[side];
    CHECK(q->count < MOST_TASKS);
    q->tasks[q->count++] = task;
}

static void put_wait(Side side, const Mark* mark) {
    Task wait = {DO_WAIT, mark, mark->recorded, NULL, 0, 0, 0, 0};
    if (the_world.site == the_world.left_out && side == the_world.side_left_out) return;
    put(side, wait);
}

static void put_record(Side side, Mark* mark) {
    Task record = {DO_RECORD, mark, ++mark->recorded, NULL, 0, 0, 0, 0};
    put(side, record);
}

static void mark_open(Mark* m) { m->recorded = 0; }
static void mark_close(Mark* m) { (void)m; }
static void collective_open(Collective* c, Comm* comm) { c->comm = comm; }
static void collective_close(Collective* c) { (void)c; }
static void collective_begin(void) {}
static void collective_end(void) {}
static void collective_waits_for_ops(Collective* c, Mark* m, Context* ctx) {
    (void)c, (void)ctx;
    put_record(OPS, m);
    put_wait(COLLECTIVES, m);
}
static void collective_mark(Collective* c, Mark* m) { (void)c, put_record(COLLECTIVES, m); }
static void ops_wait_for_collective(Context* ctx, Mark* m) { (void)ctx, put_wait(OPS, m); }
static void collective_sum(Collective* c, void* values, size_t n, SumType type) {
    Task task = {DO_SUM, NULL, 0, values, n, 0, 0, 0};
    (void)c;
    CHECK(type == SUM_REAL);
    put(COLLECTIVES, task);
}
static void collective_sum_to(Collective* c, void* values, size_t n, SumType type, int root) {
    Task task = {DO_SUM_TO, NULL, 0, values, n, root, 0, 0};
    (void)c;
    CHECK(type == SUM_REAL);
    put(COLLECTIVES, task);
}
static void collective_broadcast(Collective* c, void* bytes, size_t n, int root) {
    Task task = {DO_BROADCAST, NULL, 0, bytes, n / sizeof(floatX), root, 0, 0};
    (void)c, put(COLLECTIVES, task);
}

#include "../../llmc/run/reduction.h"

typedef struct {
    int passed, failed;
} Tests;

static void expect(Tests* t, int good, const char* run, const char* what) {
    printf("%s %s: %s\n", good ? "ok  " : "FAIL", run, what);
    if (good) t->passed++;
    else t->failed++;
}

// ---------------------------------------------------------------------------------------------------------
// A model of layers, whose gradients and parameters are numbers that tell of their step. This is rank 1 of two that hold
// the same, so a sum is the double.

enum { LAYERS = 4, STEPS = 3, ME = 1 };

typedef struct {
    TensorTable table;
    real* grads;     // step number s: 10 s, summed 20 s
    floatX* params;  // after the update of step s: s
    real norm;       // 7 s, summed 14 s, from the summed gradients
    int wrong, zero;
    FlatRange shard;
} Toy;

static void toy_open(Toy* toy, int zero) {
    const int dims[] = {0, 96, 5};
    const TensorRow front = {"front", 0, {1, 2}}, inner = {"h.%d", 0, {1, 2}}, back = {"back", 0, {1, 0}};
    memset(toy, 0, sizeof *toy);
    tensors_add(&toy->table, &front, 1, dims, -1);
    for (int l = 0; l < LAYERS; l++) tensors_add(&toy->table, &inner, 1, dims, l);
    tensors_add(&toy->table, &back, 1, dims, -1);
    tensors_finish(&toy->table);
    toy->grads = (real*)xcalloc(toy->table.elements, sizeof(real));
    toy->params = (floatX*)xcalloc(toy->table.elements, sizeof(floatX));
    toy->zero = zero;
}

static void toy_close(Toy* toy) {
    free(toy->grads), free(toy->params);
    tensors_free(&toy->table);
}

// The elements of a layer; -1: those before the layers; LAYERS: those behind them.
static FlatRange toy_layer(const Toy* toy, int layer) {
    const Tensor* t = &toy->table.tensors[layer + 1];
    FlatRange range = {t->offset, (layer == LAYERS ? toy->table.elements : t[1].offset) - t->offset};
    return range;
}

static void toy_do(Toy* toy, const Task* t) {
    FlatRange part = t->doing == DO_UPDATE || t->doing == DO_NORM ? toy->shard : toy_layer(toy, t->layer);
    if (t->doing == DO_SUM || (t->doing == DO_SUM_TO && t->root == ME))
        for (size_t i = 0; i < t->n; i++) ((real*)t->values)[i] *= 2;
    if (t->doing == DO_BROADCAST && t->root != ME)  // the other rank is as far as this one's parameters tell
        for (size_t i = 0; i < t->n; i++) ((floatX*)t->values)[i] = toy->params[toy->shard.begin];
    if (t->doing == DO_BACKWARD)
        for (size_t i = 0; i < part.size; i++) toy->grads[part.begin + i] = (real)(10 * t->step);
    for (size_t i = 0; t->doing == DO_NORM && i < part.size; i++)
        toy->wrong += toy->grads[part.begin + i] != (real)(20 * t->step);
    if (t->doing == DO_NORM) toy->norm = (real)(7 * t->step);
    if (t->doing == DO_UPDATE) toy->wrong += toy->norm != (real)(14 * t->step);
    for (size_t i = 0; t->doing == DO_UPDATE && i < part.size; i++) toy->params[part.begin + i] = (floatX)t->step;
    for (size_t i = 0; t->doing == DO_FORWARD && i < part.size; i++)
        toy->wrong += toy->params[part.begin + i] != (floatX)(t->step - 1);
}

static void toy_put(Doing doing, int layer, int step) {
    Task task = {doing, NULL, 0, NULL, 0, 0, layer, step};
    put(OPS, task);
}

// Put the steps of a run into the queues, as the trainers launch them.
static void toy_launch(Toy* toy, Reduction* r, Context* ctx) {
    World* w = &the_world;
    for (int step = 1; step <= STEPS; step++) {
        w->site = IN_WAIT;
        for (int l = -1; l <= LAYERS; l++) {
            reduction_wait(r, l < LAYERS ? l : REDUCTION_LAST, ctx);
            toy_put(DO_FORWARD, l, step);
        }
        reduction_begin(r);
        w->site = IN_READY;
        toy_put(DO_BACKWARD, LAYERS, step);
        for (int l = LAYERS - 1; l >= 0; l--) {
            toy_put(DO_BACKWARD, l, step);
            reduction_ready(r, l, toy->grads, ctx);
        }
        toy_put(DO_BACKWARD, -1, step);
        reduction_ready(r, -1, toy->grads, ctx);
        w->site = IN_FINISH;
        reduction_finish(r, toy->grads, ctx);
        toy_put(DO_NORM, 0, step);
        w->site = IN_SUM;
        reduction_sum(r, &toy->norm, 1, SUM_REAL, ctx);
        w->site = NOWHERE;
        toy_put(DO_UPDATE, 0, step);
        w->site = IN_SHARE;
        reduction_share(r, toy->params, ctx);
    }
}

static int is_recorded(const Mark* mark, int number) {
    for (int side = 0; side < SIDES; side++) {
        const Queue* q = &the_world.queues[side];
        for (int i = 0; i < q->done; i++)
            if (q->tasks[i].doing == DO_RECORD && q->tasks[i].mark == mark && q->tasks[i].number >= number) return 1;
    }
    return number == 0;
}

static int step_of(Toy* toy, Side side) {
    Queue* q = &the_world.queues[side];
    if (q->done == q->count) return 0;
    const Task* t = &q->tasks[q->done];
    if (t->doing == DO_WAIT && !is_recorded(t->mark, t->number)) return 0;
    if (t->doing != DO_WAIT && t->doing != DO_RECORD) toy_do(toy, t);
    q->done++;
    return 1;
}

// Run all that is in the queues; `chance` 0: ops as early as they may, 1: collectives, else by chance. Returns how many
// numbers were wrong.
static int run_queues(Toy* toy, uint64_t chance) {
    Queue* q = the_world.queues;
    toy->wrong = 0;
    for (uint32_t n = 0; q[OPS].done < q[OPS].count || q[COLLECTIVES].done < q[COLLECTIVES].count; n++) {
        int first = chance < 2 ? (int)chance : (int)(philox(n, 0, 0, 0, chance).v[0] & 1);
        int went_on = step_of(toy, (Side)first) || step_of(toy, (Side)!first);
        CHECK(went_on);
    }
    return toy->wrong;
}

// How many of a number of orders give a wrong result where a kind of wait is left out.
static int wrong_orders(ReductionSettings settings, Site left_out, Side side) {
    int wrong = 0;
    for (uint64_t chance = 0; chance < 64; chance++) {
        static Context ctx;
        Toy toy;
        Reduction r;
        Comm comm;
        memset(&the_world, 0, sizeof the_world);
        memset(&comm, 0, sizeof comm);
        comm.rank = ME, comm.size = 2;
        the_world.left_out = left_out, the_world.side_left_out = side;
        context_init(&ctx);
        toy_open(&toy, settings.zero);
        reduction_open(&r, &comm, &toy.table, settings, &ctx);
        toy.shard = r.shard;
        toy_launch(&toy, &r, &ctx);
        wrong += run_queues(&toy, chance) > 0;
        reduction_close(&r);
        toy_close(&toy);
        context_free(&ctx);
    }
    return wrong;
}

int main(void) {
    static const struct {
        const char* name;
        Site site;
        Side side;
        int whole;  // where gradients are summed at once: 1, in buckets: 0; -1: both
        int zero_only;
    } waits[] = {
        {"a bucket's sum waits for the backward pass", IN_READY, COLLECTIVES, 0, 0},
        {"the sum waits for the backward pass", IN_FINISH, COLLECTIVES, 1, 0},
        {"the norm waits for the sums", IN_FINISH, OPS, -1, 0},
        {"the norm's sum waits for the norm", IN_SUM, COLLECTIVES, -1, 0},
        {"the update waits for the norm's sum", IN_SUM, OPS, -1, 0},
        {"parameters are shared after the update", IN_SHARE, COLLECTIVES, -1, 1},
        {"the forward pass waits for parameters", IN_WAIT, OPS, -1, 1},
    };
    static const struct {
        const char* name;
        double bucket_mib;
        int is_near, whole;
    } ways[] = {
        {"buckets of a layer", 0, 0, 0},
        {"buckets of two layers", 1.5 * 96 * 5 * sizeof(real) / 1048576, 0, 0},
        {"all at once", 1, 0, 1},
        {"GPUs near each other", BUCKET_AUTO, 1, 1},
    };
    Tests t = {0, 0};
    for (int zero = 0; zero < 2; zero++)
        for (size_t way = 0; way < COUNT_OF(ways); way++) {
            ReductionSettings settings = {zero, 0, ways[way].bucket_mib, ways[way].is_near};
            char* run = xprintf("-z %d, %s", zero, ways[way].name);
            expect(&t, wrong_orders(settings, NOWHERE, OPS) == 0, run, "right in every order");
            for (size_t i = 0; i < COUNT_OF(waits); i++) {
                if (waits[i].zero_only && !zero) continue;
                if (waits[i].whole >= 0 && waits[i].whole != ways[way].whole) continue;
                char* what = xprintf("wrong unless %s", waits[i].name);
                expect(&t, wrong_orders(settings, waits[i].site, waits[i].side) > 0, run, what);
                free(what);
            }
            free(run);
        }
    // What is large, or whose GPUs are far apart, is summed in buckets.
    TensorTable table;
    memset(&table, 0, sizeof table);
    table.elements = (size_t)(WHOLE_BYTES / sizeof(real));
    ReductionSettings near_by = {0, 0, BUCKET_AUTO, 1}, far_apart = {0, 0, BUCKET_AUTO, 0};
    expect(&t, reduction_is_whole(&table, near_by), "2 GiB of gradients", "at once where GPUs are near");
    expect(&t, !reduction_is_whole(&table, far_apart), "2 GiB of gradients", "in buckets where they are not");
    table.elements++;
    expect(&t, !reduction_is_whole(&table, near_by), "more than 2 GiB of gradients", "in buckets");
    // Three layers of 12 MiB.
    const int dims[] = {0, 3, 1 << 20};
    const TensorRow inner = {"h.%d", 0, {1, 2}};
    memset(&table, 0, sizeof table);
    for (int l = 0; l < 3; l++) tensors_add(&table, &inner, 1, dims, l);
    tensors_finish(&table);
    for (int whole = 0; whole < 2; whole++) {
        Reduction cut;
        memset(&cut, 0, sizeof cut);
        reduction_cut(&cut, &table, whole ? near_by : far_apart);
        char* run = xprintf("36 MiB of gradients, %s", whole ? "at once" : "in buckets");
        expect(&t, cut.count == 2, run, "parameters are shared in two parts");
        size_t most = whole ? table.elements : cut.buckets[1].end - cut.buckets[1].begin;
        expect(&t, cut.buckets[1].layer == 1 && reduction_narrow_bytes(&cut) == most * sizeof(Bf16), run,
               "so much of it in bf16");
        free(run), free(cut.buckets);
    }
    tensors_free(&table);
    printf("%d passed, %d failed\n", t.passed, t.failed);
    return t.failed > 0;
}
