/* What --explain writes to OUT/explain: explain.html and, with --explain-tensors 1, two files of tensors:
 *
 *   activations.safetensors  everything that the forward pass computed, and the gradients of activations ("grad.")
 *   gradients.safetensors    the gradients of the parameters, under the names and in the layout of the model's file
 *
 * In the page's data numbers are JSON; arrays are base64 of little-endian bytes. The page stays below
 * EXPLAIN_MOST_BYTES: large tensors are reduced to a grid of cells, each with its element of largest absolute value, and
 * attention maps to 8 bits. */
#ifndef APPS_EXPLAIN_FILES_H
#define APPS_EXPLAIN_FILES_H

#include "apps/explain/explain.h"
#include "llmc/model/model_writer.h"
#include "llmc/profile/page.h"

#define EXPLAIN_MOST_BYTES 20e6  // of the page

// Parts of the page's bytes: the limit for attention maps, and an estimate for everything except maps.
#define EXPLAIN_ATTENTION_BYTES 13e6
#define EXPLAIN_OTHER_BYTES 1e6

enum { EXPLAIN_VECTOR = 1024 };  // most cells of a vector, which is small

// Largest number of rows and columns of a heat map.
typedef struct {
    size_t rows, columns;
} ExplainGrid;

static inline double explain_base64_bytes(double bytes) { return bytes * 4 / 3 + 4; }

static inline void explain_put_base64(Text* t, const void* data, size_t n) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char* in = (const unsigned char*)data;
    char* out = (char*)xmalloc(n / 3 * 4 + 5);
    size_t at = 0;
    for (size_t i = 0; i < n; i += 3) {
        size_t left = min_size(n - i, 3);
        uint32_t bits = (uint32_t)in[i] << 16 | (left > 1 ? (uint32_t)in[i + 1] << 8 : 0) | (left > 2 ? in[i + 2] : 0);
        for (size_t k = 0; k < 4; k++) out[at++] = k <= left ? digits[bits >> (18 - 6 * k) & 63] : '=';
    }
    text_append(t, "\"", 1), text_append(t, out, at), text_append(t, "\"", 1);
    free(out);
}

