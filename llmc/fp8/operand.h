/* The 8-bit copies of a linear layer's operands, with --fp8 (fp8/linear.h).
 *
 * A layer in fp8 multiplies copies of its input x, its weight w and the gradient dy of its output. Fp8Copy is the `q`
 * of an Operand x or dy (device.h): NULL where the layer is not in fp8. Who writes x.v or dy.v also fills the copy: a
 * kernel that rounds its own output, or fp8_fill(), a pass over v. A copy may also be filled from what v is computed
 * from, such as GELU's input. Then v need not be written.
 *
 * Bytes of x and of dy are in one buffer each, which all layers share. They are valid until the next copy is filled, so
 * a layer's x until its forward matmul, and its dy until its backward matmuls. The backward pass reads x transposed.
 * During a training step each layer keeps that transpose. If activations are recomputed, x is rounded again instead. */
#ifndef LLMC_FP8_OPERAND_H
#define LLMC_FP8_OPERAND_H

#include "llmc/fp8/mean_bias.h"
#include "llmc/fp8/quantize.h"
#include "llmc/fp8/scales.h"

// The operands of a layer, in the order of their rows in the table of scales.
enum { FP8_X, FP8_W, FP8_DY, FP8_OPERANDS };

// Shared by all fp8 layers: the table of scales, and the buffers of the current matmul.
typedef struct {
    Fp8Scales scales;    // [FP8_OPERANDS * layers]
    Fp8Stats* measured;  // [1], of one tensor in the first steps
    int calibrates;      // 1: too few steps for scales, so every tensor is measured first
    int records;         // 1: in a training step, which records the largest absolute values and keeps transposed inputs
    double* elements;    // [FP8_OPERANDS * layers] on the host: number of elements that the step has quantized
    uint8_t *x, *xt;     // [N, IC] and [IC, Np]
    uint8_t *dy, *dyt;
    real* means;        // [2, IC] of the current matmul's x
    real* center;       // [2, IC] of the output matrix's x
    floatX* bias;       // [OC] of the current matmul
    real* unpacked[2];  // CPU: both operands, cast to real
} Fp8Shared;

typedef struct {
    Fp8Shared* shared;
    int row;            // of its x in the table of scales
    int exact_forward;  // 1: the forward matmul is in floatX
    uint8_t *w, *wt;    // [OC, IC] and [IC, OC]: its weight as of the last forward pass
} Fp8Linear;

typedef struct Fp8Copy {
    const Fp8Linear* layer;  // which multiplies it
    int operand;             // FP8_X or FP8_DY
    int v_is_read;           // 1: something reads v besides this copy
    int is_centered;         // 1: x of the output matrix, which linear_forward() fills from v minus its mean
    uint8_t *y, *yt;         // [N, C] and [C, Np]; yt of x NULL: not kept
    QuantizeInput from;      // what it was computed from
} Fp8Copy;

static inline Fp8Format fp8_operand_format(int operand) { return operand == FP8_DY ? FP8_E5M2 : FP8_E4M3; }

static inline const real* fp8_inverse(const Fp8Linear* f, int operand) {
    return f->shared->scales.inverse + (size_t)(f->row + operand) * FP8_INVERSE_APART;
}

static inline RoundedTensor fp8_rounded(const Fp8Copy* q) {
    RoundedTensor t = {.exact = q->from, .bytes = q->y, .inverse = fp8_inverse(q->layer, q->operand)};
    return t;
}

static inline QuantizeOutput fp8_output(const Fp8Linear* f, int operand, uint8_t* y, uint8_t* yt) {
    const real* scale = f->shared->scales.scale + f->row + operand;
    QuantizeOutput out = {
        .y = y, .yt = yt, .scale = scale, .format = fp8_operand_format(operand), .sums = {.b = NULL, .mode = SET}};
    return out;
}

static inline QuantizeOutput fp8_copy_output(const Fp8Copy* q) {
    int keeps = q->operand == FP8_DY || q->layer->shared->records;
    return fp8_output(q->layer, q->operand, q->y, keeps ? q->yt : NULL);
}

// Count the elements of an operand [N, C] that is rounded now. Returns where its statistics go; NULL: nowhere.
static inline Fp8Stats* fp8_count(const Fp8Linear* f, int operand, int N, int C) {
    const Fp8Shared* s = f->shared;
    if (!s->records) return NULL;
    s->elements[f->row + operand] += (double)N * C;
    return s->scales.stats + f->row + operand;
}

// Measure and quantize an operand [N, C]. Call it once per pass.
COMPILED_IF_CALLED static inline void fp8_quantize(const Fp8Linear* f, int operand, QuantizeOutput out,
                                                   QuantizeInput in, int N, int C, Context* ctx) {
    const Fp8Shared* s = f->shared;
    if (s->calibrates) {
        QuantizeOutput first = out;
        first.stats = s->measured, first.sums.b = NULL, first.bias.y = NULL;
        quantize(first, in, N, C, ctx);
        fp8_scales_measure(s->scales, s->measured, f->row + operand, ctx);
    }
    out.stats = fp8_count(f, operand, N, C);
    quantize(out, in, N, C, ctx);
}

// Fill q from `in` [N, C]. sums: the gradient of a bias.
COMPILED_IF_CALLED static inline void fp8_fill_from(Fp8Copy* q, QuantizeInput in, BiasGrad sums, int N, int C,
                                                    Context* ctx) {
    QuantizeOutput out = fp8_copy_output(q);
    out.sums = sums;
    fp8_quantize(q->layer, q->operand, out, in, N, C, ctx);
    q->from = in;
}

// Fill x.q from x.v [N, C].
COMPILED_IF_CALLED static inline void fp8_fill(Operand x, int N, int C, Context* ctx) {
    fp8_fill_from(x.q, quantize_plain(x.v), (BiasGrad){.b = NULL}, N, C, ctx);
}

#endif
