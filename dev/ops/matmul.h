/* matmul: all directions, both modes, fused GELU, with and without bias; sizes around and below the CPU version's tiles
 * and blocks. matmul_bench.h has the bench. */
#ifndef DEV_OPS_MATMUL_H
#define DEV_OPS_MATMUL_H

#include <float.h>

#include "llmc/ops/matmul/matmul.h"
#include "op.h"

// kind 0: without a bias; 1: with one.
RUN_AND_WANT(matmul, forward,
             matmul_forward(k->y.device, k->x.device, (Linear){k->w.device, k->kind ? k->b.device : NULL}, k->N, k->IC,
                            k->OC, k->mode, k->ctx),
             matmul_forward_ref(k->y.want, k->x.host, k->w.host, k->kind ? k->b.host : NULL, k->N, k->IC, k->OC,
                                k->mode));
RUN_AND_WANT(matmul, backward_input,
             matmul_backward_input(k->dx.device, k->dy.device, k->w.device, k->N, k->IC, k->OC, k->mode, k->ctx),
             matmul_backward_input_ref(k->dx.want, k->dy.host, k->w.host, k->N, k->IC, k->OC, k->mode));
RUN_AND_WANT(matmul, backward_weight,
             matmul_backward_weight((LinearGrads){k->dw.device_real, k->kind ? k->db.device_real : NULL}, k->dy.device,
                                    k->x.device, k->N, k->IC, k->OC, k->mode, k->ctx),
             matmul_backward_weight_ref(k->dw.want, k->kind ? k->db.want : NULL, k->dy.host, k->x.host, k->N, k->IC,
                                        k->OC, k->mode));

// kind: the form of GELU.
RUN_AND_WANT(matmul, gelu_forward,
             matmul_gelu_forward(k->y.device, k->pre.device, k->x.device, (Linear){k->w.device, k->b.device}, k->N,
                                 k->IC, k->OC, (Gelu)k->kind, k->ctx),
             matmul_gelu_forward_ref(k->y.want, k->pre.want, k->x.host, k->w.host, k->b.host, k->N, k->IC, k->OC,
                                     (Gelu)k->kind));

static inline void matmul_run_gelu_backward(OpCase* k, real* dbias) {
    BiasGrad d = {dbias, k->mode};
    matmul_gelu_backward_input(k->dbefore.device, d, k->dy.device, k->w.device, k->before.device, k->N, k->IC, k->OC,
                               (Gelu)k->kind, k->ctx);
}

OP_FN(matmul_run_gelu_backward_input) { matmul_run_gelu_backward(k, NULL); }

OP_FN(matmul_run_gelu_backward_bias) { matmul_run_gelu_backward(k, k->dbias.device_real); }

OP_FN(matmul_want_gelu_backward) {
    matmul_gelu_backward_input_ref(k->dbefore.want, k->dy.host, k->w.host, k->before.host, k->N, k->IC, k->OC,
                                   (Gelu)k->kind);
}

// Each of the n additions that follow one another in a sum errs by up to half an epsilon of what was summed so
// far, with random signs. The CPU sums blocks of 256 terms apart, then the sums of the blocks. On the GPU fp32 products
// may be summed in one go, and tensor cores add 16 products at a time, but cut the digits off instead of rounding:
// those errors have one sign.
static inline double matmul_tolerance(int terms) {
    double epsilon = sizeof(real) == sizeof(double) ? DBL_EPSILON : FLT_EPSILON;
    if (sizeof(floatX) < sizeof(real)) return epsilon * (4 + terms / 8);
    if (HAS_DEVICE_MEMORY) return epsilon * (4 + sqrt(terms));
    return epsilon * (2 + sqrt(min_int(terms, 256) + terms / 256));
}

// Error bound of an epilogue's GELU, for a downloaded array: the hardware's tanh is accurate to 2^-11 only.
static inline double matmul_epilogue_error(Array a) { return array_rounding(a) > 0 ? 4e-3 : 0; }

// Where no epilogue adds the bias, the sum is rounded to floatX before and after; so it is where cuBLASLt adds to y (seen
// in fp16: 0.86 of the last digit). The CPU sums db in double.
OP_FN(matmul_after) {
    k->y.slack = matmul_tolerance(k->IC) + (k->kind || k->mode == ADD ? array_rounding(k->y) : 0);
    k->dx.slack = matmul_tolerance(k->OC) + (k->mode == ADD ? array_rounding(k->dx) : 0);
    k->dw.slack = matmul_tolerance(k->N);
    k->db.slack = matmul_tolerance(HAS_DEVICE_MEMORY ? k->N : 1);
}

