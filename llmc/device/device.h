/* The device layer for CPU and GPU: the context that every op receives, memory, and the modes of the ops.
 *
 * The CPU build (gcc or g++) uses floatX = real and ordinary memory. The CUDA build gives the same names their
 * GPU meaning. Models and trainers do not test which of the two they are compiled for. */
#ifndef LLMC_DEVICE_H
#define LLMC_DEVICE_H

#include <assert.h>
#include <sys/mman.h>

#include "llmc/base/host_memory.h"
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __CUDACC__
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define GPU_BUILD 1
#else
#define GPU_BUILD 0
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

// How an op writes its output: overwrite the buffer, or add to it.
typedef enum { SET, ADD } Mode;
// The keys that a query attends to within its own sequence.
typedef enum { CAUSAL, FULL } Mask;
// The two forms of GELU: GPT-2 uses the tanh approximation, BERT's "gelu" is the erf form.
typedef enum { GELU_TANH, GELU_ERF } Gelu;
// Attention on the GPU: in tiles on chip, or with all scores in memory.
typedef enum { FLASH, MATERIALIZED } AttentionPath;
// The part of a step that a launch belongs to.
typedef enum { FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, DIRECTIONS } Direction;

// What a linear layer multiplies: its input, or the gradient of its output. An op that is given one to write fills q.
typedef struct {
    floatX* v;
    struct Fp8Copy* q;  // v in 8 bits (fp8/operand.h); NULL: none, so the matmul reads v
} Operand;

// A linear layer: w [OC, IC], b [OC] or NULL.
typedef struct {
    floatX* w;
    floatX* b;
} Linear;

// A layernorm: w and b [C]. The forward pass reads w in full precision (see ops/cast_to_fp32.h for the reason).
typedef struct {
    floatX *w, *b;
    const real* w_fp32;
} LayerNorm;

// The gradients of a linear layer. Parameter gradients are kept in full precision because they are sums over all
// tokens of a step. Reading and writing them costs little compared with the matmuls that compute them.
typedef struct {
    real* w;
    real* b;
} LinearGrads;

// The gradient of a bias and how to write it.
typedef struct {
    real* b;  // NULL: not wanted
    Mode mode;
} BiasGrad;

// The tensor tables bind Linear and LinearGrads, LayerNorm and LayerNormGrads with the same field offsets, so both of a
// pair have the same size.
typedef struct {
    real *w, *b;
    const void* unused;
} LayerNormGrads;
static_assert(sizeof(LayerNorm) == sizeof(LayerNormGrads) && sizeof(Linear) == sizeof(LinearGrads),
              "one table for both");

// Per-row statistics that layernorm keeps for its backward pass: [N] each.
typedef struct {
    real* mean;
    real* rstd;  // 1 / sqrt(variance + eps)
} LayerNormStats;

// The last argument of every op. Zero-initialise it, then call context_init().
typedef struct {
    int64_t step;               // set by the trainer with scope_step(); below 1: none
    Direction direction;        // set by the trainer with scope_at()
    int layer;                  // -1 outside the blocks
    struct Observer* observer;  // of the launchers' scopes (scope.h); NULL in a plain run
    void* scratch;              // used by one launch at a time; grows to the largest request of the first step
    size_t scratch_bytes;
    size_t allocated;   // by device_alloc() and for the workspace, freed blocks too; for tests
    size_t host_waits;  // calls of device_synchronize() and device_download() on the CPU, for the profiler
#ifdef __CUDACC__
    cudaStream_t stream;  // all launches of a rank go here, in order
    cublasLtHandle_t cublaslt;
    void* cublaslt_workspace;
    unsigned* arrivals;       // [DEVICE_ARRIVALS] counters, all 0 between launches (last_to_arrive)
    void* encode_tensor_map;  // the driver function, looked up on first use (hopper/tma.cuh)
    int multiprocessors;
    int capability;                    // 90 for sm_90
    size_t shared_of_block;            // the most shared memory, in bytes, that a block may ask for
    size_t shared_of_multiprocessor;   // shared memory that the blocks of a multiprocessor have together
    struct MatmulPlans* matmul_plans;  // created on first use; call matmul_plans_free() before context_free()
    int autotune;                      // 1: time cuBLASLt's candidates on first use; 0: take its first choice
    int gelu_fusion;                   // 1: forward matmuls may apply GELU in their epilogue
    int tf32;                          // 1: fp32 matmuls may round their inputs to TF32
    AttentionPath attention;           // as requested; cases that flash does not support are materialized
    int attention_told;                // 1: the message about materialized attention was printed
    struct BatchPlans* batch_plans;    // created on first use (cublaslt.cuh)
    int is_captured;                   // 1: launches are captured in a graph, and run later (graph/step_graph.h)
    uint64_t captured_algorithms;      // hash of the algorithms of the captured matmuls
    void** outgrown;                   // [outgrown_count] replaced scratch that captured launches still use
    int outgrown_count;
#endif
} Context;

