/* The threads of a kernel on the CPU. A block's threads are fibers of one CPU thread. Blocks run one after the other. A
 * fiber runs until it must wait; then the next fiber that is ready runs.
 *
 * Two faults of a kernel end the program with a line that names the kernel:
 *   - a deadlock: a barrier that only a part of the block reaches
 *   - a warp function whose mask names a lane that has ended, or whose lanes call different functions
 * LLMC_TEST_ORDER=reverse runs threads and blocks from the last to the first. If a barrier is missing, the results of
 * the two orders differ. Dynamic shared memory starts as NaN.
 *
 * A thread waits in a warp function (warp_call), in a warpgroup function (group_call) or at a barrier. The last thread
 * to arrive does the work of all. */
#ifndef DEV_EMULATOR_THREADS_H
#define DEV_EMULATOR_THREADS_H

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "graph.h"

enum {
    EMULATED_THREADS = 1024,
    EMULATED_STACK = 256 << 10,
    EMULATED_SHARED = 256 << 10,
    EMULATED_BARRIERS = 16,
    EMULATED_BLOCKS = 16
};

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// The arguments of a thread to a warp or warpgroup function. The last thread to arrive calls `work`.
typedef struct EmulatedCall {
    void (*work)(struct EmulatedCall* calls, unsigned mask);
    unsigned mask;
    const void* in;
    void* out;
    int is_turned;       // ldmatrix with .trans
    const void* second;  // the right operand of mma
} EmulatedCall;

typedef struct {
    ucontext_t start;
    jmp_buf at;
    int started;
    uint3 index;
} EmulatedThread;

// The stacks of a block's threads, their places, and what they wait for. Only a cooperative launch has several blocks
// under way.
typedef struct {
    EmulatedThread thread[EMULATED_THREADS];
    EmulatedCall call[EMULATED_THREADS];
    uint64_t runnable[EMULATED_THREADS / 64];
    unsigned ended[EMULATED_THREADS / 32];    // lanes of each warp whose threads have ended, or never were
    unsigned calling[EMULATED_THREADS / 32];  // lanes of each warp that wait in a call
    int group_calling[EMULATED_THREADS / 128];
    int barrier_come[EMULATED_BARRIERS], barrier_wants[EMULATED_BARRIERS], barrier_or[EMULATED_BARRIERS][2],
        barrier_phase[EMULATED_BARRIERS];
    uint64_t at_barrier[EMULATED_BARRIERS][EMULATED_THREADS / 64];
    uint64_t at_mbarrier[EMULATED_THREADS / 64];
    int current, running;
    unsigned char* shared;  // its dynamic shared memory while another block of a cooperative launch runs
} EmulatedBlock;

static struct {
    EmulatedBlock* block[EMULATED_BLOCKS];  // made on first use
    EmulatedBlock* now;                     // the one that runs
    int threads, reverse;
    int at_grid_barrier;  // threads of the block
    void (*kernel)(const void* call);
    const void* kernel_call;
    jmp_buf scheduler;
} emulated;

// Dynamic shared memory of the block that runs. Static shared memory is one for all.
alignas(1 << 18) static unsigned char emulated_shared_memory[EMULATED_SHARED];

static inline void* emulated_shared(void) { return emulated_shared_memory; }

[[noreturn]] static inline void emulated_fault(const char* what) {
    fflush(stdout);
    fprintf(stderr, "emulator: %s; block (%u, %u, %u) of %u threads, thread %u\n", what, blockIdx.x, blockIdx.y,
            blockIdx.z, (unsigned)emulated.threads, (unsigned)emulated.now->current);
    abort();
}

static inline void emulated_wake(int thread) { emulated.now->runnable[thread / 64] |= (uint64_t)1 << (thread % 64); }

// ---------------------------------------------------------------------------------------------------------
// Fibers

static inline void emulated_main(void);

// Let thread `next` run; the current one has saved its place.
[[noreturn]] static inline void emulated_enter(int next) {
    EmulatedThread* t = &emulated.now->thread[next];
    emulated.now->current = next;
    threadIdx = t->index;
    if (t->started) _longjmp(t->at, 1);
    t->started = 1;
    setcontext(&t->start);
    abort();
}

