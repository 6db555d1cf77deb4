/* Faster than threads: the 32 threads of a warp share a row and read 32 neighbouring elements, 64 bytes in bf16, all
 * of which are used. Sums go across the warp by shuffles (warp_sum, llmc/device/cuda_utils.cuh). The row is read
 * three times, the second and third time from the cache. */
static __global__ void warps_kernel(floatX* y, LayerNormStats stats, const floatX* x, LayerNorm p, Rows size,
                                    float eps) {
    int n = (int)((blockIdx.x * blockDim.x + threadIdx.x) / 32), lane = (int)(threadIdx.x % 32), C = size.C;
    if (n >= size.N) return;
    size_t row = (size_t)n * (size_t)C;
    float sum = 0, sum_sq = 0;
    for (int c = lane; c < C; c += 32) sum += to_float(x[row + c]);
    float mean = warp_sum(sum) / C;
    for (int c = lane; c < C; c += 32) {
        float d = to_float(x[row + c]) - mean;
        sum_sq += d * d;
    }
    float rstd = rsqrtf(warp_sum(sum_sq) / C + eps);
    for (int c = lane; c < C; c += 32)
        y[row + c] = from_float<floatX>((to_float(x[row + c]) - mean) * rstd * p.w_fp32[c] + to_float(p.b[c]));
    if (lane == 0) stats.mean[n] = mean, stats.rstd[n] = rstd;
}

static inline void warps_layernorm_forward(floatX* y, LayerNormStats stats, const floatX* x, LayerNorm p, Rows size,
                                           real eps, Context* ctx) {
    warps_kernel<<<blocks_for((size_t)size.N, 8), 256, 0, ctx->stream>>>(y, stats, x, p, size, eps);
    cudaCheck(cudaGetLastError());
}
