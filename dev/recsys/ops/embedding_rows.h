/* The backward pass of embedding lookups with the optimizer fused in: no gradient of a table is ever stored.
 *
 *   segments   sort the lookups by row: source [N] lists their positions, stable, rows ascending; begin [rows + 1] says
 *              where each row's lookups start
 *   sgd        w[r] -= lr * sum over the lookups n of row r of dx[n]              rows without a lookup are not read
 *   adam       g = the same sum, 0 without a lookup; then for all rows of the table, or with LAZY for those with one:
 *              m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
 *              w -= step_size m / (root_scale sqrt(v) + eps)                       (llmc/ops/common/adam.h)
 *
 * Shapes: index [N] row numbers; dx: rows of E elements, row n at dx + n * stride; w, m, v [rows, E]; step [1]. dtypes:
 * dx floatX; w, m, v real. On the GPU w is the fp32 master, and `copy`, the floatX weights that the forward pass reads,
 * gets w rounded to nearest. On the CPU copy is w.
 * Numerics: a row's gradients are added in the order of their positions, in real: the same bits every time, for any
 * number of threads. LAZY is not Adam: rows that a step does not look up keep weights and moments.
 * step->is_taken 0: nothing is updated.
 * Source: the definition; fused updates as in FBGEMM's table-batched embeddings, without atomics. */
#ifndef DEV_RECSYS_OPS_EMBEDDING_ROWS_H
#define DEV_RECSYS_OPS_EMBEDDING_ROWS_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/adam.h"

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

// Whether Adam updates all rows in each step, as published, or only those that the step looks up.
typedef enum { DENSE, LAZY } AdamRows;

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

static inline void embedding_sgd_ref(real* w, const real* dx, size_t stride, RowSegments s, int E, double lr) {
    for (int r = 0; r < s.rows; r++)
        for (int e = 0; e < E; e++)
            w[(size_t)r * (size_t)E + (size_t)e] -= (real)(lr * row_gradient_ref(dx, stride, s, r, e));
}

// Adam's settings for the reference: the number of the update, from 1, and the rows that it updates.
typedef struct {
    OptimizerSettings h;
    int64_t update;
    AdamRows rows;
} EmbeddingAdamRef;

// state: w, m and v [rows, E].
static inline void embedding_adam_ref(real* const state[3], const real* dx, size_t stride, RowSegments s, int E,
                                      EmbeddingAdamRef a) {
    double bias1 = 1 - pow(a.h.beta1, (double)a.update), bias2 = 1 - pow(a.h.beta2, (double)a.update);
    for (int r = 0; r < s.rows; r++)
        for (int e = 0; e < E && (a.rows == DENSE || s.begin[r] < s.begin[r + 1]); e++) {
            size_t at = (size_t)r * (size_t)E + (size_t)e;
            double g = row_gradient_ref(dx, stride, s, r, e);
            double m = a.h.beta1 * (double)state[1][at] + (1 - a.h.beta1) * g;
            double v = a.h.beta2 * (double)state[2][at] + (1 - a.h.beta2) * g * g;
            state[0][at] -= (real)(a.h.lr * (m / bias1) / (sqrt(v / bias2) + a.h.eps));
            state[1][at] = (real)m, state[2][at] = (real)v;
        }
}

#ifdef __CUDACC__
#include "dev/recsys/ops/embedding_rows.cuh"
#else

// sum [E] = the gradient of row r.
static inline void row_gradient(real* sum, RowGradients dx, RowSegments s, int r, int E) {
    memset(sum, 0, (size_t)E * sizeof *sum);
    for (int i = s.begin[r]; i < s.begin[r + 1]; i++) {
        const real* d = dx.p + (size_t)s.source[i] * dx.stride;
        for (int e = 0; e < E; e++) sum[e] += d[e];
    }
}

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

// Find the segments of N lookups.
static inline void row_segments_find(RowSegments* s, const int* index, int N, RowStarts starts, Context* ctx) {
    Scope scope = scope_open(ctx, "row_segments", 0, 8.0 * N + 4.0 * s->rows, "N=%d rows=%d", N, s->rows);
    (void)starts;
    CHECK(N <= s->capacity);
    s->N = N;
    row_segments_ref(*s, index);
    scope_close(&scope);
}

// The same, which may overlap with the launches that follow, up to row_segments_wait().
static inline void row_segments_begin(RowSegments* s, const int* index, int N, RowStarts starts, Context* ctx) {
    row_segments_find(s, index, N, starts, ctx);
}

static inline void row_segments_wait(const RowSegments* s, Context* ctx) { (void)s, (void)ctx; }

static inline void embedding_sgd(EmbeddingTable t, RowGradients dx, RowSegments s, double lr, const AdamWStep* step,
                                 Context* ctx) {
    Scope scope = scope_open(ctx, "embedding_sgd", 2.0 * s.N * t.E, EMBEDDING_SGD_BYTES(s.N, t.E), "N=%d rows=%d E=%d",
                             s.N, s.rows, t.E);
    real* sums = (real*)device_scratch(ctx, (size_t)device_threads() * (size_t)t.E * sizeof(real));
#pragma omp parallel for schedule(static)
    for (int r = 0; r < s.rows; r++) {
        real *sum = sums + (size_t)device_thread_index() * (size_t)t.E, *w = t.w + (size_t)r * (size_t)t.E;
        if (s.begin[r] == s.begin[r + 1] || !step->is_taken) continue;
        row_gradient(sum, dx, s, r, t.E);
        for (int e = 0; e < t.E; e++) w[e] -= (real)lr * sum[e];
    }
    scope_close(&scope);
}

static inline void embedding_adam(EmbeddingTable t, RowGradients dx, RowSegments s, OptimizerSettings h, AdamRows rows,
                                  const AdamWStep* step, Context* ctx) {
    Scope scope = scope_open(ctx, rows == DENSE ? "embedding_adam" : "embedding_adam_lazy", 15.0 * s.rows * t.E,
                             EMBEDDING_ADAM_BYTES(s.N, s.rows, t.E), "N=%d rows=%d E=%d", s.N, s.rows, t.E);
    AdamWCoefficients c = adamw_coefficients(h);
    real* sums = (real*)device_scratch(ctx, (size_t)device_threads() * (size_t)t.E * sizeof(real));
#pragma omp parallel for schedule(static)
    for (int r = 0; r < s.rows; r++) {
        real* sum = sums + (size_t)device_thread_index() * (size_t)t.E;
        size_t at = (size_t)r * (size_t)t.E;
        real *w = t.w + at, *m = t.m + at, *v = t.v + at;
        if (!step->is_taken || (rows == LAZY && s.begin[r] == s.begin[r + 1])) continue;
        row_gradient(sum, dx, s, r, t.E);
#pragma omp simd
        for (int e = 0; e < t.E; e++) {
            m[e] = c.beta1 * m[e] + c.beta1_rest * sum[e];
            v[e] = c.beta2 * v[e] + c.beta2_rest * (sum[e] * sum[e]);
            real root = sizeof(real) == sizeof(float) ? (real)sqrtf((float)v[e]) : (real)sqrt((double)v[e]);
            w[e] -= step->step_size * m[e] / (step->root_scale * root + c.eps);
        }
    }
    scope_close(&scope);
}
#endif
#endif
