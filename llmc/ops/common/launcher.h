/* A macro for launchers whose kernels are templates. */
#ifndef LLMC_OPS_COMMON_LAUNCHER_H
#define LLMC_OPS_COMMON_LAUNCHER_H

// nvcc compiles every kernel that a function references, even if the function is never called, unless the function is a
// template. With this macro a program compiles only the kernels of the launchers that it calls.
#ifdef __CUDACC__
#define COMPILED_IF_CALLED template <int = 0>
#else
#define COMPILED_IF_CALLED
#endif

#endif
