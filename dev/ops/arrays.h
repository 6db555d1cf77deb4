/* Memory of the harness's cases: blocks with canaries, and arrays that lie on the host and on the device.
 *
 * On the GPU an array is three buffers: `host` for references, `device` (floatX) and `device_real` for launchers.
 * input, output and array_restore fill all three with the same numbers, rounded to floatX; comparisons and copy_of
 * download whichever device buffer a launcher changed. A case that writes `host` itself calls array_upload before
 * a launcher reads it; one that reads `host` itself calls array_download after the launcher. On the CPU all three
 * are the same memory and both calls do nothing. */
#ifndef DEV_OPS_ARRAYS_H
#define DEV_OPS_ARRAYS_H

#include <float.h>

#include "llmc/base/rng.h"
#include "llmc/device/device.h"

#define CANARY_BYTES 256
#define CANARY_VALUE 0xC5
#define INPUT_PERIOD 1048573  // a prime: rows of no width repeat

#ifdef __CUDACC__
enum { HAS_DEVICE_MEMORY = 1 };
#else
enum { HAS_DEVICE_MEMORY = 0 };
#endif

// A buffer of the case. On the CPU all pointers but `initial` are the same memory.
typedef struct {
    real* host;
    floatX* device;     // for the launchers: weights, activations, gradients
    real* device_real;  // for the launchers: what stays in full precision (statistics, losses, moments)
    real* initial;      // host copy of what it held at first
    size_t n;
    real* want;  // of an op's output (op.h): what the reference makes of it
    real*
        magnitude;  // the sums of absolute values that its error is relative to; NULL: 1, or its own if that is larger
    double slack;   // added to its tolerance
#ifdef __CUDACC__
    floatX* seen;  // host copies of what the device buffers held at the last transfer
    real* seen_real;
    int* rounded;  // source of the numbers in `host`: 1: floatX buffer, 0: real one, 2: no launcher wrote either
#endif
} Array;

// Where a block lies: ordinary memory, host memory that kernels can read too, or device memory.
typedef enum { ON_HOST, ON_BOTH, ON_DEVICE } Place;

typedef struct Block {
    struct Block* next;
    Place place;
    unsigned char* memory;
    size_t bytes;  // in use; the canary follows
} Block;

typedef struct {
    Context ctx;
    const char* op;  // the row of the table that runs
    Block* blocks;   // memory of the running case
    char name[160];  // of the running case
    uint64_t key, drawn;
    int comparisons, bad;  // of the running case
    double worst, worst_tolerance;
    int passed, failed;
    int is_quick;        // large cases are left out
    double spread;       // of the last bench_seconds: (slowest quarter - fastest quarter) / median
    double ceiling_gbs;  // measured ceilings of this machine; 0: not known
    double ceiling_tflops;
    void* flush;  // GPU: what is read between timed runs, so that they find no operand in the L2
} Harness;

// ---------------------------------------------------------------------------------------------------------
// Memory of a case

// Whether a block comes from aligned_alloc(); then it has a canary before its first byte too.
static inline int block_is_plain(Place place) { return place == ON_HOST || !HAS_DEVICE_MEMORY; }

// Zero-filled memory with a canary behind its last byte.
static inline void* case_block(Harness* h, size_t bytes, Place place) {
    Block* block = (Block*)xmalloc(sizeof *block);
    size_t before = block_is_plain(place) ? CANARY_BYTES : 0;
    block->bytes = bytes;
    block->place = place;
    block->next = h->blocks;
    h->blocks = block;
#ifdef __CUDACC__
    if (place == ON_DEVICE) {
        cudaCheck(cudaMalloc(&block->memory, bytes + CANARY_BYTES));
        cudaCheck(cudaMemset(block->memory, 0, bytes));
        cudaCheck(cudaMemset(block->memory + bytes, CANARY_VALUE, CANARY_BYTES));
        cudaCheck(cudaDeviceSynchronize());
        return block->memory;
    }
    if (place == ON_BOTH) cudaCheck(cudaMallocHost(&block->memory, bytes + CANARY_BYTES));
    else
#endif
        block->memory = (unsigned char*)aligned_alloc(64, round_up(before + bytes + CANARY_BYTES, 64));
    if (!block->memory) die(FAILED, "out of memory: %zu bytes for %s", bytes, h->name);
    memset(block->memory, CANARY_VALUE, before);
    block->memory += before;
    memset(block->memory, 0, bytes);
    memset(block->memory + bytes, CANARY_VALUE, CANARY_BYTES);
    return block->memory;
}

