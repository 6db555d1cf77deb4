/* Muon: the update of matrices by their orthogonalized momentum, and NorMuon.
 *
 * For a matrix W [rows, cols], which is [out, in], with gradient G and momentum M:
 *
 *   G = grads * min(1, max_norm / norm) / scale                   as in AdamW (ops/adamw.h)
 *   M = mu * M + (1 - mu) * G;   U = mu * M + (1 - mu) * G        Nesterov momentum
 *   X = U / max(|U|, 1e-7)                                        Frobenius norm
 *   5 times:  A = X X^T;  B = b A + c A A;  X = a X + B X         rows > cols:  A = X^T X;  X = a X + X B
 *   O = X                                                         close to the matrix that has U's singular vectors and
 *                                                                 singular values of 1
 *   W = W * (1 - lr * weight_decay * decay) - lr * s * O          s: 0.2 sqrt(max(rows, cols)), so that updates have
 *                                                                 the RMS of AdamW's
 *
 *   NorMuon    scales O before it is added. For each index of the longer side (of rows, if both are equal):
 *              q = mean of O^2 over the shorter side;  v = 0.95 v + 0.05 q;  r = max(v, 1e-10)^-1/2
 *              O = O r |O| / max(|O r|, 1e-10)
 *   cautious   weight decay only where O and W have the same sign, or one of them is 0
 *
 *   update     params (and master), m, v [flat buffer] in place, from grads [same layout] and step [1], as for AdamW.
 *              m is the momentum. NorMuon keeps its v in the first max(rows, cols) elements of the matrix's range of v;
 *              Muon uses none of it.
 *
 * shapes     matrices of one shape (MuonGroup) are multiplied together in batched GEMMs, MUON_CHUNK elements at a time.
 *            They may be anywhere in the flat buffers. A shard never splits a matrix.
 * dtypes     params floatX; master, m, v, grads, step real; X, A, B floatX with sums in fp32.
 * numerics   |U| is summed in double, in an order that depends only on the shape. U / |U| is rounded once, to X. The
 *            iterations map singular values of 0.01 |U| and more to between 0.68 and 1.13, and 0.001 |U| to 0.47. On
 *            the GPU a GEMM's algorithm is chosen for the matrices of the whole model, so a matrix gets the same bits
 *            on any number of ranks.
 *            Without a master, params is rounded stochastically, as in AdamW.
 * NaN        If the norm is not finite, nothing is updated. A gradient of zeros gives O = 0.
 * source     Jordan et al., "Muon: an optimizer for hidden layers", 2024; s: Liu et al., arXiv 2502.16982; NorMuon: Li
 *            et al., arXiv 2510.05491; cautious weight decay: arXiv 2510.12402. */
#ifndef LLMC_MUON_MUON_H
#define LLMC_MUON_MUON_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/adam.h"
#ifndef __CUDACC__
#include "llmc/ops/common/product.h"
#endif

enum { MUON_ITERATIONS = 5 };
// The coefficients of an iteration.
#define MUON_A 3.4445
#define MUON_B (-4.7750)
#define MUON_C 2.0315
#define NORMUON_BETA2 0.95

// Elements of X in one batched GEMM. The CPU takes one matrix at a time.
#ifdef __CUDACC__
#define MUON_CHUNK ((size_t)128 << 20)
#else
#define MUON_CHUNK ((size_t)1)
#endif

// `n` matrices of rows x cols. s, l: the shorter and the longer side.
#define MUON_ORTHOGONALIZE_FLOPS(n, s, l)                                                                              \
    ((double)(n)*MUON_ITERATIONS * (4.0 * (s) * (s) * (l) + 2.0 * (s) * (s) * (s)))
#define MUON_ORTHOGONALIZE_BYTES(n, s, l)                                                                              \
    ((double)(n)*MUON_ITERATIONS * (3.0 * (s) * (l) + 4.0 * (s) * (s)) * sizeof(floatX))
// Two passes over grads and m: the first writes m, the second X.
#define MUON_MOMENTUM_FLOPS(n) (10.0 * (double)(n))
#define MUON_MOMENTUM_BYTES(n) ((double)(n) * (5.0 * sizeof(real) + sizeof(floatX)))
// Reads O and the parameters, writes the parameters. `master`: the number of full-precision copies, 0 or 1. NorMuon
// reads O twice.
#define MUON_APPLY_FLOPS(n) (4.0 * (double)(n))
#define MUON_APPLY_BYTES(n, master, is_normuon)                                                                        \
    ((double)(n) * ((3.0 - (master) + (is_normuon)) * sizeof(floatX) + 2.0 * (master) * sizeof(real)))

