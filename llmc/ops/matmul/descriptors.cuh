/* The cuBLASLt descriptors of a GEMM: operands, layouts, epilogue, formats. plan.cuh chooses the algorithm. */
#ifndef LLMC_OPS_MATMUL_DESCRIPTORS_CUH
#define LLMC_OPS_MATMUL_DESCRIPTORS_CUH

#include "llmc/base/rounding.h"
#include "llmc/device/cublaslt.cuh"
#include "llmc/ops/matmul/epilogue.cuh"
// D (SET or ADD) = A B in cuBLASLt's column-major terms. `bias` and `aux` (GELU's input) are used only by epilogues
// that take them.
typedef struct {
    const void *a, *b;  // floatX, or fp8
    void* d;
    const floatX* bias;
    floatX* aux;
    int N;                              // rows
    const real *a_inverse, *b_inverse;  // fp8: factors that undo the scaling, [1] each, on the device
} MatmulOperands;

// Everything on which the choice of an algorithm depends. All members are int, because keys are compared as bytes.
typedef struct {
    int kind, N, IC, OC;  // kind: the MatmulPass, plus MATMUL_PASSES if the operands are fp8; N: in a plan, the largest
                          // of its range
    int mode, epilogue, tf32;
    int align_a, align_b, align_d;  // of the pointers, in bytes, at most 256
} MatmulKey;

typedef struct MatmulPlan {
    struct MatmulPlan* next;
    MatmulKey key;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    int rows;  // the N that the layouts are set to
    cublasLtMatmulAlgo_t algorithm;
    int usable;          // 0: cuBLASLt does not support this shape with this epilogue
    float microseconds;  // measured; 0: not timed
} MatmulPlan;

static inline int matmul_has_bias(int epilogue) { return (epilogue & CUBLASLT_EPILOGUE_BIAS) != 0; }
static inline int matmul_has_aux(int epilogue) { return (epilogue & 128) != 0; }  // AUX bit of cublasLtEpilogue_t

static inline int matmul_is_fp8(const MatmulKey* k) { return k->kind >= MATMUL_PASSES; }
static inline MatmulPass matmul_pass(const MatmulKey* k) { return (MatmulPass)(k->kind % MATMUL_PASSES); }

static inline void matmul_check(cublasStatus_t status, const MatmulPlan* plan, const char* tried) {
    static const char* const KINDS[] = {"forward", "backward_input", "backward_weight"};
    const MatmulKey* k = &plan->key;
    if (status != CUBLAS_STATUS_SUCCESS)
        die(FAILED,
            "matmul %s%s N=%d IC=%d OC=%d %s, cuBLASLt epilogue %d, operands aligned to %d, %d, %d bytes: %s: %s",
            KINDS[matmul_pass(k)], !matmul_is_fp8(k) ? "" : " in fp8", plan->rows, k->IC, k->OC,
            k->mode == ADD ? "ADD" : "SET", k->epilogue, k->align_a, k->align_b, k->align_d, tried,
            cublasLtGetStatusString(status));
}

// Rows and columns of D, column-major.
static inline int matmul_d_rows(const MatmulKey* k) { return matmul_pass(k) == MATMUL_FORWARD ? k->OC : k->IC; }
static inline int matmul_d_columns(const MatmulKey* k) {
    return matmul_pass(k) == MATMUL_BACKWARD_WEIGHT ? k->OC : k->N;
}
static inline size_t matmul_d_size(const MatmulKey* k) {
    return (size_t)matmul_d_rows(k) * (size_t)matmul_d_columns(k);
}

// The largest N of the range that N belongs to.
static inline int matmul_range(int N) {
    int step = 1;
    while (N > 8 * step) step *= 2;
    return (int)round_up((size_t)N, (size_t)step);
}

static inline cublasLtMatrixLayout_t matmul_layout(cudaDataType_t type, int rows, int columns) {
    cublasLtMatrixLayout_t layout;
    cublasCheck(cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)rows, (uint64_t)columns, rows));
    return layout;
}

// The operands in fp8, each with the summed index contiguous: cuBLASLt has no other layout on sm_90. The gradient dy is
// E5M2, other operands are E4M3.
static inline void matmul_plan_describe_fp8(MatmulPlan* plan) {
    const MatmulKey* k = &plan->key;
    MatmulPass pass = matmul_pass(k);
    int sum = (int)quantize_rows(matmul_terms(pass, k->N, k->IC, k->OC));
    cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)matmul_fp8_is_fast(sum));
    if (matmul_has_bias(k->epilogue))
        cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)cublaslt_type());
    plan->a = matmul_layout(CUDA_R_8F_E4M3, sum, matmul_d_rows(k));
    plan->b = matmul_layout(pass == MATMUL_FORWARD ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2, sum, matmul_d_columns(k));
}

