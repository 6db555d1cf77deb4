/* matmul: the linear layer, with bias and GELU fused into the products around it.
 *
 *   forward          y   (SET or ADD)  = x w^T + b              x [N, IC], w [OC, IC], b [OC] or NULL, y [N, OC]
 *   gelu forward     pre = x w^T + b,  y = gelu(pre)            both kept: the backward pass reads pre
 *   backward input   dx  (SET or ADD)  = dy w                   dy [N, OC], dx [N, IC]
 *   gelu backward    dpre = (dy w) * gelu'(pre)                 pre, dpre [N, IC]
 *                    dbias (SET or ADD) = column sums of dpre   [IC]: of the bias that made pre; or NULL
 *   backward weight  dw  (SET or ADD)  = dy^T x,  db = column sums of dy
 *
 * All arrays floatX, row-major. N is the number of rows (tokens).
 *
 * Numerics: products accumulate in `real` with fused multiply-adds over blocks of at most 256 terms; the sums of
 * the blocks are added in order. db accumulates in double. The order depends on the shapes only.
 *
 * The CPU version is one packed, register-blocked product in the manner of Goto and van de Geijn, "Anatomy of
 * high-performance matrix multiplication", ACM TOMS 34 (2008). USE_BLAS takes a CBLAS library's instead. */
#ifndef LLMC_MATMUL_H
#define LLMC_MATMUL_H

#if defined(__AVX__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif
#ifdef USE_BLAS
#include <cblas.h>
#endif

#include "../device/activation.h"
#include "../device/scope.h"

// The gradient of a bias, and how it is to be written.
typedef struct {
    real* b;  // NULL: not wanted
    Mode mode;
} BiasGradient;

// Every operand once, in the type that it has; an output that is added to is also read. With GELU its input is one more,
// written forward and read in the backward pass. Not counted: biases and their gradients, and what is read twice.
#define MATMUL_FLOPS(N, IC, OC) (2.0 * (double)(N) * (double)(IC) * (double)(OC))
#define MATMUL_FORWARD_BYTES(N, IC, OC, mode)                                                                          \
    ((1.0 * (N) * (IC) + 1.0 * (OC) * (IC) + ((mode) == ADD ? 2.0 : 1.0) * (N) * (OC)) * sizeof(floatX))
#define MATMUL_GELU_FORWARD_BYTES(N, IC, OC) (MATMUL_FORWARD_BYTES(N, IC, OC, SET) + 1.0 * (N) * (OC) * sizeof(floatX))
#define MATMUL_BACKWARD_INPUT_BYTES(N, IC, OC, mode) MATMUL_FORWARD_BYTES(N, OC, IC, mode)
#define MATMUL_GELU_BACKWARD_INPUT_BYTES(N, IC, OC) MATMUL_GELU_FORWARD_BYTES(N, OC, IC)
#define MATMUL_BACKWARD_WEIGHT_BYTES(N, IC, OC, mode)                                                                  \
    (1.0 * (N) * ((IC) + (OC)) * sizeof(floatX) + ((mode) == ADD ? 2.0 : 1.0) * (OC) * (IC) * sizeof(real))

// ---------------------------------------------------------------------------------------------------------
// References

static inline void matmul_forward_ref(real* y, const real* x, const real* w, const real* b, int N, int IC, int OC,
                                      Mode mode) {
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) {
            size_t at = (size_t)n * (size_t)OC + (size_t)o;
            double sum = b ? b[o] : 0;
            for (int i = 0; i < IC; i++)
                sum += (double)x[(size_t)n * (size_t)IC + (size_t)i] * w[(size_t)o * (size_t)IC + (size_t)i];
            y[at] = (real)(mode == ADD ? y[at] + sum : sum);
        }
}

static inline void matmul_gelu_forward_ref(real* y, real* pre, const real* x, const real* w, const real* b, int N,
                                           int IC, int OC, Gelu kind) {
    matmul_forward_ref(pre, x, w, b, N, IC, OC, SET);
    for (size_t i = 0; i < (size_t)N * (size_t)OC; i++) y[i] = (real)gelu_exact(pre[i], kind);
}

