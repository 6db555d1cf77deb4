/* embedding.h's kernels, and the launch of the backward pass.
 *
 * The gradient of a table is the sum of rows of dx by an index. For the word table the rows are first sorted by token
 * (sort.cuh). Positions need no sort: position 0 has a row of every sequence, position 1 a row of every sequence that
 * is long enough, and so on. Then one launch handles all tables:
 *   - A list is divided into chunks and the channels into slices. A block, which is one warp, takes a slice of a chunk.
 *     A sum whose rows are all in the chunk is added to the table; other sums go to `ends`. Of the blocks with a part
 *     of such a sum, the last to arrive adds up the parts.
 *   - The few token types are summed along with the positions: a block keeps one sum per type. The last block to arrive
 *     of each group of blocks adds up the group's sums, and the last of all groups adds up those. More than
 *     EMBEDDING_TYPES types are sorted like the words.
 * The blocks of a slice start one after another, so the second table finds its rows of dx in L2. Positions come first,
 * so that the types' sums are added up while the words' blocks run. The terms of each sum and their order depend only
 * on the batch. */
#ifndef LLMC_OPS_EMBEDDING_KERNELS_CUH
#define LLMC_OPS_EMBEDDING_KERNELS_CUH

#include "llmc/device/cuda_utils.cuh"
#include "llmc/ops/common/dropout_mask.h"
#include "llmc/ops/embedding/sort.cuh"

enum { EMBEDDING_THREADS = 256 };

// One warp per row. A lane takes WIDTH channels at a time.
template <int WIDTH, int DROPPED>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_forward_kernel(floatX* x, const int* tokens, const int* types, Embeddings e, const int* position, int N,
                             int C, DropoutRows dropout) {
    int n = blockIdx.x * (EMBEDDING_THREADS / WARP) + threadIdx.x / WARP;
    if (n >= N) return;
    const floatX* word = e.word + (size_t)tokens[n] * (size_t)C;
    const floatX* place = e.position + (size_t)position[n] * (size_t)C;
    const floatX* type = e.type ? e.type + (size_t)types[n] * (size_t)C : NULL;
    DropoutPlace drop = {0, 0};
    if constexpr (DROPPED) drop = dropout_place(dropout, n);
#pragma unroll 4
    for (int c = threadIdx.x % WARP * WIDTH; c < C; c += WARP * WIDTH) {
        float sum[WIDTH], f[WIDTH];
        to_floats(sum, load_vector<WIDTH>(word + c));
        to_floats(f, load_vector<WIDTH>(place + c));
#pragma unroll
        for (int i = 0; i < WIDTH; i++) sum[i] += f[i];
        if (type) {
            to_floats(f, load_vector<WIDTH>(type + c));
#pragma unroll
            for (int i = 0; i < WIDTH; i++) sum[i] += f[i];
        }
        if constexpr (DROPPED) dropout_multiply<WIDTH>(sum, dropout.dropout, drop, c);
        store_vector(x + (size_t)n * (size_t)C + c, from_floats<floatX, WIDTH>(sum));
    }
}

// ---------------------------------------------------------------------------------------------------------
// Backward

enum {
    EMBEDDING_CHUNK = 64,    // maximum entries of a chunk: each part of a sum costs two rows of traffic
    EMBEDDING_SHORTEST = 8,  // minimum entries of a chunk
    EMBEDDING_CHUNKS = 512,  // enough chunks to keep a GPU busy
    EMBEDDING_UNROLL = 4,    // rows loaded at a time, of dx and of the table
    EMBEDDING_TYPES = 8      // maximum number of token types whose sums a block keeps
};

// An ordered list of rows of dx, each with the row of the table to which it is added.
typedef struct {
    real* table;
    Mode mode;
    int skipped;  // the table's row without a gradient; -1: none
    int n, each, chunks;
    int rows, rows_reached;  // positions: SET zeroes the table's rows from rows_reached on
    SortedRows sorted;       // index NULL: the list of positions
    const int* cu_seqlens;
    int sequences;
} EmbeddingList;

