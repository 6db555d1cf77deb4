/* The PTX instructions of llmc/device/ptx, llmc/hopper and dev/ptx.cuh on the CPU. translate.py keeps only their
 * declarations and includes this file last, which defines them. Comments there and the PTX ISA describe them.
 *
 * Asynchronous copies and wgmma run at once. So the emulator does not find a missing wait, but it does find a wait for
 * a copy that was never issued. */
#ifndef DEV_EMULATOR_PTX_H
#define DEV_EMULATOR_PTX_H

#include "intrinsics.h"

inline float ex2_approx(float x) { return exp2f(x); }
inline void wait_for_earlier_kernels(void) {}
inline void prefetch_to_l2(const void*, unsigned) {}
inline void prefetch_to_l1(const void*) {}

#ifdef LLMC_FP8_QUANTIZE_CUH
inline float quantize_max(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }
#endif

#ifdef LLMC_PROFILE_TRACE_H
void kernel_trace_lead_kernel(uint64_t) {}  // keeps a GPU busy while launches are queued
#endif

static inline void* emulated_address(uint32_t shared) { return (void*)(size_t)shared; }

#if defined(LLMC_DEVICE_PTX_MMA_CUH) || defined(ONE_FILE)

static inline void emulated_copy(uint32_t shared, const void* global, int exists, size_t bytes) {
    if (exists) memcpy(emulated_address(shared), global, bytes);
    else memset(emulated_address(shared), 0, bytes);
}

inline void cp_async_cg_16(uint32_t shared, const void* global, int exists) {
    emulated_copy(shared, global, exists, 16);
}
inline void cp_async_ca_8(uint32_t shared, const void* global, int exists) { emulated_copy(shared, global, exists, 8); }
inline void cp_async_wait_all(void) {}

#endif

#if (defined(LLMC_DEVICE_PTX_MMA_CUH) || defined(ONE_FILE)) && !defined(PRECISION_FP32)

// ---------------------------------------------------------------------------------------------------------
// mma.cuh

static inline void emulated_warp_work(void (*work)(EmulatedCall*, unsigned), const void* in, void* out,
                                      int is_turned = 0, const void* second = NULL) {
    emulated_warp_call({work, 0xffffffffu, in, out, is_turned, second});
}

// Element i of a word of two.
static inline float emulated_half(uint32_t word, int i) {
    uint16_t bits = (uint16_t)(word >> (16 * i));
    floatX x;
    memcpy((void*)&x, &bits, sizeof x);
    return to_float(x);
}

// The 16 x 16 left operand of which lane `lane` holds the words a.
static inline void emulated_left(float (&to)[16][16], const uint32_t* a, int lane) {
    int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++) to[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + k] = emulated_half(a[i], k);
}

static inline void emulated_mma(EmulatedCall* calls, unsigned) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const uint32_t *words_a = (const uint32_t*)calls[lane].in, *words_b = (const uint32_t*)calls[lane].second;
        emulated_left(a, words_a, lane);
        for (int i = 0; i < 4; i++)
            b[2 * (lane % 4) + i % 2 + 8 * (i / 2)][lane / 4] = emulated_half(words_b[i / 2], i % 2);
    }
    for (int lane = 0; lane < 32; lane++) {
        float* c = (float*)calls[lane].out;
        for (int i = 0; i < 4; i++) {
            float sum = 0;
            for (int k = 0; k < 16; k++) sum += a[lane / 4 + 8 * (i / 2)][k] * b[k][2 * (lane % 4) + i % 2];
            c[i] += sum;
        }
    }
}

inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    emulated_warp_work(emulated_mma, a, c, 0, b);
}

// The rows of the four matrices that the lanes' addresses name, as 16-bit elements.
static inline void emulated_ldmatrix(EmulatedCall* calls, unsigned) {
    for (int lane = 0; lane < 32; lane++)
        for (int m = 0; m < 4; m++) {
            uint16_t pair[2];
            for (int i = 0; i < 2; i++) {
                int row = calls[0].is_turned ? 2 * (lane % 4) + i : lane / 4;
                int column = calls[0].is_turned ? lane / 4 : 2 * (lane % 4) + i;
                pair[i] = ((const uint16_t*)calls[8 * m + row].in)[column];
            }
            memcpy((uint32_t*)calls[lane].out + m, pair, sizeof pair);
        }
}

static inline void emulated_stmatrix(EmulatedCall* calls, unsigned) {
    for (int lane = 0; lane < 32; lane++)
        for (int m = 0; m < 4; m++)
            memcpy((uint16_t*)calls[8 * m + lane / 4].out + 2 * (lane % 4), (const uint32_t*)calls[lane].in + m, 4);
}

inline void ldmatrix_x4(uint32_t (&x)[4], uint32_t address) {
    emulated_warp_work(emulated_ldmatrix, emulated_address(address), x);
}