// Set how the GPU's matmul algorithms are chosen. Context documents the values. The CPU has only one matmul.
static inline void device_set_matmul(Context* ctx, int autotune, int tf32) {
#ifdef __CUDACC__
    ctx->autotune = autotune, ctx->tf32 = tf32;
#else
    (void)ctx, (void)autotune, (void)tf32;
#endif
}

// Turn the timing of new matmul shapes on or off. Off, they take cuBLASLt's first choice, so a resumed run makes the
// same choices. Returns the previous setting.
static inline int device_set_autotune(Context* ctx, int on) {
#ifdef __CUDACC__
    int before = ctx->autotune;
    ctx->autotune = on;
    return before;
#else
    return (void)ctx, (void)on, 0;
#endif
}

// The CPU has only one attention path.
static inline void device_set_attention(Context* ctx, AttentionPath path) {
#ifdef __CUDACC__
    ctx->attention = path;
#else
    (void)ctx, (void)path;
#endif
}

// The number of threads that a launch uses. Results never depend on it.
static inline int device_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// Set the number of threads; 0 keeps the system's default.
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

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU

// Check the status that an API call returned.
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

// Select one of the machine's GPUs. Call this before context_init(), which reports a machine without GPUs.
static inline void device_choose(int number) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return;
    if (devices == 1) return;  // a launcher may make only one GPU visible to each process
    if (number >= devices)
        die(USAGE, "%d processes want a GPU each on this machine, which has %d; start at most that many", number + 1,
            devices);
    cudaCheck(cudaSetDevice(number));
}

enum { CUBLASLT_WORKSPACE_BYTES = 64 << 20, DEVICE_ARRIVALS = 8192 };

// Device memory that context_init() allocates.
static inline size_t device_workspace_bytes(void) {
    return CUBLASLT_WORKSPACE_BYTES + DEVICE_ARRIVALS * sizeof(unsigned);
}

// The GPU's properties that launchers see. LLMC_TEST_DEVICE=75, 86 or 89 shows them a GPU of that compute capability
// instead, so that the choices made for it can be tested on another GPU.
static inline void device_limits(Context* ctx, const struct cudaDeviceProp* properties) {
    ctx->capability = 10 * properties->major + properties->minor;
    ctx->shared_of_block = properties->sharedMemPerBlockOptin;
    ctx->shared_of_multiprocessor = properties->sharedMemPerMultiprocessor;
    const char* other = getenv("LLMC_TEST_DEVICE");
    if (!other || !*other) return;
    if (strcmp(other, "75") && strcmp(other, "86") && strcmp(other, "89"))
        die(USAGE, "LLMC_TEST_DEVICE is 75, 86 or 89, not '%s'", other);
    ctx->capability = 10 * (other[0] - '0') + other[1] - '0';
    ctx->shared_of_block = ctx->capability == 75 ? 64 << 10 : 99 << 10;
    ctx->shared_of_multiprocessor = ctx->capability == 75 ? 64 << 10 : 100 << 10;
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
    device_limits(ctx, &properties);
    ctx->gelu_fusion = 1;
    cudaCheck(cudaStreamCreateWithFlags(&ctx->stream, cudaStreamNonBlocking));
    cublasCheck(cublasLtCreate(&ctx->cublaslt));
    cudaCheck(cudaMalloc(&ctx->cublaslt_workspace, CUBLASLT_WORKSPACE_BYTES));
    cudaCheck(cudaMalloc(&ctx->arrivals, DEVICE_ARRIVALS * sizeof *ctx->arrivals));
    cudaCheck(cudaMemsetAsync(ctx->arrivals, 0, DEVICE_ARRIVALS * sizeof *ctx->arrivals, ctx->stream));
    ctx->allocated = device_workspace_bytes();
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

// Allocate zero-filled device memory. `category` is for the error of a CPU build.
static inline void* device_alloc(Context* ctx, size_t bytes, const char* category) {
    void* p;
    (void)category;
    cudaCheck(cudaMalloc(&p, bytes ? bytes : 1));
    cudaCheck(cudaMemsetAsync(p, 0, bytes, ctx->stream));  // ordered before the uploads that follow
    ctx->allocated += bytes;
    return p;
}

static inline void device_free(void* p, size_t bytes) {
    (void)bytes;
    cudaCheck(cudaFree(p));
}

// Bytes that device_scratch() allocates for a request.
static inline size_t device_scratch_size(size_t bytes) { return round_up(bytes, (size_t)1 << 20); }

// Replace the scratch by a larger one. Captured launches have not run yet, so they keep the old one until they have.
static inline void device_replace_scratch(Context* ctx) {
    if (ctx->is_captured) {
        ctx->outgrown = (void**)xrealloc(ctx->outgrown, ((size_t)ctx->outgrown_count + 1) * sizeof *ctx->outgrown);
        ctx->outgrown[ctx->outgrown_count++] = ctx->scratch;
        return;
    }
    cudaCheck(cudaStreamSynchronize(ctx->stream));
    cudaCheck(cudaFree(ctx->scratch));
}

// Scratch of at least `bytes` for the current launch. Its contents do not survive the launch. Growing it waits for all
// earlier launches. This happens in the first step, and when a later batch is the largest so far.
static inline void* device_scratch(Context* ctx, size_t bytes) {
    if (bytes > ctx->scratch_bytes) {
        device_replace_scratch(ctx);
        ctx->scratch_bytes = device_scratch_size(bytes);
        cudaCheck(cudaMalloc(&ctx->scratch, ctx->scratch_bytes));
        // attention/dropout.cuh reads whole words of which it uses only some bits: initialize the other bits too.
        cudaCheck(cudaMemsetAsync(ctx->scratch, 0, ctx->scratch_bytes, ctx->stream));
    }
    return ctx->scratch;
}

// Copies between host and device memory, ordered after everything launched so far. A download is complete on return.
// An upload may still read the host memory after it returns. If that memory changes or is freed before the next
// device_synchronize(), use Staging (copies.h).
static inline void device_upload(Context* ctx, void* device, const void* host, size_t bytes) {
    cudaCheck(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, ctx->stream));
}