// For the case itself and its references; launchers must not be given it.
static inline void* case_memory(Harness* h, size_t bytes) { return case_block(h, bytes, ON_HOST); }

// A copy on the device: kernels that read it often would wait for pinned memory.
static inline void* resident(Harness* h, const void* data, size_t bytes) {
    void* copy = case_block(h, bytes, ON_DEVICE);
    device_upload(&h->ctx, copy, data, bytes);
    device_synchronize(&h->ctx);
    return copy;
}

static inline real* resident_real(Harness* h, real value) { return (real*)resident(h, &value, sizeof value); }

// For what both the case and launchers read (indices, spans): the same pointer serves both.
static inline void* pinned_memory(Harness* h, size_t bytes) { return case_block(h, bytes, ON_BOTH); }

static inline int canary_hurt(const Block* block) {
    unsigned char copy[CANARY_BYTES];
    int hurt = 0;
#ifdef __CUDACC__
    if (block->place == ON_DEVICE)
        cudaCheck(cudaMemcpy(copy, block->memory + block->bytes, CANARY_BYTES, cudaMemcpyDeviceToHost));
    else
#endif
        memcpy(copy, block->memory + block->bytes, CANARY_BYTES);
    for (size_t i = 0; i < CANARY_BYTES; i++) hurt |= copy[i] != CANARY_VALUE;
    for (size_t i = 1; i <= CANARY_BYTES && block_is_plain(block->place); i++)
        hurt |= *(block->memory - i) != CANARY_VALUE;
    return hurt;
}

// Free the case's memory. Returns the number of buffers around which something was written.
static inline int case_free(Harness* h) {
    int overrun = 0;
    device_synchronize(&h->ctx);
    while (h->blocks) {
        Block* block = h->blocks;
        overrun += canary_hurt(block);
        h->blocks = block->next;
#ifdef __CUDACC__
        if (block->place == ON_DEVICE) cudaCheck(cudaFree(block->memory));
        if (block->place == ON_BOTH) cudaCheck(cudaFreeHost(block->memory));
#endif
        if (block_is_plain(block->place)) free(block->memory - CANARY_BYTES);
        free(block);
    }
    return overrun;
}

#ifdef __CUDACC__

// To the nearest number that floatX can hold; NaN keeps its bits.
static inline real round_to_floatX(real x) { return x == x ? (real)(float)(floatX)(float)x : x; }

// Everything in `host`, unrounded where a launcher reads device_real: for what stays in full precision.
static inline void array_upload_real(Array a) {
    if (!a.n) return;
    for (size_t i = 0; i < a.n; i++) {
        a.seen[i] = (floatX)(float)a.host[i];
        a.seen_real[i] = a.host[i];
        if (a.host[i] != a.host[i]) memset((void*)&a.seen[i], 0xff, sizeof(floatX));
    }
    cudaCheck(cudaDeviceSynchronize());  // no launch is still at work on the array
    cudaCheck(cudaMemcpy(a.device, a.seen, a.n * sizeof(floatX), cudaMemcpyHostToDevice));
    cudaCheck(cudaMemcpy(a.device_real, a.seen_real, a.n * sizeof(real), cudaMemcpyHostToDevice));
    cudaCheck(cudaDeviceSynchronize());  // cudaMemcpy may return before its last bytes arrived
    *a.rounded = 2;
}

// Round `host` to floatX and hand it to the device.
static inline void array_upload(Array a) {
    for (size_t i = 0; i < a.n; i++) a.host[i] = round_to_floatX(a.host[i]);
    array_upload_real(a);
}

