/* --embed: one vector for each line of a file, written as a NumPy file, float32 [lines, C]. A vector is the mean of the
 * last hidden states of the line's tokens, or the hidden state of [CLS]. A line that is too long for the model is
 * truncated. An empty line is [CLS] [SEP].
 *
 * Lines are read in windows, tokenized by all threads and sorted by length, so that the lines of a batch are of similar
 * lengths. A batch is filled with lines up to its B * T tokens. The vectors are written in the order of the lines. */
#ifndef APPS_USE_EMBED_H
#define APPS_USE_EMBED_H

#include "apps/use/mlm_texts.h"
#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#endif

#define NUMPY_MAGIC "\x93NUMPY"
enum { EMBED_WINDOW = 4096, EMBED_LENGTH = 8 };  // lines; shortest mean length of lines that fill a batch with tokens

typedef struct {
    const char* text;
    size_t bytes;
    TokenIds ids;
    int number;  // in the window
} EmbedLine;

typedef struct {
    const MlmTextSettings* settings;
    const WordPiece* words;
    int T, C;
    char *text, *path, *temporary;
    size_t size, at;    // bytes of the text; offset of the next window
    size_t lines, cut;  // written; truncated
    FILE* file;
    EmbedLine* line;  // [EMBED_WINDOW] the lines of the window, longest first
    int count, next;  // lines in the window; the first that is in no batch yet
    float* vectors;   // [EMBED_WINDOW, C] in the order of the text
} Embedding;

// What a row of T tokens has room for: with --embed several lines, else one sequence and its `predictions`.
static inline MlmRecipe embed_recipe(const MlmTextSettings* m, int T, int predictions) {
    int lines = max_int(1, T / EMBED_LENGTH);
    MlmRecipe recipe = {.max_predictions = *m->embed ? lines : predictions, .pack = *m->embed ? lines : 1};
    return recipe;
}

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

// Open the text file and the file of vectors, for a model of V tokens and C channels, and sequences of at most T tokens.
static inline Embedding embed_open(const MlmTextSettings* settings, const WordPiece* words, int T, int V, int C) {
    Embedding e;
    size_t lines = 0;
    memset(&e, 0, sizeof e);
    e.settings = settings, e.words = words, e.T = T, e.C = C;
    examples_check_texts(words, V, "--embed");
    if (T < 2) die(USAGE, "-t %d: a sequence of --embed has at least 2 tokens, [CLS] and [SEP]", T);
    e.text = read_file(settings->embed, SIZE_MAX, &e.size, USAGE);
    for (size_t i = 0; i < e.size; i++) lines += e.text[i] == '\n' || i + 1 == e.size;
    if (lines == 0) die(USAGE, "--embed %s: has no lines", settings->embed);
    e.path = embed_path(settings), e.temporary = xprintf("%s.tmp", e.path);
    e.file = fopen(e.temporary, "wb");
    if (!e.file) die(FAILED, "%s: cannot be written: %s", e.temporary, strerror(errno));
    e.line = (EmbedLine*)xcalloc(EMBED_WINDOW, sizeof *e.line);
    e.vectors = (float*)xmalloc(EMBED_WINDOW * (size_t)C * sizeof(float));
    embed_put_header(&e, lines);
    return e;
}

static inline int embed_compare(const void* left, const void* right) {
    const EmbedLine *a = (const EmbedLine*)left, *b = (const EmbedLine*)right;
    const size_t n = a->ids.count, m = b->ids.count;
    return n == m ? a->number - b->number : n < m ? 1 : -1;
}

// Read, tokenize and sort the lines of the next window.
static inline void embed_read(Embedding* e) {
    size_t cut = 0, longest = (size_t)e->T - 1;  // before [SEP]
    for (e->next = e->count = 0; e->count < EMBED_WINDOW && e->at < e->size; e->count++) {
        EmbedLine* line = &e->line[e->count];
        const char *text = e->text + e->at, *end = (const char*)memchr(text, '\n', e->size - e->at);
        line->text = text, line->bytes = end ? (size_t)(end - text) : e->size - e->at, line->number = e->count;
        e->at += line->bytes + (end != NULL);
        if (line->bytes > 0 && text[line->bytes - 1] == '\r') line->bytes--;
    }
#pragma omp parallel for schedule(dynamic, 16) reduction(+ : cut)
    for (int i = 0; i < e->count; i++) {
        TokenIds* ids = &e->line[i].ids;
        ids->count = 0;
        token_ids_add(ids, e->words->cls);
        wordpiece_encode(ids, e->words, e->line[i].text, e->line[i].bytes);
        if (ids->count > longest) cut++, ids->count = longest;
        token_ids_add(ids, e->words->sep);
    }
    e->cut += cut;
    qsort(e->line, (size_t)e->count, sizeof *e->line, embed_compare);
}