static inline void device_download(Context* ctx, void* host, const void* device, size_t bytes) {
    cudaCheck(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, ctx->stream));
    cudaCheck(cudaStreamSynchronize(ctx->stream));
}

// Wait for everything launched so far.
static inline void device_synchronize(Context* ctx) { cudaCheck(cudaStreamSynchronize(ctx->stream)); }

// Bytes that can still be allocated on the device.
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

// Allocate zero-filled memory, page-aligned; an error names `category`. Large blocks request huge pages, which saves
// TLB misses in the matmuls.
static inline void* device_alloc(Context* ctx, size_t bytes, const char* category) {
    size_t size = round_up(bytes ? bytes : 1, 4096);
    void* p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        die(FAILED, "out of memory: %.1f MiB for %s could not be allocated; lower -b, -t or the model's size",
            (double)bytes / 1048576, category);
    if (size >= (size_t)4 << 20) madvise(p, size, MADV_HUGEPAGE);
    ctx->allocated += bytes;
    return p;
}

static inline void device_free(void* p, size_t bytes) {
    if (p) munmap(p, round_up(bytes ? bytes : 1, 4096));
}

// Bytes that context_init() allocates, and those that device_scratch() allocates for a request.
static inline size_t device_workspace_bytes(void) { return 0; }
static inline size_t device_scratch_size(size_t bytes) { return round_up(bytes, 4096); }

// Scratch of at least `bytes` for the current launch. Its contents do not survive the launch.
static inline void* device_scratch(Context* ctx, size_t bytes) {
    if (bytes > ctx->scratch_bytes) {
        free(ctx->scratch);
        size_t size = device_scratch_size(bytes), align = size < (size_t)4 << 20 ? 4096 : (size_t)2 << 20;
        ctx->scratch = aligned_alloc(align, round_up(size, align));
        if (!ctx->scratch) die(FAILED, "out of memory: %zu bytes of scratch could not be allocated", bytes);
        if (align > 4096) madvise(ctx->scratch, size, MADV_HUGEPAGE);  // fewer misses of the TLB
        ctx->scratch_bytes = device_scratch_size(bytes);
    }
    return ctx->scratch;
}

static inline void context_free(Context* ctx) {
    free(ctx->scratch);
    ctx->scratch = NULL;
    ctx->scratch_bytes = 0;
}

// Copies between host and device memory.
static inline void device_upload(Context* ctx, void* device, const void* host, size_t bytes) {
    (void)ctx;
    memcpy(device, host, bytes);
}

static inline void device_download(Context* ctx, void* host, const void* device, size_t bytes) {
    ctx->host_waits++;
    memcpy(host, device, bytes);
}

static inline void device_synchronize(Context* ctx) { ctx->host_waits++; }

// Bytes that can still be allocated on the device.
static inline size_t device_memory_available(void) { return host_memory_available(); }
#endif

#endif
