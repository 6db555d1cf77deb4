/* Faster than loops: sixteen partial sums, of every sixteenth element each. They do not wait for one another, and
 * eight of them fit in a vector of AVX2, so one instruction adds eight elements. A partial sum has a sixteenth of
 * the additions, so float is precise enough. This is layernorm_forward_row(), the shipped op's
 * (llmc/ops/layernorm/layernorm.h), a row at a time; what the op adds to it are threads. */
static inline void lanes_layernorm_forward(floatX* y, LayerNormStats stats, const floatX* x, LayerNorm p, Rows size,
                                           real eps, Context* ctx) {
    size_t C = (size_t)size.C;
    (void)ctx;
    for (size_t n = 0; n < (size_t)size.N; n++)
        layernorm_forward_row(y + n * C, stats.mean + n, stats.rstd + n, x + n * C, p, C, eps);
}
