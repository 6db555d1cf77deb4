/* Run CUDA programs on a machine without a GPU: g++ compiles translate.py's output of the sources, with this file
 * included first. Kernels run on the CPU (threads.h). runtime.h replaces the CUDA runtime, and cublaslt.h replaces
 * cuBLASLt. Types and conversions are from CUDA's own headers.
 *
 *     make emulated && build/emulated/opscu test
 *
 * It is for tests: it finds wrong results, missing barriers and out-of-bounds accesses (SANITIZE=1). It says nothing
 * about time, and does not model other GPUs' memory, caches or the order of concurrent writes. */
#ifndef DEV_EMULATOR_EMULATOR_H
#define DEV_EMULATOR_EMULATOR_H

#include <functional>  // before the macros, which it may contain
#include <vector>

#include <cublasLt.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#define __CUDACC__ 1
#ifdef HAS_SM90A
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#else
#define __CUDA_ARCH__ 800
#endif
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

#include "cublaslt.h"
#include "intrinsics.h"
#include "runtime.h"

#endif
