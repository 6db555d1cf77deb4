/* linear: the matmuls of a linear layer, in floatX (matmul.h) or with fp8 operands (--fp8).
 *
 *   forward          y  (SET) = x w^T + b            x [N, IC], w [OC, IC], b [OC] or NULL, y [N, OC]
 *   gelu forward     pre = x w^T + b,  y = gelu(pre)
 *   backward weight  dw (SET or ADD) = dy^T x,  db = column sums of dy
 *   backward input   dx (SET or ADD) = dy w          after backward weight, with the same dy
 *   gelu backward    dpre = (dy w) * gelu'(pre), dbias (SET or ADD) = column sums of dpre; likewise
 *
 * Shapes, types and modes are as in matmul.h. A layer whose `fp8` is NULL calls matmul.h.
 *
 * In fp8, operands are scaled, rounded to 8 bits (quantize.h), and multiplied. The result is scaled back and stored as
 * floatX, dw as real. x and w are E4M3; dy is E5M2, which has a wider range. Bias gradients are sums of the unrounded
 * dy. The tensor cores sum along the contiguous index of both operands, so w, x and dy are also stored transposed.
 *
 *   pass             operands        format        terms of a sum
 *   forward          x, w            E4M3 E4M3     IC
 *   backward input   dy, w^T         E5M2 E4M3     OC
 *   backward weight  dy^T, x^T       E5M2 E4M3     N
 *
 * Up to 8192 terms are summed in the tensor cores, which keep about 13 bits ("fast accumulation": rms errors of 0.05 %
 * at 768 terms, 0.7 % at 65,536). Longer sums are split into parts that are added in fp32 (0.02 %).
 *
 * If a layer's `exact_forward` is 1 (--fp8-exclude-forward), its forward matmul is that of matmul.h, and x and w are
 * rounded for the backward pass only.
 *
 * Errors that all rows share do not cancel in sums over rows. So the mean of y over rows is corrected to that of the
 * exact matmul (fp8/mean_bias.h), and in dx of the output matrix the targets' part is corrected
 * (fp8/target_rounding.h).
 *
 * shapes     IC and OC are multiples of 16.
 * scales     one per operand and layer, delayed: from the largest absolute values of the last steps (fp8_scales.h). In
 *            the first steps (`calibrates`) each tensor is measured before it is rounded.
 * numerics   the CPU version computes with the same rounded operands, in `real`.
 * source     Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433 */
#ifndef LLMC_MODEL_LINEAR_H
#define LLMC_MODEL_LINEAR_H

#include "llmc/fp8/mean_bias.h"
#include "llmc/fp8/quantize.h"
#include "llmc/fp8/scales.h"
#include "llmc/fp8/target_rounding.h"
#include "llmc/ops/classifier/classifier.h"
#include "llmc/ops/gelu.h"
#include "llmc/ops/matmul/matmul.h"

// The operands of a layer, in the order of their rows in the table of scales.
enum { FP8_X, FP8_W, FP8_DY, FP8_OPERANDS };

// Shared by all fp8 layers: the table of scales, and the operands of the current matmul.
typedef struct {
    Fp8Scales scales;    // [FP8_OPERANDS * layers]
    Fp8Stats* measured;  // [1], of one tensor in the first steps
    int calibrates;      // 1: too few steps for scales, so every tensor is measured first
    int records;         // 1: in a training step, which records the largest absolute values
    double* elements;    // [FP8_OPERANDS * layers] on the host: number of elements that the step has quantized
    uint8_t *x, *xt;     // [N, IC] and [IC, Np]
    uint8_t *dy, *dyt;
    const floatX *x_of, *dy_of;  // the tensors that x, and dy and dyt, were quantized from; NULL: none
    QuantizeInput x_from;        // what x was computed from
    real* means;                 // [2, IC] of the current matmul's x
    real* center;                // [2, IC] of the output matrix's x
    floatX* bias;                // [OC] of the current matmul
    LogitsGradient dlogits;      // what dy of the output matrix was computed from
    real* unpacked[2];           // CPU: both operands, cast to real
} Fp8Operands;

typedef struct Fp8Linear {
    Fp8Operands* shared;
    int row;            // of its x in the table of scales
    int exact_forward;  // 1: the forward matmul is in floatX
    uint8_t *w, *wt;    // [OC, IC] and [IC, OC]: its weight as of the last forward pass
    uint8_t* xt;        // [IC, Np]: its x, kept from a step's forward pass; NULL: the backward pass quantizes x again
} Fp8Linear;

