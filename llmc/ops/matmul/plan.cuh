/* matmul's GEMMs on the GPU: cuBLASLt, with bias, the forward pass's GELU and ADD in its epilogue.
 *
 * A row-major [R, C] array is a column-major C x R matrix, so no operand is ever transposed in memory:
 *
 *   forward          y  (OC x N)  = w^T x      bias, and GELU with its input stored, in the epilogue
 *   backward input   dx (IC x N)  = w dy       times gelu'(pre) by the kernel that sums dbias
 *   backward weight  dw (IC x OC) = x dy^T     dw in full precision; db by a kernel of epilogue.cuh
 *
 * Numerics: GEMMs of floatX accumulate in fp32. fp32 inputs use TF32 only with ctx->tf32. Split-K adds its parts in
 * fp32 before rounding. GELU in the epilogue is the tanh form and reads the sum before it is rounded. GELU_ERF, fp32
 * and unaligned shapes use our own kernel after the GEMM. The epilogues that sum bias gradients are not used: they
 * measured four times slower than our kernels. GELU's derivative in the epilogue gained less than 0.1 % of a step.
 *
 * A plan holds the descriptors and the algorithm of a GEMM. It is made once for each shape and kept in
 * ctx->matmul_plans.
 *
 * Sequences differ in length, so the number of rows N changes from step to step. One plan serves a range of N,
 * identified by the range's largest N. There are four ranges per doubling of N, so a shape has few plans.
 *
 * With ctx->autotune the first call times cuBLASLt's candidates for the range's largest N on its own operands. Without
 * it cuBLASLt's first choice is used. A run turns autotuning off after its first step (device_set_autotune), so later
 * choices do not depend on which N came first, and a checkpoint holds everything that was timed. Choices can be saved
 * (matmul_plans_text) and loaded (matmul_plans_load), one line each, valid for the same GPU, library and type. */
#ifndef LLMC_OPS_MATMUL_PLAN_CUH
#define LLMC_OPS_MATMUL_PLAN_CUH

#include "llmc/ops/matmul/descriptors.cuh"
struct MatmulPlans {
    MatmulPlan *first, **end;  // in order of creation: plans of the training step come first
    char machine[320];         // GPU, library version, type: every saved line begins with it
    Text known;                // saved lines that were loaded
};

enum { MATMUL_CANDIDATES = 32, MATMUL_ROUNDS = 8 };
#define MATMUL_GAIN 1.05f       // speedup over cuBLASLt's first choice that another candidate needs
#define MATMUL_TIMED_FLOPS 4e9  // smaller GEMMs take about 10 us; text generation has hundreds of such shapes

// Launch a plan's GEMM with another algorithm. `d`: o->d, or a buffer in its place while candidates are timed.
static inline cublasStatus_t matmul_launch(const MatmulPlan* plan, const cublasLtMatmulAlgo_t* algorithm,
                                           const MatmulOperands* o, void* d, Context* ctx) {
    float one = 1, beta = plan->key.mode == ADD ? 1 : 0;
    cublaslt_note(ctx, algorithm);
    return cublasLtMatmul(ctx->cublaslt, plan->operation, &one, o->a, plan->a, o->b, plan->b, &beta, d, plan->d, d,
                          plan->d, algorithm, ctx->cublaslt_workspace, CUBLASLT_WORKSPACE_BYTES, ctx->stream);
}

// ---------------------------------------------------------------------------------------------------------
// Saving and loading choices

// The start of a line: "GPU version type kind N IC OC mode epilogue tf32 alignments ".
// The rest is "usable microseconds algorithm".
static inline void matmul_line_begin(Text* t, const struct MatmulPlans* plans, const MatmulKey* k) {
    text_printf(t, "%s %d %d %d %d %d %d %d %d %d %d ", plans->machine, k->kind, k->N, k->IC, k->OC, k->mode,
                k->epilogue, k->tf32, k->align_a, k->align_b, k->align_d);
}

static inline void matmul_line(Text* t, const struct MatmulPlans* plans, const MatmulPlan* plan) {
    const unsigned char* bytes = (const unsigned char*)&plan->algorithm;
    matmul_line_begin(t, plans, &plan->key);
    text_printf(t, "%d %.2f ", plan->usable, (double)plan->microseconds);
    for (size_t i = 0; i < sizeof plan->algorithm; i++) text_printf(t, "%02x", bytes[i]);
    text_append(t, "\n", 1);
}

