/* GPT-2 in one file, on a GPU: tokens in, forward pass, loss, backward pass, AdamW, a sample out. CUDA and cuBLASLt
 * only. It is the rung above gpt2_in_one_file.c: the same model, and the same functions in the same order. Lay the two
 * files side by side. What makes this one fast:
 *
 *     matmuls on tensor cores in bf16, with biases and GELU applied before the result is written
 *     attention that never writes its probabilities to memory
 *     every other op is limited by memory, so each one reads and writes as little as it can: fused kernels
 *
 *     nvcc -std=c++17 -O3 -arch=sm_90 -DPRECISION_BF16 dev/ladder/gpt2_in_one_file.cu -o build/gpt2cu -lcublasLt
 *     build/gpt2cu                               1000 steps on data/builtin/train.bin, which `make` generates; a story
 *     build/gpt2cu 20 out/start                  20 steps from a model that ./train_gpt2cu wrote to out/start
 *     build/gpt2cu 20 out/start 64 my.bin 6e-4   in batches of 64 sequences of another shard, at another learning rate
 *
 * B sequences of T tokens each are N = B * T rows. V vocabulary size, Vp: padded to a multiple of 128, L layers, NH
 * heads of HS = 64 channels, C = NH * HS. A row of N and then a channel: element (n, c) of a tensor [N, C] is
 * v[n * C + c]. floatX: the type of weights and activations; -DPRECISION_FP32 makes it float, for comparisons. */
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <float.h>
#include <math.h>
#include <nvtx3/nvToolsExt.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BATCH = 4, WARMUP = 10, SAMPLE_TOKENS = 63 };  // warm-up: the first tenth of the steps
static double LEARNING_RATE = 2e-3;
static const double FINAL_LR = 0.05, BETA1 = 0.9, BETA2 = 0.95, EPS = 1e-8;
static const double WEIGHT_DECAY = 0.1, MAX_NORM = 1.0, NORM_EPS = 1e-5, PI = 3.14159265358979;

static void die(const char* message, const char* what) {
    fprintf(stderr, "error: %s %s\n", message, what);
    exit(1);
}

static void check(cudaError_t error) {
    if (error != cudaSuccess) die("CUDA:", cudaGetErrorString(error));
}

static void check(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS) die(what, cublasLtGetStatusString(status));
}

// A range in the timeline of Nsight Systems: until the end of the function that has it.
struct Range {
    explicit Range(const char* name) { nvtxRangePushA(name); }
    ~Range() { nvtxRangePop(); }
};

// ---- What all kernels use. A thread reads and writes 16 bytes at a time: W elements.
#ifdef PRECISION_FP32
typedef float floatX;
enum { FLOATX = CUDA_R_32F, W = 4 };
#else
typedef __nv_bfloat16 floatX;
enum { FLOATX = CUDA_R_16BF, W = 8 };
#endif
static const unsigned ALL_LANES = 0xffffffff;
static const float LOG2_E = 1.44269504f;

__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__host__ __device__ inline void set(float* p, float x) { *p = x; }
__host__ __device__ inline void set(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }

__device__ inline void load(float (&f)[W], const floatX* p) {
    int4 bits = *(const int4*)p;
#pragma unroll
    for (int i = 0; i < W; i++) f[i] = to_float(((const floatX*)&bits)[i]);
}

__device__ inline void store(floatX* p, const float (&f)[W]) {
    int4 bits;
#pragma unroll
    for (int i = 0; i < W; i++) set(&((floatX*)&bits)[i], f[i]);
    *(int4*)p = bits;
}

__device__ inline float ex2_approx(float x) {  // 2^x
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Sum {
    template <typename T> __device__ T operator()(T a, T b) const { return a + b; }
};

struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Over the `lanes` neighbouring lanes that include this one; all of them get the result.
template <typename T, typename Op> __device__ inline T reduce_lanes(T x, Op op, int lanes = 32) {
#pragma unroll
    for (int i = 1; i < lanes; i *= 2) x = op(x, __shfl_xor_sync(ALL_LANES, x, i));
    return x;
}

// Over a block of whole warps. `none` changes no result.
template <typename T, typename Op> __device__ inline T reduce_block(T x, Op op, T none) {
    __shared__ T of_warp[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = reduce_lanes(x, op);
    __syncthreads();  // the results of an earlier call have been read
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return reduce_lanes(lane < warps ? of_warp[lane] : none, op);
}

static unsigned blocks_for(size_t n, size_t of_block) { return (unsigned)((n + of_block - 1) / of_block); }

// ---- Tensors. Activations have values and the derivative of the loss with respect to each value. Derivatives of
// activations share a few buffers, because the backward pass needs each for a short time only: see new_model().
typedef struct {
    floatX *v, *d;
    float2* rows;  // two numbers for each row, which the backward function needs
} Tensor;

// A parameter is a part of five arrays, each of which holds all parameters.
typedef struct {
    floatX* v;  // `master`, rounded
    float *d, *master;
    size_t size;
} Param;

typedef struct {
    Param w, b;  // weight and bias of a linear layer or a layernorm
} Layer;

enum { PIECE = 1024 };  // every parameter begins at a multiple of it, and zeros follow it
static struct {
    floatX* v;
    float *d, *master, *mean, *square;  // of AdamW: running means of the derivative and of its square
    char* decays;                       // [size / PIECE]
    size_t size, used;
} params;

static float* column_scratch;  // for the partial sums of column_sums()

template <typename T> static T* zeros(size_t n) {
    T* x;
    check(cudaMalloc((void**)&x, n * sizeof(T)));
    check(cudaMemset(x, 0, n * sizeof(T)));
    return x;
}

// ---- Sums of columns: the derivatives of biases, and of a layernorm's parameters
enum { PLAIN, GELU, LAYERNORM, COLUMN_WARPS = 8, COLUMNS = 32 * W, COLUMN_BLOCKS = 512 };

// y = x / 2 (1 + tanh(k (x + 0.044715 x^3))), k = sqrt(2 / pi): nearly x for large x, nearly 0 for negative x
static const float GELU_K = 0.79788456f;

__device__ inline float gelu_tanh(float x) { return tanhf(GELU_K * (x + 0.044715f * x * x * x)); }

__device__ inline float gelu_derivative(float x) {
    float t = gelu_tanh(x);
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * GELU_K * (1 + 3 * 0.044715f * x * x);
}

// The block's sums of COLUMNS columns from those of its warps.
__device__ inline void put_column_sums(float* sums, const float (&sum)[W], int OC) {
    __shared__ float of_warp[COLUMN_WARPS][COLUMNS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * COLUMNS;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < W; i++) of_warp[warp][lane * W + i] = sum[i];
    __syncthreads();
    for (int c = threadIdx.x; c < COLUMNS && first + c < OC; c += COLUMN_WARPS * 32) {
        float total = 0;
        for (int w = 0; w < COLUMN_WARPS; w++) total += of_warp[w][c];
        sums[first + c] = total;
    }
}

// Block (x, y) sums COLUMNS columns of dy [N, OC] over rows y * span to (y + 1) * span. With GELU, dy is first
// multiplied by the derivative at x, in place. With LAYERNORM there are two sums: of dy, and of dy u (layernorm below).
template <int KIND>
__global__ void __launch_bounds__(COLUMN_WARPS * 32)
    column_sums_kernel(float* sums, floatX* dy, const floatX* x, const float2* rows, int N, int OC, int span) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * COLUMNS + lane * W;
    int end = min(N, ((int)blockIdx.y + 1) * span);
    float sum[W] = {}, sum_u[W] = {}, d[W], f[W];
#pragma unroll 4
    for (int n = blockIdx.y * span + warp; n < end; n += COLUMN_WARPS) {
        if (column >= OC) break;
        size_t at = (size_t)n * OC + column;
        load(d, dy + at);
        if (KIND != PLAIN) load(f, x + at);
        float2 row = KIND == LAYERNORM ? rows[n] : make_float2(0, 0);
#pragma unroll
        for (int i = 0; i < W; i++) {
            if (KIND == GELU) d[i] *= gelu_derivative(f[i]);
            if (KIND == LAYERNORM) sum_u[i] += d[i] * (f[i] - row.x) * row.y;
            sum[i] += d[i];
        }
        if (KIND == GELU) store(dy + at, d);
    }
    put_column_sums(sums + (size_t)blockIdx.y * OC, sum, OC);
    if (KIND == LAYERNORM) put_column_sums(sums + (size_t)(gridDim.y + blockIdx.y) * OC, sum_u, OC);
}

// y[o] = the sum over `ranges` rows of sums [ranges, OC]. A block of 32 x 32 threads takes 32 columns.
static __global__ void add_ranges_kernel(float* y, const float* sums, int ranges, int OC) {
    __shared__ float of_warp[32][32];
    int o = blockIdx.x * 32 + threadIdx.x;
    float sum = 0, total = 0;
    for (int r = threadIdx.y; r < ranges && o < OC; r += 32) sum += sums[(size_t)r * OC + o];
    of_warp[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || o >= OC) return;
    for (int w = 0; w < 32; w++) total += of_warp[w][threadIdx.x];
    y[o] = total;
}

// db [OC] = the sums of dy's columns; dw [OC], with LAYERNORM only, those of dy u.
template <int KIND>
static void column_sums(float* db, float* dw, floatX* dy, const floatX* x, const float2* rows, int N, int OC) {
    int tiles = (int)blocks_for(OC, COLUMNS), ranges = COLUMN_BLOCKS / tiles, span;
    if (ranges > N / 16) ranges = N / 16;
    if (ranges < 1) ranges = 1;
    span = (int)blocks_for(N, ranges), ranges = (int)blocks_for(N, span);
    column_sums_kernel<KIND><<<dim3(tiles, ranges), COLUMN_WARPS * 32>>>(column_scratch, dy, x, rows, N, OC, span);
    add_ranges_kernel<<<blocks_for(OC, 32), dim3(32, 32)>>>(db, column_scratch, ranges, OC);
    if (KIND != LAYERNORM) return;
    const float* sums_u = column_scratch + (size_t)ranges * OC;
    add_ranges_kernel<<<blocks_for(OC, 32), dim3(32, 32)>>>(dw, sums_u, ranges, OC);
}

// ---- The ops. A forward function reads values and writes y.v. Its backward function takes the same arguments, reads
// y.d, and sets the derivatives of what the forward function read; where it adds to them, it says so.

// y[n] = token[n]'s row of wte + the row of wpe of n's position. A thread takes W channels of a row.
static __global__ void embedding_forward_kernel(floatX* y, const int* tokens, const floatX* wte, const floatX* wpe,
                                                int N, int T, int C) {
    size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    int n = (int)(at / C), c = (int)(at % C);
    if (n >= N) return;
    float a[W], b[W];
    load(a, wte + (size_t)tokens[n] * C + c);
    load(b, wpe + (size_t)(n % T) * C + c);
#pragma unroll
    for (int i = 0; i < W; i++) a[i] += b[i];
    store(y + at, a);
}

static void embedding_forward(Tensor y, const int* tokens, Param wte, Param wpe, int N, int T, int C) {
    Range range(__func__);
    embedding_forward_kernel<<<blocks_for((size_t)N * C, 256 * W), 256>>>(y.v, tokens, wte.v, wpe.v, N, T, C);
}

// The rows of a batch by token: rows order[first[i]] to order[first[i + 1] - 1] have the same one. So every sum has one
// order, without atomics, and a run gives the same bits again. Sorted on the CPU: next_batch().
typedef struct {
    int *tokens, *targets, *order, *first;
    int distinct;  // tokens
} Batch;

// Block i adds the derivatives of token i's rows to its row of dwte [V, C].
static __global__ void embedding_backward_token_kernel(float* dwte, const floatX* dy, Batch batch, int C) {
    int begin = batch.first[blockIdx.x], end = batch.first[blockIdx.x + 1], token = batch.tokens[batch.order[begin]];
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        float sum[W] = {}, d[W];
#pragma unroll 8
        for (int i = begin; i < end; i++) {
            load(d, dy + (size_t)batch.order[i] * C + c);
#pragma unroll
            for (int j = 0; j < W; j++) sum[j] += d[j];
        }
#pragma unroll
        for (int j = 0; j < W; j++) dwte[(size_t)token * C + c + j] += sum[j];
    }
}

