/* The page of --explain: explain/page.html with the data in place of a marker. Numbers are JSON; arrays are base64 of
 * little-endian bytes. The page stays below EXPLAIN_MOST_BYTES: large tensors are reduced to a grid of cells, each with
 * its element of largest absolute value, and attention maps to 8 bits. */
#ifndef LLMC_EXPLAIN_PAGE_H
#define LLMC_EXPLAIN_PAGE_H

#include "llmc/explain/explain.h"
#include "llmc/model/model_files.h"

#define EXPLAIN_MOST_BYTES 20e6  // of the page
#define EXPLAIN_PLACE "/*EXPLAIN*/null"

// Parts of the page's bytes: the limit for attention maps, and an estimate for everything except maps.
#define EXPLAIN_ATTENTION_BYTES 13e6
#define EXPLAIN_OTHER_BYTES 1e6

enum { EXPLAIN_VECTOR = 1024 };  // most cells of a vector, which is small

// Largest number of rows and columns of a heat map.
typedef struct {
    size_t rows, columns;
} ExplainGrid;

static inline double explain_base64_bytes(double bytes) { return bytes * 4 / 3 + 4; }

static inline void explain_put_base64(Text* t, const char* key, const void* data, size_t n) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char* in = (const unsigned char*)data;
    char* out = (char*)xmalloc(n / 3 * 4 + 5);
    size_t at = 0;
    for (size_t i = 0; i < n; i += 3) {
        size_t left = min_size(n - i, 3);
        uint32_t bits = (uint32_t)in[i] << 16 | (left > 1 ? (uint32_t)in[i + 1] << 8 : 0) | (left > 2 ? in[i + 2] : 0);
        for (size_t k = 0; k < 4; k++) out[at++] = k <= left ? digits[bits >> (18 - 6 * k) & 63] : '=';
    }
    json_put_key(t, key);
    text_append(t, "\"", 1), text_append(t, out, at), text_append(t, "\"", 1);
    free(out);
}

// ---------------------------------------------------------------------------------------------------------
// Heat maps

// A cell covers `high` rows and `wide` columns.
typedef struct {
    size_t rows, columns, high, wide;
} ExplainCells;

static inline ExplainCells explain_cells(const ExplainTensor* t, ExplainGrid grid) {
    if (t->shape[1] == 1) grid.rows = EXPLAIN_VECTOR;
    size_t high = (t->shape[0] + grid.rows - 1) / grid.rows, wide = (t->shape[1] + grid.columns - 1) / grid.columns;
    ExplainCells c = {.rows = (t->shape[0] + high - 1) / high,
                      .columns = (t->shape[1] + wide - 1) / wide,
                      .high = high,
                      .wide = wide};
    return c;
}

static inline size_t explain_place_bytes(const ExplainCells* c) {
    size_t area = c->high * c->wide;
    return area == 1 ? 0 : area <= 256 ? 1 : area <= 65536 ? 2 : 4;
}

static inline double explain_map_bytes(const ExplainTensor* t, ExplainGrid grid) {
    ExplainCells c = explain_cells(t, grid);
    double cells = (double)c.rows * (double)c.columns;
    return explain_base64_bytes(cells * sizeof(float)) + explain_base64_bytes(cells * (double)explain_place_bytes(&c));
}

static inline int explain_is_larger(real a, real b) { return isnan(a) || fabs((double)a) > fabs((double)b); }

// Write each cell's value and, if it covers several elements, the value's place in it (row * wide + column).
static inline void explain_put_map(Text* out, const ExplainTensor* t, ExplainGrid grid) {
    ExplainCells c = explain_cells(t, grid);
    size_t cells = c.rows * c.columns, place_bytes = explain_place_bytes(&c), columns = t->shape[1];
    float* value = (float*)xmalloc(cells * sizeof *value);
    unsigned char* places = (unsigned char*)xcalloc(cells, place_bytes);
    for (size_t i = 0; i < cells; i++) {
        size_t r0 = i / c.columns * c.high, c0 = i % c.columns * c.wide, best = r0 * columns + c0;
        for (size_t r = r0; r < min_size(r0 + c.high, t->shape[0]); r++)
            for (size_t k = c0; k < min_size(c0 + c.wide, columns); k++)
                if (explain_is_larger(t->values[r * columns + k], t->values[best])) best = r * columns + k;
        size_t place = (best / columns - r0) * c.wide + best % columns - c0;
        value[i] = (float)t->values[best];
        for (size_t k = 0; k < place_bytes; k++) places[i * place_bytes + k] = (unsigned char)(place >> (8 * k));
    }
    json_put_integer(out, "high", (int64_t)c.high), json_put_integer(out, "wide", (int64_t)c.wide);
    explain_put_base64(out, "values", value, cells * sizeof *value);
    if (place_bytes) explain_put_base64(out, "places", places, cells * place_bytes);
    free(value), free(places);
}

