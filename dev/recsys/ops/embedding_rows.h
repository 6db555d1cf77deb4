/* The backward pass of embedding lookups with the optimizer fused in: no gradient of a table is ever stored.
 *
 *   segments   sort the lookups by row: source [N] lists their positions, stable, rows ascending; begin [rows + 1] says
 *              where each row's lookups start
 *   sgd        w[r] -= lr * sum over the lookups n of row r of dx[n]              rows without a lookup are not read
 *   adam       g = the same sum, 0 without a lookup; then for all rows of the table:
 *              m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
 *              w -= step_size m / (root_scale sqrt(v) + eps)                       (llmc/ops/common/adam.h)
 *
 * Shapes: index [N] row numbers; dx: rows of E elements, row n at dx + n * stride; w, m, v [rows, E]; step [1]. dtypes:
 * dx floatX; w, m, v real. On the GPU w is the fp32 master, and `copy`, the floatX weights that the forward pass reads,
 * gets w rounded to nearest. On the CPU copy is w.
 * Numerics: a row's gradients are added in the order of their positions, in real (SGD on the CPU: double): the same
 * bits every time, for any number of threads.
 * step->is_taken 0: nothing is updated.
 * Source: the definition; fused updates as in FBGEMM's table-batched embeddings, without atomics. */
#ifndef DEV_RECSYS_OPS_EMBEDDING_ROWS_H
#define DEV_RECSYS_OPS_EMBEDDING_ROWS_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/adam.h"
#include "llmc/ops/embedding/sort.cuh"
#ifdef __CUDACC__
#if __has_include(<cub/device/device_radix_sort.cuh>)
#define ROWS_CUB
#include <cub/device/device_radix_sort.cuh>
#endif
#endif

typedef struct {
    int N, rows, capacity;  // N: lookups, at most `capacity`
    int* source;            // [N]
    int* begin;             // [rows + 1]
    int* key;               // [N] ascending row numbers; GPU only
    void* sort;             // memory of the sort; GPU only
#ifdef __CUDACC__
    size_t sort_bytes;
    cudaStream_t stream;  // the sort may run here, overlapped with other work
    cudaEvent_t begun, done;
#endif
} RowSegments;

// Adam needs `begin`; SGD on the GPU finds the ends of segments by their keys.
typedef enum { NO_STARTS, WITH_STARTS } RowStarts;

// Where a table's values are: w in full precision and the copy that forward passes read.
typedef struct {
    real* w;
    floatX* copy;
    real *m, *v;  // NULL for SGD
    int E;
} EmbeddingTable;

typedef struct {
    const floatX* p;
    size_t stride;
} RowGradients;

#define EMBEDDING_SGD_BYTES(N, E) ((double)(N) * (E) * (2 * sizeof(floatX) + 2 * sizeof(real)))
#define EMBEDDING_ADAM_BYTES(N, rows, E)                                                                               \
    ((double)(N) * (E) * sizeof(floatX) + (double)(rows) * (E) * (sizeof(floatX) + 6 * sizeof(real)))

// ---------------------------------------------------------------------------------------------------------
// References

static inline void row_segments_ref(RowSegments s, const int* index) {
    memset(s.begin, 0, ((size_t)s.rows + 1) * sizeof *s.begin);
    for (int n = 0; n < s.N; n++) s.begin[index[n] + 1]++;
    for (int r = 0; r < s.rows; r++) s.begin[r + 1] += s.begin[r];
    for (int n = 0; n < s.N; n++) s.source[s.begin[index[n]]++] = n;
    for (int r = s.rows; r > 0; r--) s.begin[r] = s.begin[r - 1];
    s.begin[0] = 0;
}

// The gradient of element e of row r: dx [lookups, stride] in full precision.
static inline double row_gradient_ref(const real* dx, size_t stride, RowSegments s, int r, int e) {
    double sum = 0;
    for (int i = s.begin[r]; i < s.begin[r + 1]; i++) sum += (double)dx[(size_t)s.source[i] * stride + (size_t)e];
    return sum;
}

// The CPU runs it too: a row belongs to one thread.
static inline void embedding_sgd_ref(real* w, const real* dx, size_t stride, RowSegments s, int E, double lr) {
#pragma omp parallel for schedule(static)
    for (int r = 0; r < s.rows; r++)
        for (int e = 0; e < E && s.begin[r] < s.begin[r + 1]; e++)
            w[(size_t)r * (size_t)E + (size_t)e] -= (real)(lr * row_gradient_ref(dx, stride, s, r, e));
}