static inline void matmul_backward_input_ref(real* dx, const real* dy, const real* w, int N, int IC, int OC,
                                             Mode mode) {
    for (int n = 0; n < N; n++)
        for (int i = 0; i < IC; i++) {
            size_t at = (size_t)n * (size_t)IC + (size_t)i;
            double sum = 0;
            for (int o = 0; o < OC; o++)
                sum += (double)dy[(size_t)n * (size_t)OC + (size_t)o] * w[(size_t)o * (size_t)IC + (size_t)i];
            dx[at] = (real)(mode == ADD ? dx[at] + sum : sum);
        }
}

// db [C] (SET or ADD) = the column sums of dy [N, C].
static inline void matmul_backward_bias_ref(real* db, const real* dy, int N, int C, Mode mode) {
    for (int c = 0; c < C; c++) {
        double sum = mode == ADD ? db[c] : 0;
        for (int n = 0; n < N; n++) sum += dy[(size_t)n * (size_t)C + (size_t)c];
        db[c] = (real)sum;
    }
}

static inline void matmul_gelu_backward_input_ref(real* dpre, const real* dy, const real* w, const real* pre, int N,
                                                  int IC, int OC, Gelu kind) {
    matmul_backward_input_ref(dpre, dy, w, N, IC, OC, SET);
    for (size_t i = 0; i < (size_t)N * (size_t)IC; i++) dpre[i] = (real)(dpre[i] * gelu_derivative_exact(pre[i], kind));
}

static inline void matmul_backward_weight_ref(real* dw, real* db, const real* dy, const real* x, int N, int IC, int OC,
                                              Mode mode) {
    for (int o = 0; o < OC; o++) {
        for (int i = 0; i < IC; i++) {
            size_t at = (size_t)o * (size_t)IC + (size_t)i;
            double sum = 0;
            for (int n = 0; n < N; n++)
                sum += (double)dy[(size_t)n * (size_t)OC + (size_t)o] * x[(size_t)n * (size_t)IC + (size_t)i];
            dw[at] = (real)(mode == ADD ? dw[at] + sum : sum);
        }
    }
    if (db) matmul_backward_bias_ref(db, dy, N, OC, mode);
}

#ifndef __CUDACC__

// ---------------------------------------------------------------------------------------------------------
// One product for all directions
//
//   C [M, N] (SET or ADD) = A [M, K] B [K, N] + bias, any operand transposed by its strides
//
// C is cut into blocks, a task each. A task walks K in steps of K_BLOCK; at each it walks panels, TILE_COLS columns of
// B, packed so that a step of k is one run of TILE_COLS values; with each it walks strips, TILE_ROWS rows of A. A strip
// times a panel is a tile, whose sums stay in registers for a whole K_BLOCK; the panel stays in the L1 cache, and the
// strips come from L2. From one K_BLOCK to the next the tiles wait in the task's own buffer, so that C is touched once,
// and bias and GELU are applied on the way to it.

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define TILE_ROWS 12  // 12 x 2 vectors of sums, 2 of B, 1 of A: of 32 registers
#define K_BLOCK 128   // a panel, two vectors wide, then fills half of a 32 KiB L1 cache
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#define TILE_ROWS 6  // 6 x 2 vectors of sums: of 16 registers
#define K_BLOCK 256
#else
#define VECTOR_BYTES 16
#define TILE_ROWS 6
#define K_BLOCK 256
#endif
#define LANES ((int)(VECTOR_BYTES / sizeof(real)))
#define TILE_COLS (2 * LANES)

typedef real Vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));

// a * b + c, rounded once where the machine can: -ffp-contract=off forbids the compiler to do so by itself.
static inline Vector vector_fma(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__) && defined(REAL_DOUBLE)
    return (Vector)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(REAL_DOUBLE)
    return (Vector)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// TILE_COLS values, in two vectors: gcc's own memcpy would take smaller pieces.