// y for the launcher's own pre: 3e-7 as in ops/common/activation.h. An epilogue uses unrounded pre; |gelu'| < 1.13.
OP_FN(matmul_after_gelu_forward) {
    Harness* h = k->h;
    k->pre.magnitude = (real*)case_memory(h, k->pre.n * sizeof(real));
    matmul_forward_ref(k->pre.magnitude, array_absolute(h, k->x), array_absolute(h, k->w), array_absolute(h, k->b),
                       k->N, k->IC, k->OC, SET);
    k->pre.slack = matmul_tolerance(k->IC) + array_rounding(k->pre);
    for (size_t i = 0; i < k->y.n; i++) k->y.want[i] = (real)gelu_exact(k->pre.host[i], (Gelu)k->kind);
    k->y.slack = tolerance(5e-7) + 1.4 * array_rounding(k->y) + matmul_epilogue_error(k->y);
}

// |gelu'| < 1.13, and the launcher's is within 1e-6; without an epilogue the product is rounded to floatX too.
OP_FN(matmul_after_gelu_backward) {
    Harness* h = k->h;
    double product = 1.2 * (matmul_tolerance(k->OC) + array_rounding(k->dbefore));
    k->dbefore.magnitude = (real*)case_memory(h, k->dbefore.n * sizeof(real));
    matmul_backward_input_ref(k->dbefore.magnitude, array_absolute(h, k->dy), array_absolute(h, k->w), k->N, k->IC,
                              k->OC, SET);
    k->dbefore.slack = product + tolerance(1e-6) + 2 * matmul_epilogue_error(k->dbefore);
}

// Of the launcher's own dpre, which a kernel may sum before it rounds it.
OP_FN(matmul_after_gelu_backward_bias) {
    Harness* h = k->h;
    matmul_after_gelu_backward(k);
    matmul_backward_bias_ref(k->dbias.want, k->dbefore.host, k->N, k->IC, k->mode);
    real* sizes = array_absolute(h, k->dbefore);
    for (size_t i = 0; i < k->dbefore.n; i++) sizes[i] = (real)fmax(sizes[i], array_smallest(k->dbefore));
    k->dbias.magnitude = absolute_of(h, k->dbias.initial, k->dbias.n);
    matmul_backward_bias_ref(k->dbias.magnitude, sizes, k->N, k->IC, k->mode);
    k->dbias.slack = matmul_tolerance(HAS_DEVICE_MEMORY ? k->N : 1) + array_rounding(k->dbefore);
}

static const Arg MATMUL_ARGS[] =
    ARGS(ARG(x, "N IC", IN, 1), ARG(w, "OC IC", IN, 1), ARG(b, "OC", IN, 1), ARG(y, "N OC", BY_MODE, 0, 0, NULL, 1),
         ARG(dy, "N OC", IN, 1, 0, "y"), ARG(dx, "N IC", BY_MODE, 0, 0, "x", 1),
         ARG(dw, "OC IC", BY_MODE, 0, 0, "w", 1), ARG(db, "OC", BY_MODE, 0, 0, "b", 1));
static const Arg MATMUL_GELU_ARGS[] =
    ARGS(ARG(x, "N IC", IN, 1), ARG(w, "OC IC", IN, 1), ARG(b, "OC", IN, 1), ARG(pre, "N OC", OUT), ARG(y, "N OC", OUT),
         ARG(dy, "N OC", IN, 1), ARG(before, "N IC", IN, 2), ARG_AS("dpre", dbefore, "N IC", OUT),
         ARG(dbias, "IC", BY_MODE));
static const int MATMUL_ROWS[][3] = {
    {1, 1, 1},       {1, 48, 33},     {77, 48, 144},   {77, 33, 1},     {5, 300, 97},
    {3, 768, 48},    {33, 7, 600},    {300, 103, 77},  {600, 131, 33},  {17, 520, 1030},
    {512, 128, 256}, {64, 1600, 64},  {449, 128, 256}, {501, 128, 256},  // of the same range as 512
    {1, 1600, 768},  {17, 768, 1024}, {1, 1024, 1600}, {1024, 48, 64},
};
static const int MATMUL_GRAD[] = {7, 33, 19};

static const Op MATMUL = {OP_OF("matmul", "N IC OC", MATMUL_ARGS, MATMUL_ROWS),
                          .passes = {{"forward", "y", OP_PAIR(matmul, forward), NULL, matmul_after},
                                     {"backward_weight", "dw db", OP_PAIR(matmul, backward_weight), NULL, matmul_after},
                                     {"backward_input", "dx", OP_PAIR(matmul, backward_input), NULL, matmul_after, 1}},
                          .kinds = {"alone", "bias"}, .grad = MATMUL_GRAD, .grad_tol = 1e-7};

