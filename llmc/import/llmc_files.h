/* llm.c's checkpoints. All numbers are little-endian.
 *
 *   checkpoint     256 x int32   header: [0] magic 20240326, [1] version: 3 float32, 5 bfloat16, [2] positions T,
 *                                [3] vocabulary V, [4] layers L, [5] heads, [6] channels C, [7] Vp, V with padding
 *                  weights       sixteen kinds of tensors one after the other, each kind for all layers; matrices are
 *                                [out, in]; rows V .. Vp - 1 of the first tensor, the token embedding, are padding
 *
 * The files do not state that the model has pre-layernorm blocks, a tied head, tanh-GELU and an epsilon of 1e-5.
 * Checkpoints from before the vocabulary had padding are refused: [7] is 0 there. */
#ifndef LLMC_IMPORT_LLMC_FILES_H
#define LLMC_IMPORT_LLMC_FILES_H

#include "llmc/base/util.h"

enum {
    LLMC_HEADER_INTS = 256,
    LLMC_HEADER_BYTES = 1024,
    LLMC_MAGIC_WEIGHTS = 20240326,
    LLMC_VERSION_FLOAT32 = 3,
    LLMC_VERSION_BFLOAT16 = 5,
    LLMC_KINDS = 16,
    LLMC_MAX_SIZE = 1 << 24
};

// One kind of tensor: a single one, or one of each layer.
typedef struct {
    int in_layers;
    int ndim;
    uint64_t shape[2];  // logical; [1] is 1 for a vector
    uint64_t begin;     // byte in the file of the first layer's tensor
    uint64_t bytes;     // of one layer's tensor, padding included
} LlmcKind;

typedef struct {
    char* file;
    int fd;
    int T, V, L, NH, C, Vp;
    int is_bfloat16;
    LlmcKind kind[LLMC_KINDS];  // in the order of the file
} LlmcWeights;

// ---------------------------------------------------------------------------------------------------------
// Checkpoints

// Compute where the kinds lie. Returns the size of the file, or UINT64_MAX if no file can be so large.
static inline uint64_t llmc_weights_place(LlmcWeights* w) {
    const uint64_t V = (uint64_t)w->V, T = (uint64_t)w->T, C = (uint64_t)w->C;
    const uint64_t kinds[LLMC_KINDS][3] = {
        {0, V, C},     {0, T, C},                                // token and position embeddings
        {1, C, 0},     {1, C, 0},                                // first layernorm
        {1, 3 * C, C}, {1, 3 * C, 0}, {1, C, C},     {1, C, 0},  // attention: Q, K, V and output projection
        {1, C, 0},     {1, C, 0},                                // second layernorm
        {1, 4 * C, C}, {1, 4 * C, 0}, {1, C, 4 * C}, {1, C, 0},  // MLP: up and down projection
        {0, C, 0},     {0, C, 0},                                // last layernorm
    };
    uint64_t at = LLMC_HEADER_BYTES;
    for (int k = 0; k < LLMC_KINDS; k++) {
        LlmcKind* kind = &w->kind[k];
        kind->in_layers = (int)kinds[k][0];
        kind->ndim = kinds[k][2] ? 2 : 1;
        kind->shape[0] = kinds[k][1];
        kind->shape[1] = kinds[k][2] ? kinds[k][2] : 1;
        kind->begin = at;
        // Sizes are below 2^27, so that the bytes of one tensor fit.
        kind->bytes = (k == 0 ? (uint64_t)w->Vp : kind->shape[0]) * kind->shape[1] * (w->is_bfloat16 ? 2 : 4);
        uint64_t all;
        if (__builtin_mul_overflow(kind->bytes, (uint64_t)(kind->in_layers ? w->L : 1), &all) ||
            __builtin_add_overflow(at, all, &at))
            return UINT64_MAX;
    }
    return at;
}

// Open a checkpoint and check its header against its size. Ends with USAGE if it is invalid.
static inline void llmc_weights_open(LlmcWeights* w, const char* path) {
    int32_t header[LLMC_HEADER_INTS];
    uint64_t size;
    memset(w, 0, sizeof *w);
    w->file = xprintf("%s", path);
    w->fd = open_input(path, &size, "checkpoint of llm.c", USAGE);
    if (size < LLMC_HEADER_BYTES)
        die(USAGE,
            "%s: %llu bytes are too few for the header of %d bytes; it is truncated or not a checkpoint of llm.c", path,
            (unsigned long long)size, (int)LLMC_HEADER_BYTES);
    read_input(w->fd, path, header, sizeof header, 0);
    if (header[0] != LLMC_MAGIC_WEIGHTS)
        die(USAGE, "%s: is not a checkpoint of llm.c: its magic number is %d, not %d", path, (int)header[0],
            (int)LLMC_MAGIC_WEIGHTS);
    if (header[1] != LLMC_VERSION_FLOAT32 && header[1] != LLMC_VERSION_BFLOAT16)
        die(USAGE, "%s: is a checkpoint of version %d; %d (float32) and %d (bfloat16) are supported", path,
            (int)header[1], (int)LLMC_VERSION_FLOAT32, (int)LLMC_VERSION_BFLOAT16);
    w->is_bfloat16 = header[1] == LLMC_VERSION_BFLOAT16;

    const struct {
        const char* name;
        int* value;
    } sizes[] = {{"positions", &w->T}, {"tokens", &w->V},   {"layers", &w->L},
                 {"heads", &w->NH},    {"channels", &w->C}, {"tokens with padding", &w->Vp}};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        *sizes[i].value = (int)header[2 + i];
        if (header[2 + i] < 1 || header[2 + i] > LLMC_MAX_SIZE)
            die(USAGE, "%s: its header gives %d %s; allowed: 1..%d", path, (int)header[2 + i], sizes[i].name,
                (int)LLMC_MAX_SIZE);
    }
    if (w->Vp < w->V)
        die(USAGE, "%s: its header gives %d tokens, but %d with padding; the file is damaged", path, w->V, w->Vp);
    if (w->C % w->NH != 0)
        die(USAGE, "%s: its header gives %d channels, which cannot be divided into %d heads", path, w->C, w->NH);

    uint64_t need = llmc_weights_place(w);
    if (need != size)
        die(USAGE,
            "%s: a model of %d layers, %d channels, %d tokens and %d positions needs %llu bytes, but there are "
            "%llu; the file is %s",
            path, w->L, w->C, w->Vp, w->T, (unsigned long long)need, (unsigned long long)size,
            size < need ? "truncated, or its header is damaged" : "longer than its header says, or that is damaged");
}

// The number of tensors in the file.
static inline int llmc_weights_count(const LlmcWeights* w) {
    int count = 0;
    for (int k = 0; k < LLMC_KINDS; k++) count += w->kind[k].in_layers ? w->L : 1;
    return count;
}

static inline void llmc_weights_close(LlmcWeights* w) {
    close(w->fd);
    free(w->file);
    memset(w, 0, sizeof *w);
}

#endif
