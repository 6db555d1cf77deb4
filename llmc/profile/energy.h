/* --profile-energy: the energy of each op, measured by itself.
 *
 * The launches of one step are captured, one graph for each call of an op, and also run, so the step computes the same
 * as ever. After the run's last save, all graphs are repeated in order. Then each op's calls are repeated alone, those
 * of all layers one after another, so that inputs rotate. Kernels of one call stay together, because some depend on
 * each other's counters. Repeated updates destroy the model, so the optimizer comes last. Communication and copies
 * between host and device are not measured. */
#ifndef LLMC_PROFILE_ENERGY_H
#define LLMC_PROFILE_ENERGY_H

#include "llmc/dist/process_group.h"
#include "llmc/profile/energy_meter.h"
#include "llmc/profile/tables.h"

// The cost of repeated work.
typedef struct {
    double seconds;     // of one repetition
    double watts, mhz;  // means; NaN: unknown
} RepeatedEnergy;

// The captured launches of one call of an op.
typedef struct {
    Scope scope;
#ifdef __CUDACC__
    cudaGraph_t graph;
#endif
} CapturedOp;

// An observer that captures each outermost op of a step and runs the graph when the op's scope closes.
typedef struct {
    CapturedOp* ops;  // those that launched something
    size_t count, capacity;
    int depth, is_capturing;  // depth: number of open scopes
    void* scratch;            // the context's scratch when the last op was captured
    Observer observer;
} EnergyCapture;

typedef struct {
    Scope scope;           // of its first call
    size_t calls;          // in a step
    RepeatedEnergy alone;  // of a call
} OpEnergy;

typedef struct {
    OpEnergy* ops;
    size_t count;          // 0: not measured
    RepeatedEnergy whole;  // of all captured launches in their order
} OpEnergies;

static inline double op_joules(const OpEnergy* op) { return (double)op->calls * op->alone.seconds * op->alone.watts; }

static inline int op_energy_descending(const void* a, const void* b) {
    double x = op_joules((const OpEnergy*)a), y = op_joules((const OpEnergy*)b);
    return (x < y) - (x > y);
}

// Whether two scopes are calls of the same op with the same shapes.
static inline int op_energy_is_of(const Scope* a, const Scope* b) {
    return a->direction == b->direction && strcmp(a->op, b->op) == 0 && strcmp(a->shapes, b->shapes) == 0;
}

// Count a call of an op. Adds the op at its first call.
static inline void op_energies_count(OpEnergies* e, const Scope* call) {
    size_t i = 0;
    while (i < e->count && !op_energy_is_of(&e->ops[i].scope, call)) i++;
    if (i == e->count) {
        OpEnergy op = {.scope = *call, .calls = 0};
        e->ops = (OpEnergy*)xrealloc(e->ops, ++e->count * sizeof *e->ops);
        e->ops[i] = op;
    }
    e->ops[i].calls++;
}

// The sum over the ops, compared with the whole step, as a sentence (caller frees).
static inline char* op_energies_sum(const OpEnergies* e) {
    double sum = 0, whole = e->whole.seconds * e->whole.watts;
    for (size_t i = 0; i < e->count; i++) sum += op_joules(&e->ops[i]);
    return xprintf(
        "%.4g J, each op by itself; %.4g J in %.3f ms at %.4g W and %.0f MHz, all of them in order: %+.1f %%", sum,
        whole, 1e3 * e->whole.seconds, e->whole.watts, e->whole.mhz, 100 * (sum / whole - 1));
}

