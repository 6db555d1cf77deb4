/* fp8_linear: model/linear.h's ops on operands in fp8 (--fp8).
 *
 * Operands are scaled, rounded to 8 bits (quantize.h), and multiplied. The result is scaled back and stored as floatX,
 * dw as real. x and w are E4M3; dy is E5M2, which has a wider range. Bias gradients are sums of the unrounded dy. The
 * tensor cores sum along the contiguous index of both operands, so w, x and dy are also stored transposed.
 *
 *   pass             operands        format        terms of a sum
 *   forward          x, w            E4M3 E4M3     IC
 *   backward input   dy, w^T         E5M2 E4M3     OC
 *   backward weight  dy^T, x^T       E5M2 E4M3     N
 *
 * Up to 8192 terms are summed in the tensor cores, which keep about 13 bits ("fast accumulation": rms errors of 0.05 %
 * at 768 terms, 0.7 % at 65,536). Longer sums are split into parts that are added in fp32 (0.02 %).
 *
 * x and dy are rounded by who writes them (fp8/operand.h), with three exceptions, which have what these ops know: the
 * output matrix's x, which is centered; a dy whose column sums are wanted too, by backward weight; and w, with a bias.
 *
 * If a layer's `exact_forward` is 1 (--fp8-exclude-forward), its forward matmul is that of matmul.h, and x and w are
 * rounded for the backward pass only.
 *
 * Errors that all rows share do not cancel in sums over rows. So the mean of y over rows is corrected to that of the
 * exact matmul (fp8/mean_bias.h), and in dx of the output matrix the targets' part is corrected
 * (fp8/target_rounding.h).
 *
 * shapes     IC and OC are multiples of 16.
 * scales     one per operand and layer, delayed: from the largest absolute values of the last steps (fp8/scales.h). In
 *            the first steps (`calibrates`) each tensor is measured before it is rounded.
 * numerics   the CPU version computes with the same rounded operands, in `real`.
 * source     Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433 */
#ifndef LLMC_FP8_LINEAR_H
#define LLMC_FP8_LINEAR_H

#include "llmc/fp8/operand.h"
#include "llmc/fp8/target_rounding.h"
#include "llmc/ops/classifier/classifier.h"
#include "llmc/ops/gelu.h"
#include "llmc/ops/matmul/matmul.h"

// ---------------------------------------------------------------------------------------------------------
// Matmuls of fp8 operands

typedef struct {
    MatmulPass pass;
    const uint8_t *a, *b;  // w and x; w^T and dy; x^T and dy^T
    const real *a_inverse, *b_inverse;
    void* d;  // y, dx or dw
    const floatX* bias;
    LinearSize size;
    Mode mode;
} Fp8Product;

// Bytes that a matmul reads and writes: fp8 operands of `a` and `b` elements, d elements of type `type`.
#define FP8_PRODUCT_BYTES(a, b, d, mode, type)                                                                         \
    (1.0 * (a) + 1.0 * (b) + ((mode) == ADD ? 2.0 : 1.0) * (d) * sizeof(type))

static inline Scope fp8_product_open(const Fp8Product* p, Context* ctx) {
    static const char* const NAMES[] = {"matmul_forward_fp8", "matmul_backward_input_fp8",
                                        "matmul_backward_weight_fp8"};
    int N = p->size.N, IC = p->size.IC, OC = p->size.OC;
    double x = (double)N * IC, y = (double)N * OC, w = (double)IC * OC;
    double bytes = p->pass == MATMUL_FORWARD          ? FP8_PRODUCT_BYTES(w, x, y, p->mode, floatX)
                   : p->pass == MATMUL_BACKWARD_INPUT ? FP8_PRODUCT_BYTES(w, y, x, p->mode, floatX)
                                                      : FP8_PRODUCT_BYTES(x, y, w, p->mode, real);
    return scope_open(ctx, NAMES[p->pass], MATMUL_FLOPS(N, IC, OC), bytes, "N=%d IC=%d OC=%d", N, IC, OC);
}

#ifdef __CUDACC__

