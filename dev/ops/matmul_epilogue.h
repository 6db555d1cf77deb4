/* Cases of the kernels that follow a product on the GPU, without the products. cuBLASLt's kernels crash
 * compute-sanitizer's racecheck, so it checks only our own kernels here. */
#ifndef DEV_OPS_MATMUL_EPILOGUE_H
#define DEV_OPS_MATMUL_EPILOGUE_H

#include "matmul_bench.h"

#ifdef __CUDACC__

static void matmul_epilogue_want_bias(void* state) {
    MatmulCase* k = (MatmulCase*)state;
    matmul_backward_bias_ref(k->db.want, k->dy.host, k->z.N, k->z.OC, k->z.mode);
}

static void matmul_epilogue_after_bias(void* state) {
    MatmulCase* k = (MatmulCase*)state;
    k->db.slack = matmul_tolerance(k->z.N);
}

// In place, and the case runs it more than once: from the same start each time. kind 2: db is not wanted.
static void matmul_epilogue_run_gelu(void* state) {
    MatmulCase* k = (MatmulCase*)state;
    BiasGrad d = {k->db.device_real, k->z.mode};
    matmul_gelu_backward_bias(d, k->y.device, k->pre.device, k->z.N, k->z.OC, (Gelu)k->z.kind, k->z.ctx);
}

static void matmul_epilogue_run_gelu_alone(void* state) {
    MatmulCase* k = (MatmulCase*)state;
    BiasGrad d = {NULL, k->z.mode};
    matmul_gelu_backward_bias(d, k->y.device, k->pre.device, k->z.N, k->z.OC, (Gelu)k->z.kind, k->z.ctx);
}

// dpre = gelu'(pre) dy in place of dy. Terms of db are good to 1e-6 of dy, and a kernel may sum them after it has rounded
// them.
static void matmul_epilogue_want_gelu_alone(void* state) {
    MatmulCase* k = (MatmulCase*)state;
    for (size_t i = 0; i < k->y.n; i++)
        k->y.want[i] = (real)(k->y.host[i] * gelu_derivative_exact(k->pre.host[i], (Gelu)k->z.kind));
}

static void matmul_epilogue_want_gelu(void* state) {
    MatmulCase* k = (MatmulCase*)state;
    real* sizes = array_absolute(k->z.h, k->y);
    matmul_epilogue_want_gelu_alone(k);
    for (size_t i = 0; i < k->y.n; i++) sizes[i] = (real)fmax(fabs((double)k->y.want[i]), sizes[i]);
    k->db.magnitude = array_absolute(k->z.h, k->db);
    matmul_backward_bias_ref(k->db.want, k->y.want, k->z.N, k->z.OC, k->z.mode);
    matmul_backward_bias_ref(k->db.magnitude, sizes, k->z.N, k->z.OC, k->z.mode);
}

static void matmul_epilogue_after_gelu(void* state) {
    MatmulCase* k = (MatmulCase*)state;
    k->db.slack = matmul_tolerance(k->z.N) + tolerance(1e-6) + array_rounding(k->y);
}

static const Arg MATMUL_EPILOGUE_BIAS_ARGS[] = {{"dy", offsetof(MatmulCase, dy), "N OC", IN, 1, 0},
                                                {"db", offsetof(MatmulCase, db), "OC", BY_MODE, 0, 0, NULL, 1},
                                                {NULL}};
static const Arg MATMUL_EPILOGUE_ARGS[] = {{"pre", offsetof(MatmulCase, pre), "N OC", IN, 2, 0},
                                           {"dpre", offsetof(MatmulCase, y), "N OC", IN_OUT, 1, 1e-6},
                                           {"db", offsetof(MatmulCase, db), "OC", BY_MODE},
                                           {NULL}};
static const int MATMUL_EPILOGUE_ROWS[][2] = {{1, 33},   {1, 48},    {1, 768},   {1, 1600},  {17, 33},    {17, 48},
                                              {17, 768}, {17, 1600}, {1000, 33}, {1000, 48}, {1000, 768}, {1000, 1600}};

static const Op MATMUL_EPILOGUE_BIAS = {
    .name = "matmul_epilogue",
    .bytes = sizeof(MatmulCase),
    .sizes = "N OC",
    .args = MATMUL_EPILOGUE_BIAS_ARGS,
    .passes = {{"backward_bias", "db", matmul_run_backward_bias, matmul_epilogue_want_bias, NULL,
                matmul_epilogue_after_bias}},
    .rows = SIZE_ROWS(MATMUL_EPILOGUE_ROWS),
};

static const Op MATMUL_EPILOGUE = {
    .name = "matmul_epilogue",
    .bytes = sizeof(MatmulCase),
    .sizes = "N OC",
    .args = MATMUL_EPILOGUE_ARGS,
    .passes = {{"gelu_backward_bias", "dpre db", matmul_epilogue_run_gelu, matmul_epilogue_want_gelu, NULL,
                matmul_epilogue_after_gelu},
               {"gelu_backward", "dpre", matmul_epilogue_run_gelu_alone, matmul_epilogue_want_gelu_alone}},
    .kinds = {"TANH", "ERF"},
    .rows = SIZE_ROWS(MATMUL_EPILOGUE_ROWS),
};

#endif
#endif
