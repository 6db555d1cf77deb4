/* Scopes: every launcher opens one. It records the part of the step, the op, its shapes and the amount of work. The
 * same description goes to the profiler and, on the GPU, to NVTX, so every tool shows the same names.
 *
 *     Scope scope = scope_open(ctx, "layernorm_forward", LAYERNORM_FORWARD_FLOPS(N, C), bytes, "N=%d C=%d", N, C);
 *     ... the work ...
 *     scope_close(&scope);
 *
 * Nothing is formatted or stored unless ctx->scope_log is set or, on the GPU, an NVTX tool is attached. Tools see
 * nested ranges: step 12 / backward / layer 3 / layernorm_backward N=65536 C=768. A log's times are
 * by the host's clock, of the work on the CPU; on the GPU its trace has the times of the kernels. */
#ifndef LLMC_DEVICE_SCOPE_H
#define LLMC_DEVICE_SCOPE_H

#include "llmc/device/energy_graph.h"
#include "llmc/device/tap.h"
#include "llmc/device/trace.h"
#ifdef __CUDACC__
#include <nvtx3/nvToolsExt.h>
#endif

typedef struct {
    const char* op;  // the launcher's name
    Direction direction;
    int layer;              // -1 outside the blocks
    char shapes[64];        // "N=256 IC=768 OC=3072"
    double flops;           // as counted in the op's header
    double bytes;           // minimum memory traffic: every operand once
    double start, seconds;  // by the host's clock; seconds on the CPU alone, without nested scopes
    size_t outer;           // the enclosing scope, or NO_SCOPE
} ScopeRecord;

// The captured launches of a log's scopes, one graph each.
typedef struct {
    size_t capacity, open;  // open: the scope being captured, or NO_SCOPE
    void* scratch;          // the context's scratch at the time of the first capture
#ifdef __CUDACC__
    cudaGraph_t* graph;  // [capacity] of each record; NULL: it launched nothing, or is not captured
#endif
} ScopeGraphs;

// The launches since the log was attached to a context, in execution order. Call scope_log_open() first.
typedef struct ScopeLog {
    ScopeRecord* records;
    size_t count, capacity;
    size_t open;          // the innermost open scope, or NO_SCOPE
    KernelTrace* trace;   // NULL: kernels are not traced
    Tap* tap;             // NULL: no tensors are copied
    ScopeGraphs* graphs;  // NULL: launches run at once and are not captured
} ScopeLog;

typedef struct {
    Context* ctx;  // NULL: nothing is recorded
    size_t index;  // of the record; NO_SCOPE if only an NVTX tool is attached
} Scope;

