/* Instructions that only Hopper GPUs (sm_90a) have, as functions: barriers in shared memory that count bytes, copies of
 * boxes of a tensor by the copy engine (TMA), and matrix products by four warps (wgmma).
 *
 * Tiles in shared memory are rows of 64 16-bit elements, 128 bytes, whose 16-byte pieces lie at piece ^ (row % 8) (the
 * "128-byte swizzle", so that neither reads along rows nor along columns fall on the same banks). A tile begins on a
 * multiple of 1024 bytes. hopper_copy_box() writes them so, and the descriptors of hopper_multiply() read them so:
 *   along rows      the summed index runs along a row (K-major): step by 16 elements, 32 bytes
 *   along columns   the summed index runs down the rows (MN-major, "transposed"): step by 16 rows, 2048 bytes
 *
 * Fragments: warp w of the four holds rows 16 w .. 16 w + 15 of the result, lane = 4 g + t: c[j][0], c[j][1] are row g,
 * columns 8 j + 2 t and the next; c[j][2], c[j][3] are row g + 8. A left operand from registers is four words of two:
 * (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8): two neighbouring c tiles, rounded, are one.
 *
 * A product runs on while the warps go on; its registers must not be touched until hopper_wait() says so, and
 * hopper_pin() must name them then, because the compiler does not know that they change late.
 * Source: PTX ISA, sections on wgmma, mbarrier and cp.async.bulk.tensor. */
#ifndef LLMC_HOPPER_CUH
#define LLMC_HOPPER_CUH

#include "device.cuh"

#if defined(__CUDACC__) && (defined(PRECISION_BF16) || defined(PRECISION_FP16))
#include <cuda.h>

// Whether the code that is being compiled may contain these instructions; and, on the host's side, whether this build has
// such code at all. The Makefile says so: the compiler does not tell sm_90 from sm_90a there, and without optimisation
// (DEBUG=1) the registers do not suffice.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && defined(HAS_SM90A)
#define HOPPER_CODE 1
#else
#define HOPPER_CODE 0
#endif
#ifdef HAS_SM90A
#define HOPPER_BUILD 1
#else
#define HOPPER_BUILD 0
#endif

enum { WARPGROUP = 4 * WARP, HOPPER_ROW_BYTES = 128, HOPPER_BOX = 64 };

// ---------------------------------------------------------------------------------------------------------
// Host: what the copy engine must know of a tensor x [rows, heads, HS], `row_stride` elements between rows: a box is
// 64 rows of 64 channels of one head. Channels past HS, and rows past the end, arrive as zeros.

static inline CUtensorMap hopper_tensor_map(const floatX* x, int HS, int heads, int rows, int row_stride,
                                            Context* ctx) {
    enum cudaDriverEntryPointQueryResult found;
    if (!ctx->encode_tensor_map)
        cudaCheck(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &ctx->encode_tensor_map, 12000,
                                                   cudaEnableDefault, &found));
    typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                               const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                               CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    CUtensorMap map;
    const cuuint64_t sizes[3] = {(cuuint64_t)HS, (cuuint64_t)heads, (cuuint64_t)rows};
    const cuuint64_t strides[2] = {HS * sizeof(floatX), (cuuint64_t)row_stride * sizeof(floatX)};
    const cuuint32_t box[3] = {HOPPER_BOX, 1, HOPPER_BOX}, steps[3] = {1, 1, 1};
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
// Barriers. A phase ends when all arrivals and all announced bytes are in; phases are told apart by their parity.

