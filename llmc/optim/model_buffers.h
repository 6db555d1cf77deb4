/* A model's buffers: parameters, gradients, activations, and the fp32 copies of layernorm weights. A trainer fills the
 * tables. This file allocates the buffers from them, binds the buffers to the model's structs, and frees them. */
#ifndef LLMC_OPTIM_MODEL_BUFFERS_H
#define LLMC_OPTIM_MODEL_BUFFERS_H

#include "llmc/model/fp8.h"
#include "llmc/optim/fp32_copies.h"
#include "llmc/optim/memory_plan.h"

// A struct that tables are bound to: `outer` for the tensors outside the layers, and one struct of `layer_bytes` per
// layer, in an array to which the pointer at offset `layers` of `outer` is set.
typedef struct {
    void* outer;
    size_t layers, layer_bytes;
} TensorStructs;

// A new model's weights: random values, which a file's values may replace.
typedef struct {
    size_t zero_begin, zero_count;  // elements of the parameters that start as zero
    FileRules file;                 // and the standard deviations
} WeightRules;

typedef struct {
    // Filled by the model's plan.
    TensorTable table;         // of the parameters; gradients and the optimizer's moments have the same layout
    TensorTable acts_table;    // of the activations in floatX
    TensorTable stats_table;   // of activations that stay in fp32: statistics, losses
    TensorStructs structs[3];  // of parameters, gradients (with the parameters' layout) and activations
    size_t tied, tied_to;      // offsets: the field `tied` of parameters and gradients points where `tied_to` does
    StepSizes step;            // maximum sizes of a micro-batch
    size_t batch_bytes;        // bytes of its inputs on the device
    // Allocated.
    floatX* params;
    real* grads;  // empty if the parameters are fixed (table.fixed)
    floatX* acts;
    real* stats;
    void* layers[3];  // of `structs`
    Fp32Copies fp32_copies;
    Fp8State fp8;
    // Set by the run.
    GradSync* grad_sync;     // NULL: one rank
    const real* master;      // master weights in full precision; NULL: none
    const real* loss_scale;  // [1] on the device; NULL: 1
    DropoutStep dropout;     // of the current step; off outside of steps
} ModelBuffers;

// Tie two fields of the outer structs of parameters and gradients. `tied` is not in the table; it will point where `to`
// points.
static inline void model_buffers_tie(ModelBuffers* b, size_t tied, size_t to) { b->tied = tied, b->tied_to = to; }

// The memory of a run with these tables, computed before anything is allocated.
static inline MemoryPlan model_buffers_memory(const ModelBuffers* b, UpdateSettings update, const Context* ctx) {
    StepSizes step = b->step;
    step.other_scratch = max_size(step.other_scratch, b->fp8.scratch_bytes);
    MemoryPlan plan = memory_plan_make(&b->table, &b->acts_table, &b->stats_table, update, b->batch_bytes, &step, ctx);
    memory_plan_add(&plan, "parameters", fp8_state_parameter_bytes(&b->fp8));
    memory_plan_add(&plan, "activations", fp8_state_activation_bytes(&b->fp8));
    return plan;
}

// Allocate the buffers of the tables and the layers' structs, and point the structs' fields to the buffers.
static inline void model_buffers_alloc(ModelBuffers* b, Context* ctx) {
    const TensorStructs *params = &b->structs[0], *grads = &b->structs[1], *acts = &b->structs[2];
    size_t L = 0;
    b->params = (floatX*)device_alloc(ctx, b->table.elements * sizeof(floatX), "parameters");
    b->grads = (real*)device_alloc(ctx, tensors_updated(&b->table).size * sizeof(real), "gradients");
    b->acts = (floatX*)device_alloc(ctx, b->acts_table.elements * sizeof(floatX), "activations");
    b->stats = (real*)device_alloc(ctx, b->stats_table.elements * sizeof(real), "activations");
    for (int i = 0; i < b->table.count; i++) L = max_size(L, (size_t)(b->table.tensors[i].layer + 1));
    for (size_t i = 0; i < COUNT_OF(b->structs); i++) {
        b->layers[i] = xcalloc(L, b->structs[i].layer_bytes);
        memcpy((char*)b->structs[i].outer + b->structs[i].layers, &b->layers[i], sizeof(void*));
    }
    tensors_bind(&b->table, b->params, sizeof(floatX), params->outer, b->layers[0], params->layer_bytes);
    fp32_copies_open(&b->fp32_copies, &b->table, b->params, params->outer, b->layers[0], params->layer_bytes, ctx);
    tensors_bind(&b->table, b->grads, sizeof(real), grads->outer, b->layers[1], grads->layer_bytes);
    tensors_bind(&b->acts_table, b->acts, sizeof(floatX), acts->outer, b->layers[2], acts->layer_bytes);
    tensors_bind(&b->stats_table, b->stats, sizeof(real), acts->outer, b->layers[2], acts->layer_bytes);
    fp8_state_open(&b->fp8, &b->table, acts->outer, b->layers[2], acts->layer_bytes, ctx);
    for (size_t i = 0; i < 2 && b->tied != b->tied_to; i++)
        memcpy((char*)b->structs[i].outer + b->tied, (char*)b->structs[i].outer + b->tied_to, sizeof(void*));
}

