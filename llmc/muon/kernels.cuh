/* muon.h on the GPU: elementwise passes over the matrices of a chunk, and batched GEMMs by cuBLASLt. On Hopper
 * symmetric_hopper.cuh computes the symmetric ones.
 *
 * An elementwise pass has one row of blocks per matrix. A block takes MUON_BLOCK elements, a thread four adjacent
 * elements at a time, aligned to 16 bytes in the flat buffers. At a block's ends it skips those of others. */
#ifndef LLMC_MUON_KERNELS_CUH
#define LLMC_MUON_KERNELS_CUH

#include "llmc/device/cublaslt.cuh"

// d[i] [s, s] = alpha x[i] x[i]^T + beta d0[i] for `count` matrices: symmetric_hopper.cuh.
typedef struct {
    floatX* d;
    const floatX *x, *d0;
    int s, k, count, is_tall;
    float alpha, beta;
} SymmetricProduct;

#ifdef NO_HOPPER
static inline int muon_symmetric(SymmetricProduct z, Context* ctx) { return (void)z, (void)ctx, 0; }
#else
#include "llmc/muon/symmetric_hopper.cuh"
#endif

enum { MUON_THREADS = 256, MUON_BLOCK = 16384, MUON_COLUMNS = 32, MUON_ROWS = 8 };

// One sum of squares per block.
static inline size_t muon_sums(int rows, int cols) {
    return ((size_t)rows * (size_t)cols + MUON_BLOCK - 1) / MUON_BLOCK;
}

// cuBLASLt has its own workspace.
static inline size_t muon_scratch_bytes(int rows, int cols) { return (void)rows, (void)cols, 0; }

// This block's elements of the flat buffers, and their place in X.
typedef struct {
    size_t begin, end;
    size_t matrix, x;  // first element of the matrix in the flat buffers and in X
    float decay;
    bool is_aligned;  // four elements that are aligned in the flat buffers are aligned in X
} MuonRange;

__device__ inline MuonRange muon_range(MuonChunk z) {
    MuonMatrix m = z.matrices[blockIdx.y];
    size_t n = (size_t)z.rows * (size_t)z.cols, begin = m.offset + (size_t)blockIdx.x * MUON_BLOCK, end = m.offset + n;
    MuonRange r = {.begin = begin, .end = begin + MUON_BLOCK < end ? begin + MUON_BLOCK : end, .matrix = m.offset};
    r.x = n * blockIdx.y, r.decay = m.decay, r.is_aligned = (m.offset | n) % ADAMW_VECTOR == 0;
    return r;
}

// The first of this thread's first four elements. The next four are MUON_THREADS * ADAMW_VECTOR further.
__device__ inline size_t muon_first(MuonRange r) {
    return r.begin / ADAMW_VECTOR * ADAMW_VECTOR + ADAMW_VECTOR * threadIdx.x;
}

__device__ inline bool muon_is_whole(MuonRange r, size_t i) { return i >= r.begin && i + ADAMW_VECTOR <= r.end; }
__device__ inline bool muon_has(MuonRange r, size_t i) { return i >= r.begin && i < r.end; }

// Nesterov momentum: the new momentum from the old one, and U from the new one.
__device__ inline real muon_nesterov(real m, real more, real mu) { return fmaf(mu, m, more); }

static __global__ void __launch_bounds__(MUON_THREADS)
    muon_momentum_kernel(double* sums, AdamWState a, MuonChunk z, real mu, real rest) {
    AdamWStep step = adamw_load_step(a);
    if (!step.is_taken) return;
    MuonRange r = muon_range(z);
    real sum = 0;
#pragma unroll 2
    for (size_t i = muon_first(r); i < r.end; i += MUON_THREADS * ADAMW_VECTOR) {
        Vector<real> g = load128(a.grads + i), m = load128(a.m + i);
        bool whole = muon_is_whole(r, i);
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++) {
            real more = rest * (step.gradient * g.v[k]);
            m.v[k] = muon_nesterov(m.v[k], more, mu);
            real u = muon_nesterov(m.v[k], more, mu);
            if (!whole && !muon_has(r, i + k)) continue;
            sum = fmaf(u, u, sum);
            if (!whole) a.m[i + k] = m.v[k];
        }
        if (whole) store128(a.m + i, m);
    }
    double total = block_sum((double)sum);
    if (threadIdx.x == 0) sums[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = total;
}