// A matrix in the flat buffers.
typedef struct {
    size_t offset;
    float decay;  // 1: weight decay applies, 0: it does not
} MuonMatrix;

// Matrices of one shape: number first .. first + count - 1 of a list.
typedef struct {
    int rows, cols;
    int first, count;
    int model_count;  // in the whole model; a shard has `count` of them
} MuonGroup;

// The part of a group that one launch multiplies.
typedef struct {
    const MuonMatrix* matrices;  // [count] on the device
    int rows, cols, count;
    int like;  // GEMM algorithms are chosen for this many matrices
} MuonChunk;

// Buffers of a chunk, reused by all chunks.
typedef struct {
    floatX *x, *y;  // [count, rows, cols]
    floatX *a, *b;  // [count, s, s]
    double* sums;   // [count, muon_sums()] of squares
    real* r;        // [count, l] NorMuon's
} MuonSpace;

// All matrices of the model or of a shard.
typedef struct {
    const MuonMatrix* matrices;  // on the device
    const MuonGroup* groups;     // [group_count]
    int group_count;
    MuonSpace space;
} MuonMatrices;

// The factor that turns U into X.
HOST_DEVICE static inline double muon_normalizer(double norm) { return 1 / fmax(norm, 1e-7); }

static inline double muon_scale(int rows, int cols) { return 0.2 * sqrt(max_int(rows, cols)); }

// The momentum of a step. It rises linearly from MUON_MOMENTUM_START during the first `warmup` steps; 0: constant.
#define MUON_MOMENTUM 0.95
#define MUON_MOMENTUM_START 0.85
static inline double muon_momentum_at(int64_t warmup, int64_t step) {
    const double rise = MUON_MOMENTUM - MUON_MOMENTUM_START;
    return step >= warmup ? MUON_MOMENTUM : MUON_MOMENTUM_START + rise * (double)step / (double)warmup;
}

static inline size_t muon_elements(MuonGroup g) { return (size_t)g.rows * (size_t)g.cols; }

// The number of matrices in a launch.
static inline int muon_chunk_count(MuonGroup g) {
    size_t most = min_size(MUON_CHUNK / muon_elements(g), (size_t)g.model_count);
    return most ? (int)most : 1;
}

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void muon_multiply_ref(double* c, const double* a, const double* b, int M, int N, int K) {
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < N; n++) c[m * N + n] = 0;
        for (int k = 0; k < K; k++)
            for (int n = 0; n < N; n++) c[m * N + n] += a[m * K + k] * b[k * N + n];
    }
}

// X, A and B are stored in floatX.
static inline double muon_stored_ref(double x) {
    return sizeof(floatX) < sizeof(real) ? (double)(float)(floatX)(float)x : x;
}

// x [rows, cols] after the iterations. A tall x is transposed first, so that x x^T is the smaller matrix.
static inline void muon_orthogonalize_ref(double* x, int rows, int cols) {
    int s = min_int(rows, cols), l = max_int(rows, cols), n = s * l;
    double *w = (double*)xmalloc(2 * (size_t)n * sizeof *w), *wt = w + n;
    double *a = (double*)xmalloc(3 * (size_t)(s * s) * sizeof *a), *aa = a + s * s, *b = aa + s * s;
    double* product = (double*)xmalloc((size_t)n * sizeof *product);
    for (int i = 0; i < n; i++) w[rows <= cols ? i : i % cols * rows + i / cols] = muon_stored_ref(x[i]);
    for (int k = 0; k < MUON_ITERATIONS; k++) {
        for (int i = 0; i < n; i++) wt[i % l * s + i / l] = w[i];
        muon_multiply_ref(a, w, wt, s, s, l);
        for (int i = 0; i < s * s; i++) a[i] = muon_stored_ref(a[i]);
        muon_multiply_ref(aa, a, a, s, s, s);
        for (int i = 0; i < s * s; i++) b[i] = muon_stored_ref(MUON_B * a[i] + MUON_C * aa[i]);
        muon_multiply_ref(product, b, w, s, l, s);
        for (int i = 0; i < n; i++) w[i] = muon_stored_ref(MUON_A * w[i] + product[i]);
    }
    for (int i = 0; i < n; i++) x[i] = w[rows <= cols ? i : i % cols * rows + i / cols];
    free(w), free(a), free(product);
}

