/* The records of trace.h: launches with their names and times, and the API call that made each of them. */
#ifndef LLMC_PROFILE_TRACE_LAUNCHES_H
#define LLMC_PROFILE_TRACE_LAUNCHES_H

#include <pthread.h>

#include "llmc/device/device.h"
#ifdef __CUDACC__
#include <cxxabi.h>
#if __has_include(<cupti.h>)
#define LLMC_CUPTI
#include <cupti.h>
#include <dlfcn.h>
#endif
#endif

// The index for "no scope".
#define NO_SCOPE SIZE_MAX

// A kernel, a copy or a fill. Copies and fills have no grid.
typedef struct {
    char *name, *full;  // short name, and full name with all arguments; owned
    size_t scope;       // the scope in which it was launched, or NO_SCOPE
    uint32_t correlation;
    int stream;
    uint64_t start, end;  // nanoseconds
    uint64_t issued;      // when the launching call returned, on the same clock; 0: unknown
    int grid[3], block[3];
    int registers, shared_bytes;
} TracedLaunch;

// One value for the API call with this correlation id: the scope in which it was made, or the time when it returned.
typedef struct {
    uint32_t correlation;
    uint64_t value;
} TracedCall;

typedef struct {
    TracedCall* call;
    size_t count, capacity;
} TracedCalls;

typedef struct KernelTrace {
    TracedLaunch* rows;  // in order of execution after kernel_trace_collect()
    size_t count, capacity;
    TracedCalls scopes, returns;
    size_t lost;           // launches that CUPTI could not record
    size_t host_waits;     // runtime calls that make the host wait for the device
    size_t stream_waits;   // runtime calls that make a stream wait for an event
    pthread_mutex_t lock;  // CUPTI delivers records on its own thread
    struct Cupti* cupti;   // NULL: nothing is traced
} KernelTrace;

// ---------------------------------------------------------------------------------------------------------
// Names

// The name of a function without return type, arguments and template arguments (the caller frees it). CUTLASS kernels
// whose names differ only in a template argument get the name of that argument.
static inline char* kernel_name_short(const char* full) {
    static const char unnamed[] = "(anonymous namespace)::";
    char* name = xprintf("%s", full);
    size_t n = 0;
    int depth = 0;
    for (const char* c = full; *c; c++) {
        if (depth == 0 && strncmp(c, unnamed, sizeof unnamed - 1) == 0) {
            c += sizeof unnamed - 2;
            continue;
        }
        if (depth == 0 && (*c == '(' || *c == ',' || *c == '>')) break;
        if (*c == '>') depth--;
        else if (*c == '<') depth++;
        else if (depth == 0 && *c == ' ') n = 0;  // the text before it was the return type
        else if (depth == 0) name[n++] = *c;
    }
    name[n] = '\0';
    const char* argument = strchr(full, '<');
    if (argument && (strncmp(name, "cutlass::Kernel", 15) == 0 || strcmp(name, "cutlass::device_kernel") == 0)) {
        free(name);
        return kernel_name_short(argument + 1);
    }
    return name;
}

// ---------------------------------------------------------------------------------------------------------
// Records

static inline void kernel_trace_add(KernelTrace* t, const TracedLaunch* launch) {
    t->rows = (TracedLaunch*)array_reserve(t->rows, &t->capacity, t->count + 1, sizeof *t->rows);
    t->rows[t->count++] = *launch;
}

static inline void traced_calls_add(TracedCalls* c, uint32_t correlation, uint64_t value) {
    c->call = (TracedCall*)array_reserve(c->call, &c->capacity, c->count + 1, sizeof *c->call);
    TracedCall call = {.correlation = correlation, .value = value};
    c->call[c->count++] = call;
}

static inline int traced_call_ascending(const void* a, const void* b) {
    uint32_t x = ((const TracedCall*)a)->correlation, y = ((const TracedCall*)b)->correlation;
    return (x > y) - (x < y);
}

static inline int traced_launch_ascending(const void* a, const void* b) {
    const TracedLaunch *x = (const TracedLaunch*)a, *y = (const TracedLaunch*)b;
    if (x->start != y->start) return x->start < y->start ? -1 : 1;
    return (x->correlation > y->correlation) - (x->correlation < y->correlation);
}

// The value of a call in the sorted list, or `otherwise` if the call is not in it.
static inline uint64_t traced_calls_find(const TracedCalls* c, uint32_t correlation, uint64_t otherwise) {
    TracedCall key = {.correlation = correlation}, *call = NULL;
    if (c->count) call = (TracedCall*)bsearch(&key, c->call, c->count, sizeof key, traced_call_ascending);
    return call ? call->value : otherwise;
}

// Set the scope and the issue time of every launch from its API call, and sort the launches in execution order.
static inline void kernel_trace_join(KernelTrace* t) {
    if (t->scopes.count) qsort(t->scopes.call, t->scopes.count, sizeof(TracedCall), traced_call_ascending);
    if (t->returns.count) qsort(t->returns.call, t->returns.count, sizeof(TracedCall), traced_call_ascending);
    for (size_t i = 0; i < t->count; i++) {
        TracedLaunch* row = &t->rows[i];
        row->scope = (size_t)traced_calls_find(&t->scopes, row->correlation, NO_SCOPE);
        row->issued = traced_calls_find(&t->returns, row->correlation, 0);
    }
    if (t->count) qsort(t->rows, t->count, sizeof *t->rows, traced_launch_ascending);
}

// Delete all records.
static inline void kernel_trace_clear(KernelTrace* t) {
    for (size_t i = 0; i < t->count; i++) free(t->rows[i].name), free(t->rows[i].full);
    t->count = t->scopes.count = t->returns.count = t->lost = t->host_waits = t->stream_waits = 0;
}

#endif
