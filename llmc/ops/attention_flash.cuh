/* Attention in tiles that never leave the chip, on tensor cores (mma.sync, sm_80 and later), for bf16 and fp16.
 *
 * Forward: a block takes 128 queries of one head of one sequence and walks over tiles of 64 keys, keeping for each
 * query the largest score so far, the sum of exponentials and the output, both relative to it.
 * Backward, two kernels that compute P and ds again, so that no sum crosses blocks and nothing needs an order:
 *   query_gradient: a block takes queries, walks over keys, sums dQ; leaves (lse, delta) of its rows for the other;
 *   key_gradient:   a block takes keys, walks over queries, sums dK and dV. It computes scores transposed (a row is a
 *                   key), so that P and ds are left operands in the very registers in which they were made.
 * In all three a warp owns rows (16 or 32), and probabilities never touch shared memory.
 *
 * Numerics: products take floatX and sum in fp32; the softmax is fp32 in powers of two, 2^x by the hardware's ex2
 * (relative error 2^-22, far below floatX's rounding); P and ds are rounded to floatX for the products they enter.
 * Loading: 16-byte asynchronous copies, the next tile while this one is worked on. A head size between the tiles' 64
 * and 128 channels is filled up with zeros; so are rows past a sequence's end.
 *
 * Fragments of m16n8k16, lane = 4 g + t: c[0], c[1] are row g, columns 2t, 2t + 1; c[2], c[3] are row g + 8. Two
 * neighbouring c tiles, rounded, are one a operand.
 * Source: Dao, "FlashAttention-2", arXiv 2307.08691, for the loop over keys inside, and for the split by rows. */
#ifndef LLMC_ATTENTION_FLASH_CUH
#define LLMC_ATTENTION_FLASH_CUH

#include "attention_dropout.cuh"

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)
#define ATTENTION_FLASH
#define FLASH_LOG2_E 1.44269504f

enum {
    FLASH_WARPS = 4,
    FLASH_THREADS = FLASH_WARPS * WARP,
    FLASH_STEP = 64,  // rows of the tiles that a block walks over
    FLASH_CHUNK = 32  // of these, how many the backward kernels take at a time: registers are scarce there
};

// By channels of a tile: how many times 16 rows a warp owns, and blocks that share a multiprocessor. More rows read
// shared memory less often, fewer leave registers for more blocks.
template <int D> struct FlashTiles {
    static constexpr int FORWARD_ROWS = 2, FORWARD_CHUNK = D == 64 ? 64 : 32, FORWARD_BLOCKS = 2;
    static constexpr int QUERY_ROWS = D == 64 ? 2 : 1, QUERY_BLOCKS = 2;
    // Two groups of rows save a third of the reads of shared memory, but with dropout they spill.
    static constexpr int KEY_ROWS = D == 64 ? 2 : 1, KEY_BLOCKS = 2;
    static constexpr int KEY_ROWS_DROPPED = 1, KEY_BLOCKS_DROPPED = D == 64 ? 3 : 2;
    static constexpr int FORWARD_CHUNK_DROPPED = D == 64 ? 32 : 16;
    // Measured on sm_90 only. For other architectures ptxas needs a few registers more and would spill at 32.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
    static constexpr int KEY_CHUNK = 16;
#else
    static constexpr int KEY_CHUNK = FLASH_CHUNK;
#endif
};

// What the three kernels know besides their tensors.
typedef struct {
    const int* cu_seqlens;
    int N, NH, HS, longest;
    float factor;          // 1 / sqrt(HS)
    float kept;            // what dropout multiplies the pairs with that it keeps
    const uint32_t* bits;  // which these are
} FlashArguments;

// lse in powers of two, and delta, of one query.
typedef float2 FlashRow;

// ---------------------------------------------------------------------------------------------------------
// Instructions