// Write X from the momentum, which muon_momentum_kernel() has updated.
static __global__ void __launch_bounds__(MUON_THREADS)
    muon_normalize_kernel(floatX* x, const double* sums, AdamWState a, MuonChunk z, real mu, real rest) {
    AdamWStep step = adamw_load_step(a);
    if (!step.is_taken) return;
    MuonRange r = muon_range(z);
    double sum = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += MUON_THREADS) sum += sums[(size_t)blockIdx.y * gridDim.x + i];
    real scale = (real)muon_normalizer(sqrt(block_sum(sum)));
    floatX* to = x + r.x;
#pragma unroll 2
    for (size_t i = muon_first(r); i < r.end; i += MUON_THREADS * ADAMW_VECTOR) {
        Vector<real> g = load128_streaming(a.grads + i), m = load128(a.m + i);
        float u[ADAMW_VECTOR];
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++)
            u[k] = scale * muon_nesterov(m.v[k], rest * (step.gradient * g.v[k]), mu);
        size_t at = i - r.matrix;
        if (r.is_aligned && muon_is_whole(r, i)) {
            *(Vector<floatX, ADAMW_VECTOR>*)(to + at) = from_floats<floatX, ADAMW_VECTOR>(u);
            continue;
        }
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++)
            if (muon_has(r, i + k)) to[at + k] = from_float<floatX>(u[k]);
    }
}

static inline dim3 muon_blocks(MuonChunk z) { return dim3((unsigned)muon_sums(z.rows, z.cols), (unsigned)z.count); }

