/* A channel at a time: its column of dx is added to columns of the tables. Every access is to another cache line, of
 * which one number in sixteen is used: the lines of all rows of dx and of their rows in the tables do not stay in the
 * nearest cache until the next channel. */
static inline void columns_add(real* table, const floatX* dx, const int* index, int rows, int skipped,
                               EmbeddingInputs in, size_t C, Dropout dropout, Mode mode) {
    for (size_t c = 0; c < C; c++) {
        for (size_t r = 0; mode == SET && r < (size_t)rows; r++) table[r * C + c] = 0;
        for (int n = 0; n < in.s->rows; n++) {
            double keep = dropout.threshold ? embedding_keep_ref(dropout, in.s, n, (int)c) : 1;
            if (index[n] != skipped) table[(size_t)index[n] * C + c] += (real)keep * dx[(size_t)n * C + c];
        }
    }
}

static inline void rung_embedding_backward(EmbeddingGrads d, const floatX* dx, EmbeddingInputs in, EmbeddingSizes sizes,
                                           Dropout dropout, Mode word_mode, Mode mode, Context* ctx) {
    size_t C = (size_t)sizes.C;
    (void)ctx;
    columns_add(d.word, dx, in.tokens, sizes.V, sizes.padding, in, C, dropout, word_mode);
    columns_add(d.position, dx, in.s->position, sizes.T, -1, in, C, dropout, mode);
    if (d.type) columns_add(d.type, dx, in.types, sizes.types, -1, in, C, dropout, mode);
}