inline void ldmatrix_x4_trans(uint32_t (&x)[4], uint32_t address) {
    emulated_warp_work(emulated_ldmatrix, emulated_address(address), x, 1);
}

inline void stmatrix_x4(uint32_t address, const uint32_t (&x)[4]) {
    emulated_warp_work(emulated_stmatrix, x, emulated_address(address));
}

inline void st_shared_b32(uint32_t address, uint32_t x) { memcpy(emulated_address(address), &x, sizeof x); }
inline int4 ld_shared_v4(uint32_t address) { return *(const int4*)emulated_address(address); }
inline uint32_t prmt_b32(uint32_t low, uint32_t high, uint32_t selector) { return emulated_bytes(low, high, selector); }

#endif

#ifdef LLMC_HOPPER_MBARRIER_CUH

// ---------------------------------------------------------------------------------------------------------
// mbarrier.cuh

// What lies in the 8 bytes of an mbarrier.
typedef struct {
    uint16_t expected, missing : 15, phase : 1;
    int32_t bytes;  // that the phase still waits for
} EmulatedBarrier;

static inline EmulatedBarrier* emulated_mbarrier(uint32_t barrier) { return (EmulatedBarrier*)(size_t)barrier; }

// The barrier has changed.
static inline void emulated_mbarrier_look(EmulatedBarrier* b) {
    if (b->missing || b->bytes) return;
    b->phase ^= 1;
    b->missing = b->expected;
    for (int i = 0; i < EMULATED_THREADS / 64; i++) {
        emulated.now->runnable[i] |= emulated.now->at_mbarrier[i];
        emulated.now->at_mbarrier[i] = 0;
    }
}

static inline void emulated_mbarrier_bytes(uint32_t barrier, int bytes) {
    emulated_mbarrier(barrier)->bytes -= bytes;
    emulated_mbarrier_look(emulated_mbarrier(barrier));
}

inline void mbarrier_init(uint32_t barrier, int arrivals) {
    EmulatedBarrier b = {(uint16_t)arrivals, (uint16_t)arrivals, 0, 0};
    *emulated_mbarrier(barrier) = b;
}
inline void fence_mbarrier_init(void) {}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    EmulatedBarrier* b = emulated_mbarrier(barrier);
    if (!b->missing) emulated_fault("more arrivals at an mbarrier than its phase expects");
    b->bytes += (int)bytes;
    b->missing--;
    emulated_mbarrier_look(b);
}
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_expect_tx(barrier, 0); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    int me = emulated.now->current;
    while (emulated_mbarrier(barrier)->phase == parity) {
        emulated.now->at_mbarrier[me / 64] |= (uint64_t)1 << (me % 64);
        emulated_sleep();
    }
}
// Kernels in clusters are compiled, but not launched.
inline void mbarrier_arrive_at(uint32_t, uint32_t) {}
inline void cluster_sync(void) {}
inline void grid_dependency_wait(void) {}
inline void grid_launch_dependents(void) {}
inline void named_barrier_sync(int id, int threads) { emulated_barrier(id, threads, 0); }
inline void st_release_gpu(int* flag, int x) { *flag = x; }
inline int ld_acquire_gpu(const int* flag) { return *flag; }
inline void fence_proxy_async(void) {}
inline void fence_proxy_async_shared(void) {}

#endif

#if defined(LLMC_HOPPER_TMA_CUH) && !defined(PRECISION_FP32)

// ---------------------------------------------------------------------------------------------------------
// tma.cuh

typedef struct {
    unsigned char* x;
    uint64_t size[3], stride[2];  // elements; bytes from one element of dimensions 1 and 2 to the next
    uint32_t box[3];
} EmulatedMap;

