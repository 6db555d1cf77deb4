/* Every matrix product of a training step in bf16 and in fp8 through cuBLASLt: time, energy, clock and error.
 *
 *     make build/fp8_products && build/fp8_products [SECONDS]
 *
 * Layers of GPT-2 d12 (B=64 T=1024), d48 (B=16 T=1024) and BERT-large (B=256 T=128; B=64 T=512 has the same shapes).
 * For each: y = x w^T + b, dx = dy w, dw += dy^T x, in
 *
 *   bf16       as the trainers call it: no transposed copies, dw in fp32
 *   fast       fp8 with fast accumulation: tensor cores keep the whole sum
 *   promoted   fp8 whose partial sums are added in fp32 registers
 *
 * fp8 operands: x and w E4M3, dy E5M2, power-of-two scales, which cuBLASLt wants aligned to 16 bytes; both stored with
 * the summed index contiguous: cuBLASLt has no other layout on sm_90. For fc of GPT-2 also gelu(x w^T + b) with its
 * input stored, into E4M3.
 *
 * Each product runs back to back for a fixed time, long enough to reach the power limit, on operands that rotate over
 * three times the L2. Energy is the slope of NVML's counter between two of its ticks inside that time, clocks are
 * samples in it. The error is rms(d - want) / rms(want) over SAMPLES elements; `want` is summed in double from the
 * operands as stored. Runs are ordered by importance: those that do not fit into SECONDS (190) are skipped and
 * counted. Prints one RESULT line a product, a table of errors by length of the sum, and sums for a step. */
#include <cuda_fp8.h>
#include <dlfcn.h>

#include "llmc/base/rng.h"
#include "llmc/device/cublaslt.cuh"

enum {
    SCALES_APART = 64,
    SAMPLES = 2048,
    CANDIDATES = 8,
    ROTATION_BYTES = 256 << 20,
    MOST_RUNS = 512,
    FILL_THREADS = 256
};

typedef enum { PASS_Y, PASS_DX, PASS_DW } Pass;
typedef enum { BF16, FAST, PROMOTED } Arithmetic;
static const char* const PASSES[] = {"y", "dx", "dw"};
static const char* const ARITHMETICS[] = {"bf16", "fast", "promoted"};

// What random numbers look like. All are about as spread as the tensor is in training.
typedef enum {
    NORMAL,     // standard normal: outputs of layernorm and attention
    WEIGHT,     // normal, standard deviation 0.02
    GELU_OF,    // gelu of a normal number
    GRADIENT,   // normal, times e^normal for each row
    LOGIT_GRAD  // softmax of logits with standard deviation 2.5, minus 1 at the target
} Spread;

// The power of two that 448 (E4M3) or 57344 (E5M2) over twice the largest of some 1e8 such numbers is rounded down to.
static const float FP8_SCALE[] = {32, 1024, 32, 64, 16384};
#define GELU_SCALE 64.0f  // of gelu(x w^T + b) in E4M3; its input has a standard deviation of 0.02 sqrt(C)

typedef struct {
    const char *model, *layer;
    int N, IC, OC;
    int count;  // in a step
    Spread x, dy;
} Layer;

// clang-format off
static const Layer LAYERS[] = {
    {"d12", "qkv", 65536, 768, 2304, 12, NORMAL, GRADIENT},
    {"d12", "attproj", 65536, 768, 768, 12, NORMAL, GRADIENT},
    {"d12", "fc", 65536, 768, 3072, 12, NORMAL, GRADIENT},
    {"d12", "fcproj", 65536, 3072, 768, 12, GELU_OF, GRADIENT},
    {"d12", "head", 65536, 768, 50304, 1, NORMAL, LOGIT_GRAD},
    {"d48", "qkv", 16384, 1600, 4800, 48, NORMAL, GRADIENT},
    {"d48", "attproj", 16384, 1600, 1600, 48, NORMAL, GRADIENT},
    {"d48", "fc", 16384, 1600, 6400, 48, NORMAL, GRADIENT},
    {"d48", "fcproj", 16384, 6400, 1600, 48, GELU_OF, GRADIENT},
    {"d48", "head", 16384, 1600, 50304, 1, NORMAL, LOGIT_GRAD},
    {"bert-large", "qkv", 32768, 1024, 3072, 24, NORMAL, GRADIENT},
    {"bert-large", "attproj", 32768, 1024, 1024, 24, NORMAL, GRADIENT},
    {"bert-large", "fc", 32768, 1024, 4096, 24, NORMAL, GRADIENT},
    {"bert-large", "fcproj", 32768, 4096, 1024, 24, GELU_OF, GRADIENT},
    {"bert-large", "head", 4864, 1024, 30592, 1, NORMAL, LOGIT_GRAD},  // masked rows
};
// clang-format on

