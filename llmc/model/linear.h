/* linear: the matmuls of a linear layer.
 *
 *   forward          y  (SET) = x w^T + b            x [N, IC], w [OC, IC], b [OC] or NULL, y [N, OC]
 *   gelu forward     pre = x w^T + b,  y = gelu(pre)
 *   backward weight  dw (SET or ADD) = dy^T x,  db = column sums of dy
 *   backward input   dx (SET or ADD) = dy w          after backward weight, if that computes db
 *   gelu backward    dpre = (dy w) * gelu'(pre),  dbias (SET or ADD) = column sums of dpre
 *
 * Shapes, types and modes are as in ops/matmul/matmul.h, which computes them in floatX. Operands with an 8-bit copy
 * (x.q, dy.q) are multiplied in fp8 by fp8/linear.h. */
#ifndef LLMC_MODEL_LINEAR_H
#define LLMC_MODEL_LINEAR_H

#include "llmc/model/fp8.h"
#include "llmc/ops/classifier/classifier.h"
#include "llmc/ops/gelu.h"
#include "llmc/ops/matmul/matmul.h"

// After an op that wrote only x.v [N, C]: fill its 8-bit copy, if it has one.
COMPILED_IF_CALLED static inline void operand_fill(Operand x, int N, int C, Context* ctx) {
    if (x.q) fp8_fill(x, N, C, ctx);
}

COMPILED_IF_CALLED static inline void linear_forward(floatX* y, Operand x, Linear p, int N, int IC, int OC,
                                                     Context* ctx) {
    if (x.q) fp8_linear_forward(y, x, p, (LinearSize){N, IC, OC}, ctx);
    else matmul_forward(y, x.v, p, N, IC, OC, SET, ctx);
}

COMPILED_IF_CALLED static inline void linear_gelu_forward(Operand y, GeluInput gelu, Operand x, Linear p, LinearSize z,
                                                          Context* ctx) {
    if (x.q) fp8_linear_gelu_forward(y, gelu, x, p, z, ctx);
    else matmul_gelu_forward(y.v, gelu.pre, x.v, p, z.N, z.IC, z.OC, gelu.kind, ctx);
}

// If it computes db, it also fills dy.q, in the same pass.
COMPILED_IF_CALLED static inline void linear_backward_weight(LinearGrads d, Operand dy, Operand x, int N, int IC,
                                                             int OC, Mode mode, Context* ctx) {
    if (dy.q) fp8_linear_backward_weight(d, dy, x, (LinearSize){N, IC, OC}, mode, ctx);
    else matmul_backward_weight(d, dy.v, x.v, N, IC, OC, mode, ctx);
}

COMPILED_IF_CALLED static inline void linear_backward_input(floatX* dx, Operand dy, Linear p, int N, int IC, int OC,
                                                            Mode mode, Context* ctx) {
    if (dy.q) fp8_linear_backward_input(dx, dy, p, (LinearSize){N, IC, OC}, mode, ctx);
    else matmul_backward_input(dx, dy.v, p.w, N, IC, OC, mode, ctx);
}

// classifier_backward() of the logits dlogits.v [N, Vp]: their gradient replaces them, or is written to dlogits.q only.
COMPILED_IF_CALLED static inline void linear_classifier_backward(Operand dlogits, Losses losses, const int* targets,
                                                                 const real* loss_scale, int N, int V, int Vp,
                                                                 Context* ctx) {
    if (dlogits.q) fp8_linear_classifier_backward(dlogits, losses, targets, loss_scale, N, V, Vp, ctx);
    else classifier_backward(losses, dlogits.v, targets, loss_scale, N, V, Vp, ctx);
}

// `d`: the gradients of the layer before GELU; only d.b is written.
COMPILED_IF_CALLED static inline void linear_gelu_backward_input(Operand dpre, LinearGrads d, Mode mode, Operand dy,
                                                                 Linear p, GeluInput gelu, LinearSize z, Context* ctx) {
    BiasGrad db = {.b = d.b, .mode = mode};
    if (dy.q) fp8_linear_gelu_backward_input(dpre, db, dy, p, gelu, z, ctx);
    else matmul_gelu_backward_input(dpre.v, db, dy.v, p.w, gelu.pre, z.N, z.IC, z.OC, gelu.kind, ctx);
}

#endif
