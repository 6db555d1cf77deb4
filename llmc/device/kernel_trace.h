/* What a GPU really ran: kernels, copies and fills with their times, from CUPTI's activity records, each with the number
 * of the scope that launched it and the moment when the host had launched it. The number travels as an external
 * correlation id, so the helper kernels of a library carry it too.
 *
 * No build and no run depends on CUPTI: without its header this is compiled out, and its library is looked for when a
 * trace begins. Where it is missing, of another version, or held by another tool, one line says so and nothing is
 * traced. */
#ifndef LLMC_KERNEL_TRACE_H
#define LLMC_KERNEL_TRACE_H

#include <pthread.h>

#include "device.h"
#ifdef __CUDACC__
#include <cxxabi.h>
#if __has_include(<cupti.h>)
#define LLMC_CUPTI
#include <cupti.h>
#include <dlfcn.h>
#endif
#endif

// No number of a scope.
#define NO_SCOPE SIZE_MAX

// A kernel; or a copy or fill, which have no grid.
typedef struct {
    char *name, *full;  // short, and with all arguments; owned
    size_t scope;       // as pushed when it was launched, or NO_SCOPE
    uint32_t correlation;
    int stream;
    uint64_t start, end;  // nanoseconds
    uint64_t issued;      // when the call that launched it returned, on the same clock; 0: not known
    int grid[3], block[3];
    int registers, shared_bytes;
} TracedLaunch;

// What is known of the call of the API with this number: the scope in which it was made, or when it returned.
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
    pthread_mutex_t lock;  // CUPTI hands records over on a thread of its own
    struct Cupti* cupti;   // NULL: nothing is traced
} KernelTrace;

// ---------------------------------------------------------------------------------------------------------
// Names

// The name of a function without return type, arguments and template arguments (caller frees). Where all that tells the
// kernels of CUTLASS apart is a template argument, it is that argument's name.
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
        else if (depth == 0 && *c == ' ') n = 0;  // what stood before was the return type
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
    if (t->count == t->capacity) {
        t->capacity = t->capacity ? 2 * t->capacity : 1024;
        t->rows = (TracedLaunch*)xrealloc(t->rows, t->capacity * sizeof *t->rows);
    }
    t->rows[t->count++] = *launch;
}