// Block t sums the derivatives of the rows at position t: dwpe [T, C].
static __global__ void embedding_backward_position_kernel(float* dwpe, const floatX* dy, int B, int T, int C) {
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        float sum[W] = {}, d[W];
#pragma unroll 8
        for (int b = 0; b < B; b++) {
            load(d, dy + ((size_t)b * T + blockIdx.x) * C + c);
#pragma unroll
            for (int j = 0; j < W; j++) sum[j] += d[j];
        }
#pragma unroll
        for (int j = 0; j < W; j++) dwpe[(size_t)blockIdx.x * C + c + j] = sum[j];
    }
}

// Adds to wte.d, because the head has set it: both use the same matrix.
static void embedding_backward(Tensor y, Batch batch, Param wte, Param wpe, int N, int T, int C) {
    Range range(__func__);
    embedding_backward_token_kernel<<<batch.distinct, 128>>>(wte.d, y.d, batch, C);
    embedding_backward_position_kernel<<<T, 128>>>(wpe.d, y.d, N / T, T, C);
}

// Matmuls: cuBLASLt's, column-major. To it, a row-major [R, C] array is a C x R matrix, so no operand is ever
// transposed in memory:
//     FORWARD           y  (OC x N)  = w^T x         w and x are stored as IC x OC and IC x N
//     BACKWARD_INPUT    dx (IC x N)  = w dy
//     BACKWARD_WEIGHT   dw (IC x OC) = x dy^T        in fp32
enum { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, PLANS = 64, WORKSPACE = 64 << 20 };
static const cublasLtEpilogue_t NO_EPILOGUE = CUBLASLT_EPILOGUE_DEFAULT;

typedef struct {
    int kind, N, IC, OC;
    cublasLtEpilogue_t epilogue;
} PlanKey;

// What a matmul of this kind and size needs: made on first use.
typedef struct {
    PlanKey key;
    int works;  // 0: cuBLASLt does not have this epilogue for this size
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
} Plan;

static Plan plans[PLANS];
static int plan_count;
static cublasLtHandle_t cublaslt;
static void* workspace;

