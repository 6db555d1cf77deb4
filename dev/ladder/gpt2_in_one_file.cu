/* GPT-2 in one file, on a GPU: tokens in, forward pass, loss, backward pass, AdamW, a sample out. It is the rung above
 * gpt2_in_one_file.c: the same model, and the same functions in the same order. What makes this one fast: matmuls on
 * tensor cores in bf16, with biases and GELU applied before the result is written; attention that never writes its
 * probabilities to memory; all else is limited by memory, so ops that read the same values are one kernel.
 *
 * 20 steps in batches of 64 sequences, from a model that ./train_gpt2cu wrote to out/start; 6e-4: the learning rate:
 *     nvcc -std=c++17 -O3 -arch=sm_90 dev/ladder/gpt2_in_one_file.cu -o build/gpt2cu -lcublasLt
 *     build/gpt2cu 20 out/start 64 data/builtin/train.bin 6e-4
 *
 * B sequences of T tokens each are N = B * T rows. V vocabulary size, Vp: padded to a multiple of 128, L layers, NH
 * heads of HS = 64 channels, C = NH * HS. A row of N and then a channel: element (n, c) of a tensor [N, C] is
 * v[n * C + c]. floatX: the type of weights and activations; -DPRECISION_FP32 makes it float, for comparisons. */
#include <chrono>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <float.h>
#include <math.h>
#include <nvtx3/nvToolsExt.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WARMUP = 10, SAMPLE_TOKENS = 63 };  // warm-up: the first tenth of the steps
static const double FINAL_LR = 0.05, BETA1 = 0.9, BETA2 = 0.95, EPS = 1e-8;
static const double WEIGHT_DECAY = 0.1, MAX_NORM = 1.0, NORM_EPS = 1e-5, PI = 3.14159265358979;

static void die(const char* message, const char* what) {
    fprintf(stderr, "error: %s %s\n", message, what);
    exit(1);
}

static void check(cudaError_t error) {
    if (error != cudaSuccess) die("CUDA:", cudaGetErrorString(error));
}

static void check(cublasStatus_t status) {
    if (status != CUBLAS_STATUS_SUCCESS) die("cuBLASLt:", cublasLtGetStatusString(status));
}

// A range in the timeline of Nsight Systems, until the end of the function that has it.
struct Range {
    explicit Range(const char* name) { nvtxRangePushA(name); }
    ~Range() { nvtxRangePop(); }
};

// ---- What all kernels use. A thread reads and writes 16 bytes at a time: W elements.
static const float LOG2_E = 1.44269504f;
__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
#ifdef PRECISION_FP32
typedef float floatX;
enum { FLOATX = CUDA_R_32F, W = 4 };
__host__ __device__ inline floatX rounded(float x) { return x; }
#else
typedef __nv_bfloat16 floatX;
enum { FLOATX = CUDA_R_16BF, W = 8 };
__host__ __device__ inline floatX rounded(float x) { return __float2bfloat16_rn(x); }
#endif

__device__ inline void load(float (&f)[W], const floatX* p) {
    int4 bits = *(const int4*)p;
    for (int i = 0; i < W; i++) f[i] = to_float(((const floatX*)&bits)[i]);
}

__device__ inline void store(floatX* p, const float (&f)[W]) {
    int4 bits;
    for (int i = 0; i < W; i++) ((floatX*)&bits)[i] = rounded(f[i]);
    *(int4*)p = bits;
}

// Over the lanes of a warp whose numbers differ in the bits from `first` to below `lanes`; all of them get the result.
template <typename T> __device__ inline T sum_lanes(T x, int first, int lanes) {
    for (int i = first; i < lanes; i *= 2) x += __shfl_xor_sync(0xffffffff, x, i);
    return x;
}

__device__ inline float max_lanes(float x, int lanes) {  // likewise, from 1
    for (int i = 1; i < lanes; i *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, i));
    return x;
}

__device__ inline float ex2_approx(float x) {  // 2^x
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static unsigned blocks_for(size_t n, size_t of_block) { return (unsigned)((n + of_block - 1) / of_block); }

// ---- Tensors. Activations have values and the derivative of the loss with respect to each value. Derivatives of
// activations share a few buffers, because the backward pass needs each for a short time only: see new_model().
typedef struct {
    floatX *v, *d;
    float2* rows;  // two numbers for each row, which the backward function needs
} Tensor;

// A parameter is a part of arrays that hold all parameters.
typedef struct {
    floatX* v;
    float* d;
} Param;

typedef struct {
    Param w, b;  // weight and bias of a linear layer or a layernorm
} Layer;

enum { PIECE = 1024 };  // every parameter begins at a multiple of it, and zeros follow it
static struct Params {
    floatX* v;                          // master, rounded
    float *d, *master, *mean, *square;  // of AdamW: running means of the derivative and of its square
    char* decays;                       // [size / PIECE]
    size_t size, used;
} params;

template <typename T> static T* zeros(size_t n) {
    T* x;
    check(cudaMalloc((void**)&x, n * sizeof(T)));
    check(cudaMemset(x, 0, n * sizeof(T)));
    return x;
}

// ---- GELU, and sums of columns: the derivatives of biases, and of a layernorm's parameters
// y = x / 2 (1 + tanh(k (x + 0.044715 x^3))), k = sqrt(2 / pi): nearly x for large x, nearly 0 for negative x
static const float GELU_K = 0.79788456f;
__device__ inline float gelu_tanh(float x) {  // tanh(z) = 1 - 2 / (1 + e^(2 z))
    float z = GELU_K * (x + 0.044715f * x * x * x);
    return 1 - __fdividef(2, 1 + ex2_approx(2 * LOG2_E * z));
}

__device__ inline float gelu_derivative(float x) {
    float t = gelu_tanh(x);
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * GELU_K * (1 + 3 * 0.044715f * x * x);
}

// db [OC] = the sums of the columns of dy [N, OC]. With GELU, dy is first multiplied by the derivative at x, in place.
// With LAYERNORM also dw [OC] = the sums of dy u (layernorm below). A block takes 2 W columns, two threads a row.
enum { PLAIN, GELU, LAYERNORM };
template <int KIND>
__global__ void __launch_bounds__(1024)
    column_sums_kernel(float* db, float* dw, floatX* dy, const floatX* x, const float2* rows, int N, int OC) {
    __shared__ float of_warp[2][32][2 * W];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * 2 * W;
    float sum[W] = {}, sum_u[W] = {}, d[W], f[W];
#pragma unroll 4
    for (int n = threadIdx.x / 2; n < N; n += blockDim.x / 2) {
        size_t at = (size_t)n * OC + first + lane % 2 * W;
        load(d, dy + at);
        if (KIND != PLAIN) load(f, x + at);
        float2 row = KIND == LAYERNORM ? rows[n] : make_float2(0, 0);
        for (int i = 0; i < W; i++) {
            if (KIND == GELU) d[i] *= gelu_derivative(f[i]);
            if (KIND == LAYERNORM) sum_u[i] += d[i] * (f[i] - row.x) * row.y;
            sum[i] += d[i];
        }
        if (KIND == GELU) store(dy + at, d);
    }
    for (int i = 0; i < W; i++) {
        sum[i] = sum_lanes(sum[i], 2, 32);
        if (KIND == LAYERNORM) sum_u[i] = sum_lanes(sum_u[i], 2, 32);
        if (lane < 2) of_warp[0][warp][lane * W + i] = sum[i], of_warp[1][warp][lane * W + i] = sum_u[i];
    }
    __syncthreads();
    if (threadIdx.x >= 2 * W * (KIND == LAYERNORM ? 2 : 1)) return;
    int is_dw = threadIdx.x / (2 * W), c = threadIdx.x % (2 * W);
    float total = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++) total += of_warp[is_dw][w][c];
    (is_dw ? dw : db)[first + c] = total;
}