// Fill the batch with the next lines. Returns 0 if there are none.
static inline int embed_next(Embedding* e, MlmBatch* b) {
    if (e->next == e->count) embed_read(e);
    mlm_batch_begin(b, 0);
    for (; e->next < e->count && b->count < b->masked_room; e->next++) {
        const TokenIds* ids = &e->line[e->next].ids;
        if ((size_t)b->rows + ids->count > (size_t)b->room) break;
        mlm_batch_append(b, ids->id, (uint32_t)ids->count, 0);
        mlm_batch_end(b, -1);
    }
    return b->count > 0;
}

// Channel c of the vector of sequence s: the mean of its rows of x [N, C], or its first row. Sums in double.
HOST_DEVICE static inline real embed_mean(const floatX* x, const int* cu_seqlens, int s, int c, int C, int pool) {
    int begin = cu_seqlens[s], end = pool == POOL_CLS ? begin + 1 : cu_seqlens[s + 1];
    double sum = 0;
    for (int i = begin; i < end; i++) sum += (double)(float)x[(size_t)i * (size_t)C + (size_t)c];
    return (real)(sum / (end - begin));
}

// vectors [S, C] of all sequences. GPU: a thread a channel; grid S x blocks of channels.
#ifdef __CUDACC__
static __global__ void embed_pool_kernel(real* vectors, const floatX* x, const int* cu_seqlens, int C, int pool) {
    int s = (int)blockIdx.x, c = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    if (c < C) vectors[(size_t)s * (size_t)C + (size_t)c] = embed_mean(x, cu_seqlens, s, c, C, pool);
}
#endif

static inline void embed_pool(real* vectors, const floatX* x, const Sequences* s, int C, int pool, Context* ctx) {
    double n = (double)s->rows * C;
    Scope scope = scope_open(ctx, "embed_pool", n, n * sizeof(floatX), "N=%d S=%d C=%d", s->rows, s->count, C);
#ifdef __CUDACC__
    dim3 grid((unsigned)s->count, blocks_for((size_t)C, 256));
    embed_pool_kernel<<<grid, 256, 0, ctx->stream>>>(vectors, x, s->cu_seqlens, C, pool);
    cudaCheck(cudaGetLastError());
#else
#pragma omp parallel for schedule(static)
    for (int i = 0; i < s->count * C; i++) vectors[i] = embed_mean(x, s->cu_seqlens, i / C, i % C, C, pool);
#endif
    scope_close(&scope);
}

// Take the vectors of the batch's sequences. Write the window's after its last batch. `x` [rows, C] on the device: the
// sequences' last hidden states.
static inline void embed_take(Embedding* e, const floatX* x, const Sequences* s, Context* ctx) {
    size_t C = (size_t)e->C, n = (size_t)s->count * C;
    real* vectors = (real*)device_scratch(ctx, n * sizeof(real));
    embed_pool(vectors, x, s, e->C, e->settings->pool, ctx);
    HostView view = host_view_open(vectors, n, VIEW_REAL);
    host_view_read(ctx, &view);
    for (int i = 0; i < s->count; i++) {
        float* to = e->vectors + (size_t)e->line[e->next - s->count + i].number * C;
        for (size_t c = 0; c < C; c++) to[c] = (float)view.values[(size_t)i * C + c];
    }
    host_view_close(&view);
    if (e->next < e->count) return;
    for (size_t i = 0; i < (size_t)e->count * C; i++)
        if (!isfinite(e->vectors[i]))
            die(STOPPED_BY_NAN,
                "--embed: the vector of line %zu is not finite; take an earlier checkpoint or another model",
                e->lines + i / C + 1);
    embed_put(e, e->vectors, (size_t)e->count * C * sizeof(float));
    e->lines += (size_t)e->count;
}

// Complete and report the file.
static inline void embed_close(Embedding* e) {
    int bad = fflush(e->file) != 0 || fsync(fileno(e->file)) != 0;
    bad |= fclose(e->file) != 0;
    if (bad || rename_into_place(e->temporary, e->path) != 0) predictions_fail(e->temporary, e->path);
    printf("%s: %zu vectors of %d channels", e->path, e->lines, e->C);
    if (e->cut) printf("; %zu line%s cut to %d tokens", e->cut, e->cut > 1 ? "s were" : " was", e->T);
    printf("\n");
    for (int i = 0; i < EMBED_WINDOW; i++) token_ids_free(&e->line[i].ids);
    free(e->text), free(e->path), free(e->temporary), free(e->line), free(e->vectors);
}

#endif
