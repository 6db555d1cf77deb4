/* The CPU's GEMM, used by matmul and Muon: packed and register-blocked, after Goto and van de Geijn, "Anatomy of
 * high-performance matrix multiplication", ACM TOMS 34 (2008). */
#ifndef LLMC_OPS_COMMON_PRODUCT_H
#define LLMC_OPS_COMMON_PRODUCT_H

#include "llmc/device/device.h"
#include "llmc/ops/common/activation.h"

#ifndef __CUDACC__
#ifdef __AVX__
#include <immintrin.h>
#endif

// ---------------------------------------------------------------------------------------------------------
// One GEMM for all directions
//
//   C [M, N] (SET or ADD) = A [M, K] B [K, N] + bias; strides can transpose any operand
//
// C is divided into blocks, one per task. A task loops over K in steps of K_BLOCK, over panels within a step, and over
// strips within a panel. A panel is TILE_COLS columns of B, packed so that each k has TILE_COLS contiguous values. A
// strip is TILE_ROWS rows of A. A strip times a panel is a tile, whose sums stay in registers for a whole K_BLOCK. The
// panel stays in the L1 cache; strips come from L2. Between K_BLOCKs the tiles are kept in the task's own buffer. So C
// is accessed once, after bias and GELU have been applied.

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define TILE_ROWS 12  // 12 x 2 vectors of sums, 2 of B, 1 of A: 27 of 32 registers
#define K_BLOCK 128   // a panel, two vectors wide, then fills half of a 32 KiB L1 cache
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#define TILE_ROWS 6  // 6 x 2 vectors of sums: 12 of 16 registers
#define K_BLOCK 256
#else
#define VECTOR_BYTES 16
#define TILE_ROWS 6
#define K_BLOCK 256
#endif
#define LANES ((int)(VECTOR_BYTES / sizeof(real)))
#define TILE_COLS (2 * LANES)
#define STRIP_ROW                                                                                                      \
    (K_BLOCK + LANES)  // row stride of a copied strip; no power of two, so that rows use different L1 sets

typedef real Vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));

// a * b + c, rounded once if the CPU has FMA. -ffp-contract=off keeps the compiler from fusing by itself.
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

// Copy TILE_COLS values as two vectors. gcc's memcpy would use smaller pieces.
static inline void copy_row(real* to, const real* from) {
    ((Vector*)to)[0] = ((const Vector*)from)[0];
    ((Vector*)to)[1] = ((const Vector*)from)[1];
}

// tile [rows, TILE_COLS] (SET or ADD) = a strip of A, whose (i, k) is a[i * a_row + k * a_k], times a panel of B.
__attribute__((always_inline)) static inline void product_tile_rows(real* tile, const real* a, size_t a_row, size_t a_k,
                                                                    const real* b, int k, Mode mode, int rows) {
    const Vector zero = {0};
    Vector sum[TILE_ROWS][2];
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = zero;
    do {
        Vector b0 = *(const Vector*)b, b1 = *(const Vector*)(b + LANES);
        for (int i = 0; i < rows; i++) {
            Vector ai = a[(size_t)i * a_row] - zero;  // one value in every lane
            sum[i][0] = vector_fma(ai, b0, sum[i][0]);
            sum[i][1] = vector_fma(ai, b1, sum[i][1]);
        }
        a += a_k;
        __asm__("" : "+r"(a));  // hides the stride from gcc, which would add a loop for a_k = 1 and spill
        b += TILE_COLS;
    } while (--k);
    Vector* t = (Vector*)tile;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 2; j++) {
            if (mode == ADD) sum[i][j] += t[2 * i + j];
            t[2 * i + j] = sum[i][j];
        }
}

// The same for at least `rows` rows. A last strip with a third of the rows takes a third of the time.
static inline void product_tile(real* tile, const real* a, size_t a_row, size_t a_k, const real* b, int k, Mode mode,
                                int rows) {
    enum { THIRD = TILE_ROWS / 3 };
    if (rows > 2 * THIRD) product_tile_rows(tile, a, a_row, a_k, b, k, mode, TILE_ROWS);
    else if (rows > THIRD) product_tile_rows(tile, a, a_row, a_k, b, k, mode, 2 * THIRD);
    else product_tile_rows(tile, a, a_row, a_k, b, k, mode, THIRD);
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
    int tasks_share_b;  // 1: B is packed once, before the tasks; 0: each task packs the columns that only it uses
} Product;