// The finest grid for which the maps take at most `bytes`.
static inline ExplainGrid explain_choose_grid(const ExplainRecord* r, double bytes) {
    ExplainGrid grid = {.rows = 128, .columns = 128};
    for (;;) {
        double sum = 0;
        for (size_t i = 0; i < r->count; i++)
            if (r->tensors[i].ndim < 3) sum += explain_map_bytes(&r->tensors[i], grid);
        if (sum <= bytes || grid.columns <= 4) return grid;
        if (grid.columns >= grid.rows) grid.columns /= 2;
        else grid.rows /= 2;
    }
}

static inline void explain_put_tensor(Text* out, const ExplainTensor* t, ExplainGrid grid) {
    size_t n = explain_elements(t);
    double sum = 0, sum_sq = 0, min = INFINITY, max = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        double x = (double)t->values[i];
        sum += x, sum_sq += x * x, min = fmin(min, x), max = fmax(max, x);
    }
    text_append(out, "{", 1);
    json_put_string(out, "name", t->name), json_put_string(out, "about", t->about);
    json_put_integer(out, "layer", t->layer), json_put_integer(out, "ndim", t->ndim);
    json_put_integer(out, "rows", (int64_t)t->shape[0]), json_put_integer(out, "columns", (int64_t)t->shape[1]);
    json_put_number(out, "norm", sqrt(sum_sq)), json_put_number(out, "mean", sum / (double)n);
    json_put_number(out, "rms", sqrt(sum_sq / (double)n));
    json_put_number(out, "min", min), json_put_number(out, "max", max);
    if (t->ndim < 3) explain_put_map(out, t, grid);
    text_append(out, "}", 1);
}

// ---------------------------------------------------------------------------------------------------------
// Attention maps

// Side of the square of queries and keys that one cell covers. The cell has the largest probability in the square.
static inline int explain_attention_side(const ExplainSizes* s) {
    int side = 1;
    for (;; side++) {
        double cells = ceil((double)s->T / side), map = s->is_causal ? cells * (cells + 1) / 2 : cells * cells;
        if (explain_base64_bytes(map * s->NH * s->L) <= EXPLAIN_ATTENTION_BYTES) return side;
    }
}

// One byte per cell, 255 sqrt(p), so that small probabilities remain distinct. Causal maps have the lower triangle
// only.
static inline void explain_put_attention(Text* out, const ExplainRecord* r) {
    const ExplainSizes* s = &r->sizes;
    int side = explain_attention_side(s), cells = (s->T + side - 1) / side;
    size_t T = (size_t)s->T, most = (size_t)s->NH * (size_t)cells * (size_t)cells;
    unsigned char* map = (unsigned char*)xmalloc(most);
    text_append(out, "{", 1);
    json_put_integer(out, "side", side), json_put_bool(out, "causal", s->is_causal);
    json_put_key(out, "layers");
    for (int l = 0; l < s->L; l++) {
        const real* p = explain_find(r, "att_probs", l)->values;
        size_t n = 0;
        for (int h = 0; h < s->NH; h++)
            for (int q = 0; q < cells; q++)
                for (int k = 0; k < (s->is_causal ? q + 1 : cells); k++) {
                    double largest = 0;
                    for (int i = q * side; i < min_int((q + 1) * side, s->T); i++)
                        for (int j = k * side; j < min_int((k + 1) * side, s->T); j++)
                            largest = fmax(largest, (double)p[((size_t)h * T + (size_t)i) * T + (size_t)j]);
                    map[n++] = (unsigned char)lrint(255 * sqrt(fmin(largest, 1)));
                }
        text_append(out, l ? ",\n{" : "[{", l ? 3 : 2);
        explain_put_base64(out, "maps", map, n);
        text_append(out, "}", 1);
    }
    text_append(out, "]}", 2);
    free(map);
}

// ---------------------------------------------------------------------------------------------------------
// The text and its predictions

static inline void explain_put_integers(Text* out, const char* key, const int* x, int n) {
    json_put_key(out, key);
    for (int i = 0; i < n; i++) text_printf(out, "%s%d", i ? "," : "[", x[i]);
    text_printf(out, n ? "]" : "[]");
}

