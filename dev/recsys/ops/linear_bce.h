/* The last layer of a click model, one output, with binary cross-entropy on its logit.
 *
 *   logits[n] = x[n] . w + b
 *   each[n]   = max(s, 0) - s y + log(1 + exp(-|s|))          s = logits[n], y = labels[n] in 0 .. 1
 *   sum       = (SET or ADD) scale * (each[0] + ... + each[N - 1])
 *   BACKWARD  dlogit = scale * (sigmoid(s) - y);  dw = sum_n dlogit x[n];  db = sum_n dlogit                    SET
 *             dx[n] = dlogit w; columns from relu_begin on are outputs of a ReLU with dropout: there dx is multiplied
 *             by relu_scale where x > 0, else it is 0, so dx is the gradient of what goes into the ReLU
 *             dbias[c - relu_begin] = sum_n dx[n, c], the bias gradient of the layer below; NULL: not wanted
 *
 * Shapes: x, dx [N, C], w [C], b [1], logits, labels, each [N]. dtypes: x, dx, w, b floatX; the others real. Numerics:
 * on the CPU, which runs the reference, sums in double, on the GPU in fp32, in an order that depends only on the shape.
 * FORWARD only writes logits and losses.
 * Source: the definition, in the stable form of torch.nn.functional.binary_cross_entropy_with_logits. */
#ifndef DEV_RECSYS_OPS_LINEAR_BCE_H
#define DEV_RECSYS_OPS_LINEAR_BCE_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/losses.h"
#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif

enum { LINEAR_BCE_MAX_C = 512 };  // of the GPU's kernel

typedef struct {
    int N, C, relu_begin;
    real relu_scale;
} LinearBceShape;

typedef struct {
    const floatX* x;
    Linear p;
    const real* labels;
} LinearBceInput;

typedef struct {
    real* logits;
    floatX* dx;
    LinearGrads grads;
    real* dbias;
} LinearBceOutput;

#define LINEAR_BCE_FLOPS(s, direction) (((direction) == FORWARD ? 2.0 : 6.0) * (s).N * (s).C)
#define LINEAR_BCE_BYTES(s, direction)                                                                                 \
    ((double)(s).N * (((direction) == FORWARD ? 1.0 : 2.0) * (s).C * sizeof(floatX) + 3 * sizeof(real)))

HOST_DEVICE static inline double bce_loss(double s, double y) { return (s > 0 ? s : 0) - s * y + log1p(exp(-fabs(s))); }

HOST_DEVICE static inline double bce_sigmoid(double s) { return 1 / (1 + exp(-s)); }

// The gradient of what goes into a ReLU with dropout, from that of its output x.
HOST_DEVICE static inline real relu_gradient(real dx, real x, real scale) { return x > 0 ? scale * dx : 0; }

// ---------------------------------------------------------------------------------------------------------
// Reference, which the CPU runs too

// Inputs and outputs in full precision.
typedef struct {
    real *logits, *dx, *dw, *db, *dbias;
    const real *x, *w, *b, *labels;
} LinearBceRef;

// Rows, then columns, each by one thread.
static inline void linear_bce_ref(Losses losses, LinearBceRef r, LinearBceShape s, Direction direction) {
    size_t C = (size_t)s.C;
    double* d = (double*)xmalloc((size_t)s.N * sizeof *d);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < s.N; n++) {
        const real* x = r.x + (size_t)n * C;
        double sum = (double)*r.b;
        for (int c = 0; c < s.C; c++) sum += (double)x[c] * (double)r.w[c];
        r.logits[n] = (real)sum;
        losses.each[n] = (real)bce_loss(sum, (double)r.labels[n]);
        d[n] = losses.scale * (bce_sigmoid(sum) - (double)r.labels[n]);
        for (int c = 0; c < s.C && direction == BACKWARD; c++) {
            real dx = (real)(d[n] * (double)r.w[c]);
            r.dx[(size_t)n * C + (size_t)c] = c < s.relu_begin ? dx : relu_gradient(dx, x[c], s.relu_scale);
        }
    }
