/* Gradients are summed and parameters broadcast on a side stream, overlapped with the ops; only events keep the two
 * streams in order. Here every task of a stream says which elements it uses: what used them before, on the other
 * stream, must be sure to be done, by the events between. Tasks are done when they are launched, and the result must be
 * correct. Without any one of the waits it is wrong: dev/mutants.txt.
 *
 * This file replaces llmc/dist/collectives.h, so that the order under test is that of llmc/dist/grad_sync.h. */
#define LLMC_DIST_COLLECTIVES_H
#include "dev/test/tests.h"
#include "llmc/dist/process_group.h"
#include "llmc/model/tensors.h"

typedef enum { SUM_REAL, SUM_DOUBLE } ReduceType;
typedef enum { OPS, COLLECTIVES, STREAMS } Stream;

typedef struct {
    int known[STREAMS];  // of its stream, when it was recorded
} StreamEvent;

typedef struct {
    ProcessGroup* group;
} Collectives;

typedef struct {
    int stream, task;
} Use;

// [stream][other]: the last task of `other` that is sure to be done before the next one of `stream`.
static int known[STREAMS][STREAMS];

static void record(Stream stream, StreamEvent* e) { memcpy(e->known, known[stream], sizeof e->known); }

static void wait_for(Stream stream, const StreamEvent* e) {
    for (int i = 0; i < STREAMS; i++) known[stream][i] = max_int(known[stream][i], e->known[i]);
}

// ---------------------------------------------------------------------------------------------------------
// A model whose gradients and parameters are numbers that encode the step. This is the middle one of three ranks with
// the same gradients, so a sum is three times as much.

enum { LAYERS = 5, STEPS = 3, RANKS = 3, ME = 1 };  // so that elements cannot be divided evenly

static struct {
    TensorTable table;
    real* grads;                               // step number s: 10 s, summed 30 s
    floatX* params;                            // after the update of step s: s
    real norm;                                 // 7 s, summed 21 s, from the summed gradients
    Use *grads_used, *params_used, norm_used;  // last
    FlatRange shard;
    int wrong;
} toy;

static void toy_open(void) {
    const int dims[] = {0, 96, 5};
    const TensorRow front = {"front", 0, {1, 2}}, inner = {"h.%d", 0, {1, 2}}, back = {"back", 0, {1, 0}};
    memset(&toy, 0, sizeof toy);
    tensors_add(&toy.table, &front, 1, dims, -1);
    for (int l = 0; l < LAYERS; l++) tensors_add(&toy.table, &inner, 1, dims, l);
    tensors_add(&toy.table, &back, 1, dims, -1);
    tensors_finish(&toy.table);
    toy.grads = (real*)xcalloc(toy.table.elements, sizeof(real));
    toy.params = (floatX*)xcalloc(toy.table.elements, sizeof(floatX));
    toy.grads_used = (Use*)xcalloc(toy.table.elements, sizeof(Use));
    toy.params_used = (Use*)xcalloc(toy.table.elements, sizeof(Use));
}

static void toy_close(void) {
    free(toy.grads), free(toy.params), free(toy.grads_used), free(toy.params_used);
    tensors_free(&toy.table);
}

// The elements of a layer; -1: those before the layers; LAYERS: those after them.
static FlatRange toy_layer(int layer) {
    const Tensor* t = &toy.table.tensors[layer + 1];
    return (FlatRange){t->offset, (layer == LAYERS ? toy.table.elements : t[1].offset) - t->offset};
}

// A task of a stream uses these elements.
static void use(Stream stream, Use* last, size_t n) {
    int task = ++known[stream][stream];
    for (size_t i = 0; i < n; i++) {
        toy.wrong += known[stream][last[i].stream] < last[i].task;
        last[i] = (Use){(int)stream, task};
    }
}

static void forward_pass(int layer, int step) {
    FlatRange part = toy_layer(layer);
    use(OPS, toy.params_used + part.begin, part.size);
    for (size_t i = 0; i < part.size; i++) toy.wrong += toy.params[part.begin + i] != (floatX)(step - 1);
}

static void backward_pass(int layer, int step) {
    FlatRange part = toy_layer(layer);
    use(OPS, toy.grads_used + part.begin, part.size);
    for (size_t i = 0; i < part.size; i++) toy.grads[part.begin + i] = (real)(10 * step);
}

