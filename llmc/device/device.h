/* The seam between CPU and GPU: the context that every op receives, memory, and the modes of the ops.
 *
 * The CPU build (gcc, or g++) takes floatX = real and ordinary memory; the CUDA build gives the same names
 * their GPU meaning. Nothing above this folder asks which of the two it is compiled for. */
#ifndef LLMC_DEVICE_H
#define LLMC_DEVICE_H

#include <sys/mman.h>
#include <sys/resource.h>

#include "../base/util.h"
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __CUDACC__
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

// Type of weights and activations, and its name in safetensors.
#if defined(__CUDACC__) && defined(PRECISION_BF16)
typedef __nv_bfloat16 floatX;
#define FLOATX_NAME "BF16"
#elif defined(__CUDACC__) && defined(PRECISION_FP16)
typedef __half floatX;
#define FLOATX_NAME "F16"
#else
typedef real floatX;
#ifdef REAL_DOUBLE
#define FLOATX_NAME "F64"
#else
#define FLOATX_NAME "F32"
#endif
#endif

// How an op writes its output: over what is there, or added to it.
typedef enum { SET, ADD } Mode;
// Which keys a query may see inside its own sequence.
typedef enum { CAUSAL, FULL } Mask;
// The two GELUs in use: GPT-2's tanh form, and the erf form that BERT's "gelu" means.
typedef enum { GELU_TANH, GELU_ERF } Gelu;
// How attention is computed on the GPU: in tiles that stay on the chip, or step by step with all scores in memory.
typedef enum { FLASH, EXPLICIT } AttentionPath;
// Part of a step that a launch belongs to.
typedef enum { FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, DIRECTIONS } Direction;

// The weight and bias of a linear layer (w [OC, IC], b [OC] or NULL) or of a layernorm (w [C], b [C]).
typedef struct {
    floatX* w;
    floatX* b;
} Affine;

// Of a layernorm, as its forward pass reads them: the weights in full precision (ops/widen.h says why).
typedef struct {
    const real* w;
    const floatX* b;
} Norm;

static inline Norm norm_of(Affine p, const real* exact_w) {
    Norm norm = {exact_w, p.b};
    return norm;
}

// Their gradients. Gradients of parameters are kept in full precision: they are sums over all tokens of a step, and
// reading and writing them costs little beside the products that make them.
typedef struct {
    real* w;
    real* b;
} AffineGradient;

// Per-row statistics that layernorm keeps for its backward pass: [N] each.
typedef struct {
    real* mean;
    real* rstd;  // 1 / sqrt(variance + eps)
} Moments;

#define MEMORY_CATEGORIES 8

// What every op receives last. Zero-initialise it, then context_init().
typedef struct {
    Direction direction;         // set by the trainer through scope_at(), read by launchers' scopes
    int layer;                   // -1 outside the blocks
    struct ScopeLog* scope_log;  // NULL: nobody listens
    void* scratch;               // of one launch at a time; grows to the largest request of the first step
    size_t scratch_bytes;
    struct {
        const char* name;
        size_t bytes;
    } memory[MEMORY_CATEGORIES];  // what was allocated, by category
#ifdef __CUDACC__
    cudaStream_t stream;  // all launches of a rank go here, in order
    cublasLtHandle_t cublaslt;
    void* cublaslt_workspace;
    unsigned* arrivals;       // [DEVICE_ARRIVALS] counters, all 0 between launches (last_to_arrive)
    void* encode_tensor_map;  // the driver's function, looked up when first needed (hopper.cuh)
    int multiprocessors;
    int capability;                    // 90 for sm_90
    struct MatmulPlans* matmul_plans;  // made when first needed; matmul_plans_free() before context_free()
    int autotune;                      // 1: time cuBLASLt's candidates at each first use; 0: take its first choice
    const char* autotune_cache;        // file of the choices; NULL: none
    int gelu_fusion;                   // GELU in matmul epilogues: 0 never, 1 forward, 2 forward and backward
    int tf32;                          // 1: fp32 products may round their inputs to TF32
    AttentionPath attention;           // as asked for; what flash cannot do is done explicitly
    struct BatchPlans* batch_plans;    // made when first needed (cublaslt.cuh)
    int tool;                          // whether an NVTX tool listens: 0 nobody has asked yet, 1 yes, -1 no
    int ranges;                        // bits of the NVTX ranges that are open (scope.h)
#endif
} Context;

