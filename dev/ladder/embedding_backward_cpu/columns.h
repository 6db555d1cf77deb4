/* A channel at a time: its column of dx is added to columns of the tables. Every access is to another cache line, of
 * which one number in sixteen is used: the lines of all rows of dx and of their rows in the tables do not stay in the
 * nearest cache until the next channel. */
static inline void columns_add(real* table, const floatX* dx, EmbeddingRefIndex i, const Sequences* s, size_t C,
                               Dropout dropout, Mode mode) {
    for (size_t c = 0; c < C; c++) {
        for (size_t r = 0; mode == SET && r < (size_t)i.rows; r++) table[r * C + c] = 0;
        for (int n = 0; n < s->rows; n++) {
            double keep = dropout_factor_ref(dropout, s->sequence[n], s->position[n], (int)c);
            if (i.index[n] != i.skipped) table[(size_t)i.index[n] * C + c] += (real)keep * dx[(size_t)n * C + c];
        }
    }
}

static inline void columns_embedding_backward(EmbeddingGrads d, const floatX* dx, EmbeddingInputs in,
                                              EmbeddingSizes sizes, Dropout dropout, Mode word_mode, Mode mode,
                                              Context* ctx) {
    EmbeddingRefIndex word = {in.tokens, sizes.V, sizes.padding}, position = {in.s->position, sizes.T, -1};
    EmbeddingRefIndex type = {in.types, sizes.types, -1};
    size_t C = (size_t)sizes.C;
    (void)ctx;
    columns_add(d.word, dx, word, in.s, C, dropout, word_mode);
    columns_add(d.position, dx, position, in.s, C, dropout, mode);
    if (d.type) columns_add(d.type, dx, type, in.s, C, dropout, mode);
}
