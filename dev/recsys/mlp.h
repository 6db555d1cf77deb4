/* Multilayer perceptrons as rows of the tables of tensors, and what both recommenders do with their optimizer.
 *
 * An MLP of `count` layers has widths width[0] (input) .. width[count]. Every layer here ends with ReLU. A model's last
 * layer, which has one output, is linear_bce.h's.
 *
 * The flat buffers hold the MLPs first, then the embedding tables. Gradients exist for the MLPs only: embedding_rows.h
 * updates the tables from the gradients of the lookups. */
#ifndef DEV_RECSYS_MLP_H
#define DEV_RECSYS_MLP_H

#include "dev/recsys/ops/embedding_rows.h"
#include "dev/recsys/ops/matmul_parts.h"
#include "dev/recsys/ops/matmul_relu.h"
#include "dev/recsys/ops/sgd.h"
#include "llmc/ops/adamw.h"
#include "llmc/ops/global_norm.h"
#include "llmc/optim/model_buffers.h"

enum { MLP_LAYERS = 8, MLP_MAX_WIDTH = 4096 };

typedef struct {
    int count, width[MLP_LAYERS + 1];
    float scale;  // 1 / (1 - p) of the dropout after every ReLU
} Mlp;

// Read layers like 64-32-32 into width[1 ..]: multiples of `multiple`. Returns the end, NULL if there is no such list.
static inline const char* mlp_parse(Mlp* mlp, const char* text, int multiple) {
    for (mlp->count = 0;; text++) {
        char* end;
        long width = strtol(text, &end, 10);
        if (end == text || width < multiple || width > MLP_MAX_WIDTH || width % multiple || mlp->count == MLP_LAYERS)
            return NULL;
        mlp->width[++mlp->count] = (int)width;
        text = end;
        if (*text != '-') return text;
    }
}

// Floating-point operations of a forward and a backward pass.
static inline double mlp_flops(const Mlp* mlp, int B) {
    double flops = 0;
    for (int l = 0; l < mlp->count; l++) flops += 6.0 * B * mlp->width[l] * mlp->width[l + 1];
    return flops;
}

typedef struct {
    floatX *h[MLP_LAYERS], *dz[MLP_LAYERS];  // [B, width]
} MlpActs;

// ---------------------------------------------------------------------------------------------------------
// Rows of the tables

// A row whose sizes are numbers: `columns` 0 for a vector.
static inline void rows_add(TensorTable* table, size_t field, int rows, int columns, Placement placement,
                            const char* name) {
    const int dims[] = {1, rows, columns};
    const TensorRow row = {name, field, {1, columns ? 2 : 0}, placement};
    tensors_add(table, &row, 1, dims, -1);
}

// Weights and biases: fields of a Linear array at `field`.
static inline void mlp_add_params(TensorTable* table, const char* prefix, size_t field, const Mlp* mlp) {
    char name[64];
    for (int l = 0; l < mlp->count; l++, field += sizeof(Linear)) {
        snprintf(name, sizeof name, "%s.%d.weight", prefix, l);
        rows_add(table, field + offsetof(Linear, w), mlp->width[l + 1], mlp->width[l], OWN, name);
        snprintf(name, sizeof name, "%s.%d.bias", prefix, l);
        rows_add(table, field + offsetof(Linear, b), mlp->width[l + 1], 0, OWN, name);
    }
}

// Activations: fields of an MlpActs at `field`.
static inline void mlp_add_acts(TensorTable* table, const char* prefix, size_t field, const Mlp* mlp, int B) {
    char name[64];
    for (int l = 0; l < mlp->count; l++, field += sizeof(floatX*)) {
        snprintf(name, sizeof name, "%s.%d.h", prefix, l);
        rows_add(table, field + offsetof(MlpActs, h), B, mlp->width[l + 1], OWN, name);
        snprintf(name, sizeof name, "%s.%d.dz", prefix, l);
        rows_add(table, field + offsetof(MlpActs, dz), B, mlp->width[l + 1], OWN, name);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Forward and backward

// `dropout` [count]; NULL: none.
static inline void mlp_forward(const Mlp* mlp, const Linear* p, const MlpActs* a, const floatX* x,
                               const ReluDropout* dropout, int B, Context* ctx) {
    for (int l = 0; l < mlp->count; l++) {
        ReluOutput out = {a->h[l], mlp->scale};
        ReluDropout of_layer = dropout ? dropout[l] : relu_dropout_make(0, 0, 0);
        matmul_relu_forward(out, l ? a->h[l - 1] : x, p[l], B, mlp->width[l], mlp->width[l + 1], of_layer, ctx);
    }
}

// Outputs of the backward pass.
typedef struct {
    const LinearGrads* g;  // [count]
    floatX* dx;            // NULL: not wanted
    PartsSum* parts;
} MlpBackward;

// Elements that the parts of all layers' weight gradients need.
static inline size_t mlp_parts_size(const Mlp* mlp, int B) {
    size_t n = 0;
    for (int l = 0; l < mlp->count; l++) n += matmul_parts_size(B, mlp->width[l], mlp->width[l + 1]);
    return n;
}

// From a->dz[count - 1], the gradient of what goes into the last ReLU: all weights, all biases but the last one, the
// other dz, and the gradient of x (NULL: not wanted). Weights are complete after matmul_parts_sum().
static inline void mlp_backward(MlpBackward d, const Mlp* mlp, const Linear* p, const MlpActs* a, const floatX* x,
                                int B, Context* ctx) {
    const LinearGrads* g = d.g;
    for (int l = mlp->count - 1; l >= 0; l--) {
        int IC = mlp->width[l], OC = mlp->width[l + 1];
        matmul_parts_backward_weight(d.parts, g[l].w, a->dz[l], l ? a->h[l - 1] : x, B, IC, OC, ctx);
        if (l || d.dx) {
            ReluOutput below = {l ? a->h[l - 1] : NULL, mlp->scale};
            ReluGrads input = {l ? a->dz[l - 1] : d.dx, l ? g[l - 1].b : NULL};
            matmul_relu_backward_input(input, a->dz[l], p[l].w, below, B, IC, OC, ctx);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Memory and updates

// The full-precision parameters: the master weights, or the parameters themselves.
static inline real* recommender_weights(const ModelBuffers* b, const Optimizer* o) {
    return o->master ? o->master : (real*)b->params;
}

// A table of `o` whose first element is number `at` of the flat buffers.
static inline EmbeddingTable recommender_table(const ModelBuffers* b, const Optimizer* o, size_t at, int E) {
    EmbeddingTable t = {recommender_weights(b, o) + at, b->params + at, o->m + at, o->v + at, E};
    return t;
}

// The norm of the MLPs' gradients, and from it the values that all updates of the step share.
static inline void recommender_norm(const ModelBuffers* b, Optimizer* o, size_t elements, OptimizerSettings h,
                                    Context* ctx) {
    AfterNorm after = {o->loss_scale, o->step, o->rule, h};
    scope_at(ctx, OPTIMIZER, -1);
    global_norm_forward(o->norm, b->grads, elements, after, ctx);
}

#endif