// 2^x; 0 for -infinity and for results below the normal numbers.
__device__ inline float flash_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline uint32_t flash_pack(float low, float high) {
    uint32_t bits;
#ifdef PRECISION_BF16
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
    __half2 pair = __floats2half2_rn(low, high);
#endif
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

// c [16, 8] += a [16, 16] b [16, 8]
__device__ inline void flash_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef PRECISION_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices, whose rows lie at the addresses that lanes 0-7, 8-15, 16-23, 24-31 give.
__device__ inline void flash_ldmatrix(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline void flash_ldmatrix_transposed(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// Copy 16 (or 8) bytes to shared memory without waiting; zeros where there is nothing to copy.
__device__ inline void flash_copy16(uint32_t shared, const void* global, int exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(exists ? 16 : 0)
                 : "memory");
}

__device__ inline void flash_copy8(uint32_t shared, const void* global, int exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(exists ? 8 : 0)
                 : "memory");
}

// Wait until this thread's copies have arrived; the barrier after it makes all threads' copies visible.
__device__ inline void flash_wait(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------------------
// Tiles in shared memory: rows of D channels, 16-byte pieces swapped by the row's number (piece ^ row % 8), so that
// eight rows' pieces of one column lie in different banks. Tiles start on multiples of 1024 bytes.

template <int D> HOST_DEVICE constexpr uint32_t flash_tile_bytes(int rows) {
    return (uint32_t)rows * D * sizeof(floatX);
}

template <int D> __device__ inline uint32_t flash_at(uint32_t tile, int row, int piece) {
    return tile + (uint32_t)row * D * (uint32_t)sizeof(floatX) + (uint32_t)((piece ^ (row & 7)) << 4);
}

// Start copying ROWS rows, `stride` elements apart, of which `exist` are there.
template <int D, int ROWS>
__device__ inline void flash_load(uint32_t tile, const floatX* x, int stride, int exist, int HS) {
    constexpr int PIECES = D / 8, ROWS_AT_ONCE = FLASH_THREADS / PIECES;  // a multiple of 8: pieces swap alike
    int row = (int)threadIdx.x / PIECES, piece = (int)threadIdx.x % PIECES;
    uint32_t at = flash_at<D>(tile, row, piece);
    x += (size_t)row * (size_t)stride + piece * 8;
    exist = piece * 8 < HS ? exist - row : 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_AT_ONCE, x += ROWS_AT_ONCE * stride)
        flash_copy16(at + flash_tile_bytes<D>(i), x, i < exist);
}

// The lane's address for the four matrices of 16 x 16 elements at the tile's origin, which go to ldmatrix in one of
// two orders: down the rows first (a operands, and transposed b operands), or along the columns first (b operands
// whose columns are the tile's rows). Other squares: exclusive-or the column's piece << 4, add the row's bytes.
template <int D> __device__ inline uint32_t flash_lane_down(uint32_t tile) {
    int lane = threadIdx.x % WARP;
    return flash_at<D>(tile, lane & 15, lane >> 4);
}

template <int D> __device__ inline uint32_t flash_lane_along(uint32_t tile) {
    int lane = threadIdx.x % WARP;
    return flash_at<D>(tile, (lane & 7) | (lane >> 4) << 3, lane >> 3 & 1);
}

// c [16 M, 8 COLUMNS] += a times the transpose of the tile's rows `row` .. `row` + 8 COLUMNS - 1. `a` are the rows of
// another tile from a_row on, `down` and `along` the lane's addresses.
template <int D, int M, int COLUMNS>
__device__ inline void flash_multiply_rows(float (&c)[M][COLUMNS][4], uint32_t down, int a_row, uint32_t along,
                                           int row) {
    constexpr uint32_t ROW = D * sizeof(floatX);
    asm volatile("" : "+r"(down), "+r"(along));  // else addresses of all k are kept through the outer loop
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++) flash_ldmatrix(a[m], (down ^ (uint32_t)k << 5) + (uint32_t)(a_row + 16 * m) * ROW);
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 2) {
            flash_ldmatrix(b, (along ^ (uint32_t)k << 5) + (uint32_t)(row + 8 * n) * ROW);
#pragma unroll
            for (int m = 0; m < M; m++) {
                flash_mma(c[m][n], a[m], b[0], b[1]);
                flash_mma(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// c [16 M, D] += p [16 M, 8 COLUMNS], rounded, times the tile's rows `row` .. `row` + 8 COLUMNS - 1.
template <int D, int M, int COLUMNS>
__device__ inline void flash_multiply_columns(float (&c)[M][D / 8][4], const float (&p)[M][COLUMNS][4], uint32_t down,
                                              int row) {
    constexpr uint32_t ROW = D * sizeof(floatX);
    asm volatile("" : "+r"(down));
#pragma unroll
    for (int k = 0; k < COLUMNS / 2; k++) {
        uint32_t a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = &p[m][2 * k + i / 2][2 * (i % 2)];
                a[m][i] = flash_pack(pair[0], pair[1]);
            }
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            flash_ldmatrix_transposed(b, (down ^ (uint32_t)n << 4) + (uint32_t)(row + 16 * k) * ROW);
#pragma unroll
            for (int m = 0; m < M; m++) {
                flash_mma(c[m][n], a[m], b[0], b[1]);
                flash_mma(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Write the warp's rows of a result to global memory, by way of its rows in `tile`, which nobody else uses any more:
// 16 bytes a lane instead of 4.
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
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(flash_at<D>(tile, row + 16 * m + 8 * half + g, n) + 4 * t),
                             "r"(flash_pack(c[m][n][2 * half], c[m][n][2 * half + 1]))
                             : "memory");
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * M * PIECES; i += WARP) {
        int r = row + (i + lane) / PIECES, piece = lane % PIECES;
        int4 v;
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(flash_at<D>(tile, r, piece))
                     : "memory");
        if (r < exist && piece * 8 < HS) *(int4*)(x + (size_t)r * stride + piece * 8) = v;
    }
}

// ---------------------------------------------------------------------------------------------------------
// What the kernels that take queries share, the forward one and that of dQ

// Scores of queries from `query` on by keys from k0 on: minus infinity where a query does not see a key.
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

// ---------------------------------------------------------------------------------------------------------
// Dropout

// Decisions on c [16, 8 COLUMNS], whose first row of the batch and column of the sequence are given; its columns lie in
// one word. Bit 8 n + i % 2 of keep[i / 2] is c[n][i]'s.
__device__ inline void flash_keep(uint32_t (&keep)[2], const FlashArguments& z, int head, int row, int column) {
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const uint32_t* at = z.bits + draw_at(head, column, row + g, z.longest, z.N) + column % DRAW_COLUMNS / 32;
#pragma unroll
    for (int half = 0; half < 2; half++) keep[half] = at[half * 8 * (DRAW_COLUMNS / 32)] >> (column % 32 + 2 * t);
}

__device__ inline bool flash_keeps(const uint32_t (&keep)[2], int n, int i) {
    return keep[i / 2] >> (8 * n + i % 2) & 1;
}

// ---------------------------------------------------------------------------------------------------------
// Forward. Grid: (tiles of queries of the longest sequence, heads, sequences). CAUSAL tiles start from the last one,
// which has the most keys: short ones fill the end.

template <int D, Mask mask, bool dropped>
__global__ void __launch_bounds__(FLASH_THREADS, FlashTiles<D>::FORWARD_BLOCKS)
    attention_forward_flash_kernel(floatX* out, float* lse, const floatX* qkv, FlashArguments z) {
    constexpr int M = FlashTiles<D>::FORWARD_ROWS, QUERIES = FLASH_WARPS * 16 * M, KEYS = FLASH_STEP;
    constexpr int CHUNK = dropped ? FlashTiles<D>::FORWARD_CHUNK_DROPPED : FlashTiles<D>::FORWARD_CHUNK,
                  COLUMNS = CHUNK / 8;
    constexpr uint32_t STEP_BYTES = flash_tile_bytes<D>(KEYS);
    extern __shared__ __align__(1024) unsigned char flash_shared[];
    uint32_t q_tile = (uint32_t)__cvta_generic_to_shared(flash_shared),
             kv_tiles = q_tile + flash_tile_bytes<D>(QUERIES);

    int head = blockIdx.y, start = z.cu_seqlens[blockIdx.z], T = z.cu_seqlens[blockIdx.z + 1] - start;
    int q0 = QUERIES * (int)(mask == CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (q0 >= T) return;
    int C = z.NH * z.HS, stride = 3 * C;
    const floatX* q = qkv + (size_t)start * stride + (size_t)head * z.HS;
    int warp_row = threadIdx.x / WARP * 16 * M, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int query = q0 + warp_row;  // the warp's first
    int steps = ((mask == CAUSAL ? min(T, q0 + QUERIES) : T) + KEYS - 1) / KEYS;
    float scale = z.factor * FLASH_LOG2_E;  // of scores, to powers of two

    flash_load<D, QUERIES>(q_tile, q + (size_t)q0 * stride, stride, T - q0, z.HS);
    flash_load<D, KEYS>(kv_tiles, q + C, stride, T, z.HS);
    flash_load<D, KEYS>(kv_tiles + STEP_BYTES, q + 2 * C, stride, T, z.HS);

    float o[M][D / 8][4] = {}, largest[M][2], sum[M][2] = {};
#pragma unroll
    for (int m = 0; m < M; m++) largest[m][0] = largest[m][1] = -INFINITY;

    for (int step = 0; step < steps; step++) {
        uint32_t k_tile = kv_tiles + (uint32_t)(step & 1) * 2 * STEP_BYTES, v_tile = k_tile + STEP_BYTES;
        flash_wait();
        __syncthreads();  // this step's tiles are there, and nobody reads the other ones any more
        if (step + 1 < steps) {
            uint32_t next = kv_tiles + (uint32_t)(~step & 1) * 2 * STEP_BYTES;
            int k1 = (step + 1) * KEYS;
            const floatX* k = q + C + (size_t)k1 * stride;
            flash_load<D, KEYS>(next, k, stride, T - k1, z.HS);
            flash_load<D, KEYS>(next + STEP_BYTES, k + C, stride, T - k1, z.HS);
        }
        if (query >= T) continue;
#pragma unroll
        for (int chunk = 0; chunk < KEYS; chunk += CHUNK) {
            int k0 = step * KEYS + chunk;
            if (k0 >= T || (mask == CAUSAL && k0 > query + 16 * M - 1)) continue;  // nothing here for this warp

            uint32_t keep[M][2];
            if (dropped)
#pragma unroll
                for (int m = 0; m < M; m++) flash_keep(keep[m], z, head, start + query + 16 * m, k0);
            float s[M][COLUMNS][4] = {};
            flash_multiply_rows<D, M, COLUMNS>(s, flash_lane_down<D>(q_tile), warp_row, flash_lane_along<D>(k_tile),
                                               chunk);
            flash_mask<mask>(s, query, k0, T);
            // Key 0 is visible to every query, so after the first chunk `largest` is a number.
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float top = largest[m][half];
#pragma unroll
                    for (int n = 0; n < COLUMNS; n++) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
                    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
                    float shrink = flash_exp2((largest[m][half] - top) * scale), shift = top * scale, partial = 0;
                    largest[m][half] = top;
#pragma unroll
                    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
                        for (int i = 2 * half; i < 2 * half + 2; i++) {
                            s[m][n][i] = flash_exp2(fmaf(s[m][n][i], scale, -shift));
                            partial += s[m][n][i];
                        }
                    sum[m][half] = sum[m][half] * shrink + partial;  // of this lane's columns
#pragma unroll
                    for (int n = 0; n < D / 8; n++) {
                        o[m][n][2 * half] *= shrink;
                        o[m][n][2 * half + 1] *= shrink;
                    }
                }
            if (dropped) {
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            if (!flash_keeps(keep[m], n, i)) s[m][n][i] = 0;
                    }
            }
            flash_multiply_columns<D, M, COLUMNS>(o, s, flash_lane_down<D>(v_tile), chunk);
        }
    }
    if (query >= T) return;

#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = sum[m][half];
            total += __shfl_xor_sync(ALL_LANES, total, 1);
            total += __shfl_xor_sync(ALL_LANES, total, 2);
            int row = query + 16 * m + 8 * half + g;
            if (t == 0 && row < T) lse[(size_t)head * z.N + start + row] = largest[m][half] * z.factor + logf(total);
            float inverse = (dropped ? z.kept : 1.0f) / total;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                o[m][n][2 * half] *= inverse;
                o[m][n][2 * half + 1] *= inverse;
            }
        }
    flash_store<D, M>(out + (size_t)(start + q0) * C + (size_t)head * z.HS, C, T - q0, z.HS, o, q_tile, warp_row);
}

