/* Taps: copies of tensors, made on the host as soon as the op that wrote them has been launched. A trainer overwrites
 * many of its tensors (a residual buffer first holds a branch's output, one buffer of gradients serves all layers), so
 * afterwards is too late.
 *
 * The points are listed in launch order. A scope that closes (scope.h) is compared with the next point only: other ops
 * may run in between, but the listed ones must run in this order. After the last op `next` must equal `count`. */
#ifndef LLMC_DEVICE_TAP_H
#define LLMC_DEVICE_TAP_H

#include "llmc/device/host_view.h"

// A tensor [rows, columns] whose rows are `stride` elements apart on the device.
typedef struct {
    void* device;
    ViewType type;
    size_t rows, columns, stride;
    real* values;  // [rows, columns] on the host, allocated by the copy
} TapCopy;

typedef struct {
    const char* op;
    Direction direction;
    int layer;          // -1 outside the blocks
    int first, copies;  // of the tap's copies
    size_t scope;       // index of its record in the scope log, once it has run
} TapPoint;

typedef struct Tap {
    TapPoint* points;
    size_t count, next;
    TapCopy* copies;
} Tap;

static inline void tap_copy(TapCopy* c, Context* ctx) {
    HostView view = host_view_open(c->device, c->rows * c->stride, c->type);
    c->values = (real*)xmalloc(c->rows * c->columns * sizeof(real));
    host_view_read(ctx, &view);
    for (size_t r = 0; r < c->rows; r++)
        memcpy(c->values + r * c->columns, view.values + r * c->stride, c->columns * sizeof(real));
    host_view_close(&view);
}

// An op has been launched: copy what the next point lists, if this op is that point.
static inline void tap_take(Tap* t, const char* op, Direction direction, int layer, size_t scope, Context* ctx) {
    TapPoint* p = &t->points[t->next];
    if (t->next == t->count || direction != p->direction || layer != p->layer || strcmp(op, p->op) != 0) return;
    for (int i = 0; i < p->copies; i++) tap_copy(&t->copies[p->first + i], ctx);
    p->scope = scope;
    t->next++;
}

static inline void tap_free(Tap* t) {
    for (size_t i = 0; i < t->count; i++)
        for (int k = 0; k < t->points[i].copies; k++) free(t->copies[t->points[i].first + k].values);
    free(t->points), free(t->copies);
    memset(t, 0, sizeof *t);
}

#endif
