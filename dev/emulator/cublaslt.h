/* cuBLASLt on the CPU: the calls, attributes and epilogues that the project uses, as cuBLAS documents them for
 * cublasLtMatmul(). Sums in fp32. Two algorithms that differ in name alone: one for small matmuls, one for others.
 * Anything else is refused with a line on stderr.
 *
 *   D[i] = epilogue(alpha scale_a scale_b op(A[i]) op(B[i]) + beta C[i])      column-major; A, B: bf16, fp16, fp32, fp8
 *
 * As on a GPU, an epilogue with a second array needs rows of 16 bytes, and fp8 needs a transposed left operand. */
#ifndef DEV_EMULATOR_CUBLASLT_H
#define DEV_EMULATOR_CUBLASLT_H

#include <math.h>

#include "threads.h"

// The most terms or columns of a small matmul. Group graph of dev/test/equal.txt has steps on either side.
enum { EMULATED_SMALL = 80 };

// The contents of the opaque structs.
typedef struct {
    int32_t trans_a, trans_b, epilogue;
    int32_t bias_type;  // -1: D's
    const void* bias;
    void* aux;
    int64_t aux_ld;
    const float *scale_a, *scale_b;  // NULL: 1
} EmulatedProductDesc;

typedef struct {
    uint64_t rows, columns;
    int64_t ld, next;  // elements from column to column, and from matrix to matrix
    int32_t type, batch;
} EmulatedLayout;

static_assert(sizeof(EmulatedProductDesc) <= sizeof(cublasLtMatmulDescOpaque_t), "it is kept in the opaque struct");
static_assert(sizeof(EmulatedLayout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "it is kept in the opaque struct");

static inline cublasStatus_t emulated_refuse(const char* what, int number) {
    fprintf(stderr, "emulator: cuBLASLt's %s %d is not known\n", what, number);
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

// An attribute and where its value is kept. An attribute that a list lacks is one that the products would ignore.
typedef struct {
    int name;
    size_t offset, bytes;
} EmulatedAttribute;

static inline cublasStatus_t emulated_set(void* p, const EmulatedAttribute* list, size_t count, int name,
                                          const void* value, size_t bytes, const char* what) {
    for (size_t i = 0; i < count; i++) {
        if (list[i].name != name) continue;
        if (!value || list[i].bytes != bytes) return CUBLAS_STATUS_INVALID_VALUE;
        memcpy((char*)p + list[i].offset, value, bytes);
        return CUBLAS_STATUS_SUCCESS;
    }
    return emulated_refuse(what, name);
}

#define EMULATED_AT(type, field, name)                                                                                 \
    { name, offsetof(type, field), sizeof(((type*)NULL)->field) }

// ---------------------------------------------------------------------------------------------------------
// Numbers

static inline int emulated_is_fp8(int type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

static inline size_t emulated_size(int type) {
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF || type == CUDA_R_16F ? 2 : 1;
}

static inline float emulated_load(const void* p, int64_t i, int type) {
    if (type == CUDA_R_32F) return ((const float*)p)[i];
    if (type == CUDA_R_16BF) return __bfloat162float(((const __nv_bfloat16*)p)[i]);
    if (type == CUDA_R_16F) return __half2float(((const __half*)p)[i]);
    __nv_fp8_interpretation_t format = type == CUDA_R_8F_E4M3 ? __NV_E4M3 : __NV_E5M2;
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(((const __nv_fp8_storage_t*)p)[i], format)));
}

static inline void emulated_store(void* p, int64_t i, int type, float x) {
    if (type == CUDA_R_32F) ((float*)p)[i] = x;
    else if (type == CUDA_R_16BF) ((__nv_bfloat16*)p)[i] = __float2bfloat16_rn(x);
    else ((__half*)p)[i] = __float2half_rn(x);
}

// op(X) of one matrix, as floats with the summed index contiguous: [outer, k].
static inline float* emulated_panel(const void* x, const EmulatedLayout* l, int64_t matrix, int k_is_row) {
    int64_t outer = (int64_t)(k_is_row ? l->columns : l->rows), k = (int64_t)(k_is_row ? l->rows : l->columns);
    float* panel = (float*)malloc((size_t)(outer * k) * sizeof(float));
    if (!panel) emulated_fault("no memory for an operand");
    const unsigned char* from = (const unsigned char*)x + (size_t)(matrix * l->next) * emulated_size(l->type);
#pragma omp parallel for
    for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < k; i++)
            panel[o * k + i] = emulated_load(from, k_is_row ? o * l->ld + i : i * l->ld + o, l->type);
    return panel;
}

// ---------------------------------------------------------------------------------------------------------
// Products