// state: w, m and v [rows, E]. update: the number of the update, from 1.
static inline void embedding_adam_ref(real* const state[3], const real* dx, size_t stride, RowSegments s, int E,
                                      OptimizerSettings h, int64_t update) {
    double bias1 = 1 - pow(h.beta1, (double)update), bias2 = 1 - pow(h.beta2, (double)update);
    for (int r = 0; r < s.rows; r++)
        for (int e = 0; e < E; e++) {
            size_t at = (size_t)r * (size_t)E + (size_t)e;
            double g = row_gradient_ref(dx, stride, s, r, e);
            double m = h.beta1 * (double)state[1][at] + (1 - h.beta1) * g;
            double v = h.beta2 * (double)state[2][at] + (1 - h.beta2) * g * g;
            state[0][at] -= (real)(h.lr * (m / bias1) / (sqrt(v / bias2) + h.eps));
            state[1][at] = (real)m, state[2][at] = (real)v;
        }
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: a stable sort of the lookups by row, which may run on a stream of its own; then a warp for a row, or for the
// rows of some sorted positions

enum { ROWS_CUB_LEAST = 1 << 18 };  // segments of at least so many lookups are sorted by CUB, which is faster there

enum { ROWS_WARPS = 8, ROWS_LOADS = 4 };

static __global__ void row_segments_count_kernel(int* p, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = i;
}

// Sort N lookups by CUB. Its memory: sorted rows and sources, the numbers 0 .. capacity - 1, CUB's own. `bytes` NULL:
// sort; else only set *bytes to the size of all that.
static inline void row_segments_cub(RowSegments* s, const int* index, int N, size_t* bytes, Context* ctx) {
#ifdef ROWS_CUB
    int bits = 1, *memory = (int*)s->sort;
    size_t own = 0, capacity = round_up((size_t)s->capacity, 64);
    while (bits < 31 && (s->rows - 1) >> bits) bits++;
    s->key = memory, s->source = memory ? memory + capacity : NULL;
    int* numbers = memory ? memory + 2 * capacity : NULL;
    void* temporary = memory ? memory + 3 * capacity : NULL;
    cudaCheck(cub::DeviceRadixSort::SortPairs(NULL, own, (const unsigned*)index, (unsigned*)s->key, numbers, s->source,
                                              N, 0, bits, ctx->stream));
    if (bytes) *bytes = 3 * capacity * sizeof(int) + own;
    else
        cudaCheck(cub::DeviceRadixSort::SortPairs(temporary, own, (const unsigned*)index, (unsigned*)s->key, numbers,
                                                  s->source, N, 0, bits, ctx->stream));
#else
    (void)s, (void)index, (void)N, (void)bytes, (void)ctx;
#endif
}

static inline RowSegments row_segments_alloc(int N, int rows, Context* ctx) {
    RowSegments s = {N, rows, N, NULL, NULL, NULL, NULL};
    size_t cub = 0;
    s.begin = (int*)device_alloc(ctx, ((size_t)rows + 1) * sizeof(int), "segments");
    row_segments_cub(&s, NULL, N, &cub, ctx);
    s.sort_bytes = cub > embedding_sort_bytes(rows, N) ? cub : embedding_sort_bytes(rows, N);
    s.sort = device_alloc(ctx, s.sort_bytes, "segments");
#ifdef ROWS_CUB
    if (N >= ROWS_CUB_LEAST) {
        row_segments_count_kernel<<<blocks_for((size_t)N, 256), 256, 0, ctx->stream>>>(
            (int*)s.sort + 2 * round_up((size_t)N, 64), N);
        cudaCheck(cudaGetLastError());
    }
#endif
    int least, greatest;
    cudaCheck(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaCheck(cudaStreamCreateWithPriority(&s.stream, cudaStreamNonBlocking, greatest));
    cudaCheck(cudaEventCreateWithFlags(&s.begun, cudaEventDisableTiming));
    cudaCheck(cudaEventCreateWithFlags(&s.done, cudaEventDisableTiming));
    return s;
}

static inline void row_segments_free(RowSegments* s) {
    device_free(s->begin, ((size_t)s->rows + 1) * sizeof(int));
    device_free(s->sort, s->sort_bytes);
    cudaCheck(cudaStreamDestroy(s->stream));
    cudaCheck(cudaEventDestroy(s->begun));
    cudaCheck(cudaEventDestroy(s->done));
}

// begin[r] = the first position with a key >= r. One thread per position, and one for the end.
static __global__ void row_segments_begin_kernel(int* begin, const int* key, int N, int rows) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i > N) return;
    int after = i ? key[i - 1] : -1, up_to = i < N ? key[i] : rows;
    for (int r = after + 1; r <= up_to; r++) begin[r] = i;
}

