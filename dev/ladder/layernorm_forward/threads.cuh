/* One thread for each row: the definition, in parallel over rows. The 32 threads of a warp read one element each
 * from 32 rows, 2 C bytes apart, so a load fetches 32 sectors of 32 bytes to use 2 of each. The rest of a sector is
 * used by the next loads if it is still in the cache then. Sums are of double: one thread adds all C numbers, one
 * after the other, and with float the rounding errors of a long row show in rstd. */
static __global__ void threads_kernel(floatX* y, LayerNormStats stats, const floatX* x, LayerNorm p, Rows size,
                                      float eps) {
    int n = (int)(blockIdx.x * blockDim.x + threadIdx.x), C = size.C;
    if (n >= size.N) return;
    size_t row = (size_t)n * (size_t)C;
    double sum = 0, sum_sq = 0;
    for (int c = 0; c < C; c++) sum += to_float(x[row + c]);
    float mean = (float)(sum / C);
    for (int c = 0; c < C; c++) {
        float d = to_float(x[row + c]) - mean;
        sum_sq += (double)(d * d);
    }
    float rstd = rsqrtf((float)(sum_sq / C) + eps);
    for (int c = 0; c < C; c++)
        y[row + c] = from_float<floatX>((to_float(x[row + c]) - mean) * rstd * p.w_fp32[c] + to_float(p.b[c]));
    stats.mean[n] = mean;
    stats.rstd[n] = rstd;
}

static inline void threads_layernorm_forward(floatX* y, LayerNormStats stats, const floatX* x, LayerNorm p, Rows size,
                                             real eps, Context* ctx) {
    threads_kernel<<<blocks_for((size_t)size.N, 256), 256, 0, ctx->stream>>>(y, stats, x, p, size, eps);
    cudaCheck(cudaGetLastError());
}
