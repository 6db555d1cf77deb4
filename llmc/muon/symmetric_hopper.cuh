/* Muon's symmetric matmuls on Hopper, for `count` matrices at once. Only tiles that touch the upper triangle are
 * computed, and each is stored twice.
 *
 *   d[i] [s, s] = alpha x[i] x[i]^T + beta d0[i]     x [s, k], or x^T is stored, [k, s] (is_tall); d0 symmetric, or NULL
 *
 * One block per SM takes tiles of 128 x 256. The producer, its first warpgroup, loads by TMA: one thread tiles of x,
 * another d0's tile. The two consumers multiply, 64 rows each, and write to shared memory. The epilogue, the fourth
 * warpgroup, stores the finished tile in place and mirrored while the consumers compute the next.
 * Numerics: sums in fp32, in the order of k; a matrix gets the same bits at any place in the batch. s is a multiple of
 * 8, k of 8, or of 64 if x^T is stored; pointers are aligned to 16 bytes. */
#ifndef LLMC_MUON_SYMMETRIC_HOPPER_CUH
#define LLMC_MUON_SYMMETRIC_HOPPER_CUH

#include "llmc/hopper/mbarrier.cuh"
#include "llmc/hopper/tma.cuh"
#include "llmc/hopper/wgmma.cuh"

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)

enum {
    SYMMETRIC_M = 128,
    SYMMETRIC_N = 256,
    SYMMETRIC_STAGES = 3,
    SYMMETRIC_BLOCK = 4 * WARPGROUP,
    SYMMETRIC_ROW_TILES = SYMMETRIC_M / TMA_BOX,
    SYMMETRIC_COLUMN_TILES = SYMMETRIC_N / TMA_BOX,
    SYMMETRIC_STAGE_BYTES = (SYMMETRIC_ROW_TILES + SYMMETRIC_COLUMN_TILES) * TMA_TILE_BYTES,
    SYMMETRIC_TILE_BYTES = SYMMETRIC_ROW_TILES * SYMMETRIC_COLUMN_TILES * TMA_TILE_BYTES,
    SYMMETRIC_BYTES = SYMMETRIC_STAGES * SYMMETRIC_STAGE_BYTES + SYMMETRIC_TILE_BYTES + 1024
};

// The number of tiles of a matrix: column c has tiles in rows 0 .. 2 c + 1.
__host__ __device__ static inline int symmetric_tiles(int s) {
    int rows = (s + SYMMETRIC_M - 1) / SYMMETRIC_M, columns = (s + SYMMETRIC_N - 1) / SYMMETRIC_N, tiles = 0;
    for (int c = 0; c < columns; c++) tiles += rows < 2 * c + 2 ? rows : 2 * c + 2;
    return tiles;
}

#if HOPPER_CODE
// Addresses in shared memory: stages of x, the finished tile [row half][64 columns], barriers.
struct SymmetricShared {
    uint32_t stages, tile, full, empty, tile_full, tile_empty, addend;
};

// The place of a tile: its matrix, and its first row and column there.
struct SymmetricPlace {
    int matrix, row, column;
};

__device__ __forceinline__ SymmetricPlace symmetric_place(int tile, int tiles, int s) {
    int rows = (s + SYMMETRIC_M - 1) / SYMMETRIC_M, left = tile % tiles, c = 0;
    for (int n = min(rows, 2); left >= n; n = min(rows, 2 * c + 2)) left -= n, c++;
    return {tile / tiles, left * SYMMETRIC_M, c * SYMMETRIC_N};
}