static inline void muon_momentum(const MuonSpace* space, AdamWState a, MuonChunk z, OptimizerSettings h, Context* ctx) {
    double n = (double)z.count * z.rows * z.cols;
    Scope scope = scope_open(ctx, "muon_momentum", MUON_MOMENTUM_FLOPS(n), MUON_MOMENTUM_BYTES(n), "%dx[%d,%d]",
                             z.count, z.rows, z.cols);
    real mu = (real)h.muon.momentum, rest = (real)(1 - h.muon.momentum);
    muon_momentum_kernel<<<muon_blocks(z), MUON_THREADS, 0, ctx->stream>>>(space->sums, a, z, mu, rest);
    muon_normalize_kernel<<<muon_blocks(z), MUON_THREADS, 0, ctx->stream>>>(space->x, space->sums, a, z, mu, rest);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

static inline BatchMatrix muon_operand(floatX* p, int rows, int cols, cublasOperation_t op) {
    BatchLayout layout = {.type = cublaslt_type(), .op = op, .row = cols, .next = (int64_t)rows * cols};
    BatchMatrix m = {.p = p, .layout = layout};
    return m;
}

static inline const floatX* muon_orthogonalize(const MuonSpace* space, MuonChunk z, Context* ctx) {
    int is_tall = z.rows > z.cols, s = min_int(z.rows, z.cols), l = max_int(z.rows, z.cols);
    Scope scope = scope_open(ctx, "muon_orthogonalize", MUON_ORTHOGONALIZE_FLOPS(z.count, s, l),
                             MUON_ORTHOGONALIZE_BYTES(z.count, s, l), "%dx[%d,%d]", z.count, z.rows, z.cols);
    BatchMatrix x = muon_operand(space->x, z.rows, z.cols, CUBLAS_OP_N), y = x,
                a = muon_operand(space->a, s, s, CUBLAS_OP_N);
    BatchMatrix b = a;
    BatchSize gram = {.M = s, .N = s, .K = l, .batch = z.count, .like = z.like}, square = gram, whole = gram;
    square.K = whole.K = s, whole.M = z.rows, whole.N = z.cols;
    y.p = space->y, b.p = space->b;
    for (int k = 0; k < MUON_ITERATIONS; k++) {
        BatchMatrix xt = x, next = y;
        xt.layout.op = CUBLAS_OP_T;
        SymmetricProduct xx = {.d = (floatX*)a.p, .x = (const floatX*)x.p, .d0 = NULL, .s = s, .k = l};
        SymmetricProduct aa = {.d = (floatX*)b.p, .x = (const floatX*)a.p, .d0 = (const floatX*)a.p, .s = s, .k = s};
        xx.count = aa.count = z.count, xx.is_tall = is_tall;
        xx.alpha = 1, aa.alpha = (float)MUON_C, aa.beta = (float)MUON_B;
        if (!muon_symmetric(xx, ctx)) batched_product(a, is_tall ? xt : x, is_tall ? x : xt, gram, 1, ctx);
        if (!muon_symmetric(aa, ctx)) batched_product_add(b, a, a, square, (float)MUON_C, a.p, (float)MUON_B, ctx);
        batched_product_add(next, is_tall ? x : b, is_tall ? b : x, whole, 1, x.p, (float)MUON_A, ctx);
        y = x, x = next;
    }
    scope_close(&scope);
    return (const floatX*)x.p;
}

// ---------------------------------------------------------------------------------------------------------
// NorMuon: the means of squares over the shorter side to q [count, l]

// One warp per row. Grid: rows / 8, matrices.
static __global__ void __launch_bounds__(MUON_THREADS)
    muon_row_squares_kernel(real* q, const floatX* o, int rows, int cols) {
    int row = (int)(blockIdx.x * (MUON_THREADS / WARP) + threadIdx.x / WARP);
    if (row >= rows) return;
    const floatX* from = o + ((size_t)blockIdx.y * (size_t)rows + (size_t)row) * (size_t)cols;
    real sum = 0;
    for (int i = (int)(threadIdx.x % WARP); i < cols; i += WARP) {
        real x = to_float(from[i]);
        sum = fmaf(x, x, sum);
    }
    for (int lane = WARP / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lane);
    if (threadIdx.x % WARP == 0) q[(size_t)blockIdx.y * (size_t)rows + (size_t)row] = sum / (real)cols;
}

// One block of 32 x 8 threads per 32 columns. Grid: columns / 32, matrices.
static __global__ void __launch_bounds__(MUON_THREADS)
    muon_column_squares_kernel(real* q, const floatX* o, int rows, int cols) {
    __shared__ real part[MUON_ROWS][MUON_COLUMNS];
    int column = (int)(blockIdx.x * MUON_COLUMNS + threadIdx.x);
    const floatX* from = o + (size_t)blockIdx.y * (size_t)rows * (size_t)cols + (size_t)column;
    real sum = 0;
#pragma unroll 8
    for (int row = (int)threadIdx.y; row < rows; row += MUON_ROWS) {
        real x = column < cols ? to_float(from[(size_t)row * (size_t)cols]) : 0;
        sum = fmaf(x, x, sum);
    }
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= cols) return;
    for (int i = 1; i < MUON_ROWS; i++) sum += part[i][threadIdx.x];
    q[(size_t)blockIdx.y * (size_t)cols + (size_t)column] = sum / (real)rows;
}

// Update the second moments, and replace q by the factors of the rows or columns of O. One block per matrix.
static __global__ void __launch_bounds__(MUON_THREADS)
    muon_normuon_kernel(real* q, AdamWState a, MuonChunk z, real beta2, real rest) {
    AdamWStep step = adamw_load_step(a);
    if (!step.is_taken) return;
    int l = z.rows > z.cols ? z.rows : z.cols;
    real *r = q + (size_t)blockIdx.x * (size_t)l, *v = a.v + z.matrices[blockIdx.x].offset;
    double norm = 0, norm_r = 0;  // both without their factor s, the shorter side
    for (int i = (int)threadIdx.x; i < l; i += MUON_THREADS) {
        real vi = fmaf(beta2, v[i], rest * r[i]), scale = rsqrtf(fmaxf(vi, 1e-10f));
        v[i] = vi;
        norm += (double)r[i];
        norm_r += (double)r[i] * (double)scale * (double)scale;
        r[i] = scale;
    }
    norm = block_sum(norm);
    norm_r = block_sum(norm_r);
    double s = z.rows < z.cols ? z.rows : z.cols;
    real factor = (real)(sqrt(s * norm) / fmax(sqrt(s * norm_r), 1e-10));
    for (int i = (int)threadIdx.x; i < l; i += MUON_THREADS) r[i] *= factor;
}

// ---------------------------------------------------------------------------------------------------------
// The parameters

// Shared by all elements of a launch.
typedef struct {
    real lr, decay_rate;  // lr includes the scale for the shape
    int cautious;
    uint64_t rounding;
} MuonRates;

