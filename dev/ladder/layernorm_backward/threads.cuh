/* The formulas, in parallel where they are: with e = dy w and u = (x - mean) rstd, a thread computes a row's
 * averages of e and e u, then its dx. Another kernel has a thread for each channel, which adds up dy u and dy over
 * all rows for d.w and d.b. In the first kernel the threads of a warp read 32 rows, 2 C bytes apart: a load fetches
 * 32 sectors to use one element of each. The second kernel reads neighbours, but has only C threads: 768 for a GPU
 * that holds 270,000. */
static __global__ void threads_columns_kernel(LayerNormGrads d, LayerNormInputs in, Mode mode) {
    int c = (int)(blockIdx.x * blockDim.x + threadIdx.x), C = in.size.C;
    if (c >= C) return;
    float weight = 0, bias = 0;
    for (int n = 0; n < in.size.N; n++) {
        size_t i = (size_t)n * (size_t)C + (size_t)c;
        float g = to_float(in.dy[i]);
        weight += g * (to_float(in.x[i]) - in.stats.mean[n]) * in.stats.rstd[n];
        bias += g;
    }
    d.w[c] = mode == ADD ? d.w[c] + weight : weight;
    d.b[c] = mode == ADD ? d.b[c] + bias : bias;
}

static __global__ void threads_rows_kernel(floatX* dx, LayerNormInputs in, Mode mode) {
    int n = (int)(blockIdx.x * blockDim.x + threadIdx.x), C = in.size.C;
    if (n >= in.size.N) return;
    const floatX *dy = in.dy + (size_t)n * (size_t)C, *x = in.x + (size_t)n * (size_t)C;
    float mean = in.stats.mean[n], rstd = in.stats.rstd[n], sum = 0, product = 0;
    for (int c = 0; c < C; c++) {
        float e = to_float(dy[c]) * to_float(in.w[c]);
        sum += e;
        product += e * (to_float(x[c]) - mean) * rstd;
    }
    dx += (size_t)n * (size_t)C;
    for (int c = 0; c < C; c++) {
        float u = (to_float(x[c]) - mean) * rstd;
        float g = rstd * (to_float(dy[c]) * to_float(in.w[c]) - sum / C - u * product / C);
        dx[c] = from_float<floatX>(mode == ADD ? to_float(dx[c]) + g : g);
    }
}

static inline void threads_layernorm_backward(floatX* dx, LayerNormGrads d, LayerNormInputs in, Mode dx_mode,
                                              Mode d_mode, Context* ctx) {
    // The columns first: dx may be dy.
    threads_columns_kernel<<<blocks_for((size_t)in.size.C, 32), 32, 0, ctx->stream>>>(d, in, d_mode);
    threads_rows_kernel<<<blocks_for((size_t)in.size.N, 256), 256, 0, ctx->stream>>>(dx, in, dx_mode);
    cudaCheck(cudaGetLastError());
}
