/* linear_input: a layer's fp8 input written by layernorm, against layernorm and the layer apart, bit for bit. */
#ifndef DEV_OPS_LINEAR_INPUT_H
#define DEV_OPS_LINEAR_INPUT_H

#include "linear.h"
#include "llmc/model/linear_input.h"

// What the layernorm of layer 0's input and the layer itself compute, on the host.
typedef struct {
    real *x, *r, *pre;
    uint8_t *x8, *xt;
    Fp8Stats stats;
    double elements;
} LinearInputResult;

// With the layernorm's kernel, or apart. k->dx: the branch, then the sum; k->y: the layernorm's output.
static inline LinearInputResult linear_input_result(Harness* h, LinearCase* k, int is_fused, int is_residual,
                                                    int is_only) {
    LinearInputResult got;
    LinearSize z = k->size[0];
    const Fp8Linear* f = k->p[0].fp8;
    Fp8Operands* s = f->shared;
    size_t n = (size_t)z.N * (size_t)z.IC, kept = f->xt ? quantize_rows(z.N) * (size_t)z.IC : 0;
    LayerNorm p = {.w = k->b[1].device, .b = k->b[1].device, .w_fp32 = k->b[1].device_real};
    if (is_fused) p = is_only ? layernorm_for(p, k->p[0]) : layernorm_also_for(p, k->p[0]);
    LayerNormStats stats = {k->db[0].device_real, k->db[0].device_real + z.N};
    ResidualBranch branch = {.r = k->dx.device, .dropout = dropout_none(NULL)};
    Rows size = {.N = z.N, .C = z.IC};
    array_restore(k->y), array_restore(k->dx);
    fp8_state_begin_step(&k->state);
    s->calibrates = 0;
    memset(&got.stats, 0, sizeof got.stats);
    device_upload(k->ctx, s->scales.stats + f->row + FP8_X, &got.stats, sizeof got.stats);
    if (is_residual) residual_layernorm_for_linear(k->y.device, branch, stats, k->x.device, p, size, 1, k->ctx);
    else layernorm_for_linear(k->y.device, stats, k->x.device, p, size, 1, k->ctx);
    expect_true(h, "x is there already, if it is asked for", s->x_of == (is_fused ? k->y.device : NULL));
    linear_forward(k->pre.device, k->y.device, k->p[0], z.N, z.IC, z.OC, k->ctx);
    expect_true(h, "it is used once", s->x_of == NULL);
    got.x = copy_of(h, k->y), got.r = copy_of(h, k->dx), got.pre = copy_of(h, k->pre);
    got.x8 = (uint8_t*)case_memory(h, n), got.xt = (uint8_t*)case_memory(h, kept);
    device_download(k->ctx, got.x8, s->x, n);
    if (kept) device_download(k->ctx, got.xt, f->xt, kept);
    device_download(k->ctx, &got.stats, s->scales.stats + f->row + FP8_X, sizeof got.stats);
    got.elements = s->elements[f->row + FP8_X];
    return got;
}

static inline void test_linear_input_case(Harness* h, int N, int C, int is_residual, int is_only, int keeps_x,
                                          const char* exact_forward) {
    case_begin(h, "linear/fp8 input from layernorm N=%d C=%d%s%s%s%s", N, C, is_residual ? " residual" : "",
               is_only ? " for it only" : "", keeps_x ? " kept" : "", exact_forward ? " exact forward" : "");
    LinearCase* k = linear_case(h, (LinearKind){GELU_TANH, keeps_x, exact_forward}, N, C, 2 * max_int(C, N), ADD);
    LinearInputResult want = linear_input_result(h, k, 0, is_residual, is_only);
    LinearInputResult got = linear_input_result(h, k, 1, is_residual, is_only);
    size_t n = (size_t)N * (size_t)C, width = (size_t)C;
    int whole = 0;
    for (int row = 0; row < N; row++) {
        int same = memcmp(got.x + (size_t)row * width, want.x + (size_t)row * width, width * sizeof *got.x) == 0;
        whole += same;
        if (mean_bias_reads(row, N)) expect_true(h, "a row of the means is written", same);
    }
    int is_sparse = HAS_DEVICE_MEMORY && is_only && keeps_x && !exact_forward && C <= 1792;
    expect_true(h, "the other rows are written where they are read", whole == (is_sparse ? mean_bias_rows(N) : N));
    expect_true(h, "r", memcmp(got.r, want.r, n * sizeof *got.r) == 0);
    expect_true(h, "x in fp8", memcmp(got.x8, want.x8, n) == 0);
    expect_true(h, "its transpose", !keeps_x || memcmp(got.xt, want.xt, quantize_rows(N) * width) == 0);
    expect_true(h, "the statistics", memcmp(&got.stats, &want.stats, sizeof got.stats) == 0 && got.stats.amax);
    expect_true(h, "the number of elements", got.elements == want.elements && got.elements == (double)n);
    expect_true(h, "the layer's output", memcmp(got.pre, want.pre, k->pre.n * sizeof *got.pre) == 0);
    fp8_state_close(&k->state);
    case_end(h);
}

static inline void test_linear_input(Harness* h) {
    if (!linear_has_fp8(h)) return;
    for (int flags = 0; flags < 8; flags++)
        test_linear_input_case(h, 40, 64, flags & 1, flags >> 1 & 1, flags >> 2, NULL);
    // More rows than the means are of.
    for (int is_only = 0; is_only < 2; is_only++) test_linear_input_case(h, 1200, 16, 1, is_only, 1, NULL);
    test_linear_input_case(h, 1200, 16, 0, 1, 1, "w0");
    test_linear_input_case(h, 16, 2064, 1, 1, 1, NULL);  // too wide for the kernel
}

#endif
