/* The last layer of a click model, one output, with binary cross-entropy on its logit.
 *
 *   logits[n] = x[n] . w + b
 *   each[n]   = max(s, 0) - s y + log(1 + exp(-|s|))          s = logits[n], y = labels[n] in 0 .. 1
 *   sum       = (SET or ADD) scale * (each[0] + ... + each[N - 1])
 *   BACKWARD  dlogit = scale * (sigmoid(s) - y);  dw = sum_n dlogit x[n];  db = sum_n dlogit                    SET
 *             dx[n] = dlogit w; columns from relu_begin on are outputs of a ReLU with dropout: there dx is multiplied
 *             by relu_scale where x > 0, else it is 0, so dx is the gradient of what goes into the ReLU
 *             dbias[c - relu_begin] = sum_n dx[n, c], the bias gradient of the layer below; NULL: not wanted
 *
 * Shapes: x, dx [N, C], w [C], b [1], logits, labels, each [N]. dtypes: x, dx, w, b floatX; the others real. Numerics:
 * dot products and losses in real, sums over n in double (CPU) or fp32 (GPU), in an order that depends only on the
 * shape. FORWARD only writes logits and losses.
 * Source: the definition, in the stable form of torch.nn.functional.binary_cross_entropy_with_logits. */
#ifndef DEV_RECSYS_OPS_LINEAR_BCE_H
#define DEV_RECSYS_OPS_LINEAR_BCE_H

#include "llmc/device/scope.h"
#include "llmc/ops/common/losses.h"
#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif

enum { LINEAR_BCE_MAX_C = 512 };  // of the GPU's kernel

typedef struct {
    int N, C, relu_begin;
    real relu_scale;
} LinearBceShape;

typedef struct {
    const floatX* x;
    Linear p;
    const real* labels;
} LinearBceInput;

typedef struct {
    real* logits;
    floatX* dx;
    LinearGrads grads;
    real* dbias;
} LinearBceOutput;

#define LINEAR_BCE_FLOPS(s, direction) (((direction) == FORWARD ? 2.0 : 6.0) * (s).N * (s).C)
#define LINEAR_BCE_BYTES(s, direction)                                                                                 \
    ((double)(s).N * (((direction) == FORWARD ? 1.0 : 2.0) * (s).C * sizeof(floatX) + 3 * sizeof(real)))

HOST_DEVICE static inline double bce_loss(double s, double y) { return (s > 0 ? s : 0) - s * y + log1p(exp(-fabs(s))); }

HOST_DEVICE static inline double bce_sigmoid(double s) { return 1 / (1 + exp(-s)); }

// The gradient of what goes into a ReLU with dropout, from that of its output x.
HOST_DEVICE static inline real relu_gradient(real dx, real x, real scale) { return x > 0 ? scale * dx : 0; }

// ---------------------------------------------------------------------------------------------------------
// Reference

// Inputs and outputs in full precision.
typedef struct {
    real *logits, *dx, *dw, *db, *dbias;
    const real *x, *w, *b, *labels;
} LinearBceRef;

static inline void linear_bce_ref(Losses losses, LinearBceRef r, LinearBceShape s, Direction direction) {
    for (int n = 0; n < s.N; n++) {
        const real* x = r.x + (size_t)n * (size_t)s.C;
        double sum = (double)*r.b;
        for (int c = 0; c < s.C; c++) sum += (double)x[c] * (double)r.w[c];
        r.logits[n] = (real)sum;
        losses.each[n] = (real)bce_loss(sum, (double)r.labels[n]);
        double d = losses.scale * (bce_sigmoid(sum) - (double)r.labels[n]);
        for (int c = 0; c < s.C && direction == BACKWARD; c++) {
            real dx = (real)(d * (double)r.w[c]);
            r.dx[(size_t)n * (size_t)s.C + (size_t)c] = c < s.relu_begin ? dx : relu_gradient(dx, x[c], s.relu_scale);
        }
    }
    for (int c = 0; c <= s.C && direction == BACKWARD; c++) {
        double sum = 0, below = 0;
        for (int n = 0; n < s.N; n++) {
            size_t at = (size_t)n * (size_t)s.C + (size_t)c;
            double d = losses.scale * (bce_sigmoid((double)r.logits[n]) - (double)r.labels[n]);
            sum += c < s.C ? d * (double)r.x[at] : d;
            below += c < s.C ? (double)r.dx[at] : 0;
        }
        *(c < s.C ? &r.dw[c] : r.db) = (real)sum;
        if (r.dbias && c >= s.relu_begin && c < s.C) r.dbias[c - s.relu_begin] = (real)below;
    }
    losses_add_ref(losses, s.N);
}

#ifdef __CUDACC__
#include "dev/recsys/ops/linear_bce.cuh"
#else
// ---------------------------------------------------------------------------------------------------------
// CPU: rows, then columns, each by one thread

static inline void linear_bce(Losses losses, LinearBceOutput out, LinearBceInput in, LinearBceShape s,
                              Direction direction, Context* ctx) {
    Scope scope = scope_open(ctx, direction == FORWARD ? "linear_bce_forward" : "linear_bce_backward",
                             LINEAR_BCE_FLOPS(s, direction), LINEAR_BCE_BYTES(s, direction), "N=%d C=%d", s.N, s.C);
    real* dlogits = (real*)device_scratch(ctx, (size_t)s.N * sizeof(real));
#pragma omp parallel for schedule(static)
    for (int n = 0; n < s.N; n++) {
        const real* x = in.x + (size_t)n * (size_t)s.C;
        real sum = *in.p.b;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < s.C; c++) sum += x[c] * in.p.w[c];
        out.logits[n] = sum;
        losses.each[n] = (real)bce_loss((double)sum, (double)in.labels[n]);
        dlogits[n] = (real)(losses.scale * (bce_sigmoid((double)sum) - (double)in.labels[n]));
        for (int c = 0; c < s.C && direction == BACKWARD; c++) {
            real dx = dlogits[n] * in.p.w[c];
            out.dx[(size_t)n * (size_t)s.C + (size_t)c] = c < s.relu_begin ? dx : relu_gradient(dx, x[c], s.relu_scale);
        }
    }
    if (direction == BACKWARD) {
#pragma omp parallel for schedule(static)
        for (int c = 0; c <= s.C; c++) {
            double sum = 0, below = 0;
            for (int n = 0; n < s.N; n++) {
                size_t at = (size_t)n * (size_t)s.C + (size_t)c;
                sum += c < s.C ? (double)dlogits[n] * (double)in.x[at] : (double)dlogits[n];
                below += c < s.C ? (double)out.dx[at] : 0;
            }
            *(c < s.C ? &out.grads.w[c] : out.grads.b) = (real)sum;
            if (out.dbias && c >= s.relu_begin && c < s.C) out.dbias[c - s.relu_begin] = (real)below;
        }
    }
    losses_add_ref(losses, s.N);
    scope_close(&scope);
}
#endif
#endif