// ---------------------------------------------------------------------------------------------------------
// Backward

// dQ, and rows [NH, N]. Grid: (tiles of queries of the longest sequence, heads, sequences), as in the forward pass.
template <int D, Mask mask, bool dropped>
__global__ void __launch_bounds__(FLASH_THREADS, FlashTiles<D>::QUERY_BLOCKS)
    attention_backward_query_kernel(floatX* dqkv, FlashRow* rows, const floatX* dout, const floatX* qkv,
                                    const floatX* out, const float* lse, FlashArguments z) {
    constexpr int M = FlashTiles<D>::QUERY_ROWS, QUERIES = FLASH_WARPS * 16 * M, KEYS = FLASH_STEP, CHUNK = FLASH_CHUNK;
    constexpr int COLUMNS = CHUNK / 8;
    constexpr uint32_t STEP_BYTES = flash_tile_bytes<D>(KEYS);
    extern __shared__ __align__(1024) unsigned char flash_shared[];
    uint32_t q_tile = (uint32_t)__cvta_generic_to_shared(flash_shared), g_tile = q_tile + flash_tile_bytes<D>(QUERIES);
    uint32_t kv_tiles = g_tile + flash_tile_bytes<D>(QUERIES);

    int head = blockIdx.y, start = z.cu_seqlens[blockIdx.z], T = z.cu_seqlens[blockIdx.z + 1] - start;
    int q0 = QUERIES * (int)(mask == CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (q0 >= T) return;
    int C = z.NH * z.HS, stride = 3 * C, channel = head * z.HS;
    const floatX* q = qkv + (size_t)start * stride + channel;
    int warp_row = threadIdx.x / WARP * 16 * M, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int query = q0 + warp_row;
    int steps = ((mask == CAUSAL ? min(T, q0 + QUERIES) : T) + KEYS - 1) / KEYS;
    float scale = z.factor * FLASH_LOG2_E;

    flash_load<D, QUERIES>(q_tile, q + (size_t)q0 * stride, stride, T - q0, z.HS);
    flash_load<D, QUERIES>(g_tile, dout + (size_t)(start + q0) * C + channel, C, T - q0, z.HS);
    flash_load<D, KEYS>(kv_tiles, q + C, stride, T, z.HS);
    flash_load<D, KEYS>(kv_tiles + STEP_BYTES, q + 2 * C, stride, T, z.HS);

    // Meanwhile the four lanes of a row compute its delta. Rows past the end: no number matters, but all are finite.
    FlashRow row[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = query + 16 * m + 8 * half + g;
            size_t at = (size_t)(start + i) * C + channel;
            float delta = 0;
            for (int c = 8 * t; c < z.HS && i < T; c += 32) {
                Vector<floatX> x = load128(dout + at + c), y = load128(out + at + c);
#pragma unroll
                for (int j = 0; j < 8; j++) delta += to_float(x.v[j]) * to_float(y.v[j]);
            }
            delta += __shfl_xor_sync(ALL_LANES, delta, 1);
            delta += __shfl_xor_sync(ALL_LANES, delta, 2);
            size_t stat = (size_t)head * z.N + start + i;
            row[m][half].x = i < T ? lse[stat] * FLASH_LOG2_E : 0;
            row[m][half].y = delta;
            if (t == 0 && i < T) rows[stat] = row[m][half];
        }

    float dq[M][D / 8][4] = {};
    for (int step = 0; step < steps; step++) {
        uint32_t k_tile = kv_tiles + (uint32_t)(step & 1) * 2 * STEP_BYTES, v_tile = k_tile + STEP_BYTES;
        flash_wait();
        __syncthreads();
        if (step + 1 < steps) {
            uint32_t next = kv_tiles + (uint32_t)(~step & 1) * 2 * STEP_BYTES;
            int k1 = (step + 1) * KEYS;
            const floatX* k = q + C + (size_t)k1 * stride;
            flash_load<D, KEYS>(next, k, stride, T - k1, z.HS);
            flash_load<D, KEYS>(next + STEP_BYTES, k + C, stride, T - k1, z.HS);
        }
        if (query >= T) continue;
#pragma unroll
        for (int chunk = 0; chunk < KEYS; chunk += CHUNK) {
            int k0 = step * KEYS + chunk;
            if (k0 >= T || (mask == CAUSAL && k0 > query + 16 * M - 1)) continue;
            uint32_t keep[M][2];
            if (dropped)
#pragma unroll
                for (int m = 0; m < M; m++) flash_keep(keep[m], z, head, start + query + 16 * m, k0);
            float s[M][COLUMNS][4] = {}, ds[M][COLUMNS][4] = {};
            flash_multiply_rows<D, M, COLUMNS>(s, flash_lane_down<D>(q_tile), warp_row, flash_lane_along<D>(k_tile),
                                               chunk);
            flash_multiply_rows<D, M, COLUMNS>(ds, flash_lane_down<D>(g_tile), warp_row, flash_lane_along<D>(v_tile),
                                               chunk);
            flash_mask<mask>(s, query, k0, T);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float p = flash_exp2(fmaf(s[m][n][i], scale, -row[m][i / 2].x)), dp = ds[m][n][i];
                        if (dropped) dp = flash_keeps(keep[m], n, i) ? dp * z.kept : 0;
                        ds[m][n][i] = p * (dp - row[m][i / 2].y);
                    }
                }
            flash_multiply_columns<D, M, COLUMNS>(dq, ds, flash_lane_down<D>(k_tile), chunk);
        }
    }
    if (query >= T) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) dq[m][n][i] *= z.factor;
    flash_store<D, M>(dqkv + (size_t)(start + q0) * stride + channel, stride, T - q0, z.HS, dq, q_tile, warp_row);
}