// What becomes of one sum; `row` and `at` are its place in the bias and in aux.
static inline float emulated_epilogue(const EmulatedProductDesc* p, float x, int64_t row, int64_t at, int type) {
    if (p->epilogue & CUBLASLT_EPILOGUE_BIAS) x += emulated_load(p->bias, row, p->bias_type >= 0 ? p->bias_type : type);
    if (p->epilogue & CUBLASLT_EPILOGUE_RELU) x = x > 0 ? x : 0;
    if (!(p->epilogue & CUBLASLT_EPILOGUE_GELU)) return x;
    emulated_store(p->aux, at, type, x);
    return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

static inline int emulated_known_epilogue(int epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_DEFAULT || epilogue == CUBLASLT_EPILOGUE_BIAS ||
           epilogue == CUBLASLT_EPILOGUE_RELU_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX ||
           epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

static inline int emulated_layout_is_valid(const EmulatedLayout* l, int64_t rows, int64_t columns, int batch) {
    return (int64_t)l->rows == rows && (int64_t)l->columns == columns && l->ld >= rows && l->batch == batch &&
           batch > 0;
}

// What a GPU refuses because of a shape is refused without a line: the programs expect that and do without.
static inline cublasStatus_t emulated_supported(const EmulatedProductDesc* p, const EmulatedLayout* a,
                                                const EmulatedLayout* b, const EmulatedLayout* c,
                                                const EmulatedLayout* d) {
    int64_t m = (int64_t)d->rows, n = (int64_t)d->columns, k = (int64_t)(p->trans_a ? a->rows : a->columns);
    int has_aux = (p->epilogue & 128) != 0;  // AUX bit of cublasLtEpilogue_t
    if (!emulated_known_epilogue(p->epilogue)) return emulated_refuse("epilogue", p->epilogue);
    if (c->type != d->type) return emulated_refuse("type of C, other than D's,", c->type);
    if (!emulated_layout_is_valid(a, p->trans_a ? k : m, p->trans_a ? m : k, d->batch) ||
        !emulated_layout_is_valid(b, p->trans_b ? n : k, p->trans_b ? k : n, d->batch) ||
        !emulated_layout_is_valid(c, m, n, d->batch) || !emulated_layout_is_valid(d, m, n, d->batch))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (has_aux && d->batch > 1) return emulated_refuse("second array, for a batch of", d->batch);
    if (has_aux && p->aux_ld < m) return CUBLAS_STATUS_INVALID_VALUE;
    if (has_aux && p->aux_ld % 8) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (emulated_is_fp8(a->type) && (!p->trans_a || p->trans_b || a->rows % 16)) return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

// A product with all that it was called with.
typedef struct {
    EmulatedProductDesc desc;
    EmulatedLayout la, lb, lc, ld;
    float alpha, beta;
    const void *a, *b, *c;
    void* d;
} EmulatedMatmul;

static inline void emulated_matmul(const EmulatedMatmul* o) {
    const EmulatedProductDesc* p = &o->desc;
    const EmulatedLayout *la = &o->la, *lb = &o->lb, *lc = &o->lc, *ld = &o->ld;
    int64_t m = (int64_t)ld->rows, n = (int64_t)ld->columns, k = (int64_t)(p->trans_a ? la->rows : la->columns);
    float scale = o->alpha * (p->scale_a ? *p->scale_a : 1) * (p->scale_b ? *p->scale_b : 1);
    for (int64_t i = 0; i < ld->batch; i++) {
        float *x = emulated_panel(o->a, la, i, p->trans_a), *y = emulated_panel(o->b, lb, i, !p->trans_b);
#pragma omp parallel for
        for (int64_t column = 0; column < n; column++)
            for (int64_t row = 0; row < m; row++) {
                float sum = 0;
                const float *left = x + row * k, *right = y + column * k;
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < k; j++) sum += left[j] * right[j];
                sum *= scale;
                if (o->beta != 0) sum += o->beta * emulated_load(o->c, i * lc->next + column * lc->ld + row, lc->type);
                sum = emulated_epilogue(p, sum, row, column * p->aux_ld + row, ld->type);
                emulated_store(o->d, i * ld->next + column * ld->ld + row, ld->type, sum);
            }
        free(x);
        free(y);
    }
}

extern "C" {

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t layout_a, const void* b, cublasLtMatrixLayout_t layout_b,
                              const void* beta, const void* c, cublasLtMatrixLayout_t layout_c, void* d,
                              cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t* algorithm, void*, size_t,
                              cudaStream_t) {
    EmulatedMatmul p = {*(const EmulatedProductDesc*)operation,
                        *(const EmulatedLayout*)layout_a,
                        *(const EmulatedLayout*)layout_b,
                        *(const EmulatedLayout*)layout_c,
                        *(const EmulatedLayout*)layout_d,
                        *(const float*)alpha,
                        *(const float*)beta,
                        a,
                        b,
                        c,
                        d};
    cublasStatus_t status = emulated_supported(&p.desc, &p.la, &p.lb, &p.lc, &p.ld);
    if (status == CUBLAS_STATUS_SUCCESS)
        emulated_do(
            EMULATED_PRODUCT, [=] { emulated_matmul(&p); }, (int)algorithm->data[0]);
    return status;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t, int count,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
    *found = 0;
    cublasStatus_t status =
        emulated_supported((const EmulatedProductDesc*)operation, (const EmulatedLayout*)a, (const EmulatedLayout*)b,
                           (const EmulatedLayout*)c, (const EmulatedLayout*)d);
    if (count < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    memset(results, 0, sizeof *results);
    const EmulatedLayout* left = (const EmulatedLayout*)a;
    uint64_t terms = ((const EmulatedProductDesc*)operation)->trans_a ? left->rows : left->columns;
    results->algo.data[0] = terms > EMULATED_SMALL && ((const EmulatedLayout*)d)->columns > EMULATED_SMALL;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t*, cublasLtMatmulHeuristicResult_t* result) {
    memset(result, 0, sizeof *result);
    return emulated_supported((const EmulatedProductDesc*)operation, (const EmulatedLayout*)a, (const EmulatedLayout*)b,
                              (const EmulatedLayout*)c, (const EmulatedLayout*)d);
}

// ---------------------------------------------------------------------------------------------------------
// Descriptors

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t operation, size_t bytes,
                                               cublasComputeType_t compute, cudaDataType_t scale) {
    EmulatedProductDesc p = {0, 0, CUBLASLT_EPILOGUE_DEFAULT, -1, NULL, NULL, 0, NULL, NULL};
    memset(operation, 0, bytes);
    memcpy(operation, &p, sizeof p);
    if (compute != CUBLAS_COMPUTE_32F && compute != CUBLAS_COMPUTE_32F_FAST_TF32)
        return emulated_refuse("compute type", compute);
    return scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS : emulated_refuse("scale type", scale);
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    *operation = (cublasLtMatmulDesc_t)malloc(sizeof **operation);
    return cublasLtMatmulDescInit_internal(*operation, sizeof **operation, compute, scale);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t p) { return free(p), CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t name,
                                              const void* value, size_t bytes) {
    static const EmulatedAttribute LIST[] = {
        EMULATED_AT(EmulatedProductDesc, trans_a, CUBLASLT_MATMUL_DESC_TRANSA),
        EMULATED_AT(EmulatedProductDesc, trans_b, CUBLASLT_MATMUL_DESC_TRANSB),
        EMULATED_AT(EmulatedProductDesc, epilogue, CUBLASLT_MATMUL_DESC_EPILOGUE),
        EMULATED_AT(EmulatedProductDesc, bias, CUBLASLT_MATMUL_DESC_BIAS_POINTER),
        EMULATED_AT(EmulatedProductDesc, bias_type, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE),
        EMULATED_AT(EmulatedProductDesc, aux, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER),
        EMULATED_AT(EmulatedProductDesc, aux_ld, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD),
        EMULATED_AT(EmulatedProductDesc, scale_a, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER),
        EMULATED_AT(EmulatedProductDesc, scale_b, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER),
    };
    if (name == CUBLASLT_MATMUL_DESC_FAST_ACCUM) return CUBLAS_STATUS_SUCCESS;  // all sums are in fp32
    return emulated_set(operation, LIST, sizeof LIST / sizeof *LIST, name, value, bytes, "attribute of a product");
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t bytes, cudaDataType type,
                                                 uint64_t rows, uint64_t columns, int64_t ld) {
    EmulatedLayout l = {rows, columns, ld, 0, type, 1};
    memset(layout, 0, bytes);
    memcpy(layout, &l, sizeof l);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
    *layout = (cublasLtMatrixLayout_t)malloc(sizeof **layout);
    return cublasLtMatrixLayoutInit_internal(*layout, sizeof **layout, type, rows, columns, ld);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return free(l), CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t name,
                                                const void* value, size_t bytes) {
    static const EmulatedAttribute LIST[] = {
        EMULATED_AT(EmulatedLayout, rows, CUBLASLT_MATRIX_LAYOUT_ROWS),
        EMULATED_AT(EmulatedLayout, columns, CUBLASLT_MATRIX_LAYOUT_COLS),
        EMULATED_AT(EmulatedLayout, ld, CUBLASLT_MATRIX_LAYOUT_LD),
        EMULATED_AT(EmulatedLayout, batch, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT),
        EMULATED_AT(EmulatedLayout, next, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET),
    };
    return emulated_set(layout, LIST, sizeof LIST / sizeof *LIST, name, value, bytes, "attribute of a layout");
}

// There is nothing to prefer: a product needs no workspace and no alignment.
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
    return *p = NULL, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return *handle = NULL, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
const char* cublasLtGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS         ? "success"
           : status == CUBLAS_STATUS_INVALID_VALUE ? "invalid value"
                                                   : "not supported by the emulator";
}

}  // extern "C"

#endif
