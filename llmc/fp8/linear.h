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
    void* d;               // y, dx or dw
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

static inline void fp8_product_run(const Fp8Linear* f, Fp8Product p, Context* ctx) {
    MatmulOperands o = {.a = p.a, .b = p.b, .d = p.d, .bias = p.bias, .N = p.size.N};
    o.a_inverse = fp8_inverse(f, p.pass == MATMUL_BACKWARD_WEIGHT ? FP8_X : FP8_W);
    o.b_inverse = fp8_inverse(f, p.pass == MATMUL_FORWARD ? FP8_X : FP8_DY);
    matmul_product(matmul_key(MATMUL_PASSES + p.pass, p.size.N, p.size.IC, p.size.OC, p.mode, ctx), &o, ctx);
}

#else

// Cast the bytes of an operand of f to real x [N, C]. stride 0: from [N, C]; otherwise from the transpose, with rows
// `stride` apart.
static inline void fp8_unpack(real* x, const uint8_t* bytes, int N, int C, size_t stride, const Fp8Linear* f,
                              int operand) {
    size_t rows = (size_t)N, columns = (size_t)C;
    real number[256];
    for (int i = 0; i < 256; i++)
        number[i] = (real)fp8_to_float((uint8_t)i, fp8_operand_format(operand)) * *fp8_inverse(f, operand);
#pragma omp parallel for schedule(static)
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++)
            x[r * columns + c] = number[bytes[stride ? c * stride + r : r * columns + c]];
}

static inline void fp8_product_run(const Fp8Linear* f, Fp8Product p, Context* ctx) {
    real *a = f->shared->unpacked[0], *b = f->shared->unpacked[1];
    int N = p.size.N, IC = p.size.IC, OC = p.size.OC;
    size_t Np = quantize_rows(N);
    Linear linear = {.w = a, .b = (floatX*)p.bias};
    Product r;
    if (p.pass == MATMUL_FORWARD) {
        fp8_unpack(a, p.a, OC, IC, 0, f, FP8_W);
        fp8_unpack(b, p.b, N, IC, 0, f, FP8_X);
        r = matmul_product_forward((floatX*)p.d, b, linear, N, IC, OC);
    } else if (p.pass == MATMUL_BACKWARD_INPUT) {
        fp8_unpack(a, p.a, OC, IC, (size_t)OC, f, FP8_W);
        fp8_unpack(b, p.b, N, OC, 0, f, FP8_DY);
        r = matmul_product_backward_input((floatX*)p.d, b, a, N, IC, OC);
    } else {
        fp8_unpack(a, p.a, N, IC, Np, f, FP8_X);
        fp8_unpack(b, p.b, N, OC, Np, f, FP8_DY);
        r = matmul_product_backward_weight((real*)p.d, b, a, N, IC, OC);
    }
    r.mode = p.mode;
    product_run(&r, ctx);
}

#endif

static inline void fp8_product(const Fp8Linear* f, Fp8Product p, Context* ctx) {
    Scope scope = fp8_product_open(&p, ctx);
    fp8_product_run(f, p, ctx);
    scope_close(&scope);
}

// ---------------------------------------------------------------------------------------------------------
// Launchers: each has the contract of model/linear.h's op

// Fill x.q from x minus its mean, whose matmul is part of the bias. Most of the logits is common to all tokens, and
// fast accumulation would lose more of this part than of the rest.
COMPILED_IF_CALLED static inline void fp8_fill_centered(Operand x, int N, int C, Context* ctx) {
    const Fp8Linear* f = x.q->layer;
    fp8_fill(x, N, C, ctx);
    if (f->exact_forward) return;
    mean_bias_center(f->shared->center, fp8_rounded(x.q), N, C, ctx);
    quantize(fp8_output(f, FP8_X, x.q->y, NULL), quantize_centered(x.v, f->shared->center), N, C, ctx);
}