static const Op MATMUL_GELU = {
    OP_OF("matmul", "N IC OC", MATMUL_GELU_ARGS, MATMUL_ROWS),
    .passes = {{"gelu_forward", "pre y", OP_PAIR(matmul, gelu_forward), NULL, matmul_after_gelu_forward},
               {"gelu_backward_input", "dpre", matmul_run_gelu_backward_input, matmul_want_gelu_backward, NULL,
                matmul_after_gelu_backward},
               {"gelu_backward_bias", "dpre dbias", matmul_run_gelu_backward_bias, matmul_want_gelu_backward, NULL,
                matmul_after_gelu_backward_bias}},
    .kinds = {"TANH", "ERF"}};

static inline OpCase* matmul_case(Harness* h, const Op* op, int pass, const int* row, Mode mode, int kind) {
    OpWay way = {mode, mode, kind, 0, 0};
    return op_case(h, op, &op->passes[pass], row, way);
}

#ifdef __CUDACC__

// Choices that were timed are found again in their text, and give the same bits.
static void test_matmul_autotune(Harness* h) {
    static const int ROW[] = {2048, 1024, 1024};
    Text chosen = {NULL, 0, 0};
    real *first_y = NULL, *first_dw = NULL;
    OpCase* k = matmul_case(h, &MATMUL_GELU, 0, ROW, ADD, GELU_TANH);
    Array dw = output(h, k->w.n, ADD);
    k->dw = dw;
    for (int round = 0; round < 2; round++) {  // times; reads the text
        matmul_plans_free(&h->ctx);
        h->ctx.autotune = round == 0;
        if (round == 1) {
            Text kept = {NULL, 0, 0};
            matmul_plans_load(&h->ctx, chosen.text);
            matmul_plans_text(&h->ctx, &kept);
            expect_true(h, "choices that are not needed yet are kept",
                        kept.text && strcmp(kept.text, chosen.text) == 0);
            free(kept.text);
        }
        array_restore(dw);
        matmul_run_gelu_forward(k);
        matmul_run_backward_weight(k);
        Text now = {NULL, 0, 0};
        matmul_plans_text(&h->ctx, &now);
        if (round == 0) {
            first_y = copy_of(h, k->y), first_dw = copy_of(h, dw);
            chosen = now;
            continue;
        }
        expect_equal(h, "y", k->y, first_y);
        expect_equal(h, "dw", dw, first_dw);
        for (char* line = strtok(now.text, "\n"); line; line = strtok(NULL, "\n"))
            expect_true(h, "the choice is the first one", strstr(chosen.text, line) != NULL);
        k->N = 1999;  // of the same range of rows, which has one choice
        matmul_run_gelu_forward(k);
        Text after = {NULL, 0, 0};
        matmul_plans_text(&h->ctx, &after);
        expect_true(h, "no other choice", after.length == chosen.length);
        free(after.text), free(now.text);
    }
    case_end(h);
    free(chosen.text);
    matmul_plans_free(&h->ctx);
}

#endif

static inline void test_matmul(Harness* h) {
#ifdef __CUDACC__
    Op tanh_alone = MATMUL_GELU;  // no epilogue has ERF
    for (int pass = 0; tanh_alone.passes[pass].name; pass++) tanh_alone.passes[pass].kinds = 1;
    h->op = "matmul without epilogue", h->ctx.gelu_fusion = 0;
    op_test(h, &tanh_alone);
    h->op = "matmul", h->ctx.gelu_fusion = 1;
    if (h->is_quick) return;
    test_matmul_autotune(h);
#else
    (void)h;
#endif
}

// The sum of dy times a layer's output, whose input is gelu(before).
static inline double matmul_gelu_loss(void* state) {
    OpCase* k = (OpCase*)state;
    double loss = 0;
    for (size_t i = 0; i < k->x.n; i++) k->x.host[i] = (real)gelu_exact(k->before.host[i], (Gelu)k->kind);
    matmul_forward_ref(k->y.host, k->x.host, k->w.host, NULL, k->N, k->IC, k->OC, SET);
    for (size_t i = 0; i < k->y.n; i++) loss += (double)k->dy.host[i] * (double)k->y.host[i];
    return loss;
}

static inline void grad_matmul_gelu(Harness* h) {
    for (int kind = GELU_TANH; kind <= GELU_ERF; kind++) {
        OpCase* k = matmul_case(h, &MATMUL_GELU, 1, MATMUL_GRAD, SET, kind);
        Array x = k->before;
        op_reference(h, k, &MATMUL_GELU, &MATMUL_GELU.passes[1]);
        matmul_run_gelu_backward_input(k);
        expect_gradient(h, "dpre of the reference", matmul_gelu_loss, k, x.host, x.n, k->dbefore.want, 1e-7);
        expect_gradient(h, "dpre", matmul_gelu_loss, k, x.host, x.n, k->dbefore.host, 1e-7);
        case_end(h);
    }
}

#endif