template <typename T> static void set_attribute(Plan* p, cublasLtMatmulDescAttributes_t name, T value) {
    check(cublasLtMatmulDescSetAttribute(p->operation, name, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
}

static cublasLtMatrixLayout_t new_layout(int type, int rows, int columns) {
    cublasLtMatrixLayout_t layout;
    check(cublasLtMatrixLayoutCreate(&layout, (cudaDataType_t)type, rows, columns, rows), "cublasLtMatrixLayoutCreate");
    return layout;
}

static void new_plan(Plan* p, PlanKey k) {
    int is_weight = k.kind == BACKWARD_WEIGHT, rows = k.kind == FORWARD ? k.OC : k.IC;  // of the result
    p->key = k;
    check(cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set_attribute(p, CUBLASLT_MATMUL_DESC_TRANSA, k.kind == FORWARD ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_attribute(p, CUBLASLT_MATMUL_DESC_TRANSB, is_weight ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_attribute(p, CUBLASLT_MATMUL_DESC_EPILOGUE, k.epilogue);
    if (k.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS)
        set_attribute(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)rows);
    p->a = new_layout(FLOATX, k.IC, is_weight ? k.N : k.OC);
    p->b = new_layout(FLOATX, k.kind == FORWARD ? k.IC : k.OC, k.N);
    p->d = new_layout(is_weight ? (int)CUDA_R_32F : (int)FLOATX, rows, is_weight ? k.OC : k.N);

    cublasLtMatmulPreference_t wish;
    uint64_t bytes = WORKSPACE;
    uint32_t sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;  // partial sums in fp32
    cublasLtMatmulHeuristicResult_t best;
    check(cublasLtMatmulPreferenceCreate(&wish), "cublasLtMatmulPreferenceCreate");
    check(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes),
          "the size of the workspace");
    check(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums),
          "the scheme of reduction");
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(cublaslt, p->operation, p->a, p->b, p->d, p->d, wish, 1,
                                                           &best, &p->works);
    p->works = status == CUBLAS_STATUS_SUCCESS && p->works && best.state == CUBLAS_STATUS_SUCCESS;
    if (p->works) p->algorithm = best.algo;
    else if (k.epilogue != CUBLASLT_EPILOGUE_GELU_AUX_BIAS) check(status, "no algorithm for a matmul:");
    check(cublasLtMatmulPreferenceDestroy(wish), "cublasLtMatmulPreferenceDestroy");
}

// Returns 0 and does nothing if cuBLASLt does not have the epilogue. `pre`: GELU's input, for its epilogue.
static int matmul(void* d, const floatX* a, const floatX* b, const floatX* bias, floatX* pre, PlanKey key) {
    Plan* p = plans;
    while (p < plans + plan_count && memcmp(&p->key, &key, sizeof key)) p++;
    if (p == plans + PLANS) die("too many sizes of", "matmuls");
    if (p == plans + plan_count) new_plan(&plans[plan_count++], key);
    if (!p->works) return 0;
    const float one = 1, zero = 0;
    if (bias) set_attribute(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (pre) set_attribute(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, pre);
    check(cublasLtMatmul(cublaslt, p->operation, &one, a, p->a, b, p->b, &zero, d, p->d, d, p->d, &p->algorithm,
                         workspace, WORKSPACE, 0),
          "cublasLtMatmul");
    return 1;
}

// y[n, o] = b[o] + sum over i of x[n, i] w[o, i]. The head has no b.
static void linear_forward(Tensor y, Tensor x, Layer p, int N, int IC, int OC) {
    Range range(__func__);
    PlanKey key = {FORWARD, N, IC, OC, p.b.v ? CUBLASLT_EPILOGUE_BIAS : NO_EPILOGUE};
    matmul(y.v, p.w.v, x.v, p.b.v, NULL, key);
}

static void linear_backward(Tensor y, Tensor x, Layer p, int N, int IC, int OC) {
    Range range(__func__);
    matmul(p.w.d, x.v, y.d, NULL, NULL, {BACKWARD_WEIGHT, N, IC, OC, NO_EPILOGUE});
    if (p.b.d) column_sums<PLAIN>(p.b.d, NULL, y.d, NULL, NULL, N, OC);
    matmul(x.d, p.w.v, y.d, NULL, NULL, {BACKWARD_INPUT, N, IC, OC, NO_EPILOGUE});
}

// A warp takes a row: y = u w + b, where u = (x - mean) / standard deviation. With a branch, the residual connection
// comes first: x = before + branch. rows: the mean and 1 / the standard deviation.
enum { ROW_WARPS = 4 };

static __global__ void layernorm_forward_kernel(floatX* y, float2* rows, floatX* x, const floatX* before,
                                                const floatX* branch, const floatX* w, const floatX* b, int N, int C) {
    extern __shared__ int4 kept_rows[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = blockIdx.x * ROW_WARPS + warp;
    floatX* row = (floatX*)kept_rows + warp * C;  // every thread reads only what it has written itself
    float sum = 0, square = 0, f[W], g[W];
    if (n >= N) return;
    for (int c = lane * W; c < C; c += 32 * W) {
        size_t at = (size_t)n * C + c;
        load(f, before + at);
        if (branch) {
            load(g, branch + at);
#pragma unroll
            for (int i = 0; i < W; i++) f[i] += g[i];
            store(x + at, f);
        }
        store(row + c, f);
        load(f, row + c);  // rounded
#pragma unroll
        for (int i = 0; i < W; i++) sum += f[i];
    }
    float mean = reduce_lanes(sum, Sum()) / C;
    for (int c = lane * W; c < C; c += 32 * W) {
        load(f, row + c);
#pragma unroll
        for (int i = 0; i < W; i++) square += (f[i] - mean) * (f[i] - mean);
    }
    float rstd = rsqrtf(reduce_lanes(square, Sum()) / C + (float)NORM_EPS);
    if (lane == 0) rows[n] = make_float2(mean, rstd);
    for (int c = lane * W; c < C; c += 32 * W) {
        float weight[W], bias[W];
        load(f, row + c);
        load(weight, w + c);
        load(bias, b + c);
#pragma unroll
        for (int i = 0; i < W; i++) f[i] = (f[i] - mean) * rstd * weight[i] + bias[i];
        store(y + (size_t)n * C + c, f);
    }
}

static void layernorm_forward(Tensor y, Tensor x, Layer p, int N, int C) {
    Range range(__func__);
    layernorm_forward_kernel<<<blocks_for(N, ROW_WARPS), ROW_WARPS * 32, ROW_WARPS * C * sizeof(floatX)>>>(
        y.v, y.rows, NULL, x.v, NULL, p.w.v, p.b.v, N, C);
}

// The residual connection and the layernorm of its sum: x = a + b, and y. In the backward pass a, b and x share their
// derivative, to which layernorm_backward() adds.
static void residual_layernorm_forward(Tensor y, Tensor x, Tensor a, Tensor b, Layer p, int N, int C) {
    Range range(__func__);
    layernorm_forward_kernel<<<blocks_for(N, ROW_WARPS), ROW_WARPS * 32, ROW_WARPS * C * sizeof(floatX)>>>(
        y.v, y.rows, x.v, a.v, b.v, p.w.v, p.b.v, N, C);
}

// With e = dy w, the derivative in u: dx += rstd (e - average(e) - u average(e u)). The averages are there because
// every x of the row moves its mean and its standard deviation. A warp takes a row, which it reads twice.
static __global__ void layernorm_backward_kernel(floatX* dx, const floatX* dy, const floatX* x, const float2* rows,
                                                 const floatX* w, int N, int C) {
    int lane = threadIdx.x % 32, n = blockIdx.x * ROW_WARPS + threadIdx.x / 32;
    float e_sum = 0, eu_sum = 0, d[W], f[W], weight[W], before[W];
    if (n >= N) return;
    float2 row = rows[n];
    for (int c = lane * W; c < C; c += 32 * W) {
        load(d, dy + (size_t)n * C + c);
        load(f, x + (size_t)n * C + c);
        load(weight, w + c);
#pragma unroll
        for (int i = 0; i < W; i++) {
            float e = d[i] * weight[i];
            e_sum += e;
            eu_sum += e * (f[i] - row.x) * row.y;
        }
    }
    e_sum = reduce_lanes(e_sum, Sum()) / C;
    eu_sum = reduce_lanes(eu_sum, Sum()) / C;
    for (int c = lane * W; c < C; c += 32 * W) {
        load(d, dy + (size_t)n * C + c);
        load(f, x + (size_t)n * C + c);
        load(weight, w + c);
        load(before, dx + (size_t)n * C + c);
#pragma unroll
        for (int i = 0; i < W; i++) before[i] += row.y * (d[i] * weight[i] - e_sum - (f[i] - row.x) * row.y * eu_sum);
        store(dx + (size_t)n * C + c, before);
    }
}

// Adds to x.d.
static void layernorm_backward(Tensor y, Tensor x, Layer p, int N, int C) {
    Range range(__func__);
    column_sums<LAYERNORM>(p.b.d, p.w.d, y.d, x.v, y.rows, N, C);
    layernorm_backward_kernel<<<blocks_for(N, ROW_WARPS), ROW_WARPS * 32>>>(x.d, y.d, x.v, y.rows, p.w.v, N, C);
}

// ---- Attention. A row of qkv [N, 3C] holds queries, keys and values; C channels are NH heads of HS. A query sees the
// keys at its own and earlier positions: p = softmax(q . k / sqrt(HS)), and y is the mean of the values, weighted by p.
// p would be [B, NH, T, T]. So a block takes OWN rows of one head of one sequence, and goes over the rows of the other
// side in tiles of TILE rows. Their products and p stay in registers.
//
// A tile lies in shared memory, rows of HS channels. Piece i of 16 bytes of row r is at i ^ (r % 8), so that the same
// piece of eight rows is in different banks. The next tile is copied while this one is used.
#ifdef PRECISION_FP32
enum { ROWS = 1 };
#else
enum { ROWS = 2 };
#endif
// ROWS: of 16 rows each, how many a warp owns. CHUNK: columns of a product at a time, because registers are scarce.
enum { HS = 64, ATTENTION_WARPS = 4, ATTENTION_THREADS = 128, OWN = ATTENTION_WARPS * 16 * ROWS, TILE = 64, CHUNK = 32 };

__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ inline int tile_at(int row, int piece) { return row * HS + (piece ^ (row & 7)) * W; }

// Start to copy 16 bytes, or zeros, to shared memory.
__device__ inline void cp_async_cg_16(uint32_t shared, const void* global, int exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(exists ? 16 : 0)
                 : "memory");
}

__device__ inline void cp_async_wait_all(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Start to copy COUNT rows, `stride` elements apart, of which the first `exist` exist; the others become zeros.
template <int COUNT> __device__ inline void tile_load(floatX* tile, const floatX* x, int stride, int exist) {
    const int PIECES = HS / W, AT_ONCE = ATTENTION_THREADS / PIECES;  // a multiple of 8, so the pieces' order is the same
    int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    uint32_t to = shared_address(tile + tile_at(row, piece));
    x += (size_t)row * stride + piece * W;
#pragma unroll
    for (int i = 0; i < COUNT; i += AT_ONCE)
        cp_async_cg_16(to + i * HS * (int)sizeof(floatX), x + (size_t)i * stride, row + i < exist);
}

// Products of a warp. Its lane 4 g + t holds, of every 16 x 8 block of a result c, row g: c[0], c[1] at columns 2 t and
// 2 t + 1, and row g + 8: c[2], c[3]. That is what tensor cores do.
#ifdef PRECISION_FP32
// c [16 M, 8 J] += a b^T: rows of a tile from a_row on, and of another from b_row on.
template <int M, int J>
__device__ inline void product_nt(float (&c)[M][J][4], const floatX* a, int a_row, const floatX* b, int b_row) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < J; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                for (int k = 0; k < HS / W; k++) {
                    float x[W], y[W];
                    load(x, a + tile_at(a_row + 16 * m + 8 * (i / 2) + g, k));
                    load(y, b + tile_at(b_row + 8 * n + 2 * t + i % 2, k));
                    for (int j = 0; j < W; j++) c[m][n][i] += x[j] * y[j];
                }
}

// c [16 M, HS] += p b: p [16 M, 8 J] is a result of product_nt(), b a tile's rows from b_row on. The other elements of
// a row of p are in the neighbouring lanes.
template <int M, int J>
__device__ inline void product_nn(float (&c)[M][HS / 8][4], const float (&p)[M][J][4], const floatX* b, int b_row) {
    int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int j = 0; j < J; j++)
            for (int other = 0; other < 4; other++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float x = __shfl_sync(ALL_LANES, p[m][j][i], (lane & 28) + other);
                    int row = b_row + 8 * j + 2 * other + i % 2;
#pragma unroll
                    for (int n = 0; n < HS / 8; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            int column = 8 * n + 2 * t + e;
                            c[m][n][i / 2 * 2 + e] += x * b[tile_at(row, column / W) + column % W];
                        }
                }
}
#else
// mma.sync.m16n8k16: c [16, 8] += a [16, 16] b [16, 8]
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ldmatrix.x4: four 8 x 8 blocks. Eight lanes each give the addresses of a block's rows. Lane 4 g + t gets elements 2 t
// and 2 t + 1 of row g of each.
__device__ inline void ldmatrix_x4(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// The same of the transposed blocks.
__device__ inline void ldmatrix_x4_trans(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline uint32_t pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t*)&pair;
}

// c [16 M, 8 J] += a b^T: rows of a tile from a_row on, and of another from b_row on. Piece 2 k is 2 k pieces after a
// lane's first, which is at an address with these bits 0 or swizzled: hence the exclusive or.
template <int M, int J>
__device__ inline void product_nt(float (&c)[M][J][4], const floatX* a, int a_row, const floatX* b, int b_row) {
    const int ROW = HS * sizeof(floatX);
    int lane = threadIdx.x % 32;
    uint32_t at_a = shared_address(a + tile_at(a_row + (lane & 15), lane >> 4));
    uint32_t at_b = shared_address(b + tile_at(b_row + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1));
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        uint32_t x[M][4], y[4];
#pragma unroll
        for (int m = 0; m < M; m++) ldmatrix_x4(x[m], (at_a ^ k << 5) + 16 * m * ROW);
#pragma unroll
        for (int n = 0; n < J; n += 2) {
            ldmatrix_x4(y, (at_b ^ k << 5) + 8 * n * ROW);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_m16n8k16(c[m][n], x[m], y[0], y[1]);
                mma_m16n8k16(c[m][n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

// c [16 M, HS] += p b: p [16 M, 8 J] is a result of product_nt(), rounded here; b a tile's rows from b_row on. Two
// neighbouring blocks of a result are one left operand, without leaving their registers.
template <int M, int J>
__device__ inline void product_nn(float (&c)[M][HS / 8][4], const float (&p)[M][J][4], const floatX* b, int b_row) {
    const int ROW = HS * sizeof(floatX);
    int lane = threadIdx.x % 32;
    uint32_t at_b = shared_address(b + tile_at(b_row + (lane & 15), lane >> 4));
#pragma unroll
    for (int k = 0; k < J / 2; k++) {
        uint32_t x[M][4], y[4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[m][i] = pack(p[m][2 * k + i / 2][i % 2 * 2], p[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < HS / 8; n += 2) {
            ldmatrix_x4_trans(y, (at_b ^ n << 4) + 16 * k * ROW);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_m16n8k16(c[m][n], x[m], y[0], y[1]);
                mma_m16n8k16(c[m][n + 1], x[m], y[2], y[3]);
            }
        }
    }
}
#endif

// Write a warp's result, c times a factor for each of its rows, to rows `row` and following; the first T exist.
template <int M>
__device__ inline void put_rows(floatX* x, int stride, int row, int T, const float (&c)[M][HS / 8][4],
                                const float (&factor)[M][2]) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = row + 16 * m + 8 * half + g;
            floatX* to = x + (size_t)r * stride + 2 * t;
            if (r >= T) continue;
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                floatX pair[2];
                set(&pair[0], c[m][n][2 * half] * factor[m][half]);
                set(&pair[1], c[m][n][2 * half + 1] * factor[m][half]);
                if (sizeof(floatX) == 2) *(uint32_t*)(to + 8 * n) = *(uint32_t*)pair;
                else *(float2*)(to + 8 * n) = *(float2*)pair;
            }
        }
}

// y, and rows.x = log2 of the sum of 2^score. Scores are multiplied by log2(e), so that p = 2^(score - rows.x). The
// softmax goes along with the tiles: when a row's largest score so far grows, the sum and y so far are scaled down.
// Grid: (blocks of OWN queries, heads, sequences). The last queries, which see the most keys, come first.
static __global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_forward_kernel(floatX* y, float2* rows, const floatX* qkv, int T, int NH, float scale) {
    extern __shared__ __align__(1024) unsigned char tiles[];
    floatX *q_tile = (floatX*)tiles, *kv_tiles = q_tile + OWN * HS;  // two pairs of a tile of keys and one of values
    int C = NH * HS, stride = 3 * C, head = blockIdx.y, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int q0 = OWN * (int)(gridDim.x - 1 - blockIdx.x), own = threadIdx.x / 32 * 16 * ROWS, query = q0 + own;
    int steps = (min(T, q0 + OWN) + TILE - 1) / TILE;
    const floatX* q = qkv + (size_t)blockIdx.z * T * stride + head * HS;
    auto load_keys = [&](int step) {
        floatX* to = kv_tiles + step % 2 * 2 * TILE * HS;
        const floatX* k = q + C + (size_t)step * TILE * stride;
        tile_load<TILE>(to, k, stride, T - step * TILE);
        tile_load<TILE>(to + TILE * HS, k + C, stride, T - step * TILE);
    };
    float o[ROWS][HS / 8][4] = {}, largest[ROWS][2], sum[ROWS][2] = {};
#pragma unroll
    for (int m = 0; m < ROWS; m++) largest[m][0] = largest[m][1] = -FLT_MAX;
    tile_load<OWN>(q_tile, q + (size_t)q0 * stride, stride, T - q0);
    load_keys(0);
    for (int step = 0; step < steps; step++) {
        const floatX *k_tile = kv_tiles + step % 2 * 2 * TILE * HS, *v_tile = k_tile + TILE * HS;
        int k0 = step * TILE;
        cp_async_wait_all();
        __syncthreads();  // this step's tiles are there, and the other two are no longer read
        if (step + 1 < steps) load_keys(step + 1);
        if (k0 > query + 16 * ROWS - 1) continue;  // keys after all queries of this warp
        float s[ROWS][TILE / 8][4] = {};
        product_nt<ROWS, TILE / 8>(s, q_tile, own, k_tile, 0);
#pragma unroll
        for (int m = 0; m < ROWS; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int last = query + 16 * m + 8 * half + g - k0 - 2 * t;  // the last key that the row sees, from this lane's
                float more = largest[m][half], tile_sum = 0;
#pragma unroll
                for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        if (8 * n + e > last) s[m][n][2 * half + e] = -INFINITY;
                        more = fmaxf(more, s[m][n][2 * half + e]);
                    }
                more = reduce_lanes(more, Max(), 4);
#pragma unroll
                for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float p = ex2_approx(fmaf(s[m][n][2 * half + e], scale, -more * scale));
                        s[m][n][2 * half + e] = p;
                        tile_sum += p;
                    }
                float less = ex2_approx((largest[m][half] - more) * scale);
                largest[m][half] = more;
                sum[m][half] = sum[m][half] * less + tile_sum;
#pragma unroll
                for (int n = 0; n < HS / 8; n++) o[m][n][2 * half] *= less, o[m][n][2 * half + 1] *= less;
            }
        product_nn<ROWS, TILE / 8>(o, s, v_tile, 0);
    }
    float factor[ROWS][2];
#pragma unroll
    for (int m = 0; m < ROWS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = reduce_lanes(sum[m][half], Sum(), 4);
            int row = query + 16 * m + 8 * half + g;
            factor[m][half] = 1 / total;
            if (t == 0 && row < T)
                rows[((size_t)blockIdx.z * NH + head) * T + row].x = largest[m][half] * scale + log2f(total);
        }
    put_rows<ROWS>(y + (size_t)blockIdx.z * T * C + head * HS, C, query, T, o, factor);
}

// dq. It also writes rows.y = the sum of p dp over the keys, which is dy . y. Blocks as in the forward pass.
static __global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_backward_query_kernel(floatX* dqkv, float2* rows, const floatX* dy, const floatX* y, const floatX* qkv,
                                    int T, int NH, float scale) {
    extern __shared__ __align__(1024) unsigned char tiles[];
    floatX *q_tile = (floatX*)tiles, *dy_tile = q_tile + OWN * HS, *kv_tiles = dy_tile + OWN * HS;
    int C = NH * HS, stride = 3 * C, head = blockIdx.y, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int q0 = OWN * (int)(gridDim.x - 1 - blockIdx.x), own = threadIdx.x / 32 * 16 * ROWS, query = q0 + own;
    int steps = (min(T, q0 + OWN) + TILE - 1) / TILE;
    const floatX* q = qkv + (size_t)blockIdx.z * T * stride + head * HS;
    auto load_keys = [&](int step) {
        floatX* to = kv_tiles + step % 2 * 2 * TILE * HS;
        const floatX* k = q + C + (size_t)step * TILE * stride;
        tile_load<TILE>(to, k, stride, T - step * TILE);
        tile_load<TILE>(to + TILE * HS, k + C, stride, T - step * TILE);
    };
    dy += (size_t)blockIdx.z * T * C + head * HS;
    y += (size_t)blockIdx.z * T * C + head * HS;
    rows += ((size_t)blockIdx.z * NH + head) * T;
    tile_load<OWN>(q_tile, q + (size_t)q0 * stride, stride, T - q0);
    tile_load<OWN>(dy_tile, dy + (size_t)q0 * C, C, T - q0);
    load_keys(0);
    float2 row[ROWS][2];  // during these copies; rows past the end get numbers that nothing uses
#pragma unroll
    for (int m = 0; m < ROWS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = query + 16 * m + 8 * half + g;
            float sum = 0, a[W], b[W];
            for (int c = t * W; c < HS && r < T; c += 4 * W) {
                load(a, dy + (size_t)r * C + c);
                load(b, y + (size_t)r * C + c);
#pragma unroll
                for (int i = 0; i < W; i++) sum += a[i] * b[i];
            }
            row[m][half] = make_float2(r < T ? rows[r].x : 0, reduce_lanes(sum, Sum(), 4));
            if (t == 0 && r < T) rows[r].y = row[m][half].y;
        }
    float dq[ROWS][HS / 8][4] = {}, factor[ROWS][2];
    for (int step = 0; step < steps; step++) {
        const floatX *k_tile = kv_tiles + step % 2 * 2 * TILE * HS, *v_tile = k_tile + TILE * HS;
        cp_async_wait_all();
        __syncthreads();
        if (step + 1 < steps) load_keys(step + 1);
#pragma unroll
        for (int chunk = 0; chunk < TILE; chunk += CHUNK) {
            int k0 = step * TILE + chunk;
            if (k0 > query + 16 * ROWS - 1) continue;
            float s[ROWS][CHUNK / 8][4] = {}, ds[ROWS][CHUNK / 8][4] = {};
            product_nt<ROWS, CHUNK / 8>(s, q_tile, own, k_tile, chunk);
            product_nt<ROWS, CHUNK / 8>(ds, dy_tile, own, v_tile, chunk);  // dp so far
#pragma unroll
            for (int m = 0; m < ROWS; m++)
#pragma unroll
                for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float p = ex2_approx(fmaf(s[m][n][i], scale, -row[m][i / 2].x));
                        if (k0 + 8 * n + 2 * t + i % 2 > query + 16 * m + 8 * (i / 2) + g) p = 0;
                        ds[m][n][i] = p * (ds[m][n][i] - row[m][i / 2].y);
                    }
            product_nn<ROWS, CHUNK / 8>(dq, ds, k_tile, chunk);
        }
    }
#pragma unroll
    for (int m = 0; m < ROWS; m++) factor[m][0] = factor[m][1] = scale / LOG2_E;
    put_rows<ROWS>(dqkv + (size_t)blockIdx.z * T * stride + head * HS, stride, query, T, dq, factor);
}

// dk and dv. A block takes OWN keys, and goes over the queries from theirs on. A row is a key here: its scores are a
// column of p, so p and ds are left operands as they are. A query past the end is zeros: p is 1, but what it multiplies
// is 0. Grid: (blocks of OWN keys, heads, sequences). The first keys, which the most queries see, come first.
static __global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_backward_key_kernel(floatX* dqkv, const float2* rows, const floatX* dy, const floatX* qkv, int T, int NH,
                                  float scale) {
    extern __shared__ __align__(1024) unsigned char tiles[];
    floatX *k_tile = (floatX*)tiles, *v_tile = k_tile + OWN * HS, *qd_tiles = v_tile + OWN * HS;
    float2* row_tiles = (float2*)(qd_tiles + 4 * TILE * HS);
    int C = NH * HS, stride = 3 * C, head = blockIdx.y, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int k0 = OWN * (int)blockIdx.x, own = threadIdx.x / 32 * 16 * ROWS, key = k0 + own;
    int steps = (T + TILE - 1) / TILE;
    const floatX* q = qkv + (size_t)blockIdx.z * T * stride + head * HS;
    dy += (size_t)blockIdx.z * T * C + head * HS;
    rows += ((size_t)blockIdx.z * NH + head) * T;
    auto load_queries = [&](int step) {
        floatX* to = qd_tiles + step % 2 * 2 * TILE * HS;
        int first = step * TILE, at = first + (int)threadIdx.x;
        tile_load<TILE>(to, q + (size_t)first * stride, stride, T - first);
        tile_load<TILE>(to + TILE * HS, dy + (size_t)first * C, C, T - first);
        if (threadIdx.x < TILE) row_tiles[step % 2 * TILE + threadIdx.x] = at < T ? rows[at] : make_float2(0, 0);
    };
    tile_load<OWN>(k_tile, q + C + (size_t)k0 * stride, stride, T - k0);
    tile_load<OWN>(v_tile, q + 2 * C + (size_t)k0 * stride, stride, T - k0);
    load_queries(k0 / TILE);
    float dk[ROWS][HS / 8][4] = {}, dv[ROWS][HS / 8][4] = {}, factor[ROWS][2];
    for (int step = k0 / TILE; step < steps; step++) {
        const floatX *q_tile = qd_tiles + step % 2 * 2 * TILE * HS, *dy_tile = q_tile + TILE * HS;
        cp_async_wait_all();
        __syncthreads();
        if (step + 1 < steps) load_queries(step + 1);
#pragma unroll
        for (int chunk = 0; chunk < TILE; chunk += CHUNK) {
            int query = step * TILE + chunk;
            if (query + CHUNK - 1 < key) continue;  // all before this warp's keys
            float p[ROWS][CHUNK / 8][4] = {}, ds[ROWS][CHUNK / 8][4] = {};
            product_nt<ROWS, CHUNK / 8>(p, k_tile, own, q_tile, chunk);
            product_nt<ROWS, CHUNK / 8>(ds, v_tile, own, dy_tile, chunk);
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float2 row = row_tiles[step % 2 * TILE + chunk + 8 * n + 2 * t + e];
#pragma unroll
                    for (int m = 0; m < ROWS; m++)
#pragma unroll
                        for (int i = e; i < 4; i += 2) {
                            float x = ex2_approx(fmaf(p[m][n][i], scale, -row.x));
                            if (key + 16 * m + 8 * (i / 2) + g > query + 8 * n + 2 * t + e) x = 0;
                            p[m][n][i] = x;
                            ds[m][n][i] = x * (ds[m][n][i] - row.y);
                        }
                }
            product_nn<ROWS, CHUNK / 8>(dv, p, dy_tile, chunk);
            product_nn<ROWS, CHUNK / 8>(dk, ds, q_tile, chunk);
        }
    }
    floatX* to = dqkv + (size_t)blockIdx.z * T * stride + head * HS;
#pragma unroll
    for (int m = 0; m < ROWS; m++) factor[m][0] = factor[m][1] = scale / LOG2_E;
    put_rows<ROWS>(to + C, stride, key, T, dk, factor);
#pragma unroll
    for (int m = 0; m < ROWS; m++) factor[m][0] = factor[m][1] = 1;
    put_rows<ROWS>(to + 2 * C, stride, key, T, dv, factor);
}

