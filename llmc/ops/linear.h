/* linear: the products of a linear layer, in floatX (matmul.h) or with operands in fp8 (--fp8).
 *
 *   forward          y  (SET) = x w^T + b            x [N, IC], w [OC, IC], b [OC] or NULL, y [N, OC]
 *   gelu forward     pre = x w^T + b,  y = gelu(pre)
 *   backward weight  dw (SET or ADD) = dy^T x,  db = column sums of dy
 *   backward input   dx (SET or ADD) = dy w          after backward weight, with the same dy
 *   gelu backward    dpre = (dy w) * gelu'(pre), dbias (SET or ADD) = column sums of dpre; likewise
 *
 * Shapes, types and modes are those of matmul.h. A layer whose `fp8` is NULL calls matmul.h.
 *
 * In fp8 each operand is scaled, rounded to 8 bits (quantize.h), and multiplied; the product is scaled back and stored
 * as floatX, dw as real. x and w are E4M3, dy is E5M2, which has a wider range. Bias gradients are sums of dy before it
 * is rounded. The tensor cores sum along the contiguous index of both operands, so w, x and dy are also kept transposed.
 *
 *   pass             operands        format            sum
 *   forward          x, w            E4M3 E4M3         fast: all in the tensor cores, which keep about 13 bits
 *   backward input   dy, w^T         E5M2 E4M3         fast
 *   backward weight  dy^T, x^T       E5M2 E4M3         partial sums are added in fp32: this one has N terms
 *
 * shapes     IC and OC are multiples of 16.
 * scales     delayed: from the largest elements of the last steps (fp8_scales.h), one for each operand of each layer.
 *            Before the first step (`calibrates`) each tensor is measured first, and then rounded.
 * numerics   the CPU version computes with the same rounded operands, in `real`.
 * source     Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433 */
#ifndef LLMC_OPS_LINEAR_H
#define LLMC_OPS_LINEAR_H

#include "llmc/ops/fp8_scales.h"
#include "llmc/ops/gelu.h"
#include "llmc/ops/matmul/matmul.h"
#include "llmc/ops/quantize/quantize.h"

// The operands of a layer, in the order of their rows in the table of scales.
enum { FP8_X, FP8_W, FP8_DY, FP8_OPERANDS };

// What all fp8 layers share: the table of scales, and the operands of the product that runs.
typedef struct {
    Fp8Scales scales;    // [FP8_OPERANDS * layers]
    Fp8Stats* measured;  // [1], of one tensor before the first step
    int calibrates;      // 1: no scales yet, so every tensor is measured first
    int records;         // 1: a training step, whose statistics count
    uint8_t *x, *xt;     // [N, IC] and [IC, Np]
    uint8_t *dy, *dyt;
    const floatX *x_of, *dy_of;  // the tensors whose bytes x, and dy and dyt, are; NULL: none
    real* unpacked[2];           // CPU: both operands as numbers
} Fp8Operands;

typedef struct Fp8Linear {
    Fp8Operands* shared;
    int row;          // of its x in the table of scales
    uint8_t *w, *wt;  // [OC, IC] and [IC, OC]: its weight as of the last forward pass
} Fp8Linear;

// The same without the bias, whose gradient another op computes.
static inline LinearGrads linear_weight_only(LinearGrads d) {
    d.b = NULL;
    return d;
}

// ---------------------------------------------------------------------------------------------------------
// Operands in fp8

static inline Fp8Format fp8_operand_format(int operand) { return operand == FP8_DY ? FP8_E5M2 : FP8_E4M3; }

static inline QuantizeOutput fp8_output(const Fp8Linear* f, int operand, uint8_t* y, uint8_t* yt) {
    QuantizeOutput out = {y, yt, NULL, f->shared->scales.scale + f->row + operand, fp8_operand_format(operand)};
    return out;
}

// Quantize an operand of [N, C] for the first time in this pass: it is measured.
COMPILED_IF_CALLED static inline void fp8_quantize(const Fp8Linear* f, int operand, uint8_t* y, uint8_t* yt,
                                                   const floatX* x, int N, int C, Context* ctx) {
    const Fp8Operands* s = f->shared;
    QuantizeOutput out = fp8_output(f, operand, y, yt);
    if (s->calibrates) {
        out.stats = s->measured;
        quantize(out, x, N, C, ctx);
        fp8_scales_measure(s->scales, s->measured, f->row + operand, ctx);
    }
    out.stats = s->records ? s->scales.stats + f->row + operand : NULL;
    quantize(out, x, N, C, ctx);
}

static inline const real* fp8_inverse(const Fp8Linear* f, int operand) {
    return f->shared->scales.inverse + (size_t)(f->row + operand) * FP8_INVERSE_APART;
}

