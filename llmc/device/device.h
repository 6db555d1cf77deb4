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

// Type of weights, activations and gradients.
typedef real floatX;
#ifdef REAL_DOUBLE
#define FLOATX_NAME "F64"
#else
#define FLOATX_NAME "F32"  // as safetensors spells it
#endif

// How an op writes its output: over what is there, or added to it.
typedef enum { SET, ADD } Mode;
// Which keys a query may see inside its own sequence.
typedef enum { CAUSAL, FULL } Mask;
// The two GELUs in use: GPT-2's tanh form, and the erf form that BERT's "gelu" means.
typedef enum { GELU_TANH, GELU_ERF } Gelu;
// Part of a step that a launch belongs to.
typedef enum { FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, DIRECTIONS } Direction;

// The weight and bias of a linear layer (w [OC, IC], b [OC] or NULL) or of a layernorm (w [C], b [C]).
typedef struct {
    floatX* w;
    floatX* b;
} Affine;

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
} Context;

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
    int i = 0;
    while (ctx->memory[i].name && strcmp(ctx->memory[i].name, category) != 0) i++;
    CHECK(i < MEMORY_CATEGORIES);
    ctx->memory[i].name = category;
    ctx->memory[i].bytes += bytes;
    return p;
}

static inline void device_free(void* p, size_t bytes) {
    if (p) munmap(p, round_up(bytes ? bytes : 1, 4096));
}

// Scratch of at least `bytes` for the running launch; its contents do not survive the launch.
static inline void* device_scratch(Context* ctx, size_t bytes) {
    if (bytes > ctx->scratch_bytes) {
        free(ctx->scratch);
        ctx->scratch = aligned_alloc(4096, round_up(bytes, 4096));
        if (!ctx->scratch) die(FAILED, "out of memory: %zu bytes of scratch could not be allocated", bytes);
        ctx->scratch_bytes = round_up(bytes, 4096);
    }
    return ctx->scratch;
}

static inline void context_free(Context* ctx) {
    free(ctx->scratch);
    ctx->scratch = NULL;
    ctx->scratch_bytes = 0;
}

// Copies between host memory and the memory where the ops run.
static inline void device_upload(void* device, const void* host, size_t bytes) { memcpy(device, host, bytes); }
static inline void device_download(void* host, const void* device, size_t bytes) { memcpy(host, device, bytes); }

// "n" of a line "key: n kB" of /proc/meminfo, or of a cgroup file that holds one number; 0 if there is none.
static inline size_t memory_figure(const char* path, const char* key) {
    FILE* f = fopen(path, "r");
    char line[256];
    unsigned long long n = 0;
    size_t found = 0;
    while (f && !found && fgets(line, sizeof line, f)) {
        if (key && strncmp(line, key, strlen(key)) != 0) continue;
        if (sscanf(line + (key ? strlen(key) : 0), "%llu", &n) == 1) found = (size_t)n * (key ? 1024 : 1);
        if (!key) break;
    }
    if (f) fclose(f);
    return found;
}

// Bytes that can still be allocated where the ops run: what the kernel calls available, less where the
// container (cgroup 2) or a ulimit allows less.
static inline size_t device_memory_available(void) {
    size_t available = memory_figure("/proc/meminfo", "MemAvailable:");
    if (!available) available = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    size_t limit = memory_figure("/sys/fs/cgroup/memory.max", NULL);
    size_t used = memory_figure("/sys/fs/cgroup/memory.current", NULL);
    if (limit) available = min_size(available, limit > used ? limit - used : 0);
    struct rlimit address_space;
    if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY)
        available = min_size(available, (size_t)address_space.rlim_cur);
    return available;
}

#endif