// Token types that are summed along with the positions; count 0: none.
typedef struct {
    real* table;
    const int* types;
    Mode mode;
    int count;
    int group, groups;
    real *sums, *group_sums;  // [chunks of positions, count, C], [groups, count, C]
    unsigned* arrivals;       // [groups + 1, slices]
} EmbeddingTypes;

// What a block does with the running sum after a row.
typedef enum { SUM_CONTINUES, SUM_TO_TABLE, SUM_TO_HEAD, SUM_TO_TAIL, SUM_IS_DROPPED } EmbeddingSum;

// f = p[0 .. WIDTH - 1]. embedding_store() does the reverse.
template <int WIDTH> __device__ inline void embedding_load(float* f, const real* p) {
    const int STEP = WIDTH == 1 ? 1 : 4;
#pragma unroll
    for (int k = 0; k < WIDTH; k += STEP) to_floats(f + k, load_vector<STEP>(p + k));
}

template <int WIDTH> __device__ inline void embedding_store(real* p, const float* f) {
    const int STEP = WIDTH == 1 ? 1 : 4;
#pragma unroll
    for (int k = 0; k < WIDTH; k += STEP) store_vector(p + k, from_floats<real, STEP>(f + k));
}

// sum += p[0], p[stride], ... p[(n - 1) * stride], in this order.
template <int WIDTH> __device__ inline void embedding_total(float* sum, const real* p, size_t stride, int n) {
    for (int first = 0; first < n; first += EMBEDDING_UNROLL) {
        float f[EMBEDDING_UNROLL][WIDTH];
#pragma unroll
        for (int j = 0; j < EMBEDDING_UNROLL; j++)
            if (first + j < n) embedding_load<WIDTH>(f[j], p + (size_t)(first + j) * stride);
#pragma unroll
        for (int j = 0; j < EMBEDDING_UNROLL; j++) {
            if (first + j >= n) break;
#pragma unroll
            for (int k = 0; k < WIDTH; k++) sum[k] += f[j][k];
        }
    }
}

template <int WIDTH> __device__ inline void embedding_write(real* entry, float* sum, Mode mode) {
    if (mode == ADD) embedding_total<WIDTH>(sum, entry, 0, 1);
    embedding_store<WIDTH>(entry, sum);
}

// The index and the row of entry i. Row -1: the sequence ends before this position.
__device__ inline int2 embedding_entry(const EmbeddingList& list, int i) {
    if (i < 0 || i >= list.n) return make_int2(-1, -1);
    if (list.sorted.index) return make_int2(list.sorted.index[i], list.sorted.row[i]);
    int position = i / list.sequences, sequence = i % list.sequences, row = list.cu_seqlens[sequence] + position;
    return make_int2(position, row < list.cu_seqlens[sequence + 1] ? row : -1);
}

// The number of consecutive chunks that begin with this index, starting next to `chunk` in the direction of `step`.
__device__ inline int embedding_chunks_with(const EmbeddingList& list, int index, int chunk, int step) {
    for (int found = 0;; found += WARP) {
        int k = chunk + step * (found + 1 + (int)threadIdx.x);
        int same = k >= 0 && k < list.chunks && list.sorted.index[k * list.each] == index;
        unsigned all = __ballot_sync(ALL_LANES, same);
        if (all != ALL_LANES) return found + __ffs((int)~all) - 1;
    }
}

// The first and the last chunk with entries of an index that has entries in `chunk`. head: `chunk` begins with it.
__device__ inline int2 embedding_span(const EmbeddingList& list, int index, int chunk, int head) {
    if (!list.sorted.index)
        return make_int2(index * list.sequences / list.each, ((index + 1) * list.sequences - 1) / list.each);
    int first = chunk, last = chunk + embedding_chunks_with(list, index, chunk, 1);
    if (head) {
        first -= embedding_chunks_with(list, index, chunk, -1);
        if (first > 0 && list.sorted.index[first * list.each - 1] == index) first--;
    }
    return make_int2(first, last);
}