static inline const char* direction_name(Direction direction) {
    static const char* const names[DIRECTIONS] = {"forward", "backward", "optimizer", "communication"};
    return names[direction];
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// NVTX ranges that enclose those of the launchers. Whether a tool is attached is checked once; if not, they do nothing.

enum { RANGE_STEP = 1, RANGE_DIRECTION = 2, RANGE_LAYER = 4 };

static inline int scope_tool_listens(Context* ctx) {
    if (ctx->tool == 0) ctx->tool = nvtxDomainCreateA("llmc") ? 1 : -1;  // NULL if no tool is attached
    return ctx->tool > 0;
}

// The bits are ordered from the outermost range to the innermost.
static inline void scope_push(Context* ctx, int range, const char* name) {
    nvtxRangePushA(name);
    ctx->ranges |= range;
}

// Close the ranges that are at least as deep as `range`.
static inline void scope_pop_to(Context* ctx, int range) {
    for (int open = RANGE_LAYER; open >= range; open /= 2) {
        if (ctx->ranges & open) nvtxRangePop();
        ctx->ranges &= ~open;
    }
}

static inline void scope_move(Context* ctx, Direction direction, int layer) {
    char name[32];
    if (!(ctx->ranges & RANGE_DIRECTION) || direction != ctx->direction) {
        scope_pop_to(ctx, RANGE_DIRECTION);
        scope_push(ctx, RANGE_DIRECTION, direction_name(direction));
    } else if (layer != ctx->layer) {
        scope_pop_to(ctx, RANGE_LAYER);
    }
    if (layer < 0 || ctx->ranges & RANGE_LAYER) return;
    snprintf(name, sizeof name, "layer %d", layer);
    scope_push(ctx, RANGE_LAYER, name);
}
#else
static inline int scope_tool_listens(Context* ctx) { return (void)ctx, 0; }
#endif

// ---------------------------------------------------------------------------------------------------------
// Launches as graphs (profile/energy.h). Outermost op scopes are captured; each graph runs when its scope closes.

// Whether an op copies from or to the host.
static inline int scope_is_copy(const char* op) { return strcmp(op, "batch_load") == 0 || strcmp(op, "readback") == 0; }

#ifdef __CUDACC__
static inline void scope_graphs_open(ScopeGraphs* g, size_t index, Context* ctx) {
    size_t before = g->capacity;
    g->graph = (cudaGraph_t*)array_reserve(g->graph, &g->capacity, index + 1, sizeof *g->graph);
    if (g->capacity > before) memset(g->graph + before, 0, (g->capacity - before) * sizeof *g->graph);
    if (g->open != NO_SCOPE) return;
    g->open = index, g->scratch = ctx->scratch;
    energy_capture_begin(ctx);
}

static inline void scope_graphs_close(ScopeGraphs* g, size_t index, Context* ctx) {
    if (g->open != index) return;
    g->open = NO_SCOPE;
    g->graph[index] = energy_capture_end(ctx);
    if (g->graph[index]) energy_run(g->graph[index], ctx);
}

static inline void scope_graphs_free(ScopeGraphs* g) {
    for (size_t i = 0; i < g->capacity; i++)
        if (g->graph[i]) cudaCheck(cudaGraphDestroy(g->graph[i]));
    free(g->graph);
    memset(g, 0, sizeof *g);
}
#else
static inline void scope_graphs_free(ScopeGraphs* g) { (void)g; }
#endif

// ---------------------------------------------------------------------------------------------------------
// Functions for the trainer and the launchers

// Open an empty log. With a trace it records kernels too (NULL: no trace). scope_log_close() frees the log.
static inline void scope_log_open(ScopeLog* log, KernelTrace* trace) {
    memset(log, 0, sizeof *log);
    log->open = NO_SCOPE;
    log->trace = trace;
}

static inline void scope_log_close(ScopeLog* log) {
    free(log->records);
    memset(log, 0, sizeof *log);
}

// The launches that follow belong to this optimizer step; -1: to no step (validation, sampling).
static inline void scope_step(Context* ctx, int64_t step) {
#ifdef __CUDACC__
    char name[32];
    if (!scope_tool_listens(ctx)) return;
    scope_pop_to(ctx, RANGE_STEP);
    if (step < 0) return;
    snprintf(name, sizeof name, "step %lld", (long long)step);
    scope_push(ctx, RANGE_STEP, name);
#else
    (void)ctx, (void)step;
#endif
}

// The launches that follow belong to this direction and layer (-1: outside the blocks).
static inline void scope_at(Context* ctx, Direction direction, int layer) {
#ifdef __CUDACC__
    if (scope_tool_listens(ctx)) scope_move(ctx, direction, layer);
#endif
    ctx->direction = direction;
    ctx->layer = layer;
}

__attribute__((format(printf, 5, 6))) static inline Scope scope_open(Context* ctx, const char* op, double flops,
                                                                     double bytes, const char* shapes, ...) {
    Scope scope = {.ctx = NULL, .index = NO_SCOPE};
    ScopeLog* log = ctx->scope_log;
    char text[64];
    int tool = scope_tool_listens(ctx);
    if (!log && !tool) return scope;
    scope.ctx = ctx;
    va_list args;
    va_start(args, shapes);
    vsnprintf(text, sizeof text, shapes, args);
    va_end(args);
#ifdef __CUDACC__
    if (tool) {
        char name[128];
        snprintf(name, sizeof name, "%s %s", op, text);
        nvtxRangePushA(name);
    }
#endif
    if (!log) return scope;
    scope.index = log->count;
    log->records = (ScopeRecord*)array_reserve(log->records, &log->capacity, log->count + 1, sizeof *log->records);
    ScopeRecord* r = &log->records[log->count++];
    memcpy(r->shapes, text, sizeof text);
    r->op = op;
    r->direction = ctx->direction;
    r->layer = ctx->layer;
    r->flops = flops;
    r->bytes = bytes;
    r->seconds = 0;
    r->outer = log->open;
    log->open = scope.index;
    r->start = now_seconds();
#ifdef __CUDACC__
    int is_captured = log->graphs && ctx->direction != COMMUNICATION && !scope_is_copy(op);
    if (is_captured) scope_graphs_open(log->graphs, scope.index, ctx);
    if (log->trace) kernel_trace_push(log->trace, scope.index);
#endif
    return scope;
}

static inline void scope_close(const Scope* scope) {
    Context* ctx = scope->ctx;
    if (!ctx) return;
    if (scope->index != NO_SCOPE) {
        ScopeRecord* r = &ctx->scope_log->records[scope->index];
        ctx->scope_log->open = r->outer;
#ifdef __CUDACC__
        if (ctx->scope_log->graphs) scope_graphs_close(ctx->scope_log->graphs, scope->index, ctx);
        if (ctx->scope_log->trace) kernel_trace_pop(ctx->scope_log->trace);
#else
        double seconds = now_seconds() - r->start;
        r->seconds += seconds;
        if (r->outer != NO_SCOPE) ctx->scope_log->records[r->outer].seconds -= seconds;
#endif
        if (ctx->scope_log->tap) tap_take(ctx->scope_log->tap, r->op, r->direction, r->layer, scope->index, ctx);
    }
#ifdef __CUDACC__
    if (scope_tool_listens(ctx)) nvtxRangePop();
#endif
}

#endif