static int column_threads(int N) { return N < 512 ? (2 * N + 31) / 32 * 32 : 1024; }

// ---- The ops. A forward function reads values and writes y.v. Its backward function takes the same arguments, reads
// y.d, and sets the derivatives of what the forward function read; where it adds to them, it says so.

// A batch, sorted by next_batch(): rows order[first[i]] to order[first[i + 1] - 1] have one token. So the derivative of
// a row of wte is one sum in one order, and a run gives the same bits again.
typedef struct {
    int *tokens, *targets, *order, *first;
    int distinct;  // tokens
} Batch;

// The first batch.distinct blocks add the derivatives of a token's rows to dwte [V, C]. Each of the others sums those
// of a position's rows into dwpe [T, C].
static __global__ void embedding_backward_kernel(float* dwte, float* dwpe, const floatX* dy, Batch batch, int B, int T,
                                                 int C) {
    int is_token = (int)blockIdx.x < batch.distinct, position = blockIdx.x - batch.distinct;
    int begin = is_token ? batch.first[blockIdx.x] : 0, end = is_token ? batch.first[blockIdx.x + 1] : B;
    float* to = is_token ? dwte + (size_t)batch.tokens[batch.order[begin]] * C : dwpe + (size_t)position * C;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        float sum[W] = {}, d[W];
#pragma unroll 8
        for (int i = begin; i < end; i++) {
            load(d, dy + (size_t)(is_token ? batch.order[i] : i * T + position) * C + c);
            for (int j = 0; j < W; j++) sum[j] += d[j];
        }
        for (int j = 0; j < W; j++) to[c + j] = is_token ? to[c + j] + sum[j] : sum[j];
    }
}

// Adds to wte.d, because the head has set it: both use the same matrix.
static void embedding_backward(Tensor y, Batch batch, Param wte, Param wpe, int N, int T, int C) {
    Range range(__func__);
    embedding_backward_kernel<<<batch.distinct + T, 128>>>(wte.d, wpe.d, y.d, batch, N / T, T, C);
}

// Matmuls: cuBLASLt's, column-major. To it, a row-major [R, C] array is a C x R matrix, so no operand is ever
// transposed in memory:
//     FORWARD           y  (OC x N)  = w^T x         w and x are stored as IC x OC and IC x N
//     BACKWARD_INPUT    dx (IC x N)  = w dy
//     BACKWARD_WEIGHT   dw (IC x OC) = x dy^T        in fp32
enum { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, PLANS = 64, WORKSPACE = 64 << 20 };

// What a matmul of a kind and size needs: made on first use.
typedef struct {
    int kind, N, IC, OC, epilogue, works;  // works: 0 if cuBLASLt does not have this epilogue for this size
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
} Plan;

static cublasLtHandle_t cublaslt;
template <typename T> static void set_attribute(Plan* p, cublasLtMatmulDescAttributes_t name, T value) {
    check(cublasLtMatmulDescSetAttribute(p->operation, name, &value, sizeof value));
}

static void make_plan(Plan* p) {
    int is_forward = p->kind == FORWARD, is_weight = p->kind == BACKWARD_WEIGHT, n = 0;
    int rows = is_forward ? p->OC : p->IC, inner = is_forward ? p->IC : p->OC;  // of the result, of b
    cudaDataType_t type = (cudaDataType_t)FLOATX;
    cublasLtMatmulPreference_t wish;
    cublasLtMatmulHeuristicResult_t best;
    uint64_t bytes = WORKSPACE;
    uint32_t sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;  // partial sums in fp32
    check(cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set_attribute(p, CUBLASLT_MATMUL_DESC_TRANSA, is_forward ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_attribute(p, CUBLASLT_MATMUL_DESC_TRANSB, is_weight ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_attribute(p, CUBLASLT_MATMUL_DESC_EPILOGUE, p->epilogue);
    if (p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS)
        set_attribute(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)rows);
    check(cublasLtMatrixLayoutCreate(&p->a, type, p->IC, is_weight ? p->N : p->OC, p->IC));
    check(cublasLtMatrixLayoutCreate(&p->b, type, inner, p->N, inner));
    check(cublasLtMatrixLayoutCreate(&p->d, is_weight ? CUDA_R_32F : type, rows, is_weight ? p->OC : p->N, rows));
    check(cublasLtMatmulPreferenceCreate(&wish));
    check(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes));
    check(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums));
    auto status = cublasLtMatmulAlgoGetHeuristic(cublaslt, p->operation, p->a, p->b, p->d, p->d, wish, 1, &best, &n);
    p->works = status == CUBLAS_STATUS_SUCCESS && n > 0 && best.state == CUBLAS_STATUS_SUCCESS;
    p->algorithm = best.algo;
    check(cublasLtMatmulPreferenceDestroy(wish));
}