// Producer, one thread: load the tiles of x.
template <Major X>
__device__ __forceinline__ void symmetric_produce(const SymmetricShared& m, const CUtensorMap* x,
                                                  const SymmetricProduct& z, int tiles) {
    int steps = (z.k + TMA_BOX - 1) / TMA_BOX, use = 0;
    for (int tile = blockIdx.x; tile < tiles * z.count; tile += gridDim.x) {
        SymmetricPlace p = symmetric_place(tile, tiles, z.s);
        for (int k = 0; k < steps; k++, use++) {
            uint32_t stage = use % SYMMETRIC_STAGES, to = m.stages + stage * SYMMETRIC_STAGE_BYTES;
            uint32_t full = m.full + 8 * stage;
            mbarrier_wait(m.empty + 8 * stage, ~(use / SYMMETRIC_STAGES) & 1);
            mbarrier_arrive_expect_tx(full, SYMMETRIC_STAGE_BYTES);
#pragma unroll
            for (int i = 0; i < SYMMETRIC_ROW_TILES + SYMMETRIC_COLUMN_TILES; i++) {
                int first =
                    i < SYMMETRIC_ROW_TILES ? p.row + i * TMA_BOX : p.column + (i - SYMMETRIC_ROW_TILES) * TMA_BOX;
                uint32_t at = to + i * TMA_TILE_BYTES;
                if constexpr (X == K_MAJOR) tma_load_3d(at, x, k * TMA_BOX, 0, p.matrix * z.s + first, full);
                else tma_load_3d(at, x, first, 0, p.matrix * z.k + k * TMA_BOX, full);
            }
        }
    }
}

// Producer, one thread: load d0's tile to where the finished tile will be.
__device__ __forceinline__ void symmetric_load_addend(const SymmetricShared& m, const CUtensorMap* d0,
                                                      const SymmetricProduct& z, int tiles) {
    int use = 0;
    for (int tile = blockIdx.x; tile < tiles * z.count; tile += gridDim.x, use++) {
        SymmetricPlace p = symmetric_place(tile, tiles, z.s);
        mbarrier_wait(m.tile_empty, ~use & 1);
        mbarrier_arrive_expect_tx(m.addend, SYMMETRIC_TILE_BYTES);
#pragma unroll
        for (int i = 0; i < SYMMETRIC_ROW_TILES * SYMMETRIC_COLUMN_TILES; i++)
            tma_load_3d(m.tile + i * TMA_TILE_BYTES, d0, p.column + i % SYMMETRIC_COLUMN_TILES * TMA_BOX, 0,
                        p.matrix * z.s + p.row + i / SYMMETRIC_COLUMN_TILES * TMA_BOX, m.addend);
    }
}

// A consumer: multiply its 64 rows of each tile, and write them to shared memory.
template <Major X, bool ADDS>
__device__ __forceinline__ void symmetric_consume(const SymmetricShared& m, const SymmetricProduct& z, int group,
                                                  int tiles) {
    constexpr uint32_t STEP = X == K_MAJOR ? WGMMA_STEP_K_MAJOR : WGMMA_STEP_MN_MAJOR;
    int steps = (z.k + TMA_BOX - 1) / TMA_BOX, use = 0, done = 0;
    int lane = threadIdx.x % WARP, warp_row = threadIdx.x % WARPGROUP / WARP * 16;
    for (int tile = blockIdx.x; tile < tiles * z.count; tile += gridDim.x, done++) {
        float c[2][16][4];
        for (int k = 0; k < steps; k++, use++) {
            uint32_t stage = use % SYMMETRIC_STAGES, at = m.stages + stage * SYMMETRIC_STAGE_BYTES;
            uint32_t left = wgmma_descriptor(at + group * TMA_TILE_BYTES, 0);
            mbarrier_wait(m.full + 8 * stage, (use / SYMMETRIC_STAGES) & 1);
#pragma unroll
            for (int half = 0; half < 2; half++) fence_operand(c[half]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < TMA_BOX / 16; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t right =
                        wgmma_descriptor(at + (SYMMETRIC_ROW_TILES + 2 * half) * TMA_TILE_BYTES, TMA_TILE_BYTES);
                    wgmma_ss<X, X>(c[half], left + i * STEP, right + i * STEP, k > 0 || i > 0);
                }
            wgmma_commit_group();
            if (k == 0) continue;
            wgmma_wait_group<1>();  // the previous stage is no longer read
            if (lane == 0) mbarrier_arrive(m.empty + 8 * ((use - 1) % SYMMETRIC_STAGES));
        }
        wgmma_wait_group<0>();
#pragma unroll
        for (int half = 0; half < 2; half++) fence_operand(c[half]);
        if (lane == 0) mbarrier_arrive(m.empty + 8 * ((use - 1) % SYMMETRIC_STAGES));
        if constexpr (ADDS) mbarrier_wait(m.addend, done & 1);
        else mbarrier_wait(m.tile_empty, ~done & 1);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < 16; j += 2) {
                uint32_t at = m.tile + (group * SYMMETRIC_COLUMN_TILES + half * 2 + j / 8) * TMA_TILE_BYTES, packed[4];
                float more[8] = {0};
                if constexpr (ADDS) {
                    ldmatrix_tile(packed, at, warp_row, j / 2 % 4);
                    to_floats(more, *(const Vector<floatX, 8>*)packed);
                }
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float* x = &c[half][j + e / 2][e % 2 * 2];
                    packed[e] = pack_floatx2(fmaf(z.beta, more[2 * e], z.alpha * x[0]),
                                             fmaf(z.beta, more[2 * e + 1], z.alpha * x[1]));
                }
                stmatrix_tile(at, warp_row, j / 2 % 4, packed);
            }
        mbarrier_arrive(m.tile_full);
    }
}