#pragma omp parallel for schedule(static)
    for (int c = 0; c <= (direction == BACKWARD ? s.C : -1); c++) {
        double sum = 0, below = 0;
        for (int n = 0; n < s.N; n++) {
            size_t at = (size_t)n * C + (size_t)c;
            sum += c < s.C ? d[n] * (double)r.x[at] : d[n];
            below += c < s.C ? (double)r.dx[at] : 0;
        }
        *(c < s.C ? &r.dw[c] : r.db) = (real)sum;
        if (r.dbias && c >= s.relu_begin && c < s.C) r.dbias[c - s.relu_begin] = (real)below;
    }
    losses_add_ref(losses, s.N);
    free(d);
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU: one kernel for the dot product, the loss, and all gradients

enum { LINEAR_BCE_WARPS = 16, LINEAR_BCE_BLOCKS = 128 };

typedef struct {
    double* loss;
    float *bias, *columns;
} LinearBcePartial;

// One warp per row, ROWS of them at a time; a lane has WIDTH adjacent columns of every WARP * WIDTH, at most K times.
// The last block adds the blocks' sums in their order: partial [blocks, 2 C], partial_loss and partial_bias [blocks].
template <int K, int WIDTH, int ROWS>
__global__ void __launch_bounds__(LINEAR_BCE_WARPS* WARP)
    linear_bce_kernel(Losses losses, LinearBceOutput out, LinearBceInput in, LinearBceShape s, int is_backward,
                      LinearBcePartial partial, unsigned* arrivals) {
    extern __shared__ float sums[];  // [warps, 2 C]
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, C = s.C, width = 2 * C;
    int step = gridDim.x * LINEAR_BCE_WARPS;
    float w[K][WIDTH], dw[K][WIDTH] = {{0}}, db[K][WIDTH] = {{0}}, dbias = 0, bias = to_float(*in.p.b);
    double loss = 0;
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            int c = (k * WARP + lane) * WIDTH + i;
            w[k][i] = c < C ? to_float(in.p.w[c]) : 0;
        }
    for (int first = blockIdx.x * LINEAR_BCE_WARPS + warp; first < s.N; first += ROWS * step) {
        Vector<floatX, WIDTH> rows[ROWS][K];
        float labels[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) labels[r] = in.labels[min(first + r * step, s.N - 1)];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < K; k++)  // past the ends: another element, so that all loads are under way at once
                rows[r][k] = load_vector<WIDTH>(in.x + (size_t)min(first + r * step, s.N - 1) * C +
                                                min((k * WARP + lane) * WIDTH, C - WIDTH));
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int n = first + r * step;
            if (n >= s.N) break;
            float sum = 0;
#pragma unroll
            for (int k = 0; k < K; k++)
#pragma unroll
                for (int i = 0; i < WIDTH; i++) sum += to_float(rows[r][k].v[i]) * w[k][i];
            float logit = warp_sum(sum) + bias, y = labels[r];
            float each = fmaxf(logit, 0) - logit * y + log1pf(expf(-fabsf(logit)));
            float d = (float)losses.scale * (1 / (1 + expf(-logit)) - y);
            if (lane == 0) {
                out.logits[n] = logit;
                losses.each[n] = each;
                loss += (double)each;
            }
            if (!is_backward) continue;
            dbias += d;