// The most shared memory that a block uses.
enum {
    FORWARD_TILES = (OWN + 4 * TILE) * HS * sizeof(floatX),
    BACKWARD_TILES = (2 * OWN + 4 * TILE) * HS * sizeof(floatX) + 2 * TILE * sizeof(float2)
};

// `rows` of y is [B, NH, T].
static void attention_forward(Tensor y, Tensor qkv, int B, int T, int NH) {
    Range range(__func__);
    attention_forward_kernel<<<dim3(blocks_for(T, OWN), NH, B), ATTENTION_THREADS, FORWARD_TILES>>>(
        y.v, y.rows, qkv.v, T, NH, LOG2_E / sqrtf(HS));
}

// dp[s] = dy . v[s]. Through the softmax, the score gets ds = p (dp - sum of p dp): probabilities add up to 1, so what
// one gains the others lose. Two kernels, so that no sum crosses blocks: both compute p and ds again.
static void attention_backward(Tensor y, Tensor qkv, int B, int T, int NH) {
    Range range(__func__);
    dim3 grid(blocks_for(T, OWN), NH, B);
    float scale = LOG2_E / sqrtf(HS);
    attention_backward_query_kernel<<<grid, ATTENTION_THREADS, BACKWARD_TILES>>>(qkv.d, y.rows, y.d, y.v, qkv.v, T, NH,
                                                                                scale);
    attention_backward_key_kernel<<<grid, ATTENTION_THREADS, BACKWARD_TILES>>>(qkv.d, y.rows, y.d, qkv.v, T, NH, scale);
}