// Store a block of 64 x 64: rows of 128 bytes, four at a time by a warp.
__device__ __forceinline__ void symmetric_store_block(floatX* d, uint32_t tile, int row, int column, int s) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP, at = column + lane % 8 * 8;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        int r = warp * 16 + 4 * k + lane / 8;
        int4 x = *(const int4*)__cvta_shared_to_generic(swizzle_128b(tile, r, lane % 8));
        if (row + r < s && at < s) *(int4*)(d + (size_t)(row + r) * (size_t)s + at) = x;
    }
}

// Store its transpose: a thread takes eight rows of a column (16 bytes of a row of d), the next thread the next eight.
__device__ __forceinline__ void symmetric_store_mirrored(floatX* d, uint32_t tile, int row, int column, int s) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP, c = warp * 16 + lane / 2;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        int r = (2 * k + lane % 2) * 8;
        uint32_t x[4];
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const char* first = (const char*)__cvta_shared_to_generic(swizzle_128b(tile, r + e, c / 8));
            const char* second = (const char*)__cvta_shared_to_generic(swizzle_128b(tile, r + e + 1, c / 8));
            x[e / 2] = *(const uint16_t*)(first + c % 8 * 2) | (uint32_t) * (const uint16_t*)(second + c % 8 * 2) << 16;
        }
        if (column + c < s && row + r < s)
            *(int4*)(d + (size_t)(column + c) * (size_t)s + row + r) =
                make_int4((int)x[0], (int)x[1], (int)x[2], (int)x[3]);
    }
}

// The epilogue: store the part of finished tiles on and above the diagonal, and mirror the part above it.
__device__ __forceinline__ void symmetric_store(const SymmetricShared& m, const SymmetricProduct& z, int tiles) {
    int done = 0;
    for (int tile = blockIdx.x; tile < tiles * z.count; tile += gridDim.x, done++) {
        SymmetricPlace p = symmetric_place(tile, tiles, z.s);
        floatX* d = z.d + (size_t)p.matrix * (size_t)z.s * (size_t)z.s;
        mbarrier_wait(m.tile_full, done & 1);
#pragma unroll 1
        for (int i = 0; i < SYMMETRIC_ROW_TILES * SYMMETRIC_COLUMN_TILES; i++) {
            int row = p.row + i / SYMMETRIC_COLUMN_TILES * TMA_BOX,
                column = p.column + i % SYMMETRIC_COLUMN_TILES * TMA_BOX;
            if (column >= row) symmetric_store_block(d, m.tile + i * TMA_TILE_BYTES, row, column, z.s);
            if (column > row) symmetric_store_mirrored(d, m.tile + i * TMA_TILE_BYTES, row, column, z.s);
        }
        fence_proxy_async_shared();  // TMA writes here next
        mbarrier_arrive(m.tile_empty);
    }
}
#endif

