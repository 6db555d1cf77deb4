/* cuBLASLt: the code shared by the matmuls of all ops, and strided batched matmuls.
 *
 *   C[i] [M, N] = alpha A[i] [M, K] B[i] [K, N] + beta D[i],   i < batch
 *
 * All matrices are row-major. Row strides and batch strides are arbitrary, so attention heads are multiplied in place.
 * cuBLASLt's heuristic is called once per shape. It sees strides but no addresses, so a matmul gives the same bits at
 * any position in a batch.
 * Numerics: sums in fp32 (fp32 inputs in TF32 only with ctx->tf32). Split-K algorithms add the partial sums in fp32 in
 * a fixed order, so the same call gives the same bits. */
#ifndef LLMC_DEVICE_CUBLASLT_CUH
#define LLMC_DEVICE_CUBLASLT_CUH

#include "llmc/device/cuda_utils.cuh"

#ifdef __CUDACC__
#include <type_traits>

// ---------------------------------------------------------------------------------------------------------
// Descriptors

static inline cudaDataType_t cublaslt_type(void) {
    return sizeof(floatX) == 4 ? CUDA_R_32F : std::is_same<floatX, __nv_bfloat16>::value ? CUDA_R_16BF : CUDA_R_16F;
}

static inline cublasComputeType_t cublaslt_compute(int tf32) {
    return sizeof(floatX) == 4 && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

template <typename T>
static inline void cublaslt_set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t name, T value) {
    cublasCheck(cublasLtMatmulDescSetAttribute(operation, name, &value, sizeof value));
}

// Call this before a matmul with this algorithm is launched.
static inline void cublaslt_note(Context* ctx, const cublasLtMatmulAlgo_t* algorithm) {
    if (ctx->is_captured)
        ctx->captured_algorithms = fnv_update(ctx->captured_algorithms, (const char*)algorithm, sizeof *algorithm);
}

// The largest power of two that divides x, at most 256.
static inline int alignment_of(size_t x) {
    int alignment = 256;
    while (x % (size_t)alignment) alignment /= 2;
    return alignment;
}

static inline int pointer_alignment(const void* p) { return alignment_of((size_t)(uintptr_t)p); }

// The problem that an algorithm is chosen for.
typedef struct {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;      // C's layout is D's
    uint32_t align_a, align_b, align_d;  // bytes
    uint32_t reduction;                  // the allowed split-K reduction schemes
} CublasltProblem;

// Get the heuristic's algorithms, best estimate first. *count is 0 if cuBLASLt supports none.
static inline cublasStatus_t cublaslt_propose(int* count, cublasLtMatmulHeuristicResult_t* results, int limit,
                                              const CublasltProblem* p, Context* ctx) {
    cublasLtMatmulPreference_t preference;
    cublasCheck(cublasLtMatmulPreferenceCreate(&preference));
    uint64_t workspace = CUBLASLT_WORKSPACE_BYTES;
    struct {
        cublasLtMatmulPreferenceAttributes_t name;
        const void* value;
        size_t size;
    } attributes[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &p->reduction, sizeof p->reduction},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &p->align_a, sizeof p->align_a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &p->align_b, sizeof p->align_b},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &p->align_d, sizeof p->align_d},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &p->align_d, sizeof p->align_d},
    };
    for (size_t i = 0; i < COUNT_OF(attributes); i++)
        cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, attributes[i].name, attributes[i].value,
                                                         attributes[i].size));
    int found = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(ctx->cublaslt, p->operation, p->a, p->b, p->d, p->d,
                                                           preference, limit, results, &found);
    cublasCheck(cublasLtMatmulPreferenceDestroy(preference));
    *count = 0;
    // The heuristic returns INVALID_VALUE for an epilogue that cuBLASLt supports for even shapes only.
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return CUBLAS_STATUS_SUCCESS;
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < found; i++)
        if (results[i].state == CUBLAS_STATUS_SUCCESS && results[i].workspaceSize <= CUBLASLT_WORKSPACE_BYTES)
            results[(*count)++] = results[i];
    return status;
}

// ---------------------------------------------------------------------------------------------------------
// Batched matmuls

// The layout of an operand, with the strides between stored rows and between matrices in elements.
typedef struct {
    int64_t type, op;  // cudaDataType_t; CUBLAS_OP_T: the transpose is stored
    int64_t row, next;
} BatchLayout;

// One operand; p is the first matrix.
typedef struct {
    void* p;
    BatchLayout layout;
} BatchMatrix;