static inline void traced_calls_add(TracedCalls* c, uint32_t correlation, uint64_t value) {
    if (c->count == c->capacity) {
        c->capacity = c->capacity ? 2 * c->capacity : 1024;
        c->call = (TracedCall*)xrealloc(c->call, c->capacity * sizeof *c->call);
    }
    TracedCall call = {correlation, value};
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

// What is known of a call in the sorted list; `otherwise` where nothing is.
static inline uint64_t traced_calls_find(const TracedCalls* c, uint32_t correlation, uint64_t otherwise) {
    TracedCall key = {correlation, 0}, *call = NULL;
    if (c->count) call = (TracedCall*)bsearch(&key, c->call, c->count, sizeof key, traced_call_ascending);
    return call ? call->value : otherwise;
}

// Give every launch what is known of the call that made it, and put them in the order in which they ran.
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

// Forget what was recorded.
static inline void kernel_trace_clear(KernelTrace* t) {
    for (size_t i = 0; i < t->count; i++) free(t->rows[i].name), free(t->rows[i].full);
    t->count = t->scopes.count = t->returns.count = t->lost = 0;
}

#ifdef LLMC_CUPTI
// ---------------------------------------------------------------------------------------------------------
// CUPTI

// CUPTI clears a buffer before it writes into it, in the middle of a step. Small ones, whose pages have been touched before,
// cost that step microseconds, and 4 MiB of fresh pages a millisecond.
enum { CUPTI_BUFFER_BYTES = 256 << 10, CUPTI_SPARES = 64 };

// Its functions, found at run time, and the memory that it writes to.
struct Cupti {
    decltype(&cuptiGetVersion) version;
    decltype(&cuptiGetTimestamp) now;
    decltype(&cuptiGetResultString) describe;
    decltype(&cuptiSubscribe) subscribe;
    decltype(&cuptiUnsubscribe) unsubscribe;
    decltype(&cuptiActivityRegisterCallbacks) callbacks;
    decltype(&cuptiActivityEnable) enable;
    decltype(&cuptiActivityDisable) disable;
    decltype(&cuptiActivityFlushAll) flush;
    decltype(&cuptiActivityGetNextRecord) next;
    decltype(&cuptiActivityGetNumDroppedRecords) dropped;
    decltype(&cuptiActivityPushExternalCorrelationId) push;
    decltype(&cuptiActivityPopExternalCorrelationId) pop;
    CUpti_SubscriberHandle subscriber;
    uint8_t* spare[CUPTI_SPARES];  // buffers to be used again
    int spares;
    pthread_mutex_t spare_lock;
};

#if CUPTI_API_VERSION >= 130000
typedef CUpti_ActivityKernel10 CuptiKernel;
#else
typedef CUpti_ActivityKernel9 CuptiKernel;
#endif
typedef CUpti_ActivityMemcpy5 CuptiCopy;  // later ones only append fields
typedef CUpti_ActivityMemset4 CuptiFill;

// The trace that runs. CUPTI's callbacks are given nothing of ours, so this has to be found without an argument.
static inline KernelTrace** kernel_trace_running(void) {
    static KernelTrace* running;
    return &running;
}

static inline void CUPTIAPI cupti_wants_buffer(uint8_t** buffer, size_t* bytes, size_t* most_records) {
    KernelTrace* t = *kernel_trace_running();
    *bytes = CUPTI_BUFFER_BYTES;
    *buffer = NULL;
    *most_records = 0;  // as many as fit
    if (t) {
        pthread_mutex_lock(&t->cupti->spare_lock);
        if (t->cupti->spares) *buffer = t->cupti->spare[--t->cupti->spares];
        pthread_mutex_unlock(&t->cupti->spare_lock);
    }
    if (!*buffer) *buffer = (uint8_t*)xmalloc(*bytes);
}

static inline void cupti_take_kernel(TracedLaunch* row, const CuptiKernel* r) {
    int status;
    const char* name = r->name ? r->name : "unnamed";
    char* full = strncmp(name, "_Z", 2) == 0 ? abi::__cxa_demangle(name, NULL, NULL, &status) : NULL;
    row->full = xprintf("%s", full ? full : name);
    row->name = kernel_name_short(row->full);
    free(full);
    row->correlation = r->correlationId, row->start = r->start, row->end = r->end, row->stream = (int)r->streamId;
    row->grid[0] = r->gridX, row->grid[1] = r->gridY, row->grid[2] = r->gridZ;
    row->block[0] = r->blockX, row->block[1] = r->blockY, row->block[2] = r->blockZ;
    row->registers = r->registersPerThread;
    row->shared_bytes = r->staticSharedMemory + r->dynamicSharedMemory;
}

static inline void cupti_take_copy(TracedLaunch* row, const CuptiCopy* r) {
    const char* kind = r->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD   ? "copy_to_device"
                       : r->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH ? "copy_to_host"
                                                                        : "copy";
    row->name = xprintf("%s_%lluB", kind, (unsigned long long)r->bytes);
    row->correlation = r->correlationId, row->start = r->start, row->end = r->end, row->stream = (int)r->streamId;
}

static inline void cupti_take_fill(TracedLaunch* row, const CuptiFill* r) {
    row->name = xprintf("fill_%lluB", (unsigned long long)r->bytes);
    row->correlation = r->correlationId, row->start = r->start, row->end = r->end, row->stream = (int)r->streamId;
}

static inline void cupti_take_record(KernelTrace* t, const CUpti_Activity* record) {
    TracedLaunch row;
    memset(&row, 0, sizeof row);
    if (record->kind == CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION) {
        const CUpti_ActivityExternalCorrelation* r = (const CUpti_ActivityExternalCorrelation*)record;
        if (r->externalKind == CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0)
            traced_calls_add(&t->scopes, r->correlationId, r->externalId - 1);
        return;
    }
    if (record->kind == CUPTI_ACTIVITY_KIND_RUNTIME || record->kind == CUPTI_ACTIVITY_KIND_DRIVER) {
        const CUpti_ActivityAPI* r = (const CUpti_ActivityAPI*)record;
        traced_calls_add(&t->returns, r->correlationId, r->end);
        return;
    }
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) cupti_take_kernel(&row, (const CuptiKernel*)record);
    else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) cupti_take_copy(&row, (const CuptiCopy*)record);
    else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) cupti_take_fill(&row, (const CuptiFill*)record);
    else return;
    if (row.end) {
        kernel_trace_add(t, &row);
    } else {  // CUPTI has no times for it
        t->lost++;
        free(row.name), free(row.full);
    }
}