// One measurement: what is multiplied and how, then what was found.
typedef struct {
    const Layer* layer;
    Pass pass;
    Arithmetic arithmetic;
    cudaDataType_t d;
    cudaDataType_t aux;  // of GELU's input; -1: no GELU
    double seconds;      // to run for; 0: errors only
    int usable, chosen;  // whether cuBLASLt has an algorithm; the heuristic's candidate that was taken
    int has_amax;        // whether it also reports the largest element of an fp8 D
    double us, watts, mhz, error, aux_error;
} Run;

// D (column-major m x n, row-major [n, m]) = A B with the operands of one of the rotated sets.
typedef struct {
    int m, n, k, sets;
    int a_by_k, b_by_k;  // whether k is the contiguous index of the stored operand
    cudaDataType_t a_type, b_type;
    size_t a_bytes, b_bytes, c_bytes, d_bytes, aux_bytes, set_bytes;
    float a_scale, b_scale;  // a stored number is the number times this
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c, d;
    cublasLtMatmulAlgo_t algorithm;
} Product;

typedef struct {
    Context ctx;
    char* arena;  // the operands of the running product, one set after the other
    size_t arena_bytes;
    float* scales;        // [5][SCALES_APART] on the device, of A, B, D and aux; amax of D
    __nv_bfloat16* bias;  // [65536]
    double* samples;      // [4][SAMPLES] on host and device: d, want, aux, want of aux
    void* nvml;           // the device's handle; NULL: no NVML
    int (*energy)(void*, unsigned long long*);
    int (*clock)(void*, int, unsigned*);
} Bench;

// ---------------------------------------------------------------------------------------------------------
// Operands

__device__ inline float uniform(uint32_t bits) { return ((float)(bits >> 8) + 0.5f) * (1.0f / 16777216.0f); }

__device__ inline float2 normals(uint64_t i, uint64_t key) {
    Philox r = philox((uint32_t)i, (uint32_t)(i >> 32), 0, 0, key);
    float size = sqrtf(-2 * __logf(uniform(r.v[0])));
    return make_float2(size * __cosf(6.2831853f * uniform(r.v[1])), size * __sinf(6.2831853f * uniform(r.v[1])));
}

// Element [row, column] of a tensor with `columns` columns.
__device__ inline float element(Spread spread, uint64_t row, uint64_t column, uint64_t columns, uint64_t key) {
    float x = normals(row * columns + column, key).x;
    switch (spread) {
    case NORMAL:
        return x;
    case WEIGHT:
        return 0.02f * x;
    case GELU_OF:
        return 0.5f * x * (1 + erff(0.70710678f * x));
    case GRADIENT:
        return x * __expf(normals(row, key + 1).x);
    case LOGIT_GRAD: {
        uint64_t target = philox((uint32_t)row, 0, 0, 0, key + 1).v[0] % columns;
        return __expf(2.5f * x - 3.125f) / (float)columns - (column == target);
    }
    }
    return 0;
}

// Thread i writes element i as stored: [rows, columns], or its transpose.
__global__ void fill_kernel(void* p, cudaDataType_t type, Spread spread, int2 size, int transposed, float scale,
                            uint64_t key) {
    uint64_t rows = size.x, columns = size.y, i = (uint64_t)blockIdx.x * FILL_THREADS + threadIdx.x;
    if (i >= rows * columns) return;
    uint64_t row = transposed ? i % rows : i / columns, column = transposed ? i / rows : i % columns;
    float x = scale * element(spread, row, column, columns, key);
    if (type == CUDA_R_16BF) ((__nv_bfloat16*)p)[i] = __float2bfloat16_rn(x);
    else if (type == CUDA_R_32F) ((float*)p)[i] = x;
    else
        ((__nv_fp8_storage_t*)p)[i] =
            __nv_cvt_float_to_fp8(x, __NV_SATFINITE, type == CUDA_R_8F_E4M3 ? __NV_E4M3 : __NV_E5M2);
}

__device__ inline double number(const void* p, cudaDataType_t type, size_t i) {
    if (type == CUDA_R_32F) return ((const float*)p)[i];
    if (type == CUDA_R_16BF) return __bfloat162float(((const __nv_bfloat16*)p)[i]);
    if (type == CUDA_R_16F) return __half2float(((const __half*)p)[i]);
    return type == CUDA_R_8F_E4M3 ? (float)((const __nv_fp8_e4m3*)p)[i] : (float)((const __nv_fp8_e5m2*)p)[i];
}