static inline void explain_put_array(Text* t, const char* key, const void* data, size_t n) {
    json_put_key(t, key);
    explain_put_base64(t, data, n);
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
    explain_put_array(out, "values", value, cells * sizeof *value);
    if (place_bytes) explain_put_array(out, "places", places, cells * place_bytes);
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

// One byte per cell, 255 sqrt(p), so that small probabilities remain distinct. A cell covers a square of queries and keys
// and has its largest probability.
static inline void explain_put_attention(Text* out, const ExplainRecord* r) {
    const ExplainSizes* s = &r->sizes;
    int side = 1;
    while (explain_base64_bytes(pow(ceil((double)s->T / side), 2) * s->NH * s->L) > EXPLAIN_ATTENTION_BYTES) side++;
    size_t T = (size_t)s->T, cells = (size_t)((s->T + side - 1) / side), n = (size_t)s->NH * cells * cells;
    unsigned char* map = (unsigned char*)xmalloc(n);
    text_append(out, "{", 1);
    json_put_integer(out, "side", side);
    json_put_key(out, "layers");
    for (int l = 0; l < s->L; l++) {
        const real* p = explain_find(r, "att_probs", l)->values;
        memset(map, 0, n);
        for (size_t i = 0; i < (size_t)s->NH * T * T; i++) {
            size_t head = i / (T * T), query = i / T % T / (size_t)side, key = i % T / (size_t)side;
            unsigned char* cell = &map[(head * cells + query) * cells + key];
            unsigned char byte = (unsigned char)lrint(255 * sqrt(fmin((double)p[i], 1)));
            if (byte > *cell) *cell = byte;
        }
        text_append(out, l ? ",\n" : "[", l ? 2 : 1);
        explain_put_base64(out, map, n);
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
    explain_put_integers(out, "predicted", text->rows, text->count);
    explain_put_integers(out, "targets", text->targets, text->count);
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
    explain_put_array(out, "lens_id", lens->id, n * sizeof *lens->id);
    explain_put_array(out, "lens_p", lens->p, n * sizeof *lens->p);
    explain_put_array(out, "lens_target", lens->target, rows * sizeof *lens->target);
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
        explain_put_array(out, "norms", norms, T * sizeof *norms);
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

static inline void explain_put_facts(Text* out, const Explanation* e, double loss) {
    const ExplainSizes* s = &e->record.sizes;
    json_put_string(out, "model", e->model), json_put_string(out, "precision", FLOATX_NAME);
    json_put_string(out, "device", GPU_BUILD ? "GPU" : "CPU");
    json_put_integer(out, "L", s->L), json_put_integer(out, "NH", s->NH), json_put_integer(out, "C", s->C);
    json_put_integer(out, "V", s->V), json_put_integer(out, "T", s->T), json_put_bool(out, "causal", s->is_causal);
    json_put_integer(out, "parameter_count", (int64_t)e->record.buffers->table.parameters);
    if (e->why_no_loss) json_put_string(out, "why_no_loss", e->why_no_loss);
    else json_put_number(out, "loss", loss);
}

static inline void explain_data(Text* out, const Explanation* e, double loss, Context* ctx) {
    const ExplainRecord* r = &e->record;
    text_append(out, "{", 1);
    explain_put_facts(out, e, loss);
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

// The Makefile turns apps/explain/page.html into the bytes that are included here.
static inline void explain_page(Text* out, const Explanation* e, double loss, Context* ctx) {
    static const unsigned char page[] = {
#include "explain_page.inc"
        0};
    Text data = {NULL, 0, 0};
    explain_data(&data, e, loss, ctx);
    page_put(out, page, &data);
    free(data.text);
}

// ---------------------------------------------------------------------------------------------------------
// Files

static inline char* explain_path(const Explanation* e, const char* name) {
    return xprintf("%s/explain%s%s", e->out, *name ? "/" : "", name);
}

// Create OUT/explain. Ends with an error if it cannot be written.
static inline void explain_check_directory(const Explanation* e) {
    char *directory = explain_path(e, ""), *page = explain_path(e, "explain.html");
    if (make_directories(directory) != 0 || (access(page, W_OK) != 0 && errno != ENOENT) ||
        access(directory, W_OK) != 0)
        die(USAGE, "%s: cannot be written: %s; give another directory with -o", directory, strerror(errno));
    free(directory), free(page);
}

// Activations and their gradients. Returns 0, or -1 with errno.
static inline int explain_write_activations(const Explanation* e, const char* path) {
    const ExplainRecord* r = &e->record;
    SafeTensorsWriter w;
    safetensors_writer_create(&w, path);
    safetensors_writer_metadata(&w, "format", "pt");
    for (size_t i = 0; i < r->count; i++) {
        const ExplainTensor* t = &r->tensors[i];
        const uint64_t shape[] = {t->shape[0], t->shape[1], t->shape[2]};
        safetensors_writer_add(&w, t->name, safetensors_real_dtype(), t->ndim, shape);
    }
    safetensors_writer_begin(&w);
    for (size_t i = 0; i < r->count && !w.error; i++)
        safetensors_writer_append(&w, r->tensors[i].values, explain_elements(&r->tensors[i]) * sizeof(real));
    return safetensors_writer_finish(&w);
}

static inline void explain_written(const char* path, int result) {
    struct stat st;
    if (result != 0) die(FAILED, "%s: cannot be written: %s", path, strerror(errno));
    printf("%s: %.1f MB\n", path, stat(path, &st) == 0 ? 1e-6 * (double)st.st_size : 0);
}

// Remove a file of tensors that this run does not write, so that it is not taken for this text's.
static inline void explain_remove_earlier(const char* path) {
    if (unlink(path) != 0 && errno != ENOENT)
        warn("%s: is of an earlier text and cannot be removed: %s", path, strerror(errno));
}

static inline void explain_write_tensors(const Explanation* e, Context* ctx) {
    const ModelBuffers* b = e->record.buffers;
    char* path = explain_path(e, "activations.safetensors");
    if (e->writes_tensors) explain_written(path, explain_write_activations(e, path));
    else explain_remove_earlier(path);
    free(path);
    path = explain_path(e, "gradients.safetensors");
    if (e->writes_tensors && !e->why_no_loss) {
        HostView grads = explain_gradients(b, ctx);
        const double scale = explain_loss_scale(b, ctx);
        for (size_t i = 0; scale != 1 && i < grads.n; i++) grads.values[i] /= (real)scale;
        TensorPart part = {.prefix = "", .device = b->grads, .type = VIEW_REAL, .host = grads.values};
        FileDigest digest;
        explain_written(path, tensors_write(path, &b->table, &part, 1, &digest, ctx));
        host_view_close(&grads);
    } else explain_remove_earlier(path);
    free(path);
}

// Write all files, print their names, and free the explanation. The loss is in device memory.
static inline void explain_write(Explanation* e, const real* mean_loss, Context* ctx) {
    double loss = model_buffers_number(mean_loss, ctx);
    Text page = {NULL, 0, 0};
    char* path = explain_path(e, "explain.html");
    if (e->why_no_loss) printf("no loss and no backward pass: %s\n", e->why_no_loss);
    else printf("loss %.6f\n", loss);
    explain_page(&page, e, loss, ctx);
    explain_written(path, write_file(path, page.text, page.length));
    explain_write_tensors(e, ctx);
    free(page.text), free(path);
    explain_close(e);
}

#endif
