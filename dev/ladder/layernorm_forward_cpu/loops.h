/* The definition: the row's mean, then its variance, then y. Each addition of a sum waits for the one before, four
 * cycles or so, and the compiler may not reorder them: floating-point addition is not associative. Double, because so
 * many additions in a row lose digits. */
static inline void loops_layernorm_forward(floatX* y, LayerNormStats stats, const floatX* x, LayerNorm p, Rows size,
                                           real eps, Context* ctx) {
    int C = size.C;
    (void)ctx;
    for (int n = 0; n < size.N; n++, x += C, y += C) {
        double sum = 0, sum_sq = 0;
        for (int c = 0; c < C; c++) sum += (double)x[c];
        double mean = sum / C;
        for (int c = 0; c < C; c++) sum_sq += ((double)x[c] - mean) * ((double)x[c] - mean);
        double rstd = 1 / sqrt(sum_sq / C + (double)eps);
        for (int c = 0; c < C; c++) y[c] = (real)(((double)x[c] - mean) * rstd * (double)p.w_fp32[c] + (double)p.b[c]);
        stats.mean[n] = (real)mean;
        stats.rstd[n] = (real)rstd;
    }
}