// Bring into `host` what a launcher changed since the last transfer, in either of the buffers.
static inline void array_download(Array a) {
    if (!a.n) return;
    size_t bytes = a.n * sizeof(floatX), bytes_real = a.n * sizeof(real);
    floatX* now = (floatX*)xmalloc(bytes);
    real* now_real = (real*)xmalloc(bytes_real);
    cudaCheck(cudaDeviceSynchronize());
    cudaCheck(cudaMemcpy(now, a.device, bytes, cudaMemcpyDeviceToHost));
    cudaCheck(cudaMemcpy(now_real, a.device_real, bytes_real, cudaMemcpyDeviceToHost));
    int changed = memcmp(now, a.seen, bytes) != 0, changed_real = memcmp(now_real, a.seen_real, bytes_real) != 0;
    if (changed && changed_real) die(FAILED, "a case wrote an array both as floatX and as real");
    for (size_t i = 0; i < a.n && changed; i++)
        if (memcmp(&now[i], &a.seen[i], sizeof(floatX)) != 0) a.host[i] = (real)(float)now[i];
    for (size_t i = 0; i < a.n && changed_real; i++)
        if (memcmp(&now_real[i], &a.seen_real[i], sizeof(real)) != 0) a.host[i] = now_real[i];
    if (changed || changed_real) *a.rounded = changed;
    memcpy(a.seen, now, bytes);
    memcpy(a.seen_real, now_real, bytes_real);
    free(now);
    free(now_real);
}

// What storing a result in floatX adds to its error, relative to the result: half a unit in the last place, which is
// 2^-8 for the 8 significant bits of bf16 and 2^-11 for the 11 of fp16. Nothing where it was stored in real.
static inline double array_rounding(Array a) {
    if (!*a.rounded || sizeof(floatX) == sizeof(real)) return 0;
#ifdef PRECISION_FP16
    return 1.0 / 2048;
#else
    return 1.0 / 256;
#endif
}

// Numbers smaller than this are rounded as coarsely as it is.
static inline double array_smallest(Array a) {
#ifdef PRECISION_FP16
    return *a.rounded ? 1.0 / 16384 : 0;
#else
    return *a.rounded ? FLT_MIN : 0;
#endif
}

// The bits that `want` has in the type in which the array was stored.
static inline real array_stored(Array a, real want) { return *a.rounded == 1 ? round_to_floatX(want) : want; }

#else

static inline void array_upload(Array a) { (void)a; }
static inline void array_upload_real(Array a) { (void)a; }
static inline void array_download(Array a) { (void)a; }

static inline double array_rounding(Array a) {
    (void)a;
    return 0;
}

static inline double array_smallest(Array a) {
    (void)a;
    return 0;
}

static inline real array_stored(Array a, real want) {
    (void)a;
    return want;
}

#endif

// Forget what a launcher wrote: the buffer is again as it was made.
static inline void array_restore(Array a) {
    if (a.n) memcpy(a.host, a.initial, a.n * sizeof(real));
    array_upload_real(a);
}

// Zeros, for launchers of full precision.
static inline void array_clear(Array a) {
    if (a.n) memset(a.host, 0, a.n * sizeof(real));
    array_upload_real(a);
}

// What a case has written to `host`, rounded to floatX, is what the array held at first.
static inline void array_begin(Array a) {
    array_upload(a);
    if (a.n) memcpy(a.initial, a.host, a.n * sizeof(real));
}

static inline Array array_make(Harness* h, size_t n) {
    Array a;
    a.host = (real*)case_memory(h, n * sizeof(real));
    a.initial = (real*)case_memory(h, n * sizeof(real));
    a.n = n, a.want = a.magnitude = NULL, a.slack = 0;
#ifdef __CUDACC__
    a.device = (floatX*)case_block(h, n * sizeof(floatX), ON_DEVICE);
    a.device_real = (real*)case_block(h, n * sizeof(real), ON_DEVICE);
    a.seen = (floatX*)case_memory(h, n * sizeof(floatX));
    a.seen_real = (real*)case_memory(h, n * sizeof(real));
    a.rounded = (int*)case_memory(h, sizeof(int));
#else
    a.device = (floatX*)a.host;
    a.device_real = a.host;
#endif
    return a;
}

