/* The formula turned inside out: not "each token adds to a row of the table", but "each row of the table adds up its
 * tokens". Floating-point atomics would make the first form parallel, but their order, and so the result's last
 * bits, would differ from run to run. Here one block owns a row and adds in order. It looks through all tokens, 256
 * at a time, and most of these looks find nothing: 50,257 rows times 65,536 tokens are read for 65,536 hits. */
typedef struct {
    real* sums;
    const int* index;   // [N] the row of each token
    int rows, skipped;  // skipped: the row that gets no gradient, or -1
    Mode mode;
} Table;

static __device__ inline float table_gradient(const floatX* dx, int n, int c, int C, const DropoutRows& keep) {
    float g = to_float(dx[(size_t)n * (size_t)C + (size_t)c]);
    if (keep.dropout.threshold) dropout_multiply<1>(&g, keep.dropout, dropout_place(keep, n), c);
    return g;
}

enum { SCAN_THREADS = 256, SCAN_CHANNELS = 8 };  // channels of a thread, in one look through the tokens

// Grid: rows of the table.
static __global__ void scan_kernel(Table table, const floatX* dx, int N, int C, DropoutRows keep) {
    __shared__ int found[SCAN_THREADS];
    int row = (int)blockIdx.x, t = (int)threadIdx.x;
    float sum[SCAN_CHANNELS] = {};
    for (int n0 = 0; n0 < N && row != table.skipped; n0 += SCAN_THREADS) {
        int mine = n0 + t < N && table.index[n0 + t] == row;
        if (!__syncthreads_or(mine)) continue;
        found[t] = mine;
        __syncthreads();
        for (int i = 0; i < SCAN_THREADS; i++)
            if (found[i])
#pragma unroll
                for (int k = 0; k < SCAN_CHANNELS; k++)
                    if (t + k * SCAN_THREADS < C) sum[k] += table_gradient(dx, n0 + i, t + k * SCAN_THREADS, C, keep);
    }
#pragma unroll
    for (int k = 0; k < SCAN_CHANNELS; k++) {
        if (t + k * SCAN_THREADS >= C) break;
        real* to = table.sums + (size_t)row * (size_t)C + (size_t)(t + k * SCAN_THREADS);
        *to = table.mode == ADD ? *to + sum[k] : sum[k];
    }
}

// The tables of a launch; returns their number.
static inline int tables_of(Table* tables, EmbeddingGrads d, EmbeddingInputs in, EmbeddingSizes sizes, Mode word_mode,
                            Mode mode) {
    const Table all[3] = {{d.word, in.tokens, sizes.V, sizes.padding, word_mode},
                          {d.position, in.s->position, sizes.T, -1, mode},
                          {d.type, in.types, sizes.types, -1, mode}};
    memcpy(tables, all, sizeof all);
    return d.type ? 3 : 2;
}

static inline void scan_embedding_backward(EmbeddingGrads d, const floatX* dx, EmbeddingInputs in, EmbeddingSizes sizes,
                                           Dropout dropout, Mode word_mode, Mode mode, Context* ctx) {
    Table tables[3];
    DropoutRows keep = {dropout, in.s->sequence, in.s->position, in.s->first};
    CHECK(sizes.C <= SCAN_THREADS * SCAN_CHANNELS);
    int count = tables_of(tables, d, in, sizes, word_mode, mode);
    for (int i = 0; i < count; i++)
        scan_kernel<<<tables[i].rows, SCAN_THREADS, 0, ctx->stream>>>(tables[i], dx, in.s->rows, sizes.C, keep);
    cudaCheck(cudaGetLastError());
}
