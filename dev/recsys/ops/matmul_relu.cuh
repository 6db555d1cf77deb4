/* The GPU's part of matmul_relu.h: cuBLASLt's ReLU epilogues, or a kernel after the product; bias gradients of several
 * layers in one launch. */
#ifndef DEV_RECSYS_OPS_MATMUL_RELU_CUH
#define DEV_RECSYS_OPS_MATMUL_RELU_CUH

#include "dev/recsys/ops/matmul_relu.h"
#ifdef __CUDACC__

enum { RELU_THREADS = 256, RELU_GROUP = 8 };

// One thread for eight channels of a row, which share a Philox call.
static __global__ void relu_dropout_kernel(floatX* h, ReluDropout d, int N, int C) {
    int groups = (C + RELU_GROUP - 1) / RELU_GROUP;
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / groups;
    int c = (int)(i % groups) * RELU_GROUP;
    if (n >= (size_t)N) return;
    Philox bits = {{0, 0, 0, 0}};
    if (d.threshold) bits = relu_dropout_bits(d, n, (uint32_t)c / RELU_GROUP);
    floatX* x = h + n * C + c;
#pragma unroll
    for (int k = 0; k < RELU_GROUP; k++) {
        if (c + k >= C) break;
        float value = to_float(x[k]);
        x[k] = from_float<floatX>(value > 0 && relu_dropout_keeps(d, bits, k) ? value * d.scale : 0);
    }
}

static __global__ void relu_mask_kernel(floatX* dz, const floatX* h, float scale, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dz[i] = from_float<floatX>(to_float(h[i]) > 0 ? scale * to_float(dz[i]) : 0);
}

// Runs the product with ReLU or its derivative in the epilogue, if cuBLASLt supports it. Returns whether it did.
static inline int matmul_relu_epilogue(MatmulKey key, const MatmulOperands* o, Context* ctx) {
    // The mask has one bit per element, and its rows are multiples of 128 bits.
    if (sizeof(floatX) != 2 || matmul_d_rows(&key) % 128 || !o->aux || pointer_alignment(o->aux) < 16) return 0;
    key.epilogue = key.kind == MATMUL_FORWARD ? CUBLASLT_EPILOGUE_RELU_AUX_BIAS : CUBLASLT_EPILOGUE_DRELU;
    MatmulPlan* plan = matmul_plan(key, o, ctx);
    if (plan->usable) matmul_run(plan, o, ctx);
    return plan->usable;
}

static inline void matmul_relu_forward(ReluOutput out, const floatX* x, Linear p, int N, int IC, int OC, ReluDropout d,
                                       Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_relu_forward", MATMUL_FLOPS(N, IC, OC), MATMUL_FORWARD_BYTES(N, IC, OC, SET),
                             "N=%d IC=%d OC=%d", N, IC, OC);
    MatmulOperands o = {p.w, x, out.h, p.b, (floatX*)out.mask, N};
    MatmulKey key = matmul_key(MATMUL_FORWARD, N, IC, OC, SET, ctx);
    if (d.threshold || d.scale != 1 || !matmul_relu_epilogue(key, &o, ctx)) {
        o.aux = NULL;
        matmul_product(key, &o, ctx);
        unsigned blocks = blocks_for((size_t)N * ((OC + RELU_GROUP - 1) / RELU_GROUP), RELU_THREADS);
        relu_dropout_kernel<<<blocks, RELU_THREADS, 0, ctx->stream>>>(out.h, d, N, OC);
        cudaCheck(cudaGetLastError());
    }
    scope_close(&scope);
}

// `h`: the layer's input, as the layer below keeps it.
static inline void matmul_relu_backward_input(floatX* dz, const floatX* dy, const floatX* w, ReluOutput h, int N,
                                              int IC, int OC, Context* ctx) {
    Scope scope = scope_open(ctx, "matmul_relu_backward_input", MATMUL_FLOPS(N, IC, OC),
                             MATMUL_BACKWARD_INPUT_BYTES(N, IC, OC, SET), "N=%d IC=%d OC=%d", N, IC, OC);
    MatmulOperands o = {w, dy, dz, NULL, (floatX*)h.mask, N};
    MatmulKey key = matmul_key(MATMUL_BACKWARD_INPUT, N, IC, OC, SET, ctx);
    if (h.scale != 1 || !matmul_relu_epilogue(key, &o, ctx)) {
        o.aux = NULL;
        matmul_product(key, &o, ctx);
        size_t n = (size_t)N * (size_t)IC;
        relu_mask_kernel<<<blocks_for(n, RELU_THREADS), RELU_THREADS, 0, ctx->stream>>>(dz, h.h, h.scale, n);
        cudaCheck(cudaGetLastError());
    }
    scope_close(&scope);
}

