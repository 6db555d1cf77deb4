/* Where attention's backward kernel for Hopper (hopper_backward.cuh) writes dqkv: in floatX; also with sums over rows,
 * which are a bias gradient; or in E5M2 with its transpose, as quantize.h would afterwards, and with sums
 * (backward_fused.h).
 *
 * A warpgroup finishes 64 rows of a head at a time: 64 channels of dK or dV, 32 of dQ. They go through the warpgroup's
 * tile in shared memory. In fp8 twice: in floatX, from which a thread takes 4 rows, so that its registers hold words of
 * the transpose; then in bytes, of which threads write 16 at a time. */
#ifndef LLMC_OPS_ATTENTION_HOPPER_BACKWARD_WRITE_CUH
#define LLMC_OPS_ATTENTION_HOPPER_BACKWARD_WRITE_CUH

#include "llmc/ops/attention/hopper_backward_load.cuh"
#include "llmc/ops/common/fp8_words.cuh"
#include "llmc/ops/common/tile_sums.cuh"

#if defined(PRECISION_BF16) || defined(PRECISION_FP16)

// Where a finished tile belongs.
struct HopperGradientTile {
    int start, T, sequence, head;  // first row and length of the sequence
    int third;                     // 0 for dQ, 1 for dK, 2 for dV
    int row, group;                // first row in the sequence; this thread's warpgroup
    uint32_t tile;                 // the warpgroup's
};

// The first channel that this warpgroup has: the two share those of dQ.
template <int J> __device__ __forceinline__ int hopper_gradient_channel(int group) { return J == 4 ? 32 * group : 0; }

// What a block shares for sums and statistics.
struct HopperGradientShared {
    float sums[HopperBackward::CONSUMERS][WARPGROUP / WARP][TMA_BOX];  // of a warp's rows
    QuantizeBlock seen;
};

// The sum of this thread's column over the rows of all warps of its warpgroup.
__device__ __forceinline__ float hopper_gradient_sum(const HopperGradientShared* shared, int group) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPGROUP / WARP; w++) sum += shared->sums[group][w][threadIdx.x % WARPGROUP];
    return sum;
}

// ---------------------------------------------------------------------------------------------------------
// In floatX

struct HopperGradient {
    static constexpr bool HAS_SUMS = false, SUMS_IN_SCRATCH = false;
    floatX* dqkv;
};

struct HopperGradientSums {
    static constexpr bool HAS_SUMS = true, SUMS_IN_SCRATCH = true;
    floatX* dqkv;
    float* partial;                // [hopper_first_tile(), 3 C] sums over the rows of tiles: the scratch's first bytes
    HopperGradientShared* shared;  // of the block; NULL on the host
};

// The first element of a tile in dqkv.
template <int J>
__device__ __forceinline__ floatX* hopper_gradient_at(floatX* dqkv, const HopperGradientTile& x,
                                                      const HopperParams& z) {
    size_t C = (size_t)z.NH * z.HS;
    int start = x.start, head = x.head;
    asm volatile("" : "+r"(start), "+r"(head));  // recomputed at each use, to save registers in the loop
    floatX* first = dqkv + (size_t)start * (3 * z.NH * z.HS) + head * z.HS;
    return first + x.third * C + hopper_gradient_channel<J>(x.group);
}

template <int J>
__device__ __forceinline__ void hopper_write_gradient(const HopperGradient& to, const HopperGradientTile& x,
                                                      const HopperParams& z, const float (&c)[J][4]) {
    hopper_write_rows(hopper_gradient_at<J>(to.dqkv, x, z), 3 * (size_t)z.NH * z.HS, x.row, x.T,
                      z.HS - hopper_gradient_channel<J>(x.group), x.tile, c);
}

// A tile past the sequence's end is left out.
template <int J>
__device__ __forceinline__ void hopper_write_gradient(const HopperGradientSums& to, const HopperGradientTile& x,
                                                      const HopperParams& z, const float (&c)[J][4]) {
    int channels = min(8 * J, z.HS - hopper_gradient_channel<J>(x.group)), lane = threadIdx.x % WARP;
    int thread = threadIdx.x % WARPGROUP;
    float sum[8] = {};
    if (x.row >= x.T) return;
    floatX* first = hopper_gradient_at<J>(to.dqkv, x, z);
    // A thread writes pieces of 8 channels, all of the same channels.
    hopper_write_rows(first, 3 * (size_t)z.NH * z.HS, x.row, x.T, channels, x.tile, c, [&](int4 piece) {
        float v[8];
        to_floats(v, *(const Vector<floatX, 8>*)&piece);
#pragma unroll
        for (int k = 0; k < 8; k++) sum[k] += v[k];
    });
#pragma unroll
    for (int k = 0; k < 8; k++) {
#pragma unroll
        for (int apart = J; apart < WARP; apart *= 2) sum[k] += __shfl_xor_sync(ALL_LANES, sum[k], apart);
        if (lane < J) to.shared->sums[x.group][thread / WARP][8 * lane + k] = sum[k];
    }
    named_barrier_sync(1 + x.group, WARPGROUP);
    if (thread < channels) {
        size_t tile = (size_t)hopper_first_tile(x.start, x.sequence) + x.row / HOPPER_QUERIES;
        size_t column = ((size_t)x.third * z.NH + x.head) * z.HS + hopper_gradient_channel<J>(x.group) + thread;
        to.partial[tile * 3 * z.NH * z.HS + column] = hopper_gradient_sum(to.shared, x.group);
    }
    named_barrier_sync(1 + x.group, WARPGROUP);  // before the next tile's sums
}

// ---------------------------------------------------------------------------------------------------------
// In fp8