// `pre`: of GELU's epilogue, its input. If cuBLASLt does not have that epilogue, returns 0 and does nothing.
static int matmul(void* d, const floatX* a, const floatX* b, const floatX* bias, floatX* pre, Plan of) {
    static Plan plans[PLANS];
    static void* workspace = zeros<char>(WORKSPACE);
    const float one = 1, zero = 0;
    Plan* p = plans;
    while (p < plans + PLANS && p->operation && memcmp(p, &of, 5 * sizeof(int))) p++;
    if (p == plans + PLANS) die("too many sizes of", "matmuls");
    if (!p->operation) *p = of, make_plan(p);
    if (!p->works && pre) return 0;
    if (!p->works) die("cuBLASLt has no algorithm for", "a matmul");
    if (bias) set_attribute(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (pre) set_attribute(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, pre);
    check(cublasLtMatmul(cublaslt, p->operation, &one, a, p->a, b, p->b, &zero, d, p->d, d, p->d, &p->algorithm,
                         workspace, WORKSPACE, 0));
    return 1;
}

// y[n, o] = b[o] + sum over i of x[n, i] w[o, i]. The head has no b.
static void linear_forward(Tensor y, Tensor x, Layer p, int N, int IC, int OC) {
    Range range(__func__);
    int epilogue = p.b.v ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    matmul(y.v, p.w.v, x.v, p.b.v, NULL, {FORWARD, N, IC, OC, epilogue});
}

static void linear_backward(Tensor y, Tensor x, Layer p, int N, int IC, int OC) {
    Range range(__func__);
    matmul(p.w.d, x.v, y.d, NULL, NULL, {BACKWARD_WEIGHT, N, IC, OC, CUBLASLT_EPILOGUE_DEFAULT});
    if (p.b.d) column_sums_kernel<PLAIN><<<OC / (2 * W), column_threads(N)>>>(p.b.d, NULL, y.d, NULL, NULL, N, OC);
    matmul(x.d, p.w.v, y.d, NULL, NULL, {BACKWARD_INPUT, N, IC, OC, CUBLASLT_EPILOGUE_DEFAULT});
}

// Row n of the residual connection: row n of `before` + row n of `branch`. With tokens, those of the embeddings: row
// tokens[n] of wte + row n % T of wpe.
typedef struct {
    const floatX *before, *branch;
    const int* tokens;
    int T;
} Addends;

// x = the sum of its addends; y = u w + b, where u = (x - mean) rstd. A warp takes a row.
enum { ROW_WARPS = 4 };
static __global__ void layernorm_forward_kernel(Tensor y, Tensor x, Addends of, Layer p, int N, int C) {
    extern __shared__ int4 kept_rows[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = blockIdx.x * ROW_WARPS + warp;
    floatX* row = (floatX*)kept_rows + warp * C;  // a thread reads only what it has written itself
    float sum = 0, square = 0, f[W], more[W], weight[W], bias[W];
    if (n >= N) return;
    of.before += (size_t)(of.tokens ? of.tokens[n] : n) * C, of.branch += (size_t)(of.tokens ? n % of.T : n) * C;
    for (int c = lane * W; c < C; c += 32 * W) {
        load(f, of.before + c), load(more, of.branch + c);
        for (int i = 0; i < W; i++) f[i] = to_float(rounded(f[i] + more[i])), sum += f[i];
        store(x.v + (size_t)n * C + c, f), store(row + c, f);
    }
    float mean = sum_lanes(sum, 1, 32) / C;
    for (int c = lane * W; c < C; c += 32 * W) {
        load(f, row + c);
        for (int i = 0; i < W; i++) square += (f[i] - mean) * (f[i] - mean);
    }
    float rstd = rsqrtf(sum_lanes(square, 1, 32) / C + (float)NORM_EPS);
    if (lane == 0) y.rows[n] = make_float2(mean, rstd);
    for (int c = lane * W; c < C; c += 32 * W) {
        load(f, row + c), load(weight, p.w.v + c), load(bias, p.b.v + c);
        for (int i = 0; i < W; i++) f[i] = (f[i] - mean) * rstd * weight[i] + bias[i];
        store(y.v + (size_t)n * C + c, f);
    }
}

static void residual_layernorm_forward(Tensor y, Tensor x, Addends of, Layer p, int N, int C) {
    Range range(__func__);
    size_t bytes = ROW_WARPS * C * sizeof(floatX);
    layernorm_forward_kernel<<<blocks_for(N, ROW_WARPS), ROW_WARPS * 32, bytes>>>(y, x, of, p, N, C);
}

// With e = dy w, the derivative in u: dx += rstd (e - average(e) - u average(e u)). The averages are there because
// every x of the row moves its mean and its standard deviation. A warp takes a row, which it reads twice.
static __global__ void layernorm_backward_kernel(Tensor y, Tensor x, Layer p, int N, int C) {
    int lane = threadIdx.x % 32, n = blockIdx.x * ROW_WARPS + threadIdx.x / 32;
    float e_sum = 0, eu_sum = 0, d[W], f[W], weight[W], before[W];
    if (n >= N) return;
    float2 row = y.rows[n];
    y.d += (size_t)n * C, x.v += (size_t)n * C, x.d += (size_t)n * C;
    for (int c = lane * W; c < C; c += 32 * W) {
        load(d, y.d + c), load(f, x.v + c), load(weight, p.w.v + c);
        for (int i = 0; i < W; i++) {
            e_sum += d[i] * weight[i];
            eu_sum += d[i] * weight[i] * (f[i] - row.x) * row.y;
        }
    }
    e_sum = sum_lanes(e_sum, 1, 32) / C, eu_sum = sum_lanes(eu_sum, 1, 32) / C;
    for (int c = lane * W; c < C; c += 32 * W) {
        load(d, y.d + c), load(f, x.v + c), load(weight, p.w.v + c), load(before, x.d + c);
        for (int i = 0; i < W; i++) before[i] += row.y * (d[i] * weight[i] - e_sum - (f[i] - row.x) * row.y * eu_sum);
        store(x.d + c, before);
    }
}

// Adds to x.d, which is also the derivative of what x is the sum of.
static void layernorm_backward(Tensor y, Tensor x, Layer p, int N, int C) {
    Range range(__func__);
    column_sums_kernel<LAYERNORM><<<C / (2 * W), column_threads(N)>>>(p.b.d, p.w.d, y.d, x.v, y.rows, N, C);
    layernorm_backward_kernel<<<blocks_for(N, ROW_WARPS), ROW_WARPS * 32>>>(y, x, p, N, C);
}

// ---- Attention. A row of qkv [N, 3C] holds queries, keys and values; C channels are NH heads of HS. A query sees the
// keys at its own and earlier positions: p = softmax(q . k / sqrt(HS)), and y is the mean of the values, weighted by p.
// p would be [B, NH, T, T]. So a block takes OWN rows of one head of one sequence, and goes over the rows of the other
// side in tiles of TILE rows. Their products and p stay in registers.
//
// A tile lies in shared memory, rows of HS channels. Piece i of 16 bytes of row r is at i ^ (r % 8), so that the same
// piece of eight rows is in different banks. The next tiles are copied while these are used.
enum { HS = 64, ATTENTION_THREADS = 128, TILE = 64, ROWS = sizeof(floatX) == 2 ? 2 : 1 };
enum { OWN = ATTENTION_THREADS / 2 * ROWS };  // a warp owns ROWS blocks of 16 rows

static const float SCALE = LOG2_E / 8;  // 1 / sqrt(HS), with log2(e): the softmax takes powers of 2

// The part of a tensor [B, T, parts, NH, HS] and of its rows [B, NH, T] that a thread block works on. Grid: (blocks of
// OWN rows, heads, sequences).
__device__ inline Tensor of_block(Tensor x, int parts, int T, int NH) {
    size_t at = ((size_t)blockIdx.z * T * parts * NH + blockIdx.y) * HS;
    return {x.v + at, x.d + at, x.rows + ((size_t)blockIdx.z * NH + blockIdx.y) * T};
}

__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ inline int tile_at(int row, int piece) { return row * HS + (piece ^ (row & 7)) * W; }

// Start to copy 16 bytes, or zeros, to shared memory.
__device__ inline void cp_async_cg_16(uint32_t shared, const void* global, int exists) {
    int bytes = exists ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ inline void cp_async_wait_all(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Start to copy COUNT rows from `first` on, `stride` elements apart. Rows from T on become zeros.
template <int COUNT> __device__ inline void tile_load(floatX* tile, const floatX* x, int stride, int first, int T) {
    const int PIECES = HS / W, AT_ONCE = ATTENTION_THREADS / PIECES;  // a multiple of 8: the pieces' order is the same
    int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    uint32_t to = shared_address(tile + tile_at(row, piece));
    x += (size_t)(first + row) * stride + piece * W;
    for (int i = 0; i < COUNT; i += AT_ONCE)
        cp_async_cg_16(to + i * HS * (int)sizeof(floatX), x + (size_t)i * stride, first + row + i < T);
}

// Products of a warp. Its lane 4 g + t holds, of every 16 x 8 block of a result c, row g: c[0], c[1] at columns 2 t and
// 2 t + 1, and row g + 8: c[2], c[3]. That is what tensor cores do.
//     product_nt    c [16 ROWS, 8 J] += a b^T: rows of a tile from a_row on, and of another from b_row on
//     product_nn    c [16 ROWS, HS] += p b: p [16 ROWS, 8 J] is such a result, b a tile's rows from b_row on
#ifdef PRECISION_FP32
__device__ inline float element(const float* tile, int row, int c) { return tile[tile_at(row, c / W) + c % W]; }

template <int J>
__device__ inline void product_nt(float (&c)[ROWS][J][4], const float* a, int a_row, const float* b, int b_row) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
    for (int k = 0; k < HS; k++)
        for (int n = 0; n < J; n++)
            for (int i = 0; i < 4; i++)
                c[0][n][i] += element(a, a_row + i / 2 * 8 + g, k) * element(b, b_row + 8 * n + 2 * t + i % 2, k);
}

// The other elements of a row of p are in the neighbouring lanes.
template <int J>
__device__ inline void product_nn(float (&c)[ROWS][HS / 8][4], const float (&p)[ROWS][J][4], const float* b,
                                  int b_row) {
    int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll 1
    for (int other = 0; other < 4; other++)
#pragma unroll
        for (int j = 0; j < J; j++)
            for (int i = 0; i < 4; i++) {
                float x = __shfl_sync(0xffffffff, p[0][j][i], (lane & 28) + other);
                int row = b_row + 8 * j + 2 * other + i % 2;
                for (int n = 0; n < HS / 8; n++)
                    for (int e = 0; e < 2; e++) c[0][n][i / 2 * 2 + e] += x * element(b, row, 8 * n + 2 * t + e);
            }
}

__device__ inline void store_pair(float* p, float a, float b) { *(float2*)p = make_float2(a, b); }
#else
// mma.sync.m16n8k16: c [16, 8] += a [16, 16] b [16, 8]
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ldmatrix.x4: four 8 x 8 blocks. Eight lanes each give the addresses of a block's rows. Lane 4 g + t gets elements 2 t
// and 2 t + 1 of row g of each; with .trans, of column g.
__device__ inline void ldmatrix_x4(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}

__device__ inline void store_pair(floatX* p, float a, float b) { *(__nv_bfloat162*)p = __floats2bfloat162_rn(a, b); }

// The next 16 channels are two pieces further: as exclusive or, because of the pieces' order.
template <int J>
__device__ inline void product_nt(float (&c)[ROWS][J][4], const floatX* a, int a_row, const floatX* b, int b_row) {
    int lane = threadIdx.x % 32, ROW = HS * sizeof(floatX);
    uint32_t at_a = shared_address(a + tile_at(a_row + (lane & 15), lane >> 4)), x[ROWS][4], y[4];
    uint32_t at_b = shared_address(b + tile_at(b_row + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1));
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        for (int m = 0; m < ROWS; m++) ldmatrix_x4(x[m], (at_a ^ k << 5) + 16 * m * ROW);
        for (int n = 0; n < J; n += 2) {
            ldmatrix_x4(y, (at_b ^ k << 5) + 8 * n * ROW);
            for (int m = 0; m < ROWS; m++)
                mma_m16n8k16(c[m][n], x[m], y[0], y[1]), mma_m16n8k16(c[m][n + 1], x[m], y[2], y[3]);
        }
    }
}

template <int J>
__device__ inline void product_nn(float (&c)[ROWS][HS / 8][4], const float (&p)[ROWS][J][4], const floatX* b,
                                  int b_row) {
    int lane = threadIdx.x % 32, ROW = HS * sizeof(floatX);
    uint32_t at_b = shared_address(b + tile_at(b_row + (lane & 15), lane >> 4)), x[ROWS][4], y[4];
#pragma unroll
    for (int k = 0; k < J / 2; k++) {
        for (int i = 0; i < 4 * ROWS; i++) {  // two neighbouring blocks of p are a left operand of 16 x 16
            const float* pair = &p[i / 4][2 * k + i % 4 / 2][i % 2 * 2];
            store_pair((floatX*)&x[i / 4][i % 4], pair[0], pair[1]);
        }
        for (int n = 0; n < HS / 8; n += 2) {
            ldmatrix_x4_trans(y, (at_b ^ n << 4) + 16 * k * ROW);
            for (int m = 0; m < ROWS; m++)
                mma_m16n8k16(c[m][n], x[m], y[0], y[1]), mma_m16n8k16(c[m][n + 1], x[m], y[2], y[3]);
        }
    }
}
#endif

// Write a warp's result times `scale` to rows `row` and following; the first T exist.
__device__ inline void put_rows(floatX* x, int stride, int row, int T, const float (&c)[ROWS][HS / 8][4], float scale) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int r = 0; r < 2 * ROWS; r++)
        for (int n = 0; n < HS / 8 && row + 8 * r + g < T; n++) {
            const float* pair = &c[r / 2][n][r % 2 * 2];
            store_pair(x + (size_t)(row + 8 * r + g) * stride + 8 * n + 2 * t, scale * pair[0], scale * pair[1]);
        }
}