// ---------------------------------------------------------------------------------------------------------
// Column sums of several arrays

enum { BIASES_WARPS = 16, BIASES_BLOCKS = 448 };

typedef struct {
    BiasJob job[BIAS_JOBS];
    int tile[BIAS_JOBS + 1];  // the first tile of each job
    int count;
} BiasJobs;

// Grid: x is a tile of WARP * WIDTH columns of some job, y a range of `span` rows. The last block of a tile to arrive adds
// the sums of all its blocks, partial [tiles, spans, WARP * WIDTH], in their order.
template <int WIDTH>
__global__ void __launch_bounds__(BIASES_WARPS* WARP, 2)
    matmul_backward_biases_kernel(BiasJobs jobs, float* partial, unsigned* arrivals, int N, int span) {
    constexpr int COLUMNS = WARP * WIDTH;
    __shared__ float sums[BIASES_WARPS * COLUMNS];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, c = threadIdx.x, j = 0;
    while (j + 1 < jobs.count && jobs.tile[j + 1] <= (int)blockIdx.x) j++;
    BiasJob job = jobs.job[j];
    int first = ((int)blockIdx.x - jobs.tile[j]) * COLUMNS, column = first + lane * WIDTH;
    int begin = blockIdx.y * span, end = min(N, begin + span);
    float sum[WIDTH] = {0};
    if (column < job.OC) {
#pragma unroll 4
        for (int row = begin + warp; row < end; row += BIASES_WARPS) {
            float f[WIDTH];
            to_floats(f, load_vector<WIDTH>(job.dz + (size_t)row * job.OC + column));
#pragma unroll
            for (int i = 0; i < WIDTH; i++) sum[i] += f[i];
        }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sums[warp * COLUMNS + lane * WIDTH + i] = sum[i];
    __syncthreads();
    float total = 0;
    for (int w = 0; w < BIASES_WARPS && c < COLUMNS; w++) total += sums[w * COLUMNS + c];
    float* tile = partial + (size_t)blockIdx.x * gridDim.y * COLUMNS;
    if (c < COLUMNS) tile[blockIdx.y * COLUMNS + c] = total;
    if (!last_to_arrive(arrivals + blockIdx.x, gridDim.y)) return;
    if (c >= COLUMNS || first + c >= job.OC) return;
    total = 0;
#pragma unroll 8
    for (int s = 0; s < (int)gridDim.y; s++) total += tile[s * COLUMNS + c];
    job.db[first + c] = total;
}

template <int WIDTH> static inline void matmul_backward_biases_start(BiasJobs jobs, int N, Context* ctx) {
    for (int j = 0; j < jobs.count; j++)
        jobs.tile[j + 1] = jobs.tile[j] + (int)blocks_for((size_t)jobs.job[j].OC, WARP * WIDTH);
    int tiles = jobs.tile[jobs.count], most = max_int(1, BIASES_BLOCKS / tiles);
    int span = (int)round_up(((size_t)N + (size_t)most - 1) / (size_t)most, BIASES_WARPS),
        spans = (N + span - 1) / span;
    CHECK(tiles <= (int)DEVICE_ARRIVALS);
    float* partial = (float*)device_scratch(ctx, (size_t)tiles * (size_t)spans * WARP * WIDTH * sizeof *partial);
    dim3 grid((unsigned)tiles, (unsigned)spans);
    matmul_backward_biases_kernel<WIDTH>
        <<<grid, BIASES_WARPS * WARP, 0, ctx->stream>>>(jobs, partial, ctx->arrivals, N, span);
    cudaCheck(cudaGetLastError());
}

static inline void matmul_backward_biases(const BiasJob* jobs, int count, int N, Context* ctx) {
    BiasJobs all;
    int vectors = 1;
    double columns = 0;
    memset(&all, 0, sizeof all);
    CHECK(count > 0 && count <= (int)BIAS_JOBS);
    memcpy(all.job, jobs, (size_t)count * sizeof *jobs);
    all.count = count;
    for (int j = 0; j < count; j++) columns += jobs[j].OC, vectors &= rows_are_vectors<floatX>(jobs[j].OC);
    Scope scope = scope_open(ctx, "matmul_backward_biases", columns * N, columns * N * sizeof(floatX), "layers=%d N=%d",
                             count, N);
    if (vectors) matmul_backward_biases_start<Vector<floatX>::SIZE>(all, N, ctx);
    else matmul_backward_biases_start<1>(all, N, ctx);
    scope_close(&scope);
}

#endif
#endif