static inline void copy_row(real* to, const real* from) {
    ((Vector*)to)[0] = ((const Vector*)from)[0];
    ((Vector*)to)[1] = ((const Vector*)from)[1];
}

// tile [TILE_ROWS, TILE_COLS] (SET or ADD) = a strip of A, whose (i, k) is a[i * a_row + k * a_k], times a panel of B.
static inline void matmul_tile(real* tile, const real* a, size_t a_row, size_t a_k, const real* b, int k, Mode mode) {
    const Vector zero = {0};
    Vector sum[TILE_ROWS][2];
    for (int i = 0; i < TILE_ROWS; i++) sum[i][0] = sum[i][1] = zero;
    do {
        Vector b0 = *(const Vector*)b, b1 = *(const Vector*)(b + LANES);
        for (int i = 0; i < TILE_ROWS; i++) {
            Vector ai = a[(size_t)i * a_row] - zero;  // one value in every lane
            sum[i][0] = vector_fma(ai, b0, sum[i][0]);
            sum[i][1] = vector_fma(ai, b1, sum[i][1]);
        }
        a += a_k;
        __asm__("" : "+r"(a));  // hides a's steps from gcc, which would make a second loop for a_k = 1 and spill
        b += TILE_COLS;
    } while (--k);
    Vector* t = (Vector*)tile;
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < 2; j++) {
            if (mode == ADD) sum[i][j] += t[2 * i + j];
            t[2 * i + j] = sum[i][j];
        }
}

// One of each pair of strides is 1; `bias`, `activated` and `pre` may be NULL.
typedef struct {
    int M, N, K;
    floatX* c;
    size_t c_row, c_col;  // C(m, n) is c[m * c_row + n * c_col]
    const floatX* a;
    size_t a_row, a_k;  // A(m, k) is a[m * a_row + k * a_k]
    const floatX* b;
    size_t b_k, b_col;  // B(k, n) is b[k * b_k + n * b_col]
    Mode mode;
    const floatX* bias;  // bias[m] is added to C(m, n)
    floatX* activated;   // gelu(C), laid out as C
    const floatX* pre;   // C becomes C * gelu'(pre), laid out as C, where c_col is 1
    Gelu kind;
    int block_rows, block_cols;  // a task's block of C: multiples of TILE_ROWS and TILE_COLS
    int tasks_share_b;           // B is packed once, before the tasks; else a task packs the columns that only it uses
} Product;

#ifdef USE_BLAS

// CBLAS has memory of its own.
static inline size_t product_scratch_bytes(int N, int K, int block_rows, int block_cols, int tasks_share_b) {
    return (void)N, (void)K, (void)block_rows, (void)block_cols, (void)tasks_share_b, 0;
}

static inline void product_run(const Product* p, Context* ctx) {
    (void)ctx;
    int swapped = p->c_col != 1 || p->bias;  // CBLAS wants rows of C: where c_row is 1, C^T = B^T A^T has them
    const floatX *a = swapped ? p->b : p->a, *b = swapped ? p->a : p->b;
    size_t a_row = swapped ? p->b_col : p->a_row, a_k = swapped ? p->b_k : p->a_k;
    size_t b_k = swapped ? p->a_k : p->b_k, b_col = swapped ? p->a_row : p->b_col;
    int M = swapped ? p->N : p->M, N = swapped ? p->M : p->N;
#ifdef REAL_DOUBLE
#define CBLAS_GEMM cblas_dgemm
#else
#define CBLAS_GEMM cblas_sgemm
#endif
    CBLAS_GEMM(CblasRowMajor, a_k == 1 ? CblasNoTrans : CblasTrans, b_col == 1 ? CblasNoTrans : CblasTrans, M, N, p->K,
               1, a, max_int((int)(a_k == 1 ? a_row : a_k), a_k == 1 ? p->K : M), b,
               max_int((int)(b_col == 1 ? b_k : b_col), b_col == 1 ? N : p->K), p->mode == ADD, p->c,
               max_int((int)(swapped ? p->c_col : p->c_row), N));
    const floatX* bias = p->bias;
    if (!bias && !p->activated && !p->pre) return;
#pragma omp parallel for schedule(static)
    for (int m = 0; m < M; m++) {
        size_t at = (size_t)m * (swapped ? p->c_col : p->c_row);
        for (int n = 0; n < N && bias; n++) p->c[at + (size_t)n] += bias[n];
        for (int n = 0; n < N && p->pre; n++) p->c[at + (size_t)n] *= gelu_derivative(p->pre[at + (size_t)n], p->kind);
        for (int n = 0; n < N && p->activated; n++)
            p->activated[at + (size_t)n] = gelu_value(p->c[at + (size_t)n], p->kind);
    }
}

