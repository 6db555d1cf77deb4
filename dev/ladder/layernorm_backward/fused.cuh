/* Faster than warps: dy and x are read once. A warp loads a row, 16 bytes in a load, and has it in registers for the
 * averages, for dx and for what the row adds to d.w and d.b. These sums stay in registers too, over all rows that
 * the warp takes: as many blocks run as the GPU holds, and each takes every so-manieth row. At the end the warps of
 * a block add theirs up in shared memory, a block leaves one row of partial sums, and the kernel of the rung above
 * adds those. Rows must be whole vectors, up to four for each thread; others take the rung above. */
#include "dev/ladder/layernorm_backward/warps.cuh"

enum { FUSED_WARPS = 4, FUSED_BLOCKS = 4 };  // of a block; of a multiprocessor, half as many for the widest rows

template <int VECTORS>
static __global__ void __launch_bounds__(FUSED_WARPS* WARP, VECTORS < 4 ? FUSED_BLOCKS : FUSED_BLOCKS / 2)
    fused_kernel(floatX* dx, float* partial, LayerNormInputs in, Mode mode) {
    constexpr int W = Vector<floatX>::SIZE;
    extern __shared__ float fused_sums[];  // [2, C]
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, C = in.size.C;
    float weight[VECTORS][W] = {}, bias[VECTORS][W] = {};
    for (int n = (int)blockIdx.x * FUSED_WARPS + warp; n < in.size.N; n += (int)gridDim.x * FUSED_WARPS) {
        const floatX *dy = in.dy + (size_t)n * (size_t)C, *x = in.x + (size_t)n * (size_t)C;
        floatX* to = dx + (size_t)n * (size_t)C;
        Vector<floatX> g[VECTORS], v[VECTORS], zero = {};
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = (i * WARP + lane) * W;
            g[i] = c < C ? load128_streaming(dy + c) : zero;
            v[i] = c < C ? load128_streaming(x + c) : zero;
        }
        float mean = in.stats.mean[n], rstd = in.stats.rstd[n], sum = 0, product = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = (i * WARP + lane) * W;
            Vector<floatX> w = c < C ? load128(in.w + c) : zero;
#pragma unroll
            for (int k = 0; k < W; k++) {
                float e = to_float(g[i].v[k]) * to_float(w.v[k]), u = (to_float(v[i].v[k]) - mean) * rstd;
                sum += e;
                product += e * u;
                weight[i][k] += to_float(g[i].v[k]) * u;
                bias[i][k] += to_float(g[i].v[k]);
            }
        }
        sum = warp_sum(sum) / C, product = warp_sum(product) / C;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = (i * WARP + lane) * W;
            if (c >= C) continue;
            Vector<floatX> w = load128(in.w + c), old = mode == ADD ? load128(to + c) : zero;
            float d[W];
#pragma unroll
            for (int k = 0; k < W; k++) {
                float e = to_float(g[i].v[k]) * to_float(w.v[k]), u = (to_float(v[i].v[k]) - mean) * rstd;
                d[k] = to_float(old.v[k]) + rstd * (e - sum - u * product);
            }
            store128(to + c, from_floats<floatX>(d));
        }
    }
    // The warps add to the block's sums in turn.
    for (int turn = 0; turn < FUSED_WARPS; turn++) {
        if (warp == turn)
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
#pragma unroll
                for (int k = 0; k < W; k++) {
                    int c = (i * WARP + lane) * W + k;
                    if (c >= C) continue;
                    fused_sums[c] = turn ? fused_sums[c] + weight[i][k] : weight[i][k];
                    fused_sums[C + c] = turn ? fused_sums[C + c] + bias[i][k] : bias[i][k];
                }
        __syncthreads();
    }
    for (int c = (int)threadIdx.x; c < 2 * C; c += (int)blockDim.x)
        partial[(size_t)blockIdx.x * 2 * C + c] = fused_sums[c];
}

static inline void fused_layernorm_backward(floatX* dx, LayerNormGrads d, LayerNormInputs in, Mode dx_mode, Mode d_mode,
                                            Context* ctx) {
    const int W = Vector<floatX>::SIZE, C = in.size.C, vectors = (C + WARP * W - 1) / (WARP * W);
    if (C % W != 0 || vectors > 4) {
        warps_layernorm_backward(dx, d, in, dx_mode, d_mode, ctx);
        return;
    }
    int blocks = min_int(FUSED_BLOCKS * ctx->multiprocessors, (int)blocks_for((size_t)in.size.N, FUSED_WARPS));
    size_t sums = 2 * (size_t)C * sizeof(float);
    float* partial = (float*)device_scratch(ctx, (size_t)blocks * sums);
    const int threads = FUSED_WARPS * WARP;
    if (vectors == 1) fused_kernel<1><<<blocks, threads, sums, ctx->stream>>>(dx, partial, in, dx_mode);
    else if (vectors <= 3) fused_kernel<3><<<blocks, threads, sums, ctx->stream>>>(dx, partial, in, dx_mode);
    else fused_kernel<4><<<blocks, threads, sums, ctx->stream>>>(dx, partial, in, dx_mode);
    warps_sum_kernel<<<blocks_for(2 * (size_t)C, 32), 32, 0, ctx->stream>>>(d, partial, blocks, C, d_mode);
    cudaCheck(cudaGetLastError());
}
