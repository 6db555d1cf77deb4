/* The formulas as they stand: a row's averages and dx, then for each channel the sums over all rows that d.w and d.b
 * are. A column's elements lie C apart, so each comes with a cache line of sixteen of which it uses one; the next
 * columns use the others, if the line is still in the cache after all rows. The columns come first because dx may be
 * dy. */
static inline void columns_layernorm_backward(floatX* dx, LayerNormGrads d, LayerNormInputs in, Mode dx_mode,
                                              Mode d_mode, Context* ctx) {
    size_t N = (size_t)in.size.N, C = (size_t)in.size.C;
    const real *mean = in.stats.mean, *rstd = in.stats.rstd;
    (void)ctx;
    for (size_t c = 0; c < C; c++) {
        double weight = d_mode == ADD ? (double)d.w[c] : 0, bias = d_mode == ADD ? (double)d.b[c] : 0;
        for (size_t n = 0; n < N; n++) {
            weight += (double)in.dy[n * C + c] * ((double)in.x[n * C + c] - (double)mean[n]) * (double)rstd[n];
            bias += (double)in.dy[n * C + c];
        }
        d.w[c] = (real)weight;
        d.b[c] = (real)bias;
    }
    for (size_t n = 0; n < N; n++) {
        const floatX *dy = in.dy + n * C, *x = in.x + n * C;
        double sum = 0, product = 0;
        for (size_t c = 0; c < C; c++) {
            double e = (double)dy[c] * (double)in.w[c];
            sum += e;
            product += e * ((double)x[c] - (double)mean[n]) * (double)rstd[n];
        }
        for (size_t c = 0; c < C; c++) {
            double u = ((double)x[c] - (double)mean[n]) * (double)rstd[n], e = (double)dy[c] * (double)in.w[c];
            real g = (real)((double)rstd[n] * (e - sum / (double)C - u * product / (double)C));
            dx[n * C + c] = dx_mode == ADD ? dx[n * C + c] + g : g;
        }
    }
}