#else

// to[k * width + i] = from[i * stride + k * k_stride] for i < count, 0 up to width: what a tile reads in one stream.
__attribute__((always_inline)) static inline void matmul_pack(real* to, int width, const floatX* from, size_t stride,
                                                              size_t k_stride, int count, int k) {
    if (count < width) memset(to, 0, (size_t)width * (size_t)k * sizeof *to);
    if (stride == 1 && count == width && width == TILE_COLS)
        for (int j = 0; j < k; j++) copy_row(to + j * width, from + (size_t)j * k_stride);
    else if (stride == 1 && count == width)
        for (int j = 0; j < k; j++) memcpy(to + j * width, from + (size_t)j * k_stride, (size_t)width * sizeof *to);
    else
        for (int i = 0; i < count; i++)
            for (int j = 0; j < k; j++) to[j * width + i] = from[(size_t)i * stride + (size_t)j * k_stride];
}

// The finished rows x cols of a tile go to c.
static inline void matmul_store(floatX* c, size_t c_row, size_t c_col, const real* tile, int rows, int cols,
                                Mode mode) {
    if (c_col == 1 && cols == TILE_COLS) {
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < TILE_COLS; j += LANES) {
                Vector sum = *(const Vector*)(tile + i * TILE_COLS + j);
                Vector* to = (Vector*)(c + (size_t)i * c_row + j);
                if (mode == ADD) sum += *to;
                *to = sum;
            }
    } else if (mode == SET && c_row == 1 && cols == TILE_COLS && rows == TILE_ROWS) {
        // First pairs of rows, which gcc makes with vector shuffles. Then a line of C is finished before the next: the
        // lines are OC apart and may all fall into one set of the cache, which would not keep them.
        real pairs[TILE_ROWS / 2][2 * TILE_COLS];
        for (int i = 0; i < TILE_ROWS; i += 2)
            for (int j = 0; j < TILE_COLS; j++) {
                pairs[i / 2][2 * j] = tile[i * TILE_COLS + j];
                pairs[i / 2][2 * j + 1] = tile[(i + 1) * TILE_COLS + j];
            }
        for (int j = 0; j < TILE_COLS; j++)
            for (int i = 0; i < TILE_ROWS; i += 2)
                memcpy(c + (size_t)j * c_col + i, pairs[i / 2] + 2 * j, 2 * sizeof *c);
    } else {
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++) {
                floatX* to = c + (size_t)i * c_row + (size_t)j * c_col;
                *to = mode == ADD ? *to + tile[i * TILE_COLS + j] : tile[i * TILE_COLS + j];
            }
    }
}