static inline void CUPTIAPI cupti_gives_buffer(CUcontext context, uint32_t stream, uint8_t* buffer, size_t,
                                               size_t valid) {
    KernelTrace* t = *kernel_trace_running();
    CUpti_Activity* record = NULL;
    size_t lost = 0;
    if (t) {
        pthread_mutex_lock(&t->lock);
        while (t->cupti->next(buffer, valid, &record) == CUPTI_SUCCESS) cupti_take_record(t, record);
        if (t->cupti->dropped(context, stream, &lost) == CUPTI_SUCCESS) t->lost += lost;
        pthread_mutex_unlock(&t->lock);
        pthread_mutex_lock(&t->cupti->spare_lock);
        if (t->cupti->spares < CUPTI_SPARES) t->cupti->spare[t->cupti->spares++] = buffer, buffer = NULL;
        pthread_mutex_unlock(&t->cupti->spare_lock);
    }
    free(buffer);
}

static inline void CUPTIAPI cupti_calls_back(void*, CUpti_CallbackDomain, CUpti_CallbackId, const void*) {}

// Apply `change`, which is enable or disable, to all that is recorded. Correlation ids come only beside calls of the API.
static inline CUptiResult cupti_change(CUptiResult(CUPTIAPI* change)(CUpti_ActivityKind)) {
    static const CUpti_ActivityKind kinds[] = {
        CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION, CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_ACTIVITY_KIND_DRIVER,
        CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,    CUPTI_ACTIVITY_KIND_MEMCPY,  CUPTI_ACTIVITY_KIND_MEMSET};
    CUptiResult result = CUPTI_SUCCESS;
    for (size_t i = 0; i < COUNT_OF(kinds) && result == CUPTI_SUCCESS; i++) result = change(kinds[i]);
    return result;
}

// The library by its name, beside cuBLASLt, or where toolkits keep it. NULL if there is none.
static inline void* cupti_open(void) {
    static const char* const places[] = {"", "/../extras/CUPTI/lib64", "/../../../extras/CUPTI/lib64"};
    char name[32];
    Dl_info cublaslt;
    snprintf(name, sizeof name, "libcupti.so.%d", CUDART_VERSION / 1000);
    void* library = dlopen(name, RTLD_NOW);
    if (!library) library = dlopen("libcupti.so", RTLD_NOW);
    void* symbol = dlsym(RTLD_DEFAULT, "cublasLtCreate");
    const char* slash = symbol && dladdr(symbol, &cublaslt) ? strrchr(cublaslt.dli_fname, '/') : NULL;
    for (size_t i = 0; slash && !library && i < COUNT_OF(places); i++) {
        char* path = xprintf("%.*s%s/%s", (int)(slash - cublaslt.dli_fname), cublaslt.dli_fname, places[i], name);
        library = dlopen(path, RTLD_NOW);
        free(path);
    }
    return library;
}