// NorMuon's scaling of o, with its state v [max(rows, cols)].
static inline void muon_normalize_ref(double* o, real* v, int rows, int cols) {
    int s = min_int(rows, cols), l = max_int(rows, cols), n = rows * cols;
    double *r = (double*)xcalloc((size_t)l, sizeof *r), norm = 0, norm_r = 0;
    for (int i = 0; i < n; i++) r[rows >= cols ? i / cols : i % cols] += o[i] * o[i] / s;
    for (int i = 0; i < l; i++) {
        v[i] = (real)(NORMUON_BETA2 * v[i] + (1 - NORMUON_BETA2) * r[i]);
        r[i] = 1 / sqrt(fmax((double)v[i], 1e-10));
    }
    for (int i = 0; i < n; i++) {
        norm += o[i] * o[i];
        o[i] *= r[rows >= cols ? i / cols : i % cols];
        norm_r += o[i] * o[i];
    }
    for (int i = 0; i < n; i++) o[i] *= sqrt(norm) / fmax(sqrt(norm_r), 1e-10);
    free(r);
}

// `matrices` [g.count]: those of group g.
static inline void muon_update_ref(AdamWRefState a, double norm, double scale, const MuonMatrix* matrices, MuonGroup g,
                                   OptimizerSettings h) {
    size_t n = muon_elements(g);
    double *o = (double*)xmalloc(n * sizeof *o), mu = h.muon.momentum, s = muon_scale(g.rows, g.cols);
    double clip = h.max_norm > 0 && norm > h.max_norm ? h.max_norm / norm : 1;
    for (int k = 0; k < g.count && isfinite(norm); k++) {
        real *p = a.params + matrices[k].offset, *m = a.m + matrices[k].offset;
        const real* grads = a.grads + matrices[k].offset;
        double sum = 0;
        for (size_t i = 0; i < n; i++) {
            double gradient = clip * grads[i] / scale, mi = mu * m[i] + (1 - mu) * gradient;
            o[i] = mu * mi + (1 - mu) * gradient;
            m[i] = (real)mi;
            sum += o[i] * o[i];
        }
        for (size_t i = 0; i < n; i++) o[i] *= muon_normalizer(sqrt(sum));
        muon_orthogonalize_ref(o, g.rows, g.cols);
        if (h.muon.is_normuon) muon_normalize_ref(o, a.v + matrices[k].offset, g.rows, g.cols);
        for (size_t i = 0; i < n; i++) {
            int decays = !h.cautious || o[i] * p[i] >= 0;
            double kept = p[i] * (1 - h.lr * h.weight_decay * matrices[k].decay * decays);
            p[i] = (real)(kept - h.lr * s * o[i]);
        }
    }
    free(o);
}

// ---------------------------------------------------------------------------------------------------------
// For each device: the number of partial sums of a matrix, scratch, and the three parts of an update. muon_momentum()
// updates the momentum, and writes the normalized U to X. muon_orthogonalize() iterates from space->x, and returns the
// result, which is x or y. muon_apply() subtracts it from the parameters.

#ifdef __CUDACC__
#include "llmc/muon/kernels.cuh"
#else
// CPU: one matrix at a time. Threads share its rows and its GEMMs (ops/common/product.h).

// A sum of squares for each row.
static inline size_t muon_sums(int rows, int cols) { return (void)cols, (size_t)rows; }

// c [M, N] = a [M, K] b [K, N]. The transposes of a and b may be stored.
static inline Product muon_product(floatX* c, const floatX* a, int a_is_transposed, const floatX* b,
                                   int b_is_transposed, int M, int N, int K) {
    Product p = {.M = M, .N = N, .K = K};
    p.c = c, p.c_row = (size_t)N, p.c_col = 1;
    p.a = a, p.a_row = a_is_transposed ? 1 : (size_t)K, p.a_k = a_is_transposed ? (size_t)M : 1;
    p.b = b, p.b_k = b_is_transposed ? 1 : (size_t)N, p.b_col = b_is_transposed ? (size_t)K : 1;
    p.block_rows = product_block(M, 96, TILE_ROWS), p.block_cols = product_block(N, 256, TILE_COLS);
    p.tasks_share_b = 1;
    return p;
}

