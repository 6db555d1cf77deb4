/* What --explain writes to OUT/explain: explain.html and, with --explain-tensors 1, two files of tensors:
 *
 *   activations.safetensors  everything that the forward pass computed, and the gradients of activations ("grad.")
 *   gradients.safetensors    the gradients of the parameters, under the names and in the layout of the model's file */
#ifndef LLMC_EXPLAIN_FILES_H
#define LLMC_EXPLAIN_FILES_H

#include "llmc/explain/page.h"

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

// Write all files, print their names, and free the explanation. Losses are in device memory; pair_loss NULL: none.
static inline void explain_write(Explanation* e, const real* token_loss, const real* pair_loss, Context* ctx) {
    double loss = model_buffers_number(token_loss, ctx),
           next_loss = pair_loss ? model_buffers_number(pair_loss, ctx) : 0;
    Text page = {NULL, 0, 0};
    char* path = explain_path(e, "explain.html");
    if (e->why_no_loss) printf("no loss and no backward pass: %s\n", e->why_no_loss);
    else printf("loss %.6f\n", loss + next_loss);
    if (e->why_no_next) printf("no next-sentence prediction: %s\n", e->why_no_next);
    explain_page(&page, e, loss, next_loss, ctx);
    explain_written(path, write_file(path, page.text, page.length));
    explain_write_tensors(e, ctx);
    free(page.text), free(path);
    explain_close(e);
}

#endif