// dK and dV, from what the query kernel left in rows. Grid: (tiles of keys of the longest sequence, heads,
// sequences). A query past the end has zeros everywhere: P = 1 there, but it multiplies nothing else.
template <int D, Mask mask, bool dropped>
__global__ void __launch_bounds__(FLASH_THREADS,
                                  dropped ? FlashTiles<D>::KEY_BLOCKS_DROPPED : FlashTiles<D>::KEY_BLOCKS)
    attention_backward_key_kernel(floatX* dqkv, const floatX* dout, const floatX* qkv, const FlashRow* rows,
                                  FlashArguments z) {
    constexpr int M = dropped ? FlashTiles<D>::KEY_ROWS_DROPPED : FlashTiles<D>::KEY_ROWS, KEYS = FLASH_WARPS * 16 * M,
                  QUERIES = FLASH_STEP, CHUNK = dropped ? FLASH_CHUNK : FlashTiles<D>::KEY_CHUNK;
    constexpr int COLUMNS = CHUNK / 8;
    constexpr uint32_t STEP_BYTES = flash_tile_bytes<D>(QUERIES), ROWS_BYTES = QUERIES * sizeof(FlashRow);
    extern __shared__ __align__(1024) unsigned char flash_shared[];
    uint32_t k_tile = (uint32_t)__cvta_generic_to_shared(flash_shared), v_tile = k_tile + flash_tile_bytes<D>(KEYS);
    uint32_t qg_tiles = v_tile + flash_tile_bytes<D>(KEYS), row_tiles = qg_tiles + 4 * STEP_BYTES;

    int head = blockIdx.y, start = z.cu_seqlens[blockIdx.z], T = z.cu_seqlens[blockIdx.z + 1] - start;
    int k0 = KEYS * (int)blockIdx.x;
    if (k0 >= T) return;
    size_t C = (size_t)z.NH * z.HS, stride = 3 * C, channel = (size_t)head * z.HS;
    const floatX* q = qkv + (size_t)start * stride + channel;
    const floatX* dy = dout + (size_t)start * C + channel;
    rows += (size_t)head * z.N + start;
    int warp_row = threadIdx.x / WARP * 16 * M, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int key = k0 + warp_row;  // the warp's first
    int step = mask == CAUSAL ? k0 / QUERIES : 0, steps = (T + QUERIES - 1) / QUERIES;
    float scale = z.factor * FLASH_LOG2_E;

    // Start copying step i's Q, dout and rows.
    auto load = [&](int i) {
        uint32_t q_tile = qg_tiles + (uint32_t)(i & 1) * 2 * STEP_BYTES;
        int first = i * QUERIES, at = (int)threadIdx.x;
        flash_load<D, QUERIES>(q_tile, q + (size_t)first * stride, stride, T - first, z.HS);
        flash_load<D, QUERIES>(q_tile + STEP_BYTES, dy + (size_t)first * C, C, T - first, z.HS);
        if (at < QUERIES) {
            bool exists = first + at < T;
            flash_copy8(row_tiles + (uint32_t)(i & 1) * ROWS_BYTES + (uint32_t)at * sizeof(FlashRow),
                        exists ? rows + first + at : rows, exists);
        }
    };
    flash_load<D, KEYS>(k_tile, q + C + (size_t)k0 * stride, stride, T - k0, z.HS);
    flash_load<D, KEYS>(v_tile, q + 2 * C + (size_t)k0 * stride, stride, T - k0, z.HS);
    load(step);

    float dk[M][D / 8][4] = {}, dv[M][D / 8][4] = {};
    for (; step < steps; step++) {
        uint32_t q_tile = qg_tiles + (uint32_t)(step & 1) * 2 * STEP_BYTES, g_tile = q_tile + STEP_BYTES;
        uint32_t row_tile = row_tiles + (uint32_t)(step & 1) * ROWS_BYTES;
        flash_wait();
        __syncthreads();
        if (step + 1 < steps) load(step + 1);
        if (key >= T) continue;
#pragma unroll
        for (int chunk = 0; chunk < QUERIES; chunk += CHUNK) {
            int query = step * QUERIES + chunk;
            if (query >= T || (mask == CAUSAL && query + CHUNK - 1 < key)) continue;
            uint32_t keep[M][2];
            if (dropped)
#pragma unroll
                for (int m = 0; m < M; m++) flash_keep(keep[m], z, head, start + key + 16 * m, query);
            float p[M][COLUMNS][4] = {}, ds[M][COLUMNS][4] = {};
            flash_multiply_rows<D, M, COLUMNS>(p, flash_lane_down<D>(k_tile), warp_row, flash_lane_along<D>(q_tile),
                                               chunk);
            flash_multiply_rows<D, M, COLUMNS>(ds, flash_lane_down<D>(v_tile), warp_row, flash_lane_along<D>(g_tile),
                                               chunk);
            bool diagonal = mask == CAUSAL && query < key + 16 * M - 1;
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                float lse[2], delta[2];  // of queries query + 8 n + 2 t and the next
                asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                             : "=f"(lse[0]), "=f"(delta[0]), "=f"(lse[1]), "=f"(delta[1])
                             : "r"(row_tile + (uint32_t)(chunk + 8 * n + 2 * t) * (uint32_t)sizeof(FlashRow))
                             : "memory");
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float e = flash_exp2(fmaf(p[m][n][i], scale, -lse[i % 2])), dp = ds[m][n][i];
                        if (diagonal && key + 16 * m + 8 * (i / 2) + g > query + 8 * n + 2 * t + i % 2) e = 0;
                        bool kept = !dropped || flash_keeps(keep[m], n, i);
                        p[m][n][i] = kept ? e : 0;
                        if (dropped) dp = kept ? dp * z.kept : 0;
                        ds[m][n][i] = e * (dp - delta[i % 2]);
                    }
                }
            }
            flash_multiply_columns<D, M, COLUMNS>(dv, p, flash_lane_down<D>(g_tile), chunk);
            flash_multiply_columns<D, M, COLUMNS>(dk, ds, flash_lane_down<D>(q_tile), chunk);
        }
    }
    if (key >= T) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dk[m][n][i] *= z.factor;
                if (dropped) dv[m][n][i] *= z.kept;
            }
    floatX* to = dqkv + (size_t)(start + k0) * stride + channel;
    flash_store<D, M>(to + C, stride, T - k0, z.HS, dk, k_tile, warp_row);
    flash_store<D, M>(to + 2 * C, stride, T - k0, z.HS, dv, v_tile, warp_row);
}