// Free only the tables, for a model that was planned but not allocated.
static inline void model_buffers_free_tables(ModelBuffers* b) {
    tensors_free(&b->table), tensors_free(&b->acts_table), tensors_free(&b->stats_table);
}

static inline void model_buffers_free(ModelBuffers* b) {
    fp32_copies_close(&b->fp32_copies, &b->table);
    fp8_state_close(&b->fp8);
    device_free(b->params, b->table.elements * sizeof(floatX));
    device_free(b->grads, tensors_updated(&b->table).size * sizeof(real));
    device_free(b->acts, b->acts_table.elements * sizeof(floatX));
    device_free(b->stats, b->stats_table.elements * sizeof(real));
    for (size_t i = 0; i < COUNT_OF(b->layers); i++) free(b->layers[i]);
    model_buffers_free_tables(b);
}

// Finish the tables, after the last row.
static inline void model_buffers_finish_tables(ModelBuffers* b) {
    tensors_finish(&b->table), tensors_finish(&b->acts_table), tensors_finish(&b->stats_table);
}

// Before a forward pass, if there are fp32 copies: update them.
static inline void model_buffers_update_copies(const ModelBuffers* b, Context* ctx) {
    fp32_copies_update(&b->fp32_copies, &b->table, b->params, b->master, b->grad_sync, ctx);
}

// After an update: share the new parameters and the fp32 copies among the ranks.
static inline void model_buffers_share(const ModelBuffers* b, Context* ctx) {
    fp32_copies_share(&b->fp32_copies, &b->table, b->params, b->master, b->grad_sync, ctx);
}

// Write the values of a view of b->params, [table.elements], to all parameters and master weights. Closes the view.
static inline void model_buffers_write(const ModelBuffers* b, const Optimizer* o, HostView* view, Context* ctx) {
    optimizer_write_weights(o, view, ctx);
    fp32_copies_update(&b->fp32_copies, &b->table, b->params, NULL, NULL, ctx);  // for fixed parameters not in a file
    host_view_close(view);
}

// Draw initial values for all parameters.
static inline void model_buffers_init(const ModelBuffers* b, const Optimizer* o, const WeightRules* rules,
                                      uint64_t seed, Context* ctx) {
    HostView view = host_view_open(b->params, b->table.elements, VIEW_FLOATX);
    TensorInit init = rules->file.init;
    init.seed = seed;
    tensors_init(&b->table, view.values, init);
    memset(view.values + rules->zero_begin, 0, rules->zero_count * sizeof(real));
    model_buffers_write(b, o, &view, ctx);
}

// Read the parameters from a model's file, and the master weights if there are any. Tensors that the file may lack by
// `rules` get initial values and are reported.
static inline void model_buffers_read(const ModelBuffers* b, const Optimizer* o, const char* path,
                                      const FileRules* rules, Context* ctx) {
    TensorPart part = {.prefix = "", .device = b->params, .type = VIEW_FLOATX};
    Text lacking = {NULL, 0, 0};
    tensors_read(path, &b->table, &part, 1, rules, &lacking, ctx);
    fp32_copies_read_master(&b->fp32_copies, &b->table, o, path, rules, ctx);
    if (lacking.length) printf("%s: lacks what is initialised instead: %s\n", path, lacking.text);
    free(lacking.text);
}

// Read one of the model's fp32 values, such as its loss. Waits for the device.
static inline double model_buffers_number(const real* cell, Context* ctx) {
    real value;
    device_download(ctx, &value, cell, sizeof value);
    return (double)value;
}

#endif