typedef struct {
    int N, IC, OC;
} LinearSize;

// GELU's form and its input [N, C]: an output of the forward pass.
typedef struct {
    floatX* pre;
    Gelu kind;
} GeluInput;

// `d` without the bias, whose gradient another op computes.
static inline LinearGrads linear_weight_only(LinearGrads d) {
    d.b = NULL;
    return d;
}

// ---------------------------------------------------------------------------------------------------------
// Operands in fp8

static inline Fp8Format fp8_operand_format(int operand) { return operand == FP8_DY ? FP8_E5M2 : FP8_E4M3; }

static inline QuantizeOutput fp8_output(const Fp8Linear* f, int operand, uint8_t* y, uint8_t* yt) {
    const real* scale = f->shared->scales.scale + f->row + operand;
    QuantizeOutput out = {
        .y = y, .yt = yt, .scale = scale, .format = fp8_operand_format(operand), .sums = {.b = NULL, .mode = SET}};
    return out;
}

// Count the elements of an operand [N, C] that is rounded now. Returns where its statistics go; NULL: nowhere.
static inline Fp8Stats* fp8_count(const Fp8Linear* f, int operand, int N, int C) {
    const Fp8Operands* s = f->shared;
    if (!s->records) return NULL;
    s->elements[f->row + operand] += (double)N * C;
    return s->scales.stats + f->row + operand;
}

// Measure and quantize an operand [N, C]. Call it once per pass. out.sums: a bias gradient.
COMPILED_IF_CALLED static inline void fp8_quantize(const Fp8Linear* f, int operand, QuantizeOutput out,
                                                   QuantizeInput in, int N, int C, Context* ctx) {
    const Fp8Operands* s = f->shared;
    if (s->calibrates) {
        QuantizeOutput first = out;
        first.stats = s->measured, first.sums.b = NULL, first.bias.y = NULL;
        quantize(first, in, N, C, ctx);
        fp8_scales_measure(s->scales, s->measured, f->row + operand, ctx);
    }
    out.stats = fp8_count(f, operand, N, C);
    quantize(out, in, N, C, ctx);
}

// Quantize the input of layer f: the tensor x, or values computed from it.
COMPILED_IF_CALLED static inline void fp8_quantize_x(const Fp8Linear* f, QuantizeInput x, int N, int IC, Context* ctx) {
    Fp8Operands* s = f->shared;
    fp8_quantize(f, FP8_X, fp8_output(f, FP8_X, s->x, s->records ? f->xt : NULL), x, N, IC, ctx);
    s->x_from = x;
}

// Quantize the weight of layer p; `bias`: see quantize.h.
COMPILED_IF_CALLED static inline void fp8_quantize_w(Linear p, QuantizeBias bias, int OC, int IC, Context* ctx) {
    const Fp8Linear* f = p.fp8;
    QuantizeOutput out = fp8_output(f, FP8_W, f->w, f->wt);
    out.bias = bias;
    fp8_quantize(f, FP8_W, out, quantize_plain(p.w), OC, IC, ctx);
}

// Quantize the gradient of layer f's output.
COMPILED_IF_CALLED static inline void fp8_quantize_dy(const Fp8Linear* f, QuantizeInput dy, BiasGrad db, int N, int OC,
                                                      Context* ctx) {
    Fp8Operands* s = f->shared;
    QuantizeOutput out = fp8_output(f, FP8_DY, s->dy, s->dyt);
    out.sums = db;
    fp8_quantize(f, FP8_DY, out, dy, N, OC, ctx);
}

static inline const real* fp8_inverse(const Fp8Linear* f, int operand) {
    return f->shared->scales.inverse + (size_t)(f->row + operand) * FP8_INVERSE_APART;
}

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

