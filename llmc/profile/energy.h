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
#include "llmc/profile/tables.h"

typedef struct {
    Direction direction;
    const char* op;
    char shapes[64];
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

// Count a call of an op that launched something. Adds the op at its first call.
static inline void op_energies_count(OpEnergies* e, const ScopeRecord* r) {
    size_t i = 0;
    while (i < e->count && (e->ops[i].direction != r->direction || strcmp(e->ops[i].op, r->op) != 0 ||
                            strcmp(e->ops[i].shapes, r->shapes) != 0))
        i++;
    if (i == e->count) {
        e->ops = (OpEnergy*)xrealloc(e->ops, ++e->count * sizeof *e->ops);
        memset(&e->ops[i], 0, sizeof e->ops[i]);
        e->ops[i].direction = r->direction, e->ops[i].op = r->op;
        memcpy(e->ops[i].shapes, r->shapes, sizeof r->shapes);
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
        table_text(t, "direction", direction_name(op->direction));
        table_text(t, "op", op->op);
        table_text(t, "shapes", *op->shapes ? op->shapes : NULL);
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
// The graphs of an op's calls. Returns their number.
static inline size_t op_energy_parts(cudaGraph_t* parts, const OpEnergy* op, const ScopeLog* log) {
    size_t count = 0;
    for (size_t i = 0; i < log->count; i++) {
        const ScopeRecord* r = &log->records[i];
        if (log->graphs->graph[i] && (!op || (r->direction == op->direction && strcmp(r->op, op->op) == 0 &&
                                              strcmp(r->shapes, op->shapes) == 0)))
            parts[count++] = log->graphs->graph[i];
    }
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
static inline void op_energies_measure(OpEnergies* e, const ScopeLog* log, const EnergyMeter* m, ProcessGroup* group,
                                       Context* ctx) {
    cudaGraph_t* parts = (cudaGraph_t*)xcalloc(log->count + 1, sizeof *parts);
    for (size_t i = 0; i < log->count; i++)
        if (log->graphs->graph[i]) op_energies_count(e, &log->records[i]);
    size_t all = op_energy_parts(parts, NULL, log);
    cudaGraph_t whole = energy_chain(parts, all, 1);
    e->whole = energy_repeat(m, whole, ctx);
    for (int optimizer = 0; optimizer < 2; optimizer++)
        for (size_t i = 0; i < e->count; i++) {
            OpEnergy* op = &e->ops[i];
            if ((op->direction == OPTIMIZER) != optimizer) continue;
            group_begin_work(group);
            energy_run(whole, ctx);  // restore the inputs of ops that work in place
            op->alone = op_energy_repeat(m, parts, op_energy_parts(parts, op, log), ctx);
        }
    cudaCheck(cudaGraphDestroy(whole));
    free(parts);
}
#endif
#endif