// Start to load a step's rows of two arrays into one of two pairs of tiles.
__device__ inline void load_pair(floatX* tiles, const floatX* x, int x_stride, const floatX* y, int y_stride, int step,
                                 int T) {
    tiles += step % 2 * 2 * TILE * HS;
    tile_load<TILE>(tiles, x, x_stride, step * TILE, T);
    tile_load<TILE>(tiles + TILE * HS, y, y_stride, step * TILE, T);
}

// y, and rows.x = log2 of the sum of 2^score, so that p = 2^(score - rows.x). The softmax goes along with the tiles:
// when a row's largest score so far grows, its sum and y so far are scaled down. The last queries come first, because
// they see the most keys.
static __global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_forward_kernel(Tensor all_y, Tensor all_qkv, int T, int NH) {
    extern __shared__ __align__(1024) unsigned char tiles[];
    floatX *q_tile = (floatX*)tiles, *kv_tiles = q_tile + OWN * HS;
    Tensor out = of_block(all_y, 1, T, NH), qkv = of_block(all_qkv, 3, T, NH);
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, own = threadIdx.x / 32 * 16 * ROWS, C = NH * HS;
    int q0 = OWN * (int)(gridDim.x - 1 - blockIdx.x), query = q0 + own, steps = (min(T, q0 + OWN) + TILE - 1) / TILE;
    float y[ROWS][HS / 8][4] = {}, largest[2 * ROWS], sum[2 * ROWS] = {};
    for (int r = 0; r < 2 * ROWS; r++) largest[r] = -FLT_MAX;
    tile_load<OWN>(q_tile, qkv.v, 3 * C, q0, T);
    load_pair(kv_tiles, qkv.v + C, 3 * C, qkv.v + 2 * C, 3 * C, 0, T);
    for (int step = 0; step < steps; step++) {
        const floatX *k_tile = kv_tiles + step % 2 * 2 * TILE * HS, *v_tile = k_tile + TILE * HS;
        cp_async_wait_all();
        __syncthreads();  // this step's tiles are there, and the other two are no longer read
        if (step + 1 < steps) load_pair(kv_tiles, qkv.v + C, 3 * C, qkv.v + 2 * C, 3 * C, step + 1, T);
        if (step * TILE > query + 16 * ROWS - 1) continue;  // keys after all queries of this warp
        float s[ROWS][TILE / 8][4] = {};
        product_nt(s, q_tile, own, k_tile, 0);
#pragma unroll
        for (int r = 0; r < 2 * ROWS; r++) {  // row 8 r + g: s[m][n][i] and the next
            int m = r / 2, i = r % 2 * 2, last = query + 8 * r + g - step * TILE - 2 * t;  // that it sees
            float before = largest[r], more = before, tile_sum = 0;
            for (int n = 0; n < TILE / 8; n++) {
                if (8 * n > last) s[m][n][i] = -INFINITY;
                if (8 * n + 1 > last) s[m][n][i + 1] = -INFINITY;
                more = fmaxf(more, fmaxf(s[m][n][i], s[m][n][i + 1]));
            }
            largest[r] = more = max_lanes(more, 4);
            for (int n = 0; n < TILE / 8; n++) {
                s[m][n][i] = ex2_approx(fmaf(s[m][n][i], SCALE, -more * SCALE));
                s[m][n][i + 1] = ex2_approx(fmaf(s[m][n][i + 1], SCALE, -more * SCALE));
                tile_sum += s[m][n][i] + s[m][n][i + 1];
            }
            float less = ex2_approx((before - more) * SCALE);
            sum[r] = sum[r] * less + tile_sum;
            for (int n = 0; n < HS / 8; n++) y[m][n][i] *= less, y[m][n][i + 1] *= less;
        }
        product_nn(y, s, v_tile, 0);
    }
#pragma unroll
    for (int r = 0; r < 2 * ROWS; r++) {
        float total = sum_lanes(sum[r], 1, 4);
        int m = r / 2, i = r % 2 * 2, row = query + 8 * r + g;
        for (int n = 0; n < HS / 8; n++) y[m][n][i] /= total, y[m][n][i + 1] /= total;
        if (t == 0 && row < T) out.rows[row].x = largest[r] * SCALE + log2f(total);
    }
    put_rows(out.v, C, query, T, y, 1);
}