// ---------------------------------------------------------------------------------------------------------
// Launches

// Scratch: dropout's bits, and in the backward pass the rows.
static inline size_t flash_bits_bytes(const Sequences* s, AttentionShape shape) {
    return shape.dropout.threshold ? draw_bytes(s->rows, s->max_length, shape.NH) : 0;
}

static inline size_t flash_rows_bytes(int N, int NH) { return (size_t)NH * (size_t)N * sizeof(FlashRow); }

static inline FlashArguments flash_arguments(const Sequences* s, AttentionShape shape, const uint32_t* bits) {
    FlashArguments z;
    z.cu_seqlens = s->cu_seqlens;
    z.N = s->rows;
    z.NH = shape.NH;
    z.HS = shape.HS;
    z.longest = s->max_length;
    z.factor = (float)(1 / sqrt((double)shape.HS));
    z.kept = shape.dropout.scale;
    z.bits = bits;
    return z;
}

enum { FLASH_GRID_LIMIT = 65535 };  // of the grid's second and third dimension

// Launch with `bytes` of shared memory, for tiles of `rows` rows of the longest sequence.
template <typename... Arguments>
static void flash_launch(void (*kernel)(Arguments...), const Sequences* s, int NH, int rows, size_t bytes, Context* ctx,
                         Arguments... arguments) {
    if (NH > FLASH_GRID_LIMIT || s->count > FLASH_GRID_LIMIT)
        die(USAGE, "flash attention takes %d sequences and as many heads in a batch, not %d and %d; lower -b",
            FLASH_GRID_LIMIT, s->count, NH);
    dim3 grid((unsigned)((s->max_length + rows - 1) / rows), (unsigned)NH, (unsigned)s->count);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<grid, FLASH_THREADS, bytes, ctx->stream>>>(arguments...);
    cudaCheck(cudaGetLastError());
}