// How the GPU's matmuls are chosen (Context's fields say what the numbers mean); `cache` is a file and outlives the
// context. The CPU has one matmul.
static inline void device_set_matmul(Context* ctx, int autotune, const char* cache, int gelu_fusion, int tf32) {
#ifdef __CUDACC__
    ctx->autotune = autotune, ctx->autotune_cache = cache, ctx->gelu_fusion = gelu_fusion, ctx->tf32 = tf32;
#else
    (void)ctx, (void)autotune, (void)cache, (void)gelu_fusion, (void)tf32;
#endif
}

// Whether new shapes of matmuls are timed from now on; else they take cuBLASLt's first choice, and whoever resumes makes the
// same choices. Returns what was before.
static inline int device_set_autotune(Context* ctx, int on) {
#ifdef __CUDACC__
    int before = ctx->autotune;
    ctx->autotune = on;
    return before;
#else
    return (void)ctx, (void)on, 0;
#endif
}

// The CPU has one attention.
static inline void device_set_attention(Context* ctx, AttentionPath path) {
#ifdef __CUDACC__
    ctx->attention = path;
#else
    (void)ctx, (void)path;
#endif
}

// Threads that a launch uses. Results never depend on it.
static inline int device_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// Use so many from now on; 0 leaves it to the system.
static inline void device_set_threads(int threads) {
#ifdef _OPENMP
    if (threads > 0) omp_set_num_threads(threads);
#else
    (void)threads;
#endif
}

static inline int device_thread_index(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static inline void device_count_memory(Context* ctx, size_t bytes, const char* category) {
    int i = 0;
    while (ctx->memory[i].name && strcmp(ctx->memory[i].name, category) != 0) i++;
    CHECK(i < MEMORY_CATEGORIES);
    ctx->memory[i].name = category;
    ctx->memory[i].bytes += bytes;
}

// "n" of a line "key n" of a file, or of a file that holds one number (`key` NULL); 0 if there is none.
static inline size_t memory_figure(const char* path, const char* key) {
    FILE* f = fopen(path, "r");
    char line[256];
    unsigned long long n = 0;
    size_t found = 0;
    while (f && !found && fgets(line, sizeof line, f)) {
        if (key && strncmp(line, key, strlen(key)) != 0) continue;
        if (sscanf(line + (key ? strlen(key) : 0), "%llu", &n) == 1) found = (size_t)n;
        if (!key) break;
    }
    if (f) fclose(f);
    return found;
}

// Bytes that a container may still take by its control group's files; SIZE_MAX where it has no limit. Cached files count
// as used there, but go when memory is needed: they are what the keys of `stat` name.
static inline size_t memory_of_group(const char* limit_file, const char* used_file, const char* stat,
                                     const char* inactive, const char* active) {
    size_t limit = memory_figure(limit_file, NULL), used = memory_figure(used_file, NULL);
    size_t cached = memory_figure(stat, inactive) + memory_figure(stat, active);
    used -= min_size(used, cached);
    return limit == 0 ? SIZE_MAX : limit - min_size(limit, used);
}

// Bytes that the host can still give: what the kernel calls available, less where the container (cgroup 2 or 1) or a ulimit
// allows less.
static inline size_t host_memory_available(void) {
    size_t available = 1024 * memory_figure("/proc/meminfo", "MemAvailable:");
    if (!available) available = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    size_t group2 = memory_of_group("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current",
                                    "/sys/fs/cgroup/memory.stat", "inactive_file ", "active_file ");
    size_t group1 =
        memory_of_group("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
                        "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file ", "total_active_file ");
    available = min_size(available, min_size(group1, group2));
    struct rlimit address_space;
    if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY)
        available = min_size(available, (size_t)address_space.rlim_cur);
    return available;
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU

// Check what an API call returned; `what` says in words what was tried.
#define cudaCheck(call) cuda_check((call), #call, __FILE__, __LINE__)
#define cublasCheck(call) cublas_check((call), #call, __FILE__, __LINE__)

static inline void cuda_check(cudaError_t status, const char* call, const char* file, int line) {
    if (status == cudaSuccess) return;
    const char* hint = status == cudaErrorMemoryAllocation ? "; lower -b or -t, or raise -r"
                       : status == cudaErrorNoKernelImageForDevice
                           ? "; build for this GPU: make ARCH=80, or whatever its compute capability is"
                       : status == cudaErrorInsufficientDriver ? "; the driver is older than this build's CUDA"
                                                               : "";
    die(FAILED, "%s:%d: %s: %s%s", file, line, call, cudaGetErrorString(status), hint);
}

static inline void cublas_check(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS)
        die(FAILED, "%s:%d: %s: %s", file, line, call, cublasLtGetStatusString(status));
}

