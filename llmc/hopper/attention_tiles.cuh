/* Flash attention with Hopper's instructions (sm_90a), for bf16 and fp16: warpgroups multiply (wgmma) tiles that TMA
 * loads ahead of time. This file is shared by attention_forward.cuh and the backward files.
 *
 * Blocks are persistent and warp-specialized. One or two threads of a block, the producer, take work items from a
 * counter and load their tiles. They wait only for free buffers. The other two or three warpgroups, the consumers,
 * compute. Two mbarriers guard each buffer: copies complete `full`, and the buffer's readers arrive on `empty`.
 *
 * Numerics as in flash_tiles.cuh.
 * Source: Shah et al., "FlashAttention-3", arXiv 2407.08608. */
#ifndef LLMC_HOPPER_ATTENTION_TILES_CUH
#define LLMC_HOPPER_ATTENTION_TILES_CUH

#include "llmc/hopper/attention_scratch.h"
#include "llmc/hopper/mbarrier.cuh"
#include "llmc/hopper/tma.cuh"
#include "llmc/hopper/wgmma.cuh"
#include "llmc/ops/attention/flash_tiles.cuh"

enum { HOPPER_ROW_BITS = DRAW_COLUMNS / 8 };  // bytes of a row's dropout bits

// Kernel parameters other than tensors.
typedef struct {
    const int* cu_seqlens;
    unsigned* next_item;  // counter from which blocks take work items
    int N, NH, HS, count, max_seqlen;
    float softmax_scale;           // 1 / sqrt(HS)
    float keep_scale;              // kept pairs are multiplied by it
    const uint32_t* dropout_bits;  // 1: the pair is kept
} HopperParams;

// A tile, as the producer describes it to the consumers. sequence -1: no more work.
typedef struct {
    int sequence, head, first;  // first row of the tile
    int begins, ends;           // backward: 1 for the first, 1 for the last tile of an item
    int start, length;          // backward: first row and length of the sequence
} HopperWork;

// Take the counter's next number. After `last` the counter wraps to 0, ready for the next launch.
__device__ inline int hopper_next_item(const HopperParams& z, int last) {
    return (int)atomicInc(z.next_item, (unsigned)last);
}

// Round c and pack it into left operands of matmuls that sum over c's columns.
template <int J> __device__ inline void hopper_pack(uint32_t (&a)[J / 2][4], const float (&c)[J][4]) {
#pragma unroll
    for (int k = 0; k < J / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[k][i] = pack_floatx2(c[2 * k + i / 2][2 * (i % 2)], c[2 * k + i / 2][2 * (i % 2) + 1]);
}

// The same with dropout. `bits`: those of row g, then those of row g + 8, 32 columns in a word.
template <int J>
__device__ inline void hopper_pack_dropped(uint32_t (&a)[J / 2][4], const float (&c)[J][4],
                                           const uint32_t (&bits)[2][J / 4]) {
    int t = threadIdx.x % 4;
    hopper_pack(a, c);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < J; j++) {
            // This lane's bits of tile j become the sign bits of byte j % 4; prmt spreads each over a half of `kept`.
            uint32_t left = bits[half][j / 4] << (7 - 2 * t), right = bits[half][j / 4] << (6 - 2 * t);
            a[j / 2][2 * (j % 2) + half] &= prmt_b32(left, right, 0xcc88u + 0x1111u * (uint32_t)(j % 4));
        }
}

// A warp writes its 16 rows of a result, through its rows of `tile`, to rows of x from `row` on and below `exist`.
template <int J>
__device__ inline void hopper_write_rows(floatX* x, size_t stride, int row, int exist, int channels, uint32_t tile,
                                         const float (&c)[J][4]) {
    uint32_t a[J / 2][4];
    int lane = threadIdx.x % WARP, warp_row = threadIdx.x % WARPGROUP / WARP * 16;
    hopper_pack(a, c);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < J / 2; k++) stmatrix_tile(tile, warp_row, k, a[k]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * J; i += WARP) {
        int r = warp_row + (i + lane) / J, piece = (i + lane) % J;
        int4 v = *(const int4*)__cvta_shared_to_generic(swizzle_128b(tile, r, piece));
        if (row + r < exist && piece * 8 < channels) __stcg((int4*)(x + (size_t)(row + r) * stride + piece * 8), v);
    }
}

static inline HopperParams hopper_params(const Sequences* s, AttentionShape shape, const uint32_t* bits, Context* ctx) {
    HopperParams z;
    z.cu_seqlens = s->cu_seqlens;
    z.next_item = ctx->arrivals;
    z.N = s->rows;
    z.NH = shape.NH;
    z.HS = shape.HS;
    z.count = s->count;
    z.max_seqlen = s->max_length;
    z.softmax_scale = (float)(1 / sqrt((double)shape.HS));
    z.keep_scale = shape.dropout.scale;
    z.dropout_bits = bits;
    return z;
}

#endif
