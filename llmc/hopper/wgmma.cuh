/* Matrix multiply-accumulate of one warpgroup (four warps) on Hopper's tensor cores (wgmma, sm_90a). One PTX
 * instruction per function.
 *
 * Operands in shared memory are tiles as tma.cuh describes them, read in one of two directions:
 *   K_MAJOR    k runs along a row: the next 16 elements are 32 bytes further
 *   MN_MAJOR   k runs down the rows ("transposed"): the next 16 rows are 2048 bytes further
 *
 * Fragments: warp w of the four holds rows 16 w .. 16 w + 15 of the result, lane = 4 g + t: c[j][0], c[j][1] are row g,
 * columns 8 j + 2 t and the next; c[j][2], c[j][3] are row g + 8. A left operand in registers is as mma.cuh describes
 * it.
 *
 * A wgmma is asynchronous: its registers must not be touched until wgmma_wait_group() returns. The compiler does not
 * know that they change later, so pass them to fence_operand() before the wgmma and after the wait.
 * Source: PTX ISA, sections on wgmma and setmaxnreg; the names are CUTLASS's, or the instructions'. */
#ifndef LLMC_HOPPER_WGMMA_CUH
#define LLMC_HOPPER_WGMMA_CUH

#include "llmc/device/cuda_utils.cuh"

#if defined(__CUDACC__) && (defined(PRECISION_BF16) || defined(PRECISION_FP16))

// HOPPER_CODE: the code being compiled may contain instructions of sm_90a. HOPPER_BUILD: this build has such code. The
// Makefile defines HAS_SM90A, because host code cannot distinguish sm_90 from sm_90a and because without optimization
// (DEBUG=1) the kernels need more registers than there are.
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

enum { WARPGROUP = 4 * WARP };  // threads

// This thread's warpgroup. The shuffle lets the compiler know that the number is the same in the whole warp, so that
// descriptors are computed once per warp.
__device__ inline int warpgroup_index(void) { return __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP, 0); }