template <int D, Mask mask, bool dropped>
static void flash_forward_of(floatX* out, real* lse, const floatX* qkv, const Sequences* s, AttentionShape shape,
                             Context* ctx) {
    constexpr int QUERIES = FLASH_WARPS * 16 * FlashTiles<D>::FORWARD_ROWS;
    uint32_t* bits = dropped ? (uint32_t*)device_scratch(ctx, flash_bits_bytes(s, shape)) : NULL;
    if (dropped) draw_by_query(draw_arguments(bits, s, shape), ctx);
    flash_launch(attention_forward_flash_kernel<D, mask, dropped>, s, shape.NH, QUERIES,
                 flash_tile_bytes<D>(QUERIES + 4 * FLASH_STEP), ctx, out, lse, qkv, flash_arguments(s, shape, bits));
}

template <int D, Mask mask, bool dropped>
static void flash_backward_of(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const real* lse,
                              const Sequences* s, AttentionShape shape, Context* ctx) {
    constexpr int QUERIES = FLASH_WARPS * 16 * FlashTiles<D>::QUERY_ROWS;
    constexpr int KEYS = FLASH_WARPS * 16 * (dropped ? FlashTiles<D>::KEY_ROWS_DROPPED : FlashTiles<D>::KEY_ROWS);
    size_t bits_bytes = flash_bits_bytes(s, shape);
    uint32_t* bits = (uint32_t*)device_scratch(ctx, bits_bytes + flash_rows_bytes(s->rows, shape.NH));
    FlashRow* rows = (FlashRow*)((char*)bits + bits_bytes);
    FlashArguments z = flash_arguments(s, shape, bits);
    if (dropped) draw_by_query(draw_arguments(bits, s, shape), ctx);
    flash_launch(attention_backward_query_kernel<D, mask, dropped>, s, z.NH, QUERIES,
                 flash_tile_bytes<D>(2 * QUERIES + 4 * FLASH_STEP), ctx, dqkv, rows, dout, qkv, out, lse, z);
    if (dropped) draw_by_key(draw_arguments(bits, s, shape), ctx);
    flash_launch(attention_backward_key_kernel<D, mask, dropped>, s, z.NH, KEYS,
                 flash_tile_bytes<D>(2 * KEYS + 4 * FLASH_STEP) + 2 * FLASH_STEP * sizeof(FlashRow), ctx, dqkv, dout,
                 qkv, (const FlashRow*)rows, z);
}

