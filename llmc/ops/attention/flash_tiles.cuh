/* Flash attention: tiles that stay on chip, on the tensor cores of sm_75 and later (mma.sync), for bf16 and fp16. This
 * file is shared by flash_forward.cuh and flash_backward.cuh.
 *
 * A block takes one head of one sequence and a tile of its rows; a warp owns 16 or 32 of them. The block iterates over
 * tiles of 64 rows of the other operand. Probabilities stay in registers.
 * Loading: 16-byte copies, asynchronous from sm_80 on; the next tile is loaded while the current one is used. Head
 * sizes below the tile's 64 or 128 channels are padded with zeros, and so are rows past a sequence's end.
 * Numerics: matmuls read floatX and accumulate in fp32. The softmax is fp32. P and ds are rounded to floatX for the
 * matmuls that read them.
 * Source: Dao, "FlashAttention-2", arXiv 2307.08691. */
#ifndef LLMC_OPS_ATTENTION_FLASH_TILES_CUH
#define LLMC_OPS_ATTENTION_FLASH_TILES_CUH

#include "llmc/device/ptx/mma.cuh"
#include "llmc/ops/attention/dropout.cuh"

enum {
    FLASH_WARPS = 4,
    FLASH_THREADS = FLASH_WARPS * WARP,
    FLASH_TILE = 64,  // rows of the tiles that a block iterates over
    FLASH_CHUNK = 32  // rows of a tile that the backward kernels take at a time, because registers are scarce
};

// Parameters by channels of a tile. ROWS: blocks of 16 rows that a warp owns. BLOCKS: thread blocks per multiprocessor.
// More rows mean fewer reads of shared memory; fewer rows let more blocks fit in the register file.
template <int D> struct FlashTiles {
    static constexpr int FORWARD_ROWS = 2, FORWARD_CHUNK = D == 64 ? 64 : 32, FORWARD_BLOCKS = 2;
    static constexpr int QUERY_ROWS = D == 64 ? 2 : 1, QUERY_BLOCKS = 2;
    // Two groups of rows save a third of the reads of shared memory, but with dropout they spill.
    static constexpr int KEY_ROWS = D == 64 ? 2 : 1, KEY_BLOCKS = 2;
#ifdef BEFORE_SM80
    static constexpr int KEY_ROWS_DROPPED = 1, KEY_BLOCKS_DROPPED = 1;
    static constexpr bool RUNS = D == 64;  // tiles of 128 channels do not fit the shared memory of sm_75
#else
    static constexpr int KEY_ROWS_DROPPED = 1, KEY_BLOCKS_DROPPED = D == 64 ? 3 : 2;
    static constexpr bool RUNS = true;
#endif
    static constexpr int FORWARD_CHUNK_DROPPED = D == 64 ? 32 : 16;
    // Measured on sm_90 only. On other architectures ptxas needs a few more registers and would spill at 32.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
    static constexpr int KEY_CHUNK = 16;
#else
    static constexpr int KEY_CHUNK = FLASH_CHUNK;
#endif
};

// Kernel parameters other than tensors.
typedef struct {
    const int* cu_seqlens;
    int N, NH, HS, max_seqlen;
    float softmax_scale;           // 1 / sqrt(HS)
    float keep_scale;              // kept pairs are multiplied by it
    const uint32_t* dropout_bits;  // 1: the pair is kept
} FlashParams;

// Statistics of one query: x = lse * log2(e), y = delta.
typedef float2 FlashRowStats;

// ---------------------------------------------------------------------------------------------------------
// Tiles in shared memory: rows of D channels, swizzled. Piece `piece` (16 bytes) of row `row` is at piece ^ (row % 8),
// so that the same piece of eight rows is in different banks. Tiles are aligned to 1024 bytes.

template <int D> HOST_DEVICE constexpr uint32_t flash_tile_bytes(int rows) {
    return (uint32_t)rows * D * sizeof(floatX);
}

