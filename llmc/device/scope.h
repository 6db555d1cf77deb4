/* Scopes: every launcher opens one, with its name, its shapes and the amount of work.
 *
 *     Scope scope = scope_open(ctx, "layernorm_forward", LAYERNORM_FORWARD_FLOPS(N, C), bytes, "N=%d C=%d", N, C);
 *     ... the work ...
 *     scope_close(&scope);
 *
 * An observer attached to the context sees each scope when it opens and when it closes. In a plain run there is none,
 * and nothing is formatted or stored. */
#ifndef LLMC_DEVICE_SCOPE_H
#define LLMC_DEVICE_SCOPE_H

#include "llmc/device/device.h"

typedef struct {
    Context* ctx;    // NULL: nobody observes, and the other fields are not set
    const char* op;  // the launcher's name
    Direction direction;
    int layer;        // -1 outside the blocks
    char shapes[64];  // "N=256 IC=768 OC=3072"
    double flops;     // as counted in the op's header
    double bytes;     // minimum memory traffic: every operand once
} Scope;

typedef struct Observer {
    void (*open)(void* state, const Scope* scope);
    void (*close)(void* state, const Scope* scope);
    void* state;
    struct Observer* next;  // set by scope_attach()
} Observer;

static inline const char* direction_name(Direction direction) {
    static const char* const names[DIRECTIONS] = {"forward", "backward", "optimizer", "communication"};
    return names[direction];
}

// Attach an observer. Several may be attached; the newest is the first to be detached.
static inline void scope_attach(Context* ctx, Observer* observer) {
    observer->next = ctx->observer;
    ctx->observer = observer;
}

static inline void scope_detach(Context* ctx, const Observer* observer) {
    CHECK(ctx->observer == observer);
    ctx->observer = observer->next;
}

// The launches that follow belong to this optimizer step, from 1; -1: to none (validation, sampling).
static inline void scope_step(Context* ctx, int64_t step) { ctx->step = step; }

// The launches that follow belong to this direction and layer (-1: outside the blocks).
static inline void scope_at(Context* ctx, Direction direction, int layer) {
    ctx->direction = direction;
    ctx->layer = layer;
}

__attribute__((format(printf, 5, 6))) static inline Scope scope_open(Context* ctx, const char* op, double flops,
                                                                     double bytes, const char* shapes, ...) {
    Scope scope;
    scope.ctx = NULL;
    if (!ctx->observer) return scope;
    va_list args;
    va_start(args, shapes);
    vsnprintf(scope.shapes, sizeof scope.shapes, shapes, args);
    va_end(args);
    scope.ctx = ctx, scope.op = op;
    scope.direction = ctx->direction, scope.layer = ctx->layer;
    scope.flops = flops, scope.bytes = bytes;
    for (Observer* o = ctx->observer; o; o = o->next) o->open(o->state, &scope);
    return scope;
}

static inline void scope_close(const Scope* scope) {
    for (Observer* o = scope->ctx ? scope->ctx->observer : NULL; o; o = o->next) o->close(o->state, scope);
}

#endif
