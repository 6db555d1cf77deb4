/* Faster than threads: the threads of a warp share a row, read neighbouring elements and add up by shuffles. And the
 * columns are cut into slices of rows: a block takes 32 columns of a slice, eight rows at a time, so there are as
 * many threads as the GPU holds. Each slice leaves its sums in scratch, and a last kernel adds those up, in an order
 * that depends on nothing but the shape. dy and x are read twice from memory, once for the columns and once for the
 * rows. */
enum { SLICES = 128, COLUMNS = 32, DEPTH = 8 };

// Grid: columns, slices. partial [SLICES, 2, C].
static __global__ void warps_columns_kernel(float* partial, LayerNormInputs in) {
    __shared__ float weights[DEPTH][COLUMNS], biases[DEPTH][COLUMNS];
    int tx = (int)threadIdx.x, ty = (int)threadIdx.y, C = in.size.C, c = (int)blockIdx.x * COLUMNS + tx;
    float weight = 0, bias = 0;
#pragma unroll 4
    for (int n = (int)blockIdx.y * DEPTH + ty; n < in.size.N && c < C; n += SLICES * DEPTH) {
        size_t i = (size_t)n * (size_t)C + (size_t)c;
        float g = to_float(in.dy[i]);
        weight += g * (to_float(in.x[i]) - in.stats.mean[n]) * in.stats.rstd[n];
        bias += g;
    }
    weights[ty][tx] = weight, biases[ty][tx] = bias;
    __syncthreads();
    if (ty > 0 || c >= C) return;
    for (int k = 1; k < DEPTH; k++) weight += weights[k][tx], bias += biases[k][tx];
    partial[(size_t)blockIdx.y * 2 * C + c] = weight;
    partial[((size_t)blockIdx.y * 2 + 1) * C + c] = bias;
}

static __global__ void warps_sum_kernel(LayerNormGrads d, const float* partial, int slices, int C, Mode mode) {
    int c = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= 2 * C) return;
    float sum = 0, *to = c < C ? d.w + c : d.b + (c - C);
#pragma unroll 8
    for (int s = 0; s < slices; s++) sum += partial[(size_t)s * 2 * C + c];
    *to = mode == ADD ? *to + sum : sum;
}

static __global__ void warps_rows_kernel(floatX* dx, LayerNormInputs in, Mode mode) {
    int n = (int)((blockIdx.x * blockDim.x + threadIdx.x) / WARP), lane = (int)threadIdx.x % WARP, C = in.size.C;
    if (n >= in.size.N) return;
    const floatX *dy = in.dy + (size_t)n * (size_t)C, *x = in.x + (size_t)n * (size_t)C;
    float mean = in.stats.mean[n], rstd = in.stats.rstd[n], sum = 0, product = 0;
    for (int c = lane; c < C; c += WARP) {
        float e = to_float(dy[c]) * to_float(in.w[c]);
        sum += e;
        product += e * (to_float(x[c]) - mean) * rstd;
    }
    sum = warp_sum(sum) / C, product = warp_sum(product) / C;
    dx += (size_t)n * (size_t)C;
    for (int c = lane; c < C; c += WARP) {
        float u = (to_float(x[c]) - mean) * rstd;
        float g = rstd * (to_float(dy[c]) * to_float(in.w[c]) - sum - u * product);
        dx[c] = from_float<floatX>(mode == ADD ? to_float(dx[c]) + g : g);
    }
}

static inline void warps_layernorm_backward(floatX* dx, LayerNormGrads d, LayerNormInputs in, Mode dx_mode, Mode d_mode,
                                            Context* ctx) {
    size_t C = (size_t)in.size.C;
    float* partial = (float*)device_scratch(ctx, SLICES * 2 * C * sizeof(float));
    dim3 grid(blocks_for(C, COLUMNS), SLICES), block(COLUMNS, DEPTH);
    warps_columns_kernel<<<grid, block, 0, ctx->stream>>>(partial, in);
    warps_sum_kernel<<<blocks_for(2 * C, 32), 32, 0, ctx->stream>>>(d, partial, SLICES, in.size.C, d_mode);
    warps_rows_kernel<<<blocks_for((size_t)in.size.N, 8), 256, 0, ctx->stream>>>(dx, in, dx_mode);
    cudaCheck(cudaGetLastError());
}
