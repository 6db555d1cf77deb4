/* A recorded run of a model over one text: the ops that ran, and copies of the tensors that they wrote (tap.h). The
 * trainer runs its own forward() and backward() between explain_record_begin() and explain_record_end(). */
#ifndef LLMC_EXPLAIN_RECORD_H
#define LLMC_EXPLAIN_RECORD_H

#include "llmc/explain/ops.h"
#include "llmc/optim/model_buffers.h"

// Sizes of the model and the text.
typedef struct {
    int L, NH, C, V, T;  // T: tokens
    int is_causal;
} ExplainSizes;

typedef struct {
    char name[64];
    const char* about;
    int layer;  // -1: outside the layers
    int ndim;
    size_t shape[3];  // rows, columns; of attention probabilities heads, queries, keys
    real* values;
    int point;  // of the tap that copied it; the op that wrote it
} ExplainTensor;

typedef struct {
    ExplainSizes sizes;
    const ModelBuffers* buffers;
    ScopeLog log;
    Tap tap;
    const ExplainOp** ops;  // of the tap's points
    ExplainTensor* tensors;
    size_t count, capacity;
    size_t copies;  // the first ones: tensors of the tap's copies; attention probabilities follow
    size_t ops_capacity, copies_capacity, points_capacity;
} ExplainRecord;

static inline size_t explain_elements(const ExplainTensor* t) { return t->shape[0] * t->shape[1] * t->shape[2]; }

static inline ExplainTensor* explain_add_tensor(ExplainRecord* r) {
    r->tensors = (ExplainTensor*)array_reserve(r->tensors, &r->capacity, r->count + 1, sizeof *r->tensors);
    ExplainTensor* t = &r->tensors[r->count++];
    memset(t, 0, sizeof *t);
    t->shape[0] = t->shape[1] = t->shape[2] = 1;
    return t;
}

// The row of a table of activations named `name`, of layer `layer` unless it is outside the layers.
static inline const Tensor* explain_find_row(const TensorTable* table, const char* name, int layer) {
    char in_layer[64];
    snprintf(in_layer, sizeof in_layer, "h.%d.%s", layer, name);
    for (int i = 0; i < table->count; i++)
        if (strcmp(table->tensors[i].name, name) == 0 || (layer >= 0 && strcmp(table->tensors[i].name, in_layer) == 0))
            return &table->tensors[i];
    return NULL;
}

static inline int explain_is_gradient(const char* name) { return strncmp(name, "grad.", 5) == 0; }

// Add the copy of an output of an op. `base`: the op's layer for o->shift.
static inline void explain_add_output(ExplainRecord* r, const ExplainOutput* o, int layer, int base, int point) {
    const ModelBuffers* b = r->buffers;
    const int L = r->sizes.L;
    int is_edge = 0;
    if (o->shift) layer = base + o->shift, is_edge = layer < 0 || layer >= L;
    if (is_edge) layer = -1;
    const char* name = is_edge ? o->edge : o->name;
    CHECK(name);
    const char *buffer = o->buffer ? o->buffer : name, *plain = explain_is_gradient(name) ? name + 5 : name;
    const Tensor* row = explain_find_row(&b->acts_table, buffer, layer);
    int is_real = !row;
    if (is_real) row = explain_find_row(&b->stats_table, buffer, layer);
    CHECK(row);
    size_t columns = strcmp(buffer, "logits") == 0 ? (size_t)r->sizes.V : (size_t)row->shape[1];
    TapCopy copy = {.device = is_real ? (void*)(b->stats + row->offset) : (void*)(b->acts + row->offset),
                    .type = is_real ? VIEW_REAL : VIEW_FLOATX,
                    .rows = (size_t)row->shape[0],
                    .columns = columns,
                    .stride = (size_t)row->shape[1],
                    .values = NULL};
    ExplainTensor* t = explain_add_tensor(r);
    const char* grad = plain == name ? "" : "grad.";
    if (layer >= 0) snprintf(t->name, sizeof t->name, "%sh.%d.%s", grad, layer, plain);
    else snprintf(t->name, sizeof t->name, "%s%s", grad, plain);
    t->about = o->about, t->layer = layer, t->point = point;
    t->ndim = row->ndim, t->shape[0] = copy.rows, t->shape[1] = copy.columns;
    r->tap.copies = (TapCopy*)array_reserve(r->tap.copies, &r->copies_capacity, r->copies + 1, sizeof(TapCopy));
    r->tap.copies[r->copies++] = copy;
}

static inline void explain_add_ops(ExplainRecord* r, const ExplainSection* s, int layer) {
    int base = layer >= 0 ? layer : s->direction == FORWARD ? -1 : r->sizes.L;
    for (int i = 0; i < s->count; i++) {
        const ExplainOp* op = &s->ops[i];
        Tap* tap = &r->tap;
        int first = (int)r->copies, point = (int)tap->count;
        for (int k = 0; k < EXPLAIN_OUTPUTS && op->out[k].name; k++)
            explain_add_output(r, &op->out[k], layer, base, point);
        TapPoint p = {.op = op->op,
                      .direction = s->direction,
                      .layer = layer,
                      .first = first,
                      .copies = (int)r->copies - first,
                      .scope = NO_SCOPE};
        tap->points = (TapPoint*)array_reserve(tap->points, &r->points_capacity, tap->count + 1, sizeof p);
        r->ops = (const ExplainOp**)array_reserve((void*)r->ops, &r->ops_capacity, tap->count + 1, sizeof *r->ops);
        r->ops[tap->count] = op;
        tap->points[tap->count++] = p;
    }
}