// Upper bound of the scratch of a GEMM in muon_orthogonalize().
static inline size_t muon_scratch_bytes(int rows, int cols) {
    int l = max_int(rows, cols);
    return product_scratch_bytes(l, l, min_int(l, 96) + TILE_ROWS, min_int(l, 256) + TILE_COLS, 1);
}

static inline void muon_momentum(const MuonSpace* space, AdamWState a, MuonChunk z, OptimizerSettings h, Context* ctx) {
    CHECK(z.count == 1);
    size_t cols = (size_t)z.cols, begin = z.matrices->offset, n = (size_t)z.rows * cols;
    Scope scope = scope_open(ctx, "muon_momentum", MUON_MOMENTUM_FLOPS(n), MUON_MOMENTUM_BYTES(n), "%dx[%d,%d]",
                             z.count, z.rows, z.cols);
    real mu = (real)h.muon.momentum, rest = (real)(1 - h.muon.momentum), gradient = a.step->gradient;
    double sum = 0;
#pragma omp parallel for schedule(static)
    for (int row = 0; row < z.rows; row++) {
        const real* g = a.grads + begin + (size_t)row * cols;
        real *m = a.m + begin + (size_t)row * cols, *x = space->x + (size_t)row * cols;
        space->sums[row] = 0;
        for (size_t i = 0; i < cols && a.step->is_taken; i++) {
            real more = rest * (gradient * g[i]);
            m[i] = mu * m[i] + more;
            x[i] = mu * m[i] + more;
            space->sums[row] += (double)x[i] * (double)x[i];
        }
    }
    for (int row = 0; row < z.rows; row++) sum += space->sums[row];
    real scale = (real)muon_normalizer(sqrt(sum));
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) space->x[i] = a.step->is_taken ? space->x[i] * scale : 0;
    scope_close(&scope);
}

static inline const floatX* muon_orthogonalize(const MuonSpace* space, MuonChunk z, Context* ctx) {
    CHECK(z.count == 1);
    int is_tall = z.rows > z.cols, s = min_int(z.rows, z.cols), l = max_int(z.rows, z.cols);
    Scope scope = scope_open(ctx, "muon_orthogonalize", MUON_ORTHOGONALIZE_FLOPS(z.count, s, l),
                             MUON_ORTHOGONALIZE_BYTES(z.count, s, l), "%dx[%d,%d]", z.count, z.rows, z.cols);
    floatX *x = space->x, *y = space->y, *a = space->a, *b = space->b;
    const real ka = (real)MUON_A, kb = (real)MUON_B, kc = (real)MUON_C;
    size_t n = (size_t)s * (size_t)l, square = (size_t)s * (size_t)s;
    for (int k = 0; k < MUON_ITERATIONS; k++) {
        Product gram = muon_product(a, x, is_tall, x, !is_tall, s, s, l),
                squared = muon_product(b, a, 0, a, 0, s, s, s);
        Product next = is_tall ? muon_product(y, x, 0, b, 0, l, s, s) : muon_product(y, b, 0, x, 0, s, l, s);
        product_run(&gram, ctx);
        product_run(&squared, ctx);
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < square; i++) b[i] = kb * a[i] + kc * b[i];
        product_run(&next, ctx);
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < n; i++) y[i] += ka * x[i];
        floatX* swapped = x;
        x = y, y = swapped;
    }
    scope_close(&scope);
    return x;
}

// NorMuon: r [l] from the second moments v [l], including the factor that keeps the norm of o.
static inline void muon_normuon_scales(real* r, real* v, const floatX* o, MuonChunk z) {
    size_t rows = (size_t)z.rows, cols = (size_t)z.cols;
    int l = max_int(z.rows, z.cols), s = min_int(z.rows, z.cols);
    double norm = 0, norm_r = 0;
#pragma omp parallel for schedule(static)
    for (int i = 0; i < l; i++) {
        double q = 0;
        if (z.rows >= z.cols)
            for (size_t c = 0; c < cols; c++) q += (double)o[(size_t)i * cols + c] * (double)o[(size_t)i * cols + c];
        else
            for (size_t k = 0; k < rows; k++) q += (double)o[k * cols + (size_t)i] * (double)o[k * cols + (size_t)i];
        r[i] = (real)(q / s);
    }
    for (int i = 0; i < l; i++) {
        double q = (double)r[i], vi = NORMUON_BETA2 * (double)v[i] + (1 - NORMUON_BETA2) * q;
        v[i] = (real)vi;
        r[i] = (real)(1 / sqrt(fmax(vi, 1e-10)));
        norm += q * s;
        norm_r += q * s * (double)r[i] * (double)r[i];
    }
    real factor = (real)(sqrt(norm) / fmax(sqrt(norm_r), 1e-10));
    for (int i = 0; i < l; i++) r[i] *= factor;
}