// C [M, N] = A [M, K] B [K, N], `batch` times. like: choose the algorithm as for a batch of this size; 0: of `batch`.
typedef struct {
    int M, N, K, batch, like;
} BatchSize;

// Everything that the choice of an algorithm depends on. All fields are int64_t, because keys are compared as bytes.
typedef struct {
    BatchLayout c, a, b;
    int64_t M, N, K, batch, like, compute;
} BatchKey;

typedef struct {
    BatchKey key;  // batch 0: the entry is free
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t c, a, b;
    cublasLtMatmulAlgo_t algorithm;
    int usable;  // 0: cuBLASLt does not support this shape
} BatchPlan;

enum { BATCH_PLANS = 4096 };

// A hash table with linear probing. It is cleared when it is three quarters full.
struct BatchPlans {
    int count;
    BatchPlan plan[BATCH_PLANS];
};

// The alignment in bytes of every row of every matrix, provided that the first row has it.
static inline uint32_t batch_alignment(BatchLayout x) {
    int64_t size = x.type == CUDA_R_32F ? 4 : 2;
    return (uint32_t)min_int(alignment_of((size_t)(x.row * size)), alignment_of((size_t)(x.next * size)));
}

static inline void batch_set_count(cublasLtMatrixLayoutOpaque_t* layout, int64_t batch) {
    int32_t count = (int32_t)batch;
    cublasCheck(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
}

// To cuBLASLt, which is column-major, a row-major matrix is its transpose.
static inline void batch_describe(cublasLtMatrixLayoutOpaque_t* layout, BatchLayout x, int64_t rows, int64_t columns,
                                  int64_t batch) {
    uint64_t down = (uint64_t)(x.op == CUBLAS_OP_T ? columns : rows);
    uint64_t along = (uint64_t)(x.op == CUBLAS_OP_T ? rows : columns);
    cublasCheck(cublasLtMatrixLayoutInit(layout, (cudaDataType_t)x.type, along, down, x.row));
    batch_set_count(layout, batch);
    cublasCheck(
        cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &x.next, sizeof x.next));
}

// Fill in a plan whose key is set. As C^T = B^T A^T, cuBLASLt's first operand is B.
static inline void batch_plan_make(BatchPlan* plan, Context* ctx) {
    const BatchKey* k = &plan->key;
    cublasCheck(cublasLtMatmulDescInit(&plan->operation, (cublasComputeType_t)k->compute, CUDA_R_32F));
    cublaslt_set(&plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, (cublasOperation_t)k->b.op);
    cublaslt_set(&plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, (cublasOperation_t)k->a.op);
    batch_describe(&plan->c, k->c, k->M, k->N, k->like);
    batch_describe(&plan->a, k->a, k->M, k->K, k->like);
    batch_describe(&plan->b, k->b, k->K, k->N, k->like);
    CublasltProblem problem = {.operation = &plan->operation,
                               .a = &plan->b,
                               .b = &plan->a,
                               .d = &plan->c,
                               .align_a = batch_alignment(k->b),
                               .align_b = batch_alignment(k->a),
                               .align_d = batch_alignment(k->c),
                               .reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE};
    cublasLtMatmulHeuristicResult_t result;
    cublasCheck(cublaslt_propose(&plan->usable, &result, 1, &problem, ctx));
    if (plan->usable) plan->algorithm = result.algo;
    batch_set_count(&plan->c, k->batch), batch_set_count(&plan->a, k->batch), batch_set_count(&plan->b, k->batch);
}

static inline BatchPlan* batch_plan(const BatchKey* key, Context* ctx) {
    if (!ctx->batch_plans) ctx->batch_plans = (struct BatchPlans*)xcalloc(1, sizeof *ctx->batch_plans);
    struct BatchPlans* plans = ctx->batch_plans;
    const int64_t* words = (const int64_t*)key;
    uint64_t hash = 0;
    for (size_t i = 0; i < sizeof *key / sizeof *words; i++)
        hash = (hash ^ hash >> 32 ^ (uint64_t)words[i]) * 0x9e3779b97f4a7c15u;
    size_t home = (size_t)(hash >> 32) % BATCH_PLANS, at = home;
    for (; plans->plan[at].key.batch; at = (at + 1) % BATCH_PLANS)
        if (memcmp(&plans->plan[at].key, key, sizeof *key) == 0) return &plans->plan[at];
    if (++plans->count > BATCH_PLANS / 4 * 3) {
        memset(plans, 0, sizeof *plans);
        plans->count = 1;
        at = home;
    }
    plans->plan[at].key = *key;
    batch_plan_make(&plans->plan[at], ctx);
    return &plans->plan[at];
}

