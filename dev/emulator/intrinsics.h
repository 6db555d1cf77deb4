/* The CUDA device functions that the project uses, on the CPU, as the CUDA C++ Programming Guide describes them. */
#ifndef DEV_EMULATOR_INTRINSICS_H
#define DEV_EMULATOR_INTRINSICS_H

#include <math.h>

#include "threads.h"

// ---------------------------------------------------------------------------------------------------------
// Barriers and fences. Threads of a block never run at the same time, so a fence has nothing to do.

static inline void __syncthreads(void) { emulated_barrier(0, 0, 0); }
static inline int __syncthreads_or(int value) { return emulated_barrier(0, 0, value); }
static inline void __threadfence(void) {}

// ---------------------------------------------------------------------------------------------------------
// Functions of a warp

template <typename T> struct EmulatedLanes { T x[32]; };

template <typename T> static inline void emulated_gather(EmulatedCall* calls, unsigned mask) {
    EmulatedLanes<T> all;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) all.x[i] = *(const T*)calls[i].in;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) *(EmulatedLanes<T>*)calls[i].out = all;
}

// What the lanes of the mask have, as each of them gets it.
template <typename T> static inline EmulatedLanes<T> emulated_lanes(unsigned mask, T x) {
    EmulatedLanes<T> all;
    EmulatedCall call = {emulated_gather<T>, mask, &x, &all, 0, NULL};
    emulated_warp_call(call);
    return all;
}

template <typename T> static inline T emulated_shuffle_from(unsigned mask, T x, int source) {
    EmulatedLanes<T> all = emulated_lanes(mask, x);
    if (!(mask >> source & 1)) emulated_fault("a shuffle reads a lane that does not take part");
    return all.x[source];
}

static inline int emulated_lane(void) { return emulated.now->current % 32; }

template <typename T> static inline T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
    return emulated_shuffle_from(mask, x, (emulated_lane() & -width) + (lane & (width - 1)));
}

template <typename T> static inline T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32) {
    int me = emulated_lane(), source = me ^ lanes;
    return emulated_shuffle_from(mask, x, source / width > me / width ? me : source);
}

template <typename T> static inline T __shfl_up_sync(unsigned mask, T x, unsigned lanes, int width = 32) {
    int me = emulated_lane();
    return emulated_shuffle_from(mask, x, me % width < (int)lanes ? me : me - (int)lanes);
}

template <typename T> static inline T __shfl_down_sync(unsigned mask, T x, unsigned lanes, int width = 32) {
    int me = emulated_lane();
    return emulated_shuffle_from(mask, x, me % width + (int)lanes >= width ? me : me + (int)lanes);
}

static inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated_lanes(mask, 0); }

template <typename T> static inline T __reduce_add_sync(unsigned mask, T x) {
    EmulatedLanes<T> all = emulated_lanes(mask, x);
    T sum = 0;
    for (int i = 0; i < 32; i++) sum += mask >> i & 1 ? all.x[i] : 0;
    return sum;
}

template <typename T> static inline T __reduce_max_sync(unsigned mask, T x) {
    EmulatedLanes<T> all = emulated_lanes(mask, x);
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && all.x[i] > x) x = all.x[i];
    return x;
}

template <typename T> static inline unsigned __match_any_sync(unsigned mask, T x) {
    EmulatedLanes<T> all = emulated_lanes(mask, x);
    unsigned same = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && all.x[i] == x) same |= 1u << i;
    return same;
}

static inline unsigned __ballot_sync(unsigned mask, int value) {
    EmulatedLanes<int> all = emulated_lanes(mask, value);
    unsigned bits = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && all.x[i]) bits |= 1u << i;
    return bits;
}

// ---------------------------------------------------------------------------------------------------------
// Atomics: the old value

template <typename T> static inline T atomicAdd(T* p, T x) {
    T old = *p;
    *p = old + x;
    return old;
}

template <typename T> static inline T atomicMax(T* p, T x) {
    T old = *p;
    if (x > old) *p = x;
    return old;
}

template <typename T> static inline T atomicExch(T* p, T x) {
    T old = *p;
    *p = x;
    return old;
}

static inline unsigned atomicInc(unsigned* p, unsigned most) {
    unsigned old = *p;
    *p = old >= most ? 0 : old + 1;
    return old;
}

// ---------------------------------------------------------------------------------------------------------
// Loads, stores and numbers

template <typename T> static inline T __ldcs(const T* p) { return *p; }
template <typename T> static inline T __ldcg(const T* p) { return *p; }
template <typename T> static inline void __stcg(T* p, T x) { *p = x; }

// Static data lies below 4 GiB in a program that is linked without PIE, so that its address is one of shared memory.
static inline size_t __cvta_generic_to_shared(const void* p) { return (size_t)p; }
static inline void* __cvta_shared_to_generic(size_t address) { return (void*)address; }

// The asynchronous copies of cuda_pipeline_primitives.h, made at once.
static inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zeros = 0) {
    memcpy(to, from, bytes - zeros);
    memset((char*)to + bytes - zeros, 0, zeros);
}
static inline void __pipeline_commit(void) {}
static inline void __pipeline_wait_prior(size_t) {}

static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline unsigned __float_as_uint(float x) {
    unsigned u;
    memcpy(&u, &x, sizeof u);
    return u;
}
static inline int __float_as_int(float x) {
    int u;
    memcpy(&u, &x, sizeof u);
    return u;
}
static inline float __int_as_float(int u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline size_t min(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t max(size_t a, size_t b) { return a > b ? a : b; }

// Four bytes of y:x, chosen by the digits of `selector`; PTX's prmt takes digits from 8 on for the byte's sign.
static inline unsigned emulated_bytes(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned digit = selector >> (4 * i) & 15, byte = (unsigned)(bytes >> (8 * (digit & 7))) & 255;
        if (digit & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    return emulated_bytes(x, y, selector & 0x7777);
}

// All bits of each half in which a is larger than b, as signed numbers.
static inline unsigned __vcmpgts2(unsigned a, unsigned b) {
    unsigned low = (int16_t)a > (int16_t)b ? 0xffff : 0, high = (int16_t)(a >> 16) > (int16_t)(b >> 16) ? 0xffff : 0;
    return high << 16 | low;
}

// A lane may call it alone, which leaves out no lane that it must wait for.
static inline unsigned __activemask(void) { return 1u << emulated_lane(); }
[[noreturn]] static inline void __trap(void) { emulated_fault("__trap()"); }

#endif