// Call launch with the variant of a kernel that the shape asks for.
template <Mask mask, bool dropped> struct FlashVariant {
    static constexpr Mask MASK = mask;
    static constexpr bool DROPPED = dropped;
};

template <typename Launch> static void flash_variant(AttentionShape shape, Launch launch) {
    bool dropped = shape.dropout.threshold > 0;
    if (shape.mask == CAUSAL && dropped) launch(FlashVariant<CAUSAL, true>());
    else if (shape.mask == CAUSAL) launch(FlashVariant<CAUSAL, false>());
    else if (dropped) launch(FlashVariant<FULL, true>());
    else launch(FlashVariant<FULL, false>());
}

template <int D>
static void flash_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s, AttentionShape shape,
                          Context* ctx) {
    flash_variant(shape, [&](auto v) {
        flash_forward_of<D, decltype(v)::MASK, decltype(v)::DROPPED>(out, lse, qkv, s, shape, ctx);
    });
}

template <int D>
static void flash_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const real* lse,
                           const Sequences* s, AttentionShape shape, Context* ctx) {
    flash_variant(shape, [&](auto v) {
        flash_backward_of<D, decltype(v)::MASK, decltype(v)::DROPPED>(dqkv, dout, qkv, out, lse, s, shape, ctx);
    });
}

#endif
#endif
