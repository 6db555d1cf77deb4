/* Exercise 6, embedding_backward: the forward pass looked up rows; now gradients are added to these rows.
 *
 *   d.word[tokens[n], c]       += dx[n, c]          in.tokens [N], below sizes.V
 *   d.position[position[n], c] += dx[n, c]          in.s->position [N], below sizes.T
 *   d.type[types[n], c]        += dx[n, c]          in.types [N], below sizes.types; may be NULL (GPT-2)
 *
 * dx [N, C] with N = in.s->rows, C = sizes.C; d.word [V, C], d.position [T, C], d.type [types, C]. A token that
 * occurs twice gets both rows. Modes: with SET a whole table is 0 before anything is added, with the rows
 * that no token uses. The word table has its own, word_mode: a tied head has already written to it. Ignore dropout (it is
 * off in the cases) and sizes.padding. If you use threads: two of them must not add to the same row. */
static void exercise_embedding_backward(EmbeddingGrads d, const floatX* dx, EmbeddingInputs in, EmbeddingSizes sizes,
                                        Dropout dropout, Mode word_mode, Mode mode, Context* ctx) {
    // your code
}