typedef struct {
    const void *a, *b, *d, *aux;
    const __nv_bfloat16* bias;  // NULL: none
    cudaDataType_t a_type, b_type, d_type, aux_type;
    int m, n, k, a_by_k, b_by_k;
    double ab_scale, d_scale;  // stored = number * scale
    uint64_t key;
} SampledProduct;

// Block s sums element s of the sample. Into samples: d as stored, its value in double, the same of GELU's input.
__global__ void sample_kernel(double* samples, SampledProduct p) {
    Philox r = philox(blockIdx.x, 0, 0, 0, p.key);
    size_t i = r.v[0] % p.m, j = r.v[1] % p.n, m = p.m, n = p.n, k = p.k;
    double sum = 0;
    for (size_t at = threadIdx.x; at < k; at += blockDim.x)
        sum += number(p.a, p.a_type, p.a_by_k ? i * k + at : at * m + i) *
               number(p.b, p.b_type, p.b_by_k ? j * k + at : at * n + j);
    sum = block_sum(sum);
    if (threadIdx.x) return;
    sum = sum / p.ab_scale + (p.bias ? (double)__bfloat162float(p.bias[i]) : 0);
    double gelu = 0.5 * sum * (1 + tanh(0.79788456080286535588 * (sum + 0.044715 * sum * sum * sum)));
    samples[blockIdx.x] = number(p.d, p.d_type, j * m + i) / p.d_scale;
    samples[SAMPLES + blockIdx.x] = p.aux ? gelu : sum;
    samples[2 * SAMPLES + blockIdx.x] = p.aux ? number(p.aux, p.aux_type, j * m + i) : 0;
    samples[3 * SAMPLES + blockIdx.x] = sum;
}

// ---------------------------------------------------------------------------------------------------------
// A product and its descriptors

static size_t type_bytes(cudaDataType_t type) {
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF || type == CUDA_R_16F ? 2 : 1;
}

static const char* type_name(cudaDataType_t type) {
    return type == CUDA_R_32F       ? "fp32"
           : type == CUDA_R_16BF    ? "bf16"
           : type == CUDA_R_16F     ? "fp16"
           : type == CUDA_R_8F_E4M3 ? "e4m3"
                                    : "none";
}

static int has_gelu(const Run* run) { return (int)run->aux >= 0; }
static int has_bias(const Run* run) { return run->pass == PASS_Y && strcmp(run->layer->layer, "head") != 0; }

static double run_flops(const Run* run) {
    return 2.0 * (double)run->layer->N * (double)run->layer->IC * (double)run->layer->OC;
}

static Product product_of(const Run* run) {
    const Layer* l = run->layer;
    int fp8 = run->arithmetic != BF16;
    Product p;
    memset(&p, 0, sizeof p);
    p.m = run->pass == PASS_Y ? l->OC : l->IC;
    p.n = run->pass == PASS_DW ? l->OC : l->N;
    p.k = run->pass == PASS_Y ? l->IC : run->pass == PASS_DX ? l->OC : l->N;
    p.a_by_k = fp8 || run->pass == PASS_Y;
    p.b_by_k = fp8 || run->pass != PASS_DW;
    p.a_type = fp8 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
    p.b_type = fp8 ? run->pass == PASS_Y ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2 : CUDA_R_16BF;
    p.a_scale = fp8 ? FP8_SCALE[run->pass == PASS_DW ? l->x : WEIGHT] : 1;
    p.b_scale = fp8 ? FP8_SCALE[run->pass == PASS_Y ? l->x : l->dy] : 1;
    size_t d = (size_t)p.m * (size_t)p.n;
    p.a_bytes = round_up((size_t)p.m * (size_t)p.k * type_bytes(p.a_type), 256);
    p.b_bytes = round_up((size_t)p.n * (size_t)p.k * type_bytes(p.b_type), 256);
    p.d_bytes = round_up(d * type_bytes(run->d), 256);
    p.c_bytes = run->d == CUDA_R_8F_E4M3 ? round_up(2 * d, 256) : 0;  // described, but not read
    p.aux_bytes = has_gelu(run) ? round_up(d * type_bytes(run->aux), 256) : 0;
    p.set_bytes = p.a_bytes + p.b_bytes + p.c_bytes + p.d_bytes + p.aux_bytes;
    p.sets = max_int(1, (int)((ROTATION_BYTES + p.set_bytes - 1) / p.set_bytes));
    return p;
}

static cublasLtMatrixLayout_t layout(cudaDataType_t type, int rows, int columns) {
    cublasLtMatrixLayout_t made;
    cublasCheck(cublasLtMatrixLayoutCreate(&made, type, (uint64_t)rows, (uint64_t)columns, rows));
    return made;
}