static inline void explain_put_text(Text* out, const Explanation* e) {
    const ExplainText* text = &e->text;
    const ExplainLens* lens = &e->lens;
    const int V = e->record.sizes.V;
    size_t rows = (size_t)lens->layers * (size_t)text->count, n = rows * (size_t)lens->top;
    unsigned char* used = (unsigned char*)xcalloc((size_t)V, 1);
    for (int i = 0; i < text->T; i++) used[text->tokens[i]] = 1;
    for (int i = 0; i < text->count; i++)
        if (text->targets[i] >= 0) used[text->targets[i]] = 1;
    for (size_t i = 0; i < n; i++) used[lens->id[i]] = 1;
    explain_put_integers(out, "tokens", text->tokens, text->T);
    if (text->types) explain_put_integers(out, "types", text->types, text->T);
    explain_put_integers(out, "predicted", text->rows, text->count);
    explain_put_integers(out, "targets", text->targets, text->count);
    json_put_integer(out, "next_target", text->next_target);
    json_put_key(out, "vocabulary");
    int is_first = 1;
    for (int v = 0; v < V; v++) {
        Text piece = {NULL, 0, 0};
        if (!used[v]) continue;
        explain_put_token(&piece, &e->vocabulary, v);
        text_printf(out, "%s\"%d\": ", is_first ? "{" : ", ", v);
        text_json_string(out, piece.text ? piece.text : "", piece.length);
        free(piece.text);
        is_first = 0;
    }
    text_append(out, "}", 1);
    json_put_integer(out, "top", lens->top), json_put_integer(out, "lens_layers", lens->layers);
    explain_put_base64(out, "lens_id", lens->id, n * sizeof *lens->id);
    explain_put_base64(out, "lens_p", lens->p, n * sizeof *lens->p);
    explain_put_base64(out, "lens_target", lens->target, rows * sizeof *lens->target);
    free(used);
}

static inline double explain_norm(const real* x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

// The norm of each token's row of the residual stream, after the embeddings and after each branch.
static inline void explain_put_residual(Text* out, const ExplainRecord* r) {
    size_t T = (size_t)r->sizes.T, C = (size_t)r->sizes.C;
    float* norms = (float*)xmalloc(T * sizeof *norms);
    json_put_key(out, "residual");
    for (int i = 0; i <= 2 * r->sizes.L; i++) {
        const ExplainTensor* t =
            i == 0 ? explain_find(r, "embedded", -1) : explain_find(r, i % 2 ? "mid" : "out", (i - 1) / 2);
        CHECK(t);
        for (size_t k = 0; k < T; k++) norms[k] = (float)explain_norm(t->values + k * C, C);
        text_append(out, i ? ", {" : "[{", i ? 3 : 2);
        json_put_string(out, "name", t->name);
        explain_put_base64(out, "norms", norms, T * sizeof *norms);
        text_append(out, "}", 1);
    }
    text_append(out, "]", 1);
    free(norms);
}

// ---------------------------------------------------------------------------------------------------------
// Ops and parameters

// The ops that ran, in launch order. Those not in the model's list, such as casts, have no formula and no tensors.
static inline void explain_put_ops(Text* out, const ExplainRecord* r) {
    size_t next = 0;
    json_put_key(out, "ops");
    for (size_t i = 0; i < r->scope_count; i++) {
        const Scope* op = &r->scopes[i];
        const ExplainPoint* point = next < r->point_count && r->points[next].scope == i ? &r->points[next] : NULL;
        const char* comma = "";
        text_append(out, i ? ",\n{" : "[{", i ? 3 : 2);
        json_put_string(out, "op", op->op), json_put_string(out, "direction", direction_name(op->direction));
        json_put_integer(out, "layer", op->layer), json_put_string(out, "shapes", op->shapes);
        json_put_number(out, "flops", op->flops), json_put_number(out, "bytes", op->bytes);
        if (point) json_put_string(out, "formula", point->op->formula);
        json_put_key(out, "tensors");
        text_append(out, "[", 1);
        for (size_t k = 0; point && k < r->count; k++) {
            if (r->tensors[k].point != next) continue;
            text_printf(out, "%s%zu", comma, k);
            comma = ",";
        }
        text_append(out, "]}", 2);
        next += point != NULL;
    }
    text_append(out, "]", 1);
}

// The gradients of all parameters on the host, times the loss scale. On the CPU they are the trainer's own.
static inline HostView explain_gradients(const ModelBuffers* b, Context* ctx) {
    HostView view = host_view_open(b->grads, tensors_updated(&b->table).size, VIEW_REAL);
    host_view_read(ctx, &view);
    return view;
}

static inline void explain_put_parameters(Text* out, const Explanation* e, Context* ctx) {
    const ModelBuffers* b = e->record.buffers;
    const int count = b->table.count, has_grads = !e->why_no_loss;
    HostView params = host_view_open(b->params, b->table.elements, VIEW_FLOATX), grads = params;
    double(*norms)[2] = (double(*)[2])xmalloc((size_t)count * sizeof *norms);
    const double scale = explain_loss_scale(b, ctx);
    host_view_read(ctx, &params);
    if (has_grads) grads = explain_gradients(b, ctx);
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < count; i++) {
        const Tensor* t = &b->table.tensors[i];
        norms[i][0] = explain_norm(params.values + t->offset, tensor_elements(t));
        norms[i][1] = has_grads ? explain_norm(grads.values + t->offset, tensor_elements(t)) / scale : (double)NAN;
    }
    json_put_key(out, "parameters");
    for (int i = 0; i < count; i++) {
        const Tensor* t = &b->table.tensors[i];
        text_append(out, i ? ",\n{" : "[{", i ? 3 : 2);
        json_put_string(out, "name", t->name), json_put_integer(out, "layer", t->layer);
        json_put_integer(out, "rows", t->shape[0]);
        if (t->ndim == 2) json_put_integer(out, "columns", t->shape[1]);
        json_put_number(out, "norm", norms[i][0]);
        if (has_grads) json_put_number(out, "grad_norm", norms[i][1]);
        text_append(out, "}", 1);
    }
    text_append(out, "]", 1);
    host_view_close(&params), free(norms);
    if (has_grads) host_view_close(&grads);
}