static void norm(int step) {
    use(OPS, toy.grads_used + toy.shard.begin, toy.shard.size);
    for (size_t i = 0; i < toy.shard.size; i++)
        toy.wrong += toy.grads[toy.shard.begin + i] != (real)(10 * RANKS * step);
    use(OPS, &toy.norm_used, 1);
    toy.norm = (real)(7 * step);
}

static void update(int step) {
    use(OPS, &toy.norm_used, 1);
    toy.wrong += toy.norm != (real)(7 * RANKS * step);
    use(OPS, toy.params_used + toy.shard.begin, toy.shard.size);
    for (size_t i = 0; i < toy.shard.size; i++) toy.params[toy.shard.begin + i] = (floatX)step;
}

// ---------------------------------------------------------------------------------------------------------
// In the place of llmc/dist/collectives.h

static void stream_event_open(StreamEvent* e) { memset(e, 0, sizeof *e); }
static void stream_event_close(StreamEvent* e) { (void)e; }
static void collectives_open(Collectives* c, ProcessGroup* group) { c->group = group; }
static void collectives_close(Collectives* c) { (void)c; }
static void collectives_begin(void) {}
static void collectives_end(void) {}
static void collectives_wait_for_ops(Collectives* c, StreamEvent* e, Context* ctx) {
    (void)c, (void)ctx;
    record(OPS, e);
    wait_for(COLLECTIVES, e);
}
static void collectives_record_event(Collectives* c, StreamEvent* e) { (void)c, record(COLLECTIVES, e); }
static void ops_wait_for_collectives(Context* ctx, StreamEvent* e) { (void)ctx, wait_for(OPS, e); }
static void reduce(Collectives* c, void* values, size_t n, ReduceType type, int root) {
    real* x = (real*)values;
    (void)c;
    CHECK(type == SUM_REAL);
    use(COLLECTIVES, x == &toy.norm ? &toy.norm_used : toy.grads_used + (x - toy.grads), n);
    for (size_t i = 0; i < n && root == ME; i++) x[i] *= RANKS;
}
static void all_reduce(Collectives* c, void* values, size_t n, ReduceType type) { reduce(c, values, n, type, ME); }
// The other ranks are at the step of this one's parameters.
static void broadcast(Collectives* c, void* bytes, size_t n, int root) {
    floatX* x = (floatX*)bytes;
    (void)c;
    use(COLLECTIVES, toy.params_used + (x - toy.params), n / sizeof(floatX));
    for (size_t i = 0; i < n / sizeof(floatX) && root != ME; i++) x[i] = toy.params[toy.shard.begin];
}

#include "llmc/dist/grad_sync.h"

// Steps of a run, as the trainers launch them.
static void launch(GradSync* r, Context* ctx) {
    for (int step = 1; step <= STEPS; step++) {
        for (int l = -1; l <= LAYERS; l++) {
            grad_sync_wait(r, l < LAYERS ? l : GRAD_SYNC_LAST, ctx);
            forward_pass(l, step);
        }
        grad_sync_begin(r);
        backward_pass(LAYERS, step);
        for (int l = LAYERS - 1; l >= 0; l--) {
            backward_pass(l, step);
            grad_sync_ready(r, l, toy.grads, ctx);
        }
        backward_pass(-1, step);
        grad_sync_ready(r, -1, toy.grads, ctx);
        grad_sync_finish(r, toy.grads, ctx);
        norm(step);
        grad_sync_all_reduce(r, &toy.norm, 1, SUM_REAL, ctx);
        update(step);
        broadcast_params(r, toy.params, ctx);
    }
}

int main(int argc, char** argv) {
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
    static Context ctx;
    ProcessGroup group = {.rank = ME, .size = RANKS};
    Tests t;
    tests_choose(&t, argc, argv);
    context_init(&ctx);
    for (int way = 0; way < 2 * (int)COUNT_OF(ways); way++) {
        int zero = way % 2, i = way / 2;
        GradSync r;
        memset(known, 0, sizeof known);
        toy_open();
        grad_sync_open(&r, &group, &toy.table, (GradSyncSettings){zero, ways[i].bucket_mib, ways[i].has_p2p, 0});
        toy.shard = r.shard;
        launch(&r, &ctx);
        expect(&t, !toy.wrong, named("-z %d, %s", zero, ways[i].name), "%d uses are wrong", toy.wrong);
        grad_sync_close(&r);
        toy_close();
    }
    context_free(&ctx);
    return tests_close(&t);
}