static inline void fp8_product(const Fp8Operands* s, Fp8Product p, Context* ctx) {
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

static inline void fp8_product(const Fp8Operands* s, Fp8Product p, Context* ctx) {
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
// Launchers

// Quantize the weight and compute y; the input is in s->x.
COMPILED_IF_CALLED static inline void fp8_forward_product(floatX* y, Linear p, LinearSize z, Context* ctx) {
    const Fp8Linear* f = p.fp8;
    Fp8Operands* s = f->shared;
    RoundedTensor x8 = {.exact = s->x_from, .bytes = s->x, .inverse = fp8_inverse(f, FP8_X)};
    QuantizeBias bias = {.y = s->bias, .b = p.b, .means = s->means};
    mean_bias_center(s->means, x8, z.N, z.IC, ctx);
    fp8_quantize_w(p, bias, z.OC, z.IC, ctx);
    Fp8Product product = {.pass = MATMUL_FORWARD,
                          .a = f->w,
                          .b = s->x,
                          .a_inverse = fp8_inverse(f, FP8_W),
                          .b_inverse = fp8_inverse(f, FP8_X),
                          .d = y,
                          .bias = s->bias,
                          .size = z,
                          .mode = SET};
    fp8_product(s, product, ctx);
}

COMPILED_IF_CALLED static inline void linear_forward_fp8(floatX* y, const floatX* x, Linear p, LinearSize z,
                                                         Context* ctx) {
    const Fp8Linear* f = p.fp8;
    Fp8Operands* s = f->shared;
    if (s->x_of != x) fp8_quantize_x(f, quantize_plain(x), z.N, z.IC, ctx);
    s->x_of = NULL;
    if (f->exact_forward) {
        QuantizeBias none = {.y = NULL, .b = NULL, .means = NULL};
        fp8_quantize_w(p, none, z.OC, z.IC, ctx);
        matmul_forward(y, x, p, z.N, z.IC, z.OC, SET, ctx);
    } else {
        fp8_forward_product(y, p, z, ctx);
    }
}

COMPILED_IF_CALLED static inline void linear_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC,
                                                     Context* ctx) {
    LinearSize size = {.N = N, .IC = IC, .OC = OC};
    if (p.fp8) linear_forward_fp8(y, x, p, size, ctx);
    else matmul_forward(y, x, p, N, IC, OC, SET, ctx);
}

// linear_forward() of the output matrix. In fp8 it multiplies x minus its mean; the mean's matmul is part of the bias.
// Most of the logits is common to all tokens, and fast accumulation would lose more of this part than of the rest.
COMPILED_IF_CALLED static inline void linear_logits_forward(floatX* y, const floatX* x, Linear p, LinearSize z,
                                                            Context* ctx) {
    const Fp8Linear* f = p.fp8;
    if (!f || f->exact_forward) {
        linear_forward(y, x, p, z.N, z.IC, z.OC, ctx);
        return;
    }
    Fp8Operands* s = f->shared;
    fp8_quantize_x(f, quantize_plain(x), z.N, z.IC, ctx);
    RoundedTensor x8 = {.exact = s->x_from, .bytes = s->x, .inverse = fp8_inverse(f, FP8_X)};
    mean_bias_center(s->center, x8, z.N, z.IC, ctx);
    quantize(fp8_output(f, FP8_X, s->x, NULL), quantize_centered(x, s->center), z.N, z.IC, ctx);
    fp8_forward_product(y, p, z, ctx);
}

// `next`: the layer that reads y. If it is fp8, y is written in fp8, for that layer, and as floatX only if its forward
// matmul needs it.
COMPILED_IF_CALLED static inline void linear_gelu_forward(floatX* y, GeluInput gelu, const floatX* x, Linear p,
                                                          Linear next, LinearSize z, Context* ctx) {
    if (!p.fp8) {
        matmul_gelu_forward(y, gelu.pre, x, p, z.N, z.IC, z.OC, gelu.kind, ctx);
        return;
    }
    CHECK(next.fp8);
    linear_forward_fp8(gelu.pre, x, p, z, ctx);
    if (next.fp8->exact_forward) gelu_forward(y, gelu.pre, (size_t)z.N * (size_t)z.OC, gelu.kind, ctx);
    fp8_quantize_x(next.fp8, quantize_gelu(gelu.pre, gelu.kind), z.N, z.OC, ctx);
    next.fp8->shared->x_of = y;
}

COMPILED_IF_CALLED static inline void linear_backward_weight(LinearGrads d, const floatX* dy, const floatX* x, int N,
                                                             int IC, int OC, Mode mode, Context* ctx) {
    const Fp8Linear* f = d.fp8;
    if (!f) {
        matmul_backward_weight(d, dy, x, N, IC, OC, mode, ctx);
        return;
    }
    Fp8Operands* s = f->shared;
    LinearSize size = {.N = N, .IC = IC, .OC = OC};
    BiasGrad db = {.b = d.b, .mode = mode};
    if (s->dy_of != dy) fp8_quantize_dy(f, quantize_plain(dy), db, N, OC, ctx);
    s->dy_of = dy;
    const uint8_t* xt = s->records && f->xt ? f->xt : s->xt;
    if (xt == s->xt) quantize(fp8_output(f, FP8_X, NULL, s->xt), quantize_plain(x), N, IC, ctx);
    Fp8Product product = {.pass = MATMUL_BACKWARD_WEIGHT,
                          .a = xt,
                          .b = s->dyt,
                          .a_inverse = fp8_inverse(f, FP8_X),
                          .b_inverse = fp8_inverse(f, FP8_DY),
                          .d = d.w,
                          .size = size,
                          .mode = mode};
    fp8_product(s, product, ctx);
}

COMPILED_IF_CALLED static inline void linear_backward_input_fp8(floatX* dx, const floatX* dy, const Fp8Linear* f,
                                                                LinearSize z, Mode mode, Context* ctx) {
    Fp8Operands* s = f->shared;
    CHECK(s->dy_of == dy);
    s->dy_of = NULL;
    Fp8Product product = {.pass = MATMUL_BACKWARD_INPUT,
                          .a = f->wt,
                          .b = s->dy,
                          .a_inverse = fp8_inverse(f, FP8_W),
                          .b_inverse = fp8_inverse(f, FP8_DY),
                          .d = dx,
                          .size = z,
                          .mode = mode};
    fp8_product(s, product, ctx);
}

COMPILED_IF_CALLED static inline void linear_backward_input(floatX* dx, const floatX* dy, Linear p, int N, int IC,
                                                            int OC, Mode mode, Context* ctx) {
    LinearSize size = {.N = N, .IC = IC, .OC = OC};
    if (p.fp8) linear_backward_input_fp8(dx, dy, p.fp8, size, mode, ctx);
    else matmul_backward_input(dx, dy, p.w, N, IC, OC, mode, ctx);
}

// classifier_backward() of the logits [N, Vp] of the output matrix p. If it is fp8, the logits stay as they are: their
// gradient is written only in fp8, for the two backward matmuls, which are called with the logits as dy.
COMPILED_IF_CALLED static inline void linear_classifier_backward(floatX* logits, LogitsGradient d, Linear p, int N,
                                                                 int Vp, Context* ctx) {
    BiasGrad none = {.b = NULL, .mode = SET};
    if (!p.fp8) {
        classifier_backward(d.losses, logits, d.targets, d.loss_scale, N, d.V, Vp, ctx);
        return;
    }
    classifier_forward(d.losses, logits, d.targets, N, d.V, Vp, ctx);
    fp8_quantize_dy(p.fp8, quantize_classifier_backward(logits, d), none, N, Vp, ctx);
    p.fp8->shared->dlogits = d, p.fp8->shared->dy_of = logits;
}

// linear_backward_input() of the output matrix, after linear_classifier_backward(). In fp8, the rounding error at the
// targets is added back.
COMPILED_IF_CALLED static inline void linear_logits_backward_input(floatX* dx, const floatX* dy, Linear p, LinearSize z,
                                                                   Context* ctx) {
    linear_backward_input(dx, dy, p, z.N, z.IC, z.OC, SET, ctx);
    if (!p.fp8) return;
    RoundedLogits rounded = {
        .of = p.fp8->shared->dlogits, .rounded = p.fp8->shared->dy, .inverse = fp8_inverse(p.fp8, FP8_DY), .Vp = z.OC};
    target_rounding(dx, rounded, p.w, z.N, z.IC, ctx);
}

// `d`: the gradients of the layer before GELU; only d.b is written. If that layer is fp8, the result is written only in
// fp8, and dpre is scratch: it lacks GELU's derivative.
COMPILED_IF_CALLED static inline void linear_gelu_backward_input(floatX* dpre, LinearGrads d, Mode mode,
                                                                 const floatX* dy, Linear p, GeluInput gelu,
                                                                 LinearSize z, Context* ctx) {
    BiasGrad db = {.b = d.b, .mode = mode};
    if (!p.fp8) {
        matmul_gelu_backward_input(dpre, db, dy, p.w, gelu.pre, z.N, z.IC, z.OC, gelu.kind, ctx);
        return;
    }
    CHECK(d.fp8);
    linear_backward_input_fp8(dpre, dy, p.fp8, z, SET, ctx);
    fp8_quantize_dy(d.fp8, quantize_gelu_backward(dpre, gelu.pre, gelu.kind), db, z.N, z.IC, ctx);
    d.fp8->shared->dy_of = dpre;
}

#endif
