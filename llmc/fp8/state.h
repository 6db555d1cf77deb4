/* A model's state for fp8 matmuls (fp8/linear.h): the table of scales, the copies in fp8, and the pointers to them in
 * the operands of the structs of activations. The weights with TensorRow.x_q are multiplied in fp8.
 *
 * Training calls fp8_state_begin_step() before and fp8_state_end_step() after the micro-batches of a step. In between,
 * statistics are collected. Forward passes at other times use the scales and do not change the statistics.
 *
 * After the first steps (--fp8-steps) these pointers are NULL, so all matmuls are in floatX.
 *
 * In the first FP8_HISTORY steps every tensor is measured just before it is quantized. Otherwise gradients that are
 * zero in the first steps, such as those below projections that start at zero, would be quantized without a scale. */
#ifndef LLMC_FP8_STATE_H
#define LLMC_FP8_STATE_H

#include "llmc/base/json.h"
#include "llmc/dist/grad_sync.h"
#include "llmc/fp8/operand.h"
#include "llmc/model/tensors.h"

typedef struct {
    int is_wanted;              // --fp8
    int keeps_x;                // 1: the transposed inputs are kept for the backward pass
    int64_t steps;              // --fp8-steps: the number of first steps in fp8; 0: all
    const char* exact_forward;  // --fp8-exclude-forward: parts of weights' names; NULL: none
    int count;                  // linear layers
    int recorded;               // steps whose largest absolute values are known, at most FP8_HISTORY
    Fp8Linear* linears;
    Fp8Copy* copies;     // [2 * count] of x and dy of each layer
    Fp8Copy*** fields;   // [2 * count] the pointers to them in the structs of activations
    const char** names;  // of the layers' weights, in the table of tensors
    Fp8Shared shared;
    uint8_t* weights;  // of all layers, and their transposes
    uint8_t* kept;     // transposed inputs of all layers; NULL: not kept
    size_t weight_bytes, kept_bytes, x_bytes, dy_bytes, means_bytes, bias_bytes;
    size_t scratch_bytes;
    size_t rows;      // rows of the largest micro-batch, rounded up
    size_t unpacked;  // elements of each of shared.unpacked
} Fp8State;

// Whether tensor i is the weight of a linear layer in fp8. If several weights name the same operand, the last one is
// used: a head that is not tied replaces the embedding.
static inline int fp8_is_weight(const Fp8State* s, const TensorTable* table, int i) {
    const Tensor* t = &table->tensors[i];
    if (!t->x_q || !s->is_wanted) return 0;
    for (int k = i + 1; k < table->count; k++)
        if (table->tensors[k].x_q == t->x_q && table->tensors[k].layer == t->layer) return 0;
    return 1;
}

// The end of the layer of weight i: the tensors of a group (Q, K and V) are one layer.
static inline int fp8_layer_end(const TensorTable* table, int i) {
    for (i++; i < table->count && table->tensors[i].is_grouped && table->tensors[i].ndim == 2;) i++;
    return i;
}

static inline void fp8_layer_size(const TensorTable* table, int i, int* IC, int* OC) {
    const Tensor* t = &table->tensors[i];
    *IC = t->shape[1], *OC = t->stored_rows;
    for (int k = i + 1; k < fp8_layer_end(table, i); k++) *OC += table->tensors[k].shape[0];
}

// Whether the name of a weight of the layer of weight i contains the `n` characters at `part`.
static inline int fp8_layer_has(const TensorTable* table, int i, const char* part, size_t n) {
    for (int k = i; n > 0 && k < fp8_layer_end(table, i); k++)
        if (memmem(table->tensors[k].name, strlen(table->tensors[k].name), part, n)) return 1;
    return 0;
}

// Whether that layer is one of --fp8-exclude-forward.
static inline int fp8_is_excluded(const Fp8State* s, const TensorTable* table, int i) {
    for (const char* p = s->exact_forward; p && *p; p += strcspn(p, ","), p += *p == ',')
        if (fp8_layer_has(table, i, p, strcspn(p, ","))) return 1;
    return 0;
}