// Fill in the plan from a loaded line. Returns 0 if there is no line for it that cuBLASLt accepts.
static inline int matmul_recall(MatmulPlan* plan, const struct MatmulPlans* plans, Context* ctx) {
    Text begin = {NULL, 0, 0};
    matmul_line_begin(&begin, plans, &plan->key);
    int found = 0;
    for (const char* at = plans->known.text; at && !found && (at = strstr(at, begin.text)); at++) {
        char hex[2 * sizeof plan->algorithm + 1];
        unsigned char* bytes = (unsigned char*)&plan->algorithm;
        cublasLtMatmulHeuristicResult_t result;
        if (at != plans->known.text && at[-1] != '\n') continue;
        static_assert(sizeof hex == 129, "the width in the next line");
        if (sscanf(at + begin.length, "%d %f %128[0-9a-f]", &plan->usable, &plan->microseconds, hex) != 3 ||
            strlen(hex) != sizeof hex - 1)
            continue;
        for (size_t i = 0; i < sizeof plan->algorithm; i++) {
            unsigned byte;
            sscanf(hex + 2 * i, "%2x", &byte);
            bytes[i] = (unsigned char)byte;
        }
        found =
            !plan->usable || (cublasLtMatmulAlgoCheck(ctx->cublaslt, plan->operation, plan->a, plan->b, plan->d,
                                                      plan->d, &plan->algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
                              result.workspaceSize <= CUBLASLT_WORKSPACE_BYTES);
    }
    free(begin.text);
    return found;
}

static inline struct MatmulPlans* matmul_plans(Context* ctx) {
    if (ctx->matmul_plans) return ctx->matmul_plans;
    struct MatmulPlans* plans = (struct MatmulPlans*)xcalloc(1, sizeof *plans);
    struct cudaDeviceProp properties;
    int device;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaGetDeviceProperties(&properties, device));
    for (char* c = properties.name; *c; c++)
        if (*c == ' ') *c = '_';
    snprintf(plans->machine, sizeof plans->machine, "%s %zu %s", properties.name, cublasLtGetVersion(), FLOATX_NAME);
    plans->end = &plans->first;
    ctx->matmul_plans = plans;
    return plans;
}

// Use the choices in `text`, written by matmul_plans_text in the run being resumed, instead of any loaded before, and
// time no new ones. If they are for another GPU, library or type, this only prints a warning.
static inline void matmul_plans_load(Context* ctx, const char* text) {
    struct MatmulPlans* plans = matmul_plans(ctx);
    size_t n = strlen(plans->machine);
    if (*text && (strncmp(text, plans->machine, n) != 0 || text[n] != ' ')) {
        int words = 0, length = 0;
        while (text[length] && (text[length] != ' ' || ++words < 3)) length++;
        warn("the matmul algorithms of the checkpoint are for %.*s (GPU, cuBLASLt, type), not for %s: they are chosen "
             "again, and the run will not continue bit for bit",
             length, text, plans->machine);
        return;
    }
    plans->known.length = 0;
    text_append(&plans->known, text, strlen(text));
    ctx->autotune = 0;
}

// Append a line for every choice timed so far, and for every unused loaded choice for this machine. Choices that were
// not timed are not saved, because cuBLASLt would make them again.
static inline void matmul_plans_text(Context* ctx, Text* t) {
    const struct MatmulPlans* plans = matmul_plans(ctx);
    for (MatmulPlan* p = plans->first; p; p = p->next)
        if (p->microseconds > 0) matmul_line(t, plans, p);
    size_t n = strlen(plans->machine);
    for (const char *line = plans->known.text, *end; line && (end = strchr(line, '\n')); line = end + 1) {
        int is_needed = 0;
        for (MatmulPlan* p = plans->first; p && !is_needed; p = p->next) {
            Text begin = {NULL, 0, 0};
            matmul_line_begin(&begin, plans, &p->key);
            is_needed = strncmp(line, begin.text, begin.length) == 0;
            free(begin.text);
        }
        if (!is_needed && strncmp(line, plans->machine, n) == 0 && line[n] == ' ')
            text_append(t, line, (size_t)(end + 1 - line));
    }
}