template <int STORAGE, bool IS_NORMUON>
__global__ void __launch_bounds__(MUON_THREADS)
    muon_apply_kernel(AdamWState a, const floatX* o, const real* scales, MuonChunk z, MuonRates h) {
    AdamWStep step = adamw_load_step(a);
    if (!step.is_taken) return;
    MuonRange r = muon_range(z);
    const floatX* from = o + r.x;
    scales += (size_t)blockIdx.y * (size_t)(z.rows > z.cols ? z.rows : z.cols);
    real shrink = fmaf(-h.decay_rate, r.decay, 1);
#pragma unroll 2
    for (size_t i = muon_first(r); i < r.end; i += MUON_THREADS * ADAMW_VECTOR) {
        Vector<real> p = adamw_load<STORAGE>(a, i);
        bool whole = muon_is_whole(r, i);
        size_t at = i - r.matrix;
        float u[ADAMW_VECTOR];
        if (r.is_aligned && whole) {
            to_floats(u, *(const Vector<floatX, ADAMW_VECTOR>*)(from + at));
        } else {
#pragma unroll
            for (int k = 0; k < ADAMW_VECTOR; k++) u[k] = muon_has(r, i + k) ? to_float(from[at + k]) : 0;
        }
#pragma unroll
        for (int k = 0; k < ADAMW_VECTOR; k++) {
            if (IS_NORMUON && (whole || muon_has(r, i + k))) {
                unsigned element = (unsigned)at + (unsigned)k, cols = (unsigned)z.cols;
                u[k] *= scales[z.rows >= z.cols ? element / cols : element % cols];
            }
            real kept = h.cautious && u[k] * p.v[k] < 0 ? p.v[k] : __fmul_rn(p.v[k], shrink);
            p.v[k] = fmaf(-h.lr, u[k], kept);
            if (!whole && muon_has(r, i + k)) adamw_store_one<STORAGE>(a, i, k, p.v[k], h.rounding);
        }
        if (whole) adamw_store<STORAGE>(a, i, p, h.rounding);
    }
}

static inline void muon_apply(AdamWState a, const floatX* o, const MuonSpace* space, MuonChunk z, OptimizerSettings h,
                              Context* ctx) {
    CHECK(a.first % ADAMW_VECTOR == 0 && (ADAMW_NARROW || !a.master));
    double n = (double)z.count * z.rows * z.cols;
    unsigned count = (unsigned)z.count;
    Scope scope =
        scope_open(ctx, "muon_apply", MUON_APPLY_FLOPS(n), MUON_APPLY_BYTES(n, a.master != NULL, h.muon.is_normuon),
                   "%dx[%d,%d]", z.count, z.rows, z.cols);
    if (h.muon.is_normuon) {
        if (z.rows >= z.cols)
            muon_row_squares_kernel<<<dim3(blocks_for((size_t)z.rows, MUON_THREADS / WARP), count), MUON_THREADS, 0,
                                      ctx->stream>>>(space->r, o, z.rows, z.cols);
        else
            muon_column_squares_kernel<<<dim3(blocks_for((size_t)z.cols, MUON_COLUMNS), count),
                                         dim3(MUON_COLUMNS, MUON_ROWS), 0, ctx->stream>>>(space->r, o, z.rows, z.cols);
        muon_normuon_kernel<<<count, MUON_THREADS, 0, ctx->stream>>>(space->r, a, z, (real)NORMUON_BETA2,
                                                                     (real)(1 - NORMUON_BETA2));
    }
    auto kernel = muon_apply_kernel<ADAMW_NO_MASTER, false>;
    if (h.muon.is_normuon) kernel = muon_apply_kernel<ADAMW_NO_MASTER, true>;
    if (a.master && h.muon.is_normuon) kernel = muon_apply_kernel<ADAMW_WITH_MASTER, true>;
    else if (a.master) kernel = muon_apply_kernel<ADAMW_WITH_MASTER, false>;
    MuonRates rates = {.lr = (real)(h.lr * muon_scale(z.rows, z.cols))};
    rates.decay_rate = (real)(h.lr * h.weight_decay), rates.cautious = h.cautious, rates.rounding = h.rounding;
    kernel<<<muon_blocks(z), MUON_THREADS, 0, ctx->stream>>>(a, o, space->r, z, rates);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

#endif
