/* Faster than columns: a token at a time. Its row of dx is read once and added to a row of each table. Both are
 * contiguous, so a cache line is used in full, the loop vectorizes, and the next lines are fetched ahead. */
static inline void rows_add(real* to, const floatX* from, size_t C) {
#pragma omp simd
    for (size_t c = 0; c < C; c++) to[c] += from[c];
}

static inline void rows_embedding_backward(EmbeddingGrads d, const floatX* dx, EmbeddingInputs in, EmbeddingSizes sizes,
                                           Dropout dropout, Mode word_mode, Mode mode, Context* ctx) {
    size_t C = (size_t)sizes.C;
    real* dropped = (real*)device_scratch(ctx, C * sizeof *dropped);
    if (word_mode == SET) memset(d.word, 0, (size_t)sizes.V * C * sizeof(real));
    if (mode == SET) memset(d.position, 0, (size_t)sizes.T * C * sizeof(real));
    if (mode == SET && d.type) memset(d.type, 0, (size_t)sizes.types * C * sizeof(real));
    for (int n = 0; n < in.s->rows; n++) {
        const floatX* row = dx + (size_t)n * C;
        if (dropout.threshold) {
            memcpy(dropped, row, C * sizeof *dropped);
            dropout_multiply_row(dropped, dropout, n, 0, sizes.C);
            row = dropped;
        }
        if (in.tokens[n] != sizes.padding) rows_add(d.word + (size_t)in.tokens[n] * C, row, C);
        rows_add(d.position + (size_t)in.s->position[n] * C, row, C);
        if (d.type) rows_add(d.type + (size_t)in.types[n] * C, row, C);
    }
}