// After all that the stream has so far: it may have written the index, or read the segments of the step before.
static inline void row_segments_begin(RowSegments* s, const int* index, int N, RowStarts starts, Context* ctx) {
    Context beside = *ctx;
    SortCounters none = {NULL, 0};
    beside.stream = s->stream;
    cudaCheck(cudaEventRecord(s->begun, ctx->stream));
    cudaCheck(cudaStreamWaitEvent(s->stream, s->begun, 0));
    Scope scope = scope_open(&beside, "row_segments", 0, 8.0 * N + (starts == WITH_STARTS ? 4.0 * s->rows : 0),
                             "N=%d rows=%d", N, s->rows);
    CHECK(N <= s->capacity);
    s->N = N;
#ifdef ROWS_CUB
    if (s->capacity >= ROWS_CUB_LEAST) {
        row_segments_cub(s, index, N, NULL, &beside);
    } else
#endif
    {
        SortedRows sorted = embedding_sort(s->sort, none, index, s->rows, N, &beside);
        s->key = sorted.index, s->source = sorted.row;
    }
    if (starts == WITH_STARTS) {
        row_segments_begin_kernel<<<blocks_for((size_t)N + 1, 256), 256, 0, s->stream>>>(s->begin, s->key, N, s->rows);
        cudaCheck(cudaGetLastError());
    }
    scope_close(&scope);
    cudaCheck(cudaEventRecord(s->done, s->stream));
}

static inline void row_segments_wait(const RowSegments* s, Context* ctx) {
    cudaCheck(cudaStreamWaitEvent(ctx->stream, s->done, 0));
}

// Four elements of a gradient.
__device__ inline Vector<floatX, 4> row_load(const floatX* p) {
    Vector<floatX, 4> x;
    if constexpr (sizeof(floatX) == 2) *(int2*)&x = *(const int2*)p;
    else *(int4*)&x = *(const int4*)p;
    return x;
}

