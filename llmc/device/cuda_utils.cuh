/* Utilities for kernels: 16-byte vectors of any type, their conversion to float, and sums over warps and blocks.
 *
 *     Vector<floatX> x = load128(p);          p aligned to 16 bytes; Vector<T>::SIZE elements: 8 bf16 or 4 float
 *     float f[Vector<floatX>::SIZE];
 *     to_floats(f, x);
 *     store128(p, from_floats<floatX>(f));    rounds to nearest even, two at a time
 *
 * Sums are butterfly reductions: every thread gets the result, and it has the same bits every time. */
#ifndef LLMC_DEVICE_CUDA_UTILS_CUH
#define LLMC_DEVICE_CUDA_UTILS_CUH

#include "llmc/device/device.h"

#ifdef __CUDACC__

enum { WARP = 32 };
#define ALL_LANES 0xffffffffu

// ---------------------------------------------------------------------------------------------------------
// Conversions

template <typename T> __device__ inline float to_float(T x) { return (float)x; }
template <> __device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <> __device__ inline float to_float(__half x) { return __half2float(x); }

template <typename T> __device__ inline T from_float(float x) { return (T)x; }
template <> __device__ inline __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
template <> __device__ inline __half from_float(float x) { return __float2half_rn(x); }

// ---------------------------------------------------------------------------------------------------------
// Hardware exponentials: one instruction (PTX ISA, ex2.approx.ftz), without the scaling that __expf adds for denormal
// results.

// 2^x with a relative error of 2^-22; 0 for -infinity and for results below 1.2e-38.
__device__ inline float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// exp(x): the same error, plus half an ulp of x from rounding x * log2(e).
__device__ inline float exp_approx(float x) { return ex2_approx(x * 1.44269504f); }

// ---------------------------------------------------------------------------------------------------------
// Vectors of 16 bytes, and of one element for rows that are not 16-byte aligned

template <typename T, int N = 16 / (int)sizeof(T)> struct alignas(N * sizeof(T)) Vector {
    static constexpr int SIZE = N;
    T v[N];
};

template <int N, typename T> __device__ inline Vector<T, N> load_vector(const T* p) {
    Vector<T, N> x;
    if constexpr (N * sizeof(T) == 16) *(int4*)&x = *(const int4*)p;
    else x.v[0] = *p;
    static_assert(N == 1 || N * sizeof(T) == 16, "one element, or 16 bytes");
    return x;
}

template <int N, typename T> __device__ inline void store_vector(T* p, Vector<T, N> x) {
    if constexpr (N * sizeof(T) == 16) *(int4*)p = *(const int4*)&x;
    else *p = x.v[0];
}

template <typename T> __device__ inline Vector<T> load128(const T* p) { return load_vector<Vector<T>::SIZE>(p); }
template <typename T> __device__ inline void store128(T* p, Vector<T> x) { store_vector(p, x); }

// Load data that is not needed again soon. The caches evict it first.
template <typename T> __device__ inline Vector<T> load128_streaming(const T* p) {
    Vector<T> x;
    *(int4*)&x = __ldcs((const int4*)p);
    return x;
}

// Hide the value of x from the compiler. It then converts x again at the next use, instead of keeping the floats in
// twice as many registers.
template <typename T, int N> __device__ inline void keep_packed(Vector<T, N>* x) {
    if constexpr (N * sizeof(T) == 16) {
        int4* p = (int4*)x;
        asm volatile("" : "+r"(p->x), "+r"(p->y), "+r"(p->z), "+r"(p->w));
    }
}

template <typename T, int N> __device__ inline void to_floats(float* f, Vector<T, N> x) {
#pragma unroll
    for (int i = 0; i < N; i++) f[i] = to_float(x.v[i]);
}

// Load COUNT adjacent floats that are aligned to 16 bytes, or a single one.
template <int COUNT> __device__ inline void load_reals(float* f, const float* p) {
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) *(float4*)(f + i) = *(const float4*)(p + i);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) f[i] = p[i];
    }
}

__device__ inline void from_two_floats(__nv_bfloat16* x, float a, float b) {
    *(__nv_bfloat162*)x = __floats2bfloat162_rn(a, b);
}
__device__ inline void from_two_floats(__half* x, float a, float b) { *(__half2*)x = __floats2half2_rn(a, b); }
template <typename T> __device__ inline void from_two_floats(T* x, float a, float b) {
    x[0] = from_float<T>(a);
    x[1] = from_float<T>(b);
}