// ---- GELU, the loss
static __global__ void gelu_forward_kernel(floatX* y, const floatX* x, size_t n) {
    size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    float f[W];
    if (at >= n) return;
    load(f, x + at);
#pragma unroll
    for (int i = 0; i < W; i++) f[i] = 0.5f * f[i] * (1 + gelu_tanh(f[i]));
    store(y + at, f);
}

// A linear layer x and GELU y of its result: in one matmul, where cuBLASLt can.
static void linear_gelu_forward(Tensor y, Tensor x, Tensor in, Layer p, int N, int IC, int OC) {
    Range range(__func__);
    if (matmul(y.v, p.w.v, in.v, p.b.v, x.v, {FORWARD, N, IC, OC, CUBLASLT_EPILOGUE_GELU_AUX_BIAS})) return;
    linear_forward(x, in, p, N, IC, OC);
    gelu_forward_kernel<<<blocks_for((size_t)N * OC, 256 * W), 256>>>(y.v, x.v, (size_t)N * OC);
}

// x.d and y.d are the same memory. It also sums the bias's derivative, for which linear_backward() would read x.d again.
static void gelu_backward(Tensor y, Tensor x, Param b, int N, int OC) {
    Range range(__func__);
    column_sums<GELU>(b.d, NULL, y.d, x.v, NULL, N, OC);
}