// dq, and rows.y = the sum of p dp over the keys, which is dy . y: a block owns rows of q and dy, and goes over those
// of k and v that they see. Or dk and dv: a block owns rows of k and v, and goes over those of q and dy that see them.
// A row of p is a key then, so that p and ds are left operands as they are. A query past the end is zeros: p is 1, but
// what it multiplies is 0.
template <int IS_KEY>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_backward_kernel(Tensor all_y, Tensor all_qkv, int T, int NH) {
    const int CHUNK = IS_KEY ? 16 : 32;  // columns of products at a time, because registers are scarce
    extern __shared__ __align__(1024) unsigned char shared[];
    floatX *own_tiles = (floatX*)shared, *tiles = own_tiles + 2 * OWN * HS;
    float2* row_tiles = (float2*)(tiles + 4 * TILE * HS);
    Tensor out = of_block(all_y, 1, T, NH), qkv = of_block(all_qkv, 3, T, NH);
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, own = threadIdx.x / 32 * 16 * ROWS, C = NH * HS;
    int first = OWN * (int)(IS_KEY ? blockIdx.x : gridDim.x - 1 - blockIdx.x), row = first + own;
    int step = IS_KEY ? first / TILE : 0, end = ((IS_KEY ? T : min(T, first + OWN)) + TILE - 1) / TILE;
    auto load_step = [&](int step) {
        int at = step * TILE + (int)threadIdx.x;
        if (IS_KEY) load_pair(tiles, qkv.v, 3 * C, out.d, C, step, T);
        else load_pair(tiles, qkv.v + C, 3 * C, qkv.v + 2 * C, 3 * C, step, T);
        if (IS_KEY && threadIdx.x < TILE) row_tiles[at % (2 * TILE)] = at < T ? out.rows[at] : make_float2(0, 0);
    };
    tile_load<OWN>(own_tiles, IS_KEY ? qkv.v + C : qkv.v, 3 * C, first, T);
    tile_load<OWN>(own_tiles + OWN * HS, IS_KEY ? qkv.v + 2 * C : out.d, IS_KEY ? 3 * C : C, first, T);
    load_step(step);
    float2 numbers[2 * ROWS];  // of this lane's rows, if they are queries: during these copies
    for (int i = 0; i < 2 * ROWS && !IS_KEY; i++) {
        int r = row + 8 * i + g;
        float dot = 0, x[W], y[W];
        for (int c = r * C + t * W; c < r * C + HS && r < T; c += 4 * W) {
            load(x, out.d + c), load(y, out.v + c);
            for (int j = 0; j < W; j++) dot += x[j] * y[j];
        }
        numbers[i] = make_float2(r < T ? out.rows[r].x : 0, sum_lanes(dot, 1, 4));
        if (t == 0 && r < T) out.rows[r].y = numbers[i].y;
    }
    float sum[ROWS][HS / 8][4] = {}, dv[ROWS][HS / 8][4] = {};
    for (; step < end; step++) {
        const floatX *x_tile = tiles + step % 2 * 2 * TILE * HS, *y_tile = x_tile + TILE * HS;
        cp_async_wait_all();
        __syncthreads();
        if (step + 1 < end) load_step(step + 1);
#pragma unroll
        for (int chunk = 0; chunk < TILE; chunk += CHUNK) {
            int column = step * TILE + chunk;
            if (IS_KEY ? column + CHUNK - 1 < row : column > row + 16 * ROWS - 1) continue;  // none sees another
            float p[ROWS][CHUNK / 8][4] = {}, ds[ROWS][CHUNK / 8][4] = {};
            product_nt(p, own_tiles, own, x_tile, chunk);
            product_nt(ds, own_tiles + OWN * HS, own, y_tile, chunk);  // dp so far
            for (int m = 0; m < ROWS; m++)
                for (int n = 0; n < CHUNK / 8; n++)
                    for (int i = 0; i < 4; i++) {
                        int r = row + 16 * m + 8 * (i / 2) + g, c = column + 8 * n + 2 * t + i % 2;
                        float2 of_query = IS_KEY ? row_tiles[c % (2 * TILE)] : numbers[2 * m + i / 2];
                        p[m][n][i] = ex2_approx(fmaf(p[m][n][i], SCALE, -of_query.x));
                        if (IS_KEY ? r > c : c > r) p[m][n][i] = 0;
                        ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - of_query.y);
                    }
            if (IS_KEY) product_nn(dv, p, y_tile, chunk);
            product_nn(sum, ds, x_tile, chunk);
        }
    }
    put_rows(qkv.d + (IS_KEY ? C : 0), 3 * C, row, T, sum, SCALE / LOG2_E);
    if (IS_KEY) put_rows(qkv.d + 2 * C, 3 * C, row, T, dv, 1);
}

