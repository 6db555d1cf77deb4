/* What kernels that round to fp8 share: words of 4 bytes, their transposes, and the statistics of a block. */
#ifndef LLMC_FP8_WORDS_CUH
#define LLMC_FP8_WORDS_CUH

#include "llmc/device/cuda_utils.cuh"
#include "llmc/fp8/format.h"

#ifdef __CUDACC__
#include <cuda_fp8.h>

// Only bf16 builds multiply in fp8. In others some kernels would spill and are not compiled.
HOST_DEVICE static constexpr bool fp8_is_built() { return FLOATX_NAME[0] == 'B'; }

// A thread's statistics. A block has less than 2^32 elements.
typedef struct {
    float amax;
    unsigned clipped, flushed;
} QuantizeSeen;

// The larger value; NaN if either is NaN.
__device__ inline float quantize_max(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
#else
    return a != a || b != b ? NAN : fmaxf(a, b);
#endif
}

// 4 adjacent elements as the bytes of a word.
template <Fp8Format FORMAT> __device__ inline unsigned quantize_word(const float* v, float scale) {
    const __nv_fp8_interpretation_t KIND = FORMAT == FP8_E4M3 ? __NV_E4M3 : __NV_E5M2;
    unsigned low = __nv_cvt_float2_to_fp8x2(make_float2(v[0] * scale, v[1] * scale), __NV_SATFINITE, KIND);
    unsigned high = __nv_cvt_float2_to_fp8x2(make_float2(v[2] * scale, v[3] * scale), __NV_SATFINITE, KIND);
    return low | high << 16;
}

// The values of the E4M3 bytes of a word.
__device__ inline void quantize_numbers(float* v, unsigned word) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(word >> 16 * half & 0xffff), __NV_E4M3);
        float2 two = __half22float2(__half2(raw));
        v[2 * half] = two.x, v[2 * half + 1] = two.y;
    }
}

// The upper bits of the bytes of a word that equal `byte` except for the sign. A 7-bit value plus 0x7f sets the upper
// bit unless the value is 0, and never carries into the next byte. `upper`: the upper bits of the bytes to compare.
__device__ inline unsigned quantize_equal(unsigned word, unsigned byte, unsigned upper) {
    return ~(((word & 0x7f7f7f7fu) ^ byte * 0x01010101u) + 0x7f7f7f7fu) & upper;
}

// The number of these bytes.
__device__ inline unsigned quantize_count(unsigned word, unsigned byte, unsigned upper) {
    return __popc(quantize_equal(word, byte, upper));
}

// Rows to columns: byte i of word j becomes byte j of word i.
__device__ inline void transpose_bytes(unsigned* w) {
    unsigned a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    unsigned c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410);
    w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410);
    w[3] = __byte_perm(c, d, 0x7632);
}

// The largest x and the sum of x of a warp: one instruction from sm_80 on.
__device__ inline unsigned warp_max_unsigned(unsigned x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL_LANES, x);
#else
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, distance));
    return x;
#endif
}

__device__ inline unsigned warp_sum_unsigned(unsigned x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(ALL_LANES, x);
#else
    return warp_sum(x);
#endif
}

// Add the block's statistics to `stats` by integer operations, whose order does not matter.
__device__ inline void quantize_report(Fp8Stats* stats, QuantizeSeen seen) {
    __shared__ struct { unsigned amax, clipped, flushed; } block;
    if (threadIdx.x == 0) block = {0, 0, 0};
    __syncthreads();
    unsigned amax = warp_max_unsigned(__float_as_uint(seen.amax));
    seen.clipped = warp_sum_unsigned(seen.clipped);
    seen.flushed = warp_sum_unsigned(seen.flushed);
    if (threadIdx.x % WARP == 0) {
        atomicMax(&block.amax, amax);
        atomicAdd(&block.clipped, seen.clipped);
        atomicAdd(&block.flushed, seen.flushed);
    }
    __syncthreads();
    if (threadIdx.x) return;
    atomicMax(&stats->amax, block.amax);
    if (block.clipped) atomicAdd((unsigned long long*)&stats->clipped, (unsigned long long)block.clipped);
    if (block.flushed) atomicAdd((unsigned long long*)&stats->flushed, (unsigned long long)block.flushed);
}

#endif
#endif
