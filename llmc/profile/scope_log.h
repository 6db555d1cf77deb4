/* A log of the scopes that were open while it was attached to a context, in execution order. Its times are by the
 * host's clock, of the work on the CPU; on the GPU its trace has the times of the kernels. */
#ifndef LLMC_PROFILE_SCOPE_LOG_H
#define LLMC_PROFILE_SCOPE_LOG_H

#include "llmc/device/scope.h"
#include "llmc/profile/trace.h"

typedef struct {
    Scope scope;
    double start, seconds;  // by the host's clock; seconds on the CPU alone, without nested scopes
    size_t outer;           // the enclosing scope, or NO_SCOPE
} ScopeRecord;

// Call scope_log_open() first.
typedef struct {
    ScopeRecord* records;
    size_t count, capacity;
    size_t open;         // the innermost open scope, or NO_SCOPE
    KernelTrace* trace;  // NULL: kernels are not traced
    Observer observer;
} ScopeLog;

// Whether an op copies from or to the host.
static inline int scope_is_copy(const char* op) { return strcmp(op, "batch_load") == 0 || strcmp(op, "readback") == 0; }

static inline void scope_log_enter(void* state, const Scope* scope) {
    ScopeLog* log = (ScopeLog*)state;
    ScopeRecord r = {.scope = *scope, .start = 0, .seconds = 0, .outer = log->open};
    log->open = log->count;
    log->records = (ScopeRecord*)array_reserve(log->records, &log->capacity, log->count + 1, sizeof r);
    r.start = now_seconds();
    log->records[log->count++] = r;
    if (log->trace) kernel_trace_push(log->trace, log->open);
}

static inline void scope_log_leave(void* state, const Scope* scope) {
    ScopeLog* log = (ScopeLog*)state;
    ScopeRecord* r = &log->records[log->open];
    (void)scope;
    log->open = r->outer;
    if (log->trace) kernel_trace_pop(log->trace);
#ifndef __CUDACC__
    double seconds = now_seconds() - r->start;
    r->seconds += seconds;
    if (r->outer != NO_SCOPE) log->records[r->outer].seconds -= seconds;
#endif
}

// Open an empty log. With a trace it records kernels too (NULL: no trace). scope_log_close() frees the log.
static inline void scope_log_open(ScopeLog* log, KernelTrace* trace) {
    memset(log, 0, sizeof *log);
    log->open = NO_SCOPE;
    log->trace = trace;
    log->observer.open = scope_log_enter, log->observer.close = scope_log_leave, log->observer.state = log;
}

static inline void scope_log_close(ScopeLog* log) {
    free(log->records);
    memset(log, 0, sizeof *log);
}

#endif