// Through the softmax, the score gets ds = p (dp - sum of p dp): probabilities add up to 1,
// so what one gains the others lose. The backward pass is two kernels, so that no sum crosses blocks.
enum { FORWARD_TILES = (OWN + 4 * TILE) * HS * sizeof(floatX) };  // bytes of shared memory
enum { BACKWARD_TILES = (2 * OWN + 4 * TILE) * HS * sizeof(floatX) + 2 * TILE * sizeof(float2) };

static void attention_forward(Tensor y, Tensor qkv, int B, int T, int NH) {
    Range range(__func__);
    attention_forward_kernel<<<dim3(blocks_for(T, OWN), NH, B), ATTENTION_THREADS, FORWARD_TILES>>>(y, qkv, T, NH);
}

static void attention_backward(Tensor y, Tensor qkv, int B, int T, int NH) {
    Range range(__func__);
    dim3 grid(blocks_for(T, OWN), NH, B);
    attention_backward_kernel<0><<<grid, ATTENTION_THREADS, BACKWARD_TILES>>>(y, qkv, T, NH);
    attention_backward_kernel<1><<<grid, ATTENTION_THREADS, BACKWARD_TILES>>>(y, qkv, T, NH);
}

static __global__ void gelu_forward_kernel(floatX* y, const floatX* x, size_t n) {
    size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    float f[W];
    if (at >= n) return;
    load(f, x + at);
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

// x.d and y.d are the same memory. It also sums b.d, for which linear_backward() would read x.d again.
static void gelu_backward(Tensor y, Tensor x, Param b, int N, int OC) {
    Range range(__func__);
    column_sums_kernel<GELU><<<OC / (2 * W), column_threads(N)>>>(b.d, NULL, y.d, x.v, NULL, N, OC);
}

// losses[n] = -log(probability of the target). Its derivative in the logits is p - (1 at the target), times factor,
// which takes their place. A block takes a row [Vp]. A thread has the largest logit that it has read, and the sum of
// the exponentials relative to it. Columns from V on are padding: their derivative is 0.
static __global__ void __launch_bounds__(1024, 2)
    cross_entropy_kernel(floatX* logits, float* losses, const int* targets, int V, int Vp, float factor) {
    __shared__ float2 of_warp[32];
    floatX* x = logits + (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x], lane = threadIdx.x % 32;
    float at_target = to_float(x[target]), largest = -FLT_MAX, sum = 0, f[W];
    for (int v = threadIdx.x * W; v < V; v += blockDim.x * W) {
        load(f, x + v);
        float before = largest;
        for (int i = 0; i < W; i++) largest = fmaxf(largest, v + i < V ? f[i] : -FLT_MAX);
        sum *= ex2_approx((before - largest) * LOG2_E);
        for (int i = 0; i < W; i++) sum += v + i < V ? ex2_approx((f[i] - largest) * LOG2_E) : 0;
    }
    float warp_largest = max_lanes(largest, 32);
    sum = sum_lanes(sum * ex2_approx((largest - warp_largest) * LOG2_E), 1, 32);
    if (lane == 0) of_warp[threadIdx.x / 32] = make_float2(warp_largest, sum);
    __syncthreads();
    float2 other = lane < (int)blockDim.x / 32 ? of_warp[lane] : make_float2(-FLT_MAX, 0);
    largest = max_lanes(other.x, 32);
    sum = sum_lanes(other.y * ex2_approx((other.x - largest) * LOG2_E), 1, 32);
    float inverse = 1 / sum;
    for (int v = threadIdx.x * W; v < Vp; v += blockDim.x * W) {
        load(f, x + v);
        for (int i = 0; i < W; i++) {
            float p = v + i < V ? ex2_approx((f[i] - largest) * LOG2_E) * inverse : 0;
            f[i] = factor * (p - (v + i == target));
        }
        store(x + v, f);
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = largest + logf(sum) - at_target;
}

static void cross_entropy(float* losses, Tensor logits, const int* targets, int N, int V, int Vp) {
    Range range(__func__);
    int threads = Vp < 1024 * W ? (Vp / W + 31) / 32 * 32 : 1024;
    cross_entropy_kernel<<<N, threads>>>(logits.v, losses, targets, V, Vp, 1.0f / N);
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
    Block* block;  // [L + 1]; the last has no more than ln1 and to_ln1, which are lnf and to_lnf
} Model;

// A block's last op is the layernorm that the next one begins with, because it is fused with the residual connection.
static void forward(Model* m, const int* tokens, int B, int T) {
    Range range(__func__);
    int N = B * T, C = m->C;
    Tensor x = m->embedded;  // the residual stream
    residual_layernorm_forward(m->block[0].ln1, x, {m->wte.v, m->wpe.v, tokens, T}, m->block[0].to_ln1, N, C);
    for (int l = 0; l < m->L; l++) {
        Block* k = &m->block[l];
        linear_forward(k->qkv, k->ln1, k->to_qkv, N, C, 3 * C);
        attention_forward(k->att, k->qkv, B, T, m->NH);
        linear_forward(k->proj, k->att, k->to_proj, N, C, C);
        residual_layernorm_forward(k->ln2, k->mid, {x.v, k->proj.v, NULL, 0}, k->to_ln2, N, C);
        linear_gelu_forward(k->gelu, k->fc, k->ln2, k->to_fc, N, C, 4 * C);
        linear_forward(k->fcproj, k->gelu, k->to_fcproj, N, 4 * C, C);
        residual_layernorm_forward(k[1].ln1, k->out, {k->mid.v, k->fcproj.v, NULL, 0}, k[1].to_ln1, N, C);
        x = k->out;
    }
    linear_forward(m->logits, m->lnf, m->to_logits, N, C, m->Vp);
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
        linear_backward(k->fcproj, k->gelu, k->to_fcproj, N, 4 * C, C);
        gelu_backward(k->gelu, k->fc, k->to_fc.b, N, 4 * C);
        linear_backward(k->fc, k->ln2, {k->to_fc.w, {}}, N, C, 4 * C);
        layernorm_backward(k->ln2, k->mid, k->to_ln2, N, C);
        linear_backward(k->proj, k->att, k->to_proj, N, C, C);
        attention_backward(k->att, k->qkv, B, T, m->NH);
        linear_backward(k->qkv, k->ln1, k->to_qkv, N, C, 3 * C);
        layernorm_backward(k->ln1, l ? m->block[l - 1].out : m->embedded, k->to_ln1, N, C);
    }
    embedding_backward(m->embedded, batch, m->wte, m->wpe, N, T, C);
}

// AdamW, update number `update` from 1. If the norm of all gradients is above MAX_NORM, they are scaled down to it.
enum { NORM_BLOCKS = 512, NORM_WARPS = 8 };
static __global__ void squares_kernel(double* sums, const float* d, size_t n) {
    double sum = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n / 4; i += (size_t)gridDim.x * blockDim.x) {
        float4 x = ((const float4*)d)[i];
        sum += (double)x.x * x.x + (double)x.y * x.y + (double)x.z * x.z + (double)x.w * x.w;
    }
    sum = sum_lanes(sum, 1, 32);
    if (threadIdx.x % 32 == 0) sums[blockIdx.x * NORM_WARPS + threadIdx.x / 32] = sum;
}