template <int D> __device__ inline uint32_t flash_address(uint32_t tile, int row, int piece) {
    return tile + (uint32_t)row * D * (uint32_t)sizeof(floatX) + (uint32_t)((piece ^ (row & 7)) << 4);
}

// Start loading ROWS rows, `stride` elements apart. Rows from `exist` on become zeros.
template <int D, int ROWS>
__device__ inline void flash_load(uint32_t tile, const floatX* x, int stride, int exist, int HS) {
    constexpr int PIECES = D / 8, ROWS_AT_ONCE = FLASH_THREADS / PIECES;  // a multiple of 8: the same swizzle
    int row = (int)threadIdx.x / PIECES, piece = (int)threadIdx.x % PIECES;
    uint32_t at = flash_address<D>(tile, row, piece);
    x += (size_t)row * (size_t)stride + piece * 8;
    exist = piece * 8 < HS ? exist - row : 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_AT_ONCE, x += ROWS_AT_ONCE * stride)
        cp_async_cg_16(at + flash_tile_bytes<D>(i), x, i < exist);
}

// Start loading the tiles of K and V of the next step, from `k` on, into the other half of `tiles`. V is C elements
// further in each row.
template <int D>
__device__ __forceinline__ void flash_load_next(uint32_t next, const floatX* k, int C, int stride, int exist, int HS) {
    flash_load<D, FLASH_TILE>(next, k, stride, exist, HS);
    flash_load<D, FLASH_TILE>(next + flash_tile_bytes<D>(FLASH_TILE), k + C, stride, exist, HS);
}

// This lane's address for ldmatrix of the 16 x 16 block at the tile's origin, whose four matrices come in one of two
// orders: rows first (left operands, and transposed right operands), or columns first (right operands whose columns are
// the tile's rows). For other blocks: exclusive-or the column's piece << 4, add the row's bytes.
template <int D> __device__ inline uint32_t flash_lane_rows_first(uint32_t tile) {
    int lane = threadIdx.x % WARP;
    return flash_address<D>(tile, lane & 15, lane >> 4);
}

template <int D> __device__ inline uint32_t flash_lane_columns_first(uint32_t tile) {
    int lane = threadIdx.x % WARP;
    return flash_address<D>(tile, (lane & 7) | (lane >> 4) << 3, lane >> 3 & 1);
}

