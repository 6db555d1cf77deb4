/* As a framework without fusion does it: softmax writes the probabilities, in fp32 because they are small; the loss
 * reads one of each row; the gradient reads them all again. A block of threads takes a row, with neighbours at
 * neighbouring elements, so every load is used in full. What it costs are the bytes: 2 + 2 + 2 to read a logit three
 * times, 4 + 4 to write and read its probability, 2 to write its gradient; the op needs 2 + 2. */
enum { PASSES_THREADS = 512 };

// Grid: rows.
static __global__ void passes_softmax_kernel(float* p, float2* statistics, const floatX* logits, const int* targets,
                                             int V, int Vp) {
    const floatX* x = logits + (size_t)blockIdx.x * (size_t)Vp;
    if (targets[blockIdx.x] < 0) return;
    float max = -FLT_MAX, sum = 0;
    for (int v = (int)threadIdx.x; v < V; v += PASSES_THREADS) max = fmaxf(max, to_float(x[v]));
    max = block_max(max);
    for (int v = (int)threadIdx.x; v < V; v += PASSES_THREADS) sum += exp_approx(to_float(x[v]) - max);
    sum = block_sum(sum);
    p += (size_t)blockIdx.x * (size_t)Vp;
    for (int v = (int)threadIdx.x; v < V; v += PASSES_THREADS) p[v] = exp_approx(to_float(x[v]) - max) / sum;
    if (threadIdx.x == 0) statistics[blockIdx.x] = make_float2(max, sum);
}

static __global__ void passes_loss_kernel(Losses losses, const float2* statistics, const floatX* logits,
                                          const int* targets, int N, int Vp) {
    int n = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (n >= N) return;
    losses.each[n] = 0;
    if (targets[n] < 0) return;
    // The logit is subtracted from the maximum first: both may be large where the loss is not.
    float at_target = to_float(logits[(size_t)n * (size_t)Vp + (size_t)targets[n]]);
    losses.each[n] = statistics[n].x - at_target + logf(statistics[n].y);
}

// One block adds all losses: the same order every time.
static __global__ void losses_kernel(Losses losses, int N) {
    double sum = 0;
    for (int n = (int)threadIdx.x; n < N; n += (int)blockDim.x) sum += (double)losses.each[n];
    sum = losses.scale * block_sum(sum);
    if (threadIdx.x == 0) *losses.sum = (real)(losses.mode == ADD ? (double)*losses.sum + sum : sum);
}

static __global__ void passes_gradient_kernel(floatX* logits, const float* p, const int* targets, double scale,
                                              const real* loss_scale, int V, int Vp) {
    int target = targets[blockIdx.x];
    float factor = (float)scale * (loss_scale ? *loss_scale : 1);
    size_t row = (size_t)blockIdx.x * (size_t)Vp;
    for (int v = (int)threadIdx.x; v < Vp; v += PASSES_THREADS)
        logits[row + v] = from_float<floatX>(target < 0 || v >= V ? 0 : factor * (p[row + v] - (v == target)));
}

static inline void passes_classifier_backward(Losses losses, floatX* logits, const int* targets, const real* loss_scale,
                                              int N, int V, int Vp, Context* ctx) {
    size_t rows = round_up((size_t)N, 128);
    float* p = (float*)device_scratch(ctx, (2 * rows + (size_t)N * (size_t)Vp) * sizeof(float)) + 2 * rows;
    float2* statistics = (float2*)(p - 2 * rows);
    passes_softmax_kernel<<<N, PASSES_THREADS, 0, ctx->stream>>>(p, statistics, logits, targets, V, Vp);
    passes_loss_kernel<<<blocks_for(N, 256), 256, 0, ctx->stream>>>(losses, statistics, logits, targets, N, Vp);
    losses_kernel<<<1, 1024, 0, ctx->stream>>>(losses, N);
    passes_gradient_kernel<<<N, PASSES_THREADS, 0, ctx->stream>>>(logits, p, targets, losses.scale, loss_scale, V, Vp);
    cudaCheck(cudaGetLastError());
}
