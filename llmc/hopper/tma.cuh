/* The tensor memory accelerator (TMA, sm_90): asynchronous copies from global to shared memory that one thread starts
 * and an mbarrier completes. One PTX instruction per function.
 *
 * A tile in shared memory is a box of a tensor: 64 rows of 64 16-bit elements, 128 bytes each. The 16-byte piece
 * `piece` of row `row` lies at piece ^ (row % 8), the 128-byte swizzle: neither reads along a row nor reads down a
 * column fall on the same banks. A tile starts on a multiple of 1024 bytes. tma_load_3d() writes this layout;
 * ldmatrix_tile(), stmatrix_tile() and the descriptors of wgmma.cuh read it.
 * Source: PTX ISA, sections on cp.async.bulk and cp.async.bulk.tensor; CUDA driver API, cuTensorMapEncodeTiled. */
#ifndef LLMC_HOPPER_TMA_CUH
#define LLMC_HOPPER_TMA_CUH

#include "llmc/device/ptx/mma.cuh"

#if defined(__CUDACC__) && (defined(PRECISION_BF16) || defined(PRECISION_FP16))
#include <cuda.h>

enum { TMA_BOX = 64, TMA_ROW_BYTES = 128, TMA_TILE_BYTES = TMA_BOX * TMA_ROW_BYTES };

// ---------------------------------------------------------------------------------------------------------
// Host: the tensor map of x [rows, heads, HS] with `row_stride` elements from one row to the next. Its boxes are 64
// rows of 64 channels of one head. Channels past HS and rows past the end are filled with zeros.

static inline CUtensorMap tma_tensor_map(const floatX* x, int HS, int heads, int rows, int row_stride, Context* ctx) {
    enum cudaDriverEntryPointQueryResult found;
    if (!ctx->encode_tensor_map)
#if CUDART_VERSION >= 12050
        cudaCheck(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &ctx->encode_tensor_map, 12000,
                                                   cudaEnableDefault, &found));
#else  // the other function came with CUDA 12.5, and CUDA 13 deprecates this one
        cudaCheck(
            cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &ctx->encode_tensor_map, cudaEnableDefault, &found));
#endif
    typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                               const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                               CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    CUtensorMap map;
    const cuuint64_t sizes[3] = {(cuuint64_t)HS, (cuuint64_t)heads, (cuuint64_t)rows};
    const cuuint64_t strides[2] = {HS * sizeof(floatX), (cuuint64_t)row_stride * sizeof(floatX)};
    const cuuint32_t box[3] = {TMA_BOX, 1, TMA_BOX}, steps[3] = {1, 1, 1};
#ifdef PRECISION_BF16
    CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
#else
    CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
#endif
    CUresult result = ((Encode)ctx->encode_tensor_map)(
        &map, type, 3, (void*)x, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(result == CUDA_SUCCESS);
    return map;
}

// ---------------------------------------------------------------------------------------------------------
// Copies from global to shared memory

// cp.async.bulk.tensor.3d: copy the box at (channel, head, row) to `tile`. `barrier` counts its TMA_TILE_BYTES bytes.
__device__ inline void tma_load_3d(uint32_t tile, const CUtensorMap* map, int channel, int head, int row,
                                   uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(tile),
        "l"(map), "r"(channel), "r"(head), "r"(row), "r"(barrier)
        : "memory");
}

// cp.async.bulk: copy `bytes` contiguous bytes. The size and both addresses are multiples of 16. `barrier` counts them.
__device__ inline void bulk_copy_g2s(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// ---------------------------------------------------------------------------------------------------------
// Tiles between shared memory and the fragments of mma and wgmma

__device__ inline uint32_t swizzle_128b(uint32_t tile, int row, int piece) {
    return tile + (uint32_t)(row * TMA_ROW_BYTES) + (uint32_t)((piece ^ (row & 7)) << 4);
}

// This lane's address for a 16 x 16 block of a tile: from row `row` and column 16 k on.
__device__ inline uint32_t fragment_address(uint32_t tile, int row, int k) {
    int lane = threadIdx.x % WARP;
    return swizzle_128b(tile, row + (lane & 15), 2 * k + (lane >> 4));
}

// Load a 16 x 16 block of a tile as a left operand, and store it.
__device__ inline void ldmatrix_tile(uint32_t (&x)[4], uint32_t tile, int row, int k) {
    ldmatrix_x4(x, fragment_address(tile, row, k));
}

__device__ inline void stmatrix_tile(uint32_t tile, int row, int k, const uint32_t (&x)[4]) {
    stmatrix_x4(fragment_address(tile, row, k), x);
}

#endif
#endif