// c [16 M, 8 COLUMNS] += a b^T: a is a tile's rows from a_row on, b another tile's rows from b_row on. `a` and `b` are
// this lane's addresses, a rows first, b columns first.
template <int D, int M, int COLUMNS>
__device__ inline void flash_product_nt(float (&c)[M][COLUMNS][4], uint32_t a, int a_row, uint32_t b, int b_row) {
    constexpr uint32_t ROW = D * sizeof(floatX);
    asm volatile("" : "+r"(a), "+r"(b));  // else the compiler keeps the addresses of all k in registers
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t x[M][4], y[4];
#pragma unroll
        for (int m = 0; m < M; m++) ldmatrix_x4(x[m], (a ^ (uint32_t)k << 5) + (uint32_t)(a_row + 16 * m) * ROW);
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 2) {
            ldmatrix_x4(y, (b ^ (uint32_t)k << 5) + (uint32_t)(b_row + 8 * n) * ROW);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_m16n8k16(c[m][n], x[m], y[0], y[1]);
                mma_m16n8k16(c[m][n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

// c [16 M, D] += p b: p [16 M, 8 COLUMNS] is rounded to floatX. b is a tile's rows from b_row on; `b` is this lane's
// address, rows first.
template <int D, int M, int COLUMNS>
__device__ inline void flash_product_nn(float (&c)[M][D / 8][4], const float (&p)[M][COLUMNS][4], uint32_t b,
                                        int b_row) {
    constexpr uint32_t ROW = D * sizeof(floatX);
    asm volatile("" : "+r"(b));
#pragma unroll
    for (int k = 0; k < COLUMNS / 2; k++) {
        uint32_t x[M][4], y[4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = &p[m][2 * k + i / 2][2 * (i % 2)];
                x[m][i] = pack_floatx2(pair[0], pair[1]);
            }
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            ldmatrix_x4_trans(y, (b ^ (uint32_t)n << 4) + (uint32_t)(b_row + 16 * k) * ROW);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_m16n8k16(c[m][n], x[m], y[0], y[1]);
                mma_m16n8k16(c[m][n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

// Write the warp's rows of a result to global memory. They pass through the warp's rows of `tile`, no longer in use, so
// that a lane writes 16 bytes instead of 4.
template <int D, int M>
__device__ inline void flash_store(floatX* x, size_t stride, int exist, int HS, const float (&c)[M][D / 8][4],
                                   uint32_t tile, int row) {
    constexpr int PIECES = D / 8;
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < PIECES; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                st_shared_b32(flash_address<D>(tile, row + 16 * m + 8 * half + g, n) + 4 * t,
                              pack_floatx2(c[m][n][2 * half], c[m][n][2 * half + 1]));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * M * PIECES; i += WARP) {
        int r = row + (i + lane) / PIECES, piece = lane % PIECES;
        int4 v = ld_shared_v4(flash_address<D>(tile, r, piece));
        if (r < exist && piece * 8 < HS) *(int4*)(x + (size_t)r * stride + piece * 8) = v;
    }
}

// ---------------------------------------------------------------------------------------------------------
// Online softmax: a row of scores is processed tile by tile, with a running maximum and a running sum of exponentials
// relative to it. The scores are fragments of mma.sync or wgmma.
//
//   new_max = max(row_max, max over the tile of s)
//   rescale = exp(row_max - new_max)                     the factor for earlier sums
//   s       = exp(s - new_max)
//   row_sum = row_sum * rescale + sum over the tile of s
//
// Four adjacent lanes hold a row of a fragment; c[n][2 half] and c[n][2 half + 1] are elements of row g + 8 half
// (ptx/mma.cuh). row_sum covers this lane's columns only: quad_sum() adds the four lanes' sums at the end.
// Numerics: fp32, with base-2 exponentials. Scores are multiplied by `scale`, log2(e) / sqrt(HS), and 2^x is the
// hardware's ex2 (relative error 2^-22, far below floatX's rounding).
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.
#define LOG2_E 1.44269504f

// Over the four lanes of a row.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// The maximum of `max` and the row's scores.
template <int COLUMNS> __device__ __forceinline__ float row_max_of(const float (&s)[COLUMNS][4], int half, float max) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) max = fmaxf(max, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    return quad_max(max);
}

// s = 2^(s * scale - shift) for the row. Returns the sum of this lane's elements.
template <int COLUMNS>
__device__ __forceinline__ float row_exp2(float (&s)[COLUMNS][4], int half, float scale, float shift) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; i++) {
            s[n][i] = ex2_approx(fmaf(s[n][i], scale, -shift));
            sum += s[n][i];
        }
    return sum;
}

// ---------------------------------------------------------------------------------------------------------
// Masks

// s = -infinity where a query does not attend to a key. `query` is the warp's first, k0 the first key.
template <Mask mask, int M, int COLUMNS>
__device__ inline void flash_mask(float (&s)[M][COLUMNS][4], int query, int k0, int T) {
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    if (k0 + 8 * COLUMNS > T || (mask == CAUSAL && k0 + 8 * COLUMNS - 1 > query)) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < COLUMNS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int key = k0 + 8 * n + 2 * t + i % 2;
                    if (key >= T || (mask == CAUSAL && key > query + 16 * m + 8 * (i / 2) + g)) s[m][n][i] = -INFINITY;
                }
    }
}

// The dropout bits of c [16, 8 COLUMNS]. `row` is its first row in the batch; `column` is its first column in the
// sequence. A row's columns are in one word. Bit 8 n + i % 2 of keep[i / 2] is that of c[n][i].
__device__ inline void flash_dropout_bits(uint32_t (&keep)[2], const FlashParams& z, int head, int row, int column) {
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const uint32_t* at =
        z.dropout_bits + draw_at(head, column, row + g, z.max_seqlen, z.N) + column % DRAW_COLUMNS / 32;
#pragma unroll
    for (int half = 0; half < 2; half++) keep[half] = at[half * 8 * (DRAW_COLUMNS / 32)] >> (column % 32 + 2 * t);
}

__device__ inline bool flash_is_kept(const uint32_t (&keep)[2], int n, int i) {
    return keep[i / 2] >> (8 * n + i % 2) & 1;
}

// ---------------------------------------------------------------------------------------------------------
// Launches

// Scratch: dropout's bits; in the backward pass also row statistics.
static inline size_t flash_bits_bytes(int N, int count, int longest, AttentionShape shape) {
    return shape.dropout.threshold ? draw_bytes(N, count, longest, shape.NH) : 0;
}

// The bits for the forward pass; NULL without dropout.
static inline const uint32_t* flash_draw_by_query(const Sequences* s, AttentionShape shape, Context* ctx) {
    if (!shape.dropout.threshold) return NULL;
    uint32_t* bits = (uint32_t*)device_scratch(ctx, flash_bits_bytes(s->rows, s->count, s->max_length, shape));
    draw_by_query(bits, s, shape, ctx);
    return bits;
}

static inline size_t flash_row_stats_bytes(int N, int NH) { return (size_t)NH * (size_t)N * sizeof(FlashRowStats); }

static inline FlashParams flash_params(const Sequences* s, AttentionShape shape, const uint32_t* bits) {
    FlashParams z;
    z.cu_seqlens = s->cu_seqlens;
    z.N = s->rows;
    z.NH = shape.NH;
    z.HS = shape.HS;
    z.max_seqlen = s->max_length;
    z.softmax_scale = (float)(1 / sqrt((double)shape.HS));
    z.keep_scale = shape.dropout.scale;
    z.dropout_bits = bits;
    return z;
}

enum { FLASH_GRID_LIMIT = 65535 };  // of the grid's second and third dimension

// Launch with `bytes` of shared memory; a block takes `rows` rows of a sequence.
template <typename... Arguments>
static void flash_launch(void (*kernel)(Arguments...), const Sequences* s, int NH, int rows, size_t bytes, Context* ctx,
                         Arguments... arguments) {
    if (NH > FLASH_GRID_LIMIT || s->count > FLASH_GRID_LIMIT)
        die(USAGE, "flash attention takes %d sequences and as many heads in a batch, not %d and %d; lower -b",
            FLASH_GRID_LIMIT, s->count, NH);
    dim3 grid((unsigned)((s->max_length + rows - 1) / rows), (unsigned)NH, (unsigned)s->count);
    kernel_allow_shared(kernel, bytes, ctx);
    kernel<<<grid, FLASH_THREADS, bytes, ctx->stream>>>(arguments...);
    cudaCheck(cudaGetLastError());
}

// The template arguments of kernels, as a type.
template <int CHANNELS, Mask mask, bool dropped> struct FlashVariant {
    static constexpr int D = CHANNELS;
    static constexpr Mask MASK = mask;
    static constexpr bool DROPPED = dropped;
};

template <int D, Mask MASK, typename Launch> static void flash_dispatch_dropout(AttentionShape shape, Launch launch) {
    if constexpr (!attention_compiles(MASK)) die(FAILED, "attention: this program was compiled for the other mask");
    else if (shape.dropout.threshold > 0) launch(FlashVariant<D, MASK, true>());
    else launch(FlashVariant<D, MASK, false>());
}

// Call `launch` with the variant for the shape.
template <typename Launch> static void flash_dispatch(AttentionShape shape, Launch launch) {
    if (shape.HS <= 64 && shape.mask == CAUSAL) flash_dispatch_dropout<64, CAUSAL>(shape, launch);
    else if (shape.HS <= 64) flash_dispatch_dropout<64, FULL>(shape, launch);
    else if (shape.mask == CAUSAL) flash_dispatch_dropout<128, CAUSAL>(shape, launch);
    else flash_dispatch_dropout<128, FULL>(shape, launch);
}

#endif