// ---------------------------------------------------------------------------------------------------------
// Products of fp8 operands

typedef struct {
    MatmulPass pass;
    const uint8_t *a, *b;  // w and x; w^T and dy; x^T and dy^T
    const real *a_inverse, *b_inverse;
    void* d;  // y, dx or dw
    const floatX* bias;
    int N, IC, OC;
    Mode mode;
} Fp8Product;

#ifdef __CUDACC__

static inline void fp8_product(const Fp8Operands* s, Fp8Product p, Context* ctx) {
    MatmulOperands o = {p.a, p.b, p.d, p.bias, NULL, p.N, p.a_inverse, p.b_inverse};
    (void)s;
    matmul_product(matmul_key(MATMUL_PASSES + p.pass, p.N, p.IC, p.OC, p.mode, ctx), &o, ctx);
}

#else

// The numbers [rows, columns] that bytes stand for, or bytes of the transpose, whose rows are `stride` apart.
static inline void fp8_unpack(real* x, const uint8_t* bytes, size_t rows, size_t columns, size_t stride,
                              Fp8Format format, const real* inverse) {
    real number[256];
    for (int i = 0; i < 256; i++) number[i] = (real)fp8_to_float((uint8_t)i, format) * *inverse;
#pragma omp parallel for schedule(static)
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++)
            x[r * columns + c] = number[bytes[stride ? c * stride + r : r * columns + c]];
}

static inline void fp8_product(const Fp8Operands* s, Fp8Product p, Context* ctx) {
    real *a = s->unpacked[0], *b = s->unpacked[1];
    size_t N = (size_t)p.N, IC = (size_t)p.IC, OC = (size_t)p.OC, Np = quantize_rows(p.N);
    Product r;
    if (p.pass == MATMUL_FORWARD) {
        Linear linear = {a, (floatX*)p.bias, NULL};
        fp8_unpack(a, p.a, OC, IC, 0, FP8_E4M3, p.a_inverse);
        fp8_unpack(b, p.b, N, IC, 0, FP8_E4M3, p.b_inverse);
        r = product_forward((floatX*)p.d, b, linear, p.N, p.IC, p.OC);
    } else if (p.pass == MATMUL_BACKWARD_INPUT) {
        fp8_unpack(a, p.a, OC, IC, OC, FP8_E4M3, p.a_inverse);
        fp8_unpack(b, p.b, N, OC, 0, FP8_E5M2, p.b_inverse);
        r = product_backward_input((floatX*)p.d, b, a, p.N, p.IC, p.OC);
    } else {
        fp8_unpack(a, p.a, N, IC, Np, FP8_E4M3, p.a_inverse);
        fp8_unpack(b, p.b, N, OC, Np, FP8_E5M2, p.b_inverse);
        r = product_backward_weight((real*)p.d, b, a, p.N, p.IC, p.OC);
    }
    r.mode = p.mode;
    product_run(&r, ctx);
}

#endif

// ---------------------------------------------------------------------------------------------------------
// Launchers

// Bytes that a product reads and writes: fp8 operands of `a` and `b` elements, d elements of the type `type`.
#define FP8_PRODUCT_BYTES(a, b, d, mode, type)                                                                         \
    (1.0 * (a) + 1.0 * (b) + ((mode) == ADD ? 2.0 : 1.0) * (d) * sizeof(type))

static inline Scope fp8_product_open(const Fp8Product* p, Context* ctx) {
    static const char* const NAMES[] = {"matmul_forward_fp8", "matmul_backward_input_fp8",
                                        "matmul_backward_weight_fp8"};
    double x = (double)p->N * p->IC, y = (double)p->N * p->OC, w = (double)p->IC * p->OC;
    double bytes = p->pass == MATMUL_FORWARD          ? FP8_PRODUCT_BYTES(w, x, y, p->mode, floatX)
                   : p->pass == MATMUL_BACKWARD_INPUT ? FP8_PRODUCT_BYTES(w, y, x, p->mode, floatX)
                                                      : FP8_PRODUCT_BYTES(x, y, w, p->mode, real);
    return scope_open(ctx, NAMES[p->pass], MATMUL_FLOPS(p->N, p->IC, p->OC), bytes, "N=%d IC=%d OC=%d", p->N, p->IC,
                      p->OC);
}