// Returns 0, or -1 if the library lacks a function.
static inline int cupti_bind(struct Cupti* c, void* library) {
    const struct {
        const char* name;
        void* slot;
    } symbols[] = {{"cuptiGetVersion", &c->version},
                   {"cuptiGetTimestamp", &c->now},
                   {"cuptiGetResultString", &c->describe},
                   {"cuptiSubscribe", &c->subscribe},
                   {"cuptiUnsubscribe", &c->unsubscribe},
                   {"cuptiActivityRegisterCallbacks", &c->callbacks},
                   {"cuptiActivityEnable", &c->enable},
                   {"cuptiActivityDisable", &c->disable},
                   {"cuptiActivityFlushAll", &c->flush},
                   {"cuptiActivityGetNextRecord", &c->next},
                   {"cuptiActivityGetNumDroppedRecords", &c->dropped},
                   {"cuptiActivityPushExternalCorrelationId", &c->push},
                   {"cuptiActivityPopExternalCorrelationId", &c->pop}};
    for (size_t i = 0; i < COUNT_OF(symbols); i++) {
        void* symbol = dlsym(library, symbols[i].name);
        if (!symbol) return -1;
        memcpy(symbols[i].slot, &symbol, sizeof symbol);
    }
    return 0;
}

__global__ void kernel_trace_lead_kernel(uint64_t nanoseconds) {
    uint64_t began, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - began < nanoseconds);
}

// Take what CUPTI has recorded of everything launched so far, which is waited for.
static inline void kernel_trace_collect(KernelTrace* t) {
    cudaCheck(cudaDeviceSynchronize());
    t->cupti->flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    pthread_mutex_lock(&t->lock);
    kernel_trace_join(t);
    pthread_mutex_unlock(&t->lock);
}

// Nanoseconds on the clock of the records.
static inline uint64_t kernel_trace_now(const KernelTrace* t) {
    uint64_t now = 0;
    t->cupti->now(&now);
    return now;
}

// What is launched from here on belongs to this scope, until the pop.
static inline void kernel_trace_push(KernelTrace* t, size_t scope) {
    t->cupti->push(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, (uint64_t)scope + 1);
}

static inline void kernel_trace_pop(KernelTrace* t) { t->cupti->pop(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, NULL); }

// Keep the device busy for so long: what is launched after it can all be there before the first of it runs, as it is where
// the host is steps ahead. What waits for the host then does so in earnest.
static inline void kernel_trace_lead(uint64_t nanoseconds, Context* ctx) {
    kernel_trace_lead_kernel<<<1, 1, 0, ctx->stream>>>(nanoseconds);
    cudaCheck(cudaGetLastError());
}

// Take that kernel, collected with all else, out of the rows. Returns when it ended; 0 where it is not found.
static inline uint64_t kernel_trace_take_lead(KernelTrace* t) {
    uint64_t end = 0;
    for (size_t i = 0; i < t->count && !end; i++) {
        TracedLaunch* row = &t->rows[i];
        if (strcmp(row->name, "kernel_trace_lead_kernel") != 0) continue;
        end = row->end;
        free(row->name), free(row->full);
        memmove(row, row + 1, (t->count - i - 1) * sizeof *row);
        t->count--;
    }
    return end;
}

// End the trace; what was collected stays until kernel_trace_clear().
static inline void kernel_trace_stop(KernelTrace* t) {
    struct Cupti* c = t->cupti;
    if (!c) return;
    cupti_change(c->disable);
    c->flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    if (c->subscriber) c->unsubscribe(c->subscriber);
    *kernel_trace_running() = NULL;
    for (int i = 0; i < c->spares; i++) free(c->spare[i]);
    pthread_mutex_destroy(&t->lock), pthread_mutex_destroy(&c->spare_lock);
    free(c);
    t->cupti = NULL;
}