// losses[n] = -log(probability of the target). Its derivative in the logits is p - (1 at the target), times factor,
// which takes their place. A block takes a row [Vp]. A thread has the largest logit that it has read, and the sum of
// the exponentials relative to it. Columns from V on are padding: their derivative is 0.
static __global__ void __launch_bounds__(1024, 2)
    cross_entropy_kernel(floatX* logits, float* losses, const int* targets, int V, int Vp, float factor) {
    floatX* x = logits + (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    float at_target = to_float(x[target]), largest = -FLT_MAX, sum = 0, f[W];
    for (int v = threadIdx.x * W; v < V; v += blockDim.x * W) {
        load(f, x + v);
        float before = largest;
#pragma unroll
        for (int i = 0; i < W; i++) {
            if (v + i >= V) f[i] = -INFINITY;
            largest = fmaxf(largest, f[i]);
        }
        sum *= ex2_approx((before - largest) * LOG2_E);
#pragma unroll
        for (int i = 0; i < W; i++) sum += ex2_approx((f[i] - largest) * LOG2_E);
    }
    float row_largest = reduce_block(largest, Max(), -FLT_MAX);
    sum = reduce_block(sum * ex2_approx((largest - row_largest) * LOG2_E), Sum(), 0.0f);
    for (int v = threadIdx.x * W; v < Vp; v += blockDim.x * W) {
        load(f, x + v);
#pragma unroll
        for (int i = 0; i < W; i++) {
            float p = v + i < V ? ex2_approx((f[i] - row_largest) * LOG2_E) / sum : 0;
            f[i] = factor * (p - (v + i == target));
        }
        store(x + v, f);
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = row_largest + logf(sum) - at_target;
}

// One block.
static __global__ void mean_kernel(double* mean, const float* x, int N) {
    double sum = 0;
    for (int n = threadIdx.x; n < N; n += blockDim.x) sum += (double)x[n];
    sum = reduce_block(sum, Sum(), 0.0);
    if (threadIdx.x == 0) *mean = sum / N;
}

// The mean over the rows into *loss, in the GPU's memory.
static void cross_entropy(double* loss, float* losses, Tensor logits, const int* targets, int N, int V, int Vp) {
    Range range(__func__);
    cross_entropy_kernel<<<N, 1024>>>(logits.v, losses, targets, V, Vp, 1.0f / N);
    mean_kernel<<<1, 1024>>>(loss, losses, N);
}

// ---- The model: embeddings, L blocks, a last layernorm, and the head, which is the token embedding again
typedef struct {
    Layer to_ln1, to_qkv, to_proj, to_ln2, to_fc, to_fcproj;      // the parameters that lead to
    Tensor ln1, qkv, att, proj, mid, ln2, fc, gelu, fcproj, out;  // the activations
} Block;

typedef struct {
    int L, NH, C, T, V, Vp;
    Param wte, wpe;
    Tensor embedded, lnf, logits;
    Layer to_lnf, to_logits;
    Block* block;
    float* losses;  // [N]
    double* loss;
} Model;

// A block's last op is the layernorm that the next one begins with, because it is fused with the residual connection.
static void forward(Model* m, const int* tokens, int B, int T) {
    Range range(__func__);
    int N = B * T, C = m->C;
    Tensor x = m->embedded;  // the residual stream
    embedding_forward(x, tokens, m->wte, m->wpe, N, T, C);
    layernorm_forward(m->block[0].ln1, x, m->block[0].to_ln1, N, C);
    for (int l = 0; l < m->L; l++) {
        Block* k = &m->block[l];
        int is_last = l + 1 == m->L;
        linear_forward(k->qkv, k->ln1, k->to_qkv, N, C, 3 * C);
        attention_forward(k->att, k->qkv, B, T, m->NH);
        linear_forward(k->proj, k->att, k->to_proj, N, C, C);
        residual_layernorm_forward(k->ln2, k->mid, x, k->proj, k->to_ln2, N, C);
        linear_gelu_forward(k->gelu, k->fc, k->ln2, k->to_fc, N, C, 4 * C);
        linear_forward(k->fcproj, k->gelu, k->to_fcproj, N, 4 * C, C);
        residual_layernorm_forward(is_last ? m->lnf : k[1].ln1, k->out, k->mid, k->fcproj,
                                   is_last ? m->to_lnf : k[1].to_ln1, N, C);
        x = k->out;
    }
    linear_forward(m->logits, m->lnf, m->to_logits, N, C, m->Vp);
    check(cudaGetLastError());
}

// The same list from its end. logits.d is set already. A residual connection has nothing to do here: the derivatives of
// its sum and of both inputs are the same memory. It starts as 0, and every layernorm adds to it.
static void backward(Model* m, Batch batch, int B, int T) {
    Range range(__func__);
    int N = B * T, C = m->C;
    check(cudaMemsetAsync(m->embedded.d, 0, (size_t)N * C * sizeof(floatX), 0));
    linear_backward(m->logits, m->lnf, m->to_logits, N, C, m->Vp);
    layernorm_backward(m->lnf, m->block[m->L - 1].out, m->to_lnf, N, C);
    for (int l = m->L - 1; l >= 0; l--) {
        Block* k = &m->block[l];
        Tensor x = l ? m->block[l - 1].out : m->embedded;
        Layer without_bias = {k->to_fc.w};
        linear_backward(k->fcproj, k->gelu, k->to_fcproj, N, 4 * C, C);
        gelu_backward(k->gelu, k->fc, k->to_fc.b, N, 4 * C);
        linear_backward(k->fc, k->ln2, without_bias, N, C, 4 * C);
        layernorm_backward(k->ln2, k->mid, k->to_ln2, N, C);
        linear_backward(k->proj, k->att, k->to_proj, N, C, C);
        attention_backward(k->att, k->qkv, B, T, m->NH);
        linear_backward(k->qkv, k->ln1, k->to_qkv, N, C, 3 * C);
        layernorm_backward(k->ln1, x, k->to_ln1, N, C);
    }
    embedding_backward(m->embedded, batch, m->wte, m->wpe, N, T, C);
    check(cudaGetLastError());
}

// AdamW, update number `update` from 1. If the norm of all gradients is above MAX_NORM, they are scaled down to it.
enum { NORM_BLOCKS = 1024 };

static __global__ void squares_kernel(double* sums, const float* d, size_t n) {
    double sum = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n / 4; i += (size_t)gridDim.x * blockDim.x) {
        float4 x = ((const float4*)d)[i];
        sum += (double)x.x * x.x + (double)x.y * x.y + (double)x.z * x.z + (double)x.w * x.w;
    }
    sum = reduce_block(sum, Sum(), 0.0);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// One block of NORM_BLOCKS threads: the factor on the gradients.
static __global__ void clip_kernel(float* clip, const double* sums) {
    double norm = sqrt(reduce_block(sums[threadIdx.x], Sum(), 0.0));
    if (threadIdx.x == 0) *clip = norm > MAX_NORM ? (float)(MAX_NORM / norm) : 1;
}

// Values that all elements of an update share.
typedef struct {
    float beta1, beta2, rest1, rest2;  // rest: 1 - beta
    float step_size, root_scale;       // rate / (1 - beta1^update), 1 / sqrt(1 - beta2^update)
    float decay, eps;                  // decay: rate * WEIGHT_DECAY
} Update;

// A block takes a piece of the parameters, a thread four of its elements.
static __global__ void adamw_kernel(floatX* v, float* master, float* mean, float* square, const float* d,
                                    const char* decays, const float* clip, Update u) {
    size_t at = (size_t)blockIdx.x * (PIECE / 4) + threadIdx.x;
    float4 g = ((const float4*)d)[at], m = ((float4*)mean)[at], s = ((float4*)square)[at], p = ((float4*)master)[at];
    float kept = decays[blockIdx.x] ? 1 - u.decay : 1, scale = *clip;
    floatX rounded[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float x = scale * (&g.x)[i], *mi = &m.x + i, *si = &s.x + i, *pi = &p.x + i;
        *mi = u.beta1 * *mi + u.rest1 * x;
        *si = u.beta2 * *si + u.rest2 * x * x;
        *pi = *pi * kept - u.step_size * *mi / (u.root_scale * sqrtf(*si) + u.eps);
        set(&rounded[i], *pi);
    }
    ((float4*)mean)[at] = m, ((float4*)square)[at] = s, ((float4*)master)[at] = p;
    if (sizeof(floatX) == 2) ((int2*)v)[at] = *(int2*)rounded;
    else ((float4*)v)[at] = *(float4*)rounded;
}

static void adamw(int update, double rate) {
    Range range(__func__);
    static double* sums = zeros<double>(NORM_BLOCKS);
    static float* clip = zeros<float>(1);
    float step_size = (float)(rate / (1 - pow(BETA1, update))), root_scale = (float)(1 / sqrt(1 - pow(BETA2, update)));
    Update u = {(float)BETA1, (float)BETA2, (float)(1 - BETA1),          (float)(1 - BETA2),
                step_size,    root_scale,   (float)(rate * WEIGHT_DECAY), (float)EPS};
    squares_kernel<<<NORM_BLOCKS, 256>>>(sums, params.d, params.used);
    clip_kernel<<<1, NORM_BLOCKS>>>(clip, sums);
    adamw_kernel<<<(unsigned)(params.used / PIECE), PIECE / 4>>>(params.v, params.master, params.mean, params.square,
                                                                 params.d, params.decays, clip, u);
    check(cudaGetLastError());
}

// Linear warm-up, then half a cosine down to FINAL_LR of the peak.
static double learning_rate(int step, int steps) {
    int warmup = steps / WARMUP;
    if (step < warmup) return LEARNING_RATE * (step + 1) / warmup;
    double cosine = cos(PI * (step - warmup) / (steps - warmup));
    return LEARNING_RATE * (FINAL_LR + (1 - FINAL_LR) * (1 + cosine) / 2);
}

static uint64_t random_state = 1337;

static double random_uniform(void) {  // in (0, 1): xorshift64*
    random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
    return ((double)(random_state * 2685821657736338717u >> 11) + 0.5) / 9007199254740992.0;
}

// ---- Files: a Hugging Face directory with config.json, model.safetensors and vocab.json; token shards
static long file_size;  // of the last file that was read

// A file's bytes, and a zero behind them.
static char* read_file(const char* folder, const char* name) {
    char path[4096];
    snprintf(path, sizeof path, "%s%s%s", folder, *folder ? "/" : "", name);
    FILE* f = fopen(path, "rb");
    if (!f) die("cannot open", path);
    fseek(f, 0, SEEK_END), file_size = ftell(f), rewind(f);
    char* bytes = (char*)calloc((size_t)file_size + 1, 1);
    if (!bytes || fread(bytes, 1, (size_t)file_size, f) != (size_t)file_size) die("cannot read", path);
    fclose(f);
    return bytes;
}

static int config_number(const char* json, const char* key, int standard) {
    const char* at = json ? strstr(json, key) : NULL;
    if (json && (!at || sscanf(at + strlen(key), "\": %d", &standard) != 1)) die("config.json lacks", key);
    return standard;
}

// A parameter: random numbers with this mean and standard deviation, or from `weights`, the bytes of a
// model.safetensors. That file is the length of its header (8 bytes), the header, which is JSON, and the numbers.
// There, GPT-2's matrices named c_... are [in, out]. `rows`: of them, how many there are in memory; those from OC on
// are 0.
static Param new_param(const char* weights, const char* name, int rows, int OC, int IC, double mean, double std) {
    size_t at = params.used, n = (size_t)OC * IC, size = (size_t)rows * IC;
    Param p = {params.v + at, params.d + at, params.master + at, size};
    params.used += (size + PIECE - 1) / PIECE * PIECE;
    if (params.used > params.size) die("the parameters are larger than planned:", name);
    if (IC > 1) check(cudaMemset(params.decays + at / PIECE, 1, (params.used - at) / PIECE));
    float* x = (float*)calloc(size, sizeof(float));
    floatX* rounded = (floatX*)calloc(size, sizeof(floatX));
    if (!x || !rounded) die("out of memory:", name);
    for (size_t i = 0; !weights && i < n; i++) x[i] = (float)(mean + std * sqrt(12) * (random_uniform() - 0.5));
    if (weights) {
        uint64_t header;
        unsigned long begin, end;
        memcpy(&header, weights, sizeof header);
        const char *found = strstr(weights + 8, name), *offsets = found ? strstr(found, "data_offsets\":[") : NULL;
        if (!offsets || sscanf(offsets + 15, "%lu,%lu", &begin, &end) != 2 || end - begin != 4 * n)
            die("model.safetensors lacks, or has in another size,", name);
        const char* numbers = weights + 8 + header + begin;
        int is_transposed = IC > 1 && strstr(name, "c_");
        for (size_t o = 0; o < (size_t)OC; o++)
            for (size_t i = 0; i < (size_t)IC; i++)
                memcpy(&x[o * IC + i], numbers + 4 * (is_transposed ? i * OC + o : o * IC + i), sizeof(float));
    }
    for (size_t i = 0; i < n; i++) set(&rounded[i], x[i]);
    check(cudaMemcpy(p.master, x, size * sizeof(float), cudaMemcpyHostToDevice));
    check(cudaMemcpy(p.v, rounded, size * sizeof(floatX), cudaMemcpyHostToDevice));
    free(x), free(rounded);
    return p;
}

static Layer new_layer(const char* weights, const char* format, int l, int OC, int IC, double mean, double std) {
    char name[80];
    int length = snprintf(name, sizeof name, format, l);
    Layer p;
    strcpy(name + length, ".weight");
    p.w = new_param(weights, name, OC, OC, IC, mean, std);
    strcpy(name + length, ".bias");
    p.b = new_param(weights, name, OC, OC, 1, 0, 0);
    return p;
}

static Tensor new_tensor(size_t size, floatX* d, size_t rows) {
    Tensor t = {zeros<floatX>(size), d, rows ? zeros<float2>(rows) : NULL};
    return t;
}

// The model in `folder`, or a small one with random weights if that is NULL, for batches of B sequences.
static Model new_model(const char* folder, int B) {
    char *json = folder ? read_file(folder, "config.json") : NULL,
         *w = folder ? read_file(folder, "model.safetensors") : NULL;
    int L = config_number(json, "n_layer", 2), NH = config_number(json, "n_head", 2);
    int C = config_number(json, "n_embd", 128), T = config_number(json, "n_positions", 64);
    int V = config_number(json, "vocab_size", 384), Vp = (V + 127) / 128 * 128;
    size_t N = (size_t)B * T, NC = N * C;
    double std = 0.02, branch_std = 0.02 / sqrt(2.0 * L);  // smaller where a branch joins the residual stream
    if (C != NH * HS) die("heads must have 64 channels:", folder);
    params.size = (size_t)(Vp + T) * C + (size_t)L * (12 * C + 13) * C + 2 * C + (size_t)(12 * L + 4) * PIECE;
    params.v = zeros<floatX>(params.size), params.d = zeros<float>(params.size);
    params.master = zeros<float>(params.size);
    params.mean = zeros<float>(params.size), params.square = zeros<float>(params.size);
    params.decays = zeros<char>(params.size / PIECE + 1);
    column_scratch = zeros<float>(2 * COLUMN_BLOCKS * COLUMNS);
    workspace = zeros<char>(WORKSPACE);
    check(cublasLtCreate(&cublaslt), "cublasLtCreate");
    check(cudaFuncSetAttribute(attention_forward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, FORWARD_TILES));
    check(cudaFuncSetAttribute(attention_backward_query_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               BACKWARD_TILES));
    check(cudaFuncSetAttribute(attention_backward_key_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               BACKWARD_TILES));

    // Derivatives: of the residual stream and all that is added to it, of a branch [N, C], of qkv, of the MLP's middle
    floatX *dx = zeros<floatX>(NC), *dbranch = zeros<floatX>(NC), *dqkv = zeros<floatX>(3 * NC);
    floatX* dfc = zeros<floatX>(4 * NC);
    Tensor branch = new_tensor(NC, dx, 0);  // of all layers: it is added to the residual stream at once
    Model m = {L, NH, C, T, V, Vp};
    m.block = (Block*)calloc((size_t)L, sizeof(Block));
    m.wte = new_param(w, "wte.weight", Vp, V, C, 0, std), m.wpe = new_param(w, "wpe.weight", T, T, C, 0, std);
    for (int l = 0; l < L; l++) {
        Block* k = &m.block[l];
        k->to_ln1 = new_layer(w, "h.%d.ln_1", l, C, 1, 1, 0);
        k->to_qkv = new_layer(w, "h.%d.attn.c_attn", l, 3 * C, C, 0, std);
        k->to_proj = new_layer(w, "h.%d.attn.c_proj", l, C, C, 0, branch_std);
        k->to_ln2 = new_layer(w, "h.%d.ln_2", l, C, 1, 1, 0);
        k->to_fc = new_layer(w, "h.%d.mlp.c_fc", l, 4 * C, C, 0, std);
        k->to_fcproj = new_layer(w, "h.%d.mlp.c_proj", l, C, 4 * C, 0, branch_std);
        k->ln1 = new_tensor(NC, dbranch, N), k->qkv = new_tensor(3 * NC, dqkv, 0);
        k->att = new_tensor(NC, dbranch, N * NH), k->proj = branch, k->mid = new_tensor(NC, dx, 0);
        k->ln2 = new_tensor(NC, dbranch, N), k->fc = new_tensor(4 * NC, dfc, 0), k->gelu = new_tensor(4 * NC, dfc, 0);
        k->fcproj = branch, k->out = new_tensor(NC, dx, 0);
    }
    m.to_lnf = new_layer(w, "ln_f", 0, C, 1, 1, 0), m.to_logits.w = m.wte;
    m.embedded = new_tensor(NC, dx, 0), m.lnf = new_tensor(NC, dbranch, N);
    m.logits = new_tensor(N * Vp, NULL, 0), m.logits.d = m.logits.v;  // cross_entropy() writes one over the other
    m.losses = zeros<float>(N), m.loss = zeros<double>(1);
    free(json), free(w);
    return m;
}

// Print a token by vocab.json, {"text":number, ...}. There an invisible byte is a letter from U+0100 on: of
// those that occur in stories, U+0120 is a blank and U+010A a line break.
static void print_token(const char* vocab, int token) {
    char end[32];
    snprintf(end, sizeof end, "\":%d,", token);
    const char *at = strstr(vocab, end), *begin = at;
    if (!at) printf("<%d>", token);
    while (at && (begin[-1] != '"' || !strchr("{,", begin[-2]))) begin--;
    for (; begin < at; begin++) {
        if (!memcmp(begin, "\xc4\xa0", 2)) putchar(' '), begin++;
        else if (!memcmp(begin, "\xc4\x8a", 2)) putchar('\n'), begin++;
        else putchar(*begin == '\\' ? *++begin : *begin);
    }
}

// Draw tokens one after the other, each from the probabilities that the model gives after those before it. The tokens
// after it are 0 so far: no row before them sees them.
static void sample(Model* m, const char* vocab, int* device_tokens) {
    int T = m->T < SAMPLE_TOKENS + 1 ? m->T : SAMPLE_TOKENS + 1;
    int tokens[SAMPLE_TOKENS + 1] = {m->V - 1};  // <|endoftext|>, which documents begin with, is the last token
    floatX* logits = (floatX*)malloc((size_t)m->Vp * sizeof(floatX));
    for (int n = 1; n < T; n++) {
        check(cudaMemcpy(device_tokens, tokens, (size_t)T * sizeof(int), cudaMemcpyHostToDevice));
        forward(m, device_tokens, 1, T);
        check(cudaMemcpy(logits, m->logits.v + (size_t)(n - 1) * m->Vp, (size_t)m->Vp * sizeof(floatX),
                         cudaMemcpyDeviceToHost));
        double largest = -INFINITY, sum = 0;
        for (int v = 0; v < m->V; v++) largest = fmax(largest, to_float(logits[v]));
        for (int v = 0; v < m->V; v++) sum += exp(to_float(logits[v]) - largest);
        double rest = sum * random_uniform();
        while (tokens[n] < m->V - 1 && (rest -= exp(to_float(logits[tokens[n]]) - largest)) > 0) tokens[n]++;
        if (tokens[n] == m->V - 1) break;
        print_token(vocab, tokens[n]);
    }
    putchar('\n');
    free(logits);
}

// ---- Batches. They are sorted on the CPU while the GPU is busy with the step before.

// The arrays of a batch, one after the other from p on.
static Batch batch_at(int* p, int N) {
    Batch b = {p, p + N, p + 2 * N, p + 3 * N, 0};
    return b;
}

// Sequences in the order of the file; a target is the next token. Returns the ints from b->tokens on that are used.
static size_t next_batch(Batch* b, const uint16_t* data, long tokens, int step, int B, const Model* m) {
    static int* end = (int*)calloc((size_t)m->V + 1, sizeof(int));  // of each token's rows, so far
    int N = B * m->T, begin = 0;
    memset(end, 0, ((size_t)m->V + 1) * sizeof(int));
    for (int n = 0; n < N; n++) {
        long at = ((long)step * B + n / m->T) % ((tokens - 1) / m->T) * m->T + n % m->T;
        b->tokens[n] = data[at], b->targets[n] = data[at + 1];
        if (b->tokens[n] >= m->V || b->targets[n] >= m->V) die("a token is outside", "the model's vocabulary");
        end[b->tokens[n] + 1]++;
    }
    for (int v = 0; v < m->V; v++) end[v + 1] += end[v];
    for (int n = 0; n < N; n++) b->order[end[b->tokens[n]]++] = n;
    b->distinct = 0;
    for (int v = 0; v < m->V; begin = end[v++])
        if (end[v] > begin) b->first[b->distinct++] = begin;
    b->first[b->distinct] = N;
    return (size_t)(b->first - b->tokens) + (size_t)b->distinct + 1;
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char** argv) {
    int steps = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 1000, B = argc > 3 ? (int)strtol(argv[3], NULL, 10) : BATCH;
    const char *folder = argc > 2 ? argv[2] : NULL, *stories = "data/builtin";
    char* vocab = read_file(folder ? folder : stories, "vocab.json");
    char* file = argc > 4 ? read_file("", argv[4]) : read_file(stories, "train.bin");
    const uint16_t* data = (const uint16_t*)(file + 1024);  // behind a header of 256 int32
    long tokens = (file_size - 1024) / 2;
    if (argc > 5) LEARNING_RATE = strtod(argv[5], NULL);
    if (steps < 1 || B < 1) die("the number of steps and the batch size are", "at least 1");
    Model m = new_model(folder, B);
    if (tokens <= m.T) die("too few tokens in", argc > 4 ? argv[4] : stories);
    int N = B * m.T, *host[2], *device = zeros<int>(4 * (size_t)N + 1);
    for (int i = 0; i < 2; i++) check(cudaMallocHost((void**)&host[i], (4 * (size_t)N + 1) * sizeof(int)));
    Batch next = batch_at(host[0], N), batch = batch_at(device, N);
    size_t used = next_batch(&next, data, tokens, 0, B, &m);
    double begin = 0, end = 0;
    for (int step = 0; step < steps; step++) {
        Range range("step");
        double loss;
        check(cudaMemcpyAsync(device, next.tokens, used * sizeof(int), cudaMemcpyHostToDevice, 0));
        batch.distinct = next.distinct;
        forward(&m, batch.tokens, B, m.T);
        cross_entropy(m.loss, m.losses, m.logits, batch.targets, N, m.V, m.Vp);
        backward(&m, batch, B, m.T);
        adamw(step + 1, learning_rate(step, steps));
        next = batch_at(host[(step + 1) % 2], N);
        used = next_batch(&next, data, tokens, step + 1, B, &m);
        check(cudaMemcpy(&loss, m.loss, sizeof loss, cudaMemcpyDeviceToHost));  // waits for the step
        double before = end;
        end = seconds();
        if (step == 4 || step == 0) begin = end;  // the first steps choose algorithms and load kernels
        printf("step %d/%d | loss %.8f", step + 1, steps, loss);
        if (step > 0) printf(" | %.2f ms", 1e3 * (end - before));
        putchar('\n');
    }
    int timed = steps > 5 ? steps - 5 : steps - 1;
    if (timed) printf("%.0f tokens/s in the last %d steps\n", N * (double)timed / (end - begin), timed);
    sample(&m, vocab, device);
    return 0;
}
