/* Cases of the kernels that follow a product on the GPU, without the products. cuBLASLt's kernels crash
 * compute-sanitizer's racecheck, so it checks only our own kernels here. */
#ifndef DEV_OPS_MATMUL_EPILOGUE_H
#define DEV_OPS_MATMUL_EPILOGUE_H

#include "matmul_bench.h"

#ifdef __CUDACC__

OP_FN(matmul_epilogue_want_bias) { matmul_backward_bias_ref(k->db.want, k->dy.host, k->N, k->OC, k->mode); }

OP_FN(matmul_epilogue_after_bias) { k->db.slack = matmul_tolerance(k->N); }

// In place, and the case runs it more than once: from the same start each time. kind 2: db is not wanted.
OP_FN(matmul_epilogue_run_gelu) {
    matmul_gelu_backward_bias((BiasGrad){k->db.device_real, k->mode}, k->y.device, k->pre.device, k->N, k->OC,
                              (Gelu)k->kind, k->ctx);
}

OP_FN(matmul_epilogue_run_gelu_alone) {
    matmul_gelu_backward_bias((BiasGrad){NULL, k->mode}, k->y.device, k->pre.device, k->N, k->OC, (Gelu)k->kind,
                              k->ctx);
}

// dpre = gelu'(pre) dy in place of dy. Terms of db are good to 1e-6 of dy, and a kernel may sum them after it has rounded
// them.
OP_FN(matmul_epilogue_want_gelu_alone) {
    for (size_t i = 0; i < k->y.n; i++)
        k->y.want[i] = (real)(k->y.host[i] * gelu_derivative_exact(k->pre.host[i], (Gelu)k->kind));
}

OP_FN(matmul_epilogue_want_gelu) {
    real* sizes = array_absolute(k->h, k->y);
    matmul_epilogue_want_gelu_alone(k);
    for (size_t i = 0; i < k->y.n; i++) sizes[i] = (real)fmax(fabs((double)k->y.want[i]), sizes[i]);
    k->db.magnitude = array_absolute(k->h, k->db);
    matmul_backward_bias_ref(k->db.want, k->y.want, k->N, k->OC, k->mode);
    matmul_backward_bias_ref(k->db.magnitude, sizes, k->N, k->OC, k->mode);
}

OP_FN(matmul_epilogue_after_gelu) { k->db.slack = matmul_tolerance(k->N) + tolerance(1e-6) + array_rounding(k->y); }

static const Arg MATMUL_EPILOGUE_BIAS_ARGS[] = ARGS(ARG(dy, "N OC", IN, 1), ARG(db, "OC", BY_MODE, 0, 0, NULL, 1));
static const Arg MATMUL_EPILOGUE_ARGS[] =
    ARGS(ARG(pre, "N OC", IN, 2), ARG_AS("dpre", y, "N OC", IN_OUT, 1, 1e-6), ARG(db, "OC", BY_MODE));
static const int MATMUL_EPILOGUE_ROWS[][2] = {{1, 33},   {1, 48},    {1, 768},   {1, 1600},  {17, 33},    {17, 48},
                                              {17, 768}, {17, 1600}, {1000, 33}, {1000, 48}, {1000, 768}, {1000, 1600}};

static const Op MATMUL_EPILOGUE_BIAS = {
    OP_OF("matmul_epilogue", "N OC", MATMUL_EPILOGUE_BIAS_ARGS, MATMUL_EPILOGUE_ROWS),
    .passes = {{"backward_bias", "db", matmul_run_backward_bias, matmul_epilogue_want_bias, NULL,
                matmul_epilogue_after_bias}}};

static const Op MATMUL_EPILOGUE = {
    OP_OF("matmul_epilogue", "N OC", MATMUL_EPILOGUE_ARGS, MATMUL_EPILOGUE_ROWS),
    .passes = {{"gelu_backward_bias", "dpre db", OP_PAIR(matmul_epilogue, gelu), NULL, matmul_epilogue_after_gelu},
               {"gelu_backward", "dpre", OP_PAIR(matmul_epilogue, gelu_alone)}},
    .kinds = {"TANH", "ERF"}};

#endif
#endif
