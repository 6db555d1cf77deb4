/* embedding.h's forward kernel without layernorm. */
#include "llmc/ops/embedding/embedding.h"  // before the guard: it includes this file

#ifndef LLMC_OPS_EMBEDDING_FORWARD_CUH
#define LLMC_OPS_EMBEDDING_FORWARD_CUH

#ifdef __CUDACC__

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

template <int WIDTH, int DROPPED>
static void embedding_forward_launch(floatX* x, EmbeddingInputs in, Embeddings e, int C, DropoutRows dropout,
                                     Context* ctx) {
    unsigned blocks = blocks_for((size_t)in.s->rows, EMBEDDING_THREADS / WARP);
    embedding_forward_kernel<WIDTH, DROPPED><<<blocks, EMBEDDING_THREADS, 0, ctx->stream>>>(
        x, in.tokens, in.types, e, in.s->position, in.s->rows, C, dropout);
    cudaCheck(cudaGetLastError());
}

COMPILED_IF_CALLED static inline void embedding_forward_rows(floatX* x, EmbeddingInputs in, Embeddings e, int C,
                                                             Dropout dropout, Context* ctx) {
    const int WIDTH = Vector<floatX>::SIZE;
    DropoutRows rows = {
        .dropout = dropout, .sequence = in.s->sequence, .position = in.s->position, .first = in.s->first};
    int vectors = rows_are_vectors<floatX>(C), dropped = dropout.threshold != 0;
    if (vectors && dropped) embedding_forward_launch<WIDTH, 1>(x, in, e, C, rows, ctx);
    else if (vectors) embedding_forward_launch<WIDTH, 0>(x, in, e, C, rows, ctx);
    else if (dropped) embedding_forward_launch<1, 1>(x, in, e, C, rows, ctx);
    else embedding_forward_launch<1, 0>(x, in, e, C, rows, ctx);
}

#endif
#endif
