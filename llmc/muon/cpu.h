/* muon.h on the CPU: one matrix at a time. Threads share its rows and its GEMMs (ops/common/product.h). */
#ifndef LLMC_MUON_CPU_H
#define LLMC_MUON_CPU_H

#include "llmc/muon/muon.h"
#include "llmc/ops/common/product.h"

#ifndef __CUDACC__

// A sum of squares for each row.
static inline size_t muon_sums(int rows, int cols) { return (void)cols, (size_t)rows; }

// c [M, N] = a [M, K] b [K, N]. The transposes of a and b may be stored.
static inline Product muon_product(floatX* c, const floatX* a, int a_is_transposed, const floatX* b,
                                   int b_is_transposed, int M, int N, int K) {
    Product p;
    memset(&p, 0, sizeof p);
    p.M = M, p.N = N, p.K = K;
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
#endif
