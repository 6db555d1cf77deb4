/* What every launcher opens: which part of the step it belongs to, what it does, on which shapes, and how much
 * work that is. One description feeds the profiler here and NVTX on the GPU, so every tool shows the same names.
 *
 *     Scope scope = scope_open(ctx, "layernorm_forward", LAYERNORM_FORWARD_FLOPS(N, C), bytes, "N=%d C=%d", N, C);
 *     ... the work ...
 *     scope_close(&scope);
 *
 * Nothing is formatted or stored unless ctx->scope_log is set. */
#ifndef LLMC_SCOPE_H
#define LLMC_SCOPE_H

#include "device.h"

typedef struct {
    const char* op;  // the launcher's name
    Direction direction;
    int layer;        // -1 outside the blocks
    char shapes[64];  // "N=256 IC=768 OC=3072"
    double flops;     // as the op's header counts them
    double bytes;     // that must be moved at least: every operand once
    double start, seconds;
} ScopeRecord;

// The records of the launches since it was attached to a context, in order of execution.
typedef struct ScopeLog {
    ScopeRecord* records;
    size_t count, capacity;
} ScopeLog;

typedef struct {
    Context* ctx;  // NULL: nobody listens
    size_t index;
} Scope;

// From here on launches belong to this direction and layer (-1: outside the blocks).
static inline void scope_at(Context* ctx, Direction direction, int layer) {
    ctx->direction = direction;
    ctx->layer = layer;
}

__attribute__((format(printf, 5, 6))) static inline Scope scope_open(Context* ctx, const char* op, double flops,
                                                                     double bytes, const char* shapes, ...) {
    Scope scope;
    ScopeLog* log = ctx->scope_log;
    scope.ctx = log ? ctx : NULL;
    scope.index = log ? log->count : 0;
    if (!log) return scope;
    if (log->count == log->capacity) {
        log->capacity = log->capacity ? 2 * log->capacity : 1024;
        log->records = (ScopeRecord*)xrealloc(log->records, log->capacity * sizeof *log->records);
    }
    ScopeRecord* r = &log->records[log->count++];
    va_list args;
    va_start(args, shapes);
    vsnprintf(r->shapes, sizeof r->shapes, shapes, args);
    va_end(args);
    r->op = op;
    r->direction = ctx->direction;
    r->layer = ctx->layer;
    r->flops = flops;
    r->bytes = bytes;
    r->seconds = 0;
    r->start = now_seconds();
    return scope;
}

static inline void scope_close(const Scope* scope) {
    if (!scope->ctx) return;
    ScopeRecord* r = &scope->ctx->scope_log->records[scope->index];
    r->seconds = now_seconds() - r->start;
}

#endif