// sum [4] += columns c .. c + 3 of the gradients of the positions begin .. end - 1, in order. The row ends where the
// key changes; loads of several gradients are in flight.
__device__ inline void row_gradient_add(float* sum, RowGradients dx, const int* source, int begin, int end, int c) {
    for (int i = begin; i < end; i += ROWS_LOADS) {
        Vector<floatX, 4> x[ROWS_LOADS];
#pragma unroll
        for (int k = 0; k < ROWS_LOADS; k++)
            x[k] = row_load(dx.p + (size_t)source[min(i + k, end - 1)] * dx.stride + c);
#pragma unroll
        for (int k = 0; k < ROWS_LOADS; k++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (i + k < end) sum[j] += to_float(x[k].v[j]);
    }
}

// Store four weights, and their rounded copy where there is one.
__device__ inline void row_store(EmbeddingTable t, size_t at, Vector<real> w) {
    store128(t.w + at, w);
    if constexpr (sizeof(floatX) < sizeof(real)) {
        Vector<floatX, 4> narrow = from_floats<floatX, 4>(w.v);
        *(int2*)(t.copy + at) = *(const int2*)&narrow;
    }
}

// WARP consecutive positions of the sorted lookups, one per lane; `before`: the key of the one before. Bits of heads
// and tails: positions at which a row begins and ends.
typedef struct {
    int key, before, source, count;
    unsigned heads, tails;
} RowChunk;

__device__ inline RowChunk row_chunk(const RowSegments& s, int first) {
    int lane = threadIdx.x % WARP, i = first + lane;
    RowChunk c;
    c.count = min(WARP, s.N - first);
    c.key = i < s.N ? s.key[i] : -1;
    c.source = i < s.N ? s.source[i] : 0;
    int outside = -1;  // the key before the chunk, in the first lane, or after it, in the last
    if (lane == 0 && first) outside = s.key[first - 1];
    if (lane == WARP - 1 && i + 1 < s.N) outside = s.key[i + 1];
    int after = __shfl_down_sync(ALL_LANES, c.key, 1);
    c.before = __shfl_up_sync(ALL_LANES, c.key, 1);
    if (lane == 0) c.before = outside;
    if (lane == WARP - 1) after = outside;
    c.heads = __ballot_sync(ALL_LANES, i < s.N && c.before != c.key);
    c.tails = __ballot_sync(ALL_LANES, i < s.N && after != c.key);
    return c;
}

// One warp per WARP positions. It updates the rows that begin there, and continues until the last of them ends; a lane
// has four adjacent columns. Gradients and weights of ROWS_LOADS positions are loaded at a time.
static __global__ void __launch_bounds__(ROWS_WARPS* WARP)
    embedding_sgd_kernel(EmbeddingTable t, RowGradients dx, RowSegments s, float lr, const AdamWStep* step) {
    int lane = threadIdx.x % WARP, begin = (blockIdx.x * ROWS_WARPS + threadIdx.x / WARP) * WARP;
    if (begin >= s.N || !step->is_taken) return;
    for (int column = 0; column < t.E; column += 4 * WARP) {
        int c = column + 4 * lane, exists = c < t.E;
        float sum[4] = {0};
        for (int first = begin; first < s.N; first += WARP) {
            RowChunk chunk = row_chunk(s, first);
            if (first == begin && !chunk.heads) return;  // all belongs to a row that began before
            int k = first == begin ? __ffs((int)chunk.heads) - 1 : 0, end = chunk.count;
            if (first > begin && chunk.tails) end = __ffs((int)chunk.tails);
            for (; k < end; k += ROWS_LOADS) {
                Vector<floatX, 4> g[ROWS_LOADS];
                Vector<real> w[ROWS_LOADS];
#pragma unroll
                for (int j = 0; j < ROWS_LOADS; j++) {
                    int source = __shfl_sync(ALL_LANES, chunk.source, min(k + j, end - 1)),
                        row = __shfl_sync(ALL_LANES, chunk.key, min(k + j, end - 1));
                    if (k + j >= end || !exists) continue;
                    g[j] = row_load(dx.p + (size_t)source * dx.stride + c);
                    if (chunk.tails >> (k + j) & 1) w[j] = load128(t.w + (size_t)row * t.E + c);
                }
#pragma unroll
                for (int j = 0; j < ROWS_LOADS; j++) {
                    int row = __shfl_sync(ALL_LANES, chunk.key, min(k + j, end - 1));
                    if (k + j >= end || !exists) continue;
#pragma unroll
                    for (int e = 0; e < 4; e++) sum[e] += to_float(g[j].v[e]);
                    if (!(chunk.tails >> (k + j) & 1)) continue;
#pragma unroll
                    for (int e = 0; e < 4; e++) w[j].v[e] = fmaf(-lr, sum[e], w[j].v[e]), sum[e] = 0;
                    row_store(t, (size_t)row * t.E + c, w[j]);
                }
            }
            if (chunk.tails >> (end - 1) & 1) break;
        }
    }
}

// Update the four elements w from `at` on, with moments m and v, by their gradient g.
__device__ inline void row_adam(const EmbeddingTable& t, size_t at, Vector<real> w, Vector<real> m, Vector<real> v,
                                const float g[4], const AdamWCoefficients& c, const AdamWStep* step) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        m.v[k] = fmaf(c.beta1, m.v[k], c.beta1_rest * g[k]);
        v.v[k] = fmaf(c.beta2_rest, g[k] * g[k], c.beta2 * v.v[k]);
        w.v[k] -= step->step_size * m.v[k] / fmaf(step->root_scale, sqrtf(v.v[k]), c.eps);
    }
    store128(t.m + at, m);
    store128(t.v + at, v);
    row_store(t, at, w);
}

// One warp per row of the table; a lane has four adjacent columns.
static __global__ void __launch_bounds__(ROWS_WARPS* WARP)
    embedding_adam_kernel(EmbeddingTable t, RowGradients dx, RowSegments s, AdamWCoefficients c,
                          const AdamWStep* step) {
    int lane = threadIdx.x % WARP, row = blockIdx.x * ROWS_WARPS + threadIdx.x / WARP;
    if (row >= s.rows || !step->is_taken) return;
    int begin = s.begin[row], end = s.begin[row + 1];
    for (int at_column = 4 * lane; at_column < t.E; at_column += 4 * WARP) {
        size_t at = (size_t)row * t.E + at_column;
        Vector<real> w = load128(t.w + at), m = load128(t.m + at), v = load128(t.v + at);
        float sum[4] = {0};
        row_gradient_add(sum, dx, s.source, begin, end, at_column);
        row_adam(t, at, w, m, v, sum, c, step);
    }
}
#else
// ---------------------------------------------------------------------------------------------------------
// CPU: a row belongs to one thread