static inline void matmul_plans_free(Context* ctx) {
    struct MatmulPlans* plans = ctx->matmul_plans;
    if (!plans) return;
    for (MatmulPlan *p = plans->first, *next; p; p = next) {
        next = p->next;
        cublasCheck(cublasLtMatmulDescDestroy(p->operation));
        cublasCheck(cublasLtMatrixLayoutDestroy(p->a));
        cublasCheck(cublasLtMatrixLayoutDestroy(p->b));
        cublasCheck(cublasLtMatrixLayoutDestroy(p->d));
        free(p);
    }
    free(plans->known.text);
    free(plans);
    ctx->matmul_plans = NULL;
}

// ---------------------------------------------------------------------------------------------------------
// Choosing an algorithm

// Time the candidates and move the fastest to results[0]. They run on the operands of the call that needs the plan and
// may overwrite d, because that call sets d afterwards. If it adds to d, candidates write to a buffer of the same size
// instead. They take turns, so that clock changes affect all of them. Returns microseconds, or 0 if there was no memory
// for the buffer.
//
// Small gains are ignored. In a training step GEMMs run at the GPU's power limit. There cuBLASLt's first choice, with
// its large tiles, needs less power than many candidates that are slightly faster alone (dev/LOG.md).
static inline float matmul_time_candidates(const MatmulPlan* plan, const MatmulOperands* o,
                                           cublasLtMatmulHeuristicResult_t* results, int count, Context* ctx) {
    const MatmulKey* k = &plan->key;
    size_t bytes = matmul_d_size(k) * (matmul_pass(k) == MATMUL_BACKWARD_WEIGHT ? sizeof(real) : sizeof(floatX));
    void* d = o->d;
    if (k->mode == ADD) {
        if (cudaMalloc(&d, bytes) != cudaSuccess) {
            cudaGetLastError();
            return 0;
        }
        cudaCheck(cudaMemsetAsync(d, 0, bytes, ctx->stream));
    }
    cudaEvent_t events[MATMUL_CANDIDATES + 1];
    float fastest[MATMUL_CANDIDATES], best_time = INFINITY;  // of all rounds
    int alive[MATMUL_CANDIDATES], best = 0;
    for (int i = 0; i <= count; i++) cudaCheck(cudaEventCreate(&events[i]));
    for (int i = 0; i < count; i++) alive[i] = 1, fastest[i] = INFINITY;
    for (int round = -1; round < MATMUL_ROUNDS; round++) {  // round -1 loads the kernels
        for (int i = 0; i < count; i++)                     // keeps the GPU busy, so that times exclude launch latency
            if (alive[i] && matmul_launch(plan, &results[i].algo, o, d, ctx) == CUBLAS_STATUS_SUCCESS) break;
        cudaCheck(cudaEventRecord(events[0], ctx->stream));
        for (int i = 0; i < count; i++) {
            if (alive[i]) alive[i] = matmul_launch(plan, &results[i].algo, o, d, ctx) == CUBLAS_STATUS_SUCCESS;
            cudaCheck(cudaEventRecord(events[i + 1], ctx->stream));
        }
        cudaCheck(cudaEventSynchronize(events[count]));
        for (int i = 0; i < count && round >= 0; i++) {
            if (!alive[i]) continue;
            float time;
            cudaCheck(cudaEventElapsedTime(&time, events[i], events[i + 1]));
            fastest[i] = fminf(fastest[i], time);
            best_time = fminf(best_time, time);
        }
        for (int i = 0; i < count && round == 0; i++) alive[i] = alive[i] && fastest[i] <= 1.3f * best_time;
    }
    for (int i = 1; i < count; i++)
        if (fastest[i] < fastest[best]) best = i;
    if (fastest[0] <= MATMUL_GAIN * fastest[best]) best = 0;
    results[0] = results[best];
    for (int i = 0; i <= count; i++) cudaCheck(cudaEventDestroy(events[i]));
    if (d != o->d) cudaCheck(cudaFree(d));
    return 1000 * fastest[best];
}

static inline void matmul_plan_choose(MatmulPlan* plan, const MatmulOperands* o, Context* ctx) {
    cublasLtMatmulHeuristicResult_t results[MATMUL_CANDIDATES];
    const MatmulKey* k = &plan->key;
    int timed = ctx->autotune && 2.0 * k->N * k->IC * k->OC >= MATMUL_TIMED_FLOPS;
    int count = matmul_propose(plan, results, timed ? MATMUL_CANDIDATES : 1, ctx);
    plan->usable = count > 0;
    matmul_plan_set_operands(plan, o);
    plan->microseconds = timed && count ? matmul_time_candidates(plan, o, results, count, ctx) : 0;
    if (count) plan->algorithm = results[0].algo;
}