// Splits `size` into equal blocks of at most `limit` and returns their size, rounded up to a multiple of `multiple`.
static inline int product_block(int size, int limit, int multiple) {
    int count = (size + limit - 1) / limit;
    return (int)round_up((size_t)((size + count - 1) / count), (size_t)multiple);
}

// to[k * width + i] = from[i * stride + k * k_stride] for i < count, 0 for count <= i < width: as a tile reads it.
__attribute__((always_inline)) static inline void product_pack(real* to, int width, const floatX* from, size_t stride,
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

// Store rows x cols of a finished tile to c.
static inline void product_store(floatX* c, size_t c_row, size_t c_col, const real* tile, int rows, int cols,
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
        // Interleave pairs of rows first; gcc does that with vector shuffles. Then finish each cache line of C before
        // the next: the lines are OC apart and may all map to one set of the cache, which cannot hold them all.
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

// Apply bias and GELU to the tile whose first element is C(m, n), and store it to C.
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
    product_store(p->c + at, p->c_row, p->c_col, tile, rows, cols, p->mode);
    if (p->activated) {
        if (p->kind == GELU_ERF)
            for (int e = 0; e < TILE_ROWS * TILE_COLS; e++) tile[e] = gelu_value(tile[e], GELU_ERF);
        else
            for (int e = 0; e < TILE_ROWS * TILE_COLS; e++) tile[e] = gelu_value(tile[e], GELU_TANH);
        product_store(p->activated + at, p->c_row, p->c_col, tile, rows, cols, SET);
    }
}

// Prefetch a few cache lines that are needed soon, because the first access to a strip, a panel or a tile would stall.
// Of C, at the last K_BLOCK: the lines to which the tile is stored. Of A: lines of the same strip in the block `next`.
// Of B: lines of the panel that is packed next. NULL: none.
__attribute__((always_inline)) static inline void
product_prefetch(const Product* p, const floatX* next, const floatX* next_panel, int m0, int n0, int k0, int i, int j) {
    enum { LINE = 64 / sizeof(floatX), LINES = K_BLOCK / LINE };
    const floatX* c = p->c + (size_t)(m0 + i) * p->c_row + (size_t)(n0 + j) * p->c_col;
    int rows = min_int(TILE_ROWS, p->M - m0 - i), cols = min_int(TILE_COLS, p->N - n0 - j);
    if (p->K - k0 <= K_BLOCK) {
        for (int r = 0; r < rows && p->c_col == 1; r++)
            for (int l = 0; l < cols; l += LINE) __builtin_prefetch(c + (size_t)r * p->c_row + l, 1);
        for (int r = 0; r < cols && p->c_col != 1; r++) __builtin_prefetch(c + (size_t)r * p->c_col, 1);
    }
    if (next) {
        int panels = p->block_cols / TILE_COLS, share = (LINES + panels - 1) / panels, line = j / TILE_COLS * share;
        for (int l = line; l < line + share && l < LINES; l++)
            for (int r = 0; r < rows; r++) __builtin_prefetch(next + (size_t)(i + r) * p->a_row + l * LINE, 0, 2);
    }
    if (next_panel) {
        int strips = p->block_rows / TILE_ROWS, share = (K_BLOCK + strips - 1) / strips, from = i / TILE_ROWS * share;
        for (int r = from; r < from + share && r < K_BLOCK; r++)
            for (int l = 0; l < TILE_COLS; l += LINE) __builtin_prefetch(next_panel + (size_t)r * p->b_k + l, 0, 2);
    }
}

// Computes the block of C that begins at C(m0, n0). packed_b: all of B, or NULL. own: this thread's buffer.
static inline void product_task(const Product* p, const real* packed_b, real* own, int m0, int n0) {
    int rows = min_int(p->block_rows, p->M - m0), cols = min_int(p->block_cols, p->N - n0);
    size_t padded_n = round_up((size_t)p->N, TILE_COLS);
    real *own_panel = own, *own_strips = own_panel + TILE_COLS * K_BLOCK;
    real* tiles = own_strips + (size_t)p->block_rows * STRIP_ROW;
    // Rows whose stride is a multiple of half a page, such as 3072 floats, share one or two sets of the L1 cache.
    enum { WAYS = 8 };
    int shares_sets = TILE_ROWS > WAYS && p->a_row * sizeof(floatX) % 2048 == 0;
    int in_place = p->a_k == 1 && !shares_sets ? rows / TILE_ROWS * TILE_ROWS : 0;
    int padded_rows = (int)round_up((size_t)rows, TILE_ROWS);
    for (int k0 = 0; k0 < p->K; k0 += K_BLOCK) {
        int k = min_int(K_BLOCK, p->K - k0);
        const floatX* a = p->a + (size_t)m0 * p->a_row + (size_t)k0 * p->a_k;
        // The next block of A: the same rows, or the rows of the task that this thread will probably take next.
        int is_last = k0 + k == p->K, next_m = packed_b ? m0 + p->block_rows * device_threads() : m0;
        const floatX* next = is_last ? p->a + (size_t)next_m * p->a_row : a + K_BLOCK;
        if (p->a_k != 1 || next_m + rows > p->M) next = NULL;
        // Rows of A are read in place if they form whole strips and share no sets, else copied. Columns are packed, a
        // few k at a time: a strip is narrower than a cache line, which should stay in the cache for the next strip.
        enum { STEP = 8 };
        for (int i = in_place; i < padded_rows && p->a_k == 1; i++)
            if (i < rows) memcpy(own_strips + i * STRIP_ROW, a + (size_t)i * p->a_row, (size_t)k * sizeof *a);
            else memset(own_strips + i * STRIP_ROW, 0, (size_t)k * sizeof *a);
        for (int q = 0; q < k && p->a_k != 1; q += STEP)
            for (int i = 0; i < rows; i += TILE_ROWS)
                product_pack(own_strips + i * STRIP_ROW + q * TILE_ROWS, TILE_ROWS,
                             a + (size_t)i * p->a_row + (size_t)q * p->a_k, p->a_row, p->a_k,
                             min_int(TILE_ROWS, rows - i), min_int(STEP, k - q));
        real* tile = tiles;
        for (int j = 0; j < cols; j += TILE_COLS) {
            const real* panel = own_panel;
            const floatX* next_panel = NULL;
            int width = min_int(TILE_COLS, cols - j);
            if (packed_b) panel = packed_b + (size_t)k0 * padded_n + (size_t)(n0 + j) * (size_t)k;
            else {
                const floatX* b = p->b + (size_t)k0 * p->b_k + (size_t)(n0 + j) * p->b_col;
                product_pack(own_panel, TILE_COLS, b, p->b_col, p->b_k, width, k);
                if (p->b_col == 1 && j + TILE_COLS < cols) next_panel = b + TILE_COLS;
                else if (p->b_col == 1 && !is_last) next_panel = b + K_BLOCK * p->b_k - j;
            }
            for (int i = 0; i < rows; i += TILE_ROWS) {
                int height = min_int(TILE_ROWS, rows - i);
                product_prefetch(p, next, next_panel, m0, n0, k0, i, j);
                Mode mode = k0 ? ADD : SET;
                if (p->a_k != 1) product_tile(tile, own_strips + i * STRIP_ROW, 1, TILE_ROWS, panel, k, mode, height);
                else if (i < in_place)
                    product_tile(tile, a + (size_t)i * p->a_row, p->a_row, 1, panel, k, mode, height);
                else product_tile(tile, own_strips + i * STRIP_ROW, STRIP_ROW, 1, panel, k, mode, height);
                if (is_last) product_finish(p, tile, m0 + i, n0 + j, height, width);
                if (p->K > K_BLOCK) tile += TILE_ROWS * TILE_COLS;
            }
        }
    }
}

// Sizes in elements. packed: all of B in panels, if tasks share it. own: a thread's panel, strips and tiles.
static inline size_t product_packed_size(int N, int K, int tasks_share_b) {
    return tasks_share_b ? round_up(round_up((size_t)N, TILE_COLS) * (size_t)K, 1024) : 0;
}

static inline size_t product_own_size(int block_rows, int block_cols) {
    return round_up(TILE_COLS * K_BLOCK + (size_t)block_rows * (STRIP_ROW + (size_t)block_cols), 1024);
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
                product_pack(packed_b + (size_t)k0 * (size_t)panels * TILE_COLS + (size_t)n * (size_t)k, TILE_COLS,
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
#endif