// The next thread that can run, after the current one in the round, or before it in reverse order.
static inline int emulated_next(void) {
    int words = (emulated.threads + 63) / 64, at = emulated.now->current, step = emulated.reverse ? words - 1 : 1;
    for (int i = 0; i <= words; i++) {
        int word = (at / 64 + i * step) % words;
        uint64_t bits = emulated.now->runnable[word];
        if (i == 0 && emulated.reverse) bits &= ((uint64_t)1 << (at % 64)) - 1;
        else if (i == 0) bits &= ~(uint64_t)1 << (at % 64);
        if (bits) return 64 * word + (emulated.reverse ? 63 - __builtin_clzll(bits) : __builtin_ctzll(bits));
    }
    return -1;
}

static inline void emulated_switch(void) {
    int next = emulated_next();
    if (next < 0 && emulated.now->running > emulated.at_grid_barrier)
        emulated_fault("all threads wait: some do not reach a barrier, or a warp's function");
    if (next < 0) _longjmp(emulated.scheduler, 1);
    emulated_enter(next);
}

// Wait until emulated_wake().
__attribute__((noinline)) static void emulated_sleep(void) {
    int me = emulated.now->current;
    emulated.now->runnable[me / 64] &= ~((uint64_t)1 << (me % 64));
    if (_setjmp(emulated.now->thread[me].at) == 0) emulated_switch();
}

// ---------------------------------------------------------------------------------------------------------
// Functions of a warp and of a warpgroup

static inline void emulated_warp_call(EmulatedCall call) {
    int me = emulated.now->current, warp = me / 32, lane = me % 32;
    EmulatedCall* calls = &emulated.now->call[32 * warp];
    if (!(call.mask >> lane & 1)) emulated_fault("a warp's function whose mask does not have the calling lane");
    emulated.now->call[me] = call;
    emulated.now->calling[warp] |= 1u << lane;
    if (emulated.now->ended[warp] & call.mask) emulated_fault("a warp's function whose mask has a lane that has ended");
    if ((emulated.now->calling[warp] & call.mask) != call.mask) return emulated_sleep();
    for (int i = 0; i < 32; i++)
        if (call.mask >> i & 1 && (calls[i].work != call.work || calls[i].mask != call.mask))
            emulated_fault("lanes of a warp call different functions, or with different masks");
    call.work(calls, call.mask);
    emulated.now->calling[warp] &= ~call.mask;
    emulated.now->runnable[warp / 2] |= (uint64_t)call.mask << (warp % 2 * 32);
}

// All 128 threads of a warpgroup. `work` sees their calls, and 0 for the mask.
static inline void emulated_group_call(EmulatedCall call) {
    int me = emulated.now->current, group = me / 128;
    EmulatedCall* calls = &emulated.now->call[128 * group];
    emulated.now->call[me] = call;
    if (++emulated.now->group_calling[group] < 128) {
        emulated_sleep();
        return;
    }
    for (int i = 0; i < 128; i++)
        if (calls[i].work != call.work) emulated_fault("threads of a warpgroup call different functions");
    call.work(calls, 0);
    emulated.now->group_calling[group] = 0;
    for (int i = 0; i < 128; i++) emulated_wake(128 * group + i);
}

// ---------------------------------------------------------------------------------------------------------
// Barriers

static inline void emulated_barrier_end(int id) {
    for (int i = 0; i < (emulated.threads + 63) / 64; i++) {
        emulated.now->runnable[i] |= emulated.now->at_barrier[id][i];
        emulated.now->at_barrier[id][i] = 0;
    }
    emulated.now->barrier_come[id] = 0;
    emulated.now->barrier_phase[id] ^= 1;  // threads that wake read the `or` of their phase; none is two phases behind
}