static void product_describe(Bench* bench, const Run* run, Product* p) {
    int fp8 = run->arithmetic != BF16;
    cublasCheck(cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, p->a_by_k ? CUBLAS_OP_T : CUBLAS_OP_N);
    cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_TRANSB, p->b_by_k ? CUBLAS_OP_N : CUBLAS_OP_T);
    p->a = p->a_by_k ? layout(p->a_type, p->k, p->m) : layout(p->a_type, p->m, p->k);
    p->b = p->b_by_k ? layout(p->b_type, p->k, p->n) : layout(p->b_type, p->n, p->k);
    p->c = layout(run->d == CUDA_R_8F_E4M3 ? CUDA_R_16BF : run->d, p->m, p->n);
    p->d = layout(run->d, p->m, p->n);
    if (fp8) {
        cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)(run->arithmetic == FAST));
        cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (void*)(bench->scales));
        cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, (void*)(bench->scales + SCALES_APART));
    }
    if (run->d == CUDA_R_8F_E4M3)
        cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, (void*)(bench->scales + 2 * SCALES_APART));
    if (has_bias(run)) {
        cublasLtEpilogue_t epilogue = has_gelu(run) ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_BIAS;
        cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
        cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, (void*)bench->bias);
        if (fp8) cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)CUDA_R_16BF);
    }
    if (has_gelu(run)) {
        cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)p->m);
        if (run->aux != run->d)
            cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, (int32_t)run->aux);
        if (run->aux == CUDA_R_8F_E4M3)
            cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_POINTER,
                         (void*)(bench->scales + 3 * SCALES_APART));
        cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (void*)bench->arena);
    }
}

static void product_free(Product* p) {
    cublasCheck(cublasLtMatmulDescDestroy(p->operation));
    cublasCheck(cublasLtMatrixLayoutDestroy(p->a));
    cublasCheck(cublasLtMatrixLayoutDestroy(p->b));
    cublasCheck(cublasLtMatrixLayoutDestroy(p->c));
    cublasCheck(cublasLtMatrixLayoutDestroy(p->d));
}

// Set s of the operands lies in this order: A, B, C, D, GELU's input.
static char* set_a(const Bench* bench, const Product* p, int s) { return bench->arena + (size_t)s * p->set_bytes; }
static char* set_b(const Bench* bench, const Product* p, int s) { return set_a(bench, p, s) + p->a_bytes; }
static char* set_c(const Bench* bench, const Product* p, int s) { return set_b(bench, p, s) + p->b_bytes; }
static char* set_d(const Bench* bench, const Product* p, int s) { return set_c(bench, p, s) + p->c_bytes; }
static char* set_aux(const Bench* bench, const Product* p, int s) { return set_d(bench, p, s) + p->d_bytes; }

static cublasStatus_t product_launch(Bench* bench, const Run* run, Product* p, const cublasLtMatmulAlgo_t* algorithm,
                                     int s) {
    float one = 1, beta = run->pass == PASS_DW ? 1 : 0;
    char *d = set_d(bench, p, s), *c = p->c_bytes ? set_c(bench, p, s) : d;
    if (has_gelu(run))
        cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (void*)set_aux(bench, p, s));
    return cublasLtMatmul(bench->ctx.cublaslt, p->operation, &one, set_a(bench, p, s), p->a, set_b(bench, p, s), p->b,
                          &beta, c, p->c, d, p->d, algorithm, bench->ctx.cublaslt_workspace, CUBLASLT_WORKSPACE_BYTES,
                          bench->ctx.stream);
}

static void fill(Bench* bench, void* p, cudaDataType_t type, Spread spread, int2 size, int transposed, float scale,
                 uint64_t key) {
    unsigned blocks = blocks_for((size_t)size.x * (size_t)size.y, FILL_THREADS);
    fill_kernel<<<blocks, FILL_THREADS, 0, bench->ctx.stream>>>(p, type, spread, size, transposed, scale, key);
    cudaCheck(cudaGetLastError());
}

