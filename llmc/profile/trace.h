/* A trace of the kernels, copies and fills that the GPU ran, with their times, from CUPTI's activity records. Each has
 * the index of the scope that launched it and the time at which the host's launch call returned. The index is passed as
 * an external correlation id, so the helper kernels of libraries have it too.
 *
 * CUPTI is optional. Without its header, the code is compiled out. Its library is loaded when a trace starts. A trace
 * cannot start if the library is missing, has another version, or is in use by another tool. */
#ifndef LLMC_PROFILE_TRACE_H
#define LLMC_PROFILE_TRACE_H

#include "llmc/profile/nvtx.h"
#include "llmc/profile/trace_launches.h"

#ifdef LLMC_CUPTI
// ---------------------------------------------------------------------------------------------------------
// CUPTI

// CUPTI clears each buffer before it writes to it, in the middle of a step. For a small buffer whose pages were touched
// before, this costs the step microseconds. For 4 MiB of fresh pages it costs a millisecond.
enum { CUPTI_BUFFER_BYTES = 256 << 10, CUPTI_SPARES = 64 };

// CUPTI's functions, found at run time, and the buffers that it writes to.
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
    uint8_t* spare[CUPTI_SPARES];  // buffers to reuse
    int spares;
    pthread_mutex_t spare_lock;
};

#if CUPTI_API_VERSION >= 130000
typedef CUpti_ActivityKernel10 CuptiKernel;
#else
typedef CUpti_ActivityKernel9 CuptiKernel;
#endif
typedef CUpti_ActivityMemcpy5 CuptiCopy;  // later versions only append fields
typedef CUpti_ActivityMemset4 CuptiFill;

// The active trace. It is global because CUPTI's callbacks take no user argument.
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