static inline void fp8_product(const Fp8Shared* s, Fp8Product p, Context* ctx) {
    int N = p.size.N, IC = p.size.IC, OC = p.size.OC;
    MatmulOperands o = {
        .a = p.a, .b = p.b, .d = p.d, .bias = p.bias, .N = N, .a_inverse = p.a_inverse, .b_inverse = p.b_inverse};
    Scope scope = fp8_product_open(&p, ctx);
    (void)s;
    matmul_product(matmul_key(MATMUL_PASSES + p.pass, N, IC, OC, p.mode, ctx), &o, ctx);
    scope_close(&scope);
}

#else

// Cast fp8 bytes to real x [N, C]. stride 0: from [N, C]; otherwise from the transpose, with rows `stride` apart.
static inline void fp8_unpack(real* x, const uint8_t* bytes, int N, int C, size_t stride, Fp8Format format,
                              const real* inverse) {
    size_t rows = (size_t)N, columns = (size_t)C;
    real number[256];
    for (int i = 0; i < 256; i++) number[i] = (real)fp8_to_float((uint8_t)i, format) * *inverse;
#pragma omp parallel for schedule(static)
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++)
            x[r * columns + c] = number[bytes[stride ? c * stride + r : r * columns + c]];
}

static inline void fp8_product(const Fp8Shared* s, Fp8Product p, Context* ctx) {
    real *a = s->unpacked[0], *b = s->unpacked[1];
    int N = p.size.N, IC = p.size.IC, OC = p.size.OC;
    size_t Np = quantize_rows(N);
    Linear linear = {.w = a, .b = (floatX*)p.bias};
    Scope scope = fp8_product_open(&p, ctx);
    Product r;
    if (p.pass == MATMUL_FORWARD) {
        fp8_unpack(a, p.a, OC, IC, 0, FP8_E4M3, p.a_inverse);
        fp8_unpack(b, p.b, N, IC, 0, FP8_E4M3, p.b_inverse);
        r = product_forward((floatX*)p.d, b, linear, N, IC, OC);
    } else if (p.pass == MATMUL_BACKWARD_INPUT) {
        fp8_unpack(a, p.a, OC, IC, (size_t)OC, FP8_E4M3, p.a_inverse);
        fp8_unpack(b, p.b, N, OC, 0, FP8_E5M2, p.b_inverse);
        r = product_backward_input((floatX*)p.d, b, a, N, IC, OC);
    } else {
        fp8_unpack(a, p.a, N, IC, Np, FP8_E4M3, p.a_inverse);
        fp8_unpack(b, p.b, N, OC, Np, FP8_E5M2, p.b_inverse);
        r = product_backward_weight((real*)p.d, b, a, N, IC, OC);
    }
    r.mode = p.mode;
    product_run(&r, ctx);
    scope_close(&scope);
}

#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers: each has the contract of model/linear.h's op

COMPILED_IF_CALLED static inline void fp8_linear_forward(floatX* y, Operand x, Linear p, LinearSize z, Context* ctx) {
    const Fp8Linear* f = x.q->layer;
    const Fp8Shared* s = f->shared;
    QuantizeOutput w = fp8_output(f, FP8_W, f->w, f->wt);
    QuantizeBias bias = {.y = s->bias, .b = p.b, .means = s->means};
    if (!f->exact_forward) {
        mean_bias_center(s->means, fp8_rounded(x.q), z.N, z.IC, ctx);
        w.bias = bias;
    }
    fp8_quantize(f, FP8_W, w, quantize_plain(p.w), z.OC, z.IC, ctx);
    Fp8Product product = {.pass = MATMUL_FORWARD,
                          .a = f->w,
                          .b = x.q->y,
                          .a_inverse = fp8_inverse(f, FP8_W),
                          .b_inverse = fp8_inverse(f, FP8_X),
                          .d = y,
                          .bias = s->bias,
                          .size = z,
                          .mode = SET};
    if (f->exact_forward) matmul_forward(y, x.v, p, z.N, z.IC, z.OC, SET, ctx);
    else fp8_product(s, product, ctx);
}

// Multiplies x minus its mean; the mean's matmul is part of the bias. Most of the logits is common to all tokens, and
// fast accumulation would lose more of this part than of the rest.
COMPILED_IF_CALLED static inline void fp8_linear_logits_forward(floatX* y, Operand x, Linear p, LinearSize z,
                                                                Context* ctx) {
    const Fp8Linear* f = x.q->layer;
    const Fp8Shared* s = f->shared;
    fp8_fill(x, z.N, z.IC, ctx);
    if (!f->exact_forward) {
        mean_bias_center(s->center, fp8_rounded(x.q), z.N, z.IC, ctx);
        quantize(fp8_output(f, FP8_X, x.q->y, NULL), quantize_centered(x.v, s->center), z.N, z.IC, ctx);
    }
    fp8_linear_forward(y, x, p, z, ctx);
}

