/* The GPU's part of linear_bce.h: one kernel for the dot product, the loss, and all gradients. */
#ifndef DEV_RECSYS_OPS_LINEAR_BCE_CUH
#define DEV_RECSYS_OPS_LINEAR_BCE_CUH

#include "dev/recsys/ops/linear_bce.h"
#ifdef __CUDACC__

enum { LINEAR_BCE_WARPS = 16, LINEAR_BCE_BLOCKS = 128 };

// One warp per row; a lane has every WARP-th column, at most K. A block's sums, partial [blocks, 2 C + 1] and
// partial_loss [blocks], are added in order by the last block.
template <int K>
__global__ void __launch_bounds__(LINEAR_BCE_WARPS* WARP)
    linear_bce_kernel(Losses losses, LinearBceOutput out, LinearBceInput in, LinearBceShape s, int is_backward,
                      float* partial, double* partial_loss, unsigned* arrivals) {
    extern __shared__ float sums[];  // [warps, 2 C + 1]
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, C = s.C, width = 2 * C + 1;
    float w[K], dw[K] = {0}, db[K] = {0}, dbias = 0, bias = to_float(*in.p.b), scale = (float)losses.scale;
    double loss = 0;
#pragma unroll
    for (int k = 0; k < K; k++) w[k] = lane + k * WARP < C ? to_float(in.p.w[lane + k * WARP]) : 0;
    for (int n = blockIdx.x * LINEAR_BCE_WARPS + warp; n < s.N; n += gridDim.x * LINEAR_BCE_WARPS) {
        float x[K], sum = 0;
#pragma unroll
        for (int k = 0; k < K; k++) {
            int c = lane + k * WARP;
            x[k] = c < C ? to_float(in.x[(size_t)n * C + c]) : 0;
            sum += x[k] * w[k];
        }
        float logit = warp_sum(sum) + bias, y = in.labels[n];
        float each = fmaxf(logit, 0) - logit * y + log1pf(expf(-fabsf(logit)));
        float d = scale * (1 / (1 + expf(-logit)) - y);
        if (lane == 0) {
            out.logits[n] = logit;
            losses.each[n] = each;
            loss += (double)each;
        }
        if (!is_backward) continue;
        dbias += d;
#pragma unroll
        for (int k = 0; k < K; k++) {
            int c = lane + k * WARP;
            if (c >= C) break;
            float dx = d * w[k];
            if (c >= s.relu_begin) dx = relu_gradient(dx, x[k], s.relu_scale);
            floatX rounded = from_float<floatX>(dx);
            out.dx[(size_t)n * C + c] = rounded;
            dw[k] += d * x[k];
            db[k] += to_float(rounded);
        }
    }
    if (is_backward) {
#pragma unroll
        for (int k = 0; k < K; k++) {
            int c = lane + k * WARP;
            if (c >= C) break;
            sums[warp * width + c] = dw[k];
            sums[warp * width + C + c] = db[k];
        }
        if (lane == 0) sums[warp * width + 2 * C] = dbias;
    }
    loss = block_sum(loss);  // also a barrier
    __syncthreads();
    if (threadIdx.x == 0) partial_loss[blockIdx.x] = loss;
    for (int c = threadIdx.x; c < width && is_backward; c += blockDim.x) {
        float total = 0;
        for (int i = 0; i < LINEAR_BCE_WARPS; i++) total += sums[i * width + c];
        partial[(size_t)blockIdx.x * width + c] = total;
    }
    if (!last_to_arrive(arrivals, gridDim.x)) return;
    for (int c = threadIdx.x; c < width && is_backward; c += blockDim.x) {
        float total = 0;
#pragma unroll 8
        for (int i = 0; i < (int)gridDim.x; i++) total += partial[(size_t)i * width + c];
        if (c < C) out.grads.w[c] = total;
        else if (c == 2 * C) *out.grads.b = total;
        else if (out.dbias && c - C >= s.relu_begin) out.dbias[c - C - s.relu_begin] = total;
    }
    loss = threadIdx.x < gridDim.x ? partial_loss[threadIdx.x] : 0;
    loss = losses.scale * block_sum(loss);
    if (threadIdx.x == 0) *losses.sum = (real)(losses.mode == ADD ? (double)*losses.sum + loss : loss);
}

template <int K>
static inline void linear_bce_start(Losses losses, LinearBceOutput out, LinearBceInput in, LinearBceShape s,
                                    int is_backward, Context* ctx) {
    unsigned blocks = blocks_for((size_t)s.N, LINEAR_BCE_WARPS);
    if (blocks > LINEAR_BCE_BLOCKS) blocks = LINEAR_BCE_BLOCKS;
    static_assert((int)LINEAR_BCE_BLOCKS <= LINEAR_BCE_WARPS * WARP, "a thread for each block's loss");
    size_t width = 2 * (size_t)s.C + 1, shared = LINEAR_BCE_WARPS * width * sizeof(float);
    double* partial_loss = (double*)device_scratch(ctx, blocks * (sizeof(double) + width * sizeof(float)));
    cudaCheck(cudaFuncSetAttribute(linear_bce_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    linear_bce_kernel<K><<<blocks, LINEAR_BCE_WARPS * WARP, shared, ctx->stream>>>(
        losses, out, in, s, is_backward, (float*)(partial_loss + blocks), partial_loss, ctx->arrivals);
    cudaCheck(cudaGetLastError());
}

static inline void linear_bce(Losses losses, LinearBceOutput out, LinearBceInput in, LinearBceShape s,
                              Direction direction, Context* ctx) {
    Scope scope = scope_open(ctx, direction == FORWARD ? "linear_bce_forward" : "linear_bce_backward",
                             LINEAR_BCE_FLOPS(s, direction), LINEAR_BCE_BYTES(s, direction), "N=%d C=%d", s.N, s.C);
    int is_backward = direction == BACKWARD;
    CHECK(s.C <= LINEAR_BCE_MAX_C);
    if (s.C <= 4 * WARP) linear_bce_start<4>(losses, out, in, s, is_backward, ctx);
    else if (s.C <= 8 * WARP) linear_bce_start<8>(losses, out, in, s, is_backward, ctx);
    else linear_bce_start<16>(losses, out, in, s, is_backward, ctx);
    scope_close(&scope);
}

#endif
#endif
