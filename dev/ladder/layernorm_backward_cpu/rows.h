/* Faster than columns: one pass over the rows. A row is in the cache when its averages are known, so dx and what the
 * row adds to all of d.w and d.b cost no further read, and d.w and d.b, 2 C numbers, stay in the cache throughout.
 * All accesses are along rows, so the loops vectorize; the averages in sixteen partial sums.
 * layernorm_backward_row() is the shipped op's (llmc/ops/layernorm/layernorm.h); what the op adds are threads, with
 * sums of their own for each block of rows. */
static inline void rows_layernorm_backward(floatX* dx, LayerNormGrads d, LayerNormInputs in, Mode dx_mode, Mode d_mode,
                                           Context* ctx) {
    size_t C = (size_t)in.size.C;
    (void)ctx;
    if (d_mode == SET) memset(d.w, 0, C * sizeof *d.w), memset(d.b, 0, C * sizeof *d.b);
    for (size_t n = 0; n < (size_t)in.size.N; n++)
        layernorm_backward_row(dx + n * C, d.w, d.b, in.dy + n * C, in, n, dx_mode);
}