// y.v is written only if something reads it.
COMPILED_IF_CALLED static inline void fp8_linear_gelu_forward(Operand y, GeluInput gelu, Operand x, Linear p,
                                                              LinearSize z, Context* ctx) {
    BiasGrad none = {.b = NULL, .mode = SET};
    fp8_linear_forward(gelu.pre, x, p, z, ctx);
    if (y.q->v_is_read) gelu_forward(y.v, gelu.pre, (size_t)z.N * (size_t)z.OC, gelu.kind, ctx);
    fp8_fill_from(y.q, quantize_gelu(gelu.pre, gelu.kind), none, z.N, z.OC, ctx);
}

COMPILED_IF_CALLED static inline void fp8_linear_backward_weight(LinearGrads d, Operand dy, Operand x, LinearSize z,
                                                                 Mode mode, Context* ctx) {
    const Fp8Linear* f = x.q->layer;
    const Fp8Shared* s = f->shared;
    BiasGrad db = {.b = d.b, .mode = mode};
    if (d.b) fp8_fill_from(dy.q, quantize_plain(dy.v), db, z.N, z.OC, ctx);
    const uint8_t* xt = s->records && x.q->yt ? x.q->yt : s->xt;
    if (xt == s->xt) quantize(fp8_output(f, FP8_X, NULL, s->xt), quantize_plain(x.v), z.N, z.IC, ctx);
    Fp8Product product = {.pass = MATMUL_BACKWARD_WEIGHT,
                          .a = xt,
                          .b = dy.q->yt,
                          .a_inverse = fp8_inverse(f, FP8_X),
                          .b_inverse = fp8_inverse(f, FP8_DY),
                          .d = d.w,
                          .size = z,
                          .mode = mode};
    fp8_product(s, product, ctx);
}

COMPILED_IF_CALLED static inline void fp8_linear_backward_input(floatX* dx, Operand dy, LinearSize z, Mode mode,
                                                                Context* ctx) {
    const Fp8Linear* f = dy.q->layer;
    Fp8Product product = {.pass = MATMUL_BACKWARD_INPUT,
                          .a = f->wt,
                          .b = dy.q->y,
                          .a_inverse = fp8_inverse(f, FP8_W),
                          .b_inverse = fp8_inverse(f, FP8_DY),
                          .d = dx,
                          .size = z,
                          .mode = mode};
    fp8_product(f->shared, product, ctx);
}

// The logits dlogits.v stay as they are: their gradient is written only in fp8.
COMPILED_IF_CALLED static inline void fp8_linear_classifier_backward(Operand dlogits, LogitsGradient d, int N, int Vp,
                                                                     Context* ctx) {
    BiasGrad none = {.b = NULL, .mode = SET};
    classifier_forward(d.losses, dlogits.v, d.targets, N, d.V, Vp, ctx);
    fp8_fill_from(dlogits.q, quantize_classifier_backward(dlogits.v, d), none, N, Vp, ctx);
}

// The rounding error at the targets is added back.
COMPILED_IF_CALLED static inline void fp8_linear_logits_backward_input(floatX* dx, Operand dy, Linear p, LinearSize z,
                                                                       Context* ctx) {
    RoundedLogits rounded = {.of = dy.q->from.logits, .rounded = dy.q->y, .Vp = z.OC};
    rounded.inverse = fp8_inverse(dy.q->layer, FP8_DY);
    fp8_linear_backward_input(dx, dy, z, SET, ctx);
    target_rounding(dx, rounded, p.w, z.N, z.IC, ctx);
}

// dpre.v is scratch: it lacks GELU's derivative.
COMPILED_IF_CALLED static inline void fp8_linear_gelu_backward_input(Operand dpre, BiasGrad db, Operand dy,
                                                                     GeluInput gelu, LinearSize z, Context* ctx) {
    fp8_linear_backward_input(dpre.v, dy, z, SET, ctx);
    fp8_fill_from(dpre.q, quantize_gelu_backward(dpre.v, gelu.pre, gelu.kind), db, z.N, z.IC, ctx);
}

#endif
