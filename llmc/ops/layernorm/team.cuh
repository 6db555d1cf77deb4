/* How layernorm's kernels share rows among threads.
 *
 * A team of threads takes a row: a warp for short rows, several warps or a block for long ones. The team reads the row
 * once and keeps it in registers. A thread holds up to E elements of the row, as vectors of W elements (16 bytes, or
 * one element if rows are not aligned to 16 bytes) that are TEAM * W elements apart. */
#include "llmc/ops/layernorm/layernorm.h"  // before the guard: it includes this file

#ifndef LLMC_OPS_LAYERNORM_TEAM_CUH
#define LLMC_OPS_LAYERNORM_TEAM_CUH

#include "llmc/device/cuda_utils.cuh"

#ifdef __CUDACC__

// 800 for sm_80; 0 in host code.
#ifdef __CUDA_ARCH__
#define LAYERNORM_ARCH __CUDA_ARCH__
#else
#define LAYERNORM_ARCH 0
#endif

// C is limited by the registers of a team.
static inline void layernorm_check_size(int N, int C) {
    CHECK(N > 0 && C > 0);
    int longest = sizeof(floatX) == 2 && rows_are_vectors<floatX>(C) ? 16384 : 8192;
    if (C > longest)
        die(USAGE, "layernorm of %d channels: at most %d fit on the GPU (16384 in bf16 and fp16, in steps of 8)", C,
            longest);
}

#endif
#endif