// Wait for `threads` threads at barrier `id`; 0: for all that run. Returns whether `value` was not 0 for one of them.
static inline int emulated_barrier(int id, int threads, int value) {
    int me = emulated.now->current, *any = &emulated.now->barrier_or[id][emulated.now->barrier_phase[id]];
    if (!emulated.now->barrier_come[id]) emulated.now->barrier_wants[id] = threads, *any = 0;
    if (emulated.now->barrier_wants[id] != threads) emulated_fault("a barrier with different numbers of threads");
    *any |= value != 0;
    emulated.now->at_barrier[id][me / 64] |= (uint64_t)1 << (me % 64);
    if (++emulated.now->barrier_come[id] < (threads ? threads : emulated.now->running)) emulated_sleep();
    else emulated.now->runnable[me / 64] &= ~((uint64_t)1 << (me % 64)), emulated_barrier_end(id);
    return *any;
}

// ---------------------------------------------------------------------------------------------------------
// Launches

// A fiber's life: the same thread of one block after the other.
static inline void emulated_main(void) {
    for (;;) {
        emulated.kernel(emulated.kernel_call);
        emulated.now->ended[emulated.now->current / 32] |= 1u << (emulated.now->current % 32);
        emulated.now->running--;
        if (emulated.now->barrier_come[0] && !emulated.now->barrier_wants[0] &&
            emulated.now->barrier_come[0] == emulated.now->running)
            emulated_barrier_end(0);
        emulated_sleep();
    }
}

// Stacks do not end at the same place of a page, or their first lines would share few sets of the caches.
static void emulated_thread_make(EmulatedThread* t, unsigned char* stack, int i) {
    mprotect(stack, 4096, PROT_NONE);
    getcontext(&t->start);
    t->start.uc_stack.ss_sp = stack + 4096;
    t->start.uc_stack.ss_size = (size_t)(EMULATED_STACK - 4096 - i * 576 % 32768);
    makecontext(&t->start, emulated_main, 0);
}

// The state of block `k`; k is 0 unless several blocks are running.
static inline EmulatedBlock* emulated_block_memory(int k) {
    if (emulated.block[k]) return emulated.block[k];
    size_t bytes = (size_t)EMULATED_THREADS * EMULATED_STACK;
    void* stacks = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EmulatedBlock* b = (EmulatedBlock*)calloc(1, sizeof *b);
    if (!b || stacks == MAP_FAILED) emulated_fault("no memory for the stacks of a block");
    for (int i = 0; i < EMULATED_THREADS; i++)
        emulated_thread_make(&b->thread[i], (unsigned char*)stacks + (size_t)i * EMULATED_STACK, i);
    return emulated.block[k] = b;
}

// Run a block's threads until all have ended or wait for other blocks.
__attribute__((noinline)) static void emulated_resume(unsigned block) {
    blockIdx.x = block % gridDim.x, blockIdx.y = block / gridDim.x % gridDim.y;
    blockIdx.z = block / gridDim.x / gridDim.y;
    if (_setjmp(emulated.scheduler) == 0) emulated_switch();
}

// All threads that have not ended can run.
static inline void emulated_wake_all(void) {
    emulated.now->running = 0;
    for (int i = 0; i < emulated.threads; i++) {
        if (emulated.now->ended[i / 32] >> (i % 32) & 1) continue;
        emulated.now->running++;
        emulated_wake(i);
    }
    emulated.at_grid_barrier = 0;
    emulated.now->current = emulated.reverse ? 0 : emulated.threads - 1;
}

static inline void emulated_begin(int k, size_t shared) {
    emulated.now = emulated_block_memory(k);
    memset(emulated_shared(), 0xff, shared);
    memset(emulated.now->ended, 0xff, sizeof emulated.now->ended);
    for (int i = 0; i < emulated.threads; i++) {
        EmulatedThread* t = &emulated.now->thread[i];
        emulated.now->ended[i / 32] &= ~(1u << (i % 32));
        t->index.x = (unsigned)i % blockDim.x;
        t->index.y = (unsigned)i / blockDim.x % blockDim.y;
        t->index.z = (unsigned)i / blockDim.x / blockDim.y;
    }
}

