/* A stable sort of row numbers by a small key, for the embedding's backward pass: it groups the rows by token.
 *
 * Up to SORT_RANKED rows: one launch, in which each row counts the rows that come before it.
 * More rows: radix sort, eight bits of the key at a time. A pass divides the list into tiles, one per block. A key is
 * placed after all keys with a smaller digit, and after the keys with the same digit in earlier tiles, in earlier warps
 * of its tile, and earlier in its own warp. The next pass needs to know how many keys of each tile have each digit.
 * These are counted while the keys are moved, so a pass is one launch. 65,536 rows and 50,257 tokens: three launches,
 * about 1.5 MB of traffic, latency-bound. All arithmetic is on integers, so the result does not depend on the order of
 * execution. */
#ifndef LLMC_OPS_EMBEDDING_SORT_CUH
#define LLMC_OPS_EMBEDDING_SORT_CUH

#include "llmc/device/cuda_utils.cuh"

#ifdef __CUDACC__

enum {
    SORT_DIGIT_BITS = 8,
    SORT_DIGITS = 1 << SORT_DIGIT_BITS,
    SORT_WARPS = 8,
    SORT_KEYS = 8,                              // per thread
    SORT_TILE = SORT_WARPS * WARP * SORT_KEYS,  // keys of a tile
    SORT_RANKED = 4096
};

// The keys in ascending order, and the original row of each.
typedef struct {
    int *index, *row;  // [N]
} SortedRows;

// Counters of a later launch. The sort's first launch zeroes them.
typedef struct {
    unsigned* p;
    size_t n;
} SortCounters;

template <typename T> __device__ inline void embedding_sort_zero(T* p, size_t n) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = 0;
}

// One warp per row. The row is placed after all rows with a smaller key and after earlier rows with the same key.
__global__ void __launch_bounds__(SORT_WARPS* WARP)
    embedding_sort_rank_kernel(SortedRows sorted, SortCounters zeroed, const int* keys, int N) {
    int lane = threadIdx.x % WARP, n = blockIdx.x * SORT_WARPS + threadIdx.x / WARP;
    embedding_sort_zero(zeroed.p, zeroed.n);
    if (n >= N) return;
    int key = keys[n], before = 0;
#pragma unroll 8
    for (int m = lane; m < N; m += WARP) before += keys[m] < key + (m < n);
    before = warp_sum(before);
    if (lane == 0) {
        sorted.index[before] = key;
        sorted.row[before] = n;
    }
}

// One block per tile. counts [tiles, SORT_DIGITS]: how many keys of the tile have each value of the lowest digit. later
// [n] is zeroed.
__global__ void __launch_bounds__(SORT_WARPS* WARP)
    embedding_sort_count_kernel(int* counts, int* later, size_t n, SortCounters zeroed, const int* keys, int N) {
    __shared__ int count[SORT_DIGITS];
    int begin = blockIdx.x * SORT_TILE, end = min(N, begin + SORT_TILE);
    embedding_sort_zero(later, n);
    embedding_sort_zero(zeroed.p, zeroed.n);
    if (threadIdx.x < SORT_DIGITS) count[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < SORT_KEYS; k++) {
        int i = begin + k * SORT_WARPS * WARP + threadIdx.x;
        if (i < end) atomicAdd(&count[keys[i] & (SORT_DIGITS - 1)], 1);
    }
    __syncthreads();
    if (threadIdx.x < SORT_DIGITS) counts[blockIdx.x * SORT_DIGITS + threadIdx.x] = count[threadIdx.x];
}

// One block per tile. A warp takes SORT_KEYS * WARP consecutive keys, WARP at a time. rows NULL: numbers 0 .. N - 1.
// next_counts: those of the next pass, NULL in the last.
__global__ void __launch_bounds__(SORT_WARPS* WARP)
    embedding_sort_scatter_kernel(SortedRows sorted, int* next_counts, const int* counts, const int* keys,
                                  const int* rows, int N, int shift) {
    constexpr int WARPS = SORT_WARPS, TILE = SORT_TILE, PARTS = WARPS * WARP / SORT_DIGITS;
    static_assert(PARTS * SORT_DIGITS == WARPS * WARP, "PARTS threads share a digit");
    // First the number of this warp's keys with this digit so far, then where its next one goes.
    __shared__ int count[WARPS][SORT_DIGITS];
    __shared__ int2 part_sums[PARTS][SORT_DIGITS];  // keys with this digit in earlier tiles, and in all tiles
    // up_to: keys of the whole list with this digit or an earlier one of its group of WARP digits
    __shared__ int up_to[SORT_DIGITS];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int digit = threadIdx.x % SORT_DIGITS, part = threadIdx.x / SORT_DIGITS;
    int begin = blockIdx.x * TILE + warp * SORT_KEYS * WARP;
    int key[SORT_KEYS], row[SORT_KEYS], rank[SORT_KEYS];

#pragma unroll
    for (int k = 0; k < SORT_KEYS; k++) {  // all loads first
        int i = begin + k * WARP + lane;
        key[k] = i < N ? keys[i] : 0;
        row[k] = rows && i < N ? rows[i] : i;
    }
    for (int w = part; w < WARPS; w += PARTS) count[w][digit] = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < SORT_KEYS; k++) {
        int i = begin + k * WARP + lane;
        int mine = i < N ? key[k] >> shift & (SORT_DIGITS - 1) : SORT_DIGITS;  // past the end: a separate digit
        unsigned same = __match_any_sync(ALL_LANES, mine);
        int seen = i < N ? count[warp][mine] : 0;
        rank[k] = seen + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (i < N && lane == __ffs((int)same) - 1) count[warp][mine] = seen + __popc(same);
        __syncwarp();
    }

    // From here on each thread handles one digit: it counts the digit's keys in earlier tiles, and in all tiles.
    int before = 0, total = 0;
