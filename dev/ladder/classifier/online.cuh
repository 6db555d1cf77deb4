/* Faster than fused: a thread finds the maximum and the sum of its elements in one reading. When a new maximum
 * comes, the sum so far is multiplied by exp(old - new). Loads and stores are of 16 bytes, eight bf16, and of
 * several vectors at once: fewer instructions, and more bytes on their way. Rows that are not aligned to 16 bytes go
 * one by one.
 * Source: Milakov and Gimelshein, arXiv 1805.02867. */
#include "dev/ladder/classifier/passes.cuh"

enum { ONLINE_THREADS = 512 };

// Grid: rows. WIDTH: elements of a load.
template <int WIDTH>
static __global__ void __launch_bounds__(ONLINE_THREADS)
    online_kernel(Losses losses, floatX* logits, const int* targets, const real* loss_scale, int V, int Vp) {
    floatX* x = logits + (size_t)blockIdx.x * (size_t)Vp;
    int target = targets[blockIdx.x], used = target < 0 ? 0 : V;
    float max = -FLT_MAX, sum = 0, scaled = (float)losses.scale * (loss_scale ? *loss_scale : 1);
#pragma unroll 4
    for (int i = (int)threadIdx.x * WIDTH; i < used; i += ONLINE_THREADS * WIDTH) {
        float f[WIDTH], most = max, part = 0;
        to_floats(f, load_vector<WIDTH>(x + i));
#pragma unroll
        for (int k = 0; k < WIDTH; k++) most = i + k < V ? fmaxf(most, f[k]) : most;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) part += i + k < V ? exp_approx(f[k] - most) : 0;
        sum = sum * exp_approx(max - most) + part;
        max = most;
    }
    float row_max = block_max(max);
    sum = block_sum(sum * exp_approx(max - row_max));
    float at_target = used ? to_float(x[target]) : 0;
    __syncthreads();  // all have read the target's logit
    if (threadIdx.x == 0) losses.each[blockIdx.x] = used ? row_max - at_target + logf(sum) : 0;
    float factor = scaled / sum;
#pragma unroll 2
    for (int i = (int)threadIdx.x * WIDTH; i < Vp; i += ONLINE_THREADS * WIDTH) {
        float f[WIDTH];
        to_floats(f, load_vector<WIDTH>(x + i));
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            float value = i + k < used ? factor * exp_approx(f[k] - row_max) : 0;
            f[k] = i + k == target ? scaled * (exp_approx(at_target - row_max) / sum - 1) : value;
        }
        store_vector(x + i, from_floats<floatX, WIDTH>(f));
    }
}

static inline void online_classifier_backward(Losses losses, floatX* logits, const int* targets, const real* loss_scale,
                                              int N, int V, int Vp, Context* ctx) {
    if (rows_are_vectors<floatX>(Vp))
        online_kernel<Vector<floatX>::SIZE>
            <<<N, ONLINE_THREADS, 0, ctx->stream>>>(losses, logits, targets, loss_scale, V, Vp);
    else online_kernel<1><<<N, ONLINE_THREADS, 0, ctx->stream>>>(losses, logits, targets, loss_scale, V, Vp);
    losses_kernel<<<1, 1024, 0, ctx->stream>>>(losses, N);
    cudaCheck(cudaGetLastError());
}