// Each part of --fp8-exclude-forward must be in the name of a weight.
static inline void fp8_check_excluded(const Fp8State* s, const TensorTable* table) {
    for (const char* p = s->exact_forward; p && *p; p += strcspn(p, ","), p += *p == ',') {
        int n = (int)strcspn(p, ","), found = 0;
        for (int i = 0; i < table->count && !found; i++)
            found = fp8_is_weight(s, table, i) && fp8_layer_has(table, i, p, (size_t)n);
        if (!found) die(USAGE, "--fp8-exclude-forward: no weight of an fp8 layer has '%.*s' in its name", n, p);
    }
}

// Compute the buffer sizes for micro-batches of up to N rows. Sets all fields that need no memory.
static inline void fp8_state_plan(Fp8State* s, const TensorTable* table, int N) {
    size_t Np = s->rows = quantize_rows(N), most_w = 0;
    s->count = 0, s->weight_bytes = s->kept_bytes = s->x_bytes = s->dy_bytes = s->means_bytes = s->bias_bytes = 0;
    s->scratch_bytes = 0;
    for (int i = 0; i < table->count; i++) {
        int IC, OC;
        if (!fp8_is_weight(s, table, i)) continue;
        fp8_layer_size(table, i, &IC, &OC);
        if (IC % QUANTIZE_ALIGNMENT || OC % QUANTIZE_ALIGNMENT)
            die(USAGE, "--fp8 1: %s is %d x %d; both must be multiples of %d", table->tensors[i].name, OC, IC,
                QUANTIZE_ALIGNMENT);
        s->weight_bytes += 2 * (size_t)IC * (size_t)OC;
        s->x_bytes = max_size(s->x_bytes, Np * (size_t)IC);
        s->kept_bytes += s->keeps_x ? Np * (size_t)IC : 0;
        s->dy_bytes = max_size(s->dy_bytes, Np * (size_t)OC);
        s->means_bytes = max_size(s->means_bytes, 2 * (size_t)IC * sizeof(real));
        s->bias_bytes = max_size(s->bias_bytes, (size_t)OC * sizeof(floatX));
        most_w = max_size(most_w, (size_t)IC * (size_t)OC);
#ifdef __CUDACC__
        if (!table->fixed) s->scratch_bytes = max_size(s->scratch_bytes, quantize_scratch_bytes((int)Np, OC));
        s->scratch_bytes = max_size(s->scratch_bytes, quantize_bias_bytes(OC, IC));
#endif
        s->count++;
    }
    if (s->is_wanted && !s->count) die(USAGE, "--fp8 1: this model has no products in fp8");
    if (s->is_wanted) fp8_check_excluded(s, table);
    if (table->fixed) s->dy_bytes = 0;
#ifdef __CUDACC__
    s->unpacked = 0;
#else
    s->unpacked = max_size(max_size(s->x_bytes, s->dy_bytes), most_w);
#endif
}

static inline size_t fp8_scales_bytes(size_t tensors) {
    return tensors * (sizeof(Fp8Format) + sizeof(Fp8Stats) + sizeof(Fp8Recorded) + FP8_HISTORY * sizeof(uint32_t) +
                      (1 + FP8_INVERSE_APART) * sizeof(real));
}

// Device memory of the plan.
static inline size_t fp8_state_parameter_bytes(const Fp8State* s) {
    return s->count ? s->weight_bytes + fp8_scales_bytes((size_t)s->count * FP8_OPERANDS) + sizeof(Fp8Stats) : 0;
}

static inline size_t fp8_state_activation_bytes(const Fp8State* s) {
    return s->kept_bytes + 2 * s->means_bytes + s->bias_bytes +
           2 * (s->x_bytes + s->dy_bytes + s->unpacked * sizeof(real));
}