// Whether a fill and a kernel come out of CUPTI with the scope in which they were launched.
static inline int kernel_trace_works(KernelTrace* t, Context* ctx) {
    kernel_trace_push(t, 1);
    cudaCheck(cudaMemsetAsync(ctx->cublaslt_workspace, 0, 256, ctx->stream));
    kernel_trace_lead_kernel<<<1, 1, 0, ctx->stream>>>(0);
    kernel_trace_pop(t);
    kernel_trace_collect(t);
    int good = t->count == 2;
    for (size_t i = 0; i < t->count; i++) good = good && t->rows[i].scope == 1 && t->rows[i].issued;
    return good;
}

// Begin to record. Returns 0, or -1 after a line that says why nothing is.
static inline int kernel_trace_start(KernelTrace* t, Context* ctx) {
    static const char without[] = "no list of kernels; times of ops are those between events";
    memset(t, 0, sizeof *t);
    if (ctx->tool > 0 || getenv("CUDA_INJECTION64_PATH") || getenv("NVTX_INJECTION64_PATH")) {
        warn("another tool profiles this process: %s", without);
        return -1;
    }
    void* library = cupti_open();
    struct Cupti* c = (struct Cupti*)xcalloc(1, sizeof *c);
    uint32_t version = 0;
    if (!library || cupti_bind(c, library) != 0 || c->version(&version) != CUPTI_SUCCESS ||
        version / 100 != CUPTI_API_VERSION / 100) {
        if (version) warn("CUPTI is of version %u, not %d as built for: %s", version, CUPTI_API_VERSION, without);
        else warn("CUPTI (libcupti.so.%d) is not found: %s", CUDART_VERSION / 1000, without);
        free(c);
        return -1;
    }
    pthread_mutex_init(&t->lock, NULL), pthread_mutex_init(&c->spare_lock, NULL);
    t->cupti = c;
    *kernel_trace_running() = t;
    CUptiResult result = c->subscribe(&c->subscriber, cupti_calls_back, NULL);
    if (result == CUPTI_SUCCESS) result = c->callbacks(cupti_wants_buffer, cupti_gives_buffer);
    if (result == CUPTI_SUCCESS) result = cupti_change(c->enable);
    const char* why = NULL;
    if (result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED) why = "another tool profiles this process";
    else if (result != CUPTI_SUCCESS) c->describe(result, &why);
    else if (!kernel_trace_works(t, ctx)) why = "a test gave no record";
    if (!why) return 0;
    warn("CUPTI: %s: %s", why ? why : "unknown error", without);
    kernel_trace_stop(t);
    kernel_trace_clear(t);
    return -1;
}

#else
// ---------------------------------------------------------------------------------------------------------
// Without CUPTI

static inline int kernel_trace_start(KernelTrace* t, Context* ctx) {
    memset(t, 0, sizeof *t);
#ifdef __CUDACC__
    warn("built without CUPTI's header: no list of kernels; times of ops are those between events");
#endif
    (void)ctx;
    return -1;
}

static inline void kernel_trace_stop(KernelTrace* t) { (void)t; }
static inline void kernel_trace_collect(KernelTrace* t) { kernel_trace_join(t); }
static inline uint64_t kernel_trace_now(const KernelTrace* t) { return (void)t, (uint64_t)0; }
static inline void kernel_trace_lead(uint64_t nanoseconds, Context* ctx) { (void)nanoseconds, (void)ctx; }
static inline uint64_t kernel_trace_take_lead(KernelTrace* t) { return (void)t, (uint64_t)0; }
static inline void kernel_trace_push(KernelTrace* t, size_t scope) { (void)t, (void)scope; }
static inline void kernel_trace_pop(KernelTrace* t) { (void)t; }
#endif

// Forget everything, after kernel_trace_stop().
static inline void kernel_trace_free(KernelTrace* t) {
    kernel_trace_clear(t);
    free(t->rows), free(t->scopes.call), free(t->returns.call);
    memset(t, 0, sizeof *t);
}

#endif