template <typename T, int N = 16 / (int)sizeof(T)> __device__ inline Vector<T, N> from_floats(const float* f) {
    Vector<T, N> x;
    if constexpr (N == 1) x.v[0] = from_float<T>(f[0]);
#pragma unroll
    for (int i = 0; i + 1 < N; i += 2) from_two_floats(x.v + i, f[i], f[i + 1]);
    return x;
}

// ---------------------------------------------------------------------------------------------------------
// Sums and maxima. All threads of the warp or block must participate. A block is one-dimensional, with whole warps.

template <typename T> __device__ inline T warp_sum(T x) {
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
    return x;
}

template <typename T> __device__ inline T block_sum(T x) {
    __shared__ T partial[WARP];
    int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    __syncthreads();  // other warps may still read the sums of the previous call
    if (lane == 0) partial[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_sum(lane < warps ? partial[lane] : (T)0);
}

// The sums of both components over a team of threads: a warp or the block. The caller alternates `turn` between 0 and 1
// from call to call.
template <int TEAM> __device__ inline float2 team_sum(float2 x, int turn) {
    x.x = warp_sum(x.x);
    x.y = warp_sum(x.y);
    if constexpr (TEAM > WARP) {
        __shared__ float2 partial[2][TEAM / WARP];  // double-buffered, so that one barrier per call is enough
        if (threadIdx.x % WARP == 0) partial[turn][threadIdx.x / WARP] = x;
        __syncthreads();
        x = make_float2(0, 0);
#pragma unroll
        for (int i = 0; i < TEAM / WARP; i++) {
            x.x += partial[turn][i].x;
            x.y += partial[turn][i].y;
        }
    }
    return x;
}

// fmaxf ignores NaN. Callers that must detect NaN find it in the sum that follows.
__device__ inline float block_max(float x) {
    __shared__ float partial[WARP];
    int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) partial[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_max(lane < warps ? partial[lane] : -INFINITY);
}

// ---------------------------------------------------------------------------------------------------------
// Grid-wide reductions: the last block to arrive combines the results of all blocks

// Whether this block is the last of `blocks` to call this with the same counter, one of ctx->arrivals. The last block
// sees everything that the others wrote before their calls. All threads of the block must call it. The counter wraps
// back to 0.
__device__ inline bool last_to_arrive(unsigned* arrivals, unsigned blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(arrivals, blocks - 1) == blocks - 1;
    __syncthreads();
    if (last) __threadfence();
    return last;
}

// Wait for all blocks of a cooperative launch. Each then sees what the others wrote before. `arrivals` is one of
// ctx->arrivals: it counts the blocks that come, then those that leave, and wraps back to 0.
__device__ inline void wait_for_grid(unsigned* arrivals) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned blocks = gridDim.x;
        atomicInc(arrivals, 2 * blocks - 1);
        while (*(volatile unsigned*)arrivals < blocks) continue;
        __threadfence();
        atomicInc(arrivals, 2 * blocks - 1);
    }
    __syncthreads();
}

// p[0] + p[stride] + ... of n values, in this order: the last block adds the partial sums of all blocks. Many loads are
// in flight at a time, because nothing else hides their latency.
__device__ inline float sum_in_order(const float* p, int n, size_t stride) {
    const int LOADS = 32;
    float total = 0;
    for (int i = 0; i < n; i += LOADS) {
        float x[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) x[k] = i + k < n ? p[(size_t)(i + k) * stride] : 0;
#pragma unroll
        for (int k = 0; k < LOADS; k++) total += x[k];
    }
    return total;
}

// ---------------------------------------------------------------------------------------------------------
// Launches

// The number of blocks for n items, with `each` items per block.
static inline unsigned blocks_for(size_t n, size_t each) {
    size_t blocks = (n + each - 1) / each;
    CHECK(blocks > 0 && blocks <= 0x7fffffff);
    return (unsigned)blocks;
}

// Allow a kernel `bytes` of dynamic shared memory; more than 48 KB needs this opt-in. Launchers choose kernels that fit
// the GPU, so a request above the GPU's limit is a launcher's bug.
template <typename Kernel> static inline void kernel_allow_shared(Kernel* kernel, size_t bytes, const Context* ctx) {
    if (bytes > ctx->shared_of_block)
        die(FAILED, "a kernel asks for %zu bytes of shared memory; a block has %zu on this GPU", bytes,
            ctx->shared_of_block);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

// Whether all rows of C elements are aligned to 16 bytes if the first one is.
template <typename T> static inline int rows_are_vectors(int C) { return C % Vector<T>::SIZE == 0; }

#endif
#endif
