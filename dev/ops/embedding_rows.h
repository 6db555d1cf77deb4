/* embedding_rows: lookups sorted by row, and the updates of rows by their sums. */
#ifndef DEV_OPS_EMBEDDING_ROWS_H
#define DEV_OPS_EMBEDDING_ROWS_H

#include "dev/recsys/ops/embedding_rows.h"
#include "op.h"

enum { ROWS_SGD, ROWS_ADAM, ROWS_LAZY };  // kinds

typedef struct {
    RowSegments segments, want;
    OptimizerSettings settings;
    AdamWStep* step;
} RowsOwn;

// N lookups of V rows of C elements; of gradients, rows are S apart. Most rows are rare, some have many lookups, and
// some have none.
OP_FN(rows_prepare) {
    RowsOwn* o = (RowsOwn*)(k->own = case_memory(k->h, sizeof *o));
    int N = k->N, rows = k->V;
    for (size_t i = 0; i < k->v.n; i++) k->v.initial[i] = (real)fabs((double)k->v.initial[i]);
    for (size_t i = 0; i < k->dx.n; i++) k->dx.host[i] /= (real)sqrt(N);
    array_restore(k->v), array_upload(k->dx);
    int* index = k->index = int_array(k->h, (size_t)N);
    for (int i = 0; i < N; i++)
        index[i] = random_below(k->h, 3) ? random_below(k->h, rows) / 2 * 2 : random_below(k->h, 3) * rows / 3;
    for (int i = 0; i < N && k->is_bench; i++) index[i] = random_below(k->h, rows);
    o->want = (RowSegments){.N = N, .rows = rows};
    o->want.source = (int*)case_memory(k->h, (size_t)N * sizeof(int));
    o->want.begin = (int*)case_memory(k->h, ((size_t)rows + 1) * sizeof(int));
    row_segments_ref(o->want, index);
    k->index = op_ints(k, index, N);
    o->segments = row_segments_alloc(N, rows, k->ctx);
    o->settings = (OptimizerSettings){.lr = 0.01, .beta1 = 0.25, .beta2 = 0.5, .eps = 1e-8};
    o->step = (AdamWStep*)pinned_memory(k->h, sizeof *o->step);
    *o->step = adamw_step(1, 1, 3, o->settings);
}

OP_FN(rows_run) {
    RowsOwn* o = OP_OWN(RowsOwn);
    EmbeddingTable t = {k->w.device_real, HAS_DEVICE_MEMORY ? k->params.device : k->w.device, k->m.device_real,
                        k->v.device_real, k->C};
    RowGradients dx = {k->dx.device, (size_t)k->S};
    row_segments_begin(&o->segments, k->index, k->N, k->kind == ROWS_SGD ? NO_STARTS : WITH_STARTS, k->ctx);
    row_segments_wait(&o->segments, k->ctx);
    if (k->kind == ROWS_SGD) embedding_sgd(t, dx, o->segments, o->settings.lr, o->step, k->ctx);
    else embedding_adam(t, dx, o->segments, o->settings, k->kind == ROWS_LAZY ? LAZY : DENSE, o->step, k->ctx);
}

// `params`: on a GPU with 16 bits, the rows that are updated, rounded.
OP_FN(rows_want) {
    const RowsOwn* o = OP_OWN(RowsOwn);
    real* const state[3] = {k->w.want, k->m.want, k->v.want};
    size_t stride = (size_t)k->S, C = (size_t)k->C;
    if (k->kind == ROWS_SGD) embedding_sgd_ref(state[0], k->dx.host, stride, o->want, k->C, o->settings.lr);
    else
        embedding_adam_ref(state, k->dx.host, stride, o->want, k->C, o->settings, 3,
                           k->kind == ROWS_LAZY ? LAZY : DENSE);
    for (int r = 0; r < k->V && sizeof(floatX) < sizeof(real); r++)
        if (k->kind == ROWS_ADAM || o->want.begin[r] < o->want.begin[r + 1])
            memcpy(k->params.want + (size_t)r * C, k->w.want + (size_t)r * C, C * sizeof(real));
}

OP_FN(rows_before_skipped) { OP_OWN(RowsOwn)->step->is_taken = 0; }
OP_FN(rows_want_skipped) { (void)k; }

OP_FN(rows_after) {
    device_synchronize(k->ctx);
    row_segments_free(&OP_OWN(RowsOwn)->segments);
}

static const Arg ROWS_ARGS[] =
    ARGS(ARG(w, "V C", IN_OUT, 1, 1e-5), ARG(m, "V C", IN_OUT, 0.1, 1e-5), ARG(v, "V C", IN_OUT, 0.1, 1e-5),
         ARG_AS("copy", params, "V C", IN_OUT, 1, 1e-5), ARG(dx, "N S", IN, 1));
// Sorts of one launch and of several, by one digit up to three; and by CUB.
static const int ROWS_SIZES[][4] = {{1, 1, 8, 16},        {700, 90, 128, 136},   {5000, 300, 64, 72},
                                    {6000, 70000, 8, 16}, {9000, 200, 132, 140}, {270000, 70000, 8, 16}};
static const int ROWS_GPU[][4] = {{851968, 2632500, 128, 136}}, ROWS_CPU[][4] = {{53248, 164000, 128, 136}};

static const Op ROWS = {
    OP_OF("embedding_rows", "N V C S", ROWS_ARGS, ROWS_SIZES), OP_BENCH(ROWS_GPU, ROWS_CPU),
    .passes = {{"update", "w m v copy", rows_run, rows_want, NULL, rows_after},
               {"skipped", "w m v copy", rows_run, rows_want_skipped, rows_before_skipped, rows_after}},
    .prepare = rows_prepare, .kinds = {"sgd", "adam", "adam_lazy"}};

#endif