static inline void matmul_plan_describe(MatmulPlan* plan) {
    const MatmulKey* k = &plan->key;
    MatmulPass pass = matmul_pass(k);
    cudaDataType_t type = cublaslt_type();
    cublasCheck(cublasLtMatmulDescCreate(&plan->operation, cublaslt_compute(k->tf32), CUDA_R_32F));
    cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, (cublasLtEpilogue_t)k->epilogue);
    if (matmul_has_aux(k->epilogue))
        cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)matmul_d_rows(k));
    plan->d = matmul_layout(pass == MATMUL_BACKWARD_WEIGHT ? CUDA_R_32F : type, matmul_d_rows(k), matmul_d_columns(k));
    if (matmul_is_fp8(k)) matmul_plan_describe_fp8(plan);
    else {
        cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, pass == MATMUL_FORWARD ? CUBLAS_OP_T : CUBLAS_OP_N);
        cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB,
                     pass == MATMUL_BACKWARD_WEIGHT ? CUBLAS_OP_T : CUBLAS_OP_N);
        plan->a = matmul_layout(type, k->IC, pass == MATMUL_BACKWARD_WEIGHT ? k->N : k->OC);  // x, or else w
        plan->b = matmul_layout(type, pass == MATMUL_FORWARD ? k->IC : k->OC, k->N);          // x, or else dy
    }
    plan->rows = k->N;
}

static inline void matmul_set_rows(MatmulPlan* plan, int N) {
    uint64_t columns = (uint64_t)N, sum = quantize_rows(N);
    int64_t stride = (int64_t)sum;
    int is_weight = matmul_pass(&plan->key) == MATMUL_BACKWARD_WEIGHT;
    cublasLtMatrixLayout_t with_rows[] = {plan->b, is_weight ? plan->a : plan->d};
    if (plan->rows == N) return;
    for (int i = 0; i < 2; i++)
        if (is_weight && matmul_is_fp8(&plan->key)) {  // both are transposed and padded
            cublasCheck(cublasLtMatrixLayoutSetAttribute(with_rows[i], CUBLASLT_MATRIX_LAYOUT_ROWS, &sum, sizeof sum));
            cublasCheck(
                cublasLtMatrixLayoutSetAttribute(with_rows[i], CUBLASLT_MATRIX_LAYOUT_LD, &stride, sizeof stride));
        } else
            cublasCheck(
                cublasLtMatrixLayoutSetAttribute(with_rows[i], CUBLASLT_MATRIX_LAYOUT_COLS, &columns, sizeof columns));
    plan->rows = N;
}

static inline void matmul_set_scales(MatmulPlan* plan, const MatmulOperands* o) {
    if (!matmul_is_fp8(&plan->key)) return;
    cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, o->a_inverse);
    cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, o->b_inverse);
}

// Prepare the plan for a call with these operands.
static inline void matmul_plan_set_operands(MatmulPlan* plan, const MatmulOperands* o) {
    matmul_set_rows(plan, o->N);
    matmul_set_scales(plan, o);
    if (matmul_has_bias(plan->key.epilogue)) cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, o->bias);
    if (matmul_has_aux(plan->key.epilogue))
        cublaslt_set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, o->aux);
}

// The algorithms that cuBLASLt proposes, best guess first. Returns their number, which may be 0.
static inline int matmul_propose(const MatmulPlan* plan, cublasLtMatmulHeuristicResult_t* results, int limit,
                                 Context* ctx) {
    const MatmulKey* k = &plan->key;
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;  // split-K keeps its partial sums in fp32
    if (matmul_pass(k) == MATMUL_BACKWARD_WEIGHT) reduction |= CUBLASLT_REDUCTION_SCHEME_INPLACE;  // D is fp32 itself
    CublasltProblem problem = {.operation = plan->operation,
                               .a = plan->a,
                               .b = plan->b,
                               .d = plan->d,
                               .align_a = (uint32_t)k->align_a,
                               .align_b = (uint32_t)k->align_b,
                               .align_d = (uint32_t)k->align_d,
                               .reduction = reduction};
    int count;
    matmul_check(cublaslt_propose(&count, results, limit, &problem, ctx), plan, "cublasLtMatmulAlgoGetHeuristic");
    return count;
}

#endif