// Bias, GELU, and the way to C, of the tile whose first element is C(m, n).
static inline void product_finish(const Product* p, real* tile, int m, int n, int rows, int cols) {
    size_t at = (size_t)m * p->c_row + (size_t)n * p->c_col;
    if (p->bias)
        for (int i = 0; i < rows; i++) {
            Vector* row = (Vector*)(tile + i * TILE_COLS);
            row[0] += p->bias[m + i];
            row[1] += p->bias[m + i];
        }
    if (p->pre) {
        real pre[TILE_ROWS * TILE_COLS] = {0};
        for (int i = 0; i < rows; i++)
            if (cols == TILE_COLS) copy_row(pre + i * TILE_COLS, p->pre + at + (size_t)i * p->c_row);
            else memcpy(pre + i * TILE_COLS, p->pre + at + (size_t)i * p->c_row, (size_t)cols * sizeof *pre);
        if (p->kind == GELU_ERF)
            for (int e = 0; e < TILE_ROWS * TILE_COLS; e++) tile[e] *= gelu_derivative(pre[e], GELU_ERF);
        else
            for (int e = 0; e < TILE_ROWS * TILE_COLS; e++) tile[e] *= gelu_derivative(pre[e], GELU_TANH);
    }
    matmul_store(p->c + at, p->c_row, p->c_col, tile, rows, cols, p->mode);
    if (p->activated) {
        if (p->kind == GELU_ERF)
            for (int e = 0; e < TILE_ROWS * TILE_COLS; e++) tile[e] = gelu_value(tile[e], GELU_ERF);
        else
            for (int e = 0; e < TILE_ROWS * TILE_COLS; e++) tile[e] = gelu_value(tile[e], GELU_TANH);
        matmul_store(p->activated + at, p->c_row, p->c_col, tile, rows, cols, SET);
    }
}

// Asks for memory that is needed soon, a few lines at a time, since the first access of a strip, a panel or a tile would
// wait for it: at the last K_BLOCK the lines of C where tile (m, n) goes; of A, lines of the block `next` with the rows
// of the same strip; of B, if it is not packed yet, lines of the next panel.
__attribute__((always_inline)) static inline void product_prefetch(const Product* p, const floatX* next, int m0, int n0,
                                                                   int k0, int i, int j) {
    const floatX* c = p->c + (size_t)(m0 + i) * p->c_row + (size_t)(n0 + j) * p->c_col;
    int rows = min_int(TILE_ROWS, p->M - m0 - i), cols = min_int(TILE_COLS, p->N - n0 - j);
    if (p->K - k0 <= K_BLOCK) {
        for (int r = 0; r < rows && p->c_col == 1; r++) __builtin_prefetch(c + (size_t)r * p->c_row, 1);
        for (int r = 0; r < cols && p->c_col != 1; r++) __builtin_prefetch(c + (size_t)r * p->c_col, 1);
    }
    for (int r = 0; r < rows && next && j < K_BLOCK; r++)
        __builtin_prefetch(next + (size_t)(i + r) * p->a_row + j, 0, 2);
    if (!p->tasks_share_b && n0 + j + TILE_COLS < p->N) {
        enum { LINES = 8 };
        int from = k0 + i / TILE_ROWS * LINES, to = min_int(min_int(p->K, k0 + K_BLOCK), from + LINES);
        const floatX* b = p->b + (size_t)(n0 + j + TILE_COLS) * p->b_col;
        for (int r = from; r < to; r++) __builtin_prefetch(b + (size_t)r * p->b_k, 0, 2);
    }
}