template <Major X, bool ADDS>
__global__ void __launch_bounds__(SYMMETRIC_BLOCK, 1)
    muon_symmetric_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap d0,
                          SymmetricProduct z) {
#if HOPPER_CODE
    extern __shared__ int4 memory[];
    __shared__ uint64_t barriers[2 * SYMMETRIC_STAGES + 3];
    SymmetricShared m;
    m.stages = ((uint32_t)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
    m.tile = m.stages + SYMMETRIC_STAGES * SYMMETRIC_STAGE_BYTES;
    m.full = (uint32_t)__cvta_generic_to_shared(barriers);
    m.empty = m.full + 8 * SYMMETRIC_STAGES;
    m.tile_full = m.empty + 8 * SYMMETRIC_STAGES;
    m.tile_empty = m.tile_full + 8;
    m.addend = m.tile_empty + 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SYMMETRIC_STAGES; i++) {
            mbarrier_init(m.full + 8 * i, 1);
            mbarrier_init(m.empty + 8 * i, 2 * WARPGROUP / WARP);
        }
        mbarrier_init(m.tile_full, 2 * WARPGROUP);
        mbarrier_init(m.tile_empty, WARPGROUP);
        mbarrier_init(m.addend, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    int group = warpgroup_index(), tiles = symmetric_tiles(z.s);
    if (group == 0) {
        warpgroup_reg_dealloc<40>();
        if (threadIdx.x == 0) symmetric_produce<X>(m, &x, z, tiles);
        if (ADDS && threadIdx.x == WARP) symmetric_load_addend(m, &d0, z, tiles);
    } else if (group == 3) {
        warpgroup_reg_dealloc<104>();
        symmetric_store(m, z, tiles);
    } else {
        warpgroup_reg_alloc<184>();
        symmetric_consume<X, ADDS>(m, z, group - 1, tiles);
    }
#endif
}

template <Major X, bool ADDS> static inline void muon_symmetric_start(SymmetricProduct z, Context* ctx) {
    CUtensorMap x = X == K_MAJOR ? tma_tensor_map(z.x, z.k, 1, z.count * z.s, z.k, ctx)
                                 : tma_tensor_map(z.x, z.s, 1, z.count * z.k, z.s, ctx);
    CUtensorMap d0 = ADDS ? tma_tensor_map(z.d0, z.s, 1, z.count * z.s, z.s, ctx) : x;
    int tiles = symmetric_tiles(z.s) * z.count;
    cudaCheck(cudaFuncSetAttribute(muon_symmetric_kernel<X, ADDS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)SYMMETRIC_BYTES));
    muon_symmetric_kernel<X, ADDS>
        <<<(unsigned)min_int(tiles, ctx->multiprocessors), SYMMETRIC_BLOCK, SYMMETRIC_BYTES, ctx->stream>>>(x, d0, z);
    cudaCheck(cudaGetLastError());
}
#endif

// Run the matmul if this GPU and shape are supported. Returns whether it did.
static inline int muon_symmetric(SymmetricProduct z, Context* ctx) {
#if defined(PRECISION_BF16) || defined(PRECISION_FP16)
    if (!HOPPER_BUILD || ctx->capability != 90 || z.s % 8 || z.k % (z.is_tall ? TMA_BOX : 8)) return 0;
    if (z.is_tall && z.d0) muon_symmetric_start<MN_MAJOR, true>(z, ctx);
    else if (z.is_tall) muon_symmetric_start<MN_MAJOR, false>(z, ctx);
    else if (z.d0) muon_symmetric_start<K_MAJOR, true>(z, ctx);
    else muon_symmetric_start<K_MAJOR, false>(z, ctx);
    return 1;
#else
    (void)z, (void)ctx;
    return 0;
#endif
}

#endif