// Write the block's sums by token type to types.sums. The last block of a group, and of all groups, adds them up.
template <int WIDTH>
__device__ inline void embedding_finish_types(EmbeddingTypes types, const float* kept, int chunk, int chunks, int C,
                                              int c) {
    const int STEP = WIDTH == 1 ? 1 : 4;
    int slices = gridDim.y, slice = blockIdx.y;
    size_t stride = (size_t)types.count * (size_t)C;
    for (int t = 0; t < types.count && c < C; t++) {
        real* to = types.sums + (size_t)chunk * stride + (size_t)t * (size_t)C + c;
#pragma unroll
        for (int k = 0; k < WIDTH; k += STEP) {
            store_vector(to + k, load_vector<STEP>(kept));
            kept += WARP * STEP;
        }
    }
    int group = chunk / types.group, begin = group * types.group, count = min(types.group, chunks - begin);
    if (!last_to_arrive(&types.arrivals[group * slices + slice], count)) return;
    for (int t = 0; t < types.count && c < C; t++) {
        size_t at = (size_t)t * (size_t)C + c;
        float sum[WIDTH] = {0};
        embedding_total<WIDTH>(sum, types.sums + (size_t)begin * stride + at, stride, count);
        embedding_store<WIDTH>(types.group_sums + (size_t)group * stride + at, sum);
    }
    if (!last_to_arrive(&types.arrivals[types.groups * slices + slice], types.groups)) return;
    for (int t = 0; t < types.count && c < C; t++) {
        size_t at = (size_t)t * (size_t)C + c;
        float sum[WIDTH] = {0};
        embedding_total<WIDTH>(sum, types.group_sums + at, stride, types.groups);
        embedding_write<WIDTH>(types.table + at, sum, types.mode);
    }
}