// The block of C that begins at C(m0, n0). packed_b: all of B, or NULL. own: this thread's buffer.
static inline void product_task(const Product* p, const real* packed_b, real* own, int m0, int n0) {
    int rows = min_int(p->block_rows, p->M - m0), cols = min_int(p->block_cols, p->N - n0);
    size_t padded_n = round_up((size_t)p->N, TILE_COLS);
    real *own_panel = own, *own_strips = own_panel + TILE_COLS * K_BLOCK;
    real* tiles = own_strips + (size_t)p->block_rows * K_BLOCK;
    for (int k0 = 0; k0 < p->K; k0 += K_BLOCK) {
        int k = min_int(K_BLOCK, p->K - k0);
        const floatX* a = p->a + (size_t)m0 * p->a_row + (size_t)k0 * p->a_k;
        // The block of A that follows: the same rows, or those of the task that this thread will probably have next.
        const floatX* next = a + K_BLOCK * p->a_k;
        if (k0 + k == p->K) next = p->a + (size_t)(m0 + p->block_rows * device_threads()) * p->a_row;
        if (!packed_b || p->a_k != 1 || m0 + p->block_rows * (1 + device_threads()) > p->M) next = NULL;
        // Rows of A are read where they lie; columns are packed, and a last strip of fewer rows is. A few k at a time:
        // a strip is narrower than a line of the cache, which is to stay there for the next strip.
        enum { STEP = 8 };
        int first = p->a_k == 1 ? rows / TILE_ROWS * TILE_ROWS : 0;
        for (int q = 0; q < k; q += STEP)
            for (int i = first; i < rows; i += TILE_ROWS)
                matmul_pack(own_strips + i * K_BLOCK + q * TILE_ROWS, TILE_ROWS,
                            a + (size_t)i * p->a_row + (size_t)q * p->a_k, p->a_row, p->a_k,
                            min_int(TILE_ROWS, rows - i), min_int(STEP, k - q));
        real* tile = tiles;
        for (int j = 0; j < cols; j += TILE_COLS) {
            const real* panel = own_panel;
            int width = min_int(TILE_COLS, cols - j);
            if (packed_b) panel = packed_b + (size_t)k0 * padded_n + (size_t)(n0 + j) * (size_t)k;
            else
                matmul_pack(own_panel, TILE_COLS, p->b + (size_t)k0 * p->b_k + (size_t)(n0 + j) * p->b_col, p->b_col,
                            p->b_k, width, k);
            for (int i = 0; i < rows; i += TILE_ROWS) {
                int height = min_int(TILE_ROWS, rows - i);
                product_prefetch(p, next, m0, n0, k0, i, j);
                if (p->a_k != 1 || height < TILE_ROWS)
                    matmul_tile(tile, own_strips + i * K_BLOCK, 1, TILE_ROWS, panel, k, k0 ? ADD : SET);
                else matmul_tile(tile, a + (size_t)i * p->a_row, p->a_row, 1, panel, k, k0 ? ADD : SET);
                if (k0 + k == p->K) product_finish(p, tile, m0 + i, n0 + j, height, width);
                if (p->K > K_BLOCK) tile += TILE_ROWS * TILE_COLS;
            }
        }
    }
}

// In elements: all of B in panels, where the tasks share it; a thread's own panel, strips and tiles.
static inline size_t product_packed_size(int N, int K, int tasks_share_b) {
    return tasks_share_b ? round_up(round_up((size_t)N, TILE_COLS) * (size_t)K, 1024) : 0;
}

static inline size_t product_own_size(int block_rows, int block_cols) {
    return round_up((TILE_COLS + (size_t)block_rows) * K_BLOCK + (size_t)block_rows * (size_t)block_cols, 1024);
}

static inline size_t product_scratch_bytes(int N, int K, int block_rows, int block_cols, int tasks_share_b) {
    size_t own = (size_t)device_threads() * product_own_size(block_rows, block_cols);
    return (product_packed_size(N, K, tasks_share_b) + own) * sizeof(real);
}