// Use this one of the machine's GPUs from now on; to be called before context_init(). A machine without GPUs is left to that.
static inline void device_choose(int number) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return;
    if (devices == 1) return;  // a launcher may show each process its own GPU alone
    if (number >= devices)
        die(USAGE, "%d processes want a GPU each on this machine, which has %d; start at most so many", number + 1,
            devices);
    cudaCheck(cudaSetDevice(number));
}

enum { CUBLASLT_WORKSPACE_BYTES = 64 << 20, DEVICE_ARRIVALS = 8192 };

// What context_init() takes.
static inline size_t device_workspace_bytes(void) {
    return CUBLASLT_WORKSPACE_BYTES + DEVICE_ARRIVALS * sizeof(unsigned);
}

static inline void context_init(Context* ctx) {
    memset(ctx, 0, sizeof *ctx);
    ctx->layer = -1;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        const char *name = program_invocation_short_name, *end = strstr(name, "cu");
        die(FAILED, "this machine has no NVIDIA GPU that CUDA can use; the CPU build is ./%.*s",
            (int)(end ? end - name : 0), name);
    }
    struct cudaDeviceProp properties;
    int device;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaGetDeviceProperties(&properties, device));
    ctx->multiprocessors = properties.multiProcessorCount;
    ctx->capability = 10 * properties.major + properties.minor;
    ctx->gelu_fusion = 2;
    cudaCheck(cudaStreamCreateWithFlags(&ctx->stream, cudaStreamNonBlocking));
    cublasCheck(cublasLtCreate(&ctx->cublaslt));
    cudaCheck(cudaMalloc(&ctx->cublaslt_workspace, CUBLASLT_WORKSPACE_BYTES));
    cudaCheck(cudaMalloc(&ctx->arrivals, DEVICE_ARRIVALS * sizeof *ctx->arrivals));
    cudaCheck(cudaMemsetAsync(ctx->arrivals, 0, DEVICE_ARRIVALS * sizeof *ctx->arrivals, ctx->stream));
    device_count_memory(ctx, device_workspace_bytes(), "workspace");
}

static inline void context_free(Context* ctx) {
    cudaCheck(cudaStreamSynchronize(ctx->stream));
    cudaCheck(cudaFree(ctx->scratch));
    free(ctx->batch_plans);
    cudaCheck(cudaFree(ctx->cublaslt_workspace));
    cudaCheck(cudaFree(ctx->arrivals));
    cublasCheck(cublasLtDestroy(ctx->cublaslt));
    cudaCheck(cudaStreamDestroy(ctx->stream));
}

// Zero-filled memory where the ops run, counted under `category` (a string that outlives the context).
static inline void* device_alloc(Context* ctx, size_t bytes, const char* category) {
    void* p;
    cudaCheck(cudaMalloc(&p, bytes ? bytes : 1));
    cudaCheck(cudaMemsetAsync(p, 0, bytes, ctx->stream));  // in order with the uploads that follow
    device_count_memory(ctx, bytes, category);
    return p;
}

static inline void device_free(void* p, size_t bytes) {
    (void)bytes;
    cudaCheck(cudaFree(p));
}

// What device_scratch() takes for a request.
static inline size_t device_scratch_size(size_t bytes) { return round_up(bytes, (size_t)1 << 20); }