// Begin a record for the model in `b`. Its tables must be planned for exactly this text; no allocation is needed yet.
static inline void explain_record_open(ExplainRecord* r, const ModelBuffers* b, ExplainSizes sizes) {
    memset(r, 0, sizeof *r);
    r->sizes = sizes, r->buffers = b;
}

// Append sections, in launch order. The model's buffers must be allocated.
static inline void explain_record_add(ExplainRecord* r, const ExplainSection* sections, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const ExplainSection* s = &sections[i];
        if (!s->per_layer) explain_add_ops(r, s, -1);
        for (int k = 0; s->per_layer && k < r->sizes.L; k++)
            explain_add_ops(r, s, s->direction == FORWARD ? k : r->sizes.L - 1 - k);
    }
}

static inline void explain_record_begin(ExplainRecord* r, Context* ctx) {
    scope_log_open(&r->log, NULL);
    r->log.tap = &r->tap;
    ctx->scope_log = &r->log;
}

static inline const ExplainTensor* explain_find(const ExplainRecord* r, const char* name, int layer) {
    char full[64];
    snprintf(full, sizeof full, layer < 0 ? "%s" : "h.%2$d.%1$s", name, layer);
    for (size_t i = 0; i < r->count; i++)
        if (strcmp(r->tensors[i].name, full) == 0) return &r->tensors[i];
    return NULL;
}

// Attention probabilities [NH, T, T] of a layer: P = exp(q k / sqrt(HS) - lse). Attention kernels never store them.
static inline void explain_add_probabilities(ExplainRecord* r, int layer) {
    const int NH = r->sizes.NH, C = r->sizes.C, HS = C / NH, T = r->sizes.T, is_causal = r->sizes.is_causal;
    const ExplainTensor *qkv = explain_find(r, "qkv", layer), *lse = explain_find(r, "lse", layer);
    CHECK(qkv && lse);
    const real *x = qkv->values, *log_sum = lse->values;
    const double scale = 1 / sqrt((double)HS);
    int point = lse->point;
    real* p = (real*)xcalloc((size_t)NH * (size_t)T * (size_t)T, sizeof *p);
#pragma omp parallel for collapse(2) schedule(static)
    for (int h = 0; h < NH; h++)
        for (int q = 0; q < T; q++)
            for (int k = 0; k < (is_causal ? q + 1 : T); k++) {
                const real* query = x + (size_t)q * 3 * (size_t)C + h * HS;
                const real* key = x + (size_t)k * 3 * (size_t)C + C + h * HS;
                double dot = 0;
                for (int i = 0; i < HS; i++) dot += (double)query[i] * (double)key[i];
                size_t row = (size_t)h * (size_t)T + (size_t)q;
                p[row * (size_t)T + (size_t)k] = (real)exp(dot * scale - (double)log_sum[row]);
            }
    ExplainTensor* t = explain_add_tensor(r);
    snprintf(t->name, sizeof t->name, "h.%d.att_probs", layer);
    t->about = "attention probabilities of each head, recomputed from q, k and lse";
    t->layer = layer, t->point = point, t->ndim = 3, t->values = p;
    t->shape[0] = (size_t)NH, t->shape[1] = t->shape[2] = (size_t)T;
}

// The loss scale, a factor of all gradients.
static inline double explain_loss_scale(const ModelBuffers* b, Context* ctx) {
    return b->loss_scale ? model_buffers_number(b->loss_scale, ctx) : 1;
}

// Call after the passes: checks that every op has run, in the order of the sections.
static inline void explain_record_end(ExplainRecord* r, Context* ctx) {
    const Tap* tap = &r->tap;
    ctx->scope_log = NULL;
    if (tap->next != tap->count)
        die(FAILED,
            "--explain: %s of layer %d is number %zu in llmc/explain/ops.h but did not run there; the list and the "
            "trainer differ",
            tap->points[tap->next].op, tap->points[tap->next].layer, tap->next);
    double scale = explain_loss_scale(r->buffers, ctx);
    for (size_t i = 0; i < r->copies; i++) {
        ExplainTensor* t = &r->tensors[i];
        t->values = tap->copies[i].values;
        for (size_t k = 0; scale != 1 && explain_is_gradient(t->name) && k < explain_elements(t); k++)
            t->values[k] /= (real)scale;
    }
    for (int l = 0; l < r->sizes.L; l++) explain_add_probabilities(r, l);
}

static inline void explain_record_close(ExplainRecord* r) {
    for (size_t i = r->copies; i < r->count; i++) free(r->tensors[i].values);
    scope_log_close(&r->log);
    tap_free(&r->tap);
    free((void*)r->ops), free(r->tensors);
}

#endif
