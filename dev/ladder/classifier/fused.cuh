/* Faster than passes: no probability leaves the kernel. A block has its row's maximum and sum in registers when it
 * comes to the gradient, so it computes each exponential a second time, from the logit, which costs less than the
 * eight bytes to write it and read it back. The gradient takes the logit's place. */
#include "dev/ladder/classifier/passes.cuh"

enum { FUSED_THREADS = 512 };

// Grid: rows.
static __global__ void __launch_bounds__(FUSED_THREADS)
    fused_kernel(Losses losses, floatX* logits, const int* targets, const real* loss_scale, int V, int Vp) {
    floatX* x = logits + (size_t)blockIdx.x * (size_t)Vp;
    int target = targets[blockIdx.x], used = target < 0 ? 0 : V;
    float max = -FLT_MAX, sum = 0, loss = 0, scaled = (float)losses.scale * (loss_scale ? *loss_scale : 1);
    for (int v = (int)threadIdx.x; v < used; v += FUSED_THREADS) max = fmaxf(max, to_float(x[v]));
    max = block_max(max);
    for (int v = (int)threadIdx.x; v < used; v += FUSED_THREADS) sum += exp_approx(to_float(x[v]) - max);
    sum = block_sum(sum);
    if (used) loss = max - to_float(x[target]) + logf(sum);
    __syncthreads();  // all have read the target's logit
    for (int v = (int)threadIdx.x; v < Vp; v += FUSED_THREADS)
        x[v] = from_float<floatX>(v < used ? scaled * (exp_approx(to_float(x[v]) - max) / sum - (v == target)) : 0);
    if (threadIdx.x == 0) losses.each[blockIdx.x] = loss;
}

static inline void fused_classifier_backward(Losses losses, floatX* logits, const int* targets, const real* loss_scale,
                                             int N, int V, int Vp, Context* ctx) {
    fused_kernel<<<N, FUSED_THREADS, 0, ctx->stream>>>(losses, logits, targets, loss_scale, V, Vp);
    losses_kernel<<<1, 1024, 0, ctx->stream>>>(losses, N);
    cudaCheck(cudaGetLastError());
}
