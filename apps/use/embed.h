/* --embed: one vector for each line of a file, written as a NumPy file, float32 [lines, C]. A vector is the mean of the
 * last hidden states of the line's tokens, or the hidden state of [CLS]. A line that is too long for the model is
 * truncated. An empty line is [CLS] [SEP]. */
#ifndef APPS_USE_EMBED_H
#define APPS_USE_EMBED_H

#include "apps/use/mlm_texts.h"

#define NUMPY_MAGIC "\x93NUMPY"

typedef struct {
    const MlmTextSettings* settings;
    const WordPiece* words;
    int B, T, C;
    char *text, *path, *temporary;
    size_t size, at;  // bytes of the text; offset of the next line
    size_t lines, cut;
    FILE* file;
    TokenIds ids;
    float* vector;  // [C]
} Embedding;

// Name of the file to write (caller frees).
static inline char* embed_path(const MlmTextSettings* m) {
    return *m->vectors ? xprintf("%s", m->vectors) : xprintf("%s.npy", m->embed);
}

// End with USAGE if there are no weights for --fill or --embed, or if --embed has several ranks or no file to write to.
static inline void embed_check_model(const MlmTextSettings* m, const char* weights, int ranks) {
    const char* flag = *m->embed ? "--embed" : "--fill";
    if ((*m->embed || *m->fill) && !weights)
        die(USAGE, "%s needs a trained model; name it with -e, or its run with -o and -y 1", flag);
    if (!*m->embed) return;
    if (ranks > 1) die(USAGE, "--embed %s: runs in a single process; start it without other ranks", m->embed);
    char* path = embed_path(m);
    predictions_refuse_input("--vectors", path, m->embed);
    predictions_check(*m->vectors ? "--vectors" : "--embed: the file", path, NUMPY_MAGIC);
    free(path);
}

static inline void embed_put(Embedding* e, const void* data, size_t n) {
    if (fwrite(data, 1, n, e->file) != n) predictions_fail(e->temporary, e->path);
}

// Write the header of NumPy's format, version 1.0.
static inline void embed_put_header(Embedding* e, size_t lines) {
    enum { PREFIX = 10, SIZE = 128 };  // the data begin at a multiple of 64 bytes
    char header[SIZE + 1];
    memset(header, ' ', sizeof header);
    memcpy(header, NUMPY_MAGIC "\x01\x00", 8);
    header[8] = SIZE - PREFIX, header[9] = 0;
    char* shape = xprintf("{'descr': '<f4', 'fortran_order': False, 'shape': (%zu, %d), }", lines, e->C);
    CHECK(strlen(shape) < SIZE - PREFIX);
    memcpy(header + PREFIX, shape, strlen(shape));
    header[SIZE - 1] = '\n';
    embed_put(e, header, SIZE);
    free(shape);
}

// Open the text file and the file of vectors, for a model of V tokens and C channels, and batches of B sequences of T
// tokens.
static inline Embedding embed_open(const MlmTextSettings* settings, const WordPiece* words, int B, int T, int V,
                                   int C) {
    Embedding e;
    size_t lines = 0;
    memset(&e, 0, sizeof e);
    e.settings = settings, e.words = words, e.B = B, e.T = T, e.C = C;
    examples_check_texts(words, V, "--embed");
    if (T < 2) die(USAGE, "-t %d: a sequence of --embed has at least 2 tokens, [CLS] and [SEP]", T);
    e.text = read_file(settings->embed, SIZE_MAX, &e.size, USAGE);
    for (size_t i = 0; i < e.size; i++) lines += e.text[i] == '\n' || i + 1 == e.size;
    if (lines == 0) die(USAGE, "--embed %s: has no lines", settings->embed);
    e.path = embed_path(settings), e.temporary = xprintf("%s.tmp", e.path);
    e.file = fopen(e.temporary, "wb");
    if (!e.file) die(FAILED, "%s: cannot be written: %s", e.temporary, strerror(errno));
    e.vector = (float*)xmalloc((size_t)C * sizeof(float));
    embed_put_header(&e, lines);
    return e;
}

// Fill the batch with the next lines. Returns 0 if there are none.
static inline int embed_next(Embedding* e, MlmBatch* b) {
    mlm_batch_begin(b, 0);
    while (b->count < e->B && e->at < e->size) {
        const char *line = e->text + e->at, *end = (const char*)memchr(line, '\n', e->size - e->at);
        size_t n = end ? (size_t)(end - line) : e->size - e->at;
        e->at += n + (end != NULL);
        if (n > 0 && line[n - 1] == '\r') n--;
        e->ids.count = 0;
        token_ids_add(&e->ids, e->words->cls);
        wordpiece_encode(&e->ids, e->words, line, n);
        if (e->ids.count > (size_t)e->T - 1) e->cut++, e->ids.count = (size_t)e->T - 1;
        token_ids_add(&e->ids, e->words->sep);
        mlm_batch_append(b, e->ids.id, (uint32_t)e->ids.count, 0);
        mlm_batch_end(b, -1);
        e->lines++;
    }
    return b->count > 0;
}

// Compute the vector of one sequence from its hidden states [rows, C].
static inline void embed_pool(Embedding* e, const real* x, int rows) {
    double sum_sq = 0;
    for (int c = 0; c < e->C; c++) {
        double sum = 0;
        for (int i = 0; i < rows; i++) sum += (double)x[(size_t)i * (size_t)e->C + (size_t)c];
        e->vector[c] = (float)(sum / rows);
        sum_sq += (double)e->vector[c] * (double)e->vector[c];
    }
    if (!isfinite(sum_sq))
        die(STOPPED_BY_NAN,
            "--embed: the vector of line %zu is not finite; take an earlier checkpoint or another model", e->lines);
}

// Write the vectors of the batch's sequences. `hidden` [rows, C] on the device: their last hidden states.
static inline void embed_write(Embedding* e, const MlmBatch* b, floatX* hidden, Context* ctx) {
    HostView view = host_view_open(hidden, (size_t)b->rows * (size_t)e->C, VIEW_FLOATX);
    host_view_read(ctx, &view);
    e->lines -= (size_t)b->count;
    for (int i = 0; i < b->count; i++) {
        int rows = e->settings->pool == POOL_CLS ? 1 : b->cu_seqlens[i + 1] - b->cu_seqlens[i];
        e->lines++;
        embed_pool(e, view.values + (size_t)b->cu_seqlens[i] * (size_t)e->C, rows);
        embed_put(e, e->vector, (size_t)e->C * sizeof(float));
    }
    host_view_close(&view);
}

// Complete and report the file.
static inline void embed_close(Embedding* e) {
    int bad = fflush(e->file) != 0 || fsync(fileno(e->file)) != 0;
    bad |= fclose(e->file) != 0;
    if (bad || rename_into_place(e->temporary, e->path) != 0) predictions_fail(e->temporary, e->path);
    printf("%s: %zu vectors of %d channels", e->path, e->lines, e->C);
    if (e->cut) printf("; %zu line%s cut to %d tokens", e->cut, e->cut > 1 ? "s were" : " was", e->T);
    printf("\n");
    token_ids_free(&e->ids);
    free(e->text), free(e->path), free(e->temporary), free(e->vector);
}

#endif
