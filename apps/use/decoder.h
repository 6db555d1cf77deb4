/* What texts that are decoded together keep on the device: their newest tokens, keys and values, and the graph of the
 * pass that computes the next tokens. */
#ifndef APPS_USE_DECODER_H
#define APPS_USE_DECODER_H

#include "apps/use/draw.h"
#include "apps/use/generate.h"
#include "apps/use/linear_decode.h"

typedef struct {
    DecodeShape shape;     // of the group of texts that is decoded
    void* memory;          // [bytes] of all arrays:
    floatX *stream, *qkv;  // of the newest tokens: the residual stream [N, C], and [N, 3C]
    floatX* cache;         // [L, N, T, 3C]
    Newest newest;
    size_t bytes;
    Staging drawn;        // the memory at newest.drawn
    Readback arrived[2];  // the events of its two halves
    StepGraph graph;
} Decoder;

// Allocate for as many of g->texts as fit, and lower that. `shape`: N is not read; L: layers.
static inline void decoder_open(Decoder* d, Generation* g, DecodeShape shape, int L, Run* r) {
    size_t row = 3 * (size_t)shape.NH * (size_t)shape.HS, text = (size_t)L * (size_t)shape.T * row + 2 * row;
    double fit = 0.9 * (double)device_memory_available() / (double)(text * sizeof(floatX));
    g->texts = max_int((int)fmin(fit, min_int(g->texts, attention_decode_texts(shape.NH))), 1);
    size_t n = (size_t)g->texts, numbers = round_up(n * (sizeof(uint64_t) + 3 * sizeof(int)), 256);
    memset(d, 0, sizeof *d);
    d->shape = shape;
    d->bytes = numbers + n * text * sizeof(floatX);
    d->memory = device_alloc(&r->ctx, d->bytes, "text generation");
    d->newest.key = (uint64_t*)d->memory, d->newest.token = (int*)(d->newest.key + n);
    d->newest.position = d->newest.token + n, d->newest.count = d->newest.position + n;
    d->stream = (floatX*)((char*)d->memory + numbers), d->qkv = d->stream + n * row, d->cache = d->qkv + n * row;
    staging_open(&d->drawn, n * sizeof(int));
    for (int i = 0; i < 2; i++) d->newest.drawn[i] = (int*)d->drawn.buffers[i], readback_open(&d->arrived[i]);
    step_graph_open(&d->graph, &r->settings, 1);
}

static inline void decoder_close(Decoder* d) {
    step_graph_close(&d->graph);
    for (int i = 0; i < 2; i++) readback_close(&d->arrived[i]);
    staging_close(&d->drawn);
    device_free(d->memory, d->bytes);
}

// Keys and values of layer l: [N, T, 3C].
static inline floatX* decoder_cache(const Decoder* d, int l) {
    const DecodeShape* s = &d->shape;
    return d->cache + (size_t)l * (size_t)s->N * (size_t)s->T * 3 * (size_t)s->NH * (size_t)s->HS;
}

// Take what a pass over the `rows` tokens of text n's window computed: the residual stream of the last one.
static inline void decoder_take_stream(Decoder* d, int n, const floatX* stream, int rows, Context* ctx) {
    size_t C = (size_t)d->shape.NH * (size_t)d->shape.HS;
    decode_copy(d->stream + (size_t)n * C, stream + (size_t)(rows - 1) * C, C, ctx);
}

// The same for layer l's keys and values.
static inline void decoder_take_layer(Decoder* d, int n, int l, const floatX* qkv, int rows, Context* ctx) {
    size_t row = 3 * (size_t)d->shape.NH * (size_t)d->shape.HS;
    decode_copy(decoder_cache(d, l) + (size_t)n * (size_t)d->shape.T * row, qkv, (size_t)rows * row, ctx);
}

// After the passes over windows of `rows` tokens.
static inline void decoder_begin(Decoder* d, const Generation* g, int rows, Context* ctx) {
    int position[GENERATION_TEXTS], count[GENERATION_TEXTS];
    size_t n = (size_t)d->shape.N;
    for (size_t i = 0; i < n; i++) position[i] = rows - 1, count[i] = g->count;
    device_upload(ctx, d->newest.position, position, n * sizeof *position);
    device_upload(ctx, d->newest.count, count, n * sizeof *count);
    device_upload(ctx, d->newest.key, g->key, n * sizeof *g->key);
    device_synchronize(ctx);
    step_graph_restart(&d->graph);  // scratch may have grown
}

// Wait for the next token of each text, and append it.
static inline void decoder_read(Decoder* d, Generation* g) {
    readback_wait(&d->arrived[g->count % 2]);
    generation_append(g, d->newest.drawn[g->count % 2]);
}

#endif
