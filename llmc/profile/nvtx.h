/* NVTX ranges: an observer of scopes that shows nsys and ncu every launch under nested names:
 *
 *     step 12 / backward / layer 3 / layernorm_backward N=65536 C=768
 *
 * It is attached only where such a tool is. A step, direction or layer ends when a scope of another one opens. */
#ifndef LLMC_PROFILE_NVTX_H
#define LLMC_PROFILE_NVTX_H

#include "llmc/device/scope.h"
#ifdef __CUDACC__
#include <nvtx3/nvToolsExt.h>
#endif

enum { NVTX_STEP, NVTX_DIRECTION, NVTX_LAYER, NVTX_LEVELS };

typedef struct {
    Observer observer;
    int64_t open[NVTX_LEVELS];  // the step, direction and layer whose ranges are open; -1: none
    int ops;                    // open ranges of ops, inside of those
} NvtxRanges;

#ifdef __CUDACC__
static inline int nvtx_tool_is_attached(void) { return nvtxDomainCreateA("llmc") != NULL; }

// Close the ranges that are not in `to`, and open those that are missing.
static inline void nvtx_move(NvtxRanges* n, const int64_t* to) {
    int level = 0;
    while (level < NVTX_LEVELS && n->open[level] == to[level]) level++;
    for (int i = level; i < NVTX_LEVELS; i++)
        if (n->open[i] >= 0) nvtxRangePop();
    for (; level < NVTX_LEVELS; level++) {
        char name[32];
        n->open[level] = to[level];
        if (to[level] < 0) continue;
        snprintf(name, sizeof name, level == NVTX_STEP ? "step %lld" : "layer %lld", (long long)to[level]);
        nvtxRangePushA(level == NVTX_DIRECTION ? direction_name((Direction)to[level]) : name);
    }
}

static inline void nvtx_scope_open(void* state, const Scope* scope) {
    NvtxRanges* n = (NvtxRanges*)state;
    const int64_t to[] = {scope->ctx->step > 0 ? scope->ctx->step : -1, scope->direction, scope->layer};
    char name[128];
    if (n->ops++ == 0) nvtx_move(n, to);
    snprintf(name, sizeof name, "%s %s", scope->op, scope->shapes);
    nvtxRangePushA(name);
}

static inline void nvtx_scope_close(void* state, const Scope* scope) {
    (void)scope;
    ((NvtxRanges*)state)->ops--;
    nvtxRangePop();
}

static inline void nvtx_open(NvtxRanges* n, Context* ctx) {
    NvtxRanges none = {.observer = {nvtx_scope_open, nvtx_scope_close, n, NULL}, .open = {-1, -1, -1}, .ops = 0};
    *n = none;
    if (nvtx_tool_is_attached()) scope_attach(ctx, &n->observer);
}

static inline void nvtx_close(NvtxRanges* n, Context* ctx) {
    const int64_t none[] = {-1, -1, -1};
    if (ctx->observer != &n->observer) return;
    nvtx_move(n, none);
    scope_detach(ctx, &n->observer);
}
#else
static inline void nvtx_open(NvtxRanges* n, Context* ctx) { (void)n, (void)ctx; }
static inline void nvtx_close(NvtxRanges* n, Context* ctx) { (void)n, (void)ctx; }
#endif

#endif