static void product_fill(Bench* bench, const Run* run, const Product* p) {
    const Layer* l = run->layer;
    int2 w = {l->OC, l->IC}, x = {l->N, l->IC}, dy = {l->N, l->OC};
    int fp8 = run->arithmetic != BF16, turned = fp8 && run->pass == PASS_DW;
    float scales[4 * SCALES_APART] = {1 / p->a_scale};
    scales[SCALES_APART] = 1 / p->b_scale;
    scales[2 * SCALES_APART] = scales[3 * SCALES_APART] = GELU_SCALE;
    for (int s = 0; s < p->sets; s++) {
        uint64_t key = 4 * (uint64_t)s;  // and key + 1 for the rows of a tensor
        if (run->pass == PASS_DW) fill(bench, set_a(bench, p, s), p->a_type, l->x, x, turned, p->a_scale, key);
        else fill(bench, set_a(bench, p, s), p->a_type, WEIGHT, w, fp8 && run->pass == PASS_DX, p->a_scale, key);
        if (run->pass == PASS_Y) fill(bench, set_b(bench, p, s), p->b_type, l->x, x, 0, p->b_scale, key + 2);
        else fill(bench, set_b(bench, p, s), p->b_type, l->dy, dy, turned, p->b_scale, key + 2);
        cudaCheck(cudaMemsetAsync(set_c(bench, p, s), 0, p->set_bytes - p->a_bytes - p->b_bytes, bench->ctx.stream));
    }
    device_upload(&bench->ctx, bench->scales, scales, sizeof scales);
    device_synchronize(&bench->ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Choosing an algorithm, checking, timing

// Milliseconds of two launches after a first one; infinite if cuBLASLt refuses.
static float candidate_ms(Bench* bench, const Run* run, Product* p, const cublasLtMatmulAlgo_t* algorithm) {
    cudaEvent_t start, stop;
    float ms = INFINITY;
    cudaCheck(cudaEventCreate(&start));
    cudaCheck(cudaEventCreate(&stop));
    if (product_launch(bench, run, p, algorithm, 0) == CUBLAS_STATUS_SUCCESS) {
        cudaCheck(cudaEventRecord(start, bench->ctx.stream));
        for (int i = 0; i < 2; i++) cublasCheck(product_launch(bench, run, p, algorithm, i % p->sets));
        cudaCheck(cudaEventRecord(stop, bench->ctx.stream));
        cudaCheck(cudaEventSynchronize(stop));
        cudaCheck(cudaEventElapsedTime(&ms, start, stop));
    }
    cudaCheck(cudaEventDestroy(start));
    cudaCheck(cudaEventDestroy(stop));
    return ms / 2;
}

// As in the trainers: another candidate than the first only for a gain of 6 %. Returns its milliseconds.
static float product_choose(Bench* bench, Run* run, Product* p) {
    cublasLtMatmulHeuristicResult_t results[CANDIDATES];
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    if (run->d == CUDA_R_32F) reduction |= CUBLASLT_REDUCTION_SCHEME_INPLACE;
    if (run->seconds == 0) reduction = CUBLASLT_REDUCTION_SCHEME_NONE;  // the error of one sum, not of its parts
    CublasltProblem problem = {p->operation, p->a, p->b, p->c, p->d, 256, 256, 256, reduction};
    int count = 0;
    float times[CANDIDATES];
    if (run->d == CUDA_R_8F_E4M3) {
        cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, (void*)(bench->scales + 4 * SCALES_APART));
        cublaslt_propose(&count, results, CANDIDATES, &problem, &bench->ctx);
        run->has_amax = count > 0;
        if (!count) cublaslt_set(p->operation, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, (void*)NULL);
    }
    if (!count) cublaslt_propose(&count, results, CANDIDATES, &problem, &bench->ctx);
    for (int i = 0; i < count; i++) {
        times[i] = candidate_ms(bench, run, p, &results[i].algo);
        if (times[i] < times[run->chosen] / 1.06f) run->chosen = i;
    }
    run->usable = count > 0 && times[run->chosen] < INFINITY;
    if (run->usable) p->algorithm = results[run->chosen].algo;
    return run->usable ? times[run->chosen] : 0;
}

// rms(got - want) / rms(want)
static double relative_error(const double* got, const double* want) {
    double error = 0, size = 0;
    for (int i = 0; i < SAMPLES; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    return sqrt(error / size);
}

// One launch onto zeros, compared with sums in double.
static void product_check(Bench* bench, Run* run, Product* p) {
    char* aux = has_gelu(run) ? set_aux(bench, p, 0) : NULL;
    double d_scale = run->d == CUDA_R_8F_E4M3 ? GELU_SCALE : 1, aux_scale = run->aux == CUDA_R_8F_E4M3 ? GELU_SCALE : 1;
    SampledProduct sampled = {set_a(bench, p, 0),
                              set_b(bench, p, 0),
                              set_d(bench, p, 0),
                              aux,
                              has_bias(run) ? bench->bias : NULL,
                              p->a_type,
                              p->b_type,
                              run->d,
                              run->aux,
                              p->m,
                              p->n,
                              p->k,
                              p->a_by_k,
                              p->b_by_k,
                              (double)p->a_scale * (double)p->b_scale,
                              d_scale,
                              7};
    cudaCheck(cudaMemsetAsync(set_d(bench, p, 0), 0, p->d_bytes, bench->ctx.stream));
    cublasCheck(product_launch(bench, run, p, &p->algorithm, 0));
    sample_kernel<<<SAMPLES, 128, 0, bench->ctx.stream>>>(bench->samples, sampled);
    cudaCheck(cudaGetLastError());
    device_synchronize(&bench->ctx);
    run->error = relative_error(bench->samples, bench->samples + SAMPLES);
    for (int i = 0; i < SAMPLES && aux; i++) bench->samples[2 * SAMPLES + i] /= aux_scale;
    if (aux) run->aux_error = relative_error(bench->samples + 2 * SAMPLES, bench->samples + 3 * SAMPLES);
}

// What NVML reported while the GPU worked: energy at the first and the last tick of its counter, and the clock.
typedef struct {
    unsigned long long last_mj, first_mj;
    double first, last, mhz;
    int readings, ticks;
} Meter;

static void meter_read(Bench* bench, Meter* meter) {
    unsigned long long mj;
    unsigned mhz;
    if (!bench->nvml || bench->energy(bench->nvml, &mj) != 0 || bench->clock(bench->nvml, 1, &mhz) != 0) return;
    double now = now_seconds();
    meter->mhz += mhz;
    if (meter->readings++ && mj != meter->last_mj) {
        if (!meter->ticks++) meter->first_mj = mj, meter->first = now;
        meter->last = now;
    }
    meter->last_mj = mj;
}

static int event_passed(cudaEvent_t event) {
    cudaError_t state = cudaEventQuery(event);
    if (state == cudaErrorNotReady) cudaGetLastError();  // clear it, so that no later call returns it
    else cudaCheck(state);
    return state == cudaSuccess;
}

// Run for run->seconds after a warm-up; `ms` estimates one launch. The host queues up to 1024 launches ahead of the
// GPU, so the meter is read only between the two events.
static void product_time(Bench* bench, Run* run, Product* p, float ms) {
    cudaEvent_t events[2];
    Meter meter;
    float elapsed;
    double read = 0;
    int warm_up = (int)(1e3 * fmax(0.15, 0.25 * run->seconds) / ms) + 1, launches = (int)(1e3 * run->seconds / ms) + 1;
    memset(&meter, 0, sizeof meter);
    for (int i = 0; i < 2; i++) cudaCheck(cudaEventCreate(&events[i]));
    for (int i = 0; i < warm_up + launches; i++) {
        if (i == warm_up) cudaCheck(cudaEventRecord(events[0], bench->ctx.stream));
        cublasCheck(product_launch(bench, run, p, &p->algorithm, i % p->sets));
        if (i < warm_up || now_seconds() - read < 2e-3 || !event_passed(events[0])) continue;
        meter_read(bench, &meter);
        read = now_seconds();
    }
    cudaCheck(cudaEventRecord(events[1], bench->ctx.stream));
    while (!event_passed(events[1])) {
        if (event_passed(events[0])) meter_read(bench, &meter);
        usleep(2000);
    }
    cudaCheck(cudaEventElapsedTime(&elapsed, events[0], events[1]));
    run->us = 1e3 * elapsed / launches;
    run->watts = meter.ticks > 1 ? 1e-3 * (double)(meter.last_mj - meter.first_mj) / (meter.last - meter.first) : NAN;
    run->mhz = meter.readings ? meter.mhz / meter.readings : NAN;
    for (int i = 0; i < 2; i++) cudaCheck(cudaEventDestroy(events[i]));
}

static void run_print(const Run* run) {
    const Layer* l = run->layer;
    printf("RESULT fp8_product model=%s layer=%s pass=%s N=%d IC=%d OC=%d arithmetic=%s d=%s gelu_aux=%s", l->model,
           l->layer, PASSES[run->pass], l->N, l->IC, l->OC, ARITHMETICS[run->arithmetic], type_name(run->d),
           type_name(run->aux));
    if (!run->usable) printf(" unsupported");
    else {
        printf(" us=%.1f tflops=%.0f joules=%.4f watts=%.0f mhz=%.0f error=%.2e choice=%d", run->us,
               run->us > 0 ? 1e-6 * run_flops(run) / run->us : 0, 1e-6 * run->us * run->watts, run->watts, run->mhz,
               run->error, run->chosen);
        if (has_gelu(run)) printf(" aux_error=%.2e amax=%d", run->aux_error, run->has_amax);
    }
    putchar('\n');
    fflush(stdout);
}

static void run_measure(Bench* bench, Run* run) {
    Product p = product_of(run);
    if (p.set_bytes * (size_t)p.sets > bench->arena_bytes) {
        cudaCheck(cudaFree(bench->arena));
        bench->arena_bytes = p.set_bytes * (size_t)p.sets;
        cudaCheck(cudaMalloc(&bench->arena, bench->arena_bytes));
    }
    product_describe(bench, run, &p);
    product_fill(bench, run, &p);
    float ms = product_choose(bench, run, &p);
    if (run->usable) {
        product_check(bench, run, &p);
        if (run->seconds > 0) product_time(bench, run, &p, ms);
    }
    product_free(&p);
}

// ---------------------------------------------------------------------------------------------------------
// The list of runs, and what it adds up to

static Run* add(Run* runs, int* count, const Layer* layer, Pass pass, Arithmetic arithmetic) {
    CHECK(*count < MOST_RUNS);
    Run* run = &runs[(*count)++];
    memset(run, 0, sizeof *run);
    run->layer = layer, run->pass = pass, run->arithmetic = arithmetic;
    run->d = pass == PASS_DW ? CUDA_R_32F : CUDA_R_16BF;
    run->aux = (cudaDataType_t)-1;
    run->seconds = strcmp(layer->model, "d12") == 0 ? layer->count > 1 ? 1 : 0.6 : 0.4;
    return run;
}

static void add_gelu(Run* runs, int* count, const Layer* layer, cudaDataType_t d, cudaDataType_t aux) {
    int narrow = d == CUDA_R_8F_E4M3;
    for (int a = narrow ? FAST : BF16; a <= (narrow ? PROMOTED : FAST); a++) {
        Run* run = add(runs, count, layer, PASS_Y, (Arithmetic)a);
        run->d = d, run->aux = aux, run->seconds = 0.4;
    }
}

static int add_all(Run* runs) {
    int count = 0;
    for (size_t i = 0; i < COUNT_OF(LAYERS); i++)
        for (int pass = PASS_Y; pass <= PASS_DW; pass++)
            for (int a = BF16; a <= PROMOTED; a++) add(runs, &count, &LAYERS[i], (Pass)pass, (Arithmetic)a);
    for (size_t i = 0; i < COUNT_OF(LAYERS); i++) {
        if (strcmp(LAYERS[i].layer, "fc") != 0 || strcmp(LAYERS[i].model, "bert-large") == 0) continue;
        add_gelu(runs, &count, &LAYERS[i], CUDA_R_16BF, CUDA_R_16BF);
        add_gelu(runs, &count, &LAYERS[i], CUDA_R_8F_E4M3, CUDA_R_16BF);
        add_gelu(runs, &count, &LAYERS[i], CUDA_R_8F_E4M3, CUDA_R_16F);
        add_gelu(runs, &count, &LAYERS[i], CUDA_R_8F_E4M3, CUDA_R_8F_E4M3);
    }
    for (size_t i = 0; i < COUNT_OF(LAYERS); i++)
        for (int pass = PASS_Y; pass <= PASS_DX; pass++)
            for (int a = FAST; a <= PROMOTED; a++) {
                Run* run = add(runs, &count, &LAYERS[i], (Pass)pass, (Arithmetic)a);
                run->d = CUDA_R_32F, run->seconds = 0.25;
            }
    return count;
}

// Error of both ways to accumulate by the length of the sum, D in fp32.
static void print_errors(Bench* bench) {
    static const int LENGTHS[] = {768, 3072, 16384, 65536};
    printf(
        "rms error of fp8 products, D in fp32, by K:    K  E4M3 x E4M3 fast  promoted  E4M3 x E5M2 fast  promoted\n");
    for (size_t i = 0; i < COUNT_OF(LENGTHS); i++) {
        Layer y = {"errors", "head", 1024, LENGTHS[i], 1024, 1, NORMAL, NORMAL};
        Layer dw = {"errors", "head", LENGTHS[i], 1024, 1024, 1, NORMAL, GRADIENT};
        printf("%48d", LENGTHS[i]);
        for (int pass = PASS_Y; pass <= PASS_DW; pass += PASS_DW)
            for (int a = FAST; a <= PROMOTED; a++) {
                Run run;
                int count = 0;
                Run* r = add(&run, &count, pass == PASS_Y ? &y : &dw, (Pass)pass, (Arithmetic)a);
                r->d = CUDA_R_32F, r->seconds = 0;
                run_measure(bench, r);
                printf("%*.4f %%", a == FAST ? 16 : 8, 100 * (r->usable ? r->error : NAN));
            }
        putchar('\n');
    }
    fflush(stdout);
}

static const Run* find(const Run* runs, int count, const Layer* layer, Pass pass, Arithmetic arithmetic) {
    for (int i = 0; i < count; i++)
        if (runs[i].layer == layer && runs[i].pass == pass && runs[i].arithmetic == arithmetic && runs[i].us > 0 &&
            !has_gelu(&runs[i]))
            return &runs[i];
    return NULL;
}

// The first runs of each product are those with the D that a step has. Joules are NaN where one was not measured.
static void print_sums(const Run* runs, int count) {
    printf("\n%-11s %-8s %-4s %9s %28s %28s %28s\n", "model", "layer", "pass", "in a step", "bf16: us, TFLOP/s, J, MHz",
           "fast", "promoted");
    double ms[3] = {0}, joules[3] = {0};
    for (size_t i = 0; i < COUNT_OF(LAYERS); i++) {
        const Layer* l = &LAYERS[i];
        for (int pass = PASS_Y; pass <= PASS_DW; pass++) {
            printf("%-11s %-8s %-4s %9d", l->model, l->layer, PASSES[pass], l->count);
            for (int a = BF16; a <= PROMOTED; a++) {
                const Run* run = find(runs, count, l, (Pass)pass, (Arithmetic)a);
                if (!run) printf(" %28s", "-");
                else
                    printf("  %8.1f %6.0f %6.3f %4.0f", run->us, 1e-6 * run_flops(run) / run->us,
                           1e-6 * run->us * run->watts, run->mhz);
                if (run) ms[a] += 1e-3 * l->count * run->us, joules[a] += 1e-6 * l->count * run->us * run->watts;
            }
            putchar('\n');
        }
        if (i + 1 < COUNT_OF(LAYERS) && strcmp(l->model, LAYERS[i + 1].model) == 0 && l[1].count > 1) continue;
        printf("RESULT fp8_products_sum model=%s part=%s bf16_ms=%.2f fast_ms=%.2f promoted_ms=%.2f bf16_joules=%.2f "
               "fast_joules=%.2f promoted_joules=%.2f\n",
               l->model, l->count > 1 ? "blocks" : "head", ms[0], ms[1], ms[2], joules[0], joules[1], joules[2]);
        memset(ms, 0, sizeof ms), memset(joules, 0, sizeof joules);
    }
}

// ---------------------------------------------------------------------------------------------------------

// NVML is loaded at run time, so that the program builds without it.
static void nvml_open(Bench* bench) {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    char bus[32];
    int device;
    if (!library) {
        warn("no libnvidia-ml.so.1: energy and clocks are not measured");
        return;
    }
    int (*init)(void) = (int (*)(void))dlsym(library, "nvmlInit_v2");
    int (*by_bus)(const char*, void**) =
        (int (*)(const char*, void**))dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2");
    bench->energy = (int (*)(void*, unsigned long long*))dlsym(library, "nvmlDeviceGetTotalEnergyConsumption");
    bench->clock = (int (*)(void*, int, unsigned*))dlsym(library, "nvmlDeviceGetClockInfo");
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaDeviceGetPCIBusId(bus, sizeof bus, device));
    if (!init || !by_bus || !bench->energy || !bench->clock || init() != 0 || by_bus(bus, &bench->nvml) != 0)
        warn("NVML does not know this GPU: energy and clocks are not measured");
}

int main(int argc, char** argv) {
    static Run runs[MOST_RUNS];
    static Bench bench;
    double begin = now_seconds(), seconds = argc > 1 ? strtod(argv[1], NULL) : 190;
    if (argc > 2 || !(seconds > 0)) die(USAGE, "usage: fp8_products [SECONDS]");
    struct cudaDeviceProp properties;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
        die(FAILED, "this machine has no NVIDIA GPU that CUDA can use");
    context_init(&bench.ctx);
    if (bench.ctx.capability < 89) die(FAILED, "fp8 needs a GPU of compute capability 8.9 or later");
    cudaCheck(cudaMalloc(&bench.scales, 5 * SCALES_APART * sizeof *bench.scales));
    cudaCheck(cudaMalloc(&bench.bias, 65536 * sizeof *bench.bias));
    cudaCheck(cudaMallocHost(&bench.samples, 4 * SAMPLES * sizeof *bench.samples));
    fill(&bench, bench.bias, CUDA_R_16BF, WEIGHT, make_int2(65536, 1), 0, 1, 1u << 20);
    nvml_open(&bench);
    cudaCheck(cudaGetDeviceProperties(&properties, 0));
    printf("%s, cuBLASLt %zu\n", properties.name, cublasLtGetVersion());
    print_errors(&bench);
    int count = add_all(runs), done = 0;
    for (; done < count && now_seconds() - begin + 2 * runs[done].seconds < seconds; done++) {
        run_measure(&bench, &runs[done]);
        run_print(&runs[done]);
    }
    print_sums(runs, done);
    printf("%d of %d runs in %.0f s\n", done, count, now_seconds() - begin);
    return DONE;
}