// Normal random numbers with standard deviation `scale`; large arrays, which only a bench has, repeat them.
static inline Array input(Harness* h, size_t n, double scale) {
    Array a = array_make(h, n);
    for (size_t i = 0; i < n; i++)
        a.initial[i] = i < INPUT_PERIOD ? (real)(scale * rng_normal(h->key, h->drawn++)) : a.initial[i - INPUT_PERIOD];
#ifdef __CUDACC__
    for (size_t i = 0; i < n; i++) a.initial[i] = round_to_floatX(a.initial[i]);
#endif
    array_restore(a);
    return a;
}

// For an output: NaN where the op has to write everything (SET), numbers where it adds to them (ADD).
static inline Array output(Harness* h, size_t n, Mode mode) {
    if (mode == ADD) return input(h, n, 1.0);
    Array a = array_make(h, n);
    memset(a.initial, 0xff, n * sizeof(real));
    array_restore(a);
    return a;
}

// A host copy of what the array holds now, for a reference to write to.
static inline real* copy_of(Harness* h, Array a) {
    real* copy = (real*)case_memory(h, a.n * sizeof(real));
    array_download(a);
    if (a.n) memcpy(copy, a.host, a.n * sizeof(real));
    return copy;
}

// The absolute values of n numbers, and of what an array holds.
static inline real* absolute_of(Harness* h, const real* x, size_t n) {
    real* a = (real*)case_memory(h, n * sizeof *a);
    for (size_t i = 0; i < n; i++) a[i] = (real)fabs((double)x[i]);
    return a;
}

static inline real* array_absolute(Harness* h, Array a) {
    array_download(a);
    return absolute_of(h, a.host, a.n);
}

static inline int* int_array(Harness* h, size_t n) { return (int*)pinned_memory(h, n * sizeof(int)); }

// For a bench: a copy that a launcher reads at full speed (pinned memory is read over the bus), but the host may not.
static inline int* resident_ints(Harness* h, const int* ints, size_t n) {
    return (int*)resident(h, ints, n * sizeof *ints);
}

// A number in 0 .. n - 1.
static inline int random_below(Harness* h, int n) {
    return (int)(rng_uniform(philox((uint32_t)h->drawn++, 0, 1, 0, h->key).v[0]) * n);
}

// Sequences of the given lengths, as if `first` sequences of the step lay before them.
static inline Sequences sequences_of(Harness* h, const int* lengths, int count, int first) {
    Sequences s;
    int* cu_seqlens = int_array(h, (size_t)count + 1);
    memset(&s, 0, sizeof s);
    s.count = count;
    s.first = first;
    for (int i = 0; i < count; i++) {
        s.rows += lengths[i];
        s.sum_sq_len += (int64_t)lengths[i] * lengths[i];
        s.max_length = max_int(s.max_length, lengths[i]);
        cu_seqlens[i + 1] = s.rows;
    }
    int* sequence = int_array(h, (size_t)s.rows);
    int* position = int_array(h, (size_t)s.rows);
    for (int i = 0; i < count; i++)
        for (int t = 0; t < lengths[i]; t++) {
            sequence[cu_seqlens[i] + t] = i;
            position[cu_seqlens[i] + t] = t;
        }
    s.cu_seqlens = s.host_cu_seqlens = cu_seqlens;
    s.sequence = sequence;
    s.position = position;
    return s;
}

// N rows in `count` sequences, of which every other one is about three times as long as its neighbour.
static inline Sequences sequences_split(Harness* h, int N, int count, int first) {
    int *lengths = int_array(h, (size_t)count), more = N / count / 2;
    for (int i = 0; i < count; i++) {
        lengths[i] = (int)((int64_t)N * (i + 1) / count - (int64_t)N * i / count);
        if (i % 2 == 1) lengths[i - 1] += more, lengths[i] -= more;
    }
    return sequences_of(h, lengths, count, first);
}

// The same in device memory, for a bench.
static inline Sequences resident_sequences(Harness* h, Sequences s) {
    s.cu_seqlens = resident_ints(h, s.cu_seqlens, (size_t)s.count + 1);
    s.sequence = resident_ints(h, s.sequence, (size_t)s.rows);
    s.position = resident_ints(h, s.position, (size_t)s.rows);
    return s;
}

#endif
