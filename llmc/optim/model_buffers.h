/* A model's buffers: parameters, gradients, activations, and the fp32 copies of layernorm weights. A trainer fills the
 * tables. This file allocates the buffers from them, binds the buffers to the model's structs, and frees them. */
#ifndef LLMC_OPTIM_MODEL_BUFFERS_H
#define LLMC_OPTIM_MODEL_BUFFERS_H

#include "llmc/optim/fp32_copies.h"
#include "llmc/optim/memory_plan.h"

typedef struct {
    TensorTable table;        // of the parameters; gradients and the optimizer's moments have the same layout
    TensorTable acts_table;   // of the activations in floatX
    TensorTable stats_table;  // of activations that stay in fp32: statistics, losses
    floatX* params;
    real* grads;  // empty if nothing is trained (table.fixed)
    floatX* acts;
    real* stats;
    Fp32Copies fp32_copies;
    GradSync* grad_sync;     // NULL: one rank
    const real* master;      // master weights in full precision; NULL: none
    const real* loss_scale;  // [1] on the device; NULL: 1
} ModelBuffers;

// The structs that the tables are bound to: one for the tensors outside the layers, and an array of one per layer.
typedef struct {
    void *outer, *layers;
    size_t layer_bytes;
} TensorStructs;

// Allocate the buffers of the tables, and point the structs' fields to them. Gradient structs have the same layout as
// parameter structs.
static inline void model_buffers_alloc(ModelBuffers* b, TensorStructs params, TensorStructs grads, TensorStructs acts,
                                       Context* ctx) {
    b->params = (floatX*)device_alloc(ctx, b->table.elements * sizeof(floatX), "parameters");
    b->grads = (real*)device_alloc(ctx, tensors_updated(&b->table).size * sizeof(real), "gradients");
    b->acts = (floatX*)device_alloc(ctx, b->acts_table.elements * sizeof(floatX), "activations");
    b->stats = (real*)device_alloc(ctx, b->stats_table.elements * sizeof(real), "activations");
    tensors_bind(&b->table, b->params, sizeof(floatX), params.outer, params.layers, params.layer_bytes);
    fp32_copies_open(&b->fp32_copies, &b->table, b->params, params.outer, params.layers, params.layer_bytes, ctx);
    tensors_bind(&b->table, b->grads, sizeof(real), grads.outer, grads.layers, grads.layer_bytes);
    tensors_bind(&b->acts_table, b->acts, sizeof(floatX), acts.outer, acts.layers, acts.layer_bytes);
    tensors_bind(&b->stats_table, b->stats, sizeof(real), acts.outer, acts.layers, acts.layer_bytes);
}

// Free only the tables, for a model that was planned but not allocated.
static inline void model_buffers_free_tables(ModelBuffers* b) {
    tensors_free(&b->table), tensors_free(&b->acts_table), tensors_free(&b->stats_table);
}

static inline void model_buffers_free(ModelBuffers* b) {
    fp32_copies_close(&b->fp32_copies, &b->table);
    device_free(b->params, b->table.elements * sizeof(floatX));
    device_free(b->grads, tensors_updated(&b->table).size * sizeof(real));
    device_free(b->acts, b->acts_table.elements * sizeof(floatX));
    device_free(b->stats, b->stats_table.elements * sizeof(real));
    model_buffers_free_tables(b);
}

// Finish the tables, after the last row.
static inline void model_buffers_finish_tables(ModelBuffers* b) {
    tensors_finish(&b->table), tensors_finish(&b->acts_table), tensors_finish(&b->stats_table);
}

// Before a forward pass: wait for the parameters outside the layers, and update the fp32 copies.
static inline void model_buffers_update_copies(const ModelBuffers* b, Context* ctx) {
    grad_sync_wait(b->grad_sync, 0, ctx);
    fp32_copies_update(&b->fp32_copies, &b->table, b->params, b->master, b->grad_sync, ctx);
}

// Write host values to all parameters and to the master weights. `values`: a view of b->params, [table.elements].
static inline void model_buffers_write(const ModelBuffers* b, const Optimizer* o, const HostView* values,
                                       Context* ctx) {
    optimizer_write_weights(o, values, ctx);
    fp32_copies_update(&b->fp32_copies, &b->table, b->params, NULL, NULL, ctx);  // for fixed parameters not in a file
}

// Read the parameters from a model's file, and the master weights if there are any. `lacking` gets the names of missing
// tensors, if `rules` allows them to be missing (NULL: none may be missing).
static inline void model_buffers_read(const ModelBuffers* b, const Optimizer* o, const char* path,
                                      const FileRules* rules, Text* lacking, Context* ctx) {
    TensorPart part = {"", b->params, VIEW_FLOATX};
    tensors_read(path, &b->table, &part, 1, rules, lacking, ctx);
    fp32_copies_read_master(&b->fp32_copies, &b->table, o, path, rules, ctx);
}

// Read one of the model's fp32 values, such as its loss. Waits for the device.
static inline double model_buffers_number(const real* cell, Context* ctx) {
    real value;
    device_download(ctx, &value, cell, sizeof value);
    return (double)value;
}

#endif
