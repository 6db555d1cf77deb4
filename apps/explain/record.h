/* A recorded run of a model over one text: the ops that ran, and copies of the tensors that they wrote. The trainer
 * runs its own forward() and backward() between explain_record_begin() and explain_record_end().
 *
 * The record is an observer of scopes. It copies tensors to the host as soon as the op that wrote them has been
 * launched: a trainer overwrites many of its tensors (a residual buffer first holds a branch's output, one buffer of
 * gradients serves all layers), so afterwards is too late. */
#ifndef APPS_EXPLAIN_RECORD_H
#define APPS_EXPLAIN_RECORD_H

#include "apps/explain/ops.h"
#include "llmc/optim/model_buffers.h"

// Sizes of the model and the text.
typedef struct {
    int L, NH, C, V, T;  // T: tokens
    int is_causal;
} ExplainSizes;

// A tensor that an op wrote, or attention probabilities, which are computed from others.
typedef struct {
    char name[64];
    const char* about;
    int layer;  // -1: outside the layers
    int ndim;
    size_t shape[3];  // rows, columns; of attention probabilities heads, queries, keys
    void* device;     // where its rows are, `stride` elements apart
    ViewType type;
    size_t stride;
    real* values;  // on the host, once the op has run
    size_t point;  // of that op
} ExplainTensor;

// An op of the model's list.
typedef struct {
    const ExplainOp* op;
    Direction direction;
    int layer;     // -1 outside the blocks
    size_t scope;  // index of its scope, once it has run
} ExplainPoint;

typedef struct {
    ExplainSizes sizes;
    const ModelBuffers* buffers;
    Observer observer;
    Scope* scopes;  // that were opened, in this order
    size_t scope_count, scope_capacity;
    ExplainPoint* points;  // in launch order
    size_t point_count, point_capacity, next;
    ExplainTensor* tensors;
    size_t count, capacity;
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
static inline void explain_add_output(ExplainRecord* r, const ExplainOutput* o, int layer, int base) {
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
    ExplainTensor* t = explain_add_tensor(r);
    const char* grad = plain == name ? "" : "grad.";
    if (layer >= 0) snprintf(t->name, sizeof t->name, "%sh.%d.%s", grad, layer, plain);
    else snprintf(t->name, sizeof t->name, "%s%s", grad, plain);
    t->about = o->about, t->layer = layer, t->point = r->point_count;
    t->ndim = row->ndim, t->shape[0] = (size_t)row->shape[0], t->shape[1] = columns;
    t->device = is_real ? (void*)(b->stats + row->offset) : (void*)(b->acts + row->offset);
    t->type = is_real ? VIEW_REAL : VIEW_FLOATX, t->stride = (size_t)row->shape[1];
}

static inline void explain_add_ops(ExplainRecord* r, const ExplainSection* s, int layer) {
    int base = layer >= 0 ? layer : s->direction == FORWARD ? -1 : r->sizes.L;
    for (int i = 0; i < s->count; i++) {
        ExplainPoint p = {.op = &s->ops[i], .direction = s->direction, .layer = layer, .scope = 0};
        for (int k = 0; k < EXPLAIN_OUTPUTS && p.op->out[k].name; k++)
            explain_add_output(r, &p.op->out[k], layer, base);
        r->points = (ExplainPoint*)array_reserve(r->points, &r->point_capacity, r->point_count + 1, sizeof p);
        r->points[r->point_count++] = p;
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

static inline void explain_scope_open(void* state, const Scope* scope) {
    ExplainRecord* r = (ExplainRecord*)state;
    r->scopes = (Scope*)array_reserve(r->scopes, &r->scope_capacity, r->scope_count + 1, sizeof *scope);
    r->scopes[r->scope_count++] = *scope;
}

static inline void explain_copy(ExplainTensor* t, Context* ctx) {
    const size_t rows = t->shape[0], columns = t->shape[1];
    HostView view = host_view_open(t->device, rows * t->stride, t->type);
    t->values = (real*)xmalloc(rows * columns * sizeof(real));
    host_view_read(ctx, &view);
    for (size_t r = 0; r < rows; r++)
        memcpy(t->values + r * columns, view.values + r * t->stride, columns * sizeof(real));
    host_view_close(&view);
}

// An op has been launched: copy its tensors if it is the next one of the list. Other ops may run in between.
static inline void explain_scope_close(void* state, const Scope* scope) {
    ExplainRecord* r = (ExplainRecord*)state;
    ExplainPoint* p = &r->points[r->next];
    if (r->next == r->point_count || scope->direction != p->direction || scope->layer != p->layer ||
        strcmp(scope->op, p->op->op) != 0)
        return;
    for (size_t i = 0; i < r->count; i++)
        if (r->tensors[i].point == r->next) explain_copy(&r->tensors[i], scope->ctx);
    p->scope = r->scope_count - 1;
    while (r->scopes[p->scope].op != scope->op) p->scope--;  // past the scopes inside it
    r->next++;
}

static inline void explain_record_begin(ExplainRecord* r, Context* ctx) {
    r->observer.open = explain_scope_open, r->observer.close = explain_scope_close, r->observer.state = r;
    scope_attach(ctx, &r->observer);
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
    const size_t from = lse->point;  // adding a tensor moves the others
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
    t->layer = layer, t->point = from, t->ndim = 3, t->values = p;
    t->shape[0] = (size_t)NH, t->shape[1] = t->shape[2] = (size_t)T;
}

// The loss scale, a factor of all gradients.
static inline double explain_loss_scale(const ModelBuffers* b, Context* ctx) {
    return b->loss_scale ? model_buffers_number(b->loss_scale, ctx) : 1;
}

// Call after the passes: checks that every op has run, in the order of the sections.
static inline void explain_record_end(ExplainRecord* r, Context* ctx) {
    scope_detach(ctx, &r->observer);
    if (r->next != r->point_count)
        die(FAILED,
            "--explain: %s of layer %d is number %zu in apps/explain/ops.h but did not run there; the list and the "
            "trainer differ",
            r->points[r->next].op->op, r->points[r->next].layer, r->next);
    double scale = explain_loss_scale(r->buffers, ctx);
    for (size_t i = 0; i < r->count; i++) {
        ExplainTensor* t = &r->tensors[i];
        for (size_t k = 0; scale != 1 && explain_is_gradient(t->name) && k < explain_elements(t); k++)
            t->values[k] /= (real)scale;
    }
    for (int l = 0; l < r->sizes.L; l++) explain_add_probabilities(r, l);
}

static inline void explain_record_close(ExplainRecord* r) {
    for (size_t i = 0; i < r->count; i++) free(r->tensors[i].values);
    free(r->scopes), free(r->points), free(r->tensors);
}

#endif
