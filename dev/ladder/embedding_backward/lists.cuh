/* Faster than scan: tokens are sorted by the row that they belong to, so a row finds its own at once. Sorting by
 * counting takes three small kernels: count each row's tokens, add up the counts to where each row's list begins,
 * and put each token into its list. Integer atomics do the counting: their sums are the same in any order. The order
 * within a list is not, so the block that adds a list up sorts it first, by counting how many of the list come
 * before each. What limits it now is the longest list: one block adds up all rows of the most frequent token. */
#include "dev/ladder/embedding_backward/scan.cuh"

enum { LISTS_THREADS = 256, LISTS_SCAN_THREADS = 1024 };

static __global__ void lists_count_kernel(int* counts, const int* index, int N) {
    int n = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (n < N) atomicAdd(&counts[index[n]], 1);
}

// begins[row] = the counts before it. One block: a thread adds up a piece of the counts, then come the pieces before.
static __global__ void lists_begin_kernel(int* begins, const int* counts, int rows) {
    __shared__ int sums[LISTS_SCAN_THREADS];
    int t = (int)threadIdx.x, each = (rows + LISTS_SCAN_THREADS - 1) / LISTS_SCAN_THREADS;
    int first = min(t * each, rows), last = min(first + each, rows), sum = 0;
#pragma unroll 8
    for (int i = first; i < last; i++) sum += counts[i];
    sums[t] = sum;
    for (int distance = 1; distance < LISTS_SCAN_THREADS; distance *= 2) {
        __syncthreads();
        int before = t >= distance ? sums[t - distance] : 0;
        __syncthreads();
        sums[t] += before;
    }
    int begin = sums[t] - sum;
    for (int i = first; i < last; i++) begins[i] = begin, begin += counts[i];
    if (t == LISTS_SCAN_THREADS - 1) begins[rows] = begin;
}

static __global__ void lists_fill_kernel(int* list, int* counts, const int* begins, const int* index, int N) {
    int n = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (n < N) list[begins[index[n]] + atomicSub(&counts[index[n]], 1) - 1] = n;
}

// Grid: rows of the table.
static __global__ void lists_add_kernel(Table table, int* sorted, const int* list, const int* begins, const floatX* dx,
                                        int C, DropoutRows keep) {
    int row = (int)blockIdx.x, begin = begins[row], length = row == table.skipped ? 0 : begins[row + 1] - begin;
    if (length == 0 && table.mode == ADD) return;
    for (int i = (int)threadIdx.x; i < length; i += LISTS_THREADS) {
        int n = list[begin + i], rank = 0;
        for (int j = 0; j < length; j++) rank += list[begin + j] < n;
        sorted[begin + rank] = n;
    }
    __syncthreads();
    for (int c = (int)threadIdx.x; c < C; c += LISTS_THREADS) {
        float sum = 0;
#pragma unroll 4
        for (int i = 0; i < length; i++) sum += table_gradient(dx, sorted[begin + i], c, C, keep);
        real* to = table.sums + (size_t)row * (size_t)C + (size_t)c;
        *to = table.mode == ADD ? *to + sum : sum;
    }
}

static inline void lists_embedding_backward(EmbeddingGrads d, const floatX* dx, EmbeddingInputs in,
                                            EmbeddingSizes sizes, Dropout dropout, Mode word_mode, Mode mode,
                                            Context* ctx) {
    Table tables[3];
    DropoutRows keep = {dropout, in.s->sequence, in.s->position, in.s->first};
    int N = in.s->rows, count = tables_of(tables, d, in, sizes, word_mode, mode);
    for (int i = 0; i < count; i++) {
        size_t rows = (size_t)tables[i].rows;
        int* counts = (int*)device_scratch(ctx, (2 * rows + 1 + 2 * (size_t)N) * sizeof(int));
        int *begins = counts + rows, *list = begins + rows + 1, *sorted = list + N;
        cudaCheck(cudaMemsetAsync(counts, 0, rows * sizeof(int), ctx->stream));
        lists_count_kernel<<<blocks_for(N, 256), 256, 0, ctx->stream>>>(counts, tables[i].index, N);
        lists_begin_kernel<<<1, LISTS_SCAN_THREADS, 0, ctx->stream>>>(begins, counts, tables[i].rows);
        lists_fill_kernel<<<blocks_for(N, 256), 256, 0, ctx->stream>>>(list, counts, begins, tables[i].index, N);
        lists_add_kernel<<<blocks_for(rows, 1), LISTS_THREADS, 0, ctx->stream>>>(tables[i], sorted, list, begins, dx,
                                                                                 sizes.C, keep);
    }
    cudaCheck(cudaGetLastError());
}