__device__ inline void hopper_barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After all inits, before the barriers are used by other threads or by the copy engine.
__device__ inline void hopper_barrier_init_done(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ inline void hopper_arrive(uint32_t barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// Arrive, and announce so many bytes that copies will bring.
__device__ inline void hopper_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

__device__ inline void hopper_barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "bra again;\n"
                 "over:\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// Which group of four warps this thread is in, as a number that the compiler knows to be the same in the whole warp:
// then descriptors are worked out once a warp.
__device__ inline int hopper_group(void) { return __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP, 0); }

// Wait until `threads` threads have come to barrier `id` (1 to 15).
__device__ inline void hopper_meet(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// What this thread wrote to shared memory may be read by the copy engine and by products after the next barrier.
__device__ inline void hopper_publish(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------------------
// Copies

// Start copying the box at (channel, head, row) to `tile`; `barrier` counts its 8192 bytes.
__device__ inline void hopper_copy_box(uint32_t tile, const CUtensorMap* map, int channel, int head, int row,
                                       uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(tile),
        "l"(map), "r"(channel), "r"(head), "r"(row), "r"(barrier)
        : "memory");
}

// Start copying `bytes` bytes that lie together, a multiple of 16 as both addresses are; `barrier` counts them.
__device__ inline void hopper_copy(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// The 16 x 16 elements of a tile from row `row` and 16-byte piece 2 k on, as a left operand, and back.
__device__ inline uint32_t hopper_at(uint32_t tile, int row, int piece) {
    return tile + (uint32_t)(row * HOPPER_ROW_BYTES) + (uint32_t)((piece ^ (row & 7)) << 4);
}

__device__ inline void hopper_load_square(uint32_t (&x)[4], uint32_t tile, int row, int k) {
    int lane = threadIdx.x % WARP;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(hopper_at(tile, row + (lane & 15), 2 * k + (lane >> 4)))
                 : "memory");
}

__device__ inline void hopper_store_square(uint32_t tile, int row, int k, const uint32_t (&x)[4]) {
    int lane = threadIdx.x % WARP;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     hopper_at(tile, row + (lane & 15), 2 * k + (lane >> 4))),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// Registers: a warp gives some back, or takes more, for the rest of its life.
template <int REGISTERS> __device__ inline void hopper_take_registers(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ inline void hopper_give_registers(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---------------------------------------------------------------------------------------------------------
// Products

// Lower half of a tile's descriptor; steps are added to it. `next` is only read along columns, where the result is wider
// than 64: bytes to the tile with the next 64 columns. The upper half is the same for all: swizzle, and eight rows.
__device__ inline uint32_t hopper_descriptor(uint32_t tile, uint32_t next) {
    return (next >> 4) << 16 | (tile & 0x3ffff) >> 4;
}
#define HOPPER_UPPER "0x40000040"

enum Along { ALONG_ROWS, ALONG_COLUMNS };
enum { HOPPER_STEP_ROWS = 32 >> 4, HOPPER_STEP_COLUMNS = 2048 >> 4 };  // a descriptor's way to the next 16 elements

// Registers as they are now may enter a product.
__device__ inline void hopper_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// End of a group of products.
__device__ inline void hopper_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most `PENDING` groups still run.
template <int PENDING> __device__ inline void hopper_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int N> __device__ inline void hopper_pin(float (&c)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}
template <int N> __device__ inline void hopper_pin(uint32_t (&a)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

#ifdef PRECISION_BF16
#define HOPPER_TYPES "f32.bf16.bf16"
#else
#define HOPPER_TYPES "f32.f16.f16"
#endif
#define HOPPER_C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define HOPPER_C16(i) HOPPER_C4(i), HOPPER_C4(i + 1), HOPPER_C4(i + 2), HOPPER_C4(i + 3)
#define HOPPER_LIST16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define HOPPER_LIST32 HOPPER_LIST16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define HOPPER_LIST64                                                                                                  \
    HOPPER_LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"  \
                  "%56,%57,%58,%59,%60,%61,%62,%63"

// c [64, 8 J] = or += a [64, 16] b [16, 8 J]: one instruction. Both operands from shared memory.
template <Along A, Along B, int J>
__device__ inline void hopper_multiply(float (&c)[J][4], uint32_t a, uint32_t b, int add) {
    static_assert(J == 4 || J == 8 || J == 16, "32, 64 or 128 columns");
    if constexpr (J == 4)
        asm volatile("{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %18, 0; mov.b64 a, {%16, " HOPPER_UPPER
                     "}; mov.b64 b, {%17, " HOPPER_UPPER "}; wgmma.mma_async.sync.aligned.m64n32k16." HOPPER_TYPES
                     " {" HOPPER_LIST16 "}, a, b, p, 1, 1, %19, %20; }"
                     : HOPPER_C16(0)
                     : "r"(a), "r"(b), "r"(add), "n"((int)A), "n"((int)B));
    if constexpr (J == 8)
        asm volatile("{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %34, 0; mov.b64 a, {%32, " HOPPER_UPPER
                     "}; mov.b64 b, {%33, " HOPPER_UPPER "}; wgmma.mma_async.sync.aligned.m64n64k16." HOPPER_TYPES
                     " {" HOPPER_LIST32 "}, a, b, p, 1, 1, %35, %36; }"
                     : HOPPER_C16(0), HOPPER_C16(4)
                     : "r"(a), "r"(b), "r"(add), "n"((int)A), "n"((int)B));
    if constexpr (J == 16)
        asm volatile("{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %66, 0; mov.b64 a, {%64, " HOPPER_UPPER
                     "}; mov.b64 b, {%65, " HOPPER_UPPER "}; wgmma.mma_async.sync.aligned.m64n128k16." HOPPER_TYPES
                     " {" HOPPER_LIST64 "}, a, b, p, 1, 1, %67, %68; }"
                     : HOPPER_C16(0), HOPPER_C16(4), HOPPER_C16(8), HOPPER_C16(12)
                     : "r"(a), "r"(b), "r"(add), "n"((int)A), "n"((int)B));
}

// The left operand from registers.
template <Along B, int J>
__device__ inline void hopper_multiply(float (&c)[J][4], const uint32_t (&a)[4], uint32_t b, int add) {
    static_assert(J == 8 || J == 16, "64 or 128 columns");
    if constexpr (J == 8)
        asm volatile("{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, %37, 0; mov.b64 b, {%36, " HOPPER_UPPER
                     "}; wgmma.mma_async.sync.aligned.m64n64k16." HOPPER_TYPES " {" HOPPER_LIST32
                     "}, {%32, %33, %34, %35}, b, p, 1, 1, %38; }"
                     : HOPPER_C16(0), HOPPER_C16(4)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"((int)B));
    if constexpr (J == 16)
        asm volatile("{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, %69, 0; mov.b64 b, {%68, " HOPPER_UPPER
                     "}; wgmma.mma_async.sync.aligned.m64n128k16." HOPPER_TYPES " {" HOPPER_LIST64
                     "}, {%64, %65, %66, %67}, b, p, 1, 1, %70; }"
                     : HOPPER_C16(0), HOPPER_C16(4), HOPPER_C16(8), HOPPER_C16(12)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"((int)B));
}

#undef HOPPER_C4
#undef HOPPER_C16
#undef HOPPER_LIST16
#undef HOPPER_LIST32
#undef HOPPER_LIST64
#undef HOPPER_TYPES
#undef HOPPER_UPPER

#endif
#endif
