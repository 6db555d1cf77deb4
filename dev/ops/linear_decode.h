/* linear_decode: each fusion, rows on both sides of the kernel's limit, rows that are whole vectors and others. */
#ifndef DEV_OPS_LINEAR_DECODE_H
#define DEV_OPS_LINEAR_DECODE_H

#include "apps/use/linear_decode.h"
#include "op.h"

enum { FUSED_NOTHING, FUSED_NORM, FUSED_NORM_GELU };

static inline void linear_decode_run(const OpCase* k, floatX* y, const floatX* x, int N) {
    LinearFusion f = {.mode = k->kind ? SET : k->mode, .u = k->dx.device, .gelu = GELU_TANH, .eps = (real)1e-5};
    f.stats = (LayerNormStats){k->mean.device_real, k->rstd.device_real};
    if (k->kind) f.norm.w = k->m.device, f.norm.b = k->v.device, f.norm.w_fp32 = k->m.device_real;
    if (k->kind == FUSED_NORM_GELU) f.pre = k->pre.device;
    linear_decode(y, x, (Linear){k->w.device, k->b.device}, (LinearSize){N, k->IC, k->OC}, f, k->ctx);
}

OP_FN(linear_decode_run_forward) { linear_decode_run(k, k->y.device, k->x.device, k->N); }

OP_FN(linear_decode_want_forward) {
    real *u = copy_of(k->h, k->x), *stats = (real*)case_memory(k->h, 2 * (size_t)k->N * sizeof *stats);
    if (k->kind)
        layernorm_forward_ref(u, stats, stats + k->N, k->x.host, k->m.host, k->v.host, (Rows){k->N, k->IC}, 1e-5);
    matmul_forward_ref(k->y.want, u, k->w.host, k->b.host, k->N, k->IC, k->OC, k->kind ? SET : k->mode);
    for (size_t i = 0; i < k->y.n && k->kind == FUSED_NORM_GELU; i++)
        k->y.want[i] = (real)gelu_exact(k->y.want[i], GELU_TANH);
}

// In 16 bits u is rounded, and y perhaps twice. In fp32 a row alone has the same bits.
OP_FN(linear_decode_after) {
    size_t last = (size_t)k->N - 1, OC = (size_t)k->OC;
    k->y.slack = array_rounding(k->y) > 0 ? 2e-2 : 0;
    if (sizeof(floatX) < sizeof(real) || (!k->kind && k->mode == ADD)) return;
    Array row = output(k->h, OC, SET);
    linear_decode_run(k, row.device, k->x.device + last * (size_t)k->IC, 1);
    expect_equal(k->h, "a row alone", row, k->y.host + last * OC);
}

static const Arg LINEAR_DECODE_ARGS[] =
    ARGS(ARG(x, "N IC", IN, 2), ARG(w, "OC IC", IN, 0.05), ARG(b, "OC", IN, 1), ARG(m, "IC", IN, 1),
         ARG(v, "IC", IN, 0.5), ARG(y, "N OC", BY_MODE, 1, 1e-5), ARG_AS("u", dx, "N IC", OUT), ARG(pre, "N OC", OUT),
         ARG(mean, "N", OUT), ARG(rstd, "N", OUT));
static const int LINEAR_DECODE_SIZES[][3] = {{1, 8, 1},   {1, 48, 7},    {3, 33, 20},  {4, 64, 65},
                                             {5, 64, 64}, {1, 1600, 40}, {9, 768, 96}, {1, 3072, 11}};
// The products of the 124M and of the 1558M model, and of 64 texts.
static const int LINEAR_DECODE_BENCH[][3] = {{1, 768, 2304},  {1, 3072, 768},  {1, 768, 50304}, {1, 1600, 4800},
                                             {1, 1600, 6400}, {1, 6400, 1600}, {64, 768, 3072}};

static const Op LINEAR_DECODE = {
    OP_OF("linear_decode", "N IC OC", LINEAR_DECODE_ARGS, LINEAR_DECODE_SIZES),
    OP_BENCH(LINEAR_DECODE_BENCH, LINEAR_DECODE_BENCH),
    .passes = {{"forward", "y", OP_PAIR(linear_decode, forward), NULL, linear_decode_after}},
    .kinds = {"plain", "norm", "norm, gelu"}};

#endif