// setmaxnreg: allocate or release registers of this warp. All warps of the warpgroup must execute it.
template <int REGISTERS> __device__ inline void warpgroup_reg_alloc(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ inline void warpgroup_reg_dealloc(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---------------------------------------------------------------------------------------------------------
// Descriptors of tiles

// The lower half of a tile's descriptor; k steps are added to it. `next`: for MN_MAJOR operands wider than 64, the
// bytes from a tile to the tile of the next 64 columns; otherwise unused. The upper half is the same for all: 128-byte
// swizzle, and 1024 bytes between groups of eight rows.
__device__ inline uint32_t wgmma_descriptor(uint32_t tile, uint32_t next) {
    return (next >> 4) << 16 | (tile & 0x3ffff) >> 4;
}
#define WGMMA_DESCRIPTOR_HIGH "0x40000040"

enum Major { K_MAJOR, MN_MAJOR };
enum { WGMMA_STEP_K_MAJOR = 32 >> 4, WGMMA_STEP_MN_MAJOR = 2048 >> 4 };  // to the next 16 elements of k

// ---------------------------------------------------------------------------------------------------------
// Synchronization

// wgmma.fence: orders accesses to registers before the wgmmas that follow.
__device__ inline void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group: the wgmmas since the last commit form a group.
__device__ inline void wgmma_commit_group(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// wgmma.wait_group: wait until at most PENDING groups are incomplete.
template <int PENDING> __device__ inline void wgmma_wait_group(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// No instruction: the compiler must assume that these registers change here.
template <int N> __device__ inline void fence_operand(float (&c)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}
template <int N> __device__ inline void fence_operand(uint32_t (&a)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

// ---------------------------------------------------------------------------------------------------------
// Multiply-accumulate

#ifdef PRECISION_BF16
#define WGMMA_TYPES "f32.bf16.bf16"
#else
#define WGMMA_TYPES "f32.f16.f16"
#endif
#define WGMMA_C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define WGMMA_C16(i) WGMMA_C4(i), WGMMA_C4(i + 1), WGMMA_C4(i + 2), WGMMA_C4(i + 3)
#define WGMMA_REGS16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_REGS32 WGMMA_REGS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_REGS64                                                                                                   \
    WGMMA_REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"   \
                 "%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_REGS128                                                                                                  \
    WGMMA_REGS64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,"   \
                 "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,"       \
                 "%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// wgmma.mma_async, both operands in shared memory: c [64, 8 J] = a [64, 16] b [16, 8 J], or += with `add`.
template <Major A, Major B, int J> __device__ inline void wgmma_ss(float (&c)[J][4], uint32_t a, uint32_t b, int add) {
    static_assert(J == 4 || J == 8 || J == 16 || J == 32, "32, 64, 128 or 256 columns");
    if constexpr (J == 4)
        asm volatile("{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %18, 0; mov.b64 a, {%16, " WGMMA_DESCRIPTOR_HIGH
                     "}; mov.b64 b, {%17, " WGMMA_DESCRIPTOR_HIGH
                     "}; wgmma.mma_async.sync.aligned.m64n32k16." WGMMA_TYPES " {" WGMMA_REGS16
                     "}, a, b, p, 1, 1, %19, %20; }"
                     : WGMMA_C16(0)
                     : "r"(a), "r"(b), "r"(add), "n"((int)A), "n"((int)B));
    if constexpr (J == 8)
        asm volatile("{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %34, 0; mov.b64 a, {%32, " WGMMA_DESCRIPTOR_HIGH
                     "}; mov.b64 b, {%33, " WGMMA_DESCRIPTOR_HIGH
                     "}; wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES " {" WGMMA_REGS32
                     "}, a, b, p, 1, 1, %35, %36; }"
                     : WGMMA_C16(0), WGMMA_C16(4)
                     : "r"(a), "r"(b), "r"(add), "n"((int)A), "n"((int)B));
    if constexpr (J == 16)
        asm volatile("{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %66, 0; mov.b64 a, {%64, " WGMMA_DESCRIPTOR_HIGH
                     "}; mov.b64 b, {%65, " WGMMA_DESCRIPTOR_HIGH
                     "}; wgmma.mma_async.sync.aligned.m64n128k16." WGMMA_TYPES " {" WGMMA_REGS64
                     "}, a, b, p, 1, 1, %67, %68; }"
                     : WGMMA_C16(0), WGMMA_C16(4), WGMMA_C16(8), WGMMA_C16(12)
                     : "r"(a), "r"(b), "r"(add), "n"((int)A), "n"((int)B));
    if constexpr (J == 32)
        asm volatile("{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %130, 0; mov.b64 a, {%128, " WGMMA_DESCRIPTOR_HIGH
                     "}; mov.b64 b, {%129, " WGMMA_DESCRIPTOR_HIGH
                     "}; wgmma.mma_async.sync.aligned.m64n256k16." WGMMA_TYPES " {" WGMMA_REGS128
                     "}, a, b, p, 1, 1, %131, %132; }"
                     : WGMMA_C16(0), WGMMA_C16(4), WGMMA_C16(8), WGMMA_C16(12), WGMMA_C16(16), WGMMA_C16(20),
                       WGMMA_C16(24), WGMMA_C16(28)
                     : "r"(a), "r"(b), "r"(add), "n"((int)A), "n"((int)B));
}

// wgmma.mma_async, the left operand in registers.
template <Major B, int J>
__device__ inline void wgmma_rs(float (&c)[J][4], const uint32_t (&a)[4], uint32_t b, int add) {
    static_assert(J == 8 || J == 16, "64 or 128 columns");
    if constexpr (J == 8)
        asm volatile("{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, %37, 0; mov.b64 b, {%36, " WGMMA_DESCRIPTOR_HIGH
                     "}; wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES " {" WGMMA_REGS32
                     "}, {%32, %33, %34, %35}, b, p, 1, 1, %38; }"
                     : WGMMA_C16(0), WGMMA_C16(4)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"((int)B));
    if constexpr (J == 16)
        asm volatile("{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, %69, 0; mov.b64 b, {%68, " WGMMA_DESCRIPTOR_HIGH
                     "}; wgmma.mma_async.sync.aligned.m64n128k16." WGMMA_TYPES " {" WGMMA_REGS64
                     "}, {%64, %65, %66, %67}, b, p, 1, 1, %70; }"
                     : WGMMA_C16(0), WGMMA_C16(4), WGMMA_C16(8), WGMMA_C16(12)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"((int)B));
}

#undef WGMMA_C4
#undef WGMMA_C16
#undef WGMMA_REGS16
#undef WGMMA_REGS32
#undef WGMMA_REGS64
#undef WGMMA_REGS128
#undef WGMMA_TYPES
#undef WGMMA_DESCRIPTOR_HIGH

#endif
#endif