// Refuse builds and GPUs without fp8 matmuls.
static inline void fp8_check_device(const Context* ctx) {
#ifdef __CUDACC__
    if (strcmp(FLOATX_NAME, "BF16") != 0) die(USAGE, "--fp8 needs the bf16 build: make PRECISION=bf16");
    if (ctx->capability < 89)
        die(USAGE, "--fp8 needs a GPU of compute capability 8.9 or later; this one has %d.%d", ctx->capability / 10,
            ctx->capability % 10);
#endif
    (void)ctx;
}

static inline void fp8_scales_alloc(Fp8Scales* s, int count, Context* ctx) {
    size_t n = (size_t)count;
    Fp8Format* formats = (Fp8Format*)xcalloc(n, sizeof *formats);
    real* ones = (real*)xcalloc(n * FP8_INVERSE_APART, sizeof *ones);
    for (size_t t = 0; t < n; t++) formats[t] = fp8_operand_format((int)t % FP8_OPERANDS);
    for (size_t i = 0; i < n * FP8_INVERSE_APART; i++) ones[i] = 1;
    s->count = count;
    s->format = (const Fp8Format*)device_alloc(ctx, n * sizeof *s->format, "parameters");
    s->stats = (Fp8Stats*)device_alloc(ctx, n * sizeof *s->stats, "parameters");
    s->recorded = (Fp8Recorded*)device_alloc(ctx, n * sizeof *s->recorded, "parameters");
    s->history = (uint32_t*)device_alloc(ctx, n * FP8_HISTORY * sizeof *s->history, "parameters");
    s->scale = (real*)device_alloc(ctx, n * sizeof *s->scale, "parameters");
    s->inverse = (real*)device_alloc(ctx, n * FP8_INVERSE_APART * sizeof *s->inverse, "parameters");
    device_upload(ctx, (void*)s->format, formats, n * sizeof *formats);
    device_upload(ctx, s->scale, ones, n * sizeof *ones);
    device_upload(ctx, s->inverse, ones, n * FP8_INVERSE_APART * sizeof *ones);
    device_synchronize(ctx);
    free(formats), free(ones);
}

static inline int fp8_state_is_on(const Fp8State* s, int64_t step) {
    return s->count && (!s->steps || step < s->steps);
}

// Use fp8 in step `step` (from 0) and what precedes it, such as a validation, or stop using it.
static inline void fp8_state_switch(Fp8State* s, int64_t step) {
    int is_on = fp8_state_is_on(s, step);
    for (int i = 0; i < 2 * s->count; i++) *s->fields[i] = is_on ? &s->copies[i] : NULL;
}