static CUresult emulated_encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* x,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    EmulatedMap m = {
        (unsigned char*)x, {sizes[0], sizes[1], sizes[2]}, {strides[0], strides[1]}, {box[0], box[1], box[2]}};
    if (rank != 3 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B || box[0] != TMA_BOX) return CUDA_ERROR_NOT_SUPPORTED;
    memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                                        cudaDriverEntryPointQueryResult* found) {
    *function = (void*)emulated_encode;
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// One row of a box into the tile: 64 elements in pieces of 16 bytes.
static inline void emulated_tma_row(uint32_t tile, int r, const EmulatedMap* m, int channel, int head, int row) {
    for (int c = 0; c < TMA_BOX; c++) {
        uint16_t* to = (uint16_t*)emulated_address(swizzle_128b(tile, r, c / 8)) + c % 8;
        int inside = (uint64_t)(channel + c) < m->size[0] && (uint64_t)head < m->size[1] && (uint64_t)row < m->size[2];
        const uint16_t* from =
            (const uint16_t*)(m->x + (uint64_t)head * m->stride[0] + (uint64_t)row * m->stride[1]) + channel + c;
        *to = inside ? *from : 0;
    }
}

// The box at (channel, head, row); of dimensions 1 and 2 one is 64 long.
inline void tma_load_3d(uint32_t tile, const CUtensorMap* map, int channel, int head, int row, uint32_t barrier) {
    EmulatedMap m;
    memcpy(&m, map, sizeof m);
    for (uint32_t j = 0; j < m.box[2]; j++)
        for (uint32_t i = 0; i < m.box[1]; i++)
            emulated_tma_row(tile, (int)(j * m.box[1] + i), &m, channel, head + (int)i, row + (int)j);
    emulated_mbarrier_bytes(barrier, (int)(m.box[0] * m.box[1] * m.box[2] * 2));
}
inline void bulk_copy_g2s(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    memcpy(emulated_address(shared), global, bytes);
    emulated_mbarrier_bytes(barrier, (int)bytes);
}
// Kernels in clusters are compiled, but not launched.
inline void tma_load_3d_multicast(uint32_t, const CUtensorMap*, int, int, int, uint32_t, uint16_t) {}
inline void tma_prefetch_3d(const CUtensorMap*, int, int, int) {}
inline void tma_store_3d(const CUtensorMap*, int, int, int, uint32_t) {}
inline void bulk_commit_group(void) {}
inline void bulk_wait_group_read(void) {}

#endif

#if defined(LLMC_HOPPER_WGMMA_CUH) && !defined(PRECISION_FP32)

// ---------------------------------------------------------------------------------------------------------
// wgmma.cuh

// Operands and place of a product.
typedef struct {
    int columns, add, is_mn_major[2];
    uint32_t a, b;        // descriptors; a only if the left operand is in shared memory
    const uint32_t* own;  // or the thread's words of it
} EmulatedProduct;

// Element (i, k) of an operand in shared memory: row i of 16 summed elements.
static inline float emulated_operand(uint32_t descriptor, int is_mn_major, int i, int k) {
    uint32_t at = (descriptor & 0x3fff) << 4, next = descriptor >> 16 << 4;
    at += is_mn_major ? (uint32_t)(i / 64) * next + (uint32_t)(128 * k + 2 * (i % 64)) : (uint32_t)(128 * i + 2 * k);
    floatX x;
    memcpy((void*)&x, (unsigned char*)emulated_shared() + (at ^ (at >> 7 & 7) << 4), sizeof x);
    return to_float(x);
}

static inline void emulated_wgmma(EmulatedCall* calls, unsigned) {
    static float a[64][16], b[16][256];
    const EmulatedProduct* p = (const EmulatedProduct*)calls[0].in;
    for (int i = 0; i < 128; i++) {
        const EmulatedProduct* q = (const EmulatedProduct*)calls[i].in;
        if (q->a != p->a || q->b != p->b || q->add != p->add) emulated_fault("a product whose threads disagree on it");
        if (q->own) emulated_left(*(float(*)[16][16])a[16 * (i / 32)], q->own, i % 32);
    }
    for (int k = 0; k < 16; k++) {
        for (int i = 0; i < 64 && !p->own; i++) a[i][k] = emulated_operand(p->a, p->is_mn_major[0], i, k);
        for (int j = 0; j < p->columns; j++) b[k][j] = emulated_operand(p->b, p->is_mn_major[1], j, k);
    }
    for (int row = 0; row < 64; row++) {
        float sum[256] = {0};
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < p->columns; j++) sum[j] += a[row][k] * b[k][j];
        for (int j = 0; j < p->columns; j++) {
            float(*c)[4] = (float(*)[4])calls[row / 16 * 32 + row % 8 * 4 + j % 8 / 2].out;
            float* to = &c[j / 8][row % 16 / 8 * 2 + j % 2];
            *to = p->add ? *to + sum[j] : sum[j];
        }
    }
}

static inline void emulated_product(float* c, EmulatedProduct p) {
    emulated_group_call({emulated_wgmma, 0, &p, c, 0, NULL});
}

template <Major A, Major B, int J> inline void wgmma_ss(float (&c)[J][4], uint32_t a, uint32_t b, int add) {
    emulated_product(c[0], {8 * J, add, {A == MN_MAJOR, B == MN_MAJOR}, a, b, NULL});
}
template <Major B, int J> inline void wgmma_rs(float (&c)[J][4], const uint32_t (&a)[4], uint32_t b, int add) {
    emulated_product(c[0], {8 * J, add, {0, B == MN_MAJOR}, 0, b, a});
}
template <int REGISTERS> inline void warpgroup_reg_alloc(void) {}
template <int REGISTERS> inline void warpgroup_reg_dealloc(void) {}
inline void wgmma_fence(void) {}
inline void wgmma_commit_group(void) {}
template <int PENDING> inline void wgmma_wait_group(void) {}
template <int N> inline void fence_operand(float (&)[N][4]) {}

#endif
#endif