// Block x: a chunk of the list of positions, words or sorted types; y: a slice of WARP * WIDTH channels. Each thread
// takes WIDTH channels. ends [blocks, 2, C]: parts of the sum whose index began in an earlier chunk, and of the sum
// that begins in this chunk and continues in the next. arrivals [blocks, slices]: blocks that have arrived at a sum,
// stored at the chunk where the sum begins.
template <int WIDTH, int DROPPED>
__global__ void __launch_bounds__(WARP)
    embedding_backward_kernel(EmbeddingList positions, EmbeddingList words, EmbeddingList sorted_types,
                              EmbeddingTypes types, real* ends, unsigned* arrivals, const floatX* dx, int C,
                              DropoutRows dropout) {
    const int STEP = WIDTH == 1 ? 1 : 4;
    extern __shared__ float4 embedding_shared[];                         // sums by token type
    __shared__ int indices[EMBEDDING_CHUNK + 2], rows[EMBEDDING_CHUNK];  // indices: one neighbour on each side too
    __shared__ int row_types[EMBEDDING_CHUNK], behind[EMBEDDING_CHUNK];
    __shared__ DropoutPlace places[EMBEDDING_CHUNK];
    int lane = threadIdx.x, c = (int)(blockIdx.y * WARP + threadIdx.x) * WIDTH;
    int chunk = blockIdx.x, first_block = 0, kept_types = 0;
    EmbeddingList list = positions;
    if (chunk >= positions.chunks + words.chunks) list = sorted_types, first_block = positions.chunks + words.chunks;
    else if (chunk >= positions.chunks) list = words, first_block = positions.chunks;
    else kept_types = types.count;
    chunk -= first_block;
    ends += (size_t)first_block * 2 * (size_t)C + c;
    arrivals += first_block * gridDim.y + blockIdx.y;
    float* kept = (float*)embedding_shared + lane * STEP;
    for (int k = 0; k < kept_types * WIDTH; k++) ((float*)embedding_shared)[k * WARP + lane] = 0;

    int begin = chunk * list.each, count = min(list.each, list.n - begin);
    const int* index = indices + 1;
    for (int i = lane - 1; i <= count; i += WARP) {
        int2 entry = embedding_entry(list, begin + i);
        indices[i + 1] = entry.x;
        if (i < 0 || i >= count) continue;
        DropoutPlace place = {0, 0};
        if (DROPPED && entry.y >= 0) place = dropout_place(dropout, entry.y);
        rows[i] = entry.y;
        places[i] = place;
        row_types[i] = kept_types && entry.y >= 0 ? types.types[entry.y] : 0;
    }
    __syncthreads();
    for (int i = lane; i < EMBEDDING_CHUNK; i += WARP) {
        int here = i < count ? index[i] : -1, ended = i == count - 1 || (i < count && index[i + 1] != here);
        behind[i] = !ended                 ? SUM_CONTINUES
                    : here == list.skipped ? SUM_IS_DROPPED
                    : here == index[-1]    ? SUM_TO_HEAD
                    : here == index[i + 1] ? SUM_TO_TAIL
                                           : SUM_TO_TABLE;
        if (i >= count) rows[i] = -1, row_types[i] = 0;  // the unrolled loop may run past the last row
    }
    __syncthreads();

    float sum[WIDTH] = {0};
    for (int first = 0; first < count; first += EMBEDDING_UNROLL) {
        Vector<floatX, WIDTH> x[EMBEDDING_UNROLL];
        float before[EMBEDDING_UNROLL][WIDTH];  // the table's values, loaded early because rare words miss the cache
#pragma unroll
        for (int j = 0; j < EMBEDDING_UNROLL; j++) {
            int i = first + j;
            x[j] = {};
            if (c < C && rows[i] >= 0) x[j] = load_vector<WIDTH>(dx + (size_t)rows[i] * (size_t)C + c);
#pragma unroll
            for (int k = 0; k < WIDTH; k++) before[j][k] = 0;
            if (c < C && behind[i] == SUM_TO_TABLE && list.mode == ADD)
                embedding_load<WIDTH>(before[j], list.table + (size_t)index[i] * (size_t)C + c);
        }
#pragma unroll
        for (int j = 0; j < EMBEDDING_UNROLL; j++) {
            int i = first + j;
            float f[WIDTH];
            to_floats(f, x[j]);
            if constexpr (DROPPED) dropout_multiply<WIDTH>(f, dropout.dropout, places[i], c);
#pragma unroll
            for (int k = 0; k < WIDTH; k++) sum[k] += f[k];
            if (kept_types) {
                float* total = kept + row_types[i] * (WARP * WIDTH);
#pragma unroll
                for (int k = 0; k < WIDTH; k += STEP, total += WARP * STEP) {
                    Vector<float, STEP> v = load_vector<STEP>((const float*)total);
#pragma unroll
                    for (int m = 0; m < STEP; m++) v.v[m] += f[k + m];
                    store_vector(total, v);
                }
            }
            if (behind[i] == SUM_CONTINUES) continue;
            if (c < C && behind[i] == SUM_TO_TABLE) {
#pragma unroll
                for (int k = 0; k < WIDTH; k++) sum[k] += before[j][k];
                embedding_store<WIDTH>(list.table + (size_t)index[i] * (size_t)C + c, sum);
            } else if (c < C && behind[i] != SUM_IS_DROPPED) {
                size_t end = 2 * (size_t)chunk + (behind[i] == SUM_TO_HEAD ? 0 : 1);
                embedding_store<WIDTH>(ends + end * (size_t)C, sum);
            }
#pragma unroll
            for (int k = 0; k < WIDTH; k++) sum[k] = 0;
        }
    }

    for (int head = 1; head >= 0; head--) {
        int here = head ? index[0] : index[count - 1];
        if (here == list.skipped || (here == index[-1]) != head || (!head && here != index[count])) continue;
        int2 span = embedding_span(list, here, chunk, head);
        if (!last_to_arrive(arrivals + span.x * gridDim.y, span.y - span.x + 1) || c >= C) continue;
        float total[WIDTH] = {0};
        embedding_total<WIDTH>(total, ends + (2 * (size_t)span.x + 1) * (size_t)C, 0, 1);
        embedding_total<WIDTH>(total, ends + (2 * (size_t)span.x + 2) * (size_t)C, 2 * (size_t)C, span.y - span.x);
        embedding_write<WIDTH>(list.table + (size_t)here * (size_t)C + c, total, list.mode);
    }
    if (kept_types) embedding_finish_types<WIDTH>(types, kept, chunk, list.chunks, C, c);
    if (list.mode == SET && c < C)
        for (int row = list.rows_reached + chunk; row < list.rows; row += list.chunks) {
            float zero[WIDTH] = {0};
            embedding_store<WIDTH>(list.table + (size_t)row * (size_t)C + c, zero);
        }
}