// Allocate the buffers of fp8_state_plan(), and point the operands of the structs of activations to their copies.
static inline void fp8_state_open(Fp8State* s, const TensorTable* table, void* outer, void* layers, size_t layer_bytes,
                                  Context* ctx) {
    Fp8Shared* o = &s->shared;
    if (!s->count) return;
    fp8_check_device(ctx);
    s->linears = (Fp8Linear*)xcalloc((size_t)s->count, sizeof *s->linears);
    s->copies = (Fp8Copy*)xcalloc(2 * (size_t)s->count, sizeof *s->copies);
    s->fields = (Fp8Copy***)xcalloc(2 * (size_t)s->count, sizeof *s->fields);
    s->names = (const char**)xcalloc((size_t)s->count, sizeof *s->names);
    o->elements = (double*)xcalloc((size_t)s->count * FP8_OPERANDS, sizeof *o->elements);
    s->weights = (uint8_t*)device_alloc(ctx, s->weight_bytes, "parameters");
    fp8_scales_alloc(&o->scales, s->count * FP8_OPERANDS, ctx);
    o->measured = (Fp8Stats*)device_alloc(ctx, sizeof *o->measured, "parameters");
    o->x = (uint8_t*)device_alloc(ctx, s->x_bytes, "activations");
    o->xt = (uint8_t*)device_alloc(ctx, s->x_bytes, "activations");
    o->dy = (uint8_t*)device_alloc(ctx, s->dy_bytes, "activations");
    o->dyt = (uint8_t*)device_alloc(ctx, s->dy_bytes, "activations");
    o->means = (real*)device_alloc(ctx, s->means_bytes, "activations");
    o->center = (real*)device_alloc(ctx, s->means_bytes, "activations");
    o->bias = (floatX*)device_alloc(ctx, s->bias_bytes, "activations");
    for (int i = 0; i < 2 && s->unpacked; i++)
        o->unpacked[i] = (real*)device_alloc(ctx, s->unpacked * sizeof(real), "activations");
    o->calibrates = 1;
    if (s->kept_bytes) s->kept = (uint8_t*)device_alloc(ctx, s->kept_bytes, "activations");
    uint8_t *w = s->weights, *kept = s->kept;
    for (int i = 0, n = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        int IC, OC;
        if (!fp8_is_weight(s, table, i)) continue;
        fp8_layer_size(table, i, &IC, &OC);
        size_t size = (size_t)IC * (size_t)OC;
        Fp8Linear linear = {.shared = o, .row = n * FP8_OPERANDS, .w = w, .wt = w + size};
        linear.exact_forward = fp8_is_excluded(s, table, i);
        Fp8Copy x = {.layer = &s->linears[n], .operand = FP8_X, .y = o->x, .yt = kept};
        Fp8Copy dy = {.layer = &s->linears[n], .operand = FP8_DY, .y = o->dy, .yt = o->dyt};
        x.v_is_read = t->x_is_read || linear.exact_forward;
        x.is_centered = t->layer < 0;  // the output matrix
        char* target = t->layer < 0 ? (char*)outer : (char*)layers + (size_t)t->layer * layer_bytes;
        s->names[n] = t->name;
        s->linears[n] = linear;
        s->copies[2 * n] = x, s->fields[2 * n] = (Fp8Copy**)(void*)(target + t->x_q);
        s->copies[2 * n + 1] = dy, s->fields[2 * n + 1] = (Fp8Copy**)(void*)(target + t->dy_q);
        w += 2 * size;
        if (kept) kept += s->rows * (size_t)IC;
        n++;
    }
    fp8_state_switch(s, 0);
}

static inline void fp8_state_close(Fp8State* s) {
    Fp8Shared* o = &s->shared;
    size_t n = (size_t)o->scales.count;
    if (!s->linears) return;
    device_free(s->weights, s->weight_bytes);
    if (s->kept) device_free(s->kept, s->kept_bytes);
    device_free((void*)o->scales.format, n * sizeof *o->scales.format);
    device_free(o->scales.stats, n * sizeof *o->scales.stats);
    device_free(o->scales.recorded, n * sizeof *o->scales.recorded);
    device_free(o->scales.history, n * FP8_HISTORY * sizeof *o->scales.history);
    device_free(o->scales.scale, n * sizeof *o->scales.scale);
    device_free(o->scales.inverse, n * FP8_INVERSE_APART * sizeof *o->scales.inverse);
    device_free(o->measured, sizeof *o->measured);
    device_free(o->x, s->x_bytes), device_free(o->xt, s->x_bytes);
    device_free(o->dy, s->dy_bytes), device_free(o->dyt, s->dy_bytes);
    device_free(o->means, s->means_bytes), device_free(o->center, s->means_bytes);
    device_free(o->bias, s->bias_bytes);
    for (int i = 0; i < 2 && s->unpacked; i++) device_free(o->unpacked[i], s->unpacked * sizeof(real));
    free(s->linears), free(s->copies), free(s->fields), free(s->names), free(o->elements);
}

// ---------------------------------------------------------------------------------------------------------
// A step

static inline void fp8_state_begin_step(Fp8State* s) {
    s->shared.records = s->count > 0;
    for (int i = 0; i < s->shared.scales.count; i++) s->shared.elements[i] = 0;
}