static inline void product_run(const Product* p, Context* ctx) {
    int m_tasks = (p->M + p->block_rows - 1) / p->block_rows, n_tasks = (p->N + p->block_cols - 1) / p->block_cols;
    int panels = (p->N + TILE_COLS - 1) / TILE_COLS, k_blocks = (p->K + K_BLOCK - 1) / K_BLOCK;
    size_t packed_size = product_packed_size(p->N, p->K, p->tasks_share_b);
    size_t own_size = product_own_size(p->block_rows, p->block_cols);
    real* packed_b = (real*)device_scratch(ctx, (packed_size + (size_t)device_threads() * own_size) * sizeof(real));
#pragma omp parallel
    {
        real* own = packed_b + packed_size + (size_t)device_thread_index() * own_size;
        if (p->tasks_share_b) {
#pragma omp for schedule(dynamic)
            for (int t = 0; t < panels * k_blocks; t++) {
                int k0 = t / panels * K_BLOCK, n = t % panels * TILE_COLS, k = min_int(K_BLOCK, p->K - k0);
                matmul_pack(packed_b + (size_t)k0 * (size_t)panels * TILE_COLS + (size_t)n * (size_t)k, TILE_COLS,
                            p->b + (size_t)k0 * p->b_k + (size_t)n * p->b_col, p->b_col, p->b_k,
                            min_int(TILE_COLS, p->N - n), k);
            }
        }
#pragma omp for schedule(dynamic)
        for (int t = 0; t < m_tasks * n_tasks; t++)
            product_task(p, p->tasks_share_b ? packed_b : NULL, own, t / n_tasks * p->block_rows,
                         t % n_tasks * p->block_cols);
    }
}

#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers

// The size of equal blocks of at most `limit`, itself rounded up to a multiple.
static inline int matmul_block(int size, int limit, int multiple) {
    int count = (size + limit - 1) / limit;
    return (int)round_up((size_t)((size + count - 1) / count), (size_t)multiple);
}

// Scratch that any launch takes at most, for N rows at most: that of the products below, with blocks at their limits.
static inline size_t matmul_scratch_bytes(int N, int IC, int OC) {
    int rows = min_int(OC, 96) + TILE_ROWS;
    size_t forward = product_scratch_bytes(N, IC, rows, min_int(N, 256) + TILE_COLS, 1);
    size_t input = product_scratch_bytes(IC, OC, min_int(N, 256) + TILE_ROWS, min_int(IC, 96) + TILE_COLS, 0);
    size_t weight = product_scratch_bytes(IC, N, rows, min_int(IC, 1024) + TILE_COLS, 1);
    return max_size(forward, max_size(input, weight));
}

// y = x w^T as y^T = w x^T: the rows of w are read where they lie, only x, the smaller one, is packed.
static inline Product product_forward(floatX* y, const floatX* x, Affine p, int N, int IC, int OC) {
    Product r;
    memset(&r, 0, sizeof r);
    r.M = OC, r.N = N, r.K = IC;
    r.c = y, r.c_row = 1, r.c_col = (size_t)OC;
    r.a = p.w, r.a_row = (size_t)IC, r.a_k = 1;
    r.b = x, r.b_k = 1, r.b_col = (size_t)IC;
    r.bias = p.b;
    r.block_rows = matmul_block(OC, 96, TILE_ROWS), r.block_cols = matmul_block(N, 256, TILE_COLS);
    r.tasks_share_b = 1;
    return r;
}

static inline Product product_backward_input(floatX* dx, const floatX* dy, const floatX* w, int N, int IC, int OC) {
    Product r;
    memset(&r, 0, sizeof r);
    r.M = N, r.N = IC, r.K = OC;
    r.c = dx, r.c_row = (size_t)IC, r.c_col = 1;
    r.a = dy, r.a_row = (size_t)OC, r.a_k = 1;
    r.b = w, r.b_k = (size_t)IC, r.b_col = 1;
    r.block_rows = matmul_block(N, 256, TILE_ROWS), r.block_cols = matmul_block(IC, 96, TILE_COLS);
    return r;
}

static inline void matmul_forward(floatX* y, const floatX* x, Affine p, int N, int IC, int OC, Mode mode,
                                  Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_forward", MATMUL_FLOPS(N, IC, OC), MATMUL_FORWARD_BYTES(N, IC, OC, mode),
                             "N=%d IC=%d OC=%d", N, IC, OC);
    Product r = product_forward(y, x, p, N, IC, OC);
    r.mode = mode;
    product_run(&r, ctx);
    scope_close(&scope);
}