template <typename Kernel>
static inline void emulated_configure(dim3 grid, dim3 block, size_t shared, const Kernel& kernel) {
    const char* order = getenv("LLMC_TEST_ORDER");
    gridDim = grid, blockDim = block;
    emulated.threads = (int)(block.x * block.y * block.z);
    emulated.reverse = order && strcmp(order, "reverse") == 0;
    if (emulated.threads < 1 || emulated.threads > EMULATED_THREADS || shared > EMULATED_SHARED)
        emulated_fault("a launch with more threads or shared memory than a block has");
    emulated.kernel = [](const void* call) { (*(const Kernel*)call)(); };
    emulated.kernel_call = &kernel;
}

// The launch configuration: the arguments between <<< and >>>.
struct EmulatedGrid {
    dim3 grid, block;
    size_t shared;
    EmulatedGrid(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t = NULL)
        : grid(grid), block(block), shared(shared) {}
};

template <typename Kernel> static inline void emulated_launch_now(const EmulatedGrid& g, const Kernel& kernel) {
    emulated_configure(g.grid, g.block, g.shared, kernel);
    unsigned blocks = g.grid.x * g.grid.y * g.grid.z;
    for (unsigned i = 0; i < blocks; i++) {
        emulated_begin(0, g.shared);
        emulated_wake_all();
        emulated_resume(emulated.reverse ? blocks - 1 - i : i);
    }
}

template <typename T> struct EmulatedExactly { typedef T type; };

template <typename... P>
static inline void emulated_launch(const EmulatedGrid& grid, void (*kernel)(P...),
                                   typename EmulatedExactly<P>::type... arguments) {
    emulated_do(EMULATED_KERNEL, [=] { emulated_launch_now(grid, [&] { kernel(arguments...); }); });
}

// Blocks that can wait for each other (emulated_grid_sync): each runs to the next such place in turn, with its own
// stacks and dynamic shared memory. Static shared memory does not outlive a wait.
template <typename Kernel>
static inline void emulated_launch_all_now(const EmulatedGrid& g, int blocks, const Kernel& kernel) {
    size_t shared = g.shared;
    int under_way = 0;
    emulated_configure(g.grid, g.block, shared, kernel);
    for (int round = 0; round == 0 || under_way; round++) {
        under_way = 0;
        for (int i = 0; i < blocks; i++) {
            if (round == 0) emulated_begin(i, shared);
            EmulatedBlock* b = emulated.block[i];
            emulated.now = b;
            if (round == 0) b->shared = (unsigned char*)malloc(shared + 1);
            else memcpy(emulated_shared(), b->shared, shared);
            emulated_wake_all();
            emulated_resume((unsigned)i);
            memcpy(b->shared, emulated_shared(), shared);
            under_way += emulated.now->running > 0;
        }
        if (under_way && under_way != blocks) emulated_fault("a part of the grid's blocks waits for all");
    }
    for (int i = 0; i < blocks; i++) free(emulated.block[i]->shared);
}

template <typename Argument>
static inline cudaError_t emulated_launch_cooperative(void (*kernel)(Argument), dim3 grid, dim3 block, void** arguments,
                                                      size_t shared, cudaStream_t) {
    EmulatedGrid g(grid, block, shared);
    Argument argument = *(Argument*)arguments[0];
    int blocks = (int)(grid.x * grid.y * grid.z);
    if (blocks > EMULATED_BLOCKS) return cudaErrorCooperativeLaunchTooLarge;
    emulated_do(EMULATED_COOPERATIVE, [=] { emulated_launch_all_now(g, blocks, [&] { kernel(argument); }); });
    return cudaSuccess;
}

// cudaLaunchKernelEx(), but for clusters of blocks.
template <typename... P>
static inline cudaError_t emulated_launch_ex(const cudaLaunchConfig_t* c, void (*kernel)(P...),
                                             typename EmulatedExactly<P>::type... arguments) {
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == cudaLaunchAttributeClusterDimension) return cudaErrorNotSupported;
    emulated_launch(EmulatedGrid(c->gridDim, c->blockDim, c->dynamicSmemBytes), kernel, arguments...);
    return cudaSuccess;
}

static inline void emulated_grid_sync(void) {
    emulated.at_grid_barrier++;
    emulated_sleep();
}

#endif