COMPILED_IF_CALLED static inline void fp8_linear_forward(floatX* y, Operand x, Linear p, LinearSize z, Context* ctx) {
    const Fp8Linear* f = x.q->layer;
    const Fp8Shared* s = f->shared;
    if (x.q->is_centered) fp8_fill_centered(x, z.N, z.IC, ctx);
    QuantizeOutput w = fp8_output(f, FP8_W, f->w, f->wt);
    if (!f->exact_forward) {
        mean_bias_center(s->means, fp8_rounded(x.q), z.N, z.IC, ctx);
        w.bias = (QuantizeBias){.y = s->bias, .b = p.b, .means = s->means};
    }
    fp8_quantize(f, FP8_W, w, quantize_plain(p.w), z.OC, z.IC, ctx);
    Fp8Product product = {MATMUL_FORWARD, f->w, x.q->y, y, s->bias, z, SET};
    if (f->exact_forward) matmul_forward(y, x.v, p, z.N, z.IC, z.OC, SET, ctx);
    else fp8_product(f, product, ctx);
}

// y.v is written only if something reads it.
COMPILED_IF_CALLED static inline void fp8_linear_gelu_forward(Operand y, GeluInput gelu, Operand x, Linear p,
                                                              LinearSize z, Context* ctx) {
    fp8_linear_forward(gelu.pre, x, p, z, ctx);
    if (y.q->v_is_read) gelu_forward(y.v, gelu.pre, (size_t)z.N * (size_t)z.OC, gelu.kind, ctx);
    fp8_fill_from(y.q, quantize_gelu(gelu.pre, gelu.kind), (BiasGrad){.b = NULL}, z.N, z.OC, ctx);
}

COMPILED_IF_CALLED static inline void fp8_linear_backward_weight(LinearGrads d, Operand dy, Operand x, LinearSize z,
                                                                 Mode mode, Context* ctx) {
    const Fp8Linear* f = x.q->layer;
    const Fp8Shared* s = f->shared;
    BiasGrad db = {.b = d.b, .mode = mode};
    if (d.b) fp8_fill_from(dy.q, quantize_plain(dy.v), db, z.N, z.OC, ctx);
    const uint8_t* xt = s->records && x.q->yt ? x.q->yt : s->xt;
    if (xt == s->xt) quantize(fp8_output(f, FP8_X, NULL, s->xt), quantize_plain(x.v), z.N, z.IC, ctx);
    fp8_product(f, (Fp8Product){MATMUL_BACKWARD_WEIGHT, xt, dy.q->yt, d.w, NULL, z, mode}, ctx);
}

// If dy is the gradient of logits, its rounding errors at the targets are added back.
COMPILED_IF_CALLED static inline void fp8_linear_backward_input(floatX* dx, Operand dy, Linear p, LinearSize z,
                                                                Mode mode, Context* ctx) {
    const Fp8Linear* f = dy.q->layer;
    RoundedLogits rounded = {dy.q->from.logits, dy.q->y, fp8_inverse(f, FP8_DY), z.OC};
    fp8_product(f, (Fp8Product){MATMUL_BACKWARD_INPUT, f->wt, dy.q->y, dx, NULL, z, mode}, ctx);
    if (dy.q->from.source == QUANTIZE_CLASSIFIER_BACKWARD) target_rounding(dx, rounded, p.w, z.N, z.IC, ctx);
}

// The logits dlogits.v stay as they are: their gradient is written only in fp8.
COMPILED_IF_CALLED static inline void fp8_linear_classifier_backward(Operand dlogits, Losses losses, const int* targets,
                                                                     const real* loss_scale, int N, int V, int Vp,
                                                                     Context* ctx) {
    LogitsGradient d = {losses, targets, loss_scale, V};
    classifier_forward(losses, dlogits.v, targets, N, V, Vp, ctx);
    fp8_fill_from(dlogits.q, quantize_classifier_backward(dlogits.v, d), (BiasGrad){.b = NULL}, N, Vp, ctx);
}

// dpre.v is scratch: it lacks GELU's derivative.
COMPILED_IF_CALLED static inline void fp8_linear_gelu_backward_input(Operand dpre, BiasGrad db, Operand dy, Linear p,
                                                                     GeluInput gelu, LinearSize z, Context* ctx) {
    fp8_linear_backward_input(dpre.v, dy, p, z, SET, ctx);
    fp8_fill_from(dpre.q, quantize_gelu_backward(dpre.v, gelu.pre, gelu.kind), db, z.N, z.IC, ctx);
}

#endif