// Sorts the ops.
static inline void profile_table_energy(Table* t, OpEnergies* e) {
    double sum = 0;
    for (size_t i = 0; i < e->count; i++) sum += op_joules(&e->ops[i]);
    if (e->count) qsort(e->ops, e->count, sizeof *e->ops, op_energy_descending);
    table_open(t, "energy", "Energy by op");
    for (size_t i = 0; i < e->count; i++) {
        const OpEnergy* op = &e->ops[i];
        profile_table_op(t, op->scope.direction, op->scope.op, op->scope.shapes);
        table_number(t, "calls", 0, (double)op->calls);
        table_number(t, "joules", 4, op_joules(op));
        table_number(t, "percent", 1, 100 * op_joules(op) / sum);
        table_number(t, "watts", 0, op->alone.watts);
        table_number(t, "mhz", 0, op->alone.mhz);
        table_number(t, "ms", 3, 1e3 * (double)op->calls * op->alone.seconds);
    }
    t->note = xprintf("Every op measured by itself: its calls of a step one after another, repeated for at least a "
                      "second. joules and ms: of all calls of a step.");
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// A CUDA graph, launched back to back for at least a second

#define ENERGY_WARMUP 0.5  // seconds for the power controller to settle
#define ENERGY_MOST 5.0    // seconds after which we stop waiting for the counter to move
#define ENERGY_POLL 1e-3   // seconds between readings

// A graph that runs the parts in order, `rounds` times. The caller destroys it.
static inline cudaGraph_t energy_chain(const cudaGraph_t* parts, size_t count, size_t rounds) {
    cudaGraph_t chain;
    cudaGraphNode_t last = NULL;
    cudaCheck(cudaGraphCreate(&chain, 0));
    for (size_t i = 0; i < count * rounds; i++) {
        cudaGraphNode_t node;
        cudaCheck(cudaGraphAddChildGraphNode(&node, chain, last ? &last : NULL, last ? 1 : 0, parts[i % count]));
        last = node;
    }
    return chain;
}

// Run a graph once and wait for it. Returns its seconds on the device.
static inline double energy_run(cudaGraph_t graph, Context* ctx) {
    cudaGraphExec_t exec;
    cudaEvent_t began, ended;
    float ms;
    cudaCheck(cudaGraphInstantiate(&exec, graph, 0));
    cudaCheck(cudaEventCreate(&began));
    cudaCheck(cudaEventCreate(&ended));
    cudaCheck(cudaEventRecord(began, ctx->stream));
    cudaCheck(cudaGraphLaunch(exec, ctx->stream));
    cudaCheck(cudaEventRecord(ended, ctx->stream));
    cudaCheck(cudaEventSynchronize(ended));
    cudaCheck(cudaEventElapsedTime(&ms, began, ended));
    cudaCheck(cudaEventDestroy(began));
    cudaCheck(cudaEventDestroy(ended));
    cudaCheck(cudaGraphExecDestroy(exec));
    return 1e-3 * (double)ms;
}

static inline int energy_event_passed(cudaEvent_t event) {
    cudaError_t state = cudaEventQuery(event);
    if (state == cudaErrorNotReady) cudaGetLastError();  // clear it, so that no later call returns it
    else cudaCheck(state);
    return state == cudaSuccess;
}

// Repeat a graph of at least some milliseconds. A few launches are queued at any time, so the device never idles.
static inline RepeatedEnergy energy_repeat(const EnergyMeter* m, cudaGraph_t graph, Context* ctx) {
    enum { QUEUED = 4 };
    const struct timespec moment = {.tv_sec = 0, .tv_nsec = (long)(1e9 * ENERGY_POLL)};
    EnergyJumps jumps;
    RepeatedEnergy e = {.seconds = 0, .watts = (double)NAN};
    cudaGraphExec_t exec;
    cudaEvent_t queued[QUEUED], began, ended;
    float ms;
    size_t launches = 0, first = 0, readings = 0;
    memset(&jumps, 0, sizeof jumps);
    cudaCheck(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < QUEUED; i++) cudaCheck(cudaEventCreate(&queued[i]));
    cudaCheck(cudaEventCreate(&began));
    cudaCheck(cudaEventCreate(&ended));
    double start = now_seconds(), now = start, warm = 0;
    while (!first || (now - warm < ENERGY_MOST && energy_jumps_seconds(&jumps) < ENERGY_SECONDS)) {
        if (launches < QUEUED || energy_event_passed(queued[launches % QUEUED])) {
            if (!first && launches && now - start >= ENERGY_WARMUP) {
                cudaCheck(cudaEventRecord(began, ctx->stream));
                first = launches, warm = now;
            }
            cudaCheck(cudaGraphLaunch(exec, ctx->stream));
            cudaCheck(cudaEventRecord(queued[launches++ % QUEUED], ctx->stream));
        } else {
            if (first) {
                energy_jumps_read(&jumps, now, energy_total(m));
                e.mhz += (energy_mhz(m) - e.mhz) / (double)++readings;
            }
            nanosleep(&moment, NULL);
        }
        now = now_seconds();
    }
    cudaCheck(cudaEventRecord(ended, ctx->stream));
    cudaCheck(cudaEventSynchronize(ended));
    cudaCheck(cudaEventElapsedTime(&ms, began, ended));
    e.seconds = 1e-3 * (double)ms / (double)(launches - first);
    e.watts = energy_jumps_watts(&jumps);
    for (int i = 0; i < QUEUED; i++) cudaCheck(cudaEventDestroy(queued[i]));
    cudaCheck(cudaEventDestroy(began));
    cudaCheck(cudaEventDestroy(ended));
    cudaCheck(cudaGraphExecDestroy(exec));
    return e;
}

// ---------------------------------------------------------------------------------------------------------
// Capture

static inline void energy_scope_open(void* state, const Scope* scope) {
    EnergyCapture* c = (EnergyCapture*)state;
    int is_measured = scope->direction != COMMUNICATION && !scope_is_copy(scope->op);
    if (c->depth++ || !is_measured) return;
    c->is_capturing = 1, c->scratch = scope->ctx->scratch;
    // No launch may allocate or wait for the device until energy_scope_close().
    cudaCheck(cudaStreamBeginCapture(scope->ctx->stream, cudaStreamCaptureModeRelaxed));
}

static inline void energy_scope_close(void* state, const Scope* scope) {
    EnergyCapture* c = (EnergyCapture*)state;
    CapturedOp op = {.scope = *scope, .graph = NULL};
    size_t nodes = 0;
    if (--c->depth || !c->is_capturing) return;
    c->is_capturing = 0;
    cudaCheck(cudaStreamEndCapture(scope->ctx->stream, &op.graph));
    cudaCheck(cudaGraphGetNodes(op.graph, NULL, &nodes));
    if (!nodes) {
        cudaCheck(cudaGraphDestroy(op.graph));
        return;
    }
    energy_run(op.graph, scope->ctx);
    c->ops = (CapturedOp*)array_reserve(c->ops, &c->capacity, c->count + 1, sizeof op);
    c->ops[c->count++] = op;
}

static inline Observer* energy_capture_observer(EnergyCapture* c) {
    c->observer.open = energy_scope_open, c->observer.close = energy_scope_close, c->observer.state = c;
    return &c->observer;
}

static inline void energy_capture_free(EnergyCapture* c) {
    for (size_t i = 0; i < c->count; i++) cudaCheck(cudaGraphDestroy(c->ops[i].graph));
    free(c->ops);
}

// ---------------------------------------------------------------------------------------------------------
// Measurement

// The graphs of an op's calls. Returns their number.
static inline size_t op_energy_parts(cudaGraph_t* parts, const OpEnergy* op, const EnergyCapture* c) {
    size_t count = 0;
    for (size_t i = 0; i < c->count; i++)
        if (op_energy_is_of(&op->scope, &c->ops[i].scope)) parts[count++] = c->ops[i].graph;
    return count;
}

// Repeat these parts in one graph, often enough to make the cost of launching it negligible.
static inline RepeatedEnergy op_energy_repeat(const EnergyMeter* m, const cudaGraph_t* parts, size_t count,
                                              Context* ctx) {
    const double LEAST = 20e-3;
    const size_t MOST_LAUNCHES = 1000;
    cudaGraph_t graph = energy_chain(parts, count, 1);
    double seconds = energy_run(graph, ctx);
    size_t rounds = 1 + (size_t)fmin(LEAST / seconds, (double)(MOST_LAUNCHES / count));
    cudaCheck(cudaGraphDestroy(graph));
    graph = energy_chain(parts, count, rounds);
    RepeatedEnergy e = energy_repeat(m, graph, ctx);
    cudaCheck(cudaGraphDestroy(graph));
    e.seconds /= (double)(rounds * count);
    return e;
}

// Measure the ops of a captured step, whose buffers must still be in place.
static inline void op_energies_measure(OpEnergies* e, const EnergyCapture* c, const EnergyMeter* m, ProcessGroup* group,
                                       Context* ctx) {
    cudaGraph_t* parts = (cudaGraph_t*)xcalloc(c->count + 1, sizeof *parts);
    for (size_t i = 0; i < c->count; i++) {
        op_energies_count(e, &c->ops[i].scope);
        parts[i] = c->ops[i].graph;
    }
    cudaGraph_t whole = energy_chain(parts, c->count, 1);
    e->whole = energy_repeat(m, whole, ctx);
    for (int optimizer = 0; optimizer < 2; optimizer++)
        for (size_t i = 0; i < e->count; i++) {
            OpEnergy* op = &e->ops[i];
            if ((op->scope.direction == OPTIMIZER) != optimizer) continue;
            group_begin_work(group);
            energy_run(whole, ctx);  // restore the inputs of ops that work in place
            op->alone = op_energy_repeat(m, parts, op_energy_parts(parts, op, c), ctx);
        }
    cudaCheck(cudaGraphDestroy(whole));
    free(parts);
}
#else
static inline Observer* energy_capture_observer(EnergyCapture* c) { return &c->observer; }
static inline void energy_capture_free(EnergyCapture* c) { (void)c; }
#endif
#endif