static inline void cupti_count_wait(KernelTrace* t, CUpti_CallbackId call) {
    switch (call) {
    case CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy_v3020:
    case CUPTI_RUNTIME_TRACE_CBID_cudaStreamSynchronize_v3020:
    case CUPTI_RUNTIME_TRACE_CBID_cudaEventSynchronize_v3020:
    case CUPTI_RUNTIME_TRACE_CBID_cudaDeviceSynchronize_v3020:
        t->host_waits++;
        break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaStreamWaitEvent_v3020:
        t->stream_waits++;
        break;
    default:
        break;
    }
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
        if (record->kind == CUPTI_ACTIVITY_KIND_RUNTIME) cupti_count_wait(t, r->cbid);
        return;
    }
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) cupti_take_kernel(&row, (const CuptiKernel*)record);
    else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) cupti_take_copy(&row, (const CuptiCopy*)record);
    else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) cupti_take_fill(&row, (const CuptiFill*)record);
    else return;
    if (row.end) {
        kernel_trace_add(t, &row);
    } else {  // CUPTI recorded no times
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

// Apply `change` (enable or disable) to all recorded activity kinds. CUPTI reports external correlation ids only if API
// calls are recorded too.
static inline CUptiResult cupti_change(CUptiResult(CUPTIAPI* change)(CUpti_ActivityKind)) {
    static const CUpti_ActivityKind kinds[] = {
        CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION, CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_ACTIVITY_KIND_DRIVER,
        CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,    CUPTI_ACTIVITY_KIND_MEMCPY,  CUPTI_ACTIVITY_KIND_MEMSET};
    CUptiResult result = CUPTI_SUCCESS;
    for (size_t i = 0; i < COUNT_OF(kinds) && result == CUPTI_SUCCESS; i++) result = change(kinds[i]);
    return result;
}

// Load CUPTI by its name, from cuBLASLt's directory, or from the toolkit's usual directories. NULL if it is not found.
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

// Wait for everything launched so far, and collect CUPTI's records of it.
static inline void kernel_trace_collect(KernelTrace* t) {
    cudaCheck(cudaDeviceSynchronize());
    t->cupti->flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    pthread_mutex_lock(&t->lock);
    kernel_trace_join(t);
    pthread_mutex_unlock(&t->lock);
}

// The current time in nanoseconds, on the clock of the records.
static inline uint64_t kernel_trace_now(const KernelTrace* t) {
    uint64_t now = 0;
    t->cupti->now(&now);
    return now;
}

// Assign the launches that follow to this scope, until kernel_trace_pop().
static inline void kernel_trace_push(KernelTrace* t, size_t scope) {
    t->cupti->push(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, (uint64_t)scope + 1);
}

static inline void kernel_trace_pop(KernelTrace* t) { t->cupti->pop(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, NULL); }

// Launch a delay kernel that keeps the device busy for this time. The host can then queue all later launches before the
// first of them runs, as in a normal run where it is steps ahead. Any remaining wait for the host is a real one.
static inline void kernel_trace_lead(uint64_t nanoseconds, Context* ctx) {
    kernel_trace_lead_kernel<<<1, 1, 0, ctx->stream>>>(nanoseconds);
    cudaCheck(cudaGetLastError());
}

// Remove the delay kernel from the collected rows. Returns its end time, or 0 if it is not found.
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

// Stop the trace. The collected rows are kept until kernel_trace_clear().
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

// Whether CUPTI records a fill and a kernel with the scope in which they were launched.
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

// Start recording. Returns NULL, or why nothing can be recorded.
static inline const char* kernel_trace_start(KernelTrace* t, Context* ctx) {
    memset(t, 0, sizeof *t);
    if (nvtx_tool_is_attached() || getenv("CUDA_INJECTION64_PATH") || getenv("NVTX_INJECTION64_PATH"))
        return "another tool profiles this process";
    void* library = cupti_open();
    if (!library) return "the library CUPTI (libcupti.so, of the CUDA toolkit) is not found";
    struct Cupti* c = (struct Cupti*)xcalloc(1, sizeof *c);
    uint32_t version = 0;
    if (cupti_bind(c, library) != 0 || c->version(&version) != CUPTI_SUCCESS ||
        version / 100 != CUPTI_API_VERSION / 100) {
        free(c);
        return "CUPTI's library is of another version than the one that this program was built with";
    }
    pthread_mutex_init(&t->lock, NULL), pthread_mutex_init(&c->spare_lock, NULL);
    t->cupti = c;
    *kernel_trace_running() = t;
    CUptiResult result = c->subscribe(&c->subscriber, cupti_calls_back, NULL);
    if (result == CUPTI_SUCCESS) result = c->callbacks(cupti_wants_buffer, cupti_gives_buffer);
    if (result == CUPTI_SUCCESS) result = cupti_change(c->enable);
    const char* why = result == CUPTI_SUCCESS ? NULL : "an unknown error of CUPTI";
    if (result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED) why = "another tool profiles this process";
    else if (result != CUPTI_SUCCESS) c->describe(result, &why);
    else if (!kernel_trace_works(t, ctx)) why = "CUPTI records nothing";
    if (!why) return NULL;
    kernel_trace_stop(t);
    kernel_trace_clear(t);
    return why;
}

#else
// ---------------------------------------------------------------------------------------------------------
// Without CUPTI

static inline const char* kernel_trace_start(KernelTrace* t, Context* ctx) {
    memset(t, 0, sizeof *t);
    (void)ctx;
    return "this program was built without CUPTI's header";
}

static inline void kernel_trace_stop(KernelTrace* t) { (void)t; }
static inline void kernel_trace_collect(KernelTrace* t) { kernel_trace_join(t); }
static inline uint64_t kernel_trace_now(const KernelTrace* t) { return (void)t, (uint64_t)0; }
static inline void kernel_trace_lead(uint64_t nanoseconds, Context* ctx) { (void)nanoseconds, (void)ctx; }
static inline uint64_t kernel_trace_take_lead(KernelTrace* t) { return (void)t, (uint64_t)0; }
static inline void kernel_trace_push(KernelTrace* t, size_t scope) { (void)t, (void)scope; }
static inline void kernel_trace_pop(KernelTrace* t) { (void)t; }
#endif

// Free all memory. Call kernel_trace_stop() first.
static inline void kernel_trace_free(KernelTrace* t) {
    kernel_trace_clear(t);
    free(t->rows), free(t->scopes.call), free(t->returns.call);
    memset(t, 0, sizeof *t);
}

#endif