// Divide a list of n entries into chunks.
static inline EmbeddingList embedding_list(real* table, Mode mode, int n) {
    EmbeddingList list = {.table = table, .mode = mode, .skipped = -1, .n = n};
    size_t each = round_up((size_t)n / EMBEDDING_CHUNKS, EMBEDDING_UNROLL);
    list.each = max_int(EMBEDDING_SHORTEST, (int)min_size(each, EMBEDDING_CHUNK));
    list.chunks = (int)blocks_for((size_t)n, (size_t)list.each);
    return list;
}

static inline EmbeddingList embedding_position_list(real* table, Mode mode, const Sequences* s, int T) {
    CHECK((size_t)s->count * (size_t)s->max_length < (size_t)1 << 31);
    EmbeddingList list = embedding_list(table, mode, s->count * s->max_length);
    if (s->count < list.each) {  // a chunk takes whole positions
        list.each -= list.each % s->count;
        list.chunks = (int)blocks_for((size_t)list.n, (size_t)list.each);
    }
    list.rows = T;
    list.rows_reached = s->max_length;
    list.cu_seqlens = s->cu_seqlens;
    list.sequences = s->count;
    return list;
}

// Sizes of the parts of a launch's scratch, in elements or bytes.
typedef struct {
    unsigned blocks, slices;
    size_t ends, chunk_sums, group_sums, counters;  // elements
    size_t words_bytes, types_bytes, bytes;         // of sorting; in total
} EmbeddingScratch;

// Scratch for these numbers of chunks of positions, words and sorted types (0: none). The chunks of positions form
// `groups` groups and sum `summed` types.
static inline EmbeddingScratch embedding_scratch(int positions, int words, int sorted_types, int groups, int summed,
                                                 int N, EmbeddingSizes sizes) {
    EmbeddingScratch z;
    size_t C = (size_t)sizes.C, width = rows_are_vectors<floatX>(sizes.C) ? Vector<floatX>::SIZE : 1;
    z.slices = blocks_for(C, WARP * width);
    z.blocks = (unsigned)(positions + words + sorted_types);
    z.ends = 2 * (size_t)z.blocks * C;
    z.chunk_sums = (size_t)positions * (size_t)summed * C;
    z.group_sums = (size_t)groups * (size_t)summed * C;
    z.counters = (size_t)z.slices * (z.blocks + (size_t)groups + 1);
    z.words_bytes = embedding_sort_bytes(sizes.V, N);
    z.types_bytes = sorted_types ? embedding_sort_bytes(sizes.types, N) : 0;
    z.bytes = (z.ends + z.chunk_sums + z.group_sums) * sizeof(real) + z.counters * sizeof(unsigned) + z.words_bytes +
              z.types_bytes;
    return z;
}

// Upper bound of the chunks of a list of up to n entries: n / EMBEDDING_SHORTEST for short lists; up to an eighth more
// than EMBEDDING_CHUNKS for longer ones, because chunk lengths are integers; n / EMBEDDING_CHUNK for the longest.
static inline int embedding_chunks_most(size_t n) {
    int longest = (int)blocks_for(n, EMBEDDING_CHUNK), shortest = (int)blocks_for(n, EMBEDDING_SHORTEST);
    return min_int(shortest, max_int(EMBEDDING_CHUNKS + EMBEDDING_CHUNKS / EMBEDDING_SHORTEST, longest));
}