// The addend beta D of a matmul. D has C's layout and may be C itself. beta 0: nothing is added.
typedef struct {
    const void* d;
    float beta;
} BatchAddend;

// The fallback for shapes that cuBLASLt does not support. Each thread computes one element of C.
template <typename T>
__global__ void batched_product_kernel(T* c, const floatX* a, const floatX* b, BatchKey z, float alpha,
                                       BatchAddend more) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i % z.N, m = i / z.N % z.M, matrix = i / z.N / z.M;
    if (matrix >= z.batch) return;
    int64_t a_m = z.a.op == CUBLAS_OP_T ? 1 : z.a.row, a_k = z.a.op == CUBLAS_OP_T ? z.a.row : 1;
    int64_t b_n = z.b.op == CUBLAS_OP_T ? z.b.row : 1, b_k = z.b.op == CUBLAS_OP_T ? 1 : z.b.row;
    a += matrix * z.a.next + m * a_m;
    b += matrix * z.b.next + n * b_n;
    float sum = 0;
    for (int64_t k = 0; k < z.K; k++) sum += to_float(a[k * a_k]) * to_float(b[k * b_k]);
    int64_t at = matrix * z.c.next + m * z.c.row + n;
    sum *= alpha;
    if (more.beta != 0) sum += more.beta * to_float(((const T*)more.d)[at]);
    c[at] = from_float<T>(sum);
}

static inline void batched_product_plain(void* c, const void* a, const void* b, const BatchKey* key, float alpha,
                                         BatchAddend more, Context* ctx) {
    unsigned threads = 256, blocks = blocks_for((size_t)(key->batch * key->M * key->N), threads);
    const floatX *x = (const floatX*)a, *y = (const floatX*)b;
    if (key->c.type == CUDA_R_32F)
        batched_product_kernel<float><<<blocks, threads, 0, ctx->stream>>>((float*)c, x, y, *key, alpha, more);
    else batched_product_kernel<floatX><<<blocks, threads, 0, ctx->stream>>>((floatX*)c, x, y, *key, alpha, more);
    cudaCheck(cudaGetLastError());
}

static inline BatchKey batch_key(const BatchMatrix* c, const BatchMatrix* a, const BatchMatrix* b, BatchSize n,
                                 Context* ctx) {
    BatchKey key = {.c = c->layout, .a = a->layout, .b = b->layout, .M = n.M, .N = n.N, .K = n.K, .batch = n.batch};
    key.like = n.like ? n.like : n.batch;
    key.compute = cublaslt_compute(ctx->tf32);
    CHECK(n.M > 0 && n.N > 0 && n.K > 0 && n.batch > 0 && c->layout.op == CUBLAS_OP_N);
    CHECK((uintptr_t)c->p % batch_alignment(c->layout) == 0);
    CHECK((uintptr_t)a->p % batch_alignment(a->layout) == 0);
    CHECK((uintptr_t)b->p % batch_alignment(b->layout) == 0);
    return key;
}

// C = alpha A B + beta D. A and B are floatX; C and D are floatX or float.
static inline void batched_product_add(BatchMatrix c, BatchMatrix a, BatchMatrix b, BatchSize n, float alpha,
                                       const void* d, float beta, Context* ctx) {
    BatchKey key = batch_key(&c, &a, &b, n, ctx);
    BatchPlan* plan = batch_plan(&key, ctx);
    BatchAddend more = {.d = d, .beta = beta};
    if (plan->usable) {
        cublaslt_note(ctx, &plan->algorithm);
        cublasCheck(cublasLtMatmul(ctx->cublaslt, &plan->operation, &alpha, b.p, &plan->b, a.p, &plan->a, &beta, d,
                                   &plan->c, c.p, &plan->c, &plan->algorithm, ctx->cublaslt_workspace,
                                   CUBLASLT_WORKSPACE_BYTES, ctx->stream));
    } else batched_product_plain(c.p, a.p, b.p, &key, alpha, more, ctx);
}

// C = alpha A B.
static inline void batched_product(BatchMatrix c, BatchMatrix a, BatchMatrix b, BatchSize n, float alpha,
                                   Context* ctx) {
    batched_product_add(c, a, b, n, alpha, c.p, 0, ctx);
}

#endif
#endif
