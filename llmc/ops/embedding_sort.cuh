/* A stable sort of row numbers by a small key, for the embedding's backward pass: which rows belong to which token.
 *
 * Radix sort, eight bits of the key at a time, two launches for each. A pass cuts the list into tiles of SORT_TILE keys;
 * a key goes behind all keys with a smaller digit, and those with the same digit in tiles before its own, in warps of
 * its tile before its own, and in its own warp before it. No order of execution enters: integers only.
 * 65,536 rows and 50,257 tokens: two passes, about 1.5 MB of traffic, bound by the latency of the four launches. */
#ifndef LLMC_EMBEDDING_SORT_CUH
#define LLMC_EMBEDDING_SORT_CUH

#include "../device/device.cuh"

#ifdef __CUDACC__

enum { SORT_DIGITS = 256, SORT_WARPS = 8, SORT_KEYS = 8, SORT_TILE = SORT_WARPS * WARP * SORT_KEYS };

// The keys in ascending order, and the row that each came from.
typedef struct {
    int *index, *row;  // [N]
} SortedRows;

static_assert(SORT_WARPS * WARP == SORT_DIGITS, "a thread is also a digit");

// Block: a tile. counts [tiles, SORT_DIGITS]: how many keys of the tile have each digit.
__global__ void __launch_bounds__(SORT_WARPS* WARP)
    embedding_sort_count_kernel(int* counts, const int* keys, int N, int shift) {
    __shared__ int count[SORT_DIGITS];
    int begin = blockIdx.x * SORT_TILE, end = min(N, begin + SORT_TILE);
    count[threadIdx.x] = 0;
    __syncthreads();
    for (int i = begin + threadIdx.x; i < end; i += SORT_WARPS * WARP)
        atomicAdd(&count[keys[i] >> shift & (SORT_DIGITS - 1)], 1);
    __syncthreads();
    counts[blockIdx.x * SORT_DIGITS + threadIdx.x] = count[threadIdx.x];
}

// Block: a tile; warp: SORT_KEYS * WARP neighbours of it, WARP at a time. rows NULL: the row numbers are 0 .. N - 1.
__global__ void __launch_bounds__(SORT_WARPS* WARP)
    embedding_sort_scatter_kernel(SortedRows sorted, const int* counts, const int* keys, const int* rows, int N,
                                  int shift) {
    __shared__ int count[SORT_WARPS][SORT_DIGITS];  // keys with this digit, seen by this warp
    __shared__ int goes_to[SORT_WARPS][SORT_DIGITS];
    __shared__ int
        up_to[SORT_DIGITS];  // keys of the whole list with this digit and those before it in its group of WARP
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, digit = threadIdx.x;
    int begin = blockIdx.x * SORT_TILE + warp * SORT_KEYS * WARP;
    int key[SORT_KEYS], rank[SORT_KEYS];

    for (int w = 0; w < SORT_WARPS; w++) count[w][digit] = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < SORT_KEYS; k++) {
        int i = begin + k * WARP + lane;
        key[k] = i < N ? keys[i] : 0;
        int mine = i < N ? key[k] >> shift & (SORT_DIGITS - 1) : SORT_DIGITS;  // past the end: a digit of their own
        unsigned same = __match_any_sync(ALL_LANES, mine);
        int seen = i < N ? count[warp][mine] : 0;
        rank[k] = seen + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (i < N && lane == __ffs((int)same) - 1) count[warp][mine] = seen + __popc(same);
        __syncwarp();
    }

    // A thread is a digit now: its keys in the tiles before this one, and in all.
    int before = 0, total = 0;
#pragma unroll 8
    for (int tile = 0; tile < (int)gridDim.x; tile++) {
        int n = counts[tile * SORT_DIGITS + digit];
        if (tile < (int)blockIdx.x) before += n;
        total += n;
    }
    int inclusive = total;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        int left = __shfl_up_sync(ALL_LANES, inclusive, distance);
        if (lane >= distance) inclusive += left;
    }
    up_to[digit] = inclusive;
    __syncthreads();
    int next = inclusive - total + before;
    for (int w = 0; w < warp; w++) next += up_to[w * WARP + WARP - 1];
    for (int w = 0; w < SORT_WARPS; w++) {
        goes_to[w][digit] = next;
        next += count[w][digit];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < SORT_KEYS; k++) {
        int i = begin + k * WARP + lane;
        if (i >= N) break;
        int to = goes_to[warp][key[k] >> shift & (SORT_DIGITS - 1)] + rank[k];
        sorted.index[to] = key[k];
        sorted.row[to] = rows ? rows[i] : i;
    }
}

static inline size_t embedding_sort_bytes(int N) {
    return (4 * (size_t)N + (size_t)blocks_for((size_t)N, SORT_TILE) * SORT_DIGITS) * sizeof(int);
}

// Sort the rows 0 .. N - 1 by their index [N], which is below `entries`. The result lies in `scratch`, of
// embedding_sort_bytes(N).
static inline SortedRows embedding_sort(void* scratch, const int* index, int entries, int N, Context* ctx) {
    int* memory = (int*)scratch;
    unsigned tiles = blocks_for((size_t)N, SORT_TILE);
    SortedRows from = {NULL, NULL}, to = {memory, memory + N}, other = {memory + 2 * (size_t)N, memory + 3 * (size_t)N};
    int* counts = memory + 4 * (size_t)N;
    const int *keys = index, *rows = NULL;
    for (int shift = 0; shift == 0 || (shift < 32 && (entries - 1) >> shift); shift += 8) {
        if (shift > 0) {
            from = to;
            to = other;
            other = from;
            keys = from.index;
            rows = from.row;
        }
        embedding_sort_count_kernel<<<tiles, SORT_WARPS * WARP, 0, ctx->stream>>>(counts, keys, N, shift);
        embedding_sort_scatter_kernel<<<tiles, SORT_WARPS * WARP, 0, ctx->stream>>>(to, counts, keys, rows, N, shift);
        cudaCheck(cudaGetLastError());
    }
    return to;
}

#endif
#endif