COMPILED_IF_CALLED static inline void linear_forward_fp8(floatX* y, const floatX* x, Linear p, int N, int IC, int OC,
                                                         Context* ctx) {
    const Fp8Linear* f = p.fp8;
    Fp8Operands* s = f->shared;
    fp8_quantize(f, FP8_W, f->w, f->wt, p.w, OC, IC, ctx);
    if (s->x_of != x) fp8_quantize(f, FP8_X, s->x, NULL, x, N, IC, ctx);
    s->x_of = NULL;
    Fp8Product product = {
        .pass = MATMUL_FORWARD, .a = f->w, .b = s->x, .d = y, .bias = p.b, .N = N, .IC = IC, .OC = OC, .mode = SET};
    product.a_inverse = fp8_inverse(f, FP8_W), product.b_inverse = fp8_inverse(f, FP8_X);
    Scope scope = fp8_product_open(&product, ctx);
    fp8_product(s, product, ctx);
    scope_close(&scope);
}

COMPILED_IF_CALLED static inline void linear_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC,
                                                     Context* ctx) {
    if (p.fp8) linear_forward_fp8(y, x, p, N, IC, OC, ctx);
    else matmul_forward(y, x, p, N, IC, OC, SET, ctx);
}

COMPILED_IF_CALLED static inline void linear_gelu_forward(floatX* y, floatX* pre, const floatX* x, Linear p, int N,
                                                          int IC, int OC, Gelu kind, Context* ctx) {
    if (p.fp8) {
        linear_forward_fp8(pre, x, p, N, IC, OC, ctx);
        gelu_forward(y, pre, (size_t)N * (size_t)OC, kind, ctx);
    } else matmul_gelu_forward(y, pre, x, p, N, IC, OC, kind, ctx);
}

COMPILED_IF_CALLED static inline void linear_backward_weight(LinearGrads d, const floatX* dy, const floatX* x, int N,
                                                             int IC, int OC, Mode mode, Context* ctx) {
    if (!d.fp8) {
        matmul_backward_weight(d, dy, x, N, IC, OC, mode, ctx);
        return;
    }
    const Fp8Linear* f = d.fp8;
    Fp8Operands* s = f->shared;
    if (s->dy_of != dy) fp8_quantize(f, FP8_DY, s->dy, s->dyt, dy, N, OC, ctx);
    s->dy_of = dy;
    quantize(fp8_output(f, FP8_X, NULL, s->xt), x, N, IC, ctx);
    Fp8Product product = {
        .pass = MATMUL_BACKWARD_WEIGHT, .a = s->xt, .b = s->dyt, .d = d.w, .N = N, .IC = IC, .OC = OC, .mode = mode};
    product.a_inverse = fp8_inverse(f, FP8_X), product.b_inverse = fp8_inverse(f, FP8_DY);
    Scope scope = fp8_product_open(&product, ctx);
    fp8_product(s, product, ctx);
    BiasGrad bias = {d.b, mode};
    if (d.b) matmul_backward_bias(bias, dy, N, OC, ctx);
    scope_close(&scope);
}

COMPILED_IF_CALLED static inline void linear_backward_input_fp8(floatX* dx, const floatX* dy, const Fp8Linear* f, int N,
                                                                int IC, int OC, Mode mode, Context* ctx) {
    Fp8Operands* s = f->shared;
    CHECK(s->dy_of == dy);
    s->dy_of = NULL;
    Fp8Product product = {
        .pass = MATMUL_BACKWARD_INPUT, .a = f->wt, .b = s->dy, .d = dx, .N = N, .IC = IC, .OC = OC, .mode = mode};
    product.a_inverse = fp8_inverse(f, FP8_W), product.b_inverse = fp8_inverse(f, FP8_DY);
    Scope scope = fp8_product_open(&product, ctx);
    fp8_product(s, product, ctx);
    scope_close(&scope);
}

COMPILED_IF_CALLED static inline void linear_backward_input(floatX* dx, const floatX* dy, Linear p, int N, int IC,
                                                            int OC, Mode mode, Context* ctx) {
    if (p.fp8) linear_backward_input_fp8(dx, dy, p.fp8, N, IC, OC, mode, ctx);
    else matmul_backward_input(dx, dy, p.w, N, IC, OC, mode, ctx);
}

COMPILED_IF_CALLED static inline void linear_gelu_backward_input(floatX* dpre, BiasGrad d, const floatX* dy, Linear p,
                                                                 const floatX* pre, int N, int IC, int OC, Gelu kind,
                                                                 Context* ctx) {
    if (p.fp8) {
        size_t n = (size_t)N * (size_t)IC;
        linear_backward_input_fp8(dpre, dy, p.fp8, N, IC, OC, SET, ctx);
        Scope scope = scope_open(ctx, "gelu_backward_bias", GELU_BACKWARD_FLOPS(n), GELU_BACKWARD_BYTES(n, SET),
                                 "N=%d C=%d", N, IC);
        matmul_gelu_backward_bias(d, dpre, pre, N, IC, kind, ctx);
        scope_close(&scope);
    } else matmul_gelu_backward_input(dpre, d, dy, p.w, pre, N, IC, OC, kind, ctx);
}

#endif