// After the last micro-batch of step `step` (from 0): compute the next step's scales, equal on all ranks, and switch.
static inline void fp8_state_end_step(Fp8State* s, int64_t step, GradSync* r, Context* ctx) {
    Fp8Shared* o = &s->shared;
    size_t n = (size_t)o->scales.count;
    if (!fp8_state_is_on(s, step)) return;
    fp8_scales_record(o->scales, step, ctx);
    grad_sync_all_reduce(r, o->scales.history + (size_t)(step % FP8_HISTORY) * n, n, MAX_UINT32, ctx);
    fp8_scales_update(o->scales, ctx);
    s->recorded = min_int(s->recorded + 1, FP8_HISTORY);
    o->records = 0;
    o->calibrates = s->recorded < FP8_HISTORY;
    fp8_state_switch(s, step + 1);
}

// ---------------------------------------------------------------------------------------------------------
// Checkpoints: the bits of the history and of the scales, 8 hexadecimal digits per value

static inline char* fp8_state_text(const Fp8State* s, int64_t step, Context* ctx) {
    const Fp8Scales* scales = &s->shared.scales;
    size_t n = (size_t)scales->count, recorded = FP8_HISTORY * n;
    if (!fp8_state_is_on(s, step) || !s->recorded) return NULL;  // later the scales are too old for another --fp8-steps
    uint32_t* history = (uint32_t*)xmalloc(recorded * sizeof *history);
    real* scale = (real*)xmalloc(n * sizeof *scale);
    Text hex = {NULL, 0, 0};
    device_download(ctx, history, scales->history, recorded * sizeof *history);
    device_download(ctx, scale, scales->scale, n * sizeof *scale);
    for (size_t i = 0; i < recorded; i++) text_printf(&hex, "%08x", history[i]);
    for (size_t i = 0; i < n; i++) text_printf(&hex, "%08x", float_bits((float)scale[i]));
    free(history), free(scale);
    return hex.text;
}

// Restore what fp8_state_text() returned. `hex` NULL: the checkpoint has none.
static inline void fp8_state_set(Fp8State* s, const char* hex, const char* checkpoint, Context* ctx) {
    Fp8Scales* scales = &s->shared.scales;
    size_t n = (size_t)scales->count, recorded = FP8_HISTORY * n;
    if (!s->count || !hex) return;
    if (strlen(hex) != 8 * (recorded + n) || strspn(hex, "0123456789abcdef") != strlen(hex))
        die(USAGE,
            "%s/trainer.json: key \"fp8\": is not the state of this model's %d fp8 layers. If it is of an older "
            "version's --fp8 1, which left out the output matrix, it goes on only without fp8: --fp8 0 --override 1",
            checkpoint, s->count);
    uint32_t* bits = (uint32_t*)xmalloc((recorded + n) * sizeof *bits);
    real* scale = (real*)xcalloc(n * (1 + FP8_INVERSE_APART), sizeof *scale);
    for (size_t i = 0; i < recorded + n; i++) {
        char digits[9] = {0};
        memcpy(digits, hex + 8 * i, 8);
        bits[i] = (uint32_t)strtoul(digits, NULL, 16);
    }
    s->recorded = 0;
    for (int row = 0; row < FP8_HISTORY; row++) {
        uint32_t any = 0;
        for (size_t t = 0; t < n; t++) any |= bits[(size_t)row * n + t];
        s->recorded += any != 0;
    }
    for (size_t t = 0; t < n; t++) {
        float value;
        memcpy(&value, &bits[recorded + t], sizeof value);
        scale[t] = (real)value;
        scale[n + t * FP8_INVERSE_APART] = 1 / scale[t];
    }
    device_upload(ctx, scales->history, bits, recorded * sizeof *bits);
    device_upload(ctx, scales->scale, scale, n * sizeof *scale);
    device_upload(ctx, scales->inverse, scale + n, n * FP8_INVERSE_APART * sizeof *scale);
    device_synchronize(ctx);
    s->shared.calibrates = s->recorded < FP8_HISTORY;
    free(bits), free(scale);
}

#endif