static __global__ void clip_kernel(float* clip, const double* sums) {  // one warp: the factor on the gradients
    double sum = 0;
#pragma unroll 16
    for (int i = threadIdx.x; i < NORM_BLOCKS * NORM_WARPS; i += 32) sum += sums[i];
    double norm = sqrt(sum_lanes(sum, 1, 32));
    if (threadIdx.x == 0) *clip = norm > MAX_NORM ? (float)(MAX_NORM / norm) : 1;
}

// A block takes a piece of the parameters, a thread four of its elements. step: rate / (1 - beta1^update); root: 1 /
// sqrt(1 - beta2^update); decay: of the tensors that decay, rate * WEIGHT_DECAY.
static __global__ void adamw_kernel(Params all, const float* clip, float step, float root, float decay) {
    size_t at = (size_t)blockIdx.x * (PIECE / 4) + threadIdx.x;
    float4 g = ((float4*)all.d)[at], p = ((float4*)all.master)[at];
    float4 m = ((float4*)all.mean)[at], s = ((float4*)all.square)[at];
    float kept = all.decays[blockIdx.x] ? 1 - decay : 1, scale = *clip;
    for (int i = 0; i < 4; i++) {
        float x = scale * (&g.x)[i], *mi = &m.x + i, *si = &s.x + i, *pi = &p.x + i;
        *mi = (float)BETA1 * *mi + (float)(1 - BETA1) * x;
        *si = (float)BETA2 * *si + (float)(1 - BETA2) * x * x;
        *pi = *pi * kept - step * *mi / (root * sqrtf(*si) + (float)EPS);
    }
    store_pair(all.v + 4 * at, p.x, p.y), store_pair(all.v + 4 * at + 2, p.z, p.w);
    ((float4*)all.mean)[at] = m, ((float4*)all.square)[at] = s, ((float4*)all.master)[at] = p;
}

static void adamw(int update, double rate) {
    Range range(__func__);
    static double* sums = zeros<double>(NORM_BLOCKS * NORM_WARPS);
    static float* clip = zeros<float>(1);
    int pieces = (int)(params.used / PIECE), blocks = pieces < NORM_BLOCKS ? pieces : NORM_BLOCKS;
    squares_kernel<<<blocks, NORM_WARPS * 32>>>(sums, params.d, params.used);
    clip_kernel<<<1, 32>>>(clip, sums);
    float step = (float)(rate / (1 - pow(BETA1, update))), root = (float)(1 / sqrt(1 - pow(BETA2, update)));
    adamw_kernel<<<pieces, PIECE / 4>>>(params, clip, step, root, (float)(rate * WEIGHT_DECAY));
}

// Linear warm-up, then half a cosine down to FINAL_LR of the peak.
static double learning_rate(int step, int steps, double peak) {
    int warmup = steps / WARMUP;
    if (step < warmup) return peak * (step + 1) / warmup;
    double cosine = cos(PI * (step - warmup) / (steps - warmup));
    return peak * (FINAL_LR + (1 - FINAL_LR) * (1 + cosine) / 2);
}

// ---- Files: a Hugging Face directory with config.json and model.safetensors; token shards
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

static int config_number(const char* json, const char* key) {
    int number = 0;
    const char* at = strstr(json, key);
    if (!at || sscanf(at + strlen(key), "\": %d", &number) != 1) die("config.json lacks", key);
    return number;
}

// A parameter, from `weights`, the bytes of a model.safetensors. That file is the length of its header (8 bytes), the
// header, which is JSON, and the numbers. There, GPT-2's matrices named c_... are [in, out].
static Param new_param(const char* weights, const char* name, int OC, int IC) {
    size_t at = params.used, n = (size_t)OC * IC, size = (n + PIECE - 1) / PIECE * PIECE;
    unsigned long header, begin, end;
    memcpy(&header, weights, sizeof header);
    const char *found = strstr(weights + 8, name), *offsets = found ? strstr(found, "data_offsets\":[") : NULL;
    size_t bytes = offsets && sscanf(offsets + 15, "%lu,%lu", &begin, &end) == 2 ? (end - begin) / n : 0;
    if (bytes != 4 && bytes != 2) die("model.safetensors lacks, or has in another size,", name);
    float* x = (float*)calloc(n, sizeof(float));
    floatX* v = (floatX*)malloc(n * sizeof(floatX));
    int is_transposed = IC > 1 && strstr(name, "c_");
    for (size_t i = 0; i < n; i++) {  // 4 bytes: F32; 2: BF16, the upper half of a float
        const char* number = weights + 8 + header + begin + bytes * (is_transposed ? i % IC * OC + i / IC : i);
        memcpy((char*)(x + i + 1) - bytes, number, bytes);
        v[i] = rounded(x[i]);
    }
    params.used += size;
    if (params.used > params.size) die("more parameters than planned:", name);
    check(cudaMemset(params.decays + at / PIECE, IC > 1, size / PIECE));
    check(cudaMemcpy(params.master + at, x, n * sizeof(float), cudaMemcpyHostToDevice));
    check(cudaMemcpy(params.v + at, v, n * sizeof(floatX), cudaMemcpyHostToDevice));
    free(x), free(v);
    return {params.v + at, params.d + at};
}

static Layer new_layer(const char* weights, const char* format, int l, int OC, int IC) {
    char weight[80], bias[80];
    int length = snprintf(weight, sizeof weight, format, l);
    snprintf(bias, sizeof bias, "%.*s.bias", length, weight);
    strcpy(weight + length, ".weight");
    return {new_param(weights, weight, OC, IC), new_param(weights, bias, OC, 1)};
}

static Tensor new_tensor(size_t size, floatX* d, size_t rows) {
    return {zeros<floatX>(size), d, rows ? zeros<float2>(rows) : NULL};
}