struct HopperGradientFp8 {
    static constexpr bool HAS_SUMS = true, SUMS_IN_SCRATCH = false;
    AttentionFp8 out;
    float* partial;                // [N / 64, 3 C] sums over the rows of tiles; NULL: not wanted
    HopperGradientShared* shared;  // of the block; NULL on the host
};

// The word of the tile's transpose with rows 4 `down`... of column `column`. 16-byte pieces are swizzled by the thread
// that wrote them, so that neither words nor pieces have bank conflicts.
template <int J> __device__ __forceinline__ uint32_t hopper_fp8_turned(uint32_t tile, int column, int down) {
    int piece = 4 * (column & 1) + down / 4;
    return tile + TMA_TILE_BYTES / 2 + column / 2 * 128 + ((piece ^ (column / J & 7)) << 4) + 4 * (down % 4);
}

// Round this thread's 4 rows of J channels, from shared memory. words: 4 channels of a row each. Keeps sums and counts.
template <int J>
__device__ __forceinline__ void hopper_fp8_round(unsigned (&words)[J / 4][4], const HopperGradientFp8& to,
                                                 const HopperGradientTile& x) {
    int thread = threadIdx.x % WARPGROUP, across = thread % 8, down = thread / 8, lane = threadIdx.x % WARP;
    float scale = (float)*to.out.scale, sum[J] = {};
    QuantizeSeen seen = {0, 0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v[J];
        const floatX* from = (const floatX*)__cvta_shared_to_generic(
            swizzle_128b(x.tile, 4 * down + i, across * J / 8) + across * J % 8 * sizeof(floatX));
        to_floats(v, *(const Vector<floatX, J>*)from);
#pragma unroll
        for (int j = 0; j < J; j++) sum[j] += v[j], seen.amax = quantize_max(seen.amax, fabsf(v[j]));
#pragma unroll
        for (int j = 0; j < J / 4; j++) {
            words[j][i] = quantize_word<FP8_E5M2>(v + 4 * j, scale);
            seen.clipped += quantize_count(words[j][i], fp8_top(FP8_E5M2), 0x80808080u);
            seen.flushed += quantize_count(words[j][i], 0, 0x80808080u);
        }
    }
    float* sums = to.shared->sums[x.group][thread / WARP];
#pragma unroll
    for (int j = 0; j < J; j++) {
        sum[j] += __shfl_xor_sync(ALL_LANES, sum[j], 8);
        sum[j] += __shfl_xor_sync(ALL_LANES, sum[j], 16);
        if (lane < 8) sums[J * across + j] = sum[j];
    }
    quantize_gather(&to.shared->seen, seen);
}

// Write a tile of 64 rows and 8 J channels. A tile past the sequence's end is left out.
template <int J>
__device__ __forceinline__ void hopper_write_gradient(const HopperGradientFp8& to, const HopperGradientTile& x,
                                                      const HopperParams& z, const float (&c)[J][4]) {
    constexpr int COLUMNS = 8 * J, PIECES = COLUMNS / 16;
    int thread = threadIdx.x % WARPGROUP, across = thread % 8, down = thread / 8;
    size_t width = (size_t)3 * z.NH * TMA_BOX, row = (size_t)x.start + x.row;
    size_t column = ((size_t)x.third * z.NH + x.head) * TMA_BOX + hopper_gradient_channel<J>(x.group);
    if (x.row >= x.T) return;
    auto wait = [&]() { named_barrier_sync(1 + x.group, WARPGROUP); };
    uint32_t a[J / 2][4];
    hopper_pack(a, c);
    wait();  // the tile before this one is written
#pragma unroll
    for (int k = 0; k < J / 2; k++) stmatrix_tile(x.tile, thread / WARP * 16, k, a[k]);
    __syncwarp();  // a warp reads the rows that it has written
    unsigned words[J / 4][4];
    hopper_fp8_round<J>(words, to, x);
    wait();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        void* y = __cvta_shared_to_generic(x.tile + (4 * down + i) * COLUMNS + J * across);
        if constexpr (J == 8) *(uint2*)y = make_uint2(words[0][i], words[J / 8][i]);
        else *(unsigned*)y = words[0][i];
    }
#pragma unroll
    for (int j = 0; j < J / 4; j++) {
        transpose_bytes(words[j]);
#pragma unroll
        for (int k = 0; k < 4; k++)
            *(unsigned*)__cvta_shared_to_generic(hopper_fp8_turned<J>(x.tile, J * across + 4 * j + k, down)) =
                words[j][k];
    }
    if (to.partial && thread < COLUMNS)
        to.partial[row / TMA_BOX * width + column + thread] = hopper_gradient_sum(to.shared, x.group);
    wait();
#pragma unroll
    for (int i = thread; i < TMA_BOX * PIECES; i += WARPGROUP) {
        int r = i / PIECES, piece = i % PIECES, at = i / 4;
        uint4 y = *(const uint4*)__cvta_shared_to_generic(x.tile + 16 * i);
        __stcg((uint4*)(to.out.y + (row + r) * width + column + 16 * piece), y);
        uint4 yt = *(const uint4*)__cvta_shared_to_generic(hopper_fp8_turned<J>(x.tile, at, 4 * (i % 4)));
        __stcg((uint4*)(to.out.yt + (column + at) * z.N + row + 16 * (i % 4)), yt);
    }
}

// Called by the consumers after their last tile: add the block's statistics to out.stats.
template <class Gradient> __device__ inline void hopper_gradient_end(const Gradient&) {}

__device__ inline void hopper_gradient_end(const HopperGradientFp8& to) {
    named_barrier_sync(4, HopperBackward::CONSUMERS * WARPGROUP);
    if (threadIdx.x == WARPGROUP && to.out.stats) quantize_add(to.out.stats, to.shared->seen);
}

#endif
#endif
