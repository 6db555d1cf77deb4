/* Matrix multiply-accumulate of one warp on tensor cores (mma.sync) and the instructions that feed it. One PTX
 * instruction per function; addresses are in shared memory. sm_75 has no bf16, no asynchronous copies and half the
 * depth per mma: functions that need more instructions there say which.
 *
 * Fragments of m16n8k16, lane = 4 g + t. The result c: c[0], c[1] are row g, columns 2t and 2t + 1; c[2], c[3] are row
 * g + 8. The left operand a is four words of two elements: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8). So two
 * neighbouring c tiles, rounded and packed, are one left operand.
 * Source: PTX ISA, sections on mma.m16n8k16, ldmatrix, stmatrix and cp.async. */
#ifndef LLMC_DEVICE_PTX_MMA_CUH
#define LLMC_DEVICE_PTX_MMA_CUH

#include "llmc/device/cuda_utils.cuh"

#if defined(__CUDACC__) && (defined(PRECISION_BF16) || defined(PRECISION_FP16))

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define BEFORE_SM80
#ifdef PRECISION_BF16
#error "GPUs before sm_80 do not compute in bf16: make PRECISION=fp16"
#endif
#endif

// mma.sync.m16n8k16: c [16, 8] += a [16, 16] b [16, 8]. Operands are floatX, sums fp32. sm_75: two m16n8k8.
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef BEFORE_SM80
    const uint32_t b[2] = {b0, b1};
#pragma unroll
    for (int k = 0; k < 2; k++)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
#else
#ifdef PRECISION_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// ldmatrix.x4: four 8 x 8 matrices of 16-bit elements. Lanes 0-7, 8-15, 16-23 and 24-31 give the addresses of their
// rows.
__device__ inline void ldmatrix_x4(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// ldmatrix.x4.trans: the same, each matrix transposed.
__device__ inline void ldmatrix_x4_trans(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// stmatrix.x4 (sm_90): the inverse of ldmatrix_x4().
__device__ inline void stmatrix_x4(uint32_t address, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

#ifdef BEFORE_SM80
// Stand-ins for cp.async: a load and a store. The barrier after cp_async_wait_all() orders them too.
__device__ inline void cp_async_cg_16(uint32_t shared, const void* global, int exists) {
    int4 x = exists ? *(const int4*)global : make_int4(0, 0, 0, 0);
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

__device__ inline void cp_async_ca_8(uint32_t shared, const void* global, int exists) {
    int2 x = exists ? *(const int2*)global : make_int2(0, 0);
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(shared), "r"(x.x), "r"(x.y) : "memory");
}

__device__ inline void cp_async_wait_all(void) {}
#else
// cp.async.cg: start copying 16 bytes to shared memory, past the L1 cache. Zeros unless `exists`.
__device__ inline void cp_async_cg_16(uint32_t shared, const void* global, int exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(exists ? 16 : 0)
                 : "memory");
}

// cp.async.ca: start copying 8 bytes to shared memory. Zeros unless `exists`.
__device__ inline void cp_async_ca_8(uint32_t shared, const void* global, int exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(exists ? 8 : 0)
                 : "memory");
}

// cp.async.wait_all: wait for this thread's copies. A barrier must follow before other threads read them.
__device__ inline void cp_async_wait_all(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

// st.shared.b32 and ld.shared.v4.b32
__device__ inline void st_shared_b32(uint32_t address, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ inline int4 ld_shared_v4(uint32_t address) {
    int4 x;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// prmt.b32: each digit of the selector picks one byte of high:low for the result. Digits from 8 on give eight copies
// of the sign bit of byte digit - 8; __byte_perm() supports digits up to 7 only.
__device__ inline uint32_t prmt_b32(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t x;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(selector));
    return x;
}

// cvt.rn.bf16x2 or cvt.rn.f16x2: round two floats to floatX and pack them into one word.
__device__ inline uint32_t pack_floatx2(float low, float high) {
    uint32_t bits;
#ifdef PRECISION_BF16
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
    __half2 pair = __floats2half2_rn(low, high);
#endif
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

#endif
#endif