// Return the plan of a GEMM. It is made on first use. Fills in the range and the alignments of `key`.
static inline MatmulPlan* matmul_plan(MatmulKey key, const MatmulOperands* o, Context* ctx) {
    struct MatmulPlans* plans = matmul_plans(ctx);
    key.N = matmul_range(o->N);
    key.align_a = pointer_alignment(o->a);
    key.align_b = pointer_alignment(o->b);
    key.align_d = pointer_alignment(o->d);
    for (MatmulPlan* p = plans->first; p; p = p->next)
        if (memcmp(&p->key, &key, sizeof key) == 0) return p;
    MatmulPlan* plan = (MatmulPlan*)xcalloc(1, sizeof *plan);
    plan->key = key;
    matmul_plan_describe(plan);
    matmul_set_scales(plan, o);
    if (!matmul_recall(plan, plans, ctx)) matmul_plan_choose(plan, o, ctx);
    *plans->end = plan;
    plans->end = &plan->next;
    return plan;
}

// ---------------------------------------------------------------------------------------------------------
// Products

static inline MatmulKey matmul_key(int kind, int N, int IC, int OC, Mode mode, Context* ctx) {
    MatmulKey key = {.kind = kind, .N = N, .IC = IC, .OC = OC, .mode = mode};
    key.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    key.tf32 = ctx->tf32;
    return key;
}

// Run a GEMM, with the bias in its epilogue if there is one. Returns 1. If `key` has another epilogue, which cuBLASLt
// does not support for this shape, returns 0 and does nothing.
static inline int matmul_product(MatmulKey key, const MatmulOperands* o, Context* ctx) {
    const int is_plain = key.epilogue == CUBLASLT_EPILOGUE_DEFAULT;
    if (is_plain && o->bias) key.epilogue = CUBLASLT_EPILOGUE_BIAS;
    MatmulPlan* plan = matmul_plan(key, o, ctx);
    if (!plan->usable && !is_plain) return 0;
    if (!plan->usable && o->bias) {
        MatmulOperands plain = *o;
        size_t n = (size_t)key.N * (size_t)key.OC;
        plain.bias = NULL, key.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
        matmul_product(key, &plain, ctx);
        matmul_bias_kernel<<<blocks_for(n, 256), 256, 0, ctx->stream>>>((floatX*)o->d, o->bias, n, key.OC);
        cudaCheck(cudaGetLastError());
        return 1;
    }
    if (!plan->usable) matmul_check(CUBLAS_STATUS_NOT_SUPPORTED, plan, "no algorithm");
    matmul_plan_set_operands(plan, o);
    cublaslt_note(ctx, &plan->algorithm);
    float one = 1, beta = key.mode == ADD ? 1 : 0;
    cublasStatus_t status =
        cublasLtMatmul(ctx->cublaslt, plan->operation, &one, o->a, plan->a, o->b, plan->b, &beta, o->d, plan->d, o->d,
                       plan->d, &plan->algorithm, ctx->cublaslt_workspace, CUBLASLT_WORKSPACE_BYTES, ctx->stream);
    if (status != CUBLAS_STATUS_SUCCESS && o->N != plan->key.N) {  // does not support every N of the range
        cublasLtMatmulHeuristicResult_t result;
        if (matmul_propose(plan, &result, 1, ctx)) status = matmul_launch(plan, &result.algo, o, o->d, ctx);
    }
    matmul_check(status, plan, "cublasLtMatmul");
    return 1;
}

// Run the forward GEMM with GELU in cuBLASLt's epilogue, if that is possible. Returns whether it did. If not, nothing
// was done.
static inline int matmul_gelu_epilogue(MatmulKey key, const MatmulOperands* o, Gelu gelu, Context* ctx) {
    int aligned = matmul_d_rows(&key) % 8 == 0 && pointer_alignment(o->aux) >= 16;
    if (!ctx->gelu_fusion || sizeof(floatX) != 2 || gelu != GELU_TANH || !aligned) return 0;
    key.epilogue = o->bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    return matmul_product(key, o, ctx);
}

#endif
