/* What kernels share that compute whole rows and also write them in fp8 (Fp8Target): a block writes the bytes of its
 * rows to y and to a tile in shared memory, and then transposes the tile. A thread takes 4 columns of a piece of 16
 * rows. With 32 rows, two threads write the 32 bytes of a column, a whole sector of the transpose. */
#ifndef LLMC_OPS_COMMON_FP8_TILE_CUH
#define LLMC_OPS_COMMON_FP8_TILE_CUH

#include "llmc/ops/common/fp8_words.cuh"

#ifdef __CUDACC__

enum { FP8_PIECE = QUANTIZE_ALIGNMENT };  // rows that a thread transposes: 16 bytes of the transpose

// The first word of a row of the tile. Pieces are shifted against each other, because the threads of a column read a
// row of each piece at the same time: the banks that a warp reads are all different.
template <int ROWS> HOST_DEVICE static inline int fp8_tile_row(int row, int C) {
    static_assert(ROWS % FP8_PIECE == 0 && WARP % (ROWS / FP8_PIECE) == 0, "whole pieces");
    return row * (C / 4) + row / FP8_PIECE * (WARP * FP8_PIECE / ROWS);
}

// Shared memory for a tile.
template <int ROWS> static inline size_t fp8_tile_bytes(int C) {
    return sizeof(unsigned) * (size_t)fp8_tile_row<ROWS>(ROWS, C);
}

// Round 8 elements to fp8, and write them to y and to the tile; NULL: not to the tile.
template <Fp8Format FORMAT>
__device__ inline void fp8_put(uint8_t* y, unsigned* tile, Vector<floatX, 8> from, float scale, QuantizeSeen* seen) {
    float v[8], amax = 0;
    unsigned words[2];
    to_floats(v, from);
#pragma unroll
    for (int k = 0; k < 8; k++) amax = quantize_max(amax, fabsf(v[k]));
#pragma unroll
    for (int k = 0; k < 2; k++) words[k] = quantize_word<FORMAT>(v + 4 * k, scale);
    seen->amax = quantize_max(seen->amax, amax);
    seen->flushed += __popc(quantize_equal(words[0], 0, 0x80808080u) >> 1 | quantize_equal(words[1], 0, 0x80808080u));
    if (!(amax * scale < fp8_largest(FORMAT) / 2))  // else nothing is clipped
        seen->clipped += quantize_count(words[0], fp8_top(FORMAT), 0x80808080u) +
                         quantize_count(words[1], fp8_top(FORMAT), 0x80808080u);
    *(uint2*)y = make_uint2(words[0], words[1]);
    if (tile) *(uint2*)tile = make_uint2(words[0], words[1]);
}

// Write the transpose of the block's rows, from row0 on, with zeros for rows from N on. All threads call it, between barriers.
template <int ROWS, int THREADS>
__device__ inline void fp8_tile_transpose(uint8_t* yt, const unsigned* tile, int row0, int N, int C) {
    constexpr int PIECES = ROWS / FP8_PIECE;
    size_t Np = (size_t)(N + QUANTIZE_ALIGNMENT - 1) / QUANTIZE_ALIGNMENT * QUANTIZE_ALIGNMENT;
    for (int i = threadIdx.x; i < C / 4 * PIECES; i += THREADS) {
        int column = 4 * (i / PIECES), row = FP8_PIECE * (i % PIECES);
        if (row0 + row >= N) continue;
        unsigned words[FP8_PIECE / 4][4];
#pragma unroll
        for (int j = 0; j < FP8_PIECE; j++)
            words[j / 4][j % 4] = row0 + row + j < N ? tile[fp8_tile_row<ROWS>(row, C) + j * (C / 4) + column / 4] : 0;
#pragma unroll
        for (int j = 0; j < FP8_PIECE / 4; j++) transpose_bytes(words[j]);
#pragma unroll
        for (int k = 0; k < 4; k++)
            *(uint4*)(yt + (size_t)(column + k) * Np + row0 + row) =
                make_uint4(words[0][k], words[1][k], words[2][k], words[3][k]);
    }
}

#endif
#endif