// The model in `folder`, for batches of B sequences.
static Model new_model(const char* folder, int B) {
    char *json = read_file(folder, "config.json"), *w = read_file(folder, "model.safetensors");
    int L = config_number(json, "n_layer"), NH = config_number(json, "n_head"), C = config_number(json, "n_embd");
    int T = config_number(json, "n_positions"), V = config_number(json, "vocab_size"), Vp = (V + 127) / 128 * 128;
    size_t N = (size_t)B * T, NC = N * C;
    if (C != NH * HS) die("heads must have 64 channels:", folder);
    params.size = (size_t)(V + 128 + T) * C + (size_t)L * (12 * C + 13) * C + 2 * C + (size_t)(12 * L + 4) * PIECE;
    params.v = zeros<floatX>(params.size), params.decays = zeros<char>(params.size / PIECE + 1);
    params.d = zeros<float>(params.size), params.master = zeros<float>(params.size);
    params.mean = zeros<float>(params.size), params.square = zeros<float>(params.size);
    // Derivatives: of the residual stream and all that is added to it, of ln1, att and ln2, of qkv, of fc and gelu
    floatX *dx = zeros<floatX>(NC), *dbranch = zeros<floatX>(NC), *dqkv = zeros<floatX>(3 * NC);
    floatX* dfc = zeros<floatX>(4 * NC);
    Tensor branch = new_tensor(NC, dx, 0);  // for all layers: it is added to the residual stream at once
    Model m = {L, NH, C, T, V, Vp};
    m.block = (Block*)calloc((size_t)L + 1, sizeof(Block));
    m.wte = new_param(w, "wte.weight", V, C), params.used += 128 * C;  // rows of zeros from V on, to Vp
    m.wpe = new_param(w, "wpe.weight", T, C);
    for (int l = 0; l < L; l++) {
        Block* k = &m.block[l];
        k->to_ln1 = new_layer(w, "h.%d.ln_1", l, C, 1);
        k->to_qkv = new_layer(w, "h.%d.attn.c_attn", l, 3 * C, C);
        k->to_proj = new_layer(w, "h.%d.attn.c_proj", l, C, C);
        k->to_ln2 = new_layer(w, "h.%d.ln_2", l, C, 1);
        k->to_fc = new_layer(w, "h.%d.mlp.c_fc", l, 4 * C, C);
        k->to_fcproj = new_layer(w, "h.%d.mlp.c_proj", l, C, 4 * C);
        k->ln1 = new_tensor(NC, dbranch, N), k->qkv = new_tensor(3 * NC, dqkv, 0);
        k->att = new_tensor(NC, dbranch, N * NH), k->proj = branch, k->mid = new_tensor(NC, dx, 0);
        k->ln2 = new_tensor(NC, dbranch, N), k->fc = new_tensor(4 * NC, dfc, 0), k->gelu = new_tensor(4 * NC, dfc, 0);
        k->fcproj = branch, k->out = new_tensor(NC, dx, 0);
    }
    m.to_lnf = m.block[L].to_ln1 = new_layer(w, "ln_f", 0, C, 1), m.to_logits.w = m.wte;
    m.embedded = new_tensor(NC, dx, 0), m.lnf = m.block[L].ln1 = new_tensor(NC, dbranch, N);
    m.logits = new_tensor(N * Vp, NULL, 0), m.logits.d = m.logits.v;  // cross_entropy() writes one over the other
    free(json), free(w);
    return m;
}

// Draw tokens, each from the probabilities after those before it: the largest logit, each with a random number of the
// Gumbel distribution added. The tokens behind are 0 so far: no row before sees them.
static void sample(Model* m, int* device_tokens) {
    int tokens[SAMPLE_TOKENS + 1] = {m->V - 1};  // <|endoftext|>, which documents begin with, is the last token
    int T = m->T < SAMPLE_TOKENS + 1 ? m->T : SAMPLE_TOKENS + 1;
    floatX* logits = (floatX*)malloc((size_t)m->Vp * sizeof(floatX));
    for (int n = 1; n < T; n++) {
        double largest = -INFINITY;
        check(cudaMemcpy(device_tokens, tokens, T * sizeof(int), cudaMemcpyDefault));
        forward(m, device_tokens, 1, T);
        check(cudaMemcpy(logits, m->logits.v + (n - 1) * m->Vp, m->Vp * sizeof(floatX), cudaMemcpyDefault));
        for (int v = 0; v < m->V; v++) {
            double x = to_float(logits[v]) - log(-log(drand48()));
            if (x > largest) largest = x, tokens[n] = v;
        }
        printf("%d ", tokens[n]);
    }
    putchar('\n'), free(logits);
}

// Sequences in the order of the file; a target is the next token. b points to arrays of the CPU.
static void next_batch(Batch* b, const uint16_t* data, long tokens, int step, int B, const Model* m) {
    static int* end = (int*)malloc(((size_t)m->V + 1) * sizeof(int));  // of each token's rows, so far
    memset(end, 0, ((size_t)m->V + 1) * sizeof(int));
    for (int n = 0; n < B * m->T; n++) {
        long at = ((long)step * B + n / m->T) % ((tokens - 1) / m->T) * m->T + n % m->T;
        b->tokens[n] = data[at], b->targets[n] = data[at + 1];
        if (b->tokens[n] >= m->V || b->targets[n] >= m->V) die("a token is outside", "the model's vocabulary");
        end[b->tokens[n] + 1]++;
    }
    for (int v = 0; v < m->V; v++) end[v + 1] += end[v];
    for (int n = 0; n < B * m->T; n++) b->order[end[b->tokens[n]]++] = n;
    b->distinct = 0, b->first[0] = 0;
    for (int v = 0; v < m->V; v++)
        if (end[v] > b->first[b->distinct]) b->first[++b->distinct] = end[v];
}

int main(int argc, char** argv) {
    if (argc < 5) die("usage: gpt2cu STEPS MODEL BATCH TOKENS [LEARNING_RATE]", "");
    int steps = (int)strtol(argv[1], NULL, 10), B = (int)strtol(argv[3], NULL, 10);
    char* file = read_file("", argv[4]);
    const uint16_t* data = (const uint16_t*)(file + 1024);  // behind a header of 256 int32
    long tokens = (file_size - 1024) / 2;
    double peak = argc > 5 ? strtod(argv[5], NULL) : 2e-3;
    if (steps < 1 || B < 1) die("the number of steps and the batch size are", "at least 1");
    const cudaFuncAttribute shared = cudaFuncAttributeMaxDynamicSharedMemorySize;
    check(cudaFuncSetAttribute(attention_forward_kernel, shared, FORWARD_TILES));
    check(cudaFuncSetAttribute(attention_backward_kernel<0>, shared, BACKWARD_TILES));
    check(cudaFuncSetAttribute(attention_backward_kernel<1>, shared, BACKWARD_TILES));
    check(cublasLtCreate(&cublaslt));
    Model m = new_model(argv[2], B);
    if (tokens <= m.T) die("too few tokens in", argv[4]);
    size_t N = (size_t)B * m.T, bytes = (4 * N + 1) * sizeof(int);
    int *host = (int*)malloc(bytes), *device = zeros<int>(4 * N + 1);
    float *host_losses = (float*)malloc(N * sizeof(float)), *losses = zeros<float>(N);
    Batch next = {host, host + N, host + 2 * N, host + 3 * N},
          batch = {device, device + N, device + 2 * N, device + 3 * N};
    std::chrono::duration<double> begin{}, end{};
    next_batch(&next, data, tokens, 0, B, &m);
    for (int step = 0; step < steps; step++) {
        Range range("step");
        double loss = 0;
        check(cudaMemcpy(device, host, bytes, cudaMemcpyDefault));
        batch.distinct = next.distinct;
        forward(&m, batch.tokens, B, m.T);
        cross_entropy(losses, m.logits, batch.targets, (int)N, m.V, m.Vp);
        backward(&m, batch, B, m.T);
        adamw(step + 1, learning_rate(step, steps, peak));
        check(cudaGetLastError());
        next_batch(&next, data, tokens, step + 1, B, &m);                              // while the GPU is busy
        check(cudaMemcpy(host_losses, losses, N * sizeof(float), cudaMemcpyDefault));  // waits for the step
        for (size_t n = 0; n < N; n++) loss += host_losses[n] / (double)N;
        end = std::chrono::steady_clock::now().time_since_epoch();
        if (step == 5) begin = end;  // the first steps choose algorithms and load kernels
        printf("step %d/%d | loss %.8f\n", step + 1, steps, loss);
    }
    if (steps > 6) printf("%.0f tokens/s from step 7 on\n", (double)N * (steps - 6) / (end - begin).count());
    sample(&m, device);
    return 0;
}