#pragma unroll
            for (int k = 0; k < K; k++) {
                int c = (k * WARP + lane) * WIDTH;
                float dx[WIDTH];
#pragma unroll
                for (int i = 0; i < WIDTH; i++) {
                    float x = to_float(rows[r][k].v[i]);
                    dx[i] = d * w[k][i];
                    if (c + i >= s.relu_begin) dx[i] = relu_gradient(dx[i], x, s.relu_scale);
                    dw[k][i] += d * x;
                }
                Vector<floatX, WIDTH> rounded = from_floats<floatX, WIDTH>(dx);
                if (c < C) store_vector(out.dx + (size_t)n * C + c, rounded);
#pragma unroll
                for (int i = 0; i < WIDTH; i++) db[k][i] += to_float(rounded.v[i]);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            int c = (k * WARP + lane) * WIDTH + i;
            if (c >= C || !is_backward) break;
            sums[warp * width + c] = dw[k][i];
            sums[warp * width + C + c] = db[k][i];
        }
    loss = block_sum(loss);  // also a barrier
    dbias = block_sum(lane ? 0 : dbias);
    if (threadIdx.x == 0) partial.loss[blockIdx.x] = loss, partial.bias[blockIdx.x] = dbias;
    for (int c = threadIdx.x; c < width && is_backward; c += blockDim.x) {
        float total = 0;
        for (int i = 0; i < LINEAR_BCE_WARPS; i++) total += sums[i * width + c];
        partial.columns[(size_t)blockIdx.x * width + c] = total;
    }
    if (!last_to_arrive(arrivals, gridDim.x)) return;
    for (int c = threadIdx.x; c < width && is_backward; c += blockDim.x) {
        float total = sum_in_order(partial.columns + c, (int)gridDim.x, (size_t)width);
        if (c < C) out.grads.w[c] = total;
        else if (out.dbias && c - C >= s.relu_begin) out.dbias[c - C - s.relu_begin] = total;
    }
    int has_block = threadIdx.x < gridDim.x;
    loss = losses.scale * block_sum(has_block ? partial.loss[threadIdx.x] : 0);
    dbias = block_sum(has_block ? partial.bias[threadIdx.x] : 0);
    if (threadIdx.x) return;
    *losses.sum = (real)(losses.mode == ADD ? (double)*losses.sum + loss : loss);
    if (is_backward) *out.grads.b = dbias;
}

template <int K, int WIDTH>
static inline void linear_bce_start(Losses losses, LinearBceOutput out, LinearBceInput in, LinearBceShape s,
                                    int is_backward, Context* ctx) {
    const int ROWS = K * WIDTH <= 8 ? 8 : WIDTH > 1 ? 2 : 1;  // the most that stay in registers on every architecture
    unsigned blocks = blocks_for((size_t)s.N, LINEAR_BCE_WARPS);
    if (blocks > LINEAR_BCE_BLOCKS) blocks = LINEAR_BCE_BLOCKS;
    static_assert((int)LINEAR_BCE_BLOCKS <= LINEAR_BCE_WARPS * WARP, "a thread for each block's loss");
    size_t width = 2 * (size_t)s.C, shared = LINEAR_BCE_WARPS * width * sizeof(float);
    LinearBcePartial partial;
    partial.loss = (double*)device_scratch(ctx, blocks * (sizeof(double) + (width + 1) * sizeof(float)));
    partial.bias = (float*)(partial.loss + blocks), partial.columns = partial.bias + blocks;
    cudaCheck(cudaFuncSetAttribute(linear_bce_kernel<K, WIDTH, ROWS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)shared));
    linear_bce_kernel<K, WIDTH, ROWS><<<blocks, LINEAR_BCE_WARPS * WARP, shared, ctx->stream>>>(
        losses, out, in, s, is_backward, partial, ctx->arrivals);
    cudaCheck(cudaGetLastError());
}
#endif

static inline void linear_bce(Losses losses, LinearBceOutput out, LinearBceInput in, LinearBceShape s,
                              Direction direction, Context* ctx) {
    Scope scope = scope_open(ctx, direction == FORWARD ? "linear_bce_forward" : "linear_bce_backward",
                             LINEAR_BCE_FLOPS(s, direction), LINEAR_BCE_BYTES(s, direction), "N=%d C=%d", s.N, s.C);
#ifdef __CUDACC__
    int is_backward = direction == BACKWARD;
    CHECK(s.C <= LINEAR_BCE_MAX_C);
    const int WIDTH = Vector<floatX>::SIZE;
    int is_wide = s.C > WARP * WIDTH;
    if (!rows_are_vectors<floatX>(s.C)) linear_bce_start<16, 1>(losses, out, in, s, is_backward, ctx);
    else if (is_wide) linear_bce_start<LINEAR_BCE_MAX_C / WARP / WIDTH, WIDTH>(losses, out, in, s, is_backward, ctx);
    else linear_bce_start<1, WIDTH>(losses, out, in, s, is_backward, ctx);
#else
    LinearBceRef r = {out.logits, out.dx, out.grads.w, out.grads.b, out.dbias, in.x, in.p.w, in.p.b, in.labels};
    linear_bce_ref(losses, r, s, direction);
#endif
    scope_close(&scope);
}

#endif