// Chunks per group, chosen so that both steps of the types' sum take about as long.
static inline int embedding_group(int chunks) {
    int group = 0;
    while (group * group < chunks) group++;
    return group;
}

// Upper bound of a launch's scratch for up to N rows in up to `sequences` sequences of up to T rows.
static inline size_t embedding_scratch_bytes(int N, int sequences, int T, EmbeddingSizes sizes) {
    int sorted = sizes.types > EMBEDDING_TYPES, words = embedding_chunks_most((size_t)N);
    int positions = embedding_chunks_most((size_t)sequences * (size_t)T);
    if (sequences > 1) positions *= 2;  // chunks of whole positions are at least half as long
    return embedding_scratch(positions, words, sorted ? words : 0, embedding_group(positions), sorted ? 0 : sizes.types,
                             N, sizes)
        .bytes;
}

static inline void embedding_zero(real* table, int rows, int C, Context* ctx) {
    cudaCheck(cudaMemsetAsync(table, 0, (size_t)rows * (size_t)C * sizeof *table, ctx->stream));
}

COMPILED_IF_CALLED static inline void embedding_backward_launch(EmbeddingGrads d, const floatX* dx, EmbeddingInputs in,
                                                                EmbeddingSizes sizes, Dropout dropout, Mode word_mode,
                                                                Mode mode, Context* ctx) {
    const int W = Vector<floatX>::SIZE;
    const Sequences* s = in.s;
    const int *tokens = in.tokens, *types = in.types;
    int N = s->rows, C = sizes.C, sort_types = d.type && sizes.types > EMBEDDING_TYPES;
    if (word_mode == SET) embedding_zero(d.word, sizes.V, C, ctx);
    if (mode == SET && sort_types) embedding_zero(d.type, sizes.types, C, ctx);
    EmbeddingList words = embedding_list(d.word, ADD, N);
    EmbeddingList positions = embedding_position_list(d.position, mode, s, sizes.T);
    EmbeddingList sorted_types = embedding_list(d.type, ADD, N);
    EmbeddingTypes summed = {
        .table = d.type, .types = types, .mode = mode, .count = d.type && !sort_types ? sizes.types : 0};
    words.skipped = sizes.padding;
    if (!sort_types) sorted_types.chunks = 0;
    summed.group = embedding_group(positions.chunks);
    summed.groups = (int)blocks_for((size_t)positions.chunks, (size_t)summed.group);

    EmbeddingScratch z =
        embedding_scratch(positions.chunks, words.chunks, sorted_types.chunks, summed.groups, summed.count, N, sizes);
    real* memory = (real*)device_scratch(ctx, z.bytes);
    summed.sums = memory + z.ends;
    summed.group_sums = summed.sums + z.chunk_sums;
    SortCounters arrivals = {.p = (unsigned*)(summed.group_sums + z.group_sums), .n = z.counters};
    summed.arrivals = arrivals.p + (size_t)z.slices * z.blocks;
    char* sort_memory = (char*)(arrivals.p + z.counters);
    words.sorted = embedding_sort(sort_memory, arrivals, tokens, sizes.V, N, ctx);
    if (sort_types)
        sorted_types.sorted = embedding_sort(sort_memory + z.words_bytes, arrivals, types, sizes.types, N, ctx);

    int vectors = rows_are_vectors<floatX>(C), dropped = dropout.threshold != 0;
    auto kernel = embedding_backward_kernel<1, 0>;
    if (vectors) kernel = dropped ? embedding_backward_kernel<W, 1> : embedding_backward_kernel<W, 0>;
    else if (dropped) kernel = embedding_backward_kernel<1, 1>;
    size_t shared = (size_t)summed.count * WARP * (size_t)(vectors ? W : 1) * sizeof(float);
    kernel<<<dim3(z.blocks, z.slices), WARP, shared, ctx->stream>>>(positions, words, sorted_types, summed, memory,
                                                                    arrivals.p, dx, C, dropout_rows(dropout));
    cudaCheck(cudaGetLastError());
}

#endif