#pragma unroll 8
    for (int tile = part; tile < (int)gridDim.x; tile += PARTS) {
        int n = counts[tile * SORT_DIGITS + digit];
        if (tile < (int)blockIdx.x) before += n;
        total += n;
    }
    part_sums[part][digit] = make_int2(before, total);
    __syncthreads();
    int inclusive = 0;
    if (part == 0) {
#pragma unroll
        for (int p = 1; p < PARTS; p++) before += part_sums[p][digit].x, total += part_sums[p][digit].y;
        inclusive = total;
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            int left = __shfl_up_sync(ALL_LANES, inclusive, distance);
            if (lane >= distance) inclusive += left;
        }
        up_to[digit] = inclusive;
    }
    __syncthreads();
    if (part == 0) {
        int next = inclusive - total + before;
        for (int w = 0; w < warp; w++) next += up_to[w * WARP + WARP - 1];
#pragma unroll 8
        for (int w = 0; w < WARPS; w++) {
            int n = count[w][digit];
            count[w][digit] = next;
            next += n;
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < SORT_KEYS; k++) {
        int i = begin + k * WARP + lane;
        if (i >= N) break;
        int to = count[warp][key[k] >> shift & (SORT_DIGITS - 1)] + rank[k];
        sorted.index[to] = key[k];
        sorted.row[to] = row[k];
        int next_digit = key[k] >> (shift + SORT_DIGIT_BITS) & (SORT_DIGITS - 1);
        if (next_counts) atomicAdd(&next_counts[to / TILE * SORT_DIGITS + next_digit], 1);
    }
}

// The number of digits of keys below `entries`.
static inline int embedding_sort_passes(int entries) {
    int passes = 1;
    while (passes * SORT_DIGIT_BITS < 32 && (entries - 1) >> (passes * SORT_DIGIT_BITS)) passes++;
    return passes;
}

static inline size_t embedding_sort_bytes(int entries, int N) {
    size_t counts = (size_t)blocks_for((size_t)N, SORT_TILE) * SORT_DIGITS;
    return (4 * (size_t)N + (size_t)embedding_sort_passes(entries) * counts) * sizeof(int);
}

// Sort the rows 0 .. N - 1 by their index [N], which is below `entries`. The result is in `scratch`, of
// embedding_sort_bytes(entries, N).
static inline SortedRows embedding_sort(void* scratch, SortCounters zeroed, const int* index, int entries, int N,
                                        Context* ctx) {
    int *memory = (int*)scratch, *counts = memory + 4 * (size_t)N, passes = embedding_sort_passes(entries);
    SortedRows from = {NULL, NULL}, to = {.index = memory, .row = memory + N},
               other = {.index = memory + 2 * (size_t)N, .row = memory + 3 * (size_t)N};
    if (N <= SORT_RANKED) {
        embedding_sort_rank_kernel<<<blocks_for((size_t)N, SORT_WARPS), SORT_WARPS * WARP, 0, ctx->stream>>>(to, zeroed,
                                                                                                             index, N);
        cudaCheck(cudaGetLastError());
        return to;
    }
    unsigned tiles = blocks_for((size_t)N, SORT_TILE);
    size_t size = (size_t)tiles * SORT_DIGITS;
    embedding_sort_count_kernel<<<tiles, SORT_WARPS * WARP, 0, ctx->stream>>>(
        counts, counts + size, (size_t)(passes - 1) * size, zeroed, index, N);
    for (int pass = 0; pass < passes; pass++, counts += size) {
        if (pass > 0) {
            from = to;
            to = other;
            other = from;
        }
        embedding_sort_scatter_kernel<<<tiles, SORT_WARPS * WARP, 0, ctx->stream>>>(
            to, pass + 1 < passes ? counts + size : NULL, counts, pass > 0 ? from.index : index,
            pass > 0 ? from.row : NULL, N, pass * SORT_DIGIT_BITS);
    }
    cudaCheck(cudaGetLastError());
    return to;
}

#endif
#endif