// ---------------------------------------------------------------------------------------------------------
// The page

static inline void explain_put_facts(Text* out, const Explanation* e, double loss, double next_loss) {
    const ExplainSizes* s = &e->record.sizes;
    json_put_string(out, "model", e->model), json_put_string(out, "precision", FLOATX_NAME);
    json_put_string(out, "device", GPU_BUILD ? "GPU" : "CPU");
    json_put_integer(out, "L", s->L), json_put_integer(out, "NH", s->NH), json_put_integer(out, "C", s->C);
    json_put_integer(out, "V", s->V), json_put_integer(out, "T", s->T), json_put_bool(out, "causal", s->is_causal);
    json_put_integer(out, "parameter_count", (int64_t)e->record.buffers->table.parameters);
    if (e->why_no_loss) json_put_string(out, "why_no_loss", e->why_no_loss);
    else json_put_number(out, "loss", loss);
    if (e->why_no_next) json_put_string(out, "why_no_next", e->why_no_next);
    if (e->text.next_target >= 0) json_put_number(out, "next_loss", next_loss);
}

static inline void explain_data(Text* out, const Explanation* e, double loss, double next_loss, Context* ctx) {
    const ExplainRecord* r = &e->record;
    text_append(out, "{", 1);
    explain_put_facts(out, e, loss, next_loss);
    explain_put_text(out, e);
    explain_put_residual(out, r);
    explain_put_ops(out, r);
    explain_put_parameters(out, e, ctx);
    json_put_key(out, "attention");
    explain_put_attention(out, r);
    ExplainGrid grid = explain_choose_grid(r, EXPLAIN_MOST_BYTES - EXPLAIN_OTHER_BYTES - (double)out->length);
    json_put_key(out, "tensors");
    for (size_t i = 0; i < r->count; i++) {
        text_append(out, i ? ",\n" : "[", i ? 2 : 1);
        explain_put_tensor(out, &r->tensors[i], grid);
    }
    text_append(out, "]}", 2);
}

// "<" is escaped, so that nothing in the data ends the enclosing script or begins a comment.
static inline void explain_page(Text* out, const Explanation* e, double loss, double next_loss, Context* ctx) {
    static const unsigned char page[] = {
#include "explain_page.inc"
        0};
    Text data = {NULL, 0, 0};
    const char *text = (const char*)page, *place = strstr(text, EXPLAIN_PLACE);
    CHECK(place);
    text_append(out, text, (size_t)(place - text));
    explain_data(&data, e, loss, next_loss, ctx);
    for (size_t i = 0; i < data.length;) {
        size_t n = strcspn(data.text + i, "<");
        text_append(out, data.text + i, n);
        i += n;
        if (i < data.length) text_append(out, "\\u003c", 6), i++;
    }
    place += strlen(EXPLAIN_PLACE);
    text_append(out, place, strlen(place));
    free(data.text);
}

#endif
