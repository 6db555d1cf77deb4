/* Faster than vectors: tensor cores. One instruction of a warp, mma.sync, multiplies 16 x 16 by 16 x 8 bf16 numbers
 * and adds to fp32 sums: 2,048 products, where an ordinary one has 32. Its operands are fragments, a few elements of
 * a tile in each thread's registers, which ldmatrix brings from shared memory (llmc/device/ptx/mma.cuh). A warp has
 * 64 x 32 outputs, and a block of eight warps 128 x 128. Tiles are bf16 in shared memory, 64 elements, 128 bytes, of
 * each row, swizzled so that ldmatrix meets no bank conflict (hopper/tma.cuh). They come by cp.async, which passes no
 * registers: while one pair of tiles is multiplied, the next is on its way. Rows must be whole 16-byte vectors;
 * others take the rung above. */
#include "dev/ladder/matmul/vectors.cuh"
#include "llmc/hopper/tma.cuh"

enum { MMA_SIDE = 128, MMA_DEPTH = 64, MMA_THREADS = 256, MMA_TILE_BYTES = MMA_SIDE * MMA_DEPTH * 2 };

// Start to copy rows r0 .. r0 + 127 of m, columns i0 .. i0 + 63, to a tile: zeros past the end.
static __device__ inline void mma_copy(uint32_t tile, const floatX* m, int rows, int r0, int columns, int i0) {
#pragma unroll
    for (int at = (int)threadIdx.x; at < MMA_SIDE * MMA_DEPTH / 8; at += MMA_THREADS) {
        int row = at / 8, piece = at % 8, exists = r0 + row < rows && i0 + 8 * piece < columns;
        cp_async_cg_16(swizzle_128b(tile, row, piece),
                       exists ? m + (size_t)(r0 + row) * (size_t)columns + i0 + 8 * piece : m, exists);
    }
}

typedef struct {
    floatX* y;
    const floatX* b;
    int N, OC;
    Mode mode;
} MmaOutput;

// Two neighbouring outputs, y[n, o] and the next.
static __device__ inline void mma_write(MmaOutput to, float v0, float v1, int n, int o) {
    float v[2] = {v0, v1};
    int count = n < to.N ? min(2, to.OC - o) : 0;
    floatX* y = to.y + (size_t)n * (size_t)to.OC + o;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (i >= count) break;
        if (to.b) v[i] += to_float(to.b[o + i]);
        if (to.mode == ADD) v[i] += to_float(y[i]);
    }
    if (count == 2 && to.OC % 2 == 0) *(uint32_t*)y = pack_floatx2(v[0], v[1]);
    else
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (i < count) y[i] = from_float<floatX>(v[i]);
}

static __global__ void __launch_bounds__(MMA_THREADS, 2)
    mma_kernel(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode) {
    extern __shared__ __align__(1024) unsigned char mma_shared[];  // twice a tile of x and one of w
    uint32_t tiles = (uint32_t)__cvta_generic_to_shared(mma_shared);
    int n0 = (int)blockIdx.y * MMA_SIDE, o0 = (int)blockIdx.x * MMA_SIDE, warp = (int)threadIdx.x / WARP;
    int lane = (int)threadIdx.x % WARP, row = warp / 4 * 64, column = warp % 4 * 32;  // the warp's first outputs
    float sum[4][4][4] = {};
    MmaOutput to = {y, p.b, N, OC, mode};
    mma_copy(tiles, x, N, n0, IC, 0);
    mma_copy(tiles + MMA_TILE_BYTES, p.w, OC, o0, IC, 0);
    for (int i0 = 0, turn = 0; i0 < IC; i0 += MMA_DEPTH, turn ^= 1) {
        uint32_t x_tile = tiles + turn * 2 * MMA_TILE_BYTES, next = tiles + (turn ^ 1) * 2 * MMA_TILE_BYTES;
        cp_async_wait_all();
        __syncthreads();  // these tiles are there, and the other two are no longer read
        if (i0 + MMA_DEPTH < IC) {
            mma_copy(next, x, N, n0, IC, i0 + MMA_DEPTH);
            mma_copy(next + MMA_TILE_BYTES, p.w, OC, o0, IC, i0 + MMA_DEPTH);
        }
#pragma unroll
        for (int k = 0; k < MMA_DEPTH / 16; k++) {
            uint32_t a[4][4], b[2][4];
#pragma unroll
            for (int m = 0; m < 4; m++) ldmatrix_tile(a[m], x_tile, row + 16 * m, k);
#pragma unroll
            for (int j = 0; j < 2; j++) ldmatrix_tile(b[j], x_tile + MMA_TILE_BYTES, column + 16 * j, k);
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int j = 0; j < 4; j++) mma_m16n8k16(sum[m][j], a[m], b[j / 2][j % 2], b[j / 2][j % 2 + 2]);
        }
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                mma_write(to, sum[m][j][2 * half], sum[m][j][2 * half + 1], n0 + row + 16 * m + 8 * half + lane / 4,
                          o0 + column + 8 * j + lane % 4 * 2);
}

static inline void mma_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                      Context* ctx) {
    if (IC % 8 != 0) {
        vectors_matmul_forward(y, x, p, N, IC, OC, mode, ctx);
        return;
    }
    dim3 grid((OC + MMA_SIDE - 1) / MMA_SIDE, (N + MMA_SIDE - 1) / MMA_SIDE);
    cudaCheck(cudaFuncSetAttribute(mma_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 4 * MMA_TILE_BYTES));
    mma_kernel<<<grid, MMA_THREADS, 4 * MMA_TILE_BYTES, ctx->stream>>>(y, x, p, N, IC, OC, mode);
    cudaCheck(cudaGetLastError());
}