static inline void matmul_gelu_forward(floatX* y, floatX* pre, const floatX* x, Affine p, int N, int IC, int OC,
                                       Gelu kind, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_gelu_forward", MATMUL_FLOPS(N, IC, OC), MATMUL_GELU_FORWARD_BYTES(N, IC, OC),
                             "N=%d IC=%d OC=%d", N, IC, OC);
    Product r = product_forward(pre, x, p, N, IC, OC);
    r.activated = y;
    r.kind = kind;
    product_run(&r, ctx);
    scope_close(&scope);
}

static inline void matmul_backward_input(floatX* dx, const floatX* dy, const floatX* w, int N, int IC, int OC,
                                         Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_backward_input", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_BACKWARD_INPUT_BYTES(N, IC, OC, mode), "N=%d IC=%d OC=%d", N, IC, OC);
    Product r = product_backward_input(dx, dy, w, N, IC, OC);
    r.mode = mode;
    product_run(&r, ctx);
    scope_close(&scope);
}

// d.b [OC] (SET or ADD) = the column sums of dy [N, OC].
static inline void matmul_backward_bias(BiasGradient d, const floatX* dy, int N, int OC) {
    enum { COLUMNS = 256 };
    if (!d.b) return;
#pragma omp parallel for schedule(static)
    for (int o = 0; o < OC; o += COLUMNS) {
        double sum[COLUMNS] = {0};
        int count = min_int(COLUMNS, OC - o);
        for (int n = 0; n < N; n++)
            for (int j = 0; j < count; j++) sum[j] += (double)dy[(size_t)n * (size_t)OC + (size_t)(o + j)];
        for (int j = 0; j < count; j++) d.b[o + j] = (real)(d.mode == ADD ? d.b[o + j] + sum[j] : sum[j]);
    }
}

static inline void matmul_gelu_backward_input(floatX* dpre, BiasGradient d, const floatX* dy, const floatX* w,
                                              const floatX* pre, int N, int IC, int OC, Gelu kind, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_gelu_backward_input", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_GELU_BACKWARD_INPUT_BYTES(N, IC, OC), "N=%d IC=%d OC=%d", N, IC, OC);
    Product r = product_backward_input(dpre, dy, w, N, IC, OC);
    r.pre = pre;
    r.kind = kind;
    product_run(&r, ctx);
    matmul_backward_bias(d, dpre, N, IC);
    scope_close(&scope);
}

static inline void matmul_backward_weight(AffineGradient d, const floatX* dy, const floatX* x, int N, int IC, int OC,
                                          Mode mode, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_backward_weight", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_BACKWARD_WEIGHT_BYTES(N, IC, OC, mode), "N=%d IC=%d OC=%d", N, IC, OC);
    Product r;
    memset(&r, 0, sizeof r);
    r.M = OC, r.N = IC, r.K = N;
    r.c = d.w, r.c_row = (size_t)IC, r.c_col = 1;
    r.a = dy, r.a_row = 1, r.a_k = (size_t)OC;
    r.b = x, r.b_k = (size_t)IC, r.b_col = 1;
    r.mode = mode;
    r.block_rows = matmul_block(OC, 96, TILE_ROWS), r.block_cols = matmul_block(IC, 1024, TILE_COLS);
    r.tasks_share_b = 1;
    product_run(&r, ctx);
    BiasGradient bias = {d.b, mode};
    matmul_backward_bias(bias, dy, N, OC);
    scope_close(&scope);
}

// The GPU's matmuls keep plans in the context; the CPU has none.
static inline void matmul_plans_free(Context* ctx) { (void)ctx; }
static inline void matmul_plans_text(Context* ctx, Text* t) { (void)ctx, (void)t; }
static inline void matmul_plans_load(Context* ctx, const char* text) {
    (void)ctx;
    if (*text)
        warn("the checkpoint is of a GPU: its matmul algorithms are not used, and the run will not go on bit for bit");
}

#else
#include "matmul_cublaslt.cuh"
#endif
#endif