static inline void muon_apply(AdamWState a, const floatX* o, const MuonSpace* space, MuonChunk z, OptimizerSettings h,
                              Context* ctx) {
    CHECK(z.count == 1 && !a.master);
    size_t cols = (size_t)z.cols, n = (size_t)z.rows * cols;
    Scope scope = scope_open(ctx, "muon_apply", MUON_APPLY_FLOPS(n), MUON_APPLY_BYTES(n, 0, h.muon.is_normuon),
                             "%dx[%d,%d]", z.count, z.rows, z.cols);
    real lr = (real)(h.lr * muon_scale(z.rows, z.cols));
    real shrink = (real)(1 - h.lr * h.weight_decay * z.matrices->decay), unchanged = h.cautious ? 1 : shrink;
    const real* r = h.muon.is_normuon ? space->r : NULL;
    if (r && a.step->is_taken) muon_normuon_scales(space->r, a.v + z.matrices->offset, o, z);
#pragma omp parallel for schedule(static)
    for (int row = 0; row < z.rows; row++) {
        floatX* p = a.params + z.matrices->offset + (size_t)row * cols;
        for (size_t i = 0; i < cols && a.step->is_taken; i++) {
            real u = o[(size_t)row * cols + i] * (!r ? 1 : z.rows >= z.cols ? r[row] : r[i]);
            p[i] = p[i] * (u * p[i] < 0 ? unchanged : shrink) - lr * u;
        }
    }
    scope_close(&scope);
}

#endif

// ---------------------------------------------------------------------------------------------------------
// Shared by both devices

// The bytes of the buffers for these groups. If `memory` is not NULL, point `space` into it; it is aligned to 256
// bytes.
static inline size_t muon_space_bind(MuonSpace* space, void* memory, const MuonGroup* groups, int count) {
    size_t x = 0, a = 0, sums = 0, r = 0, at[7] = {0};
    for (int i = 0; i < count; i++) {
        size_t n = (size_t)muon_chunk_count(groups[i]), s = (size_t)min_int(groups[i].rows, groups[i].cols);
        x = max_size(x, n * muon_elements(groups[i]) * sizeof(floatX));
        a = max_size(a, n * s * s * sizeof(floatX));
        sums = max_size(sums, n * muon_sums(groups[i].rows, groups[i].cols) * sizeof(double));
        r = max_size(r, n * (size_t)max_int(groups[i].rows, groups[i].cols) * sizeof(real));
    }
    const size_t bytes[] = {x, x, a, a, sums, r};
    for (int i = 0; i < 6; i++) at[i + 1] = at[i] + round_up(bytes[i], 256);
    if (memory) {
        char* p = (char*)memory;
        space->x = (floatX*)(p + at[0]), space->y = (floatX*)(p + at[1]);
        space->a = (floatX*)(p + at[2]), space->b = (floatX*)(p + at[3]);
        space->sums = (double*)(p + at[4]), space->r = (real*)(p + at[5]);
    }
    return at[6];
}

// Update all matrices. h.lr: the learning rate of this step.
static inline void muon_update(AdamWState a, const MuonMatrices* m, OptimizerSettings h, Context* ctx) {
    for (int i = 0; i < m->group_count; i++) {
        MuonGroup g = m->groups[i];
        int most = muon_chunk_count(g);
        for (int k = 0; k < g.count; k += most) {
            MuonChunk chunk = {.matrices = m->matrices + g.first + k,
                               .rows = g.rows,
                               .cols = g.cols,
                               .count = min_int(most, g.count - k),
                               .like = most};
            muon_momentum(&m->space, a, chunk, h, ctx);
            const floatX* o = muon_orthogonalize(&m->space, chunk, ctx);
            muon_apply(a, o, &m->space, chunk, h, ctx);
        }
    }
}

#endif