static inline RowSegments row_segments_alloc(int N, int rows, Context* ctx) {
    RowSegments s = {N, rows, N, NULL, NULL, NULL, NULL};
    s.source = (int*)device_alloc(ctx, (size_t)N * sizeof(int), "segments");
    s.begin = (int*)device_alloc(ctx, ((size_t)rows + 1) * sizeof(int), "segments");
    return s;
}

static inline void row_segments_free(RowSegments* s) {
    device_free(s->source, (size_t)s->capacity * sizeof(int));
    device_free(s->begin, ((size_t)s->rows + 1) * sizeof(int));
}

// Find the segments of N lookups. It may overlap with the launches that follow, up to row_segments_wait().
static inline void row_segments_begin(RowSegments* s, const int* index, int N, RowStarts starts, Context* ctx) {
    Scope scope = scope_open(ctx, "row_segments", 0, 8.0 * N + 4.0 * s->rows, "N=%d rows=%d", N, s->rows);
    (void)starts;
    CHECK(N <= s->capacity);
    s->N = N;
    row_segments_ref(*s, index);
    scope_close(&scope);
}

static inline void row_segments_wait(const RowSegments* s, Context* ctx) { (void)s, (void)ctx; }
#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers of the updates

static inline void embedding_sgd(EmbeddingTable t, RowGradients dx, RowSegments s, double lr, const AdamWStep* step,
                                 Context* ctx) {
    Scope scope = scope_open(ctx, "embedding_sgd", 2.0 * s.N * t.E, EMBEDDING_SGD_BYTES(s.N, t.E), "N=%d rows=%d E=%d",
                             s.N, s.rows, t.E);
#ifdef __CUDACC__
    CHECK(t.E % 4 == 0 && dx.stride % 4 == 0);
    embedding_sgd_kernel<<<blocks_for((size_t)s.N, ROWS_WARPS * WARP), ROWS_WARPS * WARP, 0, ctx->stream>>>(
        t, dx, s, (float)lr, step);
    cudaCheck(cudaGetLastError());
#else
    if (step->is_taken) embedding_sgd_ref(t.w, dx.p, dx.stride, s, t.E, lr);
#endif
    scope_close(&scope);
}

static inline void embedding_adam(EmbeddingTable t, RowGradients dx, RowSegments s, OptimizerSettings h,
                                  const AdamWStep* step, Context* ctx) {
    Scope scope = scope_open(ctx, "embedding_adam", 15.0 * s.rows * t.E, EMBEDDING_ADAM_BYTES(s.N, s.rows, t.E),
                             "N=%d rows=%d E=%d", s.N, s.rows, t.E);
    AdamWCoefficients c = adamw_coefficients(h);
#ifdef __CUDACC__
    CHECK(t.E % 4 == 0 && dx.stride % 4 == 0);
    embedding_adam_kernel<<<blocks_for((size_t)s.rows, ROWS_WARPS), ROWS_WARPS * WARP, 0, ctx->stream>>>(t, dx, s, c,
                                                                                                         step);
    cudaCheck(cudaGetLastError());
#else
    real* sums = (real*)device_scratch(ctx, (size_t)device_threads() * (size_t)t.E * sizeof(real));
#pragma omp parallel for schedule(static)
    for (int r = 0; r < s.rows; r++) {
        real* sum = sums + (size_t)device_thread_index() * (size_t)t.E;
        size_t at = (size_t)r * (size_t)t.E;
        real *w = t.w + at, *m = t.m + at, *v = t.v + at;
        if (!step->is_taken) continue;
        memset(sum, 0, (size_t)t.E * sizeof *sum);
        for (int i = s.begin[r]; i < s.begin[r + 1]; i++)
            for (int e = 0; e < t.E; e++) sum[e] += dx.p[(size_t)s.source[i] * dx.stride + (size_t)e];
#pragma omp simd
        for (int e = 0; e < t.E; e++) {
            m[e] = c.beta1 * m[e] + c.beta1_rest * sum[e];
            v[e] = c.beta2 * v[e] + c.beta2_rest * (sum[e] * sum[e]);
            real root = sizeof(real) == sizeof(float) ? (real)sqrtf((float)v[e]) : (real)sqrt((double)v[e]);
            w[e] -= step->step_size * m[e] / (step->root_scale * root + c.eps);
        }
    }
#endif
    scope_close(&scope);
}

#endif