// Scratch of at least `bytes` for the running launch; its contents do not survive the launch. Growing waits for the
// launches before it; that happens in the first step, and where a later batch is the largest so far.
static inline void* device_scratch(Context* ctx, size_t bytes) {
    if (bytes > ctx->scratch_bytes) {
        cudaCheck(cudaStreamSynchronize(ctx->stream));
        cudaCheck(cudaFree(ctx->scratch));
        ctx->scratch_bytes = device_scratch_size(bytes);
        cudaCheck(cudaMalloc(&ctx->scratch, ctx->scratch_bytes));
        // Whole words are read where only some bits count (attention_dropout.cuh): those have a value too.
        cudaCheck(cudaMemsetAsync(ctx->scratch, 0, ctx->scratch_bytes, ctx->stream));
    }
    return ctx->scratch;
}

// Copies between host memory and the memory where the ops run, after everything launched so far. The download is
// complete on return; an upload from pageable memory has left the host's buffer on return.
static inline void device_upload(Context* ctx, void* device, const void* host, size_t bytes) {
    cudaCheck(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, ctx->stream));
}

static inline void device_download(Context* ctx, void* host, const void* device, size_t bytes) {
    cudaCheck(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, ctx->stream));
    cudaCheck(cudaStreamSynchronize(ctx->stream));
}

// Wait for everything launched so far.
static inline void device_synchronize(Context* ctx) { cudaCheck(cudaStreamSynchronize(ctx->stream)); }

// Bytes that can still be allocated where the ops run.
static inline size_t device_memory_available(void) {
    size_t available, total;
    cudaCheck(cudaMemGetInfo(&available, &total));
    return available;
}

#else
// ---------------------------------------------------------------------------------------------------------
// CPU

static inline void device_choose(int number) { (void)number; }

static inline void context_init(Context* ctx) {
    memset(ctx, 0, sizeof *ctx);
    ctx->layer = -1;
}

// Zero-filled memory where the ops run, counted under `category` (a string that outlives the context).
// Page-aligned; large blocks ask for huge pages, which saves TLB misses in the matmuls.
static inline void* device_alloc(Context* ctx, size_t bytes, const char* category) {
    size_t size = round_up(bytes ? bytes : 1, 4096);
    void* p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        die(FAILED, "out of memory: %.1f MiB for %s could not be allocated; lower -b, -t or the model's size",
            (double)bytes / 1048576, category);
    if (size >= (size_t)4 << 20) madvise(p, size, MADV_HUGEPAGE);
    device_count_memory(ctx, bytes, category);
    return p;
}

static inline void device_free(void* p, size_t bytes) {
    if (p) munmap(p, round_up(bytes ? bytes : 1, 4096));
}

// What context_init() takes, and device_scratch() for a request.
static inline size_t device_workspace_bytes(void) { return 0; }
static inline size_t device_scratch_size(size_t bytes) { return round_up(bytes, 4096); }

// Scratch of at least `bytes` for the running launch; its contents do not survive the launch.
static inline void* device_scratch(Context* ctx, size_t bytes) {
    if (bytes > ctx->scratch_bytes) {
        free(ctx->scratch);
        ctx->scratch = aligned_alloc(4096, device_scratch_size(bytes));
        if (!ctx->scratch) die(FAILED, "out of memory: %zu bytes of scratch could not be allocated", bytes);
        ctx->scratch_bytes = device_scratch_size(bytes);
    }
    return ctx->scratch;
}

static inline void context_free(Context* ctx) {
    free(ctx->scratch);
    ctx->scratch = NULL;
    ctx->scratch_bytes = 0;
}

// Copies between host memory and the memory where the ops run.
static inline void device_upload(Context* ctx, void* device, const void* host, size_t bytes) {
    (void)ctx;
    memcpy(device, host, bytes);
}

static inline void device_download(Context* ctx, void* host, const void* device, size_t bytes) {
    (void)ctx;
    memcpy(host, device, bytes);
}

static inline void device_synchronize(Context* ctx) { (void)ctx; }

// Bytes that can still be allocated where the ops run.
static inline size_t device_memory_available(void) { return host_memory_available(); }
#endif

#endif
