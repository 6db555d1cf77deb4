/* CUDA programs on a machine without a GPU: g++ compiles what translate.py makes of the sources, with this file
 * included first. Kernels run on the CPU (threads.h), the CUDA runtime is replaced (runtime.h), and so is cuBLASLt
 * (cublaslt.h). Types and conversions are CUDA's own headers'.
 *
 *     make emulated && build/emulated/opscu test
 *
 * It is there for tests: it finds wrong results, missing barriers, accesses outside of arrays (SANITIZE=1). It says
 * nothing about time, and memory of other GPUs, caches and the order of concurrent writes are not modelled. */
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
